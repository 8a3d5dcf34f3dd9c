"""Runs the program under test: imports it and executes the requests of the judge, which is in another sandbox.

    stdin: requests (`wire`)      stdout: responses       /code/program.py: the program

The program can access everything in this process, and nothing in this process contains the expected answers: a
malicious program can only spoil its own responses. This file runs as a program in the sandbox.
"""

from __future__ import annotations

import os
import types
from typing import Any

import wire


class Host:
    def __init__(self) -> None:
        self.objects: list[object] = []
        self._requests = os.fdopen(os.dup(0), "rb")
        self._responses = os.fdopen(os.dup(1), "wb")
        # Gives the program no input, and keeps its output from the judge.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)

    def serve(self) -> None:
        program: types.ModuleType | None = None
        while True:
            try:
                request = wire.receive(self._requests)
            except EOFError:
                return
            try:
                if program is None:
                    import program as imported  # the module exists only in the sandbox

                    program = imported
                response = {"names": self._names(program)} if "names" in request else self._execute(request)
            except Exception as error:
                response = {"raised": [type(error).__name__, str(error)]}
            wire.send(self._responses, response)

    def _names(self, program: types.ModuleType) -> dict[str, tuple[str, Any]]:
        names: dict[str, tuple[str, Any]] = {}
        for name, value in vars(program).items():
            if name.startswith("_"):
                continue
            if isinstance(value, types.ModuleType):
                names[name] = ("module", value.__name__)
            elif isinstance(value, type) and issubclass(value, Exception):
                names[name] = ("exception", value.__name__)
            else:
                try:
                    names[name] = ("value", wire.pack(value, self._reference))
                except RecursionError:
                    continue
        return names

    def _execute(self, request: dict[str, Any]) -> dict[str, Any]:
        args = [wire.unpack(arg, self._resolve) for arg in request["given"]]
        kwargs = {name: wire.unpack(arg, self._resolve) for name, arg in request["named"].items()}
        target: Any = self.objects[request["on"]]
        method = request["method"]
        if method == "__getattribute__":
            value = getattr(target, *args)
        elif method == "__call__":
            value = target(*args, **kwargs)
        elif method == "__bool__":
            value = bool(target)
        elif method == "__iter__":
            value = iter(target)
        elif hasattr(type(target), method):
            value = getattr(type(target), method)(target, *args, **kwargs)
        else:  # Python's own error, which built-in functions expect
            raise TypeError(f"{type(target).__name__} has no {method}")
        changed = [wire.pack(arg, self._reference) for arg in args]
        return {"value": wire.pack(value, self._reference), "changed": changed}

    def _reference(self, value: object) -> dict[str, int]:
        if isinstance(value, _Function):
            return {"function": value.index}
        for index, known in enumerate(self.objects):
            if known is value:
                return {"object": index}
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def _resolve(self, kind: str, index: int) -> object:
        return self.objects[index] if kind == "object" else _Function(self, index)

    def call(self, index: int, args: tuple[object, ...]) -> Any:
        """Calls a function that the test passed to the program and that runs in the judge. The judge may send requests
        before the function returns."""
        packed = [wire.pack(arg, self._reference) for arg in args]
        wire.send(self._responses, {"function": index, "given": packed})
        while True:
            message = wire.receive(self._requests)
            if "method" in message:
                wire.send(self._responses, self._execute(message))
            elif "raised" in message:
                raise RuntimeError(": ".join(message["raised"]))
            else:
                return wire.unpack(message["value"], self._resolve)


class _Function:
    """Stand-in for a function that the test passed to the program. Calling it runs the function in the judge."""

    def __init__(self, host: Host, index: int):
        self.host = host
        self.index = index

    def __call__(self, *args: object) -> Any:
        return self.host.call(self.index, args)


if __name__ == "__main__":
    Host().serve()
