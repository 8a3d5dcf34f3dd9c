"""Changes to torch, megatron-core and SGLang that let them run without a GPU."""
