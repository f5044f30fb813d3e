"""Exports of a few layers of rare models at published widths, with random weights: for ``quantmoe bench model``.

PYTHONPATH=tests python tests/benchmarks/rare_models.py FOLDER [MODEL ...]: each becomes
FOLDER/MODEL. A token has as many experts as published. The model has fewer, which changes no time of a token.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from export.architectures.test_architectures import make_checkpoint
from transformers import CONFIG_MAPPING

from quantmoe.exporter.writing.convert import export

BRIEF = {"vocab_size": 512, "max_position_embeddings": 4096}
#: published widths: transformers' defaults, except for DBRX's, which are of dbrx-instruct
MODELS: dict[str, dict[str, Any]] = {
    "jamba": {"num_hidden_layers": 3, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "num_experts": 2, "mamba_d_state": 16, "mamba_dt_rank": 256}
    | {"attn_layer_period": 3, "attn_layer_offset": 2},
    "bailing_hybrid": {"num_hidden_layers": 2, "hidden_size": 2560, "moe_intermediate_size": 768, "num_experts": 16}
    | {"num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128, "qk_nope_head_dim": 128, "num_expert_group": 8, "topk_group": 4, "num_experts_per_token": 8}
    | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["sparse"] * 2}
    | {"linear_head_dim": 128, "linear_num_heads": 32, "head_dim": 64},
    "zaya": {"num_hidden_layers": 2, "hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"moe_intermediate_size": 2048, "num_experts": 8, "head_dim": 128, "router_hidden_size": 256}
    | {"layer_types": ["hybrid"] * 2},
    "inkling_text": {"num_hidden_layers": 2, "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 8}
    | {"head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "swa_head_dim": 128}
    | {"sliding_window_size": 512, "d_rel": 16, "rel_extent": 1024, "moe_intermediate_size": 3072}
    | {"n_routed_experts": 6, "num_experts_per_tok": 6, "n_shared_experts": 2, "mlp_layer_types": ["sparse"] * 2}
    | {"layer_types": ["hybrid_sliding", "hybrid"]},
    "longcat_flash": {"num_layers": 1, "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 64}
    | {"ffn_hidden_size": 12288, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
    | {"qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64, "moe_topk": 12, "n_routed_experts": 12}
    | {"zero_expert_num": 6, "expert_ffn_hidden_size": 2048},
    "jetmoe": {"num_hidden_layers": 2, "hidden_size": 2048, "num_key_value_heads": 16, "num_attention_heads": 32}
    | {"kv_channels": 128, "intermediate_size": 5632, "num_local_experts": 8},
    "doge": {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    | {"num_key_value_heads": 8, "keep_window_size": 2048, "num_experts": 16384, "num_experts_per_tok": 64},
    "dbrx": {"n_layers": 1, "d_model": 6144, "n_heads": 48, "max_seq_len": 4096}
    | {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 8, "rope_theta": 5e5}}
    | {"ffn_config": {"hidden_size": 6144, "ffn_hidden_size": 10752, "moe_num_experts": 4, "moe_top_k": 4}},
}


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:] or MODELS:
        sizes, checkpoint = BRIEF | MODELS[name], folder / f"checkpoint-{name}"
        same = CONFIG_MAPPING[name].attribute_map  # other names of the configuration, which tiny models also have
        make_checkpoint(checkpoint, name, **sizes | {other: sizes[own] for other, own in same.items() if own in sizes})
        export(checkpoint, folder / name, quantize="int8")
        shutil.rmtree(checkpoint)


if __name__ == "__main__":
    main()
