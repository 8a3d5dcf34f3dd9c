"""Metrics reach every sink; the JSONL record survives kills and resumes; a sink that fails does not stop the run."""

import ast
import json
import math
import os
import re
import socket
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import slimx
from slimx.config.sections.general import Prometheus
from slimx.extras.watch.sinks import WandbSink
from slimx.observability.tracking.guard import Guard
from slimx.observability.tracking.jsonl import JsonlFile, load_records
from slimx.observability.tracking.metrics import StepRecord, flatten
from slimx.observability.tracking.names import METRICS, find
from slimx.observability.tracking.phases import Timeline
from slimx.observability.tracking.run_files import by_step
from slimx.observability.tracking.tracker import TrackedRun, Tracker, make_tracker
from tests.refusals import numbers, refused


def lines(path) -> list[dict]:
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def tracker_in(run_dir, *, resume_step=None, tensorboard=False, wandb=False, warn=lambda text: None) -> Tracker:
    return make_tracker(
        run_dir,
        project="slimx",
        name="test",
        config={"run": {"name": "test"}},
        resume_step=resume_step,
        settings={"tensorboard": tensorboard, "wandb": wandb},
        warn=warn,
    )


def logged(run_dir, steps) -> None:
    tracker = tracker_in(run_dir)
    for step in steps:
        tracker.log(step, {"loss/policy": float(step)})
    tracker.close()


class Broken:
    """A sink that is down from its second record on."""

    name = "broken"

    def __init__(self):
        self.records = 0

    def log(self, record):
        self.records += 1
        if self.records > 1:
            raise ConnectionError("the service is down")

    def close(self):
        pass


def test_nested_metrics_are_named_by_their_path():
    flat = flatten({"loss": {"policy": torch.tensor(0.5), "parts": {"clip": np.float32(2)}}, "reward/mean": 1})
    assert flat == {"loss/policy": 0.5, "loss/parts/clip": 2.0, "reward/mean": 1.0}
    assert all(type(value) is float for value in flat.values())
    assert flatten(flat) == flat


@pytest.mark.parametrize("bad", [None, "0.1", [1.0], torch.zeros(2), np.zeros(3)])
def test_a_metric_that_is_no_number_is_refused_by_name(bad):
    with refused("metrics.number", about="loss/policy"):
        flatten({"loss": {"policy": bad}})


def test_a_metric_logged_twice_is_refused():
    with refused("metrics.twice", about="loss/policy"):
        flatten({"loss/policy": 1.0, "loss": {"policy": 2.0}})


def test_numbers_that_are_not_finite_survive_strict_json(tmp_path):
    metrics = {"a/nan": math.nan, "a/up": math.inf, "a/down": -math.inf, "a/one": 1.0}
    record = StepRecord(step=3, version=2, time=1.5, metrics=metrics)
    (tmp_path / "m.jsonl").write_text(json.dumps(record.to_json(), allow_nan=False))
    (line,) = lines(tmp_path / "m.jsonl")
    assert line["metrics"] == {"a/nan": None, "a/up": None, "a/down": None, "a/one": 1.0}
    assert line["nonfinite"] == {"a/nan": "nan", "a/up": "inf", "a/down": "-inf"}
    back = StepRecord.from_json(line)
    assert math.isnan(back.metrics.pop("a/nan"))
    assert back.metrics == {"a/up": math.inf, "a/down": -math.inf, "a/one": 1.0}
    assert "nonfinite" not in StepRecord(step=0, version=None, time=0, metrics={"a/b": 1.0}).to_json()


def test_a_logged_step_is_in_the_file_at_once(tmp_path):
    tracker = tracker_in(tmp_path)
    tracker.log(7, {"loss": {"policy": 0.25}}, version=6)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["step"], line["version"], line["metrics"]) == (7, 6, {"loss/policy": 0.25})
    assert line["time"] > 1.7e9
    tracker.close()


def test_a_resumed_run_has_no_step_twice_even_after_a_torn_line(tmp_path):
    logged(tmp_path, range(6))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "metrics": {"loss/po')
    warnings = []
    tracker = tracker_in(tmp_path, resume_step=4, warn=warnings.append)
    for step in range(4, 8):
        tracker.log(step, {"loss/policy": 10.0 + step})
    tracker.close()
    records = lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(8))
    assert [record["metrics"]["loss/policy"] for record in records] == [0, 1, 2, 3, 14, 15, 16, 17]
    assert tracker.removed == 3 and not warnings, "lines that are later or torn"
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_sink_that_is_refused_takes_no_line_out(tmp_path):
    logged(tmp_path, range(3))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as taken, refused("track.prometheus"):
        make_tracker(
            tmp_path,
            project="p",
            name="r",
            config={},
            resume_step=1,
            settings={"tensorboard": True, "prometheus": Prometheus(port=taken.getsockname()[1])},
        )
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_run_that_died_before_its_first_checkpoint_starts_over(tmp_path):
    logged(tmp_path, range(3))
    tracker_in(tmp_path, resume_step=0).close()
    assert lines(tmp_path / "metrics.jsonl") == []


def test_a_kill_while_resuming_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    logged(tmp_path, range(6))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        JsonlFile(tmp_path / "metrics.jsonl", resume_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_fresh_run_does_not_mix_with_the_records_of_another(tmp_path):
    logged(tmp_path, range(3))
    with refused("records.exist", about=str(tmp_path / "metrics.jsonl")):
        tracker_in(tmp_path)
    assert len(lines(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize(
    "damage", [b'{"step": \n{"step": 2}\n', b"\xff\0\n[]\n1\n", b'{"step": 1, "metr' + b"\0" * 4096 + b"\n\n{}"]
)
def test_damaged_lines_are_set_aside_and_stop_no_resume(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + damage)
    records, problems = load_records(path, dict)
    assert records[0]["step"] == 0 and "line 2" in problems[0]
    file = JsonlFile(path, resume_step=2)
    file.write({"step": 2})
    file.close()
    assert [record.get("step") for record in lines(path) if record] == [0, 2] and file.removed >= 1
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == b'{"step": 0}\n' + damage


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}')
    file = JsonlFile(path, resume_step=2)
    file.write({"step": 2})
    file.close()
    assert [record["step"] for record in lines(path)] == [0, 1, 2]


class FullDisk:
    """Takes 10 bytes of a line, then has no space left."""

    def __init__(self, file):
        self.file, self.left = file, 10

    def fileno(self):
        return self.file.fileno()

    def close(self):
        self.file.close()

    def write(self, data):
        if not self.left:
            raise OSError(28, "No space left on device")
        written = self.file.write(data[: self.left])
        self.left = 0
        return written


def test_a_full_disk_stops_the_record_and_leaves_no_torn_line(tmp_path):
    tracker = tracker_in(tmp_path)
    tracker.log(0, {"loss/policy": 1.0})
    healthy = tracker._jsonl._file
    tracker._jsonl._file = FullDisk(healthy)
    with refused("records.write", about=str(tmp_path / "metrics.jsonl")):
        tracker.log(1, {"loss/policy": 1.0})
    tracker._jsonl._file = healthy
    tracker.log(2, {"loss/policy": 1.0})
    tracker.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 2]


def test_a_failing_sink_is_reported_once_counted_and_stops_no_run(tmp_path):
    warnings = []
    sink = Broken()
    tracker = Tracker(JsonlFile(tmp_path / "metrics.jsonl", resume_step=None), [sink], warn=warnings.append)
    for step in range(5):
        tracker.log(step, {"loss/policy": 1.0})
    (warning,) = warnings
    assert warning.startswith("broken ") and "ConnectionError: the service is down" in warning
    assert tracker.close() == {"broken": 4}
    assert len(warnings) == 2 and warnings[1].startswith("broken ") and numbers(warnings[1])[0] == 4
    assert sink.records == 5 and len(lines(tmp_path / "metrics.jsonl")) == 5
    assert tracker.close() == {"broken": 4} and len(warnings) == 2


def test_a_stop_by_the_user_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        Guard("sink", print).call(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_a_resumed_run_continues_its_wandb_run_and_drops_no_step(tmp_path, monkeypatch):
    started, sent = [], []
    run = types.SimpleNamespace(define_metric=lambda *a, **k: None, log=sent.append, finish=lambda: None)
    wandb = types.SimpleNamespace(init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for steps in (range(3), range(2, 4)):
        sink = WandbSink(TrackedRun(tmp_path, "p", "n", {"a": 1}))
        for step in steps:
            sink.log(StepRecord(step=step, version=step, time=0.0, metrics={"loss/policy": 0.5}))
    assert started[0]["id"] == started[1]["id"] and started[0]["resume"] == "allow"
    assert [record["step"] for record in sent] == [0, 1, 2, 2, 3]
    assert sent[0] == {"step": 0, "version": 0, "loss/policy": 0.5}


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, range(4)), (2, range(2, 5))):
        tracker = tracker_in(tmp_path, tensorboard=True, resume_step=resume_step)
        for step in steps:
            tracker.log(step, {"loss/policy": step + (100.0 if resume_step else 0.0)})
        assert tracker.close() == {"tensorboard": 0}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/policy")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 102.0),
        (3, 103.0),
        (4, 104.0),
    ]


ROOMS = ("algorithms", "trainer", "orchestration", "engines/fleet")
SUMS = {"gap/sum", "mismatch/ratio_squared", "mismatch/tokens"}
"""Sums that are divided before a step is logged."""


def written_names(source: str) -> set[str]:
    """Returns keys of dicts and of assignments that hold a slash: names of metrics, with * for filled-in parts."""
    keys = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            keys += node.keys
        elif isinstance(node, ast.DictComp):
            keys.append(node.key)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.append(node.slice)
    plain = {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    filled = {
        "".join(part.value if isinstance(part, ast.Constant) else "*" for part in key.values)
        for key in keys
        if isinstance(key, ast.JoinedStr)
    }
    return {name for name in plain | filled if re.match(r"[a-z_]+/", name)}


def test_every_metric_that_the_code_names_is_in_the_table():
    root = Path(slimx.__file__).parent
    names = {name for room in ROOMS for file in (root / room).rglob("*.py") for name in written_names(file.read_text())}
    known = [metric.name for metric in METRICS]
    lost = {
        name
        for name in names - SUMS
        if find(name) is None
        and not any(re.fullmatch(re.escape(name).replace(r"\*", ".+"), pattern) for pattern in known)
    }
    assert len(names) > 50 and lost == set()


def test_a_timeline_that_cannot_be_written_does_not_stop_the_run(tmp_path):
    warnings = []
    timeline = Timeline(tmp_path, warn=warnings.append)
    timeline._file.close()
    for _ in range(2):
        with timeline.phase("train", step=0):
            pass
    assert set(timeline.take(0)) == {"train"}
    assert len(warnings) == 1 and timeline.close() == 2


def test_each_metric_has_one_entry_in_the_table_and_is_found_by_its_name():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    plain = [metric for metric in METRICS if "{" not in metric.name]
    assert [find(metric.name) for metric in plain] == plain
    assert find("eval/gsm8k/pass@4").name == "eval/{set}/pass@{k}" and find("time/train").name == "time/{phase}"
    assert find("hits") is None and find("rewards/mean") is None


def test_late_results_belong_to_the_records_of_their_steps():
    records = [StepRecord(step=step, version=step, time=1.0 + step, metrics={"loss/policy": 0.5}) for step in (1, 2, 3)]
    records.insert(2, StepRecord(step=1, version=1, time=9.0, metrics={"eval/accuracy": 0.25}))
    merged = by_step(records)
    assert [(record.step, record.time) for record in merged] == [(1, 2.0), (2, 3.0), (3, 4.0)]
    assert merged[0].metrics == {"loss/policy": 0.5, "eval/accuracy": 0.25}
    assert records[0].metrics == {"loss/policy": 0.5}
