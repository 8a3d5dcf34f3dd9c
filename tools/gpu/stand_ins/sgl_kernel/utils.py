"""Facts about the GPU that SGLang asks sglang-kernel for."""

from __future__ import annotations


def is_arch_support_pdl() -> bool:
    """Returns False: no kernel here is launched before the one before it has ended."""
    return False
