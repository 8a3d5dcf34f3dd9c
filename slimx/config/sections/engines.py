"""Groups of engine servers, entries of rollout.engines, and their health checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError

from slimx.config.section import (
    GPUS,
    LARGEST,
    SERVER,
    Amount,
    Count,
    Faults,
    PathText,
    Seconds,
    Section,
    Size,
    shortened,
)

OWN_DRAFTS = ("EAGLE", "NEXTN")
"""SGLang's ways to draft tokens by the model's own layer of multi-token prediction."""
_ADDRESS = re.compile(r"http://(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}")
"""A server's address; IPv6 addresses stand in brackets."""
_READ: dict[str, TypeAdapter[Any]] = {
    "mem_fraction_static": TypeAdapter(Annotated[float, Field(gt=0, lt=1)]),
    "max_running_requests": TypeAdapter(Amount),
    "chunked_prefill_size": TypeAdapter(Annotated[int, Field(ge=-1, le=LARGEST)]),
    "kv_cache_dtype": TypeAdapter(str),
}
"""Fields of SGLang's ServerArgs that `slimx plan` computes with, and what they may be; null: SGLang's default."""


class Engines(Section):
    """A group of identical engine servers."""

    name: str = "actor"
    """Name of the group in logs and metrics, and in hooks (`ctx.engines[name]`)."""
    role: Literal["regular", "prefill", "decode"] = "regular"
    """Prefill, decode: SGLang's disaggregation, in which one server computes the KV of prompts and another samples;
    regular: each server does both."""
    frozen: bool = False
    """true: another model (a judge, a reward model, a teacher) that weights are never published to, behind a router of
    its own; hooks reach it by the group's name."""
    model: PathText | None = None
    """Hugging Face directory that the servers start from, such as an fp8 copy of model.path; null: model.path."""
    count: Size = 1
    """Number of servers in the group."""
    urls: tuple[str, ...] = ()
    """Addresses of servers that run already, http://HOST:PORT each, in place of `count`; slimx never ends them."""
    api_key_env: str | None = None
    """Environment variable of the driver with the key that the servers of `urls` ask for generation (SGLang's
    --api-key); null: they ask for none."""
    admin_api_key_env: str | None = None
    """Environment variable of the driver with the key that they ask for control calls (--admin-api-key); null:
    api_key_env's."""
    nodes: Size = 1
    """Machines that one server spans (nnodes), each with an equal share of its ranks."""
    max_total_tokens: Amount | None = None
    """KV-cache room in tokens; null: SGLang decides."""
    threads: Size = 1
    """CPU threads of each rank of a server (CPU only)."""
    tensor: Size = 1
    """Tensor parallel size of a server (SGLang's tp_size)."""
    expert: Size = 1
    """Expert parallel size of a server (ep_size); divides tensor."""
    pipeline: Size = 1
    """Pipeline parallel size of a server (pp_size)."""
    dp_attention: Size = 1
    """Copies of the attention in a server (dp_size with enable_dp_attention); divides tensor."""
    precompile: bool = False
    """Compile DeepGEMM's kernels for all sizes before a server serves (tens of minutes at a first start with fp8
    weights), not when it first needs each."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Fields of SGLang's ServerArgs, passed through after a check."""

    _borrowed: bool = PrivateAttr(default=False)

    def as_borrowed(self) -> Engines:
        """The group as a policy sees it that uses another's servers (`policies.NAME.engines_of`)."""
        group = self.model_copy()
        group._borrowed = True
        return group

    @property
    def borrowed(self) -> bool:
        """True if the servers are another policy's, which starts them and is counted with them."""
        return self._borrowed

    @property
    def where(self) -> str:
        """The group's name in a sentence."""
        return f"rollout.engines group {self.name}"

    @property
    def ranks(self) -> int:
        """Ranks of one server: a GPU each on CUDA."""
        return self.tensor * self.pipeline

    @property
    def servers(self) -> int:
        """Servers of the group, started by slimx or not."""
        return len(self.urls) or self.count

    @property
    def drafts(self) -> bool:
        """True if its servers draft tokens by the model's own layer of multi-token prediction."""
        given = self.sglang
        return given.get("speculative_algorithm") in OWN_DRAFTS and not given.get("speculative_draft_model_path")

    @property
    def started(self) -> int:
        """Servers that slimx starts for the policy whose group this is."""
        return 0 if self.urls or self.borrowed else self.count

    def _faults(self) -> Faults:
        where = self.where
        if self.frozen and self.role != "regular":
            yield (
                "engines.frozen_role",
                "rollout.engines",
                f"{where} is frozen and has the role {self.role}; prefill and decode servers are the policy's: set "
                "frozen=false or role=regular",
            )
        if self.frozen and not self.urls and self.model is None:
            yield (
                "engines.frozen_model",
                "rollout.engines",
                f"{where} is frozen but names neither a model nor urls; name the directory of its model, which may be "
                "model.path",
            )
        if self.ranks % self.nodes:
            yield (
                "engines.nodes",
                "rollout.engines",
                f"{where}: nodes {self.nodes} does not divide the {self.ranks} ranks of a server (tensor x pipeline); "
                "each machine has the same share of them",
            )
        if self.ranks > SERVER:
            yield (
                "engines.server_ranks",
                "rollout.engines",
                f"{where} has servers of {self.ranks} ranks (tensor x pipeline), more than the {SERVER:,} that one may "
                "have; lower tensor or pipeline",
            )
        if self.started * self.ranks > GPUS:
            yield (
                "engines.group_ranks",
                "rollout.engines",
                f"{where} is {self.started} servers of {self.ranks} ranks, more than the {GPUS:,} ranks that a group "
                "may have; lower count, tensor or pipeline",
            )
        for key, kind in _READ.items():
            if (value := self.sglang.get(key)) is None:
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
                f"{where} names keys but no urls; slimx gives the servers that it starts random keys: remove "
                "api_key_env and admin_api_key_env",
            )
        if self.sglang.get("disaggregation_transfer_backend") == "fake":
            yield (
                "engines.fake_transfer",
                "rollout.engines",
                f"{where}: disaggregation_transfer_backend fake moves no KV, so that decode servers would sample from "
                "nothing; use mooncake or nixl",
            )

    def _external_faults(self, where: str) -> Faults:
        """Yields addresses that are none, and keys that cannot reach a server which runs already."""
        idle = ("count", "model", "nodes", "max_total_tokens", "threads", "precompile", "sglang")
        # Ranks, and a run's own config.yaml, have the defaults written out.
        default = type(self)()
        if given := [key for key in idle if getattr(self, key) != getattr(default, key)]:
            yield (
                "engines.urls_idle_key",
                f"rollout.engines.{given[0]}",
                f"{where} has urls, servers that run already, so that its {given[0]} would do nothing; remove it",
            )
        if self.role == "prefill":
            yield (
                "engines.urls_prefill",
                "rollout.engines",
                f"{where} has urls and the role prefill, whose bootstrap port slimx chooses when it starts a server; "
                "let slimx start prefill servers",
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
                f"{where} names an address twice in urls; name each server once",
            )


def group_faults(groups: Sequence[Engines]) -> Faults:
    """Yields everything that keeps groups from serving together."""
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        yield (
            "engines.name_twice",
            "rollout.engines",
            f"rollout.engines names a group twice in {names}; give each group its own name",
        )
    urls = [url for group in groups for url in group.urls]
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        yield (
            "engines.url_in_two_groups",
            twice,
            f"rollout.engines names {twice} in two groups; a server belongs to one",
        )
    roles = {group.role for group in groups if not group.frozen}
    split = roles & {"prefill", "decode"}
    if len(split) == 1:
        (have,) = split
        missing = "decode" if have == "prefill" else "prefill"
        yield (
            "engines.role_missing",
            "rollout.engines",
            f"rollout.engines has a group with the role {have} but none with {missing}; add one",
        )
    if split and "regular" in roles:
        yield (
            "engines.roles_mixed",
            "rollout.engines",
            "rollout.engines mixes the role regular with prefill and decode, and one router serves either; give all "
            "groups of the policy roles of one kind",
        )


class Health(Section):
    interval: Seconds = 5
    """Seconds between two checks of /health_generate, and of the router."""
    timeout: Seconds = 30
    """Seconds that one check may take."""
    threshold: Amount = 3
    """Failed checks in a row after which an engine, or the router, is started again."""
    restarts: Count = 5
    """Times in a row that each engine and each router may be started again; 0: never."""
    stable_after: Seconds = 600
    """Seconds that a part must have served for its earlier restarts to count no more."""
    outage_deadline: Seconds = 3600
    """Seconds that a run waits for an engine while none runs, before it ends; rollouts wait meanwhile, and their
    deadlines stand still."""
