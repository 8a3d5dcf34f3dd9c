"""How a packed bucket reaches the engines."""
