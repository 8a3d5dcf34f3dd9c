"""Runs hooks that were written for slime without changing them: `rollout.generate: slime:package.module.function`.

slime (github.com/THUDM/slime, read at 624b824, August 2026) has its own signatures of hooks:
`generate(args, sample, sampling_params)`, `custom_rm(args, sample)`, filters `(args, samples)`. Its published examples
import `slime.*`, send HTTP requests to the router and fill a `Sample`. slimx provides these modules, sends the requests
to the run's router through its own client, and checks a sample against the responses when it is converted to a
Trajectory.

sample.py     the Sample that hooks fill
arguments.py  the attributes of `args`
call.py       a call of a hook, and its requests
convert.py    Sample <-> Trajectory
served.py     functions of slime's modules: post, GenerateState, load_function, ...
grading.py    slime.rollout.rm_hub
modules.py    the modules by name, and their import
hooks.py      the three kinds of hooks
"""
