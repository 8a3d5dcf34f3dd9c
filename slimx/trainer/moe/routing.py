"""The routers of one rank over a pass of micro-batches: replay, recording, auxiliary terms, selection bias."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from slimx.algorithms.router_terms import LayerTally, Totals, updated_bias
from slimx.config.sections.trainer import Moe
from slimx.data.batch import MicroBatch
from slimx.data.packing import zigzag
from slimx.trainer.context import to_device
from slimx.trainer.moe.router import Cursor, PolicyRouter, RoutedTokens, RouterWatch
from slimx.trainer.moe.routes import differing, engine_routes, known_routes
from slimx.trainer.parallel import ParallelState

Routes = list[torch.Tensor]
"""Routes of each micro-batch of a pass, as `slimx.trainer.moe.routes` describes them."""


@dataclass(frozen=True, slots=True)
class _PlacedRouter:
    """One router of this rank."""

    router: PolicyRouter
    cursor: Cursor
    """Cursor of the chunk that the router is in."""
    layer: int
    """Global number, from 0; layers of multi-token prediction follow the decoder's."""
    row: int | None
    """Number among the routers that replay; None for those that do not."""
    name: str


class Routing:
    """All routers of this rank's chunks.

    A pass begins with `forward` or `training`, runs the pipeline inside of it, and tells each forward pass of a chunk
    by `microbatch`. Outside of a pass routers choose by themselves and nothing is recorded (the reference's log-probs).
    Routers of multi-token prediction are trained with the same terms and counted, but they never replay: engines report
    no routes of theirs.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], parallel: ParallelState, settings: Moe):
        """`chunks`: the GPT models inside their wrappers, in the order of the forward pass."""
        self._parallel, self._settings = parallel, settings
        self._cursors = [Cursor() for _ in chunks]
        self._places: list[_PlacedRouter] = []
        self.layers: list[int] = []
        """Global numbers, from 0, of the decoder's MoE layers that this rank holds."""
        config = chunks[0].config
        for chunk, cursor in zip(chunks, self._cursors, strict=True):
            for layer in chunk.decoder.layers:
                if isinstance(router := getattr(getattr(layer, "mlp", None), "router", None), PolicyRouter):
                    number, row = layer.layer_number - 1, len(self.layers)
                    self.layers.append(number)
                    self._places.append(_PlacedRouter(router, cursor, number, row, f"the router of layer {number}"))
            for index, layer in enumerate(chunk.mtp.layers if getattr(chunk, "mtp", None) is not None else ()):
                if isinstance(router := getattr(layer.mtp_model_layer.mlp, "router", None), PolicyRouter):
                    number, name = config.num_layers + index, f"the router of MTP layer {index}"
                    self._places.append(_PlacedRouter(router, cursor, number, None, name))
        self.experts, self.topk, self._function = (
            config.num_moe_experts or 0,
            config.moe_router_topk,
            config.moe_router_score_function,
        )
        self._decoder_layers = config.num_layers
        depth = config.num_layers + (config.mtp_num_layers or 0)
        self._tokens: list[RoutedTokens] = []
        self._waiting: list[Iterator[RoutedTokens]] | None = None
        self._sums = torch.zeros(depth, self.experts + 2, dtype=torch.float64, device=parallel.device)

    # Passes -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self, batches: list[MicroBatch], *, replay: Routes | None = None) -> Iterator[None]:
        """A pass without backward over this rank's `batches`; what routers choose is recorded."""
        with self._pass(batches, replay, totals=None, training=False):
            yield

    @contextmanager
    def training(
        self, batches: list[MicroBatch], *, totals: Totals | None, replay: Routes | None = None
    ) -> Iterator[None]:
        """A pass with backward: loads and terms are summed too."""
        self._sums.zero_()
        with self._pass(batches, replay, totals=totals, training=True):
            yield

    @contextmanager
    def _pass(
        self, batches: list[MicroBatch], replay: Routes | None, *, totals: Totals | None, training: bool
    ) -> Iterator[None]:
        self._tokens = [
            self._tokens_of(batch, replay[number] if replay is not None else None)
            for number, batch in enumerate(batches)
        ]
        self._waiting = [iter(self._tokens) for _ in self._cursors]
        for place in self._places:
            tally = None
            if training:
                tally = LayerTally(
                    self._settings,
                    totals,
                    topk=self.topk,
                    function=self._function,
                    sums=self._sums[place.layer],
                    share=partial(dist.all_reduce, group=place.router.tp_cp_group),
                    all_data=partial(dist.all_reduce, group=place.router.tp_dp_cp_group),
                )
            place.router.watch = RouterWatch(place.name, place.cursor, place.row, tally)
        try:
            yield
            for place in self._places:
                place.router.watch.finish(trainable=place.router.weight.requires_grad)
        finally:
            self._waiting = None
            for place in self._places:
                place.router.watch = None

    @contextmanager
    def microbatch(self, chunk: int) -> Iterator[None]:
        """The forward pass of the next micro-batch through a chunk (its number in the order of the forward pass)."""
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
        sizes, place = self._parallel.sizes, self._parallel.place
        segments = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        segments = segments[zigzag(batch.lengths, sizes.context, place.context)]
        return RoutedTokens(
            counted=self._own(~batch.padding),
            segments=self._own(segments),
            sequences=len(batch.lengths),
            replayed=replayed,
        )

    def _own(self, values: np.ndarray, axis: int = 0) -> torch.Tensor:
        """This tensor-parallel rank's part of a micro-batch's tokens (sequence parallelism), on its device."""
        part = np.split(values, self._parallel.sizes.tensor, axis)[self._parallel.place.tensor]
        return to_device(np.ascontiguousarray(part), self._parallel.device)

    # Routes -----------------------------------------------------------------------------------------------------------

    def from_engine(self, batches: list[MicroBatch]) -> Routes:
        """Routes that the engine chose for this rank's tokens and layers (R3)."""
        return [
            self._own(engine_routes(batch, self.layers, experts=self.experts, topk=self.topk), 1) for batch in batches
        ]

    def chosen(self) -> Routes:
        """Routes that this rank's routers took in the last pass (R2)."""
        return [torch.stack([tokens.chosen[row] for row in range(len(self.layers))]) for tokens in self._tokens]

    def differing(self, batches: list[MicroBatch]) -> torch.Tensor:
        """Mark positions, bool [sum of T], at which any local layer took another set of experts than the engine in the
        last pass. Collective over tensor-parallel ranks."""
        out = []
        for batch, tokens in zip(batches, self._tokens, strict=True):
            here = torch.zeros(len(tokens.counted), dtype=torch.bool, device=self._parallel.device)
            if batch.routed_experts is not None and self.layers:
                known = known_routes(batch)
                (engine,) = self.from_engine([replace(batch, padding=~known)])
                chosen = torch.stack([tokens.chosen[row] for row in range(len(self.layers))])
                here = differing(chosen, engine) & self._own(known)
            out.append(self._whole(here))
        return torch.cat(out)

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """bool [T] of all tensor-parallel ranks' parts."""
        size = self._parallel.sizes.tensor
        if size == 1:
            return part
        parts = [torch.empty_like(part, dtype=torch.uint8) for _ in range(size)]
        dist.all_gather(parts, part.to(torch.uint8), group=self._parallel.tensor_group)
        return torch.cat(parts).bool()

    def comparable(self, batch: MicroBatch) -> torch.Tensor:
        """Mark this rank's tokens, bool [T], whose routes can be compared with the engine's: there are none in a dense
        model."""
        known = known_routes(batch) if self.experts else np.ones(len(batch.tokens), bool)
        return to_device(known, self._parallel.device)

    # Terms ------------------------------------------------------------------------------------------------------------

    def totals(self, batches: list[MicroBatch]) -> Totals | None:
        """Denominators of an update from this data-parallel rank's whole micro-batches; None if no term needs them.
        Collective."""
        if not (self._settings.aux_loss_coef or self._settings.z_loss_coef):
            return None
        tokens, sequences = 0, 0
        for batch in batches:
            tokens += int((~batch.padding).sum())
            bounds = np.cumsum([0, *batch.lengths])[:-1]
            sequences += int((~np.logical_and.reduceat(batch.padding, bounds)).sum())
        counts = torch.tensor([tokens, sequences], dtype=torch.float64, device=self._parallel.device)
        dist.all_reduce(counts, group=self._parallel.token_group)
        # Every context-parallel rank counted the whole micro-batches of its data-parallel rank.
        tokens, sequences = (counts / self._parallel.sizes.context).tolist()
        return Totals(tokens, sequences)

    def gather_sums(self) -> None:
        """Sum what the last training pass counted over all ranks: each has its own layers and tokens. Collective."""
        dist.all_reduce(self._sums)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last training pass, after `gather_sums`: imbalance is the load of the fullest expert over the
        mean load, terms are means over MoE layers without their coefficients."""
        load, terms = self._sums[:, :-2], self._sums[:, -2:]
        held = (load.sum(1) > 0).nonzero()[:, 0].tolist()
        if not held:
            return {}
        imbalance = (load.max(1).values / load.mean(1))[held]
        out = {"router/imbalance": float(imbalance.mean()), "router/imbalance_max": float(imbalance.max())}
        for number, value in zip(held, imbalance.tolist(), strict=True):
            mtp = number - self._decoder_layers
            out[f"router/imbalance/{number if mtp < 0 else f'mtp{mtp}'}"] = value
        balance, squares = terms[held].mean(0).tolist()
        if self._settings.aux_loss_coef:
            out[f"router/{self._settings.aux_loss_type}"] = balance
        if self._settings.z_loss_coef:
            out["router/z_loss"] = squares
        return out

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the selection biases by what the last training pass counted, after `gather_sums`; equal on all ranks."""
        if not self._settings.bias_update_rate:
            return
        for place in self._places:
            load, bias = self._sums[place.layer, :-2], place.router.expert_bias
            bias.copy_(updated_bias(bias, load, self._settings.bias_update_rate))
