"""A gpt-oss in the trainer computes what transformers computes, in every layout, and comes back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssConfig, GptOssForCausalLM

from slimx.data.weights import loss_weights
from slimx.layout.ranks import Sizes
from slimx.ports import free_port
from tests.integration.conftest import Weights
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_rank import demonstrations

pytestmark = pytest.mark.integration

LAYOUTS = {
    "single": Sizes(),
    "TP2xPP2xEP2": Sizes(tensor=2, pipeline=2, expert=2),
    "CP2": Sizes(context=2),
}
DEADLINE_S = 120
CONFIG = {
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 5,  # the demonstrations have 6 to 39 tokens
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    # Frequencies of which some are scaled, some are not, and some lie between.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 512,
    },
}


class Oracle(NamedTuple):
    """A model of transformers, its checkpoint and what it says of the demonstrations."""

    path: Path
    weights: Weights
    logits: dict[tuple[int, ...], torch.Tensor]
    """[L - 1, vocab] by tokens."""
    gradients: Weights
    """Of one step on all of them."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(GptOssConfig(**CONFIG), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.add_(0.2 * noise)
            elif "bias" in name or "sinks" in name:
                parameter.copy_(noise)
            elif "gate_up_proj" in name:
                parameter.copy_(0.5 * noise)  # so that the limit of 7 cuts some
    model.save_pretrained(path)
    batch, logits = demonstrations(0), {}
    for trajectory, weight in zip(batch, loss_weights(batch, "token"), strict=True):
        tokens = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        output = model(tokens[None, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(output, tokens[1:], reduction="none")
        (torch.from_numpy(weight) * loss).sum().backward()
        logits[tuple(tokens[:-1].tolist())] = output.detach()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Oracle(path, load_file(path / "model.safetensors"), logits, gradients)


class Laboratory:
    """Runs each layout once, when it is first asked for."""

    def __init__(self, directory: Path, oracle: Oracle):
        self.directory, self.oracle = directory, oracle

    def __call__(self, layout: str) -> Path:
        out, sizes = self.directory / layout, LAYOUTS[layout]
        if not out.exists():
            out.mkdir()
            keys = {
                "tensor": sizes.tensor,
                "pipeline": sizes.pipeline,
                "expert": sizes.expert,
                "context": sizes.context,
            }
            job = {
                "path": str(self.oracle.path),
                "layout": {"world_size": sizes.world, "expert_tensor": 1, **keys},
                "out": str(out),
                "init_method": f"tcp://127.0.0.1:{free_port()}",
            }
            (out / "job.json").write_text(json.dumps(job))
            run_ranks("tests.integration.gpt_oss_rank", out, sizes.world, DEADLINE_S)
        return out


@pytest.fixture(scope="module")
def laboratory(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    yield Laboratory(tmp_path_factory.mktemp("layouts"), oracle)


every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.mark.parametrize("layout", [name for name, sizes in LAYOUTS.items() if sizes.context == 1])
def test_logits_are_those_of_transformers_at_every_position(laboratory, oracle, layout):
    sizes, seen = LAYOUTS[layout], set()
    with np.load(laboratory(layout) / f"{sizes.world - sizes.tensor}.npz") as arrays:
        for number in range(sum(name.startswith("tokens.") for name in arrays)):
            at = 0
            for length in arrays[f"lengths.{number}"]:
                tokens, found = (arrays[f"{key}.{number}"][at : at + length] for key in ("tokens", "logits"))
                at += length
                if tokens.any():  # not the padding
                    seen.add(tuple(tokens.tolist()))
                    assert np.abs(found - oracle.logits[tuple(tokens.tolist())].numpy()).max() <= 1e-4
    assert seen == oracle.logits.keys()


@every_layout
def test_a_checkpoint_comes_back_from_the_trainer_bit_for_bit(laboratory, oracle, layout):
    back = load_file(laboratory(layout) / "weights.safetensors")
    assert back.keys() == oracle.weights.keys()
    assert [name for name, tensor in oracle.weights.items() if not torch.equal(back[name], tensor)] == []


@every_layout
def test_gradients_are_those_of_transformers_for_sinks_and_biases_too(laboratory, oracle, layout):
    found = load_file(laboratory(layout) / "gradients.safetensors")
    assert found.keys() == oracle.gradients.keys()
    for name, wanted in oracle.gradients.items():
        # A key's bias moves all scores of a query alike, so that only a sink or a window's edge feels it.
        assert wanted.any(), name
        assert (found[name] - wanted).abs().max() <= 2e-5 * max(wanted.abs().max().item(), 1e-3), name


@every_layout
def test_a_trainers_checkpoint_gives_every_weight_back_bit_for_bit(laboratory, oracle, layout):
    saved, restored = (load_file(laboratory(layout) / f"{kind}.safetensors") for kind in ("after", "restored"))
    assert [name for name, tensor in saved.items() if not torch.equal(restored[name], tensor)] == []
    assert [name for name, tensor in saved.items() if torch.equal(oracle.weights[name], tensor)] == []
