"""How long a step waits for a checkpoint that is due behind it.

    python3 scripts/checkpoint_stall.py MESHWRIGHT [--rounds 3]

Trains a GPT-2 of 4 layers and 512 features (21 million parameters, AdamW, f32) on two CPU ranks,
in turn without checkpoints, with one every ten steps that is written beside the steps, and with one
that the ranks wait for. Prints the median time from one step's line to the next: where a checkpoint
was due between them, in the three steps behind it, and in the others.
"""

import argparse
import json
import pathlib
import random
import shutil
import statistics
import subprocess
import tempfile
import time

STEPS, EVERY, BEHIND = 41, 10, 3
CONFIG = {
    "model_type": "gpt2", "vocab_size": 8192, "n_positions": 128, "n_embd": 512, "n_layer": 4,
    "n_head": 8, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
}
KEPT = ["--checkpoint", "state", "--checkpoint-every", str(EVERY)]
MODES = {"none": [], "beside the steps": KEPT, "waited for": [*KEPT, "--checkpoint-mode", "wait"]}


def gaps(binary, folder, more):
    """Seconds between the lines of steps."""
    shutil.rmtree(folder / "state", ignore_errors=True)
    run = [binary, "run", "plan.json", "--data", "data.bin", "--steps", str(STEPS)]
    run += ["--log-every", "0", *more]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.Popen(run, cwd=folder, **streams)
    at, said = [], []
    for line in done.stderr:
        said.append(line)
        if line.startswith("step ") and "loss" in line:
            at.append(time.monotonic())
    if done.wait() != 0:
        raise SystemExit("".join(said))
    return [b - a for a, b in zip(at, at[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        drawn = random.Random(1)
        tokens = (drawn.randrange(8192).to_bytes(2, "little") for _ in range(200_000))
        (folder / "data.bin").write_bytes(b"".join(tokens))
        plan = [args.binary, "compile", "config.json", "--cluster", "cpu-default", "--ranks", "2"]
        plan += ["--sequence", "128", "--global-batch", "4", "--pin", "data=2", "-o", "plan.json"]
        subprocess.run(plan, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for number in range(1, args.rounds + 1):
            for mode, more in MODES.items():
                # The gap behind step n is number n - 1.
                found = list(enumerate(gaps(args.binary, folder, more), start=1))
                kinds = {
                    "due": [g for n, g in found if n % EVERY == 0],
                    "behind": [g for n, g in found if n > EVERY and 0 < n % EVERY <= BEHIND],
                    "others": [g for n, g in found if n % EVERY > BEHIND],
                }
                words = [f"{k} {statistics.median(g):.3f} s" for k, g in kinds.items()]
                total = sum(g for _, g in found)
                print(f"round {number}, {mode}: {', '.join(words)}, all {total:.2f} s", flush=True)


if __name__ == "__main__":
    main()
