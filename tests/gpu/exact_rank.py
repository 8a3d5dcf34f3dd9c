"""One trainer in exact mode, on a GPU (NCCL) or on the CPU (gloo), without Ray: log-probs of rollouts in two packings.

    python -m tests.gpu.exact_rank DEVICE OUT DTYPE...

Of each dtype OUT/DTYPE.npz has the log-probs of every rollout, `narrow.ID` and `wide.ID`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.alone import alone


def run(dtype: str, out: Path, parallel: Any) -> None:
    from slimx.config.schema import Config
    from slimx.data.batch import make_rows
    from slimx.data.loss_weights import loss_weights
    from slimx.data.packing import pack
    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer
    from tests.gpu.trainer_cases import CASES, config, rollouts, write_model

    case = CASES["qwen"] | {"dtype": dtype}
    path = write_model(out / dtype, case["hf"], case["mtp"], seed=1)
    values = config(path, out, case).model_dump() | {"numerics": {"mode": "exact", "dtype": dtype}}
    trainer = PolicyTrainer(Config.model_validate(values), read_model(path), parallel)
    known = [trajectory for group in rollouts(0, None) for trajectory in group.trajectories]
    found = {}
    for name, limit, order in (("narrow", 60, known), ("wide", 200, known[::-1])):
        rows = make_rows(order, [0.0] * len(order), loss_weights(order, "token"))
        batches = pack(rows, data_size=1, max_tokens=limit).shards[0]
        for batch, logprobs in zip(batches, trainer.logprobs(batches), strict=True):
            parts = np.split(logprobs, np.cumsum(batch.lengths)[:-1])
            found |= {f"{name}.{order[row].id}": part for row, part in zip(batch.rows, parts, strict=False)}
    np.savez(out / f"{dtype}.npz", **found)


def main() -> None:
    kind, out, dtypes = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    with alone(kind, threads=1, exact=True) as parallel:
        for dtype in dtypes:
            run(dtype, out, parallel)


if __name__ == "__main__":
    main()
