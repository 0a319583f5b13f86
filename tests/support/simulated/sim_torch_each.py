"""Every torch operator in the simulator, where host tensors stand for device tensors."""

from __future__ import annotations

from unittest import mock

import torch

from bcqfmt.integrations.torch.ops import atom, fast
from bcqfmt.kernels.atom import operands as ao
from bcqfmt.kernels.atom import w4a4 as w4
from bcqfmt.kernels.runtime import device
from products import op_samples
from products.op_samples import Results
from simulated.sim_atom import activations, atom_weight


def _bytes(results: Results) -> list[bytes]:
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for part in results]


def same(name: str, capability: tuple[int, int] = (8, 0)) -> tuple[list[bytes], list[bytes]]:
    """What the operator gives on a GPU of that capability, and what the kernel gives when it is called directly."""
    sample = op_samples.ALL[name]("cpu", False)
    before = _bytes((sample.x,))
    with mock.patch.object(device, "capability", return_value=capability):
        found = sample.operator(sample.x), sample.direct(sample.x)
    assert [(part.dtype, part.shape) for part in found[0]] == [(part.dtype, part.shape) for part in found[1]]
    assert all(bool(part.any()) for part in found[0])
    assert _bytes((sample.x,)) == before
    return _bytes(found[0]), _bytes(found[1])


def checked(name: str) -> dict[str, str]:
    """What torch says of the operator."""
    function, arguments = op_samples.arguments_of(name)
    said: dict[str, str] = torch.library.opcheck(function, (), arguments)
    return said


def traced(name: str) -> tuple[list[bytes], list[bytes], int]:
    """Results inside a program that torch.export traced and outside of it; how often the operator is a node of it."""
    sample = op_samples.ALL[name]("cpu", False)

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Results:
            return sample.operator(x)

    program = torch.export.export(Layer(), (sample.x,))
    nodes = [str(node.target) for node in program.graph.nodes].count(f"bcqfmt.{sample.name}.default")
    return _bytes(program.module()(sample.x)), _bytes(sample.operator(sample.x)), nodes


def fused_outliers() -> tuple[list[bytes], list[bytes]]:
    """A product to which outliers are added in place: one compiled graph without breaks, and step by step."""
    _, weight = op_samples.arguments_of("bit_gemv")
    indptr = torch.tensor([0, 1, 1, 2, 2, 2, 3], dtype=torch.int32)
    indices, values = torch.tensor([3, 39, 0], dtype=torch.int32), torch.tensor([1.5, -2.0, 100.0])

    def product(x: torch.Tensor) -> Results:
        y = torch.ops.bcqfmt.bit_gemv(**{**weight, "x": x})
        return (fast.csr_outliers(y, indptr, indices, values, x) * 2,)

    x = torch.ones(1, 40, dtype=torch.float16)
    found = torch.compile(product, backend="aot_eager", fullgraph=True)(x)
    plain = torch.ops.bcqfmt.bit_gemv(**{**weight, "x": x})
    assert not torch.equal(found[0], plain * 2)
    return _bytes(found), _bytes(product(x))


def any_number_of_tokens() -> tuple[list[bytes], list[bytes]]:
    """Quantization and product, exported with 9 tokens and run with 10: inside of the program and outside.

    Up to 8 tokens are one tile, which torch takes for a case of its own.
    """
    weight = w4.atom_to_device(ao.pack_w4(atom_weight(5, 2)), "cpu")

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return atom.w4a4(atom.quantize_reorder(x, weight.perm), weight)

    first, second = (torch.from_numpy(activations(tokens, 2, "F16")) for tokens in (9, 10))
    dynamic = ({0: torch.export.Dim("tokens", min=9, max=1000)},)
    program = torch.export.export(Layer(), (first,), dynamic_shapes=dynamic)
    return _bytes((program.module()(second),)), _bytes((Layer()(second),))


def wrong_places(name: str, which: str) -> list[tuple[int, ...]]:
    """Shapes of what comes out, as on sm_90; the simulator refuses every access beyond an array."""
    function, arguments = op_samples.arguments_of(name)
    with mock.patch.object(device, "capability", return_value=(9, 0)):
        made = op_samples.wrong_places(function, arguments, which)
    return [tuple(part.shape) for part in ((made,) if isinstance(made, torch.Tensor) else made or ())]
