"""Each tracker has the numbers, the samples and the configuration of a run, also after a resume: its own package reads
them back. A package that is not installed skips its test; docs/support.md says what ran."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slimx.observability.tracking.samples import RecordedSample
from slimx.observability.tracking.tracker import make_tracker
from tests.refusals import refused

CONFIG = {"run": {"name": "test"}, "trainer": {"optimizer": {"lr": 1e-4}}}
AGAIN = 12_345_600.0
"""Added to every value by the resumed run: digits that occur nowhere else."""
NAMES = {"loss/policy", "hook/hits/mean", "source/a b@1/reward"}


def tracked(directory: Path, **sinks: object) -> None:
    """Tracks a run of steps 0 to 2 that is resumed at step 2 and does one more; samples are recorded at 0 and 3."""
    for resume_step, steps in ((None, range(3)), (2, range(2, 4))):
        tracker = make_tracker(
            directory,
            project="p",
            name="n",
            config=CONFIG,
            resume_step=resume_step,
            settings=sinks,
            warn=lambda text: None,
        )
        for step in steps:
            metrics = {name: step + (AGAIN if resume_step else 0.0) for name in NAMES} | {"x/nan": math.nan}
            tracker.log(step, metrics, version=step)
            if step in (0, 3):
                tracker.samples(step, [sample(step)])
        assert set(tracker.close().values()) == {0}, "every call of every sink went well"


def sample(step: int) -> RecordedSample:
    return RecordedSample(
        step=step, prompt="1+1=", answer="2", response="# <b>3</b>", reward=0.0, version=step, evaluation=step == 3
    )


def test_tensorboard_has_samples_and_the_configuration_as_text(tmp_path):
    tracked(tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    texts = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    logged = {tag: [entry.tensor_proto.string_val[0].decode() for entry in found] for tag, found in texts.items()}
    assert "        lr: 0.0001" in logged["config/text_summary"][-1]
    (trained,), (held_out,) = (
        logged["samples/training/text_summary"],
        logged["samples/held-out/text_summary"],
    )
    assert "    # <b>3</b>" in trained.splitlines(), "indented, so that no response becomes a heading or a tag"
    assert texts["samples/held-out/text_summary"][0].step == 3 and "1+1=" in held_out
    assert [(event.step, event.value) for event in events.Scalars("hook/hits/mean")][-1] == (3, AGAIN + 3)


def test_mlflow_has_each_name_the_samples_and_the_configuration(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a store without a database, for this test
    tracked(tmp_path, mlflow=f"file:{tmp_path}/mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path}/mlflow")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["trainer.optimizer.lr"] == "0.0001"
    assert run.data.metrics.keys() == {"loss/policy", "hook/hits/mean", "source/a b_1/reward", "x/nan"}
    history = sorted((entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, "loss/policy"))
    assert history == [(0, 0.0), (1, 1.0), (2, 2.0), (2, AGAIN + 2), (3, AGAIN + 3)]
    found = {
        file.path
        for kind in ("training", "held-out")
        for file in client.list_artifacts(run.info.run_id, f"samples/{kind}")
    }
    assert found == {"samples/training/step-0000000.txt", "samples/held-out/step-0000003.txt"}


def test_wandb_has_each_name_the_samples_and_the_configuration(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracked(tmp_path, wandb=True)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "one id, two processes"
    # wandb has no reader of its log, whose records hold names, and values as JSON, as they are.
    first, second = (file.read_bytes() for file in files)
    assert [name for name in NAMES if name.encode() not in first or name.encode() not in second] == []
    logged = [
        [float(value) for value in re.findall(rb"hook/hits/mean\x82\x01.([\d.e+]+)", data)] for data in (first, second)
    ]
    assert sorted({*logged[0]}) == [0.0, 1.0, 2.0] and sorted({*logged[1]}) == [AGAIN + 2, AGAIN + 3]
    assert b"optimizer" in first
    tables = [file.read_text() for file in tmp_path.glob("wandb/offline-run-*/files/media/table/samples/*.json")]
    assert len(tables) == 2 and all("# <b>3</b>" in table for table in tables)


def test_swanlab_has_each_name_the_samples_and_the_configuration(tmp_path, monkeypatch):
    pytest.importorskip("swanlab", reason="the package swanlab is not installed")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    tracked(tmp_path, swanlab=True)
    parts = sorted((tmp_path / "swanlab").glob("run-*"))
    assert len(parts) == 2 and len({part.name.rpartition("-")[2] for part in parts}) == 1, "one id, two processes"
    kept = b"".join(file.read_bytes() for part in parts for file in part.glob("*.swanlab"))
    assert [name for name in NAMES if name.encode() not in kept] == []
    texts = [file.read_text() for part in parts for file in part.glob("media/text/*.txt")]
    assert len(texts) == 2 and all("# <b>3</b>" in text for text in texts)
    assert all("lr" in (part / "files" / "config.yaml").read_text() for part in parts)


@pytest.mark.parametrize("key", ["wandb", "mlflow", "swanlab"])
def test_a_tracker_without_its_package_is_refused_by_its_key(tmp_path, monkeypatch, key):
    monkeypatch.setitem(sys.modules, key, None)
    with refused(f"track.{key}", about=f"track.{key}"):
        tracked(tmp_path, **{key: "file:x" if key == "mlflow" else True})
