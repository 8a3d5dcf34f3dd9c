"""Exact mode's implementation of `slimx.numerics.mode.NumericsMode`, through which the core uses this extra. This
module imports torch and the operations only when they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from slimx.extras.exact.adapters.sglang import ATTENTION
from slimx.numerics.mode import Head, NumericsMode

if TYPE_CHECKING:
    import torch

    from slimx.config.schema import Config
    from slimx.config.sections.eval import Eval
    from slimx.config.sections.general import Numerics
    from slimx.config.sections.rollout import Rollout
    from slimx.config.sections.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Exact(NumericsMode):
    """Exact mode, enabled for a run by `numerics.mode: exact`, and for a server by `--exact-leaves N`."""

    OPTION: ClassVar[str] = "--exact-leaves"
    replaces_layers: ClassVar[bool] = True

    leaves: int
    """Number of leaves into which row-parallel sums are cut: equal parts whose partial sums are added in a binary
    tree."""

    @classmethod
    def configured(cls, config: Config) -> Self:
        return cls(tree_leaves(config.numerics, config.trainer, config.rollout, config.eval))

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(int(argument))

    def contract(self, dtype: str, device: str = "cpu") -> dict[str, int | str]:
        from slimx.extras.exact.operations import contract

        return contract(leaves=self.leaves, dtype=dtype, device=device)

    def exchange_layers(self, block: Any, transformer: Any, gpt: dict[str, Any]) -> dict[str, Any]:
        from slimx.extras.exact.adapters.megatron import layers, rotary
        from slimx.extras.exact.adapters.megatron.router import ExactRouter
        from slimx.trainer.moe import router

        router.install(block, ExactRouter)
        layers.install(block, leaves=self.leaves, rotary=rotary.rotary_of(transformer, gpt))
        return gpt | {"position_embedding_type": "none"}

    def prepare_weights(self, weights: Any, config: Config) -> None:
        """Makes layers compute with the rounded weights that engines have after an fp8 publication, if
        `publish.quantize` is set."""
        quantize = config.publish.quantize
        if quantize is None:
            return
        from slimx.extras.exact.adapters.megatron.layers import compute_with
        from slimx.extras.exact.served_weights import ServedWeights
        from slimx.layout.number_formats import published_format

        quantization = published_format(quantize).quantization(quantize)
        if quantization is not None:
            served = ServedWeights(weights.parts, weights.parameters, quantization, config.numerics.dtype)
            weights.derived.append(served.refresh)
            for name, value in served.values.items():
                compute_with(weights.parameters[name], value)

    def head(self) -> Head:
        from slimx.extras.exact import head

        return head

    def server_arguments(self, device: str) -> dict[str, Any]:
        if device == "cpu":
            return {"attention_backend": ATTENTION}
        # Exact mode reads sizes back from the GPU, which CUDA graphs forbid; Triton's experts keep their loaded order;
        # and norms must not be fused into an all-reduce.
        return {
            "attention_backend": ATTENTION,
            "disable_cuda_graph": True,
            "moe_runner_backend": "triton",
            "enforce_disable_flashinfer_allreduce_fusion": True,
        }

    def command_line(self) -> list[str]:
        return [self.OPTION, str(self.leaves)]

    def open_choices(self) -> None:
        from slimx.extras.exact.adapters.sglang import numerics

        numerics.open_choices()

    def register(self, registry: Any, kinds: Any) -> None:
        from slimx.extras.exact.adapters.sglang import numerics

        numerics.register(registry, kinds, self.leaves)

    def in_force(self, registry: Any, model: torch.nn.Module) -> dict[str, bool]:
        from slimx.extras.exact.adapters.sglang import numerics

        server = numerics.installed(registry)
        return {ATTENTION: False} if server is None else server.in_force(registry, model)


def tree_leaves(numerics: Numerics, trainer: Trainer, rollout: Rollout, eval: Eval) -> int:
    """Returns the number of leaves into which row-parallel sums are cut: `numerics.leaves`, or if it is not set, the
    run's largest tensor-parallel size."""
    return numerics.leaves or max(tensor_sizes(trainer, rollout, eval).values())


def tensor_sizes(trainer: Trainer, rollout: Rollout, eval: Eval) -> dict[str, int]:
    """Returns the tensor-parallel sizes of the trainer and of engines that serve the policy, keyed by a description for
    error messages."""
    sizes = {"trainer.tensor": trainer.tensor, "trainer.expert_tensor": trainer.expert_tensor_size}
    # Frozen groups need not agree with the trainer. A replay starts no engines, but must compute the sums of the run
    # that sampled.
    engines = (group for group in (*rollout.engines, *eval.engines) if not group.frozen)
    return sizes | {f"tensor of {group.where}": group.tensor for group in engines}
