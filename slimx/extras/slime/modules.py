"""Modules of slime and Miles that hooks import, by name. An import finder provides them in place of the packages.

Miles (github.com/radixark/miles, read at 31f1ca9, August 2026) started as a fork of slime. Modules that Miles has under
the same names as slime are provided for Miles hooks, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from slimx.errors import SlimxError
from slimx.extras.rewards.shared.boxes import last_box
from slimx.extras.slime import grading, served
from slimx.extras.slime.recognition import ROOTS, NotServed
from slimx.extras.slime.sample import Sample

SLIME: dict[str, dict[str, Any]] = {
    "slime": {},
    "slime.rollout": {},
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": served.DynamicFilterOutput},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {"check_reward_nonzero_std": served.check_reward_nonzero_std},
    "slime.rollout.rm_hub": {
        "async_rm": grading.async_rm,
        "batched_async_rm": grading.batched_async_rm,
        "f1_score": grading.f1_score,
        "get_deepscaler_rule_based_reward": grading.deepscaler,
        "grade_answer_verl": grading.grade,
    },
    "slime.rollout.rm_hub.deepscaler": {"get_deepscaler_rule_based_reward": grading.deepscaler},
    "slime.rollout.rm_hub.f1": {"f1_score": grading.f1_score},
    "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": grading.compute_score},
    "slime.rollout.rm_hub.math_utils": {
        "extract_answer": last_box,
        "extract_boxed_answer": last_box,
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
MODULES = SLIME | {"miles" + name.removeprefix("slime"): contents for name, contents in SLIME.items()}
PROJECTS = {"slime": "slime", "miles": "Miles"}


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] not in ROOTS:
            return None
        if fullname not in MODULES:
            root = fullname.partition(".")[0].removesuffix("_plugins")
            served_names = [name for name, contents in MODULES.items() if contents]
            names = ", ".join(name for name in served_names if name.startswith(f"{root}."))
            raise NotServed(
                f"the module {fullname} of {PROJECTS[root]}, which slimx does not provide; import only {names}",
                name=fullname,
            )
        inner = any(name.startswith(fullname + ".") for name in MODULES)
        return ModuleSpec(fullname, self, is_package=inner)

    def exec_module(self, module: ModuleType) -> None:
        contents = MODULES[module.__name__]
        vars(module).update(contents)

        def missing(name: str) -> Any:
            if name.startswith("__") or f"{module.__name__}.{name}" in MODULES:
                raise AttributeError(name)
            raise NotServed(
                f"{name} of the module {module.__name__}, which slimx does not provide; import only "
                f"{', '.join(sorted(contents)) or 'submodules'}",
                name=f"{module.__name__}.{name}",
            )

        vars(module)["__getattr__"] = missing


def serve() -> None:
    """Makes `import slime` and `import miles` find the modules in `MODULES` until the process ends, because hooks may
    import inside functions. Raises SlimxError if one of the packages is already imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for root in ROOTS:
        if root in sys.modules:
            raise SlimxError(
                f"the package {root} is already imported, so hooks would not get the replacement that slimx provides; "
                f"import {root} only in hooks",
            )
    sys.meta_path.insert(0, _Finder())
