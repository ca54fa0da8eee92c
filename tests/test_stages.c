/* test_stages.c: the drafters inside DeepSeek-V4's checkpoints. Their rounds against PyTorch references, step by step; the stream that
 * decoding without them gives, bit for bit, wherever rows lie and whoever shares the rounds; files that are wrong.
 */
#include "../engine.c"
#include "../backend.c"
#include "check.h"
#include "passes.h"
#include "scratch.h"
#include "stages.h"

static const Sampling greedy = {.temperature = 0, .top_p = 1, .repeat_penalty = 1};

/* ---------------------------------------------------------------------------------------------------------------------
 * Rounds, step by step
 */

static const void *golden_data(const Checkpoint *golden, const char *name, int dim, int *extent) {
    const Tensor *tensor = checkpoint_find(golden, name);
    if (!tensor || (uintptr_t)tensor->data % 4) fprintf(stderr, "%s: no tensor %s, or not aligned\n", golden->directory, name), exit(1);
    if (extent) *extent = (int)tensor->shape[dim];
    return tensor->data;
}

/* Raises *worst to the largest absolute difference; a NaN is a large one. */
static void differ(double *worst, const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double difference = fabs((double)a[i] - b[i]);
        *worst = difference <= *worst ? *worst : difference == difference ? difference : 1e30;
    }
}

enum { SEEN_VOCAB = 512, SEEN_HIDDEN = 128, SEEN_ROWS = 512 };

/* What a block pass does on its way, for a single block: the logits of each slot; and the features as stages read them. */
static struct {
    int slots, features;
    const float *main_norm;
    float logits[MAX_BLOCK][SEEN_VOCAB], feature[SEEN_ROWS][SEEN_HIDDEN];
} seen;

static void seen_candidates(int *ids, float *values, size_t stride, const float *logits, int n, int vocab, const int *target_ids) {
    candidates(ids, values, stride, logits, n, vocab, target_ids);
    for (int r = 0; r < n && seen.slots < MAX_BLOCK; r++)
        memcpy(seen.logits[seen.slots++], logits + (size_t)r * (size_t)vocab, (size_t)vocab * sizeof(float));
}

static void seen_rms_norm(float *y, size_t y_stride, const float *x, size_t x_stride, const float *weight, int n, int dim, float eps) {
    rms_norm(y, y_stride, x, x_stride, weight, n, dim, eps);
    for (int r = 0; r < n && weight == seen.main_norm && seen.features < SEEN_ROWS; r++)
        memcpy(seen.feature[seen.features++], y + (size_t)r * y_stride, (size_t)dim * sizeof(float));
}

static bool open_stages(Engine *engine, const char *model, int sessions, KvDtype dtype, Error *error) {
    static Backend watching;
    watching = c_backend;
    watching.candidates = seen_candidates;
    watching.rms_norm = seen_rms_norm;
    EngineOptions options = {.backend = &watching, .model = model, .stages = STAGES_REQUIRED, .sessions = sessions, .context = 128,
                             .kv_mode = MODE_ADAPTIVE, .kv_dtype = dtype};
    if (!engine_open(engine, &options, error)) return false;
    memset(&seen, 0, sizeof seen);
    seen.main_norm = engine->drafter.weights.hidden_norm;
    return true;
}

/* Rows ids[from, to) of session 0, of which the first `keep` of those that argmax of the row before bears out are committed; *kept of
 * them. The successor joins the ids. */
static bool run_and_keep(Engine *engine, int from, int to, int least, int *kept, Error *error) {
    int *ids = cache_history(&engine->cache, 0), indices[MAX_PASS_ROWS], vocab = engine->config.vocab_size;
    Row rows[MAX_PASS_ROWS];
    for (int i = from; i < to; i++) rows[i - from] = (Row){0, i, ids[i]}, indices[i - from] = i - from;
    cache_step(&engine->cache);
    if (!engine->cache.session[0].admitted && !prepare_rows(engine, 0, from, to - from, error)) return false;
    if (cache_room(&engine->cache, 0, to - from) < to - from) return fail(error, "no room for %d rows", to - from);
    if (!forward(engine, rows, to - from, error)) return false;
    for (*kept = least;; ++*kept) {
        if (!head(engine, rows, indices + *kept - 1, 1, error)) return false;
        const int token = argmax(engine->state.logits, vocab);
        if (from + *kept < to && token == ids[from + *kept]) continue;
        ids[from + *kept] = token;
        break;
    }
    cache_commit(&engine->cache, 0, from + *kept);
    draft_feed(engine, rows, indices, *kept);
    return true;
}

/* The golden file's rounds from its prompt on. prefix: of its tensors' names. */
static void test_rounds(const char *model, const char *golden_path, const char *prefix, double bound) {
    static const char *const parts[] = {"anchor", "position", "accepted", "ids", "logits", "hidden", "greedy", "conf", "main"};
    enum { ANCHOR, POSITION, ACCEPTED, IDS, LOGITS, HIDDEN, GREEDY, CONFIDENCE, MAIN, PARTS };
    char name[64];
    const void *data[PARTS] = {0};
    Engine engine;
    Checkpoint golden = {.directory = (char *)model};
    Error error;
    int P, extents[PARTS] = {0}, kept = 0, wrong = 0;
    double logits = 0, confidence = 0, states = 0, features = 0;
    bool ok = map_file(&golden, golden_path, &error) && open_stages(&engine, model, 1, KV_F32, &error);
    CHECK(ok, "%s: opens with its stages: %s", model, error.text);
    if (!ok) return;
    const bool dspark = !engine.drafter.config.multi_token;
    for (int i = 0; i < (dspark ? PARTS : CONFIDENCE); i++) {
        snprintf(name, sizeof name, "%s%s", prefix, parts[i]);
        data[i] = golden_data(&golden, name, 0, &extents[i]);
    }
    const int vocab = engine.config.vocab_size, hidden = engine.config.hidden_size, slots = engine.drafter.config.slots,
              R = extents[ANCHOR], *anchor = data[ANCHOR], *position = data[POSITION], *accepted = data[ACCEPTED], *proposed = data[IDS],
              *prompt = golden_data(&golden, "input_ids", 0, &P);
    int *ids = cache_history(&engine.cache, 0);
    memcpy(ids, prompt, (size_t)P * sizeof(int));
    ok = run_and_keep(&engine, 0, P, P, &kept, &error);
    CHECK(ok, "%s: the prompt: %s", model, error.text);
    for (int t = 0; t < P && dspark; t++)
        differ(&features, seen.feature[t], (const float *)data[MAIN] + t * hidden, (size_t)hidden);
    DraftBlock block = {.session = 0, .position = P, .ids = ids, .sampling = greedy};
    for (int r = 0; r < R && ok && !wrong; r++) {
        seen.slots = 0;
        draft_blocks(&engine, &block, 1, ACCEPT_COUPLED, false);
        wrong += block.position != position[r] || ids[block.position] != anchor[r];
        for (int j = 0; j < slots; j++) {
            wrong += ids[block.position + 1 + j] != proposed[r * slots + j];
            differ(&logits, seen.logits[j], (const float *)data[LOGITS] + (r * slots + j) * vocab, (size_t)vocab);
        }
        differ(&states, engine.drafter.state.branch, (const float *)data[HIDDEN] + r * slots * hidden, (size_t)(slots * hidden));
        if (dspark)
            differ(&confidence, engine.drafter.state.drafts.confidence, (const float *)data[CONFIDENCE] + r * slots, (size_t)slots);
        ok = run_and_keep(&engine, block.position, block.position + 1 + slots, 1, &kept, &error);
        wrong += kept - 1 != accepted[r];
        block.position += kept;
        CHECK(ok && !wrong, "%s: round %d of %d: %d of its numbers differ", model, r, R, wrong);
    }
    const int n = extents[GREEDY] < block.position - P ? extents[GREEDY] : block.position - P;
    CHECK(!memcmp(ids + P, data[GREEDY], (size_t)n * sizeof(int)), "%s: the stream is what decoding without drafts gives", model);
    CHECK(logits < bound && confidence < bound && states < 5 * bound && features < bound,
          "%s: %d rounds: logits off by %g, confidences %g, states %g, features %g", model, R, logits, confidence, states, features);
    printf("%s: %d rounds: logits off by %.1e, confidences %.1e, states %.1e, features %.1e\n", golden_path, R, logits, confidence, states,
           features);
    engine_close(&engine);
    golden.directory = NULL;
    checkpoint_close(&golden);
}

int main(void) {
    char *dspark = join_stages("dspark", dspark_keys), *mtp = join_stages("mtp", mtp_keys);
    test_rounds("tests/fixtures/deepseek_v41-a", "tests/fixtures/deepseek_v41-a/golden.safetensors", "dspark.", 2e-4);
    test_rounds("tests/fixtures/deepseek_v41-c", "tests/fixtures/deepseek_v41-c/golden.safetensors", "dspark.", 2e-4);
    test_rounds(dspark, STAGES "/dspark-golden.safetensors", "", 2e-4);
    test_rounds(mtp, STAGES "/mtp-golden.safetensors", "", 2e-4);
    free(dspark), free(mtp);
    return check_report();
}
