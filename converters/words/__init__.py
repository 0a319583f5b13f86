"""Words of every source layout to codes or bit planes and back: exact for any bits, in both directions.

Codes are ``uint8 [N, K]``; planes are ``uint32 [bits, N, ceil(K/32)]``, plane 0 the most significant (specification,
section 6.2); words are 32-bit integers, signed or not, taken as bit containers. LE(bits) is the stream of section 6.1.

Bits that a layout has and the codes do not have (padding after the last code, unused top bits of slots and of HQQ's
3-bit words) are dropped when words are read and zero when they are written; bits of a code above ``bits`` are ignored.
Everything else survives the round trip bit for bit, so ``pack(unpack(words)) == words`` tests that the padding is zero.

============================  =======================================  =====================================
layout                        codes                                    planes, in one pass
============================  =======================================  =====================================
GPTQ weights                  ``stream_rows``                          ``gptq``
GPTQ zero points              ``stream_columns`` (gives [G, N])
gptq_p, its zero points       ``planar_columns``                       ``planar``
AWQ GEMM, zero points too     ``awq_gemm``                             ``awq``
AWQ GEMV, zero points too     ``stream_columns``                       ``columns``
AWQ GEMV-fast, llm-awq                                                 ``gemv_fast``
compressed-tensors            ``stream_columns``, older ``slots``      ``columns``
its zero points               ``stream_rows`` (gives [G, N])
HQQ                           ``hqq``
AnyBCQ                                                                 ``anybcq``
fields of GGUF blocks                                                  ``field_to_planes``, its inverse
============================  =======================================  =====================================

Each name stands for two functions, ``NAME_to_codes`` and ``codes_to_NAME`` (or planes). All take ``threads``: the rows
are split among them, and the compiled loop releases the GIL. Importing this package loads numba.

From top to bottom: `codes`, `planes` and `hqq` have the functions; `runs` says where the words of a layout lie and runs
the loop; `bit_programs` says how bits move; `loop` is compiled; `arrays` checks and pads; `buffers` reuses memory.
Codes in blocks among other fields (`gguf`) have loops of their own, one for each program (`straight`).
"""

from __future__ import annotations

from .codes import (
    awq_gemm_to_codes,
    codes_to_awq_gemm,
    codes_to_planar_columns,
    codes_to_slots,
    codes_to_stream_columns,
    codes_to_stream_rows,
    planar_columns_to_codes,
    slots_to_codes,
    stream_columns_to_codes,
    stream_rows_to_codes,
)
from .gguf import field_to_numbers, field_to_planes, planes_to_field
from .hqq import codes_to_hqq, hqq_to_codes
from .planes import (
    anybcq_to_planes,
    awq_to_planes,
    codes_to_planes,
    columns_to_planes,
    gemv_fast_to_planes,
    gptq_to_planes,
    planar_to_planes,
    planes_to_anybcq,
    planes_to_awq,
    planes_to_codes,
    planes_to_columns,
    planes_to_gemv_fast,
    planes_to_gptq,
    planes_to_planar,
)

__all__ = [
    "anybcq_to_planes",
    "awq_gemm_to_codes",
    "awq_to_planes",
    "codes_to_awq_gemm",
    "codes_to_hqq",
    "codes_to_planar_columns",
    "codes_to_planes",
    "codes_to_slots",
    "codes_to_stream_columns",
    "codes_to_stream_rows",
    "columns_to_planes",
    "field_to_numbers",
    "field_to_planes",
    "gemv_fast_to_planes",
    "gptq_to_planes",
    "hqq_to_codes",
    "planar_columns_to_codes",
    "planar_to_planes",
    "planes_to_anybcq",
    "planes_to_awq",
    "planes_to_codes",
    "planes_to_columns",
    "planes_to_field",
    "planes_to_gemv_fast",
    "planes_to_gptq",
    "planes_to_planar",
    "slots_to_codes",
    "stream_columns_to_codes",
    "stream_rows_to_codes",
]
