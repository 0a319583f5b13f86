"""SHA-256 of one stream along with sixteen others, in one loop: the rounds of the one run beside the vectors.

The processor's SHA instruction for two rounds takes every third cycle of one unit, and four for its result: a stream by
itself leaves the vector units idle. Here it has company: while its sixteen blocks pass, the vectors carry two blocks
of each of sixteen lanes, and the schedule of the stream's next sixteen blocks. 48 blocks cost 2800 cycles; one after
the other, with what `digests_kernel` and hashlib need, it were 4200.

These are instructions for the assembler, not vectors for LLVM: the SHA instructions slow down by orders of magnitude
as soon as the upper part of one of the first sixteen registers is in use, so vectors must stay in the last sixteen.
LLVM has no way of saying so. Each list below is one strand; `_beside` lays strands beside each other.

Registers: rdi the numbers, rcx the rounds of the loop, r8 addresses of lanes, r9 how far in them, r10 their constants,
r11 the room, r12 words of the stream to be used, r13 and r14 those that are made, r15 their constants, rsi the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]

from bcqfmt.compiled.loops import address_of, for_this_processor, operation, types

__all__ = ["ROOM", "SWAP", "fits_here", "loop_address"]

# Offsets in the room. The words of the stream lie such that few addresses are equal in their last 12 bits, which the
# processor would take for the same.
_RING, _TURNED, _SPARE, _SAVED, SWAP, _TURNED_ALONG, _SPARE_ALONG = 0, 1024, 2048, 2112, 2624, 2688, 3712
_WORDS, _READY = 3840, 8960
ROOM = _READY + 2 * 4096
_AHEAD, _AHEAD_LANES = 4096, 512  # bytes of the stream, and of a lane, that are fetched before they are needed
_UNITS, _STATES, _LANES, _CONSTANTS, _STATE, _PLACE, _ROOM = range(0, 56, 8)  # of the numbers

_LANE, _OWN = tuple(f"%zmm{i}" for i in range(24, 28)), tuple(f"%zmm{i}" for i in range(28, 32))
_Strand = list[tuple[str, ...]]  # instructions, some of which stay together


def fits_here() -> bool:
    """Whether this processor has all these instructions, and numba compiles for this very processor."""
    found = binding.get_host_cpu_features()
    return for_this_processor() and all(found.get(name) for name in ("sha", "ssse3", "avx512f", "avx512bw", "avx512vl"))


def _strand(*parts: str | Iterable[tuple[str, ...]]) -> _Strand:
    found: _Strand = []
    for part in parts:
        found += [(part,)] if isinstance(part, str) else part
    return found


def _at(offset: int, base: str = "r11") -> str:
    return f"{offset}(%{base})"


def _ring(t: int) -> str:
    return _at(_RING + 64 * (t % 16))


def _turn(rows: list[list[str]], put: Callable[[int], str], turned: int, spare: str, r: tuple[str, ...]) -> _Strand:
    """16 x 16 words: word t of every row, its bytes reversed, to ``put(t)``. Four rows at a time, then four words."""
    a, b, c, d = r
    out: list[str] = []
    for g, (x, y, z, w) in enumerate(rows):
        out += [f"vmovdqu32 {x},{a}", f"vpunpckhdq {y},{a},{b}", f"vpunpckldq {y},{a},{a}"]
        out += [f"vmovdqu32 {z},{c}", f"vpunpckhdq {w},{c},{d}", f"vpunpckldq {w},{c},{c}"]
        for j, (low, high) in enumerate(((a, c), (b, d))):
            out += [f"vmovdqa32 {high},{spare}", f"vpunpckhqdq {high},{low},{high}"]
            out += [f"vpunpcklqdq {spare},{low},{low}"]
            out += [f"vmovdqa32 {x},{_at(turned + 64 * (8 * j + 4 * i + g))}" for i, x in enumerate((low, high))]
    for j in range(4):
        x, y, z, w = (_at(turned + 64 * (4 * j + g)) for g in range(4))
        out += [f"vmovdqa32 {x},{a}", f"vshufi32x4 $0xdd,{y},{a},{b}", f"vshufi32x4 $0x88,{y},{a},{a}"]
        out += [f"vmovdqa32 {z},{c}", f"vshufi32x4 $0xdd,{w},{c},{d}", f"vshufi32x4 $0x88,{w},{c},{c}"]
        for low, high in ((a, c), (b, d)):
            out += [f"vmovdqa32 {high},{spare}", f"vshufi32x4 $0xdd,{high},{low},{high}"]
            out += [f"vshufi32x4 $0x88,{spare},{low},{low}"]
        for q, x in enumerate((a, b, c, d)):
            out += [f"vpshufb {_at(SWAP)},{x},{x}", f"vmovdqa32 {x},{put(4 * q + j)}"]
    return _strand(*out)


def _schedule(at: Callable[[int], str], t: int, r: tuple[str, ...]) -> list[str]:
    """Word t from those 2, 16, 15 and 7 before it; it stays in the first register."""
    a, b, c, d = r
    return [
        *(f"vmovdqa32 {at(t - 2)},{b}", f"vprord $17,{b},{a}", f"vprord $19,{b},{c}", f"vpsrld $10,{b},{b}"),
        *(f"vpternlogd $0x96,{b},{c},{a}", f"vpaddd {at(t - 16)},{a},{a}"),
        *(f"vmovdqa32 {at(t - 15)},{d}", f"vprord $7,{d},{b}", f"vprord $18,{d},{c}", f"vpsrld $3,{d},{d}"),
        *(f"vpternlogd $0x96,{c},{d},{b}", f"vpaddd {at(t - 7)},{a},{a}", f"vpaddd {b},{a},{a}"),
        f"vmovdqa32 {a},{at(t)}",
    ]


def _turn_lanes(block: int) -> _Strand:
    x, y = f"{64 * block}(%rax,%r9)", f"{64 * block}(%rbx,%r9)"
    found: _Strand = []
    lane = 0
    for (line,) in _turn([[x, y, x, y]] * 4, _ring, _TURNED, _at(_SPARE), _LANE):
        if line.startswith("vmovdqu32"):  # the next two
            found += _strand(f"movq {8 * lane}(%r8),%rax", f"movq {8 * lane + 8}(%r8),%rbx")
            found += _strand(*(f"prefetcht0 {_AHEAD_LANES + 64 * block}(%{r},%r9)" for r in ("rax", "rbx")))
            lane += 2
        found.append((line,))
    return found


def _lane_rounds(first: bool) -> _Strand:
    """Sixteen rounds of every lane; the ``first`` ones have their words already."""
    out, state = [], [f"%zmm{i}" for i in range(16, 24)]
    x, y, z = _LANE[1:]
    for t in range(16):
        a, b, c, d, e, f, g, h = state
        out += [] if first else _schedule(_ring, t, _LANE)
        out += [f"vpaddd {_ring(t) if first else _LANE[0]},{h},{h}", f"vpaddd {4 * t}(%r10){{1to16}},{h},{h}"]
        out += [f"vprord $6,{e},{x}", f"vprord $11,{e},{y}", f"vprord $25,{e},{z}", f"vpternlogd $0x96,{y},{z},{x}"]
        out += [f"vmovdqa32 {e},{y}", f"vpternlogd $0xca,{g},{f},{y}", f"vpaddd {y},{h},{h}", f"vpaddd {x},{h},{h}"]
        out += [f"vpaddd {h},{d},{d}"]
        out += [f"vprord $2,{a},{x}", f"vprord $13,{a},{y}", f"vprord $22,{a},{z}", f"vpternlogd $0x96,{y},{z},{x}"]
        out += [f"vmovdqa32 {a},{y}", f"vpternlogd $0xe8,{c},{b},{y}", f"vpaddd {y},{h},{h}", f"vpaddd {x},{h},{h}"]
        state = [h, *state[:-1]]
    return _strand(*out)


def _lane_end() -> list[str]:
    out = []
    for i in range(8):
        saved, x = _at(_SAVED + 64 * i), f"%zmm{16 + i}"
        out += [f"vpaddd {saved},{x},{x}", f"vmovdqa32 {x},{saved}"]
    return out


def _first_words() -> _Strand:
    """The stream's next sixteen blocks: their words, and with constants, two and two, as rounds take them.

    Words of a pair of rounds are 8 bytes of each block: of blocks 0, 1, 2.. at 0, 8, 16.. of 128 bytes.
    """
    a, b, c, d = _OWN
    rows = [[_at(64 * (2 * (g + 4 * (r // 2)) + r % 2), "rsi") for r in range(4)] for g in range(4)]
    out: list[str] = []
    for t in range(-16, 0, 2):
        out += [f"vmovdqa32 {_at(64 * t, 'r14')},{a}", f"vpaddd {4 * t}(%r15){{1to16}},{a},{a}"]
        out += [f"vmovdqa32 {_at(64 * t + 64, 'r14')},{b}", f"vpaddd {4 * t + 4}(%r15){{1to16}},{b},{b}"]
        out += [f"vpunpckldq {b},{a},{c}", f"vpunpckhdq {b},{a},{d}"]
        out += [f"vmovdqa32 {c},{_at(64 * t, 'r13')}", f"vmovdqa32 {d},{_at(64 * t + 64, 'r13')}"]
    ahead = [f"prefetcht0 {_AHEAD + 64 * i}(%rsi)" for i in range(16)]
    turned = _turn(rows, lambda t: _at(64 * (t - 16), "r14"), _TURNED_ALONG, _at(_SPARE_ALONG), _OWN)
    return _strand(turned, *ahead, *out)


def _next_words(count: int) -> _Strand:
    """So many more words of each; of a pair the second first, for the order of what is interleaved."""
    out: list[str] = []
    a, b, spare = _OWN[0], _OWN[1], _at(_SPARE_ALONG)
    for t in range(0, count, 2):
        for i in (t + 1, t):
            out += _schedule(lambda t: _at(64 * t, "r14"), i, _OWN)
            out += [f"vpaddd {4 * i}(%r15){{1to16}},{a},{a}"]
            out += [f"vmovdqa32 {a},{spare}"] if i > t else []
        out += [f"vpunpckhdq {spare},{a},{b}", f"vpunpckldq {spare},{a},{a}"]
        out += [f"vmovdqa32 {a},{_at(64 * t, 'r13')}", f"vmovdqa32 {b},{_at(64 * t + 64, 'r13')}"]
    return _strand(*out)


def _further(count: int) -> list[str]:
    return [f"add ${64 * count},%r13", f"add ${64 * count},%r14", f"add ${4 * count},%r15"]


def _stream_rounds() -> _Strand:
    """All rounds of two blocks of the stream."""
    out: _Strand = []
    for k in range(2):
        out += _strand("movdqa %xmm1,%xmm3", "movdqa %xmm2,%xmm4")
        for t in range(0, 64, 2):
            x, y = (1, 2) if t % 4 == 0 else (2, 1)
            out.append((f"movq {64 * t + 8 * k - 2048}(%r12),%xmm0", f"sha256rnds2 %xmm0,%xmm{x},%xmm{y}"))
        out += _strand("paddd %xmm3,%xmm1", "paddd %xmm4,%xmm2")
    return out


def _beside(*strands: _Strand) -> list[str]:
    """Their instructions, each strand as evenly spread as it can be; moves cost nothing."""
    placed = []
    for strand in strands:
        costs = [not some[-1].startswith(("vmov", "mov", "lea", "prefetch")) for some in strand]
        done = np.cumsum(costs) - np.array(costs) / 2
        placed += [(at / sum(costs), some) for at, some in zip(done, strand, strict=True)]
    return [line for _, some in sorted(placed, key=lambda item: item[0]) for line in some]


def _quarters(label: int, block: int, words: _Strand, made: int) -> list[str]:
    """One block of every lane and eight of the stream; ``words``: of its next blocks, in the first quarter."""
    first = _beside(_stream_rounds(), _strand(_turn_lanes(block), _lane_rounds(True)), words)
    return [
        *(f"movq {_CONSTANTS}(%rdi),%r10", *first, *_further(made)),
        *("add $64,%r10", "add $16,%r12", "mov $3,%eax", f"{label}:"),
        *_beside(_stream_rounds(), _lane_rounds(False), _next_words(6)),
        *(*_further(6), "add $64,%r10", "add $16,%r12", "dec %eax", f"jnz {label}b", *_lane_end()),
    ]


def _program() -> list[str]:
    """All of it. What is made in one turn of the loop is used in the next one; the last turn makes it in vain."""
    lanes = [(f"{64 * i}(%rax)", f"%zmm{16 + i}", _at(_SAVED + 64 * i)) for i in range(8)]
    make = ["lea 1024(%rdx),%r13", f"lea {_WORDS + 1024}(%r11),%r14", f"movq {_CONSTANTS}(%rdi),%r15", "add $64,%r15"]
    out = ["vzeroupper", f"movq {_UNITS}(%rdi),%rcx", f"movq {_LANES}(%rdi),%r8", "xor %r9d,%r9d"]
    out += [f"movq {_PLACE}(%rdi),%rsi", f"movq {_ROOM}(%rdi),%r11", f"movq {_STATES}(%rdi),%rax"]
    out += [line for at, x, saved in lanes for line in (f"vmovdqu32 {at},{x}", f"vmovdqa32 {x},{saved}")]
    out += [f"movq {_STATE}(%rdi),%rax", "movdqu (%rax),%xmm1", "movdqu 16(%rax),%xmm2", f"lea {_READY}(%r11),%rdx"]
    out += [*make, *_beside(_first_words()), "mov $8,%eax", "4:", *_beside(_next_words(6)), *_further(6)]
    out += ["dec %eax", "jnz 4b", ".p2align 6", "1:"]
    out += ["lea 2048(%rdx),%r12", f"lea {2 * _READY + 4096}(%r11,%r11),%rax", "sub %rdx,%rax", "mov %rax,%rdx"]
    out += ["xor %eax,%eax", "mov $1024,%ebx", "cmp $1,%rcx", "cmova %rbx,%rax", "add %rax,%rsi", *make]
    out += [
        *_quarters(2, 0, _first_words(), 0),
        *_quarters(3, 1, _next_words(12), 12),
        "add $128,%r9",
        "dec %rcx",
        "jnz 1b",
    ]
    out += [f"movq {_STATES}(%rdi),%rax", *(f"vmovdqu32 {x},{at}" for at, x, _ in lanes)]
    return [*out, f"movq {_STATE}(%rdi),%rax", "movdqu %xmm1,(%rax)", "movdqu %xmm2,16(%rax)"]


def _build_loop(builder: Any, numbers: Any) -> None:
    """The program, as one piece."""
    changed = [*("rax", "rbx", "rcx", "rdx", "rsi"), *(f"r{i}" for i in range(8, 16)), *(f"xmm{i}" for i in range(16))]
    changed += [*(f"zmm{i}" for i in range(16, 32)), "memory", "dirflag", "fpsr", "flags"]
    text = "\n".join(_program()).replace("$", "$$")
    constraints = ",".join(["{rdi}", *(f"~{{{name}}}" for name in changed)])
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), [numbers])


_loop = operation(_build_loop)


def _along(numbers: Any) -> None:
    _loop(numbers)


@cache
def loop_address() -> int:
    """Where the loop is, a function of the address of seven numbers; compiled when first needed: others cannot.

    The numbers, uint64: how often (at least once), and the addresses of the lanes' states uint32 [8, 16], of sixteen
    addresses where their bytes are, of the constants, the stream's state (in the order of `digests_one_kernel`), its
    bytes, and of a room of ROOM bytes that begins with a cache line. At SWAP in it, 64 bytes say how vpshufb reverses
    bytes. Each time is 16 blocks of the stream and 2 of every lane.
    """
    return address_of(_along, types.void, types.uint64)
