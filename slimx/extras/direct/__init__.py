"""Direct transport: every trainer rank writes the bytes that an engine needs from it into memory on the engine's
machine, over NIXL."""

SLOTS = 2
"""Number of buckets for which each end registers memory: a sender packs one while the other is in flight, a receiver
verifies one while the other arrives."""
