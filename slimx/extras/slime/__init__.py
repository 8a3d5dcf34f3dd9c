"""Hooks written for slime, run as they are: `rollout.generate: slime:package.module.function`.

slime (github.com/THUDM/slime, read at 624b824, August 2026) has hooks of its own form: `generate(args, sample,
sampling_params)`, `custom_rm(args, sample)`, filters `(args, samples)`. Its published examples import `slime.*`, ask
the router by HTTP and fill a `Sample`. Here these modules are ours, a request goes to the run's router through slimx's
own client, and what came back is what a sample is checked against when it becomes a Trajectory.

sample.py     the Sample that hooks fill
arguments.py  what `args` hold
scene.py      one rollout while a hook runs, and its requests
convert.py    Sample <-> Trajectory
served.py     what the modules hold: post, GenerateState, load_function, ...
grading.py    slime.rollout.rm_hub
modules.py    the modules by name, and how they are imported
hooks.py      the three hooks
"""
