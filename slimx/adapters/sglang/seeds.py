"""Seeds of requests, which SGLang 0.5.23 hands to its sampler in deterministic inference only.

Deterministic inference is more than seeds: matrix products without tuned tiles, attention without split keys, no custom
all-reduce. In fast mode a policy engine has none of that, and its sampler (the backend pytorch) takes seeds all the
same once the batch carries them.
"""

from __future__ import annotations

from typing import Any

import torch

ADJUST = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch"
"""Called at the end of the construction of every batch's sampling parameters; SGLang's own does nothing."""
UNSEEDED = 42
"""Seed of a request that names none, SGLang's own in deterministic inference."""


def carry(result: None, info: Any, batch: Any, vocab_size: int) -> None:
    """After `adjusted_from_schedule_batch`: the seed of each request, int64 [requests] on the batch's device."""
    if info.sampling_seed is not None:  # deterministic inference
        return
    asked = [request.sampling_params.sampling_seed for request in batch.reqs]
    seeds = torch.tensor([UNSEEDED if seed is None else seed for seed in asked], dtype=torch.int64)
    if torch.device(batch.device).type == "cuda":
        seeds = seeds.pin_memory()
    info.sampling_seed = seeds.to(batch.device, non_blocking=True)
