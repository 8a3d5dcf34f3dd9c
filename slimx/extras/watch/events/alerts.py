"""Turns what happens to a run into events, and sends them to its webhook."""

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
from slimx.extras.watch.events.pace import Pace, pace
from slimx.observability.events import Events, Kind
from slimx.observability.tracking.metrics import GROUPS_WITHOUT_SIGNAL, STEPS_WITHOUT_SIGNAL

if TYPE_CHECKING:
    from slimx.extras.watch.events.webhook import Webhook

AFTER = 5
"""Steps in a row without a signal after which a run says so."""


class Alerts(Events):
    """The events of one run. Without a webhook a stall is still noted."""

    def __init__(self, name: str, directory: Path, note: Callable[[str], None], *, factor: float, at_least: float):
        """`note` gets messages on stalls and steps without a signal, and at the end of events that were not delivered.
        `factor`, `at_least`: of `track.stall`."""
        self.webhook: Webhook | None = None
        self.note = note
        self._name, self._directory, self._stall = name, directory, {"factor": factor, "at_least": at_least}
        self._told: tuple[str, int] | None = None
        """Phase and number of the stall that was told."""

    def tell(self, kind: Kind, what: str, *, about: str = "") -> None:
        """Send an event; `what` is a sentence without the run's name."""
        if self.webhook is None:
            return
        at = "" if self.step is None else f", step {self.step}"
        self.webhook.send(
            Event(
                event=kind,
                text=f"slimx {self._name}{at}: {what}",
                run=self._name,
                directory=str(self._directory.absolute()),
                host=socket.gethostname(),
                step=self.step,
                about=about,
                time=time.time(),
            )
        )

    def look(self, activity: Mapping[str, Any]) -> None:
        """Tell when the phase that `activity` says is stalled, once, and when it has ended after all."""
        present = (activity["phase"], activity["number"])
        if self._told is not None and self._told != present:
            self.tell("went_on", f"{self._told[0]} has ended", about=self._told[0])
            self._told = None
        now = time.time()
        if self._told == present or now - activity["since"] <= self._stall["at_least"]:
            return
        at = pace(self._directory, activity, now, **self._stall)
        if at.stalled:
            self._told = present
            sentence = _stalled(at, activity)
            self.note(sentence)
            self.tell("stalled", sentence, about=at.phase)

    def recorded(self, metrics: Mapping[str, float]) -> None:
        """Tell of a step whose gradients an optimizer did not take, and of steps without a signal, which are noted,
        too."""
        skipped = "the optimizer skipped this step: a gradient was infinite or not a number"
        for name, count in metrics.items():
            if name.endswith(("optim/skipped", "critic/skipped")) and count:
                about = name.removesuffix("/skipped").removesuffix("optim").strip("/")
                self.tell("step_skipped", skipped, about=about)
        for prefix, sentence in without_signal(metrics).items():
            if said_again(metrics[prefix + STEPS_WITHOUT_SIGNAL]):
                self.note(sentence)
                self.tell("no_signal", sentence, about=prefix.strip("/"))

    def close(self) -> None:
        """Wait for the webhook, and note what it did not take."""
        if self.webhook is not None and (lost := self.webhook.close()):
            self.note(f"track.webhook did not take {len(lost)} events: {', '.join(lost)}")


@contextmanager
def alerting(alerts: Alerts, url: str | None) -> Iterator[None]:
    """Send the events of the block to `url`, and what ends it early; None: to nobody."""
    if url is not None:
        from slimx.extras.watch.events.webhook import Webhook  # imports requests

        alerts.webhook = Webhook(url)
    try:
        yield
    except BaseException as error:
        kind: Kind = "stopped" if isinstance(error, Preempted | Interrupted) else "failed"
        about = (isinstance(error, SlimxError) and error.code) or type(error).__name__
        alerts.tell(kind, ending_of(error)[1].partition("\n")[0], about=about)
        raise
    finally:
        alerts.close()


@contextmanager
def open_alerts(config: Config, note: Callable[[str], None]) -> Iterator[Alerts]:
    """As `slimx.observability.events.open_events`."""
    stall = config.track.stall
    alerts = Alerts(config.run.name, Path(config.run.dir), note, factor=stall.factor, at_least=stall.at_least)
    with alerting(alerts, config.track.webhook):
        yield alerts


def without_signal(metrics: Mapping[str, float]) -> dict[str, str]:
    """Sentences about the policies whose steps have been without a signal for `AFTER` steps or more, by the prefix of
    their metrics, from the metrics of the last step."""
    out = {}
    for key, steps in metrics.items():
        if not key.endswith(STEPS_WITHOUT_SIGNAL) or (steps or 0) < AFTER:
            continue
        prefix = key.removesuffix(STEPS_WITHOUT_SIGNAL)
        same = metrics.get(prefix + GROUPS_WITHOUT_SIGNAL) == 1
        why = "all rollouts of each group earn the same" if same else "the gradient is 0"
        reward = metrics.get(prefix + "reward/mean")
        shown = "" if reward is None else f", {prefix}reward/mean {reward:.4g}"
        out[prefix] = (
            f"no signal for {steps:.0f} steps, {why}{shown}; "
            "docs/guides/when-it-goes-wrong.md says under Groups without a signal what helps"
        )
    return out


def said_again(steps: float) -> bool:
    """Returns True after `AFTER` steps, and again whenever they have doubled."""
    times, rest = divmod(int(steps), AFTER)
    return times > 0 and rest == 0 and times & (times - 1) == 0


def _stalled(at: Pace, activity: Mapping[str, Any]) -> str:
    usual = "" if at.usual is None else f", usually {at.usual:.0f} s"
    late = activity.get("late")
    behind = late["ranks"][:8] if late is not None and len(late["ranks"]) < late["of"] else []
    whose = f"; late: {', '.join(behind)}" if behind else ""
    return f"stalled: {at.phase} for {at.seconds:.0f} s{usual}{whose}"
