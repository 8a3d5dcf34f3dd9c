"""Writes the lines at the end of a run: outcomes, machine, order, and the tests that were left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.rings.history import age
from tools.rings.parts import NAMES
from tools.rings.sessions import Outcome

OLD = 400
"""Commits after which the last result of a part is too old."""


def summary(outcomes: Sequence[Outcome], *, factor: float, load: Sequence[float], seed: int, again: str) -> list[str]:
    """Returns the lines of the summary. `again`: the command that repeats the order, without the seed."""
    lines = [f"{'':14}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    for outcome in outcomes:
        passed, failed, skipped = map(outcome.total, ("passed", "failed", "skipped"))
        ended = "" if outcome.files else f"  ended with status {outcome.status} before its counts"
        lines.append(f"{outcome.name:14}{passed:8}{failed:8}{skipped:9}{outcome.seconds:9.0f}{ended}")
    before, after = load
    return [
        *lines,
        f"this machine: {factor} times the reference machine; load average {before:.1f} before, {after:.1f} after",
        f"order: seed {seed}, again by `{again} SEED={seed}`",
    ]


def left_out(outcomes: Sequence[Outcome]) -> str:
    """Returns a line on the slow tests that did not run, by directory."""
    counts = sum((outcome.left_out for outcome in outcomes), Counter[str]())
    by_directory = ", ".join(f"{directory} {count}" for directory, count in counts.most_common())
    return f"left out: {counts.total()} slow tests (make test-all){': ' if counts else ''}{by_directory}"


def stale_parts(root: Path, last: Mapping[str, Sequence[str]]) -> str:
    """Returns a line on the parts without a result in the last 400 commits. `last`: part -> its row in
    docs/suite.md."""
    stale = []
    for name in NAMES:
        commits = age(root, last[name][2]) if name in last else None
        if name not in last:
            stale.append(f"{name} (never)")
        elif commits is None:
            stale.append(f"{name} (unknown)")
        elif commits > OLD:
            stale.append(f"{name} ({commits} commits ago)")
    return f"parts of make test-all without a result in the last {OLD} commits: {', '.join(stale) or 'none'}"
