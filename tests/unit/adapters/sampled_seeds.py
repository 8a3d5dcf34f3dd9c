"""Samples by seeds as SGLang does in fast mode, without a server, and prints tokens as JSON.

    python -m tests.unit.adapters.sampled_seeds {with,without}

`with`: after the plugin's hook is applied. Prints {"order": {seed: token}} for two orders of the same requests.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import torch

from slimx.adapters.sglang import absent, seeds
from slimx.adapters.sglang import cpu as sglang_cpu

VOCABULARY, REQUESTS = 500, 16


class Batch(SimpleNamespace):
    """A ScheduleBatch as far as it is read; SGLang keeps a weak reference to it."""


def main(hooked: bool) -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    absent.install()
    sglang_cpu._add_murmur()
    from sglang.srt.layers.sampler import sampling_from_probs_torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.sampling.sampling_params import SamplingParams

    if hooked:
        HookRegistry.register(seeds.ADJUST, seeds.carry, HookType.AFTER)
        HookRegistry.apply_hooks()
    features = SimpleNamespace(enable_custom_logit_processor=False, enable_watermark=False)
    fast = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False), features=features)
    sampling_batch_info.get_exec = lambda: fast
    probs = torch.full((REQUESTS, VOCABULARY), 1 / VOCABULARY)
    found = []
    for order in (range(REQUESTS), reversed(range(REQUESTS))):
        numbers = list(order)
        requests = [
            SimpleNamespace(
                sampling_params=SamplingParams(sampling_seed=number),
                custom_logit_processor=None,
                return_sampling_mask=False,
                sampling_logprobs_mode=None,
            )
            for number in numbers
        ]
        batch = Batch(reqs=requests, device="cpu")
        info = sampling_batch_info.SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY)
        tokens = sampling_from_probs_torch(probs, info.sampling_seed, torch.full((REQUESTS,), 7))
        found.append(dict(zip(numbers, tokens.tolist(), strict=True)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1] == "with")
