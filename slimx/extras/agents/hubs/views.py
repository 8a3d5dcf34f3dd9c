"""Texts of a step environment: what the model reads of an observation, and which action its words ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from slimx.data.records import Prompt
from slimx.errors import SlimxError

TAG = re.compile(r"<(/?)(answer|action)>", re.IGNORECASE)
COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
MAX_TEXT = 16_384
"""Characters of an observation that the model reads by default."""


class View(Protocol):
    """The textual side of one environment; yours is a class, made as `YourView(environment, **text_options)`.

    `state` may be left out: `state_digest` of the observation takes its place.
    """

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        """The text that the model reads."""
        ...

    def action(self, text: str) -> Any:
        """The action that a turn of the model asks for; None if it asks for none."""
        ...


class Words:
    """The view of an environment whose actions have names, or whose actions are text.

    A turn's action is what stands in its last <answer> or <action>, or else the whole turn."""

    def __init__(
        self,
        environment: Any,
        *,
        actions: Mapping[str, Any] | None = None,
        ask: str = "",
        max_text: int = MAX_TEXT,
    ) -> None:
        """`actions`: each name's action, compared without case; None: the words are the action. `ask`: written under
        every observation. `max_text`: characters of an observation that are shown."""
        self._environment, self._ask, self._max_text = environment, ask, max_text
        self._actions = None if actions is None else {str(name).casefold(): each for name, each in actions.items()}

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        """The environment's own text, if its `render_mode` is ansi, or else the observation as text."""
        render = getattr(self._environment, "render_mode", None) == "ansi"
        text = str(self._environment.render() if render else observation)
        return "\n".join(filter(None, [_without_colours(text)[: self._max_text].strip("\n"), self._ask]))

    def action(self, text: str) -> Any:
        """The action of the words; None for a name that has none, and for no words."""
        words = answered(text)
        return (words or None) if self._actions is None else self._actions.get(words.casefold())


def answered(text: str) -> str:
    """The words of a turn that are meant for the environment: those in its last <answer> or <action>, or else all."""
    tags = [(tag[2].casefold(), bool(tag[1]), tag) for tag in TAG.finditer(text)]
    last = {name: tag.start() for name, closes, tag in tags if closes}
    out, opened, start = text, None, 0
    for name, closes, tag in tags:
        if opened is None and not closes and tag.end() <= last.get(name, -1):
            opened, start = name, tag.end()
        elif closes and name == opened:
            out, opened = text[start : tag.start()], None
    return out.strip()


def _without_colours(text: str) -> str:
    """The text of a terminal, with what is highlighted in brackets: in gymnasium's text games the player."""
    parts = COLOUR.split(text)  # text, code, text, code, ..., text
    codes = parts[1::2]
    last = max((number for number, code in enumerate(codes) if code == "0"), default=-1)
    out, inside = [parts[0]], False
    for number, (code, following) in enumerate(zip(codes, parts[2::2], strict=True)):
        if not inside and number < last and len(code) == 2 and code[0] == "4":
            out.append("[")
            inside = True
        elif inside and code == "0":
            out.append("]")
            inside = False
        out.append(following)
    return "".join(out)


def seed_of_prompt(prompt: Prompt) -> int:
    """The seed of all environments of a prompt, which begin alike: its `metadata.seed`, or a number made of its id.

    Raises SlimxError for a seed that is no whole number."""
    seed = prompt.metadata.get("seed")
    if seed is None:
        return int.from_bytes(blake2b(prompt.id.encode(), digest_size=4).digest()) >> 1
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SlimxError(
            f"prompt {prompt.id!r}: metadata.seed is {seed!r}; an environment takes a whole number from 0 on",
            code="environment.seed",
            about=prompt.id,
        )
    return seed


def state_digest(observation: Any) -> str:
    """Equal for equal observations: text, numbers, arrays, and lists, tuples and maps of these.

    Raises SlimxError for anything else, such as an object that has only its address."""
    digest = blake2b(digest_size=12)
    _update(digest, observation)
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"array {value.dtype.str} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"map {len(value)}\n".encode())
        for key in sorted(value, key=repr):
            _update(digest, key)
            _update(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)}\n".encode())
        for each in value:
            _update(digest, each)
    elif value is None or isinstance(value, str | bytes | bool | int | float | np.generic):
        plain = value.item() if isinstance(value, np.generic) else value
        digest.update(f"{type(plain).__name__} {plain!r}\n".encode())
    else:
        raise SlimxError(
            f"an observation holds a {type(value).__name__}, by which states cannot be told apart; give the view a "
            "method state(observation, info) that returns a text",
            code="environment.state",
            about=type(value).__name__,
        )
