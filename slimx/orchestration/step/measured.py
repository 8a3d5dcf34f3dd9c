"""Metrics of what a trajectory carries: its reward's parts, its data set, its turns, and what hooks logged."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from slimx.data.records import Group, Trajectory


def part_metrics(trajectories: Sequence[Trajectory], section: str = "reward") -> dict[str, float]:
    """Mean, standard deviation and count of each part of the rewards, over the trajectories that have it."""
    out: dict[str, float] = {}
    for name, values in _by_name(trajectory.reward_parts for trajectory in trajectories).items():
        prefix = f"{section}/part/{name}"
        out |= {f"{prefix}/mean": float(np.mean(values)), f"{prefix}/std": float(np.std(values))}
        out[f"{prefix}/count"] = float(len(values))
    return out


def hook_metrics(trajectories: Sequence[Trajectory], section: str = "hook") -> dict[str, float]:
    """Mean, extremes and count of each number that hooks logged (`ctx.log`); what is not finite is only counted."""
    out: dict[str, float] = {}
    for name, values in _by_name(trajectory.metrics for trajectory in trajectories).items():
        prefix, finite = f"{section}/{name}", [value for value in values if math.isfinite(value)]
        out[f"{prefix}/count"] = float(len(values))
        if finite:
            out |= {
                f"{prefix}/mean": float(np.mean(finite)),
                f"{prefix}/min": min(finite),
                f"{prefix}/max": max(finite),
            }
        if len(finite) < len(values):
            out[f"{prefix}/nonfinite"] = float(len(values) - len(finite))
    return out


def source_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Reward and length by the data set of the prompt; {} where prompts name none."""
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for group in groups:
        if group.prompt.source is not None:
            by_source[group.prompt.source] += group.trajectories
    out: dict[str, float] = {}
    for source, trajectories in sorted(by_source.items()):
        prefix, rewards = f"source/{source}", [t.reward for t in trajectories if t.reward is not None]
        out[f"{prefix}/trajectories"] = float(len(trajectories))
        if rewards:
            out[f"{prefix}/reward"] = float(np.mean(rewards))
        if any(lengths := [len(t.sampled_ids()) for t in trajectories]):
            out[f"{prefix}/mean_tokens"] = float(np.mean(lengths))
            out[f"{prefix}/truncated"] = float(np.mean([t.status == "truncated" for t in trajectories]))
    return out


def length_metrics(trajectories: Sequence[Trajectory], lengths: Sequence[int], passing: float) -> dict[str, float]:
    """Mean response length by outcome; `lengths`: sampled tokens of each trajectory, `passing`: the reward of a right
    answer. An outcome that no trajectory has is left out."""
    outcomes = {
        "passed": [t.reward is not None and t.reward >= passing for t in trajectories],
        "failed": [t.reward is not None and t.reward < passing for t in trajectories],
        "completed": [t.status == "completed" for t in trajectories],
    }
    chosen = {name: np.asarray(lengths)[np.array(mask, bool)] for name, mask in outcomes.items()}
    return {f"response/{name}_mean_tokens": float(some.mean()) for name, some in chosen.items() if some.size}


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean and largest number of turns of the model, over the trajectories that were sampled."""
    turns = [len({span.turn for span in t.spans if span.source == "sampled"}) for t in trajectories]
    turns = [count for count in turns if count]
    return {"rollout/turns_mean": float(np.mean(turns)), "rollout/turns_max": float(max(turns))} if turns else {}


def _by_name(given: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """All values of each name, names in alphabetical order."""
    out: dict[str, list[float]] = defaultdict(list)
    for values in given:
        for name, value in values.items():
            out[name].append(value)
    return dict(sorted(out.items(), key=lambda item: str(item[0])))
