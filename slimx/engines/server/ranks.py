"""Answers of a server's ranks to the verbs of a publication, taken together."""

from __future__ import annotations

from collections.abc import Sequence

from slimx.engines.server.wire import Json
from slimx.errors import SlimxError
from slimx.reshard.manifest import Encoding


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
