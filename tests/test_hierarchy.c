/* test_hierarchy.c: the KV hierarchy against a model of it that has no cleverness, over many random traces; then each fault
 * that others met in the field (A6 of the specification) and each wish of users (A7), by name.
 *
 * Every cached row holds a signature of (history, source, position): "history" hashes all ids up to the row's own, so two
 * sessions have equal rows exactly where they may share them, and a row that was rejected differs from the one that took its
 * place. The model knows what is selected, committed and hot, by plain arrays; it takes from the cache only which pages are
 * lent, and checks that against the bytes. Copies between the tiers end when chance says so, and move their bytes at any moment
 * between their beginning and their end. Nothing here calls what engine.c checks itself by under TIDE_DEBUG.
 */
#include "../engine.c"
#include "check.h"
#include "scratch.h"

enum {
    MAX_ROWS = 1 << 10,         /* positions that the model keeps of a session */
    MAX_HOT = 256,
    MAX_SOURCES = 8,
    MAX_SESSIONS = 6,
    MAX_COPIES = 4096,
    NEVER = -1,
};

typedef struct Shape {
    bool dense;
    int sessions, context, pass_rows, topk, hot, sources, staging_blocks, live_sources;
    bool producer[MAX_SOURCES];
    int spare_pages, spare_host_pages;              /* beyond what one session of the whole context needs; NEVER: no budget */
    KvMode mode;
    Reclaim reclaim;
    Lookup lookup;
    KvDtype dtype;
    int width;                  /* values of the latent */
} Shape;

/* One session, as it should be. */
typedef struct Model {
    bool admitted;
    int rows;                   /* it asked for */
    int committed;
    int n_prompt, n_ids;        /* ids that are not drawn anew when their rows were rejected; ids known */
    int ids[MAX_ROWS];
    uint64_t history[MAX_ROWS];
    int tag[MAX_SOURCES][MAX_HOT];
    long used[MAX_SOURCES][MAX_HOT], clock[MAX_SOURCES];
    int last[MAX_ROWS], n_last; /* what was selected last */
} Model;

typedef struct Copy {
    Transfer transfer;
    bool moved;
    int moment;                 /* its bytes move: 0 at once, 1 at the end, 2 between */
} Copy;

typedef struct World {
    Engine engine;
    Backend backend;
    Shape shape;
    Model model[MAX_SESSIONS];
    Copy copies[MAX_COPIES];
    int n_copies;
    int delay;                  /* of 100 times that a copy is asked for, how often it is not done */
    int layer;                  /* which attends */
    DeviceRow *expected;        /* [rows, k] */
    int plan_begin, picked[TIERS], staged;
    uint8_t *free_before, *index_free_before;       /* pages that were free when last looked at */
    int asking, n_prompt, asks_rows, prompt[MAX_ROWS];      /* who waits to be admitted; -1: nobody */
    bool broken;
    char what[256];
} World;

static World *world;            /* whose backend is called */
static struct { long traces, passes, picked[TIERS], staged, recalled, lent, shared, waits, tail_waits, truncated, aborted, failed, delayed,
                imported, split_commits; } seen;

/* The first thing that is wrong ends a trace. */
#define REQUIRED_THAT(w, condition, ...)                                                                                        \
    do {                                                                                                                        \
        if ((condition) || (w)->broken) break;                                                                                  \
        (w)->broken = true;                                                                                                     \
        int length_ = snprintf((w)->what, sizeof (w)->what, "line %d: ", __LINE__);                                             \
        snprintf((w)->what + length_, sizeof (w)->what - (size_t)length_, __VA_ARGS__);                                         \
    } while (0)

static bool chance(int percent) { return random_below(100) < percent; }
static int between(int low, int high) { return low + random_below(high - low + 1); }

/* ---------------------------------------------------------------------------------------------------------------------
 * Signatures, and where rows lie: computed here once more, from the layout that engine.h promises
 */

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* source: of a payload; 100 + g: index keys of group g. */
static void sign(uint8_t *row, size_t bytes, uint64_t history, int source, int position) {
    uint64_t word = mix(mix(history, (uint64_t)source), (uint64_t)position);
    for (size_t i = 0; i < bytes; i += 8, word = word * 6364136223846793005u + 1)
        memcpy(row + i, &word, bytes - i < 8 ? bytes - i : 8);
}

static bool signed_so(const uint8_t *row, size_t bytes, uint64_t history, int source, int position) {
    uint8_t wanted[512];
    sign(wanted, bytes, history, source, position);
    return !memcmp(row, wanted, bytes);
}

static uint8_t *pool_row(const Cache *cache, int source, int64_t row) {
    return cache->device + ((size_t)source * (size_t)cache->device_pages.n_pages * 64 + (size_t)row) * cache->format.stride;
}

static uint8_t *host_row(const Cache *cache, int source, int64_t row) {
    return cache->host + ((size_t)source * (size_t)cache->host_pages.n_pages * 64 + (size_t)row) * cache->format.stride;
}

static uint8_t *key_row(const Cache *cache, int group, int64_t row) {
    return cache->index_keys + ((size_t)group * (size_t)cache->index_pages.n_pages * 64 + (size_t)row) * cache->index_format.stride;
}

static uint8_t *host_key_row(const Cache *cache, int group, int64_t row) {
    return cache->host_index + ((size_t)group * (size_t)cache->host_pages.n_pages * 64 + (size_t)row) * cache->index_format.stride;
}

/* A location that a resolve gave out, for one source. */
static uint8_t *located(const Cache *cache, int source, DeviceRow location) {
    int n_rows = cache->device_pages.n_pages * 64;
    size_t arena = cache->live_sources ? (size_t)(cache->member_of[source] % cache->live_sources) : 0;
    if (location.id < n_rows) return pool_row(cache, source, location.id);
    return cache->staging + (arena * (size_t)(cache->staging_blocks * cache->staging_rows) + (size_t)(location.id - n_rows))
                                * cache->format.stride;
}

static int ready_id(const Cache *cache, int s, int page) { return cache->tables.ready[s * cache->context_pages + page].id; }
static int host_id(const Cache *cache, int s, int page) { return cache->tables.host[s * cache->context_pages + page].id; }
static int index_id(const Cache *cache, int s, int page) { return cache->tables.index[s * cache->context_pages + page].id; }
static int tail_id(const Cache *cache, int s, int page) {
    return cache->tables.tail[s * cache->tail_ring + page % cache->tail_ring].id;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * A backend that takes its time, and looks
 */

static void junk_target(const Cache *cache, const Transfer *t) {
    for (int i = 0; i < cache->sources && t->device.id; i++)
        memset(t->to_host ? host_row(cache, i, (int64_t)t->host.id * 64 + t->first)
                          : pool_row(cache, i, (int64_t)t->device.id * 64 + t->first),
               0xa5, (size_t)t->count * cache->format.stride);
    for (int g = 0; g < cache->groups && t->index.id; g++)
        memset(t->to_host ? host_key_row(cache, g, (int64_t)t->host.id * 64 + t->first)
                          : key_row(cache, g, (int64_t)t->index.id * 64 + t->first),
               0xa5, (size_t)t->count * cache->index_format.stride);
}

static void move_bytes(Cache *cache, Copy *copy) {
    if (!copy->moved) c_backend.finish_copy(cache, &copy->transfer, true);
    copy->moved = true;
}

static void slow_start_copy(Cache *cache, const Transfer *transfer) {
    World *w = world;
    Copy *copy = &w->copies[w->n_copies++];
    *copy = (Copy){.transfer = *transfer, .moment = random_below(3)};
    junk_target(cache, transfer);
    if (copy->moment == 0) move_bytes(cache, copy);
}

static bool slow_finish_copy(Cache *cache, const Transfer *transfer, bool wait) {
    World *w = world;
    int i = 0;
    for (; i < w->n_copies; i++) {
        const Transfer *t = &w->copies[i].transfer;
        if (t->to_host == transfer->to_host && t->device.id == transfer->device.id && t->host.id == transfer->host.id
            && t->index.id == transfer->index.id && t->first == transfer->first) break;
    }
    REQUIRED_THAT(w, i < w->n_copies, "a copy is asked for that never began");
    if (i == w->n_copies) return true;
    if (!wait && chance(w->delay)) {
        if (w->copies[i].moment == 2 && chance(50)) move_bytes(cache, &w->copies[i]);
        seen.delayed++;
        return false;
    }
    move_bytes(cache, &w->copies[i]);
    w->copies[i] = w->copies[--w->n_copies];
    return true;
}

/* Copies of their own accord, at any time. */
static void let_bytes_move(World *w) {
    for (int i = 0; i < w->n_copies; i++)
        if (w->copies[i].moment == 2 && chance(20)) move_bytes(&w->engine.cache, &w->copies[i]);
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"

static void no_rotations(float *cosine, float *sine, const Row *rows, int n_rows, const float *frequency, int dim, float factor) {}

/* What a block of one session's queries must resolve to. Plain LRU: of the slots that this block does not use, those used longest ago,
 * of equals the lowest, in the order of their numbers for the missing rows in theirs. */
static void model_block(World *w, int group, const Selection *selection, const Row *rows, int begin, int end, int staged_before,
                        MissPlan *wanted) {
    const Cache *cache = &w->engine.cache;
    int s = rows[begin].session, k = selection->capacity, n = 0, misses = 0, victims = 0, staging = 0;
    Model *model = &w->model[s];
    static int needed[MAX_ROWS], slot_for[MAX_ROWS];
    static bool is_needed[MAX_ROWS], in_use[MAX_HOT], victim[MAX_HOT];
    long now = ++model->clock[group];
    memset(is_needed, 0, sizeof is_needed);
    memset(in_use, 0, sizeof in_use);
    memset(victim, 0, sizeof victim);
    for (int i = begin * k; i < end * k; i++) {
        int position = selection->ids[i], page = position / 64;
        w->expected[i].id = -1;
        if (position < 0) continue;
        bool tail = position >= cache->tables.tail_base[s];
        int direct = tail ? tail_id(cache, s, page) : ready_id(cache, s, page);
        if (direct) { w->expected[i].id = direct * 64 + position % 64; w->picked[tail ? TIER_TAIL : TIER_OPTIONAL]++; }
        else is_needed[position] = true;
    }
    for (int row = 0; row < MAX_ROWS; row++)
        if (is_needed[row]) { slot_for[n] = NEVER; needed[n++] = row; }
    for (int i = 0; i < n; i++) {
        for (int slot = 0; slot < cache->hot_rows; slot++)
            if (model->tag[group][slot] == needed[i]) slot_for[i] = slot;
        if (slot_for[i] != NEVER) { in_use[slot_for[i]] = true; model->used[group][slot_for[i]] = now; }
        else misses++;
    }
    static bool hit[MAX_ROWS];
    for (int i = 0; i < n; i++) hit[needed[i]] = slot_for[i] != NEVER;
    for (; victims < misses; victims++) {
        int oldest = NEVER;
        for (int slot = 0; slot < cache->hot_rows; slot++)
            if (!in_use[slot] && !victim[slot] && (oldest == NEVER || model->used[group][slot] < model->used[group][oldest]))
                oldest = slot;
        if (oldest == NEVER) break;
        victim[oldest] = true;
    }
    for (int i = 0, slot = 0; i < n; i++) {
        if (slot_for[i] != NEVER) continue;
        int page = needed[i] / 64;
        HostInfo *info = &cache->host_info[host_id(cache, s, page)];
        REQUIRED_THAT(w, host_id(cache, s, page) > 0 && info->rows > needed[i] % 64, "row %d is missing and not on the host", needed[i]);
        while (slot < cache->hot_rows && !victim[slot]) slot++;
        if (slot < cache->hot_rows) {
            model->tag[group][slot] = needed[i];
            model->used[group][slot] = now;
            slot_for[i] = slot++;
        } else slot_for[i] = MAX_HOT + staging++;
        wanted->from[wanted->count].id = (int64_t)host_id(cache, s, page) * 64 + needed[i] % 64;
        wanted->to[wanted->count++].id = slot_for[i] < MAX_HOT
            ? cache->tables.hot[s * cache->hot_pages + slot_for[i] / 64].id * 64 + slot_for[i] % 64
            : cache->device_pages.n_pages * 64 + staged_before * cache->staging_rows + slot_for[i] - MAX_HOT;
    }
    w->staged += staging;
    for (int i = begin * k; i < end * k; i++) {
        int position = selection->ids[i], at = 0;
        if (position < 0 || w->expected[i].id >= 0) continue;
        while (needed[at] != position) at++;
        w->picked[hit[position] ? TIER_HOT : TIER_HOST]++;
        w->expected[i].id = slot_for[at] < MAX_HOT
            ? cache->tables.hot[s * cache->hot_pages + slot_for[at] / 64].id * 64 + slot_for[at] % 64
            : cache->device_pages.n_pages * 64 + staged_before * cache->staging_rows + slot_for[at] - MAX_HOT;
    }
}

static void watched_resolve(Cache *cache, int group, const Selection *selection, const Row *rows, int begin, int end,
                            DeviceRow *locations, MissPlan *plan) {
    World *w = world;
    int k = selection->capacity, blocks = 0;
    static HostRow from[8 * MAX_ROWS];
    static DeviceRow to[8 * MAX_ROWS];
    MissPlan wanted = {.from = from, .to = to};
    memset(w->picked, 0, sizeof w->picked);
    memset(locations + begin * k, 0x5a, (size_t)((end - begin) * k) * sizeof *locations);
    w->staged = 0;
    for (int first = begin, last; first < end; first = last) {
        for (last = first; last < end && rows[last].session == rows[first].session;) last++;
        REQUIRED_THAT(w, last - first <= QUERY_BLOCK || !cache->hot_rows, "%d queries are resolved together", last - first);
        model_block(w, group, selection, rows, first, last, blocks, &wanted);
        blocks += last - first > 1;
    }
    MissPlan before = *plan;
    c_backend.resolve(cache, group, selection, rows, begin, end, locations, plan);
    REQUIRED_THAT(w, plan->count - before.count == wanted.count, "%d rows are to be fetched, not %d", plan->count - before.count,
                  wanted.count);
    REQUIRED_THAT(w, plan->count <= plan->capacity || !plan->count, "the plan of %d rows overflows", plan->count);
    for (int i = 0; i < wanted.count && !w->broken; i++)
        REQUIRED_THAT(w, plan->from[before.count + i].id == from[i].id && plan->to[before.count + i].id == to[i].id,
                      "entry %d of the plan copies %ld to %d, not %ld to %d", i, (long)plan->from[before.count + i].id,
                      plan->to[before.count + i].id, (long)from[i].id, to[i].id);
    for (int i = begin * k; i < end * k && !w->broken; i++)
        REQUIRED_THAT(w, locations[i].id == w->expected[i].id, "row %d rank %d: position %d is located at %d, not %d", i / k, i % k,
                      selection->ids[i], locations[i].id, w->expected[i].id);
    for (int tier = 0; tier < TIERS; tier++) {
        REQUIRED_THAT(w, plan->picked[tier] - before.picked[tier] == w->picked[tier], "tier %d counts %d picks, not %d", tier,
                      plan->picked[tier] - before.picked[tier], w->picked[tier]);
        seen.picked[tier] += w->picked[tier];
    }
    REQUIRED_THAT(w, plan->staged - before.staged == w->staged, "%d rows staged, not %d", plan->staged - before.staged, w->staged);
    seen.staged += w->staged;
}

static const Row *pass_rows;    /* of the pass under way */

/* Instead of attention: every location must show the selected row of this very source. */
static void watched_attention(float *z, const float *q, const RowPool *pool, const RowFormat *format, const DeviceRow *locations,
                              const int *count, int capacity, int n_rows, int heads, float scale) {
    World *w = world;
    const Cache *cache = &w->engine.cache;
    const State *state = &w->engine.state;
    int begin = (int)(locations - state->locations) / capacity;
    for (int r = begin; r < begin + n_rows; r++)
        for (int i = 0; i < capacity && !w->broken; i++) {
            int position = state->selection.ids[r * capacity + i];
            DeviceRow at = state->locations[r * capacity + i];
            if (position < 0) { REQUIRED_THAT(w, at.id == -1, "a pad is located at %d", at.id); continue; }
            REQUIRED_THAT(w, at.id >= 64 && at.id < cache->device_pages.n_pages * 64 + cache->staging_blocks * cache->staging_rows,
                          "position %d is located at %d", position, at.id);
            if (w->broken) return;
            REQUIRED_THAT(w, row_at(pool, format, at) == located(cache, w->layer, at), "source %d: its rows lie elsewhere", w->layer);
            REQUIRED_THAT(w, signed_so(located(cache, w->layer, at), format->bytes, w->model[pass_rows[r].session].history[position],
                                       w->layer, position),
                          "session %d, source %d: %d shows other bytes than position %d has", pass_rows[r].session, w->layer, at.id, position);
        }
    if (cache->staging_rows)    /* what was staged is forgotten */
        memset(pool->staging, 0xee, (size_t)(cache->staging_blocks * cache->staging_rows) * format->stride);
}

#pragma GCC diagnostic pop

/* ---------------------------------------------------------------------------------------------------------------------
 * A world: an engine without weights
 */

static bool open_world(World *w, const Shape *shape, Error *error) {
    Engine *engine = &w->engine;
    Config *config = &engine->config;
    Cache *cache = &engine->cache;
    *w = (World){.shape = *shape, .asking = -1};
    w->backend = c_backend;
    w->backend.live_sources = shape->live_sources;
    w->backend.start_copy = slow_start_copy;
    w->backend.finish_copy = slow_finish_copy;
    w->backend.resolve = watched_resolve;
    w->backend.sparse_attention = watched_attention;
    w->backend.rotations = no_rotations;
    engine->backend = &w->backend;
    *config = (Config){.family = shape->dense ? FAMILY_QWEN3 : FAMILY_GLM_MOE_DSA, .vocab_size = 2, .hidden_size = 1, .intermediate_size = 1,
                       .num_hidden_layers = shape->sources, .max_position_embeddings = shape->context, .num_attention_heads = 1,
                       .num_key_value_heads = 1, .head_dim = (shape->width + 1) / 2, .q_lora_rank = 1, .kv_lora_rank = shape->width,
                       .qk_nope_head_dim = 1, .qk_rope_head_dim = 4, .v_head_dim = 1, .index_n_heads = 1, .index_head_dim = 8,
                       .index_topk = shape->topk};
    config->indexer_full = allocate_zeroed((size_t)shape->sources, sizeof(bool));
    memcpy(config->indexer_full, shape->producer, (size_t)shape->sources * sizeof(bool));
    EngineOptions options = {.model = "a shape", .sessions = shape->sessions, .context = shape->context, .kv_dtype = shape->dtype,
                             .kv_mode = shape->mode, .reclaim = shape->reclaim, .lookup = shape->lookup, .hot_rows = shape->hot};
    if (!plan_memory(engine, &options, error)) return false;
    cache->pass_rows = shape->pass_rows;
    if (!size_hot_cache(cache, &options, error)) return false;
    if (cache->hot_rows) cache->staging_blocks = shape->staging_blocks;
    if (!size_pools(cache, &options, error)) return false;
    if (shape->spare_pages >= 0) options.kv_budget = cache->least_bytes + (size_t)shape->spare_pages * page_bytes(cache);
    if (shape->spare_host_pages >= 0 && cache->mode != MODE_RESIDENT)
        options.host_budget = cache->least_host_bytes + (size_t)shape->spare_host_pages * page_image_bytes(cache);
    if (!size_pools(cache, &options, error) || !take_memory(engine, error)) return false;
    w->expected = allocate_zeroed((size_t)engine->state.max_rows * (size_t)larger(cache->index_topk, 1), sizeof *w->expected);
    w->free_before = allocate_zeroed((size_t)cache->device_pages.n_pages + 1, 1);
    w->index_free_before = allocate_zeroed((size_t)cache->index_pages.n_pages + 1, 1);
    world = w;
    return true;
}

static void close_world(World *w) {
    free(w->expected);
    free(w->free_before);
    free(w->index_free_before);
    w->engine.backend = NULL;
    engine_close(&w->engine);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * What must hold between any two steps
 */

static bool keyed(const HostInfo *info) { return info->key != NULL; }

/* Every page has one owner, and none that a copy uses is free. A free page was free before, unless the step between passes
 * has just given it back (7): no pass that could read it is left. */
static void check_pages_owned_once(World *w, bool stepped) {
    const Cache *cache = &w->engine.cache;
    int n = cache->device_pages.n_pages, held = 0, admitted = 0;
    static uint8_t owned[1 << 16];
    memset(owned, 0, (size_t)n);
    uint8_t *now_free = allocate_zeroed((size_t)n + 1, 1), *index_free = allocate_zeroed((size_t)cache->index_pages.n_pages + 1, 1);
    for (int i = 0; i < cache->device_pages.n_free; i++) now_free[cache->device_pages.free[i]]++, owned[cache->device_pages.free[i]]++;
    for (int i = 0; i < cache->index_pages.n_free; i++) index_free[cache->index_pages.free[i]]++;
    for (int s = 0; s < w->shape.sessions; s++) {
        const SessionPages *session = &cache->session[s];
        if (!session->admitted) continue;
        admitted++;
        for (int page = 0; page < cache->hot_pages; page++) owned[cache->tables.hot[s * cache->hot_pages + page].id]++;
        for (int i = 0; i < session->n_spare; i++) owned[session->spare[i].id]++;
        for (int page = 0; page < cache->tail_ring; page++) owned[cache->tables.tail[s * cache->tail_ring + page].id]++;
        for (int page = 0; page < cache->context_pages; page++) {
            int id = ready_id(cache, s, page), index = index_id(cache, s, page);
            if (!(cache->mode == MODE_RESIDENT && id && tail_id(cache, s, page) == id)) owned[id]++;
            if (page < (w->model[s].rows + 63) / 64) {
                REQUIRED_THAT(w, index > 0 && !index_free[index]++, "session %d: index page %d of its page %d", s, index, page);
                REQUIRED_THAT(w, cache->mode == MODE_RESIDENT || host_id(cache, s, page) > 0, "session %d: page %d has no host page", s, page);
            }
        }
    }
    for (int i = 0; i < w->n_copies; i++) {
        const Transfer *t = &w->copies[i].transfer;
        REQUIRED_THAT(w, !now_free[t->device.id], "device page %d is free while a copy uses it", t->device.id);
    }
    for (int page = 1; page < n; page++) {
        REQUIRED_THAT(w, owned[page] <= 1, "device page %d has %d owners", page, owned[page]);
        held += !now_free[page];
        REQUIRED_THAT(w, stepped || !now_free[page] || w->free_before[page], "device page %d was given back before its readers were done", page);
    }
    REQUIRED_THAT(w, !now_free[0], "page 0 is handed out");
    if (cache->mode == MODE_ADAPTIVE)               /* eq. 3 */
        REQUIRED_THAT(w, held + cache->reserve <= n - 1 && admitted * (cache->hot_pages + 2) <= held,
                      "eq. 3: %d pages held and a reserve of %d in %d", held, cache->reserve, n - 1);
    memcpy(w->free_before, now_free, (size_t)n);
    memset(index_free, 0, (size_t)cache->index_pages.n_pages + 1);
    for (int i = 0; i < cache->index_pages.n_free; i++) {
        int page = cache->index_pages.free[i];
        index_free[page] = 1;
        REQUIRED_THAT(w, stepped || w->index_free_before[page], "index page %d was given back before its readers were done", page);
    }
    for (int i = 0; i < w->n_copies; i++)
        REQUIRED_THAT(w, !index_free[w->copies[i].transfer.index.id], "index page %d is free while a copy uses it",
                      w->copies[i].transfer.index.id);
    memcpy(w->index_free_before, index_free, (size_t)cache->index_pages.n_pages + 1);
    free(now_free);
    free(index_free);
}

/* Host pages: who names them, and that the free ones are named by nobody. */
static void check_host_pages(World *w) {
    const Cache *cache = &w->engine.cache;
    int n = cache->host_pages.n_pages;
    if (cache->mode == MODE_RESIDENT) return;
    static int names[1 << 16];
    memset(names, 0, (size_t)n * sizeof *names);
    for (int s = 0; s < w->shape.sessions; s++)
        for (int page = 0; cache->session[s].admitted && page < cache->context_pages; page++) names[host_id(cache, s, page)]++;
    for (int i = 0; i < w->n_copies; i++) names[w->copies[i].transfer.host.id]++;
    int idle = 0, named = 0;
    for (int i = 0; i < cache->host_pages.n_free; i++) {
        int page = cache->host_pages.free[i];
        REQUIRED_THAT(w, page > 0 && !names[page] && !keyed(&cache->host_info[page]), "host page %d is free and in use", page);
    }
    for (int page = 1; page < n; page++) {
        named += names[page] > 0;
        idle += !names[page] && keyed(&cache->host_info[page]);
    }
    REQUIRED_THAT(w, named + idle + cache->host_pages.n_free == n - 1, "of %d host pages %d are in use, %d idle, %d free", n - 1, named,
                  idle, cache->host_pages.n_free);
}

/* The rows of one session in one source and one group: each committed one has a valid copy (1), whatever is published is history and
 * right (5), whatever the host claims to have it has, and the hot cache holds what the model says, of rows that the host has (2). */
static void check_session(World *w, int s, int source, int group) {
    const Cache *cache = &w->engine.cache;
    const Model *model = &w->model[s];
    int base = cache->tables.tail_base[s], n = model->committed;
    size_t bytes = cache->format.bytes, key_bytes = cache->index_format.bytes;
    REQUIRED_THAT(w, cache->session[s].committed == n, "session %d: %d rows committed, not %d", s, cache->session[s].committed, n);
    REQUIRED_THAT(w, base % 64 == 0 && base <= n, "session %d: its tail begins at %d of %d", s, base, n);
    for (int page = 0; page < cache->context_pages && !w->broken; page++) {
        int ready = ready_id(cache, s, page), tail = page * 64 >= base ? tail_id(cache, s, page) : 0, host = host_id(cache, s, page),
            on_host = cache->mode == MODE_RESIDENT ? 0 : cache->host_info[host].rows, rows = n - page * 64 < 64 ? n - page * 64 : 64;
        if (ready && cache->mode != MODE_RESIDENT)
            REQUIRED_THAT(w, rows == 64 && page * 64 < base, "session %d: page %d is published with %d of its rows committed", s, page, rows);
        if (rows <= 0) continue;
        REQUIRED_THAT(w, ready || tail || on_host >= rows, "session %d: the rows of page %d are nowhere", s, page);
        REQUIRED_THAT(w, on_host <= rows, "session %d: the host has %d rows of page %d, of %d", s, on_host, page, rows);
        for (int row = 0; row < rows && !w->broken; row++) {
            int position = page * 64 + row;
            uint64_t history = model->history[position];
            if (ready)
                REQUIRED_THAT(w, signed_so(pool_row(cache, source, ready * 64 + row), bytes, history, source, position),
                              "session %d, source %d: position %d is published with other bytes", s, source, position);
            if (tail)
                REQUIRED_THAT(w, signed_so(pool_row(cache, source, tail * 64 + row), bytes, history, source, position),
                              "session %d, source %d: position %d is in the tail with other bytes", s, source, position);
            if (row < on_host)
                REQUIRED_THAT(w, signed_so(host_row(cache, source, (int64_t)host * 64 + row), bytes, history, source, position),
                              "session %d, source %d: position %d is on the host with other bytes", s, source, position);
            if (cache->groups)
                REQUIRED_THAT(w, signed_so(key_row(cache, group, (int64_t)index_id(cache, s, page) * 64 + row), key_bytes, history, 100 + group, position),
                              "session %d, group %d: position %d has another index key", s, group, position);
            if (row < on_host)
                REQUIRED_THAT(w, signed_so(host_key_row(cache, group, (int64_t)host * 64 + row), key_bytes, history, 100 + group, position),
                              "session %d, group %d: position %d has another index key on the host", s, group, position);
        }
    }
    int its_group = cache->groups ? cache->group_of[source] : 0;
    const int32_t *tag = cache->tables.tag + (size_t)(s * cache->groups + its_group) * (size_t)cache->hot_rows;
    for (int slot = 0; slot < cache->hot_rows && !w->broken; slot++) {
        REQUIRED_THAT(w, tag[slot] == model->tag[its_group][slot], "session %d, group %d: slot %d holds %d, not %d", s, its_group, slot,
                      tag[slot], model->tag[its_group][slot]);
        if (tag[slot] < 0 || w->broken) continue;
        REQUIRED_THAT(w, tag[slot] < n && cache->host_info[host_id(cache, s, tag[slot] / 64)].rows > tag[slot] % 64,
                      "session %d: hot row %d of %d is not on the host", s, tag[slot], n);
        int64_t row = (int64_t)cache->tables.hot[s * cache->hot_pages + slot / 64].id * 64 + slot % 64;
        REQUIRED_THAT(w, signed_so(pool_row(cache, source, row), bytes, model->history[tag[slot]], source, tag[slot]),
                      "session %d, source %d: hot slot %d shows other bytes than row %d has", s, source, slot, tag[slot]);
    }
}

static void check_world(World *w, bool stepped) {
    const Cache *cache = &w->engine.cache;
    check_pages_owned_once(w, stepped);
    check_host_pages(w);
    int source = random_below(cache->sources), group = cache->groups ? random_below(cache->groups) : 0;
    for (int s = 0; s < w->shape.sessions && !w->broken; s++)
        if (w->model[s].admitted) check_session(w, s, source, group);
    for (int arena = 0; arena < cache->live_sources; arena++)
        REQUIRED_THAT(w, cache->staging_owner[arena] == -1, "arena %d is not released", arena);     /* 8 */
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Steps of a trace
 */

static void forget_hot(Model *model) {
    for (int g = 0; g < MAX_SOURCES; g++) {
        model->clock[g] = 0;
        for (int slot = 0; slot < MAX_HOT; slot++) model->tag[g][slot] = -1, model->used[g][slot] = 0;
    }
}

static void set_id(Model *model, int position, int id) {
    model->ids[position] = id;
    model->history[position] = mix(position ? model->history[position - 1] : 1, (uint64_t)id + 1);
}

static int fresh_id(void) { return (int)(random_word() >> 1); }

/* Device pages that history has and keeps: a_r of eq. 4. */
static int optional_pages(const Cache *cache, int s) {
    int n = 0;
    for (int page = 0; cache->session[s].admitted && page < cache->context_pages; page++) {
        const HistoryPage *history = &cache->session[s].pages[page];
        n += (history->state == PAGE_READY || history->state == PAGE_FILLING) && !history->recalled;
    }
    return n;
}

/* Eq. 4 once more: how many pages each session should give. */
static void model_recall(const World *w, int deficit, int gives[MAX_SESSIONS]) {
    const Cache *cache = &w->engine.cache;
    int pages[MAX_SESSIONS], total = 0;
    double clean[MAX_SESSIONS] = {0};
    for (int s = 0; s < w->shape.sessions; s++) {
        gives[s] = 0;
        total += pages[s] = optional_pages(cache, s);
        for (int page = 0; pages[s] && page < cache->context_pages; page++) {
            const HistoryPage *history = &cache->session[s].pages[page];
            if ((history->state == PAGE_READY || history->state == PAGE_FILLING) && !history->recalled)
                clean[s] += cache->host_info[host_id(cache, s, page)].rows == 64;
        }
        if (pages[s]) clean[s] /= pages[s];
    }
    if (w->shape.mode != MODE_ADAPTIVE || w->shape.dense || deficit <= 0 || total < deficit) return;
    if (w->shape.reclaim == RECLAIM_PROPORTIONAL) {
        for (int s = 0; s < w->shape.sessions; s++) gives[s] = (deficit * pages[s] + total - 1) / total;
        return;
    }
    while (deficit > 0) {
        int best = -1;
        for (int s = 0; s < w->shape.sessions; s++) {
            if (!pages[s] || gives[s]) continue;
            if (best < 0 || clean[s] > clean[best] + 1e-9) { best = s; continue; }
            if (clean[s] < clean[best] - 1e-9) continue;
            if (pages[s] > pages[best] || (pages[s] == pages[best] && cache->session[s].populated < cache->session[best].populated)) best = s;
        }
        gives[best] = pages[best];
        deficit -= pages[best];
    }
}

/* Why a session may have to wait, from counts alone. */
static void check_refusal(World *w, int n_prompt, int deficit) {
    const Cache *cache = &w->engine.cache;
    int pages = (w->asks_rows + 63) / 64, idle = 0;
    bool computing = false;
    for (int page = 1; page < cache->host_pages.n_pages; page++) {
        const HostInfo *info = &cache->host_info[page];
        idle += keyed(info) && !info->refs;
        computing |= keyed(info) && info->rows < 64;
    }
    REQUIRED_THAT(w, deficit > 0 || cache->index_pages.n_free < pages || computing
                         || (cache->mode != MODE_RESIDENT && cache->host_pages.n_free + idle < pages + (n_prompt - 1) / 64),
                  "a session of %d rows has to wait for no reason", w->asks_rows);
}

static void take_in(World *w, int s, int cached) {
    Model *model = &w->model[s];
    *model = (Model){.admitted = true, .rows = w->asks_rows, .committed = cached, .n_prompt = w->n_prompt, .n_ids = w->n_prompt};
    for (int i = 0; i < w->n_prompt; i++) set_id(model, i, w->prompt[i]);
    forget_hot(model);
    w->asking = -1;
}

/* The session that asks, asks (again). */
static bool try_admission(World *w) {
    Cache *cache = &w->engine.cache;
    int s = w->asking, cached = 0, before[MAX_SESSIONS], gives[MAX_SESSIONS], kept = 0;
    int needed = cache->mode == MODE_RESIDENT ? (w->asks_rows + 63) / 64 : cache->hot_pages + 2;
    int deficit = needed + cache->reserve - cache->device_pages.n_free;
    for (int i = 0; i < w->shape.sessions; i++) {
        before[i] = optional_pages(cache, i);
        kept += before[i] + (cache->session[i].admitted ? cache->hot_pages + cache->session[i].n_spare + cache->session[i].n_tail : 0);
    }
    int coming = cache->device_pages.n_pages - 1 - cache->device_pages.n_free - kept;
    model_recall(w, deficit > 0 ? deficit - coming : 0, gives);
    bool in = cache_admit(cache, s, w->n_prompt ? w->prompt : NULL, w->n_prompt, w->asks_rows, &cached);
    if (!in) check_refusal(w, w->n_prompt, deficit);
    if (in) REQUIRED_THAT(w, deficit <= 0, "admitted into the reserve");
    for (int i = 0; i < w->shape.sessions; i++)
        if (i != s)
            REQUIRED_THAT(w, before[i] - optional_pages(cache, i) == gives[i], "eq. 4: session %d gives %d of its %d pages, not %d", i,
                          before[i] - optional_pages(cache, i), before[i], gives[i]);
    seen.waits += !in;
    if (!in) return false;
    REQUIRED_THAT(w, cached % 64 == 0 && cached <= larger(w->n_prompt - 1, 0), "%d of %d rows are there already", cached, w->n_prompt);
    seen.shared += cached / 64;
    take_in(w, s, cached);
    return true;
}

/* Somebody asks to be admitted: with a prompt made of a few kinds of pages, so that many begin alike, or all its own. */
static void ask(World *w) {
    const Cache *cache = &w->engine.cache;
    int free_slots[MAX_SESSIONS], n = 0;
    for (int s = 0; s < w->shape.sessions; s++)
        if (!w->model[s].admitted) free_slots[n++] = s;
    if (w->asking >= 0 || !n) return;
    w->asking = free_slots[random_below(n)];
    w->n_prompt = between(1, w->shape.context);
    if (chance(50)) {                               /* page boundaries */
        int boundary = 64 * between(1, larger(w->shape.context / 64, 1)) + between(-1, 1);
        if (boundary <= w->shape.context) w->n_prompt = boundary;
    }
    w->asks_rows = chance(30) ? w->n_prompt : chance(50) ? w->shape.context : between(w->n_prompt, w->shape.context);
    bool alike = chance(75);
    for (int i = 0, kind = 0; i < w->n_prompt; i++) {
        if (i % 64 == 0) kind = random_below(2);
        w->prompt[i] = alike ? kind * 1000 + i % 64 : fresh_id();
    }
}

static void release(World *w, int s) {
    cache_release(&w->engine.cache, s);
    w->model[s].admitted = false;
    seen.aborted += w->model[s].committed < w->model[s].n_prompt;
}

/* Between passes. What comes back is overwritten at once: who still reads it shows. */
static void step(World *w) {
    Cache *cache = &w->engine.cache;
    cache_step(cache);
    for (int i = 0; i < cache->device_pages.n_free; i++) {
        int page = cache->device_pages.free[i];
        if (!w->free_before[page])
            for (int source = 0; source < cache->sources; source++)
                memset(pool_row(cache, source, (int64_t)page * 64), 0xcc, 64 * cache->format.stride);
    }
    for (int i = 0; i < cache->index_pages.n_free; i++) {
        int page = cache->index_pages.free[i];
        if (!w->index_free_before[page])
            for (int g = 0; g < cache->groups; g++) memset(key_row(cache, g, (int64_t)page * 64), 0xcc, 64 * cache->index_format.stride);
    }
    check_world(w, true);
}

static void truncate_session(World *w, int s, int n) {
    Model *model = &w->model[s];
    Cache *cache = &w->engine.cache;
    bool changes = n < model->committed;
    if (!cache_truncate(cache, s, n)) {
        int keyed_pages = 0;
        for (int page = n / 64; page < (model->rows + 63) / 64; page++) keyed_pages += cache->host_info[host_id(cache, s, page)].refs > 1;
        REQUIRED_THAT(w, cache->host_pages.n_free < keyed_pages, "going back to %d fails with %d host pages free, %d wanted", n,
                      cache->host_pages.n_free, keyed_pages);
        return;
    }
    seen.truncated++;
    if (changes) forget_hot(model);
    if (changes) model->committed = n;
    if (n > model->committed) n = model->committed;
    model->n_prompt = model->n_ids = n;             /* what follows is something else */
    for (int more = random_below(100); more && model->n_ids < model->rows; more--) set_id(model, model->n_ids++, fresh_id());
    model->n_prompt = model->n_ids;
}

/* A session at rest: its pages are read, and come back as imported history. */
static void save_and_restore(World *w, int s) {
    Cache *cache = &w->engine.cache;
    Model *model = &w->model[s];
    int pages = (model->committed + 63) / 64;
    size_t bytes = page_image_bytes(cache);
    uint8_t *images = allocate_zeroed((size_t)pages + 1, bytes);
    for (int page = 0; page < pages; page++) {
        uint8_t *image = images + (size_t)page * bytes;
        int rows = model->committed - page * 64 < 64 ? model->committed - page * 64 : 64;
        cache_read_page(cache, s, page, image);
        for (int source = 0; source < cache->sources; source++)
            for (int row = 0; row < rows; row++)
                REQUIRED_THAT(w, signed_so(image + (size_t)(source * 64 + row) * cache->format.stride, cache->format.bytes,
                                           model->history[page * 64 + row], source, page * 64 + row),
                              "session %d: a saved page holds other bytes for position %d", s, page * 64 + row);
    }
    Model saved = *model;
    release(w, s);
    w->asking = s;
    w->n_prompt = 0;
    w->asks_rows = saved.rows;
    step(w);
    bool in = try_admission(w);
    if (!in) cache_withdraw(cache);
    w->asking = -1;
    if (in) {
        memcpy(model->ids, saved.ids, sizeof saved.ids);
        memcpy(model->history, saved.history, sizeof saved.history);
        model->n_ids = model->n_prompt = saved.n_prompt > saved.committed ? saved.n_prompt : saved.committed;
        for (int page = 0; page < pages; page++) {
            int rows = saved.committed - page * 64 < 64 ? saved.committed - page * 64 : 64;
            cache_append_page(cache, s, images + (size_t)page * bytes, rows);
            model->committed += rows;
        }
        seen.imported++;
        check_world(w, false);
    }
    free(images);
}

/* One query's selection out of the rows up to its own: recent ones, any, or nearly those of last time; in any order, pads anywhere. */
static void draw_selection(World *w, int s, int position, int *out, int k) {
    Model *model = &w->model[s];
    int kind = random_below(6), n = position + 1 < k ? position + 1 : k;
    static bool taken[MAX_ROWS];
    memset(taken, 0, (size_t)position + 1);
    if (chance(10)) n = random_below(n + 1);
    int span = kind == 4 ? between(1, position + 1) : position + 1, low = position + 1 - span;
    if (kind == 5) low = random_below(position + 1 - span + 1);
    if (n > span) n = span;
    for (int i = 0; i < n; i++) {
        int pick = low + random_below(span);
        if (kind == 0) pick = position - i;
        if (kind == 1 && i < model->n_last && model->last[i] <= position && model->last[i] >= 0 && !chance(10)) pick = model->last[i];
        if (kind == 2) pick = 64 * random_below(position / 64 + 1) + between(-1, 1);
        if (pick < low || pick > position) pick = low;
        while (taken[pick]) pick = pick + 1 > position ? low : pick + 1;
        taken[pick] = true;
        out[i] = pick;
    }
    for (int i = n; i < k; i++) out[i] = -1;
    if (n > 1 && chance(3)) out[0] = out[1];        /* not even twice the same row is too much */
    bool shuffled = n && chance(50);
    for (int i = k - 1; i > 0 && shuffled; i--) {
        int j = random_below(chance(80) ? (i < n ? i : n - 1) + 1 : i + 1), swap = out[i];
        out[i] = out[j];
        out[j] = swap;
    }
    model->n_last = k;
    memcpy(model->last, out, (size_t)k * sizeof *out);
}

static void sign_new_rows(World *w, const Row *rows, int n, int source) {
    Engine *engine = &w->engine;
    const Cache *cache = &engine->cache;
    for (int r = 0; r < n; r++) {
        uint64_t history = w->model[rows[r].session].history[rows[r].position];
        int at = engine->state.kv_rows[r].id, key = engine->state.index_rows[r].id;
        REQUIRED_THAT(w, at >= 64 && at < cache->device_pages.n_pages * 64, "position %d is to be stored at %d", rows[r].position, at);
        if (w->broken) return;
        sign(pool_row(cache, source, at), cache->format.bytes, history, source, rows[r].position);
        if (cache->groups && w->shape.producer[source])
            sign(key_row(cache, cache->group_of[source], key), cache->index_format.bytes, history, 100 + cache->group_of[source], rows[r].position);
    }
}

/* Dense attention walks the map of a resident session. */
static void check_dense(World *w, const Row *rows, int n, int source) {
    const Cache *cache = &w->engine.cache;
    for (int r = 0; r < n && !w->broken; r++)
        for (int position = 0; position <= rows[r].position; position += position + 70 < rows[r].position ? between(1, 70) : 1)
            REQUIRED_THAT(w, signed_so(pool_row(cache, source, ready_id(cache, rows[r].session, position / 64) * 64 + position % 64),
                                       cache->format.bytes, w->model[rows[r].session].history[position], source, position),
                          "session %d, source %d: position %d is not in the map", rows[r].session, source, position);
}

/* All layers over the rows. fails_at: the layer in which the pass fails, or -1. */
static void run_pass(World *w, const Row *rows, int n, int fails_at) {
    Engine *engine = &w->engine;
    Cache *cache = &engine->cache;
    State *state = &engine->state;
    Error error;
    int failed;
    bool placed = cache_place(cache, rows, n, &failed, &error);
    REQUIRED_THAT(w, placed, "%.200s", error.text);
    if (!placed) return;
    split_runs(state, cache, rows, n);
    place_rows(engine, rows, n);
    pass_rows = rows;
    for (w->layer = 0; w->layer < cache->sources && !w->broken && w->layer != fails_at; w->layer++) {
        sign_new_rows(w, rows, n, w->layer);
        if (w->shape.dense) { check_dense(w, rows, n, w->layer); continue; }
        if (w->shape.producer[w->layer])
            for (int r = 0; r < n; r++) {
                draw_selection(w, rows[r].session, rows[r].position, state->selection.ids + r * cache->index_topk, cache->index_topk);
                state->selection.count[r] = cache->index_topk;
            }
        if (!w->broken) attend_selection(engine, w->layer, rows);
        if (chance(30)) let_bytes_move(w);
    }
    seen.passes++;
    if (fails_at < 0) return;
    for (int r = 0; r < n; r++) {                   /* as forward() does */
        cache_forget_hot(cache, rows[r].session);
        forget_hot(&w->model[rows[r].session]);
    }
    seen.failed++;
}

/* Some sessions run some rows: one, a block to verify, a piece of a prompt. */
static void pass(World *w) {
    Cache *cache = &w->engine.cache;
    static Row rows[MAX_ROWS * MAX_SESSIONS];
    int n = 0, took[MAX_SESSIONS] = {0}, first = random_below(w->shape.sessions);
    for (int i = 0; i < w->shape.sessions; i++) {
        int s = (first + i) % w->shape.sessions;
        Model *model = &w->model[s];
        int left = model->rows - model->committed, pending = model->n_ids - model->committed, limit = w->shape.pass_rows - n;
        if (!model->admitted || left <= 0 || limit <= 0 || chance(15)) continue;
        int wanted = pending > 1 ? (chance(50) ? pending : between(1, pending)) : chance(50) ? 1 : between(1, QUERY_BLOCK);
        if (wanted > left) wanted = left;
        if (wanted > limit) wanted = limit;
        int room = cache_room(cache, s, wanted);
        REQUIRED_THAT(w, room >= 1 && room <= wanted, "session %d: room for %d rows of %d", s, room, wanted);
        if (w->broken) return;
        for (took[s] = 0; took[s] < room; took[s]++, n++) {
            int position = model->committed + took[s];
            if (position >= model->n_ids) set_id(model, position, fresh_id()), model->n_ids = position + 1;
            rows[n] = (Row){s, position, 0};
        }
    }
    if (!n) return;
    int fails_at = chance(4) ? random_below(cache->sources) : -1;
    run_pass(w, rows, n, fails_at);
    for (int s = 0; s < w->shape.sessions && !w->broken; s++) {
        Model *model = &w->model[s];
        if (!took[s]) continue;
        int keeps = fails_at >= 0 ? 0 : took[s] > 1 && chance(40) ? between(1, took[s]) : took[s];     /* eq. 7: the anchor and A drafts */
        seen.split_commits += keeps && keeps < took[s];
        model->committed += keeps;
        model->n_ids = larger(model->n_prompt, model->committed);
        if (keeps) cache_commit(cache, s, model->committed);
    }
    check_world(w, false);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Traces
 */

static Shape random_shape(void) {
    static const int widths[] = {4, 12, 16, 28, 64};
    Shape shape = {.dense = chance(5), .sessions = between(1, MAX_SESSIONS), .context = between(20, 460), .sources = between(1, 6),
                   .staging_blocks = between(1, 3), .live_sources = between(1, 4), .mode = chance(15) ? MODE_RESIDENT : chance(30) ? MODE_HISPARSE : MODE_ADAPTIVE,
                   .reclaim = chance(50) ? RECLAIM_WHOLE : RECLAIM_PROPORTIONAL, .lookup = chance(50) ? LOOKUP_DIRECT : LOOKUP_SCAN,
                   .dtype = (KvDtype)random_below(3), .width = widths[random_below(5)]};
    shape.pass_rows = chance(50) ? 64 : between(8, shape.context);
    if (shape.pass_rows > shape.context) shape.pass_rows = shape.context;
    shape.topk = between(1, chance(50) ? 6 : 24);
    int k = shape.topk < shape.context ? shape.topk : shape.context;
    shape.hot = chance(30) ? k : between(k, chance(50) ? k + 8 : 140);
    shape.spare_pages = chance(15) ? NEVER : random_below(30);
    shape.spare_host_pages = chance(30) ? NEVER : random_below(12);
    for (int i = 0; i < shape.sources; i++) shape.producer[i] = i == 0 || chance(40);
    return shape;
}

static void end_trace(World *w) {
    Cache *cache = &w->engine.cache;
    for (int s = 0; s < w->shape.sessions; s++)
        if (w->model[s].admitted) release(w, s);
    if (w->asking >= 0) cache_withdraw(cache);
    w->delay = 0;
    check_world(w, false);
    for (int i = 0; i < 3; i++) step(w);
    int idle = 0;
    for (int page = 1; page < cache->host_pages.n_pages; page++) idle += keyed(&cache->host_info[page]);
    REQUIRED_THAT(w, cache->device_pages.n_free == cache->device_pages.n_pages - 1, "%d of %d device pages came back",
                  cache->device_pages.n_free, cache->device_pages.n_pages - 1);
    REQUIRED_THAT(w, cache->index_pages.n_free == cache->index_pages.n_pages - 1, "%d of %d index pages came back",
                  cache->index_pages.n_free, cache->index_pages.n_pages - 1);
    REQUIRED_THAT(w, cache->mode == MODE_RESIDENT || cache->host_pages.n_free + idle == cache->host_pages.n_pages - 1,
                  "%d of %d host pages came back, %d are kept", cache->host_pages.n_free, cache->host_pages.n_pages - 1, idle);
    REQUIRED_THAT(w, !w->n_copies && !cache->n_transfers && !cache->n_retired && !cache->n_recalled, "something is still under way");
}

static void play_round(World *w) {
    Cache *cache = &w->engine.cache;
    int s = random_below(w->shape.sessions);
    Model *model = &w->model[s];
    if (chance(50)) let_bytes_move(w);
    if (model->admitted && chance(6)) { release(w, s); check_world(w, false); }
    else if (model->admitted && chance(8)) {
        int n = chance(70) ? random_below(model->committed + 1) : chance(50) ? 64 * random_below(model->committed / 64 + 1) : model->committed;
        truncate_session(w, s, n);
        check_world(w, false);
    } else if (model->admitted && w->asking < 0 && chance(4)) save_and_restore(w, s);
    for (int tries = between(0, 2); tries > 0 && !w->broken; tries--) {
        ask(w);
        if (w->asking < 0) break;
        try_admission(w);
        check_world(w, false);
        if (w->asking >= 0 && chance(5)) { cache_withdraw(cache); w->asking = -1; }
    }
    if (!chance(10) && !w->broken) step(w);
    if (chance(20) && w->asking >= 0 && !w->broken) try_admission(w), check_world(w, false);
    if (!w->broken) pass(w);
}

static bool run_trace(uint64_t seed, int rounds) {
    static World w;
    static const int delays[] = {0, 30, 70, 95};
    Error error;
    random_state = seed * 0x9e3779b97f4a7c15u + 1;
    for (int i = 0; i < 4; i++) random_word();
    Shape shape = random_shape();
    if (!open_world(&w, &shape, &error)) {
        CHECK(false, "trace %llu: %s", (unsigned long long)seed, error.text);
        return false;
    }
    w.delay = delays[random_below(4)];
    check_world(&w, true);
    int round = 0;
    for (; round < rounds && !w.broken; round++) play_round(&w);
    if (!w.broken) end_trace(&w);
    const CacheStats *stats = &w.engine.cache.stats;
    seen.traces++;
    seen.recalled += (long)stats->pages_recalled;
    seen.lent += (long)stats->pages_lent;
    seen.tail_waits += (long)stats->tail_waits;
    bool ok = !w.broken;
    CHECK(ok, "trace %llu, round %d (mode %d): %s", (unsigned long long)seed, round, w.engine.cache.mode, w.what);
    close_world(&w);
    return ok;
}

static void test_random_traces(void) {
    const char *wanted = getenv("TRACES"), *from = getenv("TRACE");
    int traces = wanted ? atoi(wanted) : 10000, failures = 0;
    for (uint64_t seed = from ? strtoull(from, NULL, 10) : 0; traces > 0 && failures < 3; traces--, seed++) failures += !run_trace(seed, 24);
    printf("%ld traces, %ld passes; rows found in tail %ld, optional %ld, hot %ld, host %ld, of those staged %ld; pages lent %ld, "
           "recalled %ld, shared %ld; waits %ld, of tails %ld; truncated %ld, aborted %ld, failed passes %ld, imported %ld, "
           "partly accepted %ld, copies asked for too early %ld\n",
           seen.traces, seen.passes, seen.picked[TIER_TAIL], seen.picked[TIER_OPTIONAL], seen.picked[TIER_HOT], seen.picked[TIER_HOST],
           seen.staged, seen.lent, seen.recalled, seen.shared, seen.waits, seen.tail_waits, seen.truncated, seen.aborted, seen.failed,
           seen.imported, seen.split_commits, seen.delayed);
}

int main(void) {
    test_random_traces();
    return check_report();
}
