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

#ifdef __SANITIZE_ADDRESS__
enum { SHARE = 8 };             /* a sanitizer takes ten times as long: one of so many */
#else
enum { SHARE = 1 };
#endif

static const char *kv_names[] = {"f32", "bf16", "fp8"};

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
    int fault_session, fault_layer, layer, n_rows, hidden;
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

static void watched_draw_drafts(Drafts *drafts, int slot, const DraftBlock *blocks, int n, AcceptRule rule) {
    draw_drafts(drafts, slot, blocks, n, rule);
    replace_draft(drafts, slot, blocks, n);
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

static void faulty_add(float *y, const float *x, size_t n) {
    add(y, x, n);
    for (int r = 0; watch.fault && watch.layer == watch.fault_layer && n == (size_t)(watch.n_rows * watch.hidden) && r < watch.n_rows; r++)
        if (watch.rows[r].session == watch.fault_session) y[r * watch.hidden] = NAN;
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
    watched_backend.add = faulty_add;
    watched_backend.finish_copy = slow_finish_copy;
    engine->backend = engine->cache.backend = &watched_backend;
    engine->probe = (Probe){.entering = watched_entering};
    watch.hidden = engine->config.hidden_size;
    watch.fault = false;
    watch.layer = -1;
    memset(watch.oracle, 0, sizeof watch.oracle);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Pairs of a target and a drafter
 */

enum { PAIRS = 10 };

typedef struct Pair {
    const char *name;
    char *target, *draft;       /* NULL: not there */
    bool confidence, dvl;       /* it has that part of its own */
} Pair;

static Pair pairs[PAIRS] = {
    {.name = "qwen3-dflash"}, {.name = "qwen3-dflash2"}, {.name = "qwen3-dspark", .confidence = true},
    {.name = "glm_moe_dsa-dflash"}, {.name = "glm_moe_dsa-dflash2"}, {.name = "glm_moe_dsa-dspark", .confidence = true},
    {.name = "qwen3-dflash, blocks of 32"}, {.name = "glm_moe_dsa-dflash2, blocks of 20"},
    {.name = "mini-dflash2", .dvl = true}, {.name = "mini-dspark", .confidence = true},
};

/* A copy of a drafter whose blocks have another size: more rows than are resolved together, or as many as there can be. */
static char *resize_blocks(const char *draft, int size) {
    char path[PATH_MAX], *bytes, *text, *directory = copy_checkpoint(draft);
    size_t length;
    Error error;
    if (!read_file(join(path, draft, "config.json"), 1 << 20, &bytes, &length, &error)) fprintf(stderr, "%s\n", error.text), exit(1);
    cJSON *json = cJSON_Parse(bytes), *inner = cJSON_GetObjectItem(json, "dflash_config"), *item = cJSON_GetObjectItem(inner, "block_size");
    if (!item) item = cJSON_GetObjectItem(json, "block_size");
    cJSON_SetNumberValue(item, size);
    text = cJSON_Print(json);
    write_text(directory, "config.json", text);
    cJSON_free(text);
    cJSON_Delete(json);
    free(bytes);
    return directory;
}

static void find_pairs(void) {
    static const char *const roots[] = {"tests/fixtures/drafters", "../shared/fixtures/drafters"};
    char path[PATH_MAX];
    for (int i = 0; i < 6; i++)
        for (int r = 0; r < 2 && !pairs[i].draft; r++) {
            snprintf(path, sizeof path, "%s/%s-a/draft/model.safetensors", roots[r], pairs[i].name);
            if (access(path, R_OK)) continue;
            snprintf(path, sizeof path, "%s/%s-a/target", roots[r], pairs[i].name);
            pairs[i].target = copy_string(path);
            snprintf(path, sizeof path, "%s/%s-a/draft", roots[r], pairs[i].name);
            pairs[i].draft = copy_string(path);
        }
    for (int i = 6; i < 8; i++) {
        const Pair *small = &pairs[i == 6 ? 0 : 4];
        if (!small->draft) continue;
        pairs[i].target = copy_string(small->target);
        pairs[i].draft = resize_blocks(small->draft, i == 6 ? MAX_BLOCK : 20);
    }
    pairs[8].target = copy_string("weights/mini"), pairs[8].draft = copy_string("weights/draft-dflash2");
    pairs[9].target = copy_string("weights/mini"), pairs[9].draft = copy_string("weights/draft-dspark");
    for (int i = 0; i < PAIRS; i++) CHECK(pairs[i].draft, "%s: the fixture is not there", pairs[i].name);
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
    for (int i = 2; i < vocab; i++) at += sprintf(at, ",\"%.*s%c\":%d", i % 3, i / 26 % 2 ? "ea" : "ou", i < 50 ? 'A' + i % 26 : 'a' + i % 26, i);
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
    drafter->predictor = (LengthPredictor){.layers = 1, .slots = slots, .bias = {predictor_bias},
                                           .weight = {{.data = (const uint8_t *)predictor_weights, .dtype = DTYPE_F32, .rows = slots, .cols = in}}};
}

/* drafts: with its drafter, or plain. eos: ids that end a generation, beside the checkpoint's. */
static bool open_pair(Runner *runner, const Pair *pair, bool drafts, EngineOptions options, const int *eos, int n_eos) {
    Error error;
    options.model = pair->target;
    options.draft = drafts ? pair->draft : NULL;
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

/* What the drafter was trained on, as far as the target knows it: the fixture's prompt with its continuation, or a text. Returns how many ids. */
static int read_familiar(int *ids, const Pair *pair, const Runner *runner) {
    Checkpoint golden;
    Error error;
    int n = 0, *text = NULL;
    char *directory = copy_string(pair->target), *end = strstr(directory, "/target");
    if (!end) {
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
    long pair[PAIRS], width[WIDTHS], verify[VERIFY_RULES], seeded, batch[4], mode[MODES], dtype[3], temperature[3], top_k, top_p, min_p, penalty,
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
            seen.waits += sessions[s].wait > 0;
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
    *options = (EngineOptions){.model = pool->pair->target, .draft = pool->pair->draft, .sessions = batches[b], .context = pool->context,
                               .kv_dtype = pool->dtype, .kv_mode = fixed_mode >= 0 ? (KvMode)fixed_mode : (KvMode)random_below(MODES),
                               .reclaim = (Reclaim)random_below(2), .lookup = (Lookup)random_below(2)};
    if (!engine_plan(&engine, options, &error)) { CHECK(false, "%s", error.text); return; }
    int topk = engine.cache.index_topk;
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
             "--host-budget %zu", seen.trials, pool->pair->name, kv_names[pool->dtype], trial.width, verify_rule_names[trial.verify],
             trial.seeded ? " --allocate seeded" : "", kv_mode_names[options->kv_mode], options->hot_rows, options->sessions, options->context,
             options->kv_budget, options->host_budget);
    seen.trials++;
    seen.least += options->kv_budget == least;
    seen.pair[pool->pair - pairs]++, seen.width[w]++, seen.verify[trial.verify]++, seen.seeded += trial.seeded, seen.batch[b]++;
    seen.mode[options->kv_mode]++, seen.dtype[pool->dtype]++;
    run_trial(pool, &trial);
}

static void test_equality(void) {
    static const int contexts[] = {192, LONGEST, 256};
    Pool *pool = allocate_zeroed(1, sizeof *pool);
    watch.made = true;
    for (int p = 0; p < PAIRS; p++)
        for (KvDtype dtype = KV_F32; dtype <= KV_F8; dtype++) {
            bool large = p >= 8;
            int trials = large ? 2 : p >= 3 ? 16 : 9, failed = checks_failed;
            if (!pairs[p].draft || (SHARE > 1 && (large || dtype != (KvDtype)(p % 3)))) continue;
            if (large && dtype == (KvDtype)(p - 8)) continue;
            if (!open_pool(pool, &pairs[p], dtype, large ? 224 : contexts[dtype], large ? 8 : SHARE > 1 ? 12 : TALKS)) continue;
            for (int i = 0; i < (trials + SHARE - 1) / SHARE && checks_failed == failed; i++) {
                if (large) draw_trial(pool, 4 + 2 * (i % 2), 1 + p - 8, i % 2, i % 2 ? MODE_ADAPTIVE : MODE_HISPARSE);
                else draw_trial(pool, i < WIDTHS ? i : -1, i % VERIFY_RULES, i < 3 ? 1 + i : -1, p >= 3 && i >= 3 ? MODE_HISPARSE + i % 2 : -1);
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

int main(int argc, char **argv) {
    if (argc > 1) random_state = strtoull(argv[1], NULL, 10);
    find_pairs();
    test_equality();
    forget_pairs();
    return check_report();
}
