"""Architectures of GGUF files: names, configuration, and what llama.cpp's converters changed of the numbers.

A family is a row of a module here. Its configuration is transformers', from the keys that gguf-py's constants.py
documents. What no key says is the family's own, as in all of its published models.
"""

from __future__ import annotations

from quantmoe.exporter.reading.gguf.families import decoders, gemma4, indexed, latent, qwen, states, unlike_layers
from quantmoe.exporter.reading.gguf.families.base import GgufFamily

#: general.architecture -> family
FAMILIES: dict[str, GgufFamily] = {}
for module in (qwen, decoders, unlike_layers, latent, indexed, states, gemma4):
    FAMILIES |= module.FAMILIES
