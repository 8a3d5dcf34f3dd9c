"""`slimx rollouts`: the rollouts of a run, from its directory alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slimx.data.chat.tokens import load_tokenizer
from slimx.data.records import Group
from slimx.data.saved.step_files import DIRECTORY, TOKENIZER, read_step, read_step_about, step_files
from slimx.data.saved.trained_tokens import read_trained
from slimx.errors import SlimxError
from slimx.extras.watch.show import Decode, Json, group_lines, group_values, prompt_line, prompt_values
from slimx.observability.tracking.jsonl import load_records
from slimx.observability.tracking.run_files import check_run, read_config
from slimx.orchestration.state.saves import Saves, read_state
from slimx.rollout.flow.tickets import SavedTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The choice of a step's groups that are shown, and how."""

    group: str | None = None
    """Id of the one group; None: all."""
    reward_below: float | None = None
    """Only trajectories with less reward, and the groups that have any; None: all."""
    limit: int = 8
    """Groups, at most; 0: no limit."""
    tokens: bool = False
    """Every token with its log-prob, mask and version."""


def show_rollouts(
    directory: Path, step: int | None, choice: Choice, *, buffer: bool, dropped: bool, as_json: bool
) -> Iterable[str]:
    """The lines of one call. Raises SlimxError for options that exclude each other, and for what is not there."""
    chosen = choice.group is not None or choice.reward_below is not None or choice.tokens
    if buffer and (dropped or step is not None):
        raise SlimxError(
            "--buffer shows what waits in the newest checkpoint; leave out --step and --dropped",
            code="rollouts.options",
            about="--buffer",
        )
    if chosen and (dropped or not (buffer or step is not None)):
        raise SlimxError(
            "--group, --reward-below and --tokens choose from a step or the buffer; add --step N or --buffer",
            code="rollouts.options",
            about="--step",
        )
    if choice.limit < 0:
        raise SlimxError(
            f"--limit is {choice.limit}; give a number of groups, or 0 for all",
            code="rollouts.limit",
            about="--limit",
        )
    if buffer:
        found, lines = buffer_of(directory, choice), buffer_lines
    elif dropped:
        found, lines = dropped_of(directory, step), partial(dropped_lines, limit=choice.limit)
    elif step is not None:
        found, lines = step_of(directory, step, choice), step_lines
    else:
        found, lines = steps_of(directory), steps_lines
    return [json.dumps(found, indent=1)] if as_json else lines(found)


def steps_of(directory: Path) -> Json:
    """{steps: [what each file says of its step], problems: [a sentence per damaged file]}."""
    steps, problems = [], []
    for path in _files(directory).values():
        try:
            about = read_step_about(path)
        except SlimxError as error:
            problems.append(str(error))
            continue
        shown = ("step", "version", "groups", "trajectories", "sampled_tokens", "reward", "oldest", "truncated")
        steps.append({name: getattr(about, name) for name in shown} | {"dropped": about.dropped})
    return {"steps": steps, "problems": problems}


def step_of(directory: Path, step: int, choice: Choice) -> Json:
    """{step, version, groups: [chosen ones], hidden: how many more are chosen, problems}."""
    files = _files(directory)
    if step not in files:
        raise SlimxError(
            f"{directory / DIRECTORY} has no step {step}; it has {_ranges(list(files))} (track.rollouts says which "
            "steps are kept)",
            code="rollouts.step",
            about=f"step {step}",
        )
    about, groups = read_step(files[step])
    trained = read_trained(files[step], groups)
    if choice.group is not None and not any(group.id == choice.group for group in groups):
        raise SlimxError(
            f"step {step} of {directory} has no group {choice.group}; it has {groups[0].id} to {groups[-1].id}",
            code="rollouts.group",
            about=choice.group,
        )
    chosen = list(_chosen(groups, choice))
    shown = chosen[: choice.limit or None]
    decode, problems = _decoder(directory)
    return {
        "step": step,
        "version": about.version,
        "groups": [group_values(group, about.version, decode, trained, tokens=choice.tokens) for group in shown],
        "hidden": len(chosen) - len(shown),
        "problems": problems,
    }


def buffer_of(directory: Path, choice: Choice) -> Json:
    """{checkpoint, step, version, waiting, hidden, problems}. `waiting`: by ticket {number, prompt, group: None where
    that is not complete, and then complete_rollouts and sampled_tokens, those of unfinished rollouts, which are kept}.
    """
    check_run(directory)
    newest = Saves(directory / "checkpoints", keep=1).newest()
    if newest is None:
        raise SlimxError(
            f"{directory} has no complete checkpoint yet, and what waits is written there",
            code="rollouts.buffer",
            about=str(directory),
        )
    state, (decode, problems) = read_state(newest), _decoder(directory)
    everything = choice.group is None and choice.reward_below is None
    chosen: list[tuple[SavedTicket, Group | None]] = []
    for ticket in state.rollouts["tickets"]:
        if ticket.group is not None:
            chosen += [(ticket, group) for group in _chosen([ticket.group], choice)]
        elif everything:
            chosen.append((ticket, None))
    shown = chosen[: choice.limit or None]
    waiting = [
        {
            "number": ticket.number,
            "prompt": prompt_values(ticket.prompt, decode),
            "group": group and group_values(group, state.version, decode, {}, tokens=choice.tokens),
            "complete_rollouts": sum(rollout.trajectories is not None for rollout in ticket.rollouts),
            "sampled_tokens": sum(len(r.completion.token_ids) for each in ticket.rollouts for r in each.completions),
        }
        for ticket, group in shown
    ]
    return {
        "checkpoint": str(newest),
        "step": state.step,
        "version": state.version,
        "waiting": waiting,
        "hidden": len(chosen) - len(shown),
        "problems": problems,
    }


def dropped_of(directory: Path, step: int | None) -> Json:
    """{reasons: {reason: groups}, dropped: [{step, prompt, reason, detail}], problems}, of all steps or one."""
    check_run(directory)
    file = directory / "dropped.jsonl"
    records, problems = load_records(file, dict) if file.exists() else ([], [])
    dropped = [record for record in records if step is None or record.get("step") == step]
    reasons = Counter(record.get("reason") for record in dropped)
    return {"reasons": dict(reasons.most_common()), "dropped": dropped, "problems": problems}


# Text -----------------------------------------------------------------------------------------------------------------


def steps_lines(found: Json) -> Iterator[str]:
    """A table of `steps_of`."""
    yield "  step  version  groups  trajectories  truncated  sampled tokens    reward  oldest version  dropped"
    for step in found["steps"]:
        reward = "none" if step["reward"] is None else f"{step['reward']:.3f}"
        oldest = "none" if step["oldest"] is None else step["oldest"]
        dropped = ", ".join(f"{count} {reason}" for reason, count in step["dropped"].items()) or "0"
        yield (
            f"{step['step']:>6}{step['version']:>9}{step['groups']:>8}{step['trajectories']:>14}{step['truncated']:>11}"
            f"{step['sampled_tokens']:>16}{reward:>10}{oldest:>16}  {dropped}"
        )
    yield from found["problems"]


def step_lines(found: Json) -> Iterator[str]:
    """`step_of` as text."""
    shown = len(found["groups"])
    yield f"step {found['step']}, trained at version {found['version']}: {shown} of {shown + found['hidden']} groups"
    yield from found["problems"]
    for group in found["groups"]:
        yield from group_lines(group)
    yield from _hidden(found)


def buffer_lines(found: Json) -> Iterator[str]:
    """`buffer_of` as text."""
    complete = sum(ticket["group"] is not None for ticket in found["waiting"])
    yield (
        f"{found['checkpoint']}, after step {found['step']}: {complete} complete groups, "
        f"{len(found['waiting']) - complete} not complete"
    )
    yield from found["problems"]
    for ticket in found["waiting"]:
        if ticket["group"] is None:
            yield (
                f"ticket {ticket['number']}, {prompt_line(ticket['prompt'])}: {ticket['complete_rollouts']} rollouts "
                f"complete, {ticket['sampled_tokens']} tokens sampled of others"
            )
        else:
            yield from group_lines(ticket["group"])
    yield from _hidden(found)


def dropped_lines(found: Json, limit: int) -> Iterator[str]:
    """`dropped_of` as text, the newest `limit` groups."""
    yield f"{len(found['dropped'])} groups were dropped"
    for reason, count in found["reasons"].items():
        yield f"{count:>6}  {reason}"
    for each in found["dropped"][-limit:]:
        detail = f": {each['detail']}" if each.get("detail") else ""
        yield f"step {each.get('step')}, prompt {each.get('prompt')}, {each.get('reason')}{detail}"
    yield from found["problems"]


def _hidden(found: Json) -> Iterator[str]:
    if found["hidden"]:
        yield f"{found['hidden']} more; --limit 0 shows all"


# Reading --------------------------------------------------------------------------------------------------------------


def _files(directory: Path) -> dict[int, Path]:
    check_run(directory)
    if files := step_files(directory / DIRECTORY):
        return files
    raise SlimxError(
        f"{directory / DIRECTORY} holds no step: none has been generated yet, or track.rollouts.every is 0, or the run "
        "has no engines",
        code="rollouts.empty",
        about=str(directory / DIRECTORY),
    )


def _chosen(groups: Sequence[Group], choice: Choice) -> Iterator[Group]:
    for group in groups:
        if choice.group is not None and group.id != choice.group:
            continue
        if choice.reward_below is not None:
            low = [t for t in group.trajectories if t.reward is not None and t.reward < choice.reward_below]
            if not low:
                continue
            group = Group(id=group.id, prompt=group.prompt, trajectories=low, baseline=group.baseline)
        yield group


def _decoder(directory: Path) -> tuple[Decode, list[str]]:
    """By the tokenizer that the run has kept, or an older run's model has; where there is none, the ids themselves, and
    the reason."""
    kept = directory / TOKENIZER
    try:
        tokenizer: Any = load_tokenizer(kept if kept.is_dir() else read_config(directory)["model"]["path"])
    except SlimxError as error:
        return lambda ids: " ".join(map(str, ids)), [f"tokens are shown as ids: {error}"]
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False), []


def _ranges(steps: Sequence[int]) -> str:
    """Ascending steps in words."""
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
