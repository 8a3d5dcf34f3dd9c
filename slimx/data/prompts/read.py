"""Prompts from a file, and the endless shuffled stream of them whose cursor a checkpoint keeps.

One row is one prompt: `{"messages": [...]}` or `{"token_ids": [...]}`, and optionally `id`, `answer`, `metadata`,
`tools` and `template`; rows of other forms are mapped first (`slimx.data.prompts.mapping`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from slimx.data.chat.messages import with_text
from slimx.data.prompts.mapping import RowMapping, fitting_fields, written
from slimx.data.prompts.rows import kind_of, read_rows
from slimx.data.records import Prompt
from slimx.data.saved.codec import encode
from slimx.data.whole import as_whole
from slimx.digest import fingerprint
from slimx.errors import SlimxError

KEYS = ("id", "messages", "token_ids", "answer", "metadata", "tools", "template")
WANTED = {
    "id": "a text",
    "messages": 'a list of turns such as [{"role": "user", "content": "..."}]',
    "token_ids": "a list of whole numbers",
    "answer": "a text or a number",
    "metadata": "an object",
    "tools": "a list of objects",
    "template": "an object",
}
"""Kinds of the values of KEYS, as a refusal names them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one prompt's group, as a source that learns is told of it."""

    prompt: str
    """Id of the prompt."""
    rewards: tuple[float, ...]
    """Rewards of its rollouts; of a group that broke, of those that there are."""
    dropped: str | None = None
    """The reason why it is not trained, as in dropped.jsonl; None: it is."""


class DataSource(Protocol):
    """A source of prompts, as the loop uses it; a user's class needs no more than these three methods.

    One whose next prompts depend on what became of the earlier ones has a fourth, `learn(outcomes)`: it is called with
    a list of `Outcome` whenever the groups of a step are taken, in the order in which their prompts were. Prompts that
    are in flight by then were chosen before; the state of a checkpoint is that after the last step's outcomes."""

    def next(self) -> Prompt:
        """The next prompt; a source never ends."""
        ...

    def state(self) -> dict[str, Any]:
        """The position of the source, as values that JSON can hold; written into every checkpoint."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue as the source that returned `state` would have."""
        ...


def read_prompts(
    path: str | Path,
    mapping: RowMapping | None = None,
    *,
    dataset: str | None = None,
    subset: str | None = None,
    split: str | None = None,
) -> list[Prompt]:
    """The prompts of a file, a directory or a data set of the Hub, in their order; a prompt without an id is called
    `{file stem}:{line}`.

    Lines and rows count from 1; blank lines are skipped. `mapping`: from rows of another form; `dataset`: what
    metadata.dataset is where a row names none. Raises SlimxError naming file, line and what is wrong with it.
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
    """The prompts of `read_prompts`, one after the other: a wrong row raises when it is reached."""
    mapping = mapping or RowMapping()
    seen: dict[str, str] = {}
    stem, rows = read_rows(path, subset, split)
    for where, number, row in rows:
        prompt = _prompt(mapping(row, where), f"{stem}:{number}", where)
        if prompt.id in seen:
            raise SlimxError(
                f"{where}: id {prompt.id!r} is that of {seen[prompt.id]}; make it unique",
                code="prompts.id",
                about=prompt.id,
            )
        seen[prompt.id] = where.rpartition(", ")[2]
        if dataset is not None and prompt.source is None:
            prompt.metadata["dataset"] = dataset
        yield prompt
    if not seen:
        raise SlimxError(
            f"{path}: holds no prompt; write one JSON object per line", code="prompts.empty", about=str(path)
        )


def _prompt(row: dict[str, Any], default_id: str, where: str) -> Prompt:
    for key in row:
        if key not in KEYS:
            fitting = fitting_fields(row)
            hint = (
                f"this row would fit rollout.fields: {written(fitting)}" if fitting else "rollout.map can rewrite rows"
            )
            raise SlimxError(
                f"{where}: unknown key {key!r}; known are {', '.join(KEYS)}, the rest goes under metadata; {hint}",
                code="prompts.key",
                about=key,
            )
    present = {key: value for key, value in row.items() if value is not None}
    if isinstance(ids := present.get("token_ids"), list):
        present["token_ids"] = [as_whole(token) for token in ids]
    try:
        prompt = msgspec.convert({"id": default_id, **present}, Prompt)
    except msgspec.ValidationError as error:
        raise SlimxError(f"{where}: {_mistyped(row, error)}", code="prompts.type", about=where) from error
    if (prompt.messages is None) == (prompt.token_ids is None):
        code, given = "prompts.both", "both messages and token_ids"
        if prompt.messages is None:
            code, given = "prompts.neither", "neither messages nor token_ids"
        raise SlimxError(f"{where}: has {given}; give exactly one of them", code=code, about=where)
    if not (prompt.messages or prompt.token_ids):
        raise SlimxError(
            f"{where}: messages or token_ids is an empty list; a prompt needs at least one entry",
            code="prompts.empty_list",
            about=where,
        )
    if prompt.messages is not None:
        prompt.messages = with_text(prompt.messages, where)
    return prompt


def _mistyped(row: dict[str, Any], error: msgspec.ValidationError) -> str:
    """The value in a row that has the wrong type, and the type of its key."""
    path = re.search(r"`\$\.((\w+)[^`]*)`$", str(error))
    if path is None or path[2] not in WANTED:
        return f"a value has the wrong type ({error}); correct it"
    value: Any = row[path[2]]
    for number in re.findall(r"\[(\d+)\]", path[1]):
        value = value[int(number)] if isinstance(value, list) else value
    what = "it" if path[1] == path[2] else path[2]
    return f"{path[1]} is {kind_of(value)}; {what} must be {WANTED[path[2]]}"


class PromptSource:
    """Endless stream of `prompts`: each epoch goes through all of them in an order drawn from (seed, epoch)."""

    def __init__(self, prompts: Sequence[Prompt], seed: int):
        if not prompts:
            raise SlimxError(
                "PromptSource got no prompts; give it at least one", code="prompts.empty", about="PromptSource"
            )
        self._prompts = list(prompts)
        self._identity: dict[str, Any] = {
            "seed": seed,
            "count": len(prompts),
            "ids": _fingerprint([prompt.id for prompt in prompts]),
            "contents": _fingerprint(self._prompts),
        }
        self._start_epoch(0)

    def next(self) -> Prompt:
        """The next prompt of this epoch, or the first of the next one."""
        if self._position == len(self._prompts):
            self._start_epoch(self._epoch + 1)
        prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return prompt

    def state(self) -> dict[str, Any]:
        """The cursor (`epoch`; `position`: prompts served in it) and the identity of what it points into:
        `seed`, `count` of prompts, fingerprints of their `ids` and of their `contents`."""
        return {"epoch": self._epoch, "position": self._position, **self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to the cursor of `state`.

        Raises SlimxError if seed or prompts are not those that `state` was taken with: the cursor would then repeat
        some prompts and skip others without a trace.
        """
        missing = [key for key in ("epoch", "position", *self._identity) if key not in state]
        if missing:
            raise SlimxError(
                f"the saved state of the prompts lacks {', '.join(missing)}; is it another source's?",
                code="prompts.state",
                about=missing[0],
            )
        if changed := self._changes(state):
            raise SlimxError(
                f"cannot continue in the saved order of prompts: {changed}; "
                "restore the prompts and seed of the saved run, or start a new run",
                code="prompts.changed",
                about=next(key for key, value in self._identity.items() if state[key] != value),
            )
        epoch, position = state["epoch"], state["position"]
        whole = isinstance(epoch, int) and isinstance(position, int)
        if not (whole and epoch >= 0 and 0 <= position <= len(self._prompts)):
            raise SlimxError(
                f"the saved state of the prompts points to epoch {epoch!r}, position {position!r} of "
                f"{len(self._prompts)}, which does not exist; take another checkpoint",
                code="prompts.state",
                about="position",
            )
        self._start_epoch(epoch)
        self._position = position

    def _changes(self, state: dict[str, Any]) -> str:
        """The differences between the saved identity and this one, in words; empty if nothing does."""
        old, new = state, self._identity
        changes = [f"the seed was {old['seed']} and is {new['seed']}"] if old["seed"] != new["seed"] else []
        if old["count"] != new["count"]:
            changes.append(f"there were {old['count']} prompts and now are {new['count']}")
        elif old["ids"] != new["ids"]:
            changes.append(f"the ids of the {new['count']} prompts or their order changed")
        elif old["contents"] != new["contents"]:
            changes.append(f"the {new['count']} ids are the same, but messages, token_ids, answers or metadata changed")
        return " and ".join(changes)

    def _start_epoch(self, epoch: int) -> None:
        # Raw output of PCG64, because NumPy keeps it the same in every release; `Generator.permutation` may change.
        keys = np.random.PCG64([self._identity["seed"], epoch]).random_raw(len(self._prompts))
        self._order = np.argsort(keys, kind="stable")
        self._epoch, self._position = epoch, 0


def _fingerprint(value: Any) -> str:
    return fingerprint(encode(value))
