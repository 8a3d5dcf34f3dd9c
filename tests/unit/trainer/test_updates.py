"""Several optimizer updates per step: whole groups, denominators of their own, metrics put together honestly."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slimx.config.schema import Config
from slimx.data.packing import pack
from slimx.data.records import Group, Prompt, Trajectory
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.models.layer_kind import LayerKind
from slimx.orchestration.batches import batch_metrics, make_packer, make_update_rows, split_groups
from slimx.trainer.step.metrics import combine
from tests.refusals import invalid
from tests.unit.data.trajectory_stand import trajectory


def config(**sections: dict) -> Config:
    base = {
        "run": {"dir": "d"},
        "model": {"path": "m"},
        "rollout": {"prompts": "p", "prompts_per_step": 6, "group_size": 2},
    }
    return Config.model_validate({**base, **sections})


def make_groups(count: int) -> list[Group]:
    """Makes groups of 1 to 3 rollouts of different lengths; token g in group g, so that each row names its group."""
    groups = []
    for number in range(count):
        rollouts: list[Trajectory] = []
        for index in range(1 + number % 3):
            one = trajectory(f"g{number}", f"g{number}/{index}", [0, *[1] * (3 + 2 * number + index)])
            one.token_ids = np.full(len(one.loss_mask), number + 1, np.int32)
            rollouts.append(one)
        groups.append(Group(id=f"g{number}", prompt=Prompt(id=str(number)), trajectories=rollouts))
    return groups


@pytest.mark.parametrize("aggregation", ["token", "sample", "prompt"])
@pytest.mark.parametrize("updates", [1, 2, 3, 6])
def test_each_group_is_whole_in_one_update_with_its_denominators(updates, aggregation):
    groups = make_groups(6)
    settings = config(schedule={"updates_per_step": updates}, algorithm={"aggregation": aggregation})
    made = make_update_rows(
        settings,
        groups,
        lambda groups: [1.0] * sum(len(group.trajectories) for group in groups),
    )
    assert len(made) == updates
    seen: list[int] = []
    for rows in made:
        update = pack(rows, data_size=1, max_tokens=64)
        batches = [batch for shard in update.shards for batch in shard]
        assert sum(b.weight.astype(np.float64).sum() for b in batches) == pytest.approx(1, abs=1e-6)
        tokens = np.concatenate([batch.tokens for batch in batches])
        here = sorted(set(tokens.tolist()))
        assert len(tokens) == sum(len(t.token_ids) - 1 for n in here for t in groups[n - 1].trajectories)
        seen += here
    assert seen == [1, 2, 3, 4, 5, 6], "groups stay in order and are trained once"


def test_groups_that_do_not_divide_evenly_are_split_as_evenly_as_can_be():
    assert [len(part) for part in split_groups(make_groups(7), 3)] == [3, 2, 2]


def test_updates_that_would_cut_the_step_unevenly_are_refused():
    with invalid("schedule.updates", about="schedule.updates_per_step"):
        config(schedule={"updates_per_step": 4})


def test_the_learning_rate_spans_the_updates_of_the_run():
    assert config(schedule={"steps": 7, "updates_per_step": 3}).schedule.updates == 21


def test_metrics_of_updates_are_put_together_by_what_they_are():
    first = {"loss/policy": 1.0, "gap/mean": 0.25, "optim/lr": 3.0, "optim/skipped": 1.0, "gap/max": 2.0, "x_max": 1.0}
    second = {"loss/policy": 2.0, "optim/lr": 4.0, "optim/skipped": 1.0, "x_max": 5.0, "optim/zero_gradient": 1.0}
    assert combine([first, second]) == {
        "loss/policy": 1.5,
        "gap/mean": 0.25,
        "optim/lr": 4.0,
        "optim/skipped": 2.0,
        "optim/zero_gradient": 1.0,
        "gap/max": 2.0,
        "x_max": 5.0,
    }
    assert combine([first]) == first
    assert combine([second, second])["optim/zero_gradient"] == 2.0
    assert math.isnan(combine([{"loss/policy": float("nan")}, second])["loss/policy"])


QWEN = ModelSpec(
    path="m",
    hf={},
    transformer={
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "kv_channels": 4,
        "ffn_hidden_size": 16,
    },
    gpt={"vocab_size": 64},
    layer_kind=LayerKind(),
    table=None,
    family=None,
    untrained=(),
)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (Sizes(), {"data_size": 1, "multiple_of": 1, "sequence_multiple": 1, "count_multiple": 1, "lockstep": False}),
        (Sizes(tensor=2, data=4, expert_tensor=2), {"data_size": 4, "multiple_of": 2, "lockstep": False}),
        (Sizes(tensor=2, context=4), {"multiple_of": 8, "sequence_multiple": 8}),
        (Sizes(pipeline=4), {"count_multiple": 1}),
        (Sizes(pipeline=4, virtual=2), {"count_multiple": 4}),
        # Experts on the tensor-parallel ranks of one data-parallel rank, then on those of two.
        (Sizes(tensor=2, data=2, expert=2), {"lockstep": False}),
        (Sizes(tensor=2, data=2, expert=4), {"lockstep": True}),
        (Sizes(tensor=2, data=2, expert=2, expert_tensor=2), {"lockstep": True}),
    ],
)
def test_rows_are_packed_as_the_layout_wants_them(sizes, expected):
    settings = make_packer(config(trainer={"max_tokens_per_microbatch": 99}), QWEN, sizes).keywords
    assert {name: settings[name] for name in expected} == expected and settings["max_tokens"] == 99


def test_cost_is_counted_in_what_the_configuration_names():
    by_tokens = make_packer(config(trainer={"balance": "tokens"}), QWEN, Sizes()).keywords["cost"]
    assert by_tokens(7) == 7
    by_flops = make_packer(config(), QWEN, Sizes()).keywords["cost"]
    assert by_flops(2000) > 2 * by_flops(1000)


def test_the_effects_of_packing_are_counted():
    """Two ranks: rows of 5 and 4 positions become 8 each."""
    groups = make_groups(1)
    groups[0].trajectories = [trajectory("g", "a", [1] * 6), trajectory("g", "b", [1] * 5)]
    settings = config(schedule={"updates_per_step": 1})
    (rows,) = make_update_rows(settings, groups, lambda groups: [0.0, 0.0])
    assert batch_metrics([pack(rows, data_size=2, max_tokens=8, multiple_of=8)]) == {
        "batch/microbatches": 1.0,
        "batch/padding": 7 / 16,
        "batch/imbalance": pytest.approx(10 / 9 - 1),
    }
