"""Configuration rules for the recovery of trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.general import Checkpoint, Schedule
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.extras.recovery.section import Recovery
from slimx.rules.unproven import sections_in, table_problems

if TYPE_CHECKING:
    from slimx.layout.ranks import Sizes


UNPROVEN = {
    "recovery.trainers": (
        "schedule.colocate",
        "critic",
        "checkpoint.load_optimizer",
        "policies (with separate weights)",
    ),
}
"""For each feature, the settings with which it has not been verified, in the format of
`slimx.rules.unproven.UNPROVEN`."""


@rule("unproven", "recovery.trainers", facts=sections_in(UNPROVEN))
def unproven(**sections: Any) -> Problems:
    yield from table_problems(UNPROVEN, sections)


@rule("recovery.unbounded", "checkpoint.every")
def keeps_few_batches(recovery: Recovery, checkpoint: Checkpoint) -> Problems:
    if recovery.trainers and not checkpoint.every:
        yield (
            f"checkpoint.every is 0, but with recovery.trainers={recovery.trainers} the driver keeps all batches since "
            "the newest checkpoint, so the driver's memory would grow without bound; set checkpoint.every to at least "
            "1, or set recovery.trainers=0"
        )


@rule("recovery.mirror", "recovery.mirror_every")
def mirrors_for_someone(recovery: Recovery) -> Problems:
    if recovery.mirror_every and not recovery.trainers:
        yield (
            "recovery.mirror_every has no effect with recovery.trainers=0; set recovery.trainers to at least 1, or "
            "remove recovery.mirror_every"
        )


@rule("recovery.shrink", "recovery.shrink_after")
def shrinks_for_someone(recovery: Recovery) -> Problems:
    if recovery.shrink_after is not None and not recovery.trainers:
        yield (
            "recovery.shrink_after has no effect with recovery.trainers=0; set recovery.trainers to at least 1, or "
            "remove recovery.shrink_after"
        )


@rule("recovery.engines", "recovery.trainers")
def keeps_engines(recovery: Recovery, rollout: Rollout, served: ServedEngines) -> Problems:
    if recovery.trainers and not served.policy:
        yield (
            "recovery.trainers was tested only with engines that serve the policy, but "
            f"{'rollout.replay starts no' if rollout.replay else 'rollout.engines contains no such'} engines; set "
            "recovery.trainers=0"
        )


@rule("recovery.transport", "publish.transport")
def recovers_with(recovery: Recovery, publish: Publish, schedule: Schedule, device: str) -> Problems:
    """Refuses weight transports that keep buckets in GPU memory, including a transport that slimx chose because the
    configuration does not set one."""
    if not recovery.trainers:
        return
    from slimx.engines.transport import transport_of

    if transport_of(publish).on_gpus(publish, device, colocate=schedule.colocate):
        yield (
            f"publish.transport={publish.transport} and publish.staging={publish.staging} keep buckets in GPU memory, "
            "which was never tested with recovery.trainers; set publish.staging=model and publish.transport=auto, or "
            "set recovery.trainers=0"
        )


@rule("recovery.shrink_reach", "recovery.shrink_after")
def can_shrink(recovery: Recovery, sizes: Sizes, device: str) -> Problems:
    if recovery.shrink_after is None:
        return
    from slimx.layout.ranks import fewer

    if next(fewer(sizes), None) is None:
        reason = "there is only one data-parallel rank" if sizes.data == 1 else "experts need all data-parallel ranks"
        yield (
            f"recovery.shrink_after cannot take effect with the layout DP{sizes.data} TP{sizes.tensor} "
            f"CP{sizes.context} EP{sizes.expert} ETP{sizes.expert_tensor}, because {reason}; remove "
            "recovery.shrink_after, or choose a layout with more data-parallel ranks"
        )
    if device == "cuda":
        yield "recovery.shrink_after was never tested on GPUs; remove recovery.shrink_after, or run on the CPU"
