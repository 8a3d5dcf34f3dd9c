"""Conversations and their token ids: messages, chat templates, and parts of responses."""
