"""Hosts a program for the judge of another sandbox: imports it and does what the judge asks of it.

    stdin: what is asked (`wire`)          stdout: the answers          /code/program.py: the program

Everything here is in the program's reach, and nothing here knows what the answers should be: the program may spoil its
own answers, no more. It is run as a program inside the sandbox.
"""

from __future__ import annotations

import os
import types
from typing import Any

import wire


class Host:
    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._asked, self._answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        # The program reads nothing, and what it prints is not for the judge.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)

    def serve(self) -> None:
        program: types.ModuleType | None = None
        while True:
            try:
                asked = wire.receive(self._asked)
            except EOFError:
                return
            try:
                if program is None:
                    import program as imported  # type: ignore[import-not-found]

                    program = imported
                answer = {"names": self._names(program)} if "names" in asked else self._done(asked)
            except Exception as error:
                answer = {"raised": [type(error).__name__, str(error)]}
            wire.send(self._answers, answer)

    def _names(self, program: types.ModuleType) -> dict[str, tuple[str, Any]]:
        found = {}
        for name, value in vars(program).items():
            if name.startswith("_"):
                continue
            if isinstance(value, types.ModuleType):
                found[name] = "module", value.__name__
            elif isinstance(value, type) and issubclass(value, Exception):
                found[name] = "exception", value.__name__
            else:
                try:
                    found[name] = "value", wire.pack(value, self._kept)
                except RecursionError:
                    continue
        return found

    def _done(self, asked: dict[str, Any]) -> dict[str, Any]:
        given = [wire.unpack(each, self._held) for each in asked["given"]]
        named = {name: wire.unpack(each, self._held) for name, each in asked["named"].items()}
        target, method = self.objects[asked["on"]], asked["method"]
        if method == "__getattribute__":
            value = getattr(target, *given)
        elif method == "__call__":
            value = target(*given, **named)
        elif method == "__bool__":
            value = bool(target)
        elif method == "__iter__":
            value = iter(target)
        elif hasattr(type(target), method):
            value = getattr(type(target), method)(target, *given, **named)
        else:  # as Python says it, which its own functions expect
            raise TypeError(f"{type(target).__name__} has no {method}")
        changed = [wire.pack(each, self._kept) for each in given]
        return {"value": wire.pack(value, self._kept), "changed": changed}

    def _kept(self, value: Any) -> dict[str, Any]:
        if isinstance(value, _Function):
            return {"function": value.number}
        for number, kept in enumerate(self.objects):
            if kept is value:
                return {"object": number}
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def _held(self, kind: str, number: int) -> Any:
        return self.objects[number] if kind == "object" else _Function(self, number)

    def call(self, number: int, given: tuple[Any, ...]) -> Any:
        """The result of a function of the judge's, which may ask things meanwhile."""
        wire.send(self._answers, {"function": number, "given": [wire.pack(each, self._kept) for each in given]})
        while True:
            said = wire.receive(self._asked)
            if "method" in said:
                wire.send(self._answers, self._done(said))
            elif "raised" in said:
                raise RuntimeError(": ".join(said["raised"]))
            else:
                return wire.unpack(said["value"], self._held)


class _Function:
    """A function of the judge's, for the program to call."""

    def __init__(self, host: Host, number: int):
        self.host, self.number = host, number

    def __call__(self, *given: Any) -> Any:
        return self.host.call(self.number, given)


if __name__ == "__main__":
    Host().serve()
