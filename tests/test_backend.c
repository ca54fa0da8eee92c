/* test_backend.c: the operations of the C backend against the plainest double-precision forms of the same formulas; and that each
 * row's result is the same bits alone, in any batch, and with one thread or two. */
#include "../engine.c"
#include "../backend.c"
#include "check.h"
#include "scratch.h"

/* An array of n floats in [-1, 1) that the caller frees. (Inlined, GCC 12 warns of sizes that cannot occur.) */
__attribute__((noinline)) static float *random_floats(size_t n) {
    float *x = allocate_zeroed(n, sizeof(float));
    random_fill(x, n);
    return x;
}

/* Whether |a - b| stays within `relative` of the size of the terms that were added up. */
static bool near(double a, double b, double terms, double relative) { return fabs(a - b) <= relative * (terms + 1e-30); }

/* ---------------------------------------------------------------------------------------------------------------------
 * Number formats
 */

/* A small float format by its definition: sign, exponent of `exponent` bits, `mantissa` bits. NaN and infinities are the caller's. */
static double decode(unsigned code, int exponent_bits, int mantissa_bits) {
    int bias = (1 << (exponent_bits - 1)) - 1, exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
    double mantissa = code & ((1u << mantissa_bits) - 1), one = 1u << mantissa_bits;
    double magnitude = exponent ? ldexp(1 + mantissa / one, exponent - bias) : ldexp(mantissa / one, 1 - bias);
    return code >> (exponent_bits + mantissa_bits) & 1 ? -magnitude : magnitude;
}

/* The same value, the same sign of zero, or both NaN. */
static bool same_value(float a, double b) { return isnan(a) ? isnan(b) : a == b && !signbit(a) == !signbit(b); }

static void test_widen(void) {
    int wrong[3] = {0};
    for (unsigned code = 0; code < 65536; code++) {
        uint8_t bytes[17] = {0}, *p = bytes + 1;                    /* an odd address */
        for (int i = 0; i < 8; i++) memcpy(p + 2 * i, &(uint16_t){(uint16_t)code}, 2);
        bool special = (code >> 10 & 31) == 31, mantissa = code & 1023;
        double half = !special ? decode(code, 5, 10) : mantissa ? NAN : code >> 15 ? -INFINITY : INFINITY;
        double brain = (code >> 7 & 255) == 255 ? code & 127 ? NAN : code >> 15 ? -INFINITY : INFINITY : decode(code, 8, 7);
        f32x8 halves = widen8(p, DTYPE_F16), brains = widen8(p, DTYPE_BF16);
        wrong[0] += !same_value(widen(p, DTYPE_F16), half) || !same_value(halves[0], half) || !same_value(halves[7], half);
        wrong[1] += !same_value(widen(p, DTYPE_BF16), brain) || !same_value(brains[0], brain) || !same_value(brains[7], brain);
        if (code > 255) continue;
        for (int i = 0; i < 8; i++) p[i] = (uint8_t)code;
        double eighth = (code & 127) == 127 ? NAN : decode(code, 4, 3);
        f32x8 eighths = widen8(p, DTYPE_F8_E4M3);
        wrong[2] += !same_value(widen(p, DTYPE_F8_E4M3), eighth) || !same_value(eighths[0], eighth)
                    || !same_value(eighths[7], eighth);
    }
    CHECK(!wrong[0], "all f16 codes, %d are wrong", wrong[0]);
    CHECK(!wrong[1], "all bf16 codes, %d are wrong", wrong[1]);
    CHECK(!wrong[2], "all e4m3 codes, %d are wrong", wrong[2]);
    for (unsigned code = 0; code < 16; code++) {
        const uint8_t other = (uint8_t)(code | (code ^ 5) << 4), pairs[] = {other, other, other, other};
        f32x8 values = widen8(pairs, DTYPE_F4_E2M1);
        CHECK(same_value(widen(&other, DTYPE_F4_E2M1), decode(code, 2, 1)) && same_value(values[6], decode(code, 2, 1))
                  && same_value(values[7], decode(code ^ 5, 2, 1)), "e2m1 code %u is %g", code, decode(code, 2, 1));
    }
    static const struct {
        uint8_t code;
        double value;
    } e8m0[] = {{120, 0x1p-7}, {125, 0.25}, {127, 1}, {130, 8}, {140, 8192}, {0, 0x1p-127}, {254, 0x1p127}, {255, NAN}};
    for (size_t i = 0; i < sizeof e8m0 / sizeof *e8m0; i++)
        CHECK(same_value(widen(&e8m0[i].code, DTYPE_F8_E8M0), e8m0[i].value), "e8m0 byte %d is %g", e8m0[i].code, e8m0[i].value);
    float x = random_float();
    CHECK(same_value(widen((const uint8_t *)&x, DTYPE_F32), x), "f32 is itself");
}

/* Every code comes back from its own value; a value between two codes goes to the nearer one, and halfway to the even one. */
static void test_narrow(void) {
    for (unsigned code = 0; code < 256; code++) {
        double value = decode(code & 127, 4, 3);
        float x = code > 127 ? -(float)value : (float)value;
        if ((code & 127) == 127) continue;
        CHECK(narrow_e4m3(x) == code, "e4m3 code %u comes back, not %u", code, narrow_e4m3(x));
        if ((code & 127) == 126) continue;
        double next = decode((code & 127) + 1, 4, 3), middle = (value + next) / 2;
        unsigned even = code & 1 ? code + 1 : code, sign = code & 128;
        CHECK(narrow_e4m3((float)(sign ? -middle : middle)) == even, "halfway above e4m3 code %u goes to the even one", code);
        CHECK(narrow_e4m3(nextafterf((float)(sign ? -middle : middle), 0)) == code, "just below halfway above e4m3 code %u", code);
        CHECK(narrow_e4m3(nextafterf((float)(sign ? -middle : middle), sign ? -INFINITY : INFINITY)) == code + 1,
              "just above halfway above e4m3 code %u", code);
    }
    CHECK(narrow_e4m3(449) == 0x7e && narrow_e4m3(1e30f) == 0x7e && narrow_e4m3(-INFINITY) == 0xfe, "e4m3 saturates at 448");
    CHECK((narrow_e4m3(NAN) & 127) == 127, "NaN is NaN in e4m3");
    int wrong = 0;
    for (unsigned code = 0; code < 65536; code++) {
        float x = bits_to_float(code << 16);
        if (isnan(x)) { wrong += (narrow_bf16(x) & 0x7fff) <= 0x7f80; continue; }
        wrong += narrow_bf16(x) != code;
        if ((code & 0x7f80) == 0x7f80) continue;
        wrong += narrow_bf16(bits_to_float(code << 16 | 0x7fff)) != code;
        wrong += narrow_bf16(bits_to_float(code << 16 | 0x8000)) != code + (code & 1);
        wrong += narrow_bf16(bits_to_float(code << 16 | 0x8001)) != code + 1;
    }
    CHECK(!wrong, "bf16 goes to the nearest, ties to even: %d are wrong", wrong);
    CHECK((narrow_bf16(bits_to_float(0x7f800001)) & 0x7fff) > 0x7f80, "a NaN with a small payload stays NaN in bf16");
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Products
 */

typedef struct TestMatrix {
    Matrix view;
    double *values;             /* [rows, cols] */
    uint8_t *bytes;
    float *scale;
    uint8_t *exponents;
} TestMatrix;

static int e4m3_block = SCALE_BLOCK;    /* rows and columns of an e4m3 matrix that share a scale */

static TestMatrix make_matrix(DType dtype, int rows, int cols) {
    const size_t n = (size_t)rows * (size_t)cols, size = stored_bytes(dtype, 1), block = (size_t)e4m3_block,
                 blocks_down = ((size_t)rows + block - 1) / block, blocks_across = ((size_t)cols + block - 1) / block;
    TestMatrix matrix = {.view = {.dtype = dtype, .rows = rows, .cols = cols}};
    matrix.values = allocate_zeroed(n, sizeof(double));
    matrix.bytes = allocate_zeroed(n * size + 1, 1);
    matrix.view.data = matrix.bytes + 1;                            /* an odd address, as files have them */
    if (dtype == DTYPE_F8_E4M3) {
        matrix.view.scale = matrix.scale = random_floats(blocks_down * blocks_across);
        matrix.view.scale_cols = (int)blocks_across;
        matrix.view.block = e4m3_block;
    }
    if (dtype == DTYPE_F4_E2M1) {
        matrix.view.scale_cols = (cols + 31) / 32;
        const size_t row_bytes = stored_bytes(dtype, (size_t)cols), across = (size_t)matrix.view.scale_cols;
        matrix.view.exponents = matrix.exponents = allocate_zeroed((size_t)rows * across, 1);
        for (int i = 0; i < rows * matrix.view.scale_cols; i++) matrix.exponents[i] = (uint8_t)(122 + random_word() % 8);
        for (size_t i = 0; i < n; i++) {
            static const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
            uint32_t code = random_word() & 15;
            size_t row = i / (size_t)cols, column = i % (size_t)cols;
            matrix.bytes[1 + row * row_bytes + column / 2] |= (uint8_t)(code << column % 2 * 4);
            matrix.values[i] = (code & 8 ? -magnitudes[code & 7] : magnitudes[code])
                               * exp2(matrix.exponents[row * across + column / 32] - 127);
        }
        return matrix;
    }
    for (size_t i = 0; i < n; i++) {
        uint8_t *p = matrix.bytes + 1 + i * size;
        float x = random_float();
        uint16_t half = dtype == DTYPE_F16 ? (uint16_t)(random_word() & 0xbbff) : narrow_bf16(x);
        if (dtype == DTYPE_F32) memcpy(p, &x, 4);
        else if (dtype == DTYPE_F8_E4M3) *p = narrow_e4m3(x * 100);
        else memcpy(p, &half, 2);
        matrix.values[i] = widen(p, dtype);
        if (matrix.scale) matrix.values[i] *= matrix.scale[i / (size_t)cols / block * blocks_across + i % (size_t)cols / block];
    }
    return matrix;
}

static void free_matrix(TestMatrix *matrix) {
    free(matrix->values);
    free(matrix->bytes);
    free(matrix->scale);
    free(matrix->exponents);
}

static const DType dtypes[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_F8_E4M3, DTYPE_F4_E2M1};

/* Rows [first, first + count) of the matrix times each of 13 rows: near the sums in double, and the same bits in batches of every size. */
static void test_linear_once(DType dtype, int rows, int cols, int first, int count) {
    enum { ROWS = 13 };
    TestMatrix matrix = make_matrix(dtype, rows, cols);
    Matrix view = matrix_rows(&matrix.view, first, count);
    size_t x_stride = (size_t)cols + 3, y_stride = (size_t)count + 5;
    float *x = random_floats(ROWS * x_stride), *alone = allocate_zeroed(ROWS * y_stride, sizeof(float)),
          *y = allocate_zeroed(ROWS * y_stride, sizeof(float));
    for (int r = 0; r < ROWS; r++)
        multiply_matrix(alone + (size_t)r * y_stride, y_stride, x + (size_t)r * x_stride, x_stride, 1, &view);
    int wrong = 0, other = 0, outside = 0;
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < count; o++) {
            double sum = 0, terms = 0;
            for (int k = 0; k < cols; k++) {
                double term = matrix.values[(size_t)(first + o) * (size_t)cols + (size_t)k] * x[(size_t)r * x_stride + (size_t)k];
                sum += term;
                terms += fabs(term);
            }
            wrong += !near(alone[(size_t)r * y_stride + (size_t)o], sum, terms, 1e-6);
        }
    for (int threads = 1; threads <= 2; threads++)
        for (int n = 0; n <= ROWS; n++) {
            omp_set_num_threads(threads);
            for (size_t i = 0; i < ROWS * y_stride; i++) y[i] = 77;
            multiply_matrix(y, y_stride, x, x_stride, n, &view);
            for (int r = 0; r < n; r++) {
                other += memcmp(y + (size_t)r * y_stride, alone + (size_t)r * y_stride, (size_t)count * sizeof(float)) != 0;
                for (size_t o = (size_t)count; o < y_stride; o++) outside += y[(size_t)r * y_stride + o] != 77;
            }
        }
    CHECK(!wrong, "linear %s [%d, %d] rows %d..%d: %d values are off", dtype_names[dtype], rows, cols, first, first + count,
          wrong);
    CHECK(!other, "linear %s [%d, %d]: %d rows have other bits in a batch", dtype_names[dtype], rows, cols, other);
    CHECK(!outside, "linear %s [%d, %d]: nothing is written beside y", dtype_names[dtype], rows, cols);
    free(x);
    free(y);
    free(alone);
    free_matrix(&matrix);
}

static void test_linear(void) {
    static const int sizes[][2] = {{1, 1},     {3, 7},     {5, 8},     {17, 129},  {130, 127}, {49, 128},
                                   {200, 300}, {97, 1024}, {51, 1025}, {33, 2500}, {300, 200}, {9, 4096},
                                   {6, 4161},  {5, 9000}};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            test_linear_once(dtypes[d], sizes[i][0], sizes[i][1], 0, sizes[i][0]);
        for (int head = 0; head < 7; head++)
            test_linear_once(dtypes[d], 7 * 44, 150, head * 44, 44); /* 44 is no divisor of 128 */
        test_linear_once(dtypes[d], 448, 133, 190, 258);
    }
    e4m3_block = 32;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        test_linear_once(DTYPE_F8_E4M3, sizes[i][0], sizes[i][1], 0, sizes[i][0]);
    test_linear_once(DTYPE_F8_E4M3, 448, 165, 190, 258);
    e4m3_block = SCALE_BLOCK;
}

/* More rows than matrices of codes meet at a time, of one of which a value is not finite: each has the bits that it has alone, and
 * only that one shows it. */
static void test_many_rows_of_codes(void) {
    enum { ROWS = 2 * HELD_ROWS + 3, COLUMNS = 60, COLS = 2500, SPOILT = HELD_ROWS + 1 };
    for (size_t d = 3; d < sizeof dtypes / sizeof *dtypes; d++) {
        TestMatrix matrix = make_matrix(dtypes[d], COLUMNS, COLS);
        float *x = random_floats(ROWS * COLS), *y = allocate_zeroed(ROWS * COLUMNS, sizeof(float)), alone[COLUMNS];
        x[SPOILT * COLS + 1700] = d % 2 ? INFINITY : NAN;
        multiply_matrix(y, COLUMNS, x, COLS, ROWS, &matrix.view);
        int other = 0, finite = 0;
        for (int r = 0; r < ROWS; r++) {
            multiply_matrix(alone, COLUMNS, x + r * COLS, COLS, 1, &matrix.view);
            other += r != SPOILT && memcmp(alone, y + r * COLUMNS, sizeof alone);
            for (int o = 0; o < COLUMNS; o++) finite += (isfinite(y[r * COLUMNS + o]) != 0) != (r != SPOILT);
        }
        CHECK(!other, "%s: %d of %d rows have other bits alone", dtype_names[dtypes[d]], other, ROWS);
        CHECK(!finite, "%s: %d products are finite, or not, without reason", dtype_names[dtypes[d]], finite);
        free(x);
        free(y);
        free_matrix(&matrix);
    }
}

/* Products that underflow to -0 in every lane stay -0 whatever the batch. */
static void test_linear_negative_zero(void) {
    enum { ROWS = 13, COLS = 16 };
    float w[COLS], x[ROWS * COLS], y[ROWS];
    for (int k = 0; k < COLS; k++) w[k] = -1e-30f;
    for (int i = 0; i < ROWS * COLS; i++) x[i] = 1e-30f;
    Matrix matrix = {.data = (const uint8_t *)w, .dtype = DTYPE_F32, .rows = 1, .cols = COLS};
    multiply_matrix(y, 1, x, COLS, 1, &matrix);
    uint32_t alone = float_to_bits(y[0]);
    for (int n = 1; n <= ROWS; n++) {
        multiply_matrix(y, 1, x, COLS, n, &matrix);
        for (int r = 0; r < n; r++)
            CHECK(float_to_bits(y[r]) == alone, "row %d of %d: %08x, alone %08x", r, n, float_to_bits(y[r]), alone);
    }
}

static void test_embed(void) {
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        enum { VOCAB = 140, DIM = 131 };
        TestMatrix matrix = make_matrix(dtypes[d], VOCAB, DIM);
        Row rows[VOCAB];
        float *y = allocate_zeroed(VOCAB * DIM, sizeof(float));
        for (int r = 0; r < VOCAB; r++) rows[r] = (Row){0, r, VOCAB - 1 - r};
        embed(y, &matrix.view, rows, VOCAB);
        int wrong = 0;
        for (int r = 0; r < VOCAB; r++)
            for (int j = 0; j < DIM; j++) wrong += y[r * DIM + j] != (float)matrix.values[rows[r].token * DIM + j];
        CHECK(!wrong, "embed %s: %d values are wrong", dtype_names[dtypes[d]], wrong);
        free(y);
        free_matrix(&matrix);
    }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Elementwise operations, norms, rope
 */

static void test_norms(void) {
    static const int dims[] = {1, 6, 8, 31, 128, 1030, 5000};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        const int dim = dims[i], n = 9;
        const size_t stride = (size_t)dim + 4, total = (size_t)n * (size_t)dim;
        float *x = random_floats(n * stride), *weight = random_floats((size_t)dim), *bias = random_floats((size_t)dim);
        float *y = allocate_zeroed(n * stride, sizeof(float)), *tight = allocate_zeroed(total, sizeof(float));
        for (int r = 0; r < n; r++) memcpy(tight + r * dim, x + (size_t)r * stride, (size_t)dim * sizeof(float));
        rms_norm(y, stride, x, stride, weight, n, dim, 1e-6f);
        for (int r = 0; r < n; r++) {
            double squares = 0;
            for (int j = 0; j < dim; j++) squares += (double)x[(size_t)r * stride + (size_t)j] * x[(size_t)r * stride + (size_t)j];
            double scale = 1 / sqrt(squares / dim + 1e-6);
            for (int j = 0; j < dim; j++) {
                double wanted = x[(size_t)r * stride + (size_t)j] * scale * weight[j];
                CHECK(near(y[(size_t)r * stride + (size_t)j], wanted, fabs(wanted), 1e-6), "rms_norm of %d: %g, not %g", dim,
                      (double)y[(size_t)r * stride + (size_t)j], wanted);
            }
        }
        rms_norm(x, stride, x, stride, weight, n, dim, 1e-6f);
        for (int r = 0; r < n; r++)
            CHECK(!memcmp(x + (size_t)r * stride, y + (size_t)r * stride, (size_t)dim * sizeof(float)), "rms_norm of %d in place",
                  dim);

        float *normed = allocate_zeroed(total, sizeof(float));
        for (int j = 0; j < n * dim; j++) tight[j] += 100;          /* far from zero, where a variance taken carelessly drowns */
        layer_norm(normed, tight, weight, bias, n, dim, 1e-6f);
        for (int r = 0; r < n; r++) {
            double mean = 0, variance = 0;
            for (int j = 0; j < dim; j++) mean += (double)tight[r * dim + j] / dim;
            for (int j = 0; j < dim; j++) variance += (tight[r * dim + j] - mean) * (tight[r * dim + j] - mean) / dim;
            for (int j = 0; j < dim; j++) {
                double wanted = (tight[r * dim + j] - mean) / sqrt(variance + 1e-6) * weight[j] + bias[j];
                CHECK(fabs(normed[r * dim + j] - wanted) < 2e-5, "layer_norm of %d: %g, not %g", dim, (double)normed[r * dim + j],
                      wanted);
            }
        }
        free(x), free(weight), free(bias), free(y), free(tight), free(normed);
    }
}

/* Both pairings, turned inside a wider vector, whose other values stay. */
static void test_rope(void) {
    enum { ROWS = 5, HEADS = 3, STRIDE = 29, OFFSET = 6, DIM = 18 };
    float x[ROWS * HEADS * STRIDE], before[ROWS * HEADS * STRIDE], cosine[ROWS * DIM / 2], sine[ROWS * DIM / 2];
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        random_fill(x, ROWS * HEADS * STRIDE);
        memcpy(before, x, sizeof x);
        for (int i = 0; i < ROWS * DIM / 2; i++) {
            float angle = 10 * random_float();
            cosine[i] = cosf(angle);
            sine[i] = sinf(angle);
        }
        rope(x, ROWS, HEADS, STRIDE, OFFSET, DIM, interleaved, cosine, sine);
        for (int v = 0; v < ROWS * HEADS; v++)
            for (int j = 0; j < STRIDE; j++) {
                int at = j - OFFSET, i = interleaved ? at / 2 : at % (DIM / 2), second = interleaved ? at % 2 : at >= DIM / 2;
                double wanted = before[v * STRIDE + j];
                if (at >= 0 && at < DIM) {
                    double a = before[v * STRIDE + OFFSET + (interleaved ? 2 * i : i)],
                           b = before[v * STRIDE + OFFSET + (interleaved ? 2 * i + 1 : i + DIM / 2)];
                    double c = cosine[v / HEADS * (DIM / 2) + i], s = sine[v / HEADS * (DIM / 2) + i];
                    wanted = second ? b * c + a * s : a * c - b * s;
                }
                CHECK(fabs(x[v * STRIDE + j] - wanted) < 1e-6, "rope %s, vector %d, value %d",
                      interleaved ? "interleaved" : "half-split", v, j);
            }
    }
}

/* The operations of latent attention that are several steps at once, beside these steps. */
static void test_latent_rows(void) {
    enum { ROWS = 4, HEADS = 3, DIM = 30, TAIL = 12, INDEX_HEADS = 2, INDEX_DIM = 20, LORA = 24, RANK = 37 };
    float q[ROWS * HEADS * DIM], q_wanted[ROWS * HEADS * DIM], angles[2][ROWS * TAIL / 2],
        index_q[ROWS * INDEX_HEADS * INDEX_DIM], index_wanted[ROWS * INDEX_HEADS * INDEX_DIM], kv[ROWS * (LORA + TAIL)], latent[ROWS * RANK], wanted[ROWS * RANK],
        weight[RANK], key[ROWS * INDEX_DIM], head_weights[ROWS * INDEX_HEADS];
    const RowFormat format = row_format(KV_BF16, LORA, TAIL, 128), key_format = row_format(KV_BF16, 0, INDEX_DIM, 128);
    uint8_t *pool = malloc(ROWS * format.stride);
    const int bad_rows[] = {-1, 1, 3}, bad_places[] = {-1, 9, 6};
    DeviceRow ids[ROWS] = {{2}, {0}, {3}, {1}};
    random_fill(angles[0], ROWS * TAIL / 2), random_fill(angles[1], ROWS * TAIL / 2), random_fill(weight, RANK);
    for (int turn = 0; turn < 2; turn++) {
        PassReport report = {.bad_row = -1, .bad_place = -1};
        random_fill(q, ROWS * HEADS * DIM), random_fill(index_q, ROWS * INDEX_HEADS * INDEX_DIM);
        memcpy(q_wanted, q, sizeof q), memcpy(index_wanted, index_q, sizeof index_q);
        rope(q_wanted, ROWS, HEADS, DIM, DIM - TAIL, TAIL, true, angles[0], angles[1]);
        rope(index_wanted, ROWS, INDEX_HEADS, INDEX_DIM, 0, TAIL, turn, angles[0], angles[1]);
        rotate_queries(q, ROWS, HEADS, DIM, TAIL, index_q, INDEX_HEADS, INDEX_DIM, turn, angles[0], angles[1], &report, 5);
        CHECK(!memcmp(q, q_wanted, sizeof q) && !memcmp(index_q, index_wanted, sizeof index_q), "rotate_queries");
        CHECK(report.bad_row == -1, "rotate_queries: nothing is bad");
        index_q[3 * INDEX_HEADS * INDEX_DIM - 1] = NAN;
        rotate_queries(q, ROWS, HEADS, DIM, TAIL, NULL, 0, 0, turn, angles[0], angles[1], &report, 5);
        CHECK(report.bad_row == -1, "rotate_queries: without an indexer");
        rotate_queries(q, ROWS, HEADS, DIM, TAIL, index_q, INDEX_HEADS, INDEX_DIM, turn, angles[0], angles[1], &report, 5);
        CHECK(report.bad_row == 2 && report.bad_place == 5, "rotate_queries: row %d, place %d", report.bad_row, report.bad_place);
    }
    random_fill(kv, ROWS * (LORA + TAIL)), random_fill(latent, ROWS * RANK);
    rms_norm(wanted, RANK, latent, RANK, weight, ROWS, RANK, 1e-6f);
    store_latents(pool, &format, ids, ROWS, kv, LORA, TAIL, weight, latent, RANK, weight, 1e-6f, angles[0], angles[1]);
    CHECK(!memcmp(latent, wanted, sizeof latent), "store_latents norms the queries' latents");
    for (int bad = 0; bad < 3; bad++) {             /* nothing; a weight of row 1; and a key of row 3, which counts as earlier */
        PassReport report = {.bad_row = -1, .bad_place = -1};
        random_fill(key, ROWS * INDEX_DIM), random_fill(head_weights, ROWS * INDEX_HEADS);
        if (bad) head_weights[INDEX_HEADS] = INFINITY;
        if (bad == 2) key[4 * INDEX_DIM - 1] = NAN;
        store_index_keys(pool, &key_format, ids, ROWS, key, INDEX_DIM, weight, weight, TAIL, true, angles[0], angles[1],
                         head_weights, INDEX_HEADS, &report, 6, 9);
        CHECK(report.bad_row == bad_rows[bad] && report.bad_place == bad_places[bad],
              "store_index_keys: row %d, place %d", report.bad_row, report.bad_place);
    }
    free(pool);
}

static void test_exponential(void) {
    double worst = 0;
    for (double x = -87; x <= 88; x += 0.00037) {
        float rounded = (float)x;
        double y = exp8(splat8(rounded))[3], wanted = exp((double)rounded);
        worst = fmax(worst, fabs(y - wanted) / wanted);
    }
#ifdef __FMA__
    const double bound = 2;
#else
    const double bound = 2.5;                                   /* each step of the polynomial rounds twice */
#endif
    CHECK(worst < bound * 0x1p-23, "exp8 is within %g units in the last place: %g", bound, worst / 0x1p-23);
    CHECK(exp8(splat8(0))[0] == 1, "e^0 is 1");
    CHECK(exp8(splat8(-INFINITY))[0] < 2e-38f && exp8(splat8(-1e30f))[0] < 2e-38f && isfinite(exp8(splat8(1e30f))[0]),
          "exp8 holds its argument");
    for (int bit = 0; bit < 22; bit++)
        for (uint32_t sign = 0; sign < 2; sign++)
            CHECK(isnan(exp8(splat8(bits_to_float(0x7f800000 | 1u << bit | sign << 31)))[5]),
                  "exp8 of a NaN with payload bit %d is NaN", bit);
}

static void test_swiglu_and_add(void) {
    for (size_t n = 1; n < 60; n++) {
        float *gate = random_floats(n), *up = random_floats(n), *y = allocate_zeroed(n, sizeof(float)), *sum = random_floats(n),
              *copy = allocate_zeroed(n, sizeof(float));
        for (size_t i = 0; i < n; i++) gate[i] *= 30;
        memcpy(copy, sum, n * sizeof(float));
        swiglu(y, gate, up, n);
        for (size_t i = 0; i < n; i++) {
            double wanted = gate[i] / (1 + exp(-(double)gate[i])) * up[i];
            CHECK(near(y[i], wanted, fabs(wanted), 1e-6), "swiglu %zu of %zu: %g, not %g", i, n, (double)y[i], wanted);
            float one;
            swiglu(&one, gate + i, up + i, 1);
            CHECK(!memcmp(&one, y + i, sizeof one), "swiglu %zu of %zu has the bits it has alone", i, n);
        }
        add(sum, y, n);
        for (size_t i = 0; i < n; i++) CHECK(sum[i] == copy[i] + y[i], "add %zu of %zu", i, n);
        swiglu(gate, gate, up, n);
        CHECK(!memcmp(gate, y, n * sizeof(float)), "swiglu in place");
        free(gate), free(up), free(y), free(sum), free(copy);
    }
}

static void test_first_not_finite(void) {
    enum { ROWS = 4, DIM = 11 };
    float x[ROWS * DIM];
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < ROWS * DIM; i++) {
        random_fill(x, ROWS * DIM);
        x[0] = FLT_MAX, x[1] = -FLT_MAX, x[2] = 0;
        CHECK(first_not_finite(x, ROWS, DIM) == -1, "all finite");
        x[i] = bad[i % 3];
        CHECK(first_not_finite(x, ROWS, DIM) == i / DIM, "value %d is in row %d", i, i / DIM);
    }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Cached rows
 */

static void test_rows(void) {
    CHECK(row_format(KV_F8, 512, 64, 128).bytes == 656, "an fp8 row of 512 + 64 takes 656 bytes");
    CHECK(row_format(KV_F8, 512, 64, 128).stride == 704, "and lies at whole 64 bytes");
    const RowFormat index_key = index_row_format(KV_F8, 128);
    CHECK(index_key.bytes == 132 && index_key.stride == 144, "an index key takes 132 bytes and lies at whole 16: %zu, %zu",
          index_key.bytes, index_key.stride);
    CHECK(row_format(KV_BF16, 512, 64, 128).stride == 1152 && row_format(KV_F32, 512, 64, 128).stride == 2304,
          "bf16 and f32 rows of 512 + 64");
    CHECK(row_format(KV_BF16, 512, 64, 128).bytes == 1152 && row_format(KV_F32, 512, 64, 128).bytes == 2304,
          "which are whole 64 bytes by themselves");
    static const int shapes[][3] = {{512, 64, 128}, {32, 16, 128}, {37, 10, 128}, {130, 2, 128}, {96, 0, 24}, {0, 33, 128}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (KvDtype dtype = KV_F32; dtype <= KV_F8; dtype++) {
            enum { ROWS = 4, SLOTS = 9 };
            const int quantised = shapes[s][0], plain = shapes[s][1], width = quantised + plain;
            const RowFormat format = row_format(dtype, quantised, plain, shapes[s][2]);
            const DeviceRow ids[ROWS] = {{7}, {0}, {3}, {8}};
            uint8_t *base = allocate_zeroed(SLOTS * format.stride, 1);
            float *rows = random_floats((size_t)(ROWS * width)), *back = allocate_zeroed((size_t)width, sizeof(float)),
                  *part = allocate_zeroed((size_t)width, sizeof(float));
            memset(base, 0xee, SLOTS * format.stride);
            for (int i = 0; i < width; i++) rows[2 * width + i] = 0;                            /* a row of zeros */
            store_rows(base, &format, ids, ROWS, rows, (size_t)width, rows + quantised, (size_t)width);
            for (int r = 0; r < ROWS; r++) {
                widen_row(back, base + (size_t)ids[r].id * format.stride, &format);
                for (int i = 0; i < width; i++) {
                    double x = rows[r * width + i], largest = 0;
                    for (int j = i / format.group * format.group; j < quantised && j < (i / format.group + 1) * format.group; j++)
                        largest = fmax(largest, fabs((double)rows[r * width + j]));
                    bool eighths = dtype == KV_F8 && i < quantised;
                    double allowed = dtype == KV_F32 ? 0
                                     : eighths       ? fmax(fabs(x) / 16, largest / 448 * 0x1p-10) * 1.00001
                                                     : fabs(x) / 256;
                    CHECK(fabs(back[i] - x) <= allowed, "row format %d of %d + %d: value %d is %g, not %g", dtype, quantised,
                          plain, i, (double)back[i], x);
                }
                for (int first = 0; first < quantised; first += 5) {
                    int n = quantised - first < 70 ? quantised - first : 70;
                    widen_quantised(part, base + (size_t)ids[r].id * format.stride, &format, first, n);
                    CHECK(!memcmp(part, back + first, (size_t)n * sizeof(float)), "a part of a row is that part of it");
                }
            }
            for (size_t b = 0; b < format.stride; b++)
                CHECK(base[format.stride + b] == 0xee && base[6 * format.stride + b] == 0xee, "other rows are not touched");
            for (size_t b = format.bytes; b < format.stride; b++)
                CHECK(base[7 * format.stride + b] == 0xee, "nothing is written behind a row's values");
            free(base), free(rows), free(back), free(part);
        }
}

/* What DeepSeek's own quantisers make of 96 x 64 values (golden.safetensors holds what they gave): the same bits from round_rows()
 * and from rows that were stored and read. */
static void test_rows_as_the_reference_rounds(void) {
    static const struct { const char *name; KvDtype dtype; int group; ScaleKind scales; size_t bytes; } formats[] = {
        {"quant.fp8", KV_F8, 32, SCALES_E8M0, 64 + 2},
        {"quant.fp4_index", KV_F4, 32, SCALES_E8M0, 32 + 2},
        {"quant.fp4_rows", KV_F4, 16, SCALES_E4M3, 32 + 4}};
    enum { ROWS = 96, WIDTH = 64 };
    Checkpoint file = {0};
    Error error;
    bool there = map_file(&file, "tests/fixtures/row-formats/golden.safetensors", &error);
    CHECK(there, "%s", error.text);
    for (size_t f = 0; there && f < sizeof formats / sizeof *formats; f++) {
        const RowFormat format = scaled_row_format(formats[f].dtype, WIDTH, 0, formats[f].group, formats[f].scales);
        const uint8_t *in = checkpoint_find(&file, "quant.in")->data, *wanted = checkpoint_find(&file, formats[f].name)->data;
        float x[ROWS * WIDTH], back[WIDTH];
        uint8_t *base = allocate_zeroed(1, format.stride);
        CHECK(format.bytes == formats[f].bytes, "%s: a row takes %zu bytes", formats[f].name, format.bytes);
        memcpy(x, in, sizeof x);
        for (int r = 0; r < ROWS; r++) {
            store_rows(base, &format, &(DeviceRow){0}, 1, x + r * WIDTH, 0, x, 0);
            widen_row(back, base, &format);
            CHECK(!memcmp(back, wanted + (size_t)r * sizeof back, sizeof back), "%s: row %d is stored as it should be", formats[f].name, r);
        }
        round_rows(x, WIDTH, ROWS, WIDTH, &format);
        CHECK(!memcmp(x, wanted, sizeof x), "%s: rows are rounded as they should be", formats[f].name);
        free(base);
    }
    if (there) checkpoint_close(&file);
    CHECK(scaled_row_format(KV_F8, 448, 64, 64, SCALES_E8M0).bytes == 583, "a row of DeepSeek-V4 takes 583 bytes");
    CHECK(scaled_row_format(KV_F4, 512, 0, 16, SCALES_E4M3).bytes == 288, "one of V4.1 288");
    CHECK(scaled_row_format(KV_F4, 128, 0, 32, SCALES_E8M0).bytes == 68, "an index key 68");
}

/* Against the definition: entry (i, j) is +-dim^-1/2, negative where i and j share an odd number of bits. */
static void test_hadamard(void) {
    for (int dim = 1; dim <= 256; dim *= 2) {
        float *x = random_floats((size_t)(3 * dim)), *y = allocate_zeroed((size_t)(3 * dim), sizeof(float));
        memcpy(y, x, (size_t)(3 * dim) * sizeof(float));
        hadamard(y, 3, dim);
        for (int i = 0; i < 3 * dim; i++) {
            double sum = 0;
            for (int j = 0; j < dim; j++) sum += (__builtin_popcount(i % dim & j) % 2 ? -1.0 : 1.0) * x[i / dim * dim + j];
            CHECK(fabs(sum / sqrt(dim) - y[i]) < 1e-5, "Hadamard of %d: value %d", dim, i);
        }
        free(x), free(y);
    }
}

/* Groups of denormals, of one large value among tiny ones, and of zeros never become NaN. */
static void test_rows_of_tiny_values(void) {
    enum { WIDTH = 128 };
    const RowFormat format = row_format(KV_F8, WIDTH, 0, 128);
    uint8_t row[(WIDTH + 4 + 63) / 64 * 64];
    float x[WIDTH], back[WIDTH];
    for (float size = 1e-45f; size < 1e38f; size *= 7) {
        for (int i = 0; i < WIDTH; i++) x[i] = i % 3 ? size * random_float() : 0;
        x[5] = size;
        store_rows(row, &format, &(DeviceRow){0}, 1, x, 0, x, 0);
        widen_row(back, row, &format);
        for (int i = 0; i < WIDTH; i++)
            CHECK(fabsf(back[i] - x[i]) <= fabsf(x[i]) / 15 + size / 400000 + 1e-35f, "values near %g: %g, not %g", (double)size,
                  (double)back[i], (double)x[i]);
    }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Selection
 */

/* Pages in an order of their own, none of them page 0, and rows for them that are NaN until they are stored. */
static uint8_t *random_pages(DevicePage *pages, int n, const RowFormat *format) {
    size_t bytes = (size_t)(n + 1) * PAGE_ROWS * format->stride;
    for (int i = 0; i < n; i++) {
        int other = random_below(i + 1);
        pages[i] = pages[other];
        pages[other] = (DevicePage){i + 1};
    }
    return memset(allocate_zeroed(bytes, 1), 0xff, bytes);
}

static DeviceRow paged_row(const DevicePage *pages, int context_pages, int session, int position) {
    return (DeviceRow){pages[session * context_pages + position / PAGE_ROWS].id * PAGE_ROWS + position % PAGE_ROWS};
}

/* The k best by repeated search: the plainest form of "equal scores go to the lower position". */
static void top_k_plainly(int *picks, const float *scores, int n, int k) {
    bool *taken = allocate_zeroed((size_t)n, sizeof(bool));
    for (int i = 0; i < k; i++) {
        int best = -1;
        for (int s = 0; s < n; s++)
            if (!taken[s] && (best < 0 || scores[s] > scores[best])) best = s;
        taken[best] = true;
    }
    for (int s = 0, count = 0; s < n; s++)
        if (taken[s]) picks[count++] = s;
    free(taken);
}

/* On a history too long for the plain form: what is picked is ascending, no worse than what is not, and earlier where equal. */
static void test_long_top_k(int n, int k) {
    float *scores = random_floats((size_t)n), lowest = INFINITY;
    int *picks = allocate_zeroed((size_t)k, sizeof(int)), wrong = 0, last_equal = -1;
    bool *taken = allocate_zeroed((size_t)n, sizeof(bool));
    for (int s = 0; s < n; s++) scores[s] = s % 3 ? 0 : (float)(int)(40 * scores[s]) / 40;
    top_k(picks, scores, n, k);
    for (int i = 0; i < k; i++) {
        wrong += picks[i] < 0 || picks[i] >= n || (i && picks[i] <= picks[i - 1]);
        taken[picks[i]] = true;
        lowest = fminf(lowest, scores[picks[i]]);
    }
    for (int i = 0; i < k; i++) if (scores[picks[i]] == lowest) last_equal = picks[i];
    for (int s = 0; s < n; s++) wrong += !taken[s] && (scores[s] > lowest || (scores[s] == lowest && s < last_equal));
    CHECK(!wrong, "top %d of %d: %d positions are wrong", k, n, wrong);
    free(scores), free(picks), free(taken);
}

static void test_top_k(void) {
    enum { KINDS = 8 };
    for (int n = 2; n < 400; n += 37)
        for (int k = 1; k < n; k += 1 + n / 9)
            for (int kind = 0; kind < KINDS; kind++) {
                float scores[400];
                int picks[400], plain[400];
                for (int s = 0; s < n; s++) {
                    float x = random_float();
                    scores[s] = kind == 0   ? x
                                : kind == 1 ? 0
                                : kind == 2 ? (s % 2 ? x : 0)
                                : kind == 3 ? (x < 0 ? -0.0f : 0.0f)
                                : kind == 4 ? -1 - fabsf(x)
                                : kind == 5 ? (float)random_below(4)
                                : kind == 6 ? (x < 0      ? -0.0f
                                               : x < 0.5f ? 0.0f
                                                          : -x)
                                            : x * powf(10, (float)(random_below(70) - 35));
                }
                top_k_plainly(plain, scores, n, k);
                for (int repeat = 0; repeat < (kind == 1 || kind == 2 ? 100 : 1); repeat++) {
                    memset(picks, 0xff, sizeof picks);
                    top_k(picks, scores, n, k);
                    CHECK(!memcmp(picks, plain, (size_t)k * sizeof(int)), "top %d of %d, kind %d", k, n, kind);
                }
            }
    static const int long_histories[] = {33000, 49000, 85000};
    for (int i = 0; i < 3; i++) test_long_top_k(long_histories[i], 2048);
    float scores[5] = {NAN, 1, -NAN, INFINITY, -INFINITY};
    int picks[5];
    top_k(picks, scores, 5, 3);
    CHECK(picks[0] >= 0 && picks[0] < picks[1] && picks[1] < picks[2] && picks[2] < 5,
          "NaN scores still give three different picks");
}

/* DeepSeek-V3.2 eq. 1 in doubles, over rows of three sessions in one pass; scratch for fewer rows than there are. */
static void test_index_select(KvDtype dtype, int scratch_rows) {
    enum { HEADS = 5, DIM = 22, CONTEXT = 150, SESSIONS = 3, CAPACITY = 40, PAGES = (CONTEXT + PAGE_ROWS - 1) / PAGE_ROWS };
    static const int lengths[SESSIONS] = {150, 30, 90};
    const RowFormat format = row_format(dtype, 0, DIM, 128);
    DevicePage pages[SESSIONS * PAGES];
    uint8_t *keys = random_pages(pages, SESSIONS * PAGES, &format);
    float *values = random_floats(SESSIONS * CONTEXT * DIM), key[DIM];
    for (int id = 0; id < SESSIONS * CONTEXT; id++) {
        DeviceRow row = paged_row(pages, PAGES, id / CONTEXT, id % CONTEXT);
        store_rows(keys, &format, &row, 1, values + id * DIM, 0, values + id * DIM, 0);
    }
    Row rows[270];
    int n = 0;
    for (int s = SESSIONS - 1; s >= 0; s--)
        for (int i = s; i < lengths[s]; i += 1 + s) rows[n++] = (Row){s, i, 0};
    float *q = random_floats((size_t)n * HEADS * DIM), *weights = random_floats((size_t)n * HEADS),
          *scratch = allocate_zeroed((size_t)scratch_rows * PAGES * PAGE_ROWS, sizeof(float));
    for (int h = 0; h < HEADS; h++) weights[7 * HEADS + h] = 0;             /* a row whose scores are all zero */
    Selection selection = {allocate_zeroed((size_t)n * CAPACITY, sizeof(int)), allocate_zeroed((size_t)n, sizeof(int)), CAPACITY};
    index_select(&selection, q, weights, keys, &format, pages, PAGES, HEADS, DIM, rows, n, scratch, scratch_rows);
    int wrong = 0;
    for (int r = 0; r < n; r++) {
        float scores[CONTEXT];
        int plain[CONTEXT], visible = rows[r].position + 1, count = visible < CAPACITY ? visible : CAPACITY;
        for (int s = 0; s < visible; s++) {
            double score = 0;
            widen_row(key, keys + (size_t)paged_row(pages, PAGES, rows[r].session, s).id * format.stride, &format);
            for (int h = 0; h < HEADS; h++) {
                double product = 0;
                for (int j = 0; j < DIM; j++) product += (double)q[(r * HEADS + h) * DIM + j] * key[j];
                score += weights[r * HEADS + h] * fmax(product, 0);
            }
            scores[s] = (float)score;
        }
        top_k_plainly(plain, scores, visible, count);
        wrong += selection.count[r] != count;
        for (int i = 0; i < CAPACITY && selection.count[r] == count; i++)
            wrong += selection.ids[r * CAPACITY + i] != (i < count ? plain[i] : -1);
    }
    CHECK(!wrong, "index_select, dtype %d, %d scratch rows: %d picks of %d rows differ", dtype, scratch_rows, wrong, n);
    int *alone_ids = allocate_zeroed(CAPACITY, sizeof(int)), alone_count;
    for (int r = 0; r < n; r += 13) {
        Selection alone = {alone_ids, &alone_count, CAPACITY};
        index_select(&alone, q + r * HEADS * DIM, weights + r * HEADS, keys, &format, pages, PAGES, HEADS, DIM, rows + r, 1,
                     scratch, scratch_rows);
        CHECK(alone_count == selection.count[r]
                  && !memcmp(alone_ids, selection.ids + r * CAPACITY, CAPACITY * sizeof(int)),
              "row %d selects alone what it selects in company", r);
    }
    free(keys), free(values), free(q), free(weights), free(scratch), free(selection.ids), free(selection.count), free(alone_ids);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Attention
 */

static void test_sparse_attention(KvDtype dtype, int heads, int latent, int tail) {
    enum { SLOTS = 200, POOLED = 120, CAPACITY = 130, ROWS = 7 };      /* the rows from POOLED on lie in staging */
    static const int counts[ROWS] = {1, 2, 63, 64, 65, 128, 130};
    const int width = latent + tail;
    const float scale = 0.3f;
    const RowFormat format = row_format(dtype, latent, tail, 128);
    uint8_t *kv = allocate_zeroed(SLOTS * format.stride, 1);
    float *values = random_floats((size_t)(SLOTS * width)), *q = random_floats((size_t)(ROWS * heads * width));
    float *z = allocate_zeroed((size_t)(ROWS * heads * latent), sizeof(float)),
          *alone = allocate_zeroed((size_t)(heads * latent), sizeof(float));
    double *wide = allocate_zeroed((size_t)(SLOTS * width), sizeof(double)),
           *wanted = allocate_zeroed((size_t)latent, sizeof(double));
    for (int i = 0; i < ROWS * heads * width; i++) q[i] *= 4;
    for (int id = 0; id < SLOTS; id++) {
        float *row = values + id * width;
        store_rows(kv, &format, &(DeviceRow){id}, 1, row, 0, row + latent, 0);
        widen_row(row, kv + (size_t)id * format.stride, &format);
        for (int i = 0; i < width; i++) wide[id * width + i] = row[i];
    }
    uint8_t *staging = allocate_zeroed((SLOTS - POOLED) * format.stride, 1);
    memcpy(staging, kv + POOLED * format.stride, (SLOTS - POOLED) * format.stride);
    memset(kv + POOLED * format.stride, 0xff, (SLOTS - POOLED) * format.stride);
    const RowPool pool = {kv, staging, POOLED};
    DeviceRow ids[ROWS * CAPACITY];
    int count[ROWS];
    for (int r = 0; r < ROWS; r++) {
        count[r] = counts[r];
        for (int i = 0; i < CAPACITY; i++) ids[r * CAPACITY + i].id = i < count[r] ? (i * 3 / 2 + r) % SLOTS : -1;
    }
    omp_set_num_threads(2);
    sparse_attention(z, q, &pool, &format, ids, count, CAPACITY, ROWS, heads, scale);
    double worst = 0;
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < heads; h++) {
            const float *query = q + (r * heads + h) * width;
            double p[CAPACITY], largest = -INFINITY, sum = 0;
            for (int i = 0; i < count[r]; i++) {
                p[i] = 0;
                for (int j = 0; j < width; j++) p[i] += query[j] * wide[ids[r * CAPACITY + i].id * width + j];
                largest = fmax(largest, p[i] *= scale);
            }
            for (int i = 0; i < count[r]; i++) sum += p[i] = exp(p[i] - largest);
            for (int j = 0; j < latent; j++) {
                wanted[j] = 0;
                for (int i = 0; i < count[r]; i++) wanted[j] += p[i] / sum * wide[ids[r * CAPACITY + i].id * width + j];
                worst = fmax(worst, fabs(wanted[j] - z[(r * heads + h) * latent + j]));
            }
        }
    CHECK(worst < 1e-5, "sparse attention, dtype %d, %d heads of %d + %d: off by %g", dtype, heads, latent, tail, worst);
    for (int threads = 1; threads <= 3; threads++)
        for (int r = 0; r < ROWS; r++) {
            omp_set_num_threads(threads);
            sparse_attention(alone, q + r * heads * width, &pool, &format, ids + r * CAPACITY, count + r, CAPACITY, 1, heads, scale);
            CHECK(!memcmp(alone, z + r * heads * latent, (size_t)(heads * latent) * sizeof(float)),
                  "row %d attends alone, with %d threads, as in company", r, threads);
        }
    omp_set_num_threads(2);
    free(kv), free(staging), free(values), free(q), free(z), free(alone), free(wide), free(wanted);
}

static void test_dense_attention(KvDtype dtype, int heads, int kv_heads, int dim) {
    enum { CONTEXT = 140, SESSIONS = 2, ROWS = 60, PAGES = (CONTEXT + PAGE_ROWS - 1) / PAGE_ROWS };
    const int kv_width = kv_heads * dim, width = heads * dim;
    const float scale = 0.5f;
    const RowFormat format = row_format(dtype, 2 * kv_width, 0, dim < 128 ? dim : 128);
    DevicePage pages[SESSIONS * PAGES];
    uint8_t *kv = random_pages(pages, SESSIONS * PAGES, &format);
    const RowPool pool = {kv, NULL, (SESSIONS * PAGES + 1) * PAGE_ROWS};
    float *values = random_floats((size_t)(SESSIONS * CONTEXT * 2 * kv_width)), *q = random_floats((size_t)(ROWS * width));
    float *y = allocate_zeroed((size_t)(ROWS * width), sizeof(float)), *alone = allocate_zeroed((size_t)width, sizeof(float));
    for (int id = 0; id < SESSIONS * CONTEXT; id++) {
        float *row = values + id * 2 * kv_width;
        DeviceRow at = paged_row(pages, PAGES, id / CONTEXT, id % CONTEXT);
        store_rows(kv, &format, &at, 1, row, 0, row, 0);
        widen_row(row, kv + (size_t)at.id * format.stride, &format);
    }
    Row rows[ROWS];
    for (int r = 0; r < ROWS; r++) rows[r] = r < 45 ? (Row){1, 95 + r, 0} : (Row){0, 3 * (r - 45) + 20, 0};
    dense_attention(y, q, &pool, &format, pages, PAGES, rows, ROWS, heads, kv_heads, dim, scale);
    double worst = 0;
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < heads; h++) {
            const float *query = q + r * width + h * dim, *base = values + rows[r].session * CONTEXT * 2 * kv_width;
            double p[CONTEXT], largest = -INFINITY, sum = 0;
            int head = h / (heads / kv_heads), last = rows[r].position;
            for (int s = 0; s <= last; s++) {
                p[s] = 0;
                for (int j = 0; j < dim; j++) p[s] += (double)query[j] * base[s * 2 * kv_width + head * dim + j];
                largest = fmax(largest, p[s] *= scale);
            }
            for (int s = 0; s <= last; s++) sum += p[s] = exp(p[s] - largest);
            for (int j = 0; j < dim; j++) {
                double wanted = 0;
                for (int s = 0; s <= last; s++) wanted += p[s] / sum * base[s * 2 * kv_width + kv_width + head * dim + j];
                worst = fmax(worst, fabs(wanted - y[r * width + h * dim + j]));
            }
        }
    CHECK(worst < 1e-5, "dense attention, dtype %d, %d heads on %d of %d: off by %g", dtype, heads, kv_heads, dim, worst);
    for (int threads = 1; threads <= 2; threads++)
        for (int r = 0; r < ROWS; r++) {
            omp_set_num_threads(threads);
            dense_attention(alone, q + r * width, &pool, &format, pages, PAGES, rows + r, 1, heads, kv_heads, dim, scale);
            CHECK(!memcmp(alone, y + r * width, (size_t)width * sizeof(float)), "row %d attends alone as in company", r);
        }
    free(kv), free(values), free(q), free(y), free(alone);
}

/* Into and out of the latent space, head by head, with head boundaries inside the scale blocks. */
static void test_latent_space(DType dtype, int heads, int nope, int tail, int v, int lora) {
    enum { ROWS = 9 };
    const Config config = {
        .num_attention_heads = heads, .qk_nope_head_dim = nope, .qk_rope_head_dim = tail, .v_head_dim = v, .kv_lora_rank = lora};
    TestMatrix kv_b = make_matrix(dtype, heads * (nope + v), lora);
    const int q_width = nope + tail, width = lora + tail;
    float *q = random_floats((size_t)(ROWS * heads * q_width)),
          *q_absorbed = allocate_zeroed((size_t)(ROWS * heads * width), sizeof(float));
    float *z = random_floats((size_t)(ROWS * heads * lora)), *y = allocate_zeroed((size_t)(ROWS * heads * v), sizeof(float));
    float *alone = allocate_zeroed((size_t)(heads * (width + v)), sizeof(float));
    absorb_query(q_absorbed, q, ROWS, &kv_b.view, &config);
    expand_value(y, z, ROWS, &kv_b.view, &config);
    int wrong = 0;
    for (int i = 0; i < ROWS * heads; i++) {
        const double *head = kv_b.values + (size_t)(i % heads * (nope + v)) * (size_t)lora;
        for (int j = 0; j < width; j++) {
            double sum = 0, terms = 0;
            for (int k = 0; j < lora && k < nope; k++) {
                sum += q[i * q_width + k] * head[k * lora + j];
                terms += fabs(q[i * q_width + k] * head[k * lora + j]);
            }
            wrong += j < lora ? !near(q_absorbed[i * width + j], sum, terms, 1e-6)
                              : q_absorbed[i * width + j] != q[i * q_width + nope + j - lora];
        }
        for (int o = 0; o < v; o++) {
            double sum = 0, terms = 0;
            for (int k = 0; k < lora; k++) {
                sum += z[i * lora + k] * head[(nope + o) * lora + k];
                terms += fabs(z[i * lora + k] * head[(nope + o) * lora + k]);
            }
            wrong += !near(y[i * v + o], sum, terms, 1e-6);
        }
    }
    CHECK(!wrong, "latent space, %s, %d heads, %d | %d, rank %d: %d values are off", dtype_names[dtype], heads, nope, v,
          lora, wrong);
    for (int r = 0; r < ROWS; r++) {
        absorb_query(alone, q + r * heads * q_width, 1, &kv_b.view, &config);
        CHECK(!memcmp(alone, q_absorbed + r * heads * width, (size_t)(heads * width) * sizeof(float)),
              "row %d is absorbed alone as in company", r);
        expand_value(alone, z + r * heads * lora, 1, &kv_b.view, &config);
        CHECK(!memcmp(alone, y + r * heads * v, (size_t)(heads * v) * sizeof(float)), "row %d is expanded alone as in company", r);
    }
    free(q), free(q_absorbed), free(z), free(y), free(alone);
    free_matrix(&kv_b);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Experts
 */

/* The router by its definition, in f32 as the specification wants it, since whether two groups tie depends on that; picks in descending
 * order of choice. */
static void route_plainly(int *picks, double *weights, const float *logits, const float *bias, const Config *config) {
    const int experts = config->n_routed_experts, groups = config->n_group, size = experts / groups;
    float score[64], choice[64], group_score[64];
    double total = 0;
    bool kept[64] = {false}, taken[64] = {false};
    for (int e = 0; e < experts; e++) {
        score[e] = 1 / (1 + expf(-logits[e]));
        choice[e] = score[e] + bias[e];
    }
    for (int g = 0; g < groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; e++)
            if (choice[e] > first) second = first, first = choice[e];
            else if (choice[e] > second) second = choice[e];
        group_score[g] = size > 1 ? first + second : first;
    }
    for (int i = 0; i < config->topk_group; i++) {
        int best = -1;
        for (int g = 0; g < groups; g++)
            if (!kept[g] && (best < 0 || group_score[g] > group_score[best])) best = g;
        kept[best] = true;
    }
    for (int i = 0; i < config->num_experts_per_tok; i++) {
        int best = -1;
        for (int e = 0; e < experts; e++)
            if (kept[e / size] && !taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
        taken[picks[i] = best] = true;
        total += weights[i] = score[best];
    }
    for (int i = 0; i < config->num_experts_per_tok; i++)
        weights[i] *= (config->norm_topk_prob ? 1 / (total + 1e-20) : 1) * config->routed_scaling_factor;
}

static void test_route(int experts, int groups, int kept, int per_token, float bias_level, bool normalise) {
    enum { ROWS = 50 };
    const Config config = {.n_routed_experts = experts,
                           .n_group = groups,
                           .topk_group = kept,
                           .num_experts_per_tok = per_token,
                           .norm_topk_prob = normalise,
                           .routed_scaling_factor = 2.5f};
    float *logits = random_floats((size_t)(ROWS * experts)), *bias = random_floats((size_t)experts), weights[ROWS * 16];
    int picks[ROWS * 16], plain_picks[16];
    double plain_weights[16];
    for (int e = 0; e < experts; e++) bias[e] = bias_level * (1 + bias[e] / 4);
    for (int i = 0; i < ROWS * experts; i++)
        logits[i] = i < 10 * experts ? 4 * logits[i] : i < 20 * experts ? 0 : (float)(int)(2 * logits[i]); /* the rest ties */
    if (bias_level == 0) for (int e = 0; e < experts; e++) bias[e] = 0;
    route(picks, weights, logits, bias, ROWS, &config);
    for (int r = 0; r < ROWS; r++) {
        route_plainly(plain_picks, plain_weights, logits + r * experts, bias, &config);
        for (int i = 0; i < per_token; i++) {
            CHECK(picks[r * per_token + i] == plain_picks[i], "%d experts in %d groups, bias %g: row %d picks %d, not %d",
                  experts, groups, (double)bias_level, r, picks[r * per_token + i], plain_picks[i]);
            CHECK(near(weights[r * per_token + i], plain_weights[i], fabs(plain_weights[i]), 1e-6), "row %d weighs %g, not %g", r,
                  (double)weights[r * per_token + i], plain_weights[i]);
        }
    }
    free(logits);
    free(bias);
}

/* Numbers that are not finite: a row's picks are still different experts inside the table, and a NaN shows in the weights. */
static void test_route_with_bad_numbers(void) {
    enum { EXPERTS = 16, PER_TOKEN = 4 };
    static const float bad[] = {NAN, INFINITY, -INFINITY, -FLT_MAX, FLT_MAX};
    for (int groups = 1; groups <= 4; groups += 3)
        for (int where = 0; where < 4; where++)
            for (size_t b = 0; b < sizeof bad / sizeof *bad; b++) {
                const Config config = {.n_routed_experts = EXPERTS,
                                       .n_group = groups,
                                       .topk_group = groups > 1 ? 2 : 1,
                                       .num_experts_per_tok = PER_TOKEN,
                                       .norm_topk_prob = true,
                                       .routed_scaling_factor = 1};
                float logits[EXPERTS], bias[EXPERTS], weights[PER_TOKEN], total = 0;
                int picks[PER_TOKEN];
                random_fill(logits, EXPERTS);
                random_fill(bias, EXPERTS);
                for (int e = 0; e < (where % 2 ? EXPERTS : 1); e++) (where < 2 ? logits : bias)[e] = bad[b];
                route(picks, weights, logits, bias, 1, &config);
                for (int i = 0; i < PER_TOKEN; i++) {
                    total += weights[i];
                    CHECK(picks[i] >= 0 && picks[i] < EXPERTS, "pick %d", picks[i]);
                    for (int j = 0; j < i; j++)
                        CHECK(picks[i] != picks[j], "%g in %s: expert %d is picked twice", (double)bad[b],
                              where < 2 ? "logits" : "bias", picks[i]);
                }
                CHECK(!isnan(bad[b]) || isnan(total), "a NaN in the router shows in the weights");
            }
}

/* shared: rows of the shared expert's gate; 0: there is none, and the experts are added to what y holds. */
static void test_experts(DType dtype, int shared) {
    enum { EXPERTS = 5, PER_TOKEN = 2, HIDDEN = 52, INTER = 37, ROWS = 21 };
    const Config config = {
        .n_routed_experts = EXPERTS, .num_experts_per_tok = PER_TOKEN, .hidden_size = HIDDEN, .moe_intermediate_size = INTER};
    TestMatrix gate[EXPERTS], up[EXPERTS], down[EXPERTS];
    Matrix views[3][EXPERTS];
    for (int e = 0; e < EXPERTS; e++) {
        views[0][e] = (gate[e] = make_matrix(dtype, INTER, HIDDEN)).view;
        views[1][e] = (up[e] = make_matrix(dtype, INTER, HIDDEN)).view;
        views[2][e] = (down[e] = make_matrix(dtype, HIDDEN, INTER)).view;
    }
    LayerWeights layer = {.expert_gate = views[0], .expert_up = views[1], .expert_down = views[2]};
    TestMatrix common[3];
    if (shared) {
        layer.gate_proj = (common[0] = make_matrix(dtype, shared, HIDDEN)).view;
        layer.up_proj = (common[1] = make_matrix(dtype, shared, HIDDEN)).view;
        layer.down_proj = (common[2] = make_matrix(dtype, HIDDEN, shared)).view;
    }
    float *x = random_floats(ROWS * HIDDEN), *start = random_floats(ROWS * HIDDEN),
          *y = allocate_zeroed(ROWS * HIDDEN, sizeof(float));
    float *scratch = allocate_zeroed(ROWS * 2 * (HIDDEN + 2 * INTER), sizeof(float)), weights[ROWS * PER_TOKEN];
    int picks[ROWS * PER_TOKEN];
    random_fill(weights, ROWS * PER_TOKEN);
    for (int i = 0; i < ROWS * HIDDEN; i++) x[i] *= dtype == DTYPE_F8_E4M3 ? 0.1f : 3;
    for (int r = 0; r < ROWS; r++) {
        picks[2 * r] = r % 4;                               /* expert 4 only ever comes second */
        picks[2 * r + 1] = r % 3 ? 4 : (r + 1) % 4;
    }
    memcpy(y, start, ROWS * HIDDEN * sizeof(float));
    experts(y, x, picks, weights, ROWS, &layer, &config, scratch);
    int wrong = 0;
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < HIDDEN; o++) {
            double sum = shared ? 0 : start[r * HIDDEN + o], terms = fabs(sum);
            for (int i = shared ? -1 : 0; i < PER_TOKEN; i++) {
                const int e = i < 0 ? 0 : picks[r * PER_TOKEN + i], inner = i < 0 ? shared : INTER;
                const TestMatrix *matrices[3] = {i < 0 ? &common[0] : &gate[e], i < 0 ? &common[1] : &up[e],
                                                 i < 0 ? &common[2] : &down[e]};
                for (int k = 0; k < inner; k++) {
                    double g = 0, u = 0;
                    for (int j = 0; j < HIDDEN; j++) {
                        g += matrices[0]->values[k * HIDDEN + j] * x[r * HIDDEN + j];
                        u += matrices[1]->values[k * HIDDEN + j] * x[r * HIDDEN + j];
                    }
                    double term = (i < 0 ? 1 : weights[r * PER_TOKEN + i]) * matrices[2]->values[o * inner + k]
                                  * (g / (1 + exp(-g)) * u);
                    sum += term;
                    terms += fabs(term);
                }
            }
            wrong += !near(y[r * HIDDEN + o], sum, terms, 1e-5);
        }
    CHECK(!wrong, "experts %s: %d values are off", dtype_names[dtype], wrong);
    for (int r = 0; r < ROWS; r++) {
        float alone[HIDDEN];
        memcpy(alone, start + r * HIDDEN, sizeof alone);
        experts(alone, x + r * HIDDEN, picks + r * PER_TOKEN, weights + r * PER_TOKEN, 1, &layer, &config, scratch);
        CHECK(!memcmp(alone, y + r * HIDDEN, sizeof alone), "row %d's experts give alone what they give in company", r);
    }
    for (int e = 0; e < EXPERTS; e++) free_matrix(&gate[e]), free_matrix(&up[e]), free_matrix(&down[e]);
    for (int i = 0; i < 3 && shared; i++) free_matrix(&common[i]);
    free(x), free(start), free(y), free(scratch);
}

/* e4m3 codes that mean NaN show in the sums of their row and in no other, alone and in company; scales that cannot grow by 2^120
 * give what smaller ones give. */
static void test_e4m3_extremes(void) {
    enum { ROWS = 9, COLS = 301, BATCH = 13 };
    TestMatrix matrix = make_matrix(DTYPE_F8_E4M3, ROWS, COLS);
    float *x = random_floats(BATCH * COLS), y[BATCH * ROWS], scaled[BATCH * ROWS];
    for (int n = 1; n <= BATCH; n += 6) {
        multiply_matrix(y, ROWS, x, COLS, n, &matrix.view);
        for (int i = 0; i < 3; i++) matrix.scale[i] *= 0x1p40f;
        multiply_matrix(scaled, ROWS, x, COLS, n, &matrix.view);
        for (int i = 0; i < 3; i++) matrix.scale[i] *= 0x1p-40f;
        int other = 0;
        for (int i = 0; i < n * ROWS; i++) other += scaled[i] != y[i] * 0x1p40f;
        CHECK(!other, "e4m3, %d rows: %d products with large scales are others", n, other);
    }
    static const int places[][2] = {{0, 0}, {2, 7}, {4, 128}, {5, 299}, {8, 300}};
    for (int i = 0; i < 5; i++) matrix.bytes[1 + places[i][0] * COLS + places[i][1]] = i % 2 ? 0xff : 0x7f;
    for (int n = 1; n <= BATCH; n += 6) {
        multiply_matrix(y, ROWS, x, COLS, n, &matrix.view);
        int wrong = 0;
        for (int i = 0; i < n * ROWS; i++) {
            bool spoilt = false;
            for (int p = 0; p < 5; p++) spoilt |= places[p][0] == i % ROWS;
            wrong += spoilt != isnan(y[i]);
        }
        CHECK(!wrong, "e4m3, %d rows: %d products are NaN, or not, without reason", n, wrong);
    }
    free(x);
    free_matrix(&matrix);
}

int main(void) {
    omp_set_num_threads(2);
    test_e4m3_extremes();
    test_widen();
    test_narrow();
    test_linear();
    test_many_rows_of_codes();
    test_linear_negative_zero();
    test_embed();
    test_norms();
    test_rope();
    test_latent_rows();
    test_exponential();
    test_swiglu_and_add();
    test_first_not_finite();
    test_rows();
    test_rows_of_tiny_values();
    test_rows_as_the_reference_rounds();
    test_hadamard();
    test_top_k();
    for (KvDtype dtype = KV_F32; dtype <= KV_BF16; dtype++)
        for (int rows = 1; rows < 300; rows = 4 * rows + 3) test_index_select(dtype, rows);
    for (KvDtype dtype = KV_F32; dtype <= KV_F8; dtype++) {
        test_sparse_attention(dtype, 1, 32, 16);
        test_sparse_attention(dtype, 5, 37, 10);
        test_sparse_attention(dtype, 35, 136, 64);
        test_sparse_attention(dtype, 17, 512, 64);
        test_dense_attention(dtype, 4, 2, 32);
        test_dense_attention(dtype, 5, 5, 6);
        test_dense_attention(dtype, 20, 1, 10);
        test_dense_attention(dtype, 6, 2, 200);
    }
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        test_latent_space(dtypes[d], 4, 24, 16, 32, 32);
        test_latent_space(dtypes[d], 3, 13, 10, 11, 37);
        test_latent_space(dtypes[d], 2, 192, 64, 256, 512);
        for (int shared = 0; shared <= 74; shared += 37) test_experts(dtypes[d], shared);
    }
    for (int level = -3; level <= 3; level += 3) {              /* negative everywhere, none, positive everywhere */
        test_route(8, 1, 1, 2, (float)level, true);
        test_route(16, 4, 2, 3, (float)level, true);
        test_route(16, 8, 4, 8, (float)level, false);
        test_route(6, 3, 1, 2, (float)level, true);
        test_route(12, 2, 2, 12, (float)level, true);
    }
    test_route_with_bad_numbers();
    return check_report();
}
