"""A seed draws the same token in fast mode, whatever else is in the batch."""

from __future__ import annotations

import json

import pytest

from tests.warm.sglang import run_with_sglang

WITHOUT = pytest.mark.slow("shows that SGLang's own draws differ, so that the test sees a difference")


@pytest.mark.parametrize(("hook", "same"), [("with", True), pytest.param("without", False, marks=WITHOUT)])
def test_a_seed_draws_one_token_in_any_batch_where_the_plugin_carries_it(hook: str, same: bool) -> None:
    done = run_with_sglang("-m", "tests.unit.adapters.sampled_seeds", hook)
    assert done.returncode == 0, done.stderr[-3000:]
    one, other, differ = json.loads(done.stdout.splitlines()[-1])
    assert differ == 0, "tokens are SGLang's"
    assert (one == other) is same
    assert len(set(one.values())) > len(one) // 2, "each seed draws its own"
