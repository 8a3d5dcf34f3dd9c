"""One gloo rank of test_convert: real trainers load converted checkpoints under several layouts, and save their own.

    python -m tests.integration.convert_rank JOB.json RANK

RANK.json says, by layout and model, which local tensors differ from those that the Hugging Face directory gives.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from tests.integration.rank_start import enter, join, leave
from tests.integration.saving import begin_save, finish_save


def configuration(out: Path, layout: dict[str, Any], model: dict[str, Any], load: str | None) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": model["model"],
            "numerics": {"dtype": model["dtype"]},
            "trainer": {
                **layout,
                "load": load,
                "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
                "megatron": {"mtp_num_layers": model["mtp"]} if model["mtp"] else {},
            },
            "rollout": {"prompts": "p", "engines": []},
            "algorithm": {"name": "sft"},
            "checkpoint": {"deadline": 300},
        }
    )


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    out, said, begin = Path(job["out"]), {}, join
    for name, layout in job["layouts"].items():
        if rank >= layout["world_size"]:
            continue
        first = next(iter(job["models"].values()))
        section = configuration(out, layout, first, None).trainer
        parallel, begin = begin(section, rank, f"tcp://127.0.0.1:{job['ports'][name]}"), enter
        import torch

        from slimx.models.families import configured_model
        from slimx.trainer.trainer import PolicyTrainer

        said[name] = {}
        for kind, model in job["models"].items():
            if name not in model["layouts"]:
                continue
            config = configuration(out, layout, model, None)
            spec = configured_model(config)
            wanted = PolicyTrainer(config, spec, parallel).weights.parameters
            trainer = PolicyTrainer(configuration(out, layout, model, model["megatron"]), spec, parallel)
            found = trainer.weights.parameters
            said[name][kind] = sorted(found.keys() ^ wanted.keys()) + [
                key
                for key in wanted
                if found[key].dtype != wanted[key].dtype or not torch.equal(found[key], wanted[key])
            ]
            # Adam without gradients changes no weight, and now there is optimizer state to save.
            for chunk in trainer.chunks:
                chunk.zero_grad_buffer()
            trainer.optimizer.step()
            path = out / "saved" / name / kind / "iter_0000003"
            begin_save(trainer, path, step=3)
            finish_save(trainer, path)
        leave(parallel)
    (out / f"{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
