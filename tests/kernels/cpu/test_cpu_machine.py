"""What depends on the machine: its instructions, memory next to the planes, threads, forks, the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bcqfmt.compiled import threads
from bcqfmt.compiled.threads import together
from bcqfmt.kernels import cpu
from products import kernel_samples as ks
from products import product_reference as reference

SUPPORT = Path(__file__).resolve().parents[2] / "support"
TARGETS = {  # and those whose instructions such a processor has
    "portable": ("portable",),
    "neon": ("portable", "neon"),
    "avx2": ("portable", "avx2"),
    "avx512": ("portable", "avx2", "avx512"),
}
_HASWELL = "+avx2,+avx,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2"
PROCESSORS = {
    "portable": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
    "avx2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": _HASWELL},
    "neon": {},
    "avx512": {},
}

# The instructions of single processors, in terms that every processor has; everything around them is the same.
_SIMULATED = """
from bcqfmt.compiled.intrinsics import Emit, ir
from bcqfmt.kernels.cpu import dots, lookup

plain_call, used = Emit.call, set()

def call(emit, name, result, arguments):
    if name == "llvm.aarch64.neon.sdot.v4i32.v16i8":
        used.add(name)
        sums, a, b = arguments
        for lane in range(16):
            pair = [emit.builder.extract_element(vector, emit.i32(lane)) for vector in (a, b)]
            product = emit.builder.mul(*(emit.builder.sext(one, emit.i32) for one in pair))
            before = emit.builder.extract_element(sums, emit.i32(lane // 4))
            sums = emit.builder.insert_element(sums, emit.builder.add(before, product), emit.i32(lane // 4))
        return sums
    if name not in ("llvm.x86.avx2.permps", "llvm.x86.avx512.permvar.sf.512"):
        return plain_call(emit, name, result, arguments)
    used.add(name)
    entries, index = arguments
    found = ir.Constant(result, ir.Undefined)
    for lane in range(result.count):
        place = emit.builder.extract_element(index, emit.i32(lane))
        entry = emit.builder.extract_element(entries, emit.builder.and_(place, emit.i32(result.count - 1)))
        found = emit.builder.insert_element(found, entry, emit.i32(lane))
    return found

Emit.call, lookup.target, dots.has_dot_products = call, lambda: {target!r}, lambda: True
"""
_PRODUCTS = """
import sys
sys.path.insert(0, {support!r})
from products import kernel_samples as ks
from products import product_reference as reference
from bcqfmt.kernels import cpu
assert cpu.target() == {target!r}, cpu.target()
for weight in (ks.weight("affine", 3, 19, 600, 128), ks.weight("bcq", 2, 19, 600, 16)):
    matrix, x = cpu.prepare(weight), ks.vectors(1, 600)
    assert matrix.path() == "planes"
    assert reference.relative_error(matrix.matmul(x), reference.product(weight, x)) < 2e-6
    assert (matrix.dequantize().view("u2") == weight.dequantize().view("u2")).all()
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
threads.aligned = lambda count, dtype: at_the_edge(np.zeros(count, dtype))
threads._memory.held.clear()
threads._memory.views.clear()
for q, rows, columns, g in ((4, 5, 544, 32), (8, 3, 280, 270), (4, 3, 40, 17), (2, 20, 300, 8), (1, 3, 90, 16)):
    weight = ks.weight("affine", q, rows, columns, g)
    matrix, x = cpu.prepare(weight), ks.vectors(1, columns)
    if q == 4:
        assert reference.relative_error(matrix.matmul(x), reference.product(weight, x)) < 2e-6
    assert (matrix.dequantize().view("u2") == weight.dequantize().view("u2")).all()
"""


def run(source: str, **environment: str) -> None:
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("target", TARGETS)
def test_the_instructions_of_every_processor(target: str, tmp_path: Path) -> None:
    """With the instructions of this processor where it has them; where it lacks one, that one is simulated."""
    code = _PRODUCTS.format(support=str(SUPPORT), target=target)
    if target in TARGETS[cpu.target()]:
        run(code, **PROCESSORS[target])
    else:  # with a cache of its own: numba does not see that these kernels are others
        settings = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "1"}  # the same arithmetic, compiled sooner
        run(_SIMULATED.format(target=target) + code + "assert used", **settings)


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


def test_compiled_kernels_are_found_again_by_the_next_process(tmp_path: Path) -> None:
    source = "from bcqfmt.kernels.cpu.dot_loops import row_kernel; row_kernel(1, 1, True, 1, True, True)\n"
    source += "from bcqfmt.kernels.cpu.decode import decode_kernel; decode_kernel('F32')"
    for _ in range(2):
        run(source, NUMBA_CACHE_DIR=str(tmp_path))
        compiled = sorted(path.name for path in tmp_path.rglob("*.nbc"))
        assert len(compiled) == 2
