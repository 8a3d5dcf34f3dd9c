"""The modules of slime that hooks import, by name; a finder serves them in place of slime itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from slimx.adapters.slime_hooks import grading, served
from slimx.adapters.slime_hooks.sample import Sample
from slimx.errors import SlimxError

MODULES: dict[str, dict[str, Any]] = {
    "slime": {},
    "slime.rollout": {},
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": served.DynamicFilterOutput},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {"check_reward_nonzero_std": served.check_reward_nonzero_std},
    "slime.rollout.rm_hub": {
        "async_rm": grading.async_rm,
        "batched_async_rm": grading.batched_async_rm,
        "grade_answer_verl": grading.grade,
    },
    "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": grading.compute_score},
    "slime.rollout.rm_hub.math_utils": {
        "extract_answer": grading.boxed,
        "extract_boxed_answer": grading.boxed,
        "grade_answer_verl": grading.grade,
    },
    "slime.rollout.sglang_rollout": {
        "GenerateState": served.GenerateState,
        "generate": served.generate,
        "get_model_url": served.get_model_url,
    },
    "slime.utils": {},
    "slime.utils.async_utils": {"run": served.run},
    "slime.utils.http_utils": {"post": served.post},
    "slime.utils.misc": {"SingletonMeta": served.SingletonMeta, "load_function": served.load_function},
    "slime.utils.processing_utils": {"load_tokenizer": served.load_tokenizer},
    "slime.utils.types": {"Sample": Sample},
}
ROOTS = ("slime", "slime_plugins")


class NotServed(ImportError):
    """Something of slime's that slimx does not have."""


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] not in ROOTS:
            return None
        if fullname not in MODULES:
            with_names = ", ".join(name for name, held in MODULES.items() if held)
            raise NotServed(f"the module {fullname} of slime, which slimx does not serve; served are {with_names}")
        inner = any(name.startswith(fullname + ".") for name in MODULES)
        return ModuleSpec(fullname, self, is_package=inner)

    def exec_module(self, module: ModuleType) -> None:
        held = MODULES[module.__name__]
        vars(module).update(held)

        def missing(name: str) -> Any:
            if name.startswith("__") or f"{module.__name__}.{name}" in MODULES:
                raise AttributeError(name)
            raise NotServed(
                f"{name} of slime's module {module.__name__}, which slimx does not serve; it has "
                f"{', '.join(sorted(held)) or 'nothing by itself'}"
            )

        vars(module)["__getattr__"] = missing


def serve() -> None:
    """Have `import slime` find the modules above, from the first slime hook that is loaded to the end of the process: a
    hook may import in its functions too. Raises SlimxError if the real slime has been imported already."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "slime" in sys.modules:
        raise SlimxError("slime itself is imported already; import it nowhere else in a run with slime hooks")
    sys.meta_path.insert(0, _Finder())
