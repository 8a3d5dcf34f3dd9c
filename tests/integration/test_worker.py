"""A trainer's worker keeps its promises to the publisher while its memory comes and goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT

pytestmark = pytest.mark.integration


def test_an_offloaded_worker_publishes_the_same_bytes(tiny_model: Path, tmp_path: Path):
    (tmp_path / "job.json").write_text(json.dumps({"model": str(tiny_model), "out": str(tmp_path)}))
    # In a process that is not forked from another: of a fork's memory a part is its parent's.
    command = [sys.executable, "-m", "tests.integration.worker_rank", str(tmp_path / "job.json"), "0"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    said = json.loads((tmp_path / "0.json").read_text())
    assert said["imported"] == []
    assert said["moved_by_training"] and said["trains"]
    assert said["without_state"], "gradients and optimizer state are gone, the weights are not"
    assert said["away"] == 0
    assert said["on_demand"] and said["away_still"] == ["training"]
    assert said["after_reload"] and said["other_addresses"] > 0
    assert set(said["memory"]) == {f"memory/{name}_peak_mib" for name in ("generate", "publish", "train")}
    assert all(peak > 100 for peak in (said["memory"] | said["memory_of_step"]).values())
