"""Writes summary.md from the rows of a folder of results: the verdicts first, then the figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def rows(folder: Path, stage: str) -> list[dict]:
    """The rows of a stage; none where it did not run."""
    path = folder / f"{stage}.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def table(head: list[str], lines: list[list[object]]) -> list[str]:
    """A table of Markdown."""
    text = lambda cell: "" if cell is None else str(cell).replace("|", "/").replace("\n", " ")
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return out + ["| " + " | ".join(text(c) for c in line) + " |" for line in lines] + [""]


def number(value: float | None, form: str = ".3g", scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def check(found: list[dict]) -> list[str]:
    compared = [r for r in found if "passes" in r]
    wrong = [r for r in compared if not r["passes"]]
    out = [f"## Kernels\n\n{len(compared) - len(wrong)} of {len(compared)} results are within their "
           "limit of the CPU's.\n"]
    lines = [[r["op"][:90], r["dtype"], r["multiplier"], number(r.get("error_by_norm")), r["limit"],
              r.get("error", "")[:120]] for r in wrong]
    out += table(["not so", "type", "by", "error", "limit", "said"], lines) if wrong else []
    timed = [r for r in found if "median_s" in r]
    lines = [[r["op"], r["multiplier"], number(r["median_s"], ".1f", 1e6),
              number(r.get("flops", 0) / r["median_s"], ".1f", 1e-12),
              number(r["bytes"] / r["median_s"], ".0f", 1e-9)] for r in timed]
    return out + (table(["op", "by", "us", "TFLOP/s", "GB/s"], lines) if timed else [])


def verdict(row: dict) -> str:
    return "error" if "error" in row else "passes" if row.get("passes", True) else "FAILS"


def main() -> None:
    folder = Path(sys.argv[1])
    out = ["# Results\n"]
    environment = folder / "environment.json"
    if environment.is_file():
        facts = json.loads(environment.read_text(encoding="utf-8"))
        out.append(f"{facts.get('device', 'CPU')}, PyTorch {facts['torch']}, {facts['date']}\n")
    if found := rows(folder, "check"):
        out += check(found)
    if found := rows(folder, "parity"):
        out.append("## Training against PyTorch\n")
        out += table(["model", "precision", "verdict", "largest difference", "limit", "error"],
                     [[r["model"], r["precision"], verdict(r), number(r.get("difference")),
                       number(r["limit"]), r.get("error", "")[:200]] for r in found])
    if found := rows(folder, "ranks"):
        out.append("## Several ranks on one GPU against one\n")
        out += table(["precision", "ranks", "plan", "fabric", "verdict", "largest difference",
                      "error"],
                     [[r["precision"], r["ranks"],
                       " ".join(r.get("pins", [])) + (", one killed" if r.get("killed") else ""),
                       r.get("fabric", ""), verdict(r), number(r.get("difference")),
                       r.get("error", "")[:200]] for r in found])
    if found := rows(folder, "throughput"):
        out.append("## Throughput\n")
        lines = []
        for r in found:
            ours, theirs = r.get("meshwright") or {}, r.get("pytorch") or {}
            lines.append([
                r["model"], r["batch"], number(ours.get("tokens_per_s"), ".0f"),
                number(theirs.get("tokens_per_s"), ".0f"), number(r.get("ratio"), ".2f"),
                number(r.get("mfu_causal"), ".1%"), number(theirs.get("mfu_causal"), ".1%"),
                number(r.get("predicted_over_measured"), ".2f"),
                number(ours.get("peak_bytes"), ".1f", 2**-30),
                number(ours.get("predicted_peak_bytes"), ".1f", 2**-30),
                number(theirs.get("peak_allocated_bytes"), ".1f", 2**-30),
                number(ours.get("first_step_s"), ".1f"), r.get("error", "")[:200]])
        out += table(["model", "batch", "tokens/s", "PyTorch's", "ratio", "MFU", "PyTorch's",
                      "predicted/measured step", "peak GiB", "predicted", "PyTorch's",
                      "first step s", "error"], lines)
    text = "\n".join(out)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
