"""Completions and scores: what engines answer, and how the parts of one answer are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.support import Support
from slimx.models.families import ModelSpec

VersionSpan = tuple[int, int, int]
"""(start, stop, version): a run of sampled tokens and the weight version that sampled it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model by which the client checks requests and reads answers."""

    vocab_size: int
    layers: int = 0
    """All layers, dense ones too: SGLang returns a row of experts for each."""
    top_k: int = 0
    """Experts per token; 0 for a dense model."""
    experts: int = 0

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelShape:
        """The shape of a model of any family."""
        fields = spec.transformer
        return cls(spec.vocab_size, fields["num_layers"], fields.get("moe_router_topk") or 0, spec.experts)


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request, or one piece of a streamed answer."""

    token_ids: np.ndarray
    """int32 [n]: the sampled tokens, with the end token if one was sampled."""
    logprobs: np.ndarray
    """float32 [n]: under softmax(logits / temperature) over the tokens of `support`; greedy counts as temperature 1."""
    versions: list[VersionSpan]
    """Runs of tokens sampled by one weight version, covering [0, n)."""
    finish_reason: str
    """"stop", "length" or "abort" (an aborted request returns what it has); "" of a piece that is not the last."""
    routed_experts: np.ndarray | None
    """uint8 (uint16 above 256 experts) [prompt + n - 1, layers, k]: logical expert ids; None if not asked for."""
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    seconds: float
    """Wall time of the request, or since the piece before."""
    temperature: float = 1.0
    """Temperature at which it was sampled, and which `logprobs` are of."""
    support: Support | None = None
    """n positions: the tokens that top-k and top-p kept; None where neither was asked for."""
    policy: str = ACTOR
    """Name of the policy that sampled it."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of given tokens under an engine's current weights."""

    logprobs: np.ndarray
    """float32 [L - 1]: log softmax(logits) of tokens 1..L-1. SGLang scores inputs at temperature 1, always."""
    version: int
    routed_experts: np.ndarray | None
    """As in `Completion`, [L - 1, layers, k]."""


def joined(parts: Sequence[Completion], prompt: int) -> Completion:
    """One completion of `parts`, each of which continued those before it after `prompt` tokens of the request.

    Each token keeps the version, the log-prob and the routes of the part that sampled it."""
    counts = [len(part.token_ids) for part in parts]
    versions: list[VersionSpan] = []
    for part, before in zip(parts, accumulate(counts, initial=0), strict=False):
        for start, stop, version in part.versions:
            if versions and versions[-1][2] == version:
                versions[-1] = (versions[-1][0], before + stop, version)
            else:
                versions.append((before + start, before + stop, version))
    routes = None
    if all(part.routed_experts is not None for part in parts):
        # Rows go by input position: those of a part end before its own last token.
        rows = [0, *(prompt + count - 1 for count in accumulate(counts))]
        routes = np.concatenate(
            [part.routed_experts[start:stop] for part, (start, stop) in zip(parts, pairwise(rows), strict=True)]
        )
    support = None
    if any(part.support is not None for part in parts):
        support = Support.join(
            [Support.everything(len(part.token_ids)) if part.support is None else part.support for part in parts]
        )
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=versions,
        routed_experts=routes,
        cached_tokens=parts[0].cached_tokens,
        seconds=sum(part.seconds for part in parts),
        support=support,
    )
