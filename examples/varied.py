"""A group filter for DAPO's dynamic sampling (2503.14476, section 3.2): a group whose answers are all right, or all
wrong, is not trained, and another prompt takes its place.

    slimx train FILE rollout.filter=examples.varied.keep
"""

from slimx.data.records import Group


def keep(group: Group) -> bool | str:
    """True if the answers differ in the reward part `math`, or in the reward where it has no such part; else the
    reason. The length penalty does not count: answers that are all wrong differ in it, and teach nothing else."""
    values = [each.reward_parts.get("math", each.reward) for each in group.trajectories]
    if max(values) > min(values):
        return True
    return "all_right" if values[0] > 0 else "all_wrong"
