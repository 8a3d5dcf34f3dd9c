"""Trainer weights become engine weights: plan, packing kernels, transports, two-phase publication."""
