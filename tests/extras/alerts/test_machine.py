"""Disks that fill up and GPUs that are too hot open alerts; small disks and power limits do not."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from slimx.extras.alerts.machine import disks, gpus
from slimx.extras.alerts.machine.disks import GIB, HOURS, Disk, disks_of
from slimx.extras.alerts.machine.gpus import MARGIN, gpus_here
from slimx.extras.alerts.machine.watch import CLOSES, EVERY_S, OPENS, Machine, MachineWatch
from slimx.extras.alerts.receiver import Alerts
from slimx.trainer.checkpoint.files import MANIFEST


@dataclass
class FakeSpace:
    """Sizes that a disk reports."""

    total: int = 1000 * GIB
    free: int = 500 * GIB


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> FakeSpace:
    space = FakeSpace()
    monkeypatch.setattr(disks, "shutil", SimpleNamespace(disk_usage=lambda path: space))
    return space


def looks(machine: Machine, times: int, since: float = 0.0) -> list[tuple[bool, str, str]]:
    found = []
    for number in range(times):
        found += [(opens, finding.name, finding.about) for opens, finding in machine.look(since + number * EVERY_S)]
    return found


def test_a_nearly_full_disk_opens_one_alert_that_closes_when_there_is_room(space, tmp_path):
    machine = Machine([Disk(tmp_path)], [])
    space.free = GIB
    assert looks(machine, 5) == [(True, "disk", str(tmp_path))]
    space.free = 2 * GIB + 1  # more than the limit, but not enough to close
    assert looks(machine, 20, 1e4) == []
    space.free = 4 * GIB
    assert looks(machine, 5, 2e4) == [(False, "disk", str(tmp_path))]


def test_a_small_disk_is_judged_by_its_own_size(space, tmp_path):
    machine = Machine([Disk(tmp_path)], [])
    space.total, space.free = GIB // 16, GIB // 20
    assert looks(machine, 10) == []


def test_a_checkpoint_that_no_longer_fits_opens_an_alert(space, tmp_path):
    manifest = tmp_path / "iter_0000005" / MANIFEST
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    with (manifest.parent / "weights").open("wb") as file:
        file.truncate(300 * GIB)  # without blocks on the disk
    disk = Disk(tmp_path, tmp_path)
    finding = disk.look(0.0)
    assert not finding.bad and "300 GiB" in finding.text
    space.free = 301 * GIB
    assert disk.look(1.0).bad and not disk.look(2.0).good
    space.free = 900 * GIB
    assert disk.look(3.0).good


def test_a_disk_that_fills_up_is_reported_hours_before(space, tmp_path):
    disk = Disk(tmp_path)
    found = []
    for number in range(200):
        found.append(disk.look(number * 60.0).bad)
        space.free -= 2 * GIB  # 120 GiB an hour
    first = found.index(True)
    assert 500 - 2 * first == pytest.approx(120 * HOURS, abs=4) and not any(found[:first])


def minutes(disk: Disk, space: FakeSpace, first: int, last: int, fall: float) -> list[bool]:
    """Looks every half minute, while the free space falls by `fall` GiB a minute. Returns which findings are bad."""
    found = []
    for number in range(2 * first, 2 * last):
        found.append(disk.look(number * 30.0).bad)
        space.free -= int(fall * GIB / 2)
    return found


@pytest.mark.parametrize("lasts", [3, 12, 20, 24])
def test_a_start_that_fills_a_disk_is_not_extrapolated(space, tmp_path, lasts):
    disk = Disk(tmp_path)
    found = minutes(disk, space, 0, lasts, 10)  # caches and the first checkpoint: at most 240 GiB of 500
    found += minutes(disk, space, lasts, lasts + 5, 0)
    found += minutes(disk, space, lasts + 5, 90, 0.1)  # metrics and rollouts
    assert not any(found)


def test_a_checkpoint_that_is_written_at_once_is_not_extrapolated(space, tmp_path):
    disk = Disk(tmp_path)
    found = minutes(disk, space, 0, 60, 0)
    space.free -= 200 * GIB
    found += minutes(disk, space, 60, 90, 0)
    assert not any(found)


@pytest.mark.parametrize("seconds", [30, 120, 240])
def test_a_disk_that_suddenly_fills_fast_is_reported_while_there_is_time(space, tmp_path, seconds):
    machine = Machine([Disk(tmp_path)], [])
    space.free = 300 * GIB
    found: list[tuple[int, bool]] = []
    for now in range(0, 145 * 60, seconds):
        found += [(now // 60, opens) for opens, _ in machine.look(now)]
        if now >= 120 * 60:
            space.free -= 12 * GIB * seconds // 60
    ((minute, opens),) = found
    assert opens and minute <= 120 + 5 + 2 * seconds / 60


@pytest.mark.parametrize(("lasts", "fall"), [(1, 200), (2, 100), (4, 60)])
def test_a_short_burst_is_not_extrapolated(space, tmp_path, lasts, fall):
    machine = Machine([Disk(tmp_path)], [])
    found = []
    for number in range(2 * 150):
        found += machine.look(number * 30.02)
        if 120 <= number < 120 + 2 * lasts:
            space.free -= fall * GIB // 2
    assert found == []


def test_a_long_checkpoint_is_not_extrapolated(space, tmp_path):
    manifest = tmp_path / "iter_0000005" / MANIFEST
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    with (manifest.parent / "weights").open("wb") as file:
        file.truncate(200 * GIB)  # without blocks on the disk
    disk = Disk(tmp_path, tmp_path)
    assert not any(minutes(disk, space, 0, 60, 0) + minutes(disk, space, 60, 70, 20) + minutes(disk, space, 70, 90, 0))
    assert any(minutes(disk, space, 90, 100, 20)), "the disk holds no further one"


def test_looks_that_are_far_apart_measure_a_rate_too(space, tmp_path):
    disk = Disk(tmp_path)
    found = []
    for number in range(12):
        found.append(disk.look(number * 600.0).bad)
        space.free -= 40 * GIB
    assert found.index(True) == 3, "the first after half an hour"


def test_a_disk_that_checkpoints_fill_in_bursts_opens_one_alert(space, tmp_path):
    disk = Disk(tmp_path)
    machine = Machine([disk], [])
    found = []
    for number in range(2 * 240):  # 30 GiB in each quarter of an hour, which is full after 250 minutes
        if number % 30 == 29:
            space.free -= 30 * GIB
        found += [opens for opens, _ in machine.look(number * 30.0)]
    assert found == [True]


def test_disks_of_a_run_are_looked_at_once_each(tmp_path):
    found = list(disks_of(tmp_path))
    assert found[0].directory == tmp_path and len({disk.directory.stat().st_dev for disk in found}) == len(found)
    assert all(disk.look(time.time()).value > 0 for disk in found)


def test_a_directory_that_vanished_is_passed_over(tmp_path, monkeypatch):
    assert looks(Machine([Disk(tmp_path / "gone")], []), 3) == []
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # a moment ago
    assert tmp_path / "gone" not in [disk.directory for disk in disks_of(tmp_path / "gone")]


@dataclass
class HotGpu:
    name: str = "GPU 3"
    now: int = 60
    limit: int | None = 90
    reasons: set[str] = field(default_factory=set)

    def throttled(self) -> set[str]:
        return self.reasons

    def temperatures(self) -> tuple[int, int | None]:
        return self.now, self.limit


@pytest.mark.parametrize("ill", [{"now": 90 - MARGIN + 1}, {"reasons": {"hardware thermal slowdown"}}])
def test_a_hot_or_throttled_gpu_opens_one_alert_that_closes(ill):
    gpu = HotGpu()
    machine = Machine([], [gpu])
    assert looks(machine, 20) == []
    for name, value in ill.items():
        setattr(gpu, name, value)
    assert looks(machine, OPENS["gpu"] - 1) == [] and looks(machine, 20) == [(True, "gpu", "GPU 3")]
    gpu.now, gpu.reasons = 60, set()
    assert looks(machine, CLOSES["gpu"] - 1) == [] and looks(machine, 20) == [(False, "gpu", "GPU 3")]


def test_a_gpu_whose_clocks_change_back_and_forth_opens_one_alert():
    gpu = HotGpu(reasons={"power brake"})
    machine = Machine([], [gpu])
    found = looks(machine, 10)
    for _ in range(20):
        gpu.reasons = {"power brake"} if not gpu.reasons else set()
        found += looks(machine, 5)
    assert found == [(True, "gpu", "GPU 3")]


class LostGpu(HotGpu):
    def temperatures(self) -> tuple[int, int | None]:
        raise OSError("GPU is lost")


def test_a_gpu_that_does_not_answer_opens_an_alert_and_hides_no_other():
    machine = Machine([], [LostGpu(name="GPU 0"), HotGpu(name="GPU 1", reasons={"power brake"})])
    assert looks(machine, 20) == [(True, "gpu", "GPU 0"), (True, "gpu", "GPU 1")]


def test_a_gpu_that_does_not_tell_its_limit_is_judged_by_its_clocks():
    gpu = HotGpu(now=99, limit=None)
    assert looks(Machine([], [gpu]), 20) == []
    gpu.reasons = {"power brake"}
    assert looks(Machine([], [gpu]), 20) == [(True, "gpu", "GPU 3")]


def test_alerts_that_are_off_are_not_looked_at(space, tmp_path):
    space.free = 0
    machine = Machine([Disk(tmp_path)], [HotGpu(now=200)], ["disk", "gpu"])
    assert looks(machine, 30) == []


class FakeNvml(ModuleType):
    """NVIDIA's library as the modules use it, with one GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.NVML_TEMPERATURE_GPU = 0
        self.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
        self.nvmlEventTypeXidCriticalError = 8
        self.nvmlClocksEventReasonHwSlowdown = 8
        self.nvmlClocksEventReasonHwThermalSlowdown = 64
        self.nvmlClocksEventReasonHwPowerBrakeSlowdown = 128
        self.nvmlClocksEventReasonSwThermalSlowdown = 32
        self.active = 0
        self.count = 1

    def nvmlInit(self) -> None:
        if not self.count:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return "GPU-1"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return 0

    def nvmlEventSetCreate(self) -> object:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self.active

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 55

    def nvmlDeviceGetTemperatureThreshold(self, handle: int, kind: int) -> int:
        return 88


def test_clocks_that_heat_lowers_are_told_from_those_that_a_power_limit_lowers(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (gpu,) = gpus_here()
    nvml.active = 4 | 1  # a power limit, idle
    (finding,) = gpus.look_at([gpu])
    assert finding.good and finding.value == 55 and finding.about == "GPU 0"
    nvml.active = 32
    (finding,) = gpus.look_at([gpu])
    assert finding.bad and "thermal" in finding.text
    nvml.count = 0
    assert gpus_here() == []


def test_the_thread_hands_over_what_it_finds_and_ends(space, tmp_path):
    space.free = 0
    notes: list[str] = []
    alerts = Alerts("r", tmp_path, notes.append, factor=1, at_least=1e9)
    alerts.machine = MachineWatch(lambda: Machine([Disk(tmp_path)], []), every_s=0.01)
    activity = {"phase": "train", "number": 1, "since": time.time()}

    ends = time.monotonic() + 60
    while not notes:
        assert time.monotonic() < ends
        time.sleep(0.01)
        alerts.look(activity)
    assert [alert.about for alert in alerts.log.open_alerts().values()] == [str(tmp_path)]
    alerts.close()
    assert not alerts.log.open_alerts() and Path(tmp_path / "alerts.jsonl").is_file()
