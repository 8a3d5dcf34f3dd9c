"""Adapters for megatron-core: attention, layers without Transformer Engine, exact mode, and the CPU."""
