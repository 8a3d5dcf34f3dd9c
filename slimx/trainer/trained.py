"""A model that is trained on one rank: what policy and critic have in common besides their passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimx.adapters.megatron.param_gather import gather
from slimx.config.schema import Config
from slimx.data.batch import MicroBatch
from slimx.numerics.rounding import rounding_of
from slimx.trainer.checkpoint.files import check_digests, decode_records
from slimx.trainer.checkpoint.load import restore
from slimx.trainer.checkpoint.save import Saver
from slimx.trainer.checkpoint.state import full_state
from slimx.trainer.context import ContextShard
from slimx.trainer.device.gpu import largest
from slimx.trainer.device.offload import Offload
from slimx.trainer.model.weights import Weights
from slimx.trainer.operation import operation
from slimx.trainer.parallel import ParallelState
from slimx.trainer.step.forward_backward import sum_gradients


class TrainedModel:
    """Chunks, weights and optimizer of one rank, their checkpoints, and their way to the host and back."""

    def __init__(
        self, config: Config, parallel: ParallelState, chunks: list[Any], weights: Weights, optimizer: Any, holder: str
    ):
        """`config`: its `trainer` section is the model's own. `holder`: name of the ranks in messages."""
        self.config, self.parallel = config, parallel
        self.chunks, self.weights, self.optimizer = chunks, weights, optimizer
        self.offloading = Offload(chunks, optimizer, parallel.device, rounding_of(config.trainer))
        self.context = ContextShard(parallel.sizes.context, parallel.place.context, parallel.context_group)
        self.saver = Saver(
            rank=parallel.rank,
            world=parallel.sizes.world,
            group=parallel.host_group,
            deadline_s=config.checkpoint.deadline,
            holder=holder,
        )
        self.on_moved: list[Callable[[], None]] = []
        """Called when parameters have other addresses."""
        settings = chunks[0].config
        settings.finalize_model_grads_func = sum_gradients
        settings.grad_scale_func = optimizer.scale_loss
        if chunks[0].ddp_config.overlap_grad_reduce:
            several = [chunk.no_sync for chunk in chunks]
            settings.no_sync_func = several if len(several) > 1 else several[0]
        self._gather()  # the first pass may be under other weights than these

    @operation("save", needs="training")
    def save(self, path: str, *, step: int) -> None:
        """Copy the state after step `step` and start writing this rank's part of it into `path`."""
        frozen, data_size = bool(self.config.trainer.frozen), self.parallel.sizes.data
        state = full_state(self.chunks, self.optimizer, step=step, data_size=data_size, frozen=frozen)
        self.saver.begin(Path(path), state)

    @operation("restore", needs="training")
    def restore(self, path: str, *, same_layout: bool, load_optimizer: bool = True) -> None:
        """Continue from the checkpoint in `path`."""
        restore(
            Path(path),
            self.chunks,
            self.optimizer,
            same_layout=same_layout,
            load_optimizer=load_optimizer,
            frozen=bool(self.config.trainer.frozen),
        )
        self.weights.changed()

    @operation()
    def check_files(self, records: bytes, *, path: str) -> None:
        """Compare files of the checkpoint `path` with their records, name by name. Raises SlimxError naming one."""
        check_digests(Path(path), decode_records(records))

    def offload(self, *, weights: bool = True) -> None:
        """Give the device's memory back while engines generate: gradients and optimizer state, and the weights unless
        they are still to be published. They come back by `reload`."""
        if self.config.trainer.offload:
            given = self.offloading.offload(weights=weights)
            print(
                f"slimx: offloaded {given / 2**20:.1f} MiB, on the host: {' and '.join(self.offloading.away)}",
                flush=True,
            )

    def reload(self, *, training: bool = True) -> None:
        """Take back what `offload` gave away: the weights, and with `training` all the rest."""
        if self.offloading.away:
            self.offloading.reload(training=training)
            for moved in self.on_moved:
                moved()

    def holds(self) -> dict[str, int]:
        """Bytes on the device by kind, and the largest parameters by name."""
        named = {name: parameter.nbytes for name, parameter in self.weights.parameters.items()}
        return self.offloading.sizes() | largest(named)

    def _gather(self) -> None:
        """End a step: the weights become whole on every rank, for publications, checkpoints and all else that reads
        them. Collective."""
        gather(self.chunks)

    def _local(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """This context-parallel rank's tokens of each micro-batch."""
        return [self.context.take(batch) for batch in batches]

    def _zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
