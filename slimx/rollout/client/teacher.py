"""A teacher that frozen engines serve: it scores each finished rollout for on-policy distillation.

Its log-probs are those of given tokens at temperature 1 over the whole vocabulary: SGLang has no others. A rollout must
have been sampled so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.rollout.client.frozen import FrozenEngine

PIECE = 8192
"""Token ids whose texts are asked for at once."""


class Teacher:
    """The teacher of a run (`algorithm.teacher_engine`)."""

    def __init__(self, engine: FrozenEngine, concurrency: int):
        """`concurrency`: requests to it at once; a deadline runs while one is sent, not while it waits here."""
        self.engine = engine
        self._slots = asyncio.Semaphore(concurrency)

    async def score(self, trajectory: Trajectory) -> None:
        """Give `trajectory` its `teacher_logprobs`.

        Raises SlimxError if it was not sampled as the teacher scores, no engine answers, or a trained token cannot be
        said by the teacher at all (a log-prob of -inf); DeadlineError after `rollout.request_deadline`."""
        temperature = float(trajectory.sampling.get("temperature") or 1.0)
        if temperature != 1.0 or trajectory.support is not None:
            how = f"at temperature {temperature:g}" if temperature != 1.0 else "under top-k or top-p"
            raise SlimxError(
                f"rollout {trajectory.id} was sampled {how} by its hook, and algorithm.teacher_engine scores at "
                "temperature 1 over the whole vocabulary; sample so, or set algorithm.teacher",
                code="teacher.sampling",
                about=trajectory.id,
            )
        began = time.monotonic()
        values = np.full(len(trajectory.token_ids), np.nan, np.float32)
        trained = np.flatnonzero(trajectory.loss_mask[1:]) + 1
        if len(trained):
            first = int(trained[0])
            async with self._slots:
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
        trajectory.timings["teacher"] = time.monotonic() - began


def make_teacher(config: Config, engines: Mapping[str, FrozenEngine]) -> Teacher | None:
    """The teacher among frozen `engines`; None without one, or where rollouts are replayed, which have its scores."""
    name = config.algorithm.teacher_engine
    return None if name is None or config.rollout.replay else Teacher(engines[name], config.rollout.concurrency)


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
                code="teacher.tokens",
                about=server.url,
            )
        for (token,), own, other in zip(ids, tokenizer.batch_decode(ids), texts, strict=True):
            if own != other:
                raise SlimxError(
                    f"the teacher at {server.url} has another vocabulary than the policy: token {token} is {other!r} "
                    f"there and {own!r} here; algorithm.teacher_engine needs a model with the policy's tokenizer",
                    code="teacher.vocabulary",
                    about=str(token),
                )
