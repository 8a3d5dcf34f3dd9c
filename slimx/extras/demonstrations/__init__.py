"""Training of answers that prompts have."""
