"""Attacks on the program, one function each: it returns when the attack came to nothing, and fails when it did not.

Every attack is run twice: as it is, and with the guard that stops it taken out, where it must fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from click.testing import CliRunner
from safetensors.numpy import save_file

import bcqfmt
from bcqfmt import limits
from bcqfmt.cli import render
from bcqfmt.cli.main import cli
from bcqfmt.container.files import SourceFile
from bcqfmt.converters.convert.restore import restore
from bcqfmt.converters.jobs.model_card import Facts, converted, model_card
from bcqfmt.converters.layouts.protocol import Options
from bcqfmt.converters.layouts.registry import find_modules
from bcqfmt.converters.report import make_report
from bcqfmt.converters.report.html import report_html
from bcqfmt.converters.source import checkpoint, patterns
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.converters.source.quant_config import Settings
from bcqfmt.errors import BcqError, Finding
from fuzz.folder_mutations import canonical
from sources.conversions import convert, gptq_folder
from weights import samples

# A terminal's clipboard and links, a forged line, colours, a reversed text, C1 codes, markup.
HOSTILE = "a\x1b]52;c;ZXZpbA==\x07\nerror: forged\r\x1b[31m\u202e\x9b2J\x00<script>alert(1)</script>[x](http://e)é"
INDEX = "model.safetensors.index.json"
MB = 1_000_000


def refused(action: Callable[[], object], *codes: str) -> BcqError:
    """The error, which must have one of the codes."""
    try:
        action()
    except BcqError as fault:
        found = fault
    else:
        raise AssertionError(f"it was not refused, {codes} expected")
    if found.code not in codes:
        raise AssertionError(f"refused for another reason: {found}")
    return found


def told(path: Path, code: str, deep: bool = False) -> None:
    """The validator reports the code first."""
    errors = bcqfmt.validate(path, deep=deep).errors
    assert errors, "the validator accepts it"
    assert errors[0].code == code, errors[0].text()


def peak(action: Callable[[], object]) -> int:
    """The most bytes that Python and numpy had allocated at once."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


# ------------------------------------------------------------------------------------------- pickles and other code
def pickle_by_another_name(scratch: Path) -> None:
    folder = bcq_folder(scratch)
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(scratch / "mark")))
    told(folder / "model.safetensors", "BCQ-E203")
    refused(lambda: bcqfmt.open(folder / "model.safetensors"), "BCQ-E203")
    assert not (scratch / "mark").exists()


def only_pickles(scratch: Path) -> None:
    (scratch / "m").mkdir()
    (scratch / "m" / "config.json").write_text("{}")
    (scratch / "m" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(scratch / "mark")))
    refused(lambda: bcqfmt.open(scratch / "m"), "BCQ-E105")
    refused(lambda: open_source(scratch / "m"), "BCQ-E105")
    assert not (scratch / "mark").exists()


def pickles_beside_the_model(scratch: Path) -> None:
    """They are neither opened nor handed on."""
    source = gptq_folder(scratch / "source", layers=1, n=32, k=64)
    for name in ("pytorch_model.bin", "x.pt", "training.pkl", "old.ckpt"):
        (source / name).write_bytes(pickle.dumps(Bomb(scratch / "mark")))
    convert(source, scratch / "bcq")
    carried = {path.suffix for path in (scratch / "bcq").rglob("*") if path.is_file()}
    assert not carried & {".bin", ".pt", ".pkl", ".ckpt"}, carried
    assert not (scratch / "mark").exists()


def code_on_the_hub(scratch: Path) -> None:
    from bcqfmt.converters.hub.repo import needed

    names = ["tokenizer.py", "tokenizer_x.so", "config.pkl", "configuration_evil.py", "config.json", "x.safetensors"]
    assert needed(names) == ["config.json", "x.safetensors"]


# -------------------------------------------------------------------------------------------------------------- paths
OUTSIDE = ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", ".x.safetensors"]
OUTSIDE += ["-x.safetensors", "x.safetensors\n", "x.bin", "C:x.safetensors", "%2e%2e%2fx.safetensors"]


def bcq_folder(scratch: Path, **options: Any) -> Path:
    folder = scratch / "bcq"
    shutil.rmtree(folder, ignore_errors=True)
    bcqfmt.save(folder, samples.tensors(), config=samples.CONFIG, **options)
    return folder


def index_of_a_bcq_folder(scratch: Path) -> None:
    """The name in the index is refused before anything is opened, whether the file is there or not."""
    folder = bcq_folder(scratch, max_shard_size=1500)
    shutil.copy(min(folder.glob("model-*.safetensors")), scratch / "secret.safetensors")
    index = json.loads((folder / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    for path in OUTSIDE:
        index["weight_map"][name] = path
        (folder / INDEX).write_text(json.dumps(index))
        told(folder, "BCQ-V502")
        refused(lambda: bcqfmt.open(folder), "BCQ-V502")


def index_of_a_source(scratch: Path) -> None:
    source = gptq_folder(scratch / "source", layers=1, n=32, k=64)
    names = list(bcqfmt_header(source / "model.safetensors"))
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    for path in OUTSIDE:
        weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors") | {names[0]: path}
        (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        refused(lambda: open_source(source), "BCQ-V502")


def link_out_of_the_folder(scratch: Path) -> None:
    folder = bcq_folder(scratch)
    (folder / "model.safetensors").rename(scratch / "secret.safetensors")
    (folder / "model.safetensors").symlink_to(scratch / "secret.safetensors")
    told(folder, "BCQ-V507")
    refused(lambda: bcqfmt.open(folder), "BCQ-V507")


def manifest_path(scratch: Path) -> None:
    folder = bcq_folder(scratch)
    (scratch / "secret").write_text("secret")
    for path in ("../secret", "/etc/passwd", "a/../../secret", "a//b", "a\\b", "."):
        manifest = json.loads((folder / "bcq_manifest.json").read_text())
        manifest["files"] = {name: entry for name, entry in manifest["files"].items() if ".json" in name}
        manifest["files"][path] = {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
        (folder / "bcq_manifest.json").write_bytes(signed(manifest))
        told(folder, "BCQ-V602")


def restored_path(scratch: Path) -> None:
    """``restore`` writes where the record says; the record cannot lead out of the target."""
    source = gptq_folder(scratch / "source", layers=1, n=32, k=64)
    (source / "x.txt").write_text("evil")
    convert(source, scratch / "bcq")
    record = scratch / "bcq" / "bcq_source" / "source.json"
    archive = scratch / "bcq" / "bcq_source" / "files"
    value = json.loads(record.read_text())
    value["files"]["../../escaped.txt"] = value["files"].pop("x.txt")
    record.write_bytes(canonical(value))
    (archive / "../../escaped.txt").write_text("evil")
    manifest = json.loads((scratch / "bcq" / "bcq_manifest.json").read_text())
    manifest["source"]["files"]["../../escaped.txt"] = manifest["source"]["files"].pop("x.txt")
    (scratch / "bcq" / "bcq_manifest.json").write_bytes(signed(manifest))

    def run() -> None:
        with bcqfmt.open(scratch / "bcq") as checkpoint:
            restore(checkpoint, scratch / "deep" / "er" / "out")

    refused(run, "BCQ-V602", "BCQ-V701")
    assert not list((scratch / "deep").rglob("escaped.txt"))


def record_of_its_own(scratch: Path) -> None:
    """A source that brings a record along, which says what `restore` gives back."""
    source = gptq_folder(scratch / "source", layers=1, n=32, k=64)
    convert(source, scratch / "first")
    shutil.copytree(scratch / "first" / "bcq_source", source / "bcq_source")
    (source / "bcq_source" / "files" / "config.json").write_text('{"evil": true}')
    refused(lambda: convert(source, scratch / "bcq"), "BCQ-E617")
    assert not (scratch / "bcq.partial").exists()


def rule_that_no_converter_writes(scratch: Path) -> None:
    source = gptq_folder(scratch / "source", layers=1, n=32, k=64)
    convert(source, scratch / "bcq")
    record = scratch / "bcq" / "bcq_source" / "source.json"
    value = json.loads(record.read_text())
    next(rule for rule in value["rules"] if rule["rule"] == "gptq.qweight")["bits"] = ["many"]
    record.write_bytes(canonical(value))

    def run() -> None:
        with bcqfmt.open(scratch / "bcq") as checkpoint:
            restore(checkpoint, scratch / "out")

    refused(run, "BCQ-V703")


def folder_that_is_no_checkpoint(scratch: Path) -> None:
    (scratch / "bcq" / ".git").mkdir(parents=True)
    (scratch / "bcq" / "config.json").write_text("{}")
    source = gptq_folder(scratch / "source", layers=1, n=32, k=64)
    refused(lambda: convert(source, scratch / "bcq", overwrite=True), "BCQ-E401")
    assert (scratch / "bcq" / ".git").is_dir()


def time_that_was_set_back(scratch: Path) -> None:
    """Other bytes, the same length, the same time of writing."""
    path = bcq_folder(scratch) / "model.safetensors"
    with contextlib.closing(SourceFile(path)) as opened:
        before, raw = path.stat(), path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        while path.stat().st_ctime_ns == before.st_ctime_ns:  # clocks of file systems are coarse
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        refused(lambda: opened.read(0, 8), "BCQ-E103")


def signed(manifest: dict[str, Any]) -> bytes:
    manifest.pop("sha256", None)
    manifest["sha256"] = hashlib.sha256(canonical(manifest)[:-1]).hexdigest()
    return canonical(manifest)


def bcqfmt_header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    value: dict[str, Any] = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    return {name: entry for name, entry in value.items() if name != "__metadata__"}


# -------------------------------------------------------------------------------------------------------------- names
def clean(text: str) -> None:
    """No byte that a terminal would act upon, and no line that the file has forged."""
    bad = [c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E]
    assert not bad, ascii("".join(bad))
    assert "\nerror: forged" not in text


def hostile_file(scratch: Path) -> Path:
    path = scratch / "hostile.safetensors"
    bcqfmt.save(path, {**samples.tensors(), HOSTILE: np.arange(4, dtype=np.int32)})
    return path


def said(*words: str) -> str:
    """stdout and stderr of a verb."""
    return CliRunner().invoke(cli, list(words)).output


def names_on_a_terminal(scratch: Path) -> None:
    path = hostile_file(scratch)
    save_file({HOSTILE: np.zeros(2, np.int8)}, scratch / "plain.safetensors")
    shown = [said("inspect", str(path), "--modules"), said("validate", "--deep", str(path))]
    shown += [said("diff", str(path), str(scratch / "plain.safetensors")), said("inspect", str(scratch / HOSTILE[:9]))]
    assert any("52;c" in text for text in shown), "the name is shown nowhere"
    for text in shown:
        clean(text)


def lines_on_a_terminal(scratch: Path) -> None:
    """Whatever is written, by whatever verb, goes through one place."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        render.echo([HOSTILE])
        render.say([HOSTILE])
        render.echo(render.table(["name"], [[HOSTILE]]))
    clean(out.getvalue())


def names_in_findings(scratch: Path) -> None:
    """Errors are shown by other programs too: their text is safe by itself."""
    finding = Finding("BCQ-V302", HOSTILE, HOSTILE, "x")
    clean(finding.text())
    clean("".join(f"{key}{value}" for key, value in finding.as_dict().items()))


def names_in_json(scratch: Path) -> None:
    path = hostile_file(scratch)
    bcqfmt.save(scratch / "other.safetensors", samples.tensors())
    asked = [["inspect", str(path), "--modules"], ["validate", str(path)], ["report", str(path)]]
    shown = [said(*words, "--json") for words in [*asked, ["diff", str(path), str(scratch / "other.safetensors")]]]
    assert any("52;c" in text for text in shown), "the name is shown nowhere"
    for text in shown:
        json.loads(text)
        clean(text)
        assert text.isascii()


def names_in_the_report(scratch: Path) -> None:
    with bcqfmt.open(hostile_file(scratch)) as checkpoint:
        page = report_html(make_report(checkpoint)).decode()
    clean(page)
    assert "alert(1)" in page
    assert "<script" not in page


def names_in_the_card(scratch: Path) -> None:
    settings = Settings(method="<img src=x onerror=alert(1)>[x](http://e)", raw={"dataset": "www.e.com `x` | {bits}"})
    front = b'---\nlicense: "mit\\nbase_model: evil/x"\ntags: ["a\\n---\\n# x"]\n---\n'
    facts = Facts("me/" + HOSTILE, "", {"_name_or_path": HOSTILE}, front, [], [], 0.5, 1, provenance=True)
    card = model_card(facts, converted(settings, provenance=True)).decode()
    clean(card)
    front_part, body = card.split("\n---\n", 1)
    assert [line.partition(":")[0] for line in front_part.split("\n")[1:] if ":" in line.partition('"')[0]] == [
        "license", "library_name", "tags",
    ]  # fmt: skip
    body = body.replace("\\<", "").replace("\\[", "")
    assert "<" not in body
    assert "[x](" not in body
    assert "http://e" not in body
    assert "www.e" not in body


# ---------------------------------------------------------------------------------------------------------- resources
def header(length: int, size: int, path: Path) -> Path:
    """A file of ``size`` bytes, nearly all of them never written, that claims a header of ``length`` bytes."""
    path.write_bytes(struct.pack("<Q", length) + b"{")
    os.truncate(path, size)
    return path


def header_too_long(scratch: Path) -> None:
    path = header(60 * MB, 100 * MB, scratch / "a.safetensors")
    assert peak(lambda: told(path, "BCQ-V102")) < MB


def header_longer_than_the_file(scratch: Path) -> None:
    path = header(20 * MB, 100, scratch / "a.safetensors")
    assert peak(lambda: told(path, "BCQ-V103")) < MB


def framed(value: dict[str, Any] | bytes, path: Path, data: bytes = b"") -> Path:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def tensor_larger_than_the_file(scratch: Path) -> None:
    """2^47 elements on 8 bytes."""
    entry = {"dtype": "F32", "shape": [2**24, 2**23], "data_offsets": [0, 8]}
    path = framed({"a": entry}, scratch / "a.safetensors", bytes(8))
    assert peak(lambda: told(path, "BCQ-V112")) < MB


def too_many_elements(scratch: Path) -> None:
    """Numbers that would wrap in 64 bits."""
    entry = {"dtype": "U8", "shape": [2**32, 2**32, 2**32, 0], "data_offsets": [0, 0]}
    told(framed({"a": entry}, scratch / "a.safetensors"), "BCQ-V111")


def too_many_tensors(scratch: Path) -> None:
    entry = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    with mock.patch.object(limits, "MAX_TENSORS", 1000):
        text = b"{" + b",".join(b'"%x":%b' % (i, entry) for i in range(1001)) + b"}"
        told(framed(text, scratch / "a.safetensors"), "BCQ-V108")


def nested_deeply(scratch: Path) -> None:
    told(framed(b'{"a":' + b"[" * 100_000, scratch / "a.safetensors"), "BCQ-V106")


def configuration_too_large(scratch: Path) -> None:
    folder = bcq_folder(scratch)
    os.truncate(folder / "config.json", limits.MAX_CONFIG_BYTES + 1)
    assert peak(lambda: told(folder, "BCQ-V511")) < 2 * MB


def weight_too_large(scratch: Path) -> None:
    """A descriptor that promises more bits than a weight may have: told before its parts are looked at."""
    from bcqfmt import BcqWeight

    weight = BcqWeight.from_affine(np.zeros((8, 32), np.uint8), np.ones((8, 1), np.float16), 0, group_size=32, bits=4)
    path = scratch / "a.safetensors"
    bcqfmt.save(path, {"w.weight": weight})
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    value = json.loads(raw[8 : 8 + length])
    described = json.loads(value["__metadata__"]["bcqfmt"])
    described["weights"]["w.weight"]["shape"] = [2**31 - 1, 2**31 - 1]
    value["__metadata__"]["bcqfmt"] = canonical(described)[:-1].decode()
    text = json.dumps(value).encode()
    framed(text + b" " * (-len(text) % 8), path, raw[8 + length :])
    told(path, "BCQ-V210")


def patterns_without_end(scratch: Path) -> None:
    """A pattern of the configuration that takes more steps than all names of a model may."""
    source = gptq_folder(scratch / "source", layers=1, dynamic={"(?:(?:.?){100}){200}b": {}})
    with mock.patch.object(patterns, "_STEPS", 10_000):
        refused(lambda: find_modules(open_source(source), Options()), "BCQ-E618")


def findings_without_number(scratch: Path) -> None:
    """A file that is wrong in 50,000 places is told in memory for 1,000."""
    entries = {f"x{i}.bcq_y": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(50_000)}
    described = canonical({"version": "1.0", "features": [], "schemes": [], "weights": {}})[:-1].decode()
    path = framed({"__metadata__": {"format": "pt", "bcqfmt": described}, **entries}, scratch / "a.safetensors")
    assert sum(finding.code == "BCQ-V302" for finding in bcqfmt.validate(path).findings) == 1000


def files_without_number(scratch: Path) -> None:
    source = gptq_folder(scratch / "source", layers=1)
    with mock.patch.object(checkpoint, "_MAX_FILES", 2):
        refused(lambda: open_source(source), "BCQ-E803")
