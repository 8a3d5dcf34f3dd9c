"""The verbs by which a driver reaches the receivers of a server's ranks."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from slimx import entry_points
from slimx.adapters.sglang import plugin as sglang_plugin
from slimx.adapters.sglang.weights.receiver import RankReceiver, load_staged, receiver_of
from slimx.engines.server.http_calls import RECEIVER
from tests.unit.adapters.engine_model import DEEPSEEK, ServerModel
from tests.unit.adapters.receiver_stand import SIZES


@pytest.fixture
def receiver() -> RankReceiver:
    return receiver_of(ServerModel(DEEPSEEK, SIZES, rank=1))


def test_engines_name_the_plugins_loader() -> None:
    module, _, function = RECEIVER.rpartition(".")
    assert (module, function) == (load_staged.__module__, load_staged.__name__)


@pytest.mark.parametrize("verb", ["status", "load", "_what_is_open", "nothing"])
def test_the_verbs_of_a_rank_are_the_public_methods_of_its_receiver(receiver, monkeypatch, verb) -> None:
    monkeypatch.setattr(sglang_plugin, "_coordinates", lambda: {"rank": 1})
    monkeypatch.setattr(sglang_plugin, "_expert_location", lambda: None)
    runner = SimpleNamespace(
        model=receiver.model,
        _weight_checker=SimpleNamespace(_parallelism_info=lambda role: SimpleNamespace(model_dump=dict)),
    )
    answer = sglang_plugin.check_weights(None, runner, f"slimx.{verb}", role="target")["checksums"]
    code = None if verb == "status" else "plugin.action"
    assert answer.get("code") == code and answer["pid"] == str(os.getpid())
    if verb == "status":
        assert json.loads(answer["slimx"]) == receiver.status()


def test_no_entry_point_replaces_a_verb_of_the_publication(receiver, monkeypatch) -> None:
    monkeypatch.setattr(sglang_plugin, "_coordinates", lambda: {"rank": 1})
    monkeypatch.setattr(sglang_plugin, "_expert_location", lambda: None)
    monkeypatch.setattr(entry_points, "find", lambda group: dict.fromkeys(("status", "other")))
    monkeypatch.setattr(entry_points, "load", lambda group, name: lambda runner: {"from": name})
    runner = SimpleNamespace(model=receiver.model)
    assert sglang_plugin._response(runner, "other", {}) == {"from": "other"}
    assert sglang_plugin._response(runner, "status", {}) == receiver.status()
