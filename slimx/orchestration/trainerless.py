"""The configuration of engines without trainers, which `slimx generate` and `slimx eval` start."""

from __future__ import annotations

from pathlib import Path

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.models.files.megatron_directory import is_megatron


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
        name = "checkpoint" if checkpoint else "trainer.load"
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
                f"rollout.engines group {group.name} has urls, and the weights of those servers are unknown; let slimx "
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
            "schedule": config.schedule.model_copy(update={"colocate": False}),  # no trainers take turns
        }
    )
