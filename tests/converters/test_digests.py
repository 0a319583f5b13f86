"""Sixteen digests at a time against hashlib, whatever the lengths, and a conversion that uses them."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.converters import digests, digests_file, digests_pair, pipeline
from bcqfmt.converters.checkpoint import open_source
from bcqfmt.converters.digests import ManyDigests, even
from bcqfmt.converters.digests_file import FileDigests
from bcqfmt.converters.digests_kernel import LANES, Lanes
from bcqfmt.converters.digests_pair import Meeting, PairedDigest, has_instructions
from bcqfmt.converters.pipeline import Conversion, ConvertOptions
from bcqfmt.errors import BcqError, error
from bcqfmt.files import SourceFile
from bcqfmt.stored import StoredTensor
from bcqfmt.writer import write_tensors
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
        patch.setattr(digests, "_STEP", 64 * blocks)
        patch.setattr(digests, "_ROW", 128 * rows)
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


# ---------------------------------------------------------------------------------------------------- two at a time
with_instructions = pytest.mark.skipif(not has_instructions(), reason="no instructions for SHA-256")
CHUNKS = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 3000)), max_size=30)


@with_instructions
@given(st.lists(CHUNKS, min_size=1, max_size=4), st.integers(0, 200), st.integers(1, 3), st.sampled_from([0.0, 0.001]))
@settings(max_examples=100, deadline=None)
def test_files_that_meet_have_their_own_digests(
    files: list[list[int]], head: int, enough: int, patience: float
) -> None:
    """Chunks of any length, handed over by as many threads as there are files, in any order."""
    meeting, found = Meeting(), {}
    contents = [[data(size, 100 * i + j) for j, size in enumerate((head, *sizes))] for i, sizes in enumerate(files)]

    def write(i: int) -> None:
        digest = PairedDigest(meeting, contents[i][0])
        for content in contents[i][1:]:
            digest.update(np.frombuffer(content, np.uint8))
        found[i] = digest.hexdigest()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests_pair, "_ENOUGH", enough)
        patch.setattr(digests_pair, "_MOST", 2 * enough)
        patch.setattr(digests_pair, "_PATIENCE", patience)
        threads = [threading.Thread(target=write, args=(i,)) for i in range(len(files))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == {i: sha256(b"".join(content)) for i, content in enumerate(contents)}
    assert meeting.open == []


@with_instructions
def test_two_files_are_hashed_in_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in the thread of whoever finds the other; one alone when the other is closed, or has nothing for long."""
    monkeypatch.setattr(digests_pair, "_ENOUGH", 2)
    monkeypatch.setattr(digests_pair, "_MOST", 3)
    monkeypatch.setattr(digests_pair, "_PATIENCE", 0.001)
    counts: list[int] = []
    advance = digests_pair._advance
    monkeypatch.setattr(digests_pair, "_advance", lambda streams: (counts.append(len(streams)), advance(streams)))
    meeting, chunk = Meeting(), np.zeros(640, np.uint8)
    one, two = PairedDigest(meeting, b"1"), PairedDigest(meeting, b"")
    one.update(chunk)
    assert counts == [0]  # nobody else has anything yet
    two.update(chunk)
    assert counts == [0, 2]
    for _ in range(3):
        two.update(chunk)
    assert counts == [0, 2, 0, 1]
    two.close()  # as when its file could not be written
    one.update(chunk)
    one.update(chunk)
    assert counts[4:] == [0, 1]
    assert one.hexdigest() == sha256(b"1" + bytes(3 * 640))


@with_instructions
def test_a_stranger_closes_only_when_nobody_hashes_it() -> None:
    """An error of one writer never takes memory away that another is hashing."""
    meeting = Meeting()
    digest = PairedDigest(meeting, b"")
    digest._busy = True
    closing = threading.Thread(target=digest.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    with meeting.changed:
        digest._busy = False
        meeting.changed.notify_all()
    closing.join(60)
    assert not closing.is_alive()


# ------------------------------------------------------------------------------------------------------ in a file
def test_a_written_file_has_the_same_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"w{i:02d}": rng.integers(0, 256, size, np.uint8) for i, size in enumerate([*EDGES, *[70_001] * 9])}
    tensors = {name: StoredTensor.from_array(name, array) for name, array in arrays.items()}
    plain = write_tensors(tmp_path / "plain", tensors, {})
    for small in (0, 1 << 16):
        monkeypatch.setattr(digests_file, "_SMALL", small)
        for wanted in (set(arrays), {"w00", "w03", "w20"}, set()):
            with ManyDigests(meeting=Meeting() if small and has_instructions() else None) as many:
                written = write_tensors(tmp_path / "many", tensors, {}, digests=partial(FileDigests, many, wanted))
            assert written.record == plain.record
            assert written.tensors == {name: plain.tensors[name] for name in wanted}
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "many").read_bytes()


def test_a_write_that_fails_forgets_its_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests_file, "_SMALL", 0)
    tensors = {f"w{i}": StoredTensor.from_array(f"w{i}", np.zeros(5000, np.uint8)) for i in range(20)}

    def stop(done: int) -> None:
        ticks.append(done)
        if len(ticks) == 18:
            raise KeyboardInterrupt

    ticks: list[int] = []
    with ManyDigests() as many, pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "x", tensors, {}, stop, digests=partial(FileDigests, many, set(tensors)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("few", "last", "paired"), [(0, 0, False), (7, 0, True), (7, 50_000, True), (7, 1 << 20, False)]
)
def test_a_conversion_makes_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int, last: int, paired: bool
) -> None:
    source = gptq_folder(tmp_path / "source", layers=20)
    convert(source, tmp_path / "plain", max_shard_size=60_000, workers=2)
    used: list[int] = []
    advance = Lanes.advance

    def counted(lanes: Lanes) -> int:
        used.append(int(np.count_nonzero(lanes.counts)))
        return advance(lanes)

    monkeypatch.setattr(Lanes, "advance", counted)
    monkeypatch.setattr(pipeline, "_WORTH", 0)
    monkeypatch.setattr(pipeline, "faster_here", lambda: True)
    monkeypatch.setattr(pipeline, "even", lambda _: True)
    monkeypatch.setattr(digests_file, "_SMALL", 0)
    monkeypatch.setattr(digests, "_FEW", few)
    monkeypatch.setattr(digests, "_LAST", last)
    monkeypatch.setattr(pipeline, "has_instructions", lambda: paired and has_instructions())
    convert(source, tmp_path / "many", max_shard_size=60_000, workers=2)
    assert tree(tmp_path / "many") == tree(tmp_path / "plain")
    assert used or last == 1 << 20  # the last ones of a large folder, all of this one
    proved(source, tmp_path / "many", tmp_path)


def test_a_source_that_changes_is_found_out_by_the_lanes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gptq_folder(tmp_path / "source", layers=8)
    monkeypatch.setattr(pipeline, "_WORTH", 0)
    monkeypatch.setattr(pipeline, "faster_here", lambda: True)
    monkeypatch.setattr(pipeline, "even", lambda _: True)

    def touch(_: int) -> None:
        path = source / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(BcqError) as caught:
        Conversion(open_source(source), ConvertOptions(max_shard_size=20_000)).run(tmp_path / "bcq", touch)
    assert caught.value.code == "BCQ-E103"
    assert not (tmp_path / "bcq").exists()
