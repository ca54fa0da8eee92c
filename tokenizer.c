/* tokenizer.c: text to ids and back, and conversations to prompts.
 *
 * A published tokenizer.json describes a pipeline, and this file runs it in the same order:
 *
 *     text -> added tokens -> NFC -> added tokens -> pre-tokenizer: pieces -> bytes -> merges -> ids
 *
 * Only byte-level byte pair encoding is read: every byte has a token, so any text has ids and ids have exact bytes. The
 * reference is Hugging Face's `tokenizers`; where that library does something odd, so does this file, and a comment says so.
 * What the file asks for and tide does not do is refused by name when it is loaded, never approximated.
 *
 * Libraries: cJSON reads the file, PCRE2 runs the pre-tokenizer's regular expressions, utf8proc composes (NFC) and knows the
 * category of a character. The Unicode tables are therefore those of the installed libraries (PCRE2 10.42: Unicode 14); the
 * reference has others, and only text in characters younger than either can come out differently.
 *
 * A Tokenizer serves one thread at a time: look-ups in stb_ds maps write a hidden temporary, matching uses its one stack.
 */
#define _GNU_SOURCE             /* memmem */
#define PCRE2_CODE_UNIT_WIDTH 8

#include "engine.h"

#include <cjson/cJSON.h>
#include <limits.h>
#include <pcre2.h>
#include <stb/stb_ds.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <utf8proc.h>

enum {
    TOKEN_LIMIT = 1 << 22,          /* ids; the largest published vocabularies have 1 << 18 */
    PATTERN_LIMIT = 4096,           /* bytes of one regular expression */
    FILE_LIMIT = 128 << 20,         /* bytes of tokenizer.json; 33 MB is the largest seen */
    MATCH_LIMIT = 50000000,         /* PCRE2's count of backtracking steps in one match: about a second */
    JIT_STACK = 16 << 20,           /* bytes, for patterns that have to remember where they branched */
};

/* What a token is. MODEL: an entry of the vocabulary that merges may produce. ADDED: matched in the text before anything else
 * happens. CONTROL: added, and "special": part of the chat format, never of what anyone says. */
enum { TOKEN_MODEL = 1, TOKEN_ADDED = 2, TOKEN_CONTROL = 4 };

typedef struct Token {
    uint32_t offset, length;        /* of its bytes in Tokenizer.bytes */
    uint8_t flags;                  /* 0: no token has this id */
} Token;

typedef struct MergeRule {
    uint32_t rank;                  /* lower merges first */
    int result;                     /* id of the joined token */
} MergeRule;

typedef struct AddedToken {
    char *pattern;                  /* stb_ds: what to look for: the token's text, normalized where the token asks for that */
    size_t length;
    int id;
    bool single_word;               /* only where no word character touches it */
    bool lstrip, rstrip;            /* swallows the white space before, after it */
} AddedToken;

/* What becomes of a delimiter (a match of the pattern) and its neighbours. */
typedef enum Behavior { ISOLATED, REMOVED, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT, CONTIGUOUS } Behavior;

typedef struct SplitStep {
    pcre2_code *code;               /* NULL: splits nothing */
    Behavior behavior;
    bool invert;                    /* delimiters are what does not match */
    bool prefix_space;              /* first gives every piece a leading space, where it has none */
} SplitStep;

typedef enum ChatFormat { CHAT_NONE, CHAT_ML, CHAT_GLM, CHAT_DEEPSEEK_V3, CHAT_DEEPSEEK_V32, CHAT_DEEPSEEK_V41 } ChatFormat;

enum { EFFORT_LOW, EFFORT_HIGH, EFFORT_MAX, EFFORTS };

struct Tokenizer {
    char *name;                     /* the directory, for messages */
    char *bytes;                    /* stb_ds: the bytes of all tokens */
    Token *tokens;                  /* stb_ds [one past the largest id] */
    struct { char *key; int value; } *ids;                  /* stb_ds string map: text as in the file -> id */
    struct { uint64_t key; MergeRule value; } *merges;      /* stb_ds map: left id << 32 | right id -> rule */
    int byte_token[256];            /* -1: the vocabulary lacks this byte */
    bool ignore_merges;             /* a piece that is a token needs no merging */
    bool nfc;
    bool byte_level;                /* the pre-tokenizer has a ByteLevel step, as it must */
    SplitStep *steps;               /* stb_ds, in order */
    AddedToken *added[2];           /* stb_ds, sorted: those looked for before, after normalizing */
    int *prefix;                    /* stb_ds: ids in front of plain text */
    pcre2_match_context *match_context;
    pcre2_jit_stack *jit_stack;
    ChatFormat chat;
    bool effort_line;               /* GLM from 5.2 on: "Reasoning Effort" in front, no thought is "<think></think>" */
    bool always_thinks;             /* GLM from 5.3 on: thinking cannot be turned off, earlier reasoning is kept */
    bool spells[EFFORTS];           /* GLM from 5.2 on: the template has this level's word */
    const char *const *paragraphs;  /* [EFFORTS] DeepSeek-V4: in front of what is to think, NULL: no such level; or NULL */
    int effort;                     /* EFFORTS: nothing was asked for */
};

typedef struct Effort {
    const char *name, *glm, *v41;   /* as asked for; as the formats say it */
} Effort;

static const Effort efforts[EFFORTS] = {{"low", "Low", "50"}, {"high", "High", "75"}, {"max", "Max", "100"}};

/* What DeepSeek-V4's encoder has in front of a conversation that is to think: the model was trained on these very bytes. */
#define ABSOLUTE_MAXIMUM                                                                                                        \
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"                                                         \
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "          \
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"                \
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, "      \
    "and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
#define BEYOND_MAXIMUM                                                                                                          \
    "Reasoning Effort: Beyond maximum \u2014 exhaustive, relentless, and uncompromising.\n"                                      \
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "        \
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause "     \
    "rather than any surface symptom.\n"                                                                                        \
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no "    \
    "assumption remains unchecked and no error remains undiscovered.\n\n"

static const char *const v4_preview_paragraphs[EFFORTS] = {NULL, "", ABSOLUTE_MAXIMUM},
                  *const v4_paragraphs[EFFORTS] = {"", ABSOLUTE_MAXIMUM, BEYOND_MAXIMUM};

/* ---------------------------------------------------------------------------------------------------------------------
 * Characters: UTF-8 as the standard has it, and the few classes of characters that the reference looks at.
 */

/* Length of the character at the start of text[0..length), length > 0; 0 where there is none and no further byte can make it
 * one; -1 where the text ends inside what may be a character. Overlong forms, surrogates and values past 10FFFF are none. */
static int utf8_scan(const char *text, size_t length) {
    const uint8_t *byte = (const uint8_t *)text;
    int size = byte[0] < 0x80 ? 1 : byte[0] < 0xC2 ? 0 : byte[0] < 0xE0 ? 2 : byte[0] < 0xF0 ? 3 : byte[0] < 0xF5 ? 4 : 0;
    for (int i = 1; i < size; i++) {
        if ((size_t)i == length) return -1;
        uint8_t low = 0x80, high = 0xBF;
        if (i == 1 && byte[0] == 0xE0) low = 0xA0;
        if (i == 1 && byte[0] == 0xED) high = 0x9F;
        if (i == 1 && byte[0] == 0xF0) low = 0x90;
        if (i == 1 && byte[0] == 0xF4) high = 0x8F;
        if (byte[i] < low || byte[i] > high) return 0;
    }
    return size;
}

size_t utf8_valid(const char *text, size_t length) {
    size_t at = 0;
    while (at < length) {
        int size = utf8_scan(text + at, length - at);
        if (size <= 0) break;
        at += (size_t)size;
    }
    return at;
}

/* Puts `pending` and the new bytes together one byte at a time: at most three bytes ever wait. */
void utf8_push(Utf8Stream *stream, const char *bytes, size_t length, char **text) {
    for (size_t i = 0; i < length; i++) {
        stream->pending[stream->n_pending++] = bytes[i];
        while (stream->n_pending > 0) {
            int size = utf8_scan(stream->pending, (size_t)stream->n_pending);
            if (size < 0) break;
            if (size == 0) size = 1;            /* never a character: the byte passes as it is */
            memcpy(arraddnptr(*text, size), stream->pending, (size_t)size);
            stream->n_pending -= size;
            memmove(stream->pending, stream->pending + size, (size_t)stream->n_pending);
        }
    }
}

void utf8_flush(Utf8Stream *stream, char **text) {
    if (stream->n_pending) memcpy(arraddnptr(*text, stream->n_pending), stream->pending, (size_t)stream->n_pending);
    stream->n_pending = 0;
}

/* The first or last character of valid UTF-8; -1 where the text is empty. */
static int first_character(const char *text, size_t length) {
    utf8proc_int32_t character = -1;
    if (length > 0) utf8proc_iterate((const uint8_t *)text, (utf8proc_ssize_t)length, &character);
    return character;
}

static int last_character(const char *text, size_t length) {
    size_t start = length;
    while (start > 0 && ((uint8_t)text[--start] & 0xC0) == 0x80) continue;
    return first_character(text + start, length - start);
}

static size_t character_size(int character) {
    return character < 0x80 ? 1 : character < 0x800 ? 2 : character < 0x10000 ? 3 : 4;
}

/* Unicode's White_Space. */
static bool is_space(int character) {
    if (character < 0x80) return character == ' ' || (character >= '\t' && character <= '\r');
    utf8proc_category_t category = utf8proc_category(character);
    return character == 0x85 || category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
           category == UTF8PROC_CATEGORY_ZP;
}

/* \w of Rust's regex crate, which decides what a single_word token may touch: letters, marks, digits, connectors, joiners and
 * the circled letters. */
static bool is_word(int character) {
    if (character < 0) return false;
    switch (utf8proc_category(character)) {
    case UTF8PROC_CATEGORY_LU: case UTF8PROC_CATEGORY_LL: case UTF8PROC_CATEGORY_LT: case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO: case UTF8PROC_CATEGORY_MN: case UTF8PROC_CATEGORY_MC: case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND: case UTF8PROC_CATEGORY_NL: case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return character == 0x200C || character == 0x200D || (character >= 0x24B6 && character <= 0x24E9) ||
               (character >= 0x1F130 && character <= 0x1F149) || (character >= 0x1F150 && character <= 0x1F169) ||
               (character >= 0x1F170 && character <= 0x1F189);
    }
}

/* Byte-level vocabularies spell every byte as one printable character: printable Latin-1 as itself, the 68 other bytes as
 * U+0100, U+0101, ... in order. (The table is from GPT-2.) */
static int byte_character(int byte) {
    static const struct { int first, last; } hidden[] = {{0, 32}, {127, 160}, {173, 173}};
    int character = 256;
    for (int i = 0; i < 3; i++) {
        if (byte >= hidden[i].first && byte <= hidden[i].last) return character + byte - hidden[i].first;
        character += hidden[i].last - hidden[i].first + 1;
    }
    return byte;
}

/* The byte that such a character spells, or -1. */
static int character_byte(int character) {
    if (character < 256) return byte_character(character) == character ? character : -1;
    int byte = character - 256;
    if (byte > 32) byte += 127 - 33;
    if (byte > 160) byte = 173;
    return byte < 256 && byte_character(byte) == character ? byte : -1;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Loading: the model. JSON is untrusted: every field's type, every id and every name that one part of the file uses for
 * another is checked. Errors begin with the file's name.
 */

#define REFUSE(...) fail(error, "%s/tokenizer.json: " __VA_ARGS__)

/* The value of that name; NULL where there is none or it is null, which tokenizer.json uses alike. */
static const cJSON *member(const cJSON *object, const char *name) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNull(value) ? NULL : value;
}

static bool is_true(const cJSON *object, const char *name) {
    return cJSON_IsTrue(member(object, name));
}

/* The string in that field, or "" where there is none. */
static const char *string_field(const cJSON *object, const char *name) {
    const cJSON *value = member(object, name);
    return cJSON_IsString(value) ? value->valuestring : "";
}

/* A whole file that has to be a JSON object. */
static cJSON *parse_json(const char *text, size_t length, const char *name, const char *file, Error *error) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", name, file);
    cJSON *json = json_parse(text, length, path, error);
    if (!json || cJSON_IsObject(json)) return json;
    fail(error, "%s: not a JSON object", path);
    cJSON_Delete(json);
    return NULL;
}

static bool read_id(const cJSON *value, int *id) {
    if (!cJSON_IsNumber(value) || !(value->valuedouble >= 0 && value->valuedouble < TOKEN_LIMIT)) return false;
    *id = (int)value->valuedouble;
    return *id == value->valuedouble;
}

/* Makes room for the id; its bytes start at the end of the pool and are appended there by the caller. */
static Token *new_token(Tokenizer *tokenizer, int id) {
    size_t size = arrlenu(tokenizer->tokens);
    if ((size_t)id >= size) {
        arrsetlen(tokenizer->tokens, (size_t)id + 1);
        memset(tokenizer->tokens + size, 0, ((size_t)id + 1 - size) * sizeof(Token));
    }
    tokenizer->tokens[id].offset = (uint32_t)arrlenu(tokenizer->bytes);
    return &tokenizer->tokens[id];
}

/* The bytes that a vocabulary entry spells; like the reference's decoder, an entry with any other character is itself. */
static void append_spelled_bytes(char **bytes, const char *text) {
    size_t length = strlen(text), start = arrlenu(*bytes);
    for (size_t at = 0; at < length; ) {
        int character = first_character(text + at, length - at);
        int byte = character_byte(character);
        if (byte < 0) {
            arrsetlen(*bytes, start);
            memcpy(arraddnptr(*bytes, length), text, length);
            return;
        }
        arrput(*bytes, (char)byte);
        at += character_size(character);
    }
}

/* Every entry's id and bytes, and which token each of the 256 bytes has. Ids may leave holes. */
static bool load_vocabulary(Tokenizer *tokenizer, const cJSON *vocabulary, Error *error) {
    if (!cJSON_IsObject(vocabulary) || !vocabulary->child) return REFUSE("model.vocab is no object with entries", tokenizer->name);
    for (const cJSON *entry = vocabulary->child; entry; entry = entry->next) {
        int id;
        if (!read_id(entry, &id))
            return REFUSE("model.vocab: the id of \"%s\" is no integer from 0 to %d", tokenizer->name, entry->string,
                          TOKEN_LIMIT - 1);
        if (shgeti(tokenizer->ids, entry->string) >= 0)
            return REFUSE("model.vocab: \"%s\" occurs twice", tokenizer->name, entry->string);
        if (id < tokenizer_size(tokenizer) && tokenizer->tokens[id].flags)
            return REFUSE("model.vocab: \"%s\" has id %d, which another token has", tokenizer->name, entry->string, id);
        shput(tokenizer->ids, entry->string, id);
        Token *token = new_token(tokenizer, id);
        append_spelled_bytes(&tokenizer->bytes, entry->string);
        token->length = (uint32_t)arrlenu(tokenizer->bytes) - token->offset;
        token->flags = TOKEN_MODEL;
    }
    for (int byte = 0; byte < 256; byte++) {
        char text[5] = {0};
        utf8proc_encode_char(byte_character(byte), (uint8_t *)text);
        tokenizer->byte_token[byte] = tokenizer_find(tokenizer, text);
    }
    return true;
}

/* The two halves of a merge, written "a b" or ["a", "b"]. The first form is cut in two where it lies. */
static bool read_merge(const cJSON *merge, const char **left, const char **right) {
    if (cJSON_IsString(merge)) {
        char *space = strchr(merge->valuestring, ' ');
        if (!space || strchr(space + 1, ' ')) return false;
        *space = 0;
        *left = merge->valuestring;
        *right = space + 1;
        return true;
    }
    if (!cJSON_IsArray(merge) || cJSON_GetArraySize(merge) != 2) return false;
    if (!cJSON_IsString(merge->child) || !cJSON_IsString(merge->child->next)) return false;
    *left = merge->child->valuestring;
    *right = merge->child->next->valuestring;
    return true;
}

static bool load_merges(Tokenizer *tokenizer, const cJSON *merges, Error *error) {
    if (!cJSON_IsArray(merges)) return REFUSE("model.merges is no array", tokenizer->name);
    char *joined = NULL;
    bool ok = true;
    uint32_t rank = 0;
    for (const cJSON *merge = merges->child; ok && merge; merge = merge->next, rank++) {
        const char *left, *right;
        if (!read_merge(merge, &left, &right)) {
            ok = REFUSE("model.merges: entry %u is neither \"a b\" nor [\"a\", \"b\"]", tokenizer->name, rank);
            break;
        }
        arrsetlen(joined, strlen(left) + strlen(right) + 1);
        strcpy(stpcpy(joined, left), right);
        const char *parts[] = {left, right, joined};
        int ids[3];
        for (int i = 0; ok && i < 3; i++) {
            ids[i] = tokenizer_find(tokenizer, parts[i]);
            if (ids[i] < 0)
                ok = REFUSE("model.merges: entry %u needs the token \"%s\", which the vocabulary lacks", tokenizer->name, rank,
                            parts[i]);
        }
        /* A pair that is listed twice has its last rank, as in the reference. */
        if (ok) hmput(tokenizer->merges, (uint64_t)ids[0] << 32 | (uint32_t)ids[1], ((MergeRule){rank, ids[2]}));
    }
    arrfree(joined);
    return ok;
}

static bool load_model(Tokenizer *tokenizer, const cJSON *model, Error *error) {
    if (!cJSON_IsObject(model)) return REFUSE("there is no model", tokenizer->name);
    const char *type = string_field(model, "type");     /* files of GPT-2's time do not say */
    if (*type && strcmp(type, "BPE")) return REFUSE("model.type is \"%s\", only BPE is supported", tokenizer->name, type);
    const cJSON *dropout = member(model, "dropout");
    if (dropout && !(cJSON_IsNumber(dropout) && dropout->valuedouble == 0))
        return REFUSE("model.dropout is set, which makes ids random", tokenizer->name);
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++)
        if (*string_field(model, affixes[i])) return REFUSE("model.%s is not supported", tokenizer->name, affixes[i]);
    tokenizer->ignore_merges = is_true(model, "ignore_merges");
    if (!load_vocabulary(tokenizer, member(model, "vocab"), error) || !load_merges(tokenizer, member(model, "merges"), error))
        return false;
    /* Both say what becomes of unknown characters; with a token for every byte there are none. */
    bool has_fallback = is_true(model, "byte_fallback") || member(model, "unk_token");
    for (int byte = 0; has_fallback && byte < 256; byte++)
        if (tokenizer->byte_token[byte] < 0)
            return REFUSE("model.unk_token or byte_fallback is set and byte 0x%02X has no token: not byte-level", tokenizer->name,
                          byte);
    return true;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Loading: the steps before the model
 */

/* A normalizer rewrites text; one that is ignored would give other ids without a word, so all but NFC are refused. */
static bool load_normalizer(Tokenizer *tokenizer, const cJSON *normalizer, Error *error) {
    if (!normalizer) return true;
    const char *type = string_field(normalizer, "type");
    if (!strcmp(type, "NFC")) return tokenizer->nfc = true;
    if (strcmp(type, "Sequence")) return REFUSE("normalizer \"%s\" is not supported, only NFC", tokenizer->name, type);
    const cJSON *part;
    cJSON_ArrayForEach(part, member(normalizer, "normalizers"))
        if (!load_normalizer(tokenizer, part, error)) return false;
    return true;
}

/* Copies the escape at pattern[0] == '\\' and returns its length; 0 where its meaning differs between the two libraries. */
static size_t translate_escape(const char *pattern, bool in_class, char **out) {
    /* PCRE2 takes U+180E for white space, Oniguruma does not: spell the class out. */
    static const char space[] = "\\t-\\r\\x{85}\\p{Z}";
    char letter = pattern[1];
    if (letter == 's' || (letter == 'S' && !in_class)) {
        if (!in_class) arrput(*out, '[');
        if (letter == 'S') arrput(*out, '^');
        memcpy(arraddnptr(*out, sizeof space - 1), space, sizeof space - 1);
        if (!in_class) arrput(*out, ']');
        return 2;
    }
    size_t length = 2;
    if (letter == 'p' || letter == 'P' || letter == 'x') {
        /* \p{L}, \p{Lu}, \p{^L}: a script means script extensions in PCRE2 */
        const char *close = pattern[2] == '{' ? strchr(pattern, '}') : NULL;
        if (!close || (letter != 'x' && close - pattern > 5 + (pattern[3] == '^'))) return 0;
        length = (size_t)(close - pattern) + 1;
    } else if ((letter >= '0' && letter <= '9') || ((letter | 32) >= 'a' && (letter | 32) <= 'z' && !strchr("dDrntf", letter))) {
        return 0;
    }
    if (!letter) return 0;
    memcpy(arraddnptr(*out, length), pattern, length);
    return length;
}

/* Rewrites an Oniguruma pattern for PCRE2. The two agree on all that published pre-tokenizers use except \s; constructs that
 * both accept with different meanings are refused: the offending place is returned, NULL when there is none. */
static const char *translate_pattern(const char *pattern, char **out) {
    bool in_class = false;
    while (*pattern) {
        if (*pattern == '\\') {
            size_t length = translate_escape(pattern, in_class, out);
            if (length == 0) return pattern;
            pattern += length;
            continue;
        }
        if (in_class) {
            /* Oniguruma nests classes and intersects them with && */
            if (*pattern == '[' || (pattern[0] == '&' && pattern[1] == '&')) return pattern;
            in_class = *pattern != ']';
        } else {
            /* {1,3}+ repeats there and is possessive here; {,3} is a quantifier there only; (*VERB) is PCRE2's; (?i) differs */
            if (!strncmp(pattern, "}+", 2) || !strncmp(pattern, "{,", 2) || !strncmp(pattern, "(*", 2)) return pattern;
            if (!strncmp(pattern, "(?", 2) && !strchr(":=!<>", pattern[2]) && strncmp(pattern, "(?i:", 4)) return pattern;
            in_class = *pattern == '[';
        }
        arrput(*out, *pattern++);
    }
    arrput(*out, 0);
    return NULL;
}

/* A pattern of the file, compiled with limits on its size; split_piece() runs it with limits on time and memory. */
static pcre2_code *compile_pattern(const char *pattern, uint32_t options, const char *name, Error *error) {
    int code_error;
    PCRE2_SIZE offset;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    pcre2_set_max_pattern_length(context, PATTERN_LIMIT);
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | options, &code_error, &offset,
                                     context);
    pcre2_compile_context_free(context);
    if (!code) {
        char reason[128];
        pcre2_get_error_message(code_error, (PCRE2_UCHAR *)reason, sizeof reason);
        REFUSE("pre_tokenizer pattern \"%.200s\": %s", name, pattern, reason);
        return NULL;
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);        /* where there is no JIT, the interpreter runs the pattern */
    return code;
}

static bool add_regex_step(Tokenizer *tokenizer, const char *regex, SplitStep step, Error *error) {
    char *pattern = NULL;
    const char *offending = translate_pattern(regex, &pattern);
    if (offending) {
        REFUSE("pre_tokenizer pattern: \"%.20s\" is not supported in a regular expression", tokenizer->name, offending);
    } else {
        /* in Oniguruma's Ruby syntax ^ and $ match at every line */
        step.code = compile_pattern(pattern, PCRE2_UCP | PCRE2_MULTILINE, tokenizer->name, error);
        if (step.code) arrput(tokenizer->steps, step);
    }
    arrfree(pattern);
    return step.code;
}

static bool load_split(Tokenizer *tokenizer, const cJSON *split, Error *error) {
    static const char *const names[] = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
    SplitStep step = {.invert = is_true(split, "invert")};
    const char *behavior = string_field(split, "behavior");
    while (step.behavior <= CONTIGUOUS && strcmp(names[step.behavior], behavior)) step.behavior++;
    if (step.behavior > CONTIGUOUS) return REFUSE("pre_tokenizer Split has behavior \"%s\"", tokenizer->name, behavior);
    const cJSON *pattern = member(split, "pattern");
    const cJSON *regex = member(pattern, "Regex"), *literal = member(pattern, "String");
    if (cJSON_IsString(regex)) return add_regex_step(tokenizer, regex->valuestring, step, error);
    if (!cJSON_IsString(literal)) return REFUSE("pre_tokenizer Split has neither a Regex nor a String pattern", tokenizer->name);
    step.code = compile_pattern(literal->valuestring, PCRE2_LITERAL, tokenizer->name, error);
    if (step.code) arrput(tokenizer->steps, step);
    return step.code;
}

static bool load_pre_tokenizer(Tokenizer *tokenizer, const cJSON *pre_tokenizer, Error *error) {
    static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    const char *type = string_field(pre_tokenizer, "type");
    if (!strcmp(type, "Sequence")) {
        const cJSON *part;
        cJSON_ArrayForEach(part, member(pre_tokenizer, "pretokenizers"))
            if (!load_pre_tokenizer(tokenizer, part, error)) return false;
        return true;
    }
    /* From ByteLevel on the reference works on the characters that spell the bytes. */
    if (tokenizer->byte_level) return REFUSE("pre_tokenizer \"%s\" comes after ByteLevel", tokenizer->name, type);
    if (!strcmp(type, "Split")) return load_split(tokenizer, pre_tokenizer, error);
    if (!strcmp(type, "Digits")) {
        SplitStep step = {.behavior = is_true(pre_tokenizer, "individual_digits") ? ISOLATED : CONTIGUOUS};
        return add_regex_step(tokenizer, "\\p{N}", step, error);
    }
    if (strcmp(type, "ByteLevel"))
        return REFUSE("pre_tokenizer \"%s\" is not supported, only Split, Digits, ByteLevel and Sequence", tokenizer->name, type);
    tokenizer->byte_level = true;
    SplitStep step = {.prefix_space = is_true(pre_tokenizer, "add_prefix_space")};
    const cJSON *use_regex = member(pre_tokenizer, "use_regex");     /* files from before the field exists mean true */
    if (!use_regex || cJSON_IsTrue(use_regex)) return add_regex_step(tokenizer, gpt2, step, error);
    if (step.prefix_space) arrput(tokenizer->steps, step);
    return true;
}

static int compare_keys(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

/* Sorts the marks of one character by combining class, equal classes as they stand, and moves them behind it. */
static void order_marks(uint64_t **marks, utf8proc_int32_t **characters) {
    if (arrlenu(*marks) > 1) qsort(*marks, arrlenu(*marks), sizeof(uint64_t), compare_keys);
    for (size_t i = 0; i < arrlenu(*marks); i++) arrput(*characters, (utf8proc_int32_t)((*marks)[i] & 0x1FFFFF));
    arrsetlen(*marks, 0);
}

/* Appends the text's NFC form: canonical decomposition, canonical order, composition. (utf8proc's one-call form orders by
 * exchanging neighbours, and a long run of marks makes that quadratic.) */
static void compose(const char *text, size_t length, char **composed) {
    const utf8proc_option_t options = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
    utf8proc_int32_t *characters = NULL;
    uint64_t *marks = NULL;             /* combining class << 53 | place << 21 | character */
    for (size_t at = 0; at < length; ) {
        utf8proc_int32_t parts[8];
        int character = first_character(text + at, length - at), boundary_class = 0;
        utf8proc_ssize_t n = utf8proc_decompose_char(character, parts, 8, options, &boundary_class);
        for (int i = 0; i < n; i++) {
            uint64_t class = (uint64_t)utf8proc_get_property(parts[i])->combining_class;
            if (class) {
                arrput(marks, class << 53 | (uint64_t)arrlenu(marks) << 21 | (uint64_t)parts[i]);
            } else {
                order_marks(&marks, &characters);
                arrput(characters, parts[i]);
            }
        }
        at += character_size(character);
    }
    order_marks(&marks, &characters);
    utf8proc_ssize_t n_characters = (utf8proc_ssize_t)arrlen(characters);
    arrput(characters, 0);              /* room for the NUL that utf8proc writes behind its UTF-8 */
    size_t size = (size_t)utf8proc_reencode(characters, n_characters, options);
    memcpy(arraddnptr(*composed, size), characters, size);
    arrfree(characters);
    arrfree(marks);
}

static int compare_added(const void *left, const void *right) {
    const AddedToken *a = left, *b = right;
    int order = memcmp(a->pattern, b->pattern, a->length < b->length ? a->length : b->length);
    if (order) return order;
    return a->length != b->length ? (a->length < b->length ? -1 : 1) : a->id - b->id;
}

static bool load_added_token(Tokenizer *tokenizer, const cJSON *entry, Error *error) {
    int id;
    const char *content = string_field(entry, "content");
    if (!read_id(member(entry, "id"), &id) || !*content)
        return REFUSE("added_tokens: \"%s\" needs some content and an id from 0 to %d", tokenizer->name, content, TOKEN_LIMIT - 1);
    int known = tokenizer_find(tokenizer, content);
    uint8_t flags = id < tokenizer_size(tokenizer) ? tokenizer->tokens[id].flags : 0;
    if (known >= 0 && known != id)
        return REFUSE("added_tokens: \"%s\" has id %d, but id %d elsewhere", tokenizer->name, content, id, known);
    if ((known < 0 && flags) || flags & TOKEN_ADDED)
        return REFUSE("added_tokens: \"%s\" has id %d, which another token has", tokenizer->name, content, id);
    size_t length = strlen(content);
    Token *token = new_token(tokenizer, id);
    memcpy(arraddnptr(tokenizer->bytes, length), content, length);
    token->length = (uint32_t)length;
    token->flags |= TOKEN_ADDED | (is_true(entry, "special") ? TOKEN_CONTROL : 0);
    if (known < 0) shput(tokenizer->ids, content, id);

    bool normalized = is_true(entry, "normalized");
    AddedToken added = {.id = id, .single_word = is_true(entry, "single_word"),
                        .lstrip = is_true(entry, "lstrip"), .rstrip = is_true(entry, "rstrip")};
    if (normalized && tokenizer->nfc) compose(content, length, &added.pattern);
    else memcpy(arraddnptr(added.pattern, length), content, length);
    added.length = arrlenu(added.pattern);
    arrput(tokenizer->added[normalized], added);
    return true;
}

static bool load_added_tokens(Tokenizer *tokenizer, const cJSON *entries, Error *error) {
    const cJSON *entry;
    cJSON_ArrayForEach(entry, entries)
        if (!load_added_token(tokenizer, entry, error)) return false;
    for (int i = 0; i < 2; i++)
        if (tokenizer->added[i]) qsort(tokenizer->added[i], arrlenu(tokenizer->added[i]), sizeof(AddedToken), compare_added);
    return true;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Loading: what surrounds the text, and the whole file
 */

/* TemplateProcessing's "single" template is a list of {"SpecialToken": {"id": name}} around one {"Sequence": ...}; the ids of
 * those in front of it, listed by name under special_tokens, are the prefix. */
static bool load_template(Tokenizer *tokenizer, const cJSON *processor, Error *error) {
    const cJSON *part, *value;
    cJSON_ArrayForEach(part, member(processor, "single")) {
        const cJSON *special = member(part, "SpecialToken");
        if (!special) return true;
        const char *name = string_field(special, "id");
        const cJSON *ids = member(member(member(processor, "special_tokens"), name), "ids");
        if (!ids) return REFUSE("post_processor names \"%s\", which special_tokens lacks", tokenizer->name, name);
        cJSON_ArrayForEach(value, ids) {
            int id;
            size_t length;
            if (!read_id(value, &id) || !tokenizer_bytes(tokenizer, id, &length))
                return REFUSE("post_processor's \"%s\" has an id that no token has", tokenizer->name, name);
            arrput(tokenizer->prefix, id);
        }
    }
    return true;
}

static bool load_post_processor(Tokenizer *tokenizer, const cJSON *processor, Error *error) {
    if (!processor) return true;
    const char *type = string_field(processor, "type");
    if (!strcmp(type, "ByteLevel")) return true;        /* changes offsets only */
    if (!strcmp(type, "TemplateProcessing")) return load_template(tokenizer, processor, error);
    if (strcmp(type, "Sequence")) return REFUSE("post_processor \"%s\" is not supported", tokenizer->name, type);
    const cJSON *part;
    cJSON_ArrayForEach(part, member(processor, "processors"))
        if (!load_post_processor(tokenizer, part, error)) return false;
    return true;
}

/* A chat template is not run: its words tell GLM's revisions apart. */
static void read_chat_template(Tokenizer *tokenizer, const char *template) {
    if (!strstr(template, "Reasoning Effort")) return;
    tokenizer->effort_line = true;
    tokenizer->always_thinks = !strstr(template, "enable_thinking");
    for (int i = 0; i < EFFORTS; i++) tokenizer->spells[i] = strstr(template, efforts[i].glm);
}

/* tokenizer_config.json: the bos token where post_processor says nothing, and the chat template. */
static bool load_config(Tokenizer *tokenizer, const char *text, size_t length, Error *error) {
    cJSON *config = parse_json(text, length, tokenizer->name, "tokenizer_config.json", error);
    if (!config) return false;
    bool ok = true;
    const cJSON *bos = member(config, "bos_token");      /* a string, or an added token's description */
    const char *content = cJSON_IsString(bos) ? bos->valuestring : string_field(bos, "content");
    if (is_true(config, "add_bos_token") && *content && !tokenizer->prefix) {
        int id = tokenizer_find(tokenizer, content);
        if (id < 0) ok = fail(error, "%s/tokenizer_config.json: bos_token \"%s\" is no token", tokenizer->name, content);
        else arrput(tokenizer->prefix, id);
    }
    const cJSON *template = member(config, "chat_template");     /* a string, or a list of {"name", "template"} */
    if (cJSON_IsString(template)) read_chat_template(tokenizer, template->valuestring);
    const cJSON *entry;
    if (cJSON_IsArray(template))
        cJSON_ArrayForEach(entry, template)
            if (!strcmp(string_field(entry, "name"), "default")) read_chat_template(tokenizer, string_field(entry, "template"));
    cJSON_Delete(config);
    return ok;
}

/* config.json tells DeepSeek-V4, whose tokenizer is V3.2's, from that, and its two encoders apart: the later release has stages. */
static bool find_paragraphs(Tokenizer *tokenizer, const char *text, size_t length, Error *error) {
    cJSON *config = parse_json(text, length, tokenizer->name, "config.json", error);
    if (!config) return false;
    if (!strcmp(string_field(config, "model_type"), "deepseek_v4"))
        tokenizer->paragraphs = member(config, "dspark_block_size") ? v4_paragraphs : v4_preview_paragraphs;
    cJSON_Delete(config);
    return true;
}

static bool load_tokenizer(Tokenizer *tokenizer, const cJSON *json, Error *error) {
    const cJSON *decoder = member(json, "decoder");
    if (decoder && strcmp(string_field(decoder, "type"), "ByteLevel"))
        return REFUSE("decoder \"%s\" is not supported, only ByteLevel", tokenizer->name, string_field(decoder, "type"));
    if (!load_model(tokenizer, member(json, "model"), error)) return false;
    if (!load_normalizer(tokenizer, member(json, "normalizer"), error)) return false;
    if (!load_pre_tokenizer(tokenizer, member(json, "pre_tokenizer"), error)) return false;
    if (!tokenizer->byte_level) return REFUSE("pre_tokenizer has no ByteLevel step", tokenizer->name);
    if (!load_added_tokens(tokenizer, member(json, "added_tokens"), error)) return false;
    return load_post_processor(tokenizer, member(json, "post_processor"), error);
}

static void find_chat_format(Tokenizer *tokenizer);

Tokenizer *tokenizer_parse(const char *json_text, size_t length, const char *config_text, size_t config_length, const char *name,
                           Error *error) {
    cJSON *json = parse_json(json_text, length, name, "tokenizer.json", error);
    if (!json) return NULL;
    Tokenizer *tokenizer = allocate_zeroed(1, sizeof *tokenizer);
    tokenizer->name = allocate_zeroed(strlen(name) + 1, 1);
    strcpy(tokenizer->name, name);
    sh_new_strdup(tokenizer->ids);
    hmdefault(tokenizer->merges, ((MergeRule){0, -1}));
    tokenizer->match_context = pcre2_match_context_create(NULL);
    tokenizer->jit_stack = pcre2_jit_stack_create(32 << 10, JIT_STACK, NULL);
    pcre2_set_match_limit(tokenizer->match_context, MATCH_LIMIT);
    pcre2_jit_stack_assign(tokenizer->match_context, NULL, tokenizer->jit_stack);

    bool ok = load_tokenizer(tokenizer, json, error);
    cJSON_Delete(json);
    if (ok && config_text) ok = load_config(tokenizer, config_text, config_length, error);
    if (!ok) {
        tokenizer_close(tokenizer);
        return NULL;
    }
    find_chat_format(tokenizer);
    tokenizer->effort = EFFORTS;
    return tokenizer;
}

/* Reads DIR/file into *data; a file that is not there leaves NULL. */
static bool read_optional(const char *directory, const char *file, size_t limit, char **data, size_t *length, Error *error) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", directory, file) >= (int)sizeof path)
        return fail(error, "%.200s...: the path is longer than %d bytes", directory, PATH_MAX);
    return access(path, F_OK) != 0 || read_file(path, limit, data, length, error);
}

Tokenizer *tokenizer_open(const char *directory, Error *error) {
    char *json = NULL, *config = NULL, *template = NULL, *model = NULL;
    size_t length = 0, config_length = 0, template_length = 0, model_length = 0;
    Tokenizer *tokenizer = NULL;
    bool ok = read_optional(directory, "tokenizer.json", FILE_LIMIT, &json, &length, error) &&
              read_optional(directory, "tokenizer_config.json", FILE_LIMIT, &config, &config_length, error) &&
              read_optional(directory, "chat_template.jinja", FILE_LIMIT, &template, &template_length, error) &&
              read_optional(directory, "config.json", FILE_LIMIT, &model, &model_length, error);
    if (ok && !json) fail(error, "%s/tokenizer.json: no such file", directory);
    else if (ok) tokenizer = tokenizer_parse(json, length, config, config_length, directory, error);
    if (tokenizer && template) read_chat_template(tokenizer, template);
    if (tokenizer && model && !find_paragraphs(tokenizer, model, model_length, error)) {
        tokenizer_close(tokenizer);
        tokenizer = NULL;
    }
    free(json);
    free(config);
    free(template);
    free(model);
    return tokenizer;
}

void tokenizer_close(Tokenizer *tokenizer) {
    if (!tokenizer) return;
    for (size_t i = 0; i < arrlenu(tokenizer->steps); i++) pcre2_code_free(tokenizer->steps[i].code);
    for (int list = 0; list < 2; list++) {
        for (size_t i = 0; i < arrlenu(tokenizer->added[list]); i++) arrfree(tokenizer->added[list][i].pattern);
        arrfree(tokenizer->added[list]);
    }
    arrfree(tokenizer->steps);
    arrfree(tokenizer->tokens);
    arrfree(tokenizer->bytes);
    arrfree(tokenizer->prefix);
    shfree(tokenizer->ids);
    hmfree(tokenizer->merges);
    pcre2_match_context_free(tokenizer->match_context);
    pcre2_jit_stack_free(tokenizer->jit_stack);
    free(tokenizer->name);
    free(tokenizer);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Encoding: one call's working memory, then the pipeline from its end (merging one piece) to its start (the whole text), since
 * each stage hands its output on by calling the one above it.
 */

typedef struct Span {
    size_t start, end;
} Span;

typedef struct Symbol {             /* a token of the piece being merged, linked in text order */
    int id, previous, next;         /* neighbours: positions in Encoder.symbols, -1 at the ends */
    uint32_t rank;                  /* of the rule that joins it with the next one, NO_RANK where there is none */
    int result;                     /* of that rule */
} Symbol;

enum { NO_RANK = UINT32_MAX };

typedef struct Encoder {
    const Tokenizer *tokenizer;
    bool match_added;
    int **ids;                      /* stb_ds: the output */
    Error *error;
    pcre2_match_data *match;
    char *composed;                 /* stb_ds: the text in NFC */
    char *prefixed;                 /* stb_ds: the text again, with the spaces that a prefix_space step puts in */
    Span *pieces, *next_pieces;     /* stb_ds: as the last step left them, as the current one makes them */
    Symbol *symbols;                /* stb_ds */
    uint64_t *heap;                 /* stb_ds: rank << 32 | position, smallest first */
    char *spelling;                 /* stb_ds: a piece as the vocabulary spells it */
} Encoder;

/* User text must not turn into an added token by any way: neither by a merge that results in one nor by ignore_merges. */
static bool may_produce(const Encoder *encoder, int id) {
    return encoder->match_added || !(encoder->tokenizer->tokens[id].flags & TOKEN_ADDED);
}

/* The token of one byte. Every text can be encoded if every byte can: a vocabulary that lacks one says so here, and no byte is
 * ever left out. */
static bool append_byte(Encoder *encoder, uint8_t byte) {
    int id = encoder->tokenizer->byte_token[byte];
    /* an added token of one letter is an odd thing, but only a control token is worth refusing the letter for */
    if (id < 0 || (!encoder->match_added && tokenizer_is_control(encoder->tokenizer, id)))
        return fail(encoder->error, "%s/tokenizer.json: the vocabulary has no token for byte 0x%02X", encoder->tokenizer->name,
                    byte);
    arrput(*encoder->ids, id);
    return true;
}

/* The queue of pairs to join: a binary heap, its smallest key at 0. */
static void heap_push(uint64_t **heap, uint64_t key) {
    size_t at = arrlenu(*heap);
    arrput(*heap, key);
    for (; at > 0 && (*heap)[(at - 1) / 2] > key; at = (at - 1) / 2) (*heap)[at] = (*heap)[(at - 1) / 2];
    (*heap)[at] = key;
}

static uint64_t heap_pop(uint64_t *heap) {
    uint64_t top = heap[0], last = arrpop(heap);
    size_t size = arrlenu(heap), at = 0;
    for (size_t child = 1; child < size; child = 2 * at + 1) {
        if (child + 1 < size && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= last) break;
        heap[at] = heap[child];
        at = child;
    }
    if (size) heap[at] = last;
    return top;
}

/* Looks up the rule for this symbol and the next one, and queues it. */
static void consider_pair(Encoder *encoder, int position) {
    Symbol *symbol = &encoder->symbols[position];
    symbol->rank = NO_RANK;
    if (symbol->next < 0) return;
    uint64_t pair = (uint64_t)symbol->id << 32 | (uint32_t)encoder->symbols[symbol->next].id;
    __auto_type merges = encoder->tokenizer->merges;
    MergeRule rule = hmget(merges, pair);
    if (rule.result < 0 || !may_produce(encoder, rule.result)) return;
    symbol->rank = rule.rank;
    symbol->result = rule.result;
    heap_push(&encoder->heap, (uint64_t)rule.rank << 32 | (uint32_t)position);
}

/* A piece that is itself a vocabulary entry, for ignore_merges; -1 otherwise. */
static int find_whole_piece(Encoder *encoder, const char *text, size_t length) {
    arrsetlen(encoder->spelling, 0);
    for (size_t i = 0; i < length; i++) {
        int character = byte_character((uint8_t)text[i]);
        char *end = arraddnptr(encoder->spelling, (int)character_size(character));
        utf8proc_encode_char(character, (uint8_t *)end);
    }
    arrput(encoder->spelling, 0);
    int id = tokenizer_find(encoder->tokenizer, encoder->spelling);
    return id >= 0 && encoder->tokenizer->tokens[id].flags & TOKEN_MODEL && may_produce(encoder, id) ? id : -1;
}

/* Byte pair encoding of one piece: of all neighbours that have a rule, the pair of lowest rank (the leftmost of equals) joins
 * first. A queue of (rank, position) makes that O(n log n); an entry whose pair has changed since is recognised by its rank. */
static bool merge_piece(Encoder *encoder, const char *text, size_t length) {
    if (encoder->tokenizer->ignore_merges) {
        int whole = find_whole_piece(encoder, text, length);
        if (whole >= 0) {
            arrput(*encoder->ids, whole);
            return true;
        }
    }
    size_t first_id = arrlenu(*encoder->ids);
    for (size_t i = 0; i < length; i++)
        if (!append_byte(encoder, (uint8_t)text[i])) return false;
    int n = (int)length;
    arrsetlen(encoder->symbols, length);
    arrsetlen(encoder->heap, 0);
    for (int i = 0; i < n; i++)
        encoder->symbols[i] = (Symbol){(*encoder->ids)[first_id + (size_t)i], i - 1, i + 1 < n ? i + 1 : -1, NO_RANK, -1};
    for (int i = 0; i < n; i++) consider_pair(encoder, i);

    while (arrlenu(encoder->heap) > 0) {
        uint64_t key = heap_pop(encoder->heap);
        int position = (int)(uint32_t)key;
        Symbol *left = &encoder->symbols[position];
        if (left->rank != key >> 32) continue;
        Symbol *right = &encoder->symbols[left->next];
        left->id = left->result;
        left->next = right->next;
        right->rank = NO_RANK;
        if (left->next >= 0) encoder->symbols[left->next].previous = position;
        consider_pair(encoder, position);
        if (left->previous >= 0) consider_pair(encoder, left->previous);
    }
    arrsetlen(*encoder->ids, first_id);
    for (int i = 0; i >= 0; i = encoder->symbols[i].next) arrput(*encoder->ids, encoder->symbols[i].id);
    return true;
}

/* Whether a part of a piece joins the part before it; `delimiter` says which of the two are delimiters. */
static bool joins_previous(Behavior behavior, bool previous_delimiter, bool delimiter) {
    switch (behavior) {
    case MERGED_WITH_PREVIOUS: return delimiter && !previous_delimiter;
    case MERGED_WITH_NEXT: return previous_delimiter && !delimiter;
    case CONTIGUOUS: return previous_delimiter == delimiter;
    default: return false;
    }
}

typedef struct PieceParts {         /* of the piece being split, so far */
    bool any, previous_delimiter;
} PieceParts;

/* Puts the next part of a piece, a match of the pattern or what lies between two, among the new pieces. Empty parts count for
 * joining and are dropped later, as in the reference. */
static void add_part(Encoder *encoder, const SplitStep *step, PieceParts *parts, Span part, bool matched) {
    bool delimiter = matched != step->invert;
    bool joins = parts->any && joins_previous(step->behavior, parts->previous_delimiter, delimiter);
    parts->any = true;
    parts->previous_delimiter = delimiter;
    if (joins) arrlast(encoder->next_pieces).end = part.end;
    else if (!(step->behavior == REMOVED && delimiter)) arrput(encoder->next_pieces, part);
}

/* Splits one piece at the matches of the step's pattern. The pattern sees the piece alone: what follows is out of sight even
 * for a look-ahead, as in the reference. */
static bool split_piece(Encoder *encoder, const SplitStep *step, const char *text, Span piece) {
    PieceParts parts = {0};
    PCRE2_SPTR subject = (PCRE2_SPTR)text + piece.start;
    size_t length = piece.end - piece.start, search = 0, done = 0;
    bool any_match = false;
    while (search <= length) {
        int count = pcre2_match(step->code, subject, length, search, PCRE2_NO_UTF_CHECK, encoder->match,
                                encoder->tokenizer->match_context);
        if (count == PCRE2_ERROR_NOMATCH) break;
        if (count < 0) {
            char reason[128];
            pcre2_get_error_message(count, (PCRE2_UCHAR *)reason, sizeof reason);
            return fail(encoder->error, "%s/tokenizer.json: pre_tokenizer pattern on %zu bytes of text: %s",
                        encoder->tokenizer->name, length, reason);
        }
        const PCRE2_SIZE *match = pcre2_get_ovector_pointer(encoder->match);
        if (match[0] == match[1] && any_match && match[1] == done) {
            /* an empty match right behind the last one does not count: search from the next character */
            search += search < length ? (size_t)utf8_scan((const char *)subject + search, length - search) : 1;
            continue;
        }
        if (match[0] > done) add_part(encoder, step, &parts, (Span){piece.start + done, piece.start + match[0]}, false);
        add_part(encoder, step, &parts, (Span){piece.start + match[0], piece.start + match[1]}, true);
        search = done = match[1];
        any_match = true;
    }
    if (done < length) add_part(encoder, step, &parts, (Span){piece.start + done, piece.end}, false);
    return true;
}

/* Rebuilds the text with a space in front of every piece that has none. */
static const char *prefix_spaces(Encoder *encoder, const char *text) {
    arrsetlen(encoder->prefixed, 0);
    for (size_t i = 0; i < arrlenu(encoder->pieces); i++) {
        Span *piece = &encoder->pieces[i];
        size_t length = piece->end - piece->start, start = arrlenu(encoder->prefixed);
        if (text[piece->start] != ' ') arrput(encoder->prefixed, ' ');
        memcpy(arraddnptr(encoder->prefixed, length), text + piece->start, length);
        *piece = (Span){start, arrlenu(encoder->prefixed)};
    }
    return encoder->prefixed;
}

/* The pre-tokenizer's steps, each on every piece that the one before left, and then the merges. */
static bool encode_plain(Encoder *encoder, const char *text, size_t length) {
    arrsetlen(encoder->pieces, 0);
    arrput(encoder->pieces, ((Span){0, length}));
    for (size_t s = 0; s < arrlenu(encoder->tokenizer->steps); s++) {
        const SplitStep *step = &encoder->tokenizer->steps[s];
        if (step->prefix_space) text = prefix_spaces(encoder, text);
        if (!step->code) continue;
        arrsetlen(encoder->next_pieces, 0);
        for (size_t i = 0; i < arrlenu(encoder->pieces); i++)
            if (!split_piece(encoder, step, text, encoder->pieces[i])) return false;
        arrsetlen(encoder->pieces, 0);
        for (size_t i = 0; i < arrlenu(encoder->next_pieces); i++)
            if (encoder->next_pieces[i].start < encoder->next_pieces[i].end) arrput(encoder->pieces, encoder->next_pieces[i]);
    }
    for (size_t i = 0; i < arrlenu(encoder->pieces); i++) {
        Span piece = encoder->pieces[i];
        if (!merge_piece(encoder, text + piece.start, piece.end - piece.start)) return false;
    }
    return true;
}

/* The first of sorted added tokens low .. high - 1, alike in their first `depth` bytes and all longer, whose next byte is at
 * least `byte`. */
static size_t lower_bound(const AddedToken *added, size_t low, size_t high, size_t depth, int byte) {
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((uint8_t)added[middle].pattern[depth] < byte) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The longest added token that the text starts with, or NULL: the candidates narrow with every byte. */
static const AddedToken *added_token_at(const AddedToken *added, const char *text, size_t length) {
    const AddedToken *longest = NULL;
    size_t low = 0, high = arrlenu(added);
    for (size_t depth = 0; low < high; depth++) {
        while (low < high && added[low].length == depth) longest = &added[low++];
        if (depth == length) break;
        int byte = (uint8_t)text[depth];
        low = lower_bound(added, low, high, depth, byte);
        high = lower_bound(added, low, high, depth, byte + 1);
    }
    return longest;
}

static bool touches_word(const char *text, size_t length, size_t start, size_t end) {
    return is_word(last_character(text, start)) || is_word(first_character(text + end, length - end));
}

/* Where the white space that ends at, or begins at, `from` begins, or ends. */
static size_t skip_spaces_back(const char *text, size_t from, size_t limit) {
    while (from > limit && is_space(last_character(text, from))) from -= character_size(last_character(text, from));
    return from;
}

static size_t skip_spaces(const char *text, size_t length, size_t from) {
    while (from < length && is_space(first_character(text + from, length - from)))
        from += character_size(first_character(text + from, length - from));
    return from;
}

static bool split_added(Encoder *encoder, int list, const char *text, size_t length);

/* What lies between added tokens: after the first list comes the normalizer and the second list, then the pre-tokenizer. */
static bool encode_between(Encoder *encoder, int list, const char *text, size_t length) {
    if (length == 0) return true;
    if (list == 1) return encode_plain(encoder, text, length);
    size_t ascii = 0;
    while (ascii < length && (uint8_t)text[ascii] < 0x80) ascii++;
    if (!encoder->tokenizer->nfc || ascii == length) return split_added(encoder, 1, text, length);
    arrsetlen(encoder->composed, 0);
    compose(text, length, &encoder->composed);
    return split_added(encoder, 1, encoder->composed, arrlenu(encoder->composed));
}

/* Takes the tokens of one list out of the text, leftmost and longest first. A token that is found where it may not stand
 * (single_word) hides shorter ones at that place, and one may overlap white space that its neighbour has swallowed: both as in
 * the reference. */
static bool split_added(Encoder *encoder, int list, const char *text, size_t length) {
    const AddedToken *added = encoder->match_added ? encoder->tokenizer->added[list] : NULL;
    if (!added) return encode_between(encoder, list, text, length);
    size_t done = 0;
    for (size_t at = 0; at < length; ) {
        const AddedToken *token = added_token_at(added, text + at, length - at);
        if (!token) {
            at++;
            continue;
        }
        size_t start = at, end = at + token->length;
        at = end;
        if (token->single_word && touches_word(text, length, start, end)) continue;
        if (token->lstrip) start = skip_spaces_back(text, start, done);
        if (token->rstrip) end = skip_spaces(text, length, end);
        if (start > done && !encode_between(encoder, list, text + done, start - done)) return false;
        arrput(*encoder->ids, token->id);
        done = end;
    }
    return encode_between(encoder, list, text + done, length - done);
}

bool tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, bool match_added, int **ids, Error *error) {
    if (length > INT_MAX / 4) return fail(error, "a text of %zu bytes is too long to encode at once", length);
    Encoder encoder = {.tokenizer = tokenizer, .match_added = match_added, .ids = ids, .error = error};
    encoder.match = pcre2_match_data_create(1, NULL);
    size_t n_before = arrlenu(*ids);
    bool ok = true;
    for (size_t at = 0; ok && at < length; ) {
        /* Regular expressions and NFC need characters; a byte that belongs to none becomes a token by itself. */
        size_t valid = utf8_valid(text + at, length - at);
        ok = valid ? split_added(&encoder, 0, text + at, valid) : append_byte(&encoder, (uint8_t)text[at]);
        at += valid ? valid : 1;
    }
    if (!ok && *ids) arrsetlen(*ids, n_before);
    pcre2_match_data_free(encoder.match);
    arrfree(encoder.composed);
    arrfree(encoder.prefixed);
    arrfree(encoder.pieces);
    arrfree(encoder.next_pieces);
    arrfree(encoder.symbols);
    arrfree(encoder.heap);
    arrfree(encoder.spelling);
    return ok;
}

void tokenizer_prefix(const Tokenizer *tokenizer, int **ids) {
    for (size_t i = 0; i < arrlenu(tokenizer->prefix); i++) arrput(*ids, tokenizer->prefix[i]);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Looking tokens up
 */

const char *tokenizer_bytes(const Tokenizer *tokenizer, int id, size_t *length) {
    if (id < 0 || id >= tokenizer_size(tokenizer) || !tokenizer->tokens[id].flags) return NULL;
    *length = tokenizer->tokens[id].length;
    return tokenizer->bytes + tokenizer->tokens[id].offset;
}

int tokenizer_find(const Tokenizer *tokenizer, const char *text) {
    __auto_type ids = tokenizer->ids;       /* stb_ds assigns to the map it looks into */
    ptrdiff_t index = shgeti(ids, text);
    return index < 0 ? -1 : ids[index].value;
}

bool tokenizer_is_control(const Tokenizer *tokenizer, int id) {
    return id >= 0 && id < tokenizer_size(tokenizer) && tokenizer->tokens[id].flags & TOKEN_CONTROL;
}

int tokenizer_size(const Tokenizer *tokenizer) {
    return (int)arrlen(tokenizer->tokens);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Chat: what the checkpoints' own templates render, for system, user and assistant messages. Control tokens are pushed as ids;
 * all text between two of them, the template's own and the message's, is encoded in one run and can never match one.
 *
 *     ChatML (Qwen3)   <|im_start|>ROLE\nTEXT<|im_end|>\n ...                  <|im_start|>assistant\n
 *     GLM-5.x          [gMASK]<sop> <|system|>TEXT <|user|>TEXT ...            <|assistant|><think>
 *     DeepSeek-V3      BOS SYSTEM USER TEXT ASSISTANT TEXT EOS ...             ASSISTANT
 *     DeepSeek-V3.2    BOS SYSTEM USER TEXT ASSISTANT</think>TEXT EOS ...      (ASSISTANT<think> belongs to the user's message)
 *     DeepSeek-V4      the same
 *     DeepSeek-V4.1    BOS <SYSTEM>TEXT USER TEXT ASSISTANT</think>TEXT EOS ...   (likewise)
 */

#define BOS "<｜begin▁of▁sentence｜>"
#define EOS "<｜end▁of▁sentence｜>"
#define SYSTEM "<｜System｜>"
#define USER "<｜User｜>"
#define ASSISTANT "<｜Assistant｜>"

static int find_added(const Tokenizer *tokenizer, const char *text) {
    int id = tokenizer_find(tokenizer, text);
    return id >= 0 && tokenizer->tokens[id].flags & TOKEN_ADDED ? id : -1;
}

int chat_think_open(const Tokenizer *tokenizer) {
    return find_added(tokenizer, "</think>") < 0 ? -1 : find_added(tokenizer, "<think>");
}

int chat_think_close(const Tokenizer *tokenizer) {
    return find_added(tokenizer, "<think>") < 0 ? -1 : find_added(tokenizer, "</think>");
}

/* The last step of loading: which format the tokenizer has the tokens for. GLM's files do not name its prefix. */
static void find_chat_format(Tokenizer *tokenizer) {
    static const struct { ChatFormat format; const char *tokens[8]; } formats[] = {
        {CHAT_ML, {"<|im_start|>", "<|im_end|>"}},
        {CHAT_GLM, {"[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>"}},
        {CHAT_DEEPSEEK_V41, {BOS, EOS, SYSTEM, USER, ASSISTANT, "<think>", "</think>"}},
        {CHAT_DEEPSEEK_V32, {BOS, EOS, USER, ASSISTANT, "<think>", "</think>"}},
        {CHAT_DEEPSEEK_V3, {BOS, EOS, USER, ASSISTANT}},
    };
    for (size_t i = 0; i < sizeof formats / sizeof formats[0] && !tokenizer->chat; i++) {
        bool complete = true;
        for (int t = 0; formats[i].tokens[t]; t++) complete = complete && find_added(tokenizer, formats[i].tokens[t]) >= 0;
        if (complete) tokenizer->chat = formats[i].format;
    }
    if (tokenizer->chat == CHAT_GLM && !tokenizer->prefix) {
        arrput(tokenizer->prefix, tokenizer_find(tokenizer, "[gMASK]"));
        arrput(tokenizer->prefix, tokenizer_find(tokenizer, "<sop>"));
    }
}

bool chat_set_effort(Tokenizer *tokenizer, const char *effort, Error *error) {
    int level = 0;
    while (effort && level < EFFORTS && strcmp(efforts[level].name, effort)) level++;
    if (!effort) return tokenizer->effort = EFFORTS, true;
    if (level == EFFORTS) return fail(error, "effort: found \"%s\", wanted low, high or max", effort);
    const bool v4 = tokenizer->chat == CHAT_DEEPSEEK_V32 && tokenizer->paragraphs;
    if (v4 && !tokenizer->paragraphs[level])
        return fail(error, "%s: effort %s: the encoder of DeepSeek-V4's first release has only high and max", tokenizer->name,
                    effort);
    const bool glm = tokenizer->chat == CHAT_GLM && tokenizer->effort_line;
    if (!glm && !v4 && tokenizer->chat != CHAT_DEEPSEEK_V41)
        return fail(error, "%s: effort %s: its chat format has no efforts", tokenizer->name, effort);
    if (glm && !tokenizer->spells[level])
        return fail(error, "%s: effort %s: its chat template has no \"%s\"", tokenizer->name, effort, efforts[level].glm);
    tokenizer->effort = level;
    return true;
}

const char *chat_effort(const Tokenizer *tokenizer) {
    return tokenizer->effort == EFFORTS ? NULL : efforts[tokenizer->effort].name;
}

static int effort_or(const Tokenizer *tokenizer, int usual) {
    return tokenizer->effort == EFFORTS ? usual : tokenizer->effort;
}

/* A prompt under construction. */
typedef struct Writer {
    const Tokenizer *tokenizer;
    Prompt *prompt;
    Error *error;
    bool ok;                        /* false: *error says why */
    size_t encoded;                 /* bytes of prompt->text that have their ids already */
    bool thinking, generate;        /* whether the answer to come may think; whether it is opened */
    const Message *messages;        /* [last_message + 1] */
    int last_message, last_user;    /* positions in the conversation: answers behind last_user keep their reasoning */
} Writer;

typedef struct Text {              /* part of a message; not owned */
    const char *start;
    size_t length;
} Text;

static void write_text(Writer *writer, Text text) {
    if (text.length) memcpy(arraddnptr(writer->prompt->text, text.length), text.start, text.length);
}

static void write_string(Writer *writer, const char *string) {
    write_text(writer, (Text){string, strlen(string)});
}

/* Encodes the text since the last control token. */
static void end_run(Writer *writer) {
    size_t end = arrlenu(writer->prompt->text);
    if (writer->ok && end > writer->encoded)
        writer->ok = tokenizer_encode(writer->tokenizer, writer->prompt->text + writer->encoded, end - writer->encoded, false,
                                      &writer->prompt->ids, writer->error);
    writer->encoded = end;
}

static void write_control(Writer *writer, const char *token) {
    end_run(writer);
    write_string(writer, token);
    writer->encoded += strlen(token);
    arrput(writer->prompt->ids, tokenizer_find(writer->tokenizer, token));
}

/* White space to Python, whose str.strip() the templates use. */
static bool is_python_space(int character) {
    return is_space(character) || (character >= 0x1C && character <= 0x1F);
}

static bool is_newline(int character) {
    return character == '\n';
}

static Text strip_left(Text text, bool (*strips)(int)) {
    for (int c; text.length && strips(c = first_character(text.start, text.length)); text.length -= character_size(c))
        text.start += character_size(c);
    return text;
}

static Text strip(Text text, bool (*strips)(int)) {
    for (int c; text.length && strips(c = last_character(text.start, text.length)); ) text.length -= character_size(c);
    return strip_left(text, strips);
}

/* What follows the last occurrence of the word, or all of the text. */
static Text after_last(Text text, const char *word) {
    for (const char *found; (found = memmem(text.start, text.length, word, strlen(word))); ) {
        text.length -= (size_t)(found - text.start) + strlen(word);
        text.start = found + strlen(word);
    }
    return text;
}

/* Takes an answer apart as the templates do: the answer is what follows the last "</think>", the reasoning what precedes the
 * first one, from the last "<think>" on. False where it has no "</think>". */
static bool split_reasoning(Text content, Text *reasoning, Text *answer) {
    const char *close = memmem(content.start, content.length, "</think>", 8);
    *answer = after_last(content, "</think>");
    *reasoning = after_last((Text){content.start, close ? (size_t)(close - content.start) : 0}, "<think>");
    return close;
}

static void write_think_block(Writer *writer, Text before, Text reasoning, Text after) {
    write_control(writer, "<think>");
    write_text(writer, before);
    write_text(writer, reasoning);
    write_text(writer, after);
    write_control(writer, "</think>");
}

static void chatml_message(Writer *writer, const Message *message, int index) {
    static const Text newline = {"\n", 1};
    Text content = {message->content, message->content_length}, reasoning, answer;
    write_control(writer, "<|im_start|>");
    write_string(writer, message->role);
    write_string(writer, "\n");
    if (!strcmp(message->role, "assistant") && chat_think_open(writer->tokenizer) >= 0) {
        if (split_reasoning(content, &reasoning, &answer)) content = strip_left(answer, is_newline);
        reasoning = strip(reasoning, is_newline);
        if (index > writer->last_user && (index == writer->last_message || reasoning.length)) {
            write_think_block(writer, newline, reasoning, newline);
            write_string(writer, "\n\n");
            content = strip_left(content, is_newline);
        }
    }
    write_text(writer, content);
    write_control(writer, "<|im_end|>");
    write_string(writer, "\n");
}

static void chatml_open_answer(Writer *writer) {
    write_control(writer, "<|im_start|>");
    write_string(writer, "assistant\n");
    if (writer->thinking || chat_think_open(writer->tokenizer) < 0) return;
    write_think_block(writer, (Text){"\n\n", 2}, (Text){0}, (Text){0});
    write_string(writer, "\n\n");
}

static void glm_start(Writer *writer) {
    write_control(writer, "[gMASK]");
    write_control(writer, "<sop>");
    if (!writer->tokenizer->effort_line || !(writer->thinking || writer->tokenizer->always_thinks)) return;
    write_control(writer, "<|system|>");
    write_string(writer, "Reasoning Effort: ");
    write_string(writer, efforts[effort_or(writer->tokenizer, EFFORT_MAX)].glm);
}

/* No reasoning: "</think>" up to GLM-5.1, "<think></think>" later. */
static void glm_no_reasoning(Writer *writer) {
    if (writer->tokenizer->effort_line) write_control(writer, "<think>");
    write_control(writer, "</think>");
}

static void glm_message(Writer *writer, const Message *message, int index) {
    Text content = {message->content, message->content_length}, reasoning, answer;
    if (strcmp(message->role, "assistant")) {
        write_control(writer, !strcmp(message->role, "user") ? "<|user|>" : "<|system|>");
        write_text(writer, content);
        return;
    }
    write_control(writer, "<|assistant|>");
    bool has_reasoning = split_reasoning(content, &reasoning, &answer);
    if (has_reasoning && (index > writer->last_user || writer->tokenizer->always_thinks))
        write_think_block(writer, (Text){0}, reasoning, (Text){0});
    else glm_no_reasoning(writer);
    write_text(writer, strip(answer, is_python_space));
}

static void glm_open_answer(Writer *writer) {
    write_control(writer, "<|assistant|>");
    if (writer->thinking || writer->tokenizer->always_thinks) write_control(writer, "<think>");
    else glm_no_reasoning(writer);
}

/* V3 puts the system messages of the whole conversation first. */
static void deepseek_v3_start(Writer *writer, const Message *messages, int n_messages) {
    write_control(writer, BOS);
    bool first = true;
    for (int i = 0; i < n_messages; i++) {
        if (strcmp(messages[i].role, "system")) continue;
        if (!first) write_string(writer, "\n\n");
        write_text(writer, (Text){messages[i].content, messages[i].content_length});
        first = false;
    }
}

static void deepseek_v3_message(Writer *writer, const Message *message) {
    bool assistant = !strcmp(message->role, "assistant");
    if (!strcmp(message->role, "system")) return;
    write_control(writer, assistant ? ASSISTANT : USER);
    write_text(writer, (Text){message->content, message->content_length});
    if (assistant) write_control(writer, EOS);
}

/* V4's, which is V3.2's otherwise, puts a paragraph in front where an effort was asked for. */
static void deepseek_v32_start(Writer *writer) {
    const Tokenizer *tokenizer = writer->tokenizer;
    write_control(writer, BOS);
    if (tokenizer->paragraphs && tokenizer->effort < EFFORTS && writer->thinking)
        write_string(writer, tokenizer->paragraphs[tokenizer->effort]);
}

/* An answer of V3.2's and later encoders, which the message in front has opened. What led to it is kept behind the last question. */
static void deepseek_answer(Writer *writer, const Message *message, int index) {
    Text reasoning, answer;
    split_reasoning((Text){message->content, message->content_length}, &reasoning, &answer);
    if (writer->thinking && index > writer->last_user) {
        write_text(writer, reasoning);
        write_control(writer, "</think>");
    }
    write_text(writer, answer);
    write_control(writer, EOS);
}

/* V3.2's encoder opens each answer at the end of the user's message; only what answers the last one may think. */
static void deepseek_v32_message(Writer *writer, const Message *message, int index) {
    const bool user = !strcmp(message->role, "user");
    if (!strcmp(message->role, "assistant")) return deepseek_answer(writer, message, index);
    if (user) write_control(writer, USER);
    write_text(writer, (Text){message->content, message->content_length});
    if (!user || (index == writer->last_message && !writer->generate)) return;
    write_control(writer, ASSISTANT);
    write_control(writer, writer->thinking && index == writer->last_user ? "<think>" : "</think>");
}

/* V4.1 has the effort and what the first system message says behind a token of their own. */
static void deepseek_v41_start(Writer *writer, int n_messages) {
    write_control(writer, BOS);
    if (!n_messages || !(writer->thinking || !strcmp(writer->messages[0].role, "system"))) return;
    write_control(writer, SYSTEM);
    if (!writer->thinking) return;
    write_string(writer, "Reasoning Effort: ");
    write_string(writer, efforts[effort_or(writer->tokenizer, EFFORT_HIGH)].v41);
    write_string(writer, " (range 1-100, the higher the value, the more thorough the reasoning)\n\n");
}

/* User messages that follow each other are one. A later system message is answered like a user's; an answer is opened where one
 * follows, or is asked for, and only what answers the last of them may think. */
static void deepseek_v41_message(Writer *writer, const Message *message, int index) {
    const bool user = !strcmp(message->role, "user"), ends = index == writer->last_message;
    if (!strcmp(message->role, "assistant")) return deepseek_answer(writer, message, index);
    if (user && index && !strcmp(message[-1].role, "user")) write_string(writer, "\n\n");
    else if (user || index) write_control(writer, user ? USER : SYSTEM);
    write_text(writer, (Text){message->content, message->content_length});
    if (!(user || index) || !(ends ? writer->generate : !strcmp(message[1].role, "assistant"))) return;
    write_control(writer, ASSISTANT);
    write_control(writer, writer->thinking && index >= writer->last_user ? "<think>" : "</think>");
}

static void write_message(Writer *writer, const Message *message, int index) {
    switch (writer->tokenizer->chat) {
    case CHAT_ML: chatml_message(writer, message, index); break;
    case CHAT_GLM: glm_message(writer, message, index); break;
    case CHAT_DEEPSEEK_V3: deepseek_v3_message(writer, message); break;
    case CHAT_DEEPSEEK_V32: deepseek_v32_message(writer, message, index); break;
    case CHAT_DEEPSEEK_V41: deepseek_v41_message(writer, message, index); break;
    case CHAT_NONE: break;
    }
}

/* Opens the answer where that is asked for (V3.2's and V4.1's user message has done so), and encodes what is left. */
static bool finish_prompt(Writer *writer) {
    ChatFormat chat = writer->tokenizer->chat;
    if (writer->generate && chat == CHAT_ML) chatml_open_answer(writer);
    if (writer->generate && chat == CHAT_GLM) glm_open_answer(writer);
    if (writer->generate && chat == CHAT_DEEPSEEK_V3) write_control(writer, ASSISTANT);
    end_run(writer);
    return writer->ok;
}

static bool check_chat(const Tokenizer *tokenizer, Error *error) {
    if (tokenizer->chat != CHAT_NONE) return true;
    return fail(error, "%s/tokenizer.json: no chat format that tide knows: the tokens of ChatML, GLM or DeepSeek are not all there",
                tokenizer->name);
}

/* Qwen does not count a user message that is a tool's response. */
static bool is_tool_response(const Message *message) {
    static const char open[] = "<tool_response>", close[] = "</tool_response>";
    size_t length = message->content_length, close_length = sizeof close - 1;
    return length >= close_length && !memcmp(message->content, open, sizeof open - 1) &&
           !memcmp(message->content + length - close_length, close, close_length);
}

static int last_user_message(const Tokenizer *tokenizer, const Message *messages, int n_messages) {
    bool chatml = tokenizer->chat == CHAT_ML;
    for (int i = n_messages - 1; i >= 0; i--)
        if (tokenizer->chat == CHAT_DEEPSEEK_V41 && i && !strcmp(messages[i].role, "system")) return i;
        else if (!strcmp(messages[i].role, "user") && !(chatml && is_tool_response(&messages[i]))) return i;
    return chatml ? n_messages - 1 : -1;
}

bool chat_render(const Tokenizer *tokenizer, const Message *messages, int n_messages, bool add_generation_prompt, bool thinking,
                 Prompt *prompt, Error *error) {
    if (!check_chat(tokenizer, error)) return false;
    for (int i = 0; i < n_messages; i++) {
        const char *role = messages[i].role;
        if (strcmp(role, "system") && strcmp(role, "user") && strcmp(role, "assistant"))
            return fail(error, "message %d has the role \"%s\", which is none of system, user, assistant", i + 1, role);
    }
    Writer writer = {.tokenizer = tokenizer, .prompt = prompt, .error = error, .ok = true, .encoded = arrlenu(prompt->text),
                     .thinking = thinking, .generate = add_generation_prompt, .messages = messages, .last_message = n_messages - 1,
                     .last_user = last_user_message(tokenizer, messages, n_messages)};
    if (tokenizer->chat == CHAT_GLM) glm_start(&writer);
    if (tokenizer->chat == CHAT_DEEPSEEK_V3) deepseek_v3_start(&writer, messages, n_messages);
    if (tokenizer->chat == CHAT_DEEPSEEK_V32) deepseek_v32_start(&writer);
    if (tokenizer->chat == CHAT_DEEPSEEK_V41) deepseek_v41_start(&writer, n_messages);
    for (int i = 0; i < n_messages; i++) write_message(&writer, &messages[i], i);
    return finish_prompt(&writer);
}

bool chat_render_next(const Tokenizer *tokenizer, int last_id, const char *content, size_t length, bool thinking, Prompt *prompt,
                      Error *error) {
    if (!check_chat(tokenizer, error)) return false;
    Writer writer = {.tokenizer = tokenizer, .prompt = prompt, .error = error, .ok = true, .encoded = arrlenu(prompt->text),
                     .thinking = thinking, .generate = true};
    Message message = {"user", content, length};
    if (tokenizer->chat == CHAT_GLM && last_id == tokenizer_find(tokenizer, "<|user|>")) {
        /* GLM's turn ends by the next role's token: it stands there already */
        write_text(&writer, (Text){content, length});
        return finish_prompt(&writer);
    }
    const char *end = tokenizer->chat == CHAT_ML ? "<|im_end|>" : EOS;
    if (tokenizer->chat != CHAT_GLM && last_id >= 0 && last_id != tokenizer_find(tokenizer, end)) write_control(&writer, end);
    if (tokenizer->chat == CHAT_ML && last_id >= 0) write_string(&writer, "\n");
    write_message(&writer, &message, 0);
    return finish_prompt(&writer);
}

bool chat_ends_turn(const Tokenizer *tokenizer, int id) {
    static const char *const ends[][4] = {
        [CHAT_NONE] = {NULL},
        [CHAT_ML] = {"<|im_end|>", "<|endoftext|>"},
        [CHAT_GLM] = {"<|user|>", "<|observation|>", "<|endoftext|>"},
        [CHAT_DEEPSEEK_V3] = {EOS},
        [CHAT_DEEPSEEK_V32] = {EOS},
        [CHAT_DEEPSEEK_V41] = {EOS},
    };
    for (const char *const *end = ends[tokenizer->chat]; *end; end++)
        if (id >= 0 && id == tokenizer_find(tokenizer, *end)) return true;
    return false;
}

void prompt_free(Prompt *prompt) {
    arrfree(prompt->text);
    arrfree(prompt->ids);
}
