"""Dealing of large publications over links: its balance, and its cost on the driver.

    python benchmarks/publish_dealing.py

Each case is compiled and dealt in a process of its own: processor seconds and peak memory are of both together. Neither
weights nor a network are needed. "Busiest / average" is of the links that send and of those that receive; "compiled" is
the same with the senders that `compile_plan` chose for one engine, which all engines would take.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # slimx need not be installed

from publish_clusters import CASES, DEEPSEEK_V3, Case  # noqa: E402
from quantities import positive

from slimx.extras.direct.dealing import deal  # noqa: E402
from slimx.extras.direct.wire import wire_bytes  # noqa: E402
from slimx.extras.families import deepseek_v3  # noqa: E402
from slimx.layout.ranks import EngineSizes, Sizes  # noqa: E402

DEEPSEEK = (
    Case(
        "DeepSeek-V3 bf16, 128 trainer GPUs (4 stages) to 1 engine of 64 (TP 64, EP 64, 8 attention copies)",
        deepseek_v3,
        DEEPSEEK_V3,
        Sizes(tensor=8, pipeline=4, data=4, expert=32, split=(15, 15, 15, 16)),
        EngineSizes(tensor=64, expert=64, attention_data=8),
        1,
    ),
    Case(
        "DeepSeek-V3 fp8, 128 trainer GPUs to 8 engines of 8 (TP 8, EP 8)",
        deepseek_v3,
        DEEPSEEK_V3,
        Sizes(tensor=8, data=16, expert=32),
        EngineSizes(tensor=8, expert=8),
        8,
        fp8=True,
    ),
)
ALL = (*DEEPSEEK, *CASES)


@dataclass(frozen=True)
class Figures:
    compiled: float
    """Busiest over average of the sending links, before balancing."""
    sent: float
    received: float
    gigabytes: float
    """Bytes of the busiest link, in GB."""
    moves: int
    seconds: float
    megabytes: float


def figures_of(number: int) -> Figures:
    case = ALL[number]
    began = time.process_time()
    plan = case.plan()
    dealt = deal(plan, engines=case.engines)
    seconds = time.process_time() - began
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    before, sent = (wire_bytes(dealing).sent(case.trainer.world) for dealing in (plan, dealt))
    received = wire_bytes(dealt).received(dealt.targets)
    uneven = (float(nbytes.max() / nbytes.mean()) for nbytes in (before, sent, received))
    busiest = int(max(sent.max(), received.max()))
    return Figures(*uneven, busiest / 1e9, len(dealt.moved), seconds, int(peak.split()[1]) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=positive, default=len(ALL), help="the first of them, and no more")
    cases = ALL[: parser.parse_args().cases]
    print("busiest / average:   compiled    sent  received  busiest GB     moves   CPU s      MB")
    context = multiprocessing.get_context("spawn")
    for number, case in enumerate(cases):
        with context.Pool(1) as pool:
            f = pool.apply(figures_of, (number,))
        print(
            f"{'':<19}{f.compiled:>10.4f}{f.sent:>8.4f}{f.received:>10.4f}{f.gigabytes:>12.2f}{f.moves:>10,}"
            f"{f.seconds:>8.1f}{f.megabytes:>8.0f}  {case.name}"
        )


if __name__ == "__main__":
    main()
