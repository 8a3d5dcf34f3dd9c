"""Files of prompts in other forms than JSON lines."""
