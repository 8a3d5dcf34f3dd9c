"""Numbers of eight bits and fewer: checkpoints, publications and products of a trainer in fp8, INT4 and MXFP4."""
