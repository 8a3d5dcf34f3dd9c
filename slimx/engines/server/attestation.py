"""Checks the responses of a server's ranks: raises an error if a response is wrong or differs from those of other
ranks.

At startup the ranks attest (report for this check) that the server is the one that was started and computes as
configured. During a publication they report which tensors they accept, have staged, have copied and have verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import psutil

import slimx
from slimx.engines.server.arguments import command_line
from slimx.engines.server.http_calls import REFUSED, ControlClient, request
from slimx.engines.server.spec import EngineSpec, policy_args
from slimx.errors import SlimxError, counted
from slimx.json_types import Json
from slimx.layout.kernels import BLACKWELL, unpublishable
from slimx.layout.ranks import EngineSizes
from slimx.reshard.manifest import Encoding
from slimx.reshard.parties import PROTOCOL
from slimx.runtime.process import SupervisedProcess


async def attested(wire: ControlClient, spec: EngineSpec, process: SupervisedProcess | None) -> list[Json]:
    """Returns the attestation of each rank of a server that already generates. Raises SlimxError if an attestation does
    not match `spec`.

    `wire`: client for calls to the server. `process`: the server's process; None if the server is external."""
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
    """Returns the attestation of each rank of engine `name`.

    Raises SlimxError if the slimx plugin does not respond; this check is needed because SGLang does not report that it
    failed to load a plugin."""
    try:
        return await wire.request_ranks("attest")
    except SlimxError as error:
        if error.code not in ("http.refused", "engine.no_plugin"):
            raise
        raise SlimxError(
            f"{wire.server_name} at {wire.url} does not confirm that it runs the slimx plugin ({error}); start the "
            "server with `python -m slimx.engines.server.launch` in an environment where slimx is installed",
            code="engine.unattested",
            about=name,
        ) from None


def check_plugin(rank: Json, name: str) -> None:
    """Raises SlimxError if a rank of engine `name` runs another version of slimx, or if a part of its slimx plugin
    failed to take effect."""
    if rank["protocol"] != PROTOCOL or rank["slimx"] != slimx.__version__:
        raise SlimxError(
            f"engine {name} runs slimx {rank['slimx']} (protocol {rank['protocol']}), but the trainers run "
            f"{slimx.__version__} (protocol {PROTOCOL}); install the same version for both",
        )
    parts = rank["hooks"] | (rank["cpu"] or {})
    failed = [part for part, in_force in parts.items() if not in_force]
    if failed:
        raise SlimxError(
            f"parts of the slimx plugin ({', '.join(failed)}) did not take effect in process {rank['pid']} of engine "
            f"{name}; search the engine's log for `plugin` to find the reason",
            code="engine.plugin_part",
            about=", ".join(failed),
        )


async def check_guarded(wire: ControlClient) -> None:
    """Raises SlimxError if the server accepts generation or control calls without a key."""
    for method, path in (("GET", "/model_info"), ("POST", "/weights_checker")):
        status, _ = await request(
            method,
            wire.url + path,
            {"action": "slimx.status"},
            deadline_s=wire.deadline_s,
            headers={},
            server_name=wire.server_name,
        )
        if status not in REFUSED:
            raise SlimxError(
                f"{wire.server_name} must reject {method} {wire.url}{path} without a key, but returned status "
                f"{status}; remove from the group's sglang all arguments that affect keys or server processes",
                code="engine.unguarded",
                about=path,
            )


async def _check_arguments(wire: ControlClient, spec: EngineSpec) -> None:
    """Raises SlimxError if an external server runs without an argument that slimx requires, or in a role other than the
    one in `spec`."""
    info = await wire.call("/server_info", method="GET", key=spec.keys.api_key)
    needed = policy_args(spec)
    for name, value in needed.items():
        if value and info.get(name) != value:
            flags = " ".join(command_line(needed))
            raise SlimxError(
                f"engine {spec.name} at {spec.url} runs with {name}={info.get(name)!r}, but slimx needs {value!r}; "
                f"start the server with `python -m slimx.engines.server.launch -- ... {flags}`",
            )
    role = info.get("disaggregation_mode", "null")
    expected = "null" if spec.role == "regular" else spec.role
    if role != expected:
        raise SlimxError(
            f"engine {spec.name} at {spec.url} runs with disaggregation_mode={role!r}, but rollout.engines.role of its "
            f"group is {spec.role}; change the role, or restart the server with the disaggregation_mode of this role",
        )


def check_ranks(ranks: list[Json], spec: EngineSpec) -> None:
    """Raises SlimxError if the dtype, numerics mode, sizes or weight form that a rank attests differ from `spec`."""
    for index, rank in enumerate(ranks):
        for fact in _facts(rank, spec):
            if fact.attested != fact.expected:
                raise SlimxError(
                    f"rank {index} of engine {spec.name} runs with {fact.name} {fact.attested}, but the "
                    f"configuration requires {fact.expected}; {fact.remedy}",
                    code=f"engine.{fact.name}",
                    about=f"{spec.name} rank {index}",
                )


class Fact(NamedTuple):
    """A property that a rank attests, with its attested and its expected value."""

    name: str
    attested: object
    expected: object
    remedy: str
    """Action that the user should take if the two values differ."""


def _facts(rank: Json, spec: EngineSpec) -> list[Fact]:
    """Returns the properties of a rank that must match `spec`, with attested and expected values."""
    numerics = spec.numerics.contract(spec.dtype)
    sizes = EngineSizes(**rank["sizes"])
    facts = [
        Fact("dtype", rank["dtype"], spec.dtype, "start the engine with the --dtype of this run"),
        Fact("adapters", rank["adapters"], spec.form.contract(), "start the engine with this run's adapter options"),
        Fact(
            "numerics",
            rank["numerics"],
            numerics,
            "start the engine in that mode (None means fast), or change numerics.mode",
        ),
        Fact("sizes", sizes, spec.sizes, "set the engine's group in rollout.engines to the sizes that the engine has"),
    ]
    if not spec.frozen:
        remedy = "start the engine with --publish-draft only if the run publishes draft weights"
        facts.append(Fact("draft", rank["draft"], spec.draft, remedy))
    return facts


def check_backends(ranks: list[Json], spec: EngineSpec) -> None:
    """Raises SlimxError if SGLang selected kernels that change the layout of published weights."""
    for index, rank in enumerate(ranks):
        if rank["capability"] is None or rank["capability"] < BLACKWELL or spec.numerics.replaces_layers:
            continue
        for field, plain in unpublishable(rank["backends"], experts=rank["experts"], fp8=rank["fp8"]):
            raise SlimxError(
                f"rank {index} of engine {spec.name} selected {field} {rank['backends'][field]!r}, which changes the "
                f"layout of published weights; set sglang.{field}={plain} for its group",
                code="engine.backend",
                about=field,
            )


def _check_process(ranks: list[Json], spec: EngineSpec, process: SupervisedProcess) -> None:
    """Raises SlimxError if the responding server is not `process`, but another server that took its port first.

    Only ranks on this machine are checked: ranks on other nodes joined at a rendezvous address that is private to the
    server."""
    family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    nodes = spec.node.count if spec.node else 1
    for rank in ranks[: spec.sizes.world // nodes]:
        if rank["pid"] not in family:
            raise SlimxError(
                f"engine {spec.name}: process {rank['pid']} responds at {spec.url}, but belongs to another server that "
                f"took the port; start the run again (log {process.log_path})",
            )


# Responses during a publication ---------------------------------------------------------------------------------------


def forms_of(name: str, ranks: Sequence[Json], encoding: Encoding) -> list[dict[str, str]]:
    """Returns every tensor that engine `name` loads, each as name -> "dtype:d0,d1". The list has one dict per rank for
    the encoding "local", and otherwise a single dict for all ranks.

    `ranks`: responses of the ranks to `inventory`. Raises SlimxError if a rank has parameters that cannot be published,
    or if the ranks load different tensors."""
    for index, rank in enumerate(ranks):
        uncovered = rank["uncovered"]
        if uncovered:
            parameter, reason = next(iter(uncovered.items()))
            raise SlimxError(
                f"rank {index} of engine {name} has {counted(len(uncovered), 'parameter')} that slimx cannot publish "
                f"(the first is {parameter}: {reason}); add rows for these parameters to "
                "slimx/adapters/sglang/weights/layout.py",
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
                    f"engine {name}: tensor {tensor} is {form} on rank {index}, but {tensors[tensor]} on lower "
                    "ranks; start all ranks of the engine with the same arguments and SGLang version",
                    code="engine.ranks_differ",
                    about=tensor,
                )
    return [tensors]


def check_staged(name: str, ranks: Sequence[Json]) -> None:
    """Raises SlimxError if a tensor of a rank's model is not staged. This is the last check before tensors are
    copied."""
    for index, rank in enumerate(ranks):
        if rank["missing"]:
            raise SlimxError(
                f"{counted(rank['missing'], 'tensor')} of the model (the first is {rank['first_missing']}) are not "
                f"staged on rank {index} of engine {name}; stage every tensor before loading",
                code="engine.not_staged",
                about=rank["first_missing"],
            )


def check_copied(name: str, ranks: Sequence[Json]) -> None:
    """Raises SlimxError if a rank of engine `name` reports that copying staged tensors into the model failed."""
    for index, rank in enumerate(ranks):
        error = rank["outcome"].get("error")
        if error:
            raise SlimxError(
                f"copying weights to rank {index} of engine {name} failed after "
                f"{counted(rank['outcome']['loaded'], 'tensor')} ({error}); publish the weights again",
                code="engine.copy",
                about=name,
            )


def verified_by(name: str, ranks: Sequence[Json]) -> Json:
    """Returns {checked: number of verified tensors, derived: [names of tensors that the model computed from verified
    ones]} over all ranks of engine `name`.

    Raises SlimxError if a tensor differs from the published one or was never published."""
    counts = [rank["tensors"] for rank in ranks]
    same_for_all = ranks[0]["encoding"] != "local"
    if same_for_all and len(set(counts)) > 1:
        raise SlimxError(
            f"engine {name}: the ranks received different numbers of tensors ({counts}); publish the weights again",
            code="engine.counts",
            about=name,
        )
    for key, problem in (("differ", "differ from the published weights"), ("missing", "were never published")):
        wrong = _names_of_all(ranks, key)
        if wrong:
            raise SlimxError(
                f"engine {name}: {counted(len(wrong), 'tensor')} (the first is {wrong[0]}) {problem}; publish the "
                "weights again, or restart the engine",
                code="engine.unverified",
                about=wrong[0],
            )
    return {"checked": counts[0] if same_for_all else sum(counts), "derived": _names_of_all(ranks, "derived")}


def _names_of_all(ranks: Sequence[Json], key: str) -> list[str]:
    """Returns the sorted names that any of the ranks lists under `key`."""
    return sorted({name for rank in ranks for name in rank[key]})
