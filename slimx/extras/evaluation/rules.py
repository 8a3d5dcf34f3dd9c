"""Rules about the settings of evaluations, in section `eval` or in the mapping of one set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.eval import Eval, EvalSet
from slimx.config.sections.rollout import Rollout
from slimx.extras.evaluation.settings import by_keys, lengths

if TYPE_CHECKING:
    from slimx.models.families import ModelSpec


@rule("prompts.map", "eval.map")
def maps_once(eval: Eval) -> Problems:
    for (hook, fields), options in by_keys(eval, "map", "fields").items():
        if options.map is not None and options.fields is not None:
            yield (
                hook,
                f"{hook} and {fields} are both set, but the hook returns the whole prompt; remove one of them",
            )


@rule("eval.samples", "eval.samples")
def answers_differ(eval: Eval) -> Problems:
    for (samples, temperature), options in by_keys(eval, "samples", "temperature").items():
        if options.samples > 1 and options.temperature == 0:
            yield (
                samples,
                f"{samples} is {options.samples} but {temperature} is 0, so all answers to a prompt would be equal; "
                f"raise {temperature}, or set {samples}=1",
            )


@rule("eval.pass_at", "eval.pass_at")
def samples_enough(eval: Eval) -> Problems:
    for (pass_at, samples), options in by_keys(eval, "pass_at", "samples").items():
        beyond = [k for k in options.pass_at if k > options.samples]
        if beyond:
            yield (
                pass_at,
                f"{pass_at} contains {beyond[0]}, but {samples} is {options.samples}, and pass@k needs at least k "
                f"answers; raise {samples} or remove {beyond[0]}",
            )


@rule("eval.top_p", "eval.top_p")
def samples_from_nucleus(eval: Eval) -> Problems:
    for (top_p, temperature), options in by_keys(eval, "top_p", "temperature").items():
        if options.temperature == 0 and options.top_p < 1:
            yield (
                top_p,
                f"{top_p} is {options.top_p}, but answers are greedy, because {temperature} is 0; raise {temperature}, "
                f"or remove {top_p}",
            )


@rule("eval.name", "eval.prompts")
def has_plain_names(eval: Eval) -> Problems:
    for name in eval.sets:
        if "/" in name:
            yield f"eval.prompts has the name {name!r}, but names are parts of metric names; remove the slash"
        elif not name and eval.prompts != {"": EvalSet(path=eval.files[""])}:
            yield (
                "eval.prompts has a set without a name, which only a single file without settings may be; give the set "
                "a name"
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
