"""Trainers that are killed or stopped are replaced in a run that goes on, with the metrics of one that was left alone.

All moments strike one run: a start takes longer than a recovery.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.chosen import chosen_cases
from tests.integration.runs import completed_steps
from tests.integration.struck import Moment, Struck, config_of, ended_as, undisturbed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

MOMENTS = [
    *(
        pytest.param(Moment(phase, rank, signal.SIGKILL), marks=pytest.mark.slow("full grid of moments"))
        for phase, rank in (("generate", 1), ("train", 0), ("publish", 0), ("save", 1))
    ),
    Moment("train", 1, signal.SIGSTOP),
]


@pytest.fixture(scope="module")
def run(
    request: pytest.FixtureRequest, tiny_model: Path, task_of_sums: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Struck]:
    """A run that is struck; in the end it must have the metrics of one that was not."""
    base, steps = tmp_path_factory.mktemp("recovery"), 4 + 4 * len(chosen_cases(request))
    struck = Struck(config_of(base / "struck", tiny_model, task_of_sums, count=steps, replaced=20), ahead=3)
    yield struck
    expected = undisturbed(config_of(base / "alone", tiny_model, task_of_sums, count=steps, replaced=20))
    ended_as(struck, expected)


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_killed_or_stopped_rank_is_replaced_during_the_run(moment: Moment, run: Struck) -> None:
    before, seen = run.recovered(), completed_steps(run.directory)
    run.strike(moment)
    began = time.monotonic()
    run.goes_on(before, seen)
    print(
        f"{moment}: the next step after {time.monotonic() - began:.1f} s; {run.recoveries()[-1]['seconds']:.1f} s down"
    )
