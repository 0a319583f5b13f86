"""Zero points that can be read in several ways: every reading tried against the model before it was quantized."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from bcqfmt.container.dtypes import FLOATS, float64_of
from bcqfmt.converters.layouts.gptq_zeros import rules_of
from bcqfmt.converters.layouts.protocol import Module, Options
from bcqfmt.converters.layouts.registry import find_modules, layouts
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import error

_MOST = 8  # modules that are decoded; a wrong rule shows in each of them


class Trial(NamedTuple):
    """A rule, and the relative error |W - D| / |D| of the weights that it gives."""

    rule: str
    relative: float


def try_rules(source: SourceCheckpoint, dense: SourceCheckpoint, layout: str = "auto") -> list[Trial]:
    """Every rule that the widths of ``source`` allow, the best one first; ``dense`` has the weights by name.

    Some modules on which the rules differ are decoded. BCQ-E301 where ``dense`` has none of them.
    """
    widths = {module.settings["bits"] for module in _modules(source, "v1-nowrap", layout)}
    readings = {rule: _modules(source, rule, layout) for rule in rules_of(widths)}
    chosen = _differing(readings, dense)
    if not chosen:
        name = next(iter(readings.values()))[0].weight_name
        hint = "give the model before it was quantized"
        raise error("BCQ-E301", dense.folder.name, name, "no dense tensor of that name and shape", "all weights", hint)
    trials = [Trial(rule, _relative([found[i] for i in chosen], dense)) for rule, found in readings.items()]
    return sorted(trials, key=lambda trial: trial.relative)


def _modules(source: SourceCheckpoint, rule: str, layout: str) -> list[Module]:
    warnings = list(source.warnings)
    found = [module for module in find_modules(source, Options(rule), layout)[1] if module.layout == "gptq"]
    source.warnings[:] = warnings  # warnings about a rule that is only tried are dropped
    return found


def _differing(readings: dict[str, list[Module]], dense: SourceCheckpoint) -> list[int]:
    """Numbers of the modules to decode: those in ``dense`` whose zero fields the rules read differently come first."""
    modules = next(iter(readings.values()))
    there = []
    for i, module in enumerate(modules):
        tensor = dense.tensors.get(module.weight_name)
        if (
            tensor is not None
            and tensor.dtype in FLOATS
            and tensor.shape == (module.settings["n"], module.settings["k"])
        ):
            there.append(i)
    gptq = layouts()["gptq"]

    def zeros(module: Module) -> bytes:
        weight = gptq.convert(module, Options(allow_nonfinite=True)).weight
        part = weight.parts().get("s0_zero")
        return str(weight.scheme.segments[0].zero).encode() if part is None else part.array().tobytes()

    differing = []
    for i in there:
        if len({zeros(found[i]) for found in readings.values()}) > 1:
            differing.append(i)
        if len(differing) == _MOST:
            break
    return differing or there[:_MOST]


def _relative(modules: list[Module], dense: SourceCheckpoint) -> float:
    gptq = layouts()["gptq"]
    noise, power = [], []
    for module in modules:
        wanted = float64_of(dense.tensors[module.weight_name].array())
        found = float64_of(gptq.convert(module, Options(allow_nonfinite=True)).weight.dequantize())
        with np.errstate(invalid="ignore", over="ignore"):
            noise.append(float(np.square(found - wanted).sum()))
        power.append(float(np.square(wanted).sum()))
    relative = math.sqrt(math.fsum(noise) / max(math.fsum(power), 1e-300))
    return relative if math.isfinite(relative) else math.inf
