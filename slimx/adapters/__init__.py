"""Adapters to upstreams: megatron-core, SGLang, hooks of slime's form. Each entry names its version and its reason."""
