"""Built-in reward hooks: mathematics, choices, patterns, instructions, judges."""
