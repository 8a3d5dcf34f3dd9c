"""Sparse attention's indexers in SGLang: where an engine's parameters store the indexers' tensors. Written for sglang
0.5.23."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

from torch import nn

from slimx.adapters.sglang.weights.layout import ServedParameter, ServedPiece, share_of_rows, whole


class _Indexer(Protocol):
    """Attributes of SGLang's Indexer that are read to locate its weights."""

    head_dim: int


class _KeyProjection(Protocol):
    """Attributes of the linear layer with an indexer's key projection that are read to locate its weights."""

    output_size: int


def indexer_keys(parameter: ServedParameter) -> Iterator[ServedPiece]:
    """Yields an indexer's fused parameter, which every rank stores completely: the rows of the key projection (wk),
    then of the projection to head weights (weights_proj)."""
    head = cast(_Indexer, parameter.parent).head_dim
    yield share_of_rows(parameter, "{at}.wk.weight", head, head, 0, 0)
    heads = cast(_KeyProjection, parameter.owner).output_size - head
    yield share_of_rows(parameter, "{at}.weights_proj.weight", heads, heads, 0, head)


def published_name(model: nn.Module, name: str) -> str:
    """Returns `name`, because SGLang and checkpoints give a parameter the same name."""
    return name


_INDEXER = r"(?P<at>.+\.self_attn\.indexer)\."
ROWS = (
    (_INDEXER + r"(wq_b|wk|weights_proj)\.weight", whole),
    (_INDEXER + r"k_norm\.(weight|bias)", whole),
    (_INDEXER + r"wk_weights_proj\.weight", indexer_keys),
)
"""Pairs of a regular expression for parameter names and the function that locates the tensors of a matching parameter;
they extend the table in `slimx.adapters.sglang.weights.layout`."""
GAPS = ()
REPLACEMENTS = ()
