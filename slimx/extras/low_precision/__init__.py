"""Number formats of eight bits and fewer: fp8, INT4 and MXFP4, in checkpoints, in publications and in the trainer's
matrix products."""
