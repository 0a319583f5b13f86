/* Mutated headers for bcq.h. Nothing may crash, leak, or read a byte that is not its own.

       clang -std=c99 -g -O1 -fsanitize=fuzzer,address,undefined -DBCQ_LIBFUZZER fuzz.c -o fuzz
       ./fuzz -runs=1000000 CORPUS                       with libFuzzer, guided by coverage

       cc -std=c99 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all fuzz.c -o fuzz
       ./fuzz RUNS SECONDS SEED FOLDER FILES...          with any compiler, until the first limit is reached

   The second is deterministic: the same RUNS, SEED and FILES give the same inputs (SECONDS apart). It leaves in FOLDER
   the input that it is working on (current: 8 bytes of size, then the input) and, for other readers, all inputs that it
   found valid and 1 of 1000 others (compare: one after the other in the same form).

   With -DBCQ_COVERAGE -fsanitize-coverage=trace-pc and coverage.c (compiled without the latter) it is guided by coverage
   too, and FOLDER gets what reached new code. With -DBCQ_FAST (and -O3, no address sanitizer) it is ten times faster: an
   input ends at a page that cannot be read, and texts of other kinds are tried with 1 of 16 inputs. */

#define BCQ_IMPLEMENTATION
#include "bcq.h"

#ifndef BCQ_LIBFUZZER
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#endif

#ifdef BCQ_FAST
#define OTHER_TEXTS 16 /* 1 of so many inputs is tried as a text of other kinds too */
#else
#define OTHER_TEXTS 1
#endif
#define LARGEST (1u << 16)  /* bytes of an input */
#define ELEMENTS (1u << 14) /* of a weight that is decoded */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned long met[1000]; /* how often each rule was named; 0: valid */

static void decode_all(bcq_file *f)
{
    static unsigned char out[ELEMENTS * 4];
    size_t i;
    unsigned planes;
    char hex[65];
    for (i = 0; i < bcq_weight_count(f); i++) {
        bcq_weight *w = bcq_weight_at(f, i);
        uint64_t rows = w->columns <= ELEMENTS ? ELEMENTS / w->columns : 0;
        bcq_weight_digest(w, hex);
        for (planes = 0; planes <= 3; planes++)
            bcq_dequantize(w, w->stack - 1, 0, rows < w->rows ? rows : w->rows, planes, BCQ_NONE, out, sizeof out, NULL);
    }
}

/* Texts of other kinds than a header: the index, config.json, the manifest. */
static void parse_all(const uint8_t *data, size_t size)
{
    static const bcq__rules rules = {1, 2, 3};
    bcq__tables tables;
    bcq_error error;
    int kind;
    for (kind = BCQ__KIND_HEADER; kind <= BCQ__KIND_CONFIG; kind++) {
        bcq__json d;
        bcq__str text;
        memset(&d, 0, sizeof d);
        memset(&tables, 0, sizeof tables);
        text.at = (const char *)data;
        text.bytes = size;
        if (!bcq__parse_copy(&d, text, kind, rules, &error) && kind == BCQ__KIND_LIMITED) {
            bcq__is_canonical(&d, "\n");
            if (!bcq__check_version(&d, &error) && !bcq__read_tables(&d, 1, 602, &tables, &error))
                bcq__check_use(&d, &tables, 602, 602, &error);
        }
        BCQ_FREE(tables.schemes);
        BCQ_FREE(tables.segments);
        BCQ_FREE(tables.entries);
        bcq__json_free(&d);
    }
}

/* A copy that ends where nothing may be read: of this size and no other. NULL without memory. */
static uint8_t *exact_copy(const uint8_t *data, size_t size)
{
#ifdef BCQ_FAST
    static uint8_t *end;
    uint8_t *exact;
    if (!end) {
        void *at = NULL;
        if (posix_memalign(&at, LARGEST, 2 * LARGEST) || mprotect((uint8_t *)at + LARGEST, LARGEST, PROT_NONE))
            return NULL;
        end = (uint8_t *)at + LARGEST;
    }
    exact = end - size;
#else
    uint8_t *exact = (uint8_t *)malloc(size ? size : 1);
    if (!exact)
        return NULL;
#endif
    if (size)
        memcpy(exact, data, size);
    return exact;
}

/* One input, with everything that a reader may do with it; the rule that it breaks, 0 where it is valid. */
static int read_all(const uint8_t *data, size_t size)
{
    static unsigned refused;
    uint8_t *exact = exact_copy(data, size);
    bcq_file *f = NULL;
    bcq_error error;
    int code;
    if (!exact)
        return BCQ_ERROR_MEMORY;
    code = bcq_open_memory(exact, size, BCQ_CHECK_ALL, &f, &error);
    if ((code == 0) != (f != NULL) || code < BCQ_ERROR_PLANES || code > 999 || (code && error.code != code))
        abort();
    if (code >= 0)
        met[code]++;
    if (f)
        decode_all(f);
    bcq_close(f);
    if (code > 104 && code < 200 && ++refused % OTHER_TEXTS == 0)
        parse_all(exact + 8, size - 8);
#ifndef BCQ_FAST
    free(exact);
#endif
    return code;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    read_all(data, size);
    return 0;
}

/* ---- mutations of the header */

static uint64_t state = 1;

static uint32_t roll(uint32_t n) /* 0..n-1 (n > 0) */
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(((state >> 32) * n) >> 32);
}

static const char *const pieces[] = {
    "-1", "0", "-0", "1", "8", "9", "16", "17", "255", "2147483647", "2147483648", "4294967296", "9007199254740991",
    "9007199254740992", "281474976710656", "18446744073709551616", "99999999999999999999", "1.5", "1e9", "true", "null",
    "[", "]", "{", "}", ",", ":", "\"", "\\\"", "\\\\", "\\u0000", "\\ud800", "\\ud83d\\ude00", "\\u212a", "\\u0301",
    " ", "\n", "\xff", "\xc3\xa9", "\xed\xa0\x80", "\"F16\"", "\"F32\"", "\"I32\"", "\"U16\"", "\\\"bits\\\":9",
    "\\\"bits\\\":1", "\\\"perm\\\":true", "\\\"group_size\\\":8", "\\\"nonfinite\\\":true", "\\\"scheme\\\":1",
    "\\\"codes\\\":\\\"UE4M3\\\"", "\\\"E8M0\\\"", "\\\"groups\\\":2", "\\\"table\\\":[0,1]", "\\\"super-groups\\\"",
    "\\\"bcq\\\"", "\\\"offset\\\"", "\\\"float-zero\\\"", "\\\"stack\\\"", "\\\"segments\\\"", "\\\"shape\\\":[1,8]",
    "\"shape\":[1]", "\"data_offsets\":[0,0]", "\"dtype\":\"BF16\"", "_bcq_", ".weight", "__metadata__"};

/* at[from..to) becomes `piece`; returns the new size, or the old one where it does not fit. */
static size_t replace(uint8_t *at, size_t size, size_t largest, size_t from, size_t to, const void *piece, size_t bytes)
{
    if (size - (to - from) + bytes > largest)
        return size;
    memmove(at + from + bytes, at + to, size - to);
    memcpy(at + from, piece, bytes);
    return size - (to - from) + bytes;
}

static size_t mutate_header(uint8_t *at, size_t size, size_t largest, const uint8_t *other, size_t other_size)
{
    uint8_t copy[256];
    size_t from = roll((uint32_t)size), to = from, n, k;
    const char *piece = pieces[roll(sizeof pieces / sizeof *pieces)];
    switch (roll(8)) {
    case 0:
        at[from] ^= (uint8_t)(1u << roll(8));
        return size;
    case 1:
        at[from] = (uint8_t)roll(256);
        return size;
    case 2: /* a number becomes another */
    case 3:
        while (from < size && (at[from] < '0' || at[from] > '9'))
            from++;
        for (to = from; to < size && at[to] >= '0' && at[to] <= '9'; to++)
            ;
        piece = pieces[roll(21)];
        return replace(at, size, largest, from, to, piece, strlen(piece));
    case 4: /* something is left out */
        n = 1 + roll(roll(4) ? 8 : 64);
        return replace(at, size, largest, from, n < size - from ? from + n : size, "", 0);
    case 5: /* something is put in */
        return replace(at, size, largest, from, from, piece, strlen(piece));
    case 6: /* something is there twice */
        n = 1 + roll(sizeof copy - 1);
        n = n < size - from ? n : size - from;
        memcpy(copy, at + from, n);
        k = roll((uint32_t)size);
        return replace(at, size, largest, k, k, copy, n);
    default: /* something of another file */
        n = 1 + roll(sizeof copy - 1);
        k = roll((uint32_t)other_size);
        n = n < other_size - k ? n : other_size - k;
        memcpy(copy, other + k, n);
        return replace(at, size, largest, from, roll(2) && size - from > n ? from + n : from, copy, n);
    }
}

/* A mutation of the file in `data`, in place; its header mostly gets the right length and padding again. */
static size_t mutate(uint8_t *data, size_t size, size_t largest, const uint8_t *other, size_t other_size)
{
    static uint8_t header[LARGEST];
    uint64_t length = size >= 8 ? bcq__u64(data) : 0;
    size_t n, rest, i;
    int header_stays = !roll(4);
    if (size < 10 || length < 2 || length > size - 8 || largest < size || other_size < 1) {
        for (i = 0; size && i < 3; i++)
            data[roll((uint32_t)size)] = (uint8_t)roll(256);
        return size;
    }
    n = (size_t)length;
    rest = size - 8 - n;
    largest = largest - 8 - rest < sizeof header ? largest - 8 - rest : sizeof header;
    if (n > largest)
        return size;
    memcpy(header, data + 8, n);
    for (i = header_stays ? 0 : 1 + roll(3); i && n; i--)
        n = mutate_header(header, n, largest, other, other_size);
    while (n % 8 && n < largest && roll(50))
        header[n++] = ' ';
    memmove(data + 8 + n, data + 8 + (size_t)length, rest);
    memcpy(data + 8, header, n);
    for (i = 0; i < 8 && roll(50); i++)
        data[i] = (uint8_t)((uint64_t)n >> 8 * i);
    if (rest && (header_stays || !roll(4)))
        data[8 + n + roll((uint32_t)rest)] = (uint8_t)roll(256);
    if (rest && !roll(40))
        rest -= roll((uint32_t)rest);
    return 8 + n + rest;
}

#ifdef BCQ_LIBFUZZER

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t largest);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t largest, unsigned int seed);

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t largest, unsigned int seed)
{
    state = seed;
    roll(2);
    return roll(3) ? mutate(data, size, largest, data, size) : LLVMFuzzerMutate(data, size, largest);
}

#else

#ifdef BCQ_COVERAGE
#include "coverage.h"
#endif
#define MOST 20000u /* inputs that are kept in memory */

typedef struct kept_input {
    uint8_t *data;
    size_t size;
} kept_input;

static kept_input kept[MOST];
static unsigned kept_count;

static int keep(const uint8_t *data, size_t size)
{
    kept_input *one = kept + kept_count;
    if (kept_count == MOST || size < 10 || size >= LARGEST / 2 || !(one->data = (uint8_t *)malloc(size)))
        return 0;
    memcpy(one->data, data, size);
    one->size = size;
    kept_count++;
    return 1;
}

static void read_seed(const char *path)
{
    static uint8_t data[LARGEST];
    FILE *stream = fopen(path, "rb");
    if (stream) {
        keep(data, fread(data, 1, LARGEST, stream));
        fclose(stream);
    }
}

static FILE *open_in(const char *folder, const char *name, const char *mode)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, mode);
}

#ifdef BCQ_COVERAGE
static void write_input(const char *folder, unsigned number, const uint8_t *data, size_t size)
{
    char name[32];
    FILE *stream;
    snprintf(name, sizeof name, "kept-%08u", number);
    stream = open_in(folder, name, "wb");
    if (stream) {
        fwrite(data, 1, size, stream);
        fclose(stream);
    }
}
#endif

/* The shorter of two, of all or of the latest: short ones are quick. */
static const kept_input *choose(void)
{
    unsigned first = roll(2) && kept_count > 64 ? kept_count - 64 : 0;
    const kept_input *a = kept + first + roll(kept_count - first), *b = kept + first + roll(kept_count - first);
    return a->size < b->size ? a : b;
}

/* LARGEST + 8 bytes that are a file as well: size, then the input. What is in it outlives a crash. */
static uint8_t *shared_with(const char *folder)
{
    FILE *stream = open_in(folder, "current", "w+b");
    void *at = MAP_FAILED;
    if (stream && !fseek(stream, LARGEST + 7, SEEK_SET) && fputc(0, stream) == 0 && !fflush(stream))
        at = mmap(NULL, LARGEST + 8, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(stream), 0);
    if (stream)
        fclose(stream);
    return at == MAP_FAILED ? NULL : (uint8_t *)at;
}

/* The input for other readers, where it is one of those. */
static void hand_on(FILE *stream, unsigned long run, int code, const uint8_t *data, uint64_t size)
{
    if (code && run % 1000)
        return;
    fwrite(&size, 8, 1, stream);
    fwrite(data, 1, (size_t)size, stream);
}

int main(int argc, char **argv)
{
    unsigned long runs = argc > 5 ? strtoul(argv[1], NULL, 10) : 0, i;
    time_t end = time(NULL) + (argc > 5 ? atoi(argv[2]) : 0);
    uint8_t *current = argc > 5 ? shared_with(argv[4]) : NULL, *data = current + 8;
    const struct itimerval longest = {{0, 0}, {60, 0}}; /* of its own time: an input on which it works for ever */
    FILE *compare = argc > 5 ? open_in(argv[4], "compare", "wb") : NULL;
    unsigned rules = 0, seeds, new_ones = 0;
    int k;
    for (k = 5; k < argc; k++)
        read_seed(argv[k]);
    if (!runs || !current || !compare || !kept_count) {
        fprintf(stderr, "usage: fuzz RUNS SECONDS SEED FOLDER FILES...\n");
        return 2;
    }
    state = strtoull(argv[3], NULL, 10);
    seeds = kept_count;
    for (i = 0; i < runs && (i % 256 || time(NULL) < end); i++) {
        const kept_input *one = i < seeds ? kept + i : choose(), *other = choose();
        uint64_t size = one->size;
        int code;
        if (i % 256 == 0)
            setitimer(ITIMER_VIRTUAL, &longest, NULL);
        memcpy(data, one->data, one->size);
        if (i >= seeds) /* the first ones as they are */
            size = mutate(data, one->size, LARGEST, other->data, other->size);
        memcpy(current, &size, 8);
#ifdef BCQ_COVERAGE
        coverage_start();
#endif
        code = read_all(data, (size_t)size);
#ifdef BCQ_COVERAGE
        if (coverage_is_new() && i >= seeds && keep(data, (size_t)size))
            write_input(argv[4], new_ones++, data, (size_t)size);
#endif
        hand_on(compare, i, code, data, size);
    }
    fclose(compare);
    for (k = 1; k < 1000; k++)
        rules += met[k] != 0;
    printf("%lu runs of %u files: %lu valid, %u rules met, %u kept\n", i, seeds, met[0], rules, new_ones);
    while (kept_count)
        free(kept[--kept_count].data);
    munmap(current, LARGEST + 8);
    return 0;
}

#endif
