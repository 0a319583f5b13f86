"""Every CUDA kernel compiled for sm_80 and sm_90 without a GPU: to PTX by Numba, to machine code by ptxas.

``make kernels-check`` runs it. A kernel that spills registers, uses local memory, or computes in binary64 where it
should not, fails. A factory of kernels, any public function in kernels/ that returns a Kernel, is named by its module
(``atom.kernel.w4a4_kernel``). One that the table below does not know fails too, unless its module says itself what to
compile: ``compile_cases()`` gives {name of the factory: [arguments, ...]}.

    python tests/kernels/compile_check.py [--only dequant.kernel] [--arch 90] [--jobs 2]
"""

from __future__ import annotations

import argparse
import ast
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
# module.factory -> arguments of the variants to compile
TABLE: dict[str, list[tuple[Any, ...]]] = {
    "lut.kernel.gemv": [
        (4, 1, 1, True, False), (2, 8, 2, True, True), (8, 2, 0, False, False), (3, 4, 1, True, False),
    ],
    "lut.kernel.reduce": [(1, 1, 1, False), (8, 2, 0, True)],
    "atom.attention_kernel.attention_kernel": [(64, "F16"), (128, "F16"), (128, "BF16")],
    "atom.attention_kernel.join_kernel": [("F16",), ("F32",)],
    "atom.cache_kernel.quantize_kv_kernel": [(64, "BF16"), (128, "F16")],
    "atom.activations.activation_kernel": [("F16", True, True), ("BF16", False, True), ("F32", True, False)],
}  # fmt: skip
# not factories of kernels of their own: they pass on what a factory makes, or declare any kernel
OTHERS = ("bits.kernel_of",)
# kernels that need more than sm_80: bulk copies
LEAST = dict.fromkeys(
    ("bits.binary_kernel", "bits.integer_kernel", "bits.short_kernel", "mixed.kernel", "atom.held_kernel"), 90
)
# what may not stand in the PTX of a module's kernels, and why
UNWANTED = {"lut.kernel": (r"\.f64", "binary64 arithmetic: Numba widened a mixture of signed and unsigned numbers")}


class Outcome(NamedTuple):
    """What ptxas says of one variant, or why there is nothing."""

    registers: int
    spills: int
    stack: int
    shared: int
    fault: str = ""


def module_of(path: Path) -> str:
    """``atom.kernel`` for kernels/atom/kernel.py, ``bits`` for kernels/bits/__init__.py."""
    return ".".join(path.relative_to(KERNELS).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def functions() -> dict[str, dict[str, ast.expr | None]]:
    """Module -> its functions with what they say they return."""
    return {
        module_of(path): {
            node.name: node.returns for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
        }
        for path in sorted(KERNELS.rglob("*.py"))
    }


def factories() -> list[str]:
    """``module.function`` of every public function under kernels/ that returns a Kernel."""
    return [
        f"{module}.{name}"
        for module, found in functions().items()
        for name, kind in found.items()
        if isinstance(kind, ast.Name) and kind.id == "Kernel" and not name.startswith("_")
        if f"{module}.{name}" not in OTHERS
    ]


@functools.cache
def cases() -> dict[str, list[tuple[Any, ...]]]:
    """The table, and what modules say themselves."""
    found = dict(TABLE)
    for module, defined in functions().items():
        if "compile_cases" in defined:
            own = importlib.import_module(f"bcqfmt.kernels.{module}").compile_cases()
            found |= {f"{module}.{factory}": arguments for factory, arguments in own.items()}
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
    module, _, factory = name.rpartition(".")
    return getattr(importlib.import_module(f"bcqfmt.kernels.{module}"), factory)(*cases()[name][variant])


def compiled(job: tuple[str, int, tuple[int, ...]]) -> list[Outcome]:
    """One variant, for each of these architectures.

    Numba compiles for the least of them, which is most of the time: for others its PTX differs in the target alone.
    """
    name, variant, archs = job
    try:
        kernel = kernel_of(name, variant)
        if kernel.options.get("specific"):  # instructions of sm_90a alone
            return [assembled(kernel.compile((9, 0)), "90a") if arch == 90 else Outcome(0, 0, 0, 0) for arch in archs]
        text = kernel.compile(divmod(archs[0], 10))
    except Exception as fault:  # noqa: BLE001 - reported with the others
        return [Outcome(0, 0, 0, 0, f"{type(fault).__name__}: {str(fault).strip().splitlines()[0]}")] * len(archs)
    pattern, reason = UNWANTED.get(name.rpartition(".")[0], (r"$^", ""))
    if re.search(pattern, text):
        return [Outcome(0, 0, 0, 0, reason)] * len(archs)
    return [assembled(text.replace(f".target sm_{archs[0]}", f".target sm_{arch}"), arch) for arch in archs]


def assembled(text: str, arch: int | str) -> Outcome:
    """What ptxas makes of PTX."""
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


def main() -> int:
    """Compile everything, print a line each, 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="module or module.factory")
    parser.add_argument("--arch", default="80,90")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    ptxas()
    faults = [f"{name}: not in the table of compile_check.py" for name in factories() if name not in cases()]
    archs = sorted(map(int, options.arch.split(",")))
    jobs = [
        (name, variant, fitting)
        for name, variants in cases().items()
        if name.startswith(options.only)
        for variant in range(len(variants))
        if (fitting := tuple(arch for arch in archs if arch >= LEAST.get(name.rpartition(".")[0], 80)))
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        for (name, variant, fitting), outcomes in zip(jobs, pool.map(compiled, jobs), strict=True):
            for arch, found in zip(fitting, outcomes, strict=True):
                label = f"{name}({', '.join(map(str, cases()[name][variant]))}) sm_{arch}"
                sys.stdout.write(
                    f"{label:<72} {found.registers:>4} registers {found.shared:>6} B shared  {found.fault}\n"
                )
                if found.fault:
                    faults.append(f"{label}: {found.fault}")
    for fault in faults:
        sys.stderr.write(f"compile_check: {fault}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
