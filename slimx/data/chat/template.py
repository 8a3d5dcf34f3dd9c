"""Chat templates: checks that they terminate and use the configured arguments, and tokenizers that render with these
arguments."""

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
"""Pattern that matches every chat template that might not terminate. A template whose only loop runs over the messages
always terminates."""
WAIT_S = 600.0
"""Timeout of the rendering process, in seconds."""


def check_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises SlimxError naming the tokenizer's directory if its chat template exceeds the CPU time or memory limit of
    `slimx.data.chat.rendering` on a short conversation. Rendering runs in another process, because a template that
    never terminates could not be interrupted in this one."""
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
            f"{where}: loops in the chat template take too much time or memory even for a short conversation; reduce "
            "the number of iterations of these loops",
            code="template.endless",
            about=where,
        )


def with_template(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> PreTrainedTokenizerBase:
    """Returns a tokenizer whose chat template has `arguments` as defaults; arguments passed to a rendering take
    precedence. Returns `tokenizer` itself if there are no arguments, else a copy that shares the vocabulary.
    `check_arguments` checks the arguments."""
    if not arguments or not isinstance(tokenizer.chat_template, str):
        return tokenizer
    out = copy.copy(tokenizer)
    # Set in the template itself, because hooks, agents and adapters render without passing the arguments.
    out.chat_template = "".join(_default(name, value) for name, value in arguments.items()) + tokenizer.chat_template
    return out


def check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object], key: str) -> None:
    """Raises SlimxError if one of `arguments` does not occur in the tokenizer's chat template, or if there is no single
    chat template. `key`: configuration key of the arguments, for the message."""
    if not arguments:
        return
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise SlimxError(
            f"{key} needs a tokenizer with exactly one chat template, but this one has none or several; remove {key}",
        )
    for name in arguments:
        if not name.isidentifier() or not re.search(rf"\b{name}\b", template):
            raise SlimxError(
                f"{key} sets {name!r}, which the chat template does not use; rename or remove the argument",
                code="template.argument",
                about=f"{key}.{name}",
            )


def _default(name: str, value: object) -> str:
    # Jinja accepts Python literals. transformers removes the line break after a block, so nothing is rendered.
    return f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
