"""The contract of exact mode that trainer ranks attest; the driver and the ranks compute it alike."""

from __future__ import annotations

from slimx.config.schema import Config
from slimx.numerics.exact.contract import contract


def contract_of(config: Config, device: str) -> dict[str, int | str] | None:
    """The contract of exact mode that a trainer with this configuration computes by on `device`; None in fast mode."""
    return contract(leaves=config.leaves, dtype=config.numerics.dtype, device=device) if config.exact else None
