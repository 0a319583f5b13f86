"""The caps of the specification (section 11), nothing else; a test compares the two."""

from __future__ import annotations

from typing import Final

MAX_HEADER_BYTES: Final = 25_000_000
SHARD_HEADER_BYTES: Final = 20_000_000
MAX_TENSORS: Final = 200_000
MAX_NAME_BYTES: Final = 512
MAX_METADATA_KEYS: Final = 1000
MAX_WEIGHT_NAME_BYTES: Final = 480
MAX_JSON_DEPTH: Final = 16
MAX_CONFIG_DEPTH: Final = 100
MAX_JSON_INTEGER: Final = 2**53 - 1
MAX_RANK: Final = 16
MAX_ELEMENTS: Final = 2**48
MAX_DIM: Final = 2**31 - 1
MAX_WEIGHT_BITS: Final = 2**40
MAX_SEGMENTS: Final = 16
MAX_CONFIG_BYTES: Final = 16_000_000
MAX_JSON_FILE_BYTES: Final = 100_000_000
MAX_JSON_FILE_ITEMS: Final = 2_000_000
OUTLIER_SHARE: Final = 8
