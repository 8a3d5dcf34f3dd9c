"""Computation of a training step: forward and backward passes, optimizer steps, metrics."""
