"""A tracker that waits for its server holds up nothing, and nothing that it loses goes uncounted."""

from __future__ import annotations

import threading

import pytest

from slimx.extras.watch.background import InBackground
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.tracker import Tracker
from tests.refusals import refused


class Server:
    """A sink whose calls wait for `answers`, and fail at the steps of `fails`."""

    name = "server"

    def __init__(self, *fails: int) -> None:
        self.answers, self.fails, self.got = threading.Event(), fails, []

    def log(self, record):
        assert self.answers.wait(60)
        if record.step in self.fails:
            raise ConnectionError(f"step {record.step}")
        self.got.append(record.step)

    def samples(self, step, samples):
        self.got.append((step, samples))

    def close(self):
        self.got.append("closed")


def record(step: int) -> StepRecord:
    return StepRecord(step=step, version=None, time=0.0, metrics={})


def test_calls_are_made_in_order_and_close_waits_for_them():
    server = Server()
    sink = InBackground(server)
    sink.log(record(0))
    sink.samples(0, ["text"])
    sink.log(record(1))
    assert server.got == []
    server.answers.set()
    sink.close()
    assert server.got == [0, (0, ["text"]), 1, "closed"]


def test_a_failure_is_counted_though_it_comes_later(tmp_path):
    server, messages = Server(1), []
    tracker = Tracker(JsonlFile(tmp_path / "metrics.jsonl", resume_step=None), [InBackground(server)], messages.append)
    for step in range(3):
        tracker.log(step, {"loss/policy": 1.0})
    server.answers.set()
    assert tracker.close() == {"server": 1} and "step 1" in messages[0]
    assert server.got == [0, 2, "closed"]


def test_a_server_that_never_answers_ends_neither_a_call_nor_the_run():
    server = Server()
    sink = InBackground(server, close_s=0.05, max_waiting=2)
    sink.log(record(0))
    while sink._calls.waiting:  # until the thread has taken it
        pass
    sink.log(record(1))
    sink.log(record(2))
    with refused("track.late", about="server"):
        sink.log(record(3))
    with refused("track.late", about="server") as caught:
        sink.close()
    assert "the last 3;" in str(caught.value)
    server.answers.set()


def test_an_mlflow_server_that_does_not_listen_is_refused_at_once(tmp_path):
    pytest.importorskip("mlflow", reason="the package mlflow-skinny is not installed")
    from slimx.extras.watch.sinks import MlflowSink
    from slimx.observability.tracking.tracker import TrackedRun

    with refused("track.mlflow", about="track.mlflow"):
        MlflowSink(TrackedRun(tmp_path, "p", "n", {}), "http://127.0.0.1:9")
