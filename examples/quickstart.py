"""Quickstart as a script with its own reward: run `python examples/quickstart.py` after `make quickstart`."""

import sys

import slimx


def reward(ctx: slimx.RewardContext, trajectory: slimx.Trajectory) -> bool:
    """Returns True for the correct sum."""
    return ctx.text.strip() == ctx.prompt.answer


if __name__ == "__main__":  # processes of environments and rewards import this file, too
    slimx.train("configs/moe/quickstart.yaml", ["run.dir=runs/script", *sys.argv[1:]], reward=reward)
