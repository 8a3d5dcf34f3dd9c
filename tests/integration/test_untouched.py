"""Checkpoints of models with gated delta nets in megatron-core's own modules, as Megatron-LM and Megatron-Bridge load
them: the norm of a net's heads is centered on zero there, and nowhere else."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimx.config.schema import Config
from slimx.extras.convert import run
from slimx.extras.convert.work import convert
from tests.checkpoint_stand import same, tensors_of
from tests.integration.family_cases import CASES
from tests.integration.family_oracle import Oracle
from tests.integration.rank_processes import run_ranks
from tests.integration.rank_start import join, leave
from tests.integration.saving import begin_save, finish_save

pytestmark = pytest.mark.integration
FAMILIES = ("Qwen3-Next", "Qwen3.5-MoE", "Qwen3.5")
NORM, FACTOR = "out_norm.weight", "out_norm.factor"


def configuration(out: Path, hf: str, dtype: str = "float32", **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": {"path": hf},
            "numerics": {"dtype": dtype},
            "trainer": {"optimizer": {"lr": 1e-3}, **trainer},
            "rollout": {"prompts": "p", "engines": []},
            "algorithm": {"name": "sft"},
        }
    )


def untouched(trainer: Any) -> Any:
    """Returns megatron-core's model with the blocks that it specifies itself, in fp32 on the CPU."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    from slimx.trainer.model.transformer import transformer_config

    spec = trainer.weights.spec
    config = transformer_config(spec, trainer.config, trainer.backends, cpu=True)
    block = variants.get_transformer_block_with_experimental_attention_variant_spec(config)
    return GPTModel(config, block, **spec.gpt)


def load(model: Any, path: Path) -> None:
    """Loads as Megatron-LM does, by megatron-core's own reader."""
    from megatron.core import dist_checkpointing, parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {"model": model.sharded_state_dict(metadata={"dp_cp_group": group, "non_homogeneous_layers": True})}
    # Transformer Engine's extra state is in no checkpoint without it: --dist-ckpt-strictness log_all.
    loaded = dist_checkpointing.load(state, str(path), strict="log_all")
    odd = model.load_state_dict(loaded["model"], strict=False)
    assert not odd.unexpected_keys and all("_extra_state" in key for key in odd.missing_keys), odd


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds, length = torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length
    )
    with torch.no_grad():
        out = model(torch.tensor([tokens]), torch.arange(length)[None], None, packed_seq_params=packed)
    return out[0].numpy()


def remove_slimx_keys(release: Path) -> None:
    """Removes the keys that only slimx writes from a checkpoint: it is then as another system writes it."""
    metadata = pickle.loads((release / ".metadata").read_bytes())
    for key in [key for key in metadata.state_dict_metadata if key.endswith(FACTOR)]:
        del metadata.state_dict_metadata[key]
    (release / ".metadata").write_bytes(pickle.dumps(metadata))


def load_and_save(job: dict[str, Any], rank: int) -> dict[str, list[str]]:
    """Writes, to MODEL.npz, the logits of megatron-core's own gated delta nets, which slimx has not touched, under the
    converted checkpoint (`converted.N`) and under the one that slimx's trainer saved (`saved.N`).

    Returns, by model, the local tensors that a trainer loads otherwise from a checkpoint of another system than from
    the Hugging Face directory."""
    out, results = job["out"], {}
    parallel = join(configuration(out, job["cases"][0]["hf"]).trainer, rank, job["init_method"])
    import torch

    from slimx.models.families import configured_model
    from slimx.trainer.trainer import PolicyTrainer

    for case in job["cases"]:
        config = configuration(out, case["hf"])
        trainer = PolicyTrainer(config, configured_model(config), parallel)
        trainer.optimizer.step()  # without gradients; now there is state to save
        saved = out / f"{case['name']}.saved" / "iter_0000001"
        begin_save(trainer, saved, step=1)
        finish_save(trainer, saved)
        kept = {name: tensor.detach().clone() for name, tensor in trainer.weights.parameters.items()}
        with torch.no_grad():
            for tensor in trainer.weights.parameters.values():
                tensor.add_(1.0)
        trainer.restore(str(saved), same_layout=True)
        assert all(torch.equal(kept[name], tensor) for name, tensor in trainer.weights.parameters.items())
        found, release = {}, Path(case["megatron"]) / "release"
        for kind, path in (("converted", release), ("saved", saved)):
            model = untouched(trainer)
            load(model, path)
            found |= {f"{kind}.{n}": logits(model, tokens) for n, tokens in enumerate(case["tokens"])}
        np.savez(out / f"{case['name']}.npz", **found)
        remove_slimx_keys(release)
        other = PolicyTrainer(configuration(out, case["hf"], load=case["megatron"]), configured_model(config), parallel)
        here, there = trainer.weights.parameters, other.weights.parameters
        differing = [name for name in here if not torch.allclose(here[name], there[name], rtol=1e-6, atol=1e-7)]
        results[case["name"]] = differing
    leave(parallel)
    return results


def as_before(saved: Path) -> None:
    """Has the key of megatron-core hold the factors themselves, as slimx wrote them at first."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    tensors, stored = metadata.state_dict_metadata, metadata.storage_data
    for key in [key for key in tensors if key.endswith(FACTOR)]:
        old = key.replace(FACTOR, NORM)
        tensors[old] = tensors.pop(key)
        for index in [index for index in stored if index.fqn == old]:
            del stored[index]
        for index in [index for index in stored if index.fqn == key]:
            stored[replace(index, fqn=old)] = stored.pop(index)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))


def save_forms(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Saves norms of heads in the forms that slimx has written and reads, from trainers in bf16 on two ranks.

    Returns, for each form, the local tensors that differ between the trainer that saved and one that loads, and how far
    the norms in megatron-core's own modules are from it."""
    out = job["out"]
    configured = partial(configuration, out, job["hf"], dtype="bfloat16", world_size=2, tensor=2)
    config = configured()
    parallel = join(config.trainer, rank, job["init_method"])
    import torch

    from slimx.models.families import configured_model
    from slimx.trainer.trainer import PolicyTrainer

    def barrier() -> None:
        parallel.host_group.barrier().wait()

    trainer = PolicyTrainer(config, configured_model(config), parallel)
    trainer.optimizer.step()  # without gradients; now there is state to save
    right = {name: tensor.detach().clone() for name, tensor in trainer.weights.parameters.items()}

    def differing(other: Any) -> list[str]:
        return [name for name, tensor in other.weights.parameters.items() if not torch.equal(right[name], tensor)]

    saved = out / "saved" / "iter_0000001"
    begin_save(trainer, saved, step=1)
    finish_save(trainer, saved)
    barrier()
    if rank == 0:
        shutil.copytree(saved, out / "before" / saved.name)
        as_before(out / "before" / saved.name)
        shutil.copytree(saved, out / "other" / saved.name, ignore=shutil.ignore_patterns("slimx"))
        remove_slimx_keys(out / "other" / saved.name)
    barrier()
    forms: dict[str, list[str]] = {}
    for form in ("saved", "other", "before"):
        path = out / form / saved.name
        forms[f"{form} loaded"] = differing(PolicyTrainer(configured(load=str(path)), trainer.weights.spec, parallel))
        if form != "other":
            with torch.no_grad():
                for tensor in trainer.weights.parameters.values():
                    tensor.add_(1.0)
            trainer.restore(str(path), same_layout=True)
            forms[f"{form} restored"] = differing(trainer)
    model = untouched(trainer)
    load(model, saved)
    norms = {name: tensor for name, tensor in model.named_parameters() if name.endswith(NORM)}
    gaps = [(tensor.float() + 1 - right[name].float()).abs().max().item() for name, tensor in norms.items()]
    leave(parallel)
    return {"forms": forms, "gaps": gaps}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Oracle], dict[str, list[str]]]:
    out, made, cases = tmp_path_factory.mktemp("untouched"), {}, []
    for seed, name in enumerate(FAMILIES):
        path, megatron = out / name, out / f"{name}-m"
        made[name] = CASES[name].make(path, seed)
        convert(run.hf_to_megatron(path), megatron, threads=1, verify=True)
        tokens = [trajectory.token_ids[:-1].tolist() for trajectory in made[name].trajectories()]
        cases.append({"name": name, "hf": path, "megatron": megatron, "tokens": tokens})
    (differing,) = run_ranks(load_and_save, out, 1, {"cases": cases})
    return out, made, differing


@pytest.mark.parametrize("kind", ["converted", "saved"])
@pytest.mark.parametrize("model", FAMILIES)
def test_unmodified_megatron_core_agrees_with_transformers(oracles, model, kind):
    out, made, _ = oracles
    with np.load(out / f"{model}.npz") as found:
        for number, trajectory in enumerate(made[model].trajectories()):
            right = made[model].logits(trajectory.token_ids[:-1]).detach()
            assert (torch.from_numpy(found[f"{kind}.{number}"]) - right).abs().max() <= 1e-4


@pytest.mark.parametrize("model", FAMILIES)
def test_a_checkpoint_of_another_system_is_the_same_model(oracles, model, tmp_path):
    """Without slimx's own key of these norms, in a trainer and converted."""
    out, made, differing = oracles
    assert differing[model] == []
    convert(run.megatron_to_hf(out / f"{model}-m", out / model), tmp_path / "back", threads=1, verify=True)
    back, expected = tensors_of(tmp_path / "back"), made[model].weights
    assert back.keys() == expected.keys()
    assert [name for name in expected if not torch.allclose(back[name], expected[name], rtol=0, atol=1e-7)] == []


@pytest.mark.parametrize("model", FAMILIES)
def test_a_trainers_checkpoint_converts_back_bit_for_bit(oracles, model, tmp_path):
    out, *_ = oracles
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
    return out, run_ranks(save_forms, out, 2, {"hf": out / "hf"})


def test_ranks_in_bf16_read_norms_of_heads_in_each_form_to_the_last_bit(layouts):
    """By slimx's own key, less 1 as other systems store them, and as slimx itself stored them before."""
    forms = {"saved loaded", "saved restored", "other loaded", "before loaded", "before restored"}
    for results in layouts[1]:
        assert results["forms"] == dict.fromkeys(forms, [])
        assert len(results["gaps"]) > 0 and max(results["gaps"]) <= 1e-3


@pytest.mark.parametrize("form", ["saved", "other", "before"])
def test_norms_of_heads_of_two_ranks_are_converted_to_the_same_checkpoint(layouts, form, tmp_path):
    out, _ = layouts
    convert(
        run.megatron_to_hf(out / form / "iter_0000001", out / "hf", dtype=torch.bfloat16),
        tmp_path / "back",
        threads=1,
        verify=True,
    )
    back, expected = tensors_of(tmp_path / "back"), tensors_of(out / "hf")
    assert back.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(back[name].bfloat16(), expected[name].bfloat16())] == []
