/* test_forward.c: whole passes. What a model computes against transformers' outputs (tests/fixtures and ../shared/fixtures); that
 * a row's logits are the same bits whatever shares its pass; what happens when numbers go bad; the allocation guard.
 *
 *     test_forward [DIR...]       DIR: checkpoints with a golden.safetensors beside them, instead of the usual ones
 */
#include "../engine.c"
#include "../backend.c"
#include "check.h"
#include "passes.h"
#include "scratch.h"

#include <sys/wait.h>

static const char *kv_names[] = {"f32", "bf16", "fp8", "fp4"};

static bool rounding;           /* --qat */

static bool open_engine(Engine *engine, const char *directory, int sessions, int context, KvDtype dtype) {
    Error error;
    EngineOptions options = {.model = directory, .sessions = sessions, .context = context, .kv_dtype = dtype, .qat = rounding};
    bool ok = engine_open(engine, &options, &error);
    CHECK(ok, "%s opens: %s", directory, error.text);
    return ok;
}

/* The logits of rows [first, first + n) of the pass just made, as many as fit at a time. */
static bool copy_logits(Engine *engine, const Row *rows, int first, int n, float *out, Error *error) {
    size_t vocab = (size_t)engine->config.vocab_size;
    for (int done = 0; done < n;) {
        int indices[64], some = n - done < engine->state.logit_rows ? n - done : engine->state.logit_rows;
        for (int i = 0; i < some; i++) indices[i] = first + done + i;
        if (!head(engine, rows, indices, some, error)) return false;
        memcpy(out + (size_t)done * vocab, engine->state.logits, (size_t)some * vocab * sizeof(float));
        done += some;
    }
    return true;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Goldens
 */

enum { BOUND_LOGITS = 0, BOUND_HIDDEN, BOUND_DECODE, BOUNDS };

typedef struct Golden {
    Checkpoint file;
    Engine engine;
    int tokens, decodes;
    double worst[BOUNDS];       /* largest absolute difference seen */
    float *logits;              /* [tokens, vocab_size] of the prompt */
    double mean;                /* their absolute difference from the golden ones */
    int wrong_sets, sets;
    int layer;                  /* the pass is in */
} Golden;

static const float *golden_values(const Golden *golden, const char *name) {
    const Tensor *tensor = checkpoint_find(&golden->file, name);
    return tensor ? (const float *)tensor->data : NULL;         /* golden files are aligned: asserted in golden_open() */
}

static double largest_difference(const float *a, const float *b, size_t n) {
    double worst = 0;
    for (size_t i = 0; i < n; i++) worst = fmax(worst, fabs((double)a[i] - b[i]));
    return worst;
}

static void compare_hidden(void *user, int layer, const float *hidden, const Row *rows, int n_rows) {
    Golden *golden = user;
    char name[32];
    golden->layer = layer;
    if (rows[0].position != 0) return;                          /* goldens hold the prompt's hidden states only */
    snprintf(name, sizeof name, "hidden.%d", layer);
    const float *wanted = golden_values(golden, name);
    CHECK(wanted || layer < golden->engine.config.num_hidden_layers, "the golden file has %s", name);
    if (!wanted) return;                                        /* a large one may hold the last state alone */
    const Config *config = &golden->engine.config;
    double worst = largest_difference(hidden, wanted, (size_t)(n_rows * residual_streams(config) * config->hidden_size));
    golden->worst[BOUND_HIDDEN] = fmax(golden->worst[BOUND_HIDDEN], worst);
}

/* The golden picks of a layer and position that the position may see, ascending. */
static int golden_picks(const Golden *golden, int layer, int position, int *picks) {
    char name[32];
    snprintf(name, sizeof name, "topk.%d", layer);
    const Tensor *tensor = checkpoint_find(&golden->file, name);
    if (!tensor) return -1;
    int k = (int)tensor->shape[1], n = 0;
    const int32_t *row = (const int32_t *)tensor->data + (size_t)position * (size_t)k;
    for (int s = 0; s <= position; s++)
        for (int i = 0; i < k; i++)
            if (row[i] == s) { picks[n++] = s; break; }
    return n;
}

static void compare_selection(void *user, int layer, const Selection *selection, const Row *rows, int n_rows) {
    Golden *golden = user;
    if (rows[0].position != 0) return;
    for (int r = 0; r < n_rows; r++) {
        int picks[4096], n = golden_picks(golden, layer, rows[r].position, picks);
        golden->sets++;
        golden->wrong_sets += n != selection->count[r]
                              || memcmp(picks, selection->ids + (size_t)r * (size_t)selection->capacity, (size_t)n * sizeof(int));
    }
}

/* Holding a pass to given decisions: rounded rows flip near ties in the selection and in the router of these small random models, and
 * a flip moves the logits more than all rounding together. With the decisions of the exact pass held, the rounding itself shows. */
static Golden *held;            /* whose picks select_as_golden() returns */
static int *routes;             /* stb_ds: the router's picks of the exact prompt pass, call after call */
static size_t next_route;

static void select_as_golden(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                             const RowFormat *format, const DevicePage *pages, int context_pages, int heads, int head_dim,
                             const Row *rows, int n_rows, float *scratch, int scratch_rows) {
    (void)q, (void)head_weights, (void)keys, (void)format, (void)pages, (void)context_pages, (void)heads, (void)head_dim,
        (void)scratch, (void)scratch_rows;
    const State *state = &held->engine.state;       /* rows that select compressed ones stand at these, not at their own positions */
    for (int r = 0; r < n_rows; r++) {
        int *ids = selection->ids + (size_t)r * (size_t)selection->capacity,
            position = rows == state->group_rows ? state->rows[r].position : rows[r].position;
        selection->count[r] = golden_picks(held, held->layer, position, ids);
        for (int i = selection->count[r]; i < selection->capacity; i++) ids[i] = -1;
    }
}

static void route_and_remember(int *picks, float *weights, const float *logits, const float *bias, int n_rows,
                               const Config *config) {
    route(picks, weights, logits, bias, n_rows, config);
    size_t n = (size_t)(n_rows * config->num_experts_per_tok);
    allocation_forbidden = false;
    memcpy(arraddnptr(routes, n), picks, n * sizeof(int));
    allocation_forbidden = true;
}

static void route_softplus_and_remember(int *picks, float *weights, const float *logits, const float *bias, const int *table,
                                        const Row *rows, int n_rows, const Config *config) {
    route_softplus(picks, weights, logits, bias, table, rows, n_rows, config);
    size_t n = (size_t)(n_rows * config->num_experts_per_tok);
    allocation_forbidden = false;
    memcpy(arraddnptr(routes, n), picks, n * sizeof(int));
    allocation_forbidden = true;
}

/* The remembered experts as a table, in which every row of the pass has an entry of its own. */
static void route_softplus_as_remembered(int *picks, float *weights, const float *logits, const float *bias, const int *table,
                                         const Row *rows, int n_rows, const Config *config) {
    (void)table, (void)rows;
    for (int r = 0; r < n_rows; r++, next_route += (size_t)config->num_experts_per_tok) {
        const Row first = {0, 0, 0};
        route_softplus(picks + r * config->num_experts_per_tok, weights + r * config->num_experts_per_tok,
                       logits + (size_t)r * (size_t)config->n_routed_experts, bias, routes + next_route, &first, 1, config);
    }
}

/* A bias that towers over every score makes the remembered experts the best ones; their weights come from the row's own scores. */
static void route_as_remembered(int *picks, float *weights, const float *logits, const float *bias, int n_rows,
                                const Config *config) {
    (void)bias;
    static float towering[MAX_EXPERTS];
    Config free_choice = *config;
    free_choice.n_group = free_choice.topk_group = 1;
    for (int r = 0; r < n_rows; r++) {
        memset(towering, 0, sizeof towering);
        for (int i = 0; i < config->num_experts_per_tok; i++) towering[routes[next_route++]] = 100;
        route(picks + r * config->num_experts_per_tok, weights + r * config->num_experts_per_tok,
              logits + (size_t)r * (size_t)config->n_routed_experts, towering, 1, &free_choice);
    }
}

static bool golden_open(Golden *golden, const char *directory, KvDtype dtype) {
    char path[PATH_MAX];
    Error error;
    *golden = (Golden){0};
    bool ok = map_file(&golden->file, join(path, directory, "golden.safetensors"), &error);
    CHECK(ok, "%s", error.text);
    const Tensor *ids = checkpoint_find(&golden->file, "input_ids"), *decode_ids = checkpoint_find(&golden->file, "decode_ids");
    ok = ok && ids && decode_ids && (uintptr_t)ids->data % 4 == 0;
    CHECK(ok, "%s: golden.safetensors is as expected", directory);
    if (!ok) return false;
    golden->tokens = (int)ids->shape[0];
    golden->decodes = (int)decode_ids->shape[0];
    return open_engine(&golden->engine, directory, 1, golden->tokens + golden->decodes, dtype);
}

/* The prompt in one pass, then token by token; every difference from the golden file is left in *golden. */
static bool golden_run(Golden *golden, Error *error) {
    const int32_t *ids = (const int32_t *)checkpoint_find(&golden->file, "input_ids")->data;
    const int32_t *decode_ids = (const int32_t *)checkpoint_find(&golden->file, "decode_ids")->data;
    Engine *engine = &golden->engine;
    size_t vocab = (size_t)engine->config.vocab_size, n = (size_t)golden->tokens * vocab;
    const float *wanted = golden_values(golden, "logits"), *wanted_decode = golden_values(golden, "decode_logits");
    Row *rows = allocate_zeroed((size_t)golden->tokens, sizeof(Row));
    float *logits = golden->logits = allocate_zeroed(n, sizeof(float)), *decoded = allocate_zeroed(vocab, sizeof(float));
    for (int i = 0; i < golden->tokens; i++) rows[i] = (Row){0, i, ids[i]};
    engine->probe = (Probe){compare_hidden, compare_selection, golden};
    bool ok = run_rows(engine, rows, golden->tokens, error) && copy_logits(engine, rows, 0, golden->tokens, logits, error);
    golden->worst[BOUND_LOGITS] = largest_difference(logits, wanted, n);
    for (size_t i = 0; i < n; i++) golden->mean += fabs((double)logits[i] - wanted[i]) / (double)n;
    for (int d = 0; ok && d < golden->decodes && engine->backend->index_select != select_as_golden; d++) {
        Row row = {0, golden->tokens + d, decode_ids[d]};
        ok = run_rows(engine, &row, 1, error) && copy_logits(engine, &row, 0, 1, decoded, error);
        double worst = largest_difference(decoded, wanted_decode + (size_t)d * vocab, vocab);
        golden->worst[BOUND_DECODE] = fmax(golden->worst[BOUND_DECODE], worst);
    }
    free(rows);
    free(decoded);
    return ok;
}

static void golden_close(Golden *golden) {
    free(golden->logits);
    engine_close(&golden->engine);
    checkpoint_close(&golden->file);
}

/* x to the nearest value of a small float format with `mantissa` bits, an exponent of at least `lowest` and a largest value; written
 * from the format's definition, not from the engine's bits. */
static float rounded(float x, int mantissa, int lowest, double largest) {
    int exponent;
    if (x == 0) return x;
    frexp(x, &exponent);                                        /* x = f 2^exponent, f in [1/2, 1) */
    double step = ldexp(1, (exponent - 1 < lowest ? lowest : exponent - 1) - mantissa), y = nearbyint(x / step) * step;
    return (float)fmin(fmax(y, -largest), largest);
}

/* For an engine with f32 rows: keeps what fp8 or bf16 rows would hold. */
static KvDtype imitated;

static void store_rounded_rows(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, const float *a,
                               size_t a_stride, const float *b, size_t b_stride) {
    static float row[MAX_ROW_WIDTH], tail[MAX_ROW_WIDTH];
    for (int r = 0; r < n_rows; r++, a += a_stride, b += b_stride) {
        float scale = 1;
        for (int i = 0; i < format->quantised; i++) {
            float largest = 0;
            for (int j = i; i % format->group == 0 && j < i + format->group && j < format->quantised; j++)
                largest = fmaxf(largest, fabsf(a[j]));
            if (i % format->group == 0) scale = format->scales == SCALES_F32 ? largest / 448 : (float)exp2(ceil(log2(fmax(largest, 1e-4f) / 448.0)));
            row[i] = imitated == KV_BF16 ? rounded(a[i], 7, -126, FLT_MAX) : rounded(a[i] / scale, 3, -6, 448) * scale;
        }
        for (int i = 0; i < format->plain; i++) tail[i] = rounded(b[i], 7, -126, FLT_MAX);
        store_rows(base, format, ids + r, 1, row, 0, tail, 0);
    }
}

static void store_rounded_latents(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *kv, int lora,
                                  int tail, const float *weight, float *q, int rank, const float *q_weight, float eps,
                                  const float *cosine, const float *sine) {
    const size_t width = (size_t)(lora + tail);
    store_latents(base, format, ids, n_rows, kv, lora, tail, weight, q, rank, q_weight, eps, cosine, sine);
    store_rounded_rows(base, format, ids, n_rows, kv, width, kv + lora, width);
}

static void store_rounded_shared_keys(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *kv, int dim,
                                      int turned, const float *weight, const RowFormat *rounding, float *q, int rank,
                                      const float *q_weight, float eps, const float *cosine, const float *sine) {
    store_shared_keys(base, format, ids, n_rows, kv, dim, turned, weight, rounding, q, rank, q_weight, eps, cosine, sine);
    store_rounded_rows(base, format, ids, n_rows, kv, (size_t)dim, kv + format->quantised, (size_t)dim);
}

static void store_rounded_keys(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *k, int dim,
                               const float *weight, const float *bias, int turned, bool interleaved, const float *cosine,
                               const float *sine, const float *head_weights, int heads, PassReport *report, int place,
                               int weights_place) {
    store_index_keys(base, format, ids, n_rows, k, dim, weight, bias, turned, interleaved, cosine, sine, head_weights, heads,
                     report, place, weights_place);
    store_rounded_rows(base, format, ids, n_rows, k, (size_t)dim, k, (size_t)dim);
}

/* The same for the plain values alone. */
static void store_rounded_tails(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, const float *a,
                                size_t a_stride, const float *b, size_t b_stride) {
    for (int r = 0; r < n_rows; r++, a += a_stride, b += b_stride) {
        float tail[MAX_ROW_WIDTH];
        for (int i = 0; i < format->plain; i++) tail[i] = rounded(b[i], 7, -126, FLT_MAX);
        store_rows(base, format, ids + r, 1, a, 0, tail, 0);
    }
}

static void store_keys_with_rounded_tails(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *kv, int dim,
                                          int turned, const float *weight, const RowFormat *rounding, float *q, int rank,
                                          const float *q_weight, float eps, const float *cosine, const float *sine) {
    store_shared_keys(base, format, ids, n_rows, kv, dim, turned, weight, rounding, q, rank, q_weight, eps, cosine, sine);
    store_rounded_tails(base, format, ids, n_rows, kv, (size_t)dim, kv + format->quantised, (size_t)dim);
}

static void compress_and_round_tails(uint8_t *base, const RowFormat *format, const DeviceRow *ids, const Trail *trail, const Row *rows,
                                     int n_rows, const CompressorWeights *weights, int ratio, int dim, bool overlapping, int turned,
                                     const float *inverse_frequency, float eps, const RowFormat *rounding, PassReport *report,
                                     int place) {
    compress(base, format, ids, trail, rows, n_rows, weights, ratio, dim, overlapping, turned, inverse_frequency, eps, rounding,
             report, place);
    for (int r = 0; r < n_rows && format->quantised; r++) {
        float row[MAX_ROW_WIDTH];
        if (ids[r].id < 0) continue;
        memcpy(row, base + (size_t)ids[r].id * format->stride, (size_t)dim * sizeof(float));
        store_rounded_tails(base, format, ids + r, 1, row, 0, row + format->quantised, 0);
    }
}

static void compress_and_round(uint8_t *base, const RowFormat *format, const DeviceRow *ids, const Trail *trail, const Row *rows,
                               int n_rows, const CompressorWeights *weights, int ratio, int dim, bool overlapping, int turned,
                               const float *inverse_frequency, float eps, const RowFormat *rounding, PassReport *report, int place) {
    compress(base, format, ids, trail, rows, n_rows, weights, ratio, dim, overlapping, turned, inverse_frequency, eps, rounding,
             report, place);
    for (int r = 0; r < n_rows; r++) {
        float row[MAX_ROW_WIDTH];
        if (ids[r].id < 0) continue;
        memcpy(row, base + (size_t)ids[r].id * format->stride, (size_t)dim * sizeof(float));
        store_rounded_rows(base, format, ids + r, 1, row, 0, row + format->quantised, 0);
    }
}

typedef enum Mode { FREELY, HELD, IMITATED } Mode;

/* One run with rows of that dtype: deciding freely, held to the exact pass's decisions, or held and with the rows rounded by
 * store_rounded_rows() instead of the engine. The caller closes *golden. */
static bool golden_rounded(Golden *golden, const char *directory, KvDtype dtype, Mode mode) {
    Error error;
    Backend backend = c_backend;
    backend.index_select = select_as_golden;
    backend.route = route_as_remembered;
    backend.route_softplus = route_softplus_as_remembered;
    if (mode == IMITATED) {
        backend.store_rows = store_rounded_rows;
        backend.store_latents = store_rounded_latents;
        backend.store_shared_keys = store_rounded_shared_keys;
        backend.store_index_keys = store_rounded_keys;
        backend.compress = compress_and_round;
    }
    imitated = dtype;
    next_route = 0;
    if (!golden_open(golden, directory, mode == IMITATED ? KV_F32 : dtype)) return false;
    held = golden;
    if (mode != FREELY) golden->engine.backend = &backend;
    bool ok = golden_run(golden, &error);
    CHECK(ok, "%s: %s", directory, error.text);
    golden->engine.backend = &c_backend;
    return ok;
}

/* bf16 rows stay within 0.05 and fp8 rows within 0.15, decisions held, unless an independent rounding of the rows to that format costs
 * as much by itself; the engine's logits are the bits which that rounding gives. */
static void test_golden_rounded(const char *directory, KvDtype dtype, double bound) {
    Golden freely, held_run, imitation;
    bool ok = golden_rounded(&freely, directory, dtype, FREELY) && golden_rounded(&held_run, directory, dtype, HELD)
        && golden_rounded(&imitation, directory, dtype, IMITATED);
    if (!ok) return;
    size_t n = (size_t)freely.tokens * (size_t)freely.engine.config.vocab_size;
    bool over = imitation.mean > bound;
    printf("%s: %s rows: mean |logit difference| %.4f%s, %.4f with the exact pass's decisions held\n", directory,
           kv_names[dtype], freely.mean, freely.mean > bound ? " (over the bound: near ties that flip)" : "", held_run.mean);
    if (over) printf("    over the bound of %g, as rounding to the format is by itself: %.4f\n", bound, imitation.mean);
    CHECK(held_run.mean <= bound || over, "%s: %s rows differ by %g on average, the bound is %g", directory, kv_names[dtype],
          held_run.mean, bound);
    CHECK(!memcmp(held_run.logits, imitation.logits, n * sizeof(float)),
          "%s: %s rows hold the values an independent rounding gives", directory, kv_names[dtype]);
    golden_close(&freely);
    golden_close(&held_run);
    golden_close(&imitation);
}

static void test_golden(const char *directory) {
    Golden golden;
    Error error;
    if (!golden_open(&golden, directory, KV_F32)) return;
    Backend backend = c_backend;
    backend.route = route_and_remember;
    backend.route_softplus = route_softplus_and_remember;
    golden.engine.backend = &backend;
    arrsetlen(routes, 0);
    bool ok = golden_run(&golden, &error);
    CHECK(ok, "%s: %s", directory, error.text);
    printf("%s: f32 rows: logits %.1e, decode logits %.1e, hidden %.1e at most; %d of %d top-k sets differ\n", directory,
           golden.worst[BOUND_LOGITS], golden.worst[BOUND_DECODE], golden.worst[BOUND_HIDDEN], golden.wrong_sets, golden.sets);
    for (int i = 0; i < BOUNDS; i++) CHECK(golden.worst[i] <= 2e-3, "%s: quantity %d differs by %g", directory, i, golden.worst[i]);
    CHECK(golden.wrong_sets == 0, "%s: every top-k set is the golden one, %d are not", directory, golden.wrong_sets);
    golden_close(&golden);
    test_golden_rounded(directory, KV_BF16, 0.05);
    test_golden_rounded(directory, KV_F8, 0.15);
}

/* With --qat the prompt's logits are those of the reference's own rounding (qat_logits). A value on a boundary may fall the other way and
 * take its row, and what sees it, along; so half of the rows have to be the same, and unrounded hardly one would be. */
static void test_golden_qat(const char *directory) {
    Golden golden;
    Error error;
    rounding = true;
    bool ok = golden_open(&golden, directory, KV_F32);
    rounding = false;
    if (!ok) return;
    const int32_t *ids = (const int32_t *)checkpoint_find(&golden.file, "input_ids")->data;
    const float *wanted = golden_values(&golden, "qat_logits"), *exact = golden_values(&golden, "logits");
    size_t vocab = (size_t)golden.engine.config.vocab_size;
    Row rows[MAX_PASS_ROWS];
    for (int i = 0; i < golden.tokens; i++) rows[i] = (Row){0, i, ids[i]};
    golden.logits = allocate_zeroed((size_t)golden.tokens * vocab, sizeof(float));
    ok = run_rows(&golden.engine, rows, golden.tokens, &error)
        && copy_logits(&golden.engine, rows, 0, golden.tokens, golden.logits, &error);
    CHECK(ok, "%s: %s", directory, error.text);
    int same = 0, unrounded = 0;
    for (size_t i = 0; ok && i < (size_t)golden.tokens; i++) {
        same += largest_difference(golden.logits + i * vocab, wanted + i * vocab, vocab) < 2e-3;
        unrounded += largest_difference(exact + i * vocab, wanted + i * vocab, vocab) < 2e-3;
    }
    printf("%s: --qat: %d of %d rows as the reference rounds; %d without\n", directory, same, golden.tokens, unrounded);
    CHECK(2 * same >= golden.tokens && 10 * unrounded < golden.tokens, "%s: --qat rounds as the reference does", directory);
    golden_close(&golden);
}

/* Every directory below `parent` of one of the three families with a golden file. */
static void test_goldens_below(const char *parent) {
    DIR *listing = opendir(parent);
    if (!listing) {
        printf("%s: not there, skipped\n", parent);
        return;
    }
    for (struct dirent *entry; (entry = readdir(listing));) {
        char directory[PATH_MAX], path[PATH_MAX];
        bool family = false;
        for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
            size_t length = strlen(families[i].model_type);
            family |= !strncmp(entry->d_name, families[i].model_type, length) && entry->d_name[length] == '-';
        }
        if (family && access(join(path, join(directory, parent, entry->d_name), "golden.safetensors"), R_OK) == 0)
            test_golden(directory);
    }
    closedir(listing);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Row independence
 */

typedef struct Script {         /* what one session is fed */
    int ids[640], length;
} Script;

typedef struct Schedule {       /* in which passes the scripts' rows go */
    int chunk;                  /* rows of one session in a pass at most */
    bool together;              /* all sessions share each pass, else one after the other */
    int threads;
} Schedule;

/* Runs every script to its end; logits: every row's, script after script. */
static bool run_schedule(Engine *engine, const Script *scripts, int n, Schedule schedule, float *logits, Error *error) {
    Row *rows = allocate_zeroed((size_t)engine->state.max_rows, sizeof(Row));
    int done[16] = {0}, turn = 0;
    omp_set_num_threads(schedule.threads);
    for (bool busy = true, ok = true; busy; turn++) {
        int n_rows = 0;
        busy = false;
        for (int i = 0; i < n; i++) {
            int s = schedule.together ? (i + turn) % n : i;     /* another order in each pass */
            if (n_rows && !schedule.together) break;
            for (int j = 0; j < schedule.chunk && n_rows < engine->state.max_rows && done[s] < scripts[s].length; j++, done[s]++)
                rows[n_rows++] = (Row){s, done[s], scripts[s].ids[done[s]]};
        }
        busy = n_rows > 0;
        ok = !busy || run_rows(engine, rows, n_rows, error);
        for (int r = 0; ok && r < n_rows; r++) {
            size_t before = (size_t)rows[r].position;
            for (int s = 0; s < rows[r].session; s++) before += (size_t)scripts[s].length;
            if (r % 7 == 0 || r + 1 == n_rows)                  /* some rows in a call of their own, the last among them */
                ok = copy_logits(engine, rows, r, 1, logits + before * (size_t)engine->config.vocab_size, error);
            else {
                int run = 1;
                while (r + run < n_rows && rows[r + run].session == rows[r].session && (r + run) % 7) run++;
                ok = copy_logits(engine, rows, r, run, logits + before * (size_t)engine->config.vocab_size, error);
                r += run - 1;
            }
        }
        if (!ok) { free(rows); return false; }
    }
    free(rows);
    omp_set_num_threads(2);
    return true;
}

/* Every schedule gives the bits that the first one gives. */
static void test_schedules(const char *directory, KvDtype dtype, const int *lengths, int n, const Schedule *schedules,
                           int n_schedules) {
    Engine engine;
    Error error;
    Script *scripts = allocate_zeroed((size_t)n, sizeof(Script));
    size_t rows = 0;
    int context = 0;
    for (int s = 0; s < n; s++) context = larger(context, lengths[s]);
    if (!open_engine(&engine, directory, n, context, dtype)) { free(scripts); return; }
    for (int s = 0; s < n; s++) {
        scripts[s].length = lengths[s];
        rows += (size_t)lengths[s];
        for (int i = 0; i < lengths[s]; i++) scripts[s].ids[i] = random_below(engine.config.vocab_size);
    }
    size_t size = rows * (size_t)engine.config.vocab_size;
    float *first = allocate_zeroed(size, sizeof(float)), *other = allocate_zeroed(size, sizeof(float));
    for (int i = 0; i < n_schedules; i++) {
        start_over(&engine, 0x5a);                              /* whatever earlier schedules left */
        bool ok = run_schedule(&engine, scripts, n, schedules[i], i ? other : first, &error);
        CHECK(ok, "%s: %s", directory, error.text);
        size_t at = 0;
        while (ok && i && at < size && !memcmp(first + at, other + at, sizeof *first)) at++;
        CHECK(!ok || !i || at == size,
              "%s, %s rows, %d sessions, chunks of %d%s, %d threads: row %zu of %zu has other bits: %.9g, not %.9g", directory,
              kv_names[dtype], n, schedules[i].chunk, schedules[i].together ? " together" : "", schedules[i].threads,
              at / (size_t)engine.config.vocab_size, rows, (double)other[at], (double)first[at]);
    }
    free(first);
    free(other);
    free(scripts);
    engine_close(&engine);
}

static void test_independence(const char *directory, KvDtype dtype) {
    static const int lengths[7] = {1, 15, 17, 40, 64, 66, 131};
    static const Schedule schedules[] = {
        {512, false, 1}, {1, false, 1}, {13, false, 2}, {512, false, 2}, {1, true, 1},
        {1, true, 2},    {5, true, 2},  {64, true, 1},  {6, true, 3},
    };
    test_schedules(directory, dtype, lengths, 7, schedules, sizeof schedules / sizeof *schedules);
}

/* One session across index_topk (16), a tile of 64 and a pass of 512 rows, in chunks that end before, at and behind them. */
static void test_boundaries(const char *directory, KvDtype dtype) {
    static const int length = 515;
    static const Schedule schedules[] = {
        {1, false, 2},  {15, false, 2}, {16, false, 2},  {17, false, 2},  {63, false, 2},
        {64, false, 2}, {65, false, 2}, {511, false, 2}, {512, false, 2},
    };
    test_schedules(directory, dtype, &length, 1, schedules, sizeof schedules / sizeof *schedules);
}

/* Rows that were rounded as their format would are the same bits in it and in f32: with --qat the reference's formats lose nothing
 * more than is lost anyway. (What they keep of the turned values is bf16.) */
static void test_formats_hold_what_is_rounded(const char *directory) {
    Error error;
    float *kept[2] = {0};
    size_t n = 0;
    for (int narrow = 0; narrow < 2; narrow++) {
        Engine engine;
        Backend backend = c_backend;
        imitated = KV_BF16;
        if (!narrow) backend.store_rows = store_rounded_tails;
        if (!narrow) backend.store_shared_keys = store_keys_with_rounded_tails;
        if (!narrow) backend.compress = compress_and_round_tails;
        if (!open_engine(&engine, directory, 1, 150, narrow ? KV_F4 : KV_F32)) return;
        engine.backend = &backend;
        Row rows[150];
        for (int i = 0; i < 150; i++) rows[i] = (Row){0, i, (i * 37 + 5) % engine.config.vocab_size};
        bool ok = run_rows(&engine, rows, 150, &error);
        CHECK(ok, "%s", error.text);
        n = 150 * (size_t)engine.config.hidden_size;
        kept[narrow] = memcpy(allocate_zeroed(n, sizeof(float)), engine.state.normed, n * sizeof(float));
        engine.backend = &c_backend;
        engine_close(&engine);
    }
    CHECK(!memcmp(kept[0], kept[1], n * sizeof(float)), "%s: --qat with fp4 rows gives the bits of --qat with f32 rows", directory);
    free(kept[0]), free(kept[1]);
}

/* With an index_topk that holds everything the selection is the whole history: sparse and dense are one. Compares a short
 * history with itself where index_topk is as published and where it is large. */
static void test_selection_is_dense_while_it_fits(const char *directory) {
    Error error;
    float *logits[2] = {0};
    int topk = 0, vocab = 0;
    for (int large = 0; large < 2; large++) {
        Engine engine;
        EngineOptions options = {
            .model = directory, .sessions = 1, .context = 64, .kv_dtype = KV_F32, .index_topk = large ? 4096 : 0};
        bool opened = engine_open(&engine, &options, &error);
        CHECK(opened, "%s", error.text);
        if (!opened) return;
        topk = large ? topk : engine.config.index_topk;
        vocab = engine.config.vocab_size;
        logits[large] = allocate_zeroed((size_t)(64 * vocab), sizeof(float));
        Row rows[64];
        for (int i = 0; i < 64; i++) rows[i] = (Row){0, i, (i * 37 + 5) % vocab};
        bool ok = run_rows(&engine, rows, 64, &error) && copy_logits(&engine, rows, 0, 64, logits[large], &error);
        CHECK(ok, "%s", error.text);
        engine_close(&engine);
    }
    size_t same = (size_t)topk * (size_t)vocab;
    CHECK(!memcmp(logits[0], logits[1], same * sizeof(float)), "%s: positions below index_topk see everything", directory);
    CHECK(memcmp(logits[0] + same, logits[1] + same, (size_t)vocab * sizeof(float)), "%s: the position at index_topk does not",
          directory);
    free(logits[0]);
    free(logits[1]);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Numbers that go bad
 */

/* Fills a whole tensor of a private copy with one value and says whether 70 rows then go through; *error tells why not. */
static bool runs_with(const char *fixture, const char *name, float value, int count, Error *error) {
    char *directory = copy_checkpoint(fixture);
    Checkpoint checkpoint;
    if (!checkpoint_open(&checkpoint, directory, error)) exit(1);
    const Tensor tensor = *checkpoint_find(&checkpoint, name);
    checkpoint_close(&checkpoint);
    size_t element = dtype_size(tensor.dtype), n = count ? (size_t)count : tensor.size / element;
    uint8_t *bytes = allocate_zeroed(n, element);
    for (size_t i = 0; i < n; i++) {
        uint16_t half = narrow_bf16(value);
        if (element == 4) memcpy(bytes + 4 * i, &value, 4);
        else memcpy(bytes + 2 * i, &half, 2);
    }
    patch_tensor(directory, name, 0, bytes, n * element);
    free(bytes);
    Engine engine;
    EngineOptions options = {.model = directory, .sessions = 2, .context = 128, .kv_dtype = KV_F32};
    bool ok = engine_open(&engine, &options, error);
    CHECK(ok, "%s with %g opens: %s", name, (double)value, error->text);
    Row rows[70];
    for (int i = 0; i < 70; i++) rows[i] = (Row){1, i, 3 + i};
    int last = 69;
    ok = ok && run_rows(&engine, rows, 70, error) && head(&engine, rows, &last, 1, error);
    if (!ok) CHECK(engine.failed_session == 1, "%s: the failure is session 1's, not %d's", name, engine.failed_session);
    engine_close(&engine);
    free(directory);
    return ok;
}

/* A NaN or an infinity in any tensor of a layer ends the pass with the layer and a position; in lm_head, with the position. */
static void test_bad_weights(void) {
    static const char *names[] = {
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_a_proj.weight", "self_attn.q_a_layernorm.weight",
        "self_attn.q_b_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_a_layernorm.weight", "self_attn.kv_b_proj.weight",
        "self_attn.o_proj.weight", "self_attn.indexer.wq_b.weight", "self_attn.indexer.wk.weight", "self_attn.indexer.k_norm.weight",
        "self_attn.indexer.k_norm.bias", "self_attn.indexer.weights_proj.weight", "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.down_proj.weight",
    };
    Error error;
    char name[128];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(name, sizeof name, "model.layers.3.%s", names[i]);
        bool ok = runs_with("tests/fixtures/glm_moe_dsa-a", name, NAN, 0, &error);
        CHECK(!ok && strstr(error.text, "layer 3") && strstr(error.text, "position"), "NaN in %s: %s", name,
              ok ? "went through" : error.text);
    }
    static const char *infinite[] = {"self_attn.kv_b_proj.weight", "self_attn.indexer.wk.weight",
                                     "mlp.shared_experts.down_proj.weight"};
    for (size_t i = 0; i < sizeof infinite / sizeof *infinite; i++) {
        snprintf(name, sizeof name, "model.layers.3.%s", infinite[i]);
        bool ok = runs_with("tests/fixtures/glm_moe_dsa-a", name, INFINITY, 1, &error);
        CHECK(!ok && strstr(error.text, "layer 3") && strstr(error.text, "position"), "an infinity in %s: %s", name,
              ok ? "went through" : error.text);
    }
    for (int value = 0; value < 2; value++) {
        bool ok = runs_with("tests/fixtures/qwen3-a", "lm_head.weight", value ? NAN : INFINITY, 1, &error);
        CHECK(!ok && strstr(error.text, "lm_head") && strstr(error.text, "position 69"), "lm_head: %s",
              ok ? "went through" : error.text);
    }
    bool ok = runs_with("tests/fixtures/qwen3-a", "model.norm.weight", NAN, 1, &error);
    CHECK(!ok && strstr(error.text, "position 69"), "model.norm: %s", ok ? "went through" : error.text);
    ok = runs_with("tests/fixtures/qwen3-a", "model.layers.2.self_attn.k_norm.weight", NAN, 1, &error);
    CHECK(!ok && strstr(error.text, "layer 2"), "k_norm: %s", ok ? "went through" : error.text);
    static const char *parts[][3] = {
        {"glm_moe_dsa-a", "model.layers.3.self_attn.indexer.wq_b.weight", "layer 3: the index query of"},
        {"glm_moe_dsa-a", "model.layers.3.self_attn.indexer.wk.weight", "layer 3: the index key of"},
        {"glm_moe_dsa-a", "model.layers.3.self_attn.indexer.weights_proj.weight", "layer 3: the index weights of"},
        {"deepseek_v4-a", "model.layers.2.attn.indexer.wq_b.weight", "layer 2: the index query of"},
        {"deepseek_v4-a", "model.layers.2.attn.indexer.weights_proj.weight", "layer 2: the index weights of"},
        {"deepseek_v41-a", "layers.4.attn.indexer.wq_b.weight", "layer 4: the index query of"},
        {"deepseek_v41-a", "layers.4.attn.indexer.weights_proj.weight", "layer 4: the index weights of"},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        snprintf(name, sizeof name, "tests/fixtures/%s", parts[i][0]);
        ok = runs_with(name, parts[i][1], NAN, 0, &error);
        CHECK(!ok && strstr(error.text, parts[i][2]), "NaN in %s's %s: %s", parts[i][0], parts[i][1],
              ok ? "went through" : error.text);
    }
    /* Every choice at minus infinity: the router still picks different experts, and none of its arrays overflows. */
    ok = runs_with("tests/fixtures/glm_moe_dsa-a", "model.layers.1.mlp.gate.e_score_correction_bias", -INFINITY, 0, &error);
    CHECK(ok, "a bias of minus infinity everywhere chooses by index: %s", error.text);
}

/* A session of ten ids drawn from `seed`, none of them `never`. */
static Session make_session(Engine *engine, int slot, int seed, int never) {
    Session session = {.slot = slot,
                       .stream = (uint64_t)slot,
                       .max_new = 12,
                       .sampling = {.temperature = 0.8f, .top_p = 0.95f, .repeat_penalty = 1, .seed = 7}};
    for (int i = 0; i < 10; i++) {
        int id = (seed * 31 + i * 17) % engine->config.vocab_size;
        arrput(session.ids, id == never ? id + 1 : id);
    }
    session_begin(&session, engine);
    return session;
}

/* One session meets a token whose embedding is NaN. It alone ends with an error; its neighbours' tokens are what they are without it. */
static void test_bad_session_in_a_round(const char *fixture) {
    enum { BAD = 9, SESSIONS = 4 };
    char *directory = copy_checkpoint(fixture);
    const uint16_t nan = 0x7fc0;
    Error error;
    Runner runner;
    EngineOptions options = {.model = directory, .sessions = SESSIONS, .context = 64, .kv_dtype = KV_BF16};
    bool ok = runner_open(&runner, &options, false, NULL, &error);
    CHECK(ok, "%s", error.text);
    size_t hidden = ok ? (size_t)runner.engine.config.hidden_size : 0;
    if (ok) runner_close(&runner);
    const bool published = strstr(fixture, "deepseek_v41") != NULL;
    patch_tensor(directory, published ? "embed.weight" : "model.embed_tokens.weight", BAD * hidden * 2, &nan, 2);
    int *alone[SESSIONS] = {0};
    for (int together = 0; ok && together < 2; together++) {
        ok = runner_open(&runner, &options, false, NULL, &error);
        Session sessions[SESSIONS], *running[SESSIONS];
        for (int s = 0; s < SESSIONS; s++) {
            sessions[s] = make_session(&runner.engine, s, s + 1, BAD);
            running[s] = &sessions[s];
        }
        if (together) sessions[1].ids[4] = BAD;
        for (int s = 0; s < SESSIONS; s++) CHECK(session_admit(&runner, &sessions[s]), "%s: there is room for session %d", fixture, s);
        for (int s = 0; s < SESSIONS && !together; s++) run_session(&runner, &sessions[s]);
        for (int round = 0; round < 40 && together; round++) run_round(&runner, running, SESSIONS);
        for (int s = 0; s < SESSIONS; s++) {
            if (!together) {
                memcpy(arraddnptr(alone[s], arrlenu(sessions[s].ids)), sessions[s].ids, arrlenu(sessions[s].ids) * sizeof(int));
            } else if (s == 1) {
                CHECK(sessions[s].finish == FINISH_ERROR && strstr(sessions[s].error.text, "layer")
                          && strstr(sessions[s].error.text, "position 4"),
                      "%s: the bad session ends with an error: %s", fixture, sessions[s].error.text);
                CHECK(arrlen(sessions[s].ids) == 10, "%s: the bad session gained no token", fixture);
            } else {
                CHECK(sessions[s].finish != FINISH_ERROR && sessions[s].finish != RUNNING, "%s: session %d ends as usual",
                      fixture, s);
                CHECK(arrlen(sessions[s].ids) == arrlen(alone[s])
                          && !memcmp(sessions[s].ids, alone[s], arrlenu(alone[s]) * sizeof(int)),
                      "%s: session %d says beside the bad one what it says alone", fixture, s);
            }
            session_free(&sessions[s]);
        }
        runner_close(&runner);
    }
    for (int s = 0; s < SESSIONS; s++) arrfree(alone[s]);
    free(directory);
}

/* Rows that lie outside the vocabulary or the context are refused, not run. */
static void test_bad_rows(void) {
    Engine engine;
    Error error;
    if (!open_engine(&engine, "tests/fixtures/qwen3-a", 2, 32, KV_F32)) return;
    const Row bad[] = {{1, 0, -1}, {1, 0, 320}, {1, -1, 3}, {1, 32, 3}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Row rows[2] = {{0, 0, 5}, bad[i]};
        CHECK(!forward(&engine, rows, 2, &error) && engine.failed_session == 1 && strstr(error.text, "session 1"),
              "row %zu is refused", i);
    }
    Row good = {0, 0, 5};
    CHECK(run_rows(&engine, &good, 1, &error) && engine.failed_session == -1, "a good row goes through afterwards");
    /* Rows that the hierarchy has no place for: of a session that is not there, behind a gap, over rows that are history. */
    const Row lost[] = {{1, 0, 5}, {0, 2, 5}, {0, 0, 5}};
    for (size_t i = 0; i < sizeof lost / sizeof *lost; i++) {
        Row rows[2] = {{0, 1, 5}, lost[i]};
        bool own = lost[i].session == 0;
        CHECK(!forward(&engine, rows + own, 2 - own, &error) && engine.failed_session == lost[i].session
                  && strstr(error.text, own ? "session 0: position" : "session 1 has no place"),
              "lost row %zu is refused: %s", i, error.text);
    }
    good.position = 1;
    CHECK(run_rows(&engine, &good, 1, &error) && engine.failed_session == -1, "and the next good row goes through: %s", error.text);
    engine_close(&engine);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * The allocation guard
 */

static void embed_and_allocate(float *y, const Matrix *embedding, const Row *rows, int n_rows) {
    embed(y, embedding, rows, n_rows);
    free(allocate_zeroed(1, 1));
}

static void embed_and_grow(float *y, const Matrix *embedding, const Row *rows, int n_rows) {
    int *array = NULL;
    embed(y, embedding, rows, n_rows);
    arrput(array, 1);
    arrfree(array);
}

/* A child process allocates inside a pass and is expected to abort with a message. */
static void test_allocation_guard(void (*allocating)(float *, const Matrix *, const Row *, int)) {
    int ends[2];
    if (pipe(ends)) perror("pipe"), exit(1);
    fflush(NULL);
    omp_set_num_threads(1);
    pid_t child = fork();
    if (child == 0) {
        Engine engine;
        Error error;
        Backend backend = c_backend;
        backend.embed = allocating;
        dup2(ends[1], 2);
        signal(SIGABRT, SIG_DFL);
        if (!open_engine(&engine, "tests/fixtures/qwen3-a", 1, 32, KV_F32)) _exit(1);
        engine.backend = &backend;
        Row row = {0, 0, 5};
        if (prepare_rows(&engine, 0, 0, 1, &error) != 1) _exit(1);
        forward(&engine, &row, 1, &error);
        _exit(0);
    }
    close(ends[1]);
    char text[4096] = "";
    size_t used = 0;
    for (ssize_t n; used + 1 < sizeof text && (n = read(ends[0], text + used, sizeof text - 1 - used)) > 0;) used += (size_t)n;
    close(ends[0]);
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && strstr(text, "inside a pass"),
          "an allocation inside a pass aborts: status %d, %s", status, text);
    omp_set_num_threads(2);
}

/* After a pass that failed, allocation is allowed again. */
static void test_guard_is_lifted(void) {
    Error error;
    runs_with("tests/fixtures/qwen3-a", "model.layers.0.mlp.down_proj.weight", NAN, 1, &error);
    free(allocate_zeroed(1, 1));
    CHECK(!allocation_forbidden, "the guard is lifted after a failed pass");
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) test_golden(argv[i]);
    if (argc > 1) return arrfree(routes), check_report();
    test_allocation_guard(embed_and_allocate);
    test_allocation_guard(embed_and_grow);
    test_goldens_below("tests/fixtures");
    test_goldens_below("../shared/fixtures");
    static const char *fixtures[] = {"tests/fixtures/qwen3-a", "tests/fixtures/glm_moe_dsa-a", "tests/fixtures/deepseek_v32-c",
                                     "tests/fixtures/deepseek_v4-a", "tests/fixtures/deepseek_v4-c",
                                     "tests/fixtures/deepseek_v41-a", "tests/fixtures/deepseek_v41-c"};
    for (int f = 0; f < 7; f++)
        for (KvDtype dtype = KV_F32; dtype <= KV_F8; dtype++) test_independence(fixtures[f], dtype);
    static const char *wider[] = {"../shared/fixtures/deepseek_v4-c", "../shared/fixtures/deepseek_v41-c"};
    for (int f = 0; f < 2; f++)
        if (access(wider[f], R_OK) == 0) test_independence(wider[f], KV_F8);
    for (int f = 5; f < 7; f++) test_golden_qat(fixtures[f]);
    rounding = true;
    for (int f = 3; f < 7; f++)
        for (KvDtype dtype = KV_F32; dtype <= KV_F4; dtype += 3) test_independence(fixtures[f], dtype);
    test_formats_hold_what_is_rounded(fixtures[4]);
    test_formats_hold_what_is_rounded(fixtures[6]);
    rounding = false;
    for (int f = 0; f < 7; f++) test_boundaries(fixtures[f], f % 3 == 0 ? KV_BF16 : f % 3 == 1 ? KV_F32 : KV_F8);
    test_selection_is_dense_while_it_fits("tests/fixtures/glm_moe_dsa-a");
    test_selection_is_dense_while_it_fits("tests/fixtures/deepseek_v32-c");
    test_bad_weights();
    for (int f = 0; f < 4; f++) test_bad_session_in_a_round(fixtures[f]);
    test_bad_session_in_a_round(fixtures[5]);
    test_bad_rows();
    test_guard_is_lifted();
    arrfree(routes);
    return check_report();
}
