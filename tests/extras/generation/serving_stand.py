"""Engines without trainers, which scripted clients stand in for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from slimx.orchestration.engines.service import EngineService
from slimx.rollout.hooks import Keep
from tests.unit.orchestration.run_stand import Parts, service_of, sources_of
from tests.unit.rollout.rollout_stand import FakeEngine, config_of, prompts, the_tokenizer


def write_model(path: Path) -> Path:
    """Writes a tokenizer and a config.json, and returns `path`."""
    the_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    return path


def service_in(config: Config, delay: float = 0.0, keep: Keep | None = None) -> EngineService:
    """Returns engines that answer within `delay` seconds; one held-out set, `few`."""
    sources = sources_of(config, keep=keep, few=prompts()[:3])
    return service_of(config, sources, {"actor": Parts(client=FakeEngine(delay))})


def config_in(directory: Path, model: Path, **keys: Any) -> Config:
    config = config_of(track__tensorboard=False, **{"eval__prompts": {"few": "few.jsonl"}} | keys)
    run = config.run.model_copy(update={"dir": str(directory)})
    return config.model_copy(update={"run": run, "model": config.model.model_copy(update={"path": str(model)})})
