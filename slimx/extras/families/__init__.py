"""Model families in addition to Qwen3: how trainer, checkpoints and engines hold each tensor."""
