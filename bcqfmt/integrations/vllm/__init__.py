"""BCQ folders in vLLM: the plugin that makes ``quant_method`` "bcq" known to it.

vLLM finds :func:`register` by the entry point group ``vllm.general_plugins`` and calls it in each of its processes, so
nothing has to be imported by hand: ``vllm serve model-bcq/``. Importing this module needs neither vLLM nor torch.
docs/vllm.md says what was tested without vLLM, and what was not.
"""

from __future__ import annotations

from bcqfmt.errors import error

__all__ = ["register"]


def register() -> None:
    """Tell vLLM about the method; any number of calls do the same. BCQ-E306 without vLLM."""
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from .config import BcqConfig
    except ImportError as fault:
        hint = "vLLM is installed by itself: pip install vllm (docs/vllm.md names the version that was read)"
        raise error("BCQ-E306", found=f"{fault.name or 'vllm'} cannot be imported", hint=hint) from None
    register_quantization_config("bcq")(BcqConfig)
