"""Low-rank adapters (LoRA) for models with frozen weights: trains, merges, publishes, serves, saves and reads
adapters."""
