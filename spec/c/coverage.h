/* Which code an input reaches, for fuzz.c: coverage.c has to be compiled without -fsanitize-coverage. */

#ifndef BCQ_COVERAGE_H
#define BCQ_COVERAGE_H

void coverage_start(void);  /* forget what the last input reached; from here on it is recorded */
int coverage_is_new(void);  /* record no more; whether a jump was taken that none before took */
void __sanitizer_cov_trace_pc(void); /* called by the compiler's instrumentation at every jump */

#endif
