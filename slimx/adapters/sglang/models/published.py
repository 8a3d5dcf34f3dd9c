"""SGLang's own classes of the families that slimx publishes to.

SGLang would import all of its 200 model files to find one class, 2 s of CPU time in each scheduler; with an external
package that has the class it does not, and any other model still makes it import them all.
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
    """The classes of those modules that this machine can import: of some SGLang lacks the kernels on some processors.

    A model whose class is not among them makes SGLang import all of its files, and say what is missing."""
    for name in MODULES:
        try:
            found = importlib.import_module(f"sglang.srt.models.{name}")
        except (ImportError, AttributeError):
            continue
        yield from found.EntryClass if isinstance(found.EntryClass, list) else [found.EntryClass]


EntryClass = [*entries()]
