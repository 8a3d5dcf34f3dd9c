"""Generation: hooks, the client of the engines, and the flow of groups.

In: prompts, hooks, and engines behind a router.
Out: groups of rewarded trajectories in the order of their tickets, none older than `schedule.max_staleness`.
Read first: `single_turn.py` for a hook, `flow/manager.py` for the flow.
"""
