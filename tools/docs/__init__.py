"""Generates pages of docs/."""
