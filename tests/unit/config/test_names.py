"""Keys have one name each; longer names are translated, and a key that is given twice is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slimx.config.foreign_names import ALIASES
from slimx.config.load import load_config
from slimx.config.schema import Config
from tests.refusals import refused

BASE = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}


def file_with(directory: Path, **sections: Any) -> Path:
    values = {name: BASE.get(name, {}) | sections.get(name, {}) for name in {*BASE, *sections}}
    (directory / "run.yaml").write_text(yaml.safe_dump(values))
    return directory / "run.yaml"


def test_every_alias_stands_for_a_key_and_is_not_one() -> None:
    schema = Config.model_json_schema()
    for old, name in ALIASES.items():
        *path, last = old.split(".")
        part: Any = schema
        for step in path:
            inner = part["items"] if step == "*" else part["properties"][step]
            (reference,) = [x["$ref"] for x in [inner, *inner.get("anyOf", [])] if "$ref" in x] or [None]
            part = inner if reference is None else schema["$defs"][reference.rpartition("/")[2]]
        assert name in part["properties"] and last not in part["properties"], old


def test_longer_names_of_parallel_sizes_are_the_sizes(tmp_path: Path) -> None:
    trainer = {"world_size": 8, "tensor_parallel_size": 2, "expert_parallel_size": 4}
    engines = [{"tensor_parallel_size": 4, "expert_parallel_size": 2}]
    file = file_with(tmp_path, trainer=trainer, rollout={"prompts": "p", "engines": engines})
    config = load_config(file, ["trainer.context_parallel_size=2", "trainer.tensor=1"])
    assert (config.trainer.tensor, config.trainer.expert, config.trainer.context) == (1, 4, 2)
    assert (config.rollout.engines[0].tensor, config.rollout.engines[0].expert) == (4, 2)
    assert "parallel_size" not in config.to_text()


def test_a_key_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    file = file_with(tmp_path, trainer={"tensor": 1, "tensor_parallel_size": 1})
    with refused("config.two_names", about="trainer.tensor_parallel_size"):
        load_config(file)
