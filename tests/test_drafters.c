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
        const SessionPages *pages = &engine->cache.session[session];
        cache_step(&engine->cache);
        /* Where it goes straight on nothing is taken back: not even the keys of its prompt's pages. */
        room = pages->admitted && pages->committed == at ? cache_room(&engine->cache, session, count)
                                                         : prepare_rows(engine, session, at, count, error);
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

/* What the block pass does on its way, for a single block: the candidates of each row, and the residual stream behind each layer. */
static struct Record {
    int calls, adds;
    int ids[2 * MAX_BLOCK][CANDIDATES];
    float values[2 * MAX_BLOCK][CANDIDATES];
    const float *watched;       /* the draft's residual stream: two additions a layer */
    float layer_out[8][MAX_BLOCK * 512];
} record;

static void recorded_candidates(int *ids, float *values, size_t stride, const float *logits, int n, int vocab,
                                const int *target_ids) {
    candidates(ids, values, stride, logits, n, vocab, target_ids);
    for (int r = 0; r < n && record.calls < 2 * MAX_BLOCK; r++) {
        memcpy(record.ids[record.calls], ids + (size_t)r * stride, sizeof record.ids[0]);
        memcpy(record.values[record.calls++], values + (size_t)r * stride, sizeof record.values[0]);
    }
}

static void recorded_add_norm(float *y, float *x, const float *branch, const float *weight, int n, int dim, float eps,
                              PassReport *report, int place) {
    add_norm(y, x, branch, weight, n, dim, eps, report, place);
    if (x != record.watched || n * dim > MAX_BLOCK * 512 || record.adds == 16) return;
    if (++record.adds % 2 == 0) memcpy(record.layer_out[record.adds / 2 - 1], x, (size_t)(n * dim) * sizeof(float));
}

static void watch(Engine *engine) {
    static Backend recording;
    recording = c_backend;
    recording.candidates = recorded_candidates;
    recording.add_norm = recorded_add_norm;
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
    DraftBlock block = {.session = 1, .position = P, .ids = ids, .sampling = greedy};
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
    Sampler sampler = sampler_open(&c_backend, engine->config.vocab_size);
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
    DraftBlock block = {.session = 0, .position = P, .ids = ids, .sampling = greedy};
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
    sampler_close(&c_backend, &sampler);
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
    Sampler sampler = sampler_open(&c_backend, V);
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
    sampler_close(&c_backend, &sampler);
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
                scores[i * slots + j] = score = fminf(score, random_below(3) ? next : 1);
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

/* ---------------------------------------------------------------------------------------------------------------------
 * Files of drafters, changed
 */

typedef struct Piece {          /* a tensor to be written */
    char name[96];
    const char *dtype;
    int rank;
    int64_t shape[4];
    const void *data;           /* NULL: zeros */
    size_t size;
} Piece;

/* The tensors of a checkpoint as pieces (stb_ds), which name its bytes. */
static Piece *pieces_of(const Checkpoint *checkpoint) {
    Piece *pieces = NULL;
    for (size_t i = 0; i < arrlenu(checkpoint->tensors); i++) {
        const Tensor *tensor = &checkpoint->tensors[i];
        Piece piece = {.dtype = dtype_names[tensor->dtype], .rank = tensor->rank, .data = tensor->data, .size = tensor->size};
        snprintf(piece.name, sizeof piece.name, "%s", tensor->name);
        memcpy(piece.shape, tensor->shape, (size_t)tensor->rank * sizeof *piece.shape);
        arrput(pieces, piece);
    }
    return pieces;
}

static Piece *find_piece(Piece *pieces, const char *name) {
    for (size_t i = 0; i < arrlenu(pieces); i++)
        if (!strcmp(pieces[i].name, name)) return &pieces[i];
    fprintf(stderr, "no piece %s\n", name);
    exit(1);
}

static void remove_piece(Piece *pieces, const char *name) {
    arrdel(pieces, find_piece(pieces, name) - pieces);
}

static Piece piece_of(const char *name, const char *dtype, const void *data, int rank, const int64_t *shape) {
    Piece piece = {.dtype = dtype, .rank = rank, .data = data, .size = dtype_size(dtype_by_name(dtype))};
    snprintf(piece.name, sizeof piece.name, "%s", name);
    for (int i = 0; i < rank; i++) piece.size *= (size_t)(piece.shape[i] = shape[i]);
    return piece;
}

static void write_pieces(const char *directory, const char *name, const Piece *pieces) {
    cJSON *header = cJSON_CreateObject();
    size_t at = 0;
    for (size_t i = 0; i < arrlenu(pieces); at += pieces[i++].size) {
        cJSON *entry = cJSON_AddObjectToObject(header, pieces[i].name), *shape = cJSON_AddArrayToObject(entry, "shape"),
              *offsets = cJSON_AddArrayToObject(entry, "data_offsets");
        cJSON_AddStringToObject(entry, "dtype", pieces[i].dtype);
        for (int d = 0; d < pieces[i].rank; d++) cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)pieces[i].shape[d]));
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)at));
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(at + pieces[i].size)));
    }
    char *text = cJSON_PrintUnformatted(header), path[PATH_MAX];
    uint8_t length[8];
    size_t written = strlen(text), padded = (written + 7) / 8 * 8;
    store_u64(length, padded);
    FILE *file = fopen(join(path, directory, name), "wb");
    bool ok = file && fwrite(length, 1, 8, file) == 8 && fwrite(text, 1, written, file) == written
              && fwrite("        ", 1, padded - written, file) == padded - written;
    for (size_t i = 0; ok && i < arrlenu(pieces); i++)
        ok = pieces[i].data ? fwrite(pieces[i].data, 1, pieces[i].size, file) == pieces[i].size
                            : !fseek(file, (long)pieces[i].size, SEEK_CUR);         /* a hole */
    if (!ok || fflush(file) || ftruncate(fileno(file), (off_t)(8 + padded + at)) || fclose(file)) perror(path), exit(1);
    cJSON_free(text);
    cJSON_Delete(header);
}

static cJSON *read_config_json(const char *directory) {
    char path[PATH_MAX];
    Error error;
    cJSON *json = json_read(join(path, directory, "config.json"), MAX_JSON_FILE, &error);
    if (!json) fprintf(stderr, "%s\n", error.text), exit(1);
    return json;
}

/* Sets a key, possibly inside an object ("dflash_config.block_size"), to a JSON value; NULL removes it. */
static void set_key(cJSON *json, const char *key, const char *value) {
    const char *dot = strchr(key, '.');
    if (dot) {
        char outer[64];
        snprintf(outer, sizeof outer, "%.*s", (int)(dot - key), key);
        if (!cJSON_GetObjectItemCaseSensitive(json, outer)) cJSON_AddObjectToObject(json, outer);
        json = cJSON_GetObjectItemCaseSensitive(json, outer);
        key = dot + 1;
    }
    cJSON_DeleteItemFromObjectCaseSensitive(json, key);
    cJSON *item = value ? cJSON_Parse(value) : NULL;
    if (value && !item) fprintf(stderr, "the test's own JSON: %s\n", value), exit(1);
    if (item) cJSON_AddItemToObject(json, key, item);
}

static void write_config(const char *directory, cJSON *json) {
    char *text = cJSON_Print(json);
    write_text(directory, "config.json", text);
    cJSON_free(text);
    cJSON_Delete(json);
}

/* A failure's message is one line and names the thing. */
static void check_refused(bool ok, const Error *error, const char *thing, const char *what) {
    CHECK(!ok, "%s: refused", what);
    if (!ok) CHECK(strstr(error->text, thing) && !strchr(error->text, '\n'), "%s: wanted \"%s\" in: %s", what, thing, error->text);
}

/* A copy of a fixture's drafter with one key changed; the caller frees the name. */
static char *draft_with(const char *fixture, const char *key, const char *value) {
    char path[PATH_MAX], *directory = copy_checkpoint(join(path, fixture, "draft"));
    cJSON *json = read_config_json(directory);
    if (key) set_key(json, key, value);
    write_config(directory, json);
    return directory;
}

/* Whether the fixture's target opens with the drafter in `directory`, which may take long names. */
static bool opens_with(const char *fixture, const char *directory, Engine *engine, Error *error) {
    char model[PATH_MAX];
    return open_drafter(engine, join(model, fixture, "target"), directory, 1, 256, MODE_RESIDENT, KV_F32, error);
}

static void check_config(const char *fixture, const char *key, const char *value, const char *thing) {
    Engine engine;
    Error error;
    char what[256], *directory = draft_with(fixture, key, value);
    snprintf(what, sizeof what, "%s with %s %s", fixture + strlen(FIXTURES), key, value ? value : "missing");
    bool ok = opens_with(fixture, directory, &engine, &error);
    if (thing) check_refused(ok, &error, thing, what);
    else CHECK(ok, "%s: %s", what, error.text);
    if (ok) engine_close(&engine);
    free(directory);
}

static void test_configs(void) {
    const char *dflash = FIXTURES "qwen3-dflash-a", *dflash2 = FIXTURES "qwen3-dflash2-a", *dspark = FIXTURES "qwen3-dspark-a",
               *glm = FIXTURES "glm_moe_dsa-dspark-a";
    static const struct { int which; const char *key, *value, *thing; } refusals[] = {
        {0, "dflash_config.target_layer_ids", NULL, "target_layer_ids: found nothing"},
        {0, "dflash_config.target_layer_ids", "[]", "target_layer_ids"},
        {0, "dflash_config.target_layer_ids", "7", "target_layer_ids"},
        {0, "dflash_config.target_layer_ids", "[0,2,5]", "target_layer_ids: found [0,2,5]"},
        {0, "dflash_config.target_layer_ids", "[0,2,-2]", "target_layer_ids"},
        {0, "dflash_config.target_layer_ids", "[0,2,1.5]", "target_layer_ids"},
        {0, "dflash_config.target_layer_ids", "[0,2,\"3\"]", "target_layer_ids"},
        {0, "dflash_config.target_layer_ids", "[0,2]", "fc.weight"},
        {2, "target_layer_ids", NULL, "target_layer_ids"},
        {2, "target_layer_ids", "[0,1,99]", "target_layer_ids"},
        {0, "num_target_layers", "4", "num_target_layers: found 4, wanted 5"},
        {0, "num_target_layers", "\"5\"", "num_target_layers"},
        {0, "vocab_size", "95", "vocab_size: found 95, wanted 96"},
        {0, "hidden_size", "32", "hidden_size: found 32, wanted 64"},
        {0, "architectures", "[\"Eagle3LlamaForCausalLM\"]", "Eagle3LlamaForCausalLM"},
        {0, "architectures", "[\"DFlashSomething\"]", "DFlashSomething"},
        {0, "architectures", "[]", "architectures"},
        {0, "architectures", NULL, "architectures"},
        {0, "dflash_config.projector_type", "\"domino\"", "projector_type: found \"domino\""},
        {0, "projector_type", "\"domino\"", "projector_type"},
        {2, "markov_head_type", "\"gated\"", "markov_head_type: found \"gated\""},
        {2, "markov_head_type", "\"rnn\"", "markov_head_type: found \"rnn\""},
        {2, "markov_head_type", "3", "markov_head_type"},
        {2, "markov_rank", "9", "markov_w1"},
        {2, "markov_rank", "-1", "markov_rank"},
        {2, "confidence_head_with_markov", "false", "confidence_head.proj.weight"},
        {1, "dflash_config.selector_top_k", "8", "selector_top_k: found 8, wanted 16"},
        {1, "dflash_config.selector_rank", NULL, "selector_rank"},
        {1, "dflash_config.selector_rank", "16", "candidate_selector."},
        {1, "dflash_config.conv_group_size", "24", "conv_group_size"},
        {1, "dflash_config.conv_group_size", "0", "conv_group_size"},
        {1, "dflash_config.conv_kernel_size", "3", "attention_conv"},
        {1, "dflash_config.conv_kernel_size", "9", "conv_kernel_size"},
        {1, "dflash_config.block_size", NULL, "block_size: found nothing"},
        {1, "dflash_config.block_size", "1", "block_size: found 1"},
        {1, "dflash_config.block_size", "64", "block_size: found 64"},
        {0, "block_size", "1", "block_size"},
        {0, "block_size", "33", "block_size"},
        {2, "block_size", "64", "block_size"},
        {2, "block_size", "4.5", "block_size"},
        {1, "sliding_window", "7", "sliding_window: found 7"},
        {1, "sliding_window", "0", "sliding_window"},
        {1, "sliding_window", "null", "sliding_window: found nothing"},
        {1, "sliding_window", NULL, "sliding_window"},
        {1, "layer_types", "[\"sliding_attention\"]", "layer_types"},
        {1, "layer_types", "[\"sliding_attention\",\"linear_attention\"]", "layer_types"},
        {1, "layer_types", "\"sliding_attention\"", "layer_types"},
        {1, "is_causal", "\"no\"", "is_causal"},
        {0, "dflash_config.mask_token_id", NULL, "mask_token_id"},
        {0, "dflash_config.mask_token_id", "96", "mask_token_id: found 96"},
        {0, "dflash_config.mask_token_id", "-1", "mask_token_id"},
        {2, "sample_from_anchor", "\"yes\"", "sample_from_anchor"},
        {2, "draft_vocab_size", "97", "draft_vocab_size"},
        {2, "draft_vocab_size", "64", "lm_head.weight"},
        {0, "head_dim", "31", "head_dim"},
        {0, "num_key_value_heads", "3", "num_key_value_heads"},
        {0, "num_hidden_layers", "3", "layer_types"},
        {0, "num_hidden_layers", "1", "layers.1."},
        {1, "num_hidden_layers", "1", "layers.1."},
        {0, "hidden_act", "\"gelu\"", "hidden_act"},
        {0, "attention_bias", "true", "attention_bias"},
        {0, "rope_theta", NULL, "rope_theta"},
        {0, "rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8}", "rope_type"},
        {1, "dflash_config.final_logit_softcapping", "-3", "final_logit_softcapping"},
        {1, "dflash_config.output_multiplier", "\"2\"", "output_multiplier"},
        {0, "speculators_model_type", "\"eagle3\"", "speculators_model_type: found \"eagle3\""},
        {0, "speculators_model_type", "\"dflash\"", "transformer_layer_config"},
    };
    const char *fixtures[] = {dflash, dflash2, dspark};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        check_config(fixtures[refusals[i].which], refusals[i].key, refusals[i].value, refusals[i].thing);
    check_config(glm, "num_target_layers", "78", "num_target_layers");
    /* What files may leave out, or say in another place. */
    check_config(dflash, "num_target_layers", NULL, NULL);
    check_config(dflash, "layer_types", NULL, NULL);
    check_config(dflash, "dflash_config.block_size", "4", NULL);
    check_config(dflash, "dflash_config.projector_type", "\"dflash\"", NULL);
    check_config(dflash2, "dflash_config.selector_top_k", NULL, NULL);
    check_config(dflash2, "dflash_config.conv_group_size", NULL, NULL);
    check_config(dspark, "markov_head_type", NULL, NULL);
    check_config(dspark, "confidence_head_with_markov", NULL, NULL);
    check_config(dspark, "dspark_config.mask_token_id", "94", NULL);
    check_config(dspark, "architectures", "[\"DSparkDraftModel\"]", NULL);

    /* A config that is no object, and none at all. */
    Engine engine;
    Error error;
    char *directory = draft_with(dflash, NULL, NULL), path[PATH_MAX];
    write_text(directory, "config.json", "[1, 2]");
    check_refused(opens_with(dflash, directory, &engine, &error), &error, "config.json", "a list for a config");
    write_text(directory, "config.json", "{\"architectures\": [\"DFlashDraftModel\"");
    check_refused(opens_with(dflash, directory, &engine, &error), &error, "config.json", "half a config");
    unlink(join(path, directory, "config.json"));
    check_refused(opens_with(dflash, directory, &engine, &error), &error, "config.json", "no config");
    free(directory);
    directory = draft_with(dflash, NULL, NULL);
    unlink(join(path, directory, "model.safetensors"));
    check_refused(opens_with(dflash, directory, &engine, &error), &error, directory, "no weights");
    free(directory);
}

/* What the configs say. */
static void test_config_meaning(void) {
    static const struct { const char *name; int block, first, slots, window, conv, selector, markov, taps[3]; float cap, multiplier, scale; } known[] = {
        {"qwen3-dflash-a", 8, 1, 7, INT_MAX, 0, 0, 0, {0, 2, 3}, 0, 1, 1},
        {"qwen3-dflash2-a", 8, 1, 7, 24, 2, 8, 0, {0, 2, 3}, 0, 1, 1},
        {"qwen3-dspark-a", 5, 0, 5, INT_MAX, 0, 0, 8, {0, 2, 3}, 0, 1, 1},
        {"glm_moe_dsa-dflash2-a", 8, 1, 7, 24, 2, 8, 0, {0, 1, 3}, 20, 1.25f, 0.5f},
        {"glm_moe_dsa-dspark-a", 5, 0, 5, INT_MAX, 0, 0, 8, {0, 1, 3}, 0, 1, 1},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        Engine engine;
        Error error;
        char fixture[96], path[PATH_MAX];
        snprintf(fixture, sizeof fixture, FIXTURES "%s", known[i].name);
        bool ok = opens_with(fixture, join(path, fixture, "draft"), &engine, &error);
        CHECK(ok, "%s opens: %s", fixture, error.text);
        if (!ok) continue;
        const DraftConfig *config = &engine.drafter.config;
        CHECK(config->block_size == known[i].block && config->first_slot == known[i].first && config->slots == known[i].slots
                  && config->conv_kernel_size == known[i].conv && config->selector_rank == known[i].selector
                  && config->markov_rank == known[i].markov && config->confidence_head == (known[i].markov > 0) && config->mask_token_id == 94,
              "%s: its block and heads", fixture);
        CHECK(config->n_taps == 3 && !memcmp(config->target_layer_ids, known[i].taps, sizeof known[i].taps), "%s: its taps", fixture);
        for (int l = 0; l < 2; l++) CHECK(config->window[l] == known[i].window && !config->causal[l], "%s: its windows", fixture);
        CHECK(config->final_logit_softcapping == known[i].cap && config->output_multiplier == known[i].multiplier
                  && config->input_embedding_scale == known[i].scale && config->backbone.rope.rope_theta == 500000
                  && config->backbone.rms_norm_eps == 1e-5f, "%s: its numbers", fixture);
        CHECK(engine.drafter.state.drafts.one_hot == (strstr(fixture, "dflash-") != NULL), "%s: whether its law is its best token", fixture);
        engine_close(&engine);
    }
}

/* Causality inside the block: said for all layers, or, where DFlash's files do not say, windowed layers are causal. */
static void test_causality(void) {
    static const struct { const char *fixture, *key, *value; bool causal; } cases[] = {
        {FIXTURES "qwen3-dflash-a", NULL, NULL, true},
        {FIXTURES "qwen3-dflash-a", "is_causal", "false", false},
        {FIXTURES "qwen3-dflash-a", "dflash_config.causal", "false", false},
        {FIXTURES "qwen3-dflash-a", "is_causal", "true", true},
        {FIXTURES "qwen3-dspark-a", NULL, NULL, false},
        {FIXTURES "qwen3-dspark-a", "is_causal", "true", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Engine engine;
        Error error;
        char *directory = draft_with(cases[i].fixture, "layer_types", "[\"sliding_attention\",\"full_attention\"]");
        cJSON *json = read_config_json(directory);
        set_key(json, "sliding_window", "24");
        if (cases[i].key) set_key(json, cases[i].key, cases[i].value);
        write_config(directory, json);
        bool ok = opens_with(cases[i].fixture, directory, &engine, &error);
        CHECK(ok, "a windowed and a full layer: %s", error.text);
        if (ok) {
            const DraftConfig *config = &engine.drafter.config;
            bool everywhere = cases[i].key && cases[i].causal;
            CHECK(config->window[0] == 24 && config->window[1] == INT_MAX && config->causal[0] == cases[i].causal
                      && config->causal[1] == everywhere, "case %zu: windows and causality of each layer", i);
            engine_close(&engine);
        }
        free(directory);
    }
}

/* ---- tensors */

/* Whether a drafter with these pieces opens (the pieces are freed). */
static bool opens_with_pieces(const char *fixture, Piece *pieces, Error *error) {
    char *directory = draft_with(fixture, NULL, NULL);
    Engine engine;
    write_pieces(directory, "model.safetensors", pieces);
    bool ok = opens_with(fixture, directory, &engine, error);
    if (ok) engine_close(&engine);
    free(directory);
    arrfree(pieces);
    return ok;
}

/* Every tensor of each kind of drafter: missing, of another shape, of integers. */
static void test_tensors(const char *fixture) {
    char path[PATH_MAX], what[256];
    Checkpoint checkpoint;
    Error error;
    if (!checkpoint_open(&checkpoint, join(path, fixture, "draft"), &error)) fprintf(stderr, "%s\n", error.text), exit(1);
    CHECK(opens_with_pieces(fixture, pieces_of(&checkpoint), &error), "%s, written again: %s", fixture, error.text);
    for (size_t i = 0; i < arrlenu(checkpoint.tensors); i++) {
        const char *name = checkpoint.tensors[i].name;
        for (int spoil = 0; spoil < 3; spoil++) {
            Piece *pieces = pieces_of(&checkpoint), *piece = find_piece(pieces, name);
            snprintf(what, sizeof what, "%s: %s %s", fixture + strlen(FIXTURES), name,
                     spoil == 0 ? "missing" : spoil == 1 ? "of another shape" : "of integers");
            if (spoil == 0) remove_piece(pieces, name);
            if (spoil == 1) piece->shape[0]++, piece->size += piece->size / (size_t)(piece->shape[0] - 1), piece->data = NULL;
            if (spoil == 2) piece->dtype = "I16";
            /* The target's embedding and head stand in for the drafter's own; without a confidence head nothing is confident. */
            bool optional = spoil == 0 && (!strcmp(name, "embed_tokens.weight") || !strcmp(name, "lm_head.weight")
                                           || !strcmp(name, "confidence_head.proj.bias"));
            bool ok = opens_with_pieces(fixture, pieces, &error);
            if (optional) CHECK(ok, "%s: %s", what, error.text);
            else check_refused(ok, &error, !strcmp(name, "confidence_head.proj.weight") && spoil == 0 ? "confidence_head" : name, what);
        }
    }
    static const char *const strangers[] = {"mask_embedding", "layers.0.self_attn.q_proj.bias", "layers.2.input_layernorm.weight",
                                            "markov_head.gate_proj.weight", "markov_head.joint_proj.weight", "prefix_gru.weight_ih_l0",
                                            "model.norm.weight", "d2t"};
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
        Piece *pieces = pieces_of(&checkpoint), stranger = piece_of(strangers[i], "BF16", NULL, 1, (int64_t[]){64});
        arrput(pieces, stranger);
        check_refused(opens_with_pieces(fixture, pieces, &error), &error, strangers[i], strangers[i]);
    }
    static const char *const harmless[] = {"verifier_norm.weight", "verifier_lm_head.weight", "t2d"};
    for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++) {
        Piece *pieces = pieces_of(&checkpoint), extra = piece_of(harmless[i], "BF16", NULL, 1, (int64_t[]){64});
        arrput(pieces, extra);
        CHECK(opens_with_pieces(fixture, pieces, &error), "%s is not looked at: %s", harmless[i], error.text);
    }
    checkpoint_close(&checkpoint);
}

/* ---- published shapes */

typedef struct Shape { int hidden, inner, layers, heads, kv_heads, dim, vocab, taps, block, selector; } Shape;

/* A checkpoint of that shape in z-lab's layout, all zeros and hardly on the disk. Returns the bytes of its tensors. */
static size_t write_shape(const char *directory, const Shape *s, int *tensors) {
    Piece *pieces = NULL;
    const int64_t h = s->hidden, q = s->heads * s->dim, kv = s->kv_heads * s->dim;
    size_t bytes = 0;
#define PUT(name, rank, ...) do { Piece put = piece_of(name, "BF16", NULL, rank, (int64_t[]){__VA_ARGS__}); arrput(pieces, put); } while (0)
    PUT("fc.weight", 2, h, s->taps * h);
    PUT("hidden_norm.weight", 1, h);
    PUT("norm.weight", 1, h);
    for (int l = 0; l < s->layers; l++) {
        char name[96];
#define LAYER(part, rank, ...) do { snprintf(name, sizeof name, "layers.%d.%s", l, part); PUT(name, rank, __VA_ARGS__); } while (0)
        LAYER("input_layernorm.weight", 1, h);
        LAYER("post_attention_layernorm.weight", 1, h);
        LAYER("self_attn.q_proj.weight", 2, q, h);
        LAYER("self_attn.k_proj.weight", 2, kv, h);
        LAYER("self_attn.v_proj.weight", 2, kv, h);
        LAYER("self_attn.o_proj.weight", 2, h, q);
        LAYER("self_attn.q_norm.weight", 1, s->dim);
        LAYER("self_attn.k_norm.weight", 1, s->dim);
        LAYER("mlp.gate_proj.weight", 2, s->inner, h);
        LAYER("mlp.up_proj.weight", 2, s->inner, h);
        LAYER("mlp.down_proj.weight", 2, h, s->inner);
        for (int side = 0; side < 2 && s->selector; side++) {
            LAYER(side ? "mlp_conv.base_kernel" : "attention_conv.base_kernel", 3, 2, 2, h);
            LAYER(side ? "mlp_conv.kernel_projection.weight" : "attention_conv.kernel_projection.weight", 2, h / 4, h);
        }
    }
    if (s->selector) {
        PUT("candidate_selector.hidden_projection.weight", 2, s->selector, h);
        PUT("candidate_selector.predecessor_codebook", 2, s->vocab, s->selector);
        PUT("candidate_selector.successor_codebook", 2, s->vocab, s->selector);
    }
    *tensors = (int)arrlen(pieces);
    for (size_t i = 0; i < arrlenu(pieces); i++) bytes += pieces[i].size;
    write_pieces(directory, "model.safetensors", pieces);
    arrfree(pieces);
    return bytes;
}

/* Binds the drafter in `directory` to a target of that size, of which nothing but the size is there. */
static bool binds_to(const char *directory, int hidden, int vocab, int layers, Drafter *drafter, Error *error) {
    Config target = {.family = FAMILY_QWEN3, .hidden_size = hidden, .vocab_size = vocab, .num_hidden_layers = layers};
    Weights weights = {.embed_tokens = {.rows = vocab, .cols = hidden}, .lm_head = {.rows = vocab, .cols = hidden}};
    *drafter = (Drafter){0};
    return drafter_plan(drafter, directory, &target, error) && bind_drafter(drafter, &target, &weights, NULL, error);
}

static void test_published_shapes(void) {
    Drafter drafter;
    Error error;
    int tensors;
    /* GLM-5.3-DFlash2: 96 tensors of 4,918,848,512 bytes. */
    char *directory = scratch_directory();
    write_text(directory, "config.json",
               "{\"architectures\":[\"DFlash2DraftModel\"],\"model_type\":\"qwen3\",\"hidden_size\":6144,\"intermediate_size\":12288,"
               "\"num_hidden_layers\":6,\"num_attention_heads\":64,\"num_key_value_heads\":8,\"head_dim\":128,\"vocab_size\":154880,"
               "\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\",\"is_causal\":false,\"num_target_layers\":78,\"sliding_window\":2048,"
               "\"use_sliding_window\":true,\"max_window_layers\":6,\"rope_parameters\":{\"rope_theta\":1e6,\"rope_type\":\"default\"},"
               "\"layer_types\":[\"sliding_attention\",\"sliding_attention\",\"sliding_attention\",\"sliding_attention\","
               "\"sliding_attention\",\"sliding_attention\"],\"dflash_config\":{\"block_size\":8,\"conv_group_size\":16,"
               "\"conv_kernel_size\":2,\"mask_token_id\":154856,\"selector_rank\":256,\"selector_top_k\":16,"
               "\"target_layer_ids\":[5,19,33,47,61,75]}}");
    size_t bytes = write_shape(directory, &(Shape){6144, 12288, 6, 64, 8, 128, 154880, 6, 8, 256}, &tensors);
    bool ok = binds_to(directory, 6144, 154880, 78, &drafter, &error);
    CHECK(tensors == 96 && bytes == 4918848512, "the shape is the published one: %d tensors of %zu bytes", tensors, bytes);
    CHECK(ok, "GLM-5.3-DFlash2 binds: %s", error.text);
    if (ok) CHECK(drafter.weights.backbone.bytes == bytes && drafter.config.slots == 7 && drafter.config.window[5] == 2048, "all of it");
    /* Its ring at 100,000 rows of context is that of a window: eq. 9 (paper 3.4). */
    Cache cache = {.context = 100000};
    shape_ring(&cache, &drafter.config, &(EngineOptions){.kv_dtype = KV_F8});
    CHECK(cache.draft_rows == 2176, "W 2048, p 64 and K 8 make %d rows", cache.draft_rows);
    CHECK(cache.draft_format.dtype == KV_BF16, "draft rows are no narrower than bf16");
    drafter_close(&drafter, &c_backend);
    free(directory);

    /* Qwen3-4B-DFlash-b16: 58 tensors, block_size at the top, no layer_types. */
    directory = scratch_directory();
    write_text(directory, "config.json",
               "{\"architectures\":[\"DFlashDraftModel\"],\"model_type\":\"qwen3\",\"hidden_size\":2560,\"intermediate_size\":9728,"
               "\"num_hidden_layers\":5,\"num_attention_heads\":32,\"num_key_value_heads\":8,\"head_dim\":128,\"vocab_size\":151936,"
               "\"rms_norm_eps\":1e-6,\"rope_theta\":1000000,\"rope_scaling\":null,\"sliding_window\":null,\"num_target_layers\":36,"
               "\"block_size\":16,\"dflash_config\":{\"mask_token_id\":151669,\"target_layer_ids\":[1,9,17,25,33]}}");
    write_shape(directory, &(Shape){2560, 9728, 5, 32, 8, 128, 151936, 5, 16, 0}, &tensors);
    ok = binds_to(directory, 2560, 151936, 36, &drafter, &error);
    CHECK(tensors == 58, "58 tensors, not %d", tensors);
    CHECK(ok && drafter.config.slots == 15 && drafter.config.window[0] == INT_MAX && !drafter.config.causal[0], "Qwen3-4B-DFlash-b16 binds: %s",
          error.text);
    drafter_close(&drafter, &c_backend);
    free(directory);

    /* RedHatAI/GLM-5.2-speculator.dspark: no sample_from_anchor, seven tokens of a block of eight: row 0 predicts nothing. */
    directory = scratch_directory();
    write_text(directory, "config.json",
               "{\"architectures\":[\"DSparkDraftModel\"],\"speculators_model_type\":\"dspark\",\"block_size\":8,\"draft_vocab_size\":154880,"
               "\"mask_token_id\":154856,\"markov_rank\":256,\"markov_head_type\":\"vanilla\",\"aux_hidden_state_layer_ids\":[8,23,39,55,70],"
               "\"speculators_config\":{\"algorithm\":\"dspark\",\"proposal_methods\":[{\"proposal_type\":\"greedy\",\"speculative_tokens\":7}]},"
               "\"transformer_layer_config\":{\"hidden_size\":6144,\"intermediate_size\":12288,\"num_hidden_layers\":5,"
               "\"num_attention_heads\":64,\"num_key_value_heads\":64,\"head_dim\":64,\"vocab_size\":154880,\"rms_norm_eps\":1e-5,"
               "\"rope_parameters\":{\"rope_theta\":1e6,\"rope_type\":\"default\"}}}");
    Config target = {.family = FAMILY_GLM_MOE_DSA, .hidden_size = 6144, .vocab_size = 154880, .num_hidden_layers = 78};
    static const int taps[] = {7, 22, 38, 54, 69};
    drafter = (Drafter){0};
    ok = draft_config_read(&drafter.config, directory, &target, &error);
    CHECK(ok && drafter.config.first_slot == 1 && drafter.config.slots == 7 && !memcmp(drafter.config.target_layer_ids, taps, sizeof taps)
              && drafter.config.markov_rank == 256 && drafter.config.backbone.num_key_value_heads == 64,
          "GLM-5.2-speculator.dspark is read: %s", error.text);
    drafter_close(&drafter, &c_backend);
    free(directory);
}

/* ---- speculators' layout */

typedef struct Proposal {       /* of a fixture's first round */
    int slots, tokens[MAX_BLOCK];
    float best[MAX_BLOCK];      /* what each was chosen by */
    int calls;
    float unary[2 * MAX_BLOCK]; /* the best value of each list of candidates */
    float hidden[8 * 64];       /* the block's first states */
    bool causal, reduced;
    int window;
} Proposal;

static bool propose(const char *fixture, const char *directory, Proposal *proposal, Error *error) {
    Engine engine;
    Checkpoint golden;
    int ids[512], P;
    if (!opens_with(fixture, directory, &engine, error)) return false;
    if (!checkpoint_open(&golden, fixture, error)) fprintf(stderr, "%s\n", error->text), exit(1);
    P = extent(&golden, "prompt_ids", 0);
    memcpy(ids, ints(&golden, "prompt_ids"), (size_t)P * sizeof(int));
    ids[P] = *ints(&golden, "round.anchor_id");
    checkpoint_close(&golden);
    watch(&engine);
    if (!run_prompt(&engine, 0, ids, 0, P, 0, NULL, error)) return engine_close(&engine), false;
    DraftBlock block = {.position = P, .ids = ids, .sampling = greedy};
    draft(&engine, &block, true);
    const Drafts *drafts = &engine.drafter.state.drafts;
    *proposal = (Proposal){.slots = drafts->slots, .causal = engine.drafter.config.causal[0], .window = engine.drafter.config.window[0],
                           .reduced = engine.drafter.weights.target_ids != NULL, .calls = record.calls};
    memcpy(proposal->tokens, drafts->tokens, (size_t)drafts->slots * sizeof(int));
    for (int k = 0; k < drafts->slots; k++)
        for (int c = 0; c < CANDIDATES; c++)
            if (drafts->ids[k * CANDIDATES + c] == drafts->tokens[k]) proposal->best[k] = drafts->scores[k * CANDIDATES + c];
    for (int i = 0; i < record.calls; i++) proposal->unary[i] = record.values[i][0];
    memcpy(proposal->hidden, engine.drafter.state.normed, sizeof proposal->hidden);
    engine_close(&engine);
    return true;
}

/* A fixture's drafter as speculators would have saved it; *json is its config, to be changed and written. */
static char *as_speculators(const char *fixture, const char *kind, cJSON **json) {
    char path[PATH_MAX], *directory = copy_checkpoint(join(path, fixture, "draft"));
    cJSON *original = read_config_json(directory), *inner = cJSON_GetObjectItemCaseSensitive(original, "dflash_config"), *taps;
    static const char *const flat[] = {"mask_token_id", "block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
                                       "final_logit_softcapping", "output_multiplier", "input_embedding_scale", "markov_rank",
                                       "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"};
    *json = cJSON_CreateObject();
    cJSON_AddStringToObject(*json, "speculators_model_type", kind);
    cJSON_AddItemToObject(*json, "architectures", cJSON_Parse(!strcmp(kind, "dspark") ? "[\"DSparkDraftModel\"]" : "[\"DFlash2DraftModel\"]"));
    taps = cJSON_GetObjectItemCaseSensitive(inner ? inner : original, "target_layer_ids");
    cJSON *aux = cJSON_AddArrayToObject(*json, "aux_hidden_state_layer_ids"), *tap;
    cJSON_ArrayForEach(tap, taps) cJSON_AddItemToArray(aux, cJSON_CreateNumber(tap->valuedouble + 1));
    for (size_t i = 0; i < sizeof flat / sizeof *flat; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(inner, flat[i]);
        if (!item) item = cJSON_GetObjectItemCaseSensitive(original, flat[i]);
        if (item) cJSON_AddItemToObject(*json, flat[i], cJSON_Duplicate(item, true));
    }
    static const char *const dropped[] = {"dflash_config", "architectures", "num_target_layers", "target_layer_ids", "is_causal", "block_size",
                                          "mask_token_id", "markov_rank", "markov_head_type", "num_anchors"};
    cJSON_AddItemToObject(*json, "draft_vocab_size", cJSON_Duplicate(cJSON_GetObjectItemCaseSensitive(original, "vocab_size"), true));
    for (size_t i = 0; i < sizeof dropped / sizeof *dropped; i++) cJSON_DeleteItemFromObjectCaseSensitive(original, dropped[i]);
    cJSON_AddItemToObject(*json, "transformer_layer_config", original);
    return directory;
}

/* Proposes with a fixture in speculators' layout after up to two changes of its config. */
static bool propose_as_speculators(const char *fixture, const char *kind, const char *key, const char *value, const char *other,
                                   const char *other_value, Proposal *proposal, Error *error) {
    cJSON *json;
    char *directory = as_speculators(fixture, kind, &json);
    if (key) set_key(json, key, value);
    if (other) set_key(json, other, other_value);
    write_config(directory, json);
    bool ok = propose(fixture, directory, proposal, error);
    free(directory);
    return ok;
}

static bool same_proposal(const Proposal *a, const Proposal *b) {
    return a->slots == b->slots && !memcmp(a->tokens, b->tokens, (size_t)a->slots * sizeof(int))
           && !memcmp(a->best, b->best, (size_t)a->slots * sizeof(float)) && !memcmp(a->hidden, b->hidden, sizeof a->hidden);
}

static void test_speculators_dspark(const char *fixture) {
    Proposal original, other;
    Error error;
    char path[PATH_MAX];
    CHECK(propose(fixture, join(path, fixture, "draft"), &original, &error), "%s: %s", fixture, error.text);
    const char *four = "[{\"speculative_tokens\":4}]";
    /* sample_from_anchor is DeepSpec's alignment; without the key it is z-lab's, whatever else is said. */
    CHECK(propose_as_speculators(fixture, "dspark", "sample_from_anchor", "true", NULL, NULL, &other, &error)
              && same_proposal(&original, &other), "%s: sample_from_anchor: the same drafts: %s", fixture, error.text);
    Proposal aligned;
    CHECK(propose_as_speculators(fixture, "dspark", "sample_from_anchor", "false", NULL, NULL, &aligned, &error), "%s: %s", fixture, error.text);
    CHECK(aligned.slots == 4 && !memcmp(aligned.hidden, original.hidden, sizeof original.hidden),
          "%s: without it the block is the same, and its row 0 drafts nothing", fixture);
    for (int k = 0; k < aligned.slots; k++)
        CHECK(aligned.unary[2 * k] == original.unary[2 * (k + 1)], "%s: slot %d is row %d before the chain", fixture, k, k + 1);
    CHECK(propose_as_speculators(fixture, "dspark", "speculators_config.proposal_methods", four, NULL, NULL, &other, &error)
              && same_proposal(&aligned, &other), "%s: one token less than rows: %s", fixture, error.text);
    CHECK(propose_as_speculators(fixture, "dspark", NULL, NULL, NULL, NULL, &other, &error) && same_proposal(&aligned, &other),
          "%s: where nothing is said row 0 drafts nothing: %s", fixture, error.text);
    /* Tap 0 there is the embedding, which nobody else can spell but as -1. */
    CHECK(propose_as_speculators(fixture, "dspark", "aux_hidden_state_layer_ids", "[0, 1, 5]", NULL, NULL, &other, &error), "taps from the "
          "embedding to behind the last layer: %s", error.text);
    CHECK(!propose_as_speculators(fixture, "dspark", "aux_hidden_state_layer_ids", "[0, 1, 6]", NULL, NULL, &other, &error)
              && strstr(error.text, "aux_hidden_state_layer_ids"), "a tap behind it: %s", error.text);
    CHECK(!propose_as_speculators(fixture, "dspark", "aux_hidden_state_layer_ids", NULL, NULL, NULL, &other, &error)
              && strstr(error.text, "aux_hidden_state_layer_ids"), "no taps: %s", error.text);
    CHECK(!propose_as_speculators(fixture, "dspark", "markov_head_type", "\"rnn\"", NULL, NULL, &other, &error)
              && strstr(error.text, "markov_head_type"), "a head that is not there: %s", error.text);
    CHECK(!propose_as_speculators(fixture, "dspark", "transformer_layer_config.hidden_size", "60", NULL, NULL, &other, &error)
              && strstr(error.text, "hidden_size"), "another width: %s", error.text);
    CHECK(!propose_as_speculators(fixture, "dspark", "projector_type", "\"domino\"", NULL, NULL, &other, &error)
              && strstr(error.text, "projector_type"), "domino: %s", error.text);
    /* Windows: causal inside the block unless the file says otherwise. */
    static const char *const types = "[\"sliding_attention\",\"sliding_attention\"]";
    for (int non_causal = -1; non_causal < 2; non_causal++) {
        cJSON *json;
        char *directory = as_speculators(fixture, "dspark", &json);
        set_key(json, "transformer_layer_config.layer_types", types);
        set_key(json, "transformer_layer_config.sliding_window", "24");
        set_key(json, "sample_from_anchor", "true");
        if (non_causal >= 0) set_key(json, "sliding_window_non_causal", non_causal ? "true" : "false");
        write_config(directory, json);
        bool ok = propose(fixture, directory, &other, &error);
        CHECK(ok && other.window == 24 && other.causal == (non_causal != 1), "sliding_window_non_causal %d: %s", non_causal, error.text);
        free(directory);
    }
}

static void test_speculators_dflash2(const char *fixture) {
    Proposal original, other;
    Error error;
    char path[PATH_MAX];
    CHECK(propose(fixture, join(path, fixture, "draft"), &original, &error), "%s: %s", fixture, error.text);
    CHECK(propose_as_speculators(fixture, "dflash2", NULL, NULL, NULL, NULL, &other, &error) && same_proposal(&original, &other),
          "%s: the same drafts: %s", fixture, error.text);
    CHECK(propose_as_speculators(fixture, "dflash2", "sliding_window_non_causal", "true", "sample_from_anchor", "false", &other, &error)
              && same_proposal(&original, &other), "%s: as published: %s", fixture, error.text);
    CHECK(propose_as_speculators(fixture, "dflash2", "sliding_window_non_causal", "false", NULL, NULL, &other, &error) && other.causal
              && memcmp(original.hidden, other.hidden, sizeof other.hidden), "%s: a causal block is another one: %s", fixture, error.text);
}

/* A vocabulary of the draft's own: every second token and the proposed ones, so that the proposals are those of the whole. change: what is
 * wrong with it. */
static bool propose_reduced(const char *fixture, const Proposal *original, int change, Proposal *proposal, Error *error) {
    enum { VOCAB = 96 };
    cJSON *json;
    char *directory = as_speculators(fixture, "dspark", &json), path[PATH_MAX], number[16];
    Checkpoint checkpoint;
    if (!checkpoint_open(&checkpoint, join(path, fixture, "draft"), error)) fprintf(stderr, "%s\n", error->text), exit(1);
    uint8_t member[VOCAB];
    int64_t offsets[VOCAB];
    int kept = 0;
    for (int id = 0; id < VOCAB; id++) member[id] = id % 2 == 0 || occurs(original->tokens, original->slots, id);
    Piece *pieces = pieces_of(&checkpoint);
    Piece *head = find_piece(pieces, "lm_head.weight"), *bias = find_piece(pieces, "markov_head.markov_w2.weight");
    size_t head_row = head->size / VOCAB, bias_row = bias->size / VOCAB;
    char *head_data = allocate_zeroed(1, head->size), *bias_data = allocate_zeroed(1, bias->size);
    for (int id = 0; id < VOCAB; id++) {
        if (!member[id]) continue;
        memcpy(head_data + (size_t)kept * head_row, (const char *)head->data + (size_t)id * head_row, head_row);
        memcpy(bias_data + (size_t)kept * bias_row, (const char *)bias->data + (size_t)id * bias_row, bias_row);
        offsets[kept] = id - kept;
        kept++;
    }
    *head = piece_of("lm_head.weight", "BF16", head_data, 2, (int64_t[]){kept, (int64_t)head_row / 2});
    *bias = piece_of("markov_head.markov_w2.weight", "BF16", bias_data, 2, (int64_t[]){kept, (int64_t)bias_row / 2});
    if (change == 1) offsets[kept - 1] = VOCAB;
    if (change == 2) offsets[3] = -4;
    if (change == 3) offsets[0] = INT64_MIN;
    Piece d2t = piece_of("d2t", change == 5 ? "F64" : "I64", offsets, 1, (int64_t[]){change == 6 ? kept - 1 : kept}),
          t2d = piece_of("t2d", "BOOL", member, 1, (int64_t[]){VOCAB});
    if (change != 4) arrput(pieces, d2t);
    arrput(pieces, t2d);
    if (change == 7) remove_piece(pieces, "lm_head.weight");
    write_pieces(directory, "model.safetensors", pieces);
    snprintf(number, sizeof number, "%d", kept);
    set_key(json, "draft_vocab_size", number);
    set_key(json, "sample_from_anchor", "true");
    write_config(directory, json);
    bool ok = propose(fixture, directory, proposal, error);
    checkpoint_close(&checkpoint);
    free(head_data), free(bias_data), free(directory);
    arrfree(pieces);
    return ok;
}

static void test_reduced_vocabulary(const char *fixture) {
    Proposal original, reduced;
    Error error;
    char path[PATH_MAX];
    CHECK(propose(fixture, join(path, fixture, "draft"), &original, &error), "%s: %s", fixture, error.text);
    bool ok = propose_reduced(fixture, &original, 0, &reduced, &error);
    CHECK(ok && reduced.reduced && same_proposal(&original, &reduced), "%s: a smaller vocabulary with the best tokens in it: %s", fixture,
          error.text);
    static const char *const things[] = {"", "d2t: draft id", "d2t: draft id 3", "d2t: draft id 0", "tensor d2t: found nothing", "d2t: found F64",
                                         "d2t", "lm_head.weight"};
    for (int change = 1; change < 8; change++)
        check_refused(propose_reduced(fixture, &original, change, &reduced, &error), &error, things[change], "a reduced vocabulary that is wrong");
}

/* ---- what lies beside the weights */

/* A predictor of lengths in a drafter's directory: `layers` matrices from widths[0] to widths[layers]. */
static void write_predictor(const char *directory, const int *widths, int layers, int without_bias) {
    char path[PATH_MAX], name[32];
    Piece *pieces = NULL;
    for (int l = 0; l < layers; l++) {
        snprintf(name, sizeof name, "mlp.%d.weight", l);
        Piece weight = piece_of(name, "F32", NULL, 2, (int64_t[]){widths[l + 1], widths[l]});
        snprintf(name, sizeof name, "mlp.%d.bias", l);
        Piece bias = piece_of(name, "F32", NULL, 1, (int64_t[]){widths[l + 1]});
        arrput(pieces, weight);
        if (l != without_bias) arrput(pieces, bias);
    }
    if (!layers) {
        Piece other = piece_of("layers.0.weight", "F32", NULL, 1, (int64_t[]){4});
        arrput(pieces, other);
    }
    mkdir(join(path, directory, "dvl"), 0700);
    write_pieces(path, "dvl.safetensors", pieces);
    arrfree(pieces);
}

static void test_companions(void) {
    const char *fixture = FIXTURES "qwen3-dflash2-a";
    static const struct { int layers, widths[11], without_bias; const char *thing; } predictors[] = {
        {2, {126, 10, 7}, -1, NULL},
        {1, {126, 7}, -1, NULL},
        {3, {126, 4096, 10, 7}, -1, NULL},
        {2, {125, 10, 7}, -1, "mlp.0.weight"},
        {2, {90, 10, 5}, -1, "mlp.0.weight"},
        {2, {126, 10, 6}, -1, "dvl: found a predictor of 6 lengths, wanted 7"},
        {2, {126, 10, 8}, -1, "dvl: found a predictor of 8 lengths"},
        {2, {126, 10, 7}, 0, "mlp.0.bias"},
        {2, {126, 10, 7}, 1, "mlp.1.bias"},
        {2, {126, 4097, 7}, -1, "mlp.0.weight"},
        {2, {126, 0, 7}, -1, "mlp."},
        {9, {126, 10, 10, 10, 10, 10, 10, 10, 10, 7}, -1, "tide knows no such part"},
        {0, {0}, -1, "tide knows no such part"},
    };
    for (size_t i = 0; i < sizeof predictors / sizeof *predictors; i++) {
        Engine engine;
        Error error;
        char *directory = draft_with(fixture, NULL, NULL), what[64];
        write_predictor(directory, predictors[i].widths, predictors[i].layers, predictors[i].without_bias);
        snprintf(what, sizeof what, "predictor %zu", i);
        bool ok = opens_with(fixture, directory, &engine, &error);
        if (predictors[i].thing) check_refused(ok, &error, predictors[i].thing, what);
        else CHECK(ok && engine.drafter.predictor.layers == predictors[i].layers, "%s: %s", what, error.text);
        if (ok) engine_close(&engine);
        free(directory);
    }
    static const struct { const char *text, *thing; } temperatures[] = {
        {"{\"temperatures\": [0.5, 1, 2, 1.25, 0.001]}", NULL},
        {"{\"temperatures\": [0.5, 1, 2, 1.25]}", "temperatures: found [0.5,1,2,1.25], wanted one for each draft"},
        {"{\"temperatures\": [0.5, 1, 2, 1.25, 1, 1]}", "temperatures"},
        {"{\"temperatures\": [0.5, 1, 2, 1.25, 0]}", "temperatures"},
        {"{\"temperatures\": [0.5, 1, 2, 1.25, -1]}", "temperatures: found -1"},
        {"{\"temperatures\": [0.5, 1, 2, 1.25, 1e30]}", "temperatures"},
        {"{\"temperatures\": [0.5, 1, 2, 1.25, \"1\"]}", "temperatures: found \"1\""},
        {"{\"temperatures\": [0.5, 1, 2, 1.25, null]}", "temperatures"},
        {"{\"temperatures\": 1}", "temperatures: found 1"},
        {"{}", "temperatures: found nothing"},
        {"[1, 1, 1, 1, 1]", "temperatures.json"},
        {"{\"temperatures\": [1, 1,", "temperatures.json"},
        {"", "temperatures.json"},
    };
    fixture = FIXTURES "qwen3-dspark-a";
    for (size_t i = 0; i < sizeof temperatures / sizeof *temperatures; i++) {
        Engine engine;
        Error error;
        char *directory = draft_with(fixture, NULL, NULL);
        write_text(directory, "temperatures.json", temperatures[i].text);
        bool ok = opens_with(fixture, directory, &engine, &error);
        if (temperatures[i].thing) check_refused(ok, &error, temperatures[i].thing, temperatures[i].text);
        else CHECK(ok && engine.drafter.temperatures[0] == 0.5f && engine.drafter.temperatures[3] == 1.25f, "temperatures: %s", error.text);
        if (ok) engine_close(&engine);
        free(directory);
    }
}

/* ---- files spoiled at random */

/* An object of the config at random: itself, or one inside it. */
static cJSON *random_object(cJSON *json) {
    cJSON *entry, *object = json;
    int seen = 1;
    cJSON_ArrayForEach(entry, json)
        if (cJSON_IsObject(entry) && random_below(++seen) == 0) object = entry;
    return object;
}

static void spoil_config(cJSON *json) {
    static const char *const values[] = {"null", "true", "false", "0", "-1", "1", "2", "3", "7", "16", "31", "32", "33", "64", "96", "1000", "4096", "65536",
                                         "16777216", "2147483647", "2147483648", "-2147483648", "1e300", "-1e300", "0.5", "1e-9", "\"\"",
                                         "\"dspark\"", "\"sliding_attention\"", "[]", "[1]", "[0,1,2]", "[-1,0,4]", "[null]", "[[1]]", "{}",
                                         "{\"rope_theta\":10000}", "[\"sliding_attention\",\"sliding_attention\"]", "[\"DSparkDraftModel\"]",
                                         "[\"DFlash2DraftModel\"]", "[\"DFlashDraftModel\"]", "[1e9]", "\"dflash2\""};
    static const char *const names[] = {"speculators_model_type", "transformer_layer_config", "sample_from_anchor", "draft_vocab_size",
                                        "aux_hidden_state_layer_ids", "dspark_config", "projector_type", "sliding_window_non_causal",
                                        "speculators_config", "is_causal", "causal", "final_logit_softcapping", "output_multiplier",
                                        "input_embedding_scale", "rope_scaling", "quantization_config", "sliding_window", "layer_types"};
    const int n_values = sizeof values / sizeof *values;
    for (int changes = 1 + random_below(3); changes > 0; changes--) {
        cJSON *object = random_object(json);
        int size = cJSON_GetArraySize(object), pick = size ? random_below(size) : 0;
        const cJSON *entry = cJSON_GetArrayItem(object, pick);
        char key[64];
        snprintf(key, sizeof key, "%s", !entry || random_below(5) == 0 ? names[random_below(sizeof names / sizeof *names)] : entry->string);
        cJSON_DeleteItemFromObjectCaseSensitive(object, key);
        if (random_below(6)) cJSON_AddItemToObject(object, key, cJSON_Parse(values[random_below(n_values)]));
    }
}

/* What is accepted has to work: a short prompt and a draft pass. */
static void exercise(Engine *engine) {
    int ids[8 + MAX_BLOCK] = {5, 17, 40, 3, 81};
    Error error;
    CHECK(run_prompt(engine, 0, ids, 0, 4, 0, NULL, &error), "a prompt: %s", error.text);
    DraftBlock block = {.position = 4, .ids = ids, .sampling = greedy};
    draft_blocks(engine, &block, 1, ACCEPT_COUPLED, true);
    bool inside = true;
    for (int k = 0; k < engine->drafter.config.slots; k++) inside &= ids[5 + k] >= 0 && ids[5 + k] < engine->config.vocab_size;
    CHECK(inside, "drafts are tokens of the target");
}

/* One spoiled drafter: it is refused in one line, or drafts. Returns whether it was accepted. */
static bool survive(const char *fixture, const char *directory, int trial) {
    char model[PATH_MAX];
    EngineOptions options = {.model = join(model, fixture, "target"), .draft = directory, .sessions = 1, .context = 64, .kv_mode = MODE_RESIDENT,
                             .kv_dtype = KV_F32};
    Engine engine;
    Error error;
    bool ok = engine_plan(&engine, &options, &error);
    if (ok && engine.drafter.state.bytes + engine.cache.bytes > (size_t)1 << 30) return engine_close(&engine), false;
    ok = ok && engine_load(&engine, &error);
    if (!ok) CHECK(*error.text && !strchr(error.text, '\n'), "trial %d: refused in one line: %s", trial, error.text);
    if (!ok) return false;
    exercise(&engine);
    engine_close(&engine);
    return true;
}

static void test_spoiled_files(void) {
    static const char *const fixtures[] = {FIXTURES "qwen3-dflash-a", FIXTURES "qwen3-dflash2-a", FIXTURES "qwen3-dspark-a"};
    int accepted = 0, tried = 0;
    random_state = 5;
    for (int f = 0; f < 4; f++) {
        const char *fixture = fixtures[f < 3 ? f : 2];
        cJSON *json, *copy;
        char *directory;
        if (f < 3) {
            directory = draft_with(fixture, NULL, NULL);
            json = read_config_json(directory);
        } else directory = as_speculators(fixture, "dspark", &json);
        for (int trial = 0; trial < 700; trial++, tried++) {
            copy = cJSON_Duplicate(json, true);
            spoil_config(copy);
            write_config(directory, copy);
            accepted += survive(fixture, directory, trial);
        }
        cJSON_Delete(json);
        free(directory);
    }
    CHECK(accepted > tried / 50 && accepted < tried, "%d of %d spoiled configs are accepted", accepted, tried);

    /* Bytes of the header, which hold names, shapes and offsets; and files cut short. */
    accepted = tried = 0;
    for (int f = 0; f < 3; f++) {
        char path[PATH_MAX], *bytes, *directory = draft_with(fixtures[f], NULL, NULL);
        size_t size;
        Error error;
        if (!read_file(join(path, directory, "model.safetensors"), (size_t)1 << 30, &bytes, &size, &error)) fprintf(stderr, "%s\n", error.text), exit(1);
        const size_t header = 8 + (size_t)load_u64((const uint8_t *)bytes);
        for (int trial = 0; trial < 500; trial++, tried++) {
            char *copy = allocate_zeroed(size, 1);
            memcpy(copy, bytes, size);
            for (int changes = 1 + random_below(3); changes > 0; changes--) {
                char *at = copy + (random_below(20) ? 8 + random_below((int)header - 8) : random_below(8));
                if (*at >= '0' && *at <= '9' && random_below(4)) *at = (char)('0' + random_below(10));
                else *at = random_below(3) ? (char)random_word() : "{}[],:\"0 .-"[random_below(11)];
            }
            write_bytes(directory, "model.safetensors", copy, random_below(8) ? size : (size_t)random_below((int)size));
            accepted += survive(fixtures[f], directory, trial);
            free(copy);
        }
        free(bytes);
        free(directory);
    }
    CHECK(accepted < tried, "%d of %d spoiled files are accepted", accepted, tried);
}

/* Weights that are not numbers make drafts that are tokens nevertheless: the target has the last word. */
static void test_bad_numbers(void) {
    static const char *const fixtures[] = {FIXTURES "qwen3-dflash-a", FIXTURES "qwen3-dflash2-a", FIXTURES "qwen3-dspark-a"};
    static const uint16_t nan = 0x7fc0, infinity = 0x7f80;
    for (int f = 0; f < 3; f++)
        for (int bad = 0; bad < 2; bad++)
            for (int part = 0; part < 2; part++) {
                char *directory = draft_with(fixtures[f], NULL, NULL);
                Engine engine;
                Error error;
                patch_tensor(directory, part ? "layers.1.mlp.down_proj.weight" : "norm.weight", 0, bad ? &infinity : &nan, 2);
                bool ok = opens_with(fixtures[f], directory, &engine, &error);
                CHECK(ok, "%s", error.text);
                if (ok) exercise(&engine), engine_close(&engine);
                free(directory);
            }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * The ring
 */

/* The plan of a fixture with another window and another longest context; nothing is loaded. */
static bool plan_with(const char *draft_fixture, int window, int slots_wanted, int context, KvDtype dtype, Engine *engine) {
    char path[PATH_MAX], number[16], *model = copy_checkpoint(join(path, draft_fixture, "target")),
         *directory = draft_with(draft_fixture, NULL, NULL);
    cJSON *json = read_config_json(model);
    Error error;
    set_key(json, "max_position_embeddings", "65536");
    write_config(model, json);
    json = read_config_json(directory);
    snprintf(number, sizeof number, "%d", window);
    if (window) set_key(json, "sliding_window", number);
    snprintf(number, sizeof number, "%d", slots_wanted + 1);
    if (slots_wanted) set_key(json, "dflash_config.block_size", number);
    write_config(directory, json);
    EngineOptions options = {.model = model, .draft = directory, .sessions = 3, .context = context, .kv_dtype = dtype};
    bool ok = engine_plan(engine, &options, &error);
    CHECK(ok, "%s", error.text);
    free(model), free(directory);
    return ok;
}

static void test_ring_size(void) {
    const char *windowed = FIXTURES "glm_moe_dsa-dflash2-a", *full = FIXTURES "qwen3-dflash-a";
    static const struct { int window, slots, context, rows; } sizes[] = {
        {2048, 0, 32768, 2176}, {256, 0, 32768, 384}, {24, 0, 4096, 128}, {24, 0, 65536, 128}, {64, 0, 4096, 192}, {57, 0, 4096, 128},
        {58, 0, 4096, 192}, {64, 15, 4096, 192}, {4096, 0, 1024, 1152},
    };
    Engine engine;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (!plan_with(windowed, sizes[i].window, sizes[i].slots, sizes[i].context, KV_BF16, &engine)) continue;
        int window = sizes[i].window < sizes[i].context ? sizes[i].window : sizes[i].context, block = sizes[i].slots + 1 > 8 ? sizes[i].slots + 1 : 8;
        CHECK(engine.cache.draft_rows == sizes[i].rows, "window %d: %d rows, wanted %d", sizes[i].window, engine.cache.draft_rows, sizes[i].rows);
        CHECK(engine.cache.draft_rows == PAGE_ROWS * ((window + PAGE_ROWS - 1 + block + PAGE_ROWS - 1) / PAGE_ROWS), "eq. 9");
        engine_close(&engine);
    }
    /* What a windowed drafter holds does not depend on the context; a full one holds all of it. */
    size_t rings[2][2], drafts[2][2];
    for (int f = 0; f < 2; f++)
        for (int i = 0; i < 2; i++)
            if (plan_with(f ? full : windowed, 0, 0, i ? 32768 : 1024, KV_F8, &engine)) {
                rings[f][i] = ring_bytes(&engine.cache);
                drafts[f][i] = engine.drafter.state.bytes;
                CHECK(engine.cache.draft_format.dtype == KV_BF16, "an fp8 cache has a bf16 ring");
                engine_close(&engine);
            }
    CHECK(rings[0][0] == rings[0][1] && drafts[0][0] == drafts[0][1], "a windowed drafter: %zu and %zu bytes", rings[0][0], rings[0][1]);
    CHECK(rings[1][0] * 16 < rings[1][1] && drafts[1][0] == drafts[1][1], "a full one: %zu and %zu bytes", rings[1][0], rings[1][1]);
    /* The shipped ones, with room for a block of 8. */
    static const char *const shipped[] = {"weights/draft-dflash2", "weights/draft-dspark"};
    for (int d = 0; d < 2; d++) {
        int rows[2] = {0};
        for (int i = 0; i < 2; i++) {
            EngineOptions options = {.model = "weights/mini", .draft = shipped[d], .sessions = 2, .context = i ? 16384 : 1024};
            Error error;
            bool ok = engine_plan(&engine, &options, &error);
            CHECK(ok, "%s: %s", shipped[d], error.text);
            if (ok) rows[i] = engine.cache.draft_rows, engine_close(&engine);
        }
        CHECK(rows[0] == 384 && rows[1] == 384, "%s: %d and %d rows of ring", shipped[d], rows[0], rows[1]);
    }
}

/* Fills ring rows of a session with NaN: those of positions in [from, to), or, outside, all the others. */
static void spoil_ring(Engine *engine, int session, int from, int to, bool outside) {
    const Cache *cache = &engine->cache;
    for (int l = 0; l < cache->draft_layers; l++)
        for (int slot = 0; slot < cache->draft_rows; slot++) {
            bool inside = false;
            for (int t = from; t < to; t++) inside |= t % cache->draft_rows == slot;
            if (inside != outside)
                memset(layer_ring(cache, l) + ((size_t)session * (size_t)cache->draft_rows + (size_t)slot) * cache->draft_format.stride, 0xff,
                       cache->draft_format.bytes);
        }
}

/* The block's states of a draft pass at n. */
static void draft_states(Engine *engine, int session, int *ids, int n, float *states) {
    DraftBlock block = {.session = session, .position = n, .ids = ids, .sampling = greedy};
    draft_blocks(engine, &block, 1, ACCEPT_COUPLED, true);
    const DraftConfig *config = &engine->drafter.config;
    memcpy(states, engine->drafter.state.normed, (size_t)(config->block_size * config->backbone.hidden_size) * sizeof(float));
}

static bool row_finite(const float *states, int row, int hidden) {
    for (int c = 0; c < hidden; c++)
        if (!isfinite(states[row * hidden + c])) return false;
    return true;
}

static void random_ids(int *ids, int n, int vocab) {
    for (int i = 0; i < n; i++) ids[i] = random_below(vocab - 2);
}

/* A window of 24 in a ring of 128: wrapped twice, what is seen is the window and nothing else. */
static void test_ring_window(void) {
    enum { N = 300, W = 24, ROWS = 128 };
    const char *fixture = FIXTURES "qwen3-dflash2-a";
    char path[PATH_MAX];
    static int ids[512];
    static float states[3][MAX_BLOCK * 64];
    Engine engine;
    Error error;
    random_state = 8;
    random_ids(ids, 400, 96);
    char draft_path[PATH_MAX];
    bool ok = open_drafter(&engine, join(path, fixture, "target"), join(draft_path, fixture, "draft"), 2, 512, MODE_RESIDENT, KV_F32, &error);
    CHECK(ok, "%s", error.text);
    if (!ok) return;
    Cache *cache = &engine.cache;
    SessionPages *session = &cache->session[0];
    const DraftConfig *config = &engine.drafter.config;
    const int hidden = config->backbone.hidden_size, B = config->block_size;
    CHECK(cache->draft_rows == ROWS, "a ring of %d rows", cache->draft_rows);
    CHECK(run_prompt(&engine, 0, ids, 0, N, 0, NULL, &error), "%s", error.text);
    CHECK(session->draft_end == N && session->draft_first == N - ROWS, "the ring holds the last %d rows: [%d, %d)", ROWS, session->draft_first,
          session->draft_end);
    draft_states(&engine, 0, ids, N, states[0]);
    spoil_ring(&engine, 0, N - W + 1, N, true);
    draft_states(&engine, 0, ids, N, states[1]);
    CHECK(!memcmp(states[0], states[1], (size_t)(B * hidden) * sizeof(float)), "rows outside the window are not looked at");
    /* Another session is fed the window alone: the same bits, wherever its ring stood. */
    CHECK(run_prompt(&engine, 1, ids, 0, N, N - W + 1, NULL, &error), "%s", error.text);
    draft_states(&engine, 1, ids, N, states[2]);
    CHECK(!memcmp(states[0], states[2], (size_t)(B * hidden) * sizeof(float)), "a ring that begins at the window has all of it");

    /* Row 0 sees the positions above N - W. What the other rows see is test_block_attention()'s. */
    spoil_ring(&engine, 1, N - W, N - W + 1, false);
    draft_states(&engine, 1, ids, N, states[1]);
    CHECK(!memcmp(states[1], states[2], (size_t)(B * hidden) * sizeof(float)), "a row at distance W is not seen");
    spoil_ring(&engine, 1, N - W + 1, N - W + 2, false);
    draft_states(&engine, 1, ids, N, states[1]);
    CHECK(!row_finite(states[1], 0, hidden), "a row at distance W - 1 is seen");

    /* A gap: what lies before it is gone. */
    CHECK(run_prompt(&engine, 0, ids, N, N + 10, N + 4, NULL, &error), "%s", error.text);
    CHECK(session->draft_first == N + 4 && session->draft_end == N + 10, "a gap starts the ring anew: [%d, %d)", session->draft_first,
          session->draft_end);
    spoil_ring(&engine, 0, N + 4, N + 10, true);
    draft_states(&engine, 0, ids, N + 10, states[0]);
    CHECK(row_finite(states[0], 0, hidden) && row_finite(states[0], B - 1, hidden), "nothing of it is seen");

    /* Going back clips it, and going on from there continues it. */
    CHECK(cache_truncate(cache, 0, N + 7) && session->draft_first == N + 4 && session->draft_end == N + 7, "cut: [%d, %d)",
          session->draft_first, session->draft_end);
    spoil_ring(&engine, 0, N + 4, N + 7, true);
    draft_states(&engine, 0, ids, N + 7, states[0]);
    CHECK(row_finite(states[0], B - 1, hidden), "rows behind the cut are not seen");
    CHECK(run_prompt(&engine, 0, ids, N + 7, N + 12, 0, NULL, &error) && session->draft_first == N + 4 && session->draft_end == N + 12,
          "it goes on: [%d, %d)", session->draft_first, session->draft_end);
    draft_states(&engine, 0, ids, N + 12, states[0]);
    CHECK(row_finite(states[0], B - 1, hidden), "with rows of the new pass");
    CHECK(cache_truncate(cache, 0, N) && session->draft_first == N && session->draft_end == N, "cut before its beginning it is empty: [%d, %d)",
          session->draft_first, session->draft_end);
    spoil_ring(&engine, 0, 0, 0, true);
    draft_states(&engine, 0, ids, N, states[0]);
    CHECK(row_finite(states[0], B - 1, hidden), "and nothing is seen");
    /* A position whose rows the ring does not reach sees none of them. */
    CHECK(run_prompt(&engine, 0, ids, N, N + 5, 0, NULL, &error), "%s", error.text);
    CHECK(run_prompt(&engine, 0, ids, N + 5, N + 6, N + 6, NULL, &error), "%s", error.text);
    spoil_ring(&engine, 0, 0, 0, true);
    draft_states(&engine, 0, ids, N + 6, states[0]);
    CHECK(row_finite(states[0], B - 1, hidden), "a ring that ends before the anchor is not looked at");
    engine_close(&engine);
}

/* A ring that was wrapped, cut back and continued holds what it would have held all along. */
static void test_ring_history(void) {
    const char *fixture = FIXTURES "qwen3-dflash2-a";
    char path[PATH_MAX], draft_path[PATH_MAX];
    static int ids[512];
    static float states[2][MAX_BLOCK * 64];
    Engine engine;
    Error error;
    bool ok = open_drafter(&engine, join(path, fixture, "target"), join(draft_path, fixture, "draft"), 2, 512, MODE_RESIDENT, KV_F32, &error);
    CHECK(ok, "%s", error.text);
    if (!ok) return;
    random_state = 21;
    random_ids(ids, 500, 96);
    int at[2] = {0, 0}, differences = 0;
    for (int step = 0; step < 60; step++) {
        int back = random_below(3) ? 0 : random_below(12), to;
        if (back > at[0]) back = 0;
        CHECK(cache_truncate(&engine.cache, 0, at[0] -= back), "back");
        to = at[0] + 1 + random_below(20);
        if (to > 480) break;
        CHECK(run_prompt(&engine, 0, ids, at[0], to, 0, NULL, &error), "%s", error.text);
        at[0] = to;
        for (; at[1] < to; at[1]++) CHECK(run_prompt(&engine, 1, ids, at[1], at[1] + 1, 0, NULL, &error), "%s", error.text);
        CHECK(cache_truncate(&engine.cache, 1, at[1] = to), "back");
        draft_states(&engine, 0, ids, to, states[0]);
        draft_states(&engine, 1, ids, to, states[1]);
        /* After going far back in a full ring fewer rows are left than the window: never wrong ones. */
        differences += memcmp(states[0], states[1], sizeof states[0]) != 0;
    }
    CHECK(differences == 0, "%d of the steps differ from a session that went straight on", differences);
    engine_close(&engine);
}

/* Who comes to a used slot finds an empty ring, whatever its bytes are, in every mode; also where its prompt's prefix is shared. */
static void test_ring_admission(void) {
    const char *fixture = FIXTURES "glm_moe_dsa-dflash2-a";
    char path[PATH_MAX], draft_path[PATH_MAX];
    static int ids[300];
    static float states[2][MAX_BLOCK * 64];
    random_state = 3;
    random_ids(ids, 300, 96);
    for (KvMode mode = MODE_RESIDENT; mode < MODES; mode++) {
        Engine engine;
        Error error;
        int cached = 0;
        bool ok = open_drafter(&engine, join(path, fixture, "target"), join(draft_path, fixture, "draft"), 1, 256, mode, KV_F32, &error);
        CHECK(ok, "%s", error.text);
        if (!ok) continue;
        Cache *cache = &engine.cache;
        const int hidden = engine.drafter.config.backbone.hidden_size, B = engine.drafter.config.block_size;
        for (int tries = 0; tries < 100 && !cache->session[0].admitted; tries++) {
            cache_step(cache);
            if (cache_admit(cache, 0, ids, 140, 256, &cached)) break;
        }
        CHECK(run_prompt(&engine, 0, ids, 0, 140, 0, NULL, &error), "%s", error.text);
        for (int step = 0; step < 20; step++) cache_step(cache);
        cache_release(cache, 0);
        while (cache->n_transfers || cache->n_retired) cache_step(cache);
        memset(cache->draft_ring, 0xff, ring_bytes(cache) * (size_t)cache->sessions);
        for (int tries = 0; tries < 100; tries++) {
            cache_step(cache);
            if (cache_admit(cache, 0, ids, 140, 256, &cached)) break;
        }
        CHECK(cache->session[0].draft_end == 0 && cache->session[0].draft_first == 0, "%s: the ring is empty", kv_mode_names[mode]);
        /* Rows of a shared prefix never went through a pass here, and so are not in the ring. */
        draft_states(&engine, 0, ids, cached, states[0]);
        CHECK(row_finite(states[0], 0, hidden) && row_finite(states[0], B - 1, hidden), "%s: nothing of the old bytes is seen at %d",
              kv_mode_names[mode], cached);
        CHECK(run_prompt(&engine, 0, ids, cached, 140, 0, NULL, &error), "%s", error.text);
        CHECK(cached == (mode == MODE_RESIDENT ? 0 : 128), "%s: %d rows are shared", kv_mode_names[mode], cached);
        CHECK(cache->session[0].draft_first == larger(cached, 140 - cache->draft_rows) && cache->session[0].draft_end == 140,
              "%s: the ring has [%d, %d), %d were shared", kv_mode_names[mode], cache->session[0].draft_first, cache->session[0].draft_end, cached);
        draft_states(&engine, 0, ids, 140, states[1]);
        CHECK(row_finite(states[1], B - 1, hidden), "%s: nor behind the new rows", kv_mode_names[mode]);
        engine_close(&engine);
    }
}

/* Drafts of a session are the same bits whatever shares its pass, also where one pass cannot hold all blocks, and where a feed is longer than
 * the ring. */
static void test_batches(const char *fixture) {
    enum { SESSIONS = 60, CONTEXT = 256 };
    char path[PATH_MAX], draft_path[PATH_MAX];
    static int ids[SESSIONS][CONTEXT + MAX_BLOCK];
    static int alone[SESSIONS][MAX_BLOCK];
    static float scores[SESSIONS][MAX_BLOCK * CANDIDATES], features[SESSIONS][MAX_BLOCK * DVL_FEATURES], confidence[SESSIONS][MAX_BLOCK];
    Engine engine;
    Error error;
    bool ok = open_drafter(&engine, join(path, fixture, "target"), join(draft_path, fixture, "draft"), SESSIONS, CONTEXT, MODE_RESIDENT, KV_F32,
                           &error);
    CHECK(ok, "%s", error.text);
    if (!ok) return;
    const int slots = engine.drafter.config.slots;
    const Drafts *drafts = &engine.drafter.state.drafts;
    const Sampling warm = {.temperature = 0.8f, .top_p = 0.95f, .repeat_penalty = 1.1f, .top_k = 12, .min_p = 0.01f, .seed = 7};
    DraftBlock blocks[SESSIONS];
    random_state = 12;
    for (int s = 0; s < SESSIONS; s++) {
        int n = s % 7 == 0 ? 200 : 1 + random_below(150);
        random_ids(ids[s], n + 1, 96);
        CHECK(run_prompt(&engine, s, ids[s], 0, n, 0, NULL, &error), "%s", error.text);
        blocks[s] = (DraftBlock){.session = s, .position = n, .ids = ids[s], .sampling = s % 3 ? warm : greedy, .stream = (uint64_t)s};
    }
    for (int rule = ACCEPT_COUPLED; rule <= ACCEPT_REJECTION; rule++) {
        for (int s = 0; s < SESSIONS; s++) {
            draft_blocks(&engine, &blocks[s], 1, (AcceptRule)rule, true);
            memcpy(alone[s], drafts->tokens, (size_t)slots * sizeof(int));
            memcpy(scores[s], drafts->scores, (size_t)(slots * CANDIDATES) * sizeof(float));
            memcpy(features[s], drafts->features, (size_t)(slots * DVL_FEATURES) * sizeof(float));
            memcpy(confidence[s], drafts->confidence, (size_t)slots * sizeof(float));
        }
        draft_blocks(&engine, blocks, SESSIONS, (AcceptRule)rule, true);
        int different = 0;
        for (int s = 0; s < SESSIONS; s++) {
            different += memcmp(alone[s], drafts->tokens + s * slots, (size_t)slots * sizeof(int)) != 0;
            different += memcmp(scores[s], drafts->scores + s * slots * CANDIDATES, (size_t)(slots * CANDIDATES) * sizeof(float)) != 0;
            different += memcmp(features[s], drafts->features + s * slots * DVL_FEATURES, (size_t)(slots * DVL_FEATURES) * sizeof(float)) != 0;
            if (engine.drafter.config.confidence_head)
                different += memcmp(confidence[s], drafts->confidence + s * slots, (size_t)slots * sizeof(float)) != 0;
            different += memcmp(alone[s], ids[s] + blocks[s].position + 1, (size_t)slots * sizeof(int)) != 0;
        }
        CHECK(engine.drafter.state.max_blocks < SESSIONS, "%s: %d blocks fit one pass", fixture, engine.drafter.state.max_blocks);
        CHECK(different == 0, "%s, rule %d: %d parts of %d blocks differ from what they are alone", fixture, rule, different, SESSIONS);
    }
    /* 240 rows of one session in one pass and one feed. */
    static float states[2][MAX_BLOCK * 64];
    Row rows[240];
    int indices[240];
    random_ids(ids[0], 241, 96);
    CHECK(cache_truncate(&engine.cache, 0, 0) && cache_truncate(&engine.cache, 1, 0), "back to nothing");
    for (int r = 0; r < 240; r++) indices[r] = r;
    ok = pass_rows(&engine, 0, ids[0], 0, 240, rows, &error);
    CHECK(ok, "%s", error.text);
    if (ok) {
        cache_commit(&engine.cache, 0, 240);
        draft_feed(&engine, rows, indices, 240);
        draft_states(&engine, 0, ids[0], 240, states[0]);
        CHECK(run_prompt(&engine, 1, ids[0], 0, 240, 0, NULL, &error), "%s", error.text);
        draft_states(&engine, 1, ids[0], 240, states[1]);
        CHECK(!memcmp(states[0], states[1], sizeof states[0]), "%s: fed at once or in parts, the ring is the same", fixture);
    }
    engine_close(&engine);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Operations
 */

static void test_convolve(void) {
    random_state = 31;
    double worst = 0;
    for (int trial = 0; trial < 200; trial++) {
        int taps = 1 + random_below(4), block = 1 + random_below(9), blocks = 1 + random_below(3), group = 1 + random_below(16),
            groups = 1 + random_below(6), dim = group * groups, rows = block * blocks, pad = random_below(5), stride = taps * groups + pad;
        float *z = allocate_zeroed((size_t)(rows * dim), sizeof(float)), *y = allocate_zeroed((size_t)(rows * dim), sizeof(float)),
              *base = allocate_zeroed((size_t)(taps * dim), sizeof(float)), *delta = allocate_zeroed((size_t)(rows * stride), sizeof(float));
        random_fill(z, (size_t)(rows * dim)), random_fill(base, (size_t)(taps * dim)), random_fill(delta, (size_t)(rows * stride));
        memcpy(y, z, (size_t)(rows * dim) * sizeof(float));
        c_backend.convolve(y, base, delta, (size_t)stride, rows, block, taps, group, dim);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < dim; c++) {
                double sum = 0;
                for (int t = 0; t < taps; t++)
                    if (r % block >= t) sum += ((double)base[t * dim + c] + delta[r * stride + t * groups + c / group]) * z[(r - t) * dim + c];
                worst = fmax(worst, fabs(sum - y[r * dim + c]));
            }
        free(z), free(y), free(base), free(delta);
    }
    CHECK(worst <= 1e-5, "the convolution differs by %g", worst);
}

/* One block's attention as the text has it, without tiles: into y [block_size, heads, dim]. */
static void attend_plainly(double *y, const float *q, const float *kv, const float *ring, int ring_rows, const DraftBlock *block, int block_size,
                           int window, bool causal, int heads, int kv_heads, int dim, double scale) {
    const int width = 2 * kv_heads * dim, n = block->position;
    double *weight = allocate_zeroed((size_t)(n + block_size), sizeof(double));
    for (int i = 0; i < block_size; i++)
        for (int h = 0; h < heads; h++) {
            double total = 0, largest = -INFINITY;
            for (int pass = 0; pass < 2; pass++)
                for (int t = 0; t < n + block_size; t++) {
                    bool seen = t < n ? t >= block->ring_first && (long)n + i - t < window : !causal || t - n <= i;
                    const float *row = t < n ? ring + (size_t)(block->session * ring_rows + t % ring_rows) * (size_t)width : kv + (t - n) * width;
                    if (!seen) { weight[t] = 0; continue; }
                    if (pass == 0) {
                        double dot_product = 0;
                        for (int c = 0; c < dim; c++) dot_product += (double)q[(i * heads + h) * dim + c] * row[h / (heads / kv_heads) * dim + c];
                        weight[t] = dot_product * scale;
                        largest = fmax(largest, weight[t]);
                    } else total += weight[t] = exp(weight[t] - largest);
                }
            for (int c = 0; c < dim; c++) {
                double sum = 0;
                for (int t = 0; t < n + block_size; t++) {
                    const float *row = t < n ? ring + (size_t)(block->session * ring_rows + t % ring_rows) * (size_t)width : kv + (t - n) * width;
                    if (weight[t] > 0) sum += weight[t] * row[(kv_heads + h / (heads / kv_heads)) * dim + c];
                }
                y[(i * heads + h) * dim + c] = sum / total;
            }
        }
    free(weight);
}

static void test_block_attention(void) {
    random_state = 77;
    double worst = 0;
    for (int trial = 0; trial < 300; trial++) {
        const int dim = trial % 5 == 0 ? 2 * (1 + random_below(40)) : 8 * (1 + random_below(10)), kv_heads = 1 + random_below(3),
                  heads = kv_heads * (1 + random_below(4)), block_size = 2 + random_below(trial % 7 ? 9 : 31), n_blocks = 1 + random_below(3),
                  sessions = 3, ring_rows = 64 * (1 + random_below(4)), width = 2 * kv_heads * dim;
        const bool causal = random_below(2), full = random_below(3) == 0;
        const int window = full ? INT_MAX : block_size + random_below(ring_rows - block_size + 1);
        const KvDtype dtype = trial % 2 ? KV_F32 : KV_BF16;
        const RowFormat format = row_format(dtype, width, 0, 128);
        float *ring = allocate_zeroed((size_t)(sessions * ring_rows * width), sizeof(float)),
              *q = allocate_zeroed((size_t)(n_blocks * block_size * heads * dim), sizeof(float)), *y = allocate_zeroed((size_t)(n_blocks * block_size * heads * dim), sizeof(float)),
              *kv = allocate_zeroed((size_t)(n_blocks * block_size * width), sizeof(float));
        uint8_t *stored = allocate_zeroed((size_t)(sessions * ring_rows), format.stride);
        double *wanted = allocate_zeroed((size_t)(block_size * heads * dim), sizeof(double));
        DeviceRow *rows = allocate_zeroed((size_t)(sessions * ring_rows), sizeof(DeviceRow));
        random_fill(ring, (size_t)(sessions * ring_rows * width)), random_fill(q, (size_t)(n_blocks * block_size * heads * dim)),
            random_fill(kv, (size_t)(n_blocks * block_size * width));
        for (int i = 0; i < n_blocks * block_size * heads * dim; i++) q[i] *= 6;        /* attention that prefers some rows */
        for (int i = 0; i < sessions * ring_rows; i++) rows[i].id = i;
        if (dtype == KV_BF16)       /* values that bf16 holds */
            for (int i = 0; i < sessions * ring_rows * width; i++) ring[i] = bits_to_float(float_to_bits(ring[i]) & 0xffff0000u);
        c_backend.store_rows(stored, &format, rows, sessions * ring_rows, ring, (size_t)width, ring, 0);
        DraftBlock blocks[3];
        for (int b = 0; b < n_blocks; b++) {
            int n = random_below(4) ? random_below(3 * ring_rows) : random_below(3), oldest = n > ring_rows ? n - ring_rows : 0;
            if (full && random_below(2)) n = random_below(ring_rows + 1), oldest = 0;
            blocks[b] = (DraftBlock){.session = (b + trial) % sessions, .position = n, .ring_first = random_below(3) ? oldest : oldest + random_below(n - oldest + 1)};
        }
        c_backend.block_attention(y, q, kv, stored, &format, ring_rows, blocks, n_blocks, block_size, window, causal, heads, kv_heads, dim,
                                  1 / sqrtf((float)dim));
        for (int b = 0; b < n_blocks; b++) {
            size_t at = (size_t)(b * block_size);
            attend_plainly(wanted, q + at * (size_t)(heads * dim), kv + at * (size_t)width, ring, ring_rows, &blocks[b], block_size, window, causal, heads,
                           kv_heads, dim, 1 / sqrt(dim));
            for (int i = 0; i < block_size * heads * dim; i++) {
                double difference = fabs(wanted[i] - y[at * (size_t)(heads * dim) + (size_t)i]);
                worst = difference <= worst ? worst : difference == difference ? difference : 1e30;
            }
        }
        free(ring), free(q), free(y), free(kv), free(stored), free(wanted), free(rows);
    }
    CHECK(worst <= 2e-5, "attention of blocks differs by %g", worst);
}

static void test_candidates(void) {
    random_state = 9;
    int wrong = 0;
    static const int vocabs[] = {1, 2, 7, 15, 16, 17, 23, 63, 64, 65, 79, 80, 81, 96, 144, 145, 200, 1000, 8192};
    for (int trial = 0; trial < 2000; trial++) {
        int vocab = vocabs[trial % (int)(sizeof vocabs / sizeof *vocabs)], n = 1 + random_below(3), grain = trial % 3 == 0 ? 3 : trial % 3 == 1 ? 40 : 1 << 20;
        const size_t stride = CANDIDATES + (size_t)random_below(20);
        float *logits = allocate_zeroed((size_t)(n * vocab), sizeof(float)), *values = allocate_zeroed((size_t)n * stride, sizeof(float));
        int *ids = allocate_zeroed((size_t)n * stride, sizeof(int));
        for (int i = 0; i < n * vocab; i++) logits[i] = (float)(random_below(2 * grain) - grain) / 8;
        if (trial % 11 == 0)
            for (int i = 0; i < n * vocab; i++) if (random_below(3) == 0) logits[i] = -INFINITY;
        c_backend.candidates(ids, values, stride, logits, n, vocab, NULL);
        for (int r = 0; r < n; r++) {
            const float *row = logits + r * vocab;
            int count = vocab < CANDIDATES ? vocab : CANDIDATES, last = -1;
            for (int c = 0; c < CANDIDATES; c++) {
                /* The next in the order: value descending, id ascending. */
                int best = -1;
                for (int i = 0; i < vocab && c < count; i++) {
                    if (last >= 0 && (row[i] > row[last] || (row[i] == row[last] && i <= last))) continue;
                    if (best < 0 || row[i] > row[best]) best = i;
                }
                if (c >= count) best = last;
                wrong += ids[(size_t)r * stride + (size_t)c] != best || values[(size_t)r * stride + (size_t)c] != row[best];
                last = best;
            }
        }
        free(logits), free(values), free(ids);
    }
    CHECK(wrong == 0, "%d candidates are not the next best", wrong);
    /* NaN among the logits: still ids of the vocabulary. */
    for (int vocab = 1; vocab < 200; vocab += 7) {
        float *logits = allocate_zeroed((size_t)vocab, sizeof(float)), values[CANDIDATES];
        int ids[CANDIDATES];
        for (int all = 0; all < 2; all++) {
            for (int i = 0; i < vocab; i++) logits[i] = all || random_below(2) ? NAN : random_float();
            c_backend.candidates(ids, values, CANDIDATES, logits, 1, vocab, NULL);
            for (int c = 0; c < CANDIDATES; c++) CHECK(ids[c] >= 0 && ids[c] < vocab, "candidate %d of %d", ids[c], vocab);
        }
        free(logits);
    }
}

static void test_length_features(void) {
    random_state = 41;
    double worst = 0;
    for (int trial = 0; trial < 200; trial++) {
        int vocab = 16 + random_below(trial % 4 ? 60 : 3000), ids[CANDIDATES];
        float *logits = allocate_zeroed((size_t)vocab, sizeof(float)), values[CANDIDATES], features[DVL_FEATURES], spread = (float)(1 + random_below(20));
        for (int i = 0; i < vocab; i++) logits[i] = spread * random_float();
        c_backend.candidates(ids, values, CANDIDATES, logits, 1, vocab, NULL);
        c_backend.length_features(features, DVL_FEATURES, values, CANDIDATES, logits, 1, vocab);
        double total = 0, entropy = 0, wanted[DVL_FEATURES];
        for (int i = 0; i < vocab; i++) total += exp((double)logits[i] - values[0]);
        for (int i = 0; i < vocab; i++) {
            double p = exp((double)logits[i] - values[0]) / total;
            entropy -= p > 0 ? p * log(p) : 0;
        }
        wanted[0] = values[0];
        for (int r = 1; r < CANDIDATES; r++) wanted[r] = (double)values[0] - values[r];
        wanted[CANDIDATES] = -log(total);
        wanted[CANDIDATES + 1] = entropy;
        for (int i = 0; i < DVL_FEATURES; i++) worst = fmax(worst, fabs(wanted[i] - features[i]));
        free(logits);
    }
    CHECK(worst <= 1e-4, "features differ by %g", worst);
}

/* Logits as a softcap and a multiplier leave them. */
static void test_cap(void) {
    random_state = 2;
    double worst = 0;
    for (int trial = 0; trial < 1000; trial++) {
        float x = 60 * random_float(), y = x, cap = trial % 2 ? 20 : 0, multiplier = 1.25f;
        c_backend.cap_logits(&y, 1, multiplier, cap);
        worst = fmax(worst, fabs(y - (trial % 2 ? 20 * tanh(1.25 * x / 20) : 1.25 * x)));
    }
    CHECK(worst <= 1e-4, "capped logits differ by %g", worst);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * The law of accepted tokens
 */

/* One slot, drafted from a law of its own and verified by rejection, very often: the first token follows the target's law. Also where the
 * vocabulary is smaller than the list of candidates, whose last then stands there several times. */
static void test_small_vocabulary(int vocab, bool one_hot) {
    enum { TRIALS = 60000 };
    float target[64], own[64], logits[2 * 64], scores[CANDIDATES], q[CANDIDATES], features[DVL_FEATURES];
    int list[CANDIDATES], token[1], ids[4] = {0}, choices[2], accepted[1], count[64] = {0}, taken = 0;
    const Sampling sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = 99};
    Sampler sampler = sampler_open(&c_backend, vocab);
    Drafts drafts = {.slots = 1, .blocks = 1, .one_hot = one_hot, .ids = list, .scores = scores, .q = q, .tokens = token, .features = features};
    random_state = (uint64_t)vocab;
    /* What the draft finds unlikely the target does not want at all: a draft that is taken too easily shows. */
    for (int i = 0; i < vocab; i++) own[i] = random_float(), target[i] = 3 * own[i] + 0.5f * random_float();
    for (int trial = 0; trial < TRIALS; trial++) {
        DraftBlock block = {.position = 0, .ids = ids, .count = 2, .sampling = sampling, .stream = (uint64_t)trial};
        c_backend.candidates(list, scores, CANDIDATES, own, 1, vocab, NULL);
        c_backend.draw_drafts(&drafts, 0, 1, &block, 1, ACCEPT_REJECTION);
        memcpy(logits, target, (size_t)vocab * sizeof(float)), memcpy(logits + vocab, target, (size_t)vocab * sizeof(float));
        c_backend.accept(choices, accepted, logits, vocab, &block, &drafts, 1, ACCEPT_REJECTION, &sampler, 1);
        count[choices[0]]++;
        taken += accepted[0];
    }
    double total = 0, chi = 0, own_total = 0, overlap = 0;
    for (int i = 0; i < vocab; i++) total += exp(target[i]);
    /* q: the 16 best of the draft's own logits, or the best alone. */
    c_backend.candidates(list, scores, CANDIDATES, own, 1, vocab, NULL);
    int distinct = vocab < CANDIDATES ? vocab : CANDIDATES;
    for (int c = 0; c < distinct; c++) own_total += exp(scores[c]);
    for (int i = 0; i < vocab; i++) {
        double p = exp(target[i]) / total, law = 0;
        for (int c = 0; c < distinct; c++) if (list[c] == i) law = one_hot ? c == 0 : exp(scores[c]) / own_total;
        overlap += fmin(p, law);
        chi += (count[i] - TRIALS * p) * (count[i] - TRIALS * p) / (TRIALS * p);
    }
    /* Chi-square of vocab - 1 degrees: six standard deviations above its mean. */
    CHECK(vocab == 1 || chi <= vocab - 1 + 6 * sqrt(2 * (vocab - 1)), "a vocabulary of %d%s: chi-square %.1f", vocab, one_hot ? ", best draft" : "", chi);
    CHECK(fabs(taken / (double)TRIALS - overlap) < 0.015, "a vocabulary of %d%s: %.4f are accepted, wanted %.4f", vocab,
          one_hot ? ", best draft" : "", taken / (double)TRIALS, overlap);
    sampler_close(&c_backend, &sampler);
}

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
    test_config_meaning();
    test_configs();
    test_causality();
    test_tensors(FIXTURES "qwen3-dflash-a");
    test_tensors(FIXTURES "glm_moe_dsa-dflash2-a");
    test_tensors(FIXTURES "qwen3-dspark-a");
    test_published_shapes();
    test_speculators_dspark(FIXTURES "qwen3-dspark-a");
    test_speculators_dspark(FIXTURES "glm_moe_dsa-dspark-a");
    test_speculators_dflash2(FIXTURES "qwen3-dflash2-a");
    test_speculators_dflash2(FIXTURES "glm_moe_dsa-dflash2-a");
    test_reduced_vocabulary(FIXTURES "qwen3-dspark-a");
    test_companions();
    test_bad_numbers();
    test_spoiled_files();
    test_ring_size();
    test_ring_window();
    test_ring_history();
    test_ring_admission();
    test_batches(FIXTURES "qwen3-dflash-a");
    test_batches(FIXTURES "qwen3-dflash2-a");
    test_batches(FIXTURES "qwen3-dspark-a");
    test_convolve();
    test_block_attention();
    test_candidates();
    test_length_features();
    test_cap();
    static const int vocabs[] = {1, 2, 5, 10, 15, 16, 17, 40};
    for (size_t i = 0; i < sizeof vocabs / sizeof *vocabs; i++)
        for (int one_hot = 0; one_hot < 2; one_hot++) test_small_vocabulary(vocabs[i], one_hot);
    return check_report();
}
