/* bench.c: measurements, each beside its ceiling.
 *
 *     cpu . load
 *
 * Owns: what `tide bench NAME` does: one function for each NAME, with its workload stated above it. A figure is measured or computed
 * in the run that prints it; stdout carries the figures.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BENCH_PREFILL = 512, BENCH_REPEATS = 5, BENCH_STEPS = 16, BENCH_VOCAB = 32768 };

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the values. */
static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

typedef float f32x8 __attribute__((vector_size(32)));

static f32x8 splat8(float x) { return (f32x8){x, x, x, x, x, x, x, x}; }

static float sum8(f32x8 v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }

/* Bytes a second that all threads together read from memory: sums over a buffer. */
static double time_read(const float *data, size_t count) {
    double start = now();
    float total = 0;
#pragma omp parallel for reduction(+ : total) schedule(static)
    for (size_t block = 0; block < count / 4096; block++) {
        f32x8 sums[4] = {0};
        const float *p = data + block * 4096;
        for (int i = 0; i < 4096; i += 32)
            for (int j = 0; j < 4; j++) {
                f32x8 loaded;
                memcpy(&loaded, p + i + 8 * j, sizeof loaded);
                sums[j] += loaded;
            }
        total += sum8(sums[0] + sums[1] + sums[2] + sums[3]);
    }
    volatile float kept = total;
    (void)kept;
    return (double)(count * sizeof(float)) / (now() - start);
}

/* Multiply-adds a second (two operations each) that all threads together do in registers. */
static double time_fma(void) {
    enum { ROUNDS = 4 << 20 };
    double start = now();
    float total = 0;
    int threads = omp_get_max_threads();
#pragma omp parallel reduction(+ : total)
    {
        f32x8 sums[12], factor = splat8(0.999f), term = splat8(1e-3f);
        for (int i = 0; i < 12; i++) sums[i] = splat8((float)i);
        for (int n = 0; n < ROUNDS; n++)
            for (int i = 0; i < 12; i++) sums[i] = sums[i] * factor + term;       /* one instruction */
        for (int i = 0; i < 12; i++) total += sum8(sums[i]);
    }
    volatile float kept = total;
    (void)kept;
    return 2.0 * 8 * 12 * ROUNDS * threads / (now() - start);
}

/* The i-th of a stream of bf16 values within 0.05 of zero: a hash of i (MurmurHash3's last steps), the upper half of a float. */
static uint16_t random_weight(uint64_t i) {
    i = (i ^ i >> 33) * 0xff51afd7ed558ccdu;
    i = (i ^ i >> 33) * 0xc4ceb9fe1a85ec53u;
    float value = ((float)(i >> 40) * 0x1p-24f - 0.5f) * 0.1f;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static Matrix random_matrix(uint16_t *block, size_t *used, int rows, int cols) {
    Matrix matrix = {.data = (const uint8_t *)(block + *used), .dtype = DTYPE_BF16, .rows = rows, .cols = cols};
    *used += (size_t)rows * (size_t)cols;
    return matrix;
}

/* Four layers in the shape of Qwen3-1.7B and a small vocabulary, as random bf16 weights in memory: 537 MB. */
static void make_dense_model(Engine *engine, uint16_t **block, float **ones) {
    enum { LAYERS = 4, HIDDEN = 2048, HEADS = 16, KV_HEADS = 8, DIM = 128, INNER = 6144, VOCAB = BENCH_VOCAB };
    Config *config = &engine->config;
    *config = (Config){.family = FAMILY_QWEN3,
                       .model_type = "qwen3",
                       .vocab_size = VOCAB,
                       .hidden_size = HIDDEN,
                       .intermediate_size = INNER,
                       .num_hidden_layers = LAYERS,
                       .max_position_embeddings = 4096,
                       .num_attention_heads = HEADS,
                       .num_key_value_heads = KV_HEADS,
                       .head_dim = DIM,
                       .tie_word_embeddings = true,
                       .rms_norm_eps = 1e-6f,
                       .rope.rope_theta = 1e6};
    size_t per_layer = (size_t)HIDDEN * DIM * (2 * HEADS + 2 * KV_HEADS) + (size_t)3 * HIDDEN * INNER,
           total = LAYERS * per_layer + (size_t)VOCAB * HIDDEN, used = 0;
    *block = allocate_zeroed(total, sizeof **block);
    *ones = allocate_zeroed(HIDDEN, sizeof **ones);
    for (int i = 0; i < HIDDEN; i++) (*ones)[i] = 1;
#pragma omp parallel for
    for (size_t i = 0; i < total; i++) (*block)[i] = random_weight(i);
    Weights *weights = &engine->weights;
    weights->layers = allocate_zeroed(LAYERS, sizeof(LayerWeights));
    weights->embed_tokens = weights->lm_head = random_matrix(*block, &used, VOCAB, HIDDEN);
    weights->norm = *ones;
    weights->parameters = total;
    weights->bytes = 2 * total;
    for (int i = 0; i < LAYERS; i++) {
        LayerWeights *layer = &weights->layers[i];
        layer->input_layernorm = layer->post_attention_layernorm = layer->q_norm = layer->k_norm = *ones;
        layer->q_proj = random_matrix(*block, &used, HEADS * DIM, HIDDEN);
        layer->k_proj = random_matrix(*block, &used, KV_HEADS * DIM, HIDDEN);
        layer->v_proj = random_matrix(*block, &used, KV_HEADS * DIM, HIDDEN);
        layer->o_proj = random_matrix(*block, &used, HIDDEN, HEADS * DIM);
        layer->gate_proj = random_matrix(*block, &used, INNER, HIDDEN);
        layer->up_proj = random_matrix(*block, &used, INNER, HIDDEN);
        layer->down_proj = random_matrix(*block, &used, HIDDEN, INNER);
    }
}

/* Seconds of one prefill, or of one decoded token, over rows at positions [first, first + n) of session 0. */
static bool time_rows(Engine *engine, int first, int n, int per_pass, double *seconds, Error *error) {
    Row rows[BENCH_PREFILL];
    cache_truncate(&engine->cache, 0, first);
    double start = now();
    for (int begin = 0; begin < n; begin += per_pass) {
        cache_step(&engine->cache);
        cache_room(&engine->cache, 0, per_pass);
        for (int r = 0; r < per_pass; r++) rows[r] = (Row){0, first + begin + r, 7 * (begin + r) % BENCH_VOCAB};
        int last = per_pass - 1;
        if (!forward(engine, rows, per_pass, error) || !head(engine, rows, &last, 1, error)) return false;
        cache_commit(&engine->cache, 0, first + begin + per_pass);
    }
    *seconds = (now() - start) * per_pass / n;
    return true;
}

static void print_cpu(const Engine *engine, double *reads, double *decodes, double *rates, double *prefills) {
    double read = median(reads, BENCH_REPEATS), rate = median(rates, BENCH_REPEATS), decode = median(decodes, BENCH_REPEATS),
           prefill = median(prefills, BENCH_REPEATS);
    /* Per decoded token every weight and the history's keys and values are read once. Per prefilled token each weight of the layers
     * is one multiply-add, and each earlier position two for every value of the query heads. */
    const Config *config = &engine->config;
    double history = (double)config->num_hidden_layers * (BENCH_PREFILL + BENCH_STEPS / 2.0) * (double)engine->cache.format.stride;
    double achieved = ((double)engine->weights.bytes + history) / decode, pairs = BENCH_PREFILL * (BENCH_PREFILL + 1) / 2.0;
    double body = (double)(engine->weights.parameters - (size_t)BENCH_VOCAB * (size_t)config->hidden_size) * BENCH_PREFILL;
    double work = 2 * (body + 2.0 * config->num_hidden_layers * pairs * config->num_attention_heads * config->head_dim) / prefill;
    printf("model            %.0f MB of bf16 weights, %d threads\n", (double)engine->weights.bytes / 1e6, omp_get_max_threads());
    printf("read bandwidth   %6.1f GB/s\n", read / 1e9);
    printf("decode           %6.1f GB/s of weights and cached rows, %.1f tokens/s: %.0f%% of the read bandwidth\n",
           achieved / 1e9, 1 / decode, 100 * achieved / read);
    printf("fma rate         %6.1f GFLOP/s\n", rate / 1e9);
    printf("prefill %d      %6.1f GFLOP/s in matrices and attention, %.0f tokens/s: %.0f%% of the fma rate\n", BENCH_PREFILL,
           work / 1e9, BENCH_PREFILL / prefill, 100 * work / rate);
}

/* Decode against the read bandwidth and prefill against the multiply-add rate, each ceiling measured between the runs. */
static bool bench_cpu(EngineOptions options, const char *directory, Error *error) {
    (void)directory;
    Engine engine = {.backend = &c_backend};
    uint16_t *block;
    float *ones;
    options.sessions = 1;
    options.context = 1024;
    make_dense_model(&engine, &block, &ones);
    int cached;
    double reads[BENCH_REPEATS], rates[BENCH_REPEATS], decodes[BENCH_REPEATS], prefills[BENCH_REPEATS], first;
    bool ok = plan_memory(&engine, &options, error) && take_memory(&engine, error);
    if (ok) prepare_rope(&engine);
    ok = ok && cache_admit(&engine.cache, 0, NULL, 0, engine.cache.context, &cached)
         && time_rows(&engine, 0, BENCH_PREFILL, BENCH_PREFILL, &first, error);
    for (int i = 0; i < BENCH_REPEATS && ok; i++) {
        reads[i] = time_read((const float *)block, engine.weights.bytes / sizeof(float));
        ok = time_rows(&engine, BENCH_PREFILL, BENCH_STEPS, 1, &decodes[i], error);
        rates[i] = time_fma();
        ok = ok && time_rows(&engine, 0, BENCH_PREFILL, BENCH_PREFILL, &prefills[i], error);
    }
    if (ok) print_cpu(&engine, reads, decodes, rates, prefills);
    engine_close(&engine);
    free(block);
    free(ones);
    return ok;
}

/* From nothing to a bound checkpoint and a ready tokenizer. */
static bool bench_load(EngineOptions options, const char *directory, Error *error) {
    (void)directory;
    double seconds[BENCH_REPEATS];
    for (int i = 0; i < BENCH_REPEATS; i++) {
        Runner runner;
        double begin = now();
        if (!runner_open(&runner, &options, false, NULL, error)) return false;
        seconds[i] = now() - begin;
        runner_close(&runner);
    }
    printf("load             %.3f s: checkpoint, weights and tokenizer of %s\n", median(seconds, BENCH_REPEATS), options.model);
    return true;
}

/* ---- the list of them */

static const struct { const char *name; bool (*run)(EngineOptions options, const char *directory, Error *error); } benches[] = {
    {"cpu", bench_cpu}, {"load", bench_load},
};

int bench(const char *name, const EngineOptions *options, const char *directory, Error *error) {
    enum { DONE, FAILED, UNKNOWN };
    char names[256] = "";
    for (size_t i = 0; i < sizeof benches / sizeof *benches; i++) {
        if (name && !strcmp(name, benches[i].name)) return benches[i].run(*options, directory, error) ? DONE : FAILED;
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "", benches[i].name);
    }
    fail(error, "bench wants one of %s", names);
    return UNKNOWN;
}
