"""Arithmetic of layers as functions of tensors that need neither megatron-core nor SGLang and run on any device.

In: activations and weights.
Out: results of forward and backward passes, with additions in the order that the code defines.
Read first: `attention.py`.
"""
