"""Prompts from a file, and an endless shuffled stream of them, whose position is saved in checkpoints.

A row is a prompt: `{"messages": [...]}` or `{"token_ids": [...]}`, and optionally `id`, `answer`, `metadata`, `tools`
and `template`. Rows in other formats are mapped first (`slimx.data.prompts.mapping`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from slimx.data.chat.messages import with_text
from slimx.data.integers import as_whole
from slimx.data.prompts.mapping import RowMapping, fitting_fields, written
from slimx.data.prompts.rows import kind_of, read_rows
from slimx.data.records import Prompt
from slimx.data.saved.codec import encode
from slimx.digest import fingerprint
from slimx.errors import SlimxError
from slimx.json_types import Json

KEYS = ("id", "messages", "token_ids", "answer", "metadata", "tools", "template")
VALUE_KINDS = {
    "id": "a string",
    "messages": 'a list of turns such as [{"role": "user", "content": "..."}]',
    "token_ids": "a list of integers",
    "answer": "a string or a number",
    "metadata": "an object",
    "tools": "a list of objects",
    "template": "an object",
}
"""Descriptions of the types that the values of `KEYS` must have, for error messages."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a prompt's group: its rewards, and whether it is trained on. Prompt sources can use outcomes to choose
    later prompts."""

    prompt: str
    """Id of the prompt."""
    rewards: tuple[float, ...]
    """Rewards of the prompt's rollouts; if the group failed, only those of the finished rollouts."""
    dropped: str | None = None
    """Reason why the group is not trained on, as in dropped.jsonl; None if it is trained on."""


class DataSource(Protocol):
    """Source of prompts for the training loop. A user's class needs only the three methods defined here.

    A source whose next prompts depend on earlier outcomes has a fourth method, `learn(outcomes)`. It is called with a
    list of `Outcome`, in the order of the prompts, whenever a training step receives the groups that it trains on.
    Prompts whose rollouts are running at that time were chosen without these outcomes. A checkpoint contains the
    source's state after the call with the last step's outcomes."""

    def next(self) -> Prompt:
        """Returns the next prompt. A source never runs out of prompts."""

    def state(self) -> Json:
        """Returns the source's position as JSON values, for checkpoints."""

    def restore(self, state: Json) -> None:
        """Continues at the position `state`, which `state()` of another instance returned."""


def read_prompts(
    path: str | Path,
    mapping: RowMapping | None = None,
    *,
    dataset: str | None = None,
    subset: str | None = None,
    split: str | None = None,
) -> list[Prompt]:
    """Reads the prompts of a file, a directory or a data set of the Hugging Face Hub, in their order. A prompt without
    an id gets `{file stem}:{line}`.

    Lines and rows are counted from 1; blank lines are skipped. `mapping`: converts rows in other formats; `dataset`:
    value of metadata.dataset for rows that have none; `subset` and `split`: parts of a data set to read. Raises
    SlimxError naming the file, the line and the problem.
    """
    return list(iter_prompts(path, mapping, dataset=dataset, subset=subset, split=split))


def iter_prompts(
    path: str | Path,
    mapping: RowMapping | None = None,
    *,
    dataset: str | None = None,
    subset: str | None = None,
    split: str | None = None,
) -> Iterator[Prompt]:
    """Yields the prompts that `read_prompts` returns, but reads them lazily: SlimxError for an invalid row is raised
    only when that row is reached."""
    mapping = mapping or RowMapping()
    seen: dict[str, str] = {}
    stem, rows = read_rows(path, subset, split)
    for where, line, row in rows:
        prompt = _prompt(mapping(row, where), f"{stem}:{line}", where)
        if prompt.id in seen:
            raise SlimxError(
                f"{where}: id {prompt.id!r} is already the id of {seen[prompt.id]}; give each row a unique id",
                code="prompts.id",
                about=prompt.id,
            )
        seen[prompt.id] = where.rpartition(", ")[2]
        if dataset is not None and prompt.source is None:
            prompt.metadata["dataset"] = dataset
        yield prompt
    if not seen:
        raise SlimxError(f"{path} contains no prompts; add at least one row", code="prompts.empty", about=str(path))


def _prompt(row: Json, default_id: str, where: str) -> Prompt:
    for key in row:
        if key not in KEYS:
            fitting = fitting_fields(row)
            hint = "or rewrite the row in a rollout.map hook"
            if fitting:
                hint = f"or set rollout.fields: {written(fitting)}"
            raise SlimxError(
                f"{where}: key {key!r} is unknown (known keys: {', '.join(KEYS)}); move it into metadata, {hint}",
                code="prompts.key",
                about=key,
            )
    present = {key: value for key, value in row.items() if value is not None}
    token_ids = present.get("token_ids")
    if isinstance(token_ids, list):
        present["token_ids"] = [as_whole(token) for token in token_ids]
    try:
        prompt = msgspec.convert({"id": default_id, **present}, Prompt)
    except msgspec.ValidationError as error:
        raise SlimxError(f"{where}: {_mistyped(row, error)}", code="prompts.type", about=where) from error
    if (prompt.messages is None) == (prompt.token_ids is None):
        code = "prompts.both"
        problem = "both messages and token_ids"
        if prompt.messages is None:
            code = "prompts.neither"
            problem = "neither messages nor token_ids"
        raise SlimxError(f"{where}: the row has {problem}; set exactly one of these keys", code=code, about=where)
    if not (prompt.messages or prompt.token_ids):
        raise SlimxError(
            f"{where}: {'messages' if prompt.token_ids is None else 'token_ids'} is empty; add at least one entry",
            code="prompts.empty_list",
            about=where,
        )
    if prompt.messages is not None:
        prompt.messages = with_text(prompt.messages, where)
    return prompt


def _mistyped(row: Json, error: msgspec.ValidationError) -> str:
    """Returns a clause for an error message about the value of `row` that has the wrong type according to `error`, and
    the type that its key requires."""
    path = re.search(r"`\$\.((\w+)[^`]*)`$", str(error))
    if path is None or path[2] not in VALUE_KINDS:
        return f"a value has the wrong type ({error}); set a value of the expected type"
    value = row[path[2]]
    for index in re.findall(r"\[(\d+)\]", path[1]):
        if isinstance(value, list):
            value = value[int(index)]
    subject = "it" if path[1] == path[2] else path[2]
    return f"{path[1]} is {kind_of(value)}; {subject} must be {VALUE_KINDS[path[2]]}"


class PromptSource:
    """Endless stream of `prompts`. Each epoch contains all of them, in a random order that depends only on the seed and
    the epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: int):
        if not prompts:
            raise SlimxError(
                "PromptSource received no prompts; pass at least one prompt", code="prompts.empty", about="PromptSource"
            )
        self._prompts = list(prompts)
        self._identity: Json = {
            "seed": seed,
            "count": len(prompts),
            "ids": _fingerprint([prompt.id for prompt in prompts]),
            "contents": _fingerprint(self._prompts),
        }
        self._start_epoch(0)

    def next(self) -> Prompt:
        """Returns the next prompt of the current epoch, or the first one of the next epoch."""
        if self._position == len(self._prompts):
            self._start_epoch(self._epoch + 1)
        prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return prompt

    def state(self) -> Json:
        """Returns the position (`epoch`; `position`: number of prompts returned in this epoch) and the identity of the
        stream: `seed`, `count` of prompts, fingerprints of their `ids` and of their `contents`."""
        return {"epoch": self._epoch, "position": self._position, **self._identity}

    def restore(self, state: Json) -> None:
        """Continues at the position in `state`.

        Raises SlimxError if the seed or the prompts differ from those recorded in `state`, because the stream would
        then silently repeat some prompts and skip others.
        """
        missing = [key for key in ("epoch", "position", *self._identity) if key not in state]
        if missing:
            raise SlimxError(
                f"the saved state of the prompts has no {', '.join(missing)}, so another source saved the state; "
                "restore the prompts of the saved run, or start a new run",
                code="prompts.state",
                about=missing[0],
            )
        changes = self._changes(state)
        if changes:
            raise SlimxError(
                f"the saved order of prompts cannot be continued ({changes}); set run.seed and rollout.prompts to the "
                "values of the saved run, or start a new run in another run.dir",
                code="prompts.changed",
                about=next(key for key, value in self._identity.items() if state[key] != value),
            )
        epoch = state["epoch"]
        position = state["position"]
        integers = isinstance(epoch, int) and isinstance(position, int)
        if not (integers and epoch >= 0 and 0 <= position <= len(self._prompts)):
            raise SlimxError(
                f"the saved state of the prompts points to epoch {epoch!r}, position {position!r} of "
                f"{len(self._prompts)} prompts, which does not exist; use another checkpoint",
                code="prompts.state",
                about="position",
            )
        self._start_epoch(epoch)
        self._position = position

    def _changes(self, old: Json) -> str:
        """Returns a description of the differences between this stream's identity and `old`, the saved identity; "" if
        there are none."""
        new = self._identity
        changes = []
        if old["seed"] != new["seed"]:
            changes.append(f"the seed was {old['seed']} and is {new['seed']}")
        if old["count"] != new["count"]:
            changes.append(f"there were {old['count']} prompts and now are {new['count']}")
        elif old["ids"] != new["ids"]:
            changes.append(f"the ids of the {new['count']} prompts or their order changed")
        elif old["contents"] != new["contents"]:
            changes.append(f"the {new['count']} ids are the same, but messages, token_ids, answers or metadata changed")
        return " and ".join(changes)

    def _start_epoch(self, epoch: int) -> None:
        # Raw output of PCG64, which is the same in every release of NumPy, unlike `Generator.permutation`.
        keys = np.random.PCG64([self._identity["seed"], epoch]).random_raw(len(self._prompts))
        self._order = np.argsort(keys, kind="stable")
        self._epoch = epoch
        self._position = 0


def _fingerprint(value: object) -> str:
    return fingerprint(encode(value))
