"""Servers that span several machines."""
