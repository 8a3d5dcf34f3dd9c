"""Arguments of chat templates: checks of them, and tokenizers that render with them."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slimx.errors import SlimxError
from slimx.runtime.children import python_argv

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REPEATS = re.compile(r"\brange\b|\*|(?:{%[-+]? *(?:for|macro)\b[\s\S]*){2}")
"""Pattern of all templates that may not terminate. A single loop over the messages always does."""
WAIT_S = 600.0
"""Deadline of the process that renders, in seconds."""


def check_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises SlimxError naming the tokenizer's directory if its chat template exceeds the time or memory of `rendering`
    for a short conversation. It runs in another process, because nothing could stop it in this one."""
    configured = tokenizer.chat_template or ""
    templates = list(configured.values()) if isinstance(configured, dict) else [configured]
    templates = [template for template in templates if REPEATS.search(template)]
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
            f"{where}: the chat template does not terminate on a short conversation; correct its loops",
            code="template.endless",
            about=where,
        )


def with_template(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> PreTrainedTokenizerBase:
    """Returns a tokenizer whose chat template has `arguments` as defaults: `tokenizer` if there are none, else a copy
    that shares the vocabulary. Arguments passed when rendering take precedence. `check_arguments` checks them."""
    if not arguments or not isinstance(tokenizer.chat_template, str):
        return tokenizer
    out = copy.copy(tokenizer)
    # Set in the template itself, because hooks, agents and adapters render without the arguments.
    out.chat_template = "".join(_default(name, value) for name, value in arguments.items()) + tokenizer.chat_template
    return out


def check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object], key: str) -> None:
    """Raises SlimxError naming `key` and an argument that the chat template does not use."""
    if not arguments:
        return
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise SlimxError(
            f"{key} is set, but the tokenizer does not have a single chat template; leave it out",
        )
    for name in arguments:
        if not name.isidentifier() or not re.search(rf"\b{name}\b", template):
            raise SlimxError(
                f"{key} has {name!r}, which the chat template does not use; correct the name or leave it out",
                code="template.argument",
                about=f"{key}.{name}",
            )


def _default(name: str, value: object) -> str:
    # Jinja accepts Python literals. transformers removes the line break after a block, so nothing is rendered.
    return f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
