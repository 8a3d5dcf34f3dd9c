"""Places of an indexer's tensors in SGLang's models. Written for sglang 0.5.23."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.adapters.sglang.weights.layout import ServedParameter, ServedPiece, share_of_rows, whole


def indexer_keys(at: ServedParameter) -> Iterator[ServedPiece]:
    """Rows of an indexer's key projection, then of its heads' weights, on every rank."""
    head = at.parent.head_dim
    yield share_of_rows("{at}.wk.weight", head, at.cols, head, 0, 0)
    heads = at.owner.output_size - head
    yield share_of_rows("{at}.weights_proj.weight", heads, at.cols, heads, 0, head)


_INDEXER = r"(?P<at>.+\.self_attn\.indexer)\."
ROWS = (
    (_INDEXER + r"(wq_b|wk|weights_proj)\.weight", whole),
    (_INDEXER + r"k_norm\.(weight|bias)", whole),
    (_INDEXER + r"wk_weights_proj\.weight", indexer_keys),
)
"""Rows of `slimx.adapters.sglang.weights.layout`."""
GAPS = ()
REPLACEMENTS = ()
