"""Operations of exact mode, which trainer and engines share so that their log-probs are bitwise equal.

They follow the contract in `docs/numerics.md`. A row's forward result depends only on that row, not on the batch, the
position in the batch, the number of threads, the packing or the code path. The backward pass is ordinary torch.
"""

from slimx.extras.exact.operations.activation import silu_and_mul as silu_and_mul
from slimx.extras.exact.operations.attention import attention as attention
from slimx.extras.exact.operations.attention import gathered_attention as gathered_attention
from slimx.extras.exact.operations.contract import contract as contract
from slimx.extras.exact.operations.linear import combine_leaves as combine_leaves
from slimx.extras.exact.operations.linear import grouped_linear as grouped_linear
from slimx.extras.exact.operations.linear import linear as linear
from slimx.extras.exact.operations.linear import linear_partial as linear_partial
from slimx.extras.exact.operations.logprobs import log_softmax as log_softmax
from slimx.extras.exact.operations.logprobs import token_logprobs as token_logprobs
from slimx.extras.exact.operations.moe import moe_combine as moe_combine
from slimx.extras.exact.operations.moe import route as route
from slimx.extras.exact.operations.norm import add_rms_norm as add_rms_norm
from slimx.extras.exact.operations.norm import rms_norm as rms_norm
from slimx.extras.exact.operations.rope import Llama3 as Llama3
from slimx.extras.exact.operations.rope import Rotary as Rotary
from slimx.extras.exact.operations.rope import Yarn as Yarn
from slimx.extras.exact.operations.rope import rope as rope
from slimx.extras.exact.operations.rope import rope_frequencies as rope_frequencies
from slimx.extras.exact.operations.rope import rope_table as rope_table
from slimx.extras.exact.operations.rope import yarn_lengthening as yarn_lengthening
from slimx.extras.exact.operations.sizes import CONTRACT_VERSION as CONTRACT_VERSION
