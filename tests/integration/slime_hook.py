"""A generate hook of slime's form for whole runs; it writes down what it gave. Loaded as `slime:...` only."""

import asyncio
import json
from pathlib import Path

from examples.slime_style import calculate


async def noted(args, sample, sampling_params):
    """Two turns with a tool between them, whose first token is not trained: a mask that only the hook can know. The
    rollout `args.stuck` does not come to its end."""
    sample = await calculate(args, sample, sampling_params)
    if sample.session_id == args.stuck:
        await asyncio.sleep(3600)
    sample.loss_mask[0] = 0
    record = {"id": sample.session_id, "tokens": sample.tokens, "mask": sample.loss_mask, "calls": sample.tool_calls}
    with Path(args.record).open("a") as file:
        file.write(json.dumps(record) + "\n")
    return sample
