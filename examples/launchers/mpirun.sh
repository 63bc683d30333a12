#!/usr/bin/env bash
# Usage: mpirun.sh PLAN DATA RANKS [MORE FLAGS OF RUN]
# On one host this is all. For several, see slurm.sbatch: they need a secret and an address.
# With --elastic the same command goes on from the newest checkpoint when it is given again.
set -euo pipefail
plan=$1 data=$2 ranks=$3
shift 3
mpirun --oversubscribe -np "$ranks" meshwright run "$plan" --data "$data" \
    --checkpoint state --checkpoint-every 100 --elastic "$@"
