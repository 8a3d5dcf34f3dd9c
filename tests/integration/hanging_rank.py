"""One of two gloo ranks of test_rank_processes: one waits in a collective for the other, which never comes.

python -m tests.integration.hanging_rank JOB.json RANK
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import timedelta
from pathlib import Path


def waits_in_a_collective() -> None:
    import torch.distributed as dist

    dist.barrier()


def never_comes() -> None:
    signal.pause()


def main() -> None:
    import torch.distributed as dist

    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    where = job["init_method"]
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    print(f"rank {rank} is in", flush=True)
    if job["fails"] == rank:
        raise RuntimeError(f"rank {rank} fails on purpose")
    # Who fails not waits too: a rank that left would take the store from one that has not quite joined.
    never_comes() if rank or job["fails"] is not None else waits_in_a_collective()


if __name__ == "__main__":
    main()
