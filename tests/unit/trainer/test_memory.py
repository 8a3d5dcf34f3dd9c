"""Peaks by phase, and by the kernel's own high-water mark."""

from __future__ import annotations

import mmap

from slimx.trainer.device.memory import PhasePeaks, ProcessMeter

MIB = 2**20


class Scripted:
    """Each `begin` starts the next of the given peaks."""

    def __init__(self, *peaks: int):
        self.peaks = [peak * MIB for peak in peaks]
        self.at = -1

    def begin(self) -> None:
        self.at += 1

    def peak(self) -> int:
        return self.peaks[self.at]


def test_every_stretch_of_time_counts_for_its_phase_and_the_rest_is_idle():
    memory = PhasePeaks(Scripted(5, 9, 3, 7, 4, 1, 1), "generate")
    with memory.phase("train"), memory.phase("inner"):
        pass
    with memory.phase("publish"):
        pass
    assert memory.take() == {
        "memory/generate_peak_mib": 5.0,
        "memory/train_peak_mib": 9.0,
        "memory/publish_peak_mib": 7.0,
    }
    assert memory.take() == {"memory/generate_peak_mib": 1.0}


def test_the_peak_of_a_process_rises_with_what_it_touches_and_is_set_back():
    meter = ProcessMeter()
    meter.begin()
    before = meter.peak()
    with mmap.mmap(-1, 64 * MIB) as block:
        for page in range(0, 64 * MIB, 4096):
            block[page] = 1
        assert meter.peak() - before >= 60 * MIB
    meter.begin()
    if meter.resets:  # some kernels refuse it in containers
        assert meter.peak() - before <= 20 * MIB


def test_peaks_count_from_the_start_if_they_cannot_be_reset(tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t    2048 kB\n")
    (tmp_path / "clear_refs").mkdir()
    meter = ProcessMeter(tmp_path)
    meter.begin()
    assert not meter.resets and meter.peak() == 2 * MIB
