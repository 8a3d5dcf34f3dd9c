"""Whole runs: one step off with two turns and a served teacher, and colocated; how they end on a signal, or when they
have lost a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from slimx.config.schema import Config
from slimx.data.batch import make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.saved.codec import load_groups, save_groups
from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from slimx.engines.server.engine import Engine
from slimx.errors import LOST
from slimx.extras.watch.status import run_status
from slimx.observability.live.stacks import Stack, stacks
from slimx.orchestration.batches import make_packer
from slimx.runtime.ports import free_port
from tests.integration import rank_start
from tests.integration.conftest import ROOT, Weights, perturbed, publish
from tests.integration.rank_processes import run_ranks
from tests.integration.runs import TrainProcess, completed_steps, saved_tickets, steps, write_config
from tests.integration.trainer_oracle import write_model
from tests.integration.victims import lost_with
from tests.webhook_server import webhook_server

pytestmark = pytest.mark.integration
TAUGHT = 3
"""Steps whose rollouts are scored by both teachers."""
PORTS = "## Ports and keys"
"""Title of the section with the table of ports."""
ADDRESSES = {"all": "all", "local": "loopback", "loopback": "loopback"}
"""Kind of address that each word of the table means in a run on one machine."""
PATIENCE_S = 300
Port = tuple[str, str]
"""Process and kind of address."""


def _rollout(task_of_sums: Path, **changes: object) -> dict[str, object]:
    return {"prompts": str(task_of_sums / "train.jsonl"), **changes}


@dataclass(frozen=True)
class Ahead:
    """A run that generated one step ahead, and what was seen of it after its fifth step."""

    directory: Path
    teacher: Path
    status: dict[str, Any]
    documented: set[Port]
    opened: set[Port]
    stacks: list[Stack]
    scraped: str


@pytest.fixture(scope="module")
def ahead(
    engine: Engine,
    running: dict[str, Any],
    tiny_model: Path,
    tiny_weights: Weights,
    task_of_sums: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Ahead:
    """Runs two turns with a frozen model, which judges them and teaches; SIGTERM ends it in order."""
    directory = tmp_path_factory.mktemp("ahead")
    wise = perturbed(tiny_weights, seed=3, scale=0.1)
    teacher = write_model(directory / "teacher", tiny_model, wise)
    asyncio.run(publish(engine, wise, 1))
    held_out = directory / "held_out.jsonl"
    held_out.write_text("".join((task_of_sums / "heldout.jsonl").read_text().splitlines(keepends=True)[:3]))
    config = write_config(
        directory,
        tiny_model,
        task_of_sums / "train.jsonl",
        schedule={"steps": 1000, "max_staleness": 1},
        eval={"prompts": {"sums": str(held_out)}, "every": 2, "samples": 2, "temperature": 1.0, "passing": 0.0},
        rollout=_rollout(
            task_of_sums,
            generate="examples.two_turn.generate",
            # Random weights hardly ever end a turn: let most tokens end it.
            sampling={"max_new_tokens": 4, "stop_token_ids": list(range(20, 100))},
            engines=[
                {"name": "actor", "max_total_tokens": 8192},
                {"name": "judge", "frozen": True, **running},
            ],
        ),
        algorithm={
            "name": "remax",
            "reference": True,
            "kl_coef": 0.01,
            "reference_refresh": 2,
            "teacher_engine": "judge",
            "teacher_coef": 0.1,
        },
        checkpoint={"every": 4, "keep": 100},
        reward={"function": "tests.integration.hooks.judged"},
        track={"rollouts": {"every": 1, "keep": 10_000}, "prometheus": {"port": (port := free_port())}},
    )
    run = TrainProcess(config)
    run.until(lambda: completed_steps(directory / "run") >= 5)
    run.until((directory / "run" / "checkpoints" / "iter_0000004").exists)
    scraped = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=300).text
    absent = {"engine actor", "prefill engine"}  # it publishes by memory
    ports = {(process, address) for process, address in documented() if process not in absent}
    status, found = run_status(directory / "run"), opened(run, ports)
    seen = Ahead(directory, teacher, status, ports, found, stacks(directory / "run"), scraped)
    run.kill(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.text()
    last = run.text().splitlines()[-1]
    assert last.startswith("slimx: stopped by SIGTERM; ") and str(directory / "run" / "checkpoints" / "iter_") in last
    run.assert_nothing_left()
    return seen


def test_one_step_off_with_a_two_turn_hook_is_at_most_one_version_old(ahead: Ahead) -> None:
    rows = steps(ahead.directory / "run")
    assert [rows[step]["staleness/max"] for step in range(1, 6)] == [0, 1, 1, 1, 1]
    # Before the first step and after every second one the held-out prompts are answered while the batch is in flight.
    start = rows.pop(0)
    evaluated = {step for step, row in rows.items() if "eval/sums/accuracy" in row}
    assert evaluated == {step for step in rows if step % 2 == 0}
    for row in (start, rows[2], rows[4]):
        assert row["eval/failed"] == 0 and row["eval/sums/pass@2"] >= row["eval/sums/accuracy"] != 0
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["gap/mean"] <= 1e-5 and row["gap/tokens_unexplained"] == 0
    # After the second and the fourth step the reference becomes what is trained then.
    assert max(rows[step]["kl/reference"] for step in (1, 3, 5)) <= 1e-8
    assert min(rows[step]["kl/reference"] for step in (2, 4)) > 1e-8
    for row in rows.values():
        assert row["engines/serving"] == row["engines/judge/serving"] == 1 and row["kl/teacher"] > 0
        # The trainer has left the policy that sampled by a step, but for the first one.
        assert 0 < row["mismatch/ess"] <= 1 + 1e-9 and row["mismatch/max"] >= row["mismatch/mean"] > 0
    assert rows[1]["mismatch/mean"] <= 1e-5 < rows[3]["mismatch/mean"]
    tickets = saved_tickets(ahead.directory / "run" / "checkpoints" / "iter_0000004")
    assert len(tickets) == 4  # the batch that was in flight is kept
    groups = [ticket.group for ticket in tickets if ticket.group]
    # In addition to each group's two, a greedy rollout is judged and kept as its baseline; it is none of them.
    assert all(group.baseline is not None and len(group.trajectories) == 2 for group in groups)
    trajectories = [t for group in groups for t in group.trajectories]
    # A publication parts the tokens of a turn into two spans, so that only what is inserted tells turns apart.
    two_turns = [t for t in trajectories if any(span.source == "inserted" for span in t.spans)]
    assert two_turns
    # The judge's weights are random too.
    assert all(-0.2 < t.reward_parts["judge"] < 0 for t in trajectories)
    for trajectory in two_turns:
        (inserted,) = [span for span in trajectory.spans if span.source == "inserted"]
        assert not trajectory.loss_mask[inserted.start : inserted.stop].any()


def documented() -> set[Port]:
    """Returns the rows of the table."""
    section = (ROOT / "docs/operations.md").read_text().partition(PORTS)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {(process, ADDRESSES[address]) for process, _, address, _ in rows[2:] if "`" not in address}


def opened(run: TrainProcess, expected: set[Port]) -> set[Port]:
    """Returns TCP sockets on which processes of `run` listen, looked for again while one of `expected` is missing: a
    process that ends meanwhile hides others."""
    found: set[Port] = set()
    deadline = time.monotonic() + PATIENCE_S
    while not expected <= found and time.monotonic() < deadline:
        for root in run.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # sandboxed programs come and go
                for process in (root, *root.children(recursive=True)):  # the router clears its environment
                    found |= set(_listens(process))
    return found


def _listens(process: psutil.Process) -> Iterator[Port]:
    for connection in process.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            loopback = ipaddress.ip_address(connection.laddr.ip).is_loopback
            yield _kind(process, loopback), "loopback" if loopback else "all"


def _kind(process: psutil.Process, loopback: bool) -> str:
    """Returns the table's name of a process; a Ray worker's is that of its actor where the port is not Ray's."""
    line = " ".join(process.cmdline())
    if line.startswith("ray::"):
        if not loopback:
            return "Ray's workers and agents"
        actors = {"Agent": "Ray's agents", "TrainerWorker": "trainer", "Engine": "engine actor"}
    else:
        actors = {
            "slimx.cli": "driver",
            "ray/gcs/gcs_server": "gcs_server, raylet",
            "raylet/raylet": "gcs_server, raylet",
            "sglang::router": "router",
            "slimx.engines.server.router_launch": "router",
            "sglang::scheduler": "engine's scheduler",
            "slimx.engines.server.launch": "engine",
        }
    return next((kind for part, kind in actors.items() if part in line), line)


def test_a_run_says_how_it_stands_and_opens_the_ports_that_are_documented(ahead: Ahead) -> None:
    status = ahead.status
    assert status["running"] and status["step"] >= 4 and status["metrics"]["reward/mean"] is not None
    assert [(engine["name"], engine["frozen"], engine["standing"]) for engine in status["engines"]] == [
        ("actor-0", False, "member"),
        ("judge-0", True, "member"),
    ]
    assert status["state"] == "running" and status["usual_seconds"] > 0
    late = status["activity"]["late"]
    assert late is None or {*late["ranks"]} <= {f"trainer rank {rank}" for rank in range(late["of"])}
    assert run_status(ahead.directory / "run")["state"] == "dead"
    assert ahead.opened == ahead.documented


def test_the_stacks_of_every_process_are_reported(ahead: Ahead) -> None:
    parts = {stack.member.name.partition(":")[0] for stack in ahead.stacks if stack.found}
    assert {"driver", "trainer-0", "trainer-1", "engine-actor-0", "router"} <= parts
    (driver,) = (stack for stack in ahead.stacks if stack.member.name == "driver")
    assert "run_session" in driver.text


def test_metrics_of_the_run_and_of_its_engines_can_be_scraped(ahead: Ahead) -> None:
    samples = [sample for family in text_string_to_metric_families(ahead.scraped) for sample in family.samples]
    values = {(sample.name, sample.labels.get("engine")): sample.value for sample in samples}
    assert values["slimx_step", None] >= 5 and ("slimx_reward_mean", None) in values
    assert values["slimx_engine_up", "actor-0"] == 1 and ("sglang:num_running_reqs", "actor-0") in values


def distillation(job: dict[str, Any], **teacher: str) -> Config:
    engines = [{}, {"name": "wise", "frozen": True, "model": job["teacher"]}]
    return Config.model_validate(
        {
            "run": {"dir": str(job["out"])},
            "model": {"path": job["policy"]},
            "numerics": {"dtype": "float32"},
            "trainer": {"distributed_optimizer": False, "max_tokens_per_microbatch": 64},
            "rollout": {"prompts": "p", "engines": engines},
            "algorithm": {"name": "distillation", **teacher},
        }
    )


def distil(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Takes a step on the same rollouts, scored by the teacher in the trainer and by the one that an engine served.

    Returns the metrics of both, and the largest difference of their gradients over the largest gradient; writes
    `scores.npz`, the log-probs of the trainer's teacher of each rollout in order."""
    out = job["out"]
    configs = {
        "trainer": distillation(job, teacher=job["teacher"]),
        "engine": distillation(job, teacher_engine="wise"),
    }
    parallel = rank_start.join(configs["trainer"].trainer, rank, job["init_method"])
    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer

    spec = read_model(job["policy"])
    trajectories = [trajectory for group in load_groups(out / "groups.bin") for trajectory in group.trajectories]
    weights, nothing = loss_weights(trajectories, "token"), [0.0] * len(trajectories)
    results: dict[str, Any] = {}
    gradients: dict[str, dict[str, np.ndarray]] = {}
    for name, config in configs.items():
        trainer = PolicyTrainer(config, spec, parallel)
        rows = make_rows(trajectories, nothing, weights, config.algorithm)
        batch = make_packer(config, spec, parallel.sizes)(rows)
        if name == "trainer":
            scores = batch.unpack([trainer.logprobs(batch.shards[0], under="teacher")], rows)
            np.savez(out / "scores.npz", *scores)
        results[name] = trainer.train_step(batch.shards[0], step=0, version=0)
        gradients[name] = {key: p.main_grad.numpy().copy() for key, p in trainer.weights.parameters.items()}
    largest = max(np.abs(gradient).max() for gradient in gradients["trainer"].values())
    differences = [np.abs(gradients["engine"][key] - gradient).max() for key, gradient in gradients["trainer"].items()]
    results["gradients_differ"] = float(max(differences) / largest)
    rank_start.leave(parallel)
    return results


def test_a_served_teacher_teaches_as_the_same_teacher_in_the_trainers(
    ahead: Ahead, tiny_model: Path, tmp_path: Path
) -> None:
    """On-policy distillation of the run's rollouts of three steps, by the scores that the engine gave them, and by the
    same teacher in a trainer."""
    files = step_files(ahead.directory / "run" / DIRECTORY)
    groups = [group for step in range(1, TAUGHT + 1) for group in read_step(files[step])[1]]
    save_groups(tmp_path / "groups.bin", groups)
    (results,) = run_ranks(distil, tmp_path, 1, {"policy": tiny_model, "teacher": ahead.teacher})
    with np.load(tmp_path / "scores.npz") as arrays:
        scores = list(arrays.values())
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert len(scores) == len(trajectories) == TAUGHT * 8
    for trajectory, score in zip(trajectories, scores, strict=True):
        trained = trajectory.loss_mask[1:] > 0
        served = trajectory.teacher_logprobs[1:]
        assert trained.any() and np.abs(served[trained] - score[trained]).max() <= 1e-5
        assert np.abs(served[trained] - trajectory.logprobs[1:][trained]).max() > 1e-2  # another model than the policy
    assert results["gradients_differ"] <= 1e-4
    for name in ("loss/policy", "kl/teacher", "optim/grad_norm"):
        assert results["engine"][name] == pytest.approx(results["trainer"][name], rel=1e-3)


def test_colocated_engines_sleep_and_a_killed_trainer_ends_the_run(tiny_model, task_of_sums, tmp_path):
    """With nucleus sampling, a teacher, recomputed old log-probs, which are weighed against the engine's, and replayed
    routes, which change nothing of that."""
    schedule = {"steps": 1000, "colocate": True, "updates_per_step": 2}
    # Each pipeline stage gets the engine's routes of its own layer, and both updates take them.
    trainer = {"pipeline": 2, "expert": 1, "moe": {"routing_replay": "R3"}}
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        schedule=schedule,
        rollout=_rollout(task_of_sums, sampling={"max_new_tokens": 8, "top_p": 0.7}),
        checkpoint={"every": 2},
        trainer=trainer,
        algorithm={"name": "decoupled_ppo", "teacher": str(tiny_model), "teacher_coef": 0.1, "entropy_coef": 0.01},
    )
    with webhook_server() as webhook:
        run = TrainProcess(config, f"track.webhook={webhook.url}")
        run.until(lambda: completed_steps(tmp_path / "run") >= 3)
        lost_with(run, "trainer", signal.SIGKILL, LOST, "trainer rank ")
    (event,) = webhook.events
    assert event["event"] == "failed" and event["step"] >= 3 and event["about"] in ("actor.died", "rank.silent")
    # Gradients and optimizer state leave before each publication, the weights after it; a checkpoint brings them back.
    log = (tmp_path / "run/logs/trainer-0.log").read_text()
    assert log.count(": training\n") >= 3 and log.count(": weights and training\n") >= 4
    for row in steps(tmp_path / "run").values():
        peaks = {name: row[f"memory/{name}_peak_mib"] for name in ("generate", "train", "publish")}
        assert all(100 < peak < 4000 for peak in peaks.values()), peaks
        assert row["time/sleep"] > 0 and row["time/wake"] > 0 and row["gap/tokens"] > 0 and row["gap/mean"] <= 1e-5
        assert row["routes/differing"] == 0 and row["router/imbalance"] >= 1
        # At the second update the policy has left the one that sampled; at the first the two differ by rounding.
        assert row["kl/rollout"] > 1e-7 and row["batch/microbatches"] == 2
        assert row["correction/weight"] == pytest.approx(1, abs=1e-5) and row["correction/outside"] == 0
        assert row["kl/teacher"] > 0 and 0 < row["policy/entropy"] < np.log(128)


@pytest.mark.slow("two whole runs")
def test_a_server_that_runs_already_serves_one_run_after_the_other(running, tiny_model, task_of_sums, tmp_path):
    for name in ("first", "second"):
        directory = tmp_path / name
        directory.mkdir()
        rollout = _rollout(task_of_sums, engines=[{"name": "actor", **running}])
        config = write_config(
            directory, tiny_model, task_of_sums / "train.jsonl", rollout=rollout, schedule={"steps": 2}
        )
        run = TrainProcess(config)
        assert run.wait() == 0, run.text()
        run.assert_nothing_left()
        for row in steps(directory / "run").values():
            assert row["publish/engines_verified"] == 1 and row["gap/tokens"] > 0 and row["gap/mean"] <= 1e-5
