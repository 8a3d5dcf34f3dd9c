"""Options of torch's allocators in the environment variables of a process.

Trainers set `expandable_segments`, because micro-batches of varying length fragment memory; SGLang's memory saver
refuses to start with it. Pinned host memory is rounded up to powers of two, up to twice what optimizer moments and
checkpoint copies need, unless `pinned_max_round_threshold_mb` limits the rounding (torch 2.14,
`CachingHostAllocatorImpl::allocate`). Offloaded activations need the rounding: the memory of one micro-batch then fits
another of a different length.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from importlib import metadata

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables from which torch reads allocator options; the second is the deprecated name."""
_PINNED = "pinned_max_round_threshold_mb"
_SINCE = (2, 14)
"""First torch release that is known to have the option `_PINNED`; releases without it raise an error for unknown
options."""
_OPTION = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*\w+\s*")
"""Pattern of the option expandable_segments in a variable's value. Splitting at commas would not work, because other
options contain commas within brackets."""


def set_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Enables expandable segments of torch's allocator in `environment`, unless one of the allocator's variables
    already sets this option."""
    if not any(_OPTION.search(environment.get(name, "")) for name in VARIABLES):
        _add(environment, "expandable_segments:True")


def set_pinned_sizes(environment: MutableMapping[str, str], release: str | None = None) -> None:
    """Sets the allocator option in `environment` that turns off the rounding of pinned allocations of 1 MiB and more,
    unless `environment` already sets a threshold for the rounding.

    Does nothing for torch releases without this option. `release`: version of torch; None: the installed one."""
    major, minor = (release or metadata.version("torch")).split(".")[:2]
    is_set = any(_PINNED in environment.get(name, "") for name in VARIABLES)
    if (int(major), int(minor)) >= _SINCE and not is_set:
        _add(environment, f"{_PINNED}:1")


def _add(environment: MutableMapping[str, str], option: str) -> None:
    """Appends `option` to the allocator options in `environment`."""
    name = next((name for name in VARIABLES if environment.get(name)), VARIABLES[0])
    environment[name] = ",".join(filter(None, (environment.get(name), option)))


def drop_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Removes the option expandable_segments from `environment` and keeps all other options; a variable that is then
    empty is deleted."""
    for name in VARIABLES:
        value = environment.pop(name, "")
        others = _OPTION.sub("", value).removeprefix(",")
        if others:
            environment[name] = others
