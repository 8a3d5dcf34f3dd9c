"""Effects of a configuration's loss terms, measured on a small synthetic batch."""
