"""Files of prompts: their rows, whatever the format, and how a row becomes a prompt."""
