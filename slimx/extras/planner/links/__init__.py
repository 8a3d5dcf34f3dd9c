"""Bytes of a publication, and the time that links need for them."""
