"""Use of Ray: connections, calls with deadlines, placement of actors, restarts.

In: section `cluster` of a configuration, and calls to actors.
Out: results, or an error that names the actor, its log and the deadline.
Read first: `waiting.py`.
"""
