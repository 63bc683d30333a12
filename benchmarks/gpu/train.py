"""Training steps of GPT-2 and Llama-like models: tokens/s, step time, MFU, peak memory.

Parameters and AdamW's states are f32, matmuls bf16 by autocast; attention is PyTorch's fused one;
AdamW is the fused one; gradients are clipped at a norm of 1. One optimizer step takes one batch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common import Bench, summary

# Dense bf16 FLOP/s by a part of the device's name, from NVIDIA's data sheets (SXM boards).
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


@dataclass(frozen=True)
class Shape:
    """A model with a tied table: `kv_heads` of 0 makes it a GPT-2, others are like Llama 3.2."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    sequence: int
    batches: tuple[int, ...]

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.width // self.heads

    @property
    def is_gpt2(self) -> bool:
        return self.kv_heads == 0


GPT2, LLAMA = 50304, 128256
MODELS = (
    Shape("gpt2-124m", 12, 768, 12, 0, 3072, GPT2, 1024, (64, 32, 16)),
    Shape("gpt2-350m", 24, 1024, 16, 0, 4096, GPT2, 1024, (32, 16, 8)),
    Shape("gpt2-774m", 36, 1280, 20, 0, 5120, GPT2, 1024, (16, 8, 4)),
    Shape("gpt2-1.5b", 48, 1600, 25, 0, 6400, GPT2, 1024, (16, 8, 4)),
    Shape("llama-1b", 16, 2048, 32, 8, 8192, LLAMA, 4096, (4, 2, 1)),
    Shape("llama-3b", 28, 3072, 24, 8, 8192, LLAMA, 4096, (2, 1)),
)
QUICK = (
    Shape("quick-gpt2", 2, 64, 2, 0, 128, 256, 32, (2,)),
    Shape("quick-llama", 2, 64, 4, 2, 128, 256, 32, (2,)),
)


class Attention(nn.Module):
    """Causal attention, with rotary positions in a Llama."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        kv = s.kv_heads or s.heads
        self.columns = [s.heads * s.head, kv * s.head, kv * s.head]
        self.qkv = nn.Linear(s.width, sum(self.columns), bias=s.is_gpt2)
        self.out = nn.Linear(s.width, s.width, bias=s.is_gpt2)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
        samples, sequence, width = x.shape
        parts = self.qkv(x).split(self.columns, dim=-1)
        q, k, v = (p.view(samples, sequence, -1, self.shape.head).transpose(1, 2) for p in parts)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        gqa = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return self.out(y.transpose(1, 2).reshape(samples, sequence, width))


def rotations(s: Shape, device: torch.device) -> torch.Tensor:
    """Cosines and sines [2, sequence, head / 2] of the angles of rotary positions."""
    powers = torch.arange(0, s.head, 2, device=device) / s.head
    angles = torch.outer(torch.arange(s.sequence, device=device), 500000.0**-powers)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turns the first half of every head against its second."""
    cos, sin = rotation.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        norm = nn.LayerNorm if s.is_gpt2 else nn.RMSNorm
        self.norm_1, self.attention, self.norm_2 = norm(s.width), Attention(s), norm(s.width)
        self.gate = None if s.is_gpt2 else nn.Linear(s.width, s.mlp, bias=False)
        self.up = nn.Linear(s.width, s.mlp, bias=s.is_gpt2)
        self.down = nn.Linear(s.mlp, s.width, bias=s.is_gpt2)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x), rotation)
        y = self.norm_2(x)
        if self.gate is None:
            return x + self.down(F.gelu(self.up(y), approximate="tanh"))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, s: Shape, device: torch.device) -> None:
        super().__init__()
        self.tokens = nn.Embedding(s.vocabulary, s.width)
        self.positions = nn.Embedding(s.sequence, s.width) if s.is_gpt2 else None
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = (nn.LayerNorm if s.is_gpt2 else nn.RMSNorm)(s.width)
        self.head = nn.Linear(s.width, s.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        rotation = None if s.is_gpt2 else rotations(s, device)
        self.register_buffer("rotation", rotation, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def flops_per_token(s: Shape, model: Model) -> tuple[int, int]:
    """Model FLOPs of a token, forward and backward: with causal attention and with all of it.

    6 for every weight of a matmul, of which the output projection is one and the tables that are
    looked up are none; 6 L H d T for causal attention, 12 L H d T for all of it.
    """
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    attention = s.layers * s.width * s.sequence
    return 6 * weights + 6 * attention, 6 * weights + 12 * attention


def train(bench: Bench, s: Shape, batch: int, compiled: bool) -> dict[str, object]:
    """Trains on random tokens and returns the figures of the steps after the first few."""
    device = bench.device
    model = Model(s, device).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    loss_of = torch.compile(model) if compiled else model
    tokens = torch.randint(s.vocabulary, (batch, s.sequence + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    begin = time.perf_counter()
    first = step().item()
    first_s = time.perf_counter() - begin
    for _ in range(1 if bench.quick else 7):
        step()
    if bench.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times, last = timed_steps(bench, step)
    figures = summary(times)
    median = float(figures["median_s"])
    causal, full = flops_per_token(s, model)
    n_tokens = batch * s.sequence
    figures |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": n_tokens,
        "tokens_per_s": n_tokens / median,
        "flops_per_token_causal": causal,
        "flops_per_token_full": full,
        "first_step_s": first_s,
        "loss_first": first,
        "loss_last": last,
    }
    if bench.on_gpu:
        figures["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        figures["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        name = torch.cuda.get_device_name()
        peak = next((p for part, p in PEAKS.items() if part in name), None)
        if peak is not None:
            figures["mfu_causal"] = causal * n_tokens / median / peak
            figures["mfu_full"] = full * n_tokens / median / peak
    return figures


def timed_steps(bench: Bench, step: Callable[[], torch.Tensor]) -> tuple[list[float], float]:
    """Seconds of each step, without the host waiting between them on a GPU; the last loss."""
    n = 3 if bench.quick else 20
    if not bench.on_gpu:
        times = []
        for _ in range(n):
            begin = time.perf_counter()
            loss = step().item()
            times.append(time.perf_counter() - begin)
        return times, loss
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])]
    return times, loss.item()


def measure(bench: Bench, s: Shape, compiled: bool) -> None:
    """The largest batch of the list that fits; what does not fit is a row too."""
    for batch in s.batches:
        fields = {"model": s.name, "batch": batch, "sequence": s.sequence, "compiled": compiled,
                  "precision": "f32 parameters, bf16 autocast"}
        if bench.is_over():
            bench.row(**fields, error="not measured: the stage's time was up")
            return
        fits = True
        try:
            bench.row(**fields, **train(bench, s, batch, compiled))
        except torch.OutOfMemoryError as e:
            fits = False
            bench.row(**fields, error=f"out of memory: {str(e)[:200]}")
        except Exception as e:  # noqa: BLE001 - the other models are measured all the same
            bench.row(**fields, error=f"{type(e).__name__}: {str(e)[:300]}")
        # Outside the handler, where the failed step's tensors are no longer referred to.
        gc.collect()
        torch.compiler.reset()
        if bench.on_gpu:
            torch.cuda.empty_cache()
        if fits:
            return


def main() -> None:
    bench = Bench("train")
    torch.manual_seed(1)
    for compiled in (True, False):
        for s in QUICK if bench.quick else MODELS:
            measure(bench, s, compiled)


if __name__ == "__main__":
    main()
