"""A whole run whose rollouts work in a terminal: a real policy calls the shell, and tests in fresh boxes reward it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slimx.data.records import Trajectory
from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from slimx.extras.boxes import rootfs
from tests.extras.boxes.repairs import EXAMPLES, IN_ONE_CALL
from tests.integration.hooks import IDLE
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow("two whole runs, minutes each"),
    pytest.mark.needs("bwrap", "unshare", "prlimit", "tar"),
]

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


@pytest.fixture
def train(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., list[Trajectory]]]:
    """Trains STEPS steps on a file of tasks; what was trained."""

    def run(tasks: Path, generate: str, **rollout: Any) -> list[Trajectory]:
        shutil.copytree(tiny_model, tmp_path / "model")
        (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
        box = {"host_usr": True, "memory_mib": 256, "disk_mib": 8, "seconds": 60, "base": base}
        config = write_config(
            tmp_path,
            tmp_path / "model",
            tasks,
            rollout={
                "map": "terminal",
                "max_prompt_tokens": 512,
                "generate": generate,
                "options": {
                    "toolbox": "terminal",
                    "toolbox_options": {"tasks": str(tasks.parent), "box": box},
                    "max_turns": 1,
                    "call_deadline": 600.0,
                },
                "rollout_deadline": 600,
                **rollout,
            },
            reward={"function": "tools"},
            schedule={"steps": STEPS},
        )
        process = TrainProcess(config)
        assert process.wait() == 0, process.text()
        process.assert_nothing_left()
        assert len(steps(tmp_path / "run")) == STEPS
        files = step_files(tmp_path / "run" / DIRECTORY)
        groups = [group for step in range(1, STEPS + 1) for group in read_step(files[step])[1]]
        return [trajectory for group in groups for trajectory in group.trajectories]

    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        yield run
        assert list(Path(base).glob(f"{rootfs.PREFIX}*")) == [], "no box is left behind"


def test_a_policy_is_rewarded_for_what_its_commands_left_in_the_box(train, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(TASK | {"id": f"t{number}"}) + "\n" for number in range(4)))
    trajectories = train(tasks, "tests.integration.hooks.writing_numbers", sampling={"max_new_tokens": 120})
    assert len(trajectories) == STEPS * 8
    rewards = [trajectory.reward_parts["tests"] for trajectory in trajectories]
    assert {*rewards} == {0.0, 1.0}, rewards
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    written = [int(re.search(r"echo (\d+) > value", sample["response"])[1]) for sample in samples]  # type: ignore[index]
    assert [sample["reward"] for sample in samples] == [float(number % 2 == 0) for number in written]
    assert all(
        trajectory.metadata["tool_calls"] == 1 and trajectory.metadata["tool_errors"] == {}
        for trajectory in trajectories
    )


def test_repairs_are_rewarded_by_the_policys_choice(train, tiny_model: Path) -> None:
    trajectories = train(
        EXAMPLES / "tasks.jsonl",
        "tests.integration.hooks.repairing_or_not",
        prompts_per_step=10,
        group_size=4,
        sampling={"max_new_tokens": 400},
    )
    assert len(trajectories) == STEPS * 10 * 4
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = map(json.loads, (EXAMPLES / "tasks.jsonl").read_text().splitlines())
    prompts = {row["id"]: row["prompt"] for row in rows}
    repaired: dict[str, set[float]] = {}
    for trajectory in trajectories:
        text = tokenizer.decode(trajectory.token_ids)
        (name,) = (name for name, prompt in prompts.items() if prompt in text)
        did, idle = IN_ONE_CALL[name] in text, IDLE in text
        assert did != idle and trajectory.reward_parts["tests"] == float(did)
        assert trajectory.metadata["tool_calls"] == 1 and trajectory.metadata["tool_errors"] == {}
        repaired.setdefault(name, set()).add(float(did))
    assert repaired.keys() == IN_ONE_CALL.keys()
    assert set.union(*repaired.values()) == {0.0, 1.0}
