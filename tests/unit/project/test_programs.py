"""Programs of tools/ and benchmarks/ know the options that pages name, and answer wrong use, and what the
machine lacks, in a sentence and exit status 2."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tests.documents import COMMANDS
from tests.forked import ROOT, Run, run_all
from tests.unit.project.page_stand import python_program
from tools.quickstart.make_model import make_model


def programs() -> list[list[str]]:
    """The arguments of Python that start each program."""
    found = []
    for path in sorted([*(ROOT / "tools").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]):
        if '__name__ == "__main__"' in path.read_text():
            name = path.relative_to(ROOT)
            module = ".".join(name.with_suffix("").parts).removesuffix(".__main__")
            found.append(["-m", module] if name.parts[0] == "tools" else [str(name)])
    return found


SHARED = (
    "torch",
    "slimx.orchestration.prepare",
    "slimx.convert",
    "slimx.rollout",
    "slimx.cli",
    "tools.quickstart.make_model",
)
"""Modules that many programs import."""
LACKING = [
    ["benchmarks/start.py", "."],  # a directory of TRL
    ["benchmarks/start_trl.py", "model", "prompts", "out"],
    ["-m", "tools.first_hour.all_reduce", "--device", "cpu"],  # torchrun
    ["-m", "tools.first_hour.probes", "memory_saver"],
    ["-m", "tools.gpu.machine"],
    ["-m", "tools.gpu.probes", "attention"],
    ["-m", "tools.gpu.scales", "out"],
]
"""Commands that need what is not here: a GPU, unless the row says it."""


def test_programs_take_the_options_of_pages_and_refuse_wrong_ones(tmp_path: Path) -> None:
    named = {tuple(arguments) for words in COMMANDS if (arguments := python_program(words)) is not None}
    found = [find_spec(words[1]) if words[0] == "-m" else (ROOT / words[0]).is_file() for words in named]
    assert all(found), named
    right = [Run(words, parse_only=True) for words in sorted(named) if len(words) > (2 if words[0] == "-m" else 1)]
    wrong = [Run([*words, "--no-such-option"], parse_only=True) for words in programs()]
    benchmarks = [words[0] for words in programs() if words[0] != "-m"]
    none = [
        Run([file, f"--{option}", "0"], parse_only=True)
        for file in benchmarks
        for option in re.findall(r'"--(pairs|rounds|steps|window)"', (ROOT / file).read_text())
    ]
    refused = [*wrong, *none, *(Run(words) for words in LACKING)]
    runs = [*right, *refused, Run(["tools/quickstart/make_model.py", "--out", "there"])]
    done = [(run, *row) for run, row in zip(runs, run_all(runs, tmp_path, SHARED), strict=True)]
    assert [(run.words, status, output) for run, status, output in done[: len(right)] if status != 0] == []
    assert [
        (run.words, status, output)
        for run, status, output in done[len(right) : -1]
        if status != 2 or "Traceback" in output or not output.strip()
    ] == []
    assert done[-1][1] == 0, done[-1]
    make_model(tmp_path / "here")
    made, again = ({each.name: each.read_bytes() for each in (tmp_path / name).iterdir()} for name in ("here", "there"))
    assert made == again, "the same seed gives the same bytes in another process"
