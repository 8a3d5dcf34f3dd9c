"""`slimx rollouts`: shows the rollouts of a run, reading only its directory."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from slimx.config.sections.policies import ACTOR, prefix_of
from slimx.data.chat.tokens import load_tokenizer
from slimx.data.records import Group
from slimx.data.saved.step_files import DIRECTORY, TOKENIZER, described, read_step, read_step_about, step_files
from slimx.data.saved.trained_tokens import read_trained
from slimx.errors import SlimxError, counted
from slimx.extras.watch.show import Decode, Json, group_lines, group_values, prompt_line, prompt_values
from slimx.observability.tracking.jsonl import load_records
from slimx.observability.tracking.run_files import check_run, read_config
from slimx.orchestration.state.saves import Saves, read_state
from slimx.rollout.flow.tickets import SavedTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Selection of the groups to show, and of the details to show about them."""

    group: str | None = None
    """Id of the only group to show; None: all groups."""
    reward_below: float | None = None
    """Exclusive upper bound on rewards: only trajectories with a lower reward are shown, and only groups that contain
    one; None: all trajectories are shown."""
    limit: int = 8
    """Maximum number of groups to show; 0: no limit."""
    tokens: bool = False
    """True to show every token with its log-prob, mask and version."""


def show_rollouts(
    directory: Path, step: int | None, choice: Choice, *, buffer: bool, dropped: bool, as_json: bool
) -> Iterable[str]:
    """Returns the lines that `slimx rollouts` prints. `buffer`, `dropped` and `as_json`: the options --buffer,
    --dropped and --json. Raises SlimxError for conflicting options and for missing steps or groups."""
    chosen = choice.group is not None or choice.reward_below is not None or choice.tokens
    if buffer and (dropped or step is not None):
        other = "--dropped" if step is None else "--step"
        raise SlimxError(
            f"--buffer cannot be combined with {other}, because --buffer shows groups of the newest checkpoint; remove "
            f"--buffer or {other}",
            code="rollouts.options",
            about="--buffer",
        )
    if chosen and (dropped or not (buffer or step is not None)):
        option = "--tokens" if choice.reward_below is None else "--reward-below"
        option = option if choice.group is None else "--group"
        if dropped:
            raise SlimxError(
                f"{option} cannot be combined with --dropped; remove {option} or --dropped",
                code="rollouts.options",
                about="--step",
            )
        raise SlimxError(
            f"{option} works only with --step or --buffer; add --step N or --buffer",
            code="rollouts.options",
            about="--step",
        )
    if choice.limit < 0:
        raise SlimxError(
            f"--limit={choice.limit} is negative; set --limit to a number of groups, or to 0 for all groups",
            code="rollouts.limit",
            about="--limit",
        )
    lines: Callable[[Json], Iterable[str]]
    if buffer:
        values = buffer_of(directory, choice)
        lines = buffer_lines
    elif dropped:
        values = dropped_of(directory, step)
        lines = partial(dropped_lines, limit=choice.limit)
    elif step is not None:
        values = step_of(directory, step, choice)
        lines = step_lines
    else:
        values = steps_of(directory)
        lines = steps_lines
    return [json.dumps(values, indent=1)] if as_json else lines(values)


def steps_of(directory: Path) -> Json:
    """Returns the saved steps, as {steps: [a description per step], problems: [a sentence per damaged file]}."""
    steps: list[Json] = []
    problems: list[str] = []
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
    """Returns the groups of a step, as {step, version, groups: [groups that `choice` selects], hidden: number of
    matching groups omitted because of `choice.limit`, problems}. Raises SlimxError for a missing step or group."""
    files = _files(directory)
    if step not in files:
        steps = list(files)
        remedy = f"choose a saved step ({described(steps)})"
        if step < steps[0]:
            remedy += ", or set track.rollouts.keep=0 before a new run to keep the files of all steps"
        elif step < steps[-1]:
            remedy += ", or set track.rollouts.every=1 before a new run to save every step"
        raise SlimxError(
            f"{directory / DIRECTORY} has no step {step}; {remedy}",
            code="rollouts.step",
            about=f"step {step}",
        )
    about, groups = read_step(files[step])
    trained = read_trained(files[step], groups)
    if choice.group is not None and not any(group.id == choice.group for group in groups):
        raise SlimxError(
            f"step {step} of {directory} has no group {choice.group}; choose a group from {groups[0].id} to "
            f"{groups[-1].id}",
            code="rollouts.group",
            about=choice.group,
        )
    chosen = list(_chosen(groups, choice))
    shown = chosen[: choice.limit or None]
    decoders = _Decoders(directory)
    return {
        "step": step,
        "version": about.version,
        "groups": [group_values(group, about.version, decoders.of, trained, tokens=choice.tokens) for group in shown],
        "hidden": len(chosen) - len(shown),
        "problems": decoders.problems,
    }


def buffer_of(directory: Path, choice: Choice) -> Json:
    """Returns {checkpoint, step, version, waiting, hidden, problems} for the groups that the newest checkpoint saved
    for later steps.

    `waiting` contains for each started prompt {number, prompt, group: None if incomplete, complete_rollouts,
    sampled_tokens: number of saved tokens of its unfinished rollouts}. Raises SlimxError if there is no checkpoint."""
    check_run(directory)
    newest = Saves(directory / "checkpoints", keep=1).newest()
    if newest is None:
        raise SlimxError(
            f"{directory} has no complete checkpoint yet, so --buffer has nothing to show; wait until the run "
            "has written its first checkpoint",
            code="rollouts.buffer",
            about=str(directory),
        )
    state = read_state(newest)
    decoders = _Decoders(directory)
    everything = choice.group is None and choice.reward_below is None
    chosen: list[tuple[SavedTicket, Group | None]] = []
    for ticket in state.rollouts["tickets"]:
        if ticket.group is not None:
            for complete in _chosen([ticket.group], choice):
                chosen.append((ticket, complete))
        elif everything:
            chosen.append((ticket, None))
    shown = chosen[: choice.limit or None]
    waiting = []
    for ticket, group in shown:
        shown_group = None
        if group is not None:
            shown_group = group_values(group, state.version, decoders.of, {}, tokens=choice.tokens)
        sampled = 0
        for rollout in ticket.rollouts:
            sampled += sum(len(recorded.completion.token_ids) for recorded in rollout.completions)
        waiting.append(
            {
                "number": ticket.number,
                "prompt": prompt_values(ticket.prompt, decoders.of(ACTOR)),
                "group": shown_group,
                "complete_rollouts": sum(rollout.trajectories is not None for rollout in ticket.rollouts),
                "sampled_tokens": sampled,
            }
        )
    return {
        "checkpoint": str(newest),
        "step": state.step,
        "version": state.version,
        "waiting": waiting,
        "hidden": len(chosen) - len(shown),
        "problems": decoders.problems,
    }


def dropped_of(directory: Path, step: int | None) -> Json:
    """Returns the groups dropped in `step`, or in all steps if `step` is None, as {reasons: {reason: number of groups},
    dropped: [{step, prompt, reason, detail}], problems: [a message per unreadable line]}."""
    check_run(directory)
    file = directory / "dropped.jsonl"
    dropped: list[Json] = []
    problems: list[str] = []
    if file.exists():
        dropped, problems = load_records(file, dict)
    if step is not None:
        dropped = [record for record in dropped if record.get("step") == step]
    reasons = Counter(record.get("reason") for record in dropped)
    return {"reasons": dict(reasons.most_common()), "dropped": dropped, "problems": problems}


# Text -----------------------------------------------------------------------------------------------------------------


def steps_lines(values: Json) -> Iterator[str]:
    """Yields the result of `steps_of` as a table."""
    yield "  step  version  groups  trajectories  truncated  sampled tokens    reward  oldest version  dropped"
    for step in values["steps"]:
        reward = "none"
        if step["reward"] is not None:
            reward = f"{step['reward']:.3f}"
        oldest = "none" if step["oldest"] is None else step["oldest"]
        dropped = ", ".join(f"{count} {reason}" for reason, count in step["dropped"].items()) or "0"
        yield (
            f"{step['step']:>6}{step['version']:>9}{step['groups']:>8}{step['trajectories']:>14}{step['truncated']:>11}"
            f"{step['sampled_tokens']:>16}{reward:>10}{oldest:>16}  {dropped}"
        )
    yield from values["problems"]


def step_lines(values: Json) -> Iterator[str]:
    """Yields the result of `step_of` as lines of text."""
    shown = len(values["groups"])
    groups = counted(shown + values["hidden"], "group")
    yield f"step {values['step']}, trained at version {values['version']}: {shown} of {groups}"
    yield from values["problems"]
    for group in values["groups"]:
        yield from group_lines(group)
    yield from _hidden(values)


def buffer_lines(values: Json) -> Iterator[str]:
    """Yields the result of `buffer_of` as lines of text."""
    complete = sum(ticket["group"] is not None for ticket in values["waiting"])
    yield (
        f"{values['checkpoint']}, after step {values['step']}: {counted(complete, 'complete group')}, "
        f"{len(values['waiting']) - complete} incomplete"
    )
    yield from values["problems"]
    for ticket in values["waiting"]:
        if ticket["group"] is None:
            yield (
                f"unfinished group {ticket['number']}, {prompt_line(ticket['prompt'])}: "
                f"{counted(ticket['complete_rollouts'], 'complete rollout')}, "
                f"{counted(ticket['sampled_tokens'], 'token')} of unfinished ones"
            )
        else:
            yield from group_lines(ticket["group"])
    yield from _hidden(values)


def dropped_lines(values: Json, limit: int) -> Iterator[str]:
    """Yields the result of `dropped_of` as lines of text, limited to the newest `limit` groups."""
    yield counted(len(values["dropped"]), "dropped group")
    for reason, count in values["reasons"].items():
        yield f"{count:>6}  {reason}"
    for record in values["dropped"][-limit:]:
        line = f"step {record.get('step')}, prompt {record.get('prompt')}, {record.get('reason')}"
        if record.get("detail"):
            line += f": {record['detail']}"
        yield line
    yield from values["problems"]


def _hidden(values: Json) -> Iterator[str]:
    if values["hidden"]:
        yield f"{counted(values['hidden'], 'more group')}; --limit 0 shows all"


# Reading --------------------------------------------------------------------------------------------------------------


def _files(directory: Path) -> dict[int, Path]:
    check_run(directory)
    files = step_files(directory / DIRECTORY)
    if files:
        return files
    raise SlimxError(
        f"{directory / DIRECTORY} has no saved step; wait until the run completes its first step, and check that it "
        "has engines and track.rollouts.every of at least 1",
        code="rollouts.empty",
        about=str(directory / DIRECTORY),
    )


def _chosen(groups: Sequence[Group], choice: Choice) -> Iterator[Group]:
    for group in groups:
        if choice.group is not None and group.id != choice.group:
            continue
        if choice.reward_below is not None:
            low = []
            for trajectory in group.trajectories:
                if trajectory.reward is not None and trajectory.reward < choice.reward_below:
                    low.append(trajectory)
            if not low:
                continue
            group = Group(id=group.id, prompt=group.prompt, trajectories=low, baseline=group.baseline)
        yield group


class _Decoders:
    """Functions that decode the token ids of each policy of a run. They use the tokenizers that the run's directory
    contains or, for older runs, those of the models. If a tokenizer cannot be loaded, the function returns the ids as
    text, and `problems` contains the reason."""

    def __init__(self, directory: Path) -> None:
        self.problems: list[str] = []
        """One line for each tokenizer that cannot be loaded."""
        self._directory = directory
        self._by_policy: dict[str, Decode] = {}

    def of(self, policy: str) -> Decode:
        """Returns the function for the tokens of `policy`."""
        if policy not in self._by_policy:
            self._by_policy[policy] = self._load(policy)
        return self._by_policy[policy]

    def _load(self, policy: str) -> Decode:
        kept = self._directory / prefix_of(policy) / TOKENIZER
        if policy != ACTOR and not kept.is_dir() and _path_of(read_config(self._directory), policy) is None:
            return self.of(ACTOR)
        try:
            source = kept if kept.is_dir() else self._model(policy)
            file = Path(source, "tokenizer.json")
            if importlib.util.find_spec("transformers") is None and file.is_file():
                tokenizer: Any = Tokenizer.from_file(str(file))  # enough to decode
            else:
                tokenizer = load_tokenizer(source)
        except SlimxError as error:
            shown = "tokens" if policy == ACTOR else f"tokens of the policy {policy}"
            reason = str(error).partition(";")[0]
            self.problems.append(f"{shown} are shown as ids: {reason}; copy the tokenizer's files to {kept}")
            return lambda ids: " ".join(map(str, ids))
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)

    def _model(self, policy: str) -> Path:
        """Returns the directory of a policy's model. A relative path is relative to the directory in which the run was
        started, which is found from the run's own path."""
        config = read_config(self._directory)
        model = Path(_path_of(config, policy) or config["model"]["path"])
        started = self._directory.resolve()
        for part in reversed(Path(config["run"]["dir"]).parts):
            if started.name != part:
                return model
            started = started.parent
        return model if model.is_dir() else started / model


def _path_of(config: Json, policy: str) -> str | None:
    """Returns the path of a policy's model if the policy has one of its own; None otherwise."""
    options = (config.get("policies") or {}).get(policy) or {}
    path = (options.get("model") or {}).get("path")
    return None if path is None else str(path)
