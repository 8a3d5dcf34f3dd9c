"""Results of ring one and of the parts, one JSON object a line in build/suite.jsonl."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run of ring one, or of one part of `make test-all`."""

    date: str
    """Start of the run, UTC."""
    commit: str
    """Short commit id, with + if the tree differed from it."""
    run: str
    """"ring one", or a part such as 3/10."""
    passed: int
    failed: int
    seconds: int
    """Wall seconds of ring one; of a part, the sum over its tests."""
    load: list[float]
    """One-minute load averages before and after."""
    seed: int
    """Seed of the order of tests."""
    factor: float
    """CPU seconds of this machine, relative to the reference machine's for the same work."""


RING_ONE = "ring one"


def append(path: Path, results: list[Result]) -> None:
    """Adds one line for each result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(result)) + "\n" for result in results)


def read(path: Path) -> list[Result]:
    """Returns the results in a file; an empty list if it does not exist."""
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
