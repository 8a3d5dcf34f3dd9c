"""One rank of two writes a megabyte of a checkpoint: `python -m tests.unit.trainer.full_disk_rank DIRECTORY RANK`.

A process of its own, because the trainer's adapters change torch. Prints what the rank itself tells of a failure as
JSON, {"code", "about", "sentence"}, or null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slimx.trainer.worker import install_adapters

NBYTES = 2**20


def main(directory: Path, rank: int) -> None:
    install_adapters()
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner

    from slimx.trainer.checkpoint.save import Saver

    planner = DefaultSavePlanner()
    planner.set_up_planner({"weight": torch.zeros(NBYTES // 4)}, is_coordinator=True)
    plan = planner.create_local_plan()
    saver = Saver(rank=rank, world=2, group=None, deadline_s=60)
    saver._write(directory, plan, {item.index: planner.resolve_data(item) for item in plan.items}, b"")
    told = saver.failure
    print(json.dumps(told and {"code": told.code, "about": told.about, "sentence": str(told)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
