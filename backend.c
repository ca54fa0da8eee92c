/* backend.c: the operations of engine.h in plain C, the twin of engine.cu.
 *
 *     vectors and the two inner products . activations . cached rows, index selection, attention . mixture of experts .
 *     DeepSeek-V4 . the hierarchy's operations . sampling and acceptance . drafters' operations
 *
 * Every operation computes each row by itself and in an order that only the shapes decide, so that a token never depends on its
 * neighbours. OpenMP shares out rows or output columns.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* =====================================================================================================================
 * Memory
 *
 * Owns: blocks of memory, which are touched only as they fill, and how much there is. Everything lies where the pipeline can
 * reach it, so nothing is moved.
 */

static bool start(const DeviceOptions *options, Error *error) {
    (void)options;
    (void)error;
    return true;
}

/* The number in the first line of a file that starts with `label`, times `unit`; `otherwise` where there is none. */
static size_t read_limit(const char *path, const char *label, size_t unit, size_t otherwise) {
    FILE *file = fopen(path, "r");
    char line[256];
    unsigned long long value;
    size_t limit = otherwise;
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, label, strlen(label)) && sscanf(line + strlen(label), " %llu", &value) == 1) {
            limit = (size_t)value * unit;
            break;
        }
    if (file) fclose(file);
    return limit;
}

/* Bytes this process may still take: the machine's free memory, under its container's and its own limit. */
static size_t available_memory(Memory memory) {
    (void)memory;
    size_t available = read_limit("/proc/meminfo", "MemAvailable:", 1024, SIZE_MAX);
    size_t container = read_limit("/sys/fs/cgroup/memory.max", "", 1,
                                  read_limit("/sys/fs/cgroup/memory/memory.limit_in_bytes", "", 1, SIZE_MAX));
    if (container < available) available = container;
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < available)
        available = (size_t)limit.rlim_cur;
    return available;
}

enum { BLOCK_HEAD = 4096 };     /* bytes in front of a block: its size stands there */

static void *take(size_t bytes, Memory memory, Error *error) {
    (void)memory;
    void *block = mmap(NULL, bytes + BLOCK_HEAD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) return fail(error, "cannot take %zu MB of memory: %s", bytes >> 20, strerror(errno)), NULL;
    *(size_t *)block = bytes + BLOCK_HEAD;
    return (uint8_t *)block + BLOCK_HEAD;
}

static void give_back(void *block, Memory memory) {
    (void)memory;
    if (!block) return;
    void *head = (uint8_t *)block - BLOCK_HEAD;
    munmap(head, *(size_t *)head);
}

static const void *import_weights(const void *data, size_t bytes, Error *error) {
    (void)bytes;
    (void)error;
    return data;
}

static void release_weights(void) {}

static uint16_t narrow_bf16(float x);
static uint8_t narrow_e4m3(float x);

/* Four values are the four 16-bit pieces of one hash (MurmurHash3's last steps). */
static const void *make_weights(void *space, DType dtype, size_t count, float low, float high, uint64_t seed, Error *error) {
    (void)error;
    const float step = (high - low) / 65536;
#pragma omp parallel for
    for (size_t four = 0; four < (count + 3) / 4; four++) {
        uint64_t hash = seed + four;
        hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdu;
        hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53u;
        hash ^= hash >> 33;
        for (size_t i = 4 * four; i < count && i < 4 * four + 4; i++, hash >>= 16) {
            float value = fmaf((float)(hash & 0xffff), step, low);
            if (dtype == DTYPE_F32) ((float *)space)[i] = value;
            else if (dtype == DTYPE_BF16) ((uint16_t *)space)[i] = narrow_bf16(value);
            else if (dtype == DTYPE_I8) ((uint8_t *)space)[i] = (uint8_t)hash;
            else if (dtype == DTYPE_F8_E8M0) ((uint8_t *)space)[i] = (uint8_t)(float_to_bits(value) >> 23);
            else ((uint8_t *)space)[i] = narrow_e4m3(value);
        }
    }
    return space;
}

static WorkAnswer begin_work(uint64_t key) {
    (void)key;
    return WORK_TO_DO;
}

static void end_work(void) {}

static void wait_for_all(void) {}

/* Of nothing there may be no address. */
static void copy_bytes(void *to, const void *from, size_t bytes) {
    if (bytes) memcpy(to, from, bytes);
}

/* =====================================================================================================================
 * Vectors of eight and the two inner products
 *
 * Owns: the arithmetic everything below is made of. It is written with the compiler's vector types, so the same lines become
 * AVX2 on x86 (products of codes AVX-512, where there is VNNI) and NEON pairs on Arm. Two kernels carry nearly all the work, and
 * both keep one accumulator for each output:
 *
 *     dot_tile    y[r, c] = sum_k x[r, k] w[c, k]     eight lanes walk k; the lanes are added in a fixed tree at the end
 *     axpy_panel  y[r, j] += sum_s p[r, s] v[s, j]    s in order, the lanes lie along j
 *
 * How many rows and columns are in flight changes which accumulators live side by side, never what one of them adds up,
 * which is where row independence comes from.
 */

#define INLINE static inline __attribute__((always_inline))

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef int8_t i8x8 __attribute__((vector_size(8)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef uint8_t u8x32 __attribute__((vector_size(32)));

/* Products of codes fill the widest registers that there are. */
#if defined __AVX512BW__ && defined __AVX512VNNI__
#define SIXTEEN_LANES
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float f32xN __attribute__((vector_size(4 * LANES)));
typedef int32_t i32xN __attribute__((vector_size(4 * LANES)));
typedef uint8_t u8xN __attribute__((vector_size(4 * LANES)));

enum {
    KEY_TILE = PAGE_ROWS,       /* cached rows widened together in attention and index scoring: a tile of keys is a page */
    REDUCTION_BLOCK = 1024,     /* k is summed in blocks of this many, the blocks' sums in order; a multiple of SCALE_BLOCK */
    TILE_ROWS = 6,              /* rows of x in flight: 6 x 2 accumulators, 2 weights and 1 x fill sixteen registers */
    STRIP_COLUMNS = 48,         /* output columns whose weights meet all rows before the next: 48 * 1,024 stay in the L2 cache */
    STRIP_ROWS = 12,            /* rows from which f16 weights are worth widening beforehand */
    CODE_BLOCK = 4096,          /* as REDUCTION_BLOCK, where w is of codes */
    HELD_ROWS = 16,             /* rows of x that meet matrices of codes at a time */
    OFF_POWER = 16,             /* from a power of two, or all columns or rows would fall into the same cache sets */
    PANEL_STRIDE = REDUCTION_BLOCK + OFF_POWER,
    MAX_TILE = 12,              /* accumulators of any tile; array sizes have to be constants for them to be registers */
    MAX_COLUMNS = 4,
    QUERY_TILE = 16,            /* query heads that meet a tile of keys at once */
    SHARED_WORK = 1 << 17,      /* multiply-adds from which handing work to other threads costs less than doing it */
    SHARED_COPY = 1 << 18,      /* bytes likewise */
};

/* Where a thread widens weights or cached rows before it multiplies by them. */
static _Thread_local float panel[KEY_TILE * MAX_ROW_WIDTH];
static _Thread_local float second_panel[KEY_TILE * MAX_ROW_WIDTH];
static _Thread_local float packed_rows[TILE_ROWS * REDUCTION_BLOCK];
_Static_assert(STRIP_COLUMNS * PANEL_STRIDE <= KEY_TILE * MAX_ROW_WIDTH, "a panel holds either weights or the keys of a tile");
_Static_assert((int)MAX_BLOCKS <= KEY_TILE * MAX_ROW_WIDTH, "a panel holds the numbers of the blocks that are kept");
_Static_assert((int)MAX_ROW_WIDTH <= (int)REDUCTION_BLOCK, "a cached row is summed in one block");

INLINE f32x8 load8(const float *p) { f32x8 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store8(float *p, f32x8 v) { memcpy(p, &v, sizeof v); }
INLINE f32x8 splat8(float x) { return (f32x8){x, x, x, x, x, x, x, x}; }

INLINE f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) {
#ifdef __FMA__
    return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Keeps the compiler from reading a value from memory again at each use: loads are what the inner loop is short of. */
#ifdef __AVX2__
#define IN_REGISTER(vector) __asm__("" : "+v"(vector))
#else
#define IN_REGISTER(vector) (void)(vector)
#endif

INLINE f32xN splat(float x) { return (f32xN){0} + x; }

INLINE f32xN fma_lanes(f32xN a, f32xN b, f32xN c) {
#ifdef SIXTEEN_LANES
    return (f32xN)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return fma8(a, b, c);
#endif
}

INLINE u8xN larger_bytes(u8xN a, u8xN b) {
#ifdef SIXTEEN_LANES
    return (u8xN)_mm512_max_epu8((__m512i)a, (__m512i)b);
#elif defined __AVX2__
    return (u8xN)_mm256_max_epu8((__m256i)a, (__m256i)b);
#else
    const u8xN above = (u8xN)(a > b);
    return (a & above) | (b & ~above);
#endif
}

/* The sums of four vectors' lanes: neighbours first, then pairs, then halves. */
INLINE f32x4 sum_lanes(f32x8 a, f32x8 b, f32x8 c, f32x8 d) {
    f32x8 ab = __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14)
               + __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
    f32x8 cd = __builtin_shufflevector(c, d, 0, 2, 8, 10, 4, 6, 12, 14)
               + __builtin_shufflevector(c, d, 1, 3, 9, 11, 5, 7, 13, 15);
    f32x8 all = __builtin_shufflevector(ab, cd, 0, 2, 8, 10, 4, 6, 12, 14)
                + __builtin_shufflevector(ab, cd, 1, 3, 9, 11, 5, 7, 13, 15);
    return __builtin_shufflevector(all, all, 0, 1, 2, 3) + __builtin_shufflevector(all, all, 4, 5, 6, 7);
}

INLINE float sum8(f32x8 v) { return sum_lanes(v, v, v, v)[0]; }

INLINE void sum_tile(float *sum, const f32x8 *total, const int n) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        f32x4 four = sum_lanes(total[i], total[i + 1], total[i + 2], total[i + 3]);
        memcpy(sum + i, &four, sizeof four);
    }
    for (; i < n; i++) sum[i] = sum8(total[i]);
}

INLINE void sum_wide_tile(float *sum, const f32xN *total, const int n) {
    f32x8 folded[MAX_TILE];
    for (int i = 0; i < n; i++)
#ifdef SIXTEEN_LANES
        folded[i] = __builtin_shufflevector(total[i], total[i], 0, 1, 2, 3, 4, 5, 6, 7)
                    + __builtin_shufflevector(total[i], total[i], 8, 9, 10, 11, 12, 13, 14, 15);
#else
        folded[i] = total[i];
#endif
    sum_tile(sum, folded, n);
}

/* Eight halves as 32-bit numbers, and eight bytes with their sign spread over the upper bits. */
INLINE u32x8 extend_halves(const uint8_t *p) {
#ifdef __AVX2__
    return (u32x8)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)p));
#else
    u16x8 half;
    return memcpy(&half, p, sizeof half), __builtin_convertvector(half, u32x8);
#endif
}

INLINE u32x8 extend_bytes(const uint8_t *p) {
#ifdef __AVX2__
    return (u32x8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i_u *)p));
#else
    i8x8 byte;
    return memcpy(&byte, p, sizeof byte), (u32x8)__builtin_convertvector(byte, i32x8);
#endif
}

/* Eight stored values as f32: widen(), eight at a time. */
INLINE f32x8 widen8(const uint8_t *p, DType dtype) {
    if (dtype == DTYPE_F32) return load8((const float *)p);
    if (dtype == DTYPE_F4_E2M1) {
        uint32_t eight;
        memcpy(&eight, p, sizeof eight);
        u32x8 codes = (u32x8){eight, eight, eight, eight, eight, eight, eight, eight} << (u32x8){28, 24, 20, 16, 12, 8, 4, 0};
#ifdef __AVX2__                             /* half as many instructions; the lowest three bits count */
        const f32x8 magnitudes = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        u32x8 found = (u32x8)_mm256_permutevar8x32_ps((__m256)magnitudes, (__m256i)(codes >> 28));
        return (f32x8)(found | (codes & 0x80000000));
#else
        return (f32x8)((codes & 0x80000000) | (codes >> 6 & 0x01c00000)) * splat8(0x1p126f);
#endif
    }
    if (dtype == DTYPE_F8_E4M3) {
        const f32x8 placed = (f32x8)(extend_bytes(p) << 20 & 0x87f00000);      /* 2^-120 of their values, but NaN is 480 */
        u32x8 nan = (u32x8)(((u32x8)placed & 0x07f00000) == 0x07f00000);       /* all ones is a NaN in f32 too */
        return (f32x8)((u32x8)(placed * splat8(0x1p120f)) | nan);
    }
    u32x8 bits = extend_halves(p);
    if (dtype == DTYPE_BF16) return (f32x8)(bits << 16);
    f32x8 value = (f32x8)((bits & 0x7fff) << 13) * splat8(0x1p112f);
    u32x8 special = (u32x8)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (f32x8)((u32x8)value | special | (bits & 0x8000) << 16);
}

/* The first n < 8 of them, zeros behind. */
INLINE f32x8 widen_few(const uint8_t *p, DType dtype, int n) {
    uint8_t padded[32] = {0};
    memcpy(padded, p, stored_bytes(dtype, (size_t)n));
    return widen8(padded, dtype);
}

/* a where the mask is set, else b. */
INLINE f32x8 select8(i32x8 mask, f32x8 a, f32x8 b) { return (f32x8)((mask & (i32x8)a) | (~mask & (i32x8)b)); }

/* e^x for x held to [-87, 88], within 2.5 units in the last place (two with FMA): 2^n times a polynomial in the rest. NaN stays
 * NaN. */
INLINE f32x8 exp8(f32x8 x) {
    x = select8(x < splat8(-87), splat8(-87), x);
    x = select8(x > splat8(88), splat8(88), x);
    f32x8 shifted = fma8(x, splat8(0x1.715476p0f), splat8(0x1.8p23f)), n = shifted - splat8(0x1.8p23f);
    f32x8 r = fma8(n, splat8(-0x1.62e4p-1f), x);
    r = fma8(n, splat8(-0x1.7f7d1cp-20f), r);
    f32x8 y = splat8(1.0f / 720);
    y = fma8(y, r, splat8(1.0f / 120));
    y = fma8(y, r, splat8(1.0f / 24));
    y = fma8(y, r, splat8(1.0f / 6));
    y = fma8(y, r, splat8(0.5f));
    y = fma8(y, r, splat8(1));
    y = fma8(y, r, splat8(1));
    return select8(x == x, (f32x8)((u32x8)y + ((u32x8)shifted << 23)), x);
}

/* Columns of a row that share a scale; 0: there are no scales. */
INLINE int scale_block(const Matrix *w, const DType dtype) {
    return dtype == DTYPE_F8_E4M3 ? (w->block ? w->block : SCALE_BLOCK) : dtype == DTYPE_F4_E2M1 ? EXPONENT_BLOCK : 0;
}

/* The scales of row `row` of a matrix, from column `first` on, in their stored form; and one of them. */
INLINE const void *block_scales(const Matrix *w, int row, int first, const DType dtype) {
    const size_t cols = (size_t)w->scale_cols;
    if (dtype == DTYPE_F4_E2M1) return w->exponents + (size_t)(w->first_row + row) * cols + first / EXPONENT_BLOCK;
    const int block = scale_block(w, DTYPE_F8_E4M3);
    return w->scale ? w->scale + (size_t)((w->first_row + row) / block) * cols + first / block : NULL;
}

INLINE float scale_at(const void *scales, int i, const DType dtype) {
    return dtype == DTYPE_F4_E2M1 ? widen((const uint8_t *)scales + i, DTYPE_F8_E8M0) : ((const float *)scales)[i];
}

/* sum[r * columns + c] = x[r] . w[c] over n <= REDUCTION_BLOCK values. x: value k of row r stands at r * x_stride + k * x_step
 * for k a multiple of 8, its seven neighbours behind it. w: bytes of dtype without scales, columns w_stride bytes apart. */
INLINE void dot_tile(float *sum, const float *x, size_t x_stride, const size_t x_step, const uint8_t *w, size_t w_stride, int n,
                     const DType dtype, const int rows, const int columns, const bool ahead) {
    f32x8 total[MAX_TILE];
    for (int i = 0; i < rows * columns; i++) total[i] = splat8(0);
    int k = 0;
    for (; k + 8 <= n; k += 8) {
        f32x8 weight[MAX_COLUMNS];
        const size_t at = stored_bytes(dtype, (size_t)k);
        for (int c = 0; c < columns; c++) weight[c] = widen8(w + (size_t)c * w_stride + at, dtype);
        if (ahead && at % 64 == 0)      /* four tiles ahead: the hardware loses the stream at each column's end */
            for (int c = 0; c < columns; c++) __builtin_prefetch(w + (size_t)(4 * columns + c) * w_stride + at, 0, 2);
        for (int r = 0; r < rows; r++) {
            f32x8 input = load8(x + (size_t)r * x_stride + (size_t)k * x_step);
            IN_REGISTER(input);
            for (int c = 0; c < columns; c++) total[r * columns + c] = fma8(input, weight[c], total[r * columns + c]);
        }
    }
    if (k < n) for (int c = 0; c < columns; c++) {
        f32x8 weight = widen_few(w + (size_t)c * w_stride + stored_bytes(dtype, (size_t)k), dtype, n - k);
        for (int r = 0; r < rows; r++) {
            f32x8 input = widen_few((const uint8_t *)(x + (size_t)r * x_stride + (size_t)k * x_step), DTYPE_F32, n - k);
            total[r * columns + c] = fma8(input, weight, total[r * columns + c]);
        }
    }
    sum_tile(sum, total, rows * columns);
}

/* Columns of a tile of so many rows: enough accumulators to hide the latency of one addition, few enough for the registers. */
INLINE int tile_columns(const int rows) { return rows <= 2 ? 4 : rows == 3 ? 3 : 2; }

INLINE void dot_columns(float *y, size_t y_stride, const float *x, size_t x_stride, const size_t x_step, const float *w,
                        size_t w_stride, int n, bool accumulate, const int rows, const int columns) {
    float sum[MAX_TILE] = {0};
    dot_tile(sum, x, x_stride, x_step, (const uint8_t *)w, w_stride * sizeof(float), n, DTYPE_F32, rows, columns, false);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float *out = &y[(size_t)r * y_stride + (size_t)c];
            *out = accumulate ? *out + sum[r * columns + c] : sum[r * columns + c];
        }
}

INLINE void dot_strip(float *y, size_t y_stride, const float *x, size_t x_stride, const size_t x_step, const float *w,
                      size_t w_stride, int columns, int n, bool accumulate, const int rows) {
    const int width = tile_columns(rows);
    int c = 0;
    for (; c + width <= columns; c += width)
        dot_columns(y + c, y_stride, x, x_stride, x_step, w + (size_t)c * w_stride, w_stride, n, accumulate, rows, width);
    for (; c < columns; c++)
        dot_columns(y + c, y_stride, x, x_stride, x_step, w + (size_t)c * w_stride, w_stride, n, accumulate, rows, 1);
}

/* Up to six rows of x side by side, eight values of each in turn, so that the inner loop reads one stream whatever the rows'
 * stride. */
INLINE void pack_rows_of_x(float *packed, const float *x, size_t x_stride, const int rows, int n) {
    for (int k = 0; k < n; k += 8)
        for (int r = 0; r < rows; r++) {
            const uint8_t *from = (const uint8_t *)(x + (size_t)r * x_stride + k);
            store8(packed + k * rows + r * 8, n - k < 8 ? widen_few(from, DTYPE_F32, n - k) : widen8(from, DTYPE_F32));
        }
}

/* How many of `rows` rows are taken next: six at a time, and what is left in two parts of about equal size; of more than six at
 * least three. */
static int take_rows(int rows) {
    return rows >= 2 * TILE_ROWS || rows == TILE_ROWS ? TILE_ROWS : rows > TILE_ROWS ? (rows + 1) / 2 : rows;
}

/* y[r, c] (+)= x[r] . w[c] for any number of rows and f32 columns, n <= REDUCTION_BLOCK. */
static void dot_panel(float *y, size_t y_stride, const float *x, size_t x_stride, int rows, const float *w, size_t w_stride,
                      int columns, int n, bool accumulate) {
    for (int take; rows; rows -= take, x += (size_t)take * x_stride, y += (size_t)take * y_stride) {
        take = take_rows(rows);
        switch (take) {
        case 6:
            pack_rows_of_x(packed_rows, x, x_stride, TILE_ROWS, n);
            dot_strip(y, y_stride, packed_rows, 8, TILE_ROWS, w, w_stride, columns, n, accumulate, TILE_ROWS);
            break;
        case 5: dot_strip(y, y_stride, x, x_stride, 1, w, w_stride, columns, n, accumulate, 5); break;
        case 4: dot_strip(y, y_stride, x, x_stride, 1, w, w_stride, columns, n, accumulate, 4); break;
        case 3: dot_strip(y, y_stride, x, x_stride, 1, w, w_stride, columns, n, accumulate, 3); break;
        case 2: dot_strip(y, y_stride, x, x_stride, 1, w, w_stride, columns, n, accumulate, 2); break;
        case 1: dot_strip(y, y_stride, x, x_stride, 1, w, w_stride, columns, n, accumulate, 1); break;
        }
    }
}

INLINE void axpy_tile(float *y, size_t y_stride, const float *p, size_t p_stride, const float *v, size_t v_stride, int n,
                      const int rows, const int vectors) {
    f32x8 total[MAX_TILE];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) total[r * vectors + i] = load8(y + (size_t)r * y_stride + 8 * i);
    for (int s = 0; s < n; s++) {
        f32x8 value[MAX_COLUMNS];
        for (int i = 0; i < vectors; i++) value[i] = load8(v + (size_t)s * v_stride + 8 * i);
        for (int r = 0; r < rows; r++) {
            f32x8 factor = splat8(p[(size_t)r * p_stride + (size_t)s]);
            for (int i = 0; i < vectors; i++) total[r * vectors + i] = fma8(factor, value[i], total[r * vectors + i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) store8(y + (size_t)r * y_stride + 8 * i, total[r * vectors + i]);
}

/* y[r, j] += sum_s p[r, s] v[s, j] for j < columns, s < n. */
static void axpy_panel(float *y, size_t y_stride, const float *p, size_t p_stride, int rows, const float *v, size_t v_stride,
                       int n, int columns) {
    int j = 0;
    for (; j + 32 <= columns; j += 32) {
        int r = 0;
        for (; r + 3 <= rows; r += 3)
            axpy_tile(y + (size_t)r * y_stride + j, y_stride, p + (size_t)r * p_stride, p_stride, v + j, v_stride, n, 3, 4);
        if (r + 2 == rows)
            axpy_tile(y + (size_t)r * y_stride + j, y_stride, p + (size_t)r * p_stride, p_stride, v + j, v_stride, n, 2, 4);
        if (r + 1 == rows)
            axpy_tile(y + (size_t)r * y_stride + j, y_stride, p + (size_t)r * p_stride, p_stride, v + j, v_stride, n, 1, 4);
    }
    for (; j + 8 <= columns; j += 8)
        for (int r = 0; r < rows; r++)
            axpy_tile(y + (size_t)r * y_stride + j, y_stride, p + (size_t)r * p_stride, p_stride, v + j, v_stride, n, 1, 1);
    for (; j < columns; j++)
        for (int r = 0; r < rows; r++) {
            float *out = &y[(size_t)r * y_stride + (size_t)j];
            for (int s = 0; s < n; s++)
                *out = fmaf(p[(size_t)r * p_stride + (size_t)s], v[(size_t)s * v_stride + (size_t)j], *out);
        }
}

/* =====================================================================================================================
 * matrix products, norms, rope
 *
 *     linear -> multiply_matrix -> linear_columns
 *     linear_columns -> up to six rows: direct_rows -> direct_columns -> direct_tile -> dot_tile on stored weights
 *                              -> more:  strip_columns -> strip_rows -> strip_tile -> dot_tile on stored weights
 *                              -> more than twelve, f16: panel_columns -> dot_panel -> ... -> dot_tile on widened weights
 *     linear_columns, multiply_matrix, where w is of codes -> multiply_codes -> prepare_values
 *                                                                         -> code_columns -> ... -> e4m3_tile, e2m1_tile
 *
 * Owns: y = W x with W in its stored format. For up to six rows the weights are widened in registers and read once, from end to
 * end: decode, bound by memory. For more, strips of 48 columns by 1,024 values stay in the cache while all rows meet them:
 * verification and prefill, bound by arithmetic. bf16 takes two instructions to widen, so it is done again for every six rows;
 * f16 is widened into the cache once. e2m1 is not widened: its codes are looked up as whole numbers.
 */

/* w[row, first .. first + n) times its block scales, as f32. */
static void widen_weights(float *out, const Matrix *w, int row, int first, int n) {
    const uint8_t *data = w->data + (size_t)row * stored_bytes(w->dtype, (size_t)w->cols) + stored_bytes(w->dtype, (size_t)first);
    const void *scale = block_scales(w, row, 0, w->dtype);
    const int block = scale_block(w, w->dtype);
    int k = 0;
#define WIDEN_ALL(D) for (; k + 8 <= n; k += 8) store8(out + k, widen8(data + stored_bytes(D, (size_t)k), D))
    switch (w->dtype) {
    case DTYPE_F32: WIDEN_ALL(DTYPE_F32); break;
    case DTYPE_F16: WIDEN_ALL(DTYPE_F16); break;
    case DTYPE_BF16: WIDEN_ALL(DTYPE_BF16); break;
    case DTYPE_F4_E2M1: WIDEN_ALL(DTYPE_F4_E2M1); break;
    default: WIDEN_ALL(DTYPE_F8_E4M3); break;
    }
#undef WIDEN_ALL
    if (k < n) {
        f32x8 rest = widen_few(data + stored_bytes(w->dtype, (size_t)k), w->dtype, n - k);
        memcpy(out + k, &rest, (size_t)(n - k) * sizeof *out);
    }
    if (block) for (k = 0; k < n; k++) out[k] *= scale_at(scale, (first + k) / block, w->dtype);
}

INLINE void direct_tile(float *y, size_t y_stride, const float *x, size_t x_stride, const Matrix *w, int o, const DType dtype,
                        const int rows, const int columns) {
    const size_t stride = stored_bytes(dtype, (size_t)w->cols);
    float total[MAX_TILE] = {0}, sum[MAX_TILE] = {0};
    for (int k = 0; k < w->cols; k += REDUCTION_BLOCK) {
        int n = w->cols - k < REDUCTION_BLOCK ? w->cols - k : REDUCTION_BLOCK;
        dot_tile(sum, x + k, x_stride, 1, w->data + (size_t)o * stride + stored_bytes(dtype, (size_t)k), stride, n, dtype, rows,
                 columns, true);
        for (int i = 0; i < rows * columns; i++) total[i] = k ? total[i] + sum[i] : sum[i];
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) y[(size_t)r * y_stride + (size_t)(o + c)] = total[r * columns + c];
}

INLINE void direct_columns(float *y, size_t y_stride, const float *x, size_t x_stride, const Matrix *w, int begin, int end,
                           const DType dtype, const int rows) {
    const int columns = tile_columns(rows);
    int o = begin;
    for (; o + columns <= end; o += columns) direct_tile(y, y_stride, x, x_stride, w, o, dtype, rows, columns);
    for (; o < end; o++) direct_tile(y, y_stride, x, x_stride, w, o, dtype, rows, 1);
}

INLINE void direct_rows(float *y, size_t y_stride, const float *x, size_t x_stride, int rows, const Matrix *w, int begin, int end,
                        const DType dtype) {
    switch (rows) {
    case 1: direct_columns(y, y_stride, x, x_stride, w, begin, end, dtype, 1); break;
    case 2: direct_columns(y, y_stride, x, x_stride, w, begin, end, dtype, 2); break;
    case 3: direct_columns(y, y_stride, x, x_stride, w, begin, end, dtype, 3); break;
    case 4: direct_columns(y, y_stride, x, x_stride, w, begin, end, dtype, 4); break;
    case 5: direct_columns(y, y_stride, x, x_stride, w, begin, end, dtype, 5); break;
    case 6: direct_columns(y, y_stride, x, x_stride, w, begin, end, dtype, 6); break;
    }
}

/* One block of the reduction, values [first, first + n): x is packed. */
INLINE void strip_tile(float *y, size_t y_stride, const float *x, const Matrix *w, int o, int first, int n, const DType dtype,
                       const int rows, const int columns) {
    const size_t stride = stored_bytes(dtype, (size_t)w->cols);
    float sum[MAX_TILE] = {0};
    dot_tile(sum, x, 8, (size_t)rows, w->data + (size_t)o * stride + stored_bytes(dtype, (size_t)first), stride, n, dtype, rows,
             columns, false);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float *out = &y[(size_t)r * y_stride + (size_t)(o + c)];
            *out = first ? *out + sum[r * columns + c] : sum[r * columns + c];
        }
}

INLINE void strip_rows(float *y, size_t y_stride, const float *x, size_t x_stride, const Matrix *w, int begin, int end, int first,
                       int n, const DType dtype, const int rows) {
    const int columns = tile_columns(rows);
    int o = begin;
    pack_rows_of_x(packed_rows, x + first, x_stride, rows, n);
    for (; o + columns <= end; o += columns) strip_tile(y, y_stride, packed_rows, w, o, first, n, dtype, rows, columns);
    for (; o < end; o++) strip_tile(y, y_stride, packed_rows, w, o, first, n, dtype, rows, 1);
}

/* More than six rows: a strip of columns and a block of the reduction at a time, so that these weights stay in the cache while
 * all rows meet them. */
INLINE void strip_columns(float *y, size_t y_stride, const float *x, size_t x_stride, int rows, const Matrix *w, int begin,
                          int end, const DType dtype) {
    for (int o = begin, stop; o < end; o = stop) {
        stop = end - o < STRIP_COLUMNS ? end : o + STRIP_COLUMNS;
        for (int first = 0, n; first < w->cols; first += n) {
            n = w->cols - first < REDUCTION_BLOCK ? w->cols - first : REDUCTION_BLOCK;
            for (int r = 0, take; r < rows; r += take) {
                float *out = y + (size_t)r * y_stride;
                const float *in = x + (size_t)r * x_stride;
                take = take_rows(rows - r);
                switch (take) {
                case 4: strip_rows(out, y_stride, in, x_stride, w, o, stop, first, n, dtype, 4); break;
                case 5: strip_rows(out, y_stride, in, x_stride, w, o, stop, first, n, dtype, 5); break;
                case 6: strip_rows(out, y_stride, in, x_stride, w, o, stop, first, n, dtype, 6); break;
                default: strip_rows(out, y_stride, in, x_stride, w, o, stop, first, n, dtype, 3); break;
                }
            }
        }
    }
}

static void panel_columns(float *y, size_t y_stride, const float *x, size_t x_stride, int rows, const Matrix *w, int begin,
                          int end) {
    for (int o = begin; o < end; o += STRIP_COLUMNS) {
        int columns = end - o < STRIP_COLUMNS ? end - o : STRIP_COLUMNS;
        for (int k = 0; k < w->cols; k += REDUCTION_BLOCK) {
            int n = w->cols - k < REDUCTION_BLOCK ? w->cols - k : REDUCTION_BLOCK;
            for (int c = 0; c < columns; c++) widen_weights(panel + c * PANEL_STRIDE, w, o + c, k, n);
            dot_panel(y + o, y_stride, x + k, x_stride, rows, panel, PANEL_STRIDE, columns, n, k > 0);
        }
    }
}

/* ---- e4m3 and e2m1. Widening a code costs more than its product, so x is brought to where the codes are cheap to take: for e4m3
 * into the order in which four shifts widen a register of neighbours, for e2m1 to whole numbers, whose products are exact.
 */

enum {
    SPLIT = 8 * EXPONENT_BLOCK, /* values in a SplitValues */
    STRETCH = 8 * LANES,        /* of them as many as have e2m1 codes that fill a register */
    ORDER = 4 * LANES,          /* e4m3 values that are ordered together: their codes fill one */
};

/* 256 values of x for products by e2m1, whose codes stand for whole halves: value i of a block of 32 is
 * (d0 + 2^7 d1 - 2^15 d2) * unit, each digit a signed byte; that is 22 bits below the block's largest value, and exact for what
 * --qat rounds. Of a stretch's values those in even places come first, then the odd ones, as the codes lie in their bytes' lower
 * and upper halves. */
typedef struct SplitValues {
    int8_t digits[SPLIT / STRETCH][3][2][STRETCH / 2];
    int32_t offset[SPLIT / STRETCH][LANES];     /* minus 12 times the sums of eight neighbours: codes are taken as twice their
                                                 * value plus 12 */
    float unit[SPLIT / EXPONENT_BLOCK];         /* of each block, halved; NaN if a value is not finite */
} __attribute__((aligned(64))) SplitValues;

/* Rows of x as the threads that share a product meet them: of e4m3 in the codes' order, off the power of two, of e2m1 split. */
typedef union PreparedRows {
    float ordered[HELD_ROWS * (CODE_BLOCK + OFF_POWER)];
    SplitValues split[HELD_ROWS * CODE_BLOCK / SPLIT];
} PreparedRows;

static _Thread_local PreparedRows prepared_rows __attribute__((aligned(64)));   /* its vectors are read whole */

/* The power of two of which the block's values are whole multiples below 2^22, nearly. */
static float unit_of(const float *x) {
    uint32_t largest = 0, bits[EXPONENT_BLOCK];
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < EXPONENT_BLOCK; i++) largest = (bits[i] & 0x7fffffff) > largest ? bits[i] & 0x7fffffff : largest;
    if (largest >= 0x7f800000) return NAN;
    const uint32_t exponent = (largest + 0x10000) >> 23;        /* so the highest digit stays below 128 */
    const uint8_t code = (uint8_t)(exponent > 27 ? exponent - 21 : 6);
    return widen(&code, DTYPE_F8_E8M0);
}

INLINE void split_block(SplitValues *to, int block, const float *x) {
    static const float zeros[EXPONENT_BLOCK] = {0};
    const float unit = unit_of(x);
    const int stretch = block / (LANES / 4), place = block % (LANES / 4);
    if (isnan(unit)) x = zeros;
    to->unit[block] = unit / 2;
    const f32x8 units = splat8(isnan(unit) ? 0 : 1 / unit);
    for (int i = 0; i < EXPONENT_BLOCK; i += 16) {
        f32x8 a = load8(x + i) * units, b = load8(x + i + 8) * units;
        f32x8 parity[2] = {__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14),
                           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)};
        i32x8 whole[2];
        for (int odd = 0; odd < 2; odd++) {
            i32x8 rest = whole[odd] = (i32x8)(parity[odd] + splat8(0x1.8p23f)) - 0x4b400000;    /* rounds to the nearest */
            const i32x8 d0 = rest << 25 >> 25;
            rest = (rest - d0) >> 7;
            const i32x8 d1 = rest << 24 >> 24, d2 = (d1 - rest) >> 8, digit[3] = {d0, d1, d2};
            for (int d = 0; d < 3; d++) {
                const u8x32 all = (u8x32)digit[d];
                u8x8 bytes = __builtin_shufflevector(all, all, 0, 4, 8, 12, 16, 20, 24, 28);
                memcpy(to->digits[stretch][d][odd] + 16 * place + i / 2, &bytes, sizeof bytes);
            }
        }
        const i32x8 sums = whole[0] + whole[1];
        int32_t *offset = to->offset[stretch] + 4 * place + i / 8;
        for (int j = 0; j < 2; j++) offset[j] = -12 * (sums[4 * j] + sums[4 * j + 1] + sums[4 * j + 2] + sums[4 * j + 3]);
    }
}

static void split_values(SplitValues *to, const float *x, int n) {
    for (int k = 0; k < (n + SPLIT - 1) / SPLIT * SPLIT; k += EXPONENT_BLOCK) {
        float padded[EXPONENT_BLOCK] = {0};
        if (k < n && n - k < EXPONENT_BLOCK) memcpy(padded, x + k, (size_t)(n - k) * sizeof *x);
        split_block(to + k / SPLIT, k % SPLIT / EXPONENT_BLOCK, n - k >= EXPONENT_BLOCK ? x + k : padded);
    }
}

/* Of ORDER neighbours, number 4 i + p comes to LANES p + i: where it is in the i-th word of their codes. All are multiplied by
 * half of what place_e4m3() leaves out, so that their products are far from what f32 cannot hold. */
static void order_values(float *restrict to, const float *restrict x, int n) {
    for (int k = 0; k < n; k += ORDER, to += ORDER) {
        float padded[ORDER] = {0};
        if (n - k < ORDER) memcpy(padded, x + k, (size_t)(n - k) * sizeof *x);
        const float *from = n - k < ORDER ? padded : x + k;
        for (int i = 0; i < LANES; i++) {
            to[i] = from[4 * i] * 0x1p60f;
            to[LANES + i] = from[4 * i + 1] * 0x1p60f;
            to[2 * LANES + i] = from[4 * i + 2] * 0x1p60f;
            to[3 * LANES + i] = from[4 * i + 3] * 0x1p60f;
        }
    }
}

/* Codes that a stretch of x meets, each as twice its value plus 12. */
typedef struct StretchCodes { u8xN even, odd; } StretchCodes;

INLINE StretchCodes look_up_codes(const uint8_t *p) {
    static const uint8_t doubled[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    u8xN bytes;
    memcpy(&bytes, p, sizeof bytes);
    const u8xN low = bytes & 15, high = (u8xN)((i32xN)bytes >> 4) & 15;
#ifdef SIXTEEN_LANES
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i_u *)doubled));
    return (StretchCodes){(u8xN)_mm512_shuffle_epi8(table, (__m512i)low), (u8xN)_mm512_shuffle_epi8(table, (__m512i)high)};
#elif defined __AVX2__
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u *)doubled));
    return (StretchCodes){(u8xN)_mm256_shuffle_epi8(table, (__m256i)low), (u8xN)_mm256_shuffle_epi8(table, (__m256i)high)};
#else
    StretchCodes codes;
    for (int i = 0; i < ORDER; i++) codes.even[i] = doubled[low[i]], codes.odd[i] = doubled[high[i]];
    return codes;
#endif
}

/* Sums of eight neighbours' products, four of each block: whole numbers, so that any way to add them gives the same. */
INLINE i32xN multiply_stretch(StretchCodes codes, const SplitValues *x, const int stretch) {
    const int8_t (*digits)[2][STRETCH / 2] = x->digits[stretch];
    i32xN offset;
    memcpy(&offset, x->offset[stretch], sizeof offset);
#ifdef SIXTEEN_LANES
    const __m512i even = (__m512i)codes.even, odd = (__m512i)codes.odd;
    __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, _mm512_load_si512(digits[2][0]));
    sum = _mm512_dpbusd_epi32(sum, odd, _mm512_load_si512(digits[2][1]));
    sum = (__m512i)-((i32xN)sum << 8);
    sum = _mm512_dpbusd_epi32(sum, even, _mm512_load_si512(digits[1][0]));
    sum = _mm512_dpbusd_epi32(sum, odd, _mm512_load_si512(digits[1][1]));
    sum = (__m512i)(((i32xN)sum << 7) + offset);
    sum = _mm512_dpbusd_epi32(sum, even, _mm512_load_si512(digits[0][0]));
    return (i32xN)_mm512_dpbusd_epi32(sum, odd, _mm512_load_si512(digits[0][1]));
#elif defined __AVX2__
    const __m256i factor[3] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1 << 7), _mm256_set1_epi16(-32768)};
    i32xN sum[3];
    for (int d = 0; d < 3; d++) {
        const __m256i even = _mm256_load_si256((const __m256i *)digits[d][0]),
                      odd = _mm256_load_si256((const __m256i *)digits[d][1]);
        const __m256i two = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)codes.even, even),
                                             _mm256_maddubs_epi16((__m256i)codes.odd, odd));
        sum[d] = (i32xN)_mm256_madd_epi16(two, factor[d]);
    }
    return (sum[0] + sum[1]) + (sum[2] + offset);
#else
    static const int32_t factor[3] = {1, 1 << 7, -32768};
    for (int i = 0; i < ORDER; i++)
        for (int d = 0; d < 3; d++)
            offset[i / 4] += factor[d] * (codes.even[i] * digits[d][0][i] + codes.odd[i] * digits[d][1][i]);
    return offset;
#endif
}

/* Eight E8M0 scales: 2^(code - 127), and NaN for 255. */
INLINE f32x8 widen_exponents(const uint8_t *p) {
    const i32x8 codes = (i32x8)(extend_bytes(p) & 0xff);
    return (f32x8)(codes << 23 | ((codes == 0) & 0x400000) | (codes == 255));
}

/* Of eight blocks' scales those of one stretch, each in its block's four lanes. */
INLINE f32xN spread_scales(f32x8 scale, const int stretch) {
    const int b = stretch * (LANES / 4);
#ifdef SIXTEEN_LANES
    const i32xN blocks = {b, b, b, b, b + 1, b + 1, b + 1, b + 1, b + 2, b + 2, b + 2, b + 2, b + 3, b + 3, b + 3, b + 3};
    return (f32xN)_mm512_permutexvar_ps((__m512i)blocks, _mm512_castps256_ps512((__m256)scale));
#else
    return __builtin_shuffle(scale, (i32x8){b, b, b, b, b + 1, b + 1, b + 1, b + 1});
#endif
}

/* total[r * columns + c] += x[r] . w[c] over groups of 256 values; codes and exponents of columns lie so many bytes apart. */
INLINE void e2m1_run(f32xN *total, const SplitValues *x, size_t x_stride, const uint8_t *codes, size_t stride,
                     const uint8_t *exponents, size_t exponents_stride, int groups, const int rows, const int columns) {
    for (; groups; groups--, x++, codes += SPLIT / 2, exponents += SPLIT / EXPONENT_BLOCK) {
        f32x8 scale[MAX_TILE];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            const f32x8 widened = widen_exponents(exponents + (size_t)c * exponents_stride);
            for (int r = 0; r < rows; r++) scale[r * columns + c] = widened * load8(x[(size_t)r * x_stride].unit);
            for (int i = 0; i < SPLIT / 2; i += 64) __builtin_prefetch(codes + (size_t)(columns + c) * stride + i, 0, 2);
        }
#pragma GCC unroll 4
        for (int stretch = 0; stretch < SPLIT / STRETCH; stretch++) {
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                const StretchCodes found = look_up_codes(codes + (size_t)c * stride + stretch * (STRETCH / 2));
                for (int r = 0; r < rows; r++) {
                    const i32xN products = multiply_stretch(found, x + (size_t)r * x_stride, stretch);
                    const f32xN s = spread_scales(scale[r * columns + c], stretch);
                    total[r * columns + c] = fma_lanes(__builtin_convertvector(products, f32xN), s, total[r * columns + c]);
                }
            }
        }
    }
}

/* sum[r * columns + c] = x[r] . w[o + c] over the values [first, first + n) of a row, n <= CODE_BLOCK. */
INLINE void e2m1_tile(float *sum, const SplitValues *x, size_t x_stride, const Matrix *w, int o, int first, int n, const int rows,
                      const int columns) {
    const size_t stride = stored_bytes(DTYPE_F4_E2M1, (size_t)w->cols);
    const uint8_t *codes = w->data + (size_t)o * stride + first / 2, *exponents = block_scales(w, o, first, DTYPE_F4_E2M1);
    const int groups = n / SPLIT, rest = n % SPLIT;
    f32xN total[MAX_TILE];
    for (int i = 0; i < rows * columns; i++) total[i] = splat(0);
    e2m1_run(total, x, x_stride, codes, stride, exponents, (size_t)w->scale_cols, groups, rows, columns);
    if (rest) {
        enum { CODES = SPLIT / 2, EXPONENTS = SPLIT / EXPONENT_BLOCK };
        uint8_t last[2 * MAX_COLUMNS * CODES] = {0}, scales[MAX_COLUMNS * EXPONENTS] = {0};     /* half only to be read ahead */
        for (int c = 0; c < columns; c++) {
            memcpy(last + c * CODES, codes + (size_t)c * stride + groups * CODES, (size_t)(rest + 1) / 2);
            memcpy(scales + c * EXPONENTS, exponents + (size_t)c * (size_t)w->scale_cols + groups * EXPONENTS,
                   (size_t)(rest + EXPONENT_BLOCK - 1) / EXPONENT_BLOCK);
        }
        e2m1_run(total, x + groups, x_stride, last, CODES, scales, EXPONENTS, 1, rows, columns);
    }
    sum_wide_tile(sum, total, rows * columns);
}

/* Byte p of each word: e4m3 with sign, exponent and mantissa in f32's places, 2^-120 of its value; NaN is 480. Codes below 2^-6,
 * of which trained weights have one in ten thousand, are subnormal there: right, but slow on some processors. */
INLINE f32xN place_e4m3(i32xN words, const int p) { return (f32xN)(words << (24 - 8 * p) >> 4 & (int32_t)0x87f00000); }

/* total[r * columns + c] += s[c] x[r] . w[c] over n values, a multiple of ORDER, whose scales are s. largest: of the codes
 * without their signs, which shows a NaN. */
INLINE void e4m3_run(f32xN *total, u8xN *largest, const float *x, size_t x_stride, const uint8_t *w, size_t w_stride, int n,
                     const f32xN *s, const bool ahead, const int rows, const int columns) {
    f32xN part[MAX_TILE];
    for (int i = 0; i < rows * columns; i++) part[i] = splat(0);
    for (int k = 0; k < n; k += ORDER) {
        i32xN words[MAX_COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            memcpy(&words[c], w + (size_t)c * w_stride + k, sizeof words[c]);
            *largest = larger_bytes(*largest, (u8xN)words[c] & 0x7f);
            if (ahead) __builtin_prefetch(w + (size_t)(4 * columns + c) * w_stride + k, 0, 2);      /* four tiles ahead */
        }
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            f32xN weight[MAX_COLUMNS];
            for (int c = 0; c < columns; c++) weight[c] = place_e4m3(words[c], p);
            for (int r = 0; r < rows; r++) {
                f32xN input;
                memcpy(&input, x + (size_t)r * x_stride + k + LANES * p, sizeof input);
                IN_REGISTER(input);
                for (int c = 0; c < columns; c++) part[r * columns + c] = fma_lanes(input, weight[c], part[r * columns + c]);
            }
        }
    }
    for (int i = 0; i < rows * columns; i++) total[i] = fma_lanes(part[i], s[i % columns], total[i]);
}

/* The same for what is left of a row, fewer than ORDER values. */
INLINE void e4m3_rest(f32xN *total, u8xN *largest, const float *x, size_t x_stride, const uint8_t *w, size_t w_stride, int n,
                      const f32xN *s, const int rows, const int columns) {
    uint8_t padded[MAX_COLUMNS * ORDER] = {0};
    for (int c = 0; c < columns; c++) memcpy(padded + c * ORDER, w + (size_t)c * w_stride, (size_t)n);
    e4m3_run(total, largest, x, x_stride, padded, ORDER, ORDER, s, false, rows, columns);
}

/* Whether one of n e4m3 codes is a NaN: all bits but the sign. */
static bool holds_nan(const uint8_t *codes, size_t n) {
    bool found = false;
    for (size_t i = 0; i < n; i++) found |= (codes[i] & 0x7f) == 0x7f;
    return found;
}

/* The scales of ordered e4m3 codes: their block's, or those of two blocks of 32 where there are more than 32 values. */
INLINE f32xN order_scales(const float *scale, int block, int values) {
    if (!scale) return splat(1);
#ifdef SIXTEEN_LANES
    if (block < ORDER) {
        const f32x8 lower = splat8(scale[0]), upper = splat8(values > block ? scale[1] : 0);
        return __builtin_shufflevector(lower, upper, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
#endif
    (void)block, (void)values;
    return splat(*scale);
}

/* sum[r * columns + c] = x[r] . w[o + c] over the values [first, first + n) of a row, n <= CODE_BLOCK. */
INLINE void e4m3_tile(float *sum, const float *x, size_t x_stride, const Matrix *w, int o, int first, int n, const int rows,
                      const int columns) {
    const size_t stride = (size_t)w->cols;
    const int block = scale_block(w, DTYPE_F8_E4M3), run = block > ORDER ? block : ORDER;
    const uint8_t *from = w->data + (size_t)o * stride + first;
    f32xN total[MAX_TILE], s[MAX_COLUMNS];
    u8xN largest = {0};
    const float *scale[MAX_COLUMNS];
    for (int i = 0; i < rows * columns; i++) total[i] = splat(0);
    for (int c = 0; c < columns; c++) scale[c] = block_scales(w, o + c, first, DTYPE_F8_E4M3);
    for (int begin = 0; begin < n; begin += run) {
        const int values = n - begin < run ? n - begin : run, whole = values / ORDER * ORDER;
        for (int c = 0; c < columns; c++) s[c] = order_scales(scale[c] ? scale[c] + begin / block : NULL, block, values);
        e4m3_run(total, &largest, x + begin, x_stride, from + begin, stride, whole, s, true, rows, columns);
        if (whole < values)
            e4m3_rest(total, &largest, x + begin + whole, x_stride, from + begin + whole, stride, values - whole, s, rows,
                      columns);
    }
    sum_wide_tile(sum, total, rows * columns);
    for (int i = 0; i < rows * columns; i++) sum[i] *= 0x1p60f;        /* the other half */
    if (!holds_nan((const uint8_t *)&largest, sizeof largest)) return;
    for (int i = 0; i < rows * columns; i++)
        if (holds_nan(from + (size_t)(i % columns) * stride, (size_t)n)) sum[i] = NAN;
}

/* Prepared rows of x: values [start, start + n) of each. */
typedef struct PreparedValues {
    PreparedRows *rows;
    size_t stride;              /* from one row to the next, in values or in SplitValues */
    int n_rows, start, n;
} PreparedValues;

/* Values [at, at + CODE_BLOCK) of the prepared ones, as far as there are so many. */
INLINE int block_values(const PreparedValues *x, int at) { return x->n - at < CODE_BLOCK ? x->n - at : CODE_BLOCK; }

INLINE void code_tile(float *y, size_t y_stride, const PreparedValues *x, int row, int at, const Matrix *w, int o,
                      const DType dtype, const int rows, const int columns) {
    const size_t from = (size_t)row * x->stride;
    const int first = x->start + at, n = block_values(x, at);
    float sum[MAX_TILE] = {0};
    if (dtype == DTYPE_F8_E4M3) e4m3_tile(sum, x->rows->ordered + from + at, x->stride, w, o, first, n, rows, columns);
    else e2m1_tile(sum, x->rows->split + from + at / SPLIT, x->stride, w, o, first, n, rows, columns);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float *out = &y[(size_t)(row + r) * y_stride + (size_t)(o + c)];
            *out = first ? *out + sum[r * columns + c] : sum[r * columns + c];
        }
}

INLINE void code_rows(float *y, size_t y_stride, const PreparedValues *x, int row, int at, const Matrix *w, int begin, int end,
                      const DType dtype, const int rows) {
    const int columns = tile_columns(rows);
    int o = begin;
    for (; o + columns <= end; o += columns) code_tile(y, y_stride, x, row, at, w, o, dtype, rows, columns);
    for (; o < end; o++) code_tile(y, y_stride, x, row, at, w, o, dtype, rows, 1);
}

/* One block of the reduction, columns [begin, end), all rows. */
INLINE void code_block(float *y, size_t y_stride, const PreparedValues *x, int at, const Matrix *w, int begin, int end,
                       const DType dtype) {
    for (int r = 0, take; r < x->n_rows; r += take) {
        take = take_rows(x->n_rows - r);
        switch (take) {
        case 1: code_rows(y, y_stride, x, r, at, w, begin, end, dtype, 1); break;
        case 2: code_rows(y, y_stride, x, r, at, w, begin, end, dtype, 2); break;
        case 3: code_rows(y, y_stride, x, r, at, w, begin, end, dtype, 3); break;
        case 4: code_rows(y, y_stride, x, r, at, w, begin, end, dtype, 4); break;
        case 5: code_rows(y, y_stride, x, r, at, w, begin, end, dtype, 5); break;
        case 6: code_rows(y, y_stride, x, r, at, w, begin, end, dtype, 6); break;
        }
    }
}

/* Few rows tile by tile, so that the matrix is read from end to end; more of them strip by strip. */
INLINE void code_columns(float *y, size_t y_stride, const PreparedValues *x, const Matrix *w, int begin, int end,
                         const DType dtype) {
    const int width = x->n_rows > TILE_ROWS ? STRIP_COLUMNS : tile_columns(x->n_rows);
    for (int o = begin; o < end; o += width)
        for (int at = 0; at < x->n; at += CODE_BLOCK)
            code_block(y, y_stride, x, at, w, o, o + width < end ? o + width : end, dtype);
}

static __attribute__((noinline)) void e4m3_columns(float *y, size_t y_stride, const PreparedValues *x, const Matrix *w, int begin,
                                                   int end) {
    code_columns(y, y_stride, x, w, begin, end, DTYPE_F8_E4M3);
}

static __attribute__((noinline)) void e2m1_columns(float *y, size_t y_stride, const PreparedValues *x, const Matrix *w, int begin,
                                                   int end) {
    code_columns(y, y_stride, x, w, begin, end, DTYPE_F4_E2M1);
}

static void prepare_values(const PreparedValues *to, int row, int at, const float *x, DType dtype) {
    const size_t from = (size_t)row * to->stride;
    if (dtype == DTYPE_F8_E4M3) order_values(to->rows->ordered + from + at, x, block_values(to, at));
    else split_values(to->rows->split + from + at / SPLIT, x, block_values(to, at));
}

/* Columns [begin, end) of y = W x for a W of codes. As many rows and values of x as there is room for are prepared at a time, by
 * all threads for all threads. */
static void multiply_codes(float *y, size_t y_stride, const float *x, size_t x_stride, int n_rows, const Matrix *w, int begin,
                           int end) {
    if (n_rows <= 0 || begin >= end) return;
    const int held = n_rows < HELD_ROWS ? n_rows : HELD_ROWS, most = HELD_ROWS / held * CODE_BLOCK;
    const bool shared = (size_t)(end - begin) * (size_t)w->cols * (size_t)n_rows > SHARED_WORK;
    PreparedValues part = {.rows = &prepared_rows};
    for (int r = 0; r < n_rows; r += part.n_rows)
        for (part.start = 0; part.start < w->cols; part.start += part.n) {
            part.n_rows = n_rows - r < held ? n_rows - r : held;
            part.n = w->cols - part.start < most ? w->cols - part.start : most;
            part.stride = w->dtype == DTYPE_F8_E4M3 ? (size_t)((part.n + ORDER - 1) / ORDER * ORDER + OFF_POWER)
                                                    : (size_t)((part.n + SPLIT - 1) / SPLIT);
            const int blocks = (part.n + CODE_BLOCK - 1) / CODE_BLOCK;
            float *out = y + (size_t)r * y_stride;
#pragma omp parallel if (shared)
            {
#pragma omp for
                for (int i = 0; i < part.n_rows * blocks; i++) {
                    const int row = i / blocks, at = i % blocks * CODE_BLOCK;
                    prepare_values(&part, row, at, x + (size_t)(r + row) * x_stride + part.start + at, w->dtype);
                }
                const int threads = omp_get_num_threads(), stretch = ((end - begin + threads - 1) / threads + 11) / 12 * 12;
                const int share = part.n_rows > TILE_ROWS ? STRIP_COLUMNS : stretch;
#pragma omp for schedule(dynamic)
                for (int o = begin; o < end; o += share) {
                    const int stop = end - o < share ? end : o + share;
                    if (w->dtype == DTYPE_F8_E4M3) e4m3_columns(out, y_stride, &part, w, o, stop);
                    else e2m1_columns(out, y_stride, &part, w, o, stop);
                }
            }
        }
}

/* A function for each dtype: in one large function the compiler would run out of registers in the innermost loops. */
typedef void LinearColumns(float *y, size_t y_stride, const float *x, size_t x_stride, int rows, const Matrix *w, int begin,
                           int end);
#define FOR_DTYPE(name, inlined, dtype)                                                                                          \
    static __attribute__((noinline)) void name(float *y, size_t y_stride, const float *x, size_t x_stride, int rows,             \
                                               const Matrix *w, int begin, int end) {                                            \
        inlined(y, y_stride, x, x_stride, rows, w, begin, end, dtype);                                                           \
    }
FOR_DTYPE(direct_f32, direct_rows, DTYPE_F32)
FOR_DTYPE(direct_f16, direct_rows, DTYPE_F16)
FOR_DTYPE(direct_bf16, direct_rows, DTYPE_BF16)
FOR_DTYPE(strips_f32, strip_columns, DTYPE_F32)
FOR_DTYPE(strips_f16, strip_columns, DTYPE_F16)
FOR_DTYPE(strips_bf16, strip_columns, DTYPE_BF16)
#undef FOR_DTYPE

static bool holds_codes(DType dtype) { return dtype == DTYPE_F8_E4M3 || dtype == DTYPE_F4_E2M1; }

/* Output columns [begin, end) of y = W x, on the calling thread; of codes, where that has no team of its own, on all. */
static void linear_columns(float *y, size_t y_stride, const float *x, size_t x_stride, int rows, const Matrix *w, int begin,
                           int end) {
    static LinearColumns *const direct[DTYPE_COUNT] = {
        [DTYPE_F32] = direct_f32, [DTYPE_F16] = direct_f16, [DTYPE_BF16] = direct_bf16};
    static LinearColumns *const strips[DTYPE_COUNT] = {
        [DTYPE_F32] = strips_f32, [DTYPE_F16] = strips_f16, [DTYPE_BF16] = strips_bf16};
    if (holds_codes(w->dtype)) {
        multiply_codes(y, y_stride, x, x_stride, rows, w, begin, end);
        return;
    }
    LinearColumns *columns = rows <= TILE_ROWS                            ? direct[w->dtype]
                             : w->dtype == DTYPE_F16 && rows > STRIP_ROWS ? panel_columns
                                                                          : strips[w->dtype];
    columns(y, y_stride, x, x_stride, rows, w, begin, end);
}

static void multiply_matrix(float *y, size_t y_stride, const float *x, size_t x_stride, int n_rows, const Matrix *w) {
    const size_t work = (size_t)w->rows * (size_t)w->cols * (size_t)n_rows;
    if (holds_codes(w->dtype)) {
        multiply_codes(y, y_stride, x, x_stride, n_rows, w, 0, w->rows);
        return;
    }
    if (n_rows > TILE_ROWS && work > SHARED_WORK) {
#pragma omp parallel for schedule(dynamic)
        for (int o = 0; o < w->rows; o += STRIP_COLUMNS)
            linear_columns(y, y_stride, x, x_stride, n_rows, w, o, o + STRIP_COLUMNS < w->rows ? o + STRIP_COLUMNS : w->rows);
        return;
    }
#pragma omp parallel if (work > SHARED_WORK)            /* one stretch of the matrix for each thread, read from end to end */
    {
        int threads = omp_get_num_threads(), me = omp_get_thread_num(), share = ((w->rows + threads - 1) / threads + 3) / 4 * 4;
        int begin = me * share < w->rows ? me * share : w->rows;
        int end = begin + share < w->rows ? begin + share : w->rows;
        linear_columns(y, y_stride, x, x_stride, n_rows, w, begin, end);
    }
}

static void linear(const Projection *products, int n_products, const float *x, size_t x_stride, int n_rows) {
    for (int i = 0; i < n_products; i++)
        multiply_matrix(products[i].y, products[i].y_stride, x, x_stride, n_rows, products[i].w);
}

static void embed(float *y, const Matrix *embedding, const Row *rows, int n_rows) {
    for (int r = 0; r < n_rows; r++)
        widen_weights(y + (size_t)r * (size_t)embedding->cols, embedding, rows[r].token, 0, embedding->cols);
}

/* The sum over i of a[i] * b[i], in eight lanes. */
static float dot(const float *a, const float *b, int n) {
    float sum = 0, part;
    for (int k = 0; k < n; k += REDUCTION_BLOCK) {
        dot_tile(&part, a + k, 0, 1, (const uint8_t *)(b + k), 0, n - k < REDUCTION_BLOCK ? n - k : REDUCTION_BLOCK, DTYPE_F32, 1,
                 1, false);
        sum += part;
    }
    return sum;
}

static void rms_norm(float *y, size_t y_stride, const float *x, size_t x_stride, const float *weight, int n, int dim, float eps) {
#pragma omp parallel for if (n * dim > SHARED_WORK)
    for (int i = 0; i < n; i++) {
        const float *in = x + (size_t)i * x_stride;
        float *out = y + (size_t)i * y_stride, scale = 1 / sqrtf(dot(in, in, dim) / (float)dim + eps);
        for (int j = 0; j < dim; j++) out[j] = in[j] * scale * weight[j];
    }
}

static void layer_norm(float *y, const float *x, const float *weight, const float *bias, int n, int dim, float eps) {
    for (int i = 0; i < n; i++, x += dim, y += dim) {
        double mean = 0, variance = 0;
        for (int j = 0; j < dim; j++) mean += x[j];
        mean /= dim;
        for (int j = 0; j < dim; j++) variance += (x[j] - mean) * (x[j] - mean);
        float scale = (float)(1 / sqrt(variance / dim + eps)), centre = (float)mean;
        for (int j = 0; j < dim; j++) y[j] = (x[j] - centre) * scale * weight[j] + bias[j];
    }
}

/* The angle is rounded to f32 before the cosine, as in the reference. */
static void rotations(float *cosine, float *sine, const Row *rows, int n_rows, const float *inverse_frequency, int dim,
                      float factor) {
    for (int r = 0; r < n_rows; r++)
        for (int i = 0; i < dim / 2; i++) {
            float angle = (float)rows[r].position * inverse_frequency[i];
            *cosine++ = cosf(angle) * factor;
            *sine++ = sinf(angle) * factor;
        }
}

/* Rotates `dim` values of `heads` vectors per row, starting `offset` values into each vector of `head_stride`. */
static void rope(float *x, int n_rows, int heads, int head_stride, int offset, int dim, bool interleaved, const float *cosine,
                 const float *sine) {
    int half = dim / 2, near = interleaved ? 2 : 1, far = interleaved ? 1 : half;
#pragma omp parallel for if (n_rows * heads * dim > SHARED_WORK)
    for (int r = 0; r < n_rows; r++) {
        const float *c = cosine + (size_t)r * (size_t)half, *s = sine + (size_t)r * (size_t)half;
        for (int h = 0; h < heads; h++) {
            float *v = x + ((size_t)r * (size_t)heads + (size_t)h) * (size_t)head_stride + offset;
            for (int i = 0; i < half; i++) {
                float a = v[i * near], b = v[i * near + far];
                v[i * near] = a * c[i] - b * s[i];
                v[i * near + far] = b * c[i] + a * s[i];
            }
        }
    }
}

static void swiglu(float *y, const float *gate, const float *up, size_t n) {
#pragma omp parallel for if (n > SHARED_WORK)
    for (size_t i = 0; i < n / 8 * 8; i += 8) {
        f32x8 g = load8(gate + i);
        store8(y + i, g / (splat8(1) + exp8(-g)) * load8(up + i));
    }
    for (size_t i = n / 8 * 8; i < n; i++) y[i] = gate[i] / (1 + exp8(splat8(-gate[i]))[0]) * up[i];
}

/* Gates held below a limit, and ups within it on both sides; what is not a number stays none. limit 0: none. */
static void clamp_swiglu(float *gate, float *up, size_t n, float limit) {
    for (size_t i = 0; i < n && limit > 0; i++) {
        gate[i] = gate[i] > limit ? limit : gate[i];
        up[i] = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
    }
}

static void zero(float *y, size_t n) { memset(y, 0, n * sizeof(float)); }

static void move_rows(float *y, const int *to, const float *x, const int *from, int n, int dim) {
    for (int i = 0; i < n; i++)
        memcpy(y + (size_t)(to ? to[i] : i) * (size_t)dim, x + (size_t)(from ? from[i] : i) * (size_t)dim,
               (size_t)dim * sizeof(float));
}

static void add(float *y, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] += x[i];
}

static int first_not_finite(const float *x, int n_rows, int dim) {
    for (int r = 0; r < n_rows; r++)
        for (int j = 0; j < dim; j++)
            if (!(fabsf(x[(size_t)r * (size_t)dim + (size_t)j]) <= FLT_MAX)) return r;
    return -1;
}

static void check_finite(PassReport *report, int place, const float *x, int n_rows, int dim) {
    if (report->bad_row >= 0) return;
    report->bad_row = first_not_finite(x, n_rows, dim);
    report->bad_place = report->bad_row < 0 ? -1 : place;
}

static void rotate_queries(float *q, int n_rows, int heads, int dim, int tail, float *index_q, int index_heads, int index_dim,
                           bool interleaved, const float *cosine, const float *sine, PassReport *report, int place) {
    rope(q, n_rows, heads, dim, dim - tail, tail, true, cosine, sine);
    if (!index_q) return;
    rope(index_q, n_rows, index_heads, index_dim, 0, tail, interleaved, cosine, sine);
    check_finite(report, place, index_q, n_rows, index_heads * index_dim);
}

static void add_norm(float *y, float *x, const float *branch, const float *weight, int n, int dim, float eps, PassReport *report,
                     int place) {
    add(x, branch, (size_t)n * (size_t)dim);
    if (report) check_finite(report, place, x, n, dim);
    rms_norm(y, (size_t)dim, x, (size_t)dim, weight, n, dim, eps);
}

static void norm_heads(float *x, size_t stride, int n_rows, int heads, int dim, const float *weight, float eps,
                       const float *cosine, const float *sine) {
    for (int h = 0; h < heads; h++) {
        rms_norm(x + h * dim, stride, x + h * dim, stride, weight, n_rows, dim, eps);
        rope(x, n_rows, 1, (int)stride, h * dim, dim, false, cosine, sine);
    }
}

/* =====================================================================================================================
 * cached rows, index selection, attention
 *
 * Owns: the format of a cached row, the lightning indexer (DeepSeek-V3.2, eq. 1) with its top-k, and both attentions. They
 * visit keys in tiles of 64 that are widened once, with the running maximum and sum of an online softmax; the tiling is by
 * position (or by rank in the selection), so it is the same for every row whatever else is in the pass.
 */

/* Offsets are 64-bit: rows times bytes soon exceed what an int counts. */
static uint8_t *row_at(const RowPool *pool, const RowFormat *format, DeviceRow row) {
    return row.id < pool->n_rows ? pool->rows + (size_t)row.id * format->stride
                                 : pool->staging + (size_t)(row.id - pool->n_rows) * format->stride;
}

static bool has_codes(KvDtype dtype) { return dtype == KV_F8 || dtype == KV_F4; }

static size_t value_bytes(KvDtype dtype, size_t n) {
    return dtype == KV_F32 ? 4 * n : dtype == KV_BF16 ? 2 * n : dtype == KV_F8 ? n : (n + 1) / 2;
}

static size_t scale_size(const RowFormat *format) { return format->scales == SCALES_F32 ? sizeof(float) : 1; }

/* Bytes before the plain values: the quantised ones and, of codes, the scales of their groups. */
static size_t quantised_bytes(const RowFormat *format) {
    size_t n = (size_t)format->quantised, groups = (n + (size_t)format->group - 1) / (size_t)format->group;
    return value_bytes(format->dtype, n) + (has_codes(format->dtype) ? groups * scale_size(format) : 0);
}

RowFormat row_format(KvDtype dtype, int quantised, int plain, int group) {
    return scaled_row_format(dtype, quantised, plain, group, SCALES_F32);
}

RowFormat scaled_row_format(KvDtype dtype, int quantised, int plain, int group, ScaleKind scales) {
    RowFormat format = {.dtype = dtype, .quantised = quantised, .plain = plain, .group = group, .scales = scales};
    format.bytes = quantised_bytes(&format) + (size_t)plain * (dtype == KV_F32 ? 4 : 2);
    format.stride = (format.bytes + 63) / 64 * 64; /* a link reads whole 64 bytes: 656 at 656 costs as much as 704, or far more */
    return format;
}

RowFormat index_row_format(KvDtype dtype, int dim) {
    RowFormat format = dtype == KV_F8 ? row_format(KV_F8, dim, 0, 128) : row_format(dtype, 0, dim, 128);
    format.stride = (format.bytes + 15) / 16 * 16;
    return format;
}

static uint16_t narrow_bf16(float x) {
    uint32_t bits = float_to_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);     /* NaN stays NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* To the nearest e4m3, ties to even, saturating at 448. */
static uint8_t narrow_e4m3(float x) {
    uint32_t bits = float_to_bits(x), magnitude = bits & 0x7fffffff, code;
    if (magnitude > 0x7f800000) return 0x7f;
    if (magnitude < 0x3c800000) code = (uint32_t)rintf(bits_to_float(magnitude) * 512); /* below 2^-6: subnormal, steps of 2^-9 */
    else {
        uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
        code = (rounded >> 20) - (120 << 3);
        if (code > 0x7e) code = 0x7e;
    }
    return (uint8_t)(code | (bits >> 31) << 7);
}

static void narrow_values(uint8_t *out, const float *x, int n, KvDtype dtype) {
    if (dtype == KV_F32) memcpy(out, x, (size_t)n * sizeof(float));
    else for (int i = 0; i < n; i++) {
        uint16_t half = narrow_bf16(x[i]);
        memcpy(out + 2 * i, &half, 2);
    }
}

/* To the nearest e2m1, ties to the even code, saturating at 6. */
static uint8_t narrow_e2m1(float x) {
    const float m = fabsf(x);
    int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5);
    return (uint8_t)(code | (signbit(x) ? 8 : 0));
}

/* The scale of a group of codes. A scale of 0 would make 0 / 0, so each kind has a least one. */
static float group_scale(const float *x, int n, const RowFormat *format) {
    const bool eight = format->dtype == KV_F8;
    const float top = eight ? 448 : 6;
    float largest = 0;
    for (int i = 0; i < n; i++) largest = fmaxf(largest, fabsf(x[i]));
    if (format->scales == SCALES_F32) return largest > top * FLT_MIN ? largest / top : 1;
    if (format->scales == SCALES_E4M3) {
        uint8_t code = narrow_e4m3(fmaxf(largest, top * 0x1p-9f) / top);
        return widen(&code, DTYPE_F8_E4M3);
    }
    int exponent;
    float fraction = frexpf(fmaxf(largest, eight ? 1e-4f : top * 0x1p-126f) * (1 / top), &exponent);
    return ldexpf(1, exponent - (fraction == 0.5f));
}

static void store_scale(uint8_t *out, float scale, ScaleKind kind) {
    if (kind == SCALES_F32) memcpy(out, &scale, sizeof scale);
    else *out = kind == SCALES_E4M3 ? narrow_e4m3(scale) : (uint8_t)(float_to_bits(scale) >> 23);
}

/* The quantised values of a row as codes, and their scales behind them. */
static void store_codes(uint8_t *row, const float *a, const RowFormat *format) {
    uint8_t *scales = row + value_bytes(format->dtype, (size_t)format->quantised);
    if (format->dtype == KV_F4) memset(row, 0, value_bytes(KV_F4, (size_t)format->quantised));
    for (int first = 0; first < format->quantised; first += format->group, scales += scale_size(format)) {
        int last = first + format->group < format->quantised ? first + format->group : format->quantised;
        float scale = group_scale(a + first, last - first, format);
        for (int i = first; i < last; i++)
            if (format->dtype == KV_F8) row[i] = narrow_e4m3(a[i] / scale);
            else row[i / 2] |= (uint8_t)(narrow_e2m1(a[i] / scale) << 4 * (i % 2));
        store_scale(scales, scale, format->scales);
    }
}

static void round_rows(float *x, size_t stride, int n_rows, int dim, const RowFormat *format) {
#pragma omp parallel for if ((size_t)n_rows * (size_t)dim > SHARED_WORK)
    for (int r = 0; r < n_rows; r++)
        for (int first = 0; first < dim; first += format->group) {
            const int n = dim - first < format->group ? dim - first : format->group;
            float *v = x + (size_t)r * stride + first, scale = group_scale(v, n, format);
            for (int i = 0; i < n; i++) {
                const bool eight = format->dtype == KV_F8;
                uint8_t code = eight ? narrow_e4m3(v[i] / scale) : narrow_e2m1(v[i] / scale);
                if (!isnan(v[i])) v[i] = widen(&code, eight ? DTYPE_F8_E4M3 : DTYPE_F4_E2M1) * scale;
            }
        }
}

static void hadamard(float *x, int n, int dim) {
    const float scale = 1 / sqrtf((float)dim);
#pragma omp parallel for if ((size_t)n * (size_t)dim > SHARED_WORK)
    for (int i = 0; i < n; i++) {
        float *v = x + (size_t)i * (size_t)dim;
        for (int half = 1; half < dim; half *= 2)
            for (int a = 0; a < dim; a += (a + 1) % half ? 1 : half + 1) {
                float sum = v[a] + v[a + half];
                v[a + half] = v[a] - v[a + half];
                v[a] = sum;
            }
        for (int j = 0; j < dim; j++) v[j] *= scale;
    }
}

static void store_rows(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, const float *a, size_t a_stride,
                       const float *b, size_t b_stride) {
    for (int r = 0; r < n_rows; r++, a += a_stride, b += b_stride) {
        if (ids[r].id < 0) continue;
        uint8_t *row = base + (size_t)ids[r].id * format->stride;
        KvDtype plain = format->dtype == KV_F32 ? KV_F32 : KV_BF16;
        narrow_values(row + quantised_bytes(format), b, format->plain, plain);
        if (has_codes(format->dtype)) store_codes(row, a, format);
        else narrow_values(row, a, format->quantised, format->dtype);
    }
}

static void store_latents(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *kv, int lora, int tail,
                          const float *weight, float *q, int rank, const float *q_weight, float eps, const float *cosine,
                          const float *sine) {
    const size_t width = (size_t)(lora + tail);
    rms_norm(q, (size_t)rank, q, (size_t)rank, q_weight, n_rows, rank, eps);
    rms_norm(kv, width, kv, width, weight, n_rows, lora, eps);
    rope(kv, n_rows, 1, (int)width, lora, tail, true, cosine, sine);
    store_rows(base, format, ids, n_rows, kv, width, kv + lora, width);
}

static void store_index_keys(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *k, int dim,
                             const float *weight, const float *bias, int turned, bool interleaved, const float *cosine,
                             const float *sine, const float *head_weights, int heads, PassReport *report, int place,
                             int weights_place) {
    layer_norm(k, k, weight, bias, n_rows, dim, 1e-6f);
    rope(k, n_rows, 1, dim, 0, turned, interleaved, cosine, sine);
    check_finite(report, place, k, n_rows, dim);
    check_finite(report, weights_place, head_weights, n_rows, heads);
    store_rows(base, format, ids, n_rows, k, (size_t)dim, k, (size_t)dim);
}

INLINE void widen_run(float *out, const uint8_t *data, int n, const DType dtype) {
    int i = 0;
    for (; i + 8 <= n; i += 8) store8(out + i, widen8(data + stored_bytes(dtype, (size_t)i), dtype));
    if (i == n) return;
    f32x8 rest = widen_few(data + stored_bytes(dtype, (size_t)i), dtype, n - i);
    memcpy(out + i, &rest, (size_t)(n - i) * sizeof *out);
}

static const DType scale_dtypes[] = {[SCALES_F32] = DTYPE_F32, [SCALES_E8M0] = DTYPE_F8_E8M0, [SCALES_E4M3] = DTYPE_F8_E4M3};

/* Quantised values [first, first + n) of a cached row, as f32; of e2m1 `first` is even. */
static void widen_quantised(float *out, const uint8_t *row, const RowFormat *format, int first, int n) {
    if (format->dtype == KV_F32) widen_run(out, row + 4 * (size_t)first, n, DTYPE_F32);
    else if (format->dtype == KV_BF16) widen_run(out, row + 2 * (size_t)first, n, DTYPE_BF16);
    else {
        const bool eight = format->dtype == KV_F8;
        widen_run(out, row + value_bytes(format->dtype, (size_t)first), n, eight ? DTYPE_F8_E4M3 : DTYPE_F4_E2M1);
        const uint8_t *scales = row + value_bytes(format->dtype, (size_t)format->quantised);
        for (int i = 0; i < n;) {
            int group = (first + i) / format->group, end = (group + 1) * format->group - first;
            float scale = widen(scales + (size_t)group * scale_size(format), scale_dtypes[format->scales]);
            for (; i < n && i < end; i++) out[i] *= scale;
        }
    }
}

/* A whole cached row as f32: quantised values, then plain ones. */
static void widen_row(float *out, const uint8_t *row, const RowFormat *format) {
    widen_quantised(out, row, format, 0, format->quantised);
    widen_run(out + format->quantised, row + quantised_bytes(format), format->plain,
              format->dtype == KV_F32 ? DTYPE_F32 : DTYPE_BF16);
}

/* A key whose unsigned order is the scores' order; -0 counts as 0. */
INLINE uint32_t sortable(float score) {
    uint32_t bits = float_to_bits(score + 0.0f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

/* The k of n values with the highest keys, as ascending positions; equal keys: the lower position. Finds the k-th key byte by
 * byte, from `shift` down, and then walks the values once. A key is the order of a score, or the age of a stamp. */
INLINE void select_highest(int32_t *picks, const void *values, int n, int k, int shift, const bool ages, uint32_t now) {
    const float *scores = values;
    const uint32_t *stamps = values;
#define KEY(i) (ages ? now - stamps[i] : sortable(scores[i]))
    uint32_t threshold = 0, above = 0;
    int wanted = k;                                 /* how many of the keys equal to the threshold's prefix are needed */
    for (; shift >= 0; shift -= 8) {
        int histogram[256] = {0};
        for (int i = 0; i < n; i++) {
            uint32_t key = KEY(i);
            if ((key & above) == threshold) histogram[key >> shift & 255]++;
        }
        int bin = 255;
        while (histogram[bin] < wanted) wanted -= histogram[bin--];
        threshold |= (uint32_t)bin << shift;
        above |= 255u << shift;
    }
    for (int i = 0, count = 0; count < k; i++) {
        uint32_t key = KEY(i);
        if (key > threshold || (key == threshold && wanted-- > 0)) picks[count++] = i;
    }
#undef KEY
}

/* The k best of n >= k scores. */
void top_k(int *picks, const float *scores, int n, int k) { select_highest(picks, scores, n, k, 24, false, 0); }

/* The k of n >= k slots whose last use is longest ago. No age is above `now`, so its higher bytes need no look. */
static void oldest_slots(int32_t *picks, const uint32_t *stamps, uint32_t now, int n, int k) {
    int shift = now < 1u << 8 ? 0 : now < 1u << 16 ? 8 : now < 1u << 24 ? 16 : 24;
    select_highest(picks, stamps, n, k, shift, true, now);
}

/* out[0..n) = sum over heads of weight * relu(dot), n <= KEY_TILE. dots: [heads, KEY_TILE]. A NaN stays one. */
static void weigh_heads(float *out, const float *dots, const float *head_weights, int heads, float scale, int n) {
    f32x8 total[KEY_TILE / 8] = {0};
    for (int h = 0; h < heads; h++) {
        f32x8 weight = splat8(head_weights[h] * scale), zero = splat8(0);
        for (int i = 0; i < KEY_TILE / 8; i++) {
            f32x8 dot = load8(dots + h * KEY_TILE + 8 * i);
            total[i] = fma8(weight, select8(dot < zero, zero, dot), total[i]);
        }
    }
    memcpy(out, total, (size_t)n * sizeof(float));
}

/* Rows [begin, end) of the pass belong to one session, whose pages these are; scores: [end - begin, context]. A tile is a page.
 */
static void index_scores(float *scores, const float *q, const float *head_weights, const uint8_t *keys, const RowFormat *format,
                         const DevicePage *pages, int page_rows, int heads, int head_dim, const Row *rows, int begin, int end,
                         int context) {
    const int together = heads * TILE_ROWS <= MAX_ROW_WIDTH ? TILE_ROWS : 1;    /* rows whose heads fit one panel of products */
    const size_t dim = (size_t)head_dim;
    const float scale = 1 / sqrtf((float)head_dim * (float)heads);
    const size_t work = (size_t)((end - begin) * heads) * dim * (size_t)(rows[end - 1].position + 1);
#pragma omp parallel for schedule(dynamic) if (work > SHARED_WORK)
    for (int first = 0; first <= rows[end - 1].position; first += page_rows) {
        int last = rows[end - 1].position, n = last + 1 - first < page_rows ? last + 1 - first : page_rows;
        const uint8_t *tile = keys + (size_t)pages[first / page_rows].id * (size_t)page_rows * format->stride;
        for (int s = 0; s < n; s++) widen_row(panel + (size_t)s * dim, tile + (size_t)s * format->stride, format);
        for (int r = begin, take; r < end; r += take) {
            take = end - r < together ? end - r : together;
            if (rows[r + take - 1].position < first) continue;
            dot_panel(second_panel, KEY_TILE, q + (size_t)(r * heads) * dim, dim, take * heads, panel, dim, n, head_dim, false);
            for (int i = r; i < r + take; i++)
                if (rows[i].position >= first)
                    weigh_heads(scores + (size_t)(i - begin) * (size_t)context + first,
                                second_panel + (size_t)((i - r) * heads * KEY_TILE), head_weights + (size_t)i * (size_t)heads,
                                heads, scale, n);
        }
    }
}

/* The best topk blocks of `visible` scores, one bit each. The scores are overwritten: each block's best goes to its number. */
static void keep_blocks(uint64_t *bits, float *scores, int visible, int block_size, int topk) {
    const int n = (visible + block_size - 1) / block_size, kept = n < topk ? n : topk;
    int *picks = (int *)second_panel;
    memset(bits, 0, (size_t)((n + 63) / 64) * sizeof *bits);
    for (int b = 0; b < n; b++) {
        const int end = (b + 1) * block_size < visible ? (b + 1) * block_size : visible;
        float best = scores[b * block_size];
        for (int i = b * block_size + 1; i < end; i++) best = scores[i] > best ? scores[i] : best;
        scores[b] = best;
    }
    scores[n - 1] = INFINITY;
    top_k(picks, scores, n, kept);
    for (int i = 0; i < kept; i++) bits[picks[i] / 64] |= (uint64_t)1 << picks[i] % 64;
}

/* The same of the scores in those blocks alone; the others become -inf. Returns how many there are. */
static int mask_blocks(float *scores, const uint64_t *bits, int visible, int block_size) {
    int left = 0;
    for (int i = 0; i < visible; i++) {
        const int block = i / block_size;
        if (bits[block / 64] >> block % 64 & 1) left++;
        else scores[i] = -INFINITY;
    }
    return left;
}

static void select_groups(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                          const RowFormat *format, const DevicePage *pages, int context_pages, int page_rows, int heads,
                          int head_dim, const Row *rows, int n_rows, float *scratch, int scratch_rows, uint64_t *blocks,
                          int block_size, int topk_blocks, bool keeps) {
    const int context = context_pages * page_rows;
    const size_t words = blocks ? ((size_t)((context + block_size - 1) / block_size) + 63) / 64 : 0;
    for (int begin = 0, end; begin < n_rows; begin = end) {
        bool scored = false;                        /* while everything fits, the selection is the whole history */
        for (end = begin; end < n_rows && end - begin < scratch_rows && rows[end].session == rows[begin].session; end++)
            scored |= rows[end].position >= selection->capacity;
        if (scored)
            index_scores(scratch, q, head_weights, keys, format, pages + (size_t)rows[begin].session * (size_t)context_pages,
                         page_rows, heads, head_dim, rows, begin, end, context);
#pragma omp parallel for schedule(dynamic) if (scored && end - begin > 1)
        for (int r = begin; r < end; r++) {
            int visible = rows[r].position + 1, *ids = selection->ids + (size_t)r * (size_t)selection->capacity;
            int count = visible < selection->capacity ? visible : selection->capacity;
            float *scores = scratch + (size_t)(r - begin) * (size_t)context;
            uint64_t *bits = blocks + (size_t)r * words;
            const bool some = count < visible;
            if (some && blocks && !keeps) {
                int left = mask_blocks(scores, bits, visible, block_size);
                count = left < count ? left : count;
            }
            if (some) top_k(ids, scores, visible, count);
            if (some && blocks && keeps) keep_blocks(bits, scores, visible, block_size, topk_blocks);
            if (!some)
                for (int s = 0; s < count; s++) ids[s] = s;
            for (int s = count; s < selection->capacity; s++) ids[s] = -1;
            selection->count[r] = count;
        }
    }
}

static void index_select(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                         const RowFormat *format, const DevicePage *pages, int context_pages, int heads, int head_dim,
                         const Row *rows, int n_rows, float *scratch, int scratch_rows) {
    select_groups(selection, q, head_weights, keys, format, pages, context_pages, PAGE_ROWS, heads, head_dim, rows, n_rows,
                  scratch, scratch_rows, NULL, 0, 0, false);
}

/* One tile of an online softmax (Milakov and Gimelshein 2018). p: [heads, KEY_TILE] holds the dot products with n <= KEY_TILE
 * keys and is overwritten; the running maximum, sum and unnormalised output of each head take the tile in. */
static void attend_tile(float *y, size_t y_stride, float *maximum, float *sum, float *p, int heads, const float *values,
                        size_t value_stride, int value_dim, int n, float scale) {
    for (int h = 0; h < heads; h++) {
        float *row = p + h * KEY_TILE, *out = y + (size_t)h * y_stride, largest = maximum[h], total = 0;
        for (int s = 0; s < n; s++) {
            row[s] *= scale;
            largest = row[s] > largest ? row[s] : largest;
        }
        for (int s = 0; s < n; s += 8) store8(row + s, exp8(load8(row + s) - splat8(largest)));
        for (int s = 0; s < n; s++) total += row[s];
        float shrink = exp8(splat8(maximum[h] - largest))[0];
        if (shrink != 1) for (int j = 0; j < value_dim; j++) out[j] *= shrink;
        sum[h] = sum[h] * shrink + total;
        maximum[h] = largest;
    }
    axpy_panel(y, y_stride, p, KEY_TILE, heads, values, value_stride, n, value_dim);
}

/* Starts and ends the softmax that attend_tile runs. */
static void attend_begin(float *y, size_t y_stride, float *maximum, float *sum, int heads, int value_dim) {
    for (int h = 0; h < heads; h++) {
        memset(y + (size_t)h * y_stride, 0, (size_t)value_dim * sizeof(float));
        maximum[h] = -FLT_MAX;
        sum[h] = 0;
    }
}

static void attend_end(float *y, size_t y_stride, const float *sum, int heads, int value_dim) {
    for (int h = 0; h < heads; h++)
        for (int j = 0; j < value_dim; j++) y[(size_t)h * y_stride + (size_t)j] /= sum[h];
}

static void sparse_attention(float *z, const float *q, const RowPool *pool, const RowFormat *format, const DeviceRow *locations,
                             const int *counts, int capacity, int n_rows, int heads, float scale) {
    const int latent = format->quantised, width = latent + format->plain, threads = omp_get_max_threads();
    if (!n_rows) return;
    const size_t work = (size_t)(n_rows * heads) * (size_t)width * (size_t)(2 * counts[n_rows - 1]);
    /* With few rows the heads are shared out, so that one decoding session keeps every thread busy. */
    const int parts = n_rows >= threads ? 1 : (threads + n_rows - 1) / n_rows < heads ? (threads + n_rows - 1) / n_rows : heads;
#pragma omp parallel for schedule(dynamic) if (work > SHARED_WORK)
    for (int task = 0; task < n_rows * parts; task++) {
        int r = task / parts, first = heads * (task % parts) / parts, last = heads * (task % parts + 1) / parts, n = last - first;
        const DeviceRow *row = locations + (size_t)r * (size_t)capacity;
        const int count = counts[r];
        const float *query = q + ((size_t)r * (size_t)heads + (size_t)first) * (size_t)width;
        float *out = z + ((size_t)r * (size_t)heads + (size_t)first) * (size_t)latent, maximum[MAX_HEADS], sum[MAX_HEADS];
        float p[QUERY_TILE * KEY_TILE] = {0};
        attend_begin(out, (size_t)latent, maximum, sum, n, latent);
        for (int begin = 0; begin < count; begin += KEY_TILE) {
            int keys = count - begin < KEY_TILE ? count - begin : KEY_TILE;
            for (int s = 0; s < keys; s++) widen_row(panel + s * width, row_at(pool, format, row[begin + s]), format);
            for (int h = 0; h < n; h += QUERY_TILE) {
                int some = n - h < QUERY_TILE ? n - h : QUERY_TILE;
                dot_panel(p, KEY_TILE, query + (size_t)h * (size_t)width, (size_t)width, some, panel, (size_t)width, keys, width,
                          false);
                attend_tile(out + (size_t)h * (size_t)latent, (size_t)latent, maximum + h, sum + h, p, some, panel, (size_t)width,
                            latent, keys, scale);
            }
        }
        attend_end(out, (size_t)latent, sum, n, latent);
    }
}

/* Cached row: kv_heads keys, then kv_heads values, all in the quantised part. Up to eight rows of a session share the widened
 * tiles of one key/value head; each keeps its own causal end. */
static void dense_attention(float *y, const float *q, const RowPool *pool, const RowFormat *format, const DevicePage *pages,
                            int context_pages, const Row *rows, int n_rows, int heads, int kv_heads, int head_dim, float scale) {
    const int group = heads / kv_heads, block = group >= QUERY_TILE ? 1 : QUERY_TILE / group < 8 ? QUERY_TILE / group : 8;
    const size_t dim = (size_t)head_dim, width = (size_t)heads * dim;
    int starts[MAX_PASS_ROWS + 1], blocks = 0;
    for (int r = 0; r < n_rows; r++)
        if (!r || rows[r].session != rows[r - 1].session || r - starts[blocks - 1] == block) starts[blocks++] = r;
    starts[blocks] = n_rows;
    const size_t work = (size_t)n_rows * width * (size_t)(n_rows ? 2 * (rows[n_rows - 1].position + 1) : 0);
#pragma omp parallel for schedule(dynamic) if (work > SHARED_WORK)
    for (int task = 0; task < blocks * kv_heads; task++) {
        const int begin = starts[task / kv_heads], n = starts[task / kv_heads + 1] - begin, head = task % kv_heads,
                  last = rows[begin + n - 1].position;
        const size_t offset = (size_t)begin * width + (size_t)(head * group) * dim;
        float maximum[MAX_HEADS + QUERY_TILE], sum[MAX_HEADS + QUERY_TILE], p[QUERY_TILE * KEY_TILE] = {0};
        for (int r = 0; r < n; r++)
            attend_begin(y + offset + (size_t)r * width, dim, maximum + r * group, sum + r * group, group, head_dim);
        for (int first = 0; first <= last; first += KEY_TILE) {
            int keys = last + 1 - first < KEY_TILE ? last + 1 - first : KEY_TILE;
            DevicePage page = pages[(size_t)rows[begin].session * (size_t)context_pages + (size_t)(first / PAGE_ROWS)];
            for (int s = 0; s < keys; s++) {
                const uint8_t *row = row_at(pool, format, row_of_page(page, s));
                widen_quantised(panel + (size_t)s * dim, row, format, head * head_dim, head_dim);
                widen_quantised(second_panel + (size_t)s * dim, row, format, (kv_heads + head) * head_dim, head_dim);
            }
            for (int r = 0; r < n; r++) {
                int visible = rows[begin + r].position + 1 - first < keys ? rows[begin + r].position + 1 - first : keys;
                for (int h = 0; h < group && visible > 0; h += QUERY_TILE) {
                    int some = group - h < QUERY_TILE ? group - h : QUERY_TILE, state = r * group + h;
                    size_t at = offset + (size_t)r * width + (size_t)h * dim;
                    dot_panel(p, KEY_TILE, q + at, dim, some, panel, dim, visible, head_dim, false);
                    attend_tile(y + at, dim, maximum + state, sum + state, p, some, second_panel, dim, head_dim, visible, scale);
                }
            }
        }
        for (int r = 0; r < n; r++) attend_end(y + offset + (size_t)r * width, dim, sum + r * group, group, head_dim);
    }
}

/* Rows [first, first + count) of a matrix, for the heads stacked in it. */
static Matrix matrix_rows(const Matrix *matrix, int first, int count) {
    Matrix view = *matrix;
    view.data += (size_t)first * stored_bytes(matrix->dtype, (size_t)matrix->cols);
    view.rows = count;
    view.first_row += first;
    return view;
}

/* q: [rows, heads, nope + rope]; q_absorbed: [rows, heads, lora + rope] = W_UK[h]^T q_nope | q_rope. */
static void absorb_query(float *q_absorbed, const float *q, int n_rows, const Matrix *kv_b, const Config *config) {
    const int heads = config->num_attention_heads, nope = config->qk_nope_head_dim, tail = config->qk_rope_head_dim,
              lora = config->kv_lora_rank;
    const size_t q_stride = (size_t)(heads * (nope + tail)), out_stride = (size_t)heads * (size_t)(lora + tail);
#pragma omp parallel for schedule(dynamic) if ((size_t)(n_rows * heads) * (size_t)nope * (size_t)lora > SHARED_WORK)
    for (int h = 0; h < heads; h++) {
        const float *in = q + h * (nope + tail);
        float *out = q_absorbed + (size_t)h * (size_t)(lora + tail);
        for (int r = 0; r < n_rows; r++) {
            memset(out + (size_t)r * out_stride, 0, (size_t)lora * sizeof(float));
            memcpy(out + (size_t)r * out_stride + lora, in + (size_t)r * q_stride + nope, (size_t)tail * sizeof(float));
        }
        for (int first = 0; first < nope; first += KEY_TILE) {
            int n = nope - first < KEY_TILE ? nope - first : KEY_TILE;
            for (int i = 0; i < n; i++)
                widen_weights(panel + i * lora, kv_b, h * (nope + config->v_head_dim) + first + i, 0, lora);
            axpy_panel(out, out_stride, in + first, q_stride, n_rows, panel, (size_t)lora, n, lora);
        }
    }
}

/* z: [rows, heads, lora]; y: [rows, heads, v_head_dim] = W_UV[h] z[h]. */
static void expand_value(float *y, const float *z, int n_rows, const Matrix *kv_b, const Config *config) {
    const int heads = config->num_attention_heads, nope = config->qk_nope_head_dim, v = config->v_head_dim,
              lora = config->kv_lora_rank;
#pragma omp parallel for schedule(dynamic) if ((size_t)(n_rows * heads) * (size_t)v * (size_t)lora > SHARED_WORK)
    for (int h = 0; h < heads; h++) {
        Matrix w = matrix_rows(kv_b, h * (nope + v) + nope, v);
        linear_columns(y + (size_t)h * (size_t)v, (size_t)(heads * v), z + (size_t)h * (size_t)lora, (size_t)(heads * lora),
                       n_rows, &w, 0, v);
    }
}

/* =====================================================================================================================
 * mixture of experts
 */

/* The best of n values, some of which are not -inf; equal values: the lower index. Takes it out by setting it to -inf. */
static int take_best(float *values, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (values[i] > values[best]) best = i;
    values[best] = -INFINITY;
    return best;
}

/* Keeps the topk_group groups whose two best choices add up highest; experts of the others become -inf, not 0, since a biased
 * score may be negative (DeepSeek-V3, 2.1.2). */
static void limit_groups(float *choice, const Config *config) {
    int size = config->n_routed_experts / config->n_group;
    float score[MAX_EXPERTS];
    bool kept[MAX_EXPERTS] = {false};
    for (int g = 0; g < config->n_group; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; e++) {
            if (choice[e] > first) { second = first; first = choice[e]; }
            else if (choice[e] > second) second = choice[e];
        }
        score[g] = first + second;
    }
    for (int i = 0; i < config->topk_group; i++) kept[take_best(score, config->n_group)] = true;
    for (int e = 0; e < config->n_routed_experts; e++)
        if (!kept[e / size]) choice[e] = -INFINITY;
}

static void route(int *picks, float *weights, const float *logits, const float *bias, int n_rows, const Config *config) {
    const int experts = config->n_routed_experts, per_token = config->num_experts_per_tok;
    for (int r = 0; r < n_rows; r++, logits += experts, picks += per_token, weights += per_token) {
        float score[MAX_EXPERTS], choice[MAX_EXPERTS], total = 0;
        for (int e = 0; e < experts; e++) {
            score[e] = 1 / (1 + expf(-logits[e]));
            choice[e] = score[e] + bias[e];         /* the bias balances the load: it chooses, it does not weigh */
            if (isnan(choice[e])) choice[e] = INFINITY, score[e] = NAN;     /* chosen, so that it shows */
            if (choice[e] < -1e30f)
                choice[e] = -1e30f; /* -inf marks what is out of the race, and take_best() needs someone in it */
        }
        if (config->n_group > 1) limit_groups(choice, config);
        for (int i = 0; i < per_token; i++) {
            picks[i] = take_best(choice, experts);
            weights[i] = score[picks[i]];
            total += weights[i];
        }
        for (int i = 0; i < per_token; i++)
            weights[i] *= (config->norm_topk_prob ? 1 / (total + 1e-20f) : 1) * config->routed_scaling_factor;
    }
}

/* Under --qat the inputs of matrices of eight and four bits are rounded, those of others are not. */
static bool rounds_inputs(const Config *config, DType dtype) {
    return config->qat && (dtype == DTYPE_F8_E4M3 || dtype == DTYPE_F4_E2M1);
}

static void round_inputs(float *x, int n_rows, int dim, const Config *config) {
    const RowFormat format = {.dtype = KV_F8, .group = config->weight_block, .scales = SCALES_E8M0};
    round_rows(x, (size_t)dim, n_rows, dim, &format);
}

static const float *rounded_copy(float *y, const float *x, int n_rows, const Config *config) {
    memcpy(y, x, (size_t)n_rows * (size_t)config->hidden_size * sizeof *y);
    round_inputs(y, n_rows, config->hidden_size, config);
    return y;
}

/* An expert's weight is in its last input before that is rounded, and nothing is left of it to be done afterwards. */
static void weigh_inputs(float *x, float *factor, int n_rows, const Config *config) {
    const size_t inter = (size_t)config->moe_intermediate_size;
    for (int r = 0; r < n_rows; r++) {
        for (size_t j = 0; j < inter; j++) x[(size_t)r * inter + j] *= factor[r];
        factor[r] = 1;
    }
    round_inputs(x, n_rows, config->moe_intermediate_size, config);
}

/* First the shared expert, if there is one, then the others: rows are gathered by expert, so that its weights are read once a
 * pass. */
static void experts(float *y, const float *x, const int *picks, const float *weights, int n_rows, const LayerWeights *layer,
                    const Config *config, float *scratch) {
    const size_t hidden = (size_t)config->hidden_size, inter = (size_t)config->moe_intermediate_size;
    const int per_token = config->num_experts_per_tok;
    if (layer->gate_proj.rows) {
        const size_t inner = (size_t)layer->gate_proj.rows;
        float *shared_up = scratch + (size_t)n_rows * inner;
        const bool rounds = rounds_inputs(config, layer->gate_proj.dtype);
        const float *in = rounds ? rounded_copy(scratch + 2 * (size_t)n_rows * inner, x, n_rows, config) : x;
        multiply_matrix(scratch, inner, in, hidden, n_rows, &layer->gate_proj);
        multiply_matrix(shared_up, inner, in, hidden, n_rows, &layer->up_proj);
        clamp_swiglu(scratch, shared_up, (size_t)n_rows * inner, config->swiglu_limit);
        swiglu(scratch, scratch, shared_up, (size_t)n_rows * inner);
        if (rounds) round_inputs(scratch, n_rows, (int)inner, config);
        multiply_matrix(y, hidden, scratch, inner, n_rows, &layer->down_proj);
    }
    float *input = scratch, *output = input + (size_t)n_rows * hidden, *gate = output + (size_t)n_rows * hidden,
          *up = gate + (size_t)n_rows * inter;
    for (int e = 0; e < config->n_routed_experts; e++) {
        int members[MAX_PASS_ROWS], n = 0;
        float factor[MAX_PASS_ROWS];
        for (int i = 0; i < n_rows * per_token; i++)
            if (picks[i] == e) {
                members[n] = i / per_token;
                factor[n++] = weights[i];
            }
        if (!n) continue;
        move_rows(input, NULL, x, members, n, config->hidden_size);
        if (rounds_inputs(config, layer->expert_dtype)) round_inputs(input, n, config->hidden_size, config);
        multiply_matrix(gate, inter, input, hidden, n, &layer->expert_gate[e]);
        multiply_matrix(up, inter, input, hidden, n, &layer->expert_up[e]);
        clamp_swiglu(gate, up, (size_t)n * inter, config->swiglu_limit);
        swiglu(gate, gate, up, (size_t)n * inter);
        if (rounds_inputs(config, layer->expert_dtype)) weigh_inputs(gate, factor, n, config);
        multiply_matrix(output, hidden, gate, inter, n, &layer->expert_down[e]);
        for (int i = 0; i < n; i++)
            for (size_t j = 0; j < hidden; j++) y[(size_t)members[i] * hidden + j] += factor[i] * output[(size_t)i * hidden + j];
    }
}

/* =====================================================================================================================
 * DeepSeek-V4
 *
 * Owns: its parallel residual streams, the rows that its compressors make of groups of positions, attention over a window and
 * compressed rows together, and its router. A group's row is computed from its positions' values in their order, wherever those
 * lie, so that it has the same bits however the prompt was cut into passes.
 */

static void turn_index_queries(float *q, int n_rows, int heads, int dim, int turned, const float *cosine, const float *sine,
                               const float *head_weights, PassReport *report, int place, int weights_place) {
    rope(q, n_rows, heads, dim, dim - turned, turned, true, cosine, sine);
    check_finite(report, place, q, n_rows, heads * dim);
    check_finite(report, weights_place, head_weights, n_rows, heads);
}

static void store_shared_keys(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *kv, int dim,
                              int turned, const float *weight, const RowFormat *rounding, float *q, int rank,
                              const float *q_weight, float eps, const float *cosine, const float *sine) {
    const size_t width = (size_t)dim;
    rms_norm(kv, width, kv, width, weight, n_rows, dim, eps);
    rotate_queries(kv, n_rows, 1, dim, turned, NULL, 0, 0, true, cosine, sine, NULL, 0);
    if (rounding) round_rows(kv, width, n_rows, rounding->quantised, rounding);
    store_rows(base, format, ids, n_rows, kv, width, kv + format->quantised, width);
    if (q) rms_norm(q, (size_t)rank, q, (size_t)rank, q_weight, n_rows, rank, eps);
}

static float sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* Divides every row of the matrix, or every column, by its sum. */
static void normalise_rows(float *matrix, int n, float eps) {
    for (int j = 0; j < n; j++) {
        float total = eps;
        for (int k = 0; k < n; k++) total += matrix[j * n + k];
        for (int k = 0; k < n; k++) matrix[j * n + k] /= total;
    }
}

static void normalise_columns(float *matrix, int n, float eps) {
    for (int k = 0; k < n; k++) {
        float total = eps;
        for (int j = 0; j < n; j++) total += matrix[j * n + k];
        for (int j = 0; j < n; j++) matrix[j * n + k] /= total;
    }
}

/* Towards the nearest doubly stochastic matrix (Sinkhorn and Knopp 1967): the first step's rows are a softmax. */
static void sinkhorn(float *matrix, int n, int iterations, float eps) {
    for (int j = 0; j < n; j++) {
        float *row = matrix + j * n, largest = row[0], total = 0;
        for (int k = 1; k < n; k++) largest = row[k] > largest ? row[k] : largest;
        for (int k = 0; k < n; k++) total += row[k] = expf(row[k] - largest);
        for (int k = 0; k < n; k++) row[k] = row[k] / total + eps;
    }
    normalise_columns(matrix, n, eps);
    for (int i = 1; i < iterations; i++) {
        normalise_rows(matrix, n, eps);
        normalise_columns(matrix, n, eps);
    }
}

static void hyper_weights(float *mixes, const float *streams, const HyperWeights *weights, int n_rows, const Config *config) {
    const int mult = config->hc_mult, n = weights->fn.rows, width = weights->fn.cols;
    const float *base = weights->base, *scale = weights->scale;
#pragma omp parallel for if ((size_t)n_rows * (size_t)width > SHARED_WORK)
    for (int r = 0; r < n_rows; r++) {
        const float *x = streams + (size_t)r * (size_t)width;
        float *mix = mixes + (size_t)r * (size_t)n, norm = 1 / sqrtf(dot(x, x, width) / (float)width + config->rms_norm_eps);
        for (int i = 0; i < n; i++) mix[i] = mix[i] * norm * scale[i < mult ? 0 : i < 2 * mult ? 1 : 2] + base[i];
        for (int j = 0; j < mult; j++) mix[j] = sigmoid(mix[j]) + config->hc_eps;
        if (n == mult) continue;
        for (int k = mult; k < 2 * mult; k++) mix[k] = 2 * sigmoid(mix[k]);
        sinkhorn(mix + 2 * mult, mult, config->hc_sinkhorn_iters, config->hc_eps);
    }
}

static void hyper_collapse(float *y, const float *streams, const float *mixes, int n_mixes, int n_rows, const Config *config) {
    const int mult = config->hc_mult, hidden = config->hidden_size;
    for (int r = 0; r < n_rows; r++, y += hidden, mixes += n_mixes, streams += (size_t)mult * (size_t)hidden)
        for (int i = 0; i < hidden; i++) {
            float sum = mixes[0] * streams[i];
            for (int j = 1; j < mult; j++) sum = fmaf(mixes[j], streams[(size_t)j * (size_t)hidden + (size_t)i], sum);
            y[i] = sum;
        }
}

static void hyper_expand(float *streams, const float *branch, const float *mixes, int n_rows, const Config *config,
                         PassReport *report, int place) {
    const int mult = config->hc_mult, hidden = config->hidden_size, n_mixes = (2 + mult) * mult;
    const size_t width = (size_t)mult * (size_t)hidden;
    for (int r = 0; r < n_rows; r++) {
        const float *post = mixes + (size_t)r * (size_t)n_mixes + mult, *matrix = post + mult,
                    *added = branch + (size_t)r * (size_t)hidden;
        float *x = streams + (size_t)r * width, before[MAX_STREAMS];
        for (int i = 0; i < hidden; i++) {
            for (int j = 0; j < mult; j++) before[j] = x[(size_t)j * (size_t)hidden + (size_t)i];
            for (int k = 0; k < mult; k++) {
                float sum = post[k] * added[i];
                for (int j = 0; j < mult; j++) sum = fmaf(matrix[j * mult + k], before[j], sum);
                x[(size_t)k * (size_t)hidden + (size_t)i] = sum;
            }
        }
    }
    check_finite(report, place, streams, n_rows, (int)width);
}

static void mix_streams(float *y, float *streams, const float *branch, const float *leaving, float *mixes,
                        const HyperWeights *weights, const float *entering, const float *norm, int n_rows, const Config *config,
                        PassReport *report, int place) {
    const size_t hidden = (size_t)config->hidden_size;
    const int n_mixes = weights ? weights->fn.rows : (2 + config->hc_mult) * config->hc_mult;
    if (branch) hyper_expand(streams, branch, leaving, n_rows, config, report, place);
    if (!y) return;
    if (weights) {
        multiply_matrix(mixes, (size_t)n_mixes, streams, (size_t)config->hc_mult * hidden, n_rows, &weights->fn);
        hyper_weights(mixes, streams, weights, n_rows, config);
    }
    hyper_collapse(y, streams, entering, n_mixes, n_rows, config);
    if (norm) rms_norm(y, hidden, y, hidden, norm, n_rows, config->hidden_size, config->rms_norm_eps);
}

/* ---- compressed rows */

static void locate_groups(DeviceRow *kv_rows, DeviceRow *index_rows, const Cache *cache, int group, const Row *rows, int n_rows) {
    const int ratio = cache->ratio * stretch_of(cache, group);
    for (int r = 0; r < n_rows; r++) {
        int s = rows[r].session, row = rows[r].position / ratio, page = row / page_rows(cache, group);
        bool complete = (rows[r].position + 1) % ratio == 0;
        kv_rows[r] = complete ? row_in_page(cache, group, *tail_page(cache, s, page), row) : (DeviceRow){-1};
        index_rows[r] = complete ? row_in_page(cache, group, *index_page(cache, s, page), row) : (DeviceRow){-1};
    }
}

static void see_groups(Row *newest, int *count, Row *first, const Row *rows, int n_rows, int ratio) {
    for (int r = 0; r < n_rows; r++) {
        const int seen = (rows[r].position + 1) / ratio;
        if (newest) newest[r] = (Row){rows[r].session, seen - 1, rows[r].token};
        if (count) count[r] = seen;
        if (first) first[r] = (Row){rows[r].session, rows[r].position + 1 - ratio, rows[r].token};
    }
}

static void locate_heavy(DeviceRow *kv_rows, const Cache *cache, const Row *rows, int n_rows, int ratio) {
    for (int r = 0; r < n_rows; r++) {
        bool complete = (rows[r].position + 1) % ratio == 0;
        kv_rows[r].id = complete ? rows[r].session * cache->heavy_rows + rows[r].position / ratio : -1;
    }
}

/* Of one slot of a group: where its values and gates of `dim` channels stand, and what is added to the gates. */
typedef struct GroupSlot { const float *values, *gates, *ape; } GroupSlot;

enum { MAX_SLOTS = 2 * MAX_RATIO };

/* The slots of the group that ends at row r, oldest first; of overlapping groups those of the one before come first, if there is
 * one. Returns how many there are. */
static int list_slots(GroupSlot *slots, const Trail *trail, const Row *rows, int r, const float *ape, int ratio, int dim,
                      bool overlapping) {
    const int width = overlapping ? 2 * dim : dim, first = rows[r].position + 1 - ratio;
    int n = 0;
    for (int back = overlapping && first ? -ratio : 0; back < ratio; back++) {
        const float *raw = (const float *)trail_row(trail, rows, r, first + back);
        int place = back < 0 ? back + ratio : back, half = back < 0 ? 0 : width - dim;
        slots[n++] = (GroupSlot){raw + half, raw + width + half, ape ? ape + place * width + half : NULL};
    }
    return n;
}

static float slot_gate(const GroupSlot *slot, int c) { return slot->gates[c] + (slot->ape ? slot->ape[c] : 0); }

/* out[c] = sum of the slots' values in channel c, weighed by the softmax of gate + ape. */
static void pool_group(float *out, const GroupSlot *slots, int n, int dim) {
    for (int c = 0; c < dim; c++) {
        float largest = -INFINITY, total = 0, sum = 0;
        for (int i = 0; i < n; i++) {
            float gate = slot_gate(&slots[i], c);
            largest = gate > largest ? gate : largest;
        }
        for (int i = 0; i < n; i++) {
            float weight = expf(slot_gate(&slots[i], c) - largest);
            total += weight;
            sum = fmaf(weight, slots[i].values[c], sum);
        }
        out[c] = sum / total;
    }
}

static void compress(uint8_t *base, const RowFormat *format, const DeviceRow *ids, const Trail *trail, const Row *rows, int n_rows,
                     const CompressorWeights *weights, int ratio, int dim, bool overlapping, int turned,
                     const float *inverse_frequency, float eps, const RowFormat *rounding, PassReport *report, int place) {
    int bad = n_rows;
#pragma omp parallel for schedule(dynamic) reduction(min : bad) if ((size_t)n_rows * (size_t)dim > SHARED_WORK / 16)
    for (int r = 0; r < n_rows; r++) {
        if (ids[r].id < 0) continue;
        GroupSlot slots[MAX_SLOTS];
        float row[MAX_ROW_WIDTH], cosine[MAX_ROW_WIDTH / 2], sine[MAX_ROW_WIDTH / 2];
        const Row first = {.position = rows[r].position + 1 - ratio};
        pool_group(row, slots, list_slots(slots, trail, rows, r, weights->ape, ratio, dim, overlapping), dim);
        rms_norm(row, 0, row, 0, weights->norm, 1, dim, eps);
        rotations(cosine, sine, &first, 1, inverse_frequency, turned, 1);
        rope(row, 1, 1, dim, dim - turned, turned, true, cosine, sine);
        if (rounding && rounding->dtype == KV_F4) hadamard(row, 1, dim);
        if (rounding) round_rows(row, 0, 1, rounding->quantised, rounding);
        store_rows(base, format, &ids[r], 1, row, 0, row + format->quantised, 0);
        if (first_not_finite(row, 1, dim) == 0 && r < bad) bad = r;
    }
    if (bad == n_rows || report->bad_row >= 0) return;
    report->bad_row = bad;
    report->bad_place = place;
}

static void pool_groups(float *y, const Trail *trail, const Row *rows, int n_rows, const CompressorWeights *weights, int ratio,
                        int dim, float eps) {
#pragma omp parallel for schedule(dynamic) if ((size_t)n_rows * (size_t)dim > SHARED_WORK / 16)
    for (int r = 0; r < n_rows; r++) {
        GroupSlot slots[MAX_SLOTS];
        float *out = y + (size_t)r * (size_t)dim;
        memset(out, 0, (size_t)dim * sizeof *out);
        if ((rows[r].position + 1) % ratio) continue;
        pool_group(out, slots, list_slots(slots, trail, rows, r, weights->ape, ratio, dim, false), dim);
        rms_norm(out, 0, out, 0, weights->norm, 1, dim, eps);
    }
}

static void keep_trails(const Cache *cache, int session, int first, int from, int to) {
    for (int i = 0; i < cache->trail_layers * TRAILS; i++) {
        const Trail *trail = &cache->trails[i];
        for (int p = to - from > trail->length ? to - trail->length : from; p < to; p++)
            memcpy(trail->ring + ((size_t)session * (size_t)trail->length + (size_t)(p % trail->length)) * trail->stride,
                   trail->pass + (size_t)(first + p - from) * trail->stride, trail->stride);
    }
}

/* ---- attention */

/* The keys that one row attends to: its window, oldest first, then what was selected, in its order. */
typedef struct KeyList {
    const Trail *trail;
    const RowPool *pool;
    const RowFormat *trail_format, *format;
    const DeviceRow *locations; /* [count - window], or NULL: rows of the pool from first_heavy on */
    int first_heavy;
    int window, count;          /* keys of the window, and all */
} KeyList;

static void widen_key(float *out, const KeyList *keys, const Row *rows, int r, int i) {
    const int selected = i - keys->window;
    const uint8_t *row = selected < 0 ? trail_row(keys->trail, rows, r, rows[r].position + 1 + selected)
                                      : row_at(keys->pool, keys->format,
                                               keys->locations ? keys->locations[selected]
                                                               : (DeviceRow){keys->first_heavy + selected});
    widen_row(out, row, selected < 0 ? keys->trail_format : keys->format);
}

/* Heads of one row over its keys. q, y: [heads, width]; sinks: [heads]. */
static void attend_keys(float *y, const float *q, const KeyList *keys, const Row *rows, int r, int heads, int width,
                        const float *sinks, float scale) {
    float maximum[MAX_HEADS], sum[MAX_HEADS], p[QUERY_TILE * KEY_TILE] = {0};
    attend_begin(y, (size_t)width, maximum, sum, heads, width);
    for (int h = 0; h < heads; h++) maximum[h] = sinks[h], sum[h] = 1;
    for (int begin = 0; begin < keys->count; begin += KEY_TILE) {
        int n = keys->count - begin < KEY_TILE ? keys->count - begin : KEY_TILE;
        for (int s = 0; s < n; s++) widen_key(panel + s * width, keys, rows, r, begin + s);
        for (int h = 0; h < heads; h += QUERY_TILE) {
            int some = heads - h < QUERY_TILE ? heads - h : QUERY_TILE;
            size_t at = (size_t)h * (size_t)width;
            dot_panel(p, KEY_TILE, q + at, (size_t)width, some, panel, (size_t)width, n, width, false);
            attend_tile(y + at, (size_t)width, maximum + h, sum + h, p, some, panel, (size_t)width, width, n, scale);
        }
    }
    attend_end(y, (size_t)width, sum, heads, width);
}

/* Since keys are values too, each value comes with its key's rotation; turning the sum back by the row's angle leaves what
 * depends on distances alone. */
static void rotate_back(float *x, int heads, int width, int turned, const float *cosine, const float *sine) {
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < turned / 2; i++) {
            float *pair = x + (size_t)h * (size_t)width + (size_t)(width - turned + 2 * i), a = pair[0], b = pair[1];
            pair[0] = a * cosine[i] + b * sine[i];
            pair[1] = b * cosine[i] - a * sine[i];
        }
}

/* Some heads of a row's query, in place. */
static void norm_heads_alone(float *q, int heads, int dim, float eps) {
    for (int h = 0; h < heads && eps >= 0; h++) {
        float *v = q + (size_t)h * (size_t)dim, scale = 1 / sqrtf(dot(v, v, dim) / (float)dim + eps);
        for (int j = 0; j < dim; j++) v[j] *= scale;
    }
}

static void window_attention(float *y, float *q, const Trail *trail, const RowFormat *trail_format, int window,
                             const RowPool *pool, const RowFormat *format, const DeviceRow *locations, const int *count,
                             int capacity, const Row *rows, int begin, int end, int heads, const float *sinks, float scale,
                             float eps, int turned, const float *cosine, const float *sine) {
    const int width = format->quantised + format->plain, n_rows = end - begin, threads = omp_get_max_threads();
    if (n_rows <= 0) return;
    const int parts = n_rows >= threads ? 1 : (threads + n_rows - 1) / n_rows < heads ? (threads + n_rows - 1) / n_rows : heads;
    const size_t work = (size_t)(n_rows * heads) * (size_t)(2 * width) * (size_t)(window + (count ? count[end - 1] : 0));
#pragma omp parallel for schedule(dynamic) if (work > SHARED_WORK)
    for (int task = 0; task < n_rows * parts; task++) {
        const int r = begin + task / parts, first = heads * (task % parts) / parts, last = heads * (task % parts + 1) / parts;
        const size_t at = ((size_t)r * (size_t)heads + (size_t)first) * (size_t)width, angle = (size_t)r * (size_t)(turned / 2);
        KeyList keys = {.trail = trail, .pool = pool, .trail_format = trail_format, .format = format,
                        .first_heavy = rows[r].session * capacity};
        keys.locations = locations ? locations + (size_t)r * (size_t)capacity : NULL;
        keys.window = rows[r].position + 1 < window ? rows[r].position + 1 : window;
        keys.count = keys.window + (count ? count[r] : 0);
        norm_heads_alone(q + at, last - first, width, eps);
        rotate_queries(q + at, 1, last - first, width, turned, NULL, 0, 0, true, cosine + angle, sine + angle, NULL, 0);
        attend_keys(y + at, q + at, &keys, rows, r, last - first, width, sinks + first, scale);
        rotate_back(y + at, last - first, width, turned, cosine + angle, sine + angle);
    }
}

static void grouped_linear(float *y, const float *x, int n_rows, const Matrix *w, int groups) {
    const size_t y_stride = (size_t)w->rows, x_stride = (size_t)groups * (size_t)w->cols;
    const int rank = w->rows / groups;
    for (int g = 0; g < groups; g++) {
        Matrix part = matrix_rows(w, g * rank, rank);
        multiply_matrix(y + (size_t)(g * rank), y_stride, x + (size_t)g * (size_t)w->cols, x_stride, n_rows, &part);
    }
}

/* ---- V4.1: lagged streams, Engram */

static void first_stream(float *mixes, int n_rows, const Config *config) {
    const size_t n = (size_t)((2 + config->hc_mult) * config->hc_mult);
    memset(mixes, 0, (size_t)n_rows * n * sizeof *mixes);
    for (int r = 0; r < n_rows; r++) mixes[(size_t)r * n] = 1;
}

static void note_tokens(const Trail *trail, const Row *rows, int n_rows) {
    for (int r = 0; r < n_rows; r++) memcpy(trail->pass + (size_t)r * trail->stride, &rows[r].token, sizeof(int));
}

static int engram_columns(const Config *config) { return (config->engram_order - 1) * config->engram_n_heads; }

/* Which rows of the table the tokens up to row r name: an n-gram's hash is the exclusive or of its tokens, each times the
 * multiplier of its place; before the first token stands the padding. */
static void engram_row_ids(int64_t *ids, const EngramWeights *engram, const int *token_map, const Trail *trail, const Row *rows,
                           int r, const Config *config) {
    const int heads = config->engram_n_heads;
    uint64_t hash = 0;
    for (int back = 0; back < config->engram_order; back++) {
        const int position = rows[r].position - back;
        int token = config->engram_pad_token_id;
        if (position >= 0) memcpy(&token, trail_row(trail, rows, r, position), sizeof token);
        hash ^= (uint64_t)token_map[token] * engram->multipliers[back];
        for (int h = 0; back && h < heads; h++) {
            const int column = (back - 1) * heads + h;
            ids[column] = engram->offsets[column] + (int64_t)(hash % (uint64_t)engram->primes[column]);
        }
    }
}

/* The table is read a few hundred bytes here and there: all of a pass's rows are asked for before the first is needed. */
static void prefetch_engram(const EngramWeights *engram, const int *token_map, const Trail *trail, const Row *rows, int n_rows,
                            const Config *config) {
    const size_t bytes = stored_bytes(engram->dtype, (size_t)config->engram_head_dim), page = 4096;
    int64_t ids[(MAX_NGRAM - 1) * MAX_ENGRAM_HEADS];
    for (int r = 0; r < n_rows; r++) {
        engram_row_ids(ids, engram, token_map, trail, rows, r, config);
        for (int c = 0; c < engram_columns(config); c++) {
            const uintptr_t at = (uintptr_t)(engram->table + (size_t)ids[c] * bytes), first = at / page * page;
            madvise((void *)first, at + bytes - first, MADV_WILLNEED);      /* advice: where it is not taken, reading waits */
        }
    }
}

static void read_engram_row(float *out, const EngramWeights *engram, int64_t id, int dim) {
    widen_run(out, engram->table + (size_t)id * stored_bytes(engram->dtype, (size_t)dim), dim, engram->dtype);
    const size_t blocks = (size_t)((dim + EXPONENT_BLOCK - 1) / EXPONENT_BLOCK);
    for (int i = 0; engram->exponents && i < dim; i++)
        out[i] *= widen(engram->exponents + (size_t)id * blocks + i / EXPONENT_BLOCK, DTYPE_F8_E8M0);
}

static void read_engram(float *y, const EngramWeights *engram, const int *token_map, const Trail *trail, const Row *rows,
                        int n_rows, const Config *config) {
    const int columns = engram_columns(config), dim = config->engram_head_dim;
#pragma omp parallel for if (n_rows * columns * dim > SHARED_WORK / 16)
    for (int r = 0; r < n_rows; r++) {
        int64_t ids[(MAX_NGRAM - 1) * MAX_ENGRAM_HEADS];
        engram_row_ids(ids, engram, token_map, trail, rows, r, config);
        for (int c = 0; c < columns; c++) read_engram_row(y + (size_t)(r * columns + c) * (size_t)dim, engram, ids[c], dim);
    }
}

static void add_engram(float *streams, const float *kv, const EngramWeights *engram, int n_rows, const Config *config) {
    const int mult = config->hc_mult, hidden = config->hidden_size;
    const size_t width = (size_t)hidden;
#pragma omp parallel for if ((size_t)(n_rows * mult) * width > SHARED_WORK)
    for (int r = 0; r < n_rows; r++) {
        const float *keys = kv + (size_t)r * (size_t)(mult + 1) * width, *value = keys + (size_t)mult * width;
        for (int k = 0; k < mult; k++) {
            float *x = streams + (size_t)(r * mult + k) * width, met = 0;
            const float *key = keys + (size_t)k * width, *q_weight = engram->q_weight + (size_t)k * width,
                        *k_weight = engram->k_weight + (size_t)k * width;
            for (int i = 0; i < hidden; i++) met = fmaf(x[i] * (q_weight[i] * k_weight[i]), key[i], met);
            met /= sqrtf(dot(x, x, hidden) / (float)hidden + config->rms_norm_eps)
                   * sqrtf(dot(key, key, hidden) / (float)hidden + config->rms_norm_eps) * sqrtf((float)hidden);
            const float gate = sigmoid(copysignf(sqrtf(fmaxf(fabsf(met), 1e-6f)), met));
            for (int i = 0; i < hidden; i++) x[i] = fmaf(isnan(met) ? met : gate, value[i], x[i]);
        }
    }
}

/* ---- router */

/* sqrt(log(1 + e^x)); far below zero that is e^(x / 2), where e^x itself would be lost. */
static float root_of_softplus(float x) { return x > 20 ? sqrtf(x) : x < -30 ? expf(x / 2) : sqrtf(log1pf(expf(x))); }

static void route_softplus(int *picks, float *weights, const float *logits, const float *bias, const int *table, const Row *rows,
                           int n_rows, const Config *config) {
    const int experts = config->n_routed_experts, per_token = config->num_experts_per_tok;
    for (int r = 0; r < n_rows; r++, logits += experts, picks += per_token, weights += per_token) {
        float score[MAX_EXPERTS], choice[MAX_EXPERTS], total = 0;
        for (int e = 0; e < experts; e++) {
            score[e] = root_of_softplus(logits[e]);
            choice[e] = score[e] + (table ? 0 : bias[e]);
            if (isnan(choice[e])) choice[e] = INFINITY, score[e] = NAN;     /* chosen, so that it shows */
            if (choice[e] < -1e30f) choice[e] = -1e30f;     /* -inf marks what take_best() has taken */
        }
        for (int i = 0; i < per_token; i++) {
            picks[i] = table ? table[(size_t)rows[r].token * (size_t)per_token + (size_t)i] : take_best(choice, experts);
            weights[i] = score[picks[i]];
            total += weights[i];
        }
        for (int i = 0; i < per_token; i++)
            weights[i] *= (config->norm_topk_prob ? 1 / (total + 1e-20f) : 1) * config->routed_scaling_factor;
    }
}

/* =====================================================================================================================
 * the hierarchy's operations
 *
 * Owns: where a cached row lies, the resolver (paper 3.2) and the copies between the tiers. A resolve looks in the tail, then
 * in the ready pages of optional history, then in the hot cache; what is left comes from the host. It relies on the tables
 * naming only bytes that have arrived, and on every row being complete on the host before it can be missing on the device.
 */

static const DeviceRow nowhere = {-1};

/* The device page that holds a row without any search: the tail by arithmetic, else optional history. */
static DevicePage direct_page(const Cache *cache, int session, int page) {
    const bool tail = page >= cache->seen.tail_base[session] / PAGE_ROWS;
    return tail ? *tail_page(cache, session, page) : *ready_page(cache, session, page);
}

/* The queries of one session and one plan group while they are resolved together. */
typedef struct Block {
    int session, group;
    int page_rows, hot_rows;    /* of the group */
    HotCache hot;
    uint32_t now;               /* this resolve, as the stamps count */
    int low, high;              /* words of Cache.bits that hold the union; high < low: there is none */
    int n, hits;                /* rows of the union, and how many of them are hot */
    int planned;                /* entries of the plan so far */
    int first_staged;           /* where in it the rows begin that do not fit the hot cache */
} Block;

static Block open_block(Cache *cache, int group, int session) {
    HotCache hot = hot_cache(cache, session, group);
    return (Block){.session = session, .group = group, .page_rows = page_rows(cache, group),
                   .hot_rows = cache->hot_rows / stretch_of(cache, group), .hot = hot, .now = ++*hot.clock, .low = INT_MAX,
                   .high = -1};
}

/* First look: tail and optional history. Rows that are in neither join the union, a bit each in Cache.bits. */
static void locate_directly(Cache *cache, Block *block, const Selection *selection, size_t begin, size_t end,
                            DeviceRow *locations, PassReport *report) {
    const int tail_page = cache->seen.tail_base[block->session] / PAGE_ROWS;
    for (size_t i = begin; i < end; i++) {
        int row = selection->ids[i], word = row / PAGE_ROWS;
        locations[i] = nowhere;
        if (row < 0) continue;
        DevicePage page = direct_page(cache, block->session, row / block->page_rows);
        if (!no_page(page)) {
            locations[i] = row_in_page(cache, block->group, page, row);
            report->picked[row / block->page_rows >= tail_page ? TIER_TAIL : TIER_OPTIONAL]++;
            continue;
        }
        cache->bits[word] |= (uint64_t)1 << row % PAGE_ROWS;
        block->low = word < block->low ? word : block->low;
        block->high = word > block->high ? word : block->high;
    }
}

/* What the block's queries still look for (eq. 6): ascending rows in `missing`, and for each word how many rows come before it,
 * so that a row finds its place in the list again. */
static void list_union(Cache *cache, Block *block) {
    for (int word = block->low; word <= block->high; word++) {
        cache->ranks[word] = block->n;
        for (uint64_t left = cache->bits[word]; left; left &= left - 1)
            cache->missing[block->n++] = word * PAGE_ROWS + __builtin_ctzll(left);
    }
}

static int rank_in_union(const Cache *cache, int row) {
    uint64_t below = cache->bits[row / PAGE_ROWS] & (((uint64_t)1 << row % PAGE_ROWS) - 1);
    return cache->ranks[row / PAGE_ROWS] + __builtin_popcountll(below);
}

enum { NO_SLOT = INT32_MIN };

/* Second look: places[i] = the hot slot of row missing[i], or NO_SLOT. Both ways find the same: each row asks the direct array,
 * or each tag asks the union. */
static void find_hot_slots(Cache *cache, const Block *block) {
    if (cache->lookup == LOOKUP_DIRECT) {
        for (int i = 0; i < block->n; i++) {
            int slot = block->hot.slot_of[cache->missing[i]];
            cache->places[i] = slot ? slot - 1 : NO_SLOT;
        }
        return;
    }
    for (int i = 0; i < block->n; i++) cache->places[i] = NO_SLOT;
    for (int slot = 0; slot < block->hot_rows; slot++) {
        int row = block->hot.tag[slot];
        if (row >= 0 && cache->bits[row / PAGE_ROWS] >> row % PAGE_ROWS & 1) cache->places[rank_in_union(cache, row)] = slot;
    }
}

/* The whole union is protected before any victim is chosen: a slot stamped with this resolve is none. */
static void protect_hits(Cache *cache, Block *block) {
    for (int i = 0; i < block->n; i++) {
        if (cache->places[i] == NO_SLOT) continue;
        block->hot.stamp[cache->places[i]] = block->now;
        block->hits++;
    }
}

static void replace_slot(Block *block, int slot, int row) {
    if (block->hot.tag[slot] >= 0) block->hot.slot_of[block->hot.tag[slot]] = 0;
    block->hot.tag[slot] = row;
    block->hot.stamp[slot] = block->now;
    block->hot.slot_of[row] = (uint16_t)(slot + 1);
}

static DeviceRow hot_location(const Cache *cache, const Block *block, int slot) {
    return row_in_page(cache, block->group, *hot_page(cache, block->session, slot / block->page_rows), slot);
}

/* Missing rows take the slots used least recently, ties to the lower slot: the i-th row, ascending, the i-th such slot. Where
 * there are more rows than slots the oldest of the history, which selections prefer least, are staged instead, and forgotten
 * after this block: there is no promotion into the hot cache, since whose selection will matter next, the last accepted
 * query's, is known only when all layers have run. */
static void place_misses(Cache *cache, Block *block, int staging, MissPlan *plan, PassReport *report) {
    const HostPage *host = host_page(cache, block->session, 0);
    const int rows = block->page_rows;
    int missing = block->n - block->hits, open = block->hot_rows - block->hits, room = missing < open ? missing : open,
        beyond = missing - room, taken = 0;
    if (room) oldest_slots(cache->victims, block->hot.stamp, block->now, block->hot_rows, room);
    block->first_staged = block->planned;
    for (int i = 0; i < block->n; i++) {
        if (cache->places[i] != NO_SLOT) continue;
        int row = cache->missing[i], place = taken < beyond ? block->hot_rows + taken : cache->victims[taken - beyond];
        DeviceRow staged = {cache->device_pages.n_pages * rows + staging * cache->staging_rows + taken};
        REQUIRE(block->planned < plan->capacity);
        plan->from[block->planned] = (HostRow){(int64_t)host[row / rows].id * rows + row % rows};
        plan->to[block->planned++] = taken < beyond ? staged : hot_location(cache, block, place);
        if (taken < beyond) report->staged++;
        else replace_slot(block, place, row);
        cache->places[i] = ~place;                  /* negative: it comes from the host */
        taken++;
    }
}

/* The union's rows in the order of each query's own selection (eq. 12). */
static void emit_locations(const Cache *cache, const Block *block, const Selection *selection, size_t begin, size_t end,
                           DeviceRow *locations, const MissPlan *plan, PassReport *report) {
    for (size_t i = begin; i < end; i++) {
        int row = selection->ids[i];
        if (row < 0 || locations[i].id >= 0) continue;
        int place = cache->places[rank_in_union(cache, row)];
        report->picked[place < 0 ? TIER_HOST : TIER_HOT]++;
        if (place < 0) place = ~place;
        locations[i] = place < block->hot_rows ? hot_location(cache, block, place)
                                               : plan->to[block->first_staged + place - block->hot_rows];
    }
}

/* Plans from entry `planned` on, and returns how many entries the plan has then. */
static int resolve_block(Cache *cache, int group, const Selection *selection, int session, int first, int last, int staging,
                         int planned, DeviceRow *locations, MissPlan *plan, PassReport *report) {
    size_t begin = (size_t)first * (size_t)selection->capacity, end = (size_t)last * (size_t)selection->capacity;
    Block block = open_block(cache, group, session);
    block.planned = planned;
    locate_directly(cache, &block, selection, begin, end, locations, report);
    if (block.high < 0) return planned;
    list_union(cache, &block);
    find_hot_slots(cache, &block);
    protect_hits(cache, &block);
    place_misses(cache, &block, staging, plan, report);
    emit_locations(cache, &block, selection, begin, end, locations, plan, report);
    memset(cache->bits + block.low, 0, (size_t)(block.high - block.low + 1) * sizeof *cache->bits);
    return block.planned;
}

/* Where in the plan the entries of a run begin: those of each follow those of the one before. */
static int run_begin(const MissPlan *plan, int run) {
    int begin = 0;
    for (int i = 0; i < run; i++) begin += plan->count[i];
    return begin;
}

static void resolve(Cache *cache, int group, const Selection *selection, const Row *rows, int begin, int end, int run,
                    DeviceRow *locations, MissPlan *plan, PassReport *report) {
    const int planned = run_begin(plan, run);
    int so_far = planned;
    for (int first = begin, last, staging = 0; first < end; first = last) {
        for (last = first; last < end && rows[last].session == rows[first].session;) last++;
        so_far = resolve_block(cache, group, selection, rows[first].session, first, last, staging, so_far, locations, plan,
                               report);
        staging += last - first > 1;
    }
    plan->count[run] = so_far - planned;
    report->fetched += plan->count[run];
}

static void fetch_rows(Cache *cache, SourceId source, const MissPlan *plan, const Row *rows, int begin, int end, int run,
                       PassReport *report) {
    const RowPool pool = row_pool(cache, source);
    const uint8_t *host = host_source_rows(cache, source);
    const RowFormat *format = &cache->format;
    const int first = run_begin(plan, run), count = plan->count[run];
    (void)rows, (void)begin, (void)end;             /* the plan is one list */
    report->copied += count;
#pragma omp parallel for if ((size_t)count * format->bytes > SHARED_COPY)
    for (int i = first; i < first + count; i++)
        memcpy(row_at(&pool, format, plan->to[i]), host + (size_t)plan->from[i].id * format->stride, format->bytes);
}

/* In C the rows are there when fetch_rows() returns. */
static void await_rows(const Cache *cache, SourceId source) {
    (void)cache;
    (void)source;
}

static void forget_hot(Cache *cache, int session) {
    for (int g = 0; g < cache->groups; g++) {
        HotCache hot = hot_cache(cache, session, g);
        for (int slot = 0; slot < cache->hot_rows; slot++) {
            if (hot.tag[slot] >= 0) hot.slot_of[hot.tag[slot]] = 0;
            hot.tag[slot] = -1;
            hot.stamp[slot] = 0;
        }
        *hot.clock = 0;
    }
}

/* Where each row of the pass is stored in the pools. */
static void locate_rows(DeviceRow *kv_rows, DeviceRow *index_rows, const Cache *cache, const Row *rows, int n_rows) {
    for (int r = 0; r < n_rows; r++) {
        int s = rows[r].session, page = rows[r].position / PAGE_ROWS;
        kv_rows[r] = row_of_page(*tail_page(cache, s, page), rows[r].position);
        index_rows[r] = row_of_page(*index_page(cache, s, page), rows[r].position);
    }
}

/* Nothing happens before finish_copy(): in C the bytes move at the last moment that the rules of ordering allow, so that a rule
 * broken is a wrong byte. */
static void start_copy(Cache *cache, const Transfer *transfer) {
    (void)cache;
    (void)transfer;
}

/* Of a source whose rows hold more positions only the rows that are complete: the last group may still be open. */
static void copy_run(uint8_t *device, uint8_t *host, size_t stride, int32_t device_page, int32_t host_page, int stretch,
                     const Transfer *transfer) {
    const size_t rows = PAGE_ROWS / stretch, first = transfer->first / stretch,
                 count = (size_t)((transfer->first + transfer->count) / stretch) - first;
    device += ((size_t)device_page * rows + first) * stride;
    host += ((size_t)host_page * rows + first) * stride;
    memcpy(transfer->to_host ? host : device, transfer->to_host ? device : host, count * stride);
}

static bool finish_copy(Cache *cache, const Transfer *transfer, bool wait) {
    (void)wait;
    for (int i = 0; i < cache->sources && !no_page(transfer->device); i++)
        copy_run(source_rows(cache, (SourceId){i}), host_source_rows(cache, (SourceId){i}), cache->format.stride,
                 transfer->device.id, transfer->host.id, stretch_of(cache, i), transfer);
    for (int g = 0; g < cache->groups && !no_page(transfer->index); g++)
        copy_run(group_index_keys(cache, g), host_group_index_keys(cache, g), cache->index_format.stride, transfer->index.id,
                 transfer->host.id, stretch_of(cache, g), transfer);
    return true;
}

/* =====================================================================================================================
 * Sampling and acceptance
 *
 * Owns: the choice of a token from logits, and what becomes of drafts. Every (seed, session, position) has its own noise from a
 * counter-based generator, so the token at a position is argmax(logit / T + Gumbel), an exact sample that no batch, order or
 * speculation can change. Filters apply in transformers' order: repetition penalty, temperature, top-k, top-p, min-p.
 *
 * A drafter that draws with the same noise proposes what the target is likely to choose (coupled acceptance). Acceptance by
 * rejection needs three numbers at a place that are independent of each other, so each has noise of its own kind.
 */

typedef enum Noise { NOISE_TOKEN, NOISE_DRAFT, NOISE_ACCEPT, NOISE_RESIDUAL } Noise;

/* Philox 4x32 with ten rounds (Salmon et al. 2011): four random words of a counter under a key. */
static void philox(uint32_t counter[4], uint64_t key) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)counter[0] * 0xD2511F53u, b = (uint64_t)counter[2] * 0xCD9E8D57u;
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ counter[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ counter[3] ^ k1,
                            (uint32_t)a};
        memcpy(counter, next, sizeof next);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* Four random words at one place: of tokens 4 * four to 4 * four + 3. */
static void noise_words(uint32_t words[4], Noise noise, uint64_t seed, uint64_t session, int position, uint32_t four) {
    uint32_t counter[4] = {four, (uint32_t)position, (uint32_t)session, (uint32_t)(session >> 32)};
    philox(counter, seed + (uint64_t)noise * 0x9E3779B97F4A7C15u);
    memcpy(words, counter, sizeof counter);
}

/* Uniform in (0, 1) on a grid of 2^-32, and from it standard Gumbel noise: -log(-log u). */
static double unit(uint32_t word) { return (word + 0.5) * 0x1p-32; }
static double gumbel(uint32_t word) { return -log(-log(unit(word))); }

static int samplers(int logit_rows) {
    (void)logit_rows;
    return omp_get_max_threads();
}

int argmax(const float *values, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (values[i] > values[best]) best = i;
    return best;
}

static bool is_greedy(const Sampling *sampling) { return !(sampling->temperature > 1e-6f); }

static void penalise_repeats(Sampler *sampler, float *logits, const int *history, int n, float penalty) {
    if (penalty == 1) return;
    for (int i = 0; i < n; i++) {
        if (sampler->seen[history[i]]) continue;
        float *logit = &logits[history[i]];
        *logit = *logit > 0 ? *logit / penalty : *logit * penalty;
        sampler->seen[history[i]] = true;
    }
    for (int i = 0; i < n; i++) sampler->seen[history[i]] = false;
}

/* Lets heap[i] sink to its place in a heap whose best token, by logit and then by lower id, is on top. */
static void sink(int *heap, int n, int i, const float *logits) {
    for (int child; (child = 2 * i + 1) < n; i = child) {
        int right = child + 1;
        if (right < n
            && (logits[heap[right]] > logits[heap[child]]
                || (logits[heap[right]] == logits[heap[child]] && heap[right] < heap[child])))
            child = right;
        if (logits[heap[i]] > logits[heap[child]] || (logits[heap[i]] == logits[heap[child]] && heap[i] < heap[child])) return;
        int held = heap[i];
        heap[i] = heap[child];
        heap[child] = held;
    }
}

/* Cuts picks[0..n) down to the smallest set of best tokens whose probability among them reaches top_p; returns its size. */
static int nucleus(int *picks, const float *logits, int n, float best, float top_p) {
    double total = 0, mass = 0;
    int left = n;
    for (int i = 0; i < n; i++) total += exp((double)logits[picks[i]] - best);
    for (int i = n / 2 - 1; i >= 0; i--) sink(picks, n, i, logits);
    while (left > 0 && (left == n || mass < top_p * total)) {      /* the best of what is left goes behind it */
        int token = picks[0];
        picks[0] = picks[--left];
        picks[left] = token;
        sink(picks, left, 0, logits);
        mass += exp((double)logits[token] - best);
    }
    memmove(picks, picks + left, (size_t)(n - left) * sizeof *picks);
    return n - left;
}

/* The tokens that may follow `history` ([n] ids) into sampler->picks; returns how many. Penalises the logits and divides them
 * by the temperature. *best: the largest of them. */
static int filter_tokens(Sampler *sampler, float *logits, int vocab, const Sampling *sampling, const int *history, int n,
                         float *best) {
    penalise_repeats(sampler, logits, history, n, sampling->repeat_penalty);
    int *picks = sampler->picks, first = argmax(logits, vocab),
        kept = sampling->top_k > 0 && sampling->top_k < vocab ? sampling->top_k : vocab;
    *best = logits[first];
    picks[0] = first;
    if (is_greedy(sampling)) return 1;
    for (int i = 0; i < vocab; i++) logits[i] /= sampling->temperature;
    *best = logits[first];
    if (kept < vocab) top_k(picks, logits, vocab, kept);
    else for (int i = 0; i < vocab; i++) picks[i] = i;
    if (sampling->top_p < 1) kept = nucleus(picks, logits, kept, *best, sampling->top_p);
    if (!(sampling->min_p > 0)) return kept;
    double floor_logit = *best + log(sampling->min_p);
    int count = 0;
    for (int i = 0; i < kept; i++)
        if (logits[picks[i]] >= floor_logit) picks[count++] = picks[i];
    if (!count) picks[count++] = first;             /* a min_p of 1 and rounding */
    return count;
}

/* weights[i] = e^(logit of pick i - best). */
static void weigh_picks(Sampler *sampler, const float *logits, int n, float best) {
    float *weights = sampler->weights;
    for (int i = 0; i < n; i++) weights[i] = logits[sampler->picks[i]] - best;
    for (int i = 0; i + 8 <= n; i += 8) store8(weights + i, exp8(load8(weights + i)));
    for (int i = n / 8 * 8; i < n; i++) weights[i] = exp8(splat8(weights[i]))[0];
}

/* The pick with the largest log(weight) + Gumbel noise; of equal ones, the lowest token. Since -log u >= 1 - u, a pick can only
 * be ahead of value v if 1 - u <= weight * e^-v, which spares nearly all of them their logarithms. */
static int draw_pick(const Sampler *sampler, const float *logits, int n, float best, const DraftBlock *block, int position,
                     Noise noise) {
    uint32_t words[4], four = UINT32_MAX;
    double highest = -INFINITY, reach = INFINITY;
    int choice = -1;
    for (int i = 0; i < n; i++) {
        int token = sampler->picks[i];
        if (!(sampler->weights[i] > 0)) continue;
        if ((uint32_t)token / 4 != four)
            noise_words(words, noise, block->sampling.seed, block->stream, position, four = (uint32_t)token / 4);
        if (1 - unit(words[token % 4]) > sampler->weights[i] * reach) continue;
        double value = (logits ? logits[token] - best : log(sampler->weights[i])) + gumbel(words[token % 4]);
        if (value < highest || (value == highest && token > choice)) continue;
        highest = value;
        choice = token;
        reach = exp(-highest) * 1.001;              /* weights are f32 */
    }
    return choice >= 0 ? choice : sampler->picks[0];
}

/* The target's own token behind `position`, where ids[0 .. position] stand. Changes the logits. */
static int sample(Sampler *sampler, float *logits, int vocab, const DraftBlock *block, int position) {
    float best;
    int kept = filter_tokens(sampler, logits, vocab, &block->sampling, block->ids, position + 1, &best);
    if (kept == 1) return sampler->picks[0];
    weigh_picks(sampler, logits, kept, best);
    return draw_pick(sampler, logits, kept, best, block, position, NOISE_TOKEN);
}

/* Makes sampler->weights, of `kept` picks, the residual max(p - q, 0) after the draft of a slot was refused; p itself where
 * rounding leaves nothing of it. p: the weights as they are; q: [CANDIDATES] of `ids`. Not normalised. */
static void leave_residual(Sampler *sampler, int kept, const int *ids, const float *q) {
    float *p = sampler->weights, left = 0;
    for (int i = 0; i < kept; i++) {
        float rest = p[i];
        for (int c = 0; c < CANDIDATES; c++)
            if (ids[c] == sampler->picks[i]) rest -= q[c];
        left += rest > 0 ? rest : 0;
    }
    if (!(left > 1e-8f)) return;
    for (int i = 0; i < kept; i++) {
        for (int c = 0; c < CANDIDATES; c++)
            if (ids[c] == sampler->picks[i]) p[i] -= q[c];
        p[i] = p[i] > 0 ? p[i] : 0;
    }
}

/* Whether a draft that was drawn with probability q and that the target gives p is accepted, for a uniform u in (0, 1). */
static bool accepts(double u, double p, double q) { return u * q < p; }

/* One block under acceptance by rejection. */
static int accept_by_rejection(int *choices, float *logits, int vocab, const DraftBlock *block, const Drafts *drafts, size_t at,
                               Sampler *sampler) {
    for (int j = 0;; j++, logits += vocab) {
        float best, p = 0, q = 0;
        double total = 0;
        int kept = filter_tokens(sampler, logits, vocab, &block->sampling, block->ids, block->position + j + 1, &best);
        weigh_picks(sampler, logits, kept, best);
        if (j + 1 == block->count)
            return choices[j] = draw_pick(sampler, NULL, kept, best, block, block->position + j, NOISE_TOKEN), j;
        const int draft = drafts->tokens[at + (size_t)j], *ids = drafts->ids + (at + (size_t)j) * CANDIDATES;
        const float *law = drafts->q + (at + (size_t)j) * CANDIDATES;
        for (int i = 0; i < kept; i++) total += sampler->weights[i];
        for (int i = 0; i < kept; i++) {
            sampler->weights[i] = (float)(sampler->weights[i] / total);
            if (sampler->picks[i] == draft) p = sampler->weights[i];
        }
        for (int c = 0; c < CANDIDATES; c++)        /* a small vocabulary has copies of its last candidate, with a q of 0 */
            if (ids[c] == draft) q += law[c];
        uint32_t words[4];
        noise_words(words, NOISE_ACCEPT, block->sampling.seed, block->stream, block->position + j, 0);
        if (accepts(unit(words[0]), p, q)) { choices[j] = draft; continue; }
        leave_residual(sampler, kept, ids, law);
        return choices[j] = draw_pick(sampler, NULL, kept, best, block, block->position + j, NOISE_RESIDUAL), j;
    }
}

static int accept_coupled(int *choices, float *logits, int vocab, const DraftBlock *block, const Drafts *drafts, size_t at,
                          Sampler *sampler) {
    for (int j = 0;; j++) {
        choices[j] = sample(sampler, logits + (size_t)j * (size_t)vocab, vocab, block, block->position + j);
        if (j + 1 == block->count || choices[j] != drafts->tokens[at + (size_t)j]) return j;
    }
}

static void accept_drafts(int *choices, int *accepted, float *logits, int vocab, const DraftBlock *blocks, const Drafts *drafts,
                          int n, AcceptRule rule, Sampler *samplers, int n_samplers) {
#pragma omp parallel for schedule(dynamic) num_threads(n_samplers) if (n > 1)
    for (int i = 0; i < n; i++) {
        const DraftBlock *block = &blocks[i];
        float *rows = logits + (size_t)block->first * (size_t)vocab;
        size_t at = (size_t)i * (size_t)drafts->slots;
        bool rejection = rule == ACCEPT_REJECTION && !is_greedy(&block->sampling) && block->count > 1;
        accepted[i] = (rejection ? accept_by_rejection : accept_coupled)(choices + block->first, rows, vocab, block, drafts, at,
                                                                         &samplers[omp_get_thread_num()]);
    }
}

/* =====================================================================================================================
 * Drafters' operations
 *
 * Owns: what DFlash, DFlash 2 and DSpark need beyond a Qwen3's layers (attention over ring and block, the convolution, the
 * candidates of a slot and the draw among them), and the division of a verification budget. Scores of candidates are f32
 * throughout.
 */

static void copy_rows(float *y, size_t y_stride, const float *x, size_t x_stride, int n_rows, int dim, float factor) {
    for (int r = 0; r < n_rows; r++)
        for (int j = 0; j < dim; j++) y[(size_t)r * y_stride + (size_t)j] = x[(size_t)r * x_stride + (size_t)j] * factor;
}

/* The last row of a block first: a row needs those before it as they were. */
static void convolve(float *z, const float *base, const float *delta, size_t delta_stride, int n_rows, int block_size, int taps,
                     int group, int dim) {
    const size_t width = (size_t)dim, groups = (size_t)(dim / group);
#pragma omp parallel for if ((size_t)(n_rows * taps) * width > SHARED_WORK)
    for (int block = 0; block < n_rows / block_size; block++)
        for (int i = block_size - 1; i >= 0; i--) {
            const size_t r = (size_t)(block * block_size + i);
            const float *change = delta + r * delta_stride;
            for (size_t g = 0; g < groups; g++) {
                const size_t first = g * (size_t)group;
                float *row = z + r * width + first;
                for (int j = 0; j < group; j++) row[j] *= base[first + (size_t)j] + change[g];
                for (int t = 1; t < taps && t <= i; t++) {
                    const float *before = row - (size_t)t * width, *kernel = base + (size_t)t * width + first;
                    for (int j = 0; j < group; j++) row[j] += (kernel[j] + change[(size_t)t * groups + g]) * before[j];
                }
            }
        }
}

static _Thread_local float query_panel[KEY_TILE * MAX_ROW_WIDTH];
static _Thread_local float output_panel[KEY_TILE * MAX_ROW_WIDTH];

/* `keys` keys and values in the panels meet the queries of a block: row i sees those from from[i] to to[i]. Rows that see the
 * same are taken together. */
static void attend_block_tile(float *maximum, float *sum, const int *from, const int *to, int block_size, int group, int dim,
                              float scale) {
    float p[QUERY_TILE * KEY_TILE];
    memset(p, 0, sizeof p);
    for (int first = 0, last; first < block_size; first = last) {
        for (last = first + 1; last < block_size && from[last] == from[first] && to[last] == to[first];) last++;
        int begin = from[first], keys = to[first] - begin, end = last * group;
        for (int h = first * group; h < end && keys > 0; h += QUERY_TILE) {
            int some = end - h < QUERY_TILE ? end - h : QUERY_TILE;
            dot_panel(p, KEY_TILE, query_panel + h * dim, (size_t)dim, some, panel + begin * dim, (size_t)dim, keys, dim, false);
            attend_tile(output_panel + h * dim, (size_t)dim, maximum + h, sum + h, p, some, second_panel + begin * dim,
                        (size_t)dim, dim, keys, scale);
        }
    }
}

/* The keys and values of one head, of `keys` positions from `first` on that lie in the block's ring, into the panels. */
static void widen_ring(const uint8_t *ring, const RowFormat *format, int ring_rows, const DraftBlock *block, int first, int keys,
                       int head, int kv_heads, int dim) {
    const uint8_t *rows = ring + (size_t)block->session * (size_t)ring_rows * format->stride;
    for (int s = 0; s < keys; s++) {
        const uint8_t *cached = rows + (size_t)((first + s) % ring_rows) * format->stride;
        widen_quantised(panel + (size_t)s * (size_t)dim, cached, format, head * dim, dim);
        widen_quantised(second_panel + (size_t)s * (size_t)dim, cached, format, (kv_heads + head) * dim, dim);
    }
}

static void block_attention(float *y, const float *q, const float *kv, const uint8_t *ring, const RowFormat *format,
                            int ring_rows, const DraftBlock *blocks, int n_blocks, int block_size, int window, bool causal,
                            int heads, int kv_heads, int head_dim, float scale) {
    const int group = heads / kv_heads;
    const size_t dim = (size_t)head_dim, q_width = (size_t)heads * dim, kv_width = (size_t)kv_heads * dim;
#pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < n_blocks * kv_heads; task++) {
        const DraftBlock *block = &blocks[task / kv_heads];
        const int head = task % kv_heads, n = block->position;
        const size_t row = (size_t)(task / kv_heads) * (size_t)block_size, column = (size_t)(head * group) * dim,
                     part = (size_t)group * dim;
        float maximum[MAX_BLOCK_QUERIES], sum[MAX_BLOCK_QUERIES];
        int from[MAX_BLOCK], to[MAX_BLOCK], low = n >= window ? n - window + 1 : 0;
        for (int i = 0; i < block_size; i++)
            memcpy(query_panel + (size_t)i * part, q + (row + (size_t)i) * q_width + column, part * sizeof(float));
        attend_begin(output_panel, dim, maximum, sum, block_size * group, head_dim);
        for (int first = low > block->ring_first ? low : block->ring_first, keys; first < n; first += keys) {
            keys = n - first < KEY_TILE ? n - first : KEY_TILE;
            widen_ring(ring, format, ring_rows, block, first, keys, head, kv_heads, head_dim);
            for (int i = 0; i < block_size; i++) {
                int oldest = n + i >= window ? n + i - window + 1 - first : 0;
                from[i] = oldest < 0 ? 0 : oldest < keys ? oldest : keys;
                to[i] = keys;
            }
            attend_block_tile(maximum, sum, from, to, block_size, group, head_dim, scale);
        }
        for (int i = 0; i < block_size; i++) {
            const float *own = kv + (row + (size_t)i) * 2 * kv_width + (size_t)head * dim;
            memcpy(panel + (size_t)i * dim, own, dim * sizeof(float));
            memcpy(second_panel + (size_t)i * dim, own + kv_width, dim * sizeof(float));
            from[i] = 0;
            to[i] = causal ? i + 1 : block_size;
        }
        attend_block_tile(maximum, sum, from, to, block_size, group, head_dim, scale);
        attend_end(output_panel, dim, sum, block_size * group, head_dim);
        for (int i = 0; i < block_size; i++)
            memcpy(y + (row + (size_t)i) * q_width + column, output_panel + (size_t)i * part, part * sizeof(float));
    }
}

static void cap_logits(float *y, size_t n, float multiplier, float softcap) {
    for (size_t i = 0; i < n; i++) y[i] = softcap > 0 ? softcap * tanhf(y[i] * multiplier / softcap) : y[i] * multiplier;
}

/* Takes logit i among the best so far, sorted: behind those that are not smaller. */
static void insert_candidate(int *best, const float *row, int count, int i) {
    int at = count - 1;
    for (; at > 0 && row[i] > row[best[at - 1]]; at--) best[at] = best[at - 1];
    best[at] = i;
}

/* Few of a vocabulary come near the best, so stretches of 64 are passed over by their maximum. */
static void best_candidates(int *best, const float *row, int vocab) {
    const int count = vocab < CANDIDATES ? vocab : CANDIDATES;
    for (int i = 0; i < count; i++) insert_candidate(best, row, i + 1, i);
    for (int first = count, last; first < vocab; first = last) {
        last = vocab - first < 64 ? vocab : first + 64;
        f32x8 largest = splat8(-INFINITY);
        for (int i = first; i + 8 <= last; i += 8) {
            f32x8 v = load8(row + i);
            largest = select8(v > largest, v, largest);
        }
        bool near = (last - first) % 8 != 0;
        for (int lane = 0; lane < 8; lane++) near |= largest[lane] > row[best[count - 1]];
        for (int i = first; i < last && near; i++)
            if (row[i] > row[best[count - 1]]) insert_candidate(best, row, count, i);
    }
    for (int i = count; i < CANDIDATES; i++) best[i] = best[count - 1];
}

static void candidates(int *ids, float *values, size_t stride, const float *logits, int n, int vocab, const int *target_ids) {
#pragma omp parallel for if ((size_t)n * (size_t)vocab > SHARED_WORK)
    for (int r = 0; r < n; r++) {
        const float *row = logits + (size_t)r * (size_t)vocab;
        int *best = ids + (size_t)r * stride;
        best_candidates(best, row, vocab);
        for (int i = 0; i < CANDIDATES; i++) {
            values[(size_t)r * stride + (size_t)i] = row[best[i]];
            if (target_ids) best[i] = target_ids[best[i]];
        }
    }
}

static void take_tokens(Row *rows, const DraftBlock *blocks, int slot, int n) {
    for (int i = 0; i < n; i++) rows[i].token = blocks[i].ids[blocks[i].position + slot];
}

static void add_bias(float *y, size_t stride, float bias, int n) {
    for (int i = 0; i < n; i++) y[(size_t)i * stride] += bias;
}

static void length_features(float *features, size_t stride, const float *values, size_t values_stride, const float *logits, int n,
                            int vocab) {
#pragma omp parallel for if ((size_t)n * (size_t)vocab > SHARED_WORK / 8)
    for (int r = 0; r < n; r++) {
        const float *row = logits + (size_t)r * (size_t)vocab, *best = values + (size_t)r * values_stride;
        float *out = features + (size_t)r * stride;
        f32x8 total = splat8(0), moment = splat8(0);
        double sum = 0, mean = 0;
        for (int i = 0; i + 8 <= vocab; i += 8) {
            f32x8 below = load8(row + i) - splat8(best[0]), weight = exp8(below);
            total += weight;
            moment += weight * below;
        }
        for (int lane = 0; lane < 8; lane++) sum += total[lane], mean += moment[lane];
        for (int i = vocab / 8 * 8; i < vocab; i++) {
            double weight = exp(row[i] - best[0]);
            sum += weight;
            mean += weight * (row[i] - best[0]);
        }
        out[0] = best[0];
        for (int rank = 1; rank < CANDIDATES; rank++) out[rank] = best[0] - best[rank];
        out[CANDIDATES] = (float)-log(sum);
        out[CANDIDATES + 1] = (float)(log(sum) - mean / sum);
    }
}

static void predict_lengths(float *scores, const float *features, int n, const LengthPredictor *predictor, float *scratch) {
    const float *in = features;
    for (int l = 0; l < predictor->layers; l++) {
        const Matrix *weight = &predictor->weight[l];
        bool last = l + 1 == predictor->layers;
        float *out = last ? scores : scratch + (size_t)(l % 2) * (size_t)n * MAX_PREDICTOR_WIDTH;
        multiply_matrix(out, (size_t)weight->rows, in, (size_t)weight->cols, n, weight);
        for (int r = 0; r < n; r++)
            for (int o = 0; o < weight->rows; o++) {
                float *x = &out[(size_t)r * (size_t)weight->rows + (size_t)o];
                *x += predictor->bias[l][o];
                if (last) *x = 1 / (1 + expf(-*x));
                else *x = *x > 0 ? *x : 0;
                if (last && o && x[-1] < *x) *x = x[-1];
            }
        in = out;
    }
}

static bool occurs(const int *ids, int n, int id) {
    for (int i = 0; i < n; i++)
        if (ids[i] == id) return true;
    return false;
}

/* What a session makes of the scores of a slot's candidates: penalised, divided by the temperature, in descending order. */
typedef struct Ranking {
    int order[CANDIDATES];      /* candidates, the best first */
    float score[CANDIDATES];    /* by rank */
    float weight[CANDIDATES];   /* by rank: e^(score - best); 0 for the copies that a small vocabulary has */
    float total;                /* of the weights */
} Ranking;

static Ranking rank_candidates(const int *ids, const float *scores, const DraftBlock *block, int position) {
    const Sampling *sampling = &block->sampling;
    Ranking ranking = {0};
    for (int i = 0; i < CANDIDATES; i++) {
        float score = scores[i];
        int rank = i;
        if (sampling->repeat_penalty != 1 && occurs(block->ids, position + 1, ids[i]))
            score = score > 0 ? score / sampling->repeat_penalty : score * sampling->repeat_penalty;
        if (!is_greedy(sampling)) score /= sampling->temperature;
        for (; rank > 0 && score > ranking.score[rank - 1]; rank--) {
            ranking.score[rank] = ranking.score[rank - 1];
            ranking.order[rank] = ranking.order[rank - 1];
        }
        ranking.score[rank] = score;
        ranking.order[rank] = i;
    }
    for (int r = 0; r < CANDIDATES; r++) {
        bool copy = r && ids[ranking.order[r]] == ids[ranking.order[r - 1]];
        ranking.weight[r] = copy ? 0 : expf(ranking.score[r] - ranking.score[0]);
        ranking.total += ranking.weight[r];
    }
    return ranking;
}

/* How many ranks the session's filters leave. They are applied to the candidates alone: of the whole vocabulary these hold nearly
 * everything that could be drawn. */
static int filter_ranking(const Ranking *ranking, const Sampling *sampling) {
    int most = sampling->top_k > 0 && sampling->top_k < CANDIDATES ? sampling->top_k : CANDIDATES, kept = 1;
    float total = 0, mass = ranking->weight[0];
    for (int r = 0; r < most; r++) total += ranking->weight[r];
    while (kept < most && mass < sampling->top_p * total) mass += ranking->weight[kept++];
    while (kept > 1 && ranking->weight[kept - 1] < sampling->min_p) kept--;
    return kept;
}

/* Draws one of a slot's candidates, in the way of the block's session; `position` is that of the row before it. q: the law that
 * the draw followed, where the rule needs one. one_hot: under acceptance by rejection the best is taken, not drawn. */
static int draw_candidate(const int *ids, const float *scores, float *q, const DraftBlock *block, int position, AcceptRule rule,
                          bool one_hot) {
    const Sampling *sampling = &block->sampling;
    const bool rejection = rule == ACCEPT_REJECTION;
    const Ranking ranking = rank_candidates(ids, scores, block, position);
    bool lawful = ranking.total >= 1 && ranking.total <= CANDIDATES;            /* scores that are no numbers make no law */
    bool best_only = is_greedy(sampling) || (rejection && one_hot) || !lawful;
    /* Under rejection a place that is drafted again, behind another anchor, has other noise: the first has moved the lengths
     * since. */
    uint64_t stream = block->stream + (rejection ? (uint64_t)block->position * 0x9E3779B97F4A7C15u : 0);
    int kept = best_only ? 1 : rejection ? CANDIDATES : filter_ranking(&ranking, sampling), choice = 0;
    double highest = -INFINITY;
    for (int r = 0; q && r < CANDIDATES; r++) q[ranking.order[r]] = best_only ? (float)!r : ranking.weight[r] / ranking.total;
    for (int r = 0; r < kept && !best_only; r++) {
        int token = ids[ranking.order[r]];
        uint32_t words[4];
        if (!(ranking.weight[r] > 0)) continue;
        noise_words(words, rejection ? NOISE_DRAFT : NOISE_TOKEN, sampling->seed, stream, position, (uint32_t)token / 4);
        double value = (double)ranking.score[r] + gumbel(words[token % 4]);
        if (value <= highest) continue;
        highest = value;
        choice = r;
    }
    return ids[ranking.order[choice]];
}

/* The draft of one slot, which joins the session's ids so that the next can follow it. */
static void draw_slot(Drafts *drafts, int slot, int i, const DraftBlock *block, AcceptRule rule) {
    size_t at = (size_t)i * (size_t)drafts->slots + (size_t)slot;
    drafts->tokens[at] = draw_candidate(drafts->ids + at * CANDIDATES, drafts->scores + at * CANDIDATES,
                                        rule == ACCEPT_REJECTION ? drafts->q + at * CANDIDATES : NULL, block,
                                        block->position + slot, rule, drafts->one_hot);
    block->ids[block->position + 1 + slot] = drafts->tokens[at];
}

static void draw_drafts(Drafts *drafts, int slot, int end, const DraftBlock *blocks, int n, AcceptRule rule) {
    for (int i = 0; i < n; i++)
        for (int j = slot; j < end; j++) draw_slot(drafts, j, i, &blocks[i], rule);
}

/* S(a, b) for the candidates b of one slot, into their scores. e: [rank]. */
static void selector_scores(float *scores, const int *ids, int a, const float *e, const Matrix *predecessor,
                            const Matrix *successor) {
    int rank = predecessor->cols;
    widen_weights(panel, predecessor, a, 0, rank);
    for (int r = 0; r < rank; r++) panel[r] *= e[r];
    for (int c = 0; c < CANDIDATES; c++) {
        widen_weights(second_panel, successor, ids[c], 0, rank);
        scores[c] += dot(panel, second_panel, rank);
    }
}

static void select_path(Drafts *drafts, const float *e, const Matrix *predecessor, const Matrix *successor,
                        const DraftBlock *blocks, int n, AcceptRule rule) {
#pragma omp parallel for if (n > 1)
    for (int i = 0; i < n; i++)
        for (int slot = 0; slot < drafts->slots; slot++) {
            size_t row = (size_t)i * (size_t)drafts->slots + (size_t)slot, at = row * CANDIDATES;
            selector_scores(drafts->scores + at, drafts->ids + at, blocks[i].ids[blocks[i].position + slot],
                            e + row * (size_t)predecessor->cols, predecessor, successor);
            draw_slot(drafts, slot, i, &blocks[i], rule);
        }
}

/* The next draft to verify, or the last one to drop: of the open ones the best, of the kept ones the worst. -1: there is none.
 * Order: score descending, draft ascending, session ascending. */
static int next_to_grow(const int *lengths, const float *scores, const int *limits, int n, int slots) {
    int best = -1;
    for (int i = 0; i < n; i++) {
        if (lengths[i] >= limits[i]) continue;
        float score = scores[i * slots + lengths[i] - 1];
        if (best < 0 || score > scores[best * slots + lengths[best] - 1]
            || (score == scores[best * slots + lengths[best] - 1] && lengths[i] < lengths[best]))
            best = i;
    }
    return best;
}

static int next_to_shrink(const int *lengths, const float *scores, int n, int slots) {
    int worst = -1;
    for (int i = 0; i < n; i++) {
        if (lengths[i] <= 1) continue;
        float score = scores[i * slots + lengths[i] - 2];
        if (worst < 0 || score < scores[worst * slots + lengths[worst] - 2]
            || (score == scores[worst * slots + lengths[worst] - 2] && lengths[i] >= lengths[worst]))
            worst = i;
    }
    return worst;
}

/* Moves lengths to the budget, a row at a time. */
static void fit_budget(int *lengths, const float *scores, const int *limits, int n, int slots, int budget) {
    int total = 0, i;
    for (i = 0; i < n; i++) total += lengths[i];
    for (; total < budget && (i = next_to_grow(lengths, scores, limits, n, slots)) >= 0; total++) lengths[i]++;
    for (; total > budget && (i = next_to_shrink(lengths, scores, n, slots)) >= 0; total--) lengths[i]--;
}

/* Rows of a session do not increase in score, so its best open draft is always the next one, and taking the best of all n at
 * each step is taking the budget - n best of all. */
static void allocate(int *lengths, const float *scores, const int *limits, int n, int slots, int budget) {
    for (int i = 0; i < n; i++) lengths[i] = 1;
    fit_budget(lengths, scores, limits, n, slots, budget);
}

static void allocate_seeded(int *lengths, const float *scores, const int *limits, int n, int slots, int budget) {
    for (int i = 0; i < n; i++) {
        float sum = 0;
        for (int j = 0; j < slots; j++) sum += scores[i * slots + j];
        int seed = 1 + (int)rintf(sum);
        lengths[i] = seed < 1 ? 1 : seed < limits[i] ? seed : limits[i];
    }
    fit_budget(lengths, scores, limits, n, slots, budget);
}

static int pack_blocks(Row *rows, DraftBlock *blocks, int n, int capacity) {
    int used = 0;
    for (int i = 0; i < n; i++) {
        DraftBlock *block = &blocks[i];
        block->first = used;
        for (int j = 0; j < block->count; j++)
            rows[used++] = (Row){block->session, block->position + j, block->ids[block->position + j]};
    }
    for (int r = used; r < capacity; r++) rows[r] = (Row){.session = -1};
    return used;
}

const Backend c_backend = {
    .name = "cpu",
    .live_sources = 1,
    .shares_memory = true,
    .start = start,
    .available = available_memory,
    .take = take,
    .give_back = give_back,
    .import_weights = import_weights,
    .release_weights = release_weights,
    .make_weights = make_weights,
    .samplers = samplers,
    .begin_work = begin_work,
    .end_work = end_work,
    .wait = wait_for_all,
    .copy_bytes = copy_bytes,
    .upload = copy_bytes,
    .embed = embed,
    .rms_norm = rms_norm,
    .add_norm = add_norm,
    .linear = linear,
    .rotations = rotations,
    .rotate_queries = rotate_queries,
    .norm_heads = norm_heads,
    .locate_rows = locate_rows,
    .store_rows = store_rows,
    .store_latents = store_latents,
    .store_index_keys = store_index_keys,
    .index_select = index_select,
    .absorb_query = absorb_query,
    .resolve = resolve,
    .fetch_rows = fetch_rows,
    .await_rows = await_rows,
    .round_rows = round_rows,
    .hadamard = hadamard,
    .turn_index_queries = turn_index_queries,
    .store_shared_keys = store_shared_keys,
    .mix_streams = mix_streams,
    .locate_groups = locate_groups,
    .see_groups = see_groups,
    .locate_heavy = locate_heavy,
    .compress = compress,
    .pool_groups = pool_groups,
    .select_groups = select_groups,
    .first_stream = first_stream,
    .note_tokens = note_tokens,
    .prefetch_engram = prefetch_engram,
    .read_engram = read_engram,
    .add_engram = add_engram,
    .window_attention = window_attention,
    .grouped_linear = grouped_linear,
    .route_softplus = route_softplus,
    .keep_trails = keep_trails,
    .forget_hot = forget_hot,
    .start_copy = start_copy,
    .finish_copy = finish_copy,
    .sparse_attention = sparse_attention,
    .expand_value = expand_value,
    .dense_attention = dense_attention,
    .swiglu = swiglu,
    .zero = zero,
    .add = add,
    .move_rows = move_rows,
    .route = route,
    .experts = experts,
    .check_finite = check_finite,
    .copy_rows = copy_rows,
    .convolve = convolve,
    .block_attention = block_attention,
    .cap_logits = cap_logits,
    .candidates = candidates,
    .take_tokens = take_tokens,
    .add_bias = add_bias,
    .length_features = length_features,
    .predict_lengths = predict_lengths,
    .draw_drafts = draw_drafts,
    .select_path = select_path,
    .allocate = allocate,
    .allocate_seeded = allocate_seeded,
    .pack_blocks = pack_blocks,
    .accept = accept_drafts,
};
