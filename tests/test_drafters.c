/* test_drafters.c: drafters, from their files to their proposals. What DFlash, DFlash 2 and DSpark compute against the public reference
 * codes (tests/fixtures/drafters and whatever else lies in ../shared/fixtures/drafters), and the shipped drafters against PyTorch
 * (tests/fixtures/drafter-mini); the rule of acceptance; the division of a budget; files that are wrong; the ring; the operations against
 * plain rewrites in double precision.
 *
 *     test_drafters [DIR...]      DIR: fixtures (TARGET-DRAFTER-VARIANT or dvl-VARIANT), instead of everything else
 */
#include "../engine.c"
#include "../backend.c"
#include "check.h"
#include "passes.h"
#include "scratch.h"

#define FIXTURES "tests/fixtures/drafters/"

static const Sampling greedy = {.temperature = 0, .top_p = 1, .repeat_penalty = 1};

/* ---------------------------------------------------------------------------------------------------------------------
 * Golden files
 */

static const Tensor *golden_tensor(const Checkpoint *golden, const char *name) {
    const Tensor *tensor = checkpoint_find(golden, name);
    if (!tensor) fprintf(stderr, "%s: no tensor %s\n", golden->directory, name), exit(1);
    if ((uintptr_t)tensor->data % 4) fprintf(stderr, "%s: %s is not aligned\n", golden->directory, name), exit(1);
    return tensor;
}

static const float *floats(const Checkpoint *golden, const char *name) { return (const float *)golden_tensor(golden, name)->data; }
static const int *ints(const Checkpoint *golden, const char *name) { return (const int *)golden_tensor(golden, name)->data; }
static int extent(const Checkpoint *golden, const char *name, int dim) { return (int)golden_tensor(golden, name)->shape[dim]; }
static bool has(const Checkpoint *golden, const char *name) { return checkpoint_find(golden, name) != NULL; }

/* Raises *worst to the largest absolute difference; a NaN is a large one. */
static void differ(double *worst, const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double difference = fabs((double)a[i] - b[i]);
        *worst = difference <= *worst ? *worst : difference == difference ? difference : 1e30;
    }
}

/* A list of the best 16 against a golden one: values in order, ids as sets. Of two ids that lie at the border either may be in. Returns
 * how many ids are missing. */
static int compare_list(double *worst, const int *ids, const float *values, const int *wanted_ids, const float *wanted_values) {
    int missing = 0;
    differ(worst, values, wanted_values, CANDIDATES);
    for (int i = 0; i < CANDIDATES; i++)
        if (!occurs(ids, CANDIDATES, wanted_ids[i])) missing += fabsf(wanted_values[i] - wanted_values[CANDIDATES - 1]) > 1e-3f;
    return missing;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Rounds, step by step
 */

static bool open_drafter(Engine *engine, const char *model, const char *draft, int sessions, int context, KvMode mode, KvDtype dtype,
                         Error *error) {
    EngineOptions options = {.model = model, .draft = draft, .sessions = sessions, .context = context, .kv_mode = mode, .kv_dtype = dtype};
    return engine_open(engine, &options, error);
}

/* One pass over `count` rows of a session from position `at` on, ids[at...]: returns whether it went through. Nothing is committed. */
static bool pass_rows(Engine *engine, int session, const int *ids, int at, int count, Row *rows, Error *error) {
    int room = 0;
    for (int tries = 0; tries < 100 && room < count; tries++) {     /* a tail page may have to be copied to the host first */
        cache_step(&engine->cache);
        room = prepare_rows(engine, session, at, count, error);
    }
    if (room < count || count < 1) return fail(error, "room for %d rows, not %d", room, count);
    for (int r = 0; r < count; r++) rows[r] = (Row){session, at + r, ids[at + r]};
    return forward(engine, rows, count, error);
}

/* Rows [from, to) of the session run and are committed; those from `fed` on enter the ring. features: room for all of them, or NULL. */
static bool run_prompt(Engine *engine, int session, const int *ids, int from, int to, int fed, float *features, Error *error) {
    const size_t width = (size_t)engine->drafter.weights.fc.cols;
    for (int count; from < to; from += count) {
        Row rows[MAX_PASS_ROWS];
        int indices[MAX_PASS_ROWS], n = 0;
        count = to - from < PAGE_ROWS ? to - from : PAGE_ROWS;
        if (!pass_rows(engine, session, ids, from, count, rows, error)) return false;
        cache_commit(&engine->cache, session, from + count);
        if (features) memcpy(features + (size_t)from * width, engine->drafter.state.features, (size_t)count * width * sizeof(float));
        for (int r = 0; r < count; r++)
            if (from + r >= fed) indices[n++] = r;
        draft_feed(engine, rows, indices, n);
    }
    return true;
}

/* What the block pass does on its way, for a single block: the candidates of each call, and the residual stream behind each layer. */
static struct Record {
    int calls, adds;
    int ids[2 * MAX_BLOCK][CANDIDATES];
    float values[2 * MAX_BLOCK][CANDIDATES];
    const float *watched;       /* the draft's residual stream: two additions a layer */
    float layer_out[8][MAX_BLOCK * 512];
} record;

static void recorded_candidates(int *ids, float *values, size_t stride, const float *logits, int n, int vocab) {
    candidates(ids, values, stride, logits, n, vocab);
    if (n != 1 || record.calls == 2 * MAX_BLOCK) return;
    memcpy(record.ids[record.calls], ids, sizeof record.ids[0]);
    memcpy(record.values[record.calls++], values, sizeof record.values[0]);
}

static void recorded_add(float *y, const float *x, size_t n) {
    add(y, x, n);
    if (y != record.watched || n > MAX_BLOCK * 512 || record.adds == 16) return;
    if (++record.adds % 2 == 0) memcpy(record.layer_out[record.adds / 2 - 1], y, n * sizeof(float));
}

static void watch(Engine *engine) {
    static Backend recording;
    recording = c_backend;
    recording.candidates = recorded_candidates;
    recording.add = recorded_add;
    record.watched = engine->drafter.state.hidden;
    engine->backend = &recording;
}

/* One draft pass for one block. */
static void draft(Engine *engine, DraftBlock *block, bool features) {
    record.calls = record.adds = 0;
    draft_blocks(engine, block, 1, ACCEPT_COUPLED, features);
}

typedef struct Outcome { int accepted, successor, targets[MAX_BLOCK + 1]; } Outcome;

/* Verification of the first `count` - 1 drafts, commit and feed. false: the test's own fault, reported. */
static bool finish_round(Engine *engine, DraftBlock *block, int count, Sampler *sampler, Outcome *outcome) {
    Row rows[MAX_BLOCK + 1] = {0};
    Error error;
    int indices[MAX_BLOCK + 1], choices[MAX_BLOCK + 1], vocab = engine->config.vocab_size;
    bool ok = pass_rows(engine, block->session, block->ids, block->position, count, rows, &error);
    for (int r = 0; r < count; r++) indices[r] = r;
    ok = ok && head(engine, rows, indices, count, &error);
    CHECK(ok, "the round at %d is verified: %s", block->position, error.text);
    if (!ok) return false;
    for (int r = 0; r < count; r++) outcome->targets[r] = argmax(engine->state.logits + (size_t)r * (size_t)vocab, vocab);
    block->first = 0;
    block->count = count;
    engine->backend->accept(choices, &outcome->accepted, engine->state.logits, vocab, block, &engine->drafter.state.drafts, 1, ACCEPT_COUPLED,
                            sampler, 1);
    outcome->successor = choices[outcome->accepted];
    block->position += outcome->accepted + 1;
    block->ids[block->position] = outcome->successor;
    cache_commit(&engine->cache, block->session, block->position);
    draft_feed(engine, rows, indices, outcome->accepted + 1);
    return true;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Parity with the reference codes
 */

typedef struct Worst { double features, context, keys, values, unary, hidden, layer_out, selector, lattice, chain, confidence; } Worst;

/* The ring's rows [from, to) of a session against the golden context rows. */
static void compare_ring(Worst *worst, const Engine *engine, const Checkpoint *golden, int session, int from, int to) {
    const Config *config = &engine->drafter.config.backbone;
    const size_t width = (size_t)(config->num_key_value_heads * config->head_dim);
    for (int l = 0; l < config->num_hidden_layers; l++) {
        char name[32];
        snprintf(name, sizeof name, "ctx_k.%d", l);
        const float *keys = floats(golden, name);
        snprintf(name, sizeof name, "ctx_v.%d", l);
        const float *values = floats(golden, name);
        for (int t = from; t < to; t++) {
            const float *row = (const float *)(layer_ring(&engine->cache, l)
                                               + (size_t)ring_row(&engine->cache, session, t).id * engine->cache.draft_format.stride);
            differ(&worst->keys, row, keys + (size_t)t * width, width);
            differ(&worst->values, row + width, values + (size_t)t * width, width);
        }
    }
}

/* Everything that one block pass leaves, against round r. */
static void compare_pass(Worst *worst, const Engine *engine, const Checkpoint *golden, int r, int *missing) {
    const DraftConfig *config = &engine->drafter.config;
    const DraftState *state = &engine->drafter.state;
    const int m = config->slots, chain = config->markov_rank > 0;
    const size_t lists = (size_t)(r * m) * CANDIDATES, block = (size_t)(config->block_size * config->backbone.hidden_size);
    if (r < extent(golden, "block.hidden", 0)) differ(&worst->hidden, state->normed, floats(golden, "block.hidden") + (size_t)r * block, block);
    if (r >= extent(golden, "unary.ids", 0)) return;
    CHECK(record.calls == m * (1 + chain), "a list of candidates for each slot%s", chain ? ", before and after the chain" : "");
    for (int k = 0; k < m; k++) {
        int call = chain ? 2 * k : k;
        size_t at = lists + (size_t)k * CANDIDATES;
        *missing += compare_list(&worst->unary, record.ids[call], record.values[call], ints(golden, "unary.ids") + at,
                                 floats(golden, "unary.values") + at);
        if (chain) *missing += compare_list(&worst->chain, record.ids[call + 1], record.values[call + 1], ints(golden, "chain.ids") + at,
                                            floats(golden, "chain.values") + at);
        if (!config->selector_rank) continue;
        /* Scores belong to the golden ids: they are looked up, since near ties may stand in another order. */
        for (int c = 0; c < CANDIDATES; c++)
            for (int own = 0; own < CANDIDATES; own++)
                if (state->drafts.ids[k * CANDIDATES + own] == ints(golden, "unary.ids")[at + (size_t)c])
                    differ(&worst->selector, &state->drafts.scores[k * CANDIDATES + own], floats(golden, "sel.scores") + at + c, 1);
    }
    if (config->confidence_head) differ(&worst->confidence, state->drafts.confidence, floats(golden, "conf.logit") + (size_t)(r * m), (size_t)m);
}

/* S(a, b) for every pair of candidates of neighbouring slots, from the projected states of the pass just made. */
static void compare_lattice(Worst *worst, const Engine *engine, const Checkpoint *golden) {
    const DraftWeights *weights = &engine->drafter.weights;
    const int rank = engine->drafter.config.selector_rank, m = engine->drafter.config.slots, *ids = ints(golden, "unary.ids");
    for (int t = 1; t < m; t++)
        for (int a = 0; a < CANDIDATES; a++) {
            float scores[CANDIDATES];
            memcpy(scores, floats(golden, "unary.values") + t * CANDIDATES, sizeof scores);
            selector_scores(scores, ids + t * CANDIDATES, ids[(t - 1) * CANDIDATES + a], engine->drafter.state.ranks + t * rank,
                            &weights->predecessor, &weights->successor);
            differ(&worst->lattice, scores, floats(golden, "sel.lattice") + ((t - 1) * CANDIDATES + a) * CANDIDATES, CANDIDATES);
        }
}

/* How many drafts stand before the first whose confidence lies below the threshold. */
static int confident_prefix(const Drafts *drafts, float threshold) {
    int k = 0;
    while (k < drafts->slots && 1 / (1 + expf(-drafts->confidence[k])) >= threshold) k++;
    return k;
}

/* The generation once more, each round only as long as the drafter is sure: the same stream in other rounds. */
static void test_threshold(Engine *engine, const Checkpoint *golden, const char *what, Sampler *sampler) {
    const int P = extent(golden, "prompt_ids", 0), rounds = extent(golden, "thr.accepted", 0);
    const float threshold = *floats(golden, "conf.threshold");
    int ids[1024];
    Error error;
    Outcome outcome;
    memcpy(ids, ints(golden, "prompt_ids"), (size_t)P * sizeof(int));
    CHECK(run_prompt(engine, 1, ids, 0, P, 0, NULL, &error), "%s: the prompt of the second run: %s", what, error.text);
    ids[P] = *ints(golden, "round.anchor_id");
    DraftBlock block = {.session = 1, .position = P, .ids = ids, .sampling = &greedy};
    bool same = true;
    for (int r = 0; r < rounds && same; r++) {
        same = block.position == ints(golden, "thr.anchor_pos")[r];
        draft(engine, &block, false);
        int proposed = confident_prefix(&engine->drafter.state.drafts, threshold);
        if (!finish_round(engine, &block, 1 + proposed, sampler, &outcome)) return;
        same = same && proposed == ints(golden, "thr.proposed_count")[r] && outcome.accepted == ints(golden, "thr.accepted")[r]
               && outcome.successor == ints(golden, "thr.successor")[r];
        CHECK(same, "%s: round %d with the threshold %g: %d proposed, %d accepted", what, r, threshold, proposed, outcome.accepted);
    }
    const int n = extent(golden, "output_ids", 0) < block.position - P + 1 ? extent(golden, "output_ids", 0) : block.position - P + 1;
    CHECK(!memcmp(ids + P, ints(golden, "output_ids"), (size_t)n * sizeof(int)), "%s: the threshold leaves the stream as it is", what);
}

/* Plays a golden file's rounds with the engine; sessions: 2 where a second run follows. */
static void play_golden(Engine *engine, const Checkpoint *golden, const char *what) {
    const DraftConfig *config = &engine->drafter.config;
    const DraftState *state = &engine->drafter.state;
    const int P = extent(golden, "prompt_ids", 0), R = extent(golden, "round.accepted", 0), m = extent(golden, "round.proposed", 1),
              hidden = config->backbone.hidden_size;
    int ids[1024], missing = 0, wrong = 0;
    Error error;
    Outcome outcome;
    Worst worst = {0};
    CHECK(m == config->slots, "%s: drafts %d tokens a round, wanted %d", what, config->slots, m);
    if (m != config->slots) return;
    const bool whole = has(golden, "features");             /* goldens of the shipped drafters have no context */
    Sampler sampler = sampler_open(engine->config.vocab_size);
    float *features = allocate_zeroed((size_t)P * (size_t)engine->drafter.weights.fc.cols, sizeof(float));
    memcpy(ids, ints(golden, "prompt_ids"), (size_t)P * sizeof(int));
    watch(engine);
    CHECK(run_prompt(engine, 0, ids, 0, P, 0, features, &error), "%s: the prompt: %s", what, error.text);
    if (whole) {
        int last = (P - 1) / PAGE_ROWS * PAGE_ROWS;         /* of the last pass the projected features are still there */
        differ(&worst.features, features, floats(golden, "features"), (size_t)P * (size_t)engine->drafter.weights.fc.cols);
        differ(&worst.context, state->normed, floats(golden, "ctx") + (size_t)(last * hidden), (size_t)((P - last) * hidden));
        compare_ring(&worst, engine, golden, 0, 0, P);
    }
    free(features);
    ids[P] = *ints(golden, "round.anchor_id");
    DraftBlock block = {.session = 0, .position = P, .ids = ids, .sampling = &greedy};
    for (int r = 0; r < R; r++) {
        int n = block.position;
        CHECK(n == ints(golden, "round.anchor_pos")[r] && ids[n] == ints(golden, "round.anchor_id")[r], "%s: round %d begins where it should",
              what, r);
        draft(engine, &block, has(golden, "dvl.features") || config->markov_rank);
        compare_pass(&worst, engine, golden, r, &missing);
        if (r == 0 && has(golden, "sel.lattice")) compare_lattice(&worst, engine, golden);
        for (int l = 0; r == 0 && whole && l < config->backbone.num_hidden_layers; l++) {
            char name[32];
            snprintf(name, sizeof name, "block.layer_out.%d", l);
            differ(&worst.layer_out, record.layer_out[l], floats(golden, name), (size_t)(config->block_size * hidden));
        }
        if (has(golden, "conf.value"))
            for (int k = 0; k < m; k++) {
                float value = 1 / (1 + expf(-state->drafts.confidence[k]));
                differ(&worst.confidence, &value, floats(golden, "conf.value") + r * m + k, 1);
            }
        if (has(golden, "conf.prefix"))
            wrong += confident_prefix(&state->drafts, *floats(golden, "conf.threshold")) != ints(golden, "conf.prefix")[r];
        if (has(golden, "dvl.features") && r < extent(golden, "dvl.features", 0)) {
            double features_worst = 0, scores_worst = 0;
            float scores[MAX_BLOCK];
            differ(&features_worst, state->drafts.features, floats(golden, "dvl.features") + r * m * DVL_FEATURES, (size_t)(m * DVL_FEATURES));
            CHECK(features_worst <= 2e-3, "%s: round %d: what the predictor looks at differs by %g", what, r, features_worst);
            engine->backend->predict_lengths(scores, state->drafts.features, 1, &engine->drafter.predictor, state->scratch);
            differ(&scores_worst, scores, floats(golden, "dvl.scores") + r * m, (size_t)m);
            CHECK(scores_worst <= 2e-3, "%s: round %d: what the predictor says differs by %g", what, r, scores_worst);
        }
        wrong += memcmp(state->drafts.tokens, ints(golden, "round.proposed") + r * m, (size_t)m * sizeof(int)) != 0;
        wrong += memcmp(ids + n + 1, state->drafts.tokens, (size_t)m * sizeof(int)) != 0;
        if (!finish_round(engine, &block, m + 1, &sampler, &outcome)) break;
        wrong += memcmp(outcome.targets, ints(golden, "round.target_ids") + r * (m + 1), (size_t)(m + 1) * sizeof(int)) != 0;
        wrong += outcome.accepted != ints(golden, "round.accepted")[r] || outcome.successor != ints(golden, "round.successor")[r];
        if (whole) compare_ring(&worst, engine, golden, 0, n, block.position);
        CHECK(wrong == 0, "%s: round %d: drafts, target and acceptance are the golden ones", what, r);
        if (wrong) break;
    }
    int made = block.position - P + 1, said = extent(golden, "output_ids", 0);
    CHECK(made >= said && !memcmp(ids + P, ints(golden, "output_ids"), (size_t)said * sizeof(int)), "%s: the stream is the golden one", what);
    if (whole) CHECK(block.position == extent(golden, "ctx_k.0", 0), "%s: as many context rows as the golden file", what);
    /* The reference's last blocks are shortened to the limit, so only the rounds before these are the same. */
    for (int r = 0, left = said - 1; has(golden, "limit.produced") && r < R && left >= config->block_size; r++) {
        CHECK(ints(golden, "limit.produced")[r] == ints(golden, "round.accepted")[r] + 1, "%s: round %d of the limited run", what, r);
        left -= ints(golden, "limit.produced")[r];
    }
    CHECK(missing == 0, "%s: %d candidates are missing", what, missing);
#define BOUND(part, bound) CHECK(worst.part <= (bound), "%s: " #part " differs by %g", what, worst.part)
    BOUND(features, 2e-3);
    BOUND(context, 2e-3);
    BOUND(keys, 2e-3);
    BOUND(values, 2e-3);
    BOUND(unary, 2e-3);
    BOUND(hidden, 2e-3);
    BOUND(layer_out, 1e-2);
    BOUND(selector, 2e-3);
    BOUND(lattice, 2e-3);
    BOUND(chain, 2e-3);
    BOUND(confidence, 2e-3);
    printf("%s: features %.0e, keys %.0e, values %.0e, hidden %.0e, layers %.0e, unary %.0e, selector %.0e, chain %.0e, confidence %.0e\n", what,
           worst.features, worst.keys, worst.values, worst.hidden, worst.layer_out, worst.unary, worst.selector, worst.chain, worst.confidence);
    if (has(golden, "thr.accepted")) test_threshold(engine, golden, what, &sampler);
    sampler_close(&sampler);
}

/* ---- acceptance by rejection */

/* p of each row, how far each trial's numbers get, and what the next token is drawn from then. */
static void test_sampled(const Checkpoint *golden, const char *what, int c) {
    char name[9][48];
    static const char *const parts[] = {"temperature", "top_p", "top_k", "onehot", "draft_ids", "target_logits", "p", "u", "q"};
    for (int i = 0; i < 9; i++) snprintf(name[i], sizeof name[i], "sampled.%d.%s", c, parts[i]);
    char accepted_name[48], next_name[48], q_ids_name[48];
    snprintf(accepted_name, sizeof accepted_name, "sampled.%d.accepted", c);
    snprintf(next_name, sizeof next_name, "sampled.%d.next_dist", c);
    snprintf(q_ids_name, sizeof q_ids_name, "sampled.%d.q_ids", c);
    const Sampling sampling = {.temperature = *floats(golden, name[0]), .top_p = *floats(golden, name[1]), .top_k = *ints(golden, name[2]),
                               .repeat_penalty = 1};
    const int onehot = *ints(golden, name[3]), *drafts = ints(golden, name[4]), m = extent(golden, name[4], 0), V = extent(golden, name[6], 1),
              trials = extent(golden, name[7], 0);
    const float *p = floats(golden, name[6]);
    double worst_p = 0, worst_next = 0;
    int wrong = 0;
    Sampler sampler = sampler_open(V);
    float *dense = allocate_zeroed((size_t)V, sizeof(float)), *logits = allocate_zeroed((size_t)V, sizeof(float)), best;
    for (int trial = 0; trial < trials; trial++)
        for (int j = 0;; j++) {
            float q = 0, total = 0, own = 0;
            memcpy(logits, floats(golden, name[5]) + j * V, (size_t)V * sizeof(float));
            int kept = filter_tokens(&sampler, logits, V, &sampling, NULL, 0, &best);
            weigh_picks(&sampler, logits, kept, best);
            for (int i = 0; i < kept; i++) total += sampler.weights[i];
            memset(dense, 0, (size_t)V * sizeof(float));
            for (int i = 0; i < kept; i++) {
                dense[sampler.picks[i]] = sampler.weights[i] /= total;
                if (j < m && sampler.picks[i] == drafts[j]) own = sampler.weights[i];
            }
            differ(&worst_p, dense, p + j * V, (size_t)V);
            bool refused = false;
            if (j < m) {
                const float *law = onehot ? NULL : floats(golden, name[8]);
                if (onehot) q = 1;
                else if (!has(golden, q_ids_name)) q = law[j * V + drafts[j]];
                else for (int i = 0; i < CANDIDATES; i++)
                    if (ints(golden, q_ids_name)[j * CANDIDATES + i] == drafts[j]) q = law[j * CANDIDATES + i];
                refused = !accepts(floats(golden, name[7])[trial * m + j], own, q);
                if (!refused) continue;
                int ids[CANDIDATES];
                float part[CANDIDATES] = {0};
                if (onehot) {
                    for (int i = 0; i < CANDIDATES; i++) ids[i] = i ? -1 : drafts[j];
                    part[0] = 1;
                    leave_residual(&sampler, kept, ids, part);
                } else if (has(golden, q_ids_name)) {
                    leave_residual(&sampler, kept, ints(golden, q_ids_name) + j * CANDIDATES, law + j * CANDIDATES);
                } else for (int first = 0; first < V; first += CANDIDATES) {
                    /* A dense q, a sixteenth of it at a time: max(p - q, 0) of different tokens have nothing to do with each other. */
                    for (int i = 0; i < CANDIDATES; i++) {
                        ids[i] = first + i < V ? first + i : -1;
                        part[i] = first + i < V ? law[j * V + first + i] : 0;
                    }
                    leave_residual(&sampler, kept, ids, part);
                }
            }
            wrong += j != ints(golden, accepted_name)[trial];
            memset(dense, 0, (size_t)V * sizeof(float));
            for (int i = total = 0; i < kept; i++) total += sampler.weights[i];
            for (int i = 0; i < kept; i++) dense[sampler.picks[i]] = sampler.weights[i] / total;
            differ(&worst_next, dense, floats(golden, next_name) + trial * V, (size_t)V);
            break;
        }
    CHECK(worst_p <= 1e-4, "%s: sampled.%d: p differs by %g", what, c, worst_p);
    CHECK(wrong == 0, "%s: sampled.%d: %d of %d trials accept another number", what, c, wrong, trials);
    CHECK(worst_next <= 1e-4, "%s: sampled.%d: the next token's law differs by %g", what, c, worst_next);
    sampler_close(&sampler);
    free(dense), free(logits);
}

static void test_model_fixture(const char *directory) {
    char model[PATH_MAX], draft_path[PATH_MAX], what[PATH_MAX + 32], name[32];
    Checkpoint golden;
    Error error;
    bool ok = checkpoint_open(&golden, directory, &error);
    CHECK(ok, "%s: %s", directory, error.text);
    if (!ok) return;
    join(model, directory, "target"), join(draft_path, directory, "draft");
    for (KvMode mode = MODE_RESIDENT; mode < MODES; mode++) {
        Engine engine;
        ok = open_drafter(&engine, model, draft_path, 2, 256, mode, KV_F32, &error);
        CHECK(ok, "%s opens: %s", directory, error.text);
        if (!ok) break;
        snprintf(what, sizeof what, "%s (%s)", directory, kv_mode_names[mode]);
        if (mode == MODE_RESIDENT || has_latent_attention(&engine.config)) play_golden(&engine, &golden, what);
        engine_close(&engine);
    }
    for (int c = 0; snprintf(name, sizeof name, "sampled.%d.p", c), has(&golden, name); c++) test_sampled(&golden, directory, c);
    checkpoint_close(&golden);
}

/* The shipped drafters, against PyTorch. */
static void test_shipped(void) {
    static const char *const drafters[] = {"dflash2", "dspark"}, *const texts[] = {"stories", "tasks", "tech"};
    for (int d = 0; d < 2; d++)
        for (int t = 0; t < 3; t++) {
            char draft_path[64], name[64], *directory = scratch_directory();
            Checkpoint golden;
            Engine engine;
            Error error;
            snprintf(draft_path, sizeof draft_path, "weights/draft-%s", drafters[d]);
            snprintf(name, sizeof name, "%s-%s.safetensors", drafters[d], texts[t]);
            bool ok = copy_file("tests/fixtures/drafter-mini", directory, name) && checkpoint_open(&golden, directory, &error);
            CHECK(ok, "%s is there", name);
            free(directory);
            if (!ok) continue;
            ok = open_drafter(&engine, "weights/mini", draft_path, 1, 512, MODE_RESIDENT, KV_F32, &error);
            CHECK(ok, "weights/mini with %s opens: %s", draft_path, error.text);
            if (ok) {
                if (d == 0) CHECK(engine.drafter.predictor.layers == 3, "the shipped predictor of lengths is read");
                play_golden(&engine, &golden, name);
                engine_close(&engine);
            }
            checkpoint_close(&golden);
        }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * The division of a budget
 */

/* The same results another way: all scores in one order, of which the first are kept. Order: score descending, draft ascending, request
 * ascending. Returns whether (i, j) stands before (k, l). */
static bool stands_before(const float *scores, int slots, int i, int j, int k, int l) {
    float a = scores[i * slots + j], b = scores[k * slots + l];
    return a != b ? a > b : j != l ? j < l : i < k;
}

static void select_plainly(int *lengths, const float *scores, const int *limits, int n, int slots, int budget) {
    bool taken[64 * 16] = {0};
    for (int i = 0; i < n; i++) lengths[i] = 1;
    for (int left = budget - n; left > 0; left--) {
        int best = -1, at = -1;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < limits[i] - 1 && j < slots; j++)
                if (!taken[i * slots + j] && (best < 0 || stands_before(scores, slots, i, j, best, at))) best = i, at = j;
        if (best < 0) return;
        taken[best * slots + at] = true;
        lengths[best]++;
    }
}

static void seed_plainly(int *lengths, const float *scores, const int *limits, int n, int slots, int budget) {
    int total = 0;
    for (int i = 0; i < n; i++) {
        double sum = 0;
        for (int j = 0; j < slots; j++) sum += scores[i * slots + j];
        lengths[i] = (int)nearbyint(sum) + 1;
        if (lengths[i] > limits[i]) lengths[i] = limits[i];
        total += lengths[i];
    }
    for (int moved = 1; moved && total != budget;) {
        int pick = -1;
        for (int i = 0; i < n; i++) {
            bool open = total < budget ? lengths[i] < limits[i] : lengths[i] > 1;
            int j = lengths[i] - 1 - (total > budget);
            if (!open) continue;
            int l = pick < 0 ? 0 : lengths[pick] - 1 - (total > budget);
            if (pick < 0 || (total < budget ? stands_before(scores, slots, i, j, pick, l) : stands_before(scores, slots, pick, l, i, j))) pick = i;
        }
        moved = pick >= 0;
        if (moved) lengths[pick] += total < budget ? 1 : -1, total += total < budget ? 1 : -1;
    }
}

static void test_dvl_fixture(const char *directory) {
    Checkpoint golden;
    Error error;
    bool ok = checkpoint_open(&golden, directory, &error);
    CHECK(ok, "%s: %s", directory, error.text);
    if (!ok) return;
    const int cases = *ints(&golden, "n_cases");
    int limits[256], lengths[256];
    for (int c = 0; c < cases; c++) {
        char name[4][40];
        static const char *const parts[] = {"scores", "budget", "select", "seeded"};
        for (int i = 0; i < 4; i++) snprintf(name[i], sizeof name[i], "case.%d.%s", c, parts[i]);
        int n = extent(&golden, name[0], 0), slots = extent(&golden, name[0], 1), budget = *ints(&golden, name[1]);
        for (int i = 0; i < n; i++) limits[i] = slots + 1;
        c_backend.allocate(lengths, floats(&golden, name[0]), limits, n, slots, budget);
        CHECK(!memcmp(lengths, ints(&golden, name[2]), (size_t)n * sizeof(int)), "%s: case %d: select", directory, c);
        c_backend.allocate_seeded(lengths, floats(&golden, name[0]), limits, n, slots, budget);
        CHECK(!memcmp(lengths, ints(&golden, name[3]), (size_t)n * sizeof(int)), "%s: case %d: seeded", directory, c);
    }
    CHECK(cases > 0, "%s has cases", directory);
    checkpoint_close(&golden);
}

/* The largest sum of kept scores among all lengths within [low, high] whose sum is `budget`, by trying all of them. Scores are multiples of
 * 2^-8, so that sums are exact. */
static double best_sum(const float *scores, const int *low, const int *high, int n, int slots, int budget) {
    if (n == 0) return budget == 0 ? 0 : -1e9;
    double best = -1e9, kept = 0;
    for (int length = 1; length <= high[0] && length <= budget; length++) {
        if (length > 1) kept += scores[length - 2];
        if (length < low[0]) continue;
        double rest = best_sum(scores + slots, low + 1, high + 1, n - 1, slots, budget - length);
        if (kept + rest > best) best = kept + rest;
    }
    return best;
}

static double kept_sum(const float *scores, const int *lengths, int n, int slots) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        for (int j = 0; j + 1 < lengths[i]; j++) sum += scores[i * slots + j];
    return sum;
}

static void test_division(void) {
    int bad_sum = 0, bad_ties = 0, bad_seed = 0, bad_seed_sum = 0, bad_bounds = 0;
    random_state = 17;
    for (int trial = 0; trial < 6000; trial++) {
        int n = 1 + random_below(5), slots = 1 + random_below(5), limits[5], lengths[5], wanted[5], one[5], seeds[5], room = 0;
        const int grain = trial % 2 ? 256 : 4;              /* half of the cases are full of ties */
        float scores[25];
        for (int i = 0; i < n; i++) {
            float score = 1;
            for (int j = 0; j < slots; j++) {
                float next = (float)random_below(grain + 1) / (float)grain;
                scores[i * slots + j] = score = trial % 3 == 0 ? fminf(score, next) : score * 0.5f + 0.5f * fminf(score, next) < score ? fminf(score, next) : score;
            }
            limits[i] = random_below(3) ? slots + 1 : 1 + random_below(slots + 1);
            room += limits[i];
            one[i] = 1;
        }
        int budget = random_below(8) ? n + random_below(room - n + 1) : room + random_below(4), reached = budget < room ? budget : room, total = 0;
        c_backend.allocate(lengths, scores, limits, n, slots, budget);
        for (int i = 0; i < n; i++) total += lengths[i], bad_bounds += lengths[i] < 1 || lengths[i] > limits[i];
        bad_bounds += total != reached;
        bad_sum += kept_sum(scores, lengths, n, slots) != best_sum(scores, one, limits, n, slots, reached);
        select_plainly(wanted, scores, limits, n, slots, budget);
        bad_ties += memcmp(wanted, lengths, (size_t)n * sizeof(int)) != 0;

        c_backend.allocate_seeded(lengths, scores, limits, n, slots, budget);
        seed_plainly(wanted, scores, limits, n, slots, budget);
        bad_seed += memcmp(wanted, lengths, (size_t)n * sizeof(int)) != 0;
        int seeded = total = 0;
        for (int i = 0; i < n; i++) {
            double sum = 0;
            for (int j = 0; j < slots; j++) sum += scores[i * slots + j];
            seeds[i] = (int)nearbyint(sum) + 1 < limits[i] ? (int)nearbyint(sum) + 1 : limits[i];
            seeded += seeds[i];
            total += lengths[i];
            bad_bounds += lengths[i] < 1 || lengths[i] > limits[i];
        }
        bad_bounds += total != reached;
        /* From its seeds it only grows or only shrinks, and is the best of all such lengths. */
        bad_seed_sum += kept_sum(scores, lengths, n, slots)
                        != best_sum(scores, seeded <= reached ? seeds : one, seeded <= reached ? limits : seeds, n, slots, reached);
    }
    CHECK(bad_bounds == 0, "every session has a row, none more than its limit, and the budget is met: %d cases", bad_bounds);
    CHECK(bad_sum == 0, "no other lengths keep more: %d cases", bad_sum);
    CHECK(bad_ties == 0, "of equal scores the earlier draft, then the lower session: %d cases", bad_ties);
    CHECK(bad_seed == 0, "the paper's algorithm, step by step: %d cases", bad_seed);
    CHECK(bad_seed_sum == 0, "it is the best that grows or shrinks its seeds: %d cases", bad_seed_sum);
}

static void test_fixtures_below(const char *root) {
    DIR *directory = opendir(root);
    if (!directory) return;
    char path[PATH_MAX];
    int found = 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (*entry->d_name == '.' || !strchr(entry->d_name, '-')) continue;
        join(path, root, entry->d_name);
        found++;
        if (!strncmp(entry->d_name, "dvl-", 4)) test_dvl_fixture(path);
        else test_model_fixture(path);
    }
    closedir(directory);
    CHECK(found > 0, "%s has fixtures", root);
}

/* main-mark */
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *name = strrchr(argv[i], '/') ? strrchr(argv[i], '/') + 1 : argv[i];
        if (!strncmp(name, "dvl-", 4)) test_dvl_fixture(argv[i]);
        else test_model_fixture(argv[i]);
    }
    if (argc > 1) return check_report();
    test_fixtures_below("tests/fixtures/drafters");
    test_fixtures_below("../shared/fixtures/drafters");
    test_shipped();
    test_division();
    return check_report();
}
