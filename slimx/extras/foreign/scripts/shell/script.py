"""Reading of a shell script: the commands that it would run, found without running anything.

Variables, arrays, `if`, `case`, functions and files named by `source` are followed. The output of other programs is
unknown, and a condition on it counts as false.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimx.extras.foreign.scripts.shell.expansion import (
    Variables,
    arithmetic,
    expanded,
    text_of,
    unknown_in,
    without_unset,
)
from slimx.extras.foreign.scripts.shell.tokens import Token, tokens_of

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_SEPARATORS = frozenset((";", "\n", "&", ";;"))
_CHAINS = frozenset(("&&", "||", "|"))
_ENDS = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}"))
_DECLARING = frozenset(("export", "local", "declare", "readonly", "typeset"))
DEPTH = 20
"""Maximum number of files and functions that may be open inside each other."""


def commands_of(script: Path, text: str, overrides: Mapping[str, str]) -> list[list[str]]:
    """Returns the words of every command that the script `text` of the file `script` would run, in order. `overrides`:
    values of variables that the user set. Raises SlimxError if a quote or bracket is not closed."""
    shell = _Shell(Variables(script, overrides))
    shell.run(tokens_of(text), 0)
    return shell.commands


@dataclass(slots=True)
class _Shell:
    variables: Variables
    commands: list[list[str]] = field(default_factory=list)
    functions: dict[str, Sequence[Token]] = field(default_factory=dict)

    def run(self, tokens: Sequence[Token], depth: int) -> bool | None:
        """Runs `tokens` and returns the status of the last command; None if it is unknown."""
        index = 0
        status: bool | None = True
        chain = ""
        while index < len(tokens) and depth < DEPTH:
            token = tokens[index]
            if token.operator and token.text in _SEPARATORS:
                chain = ""
                index += 1
                continue
            if token.operator and token.text in _CHAINS:
                chain = token.text
                index += 1
                while index < len(tokens) and tokens[index] == Token("\n", operator=True):
                    index += 1
                continue
            end = _statement_end(tokens, index)
            if chain in ("", "|") or (status is not None and status == (chain == "&&")):
                status = self._statement(tokens[index:end], depth)
            index = end
        return status

    def _statement(self, tokens: Sequence[Token], depth: int) -> bool | None:
        """Runs one command or compound command."""
        first = tokens[0]
        word = first.text
        if first.operator and word == "(":
            return self.run(tokens[1:-1], depth)
        if word == "{":
            return self.run(tokens[1:-1], depth)
        if word == "if":
            return self._if(tokens, depth)
        if word == "case":
            return self._case(tokens, depth)
        if word in ("for", "while", "until", "select"):
            return None
        named = _function(tokens)
        if named is not None:
            name, start = named
            self.functions[name] = tokens[start:]
            return True
        return self._simple(tokens, depth)

    def _if(self, tokens: Sequence[Token], depth: int) -> bool | None:
        parts = _parts(tokens[1:-1], ("then", "elif", "else"))
        condition: Sequence[Token] = parts[0][1]
        for word, body in parts[1:]:
            if word == "elif":
                condition = body
            elif word == "else" or self.run(condition, depth):
                return self.run(body, depth)
        return True

    def _case(self, tokens: Sequence[Token], depth: int) -> bool | None:
        value = without_unset(text_of(tokens[1].text, self.variables))
        index = next((i for i, token in enumerate(tokens) if token.text == "in"), 1) + 1
        while index < len(tokens):
            patterns = []
            while index < len(tokens) and not (tokens[index].operator and tokens[index].text == ")"):
                if not tokens[index].operator:
                    patterns.append(text_of(tokens[index].text, self.variables))
                index += 1
            index += 1
            start = index
            level = 0
            while index < len(tokens):
                level += _level(tokens, index)
                if tokens[index].operator and tokens[index].text == ";;" and level == 0:
                    break
                index += 1
            if not unknown_in(value) and any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
                body = tokens[start:index]
                return self.run(body[:-1] if body and body[-1].text == "esac" else body, depth)
            index += 1
        return None

    def _simple(self, tokens: Sequence[Token], depth: int) -> bool | None:
        """Runs a simple command: assigns variables, reads a file, calls a function, or records the command."""
        index = 0
        while index < len(tokens) and self._assigned(tokens[index]):
            index += 1
        if index == len(tokens):
            return True
        name = tokens[index].text
        if name in _DECLARING:
            for token in tokens[index + 1 :]:
                self._assigned(token)
            return True
        if name in ("[[", "((") or (tokens[index].operator and name == "("):
            return self._condition([text_of(token.text, self.variables) for token in tokens[index + 1 : -1]])
        words: list[str] = []
        for token in tokens[index:]:
            words += [token.text] if token.operator else expanded(token.text, self.variables)
        return self._called(words, depth) if words else True

    def _called(self, words: list[str], depth: int) -> bool | None:
        name = words[0]
        if name == "!":
            status = self._called(words[1:], depth) if words[1:] else True
            return None if status is None else not status
        if name in ("[", "test"):
            return self._condition(words[1:-1] if name == "[" else words[1:])
        if name in ("true", "false", ":"):
            return name != "false"
        if name == "unset":
            for word in words[1:]:
                self.variables.values.pop(word, None)
            return True
        if name == "printf" and words[1:2] == ["-v"] and len(words) > 2:
            self.variables.assign(words[2], [" ".join(words[4:])])
            return True
        if name in ("source", "."):
            self._read(Path("".join(words[1:2])), depth)
            return True
        if name in self.functions:
            for position, word in enumerate(words[1:], start=1):
                self.variables.values[str(position)] = [word]
            self.variables.values["@"] = words[1:]
            status = self.run(self.functions[name], depth + 1)
            self.variables.values.pop("@", None)
            return status
        if name in ("bash", "sh") and words[1:2] in (["-c"], ["-lc"]) and len(words) > 2:
            return self.run(tokens_of(words[2]), depth + 1)
        self.commands.append(words)
        return None

    def _read(self, path: Path, depth: int) -> None:
        """Runs the file at `path`, if it exists."""
        if path.is_file():
            self.run(tokens_of(path.read_text(errors="replace")), depth + 1)

    def _assigned(self, token: Token) -> bool:
        """Assigns a variable if `token` is an assignment, and returns whether it is one."""
        if token.operator:
            return False
        match = _ASSIGNMENT.fullmatch(token.text)
        if match is None or token.text.startswith("="):
            return False
        append = match[2] == "+"
        if token.array is None:
            self.variables.assign(match[1], [text_of(match[3], self.variables)], append=append)
            return True
        values = []
        for word in token.array:
            values += expanded(word, self.variables)
        self.variables.assign(match[1], values, append=append, array=True)
        return True

    def _condition(self, words: list[str]) -> bool | None:
        """Returns whether the condition of `[` or `[[` holds; None if it depends on an unknown value."""
        for sign in ("||", "&&", "-o", "-a"):
            if sign in words:
                at = words.index(sign)
                left, right = self._condition(words[:at]), self._condition(words[at + 1 :])
                both = sign in ("&&", "-a")
                if left is not None and left != both:
                    return left
                return right if left is not None else None
        if words[:1] == ["!"]:
            status = self._condition(words[1:])
            return None if status is None else not status
        words = [without_unset(word) for word in words]
        if any(unknown_in(word) for word in words):
            return None
        match words:
            case ["-n", *value]:
                return bool("".join(value))
            case ["-z", *value]:
                return not "".join(value)
            case ["-f" | "-d" | "-e" | "-r" | "-x" | "-s", path]:
                return Path(path).expanduser().exists()
            case [text, "=" | "==", pattern]:
                return fnmatch.fnmatchcase(text, pattern)
            case [text, "!=", pattern]:
                return not fnmatch.fnmatchcase(text, pattern)
            case [first, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as sign, second]:
                return self._compared(first, sign, second)
            case [value]:
                return bool(value)
        return None

    def _compared(self, left: str, sign: str, right: str) -> bool | None:
        signs = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
        result = arithmetic(f"{left or 0} {signs[sign]} {right or 0}", self.variables)
        return None if unknown_in(result) else result == "1"


def _function(tokens: Sequence[Token]) -> tuple[str, int] | None:
    """Returns the name of the function that `tokens` define, and the index of its body; None if they define none."""
    texts = [token.text for token in tokens[:4]]
    if texts[1:3] == ["(", ")"]:
        return texts[0], 3
    if texts[:1] == ["function"]:
        return texts[1], 4 if texts[2:4] == ["(", ")"] else 2
    return None


def _level(tokens: Sequence[Token], index: int) -> int:
    """Returns by how much the nesting changes at the token `index`: 1 where a compound command starts, -1 where it
    ends."""
    token = tokens[index]
    if token.operator:
        return {"(": 1, ")": -1}.get(token.text, 0)
    if not _starts_command(tokens, index):
        return 0
    if token.text in ("if", "case", "for", "while", "until", "select", "{"):
        return 1
    return -1 if token.text in ("fi", "esac", "done", "}") else 0


def _starts_command(tokens: Sequence[Token], index: int) -> bool:
    """Returns True if a command can start at the token `index`, so that a reserved word there is one."""
    if index == 0:
        return True
    before = tokens[index - 1]
    return before.operator or before.text in ("then", "else", "elif", "do", "if", "while", "until", "!", "{")


def _statement_end(tokens: Sequence[Token], index: int) -> int:
    """Returns the index after the command or compound command that starts at `index`."""
    first = tokens[index]
    start = index
    if not first.operator and first.text == "case":
        return _case_end(tokens, index)
    named = _function(tokens[index : index + 4])
    if named is not None:
        start = index + named[1]
        while start < len(tokens) and tokens[start] == Token("\n", operator=True):
            start += 1
        return _statement_end(tokens, start) if start < len(tokens) else start
    if _level(tokens, index) <= 0:
        while index < len(tokens) and not (
            tokens[index].operator
            and tokens[index].text in _SEPARATORS | _CHAINS
            and not _in_test(tokens, start, index)
        ):
            index += 1
        return max(index, start + 1)
    level = 0
    while index < len(tokens):
        if index > start and _starts_command(tokens, index) and tokens[index].text == "case":
            index = _case_end(tokens, index)
            continue
        level += _level(tokens, index)
        index += 1
        if level == 0:
            break
    return index


def _in_test(tokens: Sequence[Token], start: int, index: int) -> bool:
    """Returns True if the operator at `index` is inside `[[ ... ]]` that starts at `start`."""
    texts = [token.text for token in tokens[start:index]]
    return "[[" in texts[:2] and "]]" not in texts


def _case_end(tokens: Sequence[Token], index: int) -> int:
    """Returns the index after the `esac` of the `case` at `index`."""
    level = 0
    while index < len(tokens):
        if not tokens[index].operator and _starts_command(tokens, index):
            level += {"case": 1, "esac": -1}.get(tokens[index].text, 0)
        index += 1
        if level == 0:
            break
    return index


def _parts(tokens: Sequence[Token], words: Sequence[str]) -> list[tuple[str, Sequence[Token]]]:
    """Returns the parts of a compound command, each with the reserved word of `words` that starts it; the first has
    none."""
    parts: list[tuple[str, list[Token]]] = [("", [])]
    level = 0
    for index, token in enumerate(tokens):
        if level == 0 and not token.operator and token.text in words and _starts_command(tokens, index):
            parts.append((token.text, []))
            continue
        level += _level(tokens, index)
        parts[-1][1].append(token)
    return list(parts)
