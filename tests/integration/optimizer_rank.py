"""One gloo rank of test_optimizer: what an optimizer step does and leaves alone, and state that leaves and comes back.

python -m tests.integration.optimizer_rank JOB.json RANK
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch
from slimx.errors import SlimxError
from slimx.trainer.checkpoint import files
from slimx.trainer.device.offload import MOMENTS
from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_rank import Rank, demonstrations
from tests.refusals import told

FROZEN = ["model.embed_tokens.weight", "decoder.layers.[01].*"]
"""The first half of the model: a whole pipeline stage of two, a chunk of each rank where stages are interleaved."""
UNDECAYED = ["*.mlp.router.weight", "model.layers.3.mlp.experts.5.down_proj.weight"]
OPTIMIZER = {"lr": 2e-3, "weight_decay": 0.3, "clip_grad": 0.05, "betas": [0.9, 0.95], "eps": 1e-8}
STEPS = 3
SEQUENCES = 6
"""Sequences of each step: two micro-batches on every rank."""
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16_undistributed": {"dtype": "bfloat16", "distributed_optimizer": False},
}
"""Optimizers whose state leaves and comes back."""
SHORT: dict[str, Any] = {"dtype": "bfloat16", "optimizer": {"moments_dtype": "bfloat16"}}
"""The one of Transformer Engine that keeps its moments in bf16."""


WITH_TERMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kl": ({"reference": True, "kl_coef": 0.5}, {}),
    "entropy": ({"entropy_coef": 0.1}, {}),
    "balance": ({}, {"aux_loss_coef": 0.01}),
    "z": ({}, {"z_loss_coef": 0.01}),
}
"""Sections `algorithm` and `trainer.moe` of losses with another term."""


class OptimizerRank(Rank):
    @property
    def kinds(self) -> dict[str, dict[str, Any]]:
        """Those of `KINDS` that the job asks for."""
        return {kind: (KINDS | {"short": SHORT})[kind] for kind in self.job["kinds"]}

    def config(self, *, dtype: str = "float32", optimizer: dict[str, Any] | None = None, **trainer: Any) -> Config:
        trainer.pop("algorithm", None)
        base = super().config(algorithm="sft", optimizer={**OPTIMIZER, **(optimizer or {})}, **trainer)
        return base.model_copy(update={"numerics": base.numerics.model_copy(update={"dtype": dtype})})

    def demonstrated(self, step: int) -> list[MicroBatch]:
        trajectories = demonstrations(step)[:SEQUENCES]
        return self.shard(trajectories, [1.0] * len(trajectories))

    def built(self, **options: Any) -> Any:
        return self.trainer(self.config(**options))

    def steps(self, trainer: Any, count: int = STEPS, first: int = 0) -> list[dict[str, float]]:
        return [trainer.train_step(self.demonstrated(s), step=s, version=0) for s in range(first, first + count)]

    def held(self, trainer: Any) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in trainer.weights.parameters.items()}

    def moments(self, trainer: Any) -> list[Any]:
        """Main weights, moments and step counts."""
        out: list[Any] = []
        for part in trainer.optimizer.chained_optimizers:
            for group in part.param_groups:
                out.append(group.get("step", 0))
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    out += [parameter.detach().clone(), *(state[key].clone() for key in sorted(state))]
        return out

    def save(self, trainer: Any, path: Path) -> None:
        begin_save(trainer, path, step=STEPS)
        finish_save(trainer, path)
        self.barrier()

    # Freezing ---------------------------------------------------------------------------------------------------------

    def gradients_without_freezing(self) -> None:
        # Without the distributed optimizer every rank has whole gradients.
        trainer = self.built(distributed_optimizer=False, optimizer={"clip_grad": 0.0})
        self.steps(trainer, 1)
        self.write_tensors("gradients", self.gradients(trainer))

    def frozen(self) -> None:
        import torch

        extra = self.job.get("freezing", {})
        trainer = self.built(distributed_optimizer=False, freeze=FROZEN, optimizer={"clip_grad": 0.0}, **extra)
        self.steps(trainer, 1)
        given = {
            name: getattr(parameter, "main_grad", torch.zeros(parameter.shape))
            for name, parameter in trainer.weights.parameters.items()
        }
        self.write_tensors("frozen_gradients", given)
        trainer = self.built(freeze=FROZEN, **extra)
        before = self.held(trainer)
        self.steps(trainer)
        after = self.held(trainer)
        self.write_tensors("frozen_weights", trainer.weights.parameters)
        trainable = set(trainer.weights.trainable())
        self.said["frozen"] = {
            " + ".join(part.sources): [
                bool(torch.equal(before[part.name], after[part.name])),
                " + ".join(part.sources) in trainable,
                getattr(trainer.weights.parameters[part.name], "main_grad", None) is not None,
            ]
            for part in trainer.weights.parts
        }
        # Of the distributed optimizer each rank has a share.
        self.said["state_elements"] = sum(
            p.numel() for group in trainer.optimizer.param_groups for p in group["params"]
        )
        self.said["trainable_elements"] = sum(p.numel() for p in trainer.weights.trainable().values())
        path = self.out / "checkpoint"
        self.save(trainer, path)
        ahead = self.steps(trainer, 2, STEPS)
        fresh = self.built(freeze=FROZEN, **extra)
        fresh.restore(str(path), same_layout=True)
        self.said["restored"] = [ahead, self.steps(fresh, 2, STEPS)]
        self.said["restored_equal"] = equal(self.held(trainer), self.held(fresh))

    # Steps that are skipped -------------------------------------------------------------------------------------------

    def skipped(self) -> None:
        trainer = self.built(optimizer={"max_skipped": 2})
        self.steps(trainer, 2)
        weights, moments = self.held(trainer), self.moments(trainer)
        poisoned = self.demonstrated(2)
        if self.parallel.coordinates.data == 0:  # one token of one data-parallel rank
            poisoned[0].weight[int(np.flatnonzero(poisoned[0].weight)[0])] = math.nan
        first = trainer.train_step(poisoned, step=2, version=0)
        self.said["skipped"] = first["optim/skipped"]
        self.said["skip_left_all"] = equal(weights, self.held(trainer)) and equal(moments, self.moments(trainer))
        self.said["after_skip"] = trainer.train_step(self.demonstrated(3), step=3, version=0)["optim/skipped"]
        self.said["after_skip_moved"] = not equal(weights, self.held(trainer))
        wanted = "model.layers.2.mlp.experts.6.down_proj.weight"
        hooked = trainer.weights.trainable().get(wanted)
        if hooked is not None:
            hooked.register_hook(lambda gradient: gradient * math.inf)
        trainer.train_step(self.demonstrated(0), step=4, version=0)
        try:
            trainer.train_step(self.demonstrated(1), step=5, version=0)
        except SlimxError as error:
            self.said["stopped"] = told(error)

    def without_signal(self) -> None:
        """A third step whose advantages are all 0: alone, and with each other term that a loss may have."""
        from slimx.config.sections.algorithm import Algorithm

        for name in ("alone", *WITH_TERMS):
            algorithm, moe = WITH_TERMS.get(name, ({}, {}))
            config = self.config(moe=moe).model_copy(update={"algorithm": Algorithm(name="grpo", **algorithm)})
            trainer = self.trainer(config)
            for step in range(2):
                trainer.train_step(self.sampled(step, 1.0), step=step, version=None)
            weights, moments = self.held(trainer), self.moments(trainer)
            metrics = trainer.train_step(self.sampled(2, 0.0), step=2, version=None)
            same = equal(weights, self.held(trainer)) and equal(moments, self.moments(trainer))
            self.said[f"without_signal_{name}"] = [
                metrics["optim/zero_gradient"],
                metrics["optim/grad_norm"] == 0,
                same,
                trainer.train_step(self.sampled(3, 1.0), step=3, version=None)["optim/zero_gradient"],
            ]
            if name == "alone":
                # Gradients that are not 0, whose squares are.
                metrics = trainer.train_step(self.sampled(4, 1e-25), step=4, version=None)
                self.said["tiny_gradient"] = [metrics["optim/zero_gradient"], metrics["optim/grad_norm"]]

    def sampled(self, step: int, advantage: float) -> list[MicroBatch]:
        """As `demonstrated`, with the log-probs of an engine."""
        trajectories = demonstrations(step)[:SEQUENCES]
        for each in trajectories:
            each.logprobs[:] = -3.0
        return self.shard(trajectories, [advantage] * len(trajectories))

    # Precision and groups against an independent AdamW ----------------------------------------------------------------

    def against_adamw(self, name: str, **options: Any) -> None:
        """Feeds torch's AdamW (fp32) with the run's own clipped gradients; the largest distance of the main weights."""
        import torch

        trainer = self.built(**options)
        named = trainer.weights.trainable()
        main = {key: p.main_param if hasattr(p, "main_param") else p for key, p in named.items()}
        twin = {key: main[key].detach().clone().view(named[key].shape).requires_grad_() for key in named}
        plain = [
            key
            for key in named
            if "norm" in key or ".mlp.gate." in key or key == "model.layers.3.mlp.experts.5.down_proj.weight"
        ]
        decayed = [key for key in named if key not in plain]
        adam = torch.optim.AdamW(
            [
                {"params": [twin[key] for key in decayed], "weight_decay": OPTIMIZER["weight_decay"]},
                {"params": [twin[key] for key in plain], "weight_decay": 0.0},
            ],
            lr=OPTIMIZER["lr"],
            betas=OPTIMIZER["betas"],
            eps=OPTIMIZER["eps"],
        )
        norms = []
        for step in range(5):
            trainer.train_step(self.demonstrated(step), step=step, version=0)
            for key, parameter in named.items():
                twin[key].grad = parameter.main_grad.detach().clone()
            norms.append(math.sqrt(sum(float(t.grad.double().square().sum()) for t in twin.values())))
            adam.step()
        distance = max(float((main[key].view_as(twin[key]) - twin[key]).abs().max()) for key in named)
        moved = min(float((main[key].view_as(twin[key]) - twin[key]).abs().max()) for key in named)
        self.said[name] = {
            "distance": distance,
            "least": moved,
            "norms": norms,
            "rounded": all(torch.equal(p.detach(), main[k].view_as(p).to(p.dtype)) for k, p in named.items()),
            "exact": all(torch.equal(main[k], main[k].bfloat16().float()) for k in named),
        }

    # State that leaves the device -------------------------------------------------------------------------------------

    def host_moments(self) -> None:
        for kind, options in self.kinds.items():
            plain = self.built(**options)
            self.steps(plain)
            for share in (0.5, 1.0):
                moved = self.built(**options, optimizer={"offload_fraction": share})
                self.steps(moved)
                self.said[f"host_moments_{kind}_{share}"] = equal(self.held(plain), self.held(moved)) and equal(
                    self.moments(plain), self.moments(moved)
                )
            path = self.out / f"host_moments_{kind}"
            self.save(moved, path)
            fresh = self.built(**options, optimizer={"offload_fraction": 0.25})
            fresh.restore(str(path), same_layout=True)
            self.said[f"host_moments_{kind}_restored"] = equal(self.moments(moved), self.moments(fresh))
            faster = self.built(**options, optimizer={"lr": 3e-3, "min_lr": 1e-3})
            faster.restore(str(path), same_layout=True)
            self.said[f"host_moments_{kind}_faster"] = equal(self.moments(moved), self.moments(faster))
            self.steps(moved, 1, STEPS)
            self.steps(fresh, 1, STEPS)
            self.said[f"host_moments_{kind}_went_on"] = equal(self.held(moved), self.held(fresh))

    def saved_before_a_step(self) -> None:
        """As after a first step that was skipped: Adam has made no moments yet."""
        for kind, options in self.kinds.items():
            trainer, path = self.built(**options), self.out / f"unstepped_{kind}"
            self.save(trainer, path)
            fresh = self.built(**options)
            fresh.restore(str(path), same_layout=True)
            self.steps(trainer, 1)
            self.steps(fresh, 1)
            untouched = self.built(**options)
            self.steps(untouched, 1)
            self.said[f"unstepped_{kind}"] = [
                equal(self.held(untouched), self.held(each)) and equal(self.moments(untouched), self.moments(each))
                for each in (trainer, fresh)
            ]

    def gathered(self) -> None:
        """A checkpoint whose optimizer state megatron-core gathered, as slimx wrote it until 2026-11."""
        from slimx.trainer.checkpoint import state as states

        trainer, path = self.built(dtype="bfloat16"), self.out / "gathered"
        self.steps(trainer)
        state = states.full_state(
            trainer.chunks, trainer.optimizer, step=STEPS, data_size=self.sizes.data, frozen=False
        )
        state["optimizer"] = trainer.optimizer.sharded_state_dict(
            states.model_state(trainer.chunks), is_loading=False, metadata=states.metadata()
        )
        if self.parallel.rank == 0:
            (path / files.REPORTS).mkdir(parents=True)
        self.barrier()
        trainer.saver.begin(path, state)
        finish_save(trainer, path)
        self.barrier()
        fresh = self.built(dtype="bfloat16")
        fresh.restore(str(path), same_layout=True)
        self.said["gathered"] = [equal(of(trainer), of(fresh)) for of in (self.held, self.moments)]

    def offloaded(self) -> None:
        import torch

        for kind, options in self.kinds.items():
            straight, cycled = self.built(**options), self.built(**options)
            self.steps(straight)
            self.steps(cycled, 1)
            before = self.held(cycled), self.moments(cycled)
            whole = cycled.offloading.sizes()
            cycled.offload(weights=False)
            half = cycled.offloading.sizes()
            kept = equal(before[0], self.held(cycled))  # weights are still published from
            cycled.offload()
            away = cycled.offloading.sizes()
            storages = {
                tensor.untyped_storage().nbytes()
                for parameter in cycled.weights.parameters.values()
                if isinstance(parameter, torch.nn.Parameter)
                for tensor in (parameter, parameter.main_grad)
            }
            cycled.reload(training=False)
            only = cycled.offloading.sizes()
            published = equal(before[0], self.held(cycled))
            cycled.reload()
            same = equal(before[0], self.held(cycled)) and equal(before[1], self.moments(cycled))
            back = cycled.offloading.sizes()
            self.steps(cycled, 1, 1)
            cycled.offload()
            cycled.reload()
            self.steps(cycled, STEPS - 2, 2)
            self.said[f"offloaded_{kind}"] = {
                "whole": whole,
                "half": half,
                "away": away,
                "only": only,
                "back": back,
                "storages": sorted(storages),
                "kept": kept,
                "published": published,
                "same": same,
                "trained": equal(self.held(straight), self.held(cycled))
                and equal(self.moments(straight), self.moments(cycled)),
            }

    # Moments in bf16 ----------------------------------------------------------------------------------------------

    def short_moments(self) -> None:
        """Bytes planned and held, and checkpoints of moments in the other precision."""
        from slimx.extras.planner.memory.state import Buffers
        from slimx.extras.planner.memory.trainer import holdings

        short, long = self.built(**SHORT), self.built(dtype="bfloat16")
        for trainer, name, other in ((long, "long", SHORT), (short, "short", {"dtype": "bfloat16"})):
            self.said[f"{name}_steps"] = self.steps(trainer)
            states = [state for part in trainer.optimizer.chained_optimizers for state in part.optimizer.state.values()]
            self.said[f"{name}_moments"] = sorted({str(state[key].dtype) for state in states for key in MOMENTS})
            runs = holdings(trainer.config.trainer, trainer.config.numerics, self.spec).runs(self.sizes, self.rank)
            planned = Buffers(runs, trainer.config.trainer, self.sizes).state(self.rank)
            self.said[f"{name}_planned"] = [planned.weights, planned.gradients, planned.optimizer]
            self.said[f"{name}_held"] = list(trainer.offloading.sizes().values())
            self.save(trainer, self.out / name)
            restored = self.built(**other)
            restored.restore(str(self.out / name), same_layout=True)
            pairs = zip(self.moments(trainer), self.moments(restored), strict=True)
            self.said[f"{name}_elsewhere"] = all(
                saved.to(taken.dtype).equal(taken) if hasattr(saved, "dtype") else saved == taken
                for saved, taken in pairs
            )


def equal(a: Any, b: Any) -> bool:
    """Returns True if two collections of tensors and numbers are equal bit for bit."""
    import torch

    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def main() -> None:
    rank = OptimizerRank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank.start()
    if rank.job.get("engine"):
        rank.short_moments()
        rank.saved_before_a_step()
        rank.offloaded()
        rank.finish()
        return
    if "frozen" in rank.job["parts"]:
        rank.gradients_without_freezing()
    for part in rank.job["parts"]:
        getattr(rank, part)()
    rank.host_moments()
    rank.saved_before_a_step()
    rank.offloaded()
    if rank.sizes.world == 1:
        rank.against_adamw("bfloat16", dtype="bfloat16", optimizer={"no_weight_decay": UNDECAYED})
        rank.against_adamw("float32", distributed_optimizer=False, optimizer={"no_weight_decay": UNDECAYED})
    rank.finish()


if __name__ == "__main__":
    main()
