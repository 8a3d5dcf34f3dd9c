"""The reward of instruction following (IFEval, 2311.07911): which of a prompt's instructions the response keeps, by the
optional package if-verifiable, which has IFEval's own checkers.

    {"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
     "kwargs": [{}, {"relation": "at least", "num_words": 300}]}         in the metadata of each prompt
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError, raised
from slimx.rewards.context import Context
from slimx.rewards.needs import checked_by, checks_prompts, needs_process

PACKAGE = "if-verifiable==0.1.2"
MEASURES = ("prompt_strict", "prompt_loose", "instructions_strict", "instructions_loose")
SENTENCES = "Two short sentences. They are judged once, before the run."
"""Text that a checker of each kind is tried on, so that what it lacks on this machine is told before the run."""


def check(*, weights: Mapping[str, float] | None = None) -> None:
    """Raise SlimxError for weights of unknown measures, or where the package is not installed."""
    given = {"prompt_strict": 1.0} if weights is None else weights
    wrong = next((name for name in given if name not in MEASURES), None)
    if wrong is not None or not given or not all(_is_finite(value) for value in given.values()):
        raise SlimxError(
            f"{__name__}.reward: weights are numbers of {', '.join(MEASURES)}, and not {dict(given)}; correct "
            "reward.options.weights",
            code="reward.weights",
            about=wrong or "weights",
        )
    _checkers()


def check_prompts(prompts: Iterable[Prompt]) -> None:
    """Raise SlimxError for a prompt whose metadata names no instructions, an unknown one, or not all arguments of one:
    the package would leave an unknown instruction out, and draw what is missing at random. Raises for what a checker
    lacks on this machine, too: some split sentences with data of nltk, which is no package."""
    kinds: dict[str, Any] = {}
    for prompt in prompts:
        for name, arguments in _instructions(prompt):
            kinds.setdefault(name, _checker(prompt, name, arguments))
    for name, checker in kinds.items():
        try:
            checker.check_following(SENTENCES)
        except LookupError as error:
            raise SlimxError(
                f"{__name__}.reward: {name} needs data of nltk that this machine lacks: python -m nltk.downloader "
                "punkt_tab, or name a directory that has it in NLTK_DATA",
                code="reward.package",
                about=name,
            ) from error


def _checker(prompt: Prompt, name: str, arguments: Mapping[str, Any]) -> Any:
    """The checker of one instruction of a prompt, with its arguments."""
    kind = _checkers().get(name)
    if kind is None:
        raise _unfit(prompt, f"{name!r} is no instruction of {PACKAGE}")
    checker = kind(name)
    try:
        checker.build_description(**arguments)
    except (TypeError, ValueError, KeyError) as error:
        raise _unfit(prompt, f"{name} does not take {dict(arguments)} ({raised(error)})") from error
    if lacking := set(checker.get_instruction_args_keys() or ()) - arguments.keys():
        raise _unfit(prompt, f"{name} lacks {', '.join(sorted(lacking))}")
    return checker


@needs_process
@checked_by(check)
@checks_prompts(check_prompts)
async def reward(
    ctx: Context, trajectory: Trajectory, *, weights: Mapping[str, float] | None = None
) -> float | dict[str, float]:
    """1.0 if the response keeps all of the prompt's instructions to the letter, else 0.0: IFEval's strict accuracy by
    prompt.

    `weights` makes a sum of other measures, each a part of the reward: "prompt_strict" and "prompt_loose" (1 if all are
    kept), "instructions_strict" and "instructions_loose" (which share of them is). Loose also asks whether the response
    would keep an instruction without its first line, its last line, or asterisks. The final answer is judged, without
    what a model thinks, and an empty one keeps nothing.

    Logs "ifeval/instructions" and how many of them are kept, "ifeval/kept_strict" and "ifeval/kept_loose", whose ratio
    over an evaluation is IFEval's accuracy by instruction; and the two measures by prompt."""
    from if_verifiable.common import evaluate_instructions

    pairs = _instructions(ctx.prompt)
    registry = _checkers()
    results, scores = evaluate_instructions(
        response=ctx.final_answer,
        instruction_id_list=[name for name, _ in pairs],
        kwargs_list=[arguments for _, arguments in pairs],
        prompt="",  # asked for by checkers of other suites
        instruction_registry=registry,
    )
    values = {
        "prompt_strict": scores.binary_strict,
        "prompt_loose": scores.binary_loose,
        "instructions_strict": scores.partial_strict,
        "instructions_loose": scores.partial_loose,
    }
    ctx.log("ifeval/instructions", len(pairs))
    ctx.log("ifeval/kept_strict", sum(result.strict_pass for result in results))
    ctx.log("ifeval/kept_loose", sum(result.loose_pass for result in results))
    ctx.log("ifeval/prompt_strict", values["prompt_strict"])
    ctx.log("ifeval/prompt_loose", values["prompt_loose"])
    if weights is None:
        return values["prompt_strict"]
    return {name: weight * values[name] for name, weight in weights.items()}


def _instructions(prompt: Prompt) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of a prompt's instructions; SlimxError where its metadata has none."""
    names, given = prompt.metadata.get("instruction_id_list"), prompt.metadata.get("kwargs")
    if not _is_list(names, str) or not names or not _is_list(given, Mapping) or len(names) != len(given):
        raise _unfit(prompt, "metadata.instruction_id_list and metadata.kwargs are not two lists of one length")
    # A table has every argument in every row; those that an instruction does not take are null.
    return [
        (name, {key: value for key, value in arguments.items() if value is not None})
        for name, arguments in zip(names, given, strict=True)
    ]


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, kind) for each in value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@cache
def _checkers() -> Mapping[str, Any]:
    """Checkers by the name of their instruction. Raises SlimxError where the package is not installed."""
    try:
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
        from langdetect import DetectorFactory
    except ImportError as error:
        raise SlimxError(
            f"{__name__}.reward judges by {PACKAGE.partition('=')[0]}, which is not installed ({raised(error)}): pip "
            f"install {PACKAGE}, or choose another reward.function",
            code="reward.package",
            about="if-verifiable",
        ) from error
    # Drawn anew for each text otherwise: the same response would be worth now 1, now 0.
    DetectorFactory.seed = 0
    return INSTRUCTION_DICT


def _unfit(prompt: Prompt, what: str) -> SlimxError:
    return SlimxError(
        f"prompt {prompt.id!r}: {what}; correct it, or give such prompts another reward by `where` of reward.parts "
        "(slimx data ifeval writes the form that is wanted)",
        code="reward.instructions",
        about=prompt.id,
    )
