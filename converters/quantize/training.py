"""Training the numbers of groups: codes stay, scales (bcq: the bias too) follow the dense model's predictions.

After all layers are quantized, the text is run through the dense and the quantized model, and Adam moves the numbers so
that the divergence of the predictions (Kullback-Leibler, dense against quantized) falls. Both models share everything
but the weights of linear layers: the dense ones in float32, and codes of one byte. Values are made of codes where they
are needed and not kept, and decoder layers are run again in the backward pass: besides the model, memory holds one
layer and the predictions of a few rows. Imported on demand only: it needs torch and transformers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from bcqfmt.container.dtypes import float64_of, round_to
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import error
from bcqfmt.weight import decode
from bcqfmt.weight.weight import BcqWeight

from .calibration import device_of, model_and_tokens
from .calibration_work import TextOptions
from .layer_inputs import linears

Tensor = torch.Tensor

_RATE = 3e-3  # of the mean number of a weight, in a step
_ROWS = 4  # of text in a step
_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 27}  # elements of predictions held at a time
_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def train_scales(
    source: SourceCheckpoint, given: TextOptions, weights: Mapping[str, BcqWeight], say: Callable[[str], None]
) -> dict[str, BcqWeight]:
    """The weights with trained numbers, rounded to the types they are stored in.

    ``weights``: of linear layers inside decoder layers, one affine or bcq segment each; ``given.train``: passes over
    the text. The same text and weights give the same result on the same machine.
    """
    model, tokens = model_and_tokens(source, given.text, given.rows, given.seq, 0)
    device = device_of(given.device)
    model.load(source, model.module, "", device)
    for layer in model.layers:
        _recompute_in_backward(layer)
    found = dict(linears(source, model.module, ""))
    trained = {name: _Numbers(weight, found[name], device) for name, weight in weights.items()}
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # operations that say they may differ between runs
            _train(model.module, torch.from_numpy(tokens).to(device), list(trained.values()), given.train, say)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return {name: one.weight() for name, one in trained.items()}


def _train(model: Any, tokens: Tensor, layers: list[_Numbers], passes: int, say: Callable[[str], None]) -> None:
    count, seq = tokens.shape
    held = max(1, _LOGITS[tokens.device.type] // (seq * model.config.get_text_config().vocab_size))
    groups = [{"params": [one.numbers], "lr": _RATE * float(one.first.abs().mean())} for one in layers]
    step = torch.optim.Adam(groups, betas=(0.9, 0.95))
    steps = passes * -(-count // _ROWS)
    pace = torch.optim.lr_scheduler.LambdaLR(step, lambda at: 0.5 * (1.0 + math.cos(math.pi * at / steps)))
    for number in range(passes):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(number)).to(tokens.device)
        total, seen = 0.0, 0
        for chosen in torch.split(order, _ROWS):
            step.zero_grad()
            for rows in torch.split(tokens[chosen], held):
                total += _backwards(model, rows, layers, len(chosen) * seq)
                seen += len(rows)
            step.step()
            pace.step()
            for one in layers:
                one.stay_in_range()
            if seen == count or seen // 32 > (seen - len(chosen)) // 32:
                mean = total / (seen * seq)
                say(f"scales: pass {number + 1} of {passes}, row {seen} of {count}, divergence {mean:.4f}")
                if not math.isfinite(mean):
                    raise error("BCQ-E622", found="training of scales: the model gives NaN or infinity")


def _backwards(model: Any, rows: Tensor, layers: list[_Numbers], share: int) -> float:
    """Add the gradients of some rows ``[rows, seq]``, divided by ``share``; the divergence, summed over tokens."""
    for one in layers:
        one.dense = True
    with torch.no_grad():
        want = model(input_ids=rows, use_cache=False).logits.float().log_softmax(-1)
    for one in layers:
        one.dense = False
    got = model(input_ids=rows, use_cache=False).logits.float().log_softmax(-1)
    apart = torch.nn.functional.kl_div(got, want, reduction="sum", log_target=True)
    (apart / share).backward()  # type: ignore[no-untyped-call]
    return float(apart.detach())


class _Numbers:
    """The numbers of a weight's groups, float32 ``[k, out, G]``, and the linear layer that computes with them.

    A value is the sum of the k numbers of its group, each times what the code says: code - zero point (affine, k = 1);
    the signs of the planes, and 1 for the bias (bcq).
    """

    def __init__(self, weight: BcqWeight, layer: torch.nn.Linear, device: torch.device) -> None:
        (segment,) = weight.scheme.segments
        self._weight, self._layer, self._bits, self.dense = weight, layer, segment.bits, True
        (self._columns,) = weight.spec.widths
        count = weight.spec.groups(0)
        self._size = segment.group_size if count > 1 else self._columns
        room = (0, count * self._size - self._columns)  # the last group may be short
        codes = torch.nn.functional.pad(torch.from_numpy(weight.codes()), room)
        self._codes = codes.view(-1, count, self._size).to(device)
        arrays = decode.load_rows(weight.spec, weight.parts(), 0, (0, weight.spec.out))
        self._zero: Tensor | None = None
        if segment.encoding == "affine":
            self._parts = {"s0_scale": str(segment.scale)}
            zero = np.broadcast_to(np.asarray(decode.zero_of(arrays, 0)), (weight.spec.out, count))
            self._zero = torch.from_numpy(zero.astype(np.float32)).to(device)
        else:
            self._parts = {"s0_alpha": str(segment.alpha)} | ({"s0_bias": segment.bias} if segment.bias else {})
        stored = [float64_of(arrays.arrays[part]) for part in self._parts]
        stacked = np.concatenate([one.reshape(-1, weight.spec.out, count) for one in stored]).astype(np.float32)
        self.first = torch.from_numpy(stacked).to(device)
        self._scales = len(self.first) - ("s0_bias" in self._parts)
        perm = arrays.arrays.get("perm")
        self._order = None if perm is None else torch.from_numpy(perm.astype(np.int64)).to(device)
        self.numbers = torch.nn.Parameter(self.first.clone())
        layer.forward = self._forward  # type: ignore[assignment, method-assign]

    def stay_in_range(self) -> None:
        """A scale that would vanish or change its sign goes back to what it was."""
        with torch.no_grad():
            now, first = self.numbers[: self._scales], self.first[: self._scales]
            now.copy_(torch.where(now * first > 0, now, first))

    def weight(self) -> BcqWeight:
        """The weight with these numbers."""
        parts = self._weight.parts()
        now = self.numbers.detach().cpu().double().numpy()
        old = self.first.cpu().double().numpy()
        for part, kind in self._parts.items():
            many = slice(self._scales, None) if part == "s0_bias" else slice(0, self._scales)
            with np.errstate(over="ignore"):
                made = round_to(now[many], kind)
            fits = np.isfinite(float64_of(made)) & ((float64_of(made) != 0) | (part == "s0_bias"))
            kept = np.where(fits, made, round_to(old[many], kind)).reshape(parts[part].shape)
            parts[part] = StoredTensor.from_array(part, kept, kind)
        return BcqWeight(self._weight.name, self._weight.spec, parts)

    def values(self) -> Tensor:
        """What the weight is now, ``[out, in]``, of numbers as they would be stored."""
        kinds = [_TYPES[kind] for kind in self._parts.values()]
        stored = torch.cat(
            [self.numbers[: self._scales].to(kinds[0]).float(), self.numbers[self._scales :].to(kinds[-1]).float()]
        )
        made = torch.zeros(self._codes.shape, device=stored.device)
        for number, basis in zip(stored, self._bases(), strict=True):
            made += number[:, :, None] * basis
        values = made.flatten(1)[:, : self._columns]
        return values if self._order is None else values[:, self._order.argsort()]

    def gradient(self, by_value: Tensor) -> Tensor:
        """``[k, out, G]``, of one ``[out, in]``."""
        stored = by_value if self._order is None else by_value[:, self._order]
        room = (0, self._codes[0].numel() - self._columns)
        groups = torch.nn.functional.pad(stored, room).view(self._codes.shape)
        return torch.stack([(groups * basis).sum(2) for basis in self._bases()])

    def _bases(self) -> Iterator[Tensor]:
        """By how much a value grows with every number, float32 ``[out, G, size]`` in the stored order of columns."""
        if self._zero is not None:
            yield self._codes - self._zero[:, :, None]
            return
        for plane in range(self._bits):
            yield (self._codes >> (self._bits - 1 - plane) & 1) * 2.0 - 1.0
        if len(self.first) > self._scales:
            yield torch.ones((1, 1, 1), device=self._codes.device)

    def _forward(self, x: Tensor) -> Tensor:
        bias: Tensor | None = self._layer.bias
        if self.dense:
            return torch.nn.functional.linear(x, self._layer.weight, bias)
        made: Tensor = _Product.apply(x, self.numbers, self)  # type: ignore[no-untyped-call]
        return made if bias is None else made + bias


class _Product(torch.autograd.Function):
    """x W^T; W is not kept, but made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, layer: _Numbers) -> Tensor:
        """``[..., out]``."""
        ctx.save_for_backward(x)
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.values())

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """To x and to the numbers."""
        (x,) = ctx.saved_tensors
        above = given[0]
        below = above @ ctx.layer.values() if ctx.needs_input_grad[0] else None
        by_value = above.reshape(-1, above.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        return below, ctx.layer.gradient(by_value), None


def _recompute_in_backward(layer: torch.nn.Module) -> None:
    """Keep only what enters a decoder layer."""
    run = layer.forward

    def forward(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*given, **named)
        return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False, **named)

    layer.forward = forward
