"""The soak's account of prompts finds what is lost or doubled, and its slopes find what grows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tools.soak.accounts import balance
from tools.soak.census import Sample, kind_of
from tools.soak.slopes import PER, slope_of
from tools.soak.strikes import Strike, Strikes
from tools.soak.table import growths
from tools.soak.task import last_step

WHOLE = {
    "step": 2,
    "admitted": 6,
    "trained": [0, 3],
    "dropped": [(1, "filter"), (2, "reward failed")],
    "still_open": [4, 5],
    "recorded": [1, 2],
}


def test_a_balanced_account_has_every_prompt_once() -> None:
    account = balance(**WHOLE)
    assert not account.problems
    assert (account.trained, account.dropped, account.open) == (2, {"filter": 1, "reward failed": 1}, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"admitted": 7},
        {"trained": [0]},
        {"trained": [0, 3, 3]},
        {"trained": [0, 3, 4]},
        {"dropped": [(1, "filter")]},
        {"still_open": [4, 5, 6]},
        {"recorded": [1]},
        {"recorded": [1, 2, 2]},
    ],
)
def test_each_lost_or_duplicated_item_is_one_problem(wrong: dict) -> None:
    assert len(balance(**{**WHOLE, **wrong}).problems) == 1


def noise(seed: int, count: int) -> np.ndarray:
    """Returns errors each of which depends on the one before."""
    random, out = np.random.default_rng(seed), np.zeros(count)
    for at in range(1, count):
        out[at] = 0.5 * out[at - 1] + random.normal()
    return out


def test_the_slope_that_several_processes_share_is_within_its_interval() -> None:
    hits, steps = 0, np.arange(100) * 10.0
    for seed in range(40):
        series = [(steps + 1e4 * n, 50 * n + 0.02 * steps + noise(100 * seed + n, 100)) for n in range(3)]
        slope = slope_of(series)
        assert (slope.processes, slope.samples, slope.steps) == (3, 300, 3 * 990)
        hits += slope.low <= 0.02 * PER <= slope.high
    assert hits >= 34  # 38 of 40 on average, if the interval is right


def sample(step: int, size: float, pid: int = 1) -> Sample:
    return Sample(step, "driver", pid, 0.0, size, size, fds=9, threads=3, sockets=0, ports=0, shm=0.0)


@pytest.mark.parametrize(
    ("size", "verdict"),
    [
        (lambda step: 0.01 * step, "grows"),
        (lambda step: 0.0001 * step, "flat"),
        (lambda step: min(step, 100), "flat"),  # a process that fills its caches first
        (lambda step: 30.0 * (step % 700 > 350), "open"),
    ],
)
def test_growth_is_distinguished_from_fluctuation(size: Callable[[int], float], verdict: str) -> None:
    found = growths([sample(step, size(step)) for step in range(0, 2000, 20)], warm=100)
    by_measure = {growth.measure: growth.verdict for growth in found}
    assert by_measure == {"anonymous": verdict, "pss": verdict} | dict.fromkeys(
        ("fds", "threads", "sockets", "ports", "shm"), "flat"
    )


def test_one_process_after_another_is_no_growth() -> None:
    lives = [sample(step, 10.0 * (step // 500), pid=step // 500) for step in range(0, 2000, 10)]
    (memory, *_) = growths(lives, warm=100)
    assert (memory.slope.value, memory.slope.processes) == (0.0, 4)


@pytest.mark.parametrize(
    ("name", "command", "kind"),
    [
        ("sglang::scheduler", "python -m slimx.engines.server.launch --keys -", "engine: scheduler"),
        ("python", "python -m slimx.engines.server.launch --keys -", "engine: HTTP server"),
        ("python", "python -m slimx.runtime.process -- python -m slimx.engines.server.launch", "engine: guard"),
        ("python", "python -m slimx.runtime.process -- python -m slimx.engines.server.router_launch", "router: guard"),
        ("ray::TrainerWork", "ray::TrainerWorker.train_step", "trainer"),
        ("raylet", "/ray/raylet --x", "Ray: raylet"),
        ("python", "python -m slimx.cli train config.yaml", "driver"),
        ("sleep", "sleep 1", "other"),
    ],
)
def test_a_process_is_known_by_its_name_and_command(name: str, command: str, kind: str) -> None:
    assert kind_of(name, command) == kind


def test_the_last_step_is_read_though_a_line_is_being_written(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    lines = [json.dumps({"step": step, "metrics": {}}) for step in range(1, 3000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3000, "me']))
    assert last_step(tmp_path) == 2999


def test_a_strike_is_recovered_from_after_three_steps(tmp_path: Path) -> None:
    file = tmp_path / "strikes.jsonl"
    strikes = Strikes(1, 1, file)
    strikes.done.append(Strike("router", 9, 20, 0.0))
    for step in (12, 22):
        strikes.look(step)
        assert strikes.pending is not None
    strikes.look(23)
    assert strikes.pending is None
    assert [(strike.kind, strike.step) for strike in Strikes(1, 1, file).done] == [("router", 20)]
