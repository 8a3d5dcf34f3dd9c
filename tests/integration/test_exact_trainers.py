"""Exact mode in trainers: log-probs of every layout are equal to the last bit, gradients up to rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.data.loss_weights import loss_weights
from slimx.extras.lora.merged import merged
from tests.integration import exact_rank
from tests.integration.exact_rank import VERSION, Case
from tests.integration.exact_runs import DENSE, ONE, TWO, cases_of, gaps, make_models
from tests.integration.gathering import write_tensors
from tests.integration.saving import begin_save, finish_save

pytestmark = pytest.mark.integration

FOUR: list[dict[str, Any]] = [
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "expert": 4, "expert_tensor": 1},
    {"tensor": 2, "expert": 2, "expert_tensor": 2},
    {"tensor": 2, "context": 2, "expert": 2, "expert_tensor": 1},
    {"pipeline": 2, "context": 2},
    {"expert": 4},
]
SPOILT = ["weights", "rms_norm", "linear", "silu_and_mul", "attention", "attention order"]
RANK, ALPHA = 4, 8.0
LORA = {"rank": RANK, "alpha": ALPHA, "targets": ["attention", "experts", "router"]}
PREFIX = "base_model.model."


def backwards(query: Any, key: Any, value: Any, bounds: Any, scale: float, **_: Any) -> Any:
    """Computes exact mode's attention of a pack, but each row reads its keys from the last to the first."""
    import torch

    from slimx.extras.exact.operations import gathered_attention

    last, place = len(query) - 1, torch.arange(len(query))
    first = bounds[torch.searchsorted(bounds, place, right=True) - 1]
    return gathered_attention(query, key, value, (last - place).int(), last - place, place - first + 1, scale)


@contextmanager
def spoilt(what: str | None) -> Iterator[None]:
    """Replaces one operation of the trainer by torch's, or (`attention order`) in another order."""
    import torch.nn.functional as F

    from slimx.numerics.attention import packed_attention
    from slimx.numerics.norm import rms_norm

    plain = {
        "rms_norm": ("slimx.extras.exact.adapters.megatron.layers.ExactNormColumn.norm", staticmethod(rms_norm)),
        "linear": (
            "slimx.extras.exact.adapters.megatron.layers._Column._forward_impl",
            lambda self, input, weight, *_, **__: F.linear(input, weight),
        ),
        "silu_and_mul": (
            "slimx.extras.exact.operations.silu_and_mul",
            lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        ),
        "attention order": ("slimx.extras.exact.operations.attention", backwards),
        "attention": (
            "slimx.extras.exact.operations.attention",
            lambda q, k, v, bounds, scale, **_: packed_attention(q, k, v, bounds.diff().tolist(), scale),
        ),
    }
    if what not in plain:
        yield
        return
    with mock.patch(*plain[what]):
        yield


class TrainerCase(Case):
    """Also spoils a part of the trainer (`spoil`), writes `gradients` in the mode that this names, and has rounded
    weights follow those that they stand for (`follows`)."""

    def trainer(self, mode: str = "exact") -> Any:
        trainer = super().trainer(mode)
        if self.case.get("spoil") == "weights":
            weight = trainer.weights.parameters["decoder.final_layernorm.weight"]
            with torch.no_grad():
                weight.copy_(torch.nextafter(weight, weight + 1))
        return trainer

    def measure(self) -> dict[str, Any]:
        with spoilt(self.case.get("spoil")):
            results = super().measure()
        if "follows" in self.case:
            results |= self.follow()
        if "gradients" in self.case:
            self.write_gradients()
        return results

    def train(self, trainer: Any) -> None:
        """Takes a step with advantages of both signs."""
        advantages = [(-1.0) ** number for number in range(len(self.known))]
        batches = self.batches(trainer, advantages, loss_weights(self.known, "token"))
        trainer.train_step(batches, step=0, version=VERSION)

    def follow(self) -> dict[str, bool]:
        """Returns whether rounded weights change with the weights that they stand for, by occasion."""
        trainer = self.trainer()
        weights, facts = trainer.weights, {}
        (served,) = (refresh.__self__ for refresh in weights.derived)

        def fresh() -> bool:
            now = {name: value.clone() for name, value in served.values.items()}
            served.refresh()
            return all(torch.equal(now[name], value) for name, value in served.values.items())

        first, copy = weights.snapshot(), weights.snapshot()
        for name in served.values:
            copy[name].mul_(1.5)
        with weights.switching() as switch:
            switch(copy)
            facts["others"] = fresh() and not torch.equal(copy[name], first[name])
        facts["back"] = fresh()
        self.train(trainer)
        facts["step"] = fresh() and not torch.equal(weights.parameters[name], first[name])
        path, trained = self.name.with_suffix(".checkpoint"), weights.snapshot()
        begin_save(trainer, path, step=0)
        finish_save(trainer, path)
        with torch.no_grad():
            weights.parameters[name].mul_(1.5)
        weights.changed()
        trainer.restore(str(path), same_layout=True)
        facts["restored"] = fresh() and torch.equal(weights.parameters[name], trained[name])
        return facts

    def write_gradients(self) -> None:
        """Writes those of a step on these tokens, under Hugging Face names, and the keys of this rank's checkpoint."""
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.dist_checkpointing.dict_utils import nested_values

        from slimx.trainer.checkpoint.state import model_state

        trainer = self.trainer(self.case["gradients"])
        self.train(trainer)
        gradients = {
            name: getattr(parameter, "main_grad", torch.zeros_like(parameter))  # the selection bias has none
            for name, parameter in trainer.weights.parameters.items()
        }
        write_tensors(self.name.with_suffix(".safetensors"), gradients, trainer.weights.spec, self.parallel)
        saved = nested_values(model_state(trainer.chunks))
        keys = sorted({part.key for part in saved if isinstance(part, ShardedTensor)})
        self.name.with_suffix(f".{self.parallel.rank}.json").write_text(json.dumps(keys))


def train(job: dict[str, Any], rank: int) -> list[list[dict[str, Any]]]:
    return exact_rank.run(job, rank, TrainerCase)


def make_adapters(model: Path, out: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """Makes directories under `out`: the adapters, and `model` merged with them tensor by tensor of the checkpoint, as
    a model of `dtype` has both."""
    weights = {name: value.to(dtype) for name, value in load_file(model / "model.safetensors").items()}
    random = torch.Generator().manual_seed(5)
    adapters: dict[str, torch.Tensor] = {}

    def draw(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(shape, generator=random)

    def merge(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        weights[name] = merged(weights[name], a.to(dtype), b.to(dtype), ALPHA / RANK)

    for layer in sorted({name.split(".")[2] for name in weights if name.startswith("model.layers.")}):
        at = f"model.layers.{layer}."
        shared = draw(RANK, weights[f"{at}self_attn.q_proj.weight"].shape[1])
        for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate"):
            rows, cols = weights[f"{at}{module}.weight"].shape
            a = shared.clone() if module[-6:-5] in "qkv" else draw(RANK, cols)
            b = draw(rows, RANK)
            adapters |= {f"{PREFIX}{at}{module}.lora_A.weight": a, f"{PREFIX}{at}{module}.lora_B.weight": b}
            merge(f"{at}{module}.weight", a, b)
        for module, parts in (("experts.base_layer", ("gate_proj", "up_proj")), ("experts", ("down_proj",))):
            names = [f"{at}mlp.experts.{{}}.{part}.weight" for part in parts]
            experts = sum(
                name.startswith(f"{at}mlp.experts.") and name.endswith("down_proj.weight") for name in weights
            )
            rows, cols = weights[names[0].format(0)].shape
            a, b = draw(experts * RANK, cols), draw(rows * len(parts), RANK * experts)
            name = f"{PREFIX}{at}mlp.{module}"
            adapters |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            for expert in range(experts):
                of_expert = b.view(len(b), RANK, experts)[:, :, expert]
                for rows_of_part, part in zip(of_expert.chunk(len(parts)), names, strict=True):
                    merge(part.format(expert), a[expert * RANK : (expert + 1) * RANK], rows_of_part)
    peft, whole = out / "adapters", out / "merged"
    peft.mkdir(parents=True)
    save_file(adapters, peft / "adapter_model.safetensors", {"format": "pt"})
    (peft / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}))
    shutil.copytree(model, whole)
    save_file(weights, whole / "model.safetensors", {"format": "pt"})
    return peft, whole


def sequences(count: int = 24) -> list[dict[str, Any]]:
    random = np.random.default_rng(3)
    lengths = [(int(random.integers(2, 30)), int(random.integers(1, 12))) for _ in range(count)]
    tokens = [[random.integers(4, 100, n).tolist() for n in pair] for pair in lengths]
    return [
        {"prompt": prompt, "tokens": sampled, "temperature": (1.0, 0.7)[number % 2]}
        for number, (prompt, sampled) in enumerate(tokens)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tiny_model)


@pytest.mark.costly("ranks of every layout, in two types")
def test_trainers_of_every_layout_agree_bit_for_bit(models: dict[str, Path], tmp_path: Path) -> None:
    def group(name: str, dtype: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
        cases = cases_of(name, cases)
        return {"model": str(models[name]), "dtype": dtype, "completions": completions, "cases": cases}

    completions = sequences(12)
    spoilt = [{**ONE, "spoil": part} for part in SPOILT]

    def trained(case: dict[str, Any]) -> dict[str, Any]:
        return {**case, "gradients": "exact" if case["trainer"].get("world_size", 1) > 1 else "fast"}

    groups = [
        group("moe", "bfloat16", TWO),
        group("moe", "float32", [*TWO, {**ONE, "leaves": 4}, *spoilt]),  # rounding to bfloat16 would hide some
        group("qwen2", "bfloat16", DENSE),  # biases, tied embeddings
        group("deepseek", "float32", TWO),  # latent attention, sigmoid router with bias and groups, shared experts
    ]
    # As engines hold them in fp8: two layouts, and a trainer that does not round.
    rounded = [TWO[0], TWO[2], {**ONE, "follows": True}, {**ONE, "quantize": None, "spoil": "none"}]
    groups.append(group("blocks", "bfloat16", rounded) | {"quantize": "ieee"})
    # Weights merged with adapters in a checkpoint, and adapters that are separate from the weights in every layout.
    adapters, merged = make_adapters(models["moe"], tmp_path / "adapters", torch.bfloat16)
    with_adapters = {"distributed_optimizer": True, "lora": LORA | {"load": str(adapters)}}
    cases = [{"trainer": case["trainer"] | with_adapters} for case in TWO]
    bare = {**ONE, "leaves": 2, "spoil": "adapters left out"}
    groups.append(group("moe", "bfloat16", [*cases, bare]))
    groups[-1]["cases"][0]["model"] = str(merged)
    for group_of in groups:
        if group_of["dtype"] == "float32":
            group_of["cases"][: 1 + len(TWO)] = [trained(case) for case in group_of["cases"][: 1 + len(TWO)]]
    found = gaps(tmp_path / "ranks", groups, function=train)
    tokens = sum(len(one["tokens"]) for one in completions)
    for group_of, (_, *metrics) in zip(groups, found, strict=True):
        for case, metric in zip(group_of["cases"][1:], metrics, strict=True):
            assert metric["gap/tokens"] == tokens, case
            differs = "spoil" in case or case["leaves"] != 2
            assert (metric["gap/max"] > 0) == differs, (group_of["model"], case, metric["gap/max"])
            if "follows" in case:
                assert all(metric[occasion] for occasion in ("others", "back", "step", "restored")), metric
    for number, group_of in enumerate(groups):
        oracle, *others = [n for n, case in enumerate(group_of["cases"]) if "gradients" in case] or [None]
        for other in others:
            same_gradients(*(tmp_path / "ranks" / f"{number}-{n}.safetensors" for n in (oracle, other)))
            stock, exact = (checkpoint_keys(tmp_path / "ranks", f"{number}-{n}") for n in (oracle, other))
            assert stock == exact


@pytest.mark.slow("four ranks in two layouts")
def test_trainers_of_four_ranks_agree_to_the_last_bit(models: dict[str, Path], tmp_path: Path) -> None:
    cases = [{**ONE, "leaves": 2}] + [{"trainer": {"world_size": 4, **sizes}, "leaves": 2} for sizes in FOUR]
    group = {"model": str(models["moe"]), "dtype": "float32", "completions": sequences(), "cases": cases}
    ((_, *metrics),) = gaps(tmp_path / "ranks", [group], world=4)
    for case, metric in zip(cases[1:], metrics, strict=True):
        assert metric["gap/tokens"] > 0 and metric["gap/max"] == 0.0, case


def checkpoint_keys(out: Path, case: str) -> set[str]:
    """Returns those of all ranks together."""
    return {key for file in out.glob(f"{case}.[01].json") for key in json.loads(file.read_text())}


def same_gradients(stock: Path, exact: Path) -> None:
    """Checks that they are those of stock operations on one rank, up to rounding."""
    expected, found = load_file(stock), load_file(exact)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        scale = max(tensor.abs().max().item(), 1e-3)
        assert (found[name] - tensor).abs().max().item() <= 1e-5 * scale, name
