"""Sizes of real models' expert layers, for benches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str = "silu"


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "olmoe": Shape(2048, 1024, 64, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, "swiglu_oai"),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4, "swiglu_oai"),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "deepseek-v3-tp8": Shape(7168, 256, 256, 8),
    "qwen3-235b-a22b": Shape(4096, 1536, 128, 8),
    "glm-4.5-air": Shape(4096, 1408, 128, 8),
    "llama4-scout": Shape(5120, 8192, 16, 1),
    "phi-3.5-moe": Shape(4096, 6400, 16, 2),
    "kimi-k2-tp8": Shape(7168, 256, 384, 8),
}
