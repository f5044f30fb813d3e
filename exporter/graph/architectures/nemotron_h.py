"""Nemotron-H and Nemotron-3: a limit of time steps that transformers alone has."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer


def prepare(model: PreTrainedModel) -> None:
    """Time steps are limited as config.json says (time_step_limit), as in NVIDIA's own code and in training.
    transformers 5.24 makes those of a prompt at least time_step_min, 0.001, and those of single tokens not
    (https://github.com/huggingface/transformers/pull/48989 measures what that changes)."""
    for module in model.modules():
        if isinstance(module, NemotronHMamba2Mixer):
            module.time_step_limit = tuple(model.config.time_step_limit)
