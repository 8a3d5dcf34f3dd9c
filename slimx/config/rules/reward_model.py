"""Rules about training a reward model: what its pairs are made of, and what it was never proven with."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.publish import Publish
from slimx.config.sections.reward import Reward
from slimx.config.sections.rollout import Eval, Rollout
from slimx.config.sections.run import Numerics
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer


@rule("reward_model.pairs", about="rollout.group_size")
def pairs_of_files(algorithm: Algorithm, rollout: Rollout, reward: Reward) -> Iterator[Told]:
    if not algorithm.scores:
        return
    needs = (
        "algorithm.loss is bradley_terry, which learns from pairs in the prompt file (answer is chosen, "
        "metadata.rejected is not)"
    )
    if rollout.engines:
        yield "rollout.engines", f"{needs}, and rollout.engines is not empty; set rollout.engines=[]"
    if reward.given:
        yield "reward.function", f"{needs}, and there is a reward hook; set reward.function=null and reward.parts=[]"
    if rollout.group_size != 2:
        yield f"{needs}, and rollout.group_size is {rollout.group_size}; set it to 2"


@rule("reward_model.eval", about="eval.samples")
def pairs_held_out(algorithm: Algorithm, eval: Eval) -> Iterator[Told]:
    if not algorithm.scores:
        return
    for key, given, plain in (("samples", eval.samples, 1), ("temperature", eval.temperature, 0)):
        if given != plain:
            yield (
                f"eval.{key}",
                f"eval.{key} is {given:g}, but a reward model scores the held-out pairs as they are; leave it out",
            )


@rule("reward_model.proven", about="trainer")
def proven(
    algorithm: Algorithm, trainer: Trainer, numerics: Numerics, publish: Publish, schedule: Schedule
) -> Iterator[Told]:
    if not algorithm.scores:
        return
    for key, given in (
        ("trainer.lora", trainer.lora is not None),
        ("trainer.freeze", bool(trainer.freeze)),
        ("trainer.indexer_replay", trainer.indexer_replay != "none"),
        ("trainer.moe.routing_replay", trainer.moe.routing_replay != "none"),
        ("trainer.moe.aux_loss_coef", bool(trainer.moe.aux_loss_coef)),
        ("trainer.moe.z_loss_coef", bool(trainer.moe.z_loss_coef)),
        ("trainer.moe.bias_update_rate", bool(trainer.moe.bias_update_rate)),
        ("trainer.megatron.mtp_num_layers", bool(trainer.megatron.get("mtp_num_layers"))),
        ("numerics.mode", numerics.exact),
        ("publish.quantise", publish.quantise is not None),
        ("schedule.colocate", schedule.colocate),
    ):
        if given:
            yield key, f"{key} does nothing, or was never proven, for a reward model; leave it at its default"
