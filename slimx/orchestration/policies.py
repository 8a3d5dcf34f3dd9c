"""The trained policies of a run, each with its trainers, its engines and the way of its weights between them.

    groups --> trajectories of each policy --> rows --> its trainers --> its publications --> its engines

A run trains one policy, `actor`, unless section `policies` names more. Rollouts and steps are common to all: every
policy makes one step, and publishes one version, in every step of the run.
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
from slimx.data.routes import check_routes
from slimx.engines.fleet.group import EngineGroup
from slimx.errors import SlimxError
from slimx.layout.ranks import Sizes
from slimx.orchestration.batches import Packer, make_update_rows
from slimx.orchestration.publications import Publications
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.rollout.client.generation import GenerationClient
from slimx.runtime.tasks import all_or_none


@dataclass(slots=True, kw_only=True)
class TrainedPolicy:
    """One policy of a running run."""

    name: str
    config: Config
    """One policy's (`Config.by_policy`)."""
    trainers: TrainerGroup
    engines: EngineGroup | None
    """None where nothing is sampled, as of `client`."""
    client: GenerationClient | None
    publications: Publications
    packer: Packer
    sizes: Sizes
    routes: tuple[int, int] | None
    """Shape of the engines' routes that are replayed; None where none are."""

    def own(self, groups: Sequence[Group]) -> list[Group]:
        """`groups` with the trajectories of this policy alone."""
        return of_policy(groups, self.name)

    def updates(self, groups: Sequence[Group]) -> list[list[TrainingRow]]:
        """The rows that one step's groups give this policy, update by update; with a critic their advantages come
        later. Raises SlimxError for a step that has too few trajectories of it."""
        groups, updates = self.own(groups), self.config.schedule.updates_per_step
        if len(groups) < updates:
            raise SlimxError(
                f"{len(groups)} groups of the step have a trajectory of the policy {self.name}, which makes {updates} "
                "updates (schedule.updates_per_step); return one from rollout.generate in every rollout, or take the "
                "policy out of policies",
                code="policies.idle",
                about=self.name,
            )
        if self.routes is not None:
            check_routes([trajectory for group in groups for trajectory in group.trajectories], self.routes)
        return make_update_rows(self.config, groups, partial(all_advantages, self.config.algorithm))

    def named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`metrics` of this policy under their names in the run."""
        return {prefix_of(self.name) + name: value for name, value in metrics.items()}


def of_policy(groups: Sequence[Group], policy: str) -> list[Group]:
    """`groups` with the trajectories of one policy alone, in their order; those that have none are left out."""
    own = [replace(group, trajectories=[t for t in group.trajectories if t.policy == policy]) for group in groups]
    return [group for group in own if group.trajectories]


def in_order[T](groups: Sequence[Group], by_policy: Mapping[str, Sequence[T]]) -> list[T]:
    """Values of each policy's trajectories, which `by_policy` has in their order, in the order of all trajectories."""
    left = {name: iter(values) for name, values in by_policy.items()}
    return [next(left[trajectory.policy]) for group in groups for trajectory in group.trajectories]


async def metrics_of(
    policies: Mapping[str, TrainedPolicy], measure: Callable[[TrainedPolicy], Awaitable[Mapping[str, float]]]
) -> dict[str, float]:
    """Metrics that `measure` finds for every policy, at the same time; the first failure ends the wait for the rest."""
    found = await all_or_none(measure(policy) for policy in policies.values())
    return {
        name: value
        for policy, metrics in zip(policies.values(), found, strict=True)
        for name, value in policy.named(metrics).items()
    }
