"""--vision of GLM-4.5V: its tower, and positions in sections of frequencies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export.architectures.test_architectures import fields
from export.architectures.test_vision import (
    BOUND,
    FLOATS,
    MERGED,
    PATCH,
    PROCESSOR,
    SPECIAL,
    check_decoder,
    difference,
    patches,
    picture,
    prompt,
)
from export.architectures.test_vision import session as opened
from support.models.tiny import make_tokenizer
from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration, PreTrainedTokenizerFast

from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan

#: a table of 36 positions, of which frames have fewer and more in each direction
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 96,
    "num_heads": 2,
    "intermediate_size": 160,
    "patch_size": PATCH,
    "spatial_merge_size": MERGED,
    "image_size": 6 * PATCH,
    "out_hidden_size": 64,
}


def make_checkpoint(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    ids = {"image_start_token_id": start, "image_end_token_id": end, "image_token_id": image, "video_token_id": video}
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = fields("glm4v_moe")["text_config"] | {"vocab_size": -(-len(tokenizer) // 64) * 64} | ends
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        config = Glm4vMoeConfig(text_config=text, vision_config=VISION, **ids)
        model = Glm4vMoeForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            own = torch.randn_like(parameter)
            if "norm" in name:
                parameter += own / 10
            else:
                parameter.copy_(own * (0.1 if "bias" in name else parameter[0].numel() ** -0.5))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")


@torch.no_grad()
def test_the_three_files_equal_transformers(tmp_path: Path) -> None:
    """A prompt whose border of two runs is within an image, then text token by token."""
    source, folder = tmp_path / "checkpoint", tmp_path / "onnx"
    make_checkpoint(source)
    dry = plan(source, folder, **FLOATS)
    report = export(source, folder, **FLOATS)
    assert (report.left_out, report.dense_bytes) == (dry.left_out, dry.dense) == ("", dry.dense)
    assert report.genai == "no genai_config.json: onnxruntime-genai 0.18 has no pipeline of this vision tower"
    model = Glm4vMoeForConditionalGeneration.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    images = [patches(picture(*size, seed)) for seed, size in enumerate([(64, 128), (128, 64)])]
    grids = np.array([grid for _, grid in images])
    pixels = torch.from_numpy(np.concatenate([values for values, _ in images]))
    ids = torch.tensor([prompt(tokenizer, grids)])
    kinds = (ids == model.config.image_token_id).int()
    tower = opened(folder / "vision.onnx")
    runs = [tower.run(None, {"pixel_values": p, "image_grid_thw": np.array([g])})[0] for p, g in images]
    features, want = np.concatenate(runs), model.model.visual(pixels, torch.from_numpy(grids)).pooler_output
    assert difference(features, want) < BOUND
    given = {"input_ids": ids.numpy(), "image_features": features}
    embedded = opened(folder / "embeddings.onnx").run(None, given)[0]
    decoder = opened(folder / "model.onnx")
    positions, _ = model.model.get_rope_index(ids, kinds, torch.from_numpy(grids))
    assert not torch.equal(positions[0], positions[1])
    assert not torch.equal(positions[1], positions[2])
    whole = model(ids, pixel_values=pixels, image_grid_thw=torch.from_numpy(grids), mm_token_type_ids=kinds).logits
    count, half = ids.shape[1], ids.shape[1] // 2
    check_decoder(decoder, embedded, positions, whole, ends=(half, count - 2, count - 1, count))
