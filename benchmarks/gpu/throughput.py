"""Training steps of Meshwright beside PyTorch's, compiled, of the same model and batch in one call.

The ratio of tokens/s is Meshwright's over PyTorch's. MFU counts causal attention for both, over the
dense bf16 peak of the data sheet. Meshwright's step is also held against its plan's prediction.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import threading
import time

import torch

import own
from common import Bench
from train import MODELS, PEAKS, QUICK, Shape, train

# The order in which the models are measured: one of each kind before the others.
ORDER = ("gpt2-124m", "llama-1b", "gpt2-1.5b", "gpt2-350m", "llama-3b", "gpt2-774m")
STEPS = 12


class Used:
    """Most bytes that the GPU has in use while this lasts, beyond those at its begin."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.most = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self) -> None:
        free, _ = torch.cuda.mem_get_info()
        while not self.over.wait(0.2):
            self.most = max(self.most, free - torch.cuda.mem_get_info()[0])

    def __enter__(self) -> Used:
        if self.on_gpu:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.on_gpu:
            self.thread.join()


def pytorch(bench: Bench, s: Shape, batch: int) -> dict[str, object]:
    """PyTorch's figures; its memory is given back."""
    try:
        return train(bench, s, batch, compiled=bench.on_gpu)
    finally:
        gc.collect()
        torch.compiler.reset()
        if bench.on_gpu:
            torch.cuda.empty_cache()


def meshwright(bench: Bench, s: Shape, batch: int) -> dict[str, object]:
    """Meshwright's figures, and what its plan predicted."""
    folder = bench.args.out / "work" / s.name
    own.write_config(s, folder)
    tokens = folder / "tokens.bin"
    own.write_tokens(torch.randint(s.vocabulary, (batch * s.sequence * 2 + 1,)), tokens)
    began = time.perf_counter()
    path = own.plan(folder, s, batch, "bf16", own.cluster(bench.on_gpu))
    planned = time.perf_counter()
    with Used(bench.on_gpu) as used:
        said, measured = own.run(path, tokens, 3 if bench.quick else STEPS, 1e-4, "--matmuls",
                                 "tuned", "--profile", 2)
    ran = time.perf_counter()
    compared = own.verb("compare", path, path.with_suffix(".run.json"))["comparison"]
    profile = bench.args.out / f"compare-{s.name}.json"
    profile.write_text(json.dumps(compared, indent=1) + "\n", encoding="utf-8")
    shutil.copy(path.with_suffix(".run.json"), bench.args.out / f"run-{s.name}.json")
    return {
        "compile_s": planned - began,
        "run_s": ran - planned,
        "device_bytes": used.most,
        "median_s": said["step_time_s"],
        "tokens_per_s": said["tokens_per_s"],
        "peak_bytes": max(said["peak_bytes"]),
        "matmuls": said.get("matmuls"),
        "first_step_s": measured["steps"][0]["seconds"],
        "times_s": [step["seconds"] for step in measured["steps"]],
        "loss_first": said["first_loss"],
        "loss_last": said["last_loss"],
        "predicted_step_s": compared["step_time_s"]["predicted"],
        "predicted_peak_bytes": compared["peak_bytes"]["predicted"],
    }


def measure(bench: Bench, s: Shape) -> None:
    """The largest batch of the list that both can train."""
    for batch in s.batches:
        fields = {"model": s.name, "batch": batch, "sequence": s.sequence, "precision": "bf16"}
        if bench.is_over():
            bench.row(**fields, error="not measured: the stage's time was up")
            return
        theirs, ours, errors = None, None, []
        if bench.strangers:
            errors.append(f"{bench.strangers} other processes were on the GPU")
        if not bench.args.alone:
            try:
                theirs = pytorch(bench, s, batch)
            except Exception as e:  # noqa: BLE001 - the other side is measured all the same
                errors.append(f"PyTorch: {type(e).__name__}: {str(e)[:300]}")
            gc.collect()
        try:
            ours = meshwright(bench, s, batch)
        except (own.Failed, KeyError, ValueError) as e:
            errors.append(f"Meshwright: {str(e)[-600:]}")
        row = fields | {"pytorch": theirs, "meshwright": ours}
        if ours:
            row["predicted_over_measured"] = ours["predicted_step_s"] / ours["median_s"]
        if theirs and ours:
            row["ratio"] = ours["tokens_per_s"] / theirs["tokens_per_s"]
            name = torch.cuda.get_device_name() if bench.on_gpu else ""
            peak = next((p for part, p in PEAKS.items() if part in name), None)
            if peak is not None:
                causal = theirs["flops_per_token_causal"]
                row["mfu_causal"] = causal * ours["tokens_per_s"] / peak
        if errors:
            row["error"] = "; ".join(errors)
        bench.row(**row)
        if ours and (theirs or bench.args.alone):
            return


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=ORDER, default=ORDER, help="only these")
    parser.add_argument("--alone", action="store_true", help="Meshwright without PyTorch beside it")


def main() -> None:
    bench = Bench("throughput", options)
    torch.manual_seed(1)
    named = [m for m in MODELS if m.name in bench.args.models]
    for s in QUICK if bench.quick else sorted(named, key=lambda m: ORDER.index(m.name)):
        measure(bench, s)


if __name__ == "__main__":
    main()
