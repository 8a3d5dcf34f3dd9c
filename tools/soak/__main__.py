"""Does a long run lose anything, or grow? Tiny steps, with processes killed at random, and a table at the end.

    python -m tools.soak --out DIR [--steps 10000] [--minutes 600] [--strike-every 200] [--seed 1]

It trains the quickstart's model on tiny batches, publishes after every step, saves, evaluates and exports, kills a
process of a random kind about every --strike-every steps, and starts the run again whenever that ends it, as a batch
system would. Meanwhile it measures every process: memory, file descriptors, threads, sockets, ports, shared memory. At
each end of the run, and at the last, it accounts for every prompt. Exit status 1: something grows beyond the bounds, or
is lost. A soak that was cut off, or whose --minutes are over, goes on where it is started again with the same --out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.soak.strikes import Strikes
from tools.soak.supervisor import Failed, Soak
from tools.soak.table import growths, page, problems
from tools.soak.task import write_task


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the run, its logs and the table")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=600, help="after which the run is asked to save and leave")
    parser.add_argument("--strike-every", type=int, default=200, help="steps between two strikes on average; 0: none")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--warm", type=int, default=1000, help="first steps of each process, in which heaps fill")
    parser.add_argument("--sample-seconds", type=float, default=10)
    parser.add_argument("--stall-seconds", type=float, default=900, help="without a step, after which the soak fails")
    parser.add_argument("--transport", default="auto", help="publish.transport")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    out = options.out.absolute()
    soak = Soak(
        write_task(out, options.steps, transport=options.transport, every=options.save_every),
        options.steps,
        Strikes(options.strike_every, options.seed, out / "strikes.jsonl"),
        seconds=60 * options.minutes,
        sample_s=options.sample_seconds,
        stall_s=options.stall_seconds,
    )
    wrong = []
    try:
        soak.go()
    except Failed as error:
        wrong.append(str(error))
    found = growths(soak.samples, warm=options.warm)
    wrong += problems(soak, found)
    text = "\n".join([page(soak, found), "", *(f"FAILED: {problem}" for problem in wrong[:100])])
    (out / "table.md").write_text(text + "\n")
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
