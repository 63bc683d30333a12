"""Kernels against the CPU's, on the device: relative errors by norm, and times at real sizes."""

from __future__ import annotations

import json
import subprocess

import own
from common import Bench, environment


def main() -> None:
    bench = Bench("check")
    facts = json.dumps(environment(bench.on_gpu), indent=1)
    (bench.args.out / "environment.json").write_text(facts + "\n", encoding="utf-8")
    command = [str(own.binary("device_check")), "--seconds", str(int(bench.args.seconds))]
    command += ["--quick"] if bench.quick else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                bench.row(**json.loads(line))
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise SystemExit(f"device_check ended with exit code {process.returncode}.")


if __name__ == "__main__":
    main()
