"""The real vLLM on a processor: its Python files from the published wheel, its compiled operators in plain torch.

Wheels of vLLM hold machine code for GPUs, hundreds of megabytes of it; a version with "+cpu" makes vLLM choose its CPU
engine. What it imports is installed into an environment of its own, once for all versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_NEEDS = (
    "torch", "numpy", "numba", "transformers<5.20", "safetensors", "ml_dtypes", "click", "tqdm", "huggingface_hub",
    "aiohttp", "blake3", "cachetools", "cbor2", "cloudpickle", "compressed-tensors==0.17.0", "depyf==0.20.0", "einops",
    "fastapi[standard]<0.137", "ijson", "jsonschema", "lark==1.2.2", "llguidance<1.8", "mistral_common", "msgspec",
    "openai", "openai-harmony", "opencv-python-headless", "outlines_core==0.2.14", "partial-json-parser", "pillow",
    "prometheus-fastapi-instrumentator", "prometheus_client", "protobuf", "psutil", "py-cpuinfo", "pybase64",
    "python-json-logger", "pyyaml", "pyzmq", "regex", "requests", "sentencepiece", "setproctitle", "tiktoken",
    "xgrammar<1",
)  # fmt: skip
_ENTRY = "[vllm.general_plugins]\nbcqfmt = bcqfmt.integrations.vllm:register\n"
_TORCHVISION = """\"\"\"In place of torchvision, which some files of vLLM import for images; there are none here.\"\"\"
import sys
from unittest.mock import MagicMock
__path__, __version__ = [], "0.28.0"
for name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"torchvision.{name}"] = MagicMock(__spec__=None)
"""
_SETTINGS = {
    "VLLM_PLUGINS": "bcqfmt", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONSAFEPATH": "1",
    "TOKENIZERS_PARALLELISM": "false", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}  # fmt: skip


def folder() -> Path:
    """Where environments are: ``VLLM_ENVIRONMENT``, by default ``.venv/vllm``."""
    return Path(os.environ.get("VLLM_ENVIRONMENT", ROOT / ".venv" / "vllm"))


def run(version: str, script: Path, *arguments: Path, **settings: str) -> None:
    """A script with this version of vLLM and our plugin; everything is installed at the first call."""
    python, site = _python(), _site(version)
    found = {**os.environ, **_SETTINGS, "PYTHONPATH": str(site), "VLLM_CACHE_ROOT": str(folder() / "cache"), **settings}
    subprocess.run([str(python), str(script), *map(str, arguments)], env=found, check=True)


def _python() -> Path:
    place = folder() / "env"
    if not (place / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run([str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *_NEEDS], check=True)
        (place / ".ready").touch()
    return place / "bin" / "python"


def _site(version: str) -> Path:
    """A folder for PYTHONPATH: vLLM without machine code, the operators, our package as it is here."""
    site = folder() / version
    if not (site / ".ready").exists():
        wheels = folder() / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", str(wheels), f"vllm=={version}"], check=True)
        (wheel,) = wheels.glob(f"vllm-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(("/", ".so")):
                    continue
                place = site / name.replace(f"vllm-{version}.dist-info", f"vllm-{version}+cpu.dist-info")
                place.parent.mkdir(parents=True, exist_ok=True)
                data = archive.read(name)
                if name.endswith("METADATA"):
                    data = data.replace(f"\nVersion: {version}\n".encode(), f"\nVersion: {version}+cpu\n".encode())
                place.write_bytes(data)
        wheel.unlink()
        (site / "bcqfmt").symlink_to(ROOT / "bcqfmt")
        record = site / "bcqfmt-0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: bcqfmt\nVersion: 0\n", encoding="utf-8")
        (record / "entry_points.txt").write_text(_ENTRY, encoding="utf-8")
        (site / ".ready").touch()
    operators = (ROOT / "tests" / "support" / "vllm_plugin" / "operators.py").read_bytes()
    (site / "vllm" / "_C.py").write_bytes(operators)
    (site / "torchvision.py").write_text(_TORCHVISION, encoding="utf-8")
    return site
