#!/usr/bin/env bash
# All tests of the workspace: installs what is missing, then runs them. Arguments go to the
# test runner (./test.sh -p ir).
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=scripts/ensure-deps.sh
. scripts/ensure-deps.sh
scope=(--workspace)
case " $* " in *" -p "* | *" --package "*) scope=() ;; esac
if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --release "${scope[@]}" "$@"
    # nextest leaves out the examples in documentation.
    [ ${#scope[@]} = 0 ] || cargo test --release --doc --workspace -q
else
    cargo test --release "${scope[@]}" "$@"
fi
