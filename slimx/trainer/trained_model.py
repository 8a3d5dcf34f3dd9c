"""A trained model on one rank: base class with the common parts of policy and critic, without their forward and
backward passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

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
    """Modules, weights and optimizer of one rank; saves and restores them, and offloads them to the host."""

    def __init__(
        self,
        config: Config,
        parallel: ParallelState,
        chunks: list[DistributedDataParallel],
        weights: Weights,
        optimizer: ChainedOptimizer,
        holder: str,
    ):
        """Creates the model of one rank from its parts. `config`: configuration whose `trainer` section describes this
        model. `holder`: name of the rank group with this model, for messages."""
        self.config = config
        self.parallel = parallel
        self.chunks = chunks
        self.weights = weights
        self.optimizer = optimizer
        self.offloading = Offload(chunks, optimizer, parallel.device, rounding_of(config.trainer))
        self.context = ContextShard(parallel.sizes.context, parallel.coordinates.context, parallel.context_group)
        self.saver = Saver(
            rank=parallel.rank,
            world=parallel.sizes.world,
            group=parallel.host_group,
            deadline_s=config.checkpoint.deadline,
            holder=holder,
        )
        self.on_moved: list[Callable[[], None]] = []
        """Functions that are called when parameters may have new addresses in memory."""
        settings = chunks[0].config
        settings.finalize_model_grads_func = sum_gradients
        settings.grad_scale_func = optimizer.scale_loss
        if chunks[0].ddp_config.overlap_grad_reduce:
            contexts = [chunk.no_sync for chunk in chunks]
            settings.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
        self._gather()  # before a pass may use other weights

    @operation("save", needs="training")
    def save(self, path: str, *, step: int) -> None:
        """Copies the state after `step` steps, and starts writing this rank's part of it into the checkpoint directory
        `path`."""
        frozen = bool(self.config.trainer.frozen)
        data_size = self.parallel.sizes.data
        state = full_state(self.chunks, self.optimizer, step=step, data_size=data_size, frozen=frozen)
        self.saver.begin(Path(path), state)

    @operation("restore", needs="training")
    def restore(self, path: str, *, same_layout: bool, load_optimizer: bool = True) -> None:
        """Restores the state from the checkpoint in `path`; see `slimx.trainer.checkpoint.load.restore`."""
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
        """Compares files of the checkpoint in `path` with `records`, the encoded sizes and digests of these files.
        Raises SlimxError naming a file that differs."""
        check_digests(Path(path), decode_records(records))

    def offload(self, *, weights: bool = True) -> None:
        """Moves weights and optimizer state to the host and frees the gradients, so that engines can use the device.
        `weights=False`: the weights stay on the device, because they must still be published. `reload` reverts this."""
        if self.config.trainer.offload:
            freed = self.offloading.offload(weights=weights)
            print(
                f"slimx: offloaded {freed / 2**20:.1f} MiB; now on the host: {' and '.join(self.offloading.away)}",
                flush=True,
            )

    def reload(self, *, training: bool = True) -> None:
        """Moves the weights back to the device and, if `training` is true, the gradients and optimizer state as
        well."""
        if self.offloading.away:
            self.offloading.reload(training=training)
            for notify in self.on_moved:
                notify()

    def device_bytes(self) -> dict[str, int]:
        """Returns the number of bytes on the device that weights, gradients and optimizer state occupy, and the sizes
        of the largest parameters by name."""
        named = {name: parameter.nbytes for name, parameter in self.weights.parameters.items()}
        return self.offloading.sizes() | largest(named)

    def _gather(self) -> None:
        """Completes the weights on every rank after a step (with `overlap_param_gather` they are incomplete before the
        next forward pass), so that publications, checkpoints and other operations can read them. Collective."""
        gather(self.chunks)

    def _local(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Returns each micro-batch with only the tokens of this context-parallel rank."""
        return [self.context.take(batch) for batch in batches]

    def _zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
