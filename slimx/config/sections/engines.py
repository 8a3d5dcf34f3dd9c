"""Groups of engine servers (entries of rollout.engines) and their health checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError

from slimx.config.section import (
    GPUS,
    LARGEST,
    SERVER,
    Amount,
    Count,
    Faults,
    Options,
    PathText,
    Seconds,
    Section,
    Size,
    shortened,
)

MTP_DRAFTS = ("EAGLE", "NEXTN")
"""SGLang's algorithms that draft tokens by the model's layer of multi-token prediction."""
_ADDRESS = re.compile(r"http://(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}")
"""Address of a server, with IPv6 addresses in brackets."""
_READ: dict[str, TypeAdapter[object]] = {
    "mem_fraction_static": TypeAdapter(Annotated[float, Field(gt=0, lt=1)]),
    "max_running_requests": TypeAdapter(Amount),
    "chunked_prefill_size": TypeAdapter(Annotated[int, Field(ge=-1, le=LARGEST)]),
    "kv_cache_dtype": TypeAdapter(str),
}
"""Types of the fields of SGLang's ServerArgs that `slimx plan` computes with. A field may also be null."""


class Engines(Section):
    """A group of identical engine servers."""

    name: str = "actor"
    """Name of the group in logs, metrics and hooks (`ctx.engines[name]`)."""
    role: Literal["regular", "prefill", "decode"] = "regular"
    """prefill, decode: SGLang's disaggregation, in which one server computes the KV of prompts and another samples;
    regular: each server does both."""
    frozen: bool = False
    """true: another model (a judge, a reward model, a teacher), which weights are never published to. It has a separate
    router, and hooks reach it by the group's name."""
    model: PathText | None = None
    """Hugging Face directory that the servers load, such as an fp8 copy of model.path; null: model.path."""
    count: Size = 1
    """Number of servers in the group."""
    urls: tuple[str, ...] = ()
    """Addresses of external servers, http://HOST:PORT each, instead of `count`. slimx neither starts nor stops them."""
    api_key_env: str | None = None
    """Environment variable of the driver with the key that the servers of `urls` require for generation (SGLang's
    --api-key); null: they require none."""
    admin_api_key_env: str | None = None
    """Environment variable of the driver with the key that they require for control calls (--admin-api-key); null: that
    of api_key_env."""
    nodes: Size = 1
    """Machines that one server spans (nnodes), each with an equal number of its ranks."""
    max_total_tokens: Amount | None = None
    """Capacity of the KV cache in tokens; null: SGLang decides."""
    threads: Size = 1
    """CPU threads per rank of a server (CPU only)."""
    tensor: Size = 1
    """Tensor parallel size of a server (SGLang's tp_size)."""
    expert: Size = 1
    """Expert parallel size of a server (ep_size); it must divide `tensor`."""
    pipeline: Size = 1
    """Pipeline parallel size of a server (pp_size)."""
    dp_attention: Size = 1
    """Data parallel size of the attention in a server (dp_size with enable_dp_attention); it must divide `tensor`."""
    precompile: bool = False
    """Compile DeepGEMM's kernels for all sizes before a server serves, not each when it is first needed. This takes
    tens of minutes at the first start with fp8 weights."""
    sglang: Options = Field(default_factory=dict)
    """Fields of SGLang's ServerArgs, which are checked and passed through."""

    _borrowed: bool = PrivateAttr(default=False)

    def as_borrowed(self) -> Engines:
        """Returns the group as seen by a policy that uses another policy's servers (`policies.NAME.engines_of`)."""
        group = self.model_copy()
        group._borrowed = True
        return group

    @property
    def borrowed(self) -> bool:
        """True if the servers belong to another policy, which starts and counts them."""
        return self._borrowed

    @property
    def where(self) -> str:
        """The group's name in a message."""
        return f"rollout.engines group {self.name}"

    @property
    def ranks(self) -> int:
        """Ranks of one server, with a GPU each on CUDA."""
        return self.tensor * self.pipeline

    @property
    def servers(self) -> int:
        """Number of servers in the group, including external ones."""
        return len(self.urls) or self.count

    @property
    def drafts(self) -> bool:
        """True if the servers draft tokens by the model's layer of multi-token prediction."""
        algorithm = self.sglang.get("speculative_algorithm")
        return algorithm in MTP_DRAFTS and not self.sglang.get("speculative_draft_model_path")

    @property
    def started(self) -> int:
        """Number of servers that slimx starts for the policy of this group."""
        return 0 if self.urls or self.borrowed else self.count

    def _faults(self) -> Faults:
        where = self.where
        if self.frozen and self.role != "regular":
            yield (
                "engines.frozen_role",
                "rollout.engines",
                f"{where} is frozen and has the role {self.role}, but only the policy has prefill and decode servers; "
                "set frozen=false or role=regular",
            )
        if self.frozen and not self.urls and self.model is None:
            yield (
                "engines.frozen_model",
                "rollout.engines",
                f"{where} is frozen but has neither a model nor urls; set `model` to the directory of its model, which "
                "may be model.path",
            )
        if self.ranks % self.nodes:
            yield (
                "engines.nodes",
                "rollout.engines",
                f"{where}: nodes {self.nodes} does not divide the {self.ranks} ranks of a server (tensor x pipeline); "
                "give each machine the same number of ranks",
            )
        if self.ranks > SERVER:
            yield (
                "engines.server_ranks",
                "rollout.engines",
                f"{where} has servers of {self.ranks} ranks (tensor x pipeline), more than the maximum of {SERVER:,}; "
                "lower tensor or pipeline",
            )
        if self.started * self.ranks > GPUS:
            yield (
                "engines.group_ranks",
                "rollout.engines",
                f"{where} has {self.started} servers of {self.ranks} ranks, more than the maximum of {GPUS:,} ranks "
                "per group; lower count, tensor or pipeline",
            )
        for key, kind in _READ.items():
            value = self.sglang.get(key)
            if value is None:
                continue
            try:
                kind.validate_python(value, strict=True)
            except ValidationError as error:
                message = error.errors()[0]["msg"]
                yield (
                    "engines.sglang_value",
                    f"rollout.engines.sglang.{key}",
                    f"{where}: sglang.{key} is {shortened(value)}: {message[0].lower()}{message[1:]}",
                )
        if self.urls:
            yield from self._external_faults(where)
        elif self.api_key_env or self.admin_api_key_env:
            yield (
                "engines.keys_without_urls",
                "rollout.engines",
                f"{where} has api_key_env or admin_api_key_env but no urls, and slimx generates the keys of servers "
                "that it starts; remove both",
            )
        if self.sglang.get("disaggregation_transfer_backend") == "fake":
            yield (
                "engines.fake_transfer",
                "rollout.engines",
                f"{where}: disaggregation_transfer_backend fake does not transfer the KV that decode servers need; use "
                "mooncake or nixl",
            )

    def _external_faults(self, where: str) -> Faults:
        """Yields a fault for each malformed address, and for keys that have no effect on an external server."""
        idle = ("count", "model", "nodes", "max_total_tokens", "threads", "precompile", "sglang")
        # Comparison with defaults, because the config.yaml of a run has them written out.
        default = type(self)()
        changed = []
        for key in idle:
            if getattr(self, key) != getattr(default, key):
                changed.append(key)
        if changed:
            yield (
                "engines.urls_idle_key",
                f"rollout.engines.{changed[0]}",
                f"{where} has urls of external servers, on which {changed[0]} has no effect; remove it",
            )
        if self.role == "prefill":
            yield (
                "engines.urls_prefill",
                "rollout.engines",
                f"{where} has urls and the role prefill, but slimx has to choose the bootstrap port of a prefill "
                "server; remove urls",
            )
        for url in self.urls:
            if not _ADDRESS.fullmatch(url):
                yield (
                    "engines.url",
                    url,
                    f"{where}: {url!r} in urls is not of the form http://HOST:PORT",
                )
        if len(set(self.urls)) < len(self.urls):
            yield (
                "engines.url_twice",
                "rollout.engines",
                f"{where} has an address twice in urls; list each server once",
            )


def group_faults(groups: Sequence[Engines]) -> Faults:
    """Yields faults between the groups of a run."""
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        yield (
            "engines.name_twice",
            "rollout.engines",
            f"rollout.engines names a group twice in {names}; give each group its own name",
        )
    urls: list[str] = []
    for group in groups:
        urls += group.urls
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        yield (
            "engines.url_in_two_groups",
            twice,
            f"rollout.engines has {twice} in two groups; list each server in one group",
        )
    roles = set()
    for group in groups:
        if not group.frozen:
            roles.add(group.role)
    split = roles & {"prefill", "decode"}
    if len(split) == 1:
        (present,) = split
        missing = "decode" if present == "prefill" else "prefill"
        yield (
            "engines.role_missing",
            "rollout.engines",
            f"rollout.engines has a group with the role {present} but none with {missing}; add one",
        )
    if split and "regular" in roles:
        yield (
            "engines.roles_mixed",
            "rollout.engines",
            "rollout.engines mixes the role regular with prefill and decode, but a router serves one kind only; use "
            "regular for all groups of the policy, or for none",
        )


class Health(Section):
    interval: Seconds = 5
    """Seconds between two checks of each engine (/health_generate) and of the router."""
    timeout: Seconds = 30
    """Seconds for one check."""
    threshold: Amount = 3
    """Consecutive failed checks after which an engine or the router is restarted."""
    restarts: Count = 5
    """Consecutive restarts allowed for each engine and each router; 0: none."""
    stable_after: Seconds = 600
    """Seconds of service after which earlier restarts of an engine or router no longer count."""
    outage_deadline: Seconds = 3600
    """Seconds that a run waits while no engine is running, before it ends. Rollouts wait too, and their deadlines are
    suspended."""
