"""The trained policies of a run, each with its trainers, its engines and its publications.

    groups --> trajectories of each policy --> rows --> its trainers --> its publications --> its engines

A run trains one policy, `actor`, unless section `policies` names more. All policies train on the same rollouts: in
every step of the run, each policy does one training step and publishes one version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from slimx.algorithms.advantages.estimate import all_advantages
from slimx.config.schema import Config
from slimx.config.sections.policies import prefix_of
from slimx.data.batch import TrainingRow
from slimx.data.records import Group
from slimx.engines.fleet.group import EngineGroup
from slimx.errors import SlimxError, counted
from slimx.layout.ranks import Sizes
from slimx.orchestration.batches import Packer, make_update_rows, trajectories_of
from slimx.orchestration.publications import Publications
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.rollout.client.generation import GenerationClient
from slimx.runtime.tasks import all_or_none


@dataclass(slots=True, kw_only=True)
class TrainedPolicy:
    """A policy that a run trains, with its trainers, its engines and its publications."""

    name: str
    config: Config
    """Configuration of this policy: the run's, with the policy's model, trainer, algorithm and engines."""
    trainers: TrainerGroup
    engines: EngineGroup | None
    """Engines that generate for the policy; None, like `client`, if nothing is sampled."""
    client: GenerationClient | None
    publications: Publications
    packer: Packer
    sizes: Sizes

    def select(self, groups: Sequence[Group]) -> list[Group]:
        """Returns copies of `groups` with only the trajectories of this policy."""
        return of_policy(groups, self.name)

    def updates(self, groups: Sequence[Group]) -> list[list[TrainingRow]]:
        """Returns the policy's training rows (one per trajectory) for each update of a step, made from the groups of
        the step. With a critic, the rows' advantages are computed later. Raises SlimxError if fewer groups than updates
        contain a trajectory of the policy."""
        groups = self.select(groups)
        updates = self.config.schedule.updates_per_step
        if len(groups) < updates:
            raise SlimxError(
                f"policy {self.name} has trajectories in only {counted(len(groups), 'group')} of the step, but "
                f"schedule.updates_per_step is {updates}; return a trajectory of this policy from every call of "
                "rollout.generate, or remove the policy from the section policies",
                code="policies.idle",
                about=self.name,
            )
        return make_update_rows(self.config, groups, partial(all_advantages, self.config.algorithm))

    def named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns `metrics` of this policy with the policy's prefix added to their names; the actor has no prefix."""
        return {prefix_of(self.name) + name: value for name, value in metrics.items()}


def of_policy(groups: Sequence[Group], policy: str) -> list[Group]:
    """Returns copies of `groups` with only the trajectories of `policy`, in order; groups without such trajectories are
    left out."""
    selected = []
    for group in groups:
        trajectories = [trajectory for trajectory in group.trajectories if trajectory.policy == policy]
        if trajectories:
            selected.append(replace(group, trajectories=trajectories))
    return selected


def in_order[T](groups: Sequence[Group], by_policy: Mapping[str, Sequence[T]]) -> list[T]:
    """Merges per-trajectory values, given as one list for each policy in `by_policy`, into one list in the order of the
    trajectories in `groups`."""
    remaining = {name: iter(values) for name, values in by_policy.items()}
    return [next(remaining[trajectory.policy]) for trajectory in trajectories_of(groups)]


async def metrics_of(
    policies: Mapping[str, TrainedPolicy], measure: Callable[[TrainedPolicy], Awaitable[Mapping[str, float]]]
) -> dict[str, float]:
    """Returns the metrics that `measure` computes for each policy, with the policy's prefix added to their names. The
    calls to `measure` run concurrently; the first failure cancels the remaining calls."""
    results = await all_or_none(measure(policy) for policy in policies.values())
    metrics: dict[str, float] = {}
    for policy, measured in zip(policies.values(), results, strict=True):
        metrics |= policy.named(measured)
    return metrics
