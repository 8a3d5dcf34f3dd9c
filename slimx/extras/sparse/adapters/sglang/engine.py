"""Layout of an indexer's tensors in SGLang's models. Written for sglang 0.5.23."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

from slimx.adapters.sglang.weights.layout import ServedParameter, ServedPiece, share_of_rows, whole


class _Indexer(Protocol):
    """Attributes of SGLang's Indexer."""

    head_dim: int


class _KeyProjection(Protocol):
    """Attributes of the indexer's key projection."""

    output_size: int


def indexer_keys(parameter: ServedParameter) -> Iterator[ServedPiece]:
    """Yields the rows of an indexer's key projection, then of its heads' weights, complete on every rank."""
    head = cast(_Indexer, parameter.parent).head_dim
    yield share_of_rows("{at}.wk.weight", head, parameter.cols, head, 0, 0)
    heads = cast(_KeyProjection, parameter.owner).output_size - head
    yield share_of_rows("{at}.weights_proj.weight", heads, parameter.cols, heads, 0, head)


_INDEXER = r"(?P<at>.+\.self_attn\.indexer)\."
ROWS = (
    (_INDEXER + r"(wq_b|wk|weights_proj)\.weight", whole),
    (_INDEXER + r"k_norm\.(weight|bias)", whole),
    (_INDEXER + r"wk_weights_proj\.weight", indexer_keys),
)
"""Rows of `slimx.adapters.sglang.weights.layout`."""
GAPS = ()
REPLACEMENTS = ()
