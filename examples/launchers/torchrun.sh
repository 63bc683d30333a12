#!/usr/bin/env bash
# Usage: torchrun.sh PLAN DATA RANKS
# `--no-python` starts a binary. On several hosts give torchrun, in place of --standalone, --nnodes,
# --rdzv-backend c10d, --rdzv-endpoint HOST:PORT and --rdzv-id, and meshwright --token-file, and
# --bind with each host's own address. To go on when hosts are lost, give --nnodes 1:4 and
# --max-restarts, and meshwright --elastic, --checkpoint and --checkpoint-every.
set -euo pipefail
torchrun --standalone --nproc-per-node "$3" --no-python meshwright run "$1" --data "$2"
