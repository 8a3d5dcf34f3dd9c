"""A sampling request: prompt and sampling parameters, and the request for the remainder after an interruption."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.integers import as_ids
from slimx.data.records import Image
from slimx.errors import SlimxError, counted
from slimx.json_types import Json
from slimx.rollout.client.completion import Completion, joined

SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "max_new_tokens",
        "min_new_tokens",
        "stop_token_ids",
        "stop",
        "ignore_eos",
        "ebnf",
    }
)
"""Sampling parameters that SGLang supports together with a seed; a request with any other parameter is refused."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt with all sampling parameters: the same request under the same weights returns the same tokens.

    Raises SlimxError for an unsupported sampling parameter, a number that is not finite, and a token id outside the
    range of int32.
    """

    token_ids: Sequence[int]
    """The prompt, stored as an array with 4 bytes per token, because thousands of requests wait at once and a list
    takes ten times the memory."""
    sampling: Json
    """Sampling parameters (names in `SAMPLING`) as plain Python values."""
    seed: int
    """Seed of the request: the random number that samples a token depends only on this seed and the token's
    position."""
    routed_experts: bool = False
    """True to return the routed experts of every token; a dense model returns none."""
    affinity: str | None = None
    """Affinity key: requests with the same key go to the same engine if `rollout.affinity` is group or rollout."""
    policy: str = ACTOR
    """Name of the policy to sample from; `Completion.policy` repeats it."""
    images: tuple[Image, ...] = ()
    """Images whose placeholder tokens are in the prompt."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", compact(self.token_ids))
        object.__setattr__(self, "sampling", _checked(self.sampling))

    @property
    def whole(self) -> bool:
        """True if no other request can continue this one, so that one engine must sample the completion from the start.

        This is the case with stop strings, because the tokens so far may contain the start of one, and with a grammar,
        because a grammar applies from a request's first token.
        """
        return bool(self.sampling.get("stop") or self.sampling.get("ebnf"))

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 means greedy sampling, and the default is 1."""
        return float(self.sampling.get("temperature", 1.0))

    @property
    def restricted(self) -> bool:
        """True if top-k or top-p restricts the candidates.

        Always False for greedy sampling, whose log-probs are over the whole vocabulary at temperature 1.
        """
        cuts = self.sampling.get("top_k", -1) > 0 or self.sampling.get("top_p", 1.0) < 1.0
        return cuts and self.temperature > 0

    def rest(self, received: Completion, *, cut: str = "a request was interrupted") -> GenerationRequest:
        """Returns the request for the tokens that remain to be sampled.

        `received`: tokens sampled so far. Raises SlimxError if the request is `whole`; the message starts with `cut`, a
        description of the interruption.
        """
        count = len(received.token_ids)
        cut += f" after {counted(count, 'token')} and cannot be continued, because"
        if self.sampling.get("stop"):
            raise SlimxError(
                f"{cut} these tokens may contain the start of a stop string; use "
                "stop_token_ids instead of stop, or engine.generate instead of engine.stream",
                code="request.stop_string",
                about="stop",
            )
        if self.whole:
            raise SlimxError(
                f"{cut} its grammar (ebnf) must match from the first token; use "
                "engine.generate instead of engine.stream",
            )
        sampling = dict(self.sampling)
        for name in ("max_new_tokens", "min_new_tokens"):
            if name in sampling:
                sampling[name] = max(0, sampling[name] - count)
        ids = compact(self.token_ids) + compact(received.token_ids.tolist())
        return replace(self, token_ids=ids, sampling=sampling)


def compact(token_ids: Sequence[int]) -> array[int]:
    """Returns token ids as an array of C integers, 4 bytes each; returns an existing array of this type unchanged.

    Raises SlimxError for an id outside the range of int32.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    try:
        return array("i", token_ids if isinstance(token_ids, list) else as_ids(token_ids))
    except TypeError:  # of ids that are floats
        return compact(tuple(as_ids(token_ids)))
    except OverflowError:
        invalid = next(token for token in as_ids(token_ids) if not -(2**31) <= token < 2**31)
        raise SlimxError(
            f"token id {invalid} does not fit into 32 bits; pass only token ids of the model's tokenizer",
            code="request.token_ids",
            about=f"token id {invalid}",
        ) from None


class Pending:
    """An incomplete request, with the parts of its completion that have been received so far."""

    def __init__(self, request: GenerationRequest, received: Completion | None = None) -> None:
        """Starts with `received`, the tokens that an earlier run received for the request; None if there are none."""
        self.request = request
        self.count = 0 if received is None else len(received.token_ids)
        """Number of sampled tokens received so far."""
        self._parts = [] if received is None else [received]

    @property
    def received(self) -> Completion | None:
        """The tokens received so far, in one completion; None if there are none."""
        if len(self._parts) > 1:
            self._parts = [joined(self._parts, len(self.request.token_ids))]
        return self._parts[0] if self._parts else None

    @property
    def completion(self) -> Completion:
        """The tokens received so far, in one completion. Raises SlimxError if there are none."""
        received = self.received
        if received is None:
            raise SlimxError(
                "a stream closed before its first token has no completion; wait for the first token "
                "before closing the stream",
                code="request.no_token",
            )
        return received

    @property
    def done(self) -> bool:
        """True once the last part has been received."""
        return bool(self._parts) and self._parts[-1].finish_reason not in ("", "abort")

    def add(self, part: Completion) -> None:
        """Appends a part: a piece of a stream, or the tokens of an aborted request.

        Discards an aborted part that no other request can continue, because the part has no tokens or its request is
        `whole`; its tokens are then sampled again. A part that was aborted exactly when it reached `max_new_tokens` is
        complete.
        """
        if part.finish_reason == "abort":
            if len(part.token_ids) == 0 or self.request.whole:
                return
            if self.count + len(part.token_ids) == self.request.sampling.get("max_new_tokens"):
                part = replace(part, finish_reason="length")
        self._parts.append(part)
        self.count += len(part.token_ids)

    def finish(self, reason: str, routed_experts: np.ndarray | None) -> None:
        """Sets the completion's finish reason and routed experts.

        `routed_experts`: routed experts of all prompt and sampled tokens, which the last event of a stream contains.
        """
        self._parts = [replace(self.completion, finish_reason=reason, routed_experts=routed_experts)]

    def rest(self, *, cut: str = "a request was interrupted") -> GenerationRequest:
        """Returns the request for the tokens that remain to be sampled. Raises SlimxError if some tokens were received
        and the request is `whole`; the message starts with `cut`, which describes the interruption."""
        if not self.count:
            return self.request
        return self.request.rest(self.completion, cut=cut)


def _checked(sampling: Json) -> Json:
    unknown = sorted(sampling.keys() - SAMPLING)
    if unknown:
        reason = f"use one of {', '.join(sorted(SAMPLING))}"
        if unknown[0] == "min_p":
            reason = "remove min_p, which SGLang cannot combine with a seed"
        raise SlimxError(
            f"sampling parameter {unknown[0]} is not supported by the engines; {reason}",
            code="request.sampling",
            about=unknown[0],
        )
    return {name: _plain(name, value) for name, value in sampling.items()}


def _plain(name: str, value: object) -> object:
    """Returns `value` with NumPy values converted to Python numbers and lists. Raises SlimxError if it is not finite.

    `name`: name of the sampling parameter, for the error message.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise SlimxError(
            f"sampling parameter {name} is {value}; give a finite number", code="request.not_finite", about=name
        )
    return value
