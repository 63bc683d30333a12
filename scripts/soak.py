#!/usr/bin/env python3
"""Kills the processes of a small training again and again, and says what became of it.

    scripts/soak.py --kills 200 --report soak.md BINARY

A plan for as many ranks as processes is made in a folder for temporary files, and trained with a
checkpoint every few steps. In each round some process is killed at a random moment: by SIGKILL one
of them, sometimes two, or it is stopped by SIGSTOP, which the run has to find out. The next round
goes on from what is there. Looked at after each round: whether the run ended in time, its exit
code, whether it named the process, and `doctor` did, or both where two were killed, what is left behind, and whether the
checkpoints verify. In the end the state is compared, to the bit, with that of a run that nobody
disturbed. SIGTERM ends it after its round, with the report. Where the machine is so busy that a
run's processes do not come together in their 20 seconds, nobody is killed; such rounds are counted,
and begun anew.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {
    "model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 2,
    "n_head": 2, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
}
PATIENCE = 2  # Seconds after which a process that does nothing is taken for hung.


def processes(folder):
    """The processes that run in this folder, by the number of their parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.readlink(entry / "cwd") != str(folder):
                continue
            stat = (entry / "stat").read_text()
            state, parent = stat.rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                found[int(entry.name)] = int(parent)
        except OSError:
            pass
    return found


def index_of(process):
    """The number that a process has in its run."""
    try:
        words = (Path("/proc") / str(process) / "cmdline").read_text()
    except OSError:
        return None
    found = re.search(r"--as-process=(\d+)/", words)
    return int(found.group(1)) if found else 0


def newest(folder):
    """The newest checkpoint's step, and its folder."""
    names = [n for n in os.listdir(folder) if re.match(r"\d+-step-\d+$", n)]
    if not names:
        return 0, None
    name = max(names, key=lambda n: int(n.split("-")[0]))
    return int(name.rsplit("-", 1)[1]), folder / name


def shards(path):
    return {p.name: p.read_bytes() for p in sorted(path.glob("*.safetensors"))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", help="write what was seen to this file")
    args = parser.parse_args()
    binary = str(Path(args.binary).resolve())
    folder = Path(tempfile.mkdtemp(prefix="soak-")).resolve()
    draw = random.Random(args.seed)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 90)

    def call(*words, check=True):
        done = subprocess.run([binary, *words], cwd=folder, capture_output=True, text=True)
        if check and done.returncode:
            sys.exit(f"{words}: {done.returncode}\n{done.stderr}")
        return done

    call("compile", "config.json", "--cluster", "cpu-default", "--ranks", str(args.processes),
         "--global-batch", "2", "--pin", "data=2", "--pin", f"tensor={args.processes // 2}",
         "-o", "plan.json")
    base = ["run", "plan.json", "--data", "text.txt", f"--processes={args.processes}", "--time-out", str(PATIENCE),
            "--checkpoint", "state", "--checkpoint-every", "10"]
    seen = dict(killed=0, stopped=0, both=0, named=0, to_name=0, hangs=0, codes={}, left=0,
                damaged=0, training=0, late=0, examined=0, accused=0, pairs=0, both_accused=0)
    ends = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.append(True))
    delays, lost, unnamed, began, state = [], [], [], time.time(), folder / "state"
    while seen["killed"] + seen["stopped"] < args.kills and not ends \
            and time.time() - began < args.seconds:
        before = newest(state)[0] if state.exists() else 0
        go_on = ["--resume", "state"] if before else []
        metrics = folder / "metrics.csv"
        metrics.unlink(missing_ok=True)
        with open(folder / "errors", "w") as errors:
            run = subprocess.Popen([binary, *base, *go_on, "--steps", "100000000", "--metrics",
                                    "metrics.csv"], cwd=folder, stdout=subprocess.DEVNULL,
                                   stderr=errors)
        # Before the processes have met, or in the training, where a busy machine comes to late: then
        # from its first step on to some checkpoints later.
        has_met = False
        if draw.random() < 0.3:
            time.sleep(draw.uniform(0, 0.15))
        else:
            trains, until = False, time.time() + 60
            while not trains and run.poll() is None and time.time() < until:
                time.sleep(0.005)
                trains = metrics.exists() and metrics.read_text().count("\n") > 1
            seen["training"] += trains
            has_met = trains
            time.sleep(draw.uniform(0, 0.4))
        all_ = processes(folder)
        others = [p for p in all_ if p != run.pid]
        victims = [draw.choice([run.pid, *sorted(others)])]
        kind = draw.random()
        how = signal.SIGKILL
        if kind < 0.1 and others:
            victims, seen["both"] = draw.sample([run.pid, *sorted(others)], 2), seen["both"] + 1
        elif kind < 0.15 and others:
            how = signal.SIGSTOP
        index, indices = index_of(victims[0]), sorted(index_of(v) or 0 for v in victims)
        if run.poll() is not None:
            if "did not join in" in " ".join((folder / "errors").read_text().split()):
                seen["late"] += 1
                continue
            sys.exit(f"the run ended by itself\n{(folder / 'errors').read_text()}")
        for victim in victims:
            os.kill(victim, how)
        at = time.time()
        seen["stopped" if how == signal.SIGSTOP else "killed"] += 1
        hangs = False
        try:
            code = run.wait(timeout=30 + PATIENCE)
        except subprocess.TimeoutExpired:
            hangs = True
            seen["hangs"] += 1
            run.kill()
            code = run.wait()
        seen["codes"][code] = seen["codes"].get(code, 0) + 1
        until = time.time() + 10
        while processes(folder) and time.time() < until:
            time.sleep(0.002)
        # All that is left has ended by then.
        if how == signal.SIGKILL:
            delays.append(time.time() - at)
        words = " ".join((folder / "errors").read_text().split())
        if hangs:
            unnamed.append(f"it did not end: rank{index} by {signal.Signals(how).name}, has met: {has_met}: {words}")
        # The others name process 0 once they have met it.
        if len(victims) == 1 and (run.pid not in victims or has_met):
            seen["to_name"] += 1
            named = f"rank{index} is lost" in words or index > 0 and f"process {index} " in words
            seen["named"] += named
            if not named and len(unnamed) < 5:
                unnamed.append(f"rank{index} by {signal.Signals(how).name}, exit code {code}: {words}")
        # Of a step that had begun there are records.
        if len(victims) == 1 and has_met:
            said = call("doctor", "plan.json", "run.records", "--json", check=False).stdout
            culprits = json.loads(said).get("culprits") if said else None
            seen["examined"] += 1
            seen["accused"] += culprits == [index]
            if culprits != [index] and len(unnamed) < 5:
                unnamed.append(f"rank{index} by {signal.Signals(how).name}, doctor accuses {culprits}: {words}")
        # Those that are left name both.
        if len(victims) == 2 and args.processes > 2 and has_met:
            said = call("doctor", "plan.json", "run.records", "--json", check=False).stdout
            culprits = json.loads(said).get("culprits") if said else None
            seen["pairs"] += 1
            seen["both_accused"] += culprits == indices
            if culprits != indices and len(unnamed) < 5:
                unnamed.append(f"ranks {indices} at once, doctor accuses {culprits}: {words}")
        seen["left"] += len(processes(folder))
        for p in processes(folder):
            os.kill(p, signal.SIGKILL)
        if state.exists() and newest(state)[1]:
            verified = call("checkpoint", "verify", "state", check=False)
            seen["damaged"] += verified.returncode != 0
            rows = metrics.read_text().splitlines()[1:] if metrics.exists() else []
            last = max((int(r.split(",")[0]) for r in rows if r[:1].isdigit() and r.count(",") == 8),
                       default=-1)
            if last >= 0:
                lost.append(max(0, last + 1 - newest(state)[0]))
    steps = newest(state)[0]
    # One more round ends by itself and takes away what the last one left.
    call(*base, "--resume", "state", "--steps", "10", check=True)
    steps += 10
    litter = [n for n in os.listdir(state) if n.startswith(".")]
    call(*base[:4], "--checkpoint", "whole", "--steps", str(steps))
    same = shards(newest(state)[1]) == shards(newest(folder / "whole")[1])
    rounds = seen["killed"] + seen["stopped"]
    delays = sorted(delays) or [0.0]
    lines = [
        f"- Rounds: {rounds}, of them {seen['killed']} by SIGKILL ({seen['both']} of two processes at "
        f"once) and {seen['stopped']} by SIGSTOP, in {time.time() - began:.0f} s, seed {args.seed}; "
        f"{seen['training']} after the first step of the run, the others before.",
        f"- Runs that did not end by themselves: {seen['hangs']}. Runs whose processes had no processor to "
        f"come together: {seen['late']}.",
        f"- Exit codes: {', '.join(f'{c}: {n}' for c, n in sorted(seen['codes'].items()))} (6 is a run "
        "that failed, -9 process 0 killed itself).",
        f"- One process of {args.processes} was the victim, and the others were there and had met it, in "
        f"{seen['to_name']} rounds; the others named it in {seen['named']}.",
        f"- In {seen['examined']} of these the run had begun to train; `doctor` named that rank alone afterwards in "
        f"{seen['accused']}.",
        f"- Two were the victims, and others were left, in {seen['pairs']} rounds of a run that had begun to train; "
        f"`doctor` named both and nobody else in {seen['both_accused']}.",
        f"- From the kill to the end of all processes: median {statistics.median(delays):.3f} s, 95% within "
        f"{delays[int(0.95 * (len(delays) - 1))]:.3f} s, longest {delays[-1]:.3f} s.",
        f"- Steps lost: median {statistics.median(lost or [0])}, most {max(lost or [0])}, with a "
        "checkpoint every 10 steps.",
        f"- Checkpoints that did not verify: {seen['damaged']}. Processes left: {seen['left']}. "
        f"Unfinished files after the last run: {len(litter)}.",
        f"- The state after {steps} steps is {'the same to the bit as' if same else 'NOT that of'} a run "
        "that nobody disturbed.",
    ]
    lines += [f"- A message that did not name it: {words}" for words in unnamed]
    print("\n".join(lines))
    if args.report:
        Path(args.report).write_text("\n".join(lines) + "\n")
    shutil.rmtree(folder)
    bad = seen["hangs"] or seen["damaged"] or seen["left"] or litter or not same
    missed = seen["named"] < seen["to_name"] or seen["accused"] < seen["examined"]
    missed = missed or seen["both_accused"] < seen["pairs"]
    sys.exit(1 if bad or missed else 0)


if __name__ == "__main__":
    main()
