/* test_speculation.c: drafts change when a token is known, never which.
 *
 * Random configurations (drafter, width, rule of lengths, hierarchy, batch, sampling) run the same prompts as a plain engine without a
 * drafter, and every session's ids, text, end and cached rows have to be the same. The rest looks at the parts: ends inside a block and what
 * follows them, passes that fail, acceptance by rejection against the exact distribution, the choice of lengths against brute force, and
 * that a proposal does not depend on its neighbours.
 *
 * Time that the engine measures is made here: a pass costs what a test says, so that --width auto decides the same everywhere. */
#define _GNU_SOURCE
#include <time.h>

static int test_clock(clockid_t id, struct timespec *t);
#define clock_gettime test_clock
#include "../engine.c"
#include "../backend.c"
#undef clock_gettime
#include "check.h"
#include "scratch.h"
#include "stages.h"

#ifdef __SANITIZE_ADDRESS__
enum { SHARE = 8 };             /* a sanitizer takes ten times as long: one of so many */
#else
enum { SHARE = 1 };
#endif

static const char *const rule_names[] = {"full", "dvl", "confidence"};
static const char *kv_names[] = {"f32", "bf16", "fp8", "fp4"};

static int pick(const int *values, int n) { return values[random_below(n)]; }
static bool chance(int percent) { return random_below(100) < percent; }

/* ---------------------------------------------------------------------------------------------------------------------
 * An engine that is watched, and whose time is made here
 */

static struct {
    bool made;                  /* or the machine's own */
    double seconds, pass, row;  /* now; what a pass costs, and each of its rows */
    long draft_passes;          /* calls of block_attention */
    int foil;                   /* every draft becomes this token; -1: they stay */
    const int *oracle[MAX_PASS_ROWS];           /* of the session in a slot: drafts become the ids at their positions here; NULL: they stay */
    int oracle_length[MAX_PASS_ROWS], oracle_percent;           /* so many of them do */
    bool slow_copies;           /* copies between the tiers are not complete when they are first asked for */
    unsigned asked;
    bool fault;                 /* the rows of a session in a pass become NaNs behind some layer */
    int fault_session, fault_layer, layer, n_rows;
    const Row *rows;
} watch = {.foil = -1};

static int test_clock(clockid_t id, struct timespec *t) {
    if (!watch.made) return clock_gettime(id, t);
    t->tv_sec = (time_t)watch.seconds;
    t->tv_nsec = (long)((watch.seconds - (double)t->tv_sec) * 1e9);
    return 0;
}

static void timed_embed(float *y, const Matrix *embedding, const Row *rows, int n) {
    embed(y, embedding, rows, n);
    watch.seconds += watch.pass + watch.row * n;
}

static void counted_block_attention(float *y, const float *q, const float *kv, const uint8_t *ring, const RowFormat *format, int ring_rows,
                                    const DraftBlock *blocks, int n_blocks, int block_size, int window, bool causal, int heads,
                                    int kv_heads, int head_dim, float scale) {
    watch.draft_passes++;
    block_attention(y, q, kv, ring, format, ring_rows, blocks, n_blocks, block_size, window, causal, heads, kv_heads, head_dim, scale);
}

static void replace_draft(Drafts *drafts, int slot, const DraftBlock *blocks, int n) {
    for (int i = 0; i < n; i++) {
        int position = blocks[i].position + 1 + slot, token = watch.foil, s = blocks[i].session;
        bool known = watch.oracle[s] && position < watch.oracle_length[s] && position * 61 % 100 < watch.oracle_percent;
        if (known) token = watch.oracle[s][position];
        if (token >= 0) blocks[i].ids[position] = drafts->tokens[i * drafts->slots + slot] = token;
    }
}

static void watched_draw_drafts(Drafts *drafts, int slot, int end, const DraftBlock *blocks, int n, AcceptRule rule) {
    for (; slot < end; slot++) {
        draw_drafts(drafts, slot, slot + 1, blocks, n, rule);
        replace_draft(drafts, slot, blocks, n);
    }
}

static void watched_select_path(Drafts *drafts, const float *e, const Matrix *predecessor, const Matrix *successor, const DraftBlock *blocks,
                                int n, AcceptRule rule) {
    select_path(drafts, e, predecessor, successor, blocks, n, rule);
    for (int slot = 0; slot < drafts->slots; slot++) replace_draft(drafts, slot, blocks, n);
}

static void watched_entering(void *user, int layer, const float *hidden, const Row *rows, int n_rows) {
    (void)user, (void)hidden;
    watch.layer = layer;
    watch.rows = rows;
    watch.n_rows = n_rows;
}

static void faulty_add_norm(float *y, float *x, const float *branch, const float *weight, int n, int dim, float eps,
                            PassReport *report, int place) {
    for (int r = 0; watch.fault && watch.layer == watch.fault_layer && n == watch.n_rows && r < n; r++)
        if (watch.rows[r].session == watch.fault_session) x[r * dim] = NAN;
    add_norm(y, x, branch, weight, n, dim, eps, report, place);
}

/* The same in models of several streams. Stages mix theirs where no layer has been entered. */
static void faulty_mix_streams(float *y, float *streams, const float *branch, const float *leaving, float *mixes,
                               const HyperWeights *weights, const float *entering, const float *norm, int n, const Config *config,
                               PassReport *report, int place) {
    for (int r = 0; branch && watch.fault && watch.layer == watch.fault_layer && n == watch.n_rows && r < n; r++)
        if (watch.rows[r].session == watch.fault_session) ((float *)branch)[r * config->hidden_size] = NAN;
    mix_streams(y, streams, branch, leaving, mixes, weights, entering, norm, n, config, report, place);
}

/* A link that is slow, but keeps the order. */
static bool slow_finish_copy(Cache *cache, const Transfer *transfer, bool wait) {
    return (wait || !watch.slow_copies || ++watch.asked % 4 == 0) && finish_copy(cache, transfer, wait);
}

static Backend watched_backend;

static void watch_engine(Engine *engine) {
    watched_backend = c_backend;
    watched_backend.embed = timed_embed;
    watched_backend.block_attention = counted_block_attention;
    watched_backend.draw_drafts = watched_draw_drafts;
    watched_backend.select_path = watched_select_path;
    watched_backend.add_norm = faulty_add_norm;
    watched_backend.mix_streams = faulty_mix_streams;
    watched_backend.finish_copy = slow_finish_copy;
    engine->backend = engine->cache.backend = &watched_backend;
    engine->probe = (Probe){.entering = watched_entering};
    watch.fault = false;
    watch.layer = -1;
    memset(watch.oracle, 0, sizeof watch.oracle);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Pairs of a target and a drafter
 */

enum {
    QWEN3_DFLASH, QWEN3_DFLASH2, QWEN3_DSPARK, GLM_DFLASH, GLM_DFLASH2, GLM_DSPARK, LARGEST_BLOCKS, LARGE_BLOCKS, MINI_DFLASH2,
    MINI_DSPARK, V41_A, V41_C, V4_DSPARK, V4_MTP, PAIRS, FIRST_STAGES = V41_A
};

typedef struct Pair {
    const char *name, *target_from, *draft_from;    /* their checkpoints; draft_from NULL: stages inside the target */
    const char *stages, *keys;                      /* instead of target_from: join_stages() of these */
    int block_size;                                 /* of the drafter; 0: its own */
    bool confidence, dvl;                           /* it has that part of its own */
    const char *golden, *prefix;                    /* of stages inside the target: the file with their rounds, and its names' beginning */
    char *target, *draft;                           /* what find_pairs() has made of it */
} Pair;

#define DRAFTERS "tests/fixtures/drafters/"

static Pair pairs[PAIRS] = {
    [QWEN3_DFLASH] = {"qwen3-dflash", DRAFTERS "qwen3-dflash-a/target", DRAFTERS "qwen3-dflash-a/draft"},
    [QWEN3_DFLASH2] = {"qwen3-dflash2", DRAFTERS "qwen3-dflash2-a/target", DRAFTERS "qwen3-dflash2-a/draft"},
    [QWEN3_DSPARK] = {"qwen3-dspark", DRAFTERS "qwen3-dspark-a/target", DRAFTERS "qwen3-dspark-a/draft", .confidence = true},
    [GLM_DFLASH] = {"glm_moe_dsa-dflash", DRAFTERS "glm_moe_dsa-dflash2-a/target", DRAFTERS "qwen3-dflash-a/draft"},
    [GLM_DFLASH2] = {"glm_moe_dsa-dflash2", DRAFTERS "glm_moe_dsa-dflash2-a/target", DRAFTERS "glm_moe_dsa-dflash2-a/draft"},
    [GLM_DSPARK] = {"glm_moe_dsa-dspark", DRAFTERS "glm_moe_dsa-dspark-a/target", DRAFTERS "glm_moe_dsa-dspark-a/draft",
                    .confidence = true},
    [LARGEST_BLOCKS] = {"qwen3-dflash, blocks of 32", DRAFTERS "qwen3-dflash-a/target", DRAFTERS "qwen3-dflash-a/draft",
                        .block_size = MAX_BLOCK},
    [LARGE_BLOCKS] = {"glm_moe_dsa-dflash2, blocks of 20", DRAFTERS "glm_moe_dsa-dflash2-a/target",
                      DRAFTERS "glm_moe_dsa-dflash2-a/draft", .block_size = 20},
    [MINI_DFLASH2] = {"mini-dflash2", "weights/mini", "weights/draft-dflash2", .dvl = true},
    [MINI_DSPARK] = {"mini-dspark", "weights/mini", "weights/draft-dspark", .confidence = true},
    [V41_A] = {"deepseek_v41-a", "tests/fixtures/deepseek_v41-a", .confidence = true,
               .golden = "tests/fixtures/deepseek_v41-a/golden.safetensors", .prefix = "dspark."},
    [V41_C] = {"deepseek_v41-c", "tests/fixtures/deepseek_v41-c", .confidence = true,
               .golden = "tests/fixtures/deepseek_v41-c/golden.safetensors", .prefix = "dspark."},
    [V4_DSPARK] = {"deepseek_v4-dspark", .stages = "dspark", .keys = dspark_keys, .confidence = true,
                   .golden = STAGES "/dspark-golden.safetensors", .prefix = ""},
    [V4_MTP] = {"deepseek_v4-mtp", .stages = "mtp", .keys = mtp_keys, .golden = STAGES "/mtp-golden.safetensors", .prefix = ""},
};

static bool is_large(int p) { return p == MINI_DFLASH2 || p == MINI_DSPARK; }

static int hidden_size(const char *directory) {
    char path[PATH_MAX];
    Error error;
    cJSON *json = json_read(join(path, directory, "config.json"), MAX_JSON_FILE, &error);
    if (!json) fprintf(stderr, "%s\n", error.text), exit(1);
    const int size = cJSON_GetObjectItem(json, "hidden_size")->valueint;
    cJSON_Delete(json);
    return size;
}

/* Sets a number of a drafter's config.json, there or in dflash_config. Returns what it was. */
static int change_config(const char *directory, const char *key, int value) {
    char path[PATH_MAX];
    Error error;
    cJSON *json = json_read(join(path, directory, "config.json"), MAX_JSON_FILE, &error),
          *item = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "dflash_config"), key);
    if (!json) fprintf(stderr, "%s\n", error.text), exit(1);
    if (!item) item = cJSON_GetObjectItem(json, key);
    const int before = item->valueint;
    cJSON_SetNumberValue(item, value);
    char *text = cJSON_Print(json);
    write_text(directory, "config.json", text);
    cJSON_free(text);
    cJSON_Delete(json);
    return before;
}

/* A copy of a drafter whose blocks have another size: more rows than are resolved together, or as many as there can be. */
static char *resize_blocks(const char *draft, int size) {
    char *directory = copy_checkpoint(draft);
    change_config(directory, "block_size", size);
    return directory;
}

/* A copy of a DFlash drafter for a narrower target: of all that is as wide as a hidden state the first values. */
static char *narrow_drafter(const char *draft, int hidden) {
    char path[PATH_MAX], *directory = copy_checkpoint(draft);
    const int before = change_config(directory, "hidden_size", hidden);
    Checkpoint wide = {.directory = directory};
    Error error;
    if (!map_file(&wide, join(path, draft, "model.safetensors"), &error)) fprintf(stderr, "%s\n", error.text), exit(1);
    uint8_t *file = allocate_zeroed(wide.files[0].size, 1);
    cJSON *header = cJSON_CreateObject();
    size_t at = 0;
    for (size_t t = 0; t < arrlenu(wide.tensors); t++) {
        const Tensor *tensor = &wide.tensors[t];
        const bool leaves = strstr(tensor->name, "o_proj") || strstr(tensor->name, "down_proj"), flat = tensor->rank == 1;
        const int64_t cols = flat ? 1 : tensor->shape[1], width = flat || leaves ? cols : cols / before * hidden,
                      rows = leaves || (flat && tensor->shape[0] == before) || strstr(tensor->name, "fc.") ? hidden : tensor->shape[0];
        const double shape[2] = {(double)rows, (double)width}, place[2] = {(double)at, (double)at + 2 * shape[0] * shape[1]};
        for (int64_t r = 0; r < rows; r++, at += (size_t)width * 2)
            memcpy(file + at, tensor->data + r * cols * 2, (size_t)width * 2);
        cJSON *entry = cJSON_AddObjectToObject(header, tensor->name);
        cJSON_AddStringToObject(entry, "dtype", "BF16");
        cJSON_AddItemToObject(entry, "shape", cJSON_CreateDoubleArray(shape, tensor->rank));
        cJSON_AddItemToObject(entry, "data_offsets", cJSON_CreateDoubleArray(place, 2));
    }
    char *text = cJSON_PrintUnformatted(header);
    const uint64_t length = strlen(text);
    uint8_t *all = allocate_zeroed(8 + length + at, 1);
    memcpy(all, &length, 8), memcpy(all + 8, text, length), memcpy(all + 8 + length, file, at);
    write_bytes(directory, "model.safetensors", all, 8 + length + at);
    free(all), free(file), free(text), cJSON_Delete(header);
    wide.directory = NULL;
    checkpoint_close(&wide);
    return directory;
}

/* Targets and drafters, and copies of drafters where theirs are of another width or of another block. */
static void find_pairs(void) {
    for (Pair *pair = pairs; pair < pairs + PAIRS; pair++) {
        pair->target = pair->stages ? join_stages(pair->stages, pair->keys) : copy_string(pair->target_from);
        const char *draft = pair->draft_from;
        if (!draft) pair->draft = copy_string("own");
        else if (pair->block_size) pair->draft = resize_blocks(draft, pair->block_size);
        else if (hidden_size(draft) != hidden_size(pair->target)) pair->draft = narrow_drafter(draft, hidden_size(pair->target));
        else pair->draft = copy_string(draft);
    }
}

static void forget_pairs(void) {
    for (int i = 0; i < PAIRS; i++) free(pairs[i].target), free(pairs[i].draft);
}

/* Tokens of one to three letters for a model that has none, so that stop strings end inside of them; the first two are the halves of a
 * character. */
static Tokenizer *make_tokenizer(int vocab) {
    char text[8192], *at = text;
    Error error;
    at += sprintf(at, "{\"version\":\"1.0\",\"added_tokens\":[],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                      "\"use_regex\":true},\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"vocab\":{\"\303\203\":0,\"\302\251\":1");
    for (int i = 2; i < vocab && i < 96; i++)
        at += sprintf(at, ",\"%.*s%c\":%d", i % 3, i / 26 % 2 ? "ea" : "ou", i < 50 ? 'A' + i % 26 : 'a' + i % 26, i);
    for (int i = 96; i < vocab; i++) at += sprintf(at, ",\"u%d\":%d", i, i);
    sprintf(at, "},\"merges\":[]}}");
    Tokenizer *tokenizer = tokenizer_parse(text, strlen(text), NULL, 0, "made", &error);
    CHECK(tokenizer, "%s", error.text);
    return tokenizer;
}

static float predictor_weights[MAX_BLOCK * MAX_BLOCK * DVL_FEATURES], predictor_bias[MAX_BLOCK];

/* A predictor of lengths for a drafter that has none: it says anything between nothing and all. */
static void make_predictor(Drafter *drafter) {
    int slots = drafter->config.slots, in = slots * DVL_FEATURES;
    if (drafter->predictor.layers) return;
    for (int i = 0; i < slots * in; i++) predictor_weights[i] = 0.02f * random_float();
    for (int i = 0; i < slots; i++) predictor_bias[i] = 1 - 0.3f * (float)i;
    drafter->predictor = (LengthPredictor){.layers = 1, .bias = {predictor_bias},
                                           .weight = {{.data = (const uint8_t *)predictor_weights, .dtype = DTYPE_F32, .rows = slots, .cols = in}}};
}

/* drafts: with its drafter, or plain. eos: ids that end a generation, beside the checkpoint's. */
static bool open_pair(Runner *runner, const Pair *pair, bool drafts, EngineOptions options, const int *eos, int n_eos) {
    Error error;
    options.model = pair->target;
    options.draft = drafts && !pair->golden ? pair->draft : NULL;
    options.stages = drafts && pair->golden ? STAGES_REQUIRED : STAGES_IDLE;
    bool ok = runner_open(runner, &options, false, NULL, &error);
    CHECK(ok, "%s: %s", pair->name, error.text);
    if (!ok) return false;
    Engine *engine = &runner->engine;
    if (!runner->tokenizer) runner->tokenizer = make_tokenizer(engine->config.vocab_size);
    for (int i = 0; i < n_eos; i++) engine->config.eos_token_id[engine->config.n_eos++] = eos[i];
    if (drafts) make_predictor(&engine->drafter);
    watch_engine(engine);
    return true;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Equality: prompts, and what plain decoding says to them
 */

enum { SCRIPTS = 6, TALKS = 48, MOST_SESSIONS = 33, LONGEST = 640, MOST_NEW = 24 };

typedef struct Talk {
    int *prompt;                /* stb_ds */
    int max_new;
    Sampling sampling;
    uint64_t stream;
    char **stops;               /* stb_ds */
    int *ids;                   /* stb_ds; all of what follows: as plain decoding has it */
    char *text;                 /* stb_ds */
    int cached;
    Finish finish;
} Talk;

typedef struct Pool {           /* of one pair and one kind of rows */
    const Pair *pair;
    KvDtype dtype;
    int context, n_talks, eos[2];
    Talk talks[TALKS];
} Pool;

static void take_text(Session *session, const char *text, size_t length) {
    char **seen = session->user;
    memcpy(arraddnptr(*seen, length), text, length);
}

static Session begin_talk(const Talk *talk, Engine *engine, int slot, bool continues) {
    Session session = {.slot = slot, .stream = talk->stream, .max_new = talk->max_new, .continues = continues, .sampling = talk->sampling,
                       .stops = talk->stops};
    memcpy(arraddnptr(session.ids, arrlenu(talk->prompt)), talk->prompt, arrlenu(talk->prompt) * sizeof(int));
    session_begin(&session, engine);
    return session;
}

static bool equal_bytes(const void *a, size_t n_a, const void *b, size_t n_b) { return n_a == n_b && (!n_a || !memcmp(a, b, n_a)); }

/* What plain decoding says. */
static void answer_talk(Runner *runner, Talk *talk) {
    Session session = begin_talk(talk, &runner->engine, 0, false);
    run_session(runner, &session);
    arrsetlen(talk->ids, arrlenu(session.ids));
    memcpy(talk->ids, session.ids, arrlenu(session.ids) * sizeof(int));
    arrsetlen(talk->text, arrlenu(session.text));
    if (arrlenu(session.text)) memcpy(talk->text, session.text, arrlenu(session.text));
    talk->cached = session.cached;
    talk->finish = session.finish;
    session_free(&session);
    cache_release(&runner->engine.cache, 0);
}

/* Ends the talk at some place of what was said, often inside a token. */
static void add_stop(Talk *talk) {
    int length = (int)arrlen(talk->text), at = length ? random_below(length) : 0, size = length - at < 4 ? length - at : 1 + random_below(4);
    if (!size || memchr(talk->text + at, 0, (size_t)size)) return;
    char *stop = allocate_zeroed((size_t)size + 1, 1);
    memcpy(stop, talk->text + at, (size_t)size);
    arrput(talk->stops, stop);
}

static Sampling draw_sampling(void) {
    static const float temperatures[] = {0, 0, 0.7f, 1};
    Sampling sampling = {.temperature = temperatures[random_below(4)], .top_p = chance(30) ? 0.9f : 1, .min_p = chance(20) ? 0.05f : 0,
                         .repeat_penalty = chance(25) ? 1.1f : 1, .top_k = chance(30) ? 4 + random_below(30) : 0, .seed = 3 + random_word()};
    return sampling;
}

/* The prompt of stages' golden rounds, and what follows it. */
static int read_stage_prompt(int *ids, const char *path, const char *prefix) {
    Checkpoint golden = {.directory = ""};
    Error error;
    char name[64];
    int n = 0;
    snprintf(name, sizeof name, "%sgreedy", prefix);
    CHECK(map_file(&golden, path, &error), "%s", error.text);
    for (int part = 0; part < 2; part++) {
        const Tensor *tensor = checkpoint_find(&golden, part ? name : "input_ids");
        for (size_t i = 0; tensor && i < tensor->size / 4; i++) memcpy(&ids[n++], tensor->data + 4 * i, 4);
    }
    CHECK(n, "%s: has no prompt", path);
    golden.directory = NULL;
    checkpoint_close(&golden);
    return n;
}

/* What the drafter was trained on, as far as the target knows it: the fixture's prompt with its continuation, or a text. Returns how many ids. */
static int read_familiar(int *ids, const Pair *pair, const Runner *runner) {
    Checkpoint golden;
    Error error;
    int n = 0, *text = NULL;
    char *directory = copy_string(pair->target), *end = strstr(directory, "/target");
    if (pair->golden) n = read_stage_prompt(ids, pair->golden, pair->prefix);
    else if (!end) {
        const char *line = "The old man went down to the river. He saw a small boat there, and a dog that was asleep in it.";
        CHECK(tokenizer_encode(runner->tokenizer, line, strlen(line), false, &text, &error), "%s", error.text);
        for (; n < (int)arrlen(text); n++) ids[n] = text[n];
        arrfree(text);
    } else if (*end = 0, checkpoint_open(&golden, directory, &error)) {
        static const char *const names[] = {"prompt_ids", "output_ids"};
        for (int part = 0; part < 2; part++) {
            const Tensor *tensor = checkpoint_find(&golden, names[part]);
            for (size_t i = 0; tensor && i < tensor->size / 4; i++) memcpy(&ids[n++], tensor->data + 4 * i, 4);
        }
        checkpoint_close(&golden);
    } else CHECK(false, "%s", error.text);
    free(directory);
    return n;
}

static bool open_pool(Pool *pool, const Pair *pair, KvDtype dtype, int context, int n_talks) {
    Runner runner;
    int scripts[SCRIPTS][LONGEST], edges[] = {1, 1, 2, 63, 64, 65, 66, 128, 129};
    *pool = (Pool){.pair = pair, .dtype = dtype, .context = context, .n_talks = n_talks};
    EngineOptions options = {.sessions = 1, .context = context, .kv_dtype = dtype};
    if (!open_pair(&runner, pair, false, options, NULL, 0)) return false;
    int vocab = runner.engine.config.vocab_size;
    for (int i = 0; i < SCRIPTS; i++) {             /* each leaves an earlier one somewhere */
        int common = i ? random_below(context / 2) : read_familiar(scripts[0], pair, &runner);
        if (i) memcpy(scripts[i], scripts[chance(50) ? 0 : random_below(i)], (size_t)common * sizeof(int));
        for (int p = common; p < context; p++) scripts[i][p] = random_below(vocab);
    }
    for (int t = 0; t < n_talks; t++) {
        Talk *talk = &pool->talks[t];
        int length = chance(25) ? pick(edges, 9) : chance(12) ? 1 + random_below(context - 1) : 1 + random_below(40);
        *talk = (Talk){.max_new = 1 + random_below(MOST_NEW), .sampling = draw_sampling(), .stream = (uint64_t)t << 33 | (unsigned)t};
        if (length >= context) length = context - 1;
        if (chance(15) && length < context - 1) length = context - 1 - random_below(10), talk->max_new = 0;
        if (!t && context > MAX_PASS_ROWS + 10) length = MAX_PASS_ROWS + 5;
        memcpy(arraddnptr(talk->prompt, (size_t)length), scripts[chance(30) ? 0 : random_below(SCRIPTS)], (size_t)length * sizeof(int));
        if (t >= 2) continue;                       /* an end is something that the model says */
        answer_talk(&runner, talk);
        pool->eos[t] = talk->ids[arrlen(talk->prompt) + random_below((int)(arrlen(talk->ids) - arrlen(talk->prompt)))];
    }
    memcpy(runner.engine.config.eos_token_id, pool->eos, sizeof pool->eos);
    runner.engine.config.n_eos = 2;
    for (int t = 0; t < n_talks; t++) {
        Talk *talk = &pool->talks[t];
        answer_talk(&runner, talk);
        if (!chance(30)) continue;
        add_stop(talk);
        answer_talk(&runner, talk);
    }
    runner_close(&runner);
    return true;
}

static void close_pool(Pool *pool) {
    for (int t = 0; t < pool->n_talks; t++) {
        Talk *talk = &pool->talks[t];
        for (size_t i = 0; i < arrlenu(talk->stops); i++) free(talk->stops[i]);
        arrfree(talk->prompt), arrfree(talk->stops), arrfree(talk->ids), arrfree(talk->text);
    }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Equality: configurations
 */

enum { WIDTHS = 7 };

static const int widths[WIDTHS] = {1, 2, 3, 5, 8, MAX_BLOCK + 1, 0};

static struct {
    long trials, talks, tokens, rounds, accepted, rejected, mixed, runs_of_blocks, waits, stopped_inside, ended_inside, by_limit, by_context,
        least, failed_rounds, failed_sessions;
    long pair[PAIRS], width[WIDTHS], verify[3], seeded, batch[4], mode[MODES], dtype[4], temperature[3], top_k, top_p, min_p, penalty,
        single, shared, longer;
    CacheStats cache;
} seen;

typedef struct Trial {
    EngineOptions options;
    int width, batch, oracle_percent;
    VerifyRule verify;
    bool seeded, faults, slow_copies;
    char text[320];
} Trial;

/* What a round that went through shows. drafted: it had drafts. */
static void observe(const Runner *runner, bool drafted) {
    const Drafts *drafts = &runner->engine.drafter.state.drafts;
    const State *state = &runner->engine.state;
    bool mixed = false;
    seen.rounds++;
    for (int i = 0; drafted && i < drafts->blocks; i++) {
        const Session *session = runner->owners[i];
        int taken = runner->accepted[i], count = runner->blocks[i].count;
        mixed |= count != runner->blocks[0].count;
        bool inside = session->finish == FINISH_STOP && taken + 1 < count && arrlast(session->ids) == drafts->tokens[i * drafts->slots + taken];
        seen.stopped_inside += inside && !ends_generation(runner, arrlast(session->ids));
        seen.ended_inside += inside && ends_generation(runner, arrlast(session->ids));
        seen.by_limit += count > 1 && session->finish == FINISH_LENGTH;
        seen.by_context += count > 1 && session->finish == FINISH_CONTEXT;
        CHECK(session->finish == FINISH_ERROR || arrlen(session->ids) == session->cached + 1, "%zd ids, %d of them cached", arrlen(session->ids),
              session->cached);
    }
    seen.mixed += mixed;
    if (!runner->engine.cache.hot_rows || !drafted) return;
    for (int run = 0, first = 0; run < state->n_runs; first = state->run_ends[run++]) {
        int several = 0;
        for (int r = first; r + 1 < state->run_ends[run]; r++)
            several += runner->rows[r].session == runner->rows[r + 1].session && (r == first || runner->rows[r - 1].session != runner->rows[r].session);
        seen.runs_of_blocks += several > 1;
    }
}

static void compare_talk(const Trial *trial, const Session *session, const Talk *talk, const char *emitted) {
    size_t n = arrlenu(session->ids), wanted = arrlenu(talk->ids);
    bool whole = session->finish != FINISH_ERROR, same = n <= wanted && !memcmp(session->ids, talk->ids, n * sizeof(int));
    CHECK(same && (!whole || n == wanted), "%s: a prompt of %zu: %zu ids%s, not %zu", trial->text, arrlenu(talk->prompt), n,
          same ? "" : ", other ones", wanted);
    CHECK(!whole || (session->finish == talk->finish && session->cached == talk->cached), "%s: end %d with %d rows, not %d with %d", trial->text,
          session->finish, session->cached, talk->finish, talk->cached);
    CHECK(!whole || equal_bytes(session->text, arrlenu(session->text), talk->text, arrlenu(talk->text)), "%s: other text", trial->text);
    CHECK(equal_bytes(session->text, arrlenu(session->text), emitted, arrlenu(emitted)), "%s: what was passed on is not the text", trial->text);
    const Sampling *sampling = &talk->sampling;
    seen.talks++;
    seen.tokens += (long)(n - arrlenu(talk->prompt));
    seen.temperature[sampling->temperature > 0 ? sampling->temperature < 1 ? 1 : 2 : 0]++;
    seen.top_k += sampling->top_k > 0, seen.top_p += sampling->top_p < 1, seen.min_p += sampling->min_p > 0;
    seen.penalty += sampling->repeat_penalty != 1;
    seen.single += arrlen(talk->prompt) == 1;
    seen.longer += arrlen(talk->prompt) > MAX_PASS_ROWS;
}

static void run_trial(const Pool *pool, Trial *trial) {
    Runner runner;
    const Talk *talk_of[MOST_SESSIONS] = {NULL};
    Session sessions[MOST_SESSIONS];
    char *emitted[MOST_SESSIONS] = {NULL};
    int slots = trial->options.sessions, begun = 0, running = 0, rounds = 0, waiting = -1;
    omp_set_num_threads(1 + chance(10));
    if (!open_pair(&runner, pool->pair, true, trial->options, NULL, 0)) return;
    Cache *cache = &runner.engine.cache;
    SpeculationStats *stats = &runner.speculation.stats;
    watch.oracle_percent = trial->oracle_percent;
    watch.slow_copies = trial->slow_copies;
    runner.speculation.width = trial->width;
    runner.speculation.verify = trial->verify;
    runner.speculation.seeded = trial->seeded;
    memcpy(runner.engine.config.eos_token_id, pool->eos, sizeof pool->eos);
    runner.engine.config.n_eos = 2;
    for (; (begun < trial->batch || running) && rounds < 3000; rounds++) {
        for (; waiting >= 0 || (begun < trial->batch && running < slots && (!running || chance(60))); waiting = -1) {
            if (waiting < 0) {
                for (waiting = 0; talk_of[waiting];) waiting++;
                talk_of[waiting] = &pool->talks[random_below(pool->n_talks)];
                sessions[waiting] = begin_talk(talk_of[waiting], &runner.engine, waiting, chance(20));
                sessions[waiting].emit = take_text;
                sessions[waiting].user = &emitted[waiting];
                watch.oracle[waiting] = talk_of[waiting]->ids;
                watch.oracle_length[waiting] = (int)arrlen(talk_of[waiting]->ids);
                begun++, running++;
            }
            if (!session_admit(&runner, &sessions[waiting])) break;
        }
        Session *pass[MOST_SESSIONS];
        int n = 0;
        for (int s = 0; s < slots; s++)
            if (talk_of[s]) pass[n++] = &sessions[s];
        if (trial->faults && n && chance(15)) {
            watch.fault = true;
            watch.fault_session = pass[random_below(n)]->slot;
            watch.fault_layer = random_below(runner.engine.config.num_hidden_layers);
        }
        uint64_t drafted = stats->rounds, before = stats->accepted;
        long ran = runner.rounds;
        run_round(&runner, pass, n);
        watch.fault = false;
        seen.accepted += (long)(stats->accepted - before);
        if (runner.rounds > ran) observe(&runner, stats->rounds > drafted);
        else if (n && pass[0]->plain) seen.failed_rounds++;
        for (int s = 0; s < slots; s++) {
            if (!talk_of[s]) continue;
            seen.waits += !sessions[s].drafts && sessions[s].drafted >= 0 && trial->width == 0;
            if (sessions[s].finish == RUNNING || s == waiting) continue;
            CHECK(sessions[s].finish != FINISH_ERROR || trial->faults, "%s: %s", trial->text, sessions[s].error.text);
            seen.failed_sessions += sessions[s].finish == FINISH_ERROR;
            compare_talk(trial, &sessions[s], talk_of[s], emitted[s]);
            session_free(&sessions[s]);
            arrfree(emitted[s]);
            cache_release(cache, s);
            talk_of[s] = NULL;
            running--;
        }
    }
    CHECK(rounds < 3000, "%s: everybody gets through", trial->text);
    watch.slow_copies = false;
    for (int i = 0; i < 8; i++) cache_step(cache);
    CHECK(cache->device_pages.n_free == cache->device_pages.n_pages - 1, "%s: %d of %d pages are free at the end", trial->text,
          cache->device_pages.n_free, cache->device_pages.n_pages - 1);
    CHECK(trial->width != 1 || !stats->rounds, "%s: drafts at width 1", trial->text);
    seen.rejected += (long)(stats->verified - stats->accepted);
    seen.cache.staged += cache->stats.staged, seen.cache.pages_recalled += cache->stats.pages_recalled;
    seen.cache.tail_waits += cache->stats.tail_waits, seen.cache.picked[TIER_HOST] += cache->stats.picked[TIER_HOST];
    seen.cache.admission_waits += cache->stats.admission_waits, seen.shared += (long)cache->stats.shared_pages;
    runner_close(&runner);
    omp_set_num_threads(1);
}

/* One configuration by chance, or with the values that are not negative. */
static void draw_trial(const Pool *pool, int fixed_width, int fixed_verify, int fixed_batch, int fixed_mode) {
    static const int batches[4] = {1, 5, 16, 33};
    Trial trial = {.faults = chance(15), .slow_copies = chance(40), .oracle_percent = chance(50) ? 0 : 50 + random_below(51)};
    EngineOptions *options = &trial.options;
    Engine engine;
    Error error;
    int w = fixed_width >= 0 ? fixed_width : random_below(WIDTHS), b = fixed_batch >= 0 ? fixed_batch : chance(50) ? random_below(2) : random_below(4);
    trial.width = widths[w];
    trial.verify = fixed_verify >= 0 ? (VerifyRule)fixed_verify : (VerifyRule)random_below(pool->pair->confidence ? 3 : 2);
    if (trial.verify == VERIFY_CONFIDENCE && !pool->pair->confidence) trial.verify = VERIFY_DVL;
    trial.seeded = trial.verify == VERIFY_DVL && chance(40);
    trial.batch = batches[b] + (chance(30) ? random_below(4) : 0);
    *options = (EngineOptions){.model = pool->pair->target, .sessions = batches[b], .context = pool->context,
                               .draft = pool->pair->golden ? NULL : pool->pair->draft,
                               .stages = pool->pair->golden ? STAGES_REQUIRED : STAGES_IDLE,
                               .kv_dtype = pool->dtype, .kv_mode = fixed_mode >= 0 ? (KvMode)fixed_mode : (KvMode)random_below(MODES),
                               .reclaim = (Reclaim)random_below(2), .lookup = (Lookup)random_below(2)};
    if (!engine_plan(&engine, options, &error)) { CHECK(false, "%s", error.text); return; }
    int topk = engine.cache.index_topk, stretch = 1;
    for (int i = 0; i < engine.cache.sources; i++) stretch = larger(stretch, stretch_of(&engine.cache, i));
    topk *= stretch;                                /* the coarsest source has that much fewer slots */
    engine_close(&engine);
    if (topk && chance(80)) options->hot_rows = topk + (chance(40) ? 0 : random_below(3 * topk));
    if (!engine_plan(&engine, options, &error)) { CHECK(false, "%s", error.text); return; }
    size_t least = engine.cache.least_bytes, most = engine.cache.bytes, least_host = engine.cache.least_host_bytes, host = engine.cache.host_bytes;
    engine_close(&engine);
    int reach = chance(30) ? 0 : chance(60) ? random_below(20) : random_below(100);
    if (chance(85)) options->kv_budget = least + (size_t)((double)(most > least ? most - least : 0) * reach / 100);
    if (chance(30)) options->host_budget = least_host + (size_t)((double)(host - least_host) * random_below(100) / 100);
    static const double costs[] = {0.1, 1, 10};
    watch.pass = costs[random_below(3)];
    watch.row = costs[random_below(3)] / 20;
    snprintf(trial.text, sizeof trial.text, "trial %ld: %s, %s rows, --width %d --verify %s%s --kv %s --hot %d --slots %d -c %d --kv-budget %zu "
             "--host-budget %zu", seen.trials, pool->pair->name, kv_names[pool->dtype], trial.width, rule_names[trial.verify],
             trial.seeded ? " --allocate seeded" : "", kv_mode_names[options->kv_mode], options->hot_rows, options->sessions, options->context,
             options->kv_budget, options->host_budget);
    seen.trials++;
    seen.least += options->kv_budget == least;
    seen.pair[pool->pair - pairs]++, seen.width[w]++, seen.verify[trial.verify]++, seen.seeded += trial.seeded, seen.batch[b]++;
    seen.mode[options->kv_mode]++, seen.dtype[pool->dtype]++;
    run_trial(pool, &trial);
}

static void test_equality(void) {
    static const int contexts[] = {192, LONGEST, 256, 320};
    Pool *pool = allocate_zeroed(1, sizeof *pool);
    watch.made = true;
    for (int p = 0; p < PAIRS; p++)
        for (KvDtype dtype = KV_F32; dtype <= (p < FIRST_STAGES ? KV_F8 : KV_F4); dtype++) {
            bool large = is_large(p);
            int trials = large ? 2 : p >= FIRST_STAGES ? 8 : p >= GLM_DFLASH ? 16 : 9, failed = checks_failed;
            if (SHARE > 1 && (large || dtype != (KvDtype)(p % 3))) continue;
            if (large && dtype == (KvDtype)(p - MINI_DFLASH2)) continue;
            if (!open_pool(pool, &pairs[p], dtype, large ? 224 : contexts[dtype], large ? 8 : SHARE > 1 || p >= FIRST_STAGES ? 12 : TALKS)) continue;
            for (int i = 0; i < (trials + SHARE - 1) / SHARE && checks_failed == failed; i++) {
                if (large) draw_trial(pool, 4 + 2 * (i % 2), 1 + p - MINI_DFLASH2, i % 2, i % 2 ? MODE_ADAPTIVE : MODE_HISPARSE);
                else draw_trial(pool, i < WIDTHS ? i : -1, i % 3, i < 3 ? 1 + i : -1, p >= GLM_DFLASH && i >= 3 ? MODE_HISPARSE + i % 2 : -1);
            }
            close_pool(pool);
        }
    free(pool);
    watch.made = false;
    printf("%ld configurations: %ld prompts, %ld tokens in %ld rounds; drafts: %ld accepted, %ld rejected; rounds: %ld of several lengths, %ld runs "
           "of several blocks; %ld sessions waited\n", seen.trials, seen.talks, seen.tokens, seen.rounds, seen.accepted, seen.rejected, seen.mixed,
           seen.runs_of_blocks, seen.waits);
    printf("inside a block: %ld stop strings, %ld ends of turn; %ld generations ended by length and %ld by context in a block of several rows; "
           "%ld rounds failed, %ld sessions\n", seen.stopped_inside, seen.ended_inside, seen.by_limit, seen.by_context, seen.failed_rounds,
           seen.failed_sessions);
    printf("%lu rows staged, %lu from the host, %lu pages recalled, %lu waits for a tail, %lu to be admitted, %ld pages shared, %ld least budgets\n",
           seen.cache.staged, seen.cache.picked[TIER_HOST], seen.cache.pages_recalled, seen.cache.tail_waits, seen.cache.admission_waits, seen.shared,
           seen.least);
    if (SHARE > 1) return;
    CHECK(seen.trials >= 250, "%ld configurations are fewer than 250", seen.trials);
    for (int i = 0; i < PAIRS; i++) CHECK(seen.pair[i], "pair %s had no turn", pairs[i].name);
    for (int i = 0; i < WIDTHS; i++) CHECK(seen.width[i], "width %d had no turn", widths[i]);
    for (int i = 0; i < 3; i++)
        CHECK(seen.verify[i] && seen.mode[i] && seen.dtype[i] && seen.temperature[i], "rule, mode, rows or temperature %d had no turn", i);
    for (int i = 0; i < 4; i++) CHECK(seen.batch[i], "batch %d had no turn", i);
    CHECK(seen.seeded && seen.top_k && seen.top_p && seen.min_p && seen.penalty && seen.single && seen.shared && seen.longer && seen.least,
          "seeded lengths, every filter, single tokens, shared and long prompts, and the least budget had a turn");
    CHECK(seen.accepted && seen.rejected && seen.mixed && seen.runs_of_blocks && seen.waits && seen.stopped_inside && seen.ended_inside
              && seen.by_limit && seen.by_context, "everything that drafts do has happened");
    CHECK(seen.cache.staged && seen.cache.picked[TIER_HOST] && seen.cache.pages_recalled && seen.cache.tail_waits && seen.cache.admission_waits,
          "everything that the hierarchy does has happened");
    CHECK(seen.failed_rounds && seen.failed_sessions, "rounds failed, and sessions");
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Conversations: what follows an end inside a block
 */

/* A session that goes on, goes back, is interrupted, saved and restored, beside a plain one that does the same. */
static void interrupt_after(Session *session, const char *text, size_t length) {
    take_text(session, text, length);
    if (chance(20)) interrupted = 1;
}

static bool move_session(Runner *runner, Session *session, const char *path) {
    Error error;
    FILE *file;
    bool ok = session_save(runner, session, path, NULL, &error);
    cJSON *header = ok ? session_open(runner, path, &file, &error) : NULL;
    ok = header && session_restore(runner, session, header, file, path, &error);
    if (header) fclose(file);
    cJSON_Delete(header);
    CHECK(ok, "saving and restoring: %s", error.text);
    return ok;
}

static void test_conversation(const Pair *pair, KvMode mode, int width, VerifyRule verify, int turns) {
    Runner runner[2];                               /* plain, with drafts */
    Session session[2];
    char *emitted = NULL, path[PATH_MAX], *directory = scratch_directory(), *stops[2] = {(char[]){"A"}, (char[]){"uB"}}, **list = NULL;
    int stopped = 0, interruptions = 0, context = 400;
    EngineOptions options = {.sessions = 2, .context = context, .kv_dtype = KV_BF16, .kv_mode = mode};
    join(path, directory, "session");
    free(directory);
    if (!open_pair(&runner[0], pair, false, options, NULL, 0) || !open_pair(&runner[1], pair, true, options, NULL, 0)) return;
    runner[1].speculation.width = width;
    runner[1].speculation.verify = verify;
    int vocab = runner[0].engine.config.vocab_size, eos = random_below(vocab), prompt[LONGEST], n = read_familiar(prompt, pair, &runner[0]);
    for (int i = 0; i < 2; i++) {
        runner[i].engine.config.n_eos = 1;
        runner[i].engine.config.eos_token_id[0] = eos;
        session[i] = (Session){.continues = true, .stream = 9, .sampling = {.temperature = 0.7f, .top_p = 1, .repeat_penalty = 1, .seed = 21}};
        memcpy(arraddnptr(session[i].ids, (size_t)n), prompt, (size_t)n * sizeof(int));
    }
    arrput(list, stops[0]), arrput(list, stops[1]);
    for (int turn = 0, failed = checks_failed; turn < turns && checks_failed == failed; turn++) {
        int start = (int)arrlen(session[0].ids), what = random_below(4), more = 1 + random_below(12), back = random_below(start);
        if (turn && (what == 0 || start > context - 60)) {                  /* /regen, or further back */
            for (int i = 0; i < 2; i++) {
                arrsetlen(session[i].ids, (size_t)(start > context - 60 ? n : back + 1));
                if (session[i].cached > (int)arrlen(session[i].ids)) session[i].cached = (int)arrlen(session[i].ids);
                session[i].stream++;
            }
        } else if (turn && what == 1) {
            for (int i = 0; i < 2; i++)
                if (!move_session(&runner[i], &session[i], path)) return;
        } else if (turn)
            for (int k = 0; k < more; k++) {
                int id = random_below(vocab);
                arrput(session[0].ids, id), arrput(session[1].ids, id);
            }
        bool interrupts = chance(30);
        float temperature = chance(50) ? 0 : 0.8f;
        int most = 1 + random_below(30);
        char **ends = chance(40) ? list : NULL;
        for (int i = 1; i >= 0; i--) {
            session[i].max_new = i || !interrupts ? most : tokens_generated(&session[1]);
            session[i].sampling.temperature = temperature;
            session[i].stops = ends;
            session[i].emit = i ? interrupts ? interrupt_after : take_text : NULL;
            session[i].user = &emitted;
            session_begin(&session[i], &runner[i].engine);
            run_session(&runner[i], &session[i]);
            interruptions += interrupted;
            interrupted = 0;
        }
        bool same_end = session[0].finish == session[1].finish || (session[1].finish == FINISH_INTERRUPTED && session[0].finish == FINISH_LENGTH);
        stopped += session[1].finish == FINISH_STOP;
        CHECK(equal_bytes(session[0].ids, arrlenu(session[0].ids), session[1].ids, arrlenu(session[1].ids))
                  && !memcmp(session[0].ids, session[1].ids, arrlenu(session[0].ids) * sizeof(int)), "%s, turn %d: %zd ids, or other ones, not %zd",
              pair->name, turn, arrlen(session[1].ids), arrlen(session[0].ids));
        CHECK(same_end && session[0].cached == session[1].cached, "%s, turn %d: end %d at %d, not %d at %d: %s", pair->name, turn, session[1].finish,
              session[1].cached, session[0].finish, session[0].cached, session[1].error.text);
        CHECK(equal_bytes(session[0].text, arrlenu(session[0].text), session[1].text, arrlenu(session[1].text))
                  && equal_bytes(emitted, arrlenu(emitted), session[1].text, arrlenu(session[1].text)), "%s, turn %d: other text", pair->name, turn);
        arrsetlen(emitted, 0);
    }
    printf("%s: a conversation of %d turns, %d stopped, %d interrupted\n", pair->name, turns, stopped, interruptions);
    arrfree(emitted), arrfree(list);
    for (int i = 0; i < 2; i++) session_free(&session[i]), runner_close(&runner[i]);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Passes that fail
 */

/* Four sessions in one batch; ids[i] receives what each says. poisoned: the row of that session's position 2, or the newest of a window,
 * becomes NaNs on the device before round 3; -1: none. Returns how many rounds with drafts failed and were run again. */
enum { GROUP = 4, GROUP_NEW = 24 };

static int run_group(Runner *runner, int *prompts[GROUP], int *ids[GROUP], Finish finish[GROUP], int poisoned) {
    Session sessions[GROUP], *pass[GROUP];
    int again = 0, running = GROUP, rounds = 0;
    for (int i = 0; i < GROUP; i++) {
        sessions[i] = (Session){.slot = i, .stream = (uint64_t)i, .max_new = GROUP_NEW, .sampling = {.top_p = 1, .repeat_penalty = 1}};
        memcpy(arraddnptr(sessions[i].ids, arrlenu(prompts[i])), prompts[i], arrlenu(prompts[i]) * sizeof(int));
        session_begin(&sessions[i], &runner->engine);
        session_admit(runner, &sessions[i]);
    }
    for (; running && rounds < 500; rounds++) {
        long ran = runner->rounds;
        if (poisoned >= 0 && rounds == 3) {
            Cache *cache = &runner->engine.cache;
            DevicePage page = cache->session[poisoned].pages[0].device;
            const Trail *window = cache->trail_layers ? &cache->trails[TRAILS + TRAIL_WINDOW] : NULL;
            int newest = cache->session[poisoned].committed - 1;
            if (window) memset(window->ring + (size_t)(poisoned * window->length + newest % window->length) * window->stride, 0xff, window->stride);
            else memset(source_rows(cache, (SourceId){1}) + (size_t)row_of_page(page, 2).id * cache->format.stride, 0xff, cache->format.bytes);
        }
        running = 0;
        for (int i = 0; i < GROUP; i++)
            if (sessions[i].finish == RUNNING) pass[running++] = &sessions[i];
        run_round(runner, pass, running);
        bool redrafts = ran == runner->rounds && running && pass[0]->plain;
        again += redrafts;
        for (int i = 0; i < running && redrafts; i++)
            CHECK(pass[i]->plain && pass[i]->finish == RUNNING, "after a round with drafts failed all of it is run again without");
    }
    CHECK(rounds < 500, "everybody gets through");
    for (int i = 0; i < GROUP; i++) {
        arrsetlen(ids[i], arrlenu(sessions[i].ids));
        memcpy(ids[i], sessions[i].ids, arrlenu(sessions[i].ids) * sizeof(int));
        finish[i] = sessions[i].finish;
        session_free(&sessions[i]);
        cache_release(&runner->engine.cache, i);
    }
    return again;
}

static bool same_ids(const int *a, const int *b) { return arrlen(a) == arrlen(b) && !memcmp(a, b, arrlenu(a) * sizeof(int)); }

/* A token that a drafter proposes and nobody says or was told, found in the trace; -1: there is none. */
static int find_rejected(FILE *trace, int *said[GROUP], int vocab) {
    char *line = NULL;
    size_t size = 0;
    int *proposed = allocate_zeroed((size_t)vocab, sizeof(int)), best = -1;
    rewind(trace);
    while (getline(&line, &size, trace) > 0) {
        cJSON *json = cJSON_Parse(line), *session, *id;
        CHECK(json, "a line of the trace is JSON: %s", line);
        cJSON_ArrayForEach(session, cJSON_GetObjectItem(json, "sessions")) {
            int left = cJSON_GetObjectItem(session, "verified")->valueint;
            cJSON_ArrayForEach(id, cJSON_GetObjectItem(session, "proposed")) if (left-- > 0) proposed[id->valueint]++;
        }
        cJSON_Delete(json);
    }
    free(line);
    for (int i = 0; i < GROUP; i++)
        for (int j = 0; j < (int)arrlen(said[i]); j++) proposed[said[i][j]] = 0;
    for (int id = 0; id < vocab; id++)
        if (proposed[id] && (best < 0 || proposed[id] > proposed[best])) best = id;
    free(proposed);
    return best;
}

static void test_failures(const Pair *pair) {
    Runner runner;
    int *prompts[GROUP] = {NULL}, *wanted[GROUP] = {NULL}, *found[GROUP] = {NULL};
    Finish finish[GROUP], ends[GROUP];
    EngineOptions options = {.sessions = GROUP, .context = 96, .kv_dtype = KV_F32};
    Pair spoiled = *pair;
    if (!open_pair(&runner, pair, false, options, NULL, 0)) return;
    int vocab = runner.engine.config.vocab_size, hidden = runner.engine.config.hidden_size;
    for (int i = 0; i < GROUP; i++)
        for (int k = 0; k < 5 + 4 * i; k++) arrput(prompts[i], (7 * k + 11 * i) % 40 + 2);
    run_group(&runner, prompts, wanted, ends, -1);
    runner_close(&runner);

    if (!open_pair(&runner, pair, true, options, NULL, 0)) return;
    runner.speculation.width = 5;
    runner.speculation.verify = VERIFY_FULL;
    runner.trace = tmpfile();
    run_group(&runner, prompts, found, finish, -1);
    for (int i = 0; i < GROUP; i++) CHECK(same_ids(found[i], wanted[i]), "%s: session %d says what it says without drafts", pair->name, i);
    int token = find_rejected(runner.trace, wanted, vocab);
    fclose(runner.trace);
    runner.trace = NULL;

    int again = run_group(&runner, prompts, found, finish, 2);
    CHECK(again >= 1, "%s: a cached row of NaNs fails a round with drafts first", pair->name);
    for (int i = 0; i < GROUP; i++)
        CHECK(i == 2 ? finish[i] == FINISH_ERROR && arrlen(found[i]) < arrlen(wanted[i]) : same_ids(found[i], wanted[i]),
              "%s: a row of session 2 is NaNs: session %d ends with %d", pair->name, i, finish[i]);
    runner_close(&runner);

    spoiled.target = copy_checkpoint(pair->target);
    uint8_t *nans = allocate_zeroed((size_t)hidden, 2);
    memset(nans, 0xff, 2 * (size_t)hidden);
    CHECK(token >= 0, "%s: some token is proposed in vain", pair->name);
    if (token >= 0) {
        patch_tensor(spoiled.target, pair->golden ? "embed.weight" : "model.embed_tokens.weight", (size_t)token * 2 * (size_t)hidden, nans, 2 * (size_t)hidden);
        if (open_pair(&runner, &spoiled, true, options, NULL, 0)) {
            runner.speculation.width = 5;
            runner.speculation.verify = VERIFY_FULL;
            again = run_group(&runner, prompts, found, finish, -1);
            CHECK(again >= 1, "%s: token %d is drafted and fails the pass", pair->name, token);
            for (int i = 0; i < GROUP; i++)
                CHECK(finish[i] == ends[i] && same_ids(found[i], wanted[i]), "%s: NaNs of a rejected draft end nothing: session %d", pair->name, i);
            int kept = prompts[1][3];
            prompts[1][3] = token;                  /* and in a prompt they end that session alone */
            run_group(&runner, prompts, found, finish, -1);
            prompts[1][3] = kept;
            for (int i = 0; i < GROUP; i++)
                CHECK(i == 1 ? finish[i] == FINISH_ERROR && arrlen(found[i]) == arrlen(prompts[i]) : same_ids(found[i], wanted[i]),
                      "%s: NaNs in the prompt of session 1: session %d ends with %d", pair->name, i, finish[i]);
            runner_close(&runner);
        }
    }
    /* A drafter of NaNs proposes nonsense, and no more. */
    char *draft = copy_checkpoint(pair->golden ? pair->target : pair->draft);
    free(spoiled.target);
    patch_tensor(draft, pair->golden ? "mtp.0.main_norm.weight" : "hidden_norm.weight", 0, nans, 2 * (size_t)hidden);
    spoiled = *pair;
    *(pair->golden ? &spoiled.target : &spoiled.draft) = draft;
    for (int verify = 0; verify <= VERIFY_CONFIDENCE; verify++) {
        if (verify == VERIFY_CONFIDENCE && !pair->confidence) continue;
        if (!open_pair(&runner, &spoiled, true, options, NULL, 0)) break;
        runner.speculation.width = verify ? 0 : 5;
        runner.speculation.verify = (VerifyRule)verify;
        runner.speculation.seeded = verify == VERIFY_DVL;
        run_group(&runner, prompts, found, finish, -1);
        for (int i = 0; i < GROUP; i++) CHECK(same_ids(found[i], wanted[i]), "%s: a drafter of NaNs changes session %d", pair->name, i);
        runner_close(&runner);
    }
    free(nans), free(draft);
    for (int i = 0; i < GROUP; i++) arrfree(prompts[i]), arrfree(wanted[i]), arrfree(found[i]);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Acceptance by rejection
 *
 * A toy target says p(next | place, token before), a toy drafter draws from its own law. Streams of three tokens come from as many rounds
 * as they need; what they say is compared with the exact distribution.
 */

enum { TOY = 64, PLACES = 4, START = 5, WANTED = 3, STREAMS = 256 };

typedef struct Toy {
    int vocab, width;           /* width 0: another for every stream and round */
    bool one_hot;
    Sampling sampling;
    float target[PLACES][TOY][TOY];             /* logits by place and token before */
    int ids[PLACES][TOY][CANDIDATES];
    float scores[PLACES][TOY][CANDIDATES];
    double p[PLACES][TOY][TOY];
} Toy;

typedef enum Fault { NO_FAULT, RESIDUAL_IS_P, NEIGHBOUR_Q, DRAFT_NOISE_ACCEPTS, ALWAYS_BY_P, FAULTS } Fault;

static const char *const fault_names[FAULTS] = {"the rule", "residual p", "q of another slot", "the draft's noise accepts", "accepts with p"};

/* The exact law behind the session's filters, in double. */
static void exact_law(double *p, const float *logits, int vocab, const Sampling *sampling) {
    int order[TOY], kept = sampling->top_k && sampling->top_k < vocab ? sampling->top_k : vocab;
    double total = 0, mass = 0, left = 0;
    for (int i = 0; i < vocab; i++) {
        int j = i;
        for (; j > 0 && logits[i] > logits[order[j - 1]]; j--) order[j] = order[j - 1];
        order[j] = i;
    }
    for (int i = 0; i < vocab; i++) p[i] = 0;
    for (int i = 0; i < kept; i++) total += exp((double)(logits[order[i]] - logits[order[0]]) / sampling->temperature);
    for (int i = 0; i < kept; i++) {
        double weight = exp((double)(logits[order[i]] - logits[order[0]]) / sampling->temperature);
        if (i && (mass >= sampling->top_p * total || weight < sampling->min_p)) break;
        mass += weight;
        left += p[order[i]] = weight;
    }
    for (int i = 0; i < vocab; i++) p[i] /= left;
}

static void make_toy(Toy *toy, int vocab, int width, bool one_hot, Sampling sampling, float distance) {
    *toy = (Toy){.vocab = vocab, .width = width, .one_hot = one_hot, .sampling = sampling};
    for (int place = 0; place < PLACES; place++)
        for (int before = 0; before < vocab; before++) {
            float *logits = toy->target[place][before], draft[TOY];
            for (int i = 0; i < vocab; i++) {
                logits[i] = 1.2f * (random_float() + random_float() + random_float());
                draft[i] = logits[i] + distance * random_float();
            }
            candidates(toy->ids[place][before], toy->scores[place][before], CANDIDATES, draft, 1, vocab, NULL);
            exact_law(toy->p[place][before], logits, vocab, &sampling);
        }
}

static double uniform_of(const DraftBlock *block, int position, Noise noise) {
    uint32_t words[4];
    uint64_t stream = block->stream + (noise == NOISE_DRAFT ? (uint64_t)block->position * 0x9E3779B97F4A7C15u : 0);    /* as drafts have it */
    noise_words(words, noise, block->sampling.seed, stream, position, 0);
    return unit(words[0]);
}

/* The rule once more, in plain sight, and what it is not. */
static void accept_in_sight(const Toy *toy, int *choices, int *accepted, const DraftBlock *blocks, const Drafts *drafts, int n, Fault fault) {
    for (int i = 0; i < n; i++) {
        const DraftBlock *block = &blocks[i];
        for (int j = 0;; j++) {
            const double *p = toy->p[block->position + j - START][block->ids[block->position + j]];
            double left[TOY], sum = 0, target = 0, law = 0, draw;
            memcpy(left, p, sizeof left);
            accepted[i] = j;
            if (j + 1 < block->count) {
                size_t at = (size_t)i * (size_t)drafts->slots + (size_t)j, other = fault == NEIGHBOUR_Q ? j ? at - 1 : at + 1 : at;
                int draft = drafts->tokens[at];
                target = p[draft];
                for (int c = 0; c < CANDIDATES; c++) {
                    if (drafts->ids[at * CANDIDATES + (size_t)c] == draft) law += drafts->q[other * CANDIDATES + (size_t)c];
                    if (fault != RESIDUAL_IS_P) left[drafts->ids[at * CANDIDATES + (size_t)c]] -= drafts->q[at * CANDIDATES + (size_t)c];
                }
                double u = uniform_of(block, block->position + j, fault == DRAFT_NOISE_ACCEPTS ? NOISE_DRAFT : NOISE_ACCEPT);
                choices[block->first + j] = draft;
                if (fault == ALWAYS_BY_P ? u < target : u * law < target) continue;
            }
            draw = uniform_of(block, block->position + j, NOISE_RESIDUAL);
            for (int t = 0; t < toy->vocab; t++) sum += left[t] = left[t] > 0 ? left[t] : 0;
            int token = 0;
            for (double mass = left[0]; token + 1 < toy->vocab && (mass <= draw * sum || !(left[token] > 0));) mass += left[++token];
            choices[block->first + j] = token;
            break;
        }
    }
}

static int three[STREAMS][WANTED];
static double accepted_share;

/* So many streams, from the number `first` on. */
static void run_streams(const Toy *toy, uint64_t first, Fault fault, bool in_sight) {
    enum { MOST = STREAMS * PLACES };
    static int stories[STREAMS][START + 1 + WANTED + MAX_BLOCK], ids[MOST * CANDIDATES], tokens[MOST], choices[MOST], accepted[STREAMS], length[STREAMS];
    static float scores[MOST * CANDIDATES], q[MOST * CANDIDATES], logits[MOST * TOY];
    static Row rows[MOST];
    static Sampler samplers[1];
    DraftBlock blocks[STREAMS];
    Drafts drafts = {.slots = PLACES - 1, .one_hot = toy->one_hot, .ids = ids, .scores = scores, .q = q, .tokens = tokens};
    if (!samplers[0].picks) samplers[0] = sampler_open(&c_backend, TOY);
    for (int i = 0; i < STREAMS; i++) {
        for (int k = 0; k <= START; k++) stories[i][k] = k;
        length[i] = START + 1;
    }
    for (int n;;) {
        int who[STREAMS];
        for (int i = n = 0; i < STREAMS; i++) {
            if (length[i] - START - 1 >= WANTED) continue;
            int room = START + WANTED - length[i] + 1, width = toy->width ? toy->width : 1 + (int)((first + (unsigned)i) * 2654435761u >> 20) % 4;
            who[n] = i;
            blocks[n++] = (DraftBlock){.session = i, .position = length[i] - 1, .ids = stories[i], .count = width < room ? width : room,
                                       .sampling = toy->sampling, .stream = first + (unsigned)i};
        }
        if (!n) break;
        for (int slot = 0; slot < drafts.slots; slot++) {
            for (int i = 0; i < n; i++) {
                int place = blocks[i].position + slot - START, before = blocks[i].ids[blocks[i].position + slot];
                size_t at = (size_t)(i * drafts.slots + slot) * CANDIDATES;
                place = place < PLACES ? place : PLACES - 1;
                memcpy(ids + at, toy->ids[place][before], sizeof toy->ids[0][0]);
                memcpy(scores + at, toy->scores[place][before], sizeof toy->scores[0][0]);
            }
            c_backend.draw_drafts(&drafts, slot, slot + 1, blocks, n, ACCEPT_REJECTION);
        }
        int n_rows = c_backend.pack_blocks(rows, blocks, n, MOST);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < blocks[i].count; j++)
                memcpy(logits + (blocks[i].first + j) * toy->vocab, toy->target[blocks[i].position + j - START][rows[blocks[i].first + j].token],
                       (size_t)toy->vocab * sizeof(float));
        CHECK(n_rows <= MOST, "%d rows", n_rows);
        if (in_sight) accept_in_sight(toy, choices, accepted, blocks, &drafts, n, fault);
        else c_backend.accept(choices, accepted, logits, toy->vocab, blocks, &drafts, n, ACCEPT_REJECTION, samplers, 1);
        for (int i = 0; i < n; i++) {
            memcpy(stories[who[i]] + length[who[i]], choices + blocks[i].first, (size_t)(accepted[i] + 1) * sizeof(int));
            length[who[i]] += accepted[i] + 1;
            if (blocks[i].position == START && blocks[i].count > 1) accepted_share += accepted[i] > 0;
        }
    }
    for (int i = 0; i < STREAMS; i++) memcpy(three[i], stories[i] + START + 1, sizeof three[i]);
}

/* The chance that a chi-square variable of so many degrees of freedom exceeds x: the upper incomplete gamma function, by its series or by
 * its continued fraction. */
static double chi_tail(double x, double degrees) {
    double a = degrees / 2, z = x / 2, scale = exp(-z + a * log(z) - lgamma(a));
    if (degrees < 1 || z <= 0) return 1;
    if (z < a + 1) {
        double term = 1 / a, sum = term;
        for (int i = 1; i < 10000 && term > 1e-15 * sum; i++) sum += term *= z / (a + i);
        return 1 - scale * sum;
    }
    double b = z + 1 - a, c = 1e300, d = 1 / b, h = d;
    for (int i = 1; i < 10000; i++) {
        double an = -i * (i - a);
        b += 2;
        d = 1 / (an * d + b);
        c = b + an / c;
        h *= d * c;
        if (fabs(d * c - 1) < 1e-14) break;
    }
    return scale * h;
}

/* Adds Pearson's statistic of `bins` counts, of which those that expect fewer than five share one, and its degrees of freedom. A count where
 * nothing is expected is infinitely wrong. */
static void add_chi(const int *counts, const double *p, int bins, double total, double *statistic, double *degrees) {
    double rare = 0, rare_count = 0;
    int used = 0;
    for (int i = 0; i < bins; i++) {
        double expected = p[i] * total;
        if (!(p[i] > 0) && counts[i]) *statistic = INFINITY;
        if (expected < 5) { rare += expected, rare_count += counts[i]; continue; }
        *statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
        used++;
    }
    if (rare >= 1) *statistic += (rare_count - rare) * (rare_count - rare) / rare, used++;
    if (used > 1) *degrees += used - 1;
}

/* The least of the p-values: of the first token, of the second and third given the one before, and of the first two together. */
static double judge_streams(const Toy *toy, const char *name, int draws, Fault fault, bool in_sight) {
    static int first[TOY], second[TOY][TOY], third[TOY][TOY], pairs_seen[TOY * TOY];
    static double joint[TOY * TOY];
    double statistic[4] = {0}, degrees[4] = {0}, least = 1;
    int vocab = toy->vocab, n = (draws + STREAMS - 1) / STREAMS * STREAMS;
    memset(first, 0, sizeof first), memset(second, 0, sizeof second), memset(third, 0, sizeof third);
    accepted_share = 0;
    for (int i = 0; i < n; i += STREAMS) {
        run_streams(toy, (uint64_t)i, fault, in_sight);
        for (int k = 0; k < STREAMS; k++) first[three[k][0]]++, second[three[k][0]][three[k][1]]++, third[three[k][1]][three[k][2]]++;
    }
    add_chi(first, toy->p[0][START], vocab, n, &statistic[0], &degrees[0]);
    for (int a = 0; a < vocab; a++) {
        double total[2] = {0};
        for (int b = 0; b < vocab; b++) {
            total[0] += second[a][b], total[1] += third[a][b];
            joint[a * vocab + b] = toy->p[0][START][a] * toy->p[1][a][b];
            pairs_seen[a * vocab + b] = second[a][b];
        }
        if (total[0] > 50) add_chi(second[a], toy->p[1][a], vocab, total[0], &statistic[1], &degrees[1]);
        if (total[1] > 50) add_chi(third[a], toy->p[2][a], vocab, total[1], &statistic[2], &degrees[2]);
    }
    add_chi(pairs_seen, joint, vocab * vocab, n, &statistic[3], &degrees[3]);
    printf("%s, %s: %d streams, first draft accepted %.3f:", name, fault_names[fault], n, accepted_share / n);
    for (int i = 0; i < 4; i++) {
        double p = chi_tail(statistic[i], degrees[i]);
        printf(" %s p=%.3g (%.0f/%.0f)", (const char *[]){"first", "second", "third", "pairs"}[i], p, statistic[i], degrees[i]);
        least = fmin(least, p);
    }
    printf("\n");
    return least;
}

static void test_rejection(void) {
    static const Sampling one = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = 77};
    static Toy toy;
    const int draws = 100000 / SHARE;
    Sampling warm = one, top_k = one, top_p = one, all = {.temperature = 0.8f, .top_p = 0.9f, .min_p = 0.03f, .top_k = 14, .repeat_penalty = 1, .seed = 5};
    warm.temperature = 0.7f;
    top_k.top_k = 6;
    top_p.top_p = 0.8f;
    struct { const char *name; int vocab, width; bool one_hot; Sampling sampling; float distance; } cases[] = {
        {"16 tokens, sparse q, width 4", 16, 4, false, one, 1.5f},
        {"64 tokens, sparse q, width 2, temperature 0.7", 64, 2, false, warm, 1.5f},
        {"24 tokens, sparse q, mixed widths, top-k 6", 24, 0, false, top_k, 1},
        {"32 tokens, sparse q, width 3, top-p 0.8", 32, 3, false, top_p, 2},
        {"20 tokens, sparse q, width 4, every filter", 20, 4, false, all, 1},
        {"16 tokens, one-hot q, width 4", 16, 4, true, one, 1},
        {"40 tokens, one-hot q, mixed widths, temperature 0.7", 40, 0, true, warm, 1},
        {"24 tokens, one-hot q, width 3, every filter", 24, 3, true, all, 2},
        {"9 tokens, sparse q with repeated candidates, width 3", 9, 3, false, one, 1.5f},
        {"9 tokens, one-hot q with repeated candidates, width 3", 9, 3, true, one, 1.5f},
        {"24 tokens, a drafter of NaNs, width 3", 24, 3, false, one, NAN},
    };
    random_state = 4711;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make_toy(&toy, cases[i].vocab, cases[i].width, cases[i].one_hot, cases[i].sampling, cases[i].distance);
        double p = judge_streams(&toy, cases[i].name, draws, NO_FAULT, false);
        CHECK(p > (SHARE > 1 ? 0.001 : 0.01), "%s: other than plain sampling, p = %g", cases[i].name, p);
    }
    make_toy(&toy, 16, 4, false, one, 1.5f);
    for (Fault fault = NO_FAULT; fault < FAULTS; fault++) {
        double p = judge_streams(&toy, "in plain sight", fault ? draws / 4 : draws, fault, true);
        if (fault == NO_FAULT) CHECK(p > (SHARE > 1 ? 0.001 : 0.01), "the rule in plain sight: p = %g", p);
        else if (SHARE == 1) CHECK(p < 1e-6, "%s is told from the rule: p = %g", fault_names[fault], p);
    }
}

/* Through whole rounds: of three tokens the last two come from blocks with the drafter's own proposals. */
static void test_rejection_in_rounds(const Pair *pair, int width) {
    enum { SLOTS = 32, KEPT = 3 };
    Runner runner;
    Error error;
    int prompt[LONGEST], n, counts[KEPT * KEPT * KEPT] = {0}, batches = 120 / SHARE, total = 0;
    double p[KEPT * KEPT * KEPT] = {0}, statistic = 0, degrees = 0;
    int tokens[KEPT * KEPT * KEPT][3];
    Session sessions[SLOTS], *pass[SLOTS];
    Sampling sampling = {.temperature = 2, .top_p = 1, .repeat_penalty = 1, .top_k = KEPT, .seed = 9};
    EngineOptions options = {.sessions = SLOTS, .context = 256, .kv_dtype = KV_F32, .kv_mode = MODE_RESIDENT};
    if (!open_pair(&runner, pair, true, options, NULL, 0)) return;
    read_familiar(prompt, pair, &runner);
    n = 8;
    runner.speculation.width = width;
    runner.speculation.verify = VERIFY_FULL;
    runner.speculation.accept = ACCEPT_REJECTION;
    runner.engine.config.n_eos = 0;
    const int vocab = runner.engine.config.vocab_size;
    int best[3][KEPT * KEPT][KEPT];                 /* the exact tree: what may follow each beginning, and how likely */
    double chance_of[3][KEPT * KEPT][KEPT];
    for (int depth = 0, nodes = 1; depth < 3; nodes *= KEPT, depth++)
        for (int node = 0; node < nodes; node++) {
            Row rows[16];
            Cache *cache = &runner.engine.cache;
            int cached, count = n + depth, ids[16], last = count - 1;
            memcpy(ids, prompt, (size_t)n * sizeof(int));
            if (depth > 0) ids[n] = best[0][0][depth == 1 ? node : node / KEPT];
            if (depth > 1) ids[n + 1] = best[1][node / KEPT][node % KEPT];
            for (int r = 0; r < count; r++) rows[r] = (Row){0, r, ids[r]};
            cache_step(cache);
            bool ok = cache_admit(cache, 0, NULL, 0, 64, &cached) && cache_room(cache, 0, count) == count && forward(&runner.engine, rows, count, &error)
                   && head(&runner.engine, rows, &last, 1, &error);
            CHECK(ok, "%s: %s", pair->name, error.text);
            cache_commit(cache, 0, count);
            cache_release(cache, 0);
            int *order = best[depth][node];
            double sum = 0;
            for (int k = 0; k < KEPT; k++) {
                order[k] = argmax(runner.engine.state.logits, vocab);
                sum += chance_of[depth][node][k] = exp((double)runner.engine.state.logits[order[k]] / sampling.temperature);
                runner.engine.state.logits[order[k]] = -INFINITY;
            }
            for (int k = 0; k < KEPT; k++) chance_of[depth][node][k] /= sum;
        }
    for (int leaf = 0; leaf < KEPT * KEPT * KEPT; leaf++) {
        int a = leaf / (KEPT * KEPT), b = leaf / KEPT, c = leaf % KEPT;
        p[leaf] = chance_of[0][0][a] * chance_of[1][a][b % KEPT] * chance_of[2][b][c];
        tokens[leaf][0] = best[0][0][a], tokens[leaf][1] = best[1][a][b % KEPT], tokens[leaf][2] = best[2][b][c];
    }
    for (int batch = 0; batch < batches; batch++) {
        for (int s = 0; s < SLOTS; s++) {
            sessions[s] = (Session){.slot = s, .stream = (uint64_t)(batch * SLOTS + s), .max_new = 5, .sampling = sampling};
            memcpy(arraddnptr(sessions[s].ids, (size_t)n), prompt, (size_t)n * sizeof(int));
            session_begin(&sessions[s], &runner.engine);
            while (!session_admit(&runner, &sessions[s])) cache_step(&runner.engine.cache);
            pass[s] = &sessions[s];
        }
        for (int running = SLOTS, round = 0; running && round < 100; round++) {
            run_round(&runner, pass, SLOTS);
            for (int s = running = 0; s < SLOTS; s++) running += sessions[s].finish == RUNNING;
        }
        for (int s = 0; s < SLOTS; s++) {
            int leaf = 0;
            CHECK(arrlen(sessions[s].ids) >= n + 3, "three tokens");
            while (leaf < KEPT * KEPT * KEPT && memcmp(tokens[leaf], sessions[s].ids + n, sizeof tokens[leaf])) leaf++;
            CHECK(leaf < KEPT * KEPT * KEPT, "%s: a token that the filter leaves out", pair->name);
            if (leaf < KEPT * KEPT * KEPT) counts[leaf]++, total++;
            session_free(&sessions[s]);
            cache_release(&runner.engine.cache, s);
        }
    }
    const SpeculationStats *stats = &runner.speculation.stats;
    add_chi(counts, p, KEPT * KEPT * KEPT, total, &statistic, &degrees);
    double tail = chi_tail(statistic, degrees);
    printf("%s, rejection through rounds: %d streams, %lu of %lu drafts accepted, chi-square %.1f/%.0f, p=%.3g\n", pair->name, total, stats->accepted,
           stats->verified, statistic, degrees, tail);
    CHECK(tail > 0.01, "%s: streams of rounds are other than plain sampling, p = %g", pair->name, tail);
    CHECK(stats->accepted > 0 && stats->accepted < stats->verified, "%s: some drafts are accepted, some not", pair->name);
    runner_close(&runner);
}

/* Drafts with the target's own noise: at most the maximal coupling's share 1 - TV, at least (1 - TV) / (1 + TV), and near what the design
 * quotes of a simulation. */
static void test_coupling(void) {
    enum { VOCABULARY = 200, TIMES = 6000 / SHARE };
    static float logits[TIMES * VOCABULARY];
    static const struct { float noise; double low, high; } cases[] = {{0.2f, 0.85, 0.93}, {1.2f, 0.49, 0.71}};
    static int story[2], choices[2 * TIMES], accepted[TIMES], ids[TIMES * CANDIDATES], tokens[TIMES];
    static float scores[TIMES * CANDIDATES];
    Sampling sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = 3};
    Sampler sampler = sampler_open(&c_backend, VOCABULARY);
    random_state = 99;
    for (int c = 0; c < 2; c++) {
        double overlap = 0, least = 0, share = 0;
        for (int t = 0; t < TIMES; t++) {
            float p[VOCABULARY], q[VOCABULARY];
            double p_sum = 0, q_sum = 0, common = 0;
            for (int i = 0; i < VOCABULARY; i++) {
                p[i] = 4 * (random_float() + random_float() + random_float());
                q[i] = p[i] + cases[c].noise * (random_float() + random_float());
            }
            candidates(ids, scores, CANDIDATES, q, 1, VOCABULARY, NULL);
            Drafts drafts = {.slots = 1, .ids = ids, .scores = scores, .tokens = tokens};
            DraftBlock block = {.ids = story, .count = 2, .sampling = sampling, .stream = (uint64_t)t};
            c_backend.draw_drafts(&drafts, 0, 1, &block, 1, ACCEPT_COUPLED);
            memcpy(logits, p, sizeof p), memcpy(logits + VOCABULARY, p, sizeof p);
            c_backend.accept(choices, accepted, logits, VOCABULARY, &block, &drafts, 1, ACCEPT_COUPLED, &sampler, 1);
            share += accepted[0];
            for (int i = 0; i < VOCABULARY; i++) p_sum += exp((double)p[i]);
            for (int i = 0; i < CANDIDATES; i++) q_sum += exp((double)scores[i]);
            for (int i = 0; i < CANDIDATES; i++) common += fmin(exp((double)p[ids[i]]) / p_sum, exp((double)scores[i]) / q_sum);
            overlap += common, least += common / (2 - common);
        }
        share /= TIMES, overlap /= TIMES, least /= TIMES;
        printf("coupled acceptance: %.3f, where 1 - TV is %.3f and (1 - TV) / (1 + TV) %.3f\n", share, overlap, least);
        CHECK(share < overlap + 0.02 && share > least - 0.02, "coupled acceptance %g lies between %g and %g", share, least, overlap);
        CHECK(share > cases[c].low && share < cases[c].high, "coupled acceptance %g is what was simulated: %g to %g", share, cases[c].low, cases[c].high);
    }
    sampler_close(&c_backend, &sampler);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Lengths
 */

/* DSpark's algorithm 1 as the spec has it: drafts by score, ties by place and then by session, up to the first that does not pay. */
static void schedule_prefixes(int *lengths, const float *scores, const int *limits, int n, int slots, int others, double draft, bool first_only,
                              int room, const CostCurve *cost) {
    int taken[64] = {0}, best_taken[64] = {0};
    double tokens = n + others, best = tokens / (cost_of(cost, n + others) + draft);
    for (int rows = n + others + 1; rows <= room; rows++) {
        int next = -1;
        for (int j = 0; j < slots; j++)             /* the first of the best, in the order (j, r) */
            for (int i = 0; i < n; i++)
                if (taken[i] == j && j + 1 < limits[i] && (next < 0 || scores[i * slots + j] > scores[next * slots + taken[next]])) next = i;
        if (next < 0) break;
        tokens += scores[next * slots + taken[next]];
        taken[next]++;
        double rate = tokens / (cost_of(cost, rows) + draft);
        if (rate > best) best = rate, memcpy(best_taken, taken, sizeof taken);
        else if (first_only) break;
    }
    for (int i = 0; i < n; i++) lengths[i] = 1 + best_taken[i];
}

static void test_budgets(void) {
    enum { SESSIONS = 12, SLOTS = 7 };
    static Runner runner;
    int wider = 0, narrower = 0, middle = 0;
    runner = (Runner){0};
    runner.engine.drafter.config.slots = SLOTS;
    random_state = 1234;
    for (int t = 0; t < 6000 / SHARE; t++) {
        float scores[SESSIONS * SLOTS];
        int limits[SESSIONS], lengths[SESSIONS], wanted[SESSIONS], n = 1 + random_below(SESSIONS), others = random_below(4), all = n;
        bool first_only = chance(50);
        double rate, draft = chance(50) ? 0 : random_below(300) / 100.0;
        CostCurve *cost = &runner.speculation.pass_cost;
        *cost = (CostCurve){.seconds = {0}};
        double seconds = 1;
        for (int size = 1; size < 120; size += 1 + random_below(15)) {
            measure_cost(cost, size, seconds, 1);
            seconds += random_below(chance(80) ? 20 : 400) / 100.0;     /* a staircase */
        }
        for (int i = 0; i < n; i++) {
            float score = 1;
            limits[i] = 1 + random_below(SLOTS + 1);
            all += limits[i] - 1;
            for (int j = 0; j < SLOTS; j++) {
                score *= 0.25f * (float)(chance(30) ? 4 : random_below(5));     /* ties */
                scores[i * SLOTS + j] = score;
            }
        }
        int room = runner.engine.state.max_rows = n + others + random_below(100);
        int budget = best_budget(&runner, scores, limits, n, others, draft, first_only, &rate);
        allocate(lengths, scores, limits, n, SLOTS, budget);
        schedule_prefixes(wanted, scores, limits, n, SLOTS, others, draft, first_only, room, cost);
        CHECK(!memcmp(lengths, wanted, (size_t)n * sizeof(int)), "schedule %d: %s: other lengths than by brute force", t, first_only ? "first" : "best");
        int sum = 0;
        for (int i = 0; i < n; i++) sum += lengths[i];
        CHECK(sum == budget && sum + others <= room, "schedule %d: %d rows, a budget of %d and room for %d", t, sum, budget, room);
        wider += sum == all, narrower += sum == n, middle += sum > n && sum < all;
    }
    CHECK(wider && narrower && middle, "all, none and some are verified: %d, %d, %d", wider, narrower, middle);
}

static void test_costs(void) {
    random_state = 5;
    for (int t = 0; t < 300; t++) {
        CostCurve curve = {.seconds = {0}};
        int measured[40], n = 0;
        CHECK(cost_of(&curve, 7) == 0, "nothing was measured yet");
        for (; n < 1 + t % 20; n++) {
            measured[n] = 1 + random_below(chance(50) ? 30 : 600);
            measure_cost(&curve, measured[n], 1e-3 * (1 + random_below(1000)), n);
        }
        for (int size = 1; size <= 2000; size += 1 + size / 20) {
            double cost = cost_of(&curve, size), low = 0, high = 0;
            int at = cost_bucket(size), below = at, above = at;
            CHECK(bucket_size(at) <= size + 1e-9 && (at + 1 == COST_BUCKETS || bucket_size(at + 1) > size - 1e-9), "size %d is in bucket %d", size, at);
            while (below > 0 && !(curve.seconds[below] > 0)) below--;
            while (above < COST_BUCKETS && !(curve.seconds[above] > 0)) above++;
            if (below > 0) low = curve.seconds[below];
            if (above < COST_BUCKETS) high = curve.seconds[above];
            CHECK(cost > 0 && cost < 1e6, "%d rows cost %g", size, cost);
            if (low > 0 && high > 0)
                CHECK(cost >= fmin(low, high) * (1 - 1e-9) && cost <= fmax(low, high) * (1 + 1e-9), "%d rows cost %g, between %g and %g", size, cost, low, high);
            if (low > 0 && !(high > 0)) CHECK(cost >= low, "%d rows cost %g, less than fewer did: %g", size, cost, low);
        }
    }
}

/* --width auto with a drafter that is always wrong: it tries again, seldom enough to cost hardly anything, and drafts when the drafter
 * has become right. */
static void test_auto(const Pair *pair) {
    enum { CONTEXT = 3000, SWITCH = 1200 };
    Runner runner;
    EngineOptions options = {.sessions = 1, .context = CONTEXT, .kv_dtype = KV_F32};
    int prompt[LONGEST], drafted[CONTEXT], n_drafted = 0, late = 0, late_rounds = 0;
    if (!open_pair(&runner, pair, false, options, NULL, 0)) return;
    int n = read_familiar(prompt, pair, &runner);
    runner.engine.config.n_eos = 0;
    Session plain = {.sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = 1}}, session = {.sampling = plain.sampling}, *pass = &session;
    memcpy(arraddnptr(plain.ids, (size_t)n), prompt, (size_t)n * sizeof(int));
    session_begin(&plain, &runner.engine);
    run_session(&runner, &plain);
    runner_close(&runner);

    if (!open_pair(&runner, pair, true, options, NULL, 0)) { session_free(&plain); return; }
    runner.engine.config.n_eos = 0;
    runner.speculation.verify = VERIFY_FULL;
    watch.made = true, watch.pass = 1, watch.row = 0.02;
    int *wrong = allocate_zeroed(CONTEXT, sizeof(int));
    for (int i = 0; i < CONTEXT; i++) wrong[i] = (plain.ids[i] + 1) % runner.engine.config.vocab_size;
    watch.oracle[0] = wrong, watch.oracle_length[0] = CONTEXT, watch.oracle_percent = 100;
    memcpy(arraddnptr(session.ids, (size_t)n), prompt, (size_t)n * sizeof(int));
    session_begin(&session, &runner.engine);
    CHECK(session_admit(&runner, &session), "there is room");
    for (int round = 0; session.finish == RUNNING; round++) {
        uint64_t before = runner.speculation.stats.rounds;
        if (arrlen(session.ids) > SWITCH) watch.oracle[0] = plain.ids;
        bool right = watch.oracle[0] == plain.ids;
        run_round(&runner, &pass, 1);
        bool drafts = runner.speculation.stats.rounds > before;
        late += right && drafts, late_rounds += right;
        if (drafts && !right) drafted[n_drafted++] = round;
    }
    CHECK(same_ids(session.ids, plain.ids), "%s: auto says what plain decoding says", pair->name);
    CHECK(runner.speculation.stats.accepted > 0, "%s: right drafts are accepted", pair->name);
    printf("%s: a wrong drafter drafts in rounds", pair->name);
    for (int i = 0; i < n_drafted; i++) {
        printf(" %d", drafted[i]);
        if (i > 1) CHECK(drafted[i] - drafted[i - 1] >= TRY_WAIT, "%s: it waits only %d rounds", pair->name, drafted[i] - drafted[i - 1]);
    }
    printf(", a right one in %d of %d\n", late, late_rounds);
    CHECK(late > late_rounds / 4, "%s: a drafter that has become right drafts in %d of %d rounds", pair->name, late, late_rounds);
    CHECK(n_drafted >= 3, "%s: a wrong drafter is tried again: %d rounds with drafts", pair->name, n_drafted);
    CHECK(n_drafted < SWITCH / 64, "%s: a wrong drafter drafts in %d rounds", pair->name, n_drafted);
    session_free(&session);
    runner_close(&runner);

    if (open_pair(&runner, pair, true, options, NULL, 0)) {                 /* width 1 */
        runner.speculation.width = 1;
        watch.draft_passes = 0;
        arrsetlen(session.ids, 0);
        memcpy(arraddnptr(session.ids, (size_t)n), prompt, (size_t)n * sizeof(int));
        session.max_new = 50;
        session_begin(&session, &runner.engine);
        run_session(&runner, &session);
        CHECK(!watch.draft_passes && !runner.speculation.stats.blocks, "%s: the drafter ran %ld times at width 1", pair->name, watch.draft_passes);
        runner_close(&runner);
    }
    watch.made = false;
    free(wrong);
    session_free(&session), session_free(&plain);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * A proposal depends on its own session alone
 */

enum { COMPANY = 16, FRONTIERS = 128 };

typedef int Proposals[COMPANY][FRONTIERS][MAX_BLOCK + 1];       /* by session and anchor: how many, and which */

static void read_trace(FILE *trace, Proposals *proposals) {
    char *line = NULL;
    size_t size = 0;
    rewind(trace);
    while (getline(&line, &size, trace) > 0) {
        cJSON *json = cJSON_Parse(line), *session, *id;
        cJSON_ArrayForEach(session, cJSON_GetObjectItem(json, "sessions")) {
            int *found = (*proposals)[cJSON_GetObjectItem(session, "id")->valueint][cJSON_GetObjectItem(session, "anchor_pos")->valueint];
            found[0] = 0;
            cJSON_ArrayForEach(id, cJSON_GetObjectItem(session, "proposed")) found[++found[0]] = id->valueint;
        }
        cJSON_Delete(json);
    }
    free(line);
}

static void test_proposals(const Pair *pair) {
    static Proposals alone, together;
    Runner runner;
    int compared = 0;
    EngineOptions options = {.sessions = COMPANY, .context = FRONTIERS, .kv_dtype = KV_BF16};
    memset(alone, 0, sizeof alone), memset(together, 0, sizeof together);
    if (!open_pair(&runner, pair, true, options, NULL, 0)) return;
    runner.speculation.width = 4;
    runner.speculation.verify = VERIFY_FULL;
    runner.engine.config.n_eos = 0;
    int familiar[LONGEST], n = read_familiar(familiar, pair, &runner);
    for (int company = 0; company < 2; company++) {
        Session sessions[COMPANY] = {0}, *pass[COMPANY];
        runner.trace = tmpfile();
        for (int s = 0; s < COMPANY; s++) {
            int slot = company ? (5 * s + 3) % COMPANY : 0, length = 2 + 5 * s % n;
            sessions[s] = (Session){.slot = slot, .stream = (uint64_t)s, .max_new = 20,
                                    .sampling = {.temperature = s % 2 ? 0.8f : 0, .top_p = 1, .repeat_penalty = s % 3 ? 1 : 1.1f, .seed = 4}};
            memcpy(arraddnptr(sessions[s].ids, (size_t)length), familiar, (size_t)length * sizeof(int));
            sessions[s].ids[0] = s + 2;
            session_begin(&sessions[s], &runner.engine);
            while (!session_admit(&runner, &sessions[s])) cache_step(&runner.engine.cache);
            pass[s] = &sessions[s];
            if (company) continue;
            run_session(&runner, &sessions[s]);
            cache_release(&runner.engine.cache, 0);
        }
        for (int round = 0; company && round < 40; round++) run_round(&runner, pass + (round < 3 ? 8 : 0), round < 3 ? 8 : COMPANY);
        for (int s = 0; s < COMPANY; s++) {
            CHECK(sessions[s].finish == FINISH_LENGTH, "%s: session %d is done", pair->name, s);
            if (company) cache_release(&runner.engine.cache, sessions[s].slot);
            session_free(&sessions[s]);
        }
        read_trace(runner.trace, company ? &together : &alone);
        fclose(runner.trace);
        runner.trace = NULL;
    }
    for (int s = 0; s < COMPANY; s++)
        for (int at = 0; at < FRONTIERS; at++) {
            CHECK(!memcmp(alone[s][at], together[s][at], sizeof alone[s][at]), "%s: session %d proposes something else at %d in company", pair->name, s, at);
            compared += alone[s][at][0] > 0;
        }
    printf("%s: %d blocks proposed alone and in company\n", pair->name, compared);
    CHECK(compared > COMPANY * 3, "%s: %d blocks are compared", pair->name, compared);
    runner_close(&runner);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Sizes at the edge
 */

/* As many sessions as a pass has rows, and contexts shorter than a block: nothing lies outside its buffer, and the text is the same. */
static void test_edges(const Pair *pair) {
    static const struct { int sessions, context; } sizes[] = {{1, 2}, {1, 3}, {2, 5}, {33, 4}, {40, 12}, {MAX_PASS_ROWS, 20}};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        int count = sizes[k].sessions, *wanted[2] = {NULL};
        Session *sessions = allocate_zeroed((size_t)count, sizeof *sessions), **pass = allocate_zeroed((size_t)count, sizeof *pass);
        for (int drafts = 0; drafts < 2; drafts++) {
            Runner runner;
            EngineOptions options = {.sessions = count, .context = sizes[k].context, .kv_dtype = KV_F32, .kv_mode = (KvMode)(k % 3)};
            if (!open_pair(&runner, pair, drafts, options, NULL, 0)) return;
            runner.speculation.width = k % 2 ? MAX_BLOCK + 1 : 0;
            runner.speculation.verify = k % 3 ? VERIFY_DVL : VERIFY_FULL;
            runner.speculation.seeded = k % 2;
            runner.engine.config.n_eos = 0;
            for (int s = 0; s < count; s++) {
                sessions[s] = (Session){.slot = s, .stream = (uint64_t)s, .sampling = {.temperature = s % 2 ? 0.7f : 0, .top_p = 1, .repeat_penalty = 1}};
                for (int i = 0; i < 1 + s % (sizes[k].context - 1); i++) arrput(sessions[s].ids, (3 * s + 5 * i) % 90 + 2);
                session_begin(&sessions[s], &runner.engine);
                while (!session_admit(&runner, &sessions[s])) cache_step(&runner.engine.cache);
                pass[s] = &sessions[s];
            }
            for (int round = 0; round < 60 + 2 * sizes[k].context; round++) run_round(&runner, pass, count);
            for (int s = 0; s < count; s++) {
                CHECK(sessions[s].finish == FINISH_CONTEXT && arrlen(sessions[s].ids) == sizes[k].context, "%s: %d sessions of %d: session %d ends with %d: %s",
                      pair->name, count, sizes[k].context, s, sessions[s].finish, sessions[s].error.text);
                for (int i = 0; i < (int)arrlen(sessions[s].ids); i++) arrput(wanted[drafts], sessions[s].ids[i]);
                session_free(&sessions[s]);
                cache_release(&runner.engine.cache, s);
            }
            runner_close(&runner);
        }
        CHECK(same_ids(wanted[0], wanted[1]), "%s: %d sessions of %d rows say the same with drafts", pair->name, count, sizes[k].context);
        arrfree(wanted[0]), arrfree(wanted[1]);
        free(sessions), free(pass);
    }
}

int main(int argc, char **argv) {
    if (argc > 1) random_state = strtoull(argv[1], NULL, 10);
    omp_set_num_threads(1);                         /* the rows are few; configurations say when there are two */
    find_pairs();
    test_equality();
    for (int p = 0; p < PAIRS; p++) {
        bool large = is_large(p);
        if (SHARE > 1 && (large || p % 3)) continue;
        test_conversation(&pairs[p], (KvMode)(p % 3), p % 2 ? 5 : MAX_BLOCK + 1, p % 2 ? VERIFY_DVL : VERIFY_FULL, large ? 4 : (p < FIRST_STAGES ? 30 : 10) / SHARE + 5);
        if (large) continue;
        if (!pairs[p].stages) test_failures(&pairs[p]);         /* those of one shard */
        test_proposals(&pairs[p]);
    }
    test_edges(&pairs[QWEN3_DFLASH2]);
    test_edges(&pairs[LARGEST_BLOCKS]);
    test_edges(&pairs[GLM_DSPARK]);
    for (int p = FIRST_STAGES; p < PAIRS; p += 3) test_edges(&pairs[p]);
    test_budgets();
    test_costs();
    test_auto(&pairs[QWEN3_DFLASH2]);
    test_rejection();
    test_coupling();
    test_rejection_in_rounds(&pairs[QWEN3_DFLASH], 3);
    test_rejection_in_rounds(&pairs[QWEN3_DFLASH2], MAX_BLOCK);
    test_rejection_in_rounds(&pairs[GLM_DSPARK], 4);
    test_rejection_in_rounds(&pairs[V41_A], 3);
    forget_pairs();
    return check_report();
}
