"""The attestation of one rank of a server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slimx.layout.ranks import EngineSizes


def attesting(**facts: Any) -> dict[str, Any]:
    """A rank of a plain server in float32, but for `facts`."""
    plain = {"dtype": "float32", "draft": False, "sizes": asdict(EngineSizes()), "adapters": None, "numerics": None}
    return plain | facts
