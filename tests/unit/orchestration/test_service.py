"""The service of engines: made in two halves, because trainers may have to say where; ended in the reverse order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.engines.outage import Outage
from slimx.engines.server.keys import Keys
from slimx.errors import SlimxError
from slimx.orchestration.engines import service as module
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.start.prepare import ServedPolicy, Sources
from slimx.rollout import single_turn
from slimx.rollout.hook_loading import Hooks
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of, one, the_tokenizer


class Parts:
    """Stands for servers: every group notes what is done to it, and one may fail to stop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stubborn: str = ""):
        self.done: list[str] = []
        self.stubborn = stubborn
        self.shared: list[Sequence[str]] = []
        monkeypatch.setattr(module, "EngineGroup", self.policy)
        monkeypatch.setattr(module, "FrozenEngines", self.frozen)
        monkeypatch.setattr(module, "note_restarts", lambda groups, note: self.done.append("restarts noted"))

    def policy(self, *_: Any, shared: Sequence[str], **__: Any) -> SimpleNamespace:
        self.shared.append(shared)
        keeper = SimpleNamespace(up=True, restarts=SimpleNamespace(history=[]))
        members = SimpleNamespace(outage=Outage(), look=None, keeper=keeper)
        router = SimpleNamespace(url="http://127.0.0.1:9", process=SimpleNamespace(name="router"))
        return SimpleNamespace(
            members=members, router=router, keys=Keys.random(), engines=[], frozen=False, stop=self.stopping("engines")
        )

    def frozen(self, *_: Any, **__: Any) -> SimpleNamespace:
        async def check(tokenizer: Any) -> None:
            self.done.append("frozen engines checked")

        return SimpleNamespace(
            groups={}, clients={}, check=check, scorer=lambda: None, stop=self.stopping("frozen engines")
        )

    def stopping(self, name: str) -> Any:
        async def stop() -> None:
            self.done.append(f"{name} stopped")
            if name == self.stubborn:
                raise SlimxError(f"{name} do not stop", code="engines.stop", about=name)

        return stop


def service_in(directory: Path, notes: list[str], config: Config | None = None) -> EngineService:
    config, spec = config or config_of(), SimpleNamespace(experts=0, vocab_size=10)
    actor = ServedPolicy(config=config, spec=spec, tokenizer=the_tokenizer())
    hooks = Hooks(single_turn.generate, one, None)
    sources = Sources(policies={"actor": actor}, hooks=hooks, by_source={}, eval_prompts={})
    return EngineService(config, sources, directory, note=notes.append)


@pytest.fixture(autouse=True)
def _shape(monkeypatch):
    monkeypatch.setattr(
        module, "ModelShape", SimpleNamespace(of=lambda spec: SimpleNamespace(vocab_size=10, experts=0))
    )


async def test_parts_end_in_reverse_order_and_engines_take_their_places(tmp_path, monkeypatch):
    parts = Parts(monkeypatch)
    async with service_in(tmp_path, []) as service:
        engines = service.place(["gpu 0"])["actor"]
        await service.open(context=100)
        assert json.loads((tmp_path / "engines.json").read_text())["routers"][0]["name"] == "router"
        maker = service.make_maker()
        assert maker.policies["actor"].client is service.clients["actor"]
        engines.members.outage.begin()
        stood = maker.outage.time()
        await asyncio.sleep(0.05)
        assert maker.outage.time() == pytest.approx(stood, abs=0.01)
        assert engines.members.probe is not None
        maker.close()
    assert parts.shared == [["gpu 0"]]
    assert parts.done == ["frozen engines checked", "restarts noted", "engines stopped", "frozen engines stopped"]


async def test_an_evaluation_is_cancelled_while_clients_are_open(tmp_path, monkeypatch):
    Parts(monkeypatch)
    opened = []
    async with service_in(tmp_path, []) as service:
        service.place()

        async def cancel() -> None:
            opened.append(service.clients["actor"]._session is not None)

        monkeypatch.setattr(service.evaluation_engines, "cancel", cancel)
        await service.open(context=100)
    assert opened == [True]


async def test_a_part_that_does_not_stop_is_reported_and_hides_no_error(tmp_path, monkeypatch):
    parts, notes = Parts(monkeypatch, stubborn="engines"), []
    with refused("loop", about="step 3"):
        async with service_in(tmp_path, notes) as service:
            service.place()
            raise SlimxError("step 3 failed", code="loop", about="step 3")
    assert parts.done == ["engines stopped", "frozen engines stopped"] and len(notes) == 1
    with refused("engines.stop", about="engines"):
        async with service_in(tmp_path, notes) as service:
            service.place()
    assert parts.done[2:] == ["engines stopped", "frozen engines stopped"]


async def test_without_engines_of_the_policy_there_is_a_maker_without_a_client(tmp_path, monkeypatch):
    Parts(monkeypatch)
    config = config_of()
    replayed = config.model_copy(update={"rollout": config.rollout.model_copy(update={"replay": "run"})})
    async with service_in(tmp_path, [], replayed) as service:
        assert service.place() == {}
        await service.open(context=100)
        maker = service.make_maker()
        assert maker.policies["actor"].client is None and maker.proxy is service.proxy
        maker.close()
