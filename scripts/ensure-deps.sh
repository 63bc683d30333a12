# Makes sure that what the build needs beside Rust is there: cmake, a C++ compiler and
# libclang, for HiGHS. Sourced by quickstart.sh and test.sh, as it may set PATH and
# LIBCLANG_PATH. Installs with apt where that is allowed, else with pip in .venv.

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
give_up() { say "$*"; exit 3; }

have_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] && return 0
    ldconfig -p 2>/dev/null | grep -q 'libclang[-.0-9]*\.so' && return 0
    ls /usr/lib/llvm-*/lib/libclang*.so* /usr/lib/*/libclang*.so* /usr/lib64/libclang*.so* >/dev/null 2>&1
}

missing() {
    command -v cmake >/dev/null || echo cmake
    command -v c++ >/dev/null || echo g++
    command -v make >/dev/null || command -v ninja >/dev/null || echo make
    have_libclang || echo libclang-dev
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

with_apt() {
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null || return 1
    say "Installing with apt: $*"
    as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

# cmake and libclang as Python packages; a compiler cannot be had this way.
with_pip() {
    command -v python3 >/dev/null || return 1
    say "Installing with pip into .venv: cmake, libclang"
    [ -x "$root/.venv/bin/python" ] || python3 -m venv "$root/.venv" || return 1
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check cmake libclang
}

use_venv() {
    [ -x "$root/.venv/bin/python" ] || return 0
    command -v cmake >/dev/null || export PATH="$PATH:$root/.venv/bin"
    if ! have_libclang; then
        native=$("$root/.venv/bin/python" -c 'import clang, os; print(os.path.join(os.path.dirname(clang.__file__), "native"))' 2>/dev/null) || return 0
        export LIBCLANG_PATH="$native"
        # That package has the library without clang's own headers; the compiler's serve.
        export BINDGEN_EXTRA_CLANG_ARGS="${BINDGEN_EXTRA_CLANG_ARGS:-} -I$(cc -print-file-name=include)"
    fi
}

ensure_deps() {
    command -v cargo >/dev/null || { [ -x "$HOME/.cargo/bin/cargo" ] && export PATH="$HOME/.cargo/bin:$PATH"; }
    command -v cargo >/dev/null || give_up "cargo is missing: install Rust from https://rustup.rs, then run this again"
    use_venv
    needed=$(missing)
    if [ -n "$needed" ]; then
        # shellcheck disable=SC2086  # a list of packages
        with_apt $needed || with_pip || true
        use_venv
        needed=$(missing)
        [ -z "$needed" ] || give_up "still missing: $(echo $needed). Install with: sudo apt-get install $(echo $needed)"
    fi
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ensure_deps
