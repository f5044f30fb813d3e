"""Families with layers that keep a state from token to token, beside Qwen's."""

from __future__ import annotations

from math import prod

import numpy as np

from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.gguf.changed_tensors import Change, ChangedTensors
from quantmoe.exporter.reading.gguf.families.base import (
    ATTENTION,
    DECODER,
    Config,
    GgufFamily,
    a_log,
    common,
    dense_layers,
    experts,
    kinds,
    mlp,
    sparse,
    undo_pairs,
)
from quantmoe.exporter.reading.gguf.families.decoders import GRANITE, GRANITE_JOINED, granite
from quantmoe.exporter.reading.gguf.families.latent import JOINED, NAMES, latent
from quantmoe.exporter.reading.gguf.metadata import Metadata


def _mamba2(name: str) -> dict[str, str]:
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
        "ssm_a.None": f"{name}.A_log",
        "ssm_d.None": f"{name}.D",
        "ssm_dt.bias": f"{name}.dt_bias",
    }


def _undo_mamba2(ckpt: ChangedTensors, name: str) -> None:
    """Undo dimensions of 1, and decays as -exp(A_log)."""
    for layer in ckpt.layers:
        for leaf in ("A_log", "D", "norm.weight"):
            ckpt.flatten(f"{layer}.{name}.{leaf}")
        ckpt.change(f"{layer}.{name}.A_log", a_log)
        if (weight := f"{layer}.{name}.conv1d.weight") in ckpt:
            channels, width = ckpt.shape(weight)
            ckpt.reshape(weight, (channels, 1, width))


def _granite_hybrid(m: Metadata) -> Config:
    heads = m.integer("ssm.time_step_rank")
    rotary = m.flag("rope.scaling.finetuned", default=True)
    return granite(m, "granitemoehybrid") | {
        "layer_types": kinds(m, "ssm_in", "linear_attention", "full_attention"),
        "position_embedding_type": "rope" if rotary else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": m.integer("ssm.inner_size") // heads,
        "mamba_expand": m.integer("ssm.inner_size") // m.integer("embedding_length"),
        "mamba_n_groups": m.integer("ssm.group_count"),
        "mamba_d_state": m.integer("ssm.state_size"),
        "mamba_d_conv": m.integer("ssm.conv_kernel"),
        "mamba_conv_bias": m.has("ssm_conv1d.bias"),
        "mamba_proj_bias": m.has("ssm_in.bias"),
    }


def _undo_granite_hybrid(ckpt: ChangedTensors) -> None:
    undo_pairs(ckpt)
    _undo_mamba2(ckpt, "mamba")


def _nemotron_h(m: Metadata) -> Config:
    heads = m.integer("ssm.time_step_rank")
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    has = {kind: m.layer_has(stem) for stem, kind in kinds.items()}
    config = common(m, "nemotron_h", "mlp_hidden_act", "relu2") | sparse(m)
    return config | {
        "layers_block_type": [next((kind for kind in has if has[kind][i]), "") for i in range(m.layers)],
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "moe_shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length", 0) or None,
        "moe_latent_size": m.integer("moe_latent_size", 0) or None,
        "mamba_num_heads": heads,
        "mamba_head_dim": m.integer("ssm.inner_size") // heads,
        "ssm_state_size": m.integer("ssm.state_size"),
        "n_groups": m.integer("ssm.group_count"),
        "conv_kernel": m.integer("ssm.conv_kernel"),
        "use_conv_bias": m.has("ssm_conv1d.bias"),
        "mamba_proj_bias": m.has("ssm_in.bias"),
        "attention_bias": m.has("attn_q.bias"),
        "mlp_bias": m.has("ffn_up.bias"),
    }


def _undo_nemotron_h(ckpt: ChangedTensors) -> None:
    undo_pairs(ckpt, "mixer")
    _undo_mamba2(ckpt, "mixer")


def _lfm2_moe(m: Metadata) -> Config:
    config = common(m, "lfm2_moe")
    del config["head_dim"], config["hidden_act"]
    return config | {
        "layer_types": kinds(m, "shortconv.conv.weight", "conv", "full_attention"),
        "norm_eps": config.pop("rms_norm_eps"),
        "conv_L_cache": m.integer("shortconv.l_cache"),
        "conv_bias": m.has("shortconv.conv.bias"),
        "num_experts": m.integer("expert_count"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size": max(m.by_layer("feed_forward_length")),
        "num_dense_layers": dense_layers(m),
        "use_expert_bias": m.has("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
    }


def _undo_lfm2_moe(ckpt: ChangedTensors) -> None:
    for layer in ckpt.layers:
        if (weight := f"{layer}.conv.conv.weight") in ckpt:
            channels, width = ckpt.shape(weight)
            ckpt.reshape(weight, (channels, 1, width))


def _jamba(m: Metadata) -> Config:
    attends, sparse_layers = m.layer_has("attn_q"), m.layer_has("ffn_gate_inp")
    config = common(m, "jamba")
    del config["head_dim"], config["rope_parameters"]
    return config | {
        **_period(m, "attn_layer", attends),
        **_period(m, "expert_layer", sparse_layers),
        "num_experts": m.integer("expert_count"),
        "intermediate_size": max(m.by_layer("feed_forward_length")),
        "mamba_d_state": m.integer("ssm.state_size"),
        "mamba_d_conv": m.integer("ssm.conv_kernel"),
        "mamba_dt_rank": m.integer("ssm.time_step_rank"),
        "mamba_expand": m.integer("ssm.inner_size") // m.integer("embedding_length"),
        "mamba_conv_bias": m.has("ssm_conv1d.bias"),
        "mamba_proj_bias": m.has("ssm_in.bias"),
    }


def _period(m: Metadata, name: str, found: list[bool]) -> Config:
    """Return the period and the offset of layers that have something.

    Raises:
        CheckpointError: the layers have no period.
    """
    places = [i for i, has in enumerate(found) if has]
    offset = places[0] if places else len(found)
    period = places[1] - offset if len(places) > 1 else max(offset + 1, len(found))
    if found != [i % period == offset for i in range(len(found))]:
        raise CheckpointError(f"{m.path}: the layers {places} have no period, expected one for {name}_period")
    return {f"{name}_period": period, f"{name}_offset": offset}


def _undo_jamba(ckpt: ChangedTensors) -> None:
    for layer in ckpt.layers:
        ckpt.change(f"{layer}.mamba.A_log", a_log)
        if (weight := f"{layer}.mamba.conv1d.weight") in ckpt:
            channels, width = ckpt.shape(weight)
            ckpt.reshape(weight, (channels, 1, width))


def _kimi_linear(m: Metadata) -> Config:
    config = latent(m, "kimi_linear")
    del config["rope_parameters"]
    return config | {
        "layer_types": kinds(m, "ssm_conv1d_q", "linear_attention", "full_attention"),
        "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
        "norm_topk_prob": True,
        **kda(m),
    }


def kda(m: Metadata) -> Config:
    """Return the fields of Kimi's delta attention."""
    decays = next((shape for name, shape in m.shapes.items() if name.endswith(".ssm_a")), ())
    return {
        "linear_head_dim": m.integer("kda.head_dim"),
        "linear_num_heads": prod(decays),
        "linear_conv_kernel_dim": m.integer("ssm.conv_kernel"),
    }


def undo_kda(ckpt: ChangedTensors, heads: int, width: int, shape: tuple[int, ...], decays: Change = a_log) -> None:
    """Undo the shapes of convolutions, and changes of decays.

    Args:
        heads, width: of delta attention.
        shape: of A_log.
    """
    for layer in ckpt.layers:
        for part in "qkv":
            if (weight := f"{layer}.self_attn.{part}_conv1d.weight") in ckpt:
                ckpt.reshape(weight, (heads * width, 1, ckpt.shape(weight)[-1]))
        ckpt.reshape(f"{layer}.self_attn.A_log", shape)
        ckpt.change(f"{layer}.self_attn.A_log", decays)


def _undo_kimi_linear(ckpt: ChangedTensors) -> None:
    heads = ckpt.config["linear_num_heads"]
    undo_kda(ckpt, heads, ckpt.config["linear_head_dim"], (1, 1, heads, 1))


def _bailing3(m: Metadata) -> Config:
    return latent(m, "bailing_hybrid") | {
        "layer_types": kinds(m, "ssm_conv1d_q", "linear_attention", "full_attention"),
        "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
        "head_dim": m.integer("kda.head_dim"),
        "short_conv_kernel_size": m.integer("ssm.conv_kernel"),
        "kda_safe_gate": m.flag("kda.safe_gate"),
        "kda_lower_bound": m.get("kda.gate_lower_bound"),
        "num_nextn_predict_layers": 0,
    }


def _undo_bailing3(ckpt: ChangedTensors) -> None:
    """Undo decays as exp(A_log)."""
    heads = ckpt.config["num_attention_heads"]
    undo_kda(ckpt, heads, ckpt.config["head_dim"], (heads,), np.log)


#: names of Kimi's delta attention
KDA = {f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"} | {
    "ssm_a.None": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
}
_MIXER = {stem: name.replace("self_attn", "mixer") for stem, name in ATTENTION.items()}
FAMILIES = {
    "granitehybrid": GgufFamily(
        names=GRANITE | _mamba2("mamba"),
        config=_granite_hybrid,
        undo=_undo_granite_hybrid,
        joined=GRANITE_JOINED,
        models="Granite 4 H",
    ),
    "lfm2moe": GgufFamily(
        names=ATTENTION
        | experts("feed_forward", projections=("w1", "w3", "w2"))
        | mlp("feed_forward", projections=("w1", "w3", "w2"))
        | {
            "token_embd": "model.embed_tokens",
            "token_embd_norm": "model.embedding_norm",
            "output": "lm_head",
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "exp_probs_b.bias": "feed_forward.expert_bias",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        config=_lfm2_moe,
        undo=_undo_lfm2_moe,
        models="LFM2-8B-A1B",
    ),
    "kimi-linear": GgufFamily(
        names=NAMES | KDA, config=_kimi_linear, undo=_undo_kimi_linear, joined=JOINED, models="Kimi-Linear-48B-A3B"
    ),
    "bailingmoe3": GgufFamily(
        names=NAMES
        | KDA
        | {"ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj", "attn_gate": "self_attn.g_proj"},
        config=_bailing3,
        undo=_undo_bailing3,
        joined=JOINED,
        models="Ling-3.0-Flash",
    ),
    "jamba": GgufFamily(
        names=DECODER
        | experts("feed_forward", "router")
        | mlp("feed_forward")
        | {
            "output_norm": "model.final_layernorm",
            "ffn_norm": "pre_ff_layernorm",
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_x": "mamba.x_proj",
            "ssm_dt": "mamba.dt_proj",
            "ssm_out": "mamba.out_proj",
            "ssm_b_norm": "mamba.b_layernorm",
            "ssm_c_norm": "mamba.c_layernorm",
            "ssm_dt_norm": "mamba.dt_layernorm",
            "ssm_a.None": "mamba.A_log",
            "ssm_d.None": "mamba.D",
        },
        config=_jamba,
        undo=_undo_jamba,
        models="Jamba",
    ),
    "nemotron_h_moe": GgufFamily(
        names=_MIXER
        | _mamba2("mixer")
        | {
            "token_embd": "model.embeddings",
            "output_norm": "model.norm_f",
            "output": "lm_head",
            "attn_norm": "norm",
            "ffn_gate_inp": "mixer.gate",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            "ffn_up_exps": "mixer.experts.{}.up_proj",
            "ffn_down_exps": "mixer.experts.{}.down_proj",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
        },
        config=_nemotron_h,
        undo=_undo_nemotron_h,
        models="Nemotron-3-Nano",
    ),
}
