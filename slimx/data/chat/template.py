"""Arguments of chat templates: a tokenizer that renders with them, wherever it renders."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slimx.errors import SlimxError
from slimx.runtime.children import python_argv

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REPEATS = re.compile(r"\brange\b|\*|(?:{%[-+]? *(?:for|macro)\b[\s\S]*){2}")
"""Matches every template that may have no end. One loop over the messages ends with them."""
WAIT_S = 600.0


def check_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise SlimxError naming the tokenizer's directory if its chat template takes more time or memory for a short
    conversation than `rendering` allows: nothing could stop it in this process."""
    given = tokenizer.chat_template or ""
    templates = [each for each in (given.values() if isinstance(given, dict) else [given]) if REPEATS.search(each)]
    if not templates:
        return
    try:
        command = python_argv("slimx.data.chat.rendering")
        done = subprocess.run(command, input=json.dumps(templates), text=True, capture_output=True, timeout=WAIT_S)
        ends = done.returncode == 0
    except subprocess.TimeoutExpired:
        ends = False
    if not ends:
        where = tokenizer.name_or_path
        raise SlimxError(
            f"{where}: the chat template renders a short conversation without end; correct its loops",
            code="template.endless",
            about=where,
        )


def with_template(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """`tokenizer`, or a copy whose chat template knows `arguments`: whoever renders a conversation with it need not
    pass them, and goes before them if he does. The copy shares the vocabulary. `check_arguments` judges them."""
    if not arguments or not isinstance(tokenizer.chat_template, str):
        return tokenizer
    out = copy.copy(tokenizer)
    # Set in the template itself: rendering passes through hooks, agents and adapters that know of no arguments.
    out.chat_template = "".join(_default(name, value) for name, value in arguments.items()) + tokenizer.chat_template
    return out


def check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], key: str) -> None:
    """Raise SlimxError naming `key` and an argument that the chat template never reads: it would change nothing."""
    if not arguments:
        return
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise SlimxError(
            f"{key} is given, but the tokenizer has no single chat template; leave it out",
        )
    for name in arguments:
        if not name.isidentifier() or not re.search(rf"\b{name}\b", template):
            raise SlimxError(
                f"{key} has {name!r}, which the chat template never reads; correct the name or leave it out",
                code="template.argument",
                about=f"{key}.{name}",
            )


def _default(name: str, value: Any) -> str:
    # Jinja reads Python's literals. transformers drops the line break after a block, so nothing is rendered.
    return f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
