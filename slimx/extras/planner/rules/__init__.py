"""Rules about the GPUs, nodes and memory for which a plan is made."""
