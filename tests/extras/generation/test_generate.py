"""Engines without trainers: which weights they start from, what is refused, and that an interrupted generation goes on
as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import slimx
from slimx.config.schema import Config
from slimx.data.saved.step_files import read_step, step_files
from slimx.errors import Preempted
from slimx.extras.evaluation.checks import evaluation_config
from slimx.extras.generation.checks import generation_config, without_trainers
from slimx.extras.generation.run import generate
from slimx.observability.live.table import LiveTable
from slimx.orchestration.session import run_training
from slimx.orchestration.state.saves import Saves, read_state
from slimx.rollout.hooks import Keep
from tests.extras.generation.serving_stand import config_in, service_in, write_model
from tests.refusals import refused


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def generated(config: Config, *, stop_after: int | None = None, keep: Keep | None = None) -> dict[int, list[list[int]]]:
    """Returns tokens by step after a generation of `config`, which SIGUSR1 ends after `stop_after` steps."""
    directory = Path(config.run.dir)
    directory.mkdir(exist_ok=True)
    saves, leaving = Saves(directory / "cursor", keep=1), asyncio.Event()
    newest = saves.newest()
    state = read_state(newest) if newest else None

    async def work() -> None:
        service = service_in(config, delay=0.001, keep=keep)
        shown = LiveTable(config.schedule.steps, 0, Console(quiet=True))
        row = shown.row

        def counted(step: int, metrics: dict[str, float]) -> None:
            row(step, metrics)
            if step == stop_after:
                leaving.set()

        shown.row = counted
        await generate(service, saves, state, shown, leaving)

    if stop_after is None:
        asyncio.run(work())
    else:
        with pytest.raises(Preempted):
            asyncio.run(work())
    return {
        step: [t.token_ids.tolist() for group in read_step(path)[1] for t in group.trajectories]
        for step, path in step_files(directory / "rollouts").items()
    }


def not_the_fifth(group: Any) -> bool | str:
    return group.prompt.id != "p5" or "fifth"


def test_an_interrupted_generation_goes_on_with_the_same_tokens(model, tmp_path):
    keys = {"schedule__steps": 6, "schedule__max_staleness": 1}
    whole = generated(config_in(tmp_path / "whole", model, **keys), keep=not_the_fifth)
    assert list(whole) == [1, 2, 3, 4, 5, 6] and all(len(step) == 8 for step in whole.values())
    config = config_in(tmp_path / "two", model, **keys)
    assert list(generated(config, stop_after=2, keep=not_the_fifth)) == [1, 2]
    # What was written after the position, by a process that was killed then, is written anew.
    late = tmp_path / "two" / "rollouts" / "step-0000003.groups"
    late.write_bytes(b"")
    with (tmp_path / "two" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "metrics": {}}) + "\n")
    assert generated(config, keep=not_the_fifth) == whole
    lines = [[json.loads(line)["step"] for line in (tmp_path / d / "metrics.jsonl").open()] for d in ("whole", "two")]
    assert lines == [[1, 2, 3, 4, 5, 6]] * 2
    about = read_step(late)[0]
    assert (about.version, about.oldest, about.origin.group_size) == (0, 0, 2)


def test_the_last_engines_failure_ends_the_wait(model, tmp_path):
    config = config_in(tmp_path / "run", model)

    async def work() -> None:
        service = service_in(config)
        service.groups["actor"].members.broken.set()
        await service.watched(asyncio.sleep(60))

    with refused("engines.none", about="policy"):
        asyncio.run(work())


def test_engines_start_from_the_training_or_the_named_checkpoint(model, tmp_path):
    config = config_in(tmp_path, model, schedule__colocate=True)
    assert without_trainers(config, None).served.policy[0].model is None
    assert not without_trainers(config, None).schedule.colocate
    (group,) = without_trainers(config, model).served.policy
    assert group.model == str(model) and group.sglang == {"tokenizer_path": str(model)}
    loaded = config.model_copy(update={"trainer": config.trainer.model_copy(update={"load": str(model)})})
    assert without_trainers(loaded, None).served.policy[0].model == str(model)


def test_a_checkpoint_that_engines_cannot_load_is_refused(model, tmp_path):
    config = config_in(tmp_path, model)
    with refused("engines.weights", about="--checkpoint"):
        without_trainers(config, tmp_path / "nothing")
    with refused("engines.weights", about="checkpoint"):  # the name of the argument of slimx.evaluate
        slimx.evaluate(config, tmp_path / "nothing")
    external = config_in(tmp_path, model, engines=[{"name": "far", "urls": ["http://10.0.0.1:3000"]}])
    with refused("engines.urls", about="far"):
        without_trainers(external, model)
    with refused("eval.prompts", about="eval.prompts"):
        evaluation_config(config_in(tmp_path, model, eval__prompts=None), model)
    replaying = config_in(tmp_path, model, replay="elsewhere")
    with refused("engines.none", about="rollout.replay"):
        without_trainers(replaying, None)
    megatron = tmp_path / "my iter_0000001"
    megatron.mkdir()
    (megatron / "metadata.json").write_text("{}")
    (megatron / ".metadata").write_bytes(b"")
    with refused("engines.weights", about="--checkpoint") as caught:
        without_trainers(config, megatron)
    command = shlex.split(str(caught.value).split("`")[1])
    assert command == ["slimx", "convert", "megatron-to-hf", str(megatron), "OUT", "--original", str(model)]


def test_training_and_generation_do_not_share_a_directory(model, tmp_path):
    config = config_in(tmp_path / "run", model)
    (tmp_path / "run" / "cursor").mkdir(parents=True)
    with refused("run.dir", about=str(tmp_path / "run")):
        run_training(config, Console(quiet=True))
    (tmp_path / "run" / "checkpoints").mkdir()
    with refused("run.fork", about="run.fork"):
        forked = config.model_copy(update={"run": config.run.model_copy(update={"fork": "there"})})
        generation_config(forked, None)
