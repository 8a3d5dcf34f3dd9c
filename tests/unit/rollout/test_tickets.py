"""Which tickets a batch takes, worked out by hand: 2 groups a batch; + is a finished group, . an unfinished one."""

from __future__ import annotations

import pytest

from slimx.data.records import Group, Prompt
from slimx.rollout.flow.rollouts import GroupOutcome
from slimx.rollout.flow.tickets import Rules, Ticket


def queue_of(marks: str, born: list[int], started: bool = True) -> list[Ticket]:
    """Returns a ticket for each mark; `-` is a number that was trained or dropped."""
    out = []
    for number, (mark, version) in enumerate(zip(marks, born, strict=True)):
        if mark == "-":
            continue
        prompt = Prompt(id=f"p{number}", token_ids=[1])
        ticket = Ticket(number, prompt, version)
        if mark == "+":
            ticket.outcome = GroupOutcome(Group(id=f"g{number}", prompt=prompt, trajectories=[]))
        elif started:
            ticket.task = object()
        out.append(ticket)
    return out


CASES = {
    # marks, born, version, staleness, window, taken
    "in order": ("++..", [0, 0, 0, 0], 0, 1, 0, [0, 1]),
    "an unfinished one is waited for": (".+++", [0, 0, 0, 0], 0, 1, 0, None),
    "a window lets others pass": (".+++", [0, 0, 0, 0], 0, 2, 1, [1, 2]),
    "but not further than it reaches": (".-.++", [0, 0, 0, 0, 0], 0, 4, 1, None),
    "it reaches window x size numbers": (".-+.+", [0, 0, 0, 0, 0], 0, 4, 2, [2, 4]),
    "not one that is due now": (".+++", [0, 0, 1, 1], 1, 1, 1, None),
    "one that is due later may wait": (".+++", [1, 0, 1, 1], 1, 1, 1, [1, 2]),
    "nor if one of them would be late": ("...++", [0, 0, 0, 1, 1], 0, 1, 2, None),
    "of these as many as the next batch holds": ("..-++", [0, 0, 0, 1, 1], 0, 1, 2, [3, 4]),
    "surplus that is late in any order delays nothing": ("+++", [0, 0, 0], 0, 0, 0, [0, 1]),
    "too few": ("+...", [0, 0, 0, 0], 0, 3, 3, None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_batch_takes(case):
    marks, born, version, staleness, window, taken = CASES[case]
    found = Rules(size=2, max_open=9, staleness=staleness, window=window).select(queue_of(marks, born), version)
    assert (found and [ticket.number for ticket in found]) == taken


def test_a_ticket_that_waits_to_be_begun_is_not_late():
    rules = Rules(size=2, max_open=9, staleness=1, window=0)
    begun, waiting = queue_of(".", [0])[0], queue_of(".", [0], started=False)[0]
    assert [rules.late(begun, version) for version in (1, 2)] == [False, True]
    assert not rules.late(waiting, 9)
