"""Model families in addition to Qwen3: for each, which parameters of trainers and engines contain which checkpoint
tensors."""
