"""Rules about the settings of evaluations, in section `eval` or in the mapping of one set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.eval import Eval
from slimx.config.sections.rollout import Rollout
from slimx.extras.evaluation.settings import by_key, lengths

if TYPE_CHECKING:
    from slimx.models.families import ModelSpec


@rule("prompts.map", "eval.map")
def maps_once(eval: Eval) -> Problems:
    for key, options in by_key(eval).items():
        if options.map is not None and options.fields is not None:
            yield (
                f"{key}.map",
                f"{key}.map and {key}.fields are both set, but the hook of {key}.map returns the whole prompt; remove "
                "one of them",
            )


@rule("eval.samples", "eval.samples")
def answers_differ(eval: Eval) -> Problems:
    for key, options in by_key(eval).items():
        if options.samples > 1 and options.temperature == 0:
            yield (
                f"{key}.samples",
                f"{key}.samples is {options.samples} but {key}.temperature is 0, so all answers to a prompt would be "
                f"equal; set a temperature, or {key}.samples=1",
            )


@rule("eval.pass_at", "eval.pass_at")
def samples_enough(eval: Eval) -> Problems:
    for key, options in by_key(eval).items():
        beyond = [k for k in options.pass_at if k > options.samples]
        if beyond:
            yield (
                f"{key}.pass_at",
                f"{key}.pass_at contains {beyond[0]}, but {key}.samples is {options.samples}, and pass@k needs at "
                f"least k answers; raise {key}.samples or remove {beyond[0]}",
            )


@rule("eval.top_p", "eval.top_p")
def samples_from_nucleus(eval: Eval) -> Problems:
    for key, options in by_key(eval).items():
        if options.temperature == 0 and options.top_p < 1:
            yield (
                f"{key}.top_p",
                f"{key}.top_p is {options.top_p}, but answers are greedy; set {key}.temperature, or remove {key}.top_p",
            )


@rule("eval.name", "eval.prompts")
def has_plain_names(eval: Eval) -> Problems:
    for name in eval.sets:
        if "/" in name or (not name and len(eval.sets) > 1):
            yield (
                name,
                f"eval.prompts has the name {name!r}, but names are parts of metric names; remove the slash",
            )


@rule("eval.positions", "eval.max_new_tokens")
def has_positions(eval: Eval, rollout: Rollout, spec: ModelSpec) -> Problems:
    positions = spec.gpt["max_sequence_length"]
    for key, answer in lengths(eval).items():
        if rollout.max_prompt_tokens + answer > positions:
            yield (
                key,
                f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and {key}={answer} together exceed the "
                f"model's {positions} positions; lower one of these settings",
            )
