/* y = W x with a BCQ weight, row after row: cc -std=c99 -O2 example.c -o example && ./example FILE NAME
   x is 1, 2, 3, ...; every y is printed. */
#define BCQ_IMPLEMENTATION
#include "bcq.h"

static int multiply(bcq_weight *w, bcq_error *error)
{
    size_t columns = (size_t)w->columns, bytes = columns * bcq_dtype_bits(w->dtype) / 8, c;
    void *values = malloc(bytes);
    float *row = (float *)malloc(columns * sizeof *row);
    uint64_t e, r;
    int code = values && row ? 0 : BCQ_ERROR_MEMORY;
    for (e = 0; e < w->stack && !code; e++) {
        for (r = 0; r < w->rows && !code; r++) {
            double y = 0;
            code = bcq_dequantize(w, e, r, r + 1, 0, BCQ_NONE, values, bytes, error);
            bcq_to_float(w->dtype, values, row, code ? 0 : columns);
            for (c = 0; c < columns && !code; c++)
                y += (double)row[c] * (double)(c + 1);
            if (!code)
                printf("%.17g\n", y);
        }
    }
    free(values);
    free(row);
    return code;
}

int main(int argc, char **argv)
{
    bcq_file *file = NULL;
    bcq_error error = {BCQ_ERROR_MEMORY, "not enough memory"};
    int code = argc == 3 ? bcq_open(argv[1], 0, &file, &error) : (fputs("usage: example FILE WEIGHT\n", stderr), exit(2), 0);
    bcq_weight *w = code ? NULL : bcq_find_weight(file, argv[2]);
    if (w)
        code = multiply(w, &error);
    if (code || !w)
        fprintf(stderr, "%s: %s: %s (%d)\n", argv[1], argv[2], code ? error.message : "no such weight", code);
    bcq_close(file);
    return code || !w ? 1 : 0;
}
