"""Low-rank adapters (LoRA) for frozen weights: training, merging, publication, serving and reading."""
