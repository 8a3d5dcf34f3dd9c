"""Checkpoints of models with gated delta nets in megatron-core's own modules, as Megatron-LM and Megatron-Bridge load
them: the norm of a net's heads is centred on zero there, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.convert import run
from slimx.convert.work import convert
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
