"""Saving and restoring a trainer needs no GPU memory other than its state; moments of the host never visit it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.integration.rank_processes import run_ranks
from tests.integration.saving import begin_save, finish_save

pytestmark = pytest.mark.integration


def copying(adam: type) -> type:
    """Returns an Adam that loads a state as Transformer Engine's FusedAdam does: torch's method moves all of it to the
    parameters' device, then each moment is made anew there and filled."""
    import torch

    class Copying(adam):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            loaded, self.state = self.state, defaultdict(dict)
            for parameter, values in loaded.items():
                for name, value in values.items():
                    self.state[parameter][name] = torch.empty_like(parameter).copy_(value)

    return Copying


def measure(out: Path, parallel: Any) -> dict[str, int]:
    """Measures bytes of weights, of moments, and how many more than before are on the GPU at most while a checkpoint is
    saved, while one is restored and while a state is loaded."""
    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer
    from tests.gpu.trainer_cases import CASES, config, write_model
    from tests.integration.pretended_cuda import LiveBytes

    case = CASES["qwen-bf16"]
    path = write_model(out / "model", case["hf"], case["mtp"], seed=1)
    settings = config(path, out, case)
    optimizer = settings.trainer.optimizer.model_copy(update={"offload_fraction": 1.0})
    settings = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"optimizer": optimizer})})
    found: dict[str, int] = {}

    def built() -> PolicyTrainer:
        return PolicyTrainer(settings, read_model(path, mtp_layers=case["mtp"]), parallel)

    saver, restored = built(), built()
    found["weights"] = sum(parameter.nbytes for parameter in saver.weights.parameters.values())
    found["moments"] = sum(p.nbytes * 2 for group in saver.optimizer.param_groups for p in group["params"])
    checkpoint = out / "checkpoint"
    with LiveBytes() as live:
        begin_save(saver, checkpoint, step=1)
    found["saved"] = live.peak
    finish_save(saver, checkpoint)
    with LiveBytes() as live:
        restored.restore(str(checkpoint), same_layout=True)
    found["restored"] = live.peak
    for part in restored.optimizer.chained_optimizers:
        state = part.optimizer.state_dict()
        with LiveBytes() as live:
            part.optimizer.load_state_dict(state)
        found["loaded"] = max(live.peak, found.get("loaded", 0))
    found["on_device"] = sum(
        value.nbytes
        for part in restored.optimizer.chained_optimizers
        for values in part.optimizer.state.values()
        for value in values.values()
        if value.is_cuda
    )
    return found


def restore(job: dict[str, Any], rank: int) -> dict[str, int]:
    """Measures a trainer whose moments are on the host, on a pretended GPU."""
    from tests.integration import pretended_cuda

    pretended_cuda.install()
    from slimx.adapters.megatron import layers as megatron_layers

    megatron_layers.Adam = copying(megatron_layers.Adam)
    parallel = pretended_cuda.join(job, rank)
    found = measure(job["out"], parallel)
    parallel.destroy()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Returns bytes on a pretended GPU, with an Adam that loads as Transformer Engine's does."""
    return run_ranks(restore, tmp_path_factory.mktemp("restore"), 1, {"layout": {}}, role="rank_on_pretended_gpu")[0]


def test_a_restore_brings_moments_to_the_host_without_the_gpu(found):
    assert found["moments"] == 4 * found["weights"], "fp32, two of them, of a bf16 model"
    assert found["restored"] <= found["weights"] // 16, "joined projections are read in place, too"
    assert found["on_device"] == 0


def test_a_state_that_is_loaded_brings_moments_to_the_host_without_the_gpu(found):
    assert found["loaded"] == 0


def test_a_save_gathers_nothing_on_the_gpu(found):
    assert found["saved"] <= found["weights"] // 16
