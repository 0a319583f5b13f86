/* bcq.h for other languages, as a shared library: cc -shared -fPIC -O2 shared.c -o libbcq.so */

#define BCQ_IMPLEMENTATION
#include "bcq.h"

/* One call for what a comparison of readers asks: 0 or the rule that is broken; of a valid file the values of all
   weights, sorted by name, one after the other. `*used`: their bytes; more than `room` are not written. */
int bcq_verdict(const void *data, size_t size, void *values, size_t room, size_t *used);
int bcq_folder_verdict(const char *path);

int bcq_verdict(const void *data, size_t size, void *values, size_t room, size_t *used)
{
    bcq_file *f;
    size_t i;
    int code = bcq_open_memory(data, size, BCQ_CHECK_ALL, &f, NULL);
    *used = 0;
    for (i = 0; !code && i < bcq_weight_count(f); i++) {
        bcq_weight *w = bcq_weight_at(f, i);
        uint64_t each = w->rows * w->columns * (bcq_dtype_bits(w->dtype) / 8), k;
        for (k = 0; !code && k < w->stack; k++, *used += (size_t)each)
            if (each <= room && *used <= room - each)
                code = bcq_dequantize(w, k, 0, w->rows, 0, BCQ_NONE, (char *)values + *used, (size_t)each, NULL);
    }
    bcq_close(f);
    return code;
}

int bcq_folder_verdict(const char *path)
{
    bcq_folder *f;
    int code = bcq_open_folder(path, BCQ_CHECK_ALL, &f, NULL);
    bcq_close_folder(f);
    return code;
}
