"""Plans of several ranks on one GPU, through the host's memory and by NCCL, against one rank; then
two processes of which one is killed: the other must say so, and end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

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
# Seconds after which ranks say that they wait for others, and in which those that are left have to
# end after one is killed.
PATIENCE = 30.0


def killed(plan: Path, tokens: Path, fabric: str) -> dict[str, object]:
    """Kills one of a run's two processes once it has begun to train, and times the run's end."""
    records = plan.parent / f"records-{fabric}"
    command = [str(own.binary()), "run", str(plan), "--backend", "cuda", "--on-other-gpus",
               "--data", str(tokens),
               "--steps", "1000000", "--lr", "1e-5", "--validation-fraction", "0", "--profile", "0",
               "--fabric", fabric, "--processes", "--record", str(records), "-o",
               str(plan.with_suffix(".killed.json"))]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                             start_new_session=True)
    try:
        until = time.monotonic() + 60.0
        others = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        while len(list(records.glob("*"))) < 2:
            if child.poll() is not None or time.monotonic() > until:
                raise own.Failed(f"no rank trained: {(child.communicate(timeout=5)[1])[-600:]}")
            time.sleep(0.1)
        # Communicators are made and a few steps are taken.
        time.sleep(10.0)
        victim = int(others.read_text().split()[0])
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        _, words = child.communicate(timeout=PATIENCE)
        return {"exit_code": child.returncode, "seconds": time.monotonic() - began,
                "names_it": f"pid {victim}" in words, "words": words[-600:],
                "passes": child.returncode == 6 and f"pid {victim}" in words}
    except (OSError, IndexError, subprocess.TimeoutExpired) as e:
        raise own.Failed(f"{type(e).__name__}: {e}") from e
    finally:
        # With the processes that it started: what stays would take half of the GPU.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main() -> None:
    bench = Bench("ranks")
    # Several ranks on one GPU are a test mode of NCCL's. They must not share connections to the
    # GPU, and NCCL must not allocate anything in a step.
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ["NCCL_RUNTIME_CONNECT"] = "0"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    torch.manual_seed(1)
    s, batch = (QUICK[0], 4) if bench.quick else (SMALL, 8)
    steps, lr = (2, 1e-3) if bench.quick else (5, 1e-3)
    folder = bench.args.out / "work" / "ranks"
    own.write_config(s, folder)
    tokens = torch.randint(s.vocabulary, (batch * s.sequence * 4 + 1,))
    own.write_tokens(tokens, folder / "tokens.bin")

    def losses(precision: str, n: int, pins: tuple[str, ...], *fabric: object) -> list[float]:
        path = own.plan(folder, s, batch, precision, own.cluster(bench.on_gpu, n), *pins)
        _, measured = own.run(path, folder / "tokens.bin", steps, lr, "--profile", 0, "--time-out",
                              int(PATIENCE), *fabric, seconds=min(2 * PATIENCE, bench.left()))
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
    n, pins = PLANS[0]
    for fabric in FABRICS:
        fields = {"precision": "f32", "ranks": n, "pins": list(pins), "fabric": fabric,
                  "killed": True}
        if bench.is_over():
            bench.row(**fields, error="not tried: the stage's time was up")
            continue
        try:
            path = own.plan(folder, s, batch, "f32", own.cluster(bench.on_gpu, n), *pins)
            bench.row(**fields, **killed(path, folder / "tokens.bin", fabric))
        except own.Failed as e:
            bench.row(**fields, error=str(e))


if __name__ == "__main__":
    main()
