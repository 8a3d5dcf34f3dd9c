"""Generation of training data: generate hooks, the HTTP client of the engines, and the scheduling of prompt groups.

In: prompts, hooks, and engines behind a router.
Out: groups of rewarded trajectories, in the order of their prompts, none older than `schedule.max_staleness`.
Read first: `single_turn.py` for a hook, `flow/manager.py` for the scheduling of groups.
"""
