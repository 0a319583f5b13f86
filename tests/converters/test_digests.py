"""Many digests at a time against hashlib, whatever the lengths, and a conversion that uses them."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.checkpoint.writer import write_tensors
from bcqfmt.container.durable import OutputFile
from bcqfmt.container.files import SourceFile
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters import digests
from bcqfmt.converters.convert import conversion as pipeline
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.digests import ManyDigests, even
from bcqfmt.converters.digests import along as digests_along
from bcqfmt.converters.digests import file as digests_file
from bcqfmt.converters.digests import one_kernel as digests_one_kernel
from bcqfmt.converters.digests import stream as digests_stream
from bcqfmt.converters.digests import written as digests_written
from bcqfmt.converters.digests.along import DigestsAlong, fits_here
from bcqfmt.converters.digests.along_loop import Along
from bcqfmt.converters.digests.file import FileDigests, file_digests
from bcqfmt.converters.digests.kernel import LANES, Lanes
from bcqfmt.converters.digests.late import LateRecords
from bcqfmt.converters.digests.written import WrittenFile
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError, error
from conversions import convert, gptq_folder, proved, tree

Array = np.ndarray[Any, Any]
EDGES = [0, 1, 3, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 129, 1000]


class Memory:
    """Bytes as a file without a name; with a ``fault``, one whose last bytes cannot be read."""

    def __init__(self, content: bytes, fault: BaseException | None = None) -> None:
        self.data, self.fault = content, fault
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as this object
        self._file.write(content)

    def close(self) -> None:
        self._file.close()

    __del__ = close

    def duplicate(self) -> int:
        return os.dup(self._file.fileno())

    def read_into(self, offset: int, buffer: Array) -> None:
        if self.fault is not None:
            raise self.fault
        assert offset + buffer.size <= len(self.data)
        buffer[:] = np.frombuffer(self.data, np.uint8, buffer.size, offset)


def data(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@given(
    st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 5000)), min_size=1, max_size=50),
    *(st.integers(1, 20), st.integers(1, 3), st.integers(0, 40), st.integers(1, 3), st.sampled_from([0, 7])),
)
@settings(max_examples=150, deadline=None)
def test_any_number_of_streams_of_any_length(
    sizes: list[int], blocks: int, rows: int, begin: int, threads: int, few: int
) -> None:
    contents = [data(begin + size, i) for i, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests_stream, "_STEP", 64 * blocks)
        patch.setattr(digests, "ROW", 128 * rows)
        patch.setattr(digests, "_FEW", few)
        with ManyDigests(threads) as many:
            futures = [many.submit(Memory(content), begin, size) for content, size in zip(contents, sizes, strict=True)]
            assert many.results(futures) == [sha256(content[begin:]) for content in contents]


def test_a_stream_of_many_steps() -> None:
    contents = [data(1_000_000 + 13 * i, i) for i in range(20)]
    with ManyDigests() as many:
        futures = [many.submit(Memory(content), 0, len(content)) for content in contents]
        assert many.results(reversed(futures)) == [sha256(content) for content in reversed(contents)]


def test_it_begins_by_itself_when_the_lanes_are_full() -> None:
    contents = [data(1000, i) for i in range(LANES)]
    with ManyDigests() as many:
        futures = [many.submit(Memory(content), 0, 1000) for content in contents]
        assert [future.result(timeout=60) for future in futures] == [sha256(content) for content in contents]


def test_lanes_stay_as_they_are_where_nothing_is_added() -> None:
    lanes = Lanes(256)
    lanes.clear()
    lanes.data[:] = np.arange(256, dtype=np.uint8)
    lanes.states[:] = lanes.start[:, None]
    lanes.counts[:] = np.arange(LANES) % 5
    assert lanes.advance() == LANES
    assert not lanes.counts.any()
    for lane in range(LANES):
        same = [other for other in range(LANES) if other % 5 == lane % 5]
        assert (lanes.states[:, same] == lanes.states[:, [lane]]).all()
    assert (lanes.states[:, 0] == lanes.start).all()
    assert len({lanes.states[:, lane].tobytes() for lane in range(5)}) == 5
    lanes.counts[3] = 5
    with pytest.raises(ValueError, match="room"):
        lanes.advance()


def test_lanes_go_on_after_one_that_cannot_be_read(tmp_path: Path) -> None:
    contents = [data(640, i) for i in range(LANES)]
    files = [Memory(content) for content in contents]
    lanes = Lanes(128)
    lanes.clear()
    lanes.states[:] = lanes.start[:, None]
    lanes.files[:] = [file.duplicate() for file in files]
    lanes.counts[:] = 10
    lanes.counts[5] = 11
    assert lanes.advance() == 5
    assert lanes.places[5] == 640
    lanes.counts[5] = 0
    assert lanes.advance() == LANES
    assert (lanes.places == 640).all()
    lanes.close()
    lanes.data[:] = 0
    lanes.data[:, 0], lanes.data[:, 62] = 0x80, 8 * 640 >> 8
    lanes.counts[:] = 1
    lanes.advance()
    assert [lanes.states[:, i].astype(">u4").tobytes().hex() for i in range(LANES)] == [sha256(c) for c in contents]


def test_a_file_that_is_too_short_has_a_fault_of_its_own(tmp_path: Path) -> None:
    for i in range(LANES):
        (tmp_path / str(i)).write_bytes(data(100_000, i))
    files = [SourceFile(tmp_path / str(i)) for i in range(LANES)]
    os.truncate(tmp_path / "3", 70_000)
    with ManyDigests() as many:
        futures = [many.submit(file, 0, 100_000) for file in files]
        right = [future for i, future in enumerate(futures) if i != 3]
        assert many.results(right) == [sha256(data(100_000, i)) for i in range(LANES) if i != 3]
        with pytest.raises(BcqError, match="BCQ-E103"):
            many.result(futures[3])


def test_files_are_closed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data(5000, 0))
    file = SourceFile(tmp_path / "x")
    before = len(list(Path("/dev/fd").iterdir()))
    with ManyDigests() as many:
        futures = [many.submit(file, 0, 5000) for _ in range(40)]
        wrong = many.submit(Memory(b"", ValueError()), 0, 70)
        assert many.results(futures) == [sha256(data(5000, 0))] * 40
        with pytest.raises(ValueError):  # noqa: PT011 - any
            many.result(wrong)
    assert len(list(Path("/dev/fd").iterdir())) <= before + 1  # the unnamed file


@pytest.mark.parametrize("count", [1, LANES])
def test_a_fault_stays_with_its_stream(count: int) -> None:
    fault = error("BCQ-E103", "model.safetensors", found="changed")
    with ManyDigests() as many:
        wrong = many.submit(Memory(b"", fault), 0, 1000)
        futures = [many.submit(Memory(data(1000, i)), 0, 1000) for i in range(count)]
        assert many.results(futures) == [sha256(data(1000, i)) for i in range(count)]
        with pytest.raises(BcqError, match="BCQ-E103"):
            many.result(wrong)


def test_what_is_not_done_is_cancelled() -> None:
    with ManyDigests() as many:
        future = many.submit(Memory(data(10, 0)), 0, 10)
        forgotten = many.submit(Memory(b"", AssertionError()), 0, 10)
        many.forget([forgotten])
    for cancelled in (future, forgotten):
        with pytest.raises(CancelledError):
            cancelled.result()


def test_a_file_is_not_read_once_it_is_forgotten() -> None:
    reading, go_on = threading.Event(), threading.Event()

    class Slow(Memory):
        def read_into(self, offset: int, buffer: Array) -> None:
            reading.set()
            go_on.wait()
            super().read_into(offset, buffer)

    slow = Slow(data(10, 0))
    with ManyDigests() as many:
        futures = [many.submit(slow, 0, 10) for _ in range(LANES)]
        reading.wait()
        waiter = threading.Thread(target=many.forget, args=(futures,))
        waiter.start()
        assert waiter.is_alive()  # while it is being read
        go_on.set()
        waiter.join()


def test_streams_that_fill_the_lanes_to_the_end() -> None:
    assert even([10] * 8)
    assert even([1, *[10] * 7])
    assert not even([10] * 6)
    assert not even([100, *[10] * 8])
    assert not even([])


# ------------------------------------------------------------------------------------------- a file and sixteen streams
with_instructions = pytest.mark.skipif(not fits_here(), reason="no instructions for it")


def state_of(states: Array, size: int) -> str:
    """The digest of so many whole blocks whose state this is."""
    return digests_one_kernel.digest_of(digests_one_kernel.ordered(states), np.empty(0, np.uint8), size)


@with_instructions
@pytest.mark.parametrize(("times", "rows"), [(1, 1), (7, 2), (64, 64), (65, 8)])
def test_one_stream_and_sixteen_lanes_in_one_loop(times: int, rows: int) -> None:
    """From memory, wherever it lies, and from files; the stream that is first too."""
    first, others = data(1024 * times + 9, 99), [data(128 * times + i, i) for i in range(LANES)]
    for from_file in (set(), {0, 5, 15}, set(range(LANES)), {LANES}, set(range(LANES + 1))):
        along = Along(128 * rows)
        along.states[:], along.first[:] = along.start[:, None], digests_one_kernel.ordered(None)
        contents = [np.frombuffer(content, np.uint8)[i % 3 :] for i, content in enumerate([*others, first])]
        files = [Memory(content.tobytes()) for content in contents]
        for lane, content in enumerate(contents):
            along.places[lane] = 0 if lane in from_file else content.ctypes.data
            if lane in from_file:
                along.files[lane] = files[lane]._file.fileno()
        assert along.advance(times) == (times, LANES + 1)
        for lane, content in enumerate(contents[:LANES]):
            assert state_of(along.states[:, lane], 128 * times) == sha256(content[: 128 * times].tobytes())
        assert state_of(digests_one_kernel.natural(along.first), 1024 * times) == sha256(
            contents[LANES][: 1024 * times].tobytes()
        )


@with_instructions
@pytest.mark.parametrize("short", [3, LANES])
def test_a_lane_that_cannot_be_read_stops_the_loop_where_it_is(short: int) -> None:
    contents = [data(1024 * 8, i) for i in range(LANES + 1)]
    contents[short] = contents[short][: 4 * (1024 if short == LANES else 128) + 5]
    files = [Memory(content) for content in contents]
    along = Along(256)
    along.states[:], along.first[:] = along.start[:, None], digests_one_kernel.ordered(None)
    along.files[:], along.places[:] = [file._file.fileno() for file in files], 0
    assert along.advance(8) == (4, short)
    assert list(along.places) == [4 * 128] * LANES + [4 * 1024]
    assert state_of(along.states[:, 0], 4 * 128) == sha256(contents[0][: 4 * 128])


@with_instructions
def test_a_stream_alone() -> None:
    for size in EDGES:
        content = data(size, 7)
        with DigestsAlong() as many:
            assert many.result(many.submit(Memory(content), 0, size)) == sha256(content)


STREAMS = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 30_000)), max_size=30)


@with_instructions
@given(
    *(STREAMS, STREAMS, st.lists(st.lists(st.integers(1, 9000), max_size=9), max_size=3)),
    *(st.integers(1, 3), st.sampled_from([1, 3, 1 << 13]), st.sampled_from([1, 4000]), st.sampled_from([0, 1 << 30])),
)
@settings(max_examples=60, deadline=None)
def test_files_that_grow_along_with_any_streams(
    sources: list[int], weights: list[int], files: list[list[int]], most: int, times: int, enough: int, slack: int
) -> None:
    """Files of any chunks, written by a thread each; streams of other files, and of theirs."""
    contents = [[data(size, 100 * i + j) for j, size in enumerate(sizes)] for i, sizes in enumerate(files)]
    found: dict[int, str] = {}

    def write(i: int, folder: Path) -> None:
        size = sum(map(len, contents[i]))
        with OutputFile(folder / str(i), size) as output:
            stream, at = many.follow(WrittenFile(output), size), 0
            for content in contents[i]:
                output.write(content)
                at += len(content)
                many.reach(stream, at)
                many.keep_up(0)
            many.reach(stream, at)
        found[i] = many.result(stream.future)  # when it has its name

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(digests_along, "_TIMES", times)
        patch.setattr(digests_along, "_ENOUGH", enough)
        patch.setattr(digests_along, "_SLACK", slack)
        patch.setattr(digests_along, "_PIECE", 640)
        written = data(40_000, 5)
        with OutputFile(Path(folder) / "w") as output:
            output.write(written)
            kept = WrittenFile(output)
        with DigestsAlong(1, most) as many:
            theirs = [many.submit(Memory(data(size, i)), 0, size) for i, size in enumerate(sources)]
            ours = [many.submit(kept, i, size) for i, size in enumerate(weights)]
            threads = [threading.Thread(target=write, args=(i, Path(folder))) for i in range(len(files))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert many.results(theirs) == [sha256(data(size, i)) for i, size in enumerate(sources)]
            assert many.results(ours) == [sha256(written[i : i + size]) for i, size in enumerate(weights)]
    assert found == {i: sha256(b"".join(content)) for i, content in enumerate(contents)}


@with_instructions
@pytest.mark.parametrize("wrong", [0, 3])
def test_a_fault_of_one_stream_leaves_the_others_along_alone(tmp_path: Path, wrong: int) -> None:
    for i in range(9):
        (tmp_path / str(i)).write_bytes(data(100_000, i))
    files = [SourceFile(tmp_path / str(i)) for i in range(9)]
    os.truncate(tmp_path / str(wrong), 70_000)
    files[8].path.unlink()
    files[8].close()  # it can not be opened again
    with DigestsAlong() as many:
        futures = [many.submit(file, 0, 100_000) for file in files]
        right = [i for i in range(8) if i != wrong]
        assert many.results([futures[i] for i in right]) == [sha256(data(100_000, i)) for i in right]
        with pytest.raises(BcqError, match="BCQ-E103"):
            many.result(futures[wrong])
        with pytest.raises(BcqError, match="BCQ-E101"):
            many.result(futures[8])


@with_instructions
def test_a_file_system_that_maps_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = data(50_000, 1)
    with OutputFile(tmp_path / "x") as output:
        output.write(content)
        kept = WrittenFile(output)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(digests_written.mmap, "mmap", refuse)
    with DigestsAlong() as many:
        futures = [many.submit(kept, i, 40_000) for i in range(9)]
        assert many.results(futures) == [sha256(content[i : i + 40_000]) for i in range(9)]


def test_a_written_file_that_cannot_be_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with OutputFile(tmp_path / "x") as output:
        output.write(b"12345")
        kept = WrittenFile(output)
    with pytest.raises(BcqError, match=r"BCQ-E402.*byte 5"):
        kept.read_into(0, np.empty(6, np.uint8))

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for name, call in (("preadv", lambda: kept.read_into(0, np.empty(5, np.uint8))), ("dup", kept.duplicate)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(BcqError, match=r"BCQ-E402.*Input/output error"):
                call()


# ------------------------------------------------------------------------------------------------------ in a file
def test_a_written_file_has_the_same_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"w{i:02d}": rng.integers(0, 256, size, np.uint8) for i, size in enumerate([*EDGES, *[70_001] * 9])}
    tensors = {name: StoredTensor.from_array(name, array) for name, array in arrays.items()}
    plain = write_tensors(tmp_path / "plain", tensors, {})
    for small in (0, 1 << 16):
        monkeypatch.setattr(digests_file, "_SMALL", small)
        for wanted in (set(arrays), {"w00", "w03", "w20"}, set()):
            made: list[FileDigests] = []

            def make(many: ManyDigests, wanted: set[str], made: list[FileDigests], *file: Any) -> FileDigests:
                made.append(file_digests(many, wanted, *file))
                return made[0]

            with DigestsAlong() if small and fits_here() else ManyDigests() as many:
                written = write_tensors(tmp_path / "many", tensors, {}, digests=partial(make, many, wanted, made))
                digest, of_tensors = made[0].late()
            assert not made[0].is_late
            assert (written.record.size, digest) == plain.record
            assert of_tensors == {name: plain.tensors[name] for name in wanted}
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "many").read_bytes()


@pytest.mark.parametrize("kind", [ManyDigests, pytest.param(DigestsAlong, marks=with_instructions)])
def test_a_write_that_fails_forgets_its_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ManyDigests]
) -> None:
    monkeypatch.setattr(digests_file, "_SMALL", 0)
    tensors = {f"w{i}": StoredTensor.from_array(f"w{i}", np.zeros(5000, np.uint8)) for i in range(20)}

    def stop(done: int) -> None:
        ticks.append(done)
        if len(ticks) == 18:
            raise KeyboardInterrupt

    ticks: list[int] = []
    with kind() as many, pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "x", tensors, {}, stop, digests=partial(file_digests, many, set(tensors)))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def lanes_in_use(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Conversions hash in lanes, however small they are; how many lanes were used each time."""
    used: list[int] = []

    def counted(kind: type[Any], live: Callable[[Any], Array]) -> None:
        advance = kind.advance

        def count(lanes: Any, *times: int) -> Any:
            used.append(int(np.count_nonzero(live(lanes))))
            return advance(lanes, *times)

        monkeypatch.setattr(kind, "advance", count)

    counted(Lanes, lambda lanes: lanes.counts)
    counted(Along, lambda along: along.places[:LANES] != along.places[LANES - 1])
    monkeypatch.setattr(digests_along, "_WORTH", 0)
    monkeypatch.setattr(digests_along, "faster_here", lambda: True)
    monkeypatch.setattr(pipeline, "even", lambda _: True)
    monkeypatch.setattr(digests_file, "_SMALL", 0)
    return used


@pytest.mark.parametrize(
    ("few", "last", "along"), [(0, 0, False), (7, 0, True), (7, 50_000, True), (7, 1 << 20, False)]
)
def test_a_conversion_makes_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes_in_use: list[int], few: int, last: int, along: bool
) -> None:
    source = gptq_folder(tmp_path / "source", layers=20)
    with monkeypatch.context() as patch:
        patch.setattr(digests_along, "_WORTH", 1 << 60)
        convert(source, tmp_path / "plain", max_shard_size=60_000, workers=2)
    assert not lanes_in_use
    monkeypatch.setattr(digests, "_FEW", few)
    monkeypatch.setattr(digests, "_LAST", last)
    monkeypatch.setattr(digests_along, "fits_here", lambda: along and fits_here())
    convert(source, tmp_path / "many", max_shard_size=60_000, workers=2)
    assert tree(tmp_path / "many") == tree(tmp_path / "plain")
    assert lanes_in_use or last == 1 << 20  # the last ones of a large folder, all of this one
    proved(source, tmp_path / "many", tmp_path)


def test_every_shard_is_told_once_whoever_finishes_it(tmp_path: Path, lanes_in_use: list[int]) -> None:
    source = gptq_folder(tmp_path / "source", layers=20)
    told: list[str] = []
    conversion = Conversion(open_source(source), ConvertOptions(max_shard_size=20_000, workers=3))
    assert conversion.run(tmp_path / "bcq", shard_done=lambda name, _: told.append(name))
    assert len(told) > 3
    assert sorted(told) == [shard.file for shard in conversion.plan.shards]
    assert lanes_in_use


def test_a_record_that_is_late_is_written_when_the_next_file_is() -> None:
    """A run that is killed later on has not lost it."""
    late, done, waiting = LateRecords(), [], {"a": True, "b": True, "c": False}
    for name in "abc":
        late.add(name, partial(done.append, name), partial(waiting.get, name))
    assert done == ["c"]
    waiting["b"] = False
    late.add("d", partial(done.append, "d"), lambda: True)
    assert done == ["c", "b"]
    written: Future[None] = Future()
    closing = threading.Thread(target=late.close, args=("a", written))
    closing.start()
    assert done == ["c", "b"]  # not before it is written
    written.set_result(None)
    closing.join(60)
    late.close("b", written)
    assert done == ["c", "b", "a"]


def test_a_source_that_changes_is_found_out_by_the_lanes_too(tmp_path: Path, lanes_in_use: list[int]) -> None:
    source = gptq_folder(tmp_path / "source", layers=8)

    def touch(_: int) -> None:
        path = source / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(BcqError) as caught:
        Conversion(open_source(source), ConvertOptions(max_shard_size=20_000)).run(tmp_path / "bcq", touch)
    assert caught.value.code == "BCQ-E103"
    assert not (tmp_path / "bcq").exists()
