"""Checks the responses of a server's ranks and refuses one that is wrong or differs from the others.

At startup the ranks attest that the server is the one that was started and computes as configured; during a
publication, which tensors they accept, have staged, have copied and hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import psutil

import slimx
from slimx.engines.server.arguments import command_line
from slimx.engines.server.http_calls import REFUSED, ControlClient, request
from slimx.engines.server.spec import EngineSpec, policy_args
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.kernels import BLACKWELL, unpublishable
from slimx.layout.ranks import EngineSizes
from slimx.reshard.manifest import Encoding
from slimx.reshard.parties import PROTOCOL
from slimx.runtime.process import SupervisedProcess


async def attested(wire: ControlClient, spec: EngineSpec, process: SupervisedProcess | None) -> list[Json]:
    """Returns the attestation of each rank of a server that generates. Raises SlimxError if one does not match `spec`.

    `process`: None for an external server.
    """
    ranks = await _attest(wire, spec.name)
    for rank in ranks:
        check_plugin(rank, spec.name)
    if process is None:
        await _check_arguments(wire, spec)
    else:
        _check_process(ranks, spec, process)
        await check_guarded(wire)
    check_ranks(ranks, spec)
    if not spec.frozen:
        check_backends(ranks, spec)
    return ranks


async def _attest(wire: ControlClient, name: str) -> list[Json]:
    """Returns the attestation of each rank. Raises SlimxError if the plugin does not respond: SGLang swallows plugin
    failures."""
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
    """Raises SlimxError if a rank of engine `name` runs another slimx version, or a part of its plugin is not in
    force."""
    if rank["protocol"] != PROTOCOL or rank["slimx"] != slimx.__version__:
        raise SlimxError(
            f"engine {name} runs slimx {rank['slimx']} (protocol {rank['protocol']}), the trainer "
            f"{slimx.__version__} (protocol {PROTOCOL}); install the same version on both sides",
        )
    parts = rank["hooks"] | (rank["cpu"] or {})
    failed = [part for part, in_force in parts.items() if not in_force]
    if failed:
        raise SlimxError(
            f"engine {name}: parts of the slimx plugin are not in force in process {rank['pid']}: "
            f"{', '.join(failed)}; SGLang's log says why (search for 'plugin')",
            code="engine.plugin_part",
            about=", ".join(failed),
        )


async def check_guarded(wire: ControlClient) -> None:
    """Raises SlimxError if the server answers without a key, for generation or for control calls."""
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
                f"{wire.who} answers {method} {wire.url}{path} with {status} without a "
                "key; remove the arguments from rollout.engines.sglang that disable keys",
                code="engine.unguarded",
                about=path,
            )


async def _check_arguments(wire: ControlClient, spec: EngineSpec) -> None:
    """Raises SlimxError if an external server of the policy runs without arguments that slimx requires."""
    info = await wire.call("/server_info", method="GET", key=spec.keys.api_key)
    needed = policy_args(spec)
    for name, value in needed.items():
        if value and info.get(name) != value:
            flags = " ".join(command_line(needed))
            raise SlimxError(
                f"engine {spec.name} at {spec.url} runs with {name}={info.get(name)!r}, slimx needs {value!r}; "
                f"start it with python -m slimx.engines.server.launch -- ... {flags}",
            )
    role = info.get("disaggregation_mode", "null")
    expected = "null" if spec.role == "regular" else spec.role
    if role != expected:
        raise SlimxError(
            f"engine {spec.name} at {spec.url} runs with disaggregation_mode={role!r}, and its group has the role "
            f"{spec.role}; change one of them",
        )


def check_ranks(ranks: list[Json], spec: EngineSpec) -> None:
    """Raises SlimxError if a rank computes differently from what the configuration or publications require."""
    for index, rank in enumerate(ranks):
        for fact in _facts(rank, spec):
            if fact.attested != fact.expected:
                raise SlimxError(
                    f"engine {spec.name} rank {index} attests {fact.name} {fact.attested}, the configuration requires "
                    f"{fact.expected}; {fact.remedy}",
                    code=f"engine.{fact.name}",
                    about=f"{spec.name} rank {index}",
                )


class Fact(NamedTuple):
    """A property that a rank attests, with its expected value."""

    name: str
    attested: object
    expected: object
    remedy: str
    """Advice to the user if the two differ."""


def _facts(rank: Json, spec: EngineSpec) -> list[Fact]:
    """Returns the properties of a rank that must match `spec`."""
    numerics = spec.numerics.contract(spec.dtype)
    sizes = EngineSizes(**rank["sizes"])
    facts = [
        Fact("dtype", rank["dtype"], spec.dtype, "start it with that --dtype"),
        Fact("adapters", rank["adapters"], spec.form.contract(), "start it with the options of the engines of slimx"),
        Fact("numerics", rank["numerics"], numerics, "start it as the run would, or set numerics.mode (None: fast)"),
        Fact("sizes", sizes, spec.sizes, "correct the sizes of its group in rollout.engines"),
    ]
    if not spec.frozen:
        remedy = "start it with --publish-draft only if drafts are published"
        facts.append(Fact("draft", rank["draft"], spec.draft, remedy))
    return facts


def check_backends(ranks: list[Json], spec: EngineSpec) -> None:
    """Raises SlimxError if the kernels that SGLang resolved use another weight layout than the published one."""
    for index, rank in enumerate(ranks):
        if rank["capability"] is None or rank["capability"] < BLACKWELL or spec.numerics.replaces_layers:
            continue
        for field, plain in unpublishable(rank["backends"], experts=rank["experts"], fp8=rank["fp8"]):
            raise SlimxError(
                f"engine {spec.name} rank {index} resolved {field} to {rank['backends'][field]!r}, which changes the "
                f"layout of published weights; set rollout.engines.sglang.{field}={plain}",
                code="engine.backend",
                about=field,
            )


def _check_process(ranks: list[Json], spec: EngineSpec, process: SupervisedProcess) -> None:
    """Raises SlimxError if another server responds, which took the port before this one could listen on it.

    Only ranks on this machine are checked: the others joined at a rendezvous address that is private to the server.
    """
    family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    nodes = spec.node.count if spec.node else 1
    for rank in ranks[: spec.sizes.world // nodes]:
        if rank["pid"] not in family:
            raise SlimxError(
                f"engine {spec.name}: process {rank['pid']} answers at {spec.url} and is not the server "
                f"that was started; another server has the port: start again (log {process.log_path})",
            )


# Responses to the verbs of a publication ------------------------------------------------------------------------------


def forms_of(name: str, ranks: Sequence[Json], encoding: Encoding) -> list[dict[str, str]]:
    """Returns the inventory of engine `name`: one dict per rank for "local", else one for all."""
    for index, rank in enumerate(ranks):
        uncovered = rank["uncovered"]
        if uncovered:
            parameter, reason = next(iter(uncovered.items()))
            raise SlimxError(
                f"engine {name} rank {index} holds {len(uncovered)} parameters that slimx cannot publish, "
                f"first {parameter}: {reason}; add a row to slimx/adapters/sglang/weights/layout.py",
                code="engine.uncovered",
                about=parameter,
            )
    if encoding == "local":
        return [rank["forms"] for rank in ranks]
    tensors: dict[str, str] = {}
    for index, rank in enumerate(ranks):
        for tensor, form in rank["forms"].items():
            if tensors.setdefault(tensor, form) != form:
                raise SlimxError(
                    f"engine {name}: ranks disagree on {tensor}: {tensors[tensor]}, but {form} on rank {index}",
                    code="engine.ranks_differ",
                    about=tensor,
                )
    return [tensors]


def check_staged(name: str, ranks: Sequence[Json]) -> None:
    """Raises SlimxError if a rank lacks a tensor of its model: the last check before copying."""
    for index, rank in enumerate(ranks):
        if rank["missing"]:
            raise SlimxError(
                f"engine {name} rank {index}: {rank['missing']} tensors of the model are not staged, "
                f"first {rank['first_missing']}; stage every tensor before loading",
                code="engine.not_staged",
                about=rank["first_missing"],
            )


def check_copied(name: str, ranks: Sequence[Json]) -> None:
    """Raises SlimxError if copying failed on a rank."""
    for index, rank in enumerate(ranks):
        error = rank["outcome"].get("error")
        if error:
            raise SlimxError(
                f"engine {name} rank {index}: the copy ended after {rank['outcome']['loaded']} tensors: {error}; "
                "publish again",
                code="engine.copy",
                about=name,
            )


def verified_by(name: str, ranks: Sequence[Json]) -> Json:
    """Returns {checked: number of tensors, derived: [names of tensors computed by the model from them]} over all
    ranks."""
    counts = [rank["tensors"] for rank in ranks]
    same_for_all = ranks[0]["encoding"] != "local"
    if same_for_all and len(set(counts)) > 1:
        raise SlimxError(
            f"engine {name}: ranks got {counts} tensors of one publication; publish again",
            code="engine.counts",
            about=name,
        )
    for key, problem in (("differ", "differ from the published ones"), ("missing", "were never published")):
        wrong = _names_of_all(ranks, key)
        if wrong:
            raise SlimxError(
                f"engine {name}: {len(wrong)} tensors {problem}, first {wrong[0]}; publish again or restart the engine",
                code="engine.unverified",
                about=wrong[0],
            )
    return {"checked": counts[0] if same_for_all else sum(counts), "derived": _names_of_all(ranks, "derived")}


def _names_of_all(ranks: Sequence[Json], key: str) -> list[str]:
    """Returns the sorted union of the names that ranks list under `key`."""
    return sorted({name for rank in ranks for name in rank[key]})
