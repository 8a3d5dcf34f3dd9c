"""Makes the archive of a run: its files without secrets, its status and alerts, and the environment."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
PRIVATE = "private: text of rollouts"


@dataclass(frozen=True, slots=True)
class Source:
    """A text that belongs into the archive, before redaction."""

    name: str
    text: str
    note: str = ""
    found: Taken | None = None
    """The file of the run with this text; None if the text is made for the archive."""
    values: tuple[object, ...] = ()
    """Value of the YAML or JSON file, or of each line of the JSONL file; empty if the text has none."""

    def redacted(self, redactor: Redactor) -> bytes:
        """Returns the bytes of the text without secrets and names."""
        text = self.text
        if self.name.endswith(".jsonl"):
            lines = []
            for line, value in zip(text.splitlines(), self.values, strict=False):
                cleaned = redactor.values(value)
                lines.append(line if cleaned == value else json.dumps(cleaned, ensure_ascii=False))
            text = "".join(f"{line}\n" for line in lines) or text
        elif self.values:
            cleaned = redactor.values(self.values[0])
            if self.name.endswith(".yaml"):
                text = yaml.safe_dump(cleaned, sort_keys=False, allow_unicode=True, width=sys.maxsize)
            elif cleaned != self.values[0]:
                text = json.dumps(cleaned, indent=1, ensure_ascii=False)
        text = redactor.text(text)
        if self.found is None:
            return text.encode()
        return self.found.shortened(text)


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
    if directory is not None:
        redactor.add_hosts(_hosts(directory))
    left_out: list[LeftOut] = []
    sources: list[Source] = []
    for found in _found(run, directory):
        if isinstance(found, LeftOut):
            left_out.append(found)
        else:
            sources.append(_source(found))
    for name, text in _described(directory, environment):
        sources.append(Source(name, text))
    if rollouts and directory is not None:
        sources += _rollouts(directory, rollouts)
    for source in sources:  # before any of them is redacted, because each may name what the others contain
        redactor.learn(source.text)
        redactor.learn_values(list(source.values))
    file = out or Path(f"slimx-{_run_name(run, redactor)}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if os.path.lexists(file):
        raise SlimxError(f"{file} exists; choose another file with --out", code="pack.out", about=str(file))
    members: list[Member] = []
    for source in sources:
        name = _unused(redactor.file_name(source.name), members)
        members.append(Member(name, source.redacted(redactor), source.note))
    members = _bounded(members, left_out)
    folder = redactor.file_name(file.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz"))
    _write(file, folder or "slimx-pack", members)
    return Packed(file, members, left_out, redactor.count)


def _run_name(run: Path, redactor: Redactor) -> str:
    """Returns the name of the run's directory or YAML file, for the name of its archive."""
    name = run.resolve().name
    if run.is_file():
        name = name.removesuffix(".yaml").removesuffix(".yml")
    return re.sub(r"[^\w.-]+", "-", redactor.text(name))


def _unused(name: str, members: list[Member]) -> str:
    """Returns `name`, with a number before its ending if one of `members` has this name: redaction can make two names
    equal."""
    taken_names = {member.name for member in members}
    path = Path(name)
    number = 1
    while name in taken_names:
        number += 1
        name = str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    return name


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
        yield replace(found, name="run.yaml") if isinstance(found, Taken) else found
    if directory is not None:
        yield from files_of(directory)


def _source(found: Taken) -> Source:
    """Returns a file of the run with the values in it, if it is valid YAML or JSON."""
    note = ""
    if found.cut:
        note = f"the last lines of {found.size:,} bytes"
    text = found.text
    if found.name == "dropped.jsonl":
        text = _without_rewards(text)
    values: tuple[object, ...] = ()
    try:
        if found.name.endswith(".yaml"):
            values = (yaml.safe_load(text),)
        elif found.name.endswith(".json"):
            values = (json.loads(text),)
        elif found.name.endswith(".jsonl"):
            values = tuple(_lines(text))
    except yaml.YAMLError:  # a file that is refused for this reason; its lines are searched
        note = "not valid YAML"
    except (ValueError, RecursionError):  # cut or damaged
        pass
    return Source(found.name, text, note, found, values)


def _lines(text: str) -> Iterator[object]:
    """Yields the value of each line of a JSONL file, None for a line that is not valid."""
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield None


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


def _rollouts(directory: Path, count: int) -> Iterator[Source]:
    """Yields the newest `count` samples and, from the newest saved step, as many groups."""
    if (directory / "samples.jsonl").exists():
        found = taken(directory, "samples.jsonl", ROLLOUTS)
        if isinstance(found, Taken):
            text = "".join(found.text.splitlines(keepends=True)[-count:])
            yield Source("samples.jsonl", text, PRIVATE, values=tuple(_lines(text)))
    saved = list(step_files(directory / DIRECTORY))
    if saved and not _linked(directory):
        try:
            values = step_of(directory, saved[-1], Choice(limit=count))
        except SlimxError as error:
            values = {"problem": str(error)}
        yield Source("rollouts.json", json.dumps(values, indent=1), PRIVATE, values=(values,))


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


def _write(file: Path, folder: str, members: list[Member]) -> None:
    """Writes the archive, readable by its owner only, with one folder that contains `members`."""
    partial = None
    try:
        descriptor, partial = tempfile.mkstemp(suffix=".partial", prefix=f"{file.name}.", dir=file.parent)  # mode 0600
        with open(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for member in members:
                entry = tarfile.TarInfo(f"{folder}/{member.name}")  # its owner is 0, without a name
                entry.size = len(member.data)
                entry.mtime = int(time.time())
                archive.addfile(entry, io.BytesIO(member.data))
        os.replace(partial, file)
    except OSError as error:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
        raise SlimxError(
            f"the archive {file} cannot be written ({error.strerror}); set --out to a writable file",
            code="pack.out",
            about=str(file),
        ) from error
