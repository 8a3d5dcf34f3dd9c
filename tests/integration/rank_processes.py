"""Starts the ranks of a test as processes and waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.conftest import ROOT


def run_ranks(module: str, out: Path, world: int, seconds: float = 120) -> None:
    """Run `python -m module OUT/job.json RANK` for every rank; when one fails or all are late, the others are ended and
    its words are told."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", module, str(out / "job.json")]
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(world):
            with (out / f"{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [*command, str(rank)], stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
                    )
                )
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in ranks):
            failed = [rank for rank, process in enumerate(ranks) if process.poll()]
            if failed or time.monotonic() > end:
                rank = failed[0] if failed else 0
                what = f"ended with {ranks[rank].poll()}" if failed else f"has not ended after {seconds} s"
                raise AssertionError(f"rank {rank} {what}:\n{(out / f'{rank}.log').read_text()[-3000:]}")
            time.sleep(0.05)
        codes = [process.returncode for process in ranks]
        assert codes == [0] * world, f"{codes}\n{(out / f'{codes.index(max(codes))}.log').read_text()[-3000:]}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
