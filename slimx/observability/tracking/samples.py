"""Rollouts recorded as text (`RUN/samples.jsonl`), and the comparison of rollouts of the same prompts at several
steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class RecordedSample:
    """Text record of a rollout, stored as one line of samples.jsonl."""

    step: int
    """Step in which the rollout was recorded."""
    prompt: str
    answer: str | None
    """Reference answer of the prompt; None or "" if the prompt has none."""
    response: str
    reward: float
    version: int
    """Version of the weights that the step or evaluation used."""
    evaluation: bool
    """True if the rollout belongs to an evaluation."""
    images: object = None
    """Images of the prompt, its `metadata.images`; None in a run without `trainer.vision`."""
    reward_parts: object = None
    """Parts of the reward, name -> value; None in runs of earlier versions."""


@dataclass(kw_only=True, slots=True)
class SampleRow:
    """Rollouts of one prompt at several steps."""

    prompt: str
    samples: list[RecordedSample | None]
    """Rollout of the prompt at each step of the comparison; None for a step without a rollout of this prompt."""

    @property
    def answer(self) -> str:
        """Reference answer of the prompt, as recorded with its first rollout; "" if the prompt has no reference
        answer."""
        for sample in self.samples:
            if sample is not None:
                return sample.answer or ""
        return ""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """Rollouts of the same prompts at several steps."""

    steps: list[int]
    """Steps that are compared: the first and the last recorded step, and steps between them; a single step if only one
    has samples."""
    evaluation: bool
    """True if the compared rollouts are from evaluations. Training rollouts are compared only if there are no
    evaluation rollouts."""
    rows: list[SampleRow]
    """One row per prompt: first the prompts with rollouts at both the first and the last step, then all other prompts,
    both in the order of the file."""

    @property
    def common(self) -> int:
        """Number of prompts with a rollout at both the first and the last step."""
        return sum(row.samples[0] is not None and row.samples[-1] is not None for row in self.rows)


def compare(samples: Sequence[RecordedSample], columns: int = 2) -> Comparison | None:
    """Compares rollouts of the same prompts at up to `columns` recorded steps: the first, the last, and evenly spaced
    ones between them. Each prompt has one rollout per step. Returns None if there are no rollouts.

    Rollouts of evaluations are preferred, because evaluations repeat the same prompts and training rarely does."""
    chosen = [sample for sample in samples if sample.evaluation] or list(samples)
    if not chosen:
        return None
    by_step: dict[int, dict[str, RecordedSample]] = defaultdict(dict)
    for sample in chosen:
        by_step[sample.step].setdefault(sample.prompt, sample)
    steps = spread(sorted(by_step), columns)
    prompts = {**by_step[steps[0]], **by_step[steps[-1]]}
    rows = [SampleRow(prompt=prompt, samples=[by_step[step].get(prompt) for step in steps]) for prompt in prompts]
    # The sort is stable, so both parts stay in the order of the file.
    rows.sort(key=lambda row: row.samples[0] is None or row.samples[-1] is None)
    return Comparison(steps=steps, evaluation=chosen[0].evaluation, rows=rows)


def spread[T](values: Sequence[T], most: int) -> list[T]:
    """Selects up to `most` (at least 2) of `values`, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]
