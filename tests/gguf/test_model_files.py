"""config.json and tokenizer of a converted GGUF file: transformers loads them, and agrees with its own GGUF reader."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import transformers

import bcqfmt
from bcqfmt import limits
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from sources.conversions import convert
from sources.gguf_files import DATA, Writer

TEXTS = ["the cat", " in the hen", "a\nb", "12 the 345", "<|im_start|>the<|im_end|>", "ändern", "", "  an  er "]


@pytest.mark.parametrize("name", ["q4_0.gguf", "q4_1.gguf", "qwen2_q8_0_bias.gguf"])
def test_the_configuration_is_the_one_that_transformers_makes(name: str, tmp_path: Path) -> None:
    convert(DATA / name, tmp_path / "out")
    made = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoConfig.from_pretrained(DATA, gguf_file=name)
    assert type(made) is type(theirs)
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "vocab_size",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
    ):
        assert getattr(made, key) == getattr(theirs, key), key
    assert made.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)
    assert made.rope_parameters["rope_theta"] == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", ["q4_0.gguf", "q4_1.gguf"])
def test_the_tokenizer_gives_the_ids_that_transformers_own_reader_gives(name: str, tmp_path: Path) -> None:
    convert(DATA / name, tmp_path / "out")
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(DATA, gguf_file=name)
    first = [1] if name == "q4_0.gguf" else []  # as the file asks, and llama.cpp does; transformers does not look
    for text in TEXTS[: 3 if first else None]:  # the tiny vocabulary of the first file has no digits and few bytes
        expected = theirs(text, add_special_tokens=False).input_ids
        if first and text.startswith(" "):  # SentencePiece and llama.cpp put a space before one, transformers does not
            expected = [4, *expected]
        assert made(text, add_special_tokens=False).input_ids == expected, text
        assert made(text).input_ids == first + expected, text
        assert made.decode(expected).strip() == theirs.decode(expected).strip(), text
    assert made.chat_template == theirs.chat_template
    assert (made.bos_token, made.eos_token) == (theirs.bos_token, theirs.eos_token)


def model(**values: Any) -> Writer:
    """The key values of a Llama, and an embedding; more of them, or None to leave one out."""
    numbers = {"embedding_length": 64, "feed_forward_length": 96, "block_count": 1, "attention.head_count": 2}
    writer = Writer().pair("general.architecture", "str", "llama")
    for key, value in {**numbers, **values}.items():
        if value is not None:
            writer.pair(
                f"llama.{key}", "str" if isinstance(value, str) else "f32" if isinstance(value, float) else "u32", value
            )
    return writer.tensor("token_embd.weight", [8, 64], 0, bytes(8 * 64 * 4))


def config(writer: Writer, folder: Path) -> dict[str, Any]:
    (folder / "model.gguf").write_bytes(writer.bytes())
    found = open_source(folder / "model.gguf").config
    json.dumps(found)
    return found


def test_what_the_tensors_tell(tmp_path: Path) -> None:
    found = config(model(), tmp_path)
    assert (found["vocab_size"], found["tie_word_embeddings"], found["attention_bias"]) == (8, True, False)
    assert (found["num_key_value_heads"], found["head_dim"]) == (2, 32)
    more = model().tensor("output.weight", [8, 64], 0, bytes(8 * 64 * 4)).tensor("blk.0.attn_q.bias", [8], 0, bytes(32))
    found = config(more, tmp_path)
    assert (found["tie_word_embeddings"], found["attention_bias"]) == (False, True)


def test_scaled_rotations_and_experts(tmp_path: Path) -> None:
    scaled = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 4096}
    found = config(model(**scaled, expert_count=4, expert_used_count=2), tmp_path)
    assert found["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert (found["model_type"], found["num_local_experts"]) == ("mixtral", 4)


def test_a_file_that_lacks_a_number_says_so_and_comes_back_all_the_same(tmp_path: Path) -> None:
    writer = model(embedding_length=None)
    assert config(writer, tmp_path) == {}
    conversion = convert(tmp_path / "model.gguf", tmp_path / "out")
    assert [finding.code for finding in conversion.warnings] == ["BCQ-E657"]
    assert bcqfmt.validate(tmp_path / "out", deep=True).valid


@pytest.mark.parametrize("key", ["head_count", "head_count_kv"])
@pytest.mark.parametrize(("value", "shown"), [(0, "0"), ("x", "'x', a text"), (2.0, "2.0")])
def test_a_number_of_heads_that_is_none_is_refused_by_its_key(key: str, value: Any, shown: str, tmp_path: Path) -> None:
    with pytest.raises(BcqError) as caught:
        config(model(**{f"attention.{key}": value}), tmp_path)
    found = caught.value.finding
    assert (found.code, found.file, found.tensor) == ("BCQ-E214", "model.gguf", f"llama.attention.{key}")
    assert (found.found, found.expected) == (shown, "an integer, at least 1")


def test_any_other_number_may_be_zero_but_no_text(tmp_path: Path) -> None:
    config(model(expert_count=0), tmp_path)
    with pytest.raises(BcqError, match=r"llama\.context_length.*'long', a text; expected a number") as caught:
        config(model(context_length="long"), tmp_path)
    assert caught.value.code == "BCQ-E214"


@pytest.mark.parametrize(
    ("kind", "value", "shown"), [("i32[]", [1, 2], "an array"), ("str[]", ["yarn", "x"], "an array"), ("u32", 1, "1")]
)
def test_a_kind_of_scaling_that_is_no_text_is_refused(kind: str, value: Any, shown: str, tmp_path: Path) -> None:
    with pytest.raises(BcqError) as caught:
        config(model(**{"rope.scaling.factor": 2.0}).pair("llama.rope.scaling.type", kind, value), tmp_path)
    found = caught.value.finding
    assert (found.code, found.tensor) == ("BCQ-E214", "llama.rope.scaling.type")
    assert (found.found, found.expected) == (shown, "a text")


def test_a_tokenizer_beside_the_file_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "model.gguf").write_bytes((DATA / "q4_1.gguf").read_bytes())
    (folder / "tokenizer.json").write_text('{"mine": true}')
    (folder / "config.json").write_text('{"model_type": "mine"}')
    convert(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == {"mine": True}
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "mine"


@pytest.mark.parametrize("damage", ["tokens twice", "no scores", "unknown rule", "ids out of range"])
def test_odd_tokenizers_are_left_out_or_read_as_far_as_they_go(damage: str, tmp_path: Path) -> None:
    writer = model()
    tokens = ["<unk>", "a", "a" if damage == "tokens twice" else "b"]
    kind = "gpt2" if damage == "unknown rule" else "llama"
    writer.pair("tokenizer.ggml.model", "str", kind).pair("tokenizer.ggml.tokens", "str[]", tokens)
    writer.pair("tokenizer.ggml.pre", "str", "never heard of")
    if damage == "ids out of range":
        writer.pair("tokenizer.ggml.scores", "f32[]", [0.0, -1.0, -2.0]).pair("tokenizer.ggml.bos_token_id", "u32", 99)
    (tmp_path / "model.gguf").write_bytes(writer.bytes())
    made = open_source(tmp_path / "model.gguf").made_files()
    assert set(made) == ({"tokenizer.json", "tokenizer_config.json"} if damage == "ids out of range" else set())


def merges(tokens: list[str], scores: list[float], folder: Path) -> list[list[str]] | None:
    """Of the tokenizer that is made of them; None if none is."""
    writer = model().pair("tokenizer.ggml.model", "str", "llama").pair("tokenizer.ggml.tokens", "str[]", tokens)
    (folder / "model.gguf").write_bytes(writer.pair("tokenizer.ggml.scores", "f32[]", scores).bytes())
    made = open_source(folder / "model.gguf").made_files()
    found: list[list[str]] | None = json.loads(made["tokenizer.json"])["model"]["merges"] if made else None
    return found


@pytest.mark.parametrize("seed", range(20))
def test_merges_are_all_pairs_of_tokens_that_make_one(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    letters = "ab\u2581\U0001f600"[: 1 + seed % 4]
    tokens = list({"".join(draw.choices(letters, k=draw.randint(0, 9))) for _ in range(60)})
    scores = [float(draw.randint(-3, 0)) for _ in tokens]
    every = [(score, t[:i], t[i:]) for t, score in zip(tokens, scores, strict=True) for i in range(1, len(t))]
    pairs = [(score, left, right) for score, left, right in every if left in tokens and right in tokens]
    expected = [[left, right] for _, left, right in sorted(pairs, key=lambda pair: -pair[0])]
    assert merges(tokens, scores, tmp_path) == expected


def test_long_tokens_take_memory_as_the_file_does(tmp_path: Path) -> None:
    tokens = ["ab" * 10_000, "ab" * 20_000, "a", "b"]
    tracemalloc.start()
    assert merges(tokens, [0.0] * 4, tmp_path) == [["ab" * 10_000, "ab" * 10_000]]
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_merges_that_would_fill_a_disk_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["a" * length for length in range(1, 50)]
    assert merges(tokens, [0.0] * 49, tmp_path)
    monkeypatch.setattr(limits, "MAX_JSON_FILE_BYTES", 20_000)
    assert merges(tokens, [0.0] * 49, tmp_path) is None
