"""Tasks in a terminal: the model works in a box by a shell and by edits, and tests in a fresh box judge what it did."""
