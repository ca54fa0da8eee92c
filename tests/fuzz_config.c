/* fuzz_config.c: libFuzzer target for config.json and generation_config.json.
 *
 *     make fuzz
 *
 * The input is a config.json and, behind a NUL byte, a generation_config.json. Where a config is accepted, its memory is planned for
 * several contexts and its tensors are looked up by name in an empty checkpoint: whatever passed must be fit to be computed with.
 * Run from the repository's root.
 */
#include "../engine.c"
#include "../backend.c"

#define SEEDS "build/corpus-fuzz_config"

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    static const char *fixtures[] = {"qwen3-a", "glm_moe_dsa-a", "deepseek_v32-c", "deepseek_v4-a", "deepseek_v4-c", "deepseek_v41-a", "deepseek_v41-c"};
    static const char generation[] = "{\"do_sample\":true,\"temperature\":0.6,\"top_p\":0.9,\"top_k\":20,\"min_p\":0.1,\"repetition_penalty\":1.1,\"eos_token_id\":[1,2]}";
    for (size_t i = 0; i < sizeof fixtures / sizeof *fixtures; i++) {
        char path[PATH_MAX], directory[PATH_MAX], *text;
        size_t length;
        Error error;
        if (!read_file(join(path, join(directory, "tests/fixtures", fixtures[i]), "config.json"), 1 << 20, &text, &length, &error)) continue;
        FILE *file = fopen(join(path, SEEDS, fixtures[i]), "wb");
        if (file) {
            fwrite(text, 1, length + 1, file);
            fputs(generation, file);
            fclose(file);
        }
        free(text);
    }
    return 0;
}

static void plan(const Config *config, int sessions, int context) {
    Error error;
    Engine engine = {.backend = &c_backend, .config = *config};
    EngineOptions options = {.model = "fuzz", .sessions = sessions, .context = context, .kv_dtype = (KvDtype)(context % 3),
                             .kv_mode = (KvMode)(sessions % 3)};
    bool ok = plan_memory(&engine, &options, &error);
    const Cache *cache = &engine.cache;
    if (ok && (!cache->bytes || !engine.state.bytes || cache->context < 1 || cache->device_pages.n_pages < 2)) abort();
    if (ok && cache->mode != MODE_RESIDENT && (cache->hot_rows < cache->index_topk || cache->host_pages.n_pages < 2)) abort();
    if (ok) {                                       /* the least that it names is enough, and it is the least */
        options.kv_budget = cache->least_bytes, options.host_budget = cache->least_host_bytes;
        free_cache(&engine.cache);
        engine = (Engine){.backend = &c_backend, .config = *config};
        if (!plan_memory(&engine, &options, &error) || engine.cache.bytes > options.kv_budget) abort();
        if (options.host_budget && engine.cache.host_bytes > options.host_budget) abort();
        free_cache(&engine.cache);
        engine = (Engine){.backend = &c_backend, .config = *config};
        options.kv_budget--;
        if (plan_memory(&engine, &options, &error)) abort();
    }
    free_cache(&engine.cache);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *end = memchr(data, 0, size);
    size_t length = end ? (size_t)(end - data) : size;
    Error error = {""};
    Config config = {0};
    cJSON *json = json_parse((const char *)data, length, "fuzz", &error), *generation = NULL;
    Fields fields = {.object = json, .path = "fuzz", .error = &error};
    if (cJSON_IsObject(json)) read_config(&config, &fields);
    else fields.failed = true;
    if (!fields.failed && end) generation = json_parse((const char *)end + 1, size - length - 1, "fuzz", &error);
    fields.object = generation;
    if (cJSON_IsObject(generation)) read_generation_config(&config, &fields);
    if (fields.failed && json && cJSON_IsObject(json) && (!*error.text || strchr(error.text, '\n'))) abort();
    if (!fields.failed) {
        plan(&config, 1, 0);
        plan(&config, 512, 1);
        plan(&config, 7, 4096);
        plan(&config, 128, 1 << 24);
        Checkpoint empty = {.directory = copy_string("fuzz")};
        Weights weights;
        if (weights_bind(&weights, &empty, &config, NULL, &error)) abort();
        checkpoint_close(&empty);
        if (config.n_eos < 0 || config.n_eos > 16) abort();
        if (has_latent_attention(&config) && !config.indexer_full[0]) abort();
        for (int i = 0; config.source && i < config.num_hidden_layers; i++)
            if (config.source[i] >= config.n_sources || (config.selects[i] && config.source[i] < 0)) abort();
    }
    config_free(&config);
    cJSON_Delete(json);
    cJSON_Delete(generation);
    return 0;
}
