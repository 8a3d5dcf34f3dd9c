"""Section recovery: parts of a run that are replaced while the others continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimx.config.section import Count, Seconds, Section

if TYPE_CHECKING:
    from slimx.config.schema import CoreConfig


class Recovery(Section):
    trainers: Count = 0
    """Number of times in a run that all trainer ranks may be replaced when one dies or hangs, while engines, router and
    driver keep running; 0: such a loss ends the run."""
    mirror_every: Count = 0
    """Steps between copies of all ranks' states to the host memory of a neighbouring node (of the same node if there is
    only one), so that lost trainers are restored without a disk and repeat fewer steps; 0: none."""
    shrink_after: Seconds | None = None
    """Seconds to wait for Ray resources of lost ranks, e.g. of a node that does not come back, until the run continues
    with fewer data-parallel ranks, which train the same batches; null: it ends after cluster.start_deadline."""


def recovery_of(config: CoreConfig) -> Recovery:
    """Returns section recovery of a run's configuration."""
    return config.recovery  # type: ignore[attr-defined]  # a field that the entry point in slimx.sections adds
