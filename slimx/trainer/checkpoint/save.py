"""Saves checkpoints during training: all ranks copy their state to host memory together, and then each rank writes its
copy in a background thread.

    all ranks together                 each rank's background thread                   driver
    ------------------                 -----------------------------                   ------
    state -> plan -> host copies  -->  write files -> digests -> report
    (training continues)               rank 0: all reports -> .metadata -> its report  all reports -> commit

After the copy, ranks use no collectives, which could interleave with those of training: they synchronize through the
reports in the checkpoint directory. The plan, which defines where each shard is stored, is gathered once and reused
until it changes.

megatron-core's asynchronous writer is not used: that writer starts a process that outlives a killed trainer.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from slimx.errors import DeadlineError, SlimxError, raised
from slimx.trainer.checkpoint import files

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

_POLL_S = 0.1
_JOIN_S = 30.0
"""Seconds to wait for the thread of a save to exit after it has written its report."""

Content = torch.Tensor | io.BytesIO


class Saver:
    """Writer of this rank's part of successive checkpoints. `group`: process group of all ranks for tensors in host
    memory (gloo). `deadline_s`: seconds that rank 0 waits for the reports of other ranks. `holder`: name of the rank
    group in messages."""

    def __init__(self, *, rank: int, world: int, group: dist.ProcessGroup, deadline_s: float, holder: str = "trainer"):
        self.rank = rank
        self.world = world
        self.group = group
        self.deadline_s = deadline_s
        self.holder = holder
        self._distribution: object = None
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        """Metadata of the complete checkpoint, on rank 0; None on other ranks."""
        self._host = HostCopies()
        self._thread: threading.Thread | None = None
        self.failure: SlimxError | None = None
        """Error of a failed save that could not even be reported in the checkpoint directory; `TrainerRank.check_saves`
        raises this error."""

    def begin(self, directory: Path, state: ShardedStateDict) -> None:
        """Copies `state` to host memory and starts a thread that writes it to `directory`. Collective. When this
        returns, the state may change again. The thread reports success or failure in the directory
        (`files.read_report`)."""
        self._settle()
        sharded, common = save_preprocess(state, validate_access_integrity=self._plan is None)
        # Data-parallel ranks write equal shares of what all of them have, as Megatron-LM does by default.
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if self._plan is None:
            self._distribution = determine_main_replica_uniform_distribution(sharded, group)
        distribute_main_replicas_with_precomputed_distribution(sharded, group, self._distribution)
        plan, contents = self._planned(sharded)
        contents = self._host.copy(contents)
        serialized = io.BytesIO()
        torch.save(common, serialized)
        work = (directory, plan, contents, serialized.getvalue())
        self._thread = threading.Thread(target=self._write, args=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _settle(self) -> None:
        """Waits until the thread of the previous save has ended. Raises SlimxError if the thread does not end in
        time."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                raise SlimxError(
                    f"{self.holder} rank {self.rank} has not finished writing the previous checkpoint; see the rank's "
                    "log, and save to a faster disk or less often (checkpoint.every, checkpoint.every_seconds)",
                )

    def _planned(self, sharded: ShardedStateDict) -> tuple[SavePlan, dict[MetadataIndex, Content]]:
        """Returns this rank's plan for a save, and the content to write for each index in the plan. If any rank's plan
        has changed since the last save, the plans of all ranks are gathered again."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planner.set_up_planner(mcore_to_pyt_state_dict(flat), is_coordinator=self.rank == 0)
        plan = planner.create_local_plan()
        changed = torch.tensor([self._plan is None or plan.items != self._plan.items], dtype=torch.int32)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self.group)
        if changed.item():
            plans = [None] * self.world if self.rank == 0 else None
            dist.gather_object(plan, plans, dst=0, group=self.group)
            if plans is not None:
                _, self._metadata = planner.create_global_plan(plans)
            self._plan = plan
        return plan, {item.index: planner.resolve_data(item) for item in plan.items}

    # In the background ------------------------------------------------------------------------------------------------

    def _write(self, directory: Path, plan: SavePlan, contents: dict[MetadataIndex, Content], common: bytes) -> None:
        """Writes this rank's part of a checkpoint, in the background thread. Failures are reported in the checkpoint
        directory instead of raised, because no caller waits for the thread. `common`: serialized state shared by all
        ranks."""
        try:
            files.reserve_failure(directory, self.rank)
            report = self._write_shards(directory, plan, contents)
            if self.rank == 0:
                report = self._complete(directory, report, common)
            files.write_report(directory, self.rank, report)
        except BaseException as error:
            reason = " ".join(raised(error).split())[:500]
            reason += (
                f"; this rank writes {_nbytes(contents)} bytes, and only {shutil.disk_usage(directory).free} are free"
            )
            try:
                files.write_failure(directory, self.rank, reason)
            except OSError:
                self.failure = files.write_error(directory, f"{self.holder} rank {self.rank}", reason)

    def _write_shards(self, directory: Path, plan: SavePlan, contents: dict[MetadataIndex, Content]) -> files.Report:
        # Nothing is copied ahead, because everything is on the host already.
        writer = FileSystemWriter(directory, sync_files=True, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(self.rank == 0, rank=self.rank, use_collectives=False)
        source = cast("SavePlanner", _Contents(contents))  # the writer calls only its `resolve_data`
        results = writer.write_data(writer.prepare_local_plan(plan), source).value()
        items = [_item(result) for result in results]
        names = sorted({item.file for item in items})
        return files.Report({name: files.record(directory / name) for name in names}, items)

    def _complete(self, directory: Path, report: files.Report, common: bytes) -> files.Report:
        """Waits for the reports of all other ranks and writes the files that only rank 0 writes: `.metadata` with the
        locations of all shards, the state shared by all ranks, and the name of the format. Returns `report` extended
        with the files that rank 0 wrote."""
        others = range(1, self.world)
        self._await(directory, others)
        assert self._metadata is not None
        reports = [report, *(files.read_report(directory, rank) for rank in others)]
        results = [[_result(item) for item in rank_report.items] for rank_report in reports]
        # `finish` modifies its argument, and the cached metadata must stay unchanged.
        FileSystemWriter(directory, sync_files=True).finish(dataclasses.replace(self._metadata), results)
        files.write(directory / "common.pt", common)
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))
        added = {name: files.record(directory / name) for name in (".metadata", "common.pt", "metadata.json")}
        return files.Report(report.files | added, report.items)

    def _await(self, directory: Path, ranks: range) -> None:
        end = time.monotonic() + self.deadline_s
        while missing := files.unreported(directory, ranks, self.holder):
            if time.monotonic() > end:
                late = ", ".join(f"{self.holder} rank {rank}" for rank in missing)
                raise DeadlineError(f"the files of the checkpoint {directory}", self.deadline_s, late)
            time.sleep(_POLL_S)


class HostCopies:
    """Copies of tensors in host memory, so that training may change the originals. Tensors on the device are copied to
    pinned memory that later saves reuse, because allocating pinned memory takes longer than copying."""

    def __init__(self) -> None:
        self._pinned: dict[MetadataIndex, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def copy(self, contents: Mapping[MetadataIndex, Content]) -> dict[MetadataIndex, Content]:
        """Returns `contents` with a copy of each tensor. Objects are not copied, because they are already
        serialized."""
        out: dict[MetadataIndex, Content] = {}
        on_device: dict[MetadataIndex, torch.Tensor] = {}
        for index, value in contents.items():
            if not isinstance(value, torch.Tensor):
                out[index] = value
            elif value.is_cuda:
                on_device[index] = value
            else:
                out[index] = value.clone()
        if on_device:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for index, tensor in on_device.items():
                    out[index] = self._buffer(index, tensor).copy_(tensor, non_blocking=True)
            self._stream.synchronize()
        return out

    def _buffer(self, index: MetadataIndex, like: torch.Tensor) -> torch.Tensor:
        buffer = self._pinned.get(index)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            self._pinned[index] = buffer
        return buffer


class _Contents:
    """Stand-in for torch's save planner that has only the method that torch's writer calls."""

    def __init__(self, contents: dict[MetadataIndex, Content]):
        self._contents = contents

    def resolve_data(self, item: WriteItem) -> Content:
        return self._contents[item.index]


def _nbytes(contents: Mapping[MetadataIndex, Content]) -> int:
    total = 0
    for content in contents.values():
        total += content.nbytes if isinstance(content, torch.Tensor) else content.getbuffer().nbytes
    return total


def _item(result: WriteResult) -> files.Item:
    storage = result.storage_data
    offset = result.index.offset
    return files.Item(
        result.index.fqn,
        None if offset is None else list(offset),
        storage.relative_path,
        storage.offset,
        storage.length,
    )


def _result(item: files.Item) -> WriteResult:
    offset = None if item.offset is None else torch.Size(item.offset)
    storage = _StorageInfo(item.file, item.position, item.length)
    return WriteResult(index=MetadataIndex(item.key, offset), size_in_bytes=item.length, storage_data=storage)
