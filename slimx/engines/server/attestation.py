"""Proof that a server is the one that was started and computes as asked, before the run uses it."""

from __future__ import annotations

import psutil

from slimx.engines.server.answers import Json
from slimx.engines.server.control import EngineControl
from slimx.engines.server.external import check_arguments
from slimx.engines.server.spec import EngineSpec
from slimx.errors import SlimxError
from slimx.layout.engine_kernels import BLACKWELL, unpublishable
from slimx.layout.ranks import EngineSizes
from slimx.runtime.process import ServerProcess


async def attested(control: EngineControl, spec: EngineSpec, process: ServerProcess) -> list[Json]:
    """The attestation of each rank of a server that generates. Raises SlimxError unless it is what `spec` asks for."""
    ranks = await control.attest()
    if spec.external:
        await check_arguments(control, spec)
    else:
        _check_own(ranks, spec, process)
        await control.check_guarded()
    if (dtype := ranks[0]["dtype"]) != spec.dtype:
        raise SlimxError(
            f"engine {spec.name} computes in {dtype}, the configuration asks for {spec.dtype}",
            code="engine.dtype",
            about=spec.name,
        )
    if not spec.frozen and ranks[0]["draft"] != spec.draft:
        with_or_without = "with" if spec.draft else "without"
        raise SlimxError(
            f"engine {spec.name} was to be started {with_or_without} --publish-draft, so that publications reach what "
            "drafts its tokens; start it so",
            code="engine.draft",
            about=spec.name,
        )
    check_adapters(ranks, spec)
    check_numerics(ranks, spec)
    if not spec.frozen:
        check_backends(ranks, spec)
    if (sizes := EngineSizes(**ranks[0]["sizes"])) != spec.sizes:
        raise SlimxError(
            f"engine {spec.name} runs as {sizes}, the configuration asks for {spec.sizes}",
            code="engine.sizes",
            about=spec.name,
        )
    return ranks


def check_adapters(ranks: list[Json], spec: EngineSpec) -> None:
    """Refuse a server that computes with other adapters than publications bring it."""
    wanted = None if spec.adapters is None else (spec.adapters.rank, spec.adapters.scales)
    for number, rank in enumerate(ranks):
        told = rank["adapters"] and (rank["adapters"]["rank"], rank["adapters"]["scales"])
        if told != wanted:
            raise SlimxError(
                f"engine {spec.name} rank {number} has adapters of (rank, scales) {told}, publications bring {wanted}; "
                "start it as slimx does, with --publish-adapters and --max-lora-rank",
                code="engine.adapters",
                about=f"{spec.name} rank {number}",
            )


def check_numerics(ranks: list[Json], spec: EngineSpec) -> None:
    """Refuse a server whose ranks compute by another contract than the trainer does."""
    wanted = spec.numerics.contract(spec.dtype)
    for number, rank in enumerate(ranks):
        if (told := rank["numerics"]) != wanted:
            raise SlimxError(
                f"engine {spec.name} rank {number} computes by {_said(told)}, the trainer by {_said(wanted)}; start it "
                "as the run would, or set numerics.mode to what it has",
                code="engine.numerics",
                about=f"{spec.name} rank {number}",
            )


def check_backends(ranks: list[Json], spec: EngineSpec) -> None:
    """Refuse a server whose kernels, as SGLang resolved them, compute with other bytes than a publication writes."""
    for number, rank in enumerate(ranks):
        if rank["capability"] is None or rank["capability"] < BLACKWELL or spec.numerics.replaces_layers:
            continue
        for field, plain in unpublishable(rank["backends"], experts=rank["experts"], fp8=rank["fp8"]):
            raise SlimxError(
                f"engine {spec.name} rank {number} resolved {field} to {rank['backends'][field]!r}, with which weights "
                f"are not kept as they are published; set rollout.engines.sglang.{field}={plain}",
                code="engine.backend",
                about=field,
            )


def _check_own(ranks: list[Json], spec: EngineSpec, process: ServerProcess) -> None:
    """Refuse the answer of somebody else's server, which may have taken the port before ours could listen on it.

    Ranks on other machines are those that met this machine's at an address that nobody else was told.
    """
    family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    here = spec.sizes.world // (spec.node.count if spec.node else 1)
    for rank in ranks[:here]:
        if rank["pid"] not in family:
            raise SlimxError(
                f"engine {spec.name}: process {rank['pid']} answers at {spec.url}, which is not the one that was "
                f"started; another server has the port: start again (log {process.log_path})",
                code="engine.foreign",
                about=spec.url,
            )


def _said(numerics: Json | None) -> str:
    """A contract of numerics, or its absence, in words."""
    return "no contract (numerics.mode fast)" if numerics is None else f"the contract {numerics}"
