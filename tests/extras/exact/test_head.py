"""Log-probs of a trainer in exact mode are those of whole rows, in chunks of any size."""

from __future__ import annotations

import pytest
import torch

from slimx.extras.exact import head
from slimx.extras.exact import operations as exact
from slimx.trainer.model.logprobs import Targets, label_logprobs
from tests.extras.exact.stand import DTYPES, assert_same_bits, values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_of_chunks_have_the_bits_of_whole_rows(dtype: torch.dtype) -> None:
    hidden, weight = values(7, 40, dtype=dtype, seed=1), values(33, 40, dtype=dtype, seed=2)
    labels, temperature = torch.arange(7) * 4, torch.full((7,), 0.7)
    expected = exact.token_logprobs(exact.linear(hidden, weight).float() / temperature[:, None], labels)
    targets = Targets(labels=labels, temperature=temperature)
    for chunk in (3, 7):
        found = label_logprobs(hidden, weight, targets, group=None, chunk=chunk, head=head)
        assert_same_bits(found[0], expected, chunk)
