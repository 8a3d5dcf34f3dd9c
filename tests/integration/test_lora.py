"""Low-rank adapters in whole trainers: gradients are those that transformers implies, the base does not move, and a
checkpoint brings adapters back under its own layout and another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.config.schema import Config
from slimx.extras.convert.formats.peft import export_adapters
from tests.integration import transformer_engine_stand
from tests.integration.deepseek_checkpoint import make_deepseek
from tests.integration.engine_families import make_model
from tests.integration.rank_processes import DEADLINE_S, run_ranks
from tests.integration.trainer_oracle import Oracle, write_model
from tests.integration.trainer_rank import Rank, by_sequence, demonstrations, equal
from tests.needed import missing
from tests.peft_stand import logprobs, make_adapters
from tests.processes import wait_for
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
LORA = {"rank": 4, "alpha": 8.0}
TRAINED = {"rank": 6, "alpha": 10.0}
"""That of two A of rank 3 with alpha 5."""
SCALE = LORA["alpha"] / LORA["rank"]
COLUMN = ("linear_qkv", "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1")
AXES = dict.fromkeys(COLUMN, 0) | {"linear_proj": 1, "linear_fc2": 1}
"""Axes along which weights are split, by their layers' names; others are whole on every rank."""
STEPS, LR = 2, 2e-2
REQUEST = "request"
"""File of rank 0: it waits for transformers' gradients under the merged weights, in directory `merged`."""


class LoraRank(Rank):
    optimizer = {"lr": LR, "clip_grad": 0.0}

    def config(self, *, distributed: bool = True, lora: dict[str, Any] | None = None, **trainer: Any) -> Config:
        base = super().config(lora=LORA | {"targets": self.job["targets"]} | (lora or {}), **trainer)
        # Without the distributed optimizer every rank has whole gradients; a user's file is refused.
        changed = base.trainer.model_copy(update={"distributed_optimizer": distributed})
        numerics = base.numerics.model_copy(update={"mode": self.job["mode"]})
        return base.model_copy(update={"trainer": changed, "numerics": numerics})

    def write_merged(self, name: str, trainer: Any) -> None:
        self.write_tensors(name, trainer.weights.parameters, attached=trainer.weights.attached)

    def compare_gradients(self) -> None:
        """Compares gradients of A and B with those that transformers' gradient of the merged weights implies:
        dA = s B' dW and dB = s dW A'."""
        import torch.distributed as dist
        from megatron.core import parallel_state

        trainer = self.trainer(distributed=False)
        base = self.weights(trainer)
        first = trainer.logprobs(self.demonstrated(0))
        self.steps(trainer, range(STEPS))
        self.compare_reference(trainer, first)
        self.results["frozen"] = equal(base, self.weights(trainer))
        merged = self.out / "merged"
        self.write_merged("merged", trainer)
        if self.rank == 0:
            (self.out / REQUEST).touch()
            wait_for(merged.exists, DEADLINE_S)
        self.barrier()
        whole = trainer.weights.copy_of(str(merged))
        adapters, tensor = trainer.weights.attached.adapters, parallel_state.get_tensor_model_parallel_group
        expected = {}
        for name, adapter in adapters.items():
            a, b = (parameter.detach().clone() for parameter in adapter.parameters)
            of_a, of_b = SCALE * b.T @ whole[name], SCALE * whole[name] @ a.T
            if (axis := AXES.get(name.rsplit(".", 2)[-2])) is not None:
                of = parallel_state.get_expert_tensor_parallel_group if ".experts." in name else tensor
                dist.all_reduce((of_a, of_b)[axis], group=of())
            expected[name] = of_a, of_b
        self.steps(trainer, (STEPS,))
        self.results["errors"] = {
            f"{name} {letter}": float((parameter.main_grad - gradient).abs().max() / gradient.abs().max())
            for name, pair in expected.items()
            for letter, parameter, gradient in zip("AB", adapters[name].parameters, pair, strict=True)
        }

    def compare_reference(self, trainer: Any, first: list[Any]) -> None:
        """Compares log-probs of the reference, alone and for a step, with those before the adapters had learned."""
        from slimx.config.sections.algorithm import Algorithm
        from slimx.trainer.step.passes import ForwardPasses

        batches = self.demonstrated(0)
        trainer.passes = ForwardPasses(
            trainer.pipeline, trainer.routing, trainer.weights, Algorithm(reference=True), "none"
        )
        policy = trainer.logprobs(batches)
        fields = trainer.passes.before_updates(trainer._local(batches)).fields
        base, again = trainer.logprobs(batches, under="reference"), trainer.logprobs(batches)
        if not self.parallel.last_stage:
            return
        parts = [x["reference_logprobs"] for x in fields]
        whole = [trainer.context.gather(part, b.lengths).numpy() for part, b in zip(parts, batches, strict=True)]
        self.results["reference"] = {
            "is_base": same(base, first),
            "is_returned": same(whole, first),
            "policy_learned": not same(policy, first),
            "policy_is_back": same(again, policy),
        }

    def resume(self) -> None:
        from slimx.extras.planner.memory.state import Buffers
        from slimx.extras.planner.memory.trainer import holdings

        trainer = self.trainer()
        config = trainer.config
        self.steps(trainer, range(STEPS))
        sizes, plan = trainer.offloading.sizes(), holdings(config.trainer, config.numerics, self.spec)
        planned = Buffers(plan.runs(self.sizes, self.rank), config.trainer, self.sizes).state(self.rank)
        self.results["bytes"] = [sizes["weights"], sizes["gradients"], sizes["optimizer state"]]
        self.results["planned"] = [planned.weights, planned.gradients, planned.optimizer]
        merging = [trainer.weights.parameters[name].numel() for name in trainer.weights.attached.merging]
        self.results["merged"] = [planned.adapted, sum(merging)]
        path = self.out / "checkpoint"
        self.save(trainer, path, step=STEPS)
        self.write_merged("saved", trainer)
        ahead = self.steps(trainer, (STEPS, STEPS + 1))
        fresh = self.trainer()
        fresh.restore(str(path), same_layout=True)
        self.results["restored"] = [ahead, self.steps(fresh, (STEPS, STEPS + 1))]
        self.results["restored_equal"] = equal(merged_in(trainer), merged_in(fresh))
        if self.job["moved"]:
            fresh.restore(self.job["moved"], same_layout=False)
            self.write_merged("moved", fresh)
            self.import_adapters(adapters_in(fresh))

    def import_adapters(self, expected: dict[str, Any]) -> None:
        """Begins with the adapters in `peft`, and steps once from there: a stale fp32 copy would begin elsewhere."""
        trainer = self.trainer(lora={"load": str(self.out / "peft")})
        found = adapters_in(trainer)
        self.results["imported"] = equal(found, expected)
        self.steps(trainer, (0,))
        after = adapters_in(trainer)
        self.results["moved_by"] = max(float((after[name] - value).abs().max()) for name, value in found.items())

    def load_trained_by_peft(self) -> None:
        """Begins with the adapters in `trained`, writes their log-probs, and saves a checkpoint."""
        if not (self.out / "trained").exists():
            return
        trainer = self.trainer(lora=TRAINED | {"load": str(self.out / "trained")})
        batches = self.demonstrated(0)
        self.keep_logprobs(batches, trainer.logprobs(batches))
        self.save(trainer, self.out / "of_trained", step=0)


def merged_in(trainer: Any) -> dict[str, Any]:
    return trainer.weights.parameters | {name: make() for name, make in trainer.weights.attached.merging.items()}


def adapters_in(trainer: Any) -> dict[str, Any]:
    return {
        f"{name} {letter}": parameter.detach().clone()
        for name, adapter in trainer.weights.attached.adapters.items()
        for letter, parameter in zip("AB", adapter.parameters, strict=True)
    }


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) > 0 and all((a == b).all() for a, b in zip(one, other, strict=True))


def train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    lora = LoraRank(job, rank)
    lora.compare_gradients()
    lora.resume()
    lora.load_trained_by_peft()
    return lora.finish()


class Trained:
    """Directory and the ranks' results by layout; a layout runs when it is first requested."""

    def __init__(self, root: Path, quickstart: Path):
        self.root, self.models = root, {"qwen3_moe": quickstart}
        self._results: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def __getitem__(self, name: str) -> tuple[Path, list[dict[str, Any]]]:
        if name not in self._results:
            self._results[name] = self._run(name)
        return self._results[name]

    def model(self, name: str) -> Path:
        kind = kind_of(name)
        if kind not in self.models:
            self.models[kind] = self.root / kind
            make_deepseek(self.root / kind) if kind == "deepseek" else make_model(kind, self.root / kind)
        return self.models[kind]

    def _run(self, name: str) -> tuple[Path, list[dict[str, Any]]]:
        layout, model, directory = LAYOUTS[name], self.model(name), self.root / name
        before = self[TAKES_OVER[name]][0] if name in TAKES_OVER else None
        if name.startswith("engine") and not transformer_engine_stand.PACKAGE.is_dir():
            missing(f"needs {transformer_engine_stand.PACKAGE}: `make .venv/transformer-engine` installs it")
        directory.mkdir()
        job = {
            "layout": layout,
            "model": model,
            "targets": TARGETS[kind_of(name)],
            "mode": "exact" if name.startswith("exact") else "fast",
            "moved": before and before / "checkpoint",
        }
        if kind_of(name) == "qwen2":
            make_adapters(model, directory / "trained", **BY_PEFT)
        if before:
            export_adapters(before / "checkpoint", directory / "peft", model, LORA["alpha"])
        with ThreadPoolExecutor(1) as pool:
            role = "rank_with_engine" if name.startswith("engine") else "rank"
            running = pool.submit(run_ranks, train, directory, layout["world_size"], job, role=role)
            wait_for(lambda: (directory / REQUEST).exists() or running.done(), DEADLINE_S)
            if not running.done():
                answer(model, directory)
            return directory, running.result()


def kind_of(name: str) -> str:
    return MODELS.get(name.split("-")[0], "qwen3_moe")


def layout_params(*names: str) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.slow("full grid of layouts")] if name in SLOW else [])
        for name in names or LAYOUTS
    ]


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("lora"), tiny_model)


def answer(model: Path, directory: Path) -> None:
    """Writes transformers' gradients under the merged weights, as a checkpoint. The ranks' own processes cannot: they
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


@pytest.mark.parametrize("layout", layout_params())
def test_adapters_have_the_gradients_that_transformers_implies(trained, layout):
    for results in trained[layout][1]:
        assert max(results["errors"].values()) <= 1e-5, results["errors"]
        assert results["frozen"]
    named = {name for results in trained[layout][1] for name in results["errors"]}
    for kind in KINDS[kind_of(layout)]:
        assert any(kind in name for name in named), kind


@pytest.mark.parametrize("layout", layout_params())
def test_the_reference_is_the_base_bit_for_bit(trained, layout):
    last = [results for results in trained[layout][1] if "reference" in results]
    assert len(last) == LAYOUTS[layout]["world_size"] // LAYOUTS[layout].get("pipeline", 1), "of the last stage"
    for results in last:
        assert results["reference"] == dict.fromkeys(
            ("is_base", "is_returned", "policy_learned", "policy_is_back"), True
        )


@pytest.mark.parametrize("layout", layout_params())
def test_a_restored_trainer_goes_on_to_the_last_bit(trained, layout):
    for results in trained[layout][1]:
        ahead, restored = results["restored"]
        assert restored == ahead
        assert results["restored_equal"]


@pytest.mark.parametrize("here", layout_params(*TAKES_OVER))
def test_another_layout_restores_the_same_merged_weights(trained, here):
    there = TAKES_OVER[here]
    saved = load_file(trained[there][0] / "saved.safetensors")
    moved = load_file(trained[here][0] / "moved.safetensors")
    assert saved.keys() == moved.keys()
    assert all(torch.equal(moved[name], value) for name, value in saved.items())


@pytest.mark.parametrize("layout", layout_params(*TAKES_OVER))
def test_exported_adapters_load_in_another_layout_bit_for_bit(trained, layout):
    for results in trained[layout][1]:
        assert results["imported"]
        assert 0 < results["moved_by"] <= 1.01 * LR, "Adam's first step is at most the learning rate"


@pytest.mark.parametrize("layout", layout_params(*TAKES_OVER.values()))
def test_peft_computes_with_exported_adapters_what_merged_weights_do(trained, layout, tmp_path):
    """Logits before PEFT merges them, and the weights after; over a sequence in which experts are chosen by all."""
    directory, base = trained[layout][0], trained.model(layout)
    import peft
    from transformers import AutoModelForCausalLM

    out = tmp_path / "adapters"
    assert export_adapters(directory / "checkpoint", out, base, LORA["alpha"]) > 0
    with refused("convert.exists", about=str(out)):
        export_adapters(directory / "checkpoint", out, base, LORA["alpha"])
    merged = write_model(tmp_path / "merged", base, load_file(directory / "saved.safetensors"))
    plain, whole = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (base, merged))
    ids = torch.arange(64)[None] % 100
    with torch.no_grad():
        logits, without = whole(ids).logits, plain(ids).logits
        model = peft.PeftModel.from_pretrained(plain, out)
        found = model(ids).logits
        assert (found - logits).abs().max() <= 1e-5 * logits.abs().max() < (without - logits).abs().max()
        again = model.merge_and_unload().state_dict()
    assert again.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.allclose(again[name], value, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("layout", layout_params("dense", "dense-TP2"))
def test_pefts_adapters_load_into_a_trainer_and_are_exported_unchanged(trained, layout, tmp_path):
    """Log-probs of the trainer, and of what its checkpoint is exported to, compared with those of peft's model."""
    import peft
    from transformers import AutoModelForCausalLM

    directory, model = trained[layout][0], trained.model(layout)
    export_adapters(directory / "of_trained", tmp_path / "adapters", model, TRAINED["alpha"])
    plain = [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2)]
    first, again = map(peft.PeftModel.from_pretrained, plain, (directory / "trained", tmp_path / "adapters"))
    moved = 0.0
    for sequence, values in by_sequence(np.load(directory / "0.npz")).items():
        tokens, labels = torch.tensor(sequence[:-1]), torch.tensor(sequence[1:])
        right = logprobs(first, tokens)
        assert (logprobs(again, tokens) - right).abs().max() <= 1e-4
        assert (torch.from_numpy(values) - right.gather(1, labels[:, None])[:, 0]).abs().max() <= 1e-4
        with first.disable_adapter():
            moved = max(moved, (logprobs(first, tokens) - right).abs().max().item())
    assert moved > 0.1


@pytest.mark.parametrize("layout", layout_params())
def test_the_plan_counts_gradients_and_state_of_adapters_only(trained, layout):
    for results in trained[layout][1]:
        assert results["planned"] == results["bytes"]
        assert results["merged"][0] == results["merged"][1] > 0
