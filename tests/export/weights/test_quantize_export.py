"""`export --quantize` of the demo's model in bf16: the line that says what was lost, and calibration on a text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from support.harness.once import made_once
from typer.testing import CliRunner

from quantmoe.benchmarks.quality import quantization_loss as lost_module
from quantmoe.benchmarks.quality.evaluate import evaluate
from quantmoe.benchmarks.quality.quantization_loss import TEXT, TOKENS, lost
from quantmoe.exporter.cli import app
from quantmoe.exporter.errors import CheckpointError, OptionError
from quantmoe.exporter.graph import calibrating
from quantmoe.exporter.graph.calibrating import calibrate
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint
from quantmoe.exporter.reading.gguf.imatrix import read_imatrix
from quantmoe.exporter.reading.weights.rounding import weighed
from quantmoe.exporter.reading.windows import WINDOW, windows_of
from quantmoe.exporter.safetensors_file import write_safetensors
from quantmoe.exporter.writing import calibration as calibration_module
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.exporter.writing.prepare import open_format

DEMO = Path(__file__).parents[3] / "samples" / "demo_model" / "checkpoint"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint, which is int4, in bf16; weights moved off the grid by half a step."""

    def write(folder: Path) -> None:
        format, rng = find_format(open_checkpoint(DEMO)), np.random.default_rng(0)
        tensors = {name: format.parameter(name) for name in format.parameters()}
        for layer in moe_layers(format):
            for e in range(layer.num_experts):
                expert = layer.expert(e)
                for name, m in zip(layer.projections, (expert.gate, expert.up, expert.down), strict=True):
                    tensors[f"{layer.name}.{e}.{name}.weight"] = m.dequantize(np.float32)
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight"):
                tensors[name] = tensor + rng.uniform(-0.1, 0.1, tensor.shape) * tensor.std()
        folder.mkdir(exist_ok=True)
        write_safetensors(folder / "model.safetensors", {n: t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()})
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(DEMO / name, folder / name)
        config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    return made_once(tmp_path_factory, write, "demo floats")


@pytest.fixture(scope="module")
def quantized(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def write(folder: Path) -> None:
        export(floats, folder, quantize="int4")

    return made_once(tmp_path_factory, write, "demo int4")


def test_the_line_says_what_evaluate_says(floats: Path, quantized: Path, tmp_path: Path) -> None:
    line = lost(floats, quantized, 1e6)
    tokens = windows_of(quantized, TEXT.read_text(encoding="utf-8"), TOKENS)[0]
    figures = evaluate(quantized, TEXT.read_text(encoding="utf-8"), against=floats, window=TOKENS).figures
    assert 200 < len(tokens) <= TOKENS
    assert line == (
        f"lost on {len(tokens)} tokens of a built-in text: KL {figures.kld.mean:.4f} nats, same likeliest token "
        f"{figures.same_top.mean:.1%}, perplexity {figures.perplexity.mean:.2f} instead of "
        f"{figures.base_perplexity.mean:.2f}"
    )
    assert figures.kld.mean > 1e-4


def test_the_line_is_left_out_where_it_takes_too_long(
    floats: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first decoder layer it is known how long all would take: the others are not read."""
    read: list[int] = []
    monkeypatch.setattr(lost_module.time, "perf_counter", iter(range(0, 1000, 10)).__next__)
    found = _counting_layers(read, monkeypatch)
    line = lost(floats, quantized, 100.0)
    assert line.startswith(
        "what was lost is not measured: it would take more than 10% of the export's time; quantmoe ev"
    )
    assert found == [1]
    shutil.copytree(quantized, tmp_path / "without")
    (tmp_path / "without" / "tokenizer.json").unlink()
    assert "tokenizer.json: missing" in lost(floats, tmp_path / "without", 1e6)


def _counting_layers(found: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from quantmoe.exporter.graph import streamed_model

    original = streamed_model.Streamed

    class Counting(original):
        def __init__(self, format, layers=None, progress=lambda done, total: None):
            super().__init__(format, layers, lambda done, total: (found.append(done), progress(done, total)))

    monkeypatch.setattr(streamed_model, "Streamed", Counting)
    return found


def test_the_command_ends_with_the_line(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def recorded(*arguments: object) -> str:
        given.append(arguments)
        return "the line"

    monkeypatch.setattr(lost_module, "lost", recorded)
    command = ["export", str(floats), str(tmp_path / "a"), "--layers", "1", "--quantize"]
    done = CliRunner().invoke(app, [*command, "mxfp4"], catch_exceptions=False)
    assert done.output.splitlines()[-1] == "the line"
    ((checkpoint, output, seconds, layers),) = given
    assert (checkpoint, output, layers) == (floats, tmp_path / "a", 1)
    assert seconds > 0
    done = CliRunner().invoke(app, [*command, "none", "--force"], catch_exceptions=False)
    assert "the line" not in done.output


def _moments(model: torch.nn.Module, windows: list[list[int]]) -> Iterator[tuple[str, np.ndarray, int]]:
    """By hooks, and experts by their own formula: sums of squares of inputs, and how many."""
    inputs: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda m, given, name=name: inputs.setdefault(name, []).extend(given))
    with torch.no_grad():
        model(torch.tensor(windows))
    for name, given in inputs.items():
        if not name.endswith("mlp.experts"):
            x = given[0].reshape(-1, given[0].shape[-1]).double()
            yield name, (x**2).sum(0).numpy(), len(x)
            continue
        experts, (x, chosen, _) = model.get_submodule(name), given
        x = x.reshape(-1, x.shape[-1]).double()
        for e in range(len(experts.down_proj)):
            rows = x[(chosen.reshape(len(x), -1) == e).any(-1)]
            gate, up = (rows @ experts.gate_up_proj[e].double().T).chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
            for projection in ("gate_proj", "up_proj"):
                yield f"{name}.{e}.{projection}", (rows**2).sum(0).numpy(), len(rows)
            yield f"{name}.{e}.down_proj", (hidden**2).sum(0).numpy(), len(rows)


def test_importance_is_the_mean_square_of_inputs(floats: Path) -> None:
    text = TEXT.read_text(encoding="utf-8")
    windows = windows_of(floats, text, 64)[:3]
    told: list[tuple[int, int]] = []
    found = calibrate(open_format(floats, "none", None), windows, None, lambda *at: told.append(at))
    reference = dequantized(Skeleton(open_format(floats, "none", None)))
    wanted = {name: (squares, count) for name, squares, count in _moments(reference, windows)}
    reached = {name for name, (_, count) in wanted.items() if count}
    routers = {name for name in found.importance if name.endswith("mlp.gate")}  # no linears, and not quantized
    assert found.importance.keys() - routers == reached - {"lm_head"}
    for name, importance in found.importance.items():
        if name in routers:
            continue
        squares, count = wanted[name]
        assert np.allclose(importance, weighed(squares / count), rtol=1e-3), name
    experts = [name for name in wanted if name.endswith("down_proj")]
    assert (found.experts, found.unreached) == (len(experts), len([name for name in experts if name not in reached]))
    assert told == [(at, 6) for at in range(1, 7)]


def test_an_export_is_calibrated(floats: Path, quantized: Path, tmp_path: Path) -> None:
    """The text's tokens are counted, and the weights are others."""
    text = tmp_path / "text"
    text.write_text(TEXT.read_text(encoding="utf-8")[:500], encoding="utf-8")
    report = export(floats, tmp_path / "out", quantize="int4", calibrate=text)
    (window,) = windows_of(floats, text.read_text(encoding="utf-8"), TOKENS)
    assert report.calibration.startswith(f"calibrated on {len(window):,} tokens of {text}")
    data = [(folder / "model.onnx.data").read_bytes() for folder in (quantized, tmp_path / "out")]
    assert len(data[0]) == len(data[1])
    assert data[0] != data[1]
    with pytest.raises(OptionError, match="calibrate is an option of quantize"):
        export(floats, tmp_path / "none", quantize="none", calibrate=text)


def test_an_interrupted_calibration_goes_on(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of the text is not read again, the weights are those of an export without interruption, and the
    kept file goes with the export. Another text begins anew; another program's file stays."""
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text(TEXT.read_text(encoding="utf-8")[:2500], encoding="utf-8")
    monkeypatch.setattr(calibration_module, "WINDOW", 64)
    monkeypatch.setattr(calibrating, "TOGETHER", 2)
    windows = len(windows_of(floats, text.read_text(encoding="utf-8"), 64))
    layers = 2
    total = layers * -(-windows // 2)

    def export_until(at: int, to: Path, file: Path = text) -> list[int]:
        done: list[int] = []

        def progress(stage: str, layer: int, of: int) -> None:
            if stage != "calibrating":
                return
            done.append(layer)
            assert of == total
            if layer == at:
                raise KeyboardInterrupt

        export(floats, to, quantize="int8", calibrate=file, layers=layers, progress=progress)
        return done

    with pytest.raises(KeyboardInterrupt):
        export_until(5, out)
    kept = out / "quantmoe.calibration"
    first = kept.read_bytes()
    assert export_until(0, out) == list(range(5, total + 1))
    assert not kept.exists()
    assert export_until(0, tmp_path / "whole") == list(range(1, total + 1))
    data = [(folder / "model.onnx.data").read_bytes() for folder in (out, tmp_path / "whole")]
    assert data[0] == data[1]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / kept.name).write_bytes(first)
    other = tmp_path / "text2"
    other.write_text(text.read_text(encoding="utf-8")[::-1][:2500], encoding="utf-8")
    total = layers * -(-len(windows_of(floats, other.read_text(encoding="utf-8"), 64)) // 2)
    with pytest.raises(KeyboardInterrupt):
        export_until(1, tmp_path / "other", other)
    (tmp_path / "other" / kept.name).write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=r"quantmoe\.calibration: expected the calibration of an export; remove"):
        export_until(0, tmp_path / "other")
    assert (tmp_path / "other" / kept.name).read_bytes() == b"mine"


def test_a_dry_run_says_what_calibration_takes(floats: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT.read_text(encoding="utf-8")[:3000], encoding="utf-8")
    windows = windows_of(floats, text.read_text(encoding="utf-8"), WINDOW)
    options = {"quantize": "q4_k", "layers": 2}
    plain, found = (plan(floats, tmp_path / "out", **options, calibrate=given) for given in (None, text))
    assert plain.calibration is None
    assert found.calibration is not None
    assert found.calibration.tokens == len(windows) * len(windows[0])
    assert found.seconds == pytest.approx(plain.seconds + found.calibration.seconds)
    # the embeddings, twice a layer, and a window's scores of attention
    config = json.loads((floats / "config.json").read_text(encoding="utf-8"))
    width, heads = config["hidden_size"], config["num_attention_heads"]
    experts = next(iter(moe_layers(open_format(floats, "none", None))))
    least = config["vocab_size"] * width + 2 * 3 * experts.num_experts * width * experts.intermediate_size
    assert found.calibration.memory > 4 * (least + len(windows) * heads * len(windows[0]) ** 2)
    assert found.memory >= found.calibration.memory > found.memory / 100
    command = ["export", str(floats), str(tmp_path / "out"), "--dry-run", "--layers", "2", "--quantize", "q4_k"]
    said = CliRunner().invoke(app, [*command, "--calibrate", str(text)], catch_exceptions=False).output
    wanted = f"the model reads {found.calibration.tokens:,} tokens of {text} first: about"
    assert "".join(wanted.split()) in "".join(said.split())  # a long path is cut at the end of a line
    assert "the model reads" not in CliRunner().invoke(app, command, catch_exceptions=False).output
    with pytest.raises(OptionError, match=r"^calibrate .*nothing: no such file"):
        plan(floats, tmp_path / "out", **options, calibrate=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("café".encode("latin-1"), r"text: expected text in UTF-8, or llama-imatrix's file in GGUF$"),
        (b"\n", r"text: expected text, found no text$"),
    ],
    ids=["latin-1", "empty"],
)
def test_a_calibration_that_is_no_text(floats: Path, tmp_path: Path, content: bytes, said: str) -> None:
    """llama-imatrix's older files, named .dat, are no GGUF files either."""
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(OptionError, match="^calibrate .*" + said):
        plan(floats, tmp_path / "out", quantize="q4_k", layers=1, calibrate=tmp_path / "text")


def test_ctrl_c_says_where_the_calibration_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantmoe.exporter.writing import convert

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "write", interrupted)
    command = ["export", str(tmp_path), str(tmp_path), "--quantize", "q4_k", "--calibrate", "text.txt"]
    assert "keeps" not in CliRunner().invoke(app, command).output
    (tmp_path / "quantmoe.calibration").write_bytes(b"")
    said = CliRunner().invoke(app, command).output
    assert said.strip().endswith("n keeps what was read of text.txt: this command goes on from there")


def test_llama_cpps_importance_matrix(floats: Path, quantized: Path, tmp_path: Path) -> None:
    """Its names are the checkpoint's, experts one by one or fused; experts that no token reached are left out."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(tmp_path / "imatrix.gguf", "")
    sums = {"blk.1.attn_q.weight": rng.random((1, 256)), "blk.1.ffn_down_exps.weight": rng.random((16, 128))}
    counts = {"blk.1.attn_q.weight": np.full((1, 1), 10.0), "blk.1.ffn_down_exps.weight": np.full((16, 1), 5.0)}
    counts["blk.1.ffn_down_exps.weight"][7] = 0
    writer.add_type("imatrix")
    for name in sums:
        writer.add_tensor(f"{name}.in_sum2", sums[name].astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts[name].astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_imatrix(tmp_path / "imatrix.gguf")
    assert np.allclose(found["model.layers.1.self_attn.q_proj"], sums["blk.1.attn_q.weight"][0] / 10)
    for name in ("mlp.experts.{}.down_proj", "block_sparse_moe.experts.{}.w2"):
        assert np.allclose(found["model.layers.1." + name.format(3)], sums["blk.1.ffn_down_exps.weight"][3] / 5)
        assert "model.layers.1." + name.format(7) not in found
    report = export(floats, tmp_path / "out", quantize="int4", calibrate=tmp_path / "imatrix.gguf", layers=2)
    assert report.calibration == f"errors are weighed by {tmp_path / 'imatrix.gguf'}"
    module = "model.layers.1.self_attn.q_proj"
    plain = open_format(floats, "int4", None)
    weighted = open_format(floats, "int4", None)
    weighted.importance |= {name: weighed(mean) for name, mean in found.items()}
    w, importance = plain.ckpt.tensor(f"{module}.weight").astype(np.float64), weighed(found[module])
    errors = [(((f.matrix(module).dequantize() - w) ** 2) * importance).sum() for f in (weighted, plain)]
    assert errors[0] < errors[1]
    with pytest.raises(CheckpointError, match=r"general.type is 'model', expected 'imatrix'"):
        read_imatrix(Path(__file__).parents[2] / "fixtures/gguf/mixtral-Q5_0.gguf")


def test_a_mixture_has_more_bits_where_they_gain_most(floats: Path, tmp_path: Path) -> None:
    """Attention everywhere; down as llama-quant.cpp's use_more_bits: of six layers the last, and every third. A dry run
    says so."""
    format = open_format(floats, "q4_k_m", None)
    for i in range(6):
        for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert format.scheme_of(f"model.layers.{i}.self_attn.{leaf}").format == "q6_k"
    for layer in moe_layers(format):
        expert = layer.expert(3)
        assert (expert.gate.kind, expert.up.kind) == ("q4_k", "q4_k")
        assert expert.down.kind == ("q6_k" if layer.index in (2, 5) else "q4_k")
        assert layer.down_scheme.format == expert.down.kind
    texts = [text for text, *_ in plan(floats, tmp_path / "out", quantize="q4_k_m").layers.values()]
    usual, more = "quantized to q4_k group 256", "quantized to q4_k group 256; down: quantized to q6_k group 256"
    assert texts == [usual, usual, more, usual, usual, more]


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("model.layers.0.mlp.experts", "q5_k"),  # fused
        ("model.layers.0.mlp.experts.2.gate_up_proj", "q5_k"),
        ("model.layers.2.mlp.experts.0.down_proj", "q6_k"),
        ("model.layers.3.mlp.experts.2.down_proj", "q5_k"),
        ("model.layers.0.mlp.shared_expert.up_proj", "q5_k"),
        ("model.layers.5.block_sparse_moe.experts.0.w2", "q6_k"),
        ("model.layers.0.linear_attn.in_proj_qkv", "q6_k"),
        ("model.layers.1.mixer.out_proj", "q6_k"),
    ],
)
def test_a_mixture_knows_modules_by_their_names(floats: Path, module: str, kind: str) -> None:
    """Shared experts have the format of the routed ones, with which they are one node."""
    assert open_format(floats, "q5_k_m", None)._kind(module) == kind


def test_only_int4_has_zero_points(floats: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="symmetric is for quantize int4"):
        export(floats, tmp_path / "out", quantize="int8", symmetric=True)
    module = "model.layers.0.self_attn.q_proj"
    assert open_format(floats, "int4", None).matrix(module).zero_points is not None
    assert open_format(floats, "int4", None, activations=None, symmetric=True).matrix(module).zero_points is None


def test_matrices_with_global_scales_of_their_own_stay_apart(floats: Path, tmp_path: Path) -> None:
    """q, k and v have unlike largest weights, so nvfp4 gives them unlike global scales."""
    export(floats, tmp_path / "nvfp4", quantize="nvfp4", activations="float")
    names = {linear["module"].rpartition(".")[2] for linear in inspect(tmp_path / "nvfp4")["linears"]}
    assert names >= {"q_proj", "k_proj", "v_proj"}
