"""Recorded rollouts (`RUN/samples.jsonl`), and comparison of prompts over the training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class RecordedSample:
    """A rollout as text."""

    step: int
    """Step of the run in which it was recorded."""
    prompt: str
    answer: str | None
    """Answer that the verifier expects; None or empty without one."""
    response: str
    reward: float
    version: int
    """Weight version that sampled it."""
    evaluation: bool
    """True for a rollout of an evaluation."""


@dataclass(kw_only=True, slots=True)
class SampleRow:
    """One prompt over the run."""

    prompt: str
    samples: list[RecordedSample | None]
    """Rollout at each step of the comparison; None: there is none."""

    @property
    def answer(self) -> str:
        """Expected answer, from the first step with a rollout."""
        for sample in self.samples:
            if sample is not None:
                return sample.answer or ""
        return ""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """The same prompts at several recorded steps."""

    steps: list[int]
    """First and last recorded step with steps between them; a single one if only one step has samples."""
    evaluation: bool
    """True if the rollouts are of evaluations; training rollouts are compared only if there are none."""
    rows: list[SampleRow]
    """Prompts of both the first and the last step, then the others, each in the order of the file."""

    @property
    def common(self) -> int:
        """Number of prompts with a rollout at both the first and the last step."""
        return sum(row.samples[0] is not None and row.samples[-1] is not None for row in self.rows)


def compare(samples: Sequence[RecordedSample], columns: int = 2) -> Comparison | None:
    """Compares the rollouts of the first and the last recorded step and of steps between, `columns` steps at most, with
    one rollout per prompt and step. Returns None without rollouts.

    Rollouts of evaluations are preferred, because their prompts recur; those of training rarely do.
    """
    chosen = [sample for sample in samples if sample.evaluation] or list(samples)
    if not chosen:
        return None
    by_step: dict[int, dict[str, RecordedSample]] = defaultdict(dict)
    for sample in chosen:
        by_step[sample.step].setdefault(sample.prompt, sample)
    steps = spread(sorted(by_step), columns)
    prompts = {**by_step[steps[0]], **by_step[steps[-1]]}
    rows = []
    for prompt in prompts:
        row = [by_step[step].get(prompt) for step in steps]
        rows.append(SampleRow(prompt=prompt, samples=row))
    # A stable sort keeps the file's order within both parts.
    rows.sort(key=lambda row: row.samples[0] is None or row.samples[-1] is None)
    return Comparison(steps=steps, evaluation=chosen[0].evaluation, rows=rows)


def spread[T](values: Sequence[T], most: int) -> list[T]:
    """Returns at most `most` (2 or more) of `values`, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]
