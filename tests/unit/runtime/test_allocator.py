"""The allocator's option that trainers need and engines die of: who gets it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slimx.runtime.allocator import VARIABLES, drop_expandable_segments, set_expandable_segments, set_pinned_sizes

NEW, OLD = VARIABLES
ROUNDED = "roundup_power2_divisions:[256:1,512:2],max_split_size_mb:64"


@pytest.mark.parametrize(
    ("variables", "trainer", "engine"),
    [
        ({}, {NEW: "expandable_segments:True"}, {}),
        ({OLD: "expandable_segments:True"}, {OLD: "expandable_segments:True"}, {}),
        ({NEW: "expandable_segments:False"}, {NEW: "expandable_segments:False"}, {}),
        ({NEW: ROUNDED}, {NEW: f"{ROUNDED},expandable_segments:True"}, {NEW: ROUNDED}),
        (
            {OLD: f"expandable_segments : True, {ROUNDED}"},
            {OLD: f"expandable_segments : True, {ROUNDED}"},
            {OLD: f" {ROUNDED}"},
        ),
        (
            {OLD: "max_split_size_mb:64,expandable_segments:True,garbage_collection_threshold:0.8", NEW: ""},
            {OLD: "max_split_size_mb:64,expandable_segments:True,garbage_collection_threshold:0.8", NEW: ""},
            {OLD: "max_split_size_mb:64,garbage_collection_threshold:0.8"},
        ),
    ],
)
def test_trainers_get_the_option_and_engines_lose_it(variables, trainer, engine):
    for function, expected in ((set_expandable_segments, trainer), (drop_expandable_segments, engine)):
        environment = {"PATH": "/bin", **variables}
        function(environment)
        assert environment == {"PATH": "/bin", **expected}


@pytest.mark.parametrize(
    ("release", "variables", "expected"),
    [
        ("2.14.1+cu130", {}, {NEW: "pinned_max_round_threshold_mb:1"}),
        ("3.0.0", {OLD: ROUNDED}, {OLD: f"{ROUNDED},pinned_max_round_threshold_mb:1"}),
        ("2.14.0", {NEW: "pinned_max_round_threshold_mb:64"}, {NEW: "pinned_max_round_threshold_mb:64"}),
        ("2.11.0+cu130", {}, {}),
    ],
)
def test_pinned_memory_is_not_rounded_up_if_torch_supports_it(release, variables, expected):
    environment = dict(variables)
    set_pinned_sizes(environment, release)
    assert environment == expected


def test_the_installed_torch_takes_the_options_and_refuses_unknown_ones():
    environment: dict[str, str] = {}
    set_expandable_segments(environment)
    set_pinned_sizes(environment)
    (options,) = environment.values()
    program = """
import sys, torch
for options in sys.argv[1:]:
    torch._C._accelerator_setAllocatorSettings(options)
    print("taken")
"""
    command = [sys.executable, "-c", program, options, f"{options}0,no:1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("taken\n", 1)


def test_the_processes_of_both_sides_do_so_before_torch_is_there():
    """In processes of their own, since both change their environment."""
    program = (
        "import os, sys\n"
        "from slimx.trainer.process import prepare_process\n"
        "from slimx.engines.server.launch import prepare\n"
        "for kind in ('cpu', 'cuda'):\n"
        "    prepare_process(kind, shares_layers=False, local=False, waiting=True)\n"
        f"    print(os.environ.get({NEW!r}))\n"
        "prepare(['--device', 'cuda'])\n"
        f"print(os.environ.get({NEW!r}), 'torch' in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["None", "expandable_segments:True", "None", "False"]
