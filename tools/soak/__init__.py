"""A long run of tiny steps whose processes are killed at random: nothing grows, and no prompt is lost."""
