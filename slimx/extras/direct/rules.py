"""Configuration rules for direct transfers."""

from __future__ import annotations

import importlib.util

from slimx.config.rule import Problems, rule
from slimx.config.sections.publish import Publish


@rule("publish.nixl_package", "publish.transport")
def has_nixl(publish: Publish, local_device: str) -> Problems:
    if publish.transport == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
        yield (
            "publish.transport=nixl requires the package nixl-cu13, which is not installed; install nixl-cu13 in the "
            "version pinned in requirements/, or set publish.transport=disk"
        )
