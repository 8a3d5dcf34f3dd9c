"""Algorithms whose advantages or losses differ from token to token."""
