"""The reward of short free answers: how many words the final answer shares with the answer (SQuAD's F1, 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter

from slimx.data.records import Trajectory
from slimx.rewards.context import Context, answer_of

_PUNCTUATION = str.maketrans("", "", string.punctuation)


async def reward(ctx: Context, trajectory: Trajectory) -> float:
    """The best F1 with the prompt's `answer` and with each of its metadata's `answers`, 0 to 1. SlimxError: no answer
    at all."""
    answers = list(ctx.prompt.metadata.get("answers") or [])
    if ctx.prompt.answer is not None or not answers:
        answers.append(answer_of(ctx, __name__))
    return max(f1(ctx.final_answer, answer) for answer in answers)


def f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall of words, without case, punctuation and articles; 1 if both are empty."""
    said, right = words(text), words(answer)
    if not said or not right:
        return float(said == right)
    shared = sum((Counter(said) & Counter(right)).values())
    return 2 * shared / (len(said) + len(right))


def words(text: str) -> list[str]:
    """Words of a text without case, punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()
