"""Converted checkpoints in real trainers: what they load is what the Hugging Face directory holds, under any layout,
and what they save comes back as that directory, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimx.convert import run
from slimx.convert.work import convert
from slimx.ports import free_port
from tests.checkpoint_stand import DEEPSEEK_V3, QWEN3_MOE, same, tensors_of, write_checkpoint
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration
LAYOUTS = {
    "single": {"world_size": 1},
    "EP2": {"world_size": 2, "expert": 2},
    "TP2xPP2": {"world_size": 4, "tensor": 2, "pipeline": 2},
}
MODELS = {
    # Layers stacked under one key, cut for the ranks of another layout than any that loads it; and numbered ones, with
    # latent attention and a layer of multi-token prediction.
    "qwen3_moe": (QWEN3_MOE, "tensor=2,pipeline=2,expert=4,expert_tensor=1", 0),
    "deepseek_v3": (DEEPSEEK_V3, "", 1),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("convert")
    job: dict[str, Any] = {"out": str(out), "layouts": LAYOUTS, "models": {}}
    for name, (config, layout, mtp) in MODELS.items():
        path = write_checkpoint(out / name, config, file_bytes=100_000)
        convert(run.hf_to_megatron(path, layout=layout, file_bytes=60_000), out / f"{name}-m", threads=2, verify=True)
        job["models"][name] = {"path": str(path), "megatron": str(out / f"{name}-m"), "mtp": mtp}
    job["ports"] = {name: free_port() for name in LAYOUTS}
    (out / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.convert_rank", out, 4)
    return out, [json.loads((out / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trainer_loads_from_the_converted_checkpoint_what_it_loads_from_the_original(said, layout, model):
    for rank in range(LAYOUTS[layout]["world_size"]):
        assert said[1][rank][layout][model] == []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_that_a_trainer_saved_becomes_the_original_bit_for_bit(said, layout, model, tmp_path):
    out, _ = said
    conversion = run.megatron_to_hf(out / "saved" / layout / model / "iter_0000003", out / model, file_bytes=90_000)
    convert(conversion, tmp_path / "hf", threads=2, verify=True)
    assert same(tensors_of(tmp_path / "hf"), tensors_of(out / model)) == []
    assert (tmp_path / "hf" / "tokenizer_config.json").is_file()
