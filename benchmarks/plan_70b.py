"""What a stack of 70-billion-parameter size needs per card under FSDP2: `python benchmarks/plan_70b.py`.

80 pairs of attention (64 heads of 128 channels, 8 heads of keys and values) and SwiGLU (28672 channels inside), width
8192; embedding and head are not part of it. Nothing is allocated. Activations are what `rg.plan` says for one sequence
of 131072 tokens on each card, with networks in bfloat16 and streams in float32; all of them are proportional to the
tokens. The rest is arithmetic:

    sharded     weights, gradients and both moments of Adam in float32, divided by the number of cards
    gathered    what FSDP2 holds of whole blocks in a backward: the weights of one and of the next, which is on its way,
                and the gradients of one, in bfloat16, and their copy in float32 that is being reduced

Prints a table and writes benchmarks/results/DATE-plan-70b.json, in about a minute on a CPU.
"""

from __future__ import annotations

import json
from datetime import datetime

import torch
from torch import Tensor, nn
from torch.nn import functional

import retrograd as rg
from bench import HERE, commit

DEPTH, WIDTH, INSIDE, HEADS, GROUPS = 80, 8192, 28672, 64, 8
CARDS = (8, 64, 512)
TOKENS = (8192, 32768, 131072)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * GROUPS * WIDTH // HEADS, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        x = self.norm(x.to(self.query.weight.dtype))  # as FSDP2 casts what enters
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (B, H, T, C / H)
        key, value = self.key_value(x).unflatten(-1, (2, GROUPS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.value = nn.Linear(WIDTH, INSIDE, bias=False), nn.Linear(WIDTH, INSIDE, bias=False)
        self.out = nn.Linear(INSIDE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.to(self.out.weight.dtype))
        return self.out(functional.silu(self.gate(x)) * self.value(x))


def build(depth: int = DEPTH) -> rg.ReversibleSequence:
    return rg.ReversibleSequence([(Attention(), SwiGLU()) for _ in range(depth)]).bfloat16()


def per_token(depth: int = DEPTH) -> dict[str, float]:
    """The bytes of activations under each policy, where they are most: with so many tokens, that is at the peak."""
    found = rg.plan(lambda: build(depth), (1, TOKENS[-1], WIDTH), device="cuda")
    return {row.policy: row.activations / TOKENS[-1] for row in found.rows}


def main() -> None:
    with torch.device("meta"):
        per_block = sum(parameter.numel() for parameter in build(1).parameters())
    parameters, gathered = DEPTH * per_block, (2 * 2 + 2 + 4) * per_block
    activations = per_token()
    rows = [
        {
            "cards": cards,
            "tokens": tokens,
            "policy": policy,
            "sharded": 16 * parameters // cards,
            "gathered": gathered,
            "activations": round(tokens * each),
            "total": 16 * parameters // cards + gathered + round(tokens * each),
        }
        for cards in CARDS
        for tokens in TOKENS
        for policy, each in activations.items()
    ]
    now = datetime.now()
    stack = {"depth": DEPTH, "width": WIDTH, "inside": INSIDE, "heads": HEADS, "groups": GROUPS}
    where = {"date": f"{now:%Y-%m-%d %H:%M:%S}", "commit": commit(), "torch": torch.__version__}
    path = HERE / "results" / f"{now:%Y-%m-%d}-plan-70b.json"
    found = {"parameters": parameters, "per_token": activations, "rows": rows}
    path.write_text(json.dumps({**where, "stack": stack, **found}, indent=1) + "\n")
    print(f"{parameters / 1e9:.1f} billion parameters; GiB per card")
    print("| cards | tokens | policy | sharded | gathered | activations | total |\n|---|---|---|---|---|---|---|")
    for row in rows:
        sizes = " | ".join(f"{row[name] / 2**30:.1f}" for name in ("sharded", "gathered", "activations", "total"))
        print(f"| {row['cards']} | {row['tokens']} | {row['policy']} | {sizes} |")
    print(path)


if __name__ == "__main__":
    main()
