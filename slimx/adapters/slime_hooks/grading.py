"""`slime.rollout.rm_hub`: rewards by rule. Verdicts are math-verify's, not those of slime's own normalisation."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

from slimx.adapters.slime_hooks.sample import Sample
from slimx.adapters.slime_hooks.served import load_function
from slimx.errors import SlimxError
from slimx.rewards.f1 import f1

SECONDS = 5
"""For parsing, and for comparing, where the thread can be interrupted (the main one)."""


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} of a text, braces balanced; None without one."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, first = 0, start + len(r"\boxed")
    for at in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[first + 1 : at]
    return None


def equal(said: str | None, right: Any) -> bool:
    """Whether two expressions have one value."""
    from math_verify import parse, verify  # imported late: it takes a second, and most hooks grade by themselves

    if said is None:
        return False
    if said.strip() == str(right).strip():
        return True
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    gold, found = (parse(f"${text}$", parsing_timeout=seconds) for text in (right, said))
    return bool(verify(gold, found, timeout_seconds=seconds))


def grade(solution: str, right: Any) -> bool:
    """`grade_answer_verl`: whether the boxed value of a solution is right; `right` may be boxed too."""
    return equal(boxed(solution), boxed(str(right)) or right)


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    """`math_dapo_utils.compute_score`: score 1.0 or -1.0, `acc`, and `pred`: the boxed value, or else (not strict) what
    the last line "Answer: ..." says, "[INVALID]" without one."""
    if strict_box_verify:
        pred = boxed(solution_str)
    else:
        lines = re.findall(r"(?i)answer\s*:\s*([^\n]+)", solution_str)
        pred = lines[-1].strip() if lines else "[INVALID]"
    value = (boxed(pred) or pred.strip("$ .")) if pred else None
    right = pred != "[INVALID]" and equal(value, ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample: the run's own slime reward if it has one, else the rule that `rm_type` names."""
    own = getattr(args, "custom_rm_path", None)
    if own is not None:
        return await load_function(own)(args, sample, **kwargs)
    kind = sample.metadata.get("rm_type") or getattr(args, "rm_type", None) or "none"
    text = sample.response
    if kind.startswith("boxed_"):
        kind, text = kind.removeprefix("boxed_"), boxed(text) or ""
    if kind in ("math", "deepscaler"):
        return int(grade(text, sample.label))
    if kind == "dapo":
        return compute_score(text, sample.label)
    if kind == "f1":
        return f1(text, sample.label)
    raise SlimxError(f"rm_type {kind!r} is not served; served are math, deepscaler, dapo, f1, or name a reward hook")


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of several samples. A reward hook of the run is called once, with the list."""
    own = getattr(args, "custom_rm_path", None)
    if own is not None:
        return await load_function(own)(args, samples, **kwargs)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))
