"""Stand-in modules for packages that SGLang imports but never calls on the CPU: sgl_kernel and torchvision.

Written for sglang 0.5.23 with CPU builds of torch. SGLang imports names of these packages at module level, but their
wheels are CUDA builds (torchvision's even breaks transformers with a CPU torch). Installed packages are never
replaced."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

PACKAGES = {
    "sgl_kernel": "CUDA kernels, imported at the top level of modules in srt/layers",
    "torchvision": "image transforms, imported by processors of multimodal models and unused for text",
}


class StandIn(ModuleType):
    """Stand-in for an absent module, with an attribute for every name: capitalized names are empty classes; other names
    are `StandIn` objects, which raise an error if they are called."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # importlib and inspect look for dunder names, which must be absent
        full = f"{self.__name__}.{name}"
        value: Any = sys.modules.get(full)
        if value is None:
            value = _empty_class(name) if name[0].isupper() else StandIn(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        package = self.__name__.partition(".")[0]
        raise NotImplementedError(
            f"{self.__name__} was called, but the package {package} is not installed; install it, or remove the SGLang "
            "argument that requires it"
        )


def _empty_class(name: str) -> type:
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that finds stand-ins for the modules of absent packages.

    It is the last entry of `sys.meta_path`, so an installed package always takes precedence."""

    def __init__(self, absent: frozenset[str]) -> None:
        self.absent = absent

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.absent:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, because a stand-in has no code to execute."""


def install() -> tuple[str, ...]:
    """Installs stand-ins for the packages in `PACKAGES` that are absent, and returns the names of these packages. Must
    be called before `import sglang`."""
    for finder in sys.meta_path:
        if isinstance(finder, StandInFinder):
            return tuple(sorted(finder.absent))
    absent = frozenset(name for name in PACKAGES if importlib.util.find_spec(name) is None)
    if absent:
        # transformers caches whether torchvision is available, so it must check before the stand-in exists.
        from transformers.utils import is_torchvision_available

        is_torchvision_available()
        sys.meta_path.append(StandInFinder(absent))
    return tuple(sorted(absent))
