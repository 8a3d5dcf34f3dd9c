"""The table of kernels in docs/engines.md is what SGLang resolves from the facts of GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimx.config.load import load_config
from tests.warm.sglang import run_with_sglang
from tools.docs.make_backends import PAGE, SHIPPED

SERVED = [file for file in SHIPPED if load_config(file, []).served.policy]
OFTEN = {"deepseek-v3-gb300", "qwen3-30b-a3b-async-fp8"}


def resolved(files: list[Path]) -> list[str]:
    ran = run_with_sglang("-m", "tools.docs.make_backends", "--rows", *map(str, files))
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [line for line in ran.stdout.splitlines() if line.startswith("|")]


def check(files: list[Path]) -> None:
    rows = resolved(files)
    assert len(rows) >= 2 * len(files)
    assert [row for row in rows if row not in PAGE.read_text().splitlines()] == [], "run tools.docs.make_backends"


def test_rows_of_the_table_are_what_sglang_resolves() -> None:
    check([file for file in SERVED if file.stem in OFTEN])


@pytest.mark.slow("full grid of shipped configurations")
def test_so_are_all_others() -> None:
    check([file for file in SERVED if file.stem not in OFTEN])


@pytest.mark.parametrize("file", SERVED, ids=lambda file: file.stem)
def test_every_configuration_is_accepted_on_its_gpu(file: Path) -> None:
    gpu = "sm103" if load_config(file, []).cluster.gpu == "gb300" else "sm90"
    rows = [[*map(str.strip, line.split("|"))] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    matching = [row for row in rows if row[1].startswith(f"`{file.stem}`") and row[2] == gpu]
    assert (
        matching and {row[4] for row in matching} <= {"bf16", "bfloat16"} and {row[10] for row in matching} == {"yes"}
    )
