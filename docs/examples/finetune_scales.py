"""Fine-tune the scales of quantized layers and save the result: ``python finetune_scales.py OUT``.

A small network is quantized to 2 bits, which costs accuracy. Then alpha and z of its planes learn to give the outputs
that it had before, a fraction of the numbers that it was made of; the planes themselves do not change. What comes out
is an ordinary BCQ folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import bcqfmt
from bcqfmt.integrations.torch import load_linears, tensors_of

GROUP = 32


def network() -> nn.Sequential:
    """64 inputs, 128 hidden, 16 outputs."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 16))


def two_bits(matrix: torch.Tensor) -> bcqfmt.BcqWeight:
    """Rounded to the nearest of four levels between the smallest and the largest number of a group."""
    groups = matrix.detach().numpy().reshape(matrix.shape[0], -1, GROUP)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = ((high - low) / 3).astype(np.float16)
    zero = np.clip(np.round(-low / scale), 0, 3)
    codes = np.clip(np.round(groups / scale) + zero, 0, 3).astype(np.uint8)
    return bcqfmt.BcqWeight.from_affine(
        codes.reshape(matrix.shape), scale[..., 0], zero[..., 0].astype(int), group_size=GROUP, bits=2
    )


def main(out: Path, steps: int = 200) -> dict[str, float]:
    """Quantize, save, load, tune, save, load again; the loss before, after, and of what was loaded again."""
    torch.manual_seed(0)
    teacher = network()
    x, fresh = torch.randn(2048, 64), torch.randn(512, 64)
    with torch.no_grad():
        wanted, expected = teacher(x), teacher(fresh)

    tensors = {name: value.detach().numpy() for name, value in teacher.named_parameters() if "bias" in name}
    tensors |= {f"{i}.weight": two_bits(teacher[i].weight) for i in (0, 2, 4)}
    start = out.with_name(out.name + "-start")
    bcqfmt.save(start, tensors)

    student = network()
    with bcqfmt.open(start) as checkpoint:
        load_linears(student, checkpoint, dense=True, trainable_scales=True)
    learned = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-3, weight_decay=0.0)
    found = {"before": nn.functional.mse_loss(student(fresh), expected).item()}
    for _ in range(steps):
        loss = nn.functional.mse_loss(student(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found["after"] = nn.functional.mse_loss(student(fresh), expected).item()

    bcqfmt.save(out, tensors_of(student))
    again = network()
    with bcqfmt.open(out) as checkpoint:
        load_linears(again, checkpoint, dense=True)  # now with the kernels
    with torch.no_grad():
        found["reloaded"] = nn.functional.mse_loss(again(fresh), expected).item()
    return found


if __name__ == "__main__":
    for name, value in main(Path(sys.argv[1])).items():
        print(f"loss {name:9}{value:.5f}")
