"""Engines without a server: states, arguments, and process trees."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest
import torch

from slimx.adapters.sglang import plugin as sglang_plugin
from slimx.engines.server.arguments import check_server_args, command_line, server_fields
from slimx.engines.server.attestation import check_backends, check_ranks
from slimx.engines.server.engine import TRANSITIONS, Engine, State
from slimx.engines.server.spec import EngineSpec, server_args, server_argv, server_env
from slimx.layout.kernels import PLAIN
from slimx.layout.ranks import EngineSizes
from slimx.numerics.mode import NumericsMode
from slimx.runtime.process import LOOK_S, SupervisedProcess
from tests.processes import lives, wait_for
from tests.refusals import refused
from tests.unit.engines.attestation_stand import attesting

CPU = EngineSpec("e", "/model", "float32", "cpu", 31000, max_total_tokens=512, seed=7)


# States and arguments -----------------------------------------------------------------------------------------------


def test_only_the_transitions_of_the_table_are_allowed(tmp_path: Path) -> None:
    for source in State:
        for target in State:
            engine = Engine(CPU, tmp_path / "log")
            engine.state = source
            if target in TRANSITIONS[source]:
                engine.move(target)
                assert engine.state is target
            else:
                with refused("engine.transition", about=str(target)):
                    engine.move(target)


def test_dirty_weights_are_served_only_after_a_verification() -> None:
    assert TRANSITIONS[State.DIRTY] == {State.DIRTY, State.PAUSED, State.DEAD}
    assert State.READY not in TRANSITIONS[State.ASLEEP]


async def test_calls_in_a_wrong_state_are_refused_without_asking_the_server(tmp_path: Path) -> None:
    engine = Engine(CPU, tmp_path / "log")
    for state, call in (
        (State.READY, engine.resume),
        (State.READY, engine.load),
        (State.DIRTY, engine.resume),
        (State.ASLEEP, engine.resume),
        (State.STARTING, engine.pause),
        (State.DIRTY, engine.sleep),
    ):
        engine.state = state
        with refused("engine.state", about=call.__name__):
            await call()
    for state in (State.PAUSED, State.DIRTY, State.ASLEEP):
        engine.state = state
        await engine.pause()
        assert engine.state is state, "it generates nothing as it is"


async def test_graphs_sleep_and_come_back_with_the_kv_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = Engine(CPU, tmp_path / "log"), []

    async def called(path: str, body: Any = None) -> None:
        calls.append((path, sorted((body or {}).get("tags", ()))))

    monkeypatch.setattr(engine, "call", called)
    engine.state = State.PAUSED
    await engine.sleep()
    await engine.wake(("weights",))
    engine.state = State.PAUSED  # verified
    await engine.resume()
    assert calls == [
        ("/release_memory_occupation", ["cuda_graph", "kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["cuda_graph", "kv_cache"]),
        ("/continue_generation", []),
    ]
    assert engine.state is State.READY and not engine.asleep


async def test_waking_everything_leaves_the_weights_unverified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(CPU, tmp_path / "log")
    monkeypatch.setattr(engine, "call", AsyncMock())
    engine.state = State.PAUSED
    await engine.sleep()
    await engine.wake()
    assert engine.state is State.DIRTY and not engine.asleep


async def test_an_engine_owns_its_weights_before_the_first_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    async def call(path: str, body: Any = None) -> None:
        called.append(path)

    found = {}
    for state in State:
        engine = Engine(CPU, tmp_path / "log")
        engine.state = state
        engine.asleep = {"weights", "kv_cache"} if state is State.ASLEEP else set()
        monkeypatch.setattr(engine, "call", call)
        called.clear()
        await engine.hold_weights()
        found[state] = list(called), engine.state
    weights = "/resume_memory_occupation"
    assert found.pop(State.READY) == (["/pause_generation", "/release_memory_occupation", weights], State.DIRTY)
    assert found.pop(State.ASLEEP) == ([weights], State.DIRTY)
    assert found == {state: ([], state) for state in found}, "one that waits for a publication holds them already"


def test_a_cpu_server_gets_the_cpus_flags_and_a_gpu_server_does_not() -> None:
    cpu, gpu = server_argv(CPU), server_argv(replace(CPU, device="cuda", dtype="bfloat16", max_total_tokens=None))
    assert cpu[1:7] == ["-P", "-m", "slimx.engines.server.launch", "--keys", "-", "--"]
    for flag, value in (("--model-path", "/model"), ("--port", "31000"), ("--random-seed", "7"), ("--device", "cpu")):
        assert cpu[cpu.index(flag) + 1] == value
    for flag in ("--sleep-on-idle", "--disable-cuda-graph", "--attention-backend", "--disable-radix-cache"):
        assert flag in cpu and flag not in gpu
    for flag in ("--enable-return-routed-experts", "--custom-weight-loader"):
        assert flag in cpu and flag in gpu
    assert "--max-total-tokens" not in gpu
    beside = replace(CPU, device="cuda", dtype="bfloat16", max_total_tokens=None, sleeps=True)
    assert "--sleep-on-idle" in server_argv(beside), "trainers need the cores while it sleeps"


class Replacing(NumericsMode):
    """A mode with operations of its own."""

    replaces_layers = True


def test_inference_is_deterministic_on_the_cpu_and_in_exact_mode() -> None:
    fast = replace(CPU, device="cuda", dtype="bfloat16")
    for spec, deterministic in ((CPU, True), (replace(fast, numerics=Replacing()), True), (fast, False)):
        args = server_args(spec)
        assert args.get("enable_deterministic_inference", False) is deterministic
        assert (args.get("sampling_backend") == "pytorch") is not deterministic
    assert server_args(replace(fast, sglang={"enable_deterministic_inference": True}))["enable_deterministic_inference"]
    with refused("sglang.taken", about="rollout.engines.sglang.sampling_backend"):
        server_args(replace(fast, sglang={"sampling_backend": "flashinfer"}))


def test_ranks_of_a_cpu_server_are_bound_to_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    for threads in (1, 2):
        two = replace(CPU, sizes=EngineSizes(tensor=2), threads=threads)
        bound = [share.split(",") for share in server_env(two)["SGLANG_CPU_OMP_THREADS_BIND"].split("|")]
        taken = [cores[k % len(cores)] for k in range(2 * threads)]
        assert [int(core) for share in bound for core in share] == taken and len(bound) == 2
    for alone in (CPU, replace(CPU, sizes=EngineSizes(tensor=2), device="cuda")):
        assert "SGLANG_CPU_OMP_THREADS_BIND" not in server_env(alone)


def test_users_arguments_reach_the_command_line_but_not_over_ours() -> None:
    argv = server_argv(replace(CPU, sglang={"log_level": "info", "chunked_prefill_size": 64, "sleep_on_idle": False}))
    assert argv[argv.index("--log-level") + 1] == "info" and argv[argv.index("--chunked-prefill-size") + 1] == "64"
    assert "--sleep-on-idle" not in argv
    with refused("sglang.taken", about="rollout.engines.sglang.port"):
        server_argv(replace(CPU, sglang={"port": 1}))


@pytest.mark.parametrize(
    ("fact", "found"), [("dtype", "bfloat16"), ("sizes", asdict(EngineSizes(tensor=2))), ("draft", True)]
)
def test_a_rank_that_attests_another_fact_is_refused_by_it(fact: str, found: Any) -> None:
    with refused(f"engine.{fact}", about="e rank 1"):
        check_ranks([attesting(), attesting(**{fact: found})], CPU)
    if fact == "draft":
        check_ranks([attesting(draft=True)], replace(CPU, frozen=True))


def test_unknown_and_ill_typed_arguments_are_refused_with_the_nearest_name() -> None:
    for args, code, named in (
        ({"mem_fraction_sttic": 0.5}, "sglang.argument", "mem_fraction_static"),
        ({"tp-size": 2}, "sglang.argument", "tp_size"),
        ({"qqqq_zzzz": 1}, "sglang.argument", "--help"),
        ({"tp_size": "2"}, "sglang.type", "int"),
        ({"mem_fraction_static": True}, "sglang.type", "Optional[float]"),
        ({"sleep_on_idle": 1}, "sglang.type", "bool"),
    ):
        with refused(code, about=f"rollout.engines.sglang.{next(iter(args))}") as caught:
            check_server_args(args)
        assert named in re.split(r"[\s?;`]+", str(caught.value)), "the nearest name, or the type"


def test_arguments_are_read_without_importing_sglang() -> None:
    code = (
        "import sys; from slimx.engines.server.spec import check_server_args\n"
        "check_server_args({'tp_size': 1}); print('sglang' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert {"tp_size", "custom_weight_loader", "enable_return_routed_experts"} <= server_fields().keys()


def test_lists_and_maps_become_arguments() -> None:
    args = {"served_model_name": "m", "custom_weight_loader": ["a.b", "c.d"], "enable_metrics": False, "dp_size": None}
    assert command_line(args) == ["--served-model-name", "m", "--custom-weight-loader", "a.b", "c.d"]


def attested(**backends: str) -> dict:
    """Returns a rank's attestation of its kernels, on Blackwell, with experts in fp8."""
    return {"capability": 10, "experts": True, "fp8": True, "backends": {**PLAIN, **backends}}


def test_kernels_of_another_layout_are_refused_on_blackwell() -> None:
    gpu = replace(CPU, device="cuda", dtype="bfloat16")
    check_backends([attested()], gpu)
    for field, value in (("moe_runner_backend", "flashinfer_trtllm"), ("fp8_gemm_runner_backend", "auto")):
        with refused("engine.backend", about=field):
            check_backends([attested(), attested(**{field: value})], gpu)
        check_backends([attested(**{field: value}) | {"capability": 9}], gpu)
        check_backends([attested(**{field: value}) | {"experts": False, "fp8": False}], gpu)


# Processes ----------------------------------------------------------------------------------------------------------

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for depth in range(2):
    if os.fork() == 0:
        os.setsid()  # not in the group of its parent any more
        if os.fork():
            os._exit(0)  # and an orphan
print("up", flush=True)
time.sleep(600)
"""


def test_stop_ends_a_stubborn_tree_with_its_orphans(tmp_path: Path) -> None:
    process = SupervisedProcess("stubborn", [sys.executable, "-c", STUBBORN], tmp_path / "log")
    process.start()
    wait_for(lambda: process.tail().count("up") == 4)
    tree = psutil.Process(process.pid).children(recursive=True)
    assert len(tree) >= 4 and process.poll() is None
    start = time.monotonic()
    process.stop(grace_s=1)
    assert time.monotonic() - start < 60
    assert not [p for p in tree if lives(p)] and process.poll() == 128 + signal.SIGKILL
    process.stop()


def test_a_killed_owner_or_guard_takes_the_tree_along(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom slimx.runtime.process import SupervisedProcess\n"
        f"p = SupervisedProcess('x', [sys.executable, '-c', {STUBBORN!r}], {str(tmp_path / 'log')!r})\n"
        "p.start(); print(p.pid, p._temporary, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid, folder = owner.stdout.readline().split()
    guard = psutil.Process(int(pid))
    wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().count("up") == 4)
    tree = [guard, *guard.children(recursive=True)]
    owner.kill()
    owner.wait()
    wait_for(lambda: not any(map(lives, tree)))
    assert len(tree) >= 5 and not Path(folder).exists()

    process = SupervisedProcess("plain", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log2")
    process.start()
    wait_for(lambda: psutil.Process(process.pid).children())
    (command,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not lives(command))
    process.stop()


def test_a_guard_that_was_stopped_is_continued_to_end_its_tree(tmp_path: Path) -> None:
    process = SupervisedProcess("plain", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    process.start()
    wait_for(lambda: psutil.Process(process.pid).children())
    (command,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGSTOP)
    process.stop(grace_s=0)
    assert process.poll() is not None and not command.is_running()


def test_a_stopped_server_process_is_logged_and_its_tree_ends(tmp_path: Path) -> None:
    process = SupervisedProcess("tree", ["sh", "-c", "sleep 600 & echo up; wait"], tmp_path / "log")
    process.start()
    wait_for(lambda: process.tail() == "up")
    shell, leaf = psutil.Process(process.pid).children(recursive=True)
    wait_for(lambda: leaf.name() == "sleep")  # until then it is a copy of the shell
    leaf.suspend()
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 128 + signal.SIGSTOP and not lives(shell) and not lives(leaf)
    assert f"sleep (process {leaf.pid})" in process.tail(1)


LEAVES = """
import os, sys, tempfile, time
print(os.path.dirname(tempfile.NamedTemporaryFile(delete=False).name), flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("end", ["its own", "stop", "a killed guard"])
def test_temporary_files_go_with_the_command_however_it_ends(tmp_path: Path, end: str) -> None:
    seconds = "0" if end == "its own" else "600"
    process = SupervisedProcess("p", [sys.executable, "-c", LEAVES, seconds], tmp_path / "log")
    process.start()
    wait_for(lambda: process.tail())
    folder = Path(process.tail())
    if end == "its own":
        wait_for(lambda: process.poll() == 0)
    else:
        assert list(folder.iterdir()) and folder != Path(tempfile.gettempdir())
        if end == "a killed guard":
            os.kill(process.pid, signal.SIGKILL)
            wait_for(lambda: process.poll() is not None)
        process.stop()
    assert not folder.exists()


def test_exit_status_and_the_end_of_the_log_are_kept(tmp_path: Path) -> None:
    code = "print(*range(100), sep='\\n'); raise SystemExit(3)"
    process = SupervisedProcess("short", [sys.executable, "-c", code], tmp_path / "deep" / "log")
    assert process.tail() == ""
    process.start()
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 3 and process.tail(2) == "98\n99"
    process.argv = [sys.executable, "-c", "print('next')"]
    process.start()
    wait_for(lambda: process.poll() is not None)
    assert process.tail() == "next" and process.log_path.read_text().startswith("0\n1\n")


SEMAPHORE = """
import multiprocessing, time
if __name__ == "__main__":
    semaphore = multiprocessing.get_context("spawn").Semaphore(1)
    print("sem." + semaphore._semlock.name.removeprefix("/"), flush=True); time.sleep(60)
"""


def test_a_killed_tree_leaves_no_semaphore_in_shared_memory(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SEMAPHORE)
    process = SupervisedProcess("tree", [sys.executable, str(program)], tmp_path / "log")
    process.start()
    wait_for(lambda: process.tail().startswith("sem."))
    semaphore = Path("/dev/shm", process.tail())
    assert semaphore.exists() and process.poll() is None
    time.sleep(LOOK_S + 1)  # the guard looks at what the tree has mapped now and then
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one of them ends when it loses another
            child.kill()
    wait_for(lambda: process.poll() is not None)
    assert not semaphore.exists()


# The plugin -----------------------------------------------------------------------------------------------------------


def test_the_plugin_leaves_other_servers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    sglang_plugin.register()
    assert not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu")
