"""The exploration of (q, g): sizes, errors, perplexities, and which combinations nothing beats."""

from __future__ import annotations

import itertools
import json
import math
import random
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bcqfmt
from bcqfmt.converters.quantize.record import read_record
from bcqfmt.converters.report.sweep import Combination, Point, Sweep, mark_front, plot
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from sources.dense_samples import dense_folder, quantize
from sources.peers import PEERS

DENSE = PEERS / "dense-fp16" / "source"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_folder(tmp_path_factory.mktemp("sweep") / "model")


def point(size: int, loss: float, perplexity: float | None = None) -> Point:
    return Point("rtn", 4, "32", size, size, size / 10, loss**2, loss, 1.0, perplexity)


def test_points_are_what_quantize_would_write(source: Path, tmp_path: Path) -> None:
    grid = [Combination(m, q, g) for m, q, g in itertools.product(("rtn", "bcq"), (2, 4), ("32", "row"))]
    ticks: list[int] = []
    sweep = Sweep(open_source(source), grid, {}, threads=2)
    points = list(sweep.run(tick=ticks.append))
    assert [(p.method, p.bits, p.group_size) for p in points] == [(c.method, c.bits, c.group_size) for c in grid]
    assert sum(ticks) == sweep.tries * sum(sweep.source.tensors[name].nbytes for name in sweep.weights)
    for i, (one, found) in enumerate(zip(grid, points, strict=True)):
        folder = tmp_path / str(i)
        quantize(source, folder, one.method, settings={"bits": one.bits, "group_size": one.group_size})
        record = read_record(folder)
        assert record is not None
        with bcqfmt.open(folder) as checkpoint:
            weight_bytes = sum(weight.nbytes for _, weight in checkpoint.weights())
            dense_bytes = sum(tensor.nbytes for _, tensor in checkpoint.dense())
        assert (found.weight_bytes, found.model_bytes) == (weight_bytes, weight_bytes + dense_bytes)
        for key, value in record.sums().figures().items():
            assert getattr(found, key) == pytest.approx(value, rel=1e-8)


def test_smaller_groups_and_more_bits_help(source: Path) -> None:
    grid = [Combination("rtn", q, g) for q, g in itertools.product((2, 3, 4), ("16", "32", "row"))]
    points = {(p.bits, p.group_size): p for p in Sweep(open_source(source), grid, {}).run()}
    for q in (2, 3, 4):
        assert points[q, "16"].loss < points[q, "32"].loss < points[q, "row"].loss
        assert points[q, "16"].weight_bytes > points[q, "32"].weight_bytes > points[q, "row"].weight_bytes
    for g in ("16", "32", "row"):
        assert points[4, g].loss < points[3, g].loss < points[2, g].loss


def test_settings_go_to_those_who_have_them(source: Path) -> None:
    grid = [Combination("rtn", 3, "32"), Combination("bcq", 3, "32")]
    plain = list(Sweep(open_source(source), grid, {}).run())
    other = list(Sweep(open_source(source), grid, {"rounds": "0", "clip": "search"}).run())
    assert other[0].loss < plain[0].loss  # clip is rtn's
    assert other[1].loss > plain[1].loss  # rounds is bcq's


@pytest.mark.parametrize(
    ("combination", "settings", "code"),
    [
        (Combination("rtn", 4, "32"), {"nonsense": "1"}, "BCQ-E620"),
        (Combination("rtn", 4, "7"), {}, "BCQ-E620"),
        (Combination("rtm", 4, "32"), {}, "BCQ-E620"),
        (Combination("mixed24", 4, "16"), {}, "BCQ-E620"),
        (Combination("gptq", 4, "32"), {}, "BCQ-E623"),
        (Combination("atom", 4, "32"), {"outliers": "1000"}, "BCQ-E621"),
    ],
)
def test_refused_before_anything_runs(
    source: Path, combination: Combination, settings: dict[str, Any], code: str
) -> None:
    with pytest.raises(BcqError) as caught:
        Sweep(open_source(source), [Combination("rtn", 4, "32"), combination], settings)
    assert caught.value.code == code
    if code == "BCQ-E623":  # the text of a sweep is for perplexity
        assert "--stats" in caught.value.hint
        assert caught.value.finding.expected == "--stats FILE"


def test_quantized_models_are_refused() -> None:
    with pytest.raises(BcqError, match="BCQ-E627"):
        Sweep(open_source(PEERS / "gptqmodel-gptq-4b-g32-asym" / "source"), [Combination("rtn", 4, "32")], {})


# ---------------------------------------------------------------------------------------------------------- front
@pytest.mark.parametrize("seed", range(20))
def test_the_front_by_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    points = [point(rng.randint(1, 8), rng.randint(1, 8) / 8) for _ in range(12)]
    mark_front(points)
    for one in points:
        beaten = any(
            (o.weight_bytes <= one.weight_bytes and o.loss <= one.loss)
            and (o.weight_bytes < one.weight_bytes or o.loss < one.loss)
            for o in points
        )
        twins = [o for o in points if (o.weight_bytes, o.loss) == (one.weight_bytes, one.loss)]
        assert sum(o.front for o in twins) == (0 if beaten else 1)


def test_perplexity_decides_where_it_is_known() -> None:
    points = [point(1, 0.1, 30.0), point(2, 0.2, 20.0), point(3, 0.05, 25.0), point(4, 0.01, math.inf)]
    mark_front(points)
    assert [p.front for p in points] == [True, True, False, False]
    assert points[3].as_dict()["perplexity"] is None
    json.dumps([p.as_dict() for p in points], allow_nan=False)


def test_the_plot_shows_every_point_and_the_front() -> None:
    points = [point(1, 0.4), point(2, 0.2), point(3, 0.3), point(4, 0.1)]
    mark_front(points)
    root = ET.fromstring(plot("<model>", points, None).decode())
    space = "{http://www.w3.org/2000/svg}"
    tips = [circle.find(f"{space}title") for circle in root.findall(f"{space}circle")]
    assert len([tip for tip in tips if tip is not None]) == 4
    (front,) = [p for p in root.findall(f"{space}path") if p.attrib["class"] == "front" and "L" in p.attrib["d"]]
    assert front.attrib["d"].count("L") == 2
    ET.fromstring(plot("x", [point(1, 0.0)], 3.5).decode())
    ET.fromstring(plot("x", [], None).decode())


# ----------------------------------------------------------------------------------------------------- perplexity
@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer of its own: a word is a token."""
    import shutil

    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("speaker") / "model"
    shutil.copytree(DENSE, folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def text(count: int) -> str:
    rng = random.Random(0)
    return " ".join(f"w{rng.randrange(64)}" for _ in range(count))


def by_hand(folder: Path, tensors: dict[str, Any], ids: list[int], context: int) -> float:
    """The same model once more, in numpy and float64: embeddings to logits, token by token."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, keys, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name]

    def turned(x: Any, position: int) -> Any:
        angle = position / theta ** (np.arange(0, size, 2) / size)
        cos, sin = np.cos(angle), np.sin(angle)
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    losses = []
    for start in range(0, len(ids), context):
        window = ids[start : start + context]
        cache_k, cache_v = [], []
        for position, token in enumerate(window[:-1]):
            x = w["model.embed_tokens.weight"][token]
            p = "model.layers.0"
            h = norm(x, f"{p}.input_layernorm.weight")
            q, k, v = (h @ w[f"{p}.self_attn.{n}_proj.weight"].T for n in "qkv")
            cache_k.append(turned(k.reshape(keys, size), position))
            cache_v.append(v.reshape(keys, size))
            mixed = []
            for head, row in enumerate(turned(q.reshape(heads, size), position)):
                group = head // (heads // keys)
                scores = np.array([row @ one[group] for one in cache_k]) / math.sqrt(size)
                share = np.exp(scores - scores.max())
                mixed.append(sum(s * one[group] for s, one in zip(share / share.sum(), cache_v, strict=True)))
            x = x + np.concatenate(mixed) @ w[f"{p}.self_attn.o_proj.weight"].T
            h = norm(x, f"{p}.post_attention_layernorm.weight")
            gate, up = (h @ w[f"{p}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{p}.mlp.down_proj.weight"].T
            logits = norm(x, "model.norm.weight") @ w["lm_head.weight"].T
            losses.append(np.logaddexp.reduce(logits) - logits[window[position + 1]])
    return math.exp(math.fsum(losses) / len(losses))


def test_perplexity(speaker: Path) -> None:
    """Equal to a forward pass written out in numpy, before and after weights are swapped."""
    from safetensors.numpy import load_file

    from bcqfmt.converters.methods.registry import build_method
    from bcqfmt.converters.quantize.weight import quantize_tensor
    from bcqfmt.integrations.transformers.run import TextModel

    words = text(40)
    ids = [int(word[1:]) for word in words.split()]
    model = TextModel(speaker, words, context=16)
    tensors = load_file(speaker / "model.safetensors")
    found = model.figures()
    assert found.tokens == 40 - 3
    assert found.perplexity == pytest.approx(by_hand(speaker, tensors, ids, 16), rel=1e-4)
    method = build_method("rtn", {"bits": 2, "group_size": 32})
    source = open_source(speaker)
    sweep = Sweep(source, [Combination("rtn", 2, "32")], {})
    swapped = {name: quantize_tensor(source.tensors[name], method).weight.dequantize() for name in sweep.weights}

    def evaluate(pairs: Any) -> float:
        model.swap(pairs)
        return model.figures().perplexity

    (made,) = sweep.run(evaluate)
    assert made.perplexity == pytest.approx(by_hand(speaker, {**tensors, **swapped}, ids, 16), rel=1e-4)
    assert made.perplexity != pytest.approx(found.perplexity, rel=1e-3)
    with pytest.raises(BcqError, match="BCQ-E301"):
        model.swap([("nothing", np.zeros((2, 2), np.float32))])
    with pytest.raises(BcqError, match="BCQ-E301"):
        model.swap([(sweep.weights[0], np.zeros((2, 2), np.float32))])


def test_texts_and_models_that_cannot_be_used(speaker: Path, source: Path) -> None:
    from bcqfmt.integrations.transformers.run import TextModel

    with pytest.raises(BcqError, match="BCQ-E302"):
        TextModel(speaker, "w1")
    with pytest.raises(BcqError, match="BCQ-E302"):
        TextModel(speaker, "w1 w2", context=1)
    with pytest.raises(BcqError, match="BCQ-E102"):
        TextModel(source, "w1 w2")


def test_tokens_can_be_limited(speaker: Path) -> None:
    from bcqfmt.integrations.transformers.run import TextModel

    assert TextModel(speaker, text(100), context=16, most_tokens=20).figures().tokens == 18
