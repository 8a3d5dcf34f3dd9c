"""Conversion of checkpoints: Hugging Face <-> Megatron's torch_dist, and quantisation to block fp8.

sources      where tensors come from, slice by slice: `CheckpointReader` or `TorchDistReader`
torch_dist   the files of a Megatron directory, planned from the weight table
safetensors  the files of a Hugging Face directory
fp8          tensors of such a directory in fp8
work         writes planned files: in parallel, resumable, checked, all or nothing
partial      the directory that they are written into, and what in it is the conversion's own
compare      what was written, read again and compared with its source
"""
