"""Mapping of data set rows to the fields of prompts, by `rollout.fields` or by a mapping hook, and suggestions of
values for `rollout.fields`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from slimx.config.sections.rollout import RowFields
from slimx.dotted import load_function
from slimx.errors import SlimxError, raised
from slimx.json_types import Json

MAPS = "slimx.maps"
"""Entry point group of mapping hooks, which configurations refer to by name."""
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "conversations", "messages", "input")
"""Usual names of the column with the question in published data sets, the most likely first, in lower case."""
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Chat role for each speaker's name in ShareGPT's turns."""
type RowRewriter = Callable[[Json, str], Json]
"""Function that returns a row in another form, given a row and its location."""
ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "label", "solution", "target", "response", "output")


@dataclass(frozen=True, slots=True)
class RowMapping:
    """Conversion of data set rows to prompts, as the configuration specifies it."""

    fields: RowFields | None = None
    hook: Callable[[Json], object] | None = None
    """Mapping hook that is used instead of `fields`."""
    system: str | None = None
    """Text of a system message that is added to prompts without a system message."""
    section: str = "rollout"
    """Name of the configuration section that sets `fields` and `hook`, for error messages."""
    images: RowRewriter | None = None
    """Function that rewrites rows with images; None without `trainer.vision`."""

    def __call__(self, row: Json, where: str) -> Json:
        """Returns the fields of the prompt that `row` contains. `where`: location of the row. Raises SlimxError naming
        `where` and the column or the hook that is wrong."""
        if self.hook is not None:
            row = _hooked(self.hook, row, where, f"{self.section}.map")
        elif self.fields is not None:
            row = mapped(self.fields, row, where, f"{self.section}.fields")
        if self.images is not None:
            row = self.images(row, where)
        row = _with_turns(row, where)
        if isinstance(row.get("answer"), int | float) and not isinstance(row["answer"], bool):
            row = row | {"answer": as_text(row["answer"])}
        return row if self.system is None else _with_system(self.system, row, where)


def make_mapping(
    fields: RowFields | None,
    hook: str | None,
    system: str | None,
    images: RowRewriter | None = None,
    *,
    section: str = "rollout",
) -> RowMapping:
    """Returns the mapping from data set rows to prompts that is defined by the keys `fields` and `map` of a
    configuration section and by `rollout.system`. `hook`: value of `map`; `images`: as in `RowMapping`; `section`: name
    of the section. Raises SlimxError for a hook that cannot be loaded."""
    loaded = None if hook is None else load_function(f"{section}.map", hook, ("row",), is_async=False, group=MAPS)
    return RowMapping(fields, loaded, system, section, images)


def mapped(fields: RowFields, row: Mapping[str, object], where: str, key: str) -> Json:
    """Returns a prompt's fields, read from the columns of `row` that `fields` names. For errors, `where` is the
    location of the row and `key` the configuration key of `fields`."""

    def column(name: str) -> object:
        path = getattr(fields, name)
        return None if path is None else value_at(row, path, f"{key}.{name}", where)

    out: Json = {}
    prompt = column("prompt")
    out["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = column("answer")
    if answer is not None:
        out["answer"] = answer if fields.answer_after is None else _after(fields.answer_after, answer, where, key)
    prompt_id = column("id")
    if prompt_id is not None:
        out["id"] = as_text(prompt_id)
    metadata = {path: value_at(row, path, f"{key}.metadata", where) for path in fields.metadata}
    for name in ("dataset", "rejected", "images"):
        if getattr(fields, name) is not None:
            metadata[name] = column(name)
    if metadata:
        out["metadata"] = metadata
    tools = column("tools")
    if tools is not None:
        out["tools"] = _tools(tools, where)
    return out


def value_at(row: Mapping[str, object], path: str, key: str, where: str) -> object:
    """Returns the value at a dotted path of a row. A column whose name is the whole path, dots included, takes
    precedence. For errors, `key` is the configuration key that sets the path, and `where` the location of the row.
    Raises SlimxError if the row has no such value."""
    if path in row:
        return row[path]
    value: object = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise SlimxError(
                f"{where}: the row has no column {path!r}, which {key} names; name one of {', '.join(map(str, row))}",
                code="prompts.field",
                about=path,
            )
        value = value[part]
    return value


def as_text(value: object) -> str | None:
    """Returns a value as a string; None for NaN, which marks a missing value. An integral float is written as an
    integer, because pandas converts integer columns with missing values to floats."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if value.is_integer() and abs(value) <= 2**53:
            return str(int(value))
    return str(value)


def fitting_fields(row: Mapping[str, object]) -> dict[str, str] | None:
    """Returns a suggested value of `rollout.fields` that fits a row; None if no column looks like a question."""
    columns = {name.lower(): name for name in _columns(row)}
    prompt = _first_of(PROMPTS, columns)
    if prompt is None:
        return None
    out = {"prompt": prompt}
    answer = _first_of(ANSWERS, columns)
    if answer is not None:
        out["answer"] = answer
        value = row.get(answer)
        if isinstance(value, str) and "####" in value:
            out["answer_after"] = "####"
    if "data_source" in columns:
        out["dataset"] = columns["data_source"]
    return out


def _first_of(names: Sequence[str], columns: Mapping[str, str]) -> str | None:
    for name in names:
        if name in columns:
            return columns[name]
    return None


def written(fields: Mapping[str, str]) -> str:
    """Returns `fields` as a YAML mapping on one line."""
    parts = []
    for key, value in fields.items():
        quoted = f"'{value}'" if value.startswith("#") else value
        parts.append(f"{key}: {quoted}")
    return "{" + ", ".join(parts) + "}"


def _columns(row: Mapping[str, object]) -> Sequence[str]:
    """Returns the names of a row's columns, and the dotted paths of values nested in them."""
    columns = [str(name) for name in row]
    for name, value in row.items():
        if isinstance(value, Mapping):
            columns += [f"{name}.{key}" for key in value]
    return columns


def _after(mark: str, answer: object, where: str, key: str) -> str:
    _, separator, last = str(answer).rpartition(mark)
    if not separator:
        raise SlimxError(
            f"{where}: the answer lacks {mark!r}; set {key}.answer_after to a text that all answers contain",
            code="prompts.answer_after",
            about=where,
        )
    return last.strip()


def _tools(tools: object, where: str) -> object:
    if not isinstance(tools, str):
        return tools
    try:
        return msgspec.json.decode(tools)
    except msgspec.DecodeError as error:
        raise SlimxError(
            f"{where}: `tools` is a string that is not valid JSON ({error}); write `tools` as a JSON list"
        ) from error


def _hooked(hook: Callable[[Json], object], row: Json, where: str, key: str) -> Json:
    try:
        out = hook(row)
    except Exception as error:
        raise SlimxError(
            f"{where}: {key} raised {raised(error)}; correct the hook, or remove the row",
            code="prompts.map",
            about=where,
        ) from error
    if not isinstance(out, dict):
        raise SlimxError(
            f"{where}: {key} returned a value of type {type(out).__name__}; return a dict with messages or token_ids",
            code="prompts.map",
            about=where,
        )
    return out


def _with_turns(row: Json, where: str) -> Json:
    """Returns the row with ShareGPT's turns (from, value) converted to messages with role and content. If the last
    message is from the assistant, it is moved to `answer`."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        return row
    turns = [_with_role(turn, where) for turn in messages]
    if not turns or turns[-1].get("role") != "assistant":
        return row | {"messages": turns}
    *before, last = turns
    more = []
    for key, value in last.items():
        if key not in ("role", "content") and value is not None:
            more.append(key)
    if row.get("answer") is not None or more or not isinstance(last.get("content"), str):
        reason = "the row already has an answer" if row.get("answer") is not None else "the message is not only text"
        raise SlimxError(
            f"{where}: the last message is the assistant's and cannot become `answer`, because {reason}; remove the "
            "message, or rewrite the row in a rollout.map hook",
            code="prompts.last_turn",
            about=where,
        )
    return row | {"messages": before, "answer": last["content"]}


def _with_role(turn: Json, where: str) -> Json:
    if "role" in turn or not turn.keys() >= {"from", "value"}:
        return turn
    role = SPEAKERS.get(turn["from"])
    if role is None:
        raise SlimxError(
            f"{where}: a turn has the speaker {turn['from']!r}, which is not one of {', '.join(SPEAKERS)}; rewrite the "
            "row in a rollout.map hook",
            code="prompts.message",
            about=where,
        )
    return {"role": role, "content": turn["value"]}


def _with_system(system: str, row: Json, where: str) -> Json:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        if row.get("token_ids"):
            raise SlimxError(
                f"{where}: rollout.system needs a row with messages, but the row has token_ids; remove rollout.system",
                code="prompts.system",
                about=where,
            )
        return row
    if isinstance(messages[0], dict) and messages[0].get("role") in ("system", "developer"):
        return row
    return row | {"messages": [{"role": "system", "content": system}, *messages]}
