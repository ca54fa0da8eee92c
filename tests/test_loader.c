/* test_loader.c: files that are wrong. Every check in the code that reads safetensors, indices, config.json and the weights' names has
 * a file here that breaks it, and the refusal names the file and the thing in one line. And files that look odd but are right. */
#include "../engine.c"
#include "../backend.c"
#include "check.h"
#include "passes.h"
#include "scratch.h"

#include <sys/wait.h>

#define QWEN3 "tests/fixtures/qwen3-a"
#define GLM "tests/fixtures/glm_moe_dsa-a"
#define DEEPSEEK "tests/fixtures/deepseek_v32-c"
#define V4 "tests/fixtures/deepseek_v4-c"               /* as published */
#define V41 "tests/fixtures/deepseek_v41-c"
#define V4_SAVED "tests/fixtures/deepseek_v4-a"         /* as transformers saves it */

/* The failure's message is one line and holds both texts (either may be ""). */
static void check_refused(bool ok, const Error *error, const char *file, const char *thing, const char *what) {
    CHECK(!ok, "%s: refused", what);
    if (ok) return;
    CHECK(strstr(error->text, file) && strstr(error->text, thing) && !strchr(error->text, '\n'),
          "%s: wanted \"%s\" and \"%s\" in: %s", what, file, thing, error->text);
}

/* A safetensors file: the header's length, the header, then `data_size` zero bytes (a hole in the file). */
static void write_shard(const char *directory, const char *name, const char *header, size_t data_size) {
    char path[PATH_MAX];
    uint64_t length = strlen(header);
    FILE *file = fopen(join(path, directory, name), "wb");
    if (!file || fwrite(&length, 1, 8, file) != 8 || fwrite(header, 1, length, file) != length || fflush(file)
        || ftruncate(fileno(file), (off_t)(8 + length + data_size)) || fclose(file)) perror(path), exit(1);
}

static bool opens(const char *directory, Error *error) {
    Checkpoint checkpoint;
    bool ok = checkpoint_open(&checkpoint, directory, error);
    if (ok) checkpoint_close(&checkpoint);
    else CHECK(!checkpoint.files && !checkpoint.tensors && !checkpoint.directory, "a refused checkpoint leaves nothing behind");
    return ok;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Safetensors
 */

#define ENTRY(name, dtype, shape, begin, end) "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

static void test_headers(void) {
    static const struct { const char *what, *header; size_t data; const char *thing;
    } bad[] = {
        {"no JSON", "hello", 0, "malformed"},
        {"an empty header", "", 0, "malformed"},
        {"a cut header", "{" ENTRY("a", "F32", "[1]", 0, 4), 4, "malformed"},
        {"something behind the header", "{" ENTRY("a", "F32", "[1]", 0, 4) "},\"b\":1}", 4, "follows its end"},
        {"an empty object and more", "{},\"x\":1", 0, "follows its end"},
        {"an array", "[1, 2]", 0, "not a JSON object"},
        {"a number", "7", 0, "not a JSON object"},
        {"an entry that is a number", "{\"a\": 5}", 4, "tensor a"},
        {"an entry that is an array", "{\"a\": [5]}", 4, "tensor a"},
        {"no dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor a"},
        {"a dtype that is a number", "{\"a\":{\"dtype\":4,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor a"},
        {"no shape", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "tensor a"},
        {"a shape that is a number", "{" ENTRY("a", "F32", "1", 0, 4) "}", 4, "tensor a"},
        {"a negative dim", "{" ENTRY("a", "F32", "[-1]", 0, 4) "}", 4, "tensor a"},
        {"a fractional dim", "{" ENTRY("a", "F32", "[0.5]", 0, 4) "}", 4, "tensor a"},
        {"a dim that is a string", "{" ENTRY("a", "F32", "[\"1\"]", 0, 4) "}", 4, "tensor a"},
        {"a dim beyond every integer", "{" ENTRY("a", "F32", "[1e300]", 0, 4) "}", 4, "tensor a"},
        {"nine dims", "{" ENTRY("a", "F32", "[1,1,1,1,1,1,1,1,1]", 0, 4) "}", 4, "tensor a"},
        {"dims whose product overflows", "{" ENTRY("a", "F32", "[4294967296,4294967296]", 0, 4) "}", 4, "overflows"},
        {"dims whose bytes overflow to 4", "{" ENTRY("a", "F32", "[4611686018427387905]", 0, 4) "}", 4, "tensor a"},
        {"many dims that overflow", "{" ENTRY("a", "U8", "[65536,65536,65536,65536,65536]", 0, 0) "}", 4, "overflows"},
        {"no offsets", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "tensor a"},
        {"one offset", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "tensor a"},
        {"three offsets", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 8, "tensor a"},
        {"offsets that are strings", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[\"0\",\"4\"]}}", 4, "tensor a"},
        {"a negative offset", "{" ENTRY("a", "F32", "[1]", -4, 0) "}", 4, "tensor a"},
        {"reversed offsets", "{" ENTRY("a", "F32", "[1]", 4, 0) "}", 4, "tensor a"},
        {"offsets beyond the file", "{" ENTRY("a", "F32", "[2]", 0, 8) "}", 7, "tensor a"},
        {"a begin beyond the file", "{" ENTRY("a", "F32", "[0]", 9, 9) "}", 8, "tensor a"},
        {"offsets near 2^64", "{" ENTRY("a", "F32", "[1]", 18446744073709551612, 18446744073709551616) "}", 8, "tensor a"},
        {"a shape larger than its bytes", "{" ENTRY("a", "F32", "[1000,1000]", 0, 4) "}", 4, "tensor a"},
        {"a shape smaller than its bytes", "{" ENTRY("a", "F32", "[1]", 0, 8) "}", 8, "tensor a"},
        {"overlapping tensors", "{" ENTRY("a", "F32", "[2]", 0, 8) "," ENTRY("b", "F32", "[2]", 4, 12) "}", 12, "overlap"},
        {"one tensor inside another", "{" ENTRY("a", "F32", "[4]", 0, 16) "," ENTRY("b", "U8", "[1]", 5, 6) "}", 16, "overlap"},
        {"the same bytes twice", "{" ENTRY("a", "F32", "[1]", 0, 4) "," ENTRY("b", "F32", "[1]", 0, 4) "}", 4, "overlap"},
        {"an overlap with an unknown dtype", "{" ENTRY("a", "F4", "[1]", 0, 4) "," ENTRY("b", "F32", "[1]", 0, 4) "}", 4,
         "overlap"},
        {"a name twice", "{" ENTRY("a", "F32", "[1]", 0, 4) "," ENTRY("a", "F32", "[1]", 4, 8) "}", 8,
         "tensor a is there already"},
    };
    Error error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char *directory = scratch_directory();
        write_shard(directory, "model.safetensors", bad[i].header, bad[i].data);
        check_refused(opens(directory, &error), &error, "model.safetensors", bad[i].thing, bad[i].what);
        free(directory);
    }
    static const struct { const char *what, *header; size_t data; int tensors;
    } good[] = {
        {"no tensors", "{}", 0, 0},
        {"spaces around the header", "  {}  \n ", 0, 0},
        {"metadata alone", "{\"__metadata__\":{\"format\":\"pt\"}}", 0, 0},
        {"no metadata", "{" ENTRY("a", "F32", "[1]", 0, 4) "}", 4, 1},
        {"empty metadata", "{\"__metadata__\":{}," ENTRY("a", "F32", "[1]", 0, 4) "}", 4, 1},
        {"filled metadata", "{\"__metadata__\":{\"format\":\"pt\",\"x\":\"y\"}," ENTRY("a", "F32", "[1]", 0, 4) "}", 4, 1},
        {"metadata in the middle", "{" ENTRY("a", "F32", "[1]", 0, 4) ",\"__metadata__\":{}," ENTRY("b", "BF16", "[2]", 4, 8) "}",
         8, 2},
        {"a scalar and an empty tensor", "{" ENTRY("a", "F32", "[]", 0, 4) "," ENTRY("b", "F32", "[0,3]", 4, 4) "}", 4, 2},
        {"empty tensors at one place",
         "{" ENTRY("a", "U8", "[0]", 0, 0) "," ENTRY("b", "U8", "[0]", 0, 0) "," ENTRY("c", "U8", "[2]", 0, 2) "}", 2, 3},
        {"tensors out of order with a gap", "{" ENTRY("a", "U8", "[2]", 6, 8) "," ENTRY("b", "U8", "[2]", 0, 2) "}", 8, 2},
        {"dtypes that tide does not know",
         "{" ENTRY("a", "F6_E2M3", "[3]", 0, 5) "," ENTRY("b", "F8_E8M0", "[2]", 5, 7) "," ENTRY("c", "a very long dtype name",
                                                                                                 "[1]", 7, 8) "}",
         8, 3},
        {"every dtype",
         "{" ENTRY("a", "BOOL", "[1]", 0, 1) "," ENTRY("b", "U8", "[1]", 1, 2) "," ENTRY("c", "I8", "[1]", 2, 3) "," ENTRY("d", "U16", "[1]", 3, 5) "," ENTRY(
             "e", "I16", "[1]", 5,
             7) "," ENTRY("f", "U32", "[1]", 7,
                          11) "," ENTRY("g", "I32", "[1]", 11,
                                        15) "," ENTRY("h", "U64", "[1]", 15,
                                                      23) "," ENTRY("i", "I64", "[1]", 23,
                                                                    31) "," ENTRY("j", "F8_E4M3", "[1]", 31,
                                                                                  32) "," ENTRY("k", "F8_E5M2", "[1]", 32,
                                                                                                33) "," ENTRY("l", "F16", "[1]",
                                                                                                              33,
                                                                                                              35) "," ENTRY("m",
                                                                                                                            "BF1"
                                                                                                                            "6",
                                                                                                                            "[1]",
                                                                                                                            35,
                                                                                                                            37) "," ENTRY("n",
                                                                                                                                          "F32",
                                                                                                                                          "[1]",
                                                                                                                                          37,
                                                                                                                                          41) "," ENTRY("o",
                                                                                                                                                        "F64",
                                                                                                                                                        "[1]",
                                                                                                                                                        41,
                                                                                                                                                        49) "}",
         49, 15},
        {"a name with escapes", "{\"a\\n\\u00e9\\\"\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, 1},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        char *directory = scratch_directory();
        write_shard(directory, "model.safetensors", good[i].header, good[i].data);
        Checkpoint checkpoint;
        bool ok = checkpoint_open(&checkpoint, directory, &error);
        CHECK(ok, "%s: %s", good[i].what, error.text);
        CHECK(!ok || arrlen(checkpoint.tensors) == good[i].tensors, "%s: %d tensors", good[i].what, good[i].tensors);
        if (ok) checkpoint_close(&checkpoint);
        free(directory);
    }
}

/* Files whose very outline is wrong: lengths, kinds of file, nesting. */
static void test_outlines(void) {
    Error error;
    char path[PATH_MAX], *directory = scratch_directory();
    check_refused(opens(directory, &error), &error, directory, "found 0", "no file at all");
    write_bytes(directory, "model.safetensors", "", 0);
    check_refused(opens(directory, &error), &error, "model.safetensors", "empty", "an empty file");
    write_bytes(directory, "model.safetensors", "\1\0\0", 3);
    check_refused(opens(directory, &error), &error, "model.safetensors", "too few", "three bytes");
    write_bytes(directory, "model.safetensors", "\3\0\0\0\0\0\0\0{}", 10);
    check_refused(opens(directory, &error), &error, "model.safetensors", "a header of 3 bytes", "a header longer than the file");
    write_bytes(directory, "model.safetensors", "\377\377\377\377\377\377\377\377{}", 10);
    check_refused(opens(directory, &error), &error, "model.safetensors", "a header of", "a header of 2^64 - 1 bytes");
    const uint64_t huge = (100 << 20) + 1;
    write_bytes(directory, "model.safetensors", &huge, 8);
    CHECK(!truncate(join(path, directory, "model.safetensors"), (off_t)huge + 100), "truncate");
    check_refused(opens(directory, &error), &error, "model.safetensors", "a header of", "a header of more than 100 MB");

    size_t depth = 1 << 20;
    char *nested = allocate_zeroed(depth + 8, 1);
    memset(nested, '[', depth);
    memcpy(nested, "{\"a\":", 5);
    write_shard(directory, "model.safetensors", nested, 0);
    check_refused(opens(directory, &error), &error, "model.safetensors", "malformed", "a million open brackets");
    free(nested);

    unlink(path);
    CHECK(!mkdir(path, 0700), "mkdir");
    check_refused(opens(directory, &error), &error, "model.safetensors", "not a regular file", "a directory in place of the file");
    rmdir(path);
    CHECK(!mkfifo(path, 0600), "mkfifo");
    check_refused(opens(directory, &error), &error, "model.safetensors", "not a regular file", "a pipe in place of the file");
    unlink(path);
    CHECK(!symlink("/nowhere/at/all", path), "symlink");
    CHECK(!opens(directory, &error), "a dangling link");
    unlink(path);
    write_shard(directory, "one.safetensors", "{}", 0);
    CHECK(opens(directory, &error), "the only safetensors file of a directory: %s", error.text);
    write_shard(directory, "two.safetensors", "{}", 0);
    check_refused(opens(directory, &error), &error, directory, "found 2", "two files without an index");
    check_refused(opens("/nowhere/at/all", &error), &error, "/nowhere/at/all", "", "no such directory");
    free(directory);
}

static void test_control_characters(void) {
    Error error;
    char *directory = scratch_directory();
    write_shard(directory, "model.safetensors", "{\"evil\\u001b[2J\\n\":5}", 0);
    CHECK(!opens(directory, &error), "refused");
    for (char *c = error.text; *c; c++) CHECK(!iscntrl((unsigned char)*c), "no control character reaches the terminal: %d", *c);
    free(directory);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Shards and their index
 */

static void test_index(void) {
    static const struct { const char *what, *index, *thing;
    } bad[] = {
        {"no JSON", "{", "malformed"},
        {"an array", "[]", "wanted an object"},
        {"no weight_map", "{}", "weight_map"},
        {"a weight_map that is an array", "{\"weight_map\":[]}", "weight_map"},
        {"a shard that is a number", "{\"weight_map\":{\"a\":1}}", "tensor a"},
        {"a shard without a name", "{\"weight_map\":{\"a\":\"\"}}", "tensor a"},
        {"an absent shard", "{\"weight_map\":{\"a\":\"absent.safetensors\"}}", "absent.safetensors"},
        {"a shard elsewhere", "{\"weight_map\":{\"a\":\"../1.safetensors\"}}", "tensor a"},
        {"an absolute path", "{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "tensor a"},
        {"the directory itself", "{\"weight_map\":{\"a\":\".\"}}", "/.: not a regular file"},
        {"a tensor in another shard",
         "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"1.safetensors\",\"c\":\"2.safetensors\"}}", "tensor b"},
        {"a tensor in no shard", "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\",\"z\":\"2.safetensors\"}}",
         "tensor z"},
        {"a tensor that two shards hold",
         "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\",\"c\":\"3.safetensors\"}}",
         "tensor a is there already"},
        {"the config as a shard", "{\"weight_map\":{\"a\":\"config.json\"}}", "config.json"},
    };
    Error error;
    char *directory = scratch_directory();
    write_shard(directory, "1.safetensors", "{" ENTRY("a", "F32", "[1]", 0, 4) "}", 4);
    write_shard(directory, "2.safetensors", "{" ENTRY("b", "F32", "[1]", 0, 4) "," ENTRY("extra", "F32", "[1]", 4, 8) "}", 8);
    write_shard(directory, "3.safetensors", "{" ENTRY("c", "F32", "[1]", 0, 4) "," ENTRY("a", "F32", "[1]", 4, 8) "}", 8);
    write_text(directory, "config.json", "{\"model_type\": \"qwen3\"}");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_text(directory, "model.safetensors.index.json", bad[i].index);
        check_refused(opens(directory, &error), &error, "", bad[i].thing, bad[i].what);
        CHECK(strstr(error.text, directory), "%s: the file is named in: %s", bad[i].what, error.text);
    }
    write_text(directory, "model.safetensors.index.json",
               "{\"metadata\":{},\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
    Checkpoint checkpoint;
    bool ok = checkpoint_open(&checkpoint, directory, &error);
    CHECK(ok && arrlen(checkpoint.files) == 2 && arrlen(checkpoint.tensors) == 3, "two shards open: %s", error.text);
    if (ok) {
        const Tensor *b = checkpoint_find(&checkpoint, "b");
        CHECK(b && b->file == 1 && b->dtype == DTYPE_F32 && b->rank == 1 && b->shape[0] == 1 && b->size == 4,
              "tensor b is as its shard says");
        CHECK(!checkpoint_find(&checkpoint, "no such tensor"), "an absent tensor is not found");
        checkpoint_close(&checkpoint);
    }
    free(directory);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * config.json and generation_config.json
 */

/* The fixture's config with one key, possibly inside an object ("rope_parameters.factor"), set to a JSON value or (NULL) removed. */
static cJSON *config_with(const char *fixture, const char *key, const char *value) {
    char path[PATH_MAX], outer[64];
    Error error;
    cJSON *json = json_read(join(path, fixture, "config.json"), MAX_JSON_FILE, &error), *object = json;
    if (!json) fprintf(stderr, "%s\n", error.text), exit(1);
    const char *dot = key ? strchr(key, '.') : NULL;
    if (dot) {
        snprintf(outer, sizeof outer, "%.*s", (int)(dot - key), key);
        object = cJSON_GetObjectItemCaseSensitive(json, outer);
        key = dot + 1;
    }
    if (key) cJSON_DeleteItemFromObjectCaseSensitive(object, key);
    if (key && value) {
        cJSON *item = cJSON_Parse(value);
        if (!item) fprintf(stderr, "the test's own JSON: %s\n", value), exit(1);
        cJSON_AddItemToObject(object, key, item);
    }
    return json;
}

static void write_json(const char *directory, const char *name, cJSON *json) {
    char *text = cJSON_Print(json);
    write_text(directory, name, text);
    cJSON_free(text);
    cJSON_Delete(json);
}

/* Whether the fixture's config with that one change is read; *config then is to be freed. */
static bool reads_with(const char *fixture, const char *key, const char *value, Config *config, Error *error) {
    char *directory = scratch_directory();
    write_json(directory, "config.json", config_with(fixture, key, value));
    bool ok = config_read(config, directory, error);
    free(directory);
    return ok;
}

static void check_config_refused(const char *fixture, const char *key, const char *value) {
    Config config;
    Error error;
    char what[256];
    const char *last = strchr(key, '.') ? strchr(key, '.') + 1 : key;
    bool ok = reads_with(fixture, key, value, &config, &error);
    snprintf(what, sizeof what, "%s with %s %s", fixture, key, value ? value : "missing");
    check_refused(ok, &error, "config.json", last, what);
    if (ok) config_free(&config);
    else CHECK(!config.indexer_full && !config.mlp_sparse && !config.compression && !config.hash_routed, "%s: a refused config leaves nothing behind", what);
}

static void check_config_read(const char *fixture, const char *key, const char *value) {
    Config config;
    Error error;
    bool ok = reads_with(fixture, key, value, &config, &error);
    CHECK(ok, "%s with %s %s: %s", fixture, key, value ? value : "missing", error.text);
    if (ok) config_free(&config);
}

static void test_config_numbers(void) {
    static const char *everywhere[] = {
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "intermediate_size"};
    static const char *latent[] = {"q_lora_rank",      "kv_lora_rank",        "qk_nope_head_dim",     "qk_rope_head_dim",
                                   "v_head_dim",       "index_n_heads",       "index_head_dim",       "index_topk",
                                   "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"};
    static const char *v4[] = {"vocab_size",  "hidden_size",   "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
                               "q_lora_rank", "o_lora_rank",   "o_groups",          "index_n_heads",       "index_head_dim",
                               "index_topk",  "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"};
    static const char *wrong[] = {NULL, "null", "\"64\"", "[64]", "true", "0", "-1", "1.5", "1e18", "1e400"};
    static const char *fixtures[] = {QWEN3, GLM, DEEPSEEK};
    for (size_t w = 0; w < sizeof wrong / sizeof *wrong; w++) {
        for (size_t i = 0; i < sizeof everywhere / sizeof *everywhere; i++)
            for (int f = 0; f < 3; f++) check_config_refused(fixtures[f], everywhere[i], wrong[w]);
        for (size_t i = 0; i < sizeof latent / sizeof *latent; i++)
            for (int f = 1; f < 3; f++) check_config_refused(fixtures[f], latent[i], wrong[w]);
        for (size_t i = 0; i < sizeof v4 / sizeof *v4; i++) {
            check_config_refused(V4, v4[i], wrong[w]);
            check_config_refused(V4_SAVED, v4[i], wrong[w]);
        }
    }
    static const struct { const char *fixture, *key, *value;
    } bad[] = {
        {QWEN3, "num_key_value_heads", "3"},
        {QWEN3, "num_key_value_heads", "0"},
        {QWEN3, "num_key_value_heads", "8"},
        {QWEN3, "num_key_value_heads", "\"2\""},
        {QWEN3, "head_dim", "0"},
        {QWEN3, "head_dim", "31"},
        {QWEN3, "head_dim", "2048"},
        {QWEN3, "rms_norm_eps", "-1"},
        {QWEN3, "rms_norm_eps", "\"x\""},
        {QWEN3, "use_sliding_window", "true"},
        {QWEN3, "attention_bias", "true"},
        {QWEN3, "attention_bias", "1"},
        {QWEN3, "hidden_act", "\"gelu\""},
        {QWEN3, "hidden_act", "3"},
        {QWEN3, "tie_word_embeddings", "\"yes\""},
        {QWEN3, "model_type", "\"llama\""},
        {QWEN3, "model_type", NULL},
        {QWEN3, "model_type", "7"},
        {GLM, "model_type", "\"glm5_next\""},
        {GLM, "qk_rope_head_dim", "15"},
        {GLM, "qk_rope_head_dim", "994"},
        {GLM, "kv_lora_rank", "1025"},
        {GLM, "index_head_dim", "8"},
        {GLM, "rope_interleave", "false"},
        {GLM, "indexer_rope_interleave", "1"},
        {GLM, "num_experts_per_tok", "9"},
        {GLM, "n_shared_experts", "-1"},
        {GLM, "n_group", "3"},
        {GLM, "n_group", "8"},
        {GLM, "topk_group", "2"},
        {DEEPSEEK, "topk_group", "0"},
        {DEEPSEEK, "num_experts_per_tok", "3"},
        {GLM, "routed_scaling_factor", "\"2\""},
        {GLM, "norm_topk_prob", "0"},
        {GLM, "scoring_func", "\"softmax\""},
        {GLM, "topk_method", "\"greedy\""},
        {GLM, "first_k_dense_replace", "-1"},
        {GLM, "moe_layer_freq", "2"},
        {GLM, "indexer_types", "[\"full\"]"},
        {GLM, "indexer_types", "\"full\""},
        {GLM, "indexer_types", "[\"full\",\"full\",\"shared\",\"full\",\"shared\",\"half\"]"},
        {GLM, "indexer_types", "[\"full\",\"full\",\"shared\",\"full\",\"shared\",1]"},
        {GLM, "indexer_types", "[\"shared\",\"full\",\"full\",\"full\",\"full\",\"full\"]"},
        {GLM, "mlp_layer_types", "[\"dense\"]"},
        {GLM, "mlp_layer_types", "[\"dense\",\"dense\",\"dense\",\"dense\",\"dense\",\"moe\"]"},
        {GLM, "mlp_layer_types", "3"},
        {DEEPSEEK, "quantization_config.quant_method", "\"awq\""},
        {DEEPSEEK, "quantization_config.fmt", "\"e5m2\""},
        {DEEPSEEK, "quantization_config.weight_block_size", "[64, 64]"},
        {DEEPSEEK, "quantization_config.weight_block_size", "[128]"},
        {DEEPSEEK, "quantization_config.weight_block_size", NULL},
        {DEEPSEEK, "quantization_config.weight_block_size", "128"},
        {DEEPSEEK, "rope_parameters.factor", NULL},
        {DEEPSEEK, "rope_parameters.factor", "0"},
        {DEEPSEEK, "rope_parameters.factor", "\"40\""},
        {DEEPSEEK, "rope_parameters.original_max_position_embeddings", NULL},
        {DEEPSEEK, "rope_parameters.original_max_position_embeddings", "0"},
        {DEEPSEEK, "rope_parameters.beta_fast", "-1"},
        {DEEPSEEK, "rope_parameters.beta_slow", "\"1\""},
        {DEEPSEEK, "rope_parameters.mscale", "[]"},
        {DEEPSEEK, "rope_parameters.truncate", "false"},
        {DEEPSEEK, "rope_parameters.rope_type", "\"llama3\""},
        {DEEPSEEK, "rope_parameters.rope_type", "7"},
        {DEEPSEEK, "rope_parameters.rope_theta", NULL},
        {QWEN3, "rope_parameters.rope_theta", "\"x\""},
        {QWEN3, "rope_parameters.rope_theta", "0"},
        {QWEN3, "rope_parameters.partial_rotary_factor", "0.5"},
        {V4, "model_type", "\"deepseek_v42\""},
        {V41, "model_type", "\"deepseek_v42\""},
        {V41, "quantization_config.weight_block_size", "[128, 128]"},
        {V41, "text_config.compress_ratios", "[0,2,2,1,1,1,4]"},
        {V41, "text_config.compress_ratios", "[0,2,2,1,1,1]"},
        {V41, "text_config.compress_ratios", "[0,2,1,1,1,1,1]"},
        {V41, "text_config.compress_ratios", "[2,2,2,1,1,1,1]"},
        {V41, "text_config.kv_source_layer_ids", "[1,9]"},
        {V41, "text_config.kv_source_layer_ids", "[3,1]"},
        {V41, "text_config.kv_source_layer_ids", "[1,3,4]"},
        {V41, "text_config.kv_source_layer_ids", NULL},
        {V41, "text_config.index_source_layer_ids", "[0,1,3,5]"},
        {V41, "text_config.index_source_layer_ids", "3"},
        {V41, "text_config.candidate_source_layer_id", "4"},
        {V41, "text_config.candidate_source_layer_id", "1"},
        {V41, "text_config.candidate_topk_blocks", "2"},
        {V41, "text_config.candidate_block_size", "0"},
        {V41, "text_config.engram_layer_ids", "[7]"},
        {V41, "text_config.engram_num_embeddings", "[]"},
        {V41, "text_config.engram_num_embeddings", "[0]"},
        {V41, "text_config.engram_max_ngram_size", "1"},
        {V41, "text_config.engram_pad_token_id", "192"},
        {V41, "text_config.engram_n_heads", NULL},
        {V4, "compress_ratios", NULL},
        {V4, "compress_ratios", "[0,128,8,128,4,0]"},
        {V4, "compress_ratios", "[0,128,4,128,4]"},
        {V4, "compress_ratios", "[0,128,4,128,4,\"0\"]"},
        {V4, "compress_ratios", "[0,128,4,128,4,1e300]"},
        {V4, "compress_ratios", "4"},
        {V4_SAVED, "layer_types", "[\"sliding_attention\"]"},
        {V4_SAVED, "layer_types",
         "[\"full_attention\",\"sliding_attention\",\"sliding_attention\",\"sliding_attention\",\"sliding_attention\",\"a\"]"},
        {V4_SAVED, "compress_rates.heavily_compressed_attention", "1"},
        {V4_SAVED, "compress_rates.compressed_sparse_attention", "512"},
        {V4_SAVED, "mlp_layer_types", "[\"moe\",\"moe\",\"moe\",\"moe\",\"moe\",\"dense\"]"},
        {V4, "num_hash_layers", "-1"},
        {V4, "num_key_value_heads", "2"},
        {V4, "head_dim", "2048"},
        {V4, "qk_rope_head_dim", "15"},
        {V4, "qk_rope_head_dim", "64"},
        {V4, "o_groups", "3"},
        {V4, "hc_mult", "9"},
        {V4, "sliding_window", "0"},
        {V4, "swiglu_limit", "-1"},
        {V4, "scoring_func", "\"sigmoid\""},
        {V4, "topk_method", "\"greedy\""},
        {V4, "expert_dtype", "\"int4\""},
        {V4, "n_group", "2"},
        {V4, "mlp_bias", "true"},
        {V4, "rope_scaling.type", "\"linear\""},
        {V4, "rope_scaling.factor", NULL},
        {V4, "compress_rope_theta", "\"x\""},
        {QWEN3, "eos_token_id", "-1"},
        {QWEN3, "eos_token_id", "1.5"},
        {QWEN3, "eos_token_id", "\"2\""},
        {QWEN3, "eos_token_id", "[1, \"2\"]"},
        {QWEN3, "eos_token_id", "[1, null]"},
        {QWEN3, "eos_token_id", "1e300"},
        {QWEN3, "eos_token_id", "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) check_config_refused(bad[i].fixture, bad[i].key, bad[i].value);
    static const struct { const char *fixture, *key, *value;
    } good[] = {
        {QWEN3, "rms_norm_eps", NULL},
        {QWEN3, "tie_word_embeddings", NULL},
        {QWEN3, "eos_token_id", "null"},
        {QWEN3, "eos_token_id", "[]"},
        {QWEN3, "eos_token_id", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"},
        {QWEN3, "a_key_of_the_future", "{\"a\": [1]}"},
        {QWEN3, "quantization_config", "null"},
        {GLM, "indexer_types", "[\"full\",\"full\",\"full\",\"full\",\"full\",\"full\",\"full\"]"},
        {GLM, "index_topk_pattern", "null"},
        {GLM, "n_group", "2"},
        {DEEPSEEK, "rope_parameters.mscale", NULL},
        {DEEPSEEK, "rope_parameters.beta_fast", NULL},
        {DEEPSEEK, "rope_parameters.truncate", "true"},
        {V4, "compress_ratios", "[0,128,4,128,4,0,0,0,0]"},
        {V4, "rope_scaling", NULL},
        {V41, "text_config.candidate_source_layer_id", NULL},
        {V41, "text_config.candidate_topk_blocks", "3"},
        {V41, "text_config.compress_ratios", "[0,2,2,1,1,1,1]"},
        {V4, "swiglu_limit", NULL},
        {V4_SAVED, "compress_rates", NULL},
        {QWEN3, "rope_parameters.rope_type", NULL},
        {QWEN3, "rope_parameters.partial_rotary_factor", "1.0"},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) check_config_read(good[i].fixture, good[i].key, good[i].value);
}

static void test_config_files(void) {
    static const struct { const char *what, *text, *thing;
    } bad[] = {
        {"an empty file", "", "malformed"},
        {"no JSON", "{\"model_type\": ", "malformed"},
        {"an array", "[]", "wanted an object"},
        {"a scalar", "3", "wanted an object"},
        {"trailing garbage", "{} {}", "follows its end"},
        {"an empty object", "{}", "model_type"},
        {"only a type", "{\"model_type\":\"qwen3\"}", "vocab_size"},
    };
    Error error;
    Config config;
    char *directory = scratch_directory();
    check_refused(config_read(&config, directory, &error), &error, "config.json", "No such file", "no config.json");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_text(directory, "config.json", bad[i].text);
        check_refused(config_read(&config, directory, &error), &error, "config.json", bad[i].thing, bad[i].what);
    }
    free(directory);
    bool ok = reads_with(GLM, "model_type", "\"deepseek_v5\"", &config, &error);
    check_refused(ok, &error, "config.json", "deepseek_v5", "a family that is not supported is named");
}

/* What config_read() makes of keys it can find in more than one place, and of keys that are not there (transformers' defaults). */
static void test_config_meaning(void) {
    Config config;
    Error error;
    char *directory = scratch_directory();
    cJSON *json = config_with(GLM, "rope_parameters", NULL);
    cJSON_AddNumberToObject(json, "rope_theta", 5e5);
    write_json(directory, "config.json", json);
    CHECK(config_read(&config, directory, &error) && config.rope.rope_theta == 5e5 && !config.rope.yarn,
          "rope_theta at the top: %s", error.text);
    config_free(&config);

    json = config_with(DEEPSEEK, "rope_parameters", NULL);
    cJSON_AddNumberToObject(json, "rope_theta", 12345);
    cJSON_AddItemToObject(
        json, "rope_scaling",
        cJSON_Parse(
            "{\"type\":\"yarn\",\"factor\":40,\"original_max_position_embeddings\":4096,\"mscale\":1,\"mscale_all_dim\":0.5}"));
    write_json(directory, "config.json", json);
    CHECK(config_read(&config, directory, &error) && config.rope.rope_theta == 12345 && config.rope.yarn
              && config.rope.factor == 40 && config.rope.beta_fast == 32 && config.rope.beta_slow == 1
              && config.rope.mscale_all_dim == 0.5 && config.rope.original_max_position_embeddings == 4096,
          "rope_scaling: %s", error.text);
    config_free(&config);

    json = config_with(GLM, "indexer_types", NULL);
    cJSON_DeleteItemFromObject(json, "index_topk_freq");
    cJSON_DeleteItemFromObject(json, "index_skip_topk_offset");
    cJSON_AddNumberToObject(json, "index_topk_freq", 4);
    cJSON_AddNumberToObject(json, "index_skip_topk_offset", 3);
    cJSON_ReplaceItemInObject(json, "num_hidden_layers", cJSON_CreateNumber(78));
    cJSON_DeleteItemFromObject(json, "mlp_layer_types");
    write_json(directory, "config.json", json);
    bool ok = config_read(&config, directory, &error);
    CHECK(ok, "GLM-5.2's schedule: %s", error.text);
    int full = 0;
    for (int i = 0; ok && i < 78; i++) {
        full += config.indexer_full[i];
        CHECK(config.indexer_full[i] == (i < 3 || (i >= 6 && i % 4 == 2)), "layer %d of GLM-5.2's schedule", i);
        CHECK(config.mlp_sparse[i] == (i >= 1), "first_k_dense_replace 1 at layer %d", i);
    }
    CHECK(full == 21, "21 full layers, found %d", full);
    config_free(&config);

    json = config_with(GLM, "indexer_types", NULL);
    cJSON_AddStringToObject(json, "index_topk_pattern", "FSSFSS");
    write_json(directory, "config.json", json);
    ok = config_read(&config, directory, &error);
    CHECK(ok && config.indexer_full[0] && !config.indexer_full[1] && !config.indexer_full[2] && config.indexer_full[3],
          "index_topk_pattern: %s", error.text);
    config_free(&config);
    static const char *patterns[] = {"FSS", "SFFFFF", "FSXFSS"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        json = config_with(GLM, "indexer_types", NULL);
        cJSON_AddStringToObject(json, "index_topk_pattern", patterns[i]);
        write_json(directory, "config.json", json);
        check_refused(config_read(&config, directory, &error), &error, "config.json", "", patterns[i]);
    }

    json = config_with(DEEPSEEK, "routed_scaling_factor", NULL);
    cJSON_DeleteItemFromObject(json, "n_shared_experts");
    cJSON_DeleteItemFromObject(json, "norm_topk_prob");
    write_json(directory, "config.json", json);
    ok = config_read(&config, directory, &error);
    CHECK(ok && config.routed_scaling_factor == 2.5f && config.n_shared_experts == 1 && config.norm_topk_prob
              && !config.indexer_rope_interleave && config.indexer_full[1],
          "DeepSeek's defaults: %s", error.text);
    config_free(&config);
    CHECK(reads_with(GLM, "rms_norm_eps", NULL, &config, &error) && config.rms_norm_eps == 1e-5f
              && config.indexer_rope_interleave,
          "GLM's defaults: %s", error.text);
    config_free(&config);
    CHECK(reads_with(QWEN3, "head_dim", NULL, &config, &error) && config.head_dim == 128, "Qwen3's head_dim: %s", error.text);
    config_free(&config);
    CHECK(reads_with(QWEN3, "num_key_value_heads", NULL, &config, &error) && config.num_key_value_heads == 4,
          "every head its own keys: %s", error.text);
    config_free(&config);
    free(directory);
}

static void test_generation_config(void) {
    static const struct { const char *text, *thing;
    } bad[] = {
        {"{", "malformed"},
        {"[]", "wanted an object"},
        {"{\"do_sample\": 1}", "do_sample"},
        {"{\"do_sample\": true, \"temperature\": \"hot\"}", "temperature"},
        {"{\"temperature\": -1}", "temperature"},
        {"{\"top_p\": 1.5}", "top_p"},
        {"{\"min_p\": -0.1}", "min_p"},
        {"{\"top_k\": -1}", "top_k"},
        {"{\"top_k\": 2.5}", "top_k"},
        {"{\"repetition_penalty\": 0}", "repetition_penalty"},
        {"{\"eos_token_id\": \"x\"}", "eos_token_id"},
    };
    Config config;
    Error error;
    char *directory = scratch_directory();
    write_json(directory, "config.json", config_with(QWEN3, "eos_token_id", "[5, 6]"));
    CHECK(config_read(&config, directory, &error) && config.temperature == 0 && config.top_p == 1 && config.top_k == 0
              && config.repetition_penalty == 1 && config.n_eos == 2,
          "without the file: greedy, nothing filtered: %s", error.text);
    config_free(&config);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_text(directory, "generation_config.json", bad[i].text);
        check_refused(config_read(&config, directory, &error), &error, "generation_config.json", bad[i].thing, bad[i].text);
    }
    write_text(directory, "generation_config.json",
               "{\"do_sample\":true,\"temperature\":0.6,\"top_p\":0.95,\"top_k\":20,\"eos_token_id\":[6,7],\"pad_token_id\":3}");
    CHECK(config_read(&config, directory, &error) && config.temperature == 0.6f && config.top_p == 0.95f && config.top_k == 20
              && config.n_eos == 3 && config.eos_token_id[0] == 5 && config.eos_token_id[2] == 7,
          "Qwen3's file: %s", error.text);
    config_free(&config);
    write_text(directory, "generation_config.json", "{\"do_sample\":false,\"temperature\":0.6,\"eos_token_id\":5}");
    CHECK(config_read(&config, directory, &error) && config.temperature == 0 && config.n_eos == 2,
          "do_sample false is greedy: %s", error.text);
    config_free(&config);
    free(directory);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Binding
 */

/* The header of a fixture's model.safetensors, and how many bytes of data follow it. */
static cJSON *read_header(const char *fixture, size_t *data_size) {
    char path[PATH_MAX], *bytes;
    size_t size;
    uint64_t length;
    Error error;
    if (!read_file(join(path, fixture, "model.safetensors"), 1 << 30, &bytes, &size, &error))
        fprintf(stderr, "%s\n", error.text), exit(1);
    memcpy(&length, bytes, 8);
    cJSON *header = cJSON_ParseWithLength(bytes + 8, length);
    *data_size = size - 8 - length;
    free(bytes);
    return header;
}

/* Writes the fixture's data behind the header that is there: tables of ids must hold some. */
static void write_data(const char *fixture, const char *directory, size_t data_size) {
    char path[PATH_MAX], *bytes;
    size_t size;
    Error error;
    if (!read_file(join(path, fixture, "model.safetensors"), 1 << 30, &bytes, &size, &error)) fprintf(stderr, "%s\n", error.text), exit(1);
    FILE *file = fopen(join(path, directory, "model.safetensors"), "r+b");
    if (!file || fseek(file, -(long)data_size, SEEK_END) || fwrite(bytes + size - data_size, 1, data_size, file) != data_size || fclose(file))
        perror(path), exit(1);
    free(bytes);
}

/* Whether the fixture's tensors bind when its header is replaced by this one (which is deleted). */
static bool binds(const char *fixture, const Config *config, cJSON *header, size_t data_size, Error *error) {
    char *directory = scratch_directory(), *text = cJSON_PrintUnformatted(header), path[PATH_MAX];
    Checkpoint checkpoint;
    Weights weights;
    write_shard(directory, "model.safetensors", text, data_size);
    if (config->hash_routed) write_data(fixture, directory, data_size);
    bool opened = checkpoint_open(&checkpoint, directory, error);
    CHECK(opened, "%s: the changed header is well formed: %s", fixture, error->text);
    bool ok = opened && weights_bind(&weights, &checkpoint, config, NULL, error);
    if (ok) weights_free(&weights);
    if (opened) checkpoint_close(&checkpoint);
    unlink(join(path, directory, "model.safetensors"));
    rmdir(directory);
    cJSON_free(text);
    cJSON_Delete(header);
    free(directory);
    return ok;
}

typedef enum Spoil { NOTHING, MISSING, INTEGERS, UNKNOWN_TYPE, EXTRA_DIM, OTHER_DIM, SPOILS } Spoil;

/* The header with one tensor spoiled, so that it is still a valid safetensors header. */
static cJSON *spoil_header(const cJSON *header, const char *name, Spoil spoil) {
    cJSON *copy = cJSON_Duplicate(header, true), *entry = cJSON_GetObjectItemCaseSensitive(copy, name);
    cJSON *shape = cJSON_GetObjectItemCaseSensitive(entry, "shape"), *dtype = cJSON_GetObjectItemCaseSensitive(entry, "dtype");
    const char *stored = dtype->valuestring, *integers = !strcmp(stored, "F32")    ? "I32"
                                                         : !strcmp(stored, "BF16") ? "I16"
                                                         : !strcmp(stored, "I64")  ? "F64"
                                                         : !strcmp(stored, "I32")  ? "F32"
                                                                                   : "F8_E5M2";
    cJSON *first = shape->child;
    switch (spoil) {
    case MISSING: cJSON_DeleteItemFromObjectCaseSensitive(copy, name); break;
    case INTEGERS: cJSON_SetValuestring(dtype, integers); break;
    case UNKNOWN_TYPE: cJSON_ReplaceItemInObject(entry, "dtype", cJSON_CreateString("F6_E3M2")); break;
    case EXTRA_DIM: cJSON_AddItemToArray(shape, cJSON_CreateNumber(1)); break;
    case OTHER_DIM: {                       /* one row less: the rest of the bytes are a gap */
        cJSON *end = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets")->child->next, *begin = end->prev;
        double bytes = end->valuedouble - begin->valuedouble;
        cJSON_SetNumberValue(end, begin->valuedouble + bytes / first->valuedouble * (first->valuedouble - 1));
        cJSON_SetNumberValue(first, first->valuedouble - 1);
        break;
    }
    default: break;
    }
    return copy;
}

/* Every tensor of a published checkpoint, or those of one layer and of none, spoiled in every way, is refused by its name. */
static void test_binding(const char *fixture, const char *layer) {
    static const char *names[SPOILS] = {
        "as it is", "missing", "of another type", "of an unknown type", "with a dim too many", "with another dim"};
    Config config;
    Error error;
    size_t data_size;
    cJSON *header = read_header(fixture, &data_size);
    bool ok = config_read(&config, fixture, &error);
    CHECK(ok, "%s", error.text);
    CHECK(binds(fixture, &config, cJSON_Duplicate(header, true), data_size, &error), "%s binds: %s", fixture, error.text);
    const cJSON *entry;
    cJSON_ArrayForEach(entry, header) {
        if (!strcmp(entry->string, "__metadata__")) continue;
        if (layer && strstr(entry->string, "layers.") && !strstr(entry->string, layer)) continue;
        if (!strncmp(entry->string, "mtp.", 4) || strstr(entry->string, "bias_vl")) continue;       /* of what is not run */
        for (Spoil spoil = MISSING; ok && spoil < SPOILS; spoil++) {
            char what[300];
            bool bound = binds(fixture, &config, spoil_header(header, entry->string, spoil), data_size, &error);
            snprintf(what, sizeof what, "%s: %s %s", fixture, entry->string, names[spoil]);
            check_refused(bound, &error, spoil == MISSING ? "/tmp/tide-test-" : "model.safetensors", entry->string, what);
            if (spoil == UNKNOWN_TYPE) CHECK(strstr(error.text, "F6_E3M2"), "%s: the type is named in %s", what, error.text);
        }
    }
    /* Tensors that the model does not use may be of any type. */
    cJSON *unused = cJSON_Duplicate(header, true);
    cJSON_AddItemToObject(unused, "model.layers.99.mtp.weight",
                          cJSON_Parse("{\"dtype\":\"F6_E3M2\",\"shape\":[3,5],\"data_offsets\":[0,0]}"));
    CHECK(binds(fixture, &config, unused, data_size, &error), "an unused tensor of unknown type: %s", error.text);
    cJSON_Delete(header);
    config_free(&config);
}

/* A follower's own indexer, should a file have one, is not looked at. */
static void test_follower_indexer_is_ignored(void) {
    Config config;
    Error error;
    size_t data_size;
    cJSON *header = read_header(GLM, &data_size);
    CHECK(config_read(&config, GLM, &error) && !config.indexer_full[2], "layer 2 of the fixture is a follower");
    cJSON_AddItemToObject(header, "model.layers.2.self_attn.indexer.wk.weight",
                          cJSON_Parse("{\"dtype\":\"I64\",\"shape\":[7],\"data_offsets\":[0,0]}"));
    cJSON *entry = cJSON_GetObjectItem(header, "model.layers.2.self_attn.indexer.wk.weight");
    cJSON_ReplaceItemInObject(entry, "shape", cJSON_Parse("[0]"));
    CHECK(binds(GLM, &config, header, data_size, &error), "a follower's indexer is ignored: %s", error.text);
    config_free(&config);
}

/* A token's experts are experts of the model, and different ones. */
static void test_hash_tables(void) {
    static const struct { const char *what; size_t entry; int64_t expert; } bad[] = {
        {"one expert too many", 11, 4}, {"a negative one", 0, -1}, {"one beyond every int", 383, (int64_t)1 << 40}, {"one twice", 1, -2}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char *directory = copy_checkpoint(V4_SAVED), name[] = "model.layers.1.ffn.gate.tid2eid";
        Engine engine;
        Error error;
        Checkpoint checkpoint;
        int64_t expert = bad[i].expert;
        if (!checkpoint_open(&checkpoint, directory, &error)) exit(1);
        if (expert == -2) memcpy(&expert, checkpoint_find(&checkpoint, name)->data, sizeof expert);     /* the same as its neighbour */
        checkpoint_close(&checkpoint);
        patch_tensor(directory, name, bad[i].entry * sizeof expert, &expert, sizeof expert);
        EngineOptions options = {.model = directory, .sessions = 1, .context = 32};
        bool ok = engine_open(&engine, &options, &error);
        check_refused(ok, &error, name, "names expert", bad[i].what);
        if (ok) engine_close(&engine);
        free(directory);
    }
}

/* Engram's constants are those that numpy and the reference make; a table of another size, a map that is not there, or that names what
 * is not, is refused. */
static void test_engram(void) {
    Error error;
    Engine engine;
    Checkpoint golden = {0};
    EngineOptions options = {.model = V41, .sessions = 1, .context = 32};
    bool ok = engine_open(&engine, &options, &error) && map_file(&golden, V41 "/golden.safetensors", &error);
    CHECK(ok, "%s", error.text);
    if (!ok) return;
    const EngramWeights *engram = engine.weights.layers[5].engram;
    CHECK(!memcmp(engram->multipliers, checkpoint_find(&golden, "engram.multipliers")->data, 4 * sizeof(int64_t)), "the multipliers");
    CHECK(!memcmp(engram->primes, checkpoint_find(&golden, "engram.primes")->data, 3 * sizeof(int64_t)), "the primes");
    checkpoint_close(&golden);
    engine_close(&engine);
    static const uint64_t released[2][4] = {{76632096046245, 4839876093313, 35959672319349, 73987337458391},
                                            {67716810739261, 51510806800915, 30921347202721, 82619226485591}};
    const Config release = {.engram_order = 4, .engram_n_heads = 8, .engram_compressed_vocab_size = 99092};
    int64_t prime = 16000000 - 1, rows[2];
    for (int i = 0; i < 2; i++) {
        EngramWeights made = {0};
        rows[i] = make_hashes(&made, &release, i ? 14 : 1, &prime);
        CHECK(!memcmp(made.multipliers, released[i], sizeof released[i]), "the release's multipliers, table %d", i);
    }
    CHECK(rows[0] == 384006168 && rows[1] == 384016682 && prime == 16000889, "the release's tables and their primes");

    char *directory = copy_checkpoint(V41);
    write_json(directory, "config.json", config_with(V41, "text_config.engram_num_embeddings", "[470]"));
    options.model = directory;
    check_refused(engine_open(&engine, &options, &error), &error, "engram_num_embeddings", "wanted 471", "a table of another size");
    free(directory);
    options.model = directory = copy_checkpoint(V41);
    const int beyond = 150;
    patch_tensor(directory, "engram.token_map", 0, &beyond, sizeof beyond);
    check_refused(engine_open(&engine, &options, &error), &error, "engram.token_map", "150", "a token that stands for none");
    free(directory);
}

/* The final norm's output for some rows of that checkpoint: [20, hidden]; the caller frees it. */
static float *run_some(const char *directory) {
    Engine engine;
    Error error;
    EngineOptions options = {.model = directory, .sessions = 1, .context = 140};
    Row rows[140];
    bool ok = engine_open(&engine, &options, &error);
    for (int i = 0; ok && i < 140; i++) rows[i] = (Row){0, i, (3 + 7 * i) % engine.config.vocab_size};
    ok = ok && run_rows(&engine, rows, 140, &error);
    CHECK(ok, "%s: %s", directory, error.text);
    size_t n = ok ? 140 * (size_t)engine.config.hidden_size : 0;
    float *normed = memcpy(allocate_zeroed(n + 1, sizeof(float)), engine.state.normed, n * sizeof(float));
    engine_close(&engine);
    return normed;
}

/* A config as published and as transformers would save it say the same. */
static void test_spellings(void) {
    char *directory = copy_checkpoint(V4);
    cJSON *json = config_with(V4, "compress_ratios", NULL);
    static const char *const gone[] = {"num_hash_layers", "qk_rope_head_dim", "rope_scaling", "rope_theta", "compress_rope_theta"};
    for (size_t i = 0; i < sizeof gone / sizeof *gone; i++) cJSON_DeleteItemFromObjectCaseSensitive(json, gone[i]);
    cJSON *saved = cJSON_Parse(
        "{\"layer_types\":[\"sliding_attention\",\"heavily_compressed_attention\",\"compressed_sparse_attention\","
        "\"heavily_compressed_attention\",\"compressed_sparse_attention\",\"sliding_attention\"],"
        "\"mlp_layer_types\":[\"hash_moe\",\"hash_moe\",\"moe\",\"moe\",\"moe\",\"moe\"],\"partial_rotary_factor\":0.5,"
        "\"rope_parameters\":{\"main\":{\"rope_type\":\"default\",\"rope_theta\":10000.0,\"partial_rotary_factor\":0.5},"
        "\"compress\":{\"rope_type\":\"yarn\",\"rope_theta\":160000.0,\"partial_rotary_factor\":0.5,\"factor\":16.0,"
        "\"original_max_position_embeddings\":64,\"beta_fast\":32,\"beta_slow\":1,\"attention_factor\":1.0}}}");
    for (cJSON *item; (item = saved->child);) {
        cJSON_DetachItemViaPointer(saved, item);
        cJSON_AddItemToObject(json, item->string, item);
    }
    cJSON_Delete(saved);
    write_json(directory, "config.json", json);
    float *published = run_some(V4), *other = run_some(directory);
    CHECK(!memcmp(published, other, 140 * 32 * sizeof(float)), "both spellings of a config give the same bits");
    free(published), free(other), free(directory);
}

/* The fixture with its data at every alignment: the hidden states are the same bits. */
static void test_alignment(const char *fixture) {
    Error error;
    char path[PATH_MAX], *bytes;
    size_t size;
    uint64_t length;
    float *first = NULL;
    if (!read_file(join(path, fixture, "model.safetensors"), 1 << 30, &bytes, &size, &error))
        fprintf(stderr, "%s\n", error.text), exit(1);
    memcpy(&length, bytes, 8);
    for (uint64_t pad = 0; pad < 8; pad++) {
        char *directory = scratch_directory(), *moved = allocate_zeroed(size + 8, 1);
        uint64_t longer = length + pad;
        memcpy(moved, &longer, 8);
        memcpy(moved + 8, bytes + 8, length);
        memset(moved + 8 + length, ' ', pad);
        memcpy(moved + 8 + longer, bytes + 8 + length, size - 8 - length);
        write_bytes(directory, "model.safetensors", moved, size + pad);
        copy_file(fixture, directory, "config.json");
        Engine engine;
        EngineOptions options = {.model = directory, .sessions = 1, .context = 32, .kv_dtype = KV_F32};
        bool ok = engine_open(&engine, &options, &error);
        Row rows[20];
        for (int i = 0; i < 20; i++) rows[i] = (Row){0, i, 3 + 7 * i};      /* below every fixture's vocabulary */
        ok = ok && run_rows(&engine, rows, 20, &error);
        CHECK(ok, "%s, header %d bytes longer: %s", fixture, (int)pad, error.text);
        size_t n = ok ? 20 * (size_t)engine.config.hidden_size : 0;
        if (ok && pad == 0) first = memcpy(allocate_zeroed(n, sizeof(float)), engine.state.normed, n * sizeof(float));
        if (ok && first)
            CHECK(!memcmp(first, engine.state.normed, n * sizeof(float)), "%s, header %d bytes longer: the same bits", fixture,
                  (int)pad);
        engine_close(&engine);
        free(moved);
        free(directory);
    }
    free(first);
    free(bytes);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * The memory plan
 */

static bool plans(const char *directory, int sessions, int context, size_t budget, Error *error) {
    Engine engine;
    EngineOptions options = {
        .model = directory, .sessions = sessions, .context = context, .kv_dtype = KV_BF16, .kv_budget = budget};
    bool ok = engine_open(&engine, &options, error);
    if (ok) CHECK(!budget || engine.cache.bytes <= budget, "%d rows: the cache stays in its budget", context);
    else
        CHECK(!engine.cache.block && !engine.cache.host_block && !engine.cache.session && !engine.config.indexer_full && !engine.checkpoint.files,
              "a refused engine leaves nothing behind");
    engine_close(&engine);
    return ok;
}

static void test_memory_plan(void) {
    Error error;
    char *weightless = scratch_directory();
    copy_file(GLM, weightless, "config.json");
    write_shard(weightless, "model.safetensors", "{}", 0);
    bool fitted = true;
    int refused = 0;
    for (int context = 16; context <= 4096; context *= 2) {
        bool ok = plans(GLM, 2, context, 600 << 10, &error);
        CHECK(!ok || fitted, "a context of %d fits only where the smaller ones do", context);
        if (ok) continue;
        fitted = false;
        refused++;
        check_refused(ok, &error, GLM, "--kv-budget", "a context that does not fit");
        CHECK(!plans(weightless, 2, context, 600 << 10, &error) && strstr(error.text, "--kv-budget"),
              "the refusal comes before a weight is read: %s", error.text);
    }
    CHECK(refused >= 3 && refused <= 7, "some contexts fit and some do not: %d refused", refused);
    check_refused(plans(GLM, 1, 4097, 0, &error), &error, GLM, "max_position_embeddings", "a context beyond the model's");
    CHECK(plans(GLM, 1, 4096, 0, &error), "the model's own limit: %s", error.text);
    check_refused(plans(GLM, MAX_PASS_ROWS + 1, 16, 0, &error), &error, "", "too many", "more sessions than a pass has rows");

    write_json(weightless, "config.json", config_with(GLM, "max_position_embeddings", "16777216"));
    check_refused(plans(weightless, 128, 1 << 24, 0, &error), &error, "", "too many", "more rows than an int counts");
    check_refused(plans(weightless, 127, 1 << 24, 0, &error), &error, weightless, "MB", "more memory than there is");
    cJSON *json = config_with(GLM, "vocab_size", "4194304");
    cJSON_ReplaceItemInObject(json, "hidden_size", cJSON_CreateNumber(1 << 18));
    cJSON_ReplaceItemInObject(json, "v_head_dim", cJSON_CreateNumber(1 << 18));
    cJSON_ReplaceItemInObject(json, "num_attention_heads", cJSON_CreateNumber(1024));
    write_json(weightless, "config.json", json);
    check_refused(plans(weightless, 1, 4096, 0, &error), &error, weightless, "MB", "activations larger than the memory");
    free(weightless);
}

#ifndef __SANITIZE_ADDRESS__
/* Pages of this program's address space. */
static size_t pages_taken(void) {
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%zu", &pages) != 1) pages = 0;
    if (file) fclose(file);
    return pages;
}

/* Under a limit on the address space (ulimit -v), 64 MB more than there is by now, the program says so, and does not crash. */
static void test_address_space_limit(void) {
    const rlim_t most = (rlim_t)pages_taken() * (rlim_t)sysconf(_SC_PAGESIZE) + (64 << 20);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        Error error;
        struct rlimit limit = {most, most};
        Engine engine;
        EngineOptions options = {.model = GLM, .sessions = 32, .context = 4096, .kv_dtype = KV_F32};
        setrlimit(RLIMIT_AS, &limit);
        _exit(engine_open(&engine, &options, &error) ? 1 : strstr(error.text, "MB") ? 0 : 2);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a limit is named, status %d", status);
}
#endif

int main(void) {
    test_headers();
    test_outlines();
    test_control_characters();
    test_index();
    test_config_numbers();
    test_config_files();
    test_config_meaning();
    test_generation_config();
    test_binding(QWEN3, NULL);
    test_binding(GLM, NULL);
    test_binding(DEEPSEEK, NULL);
    test_binding(V4, "layers.0.");                      /* with its tid2eid */
    test_binding(V4, "layers.2.");
    test_binding(V4_SAVED, "layers.1.");
    test_binding(V41, "layers.3.");
    test_binding(V41, "layers.5.");
    test_engram();
    test_hash_tables();
    test_spellings();
    test_follower_indexer_is_ignored();
    test_alignment(QWEN3);
    test_alignment(GLM);
    test_alignment(DEEPSEEK);
    test_alignment(V4);
    test_alignment(V41);
    test_memory_plan();
#ifndef __SANITIZE_ADDRESS__
    test_address_space_limit();
#endif
    return check_report();
}
