"""Plans of several ranks on one GPU, through the host's memory and by NCCL, against one rank."""

from __future__ import annotations

import os

import torch

import own
from common import Bench
from train import QUICK, Shape

SMALL = Shape("gpt2-10m", 4, 256, 4, 0, 1024, 8192, 256, (8,))
# Largest relative difference of a loss: sums of shards are added in another order.
LIMIT = {"f32": 1e-4, "bf16": 1e-2}
# What is pinned, and the number of ranks.
PLANS = (
    (2, ("data=2", "tensor=1", "pipeline=1", "zero=1")),
    (2, ("data=1", "tensor=2", "pipeline=1")),
    (2, ("data=1", "tensor=1", "pipeline=2")),
    (2, ("data=2", "tensor=1", "pipeline=1", "zero=3")),
    (2, ("context=2", "data=1", "pipeline=1")),
    (4, ("data=2", "tensor=2", "pipeline=1", "zero=3")),
)


FABRICS = ("host", "nccl")


def main() -> None:
    bench = Bench("ranks")
    # Several ranks on one GPU are a test mode of NCCL's.
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    torch.manual_seed(1)
    s, batch = (QUICK[0], 4) if bench.quick else (SMALL, 8)
    steps, lr = (2, 1e-3) if bench.quick else (5, 1e-3)
    folder = bench.args.out / "work" / "ranks"
    own.write_config(s, folder)
    tokens = torch.randint(s.vocabulary, (batch * s.sequence * 4 + 1,))
    own.write_tokens(tokens, folder / "tokens.bin")

    def losses(precision: str, n: int, pins: tuple[str, ...], *fabric: object) -> list[float]:
        path = own.plan(folder, s, batch, precision, own.cluster(bench.on_gpu, n), *pins)
        _, measured = own.run(path, folder / "tokens.bin", steps, lr, "--profile", 0, *fabric)
        return [step["loss"] for step in measured["steps"]]

    for precision in ("f32",) if bench.quick else ("f32", "bf16"):
        try:
            alone = losses(precision, 1, ())
        except own.Failed as e:
            bench.row(precision=precision, ranks=1, error=str(e))
            continue
        bench.row(precision=precision, ranks=1, losses=alone)
        plans = PLANS[:3] if bench.quick else PLANS
        for fabric, (n, pins) in ((f, p) for f in FABRICS for p in plans):
            fields = {"precision": precision, "ranks": n, "pins": list(pins), "fabric": fabric}
            if bench.is_over():
                bench.row(**fields, error="not tried: the stage's time was up")
                continue
            try:
                got = losses(precision, n, pins, "--fabric", fabric)
                off = max(abs(a - b) / abs(b) for a, b in zip(got, alone, strict=True))
                limit = LIMIT[precision]
                bench.row(**fields, losses=got, difference=off, limit=limit, passes=off <= limit)
            except own.Failed as e:
                bench.row(**fields, error=str(e))


if __name__ == "__main__":
    main()
