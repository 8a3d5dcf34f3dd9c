"""Adapters for unmodified environments and tools of other projects, one module per project or protocol."""
