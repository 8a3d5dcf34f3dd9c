"""Saving without stopping: the state is copied into host memory together, each rank writes its copy on its own.

    all ranks together                 each rank's background thread                   driver
    ------------------                 -----------------------------                   ------
    state -> plan -> host copies  -->  write files -> digests -> report
    (training goes on)                 rank 0: all reports -> .metadata -> its report  all reports -> commit

What follows the copy uses no collective, so it cannot get between those of training; ranks hear of each other through
the reports in the checkpoint's directory. The plan is compared between ranks once and kept while it stays the same.

megatron-core's own asynchronous writer is not used: it starts a process that outlives a killed trainer.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
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

from slimx.errors import DeadlineError, SlimxError
from slimx.trainer.checkpoint import files

_POLL_S = 0.1
_JOIN_S = 30.0
"""Seconds in which the thread of a reported save must have ended."""

Content = torch.Tensor | io.BytesIO


class Saver:
    """Writes this rank's part of one checkpoint after the other. `group`: all ranks, on the host; they are called
    `holder` ranks."""

    def __init__(self, *, rank: int, world: int, group: dist.ProcessGroup, deadline_s: float, holder: str = "trainer"):
        self.rank, self.world, self.group, self.deadline_s = rank, world, group, deadline_s
        self.holder = holder
        self._distribution: Any = None
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        """Metadata of the whole checkpoint; on rank 0 only."""
        self._host = HostCopies()
        self._thread: threading.Thread | None = None
        self.failure: SlimxError | None = None
        """Error of a save that could not even report it, for whoever asks this rank."""

    def begin(self, directory: Path, state: dict[str, Any]) -> None:
        """Copy `state` and start writing it into `directory`; collective. Returns when the state may change again.

        What becomes of the writing stands in the reports (`files.read_reports`).
        """
        self._settle()
        sharded, common = save_preprocess(state, validate_access_integrity=self._plan is None)
        # Replicas are written by all data-parallel ranks in equal shares, as Megatron-LM does by default.
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
        """The thread of the save before has reported, so it is about to end."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                raise SlimxError(
                    f"{self.holder} rank {self.rank} is still writing the checkpoint before; see its log",
                )

    def _planned(self, sharded: dict[str, Any]) -> tuple[SavePlan, dict[MetadataIndex, Content]]:
        """This rank's plan, and what it writes by index. A plan that changed on any rank is gathered again."""
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
        """The thread's work; a failure is reported, not raised: nobody waits for a thread."""
        try:
            files.reserve_failure(directory, self.rank)
            report = self._write_shards(directory, plan, contents)
            if self.rank == 0:
                report = self._complete(directory, report, common)
            files.write_report(directory, self.rank, report)
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            reason += f"; it writes {_nbytes(contents)} bytes, and {shutil.disk_usage(directory).free} are free"
            try:
                files.write_failure(directory, self.rank, reason)
            except OSError:
                self.failure = files.unwritten(directory, f"{self.holder} rank {self.rank}", reason)

    def _write_shards(self, directory: Path, plan: SavePlan, contents: dict[MetadataIndex, Content]) -> files.Report:
        # Nothing is copied ahead: it is on the host already.
        writer = FileSystemWriter(directory, sync_files=True, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(self.rank == 0, rank=self.rank, use_collectives=False)
        results = writer.write_data(writer.prepare_local_plan(plan), _Contents(contents)).value()
        items = [_item(result) for result in results]
        return files.Report({name: files.record(directory / name) for name in sorted({i.file for i in items})}, items)

    def _complete(self, directory: Path, own: files.Report, common: bytes) -> files.Report:
        """Add what rank 0 writes alone: all places in `.metadata`, the state that no rank splits, and the format."""
        others = range(1, self.world)
        self._await(directory, others)
        assert self._metadata is not None
        reports = [own, *(files.read_report(directory, rank) for rank in others)]
        places = [[_result(item) for item in report.items] for report in reports]
        # finish fills its argument in; the kept one must not change under a reader.
        FileSystemWriter(directory, sync_files=True).finish(dataclasses.replace(self._metadata), places)
        files.write(directory / "common.pt", common)
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))
        added = {name: files.record(directory / name) for name in (".metadata", "common.pt", "metadata.json")}
        return files.Report(own.files | added, own.items)

    def _await(self, directory: Path, ranks: range) -> None:
        end = time.monotonic() + self.deadline_s
        while missing := files.unreported(directory, ranks, self.holder):
            if time.monotonic() > end:
                late = ", ".join(f"{self.holder} rank {rank}" for rank in missing)
                raise DeadlineError(f"the files of the checkpoint {directory}", self.deadline_s, late)
            time.sleep(_POLL_S)


class HostCopies:
    """Copies that training cannot change. Those of device memory lie in pinned memory, which is kept from save to save:
    taking it from the system takes longer than the copy."""

    def __init__(self) -> None:
        self._pinned: dict[MetadataIndex, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def copy(self, contents: Mapping[MetadataIndex, Content]) -> dict[MetadataIndex, Content]:
        """Each tensor's copy under the same index; objects are serialized already and belong to nobody else."""
        out: dict[MetadataIndex, Content] = {}
        device = {index for index, value in contents.items() if isinstance(value, torch.Tensor) and value.is_cuda}
        for index, value in contents.items():
            if index not in device:
                out[index] = value.clone() if isinstance(value, torch.Tensor) else value
        if device:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for index in device:
                    out[index] = self._buffer(index, contents[index]).copy_(contents[index], non_blocking=True)
            self._stream.synchronize()
        return out

    def _buffer(self, index: MetadataIndex, like: torch.Tensor) -> torch.Tensor:
        kept = self._pinned.get(index)
        if kept is None or kept.shape != like.shape or kept.dtype != like.dtype:
            kept = self._pinned[index] = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        return kept


class _Contents:
    """The one method of a planner that torch's writer calls."""

    def __init__(self, contents: dict[MetadataIndex, Content]):
        self._contents = contents

    def resolve_data(self, item: Any) -> Content:
        return self._contents[item.index]


def _nbytes(contents: Mapping[MetadataIndex, Content]) -> int:
    return sum(c.nbytes if isinstance(c, torch.Tensor) else c.getbuffer().nbytes for c in contents.values())


def _item(result: WriteResult) -> files.Item:
    place, offset = result.storage_data, result.index.offset
    return files.Item(
        result.index.fqn,
        None if offset is None else list(offset),
        place.relative_path,
        place.offset,
        place.length,
    )


def _result(item: files.Item) -> WriteResult:
    offset = None if item.offset is None else torch.Size(item.offset)
    place = _StorageInfo(item.file, item.position, item.length)
    return WriteResult(index=MetadataIndex(item.key, offset), size_in_bytes=item.length, storage_data=place)
