"""Reward for short free-form answers: word overlap of the final answer and the reference (SQuAD's F1, 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter

from slimx.data.records import Trajectory
from slimx.rewards.context import Context, answer_of

_PUNCTUATION = str.maketrans("", "", string.punctuation)


async def reward(ctx: Context, trajectory: Trajectory) -> float:
    """Returns the highest F1 score, from 0 to 1, of the final answer against the prompt's `answer` and the `answers` in
    its metadata. Raises SlimxError if the prompt has neither."""
    answers = list(ctx.prompt.metadata.get("answers") or [])
    if ctx.prompt.answer is not None or not answers:
        answers.append(answer_of(ctx, __name__))
    return max(f1(ctx.final_answer, answer) for answer in answers)


def f1(text: str, answer: str) -> float:
    """Returns the F1 score of `text` against the reference `answer`: the harmonic mean of precision and recall of their
    words, ignoring case, punctuation and articles; 1 if both are empty."""
    predicted = words(text)
    reference = words(answer)
    if not predicted or not reference:
        return float(predicted == reference)
    shared = sum((Counter(predicted) & Counter(reference)).values())
    return 2 * shared / (len(predicted) + len(reference))


def words(text: str) -> list[str]:
    """Returns the words of a string in lower case, without punctuation or articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()
