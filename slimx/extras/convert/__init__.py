"""Conversion of checkpoints: Hugging Face <-> Megatron's torch_dist, and quantization to block fp8.

sources      tensors of the source, slice by slice: `CheckpointReader` or `TorchDistReader`
torch_dist   the files of a Megatron directory, planned from the weight table
safetensors  the files of a Hugging Face directory
fp8          tensors of such a directory in fp8
work         writes planned files: in parallel, resumable, verified, all or nothing
partial      the directory of an unfinished conversion, and which of its files belong to the conversion
compare      reads the output again and compares it with its source
"""
