"""A terminal as tools: ten repairs by a scripted policy, what earns nothing, and tasks that cannot begin."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.data.prompts.mapping import make_mapping
from slimx.data.prompts.read import read_prompts
from slimx.data.records import Prompt
from slimx.extras.agents import tools
from slimx.extras.boxes import rootfs
from slimx.extras.boxes.terminal import tasks
from slimx.rollout.hook_loading import check_generated, load_hooks
from slimx.rollout.hooks import RewardContext
from tests.extras.agents.tool_stand import context
from tests.extras.boxes.calls import calling
from tests.extras.boxes.repairs import EXAMPLES, FAILED, SOLVED, edit, shell
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of

pytestmark = pytest.mark.needs("bwrap", "unshare", "prlimit", "tar")

TERMINAL = "terminal"
KEY = "rollout.options.toolbox_options"
BOX = {"host_usr": True, "seconds": 60, "memory_mib": 256, "disk_mib": 8}


@pytest.fixture(scope="module")
def prompts() -> dict[str, Prompt]:
    mapping = make_mapping(None, f"{tasks.__name__}.to_prompt", None)
    return {prompt.id: prompt for prompt in read_prompts(EXAMPLES / "tasks.jsonl", mapping)}


@pytest.fixture
def base():
    """The directory of the boxes; all of them have ended when the test has."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)
        assert list(Path(directory).glob(f"{rootfs.PREFIX}*")) == []


async def play(prompt: Prompt, base: Path, *says: str, box: dict[str, Any] | None = None, **options: Any) -> Any:
    ctx, script = context(*says, "Done.")
    toolbox_options = {"tasks": str(EXAMPLES), "box": {**BOX, "base": str(base), **(box or {})}, **options}
    trajectory = await tools.generate(
        ctx, prompt, toolbox=TERMINAL, toolbox_options=toolbox_options, call_deadline=300.0
    )
    return trajectory, script, await tools.reward(RewardContext(prompt, None, "", False), trajectory)


FEW = ("cache", "matrix", "leap")
"""Repairs by each of the tools, one of which has failed."""


@pytest.mark.parametrize(
    "names", [FEW, pytest.param((*SOLVED, *FAILED), marks=pytest.mark.slow("all ten repairs"))], ids=["few", "all"]
)
async def test_ten_repairs_are_judged_by_tests_that_the_model_does_not_see(prompts, base, names):
    assert {*prompts} == {*SOLVED, *FAILED} and len(prompts) == 10
    played = [play(prompts[name], base, *(SOLVED | FAILED)[name]) for name in names]
    done = dict(zip(names, await asyncio.gather(*played), strict=True))
    assert {name: reward["tests"] for name, (_, _, reward) in done.items()} == {
        name: float(name in SOLVED) for name in names
    }
    for name, (trajectory, script, _) in done.items():
        assert trajectory.metadata["ended"] == "done" and trajectory.metadata["tool_errors"] == {}, name
        assert not any("unittest" in config for config, *_ in script.received), "the tests are not in the model's box"


HIDDEN = """import unittest

class Sum(unittest.TestCase):
    def test(self):
        import sums
        self.assertEqual(sums.add(2, 3), 5)
"""


@pytest.fixture
def task(tmp_path):
    """A task of sums.py with a settings file that is judged as it was."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files/sums.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / "files/conftest.cfg").write_text("strict\n")
    (tmp_path / "hidden/tests").mkdir(parents=True)
    (tmp_path / "hidden/tests/test_sums.py").write_text(HIDDEN)

    def make(**more: Any) -> Prompt:
        tests = {"command": ["sh", "-c", "grep -q strict conftest.cfg && ls && python3 -m unittest tests/test_sums.py"],
                 "files": "hidden", "seconds": 60, "expect": ["Ran 1 test"]}  # fmt: skip
        row = {"prompt": "Repair it.", "files": "files", "kept": ["*.cfg"], "tests": tests} | more
        return Prompt(id="p", **tasks.to_prompt(row))

    return make


def slow(says: list[str], passes: bool) -> Any:
    return pytest.param(says, passes, marks=pytest.mark.slow("full grid of leftovers"))


RIGHT = edit("sums.py", "a - b", "a + b")


@pytest.mark.parametrize(
    ("says", "passes"),
    [
        slow([RIGHT], True),
        ([RIGHT, shell("echo lax > conftest.cfg")], True),
        slow([RIGHT, shell("rm conftest.cfg; mkdir conftest.cfg")], True),
        slow([RIGHT, shell("mkdir tests; echo broken > tests/test_sums.py")], True),
        ([RIGHT, shell("ln -s /nowhere tests")], True),
        slow([RIGHT, shell("mkdir -p tests/test_sums.py/deep")], True),
        slow([shell("rm sums.py; ln -s tests/test_sums.py sums.py")], False),
        slow([shell("rm -rf /repo")], False),
        slow([shell("rm -rf /repo; ln -s /usr /repo")], False),
        ([shell("head -c 7000000 /dev/zero > a; cp a b; cp a c")], False),
    ],
    ids=[
        "right", "kept file changed", "kept file replaced", "test written", "tests a link", "test a directory",
        "tests linked", "nothing left", "directory a link", "too much",
    ],
)  # fmt: skip
async def test_files_outside_the_work_directory_do_not_change_the_verdict(task, tmp_path, base, says, passes):
    trajectory, _, reward = await play(task(), base, *says, tasks=str(tmp_path))
    assert reward == {"tests": float(passes)}, trajectory.metadata
    assert ("unjudged" in trajectory.metadata) is ("unjudged" in trajectory.metadata["tool_errors"])
    assert "unjudged" in trajectory.metadata or "7000000" not in says[0]


@pytest.mark.slow("two whole tasks")
async def test_more_work_than_the_tests_may_get_has_failed(task, tmp_path, base):
    fill = shell("head -c 100000 /dev/urandom > large")
    assert (await play(task(), base, RIGHT, fill, tasks=str(tmp_path), work_mib=0.05))[2] == {"tests": 0.0}
    assert (await play(task(), base, RIGHT, fill, tasks=str(tmp_path), work_mib=1))[2] == {"tests": 1.0}


@pytest.mark.slow("a whole task")
async def test_tests_that_do_not_end_have_failed(task, tmp_path, base):
    tests = {"command": ["sleep", "600"], "seconds": 0.5}
    assert (await play(task(tests=tests), base, RIGHT, tasks=str(tmp_path)))[2] == {"tests": 0.0}


async def test_the_tools_say_what_went_wrong_and_it_is_counted(task, tmp_path, base):
    says = [
        shell("cat sums.py; echo oops >&2; exit 3"),
        calling("read_file", path="../repo/sums.py"),
        calling("read_file", path="none.py"),
        calling("read_file", path="../../.."),
        edit("sums.py", "q", "r"),
        calling("shell", command=3),
        shell("printf 'a: \\374\\n' > latin"),
        edit("latin", "a: ", "b: "),
        shell("od -An -c latin"),
    ]
    trajectory, script, _ = await play(task(), base, *says, tasks=str(tmp_path))
    heard = [config for config, *_ in script.received]
    assert [found in heard[1] for found in ("return a - b\n", "oops\n", " 3)")] == [True] * 3
    assert heard[2].count("return a - b") == 2
    assert "b   :     374  \\n" in heard[9], "an edit leaves bytes that are no UTF-8"
    assert trajectory.metadata["tool_errors"] == {"box_file": 1, "box_path": 1, "edit": 1, "bad_arguments": 1}
    trajectory, script, _ = await play(task(), base, shell("sleep 600"), tasks=str(tmp_path), box={"seconds": 1})
    assert "over the limit of time" in script.received[1][0]
    assert trajectory.metadata["tool_errors"]["limit_time"] == 1  # what is left may not be packed in a second either


# Tasks that cannot begin ---------------------------------------------------------------------------------------------

TESTS = {"command": ["true"]}


@pytest.mark.parametrize(
    ("row", "about"),
    [
        ({"tests": TESTS}, "prompt"),
        ({"prompt": "p"}, "tests"),
        ({"prompt": "p", "tests": {"command": "true"}}, "tests.command"),
        ({"prompt": "p", "tests": {"command": []}}, "tests.command"),
        ({"prompt": "p", "tests": TESTS | {"timeout": 3}}, "tests.timeout"),
        ({"prompt": "p", "tests": TESTS | {"seconds": 0}}, "tests.seconds"),
        ({"prompt": "p", "tests": TESTS | {"expect": ["("]}}, "tests.expect"),
        ({"prompt": "p", "tests": TESTS, "image": "a", "root": "b"}, "image"),
        ({"prompt": "p", "tests": TESTS, "directory": "/a/../b"}, "directory"),
        ({"prompt": "p", "tests": TESTS, "directory": "/"}, "directory"),
        ({"prompt": "p", "tests": TESTS, "keep": []}, "keep"),
        ({"prompt": "p", "tests": TESTS, "files": 3}, "files"),
    ],
)
def test_a_row_that_is_no_task_is_refused_and_its_line_named(tmp_path, row, about):
    with refused("task.row", about=about):
        tasks.to_prompt(row)
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"prompt": "p", "tests": TESTS}, row)))
    with refused("prompts.map", about=f"{path}, line 2"):
        read_prompts(path, make_mapping(None, f"{tasks.__name__}.to_prompt", None))


def config(base: Path, **options: Any) -> Config:
    box = {"host_usr": True, **options.pop("box", {})}
    deadlines = {"call_deadline": options.pop("call_deadline", 300.0)}
    options = {"toolbox": TERMINAL, "toolbox_options": {"tasks": str(base), "box": box, **options}}
    return config_of(generate="tools", options=options | deadlines)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"files": "none"}, "task.row"),
        ({"root": "none.tar"}, "task.row"),
        ({"image": "python:3.12"}, "box.source"),
        ({"root": "files/sums.py"}, "box.image"),
    ],
)
def test_a_prompt_whose_box_cannot_start_is_refused_before_the_run(task, tmp_path, more, code):
    hooks = load_hooks(config(tmp_path))
    check_generated(hooks.generate, [task()], None)
    with refused(code, about="p"):
        check_generated(hooks.generate, [task(**more)], None)


def test_a_deadline_shorter_than_the_tests_is_refused_before_the_run(task, tmp_path):
    hooks = load_hooks(config(tmp_path, call_deadline=79.0))  # 60 s of tests, 10 s of one program, 10 s to copy files
    with refused("tools.limit", about="rollout.options.call_deadline"):
        check_generated(hooks.generate, [task()], None)
    check_generated(hooks.generate, [task(tests=TESTS | {"seconds": 59})], None)


def test_the_trial_of_a_box_has_the_time_limit_of_its_tests(task, tmp_path):
    check_generated(load_hooks(config(tmp_path, box={"seconds": 0.001})).generate, [task()], None)


def test_a_root_without_a_shell_is_refused_before_the_run(task, tmp_path):
    hooks = load_hooks(config(tmp_path, box={"host_usr": False}))
    with refused("box.trial", about="p"):
        check_generated(hooks.generate, [task()], None)


@pytest.mark.parametrize(
    ("options", "code", "about"),
    [
        ({"box": {"backend": "vm"}}, "box.option", f"{KEY}.box.backend"),
        ({"box": {"limits": {"seconds": 3}}}, "box.option", f"{KEY}.box.limits"),
        ({"box": {"memory": 3}}, "box.option", f"{KEY}.box.memory"),
        ({"box": {"memory_mib": 0}}, "box.option", f"{KEY}.box.memory_mib"),
        ({"box": {"cpus": 2}}, "box.option", f"{KEY}.box.cpus"),
        ({"tasks": "none"}, "task.base", f"{KEY}.tasks"),
    ],
)
def test_options_of_boxes_that_cannot_work_are_refused_by_their_key(tmp_path, options, code, about):
    with refused(code, about=about):
        load_hooks(config(tmp_path, **options))


async def test_a_prompt_without_a_task_is_named(base):
    with refused("task.row", about="p"):
        await play(Prompt(id="p", messages=[{"role": "user", "content": "?"}]), base)
