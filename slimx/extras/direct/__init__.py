"""Direct transport: every trainer rank writes what an engine needs of it into memory beside that engine, over NIXL."""

SLOTS = 2
"""Buckets for which either end registers memory: a sender packs one while the other is under way, a receiver proves one
while the other comes."""
