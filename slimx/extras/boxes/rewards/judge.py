"""Runs one test of a program that lives in another sandbox, and exits with the verdict: it is run as a program itself.

    stdin: what the program answers          stdout: what it is asked (`wire`)          /code/test: the test

Names that the test does not define are the program's, but for Python's and those of modules that compare (`KNOWN`).
Values of plain types are compared here, where the program cannot reach; its other objects stay with it, and are asked
over the wire for attributes, items and results, but not whether they equal something.

Exit status: 0 the test passed, 1 it did not, 3 the test itself cannot be run this way (the reason is on stderr).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

import wire

FAILED, UNFIT = 1, 3
FORWARDED = (
    "__call__", "__len__", "__iter__", "__next__", "__getitem__", "__setitem__", "__delitem__", "__str__", "__repr__",
    "__bool__", "__int__", "__float__", "__enter__", "__exit__",
)  # fmt: skip
"""Methods of Python that the program's objects are asked for. Operators are not: f(2) - 4 would tell it the 4."""
NEVER = (eval, exec, compile, __import__, open, getattr, setattr, breakpoint, input)
"""Functions that would let the program run its own code here."""
KNOWN = {
    **{name: name for name in ("math", "numpy", "pandas", "pytest", "scipy", "sympy", "torch")},
    "np": "numpy", "pd": "pandas", "sp": "scipy", "approx": "pytest:approx", "isclose": "math:isclose",
    **{name: f"numpy:{name}" for name in ("allclose", "array_equal", "array_equiv")},
    **{name: f"collections:{name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")},
    "Decimal": "decimal:Decimal", "Fraction": "fractions:Fraction",
}  # fmt: skip
"""Modules and functions that tests compare with under these names, often without an import."""


class Unfit(BaseException):
    """The test hands over what cannot leave this process."""


class ProgramError(Exception):
    """An exception that the program raised and that is none of Python's own."""


class Program:
    """The program under test, in the other sandbox."""

    def __init__(self) -> None:
        self.objects: dict[int, Remote] = {}
        self.functions: list[Any] = []
        self.exceptions: dict[str, type[Exception]] = {}
        # Kept from the test, which may print.
        self._answers, self._questions = sys.stdin.buffer, sys.stdout.buffer
        sys.stdout = sys.stderr

    def names(self) -> dict[str, Any]:
        """The program's public names. Modules are imported here, if they are Python's own."""
        found: dict[str, Any] = {}
        wire.send(self._questions, {"names": True})
        for name, (kind, content) in self._result().items():
            if kind == "module" and content.partition(".")[0] in sys.stdlib_module_names:
                found[name] = importlib.import_module(content)
            elif kind == "exception":
                found[name] = self.exceptions[content] = type(name, (Exception,), {})
            elif kind == "value":
                found[name] = wire.unpack(content, self._held)
        return found

    def ask(self, method: str, target: Remote, *given: Any, **named: Any) -> Any:
        """The result of a method of one of the program's objects. Arguments that it changed in place change here."""
        asked = {
            "method": method,
            "on": target._number,
            "given": [wire.pack(each, self._kept) for each in given],
            "named": {name: wire.pack(each, self._kept) for name, each in named.items()},
        }
        wire.send(self._questions, asked)
        return self._result(given)

    def _result(self, given: tuple[Any, ...] = ()) -> Any:
        while True:
            said = wire.receive(self._answers)
            if "names" in said:
                return said["names"]
            if "function" in said:
                wire.send(self._questions, self._call(said))
            elif "raised" in said:
                name, text = said["raised"]
                kind = self.exceptions.get(name) or getattr(builtins, name, None)
                known = isinstance(kind, type) and issubclass(kind, Exception)
                raise kind(text) if known else ProgramError(f"{name}: {text}")
            else:
                for mine, theirs in zip(given, said["changed"], strict=True):
                    _change(mine, wire.unpack(theirs, self._held))
                return wire.unpack(said["value"], self._held)

    def _call(self, said: dict[str, Any]) -> dict[str, Any]:
        """Let the program call a function that the test gave it."""
        try:
            given = [wire.unpack(each, self._held) for each in said["given"]]
            return {"value": wire.pack(self.functions[said["function"]](*given), self._kept)}
        except (Exception, Unfit) as error:
            return {"raised": [type(error).__name__, str(error)]}

    def _held(self, kind: str, number: int) -> Any:
        if kind == "function":
            return self.functions[number]
        return self.objects.setdefault(number, Remote(self, number))

    def _kept(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"object": value._number}
        if not callable(value) or value in NEVER:
            raise Unfit(f"{value!r:.80} cannot be handed to the program: give it plain values or functions")
        self.functions.append(value)
        return {"function": len(self.functions) - 1}


class Remote:
    """An object of the program's. Two are equal only if they are the same one."""

    def __init__(self, program: Program, number: int):
        self._program, self._number = program, number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("__getattribute__", self, name)


def _forwarded(method: str) -> Any:
    return lambda self, *given, **named: self._program.ask(method, self, *given, **named)


for _method in FORWARDED:
    setattr(Remote, _method, _forwarded(_method))


def _change(mine: Any, theirs: Any) -> None:
    if type(mine) is type(theirs) and mine != theirs:
        if isinstance(mine, list):
            mine[:] = theirs
        elif isinstance(mine, (dict, set)):
            mine.clear()
            mine.update(theirs)


def _scope(test: ast.Module, names: dict[str, Any]) -> dict[str, Any]:
    """Values of the names that the test uses and does not define itself.

    What it calls abs is Python's, and `np` in np.isclose(...) is numpy, whatever the program calls so: else the program
    could decide every comparison. Only a test of nothing else is one of the program's own abs."""
    used = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} & names.keys()
    owners = {node.value.id for node in ast.walk(test) if _of_a_name(node)} & names.keys()
    shared = {name for name in names if hasattr(builtins, name) or name in KNOWN}
    scope = {name: value for name, value in names.items() if name not in shared or used == {name}}
    taken = {name: name for name in owners & sys.stdlib_module_names}
    taken |= {name: KNOWN[name] for name in used & KNOWN.keys() - scope.keys()}
    for name, path in taken.items():
        scope.pop(name, None)
        with contextlib.suppress(ImportError):  # the program cannot have it either
            scope[name] = pkgutil.resolve_name(path)
    return scope


def _of_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def main() -> int:
    source = Path("/code/test").read_text()
    try:
        tree = ast.parse(source, "test")
    except SyntaxError as error:
        print(f"the test is no Python: {error}", file=sys.stderr)
        return UNFIT
    try:
        scope = _scope(tree, Program().names())
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
