"""Numbers that JSON writes as 3.0 are read as whole ones where these are expected; 3.5 is refused and never cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimx.data.integers import as_ids
from slimx.data.prompts.read import read_prompts
from slimx.extras.agents.proxy.apis.openai_chat import CHAT
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.boxes.choice import BoxOptions
from slimx.extras.boxes.programs.watch import Limits
from slimx.rollout.client.request import compact
from slimx.rollout.draft import Draft
from tests.refusals import refused


def draft_of(ids: Any) -> Draft:
    draft = Draft(ids, id="d", rollout_id="r", group_id="g", index=0, seed=1, sampling={})
    draft.add_inserted(ids)
    assert draft.token_ids[: len(ids)] == draft.token_ids[len(ids) :]
    return draft


READERS = (as_ids, lambda ids: list(compact(ids)), lambda ids: draft_of(ids).token_ids[: len(ids)])


@pytest.mark.parametrize("read", READERS)
def test_token_ids_may_be_any_whole_numbers_and_nothing_else(read: Any) -> None:
    for ids in ([1, 2, 3], [1.0, 2, 3.0], np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0]), (1, np.int64(2), 3)):
        assert read(ids) == [1, 2, 3]
    for ids in ("hello", b"123", [1, 2.5], ["1"], [None], np.array([0.5])):
        with refused("tokens.ids", about="token_ids"):
            read(ids)


def test_token_ids_of_prompts_may_be_floats_that_are_whole(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"token_ids": [1.0, 2]}) + "\n")
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert json.dumps(prompt.token_ids) == "[1, 2]"


def test_limits_are_whole_numbers() -> None:
    options = {"memory_mib": 256.0, "processes": 4.0, "disk_mib": 8.0, "output_kib": 2.0, "image_mib": 64.0}
    read = BoxOptions.read(options, "key")
    written = [read.limits.memory_mib, read.limits.processes, read.limits.disk_mib, read.limits.output_kib]
    assert json.dumps([*written, read.image_mib]) == "[256, 4, 8, 2, 64]"
    assert Limits(seconds=2.5).seconds == 2.5
    with refused("sandbox.limit", about="memory_mib"):
        Limits(memory_mib=256.5)


def test_an_agent_may_write_the_most_tokens_with_a_point() -> None:
    body = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 16.0}
    assert json.dumps(CHAT.read(body, {}, strict=False).max_tokens) == "16"
    with pytest.raises(ApiError):
        CHAT.read(body | {"max_tokens": 16.5}, {}, strict=False)
