"""Conversations and their tokens: turns, chat templates, and responses in parts."""
