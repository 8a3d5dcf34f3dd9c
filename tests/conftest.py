"""Rules for every test: reasons of its markers, programs that it needs, and its report when its time is over.

`@pytest.mark.needs("chromium")` skips a test, with the reason, where that is missing. In CI (CI=true) nothing may be
missing, so the test fails there: a skipped test would look like a passed one.

One deadline holds for all tests (`timeout` in pyproject.toml) and is there for what hangs. When it strikes, the report
has the Python stack of every process that the session has started.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from slimx.orchestration.lifetime.garbage import MIDDLE, OLD, YOUNG
from tests import stacks
from tests.needed import missing

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Threads of this process and of all that it starts. Torch reads it when it is imported, which the conftests below this
one do. Tests compute little: threads that wait for one another cost a hundred times what they share."""
os.environ.setdefault("RAY_worker_niceness", "0")
"""Priority of Ray's workers, 15 by default: on a loaded machine whole runs would wait for everything else."""

pytest.register_assert_rewrite("tests.unit", "tests.extras", "tests.integration")  # stands assert as tests do


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(program, ...): programs without which the test cannot run")
    stacks.install()
    gc.disable()  # until all is imported: it would look again and again at what stays


def pytest_unconfigure() -> None:
    stacks.remove()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Any:
    """Refuses a marker `slow` or `costly` without its reason, also of a test that `-m` leaves out.

    An error of the collection: an xdist worker would die of a `pytest.UsageError`.
    """
    made = yield
    for item in made if isinstance(made, list) else []:
        for mark in (*item.iter_markers("slow"), *item.iter_markers("costly")):
            if mark.kwargs or len(mark.args) != 1 or not isinstance(mark.args[0], str) or not mark.args[0].strip():
                raise pytest.Collector.CollectError(f"{item.nodeid}: its marker {mark.name} needs the reason, a string")
    return made


def pytest_collection_finish() -> None:
    """Ends the session if a test module has changed torch, which all tests after it would compute with.

    Imported modules stay: the garbage collector, which would take a seventh of the plans' time, passes it over,
    and looks at young objects as seldom as in a driver. At Python's 700 it takes an eighth of the CPU seconds of
    pytest's processes (perf, 2 x86-64 cores, 2026-11-28).
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch.zeros, "__wrapped__"):
        pytest.exit("a test module has called megatron.install() of the extra cpu; give it a process of its own", 3)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for program in mark.args:
            if shutil.which(program) is None:
                missing(f"needs {program}, which is not on PATH: `make ci-deps` installs it")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_model_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the copies that servers make of a checkpoint's code out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(tmp_path_factory.getbasetemp() / "modules"))
        yield


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """Asks the processes before pytest-timeout fails the test: its fixtures then end them."""
    timer = yield
    fail = signal.getsignal(signal.SIGALRM)

    def ask_and_fail(signum: int, frame: Any) -> None:
        item.add_report_section("call", "processes", stacks.collect())
        fail(signum, frame)

    signal.signal(signal.SIGALRM, ask_and_fail)
    return timer
