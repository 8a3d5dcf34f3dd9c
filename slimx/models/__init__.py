"""Models: `families`, one file each, from the Hugging Face config to Megatron's with the weight table; the parts that
they share, here; and the files of checkpoints."""
