"""Binary-coding quantization the way it is published for torch: what the speed of `bcq` is compared with.

Written anew from the steps that are described: a greedy start, then in turn scales by least squares (conjugate
gradients on the normal equations of all groups at once, then sizes in falling order) and signs by bisection in the
sorted sums of +-scales. A step is one tensor operation over all weights. Without a bias, as published.
"""

from __future__ import annotations

import itertools
from typing import Any


def quantize(groups: Any, bits: int, rounds: int) -> tuple[Any, Any]:
    """groups [N, g] float32 to scales [N, q] and signs [N, g, q]."""
    scales, signs = greedy(groups, bits)
    for _ in range(rounds):
        turned = signs.transpose(1, 2)
        scales = conjugate_gradients(turned.bmm(signs), turned.bmm(groups[:, :, None])[:, :, 0], scales)
        scales = scales.abs().sort(dim=1, descending=True).values
        signs = nearest(groups, scales)
    return scales, signs


def greedy(groups: Any, bits: int) -> tuple[Any, Any]:
    """Plane by plane: the signs of what is left and its mean size."""
    import torch

    rest = groups.clone()
    scales, signs = [], []
    for _ in range(bits):
        scale, sign = rest.abs().mean(dim=1), rest.sign()
        rest -= scale[:, None] * sign
        scales.append(scale)
        signs.append(sign)
    return torch.stack(scales, 1), torch.stack(signs, 2)


def conjugate_gradients(matrix: Any, right: Any, start: Any) -> Any:
    """matrix [N, q, q], right [N, q]: as many steps as there are unknowns."""
    import torch

    solution = start.clone()
    rest = right - torch.einsum("nij,nj->ni", matrix, solution)
    step, size = rest.clone(), rest.square().sum(1)
    for _ in range(matrix.shape[1]):
        along = torch.einsum("nij,nj->ni", matrix, step)
        length = size / ((step * along).sum(1) + 1e-8)
        solution += length[:, None] * step
        rest -= length[:, None] * along
        before, size = size, rest.square().sum(1)
        step = rest + (size / (before + 1e-8))[:, None] * step
    return solution


def nearest(groups: Any, scales: Any) -> Any:
    """Signs [N, g, q] of the nearest sum: q steps of bisection, each a gather."""
    import torch

    bits = scales.shape[1]
    patterns = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=bits)))
    levels, order = (scales @ patterns.T).sort(dim=1)
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    place = torch.zeros(groups.shape, dtype=torch.long)
    for bit in reversed(range(bits)):
        above = groups > middles.gather(1, place + (2**bit - 1))
        place += above.long() << bit
    return patterns[order.gather(1, place)]


def error_of(groups: Any, scales: Any, signs: Any) -> float:
    """Sum of squared errors."""
    return float((signs.bmm(scales[:, :, None])[:, :, 0] - groups).double().square().sum())
