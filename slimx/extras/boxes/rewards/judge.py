"""Runs one test of a program that is in another sandbox, and exits with the result. This file runs as a program.

    stdin: the program's responses          stdout: requests to it (`wire`)          /code/test: the test

Names that the test does not define are taken from the program, except Python's own and those of modules for comparisons
(`KNOWN`). Plain values are compared here, where the program cannot interfere. Other objects stay with the program:
requests get their attributes, items and results, but never compare them.

Exit status: 0 if the test passed, 1 if it failed, 3 if the test is invalid or cannot be run outside the program's
sandbox (stderr contains the reason).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wire

FAILED, UNFIT = 1, 3
FORWARDED = (
    "__call__", "__len__", "__iter__", "__next__", "__getitem__", "__setitem__", "__delitem__", "__str__", "__repr__",
    "__bool__", "__int__", "__float__", "__enter__", "__exit__",
)  # fmt: skip
"""Special methods that are forwarded to the program's objects. Excludes operators, because f(2) - 4 would reveal the
expected value 4 to the program."""
NEVER = (eval, exec, compile, __import__, open, getattr, setattr, breakpoint, input)
"""Functions that may not be passed to the program, because they would let it execute code in the judge's process."""
KNOWN = {
    **{name: name for name in ("math", "numpy", "pandas", "pytest", "scipy", "sympy", "torch")},
    "np": "numpy", "pd": "pandas", "sp": "scipy", "approx": "pytest:approx", "isclose": "math:isclose",
    **{name: f"numpy:{name}" for name in ("allclose", "array_equal", "array_equiv")},
    **{name: f"collections:{name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")},
    "Decimal": "decimal:Decimal", "Fraction": "fractions:Fraction",
}  # fmt: skip
"""Modules and functions that tests refer to by these names in comparisons, often without importing them."""


class Unfit(BaseException):
    """Raised if the test passes the program a value that cannot be sent to another process."""


class ProgramError(Exception):
    """Exception that the program raised and whose type is neither built into Python nor among the program's public
    names."""


class RemoteProgram:
    """Program under test as the judge sees it; it runs in a separate sandbox."""

    def __init__(self) -> None:
        self.objects: dict[int, RemoteObject] = {}
        self.functions: list[Callable[..., object]] = []
        self.exceptions: dict[str, type[Exception]] = {}
        # The test may print, which must not reach these streams.
        self._responses = sys.stdin.buffer
        self._requests = sys.stdout.buffer
        sys.stdout = sys.stderr

    def names(self) -> dict[str, Any]:
        """Returns the program's public names with their values. Modules of the standard library are imported in this
        process."""
        values: dict[str, Any] = {}
        wire.send(self._requests, {"names": True})
        for name, (kind, content) in self._result().items():
            if kind == "module" and content.partition(".")[0] in sys.stdlib_module_names:
                values[name] = importlib.import_module(content)
            elif kind == "exception":
                exception = type(name, (Exception,), {})
                self.exceptions[content] = exception
                values[name] = exception
            elif kind == "value":
                values[name] = wire.unpack(content, self._resolve)
        return values

    def request(self, method: str, target: RemoteObject, *args: object, **kwargs: object) -> Any:
        """Calls a method of one of the program's objects. If the program changed arguments, applies the changes to the
        originals in this process."""
        message = {
            "method": method,
            "on": target._index,
            "given": [wire.pack(arg, self._reference) for arg in args],
            "named": {name: wire.pack(arg, self._reference) for name, arg in kwargs.items()},
        }
        wire.send(self._requests, message)
        return self._result(args)

    def _result(self, args: tuple[object, ...] = ()) -> Any:
        while True:
            response = wire.receive(self._responses)
            if "names" in response:
                return response["names"]
            if "function" in response:
                wire.send(self._requests, self._call(response))
            elif "raised" in response:
                raise self._exception(*response["raised"])
            else:
                for local, remote in zip(args, response["changed"], strict=True):
                    _change(local, wire.unpack(remote, self._resolve))
                return wire.unpack(response["value"], self._resolve)

    def _exception(self, name: str, text: str) -> Exception:
        kind = self.exceptions.get(name) or getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(text)
        return ProgramError(f"{name}: {text}")

    def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Calls a function that the test passed to the program, when the program requests it."""
        try:
            args = [wire.unpack(arg, self._resolve) for arg in message["given"]]
            return {"value": wire.pack(self.functions[message["function"]](*args), self._reference)}
        except (Exception, Unfit) as error:
            return {"raised": [type(error).__name__, str(error)]}

    def _resolve(self, kind: str, index: int) -> object:
        if kind == "function":
            return self.functions[index]
        return self.objects.setdefault(index, RemoteObject(self, index))

    def _reference(self, value: object) -> dict[str, int]:
        if isinstance(value, RemoteObject):
            return {"object": value._index}
        if not callable(value) or value in NEVER:
            raise Unfit(
                f"{value!r:.80} cannot be passed to the program; pass numbers, strings, collections or functions"
            )
        self.functions.append(value)
        return {"function": len(self.functions) - 1}


class RemoteObject:
    """Stand-in for an object in the program's process that cannot be sent as a plain value. Two stand-ins are equal
    only if they are identical."""

    def __init__(self, program: RemoteProgram, index: int):
        self._program = program
        self._index = index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.request("__getattribute__", self, name)


def _forwarded(method: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._program.request(method, self, *args, **kwargs)


for _method in FORWARDED:
    setattr(RemoteObject, _method, _forwarded(_method))


def _change(local: Any, remote: Any) -> None:
    """Applies to the argument `local` the changes that the program made to its copy. `remote`: the copy's value after
    the call."""
    if type(local) is type(remote) and local != remote:
        if isinstance(local, list):
            local[:] = remote
        elif isinstance(local, (dict, set)):
            local.clear()
            local.update(remote)


def _scope(test: ast.Module, names: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of names that the test uses but does not define.

    For example, `abs` is Python's and `np` in np.isclose(...) is NumPy, even if the program defines these names,
    because otherwise the program could decide every comparison. The program's `abs` is used only if the test uses no
    other name of the program, because the test is then about this function.
    """
    nodes = list(ast.walk(test))
    used = {node.id for node in nodes if isinstance(node, ast.Name)} & names.keys()
    owners = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            owners.add(node.value.id)
    shared = {name for name in names if hasattr(builtins, name) or name in KNOWN}
    scope = {name: value for name, value in names.items() if name not in shared or used == {name}}
    paths = {name: name for name in owners & sys.stdlib_module_names}
    paths |= {name: KNOWN[name] for name in used & KNOWN.keys() - scope.keys()}
    for name, path in paths.items():
        scope.pop(name, None)
        with contextlib.suppress(ImportError):  # not installed, so the program cannot use it either
            scope[name] = pkgutil.resolve_name(path)
    return scope


def main() -> int:
    source = Path("/code/test").read_text()
    try:
        tree = ast.parse(source, "test")
    except SyntaxError as error:
        print(f"the test is not Python: {error}", file=sys.stderr)
        return UNFIT
    try:
        scope = _scope(tree, RemoteProgram().names())
        exec(compile(tree, "test", "exec"), {"__name__": "test", **scope})
    except Unfit as unfit:
        print(unfit, file=sys.stderr)
        return UNFIT
    except BaseException as error:
        print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
