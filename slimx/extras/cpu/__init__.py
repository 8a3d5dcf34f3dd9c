"""Lets trainers and engines run on machines without a GPU."""
