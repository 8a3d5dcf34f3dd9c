"""Rules about exact mode."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import rule
from slimx.config.sections.run import Numerics


@rule("exact.kernels", about="numerics.mode")
def has_kernels(numerics: Numerics, local_device: str) -> Iterator[str]:
    if numerics.exact and local_device == "cuda":
        from slimx.extras.exact.operations.forward import kernel_cuda  # imports torch, which a plan does without

        kernel_cuda.load(kernel_cuda.ordered.LIBRARY)  # torch's own operations would take minutes for a token
    yield from ()
