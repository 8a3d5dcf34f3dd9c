"""Calls of tools for the ten repairs of `examples/repair`: some that solve them, and some that do not."""

from __future__ import annotations

from pathlib import Path

from tests.extras.boxes.calls import calling

EXAMPLES = Path(__file__).parents[3] / "examples/repair"


def edit(path: str, old: str, new: str) -> str:
    return calling("edit_file", path=path, old=old, new=new)


def shell(command: str) -> str:
    return calling("shell", command=command)


ROMAN = """(1, "I")]
SYMBOLS += [(900, "CM"), (400, "CD"), (90, "XC"), (40, "XL"), (9, "IX"), (4, "IV")]
SYMBOLS.sort(reverse=True)"""
TRANSPOSED = """def transpose(rows):
    return [list(row) for row in zip(*rows)]
"""
BALANCED = """def balanced(text):
    text = "".join(each for each in text if each in "()[]{}")
    while (less := text.replace("()", "").replace("[]", "").replace("{}", "")) != text:
        text = less
    return not text
"""
READ = """if key in self.entries:
            self.entries[key] = self.entries.pop(key)
        return self.entries.get(key)"""
SOLVED = {
    "roman": [edit("roman.py", '(1, "I")]', ROMAN)],
    "intervals": [shell("sed -i 's/start < merged/start <= merged/' intervals.py")],
    "cache": [
        shell("cat cache.py"),
        edit("cache.py", "return self.entries.get(key)", READ),
        edit("cache.py", "        if key not in", "        self.get(key)\n        if key not in"),
    ],
    "query": [
        edit("query.py", 'text.split("&")', 'filter(None, text.split("&"))'),
        edit("query.py", "found[name] = [value]", "found.setdefault(name, []).append(value)"),
    ],
    "wrap": [edit("wrap.py", "lines.append(line)", "lines.append(line or words.pop(0))")],
    "matrix": [calling("write_file", path="matrix.py", content=TRANSPOSED)],
    "balance": [calling("write_file", path="/repo/balance.py", content=BALANCED)],
}
FAILED = {
    "median": [shell("echo nothing to do")],
    "leap": [shell("echo 'import os; os._exit(0)' > leap.py")],  # leaving with status 0 before a test has run
    "chunks": [shell("echo ')' >> chunks.py; mkdir -p tests; ln -sf /etc/passwd test_chunks.py")],
}

PUT = """

    def put(self, key, value):
"""
IN_ONE_CALL = {name: calls[0] for name, calls in SOLVED.items() if len(calls) == 1} | {
    "median": edit(
        "stats.py", "ordered[len(ordered) // 2]", "(ordered[len(ordered) // 2] + ordered[~(len(ordered) // 2)]) / 2"
    ),
    "leap": edit("leap.py", "year % 4 == 0", "year % 4 == 0 and (year % 100 or year % 400 == 0)"),
    "chunks": edit("chunks.py", "len(values) - size + 1", "len(values)"),
    "cache": edit("cache.py", f"return self.entries.get(key){PUT}", f"{READ}{PUT}        self.get(key)\n"),
    "query": shell(
        "sed -i 's/text.*&.)/filter(None, &)/; s/\\[name\\] = .*/.setdefault(name, []).append(value)/' query.py"
    ),
}
"""A call for each of the ten that solves it."""
