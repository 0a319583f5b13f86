"""Statistics of a model's inputs: against a plain run of the whole model, resumed, refused."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from bcqfmt.cli.main import cli
from bcqfmt.converters.quantize import calibration, calibration_work
from bcqfmt.converters.quantize.calibration import calibrate
from bcqfmt.converters.quantize.calibration_work import TextOptions, choose_rows, read_text
from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
from bcqfmt.converters.quantize.stats import open_stats, stats_tensors, write_stats
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from programs import verbs
from sources.word_models import HIDDEN, LAYERS, save_model, save_text, save_tokenizer

Array = np.ndarray[Any, Any]
SEQ, ROWS = 12, 5
PEERS = Path(__file__).resolve().parents[1] / "data" / "peers"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("texts") / "text.txt", 200)


def run(folder: Path, text: Path, out: Path, **more: Any) -> Any:
    options = {"rows": ROWS, "seq": SEQ, "device": "cpu", **more}
    return calibrate(open_source(folder), read_text(text), out, **options)


@pytest.fixture(scope="module")
def finished(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stats") / "stats.safetensors"
    run(model, text, out)
    return out


def plain_run(folder: Path, text: Path) -> dict[str, Array]:
    """Sums of x x^T in float64 at every linear layer, from one run of the whole model."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = text.read_text().split()
    tokens = choose_rows(read_text(text), lambda _: [int(word[1:]) for word in words], ROWS, SEQ, 0)
    found: dict[str, Array] = {}

    def hook(name: str) -> Callable[[Any, Any], None]:
        def add(module: Any, given: Any) -> None:
            x = given[0].reshape(-1, given[0].shape[-1]).double().numpy()
            found[name] = found.get(name, 0) + x.T @ x

        return add

    for name, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(f"{name}.weight"))
    with torch.inference_mode():
        for row in tokens:
            whole(input_ids=torch.from_numpy(row)[None])
    return found


def check_against(stats: Any, expected: dict[str, Array], rename: Callable[[str], str] = str) -> None:
    assert set(stats.inputs) == {rename(name) for name in expected}
    for name, full in expected.items():
        found = stats.of(rename(name))
        np.testing.assert_allclose(found.hessian, full, rtol=1e-4, atol=1e-5 * np.abs(full).max())
        np.testing.assert_allclose(found.square_sum, np.diagonal(full), rtol=1e-5)
        assert found.hessian.dtype == np.float32
        assert found.square_sum.dtype == np.float64
        assert found.tokens == ROWS * SEQ


def test_statistics_are_those_of_the_whole_model(model: Path, text: Path, finished: Path) -> None:
    assert not calibration.Model(open_source(model), SEQ).whole
    check_against(open_stats(finished), plain_run(model, text))
    assert sorted(path.name for path in finished.parent.iterdir()) == ["stats.safetensors"]


def test_weights_of_one_input_share_it(finished: Path) -> None:
    stats = open_stats(finished)
    layer = "model.layers.1."
    attention = tuple(f"{layer}self_attn.{name}_proj.weight" for name in "kqv")
    for name in attention:
        assert stats.of(name).shared == attention  # type: ignore[union-attr]
    assert stats.of(f"{layer}self_attn.o_proj.weight").shared == (f"{layer}self_attn.o_proj.weight",)  # type: ignore[union-attr]
    assert stats.of(f"{layer}mlp.up_proj.weight").shared == tuple(  # type: ignore[union-attr]
        f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up")
    )
    assert len(stats.record["inputs"]) == 4 * LAYERS + 1  # and the output layer
    assert stats.of("model.embed_tokens.weight") is None
    assert stats.of(attention[0], hessian=False).hessian is None  # type: ignore[union-attr]


def test_the_file_opens_as_safetensors(finished: Path) -> None:
    from safetensors import safe_open

    with safe_open(finished, "np") as opened:
        record = json.loads(opened.metadata()["bcqfmt_stats"])
        assert set(opened.keys()) == {
            f"{leader}.{what}" for leader in record["inputs"] for what in ("square_sum", "hessian")
        }
    assert (record["rows"], record["seq"], record["tokens"], record["seed"]) == (ROWS, SEQ, ROWS * SEQ, 0)


@pytest.mark.parametrize("stage", [0, 1, LAYERS])
@pytest.mark.parametrize("when", ["run", "finish"])
def test_an_interrupted_run_goes_on_and_gives_the_same(
    model: Path, text: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, when: str
) -> None:
    out = tmp_path / "stats.safetensors"
    done: list[int] = []
    if when == "finish":
        original = calibration_work.CalibrationWork.finish

        def stop(self: Any, at: int, *rest: Any) -> None:
            if at == stage:
                raise KeyboardInterrupt
            original(self, at, *rest)

        monkeypatch.setattr(calibration_work.CalibrationWork, "finish", stop)
    else:
        name = "head" if stage == LAYERS else "layer"
        ran = getattr(calibration.Runner, name)

        def halt(self: Any, at: int) -> None:
            done.append(at)
            if at == stage:
                raise KeyboardInterrupt
            ran(self, at)

        monkeypatch.setattr(calibration.Runner, name, halt)
    with pytest.raises(KeyboardInterrupt):
        run(model, text, out)
    assert not out.exists()
    assert (tmp_path / "stats.safetensors.partial").exists()
    monkeypatch.undo()
    said: list[str] = []
    run(model, text, out, say=said.append)
    assert out.read_bytes() == finished.read_bytes()
    assert len(said) == LAYERS + 1 - stage
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_the_seed_chooses_the_rows(model: Path, text: Path, finished: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    run(model, text, one, seed=1)
    run(model, text, two, seed=1)
    assert one.read_bytes() == two.read_bytes() != finished.read_bytes()


def test_rows_are_drawn_once_each(text: Path) -> None:
    given = read_text(text)
    rows = choose_rows(given, lambda _: list(range(200)), 16, 12, 3)
    assert rows.shape == (16, 12)
    assert np.unique(rows).size == rows.size
    assert (np.diff(rows[:, 0]) > 0).all()


def test_a_model_whose_names_differ_is_loaded_whole(text: Path, tmp_path: Path) -> None:
    """A base model: its tensors lack the prefix of the causal one, and there is no output layer."""
    folder = save_model(tmp_path / "base", kind="Model", tie_word_embeddings=True)
    assert calibration.Model(open_source(folder), SEQ).whole
    stats = run(folder, text, tmp_path / "stats.safetensors")
    expected = {name: full for name, full in plain_run(folder, text).items() if "lm_head" not in name}
    check_against(stats, expected, lambda name: name.removeprefix("model."))


def test_layers_that_return_tuples(text: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BloomConfig(hidden_size=HIDDEN, n_layer=LAYERS, n_head=4, vocab_size=64)
    folder = tmp_path / "bloom"
    transformers.BloomForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    stats = run(folder, text, tmp_path / "stats.safetensors")
    expected = {name: full for name, full in plain_run(folder, text).items() if "lm_head" not in name}
    prefix = "" if "h.0.mlp.dense_h_to_4h.weight" in open_source(folder).tensors else "transformer."
    check_against(stats, expected, lambda name: prefix + name.removeprefix("transformer."))


# ---------------------------------------------------------------------------------------------------------- the verb
@pytest.fixture
def bcqfmt() -> Callable[..., Result]:
    return lambda *args: CliRunner().invoke(cli, [str(arg) for arg in args])


def test_the_verb(model: Path, text: Path, finished: Path, tmp_path: Path, bcqfmt: Callable[..., Result]) -> None:
    out = tmp_path / "stats.safetensors"
    args = ("calibrate", model, "--text", text, "-n", ROWS, "--context", SEQ, "--out", out, "--device", "cpu")
    made = bcqfmt(*args, "--weighting", "none", "--json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert (found["weights"], found["inputs"], found["tokens"]) == (7 * LAYERS + 1, 4 * LAYERS + 1, ROWS * SEQ)
    assert out.read_bytes() == finished.read_bytes()
    assert "output layer" in made.stderr
    again = bcqfmt(*args)
    assert again.exit_code == 7
    assert "BCQ-E401" in again.stderr
    assert bcqfmt(*args, "--overwrite").exit_code == 0
    assert open_stats(out).record["weighting"] == "tokens"


def test_without_the_extra_the_command_to_type_is_told(
    model: Path, text: Path, tmp_path: Path, bcqfmt: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "bcqfmt.converters.quantize.calibration")
    monkeypatch.setitem(sys.modules, "torch", None)
    made = bcqfmt("calibrate", model, "--text", text, "--out", tmp_path / "s", "--context", "8")
    assert made.exit_code == 2
    assert "BCQ-E306" in made.stderr
    assert "pip install 'torch>=2.4' 'transformers>=5.16'" in made.stderr
    verbs.assert_clean(made.stderr)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------- bad input
def refused(code: str, call: Callable[[], Any]) -> BcqError:
    with pytest.raises(BcqError) as caught:
        call()
    assert caught.value.code == code, str(caught.value)
    return caught.value


def test_a_text_that_is_too_short(model: Path, text: Path, tmp_path: Path) -> None:
    fault = refused("BCQ-E630", lambda: run(model, text, tmp_path / "s", rows=17))
    assert "200 tokens, enough for 16 rows of 12" in str(fault)
    assert not list(tmp_path.iterdir())


def test_a_text_that_is_none(model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine \xff")
    assert "saved as UTF-8" in refused("BCQ-E302", lambda: read_text(bad)).hint
    refused("BCQ-E101", lambda: read_text(tmp_path / "missing.txt"))


def test_rows_longer_than_the_model_can_see(model: Path, text: Path, tmp_path: Path) -> None:
    refused("BCQ-E302", lambda: run(model, text, tmp_path / "s", rows=1, seq=65))


def test_sources_that_cannot_be_run(text: Path, tmp_path: Path) -> None:
    quantized = PEERS / "gptqmodel-gptq-4b-g32-asym" / "source"
    refused("BCQ-E627", lambda: run(quantized, text, tmp_path / "s"))
    fault = refused("BCQ-E102", lambda: run(PEERS / "dense-fp16" / "source", text, tmp_path / "s"))
    assert (fault.finding.expected, fault.hint) == ("a tokenizer", "copy the original model's tokenizer files")
    strange = save_model(tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))
    fault = refused("BCQ-E601", lambda: run(strange, text, tmp_path / "s"))
    assert "nobody_knows" in str(fault)
    assert "a transformers that knows its model_type" in fault.hint
    assert not (tmp_path / "s.partial").exists()


@pytest.mark.parametrize("lost", ["layers.1.mlp", "a layer", "lm_head"])
def test_tensors_that_are_not_there(text: Path, tmp_path: Path, lost: str) -> None:
    """transformers would draw them at random."""
    folder = save_model(tmp_path / "part")
    if lost == "a layer":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS + 1}))
    else:
        file = folder / "model.safetensors"
        kept = {name: tensor for name, tensor in load_file(file).items() if lost not in name}
        save_file(kept, file, {"format": "pt"})
    fault = refused("BCQ-E602", lambda: run(folder, text, tmp_path / "s"))
    assert fault.finding.tensor
    given = TextOptions(read_text(text), ROWS, SEQ, "cpu")
    options = QuantizeOptions(method="gptq", text=given)
    refused("BCQ-E602", lambda: Quantization(open_source(folder), options).run(tmp_path / "bcq"))
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


@pytest.mark.parametrize("damaged", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_a_model_that_gives_no_numbers(text: Path, tmp_path: Path, damaged: str) -> None:
    folder = save_model(tmp_path / "nan")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        whole.get_parameter(damaged).view(-1)[0] = torch.nan
    whole.save_pretrained(folder)
    fault = refused("BCQ-E622", lambda: run(folder, text, tmp_path / "s"))
    assert ("layer 1" if "mlp" in damaged else "the last layer gives NaN") in str(fault)
    assert [path.name for path in tmp_path.iterdir()] == ["nan"]


def test_the_source_is_never_written_to(model: Path, text: Path, bcqfmt: Callable[..., Result]) -> None:
    made = bcqfmt("calibrate", model, "--text", text, "--out", model / "stats.safetensors")
    assert made.exit_code == 7
    assert "lies inside the source" in made.stderr
    assert not (model / "stats.safetensors").exists()


@contextmanager
def stopped_at(monkeypatch: pytest.MonkeyPatch, step: str) -> Iterator[None]:
    """A run is interrupted in this method of its `Runner`."""

    def stop(self: Any, stage: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(calibration.Runner, step, stop)
        yield


def test_an_unfinished_run_of_other_options_is_not_mixed_up(
    model: Path, text: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "stats.safetensors"

    with stopped_at(monkeypatch, "head"), pytest.raises(KeyboardInterrupt):
        run(model, text, out, seed=5)
    refused("BCQ-E401", lambda: run(model, text, out))
    folder = out.with_name("stats.safetensors.partial")
    for path in folder.iterdir():  # as if nothing had been done yet
        if path.name not in ("lock", "plan.json"):
            path.unlink()
    refused("BCQ-E401", lambda: run(model, text, out))
    assert (folder / "plan.json").exists()
    run(model, text, out, overwrite=True)
    assert out.read_bytes() == finished.read_bytes()


def test_damaged_statistics_of_a_layer_are_made_anew(
    model: Path, text: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "stats.safetensors"

    with stopped_at(monkeypatch, "head"), pytest.raises(KeyboardInterrupt):
        run(model, text, out)
    with (out.with_name("stats.safetensors.partial") / "layer-00000.safetensors").open("ab") as layer:
        layer.write(b"x")
    fault = refused("BCQ-E401", lambda: run(model, text, out))
    assert "layer-00000.safetensors is damaged" in str(fault)
    assert fault.hint == "start anew with --overwrite, without --resume"
    run(model, text, out, overwrite=True)
    assert out.read_bytes() == finished.read_bytes()


def test_the_program_says_how_an_interrupted_run_goes_on(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bcqfmt: Callable[..., Result]
) -> None:
    out = tmp_path / "my stats"
    words = ["calibrate", str(model), "--text", str(text), "-n", "2", "--context", "8", "--out", str(out)]

    for options in ([], ["--overwrite"]):  # the second time it is there
        with stopped_at(monkeypatch, "head"):
            stopped = bcqfmt(*words, *options)
        assert (stopped.exit_code, "what is done is in my stats.partial" in stopped.stderr) == (130, True)
        again = shlex.split(stopped.stderr.partition("hint: go on with: bcqfmt ")[2])
        assert again == [*words, *options, "--resume"]
        with stopped_at(monkeypatch, "layer"):  # these are done
            assert bcqfmt(*again).exit_code == 0


def test_two_runs_do_not_meet(model: Path, text: Path, tmp_path: Path) -> None:
    plan = {"rows": 1}
    with calibration_work.CalibrationWork(tmp_path / "s", plan):
        refused("BCQ-E403", lambda: calibration_work.CalibrationWork(tmp_path / "s", plan))
        assert (tmp_path / "s.partial" / "plan.json").exists()  # the other run's
    assert not list(tmp_path.iterdir())


def test_the_folder_is_taken_away_while_it_runs(tmp_path: Path) -> None:
    """Then there is nothing to remove, which is no fault: what the run fails with is told."""
    (tmp_path / "there").mkdir()
    with calibration_work.CalibrationWork(tmp_path / "there" / "s", {"rows": 1}):
        shutil.rmtree(tmp_path / "there")


def test_other_things_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "s.partial").mkdir()
    (tmp_path / "s.partial" / "letter.txt").write_text("mine")
    refused("BCQ-E401", lambda: calibration_work.CalibrationWork(tmp_path / "s", {}))
    (tmp_path / "folder").mkdir()
    refused("BCQ-E401", lambda: calibration_work.CalibrationWork(tmp_path / "folder", {}, overwrite=True))
    assert (tmp_path / "s.partial" / "letter.txt").read_text() == "mine"


def test_statistics_of_another_model(finished: Path, model: Path, tmp_path: Path) -> None:
    stats = open_stats(finished)
    stats.check(open_source(model))
    other = save_model(tmp_path / "other", seed=1)  # the same shapes, other numbers
    assert "numbers" in str(refused("BCQ-E624", lambda: stats.check(open_source(other))))
    wider = save_model(tmp_path / "wider", rms_norm_eps=1e-3)
    assert "configuration" in str(refused("BCQ-E624", lambda: stats.check(open_source(wider))))


def test_malformed_statistics(finished: Path, model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    refused("BCQ-E629", lambda: open_stats(model / "model.safetensors"))
    good = open_stats(finished).record
    tensors, other = (stats_tensors(name, np.ones(8), np.ones((8, 8), np.float32)) for name in "ac")
    wrong: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({**good, "inputs": {"b": ["b"]}}, tensors),
        ({**good, "inputs": {"a": ["a"], "c": ["a"]}}, {**tensors, **other}),
        ({**good, "inputs": {"a": []}}, tensors),
        ({**good, "inputs": {"a": ["a"]}, "rows": -1}, tensors),
        ({**good, "inputs": {"a": ["a"]}, "version": 2}, tensors),
        ({**good, "inputs": {"a": ["a"]}, "model": 7}, tensors),
        ({**good, "inputs": {"a": ["a"]}}, stats_tensors("a", np.ones(8), np.ones((8, 9), np.float32))),
        ({**good, "inputs": {"a": ["a"]}}, stats_tensors("a", np.ones(8, np.float32), np.ones((8, 8), np.float32))),
    ]
    for record, parts in wrong:
        write_stats(bad, parts, record)
        refused("BCQ-E629", lambda: open_stats(bad))
        bad.unlink()
    write_stats(bad, tensors, {**good, "inputs": {"a": ["a"]}})
    open_stats(bad)
    bad.write_bytes(finished.read_bytes()[:-5])
    refused("BCQ-V116", lambda: open_stats(bad))


def test_what_transformers_cannot_read_is_told(
    model: Path, text: Path, tmp_path: Path, bcqfmt: Callable[..., Result]
) -> None:
    """Its own errors are of any kind: a list of quantization_config gives an AttributeError."""
    folder = shutil.copytree(model, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": [1]}))
    made = bcqfmt("calibrate", folder, "--text", text, "--out", tmp_path / "s", "--context", "8")
    assert (made.exit_code, "BCQ-E601" in made.stderr) == (5, True), made.stderr
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    made = bcqfmt("calibrate", folder, "--text", text, "--out", tmp_path / "s", "--context", "8")
    assert (made.exit_code, "BCQ-V508" in made.stderr) == (3, True), made.stderr
    assert not (tmp_path / "s").exists()
