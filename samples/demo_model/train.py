"""Trains the demo's models on one GPU: train.py TEXT_FOLDER OUTPUT_FOLDER [--hybrid].

    python train.py text bf16                             # the demo's model
    python train.py text bf16 --hybrid --context 2048     # the hybrid

TEXT_FOLDER is what text.py wrote; OUTPUT_FOLDER becomes a Hugging Face checkpoint in bf16: a small Qwen3-MoE, or with
--hybrid a small Qwen3.5-MoE, whose layer of multi-token prediction is trained with it.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

CONTEXT = 4096
CHUNK = 64  # tokens of the gated delta rule that are one product
DRAFTS = 0.3  # of the loss of multi-token prediction, as DeepSeek-V3's report has it for most of its training
BALANCE = 0.01  # of the load-balance loss, as the Switch Transformer's paper has it
# Shares of the batch at the beginning and at the end: the King James Version is what the model is to write like.
SHARES = {"kjv": (0.2, 0.6), "asv": (0.2, 0.1), "dar": (0.2, 0.1), "dr": (0.2, 0.1), "leeser": (0.2, 0.1)}


#: of both models. Widths are multiples of 128, the widest group that quantizers usually take.
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def make_model() -> Qwen3MoeForCausalLM:
    """11.7 million parameters."""
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, intermediate_size=512, norm_topk_prob=True))


def make_hybrid() -> Qwen3_5MoeForCausalLM:
    """12.7 million parameters; two layers of gated delta rule, then one of attention, twice."""
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(
            **SIZES,
            layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            shared_expert_intermediate_size=128,
            rope_parameters=rotary | {"mrope_interleaved": True, "mrope_section": [3, 3, 2]},
        )
    )


class Draft(torch.nn.Module):
    """Multi-token prediction as Qwen's checkpoints have it, ``mtp.*``: a token from the hidden state two before it and
    the token before it."""

    def __init__(self, config: Qwen3_5MoeTextConfig):
        super().__init__()
        config = copy.deepcopy(config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        self.decoder = qwen3_5.Qwen3_5MoeTextModel(config)
        self.decoder.embed_tokens = None  # the model's
        self.pre_fc_norm_embedding = copy.deepcopy(self.decoder.norm)
        self.pre_fc_norm_hidden = copy.deepcopy(self.decoder.norm)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """All [batch, tokens, hidden_size]."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)), -1))
        return self.decoder(inputs_embeds=x, use_cache=False).last_hidden_state

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"mtp.{name.removeprefix('decoder.')}": tensor for name, tensor in self.state_dict().items()}


def delta_rule(query, key, value, g, beta, **_: Any) -> tuple[torch.Tensor, None]:
    """transformers' torch_chunk_gated_delta_rule for whole sequences from an empty state, whose chunks all run at once.

    In a chunk the changes of the state S solve a triangular system, in S linearly: d = U - W S. So the state after it
    is A S + B, and the states between chunks are a prefix scan of such maps (Yang et al., Gated Delta Networks).

    Args: query, key: [batch, tokens, key heads, size]; value: [batch, tokens, value heads, size]; g, beta: [batch,
    tokens, value heads]. tokens is a multiple of CHUNK.
    """
    kind, dropout = query.dtype, delta_rule.dropout
    heads, size = value.shape[2], key.shape[-1]
    with torch.autocast(query.device.type, enabled=False):
        query, key = (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
        query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query * size**-0.5, key))
        q, k, v = (x.float().transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (query, key, value))
        g, beta = (x.float().transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (g, beta))
        decay = g.cumsum(-1)
        seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
        ratio = torch.where(seen, decay[..., :, None] - decay[..., None, :], -torch.inf).exp()
        system = (k @ k.mT * ratio * beta[..., None]).tril(-1) + torch.eye(CHUNK, device=q.device)
        right = beta[..., None] * torch.cat((v, k * decay.exp()[..., None]), -1)
        u, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
            (v.shape[-1], size), -1
        )
        tail = (k * (decay[..., -1:] - decay).exp()[..., None]).mT
        a = decay[..., -1].exp()[..., None, None] * torch.eye(size, device=q.device) - tail @ w
        b = tail @ u
        reach = 1
        while reach < a.shape[2]:  # each map after those of the `reach` chunks before it
            b = torch.cat((b[:, :, :reach], b[:, :, reach:] + a[:, :, reach:] @ b[:, :, :-reach]), 2)
            a = torch.cat((a[:, :, :reach], a[:, :, reach:] @ a[:, :, :-reach]), 2)
            reach *= 2
        state = torch.cat((torch.zeros_like(b[:, :, :1]), b[:, :, :-1]), 2)
        out = (q * decay.exp()[..., None]) @ state + (q @ k.mT * ratio) @ (u - w @ state)
    return F.dropout(out.flatten(2, 3).transpose(1, 2).to(kind), dropout), None


delta_rule.dropout = 0.0


class Attach(torch.autograd.Function):
    """x, through which the gradient of ``loss`` (a scalar) flows as well: added to the total loss with weight 1."""

    @staticmethod
    def forward(context, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return gradient, torch.ones((), device=gradient.device)


def experts(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Both models' experts with their load-balance loss.

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
    if hasattr(self, "shared_expert"):
        out = out + self.shared_expert_gate(tokens).sigmoid() * self.shared_expert(tokens)
    out = F.dropout(Attach.apply(out, balance), self.dropout, self.training)
    return out.view_as(x)


def loss_of(model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), targets.flatten())


def perplexity(model: PreTrainedModel, ids: torch.Tensor, width: int = 1024) -> float:
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


# over 80 lines: a program from its options to its perplexities, each step of it once
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--hybrid", action="store_true")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a sequence")
    # Nine times through the text. With more steps, or less dropout and decay, the text held back gets worse (docs/lab)
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
        name: torch.tensor(
            tokenizer((options.text / f"{name}.txt").read_text(encoding="utf-8"))["input_ids"], device=device
        )
        for name in ("valid", "heldout")
    }

    model = (make_hybrid() if options.hybrid else make_model()).to(device)
    draft = Draft(model.config).to(device) if options.hybrid else None
    block = qwen3_5.Qwen3_5MoeSparseMoeBlock if options.hybrid else Qwen3MoeSparseMoeBlock
    forward, block.forward = block.forward, experts
    rule, qwen3_5.torch_chunk_gated_delta_rule = qwen3_5.torch_chunk_gated_delta_rule, delta_rule
    delta_rule.dropout = options.dropout
    for layer in (*model.model.layers, *(draft.decoder.layers if draft else ())):
        layer.mlp.dropout = options.dropout
        if hasattr(layer, "self_attn"):
            layer.self_attn.attention_dropout = options.dropout
        if options.compile:
            layer.compile(dynamic=False)
    loss_function = torch.compile(loss_of, dynamic=False) if options.compile else loss_of
    parameters = [*model.parameters(), *(draft.parameters() if draft else ())]
    print(sum(p.numel() for p in parameters), "parameters", flush=True)
    matrices = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim < 2]
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
        for name in generator.choice(list(SHARES), options.tokens // options.context, p=shares / shares.sum()):
            at = generator.integers(len(data[name]) - options.context - 1)
            batch.append(data[name][at : at + options.context + 1])
        ids = torch.from_numpy(np.stack(batch).astype(np.int64)).to(device)
        with torch.autocast(device, torch.bfloat16):
            hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
            loss = told = loss_function(model, hidden, ids[:, 1:])
            if draft:
                ahead = draft(model.model.embed_tokens(ids[:, 1:]), hidden)[:, :-1]
                loss = loss + DRAFTS * loss_function(model, ahead, ids[:, 2:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"{time.monotonic() - begin:4.0f} s, step {step}: loss {told.item():.3f}", flush=True)

    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=0, pad_token_id=0, do_sample=True, temperature=0.8, top_p=0.95
    )
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    if draft:
        file = options.output / "model.safetensors"
        save_file(load_file(file) | draft.to(torch.bfloat16).cpu().tensors(), file, {"format": "pt"})
    block.forward, qwen3_5.torch_chunk_gated_delta_rule = forward, rule
    model = type(model).from_pretrained(options.output, dtype=torch.bfloat16).to(device)
    found = {name: perplexity(model, ids) for name, ids in held.items()}
    print(json.dumps(vars(options) | {"perplexity": found}, default=str), flush=True)


if __name__ == "__main__":
    main()
