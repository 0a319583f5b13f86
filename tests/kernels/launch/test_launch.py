"""The launch itself, with a recorder in the driver's place: no GPU is needed to see what would be sent to one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from bcqfmt.errors import BcqError
from bcqfmt.kernels.runtime import cubins, device, launch, numba_cuda, tensor_map
from products.pretended_gpu import Recorder, pretend


class Tensor:
    """A torch tensor as far as a launch looks at it."""

    def __init__(self, address: int, index: int = 0) -> None:
        self.address = address
        self.device = type("Device", (), {"index": index})()

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return pretend(monkeypatch)


def scale(x: Any, y: Any, n: Any) -> None:
    """Never run here."""


def test_addresses_numbers_and_the_stream_of_the_moment(recorder: Recorder) -> None:
    made = launch.kernel("u32* x, f32* y, u32 n", threads=128, blocks=2)(scale)
    made.launch((3, 4), 64, Tensor(0x1000), Tensor(0x2000), 7, shared=1024)
    made.launch((5,), 128, Tensor(0x3000), Tensor(0x2000), 8)
    assert recorder.launched == [
        ((3, 4), 64, 1024, 100, [0x1000, 0x2000, 7], False),
        ((5,), 128, 0, 101, [0x3000, 0x2000, 8], False),
    ]
    assert recorder.loaded == [("scale", (9, 0))]  # once for a device
    assert recorder.shared == [1024, 0]
    assert str(made.signature()) == "(uint32*, float32*, uint32) -> none"
    assert made.options == {"launch_bounds": (128, 2)}


def test_an_early_launch(recorder: Recorder) -> None:
    made = launch.kernel("u32* x", threads=32)(scale)
    made.launch((1,), 32, Tensor(0), early=True)
    made.launch((1,), 32, Tensor(0))
    assert [one.early for one in recorder.launched] == [True, False]


def test_one_compilation_per_device(recorder: Recorder) -> None:
    made = launch.kernel("u32* x", threads=32)(scale)
    for index in (0, 1, 0, 1):
        made.launch((1,), 32, Tensor(0, index))
    assert len(recorder.loaded) == 2


def test_nothing_is_launched_for_nothing(recorder: Recorder) -> None:
    made = launch.kernel("u32* x", threads=32)(scale)
    made.launch((0, 4), 32, Tensor(0))
    assert not recorder.launched


def test_mistakes_of_a_caller(recorder: Recorder) -> None:
    made = launch.kernel("u32* x, u32 n", threads=32)(scale)
    with pytest.raises(TypeError, match="takes 2 arguments, not 1"):
        made.launch((1,), 32, Tensor(0))
    with pytest.raises(BcqError, match="BCQ-E554"):
        made.launch((1, 70000), 32, Tensor(0), 1)
    assert not recorder.launched


class Driver(SimpleNamespace):
    """The driver's own structures; its functions write down what they are given."""

    def __init__(self, answer: Any = driver.CUresult.CUDA_SUCCESS) -> None:
        names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID", "CUfunction_attribute")
        super().__init__(**{name: getattr(driver, name) for name in names})
        self.calls: list[tuple[Any, ...]] = []
        self.answer = answer

    def cuModuleLoadData(self, code: bytes) -> tuple[Any, Any]:
        return driver.CUresult.CUDA_SUCCESS, 1

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, Any]:
        return driver.CUresult.CUDA_SUCCESS, 2

    def cuCtxGetCurrent(self) -> tuple[Any, Any]:
        return driver.CUresult.CUDA_SUCCESS, 3

    def cuCtxSetCurrent(self, context: int) -> tuple[Any]:
        self.calls.append(("context", context))
        self.answer = driver.CUresult.CUDA_SUCCESS
        return (self.answer,)

    def cuFuncSetAttribute(self, function: int, attribute: Any, value: int) -> tuple[Any]:
        self.calls.append(("attribute", function, attribute.name, value))
        return (self.answer,)

    def cuLaunchKernel(self, function: int, *given: Any) -> tuple[Any]:
        *given, address, extra = given
        self.calls.append(("plain", function, *given, self.arguments(address), extra))
        return (self.answer,)

    def arguments(self, address: int) -> tuple[Any, ...]:
        """What a kernel (u64, u32, f32, i32, f64) finds where the addresses at ``address`` lead."""
        types: tuple[Any, ...] = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float, ctypes.c_int32, ctypes.c_double)
        places = (ctypes.c_uint64 * len(types)).from_address(address)
        return tuple(kind.from_address(place).value for kind, place in zip(types, places, strict=True))

    def cuLaunchKernelEx(self, config: Any, function: int, address: int, extra: int) -> tuple[Any]:
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        assert config.numAttrs == len(config.attrs)
        said = [(item.id.name, item.value.programmaticStreamSerializationAllowed) for item in config.attrs]
        given = (*grid, *block, config.sharedMemBytes, int(config.hStream), self.arguments(address), extra)
        self.calls.append(("early", function, *given, said))
        return (self.answer,)


def loaded(monkeypatch: pytest.MonkeyPatch, found: Driver) -> cubins.Loaded:
    monkeypatch.setattr(cubins, "code_of", lambda kernel, capability, ptx: ("scale", b"code"))
    monkeypatch.setattr(cubins.importlib, "import_module", lambda name: found)
    return cubins.Loaded(launch.kernel("u8* x, u32 n, f32 a, i32 k, f64 b", threads=32)(scale), (9, 0))


VALUES = (0x7F0000001000, 2**32 - 1, 0.5, -7, 0.1)
SAID = [("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", 1)]


@pytest.mark.parametrize("early", [False, True])
def test_what_the_driver_is_asked_for(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With programmatic stream serialization where a launch is early; the rest is the same."""
    found = Driver()
    made = loaded(monkeypatch, found)
    wanted = []
    for grid, stream, number in (((3, 4), 0x7F0012345678, 5), ((3, 4), 0, 6), ((9,), 1, 7), ((1, 2, 3), 1, 8)):
        values = [VALUES[0], number, *VALUES[2:]]
        made.launch(grid, 64, 1024, stream, values, early)
        size = (*grid, 1, 1)[:3]
        one = (2, *size, 64, 1, 1, 1024, stream, tuple(values), 0)
        wanted.append(("early", *one, SAID) if early else ("plain", *one))
    assert found.calls == wanted


def test_a_tensor_map_is_128_bytes_of_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Reading(Driver):
        def arguments(self, address: int) -> tuple[Any, ...]:
            places = (ctypes.c_uint64 * 3).from_address(address)
            seen.append([ctypes.string_at(place, size) for place, size in zip(places, (8, 128, 4), strict=True)])
            return ()

    monkeypatch.setattr(cubins, "code_of", lambda kernel, capability, ptx: ("scale", b"code"))
    monkeypatch.setattr(cubins.importlib, "import_module", lambda name: Reading())
    made = cubins.Loaded(launch.kernel("u8* y, map x, u32 n", threads=32)(scale), (9, 0))
    made.launch((1,), 32, 0, 0, [5, bytes(range(128)), 7])
    assert seen == [[(5).to_bytes(8, "little"), bytes(range(128)), (7).to_bytes(4, "little")]]


def test_kernels_take_tensor_maps_by_value() -> None:
    """What Numba compiles as an address is the map itself in PTX; other arguments stay."""
    text = """.entry k(
\t.param .u64 k_param_0,
\t.param .u64 k_param_1,
\t.param .u64 k_param_10
)
\tld.param.u64 \t%rd6, [k_param_1];
\tld.param.u64 \t%rd7, [k_param_10];"""
    found = tensor_map.maps_by_value(text, [1])
    changed = [(old, new) for old, new in zip(text.split("\n"), found.split("\n"), strict=True) if old != new]
    assert [new.strip() for _, new in changed] == [
        ".param .align 64 .b8 k_param_1[128],",
        "mov.u64 %rd6, k_param_1; cvta.param.u64 %rd6, %rd6;",
    ]
    with pytest.raises(BcqError, match="argument 2 is declared 0 times"):
        tensor_map.maps_by_value(text, [2])


@pytest.mark.parametrize("fine", [True, False])
def test_what_a_tensor_map_asks_of_the_driver(fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns 8 .. 71 of 4 rows of 80; bytes of the map, or the driver's refusal."""
    asked, held = [], ctypes.create_string_buffer(bytes(range(128)), 128)

    def encode(*given: Any) -> tuple[Any, Any]:
        asked.append(given)
        status = driver.CUresult.CUDA_SUCCESS if fine else driver.CUresult.CUDA_ERROR_INVALID_VALUE
        return status, SimpleNamespace(getPtr=lambda: ctypes.addressof(held))

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    tensor_map._encoded.cache_clear()
    array = np.zeros((4, 80), np.float16)
    wanted = tensor_map.TensorMap(array, 8, 64, 16)
    if fine:
        assert wanted.encoded() == bytes(range(128))
    else:
        with pytest.raises(BcqError, match=r"BCQ-E551.*4 x 64.*INVALID_VALUE"):
            wanted.encoded()
    kind, rank, address, sizes, strides, box, steps, *_ = asked[0]
    assert (kind.name, rank, address) == ("CU_TENSOR_MAP_DATA_TYPE_UINT16", 2, array.ctypes.data + 16)
    assert [[int(n) for n in part] for part in (sizes, strides, box, steps)] == [[64, 4], [160], [64, 16], [1, 1]]
    tensor_map._encoded.cache_clear()


def test_numbers_beyond_float32_are_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Driver()
    loaded(monkeypatch, found).launch((1,), 32, 0, 0, [0, 1, 1e300, 0, 1e300])
    assert found.calls[0][-2] == (0, 1, float("inf"), 0, 1e300)


@pytest.mark.parametrize("early", [False, True])
def test_threads_do_not_share_what_the_driver_reads(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two threads waits inside of the driver until the other has got there too."""
    found, both = Driver(), threading.Barrier(2, timeout=60)
    made = loaded(monkeypatch, found)
    inside = found.arguments
    monkeypatch.setattr(found, "arguments", lambda address: (both.wait(), inside(address))[1])
    given = [(number, 100 + number) for number in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        for number, stream in given:
            pool.submit(made.launch, (5,), 32, 0, stream, [VALUES[0], number, *VALUES[2:]], early)
    seen = sorted((call[10][1], call[9]) for call in found.calls)
    assert seen == given


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_that_the_driver_refuses(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(monkeypatch, Driver(driver.CUresult.CUDA_ERROR_INVALID_VALUE))
    with pytest.raises(BcqError, match=r"BCQ-E551.*scale: CUDA_ERROR_INVALID_VALUE"):
        made.launch((1,), 32, 0, 0, list(VALUES), early)


@pytest.mark.parametrize("way", ["plain", "early", "attribute"])
def test_a_thread_without_a_context_is_given_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Driver(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT)
    made = loaded(monkeypatch, found)
    if way == "attribute":
        made.allow_shared(100_000)
    else:
        made.launch((1,), 32, 0, 0, list(VALUES), way == "early")
    first, second, third = found.calls
    assert second == ("context", 3)
    assert first == third
    assert first[0] == way


def test_shared_memory_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Driver(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    made = loaded(monkeypatch, found)
    made.allow_shared(48 * 1024)
    assert not found.calls
    with pytest.raises(BcqError, match=r"BCQ-E554.*scale needs 300000 bytes"):
        made.allow_shared(300_000)


def test_a_gpu_that_is_not_the_current_one(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only there is the current device changed, and back."""
    seen: list[Any] = []

    @contextlib.contextmanager
    def on(array: Any) -> Iterator[None]:
        seen.append(array.device.index)
        yield
        seen.append(len(recorder.launched))

    monkeypatch.setattr(launch, "_on", on)
    made = launch.kernel("u32* x", threads=32)(scale)
    made.launch((1,), 32, Tensor(0, 0))
    assert not seen
    made.launch((1,), 32, Tensor(0, 1))
    assert seen == [1, 2]


def test_gpus_of_several_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of one is never taken for another; each is asked once."""
    asked: list[int] = []
    monkeypatch.delenv("BCQFMT_CAPABILITY", raising=False)

    class Gpu(SimpleNamespace):
        @property
        def compute_capability(self) -> tuple[int, int]:
            asked.append(self.id)
            return self.capability

    gpus = [
        Gpu(id=0, capability=(9, 0), MULTIPROCESSOR_COUNT=132),
        Gpu(id=1, capability=(8, 6), MULTIPROCESSOR_COUNT=84),
    ]
    now = SimpleNamespace(gpus=gpus, get_current_device=lambda: gpus[1])
    monkeypatch.setattr(device, "require_cuda", lambda: None)
    monkeypatch.setattr(device, "simulated", lambda: False)
    monkeypatch.setattr(numba_cuda, "cuda", now)
    device._asked.cache_clear()
    try:
        for _ in range(2):
            assert [device.capability(index) for index in (0, 1, None)] == [(9, 0), (8, 6), (8, 6)]
            assert [device.processors(index) for index in (0, 1, None)] == [132, 84, 84]
        assert asked == [0, 1]
        device.require_capability(9, 0, 0)
        for index in (1, None):
            with pytest.raises(BcqError, match=r"BCQ-E551.*capability 8\.6"):
                device.require_capability(9, 0, index)
    finally:
        device._asked.cache_clear()


def test_who_listens_hears_of_a_compilation_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    """And not of a kernel that is there already."""
    heard: list[Any] = []
    monkeypatch.setenv("BCQFMT_CACHE", str(tmp_path))
    monkeypatch.setattr(cubins, "_linked", lambda text, capability: b"code")
    made = launch.kernel("u32* x", threads=32, variant="some")(scale)
    monkeypatch.setattr(made, "compile", lambda capability: heard.append("compiled") or ".entry scale(")
    with cubins.compile_listener(lambda name, folder: heard.append((name, folder))):
        assert cubins.code_of(made, (9, 0)) == ("scale", b"code")
        assert heard == [("scale", tmp_path), "compiled"]
        assert cubins.code_of(made, (9, 0)) == ("scale", b"code")
    assert len(heard) == 2
    cubins.code_of(made, (8, 0))
    assert heard[2:] == ["compiled"]  # nobody listens any more


def test_a_change_anywhere_among_the_kernels_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device functions of any folder may be inlined into a kernel: a cached one is for these very sources."""
    source = tmp_path / "bits" / "ring.py"
    source.parent.mkdir()
    monkeypatch.setattr(cubins, "__file__", str(tmp_path / "runtime" / "cubins.py"))

    def digest(text: str) -> bytes:
        source.write_text(text)
        cubins._sources.cache_clear()
        return cubins._sources()

    try:
        first = digest("a = 1\n")
        assert digest("a = 2\n") != first
        assert digest("a = 1\n") == first
        source.rename(source.with_name("other.py"))
        cubins._sources.cache_clear()
        assert cubins._sources() != first
    finally:
        cubins._sources.cache_clear()


@pytest.mark.parametrize("threshold", [700, 0, 100_000])
def test_the_collector_is_set_back_after_a_compilation(threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = gc.get_threshold(), list[int]()

    def compile_ptx(*_: Any, **__: Any) -> Any:
        seen.append(gc.get_threshold()[0])
        raise ZeroDivisionError

    monkeypatch.setattr(numba_cuda, "cuda", SimpleNamespace(compile_ptx=compile_ptx))
    gc.set_threshold(threshold, *before[1:])
    try:
        with pytest.raises(ZeroDivisionError):
            launch.kernel("f32* y", threads=32)(scale).compile((9, 0))
        assert gc.get_threshold()[0] == threshold
        assert seen == [max(threshold, 50_000) if threshold else 0]  # switched off stays off
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("text", "found"), [("", (9, 0)), ("8.0", (8, 0)), ("8.9", (8, 9)), ("9.0", (9, 0))]
)  # fmt: skip
def test_kernels_for_an_older_gpu_than_this_one(
    text: str, found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver compiles them if they are not for this very GPU."""
    monkeypatch.setenv("BCQFMT_CAPABILITY", text)
    assert device._chosen((9, 0)) == found
    one = device.Gpu(found, 132, (9, 0))
    monkeypatch.setattr(device, "require_cuda", lambda: None)
    monkeypatch.setattr(device, "_asked", lambda index: one)
    assert device.compiled_by_driver(0) == (found != (9, 0))
    assert device.shared_limit(0) // 1024 == {(8, 0): 163, (8, 9): 99, (9, 0): 227}[found]


def test_no_ptx_of_one_gpu_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for 9.0 are for that alone; those for 8.0 may take more shared memory than an RTX 50 has."""
    for text, fine in (("9.0", False), ("8.0", False), ("8.9", True), ("12.0", True)):
        monkeypatch.setenv("BCQFMT_CAPABILITY", text)
        if fine:
            assert device._chosen((12, 0)) == tuple(map(int, text.split(".")))
        else:
            with pytest.raises(BcqError, match=r"BCQ-E302.*one of 8\.6, 8\.9, 12\.0 on this GPU"):
                device._chosen((12, 0))


@pytest.mark.parametrize("own", [(8, 0), (9, 0)])
def test_what_the_driver_has_to_compile_is_loaded_as_text(
    own: tuple[int, int], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_asked", lambda index: device.Gpu((8, 0), 132, own))
    launch.kernel("u32* x", threads=32)(scale).launch((1,), 32, Tensor(0, 0))
    assert (recorder.loaded, recorder.texts) == ([("scale", (8, 0))], [own != (8, 0)])


@pytest.mark.parametrize("text", ["10.0", "9.1", "7.5", "8", "8.1", "8.0a", "sm_80", "٨.0"])
def test_a_capability_that_the_gpu_does_not_have(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCQFMT_CAPABILITY", text)
    with pytest.raises(BcqError, match=r"BCQ-E302.*one of 8\.0, 8\.6, 8\.7, 8\.9, 9\.0 on") as refusal:
        device._chosen((9, 0))
    assert "unset BCQFMT_CAPABILITY" in repr(refusal.value)


def test_code_for_the_driver_is_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kept apart from machine code, and ended by a zero, as the driver wants it."""
    monkeypatch.setenv("BCQFMT_CACHE", str(tmp_path))
    monkeypatch.setattr(cubins, "_linked", lambda text, capability: b"code")
    made = launch.kernel("u32* x", threads=32, variant="some")(scale)
    monkeypatch.setattr(made, "compile", lambda capability: ".entry scale(")
    for _ in range(2):
        assert cubins.code_of(made, (8, 0), ptx=True) == ("scale", b".entry scale(\0")
        assert cubins.code_of(made, (8, 0)) == ("scale", b"code")
    assert sorted(path.suffix for path in (tmp_path / "kernels").iterdir()) == [".cubin", ".ptx"]


@pytest.mark.parametrize(("capability", "most"), [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227)])
def test_no_more_shared_memory_than_such_a_gpu_has(
    capability: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Also where this GPU has more."""
    found = Driver()
    monkeypatch.setattr(cubins, "code_of", lambda kernel, capability, ptx: ("scale", b"code"))
    monkeypatch.setattr(cubins.importlib, "import_module", lambda name: found)
    made = cubins.Loaded(launch.kernel("u8* x", threads=32)(scale), capability)
    made.allow_shared(most * 1024)
    with pytest.raises(BcqError, match="BCQ-E554"):
        made.allow_shared(most * 1024 + 16)
