"""Types for documents from outside, such as JSON files, which are validated field by field where they are read."""

from typing import Any

type Json = dict[str, Any]
"""An object of a JSON or YAML document, as a dict."""
