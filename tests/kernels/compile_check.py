"""Every CUDA kernel compiled for sm_80 to sm_120 without a GPU: to PTX by Numba, to machine code by ptxas.

``make kernels-check`` runs it. A kernel that spills registers, uses local memory, or computes in binary64 where it
should not, fails. A factory of kernels, any public function in kernels/ that returns a Kernel, is named by its module
(``atom.kernel.w4a4_kernel``). One that `cases` does not know fails too.

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
# not factories of kernels of their own: they pass on what a factory makes, or declare any kernel
OTHERS = ("bits.kernel_of", "gemm.few.few_kernel", "gemm.portable.portable_kernel", "gemm.roles.roles_kernel")
# kernels that need more than sm_80: bulk copies, if their shape does not say otherwise
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
    """``module.factory`` -> arguments of the variants to compile.

    Numba takes up to a minute for one. So a family has its largest variants, which take the most registers, and those
    that it needs for every branch of its source to be in one of them.
    """
    return {**_looked_up(), **_atom(), **_bits(), **_dequant(), **_gemm()}


def _looked_up() -> dict[str, list[tuple[Any, ...]]]:
    return {
        "lut.kernel.gemv": [
            (4, 16, 1, False, True), (8, 32, 2, True, False), (4, 4, 1, True, False), (5, 1, 0, False, False),
            (3, 16, 1, False, True, True),
        ],
        "lut.kernel.reduce": [(1, 1, 1, False), (8, 2, 0, True), (1, 1, 1, False, True)],
        "outliers.csr_outliers_kernel": [(1, 1, 1), (0, 2, 0), (1, 0, 1, 4), (2, 0, 2, 8)],
    }  # fmt: skip


def _atom() -> dict[str, list[tuple[Any, ...]]]:
    from bcqfmt.kernels.atom.shape import HELD, LARGE, TILES, WIDE

    return {
        "atom.kernel.w4a4_kernel": [(WIDE[128], "F16"), (LARGE, "F16"), (TILES[8], "F32")],
        "atom.held_kernel.w4a4_held_kernel": [(HELD[128], "F16"), (HELD[8], "F32")],
        "atom.attention_kernel.attention_kernel": [(64, "F16"), (128, "BF16")],
        "atom.attention_kernel.join_kernel": [("F16",), ("F32",)],
        "atom.cache_kernel.quantize_kv_kernel": [(64, "BF16"), (128, "F16")],
        "atom.activations.activation_kernel": [("F16", True, True), ("BF16", False, True), ("F32", True, False)],
    }


def _bits() -> dict[str, list[tuple[Any, ...]]]:
    """Both formulas, one and several vectors, all group sizes, reordered columns, outliers, most warps."""
    from bcqfmt.kernels.bits.layout import BitLayout
    from bcqfmt.kernels.bits.shape import SM_90, BitShape, ByteShape, Chip, Wanted, product_shape, short_shape_for
    from bcqfmt.kernels.mixed.shape import MixedShape
    from bcqfmt.kernels.operands.outliers import NO_OUTLIERS, OutlierNeeds
    from bcqfmt.kernels.runtime.limits import SMALL_SHARED

    bits = [
        BitShape(BitLayout(4, 4096, 128, "affine", "F16"), 1, 1, 1, 2, outliers=4),
        BitShape(BitLayout(3, 4096, 64, "bcq", "F16"), 2, 2, 2, 2, reordered=True, added=True, tiles=1),
        BitShape(BitLayout(4, 8192, 128, "bcq", "F16"), 1, 1, 1, 2, bulk=False),
    ]
    integers = [
        ByteShape(BitLayout(4, 8192, 128, "bcq", "F16"), 4, 1, 1),
        ByteShape(BitLayout(4, 4096, 32, "affine", "F16"), 1, 2, 2, reordered=True, added=True, tiles=1),
        ByteShape(BitLayout(3, 4096, 256, "affine", "F16"), 8, 1, 0),
        ByteShape(BitLayout(4, 4096, 128, "affine", "F16"), 4, 1, 1, outliers=4),
        product_shape(Wanted(BitLayout(4, 2048, 32, "bcq", "F16"), 4, 1, 1)),
        ByteShape(BitLayout(4, 4352, 128, "bcq", "F16"), 4, 2, 2, added=True, bulk=False),
    ]
    short = [
        short_shape_for(Wanted(BitLayout(3, columns, g, formula, "F16"), batch, 1, 1, more, more, False, needs, chip))
        for columns, g, formula, batch, more, needs, chip in (
            (4096, 8, "bcq", 1, False, NO_OUTLIERS, SM_90),
            (4352, 8, "affine", 2, True, OutlierNeeds(4, 4352, 512), SM_90),
            (8192, 16, "affine", 4, True, NO_OUTLIERS, SM_90),
            (4096, 16, "bcq", 2, False, NO_OUTLIERS, Chip(bulk=False, shared=SMALL_SHARED)),
        )
    ]
    mixed = [
        MixedShape(1, 1, 1, 4, 6, 3, 3),
        MixedShape(1, 1, 1, 0, 8, 2, 4),
        MixedShape(2, 2, 0, 8, 8, 1, 3),
    ]
    return {
        "bits.binary_kernel.bit_gemv_kernel": [(shape,) for shape in bits],
        "bits.integer_kernel.byte_gemv_kernel": [(shape,) for shape in integers],
        "bits.short_kernel.short_gemv_kernel": [(shape,) for shape in short],
        "mixed.kernel.mixed_gemv_kernel": [(shape,) for shape in mixed],
    }


def _dequant() -> dict[str, list[tuple[Any, ...]]]:
    from bcqfmt.kernels.dequant.elements import Elements
    from bcqfmt.kernels.dequant.kernel import Decoding

    elements: list[tuple[Any, ...]] = [
        (4, 3, "f32", 1, 0, False, 0), (8, 0, "f64", 2, 2, True, 0), (5, 1, "f32", 1, 1, False, 1),
        (3, 2, "f32", 0, 0, True, 2), (4, 4, "f64", 0, 0, True, 1), (4, 3, "f32", 1, 2, True, 1, True),
    ]  # fmt: skip
    tabled = [
        Decoding(4, 3, "f32", 1, 1, finite=True), Decoding(4, 0, "f32", 2, 2, finite=True),
        Decoding(3, 1, "f64", 1, 1), Decoding(2, 2, "f32", 0, 2), Decoding(1, 3, "f64", 0, 1, finite=True),
        Decoding(4, 0, "f32", 1, 2, twice=True, finite=True), Decoding(4, 0, "f32", 1, 1, finite=True, reordered=True),
    ]  # fmt: skip
    computed = [
        Decoding(5, 3, "f32", 1, 2), Decoding(6, 1, "f32", 2, 2), Decoding(8, 0, "f32", 1, 2, twice=True),
        Decoding(2, 2, "f64", 0, 1, twice=True, short=True), Decoding(8, 0, "f32", 1, 1, reordered=True),
        Decoding(4, 3, "f32", 1, 1, short=True, reordered=True),
    ]  # fmt: skip
    return {
        "dequant.elements.elements": [(Elements(*case),) for case in elements],
        "dequant.kernel.rows_kernel": [(decoding,) for decoding in tabled + computed],
        "dequant.rows.reorder_columns": [()],
    }


def _gemm() -> dict[str, list[tuple[Any, ...]]]:
    """All engines, formulas and types; codes decoded to a dense matrix."""
    from bcqfmt.kernels.gemm.dense import Decoding
    from bcqfmt.kernels.gemm.layout import GemmLayout
    from bcqfmt.kernels.gemm.shape import gemm_shape

    four, three = GemmLayout(4, 4096, 128, "affine", "F16"), GemmLayout(3, 4096, 64, "affine", "BF16", True)
    table = GemmLayout(4, 4096, 32, "table", "F16", table=tuple(float(i * i - 100) for i in range(16)))
    shapes = [
        gemm_shape(four, 16, 28672, 1, 1, "wgmma"),
        gemm_shape(four, 16, 4096, 1, 1, "wgmma"),
        gemm_shape(four, 16, 11008, 1, 1, "mma"),
        gemm_shape(four, 128, 28672, 1, 1, "wgmma"),
        gemm_shape(four, 1200, 11008, 1, 1, "wgmma"),
        gemm_shape(GemmLayout(4, 8192, 128, "affine", "F16"), 1024, 28672, 1, 1, "wgmma"),
        gemm_shape(GemmLayout(4, 4096, 128, "bcq", "F16"), 64, 28672, 1, 0, "wgmma"),
        gemm_shape(GemmLayout(5, 4096, 128, "bcq", "F16"), 32, 28672, 1, 0, "wgmma"),
        gemm_shape(table, 32, 28672, 1, 1, "mma"),
        gemm_shape(four, 8, 4096, 1, 1, "mma"),
        gemm_shape(four, 4, 4096, 1, 1, "wgmma"),
        gemm_shape(GemmLayout(4, 4096, 128, "bcq", "F16"), 16, 11008, 1, 1, "wgmma"),
        gemm_shape(table, 8, 4096, 1, 1, "wgmma"),
        gemm_shape(four, 64, 28672, 1, 1, "mma"),
        gemm_shape(three, 16, 28672, 2, 2, "mma", added=True),
        gemm_shape(GemmLayout(4, 4096, 128, "bcq", "F16"), 8, 4096, 1, 1, "mma"),
        gemm_shape(three, 1, 4096, 2, 0, "mma", added=True),
    ]
    dense = [
        Decoding(bits, bcq, looked_up, GemmLayout(bits, 64, 64, "bcq" if bcq else "affine", "F16").fields, *more)
        for bits, bcq, looked_up, *more in (
            (3, False, False, 2, "BF16", 2, 1), (8, False, False, 4, "F32", None, 2),
            (3, True, True, 1, "F16", 1, 2), (1, True, False, 1, "F16", None, 1),
        )
    ]  # fmt: skip
    return {
        "gemm.dense.dense_kernel": [(case,) for case in dense],
        "gemm.kernel.gemm_kernel": [(shape,) for shape in shapes],
    }


def read_report(text: str) -> Outcome:
    """The figures in the output of ``ptxas -v``; a fault when they are not there."""
    used = re.search(r"Used (\d+) registers", text)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    stack = re.search(r"(\d+) bytes stack frame", text)
    if used is None or stack is None or not spilled:
        return Outcome(0, 0, 0, 0, f"ptxas: {text.strip()[:400] or 'no report'}")
    shared = re.search(r"(\d+) bytes smem", text)
    outcome = Outcome(int(used[1]), sum(map(int, spilled)), int(stack[1]), int(shared[1]) if shared else 0)
    waits = re.search(r"\(C75(?:10|12|17)\).*", text)  # products of tensor cores that do not overlap
    if waits:
        return outcome._replace(fault=waits[0][:100])
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


def least(name: str, variant: tuple[Any, ...]) -> int:
    """The first architecture that a variant is for."""
    portable = variant and not getattr(variant[0], "bulk", True)
    return 80 if portable else LEAST.get(name.rpartition(".")[0], 80)


def main() -> int:
    """Compile everything, print a line each, 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="module or module.factory")
    parser.add_argument("--arch", default="80,86,89,90,100,120")
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
        if (fitting := tuple(arch for arch in archs if arch >= least(name, variants[variant])))
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
