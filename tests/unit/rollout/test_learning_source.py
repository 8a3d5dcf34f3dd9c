"""Sources that learn what became of their prompts, and the curriculum among the examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from examples.levels import DOWN, UP, WINDOW, Levels, make_source
from slimx.data.prompts.read import Outcome, PromptSource
from slimx.data.records import Prompt
from slimx.data.saved.codec import decode, encode
from slimx.rollout.flow.manager import TOO_OLD
from slimx.rollout.flow.tickets import Dropped, SavedTicket
from tests.refusals import refused
from tests.unit.rollout.flow_stand import TURN_TOKENS, Flow, kept
from tests.unit.rollout.rollout_stand import config_of
from tests.virtual_time import run_virtually

SIZE = 4
PROMPTS = [Prompt(id=f"p{n}", token_ids=[5, 6, 7], metadata={"level": n % 3}) for n in range(60)]


class LearningSource(PromptSource):
    """Shuffled epochs, and all that was learnt."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        super().__init__(prompts, 1)
        self.steps: list[list[Outcome]] = []

    def learn(self, outcomes: list[Outcome]) -> None:
        self.steps.append(outcomes)

    def state(self) -> dict[str, Any]:
        return super().state() | {"steps": len(self.steps)}


def config() -> Any:
    return config_of(prompts_per_step=SIZE, max_failed_share=1.0, sampling={"max_new_tokens": TURN_TOKENS})


def flow(source: Any) -> Flow:
    """Returns a run whose rollouts are right in seven cases of eight."""
    made = Flow(config(), np.random.default_rng(1), PROMPTS)
    made.manager.source, original = source, made.maker.make

    async def rewarded(prompt: Prompt, **how: Any) -> Any:
        outcome = await original(prompt, **how)
        for number, trajectory in enumerate(outcome.group.trajectories):
            trajectory.reward = float((how["number"] + number) % 8 > 0)
        return outcome

    made.maker.make = rewarded
    return made


def test_a_source_learns_every_end_once_in_the_order_of_its_prompts() -> None:
    source = LearningSource(PROMPTS)
    order = PromptSource(PROMPTS, 1)
    ids = [order.next().id for _ in range(60)]

    async def steps() -> list[list[str]]:
        run, trained = flow(source), []
        for version in range(3):
            batch = await run.manager.next_batch()
            trained.append([group.prompt.id for group in batch.groups])
            run.publish(version + 1)
        await run.manager.stop()
        return trained

    trained = run_virtually(steps())
    learnt = [outcome for step in source.steps for outcome in step]
    assert [outcome.prompt for outcome in learnt] == ids[: len(learnt)]
    assert [[one.prompt for one in step if one.dropped is None] for step in source.steps] == trained
    for number, outcome in enumerate(learnt):
        assert (outcome.dropped is None) == kept(config(), number), "by hand: who fails, and who is filtered out"
    assert {outcome.dropped for outcome in learnt} >= {None, "filter: unlucky"}
    whole = [outcome for outcome in learnt if outcome.dropped in (None, "filter: unlucky")]
    assert {len(outcome.rewards) for outcome in whole} == {config().rollout.group_size}


def test_a_group_that_is_generated_again_has_not_ended() -> None:
    source = LearningSource(PROMPTS)

    async def step() -> None:
        run = flow(source)
        run.manager._drop(Dropped(group="g0", prompt="p0", reason=TOO_OLD))
        await run.manager.next_batch()
        await run.manager.stop()

    run_virtually(step())
    (learnt,) = source.steps
    assert learnt and TOO_OLD not in {outcome.dropped for outcome in learnt}


def test_a_source_that_fails_to_learn_is_named() -> None:
    class Broken(LearningSource):
        def learn(self, outcomes: list[Outcome]) -> None:
            raise KeyError("level")

    async def step() -> None:
        run = flow(Broken(PROMPTS))
        try:
            await run.manager.next_batch()
        finally:
            await run.manager.stop()

    with refused("sources.raised", about="rollout.source"):
        run_virtually(step())


def outcomes_of(source: Levels, count: int, share: float) -> list[Outcome]:
    """Returns groups of four of which this share is right."""
    return [
        Outcome(source.next().id, tuple([1.0] * round(4 * share) + [0.0] * round(4 - 4 * share))) for _ in range(count)
    ]


def test_the_level_rises_when_solved_and_falls_when_too_hard() -> None:
    source = make_source(PROMPTS, 1)
    assert source.level == 0 and source.next().metadata["level"] == 0
    source.learn(outcomes_of(source, WINDOW - 1, 1.0))
    assert source.level == 0, "the window is not full"
    source.learn(outcomes_of(source, 1, 1.0))
    assert source.level == 1 and source.next().metadata["level"] == 1
    source.learn(outcomes_of(source, WINDOW, 0.5))
    assert source.level == 1 and DOWN < 0.5 < UP
    source.learn(outcomes_of(source, WINDOW, 0.0))
    assert source.level == 0
    source.learn(outcomes_of(source, WINDOW, 0.0))
    assert source.level == 0, "there is none below"


def test_groups_of_another_level_and_broken_ones_do_not_count() -> None:
    source = make_source(PROMPTS, 1)
    others = [Outcome(prompt.id, (1.0,)) for prompt in PROMPTS if prompt.metadata["level"] == 2]
    broken = [Outcome(prompt.id, (), "generate failed") for prompt in PROMPTS if prompt.metadata["level"] == 0]
    source.learn(others + broken)
    assert source.level == 0 and source.state()["shares"] == []


@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_curriculum_has_the_prompts_of_one_that_went_on(stop: int) -> None:
    """Through the checkpoint of the rollouts, as a run writes it."""
    steps = 7

    async def go(run: Flow, count: int, first: int = 0) -> list[list[str]]:
        trained = []
        for version in range(first, first + count):
            run.publish(version)
            trained.append([group.prompt.id for group in (await run.manager.next_batch()).groups])
        return trained

    async def whole() -> list[list[str]]:
        run = flow(make_source(PROMPTS, 1))
        trained = await go(run, steps)
        assert run.manager.source.level > 0
        await run.manager.stop()
        return trained

    async def in_two() -> list[list[str]]:
        first, second = (flow(make_source(PROMPTS, 1)) for _ in range(2))
        trained = await go(first, stop)
        state = first.manager.state()
        state["tickets"] = decode(list[SavedTicket], encode(state["tickets"]))
        await first.manager.stop()
        second.manager.restore(state)
        trained += await go(second, steps - stop, stop)
        await second.manager.stop()
        return trained

    assert run_virtually(in_two()) == run_virtually(whole())
