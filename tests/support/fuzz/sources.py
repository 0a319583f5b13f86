"""Sources and GGUF files in memory, through recognition, plan and conversion: refused with a code, or proved.

An input is a configuration and a model file, one after the other: 8 bytes of length, config.json, the model. A model
that begins with GGUF is one.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np

from bcqfmt.container.dtypes import BITS
from bcqfmt.container.files import Bytes, ByteSource
from bcqfmt.container.gguf.types import TYPES
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.convert.shard import ShardJob
from bcqfmt.converters.layouts.protocol import Options
from bcqfmt.converters.source.checkpoint import read_gguf_source, read_source
from bcqfmt.errors import BcqError, error
from fuzz.header_mutations import mutate_value, mutated_text
from fuzz.inputs import mutate, mutate_bytes
from sources.gguf_files import Writer

_NUMBERS = (0, 1, 2, 3, 4, 5, 8, 31, 32, 63, 64, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1)

_LARGEST = 1 << 16  # bytes of a tensor that is made larger
_WIDTHS = {dtype: bits // 8 for dtype, bits in BITS.items() if bits >= 8}


class Memory(ByteSource):
    """A file that is no file."""

    def __init__(self, name: str, data: bytes) -> None:
        self.path, self.shown, self.size, self.bytes_read = Path(name), name, len(data), 0
        self._data = np.frombuffer(data, np.uint8)

    def read_into(self, offset: int, buffer: Bytes) -> None:
        """Fill ``buffer`` with the bytes from ``offset``."""
        if offset < 0 or offset + buffer.size > self.size:
            raise error("BCQ-E103", self.shown, found="bytes that the file has not")
        buffer[...] = self._data[offset : offset + buffer.size]

    def close(self) -> None:
        """Nothing is held."""


def framed(config: bytes, model: bytes) -> bytes:
    """An input."""
    return len(config).to_bytes(8, "little") + config + model


def split(data: bytes) -> tuple[bytes, bytes]:
    """Configuration and model of an input."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def converted(data: bytes) -> tuple[str, ...]:
    """An input up to the parts of its weights, every tensor proved; the code that it was refused by, if it was."""
    config, model = split(data)
    gguf = model.startswith(b"GGUF")
    files = {"model.gguf" if gguf else "model.safetensors": model, "config.json": config}
    if gguf and not config:
        del files["config.json"]
    try:
        _convert(files, gguf)
    except BcqError as fault:
        if fault.code == "BCQ-E999":
            raise AssertionError(str(fault)) from fault
        return (fault.code,)
    return ()


def _convert(files: dict[str, bytes], gguf: bool) -> None:
    names, folder = sorted(files), Path("source")

    def open_file(name: str) -> ByteSource:
        return Memory(name, files[name])

    if gguf:
        source = read_gguf_source(folder, names, ["model.gguf"], open_file)
        source.made_files()
    else:
        source = read_source(folder, names, open_file)
    conversion = Conversion(source, ConvertOptions(dry_run=True))
    for shard in conversion.plan.shards:
        job = ShardJob(source, shard, conversion.modules, conversion.layouts, Options(), lambda: None)
        for weight in job.weights.values():
            for part in weight.parts().values():
                part.array()


def source_seeds() -> list[bytes]:
    """A small source of every layout."""
    from sources import malformed_sources  # needs the test packages, which a run of the fuzzer does not

    sound = [malformed_sources.sound(layout) for layout in malformed_sources.BASES if layout != "dense"]
    return [_input(source.config, source.tensors) for source in sound]


def _input(config: str, tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return framed(config.encode(), struct.pack("<Q", len(text)) + text + data)


def mutate_source(data: bytes, rng: random.Random) -> bytes:
    """Another configuration, another tensor, or other bytes."""
    config, model = split(data)
    roll = rng.random()
    if roll < 0.1:
        config = mutated_text(config.decode(errors="replace"), rng).encode("utf-8", "surrogatepass")
    elif roll < 0.5:
        config = _other_value(config, rng)
    elif roll < 0.85:
        model = _other_tensor(model, rng)
    else:
        model = mutate(model, rng)
    return framed(config, model)


def _other_value(config: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(config)
        mutate_value(value, rng)
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return mutate_bytes(config, rng)


def _other_tensor(model: bytes, rng: random.Random) -> bytes:
    """A tensor of another type, shape or name; the offsets follow, so that what lies behind the header is reached."""
    try:
        end = 8 + int.from_bytes(model[:8], "little")
        header, data = json.loads(model[8:end]), model[end:]
        name = rng.choice([name for name in header if name != "__metadata__"])
        entry = header.pop(name)
        begin, stop = entry["data_offsets"]
        held = {other: data[slice(*value["data_offsets"])] for other, value in header.items()}
        content = data[begin:stop]
        roll = rng.randrange(5)
        if roll == 0:
            entry["dtype"] = rng.choice(sorted(_WIDTHS))
        elif roll == 1 and entry["shape"]:
            at = rng.randrange(len(entry["shape"]))
            entry["shape"][at] = max(0, rng.choice((0, 1, entry["shape"][at] + rng.choice((-1, 1)), 7, 16, 64)))
        elif roll == 2:
            entry["shape"] = rng.choice(([], entry["shape"][::-1], [*entry["shape"], 1], entry["shape"][1:]))
        elif roll == 3:
            content = bytes(rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256))) for _ in range(len(content)))
        else:
            name = rng.choice((name + "x", name.replace("m.", "n."), "..", "é", name.rpartition(".")[0] + ".g_idx"))
        size = min(_LARGEST, _WIDTHS.get(entry["dtype"], 1) * int(np.prod(entry["shape"], dtype=object)))
        content = (content * (size // max(1, len(content)) + 1))[:size] if content else bytes(size)
        header[name], held[name] = entry, content
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return mutate_bytes(model, rng)
    at, joined = 0, b""
    for other, value in header.items():
        if other != "__metadata__":
            value["data_offsets"] = [at, at + len(held[other])]
            joined, at = joined + held[other], at + len(held[other])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + joined


def gguf_seeds() -> list[bytes]:
    """Small GGUF files: every type of tensor, both byte orders, several alignments, a tokenizer."""
    found = []
    for number, kind in sorted(TYPES.items()):
        for order, alignment in (("<", None), (">", 8), ("<", 64)):
            found.append(framed(b"", _gguf(number, kind.elements, kind.nbytes, order, alignment)))
    return found


def _gguf(number: int, elements: int, nbytes: int, order: str, alignment: int | None) -> bytes:
    rng = np.random.default_rng(number)
    writer = Writer(order=order, alignment=alignment).pair("general.architecture", "str", "llama")
    for key, value in (("block_count", 1), ("embedding_length", elements), ("feed_forward_length", 2)):
        writer.pair(f"llama.{key}", "u32", value)
    writer.pair("llama.attention.head_count", "u32", 1).pair("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5)
    writer.pair("tokenizer.ggml.model", "str", "gpt2").pair("tokenizer.ggml.tokens", "str[]", ["a", "b"])
    writer.pair("tokenizer.ggml.token_type", "i32[]", [1, 3]).pair("tokenizer.ggml.merges", "str[]", ["a b"])
    writer.tensor("output_norm.weight", [elements], 0, bytes(4 * elements))
    return writer.tensor("blk.0.ffn_up.weight", [2, elements], number, rng.bytes(2 * nbytes)).bytes()


def mutate_gguf(data: bytes, rng: random.Random) -> bytes:
    """A field of the header another number, mostly; else other bytes, a piece twice, a piece less."""
    config, model = split(data)
    if rng.random() < 0.3 or len(model) < 32:
        return framed(config, mutate_bytes(model, rng))
    changed = bytearray(model)
    width = rng.choice((1, 4, 4, 8, 8))
    at = rng.randrange(min(len(changed), 900) - width + 1)
    old = int.from_bytes(changed[at : at + width], "little")
    value = rng.choice((old + 1, old - 1, *_NUMBERS)) % (1 << 8 * width)
    changed[at : at + width] = value.to_bytes(width, rng.choice(("little", "little", "big")))
    return framed(config, bytes(changed))
