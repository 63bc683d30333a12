"""What all scripts here share: the device, timing, and rows of results."""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

# The L2 cache of an H100 has 50 MiB. What is written between two repetitions exceeds it.
FLUSH_BYTES = 256 << 20


class Bench:
    """A device, a folder for results, and a limit of time."""

    def __init__(self, stage: str,
                 options: Callable[[argparse.ArgumentParser], None] = lambda _: None) -> None:
        parser = argparse.ArgumentParser(description=f"Measures: {stage}.")
        parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
        parser.add_argument("--quick", action="store_true", help="tiny sizes, few repetitions")
        parser.add_argument("--out", type=Path, required=True, help="folder for results")
        parser.add_argument("--seconds", type=float, default=500.0, help="when to stop")
        options(parser)
        self.args = parser.parse_args()
        # A stage that is ended kills what it has started: what stays would take half of the GPU.
        signal.signal(signal.SIGTERM, ended)
        self.quick: bool = self.args.quick
        self.on_gpu = self.args.device == "cuda"
        # Asked before this process uses the GPU, as it may not know its own number there.
        self.strangers = users_of_gpu() if self.on_gpu else 0
        if self.on_gpu and not torch.cuda.is_available():
            raise SystemExit("There is no GPU that PyTorch can use. Try --device cpu --quick.")
        self.device = torch.device(self.args.device)
        self.args.out.mkdir(parents=True, exist_ok=True)
        self.file = (self.args.out / f"{stage}.jsonl").open("w", encoding="utf-8")
        self.until = time.monotonic() + self.args.seconds
        self._flush: torch.Tensor | None = None

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.until

    def left(self) -> float:
        """Seconds until then, and not less than five."""
        return max(5.0, self.until - time.monotonic())

    def row(self, **fields: object) -> None:
        """Writes a row at once, so that nothing is lost if a stage is cut off."""
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()
        print(json.dumps({k: v for k, v in fields.items() if k != "times_s"}), flush=True)

    def point(self, fields: dict[str, object], measure: Callable[[], list[float]]) -> None:
        """Measures a point. What goes wrong becomes its row, and the run goes on."""
        if self.is_over():
            self.row(**fields, error="not measured: the stage's time was up")
            return
        try:
            self.row(**fields, **summary(measure()))
        except Exception as e:  # noqa: BLE001 - any failure of a point is a result
            self.row(**fields, error=f"{type(e).__name__}: {str(e)[:300]}")
            if self.on_gpu:
                torch.cuda.empty_cache()

    def flush(self) -> None:
        """Drives what is cached out of the L2 cache."""
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES if self.on_gpu else 1, dtype=torch.int8,
                                      device=self.device)
        self._flush.zero_()

    def times(self, work: Callable[[], object], cold: bool = False) -> list[float]:
        """Seconds of each repetition, by the device's events; `cold` flushes the cache before."""
        for _ in range(1 if self.quick else 5):
            work()
        n = 3 if self.quick else 20
        if not self.on_gpu:
            return [seconds_of(work) for _ in range(n)]
        pairs = []
        for _ in range(n):
            if cold:
                self.flush()
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def ended(*_: object) -> None:
    """Ends the stage as an error does, so that `finally` and `with` do their work."""
    raise SystemExit("The stage was ended.")


def users_of_gpu() -> int:
    """Number of processes that use the GPU, as far as the driver says."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(done.stdout.split())


def seconds_of(work: Callable[[], object]) -> float:
    """Wall-clock seconds of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def summary(times: list[float]) -> dict[str, object]:
    """The figures of a row: median, least, deciles, and every single time, in seconds."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return {
        "median_s": statistics.median(ordered),
        "min_s": ordered[0],
        "p10_s": ordered[round(0.1 * last)],
        "p90_s": ordered[round(0.9 * last)],
        "n": len(ordered),
        "times_s": times,
    }


def environment(on_gpu: bool) -> dict[str, object]:
    """Facts about the machine and its software."""
    facts: dict[str, object] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": list(torch.cuda.nccl.version()),
        }
        query = "driver_version,clocks.max.sm,clocks.max.mem,clocks.sm,power.limit"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            facts["nvidia_smi"] = done.stdout.splitlines()
        except (OSError, subprocess.SubprocessError) as e:
            facts["nvidia_smi"] = f"not there: {e}"
    return facts
