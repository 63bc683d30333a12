"""Rooflines of the six models' plans on one GPU, as tables of Markdown on standard output.

It needs PyTorch, whose side has the models, but no GPU: plans are made and counted, nothing is run.
The plans are those of throughput.py at the largest batch of each model. `--device` names a preset of
a device, by default `h200-sxm`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import own
from table import number, table
from train import MODELS, Shape


def measure(s: Shape, folder: Path, where: str) -> tuple[dict, dict]:
    """The plan's roofline and the predicted step."""
    own.write_config(s, folder)
    plan = own.plan(folder, s, s.batches[0], "bf16", where)
    said = own.verb("explain", plan, "--roofline")
    return said["roofline"], said["step_time_s"]


def cells(row: dict, step_s: float | None = None) -> list[object]:
    """A row of a table; a whole step's predicted time is that of its simulation."""
    return [
        row["count"], row["launches"], number(row["flops"] or None, ".2f", 1e-12),
        number(row["bytes"], ".2f", 1e-9), number(row["floor_s"], ".2f", 1e3),
        number(step_s or row["predicted_s"], ".2f", 1e3),
    ]


def folded(rows: list[dict]) -> list[dict]:
    """The rows, those of less than SMALL seconds as one."""
    keys = ("count", "launches", "flops", "bytes", "floor_s", "predicted_s")
    small = [r for r in rows if r["predicted_s"] < SMALL]
    sums = {key: sum(r[key] or 0 for r in small) for key in keys}
    rest = {"kind": f"{len(small)} smaller ones"} | sums
    return [r for r in rows if r["predicted_s"] >= SMALL] + ([rest] if small else [])


SMALL = 100e-6
COLUMNS = ["instructions", "launches", "TFLOP", "GB", "floor ms", "predicted ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200-sxm")
    where = f"{parser.parse_args().device}*1+pcie5"
    lines, parts = [], []
    with tempfile.TemporaryDirectory() as work:
        for s in MODELS:
            of, step_s = measure(s, Path(work) / s.name, where)
            mesh, batch = of["meshes"][0], f"{s.batches[0]} x {s.sequence}"
            lines.append([s.name, batch, *cells(mesh["total"], step_s)])
            parts += [f"### {s.name}, batch {batch}\n"]
            parts += table(["kind", *COLUMNS], [[r["kind"], *cells(r)] for r in folded(mesh["rows"])])
    print("\n".join(table(["model", "batch", *COLUMNS], lines) + parts).rstrip())


if __name__ == "__main__":
    main()
