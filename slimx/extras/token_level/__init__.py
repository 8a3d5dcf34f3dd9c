"""Algorithms whose advantages differ from token to token."""
