"""Low-rank adapters (LoRA) beside frozen weights: trained, merged, published, served and read."""
