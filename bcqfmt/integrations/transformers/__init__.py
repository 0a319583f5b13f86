"""BCQ checkpoints in transformers: one import, and ``from_pretrained`` reads them.

    >>> import bcqfmt.integrations.transformers
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained("model-bcq/")

Importing this module registers the quantization method ``bcq``, which config.json of a BCQ folder names. Weights go
from the file into the buffers of `BcqLinear` layers; no dense copy is made. ``save_pretrained`` of such a model writes
a BCQ folder, ``dequantize()`` makes it an ordinary one. :func:`set_mode` chooses between kernels and exact arithmetic.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from bcqfmt.checkpoint.folder import MANIFEST
from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.checkpoint.reader import open as open_checkpoint
from bcqfmt.errors import error
from bcqfmt.integrations.torch.layers import BcqModule
from bcqfmt.weight.decode import refuse_truncation
from bcqfmt.weight.weight import BcqWeight

from .dense import convert, make_dense
from .placement import collect_missing, place_weights, refuse_missing
from .save import forget, remember, wrap_save_pretrained

__all__ = ["BcqConfig", "BcqQuantizer", "set_mode"]

_PART = re.compile(r"(^|[._])bcq_[a-z0-9_]+$")
_logger: Any = logging.get_logger(__name__)


@register_quantization_config("bcq")
class BcqConfig(QuantizationConfigMixin):
    """``quantization_config`` of a BCQ folder; the weights are described in the files, not here."""

    def __init__(
        self, quant_method: str = "bcq", format_version: str = "1.0", features: Any = (), **others: Any
    ) -> None:
        self.quant_method: Any = quant_method
        self.format_version = format_version
        self.features = list(features)


@register_quantizer("bcq")
class BcqQuantizer(HfQuantizer):
    """Puts BCQ layers into a model before transformers loads it, and makes it saveable."""

    requires_calibration = True  # a dense model is quantized by `bcqfmt quantize`, not while it is loaded

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.source: Path | None = None
        self._renamings: list[tuple[str, str]] = []
        self._asked: Any = None
        self._missing: list[str] = []

    def update_dtype(self, dtype: Any) -> Any:
        """Any dtype is accepted; it is kept for :meth:`_process_model_after_weight_loading`."""
        self._asked = dtype
        return dtype

    def update_attn_implementation(self, config: Any) -> Any:
        """A place to see the configuration before files are looked for: what stops a forgotten import is taken off."""
        config.__dict__.pop("transformers_weights", None)
        return config

    update_tp_plan = update_ep_plan = update_attn_implementation  # the same place in transformers 5.16 to 5.21

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **others: Any) -> None:
        """Replace modules by empty ones of the right kind; every header is read and checked here."""
        files = [Path(file) for file in checkpoint_files or ()]
        if not files or any(file.suffix != ".safetensors" for file in files):
            raise error("BCQ-E305", found="weights that are not in safetensors files", expected="a BCQ folder")
        self.source = files[0].parent
        weights: dict[str, BcqWeight] = {}
        for checkpoint in _opened(files):
            with checkpoint:
                weights.update(checkpoint.weights())
        self._renamings = place_weights(model, weights, get_model_conversion_mapping(model))
        self._missing = collect_missing(model)

    def update_weight_conversions(self, weight_conversions: Any, model: Any = None) -> Any:
        """Those of the model, then ours: parts of stacks become buffers of a module of their own."""
        return [*weight_conversions, *(WeightRenaming(old, new) for old, new in self._renamings)]

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Parts keep the type that they are stored in, whatever type is asked for."""
        names = (*converter.source_patterns, *converter.target_patterns)
        return None if any(_PART.search(name) for name in names) else super().get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(self, model: Any, **others: Any) -> Any:
        """Check that nothing is missing and the content of every weight, as any reader has to; remember the source."""
        refuse_missing(model, self._missing, self.source)
        for module in _modules(model):
            if module.parts()[0].is_meta:  # offloaded to disk until it is used
                continue
            for name in module.names:
                part = module._buffers[name]
                assert part is not None
                if part.data_ptr() % part.element_size():  # a file of another writer; kernels want aligned words
                    module._buffers[name] = part.clone()
            module.to_weight(getattr(module, "weight_name", "")).check()
        if not hasattr(HfQuantizer, "get_new_dtype"):
            # until 5.20 transformers leaves what it renames (Mixtral's routers) in the stored type
            convert(model, self._asked)
        remember(model, self.source)
        return model

    def dequantize(self, model: Any, dtype: Any = None) -> Any:
        """The dense model, in its own dtype or all of it in another."""
        make_dense(model, model.dtype if dtype is None else dtype)
        if dtype is not None:
            convert(model, dtype)
            model.config.dtype = dtype
        forget(model)
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        return model

    def is_serializable(self) -> bool:
        """Not by transformers, which would drop the descriptors; the model's own ``save_pretrained`` writes BCQ."""
        _logger.warning("BCQ models are saved by the save_pretrained of the loaded model, which writes a BCQ folder.")
        return False

    @property
    def is_trainable(self) -> bool:
        """Gradients pass through the layers, whose weights are fixed: other parameters can be trained."""
        return True


def set_mode(model: nn.Module, *, exact: bool | None = None, planes: int | None = -1) -> None:
    """How the BCQ layers of a model compute.

    ``exact``: multiply with the decoded matrix as a dense model would, bit for bit, instead of using the kernels.
    ``planes``: use only the first ones of every weight (spec section 8.1), None for all; more than any weight has are
    refused (BCQ-E302), and any for a model without BCQ layers. What is not given stays.
    """
    modules = _modules(model)
    if planes is not None and planes != -1:
        if not modules:
            expected = "a model loaded from a BCQ folder, before dequantize()"
            hint = "import bcqfmt.integrations.transformers, then from_pretrained() of the BCQ folder"
            raise error("BCQ-E302", tensor="model", found="no BCQ layers", expected=expected, hint=hint)
        for module in modules:
            refuse_truncation(module.spec, planes)
        most = max(segment.bits for module in modules for segment in module.spec.scheme.segments)
        if planes > most:
            expected, hint = f"at most {most}, as many as the weights have", f"ask for up to {most} planes, or for all"
            raise error("BCQ-E302", tensor="planes", found=f"{planes} planes", expected=expected, hint=hint)
    for module in modules:
        module.exact = module.exact if exact is None else exact
        module.planes = module.planes if planes == -1 else planes


def _modules(model: nn.Module) -> list[BcqModule]:
    return [module for module in model.modules() if isinstance(module, BcqModule)]


def _opened(files: list[Path]) -> list[Checkpoint]:
    """The folder; or, of a model in the hub's cache, to which transformers fetches no manifest, file by file."""
    folder = files[0].parent
    if (folder / MANIFEST).exists() or folder.parent.name != "snapshots":
        return [open_checkpoint(folder)]
    return [open_checkpoint(file) for file in files]


wrap_save_pretrained()
