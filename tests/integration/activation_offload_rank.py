"""One gloo rank of test_activation_offload: a trainer on a pretended GPU, with and without activations on the host.

    python -m tests.integration.activation_offload_rank JOB.json RANK

Writes RANK.json: per way to keep activations a digest of the weights after each step, the most bytes on the GPU and the
bytes that were moved in the longest, and those of weights, gradients and optimizer state.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEPS = (1, 2, 1)
"""Micro-batches of each step: upstream would take the first step's number for all."""


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    from tests.integration import pretended_cuda

    pretended_cuda.install()
    parallel = _join(job, rank)
    _pretend_transformer_engine()
    said = [_run(job, way, parallel) for way in job["ways"]]
    (Path(job["out"]) / f"{rank}.json").write_text(json.dumps(said))
    parallel.destroy()


def _join(job: dict[str, Any], rank: int) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet = dist.init_process_group
    dist.init_process_group = lambda backend, **kwargs: meet("gloo", **kwargs)
    from slimx.adapters.megatron import layers as megatron_layers
    from slimx.config.sections.trainer import Trainer
    from slimx.layout.ranks import sizes_of
    from slimx.trainer.parallel import ParallelState

    megatron_layers.install()
    ParallelState._check_devices = lambda self: None  # there are no properties of a GPU to ask for
    torch.set_num_threads(1)
    sizes, device = sizes_of(Trainer(**job["layout"])), torch.device("cuda")
    return ParallelState(sizes, rank=rank, init_method=job["init_method"], device=device, deadline_s=600, seed=1)


def _pretend_transformer_engine() -> None:
    """Stand in for what megatron-core asks of it beside the layers, and for tensors on the pretended GPU."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.moe import experts

    from slimx.trainer.device import backends
    from tests.integration.pretended_cuda import Pretended
    from tests.integration.pretended_cuda_rank import _rotation_of_latent_attention

    transformer_engine.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)
    transformer_engine.set_save_original_input = experts.set_save_original_input = lambda module: None
    backends._check_offload = lambda *_: None
    Pretended.untyped_storage = lambda self: self.held.untyped_storage()
    _rotation_of_latent_attention()


def _run(job: dict[str, Any], way: dict[str, Any], parallel: Any) -> dict[str, Any]:
    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer
    from tests.integration.memory_rank import config, micro_batches
    from tests.integration.pretended_cuda import LiveBytes

    settings = config(job, job["model"], job["case"] | {"trainer": way})
    trainer = PolicyTrainer(settings, read_model(settings.model.path), parallel)
    batches = micro_batches(settings, parallel.sizes, parallel.coordinates.data)
    assert len(batches) == max(STEPS)
    digests, peaks, moved = [], [], []
    trainer.logprobs(batches)  # before the first step, as evaluations and old log-probs come
    for step, count in enumerate(STEPS):
        with LiveBytes() as live:
            trainer.train_step(batches[:count], step=step, version=1)
        peaks.append(live.peak)
        moved.append(_moved() if settings.trainer.offload_activations else 0)
        digests.append(_digest(trainer.weights.parameters))
        trainer.logprobs(batches[:1])
    state = sum(trainer.offloading.sizes().values())
    longest = STEPS.index(max(STEPS))
    return {"weights": digests, "peak": peaks[longest], "moved": moved[longest], "state": state}


def _moved() -> int:
    """Bytes of the last pass, whose chunks megatron-core still knows."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    chunks = PipelineOffloadManager.get_instance()._cached_chunks_forward
    return sum(group.total_offload_bytes for chunk in chunks for group in chunk.offload_groups)


def _digest(parameters: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        found.update(name.encode() + parameter.detach().cpu().float().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
