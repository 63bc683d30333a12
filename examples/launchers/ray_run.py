"""Starts a plan's processes as Ray tasks, one for each CPU slot that is asked for.

Usage: python ray_run.py PLAN DATA PROCESSES [MORE FLAGS OF RUN]
Plan and data are on a file system that all nodes have, and the folder `state` of checkpoints is made
beside the plan. The token goes to tasks as an argument, over Ray's own channel, and from there to the
run by a pipe. When the run loses a process, all are started again, a few times: --elastic goes on from the
newest checkpoint. Ray kills what is left when this script is killed.
"""

import os
import secrets
import socket
import subprocess
import sys

import ray


# How often the processes are started.
STARTS = 3
# The exit code of a run that was asked to end, and has written its state.
INTERRUPTED = 130
# The exit code of a run that has failed, as when it lost a process.
FAILED = 6


@ray.remote(num_cpus=1)
class Process:
    def address(self) -> tuple[str, int]:
        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def run(self, rank: int, world: int, address: str, port: int, token: str, args: list[str]) -> int:
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        own = ray.util.get_node_ip_address()
        reader, writer = os.pipe()
        os.write(writer, token.encode())
        os.close(writer)
        command = ["meshwright", "run", *args, "--token-file", f"/dev/fd/{reader}", "--bind", own]
        try:
            return subprocess.run(command, env=env, pass_fds=[reader]).returncode
        finally:
            os.close(reader)


def main() -> int:
    plan, data, world, more = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    ray.init()
    # Ray starts tasks in folders of its own.
    plan, data = os.path.abspath(plan), os.path.abspath(data)
    state = os.path.join(os.path.dirname(plan), "state")
    args = [plan, "--data", data, "--checkpoint", state, "--checkpoint-every", "100", "--elastic"]
    for start in range(STARTS):
        if start > 0:
            print(f"a process was lost; start {start + 1} of {STARTS}", file=sys.stderr)
        processes = [Process.remote() for _ in range(world)]
        address, port = ray.get(processes[0].address.remote())
        token = secrets.token_hex(32)
        codes = ray.get([p.run.remote(i, world, address, port, token, args + more)
                         for i, p in enumerate(processes)])
        # A process that a signal has ended has a negative code. Any other error would come again.
        others = [code for code in codes if code >= 0 and code not in (0, FAILED, INTERRUPTED)]
        if others:
            return others[0]
        if all(code in (0, INTERRUPTED) for code in codes):
            return max(codes)
    print(f"a process was lost in each of {STARTS} starts", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
