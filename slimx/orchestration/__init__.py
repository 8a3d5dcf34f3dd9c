"""Assembly of a run, the training loop, checkpoints, and how a run starts and stops.

In: a configuration.
Out: a run directory with metrics, checkpoints and exports; the error, and thereby the exit status, of a failed run.
Read first: `loop.py`, then `run.py` and `session.py`.
"""
