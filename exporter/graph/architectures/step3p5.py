"""Step-3.5 and 3.7: experts that are not on transformers' interface, although they could be."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.models.step3p7 import modeling_step3p7

from quantmoe.exporter.graph.experts import put_on_interface


def prepare(model: PreTrainedModel) -> None:
    """Give experts transformers' interface."""
    for module in model.modules():
        if isinstance(module, modeling_step3p7.Step3p7Experts):
            put_on_interface(module)
