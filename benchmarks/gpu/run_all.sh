#!/usr/bin/env bash
# Measures a GPU in one visit: single kernels, and training steps in PyTorch.
#
#   run_all.sh [--device cpu] [--quick] [STAGE...]      stages: kernels, train (default: both)
#
# Results go to $OUT, or to a folder under benchmarks/results with the device's name.
set -euo pipefail
out=${OUT:+$(realpath -m "$OUT")}
cd "$(dirname "$0")"

fail() { echo "$1" >&2; exit 1; }

device=cuda options=() stages=()
while [ $# -gt 0 ]; do
    case $1 in
        --device) [ $# -ge 2 ] || fail "--device wants cuda or cpu."; device=$2; shift ;;
        --quick) options+=(--quick) ;;
        kernels | train) stages+=("$1") ;;
        *) fail "There is no stage or option '$1'. Stages: kernels, train." ;;
    esac
    shift
done
[ ${#stages[@]} -gt 0 ] || stages=(kernels train)

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python is missing. Set PYTHON to a Python with PyTorch."
"$python" -c 'import torch' 2>/dev/null ||
    fail "$python has no PyTorch. Install torch, or set PYTHON to a Python that has it."
name=$("$python" - "$device" <<'PYTHON'
import re, sys, torch
if sys.argv[1] == "cpu":
    print("cpu")
elif torch.cuda.is_available():
    print(re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))
PYTHON
)
[ -n "$name" ] || fail "There is no GPU that PyTorch can use. Try: run_all.sh --device cpu --quick"
out=${out:-$(realpath -m "../results/$name")}
mkdir -p "$out"

failed=0
for stage in "${stages[@]}"; do
    # A stage stops itself after 8 minutes; what hangs is killed a little later.
    timeout 530 "$python" "$stage.py" --device "$device" --out "$out" --seconds 480 \
        "${options[@]+"${options[@]}"}" || { echo "Stage $stage failed." >&2; failed=1; }
done
echo "Results: $out"
exit $failed
