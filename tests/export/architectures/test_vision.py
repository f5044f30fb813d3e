"""--vision: the three files that onnxruntime-genai runs for a prompt with images, against transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from export.architectures.test_hybrid import SIZES, rewritten
from export.writing.test_other_programs import check
from PIL import Image
from support.harness.once import made_once
from support.harness.sweeps import every
from support.models.tiny import make_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from quantmoe.benchmarks.bench_engines import Ours
from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.interface import TENSORS, VISION_TENSORS
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.ort_ext import library_path
from quantmoe.runtime.generate import Generator

PATCH, MERGED = 16, 2
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
#: of a small float checkpoint: a layer of linear attention and one of full attention
TEXT = SIZES | {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 192**-0.5,
    # 8 frequencies: of time, rows and columns 3, 3 and 2
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 96,
    "num_heads": 2,
    "intermediate_size": 160,
    "patch_size": PATCH,
    "spatial_merge_size": MERGED,
    "num_position_embeddings": 36,
    "out_hidden_size": 192,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 4 * (PATCH * MERGED) ** 2, "longest_edge": 64 * (PATCH * MERGED) ** 2},
    "patch_size": PATCH,
    "merge_size": MERGED,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
FLOATS: dict[str, Any] = {"vision": True, "quantize": "none", "activations": "float", "cache": "f32", "logits": "all"}


def make_checkpoint(folder: Path) -> None:
    """As Qwen3.5 is published: text, tower and how images become patches."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = TEXT | {"vocab_size": -(-len(tokenizer) // 64) * 64} | ends
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen3_5MoeConfig(text_config=text, vision_config=VISION, **ids)
        model = Qwen3_5MoeForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
        for parameter in model.model.visual.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, make_checkpoint, "sees")


@pytest.fixture(scope="session")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def write(folder: Path) -> None:
        report = export(source, folder, **FLOATS)
        assert report.left_out == ""
        (folder / "dense_bytes").write_text(str(report.dense_bytes), encoding="utf-8")

    return made_once(tmp_path_factory, write, "exported")


@pytest.fixture(scope="session")
def model(source: Path) -> PreTrainedModel:
    """The reference, of the same bf16 values in f32."""
    return Qwen3_5MoeForConditionalGeneration.from_pretrained(source, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(source: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(source)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """A smooth picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def patches(image: Image.Image) -> tuple[np.ndarray, list[int]]:
    """What transformers' Qwen2VLImageProcessor makes of an image that needs no other size: f32 [patches, values], and
    its grid: frames, rows, columns. Patches that are merged are neighbours; a picture is two equal frames."""
    pixels = (np.asarray(image, np.float32) / 255 - 0.5) / 0.5
    rows, columns = image.height // PATCH, image.width // PATCH
    blocks = pixels.reshape(rows // MERGED, MERGED, PATCH, columns // MERGED, MERGED, PATCH, 3)
    found = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, PATCH * PATCH)
    return found.repeat(2, 2).reshape(rows * columns, -1), [1, rows, columns]


def prompt(tokenizer: PreTrainedTokenizerFast, grids: Sequence[Sequence[int]]) -> list[int]:
    """A text with as many image tokens after each start as transformers' processor puts there."""
    text = "A mixture"
    for number, (_, rows, columns) in enumerate(grids):
        pads = "<|image_pad|>" * (rows * columns // MERGED**2)
        text += f" of {number}: <|vision_start|>{pads}<|vision_end|> experts"
    return tokenizer.encode(text + " routes each token")


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.register_custom_ops_library(library_path())
    return ort.InferenceSession(path, options)


def empty(decoder: ort.InferenceSession) -> dict[str, np.ndarray]:
    past = (i for i in decoder.get_inputs() if i.name.startswith("past_key_values."))
    return {i.name: np.zeros([d if isinstance(d, int) else int(d == "batch_size") for d in i.shape], "f") for i in past}


def check_decoder(
    decoder: ort.InferenceSession,
    embedded: np.ndarray,
    positions: torch.Tensor,
    whole: torch.Tensor,
    *,
    ends: Sequence[int],
) -> None:
    """Compare the logits of runs, each from the end of the one before, with those of the whole text."""
    feed, begin = empty(decoder), 0
    for end in ends:
        feed |= {"inputs_embeds": embedded[:, begin:end], "position_ids": positions[..., begin:end].numpy(),
                 "attention_mask": np.ones((1, end), np.int64)}  # fmt: skip
        logits, *present = decoder.run(None, feed)
        names = [o.name.replace("present", "past_key_values") for o in decoder.get_outputs()[1:]]
        feed |= dict(zip(names, present, strict=True))
        assert difference(logits, whole[:, begin:end]) < BOUND
        begin = end


def difference(found: np.ndarray, want: torch.Tensor) -> float:
    """Relative to the largest."""
    assert found.shape == tuple(want.shape)
    return float(np.abs(found - want.numpy()).max() / want.abs().max())


# sums in f32 in another order: tens of roundings of 6e-8 a layer, and some for each layer after that
BOUND = 2e-5
SIZES = [(64, 96)], [(64, 96), (128, 64)], [(64, 64), (64, 64)]


@pytest.mark.parametrize("sizes", SIZES, ids=["one", "two", "alike"])
@torch.no_grad()
def test_each_file_equals_transformers(folder, model, tokenizer, sizes):
    images = [patches(picture(*size, seed)) for seed, size in enumerate(sizes)]
    grids = np.array([grid for _, grid in images])
    pixels = torch.from_numpy(np.concatenate([values for values, _ in images]))
    ids = torch.tensor([prompt(tokenizer, grids)])
    kinds = (ids == model.config.image_token_id).int()

    tower = session(folder / "vision.onnx")
    features = [tower.run(None, {"pixel_values": p, "image_grid_thw": np.array([g])})[0] for p, g in images]
    want = model.model.visual(pixels, torch.from_numpy(grids)).pooler_output
    assert difference(np.concatenate(features), want) < BOUND
    if len({*map(tuple, grids)}) == 1:  # frames of one size may be one run
        assert difference(tower.run(None, {"pixel_values": pixels.numpy(), "image_grid_thw": grids})[0], want) < BOUND

    embeddings = session(folder / "embeddings.onnx")
    given = {"input_ids": ids.numpy(), "image_features": np.concatenate(features)}
    (embedded,) = embeddings.run(None, given)
    rows = model.get_input_embeddings()(ids)
    rows[kinds.bool()] = want
    assert difference(embedded, rows) < BOUND

    decoder = session(folder / "model.onnx")
    positions, deltas = model.model.get_rope_index(ids, kinds, torch.from_numpy(grids))
    assert deltas.item() < 0  # an image takes fewer positions than tokens
    assert not torch.equal(positions[0], positions[2])
    whole = model(ids, pixel_values=pixels, image_grid_thw=torch.from_numpy(grids), mm_token_type_ids=kinds).logits
    count, half = ids.shape[1], ids.shape[1] // 2  # the border of two runs is within an image's tokens
    check_decoder(decoder, embedded, positions, whole, ends=(half, count))


def test_text_alone_needs_no_features(folder, model, tokenizer):
    ids = torch.tensor([tokenizer.encode("A mixture of experts")])
    (found,) = session(folder / "embeddings.onnx").run(
        None, {"input_ids": ids.numpy(), "image_features": np.zeros((0, TEXT["hidden_size"]), np.float32)}
    )
    assert difference(found, model.get_input_embeddings()(ids).detach()) == 0


def test_what_does_not_fit_is_an_error_of_the_run(folder, tokenizer):
    """And not features of something else."""
    tower, (values, grid) = session(folder / "vision.onnx"), patches(picture(64, 96))
    for given in ([grid, [1, 2, 2]], [[1, 4, 4]], [[1, 8, 6]]):
        with pytest.raises(Exception, match=r"Reshape|index"):
            tower.run(None, {"pixel_values": values, "image_grid_thw": np.array(given)})
    few = np.zeros((5, TEXT["hidden_size"]), np.float32)
    embeddings = session(folder / "embeddings.onnx")
    with pytest.raises(Exception, match="Gather"):
        embeddings.run(None, {"input_ids": np.array([prompt(tokenizer, [grid])]), "image_features": few})


def test_an_images_token_without_any_image_is_a_token(folder, model):
    """One that the model itself chose, say: transformers takes its row of the table."""
    ids = np.array([[model.config.image_token_id, 5], [7, model.config.image_token_id]])
    none = np.zeros((0, TEXT["hidden_size"]), np.float32)
    (found,) = session(folder / "embeddings.onnx").run(None, {"input_ids": ids, "image_features": none})
    assert np.array_equal(found, model.get_input_embeddings().weight.detach().numpy()[ids])


@pytest.mark.parametrize("sizes", [*SIZES, []], ids=["one", "two", "alike", "none"])
@torch.no_grad()
def test_onnxruntime_genai_gives_transformers_tokens(folder, model, tokenizer, tmp_path, sizes):
    import onnxruntime_genai as og

    pictures = [picture(*size, seed) for seed, size in enumerate(sizes)]
    paths = [str(tmp_path / f"{number}.png") for number in range(len(pictures))]
    for image, path in zip(pictures, paths, strict=True):
        image.save(path)
    text = "A mixture" + "".join(
        f" of {number}: <|vision_start|><|vision_end|> experts" for number in range(len(pictures))
    )
    genai = og.Model(str(folder))
    inputs = genai.create_multimodal_processor()(
        text + " routes each token", images=og.Images.open(*paths) if paths else None
    )
    params = og.GeneratorParams(genai)
    images = [patches(image) for image in pictures]
    grids = [grid for _, grid in images]
    ids = prompt(tokenizer, grids)
    assert inputs["input_ids"].as_numpy().ravel().tolist() == ids
    given: dict[str, torch.Tensor] = {}
    if images:
        pixels = np.concatenate([values for values, _ in images])
        assert inputs["image_grid_thw"].as_numpy().tolist() == grids
        made = inputs["pixel_values"].as_numpy()
        if len({*map(tuple, grids)}) > 1:  # it pads to the largest, and reads as if it had not: docs/guides/vision.md
            assert len(made) == len(grids) * max(map(np.prod, grids)) > len(pixels)
            made = made.reshape(len(grids), -1, made.shape[1])
            made = np.concatenate([values[: np.prod(grid)] for values, grid in zip(made, grids, strict=True)])
            inputs["pixel_values"] = made
        assert np.abs(made - pixels).max() < 1e-5
        given = {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": torch.tensor(grids)}
    params.set_search_options(max_length=len(ids) + 12)
    generator = og.Generator(genai, params)
    generator.set_inputs(inputs)
    while not generator.is_done():
        generator.generate_next_token()
    kinds = (torch.tensor([ids]) == model.config.image_token_id).int()
    want = model.generate(
        torch.tensor([ids]), **given, mm_token_type_ids=kinds, max_new_tokens=12, do_sample=False, eos_token_id=-1
    )
    found = generator.get_sequence(0).tolist()
    assert found == want[0, : len(found)].tolist()
    assert len(found) > len(ids)


def test_images_are_resized_as_transformers_does(folder, tmp_path):
    """By bicubic interpolation to the same multiples; each rounds to one of 256 levels in its own way."""
    import onnxruntime_genai as og

    picture(104, 152).save(tmp_path / "odd.png")
    processor = og.Model(str(folder)).create_multimodal_processor()
    inputs = processor("<|vision_start|><|vision_end|>", images=og.Images.open(str(tmp_path / "odd.png")))
    rows, columns = 6, 10
    assert inputs["image_grid_thw"].as_numpy().tolist() == [[1, rows, columns]]
    resized = picture(104, 152).resize((columns * PATCH, rows * PATCH), Image.Resampling.BICUBIC)
    apart = np.abs(inputs["pixel_values"].as_numpy() - patches(resized)[0])
    assert apart.max() < 2.01 * 2 / 255
    assert apart.mean() < 0.25 * 2 / 255


@pytest.mark.parametrize("name", ["model", "vision", "embeddings"])
def test_onnx_checks_each_file(folder, name):
    check(folder / f"{name}.onnx")


def test_weights_are_those_of_the_checkpoint(source, folder, tmp_path):
    """Of 16 bits also where the CPU computes in f32; each table once; the dry run counts what is written."""
    dry = plan(source, tmp_path / "dry", **FLOATS)
    assert (dry.dense, dry.left_out) == (int((folder / "dense_bytes").read_text(encoding="utf-8")), "")
    large = [v for v in ir.load(folder / "vision.onnx").graph.initializers.values() if v.const_value.size > 1000]
    assert len(large) > 8
    assert {value.dtype for value in large} == {ir.DataType.BFLOAT16}
    (table,) = (v for v in ir.load(folder / "embeddings.onnx").graph.initializers.values() if v.const_value.size > 1000)
    assert table.dtype == ir.DataType.BFLOAT16
    assert not any(v.shape == table.shape for v in ir.load(folder / "model.onnx").graph.initializers.values())
    found = inspect(folder, verify=True)
    assert all(found[name]["verified"] == len(found[name]["dense"]) > 0 for name in ("vision", "embeddings"))


def test_float16(source, folder, tmp_path):
    """The type between the three files is the decoder's."""
    export(source, tmp_path, **FLOATS | {"dtype": "f16", "cache": "f16"})
    sessions = [session(tmp_path / name) for name in ("vision.onnx", "embeddings.onnx", "model.onnx")]
    found = {(i.name, i.type) for one in sessions for i in (*one.get_inputs(), *one.get_outputs())}
    without_images = {row.name for row in TENSORS} - {"input_ids", "position_ids"}
    assert {row.name for row in VISION_TENSORS} == {
        name for name, _ in found if re.sub(r"\.\d+\..*", ".N.*", name) not in without_images
    }
    assert {(n, kind) for n, kind in found if n in ("image_features", "inputs_embeds", "pixel_values")} == {
        ("pixel_values", "tensor(float)"),
        ("image_features", "tensor(float16)"),
        ("inputs_embeds", "tensor(float16)"),
    }
    values, grid = patches(picture(64, 96))
    given = {"pixel_values": values, "image_grid_thw": np.array([grid])}
    found, want = (session(path / "vision.onnx").run(None, given)[0] for path in (tmp_path, folder))
    assert np.abs(found - want).max() <= 2**-11 * np.abs(want).max()  # computed in f32, rounded once


@pytest.mark.parametrize("dtype", every(["bf16", "f16"]))
def test_cuda(source, tmp_path, dtype):
    """Its files, which no GPU has run here: one type throughout, and attention where ONNX Runtime's CUDA has it."""
    export(source, tmp_path, vision=True, quantize="none", target="cuda", dtype=dtype)
    kind = {"bf16": ir.DataType.BFLOAT16, "f16": ir.DataType.FLOAT16}[dtype]
    tower = ir.load(tmp_path / "vision.onnx")
    assert {v.dtype for v in tower.graph.initializers.values() if v.const_value.size > 1000} == {kind}
    assert {value.dtype for value in tower.graph.outputs} == {kind}
    attending = [node for node in tower.graph if node.op_type == "MultiHeadAttention"]
    assert len(attending) == VISION["depth"]
    assert all(value.producer().attributes["to"].as_int() == ir.DataType.FLOAT16
               for node in attending for value in node.inputs)  # fmt: skip
    decoder = ir.load(tmp_path / "model.onnx")
    assert [(v.name, v.dtype) for v in decoder.graph.inputs if v.name == "inputs_embeds"] == [("inputs_embeds", kind)]
    assert "com.microsoft" not in {node.domain for node in decoder.graph}
    options = json.loads((tmp_path / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"][
        "session_options"
    ]
    assert options["provider_options"] == [{"cuda": {"enable_cuda_graph": "0"}}]


def test_generate_says_what_runs_it(folder):
    for run in (Generator, lambda path: Ours(str(path), 1)):
        with pytest.raises(ModelError, match=r"model\.onnx: takes embeddings, not tokens, .*onnxruntime-genai"):
            run(folder)


def without(part: str) -> Callable[..., Any]:
    return lambda name, tensor: [] if part in name else [(name, tensor)]


def test_half_a_tower_is_named(source, tmp_path):
    cut = rewritten(source, tmp_path / "half", without("blocks.1.attn.qkv.bias"), lambda config: config)
    with pytest.raises(CheckpointError, match=r"model\.visual\.blocks\.1\.attn\.qkv\.bias of the vision tower"):
        plan(cut, tmp_path / "out", **FLOATS)
    bare = rewritten(source, tmp_path / "bare", without(".visual."), lambda config: config)
    with pytest.raises(CheckpointError, match=r"no tensors of a vision tower \(visual\.\* or .*has a vision_config"):
        plan(bare, tmp_path / "out", **FLOATS)

    def narrow(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor[:-1].clone() if name.endswith("patch_embed.proj.weight") else tensor)]

    odd = rewritten(source, tmp_path / "odd", narrow, lambda config: config)
    want = r"model\.visual\.patch_embed\.proj\.weight has shape \[95, 3, 2, 16, 16\], expected \[96, 3, 2, 16, 16\]"
    with pytest.raises(CheckpointError, match=want):
        plan(odd, tmp_path / "out", **FLOATS)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("llama4", "onnxruntime-genai 0.18 has no multimodal pipeline for it"),
        ("gemma4", "wants embeddings of each layer"),
    ],
)
def test_other_families_are_refused_in_a_line(source, tmp_path, kind, reason):
    other = rewritten(source, tmp_path / kind, lambda *pair: [pair], lambda config: config | {"model_type": kind})
    with pytest.raises(CheckpointError, match=rf"config\.json: --vision does not export {kind}: .*{reason}") as caught:
        plan(other, tmp_path / "out", **FLOATS)
    assert "\n" not in str(caught.value)


def test_a_text_model_has_nothing_to_export(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no vision_config"):
        plan(checkpoint("qwen3_5_moe_text"), tmp_path / "out", vision=True)


@pytest.mark.parametrize("heads", [5, 48, 0])
def test_heads_that_do_not_fit_the_tower(source, tmp_path, heads):
    """Queries turn by rows and columns, two features each: a head has a multiple of four."""

    def change(config: dict) -> dict:
        return config | {"vision_config": config["vision_config"] | {"num_heads": heads}}

    other = rewritten(source, tmp_path / "checkpoint", lambda *pair: [pair], change)
    with pytest.raises(
        CheckpointError, match=rf"config\.json: vision_config\.num_heads is {heads}, expected a divisor of"
    ):
        plan(other, tmp_path / "out", **FLOATS)


def test_nothing_says_how_images_become_patches(source, tmp_path):
    shutil.copytree(source, tmp_path / "bare")
    (tmp_path / "bare" / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither preprocessor_config\.json nor processor_config\.json"):
        plan(tmp_path / "bare", tmp_path / "out", **FLOATS)
    whole = {"image_processor": PROCESSOR}
    (tmp_path / "bare" / "processor_config.json").write_text(json.dumps(whole), encoding="utf-8")
    plan(tmp_path / "bare", tmp_path / "out", **FLOATS)


@pytest.mark.parametrize(
    ("other", "name"),
    [({"mtp": True}, "does not go with mtp"), ({"tensor_parallel": 2}, "does not go with tensor_parallel"),
     ({"logits": 5}, "does not go with logits of N"), ({"target": "ort"}, "is for targets cpu and cuda")],
)  # fmt: skip
def test_what_it_does_not_go_with(source, tmp_path, other, name):
    with pytest.raises(OptionError, match=f"vision {name}"):
        plan(source, tmp_path / "out", vision=True, **other)
