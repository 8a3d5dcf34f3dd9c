"""One rank's receiver of publications: staged, proven, copied in place, proven as it is held.

    begin -> stage* -> load (once, or after each stage) -> verify -> commit          abort ends it at any point

Written for sglang 0.5.23. Each public method is a verb that is reached through the stock endpoint /weights_checker
(`plugin`); an engine asks for the copy through /update_weights_from_tensor (`load_staged`). SGLang loads in place and
dies of an exception in a loader, so nothing is copied before its bytes are proven, and `load_staged` reports instead of
raising. A failure here ends the publication on this rank only; the engine aborts it on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Protocol, get_args

import torch
from torch import nn

from slimx.adapters.sglang.weights.buckets import OpenPublication, Staged, check_entry, open_bucket
from slimx.adapters.sglang.weights.layout import hf_layout
from slimx.adapters.sglang.weights.places import (
    Layout,
    derive,
    derived,
    differing,
    local_layout,
    restore_cache_scales,
    staged_sums,
    weights_of,
)
from slimx.errors import SlimxError
from slimx.layout.number_formats import all_formats
from slimx.reshard.manifest import Encoding, Manifest, is_adapter
from slimx.reshard.parties import Staging

Answer = dict[str, Any]

ATTRIBUTE = "_slimx_receiver"


class Slot(Protocol):
    """The adapters of one policy beside this rank's weights."""

    shares: dict[str, int] | None
    """Tensors that the publication which came here last has copied, and the share of each that the slot should
    contain; None before the first."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the slot's memory by the names under which `place` notes it."""
        ...

    def place(self, layout: Layout) -> None:
        """Notes where published tensors go; a layer that no row explains is uncovered."""
        ...

    def write(self, layout: Layout, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies published tensors into their places."""
        ...


class RankReceiver:
    """The state of publications to one rank's model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rank = 0
        """Number of this rank in its engine."""
        self.experts: Any = None
        """SGLang's ExpertLocationMetadata, as for `hf_layout`; it changes when experts are balanced."""
        self.open: OpenPublication | None = None
        self.epoch = -1
        """Membership epoch of the publication begun last."""
        self.version: int | None = None
        """Version committed last; None once anything was copied after it."""
        self.outcome: Answer = {}
        """The end of the last copy: {"loaded": count} or {"loaded": count, "error": text}."""
        self.copied: OpenPublication | None = None
        """The publication that copied last: its `loaded` is all that vouches for the weights. For adapters each slot's
        `shares` do."""
        self.adapters: dict[str, Slot] = {}
        """The slot of each policy, in a server that computes with adapters."""
        self._layout: tuple[torch.Tensor | None, Layout] | None = None
        """The places of experts, and the layout that follows from them."""

    # Life of a publication ------------------------------------------------------------------------------------------

    def begin(self, *, manifest: Answer, staging: Staging = "model") -> Answer:
        """Open a publication, unless one of the same or a newer epoch is open."""
        new = Manifest.from_json(manifest)
        rules = ("none", *chain.from_iterable(each.RULES for each in all_formats().values()))
        if new.rule not in rules:
            raise SlimxError(
                f"{new} has rule {new.rule!r}; rules are {', '.join(rules)}", code="receiver.manifest", about="rule"
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
        layout = local_layout(self.model) if new.encoding == "local" else self._hf_layout()
        if layout.uncovered:
            name, why = next(iter(layout.uncovered.items()))
            raise SlimxError(
                f"{new}: this rank holds {len(layout.uncovered)} parameters that encoding {new.encoding} does not "
                f"reach, first {name}: {why}",
                code="receiver.uncovered",
                about=name,
            )
        if self.adapters and new.policy not in self.adapters:
            raise SlimxError(
                f"{new} came to a server that computes with adapters of {', '.join(self.adapters)}; start it with "
                "those of all policies that are published to it",
                code="receiver.policy",
                about=new.policy,
            )
        base = self._base(new, layout) if new.encoding == "adapters" else {}
        self.open, self.epoch = OpenPublication(new, staging, layout, loaded=base), new.membership_epoch
        return self.status()

    def stage(self, *, policy: str, version: int, epoch: int, bucket: int, ranks: dict[str, Answer]) -> Answer:
        """Open this rank's part of a bucket and keep its tensors once every checksum agrees.

        `ranks`: {number of a rank, or "all": {"fd_path", "size": bytes of that memory, "tensors"}}. Each of the tensors
        is `{name, dtype, shape, offset, nbytes, checksum}` (offset in bytes, checksum as 16 hex digits). Nothing of the
        model is touched. Any error ends the publication on this rank.
        """
        part = ranks.get(str(self.rank), ranks.get("all"))
        if part is None:
            raise SlimxError(
                f"bucket {bucket} brings nothing for rank {self.rank}, only for {', '.join(ranks)}",
                code="plugin.bucket",
                about=f"bucket {bucket}",
            )
        size, tensors = part["size"], part["tensors"]
        publication = self._belonging(policy, version, epoch)
        beside = self._beside(publication)
        try:
            for entry in tensors:
                check_entry(entry, publication.layout.places, publication.taken, bucket, size)
                publication.taken.add(entry["name"])
            mine = [entry for entry in tensors if publication.layout.places[entry["name"]].held]
            views, device = open_bucket(part["fd_path"], size, mine, next(self.model.parameters()).device)
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
                if beside.get(name, share) != share:
                    raise SlimxError(
                        f"tensor {name} of {publication.manifest} differs from the weight beside which other policies' "
                        "adapters were published here; let all of them begin with the same weights",
                        code="receiver.other_base",
                        about=name,
                    )
                publication.staged[name] = Staged(views[name], share)
        except Exception:
            self.open = None
            raise
        publication.waiting += 1
        return self.status()

    def _load(self) -> None:
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
        ready, slot = publication.ready(), self.adapters.get(publication.manifest.policy)
        if self.copied is not publication:
            restore_cache_scales(self.model)
            if slot is not None:
                slot.shares = {}
        # From here the model holds neither the old weights nor the new: nothing else vouches for it any more.
        self.copied, self.version = publication, None
        publication.waiting, publication.verified = 0, False
        if publication.manifest.encoding == "local":
            parameters = weights_of(self.model)
            for name, tensor in self._counted(ready):
                parameters[name].data.copy_(tensor)
        else:
            adapters = {name: staged for name, staged in ready.items() if is_adapter(name)}
            if adapters:
                slot.write(publication.layout, self._counted(adapters))
                slot.shares.update((name, staged.share) for name, staged in adapters.items())
            if base := {name: staged for name, staged in ready.items() if name not in adapters}:
                self.model.load_weights(self._counted(base))
        publication.loaded.update((name, staged.share) for name, staged in ready.items())
        # What waits for its partners outlives its bucket, whose memory the publisher may now use again.
        publication.staged = {
            name: Staged(staged.view.clone(), staged.share)
            for name, staged in publication.staged.items()
            if name not in ready
        }
        if publication.manifest.encoding == "local" and not publication.missing:
            derive(self.model)

    def verify(self) -> Answer:
        """Compare what the model HOLDS now with what was copied last, with the base of what came as adapters alone, and
        every other policy's slot with what was copied there last.

        Answer: {"encoding", "tensors": count in the publication, "differ": [names], "missing": [held, but never
        copied], "derived": [tensors that the model computed from the others]}. Another policy's adapter has the
        policy's name in front, and a colon.
        """
        if self.copied is None:
            raise SlimxError(
                "verify was asked but nothing was ever published to this engine; publish first",
                code="receiver.never_published",
                about="verify",
            )
        places, loaded = self.copied.layout.places, self.copied.loaded
        parameters = self._parameters(self.copied.manifest.policy)
        differ = differing(places, loaded, parameters)
        missing = [name for name in self.copied.layout.held if name not in loaded]
        missing += sorted(parameters.keys() - {held.parameter for place in places.values() for held in place.held})
        for policy, slot in self._others(self.copied.manifest.policy):
            differ += [f"{policy}:{name}" for name in differing(places, slot.shares, slot.buffers())]
            adapters = (name for name in self.copied.layout.held if is_adapter(name))
            missing += [f"{policy}:{name}" for name in adapters if name not in slot.shares]
        self.copied.verified = self.copied is self.open and not differ and not missing
        return {
            "encoding": self.copied.manifest.encoding,
            "tensors": len(self.copied.taken),
            "differ": differ,
            "missing": missing,
            "derived": sorted(derived(self.model, parameters.values())),
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

    def inventory(self, *, encoding: Encoding) -> Answer:
        """`{"forms": {name: "dtype:d0,d1"}, "uncovered": {parameter: why}}` of an encoding.

        `forms`: all that this rank takes of a publication; `uncovered`: what it holds and no publication reaches.
        """
        layout = local_layout(self.model) if encoding == "local" else self._hf_layout()
        names = (name for name in layout.held if encoding != "adapters" or is_adapter(name))
        return {"forms": {name: layout.places[name].form for name in names}, "uncovered": layout.uncovered}

    # ----------------------------------------------------------------------------------------------------------------

    def _hf_layout(self) -> Layout:
        """Read anew only after expert balancing has moved experts between slots: for DeepSeek-V3's 45,395 tensors it
        takes a second, in which the server does not generate."""
        moved = None if self.experts is None else self.experts.physical_to_logical_map_cpu
        if self._layout is None or (moved is not None and not torch.equal(moved, self._layout[0])):
            self._layout = None if moved is None else moved.clone(), hf_layout(self.model, self.experts)
            for slot in [*self.adapters.values()][:1]:  # all slots are alike
                slot.place(self._layout[1])
        return self._layout[1]

    def _parameters(self, policy: str) -> dict[str, torch.Tensor]:
        """All that publications of `policy` write, by the names that places have."""
        return weights_of(self.model) | (self.adapters[policy].buffers() if self.adapters else {})

    def _beside(self, publication: OpenPublication) -> dict[str, int]:
        """The shares of the weights beside which other policies' adapters stand: those that `publication` must bring,
        too; {} while there are none."""
        if not any(self._others(publication.manifest.policy)):
            return {}
        return {name: share for name, share in self.copied.loaded.items() if not is_adapter(name)}

    def _others(self, policy: str) -> Iterator[tuple[str, Slot]]:
        """The slots of policies other than `policy` that were published to."""
        return ((name, slot) for name, slot in self.adapters.items() if name != policy and slot.shares is not None)

    def _base(self, new: Manifest, layout: Layout) -> dict[str, int]:
        """The shares of the weights that adapters of publication `new` stand beside, as they were copied last. Refuses
        adapters where nothing vouches for those."""
        if not self.adapters:
            raise SlimxError(
                f"{new} brings adapters alone, and this server computes with none; start it as slimx does",
                code="receiver.no_adapters",
                about=str(new),
            )
        known = {} if self.copied is None else self.copied.loaded
        base = [name for name in layout.held if not is_adapter(name)]
        if lacking := [name for name in base if name not in known]:
            raise SlimxError(
                f"{new} brings adapters alone, and {len(lacking)} weights beside them were never published here, first "
                f"{lacking[0]}; publish all weights first",
                code="receiver.no_base",
                about=lacking[0],
            )
        return {name: known[name] for name in base}

    def _belonging(self, policy: str, version: int, epoch: int) -> OpenPublication:
        manifest = self.open.manifest if self.open else None
        of = (policy, version, epoch)
        if manifest is None or (manifest.policy, manifest.version, manifest.membership_epoch) != of:
            raise SlimxError(
                f"a bucket of version {version} of {policy}, epoch {epoch} came, but {self._what_is_open()}",
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
        receiver._load()
    except Exception as error:
        receiver.outcome["error"] = str(error) if isinstance(error, SlimxError) else f"{type(error).__name__}: {error}"
        receiver.open = None
