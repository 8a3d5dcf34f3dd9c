"""Option `expandable_segments` of torch's CUDA allocator, as variables of an environment ask for it.

Trainers want it: packs of many lengths leave memory in pieces. SGLang's memory saver refuses to start with it.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads both names; the second is the older one."""
_OPTION = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*\w+\s*")
"""Values of other options hold commas too, inside brackets, so the text is not split at them."""


def set_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Ask for expandable segments beside the options that are set, unless one of them is this one already."""
    given = [name for name in VARIABLES if environment.get(name)]
    if any(_OPTION.search(environment[name]) for name in given):
        return
    name = given[0] if given else VARIABLES[0]
    environment[name] = ",".join(filter(None, (environment.get(name), "expandable_segments:True")))


def drop_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Remove the option and leave the others; a variable with no other option is removed."""
    for name in VARIABLES:
        if (value := environment.pop(name, None)) and (rest := _OPTION.sub("", value).removeprefix(",")):
            environment[name] = rest
