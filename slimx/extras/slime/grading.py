"""`slime.rollout.rm_hub`: rule-based rewards. Answers are compared by math-verify, not by slime's normalization."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from slimx.data.chat.responses import THOUGHT_ENDS, final_answer
from slimx.errors import SlimxError
from slimx.extras.rewards.f1 import words
from slimx.extras.rewards.shared.boxes import last_box
from slimx.extras.slime.sample import Sample
from slimx.extras.slime.served import load_function
from slimx.json_types import Json

SECONDS = 5
"""Timeout in seconds for parsing an expression and for comparing two. It applies only in the main thread, the only one
that can be interrupted."""
DAPO_WINDOW = 300
"""Number of characters at the end of the solution to which `compute_score` limits its search for the answer."""
DAPO_STRICT_WINDOW = 100
"""Number of characters at the end of the solution to which `compute_score` with `strict_box_verify` limits its search
for a box."""
CLOSED = ("yes", "no", "noanswer")
"""Answers for which `f1_score` gives no partial credit for shared words."""
JUDGING: ContextVar[Callable[..., Any] | None] = ContextVar("slime_judging", default=None)
"""Reward function that is running. It is visible to the functions that the reward function calls."""


def equal(answer: str | None, right: Any) -> bool:
    """Returns True if `answer` and the reference answer `right` are mathematically equal; False if `answer` is None."""
    # Imported here, because it takes a second and most hooks do not need it.
    from slimx.extras.rewards.shared.verification import parse, verify

    if answer is None:
        return False
    if answer.strip() == str(right).strip():
        return True
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    gold = parse(f"${right}$", seconds=seconds)
    parsed = parse(f"${answer}$", seconds=seconds)
    return verify(gold, parsed, seconds=seconds)


def grade(solution: str, right: Any) -> bool:
    """Implements `grade_answer_verl`: returns True if the boxed value in `solution` equals the reference `right`, which
    may itself be boxed."""
    return equal(last_box(solution), last_box(str(right)) or right)


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> Json:
    """Implements `math_dapo_utils.compute_score`: returns `score` 1.0 or -1.0, `acc`, and `pred`, the answer found in
    the text.

    With `strict_box_verify` the answer is the boxed value, else the last line "Answer: ...", or "[INVALID]" if there is
    none. Only the end of the text is searched, so that text of the prompt is not mistaken for an answer."""
    solution_str = solution_str[-DAPO_WINDOW:]
    if strict_box_verify:
        pred = last_box(solution_str[-DAPO_STRICT_WINDOW:])
    else:
        lines = re.findall(r"(?i)answer\s*:\s*([^\n]+)", solution_str)
        pred = "[INVALID]"
        if lines:
            pred = lines[-1].strip()
    return _score(pred, ground_truth)


def _score(pred: str | None, ground_truth: Any) -> Json:
    value = None
    if pred:
        value = last_box(pred) or pred.strip("$ .")
    right = pred != "[INVALID]" and equal(value, ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def deepscaler(response: str, label: Any) -> int:
    """Implements `get_deepscaler_rule_based_reward`: returns 1 if the boxed value after the thinking is correct, and 0
    otherwise, including for a response whose thinking never ends."""
    if THOUGHT_ENDS in response:
        answer = response.rpartition(THOUGHT_ENDS)[2]
    elif "###Response" in response:
        answer = response.split("###Response")[1]
    else:
        return 0
    return int(grade(answer, label))


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """Returns the F1 score, precision and recall of the prediction's words against those of the reference. If either
    text is yes, no or noanswer and the two differ, all three values are 0."""
    predicted = words(prediction or "")
    right = words(ground_truth)
    closed = " ".join(predicted) in CLOSED or " ".join(right) in CLOSED
    shared = sum((Counter(predicted) & Counter(right)).values())
    if shared == 0 or (closed and predicted != right):
        return 0.0, 0.0, 0.0
    return 2 * shared / (len(predicted) + len(right)), shared / len(predicted), shared / len(right)


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
"""Rule for each `rm_type` that grades the text of a response against its label. Rules with the prefix `boxed_` grade
the contents of the last box, as math and deepscaler always do."""


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """Implements `rm_hub.async_rm`: returns the reward of one sample, computed by the run's slime reward function or,
    if the run has none, by the rule for `rm_type`."""
    hook = _run_reward(args)
    if hook is not None:
        return await ask(hook, args.custom_rm_path, args, sample, **kwargs)
    kind = (sample.metadata.get("rm_type") or getattr(args, "rm_type", None) or "").strip()
    text = sample.response
    if kind not in RULES:
        raise SlimxError(
            f"rm_type {kind!r} is not supported; set rm_type to one of {', '.join(RULES)} in reward.options or in the "
            "prompt's metadata, or set reward.function to a slime reward function",
            code="slime.rm_type",
            about=kind,
        )
    return RULES[kind](text, sample.label)


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """Implements `rm_hub.batched_async_rm`: returns the rewards of several samples. A slime reward function of the run
    is called once with the whole list."""
    hook = _run_reward(args)
    if hook is not None:
        return await ask(hook, args.custom_rm_path, args, samples, **kwargs)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


async def ask(function: Callable[..., Any], path: str, args: Any, judged: Any, **kwargs: Any) -> Any:
    """Calls the reward `function`, whose dotted path is `path`, on `judged`, a sample or a list of samples. Raises
    SlimxError if the function is already running: the run's reward function has then called `rm_hub`, which would call
    this function again without end."""
    if function is JUDGING.get():
        raise SlimxError(
            f"{path} is the run's reward function and calls slime's rm_hub, which would call {path} again in an "
            "endless recursion; set args.custom_rm_path to None before the call, so that rm_hub applies the rule of "
            "rm_type",
            code="slime.recursion",
            about=path,
        )
    token = JUDGING.set(function)
    try:
        return await function(args, judged, **kwargs)
    finally:
        JUDGING.reset(token)


def _run_reward(args: Any) -> Callable[..., Any] | None:
    """Returns the reward function, written for slime, that the run configures; None if there is none, or if it is a
    function of this module, which would choose the reward by rm_type."""
    path = getattr(args, "custom_rm_path", None)
    function = None if path is None else load_function(path)
    return None if function in (async_rm, batched_async_rm) else function
