"""Groups as `slimx rollouts` and the live page show them."""

from __future__ import annotations

from dataclasses import replace

from slimx.data.records import Group, Prompt
from slimx.extras.watch.show import group_lines, group_values
from tests.unit.data.trajectory_stand import trajectory


def test_trajectories_of_further_policies_name_theirs():
    actor, judged = trajectory("g0", "r0", [0, 1, 1]), replace(trajectory("g0", "r1", [0, 1]), policy="judge")
    group = Group(id="g0", prompt=Prompt(id="p0", token_ids=[1]), trajectories=[actor, judged])
    shown = group_values(group, None, lambda policy: str, {}, tokens=False)
    assert [values["policy"] for values in shown["trajectories"]] == ["actor", "judge"]
    lines = [line for line in group_lines(shown) if any(t.id in line for t in (actor, judged))]
    assert ["judge" in line for line in lines] == [False, True]
