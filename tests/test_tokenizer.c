/* test_tokenizer.c: tokenizer.c against what the reference library said (tests/fixtures/tokenizer-*, and the large published
 * vocabularies where they lie at hand), its promises about any bytes, and every way to refuse a file.
 *
 *     test_tokenizer [DIR]        DIR: the published tokenizers, default ../shared/fixtures/tokenizers
 */
#include "../engine.c"
#include "../backend.c"
#include "check.h"

#include <cjson/cJSON.h>
#include <stb/stb_ds.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---------------------------------------------------------------------------------------------------------------------
 * Reading fixtures
 */

typedef struct Bytes {
    char *data;
    size_t length;
} Bytes;

/* All of a file, or of a .xz file's content; data NULL where there is none. */
static Bytes read_all(const char *directory, const char *file) {
    char command[4096];
    Bytes bytes = {0};
    snprintf(command, sizeof command, "%s/%s", directory, file);
    if (access(command, R_OK) != 0) return bytes;
    bool packed = strlen(file) > 3 && !strcmp(file + strlen(file) - 3, ".xz");
    if (packed) snprintf(command, sizeof command, "xz -dc '%s/%s'", directory, file);
    FILE *stream = packed ? popen(command, "r") : fopen(command, "rb");
    char *data = NULL, block[65536];
    for (size_t n; (n = fread(block, 1, sizeof block, stream)) > 0; ) memcpy(arraddnptr(data, n), block, n);
    packed ? pclose(stream) : fclose(stream);
    bytes.length = arrlenu(data);
    bytes.data = calloc(bytes.length + 1, 1);
    if (data) memcpy(bytes.data, data, bytes.length);
    arrfree(data);
    return bytes;
}

/* The next line of a .jsonl file as JSON. cJSON cannot hold NUL in a string, so \u0000 travels as U+E000: see string_bytes(). */
static cJSON *next_row(char **cursor) {
    char *line = *cursor, *end = strchr(line, '\n');
    if (!end) return NULL;
    *cursor = end + 1;
    for (char *at = line; at + 6 <= end; at += at[0] == '\\' ? 2 : 1)         /* an escape is a whole: "\\\\u0000" is none */
        if (!strncmp(at, "\\u0000", 6)) memcpy(at, "\\ue000", 6);
    cJSON *row = cJSON_ParseWithLength(line, (size_t)(end - line));
    CHECK(row, "a fixture line is JSON: %.60s", line);
    return row;
}

static Bytes string_bytes(const cJSON *row, const char *name) {
    char *text = cJSON_GetObjectItem(row, name)->valuestring, *out = text;
    for (const char *in = text; *in; in++) {
        bool nul = !strncmp(in, "\xEE\x80\x80", 3);
        *out++ = nul ? 0 : *in;
        if (nul) in += 2;
    }
    return (Bytes){text, (size_t)(out - text)};
}

static Tokenizer *parse(Bytes json, Bytes config, const char *name) {
    Error error = {{0}};
    Tokenizer *tokenizer = tokenizer_parse(json.data, json.length, config.data, config.length, name, &error);
    CHECK(tokenizer, "%s loads: %s", name, error.text);
    return tokenizer;
}

/* The ids of a text, in one static array. */
static int *encode(const Tokenizer *tokenizer, const char *text, size_t length, bool match_added) {
    static int *ids;
    Error error = {{0}};
    arrsetlen(ids, 0);
    arrput(ids, 0);             /* so that no text gives NULL */
    arrsetlen(ids, 0);
    bool ok = tokenizer_encode(tokenizer, text, length, match_added, &ids, &error);
    CHECK(ok, "\"%.40s\" is encoded: %s", text, error.text);
    return ids;
}

static bool same_ids(const int *ids, size_t n_ids, const cJSON *wanted) {
    const cJSON *id = wanted->child;
    for (size_t i = 0; i < n_ids; i++, id = id->next)
        if (!id || id->valueint != ids[i]) return false;
    return !id;
}

static bool decodes_to(const Tokenizer *tokenizer, const int *ids, const char *text, size_t length) {
    size_t at = 0;
    for (size_t i = 0; i < arrlenu(ids); i++) {
        size_t n;
        const char *bytes = tokenizer_bytes(tokenizer, ids[i], &n);
        if (!bytes || n > length - at || memcmp(bytes, text + at, n)) return false;
        at += n;
    }
    return at == length;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Against the reference
 */

static void test_cases(const Tokenizer *tokenizer, const char *name, Bytes cases) {
    int n = 0;
    char *cursor = cases.data;
    for (cJSON *row; (row = next_row(&cursor)); cJSON_Delete(row), n++) {
        const cJSON *wanted = cJSON_GetObjectItem(row, "ids");
        Bytes text = string_bytes(row, "text"), decoded = string_bytes(row, "decoded");
        int *ids = encode(tokenizer, text.data, text.length, true);
        CHECK(same_ids(ids, arrlenu(ids), wanted), "%s: case %d, \"%.60s\": the reference's ids", name, n + 1, text.data);
        /* the reference prints U+FFFD for bytes that are no characters */
        if (!memmem(decoded.data, decoded.length, "\xEF\xBF\xBD", 3))
            CHECK(decodes_to(tokenizer, ids, decoded.data, decoded.length), "%s: case %d: \"%.60s\" decodes", name, n + 1, decoded.data);
    }
    CHECK(n >= 50, "%s: at least 50 cases, not %d", name, n);
}

/* cases that hold template: parsed anew with templates[template] as the chat_template. */
static void test_chat_cases(Bytes json, Bytes config, const char *name, Bytes cases, cJSON *templates) {
    int n = 0;
    char *cursor = cases.data;
    for (cJSON *row; (row = next_row(&cursor)); cJSON_Delete(row), n++) {
        const cJSON *template = cJSON_GetObjectItem(row, "template"), *think = cJSON_GetObjectItem(row, "enable_thinking");
        cJSON *own_config = cJSON_CreateObject();
        if (template) cJSON_AddItemToObject(own_config, "chat_template", cJSON_Duplicate(cJSON_GetArrayItem(templates, template->valueint), true));
        char *config_text = cJSON_PrintUnformatted(own_config);
        Tokenizer *tokenizer = parse(json, template ? (Bytes){config_text, strlen(config_text)} : config, name);

        Message messages[16];
        int n_messages = 0;
        const cJSON *message;
        cJSON_ArrayForEach(message, cJSON_GetObjectItem(row, "messages")) {
            const char *content = cJSON_GetObjectItem(message, "content")->valuestring;
            messages[n_messages++] = (Message){cJSON_GetObjectItem(message, "role")->valuestring, content, strlen(content)};
        }
        Prompt prompt = {0};
        Error error = {{0}};
        bool generate = cJSON_IsTrue(cJSON_GetObjectItem(row, "add_generation_prompt"));
        bool ok = chat_render(tokenizer, messages, n_messages, generate, !think || cJSON_IsTrue(think), &prompt, &error);
        CHECK(ok, "%s: chat case %d renders: %s", name, n + 1, error.text);
        Bytes wanted = string_bytes(row, "prompt");
        CHECK(arrlenu(prompt.text) == wanted.length && !memcmp(prompt.text, wanted.data, wanted.length), "%s: chat case %d:\n  wanted %s\n  found  %.*s",
              name, n + 1, wanted.data, (int)arrlen(prompt.text), prompt.text);
        const cJSON *ids = cJSON_GetObjectItem(row, "ids");
        /* content may spell a control token: then the ids are not those of the prompt's text */
        bool spelled = false;
        for (int i = 0; i < n_messages; i++) spelled = spelled || strstr(messages[i].content, "<think>") || strstr(messages[i].content, "</think>");
        if (ids && !spelled) CHECK(same_ids(prompt.ids, arrlenu(prompt.ids), ids), "%s: chat case %d: the reference's ids", name, n + 1);
        prompt_free(&prompt);
        tokenizer_close(tokenizer);
        cJSON_free(config_text);
        cJSON_Delete(own_config);
    }
    CHECK(n > 0, "%s has chat cases", name);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Promises
 */

/* Typed text never becomes an added token, whatever surrounds it. */
static void test_user_text(const Tokenizer *tokenizer, const char *name, const cJSON *json) {
    const cJSON *entry;
    cJSON_ArrayForEach(entry, cJSON_GetObjectItem(json, "added_tokens")) {
        const char *content = cJSON_GetObjectItem(entry, "content")->valuestring;
        int id = cJSON_GetObjectItem(entry, "id")->valueint;
        char text[1024];
        int length = snprintf(text, sizeof text, "%s a%s%s %s\n", content, content, content, content);
        int *ids = encode(tokenizer, text, (size_t)length, false);
        for (size_t i = 0; i < arrlenu(ids); i++) {
            /* an added token of one byte, as "<" may be, is the byte's own token */
            bool is_byte = strlen(content) == 1;
            CHECK(!tokenizer_is_control(tokenizer, ids[i]) && (ids[i] != id || is_byte), "%s: typed %s stays text", name, content);
        }
        CHECK(tokenizer_find(tokenizer, content) == id, "%s: %s is found", name, content);
        CHECK(tokenizer_is_control(tokenizer, id) == cJSON_IsTrue(cJSON_GetObjectItem(entry, "special")), "%s: %s is special or not", name, content);
        ids = encode(tokenizer, content, strlen(content), true);
        CHECK(arrlen(ids) >= 1 && ids[0] == id, "%s: a template's %s is one token", name, content);
    }
}

static void check_round_trip(const Tokenizer *tokenizer, const char *name, const char *bytes, size_t length) {
    for (int match_added = 0; match_added < 2; match_added++) {
        const int *ids = encode(tokenizer, bytes, length, match_added);
        CHECK(decodes_to(tokenizer, ids, bytes, length), "%s: %zu bytes from 0x%02X come back", name, length, (unsigned char)bytes[0]);
    }
}

/* Any bytes come back, for a tokenizer that changes no text. */
static void test_bytes(const Tokenizer *tokenizer, const char *name) {
    static const char *const emoji[] = {"\xF0\x9F\x98\x80", "\xF4\x8F\xBF\xBF", "\xF0\x90\x80\x80", "\xE6\xAD\xA3", "\xED\x9F\xBF"};
    char text[64];
    for (size_t e = 0; e < sizeof emoji / sizeof emoji[0]; e++)
        for (size_t prefix = 1; prefix <= strlen(emoji[e]); prefix++)
            for (int surrounding = 0; surrounding < 3; surrounding++) {
                const char *before = surrounding > 0 ? "ab " : "", *after = surrounding > 1 ? "c\xE2\x82\xAC" : "";
                int length = snprintf(text, sizeof text, "%s%.*s%s", before, (int)prefix, emoji[e], after);
                check_round_trip(tokenizer, name, text, (size_t)length);
            }
    for (int byte = 0; byte < 256; byte++) {
        char three[] = {(char)byte, 'x', (char)byte};
        check_round_trip(tokenizer, name, three, 1);
        check_round_trip(tokenizer, name, three, 3);
    }
    static const char bad[] = "\xC0\x80 \xED\xA0\x80 \xF4\x90\x80\x80 \xF8\x88\x80\x80\x80 \xE0\x9F\xBF a\0b\0\0";
    check_round_trip(tokenizer, name, bad, sizeof bad - 1);
    srand(1);
    for (int i = 0; i < 300; i++) {
        size_t length = (size_t)rand() % sizeof text;
        for (size_t b = 0; b < length; b++) text[b] = (char)(rand() % (i % 2 ? 256 : 4) + (i % 2 ? 0 : 0xE1));
        check_round_trip(tokenizer, name, text, length);
    }
}

/* Pushed a byte at a time, every release is whole characters, and all bytes come out. */
static void test_stream(void) {
    static const char *const texts[] = {"plain", "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x9A\x80 caf\xC3\xA9", "\xF0\x9F\x98", "a\xFFz\xC3(\xE2\x82",
                                        "\xED\xA0\x80\xF0\x9F\xF0\x9F\x98\x80", "\xE0\x80\xAF"};
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; t++) {
        Utf8Stream stream = {{0}, 0};
        char *text = NULL;
        size_t length = strlen(texts[t]), before = 0;
        for (size_t i = 0; i < length; i++) {
            utf8_push(&stream, texts[t] + i, 1, &text);
            bool released = arrlenu(text) > before;
            CHECK(!released || t > 1 || i + 1 == arrlenu(text), "nothing waits behind a complete character");
            CHECK(arrlenu(text) + (size_t)stream.n_pending == i + 1, "every byte is out or waits");
            before = arrlenu(text);
        }
        if (t == 1) CHECK(stream.n_pending == 0, "a complete text leaves nothing");
        if (t == 2) CHECK(arrlenu(text) == 0, "three bytes of four are no character");
        utf8_flush(&stream, &text);
        CHECK(arrlenu(text) == length && !memcmp(text, texts[t], length), "all bytes come out in order");
        arrfree(text);
    }
    Utf8Stream stream = {{0}, 0};
    char *text = NULL;
    utf8_push(&stream, "\xE2\x82\xAC\xF0\x9F", 5, &text);
    CHECK(arrlenu(text) == 3 && stream.n_pending == 2, "half a character waits behind a whole one");
    utf8_push(&stream, "\x98\x80", 2, &text);
    CHECK(arrlenu(text) == 7 && stream.n_pending == 0, "and goes when it is complete");
    arrfree(text);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double time_encoding(const Tokenizer *tokenizer, const char *unit, size_t length) {
    char *text = malloc(length);
    for (size_t i = 0; i < length; i++) text[i] = unit[i % strlen(unit)];
    double start = seconds();
    encode(tokenizer, text, length, true);
    double elapsed = seconds() - start;
    free(text);
    return elapsed;
}

/* Twice the text takes about twice the time, also for one piece of a megabyte; the bounds leave room for a busy machine. */
static void test_linear_time(const Tokenizer *tokenizer, const char *name) {
    static const char *const units[] = {"a", " ", "software", "e\xCC\x81\xCC\xA3\xCC\xA3", "\n ", "1", "<", "\xCC\x81\xCC\xA3"};
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        double one = time_encoding(tokenizer, units[i], 1000000 / 24 * 24), two = time_encoding(tokenizer, units[i], 2000000 / 24 * 24);
        CHECK(two < 4 * one + 0.5, "%s: 2 MB of \"%s\" in %.2f s, 1 MB in %.2f s", name, units[i], two, one);
        CHECK(one < 8, "%s: 1 MB of \"%s\" in %.2f s", name, units[i], one);
    }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Chat
 */

/* A conversation built turn by turn has the ids of the whole one. */
static void test_next_turn(const Tokenizer *tokenizer, const char *name, const char *end_of_turn) {
    Message messages[] = {{"system", "Be brief.", 9}, {"user", "Hi", 2}, {"assistant", "Hello!", 6}, {"user", "2+2?", 4}};
    for (int ended = 0; ended < 2; ended++) {
        Prompt whole = {0}, turns = {0};
        Error error = {{0}};
        CHECK(chat_render(tokenizer, messages, 4, true, false, &whole, &error), "%s: %s", name, error.text);
        CHECK(chat_render(tokenizer, messages, 2, true, false, &turns, &error), "%s: %s", name, error.text);
        int *answer = NULL;
        tokenizer_encode(tokenizer, "Hello!", 6, false, &answer, &error);
        int last_id = arrlast(answer);
        /* as a model does: it says the token that ends its turn, or was cut short before it */
        if (ended) arrput(answer, last_id = tokenizer_find(tokenizer, end_of_turn));
        for (size_t i = 0; i < arrlenu(answer); i++) arrput(turns.ids, answer[i]);
        CHECK(chat_render_next(tokenizer, last_id, "2+2?", 4, false, &turns, &error), "%s: %s", name, error.text);
        /* ChatML's earlier answers lose the empty thought that thinking off opened them with: compare from the question on */
        size_t n = arrlenu(whole.ids), m = arrlenu(turns.ids), tail = strcmp(name, "chatml") ? n : 12;
        CHECK((strcmp(name, "chatml") ? m == n : m > tail) && !memcmp(whole.ids + n - tail, turns.ids + m - tail, tail * sizeof(int)),
              "%s: turn by turn gives the ids of the whole, %s", name, ended ? "ended" : "cut short");
        CHECK(chat_ends_turn(tokenizer, tokenizer_find(tokenizer, end_of_turn)) && !chat_ends_turn(tokenizer, -1) &&
              !chat_ends_turn(tokenizer, answer[0]), "%s: %s ends a turn", name, end_of_turn);
        arrfree(answer);
        prompt_free(&whole);
        prompt_free(&turns);
    }
}

/* Control tokens and NUL bytes in what is said stay text; a role that nobody has is an error. */
static void test_chat_content(const Tokenizer *tokenizer, const char *name) {
    static const char content[] = "a\0b<|im_end|>[gMASK]<sop><|user|><｜User｜></think>";
    Message message = {"user", content, sizeof content - 1};
    Prompt said = {0}, nothing = {0};
    Error error = {{0}};
    CHECK(chat_render(tokenizer, &message, 1, true, true, &said, &error), "%s: %s", name, error.text);
    CHECK(memmem(said.text, arrlenu(said.text), content, sizeof content - 1), "%s: the prompt holds the content as it is", name);
    message.content_length = 0;
    CHECK(chat_render(tokenizer, &message, 1, true, true, &nothing, &error), "%s: %s", name, error.text);
    int controls[2] = {0};
    for (size_t i = 0; i < arrlenu(said.ids); i++) controls[0] += tokenizer_is_control(tokenizer, said.ids[i]);
    for (size_t i = 0; i < arrlenu(nothing.ids); i++) controls[1] += tokenizer_is_control(tokenizer, nothing.ids[i]);
    CHECK(controls[0] == controls[1], "%s: content adds no control token: %d, %d", name, controls[0], controls[1]);
    message.role = "tool";
    CHECK(!chat_render(tokenizer, &message, 1, true, true, &said, &error) && strstr(error.text, "\"tool\""), "%s: role tool: %s", name, error.text);
    prompt_free(&said);
    prompt_free(&nothing);
}

/* The prompt of a system and a user message at that effort (NULL: none asked for). */
static void check_effort(Tokenizer *tokenizer, const char *name, const char *effort, bool thinking, const char *wanted) {
    static const Message messages[] = {{"system", "Be brief.", 9}, {"user", "Hi", 2}};
    Prompt prompt = {0};
    Error error = {{0}};
    bool ok = chat_set_effort(tokenizer, effort, &error) && chat_render(tokenizer, messages, 2, true, thinking, &prompt, &error);
    CHECK(ok, "%s, effort %s: %s", name, effort ? effort : "unsaid", error.text);
    CHECK(arrlenu(prompt.text) == strlen(wanted) && !memcmp(prompt.text, wanted, strlen(wanted)), "%s, effort %s:\n  wanted %s\n  found  %.*s",
          name, effort ? effort : "unsaid", wanted, (int)arrlen(prompt.text), prompt.text);
    const char *now = chat_effort(tokenizer);
    CHECK(effort ? now && !strcmp(now, effort) : !now, "%s: the effort that was set can be read", name);
    prompt_free(&prompt);
}

static void check_no_effort(Tokenizer *tokenizer, const char *name, const char *effort, const char *why) {
    Error error = {{0}};
    CHECK(!chat_set_effort(tokenizer, effort, &error) && strstr(error.text, why) && !strchr(error.text, '\n'), "%s, effort %s: %s", name, effort,
          error.text);
    CHECK(!chat_effort(tokenizer), "%s: a refused effort changes nothing", name);
}

/* Each level in the words of the format; GLM's only where the checkpoint's template has the word; others are refused by name. */
static void test_effort(Bytes json, Bytes config, const char *name) {
    static const char *const levels[] = {NULL, "low", "high", "max"}, *const numbers[] = {"75", "50", "75", "100"},
                             *const words[] = {"Max", "Low", "High", "Max"};
    char wanted[400];
    Tokenizer *tokenizer = parse(json, config, name);
    check_no_effort(tokenizer, name, "medium", "\"medium\"");
    for (int i = 0; i < 4 && !strcmp(name, "deepseek-v41"); i++) {
        snprintf(wanted, sizeof wanted,
                 "<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: %s (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
                 "Be brief.<｜User｜>Hi<｜Assistant｜><think>", numbers[i]);
        check_effort(tokenizer, name, levels[i], true, wanted);
        check_effort(tokenizer, name, levels[i], false, "<｜begin▁of▁sentence｜><｜System｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>");
    }
    for (int i = 1; i < 4 && strcmp(name, "deepseek-v41"); i++)
        check_no_effort(tokenizer, name, levels[i], "has no efforts");
    tokenizer_close(tokenizer);
    if (strcmp(name, "glm")) return;
    static const char *const templates[] = {
        "{\"chat_template\": \"Reasoning Effort: High or Max, enable_thinking\"}", "{\"chat_template\": \"Reasoning Effort: Low, High, Max\"}"};
    for (int always = 0; always < 2; always++) {
        tokenizer = parse(json, (Bytes){(char *)templates[always], strlen(templates[always])}, name);
        if (!always) check_no_effort(tokenizer, name, "low", "no \"Low\"");
        for (int i = 0; i < 4; i += 1 + (!i && !always)) {
            snprintf(wanted, sizeof wanted, "[gMASK]<sop><|system|>Reasoning Effort: %s<|system|>Be brief.<|user|>Hi<|assistant|><think>", words[i]);
            check_effort(tokenizer, name, levels[i], true, wanted);
            check_effort(tokenizer, name, levels[i], false,
                         always ? wanted : "[gMASK]<sop><|system|>Be brief.<|user|>Hi<|assistant|><think></think>");
        }
        tokenizer_close(tokenizer);
    }
}

static void test_no_chat(const Tokenizer *tokenizer, const char *name) {
    Message message = {"user", "Hi", 2};
    Prompt prompt = {0};
    Error error = {{0}};
    CHECK(!chat_render(tokenizer, &message, 1, true, true, &prompt, &error) && strstr(error.text, "no chat format"), "%s: %s", name, error.text);
    CHECK(!chat_render_next(tokenizer, -1, "Hi", 2, true, &prompt, &error) && strstr(error.text, "no chat format"), "%s: %s", name, error.text);
    CHECK(!chat_ends_turn(tokenizer, 0) && chat_think_open(tokenizer) == -1 && chat_think_close(tokenizer) == -1, "%s: no turns, no thinking", name);
    prompt_free(&prompt);
}

static void test_prefix(const Tokenizer *tokenizer, const char *name, const char *first, const char *second) {
    int *ids = NULL;
    tokenizer_prefix(tokenizer, &ids);
    CHECK(arrlen(ids) == !!first + !!second, "%s: %td tokens in front", name, arrlen(ids));
    if (first) CHECK(arrlen(ids) > 0 && ids[0] == tokenizer_find(tokenizer, first), "%s: %s in front", name, first);
    if (second) CHECK(arrlen(ids) > 1 && ids[1] == tokenizer_find(tokenizer, second), "%s: then %s", name, second);
    arrfree(ids);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Refusals: the GPT-2 fixture with one place changed, and a word that the message must hold
 */

static const char *const refusals[][3] = {
    {"\"type\":\"BPE\"", "\"type\":\"Unigram\"", "Unigram"},
    {"\"model\":{", "\"model\":3,\"x\":{", "no model"},
    {"\"dropout\":null", "\"dropout\":0.1", "dropout"},
    {"\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"##\"", "continuing_subword_prefix"},
    {"\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"", "end_of_word_suffix"},
    {"\"vocab\":{", "\"vocab\":[],\"x\":{", "vocab"},
    {"\"merges\":[", "\"merges\":7,\"x\":[", "merges"},
    {"\"!\":0", "\"!\":-1", "\"!\""},
    {"\"!\":0", "\"!\":0.5", "\"!\""},
    {"\"!\":0", "\"!\":1e300", "\"!\""},
    {"\"!\":0", "\"!\":4194304", "\"!\""},
    {"\"!\":0", "\"!\":\"0\"", "\"!\""},
    {"\"!\":0", "\"!\":1", "id 1, which another"},
    {"\"!\":0", "\"!\":0,\"!\":400", "twice"},
    {"\"merges\":[", "\"merges\":[\"Q J\",", "\"QJ\""},
    {"\"merges\":[", "\"merges\":[\"\\u4e00 J\",", "\xE4\xB8\x80"},
    {"\"merges\":[", "\"merges\":[[\"J\",\"\\u4e00\"],", "\xE4\xB8\x80"},
    {"\"merges\":[", "\"merges\":[\"a b c\",", "entry 0"},
    {"\"merges\":[", "\"merges\":[\"ab\",", "entry 0"},
    {"\"merges\":[", "\"merges\":[[\"a\"],", "entry 0"},
    {"\"merges\":[", "\"merges\":[[\"a\",\"b\",\"c\"],", "entry 0"},
    {"\"merges\":[", "\"merges\":[[1,2],", "entry 0"},
    {"\"merges\":[", "\"merges\":[null,", "entry 0"},
    {"\"unk_token\":null,\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":false,\"vocab\":{\"!\":0,",
     "\"byte_fallback\":true,\"vocab\":{", "0x21"},
    {"\"normalizer\":null", "\"normalizer\":{\"type\":\"NFKC\"}", "NFKC"},
    {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"Lowercase\"}]}", "Lowercase"},
    {"\"normalizer\":null", "\"normalizer\":7", "normalizer"},
    {"\"pre_tokenizer\":{", "\"pre_tokenizer\":null,\"x\":{", "pre_tokenizer"},
    {"\"pre_tokenizer\":{", "\"pre_tokenizer\":{\"type\":\"Metaspace\"},\"x\":{", "Metaspace"},
    {"\"pre_tokenizer\":{", "\"pre_tokenizer\":{\"type\":\"Digits\"},\"x\":{", "no ByteLevel"},
    {"\"pre_tokenizer\":{", "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{\"type\":\"Digits\"}]},\"x\":{", "after ByteLevel"},
    {"\"pre_tokenizer\":{", "\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Odd\",\"pattern\":{\"String\":\"a\"}},\"x\":{", "Odd"},
    {"\"pre_tokenizer\":{", "\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\"},\"x\":{", "pattern"},
    {"\"pre_tokenizer\":{", "\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"a(b\"}},\"x\":{", "a(b"},
    {"\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"WordPiece\"", "WordPiece"},
    {"\"post_processor\":null", "\"post_processor\":{\"type\":\"BertProcessing\"}", "BertProcessing"},
    {"\"post_processor\":null", "\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":\"Odd\"}]}", "Odd"},
    {"\"post_processor\":null", "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<bos>\"}}]}", "<bos>"},
    {"\"post_processor\":null", "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<bos>\"}}],"
     "\"special_tokens\":{\"<bos>\":{\"ids\":[7000]}}}", "<bos>"},
    {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":9,\"content\":\"<new>\"},", "id 9, which another"},
    {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":9,\"content\":\"!\"},", "id 0 elsewhere"},
    {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":900,\"content\":\"\"},", "added_tokens"},
    {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":-900,\"content\":\"<new>\"},", "<new>"},
    {"\"added_tokens\":[", "\"added_tokens\":[{\"content\":\"<new>\"},", "<new>"},
    {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":900,\"content\":\"<n>\"},{\"id\":901,\"content\":\"<n>\"},", "<n>"},
    {"\"added_tokens\":[", "\"added_tokens\":[5,", "added_tokens"},
    {"{\"version\"", "[{\"version\"", "malformed JSON"},
    {"\"version\"", "\"ver\xFFsion\"", "not UTF-8"},
};

/* What Oniguruma and PCRE2 read differently is refused, not guessed. */
static const char *const refused_patterns[] = {"[a[b]]", "[a&&b]", "[\\\\Sa]", "\\\\w+", "\\\\bx", "\\\\p{Han}", "\\\\pL", "\\\\x41", "\\\\1", "a{1,2}+", "a{,3}",
                                               "(*UTF)a", "(?m:a)", "(?i)a", "\\\\", "\\\\u0041", "(?P<a>b)"};

static Bytes replace(Bytes text, const char *old, const char *new) {
    char *found = memmem(text.data, text.length, old, strlen(old));
    CHECK(found, "the fixture holds %s", old);
    if (!found) return (Bytes){calloc(1, 1), 0};
    size_t before = (size_t)(found - text.data), after = text.length - before - strlen(old);
    Bytes changed = {calloc(before + strlen(new) + after + 1, 1), before + strlen(new) + after};
    memcpy(changed.data, text.data, before);
    memcpy(changed.data + before, new, strlen(new));
    memcpy(changed.data + before + strlen(new), found + strlen(old), after);
    return changed;
}

static void check_refused(Bytes json, Bytes config, const char *what, const char *word) {
    Error error = {{0}};
    Tokenizer *tokenizer = tokenizer_parse(json.data, json.length, config.data, config.length, "DIR", &error);
    CHECK(!tokenizer && strstr(error.text, word), "%s is refused with a message about %s: \"%s\"", what, word, error.text);
    CHECK(!strncmp(error.text, "DIR/tokenizer", 13) && !strchr(error.text, '\n'), "one line that begins with the file: %s", error.text);
    tokenizer_close(tokenizer);
}

static void test_refusals(Bytes json) {
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        Bytes changed = replace(json, refusals[i][0], refusals[i][1]);
        check_refused(changed, (Bytes){0}, refusals[i][1], refusals[i][2]);
        free(changed.data);
    }
    for (size_t i = 0; i < sizeof refused_patterns / sizeof refused_patterns[0]; i++) {
        char step[512];
        snprintf(step, sizeof step, "\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"%s\"}},\"x\":{", refused_patterns[i]);
        Bytes changed = replace(json, "\"pre_tokenizer\":{", step);
        check_refused(changed, (Bytes){0}, refused_patterns[i], "pattern");
        free(changed.data);
    }
    for (size_t length = 0; length < json.length; length += 97) {
        Bytes cut = {malloc(length ? length : 1), length};       /* its own block, so that reading on is seen */
        memcpy(cut.data, json.data, length);
        check_refused(cut, (Bytes){0}, "a file cut short", "byte");
        free(cut.data);
    }
    static const char *const configs[][2] = {{"{", "malformed JSON"}, {"7", "not a JSON object"}, {"{\"add_bos_token\":true,\"bos_token\":\"<b>\"}", "<b>"}};
    for (size_t i = 0; i < 3; i++) check_refused(json, (Bytes){(char *)configs[i][0], strlen(configs[i][0])}, "a tokenizer_config.json", configs[i][1]);
    char deep[4096];
    memset(deep, '[', sizeof deep);
    check_refused((Bytes){deep, sizeof deep}, (Bytes){0}, "deep nesting", "JSON");
    Error error = {{0}};
    CHECK(!tokenizer_open("/nonexistent", &error) && strstr(error.text, "/nonexistent/tokenizer.json"), "a missing directory: %s", error.text);
}

/* What can only be seen when text comes: a missing byte, a pattern that never ends. */
static void test_late_errors(Bytes json) {
    Error error = {{0}};
    int *ids = NULL;
    Bytes changed = replace(json, "\"!\":0,", "");
    Tokenizer *tokenizer = parse(changed, (Bytes){0}, "no byte 0x21");
    CHECK(tokenizer_encode(tokenizer, "ab", 2, false, &ids, &error), "other bytes are fine: %s", error.text);
    CHECK(!tokenizer_encode(tokenizer, "a!b", 3, false, &ids, &error) && strstr(error.text, "0x21"), "the byte is named: %s", error.text);
    tokenizer_close(tokenizer);
    free(changed.data);

    changed = replace(json, "\"pre_tokenizer\":{", "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"behavior\":\"Isolated\","
                      "\"pattern\":{\"Regex\":\"((a+)+)+b\"}},{\"type\":\"ByteLevel\",\"add_prefix_space\":false}]},\"x\":{");
    tokenizer = parse(changed, (Bytes){0}, "a hostile pattern");
    static const char many[] = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!b";
    CHECK(!tokenizer_encode(tokenizer, many, sizeof many - 1, false, &ids, &error) && strstr(error.text, "limit"), "matching stops: %s", error.text);
    tokenizer_close(tokenizer);
    free(changed.data);
    arrfree(ids);
}

/* A vocabulary may have holes; a control token that merges could spell is still out of a user's reach. */
static void test_odd_vocabularies(Bytes json) {
    Bytes changed = replace(json, "\"!\":0,", "\"!\":5000,");
    Tokenizer *tokenizer = parse(changed, (Bytes){0}, "a hole at 0");
    size_t length;
    CHECK(tokenizer_size(tokenizer) == 5001 && !tokenizer_bytes(tokenizer, 0, &length) && !tokenizer_bytes(tokenizer, 4000, &length) &&
          !tokenizer_bytes(tokenizer, -1, &length) && !tokenizer_bytes(tokenizer, 5001, &length) && tokenizer_bytes(tokenizer, 5000, &length),
          "ids without a token have no bytes");
    tokenizer_close(tokenizer);
    free(changed.data);

    for (int whole = 0; whole < 2; whole++) {
        changed = replace(json, "\"!\":0,", "\"!\":0,\"<x\":600,\"<x>\":601,");
        Bytes merged = replace(changed, "\"merges\":[", "\"merges\":[[\"<\",\"x\"],[\"<x\",\">\"],");
        Bytes added = replace(merged, "\"added_tokens\":[", "\"added_tokens\":[{\"id\":601,\"content\":\"<x>\",\"special\":true},");
        Bytes final = whole ? replace(added, "\"ignore_merges\":false", "\"ignore_merges\":true") : replace(added, "\"x\"", "\"x\"");
        tokenizer = parse(final, (Bytes){0}, "a control token that merges spell");
        int *ids = encode(tokenizer, "<x>", 3, false);
        for (size_t i = 0; i < arrlenu(ids); i++) CHECK(ids[i] != 601, "typed <x> stays text, ignore_merges %d", whole);
        ids = encode(tokenizer, "<x>", 3, true);
        CHECK(arrlen(ids) == 1 && ids[0] == 601, "a template's <x> does not");
        tokenizer_close(tokenizer);
        free(changed.data);
        free(merged.data);
        free(added.data);
        free(final.data);
    }
}

/* The same vocabulary under other pre-tokenizers. */
static void test_variants(Bytes json, Bytes variants) {
    cJSON *whole = cJSON_ParseWithLength(json.data, json.length);
    char *cursor = variants.data;
    for (cJSON *row; (row = next_row(&cursor)); cJSON_Delete(row)) {
        cJSON_ReplaceItemInObject(whole, "pre_tokenizer", cJSON_Duplicate(cJSON_GetObjectItem(row, "pre_tokenizer"), true));
        char *text = cJSON_PrintUnformatted(whole), *step = cJSON_PrintUnformatted(cJSON_GetObjectItem(row, "pre_tokenizer"));
        Tokenizer *tokenizer = parse((Bytes){text, strlen(text)}, (Bytes){0}, step);
        const cJSON *test;
        cJSON_ArrayForEach(test, cJSON_GetObjectItem(row, "cases")) {
            Bytes input = string_bytes(test, "text");
            int *ids = encode(tokenizer, input.data, input.length, true);
            CHECK(same_ids(ids, arrlenu(ids), cJSON_GetObjectItem(test, "ids")), "%s on \"%s\": the reference's ids", step, input.data);
        }
        tokenizer_close(tokenizer);
        cJSON_free(text);
        cJSON_free(step);
    }
    cJSON_Delete(whole);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * One directory: everything that its files allow
 */

static void test_directory(const char *root, const char *prefix, const char *name) {
    char directory[4096];
    snprintf(directory, sizeof directory, "%s/%s%s", root, prefix, name);
    Bytes json = read_all(directory, "tokenizer.json");
    if (!json.data) json = read_all(directory, "tokenizer.json.xz");
    Bytes config = read_all(directory, "tokenizer_config.json"), cases = read_all(directory, "cases.jsonl");
    Bytes chat = read_all(directory, "chat_cases.jsonl"), templates = read_all(directory, "templates.json");
    CHECK(json.data && cases.data, "%s has tokenizer.json and cases.jsonl", directory);
    if (!json.data || !cases.data) return;

    double start = seconds();
    Tokenizer *tokenizer = parse(json, config, name);
    if (json.length > 1000000) fprintf(stderr, "%s: %.1f MB loaded in %.2f s\n", name, (double)json.length / 1e6, seconds() - start);
    if (!tokenizer) return;
    cJSON *parsed = cJSON_ParseWithLength(json.data, json.length), *template_list = templates.data ? cJSON_Parse(templates.data) : NULL;
    test_cases(tokenizer, name, cases);
    if (chat.data) test_chat_cases(json, config, name, chat, template_list);
    test_user_text(tokenizer, name, parsed);
    if (cJSON_IsNull(cJSON_GetObjectItem(parsed, "normalizer")) && strcmp(name, "gpt2")) test_bytes(tokenizer, name);
    if (!strcmp(name, "llama3")) test_prefix(tokenizer, name, "<|begin_of_text|>", NULL);
    if (!strcmp(name, "llama3") || !strcmp(name, "o200k") || !strcmp(name, "gpt2")) test_no_chat(tokenizer, name);
    if (!strcmp(name, "gpt2") || !strcmp(name, "qwen3")) test_prefix(tokenizer, name, NULL, NULL);
    if (!strcmp(name, "glm")) test_prefix(tokenizer, name, "[gMASK]", "<sop>");
    if (!strncmp(name, "deepseek", 8)) test_prefix(tokenizer, name, "<｜begin▁of▁sentence｜>", NULL);
    if (!strcmp(name, "chatml")) test_next_turn(tokenizer, name, "<|im_end|>");
    if (!strcmp(name, "glm")) test_next_turn(tokenizer, name, "<|user|>");
    if (!strncmp(name, "deepseek", 8)) test_next_turn(tokenizer, name, "<｜end▁of▁sentence｜>");
    if (chat.data) test_chat_content(tokenizer, name);
    if (json.length < 1000000) test_effort(json, config, name);
    if (!strcmp(name, "chatml") || !strcmp(name, "o200k") || json.length > 1000000) test_linear_time(tokenizer, name);
    if (!strcmp(name, "gpt2")) {
        Bytes variants = read_all(directory, "variants.jsonl");
        test_variants(json, variants);
        free(variants.data);
        test_refusals(json);
        test_late_errors(json);
        test_odd_vocabularies(json);
    }
    tokenizer_close(tokenizer);
    cJSON_Delete(parsed);
    cJSON_Delete(template_list);
    free(json.data);
    free(config.data);
    free(cases.data);
    free(chat.data);
    free(templates.data);
}

int main(int argc, char **argv) {
    const char *published = argc > 1 ? argv[1] : "../shared/fixtures/tokenizers";
    static const char *const small[] = {"llama3", "o200k", "added", "chatml", "glm", "deepseek-v3", "deepseek-v32", "deepseek-v41", "gpt2"};
    test_stream();
    for (size_t i = 0; i < sizeof small / sizeof small[0]; i++) test_directory("tests/fixtures", "tokenizer-", small[i]);
    if (access(published, R_OK) == 0) {
        test_directory(published, "", "qwen3");
        test_directory(published, "", "deepseek_v3");
    } else {
        fprintf(stderr, "note: %s is not there; the published vocabularies were not tested\n", published);
    }
    return check_report();
}
