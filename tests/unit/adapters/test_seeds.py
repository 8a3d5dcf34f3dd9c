"""A seed draws the same token in fast mode, whatever else is in the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slimx.adapters.sglang import hooks
from slimx.adapters.sglang import seeded_sampling as draws
from slimx.extras.cpu.adapters import sglang as sglang_cpu
from tests.function_call import call_with_sglang

WITHOUT = pytest.mark.slow("shows that SGLang's own draws differ, so that the test sees a difference")


VOCABULARY, REQUESTS = 500, 16
WIDE = (64, 151936)
"""Draws, and tokens of Qwen3's vocabulary."""


class Batch(SimpleNamespace):
    """A ScheduleBatch as far as it is read; SGLang keeps a weak reference to it."""


def sampled(hooked: bool) -> list[Any]:
    """Samples as SGLang does in fast mode, without a server.

    Returns [{seed: token}, {seed: token}, differ]: tokens in two orders of the same requests, and the number of draws
    over a real vocabulary that differ from SGLang's. `hooked`: after the plugin's hooks are applied.
    """
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
    return [*found, differ.sum().item()]


@pytest.mark.parametrize(
    ("hooked", "same"), [(True, True), pytest.param(False, False, marks=WITHOUT)], ids=["with", "without"]
)
def test_a_seed_draws_one_token_in_any_batch_where_the_plugin_carries_it(hooked: bool, same: bool) -> None:
    one, other, differ = call_with_sglang(sampled, hooked)
    assert differ == 0, "tokens are SGLang's"
    assert (one == other) is same
    assert len(set(one.values())) > len(one) // 2, "each seed draws its own"
