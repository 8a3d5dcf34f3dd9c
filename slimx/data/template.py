"""Arguments of chat templates: a tokenizer that renders with them, wherever it renders."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slimx.errors import SlimxError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
            code="template.missing",
            about=key,
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
