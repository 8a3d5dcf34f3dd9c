"""What engines sampled, and how it is read out of their answers."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimx.data.support import Support
from slimx.errors import SlimxError
from slimx.models.families import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the client must know of the model to check requests and read answers."""

    vocab_size: int
    layers: int = 0
    """All layers, dense ones too: SGLang returns a row of experts for each."""
    top_k: int = 0
    """Experts per token; 0 for a dense model."""
    experts: int = 0

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelShape:
        """Of a model of any family."""
        fields = spec.transformer
        return cls(spec.vocab_size, fields["num_layers"], fields.get("moe_router_topk") or 0, spec.experts)


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request brought, or one piece of a stream."""

    token_ids: np.ndarray
    """int32 [n]: the sampled tokens, with the end token if one was sampled."""
    logprobs: np.ndarray
    """float32 [n]: under softmax(logits / temperature) over the tokens of `support`; greedy counts as temperature 1."""
    versions: list[tuple[int, int, int]]
    """(start, stop, version): runs of tokens sampled by one weight version, covering [0, n)."""
    finish_reason: str
    """"stop", "length" or "abort" (an aborted request returns what it has); "" of a piece that is not the last."""
    routed_experts: np.ndarray | None
    """uint8 (uint16 above 256 experts) [prompt + n - 1, layers, k]: logical expert ids; None if not asked for."""
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    seconds: float
    """Wall time of the request."""
    temperature: float = 1.0
    """At which it was sampled, and which `logprobs` are of."""
    support: Support | None = None
    """n positions: the tokens that top-k and top-p kept; None where neither was asked for."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of given tokens under an engine's current weights."""

    logprobs: np.ndarray
    """float32 [L - 1]: log softmax(logits) of tokens 1..L-1. SGLang scores inputs at temperature 1, always."""
    version: int
    routed_experts: np.ndarray | None
    """As in `Completion`, [L - 1, layers, k]."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asked for, as far as its answer is read by it."""

    prompt: int
    """Tokens of the prompt."""
    temperature: float
    restricted: bool
    """Whether top-k or top-p cut candidates away."""
    routed: bool
    """Whether experts are returned."""


def restricts(sampling: dict[str, Any]) -> bool:
    """Whether top-k or top-p cut candidates away. A greedy request has none to cut: its log-probs are those of the
    whole vocabulary at temperature 1."""
    cuts = sampling.get("top_k", -1) > 0 or sampling.get("top_p", 1.0) < 1.0
    return cuts and sampling.get("temperature", 1.0) > 0


class Reader:
    """Reads the `meta_info` of /generate answers of a model of `shape`; `url` names the server in errors."""

    def __init__(self, url: str, shape: ModelShape) -> None:
        self.url, self.shape = url, shape

    def completion(self, meta: dict[str, Any], asked: Asked, seconds: float) -> Completion:
        """What a request brought. Raises SlimxError where something that was asked for is missing."""
        reason = (meta["finish_reason"] or {"type": "abort"})["type"]
        if reason == "abort" and asked.routed and not meta.get("routed_experts"):
            # Aborted while it waited in the engine's queue, perhaps not for the first time: its routes are forgotten.
            sampled = []
        else:
            sampled = meta.get("output_token_logprobs") or []
        count = len(sampled)
        if reason == "abort" and count == 0:
            return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), [], reason, None, 0, seconds)
        support, logprobs = None, [entry[0] for entry in sampled]
        if asked.restricted:
            support, logprobs = self._support(meta, count)
        return Completion(
            token_ids=np.array([entry[1] for entry in sampled], np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=self._versions(meta, count),
            finish_reason=reason,
            routed_experts=self.experts(meta, asked.prompt + count - 1) if asked.routed else None,
            cached_tokens=meta.get("cached_tokens", 0),
            seconds=seconds,
            temperature=asked.temperature,
            support=support,
        )

    def experts(self, meta: dict[str, Any], rows: int) -> np.ndarray:
        """The experts of `rows` tokens."""
        shape = (rows, self.shape.layers, self.shape.top_k)
        wire = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), np.int32)
        if wire.size != np.prod(shape):
            raise SlimxError(
                f"{self.url} returned {wire.size} expert ids where {shape} (tokens, layers, experts per token) were "
                "asked for; start the engine with routed_experts and the slimx plugin"
            )
        return wire.reshape(shape).astype(np.uint8 if self.shape.experts <= 256 else np.uint16)

    def version(self, version: str) -> int:
        """The number of a weight version."""
        try:
            return int(version)
        except ValueError:
            raise SlimxError(
                f"{self.url} sampled with weights of version {version!r}: nothing was ever published to that server; "
                "publish first"
            ) from None

    def _support(self, meta: dict[str, Any], count: int) -> tuple[Support, list[float]]:
        """What top-k and top-p kept at each of `count` sampled tokens, and each token's log-prob among these."""
        kept = meta.get("output_token_sampling_mask") or []
        logprobs = meta.get("output_token_sampling_logprobs") or []
        if len(kept) != count or len(logprobs) != count:
            raise SlimxError(
                f"{self.url} returned the tokens kept by top-k and top-p for {len(kept)} of {count} sampled tokens; "
                "start the engine with the slimx plugin"
            )
        ids = np.array([token for row in kept for token in row], np.int32)
        return Support(ids=ids, counts=np.array([len(row) for row in kept], np.int32)), logprobs

    def _versions(self, meta: dict[str, Any], count: int) -> list[tuple[int, int, int]]:
        spans = spans_of(meta, count)
        return [
            (span["start"], span["end"], self.version(span["version"])) for span in spans if span["end"] > span["start"]
        ]


def spans_of(meta: dict[str, Any], count: int) -> Sequence[dict[str, Any]]:
    """{start, end, version}: runs of the `count` sampled tokens by the weight version, as SGLang says it."""
    return meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
