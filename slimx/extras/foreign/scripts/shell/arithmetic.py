"""Arithmetic of a shell: whole numbers, variables and assignments, read by Python's grammar.

Signs that mean something else to Python, such as `? :`, `&`, `>>` and `**`, make an unknown value.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

from slimx.extras.foreign.scripts.shell.expansion import (
    ANY,
    END,
    UNSET,
    Variables,
    computed,
    element,
    next_key,
    unknown_in,
)

_ASSIGNED = re.compile(
    r"([A-Za-z_]\w*+)(?:\[[^][]*\])?\s*(?:\+\+|--|(?:[-+*/%&^|]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""Assignments in an expression."""
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)(.*))", re.DOTALL)
"""An expression that is an assignment as a whole."""
_SIGNS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (-1) ** ((a < 0) != (b < 0)),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1) ** (a < 0),
}
_PYTHON = {"&&": " and ", "||": " or ", "/": "//", "!": "~"}
"""Signs of Python by those of a shell; both negations bind first."""


def calculated(text: str, variables: Variables) -> str:
    """Returns the value of the expression `text`, whose expansions are done; an unknown value if it depends on one, or
    is no expression that is known here; then so are the variables that it sets."""
    try:
        return str(_value(text, variables))
    except (ValueError, ArithmeticError, SyntaxError, MemoryError, KeyError) as error:
        for names in _ASSIGNED.findall(text):
            variables.spend(len(text))
            variables.values["".join(names)] = {ANY: computed("((" + text.strip() + "))")}
        unset = re.search(f"{UNSET}[^{END}]*{END}", str(error))
        return unset[0] if unset else computed("((" + text.strip() + "))")


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


def _value(text: str, variables: Variables) -> int:
    """Returns the value of an expression; 0 if it is empty. Raises ValueError, ArithmeticError or SyntaxError if it is
    not correct, or not known here."""
    variables.spend(100 + len(text))
    assignment = _ASSIGNMENT.fullmatch(text.rstrip())
    if unknown_in(text) or (assignment is None and re.search(r"~|\+\+|--", text)):
        raise ValueError(text)
    if assignment is None:
        python = re.sub(r"&&|\|\||/|!(?!=)", lambda sign: _PYTHON[sign[0]], text)
        return _of_node(ast.parse(f"({python.strip() or 0})", mode="eval").body, variables)
    name, step, sign, rest = assignment.groups()
    value = 1 if step else _value(rest, variables)
    before = _of_name(name, variables) if step or sign else 0
    if step or sign:
        value = _value(f"{before} {sign or step[0]} ({value})", variables)
    variables.store(name, str(value))
    return before if step else value


def _of_name(name: str, variables: Variables) -> int:
    """Returns the value of a variable, whose text is an expression."""
    return _value(element(variables.elements(name), "0"), variables)


def _of_node(node: ast.expr, variables: Variables) -> int:
    value: int | None = None
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            value = number
        case ast.Name(id=name):
            if name.isupper() and variables.elements(name) is None:  # a variable of the environment
                raise ValueError(f"{UNSET}{name}{END}")
            value = _of_name(name, variables)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Invert() as op, operand=operand):
            value = _of_node(operand, variables)
            value = not value if isinstance(op, ast.Invert) else -value if isinstance(op, ast.USub) else value
        case ast.BoolOp(op=op, values=values):
            decisive = isinstance(op, ast.Or)
            value = decisive == any(bool(_of_node(part, variables)) == decisive for part in values)
        case ast.BinOp(left=left, op=sign, right=right) | ast.Compare(left=left, ops=[sign], comparators=[right]):
            value = _SIGNS[type(sign)](_of_node(left, variables), _of_node(right, variables))
    if value is None or abs(value) >= 1 << 63:
        raise ValueError(ast.dump(node))
    return int(value)
