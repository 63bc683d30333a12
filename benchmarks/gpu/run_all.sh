#!/usr/bin/env bash
# Measures a GPU in one visit: Meshwright's kernels and training runs, and PyTorch's beside them.
#
#   run_all.sh [--emulated] [--device cpu] [--quick] [--meshwright FILE] [STAGE...]
#   run_all.sh --pack         builds the programs, stripped, into bin/, which can be carried along;
#                             NCCL=libnccl.so.2 in the environment adds that library, for one GPU
#
# Stages: check, parity, ranks, throughput (the default, in this order: 13.5 minutes),
# kernels, train (PyTorch alone, 8 minutes each).
# Results go to $OUT, or to a folder under benchmarks/results with the device's name.
set -euo pipefail
out=${OUT:+$(realpath -m "$OUT")}
[ -z "${MESHWRIGHT:-}" ] || MESHWRIGHT=$(realpath -m "$MESHWRIGHT")
here=$PWD
cd "$(dirname "$0")"

fail() { echo "$1" >&2; exit 1; }

# Seconds after which a stage stops itself; what hangs is killed a little later.
declare -A limits=([check]=150 [parity]=150 [ranks]=150 [throughput]=340 [kernels]=480 [train]=480)
all="check, parity, ranks, throughput, kernels, train"
usual=(check parity ranks throughput)

pack() {
    local target=${CARGO_TARGET_DIR:-../../target}
    (cd ../.. && cargo build --release --workspace --bins)
    mkdir -p bin
    for program in meshwright device_check; do
        strip -o "bin/$program" "$target/release/$program"
    done
    [ -z "${NCCL:-}" ] || python3 slim.py "$NCCL" bin/libnccl.so.2.xz
    ls -l bin
}

# The folder with the NCCL that was carried along, unpacked; nothing where none was.
carried_nccl() {
    [ -e bin/libnccl.so.2.xz ] || return 0
    local folder=$out/work
    mkdir -p "$folder"
    python3 -c 'import lzma, shutil, sys
with lzma.open(sys.argv[1]) as packed, open(sys.argv[2], "wb") as file:
    shutil.copyfileobj(packed, file)' bin/libnccl.so.2.xz "$folder/libnccl.so.2"
    echo "$folder"
}

device=cuda emulated='' options=() stages=()
while [ $# -gt 0 ]; do
    case $1 in
        --pack) pack; exit ;;
        --device) [ $# -ge 2 ] || fail "--device wants cuda or cpu."; device=$2; shift ;;
        --quick) options+=(--quick) ;;
        --emulated) emulated=yes; device=cpu; options+=(--quick) ;;
        --meshwright)
            [ $# -ge 2 ] || fail "--meshwright wants a file."
            MESHWRIGHT=$(cd "$here" && realpath -m "$2"); shift ;;
        check | parity | ranks | throughput | kernels | train) stages+=("$1") ;;
        *) fail "There is no stage or option '$1'. Stages: $all." ;;
    esac
    shift
done
[ ${#stages[@]} -gt 0 ] || stages=("${usual[@]}")
[ -z "${MESHWRIGHT:-}" ] || export MESHWRIGHT

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
[ -n "$name" ] || fail "There is no GPU that PyTorch can use. Try: run_all.sh --emulated"
if [ -n "$emulated" ]; then
    # The emulator's libraries lie with the examples of the build.
    program=$("$python" -c 'import own; print(own.binary())')
    folder=$(realpath -m "$(dirname "$program")/examples")
    [ -e "$folder/libcuda.so" ] ||
        fail "The emulator is not built. Try: cargo build --release --examples -p emulator"
    export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    name=emulated
fi
out=${out:-$(realpath -m "../results/$name")}
mkdir -p "$out"

failed=0
for stage in "${stages[@]}"; do
    began=$SECONDS
    path=${LD_LIBRARY_PATH:-}
    if [ "$stage" = ranks ]; then
        nccl=$(carried_nccl) || { echo "The carried NCCL cannot be unpacked." >&2; failed=1; }
        [ -z "$nccl" ] || path=$nccl${path:+:$path}
    fi
    LD_LIBRARY_PATH=$path timeout --kill-after 20 $((limits[$stage] + 30)) \
        "$python" "$stage.py" --device "$device" --out "$out" \
        --seconds "${limits[$stage]}" "${options[@]+"${options[@]}"}" ||
        { echo "Stage $stage failed." >&2; failed=1; }
    echo "Stage $stage: $((SECONDS - began)) s" >&2
done
"$python" table.py "$out" || failed=1
rm -rf "$out/work"
echo "Results: $out"
exit $failed
