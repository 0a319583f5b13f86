"""Which layout a source is in: by tensor names and shapes, cross-checked with its configuration.

Built-in layouts are listed here; others come through the entry point group ``bcqfmt.converters``. Formats that are
known and not converted are refused by name.
"""

from __future__ import annotations

from typing import Final

from bcqfmt.converters.plugins import Registry
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import AUTO_ROUND, Settings, read_settings, refuse_transforms
from bcqfmt.errors import error, escape

from .protocol import Layout, Module, Options, Rebuilder

LAYOUTS: Final = {
    "gptq": ("bcqfmt.converters.layouts.gptq", "Gptq"),
    "awq": ("bcqfmt.converters.layouts.awq", "Awq"),
    "compressed-tensors": ("bcqfmt.converters.layouts.compressed_tensors", "CompressedTensors"),
    "hqq": ("bcqfmt.converters.layouts.hqq", "Hqq"),
    "anybcq": ("bcqfmt.converters.layouts.anybcq", "AnyBcq"),
    "gguf": ("bcqfmt.converters.layouts.gguf", "Gguf"),
}
_REGISTRY: Final = Registry("bcqfmt.converters", LAYOUTS)

# the end of a tensor's name, and the format that it is a sign of; none of these is exact in affine or bcq planes
_REFUSED: Final = (
    (".quant_state.bitsandbytes__nf4", "bitsandbytes NF4, a table of 16 levels that no sum of planes gives"),
    (".quant_state.bitsandbytes__fp4", "bitsandbytes FP4"),
    (".weight.absmax", "bitsandbytes 4-bit"),
    (".SCB", "bitsandbytes LLM.int8"),
    (".lookup_table", "SqueezeLLM, which stores a table of levels per row"),
    (".q_groups", "EXL2"),
    (".trellis", "EXL3, a trellis code"),
    (".dense_weights", "SpQR"),
    (".codebooks", "AQLM, which stores vector codebooks"),
    (".Qidxs", "QuIP#, which stores lattice codebooks"),
    (".lut4", "Any-Precision LLM, which stores a table of levels per row"),
    (".weight_scale_inv", "FP8 with block scales"),
)
_QUANTIZED: Final = (".qweight", ".weight_packed", ".W_q")
# configuration's method -> the layouts its tensors may be in
_METHODS: Final = {
    "gptq": {"gptq"},
    "awq": {"awq"},
    "llm-awq": {"awq"},
    "compressed-tensors": {"compressed-tensors"},
    **{name: {"gptq", "awq", "compressed-tensors"} for name in AUTO_ROUND},
    "hqq": {"hqq"},
    "anybcq": {"anybcq"},
}


def layouts() -> dict[str, Layout]:
    """Every layout by name; a name that is taken twice is an error."""
    return {name: _REGISTRY.load(name)() for name in _REGISTRY.names()}


def rebuilders() -> dict[str, Rebuilder]:
    """Rule name -> how it rebuilds a tensor, over all layouts."""
    found: dict[str, Rebuilder] = {}
    for layout in layouts().values():
        found.update(layout.rebuilders())
    return found


def find_modules(source: SourceCheckpoint, options: Options, chosen: str = "auto") -> tuple[Settings, list[Module]]:
    """All quantized modules of a source. Nothing is guessed: what does not fit is an error that says what it saw."""
    refuse_by_name(source)
    settings = read_settings(source)
    refuse_transforms(settings, source.folder.name)
    known = layouts()
    if chosen == "dense":
        raise error("BCQ-E610", source.folder.name, found="asked for as dense", expected="a quantized checkpoint")
    if chosen not in ("auto", *known):
        raise error("BCQ-E302", found=f"layout {escape(chosen)}", expected=f"auto, {', '.join(known)}")
    if source.is_gguf and chosen not in ("auto", "gguf"):
        expected, hint = f"{chosen}, as asked for", "leave out --from"
        raise error("BCQ-E604", source.place.name, found="a GGUF file", expected=expected, hint=hint)
    modules: list[Module] = []
    for name, layout in known.items():
        if chosen in ("auto", name):
            modules += layout.modules(source, options)
    _check_claims(source, modules, settings, chosen)
    return settings, modules


def refuse_by_name(source: SourceCheckpoint) -> None:
    """BCQ-E601 for formats that are known by their tensor names and not converted."""
    marks = tuple(mark for mark, _ in _REFUSED)
    for name, tensor in source.tensors.items():
        if name.endswith(marks):
            what = next(what for mark, what in _REFUSED if name.endswith(mark))
            raise error("BCQ-E601", source.home[name], name, f"this is {what}", "a uniform or binary-coded layout")
        if name.endswith(".B") and tensor.dtype == "I32" and name.removesuffix("B") + "s" in source.tensors:
            found = "this is packed for the Marlin kernel"
            raise error("BCQ-E601", source.home[name], name, found, "the plain GPTQ layout")
        if name.endswith(".weight") and tensor.dtype.startswith("F8_"):
            expected = "integer codes"
            raise error("BCQ-E601", source.home[name], name, f"this is an FP8 checkpoint ({tensor.dtype})", expected)


def _check_claims(source: SourceCheckpoint, modules: list[Module], settings: Settings, chosen: str) -> None:
    """No tensor in two modules, none left that looks quantized, and a configuration that says the same."""
    claimed: dict[str, Module] = {}
    for module in modules:
        for tensor in module.tensors.values():
            if tensor.name in claimed:
                found = f"fits {claimed[tensor.name].layout} and {module.layout}"
                hint = "choose one of the two with --from"
                raise error("BCQ-E604", source.home[tensor.name], tensor.name, found, "one layout", hint)
            claimed[tensor.name] = module
    left = [name for name in source.tensors if name.endswith(_QUANTIZED) and name not in claimed]
    if left:
        first = source.tensors[left[0]]
        said = f"{first.dtype} {list(first.shape)}; the configuration says {escape(settings.method or 'nothing')}"
        raise error(
            "BCQ-E604",
            source.home[left[0]],
            left[0],
            f"{len(left)} quantized tensors fit no layout: {said}",
            f"one of {', '.join(LAYOUTS)}",
            None if chosen == "auto" else "leave out --from, or name another layout",
        )
    seen = {module.layout for module in modules}
    names = ", ".join(sorted(seen))
    allowed = _METHODS.get(settings.method)
    if chosen == "auto" and settings.method and seen and allowed is not None and not seen <= allowed:
        raise error(
            "BCQ-E602",
            source.folder.name,
            found=f"the tensors are laid out as {names}, the configuration says {escape(settings.method)}",
            expected="the same reading from both",
            hint=f"correct the configuration, or name the layout with --from {names}" if len(seen) == 1 else None,
        )
    if not modules and not source.is_gguf:
        if settings.method and settings.method not in ("", "bcq"):
            raise error(
                "BCQ-E601",
                source.folder.name,
                found=f"quant_method {escape(settings.method)}, and no tensors in a known layout",
                expected=f"one of {', '.join(LAYOUTS)}",
            )
        raise error("BCQ-E610", source.folder.name, found="no quantized tensors", expected="a quantized checkpoint")
