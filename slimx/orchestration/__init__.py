"""Assembles, starts and stops a run; contains the training loop and the run's checkpoints.

In: a configuration.
Out: a run directory with metrics, checkpoints and exports; the error, and thereby the exit status, of a failed run.
Read first: `loop.py`, then `run.py` and `session.py`.
"""
