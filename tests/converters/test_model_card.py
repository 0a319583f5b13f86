"""Model cards: the name, the figures and the origin of a model; front matter that a hub reads and nobody can break."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import bcqfmt
from bcqfmt.converters.jobs.model_card import Facts, converted, model_card, with_name, with_perplexity
from bcqfmt.converters.source.front_matter import KEPT, front_lines, front_matter
from bcqfmt.converters.source.quant_config import Settings
from bcqfmt.errors import escape
from programs.verbs import ROOT
from sources.conversions import convert
from sources.dense_samples import dense_folder, quantize
from sources.peers import any_words

DEMO = ROOT / "bcqfmt" / "data" / "demo"
COMMIT = "0123456789" * 4


def card(source_card: bytes | None = None, name: str = "folder", config: Any = None, settings: Any = None) -> str:
    facts = Facts(name, COMMIT, config or {}, source_card, [], [], 0.5, 10, provenance=True)
    return model_card(facts, converted(settings or Settings(), provenance=True)).decode()


def front(text: str) -> dict[str, Any]:
    """As another YAML reader sees it."""
    found = yaml.safe_load(text.split("\n---\n", maxsplit=1)[0].removeprefix("---\n"))
    assert isinstance(found, dict)
    return found


# -------------------------------------------------------------------------------------------------------- what it says
@pytest.mark.parametrize(
    ("name", "stated", "title"),
    [
        ("owner/Model-7B-GPTQ", "meta/Other", "Model-7B-GPTQ"),
        ("folder", "meta/Model-7B", "Model-7B"),
        ("folder", "Model_7B.v2", "Model_7B.v2"),
        ("folder", "/home/me/secret/model", "folder"),
        ("folder", "./out", "folder"),
        ("folder", "runs/checkpoint-500", "folder"),
        ("folder", "tmpab12cd", "folder"),
        ("folder", "<b>x</b>", "folder"),
        ("folder", 7, "folder"),
        ("folder", None, "folder"),
    ],
)
def test_the_title_is_the_name_of_the_model(name: str, stated: Any, title: str) -> None:
    assert f"\n# {title}\n" in card(name=name, config={"_name_or_path": stated})


def test_the_name_of_a_snapshot_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    from bcqfmt.cli.sources import find_source

    snapshot = tmp_path / "models--owner--Model-4bit" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(DEMO)
    found = find_source(str(snapshot), None, offline=True)
    assert (found.name, found.revision) == ("owner/Model-4bit", COMMIT)
    assert find_source(str(DEMO), None, offline=True)[1:3] == ("demo", "")


def test_what_a_card_of_a_conversion_says(tmp_path: Path) -> None:
    convert(DEMO, tmp_path / "bcq", name="owner/model", revision=COMMIT)
    text = (tmp_path / "bcq" / "README.md").read_text()
    size = (DEMO / "model.safetensors").stat().st_size / 1000
    here = (tmp_path / "bcq" / "model.safetensors").stat().st_size / 1000
    for line in (
        "# model",
        f"| source | [owner/model](https://huggingface.co/owner/model/tree/{COMMIT}), commit `{COMMIT}` |",
        "| method | gptq, 4 bit, groups of 32, asymmetric, by gptqmodel 7.6.0; kept bit for bit |",
        "| calibration | not recorded in the source |",
        "| bits per weight | 4.733 on average; 88.0 % of the parameters are quantized |",
        f"| model files | {size:.2f} kB in the source, {here:.2f} kB here |",
    ):
        assert line in text.split("\n")
    for command in ("pip install '.[transformers]'", "bcqfmt validate --deep", "bcqfmt restore", "bcqfmt verify"):
        assert command in text
    assert "perplexity" not in text
    assert "$" not in text
    assert front(text)["base_model"] == "owner/model"


def test_what_a_card_of_a_quantization_says(tmp_path: Path) -> None:
    quantize(dense_folder(tmp_path / "dense"), tmp_path / "bcq")
    text = (tmp_path / "bcq" / "README.md").read_text()
    error = json.loads((tmp_path / "bcq" / "bcq_quantization.json").read_text())["weights"]
    noise, power = (sum(entry[key] for entry in error.values()) for key in ("noise", "power"))
    shown = re.search(r"\| relative error of the weights \| ([\d.]+) % \(Frobenius norm\) \|", text)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(100 * (noise / power) ** 0.5, rel=5e-3)
    assert "| method | rtn |\n| calibration | none |\n" in text
    assert "from_pretrained" not in text  # config.json names no architecture: nobody knows which class runs it
    assert front(text) == {"license": "mit", "library_name": "bcqfmt", "tags": ["bcq", "quantized", "x"]}


def test_without_provenance_nothing_is_promised(tmp_path: Path) -> None:
    convert(DEMO, tmp_path / "bcq", provenance=False)
    assert "bcqfmt restore" not in (tmp_path / "bcq" / "README.md").read_text()


def test_perplexity_goes_into_the_table_once() -> None:
    text = card()
    once = with_perplexity(text, "12.5 on a|b.txt")
    assert once is not None
    assert once.replace("| perplexity | 12.5 on a\\|b.txt |\n", "") == text
    assert with_perplexity(once, "13") == once.replace("12.5 on a\\|b.txt", "13")
    assert with_perplexity("# mine\n", "13") is None


def test_a_card_without_our_line_stays_as_it_is() -> None:
    assert with_name("# mine\nname = 'x'\n", "me/x") == "# mine\nname = 'x'\n"


# -------------------------------------------------------------------------------------------------------- front matter
def test_what_is_kept_of_the_sources_front_matter() -> None:
    text = """---
license: other
license_name: a-licence
license_link: https://e.org/LICENSE
language: [en, no, "on"]
pipeline_tag: text-generation
datasets:
- a/b
base_model: x/y
tags: [gptq, 4-bit, chat, "1.5"]
library_name: transformers
quantized_by: someone
model-index: [{name: x}]
inference: false
---
# The source
"""
    assert front(card(text.encode())) == {
        "license": "other",
        "license_name": "a-licence",
        "license_link": "https://e.org/LICENSE",
        "language": ["en", "no", "on"],
        "pipeline_tag": "text-generation",
        "datasets": ["a/b"],
        "base_model": "x/y",
        "base_model_relation": "quantized",
        "library_name": "bcqfmt",
        "tags": ["bcq", "quantized", "4-bit", "chat", "1.5"],
    }
    assert "The source" not in card(text.encode())


HOSTILE = [
    b'---\nlicense: "mit\\nbase_model: evil/x\\n---\\n<script>"\n---\n',
    b"---\nlicense: >\n  mit\n  base_model: evil/x\n---\n",
    b"---\n? license\n: mit\n? base_model\n: [evil/x\n---\n",
    b"---\nlicense: &a mit\ntags: [*a, *a]\n---\n",
    b"---\nlicense: !!python/object/apply:os.system ['true']\n---\n",
    b"---\nlicense: {a: b}\nlanguage: [[en]]\ntags: [{a: b}]\n---\n",
    b"---\n" + b"[" * 50_000 + b"\n---\n",
    b"---\na: &a [x,x]\n" + b"".join(b"a%d: &a%d [*a%s,*a%s]\n" % (i, i, b"", b"") for i in range(99)) + b"---\n",
    b"---\nlicense: \xff\xfe\n---\n",
    b"---\nlicense: mit\n",
    b"---\n---\n",
    b"---\nlicense: mit\r\n---\r\n",
    b"---\n" + b"license: mit\n" * 200_000 + b"---\n",
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_no_card_of_a_stranger_breaks_ours(number: int) -> None:
    begin = time.monotonic()
    found = front(card(HOSTILE[number]))
    assert time.monotonic() - begin < 20  # a bomb would take for ever
    assert set(found) <= set(KEPT)
    assert "evil/x" not in json.dumps(found.get("base_model", ""))
    assert found["library_name"] == "bcqfmt"


TEXTS = st.text(
    st.sampled_from("abnoyf01.-/:#,'\"\\[]{}&*!|>%@`?~=<$ \t\n\r\x1b\x85\u2028\u200b\ufeffé模💡"), max_size=20
)


@any_words
@given(st.dictionaries(st.sampled_from(KEPT), TEXTS | st.lists(TEXTS, min_size=1, max_size=4), max_size=4))
def test_what_is_written_is_what_is_read(values: dict[str, Any]) -> None:
    """Any text becomes one value of one key, for us and for another YAML reader."""
    lines = front_lines(values)
    assert all(line.isprintable() for line in lines)
    again = front("\n".join(["---", *lines, "---", ""])) if values else {}
    assert again == {
        key: escape(value) if isinstance(value, str) else [escape(item) for item in value]
        for key, value in values.items()
    }


@any_words
@given(st.dictionaries(st.sampled_from(KEPT), TEXTS | st.lists(TEXTS, max_size=4), max_size=4), st.booleans())
def test_no_value_is_read_in_another_way_than_yaml_does(values: dict[str, Any], flow: bool) -> None:
    written = yaml.safe_dump(values, allow_unicode=True, default_flow_style=None if flow else False)
    found = front_matter(f"---\n{written}---\n".encode("utf-8", "replace"))
    assert all(found[key] == clean(values[key]) for key in found)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("license: apache-2.0", "apache-2.0"),
        ("license:   mit   # free", "mit"),
        ("license: 'it''s'", "it's"),
        (r'license: "a \"b\" \\ c"', 'a "b" \\ c'),
        ("license_link: https://e.org/a#b", "https://e.org/a#b"),
        ("language: en", "en"),
        ("language: no", "no"),
        ("language: [en, 'no', \"de\"]", ["en", "no", "de"]),
        ("language:\n- en\n- no  # Norwegian\n\n- zh", ["en", "no", "zh"]),
        ("language:\n  - en\n  - de", ["en", "de"]),
        ("tags: # ours\n- text-generation", ["text-generation"]),
        ("license: mit\nlicense: gpl", "mit"),
        ("license: >\n  mit", None),
        ("license: |\n  mit", None),
        ("license: mit\n  or later", None),
        ("license: &a mit", None),
        ("license: !!str mit", None),
        ("license: *a", None),
        ("license: {a: b}", None),
        ("license: a: b", None),
        ("license:", None),
        ("license:mit", None),
        ("tags:\n- a\n  - b", None),
        ("tags:\n- a: b", None),
        ("tags: [a, [b]]", None),
        ("tags: [a", None),
        ("tags: [a] b", None),
        ("tags: []", None),
        ("title: mit", None),
    ],
)
def test_forms_of_front_matter(line: str, value: Any) -> None:
    found = front_matter(f"---\n{line}\n---\n# x\n".encode())
    assert list(found.values()) == ([] if value is None else [value])
    assert front_matter(f"---\r\n{line}\r\n---\r\n".replace("\n", "\r\n").replace("\r\r", "\r").encode()) == found


def clean(value: Any) -> Any:
    """As it is kept: trimmed, on one line."""
    return escape(value.strip(), 300) if isinstance(value, str) else [escape(item.strip(), 300) for item in value]


def test_the_link_to_the_sources_card_leads_somewhere(tmp_path: Path) -> None:
    source = dense_folder(tmp_path / "x")  # only its card is used here
    demo = tmp_path / "source"
    demo.mkdir()
    for path in DEMO.iterdir():
        (demo / path.name).write_bytes(path.read_bytes())
    (demo / "README.md").write_bytes((source / "README.md").read_bytes())
    convert(demo, tmp_path / "bcq")
    link = re.search(r"\[its card\]\(([^)]+)\)", (tmp_path / "bcq" / "README.md").read_text())
    assert link is not None
    assert (tmp_path / "bcq" / link[1]).read_bytes() == (demo / "README.md").read_bytes()
    assert bcqfmt.validate(tmp_path / "bcq", deep=True).valid
