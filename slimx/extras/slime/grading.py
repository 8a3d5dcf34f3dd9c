"""`slime.rollout.rm_hub`: rewards by rule. Verdicts are math-verify's, not those of slime's own normalisation."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from slimx.data.chat.responses import THOUGHT_ENDS, final_answer
from slimx.data.whole import Json
from slimx.errors import SlimxError
from slimx.extras.rewards.f1 import words
from slimx.extras.rewards.shared.boxes import last_box
from slimx.extras.slime.sample import Sample
from slimx.extras.slime.served import load_function

SECONDS = 5
"""For parsing, and for comparing, where the thread can be interrupted (the main one)."""
DAPO_WINDOW, DAPO_STRICT_WINDOW = 300, 100
"""Characters at the end of a text in which `compute_score` looks for the answer, and for a box in its strict form."""
CLOSED = ("yes", "no", "noanswer")
"""Answers with which `f1_score` gives nothing for shared words."""
JUDGING: ContextVar[Callable[..., Any] | None] = ContextVar("slime_judging", default=None)
"""The reward that runs, as seen by what it calls."""


def equal(said: str | None, right: Any) -> bool:
    """Returns True if two expressions have one value."""
    # Imported late: it takes a second, and most hooks grade by themselves.
    from slimx.extras.rewards.shared.verification import parse, verify

    if said is None:
        return False
    if said.strip() == str(right).strip():
        return True
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    gold, found = (parse(f"${text}$", seconds=seconds) for text in (right, said))
    return verify(gold, found, seconds=seconds)


def grade(solution: str, right: Any) -> bool:
    """`grade_answer_verl`: whether the boxed value of a solution is right; `right` may be boxed too."""
    return equal(last_box(solution), last_box(str(right)) or right)


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> Json:
    """`math_dapo_utils.compute_score`: score 1.0 or -1.0, `acc`, and `pred`: the boxed value, or else (not strict) what
    the last line "Answer: ..." says, "[INVALID]" without one. Only the end of the text is looked at, so that what
    the prompt says is no answer."""
    solution_str = solution_str[-DAPO_WINDOW:]
    if strict_box_verify:
        pred = last_box(solution_str[-DAPO_STRICT_WINDOW:])
    else:
        lines = re.findall(r"(?i)answer\s*:\s*([^\n]+)", solution_str)
        pred = lines[-1].strip() if lines else "[INVALID]"
    return _score(pred, ground_truth)


def _score(pred: str | None, ground_truth: Any) -> Json:
    value = (last_box(pred) or pred.strip("$ .")) if pred else None
    right = pred != "[INVALID]" and equal(value, ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def deepscaler(response: str, label: Any) -> int:
    """`get_deepscaler_rule_based_reward`: 1 if the boxed value behind the end of the thinking is right. A response that
    never ended its thinking gets 0, whatever it has boxed there."""
    if THOUGHT_ENDS in response:
        answer = response.rpartition(THOUGHT_ENDS)[2]
    elif "###Response" in response:
        answer = response.split("###Response")[1]
    else:
        return 0
    return int(grade(answer, label))


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall of shared words; where one answer is yes, no or noanswer, only the same counts."""
    said, right = words(prediction or ""), words(ground_truth)
    closed = " ".join(said) in CLOSED or " ".join(right) in CLOSED
    shared = sum((Counter(said) & Counter(right)).values())
    if shared == 0 or (closed and said != right):
        return 0.0, 0.0, 0.0
    return 2 * shared / (len(said) + len(right)), shared / len(said), shared / len(right)


RULES: dict[str, Callable[[str, Any], Any]] = {
    "math": lambda text, label: int(grade(final_answer(text), label)),
    "boxed_math": lambda text, label: int(grade(final_answer(text), label)),
    "deepscaler": deepscaler,
    "boxed_deepscaler": deepscaler,
    "dapo": lambda text, label: compute_score(final_answer(text), label),
    "boxed_dapo": lambda text, label: _score(last_box(final_answer(text)), label),
    "f1": lambda text, label: f1_score(final_answer(text), label)[0],
    "boxed_f1": lambda text, label: f1_score(last_box(final_answer(text)), label)[0],
}
"""Rules that grade a response against its label, by `rm_type`. `boxed_` grades the content of its last box, which
two of them look for by themselves."""


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample: the run's own slime reward if it has one, else the rule that `rm_type` names."""
    if (own := _own(args)) is not None:
        return await ask(own, args.custom_rm_path, args, sample, **kwargs)
    kind, text = (sample.metadata.get("rm_type") or getattr(args, "rm_type", None) or "").strip(), sample.response
    if kind not in RULES:
        raise SlimxError(
            f"rm_type {kind!r} is not served; served are {', '.join(RULES)}: give one of them in reward.options or in "
            "the prompt's metadata, or name a reward hook",
            code="slime.rm_type",
            about=kind,
        )
    return RULES[kind](text, sample.label)


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of several samples. A reward hook of the run is called once, with the list."""
    if (own := _own(args)) is not None:
        return await ask(own, args.custom_rm_path, args, samples, **kwargs)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


async def ask(function: Callable[..., Any], path: str, args: Any, judged: Any, **kwargs: Any) -> Any:
    """Call the reward at `path`. Raises SlimxError where it runs already and asks for the run's reward, itself."""
    if function is JUDGING.get():
        raise SlimxError(
            f"{path} asks slime's rm_hub for the reward of the run, which is {path} itself; set args.custom_rm_path to "
            "None before, so that rm_type decides",
            code="slime.recursion",
            about=path,
        )
    token = JUDGING.set(function)
    try:
        return await function(args, judged, **kwargs)
    finally:
        JUDGING.reset(token)


def _own(args: Any) -> Callable[..., Any] | None:
    """The run's own slime reward; None where there is none, or where it is this module's, which goes by rm_type."""
    path = getattr(args, "custom_rm_path", None)
    function = None if path is None else load_function(path)
    return None if function in (async_rm, batched_async_rm) else function
