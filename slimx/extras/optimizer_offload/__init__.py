"""Optimizer moments in host memory."""
