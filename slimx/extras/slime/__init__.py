"""Hooks written for slime, run as they are: `rollout.generate: slime:package.module.function`.

slime (github.com/THUDM/slime, read at 624b824, August 2026) has its own form of hooks: `generate(args, sample,
sampling_params)`, `custom_rm(args, sample)`, filters `(args, samples)`. Its published examples import `slime.*`, call
the router by HTTP and fill a `Sample`. Here slimx provides these modules, a request goes to the run's router through
slimx's client, and a sample is checked against the responses when it becomes a Trajectory.

sample.py     the Sample that hooks fill
arguments.py  the contents of `args`
call.py       the call of a hook, and its requests
convert.py    Sample <-> Trajectory
served.py     the contents of the modules: post, GenerateState, load_function, ...
grading.py    slime.rollout.rm_hub
modules.py    the modules by name, and how they are imported
hooks.py      the three hooks
"""
