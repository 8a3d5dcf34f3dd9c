"""Changes to megatron-core and SGLang that adapters need."""
