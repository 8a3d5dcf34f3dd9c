"""Turns incidents of a run into events, and sends the events to the run's webhook."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimx.config.schema import Config
from slimx.errors import Interrupted, Preempted, SlimxError, ending_of
from slimx.extras.watch.events.event import Event
from slimx.extras.watch.events.pace import PhasePace, phase_pace
from slimx.observability.events import Events, Kind
from slimx.observability.tracking.metrics import GROUPS_WITHOUT_SIGNAL, STEPS_WITHOUT_SIGNAL

if TYPE_CHECKING:
    from slimx.extras.watch.events.webhook import Webhook

AFTER = 5
"""Number of consecutive steps without a training signal after which the first alert is sent."""


class Alerts(Events):
    """Receiver of one run's events that sends them to a webhook. Stalls are reported to the user even without a
    webhook."""

    def __init__(self, name: str, directory: Path, note: Callable[[str], None], *, factor: float, at_least: float):
        """Stores the run's `name` and `directory`; no webhook is set yet. `note` receives messages for the user: about
        stalls and steps without a signal, and at the end about undelivered events. `factor` and `at_least`: settings of
        `track.stall`, which determine when a phase counts as stalled."""
        self.webhook: Webhook | None = None
        self.note = note
        self._name = name
        self._directory = directory
        self._factor = factor
        self._at_least = at_least
        self._reported: tuple[str, int] | None = None
        """Name and number of a phase whose stall was reported and whose end has not been reported yet; None if there is
        no such phase."""

    def tell(self, kind: Kind, what: str, *, about: str = "") -> None:
        """Sends an event to the webhook; does nothing if none is set. `what`: a sentence without the run's name;
        `about`: phase, part of the run or error code that the event concerns; "" for the whole run."""
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
            )
        )

    def look(self, activity: Mapping[str, Any]) -> None:
        """Reports once if the phase that `activity` describes has stalled; a later call reports that the stalled phase
        has ended."""
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
        """Checks a step's metrics, and reports if an optimizer skipped the step because a gradient was not finite, or
        if a policy has had no training signal for many steps. The latter is also passed to `note`."""
        skipped = "the optimizer skipped this step, because a gradient was infinite or NaN"
        for name, count in metrics.items():
            if name.endswith(("optim/skipped", "critic/skipped")) and count:
                about = name.removesuffix("/skipped").removesuffix("optim").strip("/")
                self.tell("step_skipped", skipped, about=about)
        for prefix, sentence in without_signal(metrics).items():
            if is_reported(metrics[prefix + STEPS_WITHOUT_SIGNAL]):
                self.note(sentence)
                self.tell("no_signal", sentence, about=prefix.strip("/"))

    def close(self) -> None:
        """Waits for the webhook to post the last events, and reports undelivered ones to `note`."""
        if self.webhook is None:
            return
        lost = self.webhook.close()
        if lost:
            self.note(f"track.webhook did not accept these events: {', '.join(lost)}")


@contextmanager
def alerting(alerts: Alerts, url: str | None) -> Iterator[None]:
    """Sends the events of the `with` block to the webhook at `url`, and an event about the exception if the block ends
    with one. If `url` is None, nothing is sent."""
    if url is not None:
        from slimx.extras.watch.events.webhook import Webhook  # imports aiohttp

        alerts.webhook = Webhook(url)
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
    alerts = Alerts(config.run.name, Path(config.run.dir), note, factor=stall.factor, at_least=stall.at_least)
    with alerting(alerts, config.track.webhook):
        yield alerts


def without_signal(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns, by the prefix of a policy's metrics, the alert text for each policy that has had no training signal for
    `AFTER` or more steps. `metrics`: metrics of the last step."""
    out = {}
    for key, steps in metrics.items():
        if not key.endswith(STEPS_WITHOUT_SIGNAL) or (steps or 0) < AFTER:
            continue
        prefix = key.removesuffix(STEPS_WITHOUT_SIGNAL)
        same = metrics.get(prefix + GROUPS_WITHOUT_SIGNAL) == 1
        why = "because all rollouts of each group have the same reward" if same else "because the gradient is 0"
        reward = metrics.get(prefix + "reward/mean")
        shown = ""
        if reward is not None:
            shown = f", {prefix}reward/mean {reward:.4g}"
        out[prefix] = (
            f"no training signal for {steps:.0f} steps, {why}{shown}; "
            "for remedies see section Groups without a signal in docs/guides/when-it-goes-wrong.md"
        )
    return out


def is_reported(steps: float) -> bool:
    """Returns True if a report is due after `steps` steps without a signal: at `AFTER` steps, and again each time that
    number has doubled."""
    times, rest = divmod(int(steps), AFTER)
    return times > 0 and rest == 0 and times & (times - 1) == 0


def _stalled(pace: PhasePace, activity: Mapping[str, Any]) -> str:
    sentence = f"stalled: {pace.phase} for {pace.seconds:.0f} s"
    if pace.usual is not None:
        sentence += f", usually {pace.usual:.0f} s"
    late = activity.get("late")
    if late is not None and 0 < len(late["ranks"]) < late["of"]:
        sentence += f"; no response yet from {', '.join(late['ranks'][:8])}"
    return sentence
