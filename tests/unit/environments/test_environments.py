"""Model and environment take turns: provenance, rewards, deadlines, and the environments that come with slimx."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from examples import debate, fan_out
from examples.python_tool import Solver
from examples.search import Search
from slimx.data.records import Prompt
from slimx.errors import DeadlineError
from slimx.extras.agents import multi_turn
from slimx.extras.boxes.programs.python_tool import PythonTool
from slimx.extras.slime import modules
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.hooks import RewardContext
from tests.refusals import refused
from tests.unit.environments.environment_stand import Counting
from tests.unit.rollout.rollout_stand import config_of
from tests.unit.rollout.scripted_engine import PROMPT, ScriptedEngine, context, spans

HERE = "tests.unit.environments.environment_stand"


async def play(*answers: str, finish_reason: str = "stop", **options: Any) -> Any:
    engine = ScriptedEngine(*answers, finish_reason=finish_reason)
    environment = {"environment": f"{HERE}.Counting", "environment_options": options.pop("made_with", {})}
    trajectory = await multi_turn.generate(context(engine), PROMPT, **environment, **options)
    return engine, trajectory


async def test_turns_alternate_and_only_the_models_are_trained():
    engine, trajectory = await play("46", "47", made_with={"begins": "9"})
    kinds = [(source, text.replace("\n", "|")) for source, _, text in spans(trajectory)]
    assert [source for source, _ in kinds] == ["prompt", "inserted", "sampled", "inserted", "sampled"]
    assert "9" in kinds[1][1] and kinds[2][1].startswith("46") and "46+1" in kinds[3][1]
    trained = {span.source for span in trajectory.spans if trajectory.loss_mask[span.start : span.stop].all()}
    assert trained == {"sampled"}
    assert len(set(engine.seeds)) == 2 and engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
    metadata = {"rewards": [0.5, 0.5], "turns": 2, "ended": "done", "info": {"seen": 2}}
    assert trajectory.metadata == metadata
    assert await multi_turn.reward(RewardContext(PROMPT, None, "", False), trajectory) == 1.0


async def test_tools_that_the_turns_called_are_logged():
    ctx = context(ScriptedEngine("46", "47"))
    await multi_turn.generate(ctx, PROMPT, environment=f"{HERE}.Counting")
    assert ctx.metrics == {"tool_calls": 6.0}


async def test_a_rollout_ends_after_its_turns_or_when_an_answer_is_cut_off():
    _, trajectory = await play("46", "47", max_turns=2, made_with={"turns": 9})
    assert trajectory.metadata["ended"] == "turns" and trajectory.spans[-1].source == "sampled"
    _, trajectory = await play("46", finish_reason="length")
    assert trajectory.metadata["ended"] == "length" and trajectory.metadata["rewards"] == []
    assert trajectory.status == "truncated"


async def test_a_step_that_hangs_is_named_and_the_environment_is_closed():
    closed = Counting.closed
    with pytest.raises(DeadlineError) as caught:
        await play("46", turn_deadline=0.05, made_with={"hangs": True})
    assert caught.value.awaited.endswith("g0/0") and "Counting" in caught.value.holder
    assert Counting.closed == closed + 1


@pytest.mark.parametrize(
    ("options", "code", "about"),
    [
        ({}, "dotted.signature", "rollout.generate"),
        ({"environment": "Counting"}, "dotted.name", "rollout.options.environment"),
        ({"environment": f"{HERE}.Nothing"}, "dotted.missing", "rollout.options.environment"),
        ({"environment": f"{HERE}.asyncio"}, "environment.methods", "rollout.options.environment"),
        (
            {"environment": f"{HERE}.Counting", "environment_options": {"rounds": 3}},
            "environment.option",
            "rollout.options.environment_options",
        ),
        ({"environment": f"{HERE}.Counting", "turns": 3}, "dotted.options", "rollout.options"),
    ],
)
def test_an_environment_that_cannot_work_is_refused_before_the_run(options, code, about):
    with refused(code, about=about):
        load_hooks(config_of(generate="multi_turn", options=options))


@pytest.mark.needs("bwrap")
async def test_the_python_tool_runs_the_last_program_and_an_answer_ends_it():
    tool, hasty = PythonTool(seconds=60.0), PythonTool(seconds=1.0)
    PythonTool.check(seconds=60.0)
    assert await tool.reset(PROMPT, 0) == ""
    step = await tool.step("```\nprint(0)\n```\nNo:\n```python\nprint(6 * 7)\n```")
    assert (step.text, step.done) == ("Output:\n42", False)
    assert "ZeroDivisionError" in (await tool.step("```python\n1/0\n```")).text
    await hasty.reset(PROMPT, 0)
    assert (await hasty.step("```python\nwhile True: pass\n```")).text.endswith("limit of time)")
    end = await tool.step("The answer is 42")
    assert end.done and end.info == {"runs": 2}


@pytest.mark.needs("bwrap")
async def test_an_answer_is_graded_by_the_example_with_a_python_tool():
    solver = Solver(price=0.25)
    assert "<answer>" in await solver.reset(PROMPT, 0)
    solver.runs = 2  # programs so far
    end = await solver.step("It is <answer> 46 </answer>.")
    assert end.done and end.reward == 0.5 and end.info == {"runs": 2, "right": 1.0}


async def test_search_finds_the_passages_that_fit_best(tmp_path):
    corpus = [("Cats", "purr and sleep"), ("Dogs", "bark at cats"), ("Paris", "is the capital of France")]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in corpus))
    search = Search(corpus=str(path))
    await search.reset(Prompt(id="p", token_ids=[1], answer="Paris"), 0)
    found = await search.step("<search>the capital of France?</search>")
    assert found.text == ": ".join(corpus[2]) and not found.done
    assert (await search.step("<search>cats</search>")).text.splitlines()[0] == ": ".join(corpus[0])
    assert (await search.step("<search>zebra</search>")).text == "Nothing found."
    end = await search.step("It is <answer>paris.</answer>")
    assert end.done and end.reward == 1.0


NO_ANSWERS = [
    "46",
    " ".join(map(str, range(100))),
    "<answer>" + " ".join(map(str, range(100))) + "</answer>",
    "<answer>45</answer> or <answer>46</answer>",
    "Output:\n46",
    "<answer>Output:\n46</answer>",
    "<answer>146</answer>",
    "<answer></answer>",
    "<answer>46",
    "",
]


@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("response", NO_ANSWERS)
async def test_listing_numbers_or_repeating_tool_results_earns_no_reward(response, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "Sums", "text": "12 and 34 make 46"}) + "\n")
    for environment in (Solver(), Search(corpus=str(corpus))):
        await environment.reset(PROMPT, 0)
        end = await environment.step(response)
        assert end.done and end.reward == 0.0, environment


async def test_repeating_a_passage_earns_nothing(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "Sums", "text": "12 and 34 make 46"}) + "\n")
    search = Search(corpus=str(corpus))
    await search.reset(PROMPT, 0)
    passage = (await search.step("<search>12 34</search>")).text
    assert "46" in passage
    assert (await search.step(f"<answer>{passage}</answer>")).reward == 0.0
    assert (await search.step("<answer>46</answer>")).reward == 1.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("46", 1.0),
        ("45 = ?\n46<end> = ?\n", 1.0),
        ("45Go on.46Go on.", 1.0),
        ("46\n45", 0.0),
        (" ".join(map(str, range(100))), 0.0),
        ("146", 0.0),
        ("", 0.0),
    ],
)
async def test_the_example_of_slimes_form_reads_the_last_turn(response, score):
    modules.serve()
    right = importlib.import_module("examples.slime_style").right
    assert (await right(None, SimpleNamespace(response=response, label="46")))["score"] == score


async def test_debating_agents_read_each_other_and_are_trained_one_by_one():
    engine = ScriptedEngine("40", "46", "46", "46")
    first, second = await debate.generate(context(engine), PROMPT)
    assert first.rollout_id == second.rollout_id and first.id != second.id
    assert len(set(engine.seeds)) == 4
    decoded = engine.tokenizer.decode(engine.prompts[2])
    assert decoded.index("40") < decoded.rindex("46"), "the first agent has read the second one's answer"
    assert [t.metadata["answer"] for t in (first, second)] == ["46", "46"]


async def test_sub_agents_share_the_reward_of_the_main_answer():
    engine = ScriptedEngine("40", "45", "46", "46")
    trajectories = await fan_out.generate(context(engine), PROMPT, agents=3)
    assert len(trajectories) == 4 and len({t.id for t in trajectories}) == 4
    assert len({t.rollout_id for t in trajectories}) == 1 and len(set(engine.seeds)) == 4
    ctx = RewardContext(PROMPT, None, "", False)
    assert [await fan_out.reward(ctx, trajectory) for trajectory in trajectories] == [1.0] * 4
