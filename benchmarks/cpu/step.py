"""One rank's training step on a CPU beside PyTorch's: the same model, sizes and threads, in turns.

Both train GPT-2 124M in f32 with AdamW, gradients clipped at a norm of 1, on the same cores and with as
many threads as these: the process is bound to them, a lone rank of Meshwright takes all that it may, and
PyTorch is told how many. The first step of each turn is left out. Prints one line a turn and the ratio of
the median steps, and writes all times as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "gpu"))
import own  # noqa: E402
from train import MODELS, Model, Shape  # noqa: E402


def pytorch(model: Model, tokens: torch.Tensor, batch: int, sequence: int, steps: int,
            compiled: bool) -> tuple[list[float], list[float]]:
    """Seconds and losses of steps on successive batches of the tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    loss_of = torch.compile(model) if compiled else model
    times, losses = [], []
    for i in range(steps):
        part = tokens[i * batch * sequence:][: batch * sequence + 1]
        begin = time.perf_counter()
        loss = loss_of(part[:-1].view(batch, sequence), part[1:].view(batch, sequence))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
    return times, losses


def meshwright(path: Path, tokens: Path, weights: Path, steps: int) -> tuple[list[float], list[float]]:
    """Seconds and losses of the same steps."""
    out = path.with_suffix(".run.json")
    own.verb("run", path, "--data", tokens, "--weights", weights, "--steps", steps, "--lr", 1e-4,
             "--validation-fraction", 0, "-o", out, seconds=3600.0)
    steps_of = json.loads(out.read_text(encoding="utf-8"))["steps"]
    return [step["seconds"] for step in steps_of], [step["loss"] for step in steps_of]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4, help="of a turn, the first among them")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="and cores, of both sides")
    parser.add_argument("--compiled", action="store_true", help="PyTorch's side by torch.compile")
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= args.threads <= len(cores):
        parser.error(f"--threads {args.threads}: there are {len(cores)} cores")
    os.sched_setaffinity(0, cores[: args.threads])
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    s = next(m for m in MODELS if m.name == "gpt2-124m")
    s = Shape(s.name, s.layers, s.width, s.heads, s.kv_heads, s.mlp, s.vocabulary, args.sequence, ())
    folder = args.out / "work"
    own.write_config(s, folder)
    model = Model(s, torch.device("cpu"))
    weights = folder / "model.safetensors"
    own.write_weights(model, weights)
    tokens = torch.randint(s.vocabulary, (args.batch * s.sequence * (args.steps + 1) + 1,))
    own.write_tokens(tokens, folder / "tokens.bin")
    path = own.plan(folder, s, args.batch, "f32", "cpu-default", ranks=1)
    times: dict[str, list[list[float]]] = {"meshwright": [], "pytorch": []}
    losses = {}
    for turn in range(args.turns):
        mine, losses["meshwright"] = meshwright(path, folder / "tokens.bin", weights, args.steps)
        theirs, losses["pytorch"] = pytorch(model, tokens, args.batch, s.sequence, args.steps,
                                            args.compiled)
        times["meshwright"].append(mine)
        times["pytorch"].append(theirs)
        print(f"turn {turn}: Meshwright {statistics.median(mine[1:]):.3f} s a step, "
              f"PyTorch {statistics.median(theirs[1:]):.3f} s", flush=True)
        if turn == 0:
            print(f"losses {losses['meshwright']} and {losses['pytorch']}", flush=True)
    medians = {k: statistics.median(t for turn in v for t in turn[1:]) for k, v in times.items()}
    ratio = medians["pytorch"] / medians["meshwright"]
    print(f"Meshwright trains at {ratio:.2f} times PyTorch's rate, {args.batch} x {s.sequence} tokens, "
          f"{args.threads} threads each")
    (args.out / "step.json").write_text(json.dumps(
        {"batch": args.batch, "sequence": s.sequence, "compiled": args.compiled,
         "threads": args.threads, "torch": torch.__version__, "times_s": times, "median_s": medians, "ratio": ratio},
        indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
