"""Changes to torch, megatron-core and SGLang where there is no GPU."""
