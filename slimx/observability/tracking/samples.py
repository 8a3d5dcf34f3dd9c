"""Recorded rollouts (`RUN/samples.jsonl`), and the same prompts through the training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class RecordedSample:
    """One rollout as text."""

    step: int
    """Optimizer step at which it was recorded."""
    prompt: str
    answer: str | None
    """The answer that the verifier expects; None or empty where there is no such thing."""
    response: str
    reward: float
    version: int
    """Weight version that sampled it."""
    evaluation: bool
    """Held-out evaluation rather than training."""


@dataclass(kw_only=True, slots=True)
class Row:
    """One prompt through the run."""

    prompt: str
    samples: list[RecordedSample | None]
    """Its rollout at each of the comparison's steps; None where there is none."""

    @property
    def answer(self) -> str:
        """The expected answer, from whichever step has a rollout."""
        return next((sample.answer for sample in self.samples if sample is not None), None) or ""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """The same prompts at several recorded steps."""

    steps: list[int]
    """The first and the last recorded step, and steps between; one where only one step has samples."""
    evaluation: bool
    """True if the rollouts are held-out ones; training rollouts are compared only where there are no others."""
    rows: list[Row]
    """Prompts of the first and the last step first, then the others, each in the order of the file."""

    @property
    def common(self) -> int:
        """Prompts that have a rollout at the first and at the last step."""
        return sum(row.samples[0] is not None and row.samples[-1] is not None for row in self.rows)


def compare(samples: Sequence[RecordedSample], columns: int = 2) -> Comparison | None:
    """The rollouts of the first and the last recorded step and of steps between, `columns` at most, by prompt, one per
    prompt and step; None if there are none.

    Held-out rollouts are preferred: their prompts come back at every evaluation, those of training rarely do.
    """
    chosen = [sample for sample in samples if sample.evaluation] or list(samples)
    if not chosen:
        return None
    by_step: dict[int, dict[str, RecordedSample]] = defaultdict(dict)
    for sample in chosen:
        by_step[sample.step].setdefault(sample.prompt, sample)
    steps = spread(sorted(by_step), columns)
    prompts = {**by_step[steps[0]], **by_step[steps[-1]]}
    rows = [Row(prompt=prompt, samples=[by_step[step].get(prompt) for step in steps]) for prompt in prompts]
    # Stable: the file's order within each part.
    rows.sort(key=lambda row: row.samples[0] is None or row.samples[-1] is None)
    return Comparison(steps=steps, evaluation=chosen[0].evaluation, rows=rows)


def spread[T](values: Sequence[T], most: int) -> list[T]:
    """At most `most` (2 or more) of `values`, evenly: the first and the last, and some between."""
    if len(values) <= most:
        return list(values)
    return [values[round(number * (len(values) - 1) / (most - 1))] for number in range(most)]
