"""A small conversion for the fault tests: its source, what it makes undisturbed, and what must hold afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bcqfmt.errors import BcqError
from sources.conversions import convert, gptq_folder, tree
from sources.dense_samples import dense_folder, dense_tensors, quantize

SMALL = 1500  # bytes per shard
TWENTY = 7000
DENSE = 25_000


@dataclass(frozen=True)
class Case:
    """A source and the tree of its conversion."""

    source: Path
    plain: dict[str, str]
    size: int
    verb: str = "convert"

    def run(self, target: Path, **options: object) -> None:
        {"convert": convert, "quantize": quantize}[self.verb](self.source, target, max_shard_size=self.size, **options)

    def check_after(self, target: Path, fault: BaseException | None) -> None:
        """Nothing partial under a final name; and whatever happened, going on gives the same bytes."""
        if fault is None:
            assert tree(target) == self.plain
        else:
            assert isinstance(fault, BcqError), repr(fault)
            assert fault.exit_code in (3, 7, 9), fault
        self.check_names(target)
        self.finish(target)

    def check_names(self, target: Path) -> None:
        """What has its final name is whole: the folder, and every shard of an unfinished one."""
        if target.exists():
            assert tree(target) == self.plain
        partial = target.with_name(f"{target.name}.partial")
        for path in partial.glob("model-*.safetensors") if partial.is_dir() else ():
            found = tree(partial)
            assert found[path.name] == self.plain[path.name], path.name

    def finish(self, target: Path) -> None:
        """Resume (nothing to do where it is complete); the same bytes, and nothing beside them."""
        if self.verb == "convert" or not target.exists():  # quantize calls a finished folder one that exists
            self.run(target, resume=True)
        assert tree(target) == self.plain
        assert [path.name for path in target.parent.iterdir()] == [target.name]


def small_case(folder: Path, layers: int = 2) -> Case:
    """Two layers in four shards, with side files in folders inside folders."""
    source = gptq_folder(folder / "model-gptq", layers=layers, n=32, k=64)
    (source / "extra" / "deep").mkdir(parents=True)
    (source / "extra" / "deep" / "notes.txt").write_text("two folders down")
    return _made(folder, source, SMALL)


def dense_case(folder: Path) -> Case:
    """A dense model to be quantized by rounding, into several shards."""
    source = dense_folder(folder / "model", dense_tensors(1))
    (source / "extra" / "deep").mkdir(parents=True)
    (source / "extra" / "deep" / "notes.txt").write_text("two folders down")
    quantize(source, folder / "plain", max_shard_size=DENSE)
    return Case(source, tree(folder / "plain"), DENSE, "quantize")


def twenty_shards(folder: Path) -> Case:
    """Twenty shards, one layer each."""
    made = _made(folder, gptq_folder(folder / "model-gptq", layers=20), TWENTY)
    assert len([name for name in made.plain if name.startswith("model-")]) == 20
    return made


def _made(folder: Path, source: Path, size: int) -> Case:
    convert(source, folder / "plain", max_shard_size=size)
    return Case(source, tree(folder / "plain"), size)
