"""Checks answers of a server's ranks: one that is wrong, or differs from the others, is refused.

At the start they attest that the server is the one that was started and computes as the configuration asks for; in a
publication, which tensors they take, have staged, have copied and hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil

import slimx
from slimx.data.whole import Json
from slimx.engines.server.arguments import command_line
from slimx.engines.server.spec import EngineSpec, policy_args
from slimx.engines.server.wire import REFUSED, Wire, request
from slimx.errors import SlimxError
from slimx.layout.kernels import BLACKWELL, unpublishable
from slimx.layout.ranks import EngineSizes
from slimx.reshard.manifest import Encoding
from slimx.reshard.parties import PROTOCOL
from slimx.runtime.process import SupervisedProcess


async def attested(wire: Wire, spec: EngineSpec, process: SupervisedProcess | None) -> list[Json]:
    """The attestation of each rank of a server that generates. Raises SlimxError unless it is what `spec` asks for.

    `process`: None for a server that somebody else started.
    """
    ranks = await _attest(wire, spec.name)
    for rank in ranks:
        check_plugin(rank, spec.name)
    if process is None:
        await _check_arguments(wire, spec)
    else:
        _check_own(ranks, spec, process)
        await check_guarded(wire)
    check_ranks(ranks, spec)
    if not spec.frozen:
        check_backends(ranks, spec)
    return ranks


async def _attest(wire: Wire, name: str) -> list[Json]:
    """The attestation of each rank, or a SlimxError: SGLang swallows plugin failures, so silence is a refusal."""
    try:
        return await wire.ask("attest")
    except SlimxError as error:
        if error.code not in ("http.refused", "engine.no_plugin"):
            raise
        raise SlimxError(
            f"{wire.who} at {wire.url} does not attest the slimx plugin; start it with "
            f"python -m slimx.engines.server.launch in an environment where slimx is installed ({error})",
            code="engine.unattested",
            about=name,
        ) from None


def check_plugin(rank: Json, name: str) -> None:
    """Refuse a rank of engine `name` with another plugin than this one's, or of which a part is not in force."""
    if (rank["protocol"], rank["slimx"]) != (PROTOCOL, slimx.__version__):
        raise SlimxError(
            f"engine {name} runs slimx {rank['slimx']} (protocol {rank['protocol']}), the trainer "
            f"{slimx.__version__} (protocol {PROTOCOL}); install the same version on both sides",
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
            who=wire.who,
        )
        if status not in REFUSED:
            raise SlimxError(
                f"{wire.who} answers {method} {wire.url}{path} with {status} to anyone, without a "
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
            )
    if (role := info.get("disaggregation_mode", "null")) != ("null" if spec.role == "regular" else spec.role):
        raise SlimxError(
            f"engine {spec.name} at {spec.url} runs with disaggregation_mode={role!r}, and its group has the role "
            f"{spec.role}; change one of them",
        )


def check_ranks(ranks: list[Json], spec: EngineSpec) -> None:
    """Refuse a server of which a rank computes otherwise than the configuration asks for, or publications need."""
    for number, rank in enumerate(ranks):
        for fact, (found, expected, remedy) in _compared(rank, spec).items():
            if found != expected:
                raise SlimxError(
                    f"engine {spec.name} rank {number} attests {fact} {found}, the configuration asks for {expected}; "
                    f"{remedy}",
                    code=f"engine.{fact}",
                    about=f"{spec.name} rank {number}",
                )


def _compared(rank: Json, spec: EngineSpec) -> dict[str, tuple[Any, Any, str]]:
    """By fact what a rank attests, what it must attest, and what to do where that differs."""
    facts = {
        "dtype": (rank["dtype"], spec.dtype, "start it with that --dtype"),
        "adapters": (rank["adapters"], spec.form.contract(), "start it with the options that slimx starts others with"),
        "numerics": (
            rank["numerics"],
            spec.numerics.contract(spec.dtype),
            "start it as the run would, or set numerics.mode to what it has (None: fast)",
        ),
        "sizes": (EngineSizes(**rank["sizes"]), spec.sizes, "correct the sizes of its group in rollout.engines"),
    }
    if not spec.frozen:
        facts["draft"] = (rank["draft"], spec.draft, "start it with --publish-draft only where drafts are published")
    return facts


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
            )


# Answers to the verbs of a publication --------------------------------------------------------------------------------


def forms_of(name: str, ranks: Sequence[Json], encoding: Encoding) -> list[dict[str, str]]:
    """The inventory of engine `name`: one list per rank for "local", else one for all."""
    for number, rank in enumerate(ranks):
        if uncovered := rank["uncovered"]:
            parameter, why = next(iter(uncovered.items()))
            raise SlimxError(
                f"engine {name} rank {number} holds {len(uncovered)} parameters that slimx cannot publish, "
                f"first {parameter}: {why}; add a row to slimx/adapters/sglang/weights/layout.py",
                code="engine.uncovered",
                about=parameter,
            )
    if encoding == "local":
        return [rank["forms"] for rank in ranks]
    tensors: dict[str, str] = {}
    for number, rank in enumerate(ranks):
        for tensor, form in rank["forms"].items():
            if tensors.setdefault(tensor, form) != form:
                raise SlimxError(
                    f"engine {name}: ranks disagree on {tensor}: {tensors[tensor]}, but {form} on rank {number}",
                    code="engine.ranks_differ",
                    about=tensor,
                )
    return [tensors]


def check_staged(name: str, ranks: Sequence[Json]) -> None:
    """Refuse if a rank lacks a tensor of its model: the last look before the first copy."""
    for number, rank in enumerate(ranks):
        if rank["missing"]:
            raise SlimxError(
                f"engine {name} rank {number}: {rank['missing']} tensors of the model are not staged, "
                f"first {rank['first_missing']}; stage every tensor before loading",
                code="engine.not_staged",
                about=rank["first_missing"],
            )


def check_copied(name: str, ranks: Sequence[Json]) -> None:
    """Refuse if the copy has ended early on a rank."""
    for number, rank in enumerate(ranks):
        if error := rank["outcome"].get("error"):
            raise SlimxError(
                f"engine {name} rank {number}: the copy ended after {rank['outcome']['loaded']} tensors: {error}; "
                "publish again",
                code="engine.copy",
                about=name,
            )


def verified_by(name: str, ranks: Sequence[Json]) -> Json:
    """{checked: tensors, derived: [names of tensors that the model computed from them]}, of all ranks."""
    counts = [rank["tensors"] for rank in ranks]
    same_for_all = ranks[0]["encoding"] != "local"
    if same_for_all and len(set(counts)) > 1:
        raise SlimxError(
            f"engine {name}: ranks got {counts} tensors of one publication; publish again",
            code="engine.counts",
            about=name,
        )
    for key, how in (("differ", "differ from the published ones"), ("missing", "were never published")):
        if wrong := _of_all(ranks, key):
            raise SlimxError(
                f"engine {name}: {len(wrong)} tensors {how}, first {wrong[0]}; publish again or restart the engine",
                code="engine.unverified",
                about=wrong[0],
            )
    return {"checked": counts[0] if same_for_all else sum(counts), "derived": _of_all(ranks, "derived")}


def _of_all(ranks: Sequence[Json], key: str) -> list[str]:
    """The names that ranks list under `key`, each once."""
    return sorted({name for rank in ranks for name in rank[key]})
