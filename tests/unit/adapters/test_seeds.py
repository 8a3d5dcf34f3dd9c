"""A seed draws the same token in fast mode, whatever else is in the batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("hook", "same"), [("with", True), ("without", False)])
def test_a_seed_draws_one_token_in_any_batch_where_the_plugin_carries_it(hook: str, same: bool) -> None:
    command = [sys.executable, "-m", "tests.unit.adapters.sampled_seeds", hook]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = json.loads(done.stdout.splitlines()[-1])
    assert (one == other) is same
    assert len(set(one.values())) > len(one) // 2, "each seed draws its own"
