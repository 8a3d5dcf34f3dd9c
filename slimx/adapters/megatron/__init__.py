"""Adapters for megatron-core: attention, layers without Transformer Engine, imports, weight gathering and activation
offloading."""
