"""Runs the suite and keeps its results in build/suite.jsonl; docs/suite.md explains it.

python -m tools.rings test [--seed N]                ring one: all tests that are not slow
python -m tools.rings all [--part 3/10] [--seed N]   all tests, or a part of them
python -m tools.rings record                         carries new results into docs/suite.md
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial

from tools.rings.execute import execute
from tools.rings.page import last_parts, recorded
from tools.rings.parts import NAMES
from tools.rings.results import read
from tools.rings.rings import ring_one, ring_two
from tools.rings.sessions import BUILD, INTERRUPTED, ROOT, run
from tools.rings.summary import left_out, stale_parts

RESULTS = BUILD / "suite.jsonl"
PAGE = ROOT / "docs" / "suite.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.rings", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("test", "ring one: all tests that are not slow"), ("all", "all tests, or a part of them")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--seed", type=int, help="of the order; without it a random one")
    command.add_argument("--part", metavar="K/10", help="a tenth of the files, such as 3/10")
    commands.add_parser("record", help="carry new results into docs/suite.md")
    options = parser.parse_args()
    if options.command == "record":
        PAGE.write_text(recorded(PAGE.read_text(), read(RESULTS)))
        return 0
    if options.command == "all" and options.part not in (None, *NAMES):
        print(f"PART is {options.part!r}; write {NAMES[0]} to {NAMES[-1]}: make test-all PART=3/10", file=sys.stderr)
        return 2
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    try:
        if options.command == "all":
            part = f" PART={options.part}" if options.part else ""
            status, lines, _ = execute(
                partial(run, ring_two(seed, options.part)), seed, f"make test-all{part}", RESULTS
            )
        else:
            status, lines, outcomes = execute(partial(run, ring_one(seed)), seed, "make test", RESULTS, by_part=False)
            last = last_parts(PAGE.read_text(), read(RESULTS))
            lines += [left_out(outcomes), stale_parts(ROOT, last)]
    except KeyboardInterrupt:
        print(f"interrupted, no result is kept; order: seed {seed}", file=sys.stderr)
        return INTERRUPTED
    print("\n" + "\n".join(lines), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
