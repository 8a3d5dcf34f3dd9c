"""Rollouts in a report: the same prompts at several steps, and training rollouts over the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from slimx.errors import counted
from slimx.extras.report.meanings import digits
from slimx.extras.report.previews import Shown
from slimx.observability.tracking.samples import Comparison, RecordedSample, spread

TRAINING_ROWS = 20
SAMPLE_CHARACTERS = 3000
ANSWER_CHARACTERS = 160
"""Maximum number of characters of an expected answer that is shown next to every response."""

Show = Callable[[object], Shown]


def sample_table(comparison: Comparison, show: Show, passing: float, rows: int) -> dict[str, Any]:
    """Returns the template values of the table of the same prompts at several steps. `show`: previews of the images of
    a prompt. `passing`: least reward that passes. `rows`: maximum number of prompts."""
    kind = "Held-out" if comparison.evaluation else "Training"
    total = len(comparison.rows)
    shown = comparison.rows[:rows]
    steps = comparison.steps
    if len(steps) == 1:
        note = f"{kind} rollouts of step {steps[0]}, the only step that has samples."
    else:
        listed = ", ".join(map(str, steps[:-1]))
        note = f"{kind} rollouts of steps {listed} and {steps[-1]}; {counted(comparison.common, 'prompt')} with a "
        note += "rollout at both the first and the last of these steps."
    if total > len(shown):
        note += f" Shown are {len(shown)} of {counted(total, 'prompt')}, in the order of the file."
    table = []
    for row in shown:
        cells = [_cell(sample, row.samples[0], passing) for sample in row.samples]
        images = next((show(sample.images) for sample in row.samples if sample is not None), Shown())
        table.append({"prompt": _cut(row.prompt), "images": images, "cells": cells})
    return {"note": note, "headings": [f"Step {step}" for step in steps], "rows": table}


def training_table(samples: Sequence[RecordedSample], show: Show, passing: float) -> list[dict[str, Any]]:
    """Returns a row for each of at most TRAINING_ROWS recorded steps spread over the run, with the step's first
    training rollout."""
    first: dict[int, RecordedSample] = {}
    for sample in samples:
        if not sample.evaluation:
            first.setdefault(sample.step, sample)
    rows = []
    for step in spread(sorted(first), TRAINING_ROWS):
        sample = first[step]
        cell = _cell(sample, None, passing)
        rows.append({"step": step, "prompt": _cut(sample.prompt), "images": show(sample.images), "cell": cell})
    return rows


def _cell(sample: RecordedSample | None, before: RecordedSample | None, passing: float) -> dict[str, Any] | None:
    if sample is None:
        return None
    trend = ""
    if before is not None and sample.reward > before.reward:
        trend = "▲"
    elif before is not None and sample.reward < before.reward:
        trend = "▼"
    answer = (sample.answer or "").strip()
    return {
        "passed": sample.reward >= passing,
        "reward": digits(sample.reward),
        "trend": trend,
        "parts": _parts(sample.reward_parts),
        "answer": answer if len(answer) <= ANSWER_CHARACTERS else f"{answer[:ANSWER_CHARACTERS]} ...",
        "response": marked(_cut(sample.response), answer),
    }


def _parts(values: object) -> str:
    """Lists the parts of a reward; "" for a reward without parts, and for a run that did not record them."""
    if not isinstance(values, dict):
        return ""
    return ", ".join(f"{name} {'nan' if value is None else digits(value)}" for name, value in values.items())


def marked(text: str, answer: str | None) -> list[tuple[str, bool]]:
    """Cuts `text` into (part, True if the part is the expected answer). The answer is found as a whole word or number:
    5 is not found in 15, in 5.2 or in 1,005."""
    answer = (answer or "").strip()
    if not answer:
        return [(text, False)]
    parts = re.split(rf"(?<!\w)(?<!\d[.,])({re.escape(answer)})(?!\w|[.,]\d)", text)
    return [(part, bool(number % 2)) for number, part in enumerate(parts) if part]


def _cut(text: str) -> str:
    """Returns `text`; if it is longer than SAMPLE_CHARACTERS characters, returns that many, followed by the number of
    omitted ones."""
    left = len(text) - SAMPLE_CHARACTERS
    if left <= 0:
        return text
    return f"{text[:SAMPLE_CHARACTERS]}\n[{counted(left, 'more character')}]"
