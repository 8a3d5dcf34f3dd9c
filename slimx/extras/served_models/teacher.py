"""Teachers for on-policy distillation, served by frozen engines: each finished rollout is scored by one teacher.

SGLang computes a teacher's log-probs only at temperature 1 and over the whole vocabulary, so rollouts must be sampled
in this way. The prompt's metadata selects the teacher of its rollouts.
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
"""Maximum number of token ids whose texts are requested from a server at once."""


class Teacher:
    """One teacher of a run: a group of frozen engines that scores rollouts."""

    def __init__(self, engine: FrozenEngine, concurrency: int, top: int = 0):
        """Stores the limits.

        `concurrency`: maximum number of concurrent requests; a request's deadline starts when the request is sent.
        `top`: number of most likely tokens per position whose log-probs are also requested; 0 for none.
        """
        self.engine = engine
        self._top = top
        self._slots = asyncio.Semaphore(concurrency)

    async def score(self, trajectory: Trajectory) -> None:
        """Sets `teacher_logprobs` of `trajectory`, and the most likely tokens if `top` is above 0.

        Raises SlimxError if the trajectory was sampled at a temperature other than 1 or under top-k or top-p, if no
        engine responds, or if a trained token has a log-prob that is not finite under the teacher. Raises DeadlineError
        if the teacher does not respond within `rollout.request_deadline`.
        """
        temperature = float(trajectory.sampling.get("temperature") or 1.0)
        if temperature != 1.0 or trajectory.support is not None:
            sampling = f"at temperature {temperature:g}" if temperature != 1.0 else "under top-k or top-p"
            raise SlimxError(
                f"rollout {trajectory.id} was sampled {sampling} by its hook, but teacher {self.engine.name} scores at "
                "temperature 1 over the whole vocabulary; sample at temperature 1 without top-k and top-p, or use "
                "algorithm.teacher",
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
                    f"teacher {self.engine.name} returned the log-prob {values[position]:g}, which is not finite, "
                    f"for token {position} (id {trajectory.token_ids[position]}) of rollout {trajectory.id}; check the "
                    "teacher's checkpoint for invalid weights, and the teacher's GPU for errors",
                    code="teacher.logprob",
                    about=trajectory.id,
                )
        trajectory.teacher_logprobs = values
        if self._top:
            trajectory.teacher_top_ids = top_ids
            trajectory.teacher_top_logprobs = top_values
        trajectory.timings["teacher"] = time.monotonic() - began


class Teachers:
    """The teachers of a run. The metadata of a prompt selects the teacher that scores its rollouts."""

    def __init__(self, algorithm: Algorithm, engines: Mapping[str, FrozenEngine], concurrency: int):
        """Creates the teachers. `concurrency`: maximum number of concurrent requests to each teacher."""
        self._algorithm = algorithm
        top = algorithm.teacher_top_k
        self._teachers = {name: Teacher(engines[name], concurrency, top) for name in algorithm.served_teachers}

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> None:
        """Scores a rollout of `prompt` with the prompt's teacher.

        Raises SlimxError if the prompt has no teacher, and otherwise the errors of `Teacher.score`.
        """
        await self._teachers[teacher_of(self._algorithm, prompt)].score(trajectory)


def make_scorer(config: Config, engines: Mapping[str, FrozenEngine]) -> Score | None:
    """Returns a function that scores rollouts with the teachers among the frozen `engines`.

    Returns None if there are no teachers, or if `rollout.replay` is set, because saved rollouts already have scores.
    """
    if not config.algorithm.served_teachers or config.rollout.replay:
        return None
    return Teachers(config.algorithm, engines, config.rollout.concurrency).score


def teacher_of(algorithm: Algorithm, prompt: Prompt) -> str:
    """Returns the name of the group of frozen engines that scores the rollouts of `prompt`. Raises SlimxError if there
    is none."""
    field = algorithm.teacher_field
    value = prompt.metadata.get(field)
    name = algorithm.teacher_engines.get(str(value), algorithm.teacher_engine)
    if name is None:
        selector = f"has no metadata.{field}" if value is None else f"has metadata.{field} {value}"
        raise SlimxError(
            f"prompt {prompt.id} {selector}, but algorithm.teacher_engines has entries only for "
            f"{', '.join(algorithm.teacher_engines)}; correct metadata.{field} of the prompt, add an entry for the "
            "value, or set algorithm.teacher_engine to the teacher of all other prompts",
            code="teacher.prompt",
            about=prompt.id,
        )
    return name


def check_taught(algorithm: Algorithm, prompts: Iterable[Prompt]) -> None:
    """Raises SlimxError for a prompt without a teacher, and for an entry of `algorithm.teacher_engines` that matches no
    prompt.

    A misspelled entry would otherwise go unnoticed if `algorithm.teacher_engine`, the default teacher, is set.
    """
    seen: set[str] = set()
    for prompt in prompts:
        teacher_of(algorithm, prompt)
        seen.add(str(prompt.metadata.get(algorithm.teacher_field)))
    for value in algorithm.teacher_engines:
        if value in seen:
            continue
        raise SlimxError(
            f"algorithm.teacher_engines.{value} selects prompts whose metadata.{algorithm.teacher_field} is {value}, "
            f"but no prompt has this value; remove algorithm.teacher_engines.{value}, or rename this entry to a value "
            "that prompts have",
            code="teacher.unused",
            about=f"algorithm.teacher_engines.{value}",
        )


async def check_vocabulary(server: FrozenEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises SlimxError for the first token id whose text on the server differs from that of `tokenizer`.

    The text is requested from the server, because its tokenizer is not on a local disk. `server`: client of one
    external server, not of a router.
    """
    for first in range(0, len(tokenizer), PIECE):
        ids = [[token] for token in range(first, min(first + PIECE, len(tokenizer)))]
        response = await server.post("/v1/detokenize", {"tokens": ids, "skip_special_tokens": False})
        texts = response.get("text")
        if not isinstance(texts, list) or len(texts) != len(ids):
            raise SlimxError(
                f"the teacher at {server.url} does not return the text of tokens ({str(response)[:200]}); check that "
                "an SGLang server runs at this URL",
            )
        for (token,), text, other in zip(ids, tokenizer.batch_decode(ids), texts, strict=True):
            if text != other:
                raise SlimxError(
                    f"the vocabulary of the teacher at {server.url} differs from the policy's: token {token} is "
                    f"{other!r} in the teacher and {text!r} in the policy; serve a teacher with the policy's tokenizer",
                    code="teacher.vocabulary",
                    about=str(token),
                )
