/* check.h: what every test program shares. CHECK counts and reports; check_report() prints the closing line. */
#ifndef TIDE_CHECK_H
#define TIDE_CHECK_H

#include <stdio.h>

static int checks_passed, checks_failed;

/* CHECK(condition, "what was expected of %s", name): one line per failure, silence otherwise. */
#define CHECK(condition, ...) do {                                             \
        if (condition) { checks_passed++; break; }                             \
        checks_failed++;                                                       \
        fprintf(stderr, "%s:%d: failed: ", __FILE__, __LINE__);                \
        fprintf(stderr, __VA_ARGS__);                                          \
        fprintf(stderr, "\n");                                                 \
    } while (0)

static int check_report(void) {
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed > 0;
}

#endif
