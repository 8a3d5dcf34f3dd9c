"""The configuration: a schema of typed sections, and its loading from YAML and overrides."""

from slimx.config.load import load_config
from slimx.config.schema import Config

__all__ = ["Config", "load_config"]
