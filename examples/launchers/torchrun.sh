#!/usr/bin/env bash
# Usage: torchrun.sh PLAN DATA RANKS
# `--no-python` starts a binary. On several hosts add torchrun's --nnodes and --rdzv-endpoint, and
# meshwright's --token-file and --bind. To go on when hosts are lost, add --nnodes 1:4 and
# --max-restarts, and meshwright's --elastic, --checkpoint and --checkpoint-every.
set -euo pipefail
torchrun --standalone --nproc-per-node "$3" --no-python meshwright run "$1" --data "$2"
