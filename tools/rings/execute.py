"""Runs a ring of tests and measures the machine's speed meanwhile; appends the results and returns a summary."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.rings import machine
from tools.rings.history import commit
from tools.rings.parts import part_of
from tools.rings.results import RING_ONE, Result, append
from tools.rings.sessions import ROOT, Outcome
from tools.rings.summary import summary


def execute(
    run: Callable[[], list[Outcome]], seed: int, again: str, path: Path, *, by_part: bool = True
) -> tuple[int, list[str], list[Outcome]]:
    """Runs sessions and appends their results to `path`; returns the tests' exit status, a summary and the outcomes.

    `again`: the command that repeats the order, without the seed. `by_part`: a result for each part, else for ring one.
    A session that did not come to its end leaves no result.
    """
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    head = commit(ROOT)  # of the tests that begin now
    load = [round(os.getloadavg()[0], 1)]
    began = time.monotonic()
    with machine.sampled() as samples:
        outcomes = run()
    seconds = time.monotonic() - began
    load.append(round(os.getloadavg()[0], 1))
    factor = machine.factor(samples)
    if all(outcome.status in (0, 1) and outcome.files for outcome in outcomes):
        rows = _parts(outcomes) if by_part else {RING_ONE: _ring(outcomes, seconds)}
        append(
            path,
            [
                Result(
                    date=date,
                    commit=head,
                    run=name,
                    passed=row["passed"],
                    failed=row["failed"],
                    seconds=round(row["seconds"]),
                    load=load,
                    seed=seed,
                    factor=factor,
                )
                for name, row in sorted(rows.items())
            ],
        )
    status = next((outcome.status for outcome in outcomes if outcome.status), 0)
    return status, summary(outcomes, factor=factor, load=load, seed=seed, again=again), outcomes


def _parts(outcomes: Sequence[Outcome]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for file, counts in outcome.files.items():
            found.setdefault(part_of(file), Counter()).update(counts)
    return found


def _ring(outcomes: Sequence[Outcome], seconds: float) -> Counter[str]:
    total = Counter({key: sum(outcome.total(key) for outcome in outcomes) for key in ("passed", "failed")})
    total["seconds"] = round(seconds)
    return total
