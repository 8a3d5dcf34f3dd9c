"""Group filter for DAPO's dynamic sampling (2503.14476, section 3.2): a group whose answers are all correct or all
wrong is not trained, and another prompt replaces it.

    slimx train FILE rollout.filter=examples.varied.keep
"""

from slimx.data.records import Group


def keep(group: Group) -> bool | str:
    """Returns True if the answers differ in the reward part `math`, or in the reward if there is no such part; else the
    reason for dropping the group. A length penalty is ignored, because answers that are all wrong differ only in it."""
    values = [trajectory.reward_parts.get("math", trajectory.reward) for trajectory in group.trajectories]
    if max(values) > min(values):
        return True
    return "all_right" if values[0] > 0 else "all_wrong"
