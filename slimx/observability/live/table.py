"""Display of a run in progress: on a terminal a progress bar, the current phase and a table of the last steps;
otherwise one line per step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from slimx.errors import duration
from slimx.observability.live.safe_text import visible

SHOWN_STEPS = 12
HEADER_EVERY = 20
"""Number of lines after which the header is repeated if the output is not a terminal."""
ETA_WINDOW_SECONDS = 4 * 3600.0
"""Period in seconds over which the speed is averaged to estimate the remaining time. It is long because a single step
may take many minutes."""
MISSING = "-"


@dataclass(slots=True, frozen=True)
class TableColumn:
    """Column of the live table, in which each row is a step."""

    title: str
    key: str
    """Name of the metric to show, `section/name`; `step` for the number of the step."""
    format: str
    """Python format specification of the value, such as `.3f`."""

    def text(self, metrics: Mapping[str, float]) -> str:
        """Formats the column's metric as the text of a cell: `-` if the metric is missing; in a column with scientific
        notation, `0` if the value is exactly zero."""
        value = metrics.get(self.key)
        if value is None:
            return MISSING
        if value == 0 and self.format.endswith("e"):
            return "0"
        return format(float(value), self.format)


STEP = TableColumn("step", "step", ".0f")
REWARD = TableColumn("reward", "reward/mean", ".3f")
GAP = TableColumn("gap", "gap/mean", ".1e")
TOKENS_PER_SECOND = TableColumn("tokens/s", "perf/tokens_per_second", ",.0f")
SECONDS = TableColumn("seconds", "time/step", ".1f")
"""Columns that several of the tables below share."""
LEGEND = (
    "gap: train-inference mismatch of log-probs; stale: versions between sampling and training; publish: weight "
    "sync; times in seconds"
)
"""Usual words for titles of columns, printed before tables with `GAP`."""

RL_COLUMNS = (
    STEP,
    REWARD,
    TableColumn("loss", "loss/policy", "z.4f"),
    TableColumn("KL", "kl/reference", ".1e"),
    GAP,
    TableColumn("stale", "staleness/max", ".0f"),
    TOKENS_PER_SECOND,
    TableColumn("generate", "time/generate", ".1f"),
    TableColumn("train", "time/train", ".1f"),
    TableColumn("publish", "time/publish", ".1f"),
)

PPO_COLUMNS = (
    *RL_COLUMNS[:3],
    TableColumn("expl. var", "value/explained_variance", ".3f"),
    *RL_COLUMNS[3:],
)

SFT_COLUMNS = (
    STEP,
    TableColumn("loss", "loss/sft", ".4f"),
    TableColumn("lr", "optim/lr", ".2e"),
    TableColumn("grad norm", "optim/grad_norm", ".3f"),
    TOKENS_PER_SECOND,
    SECONDS,
)


def with_policies(columns: Sequence[TableColumn], policies: Sequence[str]) -> tuple[TableColumn, ...]:
    """Returns `columns` with reward, loss and log-prob gap columns for each of `policies` (the policies other than the
    actor), inserted after the actor's log-prob gap."""
    further = []
    for policy in policies:
        for column in columns:
            if column.key in ("reward/mean", "loss/policy", "gap/mean"):
                title = f"{policy} {column.title}"
                further.append(TableColumn(title, f"policy/{policy}/{column.key}", column.format))
    end = columns.index(GAP) + 1 if GAP in columns else len(columns)
    return (*columns[:end], *further, *columns[end:])


class LiveTable:
    """Context manager that displays a run in progress.

    On a terminal the display is redrawn in place. Otherwise, such as in a file or an sbatch log, each step is one
    aligned line. `start_step`: number of steps that earlier processes of the run have completed. `clock`: function that
    returns a monotonic time in seconds."""

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        console: Console | None = None,
        columns: Sequence[TableColumn] = RL_COLUMNS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._columns = columns
        self._clock = clock
        self._rows: dict[int, dict[str, float]] = {}
        self._done = start_step
        self._start: str | None = None
        self._since = clock()
        self._phase: str | None = None
        self._phase_start = clock()
        self._phase_seconds = defaultdict[str, float](float)
        self._lines = 0
        self._widths = [max(len(column.title), 8) for column in columns]
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", style="bold"),
            console=self._console,
            get_time=clock,
            speed_estimate_period=ETA_WINDOW_SECONDS,
            expand=True,
        )
        self._task = self._progress.add_task("run", total=total_steps, completed=start_step, phase="")
        self._live: Live | None = None

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=2)
            self._live.start()
            self._explain()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_phase()
        self._phase_seconds.clear()
        self._progress.update(self._task, phase="")
        if self._live is not None:
            self._live.stop()
            self._live = None

    def start(self, line: str, since: float) -> None:
        """Shows `line` until the first phase starts, with the seconds that have passed since `since`, a time on the
        table's clock."""
        self._start = line
        self._since = since

    def milestone(self, text: str) -> None:
        """Prints `text` after the seconds that have passed since the run began to start."""
        self.note(f"{self._clock() - self._since:>6.1f} s  {text}")

    def phase(self, name: str) -> None:
        """Starts phase `name` and ends the previous phase. On a terminal, the elapsed seconds of the phase appear in
        the column with key `time/NAME`, if there is one; elsewhere, a line announces each phase before the first
        row, unless the same phase is resumed."""
        if self._live is None and not self._rows and name != self._phase:
            self.milestone(name)
        self._end_phase()
        self._start = None
        self._phase = name
        self._phase_start = self._clock()
        self._progress.update(self._task, phase=name)

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a finished step. A second call for the same step replaces the row of the first, and does
        not advance the progress bar."""
        if step not in self._rows:
            self._done += 1
            self._progress.update(self._task, completed=self._done)
        self._rows[step] = {**metrics, "step": step}
        while len(self._rows) > SHOWN_STEPS:
            del self._rows[next(iter(self._rows))]
        self._end_phase()
        self._phase_seconds.clear()
        if self._live is None:
            self._print_line(self._rows[step])

    def note(self, text: str) -> None:
        """Prints `text` as a separate line; on a terminal, above the display."""
        self._console.print(visible(text), markup=False, highlight=False, soft_wrap=True)

    def _end_phase(self) -> None:
        if self._phase is not None:
            key = f"time/{self._phase}"
            self._phase_seconds[key] += self._clock() - self._phase_start
            self._phase = None

    def _print_line(self, metrics: Mapping[str, float]) -> None:
        cells = [column.text(metrics) for column in self._columns]
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)]
        if not self._lines:
            self._explain()
        if self._lines % HEADER_EVERY == 0:
            self.note(self._aligned([*(column.title for column in self._columns), "left"]))
        self._lines += 1
        left = self._progress.tasks[0].time_remaining
        self.note(self._aligned([*cells, MISSING if left is None else duration(left)]))

    def _explain(self) -> None:
        """Prints usual words for titles of columns."""
        if GAP in self._columns:
            self.note(LEGEND)

    def _aligned(self, cells: Sequence[str]) -> str:
        return "  ".join(cell.rjust(width) for cell, width in zip(cells, [*self._widths, 8], strict=True))

    def _current_cells(self) -> list[str]:
        """Returns the table cells for the step in progress, which so far contain only the durations of the step's
        phases."""
        seconds = self._phase_seconds.copy()
        if self._phase is not None:
            key = f"time/{self._phase}"
            seconds[key] += self._clock() - self._phase_start
        cells = []
        for column in self._columns:
            if column.key == "step":
                cells.append("now")
            else:
                cells.append(column.text(seconds) if column.key in seconds else "")
        return cells

    def _render(self) -> RenderableType:
        table = Table(box=SIMPLE_HEAD, expand=True, padding=0, pad_edge=False, header_style="dim")
        for column in self._columns:
            table.add_column(column.title, justify="right", no_wrap=True)
        # Progress bar, header, rule, current step and margins occupy 7 lines.
        shown = max(1, min(SHOWN_STEPS, self._console.height - 7))
        for metrics in list(self._rows.values())[-shown:]:
            table.add_row(*(_cell(column.text(metrics)) for column in self._columns))
        if self._phase is not None or self._phase_seconds:
            table.add_row(*self._current_cells(), style="dim")
        if self._start is not None:
            now = f"now  {self._start}, {duration(self._clock() - self._since)}"
            return Group(self._progress, table, Text(now, "dim"))
        return Group(self._progress, table)


def _cell(text: str) -> Text:
    style = ""
    if text.endswith(("nan", "inf")):
        style = "bold red"
    elif text == MISSING:
        style = "dim"
    return Text(text, style)
