"""Programs of tools/ and benchmarks/ know the options that pages name, and answer wrong use, and what the
machine lacks, in a sentence and exit status 2."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from slimx.extras.quickstart.make_model import make_model
from tests.documents import COMMANDS, python_program
from tests.programs import run_program
from tests.warm.interpreter import ROOT


def programs() -> list[list[str]]:
    """Returns the arguments of Python that start each program."""
    found = []
    for path in sorted([*(ROOT / "tools").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]):
        if '__name__ == "__main__"' in path.read_text():
            name = path.relative_to(ROOT)
            module = ".".join(name.with_suffix("").parts).removesuffix(".__main__")
            found.append(["-m", module] if name.parts[0] == "tools" else [str(name)])
    return found


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
    right = [words for words in sorted(named) if len(words) > (2 if words[0] == "-m" else 1)]
    wrong = [[*words, "--no-such-option"] for words in programs()]
    benchmarks = [words[0] for words in programs() if words[0] != "-m"]
    none = [
        [file, f"--{option}", "0"]
        for file in benchmarks
        for option in re.findall(r'"--(pairs|rounds|steps|window)"', (ROOT / file).read_text())
    ]
    taken = [(words, *run_program(words, tmp_path, parse_only=True)) for words in right]
    assert [row for row in taken if row[1] != 0] == []
    refused = [(words, *run_program(words, tmp_path, parse_only=True)) for words in (*wrong, *none)]
    refused += [(words, *run_program(words, tmp_path)) for words in LACKING]
    assert [row for row in refused if row[1] != 2 or "Traceback" in row[2] or not row[2].strip()] == []
    status, output = run_program(["-m", "slimx.extras.quickstart.make_model", "--out", "there"], tmp_path)
    assert status == 0, output
    make_model(tmp_path / "here")
    made, again = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("here", "there"))
    assert made == again, "the same seed gives the same bytes in another process"
