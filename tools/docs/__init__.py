"""Makes the pages of docs/ that are written by a program."""
