"""Trains the demo's model, a small Qwen3-MoE, on one GPU: train.py TEXT_FOLDER OUTPUT_FOLDER.

TEXT_FOLDER is what text.py wrote; OUTPUT_FOLDER becomes a Hugging Face checkpoint in bf16.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

CONTEXT = 4096
BALANCE = 0.01  # of the load-balance loss, as the Switch Transformer's paper has it
# Shares of the batch at the beginning and at the end: the King James Version is what the model is to write like.
SHARES = {"kjv": (0.2, 0.6), "asv": (0.2, 0.1), "dar": (0.2, 0.1), "dr": (0.2, 0.1), "leeser": (0.2, 0.1)}


def make_model() -> Qwen3MoeForCausalLM:
    """11.7 million parameters. Widths are multiples of 128, the widest group that quantizers usually take."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=4096,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=128,
            intermediate_size=512,
            norm_topk_prob=True,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


class Attach(torch.autograd.Function):
    """x, through which the gradient of ``loss`` (a scalar) flows as well: added to the total loss with weight 1."""

    @staticmethod
    def forward(context, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return gradient, torch.ones((), device=gradient.device)


def experts(self: Qwen3MoeSparseMoeBlock, x: torch.Tensor) -> torch.Tensor:
    """Qwen3-MoE's experts with their load-balance loss.

    All experts multiply every token, and the best are kept: at this size two plain products are faster than gathering.
    """
    gate, w13, w2 = self.gate, self.experts.gate_up_proj, self.experts.down_proj
    E, rows, H = w13.shape
    tokens = x.reshape(-1, H)
    probabilities = F.linear(tokens.float(), gate.weight.float()).softmax(-1)
    best, chosen = probabilities.topk(gate.top_k, dim=-1)
    scores = torch.zeros_like(probabilities).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
    load = (scores > 0).float().mean(0)
    balance = BALANCE * E / gate.top_k * (load * probabilities.mean(0)).sum()
    gates, up = F.linear(tokens, w13.reshape(E * rows, H)).view(-1, E, rows).chunk(2, dim=-1)
    hidden = F.silu(gates) * up * scores.to(up.dtype)[..., None]
    out = F.linear(hidden.flatten(1), w2.permute(1, 0, 2).reshape(H, -1))
    out = F.dropout(Attach.apply(out, balance), self.dropout, self.training)
    return out.view_as(x)


def loss_of(model: Qwen3MoeForCausalLM, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), targets.flatten())


def perplexity(model: Qwen3MoeForCausalLM, ids: torch.Tensor, width: int = 1024) -> float:
    """Of all tokens but the first of each ``width``."""
    model.eval()
    total = count = 0
    with torch.no_grad():
        for begin in range(0, len(ids) - 1, width):
            part = ids[None, begin : begin + width]
            if part.shape[1] > 1:
                logits = model(part, use_cache=False).logits[0, :-1].float()
                total += F.cross_entropy(logits, part[0, 1:], reduction="sum").item()
                count += part.shape[1] - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("output", type=Path)
    # Nine times through the text. With more steps, or less dropout and decay, the text held back gets worse (README.md)
    parser.add_argument("--steps", type=int, default=1290)
    parser.add_argument("--tokens", type=int, default=32768, help="in a step")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--decay", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    generator = np.random.default_rng(0)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(options.text / "tokenizer.json"), eos_token="</s>", pad_token="</s>"
    )
    data = {name: np.fromfile(options.text / f"train-{name}.bin", np.uint16) for name in SHARES}
    held = {
        name: torch.tensor(tokenizer((options.text / f"{name}.txt").read_text())["input_ids"], device=device)
        for name in ("valid", "heldout")
    }

    model = make_model().to(device)
    forward, Qwen3MoeSparseMoeBlock.forward = Qwen3MoeSparseMoeBlock.forward, experts
    for layer in model.model.layers:
        layer.mlp.dropout = options.dropout
        layer.self_attn.attention_dropout = options.dropout
        if options.compile:
            layer.compile(dynamic=False)
    loss_function = torch.compile(loss_of, dynamic=False) if options.compile else loss_of
    print(sum(p.numel() for p in model.parameters()), "parameters", flush=True)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.decay}, {"params": others, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )

    begin = time.monotonic()
    for step in range(options.steps):
        warm, fading = min(1.0, (step + 1) / 100), min(1.0, 2 * (1 - step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = options.rate * warm * fading
        shares = np.array([last + (first - last) * fading for first, last in SHARES.values()])
        batch = []
        for name in generator.choice(list(SHARES), options.tokens // CONTEXT, p=shares / shares.sum()):
            at = generator.integers(len(data[name]) - CONTEXT - 1)
            batch.append(data[name][at : at + CONTEXT + 1])
        ids = torch.from_numpy(np.stack(batch).astype(np.int64)).to(device)
        with torch.autocast(device, torch.bfloat16):
            hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
            loss = loss_function(model, hidden, ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"{time.monotonic() - begin:4.0f} s, step {step}: loss {loss.item():.3f}", flush=True)

    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=0, pad_token_id=0, do_sample=True, temperature=0.8, top_p=0.95
    )
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    Qwen3MoeSparseMoeBlock.forward = forward
    model = Qwen3MoeForCausalLM.from_pretrained(options.output, dtype=torch.bfloat16).to(device)
    found = {name: perplexity(model, ids) for name, ids in held.items()}
    print(json.dumps(vars(options) | {"perplexity": found}, default=str), flush=True)


if __name__ == "__main__":
    main()
