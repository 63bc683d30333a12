#!/usr/bin/env python3
"""Kills the processes of elastic runs again and again, and says what became of the runs.

    scripts/soak_elastic.py --kills 300 --report soak_elastic.md BINARY

Each run trains a small model by three processes and is made anew in a folder of its own. At random
moments one of its processes is killed: process 0, one of the others, two at once, or the keeper that
was started, with which all go. A run that has ended is given the same command again, until that says
that it is done. Looked at are: whether each command ended in time, whether the last training state is
of the last step, verifies, and is that of a run that nobody disturbed but for the rounding of other
numbers of ranks, whether the metrics have each step once, and what is left behind. SIGTERM ends it
after its run, with the report.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from soak import CONFIG, newest, processes

STEPS = 240
PATIENCE = 60  # Seconds without a new step or an end after which a run is taken for hung.


def parameters(path):
    """Each state's values by its name: of all shards of a checkpoint."""
    found = {}
    for shard in sorted(path.glob("*.safetensors")):
        raw = shard.read_bytes()
        (n,) = struct.unpack("<Q", raw[:8])
        for name, of in json.loads(raw[8:8 + n]).items():
            if name != "__metadata__" and of["dtype"] == "F32":
                begin, end = of["data_offsets"]
                part = raw[8 + n + begin:8 + n + end]
                found.setdefault(name, []).extend(struct.unpack(f"<{len(part) // 4}f", part))
    return found


def farthest(one, other):
    """The largest distance of two states, as a share of the largest value of each."""
    if one.keys() != other.keys() or any(len(one[k]) != len(other[k]) for k in one):
        return float("inf")
    apart = 0.0
    for name, values in one.items():
        size = max(map(abs, other[name]), default=0.0) or 1.0
        apart = max([apart] + [abs(a - b) / size for a, b in zip(values, other[name])])
    return apart


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", help="write what was seen to this file")
    args = parser.parse_args()
    binary = str(Path(args.binary).resolve())
    folder = Path(tempfile.mkdtemp(prefix="soak-")).resolve()
    draw = random.Random(args.seed)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 90)

    def call(*words):
        done = subprocess.run([binary, *words], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{words}: {done.returncode}\n{done.stderr}")

    call("compile", "config.json", "--cluster", "cpu-default", "--ranks", "3", "--global-batch", "6",
         "--pin", "data=3", "--pin", "zero=0", "-o", "plan.json")
    base = ["run", "plan.json", "--data", "text.txt", "--steps", str(STEPS)]
    call(*base, "--checkpoint", "whole", "-o", "whole.json")
    whole = parameters(newest(folder / "whole")[1])
    # Three processes seldom have a processor each: the time-out is for hangs, not for slowness.
    elastic = [*base, "--processes=3", "--elastic", "--time-out", "20", "--checkpoint", "state",
               "--checkpoint-every", "10", "--metrics", "metrics.jsonl", "-o", "run.json"]
    kinds = dict(zero=0, other=0, two=0, keeper=0)
    seen = dict(runs=0, commands=0, in_memory=0, hangs=0, codes={}, wrong_step=0, damaged=0, apart=0.0,
                twice=0, missing=0, left=0, litter=0)
    ends, trouble, began, longest = [], [], time.time(), []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.append(True))

    def metrics():
        path = folder / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    while sum(kinds.values()) < args.kills and not ends and time.time() - began < args.seconds:
        shutil.rmtree(folder / "state", ignore_errors=True)
        shutil.rmtree(folder / "run.records", ignore_errors=True)
        for old in [*folder.glob("run.*"), *folder.glob("metrics.*")]:
            old.unlink()
        seen["runs"] += 1
        begun, kills_of_run = time.time(), draw.randint(1, 7)
        while True:
            seen["commands"] += 1
            with open(folder / "errors", "w") as errors:
                run = subprocess.Popen([binary, *elastic], cwd=folder, stdout=subprocess.DEVNULL,
                                       stderr=errors)
            quiet, had = time.time(), len(metrics())
            due = time.time() + draw.uniform(0.0, 1.2)
            while run.poll() is None:
                time.sleep(0.003)
                if len(metrics()) != had:
                    quiet, had = time.time(), len(metrics())
                if time.time() - quiet > PATIENCE:
                    break
                if kills_of_run == 0 or time.time() < due:
                    continue
                due = time.time() + draw.uniform(0.0, 1.2)
                all_ = processes(folder)
                zero = [p for p, parent in all_.items() if parent == run.pid]
                others = [p for p in all_ if p != run.pid and p not in zero]
                kind = draw.choices(list(kinds), [4, 4, 1, 1])[0]
                victims = {"zero": zero[:1], "other": others[:1], "keeper": [run.pid],
                           "two": [*zero[:1], *others[:1]]}[kind]
                if not victims:
                    continue
                kinds[kind] += 1
                kills_of_run -= 1
                for victim in victims:
                    try:
                        os.kill(victim, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
            if run.poll() is None:
                seen["hangs"] += 1
                trouble.append("hung: " + " ".join((folder / "errors").read_text().split())[-600:])
                run.kill()
            code = run.wait()
            seen["codes"][code] = seen["codes"].get(code, 0) + 1
            words = " ".join((folder / "errors").read_text().split())
            seen["in_memory"] += words.count("no step is lost")
            until = time.time() + 10
            while processes(folder) and time.time() < until:
                time.sleep(0.01)
            seen["left"] += len(processes(folder))
            for p in processes(folder):
                os.kill(p, signal.SIGKILL)
            if code not in (0, 6, -9) and len(trouble) < 5:
                trouble.append(f"exit code {code}: {words[-600:]}")
            if code == 0 or time.time() - begun > 10 * PATIENCE:
                break
        longest.append(time.time() - begun)
        step, path = newest(folder / "state")
        seen["wrong_step"] += step != STEPS
        verified = subprocess.run([binary, "checkpoint", "verify", "state"], cwd=folder,
                                  capture_output=True, check=False)
        seen["damaged"] += verified.returncode != 0
        seen["apart"] = max(seen["apart"], farthest(parameters(path), whole) if path else float("inf"))
        steps = [json.loads(row)["step"] for row in metrics()]
        seen["twice"] += len(steps) - len(set(steps))
        seen["missing"] += STEPS - len(set(steps))
        if (folder / "run.records").exists():
            seen["litter"] += 1
            trouble.append(f"records stay: {sorted(os.listdir(folder / 'run.records'))}; {words[-900:]}")
        names = os.listdir(folder / "state")
        seen["litter"] += sum(n.startswith(".") or n == "left-by-ranks" for n in names)
    n = sum(kinds.values())
    lines = [
        f"- Runs: {seen['runs']} of {STEPS} steps, by {seen['commands']} commands, in "
        f"{time.time() - began:.0f} s, seed {args.seed}.",
        f"- Kills: {n}, of process 0 {kinds['zero']}, of another process {kinds['other']}, of two at once "
        f"{kinds['two']}, of the keeper, with which all go, {kinds['keeper']}.",
        f"- Commands that did not end by themselves: {seen['hangs']}. Exit codes: "
        f"{', '.join(f'{c}: {k}' for c, k in sorted(seen['codes'].items()))} (-9 is a keeper that was "
        "killed, 6 a run of which no process was left or that could not go on by itself).",
        f"- Losses after which no step was lost: {seen['in_memory']}. Seconds of a run: median "
        f"{statistics.median(longest or [0]):.1f}, longest {max(longest or [0]):.1f}.",
        f"- Last states of another step: {seen['wrong_step']}. That did not verify: {seen['damaged']}. "
        f"Farthest from the state of an undisturbed run, as a share of the largest value: "
        f"{seen['apart']:.1e}.",
        f"- Steps that the metrics have twice: {seen['twice']}; that they have not: {seen['missing']}.",
        f"- Processes left: {seen['left']}. Unfinished files left: {seen['litter']}.",
    ]
    lines += [f"- {words}" for words in trouble]
    print("\n".join(lines))
    if args.report:
        Path(args.report).write_text("\n".join(lines) + "\n")
    shutil.rmtree(folder)
    bad = seen["hangs"] + seen["damaged"] + seen["left"] + seen["litter"] + seen["wrong_step"]
    sys.exit(1 if bad or seen["twice"] or seen["apart"] > 1e-2 else 0)


if __name__ == "__main__":
    main()
