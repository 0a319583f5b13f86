#!/usr/bin/env bash
# Tests of the format, the words and the converters on a processor that this machine does not have, emulated by QEMU.
#
#   tests/soak/emulated.sh                      x86-64 on an ARM machine, aarch64 on any other; every processor below
#   tests/soak/emulated.sh CPU [TEST ...]       one processor, as QEMU names it; these tests only
#
# Needed: qemu-user and mmdebstrap (apt install qemu-user mmdebstrap), pip, and the network once. A Debian of the other
# architecture with its Python is unpacked, the pinned wheels for it are installed beside it, and nothing of either is
# run but by QEMU: no root, no chroot, no registration with the kernel. torch is left out (hundreds of megabytes of
# wheels), and with it the one file of these folders that needs it. Compiling is slow there: count on hours for all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD

case $(uname -m) in
    aarch64 | arm64) machine=x86_64 debian=amd64 cpus=(Nehalem Haswell) ;;  # numpy asks for x86-64-v2: no AVX; AVX2
    *) machine=aarch64 debian=arm64 cpus=(cortex-a57 max) ;;                # the first ARMv8; everything QEMU has
esac
[ $# -gt 0 ] && cpus=("$1") && shift
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/format tests/spec tests/converters)
left_out=(--ignore=tests/format/test_torch.py)
# Time limits and peaks of memory are those of a real processor, and QEMU's own memory would be counted.
left_out+=(--ignore=tests/converters/test_memory.py)
left_out+=(--deselect=tests/format/test_durability.py::test_memory_does_not_grow_with_the_shard)

for tool in "qemu-$machine" mmdebstrap; do
    command -v "$tool" > /dev/null || { echo "emulated: $tool is missing (apt install qemu-user mmdebstrap)" >&2; exit 2; }
done

place=$root/.venv/emulated-$machine
system=$place/root packages=$place/packages program=$place/python
if [ ! -e "$place/.ready" ]; then
    rm -rf "$place" && mkdir -p "$place"
    suite=$(. /etc/os-release && [ "${ID:-}" = debian ] && echo "${VERSION_CODENAME:-stable}" || echo stable)
    echo "emulated: unpacking Debian $suite for $debian (once)"
    mmdebstrap --quiet --architectures="$debian" --variant=extract --include=python3,libstdc++6,libgomp1 "$suite" "$system"
    # Links that start at / would lead into this machine's own system.
    find "$system" -type l -lname '/*' -print0 | while IFS= read -r -d '' link; do
        ln -sfn "$system$(readlink "$link")" "$link"
    done
    version=$(basename "$(readlink -f "$system/usr/bin/python3")" | sed 's/^python//')
    echo "emulated: wheels for $machine, Python $version (once)"
    platforms=()
    for glibc in 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_$machine"); done
    mapfile -t needed < <(python3 - << 'END'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], "pytest", "hypothesis", "jsonschema", sep="\n")
END
    )
    python3 -m pip install --quiet --target "$packages" "${platforms[@]}" --platform "manylinux2014_$machine" \
        --python-version "$version" --implementation cp --only-binary=:all: --constraint constraints.txt "${needed[@]}"
    # Compiling Python's files under emulation takes minutes: this machine's Python does it, where it is the same one.
    if [ "$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "$version" ]; then
        python3 -m compileall -q "$packages" "$system/usr/lib/python3" "$system/usr/lib/python$version" || true
    fi
    # A test that starts `sys.executable` has to start QEMU again.
    echo 'import os, sys; sys.executable = os.environ["EMULATED_PYTHON"]' > "$packages/sitecustomize.py"
    mkdir "$place/path" && ln -s "$root/bcqfmt" "$place/path/bcqfmt"
    cat > "$program" << END
#!/bin/sh
PYTHONPATH="$packages\${PYTHONPATH:+:\$PYTHONPATH}:$place/path" EMULATED_PYTHON="$program" \\
    exec qemu-$machine -cpu "\$EMULATED_CPU" -L "$system" "$system/usr/bin/python3" "\$@"
END
    chmod +x "$program"
    touch "$place/.ready"
fi

export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
failed=()
for cpu in "${cpus[@]}"; do
    export EMULATED_CPU=$cpu NUMBA_CACHE_DIR=$place/numba-$cpu
    echo "== $machine, $cpu"
    "$program" -m pytest -q -p no:cacheprovider "${left_out[@]}" "${tests[@]}" || failed+=("$cpu")
done
echo "emulated: $machine, ran ${cpus[*]}; failed ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
