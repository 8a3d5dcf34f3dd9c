"""Makes the archive of a run: its files without secrets, its status and alerts, and the environment."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from slimx.config.load import load_config
from slimx.data.saved.step_files import DIRECTORY, TOKENIZER, step_files
from slimx.errors import SlimxError, one_line
from slimx.extras.alerts.log import alert_lines, alerts_of
from slimx.extras.pack.contents import LIMITS, MIB, WHOLE, LeftOut, Taken, files_of, taken
from slimx.extras.pack.environment import environment_lines
from slimx.extras.pack.redaction import Redactor, redactor_of
from slimx.extras.watch.rollouts import Choice, step_of
from slimx.extras.watch.status import describe_status, run_status

ROLLOUTS = MIB
"""Maximum number of bytes of samples.jsonl from which samples are taken."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file of the archive."""

    name: str
    data: bytes
    note: str = ""
    """Remark about the file, such as that it is cut; "" if there is none."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An archive that has been written."""

    file: Path
    members: list[Member]
    left_out: list[LeftOut]
    removed: int
    """Number of secrets and names that were removed or replaced."""


def pack(run: Path, out: Path | None, rollouts: int, environment: Mapping[str, str]) -> Packed:
    """Writes the archive of a run. `run`: its directory, or its YAML file if it was refused before it had one. `out`:
    file to write; None: a new file in the current directory. `rollouts`: number of samples and of groups to add.
    `environment`: environment variables, whose secret values are removed. Raises SlimxError if there is no run, or if
    the file exists or cannot be written."""
    directory = _directory_of(run)
    redactor = redactor_of(directory or run, environment)
    name = re.sub(r"[^\w.-]+", "-", redactor.text(run.resolve().stem))
    file = out or Path(f"slimx-{name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if os.path.lexists(file):
        raise SlimxError(f"{file} exists; choose another file with --out", code="pack.out", about=str(file))
    if directory is not None:
        redactor.add_hosts(_hosts(directory))
    members: list[Member] = []
    left_out: list[LeftOut] = []
    for found in _found(run, directory):
        if isinstance(found, LeftOut):
            left_out.append(found)
        else:
            members.append(_member(found, redactor))
    for name, text in _described(directory, environment):
        members.append(Member(name, redactor.text(text).encode()))
    if rollouts and directory is not None:
        members += _rollouts(directory, rollouts, redactor)
    members = _bounded(members, left_out)
    _write(file, members)
    return Packed(file, members, left_out, redactor.count)


def _directory_of(run: Path) -> Path | None:
    """Returns the directory of a run; None if it has none, because it was refused. `run`: the directory or the YAML
    file. Raises SlimxError if there is neither a YAML file nor a directory of a run."""
    if run.is_file():
        try:
            directory = Path(load_config(run).run.dir)
        except SlimxError:  # a file that is refused; the archive shows it
            return None
        if not directory.is_dir():
            return None
        return directory
    if not (run / "config.yaml").is_file() and not (run / "logs").is_dir():
        raise SlimxError(
            f"{run} is not a run directory, because it contains neither config.yaml nor logs; pass the directory of a "
            "run, or the YAML file of a run that was refused",
            code="run.none",
            about=str(run),
        )
    return run


def _found(run: Path, directory: Path | None) -> Iterator[Taken | LeftOut]:
    if run.is_file():
        found = taken(run.resolve().parent, run.resolve().name, LIMITS["config.yaml"])
        yield Taken("run.yaml", found.text, found.size, found.cut) if isinstance(found, Taken) else found
    if directory is not None:
        yield from files_of(directory)


def _member(found: Taken, redactor: Redactor) -> Member:
    note = ""
    if found.cut:
        note = f"the last lines of {found.size:,} bytes"
    text = found.text
    if found.name.endswith(".yaml"):
        try:
            text = yaml.safe_dump(redactor.values(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError:  # a file that is refused for this reason; its lines are searched below
            note = "not valid YAML"
    if found.name == "dropped.jsonl":
        text = _without_rewards(text)
    return Member(found.name, redactor.text(text).encode(), note)


def _without_rewards(text: str) -> str:
    """Returns the lines of dropped.jsonl with only the fields that explain why groups were dropped."""
    kept = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            explained = {"step": record.get("step"), "reason": record.get("reason"), "detail": record.get("detail")}
            kept.append(json.dumps(explained) + "\n")
    return "".join(kept)


def _described(directory: Path | None, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields names and texts of files that describe the run and this machine."""
    if directory is not None and not any((directory / name).is_symlink() for name in LIMITS):
        for name, lines in (("status.txt", _status), ("alerts.txt", _alerts)):
            try:
                text = "\n".join(lines(directory))
            except (OSError, KeyError, TypeError, ValueError, SlimxError) as error:
                text = f"cannot be determined: {one_line(error)}"
            yield name, text + "\n"
    yield "environment.txt", "\n".join(environment_lines(environment)) + "\n"


def _status(directory: Path) -> list[str]:
    return describe_status(run_status(directory))


def _alerts(directory: Path) -> list[str]:
    return list(alert_lines(alerts_of(directory)))


def _rollouts(directory: Path, count: int, redactor: Redactor) -> Iterator[Member]:
    """Yields the newest `count` samples and, from the newest saved step, as many groups."""
    if (directory / "samples.jsonl").exists():
        found = taken(directory, "samples.jsonl", ROLLOUTS)
        if isinstance(found, Taken):
            lines = found.text.splitlines(keepends=True)[-count:]
            yield Member("samples.jsonl", redactor.text("".join(lines)).encode(), "private: text of rollouts")
    saved = list(step_files(directory / DIRECTORY))
    if saved and not _linked(directory):
        try:
            values = step_of(directory, saved[-1], Choice(limit=count))
        except SlimxError as error:
            values = {"problem": str(error)}
        text = json.dumps(values, indent=1)
        yield Member("rollouts.json", redactor.text(text).encode(), "private: text of rollouts")


def _linked(directory: Path) -> bool:
    """Returns True if rollouts or the tokenizer that decodes them are outside the run's directory."""
    folders = (directory / DIRECTORY, directory / TOKENIZER)
    return any(path.is_symlink() for folder in folders for path in (folder, *folder.glob("*")))


def _hosts(directory: Path) -> Iterator[str]:
    """Yields the machines in the addresses of the run's engines and routers."""
    found = taken(directory, "engines.json", MIB)
    if isinstance(found, Taken):
        for url in re.findall(r"https?://[^\s\"']+", found.text):
            yield urlsplit(url).hostname or ""


def _bounded(members: list[Member], left_out: list[LeftOut]) -> list[Member]:
    """Returns the members that fit into `WHOLE` bytes, and adds the others to `left_out`. Redaction can lengthen a
    text."""
    kept = []
    size = 0
    for member in members:
        if size + len(member.data) > WHOLE:
            left_out.append(LeftOut(member.name, f"the archive would contain more than {WHOLE // MIB} MiB"))
        else:
            size += len(member.data)
            kept.append(member)
    return kept


def _write(file: Path, members: list[Member]) -> None:
    """Writes the archive, readable by its owner only, with one folder that contains `members`."""
    folder = file.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz") or "slimx-pack"
    partial = file.with_name(f"{file.name}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for member in members:
                entry = tarfile.TarInfo(f"{folder}/{member.name}")  # its owner is 0, without a name
                entry.size = len(member.data)
                entry.mtime = int(time.time())
                archive.addfile(entry, io.BytesIO(member.data))
        partial.rename(file)
    except OSError as error:
        raise SlimxError(
            f"the archive {file} cannot be written ({error.strerror}); set --out to a writable file",
            code="pack.out",
            about=str(file),
        ) from error
