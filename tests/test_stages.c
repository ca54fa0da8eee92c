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

/* ---------------------------------------------------------------------------------------------------------------------
 * What rejected drafts leave behind
 */

enum { TOLD = 100 };

/* Generates to the end of the context, by drafts or without; hashes[i] receives the bits of the logits behind position i. Returns how
 * many drafts were rejected. */
static int tell(Engine *engine, const int *prompt, int P, bool drafts, const int *wanted, uint64_t *hashes, int *told) {
    int *ids = cache_history(&engine->cache, 0), vocab = engine->config.vocab_size, rejected = 0, slots = drafts ? engine->drafter.config.slots : 0;
    Error error;
    memcpy(ids, prompt, (size_t)P * sizeof(int));
    for (int at = 0, count = P; at + count <= TOLD;) {
        Row rows[MAX_PASS_ROWS];
        int indices[MAX_PASS_ROWS], kept = count - (at ? slots : 0);
        for (int i = 0; i < count; i++) rows[i] = (Row){0, at + i, ids[at + i]}, indices[i] = i;
        cache_step(&engine->cache);
        bool ok = (engine->cache.session[0].admitted || prepare_rows(engine, 0, at, count, &error))
                  && cache_room(&engine->cache, 0, count) == count && forward(engine, rows, count, &error);
        for (int i = at ? 0 : P - 1; i < kept && ok; i++) {
            ok = head(engine, rows, indices + i, 1, &error);
            hashes[at + i] = XXH3_64bits(engine->state.logits, (size_t)vocab * sizeof(float));
            const int token = argmax(engine->state.logits, vocab);
            if (i + 1 == kept && kept < count && token == ids[at + kept]) kept++;
            else if (i + 1 == kept) ids[at + kept] = token;
        }
        CHECK(ok, "a pass of %d rows at %d: %s", count, at, error.text);
        if (!ok) return rejected;
        rejected += count - kept;
        cache_commit(&engine->cache, 0, at + kept);
        if (drafts) draft_feed(engine, rows, indices, kept);
        *told = at += kept;
        DraftBlock block = {.session = 0, .position = at, .ids = ids, .sampling = greedy};
        count = 1 + slots;
        if (at + count > TOLD || !drafts) continue;
        draft_blocks(engine, &block, 1, ACCEPT_COUPLED, false);
        for (int j = 1; j < count && wanted; j++)               /* most of them are right, and the next ones then wrong */
            if ((at + j) % 5) ids[at + j] = wanted[at + j];
    }
    return rejected;
}

/* Windows, the groups that compressors have begun and compressed rows are what they would be without drafts: the same bits of logits. */
static void test_rollback(const char *model, const char *golden_path, KvDtype dtype, KvMode mode) {
    uint64_t hashes[2][TOLD + 8] = {{0}};
    int told[2] = {0}, ids[TOLD + 8], rejected = 0, P;
    Checkpoint golden = {.directory = (char *)model};
    Error error;
    CHECK(map_file(&golden, golden_path, &error), "%s", error.text);
    const int *prompt = golden_data(&golden, "input_ids", 0, &P);
    for (int drafts = 0; drafts < 2; drafts++) {
        Engine engine;
        EngineOptions options = {.model = model, .stages = drafts ? STAGES_REQUIRED : STAGES_IDLE, .sessions = 1, .context = 128,
                                 .kv_mode = mode, .kv_dtype = dtype};
        bool ok = engine_open(&engine, &options, &error);
        CHECK(ok, "%s: %s", model, error.text);
        if (!ok) return;
        rejected = tell(&engine, prompt, P, drafts, drafts ? ids : NULL, hashes[drafts], &told[drafts]);
        if (!drafts) memcpy(ids, cache_history(&engine.cache, 0), sizeof ids);
        engine_close(&engine);
    }
    const int n = told[1] < told[0] ? told[1] : told[0];
    CHECK(n > P + 30 && rejected > 6 && !memcmp(hashes[0], hashes[1], (size_t)n * sizeof(uint64_t)),
          "%s, %s rows, %s: %d logits behind %d rejected drafts have the bits of those without", model, kv_dtype_names[dtype],
          kv_mode_names[mode], n - P, rejected);
    golden.directory = NULL;
    checkpoint_close(&golden);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * A session that was saved drafts on
 */

/* Goes on for so many rounds with drafts. */
static void run_drafted(Runner *runner, Session *session, int rounds) {
    const uint64_t goal = runner->speculation.stats.rounds + (uint64_t)rounds;
    session_begin(session, &runner->engine);
    while (session->finish == RUNNING && runner->speculation.stats.rounds < goal) {
        session_admit(runner, session);
        run_round(runner, &session, 1);
    }
}

/* What is proposed next to a session that is saved in `path` after some rounds, or taken up from there. */
static void propose(const char *model, const char *path, bool take_up, int *proposed) {
    Runner runner;
    Error error;
    FILE *file;
    Session session = {.stream = 1, .continues = true, .sampling = greedy};
    EngineOptions options = {.model = model, .stages = STAGES_REQUIRED, .sessions = 1, .context = 128, .kv_dtype = KV_BF16,
                             .kv_mode = MODE_ADAPTIVE};
    bool ok = runner_open(&runner, &options, false, NULL, &error);
    CHECK(ok, "%s: %s", model, error.text);
    if (!ok) return;
    runner.speculation.width = runner.engine.drafter.config.slots + 1;
    runner.speculation.verify = VERIFY_FULL;
    if (take_up) {
        cJSON *header = session_open(&runner, path, &file, &error);
        ok = header && session_restore(&runner, &session, header, file, path, &error);
        CHECK(ok, "%s: taken up: %s", model, error.text);
        if (header) fclose(file);
        cJSON_Delete(header);
    } else {
        for (int i = 0; i < 25; i++) arrput(session.ids, 3 + 7 * i % 80);
        run_drafted(&runner, &session, 3);          /* behind the last of them the ring has all rows */
        CHECK(session_save(&runner, &session, path, NULL, &error), "%s: saved: %s", model, error.text);
    }
    run_drafted(&runner, &session, 1);
    memcpy(proposed, runner.engine.drafter.state.drafts.tokens, (size_t)runner.engine.drafter.config.slots * sizeof(int));
    session_free(&session);
    runner_close(&runner);
}

static void test_saved_session(const char *model) {
    int proposed[2][MAX_BLOCK] = {{0}};
    char path[PATH_MAX], *directory = scratch_directory();
    join(path, directory, "session");
    for (int i = 0; i < 2; i++) propose(model, path, i, proposed[i]);
    CHECK(proposed[0][0] && !memcmp(proposed[0], proposed[1], sizeof proposed[0]), "%s: a session taken up proposes what it would have", model);
    free(directory);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Files that are wrong
 */

/* One file of the directory with all `from` replaced by `to`. */
static void replace_text(const char *directory, const char *name, const char *from, const char *to) {
    char path[PATH_MAX], *bytes;
    size_t size, length = strlen(from);
    Error error;
    uint8_t *out = NULL;
    int found = 0;
    if (!read_file(join(path, directory, name), (size_t)1 << 30, &bytes, &size, &error)) fprintf(stderr, "%s\n", error.text), exit(1);
    for (size_t i = 0; i < size;) {
        bool here = i + length <= size && !memcmp(bytes + i, from, length);
        size_t n = here ? strlen(to) : 1;
        memcpy(arraddnptr(out, n), here ? to : bytes + i, n);
        i += here ? length : 1;
        found += here;
    }
    CHECK(found, "%s: %s occurs", name, from);
    write_bytes(directory, name, out, arrlenu(out));
    arrfree(out);
    free(bytes);
}

/* A checkpoint spoiled that way is refused with these words, and runs as long as its stages are not asked for. */
static void check_refused(const char *model, const char *file, const char *from, const char *to, const char *words) {
    char *directory = copy_checkpoint(model);
    Engine engine;
    Error error = {""};
    replace_text(directory, file, from, to);
    EngineOptions options = {.model = directory, .stages = STAGES_IF_THERE, .sessions = 1, .context = 64};
    bool opened = engine_open(&engine, &options, &error);
    CHECK(!opened && strstr(error.text, words), "%s for %s: \"%s\" has the words \"%s\"", to, from, error.text, words);
    if (opened) engine_close(&engine);
    options.stages = STAGES_IDLE;
    opened = engine_open(&engine, &options, &error);
    CHECK(opened, "%s for %s: without drafts it runs: %s", to, from, error.text);
    if (opened) engine_close(&engine);
    free(directory);
}

static void test_refusals(void) {
    static const char model[] = "tests/fixtures/deepseek_v41-a", weights[] = "model.safetensors", config[] = "config.json";
    static const struct { const char *file, *from, *to, *words; } faults[] = {
        {weights, "mtp.1.attn.wkv.weight", "mtp.1.attn.wkx.weight", "tensor mtp.1.attn.wkv.weight: found nothing"},
        {weights, "mtp.2.attn.attn_sink", "mtp.2.attn.attn_sunk", "tensor mtp.2.attn.attn_sink: found nothing"},
        {weights, "mtp.0.main_norm.weight", "mtp.0.main_narm.weight", "tensor mtp.0.main_norm.weight: found nothing"},
        {weights, "mtp.2.markov_head.head.weight", "mtp.2.markov_head.heat.weight", "tensor mtp.2.markov_head.head.weight: found nothing"},
        {weights, "mtp.1.ffn.gate.bias_vl", "mtp.1.ffn.gate.bias_xy", "tensor mtp.1.ffn.gate.bias_xy: tide knows no such part"},
        {config, "\"dspark_markov_rank\": 16", "\"dspark_markov_rank\": 8", "found BF16 [160, 16], wanted F32, F16 or BF16 [160, 8]"},
        {config, "\"dspark_markov_rank\": 16,", "", "dspark_markov_rank: found nothing"},
        {config, "\"dspark_block_size\": 5", "\"dspark_block_size\": 0", "dspark_block_size: found 0"},
        {config, "\"dspark_block_size\": 5", "\"dspark_block_size\": 32", "dspark_block_size: found 32"},
        {config, "\"dspark_block_size\": 5,", "", "dspark_block_size: found nothing"},
        {config, "\"dspark_noise_token_id\": 150", "\"dspark_noise_token_id\": 160", "dspark_noise_token_id: found 160"},
        {config, "\"dspark_target_layer_ids\": [", "\"dspark_target_layer_ids\": [9, ", "dspark_target_layer_ids: found"},
        {config, "\"dspark_target_layer_ids\"", "\"dspark_target_layer_idx\"", "dspark_target_layer_ids: found nothing"},
        {config, "\"dspark_n_routed_experts\": 3", "\"dspark_n_routed_experts\": 2", "mtp.0.ffn.gate.weight: found BF16 [3, 32]"},
        {config, "\"dspark_num_experts_per_tok\": 2", "\"dspark_num_experts_per_tok\": 5", "dspark_num_experts_per_tok: found 5"},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        check_refused(model, faults[i].file, faults[i].from, faults[i].to, faults[i].words);
    static const struct { const char *model, *words; } others[] = {
        {"weights/mini", "found no draft stages"}, {STAGES_TARGET, "found no draft stages"}};
    for (int i = 0; i < 2; i++) {
        Engine engine;
        Error error = {""};
        EngineOptions options = {.model = others[i].model, .stages = STAGES_REQUIRED, .sessions = 1, .context = 64};
        CHECK(!engine_open(&engine, &options, &error) && strstr(error.text, others[i].words), "%s: \"%s\"", others[i].model, error.text);
        options.stages = STAGES_IF_THERE;
        bool opened = engine_open(&engine, &options, &error);
        CHECK(opened && !engine.drafter.config.architecture, "%s: runs without a drafter: %s", others[i].model, error.text);
        if (opened) engine_close(&engine);
    }
}

/* Counts of stages: as many as compress_ratios has zeros more than the target has layers. */
static void test_counts(void) {
    static const struct { const char *kind, *keys, *words; } wrong[] = {
        {"mtp", "{\"num_nextn_predict_layers\": 2}", "num_nextn_predict_layers: found 2, wanted 1"},
        {"mtp", "{\"num_nextn_predict_layers\": 1, \"compress_ratios\": [0, 128, 4, 128, 4, 0, 0, 0]}", "wanted 1"},
        {"mtp", "{\"num_nextn_predict_layers\": 1, \"compress_ratios\": [0, 128, 4, 128, 4, 0, 4]}", "compress_ratios: found 4, wanted 0"},
        {"dspark", "{\"num_nextn_predict_layers\": 1}", "tensor mtp.0.h_proj.weight: found nothing"},
        {"dspark", "{\"dspark_block_size\": 5, \"dspark_noise_token_id\": 172, \"dspark_target_layer_ids\": [2, 4, 5], "
                   "\"dspark_markov_rank\": 16, \"num_nextn_predict_layers\": 3}", "tensor mtp.2.attn_norm.weight: found nothing"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *directory = join_stages(wrong[i].kind, wrong[i].keys);
        Engine engine;
        Error error = {""};
        EngineOptions options = {.model = directory, .stages = STAGES_IF_THERE, .sessions = 1, .context = 64};
        bool opened = engine_open(&engine, &options, &error);
        CHECK(!opened && strstr(error.text, wrong[i].words), "%s: \"%s\" has the words \"%s\"", wrong[i].keys, error.text, wrong[i].words);
        if (opened) engine_close(&engine);
        free(directory);
    }
}

int main(void) {
    char *dspark = join_stages("dspark", dspark_keys), *mtp = join_stages("mtp", mtp_keys);
    test_rounds("tests/fixtures/deepseek_v41-a", "tests/fixtures/deepseek_v41-a/golden.safetensors", "dspark.", 2e-4);
    test_rounds("tests/fixtures/deepseek_v41-c", "tests/fixtures/deepseek_v41-c/golden.safetensors", "dspark.", 2e-4);
    test_rounds(dspark, STAGES "/dspark-golden.safetensors", "", 2e-4);
    test_rounds(mtp, STAGES "/mtp-golden.safetensors", "", 2e-4);
    for (int i = 0; i < 6; i++) {
        const KvDtype dtype = (KvDtype)(i % 2 ? KV_F32 : KV_F4);
        test_rollback("tests/fixtures/deepseek_v41-a", "tests/fixtures/deepseek_v41-a/golden.safetensors", dtype, (KvMode)(i % 3));
        test_rollback(dspark, STAGES "/dspark-golden.safetensors", dtype, (KvMode)(i % 3));
        test_rollback(mtp, STAGES "/mtp-golden.safetensors", dtype, (KvMode)(i % 3));
    }
    test_saved_session("tests/fixtures/deepseek_v41-a");
    test_saved_session(dspark);
    test_refusals();
    test_counts();
    free(dspark), free(mtp);
    return check_report();
}
