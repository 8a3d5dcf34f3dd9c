"""All routers of one rank during passes over micro-batches: replay and recording of experts, auxiliary losses,
selection bias."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from slimx.algorithms.router_terms import LayerTally, Totals, updated_bias
from slimx.config.sections.trainer import Moe
from slimx.data.batch import LazyRow, MicroBatch
from slimx.data.lazy import held
from slimx.data.packing import LazyMicroBatch, zigzag
from slimx.data.routes import RouteShape, check_routes
from slimx.trainer.context import to_device
from slimx.trainer.moe.router import Cursor, PolicyRouter, RoutedTokens, RouterWatch
from slimx.trainer.moe.routes import differing, engine_routes, known_routes
from slimx.trainer.parallel import ParallelState

Routes = list[torch.Tensor]
"""Experts chosen for the tokens of each micro-batch of a pass, in the tensor layout that the module
`slimx.trainer.moe.routes` describes."""


@dataclass(frozen=True, slots=True)
class _LocalRouter:
    """Router on this rank, with its location in the model."""

    router: PolicyRouter
    cursor: Cursor
    """Cursor that shows which micro-batch the router's chunk is processing."""
    layer: int
    """Global index of the router's layer, from 0; layers of multi-token prediction follow the decoder's."""
    row: int | None
    """Index of this router among the routers that can replay; None if it cannot."""
    name: str
    """Name of the router, for use in messages."""


class Routing:
    """All routers in the chunks of this rank.

    The context managers `forward` and `training` wrap a pass, in which the pipeline runs; `microbatch` wraps each
    forward pass of a chunk. Outside of these context managers, for example when the reference's log-probs are computed,
    routers choose by themselves and nothing is recorded. For the routers of multi-token prediction, auxiliary losses
    and token counts are computed as well, but these routers do not replay, because engines report no routes for
    them."""

    def __init__(self, chunks: Sequence[GPTModel], parallel: ParallelState, settings: Moe):
        """Finds the routers in `chunks`, this rank's GPT models (without wrappers) in the order of the forward pass."""
        self._parallel = parallel
        self._settings = settings
        self._cursors = [Cursor() for _ in chunks]
        self._routers: list[_LocalRouter] = []
        self.layers: list[int] = []
        """Global indices, from 0, of the decoder's MoE layers on this rank."""
        config = chunks[0].config
        for chunk, cursor in zip(chunks, self._cursors, strict=True):
            for layer in chunk.decoder.layers:
                router = getattr(getattr(layer, "mlp", None), "router", None)
                if isinstance(router, PolicyRouter):
                    number = layer.layer_number - 1
                    row = len(self.layers)
                    self.layers.append(number)
                    self._routers.append(_LocalRouter(router, cursor, number, row, f"the router of layer {number}"))
            mtp = getattr(chunk, "mtp", None)
            for index, layer in enumerate(() if mtp is None else mtp.layers):
                router = getattr(layer.mtp_model_layer.mlp, "router", None)
                if isinstance(router, PolicyRouter):
                    name = f"the router of MTP layer {index}"
                    self._routers.append(_LocalRouter(router, cursor, config.num_layers + index, None, name))
        self.experts: int = config.num_moe_experts or 0
        self.topk: int = config.moe_router_topk
        self._function: str = config.moe_router_score_function
        self._decoder_layers: int = config.num_layers
        depth = config.num_layers + (config.mtp_num_layers or 0)
        self._tokens: list[RoutedTokens] = []
        self._waiting: list[Iterator[RoutedTokens]] | None = None
        self._sums = torch.zeros(depth, self.experts + 2, dtype=torch.float64, device=parallel.device)

    # Passes -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self, batches: list[MicroBatch], *, replay: Routes | None = None) -> Iterator[None]:
        """Wraps a forward-only pass over this rank's parts of `batches`, and records the experts that the routers use.
        `replay`: experts that the routers must use; None if they choose."""
        with self._pass(batches, replay, totals=None, training=False):
            yield

    @contextmanager
    def training(
        self, batches: list[MicroBatch], *, totals: Totals | None, replay: Routes | None = None
    ) -> Iterator[None]:
        """Wraps a forward and backward pass over this rank's parts of `batches`, counts the tokens that each expert
        receives, and applies the auxiliary losses. `totals`: denominators of these losses. `replay`: experts that the
        routers must use; None if they choose."""
        self._sums.zero_()
        with self._pass(batches, replay, totals=totals, training=True):
            yield

    @contextmanager
    def _pass(
        self, batches: list[MicroBatch], replay: Routes | None, *, totals: Totals | None, training: bool
    ) -> Iterator[None]:
        self._tokens = []
        for index, batch in enumerate(batches):
            self._tokens.append(self._tokens_of(batch, None if replay is None else replay[index]))
        self._waiting = [iter(self._tokens) for _ in self._cursors]
        watches = []
        for local in self._routers:
            tally = self._tally(local, totals) if training else None
            watch = RouterWatch(local.name, local.cursor, local.row, tally)
            watches.append(watch)
            local.router.watch = watch
        try:
            yield
            for local, watch in zip(self._routers, watches, strict=True):
                watch.finish(trainable=local.router.weight.requires_grad)
        finally:
            self._waiting = None
            for local in self._routers:
                local.router.watch = None

    def _tally(self, local: _LocalRouter, totals: Totals | None) -> LayerTally:
        return LayerTally(
            self._settings,
            totals,
            topk=self.topk,
            function=self._function,
            sums=self._sums[local.layer],
            sum_over_shards=partial(dist.all_reduce, group=local.router.tp_cp_group),
            sum_over_data=partial(dist.all_reduce, group=local.router.tp_dp_cp_group),
        )

    @contextmanager
    def microbatch(self, chunk: int) -> Iterator[None]:
        """Wraps the forward pass of the next micro-batch through the chunk with index `chunk`."""
        if self._waiting is None:
            yield
            return
        cursor = self._cursors[chunk]
        cursor.tokens = next(self._waiting[chunk])
        try:
            yield
        finally:
            cursor.tokens = None

    def _tokens_of(self, batch: MicroBatch, replayed: torch.Tensor | None) -> RoutedTokens:
        sizes = self._parallel.sizes
        segments = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        segments = segments[zigzag(batch.lengths, sizes.context, self._parallel.coordinates.context)]
        return RoutedTokens(
            counted=self._shard(~batch.padding),
            segments=self._shard(segments),
            sequences=len(batch.lengths),
            replayed=replayed,
        )

    def _shard(self, values: np.ndarray, axis: int = 0) -> torch.Tensor:
        """Returns, on the device, the part of `values` that belongs to this tensor-parallel rank's tokens (sequence
        parallelism). `axis`: token dimension."""
        part = np.split(values, self._parallel.sizes.tensor, axis)[self._parallel.coordinates.tensor]
        return to_device(np.ascontiguousarray(part), self._parallel.device)

    # Routes -----------------------------------------------------------------------------------------------------------

    def receive(self, batches: Sequence[MicroBatch]) -> None:
        """Makes micro-batches that are not laid out yet leave out the engine's routes of other ranks' layers. Checks
        the routes that training replays, and raises SlimxError naming a trajectory whose routes do not fit the
        model."""
        shape = RouteShape(self._decoder_layers, tuple(self.layers), self.experts, self.topk)
        for batch in batches:
            if not isinstance(batch, LazyMicroBatch):
                continue
            batch.route_layers = shape.moe_layers
            if self._settings.routing_replay == "R3" and self.layers:
                rows = [row for row in batch.members if isinstance(row, LazyRow) and "routed_experts" not in held(row)]
                check_routes([row.trajectory for row in rows], shape)

    def from_engine(self, batches: list[MicroBatch]) -> Routes:
        """Returns the engine's routes for this rank's tokens and layers, which training replays if
        `trainer.moe.routing_replay` is R3."""
        return [self._engine_routes(batch) for batch in batches]

    def _engine_routes(self, batch: MicroBatch) -> torch.Tensor:
        return self._shard(engine_routes(batch, self.layers, experts=self.experts, topk=self.topk), 1)

    def chosen(self) -> Routes:
        """Returns the routes that this rank's routers used in the last pass, which training replays if
        `trainer.moe.routing_replay` is R2."""
        return [self._chosen(tokens) for tokens in self._tokens]

    def _chosen(self, tokens: RoutedTokens) -> torch.Tensor:
        return torch.stack([tokens.chosen[row] for row in range(len(self.layers))])

    def differing(self, batches: list[MicroBatch]) -> torch.Tensor:
        """Returns a mask of the tokens of all `batches`, bool [sum of T]: True where, in the last pass, a layer on this
        rank used different experts from the engine's. Collective over tensor-parallel ranks."""
        out = []
        for batch, tokens in zip(batches, self._tokens, strict=True):
            differs = torch.zeros(len(tokens.counted), dtype=torch.bool, device=self._parallel.device)
            if batch.routed_experts is not None and self.layers:
                known = known_routes(batch)
                engine = self._engine_routes(replace(batch, padding=~known))
                differs = differing(self._chosen(tokens), engine) & self._shard(known)
            out.append(self._join(differs))
        return torch.cat(out)

    def _join(self, part: torch.Tensor) -> torch.Tensor:
        """Joins a mask's parts on all tensor-parallel ranks into the mask of all tokens, bool [T]. Collective."""
        size = self._parallel.sizes.tensor
        if size == 1:
            return part
        parts = [torch.empty_like(part, dtype=torch.uint8) for _ in range(size)]
        dist.all_gather(parts, part.to(torch.uint8), group=self._parallel.tensor_group)
        return torch.cat(parts).bool()

    def comparable(self, batch: MicroBatch) -> torch.Tensor:
        """Returns a mask of a micro-batch's tokens on this rank, bool [T]: True where the engine's routes are known, so
        that routes can be compared. In a dense model, all tokens are marked."""
        known = known_routes(batch) if self.experts else np.ones(len(batch.tokens), bool)
        return to_device(known, self._parallel.device)

    # Auxiliary losses ------------------------------------------------------------------------------------------------

    def totals(self, batches: list[MicroBatch]) -> Totals | None:
        """Returns the denominators of an update's auxiliary losses: the numbers of tokens and sequences in the complete
        micro-batches of all data-parallel ranks. None if no such loss is configured. Collective."""
        if not (self._settings.aux_loss_coef or self._settings.z_loss_coef):
            return None
        tokens = 0
        sequences = 0
        for batch in batches:
            tokens += int((~batch.padding).sum())
            bounds = np.cumsum([0, *batch.lengths])[:-1]
            sequences += int((~np.logical_and.reduceat(batch.padding, bounds)).sum())
        counts = torch.tensor([tokens, sequences], dtype=torch.float64, device=self._parallel.device)
        dist.all_reduce(counts, group=self._parallel.token_group)
        # All context-parallel ranks have counted the same complete micro-batches.
        return Totals(*(counts / self._parallel.sizes.context).tolist())

    def gather_sums(self) -> None:
        """Sums the token counts and auxiliary losses of the last training pass over all ranks, because ranks have
        different layers and tokens. Collective."""
        dist.all_reduce(self._sums)

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the last training pass; must be called after `gather_sums`. Imbalance is the load of the
        busiest expert divided by the mean load. Auxiliary losses are means over the MoE layers, without their
        coefficients."""
        load = self._sums[:, :-2]
        terms = self._sums[:, -2:]
        layers = (load.sum(1) > 0).nonzero()[:, 0].tolist()
        if not layers:
            return {}
        imbalance = (load.max(1).values / load.mean(1))[layers]
        out = {"router/imbalance": float(imbalance.mean()), "router/imbalance_max": float(imbalance.max())}
        for layer, value in zip(layers, imbalance.tolist(), strict=True):
            mtp = layer - self._decoder_layers
            name = str(layer) if mtp < 0 else f"mtp{mtp}"
            out[f"router/imbalance/{name}"] = value
        balance, squares = terms[layers].mean(0).tolist()
        if self._settings.aux_loss_coef:
            out[f"router/{self._settings.aux_loss_type}"] = balance
        if self._settings.z_loss_coef:
            out["router/z_loss"] = squares
        return out

    @torch.no_grad()
    def update_bias(self) -> None:
        """Updates the routers' selection biases from the token counts of the last training pass, identically on all
        ranks; must be called after `gather_sums`."""
        if not self._settings.bias_update_rate:
            return
        for local in self._routers:
            load = self._sums[local.layer, :-2]
            bias = local.router.expert_bias
            bias.copy_(updated_bias(bias, load, self._settings.bias_update_rate))
