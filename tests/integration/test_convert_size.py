"""The command on checkpoints larger than what it may hold: memory, and a kill in the middle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slimx.cli import main
from slimx.digest import FileRecord, record
from tests.checkpoint_stand import QWEN3_MOE, tensors_of, write_checkpoint
from tests.integration.conftest import ROOT
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration
SMALL: dict[str, Any] = QWEN3_MOE | {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 32,
}
"""270 MB in bf16; its largest tensors, embedding and output layer, are 34 MB."""
LARGE: dict[str, Any] = QWEN3_MOE | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
}
"""4.6 GB in bf16: ten of Qwen3-30B-A3B's layers with a quarter of the experts; its largest tensor is 0.62 GB."""
MB = 2**20


# The process says itself how far its memory grew: what the system tells of a child includes its parent's from before.
MEASURED = """
import re, sys
from pathlib import Path
from slimx.cli import main
try:
    main()
finally:
    print("peak", re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])
"""


class Command:
    """`slimx convert` in a process of its own."""

    def __init__(self, *arguments: str | Path):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", MEASURED, "convert", *map(str, arguments)]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    def peak(self, seconds: float = 200) -> int:
        """Wait for it to succeed; its largest resident memory in MB, mapped files included."""
        try:
            output, _ = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        assert self.process.returncode == 0
        return int(output.split()[-1]) // 1024


def status(key: str) -> int:
    """A line of this process's status in MB."""
    return int(re.search(rf"{key}:\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) // 1024


def convert(job: dict[str, Any], rank: int) -> int:
    """Runs `slimx convert`; returns by how many MB resident memory grew at most, mapped files included."""
    sys.argv = ["slimx", "convert", *job["arguments"]]
    before = status("VmRSS")
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return status("VmHWM") - before


def growth(out: Path, *arguments: str | Path) -> int:
    """By how many MB the memory of `slimx convert` grows, in a process that has imported what trainers import."""
    return run_ranks(convert, out, 1, {"arguments": arguments}, seconds=200)[0]


def digests(directory: Path) -> dict[str, FileRecord]:
    return {str(p.relative_to(directory)): record(p) for p in sorted(directory.rglob("*")) if p.is_file()}


def sizes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors")) // MB


def test_memory_is_a_fraction_of_the_checkpoint_and_a_kill_costs_one_file(tmp_path):
    source = write_checkpoint(tmp_path / "source", SMALL, file_bytes=90 * MB)
    assert sizes(source) > 250
    options = ("--threads", "1", "--file-size", "0.05")
    assert growth(tmp_path / "growth", "hf-to-megatron", source, tmp_path / "m", *options) < 200
    back = ("megatron-to-hf", tmp_path / "m", tmp_path / "hf", "--original", source)
    assert growth(tmp_path / "growth", *back, *options) < 200
    assert growth(tmp_path / "growth", "hf-to-fp8", source, tmp_path / "fp8", *options) < 200
    expected, found = tensors_of(source), tensors_of(tmp_path / "hf")
    assert expected.keys() == found.keys() and all((expected[name] == found[name]).all() for name in expected)

    killed = Command("hf-to-megatron", source, tmp_path / "k", *options)
    done = tmp_path / "k.partial/.conversion/done"
    end = time.monotonic() + 60
    while not done.is_dir() or len(list(done.glob("*.distcp"))) < 3:
        assert killed.process.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    assert not (tmp_path / "k").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "k.partial/release").glob("*.distcp")}
    assert 3 <= len(finished) < len(list((tmp_path / "m/release").glob("*.distcp")))
    growth(tmp_path / "growth", "hf-to-megatron", source, tmp_path / "k", *options, "--verify")
    assert digests(tmp_path / "k") == digests(tmp_path / "m")
    for name, before in finished.items():
        assert (tmp_path / "k/release" / name).stat().st_mtime_ns == before, "finished files are not written again"


@pytest.mark.slow("a checkpoint of 4 GB")
def test_four_gigabytes_are_converted_in_bounded_memory(tmp_path):
    source = write_checkpoint(tmp_path / "source", LARGE, file_bytes=1000 * MB)
    assert sizes(source) > 4000
    limit = 2048 + LARGE["vocab_size"] * LARGE["hidden_size"] * 2 // MB
    peaks = {
        "hf-to-megatron": Command("hf-to-megatron", source, tmp_path / "m").peak(),
        "megatron-to-hf": Command("megatron-to-hf", tmp_path / "m", tmp_path / "hf", "--original", source).peak(),
        "hf-to-fp8": Command("hf-to-fp8", source, tmp_path / "fp8").peak(),
        "fp8 to Megatron": Command("hf-to-megatron", tmp_path / "fp8", tmp_path / "m8").peak(),
    }
    print("peak MB", peaks)
    assert max(peaks.values()) < limit
    assert max(peaks.values()) < 1100, "what docs/conversion.md says"
