"""Answers of engines as binary columns."""
