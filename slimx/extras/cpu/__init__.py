"""Trainers and engines on machines without a GPU."""
