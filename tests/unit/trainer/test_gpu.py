"""Handling of a GPU's answers: faults that cannot be provoked on real hardware come from a fake NVML."""

from __future__ import annotations

import re

import pytest

from slimx.trainer.device.gpu import MIB, MemoryGuard, NvmlGpu, check_health, largest, set_affinity
from tests.refusals import refused
from tests.unit.trainer.fake_gpu import FakeGpu


def test_a_sound_gpu_starts_and_a_slow_one_starts_with_a_warning():
    assert check_health(FakeGpu()) == ()
    (warning,) = check_health(FakeGpu(reasons={"power brake", "hardware slowdown"}))
    assert warning.startswith("GPU-1234 ") and warning.endswith("hardware slowdown, power brake")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"rows": (False, True)}, "gpu.remapping_failed"),
        ({"rows": (True, False)}, "gpu.remapping_pending"),
        ({"errors": 3}, "gpu.memory_errors"),
        ({"reported": [79, 48]}, "gpu.xid"),
    ],
)
def test_a_broken_gpu_is_refused_by_its_uuid_with_the_fault(fault, code):
    with refused(code, about="GPU-1234"):
        check_health(FakeGpu(**fault))


def guard(gpu: FakeGpu, margin: int, gained: int = 0) -> MemoryGuard:
    def free_caches() -> None:
        gpu.free += gained

    return MemoryGuard(gpu, margin * MIB, free_caches=free_caches)


def test_enough_free_memory_touches_no_cache():
    watched = guard(FakeGpu(), 1024)
    watched.check({})
    assert watched.freed == 0


def test_below_the_margin_caches_are_freed_first():
    watched = guard(FakeGpu(free=500 * MIB), 1024, gained=800 * MIB)
    watched.check({})
    assert watched.freed == 1


def test_too_little_memory_stops_the_run_with_the_largest_holders():
    watched = guard(FakeGpu(free=500 * MIB), 1024, gained=100 * MIB)
    with refused("gpu.memory_margin", about="GPU-1234") as caught:
        watched.check({"weights": 9_000 * MIB, "gradients": 0, "optimizer state": 30_000 * MIB})
    message = str(caught.value)
    sizes = ["600", "80,000", "60,000", "100", "30,000", "9,000"]
    # Free, whole, processes, this rank's kinds; both from the largest to the smallest.
    assert re.findall(r"([\d,]+) MiB", message) == sizes
    assert re.findall(r"pid (\d+)", message) == ["8", "7", "9"] and "trainer.memory_margin_mib" in message


def test_a_margin_of_zero_checks_nothing_but_a_critical_error_still_stops():
    guard(FakeGpu(free=0), 0).check({})
    with refused("gpu.xid", about="GPU-1234"):
        guard(FakeGpu(reported=[94]), 0).check({})


def test_a_rank_runs_on_the_allowed_cpus_near_its_gpu():
    applied: list[set[int]] = []
    used = set_affinity(FakeGpu(near={0, 1, 2}), {1, 2, 3}, lambda _, cpus: applied.append(cpus))
    assert used == {1, 2} and applied == [{1, 2}]
    assert set_affinity(FakeGpu(near={8}), {1, 2, 3}, lambda _, cpus: applied.append(cpus)) == {1, 2, 3}
    assert len(applied) == 1


def test_the_largest_tensors_come_first():
    assert list(largest({"a": 1, "b": 3, "c": 2, "d": 0}, count=2)) == ["b", "c"]


def test_without_nvml_the_error_names_the_gpu():
    with refused("gpu.nvml", about="GPU-none"):
        NvmlGpu("GPU-none")
