"""Servers that span several nodes."""
