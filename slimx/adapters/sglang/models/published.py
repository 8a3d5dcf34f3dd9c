"""SGLang's classes of the model families that slimx publishes to.

SGLang would import all of its 200 model files to find one class, 2 s of CPU time per scheduler; with an external
package that contains the class it does not. Any other model still makes it import them all.
"""

import importlib
from collections.abc import Iterator

MODULES = (
    "bailing_moe",
    "deepseek_v2",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "llama",
    "minimax_m2",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)


def entries() -> Iterator[type]:
    """Yields the classes of those modules that can be imported: on some processors SGLang lacks kernels for some.

    For a model whose class is missing, SGLang imports all of its files and reports the missing dependency.
    """
    for name in MODULES:
        try:
            module = importlib.import_module(f"sglang.srt.models.{name}")
        except (ImportError, AttributeError):
            continue
        yield from module.EntryClass if isinstance(module.EntryClass, list) else [module.EntryClass]


EntryClass = [*entries()]
