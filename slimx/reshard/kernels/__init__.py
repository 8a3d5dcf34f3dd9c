"""Packing kernels of csrc/ and the rules that they share."""
