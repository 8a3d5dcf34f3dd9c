"""Lets megatron-core validate a model, its parallel sizes and `trainer.megatron` before any rank starts."""

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
    """Builds the megatron-core configuration that each rank will build, and raises SlimxError if megatron-core rejects
    it. Must not be called in a training process, because it imports megatron-core without its compiled functions."""
    with warnings.catch_warnings(), _errors_only("torch.utils.cpp_extension"), uncompiled(), untracked():
        # Ignored: megatron-core's warnings about missing packages, and torch's about a CUDA toolkit without a GPU.
        warnings.simplefilter("ignore")
        from slimx.trainer.model.transformer import transformer_config  # this imports megatron-core

        transformer_config(spec, config, backends, cpu=cpu)


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    """Limits the logger `name` to errors until the block ends."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
