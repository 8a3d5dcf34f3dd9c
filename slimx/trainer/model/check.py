"""Has megatron-core validate a model, its layout and `trainer.megatron` before any rank starts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from slimx.adapters.megatron.imports import uncompiled, untracked
from slimx.config.schema import Config
from slimx.models.families import ModelSpec
from slimx.trainer.device.backends import Backends


def check_transformer(spec: ModelSpec, config: Config, backends: Backends, *, cpu: bool) -> None:
    """Builds Megatron's configuration as each rank will. Raises SlimxError as `transformer_config` does. Not for a
    training process: megatron-core is imported without its compiled functions."""
    with warnings.catch_warnings(), _errors_only("torch.utils.cpp_extension"), uncompiled(), untracked():
        # megatron-core warns about packages missing in this process, torch's logger about a toolkit without a GPU.
        warnings.simplefilter("ignore")
        from slimx.trainer.model.transformer import transformer_config  # imports megatron-core

        transformer_config(spec, config, backends, cpu=cpu)


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    """Limits the logger `name` to errors inside the block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
