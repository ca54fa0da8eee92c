/* test_gpu.c: what needs a GPU. Every operation runs once in C and once on the GPU, on the same random inputs, and on the GPU
 * alone and among others, where the bits have to be the same. Then whole models: fixtures beside their references, and the
 * shipped one in every mode, batch and with every drafter. */
#include "../engine.c"
#include "check.h"

extern const Backend c_backend, cuda_backend;

static uint64_t test_seed = 1;

/* splitmix64: uniform words. */
static uint64_t draw(void) {
    uint64_t z = (test_seed += 0x9E3779B97F4A7C15u);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static int draw_between(int low, int high) { return low + (int)(draw() % (uint64_t)(high - low + 1)); }

/* Roughly normal, times scale. */
static float *random_floats(size_t n, float scale) {
    float *x = malloc(n * sizeof(float) + 64);
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = draw();
        int sum = (int)(bits & 0xffff) + (int)(bits >> 16 & 0xffff) + (int)(bits >> 32 & 0xffff) + (int)(bits >> 48);
        x[i] = scale * ((float)sum / 65535.0f - 2.0f) * 1.7320508f;
    }
    return x;
}

/* Device memory that holds a copy of n bytes (poisoned with 0xff where source is NULL), and back. */
static void *to_device(const void *source, size_t bytes) {
    Error error;
    void *block = cuda_backend.take(bytes + 64, MEMORY_DEVICE, &error);
    if (!block) fprintf(stderr, "%s\n", error.text), exit(1);
    void *poison = malloc(bytes + 64);
    memset(poison, 0xff, bytes + 64);
    if (source) memcpy(poison, source, bytes);
    cuda_backend.copy_bytes(block, poison, bytes + 64);
    free(poison);
    return block;
}

static void *from_device(const void *device, size_t bytes) {
    void *block = malloc(bytes + 64);
    cuda_backend.copy_bytes(block, device, bytes);
    return block;
}

static void free_device(void *block) { cuda_backend.give_back(block, MEMORY_DEVICE); }

/* |a - b| / |b| over n values; NaN if one of them is. */
static double distance(const float *a, const float *b, size_t n) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    return size > 0 ? sqrt(difference / size) : sqrt(difference);
}
/* Twin tests of "activations", "products" and "mixture of experts". */

enum { TEST_TAIL = 64 }; /* floats behind every output, which must stay as they are */

static void *keep[64]; /* device blocks of one test */
static int n_kept;

static void *on_device(const void *source, size_t bytes) {
    void *block = to_device(source, bytes);
    if (n_kept == 64) fprintf(stderr, "too many blocks\n"), exit(1);
    return keep[n_kept++] = block;
}

static void free_kept(void) {
    while (n_kept) free_device(keep[--n_kept]);
}

/* An output of n floats, poisoned, with a poisoned tail. */
static float *output_on_device(size_t n) { return on_device(NULL, (n + TEST_TAIL) * sizeof(float)); }

/* The output, back; checks that all of it was written and nothing behind it. */
static float *fetch_output(const float *device, size_t n, const char *name) {
    float *out = from_device(device, (n + TEST_TAIL) * sizeof(float));
    size_t unwritten = 0, beyond = 0;
    for (size_t i = 0; i < n; i++) unwritten += float_to_bits(out[i]) == 0xffffffffu;
    for (size_t i = n; i < n + TEST_TAIL; i++) beyond += float_to_bits(out[i]) != 0xffffffffu;
    CHECK(!unwritten && !beyond, "%s: %zu of %zu values not written, %zu written beyond", name, unwritten, n, beyond);
    return out;
}

static void compare(const char *name, const float *got, const float *wanted, size_t n, double bound) {
    double off = distance(got, wanted, n);
    CHECK(off <= bound, "%s: off by %g of at most %g", name, off, bound);
}

/* ---- matrices */

static uint16_t bf16_bits(float x) {
    uint32_t bits = float_to_bits(x);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Random e2m1 weights with scales from 2^-8 to 2^-1. */
static Matrix random_e2m1(int rows, int cols, int first_row) {
    const size_t bytes = (size_t)rows * stored_bytes(DTYPE_F4_E2M1, (size_t)cols);
    const int across = (cols + EXPONENT_BLOCK - 1) / EXPONENT_BLOCK;
    uint8_t *data = malloc(bytes + 64), *exponents = malloc((size_t)(first_row + rows) * (size_t)across + 8);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)draw();
    for (int i = 0; i < (first_row + rows) * across; i++) exponents[i] = (uint8_t)draw_between(119, 126);
    return (Matrix){.data = data, .dtype = DTYPE_F4_E2M1, .rows = rows, .cols = cols, .scale_cols = across,
                    .first_row = first_row, .exponents = exponents};
}

/* Rows and columns of e4m3 that share a scale; of less than SCALE_BLOCK the scales are powers of two. */
enum { SMALL_TEST_BLOCK = 32 };
static int test_block = SCALE_BLOCK;

/* Random stored weights of any type, around 1 in size; e4m3 without NaN, subnormals and all exponents included. */
static Matrix random_matrix(DType dtype, int rows, int cols, int first_row) {
    if (dtype == DTYPE_F4_E2M1) return random_e2m1(rows, cols, first_row);
    Matrix w = {
        .dtype = dtype, .rows = rows, .cols = cols, .scale_cols = (cols + test_block - 1) / test_block, .first_row = first_row,
        .block = test_block};
    size_t n = (size_t)rows * (size_t)cols;
    uint8_t *data = malloc(n * dtype_size(dtype) + 64);
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = draw();
        if (dtype == DTYPE_F8_E4M3) data[i] = (bits & 0x7f) == 0x7f ? 0 : (uint8_t)bits;
        else if (dtype == DTYPE_F16) { /* below 2 */ uint16_t half = (uint16_t)(bits & 0xbfff);
            memcpy(data + 2 * i, &half, 2);
        } else {
            float x = (float)((double)(bits >> 11) * 0x1p-52 - 1);
            uint16_t half = bf16_bits(x);
            if (dtype == DTYPE_BF16) memcpy(data + 2 * i, &half, 2);
            else memcpy(data + 4 * i, &x, 4);
        }
    }
    w.data = data;
    if (dtype == DTYPE_F8_E4M3) {
        size_t blocks = (size_t)((first_row + rows + test_block - 1) / test_block) * (size_t)w.scale_cols;
        float *scale = random_floats(blocks, 1);
        for (size_t i = 0; i < blocks; i++) {
            scale[i] = (fabsf(scale[i]) + 0.1f) / 100;
            if (test_block < SCALE_BLOCK) scale[i] = exp2f(rintf(log2f(scale[i])));
        }
        w.scale = scale;
    }
    return w;
}

static void free_weights(Matrix *w) {
    free((void *)w->data);
    free((void *)w->scale);
    free((void *)w->exponents);
}

static Matrix matrix_on_device(const Matrix *w) {
    Matrix copy = *w;
    copy.data = on_device(w->data, (size_t)w->rows * stored_bytes(w->dtype, (size_t)w->cols));
    if (w->exponents) copy.exponents = on_device(w->exponents, (size_t)(w->first_row + w->rows) * (size_t)w->scale_cols);
    if (w->scale)
        copy.scale = on_device(w->scale,
                               (size_t)((w->first_row + w->rows + w->block - 1) / w->block) * (size_t)w->scale_cols * 4);
    return copy;
}

static const DType weight_types[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_F8_E4M3, DTYPE_F4_E2M1};
static const char *const weight_names[] = {"f32", "f16", "bf16", "e4m3", "e2m1"};

/* What rounding x may cost: to one bf16 where weights are e2m1, to two numbers of 16 bits in these sizes where they are of
 * another type; f32 weights and rows at odd addresses are multiplied in f32. */
static double product_bound(DType dtype) { return dtype == DTYPE_F4_E2M1 ? 4e-3 : dtype == DTYPE_F32 ? 5e-6 : 1e-5; }

/* ---- activations */

static void test_norms(void) {
    static const int dims[] = {1, 8, 12, 128, 576, 1024, 1025, 2048, 7168, 40001};
    for (int d = 0; d < 10; d++)
        for (int n = 0; n <= 5; n += n ? 4 : 1) {
            const int dim = dims[d], gap = d % 3;
            const size_t stride = (size_t)(dim + gap), all = (size_t)n * stride, dense = (size_t)n * (size_t)dim;
            float *x = random_floats(all + 1, 3), *weight = random_floats((size_t)dim, 1), *wanted = malloc((all + 1) * 4);
            float *dx = on_device(x, all * 4), *dw = on_device(weight, (size_t)dim * 4);
            float *dy = output_on_device(dense), *one = output_on_device((size_t)dim);
            c_backend.rms_norm(wanted, (size_t)dim, x, stride, weight, n, dim, 1e-6f);
            cuda_backend.rms_norm(dy, (size_t)dim, dx, stride, dw, n, dim, 1e-6f);
            float *y = fetch_output(dy, dense, "rms_norm");
            compare("rms_norm", y, wanted, dense, 1e-6);
            for (int r = 0; r < n; r++) {
                cuda_backend.rms_norm(one, (size_t)dim, dx + (size_t)r * stride, stride, dw, 1, dim, 1e-6f);
                float *alone = fetch_output(one, (size_t)dim, "rms_norm");
                CHECK(!memcmp(alone, y + (size_t)r * (size_t)dim, (size_t)dim * 4), "rms_norm: row %d of %d alone, dim %d", r, n,
                      dim);
                free(alone);
            }
            free(y);
            cuda_backend.rms_norm(dx, stride, dx, stride, dw, n, dim, 1e-6f); /* in place, as before a projection */
            y = from_device(dx, all * 4);
            for (int r = 0; r < n; r++) {
                compare("rms_norm in place", y + (size_t)r * stride, wanted + (size_t)r * (size_t)dim, (size_t)dim, 1e-6);
                for (int i = 0; i < gap; i++)
                    CHECK(y[(size_t)r * stride + (size_t)(dim + i)] == x[(size_t)r * stride + (size_t)(dim + i)],
                          "rms_norm: gap");
            }
            free(y);
            free(x), free(weight), free(wanted);
            free_kept();
        }
}

static void test_embed(void) {
    for (int t = 0; t < 4; t++)
        for (int d = 0; d < 3; d++) {
            const int vocab = 300, dim = d == 0 ? 12 : d == 1 ? 128 : 520, n = 7;
            Matrix table = random_matrix(weight_types[t], vocab, dim, 0), device = matrix_on_device(&table);
            Row rows[7];
            for (int r = 0; r < n; r++) rows[r] = (Row){0, r, draw_between(0, vocab - 1)};
            float *wanted = malloc((size_t)(n * dim) * 4), *dy = output_on_device((size_t)(n * dim));
            c_backend.embed(wanted, &table, rows, n);
            cuda_backend.embed(dy, &device, on_device(rows, sizeof rows), n);
            float *y = fetch_output(dy, (size_t)(n * dim), "embed");
            CHECK(!memcmp(y, wanted, (size_t)(n * dim) * 4), "embed: %s, dim %d", weight_names[t], dim);
            cuda_backend.embed(dy, &device, NULL, 0);
            free(y), free(wanted);
            free_weights(&table);
            free_kept();
        }
}

static void test_rotate_queries(void) {
    for (int interleaved = 0; interleaved < 2; interleaved++)
        for (int n = 0; n <= 9; n += 3) {
            const int heads = 3, stride = 96, index_heads = 5, index_stride = n % 2 ? 71 : 128, dim = 64, half = dim / 2;
            const size_t values = (size_t)(n * heads * stride), index_values = (size_t)(n * index_heads * index_stride),
                         angles = (size_t)(n * half);
            Row rows[9];
            float inverse[32], *x = random_floats(values + 1, 1), *q = random_floats(index_values + 1, 1),
                               *cosine = malloc(angles * 4 + 4), *sine = malloc(angles * 4 + 4);
            PassReport report = {.bad_row = -1, .bad_place = -1}, *device = on_device(&report, sizeof report), *got;
            for (int r = 0; r < n; r++) rows[r] = (Row){0, draw_between(0, 1 << 20), 0};
            for (int i = 0; i < half; i++) inverse[i] = powf(1e4f, -(float)i / (float)half);
            float *dc = output_on_device(angles), *ds = output_on_device(angles), *dx = on_device(x, values * 4),
                  *dq = on_device(q, index_values * 4);
            c_backend.rotations(cosine, sine, rows, n, inverse, dim, 1.25f);
            cuda_backend.rotations(dc, ds, on_device(rows, sizeof rows), n, on_device(inverse, sizeof inverse), dim, 1.25f);
            float *c = fetch_output(dc, angles, "rotations"), *s = fetch_output(ds, angles, "rotations");
            compare("rotations: cosine", c, cosine, angles, 1e-6);
            compare("rotations: sine", s, sine, angles, 1e-6);
            const bool alone = n == 6;              /* as the pipeline asks for it: nothing of an indexer */
            c_backend.rotate_queries(x, n, heads, stride, dim, alone ? NULL : q, alone ? 0 : index_heads, alone ? 0 : index_stride,
                                     interleaved, cosine, sine, alone ? NULL : &report, 3);
            cuda_backend.rotate_queries(dx, n, heads, stride, dim, alone ? NULL : dq, alone ? 0 : index_heads,
                                        alone ? 0 : index_stride, interleaved, dc, ds, alone ? NULL : device, 3);
            float *y = from_device(dx, values * 4), *z = from_device(dq, index_values * 4);
            compare("rotate_queries", y, x, values, 1e-6);
            compare("rotate_queries: the indexer's", z, q, index_values, 1e-6);
            for (int r = 0; r < n * heads; r++)
                CHECK(!memcmp(y + r * stride, x + r * stride, (size_t)(stride - dim) * 4), "rotate_queries: values before");
            for (int r = 0; r < n * index_heads; r++)
                CHECK(!memcmp(z + r * index_stride + dim, q + r * index_stride + dim, (size_t)(index_stride - dim) * 4),
                      "rotate_queries: values behind");
            for (int at = 0, bad = n - 2; n && at < 2; at++) {      /* a value that is rotated, and the last one */
                float infinity = INFINITY;
                float *row = dq + bad * index_heads * index_stride;
                cuda_backend.copy_bytes(row + (at ? index_heads * index_stride - 1 : index_stride + 7), &infinity, 4);
                cuda_backend.upload(device, &(PassReport){.bad_row = -1, .bad_place = -1}, sizeof *device);
                cuda_backend.rotate_queries(dx, n, heads, stride, dim, dq, index_heads, index_stride, interleaved, dc, ds, device,
                                            4 + at);
                got = from_device(device, sizeof *got);
                CHECK(got->bad_row == bad && got->bad_place == 4 + at, "rotate_queries: row %d, place %d", got->bad_row,
                      got->bad_place);
                free(got);
                cuda_backend.copy_bytes(dq, z, index_values * 4);
            }
            free(x), free(y), free(z), free(q), free(c), free(s), free(cosine), free(sine);
            free_kept();
        }
}

/* Both results, a row alone, and what is reported of a row that is bad. */
static void test_add_norm(void) {
    static const int dims[] = {8, 320, 2048, 2049, 6144, 7168, 36004};
    for (int d = 0; d < 7; d++)
        for (int n = 0; n <= 6; n += 3) {
            const int dim = dims[d], bad = n - 2;
            const size_t width = (size_t)dim, all = (size_t)n * width;
            float *x = random_floats(all + 1, 3), *branch = random_floats(all + 1, 3), *weight = random_floats(width, 1);
            float *y = malloc((all + 1) * 4), *dx = on_device(x, all * 4), *db = on_device(branch, all * 4);
            float *dw = on_device(weight, width * 4), *dy = output_on_device(all), *one = output_on_device(width);
            PassReport report = {.bad_row = -1, .bad_place = -1}, *device = on_device(&report, sizeof report), *got;
            cuda_backend.add_norm(dy, dx, db, dw, n, dim, 1e-6f, device, 7);
            float *stream = from_device(dx, all * 4), *normed = fetch_output(dy, all, "add_norm");
            got = from_device(device, sizeof *got);
            CHECK(got->bad_row == -1 && got->bad_place == -1, "add_norm: nothing is bad");
            free(got);
            for (int r = 0; r < n; r++) {
                float *own = on_device(x + (size_t)r * width, width * 4);
                cuda_backend.add_norm(one, own, db + (size_t)r * width, dw, 1, dim, 1e-6f, NULL, 0);
                float *alone = fetch_output(one, width, "add_norm"), *own_stream = from_device(own, width * 4);
                CHECK(!memcmp(alone, normed + (size_t)r * width, width * 4)
                          && !memcmp(own_stream, stream + (size_t)r * width, width * 4),
                      "add_norm: row %d of %d alone, dim %d", r, n, dim);
                free(alone), free(own_stream);
            }
            c_backend.add_norm(y, x, branch, weight, n, dim, 1e-6f, NULL, 0);
            CHECK(!memcmp(stream, x, all * 4), "add_norm: the sums of %d x %d", n, dim);
            compare("add_norm", normed, y, all, 1e-6);
            if (n) {
                float infinity = INFINITY;
                cuda_backend.copy_bytes(dx + (size_t)bad * width + width / 2, &infinity, 4);
                cuda_backend.add_norm(dy, dx, db, dw, n, dim, 1e-6f, device, 8);
                cuda_backend.add_norm(dy, dx, db, dw, n, dim, 1e-6f, device, 9);
                got = from_device(device, sizeof *got);
                CHECK(got->bad_row == bad && got->bad_place == 8, "add_norm: row %d, place %d", got->bad_row, got->bad_place);
                free(got);
            }
            free(x), free(branch), free(weight), free(y), free(stream), free(normed);
            free_kept();
        }
}

static void test_norm_heads(void) {
    static const struct { int heads, dim, gap; } shapes[] = {{1, 16, 0}, {4, 64, 7}, {8, 128, 1024}, {3, 40, 1}, {32, 256, 0}};
    for (int s = 0; s < 5; s++)
        for (int n = 0; n <= 5; n += n ? 4 : 1) {
            const int heads = shapes[s].heads, dim = shapes[s].dim;
            const size_t stride = (size_t)(heads * dim + shapes[s].gap), all = (size_t)n * stride, angles = (size_t)(n * dim / 2);
            float *x = random_floats(all + 1, 3), *weight = random_floats((size_t)dim, 1), *cosine = random_floats(angles + 1, 1),
                  *sine = random_floats(angles + 1, 1);
            float *dx = on_device(x, all * 4), *dw = on_device(weight, (size_t)dim * 4), *dc = on_device(cosine, angles * 4),
                  *ds = on_device(sine, angles * 4), *last = on_device(n ? x + all - stride : x, n ? stride * 4 : 4);
            c_backend.norm_heads(x, stride, n, heads, dim, weight, 1e-6f, cosine, sine);
            cuda_backend.norm_heads(dx, stride, n, heads, dim, dw, 1e-6f, dc, ds);
            float *y = from_device(dx, all * 4);
            compare("norm_heads", y, x, all, 1e-6);
            for (int r = 0; r < n; r++)
                CHECK(!memcmp(y + (size_t)r * stride + heads * dim, x + (size_t)r * stride + heads * dim,
                              (size_t)shapes[s].gap * 4),
                      "norm_heads: values behind the heads");
            if (n) {
                cuda_backend.norm_heads(last, stride, 1, heads, dim, dw, 1e-6f, dc + angles - dim / 2, ds + angles - dim / 2);
                float *alone = from_device(last, stride * 4);
                CHECK(!memcmp(alone, y + all - stride, stride * 4), "norm_heads: a row alone, %d heads of %d", heads, dim);
                free(alone);
            }
            free(x), free(y), free(weight), free(cosine), free(sine);
            free_kept();
        }
}

/* What is stored are the bytes that store_rows() makes of the values left in place, and those are the twin's. */
static void check_stored_with_norms(KvDtype dtype, int n, bool index) {
    enum { LORA = 130, TAIL = 22, POOL = 12 };
    const int quantised = index ? LORA + TAIL : LORA, plain = index ? 0 : TAIL, width = LORA + TAIL, turned = index ? 64 : TAIL;
    const RowFormat format = row_format(dtype, quantised, plain, 128);
    const size_t all = (size_t)(n * width), angles = (size_t)(n * turned / 2), bytes = POOL * format.stride;
    const int rank = n % 2 ? 1536 : 4150, heads = 40;
    const size_t ranks = (size_t)(n * rank), weights = (size_t)(n * heads);
    float *x = random_floats(all + 1, 3), *weight = random_floats((size_t)width, 1), *bias = random_floats((size_t)width, 1),
          *cosine = random_floats(angles + 1, 1), *sine = random_floats(angles + 1, 1), *q = random_floats(ranks + 1, 2),
          *q_weight = random_floats((size_t)rank, 1), *head_weights = random_floats(weights + 1, 1);
    DeviceRow ids[POOL];
    for (int r = 0; r < n; r++) ids[r].id = (r * 5 + 3) % POOL;
    uint8_t *pool = calloc(1, bytes), *device_pool = on_device(pool, bytes);
    float *dx = on_device(x, all * 4), *dw = on_device(weight, (size_t)width * 4), *db = on_device(bias, (size_t)width * 4),
          *dc = on_device(cosine, angles * 4), *ds = on_device(sine, angles * 4), *dq = on_device(q, ranks * 4),
          *dqw = on_device(q_weight, (size_t)rank * 4), *dh = on_device(head_weights, weights * 4);
    PassReport report = {.bad_row = -1, .bad_place = -1}, *device = on_device(&report, sizeof report);
    DeviceRow *device_ids = on_device(ids, sizeof ids);
    if (index) {
        cuda_backend.store_index_keys(device_pool, &format, device_ids, n, dx, width, dw, db, turned, n % 2, dc, ds, dh, heads,
                                      device, 3, 5);
        c_backend.store_index_keys(pool, &format, ids, n, x, width, weight, bias, turned, n % 2, cosine, sine, head_weights,
                                   heads, &report, 3, 5);
    } else {
        cuda_backend.store_latents(device_pool, &format, device_ids, n, dx, LORA, TAIL, dw, dq, rank, dqw, 1e-6f, dc, ds);
        c_backend.store_latents(pool, &format, ids, n, x, LORA, TAIL, weight, q, rank, q_weight, 1e-6f, cosine, sine);
        float *normed = from_device(dq, ranks * 4);
        compare("store_latents: the queries'", normed, q, ranks, 1e-6);
        free(normed);
    }
    float *left = from_device(dx, all * 4);
    uint8_t *stored = from_device(device_pool, bytes);
    compare(index ? "store_index_keys" : "store_latents", left, x, all, 2e-5);
    memset(pool, 0, bytes);
    c_backend.store_rows(pool, &format, ids, n, left, (size_t)width, index ? left : left + LORA, (size_t)width);
    CHECK(!memcmp(pool, stored, bytes), "%s: %d rows as dtype %d", index ? "store_index_keys" : "store_latents", n, dtype);
    if (index && n) {
        float nan = NAN;
        for (int key = 0; key < 2; key++) {         /* a bad weight; then, further behind, a bad key, which counts as earlier */
            cuda_backend.copy_bytes(key ? dx + (n - 1) * width + 5 : dh + (n - 2) * heads + heads - 1, &nan, 4);
            cuda_backend.store_index_keys(device_pool, &format, device_ids, n, dx, width, dw, db, turned, false, dc, ds, dh,
                                          heads, device, 4, 7);
            PassReport *got = from_device(device, sizeof *got);
            CHECK(got->bad_row == n - 2 + key && got->bad_place == (key ? 4 : 7), "store_index_keys: row %d, place %d", got->bad_row,
                  got->bad_place);
            free(got);
        }
    }
    free(x), free(weight), free(bias), free(cosine), free(sine), free(pool), free(left), free(stored);
    free(q), free(q_weight), free(head_weights);
    free_kept();
}

static void test_stored_with_norms(void) {
    static const KvDtype dtypes[] = {KV_F32, KV_BF16, KV_F8};
    for (int d = 0; d < 3; d++)
        for (int n = 0; n <= 9; n += 3)
            for (int index = 0; index < 2; index++) check_stored_with_norms(dtypes[d], n, index);
}

static void test_elementwise(void) {
    static const size_t sizes[] = {0, 1, 7, 256, 1000, 70001};
    for (int i = 0; i < 6; i++) {
        const size_t n = sizes[i];
        float *a = random_floats(n + 1, 4), *b = random_floats(n + 1, 4), *wanted = malloc(n * 4 + 4);
        if (n > 2) a[0] = 200, a[1] = -200;
        float *da = on_device(a, n * 4), *db = on_device(b, n * 4), *dy = output_on_device(n), *y;
        c_backend.swiglu(wanted, a, b, n);
        cuda_backend.swiglu(dy, da, db, n);
        y = fetch_output(dy, n, "swiglu");
        compare("swiglu", y, wanted, n, 1e-6);
        free(y);
        cuda_backend.zero(dy, n);
        y = fetch_output(dy, n, "zero");
        for (size_t j = 0; j < n; j++) CHECK(float_to_bits(y[j]) == 0, "zero");
        free(y);
        for (int cap = 0; cap < 2; cap++) {
            float *dz = on_device(a, n * 4), *z = malloc(n * 4 + 4);
            memcpy(z, a, n * 4);
            c_backend.cap_logits(z, n, 1.5f, cap ? 30 : 0);
            cuda_backend.cap_logits(dz, n, 1.5f, cap ? 30 : 0);
            y = from_device(dz, n * 4);
            compare("cap_logits", y, z, n, 1e-6);
            free(y), free(z);
        }
        c_backend.add(a, b, n);
        cuda_backend.add(da, db, n);
        y = from_device(da, n * 4);
        CHECK(!memcmp(y, a, n * 4), "add");
        c_backend.add_bias(a, 3, 0.5f, (int)(n / 3));
        cuda_backend.add_bias(da, 3, 0.5f, (int)(n / 3));
        free(y);
        y = from_device(da, n * 4);
        CHECK(!memcmp(y, a, n * 4), "add_bias");
        free(y), free(a), free(b), free(wanted);
        free_kept();
    }
}

static void test_copies(void) {
    for (int n = 0; n <= 12; n += 4) {
        const int dim = 37, indices[12] = {5, 0, 11, 3, 3, 7, 1, 2, 9, 10, 4, 8};
        float *x = random_floats(12 * 50, 1), *dx = on_device(x, 12 * 50 * 4), *wanted = malloc(12 * 50 * 4);
        float *dy = output_on_device((size_t)(n * dim)), *y, *dz = on_device(x, 12 * 50 * 4);
        c_backend.move_rows(wanted, NULL, x, indices, n, dim);
        cuda_backend.move_rows(dy, NULL, dx, on_device(indices, sizeof indices), n, dim);
        y = fetch_output(dy, (size_t)(n * dim), "move_rows");
        CHECK(!memcmp(y, wanted, (size_t)(n * dim) * 4), "move_rows");
        free(y);
        const int places[12] = {7, 2, 9, 0, 11, 1, 3, 5, 4, 6, 10, 8};
        float *du = on_device(x, 12 * 50 * 4);
        memcpy(wanted, x, 12 * 50 * 4);
        c_backend.move_rows(wanted, places, x + 3, indices, n, dim);
        cuda_backend.move_rows(du, on_device(places, sizeof places), dx + 3, on_device(indices, sizeof indices), n, dim);
        y = from_device(du, 12 * 50 * 4);
        CHECK(!memcmp(y, wanted, 12 * 50 * 4), "move_rows to places");
        free(y);
        memcpy(wanted, x, 12 * 50 * 4);
        c_backend.copy_rows(wanted, 45, x, 50, n, dim, 0.75f);
        cuda_backend.copy_rows(dz, 45, dx, 50, n, dim, 0.75f);
        y = from_device(dz, 12 * 50 * 4);
        CHECK(!memcmp(y, wanted, 12 * 50 * 4), "copy_rows");
        free(x), free(y), free(wanted);
        free_kept();
    }
}

static void test_check_finite(void) {
    const int n = 20, dim = 333;
    for (int times = 0; times < 6; times++) {
        float *x = random_floats((size_t)(n * dim), 1);
        PassReport report = {.bad_place = -1, .bad_row = -1}, *device = on_device(&report, sizeof report), *got;
        float *dx = on_device(x, (size_t)(n * dim) * 4);
        cuda_backend.check_finite(device, 3, dx, n, dim);
        cuda_backend.check_finite(device, 3, dx, 0, dim);
        got = from_device(device, sizeof report);
        CHECK(got->bad_row == -1 && got->bad_place == -1, "check_finite: nothing is bad, row %d", got->bad_row);
        free(got);
        x[13 * dim + 5] = NAN, x[9 * dim + dim - 1] = INFINITY, x[17 * dim] = -INFINITY;
        float *bad = on_device(x, (size_t)(n * dim) * 4);
        c_backend.check_finite(&report, 4, x, n, dim);
        cuda_backend.check_finite(device, 4, bad, n, dim);
        cuda_backend.check_finite(device, 5, bad + 9 * dim, n - 9, dim); /* its row 0: found too late */
        cuda_backend.check_finite(device, 6, bad, n, dim);
        got = from_device(device, sizeof report);
        CHECK(got->bad_row == report.bad_row && got->bad_place == 4, "check_finite: row %d, place %d", got->bad_row,
              got->bad_place);
        free(got), free(x);
        free_kept();
    }
}

static void test_take_tokens(void) {
    int ids[3][40];
    DraftBlock blocks[3], *device;
    Row rows[3];
    memset(blocks, 0, sizeof blocks);
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 40; j++) ids[i][j] = draw_between(0, 1 << 20);
        rows[i] = (Row){i, 7, -1};
        blocks[i].position = 4 * i;
        blocks[i].ids = on_device(ids[i], sizeof ids[i]);
    }
    device = on_device(blocks, sizeof blocks);
    Row *on = on_device(rows, sizeof rows);
    for (int slot = 0; slot < 5; slot++) {
        cuda_backend.take_tokens(on, device, slot, 0);
        cuda_backend.take_tokens(on, device, slot, 3);
        Row *got = from_device(on, sizeof rows);
        for (int i = 0; i < 3; i++)
            CHECK(got[i].token == ids[i][4 * i + slot] && got[i].session == i && got[i].position == 7, "take_tokens: block %d",
                  i);
        free(got);
    }
    free_kept();
}

static void test_convolve(void) {
    for (int blocks = 0; blocks <= 3; blocks++)
        for (int taps = 1; taps <= 5; taps += 2) {
            const int size = 6, group = 8, dim = 72, groups = dim / group, n = blocks * size;
            const size_t stride = (size_t)(2 * taps * groups), values = (size_t)(n * dim);
            float *z = random_floats(values + 1, 1), *base = random_floats((size_t)(taps * dim), 1),
                  *delta = random_floats((size_t)n * stride + 1, 1);
            float *dz = on_device(z, values * 4), *db = on_device(base, (size_t)(taps * dim) * 4),
                  *dd = on_device(delta, (size_t)n * stride * 4);
            float *again = on_device(z, values * 4), *y, *alone;
            c_backend.convolve(z, base, delta, stride, n, size, taps, group, dim);
            cuda_backend.convolve(dz, db, dd, stride, n, size, taps, group, dim);
            y = from_device(dz, values * 4);
            compare("convolve", y, z, values, 1e-6);
            for (int b = 0; b < blocks; b++)
                cuda_backend.convolve(again + b * size * dim, db, dd + (size_t)(b * size) * stride, stride, size, size, taps,
                                      group, dim);
            alone = from_device(again, values * 4);
            CHECK(!memcmp(alone, y, values * 4), "convolve: each block alone");
            free(z), free(base), free(delta), free(y), free(alone);
            free_kept();
        }
}

/* ---- products */

/* One shape: against C, and each batch size against the largest one, rows in another place. */
static void check_linear(DType dtype, const char *type, int rows, int cols, int n, int x_gap, int y_gap, int first_row) {
    const size_t x_stride = (size_t)(cols + x_gap), y_stride = (size_t)(rows + y_gap), out = (size_t)n * y_stride;
    static const int sizes[] = {1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 65, 130};
    char name[128];
    snprintf(name, sizeof name, "linear %s [%d, %d] at row %d, %d rows, gaps %d %d", type, rows, cols, first_row, n, x_gap,
             y_gap);
    Matrix w = random_matrix(dtype, rows, cols, first_row), device = matrix_on_device(&w);
    float *x = random_floats((size_t)n * x_stride + 1, 1), *dx = on_device(x, (size_t)n * x_stride * 4);
    float *dy = output_on_device(out), *dz = output_on_device(out), *wanted = calloc(out + 1, 4);
    project(&c_backend, wanted, y_stride, x, x_stride, n, &w);
    project(&cuda_backend, dy, y_stride, dx, x_stride, n, &device);
    float *y = from_device(dy, (out + TEST_TAIL) * 4);
    size_t wrong_gaps = 0, unwritten = 0;
    for (size_t i = 0; i < out + TEST_TAIL; i++) {
        bool inside = i < out && i % y_stride < (size_t)rows, poison = float_to_bits(y[i]) == 0xffffffffu;
        if (inside) unwritten += poison;
        else {
            wrong_gaps += !poison;
            if (i < out) y[i] = wanted[i] = 0;
        }
    }
    CHECK(!unwritten && !wrong_gaps, "%s: %zu not written, %zu beyond", name, unwritten, wrong_gaps);
    compare(name, y, wanted, out, product_bound(dtype));
    for (int s = 0; s < 13 && sizes[s] < n; s++)
        for (int times = 0; times < 2; times++) {
            const int first = times ? n - sizes[s] : draw_between(0, n - sizes[s]);
            project(&cuda_backend, dz, y_stride, dx + (size_t)first * x_stride, x_stride, sizes[s], &device);
            float *z = from_device(dz, out * 4);
            int different = 0;
            for (int r = 0; r < sizes[s]; r++)
                different += memcmp(z + (size_t)r * y_stride, y + (size_t)(first + r) * y_stride, (size_t)rows * 4) != 0;
            CHECK(!different, "%s: %d of %d rows from %d on have other bits", name, different, sizes[s], first);
            free(z);
        }
    project(&cuda_backend, dy, y_stride, dx, x_stride, 0, &device);
    free(x), free(y), free(wanted);
    free_weights(&w);
    free_kept();
}

static void test_linear(void) {
    static const int shapes[][2] = {{1, 8},      {1, 20},      {8, 12},     {20, 8},    {12, 40},   {16, 16},
                                    {33, 48},    {64, 64},     {100, 136},  {130, 256}, {257, 384}, {576, 2048},
                                    {128, 1040}, {1000, 1000}, {2049, 512}, {40, 7168}, {7000, 208}};
    for (int t = 0; t < 5; t++)
        for (int s = 0; s < 17; s++) {
            const int *shape = shapes[s];
            check_linear(weight_types[t], weight_names[t], shape[0], shape[1], s < 11 ? 140 : 70, 0, 0, 0);
            check_linear(weight_types[t], weight_names[t], shape[0], shape[1], draw_between(1, 20) + (shape[0] < 20 ? 20 : 0),
                         draw_between(1, 9), draw_between(1, 9), draw_between(0, 300));
        }
}

/* Products of one x: each has the bits that it has alone, whatever stands beside it. shapes: rows, and the type's number. */
static void check_shared_input(const int (*shapes)[2], int count, int cols, int n) {
    static const int rows_of_one_launch[] = {1, 5, 8, 9, 16, 17, 40};
    const size_t x_stride = (size_t)cols + 4;
    Matrix w[MAX_PROJECTIONS], device[MAX_PROJECTIONS];
    float *x = random_floats((size_t)n * x_stride, 1), *dx = on_device(x, (size_t)n * x_stride * 4), *alone[MAX_PROJECTIONS];
    for (int i = 0; i < count; i++) {
        w[i] = random_matrix(weight_types[shapes[i][1]], shapes[i][0], cols, draw_between(0, 200));
        device[i] = matrix_on_device(&w[i]);
        float *y = output_on_device((size_t)n * (size_t)(shapes[i][0] + i));
        project(&cuda_backend, y, (size_t)(shapes[i][0] + i), dx, x_stride, n, &device[i]);
        alone[i] = from_device(y, (size_t)n * (size_t)(shapes[i][0] + i) * 4);
    }
    for (int c = 0; c < (int)(sizeof rows_of_one_launch / sizeof *rows_of_one_launch); c++) {
        const int rows = rows_of_one_launch[c];
        Projection products[MAX_PROJECTIONS];
        for (int i = 0; i < count; i++) {
            const size_t y_stride = (size_t)(shapes[i][0] + i);
            products[i] = (Projection){output_on_device((size_t)rows * y_stride), y_stride, &device[i]};
        }
        cuda_backend.linear(products, count, dx, x_stride, rows);
        for (int i = 0; i < count; i++) {
            const size_t y_stride = products[i].y_stride;
            float *y = from_device(products[i].y, ((size_t)rows * y_stride + TEST_TAIL) * 4);
            int different = 0, beyond = 0;
            for (int r = 0; r < rows; r++)
                different += memcmp(y + (size_t)r * y_stride, alone[i] + (size_t)r * y_stride, (size_t)shapes[i][0] * 4) != 0;
            for (size_t j = 0; j < (size_t)rows * y_stride + TEST_TAIL; j++)
                if (j >= (size_t)rows * y_stride || j % y_stride >= (size_t)shapes[i][0])
                    beyond += float_to_bits(y[j]) != 0xffffffffu;
            CHECK(!different && !beyond, "product %d of %d, %s [%d, %d], %d rows: %d rows have other bits than alone, %d beyond",
                  i, count, weight_names[shapes[i][1]], shapes[i][0], cols, rows, different, beyond);
            free(y);
        }
    }
    for (int i = 0; i < count; i++) free(alone[i]), free_weights(&w[i]);
    free(x);
    free_kept();
}

static void test_shared_input(void) {
    static const int formats[][2] = {{100, 0}, {33, 1}, {7, 2}, {260, 3}}, more[][2] = {{48, 4}, {300, 3}, {2049, 3}},
                     narrow[][2] = {{512, 3}, {160, 3}, {64, 3}, {8, 2}}, uneven[][2] = {{3000, 2}, {40, 2}, {16, 2}};
    check_shared_input(formats, 4, 400, 40);
    check_shared_input(formats, 4, 37, 40);
    check_shared_input(more, 3, 1024, 40);
    check_shared_input(more, 3, 300, 40);
    check_shared_input(narrow, 4, 320, 40);
    check_shared_input(uneven, 3, 4096, 40);
    check_shared_input(uneven, 2, 64, 40);
}

/* Passes of many rows, which go another way: each row has the bits that it has alone. x begins between multiples of 16 bytes, and
 * neither the matrix nor the pass is a multiple of a tile. */
static void check_many_rows(DType dtype, const char *type, int rows, int cols, int shift, int first_row) {
    static const int counts[] = {9, 15, 16, 17, 33, 63, 64, 65, 200, 512};
    enum { MOST = 512 };
    const size_t x_stride = (size_t)(cols + shift), y_stride = (size_t)(rows + shift);
    Matrix w = random_matrix(dtype, rows, cols, first_row), device = matrix_on_device(&w);
    float *x = random_floats(MOST * x_stride + 1, 1), *dx = on_device(x, (MOST * x_stride + 1) * 4);
    float *one = output_on_device(MOST * y_stride), *many = output_on_device(MOST * y_stride),
          *wanted = calloc(MOST * y_stride, 4);
    for (int r = 0; r < MOST; r++)
        project(&cuda_backend, one + (size_t)r * y_stride, y_stride, dx + shift % 2 + (size_t)r * x_stride, x_stride, 1, &device);
    float *alone = from_device(one, MOST * y_stride * 4);
    project(&c_backend, wanted, y_stride, x + shift % 2, x_stride, MOST, &w);
    for (size_t i = 0; i < MOST * y_stride; i++)
        if (i % y_stride >= (size_t)rows) alone[i] = wanted[i] = 0;
    char name[128];
    snprintf(name, sizeof name, "linear %s [%d, %d] at row %d, gap %d", type, rows, cols, first_row, shift);
    compare(name, alone, wanted, MOST * y_stride, product_bound(dtype));
    for (int c = 0; c < (int)(sizeof counts / sizeof *counts); c++) {
        const int n = counts[c], first = draw_between(0, MOST - n);
        project(&cuda_backend, many, y_stride, dx + shift % 2 + (size_t)first * x_stride, x_stride, n, &device);
        float *y = from_device(many, MOST * y_stride * 4);
        int different = 0;
        for (int r = 0; r < n; r++)
            different += memcmp(y + (size_t)r * y_stride, alone + (size_t)(first + r) * y_stride, (size_t)rows * 4) != 0;
        CHECK(!different, "%s: %d of %d rows from %d on have other bits than alone", name, different, n, first);
        free(y);
    }
    free(x), free(alone), free(wanted);
    free_weights(&w);
    free_kept();
}

static void test_many_rows(void) {
    static const int shapes[][2] = {{100, 144}, {130, 256}, {320, 160}, {257, 400}, {40, 4096}, {2049, 512}, {4104, 2048}};
    for (int t = 0; t < 5; t++)
        for (int s = 0; s < 7; s++) {
            check_many_rows(weight_types[t], weight_names[t], shapes[s][0], shapes[s][1], 0, 0);
            check_many_rows(weight_types[t], weight_names[t], shapes[s][0], shapes[s][1], draw_between(1, 9),
                            draw_between(0, 300));
        }
}

/* A NaN in one row must not reach the others, and must show in its own. */
static void test_linear_bad_row(void) {
    for (int t = 0; t < 5; t++) {
        const int rows = 64, cols = 256, n = 11;
        Matrix w = random_matrix(weight_types[t], rows, cols, 0), device = matrix_on_device(&w);
        float *x = random_floats((size_t)(n * cols), 1);
        x[4 * cols + 77] = NAN;
        float *dy = on_device(NULL, (size_t)(n * rows) * 4);
        project(&cuda_backend, dy, (size_t)rows, on_device(x, (size_t)(n * cols) * 4), (size_t)cols, n, &device);
        float *y = from_device(dy, (size_t)(n * rows) * 4);
        for (int i = 0; i < n * rows; i++)
            CHECK(!isfinite(y[i]) == (i / rows == 4), "linear %s: row %d of a pass with a NaN in row 4", weight_names[t],
                  i / rows);
        free(x), free(y);
        free_weights(&w);
        free_kept();
    }
}

static void check_latent(DType dtype, const char *type, Config config, int n) {
    const int heads = config.num_attention_heads, nope = config.qk_nope_head_dim, rope = config.qk_rope_head_dim,
              v = config.v_head_dim, lora = config.kv_lora_rank;
    const size_t q_width = (size_t)(heads * (nope + rope)), a_width = (size_t)(heads * (lora + rope)),
                 z_width = (size_t)(heads * lora), v_width = (size_t)(heads * v), rows = (size_t)n;
    char name[128];
    snprintf(name, sizeof name, "%s, %d heads, %d + %d, value %d, rank %d, %d rows", type, heads, nope, rope, v, lora, n);
    Matrix w = random_matrix(dtype, heads * (nope + v), lora, 0), device = matrix_on_device(&w);
    float *q = random_floats(rows * q_width + 1, 1), *z = random_floats(rows * z_width + 1, 1);
    float *dq = on_device(q, rows * q_width * 4), *dz = on_device(z, rows * z_width * 4);
    float *da = output_on_device(rows * a_width), *dv = output_on_device(rows * v_width), *one = output_on_device(a_width),
          *one_v = output_on_device(v_width);
    float *absorbed = malloc(rows * a_width * 4 + 4), *values = malloc(rows * v_width * 4 + 4);
    c_backend.absorb_query(absorbed, q, n, &w, &config);
    c_backend.expand_value(values, z, n, &w, &config);
    cuda_backend.absorb_query(da, dq, n, &device, &config);
    cuda_backend.expand_value(dv, dz, n, &device, &config);
    float *a = fetch_output(da, rows * a_width, "absorb_query"), *b = fetch_output(dv, rows * v_width, "expand_value");
    double off_a = distance(a, absorbed, rows * a_width), off_v = distance(b, values, rows * v_width);
    /* Of other types q is the sum of two bf16. */
    CHECK(off_a <= (dtype == DTYPE_F32 ? product_bound(dtype) : 2e-5), "absorb_query %s: off by %g", name, off_a);
    CHECK(off_v <= product_bound(dtype), "expand_value %s: off by %g", name, off_v);
    for (size_t r = 0; r < rows; r += 1 + rows / 5) {
        cuda_backend.absorb_query(one, dq + r * q_width, 1, &device, &config);
        cuda_backend.expand_value(one_v, dz + r * z_width, 1, &device, &config);
        float *alone = fetch_output(one, a_width, "absorb_query"), *alone_v = fetch_output(one_v, v_width, "expand_value");
        CHECK(!memcmp(alone, a + r * a_width, a_width * 4), "absorb_query %s: row %zu alone has other bits", name, r);
        CHECK(!memcmp(alone_v, b + r * v_width, v_width * 4), "expand_value %s: row %zu alone has other bits", name, r);
        free(alone), free(alone_v);
    }
    free(q), free(z), free(absorbed), free(values), free(a), free(b);
    free_weights(&w);
    free_kept();
}

static void test_latent_products(void) {
    static const int rows[] = {0, 1, 5, 8, 21, 70};
    Config shapes[4];
    memset(shapes, 0, sizeof shapes);
    for (int i = 0; i < 4; i++) {
        static const int numbers[4][5] = {
            {2, 8, 4, 12, 20}, {4, 64, 32, 64, 128}, {16, 128, 64, 128, 512}, {8, 192, 64, 256, 512}};
        shapes[i].num_attention_heads = numbers[i][0], shapes[i].qk_nope_head_dim = numbers[i][1],
        shapes[i].qk_rope_head_dim = numbers[i][2];
        shapes[i].v_head_dim = numbers[i][3], shapes[i].kv_lora_rank = numbers[i][4];
    }
    for (int t = 0; t < 4; t++)
        for (int i = 0; i < 4; i++)
            for (int n = 0; n < 6; n++) check_latent(weight_types[t], weight_names[t], shapes[i], rows[n]);
}

/* ---- mixture of experts */

static void check_route(Config config, int n) {
    const int experts = config.n_routed_experts, k = config.num_experts_per_tok;
    const size_t values = (size_t)n * (size_t)experts, chosen = (size_t)n * (size_t)k;
    float *logits = random_floats(values + 1, 2), *bias = random_floats((size_t)experts, 0.3f), *weights = malloc(chosen * 4 + 4);
    int *picks = malloc(chosen * 4 + 4), wrong = 0;
    for (int e = 0; e < experts; e += 3) bias[e] = bias[0]; /* equal choices: few different logits too */
    for (size_t i = 0; i < values; i++) logits[i] = rintf(logits[i] * 4) / 4;
    if (n > 2) logits[experts + 1] = NAN, logits[2 * experts] = -INFINITY;
    int *dp = on_device(NULL, chosen * 4);
    float *dw = output_on_device(chosen), *dl = on_device(logits, values * 4), *db = on_device(bias, (size_t)experts * 4);
    c_backend.route(picks, weights, logits, bias, n, &config);
    cuda_backend.route(dp, dw, dl, db, n, &config);
    float *w = fetch_output(dw, chosen, "route");
    int *p = from_device(dp, chosen * 4);
    for (size_t i = 0; i < chosen; i++) {
        /* Scores may differ by a rounding, so an equal choice may go to a neighbour: what is picked must be worth as much. */
        size_t r = i / (size_t)k * (size_t)experts;
        float a = logits[r + (size_t)picks[i]], b = p[i] >= 0 && p[i] < experts ? logits[r + (size_t)p[i]] : 1e9f;
        if (p[i] != picks[i] && !(fabsf(1 / (1 + expf(-a)) + bias[picks[i]] - 1 / (1 + expf(-b)) - bias[p[i]]) < 1e-6f)) wrong++;
        if (!(fabsf(w[i] - weights[i]) < 1e-4f) && !(isnan(w[i]) && isnan(weights[i])) && p[i] == picks[i]) wrong++;
    }
    CHECK(!wrong, "route: %d of %zu picks are wrong; %d experts, %d groups, %d rows", wrong, chosen, experts, config.n_group, n);
    for (int r = 0; r < n; r += 1 + n / 6) {
        cuda_backend.route(dp, dw, dl + (size_t)r * (size_t)experts, db, 1, &config);
        float *alone = from_device(dw, (size_t)k * 4);
        int *alone_picks = from_device(dp, (size_t)k * 4);
        CHECK(!memcmp(alone, w + r * k, (size_t)k * 4) && !memcmp(alone_picks, p + r * k, (size_t)k * 4),
              "route: row %d of %d alone", r, n);
        free(alone), free(alone_picks);
    }
    free(logits), free(bias), free(weights), free(picks), free(w), free(p);
    free_kept();
}

static void test_route(void) {
    static const int shapes[][5] = {{8, 2, 1, 1, 1},   {12, 3, 4, 2, 0},      {256, 8, 8, 4, 1},
                                    {160, 6, 1, 1, 0}, {4096, 16, 64, 20, 1}, {20, 4, 10, 3, 1}};
    for (int s = 0; s < 6; s++)
        for (int n = 0; n <= 40; n = n ? n * 3 + 1 : 1) {
            Config config;
            memset(&config, 0, sizeof config);
            config.n_routed_experts = shapes[s][0], config.num_experts_per_tok = shapes[s][1], config.n_group = shapes[s][2];
            config.topk_group = shapes[s][3], config.norm_topk_prob = shapes[s][4], config.routed_scaling_factor = 2.5f;
            check_route(config, n);
        }
}

/* Distinct picks of every row, in any order; few experts are popular. */
static void random_picks(int *picks, int n, int experts, int k) {
    for (int r = 0; r < n; r++)
        for (int i = 0; i < k; i++)
            for (bool again = true; again;) {
                picks[r * k + i] = draw() % 3 ? draw_between(0, experts - 1) : draw_between(0, k);
                again = false;
                for (int j = 0; j < i; j++) again |= picks[r * k + j] == picks[r * k + i];
            }
}

/* One array of matrices whose data are parts of one large matrix's. */
static void make_experts(Matrix **host, const Matrix **device, DType dtype, int n, int rows, int cols, Matrix *whole) {
    *whole = random_matrix(dtype, n * (rows + SCALE_BLOCK - 1) / SCALE_BLOCK * SCALE_BLOCK + n * SCALE_BLOCK, cols, 0);
    Matrix copy = matrix_on_device(whole), *list = malloc((size_t)n * sizeof *list);
    *host = malloc((size_t)n * sizeof **host);
    for (int e = 0; e < n; e++) {
        const int pitch = (rows + SCALE_BLOCK - 1) / SCALE_BLOCK * SCALE_BLOCK;
        const size_t offset = (size_t)(e * pitch) * stored_bytes(dtype, (size_t)cols),
                     scales = (size_t)(e * pitch / test_block) * (size_t)whole->scale_cols;
        (*host)[e] = *whole, list[e] = copy;
        (*host)[e].rows = list[e].rows = rows;
        (*host)[e].data += offset, list[e].data += offset;
        if (whole->scale) (*host)[e].scale += scales, list[e].scale += scales;
        if (whole->exponents) (*host)[e].first_row = list[e].first_row = e * pitch;
    }
    *device = on_device(list, (size_t)n * sizeof *list);
    free(list);
}

/* x and what lies between the products are two terms of 16 bits, but one of f16 to e2m1 and to large e4m3 matrices. */
static double expert_bound(DType dtype, const Config *config) {
    const bool large = config->num_experts_per_tok * config->hidden_size * config->moe_intermediate_size >= 12 << 20;
    if (dtype == DTYPE_F32) return 1e-5;
    return dtype == DTYPE_F4_E2M1 || (dtype == DTYPE_F8_E4M3 && large) ? 1e-3 : 3e-5;
}

/* shared: the width of the shared expert, of that type; 0: there is none. */
static void check_experts(DType dtype, const char *type, Config config, int n, int shared, DType shared_type) {
    const int experts = config.n_routed_experts, k = config.num_experts_per_tok, hidden = config.hidden_size,
              inter = config.moe_intermediate_size;
    const int each = larger(2 * (hidden + larger(inter, shared)), (k + 1) * inter + hidden);
    const size_t values = (size_t)n * (size_t)hidden, width = (size_t)hidden;
    char name[128];
    snprintf(name, sizeof name, "experts %s [%d of %d, %d, %d], shared %d, %d rows", type, k, experts, inter, hidden, shared, n);
    LayerWeights host, device;
    Matrix whole[3], *lists[3], common[3];
    memset(&host, 0, sizeof host);
    memset(&device, 0, sizeof device);
    for (int i = 0; i < 3 && shared; i++)
        common[i] = random_matrix(shared_type, i < 2 ? shared : hidden, i < 2 ? hidden : shared, 0);
    if (shared) {
        host.gate_proj = common[0], host.up_proj = common[1], host.down_proj = common[2];
        device.gate_proj = matrix_on_device(&common[0]), device.up_proj = matrix_on_device(&common[1]);
        device.down_proj = matrix_on_device(&common[2]);
    }
    make_experts(&lists[0], &device.expert_gate, dtype, experts, inter, hidden, &whole[0]);
    make_experts(&lists[1], &device.expert_up, dtype, experts, inter, hidden, &whole[1]);
    make_experts(&lists[2], &device.expert_down, dtype, experts, hidden, inter, &whole[2]);
    host.expert_gate = lists[0], host.expert_up = lists[1], host.expert_down = lists[2];
    host.expert_dtype = device.expert_dtype = dtype;
    float *x = random_floats(values + 1, 0.1f), *y = random_floats(values + 1, 1),
          *weights = random_floats((size_t)(n * k) + 1, 1);
    float *scratch = malloc((size_t)(n + 1) * (size_t)each * 4);
    int *picks = malloc((size_t)(n * k) * 4 + 4);
    random_picks(picks, n, experts, k);
    float *dx = on_device(x, values * 4), *dy = on_device(y, values * 4), *dz = on_device(y, values * 4),
          *dw = on_device(weights, (size_t)(n * k) * 4);
    int *dp = on_device(picks, (size_t)(n * k) * 4);
    float *ds = on_device(NULL, (size_t)(n + 1) * (size_t)each * 4);
    c_backend.experts(y, x, picks, weights, n, &host, &config, scratch);
    cuda_backend.experts(dy, dx, dp, dw, n, &device, &config, ds);
    float *out = from_device(dy, values * 4);
    /* Of another width the shared one is three products. */
    const double of_shared = !shared ? 0 : shared == inter ? expert_bound(shared_type, &config) : product_bound(shared_type);
    const double rounding = config.qat ? 2e-2 : 0;  /* a value near the border of two codes takes the other one */
    compare(name, out, y, values, fmax(fmax(expert_bound(dtype, &config), of_shared), rounding));
    for (int take = 1; take < n; take = take * 3 + 1) { /* in order, so many at a time */
        float *before = from_device(dz, values * 4);
        for (int first = n % take; first < n; first += take)
            cuda_backend.experts(dz + (size_t)first * width, dx + (size_t)first * width, dp + first * k, dw + first * k, take,
                                 &device, &config, ds);
        float *parts = from_device(dz, values * 4);
        size_t from = (size_t)(n % take) * width;
        CHECK(!memcmp(parts + from, out + from, (values - from) * 4), "%s: %d at a time have other bits", name, take);
        cuda_backend.copy_bytes(dz, before, values * 4);
        free(before), free(parts);
    }
    free(x), free(y), free(weights), free(scratch), free(picks), free(out);
    for (int i = 0; i < 3; i++) free(lists[i]), free_weights(&whole[i]);
    for (int i = 0; i < 3 && shared; i++) free_weights(&common[i]);
    free_kept();
}

/* Without a shared expert; with one like the others, which runs with them; with one of another type, or another width. */
static void test_experts(void) {
    static const int shapes[][4] = {{4, 2, 8, 12},      {6, 3, 20, 8},      {8, 2, 64, 48},    {8, 2, 256, 320},
                                    {16, 4, 256, 128}, {12, 4, 528, 272}, {32, 8, 1024, 256}, {8, 2, 512, 2304},
                                    {6, 2, 768, 512}};    /* the last: strips of down that are cut */
    static const int rows[] = {0, 1, 2, 9, 17, 60, 130};
    for (int t = 0; t < 5; t++)
        for (int s = 0; s < 9; s++)
            for (int r = 0; r < 7; r++) {
                Config config;
                memset(&config, 0, sizeof config);
                config.n_routed_experts = shapes[s][0], config.num_experts_per_tok = shapes[s][1],
                config.hidden_size = shapes[s][2];
                config.moe_intermediate_size = shapes[s][3];
                const int inter = config.moe_intermediate_size;
                check_experts(weight_types[t], weight_names[t], config, rows[r], 0, weight_types[t]);
                check_experts(weight_types[t], weight_names[t], config, rows[r], inter, weight_types[t]);
                check_experts(weight_types[t], weight_names[t], config, rows[r], inter, DTYPE_F8_E4M3);
                if (r % 3 == 0) check_experts(weight_types[t], weight_names[t], config, rows[r], 2 * inter, weight_types[t]);
            }
}

/* A shared expert of e4m3 beside e2m1, whose sums on the tensor cores are rounded: rows of every size have the same bits alone
 * and with others, as many as share a tile of weights and one more. */
static void test_shared_binades(void) {
    enum { EXPERTS = 4, PICKS = 2, HIDDEN = 512, INTER = 512, ROWS = 5, SPREAD = 24 };
    static const int blocks[] = {SCALE_BLOCK, SMALL_TEST_BLOCK};
    for (int b = 0; b < 2; b++) {
        test_block = blocks[b];
        Config config;
        LayerWeights device;
        Matrix whole[3], *lists[3], common[3];
        memset(&config, 0, sizeof config);
        memset(&device, 0, sizeof device);
        config.n_routed_experts = EXPERTS, config.num_experts_per_tok = PICKS, config.hidden_size = HIDDEN;
        config.moe_intermediate_size = INTER, config.weight_block = test_block, config.swiglu_limit = 10;
        for (int i = 0; i < 3; i++) common[i] = random_matrix(DTYPE_F8_E4M3, i < 2 ? INTER : HIDDEN, i < 2 ? HIDDEN : INTER, 0);
        device.gate_proj = matrix_on_device(&common[0]), device.up_proj = matrix_on_device(&common[1]);
        device.down_proj = matrix_on_device(&common[2]);
        make_experts(&lists[0], &device.expert_gate, DTYPE_F4_E2M1, EXPERTS, INTER, HIDDEN, &whole[0]);
        make_experts(&lists[1], &device.expert_up, DTYPE_F4_E2M1, EXPERTS, INTER, HIDDEN, &whole[1]);
        make_experts(&lists[2], &device.expert_down, DTYPE_F4_E2M1, EXPERTS, HIDDEN, INTER, &whole[2]);
        device.expert_dtype = DTYPE_F4_E2M1;
        float *weights = random_floats(ROWS * PICKS, 1), *dw = on_device(weights, ROWS * PICKS * 4),
              *scratch = on_device(NULL, (ROWS + 1) * ((PICKS + 1) * INTER + 2 * HIDDEN) * 4);
        int picks[ROWS * PICKS];
        random_picks(picks, ROWS, EXPERTS, PICKS);
        int *dp = on_device(picks, sizeof picks);
        for (int centre = -126; centre <= 126; centre++) {
            float *x = random_floats(ROWS * HIDDEN, 1);
            for (int i = 0; i < ROWS * HIDDEN; i++) x[i] = ldexpf(x[i], centre - draw_between(0, SPREAD));
            float *dx = to_device(x, ROWS * HIDDEN * 4), *dy = to_device(NULL, ROWS * HIDDEN * 4);
            for (int r = 0; r < ROWS; r++)
                cuda_backend.experts(dy + r * HIDDEN, dx + r * HIDDEN, dp + r * PICKS, dw + r * PICKS, 1, &device, &config,
                                     scratch);
            float *alone = from_device(dy, ROWS * HIDDEN * 4);
            for (int n = 2; n <= ROWS; n++) {
                cuda_backend.experts(dy, dx, dp, dw, n, &device, &config, scratch);
                float *together = from_device(dy, ROWS * HIDDEN * 4);
                CHECK(!memcmp(together, alone, (size_t)(n * HIDDEN) * 4), "shared e4m3 of %d, values of 2^%d: %d rows",
                      test_block, centre, n);
                free(together);
            }
            free(x), free(alone), free_device(dx), free_device(dy);
        }
        free(weights);
        for (int i = 0; i < 3; i++) free(lists[i]), free_weights(&whole[i]), free_weights(&common[i]);
        free_kept();
    }
    test_block = SCALE_BLOCK;
}

static void test_products(void) {
    test_norms();
    test_embed();
    test_rotate_queries();
    test_add_norm();
    test_norm_heads();
    test_stored_with_norms();
    test_elementwise();
    test_copies();
    test_check_finite();
    test_take_tokens();
    test_convolve();
    test_linear();
    test_shared_input();
    test_many_rows();
    test_linear_bad_row();
    test_latent_products();
    test_route();
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Cached rows and the index selection
 */

/* Rows of one pool, which starts out poisoned: the whole of it has to be the same in the end. */
static void check_stored(RowFormat format, int n_rows) {
    enum { POOL_ROWS = 150 };
    const size_t bytes = POOL_ROWS * format.stride, a_stride = (size_t)format.quantised + 3, b_stride = (size_t)format.plain + 5;
    const size_t n_a = a_stride * (size_t)n_rows, n_b = b_stride * (size_t)n_rows;
    float *a = random_floats(n_a, 3), *b = random_floats(n_b, 3);
    static const float odd[] = {0, -0.0f, 1e-39f, 1e-42f, -3e38f, 448, 464, 0.001953125f, 0.0009765625f, 1e-36f, INFINITY, NAN};
    for (size_t i = 0; i < n_a; i++) {
        if (draw() % 16 == 0) a[i] = odd[draw() % (sizeof odd / sizeof *odd)];
        if (i / 64 % 3 == 0) a[i] *= 1e-38f;
    }
    for (size_t i = 0; i < n_b; i++) if (draw() % 16 == 0) b[i] = odd[draw() % (sizeof odd / sizeof *odd)];
    DeviceRow ids[POOL_ROWS];
    for (int i = 0; i < POOL_ROWS; i++) ids[i].id = i;
    for (int i = POOL_ROWS - 1; i > 0; i--) {
        int j = draw_between(0, i);
        DeviceRow moved = ids[i];
        ids[i] = ids[j], ids[j] = moved;
    }
    for (int i = 0; i < POOL_ROWS; i++) if (draw() % 8 == 0) ids[i].id = -1;        /* nowhere */
    uint8_t *pool = malloc(bytes);
    memset(pool, 0xff, bytes);
    void *device_pool = to_device(NULL, bytes), *device_ids = to_device(ids, sizeof ids);
    void *device_a = to_device(a, n_a * sizeof *a), *device_b = to_device(b, n_b * sizeof *b);
    c_backend.store_rows(pool, &format, ids, n_rows, a, a_stride, b, b_stride);
    cuda_backend.store_rows(device_pool, &format, device_ids, n_rows, device_a, a_stride, device_b, b_stride);
    uint8_t *stored = from_device(device_pool, bytes);
    size_t same = 0;
    while (same < bytes && stored[same] == pool[same]) same++;
    CHECK(same == bytes, "store_rows: dtype %d, %d + %d values, groups of %d, %d rows: row %zu differs at byte %zu",
          (int)format.dtype, format.quantised, format.plain, format.group, n_rows, same / format.stride, same % format.stride);
    free_device(device_pool), free_device(device_a), free_device(device_b), free_device(device_ids);
    free(pool), free(stored), free(a), free(b);
}

static void test_store_rows(void) {
    static const int shapes[][3] = {{512, 64, 128}, {20, 8, 128}, {12, 4, 8}, {0, 128, 128}, {2048, 0, 128}, {7, 3, 4}, {1, 1, 1},
                                    {130, 64, 128}};
    for (int kind = KV_F32; kind <= KV_F8; kind++)
        for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++)
            for (int n_rows = 0; n_rows < 150; n_rows = n_rows * 4 + 1)
                check_stored(row_format((KvDtype)kind, shapes[i][0], shapes[i][1], shapes[i][2]), n_rows);
}

/* Rows with scales of one byte, and of four bits: as DeepSeek-V4 has them, and odd ones. */
static void test_store_codes(void) {
    static const struct { int quantised, plain, group; } shapes[] = {
        {448, 64, 64}, {512, 0, 32}, {512, 0, 16}, {128, 0, 32}, {21, 3, 4}, {7, 2, 16}, {1, 0, 2}, {130, 64, 128}};
    for (int kind = KV_F8; kind <= KV_F4; kind++)
        for (int scales = SCALES_E8M0; scales <= SCALES_E4M3; scales++)
            for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
                for (int n_rows = 0; n_rows < 150; n_rows = n_rows * 4 + 1)
                    check_stored(scaled_row_format((KvDtype)kind, shapes[i].quantised, shapes[i].plain, shapes[i].group,
                                                   (ScaleKind)scales), n_rows);
}

/* One call of index_select, or select_groups: its inputs, here and on the device. */
typedef struct IndexCase {
    int heads, dim, context_pages, sessions, capacity, n_rows;
    int page_rows;              /* 0: PAGE_ROWS, and index_select */
    int block_size, topk_blocks;            /* 0: no blocks */
    KvDtype dtype;
    bool whole;                 /* small whole numbers, so that every sum is exact and many scores are equal */
    bool plain;                 /* F8: bf16 values as the rope part of a row has them */
    RowFormat format;
    float *q, *weights, *key_values;        /* [rows, heads, dim], [rows, heads], [index pages, 64, dim] as stored */
    uint8_t *keys;
    DevicePage *pages;
    Row *rows;
    void *device_q, *device_weights, *device_keys, *device_pages, *device_rows;
} IndexCase;

/* What it gives: ids, counts, and the scores that it leaves. */
typedef struct IndexResult {
    int *ids, *count;
    float *scores;
} IndexResult;

static float to_bf16(float x) { return bits_to_float((float_to_bits(x) + 0x7fff + (float_to_bits(x) >> 16 & 1)) & 0xffff0000); }

static float *index_values(size_t n, bool whole, int low, int high) {
    float *x = random_floats(n, 1);
    for (size_t i = 0; i < n; i++) x[i] = whole ? (float)draw_between(low, high) : to_bf16(x[i]);
    return x;
}

/* Sessions in runs of up to 11 rows, at positions anywhere. */
static void draw_index_rows(IndexCase *test) {
    const int context = test->context_pages * (test->page_rows ? test->page_rows : PAGE_ROWS);
    for (int r = 0, session = 0; r < test->n_rows; session++) {
        int left = test->n_rows - r, run = session + 1 == test->sessions ? left : draw_between(1, left < 11 ? left : 11);
        int last = draw() % 3 == 0 ? context - 1 : draw_between(run - 1, context - 1);
        for (int i = 0; i < run; i++) test->rows[r + i] = (Row){session, last - run + 1 + i, 0};
        r += run;
    }
}

static float from_e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = (code & 0x7f) == 0x7f ? NAN
                       : exponent            ? ldexpf((float)(8 + fraction), exponent - 10)
                                             : ldexpf((float)fraction, -9);
    return code & 0x80 ? -size : size;
}

/* The keys as they are cached; key_values becomes what can be read there. */
static void store_index_keys(IndexCase *test) {
    const int n_keys = (test->sessions * test->context_pages + 1) * PAGE_ROWS;
    const size_t dim = (size_t)test->dim;
    memset(test->keys, 0xff, (size_t)n_keys * test->format.stride);         /* NaN between and behind the values */
    DeviceRow *ids = malloc((size_t)n_keys * sizeof *ids);
    for (int i = 0; i < n_keys; i++) ids[i].id = i;
    c_backend.store_rows(test->keys, &test->format, ids, n_keys, test->key_values, dim, test->key_values, dim);
    free(ids);
    for (size_t i = 0; i < (size_t)n_keys * dim && test->format.quantised && test->dtype == KV_F8; i++) {
        const uint8_t *row = test->keys + i / dim * test->format.stride;
        float scale;
        memcpy(&scale, row + dim + 4 * (i % dim / (size_t)test->format.group), sizeof scale);
        test->key_values[i] = from_e4m3(row[i % dim]) * scale;
    }
}

/* e4m3 holds whole keys exactly where the largest value of each is 7: that makes the scale 1 / 64. */
static void index_open(IndexCase *test) {
    const int n_pages = test->sessions * test->context_pages, n_keys = (n_pages + 1) * PAGE_ROWS;
    const size_t heads = (size_t)test->heads, dim = (size_t)test->dim, n = (size_t)test->n_rows;
    test->format = test->dtype == KV_F4 ? group_key_format(&(Config){.index_head_dim = test->dim}, KV_F4)
                   : test->plain        ? row_format(test->dtype, 0, test->dim, 128)
                                        : index_row_format(test->dtype, test->dim);
    test->q = index_values(n * heads * dim, test->whole, -3, 3);
    test->weights = index_values(n * heads, test->whole, -1, 3);
    test->key_values = index_values((size_t)n_keys * dim, test->whole, -3, 3);
    if (test->whole && test->dtype == KV_F8)
        for (int i = 0; i < n_keys; i++) test->key_values[(size_t)i * dim + (size_t)i % dim] = 7;
    for (size_t i = 0; i < (size_t)n_keys * dim && test->dtype == KV_F4; i += EXPONENT_BLOCK) test->key_values[i] = 6;
    test->keys = malloc((size_t)n_keys * test->format.stride);
    store_index_keys(test);
    test->pages = malloc((size_t)n_pages * sizeof *test->pages);
    for (int i = 0; i < n_pages; i++) {                                     /* page 0 is nobody's */
        int j = draw_between(0, i);
        test->pages[i] = test->pages[j];
        test->pages[j].id = i + 1;
    }
    test->rows = calloc(n + 1, sizeof *test->rows);
    draw_index_rows(test);
    test->device_q = to_device(test->q, n * heads * dim * sizeof(float));
    test->device_weights = to_device(test->weights, n * heads * sizeof(float));
    test->device_keys = to_device(test->keys, (size_t)n_keys * test->format.stride);
    test->device_pages = to_device(test->pages, (size_t)n_pages * sizeof *test->pages);
    test->device_rows = to_device(test->rows, n * sizeof *test->rows);
}

static void index_close(IndexCase *test) {
    free_device(test->device_q), free_device(test->device_weights), free_device(test->device_keys);
    free_device(test->device_pages), free_device(test->device_rows);
    free(test->q), free(test->weights), free(test->key_values), free(test->keys), free(test->pages), free(test->rows);
}

static void free_result(IndexResult *result) { free(result->ids), free(result->count), free(result->scores); }

/* Whether the 64 bytes behind a block of the device are still poison. */
static bool poison_behind(const void *device, size_t bytes) {
    uint8_t *end = from_device((const uint8_t *)device + bytes, 64);
    bool whole = true;
    for (int i = 0; i < 64; i++) whole &= end[i] == 0xff;
    free(end);
    return whole;
}

static bool poisoned(const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) if (((const uint8_t *)data)[i] != 0xff) return false;
    return true;
}

/* Rows [begin, begin + n) on the GPU. */
static IndexResult index_on_gpu(const IndexCase *test, int begin, int n, int scratch_rows) {
    const size_t context = (size_t)test->context_pages * PAGE_ROWS, heads = (size_t)test->heads, first = (size_t)begin;
    const size_t ids_bytes = (size_t)n * (size_t)test->capacity * sizeof(int), count_bytes = (size_t)n * sizeof(int);
    const size_t scratch_bytes = (size_t)scratch_rows * context * sizeof(float);
    void *ids = to_device(NULL, ids_bytes), *count = to_device(NULL, count_bytes), *scratch = to_device(NULL, scratch_bytes);
    Selection selection = {ids, count, test->capacity};
    cuda_backend.index_select(&selection, (float *)test->device_q + first * heads * (size_t)test->dim,
                              (float *)test->device_weights + first * heads, test->device_keys, &test->format, test->device_pages,
                              test->context_pages, test->heads, test->dim, (Row *)test->device_rows + first, n, scratch,
                              scratch_rows);
    IndexResult result = {from_device(ids, ids_bytes + 64), from_device(count, count_bytes + 64),
                          from_device(scratch, scratch_bytes + 64)};
    CHECK(poisoned((uint8_t *)result.ids + ids_bytes, 64) && poisoned((uint8_t *)result.count + count_bytes, 64) &&
          poisoned((uint8_t *)result.scores + scratch_bytes, 64), "index_select writes behind its outputs");
    free_device(ids), free_device(count), free_device(scratch);
    return result;
}

static double index_score(const IndexCase *test, int r, int position) {
    const size_t dim = (size_t)test->dim;
    const int page = test->pages[test->rows[r].session * test->context_pages + position / PAGE_ROWS].id;
    const float *key = test->key_values + (size_t)(page * PAGE_ROWS + position % PAGE_ROWS) * dim;
    double score = 0;
    for (int h = 0; h < test->heads; h++) {
        const float *q = test->q + (size_t)(r * test->heads + h) * dim;
        double dot = 0;
        for (size_t i = 0; i < dim; i++) dot += (double)q[i] * key[i];
        score += (dot > 0 ? dot : 0) * test->weights[r * test->heads + h];
    }
    return score / sqrt((double)test->heads * test->dim);
}

/* The selection of row r is right as far as rounding lets one say: ascending, and nothing left out is clearly better. */
static bool selects_best(const IndexCase *test, int r, const int *ids, int count) {
    const int visible = test->rows[r].position + 1;
    double worst = INFINITY, best = -INFINITY, largest = 0;
    if (count != (visible < test->capacity ? visible : test->capacity)) return false;
    for (int i = count; i < test->capacity; i++) if (ids[i] != -1) return false;
    for (int s = 0, i = 0; s < visible; s++) {
        double score = index_score(test, r, s);
        largest = fmax(largest, fabs(score));
        if (i < count && ids[i] == s) worst = fmin(worst, score), i++;
        else best = fmax(best, score);
        if (s + 1 == visible && i != count) return false;
    }
    return worst >= best - 1e-4 * largest;
}

/* Rows [begin, begin + n) alone are what they are in `all`, scores included where they were needed. */
static void check_index_part(const IndexCase *test, const IndexResult *all, int begin, int n, int scratch_rows) {
    const size_t context = (size_t)test->context_pages * PAGE_ROWS, k = (size_t)test->capacity;
    IndexResult part = index_on_gpu(test, begin, n, scratch_rows);
    bool same = true;
    for (int i = 0; i < n; i++) {
        const size_t r = (size_t)(begin + i);
        same &= part.count[i] == all->count[r] && !memcmp(part.ids + (size_t)i * k, all->ids + r * k, k * sizeof(int));
        if (scratch_rows >= n && test->n_rows <= 512 && test->rows[r].position >= test->capacity)
            same &= !memcmp(part.scores + (size_t)i * context, all->scores + r * context,
                            (size_t)(test->rows[r].position + 1) * sizeof(float));
    }
    CHECK(same, "index_select: rows %d .. %d of %d, %d at a time, are not what they are together", begin, begin + n, test->n_rows,
          scratch_rows);
    free_result(&part);
}

static void check_index(IndexCase test) {
    index_open(&test);
    const int n = test.n_rows;
    const size_t k = (size_t)test.capacity, context = (size_t)test.context_pages * PAGE_ROWS;
    IndexResult all = index_on_gpu(&test, 0, n, n + 1);
    if (test.whole) {
        Selection wanted = {malloc(((size_t)n * k + 1) * sizeof(int)), malloc(((size_t)n + 1) * sizeof(int)), test.capacity};
        float *scratch = malloc(((size_t)n + 1) * context * sizeof *scratch);
        c_backend.index_select(&wanted, test.q, test.weights, test.keys, &test.format, test.pages, test.context_pages, test.heads,
                               test.dim, test.rows, n, scratch, n + 1);
        bool same = !memcmp(wanted.ids, all.ids, (size_t)n * k * sizeof(int)) &&
                    !memcmp(wanted.count, all.count, (size_t)n * sizeof(int));
        CHECK(same, "index_select: %d heads of %d, %d pages, %d of them, dtype %d, %d rows: not the selection of the C twin",
              test.heads, test.dim, test.context_pages, test.capacity, (int)test.dtype, n);
        free(wanted.ids), free(wanted.count), free(scratch);
    } else for (int r = 0; r < n; r++)
        CHECK(selects_best(&test, r, all.ids + (size_t)r * k, all.count[r]),
              "index_select: %d heads of %d, %d pages, %d of them, dtype %d: row %d at %d does not select the best", test.heads,
              test.dim, test.context_pages, test.capacity, (int)test.dtype, r, test.rows[r].position);
    for (int r = 0; r < n && r < 12; r++) check_index_part(&test, &all, r, 1, 1);
    if (n > 2) {
        check_index_part(&test, &all, 1, n - 1, n);
        check_index_part(&test, &all, 0, n, 2);
        check_index_part(&test, &all, n / 3, n / 2, 3);
        check_index_part(&test, &all, n - 2, 2, 2);
    }
    free_result(&all);
    index_close(&test);
}

/* ---- select_groups */

static size_t block_words(const IndexCase *test) {
    const int context = test->context_pages * test->page_rows, size = test->block_size;
    return size ? ((size_t)((context + size - 1) / size) + 63) / 64 : 0;
}

/* Rows [begin, begin + n) of select_groups on the GPU, among given blocks, which it may set; scratch poisoned. */
static IndexResult groups_on_gpu(const IndexCase *test, int begin, int n, int scratch_rows, uint64_t *blocks, bool keeps) {
    const size_t context = (size_t)(test->context_pages * test->page_rows), heads = (size_t)test->heads, first = (size_t)begin;
    const size_t ids_bytes = (size_t)n * (size_t)test->capacity * sizeof(int), count_bytes = (size_t)n * sizeof(int);
    const size_t blocks_bytes = (size_t)n * block_words(test) * sizeof(uint64_t);
    void *ids = to_device(NULL, ids_bytes), *count = to_device(NULL, count_bytes),
         *scratch = to_device(NULL, (size_t)scratch_rows * context * sizeof(float)),
         *device_blocks = test->block_size ? to_device(blocks + first * block_words(test), blocks_bytes) : NULL;
    Selection selection = {ids, count, test->capacity};
    cuda_backend.select_groups(&selection, (float *)test->device_q + first * heads * (size_t)test->dim,
                               (float *)test->device_weights + first * heads, test->device_keys, &test->format,
                               test->device_pages, test->context_pages, test->page_rows, test->heads, test->dim,
                               (Row *)test->device_rows + first, n, scratch, scratch_rows, device_blocks, test->block_size,
                               test->topk_blocks, keeps);
    IndexResult result = {from_device(ids, ids_bytes + 64), from_device(count, count_bytes + 64), NULL};
    bool within = poisoned((uint8_t *)result.ids + ids_bytes, 64) && poisoned((uint8_t *)result.count + count_bytes, 64);
    CHECK(within && poison_behind(scratch, (size_t)scratch_rows * context * sizeof(float)), "select_groups writes beyond");
    if (device_blocks) {
        CHECK(poison_behind(device_blocks, blocks_bytes), "select_groups writes behind its blocks");
        cuda_backend.copy_bytes(blocks + first * block_words(test), device_blocks, blocks_bytes);
        free_device(device_blocks);
    }
    free_device(ids), free_device(count), free_device(scratch);
    return result;
}

/* All rows at once, as the C twin; and in parts, as all at once. Bits of rows that see all there is are nobody's. */
static void check_group_part(const IndexCase *test, const Selection *wanted, const uint64_t *wanted_blocks, const uint64_t *given,
                             int begin, int n, int scratch_rows, bool keeps) {
    const size_t k = (size_t)test->capacity, words = block_words(test);
    uint64_t *blocks = malloc((size_t)test->n_rows * words * sizeof *blocks + 64);
    memcpy(blocks, given, (size_t)test->n_rows * words * sizeof *blocks);
    IndexResult part = groups_on_gpu(test, begin, n, scratch_rows, blocks, keeps);
    bool same = true, same_blocks = true;
    for (int i = 0; i < n; i++) {
        const size_t r = (size_t)(begin + i);
        const int visible = test->rows[r].position + 1, used = words ? (visible + test->block_size - 1) / test->block_size : 0;
        same &= part.count[i] == wanted->count[r] && !memcmp(part.ids + (size_t)i * k, wanted->ids + r * k, k * sizeof(int));
        if (visible > test->capacity && words)
            same_blocks &= !memcmp(blocks + r * words, wanted_blocks + r * words, (size_t)((used + 63) / 64) * sizeof *blocks);
    }
    CHECK(same && same_blocks,
          "select_groups: %d heads of %d, %d pages of %d, %d of them, dtype %d, blocks %d x %d%s: rows %d .. %d of %d, %d at a "
          "time%s",
          test->heads, test->dim, test->context_pages, test->page_rows, test->capacity, (int)test->dtype, test->topk_blocks,
          test->block_size, keeps ? ", kept" : "", begin, begin + n, test->n_rows, scratch_rows, same ? ": the blocks" : "");
    free_result(&part), free(blocks);
}

/* Whole numbers, so that both twins have the same scores. First the selection that keeps blocks, then one that stays in them. */
static void check_groups(IndexCase test) {
    test.whole = true;
    index_open(&test);
    if (test.n_rows) test.rows[0].position = -1;    /* it sees no row yet */
    cuda_backend.copy_bytes(test.device_rows, test.rows, (size_t)test.n_rows * sizeof *test.rows);
    const int n = test.n_rows;
    const size_t context = (size_t)(test.context_pages * test.page_rows), words = block_words(&test);
    Selection wanted = {malloc((size_t)(n * test.capacity + 1) * sizeof(int)), malloc((size_t)(n + 1) * sizeof(int)),
                        test.capacity};
    float *scratch = malloc((size_t)(n + 1) * context * sizeof *scratch);
    uint64_t *blocks = calloc((size_t)n * words + 1, sizeof *blocks), *before = calloc((size_t)n * words + 1, sizeof *before);
    for (int keeps = 1; keeps >= 0; keeps--) {
        memcpy(before, blocks, (size_t)n * words * sizeof *blocks);
        c_backend.select_groups(&wanted, test.q, test.weights, test.keys, &test.format, test.pages, test.context_pages,
                                test.page_rows, test.heads, test.dim, test.rows, n, scratch, n + 1,
                                test.block_size ? blocks : NULL, test.block_size, test.topk_blocks, keeps);
        check_group_part(&test, &wanted, blocks, before, 0, n, n + 1, keeps);
        for (int r = 0; r < n && r < 6; r++) check_group_part(&test, &wanted, blocks, before, r, 1, 1, keeps);
        if (n <= 2) continue;
        check_group_part(&test, &wanted, blocks, before, 1, n - 1, n, keeps);
        check_group_part(&test, &wanted, blocks, before, 0, n, 2, keeps);
        check_group_part(&test, &wanted, blocks, before, n / 3, n / 2, 3, keeps);
    }
    free(wanted.ids), free(wanted.count), free(scratch), free(blocks), free(before);
    index_close(&test);
}

static void test_select_groups(void) {
    static const struct { int heads, dim, pages, page_rows, sessions, capacity, rows, size, topk; KvDtype dtype;
    } cases[] = {
        {32, 128, 40, 64, 3, 256, 9, 0, 0, KV_BF16},    {32, 128, 41, 32, 3, 256, 9, 0, 0, KV_BF16},
        {4, 16, 7, 32, 4, 20, 17, 0, 0, KV_BF16},       {8, 32, 5, 32, 2, 33, 12, 0, 0, KV_F32},
        {32, 128, 40, 64, 3, 256, 9, 0, 0, KV_F4},      {64, 64, 33, 32, 3, 256, 11, 0, 0, KV_F4},
        {1, 64, 9, 64, 3, 60, 9, 0, 0, KV_F4},          {2, 32, 3, 32, 3, 20, 9, 0, 0, KV_F4},
        {32, 128, 60, 64, 3, 256, 9, 8, 64, KV_BF16},   {32, 128, 61, 64, 3, 512, 10, 8, 70, KV_F4},
        {4, 16, 9, 32, 4, 20, 17, 4, 7, KV_F32},        {4, 16, 9, 64, 4, 20, 17, 3, 8, KV_BF16},
        {2, 8, 8, 64, 2, 30, 130, 1, 30, KV_BF16},      {32, 128, 700, 64, 1, 512, 2, 8, 100, KV_F4},
        {16, 64, 300, 64, 2, 64, 5, 8, 2048, KV_F4},     {16, 64, 300, 64, 2, 64, 0, 8, 9, KV_F4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_groups((IndexCase){.heads = cases[i].heads, .dim = cases[i].dim, .context_pages = cases[i].pages,
                                 .page_rows = cases[i].page_rows, .sessions = cases[i].sessions, .capacity = cases[i].capacity,
                                 .n_rows = cases[i].rows, .block_size = cases[i].size, .topk_blocks = cases[i].topk,
                                 .dtype = cases[i].dtype});
}

static void test_index_select(void) {
    static const struct { int heads, dim, pages, sessions, capacity, rows; KvDtype dtype; bool whole;
    } cases[] = {
        {32, 128, 40, 3, 256, 9, KV_BF16, true},    {32, 128, 300, 2, 2048, 6, KV_BF16, true},
        {4, 16, 3, 4, 20, 17, KV_BF16, true},       {2, 8, 2, 3, 8, 5, KV_BF16, true},
        {16, 64, 10, 5, 64, 40, KV_BF16, true},     {8, 32, 5, 2, 33, 12, KV_F32, true},
        {64, 64, 20, 2, 512, 20, KV_BF16, true},    {32, 128, 20, 2, 100, 8, KV_F32, true},
        {4, 16, 2, 3, 500, 6, KV_BF16, true},       {64, 128, 40, 3, 256, 10, KV_BF16, false},
        {32, 128, 100, 2, 1024, 5, KV_BF16, false}, {3, 12, 6, 3, 50, 11, KV_BF16, false},
        {5, 20, 6, 3, 50, 11, KV_BF16, false},      {12, 24, 6, 3, 50, 11, KV_BF16, false},
        {3, 12, 6, 3, 50, 11, KV_F32, false},       {2, 8, 8, 2, 30, 300, KV_BF16, true},
        {32, 128, 1200, 1, 2048, 1, KV_BF16, true}, {8, 32, 8, 32, 64, 150, KV_BF16, true},
        {32, 128, 8, 2, 64, 0, KV_BF16, true},      {1, 4, 1, 1, 3, 1, KV_F32, true},
        {8, 64, 30, 9, 128, 60, KV_BF16, false},    {32, 128, 40, 3, 256, 9, KV_F8, true},
        {32, 128, 300, 2, 2048, 6, KV_F8, true},    {8, 64, 30, 9, 128, 60, KV_F8, false},
        {64, 128, 40, 3, 512, 10, KV_F8, false},    {32, 128, 100, 2, 512, 5, KV_F8, false},
        {16, 16, 9, 3, 100, 9, KV_F8, true},        {5, 12, 6, 3, 50, 11, KV_F8, false},
        {100, 128, 10, 2, 64, 5, KV_F8, false},     {3, 128, 70, 1, 512, 1, KV_F8, false},
        {32, 128, 700, 1, 512, 2, KV_BF16, false},  {128, 64, 10, 2, 64, 12, KV_BF16, false},
        {300, 8, 5, 2, 64, 3, KV_BF16, false},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++)
        check_index((IndexCase){.heads = cases[i].heads, .dim = cases[i].dim, .context_pages = cases[i].pages,
                                .sessions = cases[i].sessions, .capacity = cases[i].capacity, .n_rows = cases[i].rows,
                                .dtype = cases[i].dtype, .whole = cases[i].whole});
}

/* Bf16 rows in an fp8 cache. */
static void test_index_plain(void) {
    check_index((IndexCase){.heads = 32,
                            .dim = 128,
                            .context_pages = 20,
                            .sessions = 3,
                            .capacity = 100,
                            .n_rows = 9,
                            .dtype = KV_F8,
                            .whole = true,
                            .plain = true});
}

/* Of two positions with these scores, the first goes before the second: the higher one, then the lower position; NaN is below all. */
static bool goes_before(const float *scores, int a, int b) {
    if (isnan(scores[a]) || isnan(scores[b])) return isnan(scores[a]) == isnan(scores[b]) ? a < b : isnan(scores[b]);
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
}

/* The selection of `scores`, each of which is one of n_kinds: kinds in their order, and of the last one the lowest positions. */
static void select_kinds(int *ids, const float *scores, const uint8_t *kind_of, int visible, int k, const float *kinds,
                         int n_kinds) {
    int count[16], n = 0;
    for (int a = 0; a < n_kinds; a++) {             /* how many positions go before those of kind a and are not equal */
        count[a] = 0;
        for (int s = 0; s < visible; s++) {
            const float pair[] = {scores[s], kinds[a]};
            count[a] += goes_before(pair, 0, 1) && !goes_before((float[]){pair[1], pair[0]}, 0, 1);
        }
    }
    int taken[16] = {0};
    for (int s = 0; s < visible; s++) {
        int before = count[kind_of[s]];
        for (int a = 0; a < n_kinds; a++) if (count[a] == count[kind_of[s]]) before += taken[a];
        taken[kind_of[s]]++;
        if (before < k) ids[n++] = s;
    }
}

/* Keys of one value that is odd: ties, both zeros, infinities, NaN; positions around k and at the ends of pages. */
static void test_index_special(void) {
    enum { KINDS = 10, PAGES = 50 };
    static const float values[KINDS] = {0, -0.0f, 1, 2, 0.5f, 1e30f, 1e-30f, NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 8; i++) {
        const int k = i & 1 ? 2048 : 512, sign = i & 2 ? -1 : 1,
                  positions[] = {k - 2, k - 1, k, k + 1, k + 63, 50 * k / 49, 3071, 3072, 3199};
        IndexCase test = {.heads = 8, .dim = 16, .context_pages = PAGES, .sessions = 1, .capacity = k, .n_rows = 9,
                          .dtype = i & 4 ? KV_F8 : KV_BF16};
        const int kinds = test.dtype == KV_F8 ? KINDS - 2 : KINDS,
                  n_keys = (PAGES + 1) * PAGE_ROWS; /* an infinite scale would make NaN */
        index_open(&test);
        uint8_t *kind_of = malloc((size_t)n_keys);
        float *scores = malloc((size_t)n_keys * sizeof *scores), expected[KINDS];
        for (int a = 0; a < KINDS; a++) expected[a] = (float)sign * (values[a] < 0 ? 0 : values[a]);
        for (size_t j = 0; j < (size_t)n_keys * 16; j++)
            test.key_values[j] = j % 16 ? 0 : values[kind_of[j / 16] = (uint8_t)(draw() % (uint64_t)kinds)];
        for (int j = 0; j < 9 * 8 * 16; j++) test.q[j] = j % 16 == 0;
        for (int j = 0; j < 9 * 8; j++) test.weights[j] = (float)sign;
        for (int r = 0; r < 9; r++) test.rows[r].position = positions[r];
        store_index_keys(&test);
        cuda_backend.copy_bytes(test.device_keys, test.keys, (size_t)n_keys * test.format.stride);
        cuda_backend.copy_bytes(test.device_q, test.q, 9 * 8 * 16 * sizeof(float));
        cuda_backend.copy_bytes(test.device_weights, test.weights, 9 * 8 * sizeof(float));
        cuda_backend.copy_bytes(test.device_rows, test.rows, 9 * sizeof(Row));
        IndexResult result = index_on_gpu(&test, 0, 9, 9);
        for (int r = 0; r < 9; r++) {
            const int visible = positions[r] + 1, n = visible < k ? visible : k;
            int *ids = malloc((size_t)k * sizeof *ids);
            uint8_t kind[PAGES * PAGE_ROWS];
            for (int s = 0; s < visible; s++)
                kind[s] = kind_of[test.pages[s / PAGE_ROWS].id * PAGE_ROWS + s % PAGE_ROWS], scores[s] = expected[kind[s]];
            for (int s = 0; s < k; s++) ids[s] = s < n ? s : -1;
            if (visible > k) select_kinds(ids, scores, kind, visible, k, expected, kinds);
            CHECK(result.count[r] == n && !memcmp(ids, result.ids + r * k, (size_t)k * sizeof *ids),
                  "index_select: odd scores, %d of %d positions, dtype %d, sign %d: another selection", k, visible,
                  (int)test.dtype, sign);
            free(ids);
        }
        free_result(&result), free(kind_of), free(scores);
        index_close(&test);
    }
}

/* Scores that are all the same, or not numbers: k ascending positions still, the lowest. */
static void test_index_odd(void) {
    IndexCase test = {.heads = 32, .dim = 128, .context_pages = 40, .sessions = 2, .capacity = 100, .n_rows = 5, .dtype = KV_BF16,
                      .whole = true};
    for (int kind = 0; kind < 2; kind++) {
        index_open(&test);
        for (int i = 0; i < test.n_rows; i++) test.rows[i].position = 2000 + i;
        cuda_backend.copy_bytes(test.device_rows, test.rows, (size_t)test.n_rows * sizeof *test.rows);
        float *weights = calloc((size_t)(test.n_rows * test.heads), sizeof *weights);
        if (kind) for (int i = 0; i < test.n_rows * test.heads; i++) weights[i] = NAN;
        cuda_backend.copy_bytes(test.device_weights, weights, (size_t)(test.n_rows * test.heads) * sizeof *weights);
        IndexResult result = index_on_gpu(&test, 0, test.n_rows, test.n_rows);
        bool lowest = true;
        for (int r = 0; r < test.n_rows; r++)
            for (int i = 0; i < test.capacity; i++) lowest &= result.ids[r * test.capacity + i] == i;
        CHECK(lowest, "index_select: equal scores (kind %d) are not the lowest positions", kind);
        free_result(&result);
        free(weights);
        index_close(&test);
    }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Attention
 */

/* A pool of n rows of that format that hold random vectors; in C's memory, and a copy on the GPU. */
static uint8_t *random_pool(const RowFormat *format, int n, void **copy) {
    const size_t a = (size_t)format->quantised, b = (size_t)format->plain;
    float *quantised = random_floats((size_t)n * a, 1), *plain = random_floats((size_t)n * b, 1);
    DeviceRow *ids = malloc((size_t)n * sizeof *ids);
    uint8_t *pool = calloc((size_t)n, format->stride);
    for (int i = 0; i < n; i++) ids[i].id = i;
    c_backend.store_rows(pool, format, ids, n, quantised, a, plain, b);
    *copy = to_device(pool, (size_t)n * format->stride);
    free(quantised), free(plain), free(ids);
    return pool;
}

static void test_sparse_attention(void) {
    static const struct { int heads, latent, tail, group; double bound;
    } shapes[] = {
        {64, 512, 64, 128, 8e-3}, {128, 512, 64, 128, 8e-3}, {16, 512, 64, 128, 8e-3},
        {4, 32, 16, 128, 1e-4},   {5, 64, 8, 32, 1e-4},      {9, 20, 6, 128, 1e-4},
        {8, 128, 32, 128, 8e-3},  {37, 128, 32, 128, 8e-3},
    };
    for (int trial = 0; trial < 80; trial++) {
        const int shape = trial % 8, heads = shapes[shape].heads, latent = shapes[shape].latent,
                  width = latent + shapes[shape].tail;
        const RowFormat format = row_format((KvDtype)(trial / 8 % 3), latent, shapes[shape].tail, shapes[shape].group);
        const int capacity = trial % 4 ? draw_between(1, 700) : 2048, n = trial == 7 ? 0 : draw_between(1, 9), rows = 3000,
                  staged = 100;
        void *pool_copy, *staging_copy;
        uint8_t *pool = random_pool(&format, rows, &pool_copy), *staging = random_pool(&format, staged, &staging_copy);
        float *q = random_floats((size_t)(n * heads * width), 1), *z = calloc((size_t)(n * heads * latent) + 1, sizeof *z);
        DeviceRow *locations = malloc((size_t)(n * capacity + 1) * sizeof *locations);
        int *count = malloc((size_t)(n + 1) * sizeof *count);
        for (int r = 0; r < n; r++) {
            count[r] = draw() % 3 ? draw_between(1, capacity) : capacity;
            for (int i = 0; i < capacity; i++)
                locations[r * capacity + i].id = i < count[r] ? draw_between(0, rows + staged - 1) : -1;
        }
        RowPool on_cpu = {pool, staging, rows}, on_gpu = {pool_copy, staging_copy, rows};
        const float scale = 1 / sqrtf((float)width);
        c_backend.sparse_attention(z, q, &on_cpu, &format, locations, count, capacity, n, heads, scale);
        float *q_gpu = to_device(q, (size_t)(n * heads * width) * 4), *z_gpu = to_device(NULL, (size_t)(n * heads * latent) * 4);
        DeviceRow *locations_gpu = to_device(locations, (size_t)(n * capacity) * sizeof *locations);
        int *count_gpu = to_device(count, (size_t)n * sizeof *count);
        cuda_backend.sparse_attention(z_gpu, q_gpu, &on_gpu, &format, locations_gpu, count_gpu, capacity, n, heads, scale);
        float *got = from_device(z_gpu, (size_t)(n * heads * latent) * 4);
        if (n) {
            double off = distance(got, z, (size_t)(n * heads * latent));
            CHECK(off < (format.dtype == KV_F32 ? 1e-4 : shapes[shape].bound),
                  "sparse attention, shape %d, dtype %d, %d rows of %d: off by %g", shape, format.dtype, n, capacity, off);
            int r = draw_between(0, n - 1);
            cuda_backend.sparse_attention(z_gpu, q_gpu + r * heads * width, &on_gpu, &format, locations_gpu + r * capacity,
                                          count_gpu + r, capacity, 1, heads, scale);
            float *alone = from_device(z_gpu, (size_t)(heads * latent) * 4);
            CHECK(!memcmp(alone, got + r * heads * latent, (size_t)(heads * latent) * 4),
                  "sparse attention, shape %d: row %d alone has the same bits", shape, r);
            free(alone);
        }
        free_device(q_gpu), free_device(z_gpu), free_device(locations_gpu), free_device(count_gpu), free_device(pool_copy),
            free_device(staging_copy);
        free(pool), free(staging), free(q), free(z), free(locations), free(count), free(got);
    }
}

/* A row that selects nothing is not a number, as in C, and its neighbours do not notice. */
static void test_empty_selection(void) {
    static const struct { int heads, latent, tail; } shapes[] = {{8, 128, 32}, {4, 32, 16}};
    enum { ROWS = 3 };
    for (int trial = 0; trial < 12; trial++) {
        const int heads = shapes[trial % 2].heads, latent = shapes[trial % 2].latent, width = latent + shapes[trial % 2].tail,
                  capacity = trial / 6 ? 600 : 100;
        const RowFormat format = row_format((KvDtype)(trial / 2 % 3), latent, shapes[trial % 2].tail, 128);
        const int count[ROWS] = {capacity, 0, 1};
        void *pool_copy;
        uint8_t *pool = random_pool(&format, 100, &pool_copy);
        DeviceRow *locations = malloc((size_t)(ROWS * capacity) * sizeof *locations);
        for (int i = 0; i < ROWS * capacity; i++) locations[i].id = i % capacity < count[i / capacity] ? draw_between(0, 99) : -1;
        float *q = random_floats((size_t)(ROWS * heads * width), 1), *z = calloc((size_t)(ROWS * heads * latent), sizeof *z);
        RowPool on_cpu = {pool, NULL, 100}, on_gpu = {pool_copy, NULL, 100};
        c_backend.sparse_attention(z, q, &on_cpu, &format, locations, count, capacity, ROWS, heads, 0.1f);
        float *z_gpu = output_on_device((size_t)(ROWS * heads * latent));
        cuda_backend.sparse_attention(z_gpu, on_device(q, (size_t)(ROWS * heads * width) * 4), &on_gpu, &format,
                                      on_device(locations, (size_t)(ROWS * capacity) * sizeof *locations),
                                      on_device(count, sizeof count), capacity, ROWS, heads, 0.1f);
        const size_t row = (size_t)(heads * latent);
        float *got = from_device(z_gpu, ROWS * row * 4);
        bool empty = true;
        for (size_t i = row; i < 2 * row; i++) empty &= isnan(got[i]) && isnan(z[i]);
        CHECK(empty, "sparse attention over nothing, dtype %d, %d keys at most: not NaN", format.dtype, capacity);
        CHECK(distance(got, z, row) < 8e-3 && distance(got + 2 * row, z + 2 * row, row) < 8e-3,
              "sparse attention beside nothing, dtype %d, %d keys at most", format.dtype, capacity);
        free_device(pool_copy);
        free(pool), free(locations), free(q), free(z), free(got);
        free_kept();
    }
}

/* Latent attention over lists that end before, at and behind the borders of tiles, for any number of heads. Each row is there
 * alone and beside few, where many thread blocks share its list, and among many, where one has all of it: with the same bits. */
static void check_latent_lists(KvDtype dtype, int heads) {
    static const int lengths[] = {1, 63, 64, 65, 255, 256, 257, 2048, 0, 700, 129};
    enum {
        LISTS = sizeof lengths / sizeof *lengths,
        ROWS = 143,
        CAPACITY = 2048,
        POOL = 3000,
        STAGED = 100,
        LATENT = 512,
        WIDTH = 576
    };
    const RowFormat format = row_format(dtype, LATENT, WIDTH - LATENT, 128);
    const size_t query = (size_t)heads * WIDTH, result = (size_t)heads * LATENT;
    void *pool_copy, *staging_copy;
    uint8_t *pool = random_pool(&format, POOL, &pool_copy), *staging = random_pool(&format, STAGED, &staging_copy);
    float *q = random_floats(ROWS * query, 1), *wanted = calloc(LISTS * result, sizeof *wanted);
    DeviceRow *locations = malloc(ROWS * CAPACITY * sizeof *locations);
    int count[ROWS];
    for (int r = 0; r < ROWS; r++) {
        count[r] = lengths[r % LISTS];
        for (int i = 0; i < CAPACITY; i++)
            locations[r * CAPACITY + i].id = i >= count[r] ? -1 : r < LISTS ? draw_between(0, POOL + STAGED - 1)
                                                                : locations[(r - LISTS) * CAPACITY + i].id;
        if (r >= LISTS) memcpy(q + r * query, q + (r - LISTS) * query, query * sizeof *q);
    }
    const RowPool on_cpu = {pool, staging, POOL}, on_gpu = {pool_copy, staging_copy, POOL};
    c_backend.sparse_attention(wanted, q, &on_cpu, &format, locations, count, CAPACITY, LISTS, heads, 0.05f);
    const float *q_gpu = on_device(q, ROWS * query * sizeof *q);
    const DeviceRow *locations_gpu = on_device(locations, ROWS * CAPACITY * sizeof *locations);
    const int *count_gpu = on_device(count, sizeof count);
    float *z = output_on_device(ROWS * result), *z_few = output_on_device(LISTS * result);
    cuda_backend.sparse_attention(z, q_gpu, &on_gpu, &format, locations_gpu, count_gpu, CAPACITY, ROWS, heads, 0.05f);
    float *got = fetch_output(z, ROWS * result, "latent attention");
    for (int r = 0; r < ROWS; r++) {
        const float *first = got + r % LISTS * result;
        if (r < LISTS && count[r]) compare("latent attention", first, wanted + r * result, result, 8e-3);
        size_t numbers = 0;
        for (size_t i = 0; i < result && !count[r]; i++) numbers += !isnan(got[r * result + i]);
        CHECK(!numbers, "latent attention: %zu sums over no keys are numbers", numbers);
        CHECK(!memcmp(first, got + r * result, result * sizeof *got),
              "latent attention, %d heads: %d keys, row %d has other bits", heads, count[r], r);
    }
    for (int n = 1; n <= LISTS; n = n < 4 ? n + 1 : LISTS + n / LISTS)
        for (int r = 0; r + n <= LISTS; r++) {
            cuda_backend.sparse_attention(z_few, q_gpu + r * query, &on_gpu, &format, locations_gpu + r * CAPACITY, count_gpu + r,
                                          CAPACITY, n, heads, 0.05f);
            float *few = fetch_output(z_few, n * result, "latent attention over few rows");
            CHECK(!memcmp(few, got + r * result, n * result * sizeof *got),
                  "latent attention, %d heads: of %d rows, the one of %d keys or one behind it has other bits", heads, n, count[r]);
            free(few);
        }
    free_kept();
    free_device(pool_copy), free_device(staging_copy);
    free(pool), free(staging), free(q), free(wanted), free(locations), free(got);
}

static void test_latent_lists(void) {
    static const int heads[] = {1, 5, 16, 63, 64, 65, 128};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        check_latent_lists(KV_F8, heads[i]), check_latent_lists(KV_BF16, heads[i]);
}

/* A cached value that is not a number makes its row's result none, whatever its format. */
static void test_latent_nan(void) {
    enum { HEADS = 64, KEYS = 300, LATENT = 512, WIDTH = 576 };
    for (int dtype = KV_BF16; dtype <= KV_F8; dtype++)
        for (int place = 0; place < WIDTH; place += 191) {
            const RowFormat format = row_format((KvDtype)dtype, LATENT, WIDTH - LATENT, 128);
            void *copy;
            uint8_t *pool = random_pool(&format, KEYS, &copy);
            DeviceRow locations[KEYS];
            float *q = random_floats(HEADS * WIDTH, 1), *row = random_floats(WIDTH, 1);
            const DeviceRow odd = {77};
            const int count = KEYS;
            for (int i = 0; i < KEYS; i++) locations[i].id = i;
            row[place] = NAN;
            c_backend.store_rows(pool, &format, &odd, 1, row, LATENT, row + LATENT, WIDTH - LATENT);
            cuda_backend.copy_bytes(copy, pool, KEYS * format.stride);
            const RowPool on_gpu = {copy, copy, KEYS};
            float *z = output_on_device(HEADS * LATENT);
            const float *q_gpu = on_device(q, HEADS * WIDTH * sizeof *q);
            const DeviceRow *locations_gpu = on_device(locations, sizeof locations);
            cuda_backend.sparse_attention(z, q_gpu, &on_gpu, &format, locations_gpu, on_device(&count, sizeof count), KEYS, 1,
                                          HEADS, 0.05f);
            float *got = fetch_output(z, HEADS * LATENT, "latent attention with NaN");
            int numbers = 0;
            for (int i = 0; i < HEADS * LATENT; i++) numbers += !isnan(got[i]);
            CHECK(!numbers, "latent attention, dtype %d: NaN at value %d, and %d results are numbers", dtype, place, numbers);
            free_kept();
            free_device(copy);
            free(pool), free(q), free(row), free(got);
        }
}

enum { DENSE_PAGES = 20, DENSE_POOL = 80 };

typedef struct DenseCase { /* sessions follow each other in the pass; the s-th has runs[s] rows at its end, or at any place */
    int heads, kv_heads, dim, sessions;
    int runs[8];
    double bound;
} DenseCase;

/* In C and on the GPU; and parts of the pass, from any row on, so that rows lie elsewhere in their tiles, alone or beside others. */
static void check_dense_attention(const DenseCase *test, KvDtype dtype) {
    const int heads = test->heads, kv_heads = test->kv_heads, dim = test->dim, width = heads * dim;
    const RowFormat format = row_format(dtype, 2 * kv_heads * dim, 0, dim < 128 ? dim : 128);
    void *copy;
    uint8_t *pool = random_pool(&format, DENSE_POOL * PAGE_ROWS, &copy);
    DevicePage *pages = malloc((size_t)(test->sessions * DENSE_PAGES) * sizeof *pages);
    Row *rows = malloc(MAX_PASS_ROWS * sizeof *rows);
    int n = 0;
    for (int i = 0; i < test->sessions * DENSE_PAGES; i++) pages[i].id = draw_between(1, DENSE_POOL - 1);
    for (int s = 0; s < test->sessions; s++) {
        const int last = DENSE_PAGES * PAGE_ROWS - test->runs[s], position = s == 1       ? 0
                                                                             : draw() % 2 ? last
                                                                                          : draw_between(0, last);
        for (int i = 0; i < test->runs[s]; i++) rows[n++] = (Row){test->sessions - 1 - s, position + i, 0};
    }
    const size_t values = (size_t)(n * width);
    float *q = random_floats(values + 1, 1), *y = calloc(values + 1, sizeof *y);
    RowPool on_cpu = {pool, NULL, DENSE_POOL * PAGE_ROWS}, on_gpu = {copy, NULL, DENSE_POOL * PAGE_ROWS};
    c_backend.dense_attention(y, q, &on_cpu, &format, pages, DENSE_PAGES, rows, n, heads, kv_heads, dim, 0.1f);
    float *q_gpu = on_device(q, values * 4), *y_gpu = output_on_device(values);
    DevicePage *pages_gpu = on_device(pages, (size_t)(test->sessions * DENSE_PAGES) * sizeof *pages);
    Row *rows_gpu = on_device(rows, (size_t)n * sizeof *rows);
    cuda_backend.dense_attention(y_gpu, q_gpu, &on_gpu, &format, pages_gpu, DENSE_PAGES, rows_gpu, n, heads, kv_heads, dim, 0.1f);
    float *got = fetch_output(y_gpu, values, "dense attention");
    double off = distance(got, y, values);
    CHECK(off < test->bound, "dense attention, %d heads of %d, dtype %d, %d rows: off by %g", heads, dim, dtype, n, off);
    for (int part = 0; part < 5 && n; part++) {
        const int first = draw_between(0, n - 1), some = part < 2 ? 1 : draw_between(1, n - first);
        cuda_backend.dense_attention(y_gpu, q_gpu + first * width, &on_gpu, &format, pages_gpu, DENSE_PAGES, rows_gpu + first,
                                     some, heads, kv_heads, dim, 0.1f);
        float *alone = from_device(y_gpu, (size_t)(some * width) * 4);
        CHECK(!memcmp(alone, got + first * width, (size_t)(some * width) * 4),
              "dense attention, %d heads of %d, dtype %d: rows [%d, %d) of %d alone have other bits", heads, dim, dtype, first,
              first + some, n);
        free(alone);
    }
    free_device(copy);
    free(pool), free(pages), free(rows), free(q), free(y), free(got);
    free_kept();
}

static void test_dense_attention(void) {
    static const DenseCase cases[] = {
        {32, 8, 128, 0, {0}, 8e-3},
        {32, 8, 128, 1, {1}, 8e-3},
        {32, 8, 128, 4, {3, 1, 8, 5}, 8e-3},
        {32, 8, 128, 3, {17, 16, 2}, 8e-3},
        {8, 2, 128, 6, {100, 1, 1, 270, 16, 17}, 8e-3},      /* tiles of every height */
        {8, 4, 64, 4, {8, 20, 1, 33}, 8e-3},
        {2, 1, 64, 2, {300, 140}, 8e-3},
        {16, 1, 64, 3, {5, 9, 1}, 8e-3},
        {6, 2, 64, 2, {7, 150}, 8e-3},
        {4, 2, 32, 3, {3, 5, 2}, 1e-4},
        {6, 2, 20, 3, {1, 7, 4}, 1e-4},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++)
        for (int dtype = 0; dtype < 3; dtype++) {
            DenseCase test = cases[i];
            if (dtype == KV_F32) test.bound = 1e-4;
            check_dense_attention(&test, (KvDtype)dtype);
        }
}

static void test_block_attention(void) {
    static const struct { int heads, kv_heads, dim; double bound;
    } shapes[] = {{6, 2, 24, 2e-4}, {8, 2, 32, 2e-4}, {8, 4, 64, 8e-3}, {32, 8, 128, 8e-3}};
    enum { SESSIONS = 4, RING = 384 };
    for (int trial = 0; trial < 60; trial++) {
        const int shape = trial % 4, heads = shapes[shape].heads, kv_heads = shapes[shape].kv_heads, dim = shapes[shape].dim,
                  block_size = shape == 3 && trial % 3 ? draw_between(16, 20) : draw_between(1, 9),
                  n_blocks = trial == 3 ? 0 : draw_between(1, SESSIONS), window = trial % 5 ? draw_between(5, 256) : INT_MAX,
                  n = n_blocks * block_size, width = heads * dim, kv_width = 2 * kv_heads * dim;
        const bool causal = trial % 7 < 3;
        const RowFormat format = row_format(trial / 4 % 3 ? KV_BF16 : KV_F32, kv_width, 0, 128);
        void *copy;
        Error error;
        uint8_t *ring = random_pool(&format, SESSIONS * RING, &copy);
        DraftBlock *blocks = cuda_backend.take(SESSIONS * sizeof *blocks, MEMORY_HOST, &error);
        for (int i = 0; i < n_blocks; i++) {
            int position = draw_between(1, 900), first = position - draw_between(0, position < 300 ? position : 300);
            blocks[i] = (DraftBlock){.session = (i + trial) % SESSIONS, .position = position, .ring_first = first};
        }
        float *q = random_floats((size_t)(n * width) + 1, 1), *kv = random_floats((size_t)(n * kv_width) + 1, 1),
              *y = calloc((size_t)(n * width) + 1, sizeof *y);
        c_backend.block_attention(y, q, kv, ring, &format, RING, blocks, n_blocks, block_size, window, causal, heads, kv_heads,
                                  dim, 0.2f);
        float *q_gpu = on_device(q, (size_t)(n * width) * 4), *kv_gpu = on_device(kv, (size_t)(n * kv_width) * 4),
              *y_gpu = output_on_device((size_t)(n * width));
        cuda_backend.block_attention(y_gpu, q_gpu, kv_gpu, copy, &format, RING, blocks, n_blocks, block_size, window, causal,
                                     heads, kv_heads, dim, 0.2f);
        float *got = fetch_output(y_gpu, (size_t)(n * width), "block attention");
        double off = distance(got, y, (size_t)(n * width));
        if (n) {
            CHECK(off < (format.dtype == KV_F32 ? 2e-4 : shapes[shape].bound),
                  "block attention, %d blocks of %d, %d heads of %d, window %d, causal %d: off by %g", n_blocks, block_size,
                  heads, dim, window, causal, off);
            const int i = draw_between(0, n_blocks - 1);
            blocks[0] = blocks[i];
            cuda_backend.block_attention(y_gpu, q_gpu + i * block_size * width, kv_gpu + i * block_size * kv_width, copy, &format,
                                         RING, blocks, 1, block_size, window, causal, heads, kv_heads, dim, 0.2f);
            float *alone = from_device(y_gpu, (size_t)(block_size * width) * 4);
            CHECK(!memcmp(alone, got + i * block_size * width, (size_t)(block_size * width) * 4),
                  "block attention, %d blocks of %d, %d heads of %d: block %d alone has other bits", n_blocks, block_size, heads,
                  dim, i);
            free(alone);
        }
        free_device(copy);
        cuda_backend.give_back(blocks, MEMORY_HOST);
        free(ring), free(q), free(kv), free(y), free(got);
        free_kept();
    }
}
/* Twin tests of the hierarchy's operations, sampling and acceptance, and the drafters' operations. */

void cuda_allocate(int *lengths, const float *scores, const int *limits, int n, int slots, int budget, bool seeded);

/* Poisoned memory that both sides reach. */
static void *host_block(size_t bytes) {
    Error error;
    void *block = cuda_backend.take(bytes + 64, MEMORY_HOST, &error);
    if (!block) fprintf(stderr, "%s\n", error.text), exit(1);
    return memset(block, 0xff, bytes + 64);
}

static void free_host(void *block) { cuda_backend.give_back(block, MEMORY_HOST); }

static bool chance(double p) { return (double)(draw() >> 11) * 0x1p-53 < p; }

/* ---------------------------------------------------------------------------------------------------------------------
 * DeepSeek-V4
 */

static void test_round_rows(void) {
    static const float odd[] = {0, -0.0f, 1e-39f, 448, 464, -6, 5, 0.25f, 0.001953125f, 1e-36f, 3e38f, NAN};
    for (int trial = 0; trial < 120; trial++) {
        const KvDtype dtype = trial % 2 ? KV_F8 : KV_F4;
        const ScaleKind scales = (ScaleKind)(trial / 2 % 3);
        const int group = (int[]){16, 32, 64, 128, 7}[trial % 5], dim = draw_between(1, 600), n = trial % 9, gap = trial % 3;
        const size_t stride = (size_t)(dim + gap), values = (size_t)n * stride;
        const RowFormat format = {.dtype = dtype, .group = group, .scales = scales};
        float *x = random_floats(values + 1, 3);
        for (size_t i = 0; i < values; i++) {
            if (draw() % 16 == 0) x[i] = odd[draw() % (sizeof odd / sizeof *odd)];
            if (i / 64 % 5 == 0) x[i] *= 1e-37f;
        }
        float *dx = on_device(x, values * 4);
        c_backend.round_rows(x, stride, n, dim, &format);
        cuda_backend.round_rows(dx, stride, n, dim, &format);
        float *y = from_device(dx, values * 4);
        size_t different = 0;
        for (size_t i = 0; i < values; i++)
            different += float_to_bits(x[i]) != float_to_bits(y[i]) && !(isnan(x[i]) && isnan(y[i]));
        CHECK(!different, "round_rows: dtype %d, scales %d, groups of %d, [%d, %d]: %zu values differ", dtype, scales, group, n,
              dim, different);
        free(x), free(y);
        free_kept();
    }
}

static void test_hadamard(void) {
    for (int dim = 1; dim <= 2048; dim *= 2)
        for (int n = 0; n < 5; n += 1 + n) {
            const size_t values = (size_t)n * (size_t)dim;
            float *x = random_floats(values + 1, 2), *dx = on_device(x, values * 4);
            c_backend.hadamard(x, n, dim);
            cuda_backend.hadamard(dx, n, dim);
            float *got = from_device(dx, values * 4);
            CHECK(!memcmp(got, x, values * 4), "hadamard: %d vectors of %d", n, dim);
            free(x), free(got);
            free_kept();
        }
}

static void test_index_queries(void) {
    static const int shapes[][3] = {{64, 128, 64}, {5, 32, 8}, {3, 130, 130}, {2, 10, 0}};
    for (int s = 0; s < 4; s++)
        for (int n = 0; n < 8; n += 1 + n) {
            const int heads = shapes[s][0], dim = shapes[s][1], turned = shapes[s][2];
            const size_t row = (size_t)(heads * dim), values = (size_t)n * row, half = (size_t)(turned / 2),
                         angles = (size_t)n * half, of_weights = (size_t)(n * heads);
            float *q = random_floats(values + 1, 2), *cosine = random_floats(angles + 1, 1), *sine = random_floats(angles + 1, 1),
                  *weights = random_floats(of_weights + 1, 1), *dq = on_device(q, values * 4), *dc = on_device(cosine, angles * 4),
                  *ds = on_device(sine, angles * 4);
            for (int bad = 0; bad < 3 && n; bad++) {        /* nothing, a weight, and then the query */
                if (bad == 1) weights[of_weights - 1] = NAN;
                if (bad == 2) q[values - 1] = INFINITY;
                PassReport report = {.bad_row = -1, .bad_place = -1}, *dr = on_device(&report, sizeof report);
                float *dw = on_device(weights, of_weights * 4);
                cuda_backend.copy_bytes(dq, q, values * 4);
                c_backend.turn_index_queries(q, n, heads, dim, turned, cosine, sine, weights, &report, 4, 7);
                cuda_backend.turn_index_queries(dq, n, heads, dim, turned, dc, ds, dw, dr, 4, 7);
                float *got = from_device(dq, values * 4);
                PassReport *told = from_device(dr, sizeof *told);
                if (bad < 2) compare("turn_index_queries", got, q, values, 1e-6);
                CHECK(told->bad_row == report.bad_row && told->bad_place == report.bad_place,
                      "turn_index_queries: reports row %d, place %d; wanted %d, %d", told->bad_row, told->bad_place,
                      report.bad_row, report.bad_place);
                free(got), free(told);
            }
            free(q), free(cosine), free(sine), free(weights);
            free_kept();
        }
}

/* What is stored may differ where a value lies near the border of two codes, and with it its group; in bf16 by a rounding. */
static void check_shared_keys(RowFormat format, const RowFormat *rounding, int turned, int rank, int n) {
    const int dim = format.quantised + format.plain;
    const size_t width = (size_t)dim, values = (size_t)n * width, of_q = (size_t)(n * rank), half = (size_t)(turned / 2),
                 bytes = (size_t)(n + 3) * format.stride;
    float *kv = random_floats(values + 1, 2), *q = random_floats(of_q + 1, 1), *weight = random_floats(width, 1),
          *q_weight = random_floats((size_t)rank, 1), *cosine = random_floats((size_t)n * half + 1, 1),
          *sine = random_floats((size_t)n * half + 1, 1);
    DeviceRow *ids = malloc((size_t)(n + 1) * sizeof *ids);
    for (int r = 0; r < n; r++) ids[r].id = n - r;
    uint8_t *pool = calloc(1, bytes), *dp = on_device(pool, bytes), *again = on_device(pool, bytes);
    float *dk = on_device(kv, values * 4), *second = on_device(kv, values * 4), *dq = on_device(q, of_q * 4),
          *second_q = on_device(q, of_q * 4), *dw = on_device(weight, width * 4), *dqw = on_device(q_weight, (size_t)rank * 4),
          *dc = on_device(cosine, (size_t)n * half * 4), *ds = on_device(sine, (size_t)n * half * 4);
    DeviceRow *di = on_device(ids, (size_t)n * sizeof *ids);
    c_backend.store_shared_keys(pool, &format, ids, n, kv, dim, turned, weight, rounding, q, rank, q_weight, 1e-6f, cosine, sine);
    cuda_backend.store_shared_keys(dp, &format, di, n, dk, dim, turned, dw, rounding, dq, rank, dqw, 1e-6f, dc, ds);
    float *got = from_device(dk, values * 4), *got_q = from_device(dq, of_q * 4);
    uint8_t *stored = from_device(dp, bytes);
    compare("store_shared_keys", got, kv, values, rounding ? 1e-2 : 1e-6);
    compare("store_shared_keys, q", got_q, q, of_q, 1e-6);
    size_t different = 0;
    for (size_t i = 0; i < bytes; i++) different += stored[i] != pool[i];
    if (format.dtype == KV_F32) compare("store_shared_keys, f32", (float *)stored, (float *)pool, bytes / 4, rounding ? 1e-2 : 1e-6);
    else CHECK(different <= bytes / 50, "store_shared_keys: dtype %d, %d rows: %zu of %zu bytes differ", format.dtype, n, different,
               bytes);
    for (size_t r = 0; r < (size_t)n; r++)
        cuda_backend.store_shared_keys(again, &format, di + r, 1, second + r * width, dim, turned, dw, rounding,
                                       second_q + r * (size_t)rank, rank, dqw, 1e-6f, dc + r * half, ds + r * half);
    uint8_t *alone = from_device(again, bytes);
    float *alone_q = from_device(second_q, of_q * 4);
    CHECK(!memcmp(alone, stored, bytes) && !memcmp(alone_q, got_q, of_q * 4), "store_shared_keys: rows alone");
    free(kv), free(q), free(weight), free(q_weight), free(cosine), free(sine), free(ids), free(pool), free(got), free(got_q),
        free(stored), free(alone), free(alone_q);
    free_kept();
}

static void test_shared_keys(void) {
    const RowFormat of_v4 = scaled_row_format(KV_F8, 448, 0, 64, SCALES_E8M0),
                    of_v41 = scaled_row_format(KV_F8, 512, 0, 32, SCALES_E8M0),
                    small = scaled_row_format(KV_F8, 24, 0, 16, SCALES_E8M0);
    for (int n = 0; n < 40; n = 3 * n + 1)
        for (int rounds = 0; rounds < 2; rounds++) {
            for (int dtype = KV_F32; dtype <= KV_F8; dtype++) {
                const KvDtype kind = (KvDtype)dtype;
                check_shared_keys(scaled_row_format(kind, 448, 64, 64, SCALES_E8M0), rounds ? &of_v4 : NULL, 64, 1024, n);
                check_shared_keys(scaled_row_format(kind, 512, 0, 32, SCALES_E8M0), rounds ? &of_v41 : NULL, 64, 1280, n);
                check_shared_keys(scaled_row_format(kind, 24, 8, 8, SCALES_E8M0), rounds ? &small : NULL, 8, 20, n);
            }
        }
}

/* What of mix_streams() a case has. */
typedef struct StreamCase { int mult, hidden, n; bool branch, weights, head, own; DType dtype; } StreamCase;

static void check_streams(StreamCase t) {
    Config config;
    memset(&config, 0, sizeof config);
    config.hc_mult = t.mult, config.hidden_size = t.hidden, config.hc_sinkhorn_iters = draw_between(1, 20);
    config.hc_eps = t.n % 2 ? 0 : 1e-6f, config.rms_norm_eps = 1e-6f;      /* with 0 nothing hides a column that is not there */
    const int all = (2 + t.mult) * t.mult, n_mixes = t.head ? t.mult : all, width = t.mult * t.hidden, n = t.n;
    const size_t values = (size_t)n * (size_t)width, of_y = (size_t)n * (size_t)t.hidden, of_mixes = (size_t)n * (size_t)n_mixes;
    char name[128];
    snprintf(name, sizeof name, "mix_streams, %d rows of %d * %d, %s%s%s%s", n, t.mult, t.hidden, t.branch ? "branch " : "",
             t.weights ? "weights " : "", t.head ? "head " : "", t.own ? "own" : "");
    Matrix fn = random_matrix(t.dtype, n_mixes, width, 0), on_gpu = matrix_on_device(&fn);
    /* Without eps no column may vanish: the ratios of what is below the smallest float are anybody's. */
    float *base = random_floats((size_t)n_mixes, 1), scale[3] = {0.3f, 0.2f, config.hc_eps > 0 ? 0.4f : 0.1f},
          *norm = random_floats((size_t)t.hidden, 1);
    float *x = random_floats(values + 1, 1), *branch = random_floats(of_y + 1, 1),
          *before = random_floats((size_t)(n * all) + 1, 0.5f), *late = random_floats((size_t)(n * all) + 1, 0.5f), *mixes = malloc(of_mixes * 4 + 4), *y = malloc(of_y * 4 + 4);
    float *dx = on_device(x, values * 4), *again = on_device(x, values * 4), *db = on_device(branch, of_y * 4),
          *dl = on_device(before, (size_t)(n * all) * 4), *de = on_device(late, (size_t)(n * all) * 4),
          *dm = output_on_device(of_mixes), *dy = output_on_device(of_y), *dn = on_device(norm, (size_t)t.hidden * 4);
    const HyperWeights host = {fn, base, scale},
                       device = {on_gpu, on_device(base, (size_t)n_mixes * 4), on_device(scale, sizeof scale)};
    PassReport nothing = {.bad_row = -1, .bad_place = -1}, report = nothing;
    PassReport *dr = on_device(&nothing, sizeof nothing);
    if (t.branch && n > 2) branch[of_y - 1] = NAN, cuda_backend.copy_bytes(db, branch, of_y * 4);
    const size_t good = t.branch && n > 2 ? (size_t)(n - 1) : (size_t)n;
    c_backend.mix_streams(y, x, t.branch ? branch : NULL, before, mixes, t.weights ? &host : NULL, t.own ? mixes : late, norm, n,
                          &config, &report, 7);
    cuda_backend.mix_streams(dy, dx, t.branch ? db : NULL, dl, dm, t.weights ? &device : NULL, t.own ? dm : de, dn, n, &config, dr,
                             7);
    float *got = from_device(dx, values * 4), *got_y = from_device(dy, (of_y + TEST_TAIL) * 4),
          *got_mixes = from_device(dm, (of_mixes + TEST_TAIL) * 4);
    PassReport *told = from_device(dr, sizeof *told);
    CHECK(told->bad_row == report.bad_row && told->bad_place == report.bad_place, "%s: reports row %d, place %d; wanted %d, %d",
          name, told->bad_row, told->bad_place, report.bad_row, report.bad_place);
    compare(name, got, x, good * (size_t)width, 1e-6);
    compare(name, got_y, y, good * (size_t)t.hidden, 1e-5);
    if (t.weights) compare(name, got_mixes, mixes, good * (size_t)n_mixes, 1e-5);
    size_t beyond = 0;
    for (int i = 0; i < TEST_TAIL; i++)
        beyond += float_to_bits(got_y[of_y + (size_t)i]) != ~0u || float_to_bits(got_mixes[of_mixes + (size_t)i]) != ~0u;
    CHECK(!beyond, "%s: written beyond", name);
    for (size_t r = 0; r < good; r += 1 + good / 5) {
        float *own = dm + r * (size_t)n_mixes, *streams = again + r * (size_t)width;
        cuda_backend.mix_streams(dy, streams, t.branch ? db + r * (size_t)t.hidden : NULL, dl + r * (size_t)all, own,
                                 t.weights ? &device : NULL, t.own ? own : de + r * (size_t)all, dn, 1, &config, dr, 7);
        float *alone = from_device(dy, (size_t)t.hidden * 4), *mix = from_device(own, (size_t)n_mixes * 4),
              *stream = from_device(streams, (size_t)width * 4);
        CHECK(!memcmp(alone, got_y + r * (size_t)t.hidden, (size_t)t.hidden * 4)
                  && !memcmp(stream, got + r * (size_t)width, (size_t)width * 4)
                  && (!t.weights || !memcmp(mix, got_mixes + r * (size_t)n_mixes, (size_t)n_mixes * 4)),
              "%s: row %zu alone has other bits", name, r);
        free(alone), free(mix), free(stream);
    }
    if (t.branch) {                                 /* nothing enters a sublayer */
        cuda_backend.copy_bytes(dx, got, values * 4);
        float *copy = malloc(values * 4 + 4);
        memcpy(copy, got, values * 4);
        c_backend.mix_streams(NULL, copy, branch, before, NULL, NULL, NULL, NULL, n, &config, &report, 8);
        cuda_backend.mix_streams(NULL, dx, db, dl, NULL, NULL, NULL, NULL, n, &config, dr, 8);
        float *left = from_device(dx, values * 4);
        compare(name, left, copy, good * (size_t)width, 1e-6);
        free(copy), free(left);
    }
    free(base), free(norm), free(x), free(branch), free(before), free(late), free(mixes), free(y), free(got), free(got_y),
        free(got_mixes), free(told);
    free_weights(&fn);
    free_kept();
}

static void test_streams(void) {
    static const int shapes[][2] = {{4, 4096}, {4, 5120}, {4, 64}, {4, 20}, {2, 36}, {1, 128}, {8, 260}, {3, 7}, {4, 9000}},
                     counts[] = {0, 1, 2, 5, 33, 90};
    for (int s = 0; s < 9; s++)
        for (int c = 0; c < 6; c++) {
            const int mult = shapes[s][0], hidden = shapes[s][1], n = counts[c];
            check_streams((StreamCase){mult, hidden, n, true, true, false, true, DTYPE_F32});
            check_streams((StreamCase){mult, hidden, n, false, true, false, false, DTYPE_F32});
            if (s % 2) check_streams((StreamCase){mult, hidden, n, true, true, false, false, DTYPE_BF16});
            check_streams((StreamCase){mult, hidden, n, true, true, true, true, DTYPE_F32});
            check_streams((StreamCase){mult, hidden, n, true, false, false, false, DTYPE_F32});
            Config config = {.hc_mult = mult};
            const size_t mixes = (size_t)(n * (2 + mult) * mult);
            float *wanted = malloc(mixes * 4 + 4), *first = output_on_device(mixes);
            c_backend.first_stream(wanted, n, &config);
            cuda_backend.first_stream(first, n, &config);
            float *got = fetch_output(first, mixes, "first_stream");
            CHECK(!memcmp(got, wanted, mixes * 4), "first_stream: %d rows", n);
            free(wanted), free(got);
            free_kept();
        }
}

static void test_engram(void) {
    for (int trial = 0; trial < 30; trial++) {
        const int mult = draw_between(1, 4), hidden = trial % 3 ? draw_between(1, 300) : 5120, n = trial % 6;
        const Config config = {.hc_mult = mult, .hidden_size = hidden, .rms_norm_eps = trial % 2 ? 1e-20f : 1e-6f};
        const size_t width = (size_t)(mult * hidden), values = (size_t)n * width, keys = (size_t)(n * (mult + 1) * hidden);
        float *x = random_floats(values + 1, 1), *kv = random_floats(keys + 1, 1), *q = random_floats(width, 1),
              *k = random_floats(width, 1), *dx = on_device(x, values * 4), *again = on_device(x, values * 4),
              *dk = on_device(kv, keys * 4);
        const EngramWeights host = {.q_weight = q, .k_weight = k},
                            device = {.q_weight = on_device(q, width * 4), .k_weight = on_device(k, width * 4)};
        c_backend.add_engram(x, kv, &host, n, &config);
        cuda_backend.add_engram(dx, dk, &device, n, &config);
        float *got = from_device(dx, values * 4);
        compare("add_engram", got, x, values, 1e-5);
        for (int r = 0; r < n; r++)
            cuda_backend.add_engram(again + (size_t)r * width, dk + (size_t)(r * (mult + 1) * hidden), &device, 1, &config);
        float *alone = from_device(again, values * 4);
        CHECK(!memcmp(alone, got, values * 4), "add_engram: rows alone");
        free(x), free(kv), free(q), free(k), free(got), free(alone);
        free_kept();
    }
}

static void check_route_softplus(Config config, int n, bool listed) {
    enum { VOCAB = 50 };
    const int experts = config.n_routed_experts, k = config.num_experts_per_tok;
    const size_t values = (size_t)n * (size_t)experts, chosen = (size_t)n * (size_t)k;
    float *logits = random_floats(values + 1, 8), *bias = random_floats((size_t)experts, 0.3f), *weights = malloc(chosen * 4 + 4);
    int *picks = malloc(chosen * 4 + 4), *table = malloc((size_t)(VOCAB * k) * 4), wrong = 0;
    Row *rows = calloc((size_t)n + 1, sizeof *rows);
    for (int i = 0; i < VOCAB * k; i++) table[i] = draw_between(0, experts - 1);
    for (int r = 0; r < n; r++) rows[r].token = draw_between(0, VOCAB - 1);
    for (size_t i = 0; i < values; i += 7) logits[i] *= 20;
    if (n > 2) logits[experts + 1] = NAN;
    int *dp = on_device(NULL, chosen * 4), *dt = on_device(table, (size_t)(VOCAB * k) * 4);
    Row *rows_gpu = on_device(rows, (size_t)n * sizeof *rows);
    float *dw = output_on_device(chosen), *dl = on_device(logits, values * 4), *db = on_device(bias, (size_t)experts * 4);
    c_backend.route_softplus(picks, weights, logits, listed ? NULL : bias, listed ? table : NULL, rows, n, &config);
    cuda_backend.route_softplus(dp, dw, dl, listed ? NULL : db, listed ? dt : NULL, rows_gpu, n, &config);
    float *w = fetch_output(dw, chosen, "route_softplus");
    int *p = from_device(dp, chosen * 4);
    for (size_t i = 0; i < chosen; i++)
        wrong += p[i] != picks[i]
                 || (!(fabsf(w[i] - weights[i]) <= 1e-5f * fabsf(weights[i]) + 1e-30f) && !(isnan(w[i]) && isnan(weights[i])));
    CHECK(!wrong, "route_softplus: %d of %zu picks are wrong; %d experts, %d rows", wrong, chosen, experts, n);
    for (int r = 0; r < n; r += 1 + n / 6) {
        cuda_backend.route_softplus(dp, dw, dl + (size_t)r * (size_t)experts, listed ? NULL : db, listed ? dt : NULL,
                                    rows_gpu + r, 1, &config);
        float *alone = from_device(dw, (size_t)k * 4);
        int *alone_picks = from_device(dp, (size_t)k * 4);
        CHECK(!memcmp(alone, w + r * k, (size_t)k * 4) && !memcmp(alone_picks, p + r * k, (size_t)k * 4),
              "route_softplus: row %d of %d alone", r, n);
        free(alone), free(alone_picks);
    }
    free(logits), free(bias), free(weights), free(picks), free(table), free(rows), free(w), free(p);
    free_kept();
}

static void test_route_softplus(void) {
    static const int shapes[][3] = {{8, 2, 1}, {12, 3, 0}, {256, 6, 1}, {384, 6, 1}, {4096, 16, 0}};
    for (int s = 0; s < 5; s++)
        for (int n = 0; n <= 40; n = n ? n * 3 + 1 : 1)
            for (int listed = 0; listed < 2; listed++) {
                Config config;
                memset(&config, 0, sizeof config);
                config.n_routed_experts = shapes[s][0], config.num_experts_per_tok = shapes[s][1];
                config.norm_topk_prob = shapes[s][2], config.routed_scaling_factor = 1.5f;
                check_route_softplus(config, n, listed);
            }
}

static void test_grouped_linear(void) {
    static const int shapes[][3] = {{2, 8, 12}, {8, 128, 512}, {4, 33, 64}, {8, 64, 4096}, {3, 160, 256}};
    static const int counts[] = {0, 1, 5, 17, 70};
    for (int t = 0; t < 4; t++)
        for (int s = 0; s < 5; s++)
            for (int c = 0; c < 5; c++) {
                const int groups = shapes[s][0], rank = shapes[s][1], cols = shapes[s][2], n = counts[c];
                const size_t in = (size_t)(groups * cols), out = (size_t)(groups * rank);
                Matrix w = random_matrix(weight_types[t], groups * rank, cols, 0), device = matrix_on_device(&w);
                float *x = random_floats((size_t)n * in + 1, 1), *y = malloc((size_t)n * out * 4 + 4),
                      *dx = on_device(x, (size_t)n * in * 4), *dy = output_on_device((size_t)n * out),
                      *one = output_on_device(out);
                c_backend.grouped_linear(y, x, n, &w, groups);
                cuda_backend.grouped_linear(dy, dx, n, &device, groups);
                float *got = fetch_output(dy, (size_t)n * out, "grouped_linear");
                compare("grouped_linear", got, y, (size_t)n * out, product_bound(weight_types[t]));
                for (int r = 0; r < n; r += 1 + n / 3) {
                    cuda_backend.grouped_linear(one, dx + (size_t)r * in, 1, &device, groups);
                    float *alone = from_device(one, out * 4);
                    CHECK(!memcmp(alone, got + (size_t)r * out, out * 4), "grouped_linear: row %d of %d alone", r, n);
                    free(alone);
                }
                free(x), free(y), free(got);
                free_weights(&w);
                free_kept();
            }
}

/* e4m3 in blocks of 32 x 32, wherever it may stand. */
static void test_small_blocks(void) {
    static const int shapes[][2] = {{8, 12}, {33, 48}, {64, 128}, {100, 256}, {257, 384}, {2049, 512}, {40, 5120}, {1280, 5120}};
    test_block = SMALL_TEST_BLOCK;
    for (int s = 0; s < 8; s++)
        for (int first_row = 0; first_row < 3; first_row++) {
            const int first = (int[]){0, 64, 37}[first_row];
            check_linear(DTYPE_F8_E4M3, "e4m3 of 32", shapes[s][0], shapes[s][1], 70, 0, 0, first);
            if (s > 1) check_many_rows(DTYPE_F8_E4M3, "e4m3 of 32", shapes[s][0], shapes[s][1], first_row * 4, first);
        }
    test_grouped_linear();
    test_embed();
    static const int experts[][4] = {{4, 2, 8, 12}, {8, 2, 256, 384}, {12, 4, 512, 256}, {16, 6, 1024, 2304}};
    static const int rows[] = {0, 1, 2, 9, 60};
    for (int s = 0; s < 4; s++)
        for (int r = 0; r < 5; r++)
            for (int qat = 0; qat < 2; qat++) {
                Config config;
                memset(&config, 0, sizeof config);
                config.n_routed_experts = experts[s][0], config.num_experts_per_tok = experts[s][1];
                config.hidden_size = experts[s][2], config.moe_intermediate_size = experts[s][3];
                config.weight_block = test_block, config.qat = qat, config.swiglu_limit = 1;
                check_experts(DTYPE_F8_E4M3, "e4m3 of 32", config, rows[r], experts[s][3], DTYPE_F8_E4M3);
                check_experts(DTYPE_F4_E2M1, "e2m1", config, rows[r], experts[s][3], DTYPE_F8_E4M3);
                check_experts(DTYPE_BF16, "bf16", config, rows[r], experts[s][3], DTYPE_F8_E4M3);
                check_experts(DTYPE_F4_E2M1, "e2m1", config, rows[r], 2 * experts[s][3], DTYPE_F8_E4M3);
            }
    test_block = SCALE_BLOCK;
}

/* ---- windows */

typedef struct WindowCase { int heads; RowFormat trail, pool; double bound; } WindowCase;

/* A pass of several sessions, each with some rows that follow each other: all at once, and each row alone. */
static void check_window(const WindowCase *t, int window, int capacity, int n, bool listed, bool alone_too) {
    enum { SESSIONS = 40, POOL = 700, STAGED = 50 };
    const int width = t->trail.quantised + t->trail.plain, turned = width / 8 * 2, half = turned / 2, heads = t->heads,
              length = window + 7, pool_rows = listed ? POOL : SESSIONS * capacity;
    void *ring_copy, *pass_copy, *pool_copy, *staging_copy;
    uint8_t *ring = random_pool(&t->trail, SESSIONS * length, &ring_copy), *pass = random_pool(&t->trail, n + 1, &pass_copy),
            *pool = random_pool(&t->pool, pool_rows + 1, &pool_copy), *staging = random_pool(&t->pool, STAGED, &staging_copy);
    Row *rows = calloc((size_t)n + 1, sizeof *rows);
    int *count = calloc((size_t)n + 1, sizeof *count);
    DeviceRow *locations = malloc((size_t)(n * capacity + 1) * sizeof *locations);
    for (int r = 0, left = 0, session = -1; r < n; r++, left--) {
        if (!left) left = draw_between(1, 9), session = (session + 1) % SESSIONS, rows[r].position = draw_between(0, 3 * window);
        else rows[r].position = rows[r - 1].position + 1;
        rows[r].session = session;
        count[r] = draw() % 3 ? draw_between(0, capacity) : capacity;
        for (int i = 0; i < capacity; i++)
            locations[r * capacity + i].id = i < count[r] ? draw_between(0, pool_rows + STAGED - 1) : -1;
    }
    const size_t values = (size_t)(n * heads * width), angles = (size_t)(n * half), one = (size_t)(heads * width);
    float *q = random_floats(values + 1, 1), *y = calloc(values + 1, 4), *sinks = random_floats((size_t)heads, 2),
          *cosine = random_floats(angles + 1, 1), *sine = random_floats(angles + 1, 1);
    const Trail host = {length, t->trail.stride, ring, pass}, device = {length, t->trail.stride, ring_copy, pass_copy};
    const RowPool on_cpu = {pool, staging, pool_rows}, on_gpu = {pool_copy, staging_copy, pool_rows};
    const float scale = 1 / sqrtf((float)width), eps = draw() % 2 ? -1 : 1e-6f;
    float *y_gpu = output_on_device(values), *q_gpu = on_device(q, values * 4), *q_again = on_device(q, values * 4),
          *sinks_gpu = on_device(sinks, (size_t)heads * 4),
          *cosine_gpu = on_device(cosine, angles * 4), *sine_gpu = on_device(sine, angles * 4);
    c_backend.window_attention(y, q, &host, &t->trail, window, capacity ? &on_cpu : NULL, &t->pool, listed ? locations : NULL,
                               capacity ? count : NULL, capacity, rows, 0, n, heads, sinks, scale, eps, turned, cosine, sine);
    DeviceRow *ids = on_device(locations, (size_t)(n * capacity) * sizeof *locations);
    int *count_gpu = on_device(count, (size_t)n * sizeof *count);
    Row *rows_gpu = on_device(rows, (size_t)n * sizeof *rows);
    cuda_backend.window_attention(y_gpu, q_gpu, &device, &t->trail, window, capacity ? &on_gpu : NULL, &t->pool,
                                  listed ? ids : NULL, capacity ? count_gpu : NULL, capacity, rows_gpu, 0, n, heads, sinks_gpu,
                                  scale, eps, turned, cosine_gpu, sine_gpu);
    float *got = fetch_output(y_gpu, values, "window_attention");
    const double off = distance(got, y, values);
    CHECK(off <= t->bound, "window_attention: %d heads of %d, dtypes %d %d, window %d, %d rows of %d%s: off by %g", heads, width,
          t->trail.dtype, t->pool.dtype, window, n, capacity, listed ? " selected" : "", off);
    for (int r = 0, step = alone_too ? 1 : 1 + n / 4; r < n; r += step) {
        const int end = r + 1 + (int)(draw() % 2) * 3 < n ? r + 1 + (int)(draw() % 2) * 3 : r + 1;
        const size_t size = (size_t)((end < n ? end : n) - r) * one;
        cuda_backend.copy_bytes(q_gpu, q_again, values * 4);
        cuda_backend.window_attention(y_gpu, q_gpu, &device, &t->trail, window, capacity ? &on_gpu : NULL, &t->pool,
                                      listed ? ids : NULL, capacity ? count_gpu : NULL, capacity, rows_gpu, r, end < n ? end : n,
                                      heads, sinks_gpu, scale, eps, turned, cosine_gpu, sine_gpu);
        float *alone = from_device(y_gpu + (size_t)r * one, size * 4);
        CHECK(!memcmp(alone, got + (size_t)r * one, size * 4),
              "window_attention: %d heads of %d, dtypes %d %d: row %d of %d with few others has other bits", heads, width,
              t->trail.dtype, t->pool.dtype, r, n);
        free(alone);
    }
    free_device(ring_copy), free_device(pass_copy), free_device(pool_copy), free_device(staging_copy);
    free(ring), free(pass), free(pool), free(staging), free(rows), free(count), free(locations), free(q), free(y), free(sinks),
        free(cosine), free(sine), free(got);
    free_kept();
}

static void test_windows(void) {
    const RowFormat bf16 = row_format(KV_BF16, 448, 64, 64), v4 = scaled_row_format(KV_F8, 448, 64, 64, SCALES_E8M0),
                    v41 = scaled_row_format(KV_F8, 512, 0, 32, SCALES_E8M0),
                    four = scaled_row_format(KV_F4, 512, 0, 16, SCALES_E4M3), wide = row_format(KV_F32, 512, 0, 32);
    const WindowCase cases[] = {
        {64, bf16, bf16, 8e-3}, {64, v4, v4, 8e-3}, {64, v41, v41, 8e-3}, {64, v41, four, 8e-3}, {20, v41, four, 8e-3},
        {100, bf16, bf16, 8e-3}, {16, wide, wide, 1e-4},
        {4, row_format(KV_F32, 24, 8, 8), row_format(KV_F32, 24, 8, 8), 1e-4},
        {5, scaled_row_format(KV_F8, 24, 8, 8, SCALES_E8M0), scaled_row_format(KV_F8, 24, 8, 8, SCALES_E8M0), 1e-4},
        {9, scaled_row_format(KV_F8, 64, 0, 32, SCALES_E8M0), scaled_row_format(KV_F4, 64, 0, 16, SCALES_E4M3), 1e-4},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        check_window(&cases[i], 128, 512, 6, true, true);
        check_window(&cases[i], 128, 512, 90, true, false);
        check_window(&cases[i], 128, 0, 50, false, false);
        check_window(&cases[i], 100, 37, 70, false, false);
        check_window(&cases[i], 8, 300, 17, true, true);
        check_window(&cases[i], 64, 1, 1, true, true);
        check_window(&cases[i], 0, 40, 30, true, true);
        check_window(&cases[i], 0, 300, 9, true, true);
        check_window(&cases[i], 64, 1, 0, true, true);
    }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * The hierarchy's operations
 */

/* The same cache twice: in C, and on the device. Both have the same bytes everywhere. */
typedef struct Twins {
    Cache c, gpu;
    PassReport c_report, *gpu_report;
    uint8_t *host;              /* MEMORY_HOST, read by both */
} Twins;

static void *twin_table(void *c_field, void *gpu_field, const void *values, size_t bytes) {
    void *copy = malloc(bytes + 64);
    memcpy(copy, values, bytes);
    void *device = to_device(values, bytes);
    memcpy(c_field, &copy, sizeof copy);
    memcpy(gpu_field, &device, sizeof device);
    return copy;
}

/* A table of n page ids, which begin at `first` or are 0 with probability `none`. Returns the next free id. */
static int random_pages(void *c_field, void *gpu_field, size_t n, int first, double none) {
    int32_t *pages = malloc(n * sizeof *pages + 64);
    for (size_t i = 0; i < n; i++) pages[i] = chance(none) ? 0 : first++;
    twin_table(c_field, gpu_field, pages, n * sizeof *pages);
    free(pages);
    return first;
}

static Twins make_twins(int sessions, int context, int groups, int k, int hot_rows, Lookup lookup, double not_ready) {
    Twins t = {0};
    Cache *c = &t.c, *g = &t.gpu;
    static int group_of[2] = {0, 1}, member_of[2] = {0, 0};
    c->lookup = lookup;
    c->ratio = 1;
    c->sessions = sessions, c->context = context, c->sources = 1, c->groups = groups;
    c->group_of = group_of, c->member_of = member_of;
    c->index_topk = k, c->hot_rows = hot_rows, c->live_sources = 1;
    c->staging_blocks = sessions, c->staging_rows = QUERY_BLOCK * k;
    c->context_pages = (context + PAGE_ROWS - 1) / PAGE_ROWS, c->hot_pages = (hot_rows + PAGE_ROWS - 1) / PAGE_ROWS;
    c->tail_ring = 4;
    c->format = row_format(KV_F8, 40, 12, 16);
    *g = *c;
    size_t n = (size_t)sessions, pages = n * (size_t)c->context_pages, states = n * (size_t)groups,
           slots = states * (size_t)hot_rows;
    int *tail_base = malloc(n * sizeof(int));
    for (int s = 0; s < sessions; s++) {
        tail_base[s] = (context - 1) / PAGE_ROWS * PAGE_ROWS - draw_between(0, 2) * PAGE_ROWS;
        if (tail_base[s] < 0) tail_base[s] = 0;
    }
    twin_table(&c->seen.tail_base, &g->seen.tail_base, tail_base, n * sizeof(int));
    free(tail_base);
    int next = random_pages(&c->seen.tail, &g->seen.tail, n * (size_t)c->tail_ring, 1, 0);
    next = random_pages(&c->seen.ready, &g->seen.ready, pages, next, not_ready);
    next = random_pages(&c->seen.hot, &g->seen.hot, n * (size_t)c->hot_pages + 1, next, 0);
    c->device_pages.n_pages = g->device_pages.n_pages = next;
    c->host_pages.n_pages = g->host_pages.n_pages = random_pages(&c->seen.host, &g->seen.host, pages, 1, 0);
    random_pages(&c->seen.index, &g->seen.index, pages, 1, 0);
    c->tables = c->seen;                            /* which of the two C reads for the host's pages does not matter here */
    void *zero = calloc(states * (size_t)c->context_pages * PAGE_ROWS + slots + 64, sizeof(uint32_t));
    twin_table(&c->slots.clock, &g->slots.clock, zero, states * sizeof(uint32_t));
    twin_table(&c->slots.stamp, &g->slots.stamp, zero, slots * sizeof(uint32_t));
    twin_table(&c->slots.slot_of, &g->slots.slot_of, zero, states * (size_t)c->context_pages * PAGE_ROWS * sizeof(uint16_t));
    memset(zero, 0xff, slots * sizeof(int32_t));
    twin_table(&c->slots.tag, &g->slots.tag, zero, slots * sizeof(int32_t));
    free(zero);
    c->bits = calloc((size_t)c->context_pages + 1, sizeof *c->bits);
    c->ranks = calloc((size_t)c->context_pages + 1, sizeof *c->ranks);
    c->missing = calloc((size_t)c->staging_rows + 1, sizeof(int32_t));
    c->places = calloc((size_t)c->staging_rows + 1, sizeof(int32_t));
    c->victims = calloc((size_t)hot_rows + 1, sizeof(int32_t));
    t.gpu_report = to_device(&t.c_report, sizeof t.c_report);
    return t;
}

/* As in DeepSeek-V4.1: each group has a source of its own, and a row of the first is of two positions. */
static Twins stretched(Twins t) {
    static int stretch[] = {2, 1}, rows_before[] = {0, PAGE_ROWS / 2, PAGE_ROWS / 2 + PAGE_ROWS};
    t.c.sources = t.gpu.sources = t.c.groups;
    t.c.stretch = t.gpu.stretch = stretch;
    t.c.rows_before = t.gpu.rows_before = rows_before;
    return t;
}

/* Memory for the rows of the sources: only where it is small. */
static void give_rows(Twins *t) {
    Cache *c = &t->c, *g = &t->gpu;
    const size_t bundle = rows_before(c, c->sources) * c->format.stride;
    size_t host = (size_t)c->host_pages.n_pages * bundle, pool = (size_t)c->device_pages.n_pages * bundle,
           staging = (size_t)c->staging_blocks * (size_t)c->staging_rows * c->format.stride;
    t->host = host_block(host);
    for (size_t i = 0; i < host; i++) t->host[i] = (uint8_t)(draw() >> 20);
    c->host = g->host = t->host;
    void *rows = malloc(pool > staging ? pool : staging);
    memset(rows, 0xee, pool > staging ? pool : staging);
    twin_table(&c->device, &g->device, rows, pool);
    twin_table(&c->staging, &g->staging, rows, staging);
    free(rows);
}

static void free_twins(Twins *t) {
    Cache *c = &t->c, *g = &t->gpu;
    void *mine[] = {c->seen.tail_base, c->seen.tail, c->seen.ready, c->seen.hot, c->seen.index, c->seen.host, c->slots.clock,
                    c->slots.stamp, c->slots.slot_of, c->slots.tag, c->bits, c->ranks, c->missing, c->places, c->victims,
                    c->device, c->staging};
    void *theirs[] = {g->seen.tail_base, g->seen.tail, g->seen.ready, g->seen.hot, g->seen.index, g->seen.host, g->slots.clock,
                      g->slots.stamp, g->slots.slot_of, g->slots.tag, g->device, g->staging, t->gpu_report};
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++) free(mine[i]);
    for (size_t i = 0; i < sizeof theirs / sizeof *theirs; i++)
        if (theirs[i]) free_device(theirs[i]);
    if (t->host) free_host(t->host);
}

/* Rows of a pass in two runs, each with some sessions once; ends[] of the runs. Returns how many rows. */
static int random_pass(Row *rows, int ends[2], const Cache *cache, int most) {
    int n = 0;
    for (int run = 0; run < 2; run++) {
        for (int s = 0; s < cache->sessions; s++) {
            if (chance(0.3)) continue;
            int own = chance(0.4) ? 1 : draw_between(1, most), first = cache->context - own - draw_between(0, 3);
            for (int i = 0; i < own; i++) rows[n++] = (Row){s, first + i < 0 ? 0 : first + i, 0};
        }
        ends[run] = n;
    }
    return n;
}

/* Ascending selections from a few favourites of each session, so that rounds and rows overlap. */
static void random_selection(int *ids, const Row *rows, int n, int k, int favourites) {
    for (int r = 0; r < n; r++) {
        int count = 0, last = -1, wanted = chance(0.1) ? 0 : chance(0.2) ? draw_between(1, k) : k;
        for (int j = 0; j < favourites && count < wanted; j++) {
            int position = (int)((int64_t)rows[r].position * j / favourites) + (int)chance(0.2);
            if (position <= last || position > rows[r].position || !chance(1.2 * wanted / favourites)) continue;
            ids[r * k + count++] = last = position;
        }
        for (; count < k; count++) ids[r * k + count] = -1;
    }
}

static bool same_on_device(const void *device, const void *values, size_t bytes) {
    void *copy = from_device(device, bytes);
    bool same = !memcmp(copy, values, bytes);
    free(copy);
    return same;
}

/* The device's plan, whose entries lie where their blocks begin, is that of C, one list. */
static bool same_plans(const MissPlan *c, const MissPlan *gpu, int n, int k) {
    int *count = from_device(gpu->count, (size_t)n * sizeof(int)), at = 0;
    HostRow *from = from_device(gpu->from, (size_t)n * (size_t)k * sizeof *from);
    DeviceRow *to = from_device(gpu->to, (size_t)n * (size_t)k * sizeof *to);
    bool same = true;
    for (int r = 0; r < n && same; r++)
        for (int i = 0; i < count[r]; i++, at++)
            same &= from[r * k + i].id == c->from[at].id && to[r * k + i].id == c->to[at].id;
    same &= at == c->count[0] + c->count[1];
    free(count), free(from), free(to);
    return same;
}

static bool same_rows(const uint8_t *device, const uint8_t *rows, size_t n, const RowFormat *format) {
    uint8_t *copy = from_device(device, n * format->stride);
    bool same = true;
    for (size_t i = 0; i < n; i++) same &= !memcmp(copy + i * format->stride, rows + i * format->stride, format->bytes);
    free(copy);
    return same;
}

static void check_hot_tables(const Twins *t, const char *name, int round) {
    const Cache *c = &t->c, *g = &t->gpu;
    size_t states = (size_t)c->sessions * (size_t)c->groups, slots = states * (size_t)c->hot_rows;
    CHECK(same_on_device(g->slots.clock, c->slots.clock, states * sizeof(uint32_t)), "%s %d: clocks", name, round);
    CHECK(same_on_device(g->slots.tag, c->slots.tag, slots * sizeof(int32_t)), "%s %d: tags", name, round);
    CHECK(same_on_device(g->slots.stamp, c->slots.stamp, slots * sizeof(uint32_t)), "%s %d: stamps", name, round);
    CHECK(same_on_device(g->slots.slot_of, c->slots.slot_of, states * (size_t)c->context_pages * PAGE_ROWS * sizeof(uint16_t)),
          "%s %d: the array of slots", name, round);
}

/* Resolves and fetches one pass in both; most: rows of a session at most. */
static void twin_pass(Twins *t, const char *name, int round, int most, int favourites) {
    Cache *c = &t->c, *g = &t->gpu;
    const int k = c->index_topk, group = draw_between(0, c->groups - 1);
    const SourceId source = {c->stretch ? group : 0};
    Row rows[MAX_PASS_ROWS], newest[MAX_PASS_ROWS];
    int ends[2], n = random_pass(rows, ends, c, most);
    const size_t entries = (size_t)n * (size_t)k;
    int *ids = malloc(entries * sizeof(int) + 64), counts[MAX_PASS_ROWS + 2] = {0};
    for (int r = 0; r < n; r++) newest[r] = (Row){rows[r].session, (rows[r].position + 1) / stretch_of(c, group) - 1, 0};
    random_selection(ids, newest, n, k, favourites);
    DeviceRow *locations = malloc(entries * sizeof *locations + 64);
    MissPlan plan = {malloc(entries * sizeof(HostRow) + 64), malloc(entries * sizeof(DeviceRow) + 64), counts, (int)entries};
    MissPlan device_plan = {to_device(NULL, entries * sizeof(HostRow)), to_device(NULL, entries * sizeof(DeviceRow)),
                            to_device(NULL, (size_t)n * sizeof(int)), (int)entries};
    Selection selection = {ids, NULL, k}, device_selection = {to_device(ids, entries * sizeof(int)), NULL, k};
    DeviceRow *device_locations = to_device(NULL, entries * sizeof(DeviceRow));
    Row *device_rows = to_device(rows, (size_t)n * sizeof(Row));
    for (int run = 0, begin = 0; run < 2; begin = ends[run++]) {
        c_backend.resolve(c, group, &selection, rows, begin, ends[run], run, locations, &plan, &t->c_report);
        cuda_backend.resolve(g, group, &device_selection, device_rows, begin, ends[run], run, device_locations, &device_plan,
                             t->gpu_report);
        if (!c->device) continue;
        c_backend.fetch_rows(c, source, &plan, rows, begin, ends[run], run, &t->c_report);
        cuda_backend.fetch_rows(g, source, &device_plan, device_rows, begin, ends[run], run, t->gpu_report);
    }
    CHECK(same_on_device(device_locations, locations, entries * sizeof(DeviceRow)), "%s %d: locations", name, round);
    CHECK(poison_behind(device_locations, entries * sizeof(DeviceRow)), "%s %d: behind the locations", name, round);
    if (c->hot_rows) {
        CHECK(same_plans(&plan, &device_plan, n, k), "%s %d: plans", name, round);
        CHECK(poison_behind(device_plan.count, (size_t)n * sizeof(int)), "%s %d: behind the counts", name, round);
        check_hot_tables(t, name, round);
    }
    CHECK(same_on_device(t->gpu_report, &t->c_report, sizeof t->c_report), "%s %d: the report", name, round);
    if (c->device) {
        CHECK(same_rows(g->device, c->device, (size_t)c->device_pages.n_pages * rows_before(c, c->sources), &c->format),
              "%s %d: rows", name, round);
        CHECK(same_rows(g->staging, c->staging, (size_t)c->staging_blocks * (size_t)c->staging_rows, &c->format),
              "%s %d: staged rows", name, round);
    }
    free(ids), free(locations), free(plan.from), free(plan.to);
    free_device(device_plan.from), free_device(device_plan.to), free_device(device_plan.count);
    free_device(device_selection.ids), free_device(device_locations), free_device(device_rows);
}

static void twin_passes(const char *name, Twins t, int rounds, int most, int favourites, bool fetch) {
    if (fetch) give_rows(&t);
    for (int round = 0; round < rounds; round++) {
        if (round == rounds / 2) c_backend.forget_hot(&t.c, 0), cuda_backend.forget_hot(&t.gpu, 0);
        twin_pass(&t, name, round, most, favourites);
    }
    if (t.c.hot_rows) CHECK(t.c_report.picked[TIER_HOT] && t.c_report.picked[TIER_HOST], "%s: finds hot rows and misses", name);
    CHECK(strncmp(name, "overflow", 8) || t.c_report.staged, "%s: stages rows", name);
    free_twins(&t);
}

static void test_resolve(void) {
    Twins none = make_twins(2, 100, 1, 8, 16, LOOKUP_DIRECT, 0.5);
    MissPlan plan = {0};
    Selection selection = {.capacity = 8};
    cuda_backend.resolve(&none.gpu, 0, &selection, NULL, 3, 3, 0, NULL, &plan, none.gpu_report);
    cuda_backend.fetch_rows(&none.gpu, (SourceId){0}, &plan, NULL, 3, 3, 0, none.gpu_report);
    CHECK(same_on_device(none.gpu_report, &none.c_report, sizeof none.c_report), "an empty run changes nothing");
    free_twins(&none);
    twin_passes("small", make_twins(3, 300, 2, 12, 24, LOOKUP_DIRECT, 0.6), 40, 8, 60, true);
    twin_passes("small scan", make_twins(3, 300, 2, 12, 24, LOOKUP_SCAN, 0.6), 40, 8, 60, true);
    twin_passes("overflow", make_twins(4, 1000, 1, 20, 20, LOOKUP_DIRECT, 0.9), 20, 8, 300, true);
    twin_passes("overflow scan", make_twins(4, 1000, 1, 20, 21, LOOKUP_SCAN, 0.9), 20, 8, 300, true);
    twin_passes("stretched", stretched(make_twins(3, 600, 2, 12, 24, LOOKUP_DIRECT, 0.6)), 40, 8, 60, true);
    twin_passes("stretched scan", stretched(make_twins(3, 600, 2, 12, 24, LOOKUP_SCAN, 0.6)), 40, 8, 60, true);
    twin_passes("stretched, odd", stretched(make_twins(4, 1900, 2, 20, 140, LOOKUP_DIRECT, 0.9)), 30, 8, 300, true);
    twin_passes("overflow, stretched", stretched(make_twins(4, 2000, 2, 20, 40, LOOKUP_SCAN, 0.9)), 20, 8, 300, true);
    twin_passes("resident, stretched", stretched(make_twins(3, 500, 2, 16, 0, LOOKUP_DIRECT, 0.0)), 10, 40, 60, false);
    twin_passes("beyond the bitmap, stretched", stretched(make_twins(2, 8000000, 2, 256, 600, LOOKUP_DIRECT, 0.9)), 6, 8, 1500,
                false);
    twin_passes("resident", make_twins(3, 500, 1, 16, 0, LOOKUP_DIRECT, 0.0), 10, 40, 60, false);
    twin_passes("large", make_twins(16, 40000, 2, 512, 1024, LOOKUP_DIRECT, 0.7), 12, 4, 2500, false);
    twin_passes("large scan", make_twins(16, 40000, 2, 512, 1024, LOOKUP_SCAN, 0.7), 6, 4, 2500, false);
    twin_passes("wide", make_twins(2, 200000, 1, 2048, 4096, LOOKUP_DIRECT, 0.8), 8, 8, 9000, false);
    twin_passes("beyond the bitmap", make_twins(2, 5000000, 1, 256, 300, LOOKUP_DIRECT, 0.9), 6, 8, 1500, false);
    twin_passes("beyond the bitmap, scan", make_twins(2, 5000000, 1, 256, 300, LOOKUP_SCAN, 0.9), 6, 8, 1500, false);
}

/* Puts some milliseconds of work on the stream: a pass that is still in flight when what comes next is asked for. */
static void put_long_work(const void *block, size_t bytes, unsigned *sum) {
    for (int i = 0; i < 100; i++) cuda_read(block, bytes, sum);
}

/* A copy of a page begins when all passes that were asked for before it are over: a page that history is lent, or a tail takes,
 * may still be read by the last of them, and a page that is backed up still be written. */
static void test_page_copies(void) {
    enum { BUSY = 256 << 20 };
    Twins t = make_twins(1, 300, 1, 8, 16, LOOKUP_DIRECT, 0.5);
    give_rows(&t);
    Cache *cache = &t.gpu;
    const size_t bytes = PAGE_ROWS * cache->format.stride;
    uint8_t *busy = to_device(NULL, BUSY), *page = cache->device + 2 * bytes, *host = t.host + bytes,
            *read = to_device(NULL, bytes);
    unsigned *sum = to_device(NULL, sizeof *sum);
    void *before = from_device(page, bytes), *written = malloc(bytes);
    memset(written, 0x5a, bytes);
    void *source = to_device(written, bytes);
    for (int round = 0; round < 3; round++) {
        Transfer transfer = {.count = PAGE_ROWS, .device = {2}, .host = {1}};
        cuda_backend.copy_bytes(page, before, bytes);
        put_long_work(busy, BUSY, sum);
        cuda_begin_copy(read, page, bytes);         /* the pass reads the page, */
        cuda_backend.start_copy(cache, &transfer);
        CHECK(!cuda_backend.finish_copy(cache, &transfer, false), "a copy into a page waits for the pass that reads it");
        CHECK(cuda_backend.finish_copy(cache, &transfer, true), "and is complete in the end");
        CHECK(same_on_device(read, before, bytes), "a page is not overwritten under its last reader");
        CHECK(same_on_device(page, host, bytes), "a page has the host's bytes");
        put_long_work(busy, BUSY, sum);
        cuda_begin_copy(page, source, bytes);       /* or it writes the page */
        transfer.to_host = true;
        cuda_backend.start_copy(cache, &transfer);
        CHECK(cuda_backend.finish_copy(cache, &transfer, true) && !memcmp(host, written, bytes),
              "a page is backed up as the pass left it");
        memset(host, round, bytes);
    }
    free_device(busy), free_device(read), free_device(sum), free_device(source);
    free(before), free(written);
    free_twins(&t);
}

/* Copies of parts of pages, of sources whose rows hold one position or two, in both directions: the bytes are the C twin's. */
static void test_stretched_copies(void) {
    Twins t = stretched(make_twins(2, 300, 2, 8, 16, LOOKUP_DIRECT, 0.5));
    Cache *c = &t.c, *g = &t.gpu;
    c->index_format = g->index_format = index_row_format(KV_BF16, 24);
    c->index_pages.n_pages = g->index_pages.n_pages = c->sessions * c->context_pages + 1;
    give_rows(&t);
    const size_t bundle = rows_before(c, 2), host = (size_t)c->host_pages.n_pages * bundle * c->format.stride,
                 host_keys = (size_t)c->host_pages.n_pages * bundle * c->index_format.stride,
                 keys = (size_t)c->index_pages.n_pages * bundle * c->index_format.stride,
                 device = (size_t)c->device_pages.n_pages * bundle * c->format.stride;
    uint8_t *values = malloc(keys > device ? keys : device);
    for (size_t i = 0; i < keys || i < device; i++) values[i] = (uint8_t)draw();
    memcpy(c->device, values, device), cuda_backend.copy_bytes(g->device, values, device);
    twin_table(&c->index_keys, &g->index_keys, values, keys);
    c->host = malloc(host), memcpy(c->host, g->host, host);         /* each twin has a host of its own */
    c->host_index = calloc(host_keys, 1), g->host_index = host_block(host_keys), memset(g->host_index, 0, host_keys);
    for (int round = 0; round < 60; round++) {
        const int first = draw_between(0, PAGE_ROWS - 1), page = draw_between(1, c->index_pages.n_pages - 1);
        Transfer transfer = {.to_host = round % 2, .first = first, .count = draw_between(1, PAGE_ROWS - first),
                             .device = {draw_between(1, c->device_pages.n_pages - 1)},
                             .host = {draw_between(1, c->host_pages.n_pages - 1)}, .index = {round % 3 ? page : 0}};
        c_backend.start_copy(c, &transfer), cuda_backend.start_copy(g, &transfer);
        CHECK(c_backend.finish_copy(c, &transfer, true) && cuda_backend.finish_copy(g, &transfer, true), "a copy ends");
    }
    CHECK(same_on_device(g->device, c->device, device) && same_on_device(g->index_keys, c->index_keys, keys),
          "copies of parts of pages to the device");
    CHECK(!memcmp(g->host, c->host, host) && !memcmp(g->host_index, c->host_index, host_keys), "and to the host");
    free(c->host), free(c->host_index), free_host(g->host_index);
    free(c->index_keys), free_device(g->index_keys), free(values);
    free_twins(&t);
}

/* ---- DeepSeek-V4's rows of groups */

/* Where rows of groups lie, how many are seen, for random places and ratios. */
static void test_locate_groups(void) {
    for (int round = 0; round < 12; round++) {
        Twins t = make_twins(3, 700, 2, 8, 16, LOOKUP_DIRECT, 0.5);
        if (round % 2) t = stretched(t);
        Cache *c = &t.c, *g = &t.gpu;
        c->ratio = g->ratio = round % 2 ? 1 : round % 3 ? 4 : 128;
        c->heavy_rows = g->heavy_rows = 77;
        const int n = round * 31 % 300, group = round / 2 % 2, ratio = c->ratio * stretch_of(c, group);
        Row *rows = malloc((size_t)n * sizeof *rows + 64), *out[2] = {malloc((size_t)n * sizeof(Row) + 64), NULL};
        for (int r = 0; r < n; r++) rows[r] = (Row){draw_between(0, 2), draw_between(0, 699), draw_between(0, 9)};
        Row *device_rows = on_device(rows, (size_t)n * sizeof *rows);
        DeviceRow *kv = malloc((size_t)n * sizeof *kv + 64), *index = malloc((size_t)n * sizeof *index + 64);
        const size_t bytes = (size_t)n * sizeof(DeviceRow), row_bytes = (size_t)n * sizeof(Row);
        void *gpu_kv = on_device(NULL, bytes), *gpu_index = on_device(NULL, bytes);
        c_backend.locate_groups(kv, index, c, group, rows, n);
        cuda_backend.locate_groups(gpu_kv, gpu_index, g, group, device_rows, n);
        CHECK(same_on_device(gpu_kv, kv, bytes) && same_on_device(gpu_index, index, bytes) && poison_behind(gpu_kv, bytes)
              && poison_behind(gpu_index, bytes), "locate_groups: ratio %d, %d rows", ratio, n);
        c_backend.locate_heavy(kv, c, rows, n, 128);
        cuda_backend.locate_heavy(gpu_kv, g, device_rows, n, 128);
        CHECK(same_on_device(gpu_kv, kv, bytes) && poison_behind(gpu_kv, bytes), "locate_heavy: %d rows", n);
        int *count = malloc((size_t)n * sizeof *count + 64), *gpu_count = on_device(NULL, bytes);
        out[1] = malloc(row_bytes + 64);
        Row *newest = on_device(NULL, row_bytes), *first = on_device(NULL, row_bytes);
        c_backend.see_groups(out[0], count, out[1], rows, n, ratio);
        cuda_backend.see_groups(newest, gpu_count, NULL, device_rows, n, ratio);
        cuda_backend.see_groups(NULL, NULL, first, device_rows, n, ratio);
        CHECK(same_on_device(newest, out[0], row_bytes) && same_on_device(gpu_count, count, bytes)
              && same_on_device(first, out[1], row_bytes) && poison_behind(newest, row_bytes) && poison_behind(first, row_bytes)
              && poison_behind(gpu_count, bytes), "see_groups: ratio %d, %d rows", ratio, n);
        free(rows), free(out[0]), free(out[1]), free(kv), free(index), free(count);
        free_kept();
        free_twins(&t);
    }
}

/* What compressors make of three sessions' positions, in passes of some size, through trails that commits keep. */
typedef struct TrailCase {
    int ratio, dim, turned, positions;
    bool overlapping, pools;    /* pools: pool_groups() */
    RowFormat format;
    const RowFormat *rounding;
    bool no_ape;
} TrailCase;

enum { TRAIL_SESSIONS = 3, TRAIL_PASS = 96 };

/* Sessions run each by itself (together: all in one pass, as far as it holds them) in passes of at most `most` rows, of which the
 * last ones are at times dropped, and come again. Returns the rows made, in the host's memory. */
static uint8_t *run_trail(const TrailCase *test, const Backend *backend, const float *raw, const CompressorWeights *weights,
                          const float *frequency, int most, bool together) {
    const int width = test->overlapping ? 2 * test->dim : test->dim, span = test->overlapping ? 2 * test->ratio : test->ratio,
              of_session = test->positions / test->ratio + 1;
    const size_t stride = (size_t)(2 * width) * sizeof(float), made = (size_t)(TRAIL_SESSIONS * of_session),
                 bytes = test->pools ? made * (size_t)test->dim * sizeof(float) : made * test->format.stride;
    Trail trail = {.length = span + MAX_BLOCK, .stride = stride}, trails[TRAILS] = {{0}};
    Error error;
    trail.ring = backend->take((size_t)(TRAIL_SESSIONS * trail.length) * stride, MEMORY_DEVICE, &error);
    trail.pass = backend->take(TRAIL_PASS * stride, MEMORY_DEVICE, &error);
    trails[TRAIL_GROUP] = trail;
    Cache cache = {.trails = trails, .seen_trails = backend->take(sizeof trails, MEMORY_DEVICE, &error), .trail_layers = 1};
    backend->copy_bytes(cache.seen_trails, trails, sizeof trails);
    Row *rows = backend->take(TRAIL_PASS * sizeof(Row), MEMORY_DEVICE, &error), list[TRAIL_PASS];
    DeviceRow *ids = backend->take(TRAIL_PASS * sizeof(DeviceRow), MEMORY_DEVICE, &error), id_list[TRAIL_PASS];
    uint8_t *base = backend->take(bytes, MEMORY_DEVICE, &error), *out = calloc(bytes, 1);
    float *pooled = backend->take((size_t)(TRAIL_PASS * test->dim) * sizeof(float), MEMORY_DEVICE, &error),
          *pooled_rows = malloc((size_t)(TRAIL_PASS * test->dim) * sizeof(float));
    PassReport report = {.bad_row = -1, .bad_place = -1}, *seen = backend->take(sizeof report, MEMORY_DEVICE, &error);
    backend->copy_bytes(seen, &report, sizeof report);
    int done[TRAIL_SESSIONS] = {0};
    for (int turn = 0; done[0] + done[1] + done[2] < TRAIL_SESSIONS * test->positions; turn++) {
        int n = 0, first[TRAIL_SESSIONS], count[TRAIL_SESSIONS] = {0};
        for (int s = 0; s < TRAIL_SESSIONS; s++) {
            if (!together && s != turn % TRAIL_SESSIONS) continue;
            const int left = test->positions - done[s], room = TRAIL_PASS / TRAIL_SESSIONS;
            first[s] = n;
            count[s] = left < most ? left : most;
            if (together && count[s] > room) count[s] = room;
            for (int i = 0; i < count[s]; i++) list[n++] = (Row){s, done[s] + i, 0};
        }
        for (int r = 0; r < n; r++) {
            const int s = list[r].session, position = list[r].position;
            const bool complete = (position + 1) % test->ratio == 0;
            id_list[r].id = complete ? s * of_session + position / test->ratio : -1;
            backend->copy_bytes(trail.pass + (size_t)r * stride,
                                (const uint8_t *)raw + (size_t)(s * test->positions + position) * stride, stride);
        }
        backend->copy_bytes(rows, list, sizeof list), backend->copy_bytes(ids, id_list, sizeof id_list);
        if (test->pools) {
            backend->pool_groups(pooled, &trail, rows, n, weights, test->ratio, test->dim, 1e-6f);
            backend->copy_bytes(pooled_rows, pooled, (size_t)(n * test->dim) * sizeof(float));
        } else
            backend->compress(base, &test->format, ids, &trail, rows, n, weights, test->ratio, test->dim, test->overlapping,
                              test->turned, frequency, 1e-6f, test->rounding, seen, 5);
        for (int r = 0; r < n && test->pools; r++) {
            bool zero = true;
            for (int c = 0; c < test->dim; c++) zero &= pooled_rows[r * test->dim + c] == 0;
            CHECK(zero == (id_list[r].id < 0), "pool_groups: zeros where no group ends");
            if (id_list[r].id >= 0)
                memcpy(out + (size_t)(id_list[r].id * test->dim) * sizeof(float), pooled_rows + r * test->dim,
                       (size_t)test->dim * sizeof(float));
        }
        for (int s = 0; s < TRAIL_SESSIONS; s++) {
            const int dropped = count[s] > 1 && most <= MAX_BLOCK ? turn % count[s] : 0;
            if (count[s]) backend->keep_trails(&cache, s, first[s], done[s], done[s] + count[s] - dropped);
            done[s] += count[s] - dropped;
        }
    }
    if (!test->pools) backend->copy_bytes(out, base, bytes);
    backend->copy_bytes(&report, seen, sizeof report);
    CHECK(report.bad_row < 0, "a finite row is no fault");
    void *blocks[] = {trail.ring, trail.pass, cache.seen_trails, rows, ids, base, pooled, seen};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) backend->give_back(blocks[i], MEMORY_DEVICE);
    free(pooled_rows);
    return out;
}

/* Value i of a row of codes, by the format's description. */
static float code_value(const uint8_t *row, const RowFormat *format, int i) {
    static const DType scale_dtypes[] = {[SCALES_F32] = DTYPE_F32, [SCALES_E8M0] = DTYPE_F8_E8M0, [SCALES_E4M3] = DTYPE_F8_E4M3};
    const int n = format->quantised, size = format->scales == SCALES_F32 ? 4 : 1,
              codes = format->dtype == KV_F32    ? 4 * n
                      : format->dtype == KV_BF16 ? 2 * n
                      : format->dtype == KV_F8   ? n
                                                 : (n + 1) / 2;
    const bool coded = format->dtype == KV_F8 || format->dtype == KV_F4;
    const uint8_t *plain = row + codes + (coded ? size * ((n + format->group - 1) / format->group) : 0),
                  packed = row[i / 2] >> i % 2 * 4;
    if (format->dtype == KV_F32) return widen(row + 4 * i, DTYPE_F32);
    if (i >= n) return widen(plain + 2 * (i - n), DTYPE_BF16);
    if (!coded) return widen(row + 2 * i, DTYPE_BF16);
    return (format->dtype == KV_F8 ? widen(row + i, DTYPE_F8_E4M3) : widen(&packed, DTYPE_F4_E2M1))
           * widen(row + codes + size * (i / format->group), scale_dtypes[format->scales]);
}

static float *rows_widened(const uint8_t *rows, const TrailCase *test) {
    const size_t n = (size_t)(TRAIL_SESSIONS * (test->positions / test->ratio + 1)), dim = (size_t)test->dim;
    float *out = calloc(n * dim + 1, sizeof *out);
    for (size_t i = 0; i < n; i++)
        if (test->pools) memcpy(out + i * dim, rows + i * dim * sizeof(float), dim * sizeof(float));
        else
            for (size_t j = 0; j < dim; j++) out[i * dim + j] = code_value(rows + i * test->format.stride, &test->format, (int)j);
    return out;
}

static void check_trail(const TrailCase *test) {
    const int width = test->overlapping ? 2 * test->dim : test->dim;
    const size_t n_raw = (size_t)(TRAIL_SESSIONS * test->positions) * (size_t)(2 * width), n_ape = (size_t)(test->ratio * width),
                 n = (size_t)(TRAIL_SESSIONS * (test->positions / test->ratio + 1)) * (size_t)test->dim;
    float *raw = random_floats(n_raw, 1), *ape = random_floats(n_ape, 1), *norm = random_floats((size_t)test->dim, 1),
          frequency[MAX_ROW_WIDTH / 2];
    for (int i = 0; i < test->turned / 2; i++) frequency[i] = powf(1e4f, -2 * (float)i / (float)test->turned);
    const CompressorWeights weights = {.ape = test->no_ape ? NULL : ape, .norm = norm},
                            device_weights = {.ape = test->no_ape ? NULL : on_device(ape, n_ape * sizeof *ape),
                                              .norm = on_device(norm, (size_t)test->dim * sizeof *norm)};
    const float *device_frequency = on_device(frequency, sizeof frequency);
    uint8_t *wanted = run_trail(test, &c_backend, raw, &weights, frequency, 32, true), *whole = NULL;
    for (int way = 0; way < 6; way++) {
        static const int most[] = {TRAIL_PASS, 1, 7, 32, 1, 5};
        uint8_t *made = run_trail(test, &cuda_backend, raw, &device_weights, device_frequency, most[way], way > 2);
        const size_t bytes = test->pools ? n * sizeof(float)
                                         : n / (size_t)test->dim * test->format.stride;
        if (!way) {
            float *values = rows_widened(made, test), *close = rows_widened(wanted, test);
            compare(test->pools ? "pool_groups" : "compress", values, close, n,
                    test->pools || test->format.dtype == KV_F32 ? 2e-6 : test->rounding ? 2e-2 : 5e-3);
            free(values), free(close);
            whole = made;
            continue;
        }
        CHECK(!memcmp(made, whole, bytes), "rows of %d positions, %d wide%s: the same bits in passes of %d", test->ratio,
              test->dim, test->overlapping ? ", overlapping" : "", most[way]);
        free(made);
    }
    free(raw), free(ape), free(norm), free(wanted), free(whole);
    free_kept();
}

static void test_trails(void) {
    const RowFormat wide = row_format(KV_F32, 512, 0, 64), plain = row_format(KV_BF16, 448, 64, 64),
                    coded = scaled_row_format(KV_F8, 448, 64, 64, SCALES_E8M0), small = row_format(KV_F32, 0, 24, 64),
                    packed = scaled_row_format(KV_F4, 128, 0, 32, SCALES_E8M0),
                    of_rows = scaled_row_format(KV_F8, 448, 0, 64, SCALES_E8M0);
    const TrailCase cases[] = {
        {4, 512, 64, 70, true, false, wide, NULL, false},       {128, 512, 64, 300, false, false, wide, NULL, false},
        {4, 512, 64, 50, true, false, coded, &of_rows, false},  {128, 512, 64, 260, false, false, plain, NULL, false},
        {4, 128, 64, 67, true, false, packed, NULL, false},     {4, 128, 64, 67, true, false, packed, &packed, false},
        {3, 24, 8, 40, true, false, small, NULL, true},         {1, 24, 8, 20, false, false, small, NULL, false},
        {2, 512, 0, 41, false, true, wide, NULL, true},         {5, 20, 0, 41, false, true, wide, NULL, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_trail(&cases[i]);
}

/* ---- Engram: rows of a table that stays with the host, in passes that are kept as works too */

static void check_engram(DType dtype, int dim, int order, int heads) {
    enum { TOKENS = 50, ROWS = 40, POSITIONS = 30 };
    Config config = {.engram_order = order, .engram_n_heads = heads, .engram_head_dim = dim, .engram_pad_token_id = 3,
                     .engram_vocab_size = 60, .engram_compressed_vocab_size = TOKENS};
    const int columns = (order - 1) * heads;
    EngramWeights engram = {.dtype = dtype};
    int64_t prime = 59, table_rows = make_hashes(&engram, &config, 2, &prime);
    Matrix table = random_matrix(dtype, (int)table_rows, dim, 0);
    uint8_t *exponents = malloc((size_t)table_rows * (size_t)((dim + 31) / 32));
    for (int64_t i = 0; i < table_rows * ((dim + 31) / 32); i++) exponents[i] = (uint8_t)draw_between(110, 130);
    engram.table = table.data;
    engram.exponents = dtype == DTYPE_F8_E4M3 ? exponents : NULL;
    int map[TOKENS];
    for (int i = 0; i < TOKENS; i++) map[i] = draw_between(0, TOKENS - 1);
    const int *device_map = on_device(map, sizeof map);
    Trail trail = {.length = order + MAX_BLOCK, .stride = sizeof(int)}, device = trail;
    int *ring = malloc((size_t)(2 * trail.length) * sizeof(int)), pass[ROWS];
    for (int i = 0; i < 2 * trail.length; i++) ring[i] = draw_between(0, TOKENS - 1);
    trail.ring = (uint8_t *)ring, trail.pass = (uint8_t *)pass;
    device.ring = on_device(ring, (size_t)(2 * trail.length) * sizeof(int)), device.pass = on_device(NULL, sizeof pass);
    Row rows[ROWS], *device_rows = on_device(NULL, sizeof rows);
    const size_t values = (size_t)(ROWS * columns * dim);
    float *wanted = malloc(values * sizeof *wanted), *y = output_on_device(values);
    for (int round = 0; round < 5; round++) {
        const int split = draw_between(1, ROWS - 1), n = round < 4 ? ROWS : 1;
        for (int r = 0; r < ROWS; r++)
            rows[r] = (Row){r >= split, round + (r < split ? r : r - split), draw_between(0, TOKENS - 1)};
        cuda_backend.copy_bytes(device_rows, rows, sizeof rows);
        c_backend.note_tokens(&trail, rows, n);
        c_backend.read_engram(wanted, &engram, map, &trail, rows, n, &config);
        if (cuda_backend.begin_work(round < 4 ? (uint64_t)(size_t)y | 1 : 0) != WORK_DONE) {
            cuda_backend.note_tokens(&device, device_rows, n);
            cuda_backend.prefetch_engram(&engram, device_map, &device, device_rows, n, &config);
            cuda_backend.read_engram(y, &engram, device_map, &device, device_rows, n, &config);
            cuda_backend.end_work();
        }
        CHECK(same_on_device(y, wanted, (size_t)(n * columns * dim) * sizeof(float)), "Engram: type %d, %d of %d, round %d",
              (int)dtype, columns, dim, round);
    }
    free(fetch_output(y, values, "read_engram"));
    cuda_backend.release_weights();                 /* and forget the table */
    free(wanted), free(ring), free(exponents), free_weights(&table);
    free_kept();
}

static void test_read_engram(void) {
    check_engram(DTYPE_F8_E4M3, 256, 4, 8);
    check_engram(DTYPE_F8_E4M3, 40, 3, 2);
    check_engram(DTYPE_BF16, 24, 2, 1);
    check_engram(DTYPE_F32, 7, 5, 3);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Sampling and acceptance
 */

enum { TEST_BLOCKS = 12, TEST_SLOTS = 7, TEST_HISTORY = 300 };

/* Blocks of a round as the pipeline holds them, with drafts that the target often agrees with. */
typedef struct Verification {
    int vocab, n, n_rows, slots;
    DraftBlock *blocks;         /* MEMORY_HOST */
    int *ids;                   /* MEMORY_HOST [n, TEST_HISTORY] */
    float *logits;              /* [n_rows, vocab] */
    Drafts c, gpu;
} Verification;

static Sampling random_sampling(int kind) {
    Sampling sampling = {.temperature = 0.6f + 0.1f * (float)draw_between(0, 8), .top_p = 1, .repeat_penalty = 1, .seed = draw()};
    if (kind == 0) sampling.temperature = 0;
    if (kind == 2 || kind == 5) sampling.top_k = chance(0.2) ? 1 : draw_between(2, 60);
    if (kind == 3 || kind == 5) sampling.top_p = chance(0.1) ? 0 : 0.3f + 0.1f * (float)draw_between(0, 6);
    if (kind == 4 || kind == 5) sampling.min_p = chance(0.1) ? 1 : 0.05f;
    if (kind == 6 || kind == 5) sampling.repeat_penalty = 1.3f;
    return sampling;
}

/* kind: of sampling, as above; 7: each block another. counts: rows of a block at most. */
static Verification make_verification(int vocab, int n, int kind, int most) {
    Verification v = {.vocab = vocab, .n = n, .slots = TEST_SLOTS};
    const size_t at = (size_t)n * TEST_SLOTS, candidates = at * CANDIDATES;
    v.blocks = host_block((size_t)n * sizeof *v.blocks);
    v.ids = host_block((size_t)n * TEST_HISTORY * sizeof *v.ids);
    for (int i = 0; i < n * TEST_HISTORY; i++) v.ids[i] = draw_between(0, vocab - 1);
    for (int i = 0; i < n; i++) {
        v.blocks[i] = (DraftBlock){.session = i, .position = draw_between(0, TEST_HISTORY - 2 - TEST_SLOTS), .first = v.n_rows,
                                   .ids = v.ids + i * TEST_HISTORY, .count = draw_between(1, most), .stream = draw(),
                                   .sampling = random_sampling(kind == 7 ? draw_between(0, 6) : kind)};
        v.n_rows += v.blocks[i].count;
    }
    v.logits = random_floats((size_t)v.n_rows * (size_t)vocab, 2.5f);
    for (size_t i = 0; i < (size_t)v.n_rows * (size_t)vocab; i++)
        if (chance(0.3)) v.logits[i] = rintf(v.logits[i]);          /* ties */
    int *ids = malloc(candidates * sizeof(int)), *tokens = host_block(at * sizeof(int));
    float *q = malloc(candidates * sizeof(float));
    for (size_t i = 0; i < at; i++) {
        float total = 0;
        for (int c = 0; c < CANDIDATES; c++) {
            ids[i * CANDIDATES + (size_t)c] = (int)((draw() + (uint64_t)c) % (uint64_t)vocab);
            q[i * CANDIDATES + (size_t)c] = chance(0.5) ? 0.01f : 1;
        }
        for (int c = 0; c < CANDIDATES; c++)        /* distinct, but for copies of the last with a q of 0 */
            for (int d = 0; d < c; d++)
                if (ids[i * CANDIDATES + (size_t)c] == ids[i * CANDIDATES + (size_t)d]) q[i * CANDIDATES + (size_t)c] = 0;
        for (int c = 0; c < CANDIDATES; c++) total += q[i * CANDIDATES + (size_t)c];
        for (int c = 0; c < CANDIDATES; c++) q[i * CANDIDATES + (size_t)c] /= total;
        tokens[i] = ids[i * CANDIDATES + draw() % CANDIDATES];
    }
    v.c = (Drafts){.slots = TEST_SLOTS, .blocks = n, .ids = ids, .q = q, .tokens = tokens};
    return v;
}

static void free_verification(Verification *v) {
    free_host(v->blocks), free_host(v->ids), free_host(v->c.tokens);
    free(v->logits), free(v->c.ids), free(v->c.q);
}

/* Accepts n blocks, whose first is block `from`, on the device. choices, accepted: MEMORY_HOST. */
static void accept_on_device(int *choices, int *accepted, const Verification *v, int from, int n, AcceptRule rule,
                             Sampler *samplers, int n_samplers) {
    const size_t at = (size_t)from * TEST_SLOTS, size = (size_t)n * TEST_SLOTS, width = (size_t)v->vocab;
    DraftBlock *blocks = host_block((size_t)n * sizeof *blocks);
    int n_rows = 0, before = v->blocks[from].first;
    for (int i = 0; i < n; i++) {
        blocks[i] = v->blocks[from + i];
        blocks[i].first -= before;
        n_rows += blocks[i].count;
    }
    float *logits = to_device(v->logits + (size_t)before * width, (size_t)n_rows * width * sizeof(float));
    Drafts drafts = v->c;
    drafts.ids = to_device(v->c.ids + at * CANDIDATES, size * CANDIDATES * sizeof(int));
    drafts.q = to_device(v->c.q + at * CANDIDATES, size * CANDIDATES * sizeof(float));
    drafts.tokens = v->c.tokens + at;
    cuda_backend.accept(choices, accepted, logits, v->vocab, blocks, &drafts, n, rule, samplers, n_samplers);
    cuda_backend.wait();
    CHECK(poison_behind(logits, (size_t)n_rows * width * sizeof(float)), "accept: behind the logits");
    free_device(logits), free_device(drafts.ids), free_device(drafts.q), free_host(blocks);
}

static void twin_accept(int vocab, int n, int kind, int most, AcceptRule rule) {
    Verification v = make_verification(vocab, n, kind, most);
    const int n_samplers = 3;
    int choices[TEST_BLOCKS * MAX_BLOCK], accepted[TEST_BLOCKS];
    int *device_choices = host_block(sizeof choices), *device_accepted = host_block(sizeof accepted);
    Sampler *samplers = host_block((size_t)n_samplers * sizeof *samplers), own = sampler_open(&c_backend, vocab);
    for (int i = 0; i < n_samplers; i++) samplers[i] = sampler_open(&cuda_backend, vocab);
    if (rule == ACCEPT_COUPLED)                     /* a draft is what the target says, more often than not */
        for (int i = 0; i < n; i++) {
            float *copy = malloc((size_t)v.blocks[i].count * (size_t)vocab * sizeof(float));
            memcpy(copy, v.logits + (size_t)v.blocks[i].first * (size_t)vocab,
                   (size_t)v.blocks[i].count * (size_t)vocab * sizeof(float));
            for (int j = 0; j + 1 < v.blocks[i].count && !chance(0.15); j++) {
                DraftBlock row = v.blocks[i];
                row.first = 0, row.count = 1, row.position += j;
                c_backend.accept(choices, accepted, copy + (size_t)j * (size_t)vocab, vocab, &row, &v.c, 1, rule, &own, 1);
                v.c.tokens[i * TEST_SLOTS + j] = row.ids[row.position + 1] = choices[0];
            }
            free(copy);
        }
    accept_on_device(device_choices, device_accepted, &v, 0, n, rule, samplers, n_samplers);
    float *logits = malloc((size_t)v.n_rows * (size_t)vocab * sizeof(float));
    memcpy(logits, v.logits, (size_t)v.n_rows * (size_t)vocab * sizeof(float));
    c_backend.accept(choices, accepted, logits, vocab, v.blocks, &v.c, n, rule, &own, 1);
    for (int i = 0; i < n; i++) {
        const DraftBlock *block = &v.blocks[i];
        CHECK(device_accepted[i] == accepted[i], "vocab %d, kind %d, rule %d, block %d of %d rows: accepted %d, in C %d", vocab,
              kind, rule, i, block->count, device_accepted[i], accepted[i]);
        for (int j = 0; j <= accepted[i]; j++)
            CHECK(device_choices[block->first + j] == choices[block->first + j],
                  "vocab %d, kind %d, rule %d, block %d: token %d is %d, "
                  "in C %d",
                  vocab, kind, rule, i, j, device_choices[block->first + j], choices[block->first + j]);
    }
    CHECK(device_choices[v.n_rows] == -1 && device_accepted[n] == -1, "accept: writes nothing behind its results");
    int *alone = host_block(sizeof choices), *alone_accepted = host_block(sizeof accepted);
    for (int i = 0; i < n; i += 2) {                /* the same beside one other block, or none, and elsewhere */
        int some = n - i < 2 ? 1 : draw_between(1, 2), first = v.blocks[i].first;
        accept_on_device(alone, alone_accepted, &v, i, some, rule, samplers, n_samplers);
        for (int b = i; b < i + some; b++) {
            CHECK(alone_accepted[b - i] == device_accepted[b], "accept: block %d alone accepts as many", b);
            for (int j = 0; j <= device_accepted[b]; j++)
                CHECK(alone[v.blocks[b].first - first + j] == device_choices[v.blocks[b].first + j], "accept: block %d alone", b);
        }
    }
    for (int i = 0; i < n_samplers; i++) sampler_close(&cuda_backend, &samplers[i]);
    sampler_close(&c_backend, &own);
    free(logits), free_host(samplers), free_host(device_choices), free_host(device_accepted), free_host(alone),
        free_host(alone_accepted);
    free_verification(&v);
}

static void test_accept(void) {
    const int vocabs[] = {5, 33, 1000, 4099, 32000};
    for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++)
        for (int kind = 0; kind <= 7; kind++) {
            twin_accept(vocabs[v], TEST_BLOCKS, kind, TEST_SLOTS + 1, ACCEPT_COUPLED);
            twin_accept(vocabs[v], TEST_BLOCKS, kind, TEST_SLOTS + 1, ACCEPT_REJECTION);
            twin_accept(vocabs[v], 3, kind, 1, ACCEPT_COUPLED);
        }
    twin_accept(151936, 4, 7, 4, ACCEPT_COUPLED);
    Drafts none = {0};
    cuda_backend.accept(NULL, NULL, NULL, 100, NULL, &none, 0, ACCEPT_COUPLED, NULL, 0);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Drafters' operations
 */

static void twin_candidates(int n, int vocab, bool mapped) {
    const size_t stride = 3 * CANDIDATES, size = (size_t)n * stride, width = (size_t)vocab;
    float *logits = random_floats((size_t)n * width, 3), *values = malloc(size * sizeof(float) + 64);
    int *ids = malloc(size * sizeof(int) + 64), *map = malloc(width * sizeof(int));
    for (size_t i = 0; i < (size_t)n * width; i++)
        if (chance(0.5)) logits[i] = rintf(logits[i]);
    for (int i = 0; i < vocab; i++) map[i] = 3 * i + 1;
    memset(values, 0xff, size * sizeof(float)), memset(ids, 0xff, size * sizeof(int));
    float *device_logits = to_device(logits, (size_t)n * width * sizeof(float)),
          *device_values = to_device(NULL, size * sizeof(float));
    int *device_ids = to_device(NULL, size * sizeof(int)), *device_map = to_device(map, width * sizeof(int));
    c_backend.candidates(ids, values, stride, logits, n, vocab, mapped ? map : NULL);
    cuda_backend.candidates(device_ids, device_values, stride, device_logits, n, vocab, mapped ? device_map : NULL);
    CHECK(same_on_device(device_ids, ids, size * sizeof(int)), "candidates: ids of %d rows of %d", n, vocab);
    CHECK(same_on_device(device_values, values, size * sizeof(float)), "candidates: values of %d rows of %d", n, vocab);
    CHECK(poison_behind(device_ids, size * sizeof(int)) && poison_behind(device_values, size * sizeof(float)),
          "candidates: behind");
    const size_t out_stride = DVL_FEATURES + 3, out = (size_t)n * out_stride;
    float *features = malloc(out * sizeof(float) + 64), *device_features = to_device(NULL, out * sizeof(float));
    memset(features, 0, out * sizeof(float));
    c_backend.length_features(features, out_stride, values, stride, logits, n, vocab);
    cuda_backend.length_features(device_features, out_stride, device_values, stride, device_logits, n, vocab);
    float *got = from_device(device_features, out * sizeof(float));
    for (int r = 0; r < n; r++)
        CHECK(distance(got + (size_t)r * out_stride, features + (size_t)r * out_stride, DVL_FEATURES) < 1e-4,
              "length_features: row %d of %d, vocab %d: %g", r, n, vocab,
              distance(got + (size_t)r * out_stride, features + (size_t)r * out_stride, DVL_FEATURES));
    CHECK(poison_behind(device_features, out * sizeof(float)), "length_features: behind");
    float *alone = to_device(NULL, out * sizeof(float));
    for (int r = 0; r < n; r += 3) {
        cuda_backend.length_features(alone, out_stride, device_values + (size_t)r * stride, stride,
                                     device_logits + (size_t)r * width, 1, vocab);
        CHECK(same_on_device(alone, got + (size_t)r * out_stride, DVL_FEATURES * sizeof(float)), "length_features: row %d alone",
              r);
    }
    free(logits), free(values), free(ids), free(map), free(features), free(got);
    free_device(device_logits), free_device(device_values), free_device(device_ids), free_device(device_map);
    free_device(device_features), free_device(alone);
}

static void test_candidates(void) {
    const int vocabs[] = {3, 16, 17, 40, 1001, 32000, 151936};
    for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++)
        for (int n = 0; n <= 5; n += n ? 4 : 1) twin_candidates(n, vocabs[v], n == 5);
    twin_candidates(700, 50, false);                /* more rows than one launch takes */
}

/* A matrix of random values of that type in both memories. */
static void twin_matrix(Matrix *c, Matrix *gpu, DType dtype, int rows, int cols, float size) {
    const size_t n = (size_t)rows * (size_t)cols, bytes = n * dtype_size(dtype),
                 scales = (size_t)((rows + 127) / 128 * ((cols + 127) / 128));
    float *x = random_floats(n, size), *scale = random_floats(scales, 0.2f);
    uint8_t *data = malloc(bytes + 64);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        uint16_t half = dtype == DTYPE_BF16 ? (uint16_t)(bits >> 16) : (uint16_t)((draw() & 0x83ff) | 0x2800 | (draw() & 0x0800));
        if (dtype == DTYPE_F32) memcpy(data + 4 * i, &x[i], 4);
        else if (dtype == DTYPE_F8_E4M3) data[i] = (uint8_t)((draw() & 0x87) | (uint8_t)draw_between(2, 6) << 3);
        else memcpy(data + 2 * i, &half, 2);
    }
    for (size_t i = 0; i < scales; i++) scale[i] = 0.5f + fabsf(scale[i]);
    *c = (Matrix){.data = data, .scale = dtype == DTYPE_F8_E4M3 ? scale : NULL, .dtype = dtype, .rows = rows, .cols = cols,
                  .scale_cols = (cols + 127) / 128};
    *gpu = *c;
    gpu->data = to_device(data, bytes);
    if (c->scale) gpu->scale = to_device(scale, scales * sizeof(float));
    else free(scale);
    free(x);
}

static void free_matrix(Matrix *c, Matrix *gpu) {
    free((void *)c->data), free_device((void *)gpu->data);
    if (c->scale) free((void *)c->scale), free_device((void *)gpu->scale);
}

static void twin_predictor(int n, int slots, DType dtype) {
    const int widths[] = {slots * DVL_FEATURES, 37, 64, slots};
    LengthPredictor c = {.layers = 3}, gpu = {.layers = 3};
    for (int l = 0; l < 3; l++) {
        twin_matrix(&c.weight[l], &gpu.weight[l], dtype, widths[l + 1], widths[l], 0.2f);
        c.bias[l] = random_floats((size_t)widths[l + 1], 0.1f);
        gpu.bias[l] = to_device(c.bias[l], (size_t)widths[l + 1] * sizeof(float));
    }
    const size_t out = (size_t)n * (size_t)slots, in = (size_t)n * (size_t)widths[0];
    float *features = random_floats(in, 1), *scores = malloc(out * sizeof(float) + 64),
          *device_scores = host_block(out * sizeof(float)), *device_features = to_device(features, in * sizeof(float)),
          *alone = host_block(out * sizeof(float)), *scratch = malloc(2 * (size_t)(n + 1) * MAX_PREDICTOR_WIDTH * sizeof(float));
    c_backend.predict_lengths(scores, features, n, &c, scratch);
    cuda_backend.predict_lengths(device_scores, device_features, n, &gpu, NULL);
    cuda_backend.wait();
    CHECK(!n || distance(device_scores, scores, out) < 1e-4, "predict_lengths: %d blocks of %d: %g", n, slots,
          distance(device_scores, scores, out));
    CHECK(isnan(device_scores[out]), "predict_lengths: writes nothing behind its results");
    for (int i = 0; i < n; i++) {
        cuda_backend.predict_lengths(alone, device_features + (size_t)i * (size_t)widths[0], 1, &gpu, NULL);
        cuda_backend.wait();
        CHECK(!memcmp(alone, device_scores + i * slots, (size_t)slots * sizeof(float)), "predict_lengths: block %d alone", i);
    }
    for (int l = 0; l < 3; l++) {
        free_matrix(&c.weight[l], &gpu.weight[l]);
        free((void *)c.bias[l]), free_device((void *)gpu.bias[l]);
    }
    free(features), free(scores), free(scratch), free_host(device_scores), free_host(alone), free_device(device_features);
}

static void test_predict_lengths(void) {
    const DType dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_F8_E4M3};
    for (int d = 0; d < 4; d++)
        for (int n = 0; n <= 9; n += 3) twin_predictor(n, draw_between(1, 31), dtypes[d]);
}

/* Draws all slots of n blocks, by their candidates or along the selector's path, in both. */
static void twin_draws(int n, int slots, int vocab, int rank, DType dtype, AcceptRule rule, bool one_hot) {
    const size_t at = (size_t)n * (size_t)slots, size = at * CANDIDATES;
    float *scores = random_floats(size, 2), *e = random_floats(at * (size_t)rank, 0.5f),
          *device_e = to_device(e, at * (size_t)rank * sizeof(float));
    int *ids = malloc(size * sizeof(int) + 64), *c_ids = malloc((size_t)n * TEST_HISTORY * sizeof(int) + 64),
        *gpu_ids = host_block((size_t)n * TEST_HISTORY * sizeof(int));
    for (size_t i = 0; i < size; i++) {             /* distinct; the last are copies in a small vocabulary */
        int c = (int)(i % CANDIDATES), other = c < vocab ? c : vocab - 1;
        ids[i] = (int)((i / CANDIDATES * 7 + (size_t)other) % (size_t)vocab);
        if (c >= vocab) scores[i] = scores[i - 1];
    }
    for (int i = 0; i < n * TEST_HISTORY; i++) c_ids[i] = gpu_ids[i] = draw_between(0, vocab - 1);
    DraftBlock *c_blocks = malloc((size_t)n * sizeof(DraftBlock) + 64), *gpu_blocks = host_block((size_t)n * sizeof(DraftBlock));
    for (int i = 0; i < n; i++) {
        c_blocks[i] = (DraftBlock){.session = i,
                                   .position = draw_between(0, TEST_HISTORY - 1 - slots),
                                   .ids = c_ids + i * TEST_HISTORY,
                                   .stream = draw(),
                                   .sampling = random_sampling(draw_between(0, 6))};
        gpu_blocks[i] = c_blocks[i];
        gpu_blocks[i].ids = gpu_ids + i * TEST_HISTORY;
    }
    Drafts c = {.slots = slots,
                .blocks = n,
                .one_hot = one_hot,
                .ids = ids,
                .scores = scores,
                .q = malloc(size * sizeof(float) + 64),
                .tokens = malloc(at * sizeof(int) + 64)};
    Drafts gpu = c;
    gpu.ids = to_device(ids, size * sizeof(int)), gpu.scores = to_device(scores, size * sizeof(float));
    gpu.q = to_device(NULL, size * sizeof(float)), gpu.tokens = host_block(at * sizeof(int));
    Matrix predecessor[2], successor[2];
    twin_matrix(&predecessor[0], &predecessor[1], dtype, vocab, rank ? rank : 8, 0.5f);
    twin_matrix(&successor[0], &successor[1], dtype, vocab, rank ? rank : 8, 0.5f);
    if (rank) {
        c_backend.select_path(&c, e, &predecessor[0], &successor[0], c_blocks, n, rule);
        cuda_backend.select_path(&gpu, device_e, &predecessor[1], &successor[1], gpu_blocks, n, rule);
    } else {
        c_backend.draw_drafts(&c, 0, slots, c_blocks, n, rule);
        cuda_backend.draw_drafts(&gpu, 0, slots / 2, gpu_blocks, n, rule);
        cuda_backend.draw_drafts(&gpu, slots / 2, slots, gpu_blocks, n, rule);
    }
    cuda_backend.wait();
    CHECK(!memcmp(gpu.tokens, c.tokens, at * sizeof(int)), "drafts: tokens (%d blocks, rank %d, rule %d)", n, rank, rule);
    CHECK(!memcmp(gpu_ids, c_ids, (size_t)n * TEST_HISTORY * sizeof(int)), "drafts: ids (%d blocks, rank %d, rule %d)", n, rank,
          rule);
    CHECK(gpu.tokens[at] == -1, "drafts: writes nothing behind the tokens");
    float *q = from_device(gpu.q, size * sizeof(float)), *after = from_device(gpu.scores, size * sizeof(float));
    if (n && rule == ACCEPT_REJECTION) CHECK(distance(q, c.q, size) < 1e-4, "drafts: laws: %g", distance(q, c.q, size));
    if (n) CHECK(distance(after, c.scores, size) < 1e-5, "drafts: scores: %g", distance(after, c.scores, size));
    free(q), free(after), free(scores), free(e), free(ids), free(c_ids), free(c_blocks), free(c.q), free(c.tokens);
    free_host(gpu_ids), free_host(gpu_blocks), free_host(gpu.tokens);
    free_device(gpu.ids), free_device(gpu.scores), free_device(gpu.q), free_device(device_e);
    free_matrix(&predecessor[0], &predecessor[1]), free_matrix(&successor[0], &successor[1]);
}

static void test_draws(void) {
    const DType dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_F8_E4M3};
    for (int round = 0; round < 8; round++)
        for (int n = 0; n <= 33; n += n ? 16 : 1) {
            AcceptRule rule = round % 2 ? ACCEPT_REJECTION : ACCEPT_COUPLED;
            int vocab = round == 2 ? 9 : 500, slots = draw_between(1, 15);
            twin_draws(n, slots, vocab, 0, DTYPE_F32, rule, round % 4 == 3);
            twin_draws(n, slots, vocab, round % 3 ? 64 : 20, dtypes[round % 4], rule, false);
        }
}

/* The same path alone, in a batch and elsewhere in it has the same bits. */
static void test_path_independence(void) {
    enum { N = 6, SLOTS = 5, RANK = 48, VOCAB = 300, SIZE = SLOTS * CANDIDATES };
    Matrix predecessor[2], successor[2];
    twin_matrix(&predecessor[0], &predecessor[1], DTYPE_BF16, VOCAB, RANK, 0.5f);
    twin_matrix(&successor[0], &successor[1], DTYPE_BF16, VOCAB, RANK, 0.5f);
    float *scores = random_floats(SIZE, 2), *e = random_floats(SLOTS * RANK, 0.5f), *whole = malloc(sizeof(float) * N * SIZE);
    float *spread = malloc(sizeof(float) * N * SLOTS * RANK);
    int ids[N * SIZE], *history = host_block(N * 64 * sizeof(int)), *tokens = host_block(N * SLOTS * sizeof(int));
    DraftBlock *blocks = host_block(N * sizeof(DraftBlock));
    float *first = NULL;
    for (int n = N; n >= 1; n -= n > 2 ? 4 : 1) {
        for (int i = 0; i < n * SIZE; i++) ids[i] = i % SIZE % VOCAB, whole[i] = scores[i % SIZE];
        for (int slot = 0; slot < SLOTS; slot++)
            for (int i = 0; i < n; i++) memcpy(spread + (i * SLOTS + slot) * RANK, e + slot * RANK, RANK * sizeof(float));
        for (int i = 0; i < n; i++) {
            history[i * 64 + 9] = 17;
            blocks[i] = (DraftBlock){.position = 9, .ids = history + i * 64, .stream = 5,
                                     .sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = 3}};
        }
        Drafts drafts = {.slots = SLOTS, .blocks = n, .ids = to_device(ids, sizeof ids), .tokens = tokens,
                         .scores = to_device(whole, (size_t)n * SIZE * sizeof(float))};
        float *device_e = to_device(spread, (size_t)n * SLOTS * RANK * sizeof(float));
        cuda_backend.select_path(&drafts, device_e, &predecessor[1], &successor[1], blocks, n, ACCEPT_COUPLED);
        float *got = from_device(drafts.scores, (size_t)n * SIZE * sizeof(float));
        if (!first) first = malloc(SIZE * sizeof(float)), memcpy(first, got, SIZE * sizeof(float));
        for (int i = 0; i < n; i++)
            CHECK(!memcmp(got + i * SIZE, first, SIZE * sizeof(float)), "select_path: block %d of %d has the same bits", i, n);
        free(got), free_device(drafts.ids), free_device(drafts.scores), free_device(device_e);
    }
    free(first), free(scores), free(e), free(whole), free(spread), free_host(history), free_host(tokens), free_host(blocks);
    free_matrix(&predecessor[0], &predecessor[1]), free_matrix(&successor[0], &successor[1]);
}

static void test_allocate(void) {
    for (int round = 0; round < 60; round++) {
        const int n = round == 0 ? 0 : round < 40 ? draw_between(1, 40) : draw_between(300, 512), slots = draw_between(1, 31);
        float *scores = host_block((size_t)n * (size_t)slots * sizeof(float));
        int *limits = host_block((size_t)n * sizeof(int)), *got = host_block((size_t)n * sizeof(int)), lengths[512];
        for (int i = 0; i < n; i++) {
            float score = 1;
            for (int j = 0; j < slots; j++) scores[i * slots + j] = score *= chance(0.3) ? 1 : 0.25f * (float)draw_between(2, 4);
            limits[i] = draw_between(1, slots + 1);
        }
        const int budgets[] = {0, n, n + draw_between(0, n * slots), n + n * slots / 3, 3 * n * slots};
        for (int b = 0; b < 10; b++) {
            const bool seeded = b % 2;
            (seeded ? c_backend.allocate_seeded : c_backend.allocate)(lengths, scores, limits, n, slots, budgets[b / 2]);
            memset(got, 0xff, (size_t)n * sizeof(int));
            cuda_allocate(got, scores, limits, n, slots, budgets[b / 2], seeded);
            cuda_backend.wait();
            CHECK(!memcmp(got, lengths, (size_t)n * sizeof(int)), "allocate: %d sessions, %d slots, budget %d, seeded %d", n,
                  slots, budgets[b / 2], seeded);
            CHECK(got[n] == -1, "allocate: writes nothing behind the lengths");
        }
        free_host(scores), free_host(limits), free_host(got);
    }
}

static void test_pack_blocks(void) {
    int ids[40];
    Row c_rows[64], gpu_rows[64];
    for (int i = 0; i < 40; i++) ids[i] = 100 + i;
    for (int n = 0; n <= 5; n++) {
        DraftBlock c_blocks[5] = {0}, gpu_blocks[5];
        for (int i = 0; i < n; i++) c_blocks[i] = (DraftBlock){.session = 7 - i, .position = 3 * i, .ids = ids, .count = 1 + i};
        memcpy(gpu_blocks, c_blocks, sizeof c_blocks);
        memset(c_rows, 0, sizeof c_rows), memset(gpu_rows, 0, sizeof gpu_rows);
        int c = c_backend.pack_blocks(c_rows, c_blocks, n, 40), gpu = cuda_backend.pack_blocks(gpu_rows, gpu_blocks, n, 40);
        CHECK(c == gpu && !memcmp(c_rows, gpu_rows, sizeof c_rows), "pack_blocks: %d blocks", n);
        for (int i = 0; i < n; i++) CHECK(c_blocks[i].first == gpu_blocks[i].first, "pack_blocks: first row of block %d", i);
    }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Whole models on the GPU
 */

/* The logits [n, vocab] of rows of session 0 from `first` on, in passes of at most `most` rows; NULL and an error where one
 * fails. */
static float *run_ids(Engine *engine, const int32_t *ids, int first, int n, int most, Error *error) {
    const size_t vocab = (size_t)engine->config.vocab_size;
    float *logits = malloc((size_t)n * vocab * sizeof *logits);
    for (int begin = first, count; begin < first + n; begin += count) {
        cache_step(&engine->cache);
        count = first + n - begin < most ? first + n - begin : most;
        if (count > engine->state.logit_rows) count = engine->state.logit_rows;
        count = cache_room(&engine->cache, 0, count);
        Row rows[MAX_PASS_ROWS];
        int finals[MAX_PASS_ROWS];
        for (int r = 0; r < count; r++) rows[r] = (Row){0, begin + r, ids[begin + r]}, finals[r] = r;
        if (!forward(engine, rows, count, error) || !head(engine, rows, finals, count, error)) return free(logits), NULL;
        engine->backend->copy_bytes(logits + (size_t)(begin - first) * vocab, engine->state.logits,
                                    (size_t)count * vocab * sizeof(float));
        cache_commit(&engine->cache, 0, begin + count);
    }
    return logits;
}

/* The same in passes of one to three rows, behind which run up to three that are not what comes next, and never committed. */
static float *run_rejecting(Engine *engine, const int32_t *ids, int n, Error *error) {
    const size_t vocab = (size_t)engine->config.vocab_size;
    float *logits = malloc((size_t)n * vocab * sizeof *logits);
    for (int begin = 0, count, turn = 0; begin < n; begin += count, turn++) {
        cache_step(&engine->cache);
        count = n - begin < turn % 3 + 1 ? n - begin : turn % 3 + 1;
        const int room = cache_room(&engine->cache, 0, count + turn % 4);
        count = count < room ? count : room;
        Row rows[QUERY_BLOCK];
        int finals[QUERY_BLOCK];
        for (int r = 0; r < room; r++) {
            const int token = r < count ? ids[begin + r] : (7 * turn + 5 * r) % engine->config.vocab_size;
            rows[r] = (Row){0, begin + r, token}, finals[r] = r;
        }
        if (!forward(engine, rows, room, error) || !head(engine, rows, finals, count, error)) return free(logits), NULL;
        engine->backend->copy_bytes(logits + (size_t)begin * vocab, engine->state.logits, (size_t)count * vocab * sizeof(float));
        cache_commit(&engine->cache, 0, begin + count);
    }
    return logits;
}

static bool open_on_gpu(Engine *engine, const char *directory, int context, KvDtype dtype, KvMode mode) {
    EngineOptions options = {.backend = &cuda_backend, .model = directory, .sessions = 1, .context = context, .kv_dtype = dtype,
                             .kv_mode = mode};
    Error error;
    int cached;
    bool ok = engine_open(engine, &options, &error);
    CHECK(ok, "%s", error.text);
    return ok && cache_admit(&engine->cache, 0, NULL, 0, context, &cached);
}

static double largest_difference(const float *a, const float *b, size_t n) {
    double worst = 0;
    for (size_t i = 0; i < n; i++) worst = fmax(worst, isnan(a[i]) ? INFINITY : fabs((double)a[i] - b[i]));
    return worst;
}

/* ---- goldens: what a pass decides, its selections and its experts, is taken from the C backend's pass, which test_forward holds to the
 * reference's. Else one near tie that falls the other way hides how close the numbers are. */

typedef struct Decision {
    int *ids, *count;
    float *weights;
} Decision; /* of one index_select() or route(): ids [rows, each] */

static struct {
    Decision all[1024];
    int n, next;
} decisions; /* in the order in which a pass makes them, where nothing may grow */

static int *copied_ints(const void *from, size_t n) {
    return memcpy(malloc(n * sizeof(int) + 1), from, n * sizeof(int));
}

static void remember_selection(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                               const RowFormat *format, const DevicePage *pages, int context_pages, int heads, int head_dim,
                               const Row *rows, int n_rows, float *scratch, int scratch_rows) {
    c_backend.index_select(selection, q, head_weights, keys, format, pages, context_pages, heads, head_dim, rows, n_rows, scratch,
                           scratch_rows);
    Decision made = {copied_ints(selection->ids, (size_t)(n_rows * selection->capacity)),
                     copied_ints(selection->count, (size_t)n_rows), NULL};
    decisions.all[decisions.n++] = made;
}

static void take_selection(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                           const RowFormat *format, const DevicePage *pages, int context_pages, int heads, int head_dim,
                           const Row *rows, int n_rows, float *scratch, int scratch_rows) {
    (void)q, (void)head_weights, (void)keys, (void)format, (void)pages, (void)context_pages, (void)heads, (void)head_dim,
        (void)rows;
    (void)scratch, (void)scratch_rows;
    const Decision *made = &decisions.all[decisions.next++];
    cuda_backend.upload(selection->ids, made->ids, (size_t)(n_rows * selection->capacity) * sizeof(int));
    cuda_backend.upload(selection->count, made->count, (size_t)n_rows * sizeof(int));
}

static void remember_route(int *picks, float *weights, const float *logits, const float *bias, int n_rows, const Config *config) {
    const size_t n = (size_t)(n_rows * config->num_experts_per_tok);
    c_backend.route(picks, weights, logits, bias, n_rows, config);
    Decision made = {copied_ints(picks, n), NULL, (float *)copied_ints(weights, n)};
    decisions.all[decisions.n++] = made;
}

static void take_route(int *picks, float *weights, const float *logits, const float *bias, int n_rows, const Config *config) {
    (void)logits, (void)bias;
    const Decision *made = &decisions.all[decisions.next++];
    const size_t bytes = (size_t)(n_rows * config->num_experts_per_tok) * 4;
    cuda_backend.upload(picks, made->ids, bytes);
    cuda_backend.upload(weights, made->weights, bytes);
}

static void remember_groups(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                            const RowFormat *format, const DevicePage *pages, int context_pages, int page_rows, int heads,
                            int head_dim, const Row *rows, int n_rows, float *scratch, int scratch_rows, uint64_t *blocks,
                            int block_size, int topk_blocks, bool keeps) {
    c_backend.select_groups(selection, q, head_weights, keys, format, pages, context_pages, page_rows, heads, head_dim, rows,
                            n_rows, scratch, scratch_rows, blocks, block_size, topk_blocks, keeps);
    Decision made = {copied_ints(selection->ids, (size_t)(n_rows * selection->capacity)),
                     copied_ints(selection->count, (size_t)n_rows), NULL};
    decisions.all[decisions.n++] = made;
}

static void take_groups(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                        const RowFormat *format, const DevicePage *pages, int context_pages, int page_rows, int heads,
                        int head_dim, const Row *rows, int n_rows, float *scratch, int scratch_rows, uint64_t *blocks,
                        int block_size, int topk_blocks, bool keeps) {
    (void)page_rows, (void)blocks, (void)block_size, (void)topk_blocks, (void)keeps;
    take_selection(selection, q, head_weights, keys, format, pages, context_pages, heads, head_dim, rows, n_rows, scratch,
                   scratch_rows);
}

static void remember_softplus(int *picks, float *weights, const float *logits, const float *bias, const int *table,
                              const Row *rows, int n_rows, const Config *config) {
    const size_t n = (size_t)(n_rows * config->num_experts_per_tok);
    c_backend.route_softplus(picks, weights, logits, bias, table, rows, n_rows, config);
    Decision made = {copied_ints(picks, n), NULL, (float *)copied_ints(weights, n)};
    decisions.all[decisions.n++] = made;
}

static void take_softplus(int *picks, float *weights, const float *logits, const float *bias, const int *table, const Row *rows,
                          int n_rows, const Config *config) {
    (void)table, (void)rows;
    take_route(picks, weights, logits, bias, n_rows, config);
}

/* The prompt in small passes, with that backend's choice of operations. NULL: it failed. The caller frees the logits. */
static float *run_deciding(const char *directory, const Backend *opened, const Backend *used, const int32_t *ids, int n) {
    EngineOptions options = {.backend = opened, .model = directory, .sessions = 1, .context = n + 8, .kv_dtype = KV_F32,
                             .kv_mode = MODE_RESIDENT};
    Engine engine;
    Error error;
    int cached;
    if (!engine_open(&engine, &options, &error)) return NULL;
    engine.backend = used;
    cache_admit(&engine.cache, 0, NULL, 0, n + 8, &cached);
    float *logits = run_ids(&engine, ids, 0, n, QUERY_BLOCK, &error);
    engine.backend = opened;
    engine_close(&engine);
    return logits;
}

/* The reference's logits within 2e-2, and far closer in fact: activations meet weights as two terms of bf16. */
static void compare_with_golden(const char *directory, const float *freely, const float *golden, const int32_t *ids, int n,
                                int vocab) {
    Backend remembering = c_backend, taking = cuda_backend;
    const size_t size = (size_t)n * (size_t)vocab;
    Error error;
    cuda_backend.start(&(DeviceOptions){.no_graph = true}, &error);     /* a kept work would not ask for decisions again */
    remembering.index_select = remember_selection, remembering.route = remember_route;
    remembering.select_groups = remember_groups, remembering.route_softplus = remember_softplus;
    taking.index_select = take_selection, taking.route = take_route;
    taking.select_groups = take_groups, taking.route_softplus = take_softplus;
    decisions.n = 0;
    float *exact = run_deciding(directory, &c_backend, &remembering, ids, n);
    decisions.next = 0;
    float *held = exact ? run_deciding(directory, &cuda_backend, &taking, ids, n) : NULL;
    CHECK(held && decisions.next == decisions.n, "%s: %d decisions of %d", directory, decisions.next, decisions.n);
    if (held) {
        double worst = largest_difference(held, golden, size);
        printf("%s: logits differ from the golden ones by %.1e at most; by %.1e with decisions of its own\n", directory, worst,
               largest_difference(freely, golden, size));
        CHECK(worst <= 2e-2, "%s: logits differ from the golden ones by %g", directory, worst);
    }
    for (int i = 0; i < decisions.n; i++)
        free(decisions.all[i].ids), free(decisions.all[i].count), free(decisions.all[i].weights);
    free(exact), free(held);
    cuda_backend.start(&(DeviceOptions){0}, &error);
}

/* A session of the first half of the prompt is taken out of the cache, whole pages, rows of the last and what its layers look
 * back to, and goes on in another engine: the other half's logits are the same bits. */
static void check_moved(const char *directory, const int32_t *ids, int n, KvDtype dtype, KvMode mode, const float *whole) {
    const int half = n / 2 + 1;
    uint8_t *pages[64], *trails = NULL;
    Engine engine;
    Error error;
    for (int turn = 0; turn < 2; turn++) {
        if (!open_on_gpu(&engine, directory, n + 8, dtype, mode)) return;
        Cache *cache = &engine.cache;
        const int rows = half / cache->ratio, n_pages = (rows + PAGE_ROWS - 1) / PAGE_ROWS;
        const size_t vocab = (size_t)engine.config.vocab_size;
        for (int page = 0; page < n_pages && turn; page++) {
            const int left = rows - page * PAGE_ROWS;
            cache_append_page(cache, 0, pages[page], left < PAGE_ROWS ? left : PAGE_ROWS);
            free(pages[page]);
        }
        if (turn && cache->trail_layers) cache_append_trails(cache, 0, half, trails);
        float *logits = run_ids(&engine, ids, turn * half, turn ? n - half : half, 7, &error);
        CHECK(logits && !memcmp(logits, whole + (size_t)(turn * half) * vocab,
                                (size_t)(turn ? n - half : half) * vocab * sizeof *logits),
              "%s: rows %d, %s: the same bits %s", directory, dtype, kv_mode_names[mode],
              turn ? "in another engine" : "at first");
        free(logits);
        for (int page = 0; page < n_pages && !turn; page++)
            cache_read_page(cache, 0, page, pages[page] = malloc(page_image_bytes(cache)));
        if (!turn) cache_read_trails(cache, 0, half, trails = malloc(trail_image_bytes(cache, half) + 1));
        engine_close(&engine);
    }
    free(trails);
}

/* The prompt of a fixture in one pass is near the references' logits; in other passes it has the same bits. */
static void test_fixture(const char *directory) {
    Checkpoint golden = {0};
    Engine engine;
    Error error;
    char path[PATH_MAX];
    bool ok = map_file(&golden, join(path, directory, "golden.safetensors"), &error);
    CHECK(ok, "%s", error.text);
    if (!ok) return;
    const Tensor *ids = checkpoint_find(&golden, "input_ids"), *wanted = checkpoint_find(&golden, "logits");
    const int n = (int)ids->shape[0], kinds = strstr(directory, "deepseek_v4") ? KV_F4 : KV_F8;
    for (int kind = KV_F32; kind <= kinds; kind++) {
        float *whole = NULL;
        for (int way = 0; way < 8; way++) {
            static const int most[] = {MAX_PASS_ROWS, 1, 7, 3, 8, 5, 0, 0};         /* 0: with rows that are rejected */
            KvMode mode = way < 3 ? MODE_RESIDENT : way == 5 || way == 6 ? MODE_ADAPTIVE : MODE_HISPARSE;
            if (!open_on_gpu(&engine, directory, n + 8, (KvDtype)kind, mode)) break;
            float *logits = most[way] ? run_ids(&engine, (const int32_t *)ids->data, 0, n, most[way], &error)
                                      : run_rejecting(&engine, (const int32_t *)ids->data, n, &error);
            const size_t size = (size_t)n * (size_t)engine.config.vocab_size;
            CHECK(logits, "%s: %s", directory, error.text);
            if (logits && !way && !kind)
                compare_with_golden(directory, logits, (const float *)wanted->data, (const int32_t *)ids->data, n,
                                    engine.config.vocab_size);
            if (logits && way)
                CHECK(!memcmp(logits, whole, size * sizeof *logits), "%s: rows %d, passes of %d, %s: the same bits", directory,
                      kind, most[way], kv_mode_names[mode]);
            if (!way) whole = logits;
            else free(logits);
            engine_close(&engine);
        }
        for (int mode = MODE_RESIDENT; mode < MODES && whole; mode++)
            check_moved(directory, (const int32_t *)ids->data, n, (KvDtype)kind, (KvMode)mode, whole);
        free(whole);
    }
    checkpoint_close(&golden);
}

static void test_fixtures(void) {
    static const char *const parent = "tests/fixtures";
    DIR *listing = opendir(parent);
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        char directory[PATH_MAX], path[PATH_MAX];
        bool family = !strncmp(entry->d_name, "qwen3-", 6) || !strncmp(entry->d_name, "glm_moe_dsa-", 12)
                      || !strncmp(entry->d_name, "deepseek_v32-", 13)
                      || (cuda_backend.window_attention && !strncmp(entry->d_name, "deepseek_v4", 11));
        if (family && !access(join(path, join(directory, parent, entry->d_name), "golden.safetensors"), R_OK))
            test_fixture(directory);
    }
    if (listing) closedir(listing);
}

/* ---- rounds: whatever the batch, the mode and the drafter, the same ids */

enum { ROUND_SESSIONS = 16, ROUND_TOKENS = 48, ROUND_CONTEXT = 512 };

static int *answer_prompts(const char *draft, KvMode mode, int slots, float temperature, size_t budget, VerifyRule verify) {
    EngineOptions options = {.backend = &cuda_backend, .model = "weights/mini", .draft = draft, .sessions = slots,
                             .context = ROUND_CONTEXT, .kv_dtype = KV_BF16, .kv_mode = mode, .kv_budget = budget};
    Runner runner;
    Error error;
    bool ok = runner_open(&runner, &options, true, NULL, &error);
    CHECK(ok, "%s", error.text);
    if (!ok) return NULL;
    runner.speculation.verify = verify;
    int *answers = calloc(ROUND_SESSIONS * ROUND_TOKENS, sizeof(int)), next = 0, done = 0;
    Session sessions[ROUND_SESSIONS] = {0}, *active[ROUND_SESSIONS];
    int running[ROUND_SESSIONS], n;
    for (int s = 0; s < slots; s++) running[s] = -1;
    while (done < ROUND_SESSIONS) {
        n = 0;
        for (int s = 0; s < slots; s++) {
            Session *session = &sessions[s];
            if (running[s] < 0 && next < ROUND_SESSIONS) {
                *session = (Session){.slot = s, .stream = (uint64_t)next, .max_new = ROUND_TOKENS,
                                     .sampling = {.temperature = temperature, .top_p = 0.95f, .top_k = next % 2 ? 0 : 50,
                                                  .repeat_penalty = next % 3 ? 1 : 1.1f, .seed = 7}};
                test_seed = (uint64_t)next + 1;
                for (int i = 0, length = 5 + next * 23; i < length; i++) arrput(session->ids, 300 + (int)(draw() % 5000));
                session_begin(session, &runner.engine);
                running[s] = next++;
            }
            if (running[s] >= 0 && session_admit(&runner, session)) active[n++] = session;
        }
        if (n) run_round(&runner, active, n);
        else cache_step(&runner.engine.cache);
        for (int s = 0; s < slots; s++) {
            if (running[s] < 0 || sessions[s].finish == RUNNING) continue;
            CHECK(sessions[s].finish != FINISH_ERROR, "%s", sessions[s].error.text);
            for (int i = 0; i < tokens_generated(&sessions[s]); i++)
                answers[running[s] * ROUND_TOKENS + i] = sessions[s].ids[sessions[s].prompt_length + i];
            session_free(&sessions[s]);
            cache_release(&runner.engine.cache, s);
            running[s] = -1;
            done++;
        }
    }
    printf("mini, %s, %s, %d slots, T %g: %ld rounds, %ld tokens, %.2f s\n", draft ? draft : "no drafts", kv_mode_names[mode],
           slots, (double)temperature, runner.rounds, runner.tokens, runner.seconds);
    runner_close(&runner);
    return answers;
}

static void test_rounds(void) {
    static const char *const drafts[] = {NULL, "weights/draft-dflash2", "weights/draft-dspark"};
    for (int warm = 0; warm < 2; warm++) {
        int *plain = answer_prompts(NULL, MODE_RESIDENT, 1, (float)warm, 0, VERIFY_FULL);
        for (int d = 0; d < 3; d++)
            for (int mode = MODE_HISPARSE; mode < MODES && plain; mode++)
                for (int slots = 1; slots <= 16; slots += 5) {
                    int *other = answer_prompts(drafts[d], (KvMode)mode, slots, (float)warm, 0,
                                                d == 1   ? VERIFY_DVL
                                                : d == 2 ? VERIFY_CONFIDENCE
                                                         : VERIFY_FULL);
                    CHECK(other && !memcmp(other, plain, ROUND_SESSIONS * ROUND_TOKENS * sizeof(int)),
                          "%s, %s, %d slots, T %d: the same ids", drafts[d] ? drafts[d] : "no drafts", kv_mode_names[mode], slots,
                          warm);
                    free(other);
                }
        free(plain);
    }
}

/* ---- a soak: sessions come, are broken off and end at random, under a budget that has to be shared, for as many rounds as asked */

enum { SOAK_TALKS = 24, SOAK_SLOTS = 16, SOAK_CONTEXT = 1024, SOAK_TOKENS = 96, SOAK_SLACK = 32 << 20 };

static Session soak_session(Runner *runner, int talk, int slot) {
    Session session = {
        .slot = slot,
        .stream = (uint64_t)talk,
        .max_new = SOAK_TOKENS,
        .sampling = {
            .temperature = talk % 2 ? 0.8f : 0, .top_p = 0.95f, .top_k = talk % 3 ? 0 : 40, .repeat_penalty = 1, .seed = 7}};
    uint64_t before = test_seed;
    test_seed = (uint64_t)talk + 1;
    for (int i = 0, length = 5 + talk * 37; i < length; i++) arrput(session.ids, 300 + (int)(draw() % 5000));
    test_seed = before;
    session_begin(&session, &runner->engine);
    return session;
}

/* What each talk says alone, without a drafter, everything resident. */
static bool soak_alone(int **answers) {
    EngineOptions options = {.backend = &cuda_backend, .model = "weights/mini", .sessions = 1, .context = SOAK_CONTEXT,
                             .kv_dtype = KV_BF16, .kv_mode = MODE_RESIDENT};
    Runner runner;
    Error error;
    bool ok = runner_open(&runner, &options, false, NULL, &error);
    CHECK(ok, "%s", error.text);
    for (int t = 0; ok && t < SOAK_TALKS; t++) {
        Session session = soak_session(&runner, t, 0);
        run_session(&runner, &session);
        memcpy(arraddnptr(answers[t], arrlenu(session.ids)), session.ids, arrlenu(session.ids) * sizeof(int));
        session_free(&session);
        cache_release(&runner.engine.cache, 0);
    }
    if (ok) runner_close(&runner);
    return ok;
}

static size_t resident_bytes(void) {
    size_t all = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%zu %zu", &all, &resident) != 2) resident = 0;
    if (file) fclose(file);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

/* As a user of them would end it: broken off one round in a hundred. */
static void end_soaked(Runner *runner, Session *sessions, int *talk_of, int **answers, long *said, long *aborted) {
    for (int s = 0; s < SOAK_SLOTS; s++) {
        Session *session = &sessions[s];
        if (talk_of[s] < 0) continue;
        if (session->finish == RUNNING && draw_between(0, 99) == 0) session_stop(session, FINISH_INTERRUPTED), ++*aborted;
        if (session->finish == RUNNING) continue;
        const int *alone = answers[talk_of[s]];
        const size_t n = arrlenu(session->ids);
        CHECK(session->finish != FINISH_ERROR, "%s", session->error.text);
        CHECK(session->finish == FINISH_INTERRUPTED ? n <= arrlenu(alone) : n == arrlenu(alone), "talk %d: %zu ids", talk_of[s],
              n);
        CHECK(n <= arrlenu(alone) && !memcmp(session->ids, alone, n * sizeof(int)), "talk %d says what it says alone",
              talk_of[s]);
        *said += tokens_generated(session);
        session_free(session);
        cache_release(&runner->engine.cache, s);
        talk_of[s] = -1;
    }
}

static void test_soak(long rounds) {
    int *answers[SOAK_TALKS] = {NULL}, talk_of[SOAK_SLOTS];
    EngineOptions options = {.backend = &cuda_backend,
                             .model = "weights/mini",
                             .draft = "weights/draft-dflash2",
                             .sessions = SOAK_SLOTS,
                             .context = SOAK_CONTEXT,
                             .kv_dtype = KV_BF16,
                             .kv_mode = MODE_ADAPTIVE,
                             .kv_budget = 44 << 20};
    Runner runner;
    Error error;
    Session sessions[SOAK_SLOTS] = {0};
    long said = 0, aborted = 0;
    size_t device = 0, host = 0;
    if (!soak_alone(answers)) return;
    bool ok = runner_open(&runner, &options, false, NULL, &error);
    CHECK(ok, "%s", error.text);
    if (!ok) return;
    for (int s = 0; s < SOAK_SLOTS; s++) talk_of[s] = -1;
    for (long turn = 0; runner.rounds < rounds && turn < 4 * rounds; turn++) {
        Session *active[SOAK_SLOTS];
        int n = 0;
        for (int s = 0; s < SOAK_SLOTS; s++) {
            if (talk_of[s] < 0 && draw_between(0, 3) == 0)
                sessions[s] = soak_session(&runner, talk_of[s] = draw_between(0, SOAK_TALKS - 1), s);
            if (talk_of[s] >= 0 && session_admit(&runner, &sessions[s])) active[n++] = &sessions[s];
        }
        if (n) run_round(&runner, active, n);
        else cache_step(&runner.engine.cache);
        end_soaked(&runner, sessions, talk_of, answers, &said, &aborted);
        if (n && runner.rounds % (rounds / 10) == 0)
            printf("%ld rounds: %zu MiB resident\n", runner.rounds, resident_bytes() >> 20);
        if (device || runner.rounds < rounds / 2) continue;     /* by then as many works are kept as may be */
        device = cuda_backend.available(MEMORY_DEVICE), host = resident_bytes();
    }
    const CacheStats *stats = &runner.engine.cache.stats;
    const size_t host_end = resident_bytes(), device_end = cuda_backend.available(MEMORY_DEVICE);
    printf("soak: %ld rounds, %ld tokens, %ld sessions broken off, %lu pages lent, %lu recalled, %lu rows fetched, %lu waits; "
           "halfway %zu MiB resident and %zu MiB free on the device, at the end %zu and %zu\n",
           runner.rounds, said, aborted, stats->pages_lent, stats->pages_recalled, stats->fetched, stats->admission_waits,
           host >> 20, device >> 20, host_end >> 20, device_end >> 20);
    CHECK(runner.rounds >= rounds && aborted && stats->pages_recalled && stats->fetched, "everything has happened");
    CHECK(device_end + SOAK_SLACK >= device, "%zu MiB of device memory are gone", (device - device_end) >> 20);
    CHECK(host_end <= host + SOAK_SLACK, "host memory has grown by %zu MiB", (host_end - host) >> 20);
    for (int s = 0; s < SOAK_SLOTS; s++) session_free(&sessions[s]);
    for (int t = 0; t < SOAK_TALKS; t++) arrfree(answers[t]);
    runner_close(&runner);
}

/* ---- what cannot be done ends in one sentence */

static void test_out_of_memory(void) {
    Error error = {""};
    void *block = cuda_backend.take((size_t)1 << 45, MEMORY_DEVICE, &error);
    CHECK(!block && !strncmp(error.text, "cannot take ", 12) && strstr(error.text, "GPU memory: out of memory"), "%s",
          error.text);
    block = cuda_backend.take(1 << 20, MEMORY_DEVICE, &error);
    CHECK(block, "and a block that fits is there afterwards: %s", error.text);
    cuda_backend.give_back(block, MEMORY_DEVICE);
}

/* This program again, in which it gives back what it never took. */
static void test_cuda_error(void) {
    char line[512] = "", more[8] = "", path[PATH_MAX] = "", command[PATH_MAX + 32];
    CHECK(readlink("/proc/self/exe", path, sizeof path - 1) > 0, "the program's own path");
    snprintf(command, sizeof command, "'%s' fault 2>&1", path);
    FILE *pipe = popen(command, "r");
    bool said = pipe && fgets(line, sizeof line, pipe) && !fgets(more, sizeof more, pipe);
    int status = pipe ? pclose(pipe) : -1;
    CHECK(said && !strncmp(line, "tide: engine.cu:", 16) && strstr(line, ": CUDA: "), "one line names file, line and cause: %s",
          line);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1, "and the program ends with 1");
}

/* Weights of no file: the same bytes on both backends, in any number. */
static void test_make_weights(void) {
    static const DType dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F8_E4M3, DTYPE_I8, DTYPE_F8_E8M0};
    static const size_t counts[] = {1, 3, 4, 1023, 1024, 70001};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            Error error;
            const size_t bytes = counts[i] * dtype_size(dtypes[d]);
            uint8_t *in_c = malloc(bytes), *out;
            c_backend.make_weights(in_c, dtypes[d], counts[i], -256, 256, 7 + i, &error);
            out = from_device(cuda_backend.make_weights(NULL, dtypes[d], counts[i], -256, 256, 7 + i, &error), bytes);
            CHECK(!memcmp(in_c, out, bytes), "%zu made-up weights of type %d", counts[i], dtypes[d]);
            free(in_c);
            free(out);
        }
    cuda_backend.release_weights();
}

static const char *only;        /* a part of the names of the tests that run; NULL: all */
#define RUN(test)                                                                                                               \
    do {                                                                                                                        \
        if (only && !strstr(#test, only)) break;                                                                                \
        test();                                                                                                                 \
        printf(#test ": %d passed, %d failed so far\n", checks_passed, checks_failed);                                          \
    } while (0)

/* test_gpu: everything but the soak; test_gpu NAME: the tests that have this in their names; test_gpu soak ROUNDS. */
int main(int argc, char **argv) {
    Error error;
    setlinebuf(stdout);
    if (!cuda_backend.start(&(DeviceOptions){0}, &error)) return fprintf(stderr, "test_gpu: %s\n", error.text), 1;
    if (argc == 2 && !strcmp(argv[1], "fault")) return cuda_backend.give_back((void *)8, MEMORY_DEVICE), 0;
    if (argc == 3 && !strcmp(argv[1], "soak")) return test_soak(atol(argv[2])), check_report();
    only = argc == 2 ? argv[1] : NULL;
    RUN(test_out_of_memory);
    RUN(test_cuda_error);
    RUN(test_products);
    RUN(test_experts);
    RUN(test_shared_binades);
    RUN(test_store_rows);
    RUN(test_store_codes);
    RUN(test_index_select);
    RUN(test_index_plain);
    RUN(test_index_special);
    RUN(test_index_odd);
    RUN(test_select_groups);
    RUN(test_sparse_attention);
    RUN(test_empty_selection);
    RUN(test_latent_lists);
    RUN(test_latent_nan);
    RUN(test_dense_attention);
    RUN(test_block_attention);
    RUN(test_round_rows);
    RUN(test_hadamard);
    RUN(test_index_queries);
    RUN(test_shared_keys);
    RUN(test_streams);
    RUN(test_engram);
    RUN(test_route_softplus);
    RUN(test_grouped_linear);
    RUN(test_small_blocks);
    RUN(test_windows);
    RUN(test_resolve);
    RUN(test_page_copies);
    RUN(test_stretched_copies);
    RUN(test_locate_groups);
    RUN(test_trails);
    RUN(test_read_engram);
    RUN(test_accept);
    RUN(test_candidates);
    RUN(test_predict_lengths);
    RUN(test_draws);
    RUN(test_path_independence);
    RUN(test_allocate);
    RUN(test_pack_blocks);
    RUN(test_make_weights);
    printf("operations: %d passed, %d failed\n", checks_passed, checks_failed);
    RUN(test_fixtures);
    RUN(test_rounds);
    return check_report();
}
