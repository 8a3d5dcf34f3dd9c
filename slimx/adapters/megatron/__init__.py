"""What megatron-core needs from slimx."""
