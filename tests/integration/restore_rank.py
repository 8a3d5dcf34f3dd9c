"""The restore of a trainer whose moments lie on the host, on a pretended GPU: a process of test_restore_memory.

    python -m tests.integration.restore_rank OUT

Writes OUT/bytes.json: the bytes of weights, of moments, and how many more than before live on the GPU at most while a
checkpoint is restored (`restored`), while one is saved (`saved`) and while a state is loaded (`loaded`).
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any


def main() -> None:
    out = Path(sys.argv[1])
    from tests.integration import pretended_cuda

    pretended_cuda.install()
    from slimx.adapters.megatron import layers as megatron_layers

    megatron_layers.Adam = copying(megatron_layers.Adam)
    parallel = pretended_cuda.join()
    measure(out, parallel)
    parallel.destroy()


def copying(adam: type) -> type:
    """Adam that loads a state as Transformer Engine's FusedAdam does: torch's method moves all of it to the parameters'
    device, then each moment is made anew there and filled."""
    import torch

    class Copying(adam):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            loaded, self.state = self.state, defaultdict(dict)
            for parameter, values in loaded.items():
                for name, value in values.items():
                    self.state[parameter][name] = torch.empty_like(parameter).copy_(value)

    return Copying


def measure(out: Path, parallel: Any) -> None:
    from slimx.models.families import read_model
    from slimx.trainer.checkpoint import files
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
    (checkpoint / files.REPORTS).mkdir(parents=True)
    with LiveBytes() as live:
        saver.save(str(checkpoint), step=1)
    found["saved"] = live.peak
    end = time.monotonic() + 600
    while files.unreported(checkpoint, range(1)):
        assert time.monotonic() < end, f"the checkpoint {checkpoint} is not written after 600 s"
        time.sleep(0.01)
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
    (out / "bytes.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
