"""Rules about low-rank adapters: what they were never proven with is refused, as far as the configuration tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.engines import Engines
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Numerics
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer

SERVING = ("enable_lora", "lora_paths")
"""SGLang's arguments with which a server computes with adapters."""

UNPROVEN = ("speculative_algorithm", "quantization", "torchao_config")
"""SGLang's arguments with which no server was published adapters to."""


def serving(groups: Iterable[Engines]) -> Iterator[tuple[str, str]]:
    """(Key of such an argument that is set, name of its group of engines), for each in `groups`."""
    for group in groups:
        for name in SERVING:
            if group.sglang.get(name):
                yield f"rollout.engines.sglang.{name}", group.name


@rule("lora.frozen", about="trainer.freeze")
def freezes_itself(trainer: Trainer) -> Iterator[str]:
    if trainer.lora is not None and trainer.freeze:
        yield (
            "trainer.lora freezes every weight of the base, and trainer.freeze names some; leave trainer.freeze out, "
            "and choose what gets adapters by trainer.lora.targets"
        )


@rule("lora.proven", about="trainer.lora")
def proven_trainer(trainer: Trainer) -> Iterator[Told]:
    if trainer.lora is None:
        return
    for key, given, plain in (
        ("trainer.virtual_pipeline", trainer.virtual_pipeline, 1),
        ("trainer.moe.bias_update_rate", trainer.moe.bias_update_rate, 0),
        ("trainer.optimizer.offload_fraction", trainer.optimizer.offload_fraction, 0),
        ("trainer.distributed_optimizer", trainer.distributed_optimizer, True),
        ("trainer.megatron.mtp_num_layers", trainer.megatron.get("mtp_num_layers") or 0, 0),
    ):
        if given != plain:
            yield key, f"{key}={given} was never proven with trainer.lora; set it to {plain}, or leave trainer.lora out"


@rule("lora.proven_run", about="trainer.lora")
def proven_run(
    trainer: Trainer,
    publish: Publish,
    algorithm: Algorithm,
    critic: Critic | None,
) -> Iterator[Told]:
    if trainer.lora is None:
        return
    for key, given in (
        ("publish.quantise", publish.quantise is not None),
        ("algorithm.reference_refresh", algorithm.reference_refresh > 0),
        ("algorithm.teacher", bool(algorithm.teacher)),
        ("critic", critic is not None),
    ):
        if given:
            yield key, f"{key} was never proven with trainer.lora; leave it, or trainer.lora, at its default"


@rule("lora.served", about="rollout.engines.sglang")
def serves_merged_weights(rollout: Rollout) -> Iterator[Told]:
    for key, group in serving(rollout.policy_engines):
        yield (
            key,
            f"{key} of engine {group} has SGLang wrap the layers that are published to, and adapters are published "
            "merged (trainer.lora); leave it out",
        )


@rule("lora.alone", about="publish.adapters")
def proven_alone(
    trainer: Trainer, publish: Publish, rollout: Rollout, schedule: Schedule, numerics: Numerics
) -> Iterator[Told]:
    if publish.adapters != "alone":
        return
    if trainer.lora is None:
        yield "publish.adapters=alone, and there are none; set trainer.lora, or leave it out"
        return
    asked = [
        ("numerics.mode", numerics.exact),
        ("publish.encoding", publish.encoding == "local"),
        ("schedule.colocate", schedule.colocate),
    ]
    for group in rollout.policy_engines:
        asked += [
            ("rollout.engines.role", group.role != "regular"),
            ("rollout.engines.model", group.model is not None),
            ("rollout.engines.urls", bool(group.urls)),
            ("rollout.engines.tensor", group.tensor > 1),
            ("rollout.engines.pipeline", group.pipeline > 1),
            *((f"rollout.engines.sglang.{name}", bool(group.sglang.get(name))) for name in UNPROVEN),
        ]
    for key in dict.fromkeys(key for key, wrong in asked if wrong):
        yield (
            key,
            f"{key} was never proven with engines that compute with adapters (publish.adapters=alone); leave it at its "
            "default, or have adapters merged",
        )
