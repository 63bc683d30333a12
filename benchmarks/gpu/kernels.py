"""Rates of single kernels: matmuls, attention, memory-bound ones, launches, and host copies.

Every row has what was done (`kind`, `shape`, `dtype`), its FLOPs or the bytes that it has to move
at least, and the seconds of each repetition; a rate is one divided by the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import Bench, environment

# Model width, width of the MLP, and columns of the projections to queries, keys and values.
MODELS = {
    "gpt2-124m": (768, 3072, 2304),
    "gpt2-350m": (1024, 4096, 3072),
    "gpt2-774m": (1280, 5120, 3840),
    "gpt2-1.5b": (1600, 6400, 4800),
    "llama-1b": (2048, 8192, 3072),
    "llama-3b": (3072, 8192, 5120),
    "llama-8b": (4096, 14336, 6144),
}
DTYPES = {"f32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16,
          "f16": torch.float16}


def matmul_shapes(quick: bool) -> Iterator[tuple[str, int, int, int]]:
    """(m, n, k) of products [m, k] by [k, n], each with what it is from."""
    if quick:
        yield "square", 64, 64, 64
        return
    for size in (256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 16384):
        yield "square", size, size, size
    for m in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
        yield "skinny", m, 4096, 4096
    for size in (1000, 2047, 2049, 4095, 4100, 8191):
        yield "unaligned", size, size, size
    for model, (width, mlp, qkv) in MODELS.items():
        for m in (2048, 16384):
            for n, k in ((qkv, width), (width, width), (mlp, width), (width, mlp)):
                yield f"{model} forward", m, n, k
                yield f"{model} input gradient", m, k, n
                yield f"{model} weight gradient", k, n, m


def matmuls(bench: Bench) -> None:
    """Products in every type. Those named for a gradient have the operand that is transposed."""
    for dtype in ("bf16", "f16", "tf32", "f32"):
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        for what, m, n, k in matmul_shapes(bench.quick):
            if dtype != "bf16" and what.startswith(("gpt2", "llama")) and m != 16384:
                continue
            fields = {"kind": "matmul", "from": what, "shape": [m, n, k], "dtype": dtype,
                      "flops": 2 * m * n * k}
            bench.point(fields, lambda: matmul(bench, what, m, n, k, DTYPES[dtype]))
    torch.backends.cuda.matmul.allow_tf32 = False
    for size in (64,) if bench.quick else (1024, 2048, 4096, 8192, 16384):
        fields = {"kind": "matmul", "from": "square", "shape": [size] * 3, "dtype": "fp8-e4m3",
                  "flops": 2 * size**3}
        bench.point(fields, lambda: matmul_fp8(bench, size))


def matmul(bench: Bench, what: str, m: int, n: int, k: int, dtype: torch.dtype) -> list[float]:
    def random(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        shape = (columns, rows) if transposed else (rows, columns)
        made = torch.randn(shape, device=bench.device, dtype=dtype)
        return made.t() if transposed else made

    a = random(m, k, what.endswith("weight gradient"))
    # A weight lies as [out, in], as in torch.nn.Linear.
    b = random(k, n, what.endswith("forward"))
    out = torch.empty(m, n, device=bench.device, dtype=dtype)
    return bench.times(lambda: torch.mm(a, b, out=out))


def matmul_fp8(bench: Bench, size: int) -> list[float]:
    def random() -> torch.Tensor:
        return torch.randn(size, size, device=bench.device).to(torch.float8_e4m3fn)

    a, b = random(), random().t()
    one = torch.ones((), device=bench.device)
    return bench.times(
        lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    )


def attention(bench: Bench) -> None:
    """Causal attention, forward, and forward with backward. FLOPs count the lower half alone."""
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
                "math": SDPBackend.MATH}
    # Heads of queries, heads of keys and values, size of a head.
    heads = ((2, 1, 64),) if bench.quick else ((12, 12, 64), (25, 25, 64), (32, 8, 128))
    for sequence in (128,) if bench.quick else (1024, 2048, 4096, 8192, 16384):
        samples = 1 if bench.quick else max(1, 16384 // sequence)
        for q, kv, size in heads:
            for name, backend in backends.items():
                if name == "math" and sequence > 2048:
                    continue
                for backward in (False, True):
                    flops = 2 * samples * q * sequence**2 * size
                    fields = {"kind": "attention", "backend": name, "backward": backward,
                              "shape": [samples, q, kv, sequence, size], "dtype": "bf16",
                              "flops": flops * 7 // 2 if backward else flops}
                    shape = (samples, q, kv, sequence, size)
                    bench.point(fields, lambda: attend(bench, shape, backend, backward))


def attend(bench: Bench, shape: tuple[int, ...], backend: SDPBackend,
           backward: bool) -> list[float]:
    samples, q, kv, sequence, size = shape

    def random(n: int) -> torch.Tensor:
        return torch.randn(samples, n, sequence, size, device=bench.device, dtype=torch.bfloat16,
                           requires_grad=backward)

    queries, keys, values = random(q), random(kv), random(kv)
    gradient = torch.randn(samples, q, sequence, size, device=bench.device, dtype=torch.bfloat16)

    def work() -> None:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True,
                                             enable_gqa=q != kv)
        if backward:
            torch.autograd.grad(out, (queries, keys, values), gradient)

    with sdpa_kernel(backend):
        return bench.times(work)


def memory_bound(bench: Bench) -> None:
    """Kernels whose time is that of their bytes, with a cold cache. Bytes are the least moved."""
    widths = (64,) if bench.quick else (768, 1600, 4096)
    for width in widths:
        for rows in (64,) if bench.quick else (1024, 8192, 32768):
            x = torch.randn(rows, width, device=bench.device, dtype=torch.bfloat16)
            y, weight = torch.randn_like(x), torch.ones(width, device=bench.device, dtype=x.dtype)
            one = x.numel() * x.element_size()
            kernels: dict[str, tuple[int, Callable[[], object]]] = {
                "copy": (2 * one, lambda: y.copy_(x)),
                "add": (3 * one, lambda: torch.add(x, y)),
                "gelu": (2 * one, lambda: F.gelu(x, approximate="tanh")),
                "layer_norm": (2 * one, lambda: F.layer_norm(x, (width,), weight, weight)),
                "rms_norm": (2 * one, lambda: F.rms_norm(x, (width,), weight)),
                "softmax": (2 * one, lambda: torch.softmax(x, -1)),
            }
            for name, (n_bytes, work) in kernels.items():
                fields = {"kind": name, "shape": [rows, width], "dtype": "bf16", "bytes": n_bytes,
                          "cold": True}
                bench.point(fields, lambda: bench.times(work, cold=True))
    large_kernels(bench)


def large_kernels(bench: Bench) -> None:
    """Cross entropy over a vocabulary, a table's rows and their gradient, and AdamW."""
    vocabulary = 512 if bench.quick else 50304
    for tokens in (64,) if bench.quick else (2048, 8192):
        logits = torch.randn(tokens, vocabulary, device=bench.device, requires_grad=True)
        targets = torch.randint(vocabulary, (tokens,), device=bench.device)
        work = lambda: torch.autograd.grad(F.cross_entropy(logits, targets), logits)
        fields = {"kind": "cross_entropy", "backward": True, "shape": [tokens, vocabulary],
                  "dtype": "f32", "bytes": 3 * logits.numel() * 4, "cold": True}
        bench.point(fields, lambda: bench.times(work, cold=True))
        table = torch.randn(vocabulary, 768, device=bench.device, requires_grad=True)
        rows = F.embedding(targets, table)
        gradient = torch.randn_like(rows)
        bench.point({"kind": "embedding", "shape": [tokens, vocabulary, 768], "dtype": "f32",
                     "bytes": 2 * rows.numel() * 4, "cold": True},
                    lambda: bench.times(lambda: F.embedding(targets, table), cold=True))
        work = lambda: torch.autograd.grad(F.embedding(targets, table), table, gradient)
        bench.point({"kind": "embedding_gradient", "shape": [tokens, vocabulary, 768],
                     "dtype": "f32", "bytes": table.numel() * 4, "cold": True},
                    lambda: bench.times(work, cold=True))
    for n in (1024,) if bench.quick else (1 << 20, 1 << 24, 1 << 27):
        parameter = torch.nn.Parameter(torch.randn(n, device=bench.device))
        parameter.grad = torch.randn(n, device=bench.device)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        bench.point({"kind": "adamw", "shape": [n], "dtype": "f32", "bytes": 7 * 4 * n,
                     "cold": True}, lambda: bench.times(optimizer.step, cold=True))


def launches(bench: Bench) -> None:
    """A thousand kernels of one element, one by one and as a graph; seconds are of all."""
    n = 10 if bench.quick else 1000
    x = torch.zeros(1, device=bench.device)

    def work() -> None:
        for _ in range(n):
            x.add_(1.0)

    bench.point({"kind": "launch", "graph": False, "launches": n}, lambda: bench.times(work))
    if bench.on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        bench.point({"kind": "launch", "graph": True, "launches": n},
                    lambda: bench.times(graph.replay))


def host_copies(bench: Bench) -> None:
    """Copies between host and device, from pinned and pageable memory, and both ways at once."""
    if not bench.on_gpu:
        return
    for n_bytes in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30):
        on_device = torch.empty(n_bytes, dtype=torch.int8, device=bench.device)
        other = torch.empty_like(on_device)
        for pinned in (True, False):
            host = torch.empty(n_bytes, dtype=torch.int8, pin_memory=pinned)
            second = torch.empty(n_bytes, dtype=torch.int8, pin_memory=pinned)
            fields = {"kind": "host_copy", "pinned": pinned, "bytes": n_bytes}
            ways: dict[str, Callable[[], object]] = {
                "to_device": lambda: on_device.copy_(host, non_blocking=True),
                "to_host": lambda: host.copy_(on_device, non_blocking=True),
            }
            for way, work in ways.items():
                bench.point(fields | {"way": way}, lambda: bench.times(work))
        side = torch.cuda.Stream()

        def both() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                second.copy_(other, non_blocking=True)
            on_device.copy_(host, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)

        host, second = host.pin_memory(), second.pin_memory()
        bench.point({"kind": "host_copy", "pinned": True, "bytes": n_bytes, "way": "both"},
                    lambda: bench.times(both))


def main() -> None:
    bench = Bench("kernels")
    facts = json.dumps(environment(bench.on_gpu), indent=1)
    (bench.args.out / "environment.json").write_text(facts + "\n", encoding="utf-8")
    torch.manual_seed(1)
    # What takes least comes first: matmuls are many and may be cut off.
    for part in (launches, host_copies, memory_bound, attention, matmuls):
        try:
            part(bench)
        except Exception as e:  # noqa: BLE001 - the other parts are measured all the same
            bench.row(kind=part.__name__, error=f"{type(e).__name__}: {str(e)[:300]}")


if __name__ == "__main__":
    main()
