"""Real trainers hold the memory that `slimx plan` predicts: state to the byte, the peak within 15%.

Measured in gloo ranks: storages of weights, gradients and optimizer state after a step, and the most bytes of tensors
that were alive at once in the next step (`LiveMemory`). Activations are larger than the state in most cases.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimx.config.schema import Config
from slimx.extras.planner.batch_plan import batch_plan
from slimx.extras.planner.memory.parameter_runs import Holdings
from slimx.extras.planner.memory.state import Buffers
from slimx.extras.planner.memory.trainer import trainer_memory
from slimx.layout.ranks import coordinates, sizes_of
from slimx.models.families import read_model, read_trunk
from tests.integration.full_steps import config, micro_batches
from tests.integration.invariance_models import DEEPSEEK, QWEN
from tests.integration.rank_processes import run_ranks
from tests.integration.rank_start import join, leave

pytestmark = pytest.mark.integration
WITHIN, PART = 0.15, 0.05
WIDE = QWEN | {"hidden_size": 96, "moe_intermediate_size": 160, "num_experts_per_tok": 4, "tie_word_embeddings": False}
WORDY = QWEN | {"vocab_size": 4096, "num_hidden_layers": 2}
MODELS = {"qwen": QWEN, "wide": WIDE, "wordy": WORDY, "deepseek": DEEPSEEK}
"""The experts' inner products are most of the activations in `wide`, the logits in `wordy`, the attention's
probabilities in `deepseek`."""
MTP = {"megatron": {"mtp_num_layers": 1}}
FULL, SELECTIVE = {"recompute": {"granularity": "full"}}, {"recompute": {"granularity": "selective"}}
PLAIN = {"distributed_optimizer": False}
HALVED = {"grad_reduce_in_fp32": False}


def case(tokens: int, length: int, dtype: str = "bfloat16", **trainer: Any) -> dict[str, Any]:
    return {"tokens": tokens, "length": length, "dtype": dtype, "trainer": trainer}


def recompute(**fields: Any) -> dict[str, Any]:
    return {"recompute": fields}


def module_cases(*modules: str) -> list[dict[str, Any]]:
    """Returns a step without recomputation, and with each module computed again."""
    alone = [recompute(granularity="selective", modules=[module]) for module in modules]
    return [case(512, 256, "float32"), *(case(512, 256, "float32", **fields) for fields in alone)]


MODULES = {
    "qwen": module_cases("core_attn", "layernorm", "moe_act", "moe"),
    "deepseek": module_cases("core_attn", "mla_up_proj", "mlp", "shared_experts"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {
        "layout": {"world_size": 1},
        "rollouts": 2,
        "critics": ["qwen"],
        "cases": {
            "qwen": [case(1024, 256), case(256, 128, "float32", **PLAIN), case(512, 512, **FULL)],
            "wide": [case(512, 64)],
            "wordy": [case(512, 64)],
            "deepseek": [case(256, 256, "float32", **MTP), case(512, 256, **SELECTIVE)],
        },
    },
    "recomputing": {
        "layout": {"world_size": 1},
        "rollouts": 2,
        "critics": [],
        "cases": {
            "qwen": [
                case(512, 128, **recompute(granularity="full", method="block", layers=2)),
                case(512, 128, **recompute(granularity="full", layers=2)),
                case(512, 128, **recompute(granularity="selective", modules=["layernorm", "moe_act"])),
                case(512, 128, **recompute(granularity="selective", modules=["moe"])),
                *MODULES["qwen"],
            ],
            "wide": [case(512, 64, "float32"), case(512, 64, **FULL)],
            "wordy": [case(512, 128, "float32", logprob_chunk_tokens=128)],
            "deepseek": [case(512, 128), case(512, 128, **FULL), *MODULES["deepseek"]],
        },
    },
    "TP2xEP2": {
        "layout": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
        "rollouts": 4,
        "critics": ["deepseek"],
        "cases": {"qwen": [case(512, 128, **HALVED)], "deepseek": [case(512, 128, "float32", **FULL)]},
    },
    "TP2xEP2xDP2": {
        "layout": {"world_size": 4, "tensor": 2, "expert": 2, "expert_tensor": 1},
        "rollouts": 4,
        "critics": ["qwen", "deepseek"],
        "cases": {
            "qwen": [case(512, 128, **HALVED), case(512, 128, "float32", **PLAIN)],
            "deepseek": [case(512, 128, **MTP), case(512, 128, "float32", **FULL)],
        },
    },
    "PP2xVPP2": {
        "layout": {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2},
        "rollouts": 4,
        "critics": [],
        "cases": {
            "qwen": [case(512, 128)],
            "deepseek": [case(512, 128, **MTP)],
        },
    },
    "PP2xTP2xEP2": {
        "layout": {"world_size": 4, "pipeline": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
        "rollouts": 4,
        "critics": ["deepseek"],
        "cases": {"qwen": [case(512, 128)], "deepseek": [case(512, 128, **MTP), case(512, 128, **SELECTIVE)]},
    },
    "CP2xTP2xEP2xETP2": {
        "layout": {"world_size": 4, "context": 2, "tensor": 2, "expert": 2, "expert_tensor": 2},
        "rollouts": 2,
        "critics": [],
        "cases": {"qwen": [case(512, 128)], "deepseek": [case(512, 128), case(512, 128, "float32", **FULL)]},
    },
}
QUICK = ("single", "TP2xEP2", "PP2xVPP2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes checkpoints of random weights."""
    root = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(1)
    for name, hf in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(hf))
        table = read_model(root / name, mtp_layers=hf.get("num_nextn_predict_layers", 0)).table
        tensors = {
            key: 0.1 * torch.randn(shape, generator=generator) for key, shape in table.checkpoint_shapes().items()
        }
        save_file(tensors, root / name / "model.safetensors", metadata={"format": "pt"})
    return root


class LiveMemory(TorchDispatchMode):
    """While it is entered: bytes of all storages that operators returned and that are still referenced, and their peak.

    Storages of before do not count. Operators see it in the backward pass too, recomputed ones among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        arguments = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in arguments:
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        size = self._sizes[key] = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def measure(settings: Config, parallel: Any) -> dict[str, int]:
    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer

    spec = read_model(settings.model.path, mtp_layers=settings.trainer.megatron.get("mtp_num_layers") or 0)
    trainer = PolicyTrainer(settings, spec, parallel)
    batches = micro_batches(settings, parallel.sizes, parallel.coordinates.data)
    trainer.train_step(batches, step=0, version=1)
    with LiveMemory() as live:
        trainer.train_step(batches, step=1, version=1)
    return {"micro_batches": len(batches), "live": live.peak, **trainer.offloading.sizes()}


def measure_critic(settings: Config, parallel: Any) -> dict[str, int]:
    from slimx.extras.token_level.critic import CriticTrainer

    critic = CriticTrainer(settings, parallel)
    batches = micro_batches(settings, parallel.sizes, parallel.coordinates.data)
    for batch in batches:
        batch.values = np.zeros(len(batch.tokens), np.float32)
        batch.returns = np.ones(len(batch.tokens), np.float32)  # without a gradient the optimizer takes no step
    critic.train_step(batches, step=0)
    return critic.offloading.sizes()


def measure_all(job: dict[str, Any], rank: int) -> dict[str, list[dict[str, int]]]:
    """Returns, by case and by critic: bytes of weights, gradients and optimizer state after two steps, and of cases the
    peak of all tensors that the second step made."""
    cases = [config(job, model, case) for model, cases in job["cases"].items() for case in cases]
    parallel = join(cases[0].trainer, rank, job["init_method"])
    states = [measure(settings, parallel) for settings in cases]
    critics = [measure_critic(critic_config(job, model), parallel) for model in job["critics"]]
    leave(parallel)
    return {"cases": states, "critics": critics}


def critic_config(job: dict[str, Any], model: str) -> Config:
    settings = config(job, model, {"length": 32, "tokens": 64})
    return Config.model_validate(settings.model_dump() | {"algorithm": {"name": "ppo"}, "critic": {}})


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow("full grid of layouts")]) for n in LAYOUTS],
)
def test_a_plan_says_what_trainers_hold(name: str, models: Path, tmp_path: Path):
    job = {**LAYOUTS[name], "models": models, "out": tmp_path}
    results = run_ranks(measure_all, tmp_path, job["layout"]["world_size"], job)
    cases = [(model, case) for model, cases in job["cases"].items() for case in cases]
    off = []
    for number, (model, case) in enumerate(cases):
        off += check_case(job, model, case, [result["cases"][number] for result in results])
    if name == "recomputing":
        live = {json.dumps([model, case]): results[0]["cases"][n]["live"] for n, (model, case) in enumerate(cases)}
        for model, (plain, *others) in MODULES.items():
            for one in others:
                check_module(job, model, plain, one, live)
    print(f"{name}: peaks off by {min(off):+.1%} to {max(off):+.1%}")
    for number, model in enumerate(job["critics"]):
        settings = critic_config(job, model).as_critic()
        sizes = sizes_of(settings.trainer)
        records = trainer_memory(settings, read_trunk(settings.model), sizes, "cpu", model="critic")
        for record in records:
            state = results[record.rank]["critics"][number]
            assert (record.weights, record.gradients, record.optimizer) == tuple(state.values()), (model, record)


def check_case(job: dict[str, Any], model: str, case: dict[str, Any], results: list[dict[str, int]]) -> list[float]:
    """Returns the relative error of the planned peak of each rank."""
    settings = config(job, model, case)
    sizes = sizes_of(settings.trainer)
    spec = read_model(settings.model.path, mtp_layers=settings.trainer.megatron.get("mtp_num_layers") or 0)
    records = {record.stage: record for record in trainer_memory(settings, spec, sizes, "cpu")}
    assert batch_plan(settings, sizes).microbatches_per_update == results[0]["micro_batches"], (model, case)
    off = []
    for rank, measured in enumerate(results):
        runs = Holdings(spec.table, settings.numerics.dtype).runs(sizes, rank)
        state = Buffers(runs, settings.trainer, sizes).state(rank)
        found = measured["weights"], measured["gradients"], measured["optimizer state"]
        assert (state.weights, state.gradients, state.optimizer) == found, (model, case, rank)
        record = records[coordinates(rank, sizes).pipeline]
        assert record.optimizer >= state.optimizer, "the record is of the fullest rank"
        off.append(record.peak / (sum(found) + measured["live"]) - 1)
        assert abs(off[-1]) <= WITHIN, (model, case, rank, record, measured)
    return off


def check_module(
    job: dict[str, Any], model: str, plain: dict[str, Any], one: dict[str, Any], live: dict[str, int]
) -> None:
    """Checks that recomputing a module takes off the peak what a plan says, within a quarter or PART of the peak."""
    before, after = (live[json.dumps([model, x])] for x in (plain, one))
    planned = [planned_peak(job, model, x) for x in (plain, one)]
    saved, expected = before - after, planned[0] - planned[1]
    (module,) = one["trainer"]["recompute"]["modules"]
    print(f"{model} {module}: {saved / before:.1%} of the peak, planned {expected / before:.1%}")
    assert abs(saved - expected) <= max(PART * before, expected / 4), (model, module, saved, expected)
    assert saved > 0 if expected > PART * before else saved > -PART * before, (model, module, saved, expected)


def planned_peak(job: dict[str, Any], model: str, case: dict[str, Any]) -> int:
    settings = config(job, model, case)
    (record,) = trainer_memory(settings, read_model(settings.model.path), sizes_of(settings.trainer), "cpu")
    return record.peak


def test_constants_of_the_planner_equal_those_of_the_trainer():
    """These stand twice because a plan must not import torch."""
    from slimx.extras.optimizer_offload import moments as host_moments
    from slimx.extras.planner.memory import pipeline as memory_pipeline
    from slimx.extras.planner.memory import trainer as memory_trainer
    from slimx.trainer.model import logprobs

    assert memory_pipeline.CHUNK_BYTES == logprobs.CHUNK_BYTES
    assert memory_pipeline.SMALLEST_CHUNK == logprobs.SMALLEST_CHUNK
    assert memory_trainer.MOMENT_PIECE == host_moments.PIECE_BYTES
