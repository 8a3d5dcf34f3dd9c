"""Recorded rollouts (`RUN/samples.jsonl`), and the same prompts before and after training."""

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
class Pair:
    """One prompt before and after; a side without a rollout is None."""

    prompt: str
    before: RecordedSample | None
    after: RecordedSample | None

    @property
    def answer(self) -> str:
        """The expected answer, from whichever side has a rollout."""
        return next((side.answer for side in (self.before, self.after) if side is not None), None) or ""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """The first recorded step against the last."""

    first: int
    last: int
    """Equal to `first` where only one step has samples; then no pair has an `after`."""
    evaluation: bool
    """True if the rollouts are held-out ones; training rollouts are compared only where there are no others."""
    pairs: list[Pair]
    """Prompts of both steps first, then those of one step alone, each in the order of the file."""

    @property
    def common(self) -> int:
        """Prompts that have both sides."""
        return sum(pair.before is not None and pair.after is not None for pair in self.pairs)


def compare(samples: Sequence[RecordedSample]) -> Comparison | None:
    """Pairs the rollouts of the first and the last recorded step by prompt, one per prompt; None if there are none.

    Held-out rollouts are preferred: their prompts come back at every evaluation, those of training rarely do.
    """
    chosen = [sample for sample in samples if sample.evaluation] or list(samples)
    if not chosen:
        return None
    by_step: dict[int, dict[str, RecordedSample]] = defaultdict(dict)
    for sample in chosen:
        by_step[sample.step].setdefault(sample.prompt, sample)
    first, last = min(by_step), max(by_step)
    before, after = by_step[first], by_step[last] if last != first else {}
    pairs = [Pair(prompt=prompt, before=before.get(prompt), after=after.get(prompt)) for prompt in {**before, **after}]
    pairs.sort(key=lambda pair: pair.before is None or pair.after is None)  # stable: the file's order within each part
    return Comparison(first=first, last=last, evaluation=chosen[0].evaluation, pairs=pairs)
