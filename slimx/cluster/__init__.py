"""Ray as slimx uses it: connections, calls with deadlines, placement of actors, restarts.

In: a configuration's section `cluster`, and calls to actors.
Out: results, or an error that names the actor, its log and the deadline.
Read first: `waiting.py`.
"""
