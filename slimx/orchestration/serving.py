"""Engines without trainers: what `slimx generate` and `slimx eval` start.

The servers keep the weights that they start with, and call them version 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from slimx.config.schema import Config
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.server.control import EngineControl
from slimx.errors import SlimxError
from slimx.layout.ranks import sizes_of
from slimx.models.files.megatron_directory import is_megatron
from slimx.orchestration.batches import longest_trajectory
from slimx.orchestration.frozen import admit_joining, keep_admitting
from slimx.orchestration.lifetime.heap import settled_heap
from slimx.orchestration.lifetime.lifetime import together
from slimx.orchestration.prepare import Sources
from slimx.orchestration.service import EngineService


def without_trainers(config: Config, checkpoint: Path | None) -> Config:
    """`config` with engines that start from `checkpoint`, a Hugging Face directory, or from the weights that training
    would start from. Raises SlimxError for weights that engines cannot load."""
    if any(policy.shares is None for policy in config.policies.values()):
        raise SlimxError(
            "slimx generate and slimx eval were never proven with several trained policies; use the held-out prompts "
            "of training (eval.prompts), or take the further ones out of policies",
            code="policies.serving",
            about="policies",
        )
    if not config.rollout.policy_engines:
        raise SlimxError(
            "there is no engine to generate with: "
            + ("rollout.replay is set; leave it out" if config.rollout.replay else "rollout.engines is empty; add one"),
            code="engines.none",
            about="rollout.replay" if config.rollout.replay else "rollout.engines",
        )
    given = checkpoint or (Path(config.trainer.load) if config.trainer.load else None)
    if given is not None:
        name = "--checkpoint" if checkpoint else "trainer.load"
        if is_megatron(given):
            raise SlimxError(
                f"{name}: {given} is Megatron-LM's, and engines load Hugging Face directories; convert it (slimx "
                "convert megatron-to-hf), or export one while training (checkpoint.export_every)",
                code="engines.weights",
                about=name,
            )
        if not (given / "config.json").is_file():
            raise SlimxError(
                f"{name}: {given} holds no config.json; name a Hugging Face directory with weights",
                code="engines.weights",
                about=name,
            )
    groups = []
    for group in config.rollout.engines:
        if not group.frozen and group.urls:
            raise SlimxError(
                f"rollout.engines group {group.name} has urls: nobody knows what weights those servers hold; let slimx "
                "start the engines (count)",
                code="engines.urls",
                about=group.name,
            )
        if given is not None and not group.frozen and (checkpoint is not None or group.model is None):
            # An export may come without its tokenizer.
            sglang = {"tokenizer_path": config.model.path} | group.sglang
            group = group.model_copy(update={"model": str(given), "sglang": sglang})
        groups.append(group)
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"engines": tuple(groups)}),
            "schedule": config.schedule.model_copy(update={"colocate": False}),  # there is nobody to take turns with
        }
    )


@asynccontextmanager
async def serving(
    config: Config, sources: Sources, directory: Path, note: Callable[[str], None]
) -> AsyncIterator[EngineService]:
    """All engines of `config` (see `without_trainers`), started, and ended afterwards. Ray is there already.

    `directory`: gets `logs/` and `engines.json`. `note` is told in one line what happens to engines."""
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    async with EngineService(config, sources, directory, note=note) as service:
        (engines,) = service.place().values()
        await together([service.frozen.start, engines.start])
        # As long as what training on the same configuration could take.
        await service.open(longest_trajectory(config, sources.spec, sizes_of(config.trainer)))
        await admit_joining(engines, _call_version_0)
        engines.members.watch()
        readmitting = asyncio.create_task(keep_admitting(engines, _call_version_0))
        try:
            with settled_heap():
                yield service
        finally:
            readmitting.cancel()
            with suppress(asyncio.CancelledError):
                await readmitting


async def _call_version_0(engine: EngineHandle) -> None:
    """Stamp what the server started with: tokens without a version are refused."""
    await EngineControl(engine.url, engine.name, engine.keys).set_version(0)
