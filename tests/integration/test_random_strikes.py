"""A run whose trainers are killed or stopped at random moments goes on, with the metrics of one that was left alone.

Apart from `test_trainer_recovery`, whose run goes on and must not end while other tests take minutes.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.integration.runs import completed_steps
from tests.integration.struck import Struck, config_of, ended_as, undisturbed

pytestmark = [pytest.mark.integration, pytest.mark.slow("two whole runs"), pytest.mark.timeout(3600)]

STEPS = 90
"""Enough for all strikes to fall into the run."""
STRIKES = 20


def test_a_run_struck_at_random_moments_has_the_metrics_of_one_left_alone(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    config = config_of(tmp_path / "struck", tiny_model, task_of_sums, count=STEPS, replaced=4 * STRIKES)
    run = Struck(config)
    for number in range(STRIKES):
        # Without regard to phases, and now and then into the recovery before.
        time.sleep(chance.uniform(0, 4))
        before, seen = run.recovered(), completed_steps(run.directory)
        rank, signum = chance.randrange(2), chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        run.process.until(lambda rank=rank: run.rank(rank) is not None)
        phase = run.phases()[-1]
        run.rank(rank).send_signal(signum)
        if chance.random() < 0.8:
            run.goes_on(before, seen)
        print(f"{number}: {signum.name} to rank {rank} after {phase['name']} of step {phase['step']}", flush=True)
    alone = config_of(tmp_path / "alone", tiny_model, task_of_sums, count=STEPS, replaced=1)
    ended_as(run, undisturbed(alone))
    down = sorted(line["seconds"] for line in run.recoveries() if line["name"] == "restart")
    print(f"{len(down)} recoveries, {down[0]:.1f} to {down[-1]:.1f} s, median {down[len(down) // 2]:.1f} s")
