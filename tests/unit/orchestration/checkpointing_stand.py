"""Checkpoints without trainers: stand-ins for ranks that write their files, and the states that go with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slimx.config.schema import Config
from slimx.layout.ranks import Sizes
from slimx.observability.tracking.phases import Timeline
from slimx.orchestration.state.checkpoints import Checkpointer
from slimx.orchestration.state.resume import layout_of
from slimx.orchestration.state.saves import RunState, Saves
from slimx.trainer.checkpoint import files
from slimx.trainer.checkpoint.files import FileRecord, Report

LAYOUT = Sizes(data=2)


def config(tmp_path: Path, **options: Any) -> Config:
    trainer = options.pop("trainer", {"world_size": 2})
    return Config.model_validate(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"path": "m"},
            "rollout": {"prompts": "p", "engines": []},
            "algorithm": {"name": "sft"},
            "trainer": trainer,
            "checkpoint": options,
        }
    )


def state(step: int, **fields: Any) -> RunState:
    """Returns the state after `step`. `fields`: of the state, or of the actor's trainers."""
    actor = {
        "layout": layout_of(LAYOUT),
        "distributed_optimizer": True,
        "freeze": [],
        "optimizer": "adam",
        "lora": None,
    }
    actor |= {name: fields.pop(name) for name in [*fields] if name in actor}
    known = {"version": step, "policies": {"actor": actor}} | fields
    return RunState(step=step, rollouts={"source": {}, "next": 0, "tickets": []}, **known)


def trained(config: Config, sizes: Sizes = LAYOUT) -> dict[str, SimpleNamespace]:
    """Returns the only policy of a run, for `check_resume`."""
    return {"actor": SimpleNamespace(config=config, sizes=sizes)}


class Trainers:
    """Two ranks that write on request."""

    name, sizes = "trainer", LAYOUT

    def __init__(self, config: Config) -> None:
        self.config = config
        self.saves: list[Path] = []
        self.restored: list[tuple[Path, bool, bool]] = []
        self.checked: list[list[dict[str, FileRecord]]] = []

    async def save(self, path: Path, *, step: int, role: str = "model") -> None:
        self.saves.append(path)

    def write(self, rank: int, path: Path | None = None) -> None:
        path = path or self.saves[-1]
        name = f"__{rank}_0.distcp"
        record = files.write(path / name, b"shards of %d" % rank)
        files.write_report(path, rank, Report({name: record}, []))

    async def restore(self, path: Path, *, same_layout: bool, load_optimizer: bool, role: str = "model") -> None:
        self.restored.append((path, same_layout, load_optimizer))

    async def check_files(self, path: Path, shares: list[bytes]) -> None:
        decoded = [files.decode_records(share) for share in shares]
        self.checked.append(decoded)
        for share in decoded:
            files.check_digests(path, share)


class Bench:
    def __init__(self, tmp_path: Path, **options: Any):
        self.config, self.notes = config(tmp_path, **options), []
        self.trainers = Trainers(self.config)
        self.saves = Saves(
            tmp_path / "checkpoints",
            keep=self.config.checkpoint.keep,
            keep_every=self.config.checkpoint.keep_every,
        )
        self.checkpoints = Checkpointer({"actor": self.trainers}, self.saves, Timeline(tmp_path), self.notes.append)

    async def save(self, step: int) -> None:
        """Makes a whole save."""
        await self.checkpoints.save(state(step))
        for rank in range(2):
            self.trainers.write(rank)
        await self.checkpoints.settle()

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.saves.directory.iterdir() if path.is_dir())
