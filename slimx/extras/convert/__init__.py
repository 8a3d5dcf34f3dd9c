"""Conversion of checkpoints between Hugging Face and Megatron's torch_dist, and quantization to block fp8 and INT4.

run          plans each conversion and checks its input; read this first
sources      tensors of the source, slice by slice: `CheckpointReader` or `TorchDistReader`
target       shards of a Megatron directory, and the rank that reads each
formats      files of the output: torch_dist, safetensors, fp8, INT4, PEFT
work         writes planned files: in parallel, resumable, verified, all or nothing
partial      directory of an unfinished conversion, and its files
compare      reads the output again and compares it with its source
"""
