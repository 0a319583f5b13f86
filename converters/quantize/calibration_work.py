"""The files of a calibration other than its result: the input text, and the work folder.

The folder is ``OUT.partial``: locked, resumed layer by layer, removed when the calibration is done.

OUT.partial/lock                       held while a process works here
OUT.partial/plan.json                  model, text and options; an unfinished run goes on only with the same ones
OUT.partial/hidden-00003.bin           what enters layer 3, float32 [rows, seq, hidden], row after row
OUT.partial/gradient-00003.bin         the gradient of the loss there, of the same form, until layer 2 has its own
OUT.partial/weights-00003.safetensors  what every token counts for each weight of layer 3, float32 [rows, seq]
OUT.partial/quantized-00003.bin        what enters layer 3 when those before it are quantized (`quantize --text`)
OUT.partial/quantized2-00003.bin       the same when nested planes are read at 2
OUT.partial/layer-00003.safetensors    statistics of the layer; written last, so its being there means it is done

Every .bin file ends in the SHA-256 of what is before it, weights-*.safetensors has that of its tensors in its metadata:
what changed on the disk while a run was interrupted is refused.

Nothing here needs torch, so a wrong text or target is refused before torch is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.writer import write_tensors
from bcqfmt.container.durable import OutputFile, output_path, refuse_existing_file, reported, write_file
from bcqfmt.container.files import SourceFile
from bcqfmt.container.header import require_header
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import canonical
from bcqfmt.converters.jobs.workspace import one_at_a_time
from bcqfmt.errors import BcqError, error
from bcqfmt.system import lock_file, require_locks

from .stats import StatsFile, open_stats, write_stats

__all__ = ["CalibrationText", "CalibrationWork", "TextOptions", "check_target", "choose_rows", "read_text"]

Row = npt.NDArray[np.float32]

_DIGEST = 32  # bytes of a SHA-256


class CalibrationText(NamedTuple):
    """A text and the SHA-256 of its bytes."""

    text: str
    sha256: str
    shown: str


class TextOptions(NamedTuple):
    """A text for quantizing block by block: ``rows`` pieces of ``seq`` tokens; weighting: see `calibration`.

    ``train``: passes over the text that train scales when all blocks are quantized.
    """

    text: CalibrationText
    rows: int = 128
    seq: int = 512
    device: str = "auto"
    weighting: str = "none"
    train: int = 0

    def blocks(self) -> dict[str, Any]:
        """What decides the blocks."""
        return {"text": self.text.sha256, "rows": self.rows, "seq": self.seq, "weighting": self.weighting}

    def recorded(self) -> dict[str, Any]:
        """What decides the result."""
        return {**self.blocks(), "train_scales": self.train}


def read_text(path: Path) -> CalibrationText:
    """A UTF-8 file; BCQ-E302 when it is not."""
    with contextlib.closing(SourceFile(path)) as source:
        raw = source.read(0, source.size).tobytes()
    try:
        return CalibrationText(raw.decode("utf-8"), hashlib.sha256(raw).hexdigest(), path.name)
    except UnicodeDecodeError as fault:
        hint = "name a text file; one in another encoding has to be saved as UTF-8"
        found = f"byte {fault.start} is not UTF-8"
        raise error("BCQ-E302", path.name, found=found, expected="a text file", hint=hint) from None


def check_target(target: Path, *, overwrite: bool) -> None:
    """BCQ-E401 for a file that is there already."""
    output_path(target)
    refuse_existing_file(target, overwrite=overwrite)


def choose_rows(
    given: CalibrationText, tokenize: Callable[[str], Sequence[int]], rows: int, seq: int, seed: int
) -> npt.NDArray[np.int64]:
    """``rows`` runs of ``seq`` tokens, ``[rows, seq]``: drawn with ``seed`` from those the text is cut into, in order.

    No token is used twice; BCQ-E630 where the text has too few.
    """
    tokens = np.asarray(tokenize(given.text), np.int64)
    count = tokens.size // seq
    if count < rows:
        raise error(
            "BCQ-E630",
            given.shown,
            found=f"{tokens.size} tokens, enough for {count} rows of {seq}",
            expected=f"{rows * seq} tokens for {rows} rows",
        )
    chosen = np.sort(np.random.default_rng(seed).choice(count, rows, replace=False))
    return np.asarray(tokens[: count * seq].reshape(count, seq)[chosen])


class CalibrationWork:
    """The work folder of one calibration; a context manager."""

    def __init__(self, target: Path, plan: Mapping[str, Any], *, overwrite: bool = False, resume: bool = False) -> None:
        """``plan``: the record of the finished file without its inputs. ``overwrite``: anew, unless ``resume``."""
        require_locks()
        self.target = output_path(target)
        self.folder = self.target.with_name(f"{self.target.name}.partial")
        self.plan = dict(plan)
        self._lock = -1
        self._sound: set[Path] = set()  # files that this process wrote or has checked
        with reported(self.folder):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(self.target):
                self._enter(overwrite, resume)

    def _enter(self, overwrite: bool, resume: bool) -> None:
        """Look at what is there, lock the folder, and begin."""
        check_target(self.target, overwrite=overwrite)
        if os.path.lexists(self.folder) and not (self.folder / "plan.json").is_file():
            raise error("BCQ-E401", str(self.folder), found="something that is no unfinished calibration")
        self.folder.mkdir(exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock_file(self._lock)
        except OSError as fault:
            self._unlock()
            raise error("BCQ-E403", str(self.folder), found="another process is working on it") from fault
        self._begin(anew=overwrite and not resume)

    def done(self, stage: int) -> bool:
        """Whether a layer's statistics are there."""
        return self._layer(stage).exists()

    def rows_file(self, stage: int, kind: str = "hidden") -> Path:
        """The file of what enters a layer; kind: hidden, gradient, quantized (in the quantized model), quantized2."""
        return self.folder / f"{kind}-{stage:05d}.bin"

    def weights(self, stage: int) -> Path:
        """The file of what every token counts in a layer."""
        return self.folder / f"weights-{stage:05d}.safetensors"

    def rows_into(self, stage: int, rows: Iterator[Row], kind: str = "hidden") -> None:
        """Write what enters a layer, row by row."""
        with self.rows_output(stage, kind) as put:
            for row in rows:
                put(row)

    @contextlib.contextmanager
    def rows_output(self, stage: int, kind: str = "hidden") -> Iterator[Callable[[Row], None]]:
        """Writes what enters a layer, some rows at every call; the file appears when all are written."""
        digest = hashlib.sha256()
        with OutputFile(self.rows_file(stage, kind)) as output:

            def put(rows: Row) -> None:
                raw = np.ascontiguousarray(rows, np.float32).data.cast("B")
                digest.update(raw)
                output.write(raw)

            yield put
            output.write(digest.digest())
        self._sound.add(self.rows_file(stage, kind))

    def rows_of(self, stage: int, count: int, shape: tuple[int, ...], kind: str = "hidden") -> Iterator[Row]:
        """What enters a layer in ``count`` pieces, each float32 of that shape: some rows ``[rows, seq, hidden]``."""
        source = SourceFile(self.rows_file(stage, kind))
        size = math.prod(shape) * 4
        if source.size != count * size + _DIGEST:
            raise self._changed(source.path, "of another size")
        if source.path not in self._sound:
            digest = hashlib.sha256()
            for index in range(count):
                digest.update(source.read(index * size, size).data)
            if digest.digest() != source.read(count * size, _DIGEST).tobytes():
                raise self._changed(source.path, "changed since it was written")
            self._sound.add(source.path)
        for index in range(count):
            yield source.read(index * size, size).view(np.float32).reshape(shape)

    def finish_weights(self, stage: int, weights: Mapping[str, Row]) -> None:
        """Write what tokens count in a layer; the gradient that came from the layer above is no longer needed."""
        tensors = {name: StoredTensor.from_array(name, array) for name, array in weights.items()}
        write_tensors(self.weights(stage), tensors, {"sha256": _digest(weights)})
        with contextlib.suppress(FileNotFoundError):
            self.rows_file(stage + 1, "gradient").unlink()

    def read_weights(self, stage: int) -> dict[str, Row]:
        """Weight name -> float32 ``[rows, seq]``."""
        source = SourceFile(self.weights(stage))
        header = require_header(source)
        found = {name: StoredTensor.in_file(name, header, source).array() for name in header.tensors}
        if header.metadata.get("sha256") != _digest(found):
            raise self._changed(source.path, "changed since it was written")
        return found

    def finish(self, stage: int, tensors: Mapping[str, StoredTensor], inputs: Mapping[str, list[str]]) -> None:
        """Write a layer's statistics; what entered it is no longer needed."""
        write_stats(self._layer(stage), tensors, {**self.plan, "inputs": dict(inputs)})
        with contextlib.suppress(FileNotFoundError):
            self.rows_file(stage).unlink()

    def assemble(self, stages: int) -> StatsFile:
        """All layers in one file, streamed; then the folder goes."""
        layers = [self._statistics(stage) for stage in range(stages)]
        tensors = {name: tensor for layer in layers for name, tensor in layer.tensors.items()}
        inputs = {leader: names for layer in layers for leader, names in layer.record["inputs"].items()}
        write_stats(self.target, tensors, {**self.plan, "inputs": inputs})
        with one_at_a_time(self.target):
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()
        return open_stats(self.target)

    def _statistics(self, stage: int) -> StatsFile:
        path = self._layer(stage)
        try:
            return open_stats(path)
        except BcqError as fault:  # the same command would find it again
            raise self._changed(path, f"is damaged: {fault.finding.found}") from fault

    def release(self, *, given_up: bool = False) -> None:
        """Let another process work here; a folder in which no layer is done, or given up, is not worth keeping."""
        if self._lock < 0:
            return
        with contextlib.suppress(OSError), one_at_a_time(self.target):  # what cannot be looked at is left there
            if given_up or {path.name for path in self.folder.iterdir()} <= {"lock", "plan.json"}:
                shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()
        self._unlock()

    def __enter__(self) -> CalibrationWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        self.release(given_up=isinstance(value, BcqError) and value.code == "BCQ-E622")  # it would end there again

    def _changed(self, path: Path, how: str) -> BcqError:
        return error(
            "BCQ-E401",
            str(self.folder),
            found=f"{path.name} {how}",
            expected="what an unfinished run wrote",
            hint="start anew with --overwrite, without --resume",
        )

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _layer(self, stage: int) -> Path:
        return self.folder / f"layer-{stage:05d}.safetensors"

    def _begin(self, *, anew: bool) -> None:
        text = canonical(self.plan).encode("ascii") + b"\n"
        path = self.folder / "plan.json"
        if anew or not path.exists():
            for old in self.folder.iterdir():
                if old.name != "lock":
                    old.unlink()
            write_file(path, text)
        elif path.read_bytes() != text:
            self._unlock()  # a refusal leaves an unfinished run as it was
            raise error(
                "BCQ-E401",
                str(self.folder),
                found="an unfinished calibration of another model, or with other options",
                expected="the same ones",
                hint="start anew with --overwrite, without --resume",
            )


def _digest(tensors: Mapping[str, Row]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(np.ascontiguousarray(tensors[name], np.float32).data.cast("B"))
    return digest.hexdigest()
