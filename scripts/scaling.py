"""How the step of CPU ranks scales on one machine: strong and weak, in one process and in several.

    python3 scripts/scaling.py MESHWRIGHT [--rounds 3] [--mpi MESHWRIGHT_WITH_MPI]

Plans `models/tiny-gpt2` for 1, 2, 4 and 8 data-parallel ranks, in a folder of its own, and plays
each plan in turn, round after round: ranks as threads, as processes and, with `--mpi`, as processes
that `mpirun` starts. Strong scaling has 16 samples a step, weak scaling 4 for each rank. Prints the
median step in milliseconds and its ratio to one rank's in the same round.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

RANKS = (1, 2, 4, 8)
ROOT = pathlib.Path(__file__).resolve().parent.parent


def call(*command):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def planned(binary, folder):
    """Plans by kind of scaling and number of ranks."""
    plans = {}
    for ranks in RANKS:
        for kind, samples in (("strong", 16), ("weak", 4 * ranks)):
            plan = folder / f"{kind}-{ranks}.json"
            pins = ["--pin", f"data={ranks}", "--pin", "zero=0"]
            size = ["--ranks", str(ranks), "--sequence", "128", "--global-batch", str(samples)]
            model = [str(ROOT / "models/tiny-gpt2"), "--cluster", "cpu-default"]
            call(binary, "compile", *model, *size, *pins, "-o", str(plan))
            plans[kind, ranks] = plan
    return plans


def step_s(binary, plan, *more, before=()):
    """Seconds of the median step of 15."""
    data = str(ROOT / "examples/data/northanger_abbey_volume_one.txt")
    report = plan.with_suffix(".run.json")
    run = [binary, "run", str(plan), "--data", data, "--steps", "15", "-o", str(report)]
    call(*before, *run, *more)
    return json.loads(report.read_text())["step_time_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mpi")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plans = planned(args.binary, pathlib.Path(folder))
        for number in range(1, args.rounds + 1):
            of_one = {}
            for (kind, ranks), plan in plans.items():
                ways = {"threads": step_s(args.binary, plan)}
                if ranks > 1:
                    ways["processes"] = step_s(args.binary, plan, "--processes")
                if ranks > 1 and args.mpi:
                    before = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks))
                    ways["MPI"] = step_s(args.mpi, plan, "--mpi", before=before)
                one = of_one.setdefault(kind, ways["threads"])
                words = [f"{w} {1e3 * s:.1f} ms ({s / one:.2f})" for w, s in ways.items()]
                print(f"round {number}, {kind}, {ranks} ranks: {', '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
