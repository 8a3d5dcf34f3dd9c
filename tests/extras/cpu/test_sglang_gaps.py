"""SGLang's CPU path has what the extra adds, and the changes are those of the device."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import torch

from slimx.adapters.device import Device, device_named
from slimx.adapters.gpu import Gpu
from slimx.extras.cpu.adapters import sglang as sglang_cpu
from slimx.extras.cpu.device import Cpu


class Registry:
    """SGLang's HookRegistry, which notes what is registered."""

    def __init__(self) -> None:
        self.targets: list[str] = []

    def register(self, target: str, function: object, kind: str) -> None:
        self.targets.append(target)


def test_a_device_is_found_by_its_name() -> None:
    assert type(device_named("cpu")) is Cpu and type(device_named("cuda")) is Gpu


def test_a_gpu_needs_no_stand_ins() -> None:
    registry = Registry()
    device_named("cuda").register(registry, SimpleNamespace(REPLACE="replace"), experts=True)
    assert registry.targets == ["sglang.srt.layers.sampler.multinomial_with_seed"]
    assert Gpu().attest() is None and Gpu().change_megatron() == []
    assert Device().prepare_megatron(deep_ep=True) == []


def test_hooks_of_experts_are_left_out_where_others_compute_them() -> None:
    kinds, found = SimpleNamespace(REPLACE="replace", AROUND="around"), []
    for experts in (True, False):
        registry = Registry()
        sglang_cpu.register_hooks(registry, kinds, experts=experts)
        found.append(set(registry.targets))
    assert found[0] - found[1] == {sglang_cpu.NATIVE_MOE} and found[1] < found[0]


def test_minimaxs_norms_on_the_cpu_are_those_over_all_heads_of_all_ranks() -> None:
    query, key = torch.randn(3, 4 * 6), torch.randn(3, 2 * 6)
    weights = torch.randn(4 * 6), torch.randn(2 * 6)
    halves = [[x.chunk(2, -1)[rank] for x in (query, key, *weights)] for rank in range(2)]
    sums = sum(sglang_cpu.sums_of_squares(q, k) for q, k, _, _ in halves)
    found = [sglang_cpu.normed_by_sums(*half, sums, 2, 1e-3) for half in halves]
    for number, (whole, weight) in enumerate(zip((query, key), weights, strict=True)):
        expected = torch.nn.functional.rms_norm(whole, weight.shape, weight, 1e-3)
        torch.testing.assert_close(torch.cat([pair[number] for pair in found], -1), expected)


def test_the_factor_of_ling_2s_experts_is_applied_on_the_cpu() -> None:
    """Fails in its second part once SGLang applies the factor: then remove the hook, or outputs would be scaled
    twice."""
    block = SimpleNamespace(routed_scaling_factor=2.5)
    found = sglang_cpu.scaled_experts(lambda _, hidden, batch: hidden + batch, block, torch.ones(2, 3), 1)
    assert torch.equal(found, torch.full((2, 3), 5.0))
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    assert "routed_scaling" not in Path(package, "srt/layers/moe/fused_moe_native.py").read_text()
    assert "*= self.routed_scaling_factor" not in Path(package, "srt/models/bailing_moe.py").read_text()


def test_the_cpus_hash_is_murmurhash3() -> None:
    def reference(seed: int, position: int, column: int) -> int:
        """Computes MurmurHash3_x86_32 with seed 0 of four little-endian words."""
        state, mask = 0, 0xFFFFFFFF
        for word in (seed & mask, seed >> 32, position, column):
            word = word * 0xCC9E2D51 & mask
            word = (word << 15 | word >> 17) * 0x1B873593 & mask
            state ^= word
            state = ((state << 13 | state >> 19) & mask) * 5 + 0xE6546B64 & mask
        state ^= 16
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            state = (state ^ state >> shift) * factor & mask
        return state ^ state >> 16

    seeds, positions, columns = [0, 1, 2**40 + 12345], [0, 7, 2**31 + 5], [0, 1, 151935]
    got = sglang_cpu.murmur_hash32(*(torch.tensor(values) for values in (seeds, positions, columns)))
    want = [[reference(seed, position, c) for c in columns] for seed, position in zip(seeds, positions, strict=True)]
    assert got.tolist() == want and got.dtype == torch.uint32
