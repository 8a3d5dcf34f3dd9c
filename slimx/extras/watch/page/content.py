"""Content of a run's live page: status, charts and rollouts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slimx.data.saved.step_files import DIRECTORY, step_files
from slimx.data.saved.trained_tokens import SUFFIX
from slimx.errors import SlimxError, counted
from slimx.extras.alerts.lines import Growing
from slimx.extras.alerts.log import least_passing
from slimx.extras.report.cards import cards
from slimx.extras.report.charts import Chart, PhaseColors
from slimx.extras.report.comparison import check_different, overlaid, run_names
from slimx.extras.report.curves import curves
from slimx.extras.report.meanings import TERMS
from slimx.extras.report.phase_charts import phase_charts
from slimx.extras.report.previews import image_store
from slimx.extras.report.samples import marked
from slimx.extras.vision.images.pictures import preview
from slimx.extras.vision.images.sources import read_image
from slimx.extras.watch.rollouts import Choice, step_of
from slimx.extras.watch.status import STATES, describe_status, run_status
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.phases import Phase
from slimx.observability.tracking.run_files import by_step, check_run

POINTS = 600
"""Maximum number of points of a curve; longer curves are averaged."""
PHASES_KEPT = 20_000
"""Number of newest phases that the page draws; a run of 10,000 steps has about 80,000 phases."""
STEPS_KEPT = 4
"""Number of steps whose groups are cached. A step is read again if one of its files has changed."""
PREVIEW = 320
"""Maximum width and height of an image on the page, in pixels."""
CHARACTERS = 4000
"""Maximum number of characters shown for each prompt, sampled turn and inserted text in the list of rollouts; the token
view shows the full text."""

Json = dict[str, Any]


class Content:
    """Content of one run's page. Its methods may be called from several threads."""

    def __init__(self, directory: Path, *compared: Path) -> None:
        """Prepares to read the files of the run in `directory`, and the metrics of the `compared` runs. Raises
        SlimxError if there is no run, and for a directory given twice."""
        for path in (directory, *compared):
            check_run(path)
        if compared:
            check_different((directory, *compared))
        self.directory = directory
        self._names = run_names((directory, *compared))
        self._compared: list[Growing[StepRecord]] = []
        for path in compared:
            self._compared.append(Growing(path / "metrics.jsonl", StepRecord.from_json))
        self._steps = Growing(directory / "metrics.jsonl", StepRecord.from_json)
        self._phases = Growing(
            directory / "timeline.jsonl", lambda values: msgspec.convert(values, type=Phase), keep=PHASES_KEPT
        )
        self._colors = PhaseColors()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._rollouts: dict[int, tuple[tuple[int, ...], Json]] = {}
        """For each cached step, the modification times of its files and the values that `rollouts` returns."""

    def status(self) -> Json:
        """Returns the values that `slimx status` shows; `lines` contains the text that the command prints, `states` and
        `terms` descriptions of states of engines and of terms."""
        values = run_status(self.directory)
        return {**values, "lines": describe_status(values), "states": STATES, "terms": TERMS, "now": time.time()}

    def charts(self, since: str) -> Json:
        """Returns {version, charts, cards} with all charts and the cards of the report; both are None if the files have
        not changed since version `since`."""
        with self._lock:
            self._steps.refresh()
            self._phases.refresh()
            version = f"{self._steps.read}-{self._phases.read}"
            for other in self._compared:
                other.refresh()
                version += f"-{other.read}"
            if version == since:
                return {"version": version, "charts": None, "cards": None}
            steps = by_step(self._steps.records)
            phases = list(self._phases.records)
            charts: list[Json] = []
            if steps:
                drawn, _ = curves(steps, points=POINTS)
                charts += _cards(drawn, "curves")
            if phases:
                timed = phase_charts(phases, points=POINTS // 2, colors=self._colors)
                charts += _cards(timed, "time")
            if self._compared:
                runs = [steps, *(by_step(other.records) for other in self._compared)]
                charts += _cards(overlaid(runs, self._names), "compared")
            return {"version": version, "charts": charts, "cards": [card.to_json() for card in cards(steps)]}

    def steps(self) -> list[int]:
        """Returns the steps whose rollouts are saved, in ascending order."""
        return list(step_files(self.directory / DIRECTORY))

    def rollouts(self, step: int) -> Json:
        """Returns the groups of a step without their tokens. Raises SlimxError for a missing step."""
        with self._reading:  # a large step takes seconds; concurrent requests wait for one read
            file = step_files(self.directory / DIRECTORY).get(step)
            written: tuple[int, ...] = ()
            if file is not None:
                written = _written(file, file.with_suffix(SUFFIX))
            if self._rollouts.get(step, ((), {}))[0] != written or not written:
                values = step_of(self.directory, step, Choice(limit=0))
                values["passing"] = least_passing(self.directory)
                for group in values["groups"]:
                    for trajectory in group["trajectories"]:
                        for part in trajectory["parts"]:
                            part["text"] = cut(part["text"])
                            part["marked"] = marked(part["text"], group["prompt"]["answer"])
                self._rollouts.pop(step, None)
                if len(self._rollouts) == STEPS_KEPT:
                    self._rollouts.pop(next(iter(self._rollouts)))
                self._rollouts[step] = written, values
            return self._rollouts[step][1]

    def image(self, step: int, group: str, index: str) -> bytes:
        """Returns a preview of an image of a group's prompt, as a PNG file. `index`: index of the image, in digits.
        Raises SlimxError if the image is missing."""
        groups = {found["id"]: found for found in self.rollouts(step)["groups"]}
        images = groups[group]["prompt"]["images"] if group in groups else []
        found = {str(number): image for number, image in enumerate(images)}.get(index)
        if found is None:
            raise SlimxError(
                f"group {group} of step {step} has no image {index[:20]!r} in a file; choose one that the group lists",
                code="rollouts.image",
                about=group,
            )
        return preview(read_image(found, f"image {index} of group {group}", image_store(self.directory)), PREVIEW)

    def tokens(self, step: int, group: str) -> Json:
        """Returns one group with all its tokens. Raises SlimxError for a missing step or group."""
        return step_of(self.directory, step, Choice(group=group, limit=0, tokens=True))


def _written(*files: Path) -> tuple[int, ...]:
    """Returns the modification times, in nanoseconds, of the existing files among `files`."""
    return tuple(file.stat().st_mtime_ns for file in files if file.exists())


def cut(text: str) -> str:
    """Returns `text`, cut to `CHARACTERS` characters if it is longer: its middle is replaced with the number of omitted
    characters."""
    left = len(text) - CHARACTERS
    if left <= 0:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[{counted(left, 'more character')}]\n{text[-half:]}"


def _cards(charts: Sequence[Chart], block: str) -> Iterator[Json]:
    for chart in charts:
        yield {
            "block": block,
            "title": chart.title,
            "height": chart.figure.layout.height,
            "figure": json.loads(chart.figure.to_json(validate=False)),
            "notes": chart.notes,
            "about": [item.to_json() for item in chart.about],
            "wide": chart.wide,
        }
