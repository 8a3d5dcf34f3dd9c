"""Built-in reward hooks: mathematics, multiple choice, patterns, instruction following, judges, web services."""
