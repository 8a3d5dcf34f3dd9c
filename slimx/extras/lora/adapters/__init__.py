"""Changes to megatron-core and SGLang that low-rank adapters require."""
