"""Brings tensors that trainer ranks hold in parts into one file, by the same code that exports weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_tensors(path: Path, tensors: dict[str, Any], spec: Any, parallel: Any, attached: Any = None) -> None:
    """Gather one tensor per parameter (by local name, like it) into `path`, under Hugging Face names; collective.
    `attached`: the `AttachedForm` of a rank of which these are the weights; None: the plain form."""
    import torch.distributed as dist

    from slimx.layout.form import AttachedForm
    from slimx.layout.megatron import MegatronLayout
    from slimx.layout.number_formats import Precision
    from slimx.layout.table import checkpoint_parts
    from slimx.models.files.writer import write_bucket
    from slimx.reshard.pack.gather import Gatherer
    from slimx.reshard.pack.packer import Packer, describe
    from slimx.reshard.packed import PUBLISHER
    from slimx.reshard.plan.copy_plan import compile_plan

    plan = compile_plan(
        MegatronLayout(spec.table, parallel.sizes).parts(),
        checkpoint_parts(spec.table),
        precision=Precision("float32", "float32"),
        bucket_bytes=2**30,
    )
    form = AttachedForm() if attached is None else attached
    leaving, derived = form.leaving("export", plan, parallel.rank, tensors)
    packer = Packer(plan, parallel.rank, leaving, derived=derived)
    group, world = parallel.host_group, parallel.sizes.world
    # The last rank as one on another machine: it sends its part.
    gatherer = Gatherer(packer, remote=[world - 1] if world > 1 else [], group=group)
    opened = [list(gatherer.open(0).values()) if parallel.rank == PUBLISHER else []]
    dist.broadcast_object_list(opened, src=PUBLISHER, group=group)
    shares = [None] * world
    dist.all_gather_object(shares, gatherer.fill(0, opened[0]), group=group)
    if parallel.rank == PUBLISHER:
        write_bucket(describe(packer.form(0), opened[0], shares), str(path), spec.table)
    group.barrier().wait()
    gatherer.release()
