"""Rules about the publication of weights as files."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.general import Cluster
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


@rule("publish.unwritable", "publish.directory")
def can_write(served: ServedEngines, publish: Publish, cluster: Cluster, local_device: str) -> Problems:
    """Rejects a directory that this machine, on which the trainers run unless `cluster.ray_address` is set, cannot
    write."""
    if publish.transport != "disk" or publish.directory is None or cluster.ray_address or not served.policy:
        return
    directory = Path(publish.directory).absolute()
    existing = next(folder for folder in (directory, *directory.parents) if os.path.lexists(folder))
    try:
        TemporaryFile(dir=existing).close()
    except OSError as error:
        yield (
            f"publish.directory: {directory} is not writable ({error.strerror}: {existing}); set publish.directory to "
            "a writable directory"
        )
