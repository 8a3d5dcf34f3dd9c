"""Exact mode: the operations that engine and trainer share so that their log-probabilities agree to the last bit.

`docs/numerics.md` has the contract. Forward results of a row depend on that row alone: not on the batch, its place in
it, the number of threads, the packing, or the code path. Backward is ordinary torch.
"""

from slimx.numerics.exact.activation import silu_and_mul
from slimx.numerics.exact.attention import attention, gathered_attention
from slimx.numerics.exact.contract import contract
from slimx.numerics.exact.linear import combine_leaves, grouped_linear, linear, linear_partial
from slimx.numerics.exact.logprobs import log_softmax, token_logprobs
from slimx.numerics.exact.moe import moe_combine, route
from slimx.numerics.exact.norm import add_rms_norm, rms_norm
from slimx.numerics.exact.rope import Llama3, Rotary, Yarn, rope, rope_frequencies, rope_table, yarn_lengthening
from slimx.numerics.exact.sizes import CONTRACT_VERSION

__all__ = [
    "CONTRACT_VERSION",
    "Llama3",
    "Rotary",
    "Yarn",
    "add_rms_norm",
    "attention",
    "combine_leaves",
    "contract",
    "gathered_attention",
    "grouped_linear",
    "linear",
    "linear_partial",
    "log_softmax",
    "moe_combine",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_table",
    "route",
    "silu_and_mul",
    "token_logprobs",
    "yarn_lengthening",
]
