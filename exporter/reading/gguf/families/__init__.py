"""Architectures of GGUF files: names, configuration, and what llama.cpp's converters changed of the numbers.

A family is a row of a module here. Its configuration is transformers', from the keys that gguf-py's constants.py
documents. What no key says is the family's own, as in all of its published models.
"""

from __future__ import annotations

from quantmoe.exporter.reading.gguf.families import decoders, gemma4, latent, qwen, states, unlike_layers

#: general.architecture -> family
FAMILIES = (
    qwen.FAMILIES | decoders.FAMILIES | unlike_layers.FAMILIES | latent.FAMILIES | states.FAMILIES | gemma4.FAMILIES
)
