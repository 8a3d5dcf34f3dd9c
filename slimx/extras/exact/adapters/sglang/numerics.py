"""Exact mode in an SGLang server: replaces SGLang's operations that round by those of exact mode.

Written for sglang 0.5.23. Exact mode is active only in a server that was started with `--exact-leaves`. Weight loading,
scheduling, the KV cache and sampling remain SGLang's. Norms, linear layers, rotary embedding, SwiGLU, attention, top-k,
experts, output layer and log_softmax are replaced. A model that has any other module with parameters is refused,
because it would round differently.

Operations of MoE layers are in `experts.py`, of attention in `attention.py` and `latent.py`, and sums over ranks in
`ranks.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from slimx.errors import SlimxError
from slimx.extras.exact import operations as exact
from slimx.extras.exact.adapters.sglang import ATTENTION
from slimx.extras.exact.adapters.sglang.attention import attention_class
from slimx.extras.exact.adapters.sglang.blocks import BlockOperations, methods_of, weight_of
from slimx.extras.exact.adapters.sglang.coverage import uncovered
from slimx.extras.exact.adapters.sglang.experts import ExpertOperations
from slimx.extras.exact.adapters.sglang.latent import LatentOperations, is_latent
from slimx.extras.exact.adapters.sglang.ranks import first_rank_only, gathered
from slimx.extras.exact.adapters.sglang.rotary import rotary_of


def open_choices() -> None:
    """Adds exact mode's attention backend to SGLang's three lists of accepted backends: for general use, for
    deterministic mode, and for deterministic mode with a radix cache."""
    from sglang.srt.arg_groups import choices

    for listed in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if ATTENTION not in listed:
            listed.append(ATTENTION)


def register(registry: Any, kinds: Any, leaves: int) -> None:
    """Registers exact mode's operations in `registry`, SGLang's HookRegistry, and exact mode's attention backend with
    SGLang. `kinds`: SGLang's HookType; `leaves`: number of equal parts (leaves) into which each row-parallel sum is
    cut."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    server = ExactServer(leaves)
    for target, hook in server.replacements().items():
        registry.register(target, hook, kinds.REPLACE)
    registry.register(LOG_SOFTMAX, server.log_softmax, kinds.AROUND)
    register_attention_backend(ATTENTION)(server.attention_backend)


def installed(registry: Any) -> ExactServer | None:
    """Returns exact mode's operations that are registered in this process; None in fast mode."""
    for hooks in registry._hooks.values():
        for _, hook, _ in hooks:
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, ExactServer):
                return owner
    return None


NORM = "sglang.srt.layers.layernorm.RMSNorm.forward_native"
ACTIVATION = "sglang.srt.layers.activation.SiluAndMul.forward_native"
ROTARY = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native"
LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
LOG_SOFTMAX = "torch.nn.functional.log_softmax"
"""Dotted name of the function with which SGLang's sampler and prompt scoring compute log-probs."""


class ExactServer:
    """Exact mode's operations in one server process. `calls`: number of calls of each operation, by dotted name of the
    function that it replaces; `leaves`: number of equal parts (leaves) into which each row-parallel sum is cut."""

    def __init__(self, leaves: int):
        self.leaves = leaves
        self.calls: Counter[str] = Counter()
        self.experts = ExpertOperations(leaves)
        self.blocks = BlockOperations(self.linear)
        self.latent = LatentOperations(self._rotate)
        self._gates: set[int] = set()
        """Python id() of each linear layer that computes router logits. The outputs of these layers stay in fp32."""
        self._tables: dict[tuple[exact.Rotary, torch.device], torch.Tensor] = {}

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Returns the replacement functions for SGLang's HookRegistry, by dotted name of the function that each
        replaces. Each counts its calls."""
        operations: dict[str, Callable[..., Any]] = {
            NORM: self.rms_norm,
            ACTIVATION: self.silu_and_mul,
            ROTARY: self.rotary,
            LINEAR: self.linear,
            HEAD: self.head,
            **self.experts.replacements(),
            **self.blocks.replacements(),
            **self.latent.replacements(),
        }
        return {target: partial(self._counted, target, operation) for target, operation in operations.items()}

    def _counted(self, target: str, operation: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.calls[target] += 1
        return operation(*args, **kwargs)

    def in_force(self, registry: Any, model: torch.nn.Module) -> dict[str, bool]:
        """Returns, for each function that exact mode replaces, its dotted name and whether the replacement is in force:
        it must be installed and, if `model` needs it to generate, have been called. Call this after the server has
        generated its first token."""
        kinds = {type(module).__name__ for module in model.modules()}
        used = {NORM, HEAD} | self.experts.used(kinds) | self.latent.used(kinds) | self.blocks.used(model)
        if "SiluAndMul" in kinds:
            used.add(ACTIVATION)
        if "UnquantizedLinearMethod" in methods_of(model):
            used.add(LINEAR)
        if not is_latent(kinds):
            used.add(ROTARY)
        parts = {}
        # log_softmax may never have been called, because greedy health checks request no log-probs.
        for target in (*self.replacements(), LOG_SOFTMAX):
            called = target not in used or self.calls[target] > 0
            parts[target] = target in registry._patched and called
        parts[ATTENTION] = self.calls[ATTENTION] > 0
        return parts

    # Operations, with the signatures of the functions that they replace -------------------------------------------

    def rms_norm(self, norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None, *_: Any, **__: Any) -> Any:
        if residual is None:
            return exact.rms_norm(x, norm.weight, norm.variance_epsilon)
        return exact.add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)

    def silu_and_mul(self, _: Any, x: torch.Tensor) -> torch.Tensor:
        return exact.silu_and_mul(x)

    def rotary(
        self,
        rotary: Any,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies the module `rotary` to query and key, [T, heads * head size] each, at `positions` [T].
        `fused_set_kv_buffer_arg`: KV cache to which keys and values are also written, because on CUDA some models write
        them in this call; None: no cache."""
        if offsets is not None:
            positions = positions + offsets
        positions = positions.flatten()
        query_heads = query.reshape(len(positions), -1, rotary.head_size)
        key_heads = key.reshape(len(positions), -1, rotary.head_size)
        query_out, key_out = self._rotate(rotary, positions, query_heads, key_heads)
        if fused_set_kv_buffer_arg is not None:
            cache = fused_set_kv_buffer_arg
            cache.k_buffer[cache.cache_loc] = key_out.flatten(1)
            cache.v_buffer[cache.cache_loc] = cache.value.reshape(len(positions), -1)
        return query_out.reshape(query.shape), key_out.reshape(key.shape)

    def _rotate(
        self, rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies the module `rotary` to query [T, heads, d] and key [T, groups, d], as pairs (i, i + rotated / 2) of
        dimensions. Extends the cached table of cosines and sines if a position is beyond its end."""
        description = rotary_of(rotary)
        index = description, positions.device
        last = int(positions.max()) if len(positions) else 0
        if last >= len(self._tables.get(index, ())):
            self._tables[index] = description.table(1 << last.bit_length()).to(positions.device)
        return exact.rope(query, key, self._tables[index], positions)

    def linear(self, _: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        from sglang.srt.layers.linear import RowParallelLinear

        weight = weight_of(layer, x.dtype)
        if id(layer) in self._gates:
            return exact.linear(x, weight, dtype=torch.float32)
        if isinstance(layer, RowParallelLinear):
            size = layer.tp_group.world_size if layer.tp_group is not None else 1
            if size > 1:
                part = exact.linear_partial(x, weight, self.leaves // size)
                return first_rank_only(exact.combine_leaves(gathered(part, layer.tp_group), x.dtype))
            return exact.linear(x, weight, leaves=self.leaves)
        return exact.linear(x, weight, bias=bias)

    def head(self, _: Any, hidden: torch.Tensor, head: Any, *__: Any, **___: Any) -> torch.Tensor:
        return exact.linear(hidden.to(head.weight.dtype), head.weight)

    def log_softmax(self, original: Callable[..., Any], x: torch.Tensor, dim: int | None = None, **options: Any) -> Any:
        self.calls[LOG_SOFTMAX] += 1
        if x.dim() != 2 or dim not in (-1, 1) or options:
            return original(x, dim=dim, **options)
        return exact.log_softmax(x.float())

    # Attention ------------------------------------------------------------------------------------------------------

    def attention_backend(self, runner: Any) -> Any:
        """Creates the attention backend. SGLang calls this function after loading the model, when `runner` knows the
        names of the configured attention backends. Raises SlimxError if exact mode does not cover the model, or if
        SGLang would use another backend for prefill or decode."""
        for step in ("prefill", "decode"):
            backend = getattr(runner, f"{step}_attention_backend_str")
            if backend != ATTENTION:
                raise SlimxError(
                    f"numerics.mode=exact needs the attention backend {ATTENTION}, but {step} in this server uses "
                    f"{backend}; remove {step}_attention_backend from rollout.engines.sglang or from the server's "
                    "arguments",
                    code="exact.backend",
                    about=f"{step}_attention_backend",
                )
        from sglang.kernels.fused_op import KernelBackend, set_fused_op_backend

        # Selects forward_native, which exact mode replaces, instead of other GPU kernels.
        set_fused_op_backend(KernelBackend.TORCH)
        problems = list(uncovered(runner.model))
        if problems:
            raise SlimxError(
                f"numerics.mode=exact does not cover {type(runner.model).__name__}, because {problems[0]}; set "
                "numerics.mode=fast",
            )
        self._gates = {id(block.gate) for block in runner.model.modules() if hasattr(block, "topk")}
        return attention_class()(runner, self.calls)
