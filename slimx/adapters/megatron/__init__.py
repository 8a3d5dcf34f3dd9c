"""Adapters for megatron-core: attention, layers without Transformer Engine, and the CPU."""
