"""The example of a coding agent: sub-agents and summaries in a real sandbox, by a scripted policy."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples import coding_agent
from slimx.data.prompts.mapping import make_mapping
from slimx.data.prompts.read import read_prompts
from slimx.data.records import Prompt, Trajectory
from slimx.extras.agents import agent
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.extras.boxes import rootfs
from slimx.extras.boxes.terminal import tasks
from slimx.rollout.hooks import RewardContext
from tests.extras.agents.proxy_stand import Script, context, text_of, trained
from tests.extras.boxes.calls import calling
from tests.extras.boxes.repairs import EXAMPLES, IN_ONE_CALL, shell
from tests.refusals import refused

AGENT = "examples.coding_agent.solve"
REPAIR = IN_ONE_CALL["intervals"]
LONG = 20_000
"""Tokens of the context: here, a token is a character."""

in_boxes = pytest.mark.needs("bwrap", "unshare", "prlimit", "tar")


@pytest.fixture(scope="module")
def prompts() -> dict[str, Prompt]:
    mapping = make_mapping(None, f"{tasks.__name__}.to_prompt", None)
    return {prompt.id: prompt for prompt in read_prompts(EXAMPLES / "tasks.jsonl", mapping)}


@pytest.fixture
def toolbox_options() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        box = {"host_usr": True, "seconds": 60, "memory_mib": 256, "disk_mib": 8, "base": base}
        yield {"tasks": str(EXAMPLES), "box": box}
        assert list(Path(base).glob(f"{rootfs.PREFIX}*")) == [], "no sandbox is left behind"


async def play(
    prompt: Prompt, says: list[str], *, max_context: int = LONG, max_requests: int = 64, **agent_options: Any
) -> tuple[list[Trajectory], Script]:
    script, proxy = Script(*says), ChatProxy(context=LONG)
    ctx = context(script, proxy, max_new_tokens=500)
    limits = {"max_context": max_context, "max_requests": max_requests}
    try:
        found = await agent.generate(ctx, prompt, agent=AGENT, agent_options=agent_options, **limits)
    finally:
        await proxy.stop()
    return found, script


async def parts(prompt: Prompt, trajectory: Trajectory) -> dict[str, float]:
    return await coding_agent.reward(RewardContext(prompt, None, "", False), trajectory)


@in_boxes
async def test_a_rollout_has_a_trajectory_per_summary_and_sub_agent(prompts, toolbox_options) -> None:
    prompt = prompts["intervals"]
    says = [
        calling("delegate", task="Find the comparison."),
        shell("grep -n '<' intervals.py"),  # the sub-agent, in the same sandbox
        "Line 6 compares.",
        shell("cat intervals.py"),
        "I looked; replace < by <=.",  # the summary
        REPAIR,
        "Repaired; finished.",  # the second summary
        "Done.",
    ]
    begin = len(text_of((await play(prompt, ["Done."], toolbox_options=toolbox_options))[0][0]))
    found, script = await play(prompt, says, toolbox_options=toolbox_options, compact_at=begin + 130)
    sub, main, resumed, last = found  # in the order of their last turns
    assert trained(main) == "".join(f"{says[turn]}<end>" for turn in (0, 3, 4))
    assert [trained(sub), trained(resumed)] == [f"{says[1]}<end>{says[2]}<end>", f"{says[5]}<end>{says[6]}<end>"]
    assert trained(last) == "Done.<end>"
    assert "start < merged" in text_of(sub) and "tool: Line 6 compares.<end>" in text_of(main)
    assert f"{coding_agent.CONTINUE}{says[4]}<end>" in text_of(resumed) and says[4] not in text_of(last)
    assert "delegate" in text_of(last) and "delegate" not in text_of(sub), "a sub-agent has no sub-agents"
    assert {trajectory.rollout_id for trajectory in found} == {"g/0"}
    for trajectory in found:
        assert trajectory.metadata["result"] == {
            "tests": 1.0,
            "ended": "done",
            "compactions": 2,
            "sub_agents": 1,
            "prompt_tokens": sum(map(len, script.prompts)),
            "cached_tokens": 2 * len(says),
        }
        assert await parts(prompt, trajectory) == {"tests": 1.0} and trajectory.status == "completed"
    assert len(script.received) == len(says)


@in_boxes
@pytest.mark.parametrize(
    ("limits", "ended"),
    [
        ({"max_requests": 2}, "request_limit_exceeded"),
        ({"max_context": 3000}, "context_length_exceeded"),
        ({"max_turns": 2}, "turns"),
    ],
    ids=["requests", "context", "turns"],
)
async def test_an_agent_at_a_limit_is_judged_by_what_it_left(prompts, toolbox_options, limits, ended) -> None:
    prompt = prompts["intervals"]
    says = [REPAIR, shell("seq 9999"), "never said"]
    (found,), _ = await play(prompt, says, toolbox_options=toolbox_options, **limits)
    result = found.metadata["result"]
    assert (result["tests"], result["ended"], result["compactions"]) == (1.0, ended, 0)
    assert found.status == ("completed" if ended == "turns" else "truncated")


@in_boxes
async def test_unusable_calls_are_answered_and_a_report_names_its_end(prompts, toolbox_options) -> None:
    says = [
        calling("delegate", task=3),
        calling("delegate", task="Look."),
        calling("delegate", task="Look for me."),
        shell("true"),
        calling("nothing"),
        "Done.",
    ]
    found, _ = await play(prompts["intervals"], says, toolbox_options=toolbox_options, sub_turns=2, max_result=45)
    sub, main = map(text_of, found)
    assert "string: task.<end>" in main
    assert "no tool nothing.<end>" in main
    assert ": turns. Its las\n(" in main, "cut to 45 characters"
    assert "There is no tool delegate." in sub
    assert await parts(prompts["intervals"], found[0]) == {"tests": 0.0}


@pytest.mark.parametrize("name", ["compact_at", "max_turns", "sub_turns", "max_result", "timeout"])
def test_limits_that_are_not_positive_are_refused_before_the_run(name: str) -> None:
    with refused("coding_agent.limit", about=f"rollout.options.agent_options.{name}"):
        agent.check(agent=AGENT, agent_options={name: 0})


@in_boxes
def test_the_tasks_of_an_agent_are_checked_before_the_run(prompts, toolbox_options) -> None:
    options = {"agent": AGENT, "agent_options": {"toolbox_options": toolbox_options}}
    agent.check(**options)
    agent.check_prompts([prompts["intervals"]], **options)
    agent.check_prompts([prompts["intervals"]], command=["true"])
    with refused("task.row", about="bare"):
        agent.check_prompts([Prompt(id="bare", messages=[])], **options)
    with refused("dotted.options", about="rollout.options.agent_options"):
        agent.check(agent=AGENT, agent_options={"box": {}})
