"""Reads the directory of a run for its report. Missing and damaged files are reported, not skipped silently."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from slimx.errors import SlimxError, one_line
from slimx.json_types import Json
from slimx.observability.tracking.jsonl import load_records
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.phases import Phase
from slimx.observability.tracking.samples import RecordedSample

FILES = ("metrics.jsonl", "timeline.jsonl", "samples.jsonl", "config.yaml", "summary.json")


@dataclass(kw_only=True, slots=True)
class RunFiles:
    """Contents of the files in a run's directory."""

    directory: Path
    steps: list[StepRecord] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    samples: list[RecordedSample] = field(default_factory=list)
    config: str | None = None
    """Text of config.yaml; None if the file is missing."""
    summary: Json | None = None
    """Contents of summary.json (description -> value), in the order of the file; None if the file is missing or
    unreadable."""
    missing: list[str] = field(default_factory=list)
    """Names of those files in `FILES` that the run's directory does not contain."""
    problems: list[str] = field(default_factory=list)
    """A message about each file that could not be read completely."""


def up_to_date(directory: Path, *names: str) -> bool:
    """Returns True if the files `names` in `directory` exist and are newer than the last step of the run."""
    files = [directory / name for name in ("metrics.jsonl", *names)]
    if not all(file.exists() for file in files):
        return False
    last_step, *others = (file.stat().st_mtime_ns for file in files)
    return all(time >= last_step for time in others)


def check_run(directory: Path) -> None:
    """Raises SlimxError if `directory` is not the directory of a run."""
    if not (directory / "config.yaml").is_file():
        raise SlimxError(
            f"{directory} is not a run directory, because it contains no config.yaml; pass the "
            "directory of an existing run (its run.dir)",
            code="run.none",
            about=str(directory),
        )


def read_config(directory: Path) -> Json:
    """Returns the `config.yaml` of the run in `directory` as plain values. `${oc.env:...}` is resolved from the
    environment of this process; if that fails, all `${...}` stay unresolved. Raises SlimxError if `directory` is not a
    run's directory, or if the file is damaged."""
    check_run(directory)
    file = directory / "config.yaml"
    try:
        tree = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError) as error:
        raise _damaged(file, one_line(error)) from error
    try:
        values = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException:
        values = OmegaConf.to_container(tree, resolve=False)
    if not isinstance(values, dict) or not {"run", "schedule"} <= values.keys():
        raise _damaged(file, "the section run or schedule is missing")
    return cast(Json, values)


def _damaged(file: Path, why: str) -> SlimxError:
    return SlimxError(f"{file} is damaged ({why}); start the run again to rewrite this file")


def read_run(directory: Path) -> RunFiles:
    """Reads all files of the run in `directory`. Raises SlimxError if the directory contains none of `FILES`."""
    run = RunFiles(directory=directory, missing=[name for name in FILES if not (directory / name).is_file()])
    if len(run.missing) == len(FILES):
        raise SlimxError(
            f"{directory} is not a run directory, because it contains none of {', '.join(FILES)}; pass the "
            "directory of an existing run (its run.dir)",
            code="run.none",
            about=str(directory),
        )
    run.steps = by_step(_records(run, "metrics.jsonl", StepRecord.from_json))
    run.phases = _records(run, "timeline.jsonl", partial(msgspec.convert, type=Phase))
    run.samples = _records(run, "samples.jsonl", partial(msgspec.convert, type=RecordedSample))
    if "config.yaml" not in run.missing:
        run.config = (directory / "config.yaml").read_text(encoding="utf-8", errors="replace")
    if "summary.json" not in run.missing:
        try:
            run.summary = msgspec.json.decode((directory / "summary.json").read_bytes(), type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            run.problems.append(f"summary.json cannot be read ({error})")
    return run


def by_step(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Returns one record per step, in ascending order. The result of an evaluation during training is a further line of
    its step, after those of later steps."""
    steps: dict[int, StepRecord] = {}
    for record in records:
        step = steps.setdefault(record.step, record)
        steps[record.step] = replace(step, metrics=step.metrics | record.metrics)
    return [steps[step] for step in sorted(steps)]


def _records[T](run: RunFiles, name: str, parse: Callable[[Json], T]) -> list[T]:
    if name in run.missing:
        return []
    records, problems = load_records(run.directory / name, parse)
    if problems:
        lines = problems[0]
        if len(problems) > 1:
            lines += f", and neither can {len(problems) - 1} more lines"
        run.problems.append(f"{lines}; unreadable lines are left out")
    return records
