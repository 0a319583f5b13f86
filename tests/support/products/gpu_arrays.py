"""Tensors on the GPU with guards around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_GUARD = 1024  # bytes before and after
_PATTERN = 0xA5


def guarded(shape: tuple[int, ...], dtype: torch.dtype, fill: int) -> tuple[torch.Tensor, Callable[[], bool]]:
    """A tensor whose bytes are all ``fill``, and whether the bytes around it are still what they were."""
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    room = torch.full((size + 2 * _GUARD,), _PATTERN, dtype=torch.uint8, device="cuda")
    inside = room[_GUARD : _GUARD + size]
    inside.fill_(fill)

    def intact() -> bool:
        return bool((room[:_GUARD] == _PATTERN).all() and (room[_GUARD + size :] == _PATTERN).all())

    return inside.view(dtype).reshape(shape), intact


def twice(shape: tuple[int, ...], dtype: torch.dtype, run: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Run into two differently filled buffers; the same bits, the guards untouched."""
    found = []
    for fill in (0x00, 0xFF):
        out, intact = guarded(shape, dtype, fill)
        run(out)
        torch.cuda.synchronize()
        assert intact(), "bytes beside the result were written"
        found.append(out)
    assert torch.equal(found[0].view(torch.uint8), found[1].view(torch.uint8)), "two runs differ"
    return found[0]


def to_gpu(array: Any) -> torch.Tensor:
    """A numpy array on the GPU: words as int32, bfloat16 as such."""
    from bcqfmt.kernels.runtime import device

    tensor: torch.Tensor = device.upload(array, "cuda")
    return tensor
