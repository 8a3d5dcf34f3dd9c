"""Rules that check the configuration of DPO and reward models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.eval import Eval
from slimx.config.sections.general import Schedule
from slimx.config.sections.reward import Reward
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer
from slimx.extras.evaluation.settings import by_keys
from slimx.rules.unproven import sections_in, table_problems

if TYPE_CHECKING:
    from pathlib import Path


UNPROVEN = {
    "algorithm.loss=bradley_terry": (
        "trainer.lora",
        "trainer.freeze",
        "trainer.indexer_replay",
        "trainer.moe.routing_replay",
        "trainer.moe.aux_loss_coef",
        "trainer.moe.z_loss_coef",
        "trainer.moe.bias_update_rate",
        "trainer.megatron.mtp_num_layers",
        "trainer.optimizer.kind",
        "numerics.mode",
        "policies (with separate weights)",
        "publish.quantize",
        "schedule.colocate",
    )
}
"""For each setting, the settings that were never tested together with it, in the format of
`slimx.rules.unproven.UNPROVEN`."""


@rule("unproven", "algorithm.loss", facts=sections_in(UNPROVEN))
def unproven(**sections: Any) -> Problems:
    yield from table_problems(UNPROVEN, sections)


@rule("algorithm.dpo_reference", "algorithm.reference")
def compares_with_a_reference(algorithm: Algorithm) -> Problems:
    if algorithm.advantages.kind == "dpo" and not algorithm.reference:
        yield (
            "algorithm.advantages=dpo compares the policy with a reference model, but algorithm.reference is false; "
            "set algorithm.reference=true"
        )


@rule("algorithm.dpo_loss", "algorithm.loss")
def has_the_loss_of_its_gradient(algorithm: Algorithm) -> Problems:
    if algorithm.advantages.kind == "dpo" and (algorithm.loss.kind, algorithm.aggregation) != ("plain", "sum"):
        yield (
            "algorithm.advantages=dpo requires algorithm.loss=plain and algorithm.aggregation=sum, but algorithm.loss "
            f"is {algorithm.loss.kind} and algorithm.aggregation is {algorithm.aggregation}; set algorithm.name=dpo, "
            "and remove algorithm.advantages, algorithm.loss and algorithm.aggregation"
        )


@rule("algorithm.dpo_pairs", "rollout.group_size")
def pairs(algorithm: Algorithm, rollout: Rollout, reward: Reward) -> Problems:
    if algorithm.advantages.kind == "dpo" and not rollout.engines and (rollout.group_size != 2 or reward.configured):
        yield (
            "without engines, algorithm.advantages=dpo reads two answers per prompt from the prompt file, but "
            f"{'a reward is set' if rollout.group_size == 2 else f'rollout.group_size is {rollout.group_size}'}; set "
            "rollout.group_size=2, reward.function=null, reward.parts=[] and rollout.generate=preferences"
        )


@rule("algorithm.dpo_routes", "trainer.moe.routing_replay")
def margin_before_routes(algorithm: Algorithm, trainer: Trainer) -> Problems:
    if algorithm.advantages.kind == "dpo" and trainer.moe.routing_replay != "none":
        yield (
            f"trainer.moe.routing_replay is {trainer.moe.routing_replay}, but algorithm.advantages=dpo computes the "
            "margins of pairs before routes are replayed; set trainer.moe.routing_replay=none"
        )


@rule("algorithm.dpo_updates", "schedule.updates_per_step")
def margin_before_updates(algorithm: Algorithm, schedule: Schedule) -> Problems:
    if algorithm.advantages.kind == "dpo" and schedule.updates_per_step > 1:
        yield (
            f"schedule.updates_per_step is {schedule.updates_per_step}, but algorithm.advantages=dpo computes the "
            "margins of pairs before the first update of a step; set schedule.updates_per_step=1, and divide "
            f"rollout.prompts_per_step by {schedule.updates_per_step}"
        )


@rule("reward_model.pairs", "rollout.group_size")
def pairs_of_files(algorithm: Algorithm, rollout: Rollout, reward: Reward) -> Problems:
    if not algorithm.scores:
        return
    needs = "algorithm.loss=bradley_terry learns from pairs in the prompt file (answer, metadata.rejected)"
    if rollout.engines:
        yield "rollout.engines", f"{needs} and needs no engines; set rollout.engines=[]"
    if reward.configured:
        yield "reward.function", f"{needs} and needs no rewards; set reward.function=null and reward.parts=[]"
    if rollout.group_size != 2:
        yield (
            f"{needs}, so a group must consist of two answers, but rollout.group_size is {rollout.group_size}; set "
            "rollout.group_size=2"
        )


@rule("reward_model.eval", "eval.samples")
def scores_evaluation_pairs(algorithm: Algorithm, eval: Eval) -> Problems:
    if algorithm.scores:
        for name in ("samples", "temperature", "max_new_tokens"):
            for (key,), options in by_keys(eval, name).items():
                if getattr(options, name) != Eval.model_fields[name].default:
                    yield key, f"a reward model scores the answers in held-out pairs and samples none; remove {key}"


@rule("weights.reward_model", "trainer.load")
def starts_from_hugging_face(algorithm: Algorithm, weights: Path) -> Problems:
    from slimx.models.files.formats import format_of

    source = format_of(weights) if algorithm.scores else None
    if source is not None:
        yield (
            f"trainer.load is {weights}, a checkpoint of {source.name}, but a reward model can start only from a "
            "Hugging Face directory; convert the checkpoint with `slimx convert megatron-to-hf`, and set trainer.load "
            "to the output directory"
        )
