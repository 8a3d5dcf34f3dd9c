"""One of two ranks of test_untouched: trainers in bf16, whose checkpoints hold norms of delta nets' heads in the forms
that slimx has written and reads.

    python -m tests.integration.heads_norm_rank JOB.json RANK

RANK.json holds, for each form, the local tensors that differ between the trainer that saved and one that loads, and how
far the norms in megatron-core's own modules are from it.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from tests.integration.rank_start import join, leave
from tests.integration.saving import begin_save, finish_save
from tests.integration.untouched_rank import load, untouched, without_own_key

NORM, FACTOR = "out_norm.weight", "out_norm.factor"


def configuration(out: Path, hf: str, load: str | None = None) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": {"path": hf},
            "numerics": {"dtype": "bfloat16"},
            "trainer": {"world_size": 2, "tensor": 2, "load": load, "optimizer": {"lr": 1e-3}},
            "rollout": {"prompts": "p", "engines": []},
            "algorithm": {"name": "sft"},
        }
    )


def as_before(saved: Path) -> None:
    """Have the key of megatron-core hold the factors themselves, as slimx wrote them at first."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    tensors, stored = metadata.state_dict_metadata, metadata.storage_data
    for key in [key for key in tensors if key.endswith(FACTOR)]:
        old = key.replace(FACTOR, NORM)
        tensors[old] = tensors.pop(key)
        for index in [index for index in stored if index.fqn == old]:
            del stored[index]
        for index in [index for index in stored if index.fqn == key]:
            stored[replace(index, fqn=old)] = stored.pop(index)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))


def main() -> None:
    file, rank = Path(sys.argv[1]), int(sys.argv[2])
    job, out = json.loads(file.read_text()), file.parent
    config = configuration(out, job["hf"])
    parallel = join(config.trainer, rank, job["init_method"])
    import torch

    from slimx.models.families import configured_model
    from slimx.trainer.trainer import PolicyTrainer

    def barrier() -> None:
        parallel.host_group.barrier().wait()

    trainer = PolicyTrainer(config, configured_model(config), parallel)
    trainer.optimizer.step()  # without gradients; now there is state to save
    right = {name: tensor.detach().clone() for name, tensor in trainer.weights.parameters.items()}

    def differing(other: Any) -> list[str]:
        return [name for name, tensor in other.weights.parameters.items() if not torch.equal(right[name], tensor)]

    saved = out / "saved" / "iter_0000001"
    begin_save(trainer, saved, step=1)
    finish_save(trainer, saved)
    barrier()
    if rank == 0:
        shutil.copytree(saved, out / "before" / saved.name)
        as_before(out / "before" / saved.name)
        shutil.copytree(saved, out / "other" / saved.name, ignore=shutil.ignore_patterns("slimx"))
        without_own_key(out / "other" / saved.name)
    barrier()
    said: dict[str, list[str]] = {}
    for form in ("saved", "other", "before"):
        path = out / form / saved.name
        said[f"{form} loaded"] = differing(
            PolicyTrainer(configuration(out, job["hf"], str(path)), trainer.weights.spec, parallel)
        )
        if form != "other":
            with torch.no_grad():
                for tensor in trainer.weights.parameters.values():
                    tensor.add_(1.0)
            trainer.restore(str(path), same_layout=True)
            said[f"{form} restored"] = differing(trainer)
    model = untouched(trainer)
    load(model, saved)
    norms = {name: tensor for name, tensor in model.named_parameters() if name.endswith(NORM)}
    gaps = [(tensor.float() + 1 - right[name].float()).abs().max().item() for name, tensor in norms.items()]
    (out / f"{rank}.json").write_text(json.dumps({"forms": said, "gaps": gaps}))
    leave(parallel)


if __name__ == "__main__":
    main()
