"""Makes the quickstart's task: sums of two numbers below 50, and imperfect demonstrations of them.

    python -m slimx.extras.quickstart.make_task --out DIR --seed 1

DIR gets five JSONL files of prompts:

- train.jsonl: 2,300 of the 2,500 pairs (a, b) with 0 <= a, b < 50, as the prompt `07+45=` with the sum as answer,
  numbers written with at least two digits (a fixed place for each digit is what a tiny model learns quickly);
- heldout.jsonl: the other 200 pairs;
- demonstrations.jsonl: 51,200 responses to training pairs drawn with replacement (22 per pair on average). 30% are
  right; 70% are off by ten: sum + 10;
- pairs.jsonl, heldout-pairs.jsonl: of each training pair, and of each held-out one, the right sum as the chosen answer
  and another number of as many digits as the rejected one: half of them off by ten, half drawn from all.

A model that imitates them well is right three times in ten when it samples and hardly ever when it decodes greedily,
since the error is likelier than the right answer. (Errors on both sides would leave the right answer in the middle, and
a model that blurs its neighbours would already decode it greedily.) It has learned all that reinforcement learning
needs to be right every time: the last digit is never wrong.

Ids: `add-A-B` for prompts, `demo-00000` and up for demonstrations.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OPERANDS = 50
HELD_OUT = 200
DEMONSTRATIONS = 51_200
RIGHT_SHARE = 0.3
PREFERENCES = 4
"""Lines of pairs.jsonl per training pair."""

Pair = tuple[int, int]


def make_task(out: str | Path, seed: int = 1) -> None:
    """Writes the task's files into the directory `out`, and creates the directory if needed. The same seed gives the
    same bytes."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    pairs = _shuffled(rng, [(a, b) for a in range(OPERANDS) for b in range(OPERANDS)])
    train, heldout = sorted(pairs[HELD_OUT:]), sorted(pairs[:HELD_OUT])
    _write(out / "train.jsonl", (_line(f"add-{a}-{b}", (a, b), a + b) for a, b in train))
    _write(out / "heldout.jsonl", (_line(f"add-{a}-{b}", (a, b), a + b) for a, b in heldout))
    right = int(DEMONSTRATIONS * RIGHT_SHARE)
    labels = _shuffled(rng, [True] * right + [False] * (DEMONSTRATIONS - right))
    demonstrations = []
    for number, is_right in enumerate(labels):
        pair = train[int(rng.random() * len(train))]
        response = sum(pair) if is_right else sum(pair) + 10
        demonstrations.append(_line(f"demo-{number:05d}", pair, response))
    _write(out / "demonstrations.jsonl", demonstrations)
    _write(out / "pairs.jsonl", (_preference(rng, pair) for pair in train for _ in range(PREFERENCES)))
    _write(out / "heldout-pairs.jsonl", (_preference(rng, pair) for pair in heldout))


def _shuffled(rng: random.Random, items: list[Any]) -> list[Any]:
    # Python promises the same `random()` for a seed in every release, but not the same `shuffle()`.
    return sorted(items, key=lambda _: rng.random())


def _line(identity: str, pair: Pair, response: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{pair[0]:02d}+{pair[1]:02d}="}]
    return {"id": identity, "messages": messages, "answer": f"{response:02d}", "metadata": {}}


def _preference(rng: random.Random, pair: Pair) -> dict[str, Any]:
    """Returns a line whose answer is the right sum, with another two-digit number as the rejected answer."""
    total = sum(pair)
    near = [total - 10, total + 10]
    wrong = near[int(rng.random() * 2)] if rng.random() < 0.5 else int(rng.random() * 2 * OPERANDS)
    if wrong == total or not 0 <= wrong < 2 * OPERANDS:
        wrong = total - 10 if total >= 10 else total + 10
    number = int(rng.random() * 10**6)
    line = _line(f"pair-{pair[0]}-{pair[1]}-{number:06d}", pair, total)
    return line | {"metadata": {"rejected": f"{wrong:02d}"}}


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="make the quickstart's task")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of the split and of the demonstrations")
    arguments = parser.parse_args()
    make_task(arguments.out, arguments.seed)
    print(
        f"{arguments.out}: train.jsonl, heldout.jsonl ({HELD_OUT}), demonstrations.jsonl ({DEMONSTRATIONS}), "
        "pairs.jsonl, heldout-pairs.jsonl"
    )


if __name__ == "__main__":
    main()
