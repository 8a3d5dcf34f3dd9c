"""A whole run whose rollouts work in a terminal: a real policy calls the shell, and tests in fresh boxes reward it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from slimx.environments.boxes import roots
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.needs("bwrap", "unshare", "prlimit", "tar")]

TEMPLATE = (
    "{%- if tools -%}<user>tools:{%- for tool in tools -%}{{ ' ' + tool.function.name }}{%- endfor -%}{%- endif -%}"
    "{%- for message in messages -%}{{ '<assistant>' if message.role == 'assistant' else '<user>' }}"
    "{{ message.content }}{{ '<end>' if message.role == 'assistant' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)
STEPS = 2
TASK = {
    "prompt": "Write an even number into the file value.",
    "tests": {"command": ["sh", "-c", "test $(($(cat value) % 2)) = 0 && echo even"], "expect": ["^even$"]},
}


def test_a_policy_is_rewarded_for_what_its_commands_left_in_the_box(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps(TASK | {"id": f"t{number}"}) + "\n" for number in range(4))
    )
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        box = {"host_usr": True, "memory_mib": 256, "disk_mib": 8, "seconds": 60, "base": base}
        config = write_config(
            tmp_path,
            tmp_path / "model",
            tmp_path / "tasks.jsonl",
            rollout={
                "map": "slimx.environments.terminal.tasks.to_prompt",
                "max_prompt_tokens": 512,
                "generate": "tests.integration.hooks.writing_numbers",
                "options": {
                    "toolbox": "slimx.environments.terminal.toolbox.Terminal",
                    "toolbox_options": {"tasks": str(tmp_path), "box": box},
                    "max_turns": 1,
                    "call_deadline": 600.0,
                },
                "rollout_deadline": 600,
                "sampling": {"max_new_tokens": 120},
            },
            reward={"function": "slimx.rollout.tools.reward"},
            schedule={"steps": STEPS},
        )
        run = TrainProcess(config)
        assert run.wait() == 0, run.text()
        run.assert_nothing_left()
        assert list(Path(base).glob(f"{roots.PREFIX}*")) == [], "no box is left behind"
    assert len(steps(tmp_path / "run")) == STEPS
    files = step_files(tmp_path / "run" / DIRECTORY)
    groups = [group for step in range(1, STEPS + 1) for group in read_step(files[step])[1]]
    trajectories = [each for group in groups for each in group.trajectories]
    assert len(trajectories) == STEPS * 8
    rewards = [each.reward_parts["tests"] for each in trajectories]
    assert {*rewards} == {0.0, 1.0}, rewards
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    written = [int(re.search(r"echo (\d+) > value", each["response"])[1]) for each in samples]  # type: ignore[index]
    assert [each["reward"] for each in samples] == [float(number % 2 == 0) for number in written]
    assert all(each.metadata["tool_calls"] == 1 and each.metadata["tool_errors"] == {} for each in trajectories)
