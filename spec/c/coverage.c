#include "coverage.h"

#include <stdint.h>
#include <string.h>

#define JUMPS 65536u

static union {
    unsigned char bytes[JUMPS];
    uint64_t words[JUMPS / 8];
} now, seen;
static uintptr_t before;
static int recording;

void coverage_start(void)
{
    memset(&now, 0, sizeof now);
    before = 0;
    recording = 1;
}

int coverage_is_new(void)
{
    unsigned i;
    int found = 0;
    recording = 0;
    for (i = 0; i < JUMPS / 8; i++) {
        if (now.words[i] & ~seen.words[i]) {
            seen.words[i] |= now.words[i];
            found = 1;
        }
    }
    return found;
}

void __sanitizer_cov_trace_pc(void)
{
    uintptr_t here;
    if (!recording)
        return;
    here = (uintptr_t)__builtin_return_address(0);
    now.bytes[((here >> 1) ^ before) % JUMPS] = 1;
    before = here >> 2;
}
