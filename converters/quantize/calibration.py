"""Calibration: run a dense model on text and keep, for every linear layer's input, sums of x^2 and of x x^T.

The model is run one decoder layer at a time: what enters a layer is kept on disk, so memory holds one layer, its
statistics, and a row of text. Everything is computed in float32; the products x^T x of a row are float32 matrices that
are added up in float64. Imported on demand only: it needs torch and transformers.

Tokens may be weighted, so that a few of them do not decide everything (`WEIGHTINGS`):

- tokens: x / |x| in place of x, every token of a row counts the same;
- loss: a token counts by the squared gradient of the model's loss at the output of the linear layer, for every layer
  anew: for keys and values that is how much attention depends on the token. Before the statistics the model is run
  forwards, every layer's input kept on disk, and backwards, layer by layer.

No token counts more than `layer_inputs.MOST` times the mean of its row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from bcqfmt.container.files import refuse_pipes
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import BcqError, error, escape

from .attention import use_blocks
from .calibration_work import CalibrationText, CalibrationWork, choose_rows
from .dense import refuse_quantized
from .layer_inputs import Gradients, Inputs, linears
from .stats import WEIGHTINGS, StatsFile, fingerprint

__all__ = ["WEIGHTINGS", "Model", "Runner", "calibrate", "device_of", "model_and_tokens"]

Tensor = torch.Tensor

_KEPT = 1 << 28  # bytes of what enters a layer that a GPU keeps while the layer is worked on
_TOKENS, _TOKENS_CPU = 4096, 2048  # in a decoder layer at a time, unless a row has more; on a CPU for less memory


def calibrate(
    source: SourceCheckpoint, text: CalibrationText, target: Path, *, rows: int = 128, seq: int = 512, seed: int = 0,
    device: str = "auto", weighting: str = "none", overwrite: bool = False, resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> StatsFile:  # fmt: skip
    """Statistics of a model's linear layers on ``rows`` pieces of ``seq`` tokens, written to ``target``.

    ``device``: ``cpu``, ``cuda``, ``cuda:1`` or ``auto``. ``weighting``: one of ``WEIGHTINGS``. A run that was
    interrupted goes on at the layer where it stopped; the result is the same. ``overwrite``: replace the target and
    start anew, unless ``resume``. ``say`` gets a line for every layer.
    """
    place = device_of(device)
    model, tokens = model_and_tokens(source, text, rows, seq, seed)
    plan = {
        "model": fingerprint(source),
        "text": {"sha256": text.sha256},
        "rows": rows,
        "seq": seq,
        "tokens": rows * seq,
        "seed": seed,
        "device": place.type,
        "weighting": weighting,
    }
    with CalibrationWork(target, plan, overwrite=overwrite, resume=resume) as work, torch.no_grad():
        runner = Runner(source, model, tokens, work, place, weighting)
        count = len(model.layers)
        if weighting == "loss":
            runner.weigh(say)
        for stage in range(count + 1):
            if not work.done(stage):
                say(f"layer {stage + 1} of {count}" if stage < count else "output layer")
                runner.layer(stage) if stage < count else runner.head(stage)
        return work.assemble(count + 1)


def model_and_tokens(
    source: SourceCheckpoint, text: CalibrationText, rows: int, seq: int, seed: int, *, dry_run: bool = False
) -> tuple[Model, npt.NDArray[np.int64]]:
    """A model that can be run, and ``rows`` pieces of ``seq`` tokens of a text; ``dry_run``: see :class:`Model`."""
    refuse_quantized(source)
    refuse_pipes(source.folder)
    quiet: Any = transformers.utils.logging  # only our own messages are shown
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    _config(source)  # a model that is not known has no tokenizer that is: the first is to be told
    tokens = choose_rows(text, _tokenizer(source), rows, seq, seed)
    return Model(source, seq, dry_run=dry_run), tokens


class Model:
    """A model without weights (with all of them where its names differ from the checkpoint's), and its layers."""

    def __init__(self, source: SourceCheckpoint, seq: int, *, dry_run: bool = False) -> None:
        """``dry_run``: it will not be run, so weights are not loaded in any case.

        BCQ-E602 for a checkpoint that lacks tensors of the model, which transformers would draw at random.
        """
        folder = source.folder
        try:
            config = _config(source)
            longest = getattr(config.get_text_config(), "max_position_embeddings", None)
            if isinstance(longest, int) and seq > longest:
                expected, hint = (
                    f"at most {longest}, the model's longest",
                    "give fewer tokens, or none: --context fits then",
                )
                raise error("BCQ-E302", folder.name, found=f"--context {seq}", expected=expected, hint=hint)
            with torch.device("meta"):
                factory: Any = transformers.AutoModelForCausalLM
                self.module = factory.from_config(config, dtype=torch.float32, trust_remote_code=False)
            self.whole = not self._can_stream(source)
            if self.whole and not dry_run:
                self.module, info = factory.from_pretrained(
                    folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
                    output_loading_info=True,
                )  # fmt: skip
                _refuse_missing(source, info["missing_keys"])
        except BcqError:
            raise
        except Exception as fault:  # loaders raise anything on bad files
            raise _unusable(source, fault) from fault
        self.module.eval().requires_grad_(False)
        use_blocks(self.module)
        self.layers, self.prefix = self._find_layers(source, config.get_text_config().num_hidden_layers)

    def load(self, source: SourceCheckpoint, module: torch.nn.Module, prefix: str, device: torch.device) -> None:
        """Weights of a module from the checkpoint, in float32; ``prefix``: what their names begin with."""
        if self.whole:
            module.to(device)
            return
        tied = self.module.all_tied_weights_keys
        for name in module.state_dict():
            known = prefix + name
            stored = source.tensors[known if known in source.tensors else tied[known]]
            _place(module, name, stored.to_torch().to(device, torch.float32))
        for name, buffer in module.named_buffers():
            _place(module, name, buffer.to(device))

    def _can_stream(self, source: SourceCheckpoint) -> bool:
        """Whether every tensor is in the checkpoint under its name, and every other buffer can be made."""
        buffers = dict(self.module.named_non_persistent_buffers())
        if not all(buffer.is_floating_point() for buffer in buffers.values()):
            return False
        for name, buffer in buffers.items():
            _place(self.module, name, torch.full_like(buffer, torch.nan, device="cpu"))
        for name in buffers:
            self.module._init_weights(self.module.get_submodule(name.rpartition(".")[0]))
        made = all(not buffer.isnan().any() for _, buffer in self.module.named_non_persistent_buffers())
        return made and self.module.state_dict().keys() <= source.tensors.keys() | self.module.all_tied_weights_keys

    def _find_layers(self, source: SourceCheckpoint, count: int) -> tuple[torch.nn.ModuleList, str]:
        for name, module in self.module.named_modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == count:
                return module, name
        found, hint = f"no list of {count} decoder layers", "quantize it without --text, with --method rtn or bcq"
        raise error("BCQ-E601", source.folder.name, found=found, expected="a decoder", hint=hint)

    def weight_names(self, source: SourceCheckpoint) -> list[list[str]]:
        """The weights of the linear layers in every decoder layer, as the source names them."""
        prefixed = ((layer, f"{self.prefix}.{i}.") for i, layer in enumerate(self.layers))
        return [[name for name, _ in linears(source, layer, prefix)] for layer, prefix in prefixed]


class Runner:
    """Runs the stages of a model over all rows of tokens."""

    def __init__(
        self, source: SourceCheckpoint, model: Model, tokens: npt.NDArray[np.int64], work: CalibrationWork,
        device: torch.device, weighting: str,
    ) -> None:  # fmt: skip
        self.source, self.model, self.work, self.device = source, model, work, device
        self.weighting = weighting
        self.tokens = torch.from_numpy(tokens)
        most = max(1, (_TOKENS_CPU if device.type == "cpu" else _TOKENS) // tokens.shape[1])
        self.step = next(rows for rows in range(most, 0, -1) if len(tokens) % rows == 0)
        self._kept: dict[str, tuple[int, list[Tensor]]] = {}
        self.real = list(model.layers)
        self.recorders = [_Recorder(layer) for layer in self.real]
        for index, recorder in enumerate(self.recorders):
            model.layers[index] = recorder
        self.width = model.module.config.get_text_config().hidden_size
        self._prepare()

    def layer(self, stage: int) -> None:
        """One decoder layer: statistics of its linear layers, and what enters the next."""
        layer = self.load_layer(stage)
        inputs = self._inputs(layer, self.prefix(stage), stage)

        def run() -> Iterator[npt.NDArray[np.float32]]:
            for rows in self.rows(stage):
                yield self.apply(stage, rows).cpu().numpy()
                inputs.rows_done(len(rows))

        self.work.rows_into(stage + 1, run())
        self.work.finish(stage, *inputs.results())
        self.unload(layer)

    def head(self, stage: int) -> None:
        """All linear layers outside the decoder layers: the model's own forward, with what its layers gave."""
        self._load(self.model.module, "")
        inputs = self._inputs(self.model.module, "", stage)
        for tokens, row in zip(self.tokens, self.rows(stage, step=1), strict=True):
            self._logits(tokens, row)
            inputs.rows_done(1)
        self.work.finish(stage, *inputs.results())

    def weigh(self, say: Callable[[str], None]) -> None:
        """The weights of all tokens by the gradient of the loss; what enters every layer stays on disk meanwhile."""
        count = len(self.real)
        if not self.work.weights(0).exists():
            for stage in range(count):
                if not self.work.rows_file(stage + 1).exists():
                    say(f"tokens: layer {stage + 1} of {count}, forwards")
                    self.load_layer(stage)
                    made = (self.apply(stage, row).cpu().numpy() for row in self.rows(stage))
                    self.work.rows_into(stage + 1, made)
                    self.unload(self.real[stage])
        for stage in range(count, -1, -1):
            if not self.work.weights(stage).exists() and not self.work.weights(0).exists():
                say(f"tokens: layer {stage + 1} of {count}, backwards" if stage < count else "tokens: output layer")
                self._weigh(stage)

    def _weigh(self, stage: int) -> None:
        """Gradients of a stage's outputs from those of the next one's inputs; the output layer has the loss."""
        head = stage == len(self.real)
        module, prefix = (self.model.module, "") if head else (self.real[stage], self.prefix(stage))
        self._load(module, prefix)
        step = 1 if head else self.step  # predictions take far more room than what enters a layer
        found = Gradients(self.source, module, prefix, (step, self.tokens.shape[1]))
        above = None if head else self.rows(stage + 1, "gradient")

        def run() -> Iterator[npt.NDArray[np.float32]]:
            for tokens, rows in zip(self.tokens[::step], self.rows(stage, step=step), strict=True):
                hidden = rows.requires_grad_()
                with torch.enable_grad():
                    if above is None:
                        logits = self._logits(tokens, hidden)[0, :-1].float()
                        made = torch.nn.functional.cross_entropy(logits, tokens[1:].to(self.device), reduction="sum")
                    else:
                        made = self.apply(stage, hidden)
                made.backward(None if above is None else next(above))  # type: ignore[no-untyped-call]
                found.rows_done()
                assert hidden.grad is not None
                yield hidden.grad.cpu().numpy()

        self.work.rows_into(stage, run(), "gradient")
        self.work.finish_weights(stage, found.results())
        self.unload(module)

    def _inputs(self, module: torch.nn.Module, prefix: str, stage: int) -> Inputs:
        weights = self.work.read_weights(stage) if self.weighting == "loss" else {}
        return Inputs(self.source, module, prefix, self.device, self.weighting, weights, self.tokens.shape[1])

    def prefix(self, stage: int) -> str:
        """What the names of a layer's tensors begin with."""
        return f"{self.model.prefix}.{stage}."

    def load_layer(self, stage: int) -> torch.nn.Module:
        """A decoder layer with the source's weights, until :meth:`unload`."""
        self._load(self.real[stage], self.prefix(stage))
        return self.real[stage]

    def rows(self, stage: int, kind: str = "hidden", step: int = 0, *, keep: bool = False) -> Iterator[Tensor]:
        """What enters a layer, some rows at a time, ``[rows, seq, hidden]`` on the device.

        kind: see ``CalibrationWork``; step: how many rows; keep: they will be asked for again.
        """
        step = step or self.step
        shape = (step, self.tokens.shape[1], self.width)
        read = (
            torch.from_numpy(rows).to(self.device)
            for rows in self.work.rows_of(stage, len(self.tokens) // step, shape, kind)
        )
        if not keep or self.device.type == "cpu" or 4 * self.tokens.numel() * self.width > _KEPT:
            yield from read
            return
        if self._kept.get(kind, (-1, []))[0] != stage:
            self._kept[kind] = stage, list(read)
        yield from self._kept[kind][1]

    def apply(self, stage: int, hidden: Tensor, layer: torch.nn.Module | None = None) -> Tensor:
        """What a layer, or another in its place, gives, float32, as ``hidden``; BCQ-E622 where it is not finite."""
        record = self.recorders[stage]
        made = (layer or self.real[stage])(hidden, *record.positional, **record.named)
        made = made[0] if isinstance(made, tuple) else made
        if not (made.sum().isfinite() or torch.isfinite(made).all()):  # the sum takes a tenth of the time
            raise error("BCQ-E622", self.source.folder.name, found=f"layer {stage} gives NaN or infinity")
        result: Tensor = made.float()
        return result

    def _logits(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What the model gives for the result of its last layer; BCQ-E622 where it is not finite."""
        self.recorders[-1].stops = False
        self.recorders[-1].result = hidden
        logits: Tensor = self.model.module(input_ids=tokens[None].to(self.device), use_cache=False).logits
        if logits.isnan().any():
            raise error("BCQ-E622", self.source.folder.name, found="the last layer gives NaN")
        return logits

    def _prepare(self) -> None:
        """How the model calls each layer, what a layer gives back, and what enters the first."""
        self._load(self.model.module, "")
        self.recorders[0].stops = True
        first_rows = self.tokens[: self.step]
        self._forward(first_rows)
        self._load(self.real[0], f"{self.model.prefix}.0.")
        first = self.recorders[0]
        as_tuple = isinstance(self.real[0](first.entered, *first.positional, **first.named), tuple)
        self.unload(self.real[0])
        for recorder in self.recorders:
            recorder.as_tuple, recorder.stops = as_tuple, recorder is self.recorders[-1]
        self._forward(first_rows)
        if not self.work.done(0) and not self.work.rows_file(0).exists():

            def embedded() -> Iterator[npt.NDArray[np.float32]]:
                for tokens in torch.split(self.tokens, self.step):
                    self._forward(tokens)
                    yield self.recorders[0].entered.float().cpu().numpy()

            self.work.rows_into(0, embedded())
        for recorder in self.recorders:
            recorder.records = False  # calls with other numbers of rows follow
        self.unload(self.model.module)

    def _forward(self, tokens: Tensor) -> None:
        with contextlib.suppress(_Reached):
            self.model.module(input_ids=tokens.to(self.device), use_cache=False)

    def _load(self, module: torch.nn.Module, prefix: str) -> None:
        self.model.load(self.source, module, prefix, self.device)

    def unload(self, module: torch.nn.Module) -> None:
        """Forget the weights of a module."""
        if not self.model.whole:
            for name, value in module.state_dict().items():
                _place(module, name, torch.empty_like(value, device="meta"))


class _Recorder(torch.nn.Module):
    """Replaces a decoder layer while the model around it runs: records its arguments, passes on its input."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)  # not a submodule: its weights stay out of the model
        self.positional: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}
        self.entered = torch.empty(0)
        self.result: Tensor | None = None
        self.stops = self.as_tuple = False
        self.records = True

    def forward(self, hidden: Tensor, *positional: Any, **named: Any) -> Tensor | tuple[Tensor]:
        """Record the call; return the input or the result of all layers, or stop."""
        if self.records:
            self.entered, self.positional, self.named = hidden, positional, named
        if self.stops:
            raise _Reached
        result = hidden if self.result is None else self.result
        return (result,) if self.as_tuple else result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)


class _Reached(Exception):
    """Ends a forward pass at a layer: nothing after it is needed."""


def _place(module: torch.nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    parent = module.get_submodule(owner)
    if last in parent._parameters:
        parent._parameters[last] = torch.nn.Parameter(value, requires_grad=False)
    else:
        parent._buffers[last] = value


def _config(source: SourceCheckpoint) -> Any:
    """The configuration as transformers reads it; BCQ-E601 for one that it does not know."""
    try:
        return transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
    except Exception as fault:  # loaders raise anything on bad files
        raise _unusable(source, fault) from fault


def _unusable(source: SourceCheckpoint, fault: Exception) -> BcqError:
    found, expected = f"transformers cannot run it: {_reason(fault)}", "a causal language model"
    hint = "get the model's own config.json, or a transformers that knows its model_type; rtn and bcq need no --text"
    return error("BCQ-E601", source.folder.name, found=found, expected=expected, hint=hint)


def _tokenizer(source: SourceCheckpoint) -> Callable[[str], list[int]]:
    """BCQ-E102 where there is none."""
    hint = "copy the original model's tokenizer files"
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            source.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as fault:  # loaders raise anything on bad files
        reason = f"tokenizer files that are missing or cannot be read: {_reason(fault)}"
        raise error("BCQ-E102", source.folder.name, found=reason, expected="a tokenizer", hint=hint) from fault
    if found.get_vocab().keys() <= {*found.all_special_tokens, *found.get_added_vocab()}:
        # what transformers makes of no files
        raise error("BCQ-E102", source.folder.name, found="no tokenizer files", expected="a tokenizer", hint=hint)
    return lambda text: list(found(text, add_special_tokens=False, verbose=False)["input_ids"])


def _refuse_missing(source: SourceCheckpoint, missing: Iterable[str]) -> None:
    """BCQ-E602 for tensors that transformers would draw at random."""
    names = sorted(missing)
    if names:
        found = f"{len(names)} tensors of the model are not in the files"
        hint = "correct config.json, or get the complete checkpoint"
        raise error("BCQ-E602", source.folder.name, names[0], found, "all of them", hint)


def _reason(fault: Exception) -> str:
    return escape(" ".join(str(fault).split()) or type(fault).__name__)


def device_of(wanted: str) -> torch.device:
    """``auto``: CUDA where there is one; BCQ-E551 where it is asked for and missing."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise error("BCQ-E551", found="torch sees no CUDA device", expected="--device cpu")
    return torch.device(wanted)
