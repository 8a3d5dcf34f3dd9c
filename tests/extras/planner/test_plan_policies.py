"""`slimx plan` sums what several trained policies need, and refuses what each has room for and all of them have not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimx.config.load import load_config
from slimx.extras.planner.links import rehearsal
from slimx.extras.planner.plan.policy_sums import refusals, sum_over_policies
from slimx.extras.planner.plan.report import Planned, plan_report
from slimx.preflight.hardware import machine_of
from tests.extras.planner.planning_stand import SHALLOW

JUDGE = "policies.judge.trainer={world_size: 4, expert: 4}"
RUN = ("trainer={world_size: 2, expert: 2}", "publish.transport=memory")


def planned(directory: Path, *arguments: str) -> tuple[list[Planned], Any]:
    """Plans each policy of the run in `directory` one after the other; returns the plans and the machine."""
    config = load_config(directory / "run.yaml", list(arguments))
    found: list[Planned] = []
    for policy_config in config.by_policy.values():
        first = sum(plan_of_policy.report.rank_map.gpus for plan_of_policy in found)
        found.append(plan_report(policy_config, config.policies, first=first))
    return found, machine_of(config.cluster)


def test_gpus_nodes_host_memory_and_disk_are_summed_over_policies(plan):
    code, text = plan(SHALLOW, *RUN, "cluster.gpu=h100", JUDGE, "--json")
    assert code == 0, text
    report = json.loads(text)
    judge, sums = report["policies"]["judge"], report["together"]
    assert (sums["gpus"], sums["nodes"]) == (2 + 1 + 4 + 1, 1) and judge["together"] is None
    assert [rank["gpu"] for rank in judge["rank_map"]["trainer"]] == [3, 4, 5, 6], "behind the actor's"
    peaks = [max(sum(part["nbytes"] for part in phase["held"]) for phase in of["phases"]) for of in (report, judge)]
    assert sums["fullest"] == max(peaks)
    hosts = [Counter({part["what"]: part["nbytes"] for part in of["host"]["held"]}) for of in (report, judge, sums)]
    assert hosts[0] + hosts[1] == hosts[2] and sums["host"]["ranks"] == 6
    disks = [of["disk"] for of in (report, judge, sums)]
    for key in ("checkpoint", "export", "rollouts"):
        assert disks[0][key] + disks[1][key] == disks[2][key] > 0
    assert disks[0]["checkpoints"] == disks[2]["checkpoints"]
    code, text = plan(SHALLOW, *RUN, "cluster.gpu=h100", JUDGE)
    (line,) = [line for line in text.splitlines() if line.startswith("together ")]
    assert code == 0 and "8 GPUs on 1 node of 8" in line


@pytest.mark.parametrize(
    ("cluster", "code"),
    [
        ("cluster={gpu: h100, gpus_per_node: 7, nodes: 1}", "machine.nodes"),
        ("cluster={gpu: h100, nodes: 1, host_memory_gib: 60}", "memory.host"),
        ("cluster={gpu: h100, nodes: 1}", None),
    ],
)
def test_policies_that_fit_alone_may_not_fit_together(plan, cluster, code):
    status, text = plan(SHALLOW, *RUN, cluster)
    assert status == 0, text
    found, machine = planned(plan.directory, *RUN, cluster, JUDGE)
    sums = sum_over_policies([planned.report for planned in found])
    assert not any(problem.code == code for plan_of_policy in found for problem in plan_of_policy.problems)
    assert [problem.code for problem in refusals(sums, machine)] == ([] if code is None else [code])
    assert plan(SHALLOW, *RUN, cluster, JUDGE)[0] == (0 if code is None else 2)


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (["cluster.ray_address=auto"], [True, True]),
        (["cluster.device=cpu"], [False, False]),
        (["cluster.device=cpu", "policies.judge.engines=[{name: judge, tensor: 16, nodes: 2}]"], [False, True]),
    ],
    ids=["both", "none", "judge"],
)
def test_a_publication_not_through_memory_is_refused(plan, arguments, problems):
    plan(SHALLOW, "policies.judge={}", *arguments)
    found, _ = planned(plan.directory, "policies.judge={}", *arguments)
    refused = [[p.about for p in plan_of_policy.problems if p.code == "policies.transport"] for plan_of_policy in found]
    assert refused == [["publish.transport"] * plan_of_policy for plan_of_policy in problems]
    (alone,), _ = planned(plan.directory, "policies.judge={shares: actor}", *arguments[:1])
    assert not any(problem.code == "policies.transport" for problem in alone.problems)


def test_shared_engines_count_once_with_a_slot_per_policy(plan, monkeypatch):
    """Gives both servers of the group all slots; each policy sends to both."""
    lora = "lora: {rank: 4, alpha: 8, targets: [attention]}"
    adapters = (f"trainer={{world_size: 2, expert: 1, {lora}}}", "publish.adapters=alone", "cluster.gpu=h100")
    adapters += ("rollout.engines=[{count: 2}]",)
    code, text = plan(SHALLOW, RUN[1], *adapters, "--json")
    assert code == 0, text
    alone = json.loads(text)
    code, text = plan(SHALLOW, RUN[1], *adapters, "policies.judge.engines_of=actor", "--json")
    assert code == 0, text
    report = json.loads(text)
    judge, sums = report["policies"]["judge"], report["together"]
    assert sums["gpus"] == 2 + 2 + 2 and judge["rank_map"]["engines"] == judge["engine_memory"] == []
    assert [rank["gpu"] for rank in judge["rank_map"]["trainer"]] == [4, 5]
    assert [group["borrowed"] for of in (report, judge) for group in of["engines"]] == [False, True]
    (before,), (shared,) = alone["engine_memory"], report["engine_memory"]
    both = report["publication"]["adapter_bytes"]
    assert 2 * (shared["weights"] - before["weights"]) == both == judge["publication"]["adapter_bytes"] > 0
    monkeypatch.setattr(rehearsal, "rehearse", lambda: SimpleNamespace(holds=True, off=0.0))
    code, text = plan(SHALLOW, RUN[1], *adapters, "policies.judge.engines_of=actor", "--predict")
    assert code == 0 and "engines of actor" in text
