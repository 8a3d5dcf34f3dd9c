"""Import of functions, classes and modules that a configuration names by dotted paths."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from types import ModuleType
from typing import Any

from slimx.errors import SlimxError, raised


def load_module(key: str, path: str, wanted: str = "") -> ModuleType:
    """The module at `path`. Raises SlimxError with what is wrong, naming `key` and its value: `wanted`, or else the
    module itself."""
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise SlimxError(
            f"{key}: {wanted or path} cannot be imported ({raised(error)}); is its folder on PYTHONPATH?",
            code="dotted.import",
            about=key,
        ) from error
    except (Exception, SystemExit) as error:
        raise SlimxError(f"{key}: importing {path} raised {raised(error)}", code="dotted.raised", about=key) from error


def imported(key: str, path: str) -> Any:
    """The object at `path`, the value of `key`. Raises SlimxError naming both and what is wrong."""
    module_name, _, name = path.rpartition(".")
    if not module_name or ":" in path:
        raise SlimxError(
            f"{key} is {path!r}: give a dotted path such as package.module.name", code="dotted.path", about=key
        )
    module = load_module(key, module_name, path)
    try:
        return getattr(module, name)
    except AttributeError:
        raise SlimxError(
            f"{key}: module {module_name} has no {name}",
            code="dotted.missing",
            about=key,
        ) from None


def load_function(
    key: str,
    path: str,
    parameters: tuple[str, ...],
    *,
    is_async: bool,
    options: tuple[str, dict[str, Any]] = ("", {}),
) -> Any:
    """The function at `path`, the value of `key`, which takes `parameters`. `options`: a key and its value, the keyword
    arguments that are filled in. Raises SlimxError naming the key, the path and what is wrong."""
    function = imported(key, path)
    name = path.rpartition(".")[2]
    shape = f"{'async ' if is_async else ''}def {name}({', '.join(parameters)})"
    if not callable(function):
        raise SlimxError(
            f"{key}: {path} is a {type(function).__name__}; write {shape}", code="dotted.callable", about=key
        )
    signature = inspect.signature(function)
    options_key, given = options
    try:
        signature.bind_partial(**given)
    except TypeError as error:
        raise SlimxError(
            f"{options_key}: {path}{signature} does not take them ({error}); correct the names",
            code="dotted.options",
            about=options_key,
        ) from error
    try:
        signature.bind(*parameters, **given)
    except TypeError as error:
        instead = f"write {shape}" + (f", or give what is missing in {options_key}" if options_key else "")
        raise SlimxError(
            f"{key}: {path}{signature} cannot be called ({error}); {instead}", code="dotted.signature", about=key
        ) from error
    # A partial and a function say so themselves, an object with an async __call__ through that.
    called = getattr(function, "__call__", function)  # noqa: B004
    if (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)) != is_async:
        raise SlimxError(
            f"{key}: {path} must{'' if is_async else ' not'} be async; write {shape}", code="dotted.async", about=key
        )
    return partial(function, **given) if given else function
