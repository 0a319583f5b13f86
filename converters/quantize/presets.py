"""Methods with settings that a person can choose by size; the figures are those of docs/benchmarks/quality.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bcqfmt.errors import error, escape


@dataclass(frozen=True, slots=True)
class Preset:
    """What it is for, the method and its settings, and what came out on SmolLM2-135M (FP16: perplexity 25.5)."""

    purpose: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "--text or --stats"  # what it needs to know about the inputs of layers; empty: nothing
    measured: str = ""

    def options(self) -> str:
        """As one would type it without the preset."""
        words = [
            f"--no-{name}" if value is False else f"--{name.replace('_', '-')} {value}"
            for name, value in self.settings.items()
        ]
        return " ".join([f"--method {self.method}", *words])


PRESETS: Mapping[str, Preset] = {
    "4bit": Preset(
        "4 bit, best quality for the bytes", "gptq", {"bits": 4}, measured="4.19 bits per weight, perplexity 26.4"
    ),
    "3bit": Preset(
        "3 bit, best quality for the bytes", "gptq", {"bits": 3}, measured="3.19 bits per weight, perplexity 30.6"
    ),
    "2bit": Preset(
        "2 bit, best quality for the bytes", "bcq", {"bits": 2, "bias": False, "rounding": "gptq"},
        measured="2.27 bits per weight, perplexity 49.2",
    ),
    "plain": Preset(
        "4 bit without calibration", "rtn", {"bits": 4, "group_size": 32}, inputs="",
        measured="4.66 bits per weight, perplexity 30.2",
    ),
    "nested": Preset(
        "one file, read at 2, 3 or 4 bit", "multi", {"bits": 4, "nested": "joint", "rounding": "gptq"}
    ),
    "w4a4": Preset(
        "4-bit activations too", "atom", {"rounding": "gptq"}, measured="4.93 bits per weight, perplexity 29.8"
    ),
}  # fmt: skip


def find_preset(name: str) -> Preset:
    """The preset of a name; BCQ-E620 lists those there are."""
    if name not in PRESETS:
        raise error("BCQ-E620", found=f"no preset '{escape(name)}'", expected=f"one of {', '.join(PRESETS)}")
    return PRESETS[name]
