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
    uint32_t group_size;   /* g */
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
/* A folder (sections 9 and 10). Without BCQ_CHECK_ALL: shards, index, config, the manifest and sizes of files; with
   it also every digest, the content of all weights and the provenance. */
int bcq_open_folder(const char *path, int flags, bcq_folder **out, bcq_error *error);
void bcq_close_folder(bcq_folder *folder);
size_t bcq_folder_file_count(const bcq_folder *folder);
bcq_file *bcq_folder_file(bcq_folder *folder, size_t i);
const char *bcq_folder_file_name(const bcq_folder *folder, size_t i);
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
#define BCQ__MAX_ENTRY 4096u
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

/* What is allowed: integers without limit (section 3), integers of section 4, any number, what config.json has. */
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
    if (node->type == BCQ__INTEGER && kind == BCQ__KIND_LIMITED && !bcq__integer(d, index, &value))
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
    if (d->lone_surrogate && kind != BCQ__KIND_CONFIG)
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

/* ---- names: Unicode normalization form C, then full case folding (rule V120) */

/* unicode tables: begin */
#define BCQ__UNICODE "14.0.0"

/* character, its decomposition into one */
static const uint32_t bcq__ones[2070] = {
    832,768,833,769,835,787,884,697,894,59,903,183,8049,940,8051,941,8053,942,8055,943,8057,972,8059,973,8061,974,
    8123,902,8126,953,8137,904,8139,905,8147,912,8155,906,8163,944,8171,910,8174,901,8175,96,8185,908,8187,911,8189,180,
    8192,8194,8193,8195,8486,937,8490,75,8491,197,9001,12296,9002,12297,63744,35912,63745,26356,63746,36554,63747,36040,
    63748,28369,63749,20018,63750,21477,63751,40860,63752,40860,63753,22865,63754,37329,63755,21895,63756,22856,
    63757,25078,63758,30313,63759,32645,63760,34367,63761,34746,63762,35064,63763,37007,63764,27138,63765,27931,
    63766,28889,63767,29662,63768,33853,63769,37226,63770,39409,63771,20098,63772,21365,63773,27396,63774,29211,
    63775,34349,63776,40478,63777,23888,63778,28651,63779,34253,63780,35172,63781,25289,63782,33240,63783,34847,
    63784,24266,63785,26391,63786,28010,63787,29436,63788,37070,63789,20358,63790,20919,63791,21214,63792,25796,
    63793,27347,63794,29200,63795,30439,63796,32769,63797,34310,63798,34396,63799,36335,63800,38706,63801,39791,
    63802,40442,63803,30860,63804,31103,63805,32160,63806,33737,63807,37636,63808,40575,63809,35542,63810,22751,
    63811,24324,63812,31840,63813,32894,63814,29282,63815,30922,63816,36034,63817,38647,63818,22744,63819,23650,
    63820,27155,63821,28122,63822,28431,63823,32047,63824,32311,63825,38475,63826,21202,63827,32907,63828,20956,
    63829,20940,63830,31260,63831,32190,63832,33777,63833,38517,63834,35712,63835,25295,63836,27138,63837,35582,
    63838,20025,63839,23527,63840,24594,63841,29575,63842,30064,63843,21271,63844,30971,63845,20415,63846,24489,
    63847,19981,63848,27852,63849,25976,63850,32034,63851,21443,63852,22622,63853,30465,63854,33865,63855,35498,
    63856,27578,63857,36784,63858,27784,63859,25342,63860,33509,63861,25504,63862,30053,63863,20142,63864,20841,
    63865,20937,63866,26753,63867,31975,63868,33391,63869,35538,63870,37327,63871,21237,63872,21570,63873,22899,
    63874,24300,63875,26053,63876,28670,63877,31018,63878,38317,63879,39530,63880,40599,63881,40654,63882,21147,
    63883,26310,63884,27511,63885,36706,63886,24180,63887,24976,63888,25088,63889,25754,63890,28451,63891,29001,
    63892,29833,63893,31178,63894,32244,63895,32879,63896,36646,63897,34030,63898,36899,63899,37706,63900,21015,
    63901,21155,63902,21693,63903,28872,63904,35010,63905,35498,63906,24265,63907,24565,63908,25467,63909,27566,
    63910,31806,63911,29557,63912,20196,63913,22265,63914,23527,63915,23994,63916,24604,63917,29618,63918,29801,
    63919,32666,63920,32838,63921,37428,63922,38646,63923,38728,63924,38936,63925,20363,63926,31150,63927,37300,
    63928,38584,63929,24801,63930,20102,63931,20698,63932,23534,63933,23615,63934,26009,63935,27138,63936,29134,
    63937,30274,63938,34044,63939,36988,63940,40845,63941,26248,63942,38446,63943,21129,63944,26491,63945,26611,
    63946,27969,63947,28316,63948,29705,63949,30041,63950,30827,63951,32016,63952,39006,63953,20845,63954,25134,
    63955,38520,63956,20523,63957,23833,63958,28138,63959,36650,63960,24459,63961,24900,63962,26647,63963,29575,
    63964,38534,63965,21033,63966,21519,63967,23653,63968,26131,63969,26446,63970,26792,63971,27877,63972,29702,
    63973,30178,63974,32633,63975,35023,63976,35041,63977,37324,63978,38626,63979,21311,63980,28346,63981,21533,
    63982,29136,63983,29848,63984,34298,63985,38563,63986,40023,63987,40607,63988,26519,63989,28107,63990,33256,
    63991,31435,63992,31520,63993,31890,63994,29376,63995,28825,63996,35672,63997,20160,63998,33590,63999,21050,
    64000,20999,64001,24230,64002,25299,64003,31958,64004,23429,64005,27934,64006,26292,64007,36667,64008,34892,
    64009,38477,64010,35211,64011,24275,64012,20800,64013,21952,64016,22618,64018,26228,64021,20958,64022,29482,
    64023,30410,64024,31036,64025,31070,64026,31077,64027,31119,64028,38742,64029,31934,64030,32701,64032,34322,
    64034,35576,64037,36920,64038,37117,64042,39151,64043,39164,64044,39208,64045,40372,64046,37086,64047,38583,
    64048,20398,64049,20711,64050,20813,64051,21193,64052,21220,64053,21329,64054,21917,64055,22022,64056,22120,
    64057,22592,64058,22696,64059,23652,64060,23662,64061,24724,64062,24936,64063,24974,64064,25074,64065,25935,
    64066,26082,64067,26257,64068,26757,64069,28023,64070,28186,64071,28450,64072,29038,64073,29227,64074,29730,
    64075,30865,64076,31038,64077,31049,64078,31048,64079,31056,64080,31062,64081,31069,64082,31117,64083,31118,
    64084,31296,64085,31361,64086,31680,64087,32244,64088,32265,64089,32321,64090,32626,64091,32773,64092,33261,
    64093,33401,64094,33401,64095,33879,64096,35088,64097,35222,64098,35585,64099,35641,64100,36051,64101,36104,
    64102,36790,64103,36920,64104,38627,64105,38911,64106,38971,64107,24693,64108,148206,64109,33304,64112,20006,
    64113,20917,64114,20840,64115,20352,64116,20805,64117,20864,64118,21191,64119,21242,64120,21917,64121,21845,
    64122,21913,64123,21986,64124,22618,64125,22707,64126,22852,64127,22868,64128,23138,64129,23336,64130,24274,
    64131,24281,64132,24425,64133,24493,64134,24792,64135,24910,64136,24840,64137,24974,64138,24928,64139,25074,
    64140,25140,64141,25540,64142,25628,64143,25682,64144,25942,64145,26228,64146,26391,64147,26395,64148,26454,
    64149,27513,64150,27578,64151,27969,64152,28379,64153,28363,64154,28450,64155,28702,64156,29038,64157,30631,
    64158,29237,64159,29359,64160,29482,64161,29809,64162,29958,64163,30011,64164,30237,64165,30239,64166,30410,
    64167,30427,64168,30452,64169,30538,64170,30528,64171,30924,64172,31409,64173,31680,64174,31867,64175,32091,
    64176,32244,64177,32574,64178,32773,64179,33618,64180,33775,64181,34681,64182,35137,64183,35206,64184,35222,
    64185,35519,64186,35576,64187,35531,64188,35585,64189,35582,64190,35565,64191,35641,64192,35722,64193,36104,
    64194,36664,64195,36978,64196,37273,64197,37494,64198,38524,64199,38627,64200,38742,64201,38875,64202,38911,
    64203,38923,64204,38971,64205,39698,64206,40860,64207,141386,64208,141380,64209,144341,64210,15261,64211,16408,
    64212,16441,64213,152137,64214,154832,64215,163539,64216,40771,64217,40846,194560,20029,194561,20024,194562,20033,
    194563,131362,194564,20320,194565,20398,194566,20411,194567,20482,194568,20602,194569,20633,194570,20711,
    194571,20687,194572,13470,194573,132666,194574,20813,194575,20820,194576,20836,194577,20855,194578,132380,
    194579,13497,194580,20839,194581,20877,194582,132427,194583,20887,194584,20900,194585,20172,194586,20908,
    194587,20917,194588,168415,194589,20981,194590,20995,194591,13535,194592,21051,194593,21062,194594,21106,
    194595,21111,194596,13589,194597,21191,194598,21193,194599,21220,194600,21242,194601,21253,194602,21254,
    194603,21271,194604,21321,194605,21329,194606,21338,194607,21363,194608,21373,194609,21375,194610,21375,
    194611,21375,194612,133676,194613,28784,194614,21450,194615,21471,194616,133987,194617,21483,194618,21489,
    194619,21510,194620,21662,194621,21560,194622,21576,194623,21608,194624,21666,194625,21750,194626,21776,
    194627,21843,194628,21859,194629,21892,194630,21892,194631,21913,194632,21931,194633,21939,194634,21954,
    194635,22294,194636,22022,194637,22295,194638,22097,194639,22132,194640,20999,194641,22766,194642,22478,
    194643,22516,194644,22541,194645,22411,194646,22578,194647,22577,194648,22700,194649,136420,194650,22770,
    194651,22775,194652,22790,194653,22810,194654,22818,194655,22882,194656,136872,194657,136938,194658,23020,
    194659,23067,194660,23079,194661,23000,194662,23142,194663,14062,194664,14076,194665,23304,194666,23358,
    194667,23358,194668,137672,194669,23491,194670,23512,194671,23527,194672,23539,194673,138008,194674,23551,
    194675,23558,194676,24403,194677,23586,194678,14209,194679,23648,194680,23662,194681,23744,194682,23693,
    194683,138724,194684,23875,194685,138726,194686,23918,194687,23915,194688,23932,194689,24033,194690,24034,
    194691,14383,194692,24061,194693,24104,194694,24125,194695,24169,194696,14434,194697,139651,194698,14460,
    194699,24240,194700,24243,194701,24246,194702,24266,194703,172946,194704,24318,194705,140081,194706,140081,
    194707,33281,194708,24354,194709,24354,194710,14535,194711,144056,194712,156122,194713,24418,194714,24427,
    194715,14563,194716,24474,194717,24525,194718,24535,194719,24569,194720,24705,194721,14650,194722,14620,
    194723,24724,194724,141012,194725,24775,194726,24904,194727,24908,194728,24910,194729,24908,194730,24954,
    194731,24974,194732,25010,194733,24996,194734,25007,194735,25054,194736,25074,194737,25078,194738,25104,
    194739,25115,194740,25181,194741,25265,194742,25300,194743,25424,194744,142092,194745,25405,194746,25340,
    194747,25448,194748,25475,194749,25572,194750,142321,194751,25634,194752,25541,194753,25513,194754,14894,
    194755,25705,194756,25726,194757,25757,194758,25719,194759,14956,194760,25935,194761,25964,194762,143370,
    194763,26083,194764,26360,194765,26185,194766,15129,194767,26257,194768,15112,194769,15076,194770,20882,
    194771,20885,194772,26368,194773,26268,194774,32941,194775,17369,194776,26391,194777,26395,194778,26401,
    194779,26462,194780,26451,194781,144323,194782,15177,194783,26618,194784,26501,194785,26706,194786,26757,
    194787,144493,194788,26766,194789,26655,194790,26900,194791,15261,194792,26946,194793,27043,194794,27114,
    194795,27304,194796,145059,194797,27355,194798,15384,194799,27425,194800,145575,194801,27476,194802,15438,
    194803,27506,194804,27551,194805,27578,194806,27579,194807,146061,194808,138507,194809,146170,194810,27726,
    194811,146620,194812,27839,194813,27853,194814,27751,194815,27926,194816,27966,194817,28023,194818,27969,
    194819,28009,194820,28024,194821,28037,194822,146718,194823,27956,194824,28207,194825,28270,194826,15667,
    194827,28363,194828,28359,194829,147153,194830,28153,194831,28526,194832,147294,194833,147342,194834,28614,
    194835,28729,194836,28702,194837,28699,194838,15766,194839,28746,194840,28797,194841,28791,194842,28845,
    194843,132389,194844,28997,194845,148067,194846,29084,194847,148395,194848,29224,194849,29237,194850,29264,
    194851,149000,194852,29312,194853,29333,194854,149301,194855,149524,194856,29562,194857,29579,194858,16044,
    194859,29605,194860,16056,194861,16056,194862,29767,194863,29788,194864,29809,194865,29829,194866,29898,
    194867,16155,194868,29988,194869,150582,194870,30014,194871,150674,194872,30064,194873,139679,194874,30224,
    194875,151457,194876,151480,194877,151620,194878,16380,194879,16392,194880,30452,194881,151795,194882,151794,
    194883,151833,194884,151859,194885,30494,194886,30495,194887,30495,194888,30538,194889,16441,194890,30603,
    194891,16454,194892,16534,194893,152605,194894,30798,194895,30860,194896,30924,194897,16611,194898,153126,
    194899,31062,194900,153242,194901,153285,194902,31119,194903,31211,194904,16687,194905,31296,194906,31306,
    194907,31311,194908,153980,194909,154279,194910,154279,194911,31470,194912,16898,194913,154539,194914,31686,
    194915,31689,194916,16935,194917,154752,194918,31954,194919,17056,194920,31976,194921,31971,194922,32000,
    194923,155526,194924,32099,194925,17153,194926,32199,194927,32258,194928,32325,194929,17204,194930,156200,
    194931,156231,194932,17241,194933,156377,194934,32634,194935,156478,194936,32661,194937,32762,194938,32773,
    194939,156890,194940,156963,194941,32864,194942,157096,194943,32880,194944,144223,194945,17365,194946,32946,
    194947,33027,194948,17419,194949,33086,194950,23221,194951,157607,194952,157621,194953,144275,194954,144284,
    194955,33281,194956,33284,194957,36766,194958,17515,194959,33425,194960,33419,194961,33437,194962,21171,
    194963,33457,194964,33459,194965,33469,194966,33510,194967,158524,194968,33509,194969,33565,194970,33635,
    194971,33709,194972,33571,194973,33725,194974,33767,194975,33879,194976,33619,194977,33738,194978,33740,
    194979,33756,194980,158774,194981,159083,194982,158933,194983,17707,194984,34033,194985,34035,194986,34070,
    194987,160714,194988,34148,194989,159532,194990,17757,194991,17761,194992,159665,194993,159954,194994,17771,
    194995,34384,194996,34396,194997,34407,194998,34409,194999,34473,195000,34440,195001,34574,195002,34530,
    195003,34681,195004,34600,195005,34667,195006,34694,195007,17879,195008,34785,195009,34817,195010,17913,
    195011,34912,195012,34915,195013,161383,195014,35031,195015,35038,195016,17973,195017,35066,195018,13499,
    195019,161966,195020,162150,195021,18110,195022,18119,195023,35488,195024,35565,195025,35722,195026,35925,
    195027,162984,195028,36011,195029,36033,195030,36123,195031,36215,195032,163631,195033,133124,195034,36299,
    195035,36284,195036,36336,195037,133342,195038,36564,195039,36664,195040,165330,195041,165357,195042,37012,
    195043,37105,195044,37137,195045,165678,195046,37147,195047,37432,195048,37591,195049,37592,195050,37500,
    195051,37881,195052,37909,195053,166906,195054,38283,195055,18837,195056,38327,195057,167287,195058,18918,
    195059,38595,195060,23986,195061,38691,195062,168261,195063,168474,195064,19054,195065,19062,195066,38880,
    195067,168970,195068,19122,195069,169110,195070,38923,195071,38923,195072,38953,195073,169398,195074,39138,
    195075,19251,195076,39209,195077,39335,195078,39362,195079,39422,195080,19406,195081,170800,195082,39698,
    195083,40000,195084,40189,195085,19662,195086,19693,195087,40295,195088,172238,195089,19704,195090,172293,
    195091,172558,195092,172689,195093,40635,195094,19798,195095,40697,195096,40702,195097,40709,195098,40719,
    195099,40726,195100,40763,195101,173568
};

/* character, its decomposition into two */
static const uint32_t bcq__pairs[3078] = {
    192,65,768,193,65,769,194,65,770,195,65,771,196,65,776,197,65,778,199,67,807,200,69,768,201,69,769,202,69,770,
    203,69,776,204,73,768,205,73,769,206,73,770,207,73,776,209,78,771,210,79,768,211,79,769,212,79,770,213,79,771,
    214,79,776,217,85,768,218,85,769,219,85,770,220,85,776,221,89,769,224,97,768,225,97,769,226,97,770,227,97,771,
    228,97,776,229,97,778,231,99,807,232,101,768,233,101,769,234,101,770,235,101,776,236,105,768,237,105,769,
    238,105,770,239,105,776,241,110,771,242,111,768,243,111,769,244,111,770,245,111,771,246,111,776,249,117,768,
    250,117,769,251,117,770,252,117,776,253,121,769,255,121,776,256,65,772,257,97,772,258,65,774,259,97,774,260,65,808,
    261,97,808,262,67,769,263,99,769,264,67,770,265,99,770,266,67,775,267,99,775,268,67,780,269,99,780,270,68,780,
    271,100,780,274,69,772,275,101,772,276,69,774,277,101,774,278,69,775,279,101,775,280,69,808,281,101,808,282,69,780,
    283,101,780,284,71,770,285,103,770,286,71,774,287,103,774,288,71,775,289,103,775,290,71,807,291,103,807,292,72,770,
    293,104,770,296,73,771,297,105,771,298,73,772,299,105,772,300,73,774,301,105,774,302,73,808,303,105,808,304,73,775,
    308,74,770,309,106,770,310,75,807,311,107,807,313,76,769,314,108,769,315,76,807,316,108,807,317,76,780,318,108,780,
    323,78,769,324,110,769,325,78,807,326,110,807,327,78,780,328,110,780,332,79,772,333,111,772,334,79,774,335,111,774,
    336,79,779,337,111,779,340,82,769,341,114,769,342,82,807,343,114,807,344,82,780,345,114,780,346,83,769,347,115,769,
    348,83,770,349,115,770,350,83,807,351,115,807,352,83,780,353,115,780,354,84,807,355,116,807,356,84,780,357,116,780,
    360,85,771,361,117,771,362,85,772,363,117,772,364,85,774,365,117,774,366,85,778,367,117,778,368,85,779,369,117,779,
    370,85,808,371,117,808,372,87,770,373,119,770,374,89,770,375,121,770,376,89,776,377,90,769,378,122,769,379,90,775,
    380,122,775,381,90,780,382,122,780,416,79,795,417,111,795,431,85,795,432,117,795,461,65,780,462,97,780,463,73,780,
    464,105,780,465,79,780,466,111,780,467,85,780,468,117,780,469,220,772,470,252,772,471,220,769,472,252,769,
    473,220,780,474,252,780,475,220,768,476,252,768,478,196,772,479,228,772,480,550,772,481,551,772,482,198,772,
    483,230,772,486,71,780,487,103,780,488,75,780,489,107,780,490,79,808,491,111,808,492,490,772,493,491,772,
    494,439,780,495,658,780,496,106,780,500,71,769,501,103,769,504,78,768,505,110,768,506,197,769,507,229,769,
    508,198,769,509,230,769,510,216,769,511,248,769,512,65,783,513,97,783,514,65,785,515,97,785,516,69,783,517,101,783,
    518,69,785,519,101,785,520,73,783,521,105,783,522,73,785,523,105,785,524,79,783,525,111,783,526,79,785,527,111,785,
    528,82,783,529,114,783,530,82,785,531,114,785,532,85,783,533,117,783,534,85,785,535,117,785,536,83,806,537,115,806,
    538,84,806,539,116,806,542,72,780,543,104,780,550,65,775,551,97,775,552,69,807,553,101,807,554,214,772,555,246,772,
    556,213,772,557,245,772,558,79,775,559,111,775,560,558,772,561,559,772,562,89,772,563,121,772,836,776,769,
    901,168,769,902,913,769,904,917,769,905,919,769,906,921,769,908,927,769,910,933,769,911,937,769,912,970,769,
    938,921,776,939,933,776,940,945,769,941,949,769,942,951,769,943,953,769,944,971,769,970,953,776,971,965,776,
    972,959,769,973,965,769,974,969,769,979,978,769,980,978,776,1024,1045,768,1025,1045,776,1027,1043,769,1031,1030,776,
    1036,1050,769,1037,1048,768,1038,1059,774,1049,1048,774,1081,1080,774,1104,1077,768,1105,1077,776,1107,1075,769,
    1111,1110,776,1116,1082,769,1117,1080,768,1118,1091,774,1142,1140,783,1143,1141,783,1217,1046,774,1218,1078,774,
    1232,1040,774,1233,1072,774,1234,1040,776,1235,1072,776,1238,1045,774,1239,1077,774,1242,1240,776,1243,1241,776,
    1244,1046,776,1245,1078,776,1246,1047,776,1247,1079,776,1250,1048,772,1251,1080,772,1252,1048,776,1253,1080,776,
    1254,1054,776,1255,1086,776,1258,1256,776,1259,1257,776,1260,1069,776,1261,1101,776,1262,1059,772,1263,1091,772,
    1264,1059,776,1265,1091,776,1266,1059,779,1267,1091,779,1268,1063,776,1269,1095,776,1272,1067,776,1273,1099,776,
    1570,1575,1619,1571,1575,1620,1572,1608,1620,1573,1575,1621,1574,1610,1620,1728,1749,1620,1730,1729,1620,
    1747,1746,1620,2345,2344,2364,2353,2352,2364,2356,2355,2364,2392,2325,2364,2393,2326,2364,2394,2327,2364,
    2395,2332,2364,2396,2337,2364,2397,2338,2364,2398,2347,2364,2399,2351,2364,2507,2503,2494,2508,2503,2519,
    2524,2465,2492,2525,2466,2492,2527,2479,2492,2611,2610,2620,2614,2616,2620,2649,2582,2620,2650,2583,2620,
    2651,2588,2620,2654,2603,2620,2888,2887,2902,2891,2887,2878,2892,2887,2903,2908,2849,2876,2909,2850,2876,
    2964,2962,3031,3018,3014,3006,3019,3015,3006,3020,3014,3031,3144,3142,3158,3264,3263,3285,3271,3270,3285,
    3272,3270,3286,3274,3270,3266,3275,3274,3285,3402,3398,3390,3403,3399,3390,3404,3398,3415,3546,3545,3530,
    3548,3545,3535,3549,3548,3530,3550,3545,3551,3907,3906,4023,3917,3916,4023,3922,3921,4023,3927,3926,4023,
    3932,3931,4023,3945,3904,4021,3955,3953,3954,3957,3953,3956,3958,4018,3968,3960,4019,3968,3969,3953,3968,
    3987,3986,4023,3997,3996,4023,4002,4001,4023,4007,4006,4023,4012,4011,4023,4025,3984,4021,4134,4133,4142,
    6918,6917,6965,6920,6919,6965,6922,6921,6965,6924,6923,6965,6926,6925,6965,6930,6929,6965,6971,6970,6965,
    6973,6972,6965,6976,6974,6965,6977,6975,6965,6979,6978,6965,7680,65,805,7681,97,805,7682,66,775,7683,98,775,
    7684,66,803,7685,98,803,7686,66,817,7687,98,817,7688,199,769,7689,231,769,7690,68,775,7691,100,775,7692,68,803,
    7693,100,803,7694,68,817,7695,100,817,7696,68,807,7697,100,807,7698,68,813,7699,100,813,7700,274,768,7701,275,768,
    7702,274,769,7703,275,769,7704,69,813,7705,101,813,7706,69,816,7707,101,816,7708,552,774,7709,553,774,7710,70,775,
    7711,102,775,7712,71,772,7713,103,772,7714,72,775,7715,104,775,7716,72,803,7717,104,803,7718,72,776,7719,104,776,
    7720,72,807,7721,104,807,7722,72,814,7723,104,814,7724,73,816,7725,105,816,7726,207,769,7727,239,769,7728,75,769,
    7729,107,769,7730,75,803,7731,107,803,7732,75,817,7733,107,817,7734,76,803,7735,108,803,7736,7734,772,7737,7735,772,
    7738,76,817,7739,108,817,7740,76,813,7741,108,813,7742,77,769,7743,109,769,7744,77,775,7745,109,775,7746,77,803,
    7747,109,803,7748,78,775,7749,110,775,7750,78,803,7751,110,803,7752,78,817,7753,110,817,7754,78,813,7755,110,813,
    7756,213,769,7757,245,769,7758,213,776,7759,245,776,7760,332,768,7761,333,768,7762,332,769,7763,333,769,7764,80,769,
    7765,112,769,7766,80,775,7767,112,775,7768,82,775,7769,114,775,7770,82,803,7771,114,803,7772,7770,772,7773,7771,772,
    7774,82,817,7775,114,817,7776,83,775,7777,115,775,7778,83,803,7779,115,803,7780,346,775,7781,347,775,7782,352,775,
    7783,353,775,7784,7778,775,7785,7779,775,7786,84,775,7787,116,775,7788,84,803,7789,116,803,7790,84,817,7791,116,817,
    7792,84,813,7793,116,813,7794,85,804,7795,117,804,7796,85,816,7797,117,816,7798,85,813,7799,117,813,7800,360,769,
    7801,361,769,7802,362,776,7803,363,776,7804,86,771,7805,118,771,7806,86,803,7807,118,803,7808,87,768,7809,119,768,
    7810,87,769,7811,119,769,7812,87,776,7813,119,776,7814,87,775,7815,119,775,7816,87,803,7817,119,803,7818,88,775,
    7819,120,775,7820,88,776,7821,120,776,7822,89,775,7823,121,775,7824,90,770,7825,122,770,7826,90,803,7827,122,803,
    7828,90,817,7829,122,817,7830,104,817,7831,116,776,7832,119,778,7833,121,778,7835,383,775,7840,65,803,7841,97,803,
    7842,65,777,7843,97,777,7844,194,769,7845,226,769,7846,194,768,7847,226,768,7848,194,777,7849,226,777,7850,194,771,
    7851,226,771,7852,7840,770,7853,7841,770,7854,258,769,7855,259,769,7856,258,768,7857,259,768,7858,258,777,
    7859,259,777,7860,258,771,7861,259,771,7862,7840,774,7863,7841,774,7864,69,803,7865,101,803,7866,69,777,
    7867,101,777,7868,69,771,7869,101,771,7870,202,769,7871,234,769,7872,202,768,7873,234,768,7874,202,777,7875,234,777,
    7876,202,771,7877,234,771,7878,7864,770,7879,7865,770,7880,73,777,7881,105,777,7882,73,803,7883,105,803,7884,79,803,
    7885,111,803,7886,79,777,7887,111,777,7888,212,769,7889,244,769,7890,212,768,7891,244,768,7892,212,777,7893,244,777,
    7894,212,771,7895,244,771,7896,7884,770,7897,7885,770,7898,416,769,7899,417,769,7900,416,768,7901,417,768,
    7902,416,777,7903,417,777,7904,416,771,7905,417,771,7906,416,803,7907,417,803,7908,85,803,7909,117,803,7910,85,777,
    7911,117,777,7912,431,769,7913,432,769,7914,431,768,7915,432,768,7916,431,777,7917,432,777,7918,431,771,
    7919,432,771,7920,431,803,7921,432,803,7922,89,768,7923,121,768,7924,89,803,7925,121,803,7926,89,777,7927,121,777,
    7928,89,771,7929,121,771,7936,945,787,7937,945,788,7938,7936,768,7939,7937,768,7940,7936,769,7941,7937,769,
    7942,7936,834,7943,7937,834,7944,913,787,7945,913,788,7946,7944,768,7947,7945,768,7948,7944,769,7949,7945,769,
    7950,7944,834,7951,7945,834,7952,949,787,7953,949,788,7954,7952,768,7955,7953,768,7956,7952,769,7957,7953,769,
    7960,917,787,7961,917,788,7962,7960,768,7963,7961,768,7964,7960,769,7965,7961,769,7968,951,787,7969,951,788,
    7970,7968,768,7971,7969,768,7972,7968,769,7973,7969,769,7974,7968,834,7975,7969,834,7976,919,787,7977,919,788,
    7978,7976,768,7979,7977,768,7980,7976,769,7981,7977,769,7982,7976,834,7983,7977,834,7984,953,787,7985,953,788,
    7986,7984,768,7987,7985,768,7988,7984,769,7989,7985,769,7990,7984,834,7991,7985,834,7992,921,787,7993,921,788,
    7994,7992,768,7995,7993,768,7996,7992,769,7997,7993,769,7998,7992,834,7999,7993,834,8000,959,787,8001,959,788,
    8002,8000,768,8003,8001,768,8004,8000,769,8005,8001,769,8008,927,787,8009,927,788,8010,8008,768,8011,8009,768,
    8012,8008,769,8013,8009,769,8016,965,787,8017,965,788,8018,8016,768,8019,8017,768,8020,8016,769,8021,8017,769,
    8022,8016,834,8023,8017,834,8025,933,788,8027,8025,768,8029,8025,769,8031,8025,834,8032,969,787,8033,969,788,
    8034,8032,768,8035,8033,768,8036,8032,769,8037,8033,769,8038,8032,834,8039,8033,834,8040,937,787,8041,937,788,
    8042,8040,768,8043,8041,768,8044,8040,769,8045,8041,769,8046,8040,834,8047,8041,834,8048,945,768,8050,949,768,
    8052,951,768,8054,953,768,8056,959,768,8058,965,768,8060,969,768,8064,7936,837,8065,7937,837,8066,7938,837,
    8067,7939,837,8068,7940,837,8069,7941,837,8070,7942,837,8071,7943,837,8072,7944,837,8073,7945,837,8074,7946,837,
    8075,7947,837,8076,7948,837,8077,7949,837,8078,7950,837,8079,7951,837,8080,7968,837,8081,7969,837,8082,7970,837,
    8083,7971,837,8084,7972,837,8085,7973,837,8086,7974,837,8087,7975,837,8088,7976,837,8089,7977,837,8090,7978,837,
    8091,7979,837,8092,7980,837,8093,7981,837,8094,7982,837,8095,7983,837,8096,8032,837,8097,8033,837,8098,8034,837,
    8099,8035,837,8100,8036,837,8101,8037,837,8102,8038,837,8103,8039,837,8104,8040,837,8105,8041,837,8106,8042,837,
    8107,8043,837,8108,8044,837,8109,8045,837,8110,8046,837,8111,8047,837,8112,945,774,8113,945,772,8114,8048,837,
    8115,945,837,8116,940,837,8118,945,834,8119,8118,837,8120,913,774,8121,913,772,8122,913,768,8124,913,837,
    8129,168,834,8130,8052,837,8131,951,837,8132,942,837,8134,951,834,8135,8134,837,8136,917,768,8138,919,768,
    8140,919,837,8141,8127,768,8142,8127,769,8143,8127,834,8144,953,774,8145,953,772,8146,970,768,8150,953,834,
    8151,970,834,8152,921,774,8153,921,772,8154,921,768,8157,8190,768,8158,8190,769,8159,8190,834,8160,965,774,
    8161,965,772,8162,971,768,8164,961,787,8165,961,788,8166,965,834,8167,971,834,8168,933,774,8169,933,772,
    8170,933,768,8172,929,788,8173,168,768,8178,8060,837,8179,969,837,8180,974,837,8182,969,834,8183,8182,837,
    8184,927,768,8186,937,768,8188,937,837,8602,8592,824,8603,8594,824,8622,8596,824,8653,8656,824,8654,8660,824,
    8655,8658,824,8708,8707,824,8713,8712,824,8716,8715,824,8740,8739,824,8742,8741,824,8769,8764,824,8772,8771,824,
    8775,8773,824,8777,8776,824,8800,61,824,8802,8801,824,8813,8781,824,8814,60,824,8815,62,824,8816,8804,824,
    8817,8805,824,8820,8818,824,8821,8819,824,8824,8822,824,8825,8823,824,8832,8826,824,8833,8827,824,8836,8834,824,
    8837,8835,824,8840,8838,824,8841,8839,824,8876,8866,824,8877,8872,824,8878,8873,824,8879,8875,824,8928,8828,824,
    8929,8829,824,8930,8849,824,8931,8850,824,8938,8882,824,8939,8883,824,8940,8884,824,8941,8885,824,10972,10973,824,
    12364,12363,12441,12366,12365,12441,12368,12367,12441,12370,12369,12441,12372,12371,12441,12374,12373,12441,
    12376,12375,12441,12378,12377,12441,12380,12379,12441,12382,12381,12441,12384,12383,12441,12386,12385,12441,
    12389,12388,12441,12391,12390,12441,12393,12392,12441,12400,12399,12441,12401,12399,12442,12403,12402,12441,
    12404,12402,12442,12406,12405,12441,12407,12405,12442,12409,12408,12441,12410,12408,12442,12412,12411,12441,
    12413,12411,12442,12436,12358,12441,12446,12445,12441,12460,12459,12441,12462,12461,12441,12464,12463,12441,
    12466,12465,12441,12468,12467,12441,12470,12469,12441,12472,12471,12441,12474,12473,12441,12476,12475,12441,
    12478,12477,12441,12480,12479,12441,12482,12481,12441,12485,12484,12441,12487,12486,12441,12489,12488,12441,
    12496,12495,12441,12497,12495,12442,12499,12498,12441,12500,12498,12442,12502,12501,12441,12503,12501,12442,
    12505,12504,12441,12506,12504,12442,12508,12507,12441,12509,12507,12442,12532,12454,12441,12535,12527,12441,
    12536,12528,12441,12537,12529,12441,12538,12530,12441,12542,12541,12441,64285,1497,1460,64287,1522,1463,
    64298,1513,1473,64299,1513,1474,64300,64329,1473,64301,64329,1474,64302,1488,1463,64303,1488,1464,64304,1488,1468,
    64305,1489,1468,64306,1490,1468,64307,1491,1468,64308,1492,1468,64309,1493,1468,64310,1494,1468,64312,1496,1468,
    64313,1497,1468,64314,1498,1468,64315,1499,1468,64316,1500,1468,64318,1502,1468,64320,1504,1468,64321,1505,1468,
    64323,1507,1468,64324,1508,1468,64326,1510,1468,64327,1511,1468,64328,1512,1468,64329,1513,1468,64330,1514,1468,
    64331,1493,1465,64332,1489,1471,64333,1499,1471,64334,1508,1471,69786,69785,69818,69788,69787,69818,
    69803,69797,69818,69934,69937,69927,69935,69938,69927,70475,70471,70462,70476,70471,70487,70843,70841,70842,
    70844,70841,70832,70846,70841,70845,71098,71096,71087,71099,71097,71087,71992,71989,71984,119134,119127,119141,
    119135,119128,119141,119136,119135,119150,119137,119135,119151,119138,119135,119152,119139,119135,119153,
    119140,119135,119154,119227,119225,119141,119228,119226,119141,119229,119227,119150,119230,119228,119150,
    119231,119227,119151,119232,119228,119151
};

/* positions in bcq__pairs of those that compose again, by decomposition */
static const uint16_t bcq__composing[941] = {
    881,878,882,0,1,2,3,53,55,238,4,566,5,165,208,210,564,409,57,411,413,415,59,61,63,65,6,419,67,421,425,427,423,7,8,9,
    592,69,71,73,10,590,77,212,214,588,240,75,433,435,439,198,79,441,81,83,187,85,87,443,447,236,445,449,451,11,12,13,
    89,91,93,97,14,604,167,216,218,606,95,453,98,457,189,459,100,461,102,106,463,104,469,467,471,473,475,200,108,15,477,
    112,479,110,483,481,16,17,18,19,114,116,246,20,610,118,169,220,222,161,608,191,493,495,120,497,124,224,226,499,122,
    503,126,128,505,132,507,232,130,515,136,517,234,134,521,519,21,22,23,138,140,142,24,634,144,146,171,228,230,163,632,
    523,148,527,525,533,535,537,539,150,543,541,545,547,549,646,25,152,652,250,551,154,650,648,155,553,157,159,555,557,
    26,27,28,29,54,56,239,30,567,31,166,209,211,565,410,58,412,414,416,60,62,64,66,32,420,68,422,426,428,424,33,34,35,
    593,70,72,74,36,591,78,213,215,589,241,76,434,436,440,199,80,442,82,84,188,86,88,444,448,237,446,450,452,559,37,38,
    39,90,92,94,40,605,168,217,219,607,96,454,99,197,458,190,460,101,462,103,107,464,105,470,468,472,474,476,201,109,41,
    478,113,480,111,484,482,42,43,44,45,115,117,247,46,611,119,170,221,223,162,609,192,494,496,121,498,125,225,227,500,
    123,504,127,129,506,133,508,233,131,516,560,137,518,235,135,522,520,47,48,49,139,141,143,50,635,145,147,172,229,231,
    164,633,524,149,528,526,534,536,538,540,151,544,542,561,546,548,550,647,51,153,653,251,552,52,651,562,649,156,554,
    158,160,556,558,854,253,820,570,568,574,572,181,202,204,185,417,596,594,600,598,455,614,612,618,616,485,244,487,242,
    206,179,175,173,177,571,569,575,573,182,203,205,186,418,597,595,601,599,456,615,613,619,617,486,245,488,243,207,180,
    176,174,178,580,578,584,582,581,579,585,583,429,431,430,432,489,491,490,492,509,510,511,512,529,530,531,532,563,624,
    622,628,626,630,625,623,629,627,631,638,636,642,640,644,639,637,643,641,645,195,193,194,183,184,437,438,248,249,196,
    818,254,817,816,662,663,819,826,255,676,677,827,256,690,691,828,839,257,838,837,262,706,707,860,258,720,721,853,852,
    259,851,850,263,734,861,260,746,747,862,813,823,754,264,810,809,654,655,814,812,755,265,670,671,756,266,682,683,824,
    822,757,267,833,832,269,698,699,835,758,271,714,715,846,847,759,272,844,843,270,726,727,848,760,273,738,739,858,856,
    834,261,836,845,268,849,857,274,275,279,296,298,278,276,300,277,294,304,306,281,308,283,310,280,312,318,282,320,322,
    324,326,316,297,299,287,285,301,286,295,305,307,290,309,284,311,289,313,319,291,321,323,325,327,317,288,292,293,302,
    303,314,315,328,329,331,330,332,334,335,333,336,337,338,347,348,359,358,360,363,364,366,365,367,368,371,369,370,372,
    373,375,374,376,377,379,378,397,398,399,400,401,402,403,404,405,406,407,408,465,466,501,502,513,514,576,586,577,587,
    602,603,620,621,656,658,660,761,657,659,661,762,763,764,765,766,767,768,664,666,668,769,665,667,669,770,771,772,773,
    774,775,776,672,674,673,675,678,680,679,681,684,686,688,777,685,687,689,778,779,780,781,782,783,784,692,694,696,785,
    693,695,697,786,787,788,789,790,791,792,700,702,704,701,703,705,708,710,712,709,711,713,716,718,717,719,722,724,723,
    725,728,730,732,729,731,733,735,736,737,740,742,744,793,741,743,745,794,795,796,797,798,799,800,748,750,752,801,749,
    751,753,802,803,804,805,806,807,808,811,821,855,815,829,830,831,825,859,840,841,842,863,864,865,866,868,867,869,870,
    871,872,873,874,875,876,877,880,879,883,884,885,886,887,888,889,890,899,900,891,892,893,894,901,902,895,896,897,898,
    903,904,905,906,933,908,909,910,911,912,913,914,915,916,917,918,919,920,921,922,923,924,925,926,927,928,929,930,931,
    932,934,960,935,936,937,938,939,940,941,942,943,944,945,946,947,948,949,950,951,952,953,954,955,956,957,958,959,961,
    962,963,964,965,1000,1001,1002,1003,1004,1005,1006,1008,1007,1009,1010,1011,1012
};

/* first, last, canonical combining class */
static const uint32_t bcq__classes[1146] = {
    768,788,230,789,789,232,790,793,220,794,794,232,795,795,216,796,800,220,801,802,202,803,806,220,807,808,202,
    809,819,220,820,824,1,825,828,220,829,836,230,837,837,240,838,838,230,839,841,220,842,844,230,845,846,220,
    848,850,230,851,854,220,855,855,230,856,856,232,857,858,220,859,859,230,860,860,233,861,862,234,863,863,233,
    864,865,234,866,866,233,867,879,230,1155,1159,230,1425,1425,220,1426,1429,230,1430,1430,220,1431,1433,230,
    1434,1434,222,1435,1435,220,1436,1441,230,1442,1447,220,1448,1449,230,1450,1450,220,1451,1452,230,1453,1453,222,
    1454,1454,228,1455,1455,230,1456,1456,10,1457,1457,11,1458,1458,12,1459,1459,13,1460,1460,14,1461,1461,15,
    1462,1462,16,1463,1463,17,1464,1464,18,1465,1466,19,1467,1467,20,1468,1468,21,1469,1469,22,1471,1471,23,
    1473,1473,24,1474,1474,25,1476,1476,230,1477,1477,220,1479,1479,18,1552,1559,230,1560,1560,30,1561,1561,31,
    1562,1562,32,1611,1611,27,1612,1612,28,1613,1613,29,1614,1614,30,1615,1615,31,1616,1616,32,1617,1617,33,
    1618,1618,34,1619,1620,230,1621,1622,220,1623,1627,230,1628,1628,220,1629,1630,230,1631,1631,220,1648,1648,35,
    1750,1756,230,1759,1762,230,1763,1763,220,1764,1764,230,1767,1768,230,1770,1770,220,1771,1772,230,1773,1773,220,
    1809,1809,36,1840,1840,230,1841,1841,220,1842,1843,230,1844,1844,220,1845,1846,230,1847,1849,220,1850,1850,230,
    1851,1852,220,1853,1853,230,1854,1854,220,1855,1857,230,1858,1858,220,1859,1859,230,1860,1860,220,1861,1861,230,
    1862,1862,220,1863,1863,230,1864,1864,220,1865,1866,230,2027,2033,230,2034,2034,220,2035,2035,230,2045,2045,220,
    2070,2073,230,2075,2083,230,2085,2087,230,2089,2093,230,2137,2139,220,2200,2200,230,2201,2203,220,2204,2207,230,
    2250,2254,230,2255,2259,220,2260,2273,230,2275,2275,220,2276,2277,230,2278,2278,220,2279,2280,230,2281,2281,220,
    2282,2284,230,2285,2287,220,2288,2288,27,2289,2289,28,2290,2290,29,2291,2293,230,2294,2294,220,2295,2296,230,
    2297,2298,220,2299,2303,230,2364,2364,7,2381,2381,9,2385,2385,230,2386,2386,220,2387,2388,230,2492,2492,7,
    2509,2509,9,2558,2558,230,2620,2620,7,2637,2637,9,2748,2748,7,2765,2765,9,2876,2876,7,2893,2893,9,3021,3021,9,
    3132,3132,7,3149,3149,9,3157,3157,84,3158,3158,91,3260,3260,7,3277,3277,9,3387,3388,9,3405,3405,9,3530,3530,9,
    3640,3641,103,3642,3642,9,3656,3659,107,3768,3769,118,3770,3770,9,3784,3787,122,3864,3865,220,3893,3893,220,
    3895,3895,220,3897,3897,216,3953,3953,129,3954,3954,130,3956,3956,132,3962,3965,130,3968,3968,130,3970,3971,230,
    3972,3972,9,3974,3975,230,4038,4038,220,4151,4151,7,4153,4154,9,4237,4237,220,4957,4959,230,5908,5909,9,5940,5940,9,
    6098,6098,9,6109,6109,230,6313,6313,228,6457,6457,222,6458,6458,230,6459,6459,220,6679,6679,230,6680,6680,220,
    6752,6752,9,6773,6780,230,6783,6783,220,6832,6836,230,6837,6842,220,6843,6844,230,6845,6845,220,6847,6848,220,
    6849,6850,230,6851,6852,220,6853,6857,230,6858,6858,220,6859,6862,230,6964,6964,7,6980,6980,9,7019,7019,230,
    7020,7020,220,7021,7027,230,7082,7083,9,7142,7142,7,7154,7155,9,7223,7223,7,7376,7378,230,7380,7380,1,7381,7385,220,
    7386,7387,230,7388,7391,220,7392,7392,230,7394,7400,1,7405,7405,220,7412,7412,230,7416,7417,230,7616,7617,230,
    7618,7618,220,7619,7625,230,7626,7626,220,7627,7628,230,7629,7629,234,7630,7630,214,7631,7631,220,7632,7632,202,
    7633,7669,230,7670,7670,232,7671,7672,228,7673,7673,220,7674,7674,218,7675,7675,230,7676,7676,233,7677,7677,220,
    7678,7678,230,7679,7679,220,8400,8401,230,8402,8403,1,8404,8407,230,8408,8410,1,8411,8412,230,8417,8417,230,
    8421,8422,1,8423,8423,230,8424,8424,220,8425,8425,230,8426,8427,1,8428,8431,220,8432,8432,230,11503,11505,230,
    11647,11647,9,11744,11775,230,12330,12330,218,12331,12331,228,12332,12332,232,12333,12333,222,12334,12335,224,
    12441,12442,8,42607,42607,230,42612,42621,230,42654,42655,230,42736,42737,230,43014,43014,9,43052,43052,9,
    43204,43204,9,43232,43249,230,43307,43309,220,43347,43347,9,43443,43443,7,43456,43456,9,43696,43696,230,
    43698,43699,230,43700,43700,220,43703,43704,230,43710,43711,230,43713,43713,230,43766,43766,9,44013,44013,9,
    64286,64286,26,65056,65062,230,65063,65069,220,65070,65071,230,66045,66045,220,66272,66272,220,66422,66426,230,
    68109,68109,220,68111,68111,230,68152,68152,230,68153,68153,1,68154,68154,220,68159,68159,9,68325,68325,230,
    68326,68326,220,68900,68903,230,69291,69292,230,69446,69447,220,69448,69450,230,69451,69451,220,69452,69452,230,
    69453,69456,220,69506,69506,230,69507,69507,220,69508,69508,230,69509,69509,220,69702,69702,9,69744,69744,9,
    69759,69759,9,69817,69817,9,69818,69818,7,69888,69890,230,69939,69940,9,70003,70003,7,70080,70080,9,70090,70090,7,
    70197,70197,9,70198,70198,7,70377,70377,7,70378,70378,9,70459,70460,7,70477,70477,9,70502,70508,230,70512,70516,230,
    70722,70722,9,70726,70726,7,70750,70750,230,70850,70850,9,70851,70851,7,71103,71103,9,71104,71104,7,71231,71231,9,
    71350,71350,9,71351,71351,7,71467,71467,9,71737,71737,9,71738,71738,7,71997,71998,9,72003,72003,7,72160,72160,9,
    72244,72244,9,72263,72263,9,72345,72345,9,72767,72767,9,73026,73026,7,73028,73029,9,73111,73111,9,92912,92916,1,
    92976,92982,230,94192,94193,6,113822,113822,1,119141,119142,216,119143,119145,1,119149,119149,226,119150,119154,216,
    119163,119170,220,119173,119177,230,119178,119179,220,119210,119213,230,119362,119364,230,122880,122886,230,
    122888,122904,230,122907,122913,230,122915,122916,230,122918,122922,230,123184,123190,230,123566,123566,230,
    123628,123631,230,125136,125142,220,125252,125257,230,125258,125258,7
};

/* first, last, step, difference of the folded character */
static const int32_t bcq__folds[780] = {
    65,90,1,32,181,181,1,775,192,214,1,32,216,222,1,32,256,302,2,1,306,310,2,1,313,327,2,1,330,374,2,1,376,376,1,-121,
    377,381,2,1,383,383,1,-268,385,385,1,210,386,388,2,1,390,390,1,206,391,391,1,1,393,394,1,205,395,395,1,1,
    398,398,1,79,399,399,1,202,400,400,1,203,401,401,1,1,403,403,1,205,404,404,1,207,406,406,1,211,407,407,1,209,
    408,408,1,1,412,412,1,211,413,413,1,213,415,415,1,214,416,420,2,1,422,422,1,218,423,423,1,1,425,425,1,218,
    428,428,1,1,430,430,1,218,431,431,1,1,433,434,1,217,435,437,2,1,439,439,1,219,440,440,1,1,444,444,1,1,452,452,1,2,
    453,453,1,1,455,455,1,2,456,456,1,1,458,458,1,2,459,475,2,1,478,494,2,1,497,497,1,2,498,500,2,1,502,502,1,-97,
    503,503,1,-56,504,542,2,1,544,544,1,-130,546,562,2,1,570,570,1,10795,571,571,1,1,573,573,1,-163,574,574,1,10792,
    577,577,1,1,579,579,1,-195,580,580,1,69,581,581,1,71,582,590,2,1,837,837,1,116,880,882,2,1,886,886,1,1,
    895,895,1,116,902,902,1,38,904,906,1,37,908,908,1,64,910,911,1,63,913,929,1,32,931,939,1,32,962,962,1,1,975,975,1,8,
    976,976,1,-30,977,977,1,-25,981,981,1,-15,982,982,1,-22,984,1006,2,1,1008,1008,1,-54,1009,1009,1,-48,
    1012,1012,1,-60,1013,1013,1,-64,1015,1015,1,1,1017,1017,1,-7,1018,1018,1,1,1021,1023,1,-130,1024,1039,1,80,
    1040,1071,1,32,1120,1152,2,1,1162,1214,2,1,1216,1216,1,15,1217,1229,2,1,1232,1326,2,1,1329,1366,1,48,
    4256,4293,1,7264,4295,4295,1,7264,4301,4301,1,7264,5112,5117,1,-8,7296,7296,1,-6222,7297,7297,1,-6221,
    7298,7298,1,-6212,7299,7300,1,-6210,7301,7301,1,-6211,7302,7302,1,-6204,7303,7303,1,-6180,7304,7304,1,35267,
    7312,7354,1,-3008,7357,7359,1,-3008,7680,7828,2,1,7835,7835,1,-58,7840,7934,2,1,7944,7951,1,-8,7960,7965,1,-8,
    7976,7983,1,-8,7992,7999,1,-8,8008,8013,1,-8,8025,8031,2,-8,8040,8047,1,-8,8120,8121,1,-8,8122,8123,1,-74,
    8126,8126,1,-7173,8136,8139,1,-86,8152,8153,1,-8,8154,8155,1,-100,8168,8169,1,-8,8170,8171,1,-112,8172,8172,1,-7,
    8184,8185,1,-128,8186,8187,1,-126,8486,8486,1,-7517,8490,8490,1,-8383,8491,8491,1,-8262,8498,8498,1,28,
    8544,8559,1,16,8579,8579,1,1,9398,9423,1,26,11264,11311,1,48,11360,11360,1,1,11362,11362,1,-10743,
    11363,11363,1,-3814,11364,11364,1,-10727,11367,11371,2,1,11373,11373,1,-10780,11374,11374,1,-10749,
    11375,11375,1,-10783,11376,11376,1,-10782,11378,11378,1,1,11381,11381,1,1,11390,11391,1,-10815,11392,11490,2,1,
    11499,11501,2,1,11506,11506,1,1,42560,42604,2,1,42624,42650,2,1,42786,42798,2,1,42802,42862,2,1,42873,42875,2,1,
    42877,42877,1,-35332,42878,42886,2,1,42891,42891,1,1,42893,42893,1,-42280,42896,42898,2,1,42902,42920,2,1,
    42922,42922,1,-42308,42923,42923,1,-42319,42924,42924,1,-42315,42925,42925,1,-42305,42926,42926,1,-42308,
    42928,42928,1,-42258,42929,42929,1,-42282,42930,42930,1,-42261,42931,42931,1,928,42932,42946,2,1,42948,42948,1,-48,
    42949,42949,1,-42307,42950,42950,1,-35384,42951,42953,2,1,42960,42960,1,1,42966,42968,2,1,42997,42997,1,1,
    43888,43967,1,-38864,65313,65338,1,32,66560,66599,1,40,66736,66771,1,40,66928,66938,1,39,66940,66954,1,39,
    66956,66962,1,39,66964,66965,1,39,68736,68786,1,64,71840,71871,1,32,93760,93791,1,32,125184,125217,1,34
};

/* character, what it folds to (0: nothing more) */
static const uint32_t bcq__full_folds[416] = {
    223,115,115,0,304,105,775,0,329,700,110,0,496,106,780,0,912,953,776,769,944,965,776,769,1415,1381,1410,0,
    7830,104,817,0,7831,116,776,0,7832,119,778,0,7833,121,778,0,7834,97,702,0,7838,115,115,0,8016,965,787,0,
    8018,965,787,768,8020,965,787,769,8022,965,787,834,8064,7936,953,0,8065,7937,953,0,8066,7938,953,0,8067,7939,953,0,
    8068,7940,953,0,8069,7941,953,0,8070,7942,953,0,8071,7943,953,0,8072,7936,953,0,8073,7937,953,0,8074,7938,953,0,
    8075,7939,953,0,8076,7940,953,0,8077,7941,953,0,8078,7942,953,0,8079,7943,953,0,8080,7968,953,0,8081,7969,953,0,
    8082,7970,953,0,8083,7971,953,0,8084,7972,953,0,8085,7973,953,0,8086,7974,953,0,8087,7975,953,0,8088,7968,953,0,
    8089,7969,953,0,8090,7970,953,0,8091,7971,953,0,8092,7972,953,0,8093,7973,953,0,8094,7974,953,0,8095,7975,953,0,
    8096,8032,953,0,8097,8033,953,0,8098,8034,953,0,8099,8035,953,0,8100,8036,953,0,8101,8037,953,0,8102,8038,953,0,
    8103,8039,953,0,8104,8032,953,0,8105,8033,953,0,8106,8034,953,0,8107,8035,953,0,8108,8036,953,0,8109,8037,953,0,
    8110,8038,953,0,8111,8039,953,0,8114,8048,953,0,8115,945,953,0,8116,940,953,0,8118,945,834,0,8119,945,834,953,
    8124,945,953,0,8130,8052,953,0,8131,951,953,0,8132,942,953,0,8134,951,834,0,8135,951,834,953,8140,951,953,0,
    8146,953,776,768,8147,953,776,769,8150,953,834,0,8151,953,776,834,8162,965,776,768,8163,965,776,769,8164,961,787,0,
    8166,965,834,0,8167,965,776,834,8178,8060,953,0,8179,969,953,0,8180,974,953,0,8182,969,834,0,8183,969,834,953,
    8188,969,953,0,64256,102,102,0,64257,102,105,0,64258,102,108,0,64259,102,102,105,64260,102,102,108,64261,115,116,0,
    64262,115,116,0,64275,1396,1398,0,64276,1396,1381,0,64277,1396,1387,0,64278,1406,1398,0,64279,1396,1389,0
};
/* unicode tables: end */

#define BCQ__ROWS(table, width) (sizeof(table) / sizeof *(table) / (width))
#define BCQ__FOLDED (BCQ__MAX_NAME * 4) /* code points that 512 bytes decompose into, at most */

/* The last row of a sorted table whose first number is not above c; `rows` where there is none. */
static size_t bcq__row(const uint32_t *table, size_t width, size_t rows, uint32_t c)
{
    size_t low = 0, high = rows;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table[middle * width] <= c)
            low = middle + 1;
        else
            high = middle;
    }
    return low ? low - 1 : rows;
}

static uint32_t bcq__combining(uint32_t c)
{
    size_t rows = BCQ__ROWS(bcq__classes, 3), row = c < 0x300 ? rows : bcq__row(bcq__classes, 3, rows, c);
    return row < rows && c <= bcq__classes[3 * row + 1] ? bcq__classes[3 * row + 2] : 0;
}

/* The full canonical decomposition of c goes to `out`, at most 4 code points; the left part is what goes on. */
static size_t bcq__decompose(uint32_t c, uint32_t *out)
{
    uint32_t tail[4];
    size_t n = 0, count = 0, rows, row;
    if (c >= 0xac00 && c < 0xd7a4) {
        uint32_t s = c - 0xac00;
        out[count++] = 0x1100 + s / 588;
        out[count++] = 0x1161 + s % 588 / 28;
        if (s % 28)
            out[count++] = 0x11a7 + s % 28;
        return count;
    }
    while (c >= 0xc0 && n < 3) {
        rows = BCQ__ROWS(bcq__pairs, 3);
        row = bcq__row(bcq__pairs, 3, rows, c);
        if (row < rows && bcq__pairs[3 * row] == c) {
            tail[n++] = bcq__pairs[3 * row + 2];
            c = bcq__pairs[3 * row + 1];
            continue;
        }
        rows = BCQ__ROWS(bcq__ones, 2);
        row = bcq__row(bcq__ones, 2, rows, c);
        if (row >= rows || bcq__ones[2 * row] != c)
            break;
        c = bcq__ones[2 * row + 1];
    }
    out[count++] = c;
    while (n)
        out[count++] = tail[--n];
    return count;
}

/* The character that a and b compose to, or 0. */
static uint32_t bcq__compose(uint32_t a, uint32_t b)
{
    size_t low = 0, high = BCQ__ROWS(bcq__composing, 1);
    if (a >= 0x1100 && a < 0x1113 && b >= 0x1161 && b < 0x1176)
        return 0xac00 + ((a - 0x1100) * 21 + (b - 0x1161)) * 28;
    if (a >= 0xac00 && a < 0xd7a4 && (a - 0xac00) % 28 == 0 && b > 0x11a7 && b < 0x11c3)
        return a + (b - 0x11a7);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const uint32_t *row = bcq__pairs + 3 * (size_t)bcq__composing[middle];
        if (row[1] == a && row[2] == b)
            return row[0];
        if (row[1] < a || (row[1] == a && row[2] < b))
            low = middle + 1;
        else
            high = middle;
    }
    return 0;
}

/* Normalization form C of at most 512 bytes of UTF-8; returns the number of code points. Meanwhile the upper eight
   bits hold the combining class. */
static size_t bcq__nfc(bcq__str s, uint32_t *c)
{
    size_t i = 0, n = 0, k, starter = 0, out = 0;
    uint32_t last = 0, composed;
    while (i < s.bytes)
        n += bcq__decompose(bcq__get_utf8(s.at, &i), c + n);
    for (i = 0; i < n; i++) { /* canonical order: sorted by class between starters */
        uint32_t class_i = bcq__combining(c[i]), moved = c[i] | class_i << 24;
        for (k = i; class_i && k > 0 && c[k - 1] >> 24 > class_i; k--)
            c[k] = c[k - 1];
        c[k] = moved;
    }
    for (i = 0; i < n; i++) {
        uint32_t class_i = c[i] >> 24, code = c[i] & 0x1fffff;
        /* c[starter] is the last starter; blocked unless all between has a class, and a lower one than this */
        if (out && !(c[starter] >> 24) && (starter + 1 == out || (last && last < class_i))) {
            composed = bcq__compose(c[starter], code);
            if (composed) {
                c[starter] = composed;
                continue;
            }
        }
        if (!class_i)
            starter = out;
        last = class_i;
        c[out++] = c[i];
    }
    for (i = 0; i < out; i++)
        c[i] &= 0x1fffff;
    return out;
}

/* The folded name goes to `out` as UTF-8 unless `out` is NULL; returns its bytes. `work` has BCQ__FOLDED numbers. */
static size_t bcq__fold(bcq__str s, uint32_t *work, char *out)
{
    size_t i, n, bytes = 0, row, rows;
    char scratch[4];
    for (i = 0; i < s.bytes && (unsigned char)s.at[i] < 0x80; i++)
        if (out)
            out[i] = (char)(s.at[i] >= 'A' && s.at[i] <= 'Z' ? s.at[i] + 32 : s.at[i]);
    if (i == s.bytes)
        return s.bytes;
    n = bcq__nfc(s, work);
    for (i = 0; i < n; i++) {
        uint32_t c = work[i], folded[3] = {0, 0, 0};
        unsigned k;
        folded[0] = c;
        rows = BCQ__ROWS(bcq__full_folds, 4);
        row = bcq__row(bcq__full_folds, 4, rows, c);
        if (row < rows && bcq__full_folds[4 * row] == c) {
            memcpy(folded, bcq__full_folds + 4 * row + 1, sizeof folded);
        } else {
            size_t low = 0, high = BCQ__ROWS(bcq__folds, 4);
            while (low < high) {
                size_t middle = low + (high - low) / 2;
                const int32_t *f = bcq__folds + 4 * middle;
                if ((int32_t)c > f[1]) {
                    low = middle + 1;
                } else {
                    if ((int32_t)c >= f[0] && ((int32_t)c - f[0]) % f[2] == 0)
                        folded[0] = (uint32_t)((int32_t)c + f[3]);
                    high = (int32_t)c >= f[0] ? low : middle;
                }
            }
        }
        for (k = 0; k < 3 && (k == 0 || folded[k]); k++)
            bytes += bcq__put_utf8(out ? out + bytes : scratch, folded[k]);
    }
    return bytes;
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

typedef struct bcq__names {
    const char *text;
    size_t *start; /* of name i; its end is start[i + 1] */
} bcq__names;

static int bcq__by_folded(const void *context, uint32_t a, uint32_t b)
{
    const bcq__names *names = (const bcq__names *)context;
    bcq__str x, y;
    x.at = names->text + names->start[a];
    x.bytes = names->start[a + 1] - names->start[a];
    y.at = names->text + names->start[b];
    y.bytes = names->start[b + 1] - names->start[b];
    return bcq__compare(x, y);
}

/* V120 */
static int bcq__check_folded(const bcq_file *f, bcq_error *error)
{
    uint32_t i, n = f->tensor_count, *order = NULL, *work = (uint32_t *)bcq__alloc(BCQ__FOLDED, sizeof(uint32_t));
    size_t *start = (size_t *)bcq__alloc((uint64_t)n + 1, sizeof *start), total = 0;
    char *text = NULL;
    bcq__names names;
    int code = 0;
    if (work && start) {
        for (i = 0; i < n; i++) {
            start[i] = total;
            total += bcq__fold(bcq__tensor_name(f->tensors + i), work, NULL);
        }
        start[n] = total;
        text = (char *)bcq__alloc(total, 1);
    }
    names.text = text;
    names.start = start;
    if (text) {
        for (i = 0; i < n; i++)
            bcq__fold(bcq__tensor_name(f->tensors + i), work, text + start[i]);
        order = bcq__sorted(n, bcq__by_folded, &names);
    }
    if (!order)
        code = bcq__no_memory(error);
    for (i = 1; !code && i < n; i++)
        if (bcq__by_folded(&names, order[i - 1], order[i]) == 0)
            code = bcq__bad(error, 120, bcq__tensor_name(f->tensors + order[i]), "has a twin but for case or composition");
    BCQ_FREE(order);
    BCQ_FREE(text);
    BCQ_FREE(start);
    BCQ_FREE(work);
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

/* Section 3, from V105 on: f->header.text of N bytes, f->data_bytes bytes after it. Not strict: without V117, V119
   and V120 (section 10 asks no more of raw.safetensors). */
static int bcq__read_container(bcq_file *f, int strict, bcq_error *error)
{
    static const bcq__rules rules = {105, 106, 107};
    bcq__json *d = &f->header;
    uint32_t i, count, node = 1;
    BCQ__TRY(bcq__parse(d, BCQ__KIND_HEADER, rules, error));
    count = d->nodes[0].count;
    for (i = 0; i < count; i++, node = d->nodes[node + 1].next) {
        const bcq__node *value = d->nodes + node + 1;
        if (bcq__is(d, node, "__metadata__"))
            f->metadata = node + 1;
        else if ((value->type == BCQ__OBJECT || value->type == BCQ__ARRAY) && value->len > BCQ__MAX_ENTRY)
            return bcq__bad(error, 109, bcq__string(d, node), "an entry of more than 4,096 bytes");
    }
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
    if (strict)
        BCQ__TRY(bcq__check_alignment(f, error));
    BCQ__TRY(bcq__check_metadata(f, error));
    for (i = 0; strict && i < f->tensor_count; i++)
        if (f->tensors[i].name_bytes > BCQ__MAX_NAME)
            return bcq__bad(error, 119, bcq__tensor_name(f->tensors + i), "a name of more than 512 bytes");
    if (strict)
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
    int64_t q, g;
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
    if (!fits || !bcq__in_range(d, v[BITS], 1, 8, &q) || !bcq__in_range(d, v[GROUP], 8, BCQ__MAX_DIM, &g))
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
        uint32_t g = scheme->segments[k].group_size;
        if (g > w->widths[k] || (w->widths[k] % g && k + 1 < scheme->segment_count))
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
    uint32_t text = f->metadata ? bcq__get(&f->header, f->metadata, "bcqfmt") : 0, i, values[5];
    bcq__json *d = &f->descriptor;
    bcq__tables t;
    int code;
    if (!text)
        return bcq__fail(error, 201, "__metadata__ has no key bcqfmt");
    if (!bcq__is(&f->header, bcq__get(&f->header, f->metadata, "format"), "pt"))
        return bcq__fail(error, 202, "__metadata__ has no format = pt");
    BCQ__TRY(bcq__parse_copy(d, bcq__string(&f->header, text), BCQ__KIND_LIMITED, rules, error));
    BCQ__TRY(bcq__check_version(d, error));
    if (!bcq__is_canonical(d, ""))
        return bcq__fail(error, 204, "the descriptor is not canonical JSON");
    if (!bcq__fields(d, 0, names, 4, values))
        return bcq__fail(error, 208, "the descriptor lacks a key or has one too many");
    memset(&t, 0, sizeof t);
    code = bcq__read_tables(d, 0, 208, &t, error);
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

/* ---- parts (sections 6 and 7) */

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
    return bcq__ceil_div(w->widths[k], w->scheme->segments[k].group_size);
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
    if (s->bytes)
        bcq__want_part(w, list, n, k, codes, 0, BCQ_U8, 0, w->rows, groups);
    else if (!tiled)
        bcq__want_part(w, list, n, k, codes, 0, BCQ_I32, 0, w->rows, bcq__ceil_div(groups * s->bits, 32));
    bcq__want_part(w, list, n, k, scale, 0, s->dtype, 0, row_groups, columns);
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

/* V402 to V404 */
static int bcq__check_zeros(const bcq_weight *w, bcq_error *error)
{
    unsigned k;
    for (k = 0; k < w->scheme->segment_count; k++) {
        const bcq_segment *s = w->scheme->segments + k;
        const bcq_tensor *t = bcq__segment_part(w, k, "zero", 0);
        uint64_t groups = bcq__groups(w, k), row, rows = w->stack * w->rows, j;
        uint64_t row_bytes = 4 * bcq__ceil_div(groups * s->zero_bits, 32);
        unsigned smallest = 0x3ff, largest = 0, digits = 1;
        if (!t || !s->zero_bits)
            continue;
        for (row = 0; row < rows; row++) {
            for (j = 0; j < groups; j++) {
                unsigned zero = bcq__field(t->data + row * row_bytes, j, s->zero_bits);
                smallest = zero < smallest ? zero : smallest;
                largest = zero > largest ? zero : largest;
            }
        }
        while (largest >> digits)
            digits++;
        if (digits != s->zero_bits)
            return bcq__bad(error, 402, bcq__tensor_name(t), "zero points that are wider than needed");
        if (smallest == largest)
            return bcq__bad(error, 403, bcq__tensor_name(t), "zero points that are all the same");
        if (largest > 1u << s->bits)
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
            uint64_t first = a * run->segment->group_size, count = run->width - first;
            int table;
            count = count < run->segment->group_size ? count : run->segment->group_size;
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
static int bcq__read_head(bcq_file *f, const bcq__input *in, int strict, bcq_error *error)
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
    return bcq__read_container(f, strict, error);
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

/* V507: inside the folder, or from snapshots/<revision>/ into the blobs/ next to snapshots. */
static int bcq__stays_inside(const char *link, const char *root)
{
    char target[BCQ__PATH], work[BCQ__PATH], home[BCQ__PATH];
    const char *revision = strrchr(root, '/');
    size_t bytes;
    if (!bcq__resolve(link, target, work))
        return 0;
    if (bcq__is_below(target, root, strlen(root)))
        return 1;
    bytes = revision ? (size_t)(revision - root) : 0;
    if (bytes < 10 || bytes > sizeof home || memcmp(root + bytes - 10, "/snapshots", 10) != 0)
        return 0;
    memcpy(home, root, bytes - 10);
    memcpy(home + bytes - 10, "/blobs", 7);
    return bcq__is_below(target, home, strlen(home));
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

/* A file of the folder that must exist (else rule `missing`), be regular (V508) and not too long (else `too_long`).
   Its bytes, ended by a zero byte, belong to the caller. */
static int bcq__read_member(const char *root, const char *name, int missing, uint64_t limit, int too_long, bcq__str *out,
                            bcq_error *error)
{
    char *path, *text = NULL;
    struct stat status;
    bcq__input in;
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

/* V501, V502 and V506: the index, if there is one; *map is the node of weight_map, or 0. */
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
    for (i = 0; i < folder->tables.entry_count; i++)
        if (bcq__type(d, folder->tables.entries[i].file) != BCQ__STRING)
            return bcq__bad(error, 602, name, "file of a weight is malformed");
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

/* V604 to V606: files of the manifest against those of the folder. */
static int bcq__check_files(const bcq_folder *folder, int flags, bcq_error *error)
{
    const bcq__json *d = &folder->manifest;
    uint32_t table = bcq__get(d, 0, "files"), i, node, count = d->nodes[table].count;
    size_t k = 0;
    char hex[65];
    for (i = 0, node = table + 1; i < count; i++, node = d->nodes[node + 1].next, k++) {
        while (k < folder->listing.count && strcmp(folder->listing.items[k], "bcq_manifest.json") == 0)
            k++;
        if (k >= folder->listing.count || !bcq__is(d, node, folder->listing.items[k]))
            return bcq__bad(error, 604, bcq__string(d, node), "files of the manifest are not those of the folder");
    }
    while (k < folder->listing.count && strcmp(folder->listing.items[k], "bcq_manifest.json") == 0)
        k++;
    if (k < folder->listing.count)
        return bcq__bad(error, 604, bcq__text(folder->listing.items[k]), "a file that the manifest does not name");
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

/* ---- provenance (section 10) */

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

bcq_weight *bcq_folder_find_weight(bcq_folder *folder, const char *name)
{
    uint32_t index = bcq__weight_index(folder, bcq__text(name));
    return index < folder->weight_count ? folder->weights[index] : NULL;
}

#endif /* BCQ_NO_POSIX */
#endif /* BCQ_IMPLEMENTATION */
