"""Commands that every run needs, and the program that finds the commands of extras.

In: the arguments of the command line, or of `slimx.train` in a script.
Out: a run directory, or a refusal in one sentence with an exit status.
Read first: `start.py`, then `usage.py` for the lookup of commands.
"""
