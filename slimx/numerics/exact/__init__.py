"""Exact mode: the operations that engine and trainer share so that their log-probabilities agree to the last bit.

`docs/numerics.md` has the contract. Forward results of a row depend on that row alone: not on the batch, its place in
it, the number of threads, the packing, or the code path. Backward is ordinary torch.
"""

from slimx.numerics.exact.activation import silu_and_mul as silu_and_mul
from slimx.numerics.exact.attention import attention as attention
from slimx.numerics.exact.attention import gathered_attention as gathered_attention
from slimx.numerics.exact.contract import contract as contract
from slimx.numerics.exact.linear import combine_leaves as combine_leaves
from slimx.numerics.exact.linear import grouped_linear as grouped_linear
from slimx.numerics.exact.linear import linear as linear
from slimx.numerics.exact.linear import linear_partial as linear_partial
from slimx.numerics.exact.logprobs import log_softmax as log_softmax
from slimx.numerics.exact.logprobs import token_logprobs as token_logprobs
from slimx.numerics.exact.moe import moe_combine as moe_combine
from slimx.numerics.exact.moe import route as route
from slimx.numerics.exact.norm import add_rms_norm as add_rms_norm
from slimx.numerics.exact.norm import rms_norm as rms_norm
from slimx.numerics.exact.rope import Llama3 as Llama3
from slimx.numerics.exact.rope import Rotary as Rotary
from slimx.numerics.exact.rope import Yarn as Yarn
from slimx.numerics.exact.rope import rope as rope
from slimx.numerics.exact.rope import rope_frequencies as rope_frequencies
from slimx.numerics.exact.rope import rope_table as rope_table
from slimx.numerics.exact.rope import yarn_lengthening as yarn_lengthening
from slimx.numerics.exact.sizes import CONTRACT_VERSION as CONTRACT_VERSION
