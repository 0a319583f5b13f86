"""What `convert` would do with a source: its quantized modules, the size of the result, whether the disk has space."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcqfmt.container.durable import output_path
from bcqfmt.converters.convert.tasks import memory_of
from bcqfmt.converters.jobs.warnings import in_words
from bcqfmt.errors import BcqError, error, escape

from . import render

if TYPE_CHECKING:
    from bcqfmt.converters.convert.conversion import Conversion
    from bcqfmt.converters.hub import RemoteHeaders


class Forecast:
    """The figures of a plan; ``text`` for people, ``as_dict`` for scripts."""

    def __init__(self, conversion: Conversion, target: Path, remote: RemoteHeaders | None = None) -> None:
        self.conversion = conversion
        source, plan = conversion.source, conversion.plan
        self.target = target
        self.remote = remote
        headers = sum(model.header.data_start for model in source.models.values())
        sides = _sides(conversion, remote)
        self.input = sum(model.source.size for model in source.models.values()) + sides
        kept = sides + headers if conversion.options.provenance else 0
        self.output = plan.nbytes + 2 * headers + sides + kept
        self.largest = max((module.nbytes for module in conversion.modules.values()), default=0)
        self.memory = memory_of(headers, self.largest, conversion.workers)
        partial = output_path(f"{output_path(target)}.partial")
        self.present = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        self.free = shutil.disk_usage(nearest(target)).free

    @property
    def needed(self) -> int:
        """Disk space still to be taken up; a resumed conversion has some of it already."""
        resumed = self.conversion.options.resume or self.conversion.options.part is not None
        return max(0, self.output - (self.present if resumed else 0))

    def check_disk(self) -> None:
        """BCQ-E802 when the output does not fit."""
        if self.needed > self.free:
            found = f"{self.free:,} bytes free"
            raise error("BCQ-E802", str(self.target), found=found, expected=f"{self.needed:,} bytes")

    def kinds(self) -> list[tuple[str, str, int, int]]:
        """Layout, scheme, modules, bytes: the classes of quantized tensors."""
        count: Counter[tuple[str, str]] = Counter()
        nbytes: Counter[tuple[str, str]] = Counter()
        for module in self.conversion.modules.values():
            key = (module.layout, _scheme_words(module.settings, remote=self.remote is not None))
            count[key] += 1
            nbytes[key] += module.nbytes
        return [(layout, scheme, count[layout, scheme], nbytes[layout, scheme]) for layout, scheme in sorted(count)]

    def dense(self) -> tuple[int, int]:
        """Tensors that pass through as they are, and their bytes."""
        names = [name for shard in self.conversion.plan.shards for name in shard.dense]
        return len(names), sum(self.conversion.source.tensors[name].nbytes for name in names)

    def evidence(self) -> str:
        settings, source = self.conversion.settings, self.conversion.source
        said = [f"{', '.join(source.quant)} says {escape(settings.method)}" if source.quant and settings.method else ""]
        if settings.format and self.conversion.modules:
            said.append(f"format {escape(settings.format)}")
        if settings.tool is not None:
            said.append(f"written by {settings.tool[0]} {'.'.join(map(str, settings.tool[1]))}")
        return "; ".join(["tensor names and shapes", *filter(None, said)])

    def as_dict(self) -> dict[str, Any]:
        plan, (tensors, dense_bytes) = self.conversion.plan, self.dense()
        found = {
            "source": str(self.conversion.source.place),
            "target": str(self.target),
            "evidence": self.evidence(),
            "quantized": [
                {"layout": layout, "scheme": scheme, "modules": number, "bytes": nbytes}
                for layout, scheme, number, nbytes in self.kinds()
            ],
            "dense": {"tensors": tensors, "bytes": dense_bytes},
            "coverage": round(100 * plan.coverage, 4),
            "input_bytes": self.input,
            "output_bytes": self.output,
            "disk_needed": self.needed,
            "disk_free": self.free,
            "fits": self.needed <= self.free,
            "memory_bytes": self.memory,
            "workers": self.conversion.workers,
            "shards": [{"file": shard.file, "bytes": shard.nbytes} for shard in plan.shards],
            "warnings": [finding.as_dict() for finding in self.conversion.warnings],
        }
        if self.remote is not None:
            found |= {"revision": self.remote.repo.commit, "network_bytes": self.remote.bytes_read}
            found["requests"] = self.remote.requests
        return found

    def text(self) -> list[str]:
        plan, (tensors, dense_bytes) = self.conversion.plan, self.dense()
        layouts = sorted({layout for layout, *_ in self.kinds()})
        pairs = [("layout", f"{', '.join(layouts)} ({self.evidence()})")]
        for _, scheme, number, nbytes in self.kinds():
            pairs.append(("quantized", f"{render.count(number, 'module')}, {scheme}; {render.size(nbytes)}"))
        pairs.append(("carried", f"{render.count(tensors, 'dense tensor')}; {render.size(dense_bytes)}"))
        if self.conversion.source.left_out:
            pairs.append(("not carried", in_words(self.conversion.source.left_out)))
        share = f"{render.percent(100 * plan.coverage)} of {plan.parameters:,} parameters are quantized"
        pairs += [
            ("coverage", share),
            ("input", f"{render.size(self.input)} in {render.count(len(self.conversion.source.models), 'model file')}"),
            ("output", f"about {render.size(self.output)} in {render.count(len(plan.shards), 'shard')}"),
            ("disk", f"{render.size(self.needed)} needed, {render.size(self.free)} free"),
            ("memory", f"at most {render.size(self.memory)} with {render.count(self.conversion.workers, 'worker')}"),
        ]
        if self.remote is not None:
            cost = f"{self.remote.bytes_read:,} bytes read in {render.count(self.remote.requests, 'request')}"
            pairs.append(("network", f"{cost}; zero points are looked at only when the data is here"))
        return [f"plan: {escape(plan.options['name'])} -> {escape(str(self.target))}", *render.fields(pairs)]


def _scheme_words(settings: dict[str, Any], *, remote: bool = False) -> str:
    """A module's settings in words."""
    words = [f"{settings['bits']} bit", f"groups of {settings['group_size']}"]
    words += [settings[key] for key in ("variant", "packing") if settings.get(key)]
    words += ["planar"] if settings.get("planar") else []
    words += [f"zero points {settings['zero_point']}"] if settings.get("zero_point") and not remote else []
    return ", ".join(words)


def _sides(conversion: Conversion, remote: RemoteHeaders | None) -> int:
    source = conversion.source
    if remote is not None:
        return sum(remote.repo.files[path].size for path in source.side_files)
    return sum((source.folder / path).stat().st_size for path in source.side_files)


def nearest(path: Path) -> Path:
    """The closest folder above that exists."""
    place = path.absolute()
    while not place.is_dir():
        if place == place.parent:
            break
        place = place.parent
    return place


def module_rows(path: Path) -> tuple[list[dict[str, Any]], str]:
    """A row for every module that would be converted, and why there is none if the converter refuses the source."""
    from bcqfmt.converters.layouts.protocol import Options
    from bcqfmt.converters.layouts.registry import find_modules
    from bcqfmt.converters.source.checkpoint import open_source

    try:
        source = open_source(path)
        _, modules = find_modules(source, Options(allow_nonfinite=True))
    except BcqError as fault:
        return [], str(fault)
    rows = []
    for module in modules:
        settings = module.settings
        shape = settings.get("shape") or (settings["n"], settings["k"])
        files = sorted({source.home[tensor.name] for tensor in module.tensors.values()})
        rows.append(
            {
                "name": module.name,
                "layout": module.layout,
                "shape": [int(dim) for dim in shape],
                "scheme": _scheme_words(settings),
                "tensors": sorted(module.tensors),
                "bytes": module.nbytes,
                "files": files,
            }
        )
    return rows, ""


def module_table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a table."""
    cells = [
        (
            escape(row["name"], 512),
            "x".join(map(str, row["shape"])),
            row["layout"],
            row["scheme"],
            render.size(row["bytes"]),
            escape(", ".join(row["files"])),
        )
        for row in rows
    ]
    return render.table(("module", "shape", "layout", "scheme", "size", "files"), cells, left=(0, 2, 3, 5))
