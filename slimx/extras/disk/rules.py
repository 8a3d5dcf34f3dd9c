"""Rules about the publication of weights as files."""

from __future__ import annotations

from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.publish import Publish


@rule("publish.delta_beside", "publish.delta")
def put_together(served: ServedEngines, publish: Publish) -> Problems:
    if publish.transport != "disk" or publish.delta is None:
        return
    for group in served.policy:
        if group.urls or group.nodes > 1:
            yield (
                "publish.delta with publish.transport=disk supports only servers that slimx starts and that run on "
                f"a single machine, but {group.where} sets {'urls' if group.urls else f'nodes={group.nodes}'}; remove "
                "publish.delta"
            )
