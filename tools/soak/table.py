"""Formats the result of a soak as Markdown tables, and finds its problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from tools.soak.census import MEASURED, Sample
from tools.soak.slopes import PER, Slope, series_of, slope_of
from tools.soak.strikes import GOES_ON, Strike
from tools.soak.supervisor import Soak

BOUNDS = {"anonymous": 2.0, "pss": 2.0, "fds": 1.0, "threads": 1.0, "sockets": 1.0, "ports": 0.5, "shm": 1.0}
"""Largest accepted growth per `PER` steps, in MiB for memory and in numbers for the rest. 2 MiB in 1,000 steps are 200
MiB in a run of 100,000."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of one resource of one kind of process."""

    kind: str
    measure: str
    slope: Slope

    @property
    def verdict(self) -> str:
        return self.slope.verdict(BOUNDS[self.measure])


def growths(samples: list[Sample], *, warm: int) -> list[Growth]:
    """Returns the growth of every resource of every kind that was observed long enough."""
    kinds: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        kinds[sample.kind].append(sample)
    out = []
    for kind, several in sorted(kinds.items()):
        for measure in MEASURED:
            slope = slope_of(series_of(several, attrgetter(measure), warm=warm))
            if slope is not None:
                out.append(Growth(kind, measure, slope))
    return out


def problems(soak: Soak, found: list[Growth]) -> list[str]:
    """Returns everything that makes a soak fail, one line each."""
    growing = [growth for growth in found if growth.verdict == "grows"]
    out = [f"{growth.kind}: {growth.measure} grows by {_per_period(growth.slope)}" for growth in growing]
    out += [f"at step {account.step}: {problem}" for account in soak.accounts for problem in account.problems]
    out += [f"{name} is left in /dev/shm" for name in soak.left]
    if not soak.accounts:
        out.append("no checkpoint was written, so nothing could be accounted for")
    return out


def page(soak: Soak, found: list[Growth]) -> str:
    """Returns the tables."""
    return "\n".join([*_head(soak), "", *_strikes(soak.strikes.done), "", *_growths(found)])


def _head(soak: Soak) -> Iterator[str]:
    ends = ", ".join(f"{status}: {count}" for status, count in sorted(soak.ends.items()))
    yield f"{soak.seconds / 60:.0f} minutes, {len(soak.strikes.done)} strikes; exit statuses of the run {ends}; "
    yield f"{soak.unasked} ends without a strike; {len(soak.left)} files left in /dev/shm"
    if soak.accounts:
        yield f"{soak.accounts[-1]}; {len(soak.accounts[-1].problems)} prompts or steps lost or doubled"
    if soak.strikes.missing:
        yield f"not there when it was to be struck: {', '.join(sorted(soak.strikes.missing))}"


def _strikes(strikes: list[Strike]) -> Iterator[str]:
    yield f"| process | signal | strikes | run ended | seconds until {GOES_ON} more steps, median (longest) |"
    yield "| --- | --- | --- | --- | --- |"
    by_kind: dict[tuple[str, str], list[Strike]] = defaultdict(list)
    for strike in strikes:
        by_kind[strike.kind, strike.signum.name].append(strike)
    for (kind, signum), several in sorted(by_kind.items()):
        took = [strike.seconds for strike in several if strike.seconds is not None]
        recovery = f"{median(took):.0f} ({max(took):.0f})" if took else "not seen"
        yield f"| {kind} | {signum} | {len(several)} | {sum(growth.ended for growth in several)} | {recovery} |"


def _growths(found: list[Growth]) -> Iterator[str]:
    yield f"| process (number seen for long enough) | growth per {PER:,} steps: anonymous memory, MiB | PSS, MiB | fds | threads | sockets | ports | mapped of /dev/shm, MiB |"  # noqa: E501
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    kinds: dict[str, dict[str, Growth]] = defaultdict(dict)
    for growth in found:
        kinds[growth.kind][growth.measure] = growth
    for kind, measures in kinds.items():
        cells = [f"{_per_period(measures[m].slope)} {measures[m].verdict}" if m in measures else "" for m in MEASURED]
        count = next(iter(measures.values())).slope.processes
        yield f"| {kind} ({count}) | {' | '.join(cells)} |"


def _per_period(slope: Slope) -> str:
    half = (slope.high - slope.low) / 2
    return "0" if slope.value == half == 0 else f"{slope.value:+.2f} ± {half:.2f}"
