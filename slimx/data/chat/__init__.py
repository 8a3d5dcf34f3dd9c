"""Conversations and their token ids: messages, chat templates, and the turns and final answers of responses."""
