/* test_sessions.c: sessions at rest. A session that was written and taken up again goes on as if it had never stopped, in any mode of the
 * hierarchy and at every place of the frontier in a page; a file that is wrong in any way is refused by name, and no load changes it. */
#include "../engine.c"
#include "../backend.c"
#include "check.h"
#include "scratch.h"

static const char *const glm = "tests/fixtures/glm_moe_dsa-a", *const qwen = "tests/fixtures/qwen3-a",
                  *const compressed[] = {"tests/fixtures/deepseek_v4-a", "tests/fixtures/deepseek_v41-a"};

enum { CONTEXT = 320, STEPS = 9 };

static EngineOptions options_for(const char *model, KvMode mode, KvDtype dtype) {
    return (EngineOptions){.model = model, .sessions = 1, .context = CONTEXT, .kv_mode = mode, .kv_dtype = dtype};
}

/* A pool so small that most of a long history lies on the host. */
static EngineOptions tight_options(KvDtype dtype) {
    EngineOptions options = options_for(glm, MODE_ADAPTIVE, dtype);
    Engine engine;
    Error error;
    if (!engine_plan(&engine, &options, &error)) fprintf(stderr, "%s\n", error.text), exit(1);
    options.kv_budget = engine.cache.least_bytes;
    engine_close(&engine);
    return options;
}

static Runner open_runner(const EngineOptions *options) {
    Runner runner;
    Error error;
    if (!runner_open(&runner, options, false, NULL, &error)) fprintf(stderr, "%s\n", error.text), exit(1);
    return runner;
}

/* A session of n random ids, the same for the same n. */
static Session start_session(const Runner *runner, int n) {
    Session session = {.continues = true,
                       .stream = 5,
                       .sampling = {.temperature = 0.8f, .top_p = 0.95f, .min_p = 0.01f, .repeat_penalty = 1.1f, .top_k = 50,
                                    .seed = 77}};
    random_state = (uint64_t)n + 1;
    for (int i = 0; i < n; i++) arrput(session.ids, random_below(runner->engine.config.vocab_size));
    return session;
}

static void advance(Runner *runner, Session *session, int steps) {
    session->max_new = steps;
    session_begin(session, &runner->engine);
    run_session(runner, session);
    if (session->finish == FINISH_ERROR) fprintf(stderr, "%s\n", session->error.text), exit(1);
}

static bool take_up(Runner *runner, Session *session, const char *path, Error *error) {
    FILE *file;
    cJSON *header = session_open(runner, path, &file, error);
    bool ok = header && session_restore(runner, session, header, file, path, error);
    if (header) fclose(file);
    cJSON_Delete(header);
    return ok;
}

static void scratch_path(char path[PATH_MAX]) {
    char *directory = scratch_directory();
    join(path, directory, "session");
    free(directory);
}

/* The ids and the last logits of a session that never stopped, against one that did, after `n` ids and some tokens. */
static void compare_stay(const EngineOptions *before, const EngineOptions *after, int n) {
    char path[PATH_MAX];
    Error error;
    scratch_path(path);
    Runner first = open_runner(before);
    Session session = start_session(&first, n);
    advance(&first, &session, STEPS);
    CHECK(session_save(&first, &session, path, NULL, &error), "saving %d ids: %s", n, error.text);
    char *whole, *again;
    size_t length, length_again, vocab = (size_t)first.engine.config.vocab_size;
    CHECK(read_file(path, (size_t)1 << 30, &whole, &length, &error), "%s", error.text);
    advance(&first, &session, STEPS);

    Runner second = open_runner(after);
    Session resumed = {.continues = true};
    bool ok = take_up(&second, &resumed, path, &error);
    CHECK(ok, "taking up %d ids: %s", n, error.text);
    if (ok) advance(&second, &resumed, STEPS);
    CHECK(arrlen(resumed.ids) == arrlen(session.ids) && !memcmp(resumed.ids, session.ids, arrlenu(session.ids) * sizeof(int)),
          "%d ids, mode %d to %d: the same ids as without a stop", n, before->kv_mode, after->kv_mode);
    CHECK(!memcmp(first.engine.state.logits, second.engine.state.logits, vocab * sizeof(float)),
          "%d ids, mode %d to %d: the same logits", n, before->kv_mode, after->kv_mode);
    CHECK(ok && second.rows_run == tokens_generated(&resumed), "%d ids: %ld rows run: there is no prefill", n, second.rows_run);
    CHECK(read_file(path, (size_t)1 << 30, &again, &length_again, &error) && length == length_again && !memcmp(whole, again, length),
          "loading changed the file");
    free(whole);
    free(again);
    session_free(&session);
    session_free(&resumed);
    runner_close(&first);
    runner_close(&second);
}

static void test_going_on_is_never_having_stopped(void) {
    static const int lengths[] = {1, 54, 55, 56, 64, 119, 130, 250};        /* the frontier at 63, 64 and 65 among them */
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (KvDtype dtype = KV_F32; dtype <= KV_F8; dtype++) {
            EngineOptions modes[] = {options_for(glm, MODE_RESIDENT, dtype), options_for(glm, MODE_HISPARSE, dtype),
                                     options_for(glm, MODE_ADAPTIVE, dtype), tight_options(dtype)};
            for (int from = 0; from < 4; from++) compare_stay(&modes[from], &modes[(from + (int)i) % 4], lengths[i]);
            EngineOptions dense = options_for(qwen, MODE_ADAPTIVE, dtype);
            compare_stay(&dense, &dense, lengths[i]);
        }
}

/* Rows of 4 positions and of 16, or of 1 and of 2, and what stands behind the last of them. */
static void test_going_on_inside_a_group(const char *model) {
    static const int lengths[] = {1, 2, 3, 4, 5, 13, 16, 17, 31, 120, 247, 255, 256, 257};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        KvDtype dtype = (KvDtype)(i % 3);
        EngineOptions modes[] = {options_for(model, MODE_RESIDENT, dtype), options_for(model, MODE_HISPARSE, dtype),
                                 options_for(model, MODE_ADAPTIVE, dtype)};
        for (int from = 0; from < 3; from++) compare_stay(&modes[from], &modes[(from + (int)i) % 3], lengths[i]);
    }
}

/* The whole history is on the host and in one page image each; saving what was loaded writes the same bytes. */
static void test_a_copy_is_the_same_file(void) {
    char path[PATH_MAX], copy[PATH_MAX], *a, *b;
    size_t length_a, length_b;
    Error error;
    EngineOptions options = options_for(glm, MODE_ADAPTIVE, KV_BF16), tight = tight_options(KV_BF16);
    Runner runner = open_runner(&options), other = open_runner(&tight);
    Session session = start_session(&runner, 200), resumed = {.continues = true};
    scratch_path(path);
    scratch_path(copy);
    advance(&runner, &session, 3);
    CHECK(session_save(&runner, &session, path, NULL, &error) && take_up(&other, &resumed, path, &error)
              && session_save(&other, &resumed, copy, NULL, &error), "%s", error.text);
    CHECK(read_file(path, (size_t)1 << 30, &a, &length_a, &error) && read_file(copy, (size_t)1 << 30, &b, &length_b, &error)
              && length_a == length_b && !memcmp(a, b, length_a), "the same file from another placement");
    free(a), free(b);
    session_free(&session), session_free(&resumed);
    runner_close(&runner), runner_close(&other);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Refusals
 */

typedef struct Saved { Runner runner; Session session; char path[PATH_MAX], *bytes; size_t length; } Saved;

static void save_one(Saved *saved) {
    Error error;
    EngineOptions options = options_for(glm, MODE_ADAPTIVE, KV_BF16);
    saved->runner = open_runner(&options);
    saved->session = start_session(&saved->runner, 100);
    scratch_path(saved->path);
    advance(&saved->runner, &saved->session, 4);
    if (!session_save(&saved->runner, &saved->session, saved->path, NULL, &error)
        || !read_file(saved->path, (size_t)1 << 30, &saved->bytes, &saved->length, &error))
        fprintf(stderr, "%s\n", error.text), exit(1);
}

static void forget(Saved *saved) {
    free(saved->bytes);
    session_free(&saved->session);
    runner_close(&saved->runner);
}

/* Whether these bytes are refused in one line that names the file. */
static void check_refused(const Saved *saved, const char *bytes, size_t length, const char *wanted, const char *what, size_t at) {
    char directory[PATH_MAX], path[PATH_MAX];
    Error error = {""};
    FILE *file = NULL;
    snprintf(directory, sizeof directory, "%.*s", (int)(strrchr(saved->path, '/') - saved->path), saved->path);
    write_bytes(directory, "wrong", bytes, length);
    cJSON *header = session_open(&saved->runner, join(path, directory, "wrong"), &file, &error);
    CHECK(!header, "%s %zu is taken", what, at);
    CHECK(strstr(error.text, path) && !strchr(error.text, '\n') && (!wanted || strstr(error.text, wanted)), "%s %zu: \"%s\"", what,
          at, error.text);
    if (header) fclose(file);
    cJSON_Delete(header);
}

static void test_damaged_files_are_refused(void) {
    Saved saved;
    save_one(&saved);
    size_t header = sizeof session_magic + 8 + (size_t)load_u64((const uint8_t *)saved.bytes + sizeof session_magic);
    for (size_t at = 0; at < saved.length; at += at < header + 64 || at + 40 > saved.length ? 1 : 1009) {
        char kept = saved.bytes[at];
        saved.bytes[at] = (char)(kept ^ (1 << at % 8));
        check_refused(&saved, saved.bytes, saved.length, NULL, "a flipped bit in byte", at);
        saved.bytes[at] = kept;
        if (at % 7 == 0 || at >= header) check_refused(&saved, saved.bytes, at, NULL, "a file of bytes", at);
    }
    char *longer = allocate_zeroed(saved.length + 1, 1);
    memcpy(longer, saved.bytes, saved.length);
    check_refused(&saved, longer, saved.length + 1, "damaged", "a file that is longer by", 1);
    free(longer);
    forget(&saved);
}

/* The saved file with another header and a right check, as a forger would make it. */
static char *forge(const Saved *saved, const char *header, size_t *length) {
    size_t old = (size_t)load_u64((const uint8_t *)saved->bytes + sizeof session_magic), begin = sizeof session_magic + 8,
           pages = saved->length - begin - old - 8;
    *length = begin + strlen(header) + pages + 8;
    char *bytes = allocate_zeroed(*length, 1);
    memcpy(bytes, saved->bytes, begin);
    store_u64((uint8_t *)bytes + sizeof session_magic, strlen(header));
    memcpy(bytes + begin, header, strlen(header));
    memcpy(bytes + begin + strlen(header), saved->bytes + begin + old, pages);
    store_u64((uint8_t *)bytes + *length - 8, XXH3_64bits(bytes, *length - 8));
    return bytes;
}

static void test_forged_headers_are_refused(void) {
    static const struct { const char *key, *value; } forgeries[] = {
        {"ids", NULL}, {"ids", "7"}, {"ids", "[-1]"}, {"ids", "[1.5]"}, {"ids", "[1e9]"}, {"ids", "[\"a\"]"}, {"ids", "[]"},
        {"rows", NULL}, {"rows", "-1"}, {"rows", "1e9"}, {"rows", "3.5"}, {"rows", "0"}, {"rows", "64"}, {"rows", "\"x\""},
        {"page_bytes", NULL}, {"page_bytes", "0"}, {"page_bytes", "1e30"}, {"stream", NULL}, {"stream", "-1"}, {"seed", NULL},
        {"seed", "-1"}, {"seed", "1e300"}, {"temperature", NULL}, {"temperature", "\"hot\""}, {"top_p", NULL}, {"top_p", "2"},
        {"min_p", NULL}, {"min_p", "-1"}, {"repeat_penalty", NULL}, {"repeat_penalty", "-1"}, {"top_k", NULL}, {"top_k", "-1"},
        {"checkpoint", NULL}, {"checkpoint", "7"}, {"checkpoint", "\"0123456789abcdef, bf16 rows, index_topk 16\""},
    };
    Saved saved;
    save_one(&saved);
    Error error;
    size_t length, begin = sizeof session_magic + 8;
    for (size_t i = 0; i < sizeof forgeries / sizeof *forgeries; i++) {
        cJSON *header = json_parse(saved.bytes + begin, (size_t)load_u64((const uint8_t *)saved.bytes + sizeof session_magic),
                                   "header", &error);
        cJSON_DeleteItemFromObjectCaseSensitive(header, forgeries[i].key);
        if (forgeries[i].value) cJSON_AddItemToObject(header, forgeries[i].key, cJSON_Parse(forgeries[i].value));
        char *text = cJSON_PrintUnformatted(header), *bytes = forge(&saved, text, &length);
        check_refused(&saved, bytes, length, NULL, forgeries[i].key, i);
        free(bytes);
        cJSON_free(text);
        cJSON_Delete(header);
    }
    static const char *const others[] = {"", "[]", "{", "{}", "7", "{\"ids\":[1]}{}", "\xff"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char *bytes = forge(&saved, others[i], &length);
        check_refused(&saved, bytes, length, NULL, "a header that is not one", i);
        free(bytes);
    }
    char *bytes = forge(&saved, "{}", &length);
    store_u64((uint8_t *)bytes + sizeof session_magic, UINT64_MAX - 7);
    check_refused(&saved, bytes, length, "damaged", "a header without end", 0);
    memcpy(bytes, "tide session 9\n", 16);
    check_refused(&saved, bytes, length, "version", "another version", 9);
    free(bytes);
    forget(&saved);
}

/* A file is tied to the weights, to the kind of rows and to the size of the selection; it does not have to fit the same context, but has
 * to fit. */
static void test_foreign_sessions_are_refused(void) {
    Saved saved;
    save_one(&saved);
    char *directory = copy_checkpoint(glm);
    float changed = 1.25f;
    patch_tensor(directory, "model.norm.weight", 0, &changed, 2);
    struct { EngineOptions options; const char *wanted; } others[] = {
        {options_for(directory, MODE_ADAPTIVE, KV_BF16), "checkpoint"}, {options_for(qwen, MODE_ADAPTIVE, KV_BF16), "checkpoint"},
        {options_for(glm, MODE_ADAPTIVE, KV_F8), "fp8 rows"}, {options_for(glm, MODE_ADAPTIVE, KV_BF16), "index_topk"},
        {options_for(glm, MODE_ADAPTIVE, KV_BF16), "context of 64"}};
    others[3].options.index_topk = 8;
    others[4].options.context = 64;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        Runner runner = open_runner(&others[i].options);
        Session session = {0};
        Error error;
        CHECK(!take_up(&runner, &session, saved.path, &error) && strstr(error.text, saved.path) && strstr(error.text, others[i].wanted),
              "wanted \"%s\" in \"%s\"", others[i].wanted, error.text);
        CHECK(!arrlen(session.ids) && !runner.engine.cache.session[0].admitted, "nothing was taken from a foreign session");
        runner_close(&runner);
    }
    EngineOptions larger = options_for(glm, MODE_HISPARSE, KV_BF16);
    larger.context = 1000;
    Runner runner = open_runner(&larger);
    Session session = {.continues = true};
    Error error;
    CHECK(take_up(&runner, &session, saved.path, &error), "a larger context takes it: %s", error.text);
    session_free(&session);
    runner_close(&runner);
    free(directory);
    forget(&saved);
}

/* What cannot be written leaves the old file whole, and no half of a new one. */
static void test_a_failed_save_loses_nothing(void) {
    Saved saved;
    Error error;
    save_one(&saved);
    char path[PATH_MAX + 16], *again;
    size_t length;
    FILE *file;
    snprintf(path, sizeof path, "%s.partial", saved.path);
    mkdir(path, 0700);
    advance(&saved.runner, &saved.session, 2);
    CHECK(!session_save(&saved.runner, &saved.session, saved.path, NULL, &error) && strstr(error.text, saved.path),
          "a save whose temporary name is taken fails");
    CHECK(read_file(saved.path, (size_t)1 << 30, &again, &length, &error) && length == saved.length
              && !memcmp(again, saved.bytes, length), "the old file is as it was");
    rmdir(path);
    CHECK(!session_save(&saved.runner, &saved.session, "/nonexistent/session", NULL, &error), "no such directory");
    CHECK(!session_save(&saved.runner, &saved.session, "/dev/null", NULL, &error) && strstr(error.text, "not a regular file"),
          "a device is not overwritten: %s", error.text);
    CHECK(!session_open(&saved.runner, "/dev/zero", &file, &error) && strstr(error.text, "not a regular file"), "%s", error.text);
    CHECK(!session_open(&saved.runner, "/tmp", &file, &error) && strstr(error.text, "not a regular file"), "%s", error.text);
    CHECK(!session_open(&saved.runner, "/nonexistent/session", &file, &error) && strstr(error.text, "No such file"), "%s", error.text);
    free(again);
    forget(&saved);
}

/* A turn taken back after a load reaches into imported history. */
static void test_rows_are_taken_back_after_a_load(void) {
    Saved saved;
    Error error;
    save_one(&saved);
    for (int keep = 1; keep < 100; keep += 21) {
        EngineOptions options = keep % 2 ? options_for(glm, MODE_HISPARSE, KV_BF16) : tight_options(KV_BF16);
        Runner runner = open_runner(&options);
        Session session = {.continues = true}, fresh = start_session(&runner, 100);
        CHECK(take_up(&runner, &session, saved.path, &error), "%s", error.text);
        arrsetlen(session.ids, (size_t)keep);
        if (session.cached > keep) session.cached = keep;
        advance(&runner, &session, STEPS);
        cache_release(&runner.engine.cache, 0);
        arrsetlen(fresh.ids, (size_t)keep);
        advance(&runner, &fresh, STEPS);
        CHECK(arrlen(session.ids) == keep + STEPS && !memcmp(session.ids, fresh.ids, arrlenu(fresh.ids) * sizeof(int)),
              "back to %d of 103 rows: the same as from the beginning", keep);
        session_free(&session), session_free(&fresh);
        runner_close(&runner);
    }
    forget(&saved);
}

int main(void) {
    test_going_on_is_never_having_stopped();
    for (int m = 0; m < 2; m++) test_going_on_inside_a_group(compressed[m]);
    test_a_copy_is_the_same_file();
    test_damaged_files_are_refused();
    test_forged_headers_are_refused();
    test_foreign_sessions_are_refused();
    test_a_failed_save_loses_nothing();
    test_rows_are_taken_back_after_a_load();
    return check_report();
}
