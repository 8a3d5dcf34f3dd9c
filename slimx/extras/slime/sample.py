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
    """Token sequence of a prompt and a response; the response is the last `response_length` tokens. Hooks may add
    fields."""

    class Status(Enum):
        """Final status of a sample; PENDING until the hook sets another one."""

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
    """Token ids of prompt and response; empty until the hook sets them."""
    response: str = ""
    response_length: int = 0
    label: Any = None
    """Reference answer: `metadata["label"]` of the prompt if it has one, else the prompt's answer."""
    reward: Any = None
    loss_mask: list[int] | None = None
    """[response_length]: 1 for trained tokens, else 0; None: all tokens of the response are trained on."""
    weight_versions: list[str] = field(default_factory=list)
    """For each request, the version of the weights that generated its response."""
    rollout_log_probs: list[float] | None = None
    """[response_length]: log-probs of sampled tokens; 0 for other tokens."""
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: np.ndarray | None = None
    """int32 [tokens - 1, layers, k]: the k experts to which the engine routed each input token, per layer."""
    remove_sample: bool = False
    """True to train on none of the sample's tokens."""
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
        """Number of trained tokens of the response."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """Returns the reward or, if `args.reward_key` is set, the reward's value for this key."""
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
        """Appends tokens to the response. `trainable` tokens are sampled ones and need `log_probs`; other tokens, such
        as those of a tool's result, must have none. Raises ValueError if log-probs are missing, superfluous or not one
        per token. `meta_info`: field of this name in the engine's response, from which routed experts are taken and, if
        `update_terminal_info` is True, also the status and the weight version."""
        # A fractional token id is kept, and refused when the sample is converted to a trajectory.
        new: list[int] = []
        if tokens is not None:
            new = [token if token % 1 else int(token) for token in tokens]
        new_log_probs = None
        if log_probs is not None:
            new_log_probs = [float(value) for value in log_probs]
        if new_log_probs is not None and len(new_log_probs) != len(new):
            raise ValueError(
                f"append_response_tokens got {len(new_log_probs)} log-probs for {len(new)} tokens; pass one per token"
            )
        if new and trainable == (new_log_probs is None):
            raise ValueError(
                "append_response_tokens needs log-probs for trainable tokens, and only for them; "
                f"got {'none' if new_log_probs is None else 'some'} with trainable={trainable}"
            )
        if new:
            before = self.response_length
            if self.rollout_log_probs is None and before and trainable:
                raise ValueError(
                    "append_response_tokens: earlier response tokens have no log-probs; set rollout_log_probs first"
                )
            # Lists are extended in place, because published hooks keep references to them.
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
"""Status of a sample for each `finish_reason` of a request."""
FIELDS = frozenset(item.name for item in fields(Sample))
"""Names of the fields that every sample has; all other attributes were added by hooks."""
