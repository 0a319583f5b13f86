"""New blocks for values that no type holds exactly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bcqfmt.converters import words

from .blocks import blocks_of


def q8_0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Blocks of Q8_0, uint8 [N, row bytes], for values [N, K]: the largest of 32 becomes 127, the others the nearest.

    Codes are rounded to the scale as it is stored, not to the one before its rounding to F16.
    """
    blocks = values.reshape(len(values), -1, 32)
    with np.errstate(all="ignore"):
        scale = (np.abs(blocks).max(axis=-1) / np.float32(127)).astype(np.float16)
        codes = np.rint(blocks / scale.astype(np.float32)[..., None])
        codes = np.clip(np.nan_to_num(codes, nan=0.0), -127, 127).astype(np.int16) + 128
    planes = words.codes_to_planes(codes.astype(np.uint8).reshape(values.shape), 8)
    made: npt.NDArray[np.uint8] = blocks_of("Q8_0", {"planes": planes, "scale": scale})
    return made
