"""Proof that a server is the one that was started and computes as asked, before the run uses it."""

from __future__ import annotations

import psutil

import slimx
from slimx.engines.server.arguments import command_line
from slimx.engines.server.spec import EngineSpec, policy_args
from slimx.engines.server.wire import REFUSED, Json, RanksUnheard, Wire, request
from slimx.errors import DeadlineError, SlimxError
from slimx.layout.engine_kernels import BLACKWELL, unpublishable
from slimx.layout.ranks import EngineSizes
from slimx.reshard.parties import PROTOCOL
from slimx.runtime.process import SupervisedProcess


async def attested(wire: Wire, spec: EngineSpec, process: SupervisedProcess | None) -> list[Json]:
    """The attestation of each rank of a server that generates. Raises SlimxError unless it is what `spec` asks for.

    `process`: None for a server that somebody else started.
    """
    ranks = await _asked(wire)
    for rank in ranks:
        check_plugin(rank, spec.name)
    if process is None:
        await _check_arguments(wire, spec)
    else:
        _check_own(ranks, spec, process)
        await check_guarded(wire)
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


async def _asked(wire: Wire) -> list[Json]:
    """The attestation of each rank, or a SlimxError: SGLang swallows plugin failures, so silence is a refusal."""
    try:
        return await wire.ask("attest")
    except (DeadlineError, RanksUnheard):
        raise
    except SlimxError as error:
        raise SlimxError(
            f"engine {wire.name} at {wire.url} does not attest the slimx plugin; start it with "
            f"python -m slimx.engines.server.launch in an environment where slimx is installed ({error})",
            code="engine.unattested",
            about=wire.name,
        ) from None


def check_plugin(rank: Json, name: str) -> None:
    """Refuse a rank of engine `name` with another plugin than this one's, or of which a part is not in force."""
    if (rank["protocol"], rank["slimx"]) != (PROTOCOL, slimx.__version__):
        raise SlimxError(
            f"engine {name} runs slimx {rank['slimx']} (protocol {rank['protocol']}), the trainer "
            f"{slimx.__version__} (protocol {PROTOCOL}); install the same version on both sides",
            code="engine.protocol",
            about=name,
        )
    parts = rank["hooks"] | (rank["cpu"] or {})
    if failed := [part for part, in_force in parts.items() if not in_force]:
        raise SlimxError(
            f"engine {name}: parts of the slimx plugin are not in force in process {rank['pid']}: "
            f"{', '.join(failed)}; SGLang's log says why (search for 'plugin')",
            code="engine.plugin_part",
            about=", ".join(failed),
        )


async def check_guarded(wire: Wire) -> None:
    """Refuse a server that answers without a key: its keys must be in force for generation and for control."""
    for method, path in (("GET", "/model_info"), ("POST", "/weights_checker")):
        status, _ = await request(
            method,
            wire.url + path,
            {"action": "slimx.status"},
            deadline_s=wire.deadline_s,
            headers={},
            who=f"engine {wire.name}",
        )
        if status not in REFUSED:
            raise SlimxError(
                f"engine {wire.name} answers {method} {wire.url}{path} with {status} to whoever asks, without a "
                "key; leave the arguments out of rollout.engines.sglang that have it do so",
                code="engine.unguarded",
                about=path,
            )


async def _check_arguments(wire: Wire, spec: EngineSpec) -> None:
    """Refuse a server of the policy that somebody else started without what slimx needs of it."""
    info = await wire.call("/server_info", method="GET", key=spec.keys.api_key)
    needed = policy_args(spec)
    for name, value in needed.items():
        if value and info.get(name) != value:
            flags = " ".join(command_line(needed))
            raise SlimxError(
                f"engine {spec.name} at {spec.url} runs with {name}={info.get(name)!r}, slimx needs {value!r}; "
                f"start it with python -m slimx.engines.server.launch -- ... {flags}",
                code="external.argument",
                about=name,
            )
    if (role := info.get("disaggregation_mode", "null")) != ("null" if spec.role == "regular" else spec.role):
        raise SlimxError(
            f"engine {spec.name} at {spec.url} runs with disaggregation_mode={role!r}, and its group has the role "
            f"{spec.role}; change one of them",
            code="external.role",
            about=spec.url,
        )


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
    wanted = None
    if spec.exact_leaves is not None:
        from slimx.numerics.exact.contract import contract  # imports torch: 1.5 s of an actor that needs it nowhere

        wanted = contract(leaves=spec.exact_leaves, dtype=spec.dtype)
    for number, rank in enumerate(ranks):
        if (told := rank["numerics"]) != wanted:
            raise SlimxError(
                f"engine {spec.name} rank {number} computes by {_said(told)}, the trainer by {_said(wanted)}; start it "
                "with the --exact-leaves of the run, or set numerics.mode to what it has",
                code="engine.numerics",
                about=f"{spec.name} rank {number}",
            )


def check_backends(ranks: list[Json], spec: EngineSpec) -> None:
    """Refuse a server whose kernels, as SGLang resolved them, compute with other bytes than a publication writes."""
    for number, rank in enumerate(ranks):
        if rank["capability"] is None or rank["capability"] < BLACKWELL or spec.exact_leaves is not None:
            continue
        for field, plain in unpublishable(rank["backends"], experts=rank["experts"], fp8=rank["fp8"]):
            raise SlimxError(
                f"engine {spec.name} rank {number} resolved {field} to {rank['backends'][field]!r}, with which weights "
                f"are not kept as they are published; set rollout.engines.sglang.{field}={plain}",
                code="engine.backend",
                about=field,
            )


def _check_own(ranks: list[Json], spec: EngineSpec, process: SupervisedProcess) -> None:
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
    """A contract of exact mode, or its absence, in words."""
    return "no contract (numerics.mode fast)" if numerics is None else f"the exact contract {numerics}"
