"""Files of prompts in other formats than JSON lines."""
