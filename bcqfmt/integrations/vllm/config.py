"""The quantization config "bcq" of vLLM: which layers of a model are BCQ weights. Importing this module needs vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.transformers_utils.repo_utils import get_hf_file_bytes

from bcqfmt.checkpoint.descriptor import check_version
from bcqfmt.checkpoint.folder import MANIFEST
from bcqfmt.checkpoint.manifest import parse_manifest
from bcqfmt.errors import error, refuse
from bcqfmt.weight.scheme import WeightSpec

from .method import BcqEmbeddingMethod, BcqLinearMethod, TiedHeadMethod


class BcqConfig(QuantizationConfig):  # type: ignore[misc, unused-ignore]
    """``quantization_config`` of a BCQ folder. The weights are described in the manifest, not in config.json."""

    def __init__(self, format_version: str = "1.0") -> None:
        super().__init__()
        self.format_version = format_version
        self.specs: dict[str, WeightSpec] = {}  # by the path of the module, as vLLM calls it
        self.tied = False  # config.json says that the head is the embedding
        self._embedding = False  # an embedding of the model is quantized

    def get_name(self) -> str:
        return "bcq"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability times ten: the kernels are compiled and tested for 8.0 and 9.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None but config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BcqConfig:
        """From ``quantization_config``; another major version of the format is refused."""
        version = str(config.get("format_version", "1.0"))
        check_version({"version": version}, _refuse_version)
        return cls(version)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the manifest of the folder or hub model: scheme, shape and dtype of every weight.

        vLLM 0.26 does not tell the revision; the commit that it read config.json of is in ``hf_config``. A head that
        the manifest names is not tied, whatever config.json says: vLLM would not load it.
        """
        if getattr(hf_config, "model_type", None) == "eagle":  # vLLM gives its layers other names than the file
            found = "a quantized draft model of EAGLE"
            raise error("BCQ-E305", model_name, found=found, expected="a dense one: bcqfmt export DRAFT NEW --to dense")
        raw = get_hf_file_bytes(MANIFEST, model_name, revision or getattr(hf_config, "_commit_hash", None))
        if raw is None:
            raise error("BCQ-V601", model_name, found=f"no {MANIFEST}", expected="a finished checkpoint")
        manifest = parse_manifest(raw, refuse, check_digest=True)
        assert manifest is not None  # refuse has raised otherwise
        self.specs = {name.removesuffix(".weight"): record.spec for name, record in manifest.weights.items()}
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        if any(path.rpartition(".")[2] == "lm_head" for path in self.specs):
            for config in (hf_config, text):
                if getattr(config, "tie_word_embeddings", False):
                    config.tie_word_embeddings = False
        self.tied = bool(getattr(text, "tie_word_embeddings", False))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Names as the model of vLLM has them."""
        self.specs = hf_to_vllm_mapper.apply_dict(self.specs)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """How a layer computes: ours, that of a dense layer, or None where vLLM chooses (BCQ-E305: not possible)."""
        prefix = prefix.removeprefix("draft_model.")  # before all names of a model that drafts for another
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            head = isinstance(layer, ParallelLMHead)
            weights = self._weights_of(prefix if prefix or head else self._table_like(layer))
            if weights and not head and isinstance(layer, VocabParallelEmbedding):
                self._embedding = True
                return BcqEmbeddingMethod(weights, tied=self.tied)
            if weights:
                return BcqLinearMethod(weights)
            if head and self.tied and self._embedding:
                return TiedHeadMethod()
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        inside = [path for path in self.specs if path == prefix or path.startswith(f"{prefix}.")]
        if inside:
            found = f"a quantized weight in a {type(layer).__name__}"
            expected = "linear layers, embeddings and heads; for others: bcqfmt export MODEL NEW --to dense"
            raise error("BCQ-E305", tensor=inside[0], found=found, expected=expected)
        return None

    def _table_like(self, layer: Any) -> str:
        """The path of the only table of this size: some models do not say which embedding they make (Llama)."""
        shape = (getattr(layer, "org_vocab_size", None), getattr(layer, "embedding_dim", None))
        alike = [name for name, spec in self.specs.items() if spec.shape == shape and _is_table(name)]
        if len(alike) > 1:
            found = f"{len(alike)} weights of shape {list(shape)} for an embedding without a name"
            raise error("BCQ-E305", tensor=alike[0], found=found, expected="one; or bcqfmt export MODEL NEW --to dense")
        return alike[0] if alike else ""

    def _weights_of(self, prefix: str) -> tuple[tuple[str, WeightSpec | None], ...]:
        """Paths and specs of the weights that make up a layer, None for those that are dense; () if all are."""
        if prefix in self.specs:
            return ((prefix, self.specs[prefix]),)
        parent, dot, leaf = prefix.rpartition(".")
        names = [f"{parent}{dot}{name}" for name in self.packed_modules_mapping.get(leaf, ())]
        found = tuple((name, self.specs.get(name)) for name in names)
        return found if any(spec for _, spec in found) else ()


def _is_table(path: str) -> bool:
    """Whether a weight is called as embeddings are: embed_tokens, word_embeddings, tok_embeddings, wte."""
    leaf = path.rpartition(".")[2]
    return "emb" in leaf or leaf == "wte"


def _refuse_version(code: str, found: str, expected: str = "", weight: str = "") -> None:
    raise error(code, "config.json", found=found, expected=expected)
