"""What depends on the machine: its instructions, memory next to the planes, threads, forks, the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcqfmt.compiled import threads
from bcqfmt.compiled.intrinsics import features, has_dot_products
from bcqfmt.compiled.loops import compiled, types
from bcqfmt.compiled.threads import together
from bcqfmt.kernels import cpu
from products import kernel_samples as ks
from products import product_reference as reference

SUPPORT = Path(__file__).resolve().parents[2] / "support"
_SSSE3 = "+sse,+sse2,+sse3,+ssse3"
_AVX2 = _SSSE3 + ",+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt"
_AVX512 = _AVX2 + ",+avx512f,+avx512bw,+avx512vl,+avx512dq"
# features, target, how bytes are multiplied, rows of a vector, vectors, up to how many planes look-ups are faster
PROCESSORS = {
    "portable": ("", "portable", "plain", 1, 2, 0),
    "neon": ("+neon", "neon", "plain", 1, 2, 0),
    "neon, dot": ("+neon,+dotprod", "neon", "sdot", 1, 2, 0),
    "ssse3": (_SSSE3, "ssse3", "pmaddubsw", 1, 1, 0),
    "avx2": (_AVX2, "avx2", "pmaddubsw", 2, 1, 2),
    "avx2, vnni": (_AVX2 + ",+avxvnni", "avx2", "vpdpbusd", 2, 1, 2),
    "avx512": (_AVX512, "avx512", "pmaddubsw", 4, 2, 4),
    "avx512, vnni": (_AVX512 + ",+avx512vnni", "avx512", "vpdpbusd", 4, 2, 2),
}

# The instructions of single processors, in terms that every processor has; everything around them is the same.
_SIMULATED = """
from bcqfmt.compiled import intrinsics
from bcqfmt.compiled.intrinsics import Emit, ir

intrinsics.features, intrinsics.has_dot_products = lambda: set({features!r}.split(",")), lambda: {dot}
plain_call, used, i32 = Emit.call, set(), ir.IntType(32)

def number(kind, value):
    return ir.Constant(kind, [value] * kind.count)

def wide(emit, vector, signed):
    kind = ir.VectorType(i32, vector.type.count)
    return emit.builder.sext(vector, kind) if signed else emit.builder.zext(vector, kind)

def neighbours(emit, vector, count):
    "Sums of so many that lie next to each other."
    while count > 1:
        halves = [emit.shuffle(vector, vector, list(range(i, vector.type.count, 2))) for i in (0, 1)]
        vector, count = emit.builder.add(*halves), count // 2
    return vector

def bytes_of(emit, vector):
    count = vector.type.count * vector.type.element.width // 8
    return emit.builder.bitcast(vector, ir.VectorType(ir.IntType(8), count))

def call(emit, name, result, arguments):
    build = emit.builder
    if not name.startswith(("llvm.x86", "llvm.aarch64")):
        return plain_call(emit, name, result, arguments)
    used.add(name)
    if "sdot" in name or "vpdpbusd" in name:
        a, b = (bytes_of(emit, vector) for vector in arguments[1:])
        products = build.mul(wide(emit, a, "sdot" in name), wide(emit, b, True))
        return build.add(arguments[0], neighbours(emit, products, 4))
    if "pmadd.wd" in name or "pmaddw.d" in name:
        return neighbours(emit, build.mul(*(wide(emit, vector, True) for vector in arguments)), 2)
    if "pmadd" in name:  # of bytes, with saturation
        pairs = neighbours(emit, build.mul(wide(emit, arguments[0], False), wide(emit, arguments[1], True)), 2)
        for compare, limit in (("<", 32767), (">", -32768)):
            limit = number(pairs.type, limit)
            pairs = build.select(build.icmp_signed(compare, pairs, limit), pairs, limit)
        return build.trunc(pairs, result)
    if "pshuf" in name or "tbl1" in name:  # all indices are below 16
        table, index = arguments
        found = number(result, 0)
        for entry in range(16):
            lanes = [lane // 16 * 16 + entry for lane in range(result.count)]
            same = build.icmp_unsigned("==", index, number(result, entry))
            found = build.select(same, emit.shuffle(table, table, lanes), found)
        return found
    entries, index = arguments
    found = ir.Constant(result, ir.Undefined)
    for lane in range(result.count):
        place = build.extract_element(index, emit.i32(lane))
        entry = build.extract_element(entries, build.and_(place, emit.i32(result.count - 1)))
        found = build.insert_element(found, entry, emit.i32(lane))
    return found

Emit.call = call
"""
_PRODUCTS = """
import sys
sys.path.insert(0, {support!r})
import numpy as np
from products import kernel_samples as ks
from products import product_reference as reference
from bcqfmt import BcqWeight
from bcqfmt.kernels import cpu
from bcqfmt.kernels.cpu import machine
assert (cpu.target(), *machine.dot()) == {expected!r}, (cpu.target(), machine.dot())
rng, scale = np.random.default_rng(0), np.full((19, 10), 0.5, np.float16)
weights = [ks.weight("affine", 5, 19, 600, 128), ks.weight("bcq", 2, 19, 600, 16)]
for q in {largest}:
    weights.append(BcqWeight.from_affine(np.full((19, 320), 2**q - 1), scale, 0, group_size=32, bits=q))
if machine.dot().looks_up_bytes:
    levels = [-127, -126, -90, -60, -30, -10, -3, 0, 1, 2, 5, 20, 40, 80, 126, 127]
    weights.append(BcqWeight.from_table(rng.integers(0, 16, (19, 320)), scale, levels, group_size=32))
for weight in weights:
    matrix, columns = cpu.prepare(weight), weight.spec.columns
    assert matrix.path() == "planes"
    # bytes of 127, -128 and -128: with the largest codes the largest sums
    some = ks.vectors(3 if weight is weights[0] else 1, columns)
    for x in (some, np.full((1, columns), 0x7E7F80 / 2**22, np.float32)):
        terms = np.abs(x).astype(np.float64) @ np.abs(weight.dequantize("float64")).T
        error = matrix.matmul(x) - reference.product(weight, x)
        assert np.linalg.norm(error) < 1e-6 * np.linalg.norm(terms), weight.scheme
    assert not {decoded} or (matrix.dequantize().view("u2") == weight.dequantize().view("u2")).all()
"""
_GUARDED = """
import ctypes, mmap, sys
sys.path.insert(0, {support!r})
import numpy as np
from products import kernel_samples as ks
from products import product_reference as reference
from bcqfmt import BcqWeight, StoredTensor
from bcqfmt.kernels import cpu

page = mmap.PAGESIZE
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def at_the_edge(array):
    "A copy that ends where memory ends: what reads beyond it kills the process."
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    whole = np.frombuffer(memory, np.uint8)
    assert protect(whole.ctypes.data + size, page, 0) == 0
    copy = whole[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy

for rows, columns in ((1, 40), (5, 512), (16, 544), (17, 1100), (40, 1024)):
    weight = ks.weight("affine", 4, rows, columns, 40 if columns == 40 else 32)
    parts = {{s: StoredTensor.from_array(s, at_the_edge(p.array()), p.dtype) for s, p in weight.parts().items()}}
    matrix, x = cpu.prepare(BcqWeight("", weight.spec, parts)), at_the_edge(ks.vectors(1, columns))
    assert np.shares_memory(matrix._segments[0].planes, parts["s0_planes"].array())
    assert reference.relative_error(matrix.matmul(x), reference.product(weight, x)) < 2e-6
    assert (matrix.dequantize().view("u2") == weight.dequantize().view("u2")).all()

# the memory that a thread works in, at the edge as well
from bcqfmt.compiled import threads
from bcqfmt.kernels.cpu import layout
threads.aligned = layout.aligned = lambda count, dtype: at_the_edge(np.zeros(count, dtype))
threads._memory.held.clear()
threads._memory.views.clear()
cases = (4, 5, 544, 32), (8, 9, 300, 300), (8, 3, 280, 270), (4, 3, 40, 17), (2, 20, 300, 8), (1, 3, 90, 16)
for q, rows, columns, g in cases:
    weight = ks.weight("affine", q, rows, columns, g)
    matrix, x = cpu.prepare(weight), ks.vectors(1, columns)
    if q == 4 or g == 300:
        assert reference.relative_error(matrix.matmul(x), reference.product(weight, x)) < 2e-6
    assert (matrix.dequantize().view("u2") == weight.dequantize().view("u2")).all()
"""


def run(source: str, **environment: str) -> None:
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_instructions_of_every_processor(name: str, tmp_path: Path) -> None:
    """With the instructions of this processor where it has them; where it lacks one, that one is simulated."""
    known, own = features(), has_dot_products()
    wanted, *expected = PROCESSORS[name]
    x86, plain = "ssse3" in wanted, not wanted
    here = known.issuperset(wanted.split(",")) if x86 else (plain or ("+neon" in known and own == ("dot" in name)))
    code = _PRODUCTS.format(
        support=str(SUPPORT),
        expected=tuple(expected),
        largest=(7, 8) if here else (7,),  # bytes of 4 and 3 planes, and of 4 and 4
        decoded="," not in name,  # which dot products have no part in
    )
    # with a cache of its own: numba does not see that simulated kernels are others
    settings = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "1"}  # the same arithmetic, compiled sooner
    if not here:
        run(_SIMULATED.format(features=wanted, dot="dot" in name) + code + "assert used", **settings)
    elif x86 or plain:
        processor = {"NUMBA_CPU_NAME": "x86-64" if x86 else "generic", "NUMBA_CPU_FEATURES": wanted}
        run(code, **settings, **processor)
    else:
        run(code)


def test_nothing_is_read_beyond_the_planes_and_the_input() -> None:
    run(_GUARDED.format(support=str(SUPPORT)))


def test_several_callers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_SMALL", 0)  # small products get one thread otherwise
    weight = ks.weight("affine", 4, 400, 512, 32)
    matrix = cpu.prepare(weight)
    inputs = [ks.vectors(1, 512, seed=seed) for seed in range(6)]
    expected = [matrix.matmul(x, threads=1) for x in inputs]
    found: list[list[bool]] = [[] for _ in inputs]

    def call(which: int) -> None:
        for _ in range(20):
            found[which].append(np.array_equal(matrix.matmul(inputs[which], threads=2), expected[which]))

    callers = [threading.Thread(target=call, args=(which,)) for which in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [all(same) and len(same) == 20 for same in found] == [True] * len(inputs)


@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded.*fork:DeprecationWarning"
)  # Python 3.12 on warns; that is the test
def test_a_child_of_a_process_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_SMALL", 0)
    weight = ks.weight("affine", 4, 400, 512, 32)
    matrix, x = cpu.prepare(weight), ks.vectors(1, 512)
    expected = matrix.matmul(x, threads=2)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(matrix.matmul(x, threads=2), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert reference.relative_error(expected, reference.product(weight, x)) < 2e-6


def test_a_fault_in_one_thread_reaches_the_caller() -> None:
    begun = threading.Event()

    def work(which: int) -> None:
        if which:
            begun.set()
            raise ZeroDivisionError("in a thread")
        assert begun.wait(30)

    with pytest.raises(ZeroDivisionError, match="in a thread"):
        together(work, 2)


def test_threads_that_are_busy_are_not_waited_for() -> None:
    count, release = max(1, threads._State.size), threading.Event()  # as many as other tests have started
    inside = threading.Barrier(count + 2)
    done: list[int] = []

    def block(which: int) -> None:
        inside.wait(30)
        if which:
            release.wait(30)

    blocker = threading.Thread(target=together, args=(block, count + 1))
    blocker.start()
    inside.wait(30)
    together(done.append, 2)
    release.set()
    blocker.join()
    together(lambda _: None, count + 1)
    assert done == [0]


def test_a_kernel_is_known_by_the_files_it_is_made_of() -> None:
    from bcqfmt.compiled.loops import stamp_of
    from bcqfmt.kernels.cpu import lanes, lookup

    assert stamp_of(lanes) == stamp_of(lanes) != stamp_of(lookup)


def _adds(step: int) -> Any:
    def loop(number: Any) -> Any:
        return number + step

    return compiled(loop, types.int64, types.int64)


@compiled
def _doubled(numbers: Any, out: Any) -> None:
    for i in range(numbers.size):
        out[i] = 2 * numbers[i]


def test_loops_of_one_name_share_no_files_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes can give entries of one index the same number; then one loop is loaded as the other."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    for _ in range(2):
        assert [_adds(step)(1) for step in (1, 2, 3)] == [2, 3, 4]
        assert len(list(tmp_path.rglob("*.nbi"))) == len(list(tmp_path.rglob("*.nbc"))) == 3
    for numbers in (np.arange(3), np.arange(6)[::2], np.arange(3.0)):
        _doubled(numbers, out := np.zeros(3, numbers.dtype))
        assert (out == 2 * numbers).all()
    assert len(list(tmp_path.rglob("*.nbi"))) == len(list(tmp_path.rglob("*.nbc"))) == 6


def test_compiled_kernels_are_found_again_by_the_next_process(tmp_path: Path) -> None:
    source = "from bcqfmt.kernels.cpu.dot_loops import row_kernel; row_kernel(1, 1, True, 1, True, True)\n"
    source += "from bcqfmt.kernels.cpu.decode import decode_kernel; decode_kernel('F32')"
    for _ in range(2):
        run(source, NUMBA_CACHE_DIR=str(tmp_path))
        found = sorted(path.name for path in tmp_path.rglob("*.nbc"))
        assert len(found) == 2
