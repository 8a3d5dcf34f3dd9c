"""A model, and a Ray cluster of this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimx.cluster.connection import start_ray, stop_ray
from tests.extras.rollout_workers.workers_stand import ROOT, make_config


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    subprocess.run(
        [sys.executable, ROOT / "slimx/extras/quickstart/make_model.py", "--out", path], check=True, capture_output=True
    )
    return path


@pytest.fixture(scope="session")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    config = make_config(tmp_path_factory.mktemp("cluster"), model, "rollout.workers=3")
    start_ray(config, "cpu", trainers=False)
    yield
    stop_ray()
