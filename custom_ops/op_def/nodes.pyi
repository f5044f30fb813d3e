from dataclasses import dataclass

from quantmoe.custom_ops.op_def.schema import Spec

@dataclass(frozen=True, kw_only=True)
class Projection:
    format: str
    group_size: int  # input features that share a scale; -1: one scale a row
    block_n: int  # rows that share a scale; 1, except in 2-D blocks
    scale_type: str
    zero_points: int  # 1: zero-point codes are stored
    bias: int  # 1: the bias in the panels is not all zero
    perm: int  # act-order gathers stored: 0 none, 1 one, 2 gate's and up's
    pre_scale: int  # factors on the activations stored: 0 none, 1 one, 2 gate's and up's
    activation_format: str
    layout: str
    layout_version: int

@dataclass(frozen=True, kw_only=True)
class AddRMSNorm(Spec):
    op_version: int = ...
    norm_epsilon: float

@dataclass(frozen=True, kw_only=True)
class AllGather(Spec):
    op_version: int = ...
    rank: int  # 0 to world - 1
    world: int  # ranks
    axis: int = ...  # of N: -1, the last dimension, or 0, the first
    export_id: int = ...

@dataclass(frozen=True, kw_only=True)
class AllReduce(Spec):
    op_version: int = ...
    rank: int  # 0 to world - 1
    world: int  # ranks
    export_id: int = ...  # of the export that wrote all ranks' files; 0: not known

@dataclass(frozen=True, kw_only=True)
class AllReduceAddRMSNorm(Spec):
    op_version: int = ...
    norm_epsilon: float
    rank: int  # this and the next attributes are AllReduce's
    world: int
    export_id: int

@dataclass(frozen=True, kw_only=True)
class CachedAttention(Spec):
    op_version: int = ...
    num_heads: int  # of queries
    kv_num_heads: int  # a divisor of num_heads
    head_size: int  # of queries and keys
    v_head_size: int  # of values
    scale: float  # of the products of queries and keys
    sliding_window: int  # slots that a token sees, its own included; 0: all before it
    chunk_size: int  # a token in slot p sees slots from p / n * n; 0: from 0
    softcap: float  # score = c tanh(score / c), after the scale; 0: none
    rotary_size: int  # features that rotate, the first ones; even; 0: none
    rotary_interleaved: int  # 0: features i and i + rotary_size / 2 are a pair; 1: 2i and 2i + 1
    qk_norm: str
    norm_epsilon: float
    cache_format: str = ...
    k_scale: float = ...  # of the keys' codes; 1 where cache_format has none
    v_scale: float = ...  # of the values'
    key_split: int = ...  # features of a key in past_key; 0: all, and past_value has values
    nope_size: int = ...  # features of a query that k_up multiplies; 0: none
    out_size: int = ...  # features of a head's output after v_up; 0: v_head_size
    gated: int = ...  # 1: qkv begins with gates [num_heads, v_head_size]; their sigmoid multiplies the output
    block_size: int = ...  # slots of a block, a multiple of 256; 0: a row's slots lie one after the other
    compress_rate: int = ...  # slots of a compressed key, which past_value has; a key is its value; 0: none

@dataclass(frozen=True, kw_only=True)
class CausalConv(Spec):
    op_version: int = ...
    channels: int
    width: int
    activation: str
    state_window: int = ...  # tokens whose states are kept; 1: the last token's
    x_size: int = ...  # 0: channels
    x_offset: int = ...

@dataclass(frozen=True, kw_only=True)
class GatedDelta(Spec):
    op_version: int = ...
    num_k_heads: int  # of queries and keys
    num_v_heads: int  # a multiple of num_k_heads
    k_head_size: int
    v_head_size: int
    scale: float  # of the queries, after their norm
    l2_epsilon: float  # x / sqrt(sum(x^2) + l2_epsilon)
    decay_per_key: int  # 1: a decay for each row of a head's state (Kimi-Linear); 0: one for all
    beta_scale: float  # 1, or 2 for transitions of negative eigenvalues (OLMo-hybrid)
    gate: str
    norm_epsilon: float
    state_window: int = ...  # as CausalConv's
    a_size: int = ...  # features of the tensor; 0: only a's; so b_size and z_size
    a_offset: int = ...
    b_size: int = ...
    b_offset: int = ...
    z_size: int = ...
    z_offset: int = ...

@dataclass(frozen=True, kw_only=True)
class Hadamard(Spec):
    op_version: int = ...
    features: int
    size: int  # a power of two that divides features

@dataclass(frozen=True, kw_only=True)
class HyperConnection(Spec):
    op_version: int = ...
    num_streams: int
    hidden_size: int
    iterations: int  # of Sinkhorn and Knopp's algorithm
    epsilon: float

@dataclass(frozen=True, kw_only=True)
class MoERouter(Spec):
    op_version: int = ...
    hidden_size: int
    num_experts: int  # this and the next attributes are MoERouting's
    top_k: int
    method: str
    renormalize: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    shared_experts: int = ...
    shared_gate: int = ...

@dataclass(frozen=True, kw_only=True)
class MoERouting(Spec):
    op_version: int = ...
    num_experts: int
    top_k: int
    method: str
    renormalize: int  # 1: the weights are divided by their sum
    n_group: int  # groups of num_experts / n_group experts; 1: one group, all of them
    topk_group: int  # groups that are kept, by the sum of the two best scores of each
    routed_scaling_factor: float  # not for the shared experts' weights
    shared_experts: int = ...
    shared_gate: int = ...  # 1: the shared experts' weight is the sigmoid of the last logit; 0: it is 1

@dataclass(frozen=True, kw_only=True)
class QuantLinear(Spec):
    op_version: int = ...
    in_features: int
    out_features: int
    w: Projection

@dataclass(frozen=True, kw_only=True)
class QuantMoE(Spec):
    op_version: int = ...
    num_experts: int  # of the whole layer; w13 and w2 have this node's
    expert_offset: int  # id of row 0
    hidden_size: int
    intermediate_size: int
    activation: str
    gated: int
    swiglu_alpha: float
    swiglu_limit: float
    apply_router_weight_on_input: int
    w2_hadamard: int = ...  # features of a block of h that Hadamard multiplies; 0: none; not for CUDA
    w13: Projection
    w2: Projection

@dataclass(frozen=True, kw_only=True)
class ReduceScatter(Spec):
    op_version: int = ...
    rank: int  # 0 to world - 1
    world: int  # ranks
    export_id: int = ...

@dataclass(frozen=True, kw_only=True)
class SparseIndexer(Spec):
    op_version: int = ...
    num_heads: int  # of queries; all have the same keys
    head_size: int
    top_k: int  # slots that a token selects, at most; a multiple of block_size
    num_groups: int = ...  # of heads, a divisor of num_heads; each has a list of its own
    relu: int = ...  # 0: a score is the sum of weight * (query . key)
    block_size: int = ...  # slots that are selected together
    best_slot: int = ...  # 1: a block has its best slot's score; 0: its last slot's, and the rest is selected, too
    local_blocks: int = ...  # with best_slot: the blocks up to the token's own that are always among them

@dataclass(frozen=True, kw_only=True)
class StateSpace(Spec):
    op_version: int = ...
    num_groups: int
    num_heads: int  # a multiple of num_groups
    state_size: int
    head_size: int
    norm_size: int  # features that are normed together, a multiple of head_size that divides num_heads * head_size
    norm_epsilon: float
    state_window: int  # as CausalConv's
    dt_size: int  # features of the tensor; 0: only dt's; so z_size
    dt_offset: int
    z_size: int
    z_offset: int

@dataclass(frozen=True, kw_only=True)
class TokenRows(Spec):
    op_version: int = ...
