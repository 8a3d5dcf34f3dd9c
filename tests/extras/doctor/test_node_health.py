"""Each fault that makes a node unfit, reported in a sentence. Faults come from a fake NVML and fake system files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slimx.errors import SlimxError
from slimx.extras.doctor.node_health import NodeRequirements, Places, examine_node
from tests.refusals import numbers
from tests.unit.trainer.fake_gpu import FakeGpu


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "kmsg").write_text("")
    return Places(
        infiniband=tmp_path / "ib",
        shm=tmp_path,
        kernel_log=tmp_path / "kmsg",
        driver=tmp_path / "params",
        now=lambda: 1000.0,
        uptime=lambda: 10_000.0,
    )


def problems(required: NodeRequirements, places: Places, *gpus: FakeGpu) -> list[str]:
    return examine_node(required, lambda: list(gpus), places)[0]


def test_a_sound_node_has_no_problem_and_a_slow_gpu_is_a_note(tmp_path, places):
    required = NodeRequirements(gpus=2, disk_gib=0, shm_gib=0, paths=[tmp_path], clock=990.0)
    found, notes = examine_node(required, lambda: [FakeGpu(), FakeGpu(reasons={"power brake"})], places)
    (note,) = notes
    assert found == [] and "GPU-1234" in note and "power brake" in note


def test_a_missing_gpu_and_a_broken_one_are_reported_together(places):
    found = problems(NodeRequirements(gpus=3, disk_gib=0, shm_gib=0, paths=[]), places, FakeGpu(), FakeGpu(errors=2))
    missing, broken = found
    assert numbers(missing) == [2, 3] and "GPU-1234" in broken and numbers(broken)[-1] == 2


def test_a_driver_that_does_not_answer_is_the_problem(places):
    problem = SlimxError("NVML does not answer (Driver Not Loaded)")

    def silent() -> list:
        raise problem

    assert examine_node(NodeRequirements(gpus=1, paths=[], shm_gib=0), silent, places)[0] == [str(problem)]


def test_space_is_required_on_every_path_and_in_shared_memory(tmp_path, places):
    absent = tmp_path / "absent"
    found = problems(NodeRequirements(disk_gib=1e9, shm_gib=0, paths=[tmp_path, absent]), places)
    assert found[0].startswith(f"{tmp_path} has ") and numbers(found[0])[-1] == 1e9
    assert found[1].startswith(f"{absent} ") and os.strerror(errno.ENOENT) in found[1]
    (short,) = problems(NodeRequirements(disk_gib=0, shm_gib=1e9, paths=[]), places)
    assert short.startswith(f"{places.shm} has ")


def test_a_clock_skew_is_reported_in_seconds(places):
    (found,) = problems(NodeRequirements(disk_gib=0, shm_gib=0, paths=[], clock=900.0), places)
    assert numbers(found) == [100, 60]


def test_adapters_are_there_and_have_an_active_port(places):
    port = places.infiniband / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    down = places.infiniband / "mlx5_1/ports/1"
    down.mkdir(parents=True)
    (down / "state").write_text("1: DOWN\n")
    found = problems(NodeRequirements(disk_gib=0, shm_gib=0, paths=[], hcas=["mlx5_0", "mlx5_1", "mlx5_2"]), places)
    inactive, absent = found
    assert "mlx5_1" in inactive and "1: DOWN" in inactive and str(places.infiniband / "mlx5_2") in absent


@pytest.mark.parametrize(
    ("params", "missing"),
    [
        ('EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n', 0),
        ('EnableStreamMemOPs: 0\nRegistryDwords: "PeerMappingOverride=1;"\n', 1),
        ('EnableStreamMemOPs: 0\nRegistryDwords: ""\n', 1),
        (None, 0),
    ],
)
def test_a_driver_without_the_options_of_deep_ep_is_a_note(places, params, missing):
    required = NodeRequirements(gpus=1, disk_gib=0, shm_gib=0, paths=[])
    if params is not None:
        places.driver.write_text(params)
    assert examine_node(required, lambda: [FakeGpu()], places) == ([], [])
    (places.infiniband / "mlx5_0").mkdir(parents=True)
    found, notes = examine_node(required, lambda: [FakeGpu()], places)
    assert found == [] and len(notes) == missing
    assert all("EnableStreamMemOPs" in note for note in notes)


def test_only_recent_hardware_errors_count(places):
    lines = [
        (9_900, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
        (9_900, "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault"),
        (5_000, "NVRM: Xid (PCI:0000:86:00): 48, DBE"),
        (9_950, "usb 1-1: new device"),
    ]
    text = "".join(f"4,{number},{at * 1_000_000},-;{line}\n" for number, (at, line) in enumerate(lines))
    places.kernel_log.write_text(text)
    (found,) = problems(NodeRequirements(gpus=1, disk_gib=0, shm_gib=0, paths=[]), places, FakeGpu())
    assert found.startswith("PCI:0000:3b:00: ") and numbers(found)[-2:] == [79, 2], "the XID, and minutes ago"
