"""Mistakes with hooks and environments."""

from __future__ import annotations

from tools.docs.wrong_inputs.mistake import Mistake, hooks

REWARD = """\
async def rises(ctx, trajectory):
    return float(ctx.text == ctx.prompt.answer)
"""
WALK = """\
class Config:
    action_lookup = {1: "Back", 2: "Ahead"}

class Walk:
    def __init__(self, config):
        self.config = config

    def reset(self, seed=None):
        return "Which way?"
"""
HOOKS = (
    Mistake("a misspelt function", "train run.yaml reward.function=hooks.rasies", hooks(REWARD)),
    Mistake("a misspelt module", "train run.yaml reward.function=hoooks.rises", hooks(REWARD)),
    Mistake("a path instead of a module", "train run.yaml reward.function=hooks.py", hooks(REWARD)),
    Mistake("a path and a function", "train run.yaml reward.function=hooks.py:rises", hooks(REWARD)),
    Mistake("a folder and a function", "train run.yaml reward.function=./hooks.rises", hooks(REWARD)),
    Mistake("the file of a run that a script started", "train run.yaml reward.function=__main__.reward"),
    Mistake("a reward that is not one of TRL", "train run.yaml reward.function=trl:hooks.rises", hooks(REWARD)),
    Mistake("a filter of TRL", "train run.yaml rollout.filter=trl:hooks.rises", hooks(REWARD)),
    Mistake("a function without its module", "train run.yaml reward.function=rises", hooks(REWARD)),
    Mistake("a misspelt reward of slimx", "train run.yaml reward.function=maths"),
    Mistake("no function, only its module", "train run.yaml reward.function=slimx.extras.rewards.math"),
    Mistake("a builtin as a reward", "train run.yaml reward.function=builtins.max"),
    Mistake(
        "a reward of TRL without its prefix",
        "train run.yaml reward.function=hooks.rises",
        hooks("def rises(prompts, completions, **kwargs):", "    return [1.0]"),
    ),
    Mistake(
        "a reward of other arguments",
        "train run.yaml reward.function=hooks.rises",
        hooks("async def rises(prompt, response, answer):", "    return 1.0"),
    ),
    Mistake(
        "a reward with a syntax error",
        "train run.yaml reward.function=hooks.rises",
        hooks("async def rises(ctx, trajectory)", "    return 1.0"),
    ),
    Mistake(
        "a reward that imports what is not installed",
        "train run.yaml reward.function=hooks.rises",
        hooks("import sympyy", "", "async def rises(ctx, trajectory):", "    return 1.0"),
    ),
    Mistake(
        "an option that the reward does not have",
        "train run.yaml reward.function=math 'reward.options={tolerence: 0.1}'",
    ),
    Mistake(
        "an option that a reward of one's own does not have",
        "train run.yaml reward.function=hooks.rises 'reward.options={weigth: 2}'",
        hooks("async def rises(ctx, trajectory, weight=1.0, floor=0.0):", "    return weight"),
    ),
    Mistake(
        "a reward that raises",
        "doctor --hooks run.yaml reward.function=hooks.rises",
        hooks("async def rises(ctx, trajectory):", "    return {'7': 1.0}[ctx.text + '!']"),
    ),
    Mistake(
        "a reward that returns a word",
        "doctor --hooks run.yaml reward.function=hooks.rises",
        hooks("async def rises(ctx, trajectory):", "    return 'right'"),
    ),
    Mistake(
        "a reward that returns nothing",
        "doctor --hooks run.yaml reward.function=hooks.rises",
        hooks("async def rises(ctx, trajectory):", "    ctx.text.strip()"),
    ),
    Mistake(
        "a generate hook that returns a text",
        "doctor --hooks run.yaml rollout.generate=hooks.answer",
        hooks("async def answer(ctx, prompt):", "    return 'seven'"),
    ),
    *(
        Mistake(
            name,
            "train run.yaml reward.function=multi_turn rollout.generate=multi_turn "
            f"'rollout.options={{environment: {environment}, environment_options: {{{options}}}}}'",
            {"walks.py": WALK} if "walks" in options else {},
        )
        for name, environment, options in (
            ("RAGEN's environment without RAGEN", "gymnasium", "make: ragen.env.sokoban.env.SokobanEnv"),
            (
                "a configuration of another name",
                "gymnasium",
                "make: walks.Walk, make_options: {config: {make: walks.WalkConfig}}",
            ),
            (
                "a configuration without an option",
                "gymnasium",
                "make: walks.Walk, make_options: {config: {make: walks.Config, size: 6}}",
            ),
            (
                "names of actions that are elsewhere",
                "gymnasium",
                "make: walks.Walk, make_options: {config: {make: walks.Config}}, text_options: {actions: names}",
            ),
            (
                "nothing between two actions",
                "gymnasium",
                'make: walks.Walk, make_options: {config: {make: walks.Config}}, text_options: {separator: ""}',
            ),
            ("an address of NeMo Gym without http", "nemo_gym", "url: localhost:8000"),
            ("an environment of NeMo Gym without its address", "nemo_gym", ""),
        )
    ),
)
