"""Samples by seeds as SGLang does in fast mode, without a server, and prints tokens as JSON.

    python -m tests.unit.adapters.sampled_seeds {with,without}

`with`: after the plugin's hooks are applied. Prints [{seed: token}, {seed: token}, differ]: tokens in two orders of the
same requests, and the number of draws over a real vocabulary that differ from SGLang's.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import torch

from slimx.adapters.sglang import hooks
from slimx.adapters.sglang import seeded_sampling as draws
from slimx.extras.cpu.adapters import absent
from slimx.extras.cpu.adapters import sglang as sglang_cpu

VOCABULARY, REQUESTS = 500, 16
WIDE = (64, 151936)
"""Draws, and tokens of Qwen3's vocabulary."""


class Batch(SimpleNamespace):
    """A ScheduleBatch as far as it is read; SGLang keeps a weak reference to it."""


def main(hooked: bool) -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    absent.install()
    sglang_cpu._add_murmur()
    from sglang.srt.layers import sampler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.sampling.sampling_params import SamplingParams

    original = sampler.multinomial_with_seed
    if hooked:
        HookRegistry.register(draws.DRAW, draws.draw, HookType.REPLACE)
        HookRegistry.register(hooks.ADJUST, hooks.carry_seeds, HookType.AFTER)
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
        tokens = sampler.sampling_from_probs_torch(probs, info.sampling_seed, torch.full((REQUESTS,), 7))
        found.append(dict(zip(numbers, tokens.tolist(), strict=True)))
    logprobs = (2 * torch.randn(WIDE, generator=torch.Generator().manual_seed(1))).log_softmax(-1)
    at = torch.arange(WIDE[0])
    differ = sampler.multinomial_with_seed(logprobs, 2**40 + at, at) != original(logprobs, 2**40 + at, at)
    assert (sampler.multinomial_with_seed is original) is not hooked
    print(json.dumps([*found, differ.sum().item()]))


if __name__ == "__main__":
    main(sys.argv[1] == "with")
