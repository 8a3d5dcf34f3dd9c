"""Inert stand-ins for the packages that SGLang imports but never calls on the CPU: sgl_kernel, torchvision.

Written for sglang 0.5.23 beside CPU builds of torch. SGLang imports names of these packages at module level; their
wheels are CUDA builds (torchvision's even breaks transformers beside a CPU torch). A package that is installed is never
replaced.
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
    """A module in which every name exists: classes are empty, functions refuse to run, submodules are stand-ins."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # import machinery and inspect probe dunder names and expect the truth
        full = f"{self.__name__}.{name}"
        value = sys.modules.get(full) or (_empty_class(name) if name[0].isupper() else StandIn(full))
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{self.__name__} was called, but {self.__name__.partition('.')[0]} is not installed here"
        )


def _empty_class(name: str) -> type:
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of absent packages. It stands last in `sys.meta_path`, so a real package always wins."""

    def __init__(self, absent: frozenset[str]) -> None:
        self.absent = absent

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.absent:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has no code to run."""


def install() -> tuple[str, ...]:
    """Put stand-ins in the place of absent packages and return their names; call it before `import sglang`."""
    if any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        return tuple(sorted(next(f for f in sys.meta_path if isinstance(f, StandInFinder)).absent))
    absent = frozenset(name for name in PACKAGES if importlib.util.find_spec(name) is None)
    if absent:
        # transformers looks for torchvision too and remembers the answer: let it hear the true one first.
        from transformers.utils import is_torchvision_available

        is_torchvision_available()
        sys.meta_path.append(StandInFinder(absent))
    return tuple(sorted(absent))
