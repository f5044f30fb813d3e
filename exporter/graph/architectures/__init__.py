"""Architectures of transformers that need more than its experts interface: one module each, one line here.

A module provides ``prepare(model)``: changes a model's modules so that torch.export and the ONNX translation can follow
them and their experts have the interface's attributes. The arithmetic does not change. It may have

- a ``KIND`` of attention (modules/attention.py);
- ``configure(config)``, which runs before there is a model;
- ``trim(model)``: leaves out tensors of transformers' model that nothing reads and no checkpoint has, or gives it the
  modules that other models have;
- ``states(model, window)``: modules that keep a state beside keys and values, by name, and ``attach(model, states,
  rows)``, which makes them nodes;
- ``NAMES``: parts of published tensor names -> parts of the model's names;
- ``stored(model)``: parameters that are functions of the checkpoint's tensors: name -> (that tensor's shape, the
  function).
"""

from __future__ import annotations

from types import ModuleType

from quantmoe.exporter.graph.architectures import (
    dbrx,
    deepseek_v2,
    doge,
    ernie4_5_vl_moe,
    jetmoe,
    llama4,
    longcat_flash,
    minimax,
    mrope,
    nemotron_h,
    openai_privacy_filter,
    phimoe,
    step3p5,
)
from quantmoe.exporter.graph.architectures.extended_cache import (
    deepseek_v4,
    glm5_next,
    indexed,
    inkling,
    inkling2,
    qwen4_exp,
    zaya,
)

#: config.model_type -> module
ARCHITECTURES: dict[str, ModuleType] = {
    "axk2": indexed,
    "dbrx": dbrx,
    "deepseek_v2": deepseek_v2,
    "deepseek_v32": indexed,
    "deepseek_v4": deepseek_v4,
    "doge": doge,
    "dots3_note_text": indexed,
    "ernie4_5_vl_moe_text": ernie4_5_vl_moe,
    "glm4v_moe_text": mrope,
    "glm5_next_text": glm5_next,
    "glm_moe_dsa": indexed,
    "hy_v4": indexed,
    "hy_v4_vl_text": indexed,
    "inkling2_loop_text": inkling2,
    "inkling2_text": inkling2,
    "inkling_text": inkling,
    "jetmoe": jetmoe,
    "llama4_text": llama4,
    "longcat_flash": longcat_flash,
    "minimax": minimax,
    "minimax_m3_vl_text": indexed,
    "mistral_large4_text": indexed,
    "nemotron_h": nemotron_h,
    "openai_privacy_filter": openai_privacy_filter,
    "phimoe": phimoe,
    "qwen3_5_moe_text": mrope,
    "qwen3_omni_moe_text": mrope,
    "qwen3_vl_moe_text": mrope,
    "qwen4_exp_text": qwen4_exp,
    "step3p5": step3p5,
    "zaya": zaya,
}
