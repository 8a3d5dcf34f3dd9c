"""Inert stand-ins for packages that SGLang imports but never calls on the CPU: sgl_kernel, torchvision.

Written for sglang 0.5.23 with CPU builds of torch. SGLang imports names of these packages at module level, but their
wheels are CUDA builds (torchvision's even breaks transformers with a CPU torch). Installed packages are never replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

PACKAGES = {
    "sgl_kernel": "CUDA kernels; top-level imports in srt/layers",
    "torchvision": "image transforms; imported by processors of multimodal models, unused for text",
}


class StandIn(ModuleType):
    """A module with an attribute for every name: classes are empty, functions raise, submodules are stand-ins."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # import machinery and inspect probe dunder names
        full = f"{self.__name__}.{name}"
        value: Any = sys.modules.get(full)
        if value is None:
            value = _empty_class(name) if name[0].isupper() else StandIn(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} was called, but {self.__name__.partition('.')[0]} is not installed")


def _empty_class(name: str) -> type:
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of the modules of absent packages. It is last in `sys.meta_path`, so a real package always wins."""

    def __init__(self, absent: frozenset[str]) -> None:
        self.absent = absent

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.absent:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: a stand-in has no code."""


def install() -> tuple[str, ...]:
    """Installs stand-ins for absent packages and returns their names. Call it before `import sglang`."""
    for finder in sys.meta_path:
        if isinstance(finder, StandInFinder):
            return tuple(sorted(finder.absent))
    absent = frozenset(name for name in PACKAGES if importlib.util.find_spec(name) is None)
    if absent:
        # transformers also looks for torchvision and caches the result: let it look before the stand-in exists.
        from transformers.utils import is_torchvision_available

        is_torchvision_available()
        sys.meta_path.append(StandInFinder(absent))
    return tuple(sorted(absent))
