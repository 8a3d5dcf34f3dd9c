"""Commands that every run needs, and the program that finds those of extras.

In: the arguments of the command line, or of `slimx.train` in a script.
Out: a run directory, and one sentence with an exit status for a refusal.
Read first: `start.py`; `usage.py` for how commands are found.
"""
