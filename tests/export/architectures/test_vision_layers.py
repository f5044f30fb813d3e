"""--vision of Qwen3-VL with experts: decoder layers add features of the tower's inner layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
from support.harness.once import made_once
from support.models.tiny import make_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from quantmoe.exporter.writing.convert import export

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 96,
    "num_heads": 2,
    "intermediate_size": 160,
    "patch_size": PATCH,
    "spatial_merge_size": MERGED,
    "num_position_embeddings": 36,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0, 2],
}


def make_checkpoint(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = TEXT | {"vocab_size": -(-len(tokenizer) // 64) * 64} | ends
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        config = Qwen3VLMoeConfig(text_config=text, vision_config=VISION, **ids)
        model = Qwen3VLMoeForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += torch.randn_like(parameter) / 10
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.1 if "bias" in name else parameter.shape[-1] ** -0.5))
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, make_checkpoint, "layers")


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, lambda folder: export(source, folder, **FLOATS), "layers exported")


@pytest.fixture(scope="module")
def model(source: Path) -> Any:
    return Qwen3VLMoeForConditionalGeneration.from_pretrained(source, dtype=torch.float32).eval()


@torch.no_grad()
def test_the_three_files_equal_transformers(folder, source, model):
    """A prompt whose border of two runs is within an image, then text token by token."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    images = [patches(picture(*size, seed)) for seed, size in enumerate([(64, 96), (128, 64)])]
    grids = np.array([grid for _, grid in images])
    pixels = torch.from_numpy(np.concatenate([values for values, _ in images]))
    ids = torch.tensor([prompt(tokenizer, grids)])
    kinds = (ids == model.config.image_token_id).int()
    tower = opened(folder / "vision.onnx")
    features = np.concatenate(
        [tower.run(None, {"pixel_values": p, "image_grid_thw": np.array([g])})[0] for p, g in images]
    )
    made = model.model.visual(pixels, torch.from_numpy(grids))
    want = torch.cat((made.pooler_output, *made.deepstack_features), -1)
    assert difference(features, want) < BOUND
    embedded = opened(folder / "embeddings.onnx").run(
        None, {"input_ids": ids.numpy(), "image_features": features}
    )[0]  # fmt: skip
    assert embedded.shape[2] == 3 * TEXT["hidden_size"]
    decoder = opened(folder / "model.onnx")
    positions, _ = model.model.get_rope_index(ids, kinds, torch.from_numpy(grids))
    whole = model(ids, pixel_values=pixels, image_grid_thw=torch.from_numpy(grids), mm_token_type_ids=kinds).logits
    count, half = ids.shape[1], ids.shape[1] // 2
    check_decoder(decoder, embedded, positions, whole, ends=(half, count - 2, count - 1, count))


@torch.no_grad()
def test_onnxruntime_genai_gives_transformers_tokens(folder, source, model, tmp_path):
    import onnxruntime_genai as og

    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    image = picture(64, 96)
    image.save(tmp_path / "0.png")
    genai = og.Model(str(folder))
    text = "A mixture of 0: <|vision_start|><|vision_end|> experts routes each token"
    inputs = genai.create_multimodal_processor()(text, images=og.Images.open(str(tmp_path / "0.png")))
    pixels, grid = patches(image)
    ids = prompt(tokenizer, [grid])
    assert inputs["input_ids"].as_numpy().ravel().tolist() == ids
    params = og.GeneratorParams(genai)
    params.set_search_options(max_length=len(ids) + 8)
    generator = og.Generator(genai, params)
    generator.set_inputs(inputs)
    while not generator.is_done():
        generator.generate_next_token()
    want = model.generate(
        torch.tensor([ids]),
        pixel_values=torch.from_numpy(pixels),
        image_grid_thw=torch.tensor([grid]),
        mm_token_type_ids=(torch.tensor([ids]) == model.config.image_token_id).int(),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=-1,
    )
    found = generator.get_sequence(0).tolist()
    assert found == want[0, : len(found)].tolist()
    assert len(found) > len(ids)
