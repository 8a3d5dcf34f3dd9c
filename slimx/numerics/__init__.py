"""The arithmetic of layers as plain functions of tensors: no megatron-core, no SGLang, any device.

In: activations and weights.
Out: results in the order of additions that the file defines, forward and backward.
Read first: `attention.py`.
"""
