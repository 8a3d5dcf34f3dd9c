"""One rank's receiver of published weights: stages and verifies tensors, copies them in place, and verifies the model.

    begin -> stage* -> load (once, or after each stage) -> verify -> commit          abort ends it at any point

Written for sglang 0.5.23. Clients call the public methods of `RankReceiver`, called verbs, through SGLang's endpoint
/weights_checker (`plugin`), and request the copy through /update_weights_from_tensor (`load_staged`). SGLang loads
weights in place, and an exception in a loader ends its process, so tensors are verified before they are copied, and
`load_staged` does not raise. A failure ends the publication on this rank; the client aborts it on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import nn

from slimx.adapters.sglang.weights.buckets import (
    Loads,
    OpenPublication,
    Slot,
    Staged,
    base_shares,
    check_entry,
    check_manifest,
    open_bucket,
    shares_of,
)
from slimx.adapters.sglang.weights.layout import ExpertLocation, hf_layout
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
from slimx.errors import SlimxError, counted, raised
from slimx.json_types import Json
from slimx.reshard.manifest import Encoding, Manifest, is_adapter
from slimx.reshard.parties import Staging

ATTRIBUTE = "_slimx_receiver"
"""Name of the attribute in which a model stores its receiver."""


class RankReceiver:
    """Receiver of publications into the model of one engine rank. Clients call its public methods by name over HTTP."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rank = 0
        """Index of this rank in its engine."""
        self.experts: ExpertLocation | None = None
        """SGLang's map from physical slots to experts, as for `hf_layout`; it changes when experts are rebalanced."""
        self.open: OpenPublication | None = None
        self.epoch = -1
        """Membership epoch of the last publication that `begin` opened; -1 before the first."""
        self.version: int | None = None
        """Last committed version; None before the first commit, and between a copy into the model and its commit."""
        self.outcome: Json = {}
        """Result of the last copy into the model: {"loaded": number of copied tensors}, "error": text if it failed."""
        self.copied: OpenPublication | None = None
        """Publication last copied into the model; its `loaded` contains the checksum shares to expect."""
        self.adapters: dict[str, Slot] = {}
        """Adapter slot of each policy, by policy name; empty in a server without adapters."""
        self._layout: tuple[torch.Tensor | None, Layout] | None = None
        """SGLang's map from physical slots to experts, and the layout of Hugging Face tensors that was computed for
        this map; None until a layout is first needed."""

    # Verbs of a publication -------------------------------------------------------------------------------------------

    def begin(self, *, manifest: Json, staging: Staging = "model") -> Json:
        """Opens the publication that `manifest` describes, and drops an open publication of an older membership epoch.
        `staging`: as in `OpenPublication`. Raises SlimxError if a publication of the same epoch is open, a publication
        of a newer epoch has begun, or the publication does not cover all parameters."""
        new = Manifest.from_json(manifest)
        check_manifest(new, staging)
        if new.membership_epoch < self.epoch:
            raise SlimxError(
                f"{new} is older than this server's membership epoch {self.epoch}; publish again in the server's epoch",
                code="receiver.late",
                about=str(new),
            )
        if self.open is not None and new.membership_epoch == self.open.manifest.membership_epoch:
            raise SlimxError(
                f"{new} cannot begin while {self.open.manifest} is open; commit or abort the open publication first",
                code="receiver.open",
                about=str(self.open.manifest),
            )
        layout = self._layout_of(new.encoding)
        if layout.uncovered:
            name, reason = next(iter(layout.uncovered.items()))
            raise SlimxError(
                f"{new} in encoding {new.encoding} does not cover {counted(len(layout.uncovered), 'parameter')} of "
                f"this rank (the first is {name}: {reason}); set publish.encoding to an encoding that covers these "
                "parameters",
                code="receiver.uncovered",
                about=name,
            )
        if self.adapters and new.policy not in self.adapters:
            raise SlimxError(
                f"{new} cannot be received, because this server has adapters only for {', '.join(self.adapters)}; "
                "restart the server with the adapters of all published policies",
                code="receiver.policy",
                about=new.policy,
            )
        base = self._base(new, layout) if new.encoding == "adapters" else {}
        self.open = OpenPublication(new, staging, layout, loaded=base)
        self.epoch = new.membership_epoch
        return self.status()

    def stage(self, *, policy: str, version: int, epoch: int, bucket: int, ranks: dict[str, Json]) -> Json:
        """Opens this rank's part of a bucket and keeps its tensors for the next load if every checksum matches.

        `ranks`: {rank, or "all": {"fd_path", "size": bytes of the memory at that path, "tensors"}}. Each tensor is
        `{name, dtype, shape, offset, nbytes, checksum}` (offset in bytes, checksum as 16 hex digits). The model is
        unchanged. An error in a tensor ends the publication on this rank.
        """
        part = ranks.get(str(self.rank), ranks.get("all"))
        if part is None:
            raise SlimxError(
                f"bucket {bucket} has parts for ranks {', '.join(ranks)}, but none for rank {self.rank}; send a "
                "part for each rank of the server, or only a part named `all`",
                code="plugin.bucket",
                about=f"bucket {bucket}",
            )
        size = part["size"]
        tensors = part["tensors"]
        publication = self._check_open(policy, version, epoch)
        base = self._base_of_others(publication)
        try:
            for entry in tensors:
                check_entry(entry, publication.layout.places, publication.taken, bucket, size)
                publication.taken.add(entry["name"])
            local = [entry for entry in tensors if publication.layout.places[entry["name"]].parts]
            views, device = open_bucket(part["fd_path"], size, local, next(self.model.parameters()).device)
            sums = staged_sums(views, publication.layout.places, device)
            for entry in local:
                name = entry["name"]
                expected = int(entry["checksum"], 16)
                actual, share = sums[name]
                if actual != expected:
                    raise SlimxError(
                        f"tensor {name} of bucket {bucket} has checksum {actual:016x} in the server, but "
                        f"{expected:016x} at the publisher, so its bytes changed in transit; publish the weights again",
                        code="receiver.checksum",
                        about=name,
                    )
                if base.get(name, share) != share:
                    raise SlimxError(
                        f"tensor {name} of {publication.manifest} differs from the base weight to which this server "
                        "applies other policies' adapters; start all policies from the same base weights",
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
        """Copies the staged tensors into the model. Raises SlimxError, with the model unchanged, if nothing is staged
        or a required tensor is missing. After any other exception, the model may contain part of the new weights."""
        publication = self.open
        if publication is None or not publication.waiting:
            raise SlimxError(
                "load was called, but no bucket is staged; begin a publication and stage its buckets before load",
                code="receiver.nothing_staged",
                about="load",
            )
        missing = publication.missing if publication.staging == "model" else []
        if missing:
            raise SlimxError(
                f"{counted(len(missing), 'tensor')} (such as {missing[0]}) are not staged; stage all model tensors "
                "before load",
                code="receiver.not_staged",
                about=missing[0],
            )
        ready = publication.ready()
        slot = self.adapters.get(publication.manifest.policy)
        if self.copied is not publication:
            restore_cache_scales(self.model)
            if slot is not None:
                slot.shares = {}
        # From here on, the model's weights are neither completely old nor completely new.
        self.copied = publication
        self.version = None
        publication.waiting = 0
        publication.verified = False
        if publication.manifest.encoding == "local":
            parameters = weights_of(self.model)
            for name, tensor in self._counted(ready):
                parameters[name].data.copy_(tensor)
        else:
            adapters = {name: staged for name, staged in ready.items() if is_adapter(name)}
            if adapters:
                if slot is None:
                    raise TypeError("adapters were staged in a server without adapter slots")
                slot.write(publication.layout, self._counted(adapters))
                slot.shares = (slot.shares or {}) | shares_of(adapters)
            base = {name: staged for name, staged in ready.items() if name not in adapters}
            if base:
                cast(Loads, self.model).load_weights(self._counted(base))
        publication.loaded.update(shares_of(ready))
        # Clone tensors that wait for others of their `load_weights` call, because the publisher may reuse the bucket.
        publication.staged = {
            name: Staged(staged.view.clone(), staged.share)
            for name, staged in publication.staged.items()
            if name not in ready
        }
        if publication.manifest.encoding == "local" and not publication.missing:
            derive(self.model)

    def verify(self) -> Json:
        """Verifies by checksum that the model's current weights are those copied last, including the base weights of
        adapter-only publications, and that every other policy's adapter slot is unchanged since its last copy.

        Returns {"encoding", "tensors": number received, "differ": [names whose checksum differs], "missing": [names
        never copied], "derived": [names of tensors computed from weights]}. Names in other policies' slots have prefix
        `POLICY:`."""
        if self.copied is None:
            raise SlimxError(
                "verify has nothing to check, because nothing was published to this server; publish weights first",
                code="receiver.never_published",
                about="verify",
            )
        places = self.copied.layout.places
        loaded = self.copied.loaded
        parameters = self._parameters(self.copied.manifest.policy)
        differ = differing(places, loaded, parameters)
        missing = [name for name in self.copied.layout.local if name not in loaded]
        covered: set[str] = set()
        for destination in places.values():
            covered.update(part.parameter for part in destination.parts)
        missing += sorted(parameters.keys() - covered)
        for policy, slot, shares in self._others(self.copied.manifest.policy):
            differ += [f"{policy}:{name}" for name in differing(places, shares, slot.buffers())]
            adapters = [name for name in self.copied.layout.local if is_adapter(name)]
            missing += [f"{policy}:{name}" for name in adapters if name not in shares]
        self.copied.verified = self.copied is self.open and not differ and not missing
        return {
            "encoding": self.copied.manifest.encoding,
            "tensors": len(self.copied.taken),
            "differ": differ,
            "missing": missing,
            "derived": sorted(derived(self.model, parameters.values())),
        }

    def commit(self, *, version: int) -> Json:
        """Closes the open, verified publication `version` and makes it this rank's current version."""
        publication = self.open
        if publication is None or publication.manifest.version != version:
            raise self._not_open(f"version {version}", "committed")
        if not publication.verified:
            raise SlimxError(
                f"{publication.manifest} is not completely loaded and verified; call load and verify before commit",
                code="receiver.not_verified",
                about=str(publication.manifest),
            )
        self.open = None
        self.version = version
        return self.status()

    def abort(self) -> Json:
        """Drops the open publication, if any. Weights that were already copied into the model stay there."""
        self.open = None
        return self.status()

    # Status ---------------------------------------------------------------------------------------------------------

    def status(self) -> Json:
        """Returns `{"open": text or None, "version", "staged": count, "bytes", "missing": count, "first_missing": name
        or None, "outcome": {...}}`.

        `staged`, `bytes`: number and size of tensors staged but not yet copied. `missing`: number of tensors that this
        rank needs and has neither staged nor copied (no names, because clients call this for every bucket).
        """
        publication = self.open
        response: Json = {"open": None, "staged": 0, "bytes": 0, "missing": 0, "first_missing": None}
        if publication is not None:
            missing = publication.missing
            response["open"] = str(publication.manifest)
            response["staged"] = len(publication.staged)
            response["bytes"] = sum(tensor.view.nbytes for tensor in publication.staged.values())
            response["missing"] = len(missing)
            response["first_missing"] = next(iter(missing), None)
        return response | {"version": self.version, "outcome": self.outcome}

    def inventory(self, *, encoding: Encoding) -> Json:
        """Returns `{"forms": {name: "dtype:d0,d1"}, "uncovered": {parameter: reason}}` for a publication in `encoding`.

        `forms`: dtype and shape of each tensor that this rank needs; `uncovered`: parameters that no tensor covers.
        """
        layout = self._layout_of(encoding)
        names = (name for name in layout.local if encoding != "adapters" or is_adapter(name))
        return {"forms": {name: layout.places[name].form for name in names}, "uncovered": layout.uncovered}

    # ----------------------------------------------------------------------------------------------------------------

    def _layout_of(self, encoding: Encoding) -> Layout:
        """Returns the locations on this rank of all tensors of a publication in `encoding`."""
        if encoding == "local":
            return local_layout(self.model)
        return self._hf_layout()

    def _hf_layout(self) -> Layout:
        """Returns the layout of Hugging Face tensors. The layout is recomputed only after experts were rebalanced,
        because computing it for DeepSeek-V3's 45,395 tensors takes a second, during which the server does not
        generate."""
        slots = None if self.experts is None else self.experts.physical_to_logical_map_cpu
        if self._layout is not None:
            known, layout = self._layout
            if slots is None or (known is not None and torch.equal(slots, known)):
                return layout
        layout = hf_layout(self.model, self.experts)
        self._layout = None if slots is None else slots.clone(), layout
        if self.adapters:  # all slots have the same layout
            next(iter(self.adapters.values())).place(layout)
        return layout

    def _parameters(self, policy: str) -> dict[str, torch.Tensor]:
        """Returns all tensors that publications of `policy` write: the model's parameters and the tensors of the
        policy's adapter slot, by their names in layouts."""
        parameters: dict[str, torch.Tensor] = dict(weights_of(self.model))
        if self.adapters:
            parameters |= self.adapters[policy].buffers()
        return parameters

    def _base_of_others(self, publication: OpenPublication) -> dict[str, int]:
        """Returns the checksum shares of the base weights if other published policies depend on them, in which case
        `publication` must not change them; otherwise {}."""
        if self.copied is None or not any(self._others(publication.manifest.policy)):
            return {}
        return {name: share for name, share in self.copied.loaded.items() if not is_adapter(name)}

    def _others(self, policy: str) -> Iterator[tuple[str, Slot, dict[str, int]]]:
        """Yields (name, slot, checksum shares) of each policy other than `policy` whose adapters have been
        published."""
        for name, slot in self.adapters.items():
            if name != policy and slot.shares is not None:
                yield name, slot, slot.shares

    def _base(self, new: Manifest, layout: Layout) -> dict[str, int]:
        """Returns the checksum shares of the base weights to which the adapter-only publication `new` applies."""
        if not self.adapters:
            raise SlimxError(
                f"{new} contains only adapters, but this server was started without slots for adapters; "
                "restart the server with the adapters of the run's policies",
                code="receiver.no_adapters",
                about=str(new),
            )
        return base_shares(new, layout, {} if self.copied is None else self.copied.loaded)

    def _check_open(self, policy: str, version: int, epoch: int) -> OpenPublication:
        """Returns the open publication. Raises SlimxError if no publication is open, or if the open one has another
        policy, version or membership epoch."""
        if self.open is None or self.open.key != (policy, version, epoch):
            raise self._not_open(f"version {version}", f"received for {policy} in epoch {epoch}")
        return self.open

    def _not_open(self, version: str, request: str) -> SlimxError:
        """Returns the error for a `request` to this rank about a `version` whose publication is not open."""
        current = "no publication" if self.open is None else self.open.manifest
        message = f"{version} cannot be {request}, because {current} is open; begin its publication first"
        return SlimxError(message, code="receiver.not_open", about=version)

    def _counted(self, ready: dict[str, Staged]) -> Iterator[tuple[str, torch.Tensor]]:
        for count, (name, staged) in enumerate(ready.items()):
            self.outcome["loaded"] = count
            yield name, staged.view
        self.outcome["loaded"] = len(ready)


def receiver_of(model: nn.Module) -> RankReceiver:
    """Returns the model's receiver, which is created at the first call and stored in the model."""
    if not hasattr(model, ATTRIBUTE):
        object.__setattr__(model, ATTRIBUTE, RankReceiver(model))
    return getattr(model, ATTRIBUTE)


def load_staged(model: nn.Module, named_tensors: Iterable[object]) -> None:
    """Copies the staged tensors into the model, as the custom weight loader of /update_weights_from_tensor.

    `named_tensors`, the request's list, is empty. An exception from a loader would end SGLang's scheduler and, with TP,
    leave the other ranks waiting. The outcome is therefore recorded for the client, which reads it with `status`."""
    receiver = receiver_of(model)
    receiver.outcome = {"loaded": 0}
    try:
        receiver._load()
    except Exception as error:
        receiver.outcome["error"] = str(error) if isinstance(error, SlimxError) else raised(error)
        receiver.open = None
