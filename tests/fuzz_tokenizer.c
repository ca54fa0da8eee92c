/* fuzz_tokenizer.c: libFuzzer target for tokenizer.c.
 *
 *     make fuzz
 *
 * An input that begins with '{' is a tokenizer.json; where it loads, a text goes through it. Any other input is a text for a
 * fixed tokenizer with every flag an added token can have. Run from the repository's root.
 */
#include "../engine.c"
#include "../backend.c"

#include <stb/stb_ds.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The bytes that the ids stand for, in a static stb_ds array. */
static char *decode(const Tokenizer *tokenizer, const int *ids) {
    static char *text;
    arrsetlen(text, 0);
    for (size_t i = 0; i < arrlenu(ids); i++) {
        size_t length;
        const char *bytes = tokenizer_bytes(tokenizer, ids[i], &length);
        if (!bytes) abort();
        if (length) memcpy(arraddnptr(text, length), bytes, length);
    }
    return text;
}

static void try_text(const Tokenizer *tokenizer, const char *text, size_t length) {
    static int *ids;
    Error error;
    for (int match_added = 0; match_added < 2; match_added++) {
        arrsetlen(ids, 0);
        if (!tokenizer_encode(tokenizer, text, length, match_added, &ids, &error)) continue;
        decode(tokenizer, ids);
        for (size_t i = 0; i < arrlenu(ids); i++)
            if (!match_added && tokenizer_is_control(tokenizer, ids[i])) abort();
    }
    Message message = {"assistant", text, length};
    Prompt prompt = {0};
    if (chat_render(tokenizer, &message, 1, true, true, &prompt, &error)) chat_render_next(tokenizer, 1, text, length, false, &prompt, &error);
    prompt_free(&prompt);
}

static Tokenizer *open_or_die(const char *directory) {
    Error error;
    Tokenizer *tokenizer = tokenizer_open(directory, &error);
    if (!tokenizer) {
        fprintf(stderr, "%s\n", error.text);
        exit(2);
    }
    return tokenizer;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static Tokenizer *added, *exact;
    if (!added) {
        added = open_or_die("tests/fixtures/tokenizer-added");
        exact = open_or_die("tests/fixtures/tokenizer-llama3");
    }
    const char *text = (const char *)data;
    if (size > 0 && text[0] == '{') {
        Error error;
        Tokenizer *tokenizer = tokenizer_parse(text, size, text, size, "fuzz", &error);
        if (!tokenizer) return 0;
        try_text(tokenizer, "a b<|x|> \xC3\xA9\xCC\x81 12\xFF\n", 18);
        tokenizer_close(tokenizer);
        return 0;
    }
    try_text(added, text, size);
    static int *ids;
    Error error;
    arrsetlen(ids, 0);
    if (!tokenizer_encode(exact, text, size, false, &ids, &error)) abort();
    const char *back = decode(exact, ids);
    if (arrlenu(back) != size || (size && memcmp(back, text, size))) abort();

    Utf8Stream stream = {{0}, 0};
    char *streamed = NULL;
    utf8_push(&stream, text, size / 2, &streamed);
    utf8_push(&stream, text + size / 2, size - size / 2, &streamed);
    utf8_flush(&stream, &streamed);
    if (arrlenu(streamed) != size || (size && memcmp(streamed, text, size))) abort();
    arrfree(streamed);
    return 0;
}
