#!/usr/bin/env bash
# Usage: mpirun.sh PLAN DATA RANKS
# On one host this is all. For several, see slurm.sbatch: they need a secret and an address.
set -euo pipefail
mpirun -np "$3" meshwright run "$1" --data "$2" --checkpoint state --checkpoint-every 100
