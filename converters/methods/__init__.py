"""How dense weights become BCQ weights: one quantization method per file, none of which sees a file.

    weight float32 [out, in] (+ statistics of its inputs) --Method.quantize--> Quantized(BcqWeight, error)

`protocol` says what a method is; `bcqfmt.converters.quantize.quantization` carries the methods through a whole model.
"""
