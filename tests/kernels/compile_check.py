"""Every CUDA kernel compiled for sm_80 and sm_90 without a GPU: to PTX by Numba, to machine code by ptxas.

``make kernels-check`` runs it. A kernel that spills registers, uses local memory, or computes in binary64 where it
should not, fails. A factory of kernels that the table below does not know fails too, unless its module says itself what
to compile: ``compile_cases()`` gives {name of the factory: [arguments, ...]}.

    python tests/kernels/compile_check.py [--only cuda_dequant] [--arch 90] [--jobs 2]
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


# module.factory -> arguments of the variants to compile; a function gets the module and makes the argument
def _small_tile(module: Any) -> Any:
    return module.Tile(32, 8, 2, 1, 8, 2)


def _large_tile(module: Any) -> Any:
    return module.Tile(32, 64, 4, 2, 4)


TABLE: dict[str, list[tuple[Any, ...]]] = {
    "cuda_lut_gemv.gemv": [
        (4, 8, 1, 1, True, False), (2, 8, 8, 2, True, True), (8, 8, 2, 0, False, False), (3, 4, 4, 1, True, False),
    ],
    "cuda_lut_gemv.reduce": [(1, 1, 1, False), (8, 2, 0, True)],
    "cuda_kv_attention.attention_kernel": [(64, "F16"), (128, "F16"), (128, "BF16")],
    "cuda_kv_attention.join_kernel": [("F16",), ("F32",)],
    "cuda_kv_attention_cache.quantize_kv_kernel": [(64, "BF16"), (128, "F16")],
    "cuda_rmsnorm.activation_kernel": [("F16", True, True), ("BF16", False, True), ("F32", True, False)],
    "cuda_w4a4.w4a4_kernel": [(_small_tile, "F16"), (_large_tile, "F32")],
}  # fmt: skip
# kernels that need more than sm_80: bulk copies
LEAST = {"cuda_bit_gemv": 90, "cuda_byte_gemv": 90, "cuda_short_gemv": 90, "cuda_mixed_gemv": 90, "cuda_w4a4_held": 90}
# what may not stand in the PTX of a module's kernels, and why
UNWANTED = {"cuda_lut_gemv": (r"\.f64", "binary64 arithmetic: Numba widened a mixture of signed and unsigned numbers")}


# kernels, full of device functions in device functions, that are compiled a second time without haste
UNHURRIED = ("cuda_short_gemv.short_gemv_kernel", "cuda_w4a4_held.w4a4_held_kernel")


class Outcome(NamedTuple):
    """What ptxas says of one variant, or why there is nothing."""

    registers: int
    spills: int
    stack: int
    shared: int
    fault: str = ""


def factories() -> list[str]:
    """``module.function`` of every function in kernels/cuda_*.py that returns a Kernel."""
    found = []
    for path in sorted(KERNELS.glob("cuda_*.py")):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        returns = [(node.name, node.returns) for node in functions if not node.name.startswith("_")]
        found += [f"{path.stem}.{name}" for name, kind in returns if isinstance(kind, ast.Name) and kind.id == "Kernel"]
    return found


def own_cases(stem: str) -> bool:
    """Whether a module has ``compile_cases``."""
    tree = ast.parse((KERNELS / f"{stem}.py").read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == "compile_cases" for node in tree.body)


@functools.cache
def cases() -> dict[str, list[tuple[Any, ...]]]:
    """The table, and what modules say themselves."""
    found = dict(TABLE)
    for stem in dict.fromkeys(name.split(".")[0] for name in factories()):
        if own_cases(stem):
            own = importlib.import_module(f"bcqfmt.kernels.{stem}").compile_cases()
            found |= {f"{stem}.{factory}": arguments for factory, arguments in own.items()}
    return found


def read_report(text: str) -> Outcome:
    """The figures in the output of ``ptxas -v``; a fault when they are not there."""
    used = re.search(r"Used (\d+) registers", text)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    stack = re.search(r"(\d+) bytes stack frame", text)
    if used is None or stack is None or not spilled:
        return Outcome(0, 0, 0, 0, f"ptxas: {text.strip()[:400] or 'no report'}")
    shared = re.search(r"(\d+) bytes smem", text)
    outcome = Outcome(int(used[1]), sum(map(int, spilled)), int(stack[1]), int(shared[1]) if shared else 0)
    if outcome.spills:
        return outcome._replace(fault=f"{outcome.spills} bytes of spilled registers")
    return outcome._replace(fault=f"{outcome.stack} bytes of local memory") if outcome.stack else outcome


def ptxas() -> str:
    """Where the wheel nvidia-cuda-nvcc put it."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for found in Path(place).glob("*/bin/ptxas"):
            return str(found)
    raise SystemExit("compile_check: ptxas is missing; pip install -e '.[dev]'")


def kernel_of(name: str, variant: int) -> Any:
    """A kernel of the table."""
    stem, factory = name.split(".")
    module = importlib.import_module(f"bcqfmt.kernels.{stem}")
    values = [argument(module) if callable(argument) else argument for argument in cases()[name][variant]]
    return getattr(module, factory)(*values)


def compiled(job: tuple[str, int, int]) -> Outcome:
    """One variant for one architecture."""
    name, variant, arch = job
    stem = name.split(".")[0]
    try:
        text = kernel_of(name, variant).compile(divmod(arch, 10))
    except Exception as fault:  # noqa: BLE001 - reported with the others
        return Outcome(0, 0, 0, 0, f"{type(fault).__name__}: {str(fault).strip().splitlines()[0]}")
    pattern, reason = UNWANTED.get(stem, (r"$^", ""))
    if re.search(pattern, text):
        return Outcome(0, 0, 0, 0, reason)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        done = subprocess.run(
            [ptxas(), "-v", f"-arch=sm_{arch}", str(source), "-o", str(cubin)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        outcome = read_report(done.stdout + done.stderr)
        if not outcome.fault and not (cubin.exists() and cubin.stat().st_size):
            return outcome._replace(fault="no machine code")
    return outcome


def in_no_hurry(name: str) -> bool:
    """Whether Numba, left alone, makes the same PTX (`runtime.compiling`), but for its own running numbers."""
    from bcqfmt.kernels.runtime import launch

    kernel, usual, texts = kernel_of(name, 0), launch.hurried, set()
    for way in (contextlib.nullcontext, usual):
        launch.hurried = way  # type: ignore[assignment]
        texts.add(re.sub(r"_ZN\w+|_cudapy_smem_\d+", "name", kernel.compile((9, 0))))
    return len(texts) == 1


def main() -> int:
    """Compile everything, print a line each, 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="module or module.factory")
    parser.add_argument("--arch", default="80,90")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    ptxas()
    faults = [f"{name}: not in the table of compile_check.py" for name in factories() if name not in cases()]
    jobs = [
        (name, variant, int(arch))
        for name, variants in cases().items()
        if name.startswith(options.only)
        for variant in range(len(variants))
        for arch in options.arch.split(",")
        if int(arch) >= LEAST.get(name.partition(".")[0], 80)
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        patient = {name: pool.submit(in_no_hurry, name) for name in UNHURRIED if name.startswith(options.only)}
        for (name, variant, arch), found in zip(jobs, pool.map(compiled, jobs), strict=True):
            shown = (getattr(a, "__name__", a) for a in cases()[name][variant])
            label = f"{name}({', '.join(map(str, shown))}) sm_{arch}"
            sys.stdout.write(f"{label:<72} {found.registers:>4} registers {found.shared:>6} B shared  {found.fault}\n")
            if found.fault:
                faults.append(f"{label}: {found.fault}")
    faults += [f"{name}: Numba, left alone, makes other PTX" for name, same in patient.items() if not same.result()]
    for fault in faults:
        sys.stderr.write(f"compile_check: {fault}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
