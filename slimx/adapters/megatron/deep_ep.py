"""DeepEP as megatron-core 0.19.2 wants to import it.

`megatron.core.transformer.moe.fused_a2a` takes EventHandle and EventOverlap from deep_ep.utils and, where that is no
ImportError, lives without DeepEP. sgl-deep-ep 0.1.2.post1 has only the first of them there, so that every flex
dispatcher would be refused; and it fails an assertion where it finds no CUDA toolkit, which nobody catches.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from slimx.errors import SlimxError


def install(*, needed: bool) -> list[str]:
    """Prepare the import; call before megatron.core is imported. `needed`: whether the trainer dispatches by DeepEP.

    Returns the names of what was done. Raises SlimxError if DeepEP is needed and cannot be imported."""
    if importlib.util.find_spec("deep_ep") is None:
        return []
    try:
        package, utils = importlib.import_module("deep_ep"), importlib.import_module("deep_ep.utils")
    except (ImportError, AssertionError) as error:
        if needed:
            raise SlimxError(
                f"trainer.moe.dispatcher=flex needs deep_ep, whose import fails ({type(error).__name__}: {error}); ask "
                "`slimx doctor` on this machine, or set trainer.moe.dispatcher=alltoall",
                code="trainer.deep_ep",
                about="trainer.moe.dispatcher",
            ) from error
        sys.modules["deep_ep"] = None  # an import of it is now an ImportError, which megatron-core expects
        return ["no_deep_ep"]
    if hasattr(utils, "EventOverlap"):  # other builds of DeepEP have it
        return []
    utils.EventOverlap = package.EventOverlap
    return ["deep_ep_events"]
