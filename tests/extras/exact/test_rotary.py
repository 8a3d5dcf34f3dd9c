"""Rotary embeddings of exact mode: the frequencies that models were trained with."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slimx.extras.exact.operations import Llama3, Rotary, Yarn, yarn_lengthening

LLAMA = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5}
MAGNITUDE = yarn_lengthening(40, 1.0) / yarn_lengthening(40, 0.5)


@pytest.mark.parametrize(
    ("rotary", "words"),
    [
        (Rotary(64, 1e4), None),
        (Rotary(128, 5e5, Llama3(8.0, 1.0, 4.0, 8192)), LLAMA | {"original_max_position_embeddings": 8192}),
        (Rotary(64, 1e4, Yarn(40.0, 4096, 32.0, 1.0, MAGNITUDE)), YARN | {"original_max_position_embeddings": 4096}),
    ],
)
def test_the_table_is_that_of_transformers_frequencies(rotary: Rotary, words: dict | None) -> None:
    parameters = {"rope_theta": rotary.base} | (words or {"rope_type": "default"})
    config = LlamaConfig(head_dim=rotary.dimensions, rope_parameters=parameters, max_position_embeddings=163840)
    if words is None:
        frequencies, factor = rotary.base ** -(torch.arange(0, rotary.dimensions, 2) / rotary.dimensions), 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    table = rotary.table(300)
    assert table.shape == (300, rotary.dimensions) and table.dtype == torch.float32
    angles = torch.arange(300.0).double()[:, None] * frequencies.double()
    expected = torch.cat((angles.cos(), angles.sin()), dim=1) * factor
    torch.testing.assert_close(table.double(), expected, rtol=0, atol=300 * 2e-7)
