"""SGLang's own classes of the model families to which slimx publishes weights, re-exported for a faster start.

To find one class, SGLang imports all of its 200 model files, which takes 2 s of CPU time per scheduler. It skips this
search if an external package, such as this one, contains the class. For a model whose class is missing here, SGLang
still imports all of its model files.
"""

import importlib
from collections.abc import Iterator

MODULES = (
    "bailing_moe",
    "deepseek_v2",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe",
    "gpt_oss",
    "kimi_k25",
    "llama",
    "minimax_m2",
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
)


def entries() -> Iterator[type]:
    """Yields the model classes of each module in `MODULES` that can be imported; on some processors, SGLang lacks
    kernels that a module needs.

    For a model whose class is missing, SGLang imports all of its model files and reports the missing dependency.
    """
    for name in MODULES:
        try:
            module = importlib.import_module(f"sglang.srt.models.{name}")
        except (ImportError, AttributeError):
            continue
        yield from module.EntryClass if isinstance(module.EntryClass, list) else [module.EntryClass]


EntryClass = [*entries()]
