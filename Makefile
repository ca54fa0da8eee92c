# tide: `make` builds the program, `make test` runs every test that needs no GPU.
#
#   make test-gpu    what needs a GPU: every CUDA operation against its C twin, and the fixtures
#   make test-asan   the C tests under AddressSanitizer and UndefinedBehaviorSanitizer
#   make mutants     spoils the hierarchy rule by rule and sees its test fail
#   make fuzz        the fuzz targets, FUZZ_SECONDS each (needs clang)
#   make bench       measures and puts the figures into README.md
#   make bench-gpu   the same for a GPU's figures
#   make bench-claims   measures, and says of each claim of the paper whether it holds here; data and drawings in build/bench

CC ?= gcc
CFLAGS ?= -O3 -march=native
FUZZ_SECONDS ?= 60
WARNINGS := -Wall -Wextra -Werror -Wno-psabi
FLAGS := -std=gnu11 $(WARNINGS) -fopenmp -fno-math-errno
LDLIBS := -lcjson -lpcre2-8 -lutf8proc -lxxhash -ledit -lm

OBJECTS := build/engine.o build/backend.o build/tokenizer.o build/bench.o build/tide.o

# The CUDA backend joins the program where there is an nvcc; sm_90a needs one of CUDA 12. `make NVCC=` builds without.
NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
ifneq ($(NVCC),)
CUDA_RELEASE := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
CUDA_TARGETS := -gencode=arch=compute_80,code=sm_80
ifneq ($(filter-out 10 11,$(CUDA_RELEASE)),)
CUDA_TARGETS += -gencode=arch=compute_90a,code=sm_90a --threads 2
endif
NVCC_FLAGS := -std=c++20 -O3 $(CUDA_TARGETS) -Xcompiler -Wall,-Wextra,-Werror,-Wno-missing-field-initializers,-fopenmp
CUDA_LIBS := -L$(dir $(realpath $(NVCC)))../lib64 -lcudart_static -lstdc++ -lpthread -ldl -lrt
OBJECTS += build/engine_cuda.o
build/tide.o build/bench.o: FLAGS += -DTIDE_CUDA
LDLIBS += $(CUDA_LIBS)
endif

tide: $(OBJECTS)
	$(CC) $(FLAGS) $(CFLAGS) $^ $(LDLIBS) -o $@

build/%.o: %.c engine.h Makefile | build
	$(CC) $(FLAGS) $(CFLAGS) -c $< -o $@

build/engine_cuda.o: engine.cu engine.h | build
	$(NVCC) $(NVCC_FLAGS) -c $< -o $@

# A test program includes engine.c and backend.c, so that it reaches what is static there, and the hierarchy checks its invariants at every step.
TEST_FLAGS := $(FLAGS) -DTIDE_DEBUG -Wno-unused-function -Wno-unused-variable -Wno-unused-const-variable
TESTS := $(patsubst tests/%.c,build/%,$(filter-out tests/test_gpu.c,$(wildcard tests/test_*.c)))

build/test_%: tests/test_%.c $(wildcard tests/*.h) engine.c backend.c engine.h build/tokenizer.o
	$(CC) $(TEST_FLAGS) $(CFLAGS) $< build/tokenizer.o $(LDLIBS) -o $@

test: tide $(TESTS)
	tests/run.sh $(TESTS) tests/test_cli.py

GPU_TEST_OBJECTS := build/backend.o build/tokenizer.o build/engine_cuda.o
build/test_gpu: tests/test_gpu.c tests/check.h engine.c engine.h $(GPU_TEST_OBJECTS)
	$(CC) $(filter-out -DTIDE_DEBUG,$(TEST_FLAGS)) -I. $(CFLAGS) $< $(GPU_TEST_OBJECTS) $(LDLIBS) -o $@

test-gpu: build/test_gpu
	build/test_gpu

soak: build/test_gpu
	build/test_gpu soak 20000

SANITIZE := -O1 -g -march=native -fsanitize=address,undefined -fno-sanitize-recover=all
SANITIZED := $(patsubst build/%,build/asan_%,$(TESTS))

build/asan_%: tests/%.c $(wildcard tests/*.h) engine.c backend.c tokenizer.c engine.h | build
	$(CC) $(TEST_FLAGS) $(SANITIZE) $< tokenizer.c $(LDLIBS) -o $@

build/asan_tide: engine.c backend.c tokenizer.c bench.c tide.c engine.h | build
	$(CC) $(FLAGS) $(SANITIZE) engine.c backend.c tokenizer.c bench.c tide.c $(LDLIBS) -o $@

test-asan: build/asan_tide $(SANITIZED)
	TIDE=build/asan_tide OMP_NUM_THREADS=2 tests/run.sh $(SANITIZED) tests/test_cli.py

mutants: build/tokenizer.o
	tests/mutate.py

FUZZERS := $(patsubst tests/%.c,build/%,$(wildcard tests/fuzz_*.c))

build/fuzz_%: tests/fuzz_%.c engine.c backend.c tokenizer.c engine.h | build
	clang $(TEST_FLAGS) -Wno-unused-command-line-argument -O1 -g -march=native -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $< tokenizer.c $(LDLIBS) -o $@

fuzz: $(FUZZERS)
	for target in $(FUZZERS); do mkdir -p build/corpus-$$(basename $$target) && $$target -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 build/corpus-$$(basename $$target) || exit 1; done

# Measures, and writes the figures into README.md between their marks.
bench: tide | build/bench
	{ set -e; echo '```'; sed -n 's/^model name[^:]*: /processor        /p' /proc/cpuinfo | head -n 1; ./tide bench cpu; ./tide bench load; \
	  for name in cost loadstep memory; do echo; ./tide bench $$name -o build/bench; done; echo '```'; } > build/bench.txt
	sed -i -e '/^<!-- bench/,/^<!-- end/{//!d}' -e '/^<!-- bench/r build/bench.txt' README.md

bench-claims: tide | build/bench build/bench/dspark
	{ for name in memory resolve cost loadstep acceptance lengths draft speed; do ./tide bench $$name -o build/bench || exit 1; done; \
	  ./tide bench acceptance --draft weights/draft-dspark -o build/bench/dspark && \
	  ./tide bench confidence --draft weights/draft-dspark -o build/bench/dspark; } > build/claims.txt
	grep '^claim:' build/claims.txt
	! grep -q '^claim:.*: falls short (' build/claims.txt

build build/bench build/bench/dspark:
	mkdir -p $@

clean:
	rm -rf build tide

# The same for the GPU's figures.
bench-gpu: tide | build/bench
	./tide bench gpu all --md -o build/bench > build/bench-gpu.txt
	{ set -e; echo '```'; ./tide bench decode -m weights/shapes/glm-5.3-fp8 --dummy --layers 13 --kv-dtype fp8 -o build/bench; \
	  ./tide bench decode -m weights/mini -o build/bench | sed '/^us a step/,$$d'; \
	  ./tide bench decode -m weights/shapes/deepseek-v4-flash --dummy --layers 32 --kv-dtype fp4 -o build/bench | sed '/^us a step/,$$d'; \
	  ./tide bench decode -m weights/shapes/deepseek-v4.1-flash --dummy --layers 9 --kv-dtype fp4 -o build/bench | sed '/^us a step/,$$d'; \
	  echo '```'; } > build/bench-steps.txt
	sed -i -e '/^<!-- gpu/,/^<!-- end of gpu/{//!d}' -e '/^<!-- gpu/r build/bench-gpu.txt' README.md
	sed -i -e '/^<!-- steps/,/^<!-- end of steps/{//!d}' -e '/^<!-- steps/r build/bench-steps.txt' README.md

.PHONY: bench-gpu test test-gpu soak test-asan mutants fuzz bench bench-claims clean
