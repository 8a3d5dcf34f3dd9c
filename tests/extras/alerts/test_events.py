"""Events of a run reach its webhook in order, and a webhook that does not answer costs the run nothing but a count."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimx.config.load import load_config
from slimx.errors import Interrupted, PartLost, Preempted, SlimxError
from slimx.extras.alerts import webhook
from slimx.extras.alerts.receiver import Alerts, alerting
from slimx.extras.alerts.webhook import Webhook
from tests.refusals import refused
from tests.webhook_server import Received, webhook_server


@pytest.fixture
def server() -> Iterator[Received]:
    with webhook_server() as received:
        yield received


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def alerts(tmp_path: Path, notes: list[str]) -> Alerts:
    return Alerts("r", tmp_path, notes.append, factor=10, at_least=5)


def test_events_come_in_order_with_what_they_are_about(server, alerts, tmp_path):
    with alerting(alerts, server.url):
        alerts.tell("engine_lost", "engine actor-0 is lost", about="actor-0")
        alerts.step = 7
        alerts.recorded({"optim/skipped": 1.0})
        alerts.recorded({"optim/skipped": 0.0, "critic/skipped": 0.0})
        alerts.recorded({"policy/solver/optim/skipped": 1.0, "critic/skipped": 2.0})
        alerts.tell("finished", "finished")
    assert [(e["event"], e["step"], e["about"]) for e in server.events] == [
        ("engine_lost", None, "actor-0"),
        ("step_skipped", 7, ""),
        ("step_skipped", 7, "policy/solver"),
        ("step_skipped", 7, "critic"),
        ("finished", 7, ""),
    ]
    for event in server.events:
        assert event["run"] == "r" and event["directory"] == str(tmp_path) and "r" in event["text"].split(":")[0]
        assert abs(event["time"] - time.time()) < 600


@pytest.mark.parametrize(
    ("error", "kind", "about"),
    [
        (PartLost("gone\nits log", code="actor.died", about="trainer rank 0"), "failed", "actor.died"),
        (SlimxError("a tensor differs"), "failed", "SlimxError"),
        (Preempted(3, 9), "stopped", "Preempted"),
        (Interrupted(signal.SIGTERM), "stopped", "Interrupted"),
        (ZeroDivisionError("division by zero"), "failed", "ZeroDivisionError"),
    ],
)
def test_an_early_end_of_a_run_is_reported_and_raised(server, alerts, error, kind, about):
    with pytest.raises(type(error)), alerting(alerts, server.url):
        raise error
    (event,) = server.events
    assert (event["event"], event["about"]) == (kind, about) and "\n" not in event["text"]


def test_a_failing_server_gets_retries_and_lost_events_are_counted(server, alerts, notes, monkeypatch):
    monkeypatch.setattr(webhook, "PAUSES_S", (0.0, 0.0))
    with alerting(alerts, server.url):
        server.statuses = [503, 500]
        alerts.tell("restarted", "it is back")
        server.until(lambda: server.events)
        server.statuses = [503] * 3
        alerts.tell("engine_lost", "gone")
    assert [event["event"] for event in server.events] == ["restarted"]
    assert server.posts == 2 * 3
    (note,) = notes
    assert "engine_lost" in note and "503" in note and "KEY" not in note


def test_undelivered_events_are_counted_by_kind_and_reason(server, alerts, notes):
    server.statuses = [404, 404, 403]
    with alerting(alerts, server.url):
        for kind in ("restarted", "restarted", "engine_lost"):
            alerts.tell(kind, "it is back")
    (note,) = notes
    assert "2 times restarted" in note and "404" in note and "engine_lost" in note and "403" in note


def test_retries_wait_as_long_as_the_server_asks_up_to_a_limit(server, alerts, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(webhook, "time", SimpleNamespace(sleep=pauses.append))
    for name, retry_after, pause in (
        ("Retry-After", "7", 7.0),
        ("retry-after", "900", webhook.MAX_PAUSE_S),
        ("Retry-After", "Wed, 21 Oct 2026 07:28:00 GMT", 1.0),
    ):
        server.statuses, server.headers = [429], {name: retry_after}
        with alerting(alerts, server.url):
            alerts.tell("restarted", "it is back")
        assert pauses == [0.0, pause]
        pauses.clear()
    assert len(server.events) == 3


@pytest.mark.parametrize("status", [307, 308])
def test_events_follow_a_redirect_that_keeps_their_body(server, alerts, notes, status):
    server.statuses, server.headers = [status, status], {"location": "/moved"}
    with alerting(alerts, server.url):
        alerts.tell("restarted", "it is back")
    assert [event["event"] for event in server.events] == ["restarted"] and not notes and server.posts == 3


@pytest.mark.parametrize(
    ("statuses", "location", "posts"),
    [
        ([301], "/moved", 1),
        ([302], "/moved", 1),
        ([303], "/moved", 1),
        ([307], None, 1),
        ([308] * 30, "/moved", 1 + webhook.MAX_REDIRECTS),
    ],
)
def test_events_are_lost_by_other_redirects_and_the_status_is_named(server, alerts, notes, statuses, location, posts):
    server.statuses, server.headers = statuses[:], {} if location is None else {"Location": location}
    with alerting(alerts, server.url):
        alerts.tell("restarted", "it is back")
    (note,) = notes
    assert not server.events and str(statuses[0]) in note and server.posts == posts


@pytest.mark.parametrize("location", ["ftp://h/moved", "http://["])
def test_a_redirect_to_no_url_loses_the_event_but_not_the_run(server, alerts, notes, monkeypatch, location):
    monkeypatch.setattr(webhook, "PAUSES_S", ())
    server.statuses, server.headers = [307], {"Location": location}
    with alerting(alerts, server.url):
        alerts.tell("restarted", "it is back")
    (note,) = notes
    assert "restarted" in note


def test_an_unreachable_url_loses_an_event_but_not_the_run(alerts, notes, monkeypatch):
    monkeypatch.setattr(webhook, "PAUSES_S", (0.0, 0.0))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with alerting(alerts, f"http://127.0.0.1:{closed.getsockname()[1]}/KEY"):
            alerts.tell("finished", "finished")
    (note,) = notes
    assert "finished" in note and "KEY" not in note


def test_a_server_that_takes_its_time_does_not_hold_up_the_end_for_ever(monkeypatch):
    monkeypatch.setattr(webhook, "TIMEOUT_S", 300.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hook = Webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/", close_s=0.3)
        alerts = Alerts("r", Path("."), print, factor=1, at_least=1)
        alerts.webhook = hook
        alerts.tell("finished", "finished")
        began = time.monotonic()
        assert hook.close() and time.monotonic() - began < webhook.TIMEOUT_S


def test_a_stall_is_reported_when_it_begins_and_when_it_ends(server, alerts, notes, tmp_path):
    rows = [{"name": "train", "track": "main", "seconds": 2.0}] * 3
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    late = {"what": "the training step", "ranks": ["trainer rank 3"], "logs": ["l"], "of": 4}
    now = time.time()
    slow = {"step": 4, "phase": "train", "number": 7, "since": now - 15, "late": late}
    stuck = slow | {"since": now - 25}
    alerts.step = 4
    with alerting(alerts, server.url):
        alerts.look(slow)  # longer than at_least, but not ten times the usual two seconds
        alerts.look(stuck)
        alerts.look(stuck)
        alerts.step = 5
        alerts.look({"step": 5, "phase": "publish", "number": 8, "since": now, "late": None})
    assert [(e["event"], e["about"], e["step"]) for e in server.events] == [
        ("stalled", "train", 4),
        ("went_on", "train", 5),
    ]
    assert len(notes) == 1 and "trainer rank 3" in notes[0]


@pytest.mark.parametrize("value", ["hooks.example.com/SECRET", "ftp://h/SECRET", "http://", "http://[SECRET"])
def test_an_invalid_webhook_url_is_refused_without_being_shown(value, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{dir: d}}\nmodel: {{path: m}}\nrollout: {{prompts: p}}\ntrack: {{webhook: '{value}'}}\n")
    with refused("track.webhook") as error:
        load_config(file)
    assert "SECRET" not in str(error.value)
