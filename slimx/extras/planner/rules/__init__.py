"""Rules about the GPUs, nodes and memory that a plan is made for."""
