"""Direct transport (`publish.transport: nixl`): every trainer rank writes the bytes that an engine needs from it
directly into memory on the engine's machine, over NVIDIA's NIXL.

Terms. A *transfer* is the sending of one publication, numbered from 1. A *receiver* is the memory of an engine on one
machine, or of one of its GPUs, into which trainer ranks write. A *run* is a contiguous range of bytes: those of one
bucket that one trainer rank packs for one engine rank."""

SLOTS = 2
"""Number of buckets that fit into the memory of each sender and of each receiver: a sender packs one bucket while
another is in flight, and a receiver verifies one while another arrives."""
