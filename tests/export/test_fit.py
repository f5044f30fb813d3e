"""inspect --fit: what it predicts is what the libraries do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from quantmoe.exporter.cli import main
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.inspecting.fit import RATES, RESERVE, fit
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.inspecting.trace import read_trace
from quantmoe.exporter.running.generate import Generator

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
CONTEXT = 100


@pytest.fixture
def found(exported):
    return inspect(exported("qwen3_moe", activations="float"))


def test_everything_fits(found):
    every = fit(found, 1 << 33, CONTEXT)
    assert (every.hit_rate, every.missed, every.slots) == (1, 0, every.experts)
    # A token reads its experts, the linears and the head, and the keys and values before it; of the embeddings a row.
    (layer, _), dense = found["layers"], {t["name"]: t["bytes"] for t in found["dense"]}
    table = sum(size for name, size in dense.items() if "embed_tokens" in name)
    experts = 2 * layer["top_k"] * layer["bytes"] // layer["attributes"]["num_experts"]
    assert table > 0
    assert every.weights == sum(item["bytes"] for item in found["linears"]) + sum(dense.values())
    assert every.read == every.weights - table + experts + every.cache
    assert every.cache == CONTEXT * sum(node["bytes_per_token"] for node in found["attention"])
    assert every.tokens_per_second == RATES["cpu"][0] / every.read


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--experts", "disk", "--ram", "600kB"],
            r"experts: \d+ slots in 2 layers, \d+ % of \d+ uses hit, [\d.]+ [kM]B",
        ),
        (["--experts", "auto", "--reserve", "1MB"], "experts: all in the mapped file"),
    ],
)
def test_generate_says_where_experts_were(given, said, exported, capsys, monkeypatch):
    folder = exported("qwen3_moe", activations="float")
    arguments = ["quantmoe", "generate", str(folder), "--ids", "5", "--max-new-tokens", "3", *given]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="0"):
        main()
    assert re.search(said, capsys.readouterr().err)


def test_a_cache_on_the_cpu(found, exported, tmp_path):
    """Slots, misses and bytes of a session with this budget, to the last."""
    every = fit(found, 1 << 33, CONTEXT)
    memory = every.weights + every.cache + RESERVE["cpu"] + every.all_experts // 2
    half = fit(found, memory, CONTEXT)
    assert half.budget == every.all_experts // 2
    assert 0 < half.slots < half.experts
    assert half.hit_rate == half.slots / half.experts
    folder = exported("qwen3_moe", activations="float")
    generator = Generator(folder, threads=1, experts="disk", ram=half.budget, trace=tmp_path / "trace")
    generator.greedy([5], 12)
    counts = generator.experts_report()
    assert counts["slots"] == half.slots
    del generator
    traced = fit(found, memory, CONTEXT, read_trace(tmp_path / "trace"))
    assert traced.from_trace
    assert traced.hit_rate == counts["hits"] / (counts["hits"] + counts["misses"])
    assert traced.missed * 12 == counts["bytes_read"]


def test_what_is_refused(found, tmp_path):
    with pytest.raises(
        ModelError, match=r"1,000 bytes, expected at least [\d,]+: [\d,]+ of weights outside the experts"
    ):
        fit(found, 1000, CONTEXT)
    header = {"quantmoe_trace": 1, "slot_bytes": 9, "layers": [{"node": "a", "experts": 3, "bytes": 9}]}
    (tmp_path / "trace").write_text(json.dumps(header) + "\n")
    with pytest.raises(ModelError, match="the trace is of a model with other layers or experts"):
        fit(found, 1 << 33, CONTEXT, read_trace(tmp_path / "trace"))
    with pytest.raises(ModelError, match="expected QuantMoE nodes after routers"):
        fit(found | {"layers": []}, 1 << 33, CONTEXT)
