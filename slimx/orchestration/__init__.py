"""A run: its assembly, the training loop, checkpoints, start and end.

In: a configuration.
Out: a run directory with metrics, checkpoints and exports; an exit status when a part is lost.
Read first: `loop.py`, then `run.py` and `session.py`.
"""
