"""Metrics of a step's groups: rewards, lengths, dropped groups and staleness. Also measures the log-prob gap after
steps whose training used no token of the current version."""

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
from slimx.orchestration.batches import trajectories_of
from slimx.orchestration.run import Run
from slimx.rollout.flow.tickets import Batch


def group_metrics(batch: Batch, passing: float) -> dict[str, float]:
    """Returns the numbers of dropped and regenerated groups of `batch`, and metrics of the batch's trajectories.
    `passing`: minimum reward at which an answer counts as correct (`eval.passing`)."""
    return batch_counts(batch) | trajectory_metrics(batch.groups, passing)


def sample_metrics(run: Run, batch: Batch) -> dict[str, float]:
    """Returns the numbers of dropped and regenerated groups of a step's batch, and for each policy the rewards, lengths
    and staleness of its trajectories."""
    metrics = batch_counts(batch)
    for policy in run.policies.values():
        groups = policy.select(batch.groups)
        metrics |= policy.named(trajectory_metrics(groups, policy.config.eval.passing))
        metrics |= policy.named(staleness_metrics(groups, run.version))
    return metrics


def batch_counts(batch: Batch) -> dict[str, float]:
    """Returns the number of dropped groups, in total and by reason, and the number of groups that were generated again
    because they were too stale."""
    metrics = {}
    for reason, count in batch.dropped.items():
        metrics[f"dropped/{reason.replace(' ', '_')}"] = float(count)
    metrics["dropped/total"] = float(batch.dropped.total())
    metrics["rollout/regenerated"] = float(batch.regenerated)
    return metrics


def trajectory_metrics(groups: Sequence[Group], passing: float) -> dict[str, float]:
    """Returns metrics of the trajectories in `groups`: rewards, response lengths in tokens, turns, and the metrics that
    hooks logged. `passing`: minimum reward at which an answer counts as correct (`eval.passing`)."""
    trajectories = trajectories_of(groups)
    metrics: dict[str, float] = {}
    rewards = [t.reward for t in trajectories if t.reward is not None]
    if rewards:
        metrics |= {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
        uniform = []
        for group in groups:
            different = {t.reward for t in group.trajectories}
            uniform.append(len(different) == 1)
        metrics["reward/groups_without_signal"] = float(np.mean(uniform))
    lengths = [t.sampled_tokens for t in trajectories]
    if any(lengths):
        metrics |= {"response/mean_tokens": float(np.mean(lengths)), "response/max_tokens": float(max(lengths))}
        metrics["response/truncated"] = float(np.mean([t.status == "truncated" for t in trajectories]))
        metrics |= length_metrics(trajectories, lengths, passing) | turn_metrics(trajectories)
    return metrics | part_metrics(trajectories) | source_metrics(groups) | hook_metrics(trajectories)


def part_metrics(trajectories: Sequence[Trajectory], section: str = "reward") -> dict[str, float]:
    """Returns the mean, standard deviation and count of each named part of the rewards, over the trajectories that have
    this part. `section`: first component of the metrics' names."""
    out: dict[str, float] = {}
    for name, values in _by_name(trajectory.reward_parts for trajectory in trajectories).items():
        prefix = f"{section}/part/{name}"
        out |= {f"{prefix}/mean": float(np.mean(values)), f"{prefix}/std": float(np.std(values))}
        out[f"{prefix}/count"] = float(len(values))
    return out


def hook_metrics(trajectories: Sequence[Trajectory], section: str = "hook") -> dict[str, float]:
    """Returns the mean, minimum, maximum and count of the values that hooks logged (`ctx.log`) under each name. Values
    that are not finite are counted but otherwise ignored. `section`: first component of the metrics' names."""
    out: dict[str, float] = {}
    for name, values in _by_name(trajectory.metrics for trajectory in trajectories).items():
        prefix = f"{section}/{name}"
        finite = [value for value in values if math.isfinite(value)]
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
    """Returns the number of trajectories, their mean reward and mean response length, and the fraction that was
    truncated, for each data set that prompts name as their source; {} if no prompt names a source."""
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for group in groups:
        if group.prompt.source is not None:
            by_source[group.prompt.source] += group.trajectories
    out: dict[str, float] = {}
    for source, trajectories in sorted(by_source.items()):
        prefix = f"source/{source}"
        rewards = [t.reward for t in trajectories if t.reward is not None]
        lengths = [t.sampled_tokens for t in trajectories]
        out[f"{prefix}/trajectories"] = float(len(trajectories))
        if rewards:
            out[f"{prefix}/reward"] = float(np.mean(rewards))
        if any(lengths):
            out[f"{prefix}/mean_tokens"] = float(np.mean(lengths))
            out[f"{prefix}/truncated"] = float(np.mean([t.status == "truncated" for t in trajectories]))
    return out


def length_metrics(trajectories: Sequence[Trajectory], lengths: Sequence[int], passing: float) -> dict[str, float]:
    """Returns the mean response lengths of three sets of trajectories: those with a correct answer, those with an
    incorrect one, and those that ended without truncation (status `completed`). Omits the metric of an empty set.
    `lengths`: number of sampled tokens of each trajectory. `passing`: minimum reward at which an answer counts as
    correct."""
    outcomes = {
        "passed": [t.reward is not None and t.reward >= passing for t in trajectories],
        "failed": [t.reward is not None and t.reward < passing for t in trajectories],
        "completed": [t.status == "completed" for t in trajectories],
    }
    metrics = {}
    for name, mask in outcomes.items():
        selected = np.asarray(lengths)[np.array(mask, bool)]
        if selected.size:
            metrics[f"response/{name}_mean_tokens"] = float(selected.mean())
    return metrics


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean and maximum number of model turns per trajectory, over the trajectories that contain sampled
    tokens."""
    turns = [trajectory.turn_count for trajectory in trajectories if trajectory.turn_count]
    if not turns:
        return {}
    return {"rollout/turns_mean": float(np.mean(turns)), "rollout/turns_max": float(max(turns))}


def _by_name(metrics: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """Collects, for each name in any of `metrics`, its values in all of them; the names are in alphabetical order."""
    out: dict[str, list[float]] = defaultdict(list)
    for values in metrics:
        for name, value in values.items():
            out[name].append(value)
    return dict(sorted(out.items(), key=lambda item: str(item[0])))


def staleness_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """Returns the mean and maximum staleness of the trajectories, and the fraction of them that more than one version
    sampled. A trajectory's staleness is `version`, the version from which the trainers start, minus the oldest version
    that sampled any of its tokens."""
    ages = []
    mixed = []
    for trajectory in trajectories_of(groups):
        oldest = trajectory.oldest_version
        if oldest is not None:
            ages.append(version - oldest)
            mixed.append(trajectory.mixed)
    if not ages:
        return {}
    return {
        "staleness/mean": float(np.mean(ages)),
        "staleness/max": float(max(ages)),
        "staleness/mixed": float(np.mean(mixed)),
    }


async def measure_gap(run: Run, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
    """Measures the log-prob gap after a step whose training used no token of the current version (`gap/tokens` is 0 in
    `metrics`), and returns the gap metrics; {} after any other step. Raises SlimxError if `numerics.mode` is exact and
    there is a gap."""
    if not run.sampled:
        return {}
    probed: dict[str, float] = {}
    if not metrics["gap/tokens"]:
        with run.phase("probe"):
            probed = await run.watched(_probe_gap(run, groups))
    check_gap(run.config, {**metrics, **probed}, run.step)
    return probed


async def _probe_gap(run: Run, groups: Sequence[Group]) -> dict[str, float]:
    """Makes an engine compute the log-probs of a few of the step's rollouts with the current version, and returns
    metrics of the gap to the trainers' log-probs.

    Used after steps whose trained tokens were all sampled by an older version, because trainers and engines have the
    same weights only after the next publication."""
    actor = run.policies[ACTOR]
    options = run.config.rollout
    count = max(options.gap_probe, actor.sizes.data)
    candidates = trajectories_of(actor.select(groups))
    trajectories = [t for t in candidates if t.oldest_version is not None][:count]
    if actor.client is None or options.gap_probe == 0 or len(trajectories) < actor.sizes.data:
        return {}
    weights = [(t.versions()[1:] >= 0).astype(np.float32) for t in trajectories]
    rows = make_rows(trajectories, [0.0] * len(trajectories), weights)
    for row, trajectory in zip(rows, trajectories, strict=True):
        scores = await actor.client.score(trajectory.token_ids.tolist(), options.routed_experts, trajectory.images)
        row.rollout_logprobs = scores.logprobs
        row.routed_experts = scores.routed_experts
        row.temperature = np.ones_like(row.temperature)
        row.support = None  # an engine computes log-probs over the whole vocabulary
        row.versions = np.where(row.weight > 0, scores.version, -1).astype(np.int64)
    version = run.version
    async with run.trainers_turn():
        batch = actor.packer(rows)
        return await run.recovery.with_retry(lambda: actor.trainers.measure_gap(batch, version=version))


def check_gap(config: Config, metrics: Mapping[str, float], step: int) -> None:
    """Raises SlimxError if `metrics` contains a log-prob gap although `numerics.mode` is exact."""
    if config.exact and metrics.get("gap/tokens") and metrics["gap/max"] != 0.0:
        raise SlimxError(
            f"step {step}: numerics.mode is exact, but the log-probs of trainer and engines differ by up to "
            f"{metrics['gap/max']:.1e} on {metrics['gap/tokens']:.0f} tokens of the same weight version; run "
            "`slimx doctor --gap --layers` to find the first layer whose values differ",
            code="numerics.gap",
            about=f"step {step}",
        )
