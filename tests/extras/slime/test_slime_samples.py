"""slime's samples become trajectories and back; no token is trained that no engine sampled at its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slimx.data.records import Trajectory
from slimx.extras.slime.arguments import RunFacts
from slimx.extras.slime.call import Request
from slimx.extras.slime.convert import begin, to_sample, to_trajectory
from slimx.extras.slime.sample import Sample
from slimx.rollout.client.completion import Completion
from tests.extras.slime.slime_stand import PROMPT, Scripted, context
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import the_tokenizer


def filled(engine_ids: list[list[int]], between: list[int], **changes: Any) -> tuple[Sample, list[Request]]:
    """Returns a sample of two answers with `between` inserted, and the requests that brought them."""
    prompt, calls, tokens = [10, 11], [], [10, 11]
    mask: list[int] = []
    for number, ids in enumerate(engine_ids):
        completion = Completion(
            np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), [(0, len(ids), 7)], "stop", None, 0, 0.0
        )
        calls.append(Request(list(tokens), completion, None))
        tokens, mask = tokens + ids, mask + [1] * len(ids)
        if number == 0:
            tokens, mask = tokens + between, mask + [0] * len(between)
    sample = begin(PROMPT, "text", index=1, group="4", run=RunFacts())
    sample.tokens, sample.response_length, sample.loss_mask = tokens, len(tokens) - len(prompt), mask
    sample.status = Sample.Status.COMPLETED
    for key, value in changes.items():
        setattr(sample, key, value)
    return sample, calls


def converted(sample: Sample, calls: list[Request]) -> Trajectory:
    return to_trajectory(sample, context(Scripted()), calls)


def test_a_sample_is_the_same_again_after_a_trajectory():
    sample, calls = filled([[20, 21], [22, 3]], [30, 31], response="r", mine=[1, "x"], reward={"a": 1})
    sample.rollout_log_probs = [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    trajectory = converted(sample, calls)
    assert trajectory.token_ids.tolist() == [10, 11, 20, 21, 30, 31, 22, 3]
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [(s.source, s.turn, s.start, s.stop) for s in trajectory.spans] == [
        ("prompt", 0, 0, 2),
        ("sampled", 0, 2, 4),
        ("inserted", 1, 4, 6),
        ("sampled", 1, 6, 8),
    ]
    back = to_sample(trajectory, PROMPT, the_tokenizer, RunFacts())
    for name in (
        "tokens",
        "response_length",
        "loss_mask",
        "rollout_log_probs",
        "status",
        "prompt",
        "response",
        "label",
    ):
        assert getattr(back, name) == getattr(sample, name), name
    assert back.weight_versions == ["7", "7"] and back.mine == [1, "x"] and back.reward == {"a": 1}
    assert back.metadata == {"level": 1}


@pytest.mark.parametrize(("token", "is_whole"), [(2.0, True), (np.int64(2), True), (2.7, False), (np.nan, False)])
def test_a_token_that_is_no_whole_number_is_refused_and_never_cut(token, is_whole):
    sample, _ = filled([[20]], [])
    sample.weight_versions, sample.rollout_log_probs = ["7"], [-0.5]
    sample.append_response_tokens(tokens=[token], log_probs=[-0.5])
    if is_whole:
        assert converted(sample, []).token_ids.tolist() == [10, 11, 20, 2]
    else:
        with refused("tokens.ids", about="token_ids"):
            converted(sample, [])


def test_masked_and_removed_tokens_are_not_trained():
    sample, calls = filled([[20, 21], [22, 3]], [30])
    sample.loss_mask = [0, 1, 0, 0, 1]
    assert converted(sample, calls).loss_mask.tolist() == [0, 0, 0, 1, 0, 0, 1]
    sample.remove_sample = True
    trajectory = converted(sample, calls)
    assert not trajectory.loss_mask.any() and (trajectory.versions() >= 0).sum() == 4


def test_an_answer_that_was_cut_short_keeps_its_beginning():
    sample, calls = filled([[20, 21, 22], [23, 3]], [30])
    calls[1].prompt[:] = sample.tokens = [10, 11, 20, 21, 30]  # the hook left the third token off, and asked again
    sample.tokens = [*sample.tokens, 23, 3]
    sample.response_length, sample.loss_mask = 5, [1, 1, 0, 1, 1]
    trajectory = converted(sample, calls)
    assert [(s.source, s.start, s.stop) for s in trajectory.spans] == [
        ("prompt", 0, 2),
        ("sampled", 2, 4),
        ("inserted", 4, 5),
        ("sampled", 5, 7),
    ]


def retokenized(sample: Sample, calls: list[Request]) -> None:
    sample.tokens[2] = 40


def another_context(sample: Sample, calls: list[Request]) -> None:
    calls[1].prompt[0] = 9


def other_logprob(sample: Sample, calls: list[Request]) -> None:
    sample.rollout_log_probs = [-0.5, -0.25, 0.0, -0.5, -0.5]


def trained_tool(sample: Sample, calls: list[Request]) -> None:
    sample.loss_mask = [1, 1, 1, 1, 1]


def short_mask(sample: Sample, calls: list[Request]) -> None:
    sample.loss_mask = [1]


def aborted(sample: Sample, calls: list[Request]) -> None:
    sample.status = Sample.Status.ABORTED


def images(sample: Sample, calls: list[Request]) -> None:
    sample.multimodal_inputs = {"images": ["x"]}


def object_on_it(sample: Sample, calls: list[Request]) -> None:
    sample.agent = object()


THE_SAMPLE = "the sample of rollout 4/1"


@pytest.mark.parametrize(
    ("spoil", "code", "about"),
    [
        (retokenized, "slime.token", f"token 2 of {THE_SAMPLE}"),
        (another_context, "slime.token", f"token 5 of {THE_SAMPLE}"),
        (other_logprob, "slime.logprobs", f"token 3 of {THE_SAMPLE}"),
        (trained_tool, "slime.token", f"token 4 of {THE_SAMPLE}"),
        (short_mask, "slime.lengths", THE_SAMPLE),
        (aborted, "slime.aborted", THE_SAMPLE),
        (images, "slime.field", "multimodal_inputs"),
        (object_on_it, "slime.metadata", "agent"),
    ],
)
def test_a_sample_that_differs_from_the_engines_response_is_refused(spoil, code, about):
    sample, calls = filled([[20, 21], [22, 3]], [30])
    spoil(sample, calls)
    with refused(code, about=about):
        converted(sample, calls)


def test_a_hook_with_another_client_must_return_versions_and_logprobs():
    sample, _ = filled([[20, 21], [22, 3]], [30])
    with refused("slime.unsampled"):
        converted(sample, [])
    sample.rollout_log_probs, sample.weight_versions = [-0.1, -0.2, 0.0, -0.3, -0.4], ["6", "7"]
    trajectory = converted(sample, [])
    assert trajectory.versions().tolist() == [-1, -1, 6, 6, -1, 7, 7]
    assert np.allclose(trajectory.logprobs[[2, 3, 5, 6]], [-0.1, -0.2, -0.3, -0.4])
    sample.weight_versions = []
    assert set(to_trajectory(sample, context(Scripted()), [], version=9).versions().tolist()) == {-1, 9}
    sample.weight_versions = ["default"]
    with refused("slime.version"):
        converted(sample, [])
