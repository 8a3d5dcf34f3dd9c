"""Optimizer moments in host memory (`trainer.optimizer.offload_fraction`)."""
