"""The node of the attention benches: whole context, rotary on all of a head, heads of one size."""

from quantmoe.custom_ops.op import AttentionSpec


def spec_of(heads: int, groups: int, head_size: int, qk_norm: str = "none") -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads,
        kv_num_heads=groups,
        head_size=head_size,
        v_head_size=head_size,
        scale=head_size**-0.5,
        sliding_window=0,
        chunk_size=0,
        softcap=0.0,
        rotary_size=head_size,
        rotary_interleaved=0,
        qk_norm=qk_norm,
        norm_epsilon=1e-6,
    )
