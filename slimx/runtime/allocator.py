"""Options of torch's allocators, as variables of an environment ask for them.

Trainers want `expandable_segments`: packs of many lengths leave memory in pieces. SGLang's memory saver refuses to
start with it. Pinned host memory comes in powers of two, up to twice what moments and copies for checkpoints need,
unless `pinned_max_round_threshold_mb` says up to which size (torch 2.14, `CachingHostAllocatorImpl::allocate`).
Activations that wait on the host want the rounding: memory of one micro-batch then serves another of another length.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from importlib import metadata

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads both names; the second is the older one."""
_PINNED = "pinned_max_round_threshold_mb"
_SINCE = (2, 14)
"""Release of torch from which it is known to have `_PINNED`; others refuse what they do not know."""
_OPTION = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*\w+\s*")
"""Values of other options hold commas too, inside brackets, so the text is not split at them."""


def set_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Ask for expandable segments beside the options that are set, unless one of them is this one already."""
    if not any(_OPTION.search(environment.get(name, "")) for name in VARIABLES):
        _add(environment, "expandable_segments:True")


def set_pinned_sizes(environment: MutableMapping[str, str], release: str | None = None) -> None:
    """Ask for pinned memory of the sizes that tensors have, from a MiB on, unless the environment says from which.
    `release`: of torch; None: the installed one's."""
    numbers = (release or metadata.version("torch")).split(".")
    if tuple(map(int, numbers[:2])) >= _SINCE and not any(_PINNED in environment.get(name, "") for name in VARIABLES):
        _add(environment, f"{_PINNED}:1")


def _add(environment: MutableMapping[str, str], option: str) -> None:
    """Add `option` behind the others."""
    name = next((name for name in VARIABLES if environment.get(name)), VARIABLES[0])
    environment[name] = ",".join(filter(None, (environment.get(name), option)))


def drop_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Remove the option and leave the others; a variable with no other option is removed."""
    for name in VARIABLES:
        if (value := environment.pop(name, None)) and (rest := _OPTION.sub("", value).removeprefix(",")):
            environment[name] = rest
