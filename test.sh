#!/usr/bin/env bash
# All tests of the workspace: installs what is missing, then runs them. Arguments go to the
# test runner (./test.sh -p ir).
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=scripts/ensure-deps.sh
. scripts/ensure-deps.sh
scope=(--workspace)
case " $* " in *" -p "* | *" --package "*) scope=() ;; esac
# Under nohup and in the background of a script some signals are ignored, and whoever is started
# inherits that. Tests send them.
as_in_a_terminal=()
if env --default-signal=HUP,INT,QUIT true 2>/dev/null; then
    as_in_a_terminal=(env --default-signal=HUP,INT,QUIT)
fi
if cargo nextest --version >/dev/null 2>&1; then
    "${as_in_a_terminal[@]}" cargo nextest run --release "${scope[@]}" "$@"
    # nextest leaves out the examples in documentation.
    [ ${#scope[@]} = 0 ] || cargo test --release --doc --workspace -q
else
    "${as_in_a_terminal[@]}" cargo test --release "${scope[@]}" "$@"
fi
