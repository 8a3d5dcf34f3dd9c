"""Types of external documents, which are checked field by field where they are read."""

from typing import Any

type Json = dict[str, Any]
"""An object of a JSON or YAML document."""
