"""Adapters to upstreams: megatron-core, SGLang, Ray, hooks of slime's form. Each entry names its version and reason."""
