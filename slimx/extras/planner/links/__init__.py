"""Bytes that a publication of weights transfers, and the seconds that links need for them."""
