"""Checkpoints of the trainer in Megatron's torch_dist format.

`state` says what is in one, `save` takes a copy and writes it in the background, `load` reads it without running code
from it, `files` knows which files belong to it. `files` needs neither torch nor megatron-core.
"""
