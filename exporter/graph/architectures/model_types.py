"""Model types that ``export`` takes, for docs/reference/architectures.md. Tests compare them with what they export."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Model types of transformers that are exported alike.

    Attributes:
        types: of config.json.
        models: published ones. "text": their text model alone.
        attention: how it is exported. "one node" and "latent": one CachedAttention node a layer. "standard nodes":
            operators of ONNX. Others keep a state. A link leads to a section of the page.
    """

    types: tuple[str, ...]
    models: str
    attention: str


MODEL_TYPES = (
    Row(("qwen3_moe",), "Qwen3-30B-A3B, 235B-A22B", "one node"),
    Row(("mixtral", "olmoe"), "Mixtral, OLMoE", "one node"),
    Row(("gpt_oss",), "gpt-oss-20b, 120b", "one node"),
    Row(("deepseek_v3",), "DeepSeek-V3, R1, Kimi-K2", "latent"),
    Row(("glm4_moe",), "GLM-4.5, 4.6", "one node"),
    Row(("llama4", "llama4_text"), "Llama-4 Scout, Maverick; text", "one node"),
    Row(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3-Next, Qwen3.5, 3.6; text", "one node, linear"),
    Row(("kimi_linear",), "Kimi-Linear-48B-A3B", "standard nodes (it has no rotary embedding), linear"),
    Row(("lfm2_moe",), "LFM2-8B-A1B", "standard nodes, short convolutions"),
    Row(("lara_mini",), "Lara-4-Mini", "one node, linear"),
    Row(("gemma4", "gemma4_text"), "Gemma-4-26B-A4B; text", "standard nodes"),
    Row(("qwen2_moe",), "Qwen1.5-MoE, Qwen2-57B-A14B", "one node"),
    Row(
        ("deepseek_v2", "glm4_moe_lite", "axk1", "sarvam_mla"),
        "DeepSeek-V2, GLM-4.7-Flash, A.X K1, Sarvam-105B",
        "latent",
    ),
    Row(("granitemoe", "granitemoeshared", "granitemoe_swa"), "Granite 3 MoE", "one node"),
    Row(("ernie4_5_moe", "hy_v3", "dots1"), "ERNIE 4.5, Hunyuan 3, dots.llm1", "one node"),
    Row(("minimax_m2",), "MiniMax-M2", "one node"),
    Row(("minimax",), "MiniMax-Text-01", "one node; lightning attention in standard nodes"),
    Row(
        ("nemotron_h", "nemotron_h_omni"),
        "Nemotron-3-Nano-30B-A3B, Omni; text; Super only as a tiny model",
        "one node, [Mamba-2](#mamba-2)",
    ),
    Row(("zaya",), "ZAYA1-8B", "standard nodes, short convolutions"),
    Row(("dbrx",), "DBRX", "standard nodes (it limits queries, keys and values)"),
    Row(("jetmoe",), "JetMoE-8B", "standard nodes, with [experts of queries](#experts-of-queries)"),
    Row(("doge",), "Doge with experts", "standard nodes; [experts are rows](#experts-of-one-feature)"),
    Row(
        ("inkling_mm_model", "inkling_text"),
        "Inkling; text",
        "standard nodes with [biases by distance](#short-convolutions-of-inkling), short convolutions",
    ),
    Row(
        ("inkling2", "inkling2_text"),
        "Inkling-2-Small; text",
        "standard nodes with [mixtures of earlier layers](#earlier-layers-in-inkling-2), short convolutions",
    ),
    Row(
        ("inkling2_loop", "inkling2_loop_text"),
        "Inkling-2-Mini; text",
        "as Inkling-2-Small: standard nodes, short convolutions; layers that are visited three times",
    ),
    Row(
        ("jamba",),
        "Jamba v0.1, 1.5, 1.6",
        "one node, [selective scan](#selective-scan)",
    ),
    Row(("bailing_hybrid",), "Ling-3.0-Flash", "latent with a gate for each head, linear"),
    Row(("granitemoehybrid",), "Granite 4 H", "one node, [Mamba-2](#mamba-2)"),
    Row(("mimo_v2_flash",), "MiMo-V2-Flash", "one node, a factor of the values behind it"),
    Row(
        ("phimoe", "cohere2_moe", "exaone_moe", "flex_olmo", "solar_open", "mellum"),
        "Phi-3.5-MoE, Cohere, EXAONE, FlexOlmo, Solar, Mellum",
        "one node",
    ),
    Row(("sarvam_moe",), "Sarvam-30B", "one node"),
    Row(("aria", "aria_text", "flint", "kolibri1"), "Aria's text model, Flint, Kolibri", "one node"),
    Row(("kimi_k25",), "Kimi-K2.5, K2.6; text", "latent"),
    Row(("deepseek_ocr2",), "DeepSeek-OCR-2; text", "one node"),
    Row(
        ("internvl",), "InternVL3.5-30B-A3B and other types of this table inside `internvl`; text", "as its text model"
    ),
    Row(
        ("qwen3_vl_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        "Qwen3-VL-30B-A3B, Qwen3-Omni-30B-A3B; text",
        "one node",
    ),
    Row(("glm4v_moe",), "GLM-4.5V; text", "one node"),
    Row(("ernie4_5_vl_moe",), "ERNIE-4.5-VL-28B-A3B; text, with the experts of text", "one node"),
    Row(("step3p7", "step3p5"), "Step-3.7-Flash; text; Step-3.5-Flash", "standard nodes"),
    Row(("muse_spark",), "Muse Spark; text", "standard nodes"),
    Row(("mistral4", "mistral3"), "Mistral-Small-4; text", "latent"),
    Row(
        ("deepseek_v32", "glm_moe_dsa", "axk2", "mistral_large4"),
        "DeepSeek-V3.2, GLM-5, A.X K2, Mistral-Large-4 (text)",
        "latent, [with an indexer](#sparse-attention)",
    ),
    Row(
        ("minimax_m3_vl", "minimax_m3_vl_text"),
        "MiniMax-M3; text",
        "one node, [with an indexer](#sparse-attention) of blocks",
    ),
    Row(
        ("dots3_note", "dots3_note_text"),
        "dots3-note; text",
        "latent, [with an indexer](#sparse-attention)",
    ),
    Row(
        ("qwen4_exp", "qwen4_exp_text"),
        "Qwen4-Exp; text",
        "linear; one node, [with an indexer](#sparse-attention) of blocks",
    ),
    Row(("hy_v4", "hy_v4_vl"), "Hunyuan 4; text", "latent, [with an indexer](#sparse-attention)"),
    Row(("deepseek_v4",), "DeepSeek-V4", "one node, [with an indexer](#sparse-attention) of compressed keys"),
    Row(
        ("glm5_next",),
        "GLM-5.3-Flash; text",
        "latent, [with an indexer](#sparse-attention) of blocks; linear",
    ),
    Row(("longcat_flash",), "LongCat-Flash, with experts that return their input", "latent, two nodes a layer"),
    Row(("afmoe", "beam", "hunyuan_v1_moe", "laguna"), "Trinity, Beam, Hunyuan-A13B, Laguna", "standard nodes"),
)

#: types whose text model is another type, which tests run: no numbers of their own
TEXT_OF = {
    "dots3_note": "dots3_note_text",
    "internvl": "qwen3_moe",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "nemotron_h_omni": "nemotron_h",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
    "qwen4_exp": "qwen4_exp_text",
    "step3p5": "step3p7",
}
#: engine -> types of which a whole small model ran in it on an H100 or H200 (docs/lab/cuda.md, tensorrt.md,
#: sparse-attention.md, published-models.md, several-gpus.md)
RAN = {
    "CUDA": {
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "glm4_moe",
        "glm5_next",
        "gpt_oss",
        "granitemoehybrid",
        "hy_v4",
        "kimi_linear",
        "lfm2_moe",
        "llama4_text",
        "minimax_m3_vl_text",
        "mixtral",
        "nemotron_h",
        "olmoe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen4_exp_text",
    },
    "TensorRT": {
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "kimi_linear",
        "lfm2_moe",
        "llama4_text",
        "minimax",
        "mixtral",
        "nemotron_h",
        "olmoe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
    },
}
