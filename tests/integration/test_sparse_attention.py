"""DeepSeek-V3.2 and GLM-5: what test_families relies on where their indexers choose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.family_cases import CASES, SPARSE

pytestmark = pytest.mark.integration


def chosen(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Per layer which tokens each query sees, bool [L, L]."""
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, indices: found.append(indices[0].long()))
        for name, module in model.named_modules()
        if name.endswith(".indexer")
    ]
    with torch.no_grad():
        model(tokens[None])
    for hook in hooks:
        hook.remove()
    nothing = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    return [nothing.scatter(1, indices, True).tril() for indices in found]


@pytest.mark.parametrize("name", ["V3.2", "GLM-5"])
def test_the_tiny_models_choose_and_no_choice_hangs_on_rounding_or_a_tie(tmp_path: Path, name: str):
    """Else trainer and transformers would agree whatever the indexer says, or differ by chance."""
    oracle = CASES[name].make(tmp_path, list(CASES).index(name))
    oracle.model.set_experts_implementation("eager")  # the grouped product knows no float64
    sequences = [torch.from_numpy(each.token_ids[:-1].astype(np.int64)) for each in oracle.trajectories()]
    single = [chosen(oracle.model, tokens) for tokens in sequences]
    double = [chosen(oracle.model.double(), tokens) for tokens in sequences]
    for tokens, one, other in zip(sequences, single, double, strict=True):
        assert len(one) == oracle.model.config.num_hidden_layers
        assert all(torch.equal(mine, yours) for mine, yours in zip(one, other, strict=True))
        seen = torch.arange(1, len(tokens) + 1).clamp(max=SPARSE["index_topk"])
        assert all(torch.equal(layer.sum(1), seen) for layer in one)
    assert max(len(tokens) for tokens in sequences) > 4 * SPARSE["index_topk"]
