"""Calls of torch operators that must be refused with BCQ-E552: name -> (operator, what differs, words of the message).

Everything else is in order. A function gets the argument as it was.
"""

from __future__ import annotations

from typing import Any

import torch

from products import op_samples

Cases = dict[str, tuple[str, dict[str, Any], str]]

_ALL_BITS = "bit_gemv with everything"
_ALL_MIXED = "mixed_gemv with everything"


def _first(change: Any) -> Any:
    """The change for the first tensor of a list."""
    return lambda tensors: [change(tensors[0]), *tensors[1:]]


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def _misplaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same content, at an address that is no multiple of 16."""
    room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype)
    start = next(k for k in range(16) if room[k:].data_ptr() % 16)
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def _shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1].contiguous()


FAST: Cases = {
    "planes that are short": ("bit_gemv", {"planes": _first(_shorter)}, "planes of segment 0 has shape"),
    "planes of 64 bits": ("bit_gemv", {"planes": _first(torch.Tensor.long)}, "planes of segment 0 has dtype I64"),
    "planes with strides": ("bit_gemv", {"planes": _first(_strided)}, "planes of segment 0 is not contiguous"),
    "planes at an odd address": ("bit_gemv", {"planes": _first(_misplaced)}, "multiple of 16"),
    "planes of two dimensions": ("bit_gemv", {"planes": _first(lambda p: p[None])}, "planes of segment 0 has shape"),
    "no planes": ("bit_gemv", {"planes": []}, "lists of 0, 1, 1, 1, 1, 1, 1 entries"),
    "planes for two segments": ("bit_gemv", {"planes": lambda p: p * 2}, "one entry per segment"),
    "numbers that are short": ("bit_gemv", {"numbers": _first(_shorter)}, "numbers of segment 0 has shape"),
    "numbers as floats": ("bit_gemv", {"numbers": _first(torch.Tensor.float)}, "numbers of segment 0 has dtype F32"),
    "numbers with strides": ("bit_gemv", {"numbers": _first(_strided)}, "numbers of segment 0 is not contiguous"),
    "numbers of another type": ("bit_gemv", {"number_types": "F32"}, "numbers of segment 0 has shape"),
    "numbers of no type": ("bit_gemv", {"number_types": "F64"}, "numbers of 'F64'"),
    "another formula": ("bit_gemv", {"formulas": "affine"}, "numbers of segment 0 has shape"),
    "no formula": ("bit_gemv", {"formulas": "float-zero"}, "formula 'float-zero'"),
    "more rows than planes": ("bit_gemv", {"rows": 17}, "planes of segment 0 has shape"),
    "no rows": ("bit_gemv", {"rows": 0}, "0 rows"),
    "nine planes": ("bit_gemv", {"bits": [9]}, "9 planes of 40 columns"),
    "no planes in a segment": ("bit_gemv", {"bits": [0]}, "0 planes of 40 columns"),
    "no columns": ("bit_gemv", {"widths": [0]}, "planes of 0 columns"),
    "columns of several chunks": ("bit_gemv", {"widths": [300]}, "planes of segment 0 has shape"),
    "more columns than x": ("bit_gemv", {"widths": [41]}, "x has shape [1, 40]"),
    "groups of 24": ("bit_gemv", {"group_sizes": [24]}, "groups of 24"),
    "groups of 0": ("bit_gemv", {"group_sizes": [0]}, "groups of 0"),
    "groups below zero": ("bit_gemv", {"group_sizes": [-128]}, "groups of -128"),
    "nine vectors": ("bit_gemv", {"x": torch.ones(9, 40)}, "9 vectors"),
    "no vector": ("bit_gemv", {"x": torch.ones(0, 40)}, "0 vectors"),
    "x in float64": ("bit_gemv", {"x": torch.ones(1, 40, dtype=torch.float64)}, "x has dtype F64"),
    "x with strides": ("bit_gemv", {"x": _strided}, "x is not contiguous"),
    "x at an odd address": ("bit_gemv", {"x": _misplaced}, "x starts at an address"),
    "perm that is short": (_ALL_BITS, {"perm": _shorter}, "perm has shape"),
    "perm of 64 bits": (_ALL_BITS, {"perm": torch.Tensor.long}, "perm has dtype I64"),
    "an addend of another shape": (_ALL_BITS, {"addend": torch.ones(1, 9)}, "addend has shape"),
    "an addend in float16": (_ALL_BITS, {"addend": torch.Tensor.half}, "addend has dtype F16"),
    "units that are short": ("mixed_gemv", {"units": _shorter}, "units has shape"),
    "units of 64 bits": ("mixed_gemv", {"units": torch.Tensor.long}, "units has dtype I64"),
    "units with strides": ("mixed_gemv", {"units": _strided}, "units is not contiguous"),
    "units at an odd address": ("mixed_gemv", {"units": _misplaced}, "multiple of 16"),
    "one unit more": ("mixed_gemv", {"fours": 2}, "units has shape"),
    "no units": ("mixed_gemv", {"fours": 0}, "0 units of 256 columns, 0 of 128"),
    "units below zero": ("mixed_gemv", {"twos": -1, "fours": 4}, "-1 units"),
    "rows of another tile": ("mixed_gemv", {"rows": 17}, "units has shape"),
    "no rows at all": ("mixed_gemv", {"rows": 0}, "0 x 32"),
    "more columns than units": ("mixed_gemv", {"columns": 129}, "5 x 129"),
    "fewer columns than x": ("mixed_gemv", {"columns": 31}, "x has shape"),
    "places that are short": ("mixed_gemv", {"perm": _shorter}, "perm has shape"),
    "places of 64 bits": ("mixed_gemv", {"perm": torch.Tensor.long}, "perm has dtype I64"),
    "three vectors": ("mixed_gemv", {"x": torch.ones(3, 32)}, "3 vectors"),
    "outliers without tensors": ("mixed_gemv", {"count": 3, "entry": 4}, "without their tensors"),
    "outliers of fewer bytes than none": ("mixed_gemv", {"most": -16}, "at least 0"),
    "a tile without bytes of outliers": (_ALL_MIXED, {"most": 0}, "at least 16"),
    "outliers of 6 bytes": (_ALL_MIXED, {"entry": 6}, "of 6 bytes"),
    "outliers of 8 bytes": (_ALL_MIXED, {"entry": 8}, "outliers has shape"),
    "no outliers": (_ALL_MIXED, {"count": 0}, "0 outliers"),
    "many outliers": (_ALL_MIXED, {"count": 1000}, "outliers has shape"),
    "outliers without rows": (_ALL_MIXED, {"indptr": None}, "without their tensors"),
    "outlier rows that are short": (_ALL_MIXED, {"indptr": _shorter}, "outlier rows has shape"),
    "outlier rows of 64 bits": (_ALL_MIXED, {"indptr": torch.Tensor.long}, "outlier rows has dtype I64"),
    "outliers with strides": (_ALL_MIXED, {"entries": _strided}, "outliers is not contiguous"),
    "bits and outliers without tensors": ("bit_gemv", {"count": 3, "entry": 4}, "without their tensors"),
    "bits and a tile without bytes of outliers": (_ALL_BITS, {"most": 0}, "at least 16"),
    "bits and entries without rows": ("bit_gemv", {"entries": torch.zeros(4, dtype=torch.int32)}, "without their"),
    "bits and outliers of 8 bytes": (_ALL_BITS, {"entry": 8}, "outliers has shape"),
    "bits and outlier rows that are short": (_ALL_BITS, {"indptr": _shorter}, "outlier rows has shape"),
    "row ends that are short": ("csr_outliers", {"indptr": _shorter}, "indptr has shape"),
    "columns of 64 bits": ("csr_outliers", {"indices": torch.Tensor.long}, "indices has dtype I64"),
    "values that are short": ("csr_outliers", {"values": _shorter}, "values has shape"),
    "values in float64": ("csr_outliers", {"values": torch.Tensor.double}, "values has dtype F64"),
    "y of another batch": ("csr_outliers", {"y": _shorter}, "y has shape"),
    "y with strides": ("csr_outliers", {"y": _strided}, "y is not contiguous"),
    "y of integers": ("csr_outliers", {"y": torch.Tensor.int}, "y has dtype I32"),
}

ATOM: Cases = {
    "x of 200 channels": ("quantize_reorder", {"x": torch.ones(3, 200)}, "multiple of 128"),
    "x of three dimensions": ("quantize_reorder", {"x": lambda x: x[None]}, "x has shape"),
    "x with strides": ("quantize_reorder", {"x": _strided}, "x is not contiguous"),
    "perm that is short": ("quantize_reorder", {"perm": _shorter}, "perm has shape"),
    "perm of 64 bits": ("quantize_reorder", {"perm": torch.Tensor.long}, "perm has dtype I64"),
    "clip of 0": ("quantize_reorder", {"clip": 0.0}, "clip 0"),
    "an unknown rule": ("quantize_reorder", {"rule": "nearest"}, "rule 'nearest'"),
    "gamma in float32": ("rmsnorm_reorder_quant", {"gamma": torch.Tensor.float}, "gamma has dtype F32"),
    "gamma that is short": ("rmsnorm_reorder_quant", {"gamma": _shorter}, "gamma has shape"),
    "eps of 2": ("rmsnorm_reorder_quant", {"eps": 2.0}, "eps = 2"),
    "codes of two dimensions": ("w4a4", {"codes": lambda c: c[0]}, "codes of shape [2, 256] for 3 tokens"),
    "codes of fewer groups": ("w4a4", {"codes": lambda c: c[:, :1].contiguous()}, "activations of 128 channels"),
    "codes of 64 bits": ("w4a4", {"codes": torch.Tensor.long}, "codes has dtype I64"),
    "more tokens than codes": ("w4a4", {"tokens": 9}, "codes has shape"),
    "tokens below zero": ("w4a4", {"tokens": -3}, "for -3 tokens"),
    "scales that are short": ("w4a4", {"scale": _shorter}, "scale has shape"),
    "scales in float16": ("w4a4", {"scale": torch.Tensor.half}, "scale has dtype F16"),
    "words of fewer rows": ("w4a4", {"words": _shorter}, "words has shape"),
    "words with strides": ("w4a4", {"words": _strided}, "words is not contiguous"),
    "words at an odd address": ("w4a4", {"words": _misplaced}, "multiple of 16"),
    "weight scales that are short": ("w4a4", {"weight_scale": _shorter}, "weight scale has shape"),
    "a perm of two dimensions": ("w4a4", {"perm": lambda p: p[None]}, "perm has shape"),
    "channels that are not a group": ("w4a4", {"perm": _shorter}, "a weight of 5 x 255"),
    "few tickets": ("w4a4", {"tickets": _shorter}, "tickets has shape"),
    "more rows than words": ("w4a4", {"out": 33}, "words has shape"),
    "no rows": ("w4a4", {"out": 0}, "a weight of 0 x 256"),
    "a result in float64": ("w4a4", {"dtype": torch.float64}, "dtype float64"),
    "keys of 40 tokens": ("quantize_kv", {"keys": torch.zeros(1, 1, 40, 8, dtype=torch.int32)}, "multiples of 32"),
    "keys of 64 bits": ("quantize_kv", {"keys": torch.Tensor.long}, "keys has dtype I64"),
    "keys with strides": ("quantize_kv", {"keys": _strided}, "keys is not contiguous"),
    "parameters of another shape": ("quantize_kv", {"key_parameters": lambda p: p[0]}, "key parameters has shape"),
    "k of another width": ("quantize_kv", {"k": lambda k: k[..., :32].contiguous()}, "k has shape"),
    "v in float32": ("quantize_kv", {"v": torch.Tensor.float}, "v has dtype F32"),
    "starts of 64 bits": ("quantize_kv", {"starts": torch.Tensor.long}, "starts has dtype I64"),
    "starts for two": ("quantize_kv", {"starts": lambda s: s.repeat(2)}, "starts has shape"),
    "values of another shape": ("decode_attention", {"values": lambda v: v.repeat(1, 1, 2, 1)}, "values has shape"),
    "no query heads": ("decode_attention", {"q": lambda q: q[:, :0]}, "0 query heads"),
    "q in float64": ("decode_attention", {"q": torch.Tensor.double}, "q has dtype F64"),
    "lengths of 64 bits": ("decode_attention", {"lengths": torch.Tensor.long}, "lengths has dtype I64"),
    "an infinite scale": ("decode_attention", {"scale": float("inf")}, "scale = inf"),
    "no splits": ("decode_attention", {"splits": 0}, "0 splits"),
}


def refused(case: str, cases: str) -> None:
    """Make the call of a case of ``FAST`` or ``ATOM``."""
    name, changes, _ = {"FAST": FAST, "ATOM": ATOM}[cases][case]
    function, arguments = op_samples.arguments_of(name)
    changed = {key: change(arguments[key]) if callable(change) else change for key, change in changes.items()}
    function(**{**arguments, **changed})
