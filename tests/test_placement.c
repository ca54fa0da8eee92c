/* test_placement.c: a session's ids and logits are the same bits wherever its history lies.
 *
 * A reference has every script's hidden states and logits from a resident cache with room for everything, one script at a time.
 * Then random schedules run the same scripts through caches of every mode, size and policy: sessions are admitted, wait, share
 * prefixes, go back, end in the middle, fail, move, draft rows that are rejected; what a pass computes for a row of a script is
 * compared with the reference, bit by bit. Further schedules do the same with Sessions and run_round(). */
#include "../engine.c"
#include "../backend.c"
#include "check.h"
#include "passes.h"
#include "scratch.h"

enum { SCRIPTS = 6, MAX_ROWS = 1440, MOST_SESSIONS = 32 };

#ifdef __SANITIZE_ADDRESS__
enum { SHARE = 8 };             /* a sanitizer takes ten times as long: one schedule of so many */
#else
enum { SHARE = 1 };
#endif

static const char *kv_names[] = {"f32", "bf16", "fp8", "fp4"}, *mode_names[] = {"resident", "hisparse", "adaptive"};

typedef struct Model {          /* one checkpoint with rows of one dtype, and what it says to each script */
    const char *directory;
    KvDtype dtype;
    int context, vocab, hidden, topk;
    int ids[SCRIPTS][MAX_ROWS];
    float *normed[SCRIPTS];     /* [context, hidden] */
    uint64_t *logits[SCRIPTS];  /* [context] a hash of each row's */
} Model;

static struct {
    long schedules, passes, rows, logits, jobs, aborted, truncated, kept, failed, drafted, moved, given_up, least;
    long round_schedules, round_tokens;
    CacheStats cache;
} seen;

static int pick(const int *values, int n) { return values[random_below(n)]; }
static bool chance(int percent) { return random_below(100) < percent; }

/* Of all bits of n floats. */
static uint64_t hash_bits(const float *x, int n) {
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (int i = 0; i < n; i++) hash = (hash ^ float_to_bits(x[i])) * 0xff51afd7ed558ccdu, hash ^= hash >> 32;
    return hash;
}

/* How many ids two scripts have in common at their beginning. */
static int common_ids(const Model *model, int a, int b) {
    int n = 0;
    while (n < model->context && model->ids[a][n] == model->ids[b][n]) n++;
    return n;
}

/* Scripts of random ids, each of which leaves an earlier one somewhere, often at the end of a page. */
static void write_scripts(Model *model) {
    for (int i = 0; i < SCRIPTS; i++) {
        int from = i ? random_below(i) : 0, common = i ? random_below(model->context) : 0;
        if (chance(50)) common = common / PAGE_ROWS * PAGE_ROWS;
        memcpy(model->ids[i], model->ids[from], (size_t)common * sizeof(int));
        for (int p = common; p < model->context; p++) model->ids[i][p] = random_below(model->vocab);
        if (i && common < model->context && model->ids[i][common] == model->ids[from][common])
            model->ids[i][common] = (model->ids[i][common] + 1) % model->vocab;
    }
}

/* The reference: each script alone, in passes as large as they get. */
static bool open_model(Model *model, const char *directory, KvDtype dtype, int context) {
    Engine engine;
    Error error;
    EngineOptions options = {.model = directory, .sessions = 1, .context = context, .kv_dtype = dtype};
    bool ok = engine_open(&engine, &options, &error);
    CHECK(ok, "%s", error.text);
    if (!ok) return false;
    *model = (Model){.directory = directory, .dtype = dtype, .context = context, .vocab = engine.config.vocab_size,
                     .hidden = engine.config.hidden_size, .topk = engine.cache.index_topk};
    for (int s = 0; s < engine.cache.sources; s++)  /* a source of longer rows has fewer slots, and as many are selected */
        model->topk = larger(model->topk, engine.cache.index_topk * stretch_of(&engine.cache, s));
    write_scripts(model);
    Row rows[MAX_PASS_ROWS];
    size_t hidden = (size_t)model->hidden;
    for (int i = 0; i < SCRIPTS && ok; i++) {
        model->normed[i] = allocate_zeroed((size_t)context * hidden, sizeof(float));
        model->logits[i] = allocate_zeroed((size_t)context, sizeof(uint64_t));
        for (int begin = 0, n; begin < context && ok; begin += n) {
            n = context - begin < engine.state.max_rows ? context - begin : engine.state.max_rows;
            for (int r = 0; r < n; r++) rows[r] = (Row){0, begin + r, model->ids[i][begin + r]};
            ok = run_rows(&engine, rows, n, &error);
            memcpy(model->normed[i] + (size_t)begin * hidden, engine.state.normed, (size_t)n * hidden * sizeof(float));
            for (int first = 0, some; first < n && ok; first += some) {
                int indices[MAX_PASS_ROWS];
                some = n - first < engine.state.logit_rows ? n - first : engine.state.logit_rows;
                for (int r = 0; r < some; r++) indices[r] = first + r;
                ok = head(&engine, rows, indices, some, &error);
                for (int r = 0; r < some; r++)
                    model->logits[i][begin + first + r] = hash_bits(engine.state.logits + (size_t)r * (size_t)model->vocab, model->vocab);
            }
        }
    }
    CHECK(ok, "%s: %s", directory, error.text);
    engine_close(&engine);
    return ok;
}

static void close_model(Model *model) {
    for (int i = 0; i < SCRIPTS; i++) free(model->normed[i]), free(model->logits[i]);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Where a schedule runs
 */

typedef struct Place {
    EngineOptions options;
    Engine engine;
    char text[320];
} Place;

/* The sizes that a plan without budgets would have, to draw budgets from. */
static bool measure(const EngineOptions *options, Cache *sizes) {
    Engine engine;
    Error error;
    EngineOptions ample = *options;
    ample.kv_budget = ample.host_budget = 0;
    bool ok = engine_plan(&engine, &ample, &error);
    CHECK(ok, "%s: %s", options->model, error.text);
    if (!ok) return false;
    *sizes = engine.cache;                          /* its numbers; what it points to is gone */
    engine_close(&engine);
    return true;
}

/* low, high, or in between, mostly nearer to low. */
static size_t draw_budget(size_t low, size_t high) {
    static const double reach[] = {0, 0.1, 0.25, 0.25, 0.5, 1};
    if (chance(5)) return high;
    return low + (size_t)((double)(high > low ? high - low : 0) * reach[random_below(6)] * random_below(1000) / 1000);
}

static bool open_place(Place *place, const Model *model, KvMode mode) {
    static const int session_counts[] = {1, 2, 3, 5, 8, 11, 16, 32};
    Error error;
    Cache sizes;
    EngineOptions *options = &place->options;
    *options = (EngineOptions){.model = model->directory, .sessions = pick(session_counts, 8), .context = model->context,
                               .kv_dtype = model->dtype, .kv_mode = mode, .reclaim = (Reclaim)random_below(2),
                               .lookup = (Lookup)random_below(2)};
    if (model->topk && !chance(20))                 /* k to 8 k */
        options->hot_rows = model->topk + (chance(30) ? 0 : random_below((chance(50) ? 1 : 7) * model->topk + 1));
    if (!measure(options, &sizes)) return false;
    options->kv_budget = chance(10) ? 0 : draw_budget(sizes.least_bytes, sizes.bytes);
    options->host_budget = chance(30) ? 0 : draw_budget(sizes.least_host_bytes, sizes.host_bytes);
    seen.least += options->kv_budget == sizes.least_bytes;
    bool ok = engine_open(&place->engine, options, &error);
    snprintf(place->text, sizeof place->text, "schedule %ld: %s, %s rows, --kv %s --hot %d --slots %d -c %d --kv-budget %zu "
             "--host-budget %zu, %s, %s", seen.schedules + seen.round_schedules, model->directory, kv_names[model->dtype], mode_names[mode],
             options->hot_rows, options->sessions, options->context, options->kv_budget, options->host_budget,
             options->reclaim ? "proportional" : "whole", options->lookup ? "scan" : "direct");
    CHECK(ok, "%s: %s", place->text, error.text);
    return ok;
}

static void add_stats(const CacheStats *stats) {
    CacheStats *sum = &seen.cache;
    for (int tier = 0; tier < TIERS; tier++) sum->picked[tier] += stats->picked[tier];
    sum->fetched += stats->fetched, sum->staged += stats->staged, sum->bytes_backed_up += stats->bytes_backed_up;
    sum->bytes_populated += stats->bytes_populated, sum->pages_lent += stats->pages_lent;
    sum->pages_recalled += stats->pages_recalled, sum->shared_pages += stats->shared_pages;
    sum->admission_waits += stats->admission_waits, sum->tail_waits += stats->tail_waits;
}

/* When all have left, nothing is missing. */
static void close_place(Place *place) {
    Cache *cache = &place->engine.cache;
    for (int s = 0; s < cache->sessions; s++) cache_release(cache, s);
    for (int i = 0; i < 8; i++) cache_step(cache);
    CHECK(cache->device_pages.n_free == cache->device_pages.n_pages - 1 && !cache->n_transfers && !cache->n_recalled,
          "%s: %d of %d pages are free at the end", place->text, cache->device_pages.n_free, cache->device_pages.n_pages - 1);
    CHECK(cache->index_pages.n_free == cache->index_pages.n_pages - 1, "%s: index pages are lost", place->text);
    add_stats(&cache->stats);
    engine_close(&place->engine);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Numbers that go bad in one layer, for one session
 */

static struct {
    bool armed, key;            /* key: the index key, not the hidden state */
    int session, layer, at;
    const Row *rows;
} fault;

static void fault_entering(void *user, int layer, const float *hidden, const Row *rows, int n_rows) {
    (void)user, (void)hidden, (void)n_rows;
    fault.at = layer;
    fault.rows = rows;
}

static void faulty_add_norm(float *y, float *x, const float *branch, const float *weight, int n, int dim, float eps,
                            PassReport *report, int place) {
    for (int r = 0; fault.armed && !fault.key && fault.at == fault.layer && r < n; r++)
        if (fault.rows[r].session == fault.session) x[r * dim] = NAN;
    add_norm(y, x, branch, weight, n, dim, eps, report, place);
}

static void faulty_mix_streams(float *y, float *streams, const float *branch, const float *leaving, float *mixes,
                               const HyperWeights *weights, const float *entering, const float *norm, int n_rows,
                               const Config *config, PassReport *report, int place) {
    for (int r = 0; branch && fault.armed && fault.at == fault.layer && r < n_rows; r++)
        if (fault.rows[r].session == fault.session) streams[(size_t)(r * config->hc_mult * config->hidden_size)] = NAN;
    mix_streams(y, streams, branch, leaving, mixes, weights, entering, norm, n_rows, config, report, place);
}

static void faulty_store_index_keys(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *k, int dim,
                                    const float *weight, const float *bias, int turned, bool interleaved, const float *cosine,
                                    const float *sine, const float *head_weights, int heads, PassReport *report, int place,
                                    int weights_place) {
    for (int r = 0; fault.armed && fault.key && fault.at == fault.layer && r < n_rows; r++)
        if (fault.rows[r].session == fault.session) k[r * dim] = NAN;
    store_index_keys(base, format, ids, n_rows, k, dim, weight, bias, turned, interleaved, cosine, sine, head_weights, heads,
                     report, place, weights_place);
}

static Backend faulty_backend;

/* From now on a pass fails for that session, in a layer of which the faults have one. */
static void arm_fault(const Engine *engine, int session) {
    fault.armed = true;
    fault.session = session;
    fault.layer = random_below(engine->config.num_hidden_layers);
    fault.key = engine->config.indexer_full && engine->config.indexer_full[fault.layer] && chance(50);
}

static void prepare_faults(Engine *engine) {
    faulty_backend = c_backend;
    faulty_backend.add_norm = faulty_add_norm;
    faulty_backend.mix_streams = faulty_mix_streams;
    faulty_backend.store_index_keys = faulty_store_index_keys;
    engine->backend = &faulty_backend;
    engine->probe = (Probe){.entering = fault_entering};
    fault.armed = false;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Schedules of passes
 */

typedef struct Job {            /* a script, as a session runs it */
    bool runs;
    int script, prompt, length; /* ids known when it is admitted; rows it runs at most */
    int cached, take, drafts;   /* rows committed; of the pass; of those: its last ones, drafted and rejected */
} Job;

/* Up to as many rows of the jobs as one pass has, in a random order of sessions; a job that does not run has none. */
static int draw_pass(Place *place, const Model *model, Job *jobs, Row *rows) {
    Cache *cache = &place->engine.cache;
    int order[MOST_SESSIONS], n_rows = 0;
    bool prefills = chance(60);                     /* or everybody decodes */
    for (int s = 0; s < cache->sessions; s++) {
        int other = random_below(s + 1);
        order[s] = order[other];
        order[other] = s;
        jobs[s].take = 0;
    }
    for (int i = 0; i < cache->sessions; i++) {
        Job *job = &jobs[order[i]];
        int left = job->length - job->cached, room = place->engine.state.max_rows - n_rows;
        if (!job->runs || !room || !left || chance(10)) continue;
        int most = prefills && chance(50) ? chance(30) ? left : 40 : chance(20) ? QUERY_BLOCK : 1, wanted = 1 + random_below(most);
        if (job->cached < job->prompt && chance(60)) wanted = job->prompt - job->cached;
        wanted = wanted < left ? wanted : left;
        job->take = cache_room(cache, order[i], wanted < room ? wanted : room);
        CHECK(job->take >= 1, "%s: there is room for a row", place->text);
        job->drafts = job->take > 1 && job->take <= QUERY_BLOCK && chance(50) ? 1 + random_below(job->take - 1) : 0;
        for (int j = 0; j < job->take; j++) {
            bool draft = j >= job->take - job->drafts;
            int id = model->ids[job->script][job->cached + j];
            rows[n_rows++] = (Row){order[i], job->cached + j, draft && chance(70) ? random_below(model->vocab) : id};
        }
        seen.drafted += job->drafts;
    }
    return n_rows;
}

/* Every row that was not drafted is the reference's row; of some, the logits too. */
static bool compare_rows(Place *place, const Model *model, const Job *jobs, const Row *rows, int n_rows) {
    Engine *engine = &place->engine;
    Error error;
    size_t hidden = (size_t)model->hidden;
    for (int r = 0; r < n_rows; r++) {
        const Job *job = &jobs[rows[r].session];
        int position = rows[r].position;
        bool last = position == job->cached + job->take - job->drafts - 1;
        if (position >= job->cached + job->take - job->drafts) continue;
        const float *wanted = model->normed[job->script] + (size_t)position * hidden, *found = engine->state.normed + (size_t)r * hidden;
        bool same = !memcmp(wanted, found, hidden * sizeof(float));
        CHECK(same, "%s: script %d in slot %d, position %d of a pass of %d rows: other bits: %.9g, not %.9g", place->text, job->script,
              rows[r].session, position, n_rows, (double)found[0], (double)wanted[0]);
        if (!same) return false;
        seen.rows++;
        if (!last && r % 13) continue;
        bool ok = head(engine, rows, &r, 1, &error)
            && hash_bits(engine->state.logits, model->vocab) == model->logits[job->script][position];
        CHECK(ok, "%s: script %d, position %d: the logits have other bits", place->text, job->script, position);
        if (!ok) return false;
        seen.logits++;
    }
    return true;
}

/* Back to an earlier row, and on from there with any script that begins like this. */
static void go_back(Place *place, const Model *model, Job *job, int slot) {
    Cache *cache = &place->engine.cache;
    int n = chance(20) ? job->cached / PAGE_ROWS * PAGE_ROWS : random_below(job->cached + 1), script = random_below(SCRIPTS);
    if (cache->trail_layers && job->cached > MAX_BLOCK && chance(70)) n = job->cached - random_below(MAX_BLOCK + 1);
    n = cache_return(cache, slot, n);
    if (!cache_truncate(cache, slot, n)) {
        CHECK(place->options.host_budget, "%s: truncation is refused with a host tier for everything", place->text);
        seen.kept++;
        return;
    }
    job->cached = n;
    if (common_ids(model, script, job->script) >= n) job->script = script;
    job->prompt = 0;
    seen.truncated++;
}

/* Out of the hierarchy page by page, and in again as imported history. False: there was no room for it any more. */
static bool move(Place *place, Job *job, int slot) {
    Cache *cache = &place->engine.cache;
    size_t size = page_image_bytes(cache);
    int rows = job->cached / cache->ratio, pages = (rows + PAGE_ROWS - 1) / PAGE_ROWS, cached;
    uint8_t *images = allocate_zeroed((size_t)pages + 1, size), *trails = allocate_zeroed(trail_image_bytes(cache, job->cached), 1);
    cache_read_trails(cache, slot, job->cached, trails);
    for (int page = 0; page < pages; page++) cache_read_page(cache, slot, page, images + (size_t)page * size);
    cache_release(cache, slot);
    cache_step(cache);
    bool ok = cache_admit(cache, slot, NULL, 0, job->length, &cached);
    if (!ok) cache_stop_waiting(cache);
    for (int page = 0; ok && page < pages; page++) {
        int left = rows - page * PAGE_ROWS;
        cache_append_page(cache, slot, images + (size_t)page * size, left < PAGE_ROWS ? left : PAGE_ROWS);
    }
    if (ok && cache->trail_layers) cache_append_trails(cache, slot, job->cached, trails);
    free(images);
    free(trails);
    seen.moved++;
    return ok;
}

static Job draw_job(const Model *model) {
    Job job = {.runs = true, .script = random_below(SCRIPTS), .length = 1 + random_below(chance(30) ? 100 : model->context)};
    job.prompt = chance(20) ? job.length : 1 + random_below(job.length);
    return job;
}

/* One schedule, `n_jobs` jobs long. */
static void run_passes(const Model *model, KvMode mode, int n_jobs) {
    Place place;
    Error error;
    Row *rows = allocate_zeroed(MAX_PASS_ROWS, sizeof(Row));
    Job jobs[MOST_SESSIONS] = {{0}}, waiting = {0};
    int slot = 0, begun = 0, running = 0, rounds = 0, faults = chance(40) ? 4 : 0, unrest = random_below(12),
        arrivals = chance(30) ? 100 : 3 + random_below(20);     /* those who come late find pages lent */
    if (!open_place(&place, model, mode)) { free(rows); return; }
    Engine *engine = &place.engine;
    Cache *cache = &engine->cache;
    prepare_faults(engine);
    omp_set_num_threads(1 + random_below(2));
    while ((begun < n_jobs || running || waiting.runs) && rounds++ < 20000) {
        cache_step(cache);
        for (int tries = 0; tries < 4 && (waiting.runs || begun < n_jobs); tries++) {
            if (!waiting.runs) {
                for (slot = 0; slot < cache->sessions && jobs[slot].runs;) slot++;
                if (slot == cache->sessions || (running && !chance(arrivals))) break;
                waiting = draw_job(model);
                begun++;
            }
            if (!cache_admit(cache, slot, model->ids[waiting.script], waiting.prompt, waiting.length, &waiting.cached)) {
                if (!chance(5)) break;
                cache_stop_waiting(cache);              /* it gives up */
                waiting.runs = false;
                seen.given_up++;
                break;
            }
            jobs[slot] = waiting;
            waiting.runs = false;
            running++;
            seen.jobs++;
        }
        for (int s = 0; s < cache->sessions; s++) {
            if (!jobs[s].runs || !chance(unrest)) continue;
            int what = random_below(6);
            if (what >= 2) { go_back(&place, model, &jobs[s], s); continue; }
            bool stays = what == 1 && move(&place, &jobs[s], s);
            if (stays) continue;
            if (what == 0) cache_release(cache, s), seen.aborted++;
            jobs[s].runs = false;
            running--;
        }
        int n_rows = draw_pass(&place, model, jobs, rows);
        if (n_rows && chance(faults)) {
            arm_fault(engine, rows[random_below(n_rows)].session);
            bool ok = forward(engine, rows, n_rows, &error);
            CHECK(!ok && engine->failed_session == fault.session, "%s: the pass fails for session %d: %s", place.text, fault.session,
                  ok ? "went through" : error.text);
            fault.armed = false;
            seen.failed++;
            if (!chance(50)) continue;
            cache_release(cache, fault.session);    /* or it tries again, like all others */
            jobs[fault.session].runs = false;
            running--;
            continue;
        }
        bool ok = !n_rows || forward(engine, rows, n_rows, &error);
        CHECK(ok, "%s: %s", place.text, error.text);
        if (!ok || !compare_rows(&place, model, jobs, rows, n_rows)) break;
        seen.passes += n_rows > 0;
        for (int s = 0; s < cache->sessions; s++) {
            if (!jobs[s].runs || !jobs[s].take) continue;
            cache_commit(cache, s, jobs[s].cached += jobs[s].take - jobs[s].drafts);
            if (jobs[s].cached < jobs[s].length) continue;
            cache_release(cache, s);
            jobs[s].runs = false;
            running--;
        }
    }
    CHECK(rounds < 20000, "%s: everybody gets through", place.text);
    seen.schedules++;
    close_place(&place);
    free(rows);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Schedules of rounds
 */

enum { TALKS = 10, MAX_NEW = 24 };

typedef struct Talk {           /* a prompt, and what the model says to it in two streams */
    int script, prompt, max_new;
    int *ids[2];                /* stb_ds */
} Talk;

static Session begin_talk(const Model *model, const Talk *talk, Engine *engine, int slot, int stream, bool continues) {
    Session session = {.slot = slot, .stream = (uint64_t)(2 * talk->script + stream), .max_new = talk->max_new, .continues = continues,
                       .sampling = {.temperature = stream ? 0.9f : 0, .top_p = 1, .repeat_penalty = 1, .seed = 11}};
    memcpy(arraddnptr(session.ids, (size_t)talk->prompt), model->ids[talk->script], (size_t)talk->prompt * sizeof(int));
    session_begin(&session, engine);
    return session;
}

static bool open_talks(const Model *model, Talk *talks) {
    Runner runner;
    Error error;
    EngineOptions options = {.model = model->directory, .sessions = 1, .context = model->context, .kv_dtype = model->dtype};
    bool ok = runner_open(&runner, &options, false, NULL, &error);
    CHECK(ok, "%s", error.text);
    for (int t = 0; ok && t < TALKS; t++) {
        talks[t] = (Talk){.script = random_below(SCRIPTS), .max_new = 1 + random_below(MAX_NEW),
                          .prompt = 1 + random_below(chance(50) ? 40 : model->context - MAX_NEW)};
        for (int stream = 0; stream < 2; stream++) {
            Session session = begin_talk(model, &talks[t], &runner.engine, 0, stream, false);
            run_session(&runner, &session);
            memcpy(arraddnptr(talks[t].ids[stream], arrlenu(session.ids)), session.ids, arrlenu(session.ids) * sizeof(int));
            session_free(&session);
            cache_release(&runner.engine.cache, 0);
        }
    }
    if (ok) runner_close(&runner);
    return ok;
}

static void close_talks(Talk *talks) {
    for (int t = 0; t < TALKS; t++) arrfree(talks[t].ids[0]), arrfree(talks[t].ids[1]);
}

/* What a session said is what it says alone, as far as it came. */
static void compare_talk(const Place *place, const Session *session, const Talk *talk, int stream) {
    size_t n = arrlenu(session->ids);
    bool whole = session->finish != FINISH_ERROR && session->finish != FINISH_INTERRUPTED;
    CHECK(whole ? n == arrlenu(talk->ids[stream]) : n <= arrlenu(talk->ids[stream]), "%s: %zu ids, not %zu", place->text, n,
          arrlenu(talk->ids[stream]));
    CHECK(n <= arrlenu(talk->ids[stream]) && !memcmp(session->ids, talk->ids[stream], n * sizeof(int)), "%s: other ids", place->text);
    seen.round_tokens += (long)n - talk->prompt;
}

/* As a batch does, with chat's /regen, failures and interruptions between. */
static void run_rounds(const Model *model, const Talk *talks, KvMode mode, int n_jobs) {
    Place place;
    Error error;
    if (!open_place(&place, model, mode)) return;
    engine_close(&place.engine);
    Runner runner;
    bool ok = runner_open(&runner, &place.options, false, NULL, &error);
    CHECK(ok, "%s: %s", place.text, error.text);
    if (!ok) return;
    Cache *cache = &runner.engine.cache;
    Session sessions[MOST_SESSIONS];
    const Talk *talk_of[MOST_SESSIONS] = {NULL};
    int stream_of[MOST_SESSIONS], begun = 0, running = 0, rounds = 0, waiting = -1, slots = cache->sessions;
    prepare_faults(&runner.engine);
    for (; (begun < n_jobs || running) && rounds < 20000; rounds++) {
        for (; waiting >= 0 || (begun < n_jobs && running < slots); waiting = -1) {
            if (waiting < 0) {
                for (waiting = 0; talk_of[waiting];) waiting++;
                talk_of[waiting] = &talks[random_below(TALKS)];
                stream_of[waiting] = random_below(2);
                sessions[waiting] = begin_talk(model, talk_of[waiting], &runner.engine, waiting, stream_of[waiting], chance(30));
                begun++, running++;
            }
            if (!session_admit(&runner, &sessions[waiting])) break;
            seen.jobs++;
        }
        Session *pass[MOST_SESSIONS];
        int n = 0;
        for (int s = 0; s < slots; s++)
            if (talk_of[s]) pass[n++] = &sessions[s];
        if (n && chance(3)) arm_fault(&runner.engine, pass[random_below(n)]->slot);
        run_round(&runner, pass, n);
        fault.armed = false;
        seen.passes++;
        for (int s = 0; s < slots; s++) {
            if (!talk_of[s] || s == waiting) continue;
            if (chance(1) && sessions[s].finish == RUNNING) session_stop(&sessions[s], FINISH_INTERRUPTED), seen.aborted++;
            if (sessions[s].finish == RUNNING) continue;
            seen.failed += sessions[s].finish == FINISH_ERROR;
            compare_talk(&place, &sessions[s], talk_of[s], stream_of[s]);
            if (sessions[s].finish != FINISH_ERROR && sessions[s].continues && chance(60)) {     /* /regen, in the other stream */
                arrsetlen(sessions[s].ids, (size_t)talk_of[s]->prompt);
                stream_of[s] ^= 1;
                sessions[s].stream ^= 1;
                sessions[s].sampling.temperature = stream_of[s] ? 0.9f : 0;
                session_begin(&sessions[s], &runner.engine);
                seen.truncated++;
                if (sessions[s].finish == RUNNING) continue;
                CHECK(place.options.host_budget && strstr(sessions[s].error.text, "--host-budget"), "%s: %s", place.text,
                      sessions[s].error.text);
                seen.kept++;
            }
            session_free(&sessions[s]);
            cache_release(cache, s);
            talk_of[s] = NULL;
            running--;
        }
    }
    CHECK(rounds < 20000, "%s: everybody gets through", place.text);
    seen.round_schedules++;
    for (int s = 0; s < slots; s++) cache_release(cache, s);
    for (int i = 0; i < 8; i++) cache_step(cache);
    CHECK(cache->device_pages.n_free == cache->device_pages.n_pages - 1, "%s: %d of %d pages are free at the end", place.text,
          cache->device_pages.n_free, cache->device_pages.n_pages - 1);
    add_stats(&cache->stats);
    runner_close(&runner);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * All of it
 */

/* Most schedules in the mode that has most to go wrong. */
static KvMode turns(int i) { return i % 8 == 0 ? MODE_RESIDENT : i % 3 == 0 ? MODE_HISPARSE : MODE_ADAPTIVE; }

static void test_model(const char *directory, KvDtype dtype, int context, int n_schedules, int n_jobs, int n_rounds) {
    Model *model = allocate_zeroed(1, sizeof *model);
    Talk talks[TALKS] = {{0}};
    if (SHARE > 1) context /= 2, n_schedules = (n_schedules + SHARE - 1) / SHARE, n_rounds = 1;
    if (access(directory, R_OK)) {
        printf("%s: not there, skipped\n", directory);
        free(model);
        return;
    }
    double start = now();
    int failed = checks_failed;
    if (open_model(model, directory, dtype, context)) {
        for (int i = 0; i < n_schedules && checks_failed == failed; i++) run_passes(model, turns(i), n_jobs);
        if (n_rounds && open_talks(model, talks))
            for (int i = 0; i < n_rounds && checks_failed == failed; i++) run_rounds(model, talks, turns(i), 2 * n_jobs);
        close_talks(talks);
    }
    printf("%s: %s rows: %d schedules in %.1f s\n", directory, kv_names[dtype], n_schedules + n_rounds, now() - start);
    close_model(model);
    free(model);
}

int main(int argc, char **argv) {
    if (argc > 1) random_state = strtoull(argv[1], NULL, 10);
    for (KvDtype dtype = KV_F32; dtype <= KV_F8; dtype++) {
        test_model("tests/fixtures/glm_moe_dsa-a", dtype, 520, 34, 8, 8);
        test_model("tests/fixtures/deepseek_v32-c", dtype, 390, 30, 8, 6);
        test_model("tests/fixtures/qwen3-a", dtype, 200, 3, 8, 1);
        test_model("tests/fixtures/deepseek_v4-a", dtype, 1100, 5, 8, 1);
        test_model("tests/fixtures/deepseek_v4-c", dtype, 600, 3, 6, 1);
        test_model("tests/fixtures/deepseek_v41-a", dtype, 520, 5, 8, 1);
        test_model("tests/fixtures/deepseek_v41-c", dtype, 390, 4, 6, 1);
        if (SHARE > 1) continue;
        test_model("../shared/fixtures/glm_moe_dsa-c", dtype, 330, 4, 6, 1);
        test_model("../shared/fixtures/deepseek_v32-a", dtype, 330, 4, 6, 1);
        test_model("../shared/fixtures/deepseek_v32-c", dtype, 330, 4, 6, 1);
        test_model("../shared/fixtures/deepseek_v4-c", dtype, 330, 2, 6, 1);
        test_model("../shared/fixtures/deepseek_v41-a", dtype, 330, 2, 6, 1);
        test_model("weights/mini", dtype, 450, 2, 4, 1);
        test_model("weights/mini-v41", dtype, 450, 2, 4, 1);
    }
    const CacheStats *cache = &seen.cache;
    printf("%ld schedules of passes and %ld of rounds: %ld jobs, %ld passes, %ld rows and %ld logits compared, %ld tokens generated; "
           "%ld with the least budget\n", seen.schedules, seen.round_schedules, seen.jobs, seen.passes, seen.rows, seen.logits,
           seen.round_tokens, seen.least);
    printf("%ld aborted, %ld gave up waiting, %ld went back, %ld could not, %ld moved, %ld passes failed, %ld rows drafted in vain\n",
           seen.aborted, seen.given_up, seen.truncated, seen.kept, seen.moved, seen.failed, seen.drafted);
    printf("picked: %lu tail, %lu optional, %lu hot, %lu host; %lu staged; pages: %lu lent, %lu recalled, %lu shared; "
           "%lu waits to be admitted, %lu for a tail; %lu bytes populated\n", cache->picked[TIER_TAIL], cache->picked[TIER_OPTIONAL], cache->picked[TIER_HOT],
           cache->picked[TIER_HOST], cache->staged, cache->pages_lent, cache->pages_recalled, cache->shared_pages, cache->admission_waits,
           cache->tail_waits, cache->bytes_populated);
    if (SHARE > 1) return check_report();
    CHECK(seen.schedules >= 200, "%ld schedules are fewer than 200", seen.schedules);
    for (int tier = 0; tier < TIERS; tier++) CHECK(cache->picked[tier] > 1000, "tier %d is picked from", tier);
    CHECK(cache->staged && cache->pages_lent && cache->pages_recalled && cache->shared_pages && cache->bytes_populated
              && cache->admission_waits && cache->tail_waits, "everything that the hierarchy does has happened");
    CHECK(seen.aborted && seen.given_up && seen.truncated && seen.moved && seen.failed && seen.drafted && seen.least,
          "everything that a schedule does has happened");
    return check_report();
}
