"""Low-rank adapters of experts that a checkpoint stacks: they train as those of the same language model that stores
each expert separately, and PEFT computes with them what trainers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.extras.convert.formats.peft import export_adapters
from tests.integration.conftest import Weights
from tests.integration.engine_families import make_model
from tests.integration.rank_processes import cached, run_ranks
from tests.integration.trainer_oracle import write_model
from tests.integration.trainer_rank import Rank, by_sequence, demonstrations, equal, sft_rows, shard
from tests.peft_stand import load_model, logprobs, make_adapters

pytestmark = pytest.mark.integration

STACKED = {"transposed": "qwen3_vl_moe", "upright": "qwen3_5_moe_published"}
"""Way in which a checkpoint stacks experts -> model."""
SEPARATE = {
    "transposed": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "rope_scaling": None},
    "upright": {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"},
}
"""The same language model with separate experts: fields of config.json other than those of its `text_config`."""
FORMS = ("separate", "stacked")
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2-ETP2": {"world_size": 2, "tensor": 2, "expert_tensor": 2},
    "TP2-EP2": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
    "DP2-EP2": {"world_size": 2, "expert": 2, "recompute": {"granularity": "selective", "modules": ["moe"]}},
    "PP2": {"world_size": 2, "pipeline": 2, "recompute": {"granularity": "full"}},
}
CASES = [
    ("transposed", "TP2-ETP2"),
    *(
        pytest.param(kind, layout, marks=pytest.mark.slow("full grid of layouts"))
        for kind, layout in (
            ("transposed", "TP2-EP2"),
            ("transposed", "DP2-EP2"),
            ("upright", "TP2-ETP2"),
            ("upright", "TP2-EP2"),
            ("upright", "PP2"),
        )
    ),
]
BY_PEFT = {
    "r": 3,
    "lora_alpha": 5,
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
LOADED = {"rank": 3, "alpha": 5.0, "targets": ["attention", "experts"]}
NEW = {"rank": 4, "alpha": 8.0}
TARGETS = {
    "transposed": ["attention", "experts", "router"],
    "upright": ["attention", "experts", "shared_experts", "router"],
}
STEPS = (0, 1, 2)
SPECIAL = 100
"""The first of the tokens that announce images."""


class StackedRank(Rank):
    optimizer = {"lr": 2e-2, "clip_grad": 0.0}

    def demonstrated(self, step: int) -> list[Any]:
        trajectories = demonstrations(step)[: self.sequences]
        for trajectory in trajectories:
            trajectory.token_ids[trajectory.token_ids >= SPECIAL] -= 50
        return shard(sft_rows(trajectories), self.parallel)

    def train(self, form: str) -> None:
        """Begins with the adapters in `peft-FORM`, keeps their log-probs, trains and saves."""
        from slimx.models.families import read_model

        self.job["model"] = self.job["models"][form]
        self.spec = read_model(self.job["model"])
        trainer = self.trainer(lora=LOADED | {"load": str(self.out / f"peft-{form}")})
        batches = self.demonstrated(0)
        if form == "stacked":
            self.keep_logprobs(batches, trainer.logprobs(batches))
        before = self.weights(trainer)
        self.results[form] = self.steps(trainer, STEPS)
        self.results[f"{form} base"] = equal(before, self.weights(trainer))
        self.save(trainer, self.out / form, step=len(STEPS))

    def train_new(self) -> None:
        """Trains new adapters of the stacked model, saves them, and writes the merged weights."""
        from slimx.extras.planner.memory.state import Buffers
        from slimx.extras.planner.memory.trainer import holdings

        self.job["model"] = self.job["models"]["stacked"]
        trainer = self.trainer(lora=NEW | {"targets": self.job["targets"]})
        self.steps(trainer, STEPS)
        sizes, plan = trainer.offloading.sizes(), holdings(trainer.config.trainer, trainer.config.numerics, self.spec)
        state = Buffers(plan.runs(self.sizes, self.rank), trainer.config.trainer, self.sizes).state(self.rank)
        self.results["bytes"] = [sizes["weights"], sizes["gradients"], sizes["optimizer state"]]
        self.results["planned"] = [state.weights, state.gradients, state.optimizer]
        self.save(trainer, self.out / "new", step=len(STEPS))
        self.write_tensors("merged", trainer.weights.parameters, attached=trainer.weights.attached)


def train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    lora = StackedRank(job, rank)
    for form in FORMS:
        lora.train(form)
    lora.train_new()
    return lora.finish()


class Trained:
    """Models, directories and ranks' results by kind and layout; a case runs when it is first requested."""

    def __init__(self, root: Path):
        self.root = root
        self.ran = cached(self._ran)

    def model(self, kind: str, form: str) -> Path:
        directory = self.root / f"{kind}-{form}"
        if not directory.exists():
            if form == "stacked":
                make_model(STACKED[kind], directory)
            else:
                write_separate(self.model(kind, "stacked"), directory, kind)
        return directory

    def _ran(self, kind: str, layout: str) -> tuple[Path, list[dict[str, Any]]]:
        directory = self.root / f"{kind}-{layout}"
        directory.mkdir()
        models = {form: self.model(kind, form) for form in FORMS}
        make_adapters(models["stacked"], directory / "peft-stacked", **BY_PEFT)
        rename(directory / "peft-stacked", directory / "peft-separate")
        # Ranks join with the configuration of one of the models.
        job = {"layout": LAYOUTS[layout], "model": models["stacked"], "models": models, "targets": TARGETS[kind]}
        return directory, run_ranks(train, directory, LAYOUTS[layout]["world_size"], job)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("stacked"))


def write_separate(stacked: Path, out: Path, kind: str) -> None:
    """Writes the language model in directory `stacked` as a checkpoint with a tensor for each expert's projection."""
    hf = json.loads((stacked / "config.json").read_text())
    out.mkdir()
    (out / "config.json").write_text(json.dumps({**hf["text_config"], **SEPARATE[kind], "torch_dtype": "float32"}))
    weights: Weights = {}
    for name, tensor in load_file(stacked / "model.safetensors").items():
        if "visual." in name:
            continue
        name = name.replace("model.language_model.", "model.")
        module, marker, projections = name.partition(".experts.")
        if not marker:
            weights[name] = tensor
            continue
        parts = ["gate_proj", "up_proj"] if projections == "gate_up_proj" else ["down_proj"]
        for expert, matrix in enumerate(tensor):
            rows = matrix.T if kind == "transposed" else matrix
            for part, value in zip(parts, rows.chunk(len(parts)), strict=True):
                weights[f"{module}.experts.{expert}.{part}.weight"] = value.contiguous()
    save_file(weights, out / "model.safetensors", {"format": "pt"})


def rename(adapters: Path, out: Path) -> None:
    """Copies adapters of a nested language model to `out` with the names of the language model alone."""
    out.mkdir()
    (out / "adapter_config.json").write_bytes((adapters / "adapter_config.json").read_bytes())
    save_file(bare(load_file(adapters / "adapter_model.safetensors")), out / "adapter_model.safetensors")


def bare(tensors: Weights) -> Weights:
    return {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_adapters_of_stacked_experts_train_as_those_of_separate_ones(trained: Trained, tmp_path, kind, layout) -> None:
    directory, results = trained.ran(kind, layout)
    for ranks in results:
        assert ranks["stacked base"] and ranks["separate base"]
        assert ranks["stacked"] == ranks["separate"]
    steps = results[-1]["stacked"]
    assert len({step["loss/sft"] for step in steps}) == len({step["optim/grad_norm"] for step in steps}) == len(STEPS)
    export_adapters(directory / "stacked", tmp_path / "stacked", trained.model(kind, "stacked"), LOADED["alpha"])
    found = bare(load_file(tmp_path / "stacked" / "adapter_model.safetensors"))
    begun = load_file(directory / "peft-separate" / "adapter_model.safetensors")
    assert begun.keys() <= found.keys() and not [name for name in begun if torch.equal(found[name], begun[name])]
    assert any(name.endswith(".experts.base_layer.lora_A.weight") for name in begun)
    if kind == "transposed":  # adapters of the other separate language model are not exported
        export_adapters(directory / "separate", tmp_path / "separate", trained.model(kind, "separate"), LOADED["alpha"])
        assert equal(found, load_file(tmp_path / "separate" / "adapter_model.safetensors"))


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_trainers_compute_with_pefts_adapters_what_peft_does(trained: Trained, kind, layout) -> None:
    import peft

    directory, _ = trained.ran(kind, layout)
    model = peft.PeftModel.from_pretrained(load_model(trained.model(kind, "stacked")), directory / "peft-stacked")
    last = LAYOUTS[layout]["world_size"] - 1
    moved = 0.0
    for sequence, values in by_sequence(np.load(directory / f"{last}.npz")).items():
        tokens, labels = torch.tensor(sequence[:-1]), torch.tensor(sequence[1:])[:, None]
        right = logprobs(model, tokens).gather(1, labels)[:, 0]
        assert (torch.from_numpy(values) - right).abs().max() <= 1e-4
        with model.disable_adapter():
            moved = max(moved, (logprobs(model, tokens).gather(1, labels)[:, 0] - right).abs().max().item())
    assert moved > 0.1


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_peft_merges_exported_adapters_to_the_exported_weights(trained: Trained, tmp_path, kind, layout) -> None:
    import peft

    directory, _ = trained.ran(kind, layout)
    base = trained.model(kind, "stacked")
    assert export_adapters(directory / "new", tmp_path / "adapters", base, NEW["alpha"]) > 0
    whole = load_model(write_model(tmp_path / "merged", base, load_file(directory / "merged.safetensors")))
    plain = load_model(base)
    ids = torch.arange(64) % SPECIAL
    right, without = logprobs(whole, ids), logprobs(plain, ids)
    model = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters")
    assert (logprobs(model, ids) - right).abs().max() <= 1e-4 < 0.1 < (without - right).abs().max()
    again = model.merge_and_unload().state_dict()
    assert again.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.allclose(again[name], value, rtol=0, atol=1e-6), name


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_the_plan_counts_gradients_and_state_of_adapters_only(trained: Trained, kind, layout) -> None:
    for ranks in trained.ran(kind, layout)[1]:
        assert ranks["planned"] == ranks["bytes"]
