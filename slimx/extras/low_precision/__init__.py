"""Numbers of eight bits and fewer: fp8, INT4 and MXFP4 in checkpoints, publications and the trainer's products."""
