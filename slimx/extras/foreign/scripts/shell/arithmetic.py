"""Arithmetic of a shell: integers of 64 bits, variables and assignments."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from slimx.extras.foreign.scripts.shell.expansion import END, UNSET, Variables, computed, next_key, unknown_in

_TOKEN = re.compile(
    r"\s*(\d+#\w+|0[xX][\da-fA-F]+|\d+|[A-Za-z_]\w*(?:\[[^][]*\])?"
    r"|[-+*/%]=(?!=)|\*\*|<<|&&|\|\||\+\+|--|[<>=!]=|[-+*/%<>=!()])"
)
_ASSIGNED = re.compile(
    r"\b([A-Za-z_]\w*+)(?:\[[^][]*\])?\s*(?:\+\+|--|(?:[-+*/%&^|]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""Assignments in an expression."""
_POWERS = ("||", "&&", "== !=", "< > <= >=", "<<", "+ -", "* / %", "**")
_POWER = {sign: power for power, signs in enumerate(_POWERS) for sign in signs.split()}
_SIGNS: Mapping[str, Callable[[int, int], int]] = {
    "||": lambda a, b: bool(a) | bool(b),
    "&&": lambda a, b: bool(a) & bool(b),
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "<<": lambda a, b: a << (b & 63),
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: abs(a) // abs(b) * (-1) ** ((a < 0) != (b < 0)),
    "%": lambda a, b: abs(a) % abs(b) * (-1) ** (a < 0),
    "**": lambda a, b: pow(a, b, 1 << 64) if b >= 0 else 1 // 0,
}
_UNARY: Mapping[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": operator.not_,
}


def calculated(text: str, variables: Variables) -> str:
    """Returns the value of the expression `text`, whose expansions are done; an unknown value if it depends on one, or
    is no expression that is known here; then so are the variables that it sets."""
    try:
        return str(_Reader(text, variables).value())
    except (ValueError, ArithmeticError) as error:
        for names in _ASSIGNED.findall(text):
            name = "".join(names)
            unknown = dict.fromkeys(["0", *(variables.elements(name) or {})], computed(f"(({text.strip()}))"))
            variables.spend(len(unknown) + len(text))
            variables.values[name] = unknown
        unset = re.search(f"{UNSET}[^{END}]*{END}", str(error))
        return unset[0] if unset else computed(f"(({text.strip()}))")


def truth(value: str) -> bool | None:
    """Returns whether the value of an expression is not 0; None if it is unknown."""
    return None if unknown_in(value) else value != "0"


def key_of(name: str, text: str, variables: Variables) -> str:
    """Returns the key of an element of the array `name` for the subscript `text`; a negative one counts from the
    end."""
    if name in variables.keyed or text in ("@", "*"):
        return text
    key = calculated(text, variables)
    if key.startswith("-"):
        key = str(next_key(variables.elements(name) or {}) + int(key))
    return key


class _Reader:
    """Reader of an expression by the precedence of its signs."""

    def __init__(self, text: str, variables: Variables) -> None:
        if unknown_in(text) or _TOKEN.sub("", text).strip():
            raise ValueError(text)
        variables.spend(100 + len(text))
        self.tokens = [*(_TOKEN.findall(text) or ["0"]), ""]
        self.variables = variables
        self.at = 0
        self.live = True  # False where a shell skips: after 0 && and 1 ||

    def value(self) -> int:
        """Returns the value of the expression; 0 if it is empty. Raises ValueError if it is not correct."""
        value = self.binary(0)
        self.expect("")
        return value

    def binary(self, least: int) -> int:
        left = self.unary()
        while _POWER.get(self.tokens[self.at], -1) >= least:
            sign = self.next()
            power = _POWER[sign] + (sign != "**")  # it groups from the right
            decided = (sign == "&&" and not left) or (sign == "||" and left != 0)
            live, self.live = self.live, self.live and not decided
            right = self.binary(power)
            self.live = live
            left = self.applied(sign, left, right)
        return left

    def unary(self) -> int:
        sign = self.next()
        if sign in _UNARY:
            return self.kept(_UNARY[sign](self.unary()))
        if sign in ("++", "--"):
            target = self.next()
            return self.stored(target, sign[0], self.read(target), 1)
        if sign == "(":
            value = self.binary(0)
            self.expect(")")
            return value
        if sign[:1].isdigit():
            base, _, digits = re.sub(r"^0(?=\d)", "8#", sign).rpartition("#")
            return int(digits, int(base or 0))
        if not re.match(r"[A-Za-z_]", sign):
            raise ValueError(sign)
        following = self.tokens[self.at]
        if following in ("++", "--"):
            before = self.read(sign)
            self.stored(self.next() and sign, following[0], before, 1)
            return before
        if following[-1:] == "=" and following not in _POWER:
            before = self.read(sign) if following != "=" else 0
            return self.stored(sign, self.next()[:-1], before, self.binary(0))
        return self.read(sign)

    def read(self, target: str) -> int:
        """Returns the value of a variable or element; its text is an expression, and 0 without one."""
        name, key = self.element(target)
        text = (self.variables.elements(name) or {}).get(key, "") if self.live else ""
        return _Reader(text, self.variables).value()

    def stored(self, target: str, sign: str, before: int, value: int) -> int:
        """Sets a variable or element to `value`, or to `before` and `value` joined by `sign`."""
        if sign:
            value = self.applied(sign, before, value)
        name, key = self.element(target)
        if self.live:
            self.variables.store(name, str(value), key)
        return value

    def element(self, target: str) -> tuple[str, str]:
        name, _, key = target.partition("[")
        return name, key_of(name, key[:-1] or "0", self.variables)

    def applied(self, sign: str, left: int, right: int) -> int:
        return self.kept(_SIGNS[sign](left, right)) if self.live else 0

    def kept(self, value: int) -> int:
        """Returns the low 64 bits of `value` with their sign."""
        return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, sign: str) -> None:
        if self.next() != sign:
            raise ValueError(sign)
