"""Tokens per second on a GPU: float16 against BCQ of 4, 3 and 2 bits, CUDA graphs for both.

    tests/benchmarks/models/tokens_per_second.py [--out FILE.json] [--model llama-2-7b|smollm2-135m ...] [--eager]
        [--sequences 16 ...] [--context 64 ...] [--prompt 512 ...] [--joined] [--early] [--profile]

Models of Llama's architecture with random weights, made on the device: what a step costs does not depend on them. A
step takes one token and a position, writes keys and values into a cache of fixed length, and ends with the most likely
next token, which is the next step's input; it is captured once and replayed. ``--sequences``: as many such steps at
once instead, each at the end of ``--context`` tokens, all of which it attends to; ``--prompt``: a whole prompt of that
length instead, up to the token after it. The two differ in their linear layers only: `torch.nn.Linear` in float16, or
`BcqLinear` (bcq encoding, float16 scales and biases). The embedding and the output layer are float16 in both. What lies
between the products (norms, rotary positions, activation) is fused by torch.compile where that works, for both alike;
``--eager`` leaves it out. ``--joined``: everything also with the rows of q, k and v in one layer, those of gate and up
in another, as serving engines have them. ``--early``: steps also with kernels of torch.compile that begin before the
previous one ends and let the next one begin, as the products do, on both sides. ``--profile``: which kernels a step
consists of.

``--device cpu --model tiny`` runs the same code without a GPU and without a graph, to see that it works.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import multiprocessing
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

np.__dict__.setdefault("row_stack", np.vstack)  # numba-cuda asks for it when it is imported, numpy 2.5 has it no more


class Shape(NamedTuple):
    """A model of Llama's architecture; ``group``: columns that share scales."""

    hidden: int
    inner: int
    layers: int
    heads: int
    few: int
    head: int
    tokens: int
    group: int


SHAPES = {
    "llama-2-7b": Shape(4096, 11008, 32, 32, 32, 128, 32000, 128),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49152, 64),
    "tiny": Shape(64, 96, 2, 4, 2, 16, 128, 32),
}
LENGTH = 512  # positions of the cache
CONTEXT = 256  # tokens of each of several sequences
START = 128  # the first one that is measured; those before it count as read
STEPS, ROUNDS = 64, 7
KINDS = ("float16", "bcq 4", "bcq 3", "bcq 2", "affine 4")


def linears(shape: Shape, joined: bool = False) -> list[list[tuple[int, int]]]:
    """(out, in) of the products of a layer: q, k, v; o; gate, up; down. ``joined``: of each list one."""
    h, kv = shape.hidden, shape.few * shape.head
    found = [[(h, h), (kv, h), (kv, h)], [(h, h)], [(shape.inner, h)] * 2, [(h, shape.inner)]]
    return [[(sum(out for out, _ in some), some[0][1])] for some in found] if joined else found


def spec_of(kind: str, out: int, columns: int, group: int) -> Any:
    """What a weight of that kind and shape is."""
    from bcqfmt.weight.scheme import Scheme, Segment, WeightSpec

    encoding, bits = kind.split()
    if encoding == "bcq":
        segment = Segment(encoding="bcq", bits=int(bits), group_size=group, alpha="F16", bias="F16")
    else:
        segment = Segment(encoding="affine", bits=int(bits), group_size=group, scale="F16", zero=2 ** (int(bits) - 1))
    return WeightSpec(scheme=Scheme(segments=(segment,)), shape=(out, columns), dtype="F16", widths=(columns,))


def layer_of(kind: str, out: int, columns: int, group: int, device: str) -> Any:
    """A linear layer with random weights of the usual size, made on the device."""
    import torch

    from bcqfmt.integrations.torch import BcqLinear

    if kind == "float16":
        dense = torch.nn.Linear(columns, out, bias=False, device=device, dtype=torch.float16)
        torch.nn.init.normal_(dense.weight, std=columns**-0.5)
        return dense
    layer = BcqLinear(spec_of(kind, out, columns, group), device=device)
    q, size = int(kind.split()[1]), columns**-0.5
    for name in layer.names:
        part = layer.get_buffer(name)
        if part.dtype == torch.int32:
            part.random_(-(2**31), 2**31 - 1)
            if columns % 32:  # padding is zero
                part[..., -1] &= (1 << columns % 32) - 1
        elif "alpha" in name:  # plane after plane half as large, all together of the usual size
            weights = 2.0 ** -torch.arange(1, q + 1, device=part.device, dtype=torch.float32)
            part.copy_((weights[:, None, None] * size * 1.7).expand(part.shape))
        elif "scale" in name:
            part.fill_(size * 3.4 / 2**q)
        else:
            part.normal_(std=size / 50)
    return layer


@functools.lru_cache(maxsize=len(KINDS))
def layers_of(shape: Shape, kind: str, device: str, joined: bool) -> Any:
    """The linear layers of a model, made and prepared once for all cases."""
    import torch

    torch.manual_seed(0)
    parts, group = linears(shape, joined), shape.group
    return [[[layer_of(kind, *size, group, device) for size in some] for some in parts] for _ in range(shape.layers)]


class Between:
    """What lies between the products of a step; the same for every kind of layer."""

    def __init__(self, shape: Shape, *, fused: bool, early: bool) -> None:
        import torch
        from torch.nn.functional import silu

        heads, few, head = shape.heads, shape.few, shape.head

        def norm(x: Any, weight: Any) -> Any:
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight

        def add_norm(x: Any, y: Any, weight: Any) -> Any:
            total = x + y
            return total, norm(total, weight)

        def turn(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, position: Any) -> Any:
            sequences, tokens = len(keys), len(position)

            def turned(x: Any, count: int) -> Any:
                x = x.view(sequences, tokens, count, head).transpose(1, 2)
                a, b = x[..., : head // 2], x[..., head // 2 :]
                c, s = cos[position], sin[position]
                return torch.cat([a * c - b * s, b * c + a * s], -1)

            keys.index_copy_(2, position, turned(k, few))
            values.index_copy_(2, position, v.view(sequences, tokens, few, head).transpose(1, 2))
            return turned(q, heads)

        def gate(a: Any, b: Any) -> Any:
            return silu(a) * b

        def make(function: Any) -> Any:
            return torch.compile(function, options={"triton.enable_pdl": early}) if fused else function

        torch.compiler.reset()  # kernels for the shapes of this case, whatever was measured before
        self.norm, self.add_norm, self.turn, self.gate = (make(function) for function in (norm, add_norm, turn, gate))


class Case(NamedTuple):
    """What a step is: ``sequences`` at once, each with ``prompt`` tokens more (one, or all from the first on).

    ``context``: the token is the last of so many; 0: its position grows from `START` on. ``early``: kernels between the
    products may begin before the previous one ends.
    """

    sequences: int = 1
    prompt: int = 1
    context: int = 0
    joined: bool = False
    early: bool = False


class Model:
    """Weights, cache, and one step."""

    def __init__(self, shape: Shape, kind: str, device: str, between: Between, case: Case) -> None:
        import torch

        self.layers = layers_of(shape, kind, device, case.joined)
        torch.manual_seed(0)
        self.shape, self.between, self.case, sequences, prompt = shape, between, case, case.sequences, case.prompt
        length = case.context or max(prompt, LENGTH)
        real: Any = {"device": device, "dtype": torch.float16}
        self.norms = torch.ones(2 * shape.layers + 1, shape.hidden, **real)
        self.embedding = torch.randn(shape.tokens, shape.hidden, **real)
        self.output = torch.randn(shape.tokens, shape.hidden, **real) * shape.hidden**-0.5
        self.keys = torch.randn(shape.layers, sequences, shape.few, length, shape.head, **real)
        self.values = torch.randn(shape.layers, sequences, shape.few, length, shape.head, **real)
        angles = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(0, shape.head, 2) / shape.head)
        self.cos, self.sin = angles.cos().to(**real), angles.sin().to(**real)
        self.places = torch.arange(length, device=device)
        self.token = torch.arange(sequences * prompt, device=device) % shape.tokens
        self.position = torch.arange(prompt, device=device)
        self.restart()

    def restart(self) -> None:
        """Back to the first position that is measured."""
        if self.case.prompt == 1:
            self.position.fill_(self.case.context - 1 if self.case.context else START)

    def step(self) -> None:
        """One token more: ``token`` and ``position`` become those of the next step."""
        from torch.nn.functional import linear, scaled_dot_product_attention

        shape, between, (sequences, prompt, context, *_) = self.shape, self.between, self.case
        seen = (self.places <= self.position)[None, None, None] if prompt == 1 and not context else None
        x = self.embedding[self.token]
        y = between.norm(x, self.norms[0])
        for i, (attended, (o,), gated, (down,)) in enumerate(self.layers):
            keys, values = self.keys[i], self.values[i]
            q, k, v = _products(attended, y, [shape.hidden] + [shape.few * shape.head] * 2)
            query = between.turn(q, k, v, self.cos, self.sin, keys, values, self.position)
            many = shape.heads // shape.few
            if many > 1:
                keys, values = (t[:, :, None].expand(-1, -1, many, -1, -1).flatten(1, 2) for t in (keys, values))
            found = scaled_dot_product_attention(query, keys, values, attn_mask=seen, is_causal=prompt > 1)
            found = found.transpose(1, 2).reshape(len(x), -1)
            x, y = between.add_norm(x, o(found), self.norms[2 * i + 1])
            gate, up = _products(gated, y, [shape.inner] * 2)
            x, y = between.add_norm(x, down(between.gate(gate, up)), self.norms[2 * i + 2])
        last = linear(y.view(sequences, prompt, -1)[:, -1], self.output).argmax(-1)
        if prompt == 1:
            self.token.copy_(last)
            self.position.add_(0 if context else 1)

    def bytes(self) -> int:
        """Of the linear layers."""
        layers = [layer for row in self.layers for some in row for layer in some]
        return sum(t.numel() * t.element_size() for layer in layers for t in layer.state_dict().values())


def _products(layers: list[Any], y: Any, sizes: list[int]) -> Any:
    """Of several layers, or of one with the rows of all of them."""
    return [layer(y) for layer in layers] if len(layers) > 1 else layers[0](y).split(sizes, -1)


def seconds_per_step(model: Model) -> float:
    """Median over several replays of many steps; on a CPU the steps are simply taken."""
    import torch

    if model.token.device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(3):
            model.step()
        return (time.perf_counter() - begin) / 3
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(3):
            model.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, stream=stream):
        model.step()
    times, steps = [], STEPS // (8 if model.case.prompt > 1 else 2 if model.case.context else 1)
    for _ in range(ROUNDS):
        model.restart()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(steps):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / steps)
    return statistics.median(times)


def print_profile(model: Model) -> None:
    """The kernels that take most of a step, which is not captured for this."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as seen:
        model.step()
        torch.cuda.synchronize()
    found = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    print(f"    {sum(event.self_device_time_total for event in found):8.0f} us in all kernels")
    for event in found[:12]:
        print(f"    {event.self_device_time_total:8.0f} us in {event.count:4d} launches  {event.key[:80]}", flush=True)


def check(shape: Shape, kind: str, device: str, count: int = 1) -> tuple[float, str]:
    """Relative error of one layer against the product with its decoded values, and the kernel that was used."""
    import torch

    from bcqfmt.integrations.torch import linear_op
    from bcqfmt.kernels import matmul

    layer = layer_of(kind, shape.inner, shape.hidden, shape.group, device)
    x = torch.randn(count, shape.hidden, device=device).half()
    y = layer(x).double()
    wanted = x.double() @ layer.values(torch.float32).double().T
    error = float((y - wanted).norm() / wanted.norm())
    if device == "cpu":
        return error, "CPU"
    made = linear_op._cached(layer.parts(), linear_op._on_gpu, layer.text, 0, 0)
    return error, f"{type(made).__name__}, {matmul.path_of(made, count).kernel}"


def compiled(job: tuple[str, int, int, int, int]) -> float:
    """Compile the kernel for one shape into the cache; seconds. 0 rows: the one of `bits`, the same for all."""
    from bcqfmt.kernels.bits import kernel_of
    from bcqfmt.kernels.bits.layout import BitLayout
    from bcqfmt.kernels.bits.shape import Wanted, product_shape
    from bcqfmt.kernels.gemm import parts_of
    from bcqfmt.kernels.gemm.kernel import gemm_kernel
    from bcqfmt.kernels.gemm.layout import GemmLayout
    from bcqfmt.kernels.gemm.shape import gemm_shape
    from bcqfmt.kernels.runtime.cubins import code_of

    kind, rows, columns, group, count = job
    formula, bits = kind.split()[0], int(kind.split()[1])
    begin = time.perf_counter()
    if rows:
        layout = GemmLayout(bits, columns, group, formula, "F16")
        kernel = gemm_kernel(gemm_shape(layout, parts_of(count, (rows, columns))[0][1], rows, 1, 1, "wgmma"))
    else:
        kernel = kernel_of(product_shape(Wanted(BitLayout(bits, columns, group, formula, "F16"), 1, 1, 1)))
    code_of(kernel, (9, 0))
    return time.perf_counter() - begin


def takes_gemm(kind: str, columns: int, group: int, count: int) -> bool:
    """Whether `matmul` takes ``gemm`` for so many vectors; one or many, as all cases here."""
    from bcqfmt.kernels.gemm.layout import GemmLayout
    from bcqfmt.kernels.gemm.shape import few_alone

    formula, bits = kind.split()
    return count > 1 or few_alone(GemmLayout(int(bits), columns, group, formula, "F16"))


def compile_all(names: list[str], kinds: list[str], cases: list[Case]) -> None:
    """All kernels for these cases at once, in as many processes as there are cores."""
    jobs = {
        (kind, rows if takes_gemm(kind, columns, SHAPES[name].group, count) else 0, columns, SHAPES[name].group, count)
        for name in names
        for kind in kinds
        if kind != "float16"
        for case in cases
        for some in linears(SHAPES[name], case.joined)
        for rows, columns in some
        if (count := case.sequences * case.prompt)
    }
    begin = time.perf_counter()
    with ProcessPoolExecutor(min(15, len(jobs)), mp_context=multiprocessing.get_context("spawn")) as pool:
        slowest = max(pool.map(compiled, sorted(jobs)))
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - begin:.0f} s (slowest {slowest:.0f} s)", flush=True)


def measure(
    name: str, kinds: list[str], device: str, fused: bool, case: Case, profiled: bool = False
) -> list[dict[str, Any]]:
    """A row for every kind."""
    import torch

    shape, rows = SHAPES[name], []
    between = Between(shape, fused=fused, early=case.early)
    for kind in kinds:
        count = case.sequences * case.prompt
        error, path = (0.0, "torch") if kind == "float16" else check(shape, kind, device, count)
        begin = time.perf_counter()
        model = Model(shape, kind, device, between, case)
        taken = seconds_per_step(model)
        row = {
            "model": name, "weights": kind, **case._asdict(), "cache": len(model.places),
            "milliseconds": taken * 1e3, "tokens_per_second": count / taken,
            "linear_bytes": model.bytes(), "error": error, "kernel": path,
        }  # fmt: skip
        row["speedup"] = rows[0]["milliseconds"] / row["milliseconds"] if rows else 1.0
        rows.append(row)
        print(
            f"{name:<14} {kind:<9} {tuple(case)} {row['milliseconds']:8.3f} ms "
            f"{row['tokens_per_second']:8.1f} tokens/s "
            f"{row['speedup']:5.2f}x  {row['linear_bytes'] / 1e9:6.2f} GB  error {error:.1e}  {path}  "
            f"(set up and measured in {time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
        if profiled:
            print_profile(model)
        del model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def can_fuse(device: str) -> bool:
    """Whether torch.compile works here: it needs Triton and a C compiler."""
    import torch

    if device == "cpu":
        return False
    try:
        found = torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
        return bool((found == 3).all())
    except Exception as fault:  # noqa: BLE001 - whatever is missing, the steps run without it
        print(f"torch.compile does not work here ({type(fault).__name__}); nothing is fused", flush=True)
        return False


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Tokens per second: float16 against BCQ, CUDA graphs for both.")
    parser.add_argument("--model", action="append", choices=list(SHAPES), help="may be given several times")
    parser.add_argument("--weights", action="append", choices=KINDS, help="by default all; float16 comes first")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--sequences", type=int, action="append", default=[], help="sequences of a step")
    parser.add_argument("--context", type=int, action="append", default=[], help=f"their tokens, {CONTEXT} by default")
    parser.add_argument("--prompt", type=int, action="append", default=[], help="tokens of a prompt")
    parser.add_argument("--joined", action="store_true", help="also with joined layers")
    parser.add_argument("--eager", action="store_true", help="do not fuse what lies between the products")
    parser.add_argument("--early", action="store_true", help="single tokens also with torch's option triton.enable_pdl")
    parser.add_argument("--profile", action="store_true", help="print which kernels a step consists of")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    given = parser.parse_args()
    names = given.model or ["llama-2-7b", "smollm2-135m"]
    kinds = ["float16", *(kind for kind in given.weights or KINDS if kind != "float16")]
    cases = [Case(count, 1, context) for count in given.sequences for context in given.context or [CONTEXT]]
    cases = cases + [Case(1, count) for count in given.prompt] or [Case()]
    cases = [
        case._replace(joined=joined, early=early)
        for case in cases
        for joined in [False, True][: 1 + given.joined]
        for early in [False, True][: 1 + (given.early and case.prompt == 1)]
    ]
    import torch

    if given.device == "cuda":
        compile_all(names, kinds, cases)
    fused = not given.eager and can_fuse(given.device)
    rows = [
        row
        for name in names
        for case in cases
        for row in measure(name, kinds, given.device, fused, case, given.profile)
    ]
    about = {
        "device": torch.cuda.get_device_name(0) if given.device == "cuda" else platform.machine(),
        "torch": torch.__version__, "python": platform.python_version(), "fused": fused,
        "steps": STEPS, "rounds": ROUNDS, "rows": rows,
    }  # fmt: skip
    if given.out is not None:
        given.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(f"\n{about['device']}, torch {about['torch']}, " + ("fused by torch.compile" if fused else "not fused"))
    print("| model | weights | ms | tokens/s | against float16 |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['weights']} | {row['milliseconds']:.2f} | {row['tokens_per_second']:.0f} | "
            f"{row['speedup']:.2f}x |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
