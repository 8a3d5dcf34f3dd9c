"""Completions and scores: responses of engines, and how their parts are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.sampling_support import Support
from slimx.models.families import ModelSpec

VersionSpan = tuple[int, int, int]
"""(start, stop, version): a range of sampled tokens and the weight version that sampled it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model with which the client checks requests and parses responses."""

    vocab_size: int
    layers: int = 0
    """Number of layers, dense ones included: SGLang returns expert ids for each."""
    top_k: int = 0
    """Experts per token; 0 for a dense model."""
    experts: int = 0

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelShape:
        """Returns the shape of a model of any family."""
        fields = spec.transformer
        return cls(spec.vocab_size, fields["num_layers"], fields.get("moe_router_topk") or 0, spec.experts)


@dataclass(frozen=True, slots=True)
class Completion:
    """The response to one request, or one piece of a streamed response."""

    token_ids: np.ndarray
    """int32 [n]: sampled tokens, including the end token if sampled."""
    logprobs: np.ndarray
    """float32 [n]: log-probs under softmax(logits / temperature) over the tokens of `support`; greedy counts as
    temperature 1."""
    versions: list[VersionSpan]
    """Ranges of tokens sampled by one weight version, covering [0, n)."""
    finish_reason: str
    """"stop", "length" or "abort" (an aborted request returns its tokens so far); "" for a piece that is not the
    last."""
    routed_experts: np.ndarray | None
    """uint8 (uint16 above 256 experts) [prompt + n - 1, layers, k]: logical expert ids; None if not requested."""
    cached_tokens: int
    """Number of prompt tokens with KV from the prefix cache."""
    seconds: float
    """Wall time of the request, or since the previous piece, in seconds."""
    temperature: float = 1.0
    """Sampling temperature, which also applies to `logprobs`."""
    support: Support | None = None
    """Candidates kept by top-k and top-p at n positions; None without either."""
    policy: str = ACTOR
    """Name of the policy that sampled it."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of prompt tokens under an engine's current weights."""

    logprobs: np.ndarray
    """float32 [L - 1]: log softmax(logits) of tokens 1..L-1. SGLang always scores inputs at temperature 1."""
    version: int
    routed_experts: np.ndarray | None
    """As in `Completion`, [L - 1, layers, k]."""


def joined(parts: Sequence[Completion], prompt: int) -> Completion:
    """Joins `parts`, each of which continues the previous ones after a prompt of `prompt` tokens, into one completion.

    Each token keeps the version, the log-prob and the routed experts of the part that sampled it.
    """
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=_joined_versions(parts),
        routed_experts=_joined_routes(parts, prompt),
        cached_tokens=parts[0].cached_tokens,
        seconds=sum(part.seconds for part in parts),
        support=_joined_support(parts),
    )


def _joined_versions(parts: Sequence[Completion]) -> list[VersionSpan]:
    versions: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for start, stop, version in part.versions:
            if versions and versions[-1][2] == version:
                versions[-1] = (versions[-1][0], offset + stop, version)
            else:
                versions.append((offset + start, offset + stop, version))
        offset += len(part.token_ids)
    return versions


def _joined_routes(parts: Sequence[Completion], prompt: int) -> np.ndarray | None:
    rows: list[np.ndarray] = []
    start = 0
    stop = prompt - 1
    for part in parts:
        if part.routed_experts is None:
            return None
        # Rows are indexed by input position: those of a part end before its last token.
        stop += len(part.token_ids)
        rows.append(part.routed_experts[start:stop])
        start = stop
    return np.concatenate(rows)


def _joined_support(parts: Sequence[Completion]) -> Support | None:
    if all(part.support is None for part in parts):
        return None
    supports: list[Support] = []
    for part in parts:
        unrestricted = Support.everything(len(part.token_ids))
        supports.append(unrestricted if part.support is None else part.support)
    return Support.join(supports)
