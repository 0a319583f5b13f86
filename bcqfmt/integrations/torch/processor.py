"""Products in 16 bits on processors without instructions for them."""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_SUPPORTED = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}
_lock = threading.Lock()
_users, _before = 0, True


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether torch has instructions of this processor for products in ``dtype``.

    Without them a product in 16 bits takes many times longer than in float32: a hundred times on a Neoverse-N1.
    """
    if dtype not in _SUPPORTED:
        return True
    if dtype == torch.float16 and platform.machine().lower() in ("aarch64", "arm64"):
        return False  # torch says that there are some, and takes 300 times as long as in float32 (2.13, Neoverse-N1)
    supported = getattr(torch.ops.mkldnn, _SUPPORTED[dtype], None)
    return supported is not None and bool(supported())


def dense_products(dtype: torch.dtype) -> AbstractContextManager[None]:
    """For products that torch computes in ``dtype``: without its warning where the processor has no bfloat16.

    On ARM torch offers such products to oneDNN all the same, warns with a C++ trace when that refuses, and computes
    them without it. Here they are not offered, and the bits are the same. The switch is one for the whole process.
    """
    if torch.compiler.is_compiling() or dtype != torch.bfloat16 or multiplies(dtype):
        return nullcontext()
    return _without_onednn()


@contextmanager
def _without_onednn() -> Iterator[None]:
    global _users, _before  # noqa: PLW0603 - several threads may be in here, the last one out restores the switch
    switch: Any = torch.backends.mkldnn
    with _lock:
        if not _users:
            _before, switch.enabled = switch.enabled, False
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                switch.enabled = _before
