"""Section recovery: parts of a run that are replaced while the others go on."""

from __future__ import annotations

from slimx.config.section import Count, Seconds, Section


class Recovery(Section):
    trainers: Count = 0
    """Times that all trainer ranks may be started again in a run when one of them dies or stands still, while engines,
    router and driver stay; 0: such a loss ends the run, and the same command goes on from the newest checkpoint."""
    mirror_every: Count = 0
    """Steps between two copies of all ranks' states, which are kept in the host memory of a neighbouring node (of the
    same one, where there is no other), so that lost trainers need no disk and train fewer steps again; 0: none."""
    shrink_after: Seconds | None = None
    """Seconds that Ray may lack the places of lost ranks, as of a machine that does not come back; then the run goes on
    with fewer data-parallel ranks, which train the same batches; null: it ends after cluster.start_deadline."""
