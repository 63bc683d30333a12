#!/usr/bin/env bash
# The main job from a clone to a comparison of prediction and measurement, in one command:
# installs what is missing, builds, measures this machine, compiles GPT-2 to a plan for two
# CPU ranks, proves it, trains by it, and compares. Leaves everything in quickstart-out/.
#
#   ./quickstart.sh          a GPT-2 of 0.8 million parameters: a minute after the build
#   ./quickstart.sh --full   GPT-2 small, 124 million parameters: several minutes
set -euo pipefail
cd "$(dirname "$0")"

full=no
case "${1:-}" in
    "") ;;
    --full) full=yes ;;
    *) echo "usage: ./quickstart.sh [--full]" >&2; exit 2 ;;
esac

# shellcheck source=scripts/ensure-deps.sh
. scripts/ensure-deps.sh

say "Building (the first time takes several minutes; HiGHS is compiled from source)"
cargo build --release --bin meshwright
mw="${CARGO_TARGET_DIR:-target}/release/meshwright"
out=quickstart-out
mkdir -p "$out"

if [ "$full" = yes ]; then
    model=models/gpt2
    shape=(--global-batch 4 --sequence 128)
    steps=6
    data=(--data examples/data/northanger_abbey_volume_one.txt --tokenizer examples/data/tokenizer.json)
else
    say "GPT-2 small takes minutes on few cores, so this trains a GPT-2 of 4 layers and 0.8 million parameters; --full trains the 124 million."
    model=models/tiny-gpt2
    shape=(--global-batch 16 --sequence 128)
    steps=60
    data=(--data examples/data/northanger_abbey_volume_one.txt)
fi

step() { printf '\n' >&2; say "\$ meshwright $*"; "$mw" "$@"; }

step calibrate --ranks 2 --quick -o "$out/cluster.toml"
step compile "$model" --cluster "$out/cluster.toml" --ranks 2 "${shape[@]}" -o "$out/plan.json"
step check "$out/plan.json"
step run "$out/plan.json" "${data[@]}" --steps "$steps" --lr 1e-3 --warmup 5 --schedule cosine --min-lr 1e-4 -o "$out/run.json"
step compare "$out/plan.json" "$out/run.json"

cat <<NEXT

Left in $out/: cluster.toml (this machine as measured), plan.json, run.json.
Next:
  $mw simulate $out/plan.json --trace $out/trace.json     # open it at https://ui.perfetto.dev
  $mw inspect $out/plan.json                              # times, memory, communication, proof
  $mw compile $model --cluster $out/cluster.toml --ranks 2 ${shape[*]} --pin pipeline=2 -o $out/pinned.json
  $mw compile models/gpt3-175b --cluster dgx-a100-80gb --hosts 128 --global-batch 1536 --sequence 2048 --precision bf16 -o $out/175b.json
NEXT
