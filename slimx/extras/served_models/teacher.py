"""Teachers on frozen engines, one of which scores each finished rollout for on-policy distillation.

A teacher's log-probs are at temperature 1 over the whole vocabulary, the only ones that SGLang computes: a rollout must
have been sampled so. The prompt's metadata selects its teacher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from slimx.config.schema import Config
from slimx.config.sections.algorithm import Algorithm
from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.extras.served_models.client import FrozenEngine
from slimx.rollout.flow.rollouts import Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 8192
"""Number of token ids per request for their texts."""


class Teacher:
    """One teacher of a run, a frozen engine group."""

    def __init__(self, engine: FrozenEngine, concurrency: int, top: int = 0):
        """Stores the limits. `concurrency`: maximum number of concurrent requests; the deadline of a request begins
        when it is sent. `top`: number of most likely tokens that it also returns per position."""
        self.engine = engine
        self._top = top
        self._slots = asyncio.Semaphore(concurrency)

    async def score(self, trajectory: Trajectory) -> None:
        """Sets `teacher_logprobs` of `trajectory`, and the most likely tokens if requested.

        Raises SlimxError if it was sampled with other parameters, no engine responds, or the teacher cannot generate a
        trained token (log-prob -inf); DeadlineError after `rollout.request_deadline`.
        """
        temperature = float(trajectory.sampling.get("temperature") or 1.0)
        if temperature != 1.0 or trajectory.support is not None:
            sampling = f"at temperature {temperature:g}" if temperature != 1.0 else "under top-k or top-p"
            raise SlimxError(
                f"rollout {trajectory.id} was sampled {sampling} by its hook, but teacher {self.engine.name} scores at "
                "temperature 1 over the whole vocabulary; sample like that, or set algorithm.teacher",
            )
        began = time.monotonic()
        values = np.full(len(trajectory.token_ids), np.nan, np.float32)
        top_ids = np.zeros((len(values), self._top), np.int32)
        top_values = np.full(top_ids.shape, np.nan, np.float32)
        trained = np.flatnonzero(trajectory.loss_mask[1:]) + 1
        if len(trained):
            first = int(trained[0])
            ids = trajectory.token_ids.tolist()
            async with self._slots:
                if self._top:
                    scores = await self.engine.top_logprobs(ids, top=self._top, start=first)
                    values[first:], top_ids[first:], top_values[first:] = scores
                else:
                    values[first:] = await self.engine.logprobs(ids, start=first)
            invalid = trained[~np.isfinite(values[trained])]
            if len(invalid):
                position = int(invalid[0])
                raise SlimxError(
                    f"teacher {self.engine.name} gives token {position} (id {trajectory.token_ids[position]}) of "
                    f"rollout {trajectory.id} the log-prob {values[position]:g}, which cannot be trained on",
                    code="teacher.logprob",
                    about=trajectory.id,
                )
        trajectory.teacher_logprobs = values
        if self._top:
            trajectory.teacher_top_ids = top_ids
            trajectory.teacher_top_logprobs = top_values
        trajectory.timings["teacher"] = time.monotonic() - began


class Teachers:
    """The teachers of a run, one of which is selected by a prompt's metadata."""

    def __init__(self, algorithm: Algorithm, engines: Mapping[str, FrozenEngine], concurrency: int):
        """Creates the teachers. `concurrency`: maximum number of concurrent requests to each."""
        self._algorithm = algorithm
        top = algorithm.teacher_top_k
        self._teachers = {name: Teacher(engines[name], concurrency, top) for name in algorithm.served_teachers}

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> None:
        """Scores a rollout of `prompt` with its teacher. Raises SlimxError if the prompt has none, and like
        `Teacher.score`."""
        await self._teachers[teacher_of(self._algorithm, prompt)].score(trajectory)


def make_scorer(config: Config, engines: Mapping[str, FrozenEngine]) -> Score | None:
    """Returns the scorer that asks the teachers among the frozen `engines`; None if there are no teachers, or for a
    replay, whose rollouts already have scores."""
    if not config.algorithm.served_teachers or config.rollout.replay:
        return None
    return Teachers(config.algorithm, engines, config.rollout.concurrency).score


def teacher_of(algorithm: Algorithm, prompt: Prompt) -> str:
    """Returns the name of the frozen group that teaches the rollouts of `prompt`. Raises SlimxError if there is
    none."""
    field = algorithm.teacher_field
    value = prompt.metadata.get(field)
    name = algorithm.teacher_engines.get(str(value), algorithm.teacher_engine)
    if name is None:
        selector = f"has no metadata.{field}" if value is None else f"has metadata.{field} {value}"
        raise SlimxError(
            f"prompt {prompt.id} {selector}, but algorithm.teacher_engines has "
            f"{', '.join(algorithm.teacher_engines)}; add it there, or set algorithm.teacher_engine for all other "
            "prompts",
            code="teacher.prompt",
            about=prompt.id,
        )
    return name


def check_taught(algorithm: Algorithm, prompts: Iterable[Prompt]) -> None:
    """Raises SlimxError for a prompt without a teacher, or for an entry of `algorithm.teacher_engines` without prompts:
    with `algorithm.teacher_engine` a misspelled one would go unnoticed."""
    seen: set[str] = set()
    for prompt in prompts:
        teacher_of(algorithm, prompt)
        seen.add(str(prompt.metadata.get(algorithm.teacher_field)))
    for value in algorithm.teacher_engines:
        if value in seen:
            continue
        raise SlimxError(
            f"algorithm.teacher_engines.{value} teaches prompts whose metadata.{algorithm.teacher_field} is {value}, "
            "and there are none; correct the name, or leave it out",
            code="teacher.unused",
            about=f"algorithm.teacher_engines.{value}",
        )


async def check_vocabulary(server: FrozenEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compares the text of every token id with a server's (not a router's). Raises SlimxError for the first difference.
    For external servers, whose tokenizer is not on a local disk."""
    for first in range(0, len(tokenizer), PIECE):
        ids = [[token] for token in range(first, min(first + PIECE, len(tokenizer)))]
        response = await server.post("/v1/detokenize", {"tokens": ids, "skip_special_tokens": False})
        texts = response.get("text")
        if not isinstance(texts, list) or len(texts) != len(ids):
            raise SlimxError(
                f"the teacher at {server.url} does not return the text of its tokens: {str(response)[:200]}",
            )
        for (token,), text, other in zip(ids, tokenizer.batch_decode(ids), texts, strict=True):
            if text != other:
                raise SlimxError(
                    f"the teacher at {server.url} has another vocabulary than the policy: token {token} is {other!r} "
                    f"there and {text!r} in the policy; a teacher needs a model with the policy's tokenizer",
                    code="teacher.vocabulary",
                    about=str(token),
                )
