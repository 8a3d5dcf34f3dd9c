"""Groups of engine servers (entries of `rollout.engines` and `eval.engines`), a run by its groups, health checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal
from urllib.parse import urlsplit

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
from slimx.errors import counted

MTP_DRAFTS = ("EAGLE", "NEXTN")
"""Values of SGLang's speculative_algorithm that use the model's multi-token-prediction (MTP) layer as the draft model,
if no other draft model is set."""
_ADDRESS = re.compile(r"http://(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}")
"""Pattern of an external server's URL; IPv6 addresses are in brackets."""
_READ: dict[str, TypeAdapter[object]] = {
    "mem_fraction_static": TypeAdapter(Annotated[float, Field(gt=0, lt=1)]),
    "max_running_requests": TypeAdapter(Amount),
    "chunked_prefill_size": TypeAdapter(Annotated[int, Field(ge=-1, le=LARGEST)]),
    "kv_cache_dtype": TypeAdapter(str),
}
"""Types of the fields of SGLang's ServerArgs that `slimx plan` uses in computations. Each field may also be null."""


class Engines(Section):
    """A group of identical engine servers."""

    name: str = "actor"
    """Name of the group in logs, metrics and hooks (`ctx.engines[name]`)."""
    role: Literal["regular", "prefill", "decode"] = "regular"
    """Task of the servers in SGLang's prefill-decode disaggregation. prefill: compute the KV cache of prompts; decode:
    sample tokens from it; regular: do both."""
    frozen: bool = False
    """true: the servers serve a model that is not trained (a judge, a reward model, a teacher) and receive no weights.
    The group has a separate router, and hooks reach it by the group's name."""
    model: PathText | None = None
    """Hugging Face directory that the servers load, such as an fp8 copy of model.path; null: model.path."""
    count: Size = 1
    """Number of servers in the group that slimx starts."""
    urls: tuple[str, ...] = ()
    """Addresses of external servers, each http://HOST:PORT, to use instead of starting `count` servers. slimx neither
    starts nor stops them."""
    api_key_env: str | None = None
    """Name of the environment variable from which the driver reads the key that the servers of `urls` require for
    generation requests (SGLang's --api-key); null: they require no key."""
    admin_api_key_env: str | None = None
    """Name of the environment variable from which the driver reads the key that the servers of `urls` require for
    control requests (SGLang's --admin-api-key); null: the key of api_key_env."""
    nodes: Size = 1
    """Number of machines that one server spans (SGLang's nnodes), each with the same number of the server's ranks."""
    max_total_tokens: Amount | None = None
    """Capacity of the KV cache in tokens; null: SGLang computes it from the free memory."""
    threads: Size = 1
    """CPU threads per rank of a server, which Ray reserves; servers on GPUs do not limit their threads to this
    number."""
    tensor: Size = 1
    """Tensor parallel size of a server (SGLang's tp_size)."""
    expert: Size = 1
    """Expert parallel size of a server (SGLang's ep_size), which must divide `tensor`."""
    pipeline: Size = 1
    """Pipeline parallel size of a server (SGLang's pp_size)."""
    dp_attention: Size = 1
    """Data parallel size of the attention layers in a server (SGLang's dp_size with enable_dp_attention), which must
    divide `tensor`."""
    precompile: bool = False
    """Compile DeepGEMM's kernels for all sizes before a server starts serving, instead of compiling each when it is
    first used. With fp8 weights the first start then takes tens of minutes longer."""
    sglang: Options = Field(default_factory=dict)
    """Additional fields of SGLang's ServerArgs, which are validated and passed to the servers."""

    _borrowed: bool = PrivateAttr(default=False)
    _key: str = PrivateAttr(default="rollout.engines")

    def copied(self, key: str, *, borrowed: bool = False) -> Engines:
        """Returns a copy of this group that is an entry of the list `key`. `borrowed`: True for a policy that uses
        another policy's servers (`policies.NAME.engines_of`)."""
        group = self.model_copy()
        group._key = key
        group._borrowed = borrowed
        return group

    @property
    def key(self) -> str:
        """Key of the list that contains the group."""
        return self._key

    @property
    def borrowed(self) -> bool:
        """True if the servers belong to another policy, which starts them and accounts for their GPUs."""
        return self._borrowed

    @property
    def where(self) -> str:
        """Name of this group in error messages."""
        return f"{self.key} group {self.name}"

    @property
    def ranks(self) -> int:
        """Number of ranks per server; on CUDA each has one GPU."""
        return self.tensor * self.pipeline

    @property
    def servers(self) -> int:
        """Number of servers in the group, including external ones."""
        return len(self.urls) or self.count

    @property
    def drafts(self) -> bool:
        """True if the servers use the model's multi-token-prediction (MTP) layer as the draft model of speculative
        decoding."""
        algorithm = self.sglang.get("speculative_algorithm")
        return algorithm in MTP_DRAFTS and not self.sglang.get("speculative_draft_model_path")

    @property
    def started(self) -> int:
        """Number of servers that slimx starts for this group: 0 for external servers and for those of another
        policy."""
        return 0 if self.urls or self.borrowed else self.count

    def faults(self) -> Faults:
        """Yields the faults of this group, for the section that lists it."""
        for code, key, sentence in chain(self._started_faults(), self._external_faults()):
            yield code, self.key + key, f"{self.where} {sentence}"

    def _started_faults(self) -> Faults:
        """Yields the code, the rest of the key after that of the list, and the sentence without its subject, the group,
        of each fault, except for those of external servers."""
        if self.frozen and self.role != "regular":
            yield (
                "engines.frozen_role",
                "",
                f"is frozen and has the role {self.role}, but only the policy has prefill and decode servers; set "
                "frozen=false or role=regular",
            )
        if self.frozen and not self.urls and self.model is None:
            yield (
                "engines.frozen_model",
                "",
                "is frozen but has neither a model nor urls; set `model` to the directory of the model to serve, which "
                "may be model.path",
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
                    f".sglang.{key}",
                    f"has sglang.{key}={shortened(value)}: {message[0].lower()}{message[1:]}",
                )
        if not self.urls and (self.api_key_env or self.admin_api_key_env):
            yield (
                "engines.keys_without_urls",
                "",
                "has api_key_env or admin_api_key_env but no urls; slimx itself generates the keys of servers that it "
                "starts; remove these settings",
            )
        if self.sglang.get("disaggregation_transfer_backend") == "fake":
            yield (
                "engines.fake_transfer",
                "",
                "has sglang.disaggregation_transfer_backend=fake, which does not transfer the KV cache that decode "
                "servers need; use mooncake or nixl",
            )
        if self.ranks % self.nodes:
            yield (
                "engines.nodes",
                "",
                f"has nodes={self.nodes}, which does not divide the {counted(self.ranks, 'rank')} of a server "
                "(tensor x pipeline); set nodes to a divisor of that number",
            )
        if self.ranks > SERVER:
            yield (
                "engines.server_ranks",
                "",
                f"has servers of {self.ranks} ranks (tensor x pipeline), more than the maximum of {SERVER:,}; lower "
                "tensor or pipeline",
            )
        if self.started * self.ranks > GPUS:
            yield (
                "engines.group_ranks",
                "",
                f"has {counted(self.started, 'server')} of {counted(self.ranks, 'rank')}, more than the maximum of "
                f"{GPUS:,} ranks per group; lower count, tensor or pipeline",
            )

    def _external_faults(self) -> Faults:
        """Yields, in the same form, a fault for each malformed or repeated address, and for the first key that has no
        effect on external servers."""
        if not self.urls:
            return
        idle = ("count", "model", "nodes", "max_total_tokens", "threads", "precompile", "sglang")
        # Compares values with the defaults, because a run's saved config.yaml sets every key.
        default = type(self)()
        for key in idle:
            if getattr(self, key) != getattr(default, key):
                yield (
                    "engines.urls_idle_key",
                    f".{key}",
                    f"has urls, and {key} has no effect on external servers; remove {key}",
                )
                break
        if self.role == "prefill":
            yield (
                "engines.urls_prefill",
                "",
                "has urls and the role prefill, but slimx must choose the bootstrap port of each prefill server; "
                "remove urls",
            )
        for url in self.urls:
            if not _ADDRESS.fullmatch(url):
                yield "engines.url", ".urls", f"has {url!r} in urls, which is not of the form http://HOST:PORT"
        if len(set(self.urls)) < len(self.urls):
            yield "engines.url_twice", ".urls", "has a repeated address in urls; list each server once"


@dataclass(frozen=True, slots=True)
class ServedEngines:
    """Engine groups that a run starts or connects to. Rules use them as the fact `served`."""

    groups: tuple[Engines, ...]
    """All groups, those of `eval.engines` last."""
    evaluation: tuple[Engines, ...] = ()
    """Evaluation engines, those of `eval.engines`; empty if the other engines of the policy evaluate."""

    @property
    def policy(self) -> tuple[Engines, ...]:
        """Groups that serve the policy: they receive its weights and sample rollouts, or evaluate."""
        return tuple(group for group in self.groups if not group.frozen)

    @property
    def sampling(self) -> tuple[Engines, ...]:
        """Groups of the policy that sample rollouts for training."""
        return tuple(group for group in self.policy if group not in self.evaluation)

    @property
    def frozen(self) -> tuple[Engines, ...]:
        """Groups that serve other models, which hooks call by the group's name."""
        return tuple(group for group in self.groups if group.frozen)

    @property
    def external_hosts(self) -> dict[str, str]:
        """Hosts of the policy's external engines, which slimx does not start, by engine name."""
        hosts = {}
        for group in self.policy:
            for index, url in enumerate(group.urls):
                hosts[f"{group.name}-{index}"] = urlsplit(url).hostname or ""
        return hosts


def group_faults(groups: Sequence[Engines]) -> Faults:
    """Yields the faults of each of the `groups` of one list and those that concern several: repeated names and
    addresses, and roles that cannot be combined."""
    key = ""
    for group in groups:
        key = group.key
        yield from group.faults()
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        yield ("engines.name_twice", key, f"{key} has groups named {', '.join(names)}; give each group a unique name")
    urls = [*chain.from_iterable(group.urls for group in groups)]
    for url in urls:
        if urls.count(url) > 1:
            yield (
                "engines.url_in_two_groups",
                url,
                f"{key} lists the server {url} twice; list each server in one group only",
            )
            break
    roles = {group.role for group in groups if not group.frozen}
    split = roles & {"prefill", "decode"}
    if len(split) == 1:
        (present,) = split
        missing = "decode" if present == "prefill" else "prefill"
        yield (
            "engines.role_missing",
            key,
            f"{key} has a group with role={present} but none with role={missing}; add such a group",
        )
    if split and "regular" in roles:
        yield (
            "engines.roles_mixed",
            key,
            f"{key} mixes the role regular with prefill and decode, which one router cannot serve; use "
            "regular for all groups of the policy, or for none",
        )


class Health(Section):
    interval: Seconds = 5
    """Seconds between health checks of each engine (/health_generate) and of the router."""
    timeout: Seconds = 30
    """Seconds to wait for the response to a health check; after that the check counts as failed."""
    threshold: Amount = 3
    """Number of consecutive failed health checks after which an engine or a router is restarted."""
    restarts: Count = 5
    """Number of consecutive restarts allowed for each engine and each router; 0: none, so the first loss is final."""
    stable_after: Seconds = 600
    """Seconds of uninterrupted service after which the earlier restarts of an engine or router no longer count towards
    `restarts`."""
    outage_deadline: Seconds = 3600
    """Seconds for which the run waits while no engine is available; after that it stops with an error. During the wait,
    the deadlines of rollouts are suspended."""
