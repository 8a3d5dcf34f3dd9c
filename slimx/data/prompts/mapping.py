"""From a row to the fields of a prompt: by `rollout.fields`, or by a mapping hook; and which fields would fit a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from slimx.config.sections.rollout import RowFields
from slimx.dotted import load_function
from slimx.errors import SlimxError, raised

MAPS = "slimx.maps"
"""Group of entry points: mapping hooks by the names that a configuration has for them."""
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "conversations", "messages", "input")
"""Columns that hold a question in published data sets, the likelier first; compared without case."""
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Roles by the name that ShareGPT's turns give the speaker."""
ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "label", "solution", "target", "response", "output")


@dataclass(frozen=True, slots=True)
class RowMapping:
    """The way from the rows of a file to prompts."""

    fields: RowFields | None = None
    hook: Callable[[dict[str, Any]], Any] | None = None
    """Instead of `fields`."""
    system: str | None = None
    """Text of a system turn that prompts without one begin with."""
    section: str = "rollout"
    """Section of the configuration that `fields` and `hook` stand in, for messages."""

    def __call__(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The fields of a prompt. Raises SlimxError naming `where` and the column or the hook."""
        if self.hook is not None:
            row = _hooked(self.hook, row, where, f"{self.section}.map")
        elif self.fields is not None:
            row = mapped(self.fields, row, where, f"{self.section}.fields")
        row = _with_turns(row, where)
        if isinstance(row.get("answer"), int | float) and not isinstance(row["answer"], bool):
            row = row | {"answer": as_text(row["answer"])}
        return row if self.system is None else _with_system(self.system, row, where)


def make_mapping(
    fields: RowFields | None, hook: str | None, system: str | None, *, section: str = "rollout"
) -> RowMapping:
    """The mapping that `fields` and `map` of a section and `rollout.system` describe. Raises SlimxError for a hook that
    cannot be loaded."""
    loaded = None if hook is None else load_function(f"{section}.map", hook, ("row",), is_async=False, group=MAPS)
    return RowMapping(fields, loaded, system, section)


def mapped(fields: RowFields, row: Mapping[str, Any], where: str, named: str) -> dict[str, Any]:
    """The prompt's fields that the columns of `fields`, the value of the key `named`, hold."""

    def column(key: str) -> Any:
        path = getattr(fields, key)
        return None if path is None else value_at(row, path, f"{named}.{key}", where)

    out: dict[str, Any] = {}
    prompt = column("prompt")
    out["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if (answer := column("answer")) is not None:
        out["answer"] = answer if fields.answer_after is None else _after(fields.answer_after, answer, where, named)
    if (own := column("id")) is not None:
        out["id"] = as_text(own)
    metadata = {path: value_at(row, path, f"{named}.metadata", where) for path in fields.metadata}
    metadata |= {key: column(key) for key in ("dataset", "rejected", "images") if getattr(fields, key) is not None}
    if metadata:
        out["metadata"] = metadata
    if (tools := column("tools")) is not None:
        out["tools"] = _tools(tools, where)
    return out


def value_at(row: Mapping[str, Any], path: str, key: str, where: str) -> Any:
    """The value at a dotted path of a row; a column whose name has dots comes first."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise SlimxError(
                f"{where}: has no {path!r}, which {key} names; the row has {', '.join(map(str, row))}",
                code="prompts.field",
                about=path,
            )
        value = value[part]
    return value


def as_text(value: Any) -> str | None:
    """A value as a text: a whole number without a fraction, as pandas writes it where others of its column are missing;
    None for NaN, which stands for a missing one."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if value.is_integer() and abs(value) <= 2**53:
            return str(int(value))
    return str(value)


def fitting_fields(row: Mapping[str, Any]) -> dict[str, str] | None:
    """Values of `rollout.fields` that would fit a row; None where no column looks like a question."""
    names = {str(name).lower(): str(name) for name in _columns(row)}
    prompt = next((names[name] for name in PROMPTS if name in names), None)
    if prompt is None:
        return None
    out = {"prompt": prompt}
    if (answer := next((names[name] for name in ANSWERS if name in names), None)) is not None:
        out["answer"] = answer
        if isinstance(value := row.get(answer), str) and "####" in value:
            out["answer_after"] = "####"
    if "data_source" in names:
        out["dataset"] = names["data_source"]
    return out


def written(fields: Mapping[str, str]) -> str:
    """Fields as a line of YAML."""
    quoted = {key: f"'{value}'" if value.startswith("#") else value for key, value in fields.items()}
    return "{" + ", ".join(f"{key}: {value}" for key, value in quoted.items()) + "}"


def _columns(row: Mapping[str, Any]) -> Sequence[str]:
    inner = [f"{name}.{key}" for name, value in row.items() if isinstance(value, Mapping) for key in value]
    return [*map(str, row), *inner]


def _after(mark: str, answer: Any, where: str, named: str) -> str:
    before, found, last = str(answer).rpartition(mark)
    if not found:
        raise SlimxError(
            f"{where}: its answer has no {mark!r}, after which {named}.answer_after looks; correct one of them",
            code="prompts.answer_after",
            about=where,
        )
    return last.strip()


def _tools(tools: Any, where: str) -> Any:
    if not isinstance(tools, str):
        return tools
    try:
        return msgspec.json.decode(tools)
    except msgspec.DecodeError as error:
        raise SlimxError(f"{where}: its tools are no JSON ({error})") from error


def _hooked(hook: Callable[[dict[str, Any]], Any], row: dict[str, Any], where: str, key: str) -> dict[str, Any]:
    try:
        out = hook(row)
    except Exception as error:
        raise SlimxError(f"{where}: {key} raised {raised(error)}", code="prompts.map", about=where) from error
    if not isinstance(out, dict):
        raise SlimxError(
            f"{where}: {key} returned a {type(out).__name__}; return a dict with messages or token_ids",
            code="prompts.map",
            about=where,
        )
    return out


def _with_turns(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row with turns of ShareGPT's form (from, value) as role and content, and with the answer that its messages
    end with, if they do, as `answer`."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        return row
    turns = [_with_role(turn, where) for turn in messages]
    if not turns or turns[-1].get("role") != "assistant":
        return row | {"messages": turns}
    *before, last = turns
    more = [key for key, value in last.items() if key not in ("role", "content") and value is not None]
    if row.get("answer") is not None or more or not isinstance(last.get("content"), str):
        both = "there is an answer besides" if row.get("answer") is not None else "it is no text alone"
        raise SlimxError(
            f"{where}: its messages end with the assistant's turn, and {both}; leave the turn out, or rewrite the row "
            "by rollout.map",
            code="prompts.last_turn",
            about=where,
        )
    return row | {"messages": before, "answer": last["content"]}


def _with_role(turn: dict[str, Any], where: str) -> dict[str, Any]:
    if "role" in turn or not turn.keys() >= {"from", "value"}:
        return turn
    if (role := SPEAKERS.get(turn["from"])) is None:
        raise SlimxError(
            f"{where}: a turn is from {turn['from']!r}; those from {', '.join(SPEAKERS)} are read, rollout.map can "
            "rewrite others",
            code="prompts.message",
            about=where,
        )
    return {"role": role, "content": turn["value"]}


def _with_system(system: str, row: dict[str, Any], where: str) -> dict[str, Any]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        if row.get("token_ids"):
            raise SlimxError(
                f"{where}: has token_ids, to which rollout.system cannot be added; leave it out",
                code="prompts.system",
                about=where,
            )
        return row
    if isinstance(messages[0], dict) and messages[0].get("role") in ("system", "developer"):
        return row
    return row | {"messages": [{"role": "system", "content": system}, *messages]}
