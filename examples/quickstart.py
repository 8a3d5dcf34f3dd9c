"""The quickstart as a script, with a reward of its own: `python examples/quickstart.py` after `make quickstart`."""

import sys

import slimx


async def reward(ctx: slimx.RewardContext, trajectory: slimx.Trajectory) -> float:
    """1 for the right sum, 0 for another."""
    return float(ctx.text.strip() == ctx.prompt.answer)


if __name__ == "__main__":  # processes of environments and rewards import this file, too
    slimx.train(slimx.load_config("configs/moe/quickstart.yaml", ["run.dir=runs/script", *sys.argv[1:]]), reward=reward)
