"""Reward for instruction following (IFEval, 2311.07911): it depends on how many of a prompt's instructions the response
follows. IFEval's own checkers are used, from the optional package if-verifiable.

    {"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
     "kwargs": [{}, {"relation": "at least", "num_words": 300}]}         in the metadata of each prompt
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeGuard

from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError, raised
from slimx.rewards.context import Context
from slimx.rewards.needs import checked_by, checks_prompts, needs_process

PACKAGE = "if-verifiable==0.1.2"
MEASURES = ("prompt_strict", "prompt_loose", "instructions_strict", "instructions_loose")
SENTENCES = "Two short sentences. They are judged once, before the run."
"""Text on which each kind of checker is tried once before the run, to detect data that are missing on this machine."""


def check(*, weights: Mapping[str, float] | None = None) -> None:
    """Raises SlimxError if `weights` is empty, names an unknown measure or has a value that is not finite, or if the
    package if-verifiable is not installed."""
    if weights is None:
        weights = {"prompt_strict": 1.0}
    unknown = [name for name in weights if name not in MEASURES]
    if unknown or not weights or not all(map(_is_finite, weights.values())):
        problem = f"has the unknown name {unknown[0]!r}" if unknown else "has a value that is not a finite number"
        raise SlimxError(
            f"{__name__}.reward: reward.options.weights={dict(weights)} {problem if weights else 'is empty'}; map at "
            f"least one of {', '.join(MEASURES)} to a finite number, and use no other name",
            code="reward.weights",
            about=unknown[0] if unknown else "weights",
        )
    _checkers()


def check_prompts(prompts: Iterable[Prompt]) -> None:
    """Raises SlimxError for a prompt whose metadata has no instructions, an unknown instruction, or a missing argument,
    because the package would skip an unknown instruction and draw a missing argument at random. Also raises it if a
    checker needs data that are missing on this machine: some checkers split sentences with nltk data, which no package
    installs."""
    kinds: dict[str, Any] = {}
    for prompt in prompts:
        for name, arguments in _instructions(prompt):
            kinds.setdefault(name, _checker(prompt, name, arguments))
    for name, checker in kinds.items():
        try:
            checker.check_following(SENTENCES)
        except LookupError as error:
            raise SlimxError(
                f"{__name__}.reward: the instruction {name} needs the NLTK resource punkt_tab, which is not installed "
                "on this machine; run `python -m nltk.downloader punkt_tab`, or set NLTK_DATA to a directory that "
                "contains punkt_tab",
                code="reward.package",
                about=name,
            ) from error


def _checker(prompt: Prompt, name: str, arguments: Mapping[str, Any]) -> Any:
    """Returns the checker for one of the instructions of `prompt`, with its arguments set. `name`: instruction name.
    Raises SlimxError if the name or an argument is invalid."""
    kind = _checkers().get(name)
    if kind is None:
        raise _unfit(prompt, f"{name!r} is not the name of an instruction of {PACKAGE}")
    checker = kind(name)
    try:
        checker.build_description(**arguments)
    except (TypeError, ValueError, KeyError) as error:
        raise _unfit(prompt, f"{name} does not accept the arguments {dict(arguments)} ({raised(error)})") from error
    missing = set(checker.get_instruction_args_keys() or ()) - arguments.keys()
    if missing:
        raise _unfit(prompt, f"{name} lacks the arguments {', '.join(sorted(missing))}")
    return checker


@needs_process
@checked_by(check)
@checks_prompts(check_prompts)
async def reward(
    ctx: Context, trajectory: Trajectory, *, weights: Mapping[str, float] | None = None
) -> float | dict[str, float]:
    """Returns 1.0 if the response strictly follows all of the prompt's instructions, else 0.0: IFEval's prompt-level
    strict accuracy.

    With `weights` the reward is instead a weighted sum of measures, each a part of the reward: "prompt_strict" and
    "prompt_loose" (1 if all instructions are followed), "instructions_strict" and "instructions_loose" (fraction of
    instructions followed). The loose measures also accept an instruction that the response follows without its first
    line, its last line, or asterisks. Only the final answer is checked, without thinking; an empty one follows no
    instruction.

    Logs the number of instructions as "ifeval/instructions", and the numbers of those followed as "ifeval/kept_strict"
    and "ifeval/kept_loose". Over an evaluation, the ratio of either number to the number of instructions is IFEval's
    instruction-level accuracy, strict or loose. Also logs the two prompt-level measures."""
    from if_verifiable.common import evaluate_instructions

    pairs = _instructions(ctx.prompt)
    registry = _checkers()
    results, scores = evaluate_instructions(
        response=ctx.final_answer,
        instruction_id_list=[name for name, _ in pairs],
        kwargs_list=[arguments for _, arguments in pairs],
        prompt="",  # only checkers of other test suites read it
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
    """Returns the name and the arguments of each of the prompt's instructions. Raises SlimxError if the prompt's
    metadata contains no valid instructions."""
    names = prompt.metadata.get("instruction_id_list")
    rows = prompt.metadata.get("kwargs")
    if not _is_list(names, str) or not _is_list(rows, Mapping) or not names or len(names) != len(rows):
        raise _unfit(prompt, "metadata.instruction_id_list and metadata.kwargs are not two lists of equal length")
    instructions = []
    for name, row in zip(names, rows, strict=True):
        # A table has every argument in every row; it is null if the instruction does not take it.
        arguments = {key: value for key, value in row.items() if value is not None}
        instructions.append((name, arguments))
    return instructions


def _is_list(value: object, kind: type) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, kind) for item in value)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@cache
def _checkers() -> Mapping[str, Any]:
    """Returns the checker classes of the package if-verifiable, by instruction name. Raises SlimxError if the package
    is not installed."""
    try:
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
        from langdetect import DetectorFactory
    except ImportError as error:
        raise SlimxError(
            f"{__name__}.reward needs {PACKAGE.partition('=')[0]}, which cannot be imported ({raised(error)}); run "
            f"`pip install {PACKAGE}`, or choose another reward.function",
            code="reward.package",
            about="if-verifiable",
        ) from error
    # Fixes the seed, which is otherwise drawn for each text, so that the reward of a response does not vary.
    DetectorFactory.seed = 0
    return INSTRUCTION_DICT


def _unfit(prompt: Prompt, reason: str) -> SlimxError:
    return SlimxError(
        f"prompt {prompt.id!r}: {reason}; correct the prompt (`slimx data ifeval` writes the required format), or set "
        "another reward for such prompts with `where` in reward.parts",
        code="reward.instructions",
        about=prompt.id,
    )
