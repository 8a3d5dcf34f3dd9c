"""Import of functions, classes and modules that a configuration names by dotted paths."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from slimx import entry_points
from slimx.errors import SlimxError, raised
from slimx.json_types import Json


def load_module(key: str, path: str, value: str = "") -> ModuleType:
    """Imports and returns the module at the dotted path `path`. Raises a SlimxError that names `key` and `value`, the
    configuration key and its value (default: `path`), if the import fails."""
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise SlimxError(
            f"{key}: {value or path} cannot be imported ({raised(error)}); {_import_hint(error, path)}",
            code="dotted.import",
            about=key,
        ) from error
    except (Exception, SystemExit) as error:
        raise SlimxError(
            f"{key}: importing {path} raised {raised(error)}; fix this error", code="dotted.raised", about=key
        ) from error


def imported(key: str, path: str, group: str = "") -> Any:
    """Imports and returns the object that the configuration key `key` names. `path`: the key's value, a dotted path or,
    if `group` is given, the name of an entry point of that group.

    Raises a SlimxError that names the key, its value and the fault."""
    if group and path.isidentifier():
        return _entry_point(key, path, group)
    if not all(part.isidentifier() for part in path.split(".")) or path.endswith(".py"):
        raise SlimxError(
            f"{key} is {path!r}, which is not a dotted path; write MODULE.NAME, such as {_as_dotted(path)}",
            code="dotted.path",
            about=key,
        )
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise SlimxError(
            f"{key} is {path!r}, which lacks a module; write MODULE.{path} for a function in MODULE.py",
            code="dotted.path",
            about=key,
        )
    module = load_module(key, module_name, path)
    target = getattr(module, name, None)
    if (target is None or isinstance(target, ModuleType)) and _is_module(path):
        submodule = load_module(key, path)
        raise SlimxError(
            f"{key}: {path} is a module, not a function; name one of its functions ({_listed(path, submodule)})",
        )
    if not hasattr(module, name):
        if module_name == "__main__":
            raise SlimxError(
                f"{key} is {path}, a function of the script that started this run; start the script again",
                code="dotted.script",
                about=key,
            )
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"did you mean {module_name}.{near[0]}?" if near else f"it defines {_listed(module_name, module)}"
        raise SlimxError(f"{key}: module '{module_name}' has no '{name}'; {hint}", code="dotted.missing", about=key)
    return target


def module_of(path: str, group: str = "") -> str:
    """Returns the dotted path of the module that `imported` imports for the same arguments."""
    if group and path in entry_points.find(group):
        return entry_points.find(group)[path].module
    return path.rpartition(".")[0]


def _entry_point(key: str, name: str, group: str) -> object:
    names = entry_points.find(group)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"write MODULE.{name} for a function of yours"
        raise SlimxError(
            f"{key} is {name!r}, which is not one of {', '.join(names)}; {hint}",
            code="dotted.name",
            about=key,
        )
    return entry_points.load(group, name)


def _as_dotted(path: str) -> str:
    """Returns the dotted path that the user probably meant by `path`, the path of a Python file with or without `:NAME`
    at the end."""
    file, _, name = path.partition(":")
    parts = [part for part in re.split(r"[/.]", file.removesuffix(".py")) if part]
    if name or file.endswith(".py"):
        parts.append(name or "FUNCTION")
    return ".".join(parts)


def _is_module(path: str) -> bool:
    """Returns True if `path`, a dotted path whose parent has been imported, is a module or package."""
    try:
        return importlib.util.find_spec(path) is not None
    except (ImportError, ValueError):  # the parent is not a package
        return False


def _listed(path: str, module: ModuleType) -> str:
    """Returns the dotted paths of the public functions and classes that `module` defines, separated by commas. `path`:
    dotted path of the module."""
    defined = []
    for name, value in vars(module).items():
        local = callable(value) and getattr(value, "__module__", None) == module.__name__
        if local and not name.startswith("_"):
            defined.append(f"{path}.{name}")
    return ", ".join(defined) or "no function"


def _import_hint(error: ImportError, path: str) -> str:
    """Returns a hint for an error message: how to fix the failed import of `path`, or of a module that it imports."""
    name = error.name or ""
    if not isinstance(error, ModuleNotFoundError) or not f"{path}.".startswith(f"{name}."):
        return "install the missing modules, or correct the import"
    parent, _, last = name.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", None) if parent else [str(Path.cwd())]
    modules = [module.name for module in pkgutil.iter_modules(folders or [])]
    near = difflib.get_close_matches(last, modules, n=1)
    if near:
        return f"did you mean {'.'.join(filter(None, [parent, near[0]]))}?"
    return "add the directory that contains the module to PYTHONPATH"


def load_function(
    key: str,
    path: str,
    parameters: tuple[str, ...],
    *,
    is_async: bool | None = None,
    options: tuple[str, Json] = ("", {}),
    group: str = "",
) -> Any:
    """Returns the function at `path`, the value of the configuration key `key`, after checking that it can be called
    with `parameters`.

    `is_async`: True if it must be an async function, False if it must not, None if it may be either. `options`: a
    configuration key and its value, a mapping of keyword arguments that are bound to the function. `group`: if given,
    `path` may also be the name of an entry point of this group. Raises a SlimxError that names the key, the path and
    the fault."""
    function = imported(key, path, group)
    name = path.rpartition(".")[2]
    shape = f"{'async ' if is_async else ''}def {name}({', '.join(parameters)})"
    if not callable(function) or inspect.isbuiltin(function):  # which may have no signature
        raise SlimxError(
            f"{key}: {path} is of type {type(function).__name__}, not a function; define a function `{shape}`",
            code="dotted.callable",
            about=key,
        )
    signature = inspect.signature(function)
    options_key, keywords = options
    try:
        signature.bind_partial(**keywords)
    except TypeError as error:
        accepted = [name for name in signature.parameters if name not in parameters]
        unknown = next((name for name in keywords if name not in signature.parameters), next(iter(keywords)))
        near = difflib.get_close_matches(unknown, accepted, n=1)
        hint = f"did you mean {near[0]}?" if near else f"accepted parameters: {', '.join(accepted) or 'none'}"
        raise SlimxError(
            f"{options_key}: {path} has no parameter {unknown!r}; {hint}", code="dotted.options", about=options_key
        ) from error
    try:
        signature.bind(*parameters, **keywords)
    except TypeError as error:
        remedy = f"define the function as `{shape}`"
        if options_key:
            remedy += f", or set the missing arguments in {options_key}"
        raise SlimxError(
            f"{key}: {path}{signature} cannot be called ({error}); {remedy}", code="dotted.signature", about=key
        ) from error
    if is_async is not None and is_async_function(function) != is_async:
        raise SlimxError(
            f"{key}: {path} must{'' if is_async else ' not'} be async; define the function as `{shape}`",
            code="dotted.async",
            about=key,
        )
    if not keywords:
        return function
    return partial(function, **keywords)


def is_async_function(function: object) -> bool:
    """Returns True if `function` is an async function, a partial of one, or an object with an async `__call__`."""
    called = getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
