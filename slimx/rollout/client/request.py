"""A request for tokens: what is continued, by which sampling, and what remains of it when it was cut."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.whole import as_ids
from slimx.errors import SlimxError
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
"""Sampling parameters that SGLang's seeded mode carries out; others are refused."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Tokens to continue, and all that decides how: the same request and the same weights give the same tokens.

    Raises SlimxError for a sampling parameter that engines do not carry out, for a number that is not finite and for a
    token id that is none of 32 bits.
    """

    token_ids: Sequence[int]
    """The prompt, kept as an array of 4 bytes a token: thousands of requests wait at once, and a list takes ten times
    that."""
    sampling: dict[str, Any]
    """temperature, top_p, top_k, max_new_tokens, stop_token_ids, ... (`SAMPLING`), kept in Python's own types."""
    seed: int
    """A token's random number depends on this seed and on the token's position alone."""
    routed_experts: bool = False
    """Return the experts of each token; a dense model has none, and returns none."""
    affinity: str | None = None
    """Requests of one key go to one engine, if the router goes by keys (`rollout.affinity`)."""
    policy: str = ACTOR
    """Name of the policy that is asked, which its completion bears."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", compact(self.token_ids))
        object.__setattr__(self, "sampling", _checked(self.sampling))

    @property
    def whole(self) -> bool:
        """True if one engine must sample it from its beginning: a stop string may have begun in the tokens that have
        come, and a grammar begins with the first token of a request."""
        return bool(self.sampling.get("stop") or self.sampling.get("ebnf"))

    @property
    def temperature(self) -> float:
        """Temperature at which it is sampled; 0 is greedy."""
        return float(self.sampling.get("temperature", 1.0))

    @property
    def restricted(self) -> bool:
        """True if top-k or top-p cut candidates away. A greedy request has none to cut: its log-probs are those of the
        whole vocabulary at temperature 1."""
        cuts = self.sampling.get("top_k", -1) > 0 or self.sampling.get("top_p", 1.0) < 1.0
        return cuts and self.temperature > 0

    def rest(self, came: Completion, *, cut: str = "a request was interrupted") -> GenerationRequest:
        """The request for what is missing after the tokens of `came`.

        Raises SlimxError, which tells by `cut` what happened, for one that is `whole`."""
        count = len(came.token_ids)
        if self.sampling.get("stop"):
            raise SlimxError(
                f"{cut} after {count} tokens and is not continued, as a stop string may have begun in them; use "
                "stop_token_ids, or engine.generate in place of engine.stream",
                code="request.stop_string",
                about="stop",
            )
        if self.whole:
            raise SlimxError(
                f"{cut} after {count} tokens and is not continued, as its grammar (ebnf) begins with the "
                "first of them; use engine.generate in place of engine.stream",
            )
        bounds = {name: self.sampling[name] for name in ("max_new_tokens", "min_new_tokens") if name in self.sampling}
        left = {name: max(0, bound - count) for name, bound in bounds.items()}
        token_ids = [*self.token_ids, *came.token_ids.tolist()]
        return replace(self, token_ids=token_ids, sampling={**self.sampling, **left})


def compact(token_ids: Sequence[int]) -> array[int]:
    """Token ids in an array of C integers, 4 bytes each; one that is given is returned as it is.

    Raises SlimxError for an id that has no place there, which no vocabulary has either."""
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    try:
        return array("i", as_ids(token_ids))
    except OverflowError:
        wrong = next(token for token in as_ids(token_ids) if not -(2**31) <= token < 2**31)
        raise SlimxError(
            f"token id {wrong} cannot be generated from; ids are those of the model's vocabulary: check the tokenizer",
            code="request.token_ids",
            about=f"token id {wrong}",
        ) from None


class Pending:
    """A completion in the making: a request, and the parts in which its answer comes."""

    def __init__(self, request: GenerationRequest, came: Completion | None = None) -> None:
        """`came`: what an earlier run got for the request."""
        self.request = request
        self.count = 0 if came is None else len(came.token_ids)
        """Tokens that have come."""
        self._parts = [] if came is None else [came]

    @property
    def came(self) -> Completion | None:
        """All that has come; None if nothing has."""
        if len(self._parts) > 1:
            self._parts = [joined(self._parts, len(self.request.token_ids))]
        return self._parts[0] if self._parts else None

    @property
    def completion(self) -> Completion:
        """All that has come. Raises SlimxError if nothing has."""
        if (came := self.came) is None:
            raise SlimxError(
                "a stream was left before its first token; read a piece of it first", code="request.no_token"
            )
        return came

    @property
    def done(self) -> bool:
        """True once the last part has come."""
        return bool(self._parts) and self._parts[-1].finish_reason not in ("", "abort")

    def add(self, part: Completion) -> None:
        """Append what came in addition: a piece of a stream, or what an engine had when it aborted the request.

        An aborted part that cannot be continued is left off, to be sampled anew: one without tokens, and one of a
        request that is `whole`. One that was aborted at the last token that there could be is complete."""
        if part.finish_reason == "abort":
            if len(part.token_ids) == 0 or self.request.whole:
                return
            if self.count + len(part.token_ids) == self.request.sampling.get("max_new_tokens"):
                part = replace(part, finish_reason="length")
        self._parts.append(part)
        self.count += len(part.token_ids)

    def finish(self, reason: str, routed_experts: np.ndarray | None) -> None:
        """End the completion for `reason`. `routed_experts`: of all its tokens, which come at the end of a stream."""
        self._parts = [replace(self.completion, finish_reason=reason, routed_experts=routed_experts)]

    def rest(self, *, cut: str = "a request was interrupted") -> GenerationRequest:
        """The request for what is missing. Errors are those of `GenerationRequest.rest`."""
        return self.request.rest(self.completion, cut=cut) if self.count else self.request


def _checked(sampling: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted(sampling.keys() - SAMPLING):
        why = (
            "min_p cannot be combined with a seed"
            if unknown[0] == "min_p"
            else f"known are {', '.join(sorted(SAMPLING))}"
        )
        raise SlimxError(
            f"sampling parameter {unknown[0]} is not supported by the engines; {why}",
            code="request.sampling",
            about=unknown[0],
        )
    return {name: _plain(name, value) for name, value in sampling.items()}


def _plain(name: str, value: Any) -> Any:
    """A value in the types that JSON has."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise SlimxError(
            f"sampling parameter {name} is {value}; give a finite number", code="request.not_finite", about=name
        )
    return value
