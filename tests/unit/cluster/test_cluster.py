"""Ray that does not start: what refuses it keeps its code, what fails in Ray is reported as a lost part."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray
from ray._private import worker

from slimx.cluster import access as ray_access
from slimx.cluster import connection as cluster
from slimx.cluster.waiting import DEATH_S, explain, gather, has_died
from slimx.config.schema import Config
from slimx.errors import LOST, REFUSED, PartLost, SlimxError
from slimx.runtime.logs import begin_log


def config() -> Config:
    return Config.model_validate({"run": {"dir": "d"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}})


def test_a_setting_that_takes_rays_token_away_is_refused_by_its_name(monkeypatch):
    monkeypatch.setenv(ray_access.MODE, "disabled")
    with pytest.raises(SlimxError) as error:
        cluster.start_ray(config(), "cpu")
    assert (error.value.code, error.value.about, error.value.status) == ("ray.no_token", ray_access.MODE, REFUSED)


def test_a_part_of_ray_that_does_not_come_up_may_do_so_at_another_start(monkeypatch):
    def init(*_: object, **__: object) -> None:
        raise Exception("The GCS failed to start.")  # that class, by Ray 2.60

    monkeypatch.setattr(cluster, "local_options", dict)
    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(PartLost) as error:
        cluster.start_ray(config(), "cpu")
    assert (error.value.code, error.value.status) == ("ray.start", LOST)


def test_a_library_of_ray_that_never_leaves_does_not_keep_the_process(monkeypatch):
    stopped = threading.Event()
    monkeypatch.setattr(cluster, "SHUTDOWN_S", 0.01)
    monkeypatch.setattr(cluster.ray, "shutdown", stopped.wait)
    before = set(threading.enumerate())
    cluster.stop_ray()
    (leaving,) = set(threading.enumerate()) - before
    stopped.set()
    leaving.join()
    assert leaving.daemon


def test_ray_prints_nothing_into_the_output_of_a_run(monkeypatch, capsys):
    monkeypatch.setattr(worker, "_worker_logs_enabled", True)  # as Ray has it, and afterwards again
    deaths = iter(["A worker died", "another one"])  # Ray prints nothing twice

    def init(*_: object, **__: object) -> None:
        death = {"pid": "raylet", "lines": [next(deaths)], "is_err": True, "ip": "", "localhost": ""}
        worker.print_to_stdstream(death, ignore_prefix=False)

    monkeypatch.setattr(cluster, "local_options", dict)
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 64.0})
    cluster.start_ray(config(), "cpu")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(worker, "_worker_logs_enabled", True)
    init()
    assert "\x1b" in capsys.readouterr().err, "what it would print"


@pytest.mark.parametrize(("late", "starts"), [(1, 2), (2, 3), (3, 3)])
def test_a_node_that_was_not_there_in_time_is_started_again(monkeypatch, late, starts):
    """Ray 2.60 gives its node 30 s, which a busy machine may not keep; nothing can make it late on demand."""
    calls = []

    def init(**options: object) -> None:
        calls.append(options)
        if len(calls) <= late:
            raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(cluster, "local_options", dict)
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 64.0})
    with pytest.raises(PartLost) if late == starts else nullcontext():
        cluster.start_ray(config(), "cpu")
    assert len(calls) == starts and all(options["address"] == "local" for options in calls), "not whatever runs here"


async def test_nothing_to_wait_for_is_no_result():
    """As where every engine of a run is a server that runs already."""
    assert await gather([], what="nothing", holders=[], deadline_s=1, logs=[]) == []


async def test_an_error_that_another_ranks_death_made_is_that_death(tmp_path):
    """gloo says at once that a connection broke; Ray knows a moment later of whose death."""

    async def breaks() -> None:
        raise ray.exceptions.RayTaskError("update", "", RuntimeError("Connection reset by peer"))

    async def dies() -> None:
        await asyncio.sleep(0.2)
        raise ray.exceptions.ActorDiedError()

    async def hangs() -> None:
        await asyncio.Event().wait()

    ranks = {
        "what": "step 3",
        "deadline_s": 60,
        "logs": [tmp_path / "log"] * 3,
        "holders": ["rank 0", "rank 1", "rank 2"],
    }
    with pytest.raises(PartLost) as error:
        await gather([breaks(), hangs(), dies()], **ranks)
    assert (error.value.code, error.value.about) == ("actor.died", "rank 2")


async def test_a_refusal_of_a_rank_waits_for_no_death(tmp_path):
    async def refuses() -> None:
        error = ray.exceptions.RayTaskError("update", "", refusal := SlimxError("no", code="no"))
        error.cause = refusal
        raise error

    async def hangs() -> None:
        await asyncio.Event().wait()

    with pytest.raises(SlimxError) as error:
        async with asyncio.timeout(DEATH_S / 2):
            await gather([hangs(), refuses()], what="a step", deadline_s=60, logs=[tmp_path] * 2, holders=["0", "1"])
    assert error.value.code == "no"


def test_logs_of_an_earlier_start_do_not_explain_a_death(tmp_path):
    log = tmp_path / "trainer-0.log"
    log.write_text("a warning of yesterday\n")
    begin_log(log)
    death = ray.exceptions.RayActorError()
    assert "yesterday" not in str(explain(death, "the start", "trainer rank 0", log))
    with log.open("a") as words:
        words.write("a fault of today\n")
    message = str(explain(death, "the start", "trainer rank 0", log))
    assert "today" in message and "yesterday" not in message


@pytest.mark.parametrize(
    ("error", "died"),
    [
        (ray.exceptions.ActorDiedError(), True),
        (ray.exceptions.OutOfMemoryError("22.4 of 23.5 GB"), True),
        (ray.exceptions.GetTimeoutError(), False),
        (None, False),
    ],
)
def test_an_actor_that_ray_killed_for_memory_has_died(error: Exception | None, died: bool) -> None:
    async def ping() -> None:
        if error is not None:
            raise error

    assert asyncio.run(has_died(SimpleNamespace(ping=SimpleNamespace(remote=ping)))) is died
