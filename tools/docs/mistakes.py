"""Mistakes that new users make, and tests/golden/mistakes.txt, which shows the answers of slimx.

Each mistake is a command in the directory of a small valid run, with one file changed. Nothing trains: a mistake that
is not refused before a run starts is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from slimx.extras.quickstart.make_model import make_model
from slimx.orchestration import session
from tools.docs.typed import typed_in
from tools.docs.wrong_inputs import commands, configuration, data, hooks, names, runs, scripts
from tools.docs.wrong_inputs.mistake import RUN, Mistake

PAGE = Path(__file__).parents[2] / "tests" / "golden" / "mistakes.txt"
PROMPTS = """\
{"messages": [{"role": "user", "content": "3+4="}], "answer": "7"}
{"messages": [{"role": "user", "content": "5+1="}], "answer": "6"}
"""
LONG = 8
"""Maximum number of lines of a file that the page shows."""
MISTAKES = (
    *commands.COMMAND_LINE,
    *scripts.SCRIPTS,
    *configuration.FILE,
    *configuration.NAMES,
    *configuration.MODEL,
    *data.PROMPTS,
    *hooks.HOOKS,
    *runs.RUNS,
    *commands.INSTALLATION,
    *commands.LISTS_AND_FIRST_FILES,
    *names.NAMES,
)


def page() -> str:
    """Returns the page: for every mistake the changed files, the command, its output and its exit status."""
    return "\n".join(map(transcript, MISTAKES))


def transcript(mistake: Mistake) -> str:
    """Returns one mistake as the page shows it."""
    lines = [f"# {mistake.name}"]
    for path, content in mistake.files.items():
        changed = _changed(path, content)
        lines += [f"{path}:", *(f"  | {line}" for line in changed)] if changed else [f"{path}: (as it is)"]
    with _named(mistake), mock.patch.object(session, "run_with_ray", side_effect=_started):
        status, output = typed_in(_files() | dict(mistake.files), shlex.split(mistake.command))
    if mistake.command.startswith("plan "):
        output = re.sub(r"^(?!slimx: ).*\n", "", output, flags=re.MULTILINE)  # the plan itself is no message
    output = re.sub(r"(?<= )\d+\.\d\d$", "S", output, flags=re.MULTILINE)  # seconds of the table of --hooks
    return "\n".join([*lines, f"$ slimx {mistake.command}", f"{output}[{status}]", ""])


@contextlib.contextmanager
def _named(mistake: Mistake) -> Iterator[None]:
    """Adds the mistake's name to errors that are raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"the mistake: {mistake.name}")
        raise


def _started(*_: Any) -> None:
    raise AssertionError("this mistake is not refused: a run would start")


def _changed(path: str, content: str | bytes) -> list[str]:
    """Returns the lines of a file that differ from the valid run's. Long and binary lines are left out."""
    if isinstance(content, bytes):
        return []
    original = _files().get(path, b"")
    before = (original if isinstance(original, str) else original.decode()).splitlines()
    return [line.replace("\t", "<TAB>") for line in content.splitlines() if line not in before][:LONG]


@functools.cache
def _files() -> dict[str, str | bytes]:
    """Returns the files of a valid run, by path."""
    with tempfile.TemporaryDirectory() as name:
        make_model(name, seed=1)
        model = {f"model/{file.name}": file.read_bytes() for file in Path(name).iterdir()}
    return {"run.yaml": RUN, "prompts.jsonl": PROMPTS, **model}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
