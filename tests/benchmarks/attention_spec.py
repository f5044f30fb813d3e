"""The nodes of the attention benches: whole context, rotary on all of a head, heads of one size."""

from quantmoe.custom_ops.op import AttentionSpec, DeltaSpec, SpaceSpec


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


def delta_spec_of(groups: int, heads: int, head_size: int) -> DeltaSpec:
    """Qwen3-Next's and Qwen3.5's."""
    return DeltaSpec(
        num_k_heads=groups,
        num_v_heads=heads,
        k_head_size=head_size,
        v_head_size=head_size,
        scale=head_size**-0.5,
        l2_epsilon=1e-6,
        decay_per_key=0,
        beta_scale=1.0,
        gate="silu",
        norm_epsilon=1e-6,
    )


def space_spec_of(groups: int, heads: int, norm_size: int) -> SpaceSpec:
    """Nemotron-3's and Granite 4 H's."""
    return SpaceSpec(
        num_groups=groups,
        num_heads=heads,
        state_size=128,
        head_size=64,
        norm_size=norm_size,
        norm_epsilon=1e-5,
        state_window=1,
        dt_size=0,
        dt_offset=0,
        z_size=0,
        z_offset=0,
    )
