#!/usr/bin/env bash
# Every Python that the package supports and this machine has: a clean environment each, pinned packages, the tests.
#
#   tests/install/matrix.sh           the core: demo, specification, format, verbs (about two minutes for each Python)
#   tests/install/matrix.sh --full    `make test` for each
#
# Interpreters are taken from PATH, pyenv and uv. The last lines say what ran, what failed and what was missing; the
# exit status is 0 when everything that could run has passed, 1 when something failed, 2 when no Python was found.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONSAFEPATH=1 PIP_DISABLE_PIP_VERSION_CHECK=1
versions=(3.11 3.12 3.13)
core_tests=(tests/spec tests/format tests/docs/test_pages.py tests/cli/test_program.py tests/cli/test_convert.py
    --ignore=tests/format/test_torch.py)  # the core has no torch
full=false
[ "${1:-}" = --full ] && full=true

# The path of an interpreter of that version, or nothing.
interpreter() {
    local candidate
    for candidate in "$(command -v "python$1" || true)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python \
        "$(command -v uv > /dev/null && uv python find --no-python-downloads "$1" 2> /dev/null)"; do
        if [ -x "$candidate" ] && [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)" = "$1" ]; then
            echo "$candidate"
            return
        fi
    done
}

core() {  # venv, interpreter
    local tree="$1-tree"  # a copy: building leaves a folder behind
    mkdir "$tree" && cp -R bcqfmt converters kernels pyproject.toml README.md LICENSE MANIFEST.in "$tree" \
        && "$2" -m venv "$1" \
        && "$1/bin/python" -m pip install -qq --constraint constraints.txt pip setuptools \
        && "$1/bin/python" -m pip install -qq --no-build-isolation --constraint constraints.txt "$tree" pytest hypothesis \
            jsonschema \
        && (cd "$1" && bin/bcqfmt --version --json && bin/bcqfmt demo > demo.txt && tail -n 1 demo.txt) \
        && "$1/bin/pytest" -q -p no:cacheprovider "${core_tests[@]}"
}

passed=() failed=() missing=()
for version in "${versions[@]}"; do
    python=$(interpreter "$version")
    if [ -z "$python" ]; then
        missing+=("$version")
        continue
    fi
    scratch=$(mktemp -d)
    echo "== Python $version: $("$python" --version)"
    if $full; then
        make VENV="$scratch/venv" PYTHON="$python" test
    else
        core "$scratch/venv" "$python"
    fi && passed+=("$version") || failed+=("$version")
    rm -rf "$scratch"
done
echo "matrix: passed ${passed[*]:-none}; failed ${failed[*]:-none}; not on this machine ${missing[*]:-none}"
[ ${#failed[@]} -gt 0 ] && exit 1
[ ${#passed[@]} -gt 0 ] || exit 2
