"""Low-rank adapters (LoRA) for frozen weights: trains, merges, publishes, serves, saves and reads them."""
