"""Views: text interfaces of step environments, which render observations and parse actions from the model's turns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from slimx.data.records import Prompt
from slimx.errors import SlimxError

TAG = re.compile(r"<(/?)(answer|action)>", re.IGNORECASE)
COLOR = re.compile(r"\x1b\[([0-9;]*)m")
MAX_TEXT = 16_384
"""Default maximum length of an observation's text, in characters."""


class View(Protocol):
    """Interface of a view, which presents an environment's observations as text and parses actions. It is created as
    `YourView(environment, **text_options)`.

    An optional method `state(observation, info)` returns a string that identifies the state; without it, `state_digest`
    of the observation does. An optional method `images(observation, info)` returns the images that precede the text, in
    the forms of `RolloutContext.turn_with_images`. An optional method `actions(text)` returns a list with all actions
    in a turn, for turns of several actions.
    """

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Returns an observation as text for the model."""
        ...

    def action(self, text: str) -> Any:
        """Returns the action in a turn of the model, or None if there is none."""
        ...


class Words:
    """View of an environment whose actions are selected by name or are free text.

    The actions of a turn are in the text of its last <answer> or <action>, or else in the whole turn.
    """

    def __init__(
        self,
        environment: Any,
        *,
        actions: Mapping[str, Any] | str | None = None,
        separator: str | None = None,
        ask: str = "",
        image: str | None = None,
        max_text: int = MAX_TEXT,
    ) -> None:
        """Stores the mapping from names to actions.

        `actions`: actions by name; names are matched case-insensitively. A string is the path of an attribute of the
        environment, such as `config.action_lookup`, that maps actions to names, and is read in every turn. None if the
        text itself is the action. `separator`: text between the actions of a turn, or None if a turn is one action.
        `ask`: text that is appended to every observation. `image`: image that the model sees instead of the
        observation's text: `observation`, if observations are images, or `render`, the rendering of an environment
        whose `render_mode` is rgb_array. `max_text`: maximum length of an observation's text in characters. Raises
        SlimxError for any other `image`, an empty `separator`, or an environment without the attribute `actions`.
        """
        if separator == "":
            raise SlimxError(
                "text_options.separator is empty; set text_options.separator to the text between two actions, or "
                "remove it",
                code="environment.separator",
                about="text_options.separator",
            )
        if image not in (None, "observation", "render"):
            raise SlimxError(
                f"text_options.image is {image!r}; set text_options.image to observation or render, or remove it",
                code="environment.image",
                about="text_options.image",
            )
        self._environment = environment
        self._ask = ask
        self._image = image
        self._max_text = max_text
        self._separator = separator
        self._lookup = actions if isinstance(actions, str) else None
        self._actions: dict[str, Any] | None = None
        if isinstance(actions, Mapping):
            self._actions = {str(name).casefold(): action for name, action in actions.items()}

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Returns the environment's rendering if its `render_mode` is ansi, otherwise the observation, as text. Returns
        only the text `ask` if the model sees an image instead."""
        if self._image is not None:
            return self._ask
        if getattr(self._environment, "render_mode", None) == "ansi":
            observation = self._environment.render()
        text = _without_colors(str(observation))
        return "\n".join(filter(None, [text[: self._max_text].strip("\n"), self._ask]))

    def images(self, observation: Any, info: Mapping[str, Any]) -> list[object]:
        """Returns the image that the model sees instead of the observation's text, if any."""
        if self._image is None:
            return []
        return [observation if self._image == "observation" else self._environment.render()]

    def actions(self, text: str) -> list[Any]:
        """Returns the actions in a turn, in their order: those that its text names or, if actions have no names, the
        text itself. Leaves out unknown names and empty strings."""
        words = answered(text)
        parts = [words] if self._separator is None else [part.strip() for part in words.split(self._separator)]
        known = self._actions if self._lookup is None else _by_name(self._environment, self._lookup)
        if known is None:
            return [part for part in parts if part]
        return [known[part.casefold()] for part in parts if part.casefold() in known]

    def action(self, text: str) -> Any:
        """Returns the first action in a turn, or None if there is none."""
        return next(iter(self.actions(text)), None)


def _by_name(environment: Any, path: str) -> dict[str, Any]:
    """Returns actions by case-folded name, from the attribute `path` of an environment, which maps actions to names.
    Raises SlimxError if the environment has no such mapping."""
    found = environment
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, Mapping):
        raise SlimxError(
            f"text_options.actions is {path!r}, but the environment {type(environment).__name__} has no mapping there; "
            "name an attribute that maps actions to names, or list the actions by name",
            code="environment.actions",
            about="text_options.actions",
        )
    return {str(name).casefold(): action for action, name in found.items()}


def answered(text: str) -> str:
    """Returns the part of a turn that is meant for the environment: its last <answer> or <action>, or else all of
    it."""
    tags = [(tag[2].casefold(), bool(tag[1]), tag) for tag in TAG.finditer(text)]
    last = {name: tag.start() for name, closes, tag in tags if closes}
    content = text
    opened = None
    start = 0
    for name, closes, tag in tags:
        if opened is None and not closes and tag.end() <= last.get(name, -1):
            opened = name
            start = tag.end()
        elif closes and name == opened:
            content = text[start : tag.start()]
            opened = None
    return content.strip()


def _without_colors(text: str) -> str:
    """Removes terminal color codes, and puts brackets around highlighted text, such as the player in Gymnasium's text
    games."""
    parts = COLOR.split(text)  # text, code, text, code, ..., text
    codes = parts[1::2]
    last = max((index for index, code in enumerate(codes) if code == "0"), default=-1)
    out = [parts[0]]
    inside = False
    for index, (code, following) in enumerate(zip(codes, parts[2::2], strict=True)):
        if not inside and index < last and len(code) == 2 and code[0] == "4":
            out.append("[")
            inside = True
        elif inside and code == "0":
            out.append("]")
            inside = False
        out.append(following)
    return "".join(out)


def seed_of_prompt(prompt: Prompt) -> int:
    """Returns the seed for all environments of a prompt: its `metadata.seed`, or else one derived from its id. Raises
    SlimxError for a seed that is not a non-negative integer."""
    seed = prompt.metadata.get("seed")
    if seed is None:
        return int.from_bytes(blake2b(prompt.id.encode(), digest_size=4).digest()) >> 1
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SlimxError(
            f"prompt {prompt.id!r}: metadata.seed must be an integer of at least 0, not {seed!r}; correct or remove "
            "metadata.seed",
            code="environment.seed",
            about=prompt.id,
        )
    return seed


def state_digest(observation: object) -> str:
    """Returns a digest that is equal for equal observations: strings, numbers, arrays, PIL images, and lists and
    mappings of these.

    Raises SlimxError for other objects, because some of them could only be identified by their memory address.
    """
    digest = blake2b(digest_size=12)
    _update(digest, observation)
    return digest.hexdigest()


def _update(digest: blake2b, value: object) -> None:
    if not isinstance(value, np.ndarray | np.generic) and hasattr(value, "__array_interface__"):  # a PIL image
        value = np.asarray(value)
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
        for item in value:
            _update(digest, item)
    elif value is None or isinstance(value, str | bytes | bool | int | float | np.generic):
        plain = value.item() if isinstance(value, np.generic) else value
        digest.update(f"{type(plain).__name__} {plain!r}\n".encode())
    else:
        raise SlimxError(
            f"an observation contains a value of type {type(value).__name__}, from which slimx cannot compute a state "
            "key; define a method `state(observation, info)` in the environment's view, and return a string from it",
            code="environment.state",
            about=type(value).__name__,
        )
