"""Keys have one name each; older and longer names are translated, and a key that is given twice is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slimx.config import load_config
from slimx.config.names import ALIASES, RENAMED, REPLACED
from slimx.config.schema import Config
from tests.refusals import refused

BASE = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}


def file_with(directory: Path, **sections: Any) -> Path:
    values = {name: BASE.get(name, {}) | sections.get(name, {}) for name in {*BASE, *sections}}
    (directory / "run.yaml").write_text(yaml.safe_dump(values))
    return directory / "run.yaml"


@pytest.mark.parametrize("table", [RENAMED, ALIASES], ids=["renamed", "aliases"])
def test_every_other_name_stands_for_a_key_of_the_schema_and_is_none_itself(table: dict[str, str]) -> None:
    schema = Config.model_json_schema()
    for old, name in table.items():
        *path, last = old.split(".")
        part: Any = schema
        for step in path:
            inner = part["items"] if step == "*" else part["properties"][step]
            (reference,) = [each["$ref"] for each in [inner, *inner.get("anyOf", [])] if "$ref" in each] or [None]
            part = inner if reference is None else schema["$defs"][reference.rpartition("/")[2]]
        assert name in part["properties"] and last not in part["properties"], old


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("rollout.keep=my.keep", lambda config: config.rollout.filter == "my.keep"),
        ("trainer.moe.replay=R2", lambda config: config.trainer.moe.routing_replay == "R2"),
        ("trainer.optimizer.offload=0.5", lambda config: config.trainer.optimizer.offload_fraction == 0.5),
        ("cluster.affinity=none", lambda config: config.cluster.cpu_affinity == "none"),
        ("publish.step_deadline=7", lambda config: config.publish.engine_deadline == 7),
    ],
)
def test_a_key_of_the_version_before_is_taken_with_a_notice_of_its_name(tmp_path, override, read) -> None:
    old = override.partition("=")[0]
    with pytest.warns(FutureWarning) as told:
        config = load_config(file_with(tmp_path), [override])
    new = f"{old.rpartition('.')[0]}.{RENAMED[old]}"
    assert read(config) and len(told) == 1 and old in str(told[0].message) and new in str(told[0].message)


@pytest.mark.parametrize("old", REPLACED["publish.transport"])
def test_a_value_of_the_version_before_is_taken_with_a_notice_of_what_took_its_place(tmp_path: Path, old: str) -> None:
    file = file_with(tmp_path, publish={"transport": old})
    for overrides in ([], [f"publish.transport={old}"]):
        with pytest.warns(FutureWarning) as told:
            config = load_config(file, overrides)
        assert config.publish.transport == "nixl" and all(old in str(one.message) for one in told)
    with refused("config.value", about="publish.transport"):
        load_config(file, ["publish.transport=[gloo]"])


@pytest.mark.filterwarnings("error")
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
