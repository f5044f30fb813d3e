"""Names of GGUF tensors, as llama.cpp and other tools write them."""

from __future__ import annotations

import re

#: name of a tensor that has the rows of several -> their names (convert_hf_to_gguf.py --fuse-gate-up-exps, --fuse-qkv)
JOINED = {
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
}
#: one expert's tensor, as llama.cpp wrote Mixtral's until 2024
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.([0-9]{1,6})")
#: MLX's names of all experts' tensors; mlx_lm's GGUF writer replaces half of the name of Mixtral's
_SWITCH = re.compile(r"(?:mlp|block_sparse_moe)\.switch_(?:mlp\.(gate|up|down)_proj|ffn_(gate|up|down))")


def common_name(stem: str, leaf: str | None) -> tuple[str, str, int | None]:
    """Return a tensor's name as current files have it: without its layer, and its end apart.

    The third is the expert's number, if the tensor is one expert's.
    """
    if match := _ONE_EXPERT.fullmatch(stem):
        return f"ffn_{match[1]}_exps", str(leaf), int(match[2])
    if match := _SWITCH.fullmatch(stem):
        return f"ffn_{match[1] or match[2]}_exps", str(leaf), None
    return stem, "bias" if stem == "exp_probs_b" else str(leaf), None
