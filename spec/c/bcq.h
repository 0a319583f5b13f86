/* bcq.h - a reader for BCQ 1.0 checkpoints (../bcq-1.0.md) in one file of C99. Apache-2.0.

   Include it wherever it is needed; in exactly one file, before any other include, write

       #define BCQ_IMPLEMENTATION
       #include "bcq.h"

   Nothing but libc is needed. What it does: opens a file or a folder, checks every rule of the specification, lists
   weights and dense tensors, hands out the parts of a weight as they lie in the file, and decodes rows to the values
   of section 8, bit for bit. What it does not do: write, or multiply fast.

   Errors are numbers: 0 is success, n > 0 means that rule BCQ-Vn is broken (113 for BCQ-V113), n < 0 is one of
   BCQ_ERROR_*. Nothing here aborts, prints, or trusts a length that it has not compared with the file's own.

   Options, defined before the include:
       BCQ_USE_MMAP     map files instead of reading them (a file that shrinks meanwhile then ends the process)
       BCQ_NO_POSIX     standard C only: no folders, no memory map, files up to LONG_MAX bytes
       BCQ_SOFT_FLOAT   binary64 by integer arithmetic; chosen by itself where `double` is not what section 8 asks for
                        (x87, -ffast-math). Needed too by programs that change the rounding mode.
       BCQ_MALLOC(n), BCQ_FREE(p)   instead of malloc and free

   Threads: open files share nothing. One weight may be decoded by several threads at a time once bcq_check was
   called for it (or the file was opened with BCQ_CHECK_ALL). */

#ifndef BCQ_H
#define BCQ_H

#if defined(BCQ_IMPLEMENTATION) && !defined(BCQ_NO_POSIX)
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#ifndef _FILE_OFFSET_BITS
#define _FILE_OFFSET_BITS 64
#endif
#endif

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BCQ_MAX_RANK 16
#define BCQ_MAX_SEGMENTS 16

enum {
    BCQ_OK = 0,
    BCQ_ERROR_IO = -1,       /* cannot be read: missing, no permission, shorter than a moment ago */
    BCQ_ERROR_MEMORY = -2,   /* no memory, or more than this machine can address */
    BCQ_ERROR_ARGUMENT = -3, /* rows out of range, buffer too small, no such type */
    BCQ_ERROR_PLANES = -4    /* section 8.1: float-zero, offset and table have no value of fewer planes */
};

/* Flags. Without them a file's header, descriptor and parts are judged when it is opened (V1xx to V3xx), the content of a
   weight (V4xx) when it is first decoded. */
enum {
    BCQ_CHECK_ALL = 1 /* the content of all weights at once; in folders also all digests and the provenance */
};

typedef struct bcq_error {
    int code;
    char message[240]; /* one line of ASCII, names escaped */
} bcq_error;

typedef enum bcq_dtype {
    BCQ_NONE = 0,
    BCQ_BOOL, BCQ_U8, BCQ_I8, BCQ_F8_E4M3, BCQ_F8_E5M2, BCQ_F8_E8M0, BCQ_F8_E4M3FNUZ, BCQ_F8_E5M2FNUZ,
    BCQ_I16, BCQ_U16, BCQ_F16, BCQ_BF16, BCQ_I32, BCQ_U32, BCQ_F32, BCQ_I64, BCQ_U64, BCQ_F64, BCQ_C64,
    BCQ_F6_E2M3, BCQ_F6_E3M2, BCQ_F4
} bcq_dtype;

typedef enum bcq_encoding { BCQ_AFFINE = 1, BCQ_FLOAT_ZERO, BCQ_OFFSET, BCQ_TABLE, BCQ_BCQ } bcq_encoding;
typedef enum bcq_byte_float { BCQ_E8M0 = 1, BCQ_UE4M3 } bcq_byte_float;

/* A tensor of the file: dense, or a part of a weight. Multi-byte elements are little-endian; `data` is aligned to
   the element where the file as a whole is aligned to 8 bytes. */
typedef struct bcq_tensor {
    const char *name; /* UTF-8, ended by a zero byte; a dense tensor's name may hold any character, U+0000 too */
    size_t name_bytes;
    bcq_dtype dtype;
    unsigned rank;
    uint64_t shape[BCQ_MAX_RANK];
    const unsigned char *data;
    uint64_t bytes;
    uint64_t begin; /* offset in the data of the file */
    int is_part;
} bcq_tensor;

/* Section 5.3: a scale or an offset. Of second order where `rows` is not 0. */
typedef struct bcq_numbers {
    bcq_dtype dtype;      /* of the numbers, or of the second-order scale; BCQ_NONE: there are none, or they are bytes */
    bcq_byte_float bytes; /* type of the numbers or codes that are bytes; 0: they are not */
    unsigned bits;        /* N_s; 0: codes are bytes, or first order */
    uint32_t rows;        /* g2; 0: first order */
    uint32_t groups;      /* h, at least 1 */
    bcq_dtype zero;       /* type of second-order zeros, BCQ_I32: packed; BCQ_NONE: all are `zero_point` */
    unsigned zero_point;
} bcq_numbers;

/* Section 5.3. Keys that a segment has not are BCQ_NONE, NULL or 0. */
typedef struct bcq_segment {
    bcq_encoding encoding;
    unsigned bits;         /* q */
    uint32_t group_size;   /* g; 0: "row", the whole width of the segment */
    bcq_numbers scale;     /* all but bcq */
    bcq_numbers offset;    /* offset */
    const int32_t *table;  /* table: the numbers of the 2^q codes */
    int table_exponent;    /* table: x */
    unsigned zero_bits;    /* affine: width of the stored zero points; 0: all are `zero_point` */
    unsigned zero_point;   /* affine */
    bcq_dtype zero;        /* float-zero */
    bcq_dtype alpha, bias; /* bcq */
    unsigned precisions;   /* bcq: bit p is set where scales for p planes are stored */
} bcq_segment;

/* Section 5.2. */
typedef struct bcq_scheme {
    unsigned segment_count;
    const bcq_segment *segments;
    int aligned64, perm, nonfinite;
    bcq_dtype outliers;        /* type of the outliers; BCQ_NONE: there are none */
    int outliers_replace;      /* mode replace; 0: add */
    unsigned outlier_segments; /* bit k is set where outliers may lie in segment k */
    const char *text;          /* its canonical JSON */
    size_t text_bytes;
} bcq_scheme;

typedef struct bcq_part_ref {
    const char *suffix; /* name without P: "s0_planes", "perm", ... */
    const bcq_tensor *tensor;
} bcq_part_ref;

/* Section 5.1. */
typedef struct bcq_weight {
    const char *name;
    size_t name_bytes;
    unsigned rank;  /* 2, or 3 in a stack */
    uint64_t stack; /* E; 1 without a stack */
    uint64_t rows;  /* out */
    uint64_t columns; /* in */
    bcq_dtype dtype;  /* logical dtype */
    const bcq_scheme *scheme;
    uint32_t widths[BCQ_MAX_SEGMENTS]; /* stored columns of each segment */
    size_t part_count;
    const bcq_part_ref *parts;
    int checked; /* the content was found to obey V401 to V411 */
} bcq_weight;

typedef struct bcq_file bcq_file;
typedef struct bcq_folder bcq_folder;

/* One file. `error` may be NULL everywhere. On failure *out is NULL. */
int bcq_open(const char *path, int flags, bcq_file **out, bcq_error *error);
int bcq_open_memory(const void *data, size_t size, int flags, bcq_file **out, bcq_error *error); /* data is borrowed */
void bcq_close(bcq_file *file);

const char *bcq_version(const bcq_file *file);
size_t bcq_tensor_count(const bcq_file *file);
const bcq_tensor *bcq_tensor_at(const bcq_file *file, size_t i);                 /* in the order of the header */
const bcq_tensor *bcq_find_tensor(const bcq_file *file, const char *name);       /* NULL: no such tensor */
size_t bcq_weight_count(const bcq_file *file);
bcq_weight *bcq_weight_at(bcq_file *file, size_t i);                             /* sorted by name */
bcq_weight *bcq_find_weight(bcq_file *file, const char *name);                   /* NULL: no such weight */

/* The part of a weight by its name without P, for example "s0_planes"; NULL: the scheme does not call for it. */
const bcq_tensor *bcq_part(const bcq_weight *weight, const char *suffix);

/* V401 to V411 for one weight. Called by bcq_dequantize if it was not before. */
int bcq_check(bcq_weight *weight, bcq_error *error);

/* Section 8. Rows row_begin..row_end-1 of matrix `index` of the stack (0 without one), rounded once to `dtype` (F16,
   BF16, F32; BCQ_NONE: the logical dtype, which gives the normative values), row after row in native byte order.
   planes: use and touch only the first p of every segment (section 8.1); 0: all. */
int bcq_dequantize(bcq_weight *weight, uint64_t index, uint64_t row_begin, uint64_t row_end, unsigned planes,
                   bcq_dtype dtype, void *out, size_t out_bytes, bcq_error *error);

/* Values of type F16, BF16 or F32, as bcq_dequantize delivers them, to float, which holds all of them exactly. */
void bcq_to_float(bcq_dtype dtype, const void *values, float *out, size_t count);

/* Section 9.4: 64 hexadecimal digits and a zero byte. */
void bcq_weight_digest(const bcq_weight *weight, char hex[65]);

const char *bcq_dtype_name(bcq_dtype dtype); /* "F16"; "?" for what is none */
unsigned bcq_dtype_bits(bcq_dtype dtype);    /* 0 for what is none */

#ifndef BCQ_NO_POSIX
/* A folder (section 9 and provenance). Without BCQ_CHECK_ALL: shards, index, config, the manifest and sizes of files; with
   it also every digest, the content of all weights and the provenance. */
int bcq_open_folder(const char *path, int flags, bcq_folder **out, bcq_error *error);
void bcq_close_folder(bcq_folder *folder);
size_t bcq_folder_file_count(const bcq_folder *folder);
bcq_file *bcq_folder_file(bcq_folder *folder, size_t i);
const char *bcq_folder_file_name(const bcq_folder *folder, size_t i);
size_t bcq_folder_uncovered_count(const bcq_folder *folder); /* files that no digest covers (section 9.3) */
const char *bcq_folder_uncovered_name(const bcq_folder *folder, size_t i);
bcq_weight *bcq_folder_find_weight(bcq_folder *folder, const char *name);
#endif

#ifdef __cplusplus
}
#endif
#endif /* BCQ_H */

/* ================================================================================================= implementation */
#if defined(BCQ_IMPLEMENTATION) && !defined(BCQ_IMPLEMENTED)
#define BCQ_IMPLEMENTED

#include <float.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef BCQ_NO_POSIX
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef BCQ_USE_MMAP
#include <sys/mman.h>
#endif
#endif

#ifndef BCQ_MALLOC
#define BCQ_MALLOC(n) malloc(n)
#define BCQ_FREE(p) free(p)
#endif

#if defined(__FAST_MATH__) || !defined(FLT_EVAL_METHOD) || FLT_EVAL_METHOD != 0 || DBL_MANT_DIG != 53
#ifndef BCQ_SOFT_FLOAT
#define BCQ_SOFT_FLOAT
#endif
#endif

/* Section 11. */
#define BCQ__MAX_HEADER 25000000u
#define BCQ__MAX_TENSORS 200000u
#define BCQ__MAX_NAME 512u
#define BCQ__MAX_METADATA 1000u
#define BCQ__MAX_WEIGHT_NAME 480u
#define BCQ__MAX_DEPTH 16u
#define BCQ__MAX_CONFIG_DEPTH 100u
#define BCQ__MAX_INTEGER INT64_C(9007199254740991)
#define BCQ__MAX_ELEMENTS (UINT64_C(1) << 48)
#define BCQ__MAX_DIM INT64_C(2147483647)
#define BCQ__MAX_WEIGHT_BITS (UINT64_C(1) << 40)
#define BCQ__MAX_CONFIG 16000000u
#define BCQ__MAX_JSON_FILE 100000000u
#define BCQ__MAX_JSON_ITEMS 2000000u

#define BCQ__TRY(call)                  \
    do {                                \
        int bcq__result = (call);       \
        if (bcq__result)                \
            return bcq__result;         \
    } while (0)

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static int bcq__fail(bcq_error *error, int code, const char *format, ...)
{
    va_list arguments;
    if (error) {
        error->code = code;
        va_start(arguments, format);
        vsnprintf(error->message, sizeof error->message, format, arguments);
        va_end(arguments);
    }
    return code;
}

static int bcq__no_memory(bcq_error *error)
{
    return bcq__fail(error, BCQ_ERROR_MEMORY, "not enough memory");
}

/* Memory for `count` things, zeroed; NULL also where the product does not fit. */
static void *bcq__alloc(uint64_t count, size_t size)
{
    void *memory;
    if (count > (uint64_t)(SIZE_MAX / size) - 1)
        return NULL;
    memory = BCQ_MALLOC((size_t)count * size + 1);
    if (memory)
        memset(memory, 0, (size_t)count * size + 1);
    return memory;
}

static uint64_t bcq__ceil_div(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

/* *product *= factor; 0 where that would exceed `limit`. */
static int bcq__times(uint64_t *product, uint64_t factor, uint64_t limit)
{
    if (factor && *product > limit / factor)
        return 0;
    *product *= factor;
    return *product <= limit;
}

/* ---- strings */

typedef struct bcq__str {
    const char *at;
    size_t bytes;
} bcq__str;

static bcq__str bcq__text(const char *at)
{
    bcq__str s;
    s.at = at;
    s.bytes = strlen(at);
    return s;
}

/* By bytes, which for UTF-8 is by code points. */
static int bcq__compare(bcq__str a, bcq__str b)
{
    size_t common = a.bytes < b.bytes ? a.bytes : b.bytes;
    int order = common ? memcmp(a.at, b.at, common) : 0;
    return order ? order : (a.bytes > b.bytes) - (a.bytes < b.bytes);
}

static int bcq__equal(bcq__str a, bcq__str b)
{
    return a.bytes == b.bytes && (!a.bytes || memcmp(a.at, b.at, a.bytes) == 0);
}

static int bcq__contains(bcq__str s, const char *piece)
{
    size_t i, n = strlen(piece);
    for (i = 0; i + n <= s.bytes; i++)
        if (memcmp(s.at + i, piece, n) == 0)
            return 1;
    return 0;
}

/* A failure at a name: at most 60 characters of it are shown, everything but printable ASCII escaped. */
static int bcq__bad(bcq_error *error, int code, bcq__str name, const char *what)
{
    static const char digits[] = "0123456789abcdef";
    char shown[72];
    size_t i, n = 0;
    for (i = 0; i < name.bytes && n < 60; i++) {
        unsigned char c = (unsigned char)name.at[i];
        if (c >= 0x20 && c < 0x7f && c != '\\' && c != '\'') {
            shown[n++] = (char)c;
        } else {
            shown[n++] = '\\';
            shown[n++] = 'x';
            shown[n++] = digits[c >> 4];
            shown[n++] = digits[c & 15];
        }
    }
    shown[n] = 0;
    return bcq__fail(error, code, "'%s%s': %s", shown, i < name.bytes ? "..." : "", what);
}

/* Sorts positions; merge sort, so that no input is slow and equal ones keep their order. */
typedef int (*bcq__order)(const void *context, uint32_t a, uint32_t b);

static void bcq__sort(uint32_t *items, uint32_t *scratch, size_t n, bcq__order order, const void *context)
{
    size_t width, left, i;
    for (width = 1; width < n; width *= 2) {
        for (left = 0; left < n; left += 2 * width) {
            size_t middle = n - left > width ? left + width : n;
            size_t right = n - middle > width ? middle + width : n;
            size_t a = left, b = middle;
            for (i = left; i < right; i++)
                scratch[i] = a < middle && (b >= right || order(context, items[a], items[b]) <= 0) ? items[a++]
                                                                                                   : items[b++];
        }
        memcpy(items, scratch, n * sizeof *items);
        if (width > n / 2)
            break;
    }
}

/* The positions 0..n-1 in order; NULL without memory. */
static uint32_t *bcq__sorted(uint64_t n, bcq__order order, const void *context)
{
    uint32_t *items = (uint32_t *)bcq__alloc(n, 2 * sizeof(uint32_t));
    uint64_t i;
    if (!items)
        return NULL;
    for (i = 0; i < n; i++)
        items[i] = (uint32_t)i;
    bcq__sort(items, items + n, (size_t)n, order, context);
    return items;
}

/* ---- bytes */

static uint32_t bcq__u16(const unsigned char *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8;
}

static uint32_t bcq__u32(const unsigned char *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t bcq__u64(const unsigned char *at)
{
    return bcq__u32(at) | (uint64_t)bcq__u32(at + 4) << 32;
}

/* ---- SHA-256 (FIPS 180-4) */

typedef struct bcq__sha {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
} bcq__sha;

static const uint32_t bcq__sha_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t bcq__rotate(uint32_t x, unsigned n)
{
    return x >> n | x << (32 - n);
}

static void bcq__sha_start(bcq__sha *h)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(h->state, start, sizeof start);
    h->bytes = 0;
}

static void bcq__sha_block(uint32_t *state, const unsigned char *block)
{
    uint32_t w[64], s[8], a, b;
    int i;
    for (i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
               block[4 * i + 3];
    for (; i < 64; i++) {
        a = bcq__rotate(w[i - 15], 7) ^ bcq__rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        b = bcq__rotate(w[i - 2], 17) ^ bcq__rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + a + w[i - 7] + b;
    }
    memcpy(s, state, sizeof s);
    for (i = 0; i < 64; i++) {
        a = s[7] + (bcq__rotate(s[4], 6) ^ bcq__rotate(s[4], 11) ^ bcq__rotate(s[4], 25)) +
            ((s[4] & s[5]) ^ (~s[4] & s[6])) + bcq__sha_k[i] + w[i];
        b = (bcq__rotate(s[0], 2) ^ bcq__rotate(s[0], 13) ^ bcq__rotate(s[0], 22)) +
            ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        s[7] = s[6], s[6] = s[5], s[5] = s[4], s[4] = s[3] + a;
        s[3] = s[2], s[2] = s[1], s[1] = s[0], s[0] = a + b;
    }
    for (i = 0; i < 8; i++)
        state[i] += s[i];
}

static void bcq__sha_add(bcq__sha *h, const void *data, uint64_t size)
{
    const unsigned char *at = (const unsigned char *)data;
    while (size) {
        size_t used = (size_t)(h->bytes % 64), n = 64 - used;
        if (!used && size >= 64) {
            bcq__sha_block(h->state, at);
            n = 64;
        } else {
            if (n > size)
                n = (size_t)size;
            memcpy(h->block + used, at, n);
            if (used + n == 64)
                bcq__sha_block(h->state, h->block);
        }
        h->bytes += n;
        at += n;
        size -= n;
    }
}

static void bcq__sha_hex(bcq__sha *h, char hex[65])
{
    static const char digits[] = "0123456789abcdef";
    static const unsigned char padding[64] = {0x80};
    unsigned char length[8];
    uint64_t bits = h->bytes * 8;
    int i;
    for (i = 0; i < 8; i++)
        length[i] = (unsigned char)(bits >> (56 - 8 * i));
    bcq__sha_add(h, padding, (119 - h->bytes % 64) % 64 + 1);
    bcq__sha_add(h, length, 8);
    for (i = 0; i < 64; i++)
        hex[i] = digits[h->state[i / 8] >> (28 - 4 * (i % 8)) & 15];
    hex[64] = 0;
}

/* ---- JSON (section 4)

   A text becomes an array of nodes in the order of the text; the members of an object are key, value, key, value. No
   recursion: containers that are open are kept in a small array. Strings are decoded in place. */

enum { BCQ__OBJECT = 1, BCQ__ARRAY, BCQ__STRING, BCQ__INTEGER, BCQ__NUMBER, BCQ__TRUE, BCQ__FALSE, BCQ__NULL };

/* What is allowed: integers without -0 (section 3), integers of section 4, any number, what config.json has. */
enum { BCQ__KIND_HEADER, BCQ__KIND_LIMITED, BCQ__KIND_NUMBERS, BCQ__KIND_CONFIG };

typedef struct bcq__node {
    uint32_t off;        /* first byte: of a string's content, of anything else itself */
    uint32_t len;        /* bytes: of a string after decoding, of anything else in the text */
    uint32_t next;       /* the node after this one and all that is in it */
    unsigned type : 4;
    unsigned count : 28; /* members or elements */
} bcq__node;

typedef struct bcq__json {
    char *text;         /* owned; strings in it are decoded and ended by a zero byte */
    const char *source; /* the text as it was, where it is needed; borrowed */
    size_t size;
    bcq__node *nodes; /* owned; the root is node 0 */
    uint32_t used;
    size_t inner_spaces; /* white space between tokens */
    size_t tail;         /* bytes after the closing brace */
    int lone_surrogate;
} bcq__json;

/* The rules that are broken by bad text, by bad form, by duplicate keys. */
typedef struct bcq__rules {
    int text, form, duplicate;
} bcq__rules;

static void bcq__json_free(bcq__json *d)
{
    BCQ_FREE(d->text);
    BCQ_FREE(d->nodes);
    memset(d, 0, sizeof *d);
}

/* 0 where the text is not UTF-8: overlong forms, surrogates and numbers above U+10FFFF are not. */
static int bcq__is_utf8(const char *text, size_t size)
{
    const unsigned char *t = (const unsigned char *)text;
    size_t i = 0, n;
    while (i < size) {
        unsigned char c = t[i], low = 0x80, high = 0xbf;
        if (c < 0x80) {
            i++;
            continue;
        }
        if (c >= 0xc2 && c <= 0xdf) {
            n = 1;
        } else if (c >= 0xe0 && c <= 0xef) {
            n = 2;
            low = c == 0xe0 ? 0xa0 : 0x80;
            high = c == 0xed ? 0x9f : 0xbf;
        } else if (c >= 0xf0 && c <= 0xf4) {
            n = 3;
            low = c == 0xf0 ? 0x90 : 0x80;
            high = c == 0xf4 ? 0x8f : 0xbf;
        } else {
            return 0;
        }
        if (size - i <= n || t[i + 1] < low || t[i + 1] > high)
            return 0;
        for (i += 2, n--; n; i++, n--)
            if ((t[i] & 0xc0) != 0x80)
                return 0;
    }
    return 1;
}

static size_t bcq__put_utf8(char *out, uint32_t c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 63));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xe0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 63));
        out[2] = (char)(0x80 | (c & 63));
        return 3;
    }
    out[0] = (char)(0xf0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 63));
    out[2] = (char)(0x80 | (c >> 6 & 63));
    out[3] = (char)(0x80 | (c & 63));
    return 4;
}

/* The next code point of valid UTF-8; a lone surrogate, written as UTF-8 would, is one too. */
static uint32_t bcq__get_utf8(const char *text, size_t *i)
{
    const unsigned char *t = (const unsigned char *)text + *i;
    if (t[0] < 0x80) {
        *i += 1;
        return t[0];
    }
    if (t[0] < 0xe0) {
        *i += 2;
        return (t[0] & 31u) << 6 | (t[1] & 63u);
    }
    if (t[0] < 0xf0) {
        *i += 3;
        return (t[0] & 15u) << 12 | (t[1] & 63u) << 6 | (t[2] & 63u);
    }
    *i += 4;
    return (t[0] & 7u) << 18 | (t[1] & 63u) << 12 | (t[2] & 63u) << 6 | (t[3] & 63u);
}

/* Four hexadecimal digits at i; 0x110000 where there are none. */
static uint32_t bcq__hex4(const bcq__json *d, size_t i)
{
    uint32_t value = 0;
    int k;
    if (d->size - i < 4)
        return 0x110000;
    for (k = 0; k < 4; k++) {
        char c = d->text[i + (size_t)k];
        if (c >= '0' && c <= '9')
            value = value << 4 | (uint32_t)(c - '0');
        else if (c >= 'a' && c <= 'f')
            value = value << 4 | (uint32_t)(c - 'a' + 10);
        else if (c >= 'A' && c <= 'F')
            value = value << 4 | (uint32_t)(c - 'A' + 10);
        else
            return 0x110000;
    }
    return value;
}

/* The escape after the backslash at *i - 1; 0x110000 where it is none. Pairs of surrogates make one character. */
static uint32_t bcq__escape(bcq__json *d, size_t *i)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *found;
    uint32_t c, low;
    if (*i >= d->size)
        return 0x110000;
    if (d->text[*i] != 'u') {
        found = d->text[*i] ? strchr(from, d->text[*i]) : NULL;
        *i += 1;
        return found ? (uint32_t)to[found - from] : 0x110000;
    }
    c = bcq__hex4(d, *i + 1);
    *i += 5;
    if (c >= 0xd800 && c < 0xdc00 && *i < d->size && d->size - *i >= 6 && d->text[*i] == '\\' &&
        d->text[*i + 1] == 'u') {
        low = bcq__hex4(d, *i + 2);
        if (low >= 0xdc00 && low < 0xe000) {
            *i += 6;
            return 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
        }
    }
    if (c >= 0xd800 && c < 0xe000)
        d->lone_surrogate = 1;
    return c;
}

/* The string whose first byte is at *i, decoded where it stands; 0 where it is none. Decoding never lengthens. */
static int bcq__scan_string(bcq__json *d, size_t *i, bcq__node *node)
{
    size_t out = *i;
    node->off = (uint32_t)*i;
    while (*i < d->size) {
        unsigned char c = (unsigned char)d->text[*i];
        if (c == '"') {
            node->len = (uint32_t)(out - node->off);
            d->text[out] = 0;
            *i += 1;
            return 1;
        }
        if (c < 0x20)
            return 0;
        *i += 1;
        if (c == '\\') {
            uint32_t escaped = bcq__escape(d, i);
            if (escaped == 0x110000)
                return 0;
            out += bcq__put_utf8(d->text + out, escaped);
        } else {
            d->text[out++] = (char)c;
        }
    }
    return 0;
}

static int bcq__is_digit(const bcq__json *d, size_t i)
{
    return i < d->size && d->text[i] >= '0' && d->text[i] <= '9';
}

/* The number at *i: its type, or 0 where it is none. */
static unsigned bcq__scan_number(const bcq__json *d, size_t *i)
{
    size_t at = *i;
    unsigned type = BCQ__INTEGER;
    if (d->text[at] == '-')
        at++;
    if (!bcq__is_digit(d, at))
        return 0;
    if (d->text[at] == '0')
        at++;
    else
        while (bcq__is_digit(d, at))
            at++;
    if (at < d->size && d->text[at] == '.' && bcq__is_digit(d, at + 1)) {
        type = BCQ__NUMBER;
        for (at++; bcq__is_digit(d, at); at++)
            ;
    }
    if (at < d->size && (d->text[at] == 'e' || d->text[at] == 'E')) {
        size_t digit = at + 1;
        if (digit < d->size && (d->text[digit] == '+' || d->text[digit] == '-'))
            digit++;
        if (bcq__is_digit(d, digit)) {
            type = BCQ__NUMBER;
            for (at = digit; bcq__is_digit(d, at); at++)
                ;
        }
    }
    *i = at;
    return type;
}

static int bcq__word(const bcq__json *d, size_t *i, const char *word)
{
    size_t n = strlen(word);
    if (d->size - *i < n || memcmp(d->text + *i, word, n) != 0)
        return 0;
    *i += n;
    return 1;
}

/* An integer of section 4: -(2^53-1)..2^53-1. */
static int bcq__integer(const bcq__json *d, uint32_t node, int64_t *value)
{
    const bcq__node *n = d->nodes + node;
    const char *at = d->text + n->off;
    uint32_t digits = n->len;
    int64_t v = 0;
    int negative = 0;
    if (n->type != BCQ__INTEGER)
        return 0;
    if (*at == '-') {
        negative = 1;
        at++;
        digits--;
    }
    if (digits > 16)
        return 0;
    while (digits--)
        v = v * 10 + (*at++ - '0');
    *value = negative ? -v : v;
    return v <= BCQ__MAX_INTEGER;
}

/* A value that is neither object nor array; 0 where there is none. */
static int bcq__scan_scalar(bcq__json *d, size_t *i, uint32_t index, int kind)
{
    bcq__node *node = d->nodes + index;
    size_t start = *i;
    int64_t value;
    char c = d->text[*i];
    node->next = index + 1;
    if (c == '"') {
        *i += 1;
        node->type = BCQ__STRING;
        return bcq__scan_string(d, i, node);
    }
    node->off = (uint32_t)start;
    if (c == 't')
        node->type = bcq__word(d, i, "true") ? BCQ__TRUE : 0;
    else if (c == 'f')
        node->type = bcq__word(d, i, "false") ? BCQ__FALSE : 0;
    else if (c == 'n')
        node->type = bcq__word(d, i, "null") ? BCQ__NULL : 0;
    else if (kind == BCQ__KIND_CONFIG &&
             (bcq__word(d, i, "NaN") || bcq__word(d, i, "Infinity") || bcq__word(d, i, "-Infinity")))
        node->type = BCQ__NUMBER;
    else
        node->type = bcq__scan_number(d, i) & 15u;
    node->len = (uint32_t)(*i - start);
    if (node->type == BCQ__NUMBER && (kind == BCQ__KIND_HEADER || kind == BCQ__KIND_LIMITED))
        return 0;
    if (node->type == BCQ__INTEGER && (kind == BCQ__KIND_HEADER || kind == BCQ__KIND_LIMITED) &&
        !bcq__integer(d, index, &value))
        return 0;
    if (kind == BCQ__KIND_HEADER && node->type == BCQ__INTEGER && c == '-' && d->text[start + 1] == '0')
        return 0; /* -0 */
    return node->type != 0;
}

static int bcq__is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Nodes that a text can need: one, and one for each of these bytes. */
static size_t bcq__count_nodes(const bcq__json *d)
{
    size_t i, count = 1;
    for (i = 0; i < d->size; i++) {
        char c = d->text[i];
        count += c == ',' || c == ':' || c == '{' || c == '[';
    }
    return count;
}

/* The text as nodes; 0 where it is not one JSON object of the kind. `capacity` is what bcq__count_nodes said. */
static int bcq__scan(bcq__json *d, int kind, size_t capacity)
{
    enum { VALUE, ITEM, KEY, MEMBER, COLON, NEXT } want = VALUE;
    uint32_t open[BCQ__MAX_CONFIG_DEPTH];
    unsigned depth = 0, deepest = kind == BCQ__KIND_CONFIG ? BCQ__MAX_CONFIG_DEPTH : BCQ__MAX_DEPTH;
    size_t i = 0, before;
    for (;;) {
        char c;
        bcq__node *top = depth ? d->nodes + open[depth - 1] : NULL;
        for (before = i; i < d->size && bcq__is_space(d->text[i]); i++)
            ;
        d->inner_spaces += i - before;
        if (i >= d->size)
            return 0;
        c = d->text[i];
        if (!top && c != '{')
            return 0;
        if (want == COLON) {
            if (c != ':')
                return 0;
            i++;
            want = VALUE;
        } else if (want == NEXT && c == ',') {
            i++;
            want = top->type == BCQ__OBJECT ? KEY : VALUE;
        } else if (top && ((c == '}' && top->type == BCQ__OBJECT && (want == NEXT || want == MEMBER)) ||
                           (c == ']' && top->type == BCQ__ARRAY && (want == NEXT || want == ITEM)))) {
            i++;
            top->len = (uint32_t)(i - top->off);
            top->next = d->used;
            want = NEXT;
            if (!--depth)
                break;
        } else if (want == NEXT || d->used >= capacity) {
            return 0;
        } else {
            uint32_t index = d->used++;
            if (top && (want == KEY || want == MEMBER || top->type == BCQ__ARRAY))
                top->count++;
            if (want == KEY || want == MEMBER) {
                if (c != '"' || !bcq__scan_scalar(d, &i, index, kind))
                    return 0;
                want = COLON;
            } else if (c == '{' || c == '[') {
                if (depth >= deepest)
                    return 0;
                d->nodes[index].type = c == '{' ? BCQ__OBJECT : BCQ__ARRAY;
                d->nodes[index].off = (uint32_t)i++;
                open[depth++] = index;
                want = c == '{' ? MEMBER : ITEM;
            } else {
                if (!bcq__scan_scalar(d, &i, index, kind))
                    return 0;
                want = NEXT;
            }
        }
    }
    d->tail = d->size - i;
    for (; i < d->size; i++)
        if (kind == BCQ__KIND_HEADER ? d->text[i] != ' ' : !bcq__is_space(d->text[i]))
            return 0;
    return 1;
}

static bcq__str bcq__string(const bcq__json *d, uint32_t node)
{
    bcq__str s;
    s.at = d->text + d->nodes[node].off;
    s.bytes = d->nodes[node].len;
    return s;
}

static int bcq__by_string(const void *context, uint32_t a, uint32_t b)
{
    const bcq__json *d = (const bcq__json *)context;
    return bcq__compare(bcq__string(d, a), bcq__string(d, b));
}

/* The keys of an object, or the elements of an array, as nodes; room for as many more behind them. */
static uint32_t *bcq__members(const bcq__json *d, uint32_t container)
{
    const bcq__node *n = d->nodes + container;
    uint32_t i, node = container + 1, *list = (uint32_t *)bcq__alloc(n->count, 2 * sizeof *list);
    if (!list)
        return NULL;
    for (i = 0; i < n->count; i++) {
        list[i] = node;
        node = n->type == BCQ__OBJECT ? d->nodes[node + 1].next : d->nodes[node].next;
    }
    return list;
}

static uint32_t *bcq__sorted_keys(const bcq__json *d, uint32_t object)
{
    uint32_t *keys = bcq__members(d, object);
    if (keys)
        bcq__sort(keys, keys + d->nodes[object].count, d->nodes[object].count, bcq__by_string, d);
    return keys;
}

/* 1: an object has a key twice, 0: none has, BCQ_ERROR_MEMORY. */
static int bcq__has_duplicates(const bcq__json *d)
{
    uint32_t object, i, j, *keys;
    int found = 0;
    for (object = 0; object < d->used && !found; object++) {
        uint32_t count = d->nodes[object].count;
        if (d->nodes[object].type != BCQ__OBJECT || count < 2)
            continue;
        if (count <= 4) {
            uint32_t few[4], node = object + 1;
            for (i = 0; i < count; i++, node = d->nodes[node + 1].next)
                few[i] = node;
            for (i = 1; i < count; i++)
                for (j = 0; j < i; j++)
                    found |= bcq__by_string(d, few[i], few[j]) == 0;
            continue;
        }
        keys = bcq__sorted_keys(d, object);
        if (!keys)
            return BCQ_ERROR_MEMORY;
        for (i = 1; i < count; i++)
            found |= bcq__by_string(d, keys[i - 1], keys[i]) == 0;
        BCQ_FREE(keys);
    }
    return found;
}

/* Section 4: d->text of d->size bytes becomes nodes. */
static int bcq__parse(bcq__json *d, int kind, bcq__rules rules, bcq_error *error)
{
    size_t capacity;
    int duplicates;
    if (!bcq__is_utf8(d->text, d->size))
        return bcq__fail(error, rules.text, "JSON that is not UTF-8");
    capacity = bcq__count_nodes(d);
    d->nodes = (bcq__node *)bcq__alloc(capacity, sizeof *d->nodes);
    if (!d->nodes)
        return bcq__no_memory(error);
    if (!bcq__scan(d, kind, capacity))
        return bcq__fail(error, rules.form, "not one JSON object within the limits of section 4");
    if (d->lone_surrogate)
        return bcq__fail(error, rules.text, "a string holds a lone surrogate");
    duplicates = bcq__has_duplicates(d);
    if (duplicates < 0)
        return bcq__no_memory(error);
    return duplicates ? bcq__fail(error, rules.duplicate, "an object has the same key twice") : 0;
}

/* Parses a copy, so that `source` stays as it is. */
static int bcq__parse_copy(bcq__json *d, bcq__str source, int kind, bcq__rules rules, bcq_error *error)
{
    d->text = (char *)bcq__alloc(source.bytes, 1);
    if (!d->text)
        return bcq__no_memory(error);
    if (source.bytes)
        memcpy(d->text, source.at, source.bytes);
    d->size = source.bytes;
    d->source = source.at;
    return bcq__parse(d, kind, rules, error);
}

/* A string in canonical form against the source, from its first byte to the closing quote. */
static int bcq__string_is_canonical(const bcq__json *d, uint32_t node)
{
    static const char digits[] = "0123456789abcdef", from[] = "\"\\\b\t\n\f\r", to[] = "\"\\btnfr";
    const char *source = d->source + d->nodes[node].off;
    bcq__str s = bcq__string(d, node);
    size_t i = 0;
    while (i < s.bytes) {
        uint32_t c = bcq__get_utf8(s.at, &i), units[2], k, count = 1;
        const char *found = c && c < 0x80 ? strchr(from, (int)c) : NULL;
        if (found) {
            if (*source++ != '\\' || *source++ != to[found - from])
                return 0;
            continue;
        }
        if (c >= 0x20 && c <= 0x7e) {
            if (*source++ != (char)c)
                return 0;
            continue;
        }
        units[0] = c;
        if (c > 0xffff) {
            units[0] = 0xd800 + ((c - 0x10000) >> 10);
            units[1] = 0xdc00 + ((c - 0x10000) & 0x3ff);
            count = 2;
        }
        for (k = 0; k < count; k++) {
            int shift;
            if (*source++ != '\\' || *source++ != 'u')
                return 0;
            for (shift = 12; shift >= 0; shift -= 4)
                if (*source++ != digits[units[k] >> shift & 15])
                    return 0;
        }
    }
    return *source == '"';
}

/* Section 4, canonical JSON, followed by `tail` (nothing, or one line feed). */
static int bcq__is_canonical(const bcq__json *d, const char *tail)
{
    uint32_t node, i, key, last;
    if (d->inner_spaces || d->tail != strlen(tail) || memcmp(d->source + d->size - d->tail, tail, d->tail) != 0)
        return 0;
    for (node = 0; node < d->used; node++) {
        const bcq__node *n = d->nodes + node;
        if (n->type == BCQ__STRING && !bcq__string_is_canonical(d, node))
            return 0;
        if (n->type == BCQ__INTEGER && n->len == 2 && memcmp(d->source + n->off, "-0", 2) == 0)
            return 0;
        if (n->type != BCQ__OBJECT)
            continue;
        for (i = 0, key = node + 1, last = 0; i < n->count; i++, last = key, key = d->nodes[key + 1].next)
            if (last && bcq__by_string(d, last, key) >= 0)
                return 0;
    }
    return 1;
}

/* ---- looking into JSON; node 0 is the root and stands for "not there" as a value */

static int bcq__type(const bcq__json *d, uint32_t node)
{
    return node ? (int)d->nodes[node].type : 0;
}

static int bcq__is(const bcq__json *d, uint32_t node, const char *text)
{
    return bcq__type(d, node) == BCQ__STRING && bcq__equal(bcq__string(d, node), bcq__text(text));
}

/* The value of a key, or 0. */
static uint32_t bcq__get(const bcq__json *d, uint32_t object, const char *key)
{
    bcq__str wanted = bcq__text(key);
    uint32_t i, node = object + 1;
    if (d->nodes[object].type != BCQ__OBJECT)
        return 0;
    for (i = 0; i < d->nodes[object].count; i++, node = d->nodes[node + 1].next)
        if (bcq__equal(bcq__string(d, node), wanted))
            return node + 1;
    return 0;
}

/* An object with all of the first `required` names as keys and no key that is none of the names: their values (0:
   not there) go to `values`. Names are ended by NULL. */
static int bcq__fields(const bcq__json *d, uint32_t object, const char *const *names, unsigned required,
                       uint32_t *values)
{
    uint32_t i, k, node = object + 1;
    if (d->nodes[object].type != BCQ__OBJECT)
        return 0;
    for (k = 0; names[k]; k++)
        values[k] = 0;
    for (i = 0; i < d->nodes[object].count; i++, node = d->nodes[node + 1].next) {
        for (k = 0; names[k] && !bcq__equal(bcq__string(d, node), bcq__text(names[k])); k++)
            ;
        if (!names[k])
            return 0;
        values[k] = node + 1;
    }
    for (k = 0; k < required; k++)
        if (!values[k])
            return 0;
    return 1;
}

/* An integer in low..high; true and false are none. */
static int bcq__in_range(const bcq__json *d, uint32_t node, int64_t low, int64_t high, int64_t *value)
{
    return node && bcq__integer(d, node, value) && *value >= low && *value <= high;
}

/* A sorted array of integers in low..high (at most 31), each once, at least one, as a set of bits. */
static int bcq__rising(const bcq__json *d, uint32_t array, int64_t low, int64_t high, unsigned *set)
{
    uint32_t i, node = array + 1;
    int64_t value, last = low - 1;
    *set = 0;
    if (bcq__type(d, array) != BCQ__ARRAY || !d->nodes[array].count)
        return 0;
    for (i = 0; i < d->nodes[array].count; i++, node = d->nodes[node].next) {
        if (!bcq__in_range(d, node, low, high, &value) || value <= last)
            return 0;
        last = value;
        *set |= 1u << value;
    }
    return 1;
}

/* ---- element types (section 3) */

static const struct {
    const char *name;
    unsigned bits;
} bcq__types[] = {
    {"?", 0}, {"BOOL", 8}, {"U8", 8}, {"I8", 8}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16}, {"BF16", 16}, {"I32", 32}, {"U32", 32}, {"F32", 32},
    {"I64", 64}, {"U64", 64}, {"F64", 64}, {"C64", 64}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4}};

const char *bcq_dtype_name(bcq_dtype dtype)
{
    return bcq__types[(unsigned)dtype <= BCQ_F4 ? (unsigned)dtype : 0].name;
}

unsigned bcq_dtype_bits(bcq_dtype dtype)
{
    return bcq__types[(unsigned)dtype <= BCQ_F4 ? (unsigned)dtype : 0].bits;
}

static bcq_dtype bcq__dtype_of(bcq__str name)
{
    unsigned i;
    for (i = 1; i <= BCQ_F4; i++)
        if (bcq__equal(name, bcq__text(bcq__types[i].name)))
            return (bcq_dtype)i;
    return BCQ_NONE;
}

static int bcq__is_float(bcq_dtype dtype)
{
    return dtype == BCQ_F16 || dtype == BCQ_BF16 || dtype == BCQ_F32;
}

/* A string that is F16, BF16 or F32. */
static int bcq__float_type(const bcq__json *d, uint32_t node, bcq_dtype *dtype)
{
    *dtype = bcq__type(d, node) == BCQ__STRING ? bcq__dtype_of(bcq__string(d, node)) : BCQ_NONE;
    return bcq__is_float(*dtype);
}

/* ---- container (section 3) */

struct bcq_file {
    bcq__json header, descriptor;
    uint32_t metadata; /* its node in the header; 0: not there */
    uint64_t data_bytes;
    const unsigned char *data;
    void *owned;  /* what `data` is in: memory, or a map of `mapped` bytes */
    size_t mapped;
    uint32_t tensor_count, *by_name;
    bcq_tensor *tensors;
    uint32_t scheme_count, weight_count;
    bcq_scheme *schemes;
    bcq_segment *segments;
    bcq_weight *weights;
    bcq_part_ref *parts;
    const char *version;
    unsigned features;
};

static bcq__str bcq__tensor_name(const bcq_tensor *t)
{
    bcq__str s;
    s.at = t->name;
    s.bytes = t->name_bytes;
    return s;
}

static int bcq__by_name(const void *context, uint32_t a, uint32_t b)
{
    const bcq_tensor *t = (const bcq_tensor *)context;
    return bcq__compare(bcq__tensor_name(t + a), bcq__tensor_name(t + b));
}

static int bcq__by_offset(const void *context, uint32_t a, uint32_t b)
{
    const bcq_tensor *t = (const bcq_tensor *)context;
    if (t[a].begin != t[b].begin)
        return t[a].begin < t[b].begin ? -1 : 1;
    return (t[a].bytes > t[b].bytes) - (t[a].bytes < t[b].bytes);
}

/* V109 to V112: one entry of the header. */
static int bcq__read_entry(const bcq__json *d, uint32_t entry, bcq_tensor *t, bcq_error *error)
{
    static const char *const names[] = {"dtype", "shape", "data_offsets", NULL};
    bcq__str name = bcq__tensor_name(t);
    uint32_t values[3], node, i;
    int64_t number = 0, offsets[2] = {0, 0};
    uint64_t product = 1, bits;
    int good;
    if (!bcq__fields(d, entry, names, 3, values))
        return bcq__bad(error, 109, name, "not exactly the keys dtype, shape, data_offsets");
    good = bcq__type(d, values[0]) == BCQ__STRING && bcq__type(d, values[1]) == BCQ__ARRAY &&
           bcq__type(d, values[2]) == BCQ__ARRAY && d->nodes[values[1]].count <= BCQ_MAX_RANK &&
           d->nodes[values[2]].count == 2;
    if (good) {
        t->rank = d->nodes[values[1]].count;
        for (i = 0, node = values[1] + 1; i < t->rank; i++, node = d->nodes[node].next) {
            good = good && bcq__in_range(d, node, 0, BCQ__MAX_INTEGER, &number);
            t->shape[i] = (uint64_t)number;
        }
        for (i = 0, node = values[2] + 1; i < 2; i++, node = d->nodes[node].next)
            good = good && bcq__in_range(d, node, 0, BCQ__MAX_INTEGER, offsets + i);
    }
    if (!good || offsets[0] > offsets[1])
        return bcq__bad(error, 109, name, "malformed dtype, shape or data_offsets");
    t->begin = (uint64_t)offsets[0];
    t->bytes = (uint64_t)(offsets[1] - offsets[0]);
    t->dtype = bcq__dtype_of(bcq__string(d, values[0]));
    if (!t->dtype)
        return bcq__bad(error, 110, name, "unknown dtype");
    for (i = 0; i < t->rank; i++)
        if (t->shape[i] && !bcq__times(&product, t->shape[i], BCQ__MAX_ELEMENTS - 1))
            return bcq__bad(error, 111, name, "too many elements");
    for (i = 0; i < t->rank; i++)
        product = t->shape[i] ? product : 0;
    bits = product * bcq_dtype_bits(t->dtype);
    if (bits % 8 || t->bytes != bits / 8)
        return bcq__bad(error, 112, name, "the size is not that of the shape");
    return 0;
}

/* V113 to V116: tensor after tensor, from 0 to the end of the data. */
static int bcq__check_offsets(const bcq_file *f, bcq_error *error)
{
    uint32_t i, *order = bcq__sorted(f->tensor_count, bcq__by_offset, f->tensors);
    uint64_t position = 0;
    int code = 0;
    if (!order)
        return bcq__no_memory(error);
    for (i = 0; i < f->tensor_count && !code; i++) {
        const bcq_tensor *t = f->tensors + order[i];
        if (t->begin != position)
            code = t->begin < position ? bcq__bad(error, 113, bcq__tensor_name(t), "overlaps another tensor")
                                       : bcq__bad(error, 114, bcq__tensor_name(t), "a hole before it");
        position = t->begin + t->bytes;
    }
    BCQ_FREE(order);
    BCQ__TRY(code);
    if (f->data_bytes > position)
        return bcq__fail(error, 115, "data goes on after the last tensor");
    return f->data_bytes < position ? bcq__fail(error, 116, "data stops before the end of the last tensor") : 0;
}

static int bcq__lower(char c)
{
    return c >= 'A' && c <= 'Z' ? c + 32 : (unsigned char)c;
}

/* By name, ASCII letters folded. */
static int bcq__by_folded(const void *context, uint32_t a, uint32_t b)
{
    const bcq_tensor *x = (const bcq_tensor *)context + a, *y = (const bcq_tensor *)context + b;
    size_t i, n = x->name_bytes < y->name_bytes ? x->name_bytes : y->name_bytes;
    for (i = 0; i < n; i++)
        if (bcq__lower(x->name[i]) != bcq__lower(y->name[i]))
            return bcq__lower(x->name[i]) - bcq__lower(y->name[i]);
    return (x->name_bytes > y->name_bytes) - (x->name_bytes < y->name_bytes);
}

/* V120 */
static int bcq__check_folded(const bcq_file *f, bcq_error *error)
{
    uint32_t i, *order = bcq__sorted(f->tensor_count, bcq__by_folded, f->tensors);
    int code = order ? 0 : bcq__no_memory(error);
    for (i = 1; !code && i < f->tensor_count; i++)
        if (bcq__by_folded(f->tensors, order[i - 1], order[i]) == 0)
            code = bcq__bad(error, 120, bcq__tensor_name(f->tensors + order[i]), "has a twin but for case");
    BCQ_FREE(order);
    return code;
}

/* V117: everything is aligned to its element. */
static int bcq__check_alignment(const bcq_file *f, bcq_error *error)
{
    uint32_t i;
    if (f->header.size % 8)
        return bcq__fail(error, 117, "the data does not begin at a multiple of 8");
    for (i = 0; i < f->tensor_count; i++) {
        unsigned size = bcq_dtype_bits(f->tensors[i].dtype) / 8;
        if (size > 1 && f->tensors[i].begin % size)
            return bcq__bad(error, 117, bcq__tensor_name(f->tensors + i), "not aligned to its element");
    }
    return 0;
}

/* V118 */
static int bcq__check_metadata(const bcq_file *f, bcq_error *error)
{
    const bcq__json *d = &f->header;
    uint32_t i, node = f->metadata + 1;
    int good = bcq__type(d, f->metadata) == BCQ__OBJECT && d->nodes[f->metadata].count <= BCQ__MAX_METADATA;
    if (!f->metadata)
        return 0;
    for (i = 0; good && i < d->nodes[f->metadata].count; i++, node = d->nodes[node + 1].next)
        good = d->nodes[node + 1].type == BCQ__STRING;
    return good ? 0 : bcq__fail(error, 118, "__metadata__ is not an object of at most 1,000 strings");
}

/* Section 3, from V105 on: f->header.text of L bytes, f->data_bytes bytes after it. V117, V119 and V120 are asked of BCQ
   files only, and V201 tells them from others. */
static int bcq__read_container(bcq_file *f, int bcq, bcq_error *error)
{
    static const bcq__rules rules = {105, 106, 107};
    bcq__json *d = &f->header;
    uint32_t i, count, node = 1;
    BCQ__TRY(bcq__parse(d, BCQ__KIND_HEADER, rules, error));
    count = d->nodes[0].count;
    for (i = 0; i < count; i++, node = d->nodes[node + 1].next)
        if (bcq__is(d, node, "__metadata__"))
            f->metadata = node + 1;
    f->tensor_count = count - (f->metadata != 0);
    if (f->tensor_count > BCQ__MAX_TENSORS)
        return bcq__fail(error, 108, "%u tensors", f->tensor_count);
    f->tensors = (bcq_tensor *)bcq__alloc(f->tensor_count, sizeof *f->tensors);
    if (!f->tensors)
        return bcq__no_memory(error);
    for (i = 0, node = 1, count = 0; i < d->nodes[0].count; i++, node = d->nodes[node + 1].next) {
        bcq_tensor *t = f->tensors + count;
        if (node + 1 == f->metadata)
            continue;
        t->name = d->text + d->nodes[node].off;
        t->name_bytes = d->nodes[node].len;
        BCQ__TRY(bcq__read_entry(d, node + 1, t, error));
        count++;
    }
    BCQ__TRY(bcq__check_offsets(f, error));
    BCQ__TRY(bcq__check_metadata(f, error));
    if (bcq && !(f->metadata && bcq__get(d, f->metadata, "bcqfmt")))
        return bcq__fail(error, 201, "__metadata__ has no key bcqfmt");
    if (bcq)
        BCQ__TRY(bcq__check_alignment(f, error));
    for (i = 0; bcq && i < f->tensor_count; i++)
        if (f->tensors[i].name_bytes > BCQ__MAX_NAME)
            return bcq__bad(error, 119, bcq__tensor_name(f->tensors + i), "a name of more than 512 bytes");
    if (bcq)
        BCQ__TRY(bcq__check_folded(f, error));
    f->by_name = bcq__sorted(f->tensor_count, bcq__by_name, f->tensors);
    return f->by_name ? 0 : bcq__no_memory(error);
}

static const bcq_tensor *bcq__find(const bcq_file *f, bcq__str name)
{
    uint32_t low = 0, high = f->tensor_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const bcq_tensor *t = f->tensors + f->by_name[middle];
        int order = bcq__compare(bcq__tensor_name(t), name);
        if (!order)
            return t;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

/* ---- descriptor (section 5); the manifest has the same tables */

/* Bits by position in this list, which is sorted. */
static const char *const bcq__features[] = {
    "aligned64", "bcq", "byte-floats", "float-zero", "multi-precision", "nonfinite", "offset", "outliers", "perm",
    "second-order", "second-order-offset", "segments", "stack", "super-groups", "table"};
enum {
    BCQ__ALIGNED64, BCQ__BCQ, BCQ__BYTE_FLOATS, BCQ__FLOAT_ZERO, BCQ__MULTI_PRECISION, BCQ__NONFINITE, BCQ__OFFSET,
    BCQ__OUTLIERS, BCQ__PERM, BCQ__SECOND_ORDER, BCQ__SECOND_ORDER_OFFSET, BCQ__SEGMENTS, BCQ__STACK,
    BCQ__SUPER_GROUPS, BCQ__TABLE, BCQ__FEATURE_COUNT
};

/* A weight entry, by its nodes. */
typedef struct bcq__entry {
    uint32_t key, shape, widths, file; /* 0: not there */
    int64_t scheme;
    bcq_dtype dtype;
} bcq__entry;

/* The schemes and weights of a descriptor or of the manifest. */
typedef struct bcq__tables {
    bcq_scheme *schemes;
    bcq_segment *segments;
    bcq__entry *entries;
    uint32_t scheme_count, entry_count;
    unsigned features; /* in use */
} bcq__tables;

/* MAJOR.MINOR without leading zeros, MAJOR 1. */
static int bcq__is_version(const bcq__json *d, uint32_t node)
{
    bcq__str s;
    size_t i;
    if (bcq__type(d, node) != BCQ__STRING)
        return 0;
    s = bcq__string(d, node);
    if (s.bytes < 3 || s.at[0] != '1' || s.at[1] != '.' || (s.at[2] == '0' && s.bytes > 3))
        return 0;
    for (i = 2; i < s.bytes; i++)
        if (s.at[i] < '0' || s.at[i] > '9')
            return 0;
    return 1;
}

/* V205 and V206, which come before everything else. */
static int bcq__check_version(const bcq__json *d, bcq_error *error)
{
    uint32_t i, k, features = bcq__get(d, 0, "features"), node = features + 1;
    if (!bcq__is_version(d, bcq__get(d, 0, "version")))
        return bcq__fail(error, 205, "version is not 1.x");
    if (bcq__type(d, features) != BCQ__ARRAY)
        return 0;
    for (i = 0; i < d->nodes[features].count; i++, node = d->nodes[node].next) {
        for (k = 0; k < BCQ__FEATURE_COUNT && !bcq__is(d, node, bcq__features[k]); k++)
            ;
        if (k == BCQ__FEATURE_COUNT && d->nodes[node].type == BCQ__STRING)
            return bcq__bad(error, 206, bcq__string(d, node), "unknown feature");
    }
    return 0;
}

static int bcq__byte_float_type(const bcq__json *d, uint32_t node, bcq_byte_float *type)
{
    *type = bcq__is(d, node, "E8M0") ? BCQ_E8M0 : bcq__is(d, node, "UE4M3") ? BCQ_UE4M3 : (bcq_byte_float)0;
    return *type != 0;
}

/* Section 5.3, `scale` and `offset`. */
static int bcq__read_numbers(const bcq__json *d, uint32_t node, bcq_numbers *s)
{
    static const char *const names[] = {"rows", "scale", "groups", "bits", "zero", "codes", NULL};
    uint32_t v[6];
    int64_t rows, groups = 1, bits, zero;
    if (bcq__type(d, node) != BCQ__OBJECT)
        return bcq__float_type(d, node, &s->dtype) || bcq__byte_float_type(d, node, &s->bytes);
    if (!bcq__fields(d, node, names, 2, v) || !bcq__in_range(d, v[0], 1, BCQ__MAX_DIM, &rows) ||
        !bcq__float_type(d, v[1], &s->dtype) || (v[2] && !bcq__in_range(d, v[2], 2, BCQ__MAX_DIM, &groups)))
        return 0;
    s->rows = (uint32_t)rows;
    s->groups = (uint32_t)groups;
    if (v[5])
        return !v[3] && !v[4] && bcq__byte_float_type(d, v[5], &s->bytes);
    if (!bcq__in_range(d, v[3], 1, 8, &bits))
        return 0;
    s->bits = (unsigned)bits;
    s->zero = bcq__is(d, v[4], "packed") ? BCQ_I32 : BCQ_NONE;
    if (s->zero || bcq__float_type(d, v[4], &s->zero))
        return 1;
    s->zero = BCQ_NONE;
    if (!bcq__in_range(d, v[4], 0, INT64_C(1) << bits, &zero))
        return 0;
    s->zero_point = (unsigned)zero;
    return 1;
}

/* Section 5.3, `table`: its numbers go to *tables, which is moved on. */
static int bcq__read_table(const bcq__json *d, uint32_t array, uint32_t exponent, bcq_segment *s, int32_t **tables)
{
    uint32_t i, node = array + 1;
    int64_t value = 0;
    if (bcq__type(d, array) != BCQ__ARRAY || d->nodes[array].count != 1u << s->bits)
        return 0;
    s->table = *tables;
    for (i = 0; i < 1u << s->bits; i++, node = d->nodes[node].next) {
        if (!bcq__in_range(d, node, -(INT64_C(1) << 28), INT64_C(1) << 28, &value))
            return 0;
        *(*tables)++ = (int32_t)value;
    }
    value = 0;
    if (exponent && !bcq__in_range(d, exponent, -126, -1, &value))
        return 0;
    s->table_exponent = (int)value;
    return 1;
}

/* Section 5.3, `zero` of an affine segment. */
static int bcq__read_zero(const bcq__json *d, uint32_t node, bcq_segment *s)
{
    static const char *const names[] = {"bits", NULL};
    uint32_t bits;
    int64_t value;
    if (bcq__type(d, node) != BCQ__OBJECT) {
        if (!bcq__in_range(d, node, 0, INT64_C(1) << s->bits, &value))
            return 0;
        s->zero_point = (unsigned)value;
        return 1;
    }
    if (!bcq__fields(d, node, names, 1, &bits) || !bcq__in_range(d, bits, 1, s->bits + 1, &value))
        return 0;
    s->zero_bits = (unsigned)value;
    return 1;
}

/* Section 5.3. */
static int bcq__read_segment(const bcq__json *d, uint32_t node, bcq_segment *s, int32_t **tables)
{
    enum { ENCODING, BITS, GROUP, FIRST, SECOND, THIRD };
    static const char *const affine[] = {"encoding", "bits", "group_size", "scale", "zero", NULL};
    static const char *const offset[] = {"encoding", "bits", "group_size", "scale", "offset", NULL};
    static const char *const table[] = {"encoding", "bits", "group_size", "scale", "table", "table_exponent", NULL};
    static const char *const bcq[] = {"encoding", "bits", "group_size", "alpha", "bias", "precisions", NULL};
    uint32_t v[6], encoding;
    int64_t q, g = 0;
    int fits;
    if (d->nodes[node].type != BCQ__OBJECT)
        return 0;
    encoding = bcq__get(d, node, "encoding");
    if (bcq__is(d, encoding, "affine"))
        s->encoding = BCQ_AFFINE;
    else if (bcq__is(d, encoding, "float-zero"))
        s->encoding = BCQ_FLOAT_ZERO;
    else if (bcq__is(d, encoding, "offset"))
        s->encoding = BCQ_OFFSET;
    else if (bcq__is(d, encoding, "table"))
        s->encoding = BCQ_TABLE;
    else if (bcq__is(d, encoding, "bcq"))
        s->encoding = BCQ_BCQ;
    else
        return 0;
    if (s->encoding == BCQ_BCQ)
        fits = bcq__fields(d, node, bcq, 4, v);
    else if (s->encoding == BCQ_TABLE)
        fits = bcq__fields(d, node, table, 5, v);
    else
        fits = bcq__fields(d, node, s->encoding == BCQ_OFFSET ? offset : affine, 5, v);
    if (!fits || !bcq__in_range(d, v[BITS], 1, 8, &q) ||
        (!bcq__is(d, v[GROUP], "row") && !bcq__in_range(d, v[GROUP], 8, BCQ__MAX_DIM, &g)))
        return 0;
    s->bits = (unsigned)q;
    s->group_size = (uint32_t)g;
    if (s->encoding == BCQ_BCQ)
        return bcq__float_type(d, v[FIRST], &s->alpha) && (!v[SECOND] || bcq__float_type(d, v[SECOND], &s->bias)) &&
               (!v[THIRD] || bcq__rising(d, v[THIRD], 1, q - 1, &s->precisions));
    if (!bcq__read_numbers(d, v[FIRST], &s->scale))
        return 0;
    if (s->encoding == BCQ_AFFINE)
        return bcq__read_zero(d, v[SECOND], s);
    if (s->encoding == BCQ_TABLE)
        return bcq__read_table(d, v[SECOND], v[THIRD], s, tables);
    return s->encoding == BCQ_OFFSET ? bcq__read_numbers(d, v[SECOND], &s->offset)
                                     : bcq__float_type(d, v[SECOND], &s->zero);
}

/* Section 5.2; its segments go to `segments`, the numbers of their tables to *tables. */
static int bcq__read_scheme(const bcq__json *d, uint32_t node, bcq_scheme *s, bcq_segment *segments, int32_t **tables)
{
    static const char *const names[] = {"segments", "layout", "perm", "outliers", "nonfinite", NULL};
    static const char *const outlier_names[] = {"mode", "dtype", "segments", NULL};
    uint32_t v[5], o[3], k, segment;
    if (!bcq__fields(d, node, names, 1, v) || bcq__type(d, v[0]) != BCQ__ARRAY)
        return 0;
    s->segment_count = d->nodes[v[0]].count;
    s->segments = segments;
    s->text = d->source + d->nodes[node].off;
    s->text_bytes = d->nodes[node].len;
    if (s->segment_count < 1 || s->segment_count > BCQ_MAX_SEGMENTS)
        return 0;
    for (k = 0, segment = v[0] + 1; k < s->segment_count; k++, segment = d->nodes[segment].next)
        if (!bcq__read_segment(d, segment, segments + k, tables))
            return 0;
    if ((v[1] && !bcq__is(d, v[1], "aligned64")) || (v[2] && bcq__type(d, v[2]) != BCQ__TRUE) ||
        (v[4] && bcq__type(d, v[4]) != BCQ__TRUE))
        return 0;
    s->aligned64 = v[1] != 0;
    s->perm = v[2] != 0;
    s->nonfinite = v[4] != 0;
    if (!v[3])
        return 1;
    if (!bcq__fields(d, v[3], outlier_names, 3, o))
        return 0;
    s->outliers_replace = bcq__is(d, o[0], "replace");
    return (s->outliers_replace || bcq__is(d, o[0], "add")) && bcq__float_type(d, o[1], &s->outliers) &&
           bcq__rising(d, o[2], 0, (int64_t)s->segment_count - 1, &s->outlier_segments);
}

/* An array of integers from 0 on. */
static int bcq__all_integers(const bcq__json *d, uint32_t array)
{
    uint32_t i, node = array + 1;
    int64_t value;
    if (bcq__type(d, array) != BCQ__ARRAY)
        return 0;
    for (i = 0; i < d->nodes[array].count; i++, node = d->nodes[node].next)
        if (!bcq__in_range(d, node, 0, BCQ__MAX_INTEGER, &value))
            return 0;
    return 1;
}

static int bcq__all_strings(const bcq__json *d, uint32_t array)
{
    uint32_t i, node = array + 1;
    if (bcq__type(d, array) != BCQ__ARRAY)
        return 0;
    for (i = 0; i < d->nodes[array].count; i++, node = d->nodes[node].next)
        if (d->nodes[node].type != BCQ__STRING)
            return 0;
    return 1;
}

/* Section 5.1, the table; in the manifest `file` as well. Ranges are left to V209, V210 and V211. */
static int bcq__read_weight_entry(const bcq__json *d, uint32_t key, int manifest, bcq__entry *entry)
{
    static const char *const own[] = {"scheme", "shape", "dtype", "widths", NULL};
    static const char *const more[] = {"scheme", "shape", "dtype", "file", "widths", NULL};
    uint32_t v[5];
    if (!bcq__fields(d, key + 1, manifest ? more : own, manifest ? 4 : 3, v))
        return 0;
    entry->key = key;
    entry->shape = v[1];
    entry->widths = v[manifest ? 4 : 3];
    entry->file = manifest ? v[3] : 0;
    return bcq__in_range(d, v[0], 0, BCQ__MAX_INTEGER, &entry->scheme) && bcq__all_integers(d, v[1]) &&
           (!entry->widths || bcq__all_integers(d, entry->widths)) && bcq__float_type(d, v[2], &entry->dtype);
}

static unsigned bcq__scheme_features(const bcq_scheme *s)
{
    unsigned k, used = 0;
    used |= (unsigned)(s->aligned64 != 0) << BCQ__ALIGNED64;
    used |= (unsigned)(s->nonfinite != 0) << BCQ__NONFINITE;
    used |= (unsigned)(s->outliers != BCQ_NONE) << BCQ__OUTLIERS;
    used |= (unsigned)(s->perm != 0) << BCQ__PERM;
    used |= (unsigned)(s->segment_count > 1) << BCQ__SEGMENTS;
    for (k = 0; k < s->segment_count; k++) {
        const bcq_segment *one = s->segments + k;
        used |= (unsigned)(one->encoding == BCQ_BCQ) << BCQ__BCQ;
        used |= (unsigned)(one->encoding == BCQ_FLOAT_ZERO) << BCQ__FLOAT_ZERO;
        used |= (unsigned)(one->encoding == BCQ_OFFSET) << BCQ__OFFSET;
        used |= (unsigned)(one->encoding == BCQ_TABLE) << BCQ__TABLE;
        used |= (unsigned)(one->precisions != 0) << BCQ__MULTI_PRECISION;
        used |= (unsigned)(one->scale.rows != 0) << BCQ__SECOND_ORDER;
        used |= (unsigned)(one->offset.rows != 0) << BCQ__SECOND_ORDER_OFFSET;
        used |= (unsigned)(one->scale.groups > 1 || one->offset.groups > 1) << BCQ__SUPER_GROUPS;
        used |= (unsigned)(one->scale.bytes || one->offset.bytes) << BCQ__BYTE_FLOATS;
    }
    return used;
}

/* How many numbers the tables of a scheme have at most. */
static uint64_t bcq__table_entries(const bcq__json *d, uint32_t segments)
{
    uint32_t i, node = segments + 1, table;
    uint64_t count = 0;
    for (i = 0; i < d->nodes[segments].count; i++, node = d->nodes[node].next) {
        table = bcq__type(d, node) == BCQ__OBJECT ? bcq__get(d, node, "table") : 0;
        count += bcq__type(d, table) == BCQ__ARRAY ? d->nodes[table].count : 0;
    }
    return count;
}

static int bcq__by_text(const void *context, uint32_t a, uint32_t b)
{
    const bcq_scheme *s = (const bcq_scheme *)context;
    bcq__str x, y;
    x.at = s[a].text;
    x.bytes = s[a].text_bytes;
    y.at = s[b].text;
    y.bytes = s[b].text_bytes;
    return bcq__compare(x, y);
}

/* Sections 5 to 5.3: schemes and weights, each fitting its table, else `rule`. */
static int bcq__read_tables(const bcq__json *d, int manifest, int rule, bcq__tables *t, bcq_error *error)
{
    uint32_t features = bcq__get(d, 0, "features"), schemes = bcq__get(d, 0, "schemes");
    uint32_t weights = bcq__get(d, 0, "weights"), ignorable = bcq__get(d, 0, "ignorable"), i, node, list, segments = 0;
    uint64_t entries = 0;
    int32_t *tables;
    if (!bcq__all_strings(d, features) || bcq__type(d, schemes) != BCQ__ARRAY ||
        bcq__type(d, weights) != BCQ__OBJECT || (ignorable && bcq__type(d, ignorable) != BCQ__OBJECT))
        return bcq__fail(error, rule, "features, schemes, weights or ignorable is of another type");
    t->scheme_count = d->nodes[schemes].count;
    t->entry_count = d->nodes[weights].count;
    for (i = 0, node = schemes + 1; i < t->scheme_count; i++, node = d->nodes[node].next) {
        list = bcq__get(d, node, "segments");
        if (bcq__type(d, list) == BCQ__ARRAY && d->nodes[list].count <= BCQ_MAX_SEGMENTS) {
            segments += d->nodes[list].count;
            entries += bcq__table_entries(d, list);
        }
    }
    t->schemes = (bcq_scheme *)bcq__alloc(t->scheme_count, sizeof *t->schemes);
    t->segments = (bcq_segment *)bcq__alloc(segments * (uint64_t)sizeof *t->segments + entries * sizeof *tables, 1);
    t->entries = (bcq__entry *)bcq__alloc(t->entry_count, sizeof *t->entries);
    if (!t->schemes || !t->segments || !t->entries)
        return bcq__no_memory(error);
    tables = (int32_t *)(t->segments + segments); /* behind the segments, in the same memory */
    for (i = 0, node = schemes + 1, segments = 0; i < t->scheme_count; i++, node = d->nodes[node].next) {
        if (!bcq__read_scheme(d, node, t->schemes + i, t->segments + segments, &tables))
            return bcq__fail(error, rule, "scheme %u does not fit the tables of section 5", i);
        segments += t->schemes[i].segment_count;
        t->features |= bcq__scheme_features(t->schemes + i);
    }
    for (i = 0, node = weights + 1; i < t->entry_count; i++, node = d->nodes[node + 1].next) {
        if (!bcq__read_weight_entry(d, node, manifest, t->entries + i))
            return bcq__bad(error, rule, bcq__string(d, node), "an entry that does not fit the table of section 5.1");
        if (d->nodes[t->entries[i].shape].count == 3)
            t->features |= 1u << BCQ__STACK;
    }
    return 0;
}

/* V207 and V209 (of the manifest: V602): features are those in use; schemes are there, used, and different. */
static int bcq__check_use(const bcq__json *d, const bcq__tables *t, int features_rule, int schemes_rule,
                          bcq_error *error)
{
    uint32_t features = bcq__get(d, 0, "features"), node = features + 1, i, count = 0, *order;
    unsigned char *used;
    int code = 0;
    for (i = 0; i < BCQ__FEATURE_COUNT; i++) {
        if (!(t->features >> i & 1))
            continue;
        if (count++ >= d->nodes[features].count || !bcq__is(d, node, bcq__features[i]))
            return bcq__fail(error, features_rule, "features does not list %s where it belongs", bcq__features[i]);
        node = d->nodes[node].next;
    }
    if (count != d->nodes[features].count)
        return bcq__fail(error, features_rule, "features lists what is not in use");
    used = (unsigned char *)bcq__alloc(t->scheme_count, 1);
    order = bcq__sorted(t->scheme_count, bcq__by_text, t->schemes);
    if (!used || !order)
        code = bcq__no_memory(error);
    for (i = 0; !code && i < t->entry_count; i++) {
        if (t->entries[i].scheme >= (int64_t)t->scheme_count)
            code = bcq__bad(error, schemes_rule, bcq__string(d, t->entries[i].key), "a scheme that does not exist");
        else
            used[t->entries[i].scheme] = 1;
    }
    for (i = 0; !code && i < t->scheme_count; i++)
        if (!used[i])
            code = bcq__fail(error, schemes_rule, "no weight uses scheme %u", i);
    for (i = 1; !code && i < t->scheme_count; i++)
        if (bcq__by_text(t->schemes, order[i - 1], order[i]) == 0)
            code = bcq__fail(error, schemes_rule, "schemes %u and %u are equal", order[i - 1], order[i]);
    BCQ_FREE(used);
    BCQ_FREE(order);
    return code;
}

/* V213 */
static int bcq__is_weight_name(bcq__str s)
{
    size_t i;
    for (i = 0; i < s.bytes; i++) {
        char c = s.at[i];
        int letter = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
        if (!letter && (i == 0 || (c != '.' && c != ':' && c != '+' && c != '-')))
            return 0;
    }
    return s.bytes && s.bytes <= BCQ__MAX_WEIGHT_NAME && !bcq__contains(s, "..");
}

/* V215 */
static int bcq__fits_aligned64(const bcq_weight *w)
{
    const bcq_segment *a = w->scheme->segments, *b = a + 1;
    return w->scheme->segment_count == 2 && w->columns % 64 == 0 && w->widths[0] == w->columns / 4 * 3 &&
           w->widths[1] == w->columns / 4 && a->encoding == BCQ_AFFINE && a->bits == 2 && a->group_size == 16 &&
           a->scale.bits == 4 && a->scale.zero == BCQ_I32 && a->scale.groups == 1 && a->zero_bits == 2 &&
           b->encoding == BCQ_AFFINE && b->bits == 4;
}

/* V210 to V213 and V215: one weight. */
static int bcq__read_weight(const bcq__json *d, const bcq__entry *entry, const bcq_scheme *scheme, bcq_weight *w,
                            bcq_error *error)
{
    bcq__str name = bcq__string(d, entry->key);
    uint32_t k, node, count = d->nodes[entry->shape].count, q = 0;
    uint64_t shape[3] = {0, 0, 0}, bits = 1, sum = 0;
    int64_t value = 0;
    int good = count == 2 || count == 3;
    w->name = name.at;
    w->name_bytes = name.bytes;
    w->scheme = scheme;
    w->dtype = entry->dtype;
    for (k = 0; k < scheme->segment_count; k++)
        q = scheme->segments[k].bits > q ? scheme->segments[k].bits : q;
    for (k = 0, node = entry->shape + 1; good && k < count; k++, node = d->nodes[node].next) {
        good = bcq__in_range(d, node, 1, BCQ__MAX_DIM, &value) &&
               bcq__times(&bits, (uint64_t)value, BCQ__MAX_WEIGHT_BITS);
        shape[k] = (uint64_t)value;
    }
    if (!good || !bcq__times(&bits, q, BCQ__MAX_WEIGHT_BITS))
        return bcq__bad(error, 210, name, "shape is not two or three dimensions in 1..2^31-1, or too large");
    w->rank = count;
    w->stack = count == 3 ? shape[0] : 1;
    w->rows = shape[count - 2];
    w->columns = shape[count - 1];
    w->widths[0] = (uint32_t)w->columns;
    good = (entry->widths != 0) == (scheme->segment_count > 1);
    if (good && entry->widths) {
        good = d->nodes[entry->widths].count == scheme->segment_count;
        for (k = 0, node = entry->widths + 1; good && k < scheme->segment_count; k++, node = d->nodes[node].next) {
            good = bcq__in_range(d, node, 1, BCQ__MAX_DIM, &value);
            w->widths[k] = (uint32_t)value;
            sum += w->widths[k];
        }
        good = good && sum == w->columns;
    }
    if (!good)
        return bcq__bad(error, 211, name, "widths are missing, too many, or do not add up to the columns");
    for (k = 0; k < scheme->segment_count; k++) {
        uint64_t g = scheme->segments[k].group_size ? scheme->segments[k].group_size : w->widths[k];
        if (g < 8 || g > w->widths[k] || (w->widths[k] % g && k + 1 < scheme->segment_count))
            return bcq__bad(error, 212, name, "a group size that does not fit its segment");
    }
    if (!bcq__is_weight_name(name))
        return bcq__bad(error, 213, name, "not the name of a weight");
    if (scheme->aligned64 && !bcq__fits_aligned64(w))
        return bcq__bad(error, 215, name, "scheme or widths do not fit aligned64");
    return 0;
}

/* Section 5: from __metadata__ to f->weights, the parts aside. */
static int bcq__read_descriptor(bcq_file *f, bcq_error *error)
{
    static const char *const names[] = {"version", "features", "schemes", "weights", "ignorable", NULL};
    static const bcq__rules rules = {203, 203, 203};
    uint32_t text = bcq__get(&f->header, f->metadata, "bcqfmt"), i, values[5];
    bcq__json *d = &f->descriptor;
    bcq__tables t;
    int code;
    if (!bcq__is(&f->header, bcq__get(&f->header, f->metadata, "format"), "pt"))
        return bcq__fail(error, 202, "__metadata__ has no format = pt");
    BCQ__TRY(bcq__parse_copy(d, bcq__string(&f->header, text), BCQ__KIND_LIMITED, rules, error));
    BCQ__TRY(bcq__check_version(d, error));
    if (!bcq__fields(d, 0, names, 4, values))
        return bcq__fail(error, 208, "the descriptor lacks a key or has one too many");
    memset(&t, 0, sizeof t);
    code = bcq__read_tables(d, 0, 208, &t, error);
    if (!code && !bcq__is_canonical(d, ""))
        code = bcq__fail(error, 204, "the descriptor is not canonical JSON");
    if (!code)
        code = bcq__check_use(d, &t, 207, 209, error);
    f->schemes = t.schemes; /* what was made belongs to the file, whatever the result */
    f->segments = t.segments;
    f->scheme_count = t.scheme_count;
    f->features = t.features;
    f->version = bcq__string(d, values[0]).at;
    if (!code) {
        f->weights = (bcq_weight *)bcq__alloc(t.entry_count, sizeof *f->weights);
        code = f->weights ? 0 : bcq__no_memory(error);
    }
    for (i = 0; !code && i < t.entry_count; i++)
        code = bcq__read_weight(d, t.entries + i, t.schemes + t.entries[i].scheme, f->weights + i, error);
    f->weight_count = code ? 0 : t.entry_count;
    BCQ_FREE(t.entries);
    return code;
}

/* ---- parts (section 6 and annex A) */

typedef struct bcq__want {
    char suffix[20];
    bcq_dtype dtype;
    unsigned rank;
    uint64_t shape[4];
} bcq__want;

/* Per segment planes, alpha, bias and both for p = 1..7; tiles, perm and outliers besides. */
#define BCQ__MAX_PARTS (17 * BCQ_MAX_SEGMENTS + 7)

static uint64_t bcq__groups(const bcq_weight *w, unsigned k)
{
    uint32_t g = w->scheme->segments[k].group_size;
    return g ? bcq__ceil_div(w->widths[k], g) : 1;
}

/* Appends a part of segment k (k < 0: of the weight); `planes` 0: without that axis. A stack leads with E. */
static void bcq__want_part(const bcq_weight *w, bcq__want *list, unsigned *n, int k, const char *kind, unsigned p,
                           bcq_dtype dtype, uint64_t planes, uint64_t rows, uint64_t last)
{
    bcq__want *want = list + (*n)++;
    char precision[8] = "";
    memset(want, 0, sizeof *want);
    if (p)
        snprintf(precision, sizeof precision, "_p%u", p & 7);
    if (k >= 0)
        snprintf(want->suffix, sizeof want->suffix, "s%d_%s%s", k & 15, kind, precision);
    else
        snprintf(want->suffix, sizeof want->suffix, "%s", kind);
    want->dtype = dtype;
    if (w->rank == 3)
        want->shape[want->rank++] = w->stack;
    if (planes)
        want->shape[want->rank++] = planes;
    if (rows)
        want->shape[want->rank++] = rows;
    want->shape[want->rank++] = last;
}

/* The parts of a scale or an offset; `tiled`: in the layout aligned64. */
static void bcq__want_numbers(const bcq_weight *w, bcq__want *list, unsigned *n, int k, const char *name,
                              const bcq_numbers *s, uint64_t groups, int tiled)
{
    uint64_t row_groups, columns;
    char codes[16], scale[16], zero[16];
    if (!s->rows) {
        if (s->dtype || s->bytes)
            bcq__want_part(w, list, n, k, name, 0, s->bytes ? BCQ_U8 : s->dtype, 0, w->rows, groups);
        return;
    }
    snprintf(codes, sizeof codes, "%s_codes", name);
    snprintf(scale, sizeof scale, "%s_scale", name);
    snprintf(zero, sizeof zero, "%s_zero", name);
    row_groups = bcq__ceil_div(w->rows, s->rows);
    columns = bcq__ceil_div(groups, s->groups);
    bcq__want_part(w, list, n, k, scale, 0, s->dtype, 0, row_groups, columns);
    if (s->bytes)
        bcq__want_part(w, list, n, k, codes, 0, BCQ_U8, 0, w->rows, groups);
    else if (!tiled)
        bcq__want_part(w, list, n, k, codes, 0, BCQ_I32, 0, w->rows, bcq__ceil_div(groups * s->bits, 32));
    if (tiled)
        bcq__want_part(w, list, n, k, zero, 0, BCQ_U8, 0, row_groups, columns);
    else if (s->zero == BCQ_I32)
        bcq__want_part(w, list, n, k, zero, 0, BCQ_I32, 0, row_groups, bcq__ceil_div(columns * s->bits, 32));
    else if (s->zero)
        bcq__want_part(w, list, n, k, zero, 0, s->zero, 0, row_groups, columns);
}

static void bcq__want_segment(const bcq_weight *w, unsigned index, bcq__want *list, unsigned *n)
{
    const bcq_segment *s = w->scheme->segments + index;
    uint64_t out = w->rows, groups = bcq__groups(w, index);
    int tiled = w->scheme->aligned64 && index == 0, k = (int)index;
    unsigned p;
    if (!w->scheme->aligned64)
        bcq__want_part(w, list, n, k, "planes", 0, BCQ_I32, s->bits, out, bcq__ceil_div(w->widths[index], 32));
    bcq__want_numbers(w, list, n, k, "scale", &s->scale, groups, tiled);
    bcq__want_numbers(w, list, n, k, "offset", &s->offset, groups, 0);
    if (s->zero_bits && !tiled)
        bcq__want_part(w, list, n, k, "zero", 0, BCQ_I32, 0, out, bcq__ceil_div(groups * s->zero_bits, 32));
    if (s->zero)
        bcq__want_part(w, list, n, k, "zero", 0, s->zero, 0, out, groups);
    for (p = 0; s->alpha && p < s->bits; p++) {
        if (p && !(s->precisions >> p & 1))
            continue;
        bcq__want_part(w, list, n, k, "alpha", p, s->alpha, p ? p : s->bits, out, groups);
        if (s->bias)
            bcq__want_part(w, list, n, k, "bias", p, s->bias, 0, out, groups);
    }
}

/* All parts that the scheme calls for. */
static unsigned bcq__wanted(const bcq_weight *w, uint64_t nnz, bcq__want *list)
{
    unsigned k, n = 0;
    uint64_t tiles = w->columns / 64;
    bcq_weight flat = *w;
    for (k = 0; k < w->scheme->segment_count; k++)
        bcq__want_segment(w, k, list, &n);
    if (w->scheme->aligned64) {
        bcq__want_part(w, list, &n, -1, "tile", 0, BCQ_I32, w->rows, tiles, 4);
        bcq__want_part(w, list, &n, -1, "tile_extra", 0, BCQ_I32, 0, w->rows, tiles);
        bcq__want_part(w, list, &n, -1, "tile_meta", 0, BCQ_U16, 0, w->rows, tiles);
    }
    if (w->scheme->perm)
        bcq__want_part(w, list, &n, -1, "perm", 0, BCQ_I32, 0, 0, w->columns);
    if (w->scheme->outliers) {
        flat.rank = 2; /* a stack's outliers are those of one matrix */
        bcq__want_part(&flat, list, &n, -1, "outlier_indptr", 0, BCQ_I32, 0, 0, w->stack * w->rows + 1);
        bcq__want_part(&flat, list, &n, -1, "outlier_indices", 0, w->columns <= 65536 ? BCQ_U16 : BCQ_I32, 0, 0, nnz);
        bcq__want_part(&flat, list, &n, -1, "outlier_values", 0, w->scheme->outliers, 0, 0, nnz);
    }
    return n;
}

/* A part's name: P and the suffix. `buffer` has room for 512 bytes. */
static bcq__str bcq__part_name(const bcq_weight *w, const char *suffix, char *buffer)
{
    size_t n = w->name_bytes, suffix_bytes = strlen(suffix);
    bcq__str s;
    memcpy(buffer, w->name, n);
    if (n > 7 && memcmp(buffer + n - 7, ".weight", 7) == 0) {
        memcpy(buffer + n - 7, ".bcq_", 5);
        n -= 2;
    } else {
        memcpy(buffer + n, "_bcq_", 5);
        n += 5;
    }
    memcpy(buffer + n, suffix, suffix_bytes);
    s.at = buffer;
    s.bytes = n + suffix_bytes;
    return s;
}

static bcq__str bcq__weight_name(const bcq_weight *w)
{
    bcq__str s;
    s.at = w->name;
    s.bytes = w->name_bytes;
    return s;
}

static uint64_t bcq__nnz(const bcq_file *f, const bcq_weight *w, char *buffer)
{
    const bcq_tensor *t = w->scheme->outliers ? bcq__find(f, bcq__part_name(w, "outlier_indices", buffer)) : NULL;
    return t && t->rank == 1 ? t->shape[0] : 0;
}

/* V214 and V301 to V304: every weight gets its parts. */
static int bcq__collect(bcq_file *f, bcq__want *list, bcq_error *error)
{
    char buffer[BCQ__MAX_NAME + 8];
    const bcq_weight *lacking = NULL;
    uint32_t i, used = 0;
    unsigned j, n;
    f->parts = (bcq_part_ref *)bcq__alloc(f->tensor_count, sizeof *f->parts);
    if (!f->parts)
        return bcq__no_memory(error);
    for (i = 0; i < f->weight_count; i++) {
        bcq_weight *w = f->weights + i;
        w->parts = f->parts + used;
        n = lacking ? 0 : bcq__wanted(w, 0, list);
        if (bcq__find(f, bcq__weight_name(w)))
            return bcq__bad(error, 214, bcq__weight_name(w), "a tensor of the file bears the name of a weight");
        for (j = 0; j < n && !lacking; j++) {
            bcq__str name = bcq__part_name(w, list[j].suffix, buffer);
            bcq_tensor *t = (bcq_tensor *)(uintptr_t)bcq__find(f, name);
            if (!t) {
                lacking = w;
                break;
            }
            if (t->is_part)
                return bcq__bad(error, 214, bcq__weight_name(w), "one of its parts belongs to another weight too");
            t->is_part = 1;
            f->parts[used].suffix = t->name + (t->name_bytes - strlen(list[j].suffix));
            f->parts[used++].tensor = t;
            w->part_count++;
        }
    }
    if (lacking)
        return bcq__bad(error, 301, bcq__weight_name(lacking), "a part is missing");
    for (i = 0; i < f->tensor_count; i++) {
        bcq__str name = bcq__tensor_name(f->tensors + i);
        if (!f->tensors[i].is_part && (bcq__contains(name, ".bcq_") || bcq__contains(name, "_bcq_")))
            return bcq__bad(error, 302, name, "named like a part, but part of no weight");
    }
    for (i = 0; i < f->weight_count; i++) {
        const bcq_weight *w = f->weights + i;
        n = bcq__wanted(w, bcq__nnz(f, w, buffer), list);
        for (j = 0; j < n; j++) {
            const bcq_tensor *t = w->parts[j].tensor;
            if (t->dtype != list[j].dtype)
                return bcq__bad(error, 303, bcq__tensor_name(t), "a part of another dtype");
            if (t->rank != list[j].rank || memcmp(t->shape, list[j].shape, t->rank * sizeof *t->shape) != 0)
                return bcq__bad(error, 304, bcq__tensor_name(t), "a part of another shape");
        }
    }
    return 0;
}

static const bcq_tensor *bcq__segment_part(const bcq_weight *w, unsigned k, const char *kind, unsigned p)
{
    char suffix[24];
    if (p)
        snprintf(suffix, sizeof suffix, "s%u_%s_p%u", k & 15, kind, p & 7);
    else
        snprintf(suffix, sizeof suffix, "s%u_%s", k & 15, kind);
    return bcq_part(w, suffix);
}

const bcq_tensor *bcq_part(const bcq_weight *weight, const char *suffix)
{
    size_t i;
    for (i = 0; i < weight->part_count; i++)
        if (strcmp(weight->parts[i].suffix, suffix) == 0)
            return weight->parts[i].tensor;
    return NULL;
}

/* Field j of a row of packed(b) (section 6.1). */
static unsigned bcq__field(const unsigned char *row, uint64_t j, unsigned b)
{
    uint64_t bit = j * b;
    const unsigned char *word = row + bit / 32 * 4;
    unsigned shift = (unsigned)(bit % 32);
    uint32_t value = bcq__u32(word) >> shift;
    if (shift + b > 32)
        value |= bcq__u32(word + 4) << (32 - shift);
    return value & ((1u << b) - 1);
}

/* ---- the content of the parts (sections 6.1, 6.3 and 6.4) */

/* V401: of every row of packed fields the bits after the first `used` ones. */
static int bcq__padding_is_zero(const bcq_tensor *t, uint64_t used)
{
    uint64_t words = bcq__ceil_div(used, 32), at;
    if (used % 32 == 0)
        return 1;
    for (at = 4 * (words - 1); at < t->bytes; at += 4 * words)
        if (bcq__u32(t->data + at) >> used % 32)
            return 0;
    return 1;
}

/* V401 and V411 of a scale or an offset: 0, or the rule that is broken. */
static int bcq__check_numbers(const bcq_weight *w, unsigned k, const char *name, const bcq_numbers *s)
{
    uint64_t groups = bcq__groups(w, k), i;
    const bcq_tensor *t;
    char suffix[16];
    if (s->rows) {
        snprintf(suffix, sizeof suffix, "%s_zero", name);
        t = bcq__segment_part(w, k, suffix, 0);
        if (t && t->dtype == BCQ_I32 && !bcq__padding_is_zero(t, bcq__ceil_div(groups, s->groups) * s->bits))
            return 401;
        for (i = 0; t && t->dtype == BCQ_U8 && i < t->bytes; i++)
            if (t->data[i] > 15)
                return 401;
    }
    snprintf(suffix, sizeof suffix, s->rows ? "%s_codes" : "%s", name);
    t = bcq__segment_part(w, k, suffix, 0);
    if (t && s->bits && !bcq__padding_is_zero(t, groups * s->bits))
        return 401;
    for (i = 0; t && s->bytes == BCQ_UE4M3 && i < t->bytes; i++)
        if (t->data[i] > 0x7e)
            return 411;
    return 0;
}

static int bcq__check_padding(const bcq_weight *w, bcq_error *error)
{
    unsigned k;
    int rule = 0;
    for (k = 0; k < w->scheme->segment_count; k++) {
        const bcq_segment *s = w->scheme->segments + k;
        const bcq_tensor *t = bcq__segment_part(w, k, "planes", 0);
        if (t && !bcq__padding_is_zero(t, w->widths[k]))
            rule = 401;
        t = bcq__segment_part(w, k, "zero", 0);
        if (t && t->dtype == BCQ_I32 && !bcq__padding_is_zero(t, bcq__groups(w, k) * s->zero_bits))
            rule = 401;
        rule = rule ? rule : bcq__check_numbers(w, k, "scale", &s->scale);
        rule = rule ? rule : bcq__check_numbers(w, k, "offset", &s->offset);
    }
    if (rule == 411)
        return bcq__bad(error, 411, bcq__weight_name(w), "a byte that is no UE4M3 number");
    return rule ? bcq__bad(error, 401, bcq__weight_name(w), "bits after the last field of a row") : 0;
}

/* V404 */
static int bcq__check_zeros(const bcq_weight *w, bcq_error *error)
{
    unsigned k;
    for (k = 0; k < w->scheme->segment_count; k++) {
        const bcq_segment *s = w->scheme->segments + k;
        const bcq_tensor *t = bcq__segment_part(w, k, "zero", 0);
        uint64_t groups = bcq__groups(w, k), row, rows = w->stack * w->rows, j;
        uint64_t row_bytes = 4 * bcq__ceil_div(groups * s->zero_bits, 32);
        if (!t || !s->zero_bits)
            continue;
        for (row = 0; row < rows; row++)
            for (j = 0; j < groups; j++)
                if (bcq__field(t->data + row * row_bytes, j, s->zero_bits) > 1u << s->bits)
                    return bcq__bad(error, 404, bcq__tensor_name(t), "a zero point above 2^q");
    }
    return 0;
}

/* V405 */
static int bcq__check_finite(const bcq_weight *w, bcq_error *error)
{
    size_t i;
    uint64_t at;
    if (w->scheme->nonfinite)
        return 0;
    for (i = 0; i < w->part_count; i++) {
        const bcq_tensor *t = w->parts[i].tensor;
        unsigned size = t->dtype == BCQ_F32 ? 4 : 2;
        uint32_t exponent = t->dtype == BCQ_F16 ? 0x7c00 : t->dtype == BCQ_BF16 ? 0x7f80 : 0x7f800000;
        if (!bcq__is_float(t->dtype))
            continue;
        for (at = 0; at < t->bytes; at += size)
            if (((size == 4 ? bcq__u32(t->data + at) : bcq__u16(t->data + at)) & exponent) == exponent)
                return bcq__bad(error, 405, bcq__tensor_name(t), "an infinity or NaN");
    }
    return 0;
}

/* V406 */
static int bcq__check_perm(const bcq_weight *w, bcq_error *error)
{
    const bcq_tensor *t = w->scheme->perm ? bcq_part(w, "perm") : NULL;
    unsigned char *seen;
    uint64_t e, j;
    int code = 0;
    if (!t)
        return 0;
    seen = (unsigned char *)bcq__alloc(w->columns, 1);
    if (!seen)
        return bcq__no_memory(error);
    for (e = 0; e < w->stack && !code; e++) {
        memset(seen, 0, (size_t)w->columns);
        for (j = 0; j < w->columns && !code; j++) {
            uint32_t column = bcq__u32(t->data + 4 * (e * w->columns + j));
            if (column >= w->columns || seen[column]++)
                code = bcq__bad(error, 406, bcq__tensor_name(t), "not a permutation of the columns");
        }
    }
    BCQ_FREE(seen);
    return code;
}

static uint64_t bcq__outlier_column(const bcq_tensor *indices, uint64_t i)
{
    return indices->dtype == BCQ_U16 ? bcq__u16(indices->data + 2 * i) : bcq__u32(indices->data + 4 * i);
}

/* The segment in which a stored column lies. */
static unsigned bcq__segment_of(const bcq_weight *w, uint64_t stored)
{
    unsigned k = 0;
    uint64_t end = w->widths[0];
    while (stored >= end && k + 1 < w->scheme->segment_count)
        end += w->widths[++k];
    return k;
}

/* V409: `home` has room for the segment of every column, where there is a perm. */
static int bcq__outliers_at_home(const bcq_weight *w, unsigned char *home)
{
    const bcq_tensor *indptr = bcq_part(w, "outlier_indptr"), *indices = bcq_part(w, "outlier_indices");
    const bcq_tensor *perm = bcq_part(w, "perm");
    uint64_t e, i, j, end;
    for (e = 0; e < w->stack; e++) {
        for (j = 0; perm && j < w->columns; j++)
            home[bcq__u32(perm->data + 4 * (e * w->columns + j))] = (unsigned char)bcq__segment_of(w, j);
        end = bcq__u32(indptr->data + 4 * (e + 1) * w->rows);
        for (i = bcq__u32(indptr->data + 4 * e * w->rows); i < end; i++) {
            uint64_t column = bcq__outlier_column(indices, i);
            if (!(w->scheme->outlier_segments >> (perm ? home[column] : bcq__segment_of(w, column)) & 1))
                return 0;
        }
    }
    return 1;
}

/* V407 to V410 */
static int bcq__check_outliers(const bcq_weight *w, bcq_error *error)
{
    const bcq_tensor *indptr = bcq_part(w, "outlier_indptr"), *indices = bcq_part(w, "outlier_indices");
    uint64_t row, rows = w->stack * w->rows, nnz, i, start = 0, end;
    unsigned char *home;
    int good;
    if (!w->scheme->outliers || !indptr || !indices)
        return 0;
    nnz = indices->shape[0];
    good = bcq__u32(indptr->data) == 0 && nnz <= INT32_MAX && bcq__u32(indptr->data + 4 * rows) == nnz;
    for (row = 0; good && row < rows; row++, start = end) {
        end = bcq__u32(indptr->data + 4 * (row + 1));
        good = start <= end;
    }
    if (!good)
        return bcq__bad(error, 407, bcq__tensor_name(indptr), "does not rise from 0 to nnz");
    for (row = 0; row < rows; row++) {
        start = bcq__u32(indptr->data + 4 * row);
        end = bcq__u32(indptr->data + 4 * (row + 1));
        for (i = start; i < end; i++)
            if (bcq__outlier_column(indices, i) >= w->columns ||
                (i > start && bcq__outlier_column(indices, i) <= bcq__outlier_column(indices, i - 1)))
                return bcq__bad(error, 408, bcq__tensor_name(indices), "columns do not rise within 0..in-1");
    }
    home = (unsigned char *)bcq__alloc(w->scheme->perm ? w->columns : 0, 1);
    if (!home)
        return bcq__no_memory(error);
    good = bcq__outliers_at_home(w, home);
    BCQ_FREE(home);
    if (!good)
        return bcq__bad(error, 409, bcq__tensor_name(indices), "an outlier in a segment without outliers");
    if (nnz * 8 > rows * w->columns)
        return bcq__bad(error, 410, bcq__tensor_name(indices), "more outliers than one eighth of the elements");
    return 0;
}

int bcq_check(bcq_weight *w, bcq_error *error)
{
    if (w->checked)
        return 0;
    BCQ__TRY(bcq__check_padding(w, error));
    BCQ__TRY(bcq__check_zeros(w, error));
    BCQ__TRY(bcq__check_finite(w, error));
    BCQ__TRY(bcq__check_perm(w, error));
    BCQ__TRY(bcq__check_outliers(w, error));
    w->checked = 1;
    return 0;
}

/* Section 9.4, the digest of a weight. */
static int bcq__by_suffix(const void *context, uint32_t a, uint32_t b)
{
    const bcq_weight *w = (const bcq_weight *)context;
    return strcmp(w->parts[a].suffix, w->parts[b].suffix);
}

static void bcq__sha_text(bcq__sha *h, const char *text)
{
    bcq__sha_add(h, text, strlen(text));
}

static void bcq__sha_number(bcq__sha *h, uint64_t number, const char *after)
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)number);
    bcq__sha_text(h, text);
    bcq__sha_text(h, after);
}

void bcq_weight_digest(const bcq_weight *w, char hex[65])
{
    uint32_t order[BCQ__MAX_PARTS * 2], n = (uint32_t)w->part_count, i, k;
    bcq__sha all, own;
    for (i = 0; i < n; i++)
        order[i] = i;
    bcq__sort(order, order + n, n, bcq__by_suffix, w);
    bcq__sha_start(&all);
    bcq__sha_text(&all, "{\"dtype\":\"");
    bcq__sha_text(&all, bcq_dtype_name(w->dtype));
    bcq__sha_text(&all, "\",\"scheme\":");
    bcq__sha_add(&all, w->scheme->text, w->scheme->text_bytes);
    bcq__sha_text(&all, ",\"shape\":[");
    if (w->rank == 3)
        bcq__sha_number(&all, w->stack, ",");
    bcq__sha_number(&all, w->rows, ",");
    bcq__sha_number(&all, w->columns, "]");
    for (k = 0; w->scheme->segment_count > 1 && k < w->scheme->segment_count; k++) {
        bcq__sha_text(&all, k ? "" : ",\"widths\":[");
        bcq__sha_number(&all, w->widths[k], k + 1 < w->scheme->segment_count ? "," : "]");
    }
    bcq__sha_text(&all, "}\n");
    for (i = 0; i < n; i++) {
        const bcq_tensor *t = w->parts[order[i]].tensor;
        bcq__sha_text(&all, w->parts[order[i]].suffix);
        bcq__sha_text(&all, " ");
        bcq__sha_text(&all, bcq_dtype_name(t->dtype));
        bcq__sha_text(&all, " ");
        for (k = 0; k < t->rank; k++)
            bcq__sha_number(&all, t->shape[k], k + 1 < t->rank ? "," : " ");
        bcq__sha_start(&own);
        bcq__sha_add(&own, t->data, t->bytes);
        bcq__sha_hex(&own, hex);
        bcq__sha_text(&all, hex);
        bcq__sha_text(&all, "\n");
    }
    bcq__sha_hex(&all, hex);
}

/* ---- values (section 8)

   binary64 numbers are handled as their bits, and every + - * is a call of one of the next functions. With doubles
   the result of each operation is stored to and read from memory, so that no compiler can fuse two of them or keep
   extra digits, whatever its options; without usable doubles the same is done by integers. No subnormal binary64
   arises from stored numbers of at most 32 bits, so that modes which flush them to zero do no harm. */

#define BCQ__SIGN (UINT64_C(1) << 63)
#define BCQ__INFINITY (UINT64_C(0x7ff) << 52)
#define BCQ__NAN (UINT64_C(0xfff) << 51)
#define BCQ__FRACTION ((UINT64_C(1) << 52) - 1)

#ifdef BCQ_SOFT_FLOAT

/* x / 2^shift with all bits that fall off gathered in the last one. */
static uint64_t bcq__shift(uint64_t x, int shift)
{
    if (shift <= 0)
        return x;
    return shift > 63 ? x != 0 : x >> shift | ((x << (64 - shift)) != 0);
}

/* sig * 2^(exponent - 63), the top bit of sig set, rounded to nearest, ties to even. */
static uint64_t bcq__round64(uint64_t sign, int exponent, uint64_t sig)
{
    int biased = exponent + 1023;
    uint64_t lost;
    if (biased >= 2047)
        return sign | BCQ__INFINITY;
    if (biased <= 0) {
        sig = bcq__shift(sig, 1 - biased);
        biased = 1;
        lost = sig & 0x7ff;
        sig >>= 11;
        sig += lost > 0x400 || (lost == 0x400 && sig & 1);
        return sign | sig; /* a carry makes the smallest normal number */
    }
    lost = sig & 0x7ff;
    sig >>= 11;
    sig += lost > 0x400 || (lost == 0x400 && sig & 1);
    return sign | (((uint64_t)(biased - 1) << 52) + sig);
}

/* |x| = sig * 2^(exponent - 63) with the top bit of sig set; x is finite and not 0. */
static uint64_t bcq__unpack64(uint64_t x, int *exponent)
{
    uint64_t sig = x & BCQ__FRACTION;
    int field = (int)(x >> 52 & 0x7ff);
    *exponent = (field ? field : 1) - 1023;
    sig = (field ? sig | UINT64_C(1) << 52 : sig) << 11;
    while (!(sig >> 63)) {
        sig <<= 1;
        *exponent -= 1;
    }
    return sig;
}

static uint64_t bcq__mul(uint64_t a, uint64_t b)
{
    uint64_t sign = (a ^ b) & BCQ__SIGN, x = a & ~BCQ__SIGN, y = b & ~BCQ__SIGN, high, low, middle, p, q;
    int ea, eb;
    if (x > BCQ__INFINITY || y > BCQ__INFINITY)
        return BCQ__NAN;
    if (x == BCQ__INFINITY || y == BCQ__INFINITY)
        return x && y ? sign | BCQ__INFINITY : BCQ__NAN;
    if (!x || !y)
        return sign;
    x = bcq__unpack64(x, &ea);
    y = bcq__unpack64(y, &eb);
    low = (x & 0xffffffff) * (y & 0xffffffff);
    p = (x >> 32) * (y & 0xffffffff);
    q = (x & 0xffffffff) * (y >> 32);
    middle = (low >> 32) + (p & 0xffffffff) + (q & 0xffffffff);
    low = (low & 0xffffffff) | middle << 32;
    high = (x >> 32) * (y >> 32) + (p >> 32) + (q >> 32) + (middle >> 32);
    if (high >> 63)
        return bcq__round64(sign, ea + eb + 1, high | (low != 0));
    return bcq__round64(sign, ea + eb, high << 1 | low >> 63 | ((low << 1) != 0));
}

static uint64_t bcq__add(uint64_t a, uint64_t b)
{
    uint64_t x = a & ~BCQ__SIGN, y = b & ~BCQ__SIGN, sum, sign;
    int ea, eb;
    if (x > BCQ__INFINITY || y > BCQ__INFINITY || (x == BCQ__INFINITY && y == x && a != b))
        return BCQ__NAN;
    if (x < y) {
        sum = a, a = b, b = sum;
        sum = x, x = y, y = sum;
    }
    if (x == BCQ__INFINITY)
        return a;
    if (!y)
        return x ? a : a & b;
    sign = a & BCQ__SIGN;
    x = bcq__unpack64(x, &ea) >> 1;
    y = bcq__unpack64(y, &eb) >> 1;
    y = bcq__shift(y, ea - eb);
    sum = (a ^ b) >> 63 ? x - y : x + y;
    if (!sum)
        return 0;
    for (ea++; !(sum >> 63); ea--)
        sum <<= 1;
    return bcq__round64(sign, ea, sum);
}

#else

static uint64_t bcq__mul(uint64_t a, uint64_t b)
{
    double x, y;
    volatile double result;
    memcpy(&x, &a, 8);
    memcpy(&y, &b, 8);
    result = x * y;
    x = result;
    memcpy(&a, &x, 8);
    return a;
}

static uint64_t bcq__add(uint64_t a, uint64_t b)
{
    double x, y;
    volatile double result;
    memcpy(&x, &a, 8);
    memcpy(&y, &b, 8);
    result = x + y;
    x = result;
    memcpy(&a, &x, 8);
    return a;
}

#endif

static uint64_t bcq__sub(uint64_t a, uint64_t b)
{
    return bcq__add(a, b ^ BCQ__SIGN);
}

/* An integer below 2^52. */
static uint64_t bcq__from_integer(uint64_t n)
{
    unsigned exponent = 0;
    if (!n)
        return 0;
    while (n >> exponent >> 1)
        exponent++;
    return ((uint64_t)(1023 + exponent) << 52) + ((n << (52 - exponent)) & BCQ__FRACTION);
}

/* 2^n for -1022 <= n <= 1023. */
static uint64_t bcq__power_of_two(int n)
{
    return (uint64_t)(1023 + n) << 52;
}

/* A stored number of type F16, BF16 or F32, which binary64 holds exactly; U8 as an integer. */
static uint64_t bcq__number(bcq_dtype dtype, const unsigned char *at)
{
    uint32_t bits = dtype == BCQ_F32 ? bcq__u32(at) : dtype == BCQ_U8 ? *at : bcq__u16(at);
    unsigned fraction_bits = dtype == BCQ_F32 ? 23 : dtype == BCQ_F16 ? 10 : 7;
    unsigned exponent_bits = dtype == BCQ_F16 ? 5 : 8;
    uint64_t sign, fraction;
    int exponent, bias = (1 << (exponent_bits - 1)) - 1;
    if (dtype == BCQ_U8)
        return bcq__from_integer(bits);
    sign = (uint64_t)(bits >> (exponent_bits + fraction_bits)) << 63;
    exponent = (int)(bits >> fraction_bits & ((1u << exponent_bits) - 1));
    fraction = bits & ((1u << fraction_bits) - 1);
    if (exponent == (1 << exponent_bits) - 1)
        return sign | BCQ__INFINITY | fraction << (52 - fraction_bits);
    if (!exponent) {
        if (!fraction)
            return sign;
        for (exponent = 1; !(fraction >> fraction_bits); exponent--)
            fraction <<= 1;
        fraction &= (1u << fraction_bits) - 1;
    }
    return sign | (uint64_t)(exponent - bias + 1023) << 52 | fraction << (52 - fraction_bits);
}

/* RN_t: one rounding, by integers; NaN in its delivered form. */
static uint32_t bcq__round(uint64_t x, bcq_dtype dtype)
{
    unsigned fraction_bits = dtype == BCQ_F32 ? 23 : dtype == BCQ_F16 ? 10 : 7;
    unsigned exponent_bits = dtype == BCQ_F16 ? 5 : 8;
    uint32_t infinity = ((1u << exponent_bits) - 1) << fraction_bits;
    uint32_t sign = (uint32_t)(x >> 63) << (exponent_bits + fraction_bits), result;
    int field = (int)(x >> 52 & 0x7ff), bias = (1 << (exponent_bits - 1)) - 1, exponent, shift;
    uint64_t number = x & BCQ__FRACTION, kept, lost, half;
    if (field == 0x7ff)
        return number ? infinity | 1u << (fraction_bits - 1) : sign | infinity;
    if (!field)
        return sign; /* 0, or a subnormal binary64: far below half of the smallest number of any type here */
    number |= UINT64_C(1) << 52;
    exponent = field - 1023;
    if (exponent > bias)
        return sign | infinity;
    if (exponent < 1 - bias)
        exponent = 1 - bias; /* that of the smallest normal number */
    shift = exponent - (field - 1075) - (int)fraction_bits; /* |x| = number * 2^(field - 1075) */
    if (shift > 54)
        return sign;
    kept = number >> shift;
    lost = number & ((UINT64_C(1) << shift) - 1);
    half = UINT64_C(1) << (shift - 1);
    kept += lost > half || (lost == half && kept & 1);
    /* The leading 1 of a normal `kept` adds 1 to the exponent field, and so does a carry. */
    result = ((uint32_t)(exponent + bias - 1) << fraction_bits) + (uint32_t)kept;
    return sign | (result > infinity ? infinity : result);
}

/* The parts of a scale or an offset. */
typedef struct bcq__number_parts {
    const bcq_tensor *plain, *codes, *scale, *zero; /* plain: first order */
} bcq__number_parts;

/* A segment of a weight, ready to be decoded. */
typedef struct bcq__run {
    const bcq_segment *segment;
    uint64_t width, groups, start; /* start: first stored column */
    unsigned index, used;          /* used: planes */
    bcq__number_parts scale, offset;
    const bcq_tensor *planes, *zero, *alpha, *bias;
    const bcq_tensor *tile, *extra, *meta;
} bcq__run;

/* What a group of one row is made of. */
typedef struct bcq__group {
    uint64_t scale, zero;     /* zero: zp, float zero or offset */
    uint64_t alpha[8], z;
} bcq__group;

static void bcq__find_numbers(const bcq_weight *w, unsigned k, const char *name, bcq__number_parts *parts)
{
    char suffix[16];
    parts->plain = bcq__segment_part(w, k, name, 0);
    snprintf(suffix, sizeof suffix, "%s_codes", name);
    parts->codes = bcq__segment_part(w, k, suffix, 0);
    snprintf(suffix, sizeof suffix, "%s_scale", name);
    parts->scale = bcq__segment_part(w, k, suffix, 0);
    snprintf(suffix, sizeof suffix, "%s_zero", name);
    parts->zero = bcq__segment_part(w, k, suffix, 0);
}

static void bcq__prepare(const bcq_weight *w, unsigned k, unsigned planes, uint64_t start, bcq__run *run)
{
    const bcq_segment *s = w->scheme->segments + k;
    unsigned p;
    memset(run, 0, sizeof *run);
    run->segment = s;
    run->index = k;
    run->start = start;
    run->width = w->widths[k];
    run->groups = bcq__groups(w, k);
    run->used = planes && planes < s->bits ? planes : s->bits;
    p = run->used < s->bits && (s->precisions >> run->used & 1) ? run->used : 0;
    run->planes = bcq__segment_part(w, k, "planes", 0);
    bcq__find_numbers(w, k, "scale", &run->scale);
    bcq__find_numbers(w, k, "offset", &run->offset);
    run->zero = bcq__segment_part(w, k, "zero", 0);
    run->alpha = bcq__segment_part(w, k, "alpha", p);
    run->bias = bcq__segment_part(w, k, "bias", p);
    if (w->scheme->aligned64) {
        run->tile = bcq_part(w, "tile");
        run->extra = bcq_part(w, "tile_extra");
        run->meta = bcq_part(w, "tile_meta");
    }
}

/* Number `at` of a floating-point (or U8) part. */
static uint64_t bcq__at(const bcq_tensor *t, uint64_t at)
{
    return bcq__number(t->dtype, t->data + at * (bcq_dtype_bits(t->dtype) / 8));
}

/* Field a of row `row` of a packed part with `groups` fields a row. */
static unsigned bcq__field_at(const bcq_tensor *t, uint64_t row, uint64_t groups, uint64_t a, unsigned b)
{
    return bcq__field(t->data + row * 4 * bcq__ceil_div(groups * b, 32), a, b);
}

/* Section 8: a byte of type E8M0 or UE4M3. */
static uint64_t bcq__byte_number(bcq_byte_float type, unsigned byte)
{
    unsigned exponent = byte >> 3, digits = byte & 7;
    if (type == BCQ_E8M0)
        return bcq__power_of_two((int)byte - 127);
    if (exponent)
        return bcq__mul(bcq__from_integer(8 + digits), bcq__power_of_two((int)exponent - 10));
    return bcq__mul(bcq__from_integer(digits), bcq__power_of_two(-9));
}

/* Section 8, Scale and Offset, of row r of matrix e and group a. */
static uint64_t bcq__numbers_at(const bcq_weight *w, const bcq__run *run, const bcq_numbers *s,
                                const bcq__number_parts *parts, uint64_t e, uint64_t r, uint64_t a)
{
    static const unsigned char shift[3] = {6, 10, 13}, mask[3] = {15, 7, 7};
    uint64_t at = (e * w->rows + r) * run->groups + a, row_group, columns, shared, code, zero;
    if (!s->rows)
        return s->bytes ? bcq__byte_number(s->bytes, parts->plain->data[at]) : bcq__at(parts->plain, at);
    row_group = e * bcq__ceil_div(w->rows, s->rows) + r / s->rows;
    columns = bcq__ceil_div(run->groups, s->groups);
    shared = row_group * columns + a / s->groups;
    if (s->bytes)
        return bcq__mul(bcq__at(parts->scale, shared), bcq__byte_number(s->bytes, parts->codes->data[at]));
    if (parts->codes)
        code = bcq__field_at(parts->codes, e * w->rows + r, run->groups, a, s->bits);
    else
        code = bcq__u16(run->meta->data + 2 * ((e * w->rows + r) * (w->columns / 64) + a / 3)) >> shift[a % 3] &
               mask[a % 3];
    if (!parts->zero)
        zero = bcq__from_integer(s->zero_point);
    else if (parts->zero->dtype == BCQ_I32)
        zero = bcq__from_integer(bcq__field_at(parts->zero, row_group, columns, a / s->groups, s->bits));
    else
        zero = bcq__at(parts->zero, shared);
    return bcq__mul(bcq__at(parts->scale, shared), bcq__sub(bcq__from_integer(code), zero));
}

/* The integer zero point of an affine segment. */
static uint64_t bcq__zero_point(const bcq_weight *w, const bcq__run *run, uint64_t row, uint64_t a)
{
    const bcq_segment *s = run->segment;
    if (!s->zero_bits)
        return bcq__from_integer(s->zero_point);
    if (run->zero)
        return bcq__from_integer(bcq__field_at(run->zero, row, run->groups, a, s->zero_bits));
    return bcq__from_integer(bcq__u16(run->meta->data + 2 * (row * (w->columns / 64) + a / 3)) >> 2 * (a % 3) & 3);
}

/* Sections 8 and 8.1: the numbers of row r of matrix e and group a. */
static void bcq__read_group(const bcq_weight *w, const bcq__run *run, uint64_t e, uint64_t r, uint64_t a,
                            bcq__group *group)
{
    const bcq_segment *s = run->segment;
    uint64_t row = e * w->rows + r, largest, twice;
    unsigned i;
    if (s->encoding == BCQ_BCQ) {
        uint64_t planes = run->alpha->shape[w->rank - 2]; /* stored, perhaps more than are used */
        for (i = 0; i < run->used; i++)
            group->alpha[i] = bcq__at(run->alpha, ((e * planes + i) * w->rows + r) * run->groups + a);
        group->z = run->bias ? bcq__at(run->bias, row * run->groups + a) : 0;
        return;
    }
    group->scale = bcq__numbers_at(w, run, &s->scale, &run->scale, e, r, a);
    if (s->encoding == BCQ_AFFINE)
        group->zero = bcq__zero_point(w, run, row, a);
    else if (s->encoding == BCQ_OFFSET)
        group->zero = bcq__numbers_at(w, run, &s->offset, &run->offset, e, r, a);
    else if (s->encoding == BCQ_FLOAT_ZERO)
        group->zero = bcq__at(run->zero, row * run->groups + a);
    if (run->used == s->bits)
        return;
    for (i = 0; i < run->used; i++)
        group->alpha[i] = bcq__mul(group->scale, bcq__power_of_two((int)s->bits - 2 - (int)i));
    largest = bcq__from_integer((1u << s->bits) - 1);
    twice = bcq__mul(bcq__from_integer(2), group->zero);
    group->z = bcq__mul(group->scale, bcq__mul(bcq__sub(largest, twice), bcq__power_of_two(-1)));
}

/* The first `used` bits of the codes of row r of matrix e, by stored column of the segment. */
static void bcq__read_codes(const bcq_weight *w, const bcq__run *run, uint64_t e, uint64_t r, unsigned char *codes)
{
    unsigned q = run->segment->bits, i, bit;
    uint64_t j, words = bcq__ceil_div(run->width, 32), at, tile = (e * w->rows + r) * (w->columns / 64);
    uint32_t plane[8];
    if (!run->planes) {
        for (j = 0; j < run->width; j++) {
            if (run->index == 0)
                at = bcq__u32(run->tile->data + 4 * (4 * (tile + j / 48) + j % 48 / 16)) >> 2 * (j % 16) & 3;
            else if (j % 16 < 8)
                at = bcq__u32(run->tile->data + 4 * (4 * (tile + j / 16) + 3)) >> 4 * (j % 8) & 15;
            else
                at = bcq__u32(run->extra->data + 4 * (tile + j / 16)) >> 4 * (j % 8) & 15;
            codes[j] = (unsigned char)(at >> (q - run->used));
        }
        return;
    }
    for (j = 0; j < run->width; j += 32) {
        for (i = 0; i < run->used; i++) {
            at = ((e * q + i) * w->rows + r) * words + j / 32;
            plane[i] = bcq__u32(run->planes->data + 4 * at);
        }
        for (bit = 0; bit < 32 && j + bit < run->width; bit++) {
            unsigned code = 0;
            for (i = 0; i < run->used; i++)
                code = code << 1 | (plane[i] >> bit & 1);
            codes[j + bit] = (unsigned char)code;
        }
    }
}

/* E of one element, without outliers. */
static uint64_t bcq__element(const bcq__run *run, const bcq__group *group, unsigned code, bcq_dtype logical)
{
    uint64_t value;
    unsigned i, rounded;
    unsigned char bytes[4];
    if (run->segment->encoding == BCQ_BCQ || run->used < run->segment->bits) {
        value = group->z;
        for (i = 0; i < run->used; i++)
            value = code >> (run->used - 1 - i) & 1 ? bcq__add(value, group->alpha[i])
                                                    : bcq__sub(value, group->alpha[i]);
        return value;
    }
    if (run->segment->encoding == BCQ_TABLE) {
        int32_t level = run->segment->table[code];
        value = bcq__from_integer((uint64_t)(level < 0 ? -level : level)) | (level < 0 ? BCQ__SIGN : 0);
        return bcq__mul(group->scale, bcq__mul(value, bcq__power_of_two(run->segment->table_exponent)));
    }
    value = bcq__from_integer(code);
    if (run->segment->encoding == BCQ_OFFSET)
        return bcq__add(bcq__mul(group->scale, value), group->zero);
    value = bcq__sub(value, group->zero);
    if (run->segment->encoding == BCQ_FLOAT_ZERO) {
        rounded = bcq__round(value, logical);
        for (i = 0; i < 4; i++)
            bytes[i] = (unsigned char)(rounded >> 8 * i);
        value = bcq__number(logical, bytes);
    }
    return bcq__mul(group->scale, value);
}

/* E of row r of matrix e, by column; 0, or the rule that an index breaks. */
static int bcq__row_values(const bcq_weight *w, const bcq__run *runs, uint64_t e, uint64_t r, uint64_t *values,
                           unsigned char *codes)
{
    const bcq_tensor *perm = bcq_part(w, "perm"), *indptr, *indices, *added;
    bcq__group group;
    uint64_t j, column, i, end, a, of_code[256];
    unsigned k, code;
    memset(&group, 0, sizeof group);
    for (k = 0; k < w->scheme->segment_count; k++) {
        const bcq__run *run = runs + k;
        bcq__read_codes(w, run, e, r, codes);
        for (a = 0; a < run->groups; a++) {
            uint64_t g = run->segment->group_size ? run->segment->group_size : run->width;
            uint64_t first = a * g, count = run->width - first < g ? run->width - first : g;
            int table;
            table = count >= UINT64_C(1) << run->used; /* every code once is less work than every column */
            bcq__read_group(w, run, e, r, a, &group);
            for (code = 0; table && code < 1u << run->used; code++)
                of_code[code] = bcq__element(run, &group, code, w->dtype);
            for (j = first; j < first + count; j++) {
                column = run->start + j;
                if (perm)
                    column = bcq__u32(perm->data + 4 * (e * w->columns + column));
                if (column >= w->columns)
                    return 406;
                values[column] = table ? of_code[codes[j]] : bcq__element(run, &group, codes[j], w->dtype);
            }
        }
    }
    if (!w->scheme->outliers)
        return 0;
    indptr = bcq_part(w, "outlier_indptr");
    indices = bcq_part(w, "outlier_indices");
    added = bcq_part(w, "outlier_values");
    end = bcq__u32(indptr->data + 4 * (e * w->rows + r + 1));
    if (end > indices->shape[0])
        return 407;
    for (i = bcq__u32(indptr->data + 4 * (e * w->rows + r)); i < end; i++) {
        column = bcq__outlier_column(indices, i);
        if (column >= w->columns)
            return 408;
        values[column] = w->scheme->outliers_replace ? bcq__at(added, i) : bcq__add(values[column], bcq__at(added, i));
    }
    return 0;
}

int bcq_dequantize(bcq_weight *w, uint64_t index, uint64_t row_begin, uint64_t row_end, unsigned planes,
                   bcq_dtype dtype, void *out, size_t out_bytes, bcq_error *error)
{
    bcq__run runs[BCQ_MAX_SEGMENTS];
    unsigned char *at = (unsigned char *)out, *codes;
    uint64_t *values, r, c, bytes, start = 0;
    unsigned k;
    int code = 0;
    dtype = dtype ? dtype : w->dtype;
    bytes = bcq_dtype_bits(dtype) / 8;
    if (!bcq__is_float(dtype))
        return bcq__fail(error, BCQ_ERROR_ARGUMENT, "values are F16, BF16 or F32");
    if (index >= w->stack || row_begin > row_end || row_end > w->rows)
        return bcq__fail(error, BCQ_ERROR_ARGUMENT, "no such rows");
    if (!bcq__times(&bytes, row_end - row_begin, SIZE_MAX) || !bcq__times(&bytes, w->columns, SIZE_MAX) ||
        bytes > out_bytes)
        return bcq__fail(error, BCQ_ERROR_ARGUMENT, "the buffer is too small");
    for (k = 0; k < w->scheme->segment_count; k++) {
        const bcq_segment *s = w->scheme->segments + k;
        if (planes && planes < s->bits && s->encoding != BCQ_AFFINE && s->encoding != BCQ_BCQ)
            return bcq__fail(error, BCQ_ERROR_PLANES, "float-zero, offset and table have no value of fewer planes");
        bcq__prepare(w, k, planes, start, runs + k);
        start += w->widths[k];
    }
    BCQ__TRY(bcq_check(w, error));
    values = (uint64_t *)bcq__alloc(w->columns, sizeof *values + 1); /* E, and codes behind */
    if (!values)
        return bcq__no_memory(error);
    codes = (unsigned char *)(values + w->columns);
    for (r = row_begin; r < row_end && !code; r++) {
        code = bcq__row_values(w, runs, index, r, values, codes);
        for (c = 0; c < w->columns && !code; c++) {
            uint32_t rounded = bcq__round(values[c], dtype);
            uint16_t half = (uint16_t)rounded;
            if (dtype == BCQ_F32)
                memcpy(at, &rounded, 4);
            else
                memcpy(at, &half, 2);
            at += dtype == BCQ_F32 ? 4 : 2;
        }
    }
    BCQ_FREE(values);
    return code ? bcq__fail(error, code, "the content changed after it was checked") : 0;
}

void bcq_to_float(bcq_dtype dtype, const void *values, float *out, size_t count)
{
    size_t i, k, size = dtype == BCQ_F32 ? 4 : 2;
    for (i = 0; i < count && bcq__is_float(dtype); i++) {
        uint32_t bits = 0;
        uint16_t half = 0;
        unsigned char bytes[4];
        memcpy(size == 4 ? (void *)&bits : (void *)&half, (const unsigned char *)values + i * size, size);
        bits |= half;
        for (k = 0; k < 4; k++)
            bytes[k] = (unsigned char)(bits >> 8 * k);
        bits = bcq__round(bcq__number(dtype, bytes), BCQ_F32);
        memcpy(out + i, &bits, 4);
    }
}

/* ---- one file */

void bcq_close(bcq_file *file)
{
    if (!file)
        return;
    bcq__json_free(&file->header);
    bcq__json_free(&file->descriptor);
    BCQ_FREE(file->tensors);
    BCQ_FREE(file->by_name);
    BCQ_FREE(file->schemes);
    BCQ_FREE(file->segments);
    BCQ_FREE(file->weights);
    BCQ_FREE(file->parts);
#if defined(BCQ_USE_MMAP) && !defined(BCQ_NO_POSIX)
    if (file->mapped)
        munmap(file->owned, file->mapped);
    else
#endif
        BCQ_FREE(file->owned);
    BCQ_FREE(file);
}

const char *bcq_version(const bcq_file *file)
{
    return file->version;
}

size_t bcq_tensor_count(const bcq_file *file)
{
    return file->tensor_count;
}

const bcq_tensor *bcq_tensor_at(const bcq_file *file, size_t i)
{
    return i < file->tensor_count ? file->tensors + i : NULL;
}

const bcq_tensor *bcq_find_tensor(const bcq_file *file, const char *name)
{
    return bcq__find(file, bcq__text(name));
}

size_t bcq_weight_count(const bcq_file *file)
{
    return file->weight_count;
}

bcq_weight *bcq_weight_at(bcq_file *file, size_t i)
{
    return i < file->weight_count ? file->weights + i : NULL;
}

static bcq_weight *bcq__find_weight(const bcq_file *file, bcq__str name)
{
    uint32_t low = 0, high = file->weight_count;
    while (low < high) { /* a canonical descriptor lists them by name */
        uint32_t middle = low + (high - low) / 2;
        int order = bcq__compare(bcq__weight_name(file->weights + middle), name);
        if (!order)
            return file->weights + middle;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

bcq_weight *bcq_find_weight(bcq_file *file, const char *name)
{
    return bcq__find_weight(file, bcq__text(name));
}

/* Where bytes come from: memory, a stream, or a descriptor. */
typedef struct bcq__input {
    const unsigned char *memory;
    uint64_t size;
#ifdef BCQ_NO_POSIX
    FILE *stream;
#else
    int descriptor;
#endif
} bcq__input;

/* Exactly `bytes` bytes from where the input stands (memory: from `offset`), else BCQ_ERROR_IO. */
static int bcq__read(const bcq__input *in, uint64_t offset, void *to, uint64_t bytes, bcq_error *error)
{
    unsigned char *at = (unsigned char *)to;
    if (in->memory) {
        if (offset > in->size || bytes > in->size - offset)
            return bcq__fail(error, BCQ_ERROR_IO, "out of range");
        memcpy(at, in->memory + offset, (size_t)bytes);
        return 0;
    }
#ifdef BCQ_NO_POSIX
    if (fread(at, 1, (size_t)bytes, in->stream) != bytes)
        return bcq__fail(error, BCQ_ERROR_IO, "the file became shorter while it was read, or cannot be read");
#else
    while (bytes) {
        size_t step = bytes < (1u << 30) ? (size_t)bytes : (size_t)1 << 30;
        ssize_t got = read(in->descriptor, at, step);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return bcq__fail(error, BCQ_ERROR_IO, got ? "cannot be read: error %d" : "became shorter while it was read",
                             errno);
        at += got;
        bytes -= (uint64_t)got;
    }
#endif
    return 0;
}

/* V101 to V104, then the header's own rules; the input then stands at the data. */
static int bcq__read_head(bcq_file *f, const bcq__input *in, int bcq, bcq_error *error)
{
    unsigned char first[8];
    uint64_t length;
    if (in->size < 8)
        return bcq__fail(error, 101, "shorter than 8 bytes");
    BCQ__TRY(bcq__read(in, 0, first, 8, error));
    length = bcq__u64(first);
    if (length < 2 || length > BCQ__MAX_HEADER)
        return bcq__fail(error, 102, "a header of %llu bytes", (unsigned long long)length);
    if (length > in->size - 8)
        return bcq__fail(error, 103, "the file ends inside the header");
    f->header.size = (size_t)length;
    f->header.text = (char *)bcq__alloc(length, 1);
    if (!f->header.text)
        return bcq__no_memory(error);
    BCQ__TRY(bcq__read(in, 8, f->header.text, length, error));
    if (f->header.text[0] != '{')
        return bcq__fail(error, 104, "the header does not begin with {");
    f->data_bytes = in->size - 8 - length;
    return bcq__read_container(f, bcq, error);
}

/* The data, once the header has said that every byte of it is accounted for. */
static int bcq__read_data(bcq_file *f, const bcq__input *in, bcq_error *error)
{
    uint32_t i;
    uint64_t start = 8 + (uint64_t)f->header.size;
    if (in->memory) {
        f->data = in->memory + start;
    } else {
#if defined(BCQ_USE_MMAP) && !defined(BCQ_NO_POSIX)
        if (in->size > SIZE_MAX)
            return bcq__no_memory(error);
        f->owned = mmap(NULL, (size_t)in->size, PROT_READ, MAP_PRIVATE, in->descriptor, 0);
        if (f->owned == MAP_FAILED) {
            f->owned = NULL;
            return bcq__fail(error, BCQ_ERROR_IO, "cannot be mapped: error %d", errno);
        }
        f->mapped = (size_t)in->size;
        f->data = (const unsigned char *)f->owned + start;
#else
        f->owned = f->data_bytes < SIZE_MAX ? BCQ_MALLOC((size_t)f->data_bytes + 1) : NULL;
        if (!f->owned)
            return bcq__no_memory(error);
        BCQ__TRY(bcq__read(in, start, f->owned, f->data_bytes, error));
        f->data = (const unsigned char *)f->owned;
#endif
    }
    for (i = 0; i < f->tensor_count; i++)
        f->tensors[i].data = f->data + f->tensors[i].begin;
    return 0;
}

static int bcq__read_file(bcq_file *f, const bcq__input *in, int flags, bcq_error *error)
{
    bcq__want *list;
    uint32_t i;
    int code;
    BCQ__TRY(bcq__read_head(f, in, 1, error));
    BCQ__TRY(bcq__read_descriptor(f, error));
    list = (bcq__want *)bcq__alloc(BCQ__MAX_PARTS, sizeof *list);
    code = list ? bcq__collect(f, list, error) : bcq__no_memory(error);
    BCQ_FREE(list);
    BCQ__TRY(code);
    BCQ__TRY(bcq__read_data(f, in, error));
    for (i = 0; flags & BCQ_CHECK_ALL && i < f->weight_count; i++)
        BCQ__TRY(bcq_check(f->weights + i, error));
    return 0;
}

static int bcq__open_input(const bcq__input *in, int flags, bcq_file **out, bcq_error *error)
{
    bcq_file *f = (bcq_file *)bcq__alloc(1, sizeof *f);
    int code = f ? bcq__read_file(f, in, flags, error) : bcq__no_memory(error);
    if (code)
        bcq_close(f);
    else
        *out = f;
    return code;
}

int bcq_open_memory(const void *data, size_t size, int flags, bcq_file **out, bcq_error *error)
{
    bcq__input in;
    memset(&in, 0, sizeof in);
    *out = NULL;
    in.memory = size ? (const unsigned char *)data : (const unsigned char *)"";
    in.size = size;
    return bcq__open_input(&in, flags, out, error);
}

#ifdef BCQ_NO_POSIX

int bcq_open(const char *path, int flags, bcq_file **out, bcq_error *error)
{
    bcq__input in;
    long size;
    int code;
    memset(&in, 0, sizeof in);
    *out = NULL;
    in.stream = fopen(path, "rb");
    if (!in.stream)
        return bcq__fail(error, BCQ_ERROR_IO, "cannot be opened");
    if (fseek(in.stream, 0, SEEK_END) || (size = ftell(in.stream)) < 0 || fseek(in.stream, 0, SEEK_SET)) {
        code = bcq__fail(error, BCQ_ERROR_IO, "its size cannot be found");
    } else {
        in.size = (uint64_t)size;
        code = bcq__open_input(&in, flags, out, error);
    }
    fclose(in.stream);
    return code;
}

#else

/* V508: opened only if it is a regular file, and without ever waiting for one that is not. */
static int bcq__open_regular(const char *path, bcq__input *in, bcq_error *error)
{
    struct stat status;
    memset(in, 0, sizeof *in);
    in->descriptor = -1;
    if (stat(path, &status))
        return bcq__fail(error, BCQ_ERROR_IO, "cannot be found: error %d", errno);
    if (!S_ISREG(status.st_mode))
        return bcq__fail(error, 508, "not a regular file");
    in->descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (in->descriptor < 0)
        return bcq__fail(error, BCQ_ERROR_IO, "cannot be opened: error %d", errno);
    if (fstat(in->descriptor, &status) || !S_ISREG(status.st_mode) || status.st_size < 0) {
        close(in->descriptor);
        in->descriptor = -1;
        return bcq__fail(error, 508, "not a regular file");
    }
    in->size = (uint64_t)status.st_size;
    return 0;
}

int bcq_open(const char *path, int flags, bcq_file **out, bcq_error *error)
{
    bcq__input in;
    int code;
    *out = NULL;
    BCQ__TRY(bcq__open_regular(path, &in, error));
    code = bcq__open_input(&in, flags, out, error);
    close(in.descriptor);
    return code;
}

/* ---- folder (section 9) */

typedef struct bcq__list { /* strings that grow in number */
    char **items;
    size_t count, capacity;
} bcq__list;

struct bcq_folder {
    char *root;          /* resolved */
    bcq__list listing;   /* every file: path relative to the root, sorted */
    bcq__list uncovered; /* those that the manifest does not name */
    bcq__list names;     /* model files */
    bcq_file **files;    /* as many */
    const bcq_tensor **tensors; /* of all files, by name */
    uint32_t tensor_count;
    bcq_weight **weights; /* of all files, by name */
    uint32_t *weight_file;
    uint32_t weight_count;
    bcq__json manifest;
    bcq__tables tables; /* of the manifest */
    bcq__str manifest_text; /* owned */
};

static void bcq__list_free(bcq__list *list)
{
    size_t i;
    for (i = 0; i < list->count; i++)
        BCQ_FREE(list->items[i]);
    BCQ_FREE(list->items);
    memset(list, 0, sizeof *list);
}

/* Appends a + b + c as one string; 0 without memory. */
static int bcq__list_add(bcq__list *list, bcq__str a, const char *b, bcq__str c)
{
    size_t middle = strlen(b);
    char *item, **more;
    if (list->count == list->capacity) {
        more = (char **)bcq__alloc((uint64_t)list->capacity * 2 + 16, sizeof *more);
        if (!more)
            return 0;
        if (list->count)
            memcpy(more, list->items, list->count * sizeof *more);
        BCQ_FREE(list->items);
        list->items = more;
        list->capacity = list->capacity * 2 + 16;
    }
    item = (char *)bcq__alloc((uint64_t)a.bytes + middle + c.bytes + 1, 1);
    if (!item)
        return 0;
    if (a.bytes)
        memcpy(item, a.at, a.bytes);
    memcpy(item + a.bytes, b, middle);
    if (c.bytes)
        memcpy(item + a.bytes + middle, c.at, c.bytes);
    list->items[list->count++] = item;
    return 1;
}

static int bcq__by_item(const void *context, uint32_t a, uint32_t b)
{
    const bcq__list *list = (const bcq__list *)context;
    return strcmp(list->items[a], list->items[b]);
}

static void bcq__tables_free(bcq__tables *t)
{
    BCQ_FREE(t->schemes);
    BCQ_FREE(t->segments);
    BCQ_FREE(t->entries);
    memset(t, 0, sizeof *t);
}

/* Sorts; with `unique` equal ones are kept once. 0 without memory. */
static int bcq__list_sort(bcq__list *list, int unique)
{
    uint32_t *order = bcq__sorted(list->count, bcq__by_item, list);
    char **items = (char **)bcq__alloc(list->capacity, sizeof *items);
    size_t i, n = 0;
    if (!order || !items) {
        BCQ_FREE(order);
        BCQ_FREE(items);
        return 0;
    }
    for (i = 0; i < list->count; i++) {
        char *item = list->items[order[i]];
        if (unique && n && strcmp(items[n - 1], item) == 0)
            BCQ_FREE(item);
        else
            items[n++] = item;
    }
    BCQ_FREE(order);
    BCQ_FREE(list->items);
    list->items = items;
    list->count = n;
    return 1;
}

/* The position of a string in a sorted list; its length where it is not there. */
static size_t bcq__list_find(const bcq__list *sorted, const char *item)
{
    size_t low = 0, high = sorted->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(sorted->items[middle], item);
        if (!order)
            return middle;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return sorted->count;
}

/* root/name as a new string. */
static char *bcq__join(const char *root, const char *name)
{
    size_t a = strlen(root), b = strlen(name);
    char *path = (char *)bcq__alloc((uint64_t)a + b + 2, 1);
    if (path) {
        memcpy(path, root, a);
        path[a] = '/';
        memcpy(path + a + 1, name, b);
    }
    return path;
}

#define BCQ__PATH 8192 /* bytes of a path while links are resolved */

/* The absolute path without links, as far as it exists, goes to `out` (BCQ__PATH bytes); 0 where it has none. */
static int bcq__resolve(const char *path, char *out, char *rest)
{
    char target[BCQ__PATH];
    struct stat status;
    size_t n, used = 0, length = strlen(path);
    int links = 0;
    if (length >= BCQ__PATH / 2)
        return 0;
    memcpy(rest, path, length + 1);
    out[0] = 0;
    if (path[0] != '/') {
        if (!getcwd(out, BCQ__PATH / 2))
            return 0;
        used = strcmp(out, "/") == 0 ? 0 : strlen(out);
        out[used] = 0;
    }
    while (rest[0]) {
        n = strcspn(rest, "/");
        if (n == 2 && rest[0] == '.' && rest[1] == '.') {
            while (used && out[--used] != '/')
                ;
            out[used] = 0;
        } else if (n && !(n == 1 && rest[0] == '.')) {
            size_t before = used;
            ssize_t bytes;
            if (used + n + 2 > BCQ__PATH)
                return 0;
            out[used] = '/';
            memcpy(out + used + 1, rest, n);
            used += n + 1;
            out[used] = 0;
            if (lstat(out, &status) == 0 && S_ISLNK(status.st_mode)) {
                bytes = readlink(out, target, sizeof target - 1);
                length = strlen(rest + n);
                if (bytes < 0 || ++links > 40 || (size_t)bytes + length + 2 > BCQ__PATH)
                    return 0;
                memmove(rest + bytes, rest + n, length + 1);
                memcpy(rest, target, (size_t)bytes);
                used = rest[0] == '/' ? 0 : before;
                out[used] = 0;
                continue;
            }
        }
        memmove(rest, rest + n + (rest[n] == '/'), strlen(rest + n + (rest[n] == '/')) + 1);
    }
    if (!used)
        memcpy(out, "/", 2);
    return 1;
}

static int bcq__is_below(const char *path, const char *home, size_t home_bytes)
{
    return strncmp(path, home, home_bytes) == 0 && (path[home_bytes] == 0 || path[home_bytes] == '/' || home_bytes == 1);
}

/* V507: inside the folder, or from snapshots/<revision>/ into the blobs/ next to snapshots or next to the cache entry. */
static int bcq__stays_inside(const char *link, const char *root)
{
    char target[BCQ__PATH], work[BCQ__PATH], home[BCQ__PATH];
    const char *revision = strrchr(root, '/');
    size_t bytes;
    int level;
    if (!bcq__resolve(link, target, work))
        return 0;
    if (bcq__is_below(target, root, strlen(root)))
        return 1;
    bytes = revision ? (size_t)(revision - root) : 0;
    if (bytes < 10 || bytes > sizeof home || memcmp(root + bytes - 10, "/snapshots", 10) != 0)
        return 0;
    bytes -= 10;
    for (level = 0; level < 2; level++) {
        memcpy(home, root, bytes);
        memcpy(home + bytes, "/blobs", 7);
        if (bcq__is_below(target, home, bytes + 6))
            return 1;
        while (bytes && root[--bytes] != '/')
            ;
    }
    return 0;
}

/* One folder of the listing; folders in it go to `folders`, files to `files`. */
static int bcq__list_folder(const char *root, const char *folder, bcq__list *folders, bcq__list *files, bcq_error *error)
{
    char *place = bcq__join(root, folder), *path;
    DIR *stream = place ? opendir(place) : NULL;
    struct dirent *item;
    struct stat status;
    int code = 0;
    if (!stream)
        code = place ? bcq__fail(error, BCQ_ERROR_IO, "the folder cannot be listed: error %d", errno)
                     : bcq__no_memory(error);
    while (!code && (item = readdir(stream)) != NULL) {
        bcq__str name = bcq__text(item->d_name), parent = bcq__text(folder);
        bcq__list *to = NULL;
        if (strcmp(item->d_name, ".") == 0 || strcmp(item->d_name, "..") == 0 || (!*folder && item->d_name[0] == '.'))
            continue;
        path = bcq__join(place, item->d_name);
        if (!path) {
            code = bcq__no_memory(error);
        } else if (lstat(path, &status) == 0) {
            if (S_ISLNK(status.st_mode)) {
                if (!bcq__stays_inside(path, root))
                    code = bcq__bad(error, 507, name, "a link that leaves the folder");
                else if (stat(path, &status) == 0 && S_ISREG(status.st_mode))
                    to = files;
            } else if (S_ISDIR(status.st_mode)) {
                to = folders;
            } else if (S_ISREG(status.st_mode)) {
                to = files;
            }
        }
        if (!code && to && !bcq__list_add(to, parent, *folder ? "/" : "", name))
            code = bcq__no_memory(error);
        BCQ_FREE(path);
    }
    if (stream)
        closedir(stream);
    BCQ_FREE(place);
    return code;
}

static int bcq__list_files(const char *root, bcq__list *files, bcq_error *error)
{
    bcq__list folders = {NULL, 0, 0};
    bcq__str nothing = {"", 0};
    size_t next = 0;
    int code = bcq__list_add(&folders, nothing, "", nothing) ? 0 : bcq__no_memory(error);
    for (; !code && next < folders.count; next++)
        code = bcq__list_folder(root, folders.items[next], &folders, files, error);
    if (!code && !bcq__list_sort(files, 0))
        code = bcq__no_memory(error);
    bcq__list_free(&folders);
    return code;
}

/* *status of root/name, links followed: 0, BCQ_ERROR_IO where nothing is there, BCQ_ERROR_MEMORY. */
static int bcq__status(const char *root, const char *name, struct stat *status)
{
    char *path = bcq__join(root, name);
    int code = !path ? BCQ_ERROR_MEMORY : stat(path, status) ? BCQ_ERROR_IO : 0;
    BCQ_FREE(path);
    return code;
}

/* A JSON file of the folder that must exist (else rule `missing`), be regular (V508), not too long and without too many
   values (else `too_long`).
   Its bytes, ended by a zero byte, belong to the caller. */
static int bcq__read_member(const char *root, const char *name, int missing, uint64_t limit, int too_long, bcq__str *out,
                            bcq_error *error)
{
    char *path, *text = NULL;
    struct stat status;
    bcq__input in;
    uint64_t i, items = 0;
    int code = bcq__status(root, name, &status);
    out->at = NULL;
    if (code == BCQ_ERROR_IO)
        return bcq__bad(error, missing, bcq__text(name), "does not exist");
    path = code ? NULL : bcq__join(root, name);
    if (!path)
        return bcq__no_memory(error);
    code = bcq__open_regular(path, &in, error);
    BCQ_FREE(path);
    BCQ__TRY(code);
    if (in.size > limit)
        code = bcq__bad(error, too_long, bcq__text(name), "too long");
    if (!code) {
        text = (char *)bcq__alloc(in.size, 1);
        code = text ? bcq__read(&in, 0, text, in.size, error) : bcq__no_memory(error);
    }
    close(in.descriptor);
    for (i = 0; !code && i < in.size; i++)
        items += text[i] == ',' || text[i] == '[' || text[i] == '{';
    if (items > BCQ__MAX_JSON_ITEMS)
        code = bcq__bad(error, too_long, bcq__text(name), "too many values");
    if (code) {
        BCQ_FREE(text);
        return code;
    }
    out->at = text;
    out->bytes = (size_t)in.size;
    return 0;
}

/* V502: [A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors */
static int bcq__is_shard_name(bcq__str s)
{
    size_t i;
    if (s.bytes < 13 || memcmp(s.at + s.bytes - 12, ".safetensors", 12) != 0)
        return 0;
    for (i = 0; i < s.bytes; i++) {
        char c = s.at[i];
        int letter = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
        if (!letter && (i == 0 || (c != '.' && c != '-')))
            return 0;
    }
    return 1;
}

/* V501, V502, V503 and V506: the index, if there is one; *map is the node of weight_map, or 0. */
static int bcq__read_index(const char *root, bcq__json *index, uint32_t *map, bcq_error *error)
{
    static const char name[] = "model.safetensors.index.json";
    static const bcq__rules rules = {501, 501, 501};
    bcq__str text;
    uint32_t i, node;
    struct stat status;
    int found = bcq__status(root, name, &status), single = bcq__status(root, "model.safetensors", &status);
    *map = 0;
    if (found == BCQ_ERROR_MEMORY || single == BCQ_ERROR_MEMORY)
        return bcq__no_memory(error);
    if (found)
        return 0;
    if (!single)
        return bcq__fail(error, 506, "both model.safetensors and an index");
    BCQ__TRY(bcq__read_member(root, name, 501, BCQ__MAX_JSON_FILE, 501, &text, error));
    index->text = (char *)(uintptr_t)text.at;
    index->size = text.bytes;
    BCQ__TRY(bcq__parse(index, BCQ__KIND_NUMBERS, rules, error));
    *map = bcq__get(index, 0, "weight_map");
    if (bcq__type(index, bcq__get(index, 0, "metadata")) != BCQ__OBJECT || bcq__type(index, *map) != BCQ__OBJECT)
        return bcq__fail(error, 501, "the index has no object metadata or no object weight_map");
    for (i = 0, node = *map + 1; i < index->nodes[*map].count; i++, node = index->nodes[node + 1].next)
        if (index->nodes[node + 1].type != BCQ__STRING)
            return bcq__fail(error, 501, "weight_map is not an object of strings");
    for (i = 0, node = *map + 1; i < index->nodes[*map].count; i++, node = index->nodes[node + 1].next)
        if (!bcq__is_shard_name(bcq__string(index, node + 1)))
            return bcq__bad(error, 502, bcq__string(index, node + 1), "a file name that the index may not hold");
    if (!index->nodes[*map].count)
        return bcq__fail(error, 503, "the index names no file");
    return 0;
}

static int bcq__by_tensor(const void *context, uint32_t a, uint32_t b)
{
    const bcq_tensor *const *t = (const bcq_tensor *const *)context;
    return bcq__compare(bcq__tensor_name(t[a]), bcq__tensor_name(t[b]));
}

static int bcq__by_weight(const void *context, uint32_t a, uint32_t b)
{
    bcq_weight *const *w = (bcq_weight *const *)context;
    return bcq__compare(bcq__weight_name(w[a]), bcq__weight_name(w[b]));
}

/* Tensors and weights of all files, by name. */
static int bcq__gather(bcq_folder *folder, bcq_error *error)
{
    uint64_t tensors = 0, weights = 0, at = 0, k = 0;
    uint32_t i, *order;
    size_t n;
    const bcq_tensor **found;
    bcq_weight **found_weights;
    uint32_t *file;
    for (n = 0; n < folder->names.count; n++) {
        tensors += folder->files[n]->tensor_count;
        weights += folder->files[n]->weight_count;
    }
    folder->tensors = (const bcq_tensor **)bcq__alloc(tensors, sizeof *folder->tensors);
    folder->weights = (bcq_weight **)bcq__alloc(weights, sizeof *folder->weights);
    folder->weight_file = (uint32_t *)bcq__alloc(weights, sizeof *folder->weight_file);
    found = (const bcq_tensor **)bcq__alloc(tensors, sizeof *found);
    found_weights = (bcq_weight **)bcq__alloc(weights, sizeof *found_weights);
    file = (uint32_t *)bcq__alloc(weights, sizeof *file);
    order = NULL;
    if (tensors <= UINT32_MAX && folder->tensors && folder->weights && folder->weight_file && found && found_weights &&
        file) {
        for (n = 0; n < folder->names.count; n++) {
            for (i = 0; i < folder->files[n]->tensor_count; i++)
                found[at++] = folder->files[n]->tensors + i;
            for (i = 0; i < folder->files[n]->weight_count; i++) {
                file[k] = (uint32_t)n;
                found_weights[k++] = folder->files[n]->weights + i;
            }
        }
        order = bcq__sorted(tensors, bcq__by_tensor, found);
        for (i = 0; order && i < tensors; i++)
            folder->tensors[i] = found[order[i]];
    }
    if (order) {
        BCQ_FREE(order);
        order = bcq__sorted(weights, bcq__by_weight, found_weights);
        for (i = 0; order && i < weights; i++) {
            folder->weights[i] = found_weights[order[i]];
            folder->weight_file[i] = file[order[i]];
        }
    }
    folder->tensor_count = order ? (uint32_t)tensors : 0;
    folder->weight_count = order ? (uint32_t)weights : 0;
    n = order != NULL;
    BCQ_FREE(order);
    BCQ_FREE(found);
    BCQ_FREE(found_weights);
    BCQ_FREE(file);
    return n ? 0 : bcq__no_memory(error);
}

/* V504 and V505 */
static int bcq__check_index(const bcq_folder *folder, const bcq__json *index, uint32_t map, bcq_error *error)
{
    uint32_t i, n = 0, count = map ? index->nodes[map].count : 0, *keys = map ? bcq__sorted_keys(index, map) : NULL;
    size_t file;
    int good = 1, twice = 0;
    if (map && !keys)
        return bcq__no_memory(error);
    for (i = 0; i < folder->tensor_count; i++) {
        if (i && bcq__equal(bcq__tensor_name(folder->tensors[i - 1]), bcq__tensor_name(folder->tensors[i]))) {
            twice = 1;
            continue;
        }
        good = good && (!map || (n < count && bcq__equal(bcq__string(index, keys[n]),
                                                         bcq__tensor_name(folder->tensors[i]))));
        n++;
    }
    good = good && (!map || n == count);
    for (i = 0; good && i < count; i++) {
        file = bcq__list_find(&folder->names, bcq__string(index, keys[i] + 1).at);
        good = file < folder->names.count && bcq__find(folder->files[file], bcq__string(index, keys[i]));
    }
    BCQ_FREE(keys);
    if (!good)
        return bcq__fail(error, 504, "the index does not name exactly the tensors of the files");
    return twice ? bcq__fail(error, 505, "a tensor is in two files") : 0;
}

/* V214 across the files: both lists are sorted. */
static int bcq__check_claims(const bcq_folder *folder, bcq_error *error)
{
    uint32_t i, k = 0;
    for (i = 0; i < folder->weight_count; i++) {
        bcq__str name = bcq__weight_name(folder->weights[i]);
        while (k < folder->tensor_count && bcq__compare(bcq__tensor_name(folder->tensors[k]), name) < 0)
            k++;
        if ((k < folder->tensor_count && bcq__equal(bcq__tensor_name(folder->tensors[k]), name)) ||
            (i && bcq__equal(bcq__weight_name(folder->weights[i - 1]), name)))
            return bcq__bad(error, 214, name, "is the name of something else in the folder");
    }
    return 0;
}

/* Section 9.1: all model files. */
static int bcq__read_shards(bcq_folder *folder, const bcq__json *index, uint32_t map, int flags, bcq_error *error)
{
    bcq__str nothing = {"", 0};
    struct stat status;
    uint32_t i, node = map + 1;
    size_t n;
    int good = map || bcq__list_add(&folder->names, bcq__text("model.safetensors"), "", nothing);
    for (i = 0; map && good && i < index->nodes[map].count; i++, node = index->nodes[node + 1].next) {
        bcq__str name = bcq__string(index, node + 1);
        bcq__list *names = &folder->names; /* neighbours are often in one file */
        if (!names->count || !bcq__equal(bcq__text(names->items[names->count - 1]), name))
            good = bcq__list_add(names, name, "", nothing);
    }
    if (!good || !bcq__list_sort(&folder->names, 1))
        return bcq__no_memory(error);
    for (n = 0; n < folder->names.count; n++) {
        int code = bcq__status(folder->root, folder->names.items[n], &status);
        if (code)
            return code == BCQ_ERROR_MEMORY
                       ? bcq__no_memory(error)
                       : bcq__bad(error, 503, bcq__text(folder->names.items[n]), "does not exist");
    }
    folder->files = (bcq_file **)bcq__alloc(folder->names.count, sizeof *folder->files);
    if (!folder->files)
        return bcq__no_memory(error);
    for (n = 0; n < folder->names.count; n++) {
        char *path = bcq__join(folder->root, folder->names.items[n]);
        int code = path ? bcq_open(path, flags, folder->files + n, error) : bcq__no_memory(error);
        BCQ_FREE(path);
        BCQ__TRY(code);
    }
    BCQ__TRY(bcq__gather(folder, error));
    BCQ__TRY(bcq__check_index(folder, index, map, error));
    BCQ__TRY(bcq__check_claims(folder, error));
    for (n = 1; n < folder->names.count; n++)
        if (strcmp(folder->files[n]->version, folder->files[0]->version) != 0)
            return bcq__fail(error, 513, "the files state different versions");
    return 0;
}

/* V510 to V512 */
static int bcq__check_config(const bcq_folder *folder, bcq_error *error)
{
    static const bcq__rules rules = {511, 511, 511};
    bcq__json d;
    bcq__str text;
    uint32_t section, version;
    int code, good;
    BCQ__TRY(bcq__read_member(folder->root, "config.json", 510, BCQ__MAX_CONFIG, 511, &text, error));
    memset(&d, 0, sizeof d);
    d.text = (char *)(uintptr_t)text.at;
    d.size = text.bytes;
    code = bcq__parse(&d, BCQ__KIND_CONFIG, rules, error);
    if (!code) {
        section = bcq__get(&d, 0, "quantization_config");
        good = section && bcq__is(&d, bcq__get(&d, section, "quant_method"), "bcq");
        version = good ? bcq__get(&d, section, "format_version") : 0;
        good = good && bcq__type(&d, version) == BCQ__STRING &&
               (!folder->names.count || bcq__is(&d, version, folder->files[0]->version));
        if (!good)
            code = bcq__fail(error, 512, "quantization_config does not say bcq and the version of the files");
    }
    bcq__json_free(&d);
    return code;
}

/* ---- manifest (section 9.3) */

static int bcq__is_hex(const bcq__json *d, uint32_t node)
{
    bcq__str s;
    size_t i;
    if (bcq__type(d, node) != BCQ__STRING)
        return 0;
    s = bcq__string(d, node);
    for (i = 0; i < s.bytes; i++)
        if (!((s.at[i] >= '0' && s.at[i] <= '9') || (s.at[i] >= 'a' && s.at[i] <= 'f')))
            return 0;
    return s.bytes == 64;
}

/* Relative, no component empty, `.` or `..`, no backslash, no U+0000. */
static int bcq__is_path(bcq__str s)
{
    size_t i, start = 0;
    for (i = 0; i <= s.bytes; i++) {
        if (i < s.bytes && (s.at[i] == '\\' || s.at[i] == 0))
            return 0;
        if (i == s.bytes || s.at[i] == '/') {
            size_t n = i - start;
            if (n == 0 || (n == 1 && s.at[start] == '.') || (n == 2 && s.at[start] == '.' && s.at[start + 1] == '.'))
                return 0;
            start = i + 1;
        }
    }
    return 1;
}

/* An object path -> size and sha256, with `kind` where `kinds` is set. */
static int bcq__is_file_table(const bcq__json *d, uint32_t table, int kinds)
{
    static const char *const names[] = {"size", "sha256", "kind", NULL};
    static const char *const two[] = {"size", "sha256", NULL};
    uint32_t i, node = table + 1, v[3];
    int64_t size;
    if (bcq__type(d, table) != BCQ__OBJECT)
        return 0;
    for (i = 0; i < d->nodes[table].count; i++, node = d->nodes[node + 1].next)
        if (!bcq__is_path(bcq__string(d, node)) || !bcq__fields(d, node + 1, kinds ? names : two, kinds ? 3 : 2, v) ||
            !bcq__in_range(d, v[0], 0, BCQ__MAX_INTEGER, &size) || !bcq__is_hex(d, v[1]) ||
            (kinds && !bcq__is(d, v[2], "verbatim") && !bcq__is(d, v[2], "safetensors") && !bcq__is(d, v[2], "gguf")))
            return 0;
    return 1;
}

/* V601 to V603, V205 and V206: the manifest by itself. */
static int bcq__read_manifest(bcq_folder *folder, bcq_error *error)
{
    static const char *const names[] = {"version", "generator", "features", "schemes", "weights",
                                        "files", "sha256", "source", "ignorable", NULL};
    static const char *const generator_names[] = {"name", "version", NULL};
    static const char *const source_names[] = {"format", "files", NULL};
    static const bcq__rules rules = {602, 602, 602};
    bcq__json *d = &folder->manifest;
    uint32_t v[9], g[2], s[2] = {0, 0}, i, after;
    bcq__str name = bcq__text("bcq_manifest.json");
    char hex[65];
    bcq__sha sha;
    BCQ__TRY(bcq__read_member(folder->root, name.at, 601, BCQ__MAX_JSON_FILE, 602, &folder->manifest_text, error));
    BCQ__TRY(bcq__parse_copy(d, folder->manifest_text, BCQ__KIND_LIMITED, rules, error));
    BCQ__TRY(bcq__check_version(d, error));
    if (!bcq__is_canonical(d, "\n"))
        return bcq__bad(error, 602, name, "not canonical JSON and one line feed");
    if (!bcq__fields(d, 0, names, 7, v) || !bcq__fields(d, v[1], generator_names, 2, g) ||
        bcq__type(d, g[0]) != BCQ__STRING || bcq__type(d, g[1]) != BCQ__STRING)
        return bcq__bad(error, 602, name, "keys that are missing, unknown or malformed");
    BCQ__TRY(bcq__read_tables(d, 1, 602, &folder->tables, error));
    BCQ__TRY(bcq__check_use(d, &folder->tables, 602, 602, error));
    for (i = 0; i < folder->tables.entry_count; i++) {
        const bcq__entry *entry = folder->tables.entries + i;
        if (bcq__type(d, entry->file) != BCQ__STRING || !bcq__is_weight_name(bcq__string(d, entry->key)) ||
            (entry->widths != 0) != (folder->tables.schemes[entry->scheme].segment_count > 1))
            return bcq__bad(error, 602, name, "name, file or widths of a weight is malformed");
    }
    if (!bcq__is_file_table(d, v[5], 0) ||
        (v[7] && (!bcq__fields(d, v[7], source_names, 2, s) || bcq__type(d, s[0]) != BCQ__STRING ||
                  !bcq__is_file_table(d, s[1], 0))) ||
        !bcq__is_hex(d, v[6]))
        return bcq__bad(error, 602, name, "files, source or sha256 is malformed");
    /* The text is canonical: without the member sha256 (there is always one after it) it is that of the rest. */
    after = d->nodes[v[6]].off + 64 + 2;
    bcq__sha_start(&sha);
    bcq__sha_add(&sha, d->source, d->nodes[v[6] - 1].off - 1);
    bcq__sha_add(&sha, d->source + after, d->size - 1 - after);
    bcq__sha_hex(&sha, hex);
    return bcq__is(d, v[6], hex) ? 0 : bcq__bad(error, 603, name, "its own digest is wrong");
}

/* SHA-256 of a file of the folder. */
static int bcq__file_digest(const char *root, const char *name, char hex[65], bcq_error *error)
{
    unsigned char buffer[16384];
    char *path = bcq__join(root, name);
    bcq__input in;
    bcq__sha sha;
    uint64_t done;
    int code;
    if (!path)
        return bcq__no_memory(error);
    code = bcq__open_regular(path, &in, error);
    BCQ_FREE(path);
    BCQ__TRY(code);
    bcq__sha_start(&sha);
    for (done = 0; !code && done < in.size;) {
        uint64_t step = in.size - done < sizeof buffer ? in.size - done : sizeof buffer;
        code = bcq__read(&in, done, buffer, step, error);
        bcq__sha_add(&sha, buffer, step);
        done += step;
    }
    close(in.descriptor);
    bcq__sha_hex(&sha, hex);
    return code;
}

/* 1: the file has the size that the node states, 0: it has not, BCQ_ERROR_MEMORY. */
static int bcq__has_size(const bcq_folder *folder, const char *name, const bcq__json *d, uint32_t node)
{
    struct stat status;
    int64_t stated = 0;
    int code = bcq__status(folder->root, name, &status);
    if (code == BCQ_ERROR_MEMORY)
        return code;
    return !code && bcq__integer(d, node, &stated) && (int64_t)status.st_size == stated;
}

/* V604, then V609: files of the manifest against those of the folder, both sorted. */
static int bcq__match_files(bcq_folder *folder, const bcq__json *d, uint32_t table, bcq_error *error)
{
    bcq__str nothing = {"", 0}, unnamed = {NULL, 0};
    uint32_t i, node = table + 1;
    size_t k = 0;
    for (i = 0; i <= d->nodes[table].count; i++) {
        int last = i == d->nodes[table].count;
        for (; k < folder->listing.count; k++) {
            bcq__str name = bcq__text(folder->listing.items[k]);
            if (!last && bcq__compare(name, bcq__string(d, node)) >= 0)
                break;
            if (strcmp(name.at, "bcq_manifest.json") == 0)
                continue;
            if (strcmp(name.at, "config.json") == 0 || strcmp(name.at, "model.safetensors.index.json") == 0 ||
                strncmp(name.at, "bcq_source/", 11) == 0 ||
                bcq__list_find(&folder->names, name.at) < folder->names.count)
                unnamed = name;
            else if (!bcq__list_add(&folder->uncovered, name, "", nothing))
                return bcq__no_memory(error);
        }
        if (last)
            break;
        if (k >= folder->listing.count || !bcq__is(d, node, folder->listing.items[k]) ||
            bcq__is(d, node, "bcq_manifest.json"))
            return bcq__bad(error, 604, bcq__string(d, node), "the manifest names it, and it is no file of the folder");
        node = d->nodes[node + 1].next;
        k++;
    }
    return unnamed.at ? bcq__bad(error, 609, unnamed, "the manifest does not name it") : 0;
}

/* V604 to V606 and V609 */
static int bcq__check_files(bcq_folder *folder, int flags, bcq_error *error)
{
    const bcq__json *d = &folder->manifest;
    uint32_t table = bcq__get(d, 0, "files"), i, node, count = d->nodes[table].count;
    char hex[65];
    BCQ__TRY(bcq__match_files(folder, d, table, error));
    for (i = 0, node = table + 1; i < count; i++, node = d->nodes[node + 1].next) {
        int right = bcq__has_size(folder, bcq__string(d, node).at, d, bcq__get(d, node + 1, "size"));
        if (right != 1)
            return right ? bcq__no_memory(error)
                         : bcq__bad(error, 605, bcq__string(d, node), "another size than the manifest states");
    }
    for (i = 0, node = table + 1; flags & BCQ_CHECK_ALL && i < count; i++, node = d->nodes[node + 1].next) {
        BCQ__TRY(bcq__file_digest(folder->root, bcq__string(d, node).at, hex, error));
        if (!bcq__is(d, bcq__get(d, node + 1, "sha256"), hex))
            return bcq__bad(error, 606, bcq__string(d, node), "another digest than the manifest states");
    }
    return 0;
}

/* The position of a weight in folder->weights; weight_count where there is none. */
static uint32_t bcq__weight_index(const bcq_folder *folder, bcq__str name)
{
    uint32_t low = 0, high = folder->weight_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = bcq__compare(bcq__weight_name(folder->weights[middle]), name);
        if (!order)
            return middle;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return folder->weight_count;
}

static int bcq__integers_are(const bcq__json *d, uint32_t array, const uint64_t *numbers, uint32_t count)
{
    uint32_t i, node = array + 1;
    int64_t value;
    if (d->nodes[array].count != count)
        return 0;
    for (i = 0; i < count; i++, node = d->nodes[node].next)
        if (!bcq__integer(d, node, &value) || value < 0 || (uint64_t)value != numbers[i])
            return 0;
    return 1;
}

/* V608 for one weight of both. */
static int bcq__same_weight(const bcq_folder *folder, const bcq__entry *entry, uint32_t index)
{
    const bcq__json *d = &folder->manifest;
    const bcq_weight *w = folder->weights[index];
    const bcq_scheme *scheme = folder->tables.schemes + entry->scheme;
    uint64_t shape[3], widths[BCQ_MAX_SEGMENTS];
    unsigned k, n = w->scheme->segment_count;
    shape[0] = w->stack;
    shape[w->rank - 2] = w->rows;
    shape[w->rank - 1] = w->columns;
    for (k = 0; k < n; k++)
        widths[k] = w->widths[k];
    return bcq__is(d, entry->file, folder->names.items[folder->weight_file[index]]) && entry->dtype == w->dtype &&
           bcq__integers_are(d, entry->shape, shape, w->rank) && (entry->widths != 0) == (n > 1) &&
           (!entry->widths || bcq__integers_are(d, entry->widths, widths, n)) &&
           scheme->text_bytes == w->scheme->text_bytes && memcmp(scheme->text, w->scheme->text, scheme->text_bytes) == 0;
}

/* V608: the schemes of the files, each once, are those of the manifest. */
static int bcq__same_schemes(const bcq_folder *folder, bcq_error *error)
{
    uint64_t count = 0, at = 0;
    size_t n;
    uint32_t i, *own, *all;
    bcq_scheme *schemes;
    int same = 1;
    for (n = 0; n < folder->names.count; n++)
        count += folder->files[n]->scheme_count;
    schemes = (bcq_scheme *)bcq__alloc(count, sizeof *schemes);
    own = bcq__sorted(folder->tables.scheme_count, bcq__by_text, folder->tables.schemes);
    all = NULL;
    if (schemes) {
        for (n = 0; n < folder->names.count; n++)
            for (i = 0; i < folder->files[n]->scheme_count; i++)
                schemes[at++] = folder->files[n]->schemes[i];
        all = bcq__sorted(count, bcq__by_text, schemes);
    }
    if (own && all) {
        for (at = 0, i = 0; at < count; at++) {
            const bcq_scheme *theirs = schemes + all[at], *ours;
            if (at && bcq__by_text(schemes, all[at - 1], all[at]) == 0)
                continue;
            ours = i < folder->tables.scheme_count ? folder->tables.schemes + own[i++] : NULL;
            same = same && ours && ours->text_bytes == theirs->text_bytes &&
                   memcmp(ours->text, theirs->text, ours->text_bytes) == 0;
        }
        same = same && i == folder->tables.scheme_count;
    }
    at = own && all;
    BCQ_FREE(schemes);
    BCQ_FREE(own);
    BCQ_FREE(all);
    if (!at)
        return bcq__no_memory(error);
    return same ? 0 : bcq__fail(error, 608, "the schemes of the manifest are not those of the files");
}

/* V608 and V513: the manifest against the descriptors. */
static int bcq__check_weights(const bcq_folder *folder, bcq_error *error)
{
    const bcq__json *d = &folder->manifest;
    const bcq__tables *t = &folder->tables;
    unsigned features = 0;
    uint32_t i;
    size_t n;
    for (n = 0; n < folder->names.count; n++)
        features |= folder->files[n]->features;
    if (features != t->features)
        return bcq__fail(error, 608, "the features of the manifest are not the union over the files");
    BCQ__TRY(bcq__same_schemes(folder, error));
    if (t->entry_count != folder->weight_count)
        return bcq__fail(error, 608, "the weights of the manifest are not those of the files");
    for (i = 0; i < t->entry_count; i++)
        if (bcq__weight_index(folder, bcq__string(d, t->entries[i].key)) != i)
            return bcq__bad(error, 608, bcq__string(d, t->entries[i].key), "no file has this weight");
    for (i = 0; i < t->entry_count; i++)
        if (!bcq__same_weight(folder, t->entries + i, i))
            return bcq__bad(error, 608, bcq__string(d, t->entries[i].key), "the manifest and the file differ");
    for (n = 0; n < folder->names.count; n++)
        if (!bcq__is(d, bcq__get(d, 0, "version"), folder->files[n]->version))
            return bcq__fail(error, 513, "the manifest states another version than the files");
    return 0;
}

/* ---- provenance (../provenance-1.0.md) */

static int bcq__by_span(const void *context, uint32_t a, uint32_t b)
{
    const bcq__json *d = (const bcq__json *)context;
    bcq__str x, y;
    x.at = d->source + d->nodes[a].off;
    x.bytes = d->nodes[a].len;
    y.at = d->source + d->nodes[b].off;
    y.bytes = d->nodes[b].len;
    return bcq__compare(x, y);
}

enum { BCQ__S_VERSION, BCQ__S_FORMAT, BCQ__S_FILES, BCQ__S_RULES, BCQ__S_TENSORS, BCQ__S_IGNORABLE };

/* V701: source.json by itself; v has the nodes of its values. */
static int bcq__read_source(const bcq_folder *folder, bcq__json *d, bcq__str *text, uint32_t v[6], bcq_error *error)
{
    static const char *const names[] = {"version", "format", "files", "rules", "tensors", "ignorable", NULL};
    static const bcq__rules rules = {701, 701, 701};
    bcq__str name = bcq__text("bcq_source/source.json");
    uint32_t i, j, node, recipe, *list, count;
    int64_t position;
    int good;
    BCQ__TRY(bcq__read_member(folder->root, name.at, 701, BCQ__MAX_JSON_FILE, 701, text, error));
    BCQ__TRY(bcq__parse_copy(d, *text, BCQ__KIND_LIMITED, rules, error));
    if (!bcq__is_canonical(d, "\n"))
        return bcq__bad(error, 701, name, "not canonical JSON and one line feed");
    if (!bcq__fields(d, 0, names, 5, v) || !bcq__is_version(d, v[BCQ__S_VERSION]) ||
        bcq__type(d, v[BCQ__S_FORMAT]) != BCQ__STRING || bcq__type(d, v[BCQ__S_RULES]) != BCQ__ARRAY ||
        bcq__type(d, v[BCQ__S_TENSORS]) != BCQ__OBJECT || !bcq__is_file_table(d, v[BCQ__S_FILES], 1) ||
        (v[BCQ__S_IGNORABLE] && bcq__type(d, v[BCQ__S_IGNORABLE]) != BCQ__OBJECT))
        return bcq__bad(error, 701, name, "keys that are missing, unknown or malformed");
    count = d->nodes[v[BCQ__S_RULES]].count;
    list = bcq__members(d, v[BCQ__S_RULES]);
    if (!list)
        return bcq__no_memory(error);
    for (i = 0, good = 1; i < count; i++)
        good = good && bcq__type(d, bcq__get(d, list[i], "rule")) == BCQ__STRING;
    bcq__sort(list, list + count, count, bcq__by_span, d);
    for (i = 1; i < count; i++)
        good = good && bcq__by_span(d, list[i - 1], list[i]) != 0;
    BCQ_FREE(list);
    if (!good)
        return bcq__bad(error, 701, name, "a rule is malformed or there twice");
    for (i = 0, node = v[BCQ__S_TENSORS] + 1; i < d->nodes[v[BCQ__S_TENSORS]].count;
         i++, node = d->nodes[node + 1].next) {
        good = bcq__is_path(bcq__string(d, node)) && d->nodes[node + 1].type == BCQ__OBJECT;
        for (j = 0, recipe = node + 2; good && j < d->nodes[node + 1].count; j++, recipe = d->nodes[recipe + 1].next) {
            const bcq__node *r = d->nodes + recipe + 1;
            good = r->type == BCQ__ARRAY && (r->count == 1 || r->count == 2) &&
                   bcq__in_range(d, recipe + 2, 0, BCQ__MAX_INTEGER, &position) &&
                   (r->count == 1 || d->nodes[recipe + 3].type == BCQ__STRING);
        }
        if (!good)
            return bcq__bad(error, 701, name, "tensors is malformed");
    }
    return 0;
}

/* bcq_source/<before><path><after> as a new string. */
static char *bcq__source_path(const char *before, bcq__str path, const char *after)
{
    size_t a = strlen(before), c = strlen(after);
    char *name = (char *)bcq__alloc((uint64_t)a + path.bytes + c + 1, 1);
    if (name) {
        memcpy(name, before, a);
        memcpy(name + a, path.at, path.bytes);
        memcpy(name + a + path.bytes, after, c);
    }
    return name;
}

/* V702: an archived header. It is as long as the reference reader of safetensors allows, 100,000,000 bytes. */
static int bcq__read_archived(const bcq_folder *folder, const char *name, bcq__json *d, bcq_error *error)
{
    static const bcq__rules rules = {702, 702, 702};
    bcq__str text, json;
    int code;
    BCQ__TRY(bcq__read_member(folder->root, name, 702, BCQ__MAX_JSON_FILE + 8u, 702, &text, error));
    if (text.bytes < 8 || bcq__u64((const unsigned char *)text.at) != text.bytes - 8) {
        code = bcq__bad(error, 702, bcq__text(name), "an archived header has not the length it states");
    } else {
        json.at = text.at + 8;
        json.bytes = text.bytes - 8;
        code = bcq__parse_copy(d, json, BCQ__KIND_NUMBERS, rules, error);
    }
    BCQ_FREE((void *)(uintptr_t)text.at);
    d->source = NULL;
    return code;
}

/* V702: an archived header of GGUF, which is read by converters only. */
static int bcq__check_gguf(const bcq_folder *folder, const char *name, bcq_error *error)
{
    bcq__str text;
    int good;
    BCQ__TRY(bcq__read_member(folder->root, name, 702, BCQ__MAX_JSON_FILE, 702, &text, error));
    good = text.bytes >= 4 && memcmp(text.at, "GGUF", 4) == 0;
    BCQ_FREE((void *)(uintptr_t)text.at);
    return good ? 0 : bcq__bad(error, 702, bcq__text(name), "no header of GGUF");
}

/* V702 for one file of the source. */
static int bcq__check_source_file(const bcq_folder *folder, const bcq__json *d, uint32_t key, bcq_error *error)
{
    int verbatim = bcq__is(d, bcq__get(d, key + 1, "kind"), "verbatim"), code = 0;
    bcq__str path = bcq__string(d, key);
    char *name = bcq__source_path(verbatim ? "bcq_source/files/" : "bcq_source/headers/", path,
                                  verbatim ? "" : ".header");
    bcq__json header;
    char hex[65] = "";
    if (!name)
        return bcq__no_memory(error);
    memset(&header, 0, sizeof header);
    if (bcq__list_find(&folder->listing, name) == folder->listing.count) {
        code = bcq__bad(error, 702, path, "is not archived");
    } else if (bcq__is(d, bcq__get(d, key + 1, "kind"), "gguf")) {
        code = bcq__check_gguf(folder, name, error);
    } else if (!verbatim) {
        code = bcq__read_archived(folder, name, &header, error);
    } else {
        int right = bcq__has_size(folder, name, d, bcq__get(d, key + 1, "size"));
        if (right)
            code = right < 0 ? bcq__no_memory(error) : bcq__file_digest(folder->root, name, hex, error);
        if (!code && !bcq__is(d, bcq__get(d, key + 1, "sha256"), hex))
            code = bcq__bad(error, 702, path, "archived with another content than the record states");
    }
    bcq__json_free(&header);
    BCQ_FREE(name);
    return code;
}

static int bcq__is_dense(const bcq_folder *folder, bcq__str name)
{
    uint32_t low = 0, high = folder->tensor_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = bcq__compare(bcq__tensor_name(folder->tensors[middle]), name);
        if (!order)
            return !folder->tensors[middle]->is_part;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return 0;
}

/* V703 for one source file: the node `table` of its tensors (0: none) against the archived header, which is empty for
   GGUF. Raw tensors go to `raw`. */
static int bcq__check_recipes(const bcq_folder *folder, const bcq__json *d, bcq__str path, uint32_t table,
                              const bcq__json *header, const uint32_t *rules, uint32_t rule_count, bcq__list *raw,
                              bcq_error *error)
{
    uint32_t i, k, node = table + 1, count = table ? d->nodes[table].count : 0;
    uint32_t total = header->nodes ? header->nodes[0].count : 0;
    uint32_t *keys = header->nodes ? bcq__sorted_keys(header, 0) : NULL;
    int same = 1, good;
    if (header->nodes && !keys)
        return bcq__no_memory(error);
    for (i = 0, k = 0; i < total; i++) {
        if (bcq__is(header, keys[i], "__metadata__"))
            continue;
        same = same && k < count && bcq__equal(bcq__string(header, keys[i]), bcq__string(d, node));
        if (same)
            node = d->nodes[node + 1].next;
        k++;
    }
    BCQ_FREE(keys);
    if (header->nodes && (!same || k != count))
        return bcq__bad(error, 703, path, "its tensors are not those of its header");
    for (i = 0, node = table + 1; i < count; i++, node = d->nodes[node + 1].next) {
        int64_t position = 0;
        int derived = d->nodes[node + 1].count == 2;
        uint32_t rule;
        bcq__str name = bcq__string(d, node);
        if (!bcq__integer(d, node + 2, &position) || position >= (int64_t)rule_count)
            return bcq__bad(error, 703, name, "a rule that does not exist");
        rule = bcq__get(d, rules[position], "rule");
        if (bcq__is(d, rule, "raw")) {
            good = !derived;
            if (good && !bcq__list_add(raw, path, "/", name))
                return bcq__no_memory(error);
        } else if (bcq__is(d, rule, "copy")) {
            good = bcq__is_dense(folder, derived ? bcq__string(d, node + 3) : name);
        } else {
            good = derived && bcq__weight_index(folder, bcq__string(d, node + 3)) < folder->weight_count;
        }
        if (!good)
            return bcq__bad(error, 703, name, "its rule leads nowhere");
    }
    return 0;
}

/* V704 */
static int bcq__check_raw(const bcq_folder *folder, bcq__list *raw, bcq_error *error)
{
    static const char name[] = "bcq_source/raw.safetensors";
    int there = bcq__list_find(&folder->listing, name) < folder->listing.count, code;
    char *path;
    bcq_file *f;
    bcq__input in;
    uint32_t i;
    if (there != (raw->count > 0))
        return bcq__fail(error, 704, "raw.safetensors is there without need, or missing");
    if (!there)
        return 0;
    if (!bcq__list_sort(raw, 1))
        return bcq__no_memory(error);
    path = bcq__join(folder->root, name);
    f = (bcq_file *)bcq__alloc(1, sizeof *f);
    code = path && f ? bcq__open_regular(path, &in, error) : bcq__no_memory(error);
    BCQ_FREE(path);
    if (!code) {
        code = bcq__read_head(f, &in, 0, error);
        close(in.descriptor);
    }
    if (code > 0)
        code = bcq__fail(error, 704, "raw.safetensors breaks BCQ-V%d", code);
    if (!code && f->tensor_count != raw->count)
        code = bcq__fail(error, 704, "raw.safetensors does not hold exactly the raw tensors");
    for (i = 0; !code && i < raw->count; i++)
        if (!bcq__equal(bcq__tensor_name(f->tensors + f->by_name[i]), bcq__text(raw->items[i])))
            code = bcq__fail(error, 704, "raw.safetensors does not hold exactly the raw tensors");
    bcq_close(f);
    return code;
}

/* V702 to V704, source.json being d. */
static int bcq__check_source(const bcq_folder *folder, const bcq__json *d, const uint32_t v[6], const uint32_t *rules,
                             bcq__list *raw, bcq_error *error)
{
    uint32_t files = v[BCQ__S_FILES], tensors = v[BCQ__S_TENSORS], i, j, node, table;
    uint32_t file_count = d->nodes[files].count, table_count = d->nodes[tensors].count;
    for (i = 0, node = files + 1; i < file_count; i++, node = d->nodes[node + 1].next)
        BCQ__TRY(bcq__check_source_file(folder, d, node, error));
    /* Both tables are sorted. Every table of tensors must meet a model file ... */
    for (i = 0, j = 0, node = files + 1, table = tensors + 1; j < table_count; j++, table = d->nodes[table + 1].next) {
        while (i < file_count && bcq__by_string(d, node, table) < 0) {
            i++;
            node = d->nodes[node + 1].next;
        }
        if (i >= file_count || bcq__by_string(d, node, table) != 0 ||
            bcq__is(d, bcq__get(d, node + 1, "kind"), "verbatim"))
            return bcq__bad(error, 703, bcq__string(d, table), "tensors of what is no model file of the source");
    }
    /* ... and every model file its table, or have no tensors. */
    for (i = 0, j = 0, node = files + 1, table = tensors + 1; i < file_count; i++, node = d->nodes[node + 1].next) {
        uint32_t own = j < table_count && bcq__by_string(d, node, table) == 0 ? table + 1 : 0;
        bcq__json header;
        char *name;
        int code;
        if (bcq__is(d, bcq__get(d, node + 1, "kind"), "verbatim"))
            continue;
        memset(&header, 0, sizeof header);
        code = 0;
        if (bcq__is(d, bcq__get(d, node + 1, "kind"), "safetensors")) {
            name = bcq__source_path("bcq_source/headers/", bcq__string(d, node), ".header");
            code = name ? bcq__read_archived(folder, name, &header, error) : bcq__no_memory(error);
            BCQ_FREE(name);
        }
        if (!code)
            code = bcq__check_recipes(folder, d, bcq__string(d, node), own, &header, rules,
                                      d->nodes[v[BCQ__S_RULES]].count, raw, error);
        bcq__json_free(&header);
        BCQ__TRY(code);
        if (own) {
            j++;
            table = d->nodes[table + 1].next;
        }
    }
    return bcq__check_raw(folder, raw, error);
}

static int bcq__check_provenance(const bcq_folder *folder, bcq_error *error)
{
    bcq__json d;
    bcq__str text = {NULL, 0};
    bcq__list raw = {NULL, 0, 0};
    uint32_t v[6], *rules = NULL;
    size_t i;
    int there = 0, code;
    for (i = 0; i < folder->listing.count; i++)
        there |= strncmp(folder->listing.items[i], "bcq_source/", 11) == 0;
    if (!there)
        return 0;
    memset(&d, 0, sizeof d);
    code = bcq__read_source(folder, &d, &text, v, error);
    if (!code) {
        rules = bcq__members(&d, v[BCQ__S_RULES]);
        code = rules ? bcq__check_source(folder, &d, v, rules, &raw, error) : bcq__no_memory(error);
    }
    bcq__list_free(&raw);
    BCQ_FREE(rules);
    bcq__json_free(&d);
    BCQ_FREE((void *)(uintptr_t)text.at);
    return code;
}

/* ---- folder: all together */

static int bcq__read_folder(bcq_folder *folder, const char *path, int flags, bcq__json *index, bcq_error *error)
{
    char *work = (char *)bcq__alloc(BCQ__PATH, 1);
    uint32_t map;
    folder->root = (char *)bcq__alloc(BCQ__PATH, 1);
    if (!work || !folder->root || !bcq__resolve(path, folder->root, work)) {
        BCQ_FREE(work);
        return bcq__fail(error, work && folder->root ? BCQ_ERROR_IO : BCQ_ERROR_MEMORY, "the folder cannot be found");
    }
    BCQ_FREE(work);
    BCQ__TRY(bcq__list_files(folder->root, &folder->listing, error));
    BCQ__TRY(bcq__read_index(folder->root, index, &map, error));
    BCQ__TRY(bcq__read_shards(folder, index, map, flags, error));
    BCQ__TRY(bcq__check_config(folder, error));
    BCQ__TRY(bcq__read_manifest(folder, error));
    BCQ__TRY(bcq__check_files(folder, flags, error));
    BCQ__TRY(bcq__check_weights(folder, error));
    return flags & BCQ_CHECK_ALL ? bcq__check_provenance(folder, error) : 0;
}

int bcq_open_folder(const char *path, int flags, bcq_folder **out, bcq_error *error)
{
    bcq_folder *folder = (bcq_folder *)bcq__alloc(1, sizeof *folder);
    bcq__json index;
    int code;
    *out = NULL;
    if (!folder)
        return bcq__no_memory(error);
    memset(&index, 0, sizeof index);
    code = bcq__read_folder(folder, path, flags, &index, error);
    bcq__json_free(&index);
    if (code)
        bcq_close_folder(folder);
    else
        *out = folder;
    return code;
}

void bcq_close_folder(bcq_folder *folder)
{
    size_t i;
    if (!folder)
        return;
    for (i = 0; folder->files && i < folder->names.count; i++)
        bcq_close(folder->files[i]);
    BCQ_FREE(folder->files);
    BCQ_FREE(folder->tensors);
    BCQ_FREE(folder->weights);
    BCQ_FREE(folder->weight_file);
    bcq__list_free(&folder->names);
    bcq__list_free(&folder->listing);
    bcq__list_free(&folder->uncovered);
    bcq__json_free(&folder->manifest);
    bcq__tables_free(&folder->tables);
    BCQ_FREE((void *)(uintptr_t)folder->manifest_text.at);
    BCQ_FREE(folder->root);
    BCQ_FREE(folder);
}

size_t bcq_folder_file_count(const bcq_folder *folder)
{
    return folder->names.count;
}

bcq_file *bcq_folder_file(bcq_folder *folder, size_t i)
{
    return i < folder->names.count ? folder->files[i] : NULL;
}

const char *bcq_folder_file_name(const bcq_folder *folder, size_t i)
{
    return i < folder->names.count ? folder->names.items[i] : NULL;
}

size_t bcq_folder_uncovered_count(const bcq_folder *folder)
{
    return folder->uncovered.count;
}

const char *bcq_folder_uncovered_name(const bcq_folder *folder, size_t i)
{
    return i < folder->uncovered.count ? folder->uncovered.items[i] : NULL;
}

bcq_weight *bcq_folder_find_weight(bcq_folder *folder, const char *name)
{
    uint32_t index = bcq__weight_index(folder, bcq__text(name));
    return index < folder->weight_count ? folder->weights[index] : NULL;
}

#endif /* BCQ_NO_POSIX */
#endif /* BCQ_IMPLEMENTATION */
