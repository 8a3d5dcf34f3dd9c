"""One rank's receiver of publications: staged, proven, copied in place, proven as it is held.

    begin -> stage* -> load (once, or after each stage) -> verify -> commit          abort ends it at any point

Written for sglang 0.5.23. Actions are reached through the stock endpoint /weights_checker (`plugin`), the copy
through /update_weights_from_tensor (`load_staged`). SGLang loads in place and dies of an exception in a loader, so
nothing is copied before its bytes are proven, and `load_staged` reports instead of raising. A failure here ends the
publication on this rank only; the client aborts it on the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn

from slimx.adapters.sglang.weights.buckets import open_bucket
from slimx.adapters.sglang.weights.layout import hf_layout
from slimx.adapters.sglang.weights.places import (
    Destination,
    Layout,
    held_sums,
    local_layout,
    restore_cache_scales,
    staged_sums,
    weights_of,
)
from slimx.errors import SlimxError
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.parties import Staging
from slimx.reshard.plan.precision import Rule

Answer = dict[str, Any]

ATTRIBUTE = "_slimx_receiver"
RULES = ("none", *get_args(Rule))


@dataclass(slots=True)
class Staged:
    """One tensor whose bytes are proven."""

    view: torch.Tensor
    """[shape], in the publisher's memory; of a bucket on a GPU, in this rank's own (`buckets`)."""
    share: int
    """The share of this rank's part in the tensor's checksum."""


@dataclass(slots=True)
class OpenPublication:
    """The publication that is open on this rank."""

    manifest: Manifest
    staging: Staging
    """"model": nothing is copied before everything is staged. "bucket": each load copies what is staged by then."""
    layout: Layout
    taken: set[str] = field(default_factory=set)
    """Names that came, those for other ranks among them."""
    waiting: int = 0
    """Buckets staged since the last load. A rank may have no tensor in them."""
    staged: dict[str, Staged] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    """Tensors that were copied -> share that the model should hold."""
    verified: bool = False

    @property
    def missing(self) -> list[str]:
        """Tensors that this rank needs and that are neither staged nor loaded."""
        return [name for name in self.layout.held if name not in self.staged and name not in self.loaded]


class RankReceiver:
    """The state of publications to one rank's model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.open: OpenPublication | None = None
        self.epoch = -1
        """Membership epoch of the publication begun last."""
        self.version: int | None = None
        """Version committed last; None once anything was copied after it."""
        self.outcome: Answer = {}
        """The end of the last copy: {"loaded": count} or {"loaded": count, "error": text}."""
        self.copied: OpenPublication | None = None
        """The publication that copied last: its `loaded` is all that vouches for what the model holds."""
        self._layout: tuple[torch.Tensor | None, Layout] | None = None
        """The places of experts, and the layout that follows from them."""

    # Life of a publication ------------------------------------------------------------------------------------------

    def begin(self, *, manifest: Answer, staging: Staging = "model", experts: Any = None) -> Answer:
        """Open a publication, unless one of the same or a newer epoch is open. `experts`: as for `hf_layout`."""
        new = Manifest.from_json(manifest)
        if new.rule not in RULES:
            raise SlimxError(
                f"{new} has rule {new.rule!r}; rules are {', '.join(RULES)}", code="receiver.manifest", about="rule"
            )
        if staging not in get_args(Staging):
            raise SlimxError(
                f"{new} is staged by {staging!r}; it is one of {', '.join(get_args(Staging))}",
                code="receiver.manifest",
                about="staging",
            )
        if new.membership_epoch < self.epoch:
            raise SlimxError(
                f"{new} is older than epoch {self.epoch}, of which a publication has begun here",
                code="receiver.late",
                about=str(new),
            )
        if self.open is not None and new.membership_epoch == self.open.manifest.membership_epoch:
            raise SlimxError(
                f"{new} cannot begin while {self.open.manifest} is open; commit or abort that one first",
                code="receiver.open",
                about=str(self.open.manifest),
            )
        layout = local_layout(self.model) if new.encoding == "local" else self._hf_layout(experts)
        if layout.uncovered:
            name, why = next(iter(layout.uncovered.items()))
            raise SlimxError(
                f"{new}: this rank holds {len(layout.uncovered)} parameters that encoding {new.encoding} does not "
                f"reach, first {name}: {why}",
                code="receiver.uncovered",
                about=name,
            )
        self.open, self.epoch = OpenPublication(new, staging, layout), new.membership_epoch
        return self.status()

    def stage(self, *, version: int, epoch: int, bucket: int, fd_path: str, size: int, tensors: list[Answer]) -> Answer:
        """Open one bucket of `size` bytes at `fd_path` and keep this rank's tensors once every checksum agrees.

        Each entry of `tensors` is `{name, dtype, shape, offset, nbytes, checksum}` (offset in bytes, checksum as 16 hex
        digits). Nothing of the model is touched. Any error ends the publication on this rank.
        """
        publication = self._belonging(version, epoch)
        try:
            for entry in tensors:
                _check_entry(publication, entry, bucket, size)
                publication.taken.add(entry["name"])
            mine = [entry for entry in tensors if publication.layout.places[entry["name"]].held]
            views, device = open_bucket(fd_path, size, mine, next(self.model.parameters()).device)
            sums = staged_sums(views, publication.layout.places, device)
            for entry in mine:
                name, expected = entry["name"], int(entry["checksum"], 16)
                actual, share = sums[name]
                if actual != expected:
                    raise SlimxError(
                        f"tensor {name} of bucket {bucket} has checksum {actual:016x} in the server, {expected:016x} "
                        "at the publisher; its bytes changed on the way: publish again",
                        code="receiver.checksum",
                        about=name,
                    )
                publication.staged[name] = Staged(views[name], share)
        except Exception:
            self.open = None
            raise
        publication.waiting += 1
        return self.status()

    def load(self) -> None:
        """Copy what is staged into the model; raises with the model half copied only if SGLang's own loader fails."""
        publication = self.open
        if publication is None or not publication.waiting:
            raise SlimxError(
                "load was asked but nothing is staged; begin a publication and stage its buckets first",
                code="receiver.nothing_staged",
                about="load",
            )
        if publication.staging == "model" and (missing := publication.missing):
            raise SlimxError(
                f"load was asked but {len(missing)} tensors are not staged, first {missing[0]}; stage them all",
                code="receiver.not_staged",
                about=missing[0],
            )
        ready = {name: staged for name, staged in publication.staged.items() if _complete(publication, name)}
        if self.copied is not publication:
            restore_cache_scales(self.model)
        # From here the model holds neither the old weights nor the new: nothing else vouches for it any more.
        self.copied, self.version = publication, None
        publication.waiting, publication.verified = 0, False
        if publication.manifest.encoding == "hf":
            if ready:
                self.model.load_weights(self._counted(ready))
        else:
            parameters = weights_of(self.model)
            for name, tensor in self._counted(ready):
                parameters[name].data.copy_(tensor)
        publication.loaded.update((name, staged.share) for name, staged in ready.items())
        # What waits for its partners outlives its bucket, whose memory the publisher may now use again.
        publication.staged = {
            name: Staged(staged.view.clone(), staged.share)
            for name, staged in publication.staged.items()
            if name not in ready
        }
        if publication.manifest.encoding == "local" and not publication.missing:
            self._derive()

    def verify(self) -> Answer:
        """Compare what the model HOLDS now with what was copied last.

        Answer: {"encoding", "tensors": count in the publication, "differ": [names], "missing": [held, but never
        copied], "derived": [tensors that the model computed from the others]}.
        """
        if self.copied is None:
            raise SlimxError(
                "verify was asked but nothing was ever published to this engine; publish first",
                code="receiver.never_published",
                about="verify",
            )
        places, loaded = self.copied.layout.places, self.copied.loaded
        parameters = weights_of(self.model)
        sums = held_sums(places, loaded, parameters)
        differ = [name for name, share in loaded.items() if sums[name] != {share}]
        missing = [name for name in self.copied.layout.held if name not in loaded]
        missing += sorted(parameters.keys() - {held.parameter for place in places.values() for held in place.held})
        self.copied.verified = self.copied is self.open and not differ and not missing
        return {
            "encoding": self.copied.manifest.encoding,
            "tensors": len(self.copied.taken),
            "differ": differ,
            "missing": missing,
            "derived": sorted(_derived(self.model)),
        }

    def commit(self, *, version: int) -> Answer:
        """Close the open publication: its weights are this rank's `version`."""
        publication = self.open
        if publication is None or publication.manifest.version != version:
            raise SlimxError(
                f"version {version} cannot be committed: {self._what_is_open()}",
                code="receiver.not_open",
                about=f"version {version}",
            )
        if not publication.verified:
            raise SlimxError(
                f"{publication.manifest} cannot be committed before it is loaded and verified as a whole",
                code="receiver.not_verified",
                about=str(publication.manifest),
            )
        self.open, self.version = None, version
        return self.status()

    def abort(self) -> Answer:
        """End the open publication; before its first copy nothing has changed. May be called at any time and again."""
        self.open = None
        return self.status()

    # Looks ----------------------------------------------------------------------------------------------------------

    def status(self) -> Answer:
        """`{"open": text or None, "version", "staged": count, "bytes", "missing": count, "first_missing": name or None,
        "outcome": {...}}`.

        `missing`: what this rank needs of the open publication and has neither staged nor loaded. A count and no list:
        this is asked for every bucket.
        """
        publication = self.open
        staged = publication.staged.values() if publication else ()
        missing = publication.missing if publication else []
        return {
            "open": str(publication.manifest) if publication else None,
            "version": self.version,
            "staged": len(staged),
            "bytes": sum(one.view.nbytes for one in staged),
            "missing": len(missing),
            "first_missing": missing[0] if missing else None,
            "outcome": self.outcome,
        }

    def inventory(self, *, encoding: Encoding, experts: Any = None) -> Answer:
        """`{"forms": {name: "dtype:d0,d1"}, "uncovered": {parameter: why}}` of an encoding.

        `forms`: all that this rank takes of a publication; `uncovered`: what it holds and no publication reaches.
        """
        layout = local_layout(self.model) if encoding == "local" else self._hf_layout(experts)
        return {"forms": {name: layout.places[name].form for name in layout.held}, "uncovered": layout.uncovered}

    # ----------------------------------------------------------------------------------------------------------------

    def _hf_layout(self, experts: Any) -> Layout:
        """Read anew only after expert balancing has moved experts between slots: for DeepSeek-V3's 45,395 tensors it
        takes a second, in which the server does not generate."""
        moved = None if experts is None else experts.physical_to_logical_map_cpu
        if self._layout is None or (moved is not None and not torch.equal(moved, self._layout[0])):
            self._layout = None if moved is None else moved.clone(), hf_layout(self.model, experts)
        return self._layout[1]

    def _belonging(self, version: int, epoch: int) -> OpenPublication:
        manifest = self.open.manifest if self.open else None
        if manifest is None or (manifest.version, manifest.membership_epoch) != (version, epoch):
            raise SlimxError(
                f"a bucket of version {version}, epoch {epoch} came, but {self._what_is_open()}",
                code="receiver.not_open",
                about=f"version {version}",
            )
        return self.open

    def _what_is_open(self) -> str:
        return f"{self.open.manifest} is open" if self.open else "no publication is open: begin one first"

    def _counted(self, ready: dict[str, Staged]) -> Iterator[tuple[str, torch.Tensor]]:
        for count, (name, staged) in enumerate(ready.items()):
            self.outcome["loaded"] = count
            yield name, staged.view
        self.outcome["loaded"] = len(ready)

    def _derive(self) -> None:
        """The step that SGLang does after loads that pass `load_weights` by (model_loader.loader.post_load_weights):
        MLA's w_kc and w_vc. `load_weights` does it by itself; process_weights_after_loading runs in /end_weight_update
        for both. Norms that are centred on zero (GemmaRMSNorm) keep 1 + weight beside the weight, which their weight
        loader makes.
        """
        for module in self.model.modules():
            if hasattr(module, "refresh_gemma_weight"):
                module.refresh_gemma_weight()
        if hasattr(self.model, "post_load_weights"):
            self.model.post_load_weights()


def receiver_of(model: nn.Module) -> RankReceiver:
    """The model's receiver, made at the first use. It hangs on the model, so that it lives and ends with it."""
    if not hasattr(model, ATTRIBUTE):
        object.__setattr__(model, ATTRIBUTE, RankReceiver(model))
    return getattr(model, ATTRIBUTE)


def load_staged(model: nn.Module, named_tensors: Iterable[Any]) -> None:
    """SGLang's custom weight loader: copy the staged tensors into the model.

    `named_tensors` is the request's (empty) list. SGLang lets an exception of a loader end the scheduler and, with TP,
    leaves the other ranks waiting; so the outcome is recorded for `status` and the caller asks for it.
    """
    receiver = receiver_of(model)
    receiver.outcome = {"loaded": 0}
    try:
        receiver.load()
    except Exception as error:
        receiver.outcome["error"] = str(error) if isinstance(error, SlimxError) else f"{type(error).__name__}: {error}"
        receiver.open = None


def _complete(publication: OpenPublication, name: str) -> bool:
    """Returns True if all that the model loads only together with `name` is there."""
    partners = publication.layout.together.get(name, ())
    return all(partner in publication.staged for partner in partners)


def _check_entry(publication: OpenPublication, entry: Answer, bucket: int, size: int) -> None:
    """Refuse, before a byte is read, what the model could not take."""
    name, places = entry["name"], publication.layout.places
    place: Destination | None = places.get(name)
    if place is None:
        close = difflib.get_close_matches(name, list(places), n=1)
        nearest = f"the nearest that it takes is {close[0]}" if close else "it takes nothing of a similar name"
        raise SlimxError(
            f"tensor {name} of bucket {bucket} is unknown to the model; {nearest}", code="receiver.tensor", about=name
        )
    offered = f"{entry['dtype']}:{','.join(map(str, entry['shape']))}"
    if offered != place.form:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} is {offered}, the model loads {place.form}; convert it before "
            "publishing",
            code="receiver.form",
            about=name,
        )
    if name in publication.taken:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} came already in this publication; send each tensor once",
            code="receiver.twice",
            about=name,
        )
    if entry["nbytes"] != place.nbytes or not 0 <= entry["offset"] <= size - place.nbytes:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} claims bytes {entry['offset']} + {entry['nbytes']} of {size}, "
            f"but needs {place.nbytes}",
            code="receiver.extent",
            about=name,
        )


def _derived(model: nn.Module) -> Iterator[str]:
    """Tensors that hang on modules beside parameters, their views and buffers."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in own:
                yield f"{name}.{attribute}" if name else attribute
