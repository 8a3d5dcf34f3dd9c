"""Quickstart as a script with its own reward: run `python examples/quickstart.py` after `make quickstart`."""

import sys

import slimx


async def reward(ctx: slimx.RewardContext, trajectory: slimx.Trajectory) -> float:
    """Returns 1 for the correct sum, else 0."""
    return float(ctx.text.strip() == ctx.prompt.answer)


if __name__ == "__main__":  # processes of environments and rewards import this file, too
    slimx.train(slimx.load_config("configs/moe/quickstart.yaml", ["run.dir=runs/script", *sys.argv[1:]]), reward=reward)
