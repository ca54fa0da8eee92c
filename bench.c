/* bench.c: measurements, each beside its ceiling or beside what it is compared with.
 *
 *     figures . cpu . load . serving: loadstep, hotsweep, offered, cost . resolve . memory .
 *     speculation: acceptance, lengths, confidence, draft, speed
 *     kernels: gpu . whole steps: decode, first
 *
 * Owns: what `tide bench NAME` does: one function for each NAME, with its workload stated above it. A figure is measured or
 * computed in the run that prints it. stdout carries a table, and after it a line for each claim that the table bears on; the
 * data goes into NAME.csv and, drawn by gnuplot, NAME.svg.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <omp.h>
#include <stb/stb_ds.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

/* ---- figures */

typedef struct Figure {
    FILE *csv;
    char data[PATH_MAX], drawing[PATH_MAX];
} Figure;

/* DIRECTORY/NAME.csv, with its first line. */
static bool open_figure(Figure *figure, const char *directory, const char *name, const char *columns, Error *error) {
    char file[64];
    snprintf(file, sizeof file, "%s.csv", name);
    join(figure->data, directory, file);
    snprintf(file, sizeof file, "%s.svg", name);
    join(figure->drawing, directory, file);
    figure->csv = *figure->data ? fopen(figure->data, "w") : NULL;
    if (!figure->csv) return fail(error, "%s: %s", figure->data, strerror(*figure->data ? errno : ENAMETOOLONG));
    fprintf(figure->csv, "%s\n", columns);
    return true;
}

/* A file name as gnuplot reads one: within quotes, its own quotes doubled. */
static void put_quoted(FILE *out, const char *text) {
    putc('\'', out);
    for (; *text; text++) fprintf(out, *text == '\'' ? "''" : "%c", *text);
    putc('\'', out);
}

/* Ends the data and, where the measurement went well, has gnuplot draw it. The script finds the data's name in `csv`. Without
 * gnuplot the data is all there is. */
static bool end_figure(Figure *figure, const char *script, bool ok, Error *error) {
    bool bad = ferror(figure->csv);
    bad |= fclose(figure->csv) != 0;
    if (!ok) return false;
    if (bad) return fail(error, "%s: cannot be written: %s", figure->data, strerror(errno));
    if (!script) return true;
    FILE *gnuplot = popen("command -v gnuplot > /dev/null || exit 127; exec gnuplot", "w");
    if (!gnuplot) return fail(error, "cannot start gnuplot: %s", strerror(errno));
    fputs("set terminal svg size 1240,380 font ',10' background 'white'; set grid; set key samplen 1\n"
          "set datafile separator ','; set datafile missing NaN; set output ", gnuplot);
    put_quoted(gnuplot, figure->drawing);
    fputs("; csv = ", gnuplot);
    put_quoted(gnuplot, figure->data);
    fprintf(gnuplot, "\n%s\n", script);
    int status = pclose(gnuplot);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        fprintf(stderr, "tide: gnuplot (Debian: gnuplot-nox) is not installed: the figures are in %s, no drawing is made\n",
                figure->data);
    else if (status) return fail(error, "gnuplot could not draw %s", figure->drawing);
    return true;
}

/* "claim: WHAT: holds (FIGURES)", or "falls short": what `make bench-claims` looks for. */
__attribute__((format(printf, 3, 4))) static void claim(bool holds, const char *what, const char *format, ...) {
    va_list arguments;
    printf("claim: %s: %s (", what, holds ? "holds" : "falls short");
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf(")\n");
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the values. */
static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* ---- cpu and load: the processor against a dense model, and the time to open the shipped one */

enum { BENCH_PREFILL = 512, BENCH_REPEATS = 5, BENCH_STEPS = 16, BENCH_VOCAB = 32768 };

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

enum { PRODUCT_COLS = 8192, PRODUCT_BYTES = 1 << 27, PRODUCT_KINDS = 3 };

/* One row of x by a large matrix of each stored type. */
typedef struct Products {
    uint8_t *codes;             /* [PRODUCT_BYTES] e4m3, as evenly spread values have them: half of them in the highest binade */
    uint8_t *exponents;         /* E8M0 of the e2m1 matrix */
    float *scale, *x, *y;
    Matrix matrix[PRODUCT_KINDS];
    double seconds[PRODUCT_KINDS][BENCH_REPEATS];
} Products;

static const char *const product_names[PRODUCT_KINDS] = {"bf16", "e4m3", "e2m1"};

/* An e4m3 code that is neither NaN nor below 2^-5. */
static uint8_t random_code(uint64_t i) {
    const uint64_t bits = (i + 1) * 0x9e3779b97f4a7c15u, mixed = bits ^ bits >> 29;
    const int below = __builtin_ctz((unsigned)mixed | 1 << 13);
    const uint8_t mantissa = (uint8_t)(mixed >> 40 & 7);
    return (uint8_t)((mixed >> 63) << 7 | (uint64_t)(15 - below) << 3 | (mantissa == 7 && !below ? 6 : mantissa));
}

static void make_products(Products *products, const uint16_t *weights) {
    const int cols = PRODUCT_COLS, rows = PRODUCT_BYTES / cols, blocks = cols / SCALE_BLOCK;
    *products = (Products){.codes = allocate_zeroed(PRODUCT_BYTES, 1), .exponents = allocate_zeroed(PRODUCT_BYTES / 32, 1),
                               .scale = allocate_zeroed((size_t)(rows / SCALE_BLOCK * blocks), sizeof(float)),
                               .x = allocate_zeroed((size_t)cols, sizeof(float)),
                               .y = allocate_zeroed((size_t)rows, sizeof(float))};
#pragma omp parallel for
    for (size_t i = 0; i < PRODUCT_BYTES; i++) products->codes[i] = random_code(i);
    memset(products->exponents, 118, PRODUCT_BYTES / 32);
    for (int i = 0; i < rows / SCALE_BLOCK * blocks; i++) products->scale[i] = 1e-4f * (float)(1 + i % 7);
    for (int i = 0; i < cols; i++) products->x[i] = (float)(i * 37 % 101) / 50 - 1;
    products->matrix[0] = (Matrix){.data = (const uint8_t *)weights, .dtype = DTYPE_BF16, .rows = rows / 2, .cols = cols};
    products->matrix[1] = (Matrix){.data = products->codes, .dtype = DTYPE_F8_E4M3, .rows = rows, .cols = cols,
                                   .scale = products->scale, .scale_cols = blocks};
    products->matrix[2] = (Matrix){.data = products->codes, .dtype = DTYPE_F4_E2M1, .rows = rows, .cols = cols,
                                   .exponents = products->exponents, .scale_cols = cols / 32};
}

static void time_products(Products *products, int repeat) {
    for (int kind = 0; kind < PRODUCT_KINDS; kind++) {
        const double start = now();
        c_backend.linear(&(Projection){products->y, PRODUCT_BYTES / PRODUCT_COLS, &products->matrix[kind]}, 1, products->x,
                         PRODUCT_COLS, 1);
        products->seconds[kind][repeat] = now() - start;
    }
}

static void print_products(Products *products, double read) {
    const double bytes[PRODUCT_KINDS] = {PRODUCT_BYTES, PRODUCT_BYTES, PRODUCT_BYTES * (0.5 + 1.0 / 32)};
    for (int kind = 0; kind < PRODUCT_KINDS; kind++) {
        const double rate = bytes[kind] / median(products->seconds[kind], BENCH_REPEATS);
        printf("product %s     %6.1f GB/s of a matrix of %.0f MB by one row: %.0f%% of the read bandwidth\n", product_names[kind],
               rate / 1e9, bytes[kind] / 1e6, 100 * rate / read);
    }
}

static void free_products(Products *products) {
    free(products->codes);
    free(products->exponents);
    free(products->scale);
    free(products->x);
    free(products->y);
}

static void print_cpu(const Engine *engine, double *reads, double *decodes, double *rates, double *prefills) {
    double read = median(reads, BENCH_REPEATS), rate = median(rates, BENCH_REPEATS), decode = median(decodes, BENCH_REPEATS),
           prefill = median(prefills, BENCH_REPEATS);
    /* Per decoded token every weight and the history's keys and values are read once. Per prefilled token each weight of the layers
     * is one multiply-add, and each earlier position two for every value of the query heads. */
    const Config *config = &engine->config;
    double history = (double)config->num_hidden_layers * (BENCH_PREFILL + BENCH_STEPS / 2.0)
                     * (double)engine->cache.format.stride;
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
static bool bench_cpu(const BenchOptions *bench, EngineOptions options, Error *error) {
    (void)bench;
    Engine engine = {.backend = &c_backend};
    uint16_t *block;
    float *ones;
    options.sessions = 1;
    options.context = 1024;
    make_dense_model(&engine, &block, &ones);
    Products products;
    make_products(&products, block);
    int cached;
    double reads[BENCH_REPEATS], rates[BENCH_REPEATS], decodes[BENCH_REPEATS], prefills[BENCH_REPEATS], first;
    bool ok = plan_memory(&engine, &options, error) && take_memory(&engine, error);
    if (ok) prepare_rope(&engine);
    ok = ok && cache_admit(&engine.cache, 0, NULL, 0, engine.cache.context, &cached)
         && time_rows(&engine, 0, BENCH_PREFILL, BENCH_PREFILL, &first, error);
    for (int i = 0; i < BENCH_REPEATS && ok; i++) {
        reads[i] = time_read((const float *)block, engine.weights.bytes / sizeof(float));
        time_products(&products, i);
        ok = time_rows(&engine, BENCH_PREFILL, BENCH_STEPS, 1, &decodes[i], error);
        rates[i] = time_fma();
        ok = ok && time_rows(&engine, 0, BENCH_PREFILL, BENCH_PREFILL, &prefills[i], error);
    }
    if (ok) print_cpu(&engine, reads, decodes, rates, prefills);
    if (ok) print_products(&products, median(reads, BENCH_REPEATS));
    free_products(&products);
    engine_close(&engine);
    free(block);
    free(ones);
    return ok;
}

/* From nothing to a bound checkpoint and a ready tokenizer. */
static bool bench_load(const BenchOptions *bench, EngineOptions options, Error *error) {
    (void)bench;
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

/* ---- serving: a closed loop of requests
 *
 * The workload of loadstep, hotsweep and offered. The model really decodes, through run_round(). A number of clients each have
 * one request in flight and issue the next when it has ended. Every prompt is one prepared prefix, 5,888 tokens of English text,
 * and a token of its own; an answer has 48 to 144 tokens, evenly spread, sampled at temperature 1, and ends there. So which rows
 * are selected is what the indexers of the model select; nothing about locality is assumed. The prefix is computed once, before
 * anything is timed, as if by a prefill server: modes with a host tier share its pages there, and a resident session has them
 * copied in. What is compared runs in turns, a round each, on clocks that count their own rounds only.
 */

enum {
    RESIDENT_SESSIONS = 6,      /* what the pool holds resident: less than a quarter of the sessions that it holds otherwise */
    CLIENTS = 32,               /* at full load: more than fit in any mode */
    LOW_LOAD = 2,
    LEAST_ANSWER = 48, MOST_ANSWER = 144,
    PREFIX_PAGES = 92,
    SERVING_CONTEXT = 6144,
    LONG_TEXT = 9216,           /* ids that the text must have */
};

static const char text_path[] = "/usr/share/common-licenses/GPL-3";     /* a part of every Debian system */

typedef struct Prefix {         /* what every prompt begins with */
    int *text;                  /* stb_ds of ids; the prefix is its beginning */
    int pages;
    uint8_t *images;            /* [pages] rows and index keys */
} Prefix;

typedef struct Setting {        /* of one engine under load */
    KvMode mode;
    int clients, context;
    int least_answer, most_answer;
    int hot_rows;               /* 0: the default */
    size_t budget;              /* 0: everything fits */
} Setting;

typedef enum RequestState { IDLE, WAITING, ACTIVE } RequestState;

typedef struct Request {
    Session session;
    RequestState state;
    long number;                /* in the order they are issued */
    double issued, admitted, first;                 /* on the clock of the load; first: its first token, 0 before */
} Request;

typedef struct Load {
    Setting setting;
    const Prefix *prefix;
    Runner runner;
    Request requests[MAX_PASS_ROWS];                /* [clients], each in the slot of its client */
    long issued, rounds;
    double clock, entered;      /* seconds of its rounds so far; when the round began that is going on */
} Load;

typedef struct Tally {          /* of a stretch of rounds */
    double begun, seconds;
    long rounds, tokens;
    double active, coverage;    /* sums over the rounds */
    double answering, unanswered;       /* session seconds: of those in the pool; of those without their first token */
    long firsts;                /* first tokens */
    double least_coverage, last_coverage;
    uint64_t picked[TIERS];
    double *first, *wait; /* stb_ds, of the requests that begin and end within it: seconds to the first token, to admission */
    double *spacing;            /* stb_ds, of the same: from a token to the next */
} Tally;

static double mean(const double *values) {
    double sum = 0;
    for (size_t i = 0; i < arrlenu(values); i++) sum += values[i];
    return arrlenu(values) ? sum / (double)arrlenu(values) : NAN;
}

static Tally new_tally(const Load *load) { return (Tally){.begun = load->clock, .least_coverage = 1}; }

static void free_tally(Tally *tally) {
    arrfree(tally->first);
    arrfree(tally->wait);
    arrfree(tally->spacing);
}

static double tokens_per_second(const Tally *tally) { return (double)tally->tokens / tally->seconds; }

static double mean_active(const Tally *tally) { return tally->active / (double)tally->rounds; }

static double mean_coverage(const Tally *tally) { return 100 * tally->coverage / (double)tally->rounds; }

/* Percent of the selected rows that came from the host. */
static double host_share(const uint64_t picked[TIERS]) {
    uint64_t all = 0;
    for (int tier = 0; tier < TIERS; tier++) all += picked[tier];
    return all ? 100.0 * (double)picked[TIER_HOST] / (double)all : 0;
}

static EngineOptions engine_options(EngineOptions options, const Setting *setting) {
    options.kv_mode = setting->mode;
    options.sessions = setting->clients;
    options.context = setting->context;
    options.hot_rows = setting->hot_rows;
    options.kv_budget = setting->budget;
    options.host_budget = 0;
    return options;
}

/* Bytes of a pool that holds so many sessions of the whole context in a mode: what is planned for them, and half of one more,
 * since tables for further clients come out of it too. */
static bool pool_bytes(EngineOptions options, KvMode mode, int sessions, int context, size_t *bytes, Error *error) {
    size_t planned[2];
    for (int more = 0; more < 2; more++) {
        Engine engine;
        Setting setting = {.mode = mode, .clients = sessions + more, .context = context};
        EngineOptions plan = engine_options(options, &setting);
        if (!engine_plan(&engine, &plan, error)) return false;
        planned[more] = engine.cache.bytes;
        bool latent = has_latent_attention(&engine.config);
        engine_close(&engine);
        if (!latent) return fail(error, "%s: the hierarchy is measured on models with latent attention", options.model);
    }
    *bytes = planned[0] + (planned[1] - planned[0]) / 2;
    return true;
}

static bool read_text(const Tokenizer *tokenizer, int **ids, Error *error) {
    char *text;
    size_t length;
    if (!read_file(text_path, 1 << 20, &text, &length, error)) return false;
    bool ok = tokenizer_encode(tokenizer, text, length, false, ids, error);
    free(text);
    return ok && (arrlen(*ids) >= LONG_TEXT || fail(error, "%s: %d tokens, wanted %d", text_path, (int)arrlen(*ids), LONG_TEXT));
}

static void free_prefix(Prefix *prefix) {
    arrfree(prefix->text);
    free(prefix->images);
}

/* Computes the first pages of the text, in an engine of its own. To be freed also where that fails. */
static bool make_prefix(EngineOptions options, int pages, int context, Prefix *prefix, Error *error) {
    Runner runner;
    Session session = {.max_new = 1};
    Setting setting = {.mode = MODE_RESIDENT, .clients = 1, .context = context};
    options = engine_options(options, &setting);
    *prefix = (Prefix){.pages = pages};
    if (!runner_open(&runner, &options, true, NULL, error)) return false;
    bool ok = read_text(runner.tokenizer, &prefix->text, error);
    for (int i = 0; i <= pages * PAGE_ROWS && ok; i++) arrput(session.ids, prefix->text[i]);
    if (ok) {
        session_begin(&session, &runner.engine);
        run_session(&runner, &session);
        ok = session.cached >= pages * PAGE_ROWS || fail(error, "the prefix could not be computed: %s", session.error.text);
    }
    size_t size = page_image_bytes(&runner.engine.cache);
    prefix->images = allocate_zeroed((size_t)pages, size);
    for (int page = 0; page < pages && ok; page++)
        cache_read_page(&runner.engine.cache, 0, page, prefix->images + (size_t)page * size);
    session_free(&session);
    runner_close(&runner);
    return ok;
}

/* The pages of the prefix become a session's history. */
static void import_prefix(Load *load, int slot) {
    Cache *cache = &load->runner.engine.cache;
    for (int page = 0; page < load->prefix->pages; page++)
        cache_append_page(cache, slot, load->prefix->images + (size_t)page * page_image_bytes(cache), PAGE_ROWS);
}

static void load_close(Load *load) {
    for (int client = 0; load && client < load->setting.clients; client++) session_free(&load->requests[client].session);
    if (load) runner_close(&load->runner);
    free(load);
}

/* An engine under that load, its prefix on the host where there is one: a session brings it there, and leaves. */
static Load *load_open(EngineOptions options, Setting setting, const Prefix *prefix, Error *error) {
    Load *load = allocate_zeroed(1, sizeof *load);
    Cache *cache = &load->runner.engine.cache;
    int rows = prefix->pages * PAGE_ROWS + 1, cached;
    load->setting = setting;
    load->prefix = prefix;
    options = engine_options(options, &setting);
    if (!runner_open(&load->runner, &options, false, NULL, error)) {
        free(load);
        return NULL;
    }
    tokenizer_close(load->runner.tokenizer);
    load->runner.tokenizer = NULL;                  /* answers end by their length alone */
    load->runner.engine.config.n_eos = 0;
    if (setting.mode == MODE_RESIDENT) return load;
    if (cache_admit(cache, 0, prefix->text, rows, rows, &cached)) import_prefix(load, 0);
    cache_release(cache, 0);
    return load;
}

static double load_time(const Load *load) { return load->clock + now() - load->entered; }

static void issue_request(Load *load, int client) {
    Request *request = &load->requests[client];
    long number = load->issued++;
    int answers = load->setting.most_answer - load->setting.least_answer + 1, prefix = load->prefix->pages * PAGE_ROWS;
    *request = (Request){.state = WAITING, .number = number, .issued = load_time(load)};
    request->session = (Session){.slot = client, .stream = (uint64_t)number,
                                 .max_new = load->setting.least_answer + (int)(number * 37 % answers),
                                 .sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = 1}};
    for (int i = 0; i < prefix; i++) arrput(request->session.ids, load->prefix->text[i]);
    arrput(request->session.ids, load->prefix->text[number * 101 % LONG_TEXT]);
    session_begin(&request->session, &load->runner.engine);
}

/* Takes waiting requests in, in the order they were issued, as far as memory reaches. */
static void admit_waiting(Load *load) {
    for (;;) {
        Request *next = NULL;
        for (int client = 0; client < load->setting.clients; client++) {
            Request *request = &load->requests[client];
            if (request->state == WAITING && (!next || request->number < next->number)) next = request;
        }
        if (!next || !session_admit(&load->runner, &next->session)) return;
        if (load->setting.mode == MODE_RESIDENT) {
            import_prefix(load, next->session.slot);
            next->session.cached = load->prefix->pages * PAGE_ROWS;
        }
        next->state = ACTIVE;
        next->admitted = load_time(load);
    }
}

/* What a round gave a request; one that has ended makes room. */
static bool settle_request(Load *load, Request *request, Tally *tally, Error *error) {
    Session *session = &request->session;
    double time = load_time(load);
    int tokens = tokens_generated(session);
    if (session->finish == FINISH_ERROR) return fail(error, "request %ld: %s", request->number, session->error.text);
    if (!request->first && tokens) request->first = time, tally->firsts++;
    if (session->finish == RUNNING) return true;
    if (request->issued >= tally->begun) {
        arrput(tally->first, request->first - request->issued);
        arrput(tally->wait, request->admitted - request->issued);
        arrput(tally->spacing, (time - request->first) / (tokens - 1));
    }
    cache_release(&load->runner.engine.cache, session->slot);
    session_free(session);
    request->state = IDLE;
    return true;
}

/* One round with so many clients; those beyond them finish what they have and issue nothing. csv: takes a line, or NULL. */
static bool load_round(Load *load, int offered, Tally *tally, FILE *csv, Error *error) {
    Cache *cache = &load->runner.engine.cache;
    Session *sessions[MAX_PASS_ROWS];
    uint64_t picked[TIERS];
    int active = 0, waiting = 0, unanswered = 0;
    long tokens = load->runner.tokens;
    load->entered = now();
    for (int client = 0; client < offered; client++)
        if (load->requests[client].state == IDLE) issue_request(load, client);
    admit_waiting(load);
    for (int client = 0; client < load->setting.clients; client++) {
        if (load->requests[client].state == ACTIVE) sessions[active++] = &load->requests[client].session;
        waiting += load->requests[client].state == WAITING;
        unanswered += load->requests[client].state != IDLE && !load->requests[client].first;
    }
    memcpy(picked, cache->stats.picked, sizeof picked);
    run_round(&load->runner, sessions, active);
    double coverage = cache_coverage(cache, -1), seconds;
    for (int client = 0; client < load->setting.clients; client++)
        if (load->requests[client].state == ACTIVE && !settle_request(load, &load->requests[client], tally, error)) return false;
    for (int tier = 0; tier < TIERS; tier++) tally->picked[tier] += picked[tier] = cache->stats.picked[tier] - picked[tier];
    load->clock += seconds = now() - load->entered;
    load->rounds++;
    tally->seconds += seconds;
    tally->tokens += load->runner.tokens - tokens;
    tally->active += active;
    tally->answering += active * seconds;
    tally->unanswered += unanswered * seconds;
    tally->coverage += tally->last_coverage = coverage;
    tally->least_coverage = fmin(tally->least_coverage, coverage);
    tally->rounds++;
    if (csv)
        fprintf(csv, "%s,%ld,%.3f,%d,%d,%d,%.2f,%.3f\n", kv_mode_names[cache->mode], load->rounds, load->clock, offered, active,
                waiting, 100 * coverage, host_share(picked));
    return !interrupted || fail(error, "interrupted");
}

/* So many rounds of each of several loads, in turns, each with a tally. */
static bool load_rounds(Load **loads, int n, int offered, int rounds, Tally **tallies, FILE *csv, Error *error) {
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < n; i++)
            if (!load_round(loads[i], offered, tallies[i], csv, error)) return false;
    return true;
}

/* ---- loadstep: figure 6 and table A1 of the paper
 *
 * The paper's 16 - 256 - 16 clients, scaled to the pool: 2 - 32 - 2. Requests in flight when the load falls end in peace.
 */

enum { STEP_ROUNDS = 300 };     /* of each phase; the fall ends when no more requests are in flight than there are clients */

typedef struct Step {           /* of one mode */
    Tally before, full, fall, after;
    double sessions, coverage;  /* means over the later half of the full load */
    long covered;               /* rounds from the fall of the load until coverage is over 50%; -1: never */
} Step;

static int in_flight(const Load *load) {
    int n = 0;
    for (int client = 0; client < load->setting.clients; client++) n += load->requests[client].state != IDLE;
    return n;
}

/* The load falls: rounds until only LOW_LOAD requests are in flight, then a phase of them. */
static bool step_down(Load **loads, Step *steps, FILE *csv, Error *error) {
    for (int i = 0; i < MODES; i++) steps[i].fall = new_tally(loads[i]), steps[i].covered = -1;
    for (int falling = MODES; falling;) {
        falling = 0;
        for (int i = 0; i < MODES; i++) {
            if (in_flight(loads[i]) <= LOW_LOAD) continue;
            falling++;
            if (!load_round(loads[i], LOW_LOAD, &steps[i].fall, csv, error)) return false;
            if (steps[i].covered < 0 && steps[i].fall.last_coverage > 0.5) steps[i].covered = steps[i].fall.rounds;
        }
    }
    for (int i = 0; i < MODES; i++) steps[i].after = new_tally(loads[i]);
    for (int round = 0; round < STEP_ROUNDS; round++)
        for (int i = 0; i < MODES; i++) {
            if (!load_round(loads[i], LOW_LOAD, &steps[i].after, csv, error)) return false;
            if (steps[i].covered < 0 && steps[i].after.last_coverage > 0.5)
                steps[i].covered = steps[i].fall.rounds + steps[i].after.rounds;
        }
    return true;
}

static bool run_steps(Load **loads, Step *steps, FILE *csv, Error *error) {
    Tally *tallies[MODES];
    double active[MODES], coverage[MODES];
    for (int i = 0; i < MODES; i++) steps[i].before = new_tally(loads[i]), tallies[i] = &steps[i].before;
    if (!load_rounds(loads, MODES, LOW_LOAD, STEP_ROUNDS, tallies, csv, error)) return false;
    for (int i = 0; i < MODES; i++) steps[i].full = new_tally(loads[i]), tallies[i] = &steps[i].full;
    if (!load_rounds(loads, MODES, CLIENTS, STEP_ROUNDS / 2, tallies, csv, error)) return false;
    for (int i = 0; i < MODES; i++) active[i] = steps[i].full.active, coverage[i] = steps[i].full.coverage;
    if (!load_rounds(loads, MODES, CLIENTS, STEP_ROUNDS / 2, tallies, csv, error)) return false;
    for (int i = 0; i < MODES; i++) {
        steps[i].sessions = (steps[i].full.active - active[i]) / (STEP_ROUNDS / 2);
        steps[i].coverage = (steps[i].full.coverage - coverage[i]) / (STEP_ROUNDS / 2);
    }
    return step_down(loads, steps, csv, error);
}

static void print_phase(const char *phase, int mode, const Tally *tally) {
    printf("%-11s %-9s %8zu %7.1f %9.1f%% %9.2f%% %9.1f %12.1f %8.2f %8.2f\n", phase, kv_mode_names[mode], arrlenu(tally->first),
           mean_active(tally), mean_coverage(tally), host_share(tally->picked), tokens_per_second(tally),
           1 / mean(tally->spacing), mean(tally->first), mean(tally->wait));
}

static void print_steps(const Step *steps) {
    printf("%-11s %-9s %8s %7s %10s %10s %9s %12s %8s %8s\n", "phase", "mode", "requests", "active", "coverage", "from host",
           "tokens/s", "per session", "TTFT s", "wait s");
    for (int i = 0; i < MODES; i++) print_phase("low before", i, &steps[i].before);
    for (int i = 0; i < MODES; i++) print_phase("full", i, &steps[i].full);
    for (int i = 0; i < MODES; i++) print_phase("low after", i, &steps[i].after);
}

static void claim_steps(const Step *steps) {
    const Step *resident = &steps[MODE_RESIDENT], *hisparse = &steps[MODE_HISPARSE], *adaptive = &steps[MODE_ADAPTIVE];
    double shares[] = {host_share(adaptive->before.picked), host_share(adaptive->after.picked),
                       host_share(hisparse->before.picked), host_share(hisparse->after.picked)};
    claim(adaptive->sessions >= 4 * resident->sessions, "at full load adaptive sustains at least 4 times resident's sessions",
          "%.1f against %.1f in the later half of the full load: %.2f times", adaptive->sessions, resident->sessions,
          adaptive->sessions / resident->sessions);
    claim(shares[0] <= 2 && shares[1] <= 2, "at low load adaptive takes at most 2% of selected rows from the host",
          "%.2f%% before the step, %.2f%% after it", shares[0], shares[1]);
    claim(shares[2] >= 5 * shares[0] && shares[3] >= 5 * shares[1], "at low load hisparse takes at least 5 times as many",
          "%.2f%% before the step, %.2f%% after it", shares[2], shares[3]);
    claim(adaptive->full.least_coverage < 0.01, "after the load step coverage falls under 1%",
          "to %.2f%%; mean of the later half %.2f%%", 100 * adaptive->full.least_coverage, 100 * adaptive->coverage);
    claim(adaptive->covered >= 0 && adaptive->after.last_coverage > 0.5, "when the load has fallen coverage climbs back over 50%",
          "%ld rounds later; %.1f%% at the end", adaptive->covered, 100 * adaptive->after.last_coverage);
}

static const char step_drawing[] =
    "set multiplot layout 1,3; set xlabel 'round'; set yrange [0:*]; set key bottom right\n"
    "is(mode, y) = strcol(1) eq mode ? y : NaN\n"
    "set title 'sessions in the pool'; plot for [m in 'resident hisparse adaptive'] csv using 2:(is(m, $5)) with lines title m\n"
    "set key top right; set title 'coverage (%)'\n"
    "plot for [m in 'hisparse adaptive'] csv using 2:(is(m, $7)) with lines title m\n"
    "set yrange [0:30]; set title 'from the host (%), by 10 rounds'\n"
    "plot for [m in 'hisparse adaptive'] csv using (strcol(1) eq m ? 10 * floor($2 / 10) : NaN):8 smooth unique title m\n"
    "unset multiplot";

static bool bench_loadstep(const BenchOptions *bench, EngineOptions options, Error *error) {
    Figure figure;
    size_t budget;
    Step steps[MODES] = {0};
    Load *loads[MODES] = {0};
    Prefix prefix;
    if (!pool_bytes(options, MODE_RESIDENT, RESIDENT_SESSIONS, SERVING_CONTEXT, &budget, error)
        || !open_figure(&figure, bench->directory, "loadstep",
                        "mode,round,seconds,offered,active,waiting,coverage_percent,from_host_percent", error))
        return false;
    printf("load step        %d - %d - %d clients, %d rows a session, a pool of %.1f MB: %d sessions resident\n", LOW_LOAD,
           CLIENTS, LOW_LOAD, SERVING_CONTEXT, (double)budget / 1e6, RESIDENT_SESSIONS);
    bool ok = make_prefix(options, PREFIX_PAGES, SERVING_CONTEXT, &prefix, error);
    for (int i = 0; i < MODES && ok; i++) {
        Setting setting = {(KvMode)i, CLIENTS, SERVING_CONTEXT, LEAST_ANSWER, MOST_ANSWER, 0, budget};
        ok = (loads[i] = load_open(options, setting, &prefix, error)) != NULL;
    }
    ok = ok && run_steps(loads, steps, figure.csv, error);
    if (ok) print_steps(steps), claim_steps(steps);
    for (int i = 0; i < MODES; i++) {
        free_tally(&steps[i].before), free_tally(&steps[i].full), free_tally(&steps[i].fall), free_tally(&steps[i].after);
        load_close(loads[i]);
    }
    free_prefix(&prefix);
    return end_figure(&figure, step_drawing, ok, error);
}

/* ---- hotsweep and offered: figures 9 and 4 of the paper
 *
 * hotsweep: the hot cache from k to 8k rows while the pool stays as it is: a larger cache misses less and leaves room for fewer
 * sessions. offered: the three modes against the offered load, in multiples of what the pool holds resident. The mean time to the
 * first token is taken from how many requests are without one (Little's law), since some wait for longer than is measured.
 */

enum { SETTLING_ROUNDS = 80, MEASURED_ROUNDS = 100 };

typedef struct Point {          /* what is varied */
    int clients;
    int hot_over_k;             /* 0: the default */
    KvMode first;               /* the modes from this one on, in turns */
} Point;

/* Loads run until they have settled, then measured. tallies: [MODES], to be freed. */
static bool measure_point(EngineOptions options, const Prefix *prefix, size_t budget, int topk, Point point, Tally *tallies,
                          Error *error) {
    Load *loads[MODES] = {0};
    Tally filling[MODES] = {0}, *list[MODES];
    int n = 0;
    bool ok = true;
    for (int mode = (int)point.first; mode < MODES && ok; mode++, n++) {
        Setting setting = {(KvMode)mode, CLIENTS, SERVING_CONTEXT, LEAST_ANSWER, MOST_ANSWER, point.hot_over_k * topk, budget};
        list[n] = &filling[n];
        ok = (loads[n] = load_open(options, setting, prefix, error)) != NULL;
    }
    ok = ok && load_rounds(loads, n, point.clients, SETTLING_ROUNDS, list, NULL, error);
    for (int i = 0; i < n && ok; i++) list[i] = &tallies[(int)point.first + i], *list[i] = new_tally(loads[i]);
    ok = ok && load_rounds(loads, n, point.clients, MEASURED_ROUNDS, list, NULL, error);
    for (int i = 0; i < MODES; i++) load_close(loads[i]), free_tally(&filling[i]);
    return ok;
}

static void print_point(Point point, int mode, const Tally *tally, FILE *csv) {
    int factor = point.hot_over_k ? point.hot_over_k : 2;
    double speed = tokens_per_second(tally), active = mean_active(tally), coverage = mean_coverage(tally),
           host = host_share(tally->picked), first = tally->unanswered / (double)tally->firsts,
           spacing = 1e3 * tally->answering / (double)tally->tokens;
    printf("%7d %5d %-9s %9.1f %8.1f %9.1f%% %9.2f%% %8.2f %8.2f\n", point.clients, factor, kv_mode_names[mode], speed, active,
           coverage, host, first, spacing);
    fprintf(csv, "%s,%d,%d,%.2f,%.2f,%.2f,%.3f,%.4f,%.3f\n", kv_mode_names[mode], point.clients, factor, speed, active, coverage,
            host, first, spacing);
}

static bool sweep_points(EngineOptions options, const char *directory, const char *name, const Point *points, int n,
                         const char *drawing, Error *error) {
    Figure figure;
    size_t budget;
    Prefix prefix;
    Engine plan;
    if (!pool_bytes(options, MODE_RESIDENT, RESIDENT_SESSIONS, SERVING_CONTEXT, &budget, error)
        || !engine_plan(&plan, &options, error))
        return false;
    int topk = plan.cache.index_topk;
    engine_close(&plan);
    if (!open_figure(&figure, directory, name,
                     "mode,clients,hot_over_k,tokens_per_second,active,coverage_percent,from_host_percent,"
                     "first_token_seconds,per_token_ms",
                     error))
        return false;
    printf("%-16s k = %d, a pool of %.1f MB: %d sessions of %d rows resident\n", name, topk, (double)budget / 1e6,
           RESIDENT_SESSIONS, SERVING_CONTEXT);
    printf("%7s %5s %-9s %9s %8s %10s %10s %8s %8s\n", "clients", "B/k", "mode", "tokens/s", "active", "coverage", "from host",
           "TTFT s", "TPOT ms");
    bool ok = make_prefix(options, PREFIX_PAGES, SERVING_CONTEXT, &prefix, error);
    for (int i = 0; i < n && ok; i++) {
        Tally tallies[MODES] = {0};
        ok = measure_point(options, &prefix, budget, topk, points[i], tallies, error);
        for (int mode = (int)points[i].first; mode < MODES && ok; mode++)
            print_point(points[i], mode, &tallies[mode], figure.csv);
        for (int mode = 0; mode < MODES; mode++) free_tally(&tallies[mode]);
    }
    free_prefix(&prefix);
    return end_figure(&figure, drawing, ok, error);
}

static bool bench_hotsweep(const BenchOptions *bench, EngineOptions options, Error *error) {
    static const char drawing[] =
        "set multiplot layout 1,4; set xlabel 'hot cache (B / k)'; set logscale x 2; set yrange [0:*]; set key bottom right\n"
        "is(mode, load, y) = strcol(1) eq mode && $2 == load ? y : NaN\n"
        "do for [load in '2 32'] {\n"
        "set title load . ' clients: tokens/s'\n"
        "plot for [m in 'hisparse adaptive'] csv using 3:(is(m, load + 0, $4)) with linespoints title m\n"
        "set title load . ' clients: from host (%)'\n"
        "plot for [m in 'hisparse adaptive'] csv using 3:(is(m, load + 0, $7)) with linespoints title m\n"
        "}\nunset multiplot";
    static const Point points[] = {
        {LOW_LOAD, 1, MODE_HISPARSE}, {LOW_LOAD, 2, MODE_HISPARSE}, {LOW_LOAD, 4, MODE_HISPARSE}, {LOW_LOAD, 8, MODE_HISPARSE},
        {CLIENTS, 1, MODE_HISPARSE}, {CLIENTS, 2, MODE_HISPARSE}, {CLIENTS, 4, MODE_HISPARSE}, {CLIENTS, 8, MODE_HISPARSE},
    };
    return sweep_points(options, bench->directory, "hotsweep", points, sizeof points / sizeof *points, drawing, error);
}

static bool bench_offered(const BenchOptions *bench, EngineOptions options, Error *error) {
    static const char drawing[] =
        "set multiplot layout 1,4; set xlabel 'clients'; set yrange [0:*]; set key bottom right\n"
        "is(mode, y) = strcol(1) eq mode ? y : NaN; modes = 'resident hisparse adaptive'\n"
        "set title 'tokens/s'; plot for [m in modes] csv using 2:(is(m, $4)) with linespoints title m\n"
        "set title 'active sessions'; plot for [m in modes] csv using 2:(is(m, $5)) with linespoints title m\n"
        "set title 'time to first token (s)'; plot for [m in modes] csv using 2:(is(m, $8)) with linespoints title m\n"
        "set title 'time per token (ms)'; plot for [m in modes] csv using 2:(is(m, $9)) with linespoints title m\n"
        "unset multiplot";
    Point points[4];
    for (int i = 0; i < 4; i++) points[i] = (Point){(i + 1) * RESIDENT_SESSIONS, 0, MODE_RESIDENT};
    return sweep_points(options, bench->directory, "offered", points, 4, drawing, error);
}

/* ---- cost: what the hierarchy takes of a decode round
 *
 * Sessions at 8K that only decode, none beginning or ending: the prefix has 7,936 tokens. Resident; adaptive with everything
 * lent; adaptive in a pool that leaves next to nothing to lend. The three are run in turns, two rounds each, and compared turn by
 * turn, so that what else the machine does falls on all of them.
 */

enum { COST_TURNS = 41, COST_ROUNDS = 2, COST_CONTEXT = 8192, COST_PREFIX_PAGES = 124, COST_SETUPS = 3,
       COST_WARM_ROUNDS = 10 };

static const char *const cost_names[COST_SETUPS] = {"resident", "adaptive lent", "adaptive pressed"};

typedef struct Cost {           /* of one setup, turn by turn */
    Load *load;
    Tally tally;
    CacheStats before;
    double seconds[COST_TURNS], ratios[COST_TURNS];         /* of a round; resident's over it */
} Cost;

static bool open_costs(EngineOptions options, const Prefix *prefix, Cost costs[COST_SETUPS], int sessions, Error *error) {
    size_t pressed;
    bool ok = pool_bytes(options, MODE_HISPARSE, sessions, COST_CONTEXT, &pressed, error);
    for (int i = 0; i < COST_SETUPS && ok; i++) {
        Setting setting = {
            i ? MODE_ADAPTIVE : MODE_RESIDENT, sessions, COST_CONTEXT, MOST_ANSWER, MOST_ANSWER, 0, i == 2 ? pressed : 0};
        costs[i].load = load_open(options, setting, prefix, error);
        ok = costs[i].load
             && load_rounds(&costs[i].load, 1, sessions, COST_WARM_ROUNDS, &(Tally *){&costs[i].tally}, NULL, error);
        free_tally(&costs[i].tally);
        if (!ok) return false;
        costs[i].tally = new_tally(costs[i].load);
        costs[i].before = costs[i].load->runner.engine.cache.stats;
    }
    return ok;
}

/* Every other turn goes backwards, so that none always follows the same. */
static bool take_turns(Cost costs[COST_SETUPS], int sessions, Error *error) {
    for (int turn = 0; turn < COST_TURNS; turn++) {
        for (int i = 0; i < COST_SETUPS; i++) {
            Cost *cost = &costs[turn % 2 ? COST_SETUPS - 1 - i : i];
            double before = cost->tally.seconds;
            if (!load_rounds(&cost->load, 1, sessions, COST_ROUNDS, &(Tally *){&cost->tally}, NULL, error)) return false;
            cost->seconds[turn] = (cost->tally.seconds - before) / COST_ROUNDS;
        }
        for (int i = 0; i < COST_SETUPS; i++) costs[i].ratios[turn] = costs[0].seconds[turn] / costs[i].seconds[turn];
    }
    return true;
}

/* Prints a line a setup; the share, in percent, of resolver and controller in the rounds of the costliest. */
static double print_costs(Cost costs[COST_SETUPS], int sessions, double ratios[COST_SETUPS], FILE *csv) {
    double most = 0;
    for (int i = 0; i < COST_SETUPS; i++) {
        Cost *cost = &costs[i];
        const CacheStats *after = &cost->load->runner.engine.cache.stats, *before = &cost->before;
        double part = 100 / cost->tally.seconds, resolve = part * (after->resolve_seconds - before->resolve_seconds),
               fetch = part * (after->fetch_seconds - before->fetch_seconds),
               control = part * (after->control_seconds - before->control_seconds),
               round = 1e3 * median(cost->seconds, COST_TURNS), coverage = 100 * cost->tally.last_coverage,
               host = host_share(cost->tally.picked);
        ratios[i] = median(cost->ratios, COST_TURNS);
        printf("%8d %-18s %9.2f %9.3f %9.1f%% %9.2f%% %8.2f%% %8.2f%% %9.2f%%\n", sessions, cost_names[i], round, ratios[i],
               coverage, host, resolve, fetch, control);
        fprintf(csv, "%d,%s,%.4f,%.4f,%.2f,%.3f,%.3f,%.3f,%.3f\n", sessions, cost_names[i], round, ratios[i], coverage, host,
                resolve, fetch, control);
        if (i && resolve + control > most) most = resolve + control;
    }
    return most;
}

static const char cost_drawing[] =
    "set style data histogram; set style histogram rowstacked; set style fill solid; set boxwidth 0.6\n"
    "set yrange [0:*]; set key top left; set ylabel 'percent of a decode round'\n"
    "plot csv skip 1 using 7:xtic(strcol(1) . ' x ' . strcol(2)) title 'resolver', '' skip 1 using 8 title 'fetch', "
    "'' skip 1 using 9 title 'controller'";

static bool bench_cost(const BenchOptions *bench, EngineOptions options, Error *error) {
    static const int counts[] = {LOW_LOAD, 16};
    Figure figure;
    Prefix prefix;
    double share = 0, ratios[2][COST_SETUPS];
    bool ok = open_figure(&figure, bench->directory, "cost",
                          "sessions,setup,round_ms,speed_over_resident,coverage_percent,from_host_percent,"
                          "resolve_percent,fetch_percent,control_percent",
                          error);
    if (!ok) return false;
    printf("cost             decode rounds at %d rows a session, in turns; medians of %d turns of %d rounds\n", COST_CONTEXT,
           COST_TURNS, COST_ROUNDS);
    printf("%8s %-18s %9s %9s %10s %10s %9s %9s %10s\n", "sessions", "setup", "round ms", "x speed", "coverage", "from host",
           "resolver", "fetch", "controller");
    ok = make_prefix(options, COST_PREFIX_PAGES, COST_CONTEXT, &prefix, error);
    for (int i = 0; i < 2 && ok; i++) {
        Cost costs[COST_SETUPS] = {0};
        ok = open_costs(options, &prefix, costs, counts[i], error) && take_turns(costs, counts[i], error);
        if (ok) share = print_costs(costs, counts[i], ratios[i], figure.csv);
        for (int j = 0; j < COST_SETUPS; j++) free_tally(&costs[j].tally), load_close(costs[j].load);
    }
    free_prefix(&prefix);
    if (ok)
        claim(share <= 3, "resolver and controller take at most 3% of a decode round with 16 sessions at 8K", "%.2f%% at most",
              share);
    if (ok)
        claim(ratios[0][1] >= 0.97, "at low load adaptive's tokens/s are within 3% of resident's", "%+.1f%%, median of %d turns",
              100 * (ratios[0][1] - 1), COST_TURNS);
    return end_figure(&figure, cost_drawing, ok, error);
}

/* ---- resolve: finding the selected rows, apart from any model (figure 8 of the paper)
 *
 * Eight sessions of hisparse, one query each and one plan group. Locality model: a query keeps each of the rows that the one
 * before it picked with a chance of 93%; of the others, half are drawn near the end (the logarithm of the distance is uniform),
 * half anywhere. A resolve with misses follows that trace; one without repeats its last query, all of whose rows are hot. Nothing
 * is copied.
 */

enum { RESOLVE_SESSIONS = 8, RESOLVE_STEPS = 8, RESOLVE_TURNS = 21, RESOLVE_KEEP = 93, RESOLVE_SIZES = 4, RESOLVE_CASES = 4 };

typedef struct Bed {            /* a hierarchy of one size of hot cache, and the trace it follows */
    Engine engine;
    int *trace;                 /* [steps, sessions, k] */
    int steps, step;
    double seconds[RESOLVE_CASES][RESOLVE_TURNS];           /* of a resolve; direct and scan, without and with misses */
    uint64_t missed, resolved;
} Bed;

/* The next of a stream of random numbers (splitmix64). */
static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static double draw_unit(uint64_t *state) { return (double)(draw(state) >> 11) * 0x1p-53; }

/* Queries of one session into trace[step][session], ascending. */
static void make_trace(int *trace, int steps, int session, int k, int rows, uint64_t seed) {
    bool *picked = allocate_zeroed((size_t)rows, 1);
    for (int step = 0, held = 0; step < steps; step++) {
        for (int row = 0; row < rows; row++)
            if (picked[row] && draw(&seed) % 100 >= RESOLVE_KEEP) picked[row] = false, held--;
        while (held < k) {
            bool recent = draw(&seed) % 2;
            int row = rows - 1 - (int)(recent ? exp(draw_unit(&seed) * log(rows)) - 1 : draw_unit(&seed) * rows);
            held += !picked[row];
            picked[row] = true;
        }
        int *out = trace + ((size_t)step * RESOLVE_SESSIONS + (size_t)session) * (size_t)k;
        for (int row = 0; row < rows; row++)
            if (picked[row]) *out++ = row;
    }
    free(picked);
}

/* Admits the sessions with `rows` rows of history, all of it on the host and shared: a resolve never reads it. */
static bool import_history(Cache *cache, int rows, Error *error) {
    int *ids = allocate_zeroed((size_t)rows, sizeof(int)), cached = 0;
    uint8_t *image = allocate_zeroed(page_image_bytes(cache), 1);
    bool ok = true;
    for (int s = 0; s < RESOLVE_SESSIONS && ok; s++) {
        ok = cache_admit(cache, s, ids, rows, rows, &cached) || fail(error, "a session of %d rows found no room", rows);
        for (; ok && cached < rows; cached += PAGE_ROWS) cache_append_page(cache, s, image, PAGE_ROWS);
    }
    free(ids);
    free(image);
    return ok;
}

/* A hierarchy with one source of short rows. */
static bool open_bed(Bed *bed, int k, int hot_rows, int context, Error *error) {
    bed->engine = (Engine){.backend = &c_backend};
    Config *config = &bed->engine.config;
    *config = (Config){.family = FAMILY_GLM_MOE_DSA,
                       .model_type = "glm_moe_dsa",
                       .num_hidden_layers = 1,
                       .max_position_embeddings = context,
                       .num_attention_heads = 1,
                       .kv_lora_rank = 32,
                       .index_n_heads = 1,
                       .index_head_dim = 2,
                       .index_topk = k};
    config->indexer_full = allocate_zeroed(1, sizeof(bool));
    config->indexer_full[0] = true;
    EngineOptions options = {.model = "the synthetic history",
                             .sessions = RESOLVE_SESSIONS,
                             .context = context,
                             .kv_dtype = KV_BF16,
                             .kv_mode = MODE_HISPARSE,
                             .hot_rows = hot_rows};
    bed->steps = RESOLVE_STEPS * (2 * RESOLVE_TURNS + 4);
    bed->trace = allocate_zeroed((size_t)bed->steps * RESOLVE_SESSIONS * (size_t)k, sizeof(int));
    for (int s = 0; s < RESOLVE_SESSIONS; s++) make_trace(bed->trace, bed->steps, s, k, context, (uint64_t)s + 1);
    return plan_memory(&bed->engine, &options, error) && take_memory(&bed->engine, error)
        && import_history(&bed->engine.cache, context, error);
}

static void close_bed(Bed *bed) {
    free(bed->trace);
    engine_close(&bed->engine);
}

/* Seconds of one resolve of one session, over several steps. moves: along the trace; else the last step again and again. */
static double time_resolves(Bed *bed, Lookup lookup, bool moves) {
    State *state = &bed->engine.state;
    Cache *cache = &bed->engine.cache;
    Row rows[RESOLVE_SESSIONS];
    Selection selection = state->selection;
    for (int s = 0; s < RESOLVE_SESSIONS; s++) rows[s] = (Row){s, cache->context - 1, 0};
    cache->lookup = lookup;
    memset(state->report, 0, sizeof *state->report);
    double begin = now();
    for (int i = 0; i < RESOLVE_STEPS; i++) {
        if (moves && bed->step + 1 < bed->steps) bed->step++;
        selection.ids = bed->trace + (size_t)bed->step * RESOLVE_SESSIONS * (size_t)selection.capacity;
        cache->backend->resolve(cache, 0, &selection, rows, 0, RESOLVE_SESSIONS, 0, state->locations, &state->plan,
                                state->report);
    }
    double seconds = now() - begin;
    bed->missed += (uint64_t)state->report->picked[TIER_HOST];
    if (moves) bed->resolved += RESOLVE_STEPS * RESOLVE_SESSIONS;
    return seconds / (RESOLVE_STEPS * RESOLVE_SESSIONS);
}

static const struct { const char *name; Lookup lookup; bool moves; } resolve_cases[RESOLVE_CASES] = {
    {"direct", LOOKUP_DIRECT, false}, {"scan", LOOKUP_SCAN, false},
    {"direct-misses", LOOKUP_DIRECT, true}, {"scan-misses", LOOKUP_SCAN, true},
};

/* All sizes in turns, so that what else the machine does falls on all of them. The first turns only fill the caches. */
static void run_beds(Bed beds[RESOLVE_SIZES]) {
    for (int i = 0; i < RESOLVE_SIZES; i++)
        for (int j = 0; j < 4; j++) time_resolves(&beds[i], LOOKUP_DIRECT, true);
    for (int i = 0; i < RESOLVE_SIZES; i++) beds[i].missed = beds[i].resolved = 0;
    for (int turn = 0; turn < RESOLVE_TURNS; turn++)
        for (int c = 0; c < RESOLVE_CASES; c++)
            for (int i = 0; i < RESOLVE_SIZES; i++)
                beds[i].seconds[c][turn] = time_resolves(&beds[i], resolve_cases[c].lookup, resolve_cases[c].moves);
}

/* Prints a line a case. The time at 8k over that at k of the direct look-up without a miss. */
static double print_beds(Bed beds[RESOLVE_SIZES], int k, int context, FILE *csv) {
    double flat = 0;
    for (int c = 0; c < RESOLVE_CASES; c++) {
        double micros[RESOLVE_SIZES];
        printf("%6d %8d %-16s", k, context, resolve_cases[c].name);
        for (int i = 0; i < RESOLVE_SIZES; i++) {
            double misses = resolve_cases[c].moves ? (double)beds[i].missed / (double)beds[i].resolved : 0;
            micros[i] = 1e6 * median(beds[i].seconds[c], RESOLVE_TURNS);
            printf(" %8.2f", micros[i]);
            if (resolve_cases[c].moves) printf(" (%5.1f)", misses);
            else printf("        ");
            fprintf(csv, "%d,%d,%s,%d,%.4f,%.3f\n", k, context, resolve_cases[c].name, 1 << i, micros[i], misses);
        }
        printf(" %7.2f\n", micros[RESOLVE_SIZES - 1] / micros[0]);
        if (!c) flat = micros[RESOLVE_SIZES - 1] / micros[0];
    }
    return flat;
}

static const char resolve_drawing[] =
    "set multiplot layout 1,4; set xlabel 'hot cache (B / k)'; set logscale x 2; set yrange [0:*]; set key top left\n"
    "do for [k in '128 2048'] { do for [n in '8192 131072'] {\n"
    "set title 'k ' . k . ', ' . n . ' rows: us'\n"
    "plot for [c in 'direct scan direct-misses scan-misses'] csv using "
    "4:(strcol(1) eq k && strcol(2) eq n && strcol(3) eq c ? $5 : NaN) with linespoints title c\n"
    "} }\nunset multiplot";

static bool bench_resolve(const BenchOptions *bench, EngineOptions options, Error *error) {
    (void)options;
    Figure figure;
    double worst = 0;
    if (!open_figure(&figure, bench->directory, "resolve", "k,context,case,hot_over_k,microseconds,misses", error)) return false;
    printf("resolve          us a session and group, medians of %d turns; in brackets the rows that miss\n", RESOLVE_TURNS);
    printf("%6s %8s %-16s %16s %16s %16s %16s %7s\n", "k", "context", "case", "B = k       ", "2k       ", "4k       ",
           "8k       ", "8k / k");
    bool ok = true;
    for (int k = 128; k <= 2048; k *= 16)
        for (int context = 8192; context <= 131072 && ok; context *= 16) {
            Bed *beds = allocate_zeroed(RESOLVE_SIZES, sizeof *beds);
            for (int i = 0; i < RESOLVE_SIZES && ok; i++) ok = open_bed(&beds[i], k, k << i, context, error);
            if (ok) run_beds(beds);
            if (ok) worst = fmax(worst, print_beds(beds, k, context, figure.csv));
            for (int i = 0; i < RESOLVE_SIZES; i++) close_bed(&beds[i]);
            free(beds);
        }
    if (ok)
        claim(worst <= 1.25, "the direct look-up's time is flat in B from k to 8k",
              "%.2f times at most from k to 8k, without a miss", worst);
    return end_figure(&figure, resolve_drawing, ok, error);
}

/* ---- memory: table 1 of the paper, by arithmetic
 *
 * GLM-5.3's real shape: 78 layers, 21 of them with an indexer, 2,048 selected rows and a hot cache of 4,096. The paper's rows
 * have 576 bytes and its index keys 132; whole pages of 64 rows, one page of tail. Below it, what tide's own plan gives a
 * session: rows of 656 bytes at 704, index keys in bf16, two pages of tail, tables.
 */

enum { GLM_LAYERS = 78, GLM_PRODUCERS = 21, GLM_TOPK = 2048, GLM_HOT = 4096, PAPER_ROW = 576, PAPER_INDEX_ROW = 132,
       DRAFT_WINDOW = 2048, DRAFT_ROW = 12288, LIVE_PAYLOADS = 4 };

static size_t pages_of(int rows) { return (size_t)((rows + PAGE_ROWS - 1) / PAGE_ROWS); }

static double gib(size_t bytes) { return (double)bytes / (double)(1 << 30); }

/* One page of payload, or of index keys, in the paper's sizes. */
static size_t paper_page(bool index) {
    Cache cache = {.sources = index ? 0 : GLM_LAYERS,
                   .groups = index ? GLM_PRODUCERS : 0,
                   .format = {.bytes = PAPER_ROW, .stride = PAPER_ROW},
                   .index_format = {.bytes = PAPER_INDEX_ROW, .stride = PAPER_INDEX_ROW}};
    return page_image_bytes(&cache);
}

/* Required GPU memory of a session with so many rows. */
static size_t paper_session(int rows, bool resident, bool drafts) {
    size_t ring = pages_of(DRAFT_WINDOW + PAGE_ROWS - 1 + QUERY_BLOCK) * PAGE_ROWS * DRAFT_ROW, /* eq. 9 */
        staging = (size_t)LIVE_PAYLOADS * QUERY_BLOCK * GLM_TOPK * PAPER_ROW,                   /* eq. 11 */
        payload = resident ? pages_of(rows) : pages_of(GLM_HOT) + 1;
    return payload * paper_page(false) + pages_of(rows) * paper_page(true) + (drafts ? ring + (resident ? 0 : staging) : 0);
}

/* What tide plans for one session more of GLM-5.3: pages, index keys and tables; and on the host. */
static bool planned_session(KvMode mode, int rows, size_t *device, size_t *host, Error *error) {
    size_t sums[2][2];
    for (int more = 0; more < 2; more++) {
        Engine engine = {.backend = &c_backend};
        engine.config = (Config){.family = FAMILY_GLM_MOE_DSA, .model_type = "glm_moe_dsa", .num_hidden_layers = GLM_LAYERS,
                                 .max_position_embeddings = MAX_CONTEXT, .num_attention_heads = 64, .kv_lora_rank = 512,
                                 .qk_rope_head_dim = 64, .index_n_heads = 32, .index_head_dim = 128, .index_topk = GLM_TOPK};
        engine.config.indexer_full = allocate_zeroed(GLM_LAYERS, sizeof(bool));
        for (int i = 0; i < GLM_LAYERS; i++) engine.config.indexer_full[i] = i < 3 || i % 4 == 2; /* 0, 1, 2, 6, 10, ... 74 */
        EngineOptions options = {.model = "GLM-5.3", .sessions = 1 + more, .context = rows, .kv_dtype = KV_F8, .kv_mode = mode,
                                 .hot_rows = GLM_HOT};
        bool ok = plan_memory(&engine, &options, error);
        sums[more][0] = engine.cache.bytes, sums[more][1] = engine.cache.host_bytes;
        engine_close(&engine);
        if (!ok) return false;
    }
    *device = sums[1][0] - sums[0][0];
    *host = sums[1][1] - sums[0][1];
    return true;
}

static bool bench_memory(const BenchOptions *bench, EngineOptions options, Error *error) {
    static const struct { const char *name; bool resident, drafts, host; double printed[3]; } lines[] = {
        {"resident", true, false, false, {1.456, 4.444}}, {"hisparse", false, false, true, {0.259, 0.432, 4.186}},
        {"adaptive", false, false, true, {0.259, 0.432, 4.186}}, {"resident + DFlash2", true, true, false, {1.481, 4.469}},
        {"adaptive + DFlash2", false, true, true, {0.319, 0.492, 4.186}},
    };
    (void)options;
    Figure figure;
    int agree = 0, cells = 0;
    if (!open_figure(&figure, bench->directory, "memory", "method,gib_32k,gib_100k,host_gib_100k", error)) return false;
    printf("memory           GiB a session of GLM-5.3 by the paper's sizes; in brackets what the paper prints\n");
    printf("%-24s %16s %16s %16s\n", "", "32K", "100K", "host, 100K");
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        double values[] = {gib(paper_session(32768, lines[i].resident, lines[i].drafts)),
                           gib(paper_session(100000, lines[i].resident, lines[i].drafts)),
                           lines[i].host ? gib(pages_of(100000) * paper_page(false)) : 0};
        printf("%-24s", lines[i].name);
        for (int j = 0; j < (lines[i].host ? 3 : 2); j++, cells++) {
            printf("    %.3f (%.3f)", values[j], lines[i].printed[j]);
            agree += lround(1000 * values[j]) == lround(1000 * lines[i].printed[j]);
        }
        printf("\n");
        fprintf(figure.csv, "%s,%.6f,%.6f,%.6f\n", lines[i].name, values[0], values[1], values[2]);
    }
    size_t device[4], host[4];
    bool ok = true;
    for (int i = 0; i < 4 && ok; i++)
        ok = planned_session(i / 2 ? MODE_HISPARSE : MODE_RESIDENT, i % 2 ? 100000 : 32768, &device[i], &host[i], error);
    if (ok)
        printf("%-24s    %.3f            %.3f\n%-24s    %.3f            %.3f            %.3f\n", "tide's plan, resident",
               gib(device[0]), gib(device[1]), "tide's plan, hisparse", gib(device[2]), gib(device[3]), gib(host[3]));
    double less = (double)paper_session(100000, true, false) / (double)paper_session(100000, false, false);
    claim(agree == cells, "table 1 to the last digit the paper prints", "%d of %d figures", agree, cells);
    claim(lround(10 * less) == 103, "adaptive requires 10.3 times less than resident at 100K", "%.2f times", less);
    return end_figure(
        &figure,
        "set style data histogram; set style fill solid; set yrange [0:*]; set ylabel 'GiB a session'\n"
        "plot csv skip 1 using 2:xtic(1) title '32K', '' skip 1 using 3 title '100K', '' skip 1 using 4 title 'host, 100K'",
        ok, error);
}

/* ---- speculation: held-out prompts answered with drafts
 *
 * The workload of acceptance, lengths and confidence: the prompts beside the model in heldout.jsonl, which no drafter was trained
 * on, kind after kind in turn, 16 at a time, each slot taking the next when it has ended. An answer has 96 tokens, or ends with the
 * one that ends a turn; nothing stops a round from going on past that, so that every round says what it would have accepted. Rounds
 * begin behind the first token, which the prompt's own pass gives.
 */

enum { KINDS = 5, ANSWER = 96, TOGETHER = 16, HELD_CONTEXT = 1024 };

static const char *const kind_names[KINDS] = {"stories", "tasks", "definitions", "prose", "tech"};

typedef struct HeldPrompt { int kind; int *ids; } HeldPrompt;       /* ids: stb_ds */

typedef struct Answerer {       /* a runner that stops for nothing by itself */
    Runner runner;
    bool *ends;                 /* [vocab] tokens that end an answer */
    Session sessions[TOGETHER];
    int prompt[TOGETHER];       /* which one each session answers, or -1 */
} Answerer;

typedef struct DraftRound {     /* one session's block of one round */
    int kind, prompt, verified, accepted;       /* drafts; the latter as if no answer ended */
    int emitted;                                /* tokens of the answer */
    float scores[MAX_BLOCK];    /* [slots] for lengths, from DVL's predictor */
    float confidence[MAX_BLOCK];                /* [slots] logits of the confidence head */
} DraftRound;

static void free_prompts(HeldPrompt *prompts) {
    for (size_t i = 0; i < arrlenu(prompts); i++) arrfree(prompts[i].ids);
    arrfree(prompts);
}

/* One line of the file joins its kind. */
static bool read_prompt(const char *line, size_t length, const char *path, HeldPrompt **kinds, Error *error) {
    cJSON *object = json_parse(line, length, path, error);
    if (!object) return false;
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(object, "kind"),
        *list = cJSON_GetObjectItemCaseSensitive(object, "ids"), *item;
    HeldPrompt prompt = {.kind = KINDS};
    for (int kind = 0; kind < KINDS && cJSON_IsString(name); kind++)
        if (!strcmp(name->valuestring, kind_names[kind])) prompt.kind = kind;
    cJSON_ArrayForEach(item, list) arrput(prompt.ids, item->valueint);
    cJSON_Delete(object);
    int n = (int)arrlen(prompt.ids);
    if (prompt.kind < KINDS && n && n < HELD_CONTEXT / 2) {
        arrput(kinds[prompt.kind], prompt);
        return true;
    }
    arrfree(prompt.ids);
    return fail(error, "%s: a line without a known kind and ids", path);
}

/* The prompts of the model's folder, which are of its own vocabulary, or those beside it; one of each kind after the other. */
static bool read_prompts(const char *model, HeldPrompt **prompts, Error *error) {
    char path[PATH_MAX], *text;
    size_t length;
    HeldPrompt *kinds[KINDS] = {0};
    if (access(join(path, model, "heldout.jsonl"), R_OK)) join(path, model, "../heldout.jsonl");
    if (!read_file(path, 1 << 24, &text, &length, error)) return false;
    bool ok = true;
    for (char *line = text, *end; ok && (end = strchr(line, '\n')); line = end + 1)
        ok = read_prompt(line, (size_t)(end - line), path, kinds, error);
    free(text);
    *prompts = NULL;
    for (int kind = 0, rank = 0, left = KINDS; left; kind = (kind + 1) % KINDS, rank += !kind) {
        if (rank < arrlen(kinds[kind])) arrput(*prompts, kinds[kind][rank]);
        left = rank < arrlen(kinds[kind]) ? KINDS : left - 1;
    }
    for (int kind = 0; kind < KINDS; kind++) arrfree(kinds[kind]);
    if (!ok) free_prompts(*prompts);
    return ok;
}

static void answerer_close(Answerer *answerer) {
    for (int i = 0; i < TOGETHER; i++) session_free(&answerer->sessions[i]);
    free(answerer->ends);
    runner_close(&answerer->runner);
}

static bool answerer_open(Answerer *answerer, EngineOptions options, int sessions, int context, Error *error) {
    Runner *runner = &answerer->runner;
    *answerer = (Answerer){0};
    options.sessions = sessions;
    options.context = context;
    if (!runner_open(runner, &options, true, NULL, error)) return false;
    Config *config = &runner->engine.config;
    answerer->ends = allocate_zeroed((size_t)config->vocab_size, sizeof(bool));
    for (int id = 0; id < config->vocab_size; id++) answerer->ends[id] = chat_ends_turn(runner->tokenizer, id);
    for (int i = 0; i < config->n_eos; i++) answerer->ends[config->eos_token_id[i]] = true;
    tokenizer_close(runner->tokenizer);
    runner->tokenizer = NULL;
    config->n_eos = 0;
    for (int i = 0; i < TOGETHER; i++) answerer->prompt[i] = -1;
    return true;
}

/* Takes a prompt into a slot. */
static void begin_answer(Answerer *answerer, int slot, const HeldPrompt *prompt, int index, Sampling sampling, int most) {
    Session *session = &answerer->sessions[slot];
    *session = (Session){.slot = slot, .stream = (uint64_t)index, .max_new = most + 2 * MAX_BLOCK, .sampling = sampling};
    for (size_t i = 0; i < arrlenu(prompt->ids); i++) arrput(session->ids, prompt->ids[i]);
    session_begin(session, &answerer->runner.engine);
    while (!session_admit(&answerer->runner, session)) {        /* another may be computing the prefix that they share */
        Session *active[TOGETHER];
        int n = 0;
        for (int other = 0; other < TOGETHER; other++)
            if (other != slot && answerer->prompt[other] >= 0) active[n++] = &answerer->sessions[other];
        if (n) run_round(&answerer->runner, active, n);
        else cache_step(&answerer->runner.engine.cache);
    }
    answerer->prompt[slot] = index;
}

static void end_answer(Answerer *answerer, int slot) {
    cache_release(&answerer->runner.engine.cache, slot);
    session_free(&answerer->sessions[slot]);
    answerer->prompt[slot] = -1;
}

/* How many of the ids from `begin` on belong to an answer of at most `most` tokens. *over: the answer ends with them. */
static int count_answer(const Answerer *answerer, const Session *session, int begin, int most, bool *over) {
    int n = 0;
    *over = false;
    for (int at = session->prompt_length; at < (int)arrlen(session->ids) && !*over; at++) {
        n += at >= begin;
        *over = answerer->ends[session->ids[at]] || at + 1 - session->prompt_length == most;
    }
    return n;
}

static void note_round(const Answerer *answerer, const HeldPrompt *prompts, int block, DraftRound **rounds) {
    const Runner *runner = &answerer->runner;
    const Drafts *drafts = &runner->engine.drafter.state.drafts;
    const Session *session = runner->owners[block];
    int begin = runner->blocks[block].position + 1, prompt = answerer->prompt[session->slot];
    bool over;
    DraftRound round = {.kind = prompts[prompt].kind, .prompt = prompt, .verified = runner->blocks[block].count - 1};
    round.accepted = (int)arrlen(session->ids) - begin - 1;
    round.emitted = count_answer(answerer, session, begin, ANSWER, &over);
    memcpy(round.scores, drafts->survival + block * drafts->slots, (size_t)drafts->slots * sizeof(float));
    memcpy(round.confidence, drafts->confidence + block * drafts->slots, (size_t)drafts->slots * sizeof(float));
    arrput(*rounds, round);
}

/* Answers all prompts, by the settings of runner.speculation. Every block of drafts joins *rounds (stb_ds), in the order of time. */
static bool answer_prompts(Answerer *answerer, const HeldPrompt *prompts, Sampling sampling, DraftRound **rounds, Error *error) {
    Runner *runner = &answerer->runner;
    Session *active[TOGETHER];
    for (int next = 0, n = 1; n;) {
        n = 0;
        for (int slot = 0; slot < TOGETHER; slot++) {
            if (answerer->prompt[slot] < 0 && next < (int)arrlen(prompts)) {
                begin_answer(answerer, slot, &prompts[next], next, sampling, ANSWER);
                next++;
            }
            if (answerer->prompt[slot] >= 0) active[n++] = &answerer->sessions[slot];
        }
        uint64_t blocks = runner->speculation.stats.blocks;
        if (n) run_round(runner, active, n);
        int drafted = (int)(runner->speculation.stats.blocks - blocks);
        for (int i = 0; i < drafted; i++) note_round(answerer, prompts, i, rounds);
        for (int i = 0; i < n; i++) {
            bool over;
            if (active[i]->finish != RUNNING)
                return fail(error, "prompt %d: %s", answerer->prompt[active[i]->slot], active[i]->error.text);
            count_answer(answerer, active[i], 0, ANSWER, &over);
            if (over) end_answer(answerer, active[i]->slot);
        }
        if (interrupted) return fail(error, "interrupted");
    }
    return true;
}

static Sampling held_sampling(float temperature) {
    return (Sampling){.temperature = temperature, .top_p = 1, .repeat_penalty = 1, .seed = 1};
}

static bool refuse_plain(Error *error) { return fail(error, "this measurement wants a drafter: --draft DIR"); }

/* Opens the drafter and the prompts. To be closed also where that fails. */
static bool open_held(EngineOptions options, Answerer *answerer, HeldPrompt **prompts, Error *error) {
    *answerer = (Answerer){0};
    if (!options.draft && !options.stages) return refuse_plain(error);
    return read_prompts(options.model, prompts, error) && answerer_open(answerer, options, TOGETHER, HELD_CONTEXT, error)
        && (answerer->runner.engine.drafter.config.architecture || refuse_plain(error));
}

static void close_held(Answerer *answerer, HeldPrompt *prompts) {
    answerer_close(answerer);
    free_prompts(prompts);
}

/* From now on rounds verify as many rows, by that rule, and nothing is known of costs and acceptance. */
static void set_lengths(Runner *runner, int width, VerifyRule verify) {
    runner->speculation = (Speculation){.width = width, .verify = verify};
}

/* ---- acceptance: tokens a round on held-out prompts
 *
 * Full width. `emitted` counts the tokens of the answers and divides by the rounds they took: a round that is cut by the end of
 * an answer counts as a whole round with the tokens before the cut. `uncut`: accepted + 1.
 */

typedef struct AcceptanceRow { long rounds, emitted, uncut, tried[MAX_BLOCK], passed[MAX_BLOCK]; } AcceptanceRow;

static void add_acceptance(AcceptanceRow *row, const DraftRound *round) {
    row->rounds++;
    row->emitted += round->emitted;
    row->uncut += round->accepted + 1;
    for (int j = 0; j < round->verified && j <= round->accepted; j++) row->tried[j]++, row->passed[j] += j < round->accepted;
}

/* Prints a table of one temperature; means: [KINDS + 1] emitted tokens a round, the last of the kinds' mean. */
static void print_acceptance(const DraftRound *rounds, float temperature, int slots, double means[KINDS + 1], FILE *csv) {
    AcceptanceRow rows[KINDS] = {0};
    double emitted = 0, uncut = 0;
    for (size_t i = 0; i < arrlenu(rounds); i++) add_acceptance(&rows[rounds[i].kind], &rounds[i]);
    printf("temperature %.1f\n%-12s %7s %8s %7s  accepted by place, of those reached\n", temperature, "kind", "rounds",
           "emitted", "uncut");
    for (int kind = 0; kind < KINDS; kind++) {
        const AcceptanceRow *row = &rows[kind];
        means[kind] = (double)row->emitted / (double)row->rounds;
        double free = (double)row->uncut / (double)row->rounds;
        emitted += means[kind] / KINDS, uncut += free / KINDS;
        printf("%-12s %7ld %8.2f %7.2f ", kind_names[kind], row->rounds, means[kind], free);
        for (int j = 0; j < slots; j++) printf(" %.2f", (double)row->passed[j] / (double)row->tried[j]);
        printf("\n");
        for (int j = 0; j < slots; j++)
            fprintf(csv, "%.1f,%s,%ld,%.4f,%.4f,%d,%.4f\n", temperature, kind_names[kind], row->rounds, means[kind], free, j + 1,
                    (double)row->passed[j] / (double)row->tried[j]);
    }
    means[KINDS] = emitted;
    printf("%-12s %7zu %8.2f %7.2f\n", "mean", arrlenu(rounds), emitted, uncut);
}

static void claim_acceptance(const DraftConfig *draft, const double means[KINDS + 1]) {
    bool second = draft->selector_rank > 0;
    double least = second ? 5.0 : 4.0, least_mean = second ? 3.3 : 2.8, worse = fmin(means[0], means[1]);
    char what[128];
    if (!second && !draft->markov_rank) return;
    snprintf(what, sizeof what, "%s emits at least %.1f tokens a round on stories and on tasks, greedy",
             second ? "DFlash 2" : "DSpark", least);
    claim(worse >= least, what, "%.2f and %.2f", means[0], means[1]);
    snprintf(what, sizeof what, "%s emits at least %.1f tokens a round over all kinds, greedy", second ? "DFlash 2" : "DSpark",
             least_mean);
    claim(means[KINDS] >= least_mean, what, "%.2f", means[KINDS]);
}

static bool bench_acceptance(const BenchOptions *bench, EngineOptions options, Error *error) {
    static const char drawing[] =
        "set multiplot layout 1,2; set xlabel 'place in the block'; set yrange [0:1]; set key bottom left\n"
        "do for [t in '0.0 0.7'] { set title 'accepted of those reached, temperature ' . t\n"
        "plot for [k in 'stories tasks definitions prose tech'] csv skip 1 using "
        "6:(strcol(1) eq t && strcol(2) eq k ? $7 : NaN) with linespoints title k }\nunset multiplot";
    Figure figure;
    Answerer answerer;
    HeldPrompt *prompts = NULL;
    double means[2][KINDS + 1];
    if (!open_figure(&figure, bench->directory, "acceptance", "temperature,kind,rounds,emitted,uncut,place,accepted", error))
        return false;
    bool ok = open_held(options, &answerer, &prompts, error);
    const DraftConfig *draft = &answerer.runner.engine.drafter.config;
    if (ok) printf("acceptance       %s, %zu held-out prompts, at most %d tokens, %d rows a round\n", draft->architecture,
                   arrlenu(prompts), ANSWER, draft->slots + 1);
    for (int i = 0; i < 2 && ok; i++) {
        DraftRound *rounds = NULL;
        set_lengths(&answerer.runner, draft->slots + 1, VERIFY_FULL);
        ok = answer_prompts(&answerer, prompts, held_sampling(i ? 0.7f : 0), &rounds, error);
        if (ok) print_acceptance(rounds, i ? 0.7f : 0, draft->slots, means[i], figure.csv);
        arrfree(rounds);
    }
    if (ok) claim_acceptance(draft, means[0]);
    close_held(&answerer, prompts);
    return end_figure(&figure, drawing, ok, error);
}

/* ---- lengths: what verification lengths keep of the accepted drafts (the paper's figure 10)
 *
 * Offline, on rounds of full width: each rule divides a budget among 16 of them that ran together, and what it keeps of the drafts
 * that full width accepted is counted. `windows` have no budget: 1 + the rounded sum of a session's scores. The oracle knows what
 * will be accepted. Online, the same prompts are answered at width 4, so that later rounds stand elsewhere.
 */

enum { LENGTH_RULES = 4, HALF_ROWS = 4 };

static const char *const length_rules[LENGTH_RULES] = {"select", "seeded", "fixed", "oracle"};

typedef struct Kept { double share, rows; } Kept;       /* of the accepted drafts; rows a session */

/* Rows for the 16 rounds of one group, `rows` for each in the mean. */
static void divide_rows(int *lengths, const DraftRound *rounds, int slots, int rows, int rule) {
    float scores[TOGETHER * MAX_BLOCK];
    int limits[TOGETHER];
    for (int i = 0; i < TOGETHER; i++) {
        limits[i] = slots + 1;
        lengths[i] = rows;
        for (int j = 0; j < slots; j++) scores[i * slots + j] = rule == 3 ? (float)(j < rounds[i].accepted) : rounds[i].scores[j];
    }
    if (rule != 2) (rule == 1 ? c_backend.allocate_seeded : c_backend.allocate)(lengths, scores, limits, TOGETHER, slots,
                                                                                rows * TOGETHER);
}

static double sum_scores(const DraftRound *round, int slots) {
    double sum = 0;
    for (int j = 0; j < slots; j++) sum += (double)round->scores[j];
    return sum;
}

/* What a rule keeps; rule -1: windows. */
static Kept keep_drafts(const DraftRound *rounds, int slots, int rows, int rule) {
    int lengths[TOGETHER], groups = (int)arrlen(rounds) / TOGETHER;
    double kept = 0, accepted = 0, used = 0;
    for (int at = 0; at < groups * TOGETHER; at++) {
        const DraftRound *round = &rounds[at];
        if (at % TOGETHER == 0 && rule >= 0) divide_rows(lengths, round, slots, rows, rule);
        int length = rule >= 0 ? lengths[at % TOGETHER] : 1 + (int)lrint(sum_scores(round, slots));
        used += length;
        accepted += round->accepted;
        kept += round->accepted < length - 1 ? round->accepted : length - 1;
    }
    return (Kept){100 * kept / accepted, used / (groups * TOGETHER)};
}

/* R^2 of the accepted length: of the sum of the scores, against always saying its mean. */
static double explained(const DraftRound *rounds, int slots) {
    double mean = 0, wrong = 0, spread = 0;
    for (size_t i = 0; i < arrlenu(rounds); i++) mean += rounds[i].accepted / (double)arrlenu(rounds);
    for (size_t i = 0; i < arrlenu(rounds); i++) {
        wrong += pow(sum_scores(&rounds[i], slots) - rounds[i].accepted, 2);
        spread += pow(rounds[i].accepted - mean, 2);
    }
    return 1 - wrong / spread;
}

static double mean_accepted(const DraftRound *rounds) {
    double sum = 0;
    for (size_t i = 0; i < arrlenu(rounds); i++) sum += rounds[i].accepted;
    return sum / (double)arrlenu(rounds);
}

/* Prints the offline tables of one temperature. Returns what DVL's select keeps at half the rows. */
static double print_lengths(const DraftRound *rounds, double temperature, int slots, FILE *csv) {
    Kept windows = keep_drafts(rounds, slots, 0, -1);
    double half = 0;
    printf("temperature %.1f: %zu rounds, %.2f drafts accepted at full width, R2 of the accepted length %.3f\n", temperature,
           arrlenu(rounds), mean_accepted(rounds), explained(rounds, slots));
    printf("%-22s", "kept of these, rows");
    for (int rows = 2; rows <= slots; rows++) printf(" %7d", rows);
    printf("\n");
    for (int rule = 0; rule < LENGTH_RULES; rule++) {
        printf("%-22s", length_rules[rule]);
        for (int rows = 2; rows <= slots; rows++) {
            Kept kept = keep_drafts(rounds, slots, rows, rule);
            if (!rule && rows == HALF_ROWS) half = kept.share;
            printf(" %6.1f%%", kept.share);
            fprintf(csv, "%.1f,%s,%d,%.3f\n", temperature, length_rules[rule], rows, kept.share);
        }
        printf("\n");
    }
    printf("%-22s  %6.1f%% with %.2f rows a session\n", "windows", windows.share, windows.rows);
    fprintf(csv, "%.1f,windows,%.4f,%.3f\n", temperature, windows.rows, windows.share);
    return half;
}

/* The same prompts with half the rows, by three rules. */
static bool run_online(Answerer *answerer, const HeldPrompt *prompts, float temperature, double full, Error *error) {
    static const struct { const char *name; VerifyRule rule; bool seeded; } ways[] = {
        {"select", VERIFY_DVL, false}, {"seeded", VERIFY_DVL, true}, {"fixed", VERIFY_FULL, false}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        DraftRound *rounds = NULL;
        set_lengths(&answerer->runner, HALF_ROWS, ways[i].rule);
        answerer->runner.speculation.seeded = ways[i].seeded;
        bool ok = answer_prompts(answerer, prompts, held_sampling(temperature), &rounds, error);
        double verified = 0, accepted = ok ? mean_accepted(rounds) : 0;
        for (size_t j = 0; j < arrlenu(rounds); j++) verified += rounds[j].verified;
        if (ok) printf("online, width 4 %-6s  %.2f drafts accepted a round (%.1f%% of full width's), %.2f rows, %zu rounds\n",
                       ways[i].name,
                       accepted, 100 * accepted / full, 1 + verified / (double)arrlenu(rounds), arrlenu(rounds));
        arrfree(rounds);
        if (!ok) return false;
    }
    return true;
}

static bool bench_lengths(const BenchOptions *bench, EngineOptions options, Error *error) {
    static const char drawing[] =
        "set multiplot layout 1,2; set xlabel 'rows a session'; set yrange [0:100]; set xrange [2:7]; set key bottom right\n"
        "do for [t in '0.0 0.7'] { set title 'percent of the accepted drafts, temperature ' . t\n"
        "plot for [k in 'select seeded fixed oracle windows'] csv skip 1 using "
        "3:(strcol(1) eq t && strcol(2) eq k ? $4 : NaN) with linespoints title k }\nunset multiplot";
    Figure figure;
    Answerer answerer;
    HeldPrompt *prompts = NULL;
    double half[2];
    if (!open_figure(&figure, bench->directory, "lengths", "temperature,rule,rows,kept_percent", error)) return false;
    bool ok = open_held(options, &answerer, &prompts, error);
    const Drafter *drafter = &answerer.runner.engine.drafter;
    if (ok && !drafter->predictor.layers) ok = fail(error, "%s: has no predictor of lengths", options.draft);
    for (int i = 0; i < 2 && ok; i++) {
        DraftRound *rounds = NULL;
        float temperature = i ? 0.7f : 0;
        set_lengths(&answerer.runner, drafter->config.slots + 1, VERIFY_DVL);       /* full width, with scores */
        ok = answer_prompts(&answerer, prompts, held_sampling(temperature), &rounds, error);
        if (ok) half[i] = print_lengths(rounds, (double)temperature, drafter->config.slots, figure.csv);
        ok = ok && run_online(&answerer, prompts, temperature, mean_accepted(rounds), error);
        arrfree(rounds);
    }
    for (int i = 0; i < 2 && ok; i++)
        claim(half[i] >= 90, i ? "DVL at half the rows keeps 90% of the accepted drafts, temperature 0.7"
                               : "DVL at half the rows keeps 90% of the accepted drafts, greedy", "%.1f%%", half[i]);
    close_held(&answerer, prompts);
    return end_figure(&figure, drawing, ok, error);
}

/* ---- confidence: sequential temperature scaling (DSpark; the spec's drafters.md, 3.5)
 *
 * Rounds of full width at temperatures 0 and 1, by which the drafter was trained in equal parts. A draft's confidence is the sigmoid
 * of its logit over its slot's temperature, and the product of those up to slot k says how probable it is that k drafts are
 * accepted. Temperatures are fitted from the first slot to the last on every other group of prompts, and judged on the others. They
 * go into DIR/temperatures.json, which the engine reads from the drafter's folder.
 */

enum { TRIED_TEMPERATURES = 41, CALIBRATION_BINS = 15 };

static float sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* Expected calibration error of predictions [n] of whether more than `slot` drafts are accepted. */
static double calibration_error(const float *predicted, const DraftRound *rounds, int slot) {
    double said[CALIBRATION_BINS] = {0}, was[CALIBRATION_BINS] = {0}, error = 0;
    size_t n = arrlenu(rounds);
    for (size_t i = 0; i < n; i++) {
        int bin = (int)(predicted[i] * CALIBRATION_BINS);
        if (bin == CALIBRATION_BINS) bin--;
        said[bin] += (double)predicted[i];
        was[bin] += rounds[i].accepted > slot;
    }
    for (int bin = 0; bin < CALIBRATION_BINS; bin++) error += fabs(said[bin] - was[bin]) / (double)n;
    return error;
}

/* predicted *= the confidence of a slot. */
static void multiply_confidence(float *predicted, const float *before, const DraftRound *rounds, int slot, float temperature) {
    for (size_t i = 0; i < arrlenu(rounds); i++) predicted[i] = before[i] * sigmoid(rounds[i].confidence[slot] / temperature);
}

/* temperatures [slots] become those of least error, slot by slot; one is replaced only by a better one. */
static void fit_temperatures(float *temperatures, const DraftRound *rounds, int slots) {
    float *before = allocate_zeroed(arrlenu(rounds), sizeof(float)), *predicted = allocate_zeroed(arrlenu(rounds), sizeof(float));
    for (size_t i = 0; i < arrlenu(rounds); i++) before[i] = 1;
    for (int slot = 0; slot < slots; slot++) {
        temperatures[slot] = 1;
        multiply_confidence(predicted, before, rounds, slot, 1);
        double best = calibration_error(predicted, rounds, slot);
        for (int i = 0; i < TRIED_TEMPERATURES; i++) {
            float tried = powf(10, 2.0f * (float)i / (TRIED_TEMPERATURES - 1) - 1);
            multiply_confidence(predicted, before, rounds, slot, tried);
            double error = calibration_error(predicted, rounds, slot);
            if (error < best) best = error, temperatures[slot] = tried;
        }
        multiply_confidence(before, before, rounds, slot, temperatures[slot]);
    }
    free(before);
    free(predicted);
}

/* How probable it is that a round which accepts more than `slot` drafts was given a higher prediction than one that does not. */
static double area_under_curve(const float *predicted, const DraftRound *rounds, int slot) {
    double pairs = 0, right = 0;
    for (size_t i = 0; i < arrlenu(rounds); i++)
        for (size_t j = 0; j < arrlenu(rounds) && rounds[i].accepted > slot; j++) {
            if (rounds[j].accepted > slot) continue;
            pairs++;
            right += predicted[i] > predicted[j] ? 1 : predicted[i] < predicted[j] ? 0 : 0.5;
        }
    return pairs > 0 ? right / pairs : NAN;
}

/* Error of each slot and, after the fit, the area under its curve. */
static void judge_temperatures(const float *temperatures, const DraftRound *rounds, int slots, double *errors, double *areas) {
    float *predicted = allocate_zeroed(arrlenu(rounds), sizeof(float));
    for (size_t i = 0; i < arrlenu(rounds); i++) predicted[i] = 1;
    for (int slot = 0; slot < slots; slot++) {
        multiply_confidence(predicted, predicted, rounds, slot, temperatures[slot]);
        errors[slot] = 100 * calibration_error(predicted, rounds, slot);
        areas[slot] = area_under_curve(predicted, rounds, slot);
    }
    free(predicted);
}

static bool write_temperatures(const char *directory, const float *temperatures, int slots, Error *error) {
    char path[PATH_MAX];
    FILE *out = fopen(join(path, directory, "temperatures.json"), "w");
    if (!out) return fail(error, "%s: %s", path, strerror(errno));
    fprintf(out, "{\"temperatures\": [");
    for (int slot = 0; slot < slots; slot++) fprintf(out, "%s%.4f", slot ? ", " : "", (double)temperatures[slot]);
    fprintf(out, "]}\n");
    return !fclose(out) || fail(error, "%s: %s", path, strerror(errno));
}

static void print_confidence(const DraftRound *fitted, const DraftRound *judged, const float *temperatures, int slots,
                             FILE *csv) {
    double before[MAX_BLOCK], after[MAX_BLOCK], areas[MAX_BLOCK], sums[2] = {0};
    float ones[MAX_BLOCK];
    for (int slot = 0; slot < slots; slot++) ones[slot] = 1;
    judge_temperatures(ones, judged, slots, before, areas);
    judge_temperatures(temperatures, judged, slots, after, areas);
    printf("confidence       %zu rounds to fit, %zu of other prompts to judge; errors of calibration\n", arrlenu(fitted),
           arrlenu(judged));
    printf("%5s %12s %8s %8s %6s\n", "slot", "temperature", "before", "after", "AUC");
    for (int slot = 0; slot < slots; slot++) {
        printf("%5d %12.3f %7.2f%% %7.2f%% %6.3f\n", slot, (double)temperatures[slot], before[slot], after[slot], areas[slot]);
        fprintf(csv, "%d,%.4f,%.4f,%.4f,%.4f\n", slot, (double)temperatures[slot], before[slot], after[slot], areas[slot]);
        sums[0] += before[slot] / slots, sums[1] += after[slot] / slots;
    }
    printf("%5s %12s %7.2f%% %7.2f%%\n", "mean", "", sums[0], sums[1]);
}

static bool bench_confidence(const BenchOptions *bench, EngineOptions options, Error *error) {
    static const char drawing[] = "set xlabel 'slot'; set ylabel 'error of calibration (%)'; set yrange [0:*]\n"
                                  "plot csv skip 1 using 1:3 with linespoints title 'before', "
                                  "'' skip 1 using 1:4 with linespoints title 'after'";
    Figure figure;
    Answerer answerer;
    HeldPrompt *prompts = NULL;
    DraftRound *rounds = NULL, *halves[2] = {0};
    float temperatures[MAX_BLOCK];
    if (!open_figure(&figure, bench->directory, "confidence", "slot,temperature,error_before,error_after,auc", error))
        return false;
    bool ok = open_held(options, &answerer, &prompts, error);
    const DraftConfig *draft = &answerer.runner.engine.drafter.config;
    if (ok && !draft->confidence_head) ok = fail(error, "%s: has no confidence head", options.draft);
    set_lengths(&answerer.runner, draft->slots + 1, VERIFY_FULL);
    for (int i = 0; i < 2; i++) ok = ok && answer_prompts(&answerer, prompts, held_sampling((float)i), &rounds, error);
    for (size_t i = 0; i < arrlenu(rounds); i++) arrput(halves[rounds[i].prompt / KINDS % 2], rounds[i]);
    if (ok) fit_temperatures(temperatures, halves[0], draft->slots);
    if (ok) print_confidence(halves[0], halves[1], temperatures, draft->slots, figure.csv);
    ok = ok && write_temperatures(bench->directory, temperatures, draft->slots, error);
    arrfree(rounds), arrfree(halves[0]), arrfree(halves[1]);
    close_held(&answerer, prompts);
    return end_figure(&figure, drawing, ok, error);
}

/* ---- draft: memory of the drafter's state, by tide's own plan
 *
 * What a drafter adds to a session, as the difference between plans with and without one; beside it eq. 9, the ring: whole pages for
 * the window, a block and what alignment adds; and eq. 11, staging for the rows of a block.
 */

typedef struct DraftBytes { size_t plan, ring, staging; } DraftBytes;    /* of a plan; of a session by eq. 9 and by eq. 11 */

/* Plans; the model's limit on context does not matter. window: of the drafter's layers, 0: its own. */
static bool planned_bytes(EngineOptions options, int sessions, int context, int window, DraftBytes *bytes, Error *error) {
    Engine engine;
    options.sessions = sessions;
    options.context = 1024;
    if (!engine_plan(&engine, &options, error)) return false;
    free(engine.cache.group_of), free(engine.cache.member_of), free(engine.cache.trails);
    free(engine.cache.stretch), free(engine.cache.rows_before);
    engine.cache = (Cache){0};
    engine.config.max_position_embeddings = context;
    options.context = context;
    DraftConfig *draft = &engine.drafter.config;
    for (int i = 0; i < draft->backbone.num_hidden_layers && window; i++) draft->window[i] = draft->widest_window = window;
    bool ok = plan_memory(&engine, &options, error);
    const Cache *cache = &engine.cache;
    const Config *backbone = &draft->backbone;
    size_t heads = residual_streams(backbone) > 1 ? 1 : 2 * (size_t)backbone->num_key_value_heads,     /* of keys and of values */
           row = heads * (size_t)backbone->head_dim * sizeof(uint16_t),
           staged = (size_t)(cache->live_sources * QUERY_BLOCK * cache->index_topk);
    *bytes = (DraftBytes){cache->bytes, 0, staged * cache->format.stride};
    if (draft->architecture)
        bytes->ring = pages_of((size_t)(draft->widest_window < context ? draft->widest_window : context) + PAGE_ROWS - 1
                               + (size_t)(draft->slots + 1 > QUERY_BLOCK ? draft->slots + 1 : QUERY_BLOCK))
                      * PAGE_ROWS * (size_t)backbone->num_hidden_layers * row;
    engine_close(&engine);
    return ok;
}

/* What a drafter adds to a session's bytes of a context: the difference between one session and two, with and without it. */
static bool print_draft(EngineOptions options, int window, int context, bool *equal, int *first, FILE *csv, Error *error) {
    DraftBytes bytes[4];
    for (int i = 0; i < 4; i++) {
        EngineOptions plan = options;
        if (i < 2) plan.draft = NULL, plan.stages = STAGES_IDLE;
        if (!planned_bytes(plan, 1 + i % 2, context, i < 2 ? 0 : window, &bytes[i], error)) return false;
    }
    int added = (int)(bytes[3].plan - bytes[2].plan - (bytes[1].plan - bytes[0].plan)), ring = (int)bytes[3].ring,
        staging = (int)bytes[3].staging;
    *first = *first ? *first : added;
    *equal = *equal && added == ring + staging && added == *first;
    printf(window ? "%8d" : " shipped", window);
    printf(" %8d %12d %12d %12d\n", context, added, ring, staging);
    fprintf(csv, "%d,%d,%d,%d,%d\n", window, context, added, ring, staging);
    return true;
}

static bool bench_draft(const BenchOptions *bench, EngineOptions options, Error *error) {
    static const char drawing[] = "set xlabel 'context'; set logscale x 2; set yrange [0:*]; set ylabel 'bytes a session'\n"
                                  "plot for [w in '0 2048'] csv skip 1 using 2:(strcol(1) eq w ? $3 : NaN) with linespoints "
                                  "title (w eq '0' ? 'as shipped' : 'window 2048')";
    Figure figure;
    bool ok = options.draft || options.stages || refuse_plain(error), equal = true;
    if (!ok || !open_figure(&figure, bench->directory, "draft", "window,context,bytes,equation_9,equation_11", error))
        return false;
    printf("draft            bytes that a drafter adds to a session, by the plan and by the paper's arithmetic\n");
    printf("%8s %8s %12s %12s %12s\n", "window", "context", "planned", "eq. 9", "eq. 11");
    for (int window = 0, first = 0; window <= 2048 && ok; window += 2048, first = 0)
        for (int context = window ? 4096 : 1024; context <= 32768 && ok; context *= 2)
            ok = print_draft(options, window, context, &equal, &first, figure.csv, error);
    if (ok) claim(equal, "a drafter's state is eq. 9's ring and eq. 11's staging, the same from 1K to 32K", "every plan %s",
                  equal ? "equal" : "differs");
    return end_figure(&figure, drawing, ok, error);
}

/* ---- speed: decoding with drafts against decoding without
 *
 * Two lanes answer the same prompts in turns of 4 tokens a session: one without a drafter, one with, and their seconds for the same
 * tokens (drafts change no token) are compared. A wave of prompts begins together; the pass over the prompts is not timed. It ends
 * when the first of its answers ends, or after 512 tokens. A fixed width is measured over 96 tokens, or 32 of each of 16 sessions;
 * `auto` over 512 of each, with one session the median of five times, from nothing known, so that what it tries and how soon it
 * backs off is counted. Texts: fluent stories; facts to look up in a text, then whatever dialogue follows; continued held-out prose at
 * temperature 0.7; random tokens at temperature 1.
 */

enum { SPEED_TOKENS = 512, FIXED_TOKENS = 96, MANY_FIXED = 32, SPEED_TURN = 4, TEXTS = 4, WIDTHS = 9, SPEED_CONTEXT = 1024,
       LONG_CONTEXT = 8832, LONG_PAGES = 124, SPEED_REPEATS = 5 };

typedef struct SpeedText {
    const char *name;
    int kind, least, most;      /* of the held-out prompts; -1: random; of so many tokens */
    float temperature;
    bool ends;                  /* the end of an answer ends the wave */
} SpeedText;

static const SpeedText speed_texts[TEXTS] = {
    {"stories", 0, 1, 60, 0, true},
    {"look-ups", 1, 80, 512, 0, false},
    {"prose", 3, 1, 512, 0.7f, false},
    {"random", -1, 0, 0, 1, false},
};

typedef struct Lane {           /* one way to decode */
    Answerer answerer;
    const HeldPrompt *prompts;
    const Prefix *prefix;       /* stands in front of every prompt, or NULL */
    const SpeedText *text;
    int sessions;
    bool running;               /* a wave is under way */
    long wave, tokens, rounds;  /* tokens and rounds that were timed */
    double seconds;
} Lane;

typedef struct SpeedWay { const char *drafter, *name; VerifyRule verify; } SpeedWay;      /* drafter NULL: the model's stages */

static void lane_stop(Lane *lane) {
    for (int slot = 0; slot < lane->sessions; slot++)
        if (lane->answerer.prompt[slot] >= 0) end_answer(&lane->answerer, slot);
    lane->running = false;
}

/* Begins anew, with nothing known of costs and acceptance. */
static void lane_reset(Lane *lane, const SpeedText *text, int width, VerifyRule verify) {
    lane_stop(lane);
    set_lengths(&lane->answerer.runner, width, verify);
    lane->text = text;
    lane->wave = lane->tokens = lane->rounds = 0;
    lane->seconds = 0;
}

/* The n-th prompt of the lane's text, behind its prefix. */
static HeldPrompt pick_prompt(const Lane *lane, long n) {
    HeldPrompt prompt = {0};
    const HeldPrompt *picked = NULL;
    uint64_t seed = (uint64_t)n;
    for (int i = 0; lane->prefix && i < lane->prefix->pages * PAGE_ROWS; i++) arrput(prompt.ids, lane->prefix->text[i]);
    if (lane->text->kind < 0) {
        for (int i = 0; i < 32; i++) arrput(prompt.ids, 512 + (int)(draw(&seed) % 7000));
        return prompt;
    }
    for (size_t i = 0; !picked || n >= 0; i = (i + 1) % arrlenu(lane->prompts)) {
        const HeldPrompt *candidate = &lane->prompts[i];
        int length = (int)arrlen(candidate->ids);
        if (candidate->kind == lane->text->kind && length >= lane->text->least && length <= lane->text->most)
            picked = candidate, n--;
    }
    for (size_t i = 0; i < arrlenu(picked->ids); i++) arrput(prompt.ids, picked->ids[i]);
    return prompt;
}

/* One round of all sessions. */
static bool lane_round(Lane *lane, Error *error) {
    Session *active[TOGETHER];
    for (int slot = 0; slot < lane->sessions; slot++) active[slot] = &lane->answerer.sessions[slot];
    run_round(&lane->answerer.runner, active, lane->sessions);
    for (int slot = 0; slot < lane->sessions; slot++)
        if (active[slot]->finish != RUNNING) return fail(error, "a session ended: %s", active[slot]->error.text);
    return !interrupted || fail(error, "interrupted");
}

static bool wave_is_over(const Lane *lane) {
    for (int slot = 0; slot < lane->sessions; slot++) {
        const Session *session = &lane->answerer.sessions[slot];
        if (tokens_generated(session) >= SPEED_TOKENS) return true;
        for (int at = session->prompt_length; lane->text->ends && at < (int)arrlen(session->ids); at++)
            if (lane->answerer.ends[session->ids[at]]) return true;
    }
    return false;
}

/* The prompts of the next wave, run until every session has its first token. */
static bool begin_wave(Lane *lane, Error *error) {
    lane_stop(lane);
    for (int slot = 0; slot < lane->sessions; slot++) {
        HeldPrompt prompt = pick_prompt(lane, lane->wave * lane->sessions + slot);
        begin_answer(&lane->answerer, slot, &prompt, (int)(lane->wave * lane->sessions) + slot,
                     held_sampling(lane->text->temperature),
                     SPEED_TOKENS);
        arrfree(prompt.ids);
    }
    lane->running = true;
    lane->wave++;
    for (bool prefills = true; prefills;) {
        if (!lane_round(lane, error)) return false;
        prefills = false;
        for (int slot = 0; slot < lane->sessions; slot++) prefills |= !tokens_generated(&lane->answerer.sessions[slot]);
    }
    return true;
}

/* One thread's seconds are its processor's, so that what else the machine does is not counted. */
static double lane_time(void) {
    struct timespec time;
    if (omp_get_max_threads() > 1) return now();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Decodes until so many tokens in all were timed. */
static bool lane_turn(Lane *lane, long tokens, Error *error) {
    while (lane->tokens < tokens) {
        if ((!lane->running || wave_is_over(lane)) && !begin_wave(lane, error)) return false;
        long before = lane->answerer.runner.tokens;
        double start = lane_time();
        if (!lane_round(lane, error)) return false;
        lane->seconds += lane_time() - start;
        lane->tokens += lane->answerer.runner.tokens - before;
        lane->rounds++;
    }
    return true;
}

/* The prefix lies on the host from now on, for prompts that begin with it. */
static void keep_prefix(Lane *lane) {
    Cache *cache = &lane->answerer.runner.engine.cache;
    int rows = lane->prefix->pages * PAGE_ROWS + 1, cached;
    if (cache_admit(cache, 0, lane->prefix->text, rows, rows, &cached))
        for (int page = 0; page < lane->prefix->pages; page++)
            cache_append_page(cache, 0, lane->prefix->images + (size_t)page * page_image_bytes(cache), PAGE_ROWS);
    cache_release(cache, 0);
}

static bool lane_open(Lane *lane, EngineOptions options, int sessions, const HeldPrompt *prompts, const Prefix *prefix,
                      Error *error) {
    *lane = (Lane){.prompts = prompts, .prefix = prefix, .sessions = sessions};
    if (!answerer_open(&lane->answerer, options, sessions, prefix ? LONG_CONTEXT : SPEED_CONTEXT, error)) return false;
    if (prefix) keep_prefix(lane);
    return true;
}

typedef struct SpeedFigure {
    double ratio;               /* times as fast */
    double emitted;             /* tokens a round and session */
    double own;                 /* percent of the rounds with drafts */
} SpeedFigure;

/* Percent of the rounds with drafts that was not the target's pass. */
static double own_share(const SpeculationStats *stats) {
    double own = stats->draft_seconds + stats->allocate_seconds + stats->accept_seconds;
    return own > 0 ? 100 * own / (own + stats->verify_seconds) : NAN;
}

/* Both lanes in turns; every other turn the one with drafts goes first. */
static bool compare_lanes(Lane *plain, Lane *drafting, int tokens, SpeedFigure *figure, Error *error) {
    for (long turn = 1; turn * SPEED_TURN <= tokens; turn++) {
        long goal = turn * SPEED_TURN * plain->sessions;
        for (int i = 0; i < 2; i++)
            if (!lane_turn((turn + i) % 2 ? plain : drafting, goal, error)) return false;
    }
    *figure = (SpeedFigure){plain->seconds / (double)plain->tokens * (double)drafting->tokens / drafting->seconds,
                            (double)drafting->tokens / (double)drafting->rounds / drafting->sessions,
                            own_share(&drafting->answerer.runner.speculation.stats)};
    return true;
}

/* One cell: the median of several runs over these tokens. */
static bool measure_speed(Lane *plain, Lane *drafting, const SpeedText *text, int width, VerifyRule verify, SpeedFigure *figure,
                          Error *error) {
    double ratios[SPEED_REPEATS];
    int repeats = plain->sessions == 1 && !width ? SPEED_REPEATS : 1,
        tokens = !width ? SPEED_TOKENS : plain->sessions == 1 ? FIXED_TOKENS : MANY_FIXED;
    for (int i = 0; i < repeats; i++) {
        lane_reset(plain, text, 0, VERIFY_FULL);
        lane_reset(drafting, text, width, verify);
        if (!compare_lanes(plain, drafting, tokens, figure, error)) return false;
        ratios[i] = figure->ratio;
    }
    figure->ratio = median(ratios, repeats);
    return true;
}

enum { SPEED_WAYS = 6 };

static const SpeedWay speed_ways[SPEED_WAYS] = {
    {"draft-dflash2", "dflash2-full", VERIFY_FULL},
    {"draft-dflash2", "dflash2-dvl", VERIFY_DVL},
    {"draft-dspark", "dspark-full", VERIFY_FULL},
    {"draft-dspark", "dspark-conf", VERIFY_CONFIDENCE},
    {NULL, "own-full", VERIFY_FULL},
    {NULL, "own-conf", VERIFY_CONFIDENCE},
};

typedef struct SpeedWorst { double ratio, own, least_own; char where[128]; } SpeedWorst;

/* A line of the table: widths 2 to 8 and auto. widths: bits of those that are measured. */
static bool print_speeds(Lane *plain, Lane *drafting, const SpeedText *text, const SpeedWay *way, unsigned widths,
                         SpeedWorst *worst, FILE *csv,
                         Error *error) {
    int context = drafting->prefix ? LONG_PAGES * PAGE_ROWS : 0;
    SpeedFigure figure = {0};
    printf("%8d %7d %-9s %-13s", plain->sessions, context, text->name, way->name);
    for (int width = 2; width <= WIDTHS; width++) {
        if (!(widths >> width & 1)) printf("      -");
        if (!(widths >> width & 1)) continue;
        int rows = width == WIDTHS ? 0 : width;
        if (!measure_speed(plain, drafting, text, rows, way->verify, &figure, error)) return false;
        printf(" %6.2f", figure.ratio);
        fprintf(csv, "%d,%d,%s,%s,%d,%.4f,%.3f,%.2f\n", plain->sessions, context, text->name, way->name, rows, figure.ratio,
                figure.emitted,
                figure.own);
        worst->own = fmax(worst->own, figure.own);
        worst->least_own = fmin(worst->least_own, figure.own);
        fflush(stdout);
    }
    printf(" %8.2f %6.1f%%\n", figure.emitted, figure.own);
    if (figure.ratio < worst->ratio) {
        worst->ratio = figure.ratio;
        snprintf(worst->where, sizeof worst->where, "%s, %s, %d sessions behind %d rows", text->name, way->name, plain->sessions,
                 context);
    }
    return true;
}

/* All texts and ways of one number of sessions. The full table of widths is of the stories at short contexts. */
static bool measure_lanes(EngineOptions options, int sessions, const HeldPrompt *prompts, const Prefix *prefix,
                          SpeedWorst *worst, FILE *csv,
                          Error *error) {
    Lane plain, drafting;
    char path[PATH_MAX], name[64];
    options.draft = NULL;
    options.stages = STAGES_IDLE;
    bool ok = lane_open(&plain, options, sessions, prompts, prefix, error),
         own = ok && has_stages(&plain.answerer.runner.engine.checkpoint);
    for (int way = 0; way < SPEED_WAYS && ok; way++) {
        if ((prefix && way != (own ? 4 : 1)) || own != !speed_ways[way].drafter) continue;
        snprintf(name, sizeof name, "../%s", own ? "" : speed_ways[way].drafter);
        options.draft = own ? NULL : join(path, options.model, name);
        options.stages = own ? STAGES_REQUIRED : STAGES_IDLE;
        ok = lane_open(&drafting, options, sessions, prompts, prefix, error);
        const bool unsure = speed_ways[way].verify == VERIFY_CONFIDENCE && ok
                            && !drafting.answerer.runner.engine.drafter.config.confidence_head;
        for (int text = 0; text < TEXTS && ok && !unsure; text++) {
            unsigned widths = prefix || text ? 1 << WIDTHS : (2 << WIDTHS) - 4;
            ok = print_speeds(&plain, &drafting, &speed_texts[text], &speed_ways[way], widths, worst, csv, error);
        }
        answerer_close(&drafting.answerer);
    }
    answerer_close(&plain.answerer);
    return ok;
}

static bool bench_speed(const BenchOptions *bench, EngineOptions options, Error *error) {
    static const char drawing[] =
        "set multiplot layout 1,2; set xlabel 'rows a session'; set yrange [0:*]; set key top left\n"
        "do for [n in '1 16'] { set title n . ' sessions, stories: times as fast as without drafts'\n"
        "plot for [w in 'dflash2-full dflash2-dvl dspark-full dspark-conf own-full own-conf'] csv skip 1 using "
        "($5 > 0 ? $5 : NaN):(strcol(1) eq n && $2 == 0 && strcol(3) eq 'stories' && strcol(4) eq w ? $6 : NaN) "
        "with linespoints title w }\n"
        "unset multiplot";
    Figure figure;
    HeldPrompt *prompts = NULL;
    Prefix prefix = {0};
    SpeedWorst worst = {.ratio = 9, .least_own = 100};
    if (!open_figure(&figure, bench->directory, "speed", "sessions,context,text,way,width,ratio,emitted,own_percent", error))
        return false;
    bool ok = read_prompts(options.model, &prompts, error);
    EngineOptions undrafted = options;
    undrafted.draft = NULL, undrafted.stages = STAGES_IDLE;
    ok = ok && make_prefix(undrafted, LONG_PAGES, LONG_CONTEXT, &prefix, error);
    printf("speed            tokens/s over those without drafts, by rows a session; the last columns are of auto\n");
    printf("%8s %7s %-9s %-13s %6d %6d %6d %6d %6d %6d %6d %6s %8s %7s\n", "sessions", "before", "text", "way", 2, 3, 4, 5, 6, 7,
           8, "auto", "emitted", "own");
    for (int i = 0; i < 4 && ok; i++)
        ok = measure_lanes(options, i % 2 ? TOGETHER : 1, prompts, i / 2 ? &prefix : NULL, &worst, figure.csv, error);
    free_prefix(&prefix);
    free_prompts(prompts);
    if (ok) claim(worst.ratio >= 0.97, "auto is never under 0.97 of decoding without drafts over 512 tokens",
                  "%.3f at worst: %s", worst.ratio, worst.where);
    if (ok) claim(worst.own < 12, "a round's own cost besides the target's pass is under 12%", "%.1f%% to %.1f%%",
                  worst.least_own, worst.own);
    return end_figure(&figure, drawing, ok, error);
}

#ifdef TIDE_CUDA

/* ---- gpu: the kernels against what the card can do
 *
 * Every figure is the median of replays of a captured graph, and stands beside the rate at which this card reads its memory in the
 * same run. Operands are random and more than the L2 cache holds: each repetition takes the next of several.
 */

enum { GPU_POOL = 2 << 20, GPU_SETS = 8 };          /* GPU_POOL: 1,024 bytes each of random memory that operands are taken from */

typedef struct GpuBench {
    uint8_t *pool;              /* [GPU_POOL * 1024] random bytes, such that they are finite as bf16, f32 and e4m3 */
    float *x, *y;               /* [GPU_VECTORS] f32, random; results */
    int *ints;                  /* [GPU_VECTORS] */
    unsigned *sum;
    float *zeros;               /* [MAX_EXPERTS] */
    double read, link;          /* bytes a second */
    bool markdown;              /* lines of a table for README.md */
    FILE *csv;
} GpuBench;

enum { GPU_VECTORS = 64 << 20 };

static void *on_gpu(size_t bytes) {
    Error error;
    void *block = cuda_backend.take(bytes, MEMORY_DEVICE, &error);
    if (!block) fprintf(stderr, "tide: %s\n", error.text), exit(1);
    return block;
}

/* Fills device memory with repetitions of a random block in which no exponent is extreme. */
static void fill_gpu(void *to, size_t bytes, bool floats) {
    enum { BLOCK = 1 << 24 };
    uint8_t *block = allocate_zeroed(BLOCK, 1);
    uint64_t seed = 1;
    for (size_t i = 0; i < BLOCK; i += 4) {
        uint32_t bits = (uint32_t)draw(&seed);
        float value = ((float)(bits >> 8) * 0x1p-23f - 1) * 2;
        if (floats) memcpy(block + i, &value, 4);
        else
            for (int j = 0; j < 4; j++)
                block[i + (size_t)j] = (uint8_t)((bits >> 8 * j & 0x87) | 0x38); /* near 1 in bf16 and e4m3 */
    }
    for (size_t at = 0; at < bytes; at += BLOCK)
        cuda_backend.copy_bytes((uint8_t *)to + at, block, bytes - at < BLOCK ? bytes - at : BLOCK);
    free(block);
}

static void gpu_line(GpuBench *bench, const char *what, double seconds, double bytes) {
    printf(bench->markdown ? "| %s | %.1f | %.1f | %.1f%% |\n" : "%-58s %10.1f us %9.1f GB/s %6.1f%% of read\n", what,
           1e6 * seconds, bytes / seconds / 1e9, 100 * bytes / seconds / bench->read);
    fprintf(bench->csv, "%s,%.9f,%.0f,%.4f\n", what, seconds, bytes, bytes / seconds / bench->read);
}

typedef struct CopyWork { void *to; const void *from; size_t bytes; } CopyWork;

static void copy_work(void *user) {
    const CopyWork *work = user;
    cuda_begin_copy(work->to, work->from, work->bytes);
}

static void read_work(void *user) {
    const CopyWork *work = user;
    cuda_read(work->from, work->bytes, work->to);
}

static void gpu_ceilings(GpuBench *bench) {
    enum { HALF = GPU_POOL / 2 };
    const size_t half = (size_t)HALF * 1024, link = (size_t)256 << 20;
    Error error;
    void *pinned = cuda_backend.take(link, MEMORY_HOST, &error);
    CopyWork device = {bench->pool, bench->pool + half, half}, to_device = {bench->y, pinned, link / 2},
             to_host = {pinned, bench->y, link / 2}, reading = {bench->sum, bench->pool, 2 * half};
    bench->read = (double)reading.bytes / cuda_seconds(read_work, &reading);
    gpu_line(bench, "ceiling: reading device memory", (double)reading.bytes / bench->read, (double)reading.bytes);
    gpu_line(bench, "ceiling: copying device memory (read + written)", cuda_seconds(copy_work, &device), 2 * (double)half);
    gpu_line(bench, "ceiling: host to device, pinned", cuda_seconds(copy_work, &to_device), (double)link / 2);
    gpu_line(bench, "ceiling: device to host, pinned", cuda_seconds(copy_work, &to_host), (double)link / 2);
    cuda_backend.give_back(pinned, MEMORY_HOST);
    fill_gpu(bench->pool, 2 * half, false);
}

/* ---- products */

typedef struct ProductWork { GpuBench *bench; Matrix w[GPU_SETS]; int rows, sets; } ProductWork;

static void product_work(void *user) {
    const ProductWork *work = user;
    for (int i = 0; i < work->sets; i++)
        cuda_backend.linear(&(Projection){work->bench->y, (size_t)work->w[i].rows, &work->w[i]}, 1, work->bench->x,
                            (size_t)work->w[i].cols, work->rows);
}

static void library_work(void *user) {
    const ProductWork *work = user;
    for (int i = 0; i < work->sets; i++)
        cuda_begin_library_product(work->bench->y, work->bench->pool, work->w[i].data, work->w[i].rows, work->w[i].cols);
}

/* cuBLASLt's bf16 product of one row, in turns with tide's, so that both meet the same clocks: the middle one of three times. */
static void gpu_beside_library(GpuBench *bench, ProductWork *work, const char *shape) {
    const size_t bytes = (size_t)work->w[0].rows * (size_t)work->w[0].cols * 2;
    double seconds[2][3];
    char what[96];
    if (!cuda_begin_library_product(bench->y, bench->pool, work->w[0].data, work->w[0].rows, work->w[0].cols)) {
        printf("  (no cuBLASLt is found to stand beside it)\n");
        return;
    }
    for (int i = 0; i < 6; i++) {
        double now = cuda_seconds(i % 2 ? library_work : product_work, work) / GPU_SETS, *of = seconds[i % 2];
        int place = i / 2;
        for (; place > 0 && of[place - 1] > now; place--) of[place] = of[place - 1];
        of[place] = now;
    }
    snprintf(what, sizeof what, "  in turns with cuBLASLt: tide's %s", shape);
    gpu_line(bench, what, seconds[0][1], (double)bytes);
    snprintf(what, sizeof what, "  cuBLASLt's %s", shape);
    gpu_line(bench, what, seconds[1][1], (double)bytes);
}

/* Products that share their input, as a layer has them: in one launch. */
typedef struct JointWork { GpuBench *bench; Matrix w[GPU_SETS][MAX_PROJECTIONS]; int count, rows; } JointWork;

static void joint_work(void *user) {
    const JointWork *work = user;
    for (int i = 0; i < GPU_SETS; i++) {
        Projection products[MAX_PROJECTIONS];
        float *y = work->bench->y;
        for (int j = 0; j < work->count; y += (size_t)work->rows * (size_t)work->w[i][j].rows, j++)
            products[j] = (Projection){y, (size_t)work->w[i][j].rows, &work->w[i][j]};
        cuda_backend.linear(products, work->count, work->bench->x, (size_t)work->w[i][0].cols, work->rows);
    }
}

static void gpu_joint_products(GpuBench *bench) {
    static const struct { const char *name; int cols, count; struct { int rows; DType dtype; } of[MAX_PROJECTIONS]; } cases[] = {
        {"glm-5: of the input", 6144, 4,
         {{2048, DTYPE_F8_E4M3}, {576, DTYPE_F8_E4M3}, {128, DTYPE_F8_E4M3}, {32, DTYPE_BF16}}},
        {"glm-5: of the latent", 2048, 2, {{16384, DTYPE_F8_E4M3}, {4096, DTYPE_F8_E4M3}}},
        {"glm-5: gate and up", 6144, 2, {{12288, DTYPE_F8_E4M3}, {12288, DTYPE_F8_E4M3}}},
        {"qwen3-8b: q, k and v", 4096, 3, {{4096, DTYPE_BF16}, {1024, DTYPE_BF16}, {1024, DTYPE_BF16}}},
    };
    static const int counts[] = {1, 8, 16};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        JointWork work = {.bench = bench, .count = cases[c].count};
        const uint8_t *at = bench->pool;
        for (int i = 0; i < GPU_SETS; i++)
            for (int j = 0; j < work.count; j++) {
                const DType dtype = cases[c].of[j].dtype;
                work.w[i][j] = (Matrix){.data = at,
                                        .dtype = dtype,
                                        .rows = cases[c].of[j].rows,
                                        .cols = cases[c].cols,
                                        .scale = dtype == DTYPE_F8_E4M3 ? bench->x : NULL,
                                        .scale_cols = cases[c].cols / SCALE_BLOCK};
                at += (size_t)work.w[i][j].rows * stored_bytes(dtype, (size_t)work.w[i][j].cols);
            }
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
            char what[96];
            work.rows = counts[n];
            snprintf(what, sizeof what, "products of %s, %d rows", cases[c].name, counts[n]);
            gpu_line(bench, what, cuda_seconds(joint_work, &work) / GPU_SETS, (double)(at - bench->pool) / GPU_SETS);
        }
    }
}

static void gpu_products(GpuBench *bench) {
    static const struct { DType dtype; const char *name; int rows, cols; } cases[] = {
        {DTYPE_BF16, "bf16", 16384, 8192}, {DTYPE_F8_E4M3, "e4m3", 16384, 8192}, {DTYPE_F4_E2M1, "e2m1", 16384, 8192},
        {DTYPE_BF16, "bf16", 6144, 2048}, {DTYPE_F8_E4M3, "e4m3", 6144, 2048}, {DTYPE_BF16, "bf16", 8192, 320},
        {DTYPE_BF16, "bf16", 1024, 320}, {DTYPE_BF16, "bf16", 320, 160}, {DTYPE_BF16, "bf16", 160, 512},
    };
    static const int counts[] = {1, 8, 16, 64, 256};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const bool fp4 = cases[c].dtype == DTYPE_F4_E2M1;
        const int scale_cols = cases[c].cols / (fp4 ? EXPONENT_BLOCK : SCALE_BLOCK);
        const size_t values = (size_t)cases[c].rows * stored_bytes(cases[c].dtype, (size_t)cases[c].cols);
        const size_t bytes = values + (fp4 ? (size_t)cases[c].rows * (size_t)scale_cols : 0);
        ProductWork work = {.bench = bench, .sets = GPU_SETS};
        for (int i = 0; i < GPU_SETS; i++)
            work.w[i] = (Matrix){.data = bench->pool + (size_t)i * bytes,
                                 .dtype = cases[c].dtype,
                                 .rows = cases[c].rows,
                                 .cols = cases[c].cols,
                                 .scale = cases[c].dtype == DTYPE_F8_E4M3 ? bench->x : NULL,
                                 .scale_cols = scale_cols,
                                 .exponents = fp4 ? bench->pool + (size_t)i * bytes + values : NULL};
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
            char what[96];
            work.rows = counts[n];
            double seconds = cuda_seconds(product_work, &work) / GPU_SETS;
            snprintf(what, sizeof what, "product %s %d x %d, %d rows", cases[c].name, cases[c].rows, cases[c].cols, counts[n]);
            gpu_line(bench, what, seconds, (double)bytes);
            if (counts[n] == 1 && cases[c].dtype == DTYPE_BF16) gpu_beside_library(bench, &work, strchr(what, ' ') + 1);
        }
    }
    gpu_joint_products(bench);
}

/* ---- experts: some that the rows pick at random, and one shared by all, which is e4m3 with scales of `block` x `block` */

enum { EXPERT_ROWS = 32, MOST_PICKS = 8, USUAL_EXPONENT = 122 };

typedef struct ExpertShape { const char *name; int experts, picks, hidden, inner; DType dtype; int block; } ExpertShape;

typedef struct ExpertsWork { GpuBench *bench; LayerWeights layer; Config config; int rows; } ExpertsWork;

/* The router, too; each time other experts. */
static void experts_work(void *user) {
    const ExpertsWork *work = user;
    GpuBench *bench = work->bench;
    const int rows = work->rows, experts = work->config.n_routed_experts;
    float *branch = bench->y, *weights = branch + (size_t)rows * (size_t)work->config.hidden_size,
          *scratch = weights + rows * MOST_PICKS;
    for (int i = 0; i < GPU_SETS; i++) {
        int *picks = bench->ints + i * rows * work->config.num_experts_per_tok;
        cuda_backend.route(picks, weights, bench->x + (size_t)(i * rows * experts), bench->zeros, rows, &work->config);
        cuda_backend.experts(branch, bench->x, picks, weights, rows, &work->layer, &work->config, scratch);
    }
}

/* How many experts the rows have picked between them, summed over the repetitions. */
static int picked_experts(const ExpertsWork *work) {
    const int picks = work->rows * work->config.num_experts_per_tok;
    int distinct = 0, *all = allocate_zeroed((size_t)(GPU_SETS * picks), sizeof *all);
    cuda_backend.copy_bytes(all, work->bench->ints, (size_t)(GPU_SETS * picks) * sizeof *all);
    for (int set = 0; set < GPU_SETS; set++) {
        bool taken[MAX_EXPERTS] = {false};
        for (int i = 0; i < picks; i++) {
            distinct += !taken[all[set * picks + i]];
            taken[all[set * picks + i]] = true;
        }
    }
    free(all);
    return distinct;
}

/* The bytes of one expert: three matrices and, of e2m1, their exponents. */
static size_t expert_bytes(const ExpertShape *shape, DType dtype) {
    const size_t values = 3 * (size_t)shape->hidden * (size_t)shape->inner;
    return stored_bytes(dtype, values) + (dtype == DTYPE_F4_E2M1 ? values / EXPONENT_BLOCK : 0);
}

/* The matrix of that number, 0 to 2, of the expert at `data`. */
static Matrix expert_matrix(GpuBench *bench, const ExpertShape *shape, DType dtype, const uint8_t *data, int number) {
    const size_t values = (size_t)shape->hidden * (size_t)shape->inner;
    Matrix w = {.data = data + (size_t)number * stored_bytes(dtype, values),
                .dtype = dtype,
                .rows = number < 2 ? shape->inner : shape->hidden,
                .cols = number < 2 ? shape->hidden : shape->inner,
                .block = shape->block};
    w.scale_cols = (w.cols + shape->block - 1) / shape->block;
    if (dtype != DTYPE_F4_E2M1) w.scale = bench->x;
    else {
        w.scale_cols = w.cols / EXPONENT_BLOCK;
        w.exponents = data + 3 * stored_bytes(dtype, values) + (size_t)number * values / EXPONENT_BLOCK;
    }
    return w;
}

static void gpu_expert_shape(GpuBench *bench, const ExpertShape *shape) {
    const size_t n = (size_t)shape->experts, each = expert_bytes(shape, shape->dtype),
                 shared = expert_bytes(shape, DTYPE_F8_E4M3),
                 exponents = shape->dtype == DTYPE_F4_E2M1 ? 3 * (size_t)shape->hidden * (size_t)shape->inner / EXPONENT_BLOCK
                                                           : 0;
    uint8_t *weights = on_gpu(n * each + shared), *usual = allocate_zeroed(exponents + 1, 1);
    Matrix *experts = allocate_zeroed(3 * n, sizeof *experts), *table = on_gpu(3 * n * sizeof *table);
    fill_gpu(weights, n * each + shared, false);
    memset(usual, USUAL_EXPONENT, exponents);
    for (size_t e = 0; e < n; e++) {
        if (exponents) cuda_backend.copy_bytes(weights + (e + 1) * each - exponents, usual, exponents);
        for (int i = 0; i < 3; i++) experts[(size_t)i * n + e] = expert_matrix(bench, shape, shape->dtype, weights + e * each, i);
    }
    cuda_backend.copy_bytes(table, experts, 3 * n * sizeof *table);
    ExpertsWork work = {.bench = bench,
                        .layer = {.gate_proj = expert_matrix(bench, shape, DTYPE_F8_E4M3, weights + n * each, 0),
                                  .up_proj = expert_matrix(bench, shape, DTYPE_F8_E4M3, weights + n * each, 1),
                                  .down_proj = expert_matrix(bench, shape, DTYPE_F8_E4M3, weights + n * each, 2),
                                  .expert_gate = table,
                                  .expert_up = table + n,
                                  .expert_down = table + 2 * n,
                                  .expert_dtype = shape->dtype},
                        .config = {.hidden_size = shape->hidden,
                                   .moe_intermediate_size = shape->inner,
                                   .n_routed_experts = shape->experts,
                                   .num_experts_per_tok = shape->picks,
                                   .n_shared_experts = 1,
                                   .n_group = 1,
                                   .topk_group = 1,
                                   .weight_block = shape->block,
                                   .norm_topk_prob = true,
                                   .routed_scaling_factor = 1}};
    for (work.rows = 1; work.rows <= EXPERT_ROWS; work.rows *= work.rows == 1 ? 8 : 4) {
        char what[96];
        snprintf(what, sizeof what, "router and experts, %s, %d rows", shape->name, work.rows);
        const double seconds = cuda_seconds(experts_work, &work) / GPU_SETS;
        gpu_line(bench, what, seconds, (double)each * picked_experts(&work) / GPU_SETS + (double)shared);
    }
    free(usual);
    free(experts);
    cuda_backend.give_back(weights, MEMORY_DEVICE);
    cuda_backend.give_back(table, MEMORY_DEVICE);
}

static void gpu_experts(GpuBench *bench) {
    static const ExpertShape shapes[] = {{"GLM-5.3, e4m3", 256, 8, 6144, 2048, DTYPE_F8_E4M3, SCALE_BLOCK},
                                         {"DeepSeek-V4-Flash, e2m1", 256, 6, 4096, 2048, DTYPE_F4_E2M1, SCALE_BLOCK},
                                         {"DeepSeek-V4.1-Flash, e2m1", 384, 6, 5120, 2304, DTYPE_F4_E2M1, 32},
                                         {"tide's model", 8, 2, 320, 256, DTYPE_F8_E4M3, SCALE_BLOCK}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) gpu_expert_shape(bench, &shapes[i]);
}

/* ---- index scores and top-k; latent attention over a selection */

typedef struct SelectWork {
    GpuBench *bench;
    Row *rows;
    DevicePage *pages;
    Selection selection;
    RowFormat format;
    int n_rows, context_pages, heads, dim;
    int sets;                   /* of keys, so that the cache does not hold them */
    size_t set_bytes;
} SelectWork;

static void select_work(void *user) {
    SelectWork *work = user;
    for (int i = 0; i < work->sets; i++)
        cuda_backend.index_select(
            &work->selection, work->bench->x, work->bench->x, work->bench->pool + (size_t)i * work->set_bytes, &work->format,
            work->pages, work->context_pages, work->heads, work->dim, work->rows, work->n_rows, work->bench->y, work->n_rows);
}

static void gpu_selection(GpuBench *bench) {
    static const struct { int sessions, queries, context, heads, dim, topk; KvDtype dtype;
    } cases[] = {{1, 1, 128 << 10, 32, 128, GLM_TOPK, KV_BF16}, {1, 8, 128 << 10, 32, 128, GLM_TOPK, KV_BF16},
                 {32, 1, 100000, 32, 128, GLM_TOPK, KV_BF16},   {32, 8, 100000, 32, 128, GLM_TOPK, KV_BF16},
                 {1, 1, 1 << 20, 32, 128, GLM_TOPK, KV_BF16},   {1, 1, 128 << 10, 32, 128, 512, KV_BF16},
                 {1, 1, 128 << 10, 32, 128, GLM_TOPK, KV_F8},   {1, 8, 128 << 10, 32, 128, GLM_TOPK, KV_F8},
                 {32, 1, 100000, 32, 128, GLM_TOPK, KV_F8},     {32, 8, 100000, 32, 128, GLM_TOPK, KV_F8},
                 {1, 1, 1 << 20, 32, 128, GLM_TOPK, KV_F8},     {1, 1, 2000, 8, 64, 128, KV_BF16},
                 {1, 1, 16 << 10, 8, 64, 128, KV_BF16},         {64, 1, 16 << 10, 8, 64, 128, KV_BF16}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const int sessions = cases[c].sessions, n = sessions * cases[c].queries, pages = cases[c].context / PAGE_ROWS;
        if ((size_t)n * (size_t)(pages * PAGE_ROWS) > GPU_VECTORS) continue;
        const bool f8 = cases[c].dtype == KV_F8;
        SelectWork work = {.bench = bench,
                           .format = index_row_format(cases[c].dtype, cases[c].dim),
                           .n_rows = n,
                           .context_pages = pages,
                           .heads = cases[c].heads,
                           .dim = cases[c].dim,
                           .selection = {.ids = bench->ints, .count = bench->ints + (32 << 20), .capacity = cases[c].topk}};
        work.set_bytes = (size_t)sessions * (size_t)(pages * PAGE_ROWS) * work.format.stride;
        work.sets = (int)((size_t)GPU_POOL * 1024 / work.set_bytes);
        if (work.sets > GPU_SETS) work.sets = GPU_SETS;
        Row *rows = allocate_zeroed((size_t)n, sizeof *rows);
        DevicePage *table = allocate_zeroed((size_t)(sessions * pages), sizeof *table);
        for (int r = 0; r < n; r++)
            rows[r] = (Row){r / cases[c].queries, pages * PAGE_ROWS - cases[c].queries + r % cases[c].queries, 0};
        for (int i = 0; i < sessions * pages; i++) table[i].id = i;
        work.rows = on_gpu((size_t)n * sizeof *rows);
        work.pages = on_gpu((size_t)(sessions * pages) * sizeof *table);
        cuda_backend.copy_bytes(work.rows, rows, (size_t)n * sizeof *rows);
        cuda_backend.copy_bytes(work.pages, table, (size_t)(sessions * pages) * sizeof *table);
        char what[96];
        snprintf(what, sizeof what, "index, %d heads x %d, top-%d, %s keys, %d x %d queries, %d rows", work.heads, work.dim,
                 cases[c].topk, f8 ? "fp8" : "bf16", sessions, cases[c].queries, pages * PAGE_ROWS);
        gpu_line(bench, what, cuda_seconds(select_work, &work) / work.sets, (double)work.set_bytes);
        cuda_backend.give_back(work.rows, MEMORY_DEVICE);
        cuda_backend.give_back(work.pages, MEMORY_DEVICE);
        free(rows);
        free(table);
    }
}

typedef struct AttentionWork {
    GpuBench *bench;
    RowPool pool;
    RowFormat format;
    DeviceRow *locations;
    int *count, n_rows, heads;
} AttentionWork;

static void attention_work(void *user) {
    const AttentionWork *work = user;
    cuda_backend.sparse_attention(work->bench->y, work->bench->x, &work->pool, &work->format, work->locations, work->count,
                                  GLM_TOPK, work->n_rows, work->heads, 0.04f);
}

static void gpu_attention(GpuBench *bench) {
    static const struct { int rows, heads; KvDtype dtype; } cases[] = {
        {1, 64, KV_F8}, {8, 64, KV_F8}, {256, 64, KV_F8}, {512, 64, KV_F8}, {256, 128, KV_F8},
        {1, 64, KV_BF16}, {8, 64, KV_BF16}, {256, 64, KV_BF16}, {512, 64, KV_BF16}, {256, 128, KV_BF16}};
    DeviceRow *locations = allocate_zeroed((size_t)512 * GLM_TOPK, sizeof *locations);
    DeviceRow *every = allocate_zeroed((size_t)GPU_POOL * 1024 / 656, sizeof *every);
    int *count = allocate_zeroed(512, sizeof *count);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const int n = cases[c].rows;
        AttentionWork work = {.bench = bench,
                              .format = row_format(cases[c].dtype, 512, 64, 128),
                              .n_rows = n,
                              .heads = cases[c].heads,
                              .locations = (DeviceRow *)bench->ints,
                              .count = bench->ints + (32 << 20)};
        const int pool = (int)((size_t)GPU_POOL * 1024 / work.format.stride);
        uint64_t seed = 5;
        for (int i = 0; i < n * GLM_TOPK; i++) locations[i].id = (int)(draw(&seed) % (uint64_t)pool);
        for (int r = 0; r < n; r++) count[r] = GLM_TOPK;
        work.pool = (RowPool){bench->pool, bench->pool, pool};
        for (int i = 0; i < pool; i++) every[i].id = i;
        cuda_backend.copy_bytes(bench->y, every, (size_t)pool * sizeof *every);
        cuda_backend.store_rows(bench->pool, &work.format, (DeviceRow *)bench->y, pool, bench->x, 16, bench->x + 512, 16);
        cuda_backend.copy_bytes(work.locations, locations, (size_t)(n * GLM_TOPK) * sizeof *locations);
        cuda_backend.copy_bytes(work.count, count, (size_t)n * sizeof *count);
        char what[96];
        double seconds = cuda_seconds(attention_work, &work), operations = 2.0 * n * work.heads * GLM_TOPK * (576 + 512);
        snprintf(what, sizeof what, "latent attention, %s rows, %d heads, %d queries x 2,048: %.0f TFLOP/s",
                 cases[c].dtype == KV_F8 ? "fp8" : "bf16", work.heads, n, operations / seconds / 1e12);
        gpu_line(bench, what, seconds, (double)n * GLM_TOPK * (double)work.format.bytes);
    }
    free(locations);
    free(every);
    free(count);
}

/* ---- the resolver and the copies of missing rows (paper 3.2 and figure 8)
 *
 * Every replay has to find the hot caches as the one before found them, or only the first would miss. So a work goes through a cycle of
 * selections: some rows belong to all of them, and the others are each time the next `missing` ones of a random order, so many
 * steps long that the least recently used rule has dropped them all when they come again. Nothing is restored and nothing
 * subtracted; one more cycle counts the misses, which the line names. Rows lie anywhere in the context, and lists are ascending.
 */

enum { GPU_BED_SOURCES = 4 };

typedef struct GpuBed {         /* a hierarchy on the GPU where every row is hot or on the host, and its cycle of selections */
    Cache cache;
    MissPlan plan;
    Selection selection;
    PassReport *report;
    DeviceRow *locations;
    Row *rows;                  /* [n_rows] of a step */
    int *ids;                   /* [steps, n_rows, k] */
    int n_rows, steps, sources; /* sources: whose rows are fetched; 0: only resolved */
    bool ahead;                 /* all sources' copies are asked for at once, not each in front of its layer */
    const void *weights;        /* what each layer's compute is: these are read */
    size_t compute;             /* bytes of them; 0: there is none */
    unsigned *sum;
} GpuBed;

static void bed_work(void *user) {
    GpuBed *bed = user;
    for (int step = 0; step < bed->steps; step++) {
        Selection selection = bed->selection;
        selection.ids = bed->ids + (size_t)step * (size_t)bed->n_rows * (size_t)selection.capacity;
        cuda_backend.resolve(&bed->cache, 0, &selection, bed->rows, 0, bed->n_rows, 0, bed->locations, &bed->plan, bed->report);
        for (int i = 0; i < bed->sources; i++) {
            for (int j = bed->ahead && i ? bed->sources : i; j < (bed->ahead ? bed->sources : i + 1); j++)
                cuda_backend.fetch_rows(&bed->cache, (SourceId){j}, &bed->plan, bed->rows, 0, bed->n_rows, 0, bed->report);
            cuda_backend.await_rows(&bed->cache, (SourceId){i});
            if (bed->compute) cuda_read(bed->weights, bed->compute, bed->sum);
        }
    }
}

static void *gpu_copy(const void *values, size_t bytes) {
    void *copy = on_gpu(bytes);
    cuda_backend.copy_bytes(copy, values, bytes);
    return copy;
}

/* n page ids that count from `first`, or are all 0. */
static void *gpu_pages(size_t n, int first) {
    int32_t *pages = allocate_zeroed(n, sizeof *pages);
    for (size_t i = 0; i < n && first >= 0; i++) pages[i] = first + (int)i;
    void *copy = gpu_copy(pages, n * sizeof *pages);
    free(pages);
    return copy;
}

/* host: memory for all their rows, of all sources. */
static GpuBed open_gpu_bed(uint8_t *host, int sessions, int context, int hot_rows, int k, const RowFormat *format, int sources) {
    static int members[GPU_BED_SOURCES] = {0, 1, 2, 3};
    GpuBed bed = {.selection.capacity = k};
    Cache *cache = &bed.cache;
    *cache = (Cache){.sessions = sessions,
                     .context = context,
                     .context_pages = context / PAGE_ROWS,
                     .sources = sources,
                     .groups = 1,
                     .member_of = members,
                     .index_topk = k,
                     .hot_rows = hot_rows,
                     .hot_pages = hot_rows / PAGE_ROWS,
                     .tail_ring = 4,
                     .live_sources = sources,
                     .staging_blocks = sessions,
                     .staging_rows = QUERY_BLOCK * k,
                     .format = *format};
    const size_t n = (size_t)sessions, pages = n * (size_t)cache->context_pages, slots = n * (size_t)hot_rows,
                 most = n * QUERY_BLOCK;
    int *tail_base = allocate_zeroed(n, sizeof(int)), *tags = allocate_zeroed(slots, sizeof(int));
    for (size_t i = 0; i < n; i++) tail_base[i] = context;
    memset(tags, 0xff, slots * sizeof(int));
    cache->device_pages.n_pages = sessions * cache->hot_pages + 1;
    cache->host_pages.n_pages = (int)pages;
    cache->seen = (CacheTables){gpu_copy(tail_base, n * sizeof(int)), gpu_pages(n * 4, -1), gpu_pages(pages, -1),
                                gpu_pages(n * (size_t)cache->hot_pages, 1), NULL, gpu_pages(pages, 0)};
    cache->slots = (HotTables){on_gpu(n * 4), gpu_copy(tags, slots * 4), on_gpu(slots * 4),
                               on_gpu(pages * PAGE_ROWS * sizeof(uint16_t))};
    cache->device = on_gpu((size_t)sources * (size_t)cache->device_pages.n_pages * PAGE_ROWS * format->stride);
    cache->staging = on_gpu((size_t)sources * most * (size_t)k * format->stride);
    cache->host = host;
    bed.plan = (MissPlan){on_gpu(most * (size_t)k * sizeof(HostRow)), on_gpu(most * (size_t)k * sizeof(DeviceRow)),
                          on_gpu(most * sizeof(int)), 0};
    bed.locations = on_gpu(most * (size_t)k * sizeof(DeviceRow));
    bed.report = on_gpu(sizeof *bed.report);
    free(tail_base);
    free(tags);
    return bed;
}

static void close_gpu_cycle(GpuBed *bed) {
    cuda_backend.give_back(bed->rows, MEMORY_DEVICE);
    cuda_backend.give_back(bed->ids, MEMORY_DEVICE);
}

static void close_gpu_bed(GpuBed *bed) {
    Cache *cache = &bed->cache;
    void *taken[] = {cache->seen.tail_base, cache->seen.tail,   cache->seen.ready, cache->seen.hot,
                     cache->seen.host,      cache->slots.clock, cache->slots.tag,  cache->slots.stamp,
                     cache->slots.slot_of,  cache->device,      cache->staging,    bed->plan.from,
                     bed->plan.to,          bed->plan.count,    bed->locations,    bed->report};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) cuda_backend.give_back(taken[i], MEMORY_DEVICE);
}

static int compare_rows(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* The ascending selections of one session: `queries` lists of k at ids, of which only `distinct` differ. Each has the first k -
 * missing rows of the order, and the next `missing` from *next on. */
static void select_from_order(int *ids, const int *order, int k, int missing, int queries, int distinct, int *next) {
    for (int query = 0; query < queries; query++, ids += k) {
        if (query < distinct) {
            memcpy(ids, order, (size_t)(k - missing) * sizeof *ids);
            memcpy(ids + k - missing, order + *next, (size_t)missing * sizeof *ids);
            qsort(ids, (size_t)k, sizeof *ids, compare_rows);
            *next += missing;
        } else memcpy(ids, ids - (size_t)distinct * (size_t)k, (size_t)k * sizeof *ids);
    }
}

/* Steps with `queries` rows a session, each of which misses `missing` rows, that are the same for all but `distinct` of them. */
static void make_gpu_cycle(GpuBed *bed, int steps, int sessions, int queries, int missing, int distinct) {
    const int k = bed->selection.capacity, context = bed->cache.context, n = sessions * queries;
    int *ids = allocate_zeroed((size_t)steps * (size_t)(n * k), sizeof *ids),
        *order = allocate_zeroed((size_t)context, sizeof *order);
    Row *rows = allocate_zeroed((size_t)n, sizeof *rows);
    for (int s = 0; s < sessions; s++) {
        uint64_t seed = (uint64_t)s;
        for (int i = 0; i < context; i++) {
            int other = (int)(draw(&seed) % (uint64_t)(i + 1));
            order[i] = order[other], order[other] = i;
        }
        for (int step = 0, next = k - missing; step < steps; step++)
            select_from_order(ids + ((size_t)step * (size_t)n + (size_t)(s * queries)) * (size_t)k, order, k, missing, queries,
                              distinct, &next);
        for (int i = 0; i < queries; i++) rows[s * queries + i] = (Row){s, context - 1, 0};
    }
    bed->rows = gpu_copy(rows, (size_t)n * sizeof *rows);
    bed->ids = gpu_copy(ids, (size_t)steps * (size_t)(n * k) * sizeof *ids);
    bed->n_rows = n, bed->steps = steps;
    free(ids), free(order), free(rows);
}

/* Prints one line, and returns the seconds of a step. sources: whose rows are copied. */
static double gpu_bed_line(GpuBench *bench, GpuBed *bed, const char *name, int sources) {
    PassReport report = {0};
    bed->sources = sources;
    const double seconds = cuda_seconds(bed_work, bed) / bed->steps;
    cuda_backend.copy_bytes(bed->report, &report, sizeof report);
    bed_work(bed);
    cuda_backend.copy_bytes(&report, bed->report, sizeof report);
    const double bytes = (double)report.copied / bed->steps * (double)bed->cache.format.bytes;
    printf(bench->markdown ? "| %s, %.0f rows missed | %.1f | %.1f | %.1f%% of the link |\n"
                           : "%-64s %6.0f rows missed %8.1f us %7.1f GB/s %6.1f%% of link\n",
           name, (double)report.fetched / bed->steps, 1e6 * seconds, bytes / seconds / 1e9, 100 * bytes / seconds / bench->link);
    fprintf(bench->csv, "%s,%.9f,%.0f,%.4f\n", name, seconds, bytes, bytes / seconds / bench->link);
    return seconds;
}

/* A source of DeepSeek-V4's selecting layers: k 512, rows of 288 bytes, one of which stands for four tokens of the context. */
static void gpu_short_rows(GpuBench *bench, uint8_t *host) {
    static const struct { int sessions, context, hot_rows, missing;
    } cases[] = {{8, 32 << 10, 1024, 0},   {8, 32 << 10, 4096, 0},   {8, 32 << 10, 8192, 0}, {160, 32 << 10, 1024, 0},
                 {160, 32 << 10, 4096, 0}, {160, 32 << 10, 8192, 0}, {8, 8 << 10, 4096, 77}, {8, 32 << 10, 4096, 77},
                 {160, 8 << 10, 4096, 77}, {160, 32 << 10, 4096, 77}};
    enum { TOPK = 512, STEPS = 64 };                /* 63 * 77 other rows are more than B keeps */
    const RowFormat format = {.bytes = 288, .stride = 320};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char name[96];
        GpuBed bed = open_gpu_bed(host, cases[c].sessions, cases[c].context, cases[c].hot_rows, TOPK, &format, 1);
        make_gpu_cycle(&bed, cases[c].missing ? STEPS : 8, cases[c].sessions, 1, cases[c].missing, 1);
        snprintf(name, sizeof name, "resolve, k 512, B %d of %d, %d sessions", cases[c].hot_rows, cases[c].context,
                 cases[c].sessions);
        gpu_bed_line(bench, &bed, name, 0);
        snprintf(name, sizeof name, "resolve and fetch, k 512, B %d of %d, %d sessions", cases[c].hot_rows, cases[c].context,
                 cases[c].sessions);
        gpu_bed_line(bench, &bed, name, 1);
        close_gpu_cycle(&bed);
        close_gpu_bed(&bed);
    }
}

/* The share of y's variance that a straight line through the points explains. */
static double line_fit(const double *x, const double *y, int n) {
    double sx = 0, sy = 0, xx = 0, yy = 0, xy = 0;
    for (int i = 0; i < n; i++) sx += x[i] / n, sy += y[i] / n;
    for (int i = 0; i < n; i++) xx += (x[i] - sx) * (x[i] - sx), yy += (y[i] - sy) * (y[i] - sy), xy += (x[i] - sx) * (y[i] - sy);
    return xy * xy / (xx * yy);
}

/* GLM-5.3's shape: k 2,048, blocks of 8 queries, 32 sessions; rows of the paper's 576 bytes, and of the 656 that fp8 rows have here,
 * 704 from one to the next. The queries of a block share all of their rows or fewer and fewer, down to none. */
static void gpu_blocks(GpuBench *bench, uint8_t *host) {
    enum { SESSIONS = 32, CONTEXT = 64 << 10, TOPK = 2048, HOT = 4096, STEPS = 4 };     /* 4 * 2,048 rows are more than B */
    static const RowFormat formats[] = {{.bytes = 576, .stride = 576}, {.bytes = 656, .stride = 704}};
    for (int f = 0; f < 2; f++) {
        char name[96];
        double bytes[QUERY_BLOCK], seconds[QUERY_BLOCK];
        GpuBed bed = open_gpu_bed(host, SESSIONS, CONTEXT, HOT, TOPK, &formats[f], 1);
        make_gpu_cycle(&bed, STEPS, SESSIONS, QUERY_BLOCK, 0, 1);
        snprintf(name, sizeof name, "resolve and fetch, k 2,048, 32 x 8 queries, %zu bytes, no miss", formats[f].bytes);
        gpu_bed_line(bench, &bed, name, 1);
        close_gpu_cycle(&bed);
        for (int distinct = 1; distinct <= QUERY_BLOCK; distinct++) {
            make_gpu_cycle(&bed, distinct > 1 ? 2 : STEPS, SESSIONS, QUERY_BLOCK, TOPK, distinct);
            snprintf(name, sizeof name, "resolve and fetch, k 2,048, 32 x 8 queries, %zu bytes, %d different", formats[f].bytes,
                     distinct);
            seconds[distinct - 1] = gpu_bed_line(bench, &bed, name, 1);
            bytes[distinct - 1] = (double)distinct * SESSIONS * TOPK * (double)formats[f].bytes;
            if (distinct == 1 || distinct == QUERY_BLOCK) gpu_bed_line(bench, &bed, "    of that, resolve", 0);
            close_gpu_cycle(&bed);
        }
        printf(bench->markdown ? "| seconds over bytes: R^2 %.5f | | | |\n" : "seconds over bytes: R^2 %.5f\n",
               line_fit(bytes, seconds, QUERY_BLOCK));
        close_gpu_bed(&bed);
    }
}

/* A producing layer of GLM-5.3 and three that follow it, 77 misses a session, over as many bytes of weights as keep the GPU busy for
 * some time a layer: what of the copies is left to see. */
static void gpu_followers(GpuBench *bench, uint8_t *host) {
    enum {
        CONTEXT = 16 << 10,
        TOPK = 2048,
        HOT = 4096,
        MISSING = 77,
        STEPS = 32,
        COMPUTE = 200 << 20
    }; /* 31 * 77 are more than B - k */
    static const int sessions[] = {8, 32};
    const RowFormat format = {.bytes = 656, .stride = 704};
    for (int s = 0; s < 2; s++) {
        char name[96];
        GpuBed bed = open_gpu_bed(host, sessions[s], CONTEXT, HOT, TOPK, &format, GPU_BED_SOURCES);
        bed.weights = bench->pool, bed.compute = COMPUTE, bed.sum = bench->sum;
        for (int turn = 0; turn < 3; turn++) {
            static const char *const names[] = {"nothing missed", "each copy in front of its layer",
                                                "copies beside the layers before"};
            make_gpu_cycle(&bed, STEPS, sessions[s], 1, turn ? MISSING : 0, 1);
            bed.ahead = turn == 2;
            snprintf(name, sizeof name, "4 layers, k 2,048, %d sessions, %s", sessions[s], names[turn]);
            gpu_bed_line(bench, &bed, name, GPU_BED_SOURCES);
            close_gpu_cycle(&bed);
        }
        close_gpu_bed(&bed);
    }
}

static void gpu_resolver(GpuBench *bench) {
    const size_t size = (size_t)160 * (32 << 10) * 320, timed = (size_t)GPU_VECTORS * 4;
    Error error;
    uint8_t *host = cuda_backend.take(size, MEMORY_HOST, &error);
    if (!host) fprintf(stderr, "tide: %s\n", error.text), exit(1);
    CopyWork down = {bench->y, host, timed};
    const double seconds = cuda_seconds(copy_work, &down);
    gpu_line(bench, "ceiling: host to device, for these", seconds, (double)timed);
    bench->link = (double)timed / seconds;
    gpu_short_rows(bench, host);
    gpu_blocks(bench, host);
    gpu_followers(bench, host);
    cuda_backend.give_back(host, MEMORY_HOST);
}

/* ---- the operations around a draft pass: Qwen3-4B with its DFlash drafter, 8 sessions
 *
 * What a round has beside the two models' products: candidates, draws, what predicts lengths and divides the budget. The products of
 * both models alone, without attention or norms, stand for the round, so it is longer and the shares are smaller.
 */

enum { DRAFT_SESSIONS = 8, DRAFT_WIDTH = 16, DRAFT_SLOTS = 15, DRAFT_VOCAB = 151936, DRAFT_RANK = 256, DRAFT_VERIFIED = 8 };

typedef struct DraftWork {
    GpuBench *bench;
    Drafts drafts;
    DraftBlock *blocks;
    Matrix predecessor, successor;
    LengthPredictor predictor;
} DraftWork;

static void draft_candidates_work(void *user) {
    DraftWork *work = user;
    const Drafts *drafts = &work->drafts;
    cuda_backend.candidates(drafts->ids, drafts->scores, CANDIDATES, work->bench->x, DRAFT_SESSIONS * DRAFT_SLOTS, DRAFT_VOCAB,
                            NULL);
}

static void draft_features_work(void *user) {
    DraftWork *work = user;
    const Drafts *drafts = &work->drafts;
    cuda_backend.length_features(drafts->features, DVL_FEATURES, drafts->scores, CANDIDATES, work->bench->x,
                                 DRAFT_SESSIONS * DRAFT_SLOTS, DRAFT_VOCAB);
}

static void draft_draws_work(void *user) {
    DraftWork *work = user;
    cuda_backend.draw_drafts(&work->drafts, 0, DRAFT_SLOTS, work->blocks, DRAFT_SESSIONS, ACCEPT_COUPLED);
}

static void draft_path_work(void *user) {
    DraftWork *work = user;
    cuda_backend.select_path(&work->drafts, work->bench->x, &work->predecessor, &work->successor, work->blocks, DRAFT_SESSIONS,
                             ACCEPT_COUPLED);
}

static void draft_lengths_work(void *user) {
    DraftWork *work = user;
    cuda_backend.predict_lengths(work->drafts.survival, work->drafts.features, DRAFT_SESSIONS, &work->predictor, NULL);
}

/* The products of `layers` layers of Qwen3-4B over n rows, and of its head over `finals` of them, with weights that follow each other
 * through the pool. */
static void put_products(GpuBench *bench, int layers, int n, int finals, size_t *at) {
    static const struct { int cols, count, rows[3]; } inputs[] = {
        {2560, 3, {4096, 1024, 1024}}, {4096, 1, {2560}}, {2560, 2, {9728, 9728}}, {9728, 1, {2560}}, {2560, 1, {DRAFT_VOCAB}}};
    for (int layer = 0; layer <= layers; layer++)
        for (int i = layer < layers ? 0 : 4; i < (layer < layers ? 4 : 5); i++) {
            const int rows = i < 4 ? n : finals;
            Matrix w[3];
            Projection products[3];
            float *y = bench->y;
            for (int j = 0; j < inputs[i].count; j++) {
                const size_t bytes = 2 * (size_t)inputs[i].rows[j] * (size_t)inputs[i].cols;
                if (*at + bytes > (size_t)GPU_POOL * 1024) *at = 0;
                w[j] = (Matrix){.data = bench->pool + *at,
                                .dtype = DTYPE_BF16,
                                .rows = inputs[i].rows[j],
                                .cols = inputs[i].cols,
                                .scale_cols = inputs[i].cols / SCALE_BLOCK};
                products[j] = (Projection){y, (size_t)w[j].rows, &w[j]};
                *at += bytes;
                y += (size_t)rows * (size_t)w[j].rows;
            }
            cuda_backend.linear(products, inputs[i].count, bench->x, (size_t)inputs[i].cols, rows);
        }
}

/* The target's 36 layers over the rows that are verified, and the drafter's 5 over its blocks. */
static void round_work(void *user) {
    DraftWork *work = user;
    size_t at = 0;
    put_products(work->bench, 36, DRAFT_SESSIONS * DRAFT_VERIFIED, DRAFT_SESSIONS * DRAFT_VERIFIED, &at);
    put_products(work->bench, 5, DRAFT_SESSIONS * DRAFT_WIDTH, DRAFT_SESSIONS * DRAFT_SLOTS, &at);
}

/* Seconds of dividing the budget and packing the blocks' rows, which the CPU does. */
static double divide_seconds(DraftWork *work) {
    enum { TIMES = 1000 };
    int lengths[DRAFT_SESSIONS], limits[DRAFT_SESSIONS], ends = 0;
    Row rows[DRAFT_SESSIONS * DRAFT_WIDTH];
    for (int i = 0; i < DRAFT_SESSIONS; i++) limits[i] = DRAFT_WIDTH;
    double start = now();
    for (int i = 0; i < TIMES; i++) {
        cuda_backend.allocate(lengths, work->drafts.survival, limits, DRAFT_SESSIONS, DRAFT_SLOTS,
                              DRAFT_SESSIONS * DRAFT_VERIFIED);
        for (int j = 0; j < DRAFT_SESSIONS; j++) work->blocks[j].count = lengths[j];
        ends += cuda_backend.pack_blocks(rows, work->blocks, DRAFT_SESSIONS, DRAFT_SESSIONS * DRAFT_WIDTH);
    }
    return ends ? (now() - start) / TIMES : 0;
}

static void *pinned_block(size_t bytes) {
    Error error;
    void *block = cuda_backend.take(bytes, MEMORY_HOST, &error);
    if (!block) fprintf(stderr, "tide: %s\n", error.text), exit(1);
    return block;
}

static void gpu_drafts(GpuBench *bench) {
    enum { HISTORY = 2048, SLOTS = DRAFT_SESSIONS * DRAFT_SLOTS };
    static const int widths[] = {DRAFT_SLOTS * DVL_FEATURES, 256, 160, DRAFT_SLOTS}; /* the spec's guess at 112 K parameters */
    static const char *const names[] = {"candidates",      "features of lengths",   "draws",
                                        "DFlash 2's walk", "prediction of lengths", "division and packing (CPU)"};
    static void (*const works[])(void *) = {draft_candidates_work, draft_features_work, draft_draws_work, draft_path_work,
                                            draft_lengths_work};
    DraftWork work = {
        .bench = bench,
        .blocks = pinned_block(DRAFT_SESSIONS * sizeof *work.blocks),
        .predictor.layers = 3,
        .predecessor = {.data = bench->pool, .dtype = DTYPE_BF16, .rows = DRAFT_VOCAB, .cols = DRAFT_RANK, .scale_cols = 2},
        .drafts = {.slots = DRAFT_SLOTS,
                   .blocks = DRAFT_SESSIONS,
                   .ids = on_gpu(SLOTS * CANDIDATES * sizeof(int)),
                   .scores = on_gpu(SLOTS * CANDIDATES * sizeof(float)),
                   .features = on_gpu(SLOTS * DVL_FEATURES * sizeof(float)),
                   .tokens = pinned_block(SLOTS * sizeof(int)),
                   .survival = pinned_block(SLOTS * sizeof(float))}};
    int *history = pinned_block(DRAFT_SESSIONS * HISTORY * sizeof *history);
    work.successor = work.predecessor;
    work.successor.data += (size_t)DRAFT_VOCAB * DRAFT_RANK * 2;
    for (int i = 0; i < DRAFT_SESSIONS; i++)
        work.blocks[i] = (DraftBlock){.session = i, .position = HISTORY / 2, .ids = history + i * HISTORY, .stream = (uint64_t)i,
                                      .sampling = {.temperature = 0.7f, .top_p = 0.95f, .repeat_penalty = 1, .seed = 1}};
    for (int l = 0; l < 3; l++) {
        work.predictor.weight[l] = (Matrix){
            .data = (const uint8_t *)bench->x, .dtype = DTYPE_F32, .rows = widths[l + 1], .cols = widths[l], .scale_cols = 3};
        work.predictor.bias[l] = bench->x;
    }
    double round = cuda_seconds(round_work, &work), seconds[6], sum = 0;
    for (int i = 0; i < 5; i++) seconds[i] = cuda_seconds(works[i], &work);
    seconds[5] = divide_seconds(&work);
    const char *const line = bench->markdown ? "| %s | %.1f | | %.2f%% of the round |\n"
                                             : "%-72s %10.1f us %6.2f%% of the round\n";
    for (int i = 0; i < 6; i++) {
        sum += i == 3 ? 0 : seconds[i];
        printf(line, names[i], 1e6 * seconds[i], 100 * seconds[i] / round);
        fprintf(bench->csv, "round: %s,%.9f,0,%.4f\n", names[i], seconds[i], seconds[i] / round);
    }
    const double lengths = seconds[1] + seconds[4] + seconds[5];
    printf(line, "products of a round of Qwen3-4B and its drafter, 8 sessions, 64 rows verified", 1e6 * round, 100.0);
    printf(line, "all of DFlash's, of a round with them", 1e6 * sum, 100 * sum / (round + sum));
    printf(line, "of these, what lengths cost", 1e6 * lengths, 100 * lengths / (round + sum));
    void *taken[] = {work.drafts.ids, work.drafts.scores, work.drafts.features},
         *pinned[] = {work.blocks, history, work.drafts.tokens, work.drafts.survival};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) cuda_backend.give_back(taken[i], MEMORY_DEVICE);
    for (size_t i = 0; i < sizeof pinned / sizeof *pinned; i++) cuda_backend.give_back(pinned[i], MEMORY_HOST);
}

/* ---- attention over histories and draft blocks in Qwen3's shape, over mini's selections, and the queries of GLM-5.3 into the latent space */

typedef struct DenseWork {
    GpuBench *bench;
    RowPool pool;
    RowFormat format;
    DevicePage *pages;
    Row *rows;
    int n_rows, context_pages, sets;
    DraftBlock *blocks;
    DeviceRow *locations;
    Matrix w[GPU_SETS];
    Config config;
} DenseWork;

enum {
    QWEN_HEADS = 32,
    QWEN_KV_HEADS = 8,
    QWEN_DIM = 128,
    BLOCKS_AT_ONCE = 8,
    BLOCK_ROWS = 16,
    BLOCK_WINDOW = 1024,
    MINI_HEADS = 8,
    MINI_TOPK = 128
};

static void dense_work(void *user) {
    const DenseWork *work = user;
    for (int i = 0; i < work->sets; i++)
        cuda_backend.dense_attention(work->bench->y, work->bench->x, &work->pool, &work->format, work->pages, work->context_pages,
                                     work->rows + i * work->n_rows, work->n_rows, QWEN_HEADS, QWEN_KV_HEADS, QWEN_DIM, 0.09f);
}

static void block_work(void *user) {
    const DenseWork *work = user;
    const size_t ring = (size_t)(BLOCKS_AT_ONCE * (BLOCK_WINDOW + PAGE_ROWS)) * work->format.stride;
    for (int i = 0; i < work->sets; i++)
        cuda_backend.block_attention(work->bench->y, work->bench->x, work->bench->x + (GPU_VECTORS / 2),
                                     work->bench->pool + (size_t)i * ring, &work->format, BLOCK_WINDOW + PAGE_ROWS, work->blocks,
                                     BLOCKS_AT_ONCE, BLOCK_ROWS, BLOCK_WINDOW, false, QWEN_HEADS, QWEN_KV_HEADS, QWEN_DIM, 0.09f);
}

static void mini_work(void *user) {
    const DenseWork *work = user;
    for (int i = 0; i < work->sets; i++)
        cuda_backend.sparse_attention(work->bench->y, work->bench->x, &work->pool, &work->format,
                                      work->locations + i * work->n_rows * MINI_TOPK, work->bench->ints + (32 << 20), MINI_TOPK,
                                      work->n_rows, MINI_HEADS, 0.08f);
}

static void absorb_work(void *user) {
    const DenseWork *work = user;
    for (int i = 0; i < work->sets; i++)
        cuda_backend.absorb_query(work->bench->y, work->bench->x, work->n_rows, &work->w[i], &work->config);
}

/* A line with the rate of multiplications too. */
static void dense_line(GpuBench *bench, const char *what, double seconds, double bytes, double operations) {
    char text[160];
    snprintf(text, sizeof text, "%s: %.0f TFLOP/s", what, operations / seconds / 1e12);
    gpu_line(bench, text, seconds, bytes);
}

static void gpu_histories(GpuBench *bench) {
    static const struct {
        const char *what;
        int sessions, queries;
    } cases[] = {{"decode", 1, 1}, {"decode", 32, 1}, {"verification", 32, 8}, {"prefill", 1, MAX_PASS_ROWS}};
    enum { KEYS = 8192, PAGES = KEYS / PAGE_ROWS };
    DenseWork work = {
        .bench = bench, .format = row_format(KV_BF16, 2 * QWEN_KV_HEADS * QWEN_DIM, 0, QWEN_DIM), .context_pages = PAGES};
    const int pool = (int)((size_t)GPU_POOL * 1024 / work.format.stride), pool_pages = pool / PAGE_ROWS;
    DevicePage *pages = allocate_zeroed((size_t)pool_pages, sizeof *pages);
    Row *rows = allocate_zeroed((size_t)GPU_SETS * MAX_PASS_ROWS, sizeof *rows);
    for (int i = 0; i < pool_pages; i++) pages[i].id = i;
    work.pool = (RowPool){bench->pool, bench->pool, pool};
    work.pages = on_gpu((size_t)pool_pages * sizeof *pages);
    work.rows = on_gpu((size_t)GPU_SETS * MAX_PASS_ROWS * sizeof *rows);
    cuda_backend.copy_bytes(work.pages, pages, (size_t)pool_pages * sizeof *pages);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const int sessions = cases[c].sessions, n = sessions * cases[c].queries, fit = pool_pages / PAGES / sessions;
        work.n_rows = n, work.sets = fit < GPU_SETS ? fit : GPU_SETS;
        for (int i = 0; i < work.sets * n; i++)
            rows[i] = (Row){i / cases[c].queries, KEYS - cases[c].queries + i % cases[c].queries, 0};
        cuda_backend.copy_bytes(work.rows, rows, (size_t)(work.sets * n) * sizeof *rows);
        char what[96];
        snprintf(what, sizeof what, "dense %s, bf16 rows, %d x %d queries, %d keys", cases[c].what, sessions, cases[c].queries,
                 KEYS);
        dense_line(bench, what, cuda_seconds(dense_work, &work) / work.sets, (double)sessions * KEYS * (double)work.format.bytes,
                   4.0 * n * QWEN_HEADS * QWEN_DIM * KEYS);
    }
    cuda_backend.give_back(work.pages, MEMORY_DEVICE);
    cuda_backend.give_back(work.rows, MEMORY_DEVICE);
    free(pages);
    free(rows);
}

static void gpu_draft_blocks(GpuBench *bench) {
    Error error;
    DenseWork work = {.bench = bench, .format = row_format(KV_BF16, 2 * QWEN_KV_HEADS * QWEN_DIM, 0, QWEN_DIM), .sets = GPU_SETS,
                      .blocks = cuda_backend.take(BLOCKS_AT_ONCE * sizeof(DraftBlock), MEMORY_HOST, &error)};
    for (int i = 0; i < BLOCKS_AT_ONCE && work.blocks; i++)
        work.blocks[i] = (DraftBlock){.session = i, .position = 3000 + 17 * i};
    char what[96];
    snprintf(what, sizeof what, "draft blocks, bf16 ring, %d x %d queries, window %d", BLOCKS_AT_ONCE, BLOCK_ROWS, BLOCK_WINDOW);
    if (work.blocks)
        dense_line(bench, what, cuda_seconds(block_work, &work) / work.sets,
                   (double)(BLOCKS_AT_ONCE * BLOCK_WINDOW) * (double)work.format.bytes,
                   4.0 * BLOCKS_AT_ONCE * BLOCK_ROWS * QWEN_HEADS * QWEN_DIM * (BLOCK_WINDOW + BLOCK_ROWS));
    cuda_backend.give_back(work.blocks, MEMORY_HOST);
}

static void gpu_mini(GpuBench *bench) {
    static const int counts[] = {1, 64};
    DenseWork work = {
        .bench = bench, .format = row_format(KV_BF16, 128, 32, 128), .locations = (DeviceRow *)bench->ints, .sets = GPU_SETS};
    const int pool = (int)((size_t)GPU_POOL * 1024 / work.format.stride), most = GPU_SETS * 64 * MINI_TOPK;
    DeviceRow *locations = allocate_zeroed((size_t)most, sizeof *locations);
    int chosen[64];
    uint64_t seed = 5;
    for (int i = 0; i < most; i++) locations[i].id = (int)(draw(&seed) % (uint64_t)pool);
    for (int r = 0; r < 64; r++) chosen[r] = MINI_TOPK;
    work.pool = (RowPool){bench->pool, bench->pool, pool};
    cuda_backend.copy_bytes(work.locations, locations, (size_t)most * sizeof *locations);
    cuda_backend.copy_bytes(bench->ints + (32 << 20), chosen, sizeof chosen);
    for (int c = 0; c < 2; c++) {
        char what[96];
        work.n_rows = counts[c];
        snprintf(what, sizeof what, "mini's latent attention, bf16 rows, %d queries x %d", counts[c], MINI_TOPK);
        dense_line(bench, what, cuda_seconds(mini_work, &work) / GPU_SETS,
                   (double)counts[c] * MINI_TOPK * (double)work.format.bytes,
                   2.0 * counts[c] * MINI_HEADS * MINI_TOPK * (160 + 128));
    }
    free(locations);
}

static void gpu_absorbed(GpuBench *bench) {
    enum { HEADS = 64, NOPE = 192, VALUE = 256, LORA = 512, ROPE = 64 };
    static const int counts[] = {1, 8, 32, 256};
    const size_t matrix = (size_t)HEADS * (NOPE + VALUE) * LORA;
    DenseWork work = {.bench = bench,
                      .sets = GPU_SETS,
                      .config = {.num_attention_heads = HEADS,
                                 .qk_nope_head_dim = NOPE,
                                 .qk_rope_head_dim = ROPE,
                                 .v_head_dim = VALUE,
                                 .kv_lora_rank = LORA}};
    for (int i = 0; i < GPU_SETS; i++)
        work.w[i] = (Matrix){
            .data = bench->pool + (size_t)i * matrix * 2, .dtype = DTYPE_BF16, .rows = HEADS * (NOPE + VALUE), .cols = LORA};
    for (int c = 0; c < 4; c++) {
        char what[96];
        work.n_rows = counts[c];
        snprintf(what, sizeof what, "absorbed queries, GLM-5.3's shape, bf16, %d rows", counts[c]);
        dense_line(bench, what, cuda_seconds(absorb_work, &work) / GPU_SETS,
                   2.0 * HEADS * NOPE * LORA + 4.0 * counts[c] * HEADS * (NOPE + ROPE + LORA + ROPE),
                   2.0 * counts[c] * HEADS * NOPE * LORA);
    }
}

static void gpu_dense(GpuBench *bench) {
    gpu_histories(bench);
    gpu_draft_blocks(bench);
    gpu_mini(bench);
    gpu_absorbed(bench);
}

/* What `tide bench gpu NAME` measures; the ceilings are measured before anything else. */
static const struct { const char *name; void (*run)(GpuBench *bench); } gpu_sections[] = {
    {"ceilings", gpu_ceilings}, {"products", gpu_products}, {"experts", gpu_experts}, {"selection", gpu_selection},
    {"attention", gpu_attention},
    {"dense", gpu_dense},
    {"resolver", gpu_resolver},
    {"drafts", gpu_drafts},
};
enum { GPU_SECTIONS = sizeof gpu_sections / sizeof *gpu_sections };

/* Which of them that is; GPU_SECTIONS for all, more where there is none. */
static int find_section(const char *name, Error *error) {
    char names[512] = "all";
    for (int i = 0; i < GPU_SECTIONS; i++) {
        if (!strcmp(name, gpu_sections[i].name)) return i;
        snprintf(names + strlen(names), sizeof names - strlen(names), ", %s", gpu_sections[i].name);
    }
    if (!strcmp(name, "all")) return GPU_SECTIONS;
    fail(error, "bench gpu: found %s, wanted one of %s", name, names);
    return GPU_SECTIONS + 1;
}

static bool bench_gpu(const BenchOptions *options, EngineOptions engine, Error *error) {
    Figure figure;
    const int section = find_section(options->section ? options->section : "all", error);
    if (!cuda_backend.start(&engine.device, error)) return false;
    if (!open_figure(&figure, options->directory, "gpu", "what,seconds,bytes,of_read", error)) return false;
    GpuBench bench = {.pool = on_gpu((size_t)GPU_POOL * 1024),
                      .x = on_gpu((size_t)GPU_VECTORS * 4),
                      .y = on_gpu((size_t)GPU_VECTORS * 4),
                      .ints = on_gpu((size_t)GPU_VECTORS * 4),
                      .sum = on_gpu(64),
                      .zeros = on_gpu(MAX_EXPERTS * sizeof(float)),
                      .csv = figure.csv,
                      .markdown = options->markdown};
    fill_gpu(bench.pool, (size_t)GPU_POOL * 1024, false);
    fill_gpu(bench.x, (size_t)GPU_VECTORS * 4, true);
    char device[160];
    cuda_describe(device, sizeof device);
    if (bench.markdown) printf("%s\n\n| | us | GB/s | of reading |\n|---|--:|--:|--:|\n", device);
    else printf("gpu              %s\n", device);
    gpu_ceilings(&bench);
    for (int i = 1; i < GPU_SECTIONS; i++)
        if (section == i || section == GPU_SECTIONS) gpu_sections[i].run(&bench);
    void *taken[] = {bench.pool, bench.x, bench.y, bench.ints, bench.sum, bench.zeros};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) cuda_backend.give_back(taken[i], MEMORY_DEVICE);
    return end_figure(&figure, NULL, true, error);
}

#endif

/* ---- decode: a whole step of decoding, against the rate at which the memory is read
 *
 * Sessions of a long history decode one token a round, through run_round(), resident. The history is real in form and made up in
 * content: the first rows are run through the model, and pages of them, with low bits cleared at random so that few have the same
 * scores, are repeated up to the context. A token must read every weight that it uses (of the experts those picked, counted in a
 * pass of its own), the index keys of its session, the rows it selects, and the head: the step's time is set beside what reading
 * these bytes would take.
 *
 * The table below it says where a step's time goes. Each operation is called through a table of operations that puts a mark
 * behind it, on the GPU an event inside the captured graph: an operation's time is what lies between its mark and the one
 * before, less what a mark costs between two kernels that do nothing. The time of the device alone is that of the same graphs,
 * without marks, replayed one after the other.
 */

enum {
    DECODE_SEED_ROWS = 512,     /* run through the model */
    DECODE_PAGES = 128,         /* different pages made of them */
    DECODE_WARM = 4, DECODE_STEPS = 24, DECODE_MARKED = 8,
    DECODE_ROOM = 256,          /* rows behind the history, for the steps */
    DECODE_BATCHES = 3,
    MAX_OPERATIONS = 96,
};

static const int decode_batches[DECODE_BATCHES] = {1, 8, 32};

typedef struct Operation {      /* all calls of one name in a step */
    char name[64];
    double seconds[DECODE_BATCHES], bytes[DECODE_BATCHES];      /* a step; bytes that it must read, 0: not counted */
    int calls[DECODE_BATCHES];
} Operation;

/* The operations of the engine that is watched, and what its steps were made of. In static memory: a pass allocates nothing. */
static struct Watch {
    const Backend *real;
    Backend marked;
    Operation operations[MAX_OPERATIONS];
    int n_operations, batch;    /* batch: which of the decode_batches runs */
    short of[MAX_MARKS];        /* which operation ends at the mark; -1: a work begins there */
    double at[MAX_MARKS];       /* when, on the C backend */
    double bytes[MAX_MARKS];
    int n_marks, all_marks;     /* so far in this step; of the last step in which they were set */
    double mark_seconds;        /* what a mark costs */
    uint64_t keys[2];           /* of the last two works: the layers and the head */
    double expert_bytes, row_bytes;         /* read by one call of experts(); one selected row */
    const Cache *cache;
    int positions;              /* rows that a session's query sees */
} watch;

static void set_mark(int operation, double bytes) {
    if (watch.n_marks == MAX_MARKS) return;
    watch.of[watch.n_marks] = (short)operation;
    watch.bytes[watch.n_marks] = bytes;
#ifdef TIDE_CUDA
    if (!watch.real->shares_memory) cuda_mark(watch.n_marks);
#endif
    watch.at[watch.n_marks] = now();
    watch.all_marks = ++watch.n_marks;
}

static void note_operation(const char *name, double bytes) {
    int i = 0;
    while (i < watch.n_operations && strcmp(watch.operations[i].name, name)) i++;
    if (i == MAX_OPERATIONS) i--;
    if (i == watch.n_operations)
        snprintf(watch.operations[watch.n_operations++].name, sizeof watch.operations[i].name, "%s", name);
    set_mark(i, bytes);
}

static double matrix_bytes(const Matrix *w) {
    const int block = w->block ? w->block : SCALE_BLOCK;
    double scales = w->scale ? 4.0 * ((w->rows + block - 1) / block) * w->scale_cols : 0;
    if (w->exponents) scales = (double)w->rows * w->scale_cols;
    return (double)w->rows * (double)stored_bytes(w->dtype, (size_t)w->cols) + scales;
}

/* Rows of a source that a session's query sees, whose pages have so many of them. */
static double seen_rows(int page_rows) { return floor(watch.positions * (double)page_rows / page_positions(watch.cache)); }

/* Of the index keys that a query of DeepSeek-V4 meets, `most` at most. */
static double key_bytes(const RowFormat *format, int page_rows, int most) {
    return (double)format->bytes * fmin(seen_rows(page_rows), most);
}

/* Of its window and of `selected` rows, or of all heavily compressed ones. */
static double seen_bytes(const RowFormat *of_window, int window, int selected, bool heavy) {
    const double rows = heavy ? floor((double)watch.positions / watch.cache->heavy_ratio) : fmin(selected, seen_rows(PAGE_ROWS));
    return (double)of_window->bytes * fmin(window, watch.positions) + (double)watch.cache->format.bytes * rows;
}

/* One operation that is called as it is and then noted: its name, the bytes it must read, its parameters and its arguments. */
#define WATCHED(name, bytes, parameters, ...)      \
    static void watched_##name parameters {        \
        watch.real->name(__VA_ARGS__);             \
        note_operation(#name, bytes);              \
    }

WATCHED(embed, 0, (float *y, const Matrix *w, const Row *rows, int n), y, w, rows, n)
WATCHED(rms_norm, 0, (float *y, size_t ys, const float *x, size_t xs, const float *w, int n, int dim, float eps), y, ys, x, xs, w,
        n, dim, eps)
WATCHED(add_norm, 0,
        (float *y, float *x, const float *branch, const float *w, int n, int dim, float eps, PassReport *report, int place), y, x,
        branch, w, n, dim, eps, report, place)
WATCHED(norm_heads, 0,
        (float *x, size_t stride, int n, int heads, int dim, const float *w, float eps, const float *c, const float *s), x,
        stride, n, heads, dim, w, eps, c, s)
WATCHED(rotations, 0, (float *c, float *s, const Row *rows, int n, const float *f, int dim, float factor), c, s, rows, n, f, dim,
        factor)
WATCHED(rotate_queries, 0,
        (float *q, int n, int heads, int dim, int tail, float *index_q, int index_heads, int index_dim, bool pairs,
         const float *c, const float *s, PassReport *report, int place),
        q, n, heads, dim, tail, index_q, index_heads, index_dim, pairs, c, s, report, place)
WATCHED(locate_rows, 0, (DeviceRow *kv, DeviceRow *index, const Cache *cache, const Row *rows, int n), kv, index, cache, rows, n)
WATCHED(store_rows, 0,
        (uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n, const float *a, size_t as, const float *b,
         size_t bs),
        base, format, ids, n, a, as, b, bs)
WATCHED(store_latents, 0,
        (uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n, float *kv, int lora, int tail, const float *w,
         float *q, int rank, const float *qw, float eps, const float *c, const float *s),
        base, format, ids, n, kv, lora, tail, w, q, rank, qw, eps, c, s)
WATCHED(store_index_keys, 0,
        (uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n, float *k, int dim, const float *w, const float *b,
         int turned, bool pairs, const float *c, const float *s, const float *hw, int heads, PassReport *report, int place,
         int weights_place),
        base, format, ids, n, k, dim, w, b, turned, pairs, c, s, hw, heads, report, place, weights_place)
WATCHED(index_select, (double)format->bytes * watch.positions * n,
        (Selection *selection, const float *q, const float *w, const uint8_t *keys, const RowFormat *format,
         const DevicePage *pages, int context_pages, int heads, int dim, const Row *rows, int n, float *scratch,
         int scratch_rows),
        selection, q, w, keys, format, pages, context_pages, heads, dim, rows, n, scratch, scratch_rows)
WATCHED(resolve, 0,
        (Cache *cache, int group, const Selection *selection, const Row *rows, int begin, int end, int run, DeviceRow *locations,
         MissPlan *plan, PassReport *report),
        cache, group, selection, rows, begin, end, run, locations, plan, report)
WATCHED(fetch_rows, 0,
        (Cache *cache, SourceId source, const MissPlan *plan, const Row *rows, int begin, int end, int run, PassReport *report),
        cache, source, plan, rows, begin, end, run, report)
WATCHED(locate_groups, 0, (DeviceRow *kv, DeviceRow *index, const Cache *cache, int group, const Row *rows, int n), kv, index,
        cache, group, rows, n)
WATCHED(see_groups, 0, (Row *newest, int *count, Row *first, const Row *rows, int n, int ratio), newest, count, first, rows, n,
        ratio)
WATCHED(locate_heavy, 0, (DeviceRow *kv, const Cache *cache, const Row *rows, int n, int ratio), kv, cache, rows, n, ratio)
WATCHED(compress, 0,
        (uint8_t *base, const RowFormat *format, const DeviceRow *ids, const Trail *trail, const Row *rows, int n,
         const CompressorWeights *weights, int ratio, int dim, bool overlapping, int turned, const float *f, float eps,
         const RowFormat *rounding, PassReport *report, int place),
        base, format, ids, trail, rows, n, weights, ratio, dim, overlapping, turned, f, eps, rounding, report, place)
WATCHED(pool_groups, 0,
        (float *y, const Trail *trail, const Row *rows, int n, const CompressorWeights *weights, int ratio, int dim, float eps),
        y, trail, rows, n, weights, ratio, dim, eps)
WATCHED(select_groups, key_bytes(format, page_rows, blocks && !keeps ? topk_blocks * block_size : INT_MAX) * n,
        (Selection *selection, const float *q, const float *w, const uint8_t *keys, const RowFormat *format,
         const DevicePage *pages, int context_pages, int page_rows, int heads, int dim, const Row *rows, int n, float *scratch,
         int scratch_rows, uint64_t *blocks, int block_size, int topk_blocks, bool keeps),
        selection, q, w, keys, format, pages, context_pages, page_rows, heads, dim, rows, n, scratch, scratch_rows, blocks,
        block_size, topk_blocks, keeps)
WATCHED(first_stream, 0, (float *mixes, int n, const Config *config), mixes, n, config)
WATCHED(note_tokens, 0, (const Trail *trail, const Row *rows, int n), trail, rows, n)
WATCHED(prefetch_engram, 0,
        (const EngramWeights *engram, const int *map, const Trail *trail, const Row *rows, int n, const Config *config), engram,
        map, trail, rows, n, config)
WATCHED(read_engram, 0,
        (float *y, const EngramWeights *engram, const int *map, const Trail *trail, const Row *rows, int n, const Config *config),
        y, engram, map, trail, rows, n, config)
WATCHED(add_engram, 0, (float *streams, const float *kv, const EngramWeights *engram, int n, const Config *config), streams, kv,
        engram, n, config)
WATCHED(turn_index_queries, 0,
        (float *q, int n, int heads, int dim, int turned, const float *c, const float *s, const float *w, PassReport *report,
         int place, int weights_place),
        q, n, heads, dim, turned, c, s, w, report, place, weights_place)
WATCHED(store_shared_keys, 0,
        (uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n, float *kv, int dim, int turned, const float *w,
         const RowFormat *rounding, float *q, int rank, const float *q_weight, float eps, const float *c, const float *s),
        base, format, ids, n, kv, dim, turned, w, rounding, q, rank, q_weight, eps, c, s)
WATCHED(mix_streams, weights ? matrix_bytes(&weights->fn) : 0,
        (float *y, float *streams, const float *branch, const float *leaving, float *mixes, const HyperWeights *weights,
         const float *entering, const float *norm, int n, const Config *config, PassReport *report, int place),
        y, streams, branch, leaving, mixes, weights, entering, norm, n, config, report, place)
WATCHED(window_attention,
        seen_bytes(trail_format, window, count && locations ? capacity : 0, count && !locations) * (end - begin),
        (float *y, float *q, const Trail *trail, const RowFormat *trail_format, int window, const RowPool *pool,
         const RowFormat *format, const DeviceRow *locations, const int *count, int capacity, const Row *rows, int begin, int end,
         int heads, const float *sinks, float scale, float eps, int turned, const float *c, const float *s),
        y, q, trail, trail_format, window, pool, format, locations, count, capacity, rows, begin, end, heads, sinks, scale, eps,
        turned, c, s)
WATCHED(grouped_linear, matrix_bytes(w), (float *y, const float *x, int n, const Matrix *w, int groups), y, x, n, w, groups)
WATCHED(route_softplus, 0,
        (int *picks, float *weights, const float *logits, const float *bias, const int *table, const Row *rows, int n,
         const Config *config),
        picks, weights, logits, bias, table, rows, n, config)
WATCHED(absorb_query, matrix_bytes(w) * config->qk_nope_head_dim / (config->qk_nope_head_dim + config->v_head_dim),
        (float *y, const float *q, int n, const Matrix *w, const Config *config), y, q, n, w, config)
WATCHED(sparse_attention, watch.row_bytes * fmin(capacity, watch.positions) * n,
        (float *z, const float *q, const RowPool *pool, const RowFormat *format, const DeviceRow *locations, const int *count,
         int capacity, int n, int heads, float scale),
        z, q, pool, format, locations, count, capacity, n, heads, scale)
WATCHED(expand_value, matrix_bytes(w) * config->v_head_dim / (config->qk_nope_head_dim + config->v_head_dim),
        (float *y, const float *z, int n, const Matrix *w, const Config *config), y, z, n, w, config)
WATCHED(dense_attention, watch.row_bytes * watch.positions * n,
        (float *y, const float *q, const RowPool *pool, const RowFormat *format, const DevicePage *pages, int context_pages,
         const Row *rows, int n, int heads, int kv_heads, int dim, float scale),
        y, q, pool, format, pages, context_pages, rows, n, heads, kv_heads, dim, scale)
WATCHED(swiglu, 0, (float *y, const float *gate, const float *up, size_t n), y, gate, up, n)
WATCHED(zero, 0, (float *y, size_t n), y, n)
WATCHED(move_rows, 0, (float *y, const int *to, const float *x, const int *from, int n, int dim), y, to, x, from, n, dim)
WATCHED(add, 0, (float *y, const float *x, size_t n), y, x, n)
WATCHED(route, 0, (int *picks, float *weights, const float *logits, const float *bias, int n, const Config *config), picks,
        weights, logits, bias, n, config)
WATCHED(experts, watch.expert_bytes,
        (float *y, const float *x, const int *picks, const float *weights, int n, const LayerWeights *layer, const Config *config,
         float *scratch),
        y, x, picks, weights, n, layer, config, scratch)
WATCHED(check_finite, 0, (PassReport *report, int place, const float *x, int n, int dim), report, place, x, n, dim)
#undef WATCHED

/* Products are told apart by their matrices. */
static void watched_linear(const Projection *products, int n_products, const float *x, size_t x_stride, int n) {
    const DType dtype = products[0].w->dtype;
    char name[128];
    int end = snprintf(name, sizeof name, "linear %d", products[0].w->rows);
    double bytes = 0;
    for (int i = 0; i < n_products; i++) {
        if (i) end += snprintf(name + end, sizeof name - (size_t)end, "+%d", products[i].w->rows);
        bytes += matrix_bytes(products[i].w);
    }
    snprintf(name + end, sizeof name - (size_t)end, " x %d %s", products[0].w->cols,
             dtype == DTYPE_F8_E4M3 ? "e4m3"
             : dtype == DTYPE_BF16  ? "bf16"
                                    : "");
    watch.real->linear(products, n_products, x, x_stride, n);
    note_operation(name, bytes);
}

/* Its own works, so that those without marks stay as they are. */
static WorkAnswer watched_begin_work(uint64_t key) {
    watch.keys[0] = watch.keys[1];
    watch.keys[1] = key;
    const WorkAnswer work = watch.real->begin_work(key ? key ^ 0x6d61726bu << 1 : 0);
    if (work == WORK_DONE) return work;
    set_mark(-1, 0);
    return work;
}

static void watch_engine(Engine *engine) {
    watch.real = engine->backend;
    watch.marked = *engine->backend;
#define MARK(name) watch.marked.name = watched_##name
    MARK(begin_work), MARK(embed), MARK(rms_norm), MARK(add_norm), MARK(norm_heads), MARK(linear), MARK(rotations);
    MARK(locate_rows), MARK(store_rows), MARK(store_latents), MARK(store_index_keys), MARK(index_select), MARK(resolve);
    MARK(fetch_rows), MARK(absorb_query), MARK(sparse_attention), MARK(expand_value), MARK(dense_attention), MARK(swiglu);
    MARK(locate_groups), MARK(see_groups), MARK(locate_heavy), MARK(compress), MARK(pool_groups), MARK(select_groups);
    MARK(first_stream), MARK(note_tokens), MARK(prefetch_engram), MARK(read_engram), MARK(add_engram);
    MARK(turn_index_queries), MARK(store_shared_keys), MARK(mix_streams), MARK(window_attention), MARK(grouped_linear);
    MARK(route_softplus);
    MARK(rotate_queries), MARK(zero), MARK(move_rows), MARK(add), MARK(route), MARK(experts), MARK(check_finite);
#undef MARK
    watch.cache = &engine->cache;
    watch.row_bytes = (double)engine->cache.format.bytes;
}

/* Adds the step that has just run, 1 / DECODE_MARKED of it, to its operations. */
static void add_marks(void) {
    for (int i = 1; i < watch.all_marks; i++) {
        double seconds = watch.at[i] - watch.at[i - 1];
        if (watch.of[i] < 0) continue;
#ifdef TIDE_CUDA
        if (!watch.real->shares_memory) seconds = fmax(cuda_between(i - 1, i) - watch.mark_seconds, 0);
#endif
        Operation *operation = &watch.operations[watch.of[i]];
        operation->seconds[watch.batch] += seconds / DECODE_MARKED;
        operation->bytes[watch.batch] += watch.bytes[i] / DECODE_MARKED;
        operation->calls[watch.batch]++;
    }
}

typedef struct Decode {         /* a model with sessions that have a history */
    Runner runner;
    Session *sessions;          /* [n] */
    Session **list;             /* [n] */
    int n, rows;                /* rows: of the history */
    long picked, passes;        /* different experts of the passes that were watched, and in how many layers' worth */
    int *picks;                 /* [rows, per_token] */
    double read;                /* bytes a second */
    long kernels;               /* of a step, in captured graphs */
    double empty_kernel, marked_kernel;     /* seconds that one which does nothing takes there, and with a mark behind it */
    double device;              /* seconds that the graphs of a step take when nothing keeps them waiting; 0: there are none */
} Decode;

/* Bytes a second that the operations' memory is read at. */
static double measure_read(const Backend *backend, Error *error) {
    const size_t bytes = backend->shares_memory ? (size_t)512 << 20 : (size_t)2 << 30;
    void *block = backend->take(bytes, MEMORY_DEVICE, error);
    double rate = 0;
    if (!block) return 0;
    if (backend->shares_memory) {
        memset(block, 1, bytes);
        for (int i = 0; i < BENCH_REPEATS; i++) rate = fmax(rate, time_read(block, bytes / sizeof(float)));
    }
#ifdef TIDE_CUDA
    else {
        CopyWork reading = {block, block, bytes - 64};
        rate = (double)reading.bytes / cuda_seconds(read_work, &reading);
    }
#endif
    backend->give_back(block, MEMORY_DEVICE);
    return rate;
}

#ifdef TIDE_CUDA
enum { EMPTY_KERNELS = 256 };

/* Kernels that do nothing, with marks between them or without. */
static void empty_work(void *user) {
    for (int i = 0; i < EMPTY_KERNELS; i++) {
        cuda_empty();
        if (user) cuda_mark(i);
    }
}
#endif

/* As many sessions as fit, of 32, 8 and 1, unless so many were asked for. */
static int decode_sessions(EngineOptions options, int asked) {
    for (int i = DECODE_BATCHES - 1; i && !asked; i--) {
        Engine engine;
        Error error;
        options.sessions = decode_batches[i];
        bool fits = engine_plan(&engine, &options, &error);
        if (!fits) break;                           /* opening it will say why */
        fits = check_memory(&engine, &error);
        engine_close(&engine);
        if (fits) return decode_batches[i];
    }
    return asked ? asked : 1;
}

/* The first rows of session 0, run through the model. */
static bool run_seed_rows(Decode *decode, Error *error) {
    Engine *engine = &decode->runner.engine;
    Row rows[DECODE_SEED_ROWS];
    int n = decode->rows < DECODE_SEED_ROWS ? decode->rows : DECODE_SEED_ROWS;
    cache_step(&engine->cache);
    if (cache_room(&engine->cache, 0, n) < n) return fail(error, "no room for %d rows", n);
    for (int r = 0; r < n; r++) rows[r] = (Row){0, r, decode->sessions[0].ids[r]};
    if (!forward(engine, rows, n, error)) return false;
    cache_commit(&engine->cache, 0, n);
    return true;
}

/* Different pages made of the rows of session 0: the lowest bit of every second byte is cleared, or not, which leaves the
 * values of every format valid. */
static uint8_t *make_pages(const Cache *cache, int known) {
    const size_t size = page_image_bytes(cache);
    uint8_t *images = allocate_zeroed(DECODE_PAGES, size);
    for (int page = 0; page < DECODE_PAGES; page++) {
        uint8_t *image = images + (size_t)page * size;
        uint64_t seed = (uint64_t)page;
        if (page < known) cache_read_page(cache, 0, page, image);
        else memcpy(image, images + (size_t)(page % known) * size, size);
        for (size_t i = 0; i + 128 <= size && page >= known; i += 128) {
            uint64_t bits = draw(&seed);
            for (size_t j = 0; j < 128; j += 2) image[i + j] &= (uint8_t)~(bits >> j / 2 & 1);
        }
    }
    return images;
}

/* What a session of `rows` positions has in its trails, of a model that has some: what session 0 has there now, whose positions
 * go on as they did; and heavily compressed rows, its own again and again. NULL and an error: it has too few. */
static uint8_t *make_trails(const Cache *cache, int rows, Error *error) {
    const int known = cache->session[0].committed;
    const size_t stride = cache->format.stride, layers = (size_t)cache->heavy_layers, had = (size_t)(known / cache->heavy_ratio),
                 has = (size_t)(rows / cache->heavy_ratio), rings = trail_image_bytes(cache, known) - layers * had * stride;
    if (trail_image_bytes(cache, rows) != rings + layers * has * stride || !had)
        return fail(error, "a history of %d positions is too short for this", known), NULL;
    uint8_t *there = allocate_zeroed(rings + layers * had * stride, 1),
            *image = allocate_zeroed(rings + layers * has * stride, 1);
    cache_read_trails(cache, 0, known, there);
    memcpy(image, there, rings);
    for (size_t layer = 0; layer < layers; layer++)
        for (size_t i = 0; i < has; i++)
            memcpy(image + rings + (layer * has + i) * stride, there + rings + (layer * had + i % had) * stride, stride);
    free(there);
    return image;
}

/* Every session has `rows` rows of history, and an id behind them. */
static bool fill_histories(Decode *decode, Error *error) {
    Engine *engine = &decode->runner.engine;
    Cache *cache = &engine->cache;
    bool ok = true;
    int cached;
    for (int s = 0; s < decode->n; s++) {
        Session *session = decode->list[s] = &decode->sessions[s];
        uint64_t seed = (uint64_t)s;
        *session = (Session){.slot = s, .stream = (uint64_t)s, .continues = true, .sampling = {.top_p = 1, .repeat_penalty = 1}};
        for (int i = 0; i <= decode->rows; i++) arrput(session->ids, (int)(draw(&seed) % (uint64_t)engine->config.vocab_size));
        if (!cache_admit(cache, s, NULL, 0, cache->context, &cached)) return fail(error, "session %d found no room", s);
    }
    ok = run_seed_rows(decode, error);
    const int positions = page_positions(cache);
    uint8_t *images = ok ? make_pages(cache, cache->session[0].committed / positions) : NULL,
            *trails = ok && cache->trail_layers ? make_trails(cache, decode->rows, error) : NULL;
    ok = ok && (trails || !cache->trail_layers);
    for (int s = 0; s < decode->n && ok; s++) {
        for (int page = cache->session[s].committed / positions; page < decode->rows / positions; page++)
            cache_append_page(cache, s, images + (size_t)((page + 7 * s) % DECODE_PAGES) * page_image_bytes(cache), PAGE_ROWS);
        if (trails) cache_append_trails(cache, s, decode->rows, trails);
        decode->sessions[s].cached = decode->rows;
        session_begin(&decode->sessions[s], engine);
    }
    free(images), free(trails);
    return ok;
}

static void decode_close(Decode *decode) {
    for (int s = 0; s < decode->n; s++) session_free(&decode->sessions[s]);
    free(decode->sessions), free(decode->list), free(decode->picks);
    runner_close(&decode->runner);
}

static bool decode_open(Decode *decode, EngineOptions options, int asked, Error *error) {
    options.kv_mode = MODE_RESIDENT;
    options.sessions = decode_sessions(options, asked);
    decode->read = measure_read(options.backend ? options.backend : &c_backend, error);
    if (!decode->read || !runner_open(&decode->runner, &options, false, stderr, error)) return false;
    Engine *engine = &decode->runner.engine;
#ifdef TIDE_CUDA
    if (!engine->backend->shares_memory) {
        decode->empty_kernel = cuda_seconds(empty_work, NULL) / EMPTY_KERNELS;
        decode->marked_kernel = cuda_seconds(empty_work, decode) / EMPTY_KERNELS;
    }
#endif
    tokenizer_close(decode->runner.tokenizer);
    decode->runner.tokenizer = NULL;                /* nothing ends a session */
    engine->config.n_eos = 0;
    decode->n = options.sessions;
    const int whole = page_positions(&engine->cache);
    decode->rows = (engine->cache.context - DECODE_ROOM) / whole * whole;
    decode->sessions = allocate_zeroed((size_t)decode->n, sizeof(Session));
    decode->list = allocate_zeroed((size_t)decode->n, sizeof(Session *));
    decode->picks = allocate_zeroed(MAX_PASS_ROWS, (size_t)engine->config.num_experts_per_tok * sizeof(int));
    bool ok = decode->rows >= whole
              || fail(error, "%s: a context of %d is too short for this: wanted %d or more", options.model, engine->cache.context,
                      DECODE_ROOM + whole);
    ok = ok && fill_histories(decode, error);
    if (!ok) decode_close(decode);
    return ok;
}

/* The experts that the layer before has picked, each counted once. */
static void count_picks(void *user, int layer, const float *hidden, const Row *rows, int n) {
    Decode *decode = user;
    const Engine *engine = &decode->runner.engine;
    (void)hidden, (void)rows;
    if (!layer || !engine->weights.layers[layer - 1].expert_gate) return;
    bool taken[MAX_EXPERTS] = {false};
    const int all = n * engine->config.num_experts_per_tok;
    engine->backend->copy_bytes(decode->picks, engine->state.expert_picks, (size_t)all * sizeof(int));
    for (int i = 0; i < all; i++) {
        decode->picked += !taken[decode->picks[i]];
        taken[decode->picks[i]] = true;
    }
    decode->passes++;
}

/* One step of the first n sessions, without sampling: the next row of each, whose token is the last again. */
static bool bare_step(Decode *decode, int n, Error *error) {
    Engine *engine = &decode->runner.engine;
    Row rows[MAX_PASS_ROWS];
    int finals[MAX_PASS_ROWS];
    cache_step(&engine->cache);
    for (int s = 0; s < n; s++) {
        const Session *session = &decode->sessions[s];
        if (!cache_room(&engine->cache, s, 1)) return fail(error, "session %d has no room left", s);
        rows[s] = (Row){s, session->cached, session->ids[session->cached]};
        finals[s] = s;
    }
    return forward(engine, rows, n, error) && head(engine, rows, finals, n, error);     /* not committed: the row comes again */
}

/* Bytes that a step of n sessions must read, in parts. */
typedef struct StepBytes { double weights, experts, head, keys, rows; } StepBytes;

/* Index keys and rows of DeepSeek-V4's layers, windows among them. */
static void count_groups(StepBytes *bytes, const Engine *engine, int n) {
    const Config *config = &engine->config;
    const Cache *cache = &engine->cache;
    bytes->keys = bytes->rows = 0;
    for (int i = 0; i < config->num_hidden_layers; i++) {
        const bool heavy = config->compression && config->compression[i] == COMPRESSION_HEAVY,
                   reads = config->compression ? config->compression[i] == COMPRESSION_SPARSE : config->source[i] >= 0;
        const int rows = !reads ? 0 : config->compression ? PAGE_ROWS : page_rows(cache, config->source[i]),
                  first = config->compression ? -1 : config->candidate_source_layer_id,
                  most = first >= 0 && i > first ? config->candidate_topk_blocks * config->candidate_block_size : INT_MAX;
        if (selects_rows(config, i)) bytes->keys += n * key_bytes(&cache->index_format, rows, most);
        bytes->rows += n * seen_bytes(&cache->window_format, config->sliding_window, reads ? cache->index_topk : 0, heavy);
    }
}

static StepBytes step_bytes(const Decode *decode, int n) {
    const Engine *engine = &decode->runner.engine;
    const Config *config = &engine->config;
    const Cache *cache = &engine->cache;
    StepBytes bytes = {.head = matrix_bytes(&engine->weights.lm_head)};
    double seen = decode->rows + 1, selected = cache->groups ? fmin(seen, cache->index_topk) : seen;
    bytes.keys = (double)n * cache->groups * seen * (double)cache->index_format.bytes;
    bytes.rows = (double)n * cache->sources * selected * (double)cache->format.bytes;
    if (cache->trail_layers) count_groups(&bytes, engine, n);
    for (int i = 0; i < config->num_hidden_layers; i++) {
        const LayerWeights *layer = &engine->weights.layers[i];
        if (layer->engram) bytes.weights += matrix_bytes(&layer->engram->wkv);
        const Matrix *all[] = {
            &layer->q_proj,    &layer->k_proj,    &layer->v_proj,       &layer->q_a_proj,   &layer->q_b_proj,
            &layer->kv_a_proj, &layer->kv_b_proj, &layer->indexer_wq_b, &layer->indexer_wk, &layer->indexer_weights_proj,
            &layer->o_proj,    &layer->router,    &layer->wkv,          &layer->o_a_proj,   &layer->attention_hyper.fn,
            &layer->mlp_hyper.fn,                 &layer->compressor.wkv,                   &layer->compressor.wgate,
            &layer->index_compressor.wkv,         &layer->index_compressor.wgate};
        const Matrix *dense[] = {&layer->gate_proj, &layer->up_proj, &layer->down_proj};    /* or the shared expert */
        for (size_t j = 0; j < sizeof all / sizeof *all; j++)
            if (all[j]->rows) bytes.weights += matrix_bytes(all[j]);
        for (int j = 0; j < 3; j++)
            if (dense[j]->rows) *(layer->expert_gate ? &bytes.experts : &bytes.weights) += matrix_bytes(dense[j]);
        if (!layer->expert_gate) continue;
        Matrix gate;
        engine->backend->copy_bytes(&gate, layer->expert_gate, sizeof gate);
        bytes.experts += 3 * matrix_bytes(&gate) * (double)decode->picked / (double)decode->passes;
    }
    return bytes;
}

/* The experts of one pass, and then where the time of some goes, batch by batch. */
static bool watch_steps(Decode *decode, int batch, Error *error) {
    Engine *engine = &decode->runner.engine;
    const int n = decode_batches[batch];
    decode->picked = decode->passes = 0;
    engine->probe = (Probe){.entering = count_picks, .user = decode};
    bool ok = bare_step(decode, n, error);
    engine->probe = (Probe){0};
    watch.batch = batch;
    watch.positions = decode->sessions[0].cached + 1;
    watch.expert_bytes = decode->passes ? step_bytes(decode, n).experts / (double)decode->passes : 0;
    engine->backend = &watch.marked;
    for (int step = -DECODE_WARM; step < DECODE_MARKED && ok; step++) {
        watch.n_marks = 0;
        ok = bare_step(decode, n, error);
        if (step >= 0) add_marks();
    }
    engine->backend = watch.real;
    return ok;
}

/* Kernels that captured graphs have launched so far. */
static long graph_kernels(void) {
#ifdef TIDE_CUDA
    return cuda_graph_kernels();
#else
    return 0;
#endif
}

/* The median of whole rounds, sampling included. */
static bool time_rounds(Decode *decode, int n, double *seconds, Error *error) {
    double times[DECODE_STEPS] = {0};
    for (int step = -DECODE_WARM; step < DECODE_STEPS; step++) {
        const long before = graph_kernels();
        const double begin = now();
        run_round(&decode->runner, decode->list, n);
        decode->kernels = graph_kernels() - before;
        if (step >= 0) times[step] = now() - begin;
        for (int s = 0; s < n; s++)
            if (decode->sessions[s].finish != RUNNING)
                return fail(error, "session %d ended: %s", s, decode->sessions[s].error.text);
    }
    *seconds = median(times, DECODE_STEPS);
    return true;
}

/* The graphs of the step that was watched last, replayed without a host in between. */
static void time_device(Decode *decode) {
    decode->device = 0;
#ifdef TIDE_CUDA
    if (!decode->kernels) return;
    cuda_mark(0);
    for (int step = 0; step < DECODE_STEPS; step++)
        for (int i = 0; i < 2; i++) watch.real->begin_work(watch.keys[i]);
    cuda_mark(1);
    decode->device = cuda_between(0, 1) / DECODE_STEPS;
#endif
}

static void print_decode(const Decode *decode, int batch, double seconds, FILE *csv) {
    const int n = decode_batches[batch];
    const StepBytes bytes = step_bytes(decode, n);
    const double all = bytes.weights + bytes.experts + bytes.head + bytes.keys + bytes.rows, share = all / seconds / decode->read;
    double marked = 0;
    for (int i = 0; i < watch.n_operations; i++) marked += watch.operations[i].seconds[batch];
    printf("%2d x %d rows    %9.3f ms a step, %8.1f tokens/s; %.1f GB/s of %.1f read: %.1f%%\n", n, decode->rows, 1e3 * seconds,
           n / seconds, all / seconds / 1e9, decode->read / 1e9, 100 * share);
    printf("                 %.1f MB: weights %.1f, experts %.1f (%.1f routed a layer), head %.1f, index keys %.1f, rows %.1f\n",
           all / 1e6, bytes.weights / 1e6, bytes.experts / 1e6,
           decode->passes ? (double)decode->picked / (double)decode->passes : 0, bytes.head / 1e6, bytes.keys / 1e6,
           bytes.rows / 1e6);
    printf("                 operations %.3f ms", 1e3 * marked);
    if (decode->device)
        printf("; the device %.3f ms, host and sampling the rest; %ld kernels, each of which takes %.2f us if it is empty: "
               "%.1f%% of the step",
               1e3 * decode->device, decode->kernels, 1e6 * decode->empty_kernel,
               100 * (double)decode->kernels * decode->empty_kernel / seconds);
    putchar('\n');
    fprintf(csv, "%d,%d,%.9f,%.0f,%.4f\n", n, decode->rows, seconds, all, share);
}

static int compare_operations(const void *a, const void *b) {
    const Operation *x = a, *y = b;
    for (int i = 0; i < DECODE_BATCHES; i++)
        if (x->seconds[i] != y->seconds[i]) return x->seconds[i] < y->seconds[i] ? 1 : -1;
    return 0;
}

static void print_operations(const Decode *decode) {
    qsort(watch.operations, (size_t)watch.n_operations, sizeof *watch.operations, compare_operations);
    printf("%-50s %5s", "us a step, % of read", "calls");
    for (int i = 0; i < DECODE_BATCHES && decode_batches[i] <= decode->n; i++) printf(" %14s %-3d", "batch", decode_batches[i]);
    putchar('\n');
    for (int o = 0; o < watch.n_operations; o++) {
        const Operation *operation = &watch.operations[o];
        printf("%-50s %5d", operation->name, operation->calls[0] / DECODE_MARKED);
        for (int i = 0; i < DECODE_BATCHES && decode_batches[i] <= decode->n; i++) {
            printf(" %10.1f", 1e6 * operation->seconds[i]);
            if (operation->bytes[i]) printf(" %5.1f%% ", 100 * operation->bytes[i] / operation->seconds[i] / decode->read);
            else printf("        ");
        }
        putchar('\n');
    }
}

static bool bench_decode(const BenchOptions *bench, EngineOptions options, Error *error) {
    Decode decode = {0};
    Figure figure;
    if (!decode_open(&decode, options, bench->slots, error)) return false;
    bool ok = open_figure(&figure, bench->directory, "decode", "sessions,rows,seconds,bytes,of_read", error), opened = ok;
    memset(&watch, 0, sizeof watch);
    watch_engine(&decode.runner.engine);
    watch.mark_seconds = decode.marked_kernel - decode.empty_kernel;
    printf("decode           %s, %d layers%s, %s rows, %s\n", options.model, decode.runner.engine.config.num_hidden_layers,
           options.dummy ? ", random weights" : "", kv_dtype_names[decode.runner.engine.cache.kv_dtype], watch.real->name);
    for (int batch = 0; batch < DECODE_BATCHES && decode_batches[batch] <= decode.n && ok; batch++) {
        double seconds = 0;
        ok = watch_steps(&decode, batch, error) && time_rounds(&decode, decode_batches[batch], &seconds, error);
        if (ok) time_device(&decode);
        if (ok) print_decode(&decode, batch, seconds, figure.csv);
    }
    if (ok) print_operations(&decode);
    decode_close(&decode);
    return opened && end_figure(&figure, NULL, ok, error);
}

/* ---- first: from a message to the first token of its answer, straight after loading */

static bool time_first(Runner *runner, double *seconds, Error *error) {
    static const char text[] = "What is 2 + 3?";
    const double begin = now();
    Prompt prompt = {0};
    Message message = {"user", text, sizeof text - 1};
    Session session = {.sampling = {.top_p = 1, .repeat_penalty = 1}, .max_new = 1};
    if (runner->tokenizer && !chat_render(runner->tokenizer, &message, 1, true, false, &prompt, error)) return false;
    for (int i = 0; i < 16 && !runner->tokenizer; i++) arrput(prompt.ids, i);
    for (size_t i = 0; i < arrlenu(prompt.ids); i++) arrput(session.ids, prompt.ids[i]);
    session_begin(&session, &runner->engine);
    run_session(runner, &session);
    *seconds = now() - begin;
    bool ok = session.finish != FINISH_ERROR || fail(error, "no token came: %s", session.error.text);
    cache_release(&runner->engine.cache, 0);
    prompt_free(&prompt);
    session_free(&session);
    return ok;
}

#ifdef TIDE_CUDA

/* ---- batch: the same prompts on this machine's GPU and on its cores */

enum { BATCH_PROMPTS = 256, BATCH_SLOTS = 64, BATCH_PROMPT = 48, BATCH_ANSWER = 128, BATCH_TURNS = 3 };

/* The next prompts take the places of those that are through. Returns how many sessions share the next round. */
static int fill_slots(Runner *runner, Session *sessions, Session **active, const HeldPrompt *prompts, int *next) {
    int n = 0;
    for (int s = 0; s < BATCH_SLOTS; s++) {
        Session *session = &sessions[s];
        if (!session->ids && *next < BATCH_PROMPTS) {
            const int *ids = prompts[*next % (int)arrlen(prompts)].ids;
            *session = (Session){.slot = s, .stream = (uint64_t)*next, .max_new = BATCH_ANSWER, .sampling = held_sampling(0)};
            for (int i = 0; i < BATCH_PROMPT && i < (int)arrlen(ids); i++) arrput(session->ids, ids[i]);
            session->ids[arrlen(session->ids) - 1] = 1000 + *next;      /* no two are the same */
            session_begin(session, &runner->engine);
            ++*next;
        }
        if (session->ids && session_admit(runner, session)) active[n++] = session;
    }
    return n;
}

/* Answers all of them in their whole length; tokens a second. */
static bool time_batch(EngineOptions options, const Backend *backend, const HeldPrompt *prompts, double *rate, Error *error) {
    Session sessions[BATCH_SLOTS] = {0}, *active[BATCH_SLOTS];
    Runner runner;
    bool ok = true;
    options.backend = backend;
    options.sessions = BATCH_SLOTS;
    options.context = BATCH_PROMPT + BATCH_ANSWER + PAGE_ROWS;
    if (!runner_open(&runner, &options, false, NULL, error)) return false;
    runner.engine.config.n_eos = 0;
    for (int next = 0, n; ok && (n = fill_slots(&runner, sessions, active, prompts, &next));) {
        run_round(&runner, active, n);
        for (int i = 0; i < n; i++) {
            if (active[i]->finish == RUNNING) continue;
            if (active[i]->finish == FINISH_ERROR) ok = fail(error, "%s", active[i]->error.text);
            cache_release(&runner.engine.cache, active[i]->slot);
            session_free(active[i]);
        }
        if (interrupted) ok = fail(error, "interrupted");
    }
    *rate = (double)runner.tokens / runner.seconds;
    for (int s = 0; s < BATCH_SLOTS; s++) session_free(&sessions[s]);
    runner_close(&runner);
    return ok;
}

static bool bench_batch(const BenchOptions *bench, EngineOptions options, Error *error) {
    HeldPrompt *prompts = NULL;
    double gpu[BATCH_TURNS], cores[BATCH_TURNS];
    bool ok = cuda_backend.start(&options.device, error) && read_prompts(options.model, &prompts, error);
    (void)bench;
    if (!ok) return false;
    for (int i = 0; i < BATCH_TURNS && ok; i++)
        ok = time_batch(options, &cuda_backend, prompts, &gpu[i], error)
             && time_batch(options, &c_backend, prompts, &cores[i], error);
    free_prompts(prompts);
    if (!ok) return false;
    const double fast = median(gpu, BATCH_TURNS), slow = median(cores, BATCH_TURNS);
    printf("batch            %d prompts of %d ids, %d tokens each, %d at a time: %.0f tokens/s on the GPU, %.0f on %d cores: "
           "%.1f times\n",
           BATCH_PROMPTS, BATCH_PROMPT, BATCH_ANSWER, BATCH_SLOTS, fast, slow, omp_get_max_threads(), fast / slow);
    return true;
}

#endif

static bool bench_first(const BenchOptions *bench, EngineOptions options, Error *error) {
    double seconds[BENCH_REPEATS];
    Runner runner;
    (void)bench;
    if (!runner_open(&runner, &options, false, stderr, error)) return false;
    bool ok = true;
    for (int i = 0; i < BENCH_REPEATS && ok; i++) ok = time_first(&runner, &seconds[i], error);
    if (ok) {
        printf("first            %.1f ms from a message to the first token of its answer, straight after loading; then",
               1e3 * seconds[0]);
        for (int i = 1; i < BENCH_REPEATS; i++) printf(" %.1f", 1e3 * seconds[i]);
        printf(" ms (%s)\n", runner.engine.backend->name);
    }
    runner_close(&runner);
    return ok;
}

/* ---- the list of them */

static const struct {
    const char *name;
    bool (*run)(const BenchOptions *bench, EngineOptions options, Error *error);
    bool drafts;                /* the others are about decoding without */
} benches[] = {
    {"cpu", bench_cpu, false},
    {"load", bench_load, false},
    {"loadstep", bench_loadstep, false},
    {"hotsweep", bench_hotsweep, false},
    {"offered", bench_offered, false},
    {"cost", bench_cost, false},
    {"resolve", bench_resolve, false},
    {"memory", bench_memory, false},
    {"acceptance", bench_acceptance, true},
    {"lengths", bench_lengths, true},
    {"confidence", bench_confidence, true},
    {"draft", bench_draft, true},
    {"speed", bench_speed, true},
    {"decode", bench_decode, false},
    {"first", bench_first, false},
#ifdef TIDE_CUDA
    {"gpu", bench_gpu, false},
    {"batch", bench_batch, false},
#endif
};

int bench(const BenchOptions *bench, const EngineOptions *options, Error *error) {
    enum { DONE, FAILED, UNKNOWN };
    char names[512] = "";
#ifdef TIDE_CUDA
    if (bench->section && find_section(bench->section, error) > GPU_SECTIONS) return UNKNOWN;
#endif
    for (size_t i = 0; i < sizeof benches / sizeof *benches; i++) {
        EngineOptions used = *options;
        if (!benches[i].drafts) used.draft = NULL, used.stages = STAGES_IDLE;
        if (bench->name && !strcmp(bench->name, benches[i].name)) return benches[i].run(bench, used, error) ? DONE : FAILED;
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "", benches[i].name);
    }
    fail(error, "bench wants one of %s", names);
    return UNKNOWN;
}
