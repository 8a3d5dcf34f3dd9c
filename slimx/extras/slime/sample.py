"""`slime.utils.types.Sample`, which a slime hook receives and fills."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np

from slimx.json_types import Json


@dataclass
class Sample:
    """One sequence, prompt and response; the response is its last `response_length` tokens. Hooks may add fields."""

    class Status(Enum):
        """Final status of a sample."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[Json] = ""
    tokens: list[int] = field(default_factory=list)
    """Token ids of prompt and response; empty until the hook fills it."""
    response: str = ""
    response_length: int = 0
    label: Any = None
    """`metadata["label"]` of the prompt if it has one, else its answer."""
    reward: Any = None
    loss_mask: list[int] | None = None
    """[response_length]: 1 for trained tokens; None: all tokens are trained."""
    weight_versions: list[str] = field(default_factory=list)
    """Weight version of each request."""
    rollout_log_probs: list[float] | None = None
    """[response_length]: 0 for tokens that no engine sampled."""
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: np.ndarray | None = None
    """int32 [tokens - 1, layers, k]."""
    remove_sample: bool = False
    """True if none of its tokens are trained."""
    status: Status = Status.PENDING
    metadata: Json = field(default_factory=dict)
    train_metadata: Json | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    multimodal_inputs: Json | None = None
    multimodal_train_inputs: Json | None = None
    teacher_log_probs: list[float] | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    apply_chat_template_kwargs: Json = field(default_factory=dict)

    @property
    def effective_response_length(self) -> int:
        """Number of trained tokens."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """Returns the reward, or its entry under `args.reward_key`."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key else self.reward

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: Json | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Appends tokens to the response: sampled ones (trainable, with log-probs and the response's `meta_info`) or
        those of a tool (not trainable, without). Raises ValueError for another combination."""
        # A fractional token stays as it is, and is refused once the sample becomes a trajectory.
        new: list[int] = []
        if tokens is not None:
            new = [token if token % 1 else int(token) for token in tokens]
        new_log_probs = None
        if log_probs is not None:
            new_log_probs = [float(value) for value in log_probs]
        if new_log_probs is not None and len(new_log_probs) != len(new):
            raise ValueError(f"append_response_tokens got {len(new_log_probs)} log-probs for {len(new)} tokens")
        if new and trainable == (new_log_probs is None):
            raise ValueError(
                "append_response_tokens needs log-probs of trainable tokens, and only of these; "
                f"got {'none' if new_log_probs is None else 'some'} with trainable={trainable}"
            )
        if new:
            before = self.response_length
            if self.rollout_log_probs is None and before and trainable:
                raise ValueError("append_response_tokens: the response so far has no log-probs")
            # In place: published hooks keep references to these lists.
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            self.loss_mask += [int(trainable)] * len(new)
            if self.rollout_log_probs is None:
                self.rollout_log_probs = [0.0] * before
            self.rollout_log_probs += new_log_probs or [0.0] * len(new)
            self.tokens += new
            self.response_length += len(new)
        self.response += text or ""
        if meta_info is not None:
            self._take(args, meta_info, ends=update_terminal_info)

    def _take(self, args: Any, meta: Json, *, ends: bool) -> None:
        if meta.get("routed_experts"):
            flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
            self.rollout_routed_experts = flat.reshape(len(self.tokens) - 1, args.num_layers, args.moe_router_topk)
        if ends and "finish_reason" in meta:
            self.weight_versions.append(meta["weight_version"])
            self.status = ENDS[meta["finish_reason"]["type"]]


Status = Sample.Status
ENDS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""`finish_reason` of a request -> status."""
FIELDS = frozenset(item.name for item in fields(Sample))
"""Names of a sample's fields; other attributes are the hook's."""
