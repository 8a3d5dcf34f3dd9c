"""Low-rank adapters in whole trainers: gradients are those that transformers implies, the base does not move, and a
checkpoint brings adapters back under its own layout and another."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slimx.convert.peft import export_adapters
from tests.integration.conftest import free_port
from tests.integration.engine_families import make_model
from tests.integration.lora_rank import ASKED, LORA, LR, STEPS
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_oracle import Oracle, write_model
from tests.integration.trainer_rank import demonstrations
from tests.refusals import refused

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2-EP2": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
    "DP2-EP2": {
        "world_size": 2,
        "expert": 2,
        "recompute": {"granularity": "selective", "modules": ["core_attn", "moe"]},
    },
    "dense-TP2": {"world_size": 2, "tensor": 2, "recompute": {"granularity": "selective", "modules": ["mlp"]}},
    "dense": {"world_size": 1},
    "PP2-CP2-EP2": {"world_size": 4, "pipeline": 2, "context": 2, "expert": 2, "recompute": {"granularity": "full"}},
}
"""In the order in which they run; the second and the fourth take over the checkpoint of the one before."""


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Directory, and what each rank said, by layout."""
    root = tmp_path_factory.mktemp("lora")
    make_model("qwen2", root / "qwen2")
    out: dict[str, tuple[Path, list[dict[str, Any]]]] = {}
    before = None
    for name, layout in LAYOUTS.items():
        directory, world = root / name, layout["world_size"]
        directory.mkdir()
        job = {
            "layout": layout,
            "model": str(root / "qwen2" if name.startswith("dense") else tiny_model),
            "out": str(directory),
            "init_method": f"tcp://127.0.0.1:{free_port()}",
            "moved": str(before / "checkpoint") if before else None,
        }
        if before:
            export_adapters(before / "checkpoint", directory / "peft", Path(job["model"]), LORA["alpha"])
        (directory / "job.json").write_text(json.dumps(job))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run_ranks, "tests.integration.lora_rank", directory, world)
            while not (directory / ASKED).exists() and not running.done():
                time.sleep(0.05)
            if not running.done():
                answer(Path(job["model"]), directory)
            running.result()
        out[name] = directory, [json.loads((directory / f"{rank}.json").read_text()) for rank in range(world)]
        before = None if before else directory
    return out


def answer(model: Path, directory: Path) -> None:
    """Write transformers' gradients under the merged weights, as a checkpoint. The ranks' own processes cannot: they
    have changed torch for megatron-core."""
    made = write_model(directory / "made", model, load_file(directory / "merged.safetensors"))
    oracle = Oracle(made)
    oracle.sft_loss(demonstrations(STEPS)).backward()
    gradients = {name: gradient.contiguous() for name, gradient in oracle.gradients().items()}
    save_file(gradients, made / "model.safetensors", {"format": "pt"})
    made.rename(directory / "merged")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_have_the_gradients_that_transformers_implies_and_the_base_stays(trained, layout):
    for said in trained[layout][1]:
        assert max(said["errors"].values()) <= 1e-5, said["errors"]
        assert said["frozen"]
    named = {name for said in trained[layout][1] for name in said["errors"]}
    kinds = ("self_attention.linear_qkv", "self_attention.linear_proj", "linear_fc1", "linear_fc2")
    assert all(any(kind in name for name in named) for kind in kinds)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_base_to_the_last_bit_and_the_policy_is_left_alone(trained, layout):
    told = [said for said in trained[layout][1] if "reference" in said]
    assert len(told) == LAYOUTS[layout]["world_size"] // LAYOUTS[layout].get("pipeline", 1), "of the last stage"
    for said in told:
        assert said["reference"] == dict.fromkeys(("is_base", "is_given", "policy_learned", "policy_is_back"), True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restored_trainer_goes_on_to_the_last_bit(trained, layout):
    for said in trained[layout][1]:
        ahead, restored = said["restored"]
        assert restored == ahead
        assert said["restored_equal"]


@pytest.mark.parametrize(("there", "here"), [("TP2-EP2", "DP2-EP2"), ("dense-TP2", "dense")])
def test_another_layout_restores_the_same_merged_weights(trained, there, here):
    saved = load_file(trained[there][0] / "saved.safetensors")
    moved = load_file(trained[here][0] / "moved.safetensors")
    assert saved.keys() == moved.keys()
    assert all(torch.equal(moved[name], value) for name, value in saved.items())


@pytest.mark.parametrize("layout", ["DP2-EP2", "dense"])
def test_exported_adapters_begin_a_trainer_of_another_layout_to_the_last_bit(trained, layout):
    for said in trained[layout][1]:
        assert said["imported"]
        assert 0 < said["moved_by"] <= 1.01 * LR, "Adam's first step is at most the learning rate"


@pytest.mark.parametrize("layout", ["TP2-EP2", "dense-TP2"])
def test_peft_loads_exported_adapters_and_computes_what_the_merged_weights_do(trained, layout, tmp_path):
    """Logits before PEFT merges them, and the weights after; over a sequence in which experts are chosen by all."""
    peft = pytest.importorskip("peft", reason="peft is in the lock, and not in this environment")
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_counts_gradients_and_state_of_adapters_only(trained, layout):
    for said in trained[layout][1]:
        assert said["planned"] == said["bytes"]
        assert said["merged"][0] == said["merged"][1] > 0
