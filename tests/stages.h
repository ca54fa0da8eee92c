/* stages.h: DeepSeek-V4's draft stages, of files that join tests/fixtures/deepseek_v4-a. Include after engine.c. */
#ifndef TIDE_STAGES_H
#define TIDE_STAGES_H

#include "scratch.h"

#define STAGES_TARGET "tests/fixtures/deepseek_v4-a"
#define STAGES "tests/fixtures/deepseek_v4-stages"

/* A checkpoint of two shards, the target and those stages, and a config.json that has `keys` too. The caller frees the name. */
static char *join_stages(const char *kind, const char *keys) {
    char *directory = scratch_directory(), path[PATH_MAX], name[64];
    static const char *const shards[] = {"model.safetensors", "stages.safetensors"};
    Error error;
    cJSON *index = cJSON_CreateObject(), *map = cJSON_AddObjectToObject(index, "weight_map"),
          *config = json_read(join(path, STAGES_TARGET, "config.json"), MAX_JSON_FILE, &error), *more = cJSON_Parse(keys);
    snprintf(name, sizeof name, "%s.safetensors", kind);
    for (int i = 0; i < 2; i++) {
        Checkpoint part = {.directory = directory};
        char *bytes;
        size_t size;
        join(path, i ? STAGES : STAGES_TARGET, i ? name : shards[0]);
        if (!read_file(path, (size_t)1 << 30, &bytes, &size, &error) || !map_file(&part, path, &error))
            fprintf(stderr, "%s\n", error.text), exit(1);
        write_bytes(directory, shards[i], bytes, size);
        for (size_t t = 0; t < arrlenu(part.tensors); t++) cJSON_AddStringToObject(map, part.tensors[t].name, shards[i]);
        free(bytes);
        part.directory = NULL;
        checkpoint_close(&part);
    }
    for (cJSON *item = more->child; item; item = item->next) {
        cJSON_DeleteItemFromObject(config, item->string);
        cJSON_AddItemToObject(config, item->string, cJSON_Duplicate(item, true));
    }
    char *text = cJSON_PrintUnformatted(index), *config_text = cJSON_PrintUnformatted(config);
    write_text(directory, "model.safetensors.index.json", text);
    write_text(directory, "config.json", config_text);
    free(text), free(config_text), cJSON_Delete(index), cJSON_Delete(config), cJSON_Delete(more);
    return directory;
}

/* num_nextn_predict_layers is 1 in both, as published; the ratios go on with zeros for the stages. */
static const char dspark_keys[] = "{\"num_nextn_predict_layers\": 1, \"compress_ratios\": [0, 128, 4, 128, 4, 0, 0, 0], "
                                  "\"dspark_block_size\": 5, \"dspark_noise_token_id\": 172, \"dspark_target_layer_ids\": [2, 4, 5], "
                                  "\"dspark_markov_rank\": 16}",
                  mtp_keys[] = "{\"num_nextn_predict_layers\": 1}";

#endif
