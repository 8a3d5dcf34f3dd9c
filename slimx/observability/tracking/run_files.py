"""Reading of a run directory for its report; missing and damaged files are reported, not skipped silently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.observability.tracking.jsonl import load_records
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.phases import Phase
from slimx.observability.tracking.samples import RecordedSample

FILES = ("metrics.jsonl", "timeline.jsonl", "samples.jsonl", "config.yaml", "summary.json")


@dataclass(kw_only=True, slots=True)
class RunFiles:
    """Contents of a run directory."""

    directory: Path
    steps: list[StepRecord] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    samples: list[RecordedSample] = field(default_factory=list)
    config: str | None = None
    """YAML text of config.yaml."""
    summary: Json | None = None
    """Headline numbers, label -> value, in the file's order."""
    missing: list[str] = field(default_factory=list)
    """Names in FILES that the directory does not have."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each failure to read."""


def up_to_date(directory: Path, *names: str) -> bool:
    """Returns True if these files of a run were written after its last step."""
    files = [directory / name for name in ("metrics.jsonl", *names)]
    if not all(file.exists() for file in files):
        return False
    last_step, *others = (file.stat().st_mtime_ns for file in files)
    return all(time >= last_step for time in others)


def check_run(directory: Path) -> None:
    """Raises SlimxError for a directory without a run."""
    if not (directory / "config.yaml").is_file():
        raise SlimxError(
            f"{directory} is not a run directory (it has no config.yaml); give a run.dir",
            code="run.none",
            about=str(directory),
        )


def read_config(directory: Path) -> Json:
    """Returns the `config.yaml` of the run in `directory` as plain values, with `${oc.env:...}` resolved from this
    process's environment, or with all `${...}` unresolved if that fails. Raises SlimxError without a run, or for a
    damaged file."""
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
    return cast(Json, values)


def _damaged(file: Path, why: str) -> SlimxError:
    return SlimxError(f"{file} is damaged ({why}); start the run again to rewrite it")


def read_run(directory: Path) -> RunFiles:
    """Reads the files of a run. Raises SlimxError for a directory that has none of FILES."""
    run = RunFiles(directory=directory, missing=[name for name in FILES if not (directory / name).is_file()])
    if len(run.missing) == len(FILES):
        raise SlimxError(
            f"{directory} is not a run directory: it has none of {', '.join(FILES)}; give the directory of a run",
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
            run.summary = msgspec.json.decode((directory / "summary.json").read_bytes(), type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            run.problems.append(f"summary.json cannot be read ({error})")
    return run


def _records[T](run: RunFiles, name: str, parse: Callable[[Json], T]) -> list[T]:
    if name in run.missing:
        return []
    records, problems = load_records(run.directory / name, parse)
    if problems:
        lines = problems[0]
        if len(problems) > 1:
            lines += f", and {len(problems) - 1} more lines"
        run.problems.append(f"{lines}; left out")
    return records
