"""Turns incidents of a run into events and alerts, and sends them to the run's webhook."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slimx.cluster.connection import device_of
from slimx.config.schema import Config
from slimx.errors import Interrupted, Preempted, SlimxError, duration, ending_of
from slimx.extras.alerts.curves.watch import Curves
from slimx.extras.alerts.event import Event
from slimx.extras.alerts.finding import Finding
from slimx.extras.alerts.forms import form_of
from slimx.extras.alerts.lines import Growing
from slimx.extras.alerts.log import Alert, AlertLog, opened, replayed
from slimx.extras.alerts.machine.watch import CLOSES, MachineWatch, this_machine
from slimx.extras.alerts.pace import PhasePace, phase_pace
from slimx.extras.alerts.section import AlertSettings, settings_of
from slimx.observability.events import Events, Kind
from slimx.observability.tracking.guard import Guard
from slimx.observability.tracking.metrics import StepRecord

if TYPE_CHECKING:
    from slimx.extras.alerts.webhook import Webhook

Change = tuple[bool, Finding]
"""True if the finding opens an alert, False if it closes one; and the finding."""


class Alerts(Events):
    """Receiver of one run's events that sends them to a webhook, and opens and closes the run's alerts. Stalls and
    alerts are reported to the user even without a webhook."""

    def __init__(
        self,
        name: str,
        directory: Path,
        note: Callable[[str], None],
        *,
        factor: float,
        at_least: float,
        curves: Callable[[], Curves] | None = None,
    ):
        """Stores the run's `name` and `directory`; no webhook is set yet. `note` receives messages for the user: about
        stalls and alerts, and at the end about undelivered events. `factor` and `at_least`: settings of `track.stall`,
        which determine when a phase counts as stalled. `curves` creates the checks of the metrics; None: none."""
        self.webhook: Webhook | None = None
        self.machine: MachineWatch | None = None
        """Checks of this machine; None: none."""
        self.note = note
        self.log = AlertLog(directory, note)
        self._name = name
        self._directory = directory
        self._factor = factor
        self._at_least = at_least
        self._make_curves = curves
        self._curves: Curves | None = None
        """Checks that have seen the records read so far; None before the first call."""
        self._records = Growing(directory / "metrics.jsonl", StepRecord.from_json, keep=0)
        self._guard = Guard("the check for alerts", note)
        self._began = time.time()
        self._reported: tuple[str, int] | None = None
        """Name and number of a phase whose stall was reported and whose end has not been reported yet; None if there is
        no such phase."""

    def tell(self, kind: Kind, what: str, *, about: str = "") -> None:
        """Sends an event to the webhook; does nothing if none is set. `what`: a sentence without the run's name;
        `about`: phase, part of the run or error code that the event concerns; "" for the whole run."""
        self._send(kind, what, about)

    def _send(
        self, kind: Kind | Literal["alert", "alert_over"], what: str, about: str, alert: Alert | None = None
    ) -> None:
        if self.webhook is None:
            return
        step = ""
        if self.step is not None:
            step = f", step {self.step}"
        self.webhook.send(
            Event(
                event=kind,
                text=f"slimx {self._name}{step}: {what}",
                run=self._name,
                directory=str(self._directory.absolute()),
                host=socket.gethostname(),
                step=self.step,
                about=about,
                time=time.time(),
                alert=alert,
            )
        )

    def look(self, activity: Mapping[str, Any]) -> None:
        """Reports once if the phase that `activity` describes has stalled; a later call reports that the stalled phase
        has ended. Also reports what the checks of the metrics and of this machine have found since the last call."""
        self._guard.call(self._check_records)
        if self.machine is not None:
            self._report(self.machine.changes(), self.step, time.time())
        current = (activity["phase"], activity["number"])
        if self._reported is not None and self._reported != current:
            phase, _ = self._reported
            self.tell("went_on", f"{phase} has ended", about=phase)
            self._reported = None
        now = time.time()
        if self._reported == current or now - activity["since"] <= self._at_least:
            return
        pace = phase_pace(self._directory, activity, now, factor=self._factor, at_least=self._at_least)
        if pace.stalled:
            self._reported = current
            sentence = _stalled(pace, activity)
            self.note(sentence)
            self.tell("stalled", sentence, about=pace.phase)

    def recorded(self, metrics: Mapping[str, float]) -> None:
        """Checks a step's metrics: reports if an optimizer skipped the step because a gradient was not finite, and
        opens and closes alerts."""
        skipped = "the optimizer skipped this step, because a gradient was infinite or NaN"
        for name, count in metrics.items():
            if name.endswith(("optim/skipped", "critic/skipped")) and count:
                about = name.removesuffix("/skipped").removesuffix("optim").strip("/")
                self.tell("step_skipped", skipped, about=about)
        self._guard.call(self._check_records)

    def _check_records(self) -> None:
        """Shows the records that were added to metrics.jsonl since the last call to the checks, and reports the alerts
        that they open and close. The file is read, because evaluations before the first step and during training are
        records but no steps: the alerts are those that are computed from the file.

        When the file is read from its start, its records are those of an earlier process and are not reported: their
        alerts replace those of the log."""
        if self._make_curves is None:
            return
        try:
            begins, records = self._records.refresh()
        except OSError as error:
            self.log.fail("metrics.jsonl", error)
            return
        if begins or self._curves is None:
            self._curves = self._make_curves()
            self._restart_log(replayed(self._curves, records))
            return
        for record in records:
            self._report(self._curves.look(record.metrics), record.step, record.time)

    def _restart_log(self, alerts: Iterable[Alert]) -> None:
        """Replaces the alerts about metrics in the log by `alerts`. Alerts about machines stay in the log; those of an
        earlier process are closed."""
        kept = []
        for alert in self.log.alerts:
            if alert.name in CLOSES:
                left = alert.closed is None and alert.opened < self._began  # by a process that was killed
                if left:
                    alert = replace(alert, closed=self._began)
                kept.append(alert)
        self.log.restart([*kept, *alerts])

    def _report(self, changes: Iterable[Change], step: int | None, at: float) -> None:
        """Opens and closes alerts at Unix time `at`, and reports each change. `step`: step that the changes concern."""
        for opens, finding in changes:
            if opens:
                alert = opened(finding, step, at)
                sentence = f"alert {alert.line}"
                self.note(sentence)
                self._send("alert", sentence, alert.title, alert)
            else:
                known = self.log.open_alerts().get((finding.name, finding.about))
                if known is None:  # its line could not be read
                    continue
                alert = replace(known, closed=at, closed_step=step)
                sentence = f"alert {alert.title} is over: {finding.text}"
                self.note(sentence)
                self._send("alert_over", sentence, alert.title, alert)
            self.log.put(alert)

    def close(self) -> None:
        """Checks the last records of metrics, ends the checks of this machine, and closes their alerts. Waits for the
        webhook to post the last events, and reports undelivered ones to `note`."""
        if self._curves is not None:
            self._guard.call(self._check_records)
        if self.machine is not None:
            self.machine.close()
            for alert in self.log.open_alerts().values():
                if alert.name in CLOSES:
                    self.log.put(replace(alert, closed=time.time(), closed_step=self.step))
        if self.webhook is None:
            return
        lost = self.webhook.close()
        if lost:
            self.note(f"track.webhook did not accept these events: {', '.join(lost)}")


@contextmanager
def alerting(alerts: Alerts, url: str | None, settings: AlertSettings | None = None) -> Iterator[None]:
    """Sends the events of the `with` block to the webhook at `url`, and an event about the exception if the block ends
    with one. If `url` is None, nothing is sent. `settings`: section `alerts`, for the form of the requests."""
    if url is not None:
        from slimx.extras.alerts.webhook import Webhook  # imports aiohttp

        alerts.webhook = Webhook(url, form_of(url, (settings or AlertSettings()).webhook_form))
    try:
        yield
    except BaseException as error:
        kind: Kind = "stopped" if isinstance(error, Preempted | Interrupted) else "failed"
        about = type(error).__name__
        if isinstance(error, SlimxError) and error.code:
            about = error.code
        alerts.tell(kind, ending_of(error)[1].partition("\n")[0], about=about)
        raise
    finally:
        alerts.close()


@contextmanager
def open_alerts(config: Config, note: Callable[[str], None]) -> Iterator[Alerts]:
    """Yields the receiver of a run's events, which posts them to the URL `track.webhook` if it is set. `note` shows a
    message to the user. This is an entry point of `slimx.event_receivers`."""
    stall = config.track.stall
    settings = settings_of(config)
    directory = Path(config.run.dir)
    disabled = set(settings.disabled)
    if device_of(config) == "cpu":  # the GPUs of this machine, if any, belong to others
        disabled.add("gpu")
    curves = partial(Curves, config.rollout.prompts_per_step, settings.disabled, passing=config.eval.passing)
    alerts = Alerts(config.run.name, directory, note, factor=stall.factor, at_least=stall.at_least, curves=curves)
    if not {"disk", "gpu"} <= disabled:
        alerts.machine = MachineWatch(partial(this_machine, directory, disabled))
    with alerting(alerts, config.track.webhook, settings):
        yield alerts


def _stalled(pace: PhasePace, activity: Mapping[str, Any]) -> str:
    sentence = f"stalled: {pace.phase} for {duration(pace.seconds)}"
    if pace.usual is not None:
        sentence += f", usually {duration(pace.usual)}"
    late = activity.get("late")
    if late is not None and 0 < len(late["ranks"]) < late["of"]:
        sentence += f"; no response yet from {', '.join(late['ranks'][:8])}"
    return sentence
