"""Metrics of a step's groups: rewards, lengths, drops, staleness; and the log-prob gap where no trained token can show
it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.batch import make_rows
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError
from slimx.orchestration.run import Run
from slimx.rollout.flow.tickets import Batch


def group_metrics(batch: Batch, passing: float) -> dict[str, float]:
    """Metrics of a batch's groups, and its counts."""
    return batch_counts(batch) | trajectory_metrics(batch.groups, passing)


def sample_metrics(run: Run, batch: Batch) -> dict[str, float]:
    """Metrics of a step's groups: their counts, and of each policy its trajectories and their age in versions."""
    metrics = batch_counts(batch)
    for policy in run.policies.values():
        groups = policy.own(batch.groups)
        metrics |= policy.named(trajectory_metrics(groups, policy.config.eval.passing))
        metrics |= policy.named(staleness_metrics(groups, run.version))
    return metrics


def batch_counts(batch: Batch) -> dict[str, float]:
    """Dropped groups by reason, and those that were generated anew."""
    metrics = {f"dropped/{reason.replace(' ', '_')}": float(count) for reason, count in batch.dropped.items()}
    metrics["dropped/total"] = float(batch.dropped.total())
    metrics["rollout/regenerated"] = float(batch.regenerated)
    return metrics


def trajectory_metrics(groups: Sequence[Group], passing: float) -> dict[str, float]:
    """Rewards, response lengths (tokens), turns, and numbers that hooks logged.

    `passing`: the reward from which an answer counts as right (`eval.passing`)."""
    trajectories = [t for group in groups for t in group.trajectories]
    metrics: dict[str, float] = {}
    rewards = [t.reward for t in trajectories if t.reward is not None]
    if rewards:
        metrics |= {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
        uniform = [len({t.reward for t in group.trajectories}) == 1 for group in groups]
        metrics["reward/groups_without_signal"] = float(np.mean(uniform))
    lengths = [len(t.sampled_ids()) for t in trajectories]
    if any(lengths):
        metrics |= {"response/mean_tokens": float(np.mean(lengths)), "response/max_tokens": float(max(lengths))}
        metrics["response/truncated"] = float(np.mean([t.status == "truncated" for t in trajectories]))
        metrics |= length_metrics(trajectories, lengths, passing) | turn_metrics(trajectories)
    return metrics | part_metrics(trajectories) | source_metrics(groups) | hook_metrics(trajectories)


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


def staleness_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """Trainer version minus each trajectory's oldest sampled version, and the share that several versions sampled."""
    sampled = [t for group in groups for t in group.trajectories if t.oldest_version is not None]
    if not sampled:
        return {}
    ages = [version - t.oldest_version for t in sampled]
    mixed = [len({span.version for span in t.spans if span.version is not None}) > 1 for t in sampled]
    return {
        "staleness/mean": float(np.mean(ages)),
        "staleness/max": float(max(ages)),
        "staleness/mixed": float(np.mean(mixed)),
    }


async def measure_gap(run: Run, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
    """The log-prob gap, probed after a step in whose `metrics` no trained token shows it. Raises SlimxError for a gap
    in exact mode."""
    if not run.sampled:
        return {}
    found: dict[str, float] = {}
    if not metrics["gap/tokens"]:
        with run.phase("probe"):
            found = await run.watched(_probe_gap(run, groups))
    check_gap(run.config, {**metrics, **found}, run.step)
    return found


async def _probe_gap(run: Run, groups: Sequence[Group]) -> dict[str, float]:
    """Have an engine score a few of the step's rollouts under the present version, and compare with the trainers.

    For steps whose trained tokens were all sampled by an older version: trainer and engine are equal again only now,
    after the publication."""
    actor, options = run.policies[ACTOR], run.config.rollout
    count = max(options.gap_probe, actor.sizes.data)
    trajectories = [t for group in actor.own(groups) for t in group.trajectories if t.oldest_version is not None]
    trajectories = trajectories[:count]
    if options.gap_probe == 0 or len(trajectories) < actor.sizes.data:
        return {}
    weights = [(t.versions()[1:] >= 0).astype(np.float32) for t in trajectories]
    rows = make_rows(trajectories, [0.0] * len(trajectories), weights)
    for row, trajectory in zip(rows, trajectories, strict=True):
        scores = await actor.client.score(trajectory.token_ids, routed_experts=options.routed_experts)
        row.rollout_logprobs, row.routed_experts = scores.logprobs, scores.routed_experts
        row.temperature = np.ones_like(row.temperature)
        row.support = None  # an engine scores over the whole vocabulary
        row.versions = np.where(row.weight > 0, scores.version, -1).astype(np.int64)
    version = run.version
    async with run.trainers_turn():
        batch = actor.packer(rows)
        return await run.recovery.lasting(lambda: actor.trainers.measure_gap(batch, version=version))


def check_gap(config: Config, metrics: Mapping[str, float], step: int) -> None:
    """Raises SlimxError where numerics.mode promises that there is no gap and one was measured."""
    if config.exact and metrics.get("gap/tokens") and metrics["gap/max"] != 0.0:
        raise SlimxError(
            f"step {step}: numerics.mode is exact, but log-probs of trainer and engines differ by up to "
            f"{metrics['gap/max']:.1e} on {metrics['gap/tokens']:.0f} tokens of one weight version; weights or "
            "operations are not the same on both sides, and `slimx doctor --gap --layers` says where",
            code="numerics.gap",
            about=f"step {step}",
        )
