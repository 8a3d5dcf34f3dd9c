"""`slimx plan` answers every wrong configuration in seconds: a report or one sentence, exit code 0 or 2."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from slimx import cli
from tests.unit.config.config_mutations import ROOT, Case, case
from tools.rings.machine import REFERENCE_S, loop_seconds

CPU_SECONDS = 20.0
"""CPU seconds that one plan may take on the reference machine: another order of growth takes more."""


def too_long(seconds: float) -> bool:
    """Returns True for more CPU seconds than `CPU_SECONDS`, on a slower machine as many times more as it is slower."""
    return seconds > CPU_SECONDS and seconds > CPU_SECONDS * loop_seconds() / REFERENCE_S


def problem(
    mutated: Case, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """Returns the fault of the output for `mutated`; None if it has none."""
    file = folder / "run.yaml"
    file.write_text(mutated.text)
    monkeypatch.setattr(sys, "argv", ["slimx", "plan", str(file), *mutated.overrides])
    began, code = time.process_time(), 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:  # a traceback, whatever it is of
        return f"{mutated.what}: {type(error).__name__}: {str(error)[:200]}"
    seconds = time.process_time() - began
    _, output = capsys.readouterr()
    if code not in (0, 2):
        return f"{mutated.what}: exit code {code}"
    lines = output.splitlines()
    usage = bool(lines) and lines[0].startswith("Usage:")  # arguments that the command line itself refuses
    if not usage and (bool(lines) != (code == 2) or not all(line.startswith("slimx: ") for line in lines)):
        return f"{mutated.what}: exit code {code} with {output[:300]!r}"
    if any(ord(letter) < 32 and letter != "\n" for letter in output):
        return f"{mutated.what}: control characters in {output[:300]!r}"
    if too_long(seconds):
        return f"{mutated.what}: {seconds:.1f} s"
    return None


def answers(cases: Iterable[Case], folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)  # model.path of the shipped configurations is relative to it
    problems = [found for case in cases if (found := problem(case, folder, capsys, monkeypatch)) is not None]
    assert not problems, "\n".join(problems)


@pytest.mark.timeout(1800)  # for hangs: it takes 10 s
def test_wrong_configurations_are_answered(tmp_path, capsys, monkeypatch):
    answers((case(seed, small=True) for seed in range(20)), tmp_path, capsys, monkeypatch)


@pytest.mark.slow("500 configurations")
@pytest.mark.timeout(2 * 3600)
def test_hundreds_of_others_are_answered_too(tmp_path, capsys, monkeypatch):
    """Tries others in each run, by the seed of the order."""
    answers(map(case, random.sample(range(2**32), 500)), tmp_path, capsys, monkeypatch)


FROZEN_OUT = "rollout.engines=[{count: 8, nodes: 4, tensor: 32, expert: 32, dp_attention: 32, sglang: %s}]"
TOO_LARGE = {
    "an engine without room": ("kimi-k2", FROZEN_OUT % "{mem_fraction_static: 0.1, moe_dense_tp_size: 1}"),
    "an impossible share": ("kimi-k2", FROZEN_OUT % "{mem_fraction_static: 16}"),
    "no engines, moments on the GPU": (
        "glm-4.5",
        "rollout.engines=[]",
        "algorithm.name=sft",
        "schedule.colocate=false",
        "trainer.optimizer.offload_fraction=0",
    ),
    "bf16 engines": ("glm-4.5", "publish.quantize=null"),
    "a small GPU for a large model": ("deepseek-v3", "cluster.gpu_memory_gib=20"),
    "a small GPU": ("qwen3-30b-a3b", "cluster.gpu_memory_gib=20"),
    "too many ranks": ("qwen3-30b-a3b", "trainer.world_size=1000000000"),
    "too many tokens": ("qwen3-30b-a3b", f"trainer.max_tokens_per_microbatch={10**30}"),
}
SELDOM = {"an engine without room", "bf16 engines", "a small GPU for a large model"}
"""They take longest, and are refused where others are."""


@pytest.mark.timeout(900)  # for hangs: seconds are counted by the processor's clock
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow("full grid of configurations")] if n in SELDOM else [])
        for n in TOO_LARGE
    ],
)
def test_a_run_that_cannot_fit_is_answered_too(name: str, tmp_path, capsys, monkeypatch):
    stem, *overrides = TOO_LARGE[name]
    text = (ROOT / "configs" / "moe" / f"{stem}.yaml").read_text()
    answers([Case(name, text, overrides)], tmp_path, capsys, monkeypatch)
