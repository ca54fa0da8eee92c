/* fuzz_safetensors.c: libFuzzer target for safetensors files and for binding what they hold.
 *
 *     make fuzz
 *
 * The input is a whole file, in memory instead of a mapping. Where its header is accepted, every tensor's bytes must lie inside it (they
 * are all read), and the tensors are bound as a tiny qwen3 model. Run from the repository's root.
 */
#include "../engine.c"
#include "../backend.c"

#define SEEDS "build/corpus-fuzz_safetensors"

static Config tiny_config(void) {
    return (Config){.family = FAMILY_QWEN3, .model_type = "qwen3", .vocab_size = 3, .hidden_size = 2, .intermediate_size = 3, .num_hidden_layers = 1,
                    .num_attention_heads = 1, .num_key_value_heads = 1, .head_dim = 2, .max_position_embeddings = 8};
}

static void write_seed(const char *name, const char *header, size_t data_size) {
    char path[PATH_MAX];
    uint64_t length = strlen(header);
    FILE *file = fopen(join(path, SEEDS, name), "wb");
    if (!file) return;
    fwrite(&length, 8, 1, file);
    fputs(header, file);
    for (size_t i = 0; i < data_size; i++) fputc((int)i, file);
    fclose(file);
}

/* A file that binds, with each dtype a matrix may have, and one with nothing but metadata. */
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    static const struct { const char *name; int rows, cols; } tensors[] = {
        {"model.embed_tokens.weight", 3, 2}, {"model.norm.weight", 2, 0}, {"lm_head.weight", 3, 2}, {"model.layers.0.input_layernorm.weight", 2, 0},
        {"model.layers.0.post_attention_layernorm.weight", 2, 0}, {"model.layers.0.self_attn.q_proj.weight", 2, 2},
        {"model.layers.0.self_attn.k_proj.weight", 2, 2}, {"model.layers.0.self_attn.v_proj.weight", 2, 2}, {"model.layers.0.self_attn.o_proj.weight", 2, 2},
        {"model.layers.0.self_attn.q_norm.weight", 2, 0}, {"model.layers.0.self_attn.k_norm.weight", 2, 0}, {"model.layers.0.mlp.gate_proj.weight", 3, 2},
        {"model.layers.0.mlp.up_proj.weight", 3, 2}, {"model.layers.0.mlp.down_proj.weight", 2, 3}, {"model.layers.0.mlp.down_proj.weight_scale_inv", 1, 1},
    };
    for (int dtype = 0; dtype < 4; dtype++) {
        static const char *names[] = {"F32", "BF16", "F16", "F8_E4M3"};
        char header[4096] = "{\"__metadata__\":{\"format\":\"pt\"}";
        size_t at = 0;
        for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
            bool quantised = dtype == 3 && !strcmp(tensors[i].name, "model.layers.0.mlp.down_proj.weight");
            const char *type = quantised ? names[3] : names[dtype % 3];
            size_t size = (size_t)(tensors[i].rows * (tensors[i].cols ? tensors[i].cols : 1)) * dtype_size(dtype_by_name(type));
            char shape[32], entry[256];
            snprintf(shape, sizeof shape, tensors[i].cols ? "[%d,%d]" : "[%d]", tensors[i].rows, tensors[i].cols);
            snprintf(entry, sizeof entry, ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}", tensors[i].name, type, shape, at, at + size);
            strcat(header, entry);
            at += size;
        }
        strcat(header, "}");
        write_seed(names[dtype], header, at);
    }
    write_seed("metadata", "{\"__metadata__\":{}}", 0);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    unsigned sum = 0;
    Checkpoint checkpoint = {.directory = copy_string("fuzz")};
    MappedFile mapped = {copy_string("fuzz/model.safetensors"), data, size};
    Error error;
    arrput(checkpoint.files, mapped);
    if (parse_safetensors(&checkpoint, 0, &error)) {
        for (size_t i = 0; i < arrlenu(checkpoint.tensors); i++) {
            const Tensor *tensor = &checkpoint.tensors[i];
            if (tensor->data < data || tensor->size > size || tensor->data + tensor->size > data + size) abort();
            for (size_t b = 0; b < tensor->size; b++) sum = sum * 31 + tensor->data[b];
            if (checkpoint_find(&checkpoint, tensor->name) != tensor) abort();
        }
        Config config = tiny_config();
        Weights weights;
        if (weights_bind(&weights, &checkpoint, &config, NULL, &error)) weights_free(&weights);
        else if (!*error.text || strchr(error.text, '\n')) abort();
    } else if (!*error.text || strchr(error.text, '\n')) abort();
    free(mapped.path);
    arrfree(checkpoint.files);                      /* there is no mapping to undo */
    checkpoint_close(&checkpoint);
    __asm__ volatile("" : : "r"(sum));              /* the bytes were read for a reason */
    return 0;
}
