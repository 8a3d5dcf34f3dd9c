"""Conversations and their tokens: turns, chat templates, and parts of responses."""
