"""An alert of a run is a note, a line of RUN/alerts.jsonl, an event, and a line of `slimx alerts` and `status`."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from slimx import durable
from slimx.extras.alerts import lines as lines_module
from slimx.extras.alerts import receiver
from slimx.extras.alerts.command import OPEN_STATUS, app
from slimx.extras.alerts.curves.no_signal import SILENT_STEPS
from slimx.extras.alerts.curves.watch import Curves
from slimx.extras.alerts.finding import Finding
from slimx.extras.alerts.log import FILE, Alert, alerts_of, read_log
from slimx.extras.alerts.machine.watch import Machine
from slimx.extras.alerts.receiver import Alerts, alerting, open_alerts
from slimx.extras.alerts.remedies import NAMES, REMEDIES
from slimx.extras.report.report import write_report
from slimx.extras.watch.page.content import Content
from slimx.extras.watch.status import describe_status, run_status
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.metrics import StepRecord
from tests.documents import ROOT
from tests.extras.alerts.curve_stand import GROUPS, HEALTHY
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of
from tests.webhook_server import webhook_server

IDLE = {"phase": "train", "number": 1, "since": float("inf")}
ILL = 40
"""First step of 20 with a large gap."""


MetricsOf = Callable[[int], dict[str, float]]


def metrics_at(step: int) -> dict[str, float]:
    row = HEALTHY[step % len(HEALTHY)]
    return row | ({"gap/mean": 1e-3} if ILL <= step < ILL + 20 else {})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    config = {"run": {"name": "r"}, "schedule": {"steps": 90}, "rollout": {"prompts_per_step": GROUPS}}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory


class Process:
    """A process of the run that trains some steps, as the core reports them."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.notes: list[str] = []
        self.alerts = Alerts("r", run, self.notes.append, factor=10, at_least=5, curves=partial(Curves, GROUPS))

    def train(self, first: int, last: int, metrics_of: MetricsOf = metrics_at) -> None:
        JsonlFile(self.run / "metrics.jsonl", resume_step=first).close()
        self.alerts.look(IDLE)
        for step in range(first, last + 1):
            self.alerts.step = step
            log(self.run, step, metrics_of(step))
            self.alerts.recorded(metrics_of(step))


def log(run: Path, step: int, metrics: dict[str, float]) -> None:
    """Appends a record, as the tracker does."""
    record = StepRecord(step=step, version=1, time=1e9 + step, metrics=metrics)
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(record.to_json()) + "\n")


def told(run: Path) -> list[tuple[Any, ...]]:
    return [(alert.name, alert.step, alert.closed_step) for alert in alerts_of(run)]


def computed(run: Path) -> list[Alert]:
    """Returns the alerts that are computed from the run's metrics, without its log."""
    (run / FILE).unlink()
    return alerts_of(run)


def test_an_alert_is_noted_logged_and_posted_once_and_so_is_its_end(run):
    process = Process(run)
    with webhook_server() as server, alerting(process.alerts, server.url):
        process.train(1, 90)
    assert [event["event"] for event in server.events] == ["alert", "alert_over"]
    opened, over = server.events
    assert opened["about"] == over["about"] == "gap" and opened["step"] < over["step"]
    alert = opened["alert"]
    assert alert["name"] == "gap" and alert["value"] == 1e-3 and " to " in alert["usual"]
    assert alert["remedy"] in opened["text"] and opened["text"] == f"slimx r, step {alert['step']}: alert gap: " + (
        f"{alert['text']}; {alert['remedy']}"
    )
    assert len(process.notes) == 2 and alert["remedy"] in process.notes[0]
    assert told(run) == [("gap", opened["step"], over["step"])]


@pytest.mark.parametrize("killed_at", [30, ILL + 4, ILL + 12, ILL + 22, 85])
@pytest.mark.parametrize("back", [0, 6])
def test_a_resumed_run_has_the_alerts_of_an_uninterrupted_one(run, killed_at, back):
    whole = run.with_name("whole")
    whole.mkdir()
    (whole / "config.yaml").write_text((run / "config.yaml").read_text())
    Process(whole).train(1, 90)
    Process(run).train(1, killed_at)
    Process(run).train(killed_at + 1 - back, 90)
    assert alerts_of(run) == alerts_of(whole) == computed(run) and told(whole)


def test_a_checkpoint_that_is_skipped_in_the_same_process_repeats_alerts(run):
    process = Process(run)
    process.train(1, ILL + 15)
    process.train(ILL + 2, 90)  # from an earlier checkpoint
    logged = alerts_of(run)
    assert logged == computed(run) and len(logged) == 1
    JsonlFile(run / "metrics.jsonl", resume_step=ILL).close()
    for step in range(ILL, 120):  # more than were there before
        log(run, step, HEALTHY[50])
    process.alerts.look(IDLE)
    assert (run / FILE).read_bytes() == b""


def test_alerts_of_a_run_without_a_log_come_from_its_metrics(run):
    Process(run).train(1, ILL + 15)
    logged = alerts_of(run)
    assert computed(run) == logged and told(run) == [("gap", logged[0].step, None)]
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"alerts": {"disabled": ["gap"]}}))
    assert alerts_of(run) == []


@pytest.mark.parametrize("delay", [0, 2, 4])
def test_evaluations_that_are_no_steps_open_alerts_as_from_the_file(run, delay):
    """Evaluates before the first step and every 2 of 17 steps; results are there `delay` steps later. Held-out rewards
    fall in the last two evaluations, those of the steps 12 and 14."""
    process = Process(run)
    held_out = [0.5, 0.7, 0.9, 0.91, 0.9, 0.92, 0.2, 0.21]
    process.alerts.look(IDLE)
    for step in range(19):
        evaluated, odd = divmod(step - delay, 2)
        if not odd and 0 <= evaluated < len(held_out):
            log(run, 2 * evaluated, {"eval/accuracy": held_out[evaluated]})
        if 0 < step < 18:
            process.alerts.step = step
            log(run, step, metrics_at(step))
            process.alerts.recorded(metrics_at(step))
    assert len(process.notes) == (delay < 4)
    process.alerts.look(IDLE)
    assert len(process.notes) == 1
    logged = alerts_of(run)
    assert logged == computed(run) and told(run) == [("heldout_fell", 14, None)]


def test_the_last_evaluation_reaches_the_alerts_at_the_end(run):
    process = Process(run)
    process.train(1, 2)
    for step, reward in enumerate((0.5, 0.7, 0.9, 0.91, 0.9, 0.92, 0.2, 0.21)):
        log(run, step, {"eval/accuracy": reward})
    with webhook_server() as server, alerting(process.alerts, server.url):
        pass
    assert [event["about"] for event in server.events] == ["heldout_fell"]


def test_metrics_that_cannot_be_read_cost_alerts_and_not_the_run(run, monkeypatch):
    process = Process(run)
    process.train(1, 2)
    file = run / "metrics.jsonl"
    with file.open("ab") as lines:
        lines.write(b'\xff\n[1]\n{"step": "x"}\n{"step": 3, "ver')
    process.alerts.look(IDLE)
    assert process.notes == []

    def fail(descriptor: int) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(lines_module, "os", SimpleNamespace(fstat=fail))
    process.alerts.look(IDLE)
    process.alerts.close()
    assert [file.name in note for note in process.notes] == [True]
    file.unlink()
    process.alerts.look(IDLE)


class Unreadable(io.FileIO):
    """File whose disk fails after it was opened."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("replaced", [False, True])
def test_an_error_in_the_first_read_of_a_file_loses_no_alert(run, monkeypatch, replaced):
    Process(run).train(1, 30)
    process = Process(run)
    first = 31
    if replaced:  # by a longer file without an alert
        process.train(31, 38, lambda step: metrics_at(step) | {"gap/mean": 1e-3})
        JsonlFile(run / "metrics.jsonl", resume_step=31).close()
        first = ILL
        for step in range(31, first):
            log(run, step, metrics_at(step))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Unreadable(path, mode))
        process.alerts.look(IDLE)
        process.alerts.recorded({})
    process.alerts.look(IDLE)
    for step in range(first, 91):
        log(run, step, metrics_at(step))
        process.alerts.recorded(metrics_at(step))
    logged = alerts_of(run)
    assert [note.split()[:2] for note in process.notes[-2:]] == [["alert", "gap:"], ["alert", "gap"]]
    assert logged == computed(run) and len(logged) == 1


def test_a_check_that_fails_costs_alerts_and_not_the_run(run):
    class Broken(Curves):
        def look(self, metrics: Mapping[str, float]) -> Iterator[tuple[bool, Finding]]:
            raise ZeroDivisionError("no groups")

    process = Process(run)
    process.alerts = Alerts("r", run, process.notes.append, factor=10, at_least=5, curves=partial(Broken, 1))
    process.train(1, 3)
    process.alerts.close()
    assert ["no groups" in note for note in process.notes] == [True]


@pytest.mark.parametrize("killed_at", [31, 32, 33, 36])
def test_steps_without_a_signal_are_counted_across_a_resume(run, killed_at):
    """No step from 30 on has a signal. The metric's count starts at 0 in every process."""

    def metrics_since(start: int, step: int) -> dict[str, float]:
        return {"optim/steps_without_signal": float(max(0, step + 1 - max(start, 30)))}

    Process(run).train(1, killed_at, partial(metrics_since, 1))
    Process(run).train(killed_at + 1, 60, partial(metrics_since, killed_at + 1))
    assert told(run) == [("no_signal", 29 + SILENT_STEPS, None)]
    assert alerts_of(run) == computed(run)


def test_alerts_that_overlap_are_in_the_order_of_their_last_change(run):
    def metrics_of(step: int) -> dict[str, float]:
        return metrics_at(step) | ({"response/truncated": 0.9} if ILL + 2 <= step < ILL + 12 else {})

    Process(run).train(1, 90, metrics_of)
    logged = alerts_of(run)
    assert [(alert.name, alert.closed is None) for alert in logged] == [("truncated", False), ("gap", False)]
    assert logged[0].opened > logged[1].opened and logged == computed(run)


def test_a_log_that_is_replaced_is_never_seen_half_written(run, monkeypatch):
    Process(run).train(1, 90)
    before = (run / FILE).read_bytes()

    def fail(path: Path, *pieces: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_synced", fail)
    process = Process(run)
    process.alerts.look(IDLE)
    assert (run / FILE).read_bytes() == before and [FILE in note for note in process.notes] == [True]


@pytest.mark.parametrize(("device", "watched"), [("cpu", False), ("cuda", True)])
def test_gpus_are_watched_in_runs_that_use_them(run, monkeypatch, device, watched):
    off: list[set[str]] = []

    def machine(directory: Path, disabled: set[str]) -> Machine:
        off.append(disabled)
        return Machine([], [])

    monkeypatch.setattr(receiver, "this_machine", machine)
    config = config_of(cluster__device=device, run__dir=str(run))
    with open_alerts(config, print):
        ends = time.monotonic() + 60
        while not off and time.monotonic() < ends:
            time.sleep(0.01)
    assert off == [set() if watched else {"gpu"}]
    with open_alerts(config_of(cluster__device=device, run__dir=str(run), alerts__disabled=["disk"]), print) as alerts:
        assert (alerts.machine is not None) == watched


def test_a_damaged_line_of_the_log_is_left_out(run):
    Process(run).train(1, ILL + 15)
    with (run / FILE).open("a") as file:
        file.write('{"name": "ga')
    assert [alert.name for alert in read_log(run / FILE)] == ["gap"]


def test_a_full_disk_costs_the_log_and_not_the_run(run):
    process = Process(run)
    (run / FILE).mkdir()
    process.train(1, ILL + 15)
    assert sum(FILE in note for note in process.notes) == 1


def test_status_report_and_page_show_open_alerts(run, tmp_path):
    Process(run).train(1, ILL + 15)
    (line,) = (line for line in describe_status(run_status(run)) if line.startswith("alert "))
    assert REMEDIES["gap"] in line
    page = Content(run).status()
    assert line in page["lines"] and [REMEDIES["gap"] in alert for alert in page["alerts"]] == [True]
    write_report([run], tmp_path / "report.html", "t")
    assert REMEDIES["gap"] in (tmp_path / "report.html").read_text()


def command(run: Path, *options: str) -> tuple[int, str]:
    """Returns the exit status and the output of `slimx alerts`."""
    done = CliRunner().invoke(app, [str(run), *options])
    return done.exit_code, done.output


def test_the_command_lists_alerts_and_exits_for_cron(run):
    assert command(run, "--check")[0] == 0
    Process(run).train(1, ILL + 15)
    status, listed = command(run, "--check")
    assert status == OPEN_STATUS and listed.startswith("open ") and REMEDIES["gap"] in listed
    Process(run).train(ILL + 16, 90)
    status, listed = command(run, "--check")
    assert status == 0 and listed.startswith("past ")
    assert [alert["name"] for alert in json.loads(command(run, "--json")[1])] == ["gap"]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with refused("run.none", about=str(tmp_path)):
        alerts_of(tmp_path)


def test_alerts_of_a_killed_processs_machine_end_with_the_next_process(run):
    alert = {"name": "disk", "about": "/x", "text": "t", "value": 1.0, "usual": "", "remedy": "m", "step": None}
    (run / FILE).write_text(json.dumps(alert | {"opened": time.time() - 60}) + "\n")
    Process(run).train(1, 2)
    (found,) = alerts_of(run)
    assert found.name == "disk" and found.closed is not None
    (run / FILE).write_text(json.dumps(alert | {"opened": time.time() - 60}) + "\n")
    process = Process(run)
    full = Finding(name="disk", about="/x", bad=True, good=False, text="t")
    process.alerts.machine = SimpleNamespace(changes=lambda: [(True, full)])
    process.alerts.look(IDLE)
    assert [alert.closed is None for alert in alerts_of(run)] == [False, True], "of either process"


def test_each_alert_has_a_remedy_and_a_row_on_both_pages():
    assert set(REMEDIES) == set(NAMES)
    for page in ("operations", "runbook"):
        rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
        assert set(NAMES) <= set(rows), page
