"""Groups of engine servers, entries of rollout.engines, and their health checks."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from slimx.config.section import Count, Section


class Engines(Section):
    """A group of identical engine servers."""

    model: str | None = Field(
        None,
        description="Hugging Face directory that the servers start from, such as an fp8 copy of model.path; null: "
        "model.path",
    )
    name: str = Field("actor", description="name of the group in logs and metrics")
    count: PositiveInt = Field(1, description="number of servers in the group")
    max_total_tokens: PositiveInt | None = Field(None, description="KV-cache room in tokens; null: SGLang decides")
    threads: PositiveInt = Field(1, description="CPU threads of each rank of a server (CPU only)")
    tensor: PositiveInt = Field(1, description="tensor parallel size of a server (SGLang's tp_size)")
    expert: PositiveInt = Field(1, description="expert parallel size of a server (ep_size); divides tensor")
    pipeline: PositiveInt = Field(1, description="pipeline parallel size of a server (pp_size)")
    dp_attention: PositiveInt = Field(
        1, description="copies of the attention in a server (dp_size with enable_dp_attention); divides tensor"
    )
    sglang: dict[str, Any] = Field(
        default_factory=dict, description="fields of SGLang's ServerArgs, passed through after a check"
    )

    @property
    def ranks(self) -> int:
        """Ranks of one server: a GPU each on CUDA."""
        return self.tensor * self.pipeline


class Health(Section):
    interval: PositiveFloat = Field(5, description="seconds between two checks of /health_generate")
    timeout: PositiveFloat = Field(30, description="seconds that one check may take")
    threshold: PositiveInt = Field(
        3, description="failed checks in a row after which an engine is quarantined and started again"
    )
    restarts: Count = Field(
        2, description="times that each engine, and the courier of a transport, may be started again in a run; 0: never"
    )
