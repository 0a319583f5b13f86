"""Runs in the environment of another tool: loads exported folders and compares them with what they should hold.

``load.py READER JOBS OUT``: JOBS is a JSON list of ``{"export": name, "folder": path, "dense": path}``; OUT gets a list
with ``verdict`` for each: ``equal`` (every weight bit for bit, every logit within rounding), ``rounded`` (weights or
logits a little off), ``wrong`` (not what the folder holds), ``refused``; and ``detail``. It imports nothing of bcqfmt.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

TOKENS = [[1, 5, 9, 2, 40, 57, 31, 8]]
Weights = dict[str, torch.Tensor]


def dense_weights(folder: Path) -> Weights:
    """All tensors of a dense folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - it is no mapping
    return found


def of_modules(model: torch.nn.Module) -> Weights:
    """The weight of every module by the tool's own arithmetic, [out, in]; dense ones as they are."""
    found = {name: value.detach() for name, value in model.named_parameters()}
    for name, module in model.named_modules():
        kind = type(module)
        if hasattr(module, "dequantize_weight"):
            found[f"{name}.weight"] = module.dequantize_weight().T
        elif kind.__name__ in ("WQLinear_GEMM", "AwqTorchLinear", "TorchAwqLinear"):
            dequantize = sys.modules[kind.__module__].dequantize_gemm  # what its forward calls
            bits = getattr(module, "w_bit", None) or module.bits
            found[f"{name}.weight"] = dequantize(
                module.qweight, module.qzeros, module.scales, bits, module.group_size
            ).T
    return {name.removeprefix("model.") if name.startswith("model.model.") else name: v for name, v in found.items()}


def with_transformers(folder: Path) -> tuple[Any, Weights]:
    """``from_pretrained``; compressed-tensors as dense weights, the others with the kernels in plain torch."""
    import transformers

    kind = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    config = json.loads((folder / "config.json").read_text())
    method = config.get("quantization_config", {}).get("quant_method")
    more: dict[str, Any] = {"device_map": "cpu"} if method else {}
    if method == "compressed-tensors":
        more["quantization_config"] = transformers.CompressedTensorsConfig(run_compressed=False)
    elif method:
        copy = Path(tempfile.mkdtemp(dir=folder.parent)) / "model"
        shutil.copytree(folder, copy)
        config["quantization_config"]["backend"] = "torch_awq" if method == "awq" else "torch"
        (copy / "config.json").write_text(json.dumps(config))
        folder = copy
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **{kind: "auto"}, **more)
    return model, of_modules(model)


def with_gptqmodel(folder: Path) -> tuple[Any, Weights]:
    """``GPTQModel.load`` on the CPU, plain torch."""
    from gptqmodel import BACKEND, GPTQModel

    config = json.loads((folder / "config.json").read_text())
    awq = config["quantization_config"]["quant_method"] == "awq"
    backend = BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH
    kind = getattr(torch, config.get("dtype") or config["torch_dtype"])
    model = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=kind).model
    return model, of_modules(model)


def with_autoawq(folder: Path) -> tuple[Any, Weights]:
    """``AutoAWQForCausalLM.from_quantized`` on the CPU."""
    from awq import AutoAWQForCausalLM
    from awq.models import base

    base.get_best_device = lambda: (
        "cuda:0"
    )  # on a CPU it would ask for Intel's extension; the torch kernels run anywhere
    model = AutoAWQForCausalLM.from_quantized(
        str(folder), fuse_layers=False, device_map={"": "cpu"}, use_ipex=False
    ).model
    return model, of_modules(model)


READERS: dict[str, Callable[[Path], tuple[Any, Weights]]] = {
    "transformers": with_transformers,
    "gptqmodel": with_gptqmodel,
    "autoawq": with_autoawq,
}


def logits(model: Any) -> torch.Tensor:
    """Of a few tokens, float64."""
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.double()


def judge(folder: Path, dense: Path, reader: str) -> tuple[str, str]:
    """Verdict and detail for one folder."""
    if reader == "llama.cpp":
        return judge_gguf(folder / "model.gguf", dense)
    try:
        model, found = READERS[reader](folder)
    except BaseException as refusal:  # whatever a tool ends with is its answer
        if isinstance(refusal, KeyboardInterrupt):
            raise
        lines = str(refusal).strip().splitlines() or [""]
        return "refused", f"{type(refusal).__name__}: {lines[0][:160]}"
    wanted = dense_weights(dense)
    missing = [n for n in wanted if n not in found and n.endswith(".weight") and not inside(wanted[n], found)]
    off = {name: distance(found[name], wanted[name]) for name in wanted if name in found}
    worst = max(off, key=lambda name: off[name])
    if missing and len(missing) * 2 > len(wanted):
        return "wrong", f"{len(missing)} of {len(wanted)} tensors under other names, '{missing[0]}' the first"
    if off[worst] > 0.01:
        return "wrong", f"{sum(v > 0.01 for v in off.values())} tensors are not those of the file, '{worst}' the worst"
    with_dense, _ = with_transformers(dense)
    apart = distance(logits(model), logits(with_dense))
    say = f"logits off by {apart:.1e}"
    if apart > 0.05:
        return "wrong", f"{len(missing)} tensors are not in the model, '{[*missing, worst][0]}' the first; {say}"
    if missing:
        return "rounded", f"{len(missing)} tensors are kept in other modules; {say}"
    different = sum(v > 0 for v in off.values())
    if different:
        return "rounded", f"{different} of {len(off)} tensors off by up to {off[worst]:.1e}; {say}"
    return ("equal" if apart < 0.02 else "rounded"), say


def judge_gguf(path: Path, dense: Path) -> tuple[str, str]:
    """The same for a file of llama.cpp: its values as gguf-py computes them, rows in any order (rotary embeddings).

    llama.cpp rounds activations to 8 bits where weights have few: logits are those of a copy in F32.
    """
    sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
    from programs import llama_cpp

    try:
        llama_cpp.Llama(path).text(TOKENS[0], 4)
        plain = llama_cpp.Llama(llama_cpp.in_f32(path, path.with_name("f32.gguf")))
        found = torch.from_numpy(llama_cpp.log_probabilities(plain, TOKENS[0]))
    except Exception as refusal:  # noqa: BLE001 - whatever it ends with is its answer
        return "refused", f"{type(refusal).__name__}: {str(refusal).strip()[:160]}"
    held = [torch.from_numpy(numbers) for _, numbers in llama_cpp.values(path).values()]
    wanted = dense_weights(dense)
    rows = {
        kind: {row for tensor in held for row in rows_of(tensor.to(kind))}
        for kind in {t.dtype for t in wanted.values()}
    }
    off = [name for name, tensor in wanted.items() if not rows_of(tensor) <= rows[tensor.dtype]]
    model, _ = with_transformers(dense)
    apart = distance(found, logits(model.float())[0, -1].log_softmax(-1)[: len(found)])
    say = f"logits off by {apart:.1e}"
    if off:
        return (
            "wrong" if apart > 0.05 else "rounded",
            f"{len(off)} tensors are not in the file, '{off[0]}' the first; {say}",
        )
    return ("equal" if apart < 0.02 else "wrong"), say


def rows_of(tensor: torch.Tensor) -> set[bytes]:
    """The bytes of every row."""
    plain = tensor.reshape(-1, tensor.shape[-1]).contiguous()
    return {row.tobytes() for row in plain.view(torch.uint8).numpy()}


def inside(matrix: torch.Tensor, found: Weights) -> bool:
    """Whether another tensor holds this matrix, bit for bit: all of it, one of a stack, or some rows of one."""
    rows, columns = matrix.shape[-2:]
    for tensor in found.values():
        if torch.equal(tensor, matrix):
            return True
        fits = tensor.ndim == 3 and tensor.shape[2] == columns and tensor.shape[1] % rows == 0
        if fits and any(torch.equal(part, matrix) for one in tensor for part in one.split(rows)):
            return True
    return False


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference, relative; 0 only if every number is equal. Infinite for another shape."""
    if a.shape != b.shape:
        return float("inf")
    if torch.equal(a.double(), b.double()):
        return 0.0
    return float((a.double() - b.double()).norm() / max(float(b.double().norm()), 1e-30)) or 1e-30


def quiet() -> contextlib.AbstractContextManager[Any]:
    """Tools print a lot."""
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    logging.disable(logging.CRITICAL)
    return contextlib.redirect_stdout(io.StringIO())


def results(reader: str, jobs: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """One after the other."""
    for job in jobs:
        with quiet():
            verdict, detail = judge(Path(job["folder"]), Path(job["dense"]), reader)
        sys.stderr.write(f"{reader:14} {job['layout']:20} {job['export']:44} {verdict:8} {detail}\n")
        yield {"export": job["export"], "verdict": verdict, "detail": detail}


if __name__ == "__main__":
    _, name, jobs, out = sys.argv
    Path(out).write_text(json.dumps(list(results(name, json.loads(Path(jobs).read_text()))), indent=1))
