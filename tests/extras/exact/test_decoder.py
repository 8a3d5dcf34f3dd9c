"""A whole decoder of exact mode's operations: its log-probabilities are the same bits in every packing and prefix."""

from __future__ import annotations

import pytest
import torch

from tests.extras.exact.decoder import Decoder, packed, sequences
from tests.extras.exact.stand import DTYPES, assert_same_bits

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@both_dtypes
def test_packings_and_prefixes_agree(dtype: torch.dtype) -> None:
    model, parts = Decoder(dtype), sequences([40, 1, 130, 17])
    together, bounds = packed(parts)
    whole = model.logprobs(together, bounds)
    assert whole.exp().sum(1).sub(1).abs().max() < 1e-4
    for first, last, tokens in zip(bounds, bounds[1:], parts, strict=False):
        assert_same_bits(model.logprobs(tokens, [0, len(tokens)]), whole[first:last], len(tokens))
    assert_same_bits(model.logprobs(parts[2][:77], [0, 77]), whole[41:118], "a prefix")
    back, _ = packed(parts[::-1])
    assert_same_bits(model.logprobs(back, [0, 17, 147, 148, 188])[-40:], whole[:40], "behind the others")
