"""Configuration section `recovery`: replacement of lost trainers while the rest of the run continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimx.config.section import Count, Seconds, Section

if TYPE_CHECKING:
    from slimx.config.schema import CoreConfig


class Recovery(Section):
    trainers: Count = 0
    """Maximum number of times in a run that all trainer ranks are replaced because one died or hangs, while engines,
    router and driver keep running; 0: the loss of a rank ends the run."""
    mirror_every: Count = 0
    """Number of steps between copies of all ranks' states to the host memory of a neighboring node (of the same node if
    there is only one). Lost trainers are restored from these copies without reading a disk, and repeat fewer steps than
    after a restart from a checkpoint. 0: no copies."""
    shrink_after: Seconds | None = None
    """Seconds to wait for the Ray resources of lost ranks, for example when a node does not come back, before the run
    continues with fewer data-parallel ranks, which train the same batches; null: the run keeps its number of ranks, and
    ends if they are not placed within cluster.start_deadline."""


def recovery_of(config: CoreConfig) -> Recovery:
    """Returns the `recovery` section of a run's configuration."""
    return config.recovery  # type: ignore[attr-defined]  # a field that the entry point in slimx.sections adds
