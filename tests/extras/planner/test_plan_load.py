"""`slimx plan` estimates the load of driver and rollout workers, and `auto` follows from the same figures."""

from __future__ import annotations

import json

import pytest

from slimx.cluster.starting import worker_count
from slimx.config.load import load_config
from slimx.extras.rollout_workers.load import TARGET, Costs, Load, Traffic, load_of
from tests.extras.planner.planning_stand import H100, RUN_30B, SHALLOW, lines_of

AGENTS = (
    *RUN_30B,
    "rollout.generate=tools",
    "rollout.options={toolbox: x, max_turns: 20}",
    "rollout.concurrency=4096",
    "rollout.prompts_per_step=512",
    "trainer.max_tokens_per_microbatch=16384",
)
CLUSTER = "cluster.ray_address=auto"


def load_in(plan, *overrides):
    return json.loads(plan(SHALLOW, *overrides, "--json")[1])["rollout_load"]


def test_the_load_is_the_traffic_times_the_measured_costs():
    costs = Costs(
        rollout=2,
        request=1,
        sent=0.5,
        sampled=4,
        routes=3,
        driver_second=5,
        driver=0.1,
        driver_tokens=0.2,
        driver_routes=0.3,
    )
    traffic = Traffic(
        rollouts=10, requests=100, sent=40_000, sampled=5_000, kept=8_000, routes=2_000_000, kept_routes=1_000_000
    )
    load = load_of(traffic, costs)
    assert load.driver == pytest.approx((5 + 10 * 0.1 + 8 * 0.2 + 1 * 0.3) / 1e3)
    assert load.workers == pytest.approx((10 * 2 + 100 * 1 + 40 * 0.5 + 5 * 4 + 2 * 3) / 1e3)


@pytest.mark.parametrize(("workers", "needed"), [(0.0, 1), (TARGET, 1), (TARGET + 0.01, 2), (12 * TARGET, 12)])
def test_there_are_as_many_workers_as_half_a_core_each_needs(workers, needed):
    assert Load(0.0, workers).needed == needed


def test_workers_share_the_load_that_the_driver_has_without_them(plan):
    alone = load_in(plan, *AGENTS, H100)
    shared = load_in(plan, *AGENTS, H100, "rollout.workers=4")
    assert (alone["workers"], alone["worker"], shared["workers"]) == (0, 0, 4)
    assert shared["driver"] + 4 * shared["worker"] == pytest.approx(alone["driver"], rel=0.01)
    assert shared["rollouts_per_second"] == pytest.approx(shared["requests_per_second"] / 20, rel=0.01)


def test_auto_is_the_number_that_the_plan_shows(plan):
    load = load_in(plan, *AGENTS, H100, CLUSTER)
    config = load_config(plan.directory / "run.yaml", [*AGENTS, H100, CLUSTER])
    assert load["workers"] == worker_count(config) > 1
    assert TARGET / 2 < load["worker"] <= TARGET
    (line,) = lines_of(plan(SHALLOW, *AGENTS, H100, CLUSTER)[1], "  load ")
    assert f"{load['workers']} workers at {load['worker']:.0%}" in line
    longer = load_in(plan, *AGENTS, H100, CLUSTER, "rollout.options.max_turns=2")
    assert longer["tokens_per_answer"] > load["tokens_per_answer"] and longer["workers"] < load["workers"]


def test_engines_on_cpus_need_no_worker_and_have_no_estimate(plan):
    overrides = (*RUN_30B, "cluster.device=cpu", "publish.transport=memory", CLUSTER)
    assert load_in(plan, *overrides) is None
    assert worker_count(load_config(plan.directory / "run.yaml", list(overrides))) == 0
