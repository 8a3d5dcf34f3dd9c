"""Teachers that frozen engines serve: one scores each finished rollout for on-policy distillation.

A teacher's log-probs are those of given tokens at temperature 1 over the whole vocabulary: SGLang has no others. A
rollout must have been sampled so. Which teacher scores it is said by its prompt's metadata."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.config.sections.algorithm import Algorithm
from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.extras.served_models.client import FrozenEngine
from slimx.rollout.flow.rollouts import Score

PIECE = 8192
"""Token ids whose texts are asked for at once."""


class Teacher:
    """One teacher of a run, a frozen group of engines."""

    def __init__(self, engine: FrozenEngine, concurrency: int, top: int = 0):
        """`concurrency`: requests to it at once; a deadline runs while one is sent, not while it waits here. `top`:
        likeliest tokens that it gives at each place, too."""
        self.engine, self._top = engine, top
        self._slots = asyncio.Semaphore(concurrency)

    async def score(self, trajectory: Trajectory) -> None:
        """Give `trajectory` its `teacher_logprobs`, and the likeliest tokens where they are wanted.

        Raises SlimxError if it was not sampled as the teacher scores, no engine answers, or a trained token cannot be
        said by the teacher at all (a log-prob of -inf); DeadlineError after `rollout.request_deadline`."""
        temperature = float(trajectory.sampling.get("temperature") or 1.0)
        if temperature != 1.0 or trajectory.support is not None:
            how = f"at temperature {temperature:g}" if temperature != 1.0 else "under top-k or top-p"
            raise SlimxError(
                f"rollout {trajectory.id} was sampled {how} by its hook, and teacher {self.engine.name} scores at "
                "temperature 1 over the whole vocabulary; sample so, or set algorithm.teacher",
            )
        began = time.monotonic()
        values = np.full(len(trajectory.token_ids), np.nan, np.float32)
        top_ids = np.zeros((len(values), self._top), np.int32)
        top_values = np.full(top_ids.shape, np.nan, np.float32)
        trained = np.flatnonzero(trajectory.loss_mask[1:]) + 1
        if len(trained):
            first = int(trained[0])
            async with self._slots:
                if self._top:
                    said = await self.engine.top_logprobs(trajectory.token_ids, top=self._top, start=first)
                    values[first:], top_ids[first:], top_values[first:] = said
                else:
                    values[first:] = await self.engine.logprobs(trajectory.token_ids, start=first)
            if len(bad := trained[~np.isfinite(values[trained])]):
                at, said = int(bad[0]), values[bad[0]]
                raise SlimxError(
                    f"teacher {self.engine.name} gives token {at} (id {trajectory.token_ids[at]}) of rollout "
                    f"{trajectory.id} the log-prob {said:g}, from which nothing can be learned",
                    code="teacher.logprob",
                    about=trajectory.id,
                )
        trajectory.teacher_logprobs = values
        if self._top:
            trajectory.teacher_top_ids, trajectory.teacher_top_logprobs = top_ids, top_values
        trajectory.timings["teacher"] = time.monotonic() - began


class Teachers:
    """The teachers of a run, of which a prompt's metadata chooses one."""

    def __init__(self, algorithm: Algorithm, engines: Mapping[str, FrozenEngine], concurrency: int):
        """`concurrency`: requests to each teacher at once."""
        self._algorithm = algorithm
        top = algorithm.teacher_top_k
        self._teachers = {name: Teacher(engines[name], concurrency, top) for name in algorithm.served_teachers}

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> None:
        """Score a rollout of `prompt` by its teacher; raises SlimxError if it names none, and as `Teacher.score`."""
        await self._teachers[teacher_of(self._algorithm, prompt)].score(trajectory)


def make_scorer(config: Config, engines: Mapping[str, FrozenEngine]) -> Score | None:
    """The scorer by teachers among frozen `engines`; None without any, or where replayed rollouts have their scores."""
    if not config.algorithm.served_teachers or config.rollout.replay:
        return None
    return Teachers(config.algorithm, engines, config.rollout.concurrency).score


def teacher_of(algorithm: Algorithm, prompt: Prompt) -> str:
    """Name of the frozen group that teaches `prompt`'s rollouts; raises SlimxError if it names none."""
    field = algorithm.teacher_field
    value = prompt.metadata.get(field)
    name = algorithm.teacher_engines.get(str(value), algorithm.teacher_engine)
    if name is None:
        says = f"has no metadata.{field}" if value is None else f"has metadata.{field} {value}"
        raise SlimxError(
            f"prompt {prompt.id} {says}, and algorithm.teacher_engines has "
            f"{', '.join(algorithm.teacher_engines)}; add it there, or set algorithm.teacher_engine, which teaches all "
            "others",
            code="teacher.prompt",
            about=prompt.id,
        )
    return name


def check_taught(algorithm: Algorithm, prompts: Iterable[Prompt]) -> None:
    """Raise SlimxError for a prompt that names no teacher, or for an entry of `algorithm.teacher_engines` that no
    prompt names: with `algorithm.teacher_engine` a misspelt one would not show."""
    seen: set[str] = set()
    for prompt in prompts:
        teacher_of(algorithm, prompt)
        seen.add(str(prompt.metadata.get(algorithm.teacher_field)))
    for value in (name for name in algorithm.teacher_engines if name not in seen):
        raise SlimxError(
            f"algorithm.teacher_engines.{value} teaches prompts whose metadata.{algorithm.teacher_field} is {value}, "
            "and there are none; correct the name, or leave it out",
            code="teacher.unused",
            about=f"algorithm.teacher_engines.{value}",
        )


async def check_vocabulary(server: FrozenEngine, tokenizer: Any) -> None:
    """Compare the text of every token id with what a server, not a router, says it is; raises SlimxError naming the
    first that differs. For a server that runs already, whose tokenizer is on no disk of ours."""
    for first in range(0, len(tokenizer), PIECE):
        ids = [[token] for token in range(first, min(first + PIECE, len(tokenizer)))]
        answer = await server.post("/v1/detokenize", {"tokens": ids, "skip_special_tokens": False})
        texts = answer.get("text")
        if not isinstance(texts, list) or len(texts) != len(ids):
            raise SlimxError(
                f"the teacher at {server.url} does not say what its tokens are: {str(answer)[:200]}",
            )
        for (token,), own, other in zip(ids, tokenizer.batch_decode(ids), texts, strict=True):
            if own != other:
                raise SlimxError(
                    f"the teacher at {server.url} has another vocabulary than the policy: token {token} is {other!r} "
                    f"there and {own!r} here; a teacher needs a model with the policy's tokenizer",
                    code="teacher.vocabulary",
                    about=str(token),
                )
