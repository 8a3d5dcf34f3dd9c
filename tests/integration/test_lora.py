"""Low-rank adapters in whole trainers: gradients are those that transformers implies, the base does not move, and a
checkpoint brings adapters back under its own layout and another."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slimx.extras.convert.formats.peft import export_adapters
from slimx.runtime.ports import free_port
from tests.integration import transformer_engine_stand
from tests.integration.deepseek_checkpoint import make_deepseek
from tests.integration.engine_families import make_model
from tests.integration.lora_rank import ASKED, LORA, LR, STEPS, TRAINED
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_oracle import Oracle, write_model
from tests.integration.trainer_rank import demonstrations
from tests.needed import missing
from tests.peft_stand import logprobs, make_adapters
from tests.refusals import refused

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "latent-TP2-EP2": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
    "latent-DP2-EP2": {
        "world_size": 2,
        "expert": 2,
        "recompute": {"granularity": "selective", "modules": ["core_attn", "moe"]},
    },
    "dense-TP2": {"world_size": 2, "tensor": 2, "recompute": {"granularity": "selective", "modules": ["mlp"]}},
    "dense": {"world_size": 1},
    "PP2": {"world_size": 2, "pipeline": 2, "recompute": {"granularity": "full"}},
    "PP2-CP2-EP2": {"world_size": 4, "pipeline": 2, "context": 2, "expert": 2, "recompute": {"granularity": "full"}},
    "shared-TP2-ETP2": {"world_size": 2, "tensor": 2, "expert_tensor": 2},
    "shared-TP2-EP2-ETP2": {"world_size": 4, "tensor": 2, "expert": 2, "expert_tensor": 2},
    "shared-DP2-EP2": {"world_size": 2, "expert": 2, "recompute": {"granularity": "selective", "modules": ["moe"]}},
    "EP2-ETP2": {"world_size": 4, "expert": 2, "expert_tensor": 2},
    "exact-TP2-ETP2": {"world_size": 2, "tensor": 2, "expert_tensor": 2},
    "engine-TP2-EP2": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
}
"""Layouts of `TAKES_OVER` also restore the checkpoint of another."""
TAKES_OVER = {"latent-DP2-EP2": "latent-TP2-EP2", "dense": "dense-TP2", "shared-DP2-EP2": "shared-TP2-EP2-ETP2"}
SLOW = (
    *("latent-DP2-EP2", "shared-TP2-ETP2", "shared-TP2-EP2-ETP2", "shared-DP2-EP2", "EP2-ETP2"),
    *("PP2-CP2-EP2", "exact-TP2-ETP2", "engine-TP2-EP2"),
)
MODELS = {"latent": "deepseek", "dense": "qwen2", "shared": "glm4_moe", "engine": "glm4_moe", "exact": "deepseek"}
"""By the beginning of a layout's name; the quickstart's Qwen3-MoE for others. The layers of `engine` are Transformer
Engine's (transformer_engine_stand.py), those of `exact` are in exact mode."""
TARGETS = {
    "deepseek": ["attention", "mlp", "shared_experts", "experts", "router"],
    "qwen2": None,
    "glm4_moe": ["attention", "mlp", "shared_experts", "experts"],
    "qwen3_moe": ["attention", "experts", "router"],
}
BY_PEFT = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]}
"""Adapters that peft makes of `qwen2`, an A for each module; trainers begin with them, too."""
EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
SHARED = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
ATTENTION = ("self_attention.linear_qkv", "self_attention.linear_proj")
LATENT = ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "linear_proj")
DENSE = (".mlp.linear_fc1", ".mlp.linear_fc2")
KINDS = {
    "deepseek": (*LATENT, *DENSE, *SHARED, *EXPERTS, "mlp.router"),
    "qwen2": (*ATTENTION, *DENSE),
    "glm4_moe": (*ATTENTION, *DENSE, *SHARED, *EXPERTS),
    "qwen3_moe": (*ATTENTION, *EXPERTS, "mlp.router"),
}
"""Parts of the names of weights that have adapters."""


class Trained:
    """Directory, and what each rank said, by layout; a layout runs when it is asked for."""

    def __init__(self, root: Path, quickstart: Path):
        self.root, self.models = root, {"qwen3_moe": quickstart}
        self._done: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def __getitem__(self, name: str) -> tuple[Path, list[dict[str, Any]]]:
        if name not in self._done:
            self._done[name] = self._run(name)
        return self._done[name]

    def model(self, name: str) -> Path:
        kind = kind_of(name)
        if kind not in self.models:
            self.models[kind] = self.root / kind
            make_deepseek(self.root / kind) if kind == "deepseek" else make_model(kind, self.root / kind)
        return self.models[kind]

    def _run(self, name: str) -> tuple[Path, list[dict[str, Any]]]:
        layout, model, directory = LAYOUTS[name], self.model(name), self.root / name
        world = layout["world_size"]
        before = self[TAKES_OVER[name]][0] if name in TAKES_OVER else None
        if name.startswith("engine") and not transformer_engine_stand.PACKAGE.is_dir():
            missing(f"needs {transformer_engine_stand.PACKAGE}: `make .venv/transformer-engine` installs it")
        directory.mkdir()
        job = {
            "layout": layout,
            "model": str(model),
            "targets": targets(name),
            "mode": "exact" if name.startswith("exact") else "fast",
            "out": str(directory),
            "init_method": f"tcp://127.0.0.1:{free_port()}",
            "moved": str(before / "checkpoint") if before else None,
        }
        if kind_of(name) == "qwen2":
            make_adapters(model, directory / "trained", **BY_PEFT)
        if before:
            export_adapters(before / "checkpoint", directory / "peft", model, LORA["alpha"])
        (directory / "job.json").write_text(json.dumps(job))
        with ThreadPoolExecutor(1) as pool:
            role = "rank_with_engine" if name.startswith("engine") else "rank"
            running = pool.submit(run_ranks, "tests.integration.lora_rank", directory, world, role=role)
            while not (directory / ASKED).exists() and not running.done():
                time.sleep(0.05)
            if not running.done():
                answer(model, directory)
            running.result()
        return directory, [json.loads((directory / f"{rank}.json").read_text()) for rank in range(world)]


def kind_of(name: str) -> str:
    return MODELS.get(name.split("-")[0], "qwen3_moe")


def targets(name: str) -> list[str] | None:
    return TARGETS[kind_of(name)]


def each(*names: str) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.slow("full grid of layouts")] if name in SLOW else [])
        for name in names or LAYOUTS
    ]


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("lora"), tiny_model)


def answer(model: Path, directory: Path) -> None:
    """Write transformers' gradients under the merged weights, as a checkpoint. The ranks' own processes cannot: they
    have changed torch for megatron-core."""
    merged = load_file(directory / "merged.safetensors")
    made = write_model(directory / "made", model, merged)
    oracle = Oracle(made)
    oracle.sft_loss(demonstrations(STEPS)).backward()
    found = oracle.gradients()
    # A bias of selection has none.
    gradients = {name: found.get(name, torch.zeros_like(value)).contiguous() for name, value in merged.items()}
    save_file(gradients, made / "model.safetensors", {"format": "pt"})
    made.rename(directory / "merged")


@pytest.mark.parametrize("layout", each())
def test_adapters_have_the_gradients_that_transformers_implies(trained, layout):
    for said in trained[layout][1]:
        assert max(said["errors"].values()) <= 1e-5, said["errors"]
        assert said["frozen"]
    named = {name for said in trained[layout][1] for name in said["errors"]}
    for kind in KINDS[kind_of(layout)]:
        assert any(kind in name for name in named), kind


@pytest.mark.parametrize("layout", each())
def test_the_reference_is_the_base_bit_for_bit(trained, layout):
    told = [said for said in trained[layout][1] if "reference" in said]
    assert len(told) == LAYOUTS[layout]["world_size"] // LAYOUTS[layout].get("pipeline", 1), "of the last stage"
    for said in told:
        assert said["reference"] == dict.fromkeys(("is_base", "is_given", "policy_learned", "policy_is_back"), True)


@pytest.mark.parametrize("layout", each())
def test_a_restored_trainer_goes_on_to_the_last_bit(trained, layout):
    for said in trained[layout][1]:
        ahead, restored = said["restored"]
        assert restored == ahead
        assert said["restored_equal"]


@pytest.mark.parametrize("here", each(*TAKES_OVER))
def test_another_layout_restores_the_same_merged_weights(trained, here):
    there = TAKES_OVER[here]
    saved = load_file(trained[there][0] / "saved.safetensors")
    moved = load_file(trained[here][0] / "moved.safetensors")
    assert saved.keys() == moved.keys()
    assert all(torch.equal(moved[name], value) for name, value in saved.items())


@pytest.mark.parametrize("layout", each(*TAKES_OVER))
def test_exported_adapters_load_in_another_layout_bit_for_bit(trained, layout):
    for said in trained[layout][1]:
        assert said["imported"]
        assert 0 < said["moved_by"] <= 1.01 * LR, "Adam's first step is at most the learning rate"


@pytest.mark.parametrize("layout", each(*TAKES_OVER.values()))
def test_peft_computes_with_exported_adapters_what_merged_weights_do(trained, layout, tmp_path):
    """Logits before PEFT merges them, and the weights after; over a sequence in which experts are chosen by all."""
    directory = trained[layout][0]
    base = json.loads((directory / "job.json").read_text())["model"]
    out = tmp_path / "adapters"
    assert export_adapters(directory / "checkpoint", out, Path(base), LORA["alpha"]) > 0
    with refused("convert.exists", about=str(out)):
        export_adapters(directory / "checkpoint", out, Path(base), LORA["alpha"])
    merged = write_model(tmp_path / "merged", Path(base), load_file(directory / "saved.safetensors"))
    plain, wanted = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (base, merged))
    ids = torch.arange(64)[None] % 100
    with torch.no_grad():
        logits, without = wanted(ids).logits, plain(ids).logits
        model = peft.PeftModel.from_pretrained(plain, out)
        found = model(ids).logits
        assert (found - logits).abs().max() <= 1e-5 * logits.abs().max() < (without - logits).abs().max()
        again = model.merge_and_unload().state_dict()
    assert again.keys() == wanted.state_dict().keys()
    for name, value in wanted.state_dict().items():
        assert torch.allclose(again[name], value, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("layout", each("dense", "dense-TP2"))
def test_pefts_adapters_load_into_a_trainer_and_are_exported_unchanged(trained, layout, tmp_path):
    """Log-probs of the trainer, and of what its checkpoint is exported to, beside those of peft's own model."""
    directory, model = trained[layout][0], trained.model(layout)
    export_adapters(directory / "of_trained", tmp_path / "adapters", model, TRAINED["alpha"])
    plain = [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2)]
    first, again = map(peft.PeftModel.from_pretrained, plain, (directory / "trained", tmp_path / "adapters"))
    found, moved = np.load(directory / "0.npz"), 0.0
    for number in range(sum(key.startswith("tokens.") for key in found)):
        arrays = (torch.from_numpy(found[f"{key}.{number}"]) for key in ("tokens", "labels", "logprobs"))
        parts = (array.split(found[f"lengths.{number}"].tolist()) for array in arrays)
        for tokens, labels, of_trainer in zip(*parts, strict=True):
            right = logprobs(first, tokens)
            assert (logprobs(again, tokens) - right).abs().max() <= 1e-4
            assert (of_trainer - right.gather(1, labels[:, None])[:, 0]).abs().max() <= 1e-4
            with first.disable_adapter():
                moved = max(moved, (logprobs(first, tokens) - right).abs().max().item())
    assert moved > 0.1


@pytest.mark.parametrize("layout", each())
def test_the_plan_counts_gradients_and_state_of_adapters_only(trained, layout):
    for said in trained[layout][1]:
        assert said["planned"] == said["bytes"]
        assert said["merged"][0] == said["merged"][1] > 0
