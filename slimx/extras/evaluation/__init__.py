"""Evaluation of a checkpoint without training: the command `slimx eval` and `slimx.evaluate`."""
