"""Nemotron-H and Nemotron-3: a limit of time steps that transformers alone has, and norms of the form that engines
fuse."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer, NemotronHRMSNorm

from quantmoe.exporter.graph.modules.norms import RMSNorm


def prepare(model: PreTrainedModel) -> None:
    """Limit time steps as config.json says (time_step_limit), as in NVIDIA's own code and in training.

    transformers 5.24 makes time steps of a prompt at least time_step_min, 0.001, but not time steps of single tokens
    (https://github.com/huggingface/transformers/pull/48989 measures what that changes). Norms are multiplied by their
    weight in the graph's type. In f32, the fusion makes a node whose output has another type than it says.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, NemotronHMamba2Mixer):
            module.time_step_limit = tuple(model.config.time_step_limit)
        elif isinstance(module, NemotronHRMSNorm):
            model.set_submodule(name, RMSNorm(module.weight.data, module.variance_epsilon))
