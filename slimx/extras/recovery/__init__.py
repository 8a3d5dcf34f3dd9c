"""Recovery of lost trainer ranks while a run continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimx.extras.recovery.section import recovery_of

if TYPE_CHECKING:
    from pathlib import Path

    from slimx.orchestration.ranks.trainers import TrainerGroup
    from slimx.orchestration.recovery import RankLossHandler, Replan
    from slimx.orchestration.state.recording import Records


def make(trainers: TrainerGroup, records: Records, log_dir: Path, replan: Replan) -> RankLossHandler | None:
    """Returns the handler that replaces lost trainers; None if the configuration does not enable it. It is an entry
    point of `slimx.recoveries`, and its parameters are those of `TrainerRecovery`."""
    if not recovery_of(trainers.config).trainers:
        return None
    from slimx.extras.recovery.trainers import TrainerRecovery

    return TrainerRecovery(trainers, records, log_dir, replan)
