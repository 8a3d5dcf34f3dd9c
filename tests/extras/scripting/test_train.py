"""A script trains by functions, which become the dotted paths of an ordinary run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import slimx
from examples import quickstart
from slimx.extras.scripting.alone import alone
from slimx.extras.scripting.functions import with_hooks
from slimx.rollout.hook_loading import load_rewards
from tests.refusals import refused

ROOT = Path(__file__).parents[3]


async def generate(ctx: slimx.RolloutContext, prompt: slimx.Prompt) -> slimx.Trajectory:
    return ctx.draft(prompt).finish()


def keep(group: slimx.Group) -> bool:
    return True


@pytest.fixture
def config() -> slimx.Config:
    return slimx.load_config(ROOT / "configs/moe/quickstart.yaml")


def test_functions_become_the_paths_that_the_run_imports_and_records(config):
    changed = with_hooks(config, generate=generate, reward=quickstart.reward, keep=keep)
    assert changed.rollout.generate == f"{__name__}.generate" and changed.rollout.filter == f"{__name__}.keep"
    assert load_rewards(changed).func is quickstart.reward
    assert "function: examples.quickstart.reward" in changed.to_text()
    assert with_hooks(config) == config


def test_a_function_that_no_path_leads_to_is_refused(config):
    async def local(ctx, trajectory):
        return 1.0

    for reward in (local, lambda ctx, trajectory: 1.0):
        with refused("script.hook", about="reward"):
            with_hooks(config, reward=reward)


class Scorer:
    def __call__(self, ctx: slimx.RewardContext, trajectory: slimx.Trajectory) -> float:
        return 1.0


def shared(ctx: slimx.RewardContext, trajectory: slimx.Trajectory, bonus: float = 0.0) -> float:
    return bonus


_scorer = scorer = Scorer()
rewarded = partial(shared, bonus=0.5)
short = lambda ctx, trajectory: 1.0  # noqa: E731
method = scorer.__call__
renamed = quickstart.reward


@pytest.mark.parametrize("name", ["scorer", "rewarded", "short", "method"])
def test_whatever_has_a_name_in_a_module_can_be_a_reward(config, monkeypatch, name):
    reward = globals()[name]
    monkeypatch.setattr(sys.modules["__main__"], "reward", reward, raising=False)
    changed = with_hooks(config, reward=reward)
    assert changed.reward.function in (f"{__name__}.{name}", "__main__.reward")
    assert load_rewards(changed).func is getattr(reward, "func", reward)


def test_a_function_has_the_name_of_its_own_module_first(config):
    assert with_hooks(config, reward=renamed).reward.function == "examples.quickstart.reward"
    with refused("dotted.callable", about="reward.function"):
        load_rewards(with_hooks(config, reward=max))


def test_a_reward_of_a_session_without_a_file_cannot_have_processes(config, monkeypatch):
    monkeypatch.delattr(quickstart, "__file__")
    assert with_hooks(config, reward=quickstart.reward).reward.function == "examples.quickstart.reward"
    isolated = config.model_copy(update={"reward": config.reward.model_copy(update={"isolation": "process"})})
    with refused("script.reward_process", about="examples.quickstart.reward"):
        with_hooks(isolated, reward=quickstart.reward)


def test_a_reward_next_to_reward_parts_is_refused(config):
    parts = slimx.load_config(
        ROOT / "configs/moe/quickstart.yaml",
        ["reward={parts: [{name: a, function: exact}]}", "reward.function=null"],
    )
    with refused("script.reward_parts", about="reward.parts"):
        with_hooks(parts, reward=quickstart.reward)


async def test_a_notebooks_event_loop_stands_aside_and_comes_back():
    outer = asyncio.get_running_loop()
    with alone():
        assert asyncio.run(asyncio.sleep(0, result=7)) == 7
    assert asyncio.get_running_loop() is outer


BEGIN = """
import multiprocessing, slimx
config = {"run": {"dir": "r"}, "model": {"path": "missing"}, "schedule": {"steps": 1}}
config["rollout"] = {"prompts": "p", "engines": [{}]}
def start(results):
    try:
        slimx.train(config)
    except slimx.SlimxError as error:
        results.put(error.code)
"""
GUARDED = """
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    results = context.Queue()
    context.Process(target=start, args=(results,)).start()
    print(results.get(timeout=60))
"""
UNGUARDED = """
if multiprocessing.current_process().name == "MainProcess":  # in place of the run, whose reward processes are such
    process = multiprocessing.get_context("{method}").Process(target=start)
    process.start()
    process.join()
else:
    try:
        slimx.train(config)
    except slimx.SlimxError as error:
        print(error.code, error.about)
"""


def ran(tmp_path: Path, text: str) -> str:
    """Returns what the script `text` prints."""
    (tmp_path / "script.py").write_text(BEGIN + text)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout.strip() or done.stderr


SLOW = pytest.mark.slow("other ways to start a process")


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=SLOW), pytest.param("forkserver", marks=SLOW)])
def test_a_process_of_the_user_may_start_a_run(tmp_path: Path, method: str):
    assert ran(tmp_path, GUARDED.format(method=method)) == "model.directory"


def test_a_script_without_a_guard_does_not_start_again_in_a_process(tmp_path: Path):
    assert ran(tmp_path, UNGUARDED.format(method="spawn")).splitlines()[0] == "script.main __main__"


def test_training_is_refused_as_the_command_refuses_it(config, tmp_path):
    nowhere = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "none")})})
    with refused("model.directory", about=str(tmp_path / "none")):
        slimx.train(nowhere, reward=quickstart.reward)
