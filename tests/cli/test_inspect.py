"""`bcqfmt inspect`: BCQ folders and files, other safetensors, one tensor, hostile names."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import bcqfmt
from programs.verbs import DOWN, NORM, UP, Run, tensors
from sources.conversions import gptq_folder


def test_folder_at_a_glance(run: Run, folder: Path) -> None:
    result = run("inspect", folder)
    assert result.exit_code == 0
    for text in (
        "BCQ 1.0 folder",
        "bcq, multi-precision",
        f"bcqfmt {bcqfmt.__version__}",
        "1 model file",
        "2 quantized weights, 1 dense",
        "96.00 % of 1,600 parameters",
        "affine q=4 g=32 scale=F16 zero=4bit",
        "bcq q=3 g=32 alpha=F16 bias=F16 p=1",
    ):
        assert text in result.stdout
    assert UP not in result.stdout
    assert result.stderr == ""


def test_json_agrees_with_the_weights(run: Run, folder: Path) -> None:
    found = json.loads(run("inspect", folder, "--modules", "--json").stdout)
    with bcqfmt.open(folder) as checkpoint:
        weights = dict(checkpoint.weights())
        dense = dict(checkpoint.dense())
    stored = sum(weight.nbytes for weight in weights.values())
    quantized = sum(weight.size for weight in weights.values())
    assert found["bcq"] is True
    assert (found["format"], found["version"], found["kind"]) == ("bcq", "1.0", "folder")
    assert found["features"] == ["bcq", "multi-precision"]
    assert found["generator"] == {"name": "bcqfmt", "version": bcqfmt.__version__}
    assert (found["weights"], found["dense"], found["files"]) == (2, 1, 1)
    assert found["bytes"] == (folder / "model.safetensors").stat().st_size
    assert found["parameters"] == {"quantized": quantized, "total": quantized + 64}
    assert found["coverage"] == pytest.approx(100 * quantized / (quantized + 64))
    assert found["bits_per_weight"]["quantized"] == pytest.approx(stored * 8 / quantized)
    assert sum(found["sizes"].values()) == stored + sum(tensor.nbytes for tensor in dense.values())
    assert found["sizes"]["dense"] == 256
    assert {row["name"]: row["bits_per_weight"] for row in found["modules"]} == {
        name: weight.bits_per_weight for name, weight in weights.items()
    }
    assert sorted(row["weights"] for row in found["schemes"]) == [1, 1]


def test_sizes_know_every_kind_of_part(run: Run, tmp_path: Path) -> None:
    weight = bcqfmt.BcqWeight.from_affine(
        np.zeros((8, 64), np.uint8), np.ones((8, 2), np.float16), 1, group_size=32, bits=2
    )
    weight = weight.with_perm(np.arange(64)[::-1].copy())
    weight = weight.with_outliers(np.arange(9), np.arange(8), np.ones(8, np.float32))
    offset = bcqfmt.BcqWeight.from_offset(
        np.zeros((8, 64), np.uint8), np.ones((8, 2), np.float16), np.ones((8, 2), np.float16), group_size=32, bits=2
    )
    coded = bcqfmt.Coded(np.ones((8, 8), int), np.ones((8, 2), np.float16), 0, 6, groups=4)
    both = bcqfmt.BcqWeight.from_offset(np.zeros((8, 64), np.uint8), coded, coded, group_size=8, bits=2)
    one = bcqfmt.Coded(np.ones((8, 4), "float8_e4m3fn"), np.ones((1, 1), np.float32), rows=8, groups=4)
    table = bcqfmt.BcqWeight.from_table(np.zeros((8, 64), np.uint8), one, [0, 1, -3, 2], exponent=-1, group_size=16)
    bcqfmt.save(tmp_path / "m", {"a.weight": weight, "b.weight": offset, "c.weight": both, "d.weight": table})
    found = json.loads(run("inspect", tmp_path / "m", "--json").stdout)
    with bcqfmt.open(tmp_path / "m") as checkpoint:
        stored = sum(weight.nbytes for _, weight in checkpoint.weights())
    sizes = found["sizes"]
    assert sum(sizes.values()) == stored
    assert (sizes["perm"], sizes["outliers"], sizes["offsets"]) == (256, 9 * 4 + 8 * 2 + 8 * 4, 32 + 8 * 8 + 32)
    shown = run("inspect", tmp_path / "m").stdout
    assert "perm, outliers add F32" in shown
    assert "offset q=2 g=8 scale=6bit*F16/1rowsx4groups offset=6bit*F16/1rowsx4groups" in shown
    assert "table q=2 g=16 scale=UE4M3*F32/8rowsx4groups table=-3..2 *2^-1" in shown


def test_modules_and_shards(run: Run, tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "m", tensors(), max_shard_size=300)
    result = run("inspect", tmp_path / "m", "--modules")
    assert "3 model files" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] in ([UP], [DOWN])]
    assert sorted(row[1] for row in rows) == ["16x64", "8x64"]
    assert all(row[-1].startswith("model-0000") for row in rows)


def test_lone_file(run: Run, lone_file: Path) -> None:
    found = json.loads(run("inspect", lone_file, "--json").stdout)
    assert (found["kind"], found["bcq"], found["weights"], found["generator"]) == ("file", True, 2, None)
    assert found["features"] == ["bcq", "multi-precision"]
    assert "BCQ 1.0 file" in run("inspect", lone_file).stdout


def test_one_weight(run: Run, folder: Path) -> None:
    text = run("inspect", folder, "--tensor", UP).stdout
    for part in ("16 x 64", "F16", "bcq_s0_planes", "bcq_s0_scale", "bcq_s0_zero", "sha256", "4x16x2"):
        assert part in text
    found = json.loads(run("inspect", folder, "--tensor", UP, "--json").stdout)
    with bcqfmt.open(folder) as checkpoint:
        weight = checkpoint.weight(UP)
        values = weight.dequantize().astype(np.float64)
        assert found["sha256"] == weight.digest()
        for entry in found["parts"]:
            part = weight.parts()[entry["part"]]
            with (folder / entry["file"]).open("rb") as stream:
                stream.seek(entry["offset"])
                assert stream.read(entry["bytes"]) == part.tobytes()
    assert (found["kind"], found["shape"], found["dtype"]) == ("weight", [16, 64], "F16")
    assert found["values"]["min"] == values.min()
    assert found["values"]["max"] == values.max()
    assert found["values"]["first"] == values.reshape(-1)[:8].tolist()


def test_one_dense_tensor(run: Run, folder: Path) -> None:
    assert "a dense tensor" in run("inspect", folder, "--tensor", NORM).stdout
    found = json.loads(run("inspect", folder, "--tensor", NORM, "--json").stdout)
    assert (found["kind"], found["values"]["min"], found["values"]["max"]) == ("dense", -1.0, 2.0)


def test_values_that_are_not_finite(run: Run, tmp_path: Path) -> None:
    dense = {"x": np.array([np.nan, 1, -np.inf], np.float32), "n": np.array([], np.float32), "s": np.array(3, np.int64)}
    bcqfmt.save(tmp_path / "m", dense)
    found = json.loads(run("inspect", tmp_path / "m", "--tensor", "x", "--json").stdout)["values"]
    assert found == {"min": 1.0, "max": 1.0, "nonfinite": 2, "first": ["nan", 1.0, "-inf"]}
    assert "2 not finite" in run("inspect", tmp_path / "m", "--tensor", "x").stdout
    assert run("inspect", tmp_path / "m", "--tensor", "n").exit_code == 0
    assert "scalar" in run("inspect", tmp_path / "m", "--tensor", "s").stdout
    assert "0.00 % of 4 parameters" in run("inspect", tmp_path / "m").stdout


def test_unknown_tensor(run: Run, folder: Path) -> None:
    result = run("inspect", folder, "--tensor", "model.norm.wait")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: BCQ-E301 ")
    assert "; there is model.norm.weight\nhint: " in result.stderr
    assert f"; there is {UP}\n" in run("inspect", folder, "--tensor", "up_proj").stderr
    none = run("inspect", folder, "--tensor", "nothing").stderr
    assert "not in this checkpoint\n" in none
    listed = f"bcqfmt inspect {folder} --modules; all names in Python: list(bcqfmt.open({str(folder)!r}))"
    assert f"hint: the quantized weights: {listed}\n" in none


def test_gptq_folder_is_named(run: Run, gptq: Path) -> None:
    result = run("inspect", gptq)
    assert result.exit_code == 0
    assert "not BCQ: gptq, 4 bit, group size 32, per config.json" in result.stdout
    assert "I32" in result.stdout
    assert "hint: " in result.stdout
    found = json.loads(run("inspect", gptq, "--json").stdout)
    assert (found["bcq"], found["format"], found["weights"], found["dense"]) == (False, "gptq", 0, 4)
    assert found["quantization"] == {"method": "gptq", "bits": 4, "group_size": 32, "evidence": "config.json"}
    assert found["dense_types"]["I32"]["tensors"] == 3
    assert json.loads(run("inspect", gptq, "--tensor", "layer.scales", "--json").stdout)["values"]["min"] == 1.0
    wrong = run("inspect", gptq, "--tensor", "layer.scale")
    assert (wrong.exit_code, "; there is layer.scales" in wrong.stderr) == (2, True)
    assert wrong.stderr.endswith("hint: check the spelling\n")


def test_the_command_is_named_only_where_convert_would_take_it(run: Run, gptq: Path) -> None:
    assert "convert it, without loss: " in run("inspect", gptq).stdout
    (gptq / "config.json").write_text("{}")
    shown = run("inspect", gptq)
    assert (shown.exit_code, "convert it" in shown.stdout) == (0, False)
    assert "not converted: BCQ-E602 " in shown.stdout
    assert "hint: get the model's own configuration again, or write " in shown.stdout
    assert run("inspect", gptq, "--modules").stdout.count("not converted: ") == 1


def test_shards_that_are_missing(run: Run, gptq: Path) -> None:
    (gptq / "model.safetensors").rename(gptq / "model-00001-of-00002.safetensors")
    for verb in (["inspect", gptq], ["convert", gptq, gptq.parent / "bcq"]):
        result = run(*verb)
        assert (result.exit_code, "1 of 2 shards missing: model-00002-of-00002.safetensors" in result.stderr) == (
            3,
            True,
        )
    assert not (gptq.parent / "bcq").exists()


def test_names_tell_without_a_config(run: Run, gptq: Path) -> None:
    assert "gptq or awq, to judge by tensor names" in run("inspect", gptq / "model.safetensors").stdout
    (gptq / "config.json").unlink()
    (gptq / "model.safetensors").rename(gptq / "gptq_model-4bit-128g.safetensors")
    assert "gptq or awq, to judge by tensor names" in run("inspect", gptq).stdout


@pytest.mark.parametrize(
    "config",
    ["[]", "nonsense", '{"quantization_config": 3}', '{"quantization_config": {"quant_method": 7, "bits": true}}'],
)
def test_odd_configs_do_not_stop_it(run: Run, gptq: Path, config: str) -> None:
    (gptq / "config.json").write_text(config)
    result = run("inspect", gptq)
    assert result.exit_code == 0
    assert "gptq or awq" in result.stdout


def test_a_method_from_hell_is_escaped(run: Run, gptq: Path) -> None:
    config = {"quantization_config": {"quant_method": "\x1b[31mred\x07" * 50, "bits": 10**30}}
    (gptq / "config.json").write_text(json.dumps(config))
    assert "\\x1b[31mred\\x07" in run("inspect", gptq).stdout
    assert run("inspect", gptq, "--json").exit_code == 0


def test_plain_safetensors(run: Run, tmp_path: Path) -> None:
    save_file({"w": np.zeros((2, 3), np.float16)}, tmp_path / "model.safetensors")
    assert "not BCQ: a plain safetensors folder" in run("inspect", tmp_path).stdout
    assert "not BCQ: a plain safetensors file" in run("inspect", tmp_path / "model.safetensors").stdout


def test_unfinished_folder_is_refused(run: Run, folder: Path) -> None:
    (folder / "bcq_manifest.json").unlink()
    result = run("inspect", folder)
    assert result.exit_code == 4
    assert "BCQ-V601" in result.stderr


def test_lost_metadata_is_told(run: Run, folder: Path) -> None:
    from safetensors.numpy import load_file

    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    result = run("inspect", folder)
    assert result.exit_code == 0
    assert "warning: BCQ-E502" in result.stdout
    assert "2 quantized weights" in result.stdout


def test_hostile_names_are_shown_escaped(run: Run, tmp_path: Path) -> None:
    name = "a\x1b]0;owned\x07\nb\u202ec\x7f"
    bcqfmt.save(tmp_path / "m", {name: np.zeros(3, np.float32)})
    assert "a\\x1b]0;owned\\x07\\nb\\u202ec\\x7f" in run("inspect", tmp_path / "m", "--tensor", name).stdout
    found = json.loads(run("inspect", tmp_path / "m", "--tensor", name, "--json").stdout)
    assert found["name"] == name
    missing = run("inspect", tmp_path / "m", "--tensor", name + "\x1b")
    assert missing.exit_code == 2


def test_modules_and_tensor_exclude_each_other(run: Run, folder: Path) -> None:
    assert run("inspect", folder, "--modules", "--tensor", UP).exit_code == 2


def test_modules_of_another_format_are_those_that_convert_would_take(run: Run, tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "source", layers=3)
    text = run("inspect", source, "--modules").stdout
    row = next(line for line in text.splitlines() if line.split()[:1] == ["model.layers.1.proj"]).split()
    assert row[1:3] == ["64x128", "gptq"]
    assert "4 bit, groups of 32, zero points v2" in " ".join(row)
    found = json.loads(run("inspect", source, "--modules", "--json").stdout)
    assert [entry["name"] for entry in found["modules"]] == [f"model.layers.{i}.proj" for i in range(3)]
    assert found["modules"][0]["tensors"] == ["g_idx", "qweight", "qzeros", "scales"]
    assert found["modules"][0]["files"] == ["model.safetensors"]
    assert "model.layers.1.proj" not in run("inspect", source).stdout
    assert "modules" not in json.loads(run("inspect", source, "--json").stdout)


def test_modules_of_what_is_not_converted_come_with_the_reason(run: Run, tmp_path: Path) -> None:
    save_file({"a.weight": np.ones((4, 4), np.float16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "nobody_knows"}}')
    result = run("inspect", tmp_path, "--modules")
    assert result.exit_code == 0
    assert "not converted: BCQ-E601" in result.stdout
    found = json.loads(run("inspect", tmp_path, "--modules", "--json").stdout)
    assert found["modules"] == []
    assert "tensors" not in found


def test_tensors_of_a_dense_model_are_listed(run: Run, tmp_path: Path) -> None:
    """The hint of BCQ-E625 leads here."""
    tensors = {"a.weight": np.ones((4, 8), np.float16), "scale": np.ones((), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        rows = [line.split() for line in run("inspect", path, "--modules").stdout.splitlines()]
        assert ["a.weight", "4x8", "F16", "64", "B", "model.safetensors"] in rows
        assert ["scale", "scalar", "F32", "4", "B", "model.safetensors"] in rows
        found = json.loads(run("inspect", path, "--modules", "--json").stdout)
        assert {row["name"]: row["shape"] for row in found["tensors"]} == {"a.weight": [4, 8], "scale": []}
        assert "tensors" not in json.loads(run("inspect", path, "--json").stdout)
