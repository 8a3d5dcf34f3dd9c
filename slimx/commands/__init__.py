"""The commands that every run needs, and the command-line program, which finds the commands of extras.

In: command-line arguments.
Out: a run directory, or an error message of one sentence with an exit status.
Read first: `start.py`, then `usage.py` for the lookup of commands.
"""
