"""Checkpoints of models with gated delta nets in megatron-core's own modules, as Megatron-LM and Megatron-Bridge load
them: the norm of a net's heads is centred on zero there, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimx.extras.convert import run
from slimx.extras.convert.work import convert
from slimx.runtime.ports import free_port
from tests.checkpoint_stand import same, tensors_of
from tests.integration.family_cases import CASES
from tests.integration.family_oracle import Oracle
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration
FAMILIES = ("Qwen3-Next", "Qwen3.5-MoE", "Qwen3.5")


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Oracle]]:
    out, made, cases = tmp_path_factory.mktemp("untouched"), {}, []
    for seed, name in enumerate(FAMILIES):
        path, megatron = out / name, out / f"{name}-m"
        made[name] = CASES[name].make(path, seed)
        convert(run.hf_to_megatron(path), megatron, threads=1, verify=True)
        tokens = [trajectory.token_ids[:-1].tolist() for trajectory in made[name].trajectories()]
        cases.append({"name": name, "hf": str(path), "megatron": str(megatron), "tokens": tokens})
    job = {"cases": cases, "init_method": f"tcp://127.0.0.1:{free_port()}"}
    (out / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.untouched_rank", out, 1)
    return out, made


@pytest.mark.parametrize("kind", ["converted", "saved"])
@pytest.mark.parametrize("model", FAMILIES)
def test_megatron_cores_own_modules_compute_what_transformers_computes(oracles, model, kind):
    out, made = oracles
    with np.load(out / f"{model}.npz") as found:
        for number, trajectory in enumerate(made[model].trajectories()):
            wanted = made[model].logits(trajectory.token_ids[:-1]).detach()
            assert (torch.from_numpy(found[f"{kind}.{number}"]) - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("model", FAMILIES)
def test_a_checkpoint_of_another_system_is_the_same_model(oracles, model, tmp_path):
    """Without slimx's own key of these norms, in a trainer and converted."""
    out, made = oracles
    assert json.loads((out / f"{model}.json").read_text()) == []
    convert(run.megatron_to_hf(out / f"{model}-m", out / model), tmp_path / "back", threads=1, verify=True)
    back, wanted = tensors_of(tmp_path / "back"), made[model].weights
    assert back.keys() == wanted.keys()
    assert [name for name in wanted if not torch.allclose(back[name], wanted[name], rtol=0, atol=1e-7)] == []


@pytest.mark.parametrize("model", FAMILIES)
def test_what_a_trainer_saved_comes_back_bit_for_bit(oracles, model, tmp_path):
    out, _ = oracles
    convert(
        run.megatron_to_hf(out / f"{model}.saved" / "iter_0000001", out / model),
        tmp_path / "back",
        threads=1,
        verify=True,
    )
    assert same(tensors_of(tmp_path / "back"), tensors_of(out / model)) == []


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("layouts")
    CASES["Qwen3-Next"].make(out / "hf", 0)
    job = {"hf": str(out / "hf"), "init_method": f"tcp://127.0.0.1:{free_port()}"}
    (out / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.heads_norm_rank", out, 2)
    return out, [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_in_bf16_read_norms_of_heads_in_each_form_to_the_last_bit(layouts):
    """By slimx's own key, less 1 as other systems store them, and as slimx itself stored them before."""
    forms = {"saved loaded", "saved restored", "other loaded", "before loaded", "before restored"}
    for said in layouts[1]:
        assert said["forms"] == dict.fromkeys(forms, [])
        assert len(said["gaps"]) > 0 and max(said["gaps"]) <= 1e-3


@pytest.mark.parametrize("form", ["saved", "other", "before"])
def test_norms_of_heads_of_two_ranks_are_converted_to_the_same_checkpoint(layouts, form, tmp_path):
    out, _ = layouts
    convert(
        run.megatron_to_hf(out / form / "iter_0000001", out / "hf", dtype=torch.bfloat16),
        tmp_path / "back",
        threads=1,
        verify=True,
    )
    back, wanted = tensors_of(tmp_path / "back"), tensors_of(out / "hf")
    assert back.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(back[name].bfloat16(), wanted[name].bfloat16())] == []
