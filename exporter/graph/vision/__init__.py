"""Vision towers, for ``export --vision``: a family's module each, one line here.

onnxruntime-genai runs three files of a multimodal model. vision.onnx makes features of an image's patches.
embeddings.onnx puts them in the places of the prompt's image tokens. The decoder takes these embeddings and positions
of three axes. A module provides

- ``tower(config)``: transformers' module of the configuration's tower. torch.export can follow its forward of
  ``pixel_values`` f32 [patches, values of a patch] and ``image_grid_thw`` int64 [images, 3]. Returns
  ``image_features`` [patches / merged, hidden size]. Raises ValueError of a configuration that makes none.
- ``derived(tower)``: parameters of it that are functions of the checkpoint's tensors: name -> (that tensor's shape,
  the function).
- ``NAME``: onnxruntime-genai's name of the pipeline; "": it has none, and other programs run the files.
- ``parts(config)``: how many times the hidden size the features of an image token are wide.
- ``prepare(model)``: makes a text model's rotary tables take positions int64 [3, batch, sequence].
"""

from __future__ import annotations

from types import ModuleType

from quantmoe.exporter.graph.vision import glm4v_moe, qwen3_5_moe, qwen3_vl_moe
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import Format
from quantmoe.exporter.reading.weights.base import BESIDE, VISION

#: model_type of config.json -> module
FAMILIES: dict[str, ModuleType] = {
    "glm4v_moe": glm4v_moe,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_vl_moe": qwen3_vl_moe,
}
#: model_type -> why its tower is not exported
REFUSED = {
    "gemma4": "onnxruntime-genai's pipeline wants embeddings of each layer beside the tokens', which this exporter's "
    "decoder does not take",
}


def family_of(format: Format) -> tuple[ModuleType, Format]:
    """Return the module of a checkpoint's family, and the checkpoint's vision tower.

    Raises:
        CheckpointError: it has no tower, or one of a family that is not exported; the message says why.
    """
    folder, config = format.ckpt.folder, format.ckpt.config
    if not isinstance(config.get("vision_config"), dict):
        raise CheckpointError(f"{folder / 'config.json'}: no vision_config: of a text model --vision exports nothing")
    name = config.get("model_type")
    if name not in FAMILIES:
        reason = REFUSED.get(str(name), "onnxruntime-genai 0.18 has no multimodal pipeline for it")
        raise CheckpointError(f"{folder / 'config.json'}: --vision does not export {name}: {reason}")
    if (found := format.beside(VISION)) is None:
        raise CheckpointError(
            f"{folder}: no tensors of {VISION} ({' or '.join(f'{prefix}*' for prefix in BESIDE[VISION])}), although "
            "config.json has a vision_config; some quantizers leave them out"
        )
    return FAMILIES[name], found
