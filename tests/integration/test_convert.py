"""Converted checkpoints in real trainers: what they load is what the Hugging Face directory holds, under any layout,
and what they save comes back as that directory, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.extras.convert import run
from slimx.extras.convert.work import convert
from slimx.models.families import load_family
from slimx.runtime.ports import free_port
from tests.checkpoint_stand import DEEPSEEK_V3, QWEN3_MOE, same, tensors_of, write_checkpoint
from tests.integration.chosen import chosen_cases
from tests.integration.family_cases import CASES
from tests.integration.family_laboratory import TIED
from tests.integration.rank_processes import run_ranks
from tests.integration.rank_start import enter, join, leave
from tests.integration.saving import begin_save, finish_save

pytestmark = pytest.mark.integration
# The largest first: no rank waits for others that are busy with a layout of fewer.
LAYOUTS = {
    "TP2xPP2": {"world_size": 4, "tensor": 2, "pipeline": 2},
    "EP2": {"world_size": 2, "expert": 2},
    "single": {"world_size": 1},
}
MODELS = {
    # Layers stacked under one key, cut for the ranks of another layout than any that loads it; and numbered ones, with
    # latent attention and a layer of multi-token prediction.
    "qwen3_moe": (QWEN3_MOE, "tensor=2,pipeline=2,expert=4,expert_tensor=1", 0),
    "deepseek_v3": (DEEPSEEK_V3, "", 1),
}
"""Under every layout."""
FAMILIES = [name for name in CASES if name not in ("V3", "Qwen3-MoE")]
"""The others, as transformers writes them, on one rank."""
TRAINED = [(layout, model) for model in MODELS for layout in LAYOUTS] + [("single", model) for model in FAMILIES]
TAKEN = [
    pytest.param(
        layout,
        model,
        marks=[pytest.mark.slow("full grid of layouts and tied models")] if layout == "EP2" or model in TIED else [],
    )
    for layout, model in TRAINED
]


def configuration(out: Path, layout: dict[str, Any], model: dict[str, Any], load: str | None) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": model["model"],
            "numerics": {"dtype": model["dtype"]},
            "trainer": {
                **layout,
                "load": load,
                "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
                "megatron": {"mtp_num_layers": model["mtp"]} if model["mtp"] else {},
            },
            "rollout": {"prompts": "p", "engines": []},
            "algorithm": {"name": "sft"},
            "checkpoint": {"deadline": 300},
        }
    )


def load_and_save(job: dict[str, Any], rank: int) -> dict[str, dict[str, list[str]]]:
    """Loads converted checkpoints under each layout and saves the trainers' own.

    Returns, by layout and model, which local tensors differ from those that the Hugging Face directory gives."""
    out, results, begin = job["out"], {}, join
    for name, layout in job["layouts"].items():
        if rank >= layout["world_size"]:
            continue
        first = next(iter(job["models"].values()))
        section = configuration(out, layout, first, None).trainer
        parallel, begin = begin(section, rank, f"tcp://127.0.0.1:{job['ports'][name]}"), enter
        import torch

        from slimx.models.families import configured_model
        from slimx.trainer.trainer import PolicyTrainer

        results[name] = {}
        for kind, model in job["models"].items():
            if name not in model["layouts"]:
                continue
            config = configuration(out, layout, model, None)
            spec = configured_model(config)
            expected = PolicyTrainer(config, spec, parallel).weights.parameters
            trainer = PolicyTrainer(configuration(out, layout, model, model["megatron"]), spec, parallel)
            found = trainer.weights.parameters
            results[name][kind] = sorted(found.keys() ^ expected.keys()) + [
                key
                for key in expected
                if found[key].dtype != expected[key].dtype or not torch.equal(found[key], expected[key])
            ]
            # Adam without gradients changes no weight, and now there is optimizer state to save.
            for chunk in trainer.chunks:
                chunk.zero_grad_buffer()
            trainer.optimizer.step()
            path = out / "saved" / name / kind / "iter_0000003"
            begin_save(trainer, path, step=3)
            finish_save(trainer, path)
        leave(parallel)
    return results


@pytest.fixture(scope="module")
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """Converts with the layouts and models of the chosen tests."""
    params = chosen_cases(request)
    layouts = {name: layout for name, layout in LAYOUTS.items() if any(case["layout"] == name for case in params)}
    chosen = {case["model"] for case in params}
    out = tmp_path_factory.mktemp("convert")
    job: dict[str, Any] = {"layouts": layouts, "models": {}}

    def add(name: str, cut: str, mtp: int, dtype: str, layouts: list[str], family: str | None) -> None:
        path, megatron = out / name, out / f"{name}-m"
        loaded = load_family(family) if family else None
        convert(
            run.hf_to_megatron(path, layout=cut, file_bytes=60_000, family=loaded), megatron, threads=2, verify=True
        )
        model = {"path": path} | ({"family": family} if family else {})
        job["models"][name] = {
            "model": model,
            "dtype": dtype,
            "megatron": megatron,
            "mtp": mtp,
            "layouts": layouts,
        }

    for name, (config, cut, mtp) in MODELS.items():
        if name not in chosen:
            continue
        write_checkpoint(out / name, config, file_bytes=100_000)
        add(name, cut, mtp, "bfloat16", list(LAYOUTS), None)
    for seed, name in enumerate(FAMILIES):
        if name not in chosen:
            continue
        CASES[name].make(out / name, seed)
        add(name, "", CASES[name].mtp, "float32", ["single"], CASES[name].family)
    job["ports"] = {name: free_port() for name in layouts}
    return out, run_ranks(load_and_save, out, 4, job)


@pytest.mark.parametrize(("layout", "model"), TAKEN)
def test_a_trainer_loads_the_converted_checkpoint_like_the_original(converted, layout, model):
    for rank in range(LAYOUTS[layout]["world_size"]):
        assert converted[1][rank][layout][model] == []


@pytest.mark.parametrize(("layout", "model"), TAKEN)
def test_a_trainers_checkpoint_converts_back_bit_for_bit(converted, layout, model, tmp_path):
    out, _ = converted
    family = load_family(CASES[model].family) if model in FAMILIES and CASES[model].family else None
    saved = out / "saved" / layout / model / "iter_0000003"
    conversion = run.megatron_to_hf(saved, out / model, file_bytes=90_000, family=family)
    convert(conversion, tmp_path / "hf", threads=2, verify=True)
    assert same(tensors_of(tmp_path / "hf"), tensors_of(out / model)) == []
    assert (tmp_path / "hf" / "config.json").is_file()
