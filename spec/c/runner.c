/* Drives bcq.h for tests: reads commands, one a line, fields separated by tabs, and answers each with lines of text.

       file PATH | folder PATH      `ok` and what is inside, or `refused CODE MESSAGE`; stays open for `values`
       memory HEX                   the bytes of a file: `ok` or `refused ...`
       values NAME PLANES DTYPE FIRST LAST   rows FIRST..LAST-1 of every matrix in hexadecimal, or `refused ...`
       misuse                       wrong calls for the first weight that is open: their codes
       starve file|folder PATH      opens and decodes with the 1st, 2nd, ... allocation failing, until none fails
       round BITS                   a binary64 as F16, BF16, F32
       mul BITS BITS | add BITS BITS   the arithmetic of section 8
       packed B COUNT HEX           the fields of one row
       canonical HEX                1 where a JSON object is canonical

   Names are given and shown in hexadecimal. */

static int allocations_left = -1; /* before one fails; -1: none does */
static int allocations_open = 0;
static void *counted_malloc(unsigned long n);
static void counted_free(void *memory);

#define BCQ_MALLOC(n) counted_malloc(n)
#define BCQ_FREE(p) counted_free(p)
#define BCQ_IMPLEMENTATION
#include "bcq.h"

static void *counted_malloc(unsigned long n)
{
    void *memory;
    if (allocations_left == 0)
        return NULL;
    if (allocations_left > 0)
        allocations_left--;
    memory = malloc(n);
    allocations_open += memory != NULL;
    return memory;
}

static void counted_free(void *memory)
{
    allocations_open -= memory != NULL;
    free(memory);
}

typedef struct opened {
    bcq_file *file;
    bcq_folder *folder;
} opened;

static int open_path(opened *o, const char *kind, const char *path, bcq_error *error)
{
    memset(o, 0, sizeof *o);
    (void)kind;
#ifndef BCQ_NO_POSIX
    if (strcmp(kind, "folder") == 0)
        return bcq_open_folder(path, BCQ_CHECK_ALL, &o->folder, error);
#endif
    return bcq_open(path, BCQ_CHECK_ALL, &o->file, error);
}

static void close_path(opened *o)
{
    bcq_close(o->file);
#ifndef BCQ_NO_POSIX
    bcq_close_folder(o->folder);
#endif
    memset(o, 0, sizeof *o);
}

static size_t file_count(const opened *o)
{
#ifndef BCQ_NO_POSIX
    if (o->folder)
        return bcq_folder_file_count(o->folder);
#endif
    return o->file != NULL;
}

static bcq_file *file_at(const opened *o, size_t i)
{
#ifndef BCQ_NO_POSIX
    if (o->folder)
        return bcq_folder_file(o->folder, i);
#endif
    return i == 0 ? o->file : NULL;
}

static void show_hex(const void *data, uint64_t size)
{
    const unsigned char *at = (const unsigned char *)data;
    uint64_t i;
    for (i = 0; i < size; i++)
        printf("%02x", at[i]);
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static size_t read_hex(const char *text, unsigned char *out)
{
    size_t n = 0;
    for (; digit(text[0]) >= 0 && digit(text[1]) >= 0; text += 2)
        out[n++] = (unsigned char)((unsigned)digit(text[0]) << 4 | (unsigned)digit(text[1]));
    return n;
}

static void show_shape(const uint64_t *shape, unsigned rank)
{
    unsigned i;
    for (i = 0; i < rank; i++)
        printf("%s%llu", i ? "," : "", (unsigned long long)shape[i]);
}

static void show_weight(const bcq_weight *w)
{
    uint64_t shape[3] = {w->stack, w->rows, w->columns};
    char hex[65];
    printf("weight\t");
    show_hex(w->name, w->name_bytes);
    printf("\t%s\t", bcq_dtype_name(w->dtype));
    show_shape(shape + (3 - w->rank), w->rank);
    bcq_weight_digest(w, hex);
    printf("\t%s\n", hex);
}

static void show_dense(const bcq_tensor *t)
{
    bcq__sha sha;
    char hex[65];
    bcq__sha_start(&sha);
    bcq__sha_add(&sha, t->data, t->bytes);
    bcq__sha_hex(&sha, hex);
    printf("dense\t");
    show_hex(t->name, t->name_bytes);
    printf("\t%s\t", bcq_dtype_name(t->dtype));
    show_shape(t->shape, t->rank);
    printf("\t%s\n", hex);
}

static void refused(int code, const bcq_error *error)
{
    if (error->code != code || strlen(error->message) >= sizeof error->message || strpbrk(error->message, "\n\t"))
        printf("broken error\n");
    printf("refused\t%d\t%s\n", code, error->message);
}

static void command_open(opened *o, const char *kind, const char *path)
{
    bcq_error error;
    size_t i, k;
    int code;
    close_path(o);
    code = open_path(o, kind, path, &error);
    if (code) {
        refused(code, &error);
        return;
    }
    printf("ok\t%s\n", file_count(o) ? bcq_version(file_at(o, 0)) : "");
    for (i = 0; i < file_count(o); i++) {
        bcq_file *f = file_at(o, i);
        for (k = 0; k < bcq_weight_count(f); k++)
            show_weight(bcq_weight_at(f, k));
        for (k = 0; k < bcq_tensor_count(f); k++)
            if (!bcq_tensor_at(f, k)->is_part)
                show_dense(bcq_tensor_at(f, k));
    }
#ifndef BCQ_NO_POSIX
    for (k = 0; o->folder && k < bcq_folder_uncovered_count(o->folder); k++) {
        const char *name = bcq_folder_uncovered_name(o->folder, k);
        printf("uncovered\t");
        show_hex(name, strlen(name));
        printf("\n");
    }
#endif
    printf("end\n");
}

static void command_memory(const char *hex)
{
    unsigned char *bytes = (unsigned char *)malloc(strlen(hex) + 2), *exact;
    size_t size = bytes ? read_hex(hex, bytes) : 0;
    bcq_file *f = NULL;
    bcq_error error;
    int code;
    exact = (unsigned char *)malloc(size + 1); /* one byte off, and no byte more: nothing may ask for alignment */
    if (!bytes || !exact)
        exit(2);
    memcpy(exact + 1, bytes, size);
    free(bytes);
    code = bcq_open_memory(exact + 1, size, BCQ_CHECK_ALL, &f, &error);
    if (code)
        refused(code, &error);
    else
        printf("ok\n");
    if (code && f)
        printf("a file in spite of an error\n");
    bcq_close(f);
    free(exact);
}

static bcq_weight *find(const opened *o, const char *name)
{
    size_t i;
    for (i = 0; i < file_count(o); i++)
        if (bcq_find_weight(file_at(o, i), name))
            return bcq_find_weight(file_at(o, i), name);
    return NULL;
}

/* Rows of all matrices of a stack into a new buffer of exactly their size. */
static int decode(bcq_weight *w, unsigned planes, bcq_dtype dtype, uint64_t first, uint64_t last, unsigned char **out,
                  size_t *size, bcq_error *error)
{
    size_t matrix = (size_t)((last - first) * w->columns) * bcq_dtype_bits(dtype ? dtype : w->dtype) / 8;
    uint64_t e;
    int code = 0;
    *size = matrix * (size_t)w->stack;
    *out = (unsigned char *)malloc(*size ? *size : 1);
    for (e = 0; *out && e < w->stack && !code; e++)
        code = bcq_dequantize(w, e, first, last, planes, dtype, *out + e * matrix, matrix, error);
    return code;
}

static void command_values(const opened *o, char **field)
{
    unsigned char name[512];
    bcq_weight *w;
    bcq_error error;
    unsigned char *out = NULL;
    size_t size = 0;
    int code;
    name[read_hex(field[1], name)] = 0;
    w = find(o, (const char *)name);
    if (!w) {
        printf("no such weight\n");
        return;
    }
    code = decode(w, (unsigned)atoi(field[2]), bcq__dtype_of(bcq__text(field[3])), (uint64_t)atoll(field[4]),
                  (uint64_t)atoll(field[5]), &out, &size, &error);
    if (code)
        refused(code, &error);
    else
        show_hex(out, size);
    if (!code)
        printf("\n");
    free(out);
}

static void command_misuse(const opened *o)
{
    bcq_weight *w = file_count(o) ? bcq_weight_at(file_at(o, 0), 0) : NULL;
    size_t size = w ? (size_t)(w->rows * w->columns * 4) : 0;
    unsigned char *out = (unsigned char *)malloc(size + 1);
    bcq_error error;
    if (!w || !out)
        exit(2);
    printf("%d", bcq_dequantize(w, w->stack, 0, 1, 0, BCQ_F32, out, size, &error));
    printf(" %d", bcq_dequantize(w, UINT64_MAX, 0, 1, 0, BCQ_F32, out, size, &error));
    printf(" %d", bcq_dequantize(w, 0, 1, 0, 0, BCQ_F32, out, size, &error));
    printf(" %d", bcq_dequantize(w, 0, 0, w->rows + 1, 0, BCQ_F32, out, size, &error));
    printf(" %d", bcq_dequantize(w, 0, 0, UINT64_MAX, 0, BCQ_F32, out, size, &error));
    printf(" %d", bcq_dequantize(w, 0, 0, w->rows, 0, BCQ_F32, out, size - 1, &error));
    printf(" %d", bcq_dequantize(w, 0, 0, 1, 0, BCQ_I32, out, size, &error));
    printf(" %d", bcq_dequantize(w, 0, 0, 1, 0, BCQ_F64, out, size, NULL));
    printf(" %d", bcq_dequantize(w, 0, 0, 0, 0, BCQ_NONE, NULL, 0, &error)); /* no rows: nothing is written */
    printf(" %d", bcq_dequantize(w, 0, 0, w->rows, 99, BCQ_F32, out, size, NULL));
    printf(" %d %d", bcq_part(w, "no_such_part") != NULL, bcq_find_tensor(file_at(o, 0), "no such tensor") != NULL);
    printf(" %d %d", bcq_weight_at(file_at(o, 0), SIZE_MAX) != NULL, bcq_tensor_at(file_at(o, 0), SIZE_MAX) != NULL);
    printf(" %s\n", bcq_dtype_name((bcq_dtype)99));
    free(out);
}

/* Everything that a reader does, with the n-th allocation failing; 0, or the first error. */
static int use_all(const char *kind, const char *path)
{
    opened o;
    bcq_error error;
    unsigned char *out;
    size_t i, k, size;
    int code = open_path(&o, kind, path, &error);
    for (i = 0; !code && i < file_count(&o); i++) {
        bcq_file *f = file_at(&o, i);
        for (k = 0; !code && k < bcq_weight_count(f); k++) {
            bcq_weight *w = bcq_weight_at(f, k);
            code = decode(w, 0, BCQ_NONE, 0, w->rows, &out, &size, &error);
            free(out);
        }
    }
    close_path(&o);
    return code;
}

static void command_starve(const char *kind, const char *path)
{
    int n, code = BCQ_ERROR_MEMORY, before = allocations_open;
    for (n = 0; code == BCQ_ERROR_MEMORY && n < 100000; n++) {
        allocations_left = n;
        code = use_all(kind, path);
        allocations_left = -1;
        if (allocations_open != before) {
            printf("allocation %d leaks\n", n);
            return;
        }
    }
    printf("starved\t%d\t%d\n", n - 1, code);
}

static void command_canonical(char *hex)
{
    static const bcq__rules rules = {1, 1, 1};
    bcq__json d;
    bcq__str text;
    unsigned char *bytes = (unsigned char *)malloc(strlen(hex) + 1);
    bcq_error error;
    memset(&d, 0, sizeof d);
    text.bytes = read_hex(hex, bytes);
    text.at = (const char *)bytes;
    bytes[text.bytes] = 0;
    if (bcq__parse_copy(&d, text, BCQ__KIND_LIMITED, rules, &error))
        printf("no JSON\n");
    else
        printf("%d\n", bcq__is_canonical(&d, ""));
    bcq__json_free(&d);
    free(bytes);
}

static void command_packed(char **field)
{
    static unsigned char row[4096];
    unsigned b = (unsigned)atoi(field[1]), count = (unsigned)atoi(field[2]), j;
    read_hex(field[3], row);
    for (j = 0; j < count; j++)
        printf("%s%u", j ? "," : "", bcq__field(row, j, b));
    printf("\n");
}

int main(void)
{
    static char line[1 << 20];
    opened o;
    memset(&o, 0, sizeof o);
    while (fgets(line, sizeof line, stdin)) {
        char *field[8] = {NULL}, *at = line;
        int n = 0;
        line[strcspn(line, "\n")] = 0;
        for (; n < 7; n++) {
            field[n] = at;
            at += strcspn(at, "\t");
            if (!*at)
                break;
            *at++ = 0;
        }
        if ((strcmp(field[0], "file") == 0 || strcmp(field[0], "folder") == 0) && n == 1) {
            command_open(&o, field[0], field[1]);
        } else if (strcmp(field[0], "values") == 0 && n == 5) {
            command_values(&o, field);
        } else if (strcmp(field[0], "memory") == 0 && n == 1) {
            command_memory(field[1]);
        } else if (strcmp(field[0], "misuse") == 0 && n == 0) {
            command_misuse(&o);
        } else if (strcmp(field[0], "starve") == 0 && n == 2) {
            command_starve(field[1], field[2]);
        } else if (strcmp(field[0], "packed") == 0 && n == 3) {
            command_packed(field);
        } else if (strcmp(field[0], "canonical") == 0 && n == 1) {
            command_canonical(field[1]);
        } else if (strcmp(field[0], "round") == 0 && n == 1) {
            uint64_t x = strtoull(field[1], NULL, 16);
            printf("%04x\t%04x\t%08x\n", bcq__round(x, BCQ_F16), bcq__round(x, BCQ_BF16), bcq__round(x, BCQ_F32));
        } else if ((strcmp(field[0], "mul") == 0 || strcmp(field[0], "add") == 0) && n == 2) {
            uint64_t x = strtoull(field[1], NULL, 16), y = strtoull(field[2], NULL, 16);
            x = field[0][0] == 'm' ? bcq__mul(x, y) : bcq__add(x, y);
            printf("%016llx\n", (unsigned long long)x);
        } else {
            printf("unknown command\n");
        }
    }
    close_path(&o);
    if (allocations_open)
        fprintf(stderr, "%d allocations are still open\n", allocations_open);
    return allocations_open != 0;
}
