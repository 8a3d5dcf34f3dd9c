"""Reads a run directory for its report; what is missing or damaged is named, not skipped in silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from slimx.errors import SlimxError
from slimx.observability.tracking.jsonl import load_records
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.phases import Phase
from slimx.observability.tracking.samples import RecordedSample

FILES = ("metrics.jsonl", "timeline.jsonl", "samples.jsonl", "config.yaml", "summary.json")


@dataclass(kw_only=True, slots=True)
class RunFiles:
    """One run directory, read."""

    directory: Path
    steps: list[StepRecord] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    samples: list[RecordedSample] = field(default_factory=list)
    config: str | None = None
    """The YAML text as it is."""
    summary: dict[str, Any] | None = None
    """Headline numbers, label -> value, in the file's order."""
    missing: list[str] = field(default_factory=list)
    """Names out of FILES that the directory lacks."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each thing that could not be read."""


def up_to_date(directory: Path, *names: str) -> bool:
    """Returns True if these files of a run were written after its last step."""
    written = [directory / name for name in ("metrics.jsonl", *names)]
    if not all(file.exists() for file in written):
        return False
    last, *others = (file.stat().st_mtime_ns for file in written)
    return all(when >= last for when in others)


def check_run(directory: Path) -> None:
    """Raise SlimxError for a directory that holds no run."""
    if not (directory / "config.yaml").is_file():
        raise SlimxError(
            f"{directory} holds no run (there is no config.yaml); name a run.dir", code="run.none", about=str(directory)
        )


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.yaml` of the run in `directory` as plain values, with what this process's environment has for
    `${oc.env:...}`; where it has nothing, with `${...}` itself. Raises SlimxError without a run, or for a file that is
    damaged."""
    check_run(directory)
    file = directory / "config.yaml"
    try:
        tree = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError) as error:
        raise _damaged(file, " ".join(str(error).split())) from error
    try:
        values = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException:
        values = OmegaConf.to_container(tree, resolve=False)
    if not isinstance(values, dict) or not {"run", "schedule"} <= values.keys():
        raise _damaged(file, "sections of a run are missing")
    return values


def _damaged(file: Path, why: str) -> SlimxError:
    return SlimxError(f"{file} is damaged ({why}); starting the run again writes it anew")


def read_run(directory: Path) -> RunFiles:
    """Reads what is there. Raises SlimxError for a directory that holds none of FILES."""
    run = RunFiles(directory=directory, missing=[name for name in FILES if not (directory / name).is_file()])
    if len(run.missing) == len(FILES):
        raise SlimxError(
            f"{directory} is no run directory: it has none of {', '.join(FILES)}; name the directory of a run",
            code="run.none",
            about=str(directory),
        )
    run.steps = _records(run, "metrics.jsonl", StepRecord.from_json)
    run.phases = _records(run, "timeline.jsonl", partial(msgspec.convert, type=Phase))
    run.samples = _records(run, "samples.jsonl", partial(msgspec.convert, type=RecordedSample))
    if "config.yaml" not in run.missing:
        run.config = (directory / "config.yaml").read_text(encoding="utf-8", errors="replace")
    if "summary.json" not in run.missing:
        try:
            run.summary = msgspec.json.decode((directory / "summary.json").read_bytes(), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            run.problems.append(f"summary.json cannot be read ({error})")
    return run


def _records[T](run: RunFiles, name: str, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    if name in run.missing:
        return []
    records, problems = load_records(run.directory / name, parse)
    if problems:
        more = f", and {len(problems) - 1} more lines" if len(problems) > 1 else ""
        run.problems.append(f"{problems[0]}{more}; left out")
    return records
