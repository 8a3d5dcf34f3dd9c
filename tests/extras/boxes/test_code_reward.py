"""The verdict of a test is not the program's to give: forgeries earn nothing, honest programs of each kind earn 1."""

from __future__ import annotations

import asyncio

import pytest

from slimx.errors import SlimxError
from slimx.extras.boxes.rewards import code
from tests.extras.rewards.reward_stand import context, trajectory

pytestmark = pytest.mark.needs("bwrap", "unshare", "prlimit")

FORGED_ANSWER = r'{"value": 4, "changed": []}\n'
WRONG = "def f(x): return 0\n"
FORGERIES = {
    "print a secret and leave": "import sys\nprint(sys.modules['__main__']._seal)\nraise SystemExit(0)",
    "leave before the test": "import os\nos._exit(0)",
    "leave in the call": "import os\ndef f(x): os._exit(0)",
    "raise SystemExit in the call": "def f(x): raise SystemExit(0)",
    "leave at the end": WRONG + "import atexit, os\natexit.register(os._exit, 0)",
    "replace AssertionError": WRONG + "import builtins\nbuiltins.AssertionError = type('Quiet', (SystemExit,), {})",
    "define AssertionError": WRONG + "class AssertionError(Exception): pass\n__debug = False",
    "equal to everything": "class Same:\n  __eq__ = lambda self, other: True\ndef f(x): return Same()",
    "an int equal to everything": "class Same(int):\n  __eq__ = lambda self, other: True\ndef f(x): return Same()",
    "false and equal": "class Same(float):\n  __eq__ = lambda *_: True\n  __ne__ = lambda *_: False\nf = Same",
    "a type that lies": "class Lie:\n  __class__ = int\n  __eq__ = lambda *_: True\ndef f(x): return Lie()",
    "look through the frames": (
        "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
        "    frame.f_globals.update(f=lambda x: 4, AssertionError=SystemExit)\n"
        "    for each in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
        "      if isinstance(each, str) and '==' in each: return int(each.split('==')[1])\n"
        "    frame = frame.f_back\n  return 0"
    ),
    "look through the heap": (
        "import gc\ndef f(x):\n  for each in gc.get_objects():\n"
        "    for text in (each.values() if isinstance(each, dict) else [each]):\n"
        "      if isinstance(text, str) and text.startswith('assert f'): return int(text.split('==')[1])\n  return 0"
    ),
    "read the test from its file": (
        "import glob, re\ndef f(x):\n  for path in glob.glob('/code/*') + glob.glob('/proc/*/environ'):\n"
        "    try: found = re.search(r'assert f\\(2\\) == (\\d+)', open(path).read())\n"
        "    except OSError: continue\n    if found: return int(found[1])\n  return 0"
    ),
    "answer on every descriptor": (
        f"import os\nfor each in os.listdir('/proc/self/fd'):\n  try: os.write(int(each), b'{FORGED_ANSWER}' * 9)\n"
        "  except OSError: pass\nos._exit(0)"
    ),
    "report as bubblewrap": (
        "import os\nfor each in range(3, 64):\n  try: os.write(each, b'{ \"exit-code\": 0 }\\n')\n"
        "  except OSError: pass\n" + WRONG
    ),
    "pack something else": (
        WRONG + "import sys\nfor module in list(sys.modules.values()):\n"
        "  if hasattr(module, 'pack'): module.pack = lambda value, kept: {'object': 10**9}\n"
    ),
    "flood from a thread": (
        "import os, threading\ndef flood():\n  while True:\n    for each in range(3, 16):\n"
        f"      try: os.write(each, b'{FORGED_ANSWER}')\n      except OSError: pass\n"
        "threading.Thread(target=flood, daemon=True).start()\ndef f(x):\n  while True: pass"
    ),
    "kill everything": (
        "import os\ndef f(x):\n  for pid in (-1, os.getppid(), 1):\n    try: os.kill(pid, 9)\n"
        "    except OSError: pass\n  os._exit(0)"
    ),
    "write through ctypes": (
        "import ctypes\ndef f(x):\n  libc = ctypes.CDLL(None)\n  libc.ptrace(16, 1, 0, 0)\n"
        "  for each in range(3, 32): libc.write(each, b'{}\\n', 3)\n  libc._exit(0)"
    ),
    "raise what the test would": "def f(x): raise AssertionError",
}  # fmt: skip


def worth(program: str, *tests: object, **options: object) -> float:
    text = f"```python\n{program}\n```"
    return asyncio.run(code.reward(context(text, tests=list(tests)), trajectory(), **{"seconds": 30.0, **options}))


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_verdict_earns_nothing(name):
    limit = 3.0 if "flood" in name else 30.0
    assert worth(FORGERIES[name], "assert f(2) == 47", seconds=limit) == 0.0


@pytest.mark.slow("full grid of forgeries")
@pytest.mark.parametrize("name", FORGERIES)
def test_nothing_makes_a_false_assertion_true(name):
    assert worth(FORGERIES[name], "assert False") == 0.0


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("class Zero:\n  __sub__ = __rsub__ = lambda *_: 0\ndef f(x): return Zero()", "assert abs(f(2) - 4) < 1e-6"),
        (WRONG + "def abs(x): return 0", "assert abs(f(2) - 4) < 1e-6"),
        (WRONG + "class math:\n  isclose = lambda *_: True", "assert math.isclose(f(2), 4)"),
        (WRONG + "import math\nmath.isclose = lambda *_: True", "assert math.isclose(f(2), 4)"),
        (WRONG + "class np:\n  isclose = lambda *_: True", "assert np.isclose(f(2), 4)"),
        (WRONG + "def isclose(*_): return True", "assert isclose(f(2), 4)"),
        (WRONG + "def Counter(_): return f", "assert Counter([f(2)]) == Counter([4])"),
        (WRONG + "class math:\n  isclose = lambda *_: True", "same = math\nassert same.isclose(f(2), 4)"),
        ("class All:\n  __contains__ = lambda *_: True\ndef f(x): return All()", "assert 4 in f(2)"),
        ("def f(g): return g('__import__(\"os\")._exit(0)')", "assert f(lambda text: len(text)) == 4"),
    ],
)
def test_a_program_does_not_decide_comparisons(program, test):
    assert worth(program, test) == 0.0


HONEST = {
    "a function": ("def f(x): return x * x", "assert f(2) == 4\nassert f('ab' and 3) == 9"),
    "a check that takes it": ("def f(x): return x * x", "def check(candidate):\n  assert candidate(2) == 4\ncheck(f)"),
    "a class": (
        "class Solution:\n  def __init__(self): self.n = 0\n  def more(self, by=1):\n    self.n += by\n    return self",
        "s = Solution()\nassert s.more().more(by=2) is s and s.n == 3",
    ),
    "values of every type": (
        "def f(x): return x",
        "for x in (None, True, 2**200, -1.5, 'é\\n', b'\\0', 1j, [1, [2]], (1,), {1}, frozenset('a'),\n"
        "          {(1, 2): {}}, range(3)):\n"
        "  assert f(x) == x and type(f(x)) is type(x), x",
    ),
    "a change in place": (
        "def f(x, y):\n  x.sort()\n  y[1] = 2",
        "x, y = [2, 1], {}\nf(x, y)\nassert (x, y) == ([1, 2], {1: 2})",
    ),
    "a function given": ("def f(g, x): return g(g(x))", "n = 5\nassert f(lambda x: x + n, 3) == 13"),
    "a generator": ("def f(n):\n  for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
    "an exception": (
        "def f(x): raise ValueError('no')",
        "try: f(1)\nexcept ValueError as error: assert str(error) == 'no'\nelse: assert False",
    ),
    "an exception of its own": (
        "class Bad(Exception): pass\ndef f(x): raise Bad('no')",
        "try: f(1)\nexcept Bad: pass\nelse: assert False",
    ),
    "a module that it imports": ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2) ** 2, 2)"),
    "a counter that it imports": (
        "from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == Counter('baa')"
    ),
    "a counter of its own": ("def Counter(x): return len(x)", "assert Counter('aab') == 3"),
    "a name of Python's": ("def sum(xs): return 2 * len(xs) + 2", "assert sum([1, 2]) == 6"),
    "a subclass of dict": ("from collections import Counter as f", "assert f('aab') == {'a': 2, 'b': 1}"),
    "a program that prints and reads": ("print('hello')\ndef f(x):\n  print(x)\n  return 4", "assert f(2) == 4"),
    "text of an object": (
        "class P:\n  def __repr__(self): return 'P(1)'\n  def __len__(self): return 3",
        "assert repr(P()) == 'P(1)' and len(P()) == 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_earns_one(name):
    program, test = HONEST[name]
    assert worth(program, test) == 1.0


def test_a_share_of_assertions_may_count_and_each_meets_a_fresh_program():
    program = "seen = []\ndef f(x):\n  seen.append(x)\n  return len(seen)"
    assert worth(
        program, "assert f(2) == 1", "assert f(2) == 1", "assert f(2) == 2", all_or_nothing=False
    ) == pytest.approx(2 / 3)


@pytest.mark.parametrize("test", ["assert f(", "class Node: pass\nf(Node())", "f(eval)"])
def test_a_test_that_cannot_be_judged_is_refused_and_not_failed(test):
    with pytest.raises(SlimxError) as refused:
        worth("def f(x): return x", test)
    assert (refused.value.code, refused.value.about) == ("reward.test", "p7")
