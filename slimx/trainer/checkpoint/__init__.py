"""Checkpoints of the trainer in Megatron's torch_dist format.

`state` defines the content. `save` copies the content and writes it in the background. `load` reads a checkpoint
without executing code from it. `files`, which needs neither torch nor megatron-core, records the files of a checkpoint
and verifies them."""
