"""Rules about the recovery of trainers: what it was never proven with is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slimx.config.rule import Told, rule
from slimx.config.sections.checkpoint import Checkpoint
from slimx.config.sections.critic import Critic
from slimx.config.sections.policies import Policy
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.schedule import Schedule
from slimx.extras.recovery.section import Recovery
from slimx.layout.ranks import Sizes, fewer


@rule("recovery.unbounded", about="checkpoint.every")
def keeps_few_batches(recovery: Recovery, checkpoint: Checkpoint) -> Iterator[str]:
    if recovery.trainers and not checkpoint.every:
        yield (
            "recovery.trainers is set, but checkpoint.every is 0: the driver keeps every batch that was trained since "
            "the newest checkpoint, and their number has no bound; set checkpoint.every"
        )


@rule("recovery.mirror", about="recovery.mirror_every")
def mirrors_for_someone(recovery: Recovery) -> Iterator[str]:
    if recovery.mirror_every and not recovery.trainers:
        yield (
            "recovery.mirror_every is set, but recovery.trainers is 0: no rank would ever take a mirrored state; set "
            "recovery.trainers, or recovery.mirror_every=0"
        )


@rule("recovery.shrink", about="recovery.shrink_after")
def shrinks_for_someone(recovery: Recovery) -> Iterator[str]:
    if recovery.shrink_after is not None and not recovery.trainers:
        yield (
            "recovery.shrink_after is set, but recovery.trainers is 0: the loss of a rank ends the run at once; set "
            "recovery.trainers, or leave recovery.shrink_after out"
        )


@rule("recovery.engines", about="recovery.trainers")
def beside_engines(recovery: Recovery, rollout: Rollout) -> Iterator[str]:
    if recovery.trainers and not rollout.policy_engines:
        yield (
            "recovery.trainers was never proven in a run without engines of its own (rollout.engines is empty, or "
            "rollout.replay is set), which has nothing to keep running meanwhile; set recovery.trainers=0"
        )


@rule("recovery.proven", about="recovery.trainers")
def proven(
    recovery: Recovery,
    schedule: Schedule,
    critic: Critic | None,
    checkpoint: Checkpoint,
    policies: Mapping[str, Policy],
) -> Iterator[Told]:
    if not recovery.trainers:
        return
    for key, given in (
        ("schedule.colocate", schedule.colocate),
        ("critic", critic is not None),
        ("checkpoint.load_optimizer", not checkpoint.load_optimizer),
        ("policies", any(policy.shares is None for policy in policies.values())),
    ):
        if given:
            yield (
                key,
                f"{key} was never proven with recovery.trainers; leave it at its default, or set recovery.trainers=0",
            )


@rule("recovery.transport", about="publish.transport")
def recovers_beside(recovery: Recovery, publish: Publish, schedule: Schedule, device: str) -> Iterator[str]:
    """Asked of the transport that is chosen, where the configuration leaves it open."""
    if recovery.trainers and publish.on_gpus(device, colocate=schedule.colocate):
        yield (
            f"publish.transport {publish.transport} with buckets in the memory of GPUs was never proven with "
            "recovery.trainers, which replaces the ranks that pack them; set publish.staging=model and "
            "publish.transport=auto, or recovery.trainers=0"
        )


@rule("recovery.shrink_reach", about="recovery.shrink_after")
def can_shrink(recovery: Recovery, publish: Publish, sizes: Sizes, device: str) -> Iterator[str]:
    """Asked of the transport that is chosen, where the configuration leaves it open."""
    if recovery.shrink_after is None:
        return
    if next(fewer(sizes), None) is None:
        yield (
            f"recovery.shrink_after is set, but DP{sizes.data} cannot become smaller (TP{sizes.tensor} "
            f"CP{sizes.context} EP{sizes.expert} ETP{sizes.expert_tensor}): there is one, or the experts' ranks need "
            "all of them; leave it out, or choose a layout with more data-parallel ranks"
        )
    if device == "cuda":
        yield "recovery.shrink_after was never proven on GPUs; leave it out, or run on the CPU"
