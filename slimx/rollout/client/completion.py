"""Completions and scores that the client returns, and the concatenation of a completion's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.sampling_support import Support
from slimx.models.families import ModelSpec

VersionSpan = tuple[int, int, int]
"""(start, stop, version): a range of sampled tokens, stop excluded, and the weight version that sampled it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model, which the client needs to check token ids and to parse routed experts."""

    vocab_size: int
    layers: int = 0
    """Number of layers, including dense ones: SGLang returns expert ids for every layer."""
    top_k: int = 0
    """Number of experts per token (k); 0 for a dense model."""
    experts: int = 0

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelShape:
        """Returns the sizes of the model that `spec` describes."""
        fields = spec.transformer
        return cls(spec.vocab_size, fields["num_layers"], fields.get("moe_router_topk") or 0, spec.experts)


@dataclass(frozen=True, slots=True)
class Completion:
    """The response to one request, or one piece of a streamed response, with n sampled tokens."""

    token_ids: np.ndarray
    """int32 [n]: sampled tokens, including the stop token if one was sampled."""
    logprobs: np.ndarray
    """float32 [n]: log-probs of the sampled tokens under softmax(logits / temperature) over the candidates in
    `support`, or over the whole vocabulary without `support`. Greedy sampling uses temperature 1 here."""
    versions: list[VersionSpan]
    """Ranges of tokens with the weight version that sampled each range; together they cover [0, n)."""
    finish_reason: str
    """"stop", "length" or "abort"; "" for every piece of a stream except the last. An aborted request returns the
    tokens sampled so far."""
    routed_experts: np.ndarray | None
    """uint8 (uint16 if the model has more than 256 experts) [prompt tokens + n - 1, layers, k]: logical expert ids;
    None if not requested."""
    cached_tokens: int
    """Number of prompt tokens whose KV entries came from the prefix cache."""
    seconds: float
    """Wall time of the request in seconds; for a piece of a stream, the time since the previous piece."""
    temperature: float = 1.0
    """Sampling temperature, which `logprobs` take into account; 0 means greedy sampling."""
    support: Support | None = None
    """Candidates that top-k and top-p kept at each of the n positions; None if neither was used."""
    policy: str = ACTOR
    """Name of the policy that sampled the tokens."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of L given tokens under an engine's current weights."""

    logprobs: np.ndarray
    """float32 [L - 1]: log softmax(logits) of tokens 1 to L - 1. SGLang always scores inputs at temperature 1."""
    version: int
    routed_experts: np.ndarray | None
    """Logical expert ids [L - 1, layers, k] with the dtype of `Completion.routed_experts`; None if not requested."""


def joined(parts: Sequence[Completion], prompt: int) -> Completion:
    """Concatenates the consecutive parts of one completion, such as those before and after an interruption. `prompt`:
    length of the prompt in tokens.

    Each token keeps the version, log-prob and routed experts of the part that sampled it.
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
        # Rows are indexed by input position, and a part's last token was sampled but not yet fed back as input.
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
