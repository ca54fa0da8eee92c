/* engine.c: the pipeline, from the files on disk to the text of a session, top to bottom in the order data flows.
 *
 *     errors and memory . JSON . safetensors . config . weights . memory plan . the KV hierarchy . forward . drafters .
 *     opening an engine . lengths of verification . sessions and rounds . sessions at rest
 *
 * engine.h defines the vocabulary; backend.c (and engine.cu) are the operations that the pipeline is made of; tokenizer.c turns
 * text into ids and back; tide.c is the program around them.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#define STB_DS_IMPLEMENTATION
#include <stb/stb_ds.h>
#undef STB_DS_IMPLEMENTATION

/* =====================================================================================================================
 * Errors and memory
 *
 * Owns: the one-line error, and every allocation of the program. An allocation either succeeds or ends the program, so no
 * caller carries a path for it. While a pass is in flight allocation is forbidden: everything a pass needs was planned,
 * and the guard turns a forgotten exception into an immediate message instead of a slow leak.
 */

static bool allocation_forbidden;

static void out_of_memory(size_t size) {
    fprintf(stderr, "tide: out of memory: %zu bytes were not to be had\n", size);
    exit(1);
}

static void check_allocation_allowed(void) {
    if (!allocation_forbidden) return;
    fputs("tide: internal error: memory was requested inside a pass\n", stderr);
    abort();
}

void *checked_realloc(void *block, size_t size) {
    check_allocation_allowed();
    void *grown = realloc(block, size);
    if (!grown && size) out_of_memory(size);
    return grown;
}

void *allocate_zeroed(size_t count, size_t size) {
    check_allocation_allowed();
    void *block = calloc(count ? count : 1, size ? size : 1);
    if (!block) out_of_memory(count * size);
    return block;
}

char *copy_string(const char *text) {
    size_t size = strlen(text) + 1;
    return memcpy(allocate_zeroed(size, 1), text, size);
}

char *replace_controls(char *text) {
    for (char *c = text; *c; c++) {
        bool wide = (unsigned char)c[0] == 0xc2 && (unsigned char)c[1] >= 0x80
                    && (unsigned char)c[1] < 0xa0;  /* U+0080 to U+009F are two bytes */
        if (wide || iscntrl((unsigned char)*c)) *c = '?';
        if (wide) *++c = '?';
    }
    return text;
}

bool fail(Error *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    replace_controls(error->text);
    return false;
}

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

bool read_file(const char *path, size_t limit, char **data, size_t *length, Error *error) {
    int file = open(path, O_RDONLY);
    if (file < 0) return fail(error, "%s: %s", path, strerror(errno));
    char *buffer = NULL;
    size_t used = 0, capacity = 0;
    for (;;) {                                      /* works for pipes as well, whose size is not known beforehand */
        if (used + 1 >= capacity) buffer = checked_realloc(buffer, capacity = capacity ? 2 * capacity : 1 << 16);
        ssize_t n = read(file, buffer + used, capacity - used - 1);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0 || (used += (size_t)n) > limit) {
            bool failed = n < 0 || used > limit;
            if (n < 0) fail(error, "%s: %s", path, strerror(errno));
            else if (failed) fail(error, "%s: larger than the limit of %zu bytes", path, limit);
            close(file);
            if (failed) { free(buffer); return false; }
            break;
        }
    }
    buffer[used] = 0;
    *data = buffer;
    *length = used;
    return true;
}

static int larger(int a, int b) { return a > b ? a : b; }

/* a * b, or false when that does not fit. */
static bool multiply(size_t a, size_t b, size_t *product) { return !__builtin_mul_overflow(a, b, product); }

uint64_t load_u64(const uint8_t in[8]) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) value |= (uint64_t)in[i] << 8 * i;
    return value;
}

void store_u64(uint8_t out[8], uint64_t value) {
    for (int i = 0; i < 8; i++) out[i] = (uint8_t)(value >> 8 * i);
}

const char *join(char buffer[PATH_MAX], const char *directory, const char *name) {
    if (snprintf(buffer, PATH_MAX, "%s/%s", directory, name) >= PATH_MAX) buffer[0] = 0; /* too long to exist: opening it fails */
    return buffer;
}

/* =====================================================================================================================
 * JSON
 *
 * Owns: reading a JSON file with cJSON, and typed access to an object's fields. A Fields reader remembers its first
 * failure, so that a long run of reads is checked once at its end. Values are bounded where they are read; code below
 * never meets a count it cannot multiply.
 */

/* Where the text holds an escaped NUL, at which cJSON's strings would end unnoticed; NULL: nowhere. */
static const char *find_escaped_nul(const char *text, size_t length) {
    for (const char *at = text; (at = memmem(at, length - (size_t)(at - text), "\\u0000", 6)); at++) {
        const char *first = at;
        while (first > text && first[-1] == '\\') first--;
        if ((at - first) % 2 == 0) return at;       /* not the end of an escaped backslash */
    }
    return NULL;
}

struct cJSON *json_parse(const char *text, size_t length, const char *name, Error *error) {
    size_t valid = utf8_valid(text, length);
    if (valid < length) {
        fail(error, "%s: malformed JSON: byte %zu is not UTF-8", name, valid);
        return NULL;
    }
    const char *end = find_escaped_nul(text, length);
    if (end) {
        fail(error, "%s: the string at byte %zu holds \\u0000, which tide does not take", name, (size_t)(end - text));
        return NULL;
    }
    cJSON *json = cJSON_ParseWithLengthOpts(text, length, &end, false);
    if (!json) {
        fail(error, "%s: malformed JSON near byte %zu of %zu", name, end ? (size_t)(end - text) : 0, length);
        return NULL;
    }
    while (end < text + length && (isspace((unsigned char)*end) || !*end)) end++;
    if (end == text + length) return json;
    fail(error, "%s: malformed JSON: something follows its end at byte %zu", name, (size_t)(end - text));
    cJSON_Delete(json);
    return NULL;
}

static cJSON *json_read(const char *path, size_t limit, Error *error) {
    char *text;
    size_t length;
    if (!read_file(path, limit, &text, &length, error)) return NULL;
    cJSON *json = json_parse(text, length, path, error);
    free(text);
    if (!json || cJSON_IsObject(json)) return json;
    fail(error, "%s: found a JSON %s, wanted an object", path, cJSON_IsArray(json) ? "array" : "scalar");
    cJSON_Delete(json);
    return NULL;
}

cJSON *json_ids(const int *ids, int n) { return n ? cJSON_CreateIntArray(ids, n) : cJSON_CreateArray(); }

bool json_size(const cJSON *item, size_t *value) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble <= 9007199254740992.0)) return false;
    *value = (size_t)item->valuedouble;
    return (double)*value == item->valuedouble;
}

const cJSON *field(const Fields *fields, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(fields->object, key);
    return cJSON_IsNull(item) ? NULL : item;
}

void field_failed(Fields *fields, const char *key, const cJSON *found, const char *wanted) {
    if (fields->failed) return;
    fields->failed = true;
    char *text = found ? cJSON_PrintUnformatted(found) : NULL;
    fail(fields->error, "%s: %s: found %.100s, wanted %s", fields->path, key, text ? text : "nothing", wanted);
    cJSON_free(text);
}

double read_number(Fields *fields, const char *key, double low, double high, double fallback) {
    const cJSON *item = field(fields, key);
    if (!item && fallback != REQUIRED) return fallback;
    if (cJSON_IsNumber(item) && item->valuedouble >= low && item->valuedouble <= high) return item->valuedouble;
    char wanted[80];
    snprintf(wanted, sizeof wanted, "a number from %g to %g", low, high);
    field_failed(fields, key, item, wanted);
    return low;
}

int read_int(Fields *fields, const char *key, int low, int high, int fallback) {
    const cJSON *item = field(fields, key);
    if (!item && fallback != REQUIRED) return fallback;
    double value = cJSON_IsNumber(item) ? item->valuedouble : NAN;
    if (value >= low && value <= high && value == (int)value) return (int)value;
    char wanted[80];
    snprintf(wanted, sizeof wanted, "an integer from %d to %d", low, high);
    field_failed(fields, key, item, wanted);
    return low;
}

bool read_bool(Fields *fields, const char *key, bool fallback) {
    const cJSON *item = field(fields, key);
    if (!item) return fallback;
    if (cJSON_IsBool(item)) return cJSON_IsTrue(item);
    field_failed(fields, key, item, "true or false");
    return fallback;
}

/* The key, where it is there at all, must have this string value: tide implements nothing else. */
static void require_string(Fields *fields, const char *key, const char *value) {
    const cJSON *item = field(fields, key);
    if (item && !(cJSON_IsString(item) && !strcmp(item->valuestring, value))) field_failed(fields, key, item, value);
}

/* =====================================================================================================================
 * Safetensors
 *
 * Owns: the mapped files and the table of tensors. A file is a little-endian u64 header length, a JSON object
 * {name: {"dtype", "shape", "data_offsets"}} and the data. Everything in it is untrusted: lengths are compared before they
 * are added, products are checked, no two tensors may share a byte. Nothing of the data is read.
 */

static const char *const dtype_names[DTYPE_COUNT] = {
    [DTYPE_UNKNOWN] = "unknown",  [DTYPE_BOOL] = "BOOL",         [DTYPE_U8] = "U8",           [DTYPE_I8] = "I8",
    [DTYPE_U16] = "U16",          [DTYPE_I16] = "I16",           [DTYPE_U32] = "U32",         [DTYPE_I32] = "I32",
    [DTYPE_U64] = "U64",          [DTYPE_I64] = "I64",           [DTYPE_F8_E4M3] = "F8_E4M3", [DTYPE_F8_E5M2] = "F8_E5M2",
    [DTYPE_F8_E8M0] = "F8_E8M0",  [DTYPE_F16] = "F16",           [DTYPE_BF16] = "BF16",       [DTYPE_F32] = "F32",
    [DTYPE_F64] = "F64",          [DTYPE_F4_E2M1] = "F4_E2M1",
};

enum { SAFETENSORS_MAX_HEADER = 100 << 20 };

static DType dtype_by_name(const char *name) {
    for (int d = DTYPE_UNKNOWN + 1; d < DTYPE_COUNT; d++)
        if (!strcmp(dtype_names[d], name)) return (DType)d;
    return DTYPE_UNKNOWN;
}

const char *shape_text(char buffer[128], int rank, const int64_t *shape) {
    int used = snprintf(buffer, 128, "[");
    for (int i = 0; i < rank && used < 100; i++)
        used += snprintf(buffer + used, 128 - (size_t)used, "%s%" PRId64, i ? ", " : "", shape[i]);
    snprintf(buffer + used, 128 - (size_t)used, "]");
    return buffer;
}

/* One header entry into *tensor, with its range [*begin, *end) inside the data part. */
static bool tensor_parse(Tensor *tensor, const cJSON *entry, size_t data_size, size_t *begin, size_t *end, const char *path,
                         Error *error) {
    const char *name = entry->string;
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(entry, "dtype"), *dim;
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(entry, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
    if (!cJSON_IsString(dtype) || !cJSON_IsArray(shape) || !cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2)
        return fail(error, "%s: tensor %.200s: needs dtype, shape and two data_offsets", path, name);
    snprintf(tensor->dtype_name, sizeof tensor->dtype_name, "%s", dtype->valuestring);
    tensor->dtype = dtype_by_name(dtype->valuestring);
    size_t size = dtype_size(tensor->dtype);
    cJSON_ArrayForEach(dim, shape) {
        size_t extent;
        if (tensor->rank == TENSOR_MAX_RANK || !json_size(dim, &extent))
            return fail(error, "%s: tensor %.200s: shape wanted at most %d non-negative integers", path, name, TENSOR_MAX_RANK);
        if (!multiply(size, extent, &size)) return fail(error, "%s: tensor %.200s: its shape overflows", path, name);
        tensor->shape[tensor->rank++] = (int64_t)extent;
    }
    if (!json_size(offsets->child, begin) || !json_size(offsets->child->next, end) || *begin > *end || *end > data_size)
        return fail(error, "%s: tensor %.200s: data_offsets lie outside the %zu bytes of data, or are reversed", path, name,
                    data_size);
    tensor->size = *end - *begin;
    char text[128];
    if (tensor->dtype != DTYPE_UNKNOWN && size != tensor->size)
        return fail(error, "%s: tensor %.200s: found %zu bytes, wanted %zu for %s %s", path, name, tensor->size, size,
                    tensor->dtype_name, shape_text(text, tensor->rank, tensor->shape));
    return true;
}

typedef struct Range { size_t begin, end; const char *name; } Range;

static int compare_ranges(const void *a, const void *b) {
    const Range *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static bool check_overlaps(Range *ranges, const char *path, Error *error) {
    if (ranges) qsort(ranges, arrlenu(ranges), sizeof *ranges, compare_ranges);     /* NULL where no tensor has bytes */
    for (size_t i = 1; i < arrlenu(ranges); i++)
        if (ranges[i].begin < ranges[i - 1].end)
            return fail(error, "%s: tensors %.200s and %.200s overlap", path, ranges[i - 1].name, ranges[i].name);
    return true;
}

/* Enters every tensor of a parsed header into the checkpoint. */
static bool add_tensors(Checkpoint *checkpoint, const cJSON *header, int file, size_t data_start, Error *error) {
    const MappedFile *mapped = &checkpoint->files[file];
    Range *ranges = NULL;
    bool ok = true;
    const cJSON *entry;
    cJSON_ArrayForEach(entry, header) {
        if (!strcmp(entry->string, "__metadata__")) continue;
        Tensor tensor = {.file = file};
        Range range = {.name = entry->string};
        ok = tensor_parse(&tensor, entry, mapped->size - data_start, &range.begin, &range.end, mapped->path, error);
        if (ok && shgeti(checkpoint->index, entry->string) >= 0) {
            const Tensor *other = &checkpoint->tensors[shget(checkpoint->index, entry->string)];
            ok = fail(error, "%s: tensor %.200s is there already, in %s", mapped->path, entry->string,
                      checkpoint->files[other->file].path);
        }
        if (!ok) break;
        tensor.name = copy_string(entry->string);
        tensor.data = mapped->data + data_start + range.begin;
        if (range.end > range.begin) arrput(ranges, range);
        shput(checkpoint->index, tensor.name, (int)arrlen(checkpoint->tensors));
        arrput(checkpoint->tensors, tensor);
    }
    ok = ok && check_overlaps(ranges, mapped->path, error);
    arrfree(ranges);
    return ok;
}

static bool parse_safetensors(Checkpoint *checkpoint, int file, Error *error) {
    const MappedFile *mapped = &checkpoint->files[file];
    if (mapped->size < 8) return fail(error, "%s: %zu bytes are too few for a safetensors file", mapped->path, mapped->size);
    uint64_t header_length = load_u64(mapped->data);
    if (header_length > mapped->size - 8 || header_length > SAFETENSORS_MAX_HEADER)
        return fail(error, "%s: not a safetensors file: a header of %" PRIu64 " bytes in a file of %zu", mapped->path,
                    header_length, mapped->size);
    cJSON *header = json_parse((const char *)mapped->data + 8, header_length, mapped->path, error);
    if (!header) return false;
    bool ok = cJSON_IsObject(header) ? add_tensors(checkpoint, header, file, 8 + header_length, error)
                                     : fail(error, "%s: the header is not a JSON object", mapped->path);
    cJSON_Delete(header);
    return ok;
}

static bool map_file(Checkpoint *checkpoint, const char *path, Error *error) {
    int descriptor = open(path, O_RDONLY | O_NONBLOCK);         /* a pipe by that name is refused below, not waited for */
    struct stat status;
    if (descriptor < 0 || fstat(descriptor, &status) < 0) {
        fail(error, "%s: %s", path, strerror(errno));
        if (descriptor >= 0) close(descriptor);
        return false;
    }
    MappedFile mapped = {.size = (size_t)status.st_size};
    bool regular = S_ISREG(status.st_mode);
    if (regular && mapped.size) {
        void *data = mmap(NULL, mapped.size, PROT_READ, MAP_PRIVATE, descriptor, 0);
        if (data == MAP_FAILED) fail(error, "%s: cannot map %zu bytes: %s", path, mapped.size, strerror(errno));
        else mapped.data = data;
    } else fail(error, "%s: %s", path, regular ? "the file is empty" : "not a regular file");
    close(descriptor);
    if (!mapped.data) return false;
    mapped.path = copy_string(path);
    arrput(checkpoint->files, mapped);
    return parse_safetensors(checkpoint, (int)arrlen(checkpoint->files) - 1, error);
}

/* Maps each shard the index names, then checks that every tensor is where the index says. */
static bool open_sharded(Checkpoint *checkpoint, const char *index_path, Error *error) {
    cJSON *json = json_read(index_path, MAX_JSON_FILE, error);
    if (!json) return false;
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(json, "weight_map"), *entry;
    struct { char *key; int value; } *shards = NULL;
    char path[PATH_MAX];
    bool ok = cJSON_IsObject(map) || fail(error, "%s: weight_map is missing", index_path);
    if (ok) cJSON_ArrayForEach(entry, map) {
        const char *shard = cJSON_IsString(entry) ? entry->valuestring : "";
        if (!*shard || strchr(shard, '/'))
            ok = fail(error, "%s: tensor %.200s: its shard wants to be a plain file name", index_path, entry->string);
        if (ok && shgeti(shards, shard) < 0) {
            ok = map_file(checkpoint, join(path, checkpoint->directory, shard), error);
            shput(shards, shard, (int)arrlen(checkpoint->files) - 1);
        }
        if (!ok) break;
    }
    if (ok) cJSON_ArrayForEach(entry, map) {
        const Tensor *tensor = checkpoint_find(checkpoint, entry->string);
        int file = shget(shards, entry->valuestring);
        if (!tensor || tensor->file != file)
            ok = fail(error, "%s: tensor %.200s: found in %s, wanted in %.200s as the index says", index_path, entry->string,
                      tensor ? checkpoint->files[tensor->file].path : "no shard", entry->valuestring);
        if (!ok) break;
    }
    shfree(shards);
    cJSON_Delete(json);
    return ok;
}

/* Without an index: model.safetensors, or the only file of that kind. */
static bool open_single(Checkpoint *checkpoint, Error *error) {
    char path[PATH_MAX];
    if (access(join(path, checkpoint->directory, "model.safetensors"), F_OK) == 0) return map_file(checkpoint, path, error);
    DIR *directory = opendir(checkpoint->directory);
    if (!directory) return fail(error, "%s: %s", checkpoint->directory, strerror(errno));
    char found[256] = "";
    int count = 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        size_t length = strlen(entry->d_name);
        if (length <= 12 || strcmp(entry->d_name + length - 12, ".safetensors")) continue;
        snprintf(found, sizeof found, "%s", entry->d_name);
        count++;
    }
    closedir(directory);
    if (count == 1) return map_file(checkpoint, join(path, checkpoint->directory, found), error);
    return fail(error, "%s: found %d *.safetensors files and no model.safetensors.index.json", checkpoint->directory, count);
}

bool checkpoint_open(Checkpoint *checkpoint, const char *directory, Error *error) {
    *checkpoint = (Checkpoint){.directory = copy_string(directory)};
    char index_path[PATH_MAX];
    bool sharded = access(join(index_path, directory, "model.safetensors.index.json"), F_OK) == 0;
    if (sharded ? open_sharded(checkpoint, index_path, error) : open_single(checkpoint, error)) return true;
    checkpoint_close(checkpoint);
    return false;
}

void checkpoint_close(Checkpoint *checkpoint) {
    for (size_t i = 0; i < arrlenu(checkpoint->files); i++) {
        munmap((void *)checkpoint->files[i].data, checkpoint->files[i].size);
        free(checkpoint->files[i].path);
    }
    for (size_t i = 0; i < arrlenu(checkpoint->tensors); i++) free(checkpoint->tensors[i].name);
    arrfree(checkpoint->files);
    arrfree(checkpoint->tensors);
    shfree(checkpoint->index);
    free(checkpoint->directory);
    *checkpoint = (Checkpoint){0};
}

size_t checkpoint_bytes(const Checkpoint *checkpoint) {
    size_t bytes = 0;
    for (size_t i = 0; i < arrlenu(checkpoint->files); i++) bytes += checkpoint->files[i].size;
    return bytes;
}

bool has_stages(const Checkpoint *checkpoint) {
    for (size_t i = 0; i < arrlenu(checkpoint->tensors); i++)
        if (!strncmp(checkpoint->tensors[i].name, "mtp.0.", 6)) return true;
    return false;
}

const Tensor *checkpoint_find(const Checkpoint *checkpoint, const char *name) {
    Checkpoint *unlocked = (Checkpoint *)checkpoint;        /* stb_ds look-ups write a hidden temporary */
    ptrdiff_t i = shgeti(unlocked->index, name);
    return i < 0 ? NULL : &checkpoint->tensors[unlocked->index[i].value];
}

/* =====================================================================================================================
 * Config
 *
 * Owns: config.json as a struct with the file's own key names, and the defaults a file may leave out. Whatever changes the
 * computation and is not implemented is refused here by name, so that forward() never meets it.
 */

enum {
    MAX_LAYERS = 1024, MAX_WIDTH = 1 << 18, MAX_VOCAB = 1 << 22,
};

static const struct { const char *model_type; Family family; } families[] = {
    {"qwen3", FAMILY_QWEN3}, {"glm_moe_dsa", FAMILY_GLM_MOE_DSA}, {"deepseek_v32", FAMILY_DEEPSEEK_V32},
    {"deepseek_v4", FAMILY_DEEPSEEK_V4}, {"deepseek_v41", FAMILY_DEEPSEEK_V41},
};

bool has_indexer(const Config *config) { return config->family != FAMILY_QWEN3; }

bool has_latent_attention(const Config *config) {
    return config->family == FAMILY_GLM_MOE_DSA || config->family == FAMILY_DEEPSEEK_V32;
}

static bool has_streams(const Config *config) {
    return config->family == FAMILY_DEEPSEEK_V4 || config->family == FAMILY_DEEPSEEK_V41;
}

int residual_streams(const Config *config) { return has_streams(config) ? config->hc_mult : 1; }

/* Weights by which a sublayer's streams enter, take up what it adds, and are mixed. */
static int stream_mixes(const Config *config) { return (2 + config->hc_mult) * config->hc_mult; }

bool selects_rows(const Config *config, int layer) {
    if (config->compression) return config->compression[layer] == COMPRESSION_SPARSE;
    return config->selects ? config->selects[layer] : config->indexer_full && config->indexer_full[layer];
}

/* The same for a flag; where the key is absent it counts as the value. */
static void require_bool(Fields *fields, const char *key, bool value) {
    if (read_bool(fields, key, value) != value) field_failed(fields, key, field(fields, key), value ? "true" : "false");
}

/* rope_type, or type in older files, and yarn's own keys. */
static void read_rope_type(RopeConfig *rope, Fields *inner) {
    const char *key = field(inner, "rope_type") ? "rope_type" : "type";
    const cJSON *type = field(inner, key);
    const char *name = cJSON_IsString(type) ? type->valuestring : type ? "" : "default";
    rope->yarn = !strcmp(name, "yarn");
    if (!rope->yarn && strcmp(name, "default")) field_failed(inner, key, type, "\"default\" or \"yarn\"");
    if (!rope->yarn) return;
    rope->factor = read_number(inner, "factor", 1, 1e4, REQUIRED);
    rope->beta_fast = read_number(inner, "beta_fast", 1e-3, 1e6, 32);
    rope->beta_slow = read_number(inner, "beta_slow", 1e-3, 1e6, 1);
    rope->mscale = read_number(inner, "mscale", 0, 100, 0);
    rope->mscale_all_dim = read_number(inner, "mscale_all_dim", 0, 100, 0);
    rope->attention_factor = read_number(inner, "attention_factor", 0, 100, 0);
    require_bool(inner, "truncate", true);
    rope->original_max_position_embeddings = read_int(inner, "original_max_position_embeddings", 1, MAX_CONTEXT, REQUIRED);
}

/* New files nest the rope under rope_parameters; older ones have rope_theta at the top and rope_scaling beside it. */
static void read_rope(Config *config, Fields *top) {
    RopeConfig *rope = &config->rope;
    const cJSON *nested = field(top, "rope_parameters"), *scaling = field(top, "rope_scaling");
    Fields inner = *top;
    inner.object = nested ? nested : scaling ? scaling : top->object;
    Fields *theta = nested ? &inner : top;
    rope->rope_theta = read_number(theta, "rope_theta", 1, 1e12, REQUIRED);
    top->failed |= theta->failed;
    if (nested || scaling) read_rope_type(rope, &inner);
    read_number(&inner, "partial_rotary_factor", 1, 1, 1);
    top->failed |= inner.failed;
}

/* A list of one word for each layer, where the key is there: flags[i] is whether layer i has the word `yes` and not `no`. */
static bool read_layer_words(Fields *fields, const char *key, const char *yes, const char *no, bool *flags, int layers) {
    const cJSON *list = field(fields, key), *word = cJSON_IsArray(list) ? list->child : NULL;
    char wanted[80];
    snprintf(wanted, sizeof wanted, "\"%s\" or \"%s\" for each layer", yes, no);
    for (int i = 0; list && i < layers; i++, word = word->next) {
        const char *name = cJSON_IsString(word) ? word->valuestring : "";
        flags[i] = !strcmp(name, yes);
        if (flags[i] || !strcmp(name, no)) continue;
        field_failed(fields, key, word ? word : list, wanted);
        return true;
    }
    return list != NULL;
}

/* Which layers run their own indexer: indexer_types, else index_topk_pattern ("FSSS.."), else the schedule: every
 * index_topk_freq-th layer after the first index_skip_topk_offset (transformers' GlmMoeDsaConfig). */
static void read_indexer_types(Config *config, Fields *fields) {
    int layers = config->num_hidden_layers;
    int freq = read_int(fields, "index_topk_freq", 1, MAX_LAYERS, 1),
        offset = read_int(fields, "index_skip_topk_offset", 0, MAX_LAYERS, 2);
    const cJSON *pattern = field(fields, "index_topk_pattern");
    const char *letters = cJSON_IsString(pattern) ? pattern->valuestring : "";
    config->indexer_full = allocate_zeroed((size_t)layers, sizeof(bool));
    for (int i = 0; i < layers; i++) config->indexer_full[i] = larger(i - offset + 1, 0) % freq == 0;
    if (!read_layer_words(fields, "indexer_types", "full", "shared", config->indexer_full, layers) && pattern) {
        if (strspn(letters, "FS") < (size_t)layers)
            field_failed(fields, "index_topk_pattern", pattern, "an F or S for each layer");
        else for (int i = 0; i < layers; i++) config->indexer_full[i] = letters[i] == 'F';
    }
    if (!fields->failed && !config->indexer_full[0])
        field_failed(fields, "indexer_types", field(fields, "indexer_types"),
                     "layer 0 to be full: it has no earlier layer to follow");
}

/* Which layers have experts: mlp_layer_types, else all from first_k_dense_replace on. */
static void read_mlp_types(Config *config, Fields *fields) {
    int layers = config->num_hidden_layers, first = read_int(fields, "first_k_dense_replace", 0, MAX_LAYERS, 3);
    if (read_int(fields, "moe_layer_freq", 1, MAX_LAYERS, 1) != 1)
        field_failed(fields, "moe_layer_freq", field(fields, "moe_layer_freq"), "1");
    config->mlp_sparse = allocate_zeroed((size_t)layers, sizeof(bool));
    for (int i = 0; i < layers; i++) config->mlp_sparse[i] = i >= first;
    read_layer_words(fields, "mlp_layer_types", "sparse", "dense", config->mlp_sparse, layers);
}

static void read_qwen3(Config *config, Fields *fields) {
    config->intermediate_size = read_int(fields, "intermediate_size", 1, MAX_WIDTH, REQUIRED);
    config->num_key_value_heads = read_int(fields, "num_key_value_heads", 1, config->num_attention_heads,
                                           config->num_attention_heads);
    config->head_dim = read_int(fields, "head_dim", 2, MAX_ROW_WIDTH, 128);
    if (config->num_attention_heads % config->num_key_value_heads)
        field_failed(fields, "num_key_value_heads", field(fields, "num_key_value_heads"), "a divisor of num_attention_heads");
    if (config->head_dim % 2) field_failed(fields, "head_dim", field(fields, "head_dim"), "an even number");
}

static void read_dsa(Config *config, Fields *fields) {
    bool glm = config->family == FAMILY_GLM_MOE_DSA;
    config->q_lora_rank = read_int(fields, "q_lora_rank", 1, MAX_WIDTH, REQUIRED);
    config->kv_lora_rank = read_int(fields, "kv_lora_rank", 1, MAX_ROW_WIDTH, REQUIRED);
    config->qk_nope_head_dim = read_int(fields, "qk_nope_head_dim", 1, MAX_WIDTH, REQUIRED);
    config->qk_rope_head_dim = read_int(fields, "qk_rope_head_dim", 2, MAX_ROW_WIDTH - config->kv_lora_rank, REQUIRED);
    config->v_head_dim = read_int(fields, "v_head_dim", 1, MAX_WIDTH, REQUIRED);
    config->latent_norm_eps = 1e-6f;        /* as transformers, whatever rms_norm_eps says; vLLM takes rms_norm_eps */
    config->index_n_heads = read_int(fields, "index_n_heads", 1, MAX_HEADS, REQUIRED);
    config->index_head_dim = read_int(fields, "index_head_dim", config->qk_rope_head_dim, MAX_ROW_WIDTH, REQUIRED);
    config->index_topk = read_int(fields, "index_topk", 1, MAX_CONTEXT, REQUIRED);
    config->indexer_rope_interleave = read_bool(fields, "indexer_rope_interleave", glm);
    if (config->qk_rope_head_dim % 2)
        field_failed(fields, "qk_rope_head_dim", field(fields, "qk_rope_head_dim"), "an even number");
    require_bool(fields, "rope_interleave", true);
    if (glm) read_indexer_types(config, fields);
    else {
        config->indexer_full = allocate_zeroed((size_t)config->num_hidden_layers, sizeof(bool));
        memset(config->indexer_full, true, (size_t)config->num_hidden_layers);
    }

    config->n_routed_experts = read_int(fields, "n_routed_experts", 1, MAX_EXPERTS, REQUIRED);
    config->num_experts_per_tok = read_int(fields, "num_experts_per_tok", 1, config->n_routed_experts, REQUIRED);
    config->n_shared_experts = read_int(fields, "n_shared_experts", 0, 64, 1);
    config->moe_intermediate_size = read_int(fields, "moe_intermediate_size", 1, MAX_WIDTH, REQUIRED);
    config->intermediate_size = read_int(fields, "intermediate_size", 1, MAX_WIDTH, REQUIRED);
    config->n_group = read_int(fields, "n_group", 1, config->n_routed_experts, glm ? 1 : 8);
    config->topk_group = read_int(fields, "topk_group", 1, config->n_group, glm || config->n_group < 4 ? 1 : 4);
    config->routed_scaling_factor = (float)read_number(fields, "routed_scaling_factor", 0, 1e6, 2.5);
    config->norm_topk_prob = read_bool(fields, "norm_topk_prob", true);
    int per_group = config->n_routed_experts / config->n_group;
    if (config->n_routed_experts % config->n_group || (config->n_group > 1 && per_group < 2))
        field_failed(fields, "n_group", field(fields, "n_group"), "equal groups of two experts or more");
    if (config->num_experts_per_tok > per_group * config->topk_group)
        field_failed(fields, "topk_group", field(fields, "topk_group"), "groups that hold num_experts_per_tok experts");
    require_string(fields, "scoring_func", "sigmoid");
    require_string(fields, "topk_method", "noaux_tc");
    read_mlp_types(config, fields);
}

/* ---- DeepSeek-V4 */

/* What each layer attends to: compress_ratios as published (which go on with the draft layers' zeros), or the words and rates
 * that transformers saves. */
static void read_compression(Config *config, Fields *fields) {
    const int layers = config->num_hidden_layers;
    const cJSON *ratios = field(fields, "compress_ratios"), *words = field(fields, "layer_types"),
                *list = words ? words : ratios, *entry = cJSON_IsArray(list) ? list->child : NULL;
    static const char *const names[] = {"sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"};
    Fields rates = *fields;
    if (cJSON_IsObject(field(fields, "compress_rates"))) rates.object = field(fields, "compress_rates");
    config->sparse_ratio = read_int(&rates, names[COMPRESSION_SPARSE], 2, MAX_RATIO, 4);
    config->heavy_ratio = read_int(&rates, names[COMPRESSION_HEAVY], 2, MAX_RATIO, 128);
    fields->failed |= rates.failed;
    config->compression = allocate_zeroed((size_t)layers, sizeof *config->compression);
    for (int i = 0; i < layers; i++, entry = entry ? entry->next : NULL) {
        const double ratio = cJSON_IsNumber(entry) ? entry->valuedouble : -1, of_kind[] = {0, 4, 128};
        int kind = 0;
        while (kind < 3 && (words ? !cJSON_IsString(entry) || strcmp(entry->valuestring, names[kind]) : ratio != of_kind[kind]))
            kind++;
        if (kind == 3)
            return field_failed(fields, words ? "layer_types" : "compress_ratios", entry ? entry : list,
                                words ? "sliding_attention, compressed_sparse_attention or heavily_compressed_attention for each "
                                        "layer"
                                      : "0, 4 or 128 for each layer");
        config->compression[i] = (Compression)kind;
    }
}

/* Layers with a window alone turn by rope_theta. The others turn everything by compress_rope_theta, under yarn where there is
 * one, and then without its factor on cosine and sine. */
static void read_two_ropes(Config *config, Fields *fields) {
    const cJSON *nested = field(fields, "rope_parameters"), *scaling = field(fields, "rope_scaling");
    const cJSON *plain = cJSON_GetObjectItemCaseSensitive(nested, "main"),
                *compress = cJSON_GetObjectItemCaseSensitive(nested, "compress");
    Fields main_rope = *fields, other = *fields;
    if (cJSON_IsObject(plain)) main_rope.object = plain;
    config->rope.rope_theta = read_number(&main_rope, "rope_theta", 1, 1e12, 1e4);
    if (cJSON_IsObject(plain)) require_string(&main_rope, "rope_type", "default");
    if (cJSON_IsObject(compress)) other.object = compress;
    const char *key = cJSON_IsObject(compress) ? "rope_theta" : "compress_rope_theta";
    config->compress_rope.rope_theta = read_number(&other, key, 1, 1e12, 160000);
    if (!cJSON_IsObject(compress)) other.object = nested ? nested : scaling;
    if (cJSON_IsObject(other.object)) read_rope_type(&config->compress_rope, &other);
    config->compress_rope.attention_factor = 1;
    fields->failed |= main_rope.failed || other.failed;
}

static void read_hash_layers(Config *config, Fields *fields) {
    const int layers = config->num_hidden_layers, n = read_int(fields, "num_hash_layers", 0, MAX_LAYERS, 3);
    config->hash_routed = allocate_zeroed((size_t)layers, sizeof(bool));
    for (int i = 0; i < layers; i++) config->hash_routed[i] = i < n;
    read_layer_words(fields, "mlp_layer_types", "hash_moe", "moe", config->hash_routed, layers);
}

/* Of each head the last values are turned: qk_rope_head_dim as published, or a part of head_dim as transformers saves it. */
static int read_turned(const Config *config, Fields *fields) {
    int part = (int)(config->head_dim * read_number(fields, "partial_rotary_factor", 0, 1, 0.125));
    int turned = read_int(fields, "qk_rope_head_dim", 2, config->head_dim, part);
    if (turned % 2 || turned < 2)
        field_failed(fields, "qk_rope_head_dim", field(fields, "qk_rope_head_dim"), "an even number from 2 on");
    return turned;
}

/* What V4 and V4.1 have in common. */
static void read_streams(Config *config, Fields *fields) {
    config->num_key_value_heads = read_int(fields, "num_key_value_heads", 1, 1, 1);
    config->head_dim = read_int(fields, "head_dim", 2, MAX_ROW_WIDTH, 512);
    config->qk_rope_head_dim = read_turned(config, fields);
    config->q_lora_rank = read_int(fields, "q_lora_rank", 1, MAX_WIDTH, REQUIRED);
    config->o_lora_rank = read_int(fields, "o_lora_rank", 1, MAX_WIDTH, REQUIRED);
    config->o_groups = read_int(fields, "o_groups", 1, config->num_attention_heads, REQUIRED);
    if (config->num_attention_heads % config->o_groups)
        field_failed(fields, "o_groups", field(fields, "o_groups"), "a divisor of num_attention_heads");
    config->sliding_window = read_int(fields, "sliding_window", 1, 1 << 16, 128);
    config->index_n_heads = read_int(fields, "index_n_heads", 1, MAX_HEADS, REQUIRED);
    config->index_head_dim = read_int(fields, "index_head_dim", config->qk_rope_head_dim, MAX_ROW_WIDTH, REQUIRED);
    config->index_topk = read_int(fields, "index_topk", 1, MAX_CONTEXT, REQUIRED);
    config->hc_mult = read_int(fields, "hc_mult", 1, MAX_STREAMS, 4);
    config->hc_sinkhorn_iters = read_int(fields, "hc_sinkhorn_iters", 1, 1000, 20);
    config->hc_eps = (float)read_number(fields, "hc_eps", 0, 1, 1e-6);
    read_two_ropes(config, fields);

    config->n_routed_experts = read_int(fields, "n_routed_experts", 1, MAX_EXPERTS, REQUIRED);
    config->num_experts_per_tok = read_int(fields, "num_experts_per_tok", 1, config->n_routed_experts, REQUIRED);
    config->n_shared_experts = read_int(fields, "n_shared_experts", 0, 64, 1);
    config->moe_intermediate_size = read_int(fields, "moe_intermediate_size", 1, MAX_WIDTH, REQUIRED);
    config->n_group = read_int(fields, "n_group", 1, 1, 1);
    config->topk_group = read_int(fields, "topk_group", 1, 1, 1);
    config->routed_scaling_factor = (float)read_number(fields, "routed_scaling_factor", 0, 1e6, 1.5);
    config->norm_topk_prob = read_bool(fields, "norm_topk_prob", true);
    config->swiglu_limit = (float)read_number(fields, "swiglu_limit", 0, 1e6, 10);
    require_string(fields, "scoring_func", "sqrtsoftplus");
    require_string(fields, "topk_method", "noaux_tc");
    require_string(fields, "expert_dtype", "fp4");
    require_bool(fields, "mlp_bias", false);
}

static void read_v4(Config *config, Fields *fields) {
    read_streams(config, fields);
    read_compression(config, fields);
    read_hash_layers(config, fields);
}

/* ---- DeepSeek-V4.1 */

/* Marks the layers that a list names; false where it is none of ascending layers. */
static bool mark_layers(const cJSON *list, bool *marks, int layers) {
    const cJSON *entry;
    int last = -1;
    cJSON_ArrayForEach(entry, list) {
        const double id = cJSON_IsNumber(entry) ? entry->valuedouble : -1;
        if (!(id > last && id < layers) || id != (int)id) return false;
        marks[last = (int)id] = true;
    }
    return cJSON_IsArray(list);
}

/* Which layers make compressed rows, which select, and whose rows each reads: those of the last source, of the ratio that
 * compress_ratios (which goes on with the draft stages' zeros) gives it. */
static void read_sources(Config *config, Fields *fields) {
    const int layers = config->num_hidden_layers;
    const cJSON *ratios = field(fields, "compress_ratios"), *entry = cJSON_IsArray(ratios) ? ratios->child : NULL,
                *makers = field(fields, "kv_source_layer_ids"), *selectors = field(fields, "index_source_layer_ids");
    config->source = allocate_zeroed((size_t)layers, sizeof(int));
    config->source_ratio = allocate_zeroed((size_t)layers, sizeof(int));
    config->makes_rows = allocate_zeroed((size_t)layers, sizeof(bool));
    config->selects = allocate_zeroed((size_t)layers, sizeof(bool));
    if (!mark_layers(makers, config->makes_rows, layers))
        return field_failed(fields, "kv_source_layer_ids", makers, "ascending layers");
    if (!mark_layers(selectors, config->selects, layers))
        return field_failed(fields, "index_source_layer_ids", selectors, "ascending layers");
    for (int i = 0; i < layers; i++, entry = entry ? entry->next : NULL) {
        const double ratio = cJSON_IsNumber(entry) ? entry->valuedouble : -1;
        if (ratio != 0 && ratio != 1 && ratio != 2)
            return field_failed(fields, "compress_ratios", entry ? entry : ratios, "0, 1 or 2 for each layer");
        if (config->makes_rows[i]) config->source_ratio[config->n_sources++] = (int)ratio;
        config->source[i] = ratio > 0 ? config->n_sources - 1 : -1;
        if (config->makes_rows[i] && (!config->selects[i] || !(ratio > 0)))
            return field_failed(fields, "kv_source_layer_ids", makers, "layers that compress, among index_source_layer_ids");
        if (config->selects[i] && config->source[i] < 0)
            return field_failed(fields, "index_source_layer_ids", selectors, "layers that compress, from the first source on");
        if (ratio > 0 && (config->source[i] < 0 || config->source_ratio[config->source[i]] != ratio))
            return field_failed(fields, "compress_ratios", ratios, "for each layer the ratio of the last kv_source_layer_ids");
    }
}

/* From one selection on those that follow look only into the blocks that it kept. Blocks must hold whatever can be selected. */
static void read_candidates(Config *config, Fields *fields) {
    const int layers = config->num_hidden_layers,
              id = read_int(fields, "candidate_source_layer_id", -1, MAX_LAYERS, -1);
    config->candidate_source_layer_id = id;
    if (id < 0 || fields->failed) return;
    config->candidate_topk_blocks = read_int(fields, "candidate_topk_blocks", 1, MAX_BLOCKS, REQUIRED);
    config->candidate_block_size = read_int(fields, "candidate_block_size", 1, MAX_CONTEXT, REQUIRED);
    bool same = id < layers && config->selects[id];
    for (int i = id; i < layers && same; i++) same = !config->selects[i] || config->source[i] == config->source[id];
    if (!same)
        field_failed(fields, "candidate_source_layer_id", field(fields, "candidate_source_layer_id"),
                     "a selecting layer of the last source");
    else if ((int64_t)(config->candidate_topk_blocks - 1) * config->candidate_block_size + 1 < config->index_topk)
        field_failed(fields, "candidate_topk_blocks", field(fields, "candidate_topk_blocks"),
                     "blocks that hold index_topk rows beside the newest");
}

static void read_engram_config(Config *config, Fields *fields) {
    const int layers = config->num_hidden_layers;
    const cJSON *ids = field(fields, "engram_layer_ids"), *sizes = field(fields, "engram_num_embeddings"),
                *size = cJSON_IsArray(sizes) ? sizes->child : NULL;
    bool *marks = allocate_zeroed((size_t)layers, sizeof(bool));
    config->engram_rows = allocate_zeroed((size_t)layers, sizeof(int64_t));
    if (ids && !mark_layers(ids, marks, layers)) field_failed(fields, "engram_layer_ids", ids, "ascending layers");
    for (int i = 0; i < layers && !fields->failed; i++) {
        size_t rows;
        if (!marks[i]) continue;
        if (!json_size(size, &rows) || !rows || rows > (size_t)1 << 40)
            field_failed(fields, "engram_num_embeddings", size ? size : sizes, "the rows of each table");
        else config->engram_rows[i] = (int64_t)rows;
        size = size ? size->next : NULL;
    }
    free(marks);
    if (!ids || !cJSON_GetArraySize(ids)) return;
    if (cJSON_GetArraySize(ids) > MAX_ENGRAMS) field_failed(fields, "engram_layer_ids", ids, "at most 16 layers");
    config->engram_order = read_int(fields, "engram_max_ngram_size", 2, MAX_NGRAM, REQUIRED);
    config->engram_n_heads = read_int(fields, "engram_n_heads", 1, MAX_ENGRAM_HEADS, REQUIRED);
    config->engram_head_dim = read_int(fields, "engram_head_dim", 1, MAX_ROW_WIDTH, REQUIRED);
    config->engram_pad_token_id = read_int(fields, "engram_pad_token_id", 0, config->vocab_size - 1, REQUIRED);
    config->engram_compressed_vocab_size = read_int(fields, "engram_compressed_vocab_size", 1, MAX_VOCAB, REQUIRED);
    config->engram_vocab_size = read_int(fields, "engram_vocab_size", 1, 1 << 30, REQUIRED);
}

static void read_v41(Config *config, Fields *fields) {
    read_streams(config, fields);
    read_sources(config, fields);
    if (!fields->failed) read_candidates(config, fields);
    if (!fields->failed) read_engram_config(config, fields);
    if (config->num_experts_per_tok == 1) config->norm_topk_prob = false;   /* one alone keeps its own weight */
}

/* fp8 by blocks of 128x128, of V4.1 of 32x32, is the one published quantisation of these families. */
static void read_quantization(Config *config, Fields *top) {
    const cJSON *quantization = field(top, "quantization_config"), *size;
    config->weight_block = config->family == FAMILY_DEEPSEEK_V41 ? 32 : SCALE_BLOCK;
    if (!quantization) return;
    Fields fields = *top;
    fields.object = quantization;
    require_string(&fields, "quant_method", "fp8");
    require_string(&fields, "fmt", "e4m3");
    const cJSON *block = field(&fields, "weight_block_size");
    bool square = cJSON_IsArray(block) && cJSON_GetArraySize(block) == 2;
    if (square)
        cJSON_ArrayForEach(size, block) square = square && cJSON_IsNumber(size) && size->valuedouble == config->weight_block;
    if (!square) field_failed(&fields, "weight_block_size", block, config->weight_block == 32 ? "[32, 32]" : "[128, 128]");
    top->failed |= fields.failed;
    config->quantised = true;
}

/* Adds the key's id or ids to the ones a generation ends at. */
static void read_eos(Config *config, Fields *fields) {
    const cJSON *item = field(fields, "eos_token_id"), *entry = cJSON_IsArray(item) ? item->child : item;
    for (; entry; entry = cJSON_IsArray(item) ? entry->next : NULL) {
        if (!cJSON_IsNumber(entry) || entry->valuedouble < 0 || entry->valuedouble >= MAX_VOCAB
            || entry->valuedouble != (int)entry->valuedouble)
            return field_failed(fields, "eos_token_id", item, "an id or a list of ids");
        bool known = false;
        for (int i = 0; i < config->n_eos; i++) known |= config->eos_token_id[i] == (int)entry->valuedouble;
        if (known) continue;
        if (config->n_eos == 16) return field_failed(fields, "eos_token_id", item, "at most 16 ids");
        config->eos_token_id[config->n_eos++] = (int)entry->valuedouble;
    }
}

/* What every family has. */
static void read_shape(Config *config, Fields *fields) {
    config->vocab_size = read_int(fields, "vocab_size", 1, MAX_VOCAB, REQUIRED);
    config->hidden_size = read_int(fields, "hidden_size", 1, MAX_WIDTH, REQUIRED);
    config->num_hidden_layers = read_int(fields, "num_hidden_layers", 1, MAX_LAYERS, REQUIRED);
    config->num_attention_heads = read_int(fields, "num_attention_heads", 1, MAX_HEADS, REQUIRED);
    config->rms_norm_eps = (float)read_number(fields, "rms_norm_eps", 0, 1, config->family == FAMILY_GLM_MOE_DSA ? 1e-5 : 1e-6);
    config->tie_word_embeddings = read_bool(fields, "tie_word_embeddings", false);
    require_bool(fields, "attention_bias", false);
    require_string(fields, "hidden_act", "silu");
    if (!has_streams(config)) read_rope(config, fields);
}

static void read_config(Config *config, Fields *fields) {
    const cJSON *type = field(fields, "model_type");
    const char *name = cJSON_IsString(type) ? type->valuestring : "nothing";
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (!strcmp(families[i].model_type, name))
            *config = (Config){.family = families[i].family, .model_type = families[i].model_type};
    if (!config->model_type)
        return field_failed(fields, "model_type", type, "qwen3, glm_moe_dsa, deepseek_v32, deepseek_v4 or deepseek_v41");
    read_quantization(config, fields);
    read_eos(config, fields);
    Fields whole = *fields;
    if (config->family == FAMILY_DEEPSEEK_V41 && cJSON_IsObject(field(fields, "text_config")))
        fields->object = field(fields, "text_config");      /* beside the vision tower's, which is not run */
    read_shape(config, fields);
    config->max_position_embeddings = read_int(fields, "max_position_embeddings", 1, MAX_CONTEXT, REQUIRED);
    if (fields->object != whole.object) read_eos(config, fields);
    if (has_latent_attention(config)) read_dsa(config, fields);
    else if (config->family == FAMILY_DEEPSEEK_V4) read_v4(config, fields);
    else if (config->family == FAMILY_DEEPSEEK_V41) read_v41(config, fields);
    else {
        read_qwen3(config, fields);
        require_bool(fields, "use_sliding_window", false);
    }
}

static void read_generation_config(Config *config, Fields *fields) {
    read_eos(config, fields);
    bool sample = read_bool(fields, "do_sample", field(fields, "temperature") != NULL);
    config->temperature = sample ? (float)read_number(fields, "temperature", 0, 100, 1) : 0;
    config->top_p = (float)read_number(fields, "top_p", 0, 1, 1);
    config->min_p = (float)read_number(fields, "min_p", 0, 1, 0);
    config->top_k = read_int(fields, "top_k", 0, INT_MAX, 0);
    config->repetition_penalty = (float)read_number(fields, "repetition_penalty", 1e-3, 1e3, 1);
}

bool config_read(Config *config, const char *directory, Error *error) {
    *config = (Config){0};
    char path[PATH_MAX];
    cJSON *json = json_read(join(path, directory, "config.json"), MAX_JSON_FILE, error);
    if (!json) return false;
    Fields fields = {.object = json, .path = path, .error = error};
    read_config(config, &fields);
    cJSON_Delete(json);
    config->top_p = config->repetition_penalty = 1;
    if (!fields.failed && access(join(path, directory, "generation_config.json"), F_OK) == 0) {
        json = json_read(path, MAX_JSON_FILE, error);
        fields.object = json;
        fields.failed = !json;
        if (json) read_generation_config(config, &fields);
        cJSON_Delete(json);
    }
    if (fields.failed) config_free(config);
    return !fields.failed;
}

void config_free(Config *config) {
    free(config->indexer_full);
    free(config->mlp_sparse);
    free(config->compression);
    free(config->hash_routed);
    free(config->source), free(config->source_ratio), free(config->makes_rows), free(config->selects), free(config->engram_rows);
    config->indexer_full = config->mlp_sparse = config->hash_routed = config->makes_rows = config->selects = NULL;
    config->source = config->source_ratio = NULL;
    config->compression = NULL;
    config->engram_rows = NULL;
}

/* =====================================================================================================================
 * Weights
 *
 * Owns: the typed view of a checkpoint. Each tensor is looked up by name once, here, and its dtype, rank and every dimension
 * are compared with what config.json implies; afterwards nothing is found by string. Matrices point into the mapping in
 * their stored format. Norms, biases and block scales are small and are widened to f32, which also settles alignment.
 */

typedef struct Binder {
    const Checkpoint *checkpoint;
    Weights *weights;
    const Backend *backend;     /* that moves them into its memory; NULL: they stay in the mapping */
    Error *error;
    bool failed;                /* after the first failure the rest is skipped */
    bool *used;                 /* [tensors] which were bound; NULL: nobody asks */
    bool saved_names;           /* deepseek_v4: as transformers spells them */
    int weight_block;           /* Config's */
    int stages;                 /* of a drafter inside the checkpoint */
    bool quantised;             /* Config's; and the last of the tensors that are in no file, the next two for --dummy */
    Tensor made_up;
} Binder;

/* Under --dummy: the tensor as the published files have it. Quantised are all matrices but embeddings, head, router and the
 * indexer's weights_proj, and of deepseek_v4 the compressors'; the router's bias, block scales and all that weighs streams are
 * f32. What cannot be a matrix of floats has the first of its types. */
static const Tensor *made_up_tensor(Binder *binder, const char *name, const DType *dtypes, int rank, const int64_t *shape) {
    static const char *const kept[] = {"embed_tokens", "lm_head", "mlp.gate.", "indexer.weights_proj",
                                       "embed.",       "head.",   "ffn.gate.", "compressor."},
                      *const widened[] = {"e_score_correction_bias", "weight_scale_inv", "hc_", ".ape", "attn_sink", "gate.bias"};
    bool wide = false, whole = !binder->quantised || rank == 1;
    for (size_t i = 0; i < sizeof widened / sizeof *widened; i++) wide |= strstr(name, widened[i]) != NULL;
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) whole |= strstr(name, kept[i]) != NULL;
    Tensor *tensor = &binder->made_up;
    *tensor = (Tensor){.dtype = wide ? DTYPE_F32 : whole ? DTYPE_BF16 : DTYPE_F8_E4M3, .rank = rank};
    if (dtypes[0] != DTYPE_F32) tensor->dtype = dtypes[0];
    tensor->size = dtype_size(tensor->dtype);
    for (int i = 0; i < rank; i++) tensor->size *= (size_t)shape[i];
    memcpy(tensor->shape, shape, (size_t)rank * sizeof *shape);
    binder->weights->bytes += tensor->size;
    return tensor;
}

/* The tensor, if its rank and dims are the wanted ones and its dtype is one of `dtypes` (ended by DTYPE_UNKNOWN). */
static const Tensor *bind_tensor(Binder *binder, const char *name, const DType *dtypes, int rank, const int64_t *shape) {
    if (binder->failed) return NULL;
    if (binder->checkpoint->dummy) return made_up_tensor(binder, name, dtypes, rank, shape);
    const Tensor *tensor = checkpoint_find(binder->checkpoint, name);
    bool same = tensor && tensor->rank == rank && !memcmp(tensor->shape, shape, (size_t)rank * sizeof *shape), typed = false;
    char wanted[128] = "", found_shape[128], wanted_shape[128];
    for (const DType *d = dtypes; *d; d++) {
        typed |= tensor && tensor->dtype == *d;
        snprintf(wanted + strlen(wanted), sizeof wanted - strlen(wanted), "%s%s",
                 d == dtypes ? ""
                 : d[1]      ? ", "
                             : " or ",
                 dtype_names[*d]);
    }
    if (same && typed) {
        binder->weights->bytes += tensor->size;
        if (binder->used) binder->used[tensor - binder->checkpoint->tensors] = true;
        return tensor;
    }
    shape_text(wanted_shape, rank, shape);
    if (!tensor)
        fail(binder->error, "%s: tensor %s: found nothing, wanted %s %s", binder->checkpoint->directory, name, wanted,
             wanted_shape);
    else
        fail(binder->error, "%s: tensor %s: found %s %s, wanted %s %s", binder->checkpoint->files[tensor->file].path, name,
             tensor->dtype_name, shape_text(found_shape, tensor->rank, tensor->shape), wanted, wanted_shape);
    binder->failed = true;
    return NULL;
}

/* The bytes as operations will read them. */
static const void *move_weights(Binder *binder, const void *data, size_t bytes) {
    if (!binder->backend || binder->failed) return data;
    const void *moved = binder->backend->import_weights(data, bytes, binder->error);
    binder->failed = !moved;
    if (binder->checkpoint->progress) binder->checkpoint->progress(binder->weights->bytes, checkpoint_bytes(binder->checkpoint));
    return moved;
}

/* Under --dummy: values within `spread` of the centre, the same whenever a tensor has that name; in that backend's memory. */
static const void *make_up_for(Binder *binder, const Backend *backend, const char *name, DType dtype, size_t count, float centre,
                               float spread) {
    if (!binder->backend || binder->failed) return NULL;
    void *space = backend->shares_memory ? allocate_zeroed(count, dtype_size(dtype)) : NULL;
    if (space) arrput(binder->weights->owned, space);
    const void *made = backend->make_weights(space, dtype, count, centre - spread, centre + spread,
                                             XXH3_64bits(name, strlen(name)), binder->error);
    binder->failed = !made;
    return made;
}

static const void *make_up(Binder *binder, const char *name, DType dtype, size_t count, float centre, float spread) {
    return make_up_for(binder, binder->backend, name, dtype, count, centre, spread);
}

/* How far evenly spread weights lie from zero for their products with values of variance 1 to have variance 1 again; e4m3 codes
 * spread over CODE_REACH get there through their scales. */
enum { CODE_REACH = 256 };
static float weight_reach(int cols) { return sqrtf(3.0f / (float)cols); }

static const float *widen_tensor(Binder *binder, const Tensor *tensor, size_t count) {
    float *values = allocate_zeroed(count, sizeof(float));
    for (size_t i = 0; i < count; i++) values[i] = widen(tensor->data + i * dtype_size(tensor->dtype), tensor->dtype);
    arrput(binder->weights->owned, values);
    return move_weights(binder, values, count * sizeof *values);
}

static const DType float_dtypes[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_UNKNOWN};
static const DType matrix_dtypes[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_F8_E4M3, DTYPE_UNKNOWN};

/* A vector [n] by the name prefix + suffix. */
static const float *bind_vector(Binder *binder, const char *prefix, const char *suffix, int n) {
    char name[256];
    snprintf(name, sizeof name, "%s%s", prefix, suffix);
    const Tensor *tensor = bind_tensor(binder, name, float_dtypes, 1, (int64_t[]){n});
    if (!tensor) return NULL;
    binder->weights->parameters += (size_t)n;
    if (binder->checkpoint->dummy) return make_up(binder, name, DTYPE_F32, (size_t)n, strstr(name, "bias") ? 0 : 1, 0.1f);
    return widen_tensor(binder, tensor, (size_t)n);
}

/* A tensor of floats by its whole name, widened. */
static const float *bind_floats(Binder *binder, const char *name, int rank, const int64_t *shape) {
    const Tensor *tensor = bind_tensor(binder, name, float_dtypes, rank, shape);
    size_t count = 1;
    for (int i = 0; i < rank; i++) count *= (size_t)shape[i];
    if (!tensor) return NULL;
    binder->weights->parameters += count;
    return binder->checkpoint->dummy ? make_up(binder, name, DTYPE_F32, count, 0, 0.1f) : widen_tensor(binder, tensor, count);
}

/* A matrix [rows, cols] by its whole name. */
static Matrix bind_named_matrix(Binder *binder, const char *name, const DType *dtypes, int rows, int cols) {
    const Tensor *tensor = bind_tensor(binder, name, dtypes, 2, (int64_t[]){rows, cols});
    if (!tensor) return (Matrix){0};
    const size_t count = (size_t)rows * (size_t)cols;
    const DType dtype = tensor->dtype;
    binder->weights->parameters += count;
    const void *data = binder->checkpoint->dummy
                           ? make_up(binder, name, dtype, count, 0, dtype == DTYPE_F8_E4M3 ? CODE_REACH : weight_reach(cols))
                           : move_weights(binder, tensor->data, tensor->size);
    return (Matrix){.data = data, .dtype = dtype, .rows = rows, .cols = cols};
}

/* A matrix [rows, cols] by the name prefix + suffix + ".weight"; an e4m3 one brings its ".weight_scale_inv" (a multiplier,
 * whatever the name says), one value per block of 128 x 128, edge blocks included. */
static Matrix bind_matrix(Binder *binder, const char *prefix, const char *suffix, int rows, int cols) {
    char name[256];
    snprintf(name, sizeof name, "%s%s.weight", prefix, suffix);
    Matrix matrix = bind_named_matrix(binder, name, matrix_dtypes, rows, cols);
    if (matrix.dtype != DTYPE_F8_E4M3) return matrix;
    int64_t blocks[2] = {(rows + SCALE_BLOCK - 1) / SCALE_BLOCK, (cols + SCALE_BLOCK - 1) / SCALE_BLOCK};
    snprintf(name, sizeof name, "%s%s.weight_scale_inv", prefix, suffix);
    const Tensor *scale = bind_tensor(binder, name, float_dtypes, 2, blocks);
    if (!scale) return (Matrix){0};
    const size_t n_scales = (size_t)(blocks[0] * blocks[1]);
    const float reach = weight_reach(cols) / CODE_REACH;
    bool in_place = scale->dtype == DTYPE_F32 && (uintptr_t)scale->data % sizeof(float) == 0; /* as published: nothing to widen */
    matrix.scale = binder->checkpoint->dummy ? make_up(binder, name, DTYPE_F32, n_scales, reach, reach / 4)
                   : in_place                ? move_weights(binder, scale->data, scale->size)
                                             : widen_tensor(binder, scale, n_scales);
    matrix.scale_cols = (int)blocks[1];
    return matrix;
}

static void bind_qwen3_attention(Binder *binder, LayerWeights *layer, const Config *config, const char *prefix) {
    int q_width = config->num_attention_heads * config->head_dim, kv_width = config->num_key_value_heads * config->head_dim;
    layer->q_proj = bind_matrix(binder, prefix, "self_attn.q_proj", q_width, config->hidden_size);
    layer->k_proj = bind_matrix(binder, prefix, "self_attn.k_proj", kv_width, config->hidden_size);
    layer->v_proj = bind_matrix(binder, prefix, "self_attn.v_proj", kv_width, config->hidden_size);
    layer->q_norm = bind_vector(binder, prefix, "self_attn.q_norm.weight", config->head_dim);
    layer->k_norm = bind_vector(binder, prefix, "self_attn.k_norm.weight", config->head_dim);
    layer->o_proj = bind_matrix(binder, prefix, "self_attn.o_proj", config->hidden_size, q_width);
}

static void bind_latent_attention(Binder *binder, LayerWeights *layer, const Config *config, const char *prefix, bool indexer) {
    int heads = config->num_attention_heads, hidden = config->hidden_size;
    layer->q_a_proj = bind_matrix(binder, prefix, "self_attn.q_a_proj", config->q_lora_rank, hidden);
    layer->q_a_layernorm = bind_vector(binder, prefix, "self_attn.q_a_layernorm.weight", config->q_lora_rank);
    layer->q_b_proj = bind_matrix(binder, prefix, "self_attn.q_b_proj",
                                  heads * (config->qk_nope_head_dim + config->qk_rope_head_dim), config->q_lora_rank);
    layer->kv_a_proj = bind_matrix(binder, prefix, "self_attn.kv_a_proj_with_mqa",
                                   config->kv_lora_rank + config->qk_rope_head_dim, hidden);
    layer->kv_a_layernorm = bind_vector(binder, prefix, "self_attn.kv_a_layernorm.weight", config->kv_lora_rank);
    layer->kv_b_proj = bind_matrix(binder, prefix, "self_attn.kv_b_proj", heads * (config->qk_nope_head_dim + config->v_head_dim),
                                   config->kv_lora_rank);
    layer->o_proj = bind_matrix(binder, prefix, "self_attn.o_proj", hidden, heads * config->v_head_dim);
    if (!indexer) return;           /* a follower's own indexer, should a file have one, was never trained: not bound */
    layer->indexer_wq_b = bind_matrix(binder, prefix, "self_attn.indexer.wq_b", config->index_n_heads * config->index_head_dim,
                                      config->q_lora_rank);
    layer->indexer_wk = bind_matrix(binder, prefix, "self_attn.indexer.wk", config->index_head_dim, hidden);
    layer->indexer_k_norm = bind_vector(binder, prefix, "self_attn.indexer.k_norm.weight", config->index_head_dim);
    layer->indexer_k_norm_bias = bind_vector(binder, prefix, "self_attn.indexer.k_norm.bias", config->index_head_dim);
    layer->indexer_weights_proj = bind_matrix(binder, prefix, "self_attn.indexer.weights_proj", config->index_n_heads, hidden);
}

/* gate, up and down of one SwiGLU block, wherever it stands. */
static void bind_mlp(Binder *binder, Matrix *gate, Matrix *up, Matrix *down, const char *prefix, int inter, int hidden) {
    *gate = bind_matrix(binder, prefix, "gate_proj", inter, hidden);
    *up = bind_matrix(binder, prefix, "up_proj", inter, hidden);
    *down = bind_matrix(binder, prefix, "down_proj", hidden, inter);
}

/* The experts' matrices, of one type, all gates, then ups, then downs, go where operations read them. */
static void finish_experts(Binder *binder, LayerWeights *layer, const Matrix *experts, size_t n, const char *prefix) {
    layer->expert_dtype = experts[0].dtype;
    for (size_t i = 0; i < 3 * n && !binder->failed; i++)
        if (experts[i].dtype != experts[0].dtype)
            binder->failed = !fail(binder->error, "%s: the experts of %s: found matrices of several types, wanted one",
                                   binder->checkpoint->directory, prefix);
    experts = move_weights(binder, experts, 3 * n * sizeof *experts);
    layer->expert_gate = experts;
    layer->expert_up = experts + n;
    layer->expert_down = experts + 2 * n;
}

static void bind_experts(Binder *binder, LayerWeights *layer, const Config *config, const char *prefix) {
    int inter = config->moe_intermediate_size, hidden = config->hidden_size;
    size_t n = (size_t)config->n_routed_experts;
    char name[200];
    layer->router = bind_matrix(binder, prefix, "mlp.gate", config->n_routed_experts, hidden);
    layer->e_score_correction_bias = bind_vector(binder, prefix, "mlp.gate.e_score_correction_bias", config->n_routed_experts);
    Matrix *experts = allocate_zeroed(3 * n, sizeof *experts), *gate = experts, *up = gate + n, *down = up + n;
    arrput(binder->weights->owned, experts);
    for (size_t e = 0; e < n && !binder->failed; e++) {
        snprintf(name, sizeof name, "%smlp.experts.%zu.", prefix, e);
        bind_mlp(binder, &gate[e], &up[e], &down[e], name, inter, hidden);
    }
    finish_experts(binder, layer, experts, n, prefix);
    snprintf(name, sizeof name, "%smlp.shared_experts.", prefix);
    if (config->n_shared_experts)
        bind_mlp(binder, &layer->gate_proj, &layer->up_proj, &layer->down_proj, name, inter * config->n_shared_experts, hidden);
}

/* Every family that is named as Llama was. */
static void bind_usual(Binder *binder, const Config *config) {
    Weights *weights = binder->weights;
    char prefix[64], name[100];
    weights->embed_tokens = bind_matrix(binder, "model.", "embed_tokens", config->vocab_size, config->hidden_size);
    for (int i = 0; i < config->num_hidden_layers && !binder->failed; i++) {
        LayerWeights *layer = &weights->layers[i];
        snprintf(prefix, sizeof prefix, "model.layers.%d.", i);
        layer->input_layernorm = bind_vector(binder, prefix, "input_layernorm.weight", config->hidden_size);
        layer->post_attention_layernorm = bind_vector(binder, prefix, "post_attention_layernorm.weight", config->hidden_size);
        if (has_latent_attention(config)) bind_latent_attention(binder, layer, config, prefix, config->indexer_full[i]);
        else bind_qwen3_attention(binder, layer, config, prefix);
        snprintf(name, sizeof name, "%smlp.", prefix);
        if (config->mlp_sparse && config->mlp_sparse[i]) bind_experts(binder, layer, config, prefix);
        else
            bind_mlp(binder, &layer->gate_proj, &layer->up_proj, &layer->down_proj, name, config->intermediate_size,
                     config->hidden_size);
    }
    weights->norm = bind_vector(binder, "model.", "norm.weight", config->hidden_size);
    if (config->tie_word_embeddings) weights->lm_head = weights->embed_tokens;
    else weights->lm_head = bind_matrix(binder, "", "lm_head", config->vocab_size, config->hidden_size);
}

/* ---- DeepSeek-V4: names as published, which begin with the layer, or as transformers saves them, behind "model." */

enum {
    PACKED = 2,                 /* e2m1 codes in a byte */
    CODE_SPREAD = 5,            /* how far evenly spread values lie from zero that vary as much as random codes */
};

/* Of two names of one tensor the one that the file has. */
static const char *either_name(const Binder *binder, const char *published, const char *saved) {
    if (checkpoint_find(binder->checkpoint, published)) return published;
    return binder->saved_names || checkpoint_find(binder->checkpoint, saved) ? saved : published;
}

/* Scales of powers of two, as f32: of 32 x 32 nothing else, since the GPU multiplies weights of 16 bits by them. */
static const float *bind_exponents(Binder *binder, const char *name, int64_t rows, int64_t cols) {
    static const DType dtypes[] = {DTYPE_F8_E8M0, DTYPE_F32, DTYPE_BF16, DTYPE_UNKNOWN};
    const Tensor *tensor = bind_tensor(binder, name, dtypes, 2, (int64_t[]){rows, cols});
    const size_t count = (size_t)(rows * cols);
    if (!tensor) return NULL;
    const bool small = binder->weight_block < SCALE_BLOCK;
    if (binder->checkpoint->dummy) return make_up(binder, name, DTYPE_F32, count, 0x1p-10f, small ? 0 : 0x1p-12f);
    for (size_t i = 0; small && tensor->dtype != DTYPE_F8_E8M0 && i < count && !binder->failed; i++) {
        const float scale = widen(tensor->data + i * dtype_size(tensor->dtype), tensor->dtype);
        int exponent;
        if (frexpf(scale, &exponent) != 0.5f)
            binder->failed = !fail(binder->error, "%s: %s: found a scale of %g, wanted powers of two",
                                   binder->checkpoint->directory, name, (double)scale);
    }
    return widen_tensor(binder, tensor, count);
}

/* A matrix [rows, cols] by the name prefix + suffix + ".weight"; an e4m3 one brings its ".scale". */
static Matrix bind_scaled_matrix(Binder *binder, const char *prefix, const char *suffix, int rows, int cols) {
    char name[256];
    snprintf(name, sizeof name, "%s%s.weight", prefix, suffix);
    Matrix matrix = bind_named_matrix(binder, name, matrix_dtypes, rows, cols);
    if (matrix.dtype != DTYPE_F8_E4M3) return matrix;
    snprintf(name, sizeof name, "%s%s.scale", prefix, suffix);
    matrix.block = binder->weight_block;
    matrix.scale_cols = (cols + matrix.block - 1) / matrix.block;
    matrix.scale = bind_exponents(binder, name, (rows + matrix.block - 1) / matrix.block, matrix.scale_cols);
    return matrix;
}

/* One of an expert's matrices: packed e2m1 with an exponent for every 32 inputs, or a type that is not packed. */
static Matrix bind_packed_matrix(Binder *binder, const char *prefix, const char *suffix, int rows, int cols) {
    static const DType packed[] = {DTYPE_I8, DTYPE_U8, DTYPE_UNKNOWN}, exponents[] = {DTYPE_F8_E8M0, DTYPE_UNKNOWN};
    char name[256];
    snprintf(name, sizeof name, "%s%s.weight", prefix, suffix);
    const Tensor *there = checkpoint_find(binder->checkpoint, name);
    if (binder->checkpoint->dummy ? !binder->quantised : there && there->dtype != DTYPE_I8 && there->dtype != DTYPE_U8)
        return bind_scaled_matrix(binder, prefix, suffix, rows, cols);
    Matrix matrix = bind_named_matrix(binder, name, packed, rows, (cols + PACKED - 1) / PACKED);
    if (!matrix.rows) return matrix;
    binder->weights->parameters += (size_t)rows * (size_t)(cols - matrix.cols);
    matrix.dtype = DTYPE_F4_E2M1;
    matrix.cols = cols;
    matrix.scale_cols = (cols + EXPONENT_BLOCK - 1) / EXPONENT_BLOCK;
    snprintf(name, sizeof name, "%s%s.scale", prefix, suffix);
    const Tensor *scale = bind_tensor(binder, name, exponents, 2, (int64_t[]){rows, matrix.scale_cols});
    if (!scale) return (Matrix){0};
    const float usual = weight_reach(cols) / CODE_SPREAD;
    matrix.exponents = binder->checkpoint->dummy ? make_up(binder, name, DTYPE_F8_E8M0, scale->size, usual, 0)
                                                 : move_weights(binder, scale->data, scale->size);
    return matrix;
}

/* fn, base and scale of the streams' weights; `n` of them. */
static HyperWeights bind_hyper(Binder *binder, const char *prefix, const Config *config, int n, int scales) {
    HyperWeights weights = {0};
    char name[256];
    snprintf(name, sizeof name, "%sfn", prefix);
    weights.fn = bind_named_matrix(binder, name, float_dtypes, n, config->hc_mult * config->hidden_size);
    weights.base = bind_vector(binder, prefix, "base", n);
    weights.scale = bind_vector(binder, prefix, "scale", scales);
    return weights;
}

static CompressorWeights bind_compressor(Binder *binder, const char *prefix, const Config *config, int ratio, int width, int dim) {
    CompressorWeights weights = {0};
    char name[256];
    weights.wkv = bind_scaled_matrix(binder, prefix, "wkv", width, config->hidden_size);
    weights.wgate = bind_scaled_matrix(binder, prefix, "wgate", width, config->hidden_size);
    snprintf(name, sizeof name, "%sape", prefix);
    weights.ape = bind_floats(binder, name, 2, (int64_t[]){ratio, width});
    weights.norm = bind_vector(binder, prefix, "norm.weight", dim);
    return weights;
}

static void bind_shared_key_attention(Binder *binder, LayerWeights *layer, const Config *config, const char *prefix) {
    const int heads = config->num_attention_heads, hidden = config->hidden_size, dim = config->head_dim;
    char published[256], saved[256];
    layer->q_a_proj = bind_scaled_matrix(binder, prefix, "attn.wq_a", config->q_lora_rank, hidden);
    layer->q_a_layernorm = bind_vector(binder, prefix, "attn.q_norm.weight", config->q_lora_rank);
    layer->q_b_proj = bind_scaled_matrix(binder, prefix, "attn.wq_b", heads * dim, config->q_lora_rank);
    layer->wkv = bind_scaled_matrix(binder, prefix, "attn.wkv", dim, hidden);
    snprintf(published, sizeof published, "%sattn.kv_norm.weight", prefix);
    snprintf(saved, sizeof saved, "%sattn.norm.weight", prefix);
    layer->kv_norm = bind_vector(binder, "", either_name(binder, published, saved), dim);
    layer->attention_sink = bind_vector(binder, prefix, "attn.attn_sink", heads);
    layer->o_a_proj = bind_scaled_matrix(binder, prefix, "attn.wo_a", config->o_groups * config->o_lora_rank,
                                         heads / config->o_groups * dim);
    layer->o_proj = bind_scaled_matrix(binder, prefix, "attn.wo_b", hidden, config->o_groups * config->o_lora_rank);
}

static void bind_index_queries(Binder *binder, LayerWeights *layer, const Config *config, const char *prefix) {
    layer->indexer_wq_b = bind_scaled_matrix(binder, prefix, "attn.indexer.wq_b", config->index_n_heads * config->index_head_dim,
                                             config->q_lora_rank);
    layer->indexer_weights_proj = bind_scaled_matrix(binder, prefix, "attn.indexer.weights_proj", config->index_n_heads,
                                                     config->hidden_size);
}

static void bind_compression(Binder *binder, LayerWeights *layer, const Config *config, const char *prefix,
                             Compression compression) {
    const int dim = config->head_dim;
    const bool sparse = compression == COMPRESSION_SPARSE;
    char inner[256];
    if (compression == COMPRESSION_NONE) return;
    snprintf(inner, sizeof inner, "%sattn.compressor.", prefix);
    layer->compressor = bind_compressor(binder, inner, config, sparse ? config->sparse_ratio : config->heavy_ratio,
                                        sparse ? 2 * dim : dim, dim);
    if (!sparse) return;
    bind_index_queries(binder, layer, config, prefix);
    snprintf(inner, sizeof inner, "%sattn.indexer.compressor.", prefix);
    layer->index_compressor = bind_compressor(binder, inner, config, config->sparse_ratio, 2 * config->index_head_dim,
                                              config->index_head_dim);
}

/* Which experts each token of the vocabulary goes to. */
static const int *bind_hash_experts(Binder *binder, const char *prefix, const Config *config) {
    static const DType integers[] = {DTYPE_I64, DTYPE_UNKNOWN};
    const int per_token = config->num_experts_per_tok;
    const size_t count = (size_t)config->vocab_size * (size_t)per_token;
    char name[256];
    snprintf(name, sizeof name, "%sffn.gate.tid2eid", prefix);
    const Tensor *tensor = bind_tensor(binder, name, integers, 2, (int64_t[]){config->vocab_size, per_token});
    if (!tensor) return NULL;
    int *table = allocate_zeroed(count, sizeof *table);
    arrput(binder->weights->owned, table);
    for (size_t i = 0; i < count; i++) {
        size_t first = i - i % (size_t)per_token;
        uint64_t expert = binder->checkpoint->dummy ? (i * 7 + i / 64) % (uint64_t)config->n_routed_experts
                                                    : load_u64(tensor->data + i * sizeof expert);
        bool known = expert < (uint64_t)config->n_routed_experts;
        for (size_t j = first; j < i && known && !binder->checkpoint->dummy; j++) known = table[j] != (int)expert;
        table[i] = known ? (int)expert : 0;
        if (known) continue;
        binder->failed = !fail(binder->error, "%s: tensor %s: token %zu names expert %" PRId64 ", wanted different ones below %d",
                               binder->checkpoint->directory, name, i / (size_t)per_token, (int64_t)expert,
                               config->n_routed_experts);
        return NULL;
    }
    return move_weights(binder, table, count * sizeof *table);
}

/* w1, w3 and w2 of one SwiGLU block, in the order of gate, up and down. */
typedef Matrix BindMatrix(Binder *binder, const char *prefix, const char *suffix, int rows, int cols);
static void bind_numbered_mlp(Binder *binder, BindMatrix *bind, Matrix *gate, Matrix *up, Matrix *down, const char *prefix,
                              int inter, int hidden) {
    *gate = bind(binder, prefix, "w1", inter, hidden);
    *up = bind(binder, prefix, "w3", inter, hidden);
    *down = bind(binder, prefix, "w2", hidden, inter);
}

static void bind_numbered_experts(Binder *binder, LayerWeights *layer, const Config *config, const char *prefix, bool hashed) {
    const int inter = config->moe_intermediate_size, hidden = config->hidden_size;
    const size_t n = (size_t)config->n_routed_experts;
    char name[200];
    layer->router = bind_scaled_matrix(binder, prefix, "ffn.gate", config->n_routed_experts, hidden);
    if (hashed) layer->hash_experts = bind_hash_experts(binder, prefix, config);
    else layer->e_score_correction_bias = bind_vector(binder, prefix, "ffn.gate.bias", config->n_routed_experts);
    Matrix *experts = allocate_zeroed(3 * n, sizeof *experts), *gate = experts, *up = gate + n, *down = up + n;
    arrput(binder->weights->owned, experts);
    for (size_t e = 0; e < n && !binder->failed; e++) {
        snprintf(name, sizeof name, "%sffn.experts.%zu.", prefix, e);
        bind_numbered_mlp(binder, bind_packed_matrix, &gate[e], &up[e], &down[e], name, inter, hidden);
    }
    finish_experts(binder, layer, experts, n, prefix);
    snprintf(name, sizeof name, "%sffn.shared_experts.", prefix);
    if (config->n_shared_experts)
        bind_numbered_mlp(binder, bind_scaled_matrix, &layer->gate_proj, &layer->up_proj, &layer->down_proj, name,
                          inter * config->n_shared_experts, hidden);
}

/* What every layer of V4 and V4.1 has. */
static void bind_stream_layer(Binder *binder, LayerWeights *layer, const Config *config, const char *prefix, bool hashed) {
    const int hidden = config->hidden_size, mixes = stream_mixes(config);
    char inner[100];
    layer->input_layernorm = bind_vector(binder, prefix, "attn_norm.weight", hidden);
    layer->post_attention_layernorm = bind_vector(binder, prefix, "ffn_norm.weight", hidden);
    snprintf(inner, sizeof inner, "%shc_attn_", prefix);
    layer->attention_hyper = bind_hyper(binder, inner, config, mixes, 3);
    snprintf(inner, sizeof inner, "%shc_ffn_", prefix);
    layer->mlp_hyper = bind_hyper(binder, inner, config, mixes, 3);
    bind_shared_key_attention(binder, layer, config, prefix);
    bind_numbered_experts(binder, layer, config, prefix, hashed);
}

static void bind_v4(Binder *binder, const Config *config) {
    Weights *weights = binder->weights;
    const int hidden = config->hidden_size, mult = config->hc_mult;
    const bool saved = checkpoint_find(binder->checkpoint, "model.embed_tokens.weight")
                       || checkpoint_find(binder->checkpoint, "model.norm.weight");
    const char *root = saved ? "model." : "";
    char prefix[64];
    binder->saved_names = saved;
    weights->embed_tokens = bind_named_matrix(binder, saved ? "model.embed_tokens.weight" : "embed.weight", float_dtypes,
                                              config->vocab_size, hidden);
    for (int i = 0; i < config->num_hidden_layers && !binder->failed; i++) {
        LayerWeights *layer = &weights->layers[i];
        snprintf(prefix, sizeof prefix, "%slayers.%d.", root, i);
        bind_stream_layer(binder, layer, config, prefix, config->hash_routed[i]);
        bind_compression(binder, layer, config, prefix, config->compression[i]);
    }
    weights->head_hyper = bind_hyper(binder, saved ? "model.hc_head.hc_" : "hc_head_", config, mult, 1);
    weights->norm = bind_vector(binder, root, "norm.weight", hidden);
    weights->lm_head = bind_named_matrix(binder, "head.weight", float_dtypes, config->vocab_size, hidden);
}

/* ---- DeepSeek-V4.1 */

/* The rows of a source are made of one latent for each group, and so are its index keys. */
static void bind_source(Binder *binder, LayerWeights *layer, const Config *config, const char *prefix, int ratio) {
    const int dim = config->head_dim;
    layer->compressor.wkv = bind_scaled_matrix(binder, prefix, "attn.compressor.wkv", dim, config->hidden_size);
    if (ratio > 1) layer->compressor.wgate = bind_scaled_matrix(binder, prefix, "attn.compressor.wgate", dim, config->hidden_size);
    layer->compressor.norm = bind_vector(binder, prefix, "attn.compressor.norm.weight", dim);
    layer->indexer_wk = bind_scaled_matrix(binder, prefix, "attn.indexer.wk", config->index_head_dim, dim);
    layer->indexer_k_norm = bind_vector(binder, prefix, "attn.indexer.k_norm.weight", config->index_head_dim);
}

/* The 128-bit generator that numpy's default_rng(seed) is (PCG XSL RR, seeded by SeedSequence): Engram's multipliers are its
 * first integers. */
typedef struct NumpyRandom { unsigned __int128 state, increment; } NumpyRandom;

static const unsigned __int128 pcg_multiplier = ((unsigned __int128)0x2360ED051FC65DA4 << 64) | 0x4385DF649FCCF645;

static uint32_t mix_seed(uint32_t *constant, uint32_t factor, uint32_t word) {
    word ^= *constant;
    *constant *= factor;
    word *= *constant;
    return word ^ word >> 16;
}

static NumpyRandom seed_numpy(uint64_t seed) {
    uint32_t pool[4] = {(uint32_t)seed, (uint32_t)(seed >> 32), 0, 0}, constant = 0x43b0d7e5;
    uint64_t words[4] = {0};
    for (int i = 0; i < 4; i++) pool[i] = mix_seed(&constant, 0x931e8875, pool[i]);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            if (i == j) continue;
            uint32_t mixed = pool[j] * 0xca01f9dd - mix_seed(&constant, 0x931e8875, pool[i]) * 0x4973f715;
            pool[j] = mixed ^ mixed >> 16;
        }
    constant = 0x8b51f9dd;
    for (int i = 0; i < 8; i++) words[i / 2] |= (uint64_t)mix_seed(&constant, 0x58f38ded, pool[i % 4]) << 32 * (i % 2);
    NumpyRandom random = {.increment = ((unsigned __int128)words[2] << 64 | words[3]) * 2 + 1};
    random.state = (random.increment + ((unsigned __int128)words[0] << 64 | words[1])) * pcg_multiplier + random.increment;
    return random;
}

/* Evenly below a bound of more than 32 bits (Lemire 2019). */
static uint64_t numpy_integer(NumpyRandom *random, uint64_t bound) {
    for (;;) {
        random->state = random->state * pcg_multiplier + random->increment;
        const uint64_t folded = (uint64_t)(random->state >> 64) ^ (uint64_t)random->state;
        const int turn = (int)(random->state >> 122);
        const unsigned __int128 product = (unsigned __int128)(folded >> turn | folded << (-turn & 63)) * bound;
        if ((uint64_t)product >= bound || (uint64_t)product >= -bound % bound) return (uint64_t)(product >> 64);
    }
}

static bool is_prime(int64_t n) {
    for (int64_t d = 2; d * d <= n; d++)
        if (n % d == 0) return false;
    return n > 1;
}

/* The hashes of one layer's table. *prime: the last that an earlier column took; no two columns of any table have the same.
 * Returns the rows that they reach. */
static int64_t make_hashes(EngramWeights *engram, const Config *config, int layer, int64_t *prime) {
    const uint64_t bound = (((uint64_t)1 << 63) - 1) / (uint64_t)config->engram_compressed_vocab_size / 2;
    NumpyRandom random = seed_numpy(10007 * (uint64_t)layer);
    int64_t rows = 0;
    for (int i = 0; i < config->engram_order; i++) engram->multipliers[i] = 2 * numpy_integer(&random, bound) + 1;
    for (int c = 0; c < (config->engram_order - 1) * config->engram_n_heads; c++) {
        do ++*prime;
        while (!is_prime(*prime));
        engram->primes[c] = *prime;
        engram->offsets[c] = rows;
        rows += *prime;
    }
    return rows;
}

/* Rows that a hash of an Engram table under --dummy has at most: the published ones have 16 million, 200 GB in all. */
enum { DUMMY_ENGRAM_ROWS = 4096 };

static int64_t engram_vocab(const Config *config, bool dummy) {
    return dummy && config->engram_vocab_size > DUMMY_ENGRAM_ROWS ? DUMMY_ENGRAM_ROWS : config->engram_vocab_size;
}

/* One layer's table, which stays where it is mapped, and what it is joined by. */
static const EngramWeights *bind_engram(Binder *binder, const Config *config, const char *prefix, int layer, int64_t *prime) {
    static const DType dtypes[] = {DTYPE_F8_E4M3, DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_UNKNOWN},
                       exponents[] = {DTYPE_F8_E8M0, DTYPE_UNKNOWN};
    const int dim = config->engram_head_dim, columns = (config->engram_order - 1) * config->engram_n_heads, mult = config->hc_mult;
    const bool dummy = binder->checkpoint->dummy;
    EngramWeights *engram = allocate_zeroed(1, sizeof *engram);
    arrput(binder->weights->owned, engram);
    const int64_t reached = make_hashes(engram, config, layer, prime), rows = dummy ? reached : config->engram_rows[layer],
                  across = (dim + EXPONENT_BLOCK - 1) / EXPONENT_BLOCK;
    char name[256];
    if (reached != rows && !binder->failed)
        binder->failed = !fail(binder->error, "%s: engram_num_embeddings of layer %d: found %" PRId64 ", wanted %" PRId64
                               ", which its hashes reach", binder->checkpoint->directory, layer, rows, reached);
    snprintf(name, sizeof name, "%sengram.embed.weight", prefix);
    const Tensor *tensor = bind_tensor(binder, name, dtypes, 2, (int64_t[]){rows, dim});
    if (!tensor) return engram;
    engram->dtype = tensor->dtype;
    engram->table = dummy ? make_up_for(binder, &c_backend, name, engram->dtype, (size_t)(rows * dim), 0, CODE_REACH)
                          : tensor->data;
    binder->weights->parameters += (size_t)(rows * dim);
    snprintf(name, sizeof name, "%sengram.embed.scale", prefix);
    if (engram->dtype == DTYPE_F8_E4M3 && (tensor = bind_tensor(binder, name, exponents, 2, (int64_t[]){rows, across})))
        engram->exponents = dummy ? make_up_for(binder, &c_backend, name, DTYPE_F8_E8M0, (size_t)(rows * across), 0x1p-7f, 0)
                                  : tensor->data;
    engram->wkv = bind_scaled_matrix(binder, prefix, "engram.wkv", (mult + 1) * config->hidden_size, columns * dim);
    snprintf(name, sizeof name, "%sengram.q_weight", prefix);
    engram->q_weight = bind_floats(binder, name, 2, (int64_t[]){mult, config->hidden_size});
    snprintf(name, sizeof name, "%sengram.k_weight", prefix);
    engram->k_weight = bind_floats(binder, name, 2, (int64_t[]){mult, config->hidden_size});
    return engram;
}

/* What Engram takes each token for; made from the tokenizer by weights/engram_map.py, which says how. */
static const int *bind_token_map(Binder *binder, const Config *config) {
    static const DType integers[] = {DTYPE_I32, DTYPE_UNKNOWN};
    const char *name = "engram.token_map";
    const size_t n = (size_t)config->vocab_size;
    if (!binder->failed && !binder->checkpoint->dummy && !checkpoint_find(binder->checkpoint, name))
        binder->failed = !fail(binder->error, "%s: tensor %s: found neither it nor engram.safetensors, which "
                               "weights/engram_map.py makes from the tokenizer", binder->checkpoint->directory, name);
    const Tensor *tensor = bind_tensor(binder, name, integers, 1, (int64_t[]){config->vocab_size});
    if (!tensor) return NULL;
    int *map = allocate_zeroed(n, sizeof *map);
    arrput(binder->weights->owned, map);
    if (!binder->checkpoint->dummy) memcpy(map, tensor->data, n * sizeof *map);
    for (size_t i = 0; i < n && binder->checkpoint->dummy; i++) map[i] = (int)(i % (size_t)config->engram_compressed_vocab_size);
    for (size_t i = 0; i < n && !binder->failed; i++)
        if (map[i] < 0 || map[i] >= config->engram_compressed_vocab_size)
            binder->failed = !fail(binder->error, "%s: tensor %s: found %d for token %zu, wanted ids below "
                                   "engram_compressed_vocab_size, %d", binder->checkpoint->directory, name, map[i], i,
                                   config->engram_compressed_vocab_size);
    return move_weights(binder, map, n * sizeof *map);
}

static void bind_v41(Binder *binder, const Config *config) {
    Weights *weights = binder->weights;
    const int hidden = config->hidden_size;
    int64_t prime = engram_vocab(config, binder->checkpoint->dummy) - 1;
    bool engrams = false;
    char prefix[64];
    weights->embed_tokens = bind_named_matrix(binder, "embed.weight", float_dtypes, config->vocab_size, hidden);
    for (int i = 0; i < config->num_hidden_layers && !binder->failed; i++) {
        LayerWeights *layer = &weights->layers[i];
        snprintf(prefix, sizeof prefix, "layers.%d.", i);
        bind_stream_layer(binder, layer, config, prefix, false);
        if (config->makes_rows[i]) bind_source(binder, layer, config, prefix, config->source_ratio[config->source[i]]);
        if (config->selects[i]) bind_index_queries(binder, layer, config, prefix);
        if (config->engram_rows[i]) layer->engram = bind_engram(binder, config, prefix, i, &prime);
        engrams |= config->engram_rows[i] > 0;
    }
    if (engrams) weights->token_map = bind_token_map(binder, config);
    weights->norm = bind_vector(binder, "", "norm.weight", hidden);
    if (config->tie_word_embeddings) weights->lm_head = weights->embed_tokens;
    else weights->lm_head = bind_named_matrix(binder, "head.weight", float_dtypes, config->vocab_size, hidden);
}

bool weights_bind(Weights *weights, const Checkpoint *checkpoint, const Config *config, const Backend *backend, Error *error) {
    *weights = (Weights){0};
    Binder binder = {.checkpoint = checkpoint, .weights = weights, .backend = backend, .error = error,
                     .quantised = config->quantised, .weight_block = config->weight_block};
    weights->layers = allocate_zeroed((size_t)config->num_hidden_layers, sizeof(LayerWeights));
    (config->family == FAMILY_DEEPSEEK_V41 ? bind_v41 : has_streams(config) ? bind_v4 : bind_usual)(&binder, config);
    if (binder.failed && backend) backend->wait();  /* it may still read what goes now */
    if (binder.failed) weights_free(weights);
    return !binder.failed;
}

void weights_free(Weights *weights) {
    for (size_t i = 0; i < arrlenu(weights->owned); i++) free(weights->owned[i]);
    arrfree(weights->owned);
    free(weights->layers);
    *weights = (Weights){0};
}

/* =====================================================================================================================
 * Memory plan
 *
 * Owns: the cache and the activations, each one block whose size is known before a weight is read. A block is laid out by
 * the same function that measures it, so the plan printed is the plan used. Pages are touched only as they fill. The controller's
 * own records, some hundred bytes for each page, are taken beside them.
 */

typedef struct Arena {
    uint8_t *base;              /* NULL while measuring */
    size_t used;
    bool overflow;
} Arena;

static void *carve(Arena *arena, size_t count, size_t width, size_t size) {
    size_t bytes, start = (arena->used + 63) / 64 * 64;
    arena->overflow |= !multiply(count, width, &bytes) || !multiply(bytes, size, &bytes) || bytes > SIZE_MAX / 4 - start;
    if (arena->overflow) return NULL;
    arena->used = start + bytes;
    return arena->base ? arena->base + start : NULL;
}

static float *carve_floats(Arena *arena, int count, int width) {
    return carve(arena, (size_t)count, (size_t)width, sizeof(float));
}

static int rope_dim(const Config *config) { return has_indexer(config) ? config->qk_rope_head_dim : config->head_dim; }

static size_t page_bytes(const Cache *cache) { return rows_before(cache, cache->sources) * cache->format.stride; }

static size_t index_page_bytes(const Cache *cache) { return rows_before(cache, cache->groups) * cache->index_format.stride; }

size_t page_image_bytes(const Cache *cache) { return page_bytes(cache) + index_page_bytes(cache); }

size_t ring_bytes(const Cache *cache) {
    return (size_t)cache->draft_layers * (size_t)cache->draft_rows * cache->draft_format.stride;
}

/* Where the rows of sessions lie, for the controller or as operations see it. Returns how many bytes that is. */
static size_t lay_out_tables(CacheTables *tables, const Cache *cache, Arena *arena) {
    size_t sessions = (size_t)cache->sessions, context_pages = (size_t)cache->context_pages, start;
    tables->tail_base = carve(arena, sessions, 1, sizeof(int));
    start = arena->used - sessions * sizeof(int);
    tables->tail = carve(arena, sessions, (size_t)cache->tail_ring, sizeof(DevicePage));
    tables->ready = carve(arena, sessions, context_pages, sizeof(DevicePage));
    tables->hot = carve(arena, sessions, (size_t)cache->hot_pages, sizeof(DevicePage));
    tables->index = carve(arena, sessions, context_pages, sizeof(DevicePage));
    tables->host = carve(arena, sessions, context_pages, sizeof(HostPage));
    return arena->used - start;
}

/* What DeepSeek-V4's layers keep on the device: the rings and passes of their trails, and heavily compressed rows. */
static void lay_out_trails(Cache *cache, Arena *arena) {
    cache->seen_trails = carve(arena, (size_t)cache->trail_layers, TRAILS, sizeof *cache->seen_trails);
    for (int i = 0; i < cache->trail_layers * TRAILS; i++) {
        Trail *trail = &cache->trails[i];
        trail->ring = carve(arena, (size_t)cache->sessions * (size_t)trail->length, trail->stride, 1);
        trail->pass = carve(arena, trail->length ? (size_t)cache->pass_rows : 0, trail->stride, 1);
    }
    cache->heavy = carve(arena, (size_t)cache->heavy_layers * (size_t)cache->sessions, (size_t)cache->heavy_rows,
                         cache->format.stride);
}

/* The device tier: pool, staging, index keys, draft rings, the tables as operations see them and the hot caches' slots. */
static void lay_out_cache(Cache *cache, Arena *arena) {
    size_t sessions = (size_t)cache->sessions, states = sessions * (size_t)cache->groups, hot_rows = (size_t)cache->hot_rows;
    cache->device = carve(arena, (size_t)cache->device_pages.n_pages, page_bytes(cache), 1);
    cache->staging = carve(arena, (size_t)(cache->live_sources * cache->staging_blocks), (size_t)cache->staging_rows,
                           cache->format.stride);
    cache->index_keys = carve(arena, (size_t)cache->index_pages.n_pages, index_page_bytes(cache), 1);
    cache->draft_ring = carve(arena, sessions, ring_bytes(cache), 1);
    lay_out_trails(cache, arena);
    cache->tables_bytes = lay_out_tables(&cache->seen, cache, arena);
    cache->slots.clock = carve(arena, states, 1, sizeof(uint32_t));
    cache->slots.tag = carve(arena, states, hot_rows, sizeof(int32_t));
    cache->slots.stamp = carve(arena, states, hot_rows, sizeof(uint32_t));
    cache->slots.slot_of = carve(arena, cache->hot_rows ? states : 0, (size_t)cache->context_pages * PAGE_ROWS, sizeof(uint16_t));
}

static void lay_out_host(Cache *cache, Arena *arena) {
    cache->host = carve(arena, (size_t)cache->host_pages.n_pages, page_bytes(cache), 1);
    cache->host_index = carve(arena, (size_t)cache->host_pages.n_pages, index_page_bytes(cache), 1);
}

/* The bytes of a cache with so many pages; they stay its numbers of pages, so the last call decides. */
static size_t measure_cache(Cache *cache, int64_t pages, int64_t index_pages, bool *overflow) {
    Arena arena = {0};
    cache->device_pages.n_pages = pages < INT_MAX ? (int)pages : INT_MAX;
    cache->index_pages.n_pages = index_pages < INT_MAX ? (int)index_pages : INT_MAX;
    lay_out_cache(cache, &arena);
    *overflow |= arena.overflow || index_pages > INT_MAX / PAGE_ROWS
                 || pages > (INT_MAX - (int64_t)cache->staging_blocks * cache->staging_rows) / PAGE_ROWS;
    return arena.used;
}

/* An indexer's queries, and what is selected. */
static void lay_out_selection(State *state, const Config *config, const Cache *cache, Arena *arena) {
    const int rows = state->max_rows, context = cache->context_pages * PAGE_ROWS, fit = larger((2 << 20) / context, 32);
    state->index_q = carve_floats(arena, rows, config->index_n_heads * config->index_head_dim);
    state->index_k = carve_floats(arena, rows, config->index_head_dim);
    state->index_weights = carve_floats(arena, rows, config->index_n_heads);
    state->scratch_rows = fit < rows ? fit : rows;  /* 8 MB, or 32 rows */
    state->index_scratch = carve_floats(arena, state->scratch_rows, context);
    state->selection.capacity = cache->index_topk;
    state->selection.ids = carve(arena, (size_t)rows, (size_t)state->selection.capacity, sizeof(int));
    state->selection.count = carve(arena, (size_t)rows, 1, sizeof(int));
    state->locations = carve(arena, (size_t)rows, (size_t)state->selection.capacity, sizeof(DeviceRow));
    state->plan.capacity = cache->hot_rows ? rows * cache->index_topk : 0;
    state->plan.count = carve(arena, (size_t)rows, 1, sizeof(int));
    state->plan.from = carve(arena, (size_t)state->plan.capacity, 1, sizeof(HostRow));
    state->plan.to = carve(arena, (size_t)state->plan.capacity, 1, sizeof(DeviceRow));
}

/* stages: the layers of a drafter inside the checkpoint, which may have more experts. */
static void lay_out_experts(State *state, const Config *config, const Config *stages, Arena *arena) {
    const int rows = state->max_rows, inter = config->moe_intermediate_size,
              chosen = larger(config->num_experts_per_tok, stages->num_experts_per_tok);
    state->router_logits = carve_floats(arena, rows, larger(config->n_routed_experts, stages->n_routed_experts));
    state->expert_picks = carve(arena, (size_t)rows, (size_t)chosen, sizeof(int));
    state->expert_weights = carve_floats(arena, rows, chosen);
    state->expert_scratch = carve_floats(
        arena, rows, larger(2 * (config->hidden_size + inter * larger(config->n_shared_experts, 1)),
                            (chosen + 1) * inter + (config->qat ? config->hidden_size : 0)));
}

/* Values that Engram reads for a token, in all columns. */
static int engram_width(const Config *config) {
    return larger(config->engram_order - 1, 0) * config->engram_n_heads * config->engram_head_dim;
}

static void lay_out_v4(State *state, const Config *config, const DraftConfig *draft, Arena *arena) {
    const int rows = state->max_rows, q_width = config->num_attention_heads * config->head_dim, half = rope_dim(config) / 2;
    state->mixes = carve_floats(arena, rows, stream_mixes(config));
    state->q_lora = carve_floats(arena, rows, config->q_lora_rank);
    state->q = carve_floats(arena, rows, q_width);
    state->kv = carve_floats(arena, rows, config->head_dim);
    state->attended = carve_floats(arena, rows, q_width);
    state->o_latent = carve_floats(arena, rows, config->o_groups * config->o_lora_rank);
    int widest = larger(larger(config->hidden_size, config->q_lora_rank), config->o_groups * config->o_lora_rank);
    widest = larger(larger(widest, engram_width(config)), draft->feature_width);
    state->rounded = carve_floats(arena, config->qat ? rows : 0, widest);
    state->compress_cosine = carve_floats(arena, rows, half);
    state->compress_sine = carve_floats(arena, rows, half);
    state->compress_frequency = carve_floats(arena, 1, half);
    state->late_mixes = carve_floats(arena, rows, stream_mixes(config));
    state->pass_rows = carve(arena, (size_t)rows, 1, sizeof(DeviceRow));
    state->heavy_ids = carve(arena, (size_t)rows, 1, sizeof(DeviceRow));
    state->group_rows = carve(arena, (size_t)rows, 1, sizeof(Row));
    state->heavy_count = carve(arena, (size_t)rows, 1, sizeof(int));
}

static void lay_out_v41(State *state, const Config *config, const Cache *cache, Arena *arena) {
    const int rows = state->max_rows, half = rope_dim(config) / 2, memory = engram_width(config);
    const int64_t context = (int64_t)cache->context_pages * PAGE_ROWS, size = larger(config->candidate_block_size, 1);
    state->latents = carve_floats(arena, rows, config->head_dim);
    state->group_cosine = carve_floats(arena, rows, half);
    state->group_sine = carve_floats(arena, rows, half);
    state->first_rows = carve(arena, (size_t)rows, 1, sizeof(Row));
    state->blocks = carve(arena, (size_t)rows, (size_t)((context + size - 1) / size + 63) / 64, sizeof(uint64_t));
    state->engram = carve_floats(arena, rows, memory);
    state->engram_kv = carve_floats(arena, memory ? rows : 0, (config->hc_mult + 1) * config->hidden_size);
}

static void lay_out_state(State *state, const Config *config, const DraftConfig *draft, const Cache *cache, Arena *arena) {
    int rows = state->max_rows, hidden = config->hidden_size, heads = config->num_attention_heads, half = rope_dim(config) / 2;
    int inner = larger(config->intermediate_size, config->moe_intermediate_size * config->n_shared_experts);
    state->rows = carve(arena, (size_t)rows, 1, sizeof(Row));
    state->indices = carve(arena, (size_t)rows, 1, sizeof(int));
    state->report = carve(arena, 1, 1, sizeof(PassReport));
    state->hidden = carve_floats(arena, rows, residual_streams(config) * hidden);
    state->normed = carve_floats(arena, rows, hidden);
    state->branch = carve_floats(arena, rows, hidden);
    state->gate = carve_floats(arena, rows, inner);
    state->up = carve_floats(arena, rows, inner);
    state->cosine = carve_floats(arena, rows, half);
    state->sine = carve_floats(arena, rows, half);
    state->inverse_frequency = carve_floats(arena, 1, half);
    state->kv_rows = carve(arena, (size_t)rows, 1, sizeof(DeviceRow));
    state->index_rows = carve(arena, (size_t)rows, 1, sizeof(DeviceRow));
    state->logits = carve_floats(arena, state->logit_rows, config->vocab_size);
    if (!has_indexer(config)) {
        state->q = carve_floats(arena, rows, heads * config->head_dim);
        state->kv = carve_floats(arena, rows, 2 * config->num_key_value_heads * config->head_dim);
        state->attended = carve_floats(arena, rows, heads * config->head_dim);
        return;
    }
    if (has_latent_attention(config)) {
        int width = config->kv_lora_rank + config->qk_rope_head_dim;
        state->q_lora = carve_floats(arena, rows, config->q_lora_rank);
        state->q = carve_floats(arena, rows, heads * (config->qk_nope_head_dim + config->qk_rope_head_dim));
        state->kv = carve_floats(arena, rows, width);
        state->q_absorbed = carve_floats(arena, rows, heads * width);
        state->z = carve_floats(arena, rows, heads * config->kv_lora_rank);
        state->attended = carve_floats(arena, rows, heads * config->v_head_dim);
    } else lay_out_v4(state, config, draft, arena);
    if (config->family == FAMILY_DEEPSEEK_V41) lay_out_v41(state, config, cache, arena);
    lay_out_selection(state, config, cache, arena);
    lay_out_experts(state, config, &draft->backbone, arena);
}

/* What the layers of a drafter with a checkpoint of its own work with. */
static void lay_out_draft_layers(DraftState *state, const DraftConfig *draft, Arena *arena) {
    const Config *config = &draft->backbone;
    const int rows = state->max_rows, hidden = config->hidden_size, q_width = config->num_attention_heads * config->head_dim;
    state->q = carve_floats(arena, rows, q_width);
    state->attended = carve_floats(arena, rows, q_width);
    state->kv = carve_floats(arena, rows, 2 * config->num_key_value_heads * config->head_dim);
    state->gate = carve_floats(arena, rows, config->intermediate_size);
    state->up = carve_floats(arena, rows, config->intermediate_size);
    state->delta = carve_floats(arena, rows,
                                draft->conv_kernel_size ? 2 * draft->conv_kernel_size * (hidden / draft->conv_group_size) : 0);
    state->cosine = carve_floats(arena, rows, config->head_dim / 2);
    state->sine = carve_floats(arena, rows, config->head_dim / 2);
    state->inverse_frequency = carve_floats(arena, 1, config->head_dim / 2);
}

/* What stages have beside the target's own activations. */
static void lay_out_stages(DraftState *state, const DraftConfig *draft, const State *target_state, const Cache *cache,
                           Arena *arena, Arena *host_arena) {
    const Config *config = &draft->backbone;
    const size_t rows = (size_t)state->max_rows, keys = (size_t)(config->sliding_window + draft->block_size);
    state->shares = carve_floats(arena, target_state->max_rows, stream_mixes(config));
    state->block_rows = carve(arena, rows, cache->draft_format.stride, 1);
    state->keys = carve(arena, rows, keys, sizeof(DeviceRow));
    state->key_count = carve(arena, rows, 1, sizeof(int));
    state->key_list = carve(host_arena, rows, keys, sizeof(DeviceRow));
    state->key_count_list = carve(host_arena, rows, 1, sizeof(int));
}

/* The drafter's activations; its logits are the target's. */
static void lay_out_draft(Drafter *drafter, const State *target_state, const Cache *cache, Arena *arena, Arena *host_arena) {
    const DraftConfig *draft = &drafter->config;
    DraftState *state = &drafter->state;
    if (!draft->architecture) return;
    const int sessions = cache->sessions, hidden = draft->backbone.hidden_size, feature = draft->feature_width;
    const bool stages = has_streams(&draft->backbone);
    int fit = target_state->logit_rows / (draft->slots + 1);
    state->max_blocks = fit < 1 ? 1 : fit < sessions ? fit : sessions;
    state->max_rows = larger(state->max_blocks * draft->block_size, DRAFT_ROWS);
    const int rows = state->max_rows, slots = draft->slots;
    state->rows = carve(arena, (size_t)rows, 1, sizeof(Row));
    state->indices = carve(arena, (size_t)rows, 2, sizeof(int));
    state->row_list = carve(host_arena, (size_t)rows, 1, sizeof(Row));
    state->index_list = carve(host_arena, (size_t)rows, 2, sizeof(int));
    state->ring_list = carve(host_arena, (size_t)rows, 1, sizeof(DeviceRow));
    state->ring_rows = carve(arena, (size_t)rows, 1, sizeof(DeviceRow));
    state->features = carve_floats(arena, target_state->max_rows, feature);
    state->gathered = carve_floats(arena, rows, feature);
    state->kept = carve_floats(arena, sessions * KEPT_FEATURES, feature);
    state->hidden = carve_floats(arena, rows, hidden);
    state->normed = carve_floats(arena, rows, hidden);
    state->branch = carve_floats(arena, rows, hidden);
    if (stages) lay_out_stages(state, draft, target_state, cache, arena, host_arena);
    else lay_out_draft_layers(state, draft, arena);
    state->ranks = carve_floats(arena, rows, larger(draft->selector_rank, draft->markov_rank));
    state->bias = carve_floats(arena, draft->markov_rank ? state->max_blocks : 0, draft->draft_vocab_size);
    state->joined = carve_floats(arena, state->max_blocks, hidden + draft->markov_rank);
    state->scratch = carve_floats(arena, 2 * sessions, MAX_PREDICTOR_WIDTH);
    state->drafts.slots = slots;
    state->drafts.ids = carve(arena, (size_t)sessions, (size_t)(slots * CANDIDATES), sizeof(int));
    state->drafts.scores = carve_floats(arena, sessions, slots * CANDIDATES);
    state->drafts.q = carve_floats(arena, sessions, slots * CANDIDATES);
    state->drafts.features = carve_floats(arena, sessions, slots * DVL_FEATURES);
    state->drafts.tokens = carve(host_arena, (size_t)sessions, (size_t)slots, sizeof(int));
    state->drafts.confidence = carve_floats(host_arena, sessions, slots);
    state->drafts.survival = carve_floats(host_arena, sessions, slots);
}

const char *const kv_dtype_names[] = {[KV_F32] = "f32", [KV_BF16] = "bf16", [KV_F8] = "fp8", [KV_F4] = "fp4"};

const char *const kv_mode_names[MODES] = {
    [MODE_RESIDENT] = "resident", [MODE_HISPARSE] = "hisparse", [MODE_ADAPTIVE] = "adaptive"};

/* Codes that share a scale: of DeepSeek-V4's rows; of V4.1's in windows, and made of groups. */
enum { CACHED_GROUP = 64, WINDOW_GROUP = 32, SOURCE_GROUP = 16 };

/* Index keys of both: fp4 or as they are. */
static RowFormat group_key_format(const Config *config, KvDtype dtype) {
    RowFormat format = dtype == KV_F4 ? scaled_row_format(KV_F4, config->index_head_dim, 0, EXPONENT_BLOCK, SCALES_E8M0)
                                      : row_format(dtype == KV_F32 ? KV_F32 : KV_BF16, 0, config->index_head_dim, 128);
    format.stride = (format.bytes + 15) / 16 * 16;  /* as in index_row_format() */
    return format;
}

/* Of DeepSeek-V4: every sparse layer is a source and a group of its own, whose rows each hold sparse_ratio positions. Windows,
 * the groups that compressors have not made rows of, and heavily compressed rows stay on the device. Trails reach MAX_BLOCK
 * positions further back than any layer looks, so that a session can be taken back by a block. */
static void shape_compressed_cache(Cache *cache, const Config *config, const EngineOptions *options) {
    const int dim = config->head_dim, turned = config->qk_rope_head_dim;
    cache->ratio = config->sparse_ratio;
    cache->trail_layers = config->num_hidden_layers;
    cache->format = scaled_row_format(options->kv_dtype == KV_F4 ? KV_F8 : options->kv_dtype, dim - turned, turned, CACHED_GROUP,
                                      SCALES_E8M0);
    cache->window_format = cache->format;
    cache->index_format = group_key_format(config, options->kv_dtype);
    cache->trails = allocate_zeroed((size_t)cache->trail_layers * TRAILS, sizeof *cache->trails);
    for (int i = 0; i < config->num_hidden_layers; i++) {
        const bool sparse = config->compression[i] == COMPRESSION_SPARSE, heavy = config->compression[i] == COMPRESSION_HEAVY;
        Trail *trails = &cache->trails[i * TRAILS];
        trails[TRAIL_WINDOW] = (Trail){.length = config->sliding_window + MAX_BLOCK, .stride = cache->format.stride};
        if (sparse || heavy) {                      /* values and gates; where groups overlap, of two kinds and of two groups */
            int width = sparse ? 4 * dim : 2 * dim, span = sparse ? 2 * config->sparse_ratio : config->heavy_ratio;
            trails[TRAIL_GROUP] = (Trail){.length = span + MAX_BLOCK, .stride = (size_t)width * sizeof(float)};
        }
        if (sparse)
            trails[TRAIL_INDEX_GROUP] = (Trail){.length = 2 * config->sparse_ratio + MAX_BLOCK,
                                                .stride = (size_t)(4 * config->index_head_dim) * sizeof(float)};
        cache->sources += sparse;
        cache->heavy_layers += heavy;
    }
    cache->groups = cache->sources;
    cache->group_of = allocate_zeroed((size_t)cache->sources, sizeof(int));
    cache->member_of = allocate_zeroed((size_t)cache->sources, sizeof(int));
    for (int i = 0; i < cache->sources; i++) cache->group_of[i] = i;
    cache->heavy_ratio = config->heavy_ratio;
    cache->heavy_rows = cache->heavy_layers ? cache->context / config->heavy_ratio : 0;
    int rows = larger(cache->context / cache->ratio, 1);
    cache->index_topk = !cache->sources ? 0 : config->index_topk < rows ? config->index_topk : rows;
}

/* Of DeepSeek-V4.1: few sources, of rows of one or two positions, and a group for each, though several layers select from one. */
static void shape_source_cache(Cache *cache, const Config *config, const EngineOptions *options) {
    const int dim = config->head_dim, topk = config->index_topk;
    const bool codes = options->kv_dtype == KV_F8 || options->kv_dtype == KV_F4;
    cache->window_format = scaled_row_format(codes ? KV_F8 : options->kv_dtype, dim, 0, WINDOW_GROUP, SCALES_E8M0);
    cache->format = cache->window_format;
    if (options->kv_dtype == KV_F4) cache->format = scaled_row_format(KV_F4, dim, 0, SOURCE_GROUP, SCALES_E4M3);
    cache->index_format = group_key_format(config, options->kv_dtype);
    cache->trail_layers = config->num_hidden_layers;
    cache->heavy_ratio = 1;
    cache->trails = allocate_zeroed((size_t)cache->trail_layers * TRAILS, sizeof *cache->trails);
    for (int i = 0; i < config->num_hidden_layers; i++) {
        Trail *trails = &cache->trails[i * TRAILS];
        const int ratio = config->makes_rows[i] ? config->source_ratio[config->source[i]] : 1;
        trails[TRAIL_WINDOW] = (Trail){.length = config->sliding_window + MAX_BLOCK, .stride = cache->window_format.stride};
        if (ratio > 1) trails[TRAIL_GROUP] = (Trail){.length = ratio + MAX_BLOCK, .stride = (size_t)(2 * dim) * sizeof(float)};
    }
    if (config->engram_order)
        cache->trails[TRAIL_TOKENS] = (Trail){.length = config->engram_order + MAX_BLOCK, .stride = sizeof(int)};
    cache->sources = cache->groups = config->n_sources;
    cache->group_of = allocate_zeroed((size_t)cache->sources, sizeof(int));
    cache->member_of = allocate_zeroed((size_t)cache->sources, sizeof(int));
    cache->stretch = allocate_zeroed((size_t)cache->sources, sizeof(int));
    cache->rows_before = allocate_zeroed((size_t)cache->sources + 1, sizeof(int));
    for (int s = 0; s < cache->sources; s++)
        if (!s || config->source_ratio[s] < cache->ratio) cache->ratio = config->source_ratio[s];
    for (int s = 0; s < cache->sources; s++) {
        cache->group_of[s] = s;
        cache->stretch[s] = config->source_ratio[s] / cache->ratio;
        cache->rows_before[s + 1] = cache->rows_before[s] + PAGE_ROWS / cache->stretch[s];
    }
    const int rows = larger(cache->context / cache->ratio, 1);
    cache->index_topk = !cache->sources ? 0 : topk < rows ? topk : rows;
}

/* What the model asks of the hierarchy: its rows, and which layers share a selection. */
static void shape_cache(Cache *cache, const Config *config, const EngineOptions *options) {
    bool latent = has_latent_attention(config);
    cache->ratio = 1;
    cache->kv_dtype = options->kv_dtype;
    if (config->family == FAMILY_DEEPSEEK_V4) return shape_compressed_cache(cache, config, options);
    if (config->family == FAMILY_DEEPSEEK_V41) return shape_source_cache(cache, config, options);
    cache->sources = config->num_hidden_layers;
    cache->group_of = allocate_zeroed((size_t)cache->sources, sizeof(int));
    cache->member_of = allocate_zeroed((size_t)cache->sources, sizeof(int));
    for (int i = 0; latent && i < cache->sources; i++) {
        if (config->indexer_full[i]) cache->groups++;
        cache->group_of[i] = cache->groups - 1;
        cache->member_of[i] = config->indexer_full[i] ? 0 : cache->member_of[i - 1] + 1;
    }
    cache->format = latent ? row_format(options->kv_dtype, config->kv_lora_rank, config->qk_rope_head_dim, 128)
                           : row_format(options->kv_dtype, 2 * config->num_key_value_heads * config->head_dim, 0,
                                        config->head_dim < 128 ? config->head_dim : 128);
    cache->index_format = index_row_format(options->kv_dtype, config->index_head_dim);
    cache->index_topk = !latent ? 0 : config->index_topk < cache->context ? config->index_topk : cache->context;
}

/* Values of a row of the ring: keys and values of all heads, or of stages the key that is a value too. */
static int draft_width(const Config *backbone) {
    return has_streams(backbone) ? backbone->head_dim : 2 * backbone->num_key_value_heads * backbone->head_dim;
}

/* The drafter's ring: the rows its widest window sees, a block, and what alignment to pages adds (eq. 9). Draft rows are never
 * narrower than bf16: at eight bits hardly a draft is accepted. */
static void shape_ring(Cache *cache, const DraftConfig *draft, const EngineOptions *options) {
    const Config *backbone = &draft->backbone;
    int window = draft->widest_window, block = larger(QUERY_BLOCK, draft->slots + 1);
    if (!draft->architecture) return;
    cache->draft_layers = backbone->num_hidden_layers;
    if (window > cache->context) window = cache->context;
    cache->draft_rows = (window + PAGE_ROWS - 1 + block + PAGE_ROWS - 1) / PAGE_ROWS * PAGE_ROWS;
    cache->draft_format = row_format(options->kv_dtype == KV_F32 ? KV_F32 : KV_BF16, draft_width(backbone), 0, 128);
}

/* The sizes that follow from the mode. */
static bool size_hot_cache(Cache *cache, const EngineOptions *options, Error *error) {
    cache->mode = cache->index_topk ? options->kv_mode : MODE_RESIDENT;
    cache->reclaim = options->reclaim;
    cache->lookup = options->lookup;
    cache->context_pages = (cache->context + page_positions(cache) - 1) / page_positions(cache);
    for (cache->tail_ring = 4; cache->tail_ring < TAIL_PAGES + cache->pass_rows / PAGE_ROWS + 1;) cache->tail_ring *= 2;
    if (cache->mode == MODE_RESIDENT) return true;
    int stretch = 1, coarsest;                      /* the coarsest source has that much fewer slots, and rows */
    for (int s = 0; s < cache->sources; s++) stretch = larger(stretch, stretch_of(cache, s));
    coarsest = larger(cache->context / (cache->ratio * stretch), 1);
    const int64_t whole = (int64_t)cache->context_pages * PAGE_ROWS,
                  slots = (int64_t)(cache->index_topk < coarsest ? cache->index_topk : coarsest) * stretch,
                  least = slots > cache->index_topk ? slots : cache->index_topk, twice = 2 * least,
                  wanted = options->hot_rows ? options->hot_rows : twice < whole ? twice : whole;
    cache->staging_rows = QUERY_BLOCK * cache->index_topk;
    if (wanted < least)
        return fail(error, "--hot %" PRId64 ": one query selects %d rows, so the hot cache wants at least as many%s", wanted,
                    cache->index_topk, stretch > 1 ? " in the source that has half of them" : "");
    if (wanted >= UINT16_MAX)
        return fail(error,
                    "a hot cache of %" PRId64 " rows is more than the %d it can count: lower --hot or --index-topk, or take "
                    "--kv resident",
                    wanted, UINT16_MAX - 1);
    cache->hot_rows = (int)wanted;
    cache->hot_pages = (cache->hot_rows + PAGE_ROWS - 1) / PAGE_ROWS;
    cache->live_sources = cache->backend->live_sources;
    cache->staging_blocks = cache->draft_layers ? cache->sessions : 1;  /* without a drafter only a prompt brings several rows */
    return true;
}

static bool refuse_pages(const Cache *cache, const EngineOptions *options, Error *error) {
    return fail(error, "%s: %d sessions of %d rows are too many: the pages cannot be counted", options->model, cache->sessions,
                cache->context);
}

/* Pages that every session needs for itself, whatever is lent. */
static int required_pages(const Cache *cache) { return cache->hot_pages + TAIL_PAGES; }

/* How many pages the device pools have, under the budget. A session needs its required pages (resident: all of them) and index
 * pages for its whole context; with a budget, as many such sessions as it holds get their index pages and what is left is
 * payload. The reserve M_res is one session's required pages, or a hundredth of the pool if that is more. */
static bool size_pools(Cache *cache, const EngineOptions *options, Error *error) {
    const bool resident = cache->mode == MODE_RESIDENT, adaptive = cache->mode == MODE_ADAPTIVE;
    const int64_t context_pages = cache->context_pages, required = resident ? context_pages : required_pages(cache);
    int64_t sessions = cache->sessions, reserve = adaptive ? required : 0, pages, index_pages, all;
    bool overflow = false;
    all = sessions * (required + (adaptive ? context_pages : 0)) + reserve;
    if (adaptive && all / 100 > reserve) all += all / 100;
    cache->least_bytes = measure_cache(cache, required + reserve + 1, context_pages + 1, &overflow);
    pages = all;
    if (options->kv_budget) {
        if (options->kv_budget < cache->least_bytes)
            return fail(error, "%s: --kv-budget %zu: one session of %d rows%s needs %zu bytes; raise it, or lower -c%s%s",
                        options->model, options->kv_budget, cache->context,
                        cache->sessions > 1 ? ", beside the tables of all slots," : "", cache->least_bytes,
                        cache->sessions > 1 ? " or --slots" : "", resident ? "" : " or --hot");
        size_t one = (size_t)required * page_bytes(cache) + (size_t)context_pages * index_page_bytes(cache),
               room = (options->kv_budget - cache->least_bytes) / (one ? one : 1);
        if (room + 1 < (size_t)sessions) sessions = (int64_t)room + 1;
        size_t fixed = measure_cache(cache, 1, sessions * context_pages + 1, &overflow);
        if (cache->sources && (options->kv_budget - fixed) / page_bytes(cache) < (size_t)all)
            pages = (int64_t)((options->kv_budget - fixed) / page_bytes(cache));
    }
    index_pages = sessions * context_pages + 1;
    cache->whole_sessions = (int)sessions;
    cache->ample = pages >= all;
    cache->reserve = (int)(adaptive && pages / 100 > reserve ? pages / 100 : reserve);
    cache->bytes = measure_cache(cache, pages + 1, index_pages, &overflow);
    return !overflow || refuse_pages(cache, options, error);
}

/* Pages for every session's whole context, or as many as the budget holds. */
static bool size_host_pool(Cache *cache, const EngineOptions *options, Error *error) {
    if (cache->mode == MODE_RESIDENT) return true;
    size_t all = (size_t)cache->sessions * (size_t)cache->context_pages + 1, bytes = page_image_bytes(cache);
    cache->least_host_bytes = (size_t)(cache->context_pages + 1) * bytes;
    if (options->host_budget && options->host_budget < cache->least_host_bytes)
        return fail(error, "%s: --host-budget %zu: one session of %d rows needs %zu bytes; raise it, or lower -c", options->model,
                    options->host_budget, cache->context, cache->least_host_bytes);
    if (options->host_budget && bytes && options->host_budget / bytes < all) all = options->host_budget / bytes;
    cache->host_pages.n_pages = all < INT_MAX ? (int)all : INT_MAX;
    Arena arena = {0};
    lay_out_host(cache, &arena);
    cache->host_bytes = arena.used;
    return (all < INT_MAX && !arena.overflow) || refuse_pages(cache, options, error);
}

bool plan_memory(Engine *engine, const EngineOptions *options, Error *error) {
    Config *config = &engine->config;
    Cache *cache = &engine->cache;
    State *state = &engine->state;
    int longest = config->max_position_embeddings;
    if (options->context > longest)
        return fail(error, "%s: a context of %d is beyond the model's max_position_embeddings of %d", options->model,
                    options->context, longest);
    cache->backend = engine->backend;
    cache->context = options->context ? options->context : longest < 8192 ? longest : 8192;
    cache->sessions = options->sessions;
    if (cache->sessions > MAX_PASS_ROWS)
        return fail(error, "%d sessions are too many: at most %d", cache->sessions, MAX_PASS_ROWS);
    state->max_rows = larger(cache->sessions, cache->context < MAX_PASS_ROWS ? cache->context : MAX_PASS_ROWS);
    if (has_streams(&engine->drafter.config.backbone)) state->max_rows = larger(state->max_rows, DRAFT_ROWS);  /* they share it */
    state->logit_rows = larger(cache->sessions, 32);
    if (engine->drafter.config.architecture) {      /* a whole block of every session, as far as a pass holds them */
        int64_t rows = (int64_t)cache->sessions * (engine->drafter.config.slots + 1);
        state->logit_rows = larger(state->logit_rows, rows < state->max_rows ? (int)rows : state->max_rows);
    }
    cache->pass_rows = state->max_rows;
    shape_cache(cache, config, options);
    shape_ring(cache, &engine->drafter.config, options);
    if (!size_hot_cache(cache, options, error) || !size_pools(cache, options, error)
        || !size_host_pool(cache, options, error))
        return false;
    Arena arena = {0}, draft_arena = {0}, draft_host_arena = {0};
    lay_out_state(state, config, &engine->drafter.config, cache, &arena);
    lay_out_draft(&engine->drafter, state, cache, &draft_arena, &draft_host_arena);
    state->bytes = arena.used;
    engine->drafter.state.bytes = draft_arena.used;
    engine->drafter.state.host_bytes = draft_host_arena.used;
    return (!arena.overflow && !draft_arena.overflow && !draft_host_arena.overflow)
           || fail(error, "%s: the memory plan overflows", options->model);
}

/* Bytes of Engram's tables, which no backend moves. */
static size_t engram_bytes(const Engine *engine) {
    size_t bytes = 0;
    for (int i = 0; i < engine->config.num_hidden_layers && engine->config.engram_rows; i++)
        for (int scale = 0; scale < 2; scale++) {
            char name[64];
            snprintf(name, sizeof name, "layers.%d.engram.embed.%s", i, scale ? "scale" : "weight");
            const Tensor *tensor = engine->config.engram_rows[i] ? checkpoint_find(&engine->checkpoint, name) : NULL;
            bytes += tensor ? tensor->size : 0;
        }
    return bytes;
}

/* Whether the plan fits: the operations' memory, weights included where they are moved there, and the host's. */
bool check_memory(const Engine *engine, Error *error) {
    const Backend *backend = engine->backend;
    const Cache *cache = &engine->cache;
    const DraftState *draft = &engine->drafter.state;
    size_t device = cache->bytes + engine->state.bytes + draft->bytes, host = cache->host_bytes + draft->host_bytes,
           available = backend->available(MEMORY_DEVICE), weights = 0;
    if (!backend->shares_memory || engine->checkpoint.dummy) weights += engine->weight_bytes - engram_bytes(engine);
    if (!backend->shares_memory) weights += checkpoint_bytes(&engine->drafter.checkpoint);     /* stages are in the model's */
    if (weights > available)
        return fail(error, "%s: the weights of %d layers need %zu MB, %zu MB more than the free memory of %zu MB%s",
                    engine->checkpoint.directory, engine->config.num_hidden_layers, weights / 1000000,
                    (weights - available) / 1000000 + 1, available / 1000000, engine->checkpoint.dummy ? ": lower --layers" : "");
    device += weights;
    if (backend->shares_memory) device += host;
    if (device > available)
        return fail(error,
                    "%s: %d x %d rows need %zu MB (%zu MB of it host memory), %zu MB more than the free memory of %zu MB: lower "
                    "-c, --slots%s",
                    engine->checkpoint.directory, cache->sessions, cache->context, device / 1000000,
                    backend->shares_memory ? cache->host_bytes / 1000000 : 0, (device - available) / 1000000 + 1,
                    available / 1000000,
                    cache->mode == MODE_RESIDENT ? " or --kv-budget" : ", --kv-budget or --host-budget, or take --kv resident");
    available = backend->available(MEMORY_HOST);
    if (backend->shares_memory || host <= available) return true;
    return fail(error,
                "%s: %d x %d rows need %zu MB of host memory, %zu MB more than is free: lower -c, --slots or --host-budget",
                engine->checkpoint.directory, cache->sessions, cache->context, host / 1000000, (host - available) / 1000000 + 1);
}

/* Where the drafter's tensors are: stages are in the model's own checkpoint. */
static const Checkpoint *draft_checkpoint(const Engine *engine) {
    return has_streams(&engine->drafter.config.backbone) ? &engine->checkpoint : &engine->drafter.checkpoint;
}

void print_plan(FILE *out, const Engine *engine) {
    const Cache *cache = &engine->cache;
    size_t mapped = engine->weight_bytes, available = engine->backend->available(MEMORY_DEVICE);
    fprintf(out,
            "tide: %s: %s, %.1f MB of %sweights; %d x %d %s rows, %s: cache %.1f MB in %d pages, room for %d x the whole context",
            engine->checkpoint.directory, engine->config.model_type, (double)mapped / 1e6,
            engine->checkpoint.dummy ? "random " : "", cache->sessions, cache->context,
            kv_dtype_names[cache->kv_dtype], kv_mode_names[cache->mode], (double)cache->bytes / 1e6,
            cache->device_pages.n_pages - 1, cache->whole_sessions);
    if (cache->mode != MODE_RESIDENT)
        fprintf(out, " (%d hot rows and %d pages required of a session), %.1f MB on the host", cache->hot_rows,
                required_pages(cache), (double)cache->host_bytes / 1e6);
    fprintf(out, "; activations %.1f MB; %s, %d threads\n", (double)engine->state.bytes / 1e6, engine->backend->name,
            omp_get_max_threads());
    if (engine->checkpoint.dummy && engram_vocab(&engine->config, true) < engine->config.engram_vocab_size)
        fprintf(out, "tide: Engram's tables of --dummy have %" PRId64 " rows a hash, not %" PRId64 "\n",
                engram_vocab(&engine->config, true), engine->config.engram_vocab_size);
    const DraftConfig *draft = &engine->drafter.config;
    if (draft->architecture) {
        size_t staging = (size_t)cache->live_sources * (size_t)cache->staging_rows * cache->format.stride;
        fprintf(out,
                "tide: %s: %s, %.1f MB of weights, %d drafts a block; of the cache a ring of %d rows, %.2f MB, and %.2f MB of "
                "staging for each session; activations %.1f MB\n",
                draft_checkpoint(engine)->directory, draft->architecture, (double)engine->drafter.weight_bytes / 1e6,
                draft->slots, cache->draft_rows,
                (double)ring_bytes(cache) / 1e6, (double)staging / 1e6, (double)engine->drafter.state.bytes / 1e6);
    }
    if (engine->backend->shares_memory && !engine->checkpoint.dummy && mapped > available)
        fprintf(out, "tide: the weights are more than the %.1f MB of free memory: they will be read from disk again and again\n",
                (double)available / 1e6);
}

static bool take_block(const Backend *backend, uint8_t **block, size_t bytes, Memory memory, Error *error) {
    *block = backend->take(bytes ? bytes : 1, memory, error);
    return *block;
}

/* A list of all pages but page 0, the lowest on top. */
static void fill_page_list(PageList *list) {
    list->free = allocate_zeroed((size_t)list->n_pages + 1, sizeof *list->free);
    for (int page = list->n_pages - 1; page > 0; page--) list->free[list->n_free++] = page;
}

/* The controller's own records, and tables that name nothing. */
static void start_cache(Cache *cache) {
    size_t sessions = (size_t)cache->sessions, context_pages = (size_t)cache->context_pages,
           pages = (size_t)cache->device_pages.n_pages;
    fill_page_list(&cache->device_pages);
    fill_page_list(&cache->index_pages);
    fill_page_list(&cache->host_pages);
    cache->session = allocate_zeroed(sessions, sizeof *cache->session);
    for (size_t s = 0; s < sessions; s++) {
        cache->session[s].pages = allocate_zeroed(context_pages, sizeof(HistoryPage));
        cache->session[s].spare = allocate_zeroed(context_pages + (size_t)cache->tail_ring, sizeof(DevicePage));
    }
    cache->host_info = allocate_zeroed((size_t)cache->host_pages.n_pages, sizeof *cache->host_info);
    cache->transfers = allocate_zeroed(pages, sizeof *cache->transfers);
    cache->retired = allocate_zeroed(pages + (size_t)cache->index_pages.n_pages, sizeof *cache->retired);
    cache->staging_owner = allocate_zeroed((size_t)cache->live_sources + 1, sizeof(int));
    for (int arena = 0; arena < cache->live_sources; arena++) cache->staging_owner[arena] = -1;
    cache->bits = allocate_zeroed(context_pages, sizeof *cache->bits);
    cache->ranks = allocate_zeroed(context_pages, sizeof *cache->ranks);
    cache->missing = allocate_zeroed((size_t)cache->staging_rows, sizeof(int32_t));
    cache->places = allocate_zeroed((size_t)cache->staging_rows, sizeof(int32_t));
    cache->victims = allocate_zeroed((size_t)cache->hot_rows, sizeof(int32_t));
    cache->backend->upload(cache->seen_trails, cache->trails, (size_t)(cache->trail_layers * TRAILS) * sizeof *cache->trails);
    for (int s = 0; s < cache->sessions; s++) cache->backend->forget_hot(cache, s);
}

bool take_memory(Engine *engine, Error *error) {
    const Backend *backend = engine->backend;
    Cache *cache = &engine->cache;
    DraftState *draft = &engine->drafter.state;
    const size_t history = (size_t)cache->sessions * ((size_t)cache->context + 1 + MAX_BLOCK) * sizeof(int);
    if (!take_block(backend, &cache->block, cache->bytes, MEMORY_DEVICE, error)
        || !take_block(backend, &cache->host_block, cache->host_bytes, MEMORY_HOST, error)
        || !take_block(backend, &engine->state.block, engine->state.bytes, MEMORY_DEVICE, error)
        || !take_block(backend, &draft->block, draft->bytes, MEMORY_DEVICE, error)
        || !take_block(backend, &draft->host_block, draft->host_bytes, MEMORY_HOST, error)
        || !(cache->history = backend->take(history, MEMORY_HOST, error))
        || (!backend->shares_memory && !take_block(backend, &cache->tables_block, cache->tables_bytes, MEMORY_HOST, error)))
        return false;
    Arena cache_arena = {.base = cache->block}, host_arena = {.base = cache->host_block},
          state_arena = {.base = engine->state.block}, draft_arena = {.base = draft->block},
          draft_host_arena = {.base = draft->host_block}, tables_arena = {.base = cache->tables_block};
    lay_out_cache(cache, &cache_arena);
    cache->tables = cache->seen;
    if (!backend->shares_memory) lay_out_tables(&cache->tables, cache, &tables_arena);
    lay_out_host(cache, &host_arena);
    lay_out_state(&engine->state, &engine->config, &engine->drafter.config, cache, &state_arena);
    lay_out_draft(&engine->drafter, &engine->state, cache, &draft_arena, &draft_host_arena);
    start_cache(cache);
    return true;
}

static void free_cache(Cache *cache) {
    if (!cache->backend) return;                    /* nothing was planned */
    cache->backend->give_back(cache->block, MEMORY_DEVICE);
    cache->backend->give_back(cache->host_block, MEMORY_HOST);
    cache->backend->give_back(cache->tables_block, MEMORY_HOST);
    cache->backend->give_back(cache->history, MEMORY_HOST);
    for (int s = 0; cache->session && s < cache->sessions; s++) {
        free(cache->session[s].pages);
        free(cache->session[s].spare);
    }
    for (int page = 0; cache->host_info && page < cache->host_pages.n_pages; page++) free(cache->host_info[page].key);
    free(cache->group_of), free(cache->member_of), free(cache->trails), free(cache->stretch), free(cache->rows_before);
    free(cache->session), free(cache->host_info), free(cache->transfers);
    free(cache->retired), free(cache->staging_owner), free(cache->bits), free(cache->ranks), free(cache->missing);
    free(cache->places), free(cache->victims), free(cache->device_pages.free), free(cache->index_pages.free);
    free(cache->host_pages.free);
    hmfree(cache->prefixes);
}

/* =====================================================================================================================
 * The KV hierarchy: who may hold which page (Adaptive HiSparse, 3.1)
 *
 * Owns: the free pages of every pool, what each session holds, and the copies under way. Everything happens between passes.
 * Three rules keep every row recoverable: a map names a page only after its bytes have arrived; a page that history was lent is
 * given back only after the host has its rows; and a page is handed out again only after the last pass that could read it is
 * done and every copy from or to it is complete.
 *
 * Required storage (hot caches, tails) and an admission reserve come before optional history:
 *     M_req + M_opt + M_res <= M                                                                                   (eq. 3)
 * which holds because a session is admitted, and a page lent, only if the reserve stays free.
 *
 * Where the paper is silent, or other: completed pages of decoding are lent too, not only imported history; index pages are
 * never lent; gives_first() is the order of recall; lent pages are backed up a little at a time before anything asks for them;
 * staged rows are not promoted; a recalled page stays readable until its host copy is complete.
 */

static int32_t take_page(PageList *list) { return list->free[--list->n_free]; }

static void give_page(PageList *list, int32_t page) { list->free[list->n_free++] = page; }

/* Hands the page out again once the rounds that may read it are over. */
static void retire(Cache *cache, PageList *list, int32_t page) {
    cache->retired[cache->n_retired++] = (Retired){list, page, cache->rounds_begun};
}

static HostInfo *host_info(const Cache *cache, int session, int page) {
    return &cache->host_info[host_page(cache, session, page)->id];
}

/* Whether `pages` more may be lent to history. */
static bool may_lend(const Cache *cache, int pages) {
    return cache->mode == MODE_ADAPTIVE && !cache->waiting && cache->device_pages.n_free - cache->reserve >= pages;
}

/* Complete rows of history: floor(n / m), eq. 8. */
static int complete_rows(const Cache *cache, int session) { return cache->session[session].committed / cache->ratio; }

static bool page_complete(const Cache *cache, int session, int page) {
    return (page + 1) * PAGE_ROWS <= complete_rows(cache, session);
}

static bool on_host(const Cache *cache, int session, int page) {
    return cache->mode != MODE_RESIDENT && host_info(cache, session, page)->rows == PAGE_ROWS;
}

/* ---- the invariants (A8.2), in the debug build */

#ifdef TIDE_DEBUG
/* Freed rows become NaNs: what still reads them shows. */
static void poison_page(Cache *cache, int32_t page) {
    for (int i = 0; i < cache->sources; i++)
        memset(source_rows(cache, (SourceId){i}) + (size_t)(page * page_rows(cache, i)) * cache->format.stride, 0xff,
               (size_t)page_rows(cache, i) * cache->format.stride);
}

static void check_hot_cache(const Cache *cache, int s, int g) {
    const HotCache hot = hot_cache(cache, s, g);
    const int stretch = stretch_of(cache, g), rows = page_rows(cache, g);
    size_t held = 0, named = 0;
    for (int slot = 0; slot < cache->hot_rows; slot++) {
        int row = hot.tag[slot];
        if (row < 0) continue;
        held++;
        REQUIRE(slot < cache->hot_rows / stretch && row < complete_rows(cache, s) / stretch);
        REQUIRE(row % rows < host_info(cache, s, row / rows)->rows / stretch);
        REQUIRE(hot.slot_of[row] == slot + 1);
    }
    for (int row = 0; row < cache->context_pages * PAGE_ROWS; row++) named += hot.slot_of[row] != 0;
    REQUIRE(held == named);
}

/* Marks the pages one session holds on the device and checks each against the tables. */
static void check_pages(const Cache *cache, int s, uint8_t *held, int *beyond) {
    const SessionPages *session = &cache->session[s];
    int base = cache->tables.tail_base[s] / PAGE_ROWS, tails = 0, lent = 0;
    for (int page = 0; page < cache->hot_pages; page++) held[hot_page(cache, s, page)->id]++;
    for (int i = 0; i < session->n_spare; i++) held[session->spare[i].id]++;
    for (int page = 0; page < session->reserved_pages; page++) {
        const HistoryPage *history = &session->pages[page];
        bool tail = history->state == PAGE_TAIL, ready = history->state == PAGE_READY;
        if (history->state != PAGE_ABSENT) held[history->device.id]++;
        tails += tail;
        lent += (ready || history->state == PAGE_FILLING) && !history->recalled;
        REQUIRE(tail == (page >= base && history->state != PAGE_ABSENT));
        REQUIRE(ready_page(cache, s, page)->id == (ready || (tail && cache->mode == MODE_RESIDENT) ? history->device.id : 0));
        REQUIRE(!tail || tail_page(cache, s, page)->id == history->device.id);
        REQUIRE(history->state != PAGE_FILLING || history->in_flight);
        REQUIRE(page * PAGE_ROWS >= complete_rows(cache, s) || page >= base || ready || on_host(cache, s, page));
        REQUIRE(page * PAGE_ROWS >= complete_rows(cache, s) || page < base || tail);
        REQUIRE(index_page(cache, s, page)->id > 0);
        REQUIRE(cache->mode == MODE_RESIDENT || host_info(cache, s, page)->refs > 0);
    }
    REQUIRE(tails == session->n_tail && lent == session->n_optional);
    REQUIRE(cache->mode == MODE_RESIDENT || tails + session->n_spare >= TAIL_PAGES);
    *beyond += lent + tails + session->n_spare;
}

static void check_cache(const Cache *cache) {
    uint8_t *held = allocate_zeroed((size_t)cache->device_pages.n_pages, 1);
    int *refs = allocate_zeroed((size_t)cache->host_pages.n_pages + 1, sizeof(int)), beyond = 0, admitted = 0, leaving = 0;
    for (int i = 0; i < cache->device_pages.n_free; i++) held[cache->device_pages.free[i]]++;
    for (int i = 0; i < cache->n_retired; i++)
        if (cache->retired[i].list == &cache->device_pages) held[cache->retired[i].page]++, leaving++;
    for (int i = 0; i < cache->n_transfers; i++) {
        refs[cache->transfers[i].host.id]++;
        if (cache->transfers[i].session < 0) held[cache->transfers[i].device.id]++, leaving++;
    }
    for (int s = 0; s < cache->sessions; s++) {
        if (!cache->session[s].admitted) continue;
        admitted++;
        check_pages(cache, s, held, &beyond);
        for (int page = 0; cache->mode != MODE_RESIDENT && page < cache->session[s].reserved_pages; page++)
            refs[host_page(cache, s, page)->id]++;
        for (int g = 0; g < cache->groups && cache->hot_rows; g++) check_hot_cache(cache, s, g);
    }
    for (int page = 1; page < cache->device_pages.n_pages; page++) REQUIRE(held[page] == 1);
    for (int page = 1; page < cache->host_pages.n_pages; page++) REQUIRE(refs[page] == cache->host_info[page].refs);
    if (cache->mode == MODE_ADAPTIVE) {             /* eq. 3 */
        int required = admitted * required_pages(cache), optional = beyond - admitted * TAIL_PAGES + leaving + cache->n_recalled;
        REQUIRE(required + optional + cache->reserve <= cache->device_pages.n_pages - 1);
        REQUIRE(cache->device_pages.n_free >= 0 && cache->n_recalled >= 0);
    }
    free(held);
    free(refs);
}
#else
#define poison_page(cache, page) ((void)0)
#define check_cache(cache) ((void)0)
#endif

/* ---- shared prefixes */

/* That page of a prompt, behind the page of that serial number. */
static PrefixKey prefix_key(uint32_t parent, const int *ids) {
    PrefixKey key = {.parent = parent};
    memcpy(key.ids, ids, sizeof key.ids);
    return key;
}

/* No later prompt will find the page. */
static void forget_key(Cache *cache, HostInfo *info) {
    if (info->key) (void)hmdel(cache->prefixes, *info->key);
    free(info->key);
    info->key = NULL;
}

static void forget_host_page(Cache *cache, HostPage page) {
    HostInfo *info = &cache->host_info[page.id];
    forget_key(cache, info);
    *info = (HostInfo){0};
    give_page(&cache->host_pages, page.id);
}

/* A host page that no session and no copy holds any more: kept while its prompt may come again, else free. */
static void settle_host_page(Cache *cache, HostPage page) {
    HostInfo *info = &cache->host_info[page.id];
    if (info->refs || (info->key && info->rows == PAGE_ROWS)) return;
    forget_host_page(cache, page);
}

static void drop_host_page(Cache *cache, HostPage page) {
    cache->host_info[page.id].refs--;
    settle_host_page(cache, page);
}

/* Least recently taken first; of one prompt the last page first, so that a page never outlives the one it hangs on. */
static int compare_idle_pages(const void *a, const void *b) {
    const HostInfo *x = *(HostInfo *const *)a, *y = *(HostInfo *const *)b;
    return x->used != y->used ? (x->used > y->used) - (x->used < y->used) : (x->depth < y->depth) - (x->depth > y->depth);
}

/* Sees to it that `pages` host pages are free, at the cost of prefixes that no session holds. False, with nothing changed, when
 * there are not enough of those. */
static bool free_host_pages(Cache *cache, int pages) {
    if (cache->host_pages.n_free >= pages) return true;
    HostInfo **idle = NULL;
    for (int p = 1; p < cache->host_pages.n_pages; p++)
        if (cache->host_info[p].key && !cache->host_info[p].refs) arrput(idle, &cache->host_info[p]);
    bool enough = cache->host_pages.n_free + (int)arrlen(idle) >= pages;
    if (enough) qsort(idle, arrlenu(idle), sizeof *idle, compare_idle_pages);
    for (size_t i = 0; enough && cache->host_pages.n_free < pages; i++)
        forget_host_page(cache, (HostPage){(int32_t)(idle[i] - cache->host_info)});
    arrfree(idle);
    return enough;
}

static HostPage take_host_page(Cache *cache) {
    HostPage page = {take_page(&cache->host_pages)};
    cache->host_info[page.id] = (HostInfo){.refs = 1};
    return page;
}

/* ---- copies */

static void begin_copy(Cache *cache, Transfer transfer) {
    HistoryPage *page = &cache->session[transfer.session].pages[transfer.page];
    page->in_flight = true;
    cache->host_info[transfer.host.id].refs++;      /* the copy holds the host page, whatever becomes of the session */
    cache->transfers[cache->n_transfers] = transfer;
    cache->backend->start_copy(cache, &cache->transfers[cache->n_transfers++]);
}

/* Rows of the page that the host does not have yet, with their index keys. */
static void begin_backup(Cache *cache, int session, int page) {
    HistoryPage *history = &cache->session[session].pages[page];
    int have = host_info(cache, session, page)->rows, rows = complete_rows(cache, session) - page * PAGE_ROWS;
    if (rows > PAGE_ROWS) rows = PAGE_ROWS;
    if (history->in_flight || have >= rows) return;
    begin_copy(cache, (Transfer){.to_host = true, .session = session, .page = page, .first = have, .count = rows - have,
                                 .device = history->device, .host = *host_page(cache, session, page),
                                 .index = *index_page(cache, session, page)});
}

/* Reserves a page, which nothing sees until its bytes have arrived. */
static void begin_population(Cache *cache, int s, int page) {
    SessionPages *session = &cache->session[s];
    session->pages[page] = (HistoryPage){.device = {take_page(&cache->device_pages)}, .state = PAGE_FILLING};
    session->n_optional++;
    session->populated = cache->rounds_begun;
    begin_copy(cache, (Transfer){.session = s, .page = page, .count = PAGE_ROWS, .device = session->pages[page].device,
                                 .host = *host_page(cache, s, page)});
}

static void publish(Cache *cache, int s, int page) {
    HistoryPage *history = &cache->session[s].pages[page];
    history->state = PAGE_READY;
    *ready_page(cache, s, page) = history->device;
    if (cache->mode == MODE_ADAPTIVE) cache->stats.pages_lent++;
}

/* Takes a page of optional history out of the map and gives it back. */
static void withdraw(Cache *cache, int s, int page) {
    HistoryPage *history = &cache->session[s].pages[page];
    *ready_page(cache, s, page) = (DevicePage){0};
    retire(cache, &cache->device_pages, history->device.id);
    cache->n_recalled -= history->recalled;
    *history = (HistoryPage){0};
}

/* What follows from a copy that is complete. */
static void end_copy(Cache *cache, const Transfer *transfer) {
    size_t rows = (size_t)cache->sources * (no_page(transfer->device) ? 0 : cache->format.stride)
                  + (size_t)cache->groups * (no_page(transfer->index) ? 0 : cache->index_format.stride);
    if (transfer->to_host) {
        cache->host_info[transfer->host.id].rows = transfer->first + transfer->count;
        cache->stats.bytes_backed_up += rows * (size_t)transfer->count;
    } else cache->stats.bytes_populated += rows * (size_t)transfer->count;
    if (transfer->session < 0) {
        retire(cache, &cache->device_pages, transfer->device.id);
        if (!no_page(transfer->index)) retire(cache, &cache->index_pages, transfer->index.id);
    } else {
        HistoryPage *page = &cache->session[transfer->session].pages[transfer->page];
        page->in_flight = false;
        if (page->state == PAGE_FILLING && !page->recalled) publish(cache, transfer->session, transfer->page);
        if (page->recalled && on_host(cache, transfer->session, transfer->page))
            withdraw(cache, transfer->session, transfer->page);
    }
    drop_host_page(cache, transfer->host);
}

/* Copies end in the order they began: at most `count` of them, waiting for each or only while they are complete. */
static void end_copies(Cache *cache, int count, bool wait) {
    int done = 0;
    while (done < count && done < cache->n_transfers && cache->backend->finish_copy(cache, &cache->transfers[done], wait))
        end_copy(cache, &cache->transfers[done++]);
    cache->n_transfers -= done;
    memmove(cache->transfers, cache->transfers + done, (size_t)cache->n_transfers * sizeof *cache->transfers);
}

/* ---- tails */

/* Whole pages leave the tail in order. One stays on the device as lent history if a page is left to take its place in the tail;
 * else it is backed up, and its memory is the tail's again. */
static void advance_tail(Cache *cache, int s) {
    SessionPages *session = &cache->session[s];
    int *base = &cache->tables.tail_base[s], page = *base / PAGE_ROWS;
    for (; page_complete(cache, s, page); page++, *base += PAGE_ROWS) {
        HistoryPage *history = &session->pages[page];
        bool surplus = session->n_tail + session->n_spare > TAIL_PAGES;
        if (cache->mode == MODE_RESIDENT || (cache->mode == MODE_ADAPTIVE && surplus) || may_lend(cache, 1)) {
            publish(cache, s, page);
            session->n_optional++;
            session->populated = cache->rounds_begun;
            if (cache->mode == MODE_ADAPTIVE && !surplus)
                session->spare[session->n_spare++] = (DevicePage){take_page(&cache->device_pages)};
        } else if (on_host(cache, s, page) && !history->in_flight) {
            session->spare[session->n_spare++] = history->device;       /* the next pass writes it after this one has read it */
            *history = (HistoryPage){0};
        } else break;
        session->n_tail--;
        *tail_page(cache, s, page) = (DevicePage){0};
    }
    for (; cache->mode != MODE_RESIDENT && page_complete(cache, s, page); page++) begin_backup(cache, s, page);
    if (cache->mode == MODE_HISPARSE && page * PAGE_ROWS < complete_rows(cache, s)) begin_backup(cache, s, page);
}

int cache_room(Cache *cache, int s, int wanted) {
    SessionPages *session = &cache->session[s];
    const int positions = page_positions(cache), first = session->committed / positions;
    int last = (session->committed + wanted - 1) / positions, page = first;
    if (last >= session->reserved_pages) last = session->reserved_pages - 1;
    while (page <= last && session->pages[page].state == PAGE_TAIL) page++;
    if (cache->mode == MODE_ADAPTIVE)
        while (page + session->n_spare <= last && may_lend(cache, 1))
            session->spare[session->n_spare++] = (DevicePage){take_page(&cache->device_pages)};
    for (; page + session->n_spare <= first && page < session->reserved_pages; cache->stats.tail_waits++) {
        advance_tail(cache, s);                     /* both tail pages are full: the backup of one has to be awaited */
        if (page + session->n_spare <= first) end_copies(cache, 1, true);
    }
    int end = page + session->n_spare < session->reserved_pages ? page + session->n_spare : session->reserved_pages,
        room = end * positions - session->committed;
    return room < wanted ? room : wanted;
}

/* A spare page becomes the next one of the tail. Dense attention walks the map alone, so a resident tail is in it too. */
static void add_to_tail(Cache *cache, int s, int page) {
    SessionPages *session = &cache->session[s];
    session->pages[page] = (HistoryPage){.device = session->spare[--session->n_spare], .state = PAGE_TAIL};
    session->n_tail++;
    *tail_page(cache, s, page) = session->pages[page].device;
    if (cache->mode == MODE_RESIDENT) *ready_page(cache, s, page) = session->pages[page].device;
}

bool cache_place(Cache *cache, const Row *rows, int n_rows, int *failed, Error *error) {
    cache->rounds_begun++;
    for (int r = 0; r < n_rows; r++) cache->session[rows[r].session].placed = cache->session[rows[r].session].committed;
    for (int r = 0; r < n_rows; r++) {
        int s = rows[r].session, page = rows[r].position / page_positions(cache);
        SessionPages *session = &cache->session[s];
        *failed = s;
        if (session->placed == session->committed) session->first_row = r;
        if (!session->admitted || page >= session->reserved_pages)
            return fail(error, "session %d has no place for position %d", s, rows[r].position);
        if (rows[r].position != session->placed++)
            return fail(error, "session %d: position %d does not follow the %d rows that are there", s, rows[r].position,
                        session->placed - 1);
        if (session->pages[page].state == PAGE_TAIL) continue;
        if (!session->n_spare) return fail(error, "session %d has no page for position %d", s, rows[r].position);
        add_to_tail(cache, s, page);
    }
    *failed = -1;
    return true;
}

/* The positions up to n join the trails, which forget the oldest for them. */
static void keep_committed(Cache *cache, int s, int n) {
    SessionPages *session = &cache->session[s];
    cache->backend->keep_trails(cache, s, session->first_row, session->committed, n);
    session->reached = larger(session->reached, n);
}

void cache_commit(Cache *cache, int s, int n) {
    SessionPages *session = &cache->session[s];
    double start = now();
    REQUIRE(n >= session->committed && n <= session->placed);
    if (cache->trail_layers) keep_committed(cache, s, n);
    session->committed = n;
    advance_tail(cache, s);
    while (cache->mode == MODE_ADAPTIVE && session->n_spare && session->n_tail + session->n_spare > TAIL_PAGES)
        retire(cache, &cache->device_pages, session->spare[--session->n_spare].id);
    cache->stats.control_seconds += now() - start;
    check_cache(cache);
}

/* ---- recall: eq. 4 */

/* Marks a page of optional history to be given back; its backup, if it has none, begins now. */
static void recall_page(Cache *cache, int s, int page) {
    HistoryPage *history = &cache->session[s].pages[page];
    history->recalled = true;
    cache->stats.pages_recalled++;
    cache->session[s].n_optional--;
    cache->n_recalled++;
    if (history->in_flight) return;                 /* the end of the copy withdraws it */
    if (on_host(cache, s, page)) withdraw(cache, s, page);
    else begin_backup(cache, s, page);
}

/* Recalls up to `count` pages of a session, the oldest rows first: selections prefer the newest. */
static void recall_pages(Cache *cache, int s, int count) {
    SessionPages *session = &cache->session[s];
    for (int page = 0; count && page < session->reserved_pages; page++) {
        const HistoryPage *history = &session->pages[page];
        if (history->recalled || (history->state != PAGE_READY && history->state != PAGE_FILLING)) continue;
        recall_page(cache, s, page);
        count--;
    }
}

/* Pages that could be given back without a copy. */
static int clean_pages(const Cache *cache, int s) {
    const SessionPages *session = &cache->session[s];
    int clean = 0;
    for (int page = 0; page < session->reserved_pages && session->n_optional; page++)
        clean += session->pages[page].state >= PAGE_FILLING && !session->pages[page].recalled && on_host(cache, s, page);
    return clean;
}

/* Whether session a gives its pages before b: first the one whose history is backed up to the larger part, then the one with more
 * pages, then the one that was lent its last one longest ago. */
static bool gives_first(const Cache *cache, const int *clean, int a, int b) {
    const SessionPages *x = &cache->session[a], *y = &cache->session[b];
    int64_t left = (int64_t)clean[a] * y->n_optional, right = (int64_t)clean[b] * x->n_optional;
    if (left != right) return left > right;
    if (x->n_optional != y->n_optional) return x->n_optional > y->n_optional;
    return x->populated != y->populated ? x->populated < y->populated : a < b;
}

/* Takes pages back until the deficit is covered: of whole sessions in their order, or from every session in proportion to
 * what it holds. When all of them together do not cover it, nothing is taken: a session has to end first. */
static void recall(Cache *cache, int deficit) {
    int64_t lent = 0;
    for (int s = 0; s < cache->sessions; s++) lent += cache->session[s].n_optional;
    if (deficit <= 0 || lent < deficit) return;
    if (cache->reclaim == RECLAIM_PROPORTIONAL) {
        for (int s = 0; s < cache->sessions; s++) {
            int64_t share = ((int64_t)deficit * cache->session[s].n_optional + lent - 1) / lent;
            recall_pages(cache, s, (int)share);
        }
        return;
    }
    int clean[MAX_PASS_ROWS];
    for (int s = 0; s < cache->sessions; s++) clean[s] = clean_pages(cache, s);
    while (deficit > 0) {
        int first = -1;
        for (int s = 0; s < cache->sessions; s++)
            if (cache->session[s].n_optional && (first < 0 || gives_first(cache, clean, s, first))) first = s;
        deficit -= cache->session[first].n_optional;
        recall_pages(cache, first, cache->session[first].n_optional);
    }
}

/* ---- admission */

/* Device pages on their way back: nothing has to be recalled for these. */
static int pages_coming(const Cache *cache) {
    int coming = cache->n_recalled;
    for (int i = 0; i < cache->n_retired; i++) coming += cache->retired[i].list == &cache->device_pages;
    for (int i = 0; i < cache->n_transfers; i++) coming += cache->transfers[i].session < 0;
    return coming;
}

/* How many whole pages of the prompt the host has, their ids in chain; the last row is always run again, for its logits. -1: one
 * of them is being computed for another session. */
static int find_prefix(Cache *cache, HostPage *chain, const int *ids, int n_ids) {
    int found = 0, pending = 0;
    if (cache->trail_layers) return 0;              /* a page of rows goes on nowhere without the trails that end with it */
    for (; (found + 1) * PAGE_ROWS < n_ids; found++) {
        PrefixKey key = prefix_key(found ? cache->host_info[chain[found - 1].id].serial : 0, ids + found * PAGE_ROWS);
        ptrdiff_t at = hmgeti(cache->prefixes, key);
        if (at < 0) break;
        chain[found] = (HostPage){cache->prefixes[at].value};
        if (cache->host_info[chain[found].id].rows == PAGE_ROWS) continue;
        cache->host_info[chain[found].id].wanted = cache->prefix_wanted = true;
        pending++;
    }
    return pending ? -1 : found;
}

/* Makes the prompt's own whole pages known to those that come after. */
static void register_prefix(Cache *cache, int s, const int *ids, int n_ids, int from) {
    for (int page = from; (page + 1) * PAGE_ROWS <= n_ids; page++) {
        PrefixKey key = prefix_key(page ? host_info(cache, s, page - 1)->serial : 0, ids + page * PAGE_ROWS);
        if (hmgeti(cache->prefixes, key) >= 0) return;
        HostInfo *info = host_info(cache, s, page);
        info->key = allocate_zeroed(1, sizeof key);
        *info->key = key;
        info->serial = ++cache->serials;
        info->depth = page;
        info->used = cache->rounds_begun;
        hmput(cache->prefixes, key, host_page(cache, s, page)->id);
    }
}

/* Everything a session finds when it starts, set in one place. */
static void reset_session(Cache *cache, int s) {
    SessionPages *session = &cache->session[s];
    memset(session->pages, 0, (size_t)cache->context_pages * sizeof *session->pages);
    *session = (SessionPages){.pages = session->pages, .spare = session->spare, .populated = cache->rounds_begun};
    cache->tables.tail_base[s] = 0;
    cache->backend->forget_hot(cache, s);
}

/* Takes over host pages that are complete: their rows are imported history, their index keys return to the device. */
static void adopt_prefix(Cache *cache, int s, int pages) {
    for (int page = 0; page < pages; page++) {
        HostInfo *info = host_info(cache, s, page);
        info->refs++;
        info->used = cache->rounds_begun;
        Transfer keys = {.session = s, .page = page, .count = PAGE_ROWS, .host = *host_page(cache, s, page),
                         .index = *index_page(cache, s, page)};
        cache->backend->start_copy(cache, &keys);
        cache->backend->finish_copy(cache, &keys, true);
    }
    cache->session[s].committed = cache->session[s].placed = cache->tables.tail_base[s] = pages * PAGE_ROWS;
    /* Resident-first: history that is imported comes to the device at once while pages are spare, unlike repopulation. */
    for (int page = pages - 1; page >= 0 && may_lend(cache, 1); page--) begin_population(cache, s, page);
    cache->stats.shared_pages += (uint64_t)pages;
}

bool cache_admit(Cache *cache, int s, const int *ids, int n_ids, int rows, int *cached) {
    SessionPages *session = &cache->session[s];
    const bool resident = cache->mode == MODE_RESIDENT;
    int pages = (rows + page_positions(cache) - 1) / page_positions(cache), needed = resident ? pages : required_pages(cache);
    HostPage *chain = host_page(cache, s, 0);       /* the slot is empty: its own table serves to try */
    int found = resident ? 0 : find_prefix(cache, chain, ids, n_ids);
    int deficit = needed + cache->reserve - cache->device_pages.n_free;
    *cached = 0;
    for (int page = 0; page < found; page++) cache->host_info[chain[page].id].refs++;   /* not to be given up for this */
    bool room = deficit <= 0 && cache->index_pages.n_free >= pages && found >= 0
             && (resident || free_host_pages(cache, pages - found));
    for (int page = 0; page < found; page++) cache->host_info[chain[page].id].refs--;
    if (!room) {
        cache->waiting = found >= 0 && deficit > 0;
        if (cache->mode == MODE_ADAPTIVE && found >= 0) recall(cache, deficit - pages_coming(cache));
        cache->stats.admission_waits++;
        memset(chain, 0, (size_t)cache->context_pages * sizeof *chain);
        return false;
    }
    cache->waiting = false;
    reset_session(cache, s);
    session->admitted = true;
    session->reserved_pages = pages;
    for (int page = 0; page < pages; page++) {
        index_page(cache, s, page)->id = take_page(&cache->index_pages);
        if (!resident && page >= found) *host_page(cache, s, page) = take_host_page(cache);
    }
    for (int page = 0; page < cache->hot_pages; page++) hot_page(cache, s, page)->id = take_page(&cache->device_pages);
    while (session->n_spare < (resident ? pages : TAIL_PAGES))
        session->spare[session->n_spare++].id = take_page(&cache->device_pages);
    adopt_prefix(cache, s, found);
    if (!resident && !cache->trail_layers) register_prefix(cache, s, ids, n_ids, found);
    *cached = found * PAGE_ROWS;
    cache->stats.admissions++;
    check_cache(cache);
    return true;
}

void cache_stop_waiting(Cache *cache) { cache->waiting = false; }

/* ---- the end of a stay */

/* The device and index page of a session that leaves. A whole page of a prompt that others may come with is backed up first.
 * What a copy under way still uses is given back at its end. */
static void release_page(Cache *cache, int s, int page) {
    HistoryPage *history = &cache->session[s].pages[page];
    HostInfo *info = cache->mode == MODE_RESIDENT ? NULL : host_info(cache, s, page);
    bool keys_copied = false;
    if (history->recalled) cache->n_recalled--;
    if (info && info->key && info->refs == 1 && page_complete(cache, s, page) && history->state != PAGE_ABSENT)
        begin_backup(cache, s, page);
    for (int i = 0; i < cache->n_transfers && history->in_flight; i++) {
        Transfer *transfer = &cache->transfers[i];
        if (transfer->session != s || transfer->page != page) continue;
        transfer->session = -1;
        keys_copied |= !no_page(transfer->index);
    }
    if (history->state != PAGE_ABSENT && !history->in_flight) retire(cache, &cache->device_pages, history->device.id);
    if (!keys_copied) retire(cache, &cache->index_pages, index_page(cache, s, page)->id);
}

void cache_release(Cache *cache, int s) {
    SessionPages *session = &cache->session[s];
    if (!session->admitted) return;
    for (int page = 0; page < session->reserved_pages; page++) {
        release_page(cache, s, page);
        if (cache->mode != MODE_RESIDENT) drop_host_page(cache, *host_page(cache, s, page));
        *index_page(cache, s, page) = *ready_page(cache, s, page) = (DevicePage){0};
        *host_page(cache, s, page) = (HostPage){0};
    }
    for (int page = 0; page < cache->hot_pages; page++) {
        retire(cache, &cache->device_pages, hot_page(cache, s, page)->id);
        *hot_page(cache, s, page) = (DevicePage){0};
    }
    while (session->n_spare) retire(cache, &cache->device_pages, session->spare[--session->n_spare].id);
    memset(tail_page(cache, s, 0), 0, (size_t)cache->tail_ring * sizeof(DevicePage));
    reset_session(cache, s);
    check_cache(cache);
}

/* ---- between rounds */

/* Lends spare memory to history that lies on the host: round robin over sessions, the newest page of each first, a few pages a
 * round, so that a pass waits for none of it. */
static void repopulate(Cache *cache) {
    int begun = 0, needed = required_pages(cache);  /* not the last pages: a session may come at any moment */
    for (int tried = 0; tried < cache->sessions && begun < REPOPULATE_PAGES; tried++) {
        int s = cache->cursor, page = cache->tables.tail_base[s] / PAGE_ROWS - 1;
        cache->cursor = (cache->cursor + 1) % cache->sessions;
        if (cache->session[s].n_optional == page + 1) continue;         /* all of it is lent already */
        for (; page >= 0 && begun < REPOPULATE_PAGES && may_lend(cache, needed + 1); page--)
            if (cache->session[s].pages[page].state == PAGE_ABSENT) {
                begin_population(cache, s, page);
                begun++;
            }
    }
}

/* Backs up lent pages before their memory is asked for, a little at a time; not where it never will be. */
static void back_up_ahead(Cache *cache) {
    int begun = 0;
    for (int s = 0; s < cache->sessions && begun < BACKUP_PAGES && !cache->ample; s++) {
        SessionPages *session = &cache->session[s];
        while (page_complete(cache, s, session->backed) && on_host(cache, s, session->backed)) session->backed++;
        HistoryPage *page = &session->pages[session->backed];
        if (!page_complete(cache, s, session->backed) || page->in_flight) continue;
        begin_backup(cache, s, session->backed);
        begun++;
    }
}

/* Pages of a prompt that a waiting session shares go to the host at once. */
static void back_up_wanted(Cache *cache) {
    for (int s = 0; s < cache->sessions && cache->prefix_wanted; s++)
        for (int page = 0; page < cache->session[s].reserved_pages && page_complete(cache, s, page); page++)
            if (host_info(cache, s, page)->wanted) begin_backup(cache, s, page);
    cache->prefix_wanted = false;
}

void cache_step(Cache *cache) {
    double start = now();
    cache->rounds_done = cache->rounds_begun;       /* in C a pass is over when forward() returns; a GPU is some rounds behind */
    end_copies(cache, INT_MAX, false);
    int kept = 0;
    for (int i = 0; i < cache->n_retired; i++) {
        Retired retired = cache->retired[i];
        if (retired.round <= cache->rounds_done) {
            if (retired.list == &cache->device_pages) poison_page(cache, retired.page);
            give_page(retired.list, retired.page);
        } else cache->retired[kept++] = retired;
    }
    cache->n_retired = kept;
    for (int s = 0; s < cache->sessions; s++) {
        if (!cache->session[s].admitted) continue;
        advance_tail(cache, s);
        cache->stats.history_pages += (uint64_t)(cache->tables.tail_base[s] / PAGE_ROWS);
        cache->stats.lent_pages += (uint64_t)cache->session[s].n_optional;
    }
    if (cache->mode == MODE_ADAPTIVE) {
        back_up_wanted(cache);
        if (!cache->waiting) repopulate(cache);
        back_up_ahead(cache);
    } else if (cache->mode == MODE_HISPARSE) back_up_wanted(cache);
    cache->stats.control_seconds += now() - start;
    check_cache(cache);
}

/* ---- rows taken back, history imported */

/* Whole pages of it come from any tier, the last rows from the tail. */
void cache_read_page(const Cache *cache, int s, int page, uint8_t *image) {
    const SessionPages *session = &cache->session[s];
    DevicePage device = session->pages[page].state == PAGE_FILLING ? (DevicePage){0} : session->pages[page].device;
    int left = complete_rows(cache, s) - page * PAGE_ROWS, complete = left < PAGE_ROWS ? left : PAGE_ROWS;
    size_t stride = cache->format.stride;
    memset(image, 0, page_image_bytes(cache));
    for (int i = 0; i < cache->sources; i++) {
        const uint8_t *from = no_page(device) ? host_source_rows(cache, (SourceId){i}) : source_rows(cache, (SourceId){i});
        size_t rows = (size_t)page_rows(cache, i), id = (size_t)(no_page(device) ? host_page(cache, s, page)->id : device.id);
        cache->backend->copy_bytes(image, from + id * rows * stride, (size_t)(complete / stretch_of(cache, i)) * stride);
        image += rows * stride;
    }
    stride = cache->index_format.stride;
    for (int g = 0; g < cache->groups; g++) {
        size_t rows = (size_t)page_rows(cache, g), id = (size_t)index_page(cache, s, page)->id;
        cache->backend->copy_bytes(image, group_index_keys(cache, g) + id * rows * stride,
                                   (size_t)(complete / stretch_of(cache, g)) * stride);
        image += rows * stride;
    }
}

void cache_append_page(Cache *cache, int s, const uint8_t *image, int rows) {
    SessionPages *session = &cache->session[s];
    int page = complete_rows(cache, s) / PAGE_ROWS;
    bool to_host = rows == PAGE_ROWS && cache->mode != MODE_RESIDENT;
    if (!to_host) add_to_tail(cache, s, page);
    size_t stride = cache->format.stride;
    for (int i = 0; i < cache->sources; i++) {
        uint8_t *to = to_host ? host_source_rows(cache, (SourceId){i}) : source_rows(cache, (SourceId){i});
        size_t whole = (size_t)page_rows(cache, i) * stride, bytes = (size_t)(rows / stretch_of(cache, i)) * stride;
        cache->backend->copy_bytes(
            to + (size_t)(to_host ? host_page(cache, s, page)->id : session->pages[page].device.id) * whole, image, bytes);
        image += whole;
    }
    stride = cache->index_format.stride;
    for (int g = 0; g < cache->groups; g++) {
        size_t whole = (size_t)page_rows(cache, g) * stride, bytes = (size_t)(rows / stretch_of(cache, g)) * stride;
        cache->backend->copy_bytes(group_index_keys(cache, g) + (size_t)index_page(cache, s, page)->id * whole, image, bytes);
        uint8_t *host = host_group_index_keys(cache, g) + (size_t)host_page(cache, s, page)->id * whole;
        if (to_host) cache->backend->copy_bytes(host, image, bytes);
        image += whole;
    }
    session->committed = session->placed = session->committed + rows * cache->ratio;
    if (!to_host) { advance_tail(cache, s); return; }
    host_info(cache, s, page)->rows = PAGE_ROWS;
    cache->tables.tail_base[s] += PAGE_ROWS;
}

/* How many positions of a trail matter to a session that has n of them and is not taken back. */
static int trail_positions(const Trail *trail, int n) {
    const int seen = trail->length ? trail->length - MAX_BLOCK : 0;
    return seen < n ? seen : n;
}

size_t trail_image_bytes(const Cache *cache, int n) {
    size_t bytes = cache->trail_layers ? (size_t)cache->heavy_layers * (size_t)(n / cache->heavy_ratio) * cache->format.stride : 0;
    for (int i = 0; i < cache->trail_layers * TRAILS; i++)
        bytes += (size_t)trail_positions(&cache->trails[i], n) * cache->trails[i].stride;
    return bytes;
}

static void copy_trails(const Cache *cache, int s, int n, uint8_t *image, bool into_cache) {
    const Backend *backend = cache->backend;
    for (int i = 0; i < cache->trail_layers * TRAILS; i++) {
        const Trail *trail = &cache->trails[i];
        for (int p = n - trail_positions(trail, n); p < n; p++, image += trail->stride) {
            uint8_t *row = trail->ring + ((size_t)s * (size_t)trail->length + (size_t)(p % trail->length)) * trail->stride;
            backend->copy_bytes(into_cache ? row : image, into_cache ? image : row, trail->stride);
        }
    }
    for (int l = 0; l < cache->heavy_layers; l++) {
        const size_t bytes = (size_t)(n / cache->heavy_ratio) * cache->format.stride;
        uint8_t *rows = heavy_pool(cache, l).rows + (size_t)s * (size_t)cache->heavy_rows * cache->format.stride;
        backend->copy_bytes(into_cache ? rows : image, into_cache ? image : rows, bytes);
        image += bytes;
    }
}

void cache_read_trails(const Cache *cache, int s, int n, uint8_t *image) { copy_trails(cache, s, n, image, false); }

/* The session cannot be taken back behind what it came with: nothing is there of earlier positions. */
void cache_append_trails(Cache *cache, int s, int n, uint8_t *image) {
    SessionPages *session = &cache->session[s];
    copy_trails(cache, s, n, image, true);
    session->committed = session->placed = n;
    session->reached = n + MAX_BLOCK;
}

/* Takes pages from `first` on out of the hierarchy; the session keeps its reservation. */
static void drop_pages(Cache *cache, int s, int first) {
    SessionPages *session = &cache->session[s];
    for (int page = first; page < session->reserved_pages; page++) {
        HistoryPage *history = &session->pages[page];
        bool keeps = history->state == PAGE_TAIL || cache->mode == MODE_RESIDENT;
        if (history->state == PAGE_TAIL) session->n_tail--;
        else if (history->state != PAGE_ABSENT && !history->recalled) session->n_optional--;
        if (history->state == PAGE_TAIL) *tail_page(cache, s, page) = (DevicePage){0};
        if (history->state != PAGE_ABSENT && keeps) session->spare[session->n_spare++] = history->device;
        else if (history->state != PAGE_ABSENT) withdraw(cache, s, page);
        *ready_page(cache, s, page) = (DevicePage){0};
        *history = (HistoryPage){0};
        if (cache->mode == MODE_RESIDENT) continue;
        if (host_info(cache, s, page)->refs > 1) {  /* others share it as it is: the new rows go elsewhere */
            HostPage old = *host_page(cache, s, page);
            *host_page(cache, s, page) = take_host_page(cache);
            drop_host_page(cache, old);
            continue;
        }
        forget_key(cache, host_info(cache, s, page));
        host_info(cache, s, page)->rows = 0;
    }
}

int cache_return(const Cache *cache, int s, int n) {
    const SessionPages *session = &cache->session[s];
    return !cache->trail_layers || !session->admitted || session->reached - n <= MAX_BLOCK ? n : 0;
}

bool cache_truncate(Cache *cache, int s, int n) {
    SessionPages *session = &cache->session[s];
    const int rows = n / cache->ratio, first = rows / PAGE_ROWS;
    int shared = 0;
    REQUIRE(cache_return(cache, s, n) == n);
    if (session->draft_end > n) session->draft_end = n;
    if (session->draft_first > n) session->draft_first = n;
    if (session->kept_end > n) session->kept_first = session->kept_end = 0;
    if (!session->admitted) return true;
    for (int page = complete_rows(cache, s) / PAGE_ROWS; cache->mode != MODE_RESIDENT && page < session->reserved_pages; page++)
        forget_key(cache, host_info(cache, s, page));   /* its prompt has not come so far, and may go on in another way now */
    if (n >= session->committed) return true;
    end_copies(cache, INT_MAX, true);
    for (; cache->tables.tail_base[s] < first * PAGE_ROWS; end_copies(cache, INT_MAX, true)) advance_tail(cache, s);
    for (int page = first; cache->mode != MODE_RESIDENT && page < session->reserved_pages; page++)
        shared += host_info(cache, s, page)->refs > 1;
    if (shared && !free_host_pages(cache, shared)) return false;
    uint8_t *image = rows % PAGE_ROWS ? allocate_zeroed(page_image_bytes(cache), 1) : NULL;
    if (image) cache_read_page(cache, s, first, image);
    drop_pages(cache, s, first);
    cache->backend->forget_hot(cache, s);
    cache->tables.tail_base[s] = first * PAGE_ROWS;
    session->committed = session->placed = first * page_positions(cache);
    session->backed = session->backed < first ? session->backed : first;
    if (image) cache_append_page(cache, s, image, rows % PAGE_ROWS);
    session->committed = session->placed = n;       /* of compressed rows the last group may have begun */
    if (!n) session->reached = 0;
    free(image);
    check_cache(cache);
    return true;
}

PageCensus cache_census(const Cache *cache) {
    PageCensus census = {.free = cache->device_pages.n_free};
    for (int s = 0; s < cache->sessions; s++) {
        const SessionPages *session = &cache->session[s];
        if (!session->admitted) continue;
        census.hot += cache->hot_pages;
        census.tail += session->n_tail + session->n_spare;
        for (int page = 0; page < session->reserved_pages; page++) {
            census.ready += session->pages[page].state == PAGE_READY;
            census.filling += session->pages[page].state == PAGE_FILLING;
        }
    }
    census.leaving = cache->device_pages.n_pages - 1 - census.free - census.hot - census.tail - census.ready - census.filling;
    return census;
}

double cache_coverage(const Cache *cache, int session) {
    int64_t eligible = 0, ready = 0;
    for (int s = session < 0 ? 0 : session; s < (session < 0 ? cache->sessions : session + 1); s++)
        for (int page = 0; page < cache->tables.tail_base[s] / PAGE_ROWS; page++) {
            eligible++;
            ready += cache->session[s].pages[page].state == PAGE_READY;
        }
    return eligible ? (double)ready / (double)eligible : 1;
}

/* =====================================================================================================================
 * Forward
 *
 * Owns: one straight-line function for each kind of model, and what they share. Reading one of them should feel like
 * reading the paper's section on the architecture.
 */

/* theta^(-2i / dim), [dim / 2]; under yarn low frequencies are stretched by `factor` along a ramp (YaRN, Peng et al. 2023, 3.2;
 * in transformers' form). Returns the factor on cosine and sine. */
static float rope_frequencies(float *inverse_frequency, const RopeConfig *rope, int dim) {
    double low = 0, high = 0, log_factor = rope->yarn ? log(rope->factor) : 0;
    if (rope->yarn) {
        double turns = rope->original_max_position_embeddings / (2 * M_PI), span = 2 * log(rope->rope_theta);
        low = fmax(floor(dim * log(turns / rope->beta_fast) / span), 0);
        high = fmin(ceil(dim * log(turns / rope->beta_slow) / span), dim - 1);
        if (low == high) high += 0.001;
    }
    for (int i = 0; i < dim / 2; i++) {
        double plain = pow(rope->rope_theta, -2.0 * i / dim);
        double ramp = rope->yarn ? fmin(fmax((i - low) / (high - low), 0), 1) : 0;
        inverse_frequency[i] = (float)(plain * (1 - ramp) + (rope->yarn ? plain / rope->factor * ramp : 0));
    }
    if (rope->attention_factor > 0) return (float)rope->attention_factor;
    if (rope->mscale > 0 && rope->mscale_all_dim > 0)
        return (float)((0.1 * rope->mscale * log_factor + 1) / (0.1 * rope->mscale_all_dim * log_factor + 1));
    return (float)(0.1 * log_factor + 1);
}

static float upload_frequencies(const Backend *backend, float *inverse_frequency, const RopeConfig *rope, int dim) {
    float *made = allocate_zeroed((size_t)dim, sizeof *made), factor = rope_frequencies(made, rope, dim);
    backend->upload(inverse_frequency, made, (size_t)(dim / 2) * sizeof *made);
    free(made);
    return factor;
}

/* Numbers of a pass's rows, which never change. */
static void number_rows(Engine *engine) {
    DeviceRow numbers[MAX_PASS_ROWS];
    for (int r = 0; r < engine->state.max_rows; r++) numbers[r].id = r;
    engine->backend->upload(engine->state.pass_rows, numbers, (size_t)engine->state.max_rows * sizeof *numbers);
}

void prepare_rope(Engine *engine) {
    const Config *config = &engine->config;
    const RopeConfig *rope = &config->rope;
    engine->rope_attention_factor = upload_frequencies(engine->backend, engine->state.inverse_frequency, rope, rope_dim(config));
    int width = has_latent_attention(config) ? config->qk_nope_head_dim + config->qk_rope_head_dim : config->head_dim;
    double stretch = has_latent_attention(config) && rope->yarn ? 0.1 * rope->mscale_all_dim * log(rope->factor) + 1 : 1;
    engine->softmax_scale = (float)(stretch * stretch / sqrt(width));
    if (!has_streams(config)) return;
    upload_frequencies(engine->backend, engine->state.compress_frequency, &config->compress_rope, rope_dim(config));
    number_rows(engine);
}

/* The pass in runs of rows that are resolved together: of each session at most QUERY_BLOCK, which follow each other, and no more
 * blocks of several rows than there is staging for. A later block may take the slots of an earlier one, once that has attended.
 * Without a hot cache nothing is ever fetched, and the pass is one run. */
static void split_runs(State *state, const Cache *cache, const Row *rows, int n_rows) {
    long seen[MAX_PASS_ROWS];
    for (int s = 0; s < cache->sessions; s++) seen[s] = -1;
    state->n_runs = 0;
    for (int first = 0, last, blocks = 0; first < n_rows && cache->hot_rows; first = last) {
        for (last = first + 1; last < n_rows && last - first < QUERY_BLOCK && rows[last].session == rows[first].session;) last++;
        bool several = last - first > 1, again = seen[rows[first].session] == state->n_runs;
        if (again || blocks + several > cache->staging_blocks) {
            state->run_ends[state->n_runs++] = first;
            blocks = 0;
        }
        seen[rows[first].session] = state->n_runs;
        blocks += several;
    }
    state->run_ends[state->n_runs++] = n_rows;
}

/* A product that no other shares its input with. */
static void project(const Backend *backend, float *y, size_t y_stride, const float *x, size_t x_stride, int n, const Matrix *w) {
    backend->linear(&(Projection){y, y_stride, w}, 1, x, x_stride, n);
}

static void mlp(Engine *engine, const LayerWeights *layer, int n) {
    const Backend *backend = engine->backend;
    State *state = &engine->state;
    size_t hidden = (size_t)engine->config.hidden_size, inner = (size_t)layer->gate_proj.rows;
    const Projection products[] = {{state->gate, inner, &layer->gate_proj}, {state->up, inner, &layer->up_proj}};
    backend->linear(products, 2, state->normed, hidden, n);
    backend->swiglu(state->gate, state->gate, state->up, (size_t)n * inner);
    project(backend, state->branch, hidden, state->gate, inner, n, &layer->down_proj);
}

/* The shared expert, if there is one, plus each row's routed experts. */
static void mixture_of_experts(Engine *engine, const LayerWeights *layer, int n) {
    const Backend *backend = engine->backend;
    State *state = &engine->state;
    const Config *config = &engine->config;
    size_t hidden = (size_t)config->hidden_size, experts = (size_t)config->n_routed_experts;
    if (!layer->gate_proj.rows) backend->zero(state->branch, (size_t)n * hidden);
    project(backend, state->router_logits, experts, state->normed, hidden, n, &layer->router);
    backend->route(state->expert_picks, state->expert_weights, state->router_logits, layer->e_score_correction_bias, n, config);
    backend->experts(state->branch, state->normed, state->expert_picks, state->expert_weights, n, layer, config,
                     state->expert_scratch);
}

/* Copies the residual stream behind a layer (-1: the embedding) into the rows' features where the drafter taps it. */
static void tap_layer(Engine *engine, int layer, int n) {
    const DraftConfig *draft = &engine->drafter.config;
    const size_t hidden = (size_t)engine->config.hidden_size;
    for (int i = 0; i < draft->n_taps; i++)
        if (draft->target_layer_ids[i] == layer)
            engine->backend->copy_rows(engine->drafter.state.features + (size_t)i * hidden, (size_t)draft->n_taps * hidden,
                                       engine->state.hidden, hidden, n, engine->config.hidden_size, 1);
}

/* What of a layer is looked at for numbers that are not finite; a place in the report is layer * CHECKED_PARTS + part. */
enum { INDEX_QUERY, INDEX_KEY, INDEX_WEIGHTS, HIDDEN_STATE, CHECKED_PARTS };
static const char *const checked_parts[CHECKED_PARTS] = {"index query", "index key", "index weights", "hidden state"};

/* A layer as it begins in every family: the stream has been normed for it, in state->normed. */
static const LayerWeights *begin_layer(Engine *engine, int i, const Row *rows, int n) {
    if (engine->probe.entering) engine->probe.entering(engine->probe.user, i, engine->state.hidden, rows, n);
    return &engine->weights.layers[i];
}

/* What follows the attention in every family: feed-forward on the normed stream, added to it; a look at the result, and the norm
 * that the next layer, or the head, begins with. */
static void finish_layer(Engine *engine, int i, int n) {
    const Backend *backend = engine->backend;
    State *state = &engine->state;
    const Config *config = &engine->config;
    const LayerWeights *layer = &engine->weights.layers[i];
    const float *next = i + 1 < config->num_hidden_layers ? engine->weights.layers[i + 1].input_layernorm : engine->weights.norm;
    backend->add_norm(state->normed, state->hidden, state->branch, layer->post_attention_layernorm, n, config->hidden_size,
                      config->rms_norm_eps, NULL, 0);
    if (config->mlp_sparse && config->mlp_sparse[i]) mixture_of_experts(engine, layer, n);
    else mlp(engine, layer, n);
    backend->add_norm(state->normed, state->hidden, state->branch, next, n, config->hidden_size, config->rms_norm_eps,
                      state->report, i * CHECKED_PARTS + HIDDEN_STATE);
    tap_layer(engine, i, n);
}

/* Grouped-query attention with normed queries and keys (Qwen3). A cached row is all key heads, then all value heads; each
 * serves heads / kv_heads query heads. */
static void forward_qwen3(Engine *engine, const Row *rows, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const int heads = config->num_attention_heads, kv_heads = config->num_key_value_heads, dim = config->head_dim;
    const size_t hidden = (size_t)config->hidden_size, q_width = (size_t)(heads * dim), kv_width = (size_t)(kv_heads * dim),
                 width = 2 * kv_width;
    float *k = state->kv, *v = state->kv + kv_width;                 /* rows of `width`: keys and values as they are cached */
    for (int i = 0; i < config->num_hidden_layers; i++) {
        const LayerWeights *layer = begin_layer(engine, i, rows, n);
        const Projection products[] = {
            {state->q, q_width, &layer->q_proj}, {k, width, &layer->k_proj}, {v, width, &layer->v_proj}};
        backend->linear(products, 3, state->normed, hidden, n);

        /* Each head of query and key is normed by itself, before it is rotated. */
        backend->norm_heads(state->q, q_width, n, heads, dim, layer->q_norm, config->rms_norm_eps, state->cosine, state->sine);
        backend->norm_heads(k, width, n, kv_heads, dim, layer->k_norm, config->rms_norm_eps, state->cosine, state->sine);
        RowPool pool = row_pool(cache, (SourceId){i});
        backend->store_rows(pool.rows, &cache->format, state->kv_rows, n, state->kv, width, state->kv, 0);
        backend->dense_attention(state->attended, state->q, &pool, &cache->format, cache->seen.ready, cache->context_pages,
                                 state->rows, n, heads, kv_heads, dim, engine->softmax_scale);
        project(backend, state->branch, hidden, state->attended, q_width, n, &layer->o_proj);
        finish_layer(engine, i, n);
    }
}

/* The indexer of a full layer (DeepSeek-V3.2, 2.1): a few narrow heads score every earlier position, and the best index_topk
 * become the selection of this layer and of those that follow it. Its query comes from the main query's latent, its key, which
 * is cached, from the layer's input, as the layer's own do and beside them (forward_dsa); both are rotated in their first values,
 * not the last. The score is a weighted sum over heads of relu(q . k), and the weights are the row's own, from its input. What only
 * selects never reaches the hidden state, where everything else that goes bad is seen, so query, key and weights are looked at. */
static void select_rows(Engine *engine, int i, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    const LayerWeights *layer = &engine->weights.layers[i];
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const int heads = config->index_n_heads, dim = config->index_head_dim;
    uint8_t *keys = group_index_keys(cache, cache->group_of[i]);
    backend->store_index_keys(keys, &cache->index_format, state->index_rows, n, state->index_k, dim, layer->indexer_k_norm,
                              layer->indexer_k_norm_bias, config->qk_rope_head_dim, config->indexer_rope_interleave,
                              state->cosine, state->sine, state->index_weights, heads, state->report,
                              i * CHECKED_PARTS + INDEX_KEY, i * CHECKED_PARTS + INDEX_WEIGHTS);
    backend->index_select(&state->selection, state->index_q, state->index_weights, keys, &cache->index_format,
                          cache->seen.index, cache->context_pages, heads, dim, state->rows, n, state->index_scratch,
                          state->scratch_rows);
}

/* The staging of a source belongs to its group from the copy of its rows until its last attention has read them. */
static void claim_staging(Cache *cache, int source) {
    int *owner = &cache->staging_owner[cache->member_of[source] % cache->live_sources];
    REQUIRE(*owner < 0);
    *owner = cache->group_of[source];
}

static void release_staging(Cache *cache, int source) {
    int *owner = &cache->staging_owner[cache->member_of[source] % cache->live_sources];
    REQUIRE(*owner == cache->group_of[source]);
    *owner = -1;
#ifdef TIDE_DEBUG
    if (!cache->backend->shares_memory) return;
    memset(row_pool(cache, (SourceId){source}).staging, 0xff,
           (size_t)cache->staging_blocks * (size_t)cache->staging_rows * cache->format.stride);
#endif
}

/* Begins the copies of layer i, or has begun them before: in a pass of one run the copies of the layers that follow begin with
 * their producer's, as many as there are arenas of staging, and each arena's next ones when its last reader is done. So they go
 * on under the compute in between (paper 3.5). Of several runs a later one may take the slots of an earlier one, and waits. */
static void fetch_selected(Engine *engine, int i, int begin, int end, int run) {
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const int ahead = state->n_runs == 1 ? cache->live_sources : 1;
    for (int source = cache->member_of[i] ? i + ahead - 1 : i;
         source < i + ahead && source < cache->sources && cache->group_of[source] == cache->group_of[i]; source++) {
        claim_staging(cache, source);
        engine->backend->fetch_rows(cache, (SourceId){source}, &state->plan, state->rows, begin, end, run, state->report);
    }
    engine->backend->await_rows(cache, (SourceId){i});
}

/* Each row's attention over its own selection, wherever its rows lie (paper 3.2, 3.5). A producing layer resolves; the layers
 * that follow it have the same rows in the same slots, so they replay its plan on their own payload. */
static void attend_selection(Engine *engine, int i) {
    const Backend *backend = engine->backend;
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const size_t capacity = (size_t)state->selection.capacity, heads = (size_t)engine->config.num_attention_heads,
                 lora = (size_t)engine->config.kv_lora_rank, width = lora + (size_t)engine->config.qk_rope_head_dim;
    const bool producer = engine->config.indexer_full[i];
    const RowPool pool = row_pool(cache, (SourceId){i});
    for (int run = 0, begin = 0; run < state->n_runs; run++) {
        int end = state->run_ends[run];
        double start = now();
        if (producer)
            backend->resolve(cache, cache->group_of[i], &state->selection, state->rows, begin, end, run, state->locations,
                             &state->plan, state->report);
        double resolved = now();
        if (cache->hot_rows) fetch_selected(engine, i, begin, end, run);
        cache->stats.resolve_seconds += resolved - start;
        cache->stats.fetch_seconds += now() - resolved;
        backend->sparse_attention(state->z + (size_t)begin * heads * lora, state->q_absorbed + (size_t)begin * heads * width,
                                  &pool, &cache->format, state->locations + (size_t)begin * capacity,
                                  state->selection.count + begin, state->selection.capacity, end - begin,
                                  engine->config.num_attention_heads, engine->softmax_scale);
        if (cache->hot_rows) release_staging(cache, i);
        begin = end;
    }
}

/* Latent attention in absorbed form over the selected rows: GLM-5 and DeepSeek-V3.2 (DeepSeek-V2, 2.1; DeepSeek-V3.2, 2.1).
 *
 * A cached row is c | k_r: a latent of kv_lora_rank values that every head expands into its own key and value, and one rotated
 * key of qk_rope_head_dim values that all heads share. Head h would attend with k_h = W_UK[h] c and v_h = W_UV[h] c. Since
 * q . (W_UK c) = (W_UK^T q) . c, the query is moved into the latent space once instead of every cached row out of it, and the
 * heads attend straight over the cached rows; W_UV is applied once to the weighted sum of latents. */
static void forward_dsa(Engine *engine, const Row *rows, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const int heads = config->num_attention_heads, nope = config->qk_nope_head_dim, tail = config->qk_rope_head_dim,
              lora = config->kv_lora_rank, index_heads = config->index_n_heads, index_dim = config->index_head_dim;
    const size_t hidden = (size_t)config->hidden_size, rank = (size_t)config->q_lora_rank, width = (size_t)(lora + tail);
    for (int i = 0; i < config->num_hidden_layers; i++) {
        const LayerWeights *layer = begin_layer(engine, i, rows, n);

        /* All that is made of the layer's input. A full layer has an indexer, whose parts follow the layer's own. */
        const bool full = config->indexer_full[i];
        const Projection of_input[] = {{state->q_lora, rank, &layer->q_a_proj},
                                       {state->kv, width, &layer->kv_a_proj},
                                       {state->index_k, (size_t)index_dim, &layer->indexer_wk},
                                       {state->index_weights, (size_t)index_heads, &layer->indexer_weights_proj}};
        backend->linear(of_input, full ? 4 : 2, state->normed, hidden, n);

        /* This layer's cached row: the normed latent and the rotated key. Every row of the pass is stored before any attends. The
         * query comes by way of a narrow latent of its own, normed here too, which the indexer reads as well. */
        backend->store_latents(row_pool(cache, (SourceId){i}).rows, &cache->format, state->kv_rows, n, state->kv, lora, tail,
                               layer->kv_a_layernorm, state->q_lora, config->q_lora_rank, layer->q_a_layernorm,
                               config->latent_norm_eps, state->cosine, state->sine);
        const Projection of_latent[] = {{state->q, (size_t)(heads * (nope + tail)), &layer->q_b_proj},
                                        {state->index_q, (size_t)(index_heads * index_dim), &layer->indexer_wq_b}};
        backend->linear(of_latent, full ? 2 : 1, state->q_lora, rank, n);
        backend->rotate_queries(state->q, n, heads, nope + tail, tail, full ? state->index_q : NULL, index_heads,
                                index_dim, config->indexer_rope_interleave, state->cosine, state->sine,
                                state->report, i * CHECKED_PARTS + INDEX_QUERY);

        /* A full layer selects; a shared one finds the selection of the layer before it still in the state, in its order. */
        if (full) select_rows(engine, i, n);
        if (full && engine->probe.selected) engine->probe.selected(engine->probe.user, i, &state->selection, rows, n);

        backend->absorb_query(state->q_absorbed, state->q, n, &layer->kv_b_proj, config);
        attend_selection(engine, i);
        backend->expand_value(state->attended, state->z, n, &layer->kv_b_proj, config);
        project(backend, state->branch, hidden, state->attended, (size_t)(heads * config->v_head_dim), n, &layer->o_proj);
        finish_layer(engine, i, n);
    }
}

/* ---- DeepSeek-V4 */

/* All streams begin as the embedding of the rows' tokens. */
static void begin_streams(Engine *engine, const Row *rows, int n) {
    const Backend *backend = engine->backend;
    State *state = &engine->state;
    const size_t hidden = (size_t)engine->config.hidden_size, mult = (size_t)engine->config.hc_mult;
    backend->embed(state->branch, &engine->weights.embed_tokens, rows, n);
    for (size_t k = 0; k < mult; k++)
        backend->copy_rows(state->hidden + k * hidden, mult * hidden, state->branch, hidden, n, (int)hidden, 1);
}

/* From one sublayer to the next: what one of layer i has left in state->branch goes to the streams by its mixes, `leaving` (NULL:
 * there is none before), and in state->normed is what enters the next, by the mixes `entering`. The next one's own, which it
 * leaves by, are made of the streams too. */
static void next_sublayer(Engine *engine, int i, const float *leaving, const HyperWeights *weights, float *mixes,
                          const float *entering, const float *norm, int n) {
    State *state = &engine->state;
    engine->backend->mix_streams(state->normed, state->hidden, leaving ? state->branch : NULL, leaving, mixes, weights, entering,
                                 norm, n, &engine->config, state->report, i * CHECKED_PARTS + HIDDEN_STATE);
}

/* The mixes of a feed-forward. In V4.1 the next attention is entered by them; in V4 they take the place of the attention's. */
static float *mlp_mixes(Engine *engine) {
    return engine->config.family == FAMILY_DEEPSEEK_V41 ? engine->state.late_mixes : engine->state.mixes;
}

/* From the attention of layer i to its feed-forward. A sublayer's streams enter it by its own mixes or, in V4.1, by those of the
 * one before. */
static void enter_mlp(Engine *engine, const LayerWeights *layer, int i, int n) {
    const float *mixes = engine->state.mixes;
    next_sublayer(engine, i, mixes, &layer->mlp_hyper, mlp_mixes(engine), mixes, layer->post_attention_layernorm, n);
}

/* From layer i (-1: there is none before) of so many to the attention of the next, or behind the last to their sum, normed by
 * `norm` (NULL: as it is). What Engram adds comes before all of what the attention is given. */
static void enter_next(Engine *engine, const Weights *weights, int layers, int i, const float *norm, int n) {
    const Config *config = &engine->config;
    State *state = &engine->state;
    const HyperWeights *last = config->family == FAMILY_DEEPSEEK_V41 ? NULL : &weights->head_hyper;
    const float *entering = mlp_mixes(engine), *leaving = i < 0 ? NULL : entering;
    if (i + 1 == layers) return next_sublayer(engine, i, leaving, last, state->mixes, entering, norm, n);
    const LayerWeights *next = &weights->layers[i + 1];
    if (!next->engram)
        return next_sublayer(engine, i, leaving, &next->attention_hyper, state->mixes, entering, next->input_layernorm, n);
    if (leaving)
        engine->backend->mix_streams(NULL, state->hidden, state->branch, leaving, NULL, NULL, NULL, NULL, n, config,
                                     state->report, i * CHECKED_PARTS + HIDDEN_STATE);
}

/* linear(), under --qat for the first n_rounded of the products of inputs rounded as each matrix's own type was meant to meet
 * them. */
static void multiply_rounded(Engine *engine, const Projection *products, int n_products, int n_rounded, const float *x, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    const int width = products->w->cols;
    const size_t stride = (size_t)width;
    float *rounded = engine->state.rounded;
    Projection of_x[MAX_PROJECTIONS], of_rounded[MAX_PROJECTIONS];
    int as_it_is = 0, by_codes = 0;
    for (int i = 0; i < n_products; i++) {
        const DType dtype = products[i].w->dtype;
        const bool rounds = config->qat && i < n_rounded && (dtype == DTYPE_F8_E4M3 || dtype == DTYPE_F4_E2M1);
        if (rounds) of_rounded[by_codes++] = products[i];
        else of_x[as_it_is++] = products[i];
    }
    if (as_it_is) backend->linear(of_x, as_it_is, x, stride, n);
    if (!by_codes) return;
    const RowFormat format = {.dtype = KV_F8, .group = config->weight_block, .scales = SCALES_E8M0};
    backend->copy_rows(rounded, stride, x, stride, n, width, 1);
    backend->round_rows(rounded, stride, n, width, &format);
    backend->linear(of_rounded, by_codes, rounded, stride, n);
}

/* Of a single product. */
static void project_rounded(Engine *engine, float *y, size_t y_stride, const float *x, int n, const Matrix *w) {
    multiply_rounded(engine, &(Projection){y, y_stride, w}, 1, 1, x, n);
}

/* What --qat makes of rows (in V4 their turned values stay as they are), of V4.1's compressed ones, and of index vectors. */
static RowFormat row_rounding(const Config *config) {
    if (config->family == FAMILY_DEEPSEEK_V41) return scaled_row_format(KV_F8, config->head_dim, 0, WINDOW_GROUP, SCALES_E8M0);
    return scaled_row_format(KV_F8, config->head_dim - config->qk_rope_head_dim, 0, CACHED_GROUP, SCALES_E8M0);
}

static RowFormat source_rounding(const Config *config) {
    return scaled_row_format(KV_F4, config->head_dim, 0, SOURCE_GROUP, SCALES_E4M3);
}

static RowFormat index_rounding(const Config *config) {
    return scaled_row_format(KV_F4, config->index_head_dim, 0, EXPONENT_BLOCK, SCALES_E8M0);
}

/* The rows of all groups that the pass's positions complete. */
static void compress_rows(Engine *engine, const Trail *trail, const CompressorWeights *weights, uint8_t *base,
                          const RowFormat *format, const DeviceRow *ids, int dim, bool overlapping, RowFormat rounding, int n,
                          int place) {
    const Config *config = &engine->config;
    State *state = &engine->state;
    engine->backend->compress(base, format, ids, trail, state->rows, n, weights,
                              overlapping ? config->sparse_ratio : config->heavy_ratio, dim, overlapping, config->qk_rope_head_dim,
                              state->compress_frequency, config->rms_norm_eps, config->qat ? &rounding : NULL, state->report,
                              place);
}

/* The rows of positions, key and value in one, out of state->kv into rows ids[r] of a pool; with `of_queries` the narrow latent
 * that queries are made from is normed too. */
static void store_keys(Engine *engine, const LayerWeights *layer, uint8_t *base, const RowFormat *format, const DeviceRow *ids,
                       bool of_queries, const float *cosine, const float *sine, int n) {
    const Config *config = &engine->config;
    State *state = &engine->state;
    const RowFormat rounding = row_rounding(config);
    engine->backend->store_shared_keys(base, format, ids, n, state->kv, config->head_dim, config->qk_rope_head_dim, layer->kv_norm,
                                       config->qat ? &rounding : NULL, of_queries ? state->q_lora : NULL, config->q_lora_rank,
                                       layer->q_a_layernorm, config->rms_norm_eps, cosine, sine);
}

/* What else layer i makes of its input: how much each of its indexer's heads counts, and values and gates of all that it
 * compresses, or the latents themselves where a row is one position's. Returns how many products. */
static int more_of_input(Engine *engine, int i, Projection *products) {
    const LayerWeights *layer = &engine->weights.layers[i];
    const CompressorWeights *const compressors[] = {&layer->compressor, &layer->index_compressor};
    State *state = &engine->state;
    int count = 0;
    if (selects_rows(&engine->config, i))
        products[count++] = (Projection){state->index_weights, (size_t)engine->config.index_n_heads,
                                         &layer->indexer_weights_proj};
    for (int c = 0; c < 2; c++) {
        const Trail *trail = &engine->cache.trails[i * TRAILS + TRAIL_GROUP + c];
        const Matrix *values = &compressors[c]->wkv, *gates = &compressors[c]->wgate;
        const size_t stride = trail->stride / sizeof(float);
        float *raw = (float *)trail->pass;
        if (values->rows && !gates->rows) products[count++] = (Projection){state->latents, (size_t)values->rows, values};
        if (!gates->rows) continue;
        products[count++] = (Projection){raw, stride, values};
        products[count++] = (Projection){raw + values->rows, stride, gates};
    }
    return count;
}

/* A layer's queries, by way of a narrow latent, in state->q, and those of its indexer, if it selects, in state->index_q, as the
 * products leave them; and the row of each position to rows ids[r] of a pool. i: the layer's number in the target, or -1: it is a
 * drafter's. */
static void project_heads(Engine *engine, const LayerWeights *layer, int i, uint8_t *base, const RowFormat *format,
                          const DeviceRow *ids, const float *cosine, const float *sine, int n) {
    const Config *config = &engine->config;
    State *state = &engine->state;
    const int heads = config->num_attention_heads, dim = config->head_dim;
    const bool selects = i >= 0 && selects_rows(config, i);
    const size_t index_width = (size_t)(config->index_n_heads * config->index_head_dim);
    Projection of_input[MAX_PROJECTIONS] = {{state->q_lora, (size_t)config->q_lora_rank, &layer->q_a_proj},
                                            {state->kv, (size_t)dim, &layer->wkv}};
    multiply_rounded(engine, of_input, 2 + (i < 0 ? 0 : more_of_input(engine, i, of_input + 2)), 2, state->normed, n);
    store_keys(engine, layer, base, format, ids, true, cosine, sine, n);
    const Projection of_latent[] = {{state->q, (size_t)(heads * dim), &layer->q_b_proj},
                                    {state->index_q, index_width, &layer->indexer_wq_b}};
    multiply_rounded(engine, of_latent, selects ? 2 : 1, 2, state->q_lora, n);
}

/* Of the norm of each head of a query by itself, which only V4 has. */
static float query_eps(const Config *config) { return config->family == FAMILY_DEEPSEEK_V41 ? -1 : config->rms_norm_eps; }

/* All products of a layer's input; its queries, its rows for the window, and its indexer's queries. There are two ropes, and the
 * indexer's is that of layers which compress. */
static void project_shared_key(Engine *engine, int i, bool compresses, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    State *state = &engine->state;
    const int index_heads = config->index_n_heads, index_dim = config->index_head_dim;
    const bool selects = selects_rows(config, i);
    const RowFormat of_index = index_rounding(config);
    project_heads(engine, &engine->weights.layers[i], i, engine->cache.trails[i * TRAILS + TRAIL_WINDOW].pass,
                  &engine->cache.window_format, state->pass_rows, compresses ? state->compress_cosine : state->cosine,
                  compresses ? state->compress_sine : state->sine, n);
    if (!selects) return;
    backend->turn_index_queries(state->index_q, n, index_heads, index_dim, config->qk_rope_head_dim, state->compress_cosine,
                                state->compress_sine, state->index_weights, state->report, i * CHECKED_PARTS + INDEX_QUERY,
                                i * CHECKED_PARTS + INDEX_WEIGHTS);
    if (config->qat && config->family == FAMILY_DEEPSEEK_V4) backend->hadamard(state->index_q, n * index_heads, index_dim);
    if (config->qat) backend->round_rows(state->index_q, (size_t)index_dim, n * index_heads, index_dim, &of_index);
}

/* The indexer of a sparse layer: its keys are compressed as the layer's rows are, from values and gates of its own, and a
 * row selects among those that are complete. */
static void index_groups(Engine *engine, int i, int source, int n) {
    const Config *config = &engine->config;
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const int heads = config->index_n_heads, dim = config->index_head_dim;
    uint8_t *keys = group_index_keys(cache, source);
    compress_rows(engine, &cache->trails[i * TRAILS + TRAIL_INDEX_GROUP], &engine->weights.layers[i].index_compressor, keys,
                  &cache->index_format, state->index_rows, dim, true, index_rounding(config), n, i * CHECKED_PARTS + INDEX_KEY);
    engine->backend->select_groups(&state->selection, state->index_q, state->index_weights, keys, &cache->index_format,
                                   cache->seen.index, cache->context_pages, PAGE_ROWS, heads, dim, state->group_rows, n,
                                   state->index_scratch, state->scratch_rows, NULL, 0, 0, false);
}

/* Rows [begin, end) attend to their windows and to rows of the pool, in a layer of either rope. */
static void attend_window(Engine *engine, int i, const RowPool *pool, const DeviceRow *locations, const int *count, int capacity,
                          int begin, int end) {
    const Config *config = &engine->config;
    State *state = &engine->state;
    const bool plain = config->compression ? config->compression[i] == COMPRESSION_NONE : config->source[i] < 0;
    engine->backend->window_attention(state->attended, state->q, &engine->cache.trails[i * TRAILS + TRAIL_WINDOW],
                                      &engine->cache.window_format, config->sliding_window, pool, &engine->cache.format,
                                      locations, count, capacity, state->rows, begin, end, config->num_attention_heads,
                                      engine->weights.layers[i].attention_sink, engine->softmax_scale, query_eps(config),
                                      config->qk_rope_head_dim, plain ? state->cosine : state->compress_cosine,
                                      plain ? state->sine : state->compress_sine);
}

/* Where do the rows lie that a run has selected, and bring those here that the device lacks. */
static void resolve_groups(Engine *engine, int source, int begin, int end, int run) {
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    double start = now();
    engine->backend->resolve(cache, source, &state->selection, state->rows, begin, end, run, state->locations, &state->plan,
                             state->report);
    double resolved = now();
    if (cache->hot_rows) fetch_selected(engine, source, begin, end, run);
    cache->stats.resolve_seconds += resolved - start;
    cache->stats.fetch_seconds += now() - resolved;
}

/* A sparse layer's attention, run by run. */
static void attend_groups(Engine *engine, int i, int source) {
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const RowPool pool = row_pool(cache, (SourceId){source});
    for (int run = 0, begin = 0; run < state->n_runs; run++) {
        int end = state->run_ends[run];
        resolve_groups(engine, source, begin, end, run);
        attend_window(engine, i, &pool, state->locations, state->selection.count, state->selection.capacity, begin, end);
        if (cache->hot_rows) release_staging(cache, source);
        begin = end;
    }
}

/* The feed-forward of a layer: experts chosen by the router, or in the first layers by the token's id. */
static void mix_experts(Engine *engine, const Config *config, const LayerWeights *layer, int n) {
    const Backend *backend = engine->backend;
    State *state = &engine->state;
    const size_t hidden = (size_t)config->hidden_size;
    if (!layer->gate_proj.rows) backend->zero(state->branch, (size_t)n * hidden);
    project(backend, state->router_logits, (size_t)config->n_routed_experts, state->normed, hidden, n, &layer->router);
    backend->route_softplus(state->expert_picks, state->expert_weights, state->router_logits, layer->e_score_correction_bias,
                            layer->hash_experts, state->rows, n, config);
    backend->experts(state->branch, state->normed, state->expert_picks, state->expert_weights, n, layer, config,
                     state->expert_scratch);
}

/* A layer from what its heads bring on: out of the narrow latents of groups of heads into the streams, then the feed-forward, of
 * which the streams are yet to take up what is in state->branch. */
static void finish_stream_layer(Engine *engine, const Config *config, const LayerWeights *layer, int i, int n) {
    State *state = &engine->state;
    engine->backend->grouped_linear(state->o_latent, state->attended, n, &layer->o_a_proj, config->o_groups);
    project_rounded(engine, state->branch, (size_t)config->hidden_size, state->o_latent, n, &layer->o_proj);
    enter_mlp(engine, layer, i, n);
    mix_experts(engine, config, layer, n);
}

/* What the drafter taps of the streams at a layer, into the rows' features: their mean, or all of them as they are. */
static void tap_streams(Engine *engine, int layer, int n) {
    const Backend *backend = engine->backend;
    const DraftConfig *draft = &engine->drafter.config;
    const DraftState *drafting = &engine->drafter.state;
    State *state = &engine->state;
    const int hidden = engine->config.hidden_size;
    const size_t width = (size_t)draft->feature_width;
    for (int i = 0; i < draft->n_taps; i++) {
        if (draft->target_layer_ids[i] != layer) continue;
        if (draft->multi_token) {
            backend->copy_rows(drafting->features, width, state->hidden, width, n, draft->feature_width, 1);
            continue;
        }
        backend->mix_streams(state->branch, state->hidden, NULL, NULL, NULL, NULL, drafting->shares, NULL, n, &engine->config,
                             state->report, 0);
        backend->copy_rows(drafting->features + (size_t)(i * hidden), width, state->branch, (size_t)hidden, n, hidden, 1);
    }
}

/* DeepSeek-V4: several residual streams, one key and value that all heads share, and compressed history.
 *
 * Every layer sees its last sliding_window positions as they are. Sparse layers (CSA) also see rows that are each made of
 * sparse_ratio positions and those before them, as many as their indexer selects; heavy layers (HCA) see a row for every
 * heavy_ratio positions, all of them. A row can be seen from its group's last position on. */
static void forward_v4(Engine *engine, const Row *rows, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    const Weights *weights = &engine->weights;
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const int dim = config->head_dim;
    const RowFormat rounding = row_rounding(config);
    int source = 0, heavy = 0;
    backend->locate_groups(state->kv_rows, state->index_rows, cache, 0, state->rows, n);
    backend->see_groups(state->group_rows, NULL, NULL, state->rows, n, config->sparse_ratio);
    backend->locate_heavy(state->heavy_ids, cache, state->rows, n, config->heavy_ratio);
    backend->see_groups(NULL, state->heavy_count, NULL, state->rows, n, config->heavy_ratio);
    enter_next(engine, weights, config->num_hidden_layers, -1, weights->norm, n);
    for (int i = 0; i < config->num_hidden_layers; i++) {
        const LayerWeights *layer = begin_layer(engine, i, rows, n);
        const Compression compression = config->compression[i];
        const Trail *trail = &cache->trails[i * TRAILS + TRAIL_GROUP];
        project_shared_key(engine, i, compression != COMPRESSION_NONE, n);

        /* What the pass completes of the compressed history, and attention over the window and that. */
        if (compression == COMPRESSION_SPARSE) {
            index_groups(engine, i, source, n);
            if (engine->probe.selected) engine->probe.selected(engine->probe.user, i, &state->selection, rows, n);
            compress_rows(engine, trail, &layer->compressor, source_rows(cache, (SourceId){source}), &cache->format,
                          state->kv_rows, dim, true, rounding, n, i * CHECKED_PARTS + HIDDEN_STATE);
            attend_groups(engine, i, source++);
        } else if (compression == COMPRESSION_HEAVY) {
            const RowPool pool = heavy_pool(cache, heavy++);
            compress_rows(engine, trail, &layer->compressor, pool.rows, &cache->format, state->heavy_ids, dim, false, rounding, n,
                          i * CHECKED_PARTS + HIDDEN_STATE);
            attend_window(engine, i, &pool, NULL, state->heavy_count, cache->heavy_rows, 0, n);
        } else attend_window(engine, i, NULL, NULL, NULL, 0, 0, n);

        finish_stream_layer(engine, config, layer, i, n);
        enter_next(engine, weights, config->num_hidden_layers, i, weights->norm, n);
        tap_streams(engine, i, n);
    }
}

/* ---- DeepSeek-V4.1 */

/* What the last tokens bring to mind joins all streams, before a layer that has a table. */
static void remember(Engine *engine, const LayerWeights *layer, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    State *state = &engine->state;
    const Trail *tokens = &engine->cache.trails[TRAIL_TOKENS];
    backend->read_engram(state->engram, layer->engram, engine->weights.token_map, tokens, state->rows, n, config);
    project_rounded(engine, state->engram_kv, (size_t)layer->engram->wkv.rows, state->engram, n, &layer->engram->wkv);
    backend->add_engram(state->hidden, state->engram_kv, layer->engram, n, config);
}

/* What the rows and index keys of a source are made of, for all groups that the pass completes, in state->latents: it stands at
 * the first position of its group. */
static void pool_source(Engine *engine, int i, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    State *state = &engine->state;
    const int source = config->source[i], ratio = config->source_ratio[source], dim = config->head_dim;
    const size_t width = (size_t)dim;
    const Trail *trail = &engine->cache.trails[i * TRAILS + TRAIL_GROUP];
    const CompressorWeights *compressor = &engine->weights.layers[i].compressor;
    if (ratio > 1)
        backend->pool_groups(state->latents, trail, state->rows, n, compressor, ratio, dim, config->rms_norm_eps);
    else backend->rms_norm(state->latents, width, state->latents, width, compressor->norm, n, dim, config->rms_norm_eps);
    backend->locate_groups(state->kv_rows, state->index_rows, &engine->cache, source, state->rows, n);
    backend->see_groups(NULL, NULL, state->first_rows, state->rows, n, ratio);
    backend->rotations(state->group_cosine, state->group_sine, state->first_rows, n, state->compress_frequency,
                       config->qk_rope_head_dim, 1);
}

/* What groups are to be known by, one vector a row: turned by its group's first position, and stored in row ids[r] of a pool. */
static void store_groups(Engine *engine, float *x, int dim, RowFormat rounding, uint8_t *base, const RowFormat *format,
                         const DeviceRow *ids, int n, int place) {
    const Backend *backend = engine->backend;
    State *state = &engine->state;
    const size_t width = (size_t)dim;
    backend->rotate_queries(x, n, 1, dim, engine->config.qk_rope_head_dim, NULL, 0, 0, true, state->group_cosine,
                            state->group_sine, NULL, 0);
    backend->check_finite(state->report, place, x, n, dim);
    if (engine->config.qat) backend->round_rows(x, width, n, dim, &rounding);
    backend->store_rows(base, format, ids, n, x, width, x + format->quantised, width);
}

/* A source's index keys: of the latents before those are turned. */
static void make_keys(Engine *engine, int i, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    const LayerWeights *layer = &engine->weights.layers[i];
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const int dim = config->index_head_dim;
    const size_t width = (size_t)dim, latent = (size_t)config->head_dim;
    project(backend, state->index_k, width, state->latents, latent, n, &layer->indexer_wk);
    backend->rms_norm(state->index_k, width, state->index_k, width, layer->indexer_k_norm, n, dim, config->rms_norm_eps);
    store_groups(engine, state->index_k, dim, index_rounding(config), group_index_keys(cache, config->source[i]),
                 &cache->index_format, state->index_rows, n, i * CHECKED_PARTS + INDEX_KEY);
}

/* A source's rows: the latents themselves. */
static void make_rows(Engine *engine, int i, int n) {
    const Config *config = &engine->config;
    Cache *cache = &engine->cache;
    store_groups(engine, engine->state.latents, config->head_dim, source_rounding(config),
                 source_rows(cache, (SourceId){config->source[i]}), &cache->format, engine->state.kv_rows, n,
                 i * CHECKED_PARTS + HIDDEN_STATE);
}

/* The selection of a layer that makes one, from its source's keys, among them those that it adds itself if it is the source.
 * Behind the candidate source it stays in the blocks kept there. */
static void select_candidates(Engine *engine, int i, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const int heads = config->index_n_heads, dim = config->index_head_dim, source = config->source[i],
              candidates = config->candidate_source_layer_id;
    if (config->makes_rows[i]) make_keys(engine, i, n);
    backend->see_groups(state->group_rows, NULL, NULL, state->rows, n, config->source_ratio[source]);
    backend->select_groups(&state->selection, state->index_q, state->index_weights, group_index_keys(cache, source),
                           &cache->index_format, cache->seen.index, cache->context_pages, page_rows(cache, source), heads, dim,
                           state->group_rows, n, state->index_scratch, state->scratch_rows,
                           candidates >= 0 && i >= candidates ? state->blocks : NULL, config->candidate_block_size,
                           config->candidate_topk_blocks, i == candidates);
}

/* Whether layer i is the last that reads the selection it attends to. */
static bool reads_last(const Config *config, int i) {
    for (i++; i < config->num_hidden_layers; i++)
        if (config->source[i] >= 0) return config->selects[i];
    return true;
}

/* Attention over the window and the selected rows of the source. A layer that selects resolves. Those that follow have the same
 * rows of the same source, and so in the same places, as long as nothing was resolved since: in a pass of several runs a later
 * one may have taken them, and each layer resolves again. */
static void attend_source(Engine *engine, int i) {
    const Config *config = &engine->config;
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    const int source = config->source[i];
    const RowPool pool = row_pool(cache, (SourceId){source});
    const bool resolves = config->selects[i] || state->n_runs > 1, ends = state->n_runs > 1 || reads_last(config, i);
    for (int run = 0, begin = 0; run < state->n_runs; run++) {
        int end = state->run_ends[run];
        if (resolves) resolve_groups(engine, source, begin, end, run);
        attend_window(engine, i, &pool, state->locations, state->selection.count, state->selection.capacity, begin, end);
        if (cache->hot_rows && ends) release_staging(cache, source);
        begin = end;
    }
}

/* DeepSeek-V4.1: the streams of V4, entered late, over a history that few layers make and most read.
 *
 * Every layer sees its last sliding_window positions as they are. Some (Full) make rows of one or two positions each and index
 * keys for them; these and some more (Reindex) select among those rows; all others (Reuse) attend to the last selection. A
 * sublayer's streams enter it by the weights that the sublayer before computed. */
static void forward_v41(Engine *engine, const Row *rows, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    const Weights *weights = &engine->weights;
    State *state = &engine->state;
    const Trail *trails = engine->cache.trails;
    backend->first_stream(state->late_mixes, n, config);
    if (engine->weights.token_map) backend->note_tokens(&trails[TRAIL_TOKENS], state->rows, n);
    for (int i = 0; i < config->num_hidden_layers; i++) {
        const EngramWeights *engram = engine->weights.layers[i].engram;
        if (engram)
            backend->prefetch_engram(engram, engine->weights.token_map, &trails[TRAIL_TOKENS], state->rows, n, config);
    }
    enter_next(engine, weights, config->num_hidden_layers, -1, weights->norm, n);
    for (int i = 0; i < config->num_hidden_layers; i++) {
        const LayerWeights *layer = begin_layer(engine, i, rows, n);
        const bool reads = config->source[i] >= 0;
        if (layer->engram) {
            remember(engine, layer, n);
            next_sublayer(engine, i, NULL, &layer->attention_hyper, state->mixes, state->late_mixes, layer->input_layernorm, n);
        }
        tap_streams(engine, i, n);

        project_shared_key(engine, i, reads, n);
        if (config->makes_rows[i]) pool_source(engine, i, n);
        if (config->selects[i]) select_candidates(engine, i, n);
        if (config->selects[i] && engine->probe.selected)
            engine->probe.selected(engine->probe.user, i, &state->selection, rows, n);
        if (config->makes_rows[i]) make_rows(engine, i, n);
        if (reads) attend_source(engine, i);
        else attend_window(engine, i, NULL, NULL, NULL, 0, 0, n);
        finish_stream_layer(engine, config, layer, i, n);
        enter_next(engine, weights, config->num_hidden_layers, i, weights->norm, n);
    }
}

/* Works that a backend may keep: what tells them apart, and passes of how many rows are worth it. */
enum { WORK_LAYERS, WORK_HEAD, WORK_DRAFT, WORK_CONTEXT, KEPT_ROWS = 64 };

static uint64_t work_key(const Engine *engine, int work, int n, const int *more, int n_more) {
    uint64_t key = XXH3_64bits(&engine->state.block, sizeof engine->state.block); /* no two engines share their activations */
    key = XXH3_64bits_withSeed(&work, sizeof work, key);
    key = XXH3_64bits_withSeed(&n, sizeof n, key);
    return XXH3_64bits_withSeed(more, (size_t)n_more * sizeof *more, key) | 1;
}

/* Whether that work needs no more to be done for it. Where it is new, the round takes longer than others will, and tells nothing
 * of costs. */
static bool begin_kept_work(Engine *engine, uint64_t key) {
    const WorkAnswer work = engine->backend->begin_work(key);
    if (work == WORK_TO_KEEP) engine->work_is_new = true;
    return work == WORK_DONE;
}

/* Rows, tables and a fresh report go where operations read them; then the first of these run. */
static void begin_pass(Engine *engine, const Row *rows, int n) {
    static const PassReport nothing = {.bad_place = -1, .bad_row = -1};
    const Backend *backend = engine->backend;
    State *state = &engine->state;
    Cache *cache = &engine->cache;
    split_runs(state, cache, rows, n);
    engine->pass_counted = false;
    backend->upload(state->rows, rows, (size_t)n * sizeof *rows);
    backend->upload(state->report, &nothing, sizeof nothing);
    if (!backend->shares_memory) backend->upload(cache->seen.tail_base, cache->tables.tail_base, cache->tables_bytes);
}

/* The layers of models with one residual stream, from the embedding to the final norm. */
static void run_residual_layers(Engine *engine, const Row *rows, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    State *state = &engine->state;
    const size_t hidden = (size_t)config->hidden_size;
    backend->locate_rows(state->kv_rows, state->index_rows, &engine->cache, state->rows, n);
    backend->embed(state->hidden, &engine->weights.embed_tokens, state->rows, n);
    tap_layer(engine, -1, n);
    backend->rms_norm(state->normed, hidden, state->hidden, hidden, engine->weights.layers[0].input_layernorm, n,
                      config->hidden_size, config->rms_norm_eps);
    (has_latent_attention(config) ? forward_dsa : forward_qwen3)(engine, rows, n);
}

/* And of those with several, which all begin as the embedding. */
static void run_stream_layers(Engine *engine, const Row *rows, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    State *state = &engine->state;
    backend->rotations(state->compress_cosine, state->compress_sine, state->rows, n, state->compress_frequency,
                       rope_dim(config), 1);
    begin_streams(engine, state->rows, n);
    (config->family == FAMILY_DEEPSEEK_V4 ? forward_v4 : forward_v41)(engine, rows, n);
}

/* All layers, from the rows' tokens to the final norm. Passes of few rows come in few shapes, and each is kept as one work; those
 * of several runs, which prompts bring, come in too many. */
static void run_layers(Engine *engine, const Row *rows, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    State *state = &engine->state;
    bool watched = engine->probe.entering || engine->probe.selected;
    uint64_t key = watched || n > KEPT_ROWS || state->n_runs > 1 ? 0 : work_key(engine, WORK_LAYERS, n, NULL, 0);
    if (begin_kept_work(engine, key)) return;
    backend->rotations(state->cosine, state->sine, state->rows, n, state->inverse_frequency, rope_dim(config),
                       engine->rope_attention_factor);
    (has_streams(config) ? run_stream_layers : run_residual_layers)(engine, rows, n);
    if (engine->probe.entering) engine->probe.entering(engine->probe.user, config->num_hidden_layers, state->hidden, rows, n);
    backend->end_work();
}

bool begin_forward(Engine *engine, const Row *rows, int n_rows, Error *error) {
    const Config *config = &engine->config;
    for (int r = 0; r < n_rows; r++) {
        bool inside = rows[r].session >= 0 && rows[r].session < engine->cache.sessions && rows[r].token >= 0
                      && rows[r].token < config->vocab_size && rows[r].position >= 0 && rows[r].position < engine->cache.context;
        engine->failed_session = inside ? -1 : rows[r].session;
        if (!inside)
            return fail(error, "session %d: token %d at position %d lies outside the vocabulary of %d or the context of %d",
                        rows[r].session, rows[r].token, rows[r].position, config->vocab_size, engine->cache.context);
    }
    if (!cache_place(&engine->cache, rows, n_rows, &engine->failed_session, error)) return false;
    allocation_forbidden = true;
    begin_pass(engine, rows, n_rows);
    run_layers(engine, rows, n_rows);
    allocation_forbidden = false;
    return true;
}

void begin_head(Engine *engine, const int *indices, int n) {
    const Backend *backend = engine->backend;
    State *state = &engine->state;
    const size_t hidden = (size_t)engine->config.hidden_size, vocab = (size_t)engine->config.vocab_size;
    backend->upload(state->indices, indices, (size_t)n * sizeof *indices);
    if (!begin_kept_work(engine, n > KEPT_ROWS ? 0 : work_key(engine, WORK_HEAD, n, NULL, 0))) {
        backend->move_rows(state->branch, NULL, state->normed, state->indices, n, engine->config.hidden_size);
        project(backend, state->logits, vocab, state->branch, hidden, n, &engine->weights.lm_head);
        backend->check_finite(state->report, engine->config.num_hidden_layers * CHECKED_PARTS, state->logits, n,
                              engine->config.vocab_size);
        backend->end_work();
    }
}

/* Takes what the pass did to the hierarchy into the statistics: once, after its layers or after its head. */
static void count_pass(CacheStats *stats, const PassReport *report, size_t row_bytes) {
    for (int tier = 0; tier < TIERS; tier++) stats->picked[tier] += (uint64_t)report->picked[tier];
    stats->fetched += (uint64_t)report->fetched;
    stats->staged += (uint64_t)report->staged;
    stats->bytes_fetched += (uint64_t)report->copied * row_bytes;
}

bool end_pass(Engine *engine, const Row *rows, const int *indices, Error *error) {
    const int layers = engine->config.num_hidden_layers;
    PassReport report;
    engine->backend->copy_bytes(&report, engine->state.report, sizeof report);
    if (!engine->pass_counted) count_pass(&engine->cache.stats, &report, engine->cache.format.bytes);
    engine->pass_counted = true;
    if (report.bad_row < 0) return true;
    const int layer = report.bad_place / CHECKED_PARTS;
    const Row *row = &rows[layer < layers ? report.bad_row : indices[report.bad_row]];
    engine->failed_session = row->session;
    if (layer == layers)
        return fail(error, "lm_head: the logits of session %d at position %d are not finite", row->session, row->position);
    return fail(error, "layer %d: the %s of session %d at position %d is not finite", layer,
                checked_parts[report.bad_place % CHECKED_PARTS], row->session, row->position);
}

bool forward(Engine *engine, const Row *rows, int n_rows, Error *error) {
    return begin_forward(engine, rows, n_rows, error) && end_pass(engine, rows, NULL, error);
}

bool head(Engine *engine, const Row *rows, const int *indices, int n, Error *error) {
    begin_head(engine, indices, n);
    return end_pass(engine, rows, indices, error);
}

/* =====================================================================================================================
 * Drafters
 *
 * Owns: a drafter's checkpoint (z-lab's, DeepSpec's and speculators' layouts), its ring of context rows, and the block pass
 * that turns an anchor into proposals: DFlash, DFlash 2 and DSpark in one, with the parts that the file has. Relies on the
 * features that a target pass leaves in the state. Everything about a drafter that is misread still gives the right text, only
 * slowly; so what is not known by name is refused. Drafters inside DeepSeek-V4's checkpoints are the same with other layers, the
 * target's: a block goes through the target's own activations, between two passes.
 */

static const struct { const char *spelling, *kind;
} architectures[] = {
    {"DFlashDraftModel", "dflash"},
    {"DFlash2DraftModel", "dflash2"},
    {"Qwen3DSparkModel", "dspark"},
    {"DSparkDraftModel", "dspark"},
};

/* The object that has the key: dflash_config or dspark_config where they have it, else the file's own. */
static Fields draft_fields(const Fields *top, const char *key) {
    static const char *const nests[] = {"dflash_config", "dspark_config"};
    Fields inner = *top;
    for (int i = 0; i < 2; i++) {
        inner.object = field(top, nests[i]);
        if (cJSON_IsObject(inner.object) && field(&inner, key)) return inner;
    }
    return *top;
}

static int draft_int(Fields *top, const char *key, int low, int high, int fallback) {
    Fields fields = draft_fields(top, key);
    int value = read_int(&fields, key, low, high, fallback);
    top->failed |= fields.failed;
    return value;
}

static float draft_number(Fields *top, const char *key, double low, double high, double fallback) {
    Fields fields = draft_fields(top, key);
    double value = read_number(&fields, key, low, high, fallback);
    top->failed |= fields.failed;
    return (float)value;
}

static const cJSON *draft_item(const Fields *top, const char *key) {
    Fields fields = draft_fields(top, key);
    return field(&fields, key);
}

/* Which layers of the target are tapped. There is a rule for files without a list, which is wrong for most released ones.
 * speculators names the layer whose input is tapped, everybody else the one whose output is. */
static void read_taps(DraftConfig *config, Fields *fields, const Config *target, bool speculators) {
    const char *key = speculators ? "aux_hidden_state_layer_ids" : "target_layer_ids";
    const cJSON *list = draft_item(fields, key), *entry;
    if (!cJSON_IsArray(list) || !list->child || cJSON_GetArraySize(list) > MAX_TAPS)
        return field_failed(fields, key, list, "a list of layers");
    cJSON_ArrayForEach(entry, list) {
        double id = cJSON_IsNumber(entry) ? entry->valuedouble - speculators : NAN;
        if (!(id >= -1 && id < target->num_hidden_layers) || id != (int)id)
            return field_failed(fields, key, list, "layers of the target");
        config->target_layer_ids[config->n_taps++] = (int)id;
    }
}

/* Windows and causality of each layer. Where the file does not say, a windowed layer of DFlash is causal inside the block, as
 * the first ones were trained. */
static void read_windows(DraftConfig *config, Fields *fields, const char *kind, bool speculators) {
    int layers = config->backbone.num_hidden_layers;
    bool *sliding = allocate_zeroed((size_t)layers, sizeof(bool)), causal_by_default = strcmp(kind, "dspark") || speculators,
         any = false;
    Fields shape = *fields;
    if (speculators) shape.object = field(fields, "transformer_layer_config");
    if (!read_layer_words(&shape, "layer_types", "sliding_attention", "full_attention", sliding, layers))
        require_bool(&shape, "use_sliding_window", false);
    for (int i = 0; i < layers; i++) any |= sliding[i];
    int window = any ? read_int(&shape, "sliding_window", config->block_size, MAX_CONTEXT, REQUIRED) : 0;
    fields->failed |= shape.failed;
    const cJSON *said = field(fields, "is_causal") ? field(fields, "is_causal") : draft_item(fields, "causal");
    bool non_causal = read_bool(fields, "sliding_window_non_causal", !strcmp(kind, "dflash2"));
    if (said && !cJSON_IsBool(said)) field_failed(fields, said->string, said, "true or false");
    config->window = allocate_zeroed((size_t)layers, sizeof(int));
    config->causal = sliding;
    for (int i = 0; i < layers; i++) {
        config->window[i] = sliding[i] ? window : INT_MAX;
        config->widest_window = larger(config->widest_window, config->window[i]);
        config->causal[i] = said ? cJSON_IsTrue(said) : sliding[i] && causal_by_default && !non_causal;
    }
}

/* Row k of a block predicts position n + k + 1 in DeepSpec's files and n + k in z-lab's; speculators has both, and means the
 * latter where it does not say. */
static int read_first_slot(Fields *fields, const char *kind, bool speculators) {
    const cJSON *said = draft_item(fields, "sample_from_anchor");
    if (said && !cJSON_IsBool(said)) field_failed(fields, "sample_from_anchor", said, "true or false");
    return said ? !cJSON_IsTrue(said) : speculators || strcmp(kind, "dspark");
}

static void read_draft_parts(DraftConfig *config, Fields *fields, const char *kind) {
    if (!strcmp(kind, "dflash2")) {
        config->conv_kernel_size = draft_int(fields, "conv_kernel_size", 1, config->block_size, 2);
        config->conv_group_size = draft_int(fields, "conv_group_size", 1, config->backbone.hidden_size, 16);
        config->selector_rank = draft_int(fields, "selector_rank", 1, MAX_ROW_WIDTH, REQUIRED);
        if (draft_int(fields, "selector_top_k", 1, MAX_VOCAB, CANDIDATES) != CANDIDATES)
            field_failed(fields, "selector_top_k", draft_item(fields, "selector_top_k"), "16");
        if (config->backbone.hidden_size % config->conv_group_size)
            field_failed(fields, "conv_group_size", draft_item(fields, "conv_group_size"), "a divisor of hidden_size");
    }
    if (!strcmp(kind, "dspark")) {
        const cJSON *type = draft_item(fields, "markov_head_type");
        config->markov_rank = draft_int(fields, "markov_rank", 0, MAX_ROW_WIDTH, 256);
        if (type && strcmp(cJSON_IsString(type) ? type->valuestring : "", "vanilla"))
            field_failed(fields, "markov_head_type", type, "\"vanilla\"");
        const cJSON *with = draft_item(fields, "confidence_head_with_markov");
        const cJSON *head = draft_item(fields, "enable_confidence_head");
        config->confidence_promised = head ? cJSON_IsTrue(head) : -1;
        config->confidence_head_with_markov = config->markov_rank && (!with || cJSON_IsTrue(with));
    }
    config->final_logit_softcapping = draft_number(fields, "final_logit_softcapping", 0, 1e6, 0);
    config->output_multiplier = draft_number(fields, "output_multiplier", 0, 1e6, 1);
    config->input_embedding_scale = draft_number(fields, "input_embedding_scale", 0, 1e6, 1);
}

/* What the file must agree on with the target. */
static void check_draft_config(DraftConfig *config, Fields *fields, const Config *target) {
    const Config *backbone = &config->backbone;
    const cJSON *layers = draft_item(fields, "num_target_layers");
    char wanted[80];
    snprintf(wanted, sizeof wanted, "%d, the target's", target->num_hidden_layers);
    if (layers && !(cJSON_IsNumber(layers) && layers->valuedouble == target->num_hidden_layers))
        field_failed(fields, "num_target_layers", layers, wanted);
    snprintf(wanted, sizeof wanted, "%d, the target's", target->vocab_size);
    if (backbone->vocab_size != target->vocab_size) field_failed(fields, "vocab_size", field(fields, "vocab_size"), wanted);
    snprintf(wanted, sizeof wanted, "%d, the target's", target->hidden_size);
    if (backbone->hidden_size != target->hidden_size) field_failed(fields, "hidden_size", field(fields, "hidden_size"), wanted);
    int queries = backbone->num_attention_heads / backbone->num_key_value_heads * config->block_size;
    if (queries > MAX_BLOCK_QUERIES || queries * backbone->head_dim > PAGE_ROWS * MAX_ROW_WIDTH)
        field_failed(fields, "num_attention_heads", field(fields, "num_attention_heads"),
                     "fewer queries for each key/value head");
    if (2 * backbone->num_key_value_heads * backbone->head_dim > MAX_WIDTH)
        field_failed(fields, "num_key_value_heads", field(fields, "num_key_value_heads"), "narrower rows");
}

static void read_draft_config(DraftConfig *config, Fields *fields, const Config *target) {
    const cJSON *names = field(fields, "architectures"), *first = cJSON_IsArray(names) ? names->child : NULL,
                *layout = field(fields, "speculators_model_type"), *projector = draft_item(fields, "projector_type");
    const char *name = cJSON_IsString(layout)  ? layout->valuestring
                       : cJSON_IsString(first) ? first->valuestring
                                               : "",
               *kind = NULL;
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++)
        if (!strcmp(name, layout ? architectures[i].kind : architectures[i].spelling)) {
            config->architecture = architectures[i].spelling;
            kind = architectures[i].kind;
        }
    if (!kind) return field_failed(fields, layout ? "speculators_model_type" : "architectures", layout ? layout : names,
                                   "DFlash, DFlash 2 or DSpark");
    if (cJSON_IsString(projector) && strcmp(projector->valuestring, "dflash")) {
        if (strcmp(projector->valuestring, "dspark"))
            return field_failed(fields, "projector_type", projector, "\"dflash\" or \"dspark\"");
        kind = "dspark";
    }
    Fields shape = *fields;
    if (layout) shape.object = field(fields, "transformer_layer_config");
    if (!cJSON_IsObject(shape.object)) return field_failed(fields, "transformer_layer_config", shape.object, "the layers' shape");
    config->backbone = (Config){.family = FAMILY_QWEN3, .model_type = "qwen3"};
    read_shape(&config->backbone, &shape);
    read_qwen3(&config->backbone, &shape);
    fields->failed |= shape.failed;
    config->block_size = draft_int(fields, "block_size", 2, MAX_BLOCK, REQUIRED);
    config->mask_token_id = draft_int(fields, "mask_token_id", 0, target->vocab_size - 1, REQUIRED);
    config->draft_vocab_size = draft_int(fields, "draft_vocab_size", 1, target->vocab_size, target->vocab_size);
    if (fields->failed) return;
    config->first_slot = read_first_slot(fields, kind, layout);
    config->slots = config->block_size - config->first_slot;
    read_taps(config, fields, target, layout);
    config->feature_width = config->n_taps * target->hidden_size;
    read_draft_parts(config, fields, kind);
    read_windows(config, fields, kind, layout);
    check_draft_config(config, fields, target);
}

/* How many stages there are: the layers that compress_ratios goes on with behind the target's, else num_nextn_predict_layers
 * (which is 1 in a V4 of three). */
static int count_stages(Fields *fields) {
    const cJSON *ratios = field(fields, "compress_ratios"), *entry;
    const int layers = read_int(fields, "num_hidden_layers", 1, MAX_LAYERS, REQUIRED);
    int at = 0;
    cJSON_ArrayForEach(entry, ratios)
        if (at++ >= layers && !(cJSON_IsNumber(entry) && entry->valuedouble == 0))
            field_failed(fields, "compress_ratios", entry, "0 for each draft stage");
    return at > layers ? at - layers : read_int(fields, "num_nextn_predict_layers", 0, MAX_LAYERS, 0);
}

static void read_stage_taps(DraftConfig *config, Fields *fields, const Config *target) {
    const char *key = "dspark_target_layer_ids";
    const cJSON *list = field(fields, key), *entry;
    if (!cJSON_IsArray(list) || !list->child || cJSON_GetArraySize(list) > MAX_TAPS)
        return field_failed(fields, key, list, "a list of layers");
    cJSON_ArrayForEach(entry, list) {
        if (!cJSON_IsNumber(entry) || !(entry->valuedouble >= 0 && entry->valuedouble < target->num_hidden_layers)
            || entry->valuedouble != entry->valueint)
            return field_failed(fields, key, list, "layers of the target");
        config->target_layer_ids[config->n_taps++] = entry->valueint;
    }
    config->feature_width = config->n_taps * target->hidden_size;
}

/* The stages that a V4's own config describes: layers like the target's, which see a window and compress nothing. Without dspark_
 * keys there is one, of the first V4: MTP. */
static void read_stages(DraftConfig *config, Fields *fields, const Config *target) {
    Config *backbone = &config->backbone;
    const int stages = count_stages(fields);
    *backbone = *target;
    backbone->compression = NULL, backbone->hash_routed = backbone->makes_rows = backbone->selects = NULL;
    backbone->source = backbone->source_ratio = NULL, backbone->engram_rows = NULL;
    backbone->num_hidden_layers = larger(stages, 1);
    config->multi_token = target->family == FAMILY_DEEPSEEK_V4 && !field(fields, "dspark_block_size");
    config->architecture = config->multi_token ? "MTP" : "DSpark";
    config->input_embedding_scale = config->output_multiplier = 1;
    config->draft_vocab_size = target->vocab_size;
    config->widest_window = target->sliding_window + 1;     /* the anchor, like any row of its block, sees a window before it */
    config->window = allocate_zeroed((size_t)backbone->num_hidden_layers, sizeof(int));
    config->causal = allocate_zeroed((size_t)backbone->num_hidden_layers, sizeof(bool));
    for (int i = 0; i < backbone->num_hidden_layers; i++) config->window[i] = config->widest_window;
    if (config->multi_token) {
        if (stages != 1) field_failed(fields, "num_nextn_predict_layers", field(fields, "num_nextn_predict_layers"), "1");
        config->block_size = config->slots = config->n_taps = 1;
        config->target_layer_ids[0] = target->num_hidden_layers - 1;
        config->feature_width = target->hc_mult * target->hidden_size;
        return;
    }
    if (!stages) field_failed(fields, "num_nextn_predict_layers", field(fields, "num_nextn_predict_layers"), "its stages");
    config->block_size = config->slots = read_int(fields, "dspark_block_size", 1, MAX_BLOCK - 1, REQUIRED);
    config->mask_token_id = read_int(fields, "dspark_noise_token_id", 0, target->vocab_size - 1, REQUIRED);
    config->markov_rank = read_int(fields, "dspark_markov_rank", 1, MAX_ROW_WIDTH, REQUIRED);
    config->confidence_head = config->confidence_head_with_markov = true;
    backbone->n_routed_experts = read_int(fields, "dspark_n_routed_experts", 1, MAX_EXPERTS, target->n_routed_experts);
    backbone->num_experts_per_tok = read_int(fields, "dspark_num_experts_per_tok", 1, backbone->n_routed_experts,
                                             target->num_experts_per_tok);
    if (target->family == FAMILY_DEEPSEEK_V41) backbone->norm_topk_prob = backbone->num_experts_per_tok > 1;
    read_stage_taps(config, fields, target);
}

typedef void ReadDrafter(DraftConfig *config, Fields *fields, const Config *target);
static bool read_drafter(DraftConfig *config, const char *directory, const Config *target, ReadDrafter *read, Error *error) {
    char path[PATH_MAX];
    cJSON *json = json_read(join(path, directory, "config.json"), MAX_JSON_FILE, error);
    if (!json) return false;
    Fields fields = {.object = json, .path = path, .error = error};
    if (read == read_stages && cJSON_IsObject(field(&fields, "text_config"))) fields.object = field(&fields, "text_config");
    read(config, &fields, target);
    cJSON_Delete(json);
    return !fields.failed;
}

static bool draft_config_read(DraftConfig *config, const char *directory, const Config *target, Error *error) {
    return read_drafter(config, directory, target, read_draft_config, error);
}

static void bind_convolution(Binder *binder, const float **base, Matrix *kernel, const DraftConfig *config, const char *prefix,
                             const char *part) {
    char name[128];
    int hidden = config->backbone.hidden_size, taps = config->conv_kernel_size;
    snprintf(name, sizeof name, "%s%s.base_kernel", prefix, part);
    *base = bind_floats(binder, name, 3, (int64_t[]){2, taps, hidden});
    snprintf(name, sizeof name, "%s%s.kernel_projection", prefix, part);
    *kernel = bind_matrix(binder, "", name, 2 * taps * (hidden / config->conv_group_size), hidden);
}

/* Which token of the target each of a smaller vocabulary is: its own id and an offset. */
static void bind_vocabulary(Binder *binder, DraftWeights *weights, const DraftConfig *config) {
    static const DType whole[] = {DTYPE_I64, DTYPE_UNKNOWN};
    const Tensor *tensor = bind_tensor(binder, "d2t", whole, 1, (int64_t[]){config->draft_vocab_size});
    if (!tensor) return;
    int *ids = allocate_zeroed((size_t)config->draft_vocab_size, sizeof *ids);
    arrput(binder->weights->owned, ids);
    bool *taken = allocate_zeroed((size_t)config->backbone.vocab_size, sizeof(bool));
    for (int i = 0; i < config->draft_vocab_size && !binder->failed; i++) {
        uint64_t offset = load_u64(tensor->data + 8 * (size_t)i), id = offset + (uint64_t)i;
        if (id >= (uint64_t)config->backbone.vocab_size || taken[id])
            binder->failed = !fail(binder->error, "%s: tensor d2t: draft id %d is no token of the target, or another's",
                                   binder->checkpoint->files[tensor->file].path, i);
        else taken[ids[i] = (int)id] = true;
    }
    free(taken);
    weights->target_ids = move_weights(binder, ids, (size_t)config->draft_vocab_size * sizeof *ids);
}

/* A tensor that nothing bound belongs to a part that tide does not know, and a drafter without it is a bad one. */
static void refuse_unbound(Binder *binder) {
    static const char *const harmless[] = {"t2d", "verifier_norm.weight", "verifier_lm_head.weight", "embed_tokens.weight",
                                           "lm_head.weight"};
    for (size_t i = 0; i < arrlenu(binder->checkpoint->tensors) && !binder->failed; i++) {
        const Tensor *tensor = &binder->checkpoint->tensors[i];
        bool known = binder->used[i];
        for (size_t j = 0; j < sizeof harmless / sizeof *harmless; j++) known |= !strcmp(tensor->name, harmless[j]);
        if (!known)
            binder->failed = !fail(binder->error, "%s: tensor %s: tide knows no such part",
                                   binder->checkpoint->files[tensor->file].path, tensor->name);
    }
}

/* The same among the tensors of stages in the model's own checkpoint. bias_vl is for tokens of images. */
static void refuse_unbound_stages(Binder *binder) {
    for (size_t i = 0; i < arrlenu(binder->checkpoint->tensors) && !binder->failed; i++) {
        const Tensor *tensor = &binder->checkpoint->tensors[i];
        if (strncmp(tensor->name, "mtp.", 4) || binder->used[i] || strstr(tensor->name, ".gate.bias_vl")) continue;
        binder->failed = !fail(binder->error, "%s: tensor %s: tide knows no such part of its %d draft stages",
                               binder->checkpoint->files[tensor->file].path, tensor->name,
                               binder->stages);
    }
}

static void bind_draft_heads(Binder *binder, Drafter *drafter, const Weights *target) {
    DraftConfig *config = &drafter->config;
    DraftWeights *weights = &drafter->weights;
    int hidden = config->backbone.hidden_size, vocab = config->backbone.vocab_size, rank = config->markov_rank;
    bool own_embedding = checkpoint_find(&drafter->checkpoint, "embed_tokens.weight"),
         own_head = checkpoint_find(&drafter->checkpoint, "lm_head.weight");
    weights->backbone.embed_tokens = own_embedding ? bind_matrix(binder, "", "embed_tokens", vocab, hidden)
                                                   : target->embed_tokens;
    weights->backbone.lm_head = own_head ? bind_matrix(binder, "", "lm_head", config->draft_vocab_size, hidden) : target->lm_head;
    if (!binder->failed && weights->backbone.lm_head.rows != config->draft_vocab_size)
        binder->failed = !fail(binder->error, "%s: tensor lm_head.weight: found nothing, wanted one of %d rows, draft_vocab_size",
                               drafter->checkpoint.directory, config->draft_vocab_size);
    if (config->draft_vocab_size < vocab) bind_vocabulary(binder, weights, config);
    if (config->selector_rank) {
        weights->selector_hidden = bind_matrix(binder, "candidate_selector.", "hidden_projection", config->selector_rank, hidden);
        weights->predecessor = bind_named_matrix(binder, "candidate_selector.predecessor_codebook", float_dtypes, vocab,
                                                 config->selector_rank);
        weights->successor = bind_named_matrix(binder, "candidate_selector.successor_codebook", float_dtypes, vocab,
                                               config->selector_rank);
    }
    if (rank) {
        weights->markov_w1 = bind_matrix(binder, "markov_head.", "markov_w1", vocab, rank);
        weights->markov_w2 = bind_matrix(binder, "markov_head.", "markov_w2", config->draft_vocab_size, rank);
    }
    config->confidence_head = rank && checkpoint_find(&drafter->checkpoint, "confidence_head.proj.weight");
    if (!binder->failed && config->confidence_promised != config->confidence_head && config->confidence_promised >= 0)
        binder->failed = !fail(binder->error, "%s: enable_confidence_head says %s, and a confidence_head.proj is %s",
                               drafter->checkpoint.directory, config->confidence_promised ? "true" : "false",
                               config->confidence_head ? "there" : "not there");
    if (!config->confidence_head) return;
    weights->confidence = bind_matrix(binder, "confidence_head.", "proj", 1,
                                      hidden + (config->confidence_head_with_markov ? rank : 0));
    if (!checkpoint_find(&drafter->checkpoint, "confidence_head.proj.bias")) return;
    const Tensor *bias = bind_tensor(binder, "confidence_head.proj.bias", float_dtypes, 1, (int64_t[]){1});
    weights->confidence_bias = bias ? widen(bias->data, bias->dtype) : 0;
}

/* What turns stages' states into tokens. The last one has it, and the first what makes the features that they all read. */
static void bind_stage_ends(Binder *binder, DraftWeights *weights, const DraftConfig *draft, const char *first,
                            const char *last) {
    const Config *config = &draft->backbone;
    const int hidden = config->hidden_size, rank = draft->markov_rank, vocab = config->vocab_size;
    const bool v4 = config->family == FAMILY_DEEPSEEK_V4;
    char name[100];
    weights->fc = bind_scaled_matrix(binder, first, draft->multi_token ? "h_proj" : "main_proj", hidden,
                                     draft->multi_token ? hidden : draft->feature_width);
    weights->hidden_norm = bind_vector(binder, first, draft->multi_token ? "hnorm.weight" : "main_norm.weight", hidden);
    weights->backbone.norm = bind_vector(binder, last, "norm.weight", hidden);
    snprintf(name, sizeof name, "%shc_head_", last);
    if (v4) weights->backbone.head_hyper = bind_hyper(binder, name, config, config->hc_mult, 1);
    if (draft->multi_token) {
        weights->e_proj = bind_scaled_matrix(binder, first, "e_proj", hidden, hidden);
        weights->embed_norm = bind_vector(binder, first, "enorm.weight", hidden);
        return;
    }
    snprintf(name, sizeof name, "%smarkov_head.%s.weight", last, v4 ? "markov_w1" : "embed");
    weights->markov_w1 = bind_named_matrix(binder, name, float_dtypes, vocab, rank);
    snprintf(name, sizeof name, "%smarkov_head.%s.weight", last, v4 ? "markov_w2" : "head");
    weights->markov_w2 = bind_named_matrix(binder, name, float_dtypes, vocab, rank);
    snprintf(name, sizeof name, "%sconfidence_head.proj.weight", last);
    weights->confidence = bind_named_matrix(binder, name, float_dtypes, 1, hidden + rank);
}

/* The stages mtp.0, mtp.1, ... of the model's own checkpoint. */
static bool bind_stages(Drafter *drafter, const Checkpoint *checkpoint, const Weights *target, const Backend *backend,
                        Error *error) {
    const DraftConfig *draft = &drafter->config;
    const Config *config = &draft->backbone;
    DraftWeights *weights = &drafter->weights;
    const int stages = config->num_hidden_layers;
    char prefix[64];
    Binder binder = {.checkpoint = checkpoint, .weights = &weights->backbone, .backend = backend, .error = error,
                     .weight_block = config->weight_block, .stages = stages, .quantised = config->quantised,
                     .used = allocate_zeroed(arrlenu(checkpoint->tensors), sizeof(bool))};
    weights->backbone.layers = allocate_zeroed((size_t)stages, sizeof(LayerWeights));
    weights->backbone.embed_tokens = target->embed_tokens;
    weights->backbone.lm_head = target->lm_head;
    for (int i = 0; i < stages && !binder.failed; i++) {
        snprintf(prefix, sizeof prefix, "mtp.%d.", i);
        bind_stream_layer(&binder, &weights->backbone.layers[i], config, prefix, false);
    }
    snprintf(prefix, sizeof prefix, "mtp.%d.", stages - 1);
    bind_stage_ends(&binder, weights, draft, "mtp.0.", prefix);
    refuse_unbound_stages(&binder);
    free(binder.used);
    return !binder.failed;
}

static bool bind_drafter(Drafter *drafter, const Config *target_config, const Weights *target, const Backend *backend,
                         Error *error) {
    DraftConfig *config = &drafter->config;
    const Config *backbone = &config->backbone;
    DraftWeights *weights = &drafter->weights;
    int layers = backbone->num_hidden_layers, hidden = backbone->hidden_size;
    Binder binder = {.checkpoint = &drafter->checkpoint, .weights = &weights->backbone, .backend = backend, .error = error,
                     .used = allocate_zeroed(arrlenu(drafter->checkpoint.tensors), sizeof(bool))};
    weights->fc = bind_matrix(&binder, "", "fc", hidden, config->n_taps * target_config->hidden_size);
    weights->hidden_norm = bind_vector(&binder, "", "hidden_norm.weight", hidden);
    weights->backbone.norm = bind_vector(&binder, "", "norm.weight", hidden);
    weights->backbone.layers = allocate_zeroed((size_t)layers, sizeof(LayerWeights));
    weights->layers = allocate_zeroed((size_t)layers, sizeof(DraftLayerWeights));
    for (int i = 0; i < layers && !binder.failed; i++) {
        char prefix[64], name[100];
        LayerWeights *layer = &weights->backbone.layers[i];
        snprintf(prefix, sizeof prefix, "layers.%d.", i);
        snprintf(name, sizeof name, "%smlp.", prefix);
        layer->input_layernorm = bind_vector(&binder, prefix, "input_layernorm.weight", hidden);
        layer->post_attention_layernorm = bind_vector(&binder, prefix, "post_attention_layernorm.weight", hidden);
        bind_qwen3_attention(&binder, layer, backbone, prefix);
        bind_mlp(&binder, &layer->gate_proj, &layer->up_proj, &layer->down_proj, name, backbone->intermediate_size, hidden);
        if (!config->conv_kernel_size) continue;
        DraftLayerWeights *extra = &weights->layers[i];
        bind_convolution(&binder, &extra->attention_conv, &extra->attention_kernel, config, prefix, "attention_conv");
        bind_convolution(&binder, &extra->mlp_conv, &extra->mlp_kernel, config, prefix, "mlp_conv");
    }
    bind_draft_heads(&binder, drafter, target);
    refuse_unbound(&binder);
    free(binder.used);
    return !binder.failed;
}

/* DVL's predictor, where the drafter has one: DIRECTORY/dvl/ *.safetensors with mlp.0, mlp.1, ... */
static bool bind_predictor(Drafter *drafter, const char *directory, const Backend *backend, Error *error) {
    char path[PATH_MAX], name[32];
    LengthPredictor *predictor = &drafter->predictor;
    if (access(join(path, directory, "dvl"), F_OK)) return true;
    if (!checkpoint_open(&drafter->predictor_file, path, error)) return false;
    Binder binder = {.checkpoint = &drafter->predictor_file,
                     .weights = &drafter->weights.backbone,
                     .backend = backend,
                     .error = error,
                     .used = allocate_zeroed(arrlenu(drafter->predictor_file.tensors), sizeof(bool))};
    const Tensor *weight;
    int in = drafter->config.slots * DVL_FEATURES, layers = 0;
    for (; snprintf(name, sizeof name, "mlp.%d.weight", layers), weight = checkpoint_find(&drafter->predictor_file, name);
         layers++) {
        int out = weight->rank == 2 && weight->shape[0] > 0 && weight->shape[0] <= MAX_PREDICTOR_WIDTH ? (int)weight->shape[0]
                                                                                                       : 1;
        if (layers == MAX_PREDICTOR_LAYERS) break;              /* the next one is bound by nobody, and so refused */
        predictor->weight[layers] = bind_named_matrix(&binder, name, float_dtypes, out, in);
        snprintf(name, sizeof name, "mlp.%d.bias", layers);
        predictor->bias[layers] = bind_floats(&binder, name, 1, (int64_t[]){out});
        in = out;
    }
    refuse_unbound(&binder);
    free(binder.used);
    if (binder.failed) return false;
    if (!layers || in != drafter->config.slots)
        return fail(error, "%s: found a predictor of %d lengths, wanted %d, one for each draft", path, layers ? in : 0,
                    drafter->config.slots);
    predictor->layers = layers;
    return true;
}

/* DIRECTORY/temperatures.json, where a calibration has left it: what each slot's confidence is divided by. */
static bool read_temperatures(Drafter *drafter, const char *directory, Error *error) {
    char path[PATH_MAX];
    for (int i = 0; i < MAX_BLOCK; i++) drafter->temperatures[i] = 1;
    if (access(join(path, directory, "temperatures.json"), F_OK)) return true;
    cJSON *json = json_read(path, MAX_JSON_FILE, error);
    if (!json) return false;
    Fields fields = {.object = json, .path = path, .error = error};
    const cJSON *list = field(&fields, "temperatures"), *entry;
    int n = 0;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != drafter->config.slots)
        field_failed(&fields, "temperatures", list, "one for each draft");
    else cJSON_ArrayForEach(entry, list) {
        if (!cJSON_IsNumber(entry) || !(entry->valuedouble >= 1e-3 && entry->valuedouble <= 1e3))
            field_failed(&fields, "temperatures", entry, "a number from 0.001 to 1000");
        drafter->temperatures[n++] = (float)entry->valuedouble;
    }
    cJSON_Delete(json);
    return !fields.failed;
}

/* How large stages are; where they are made up, the model's weights grow by them. */
static bool weigh_stages(Engine *engine, Error *error) {
    Drafter *drafter = &engine->drafter;
    for (size_t i = 0; i < arrlenu(engine->checkpoint.tensors); i++) {
        const Tensor *tensor = &engine->checkpoint.tensors[i];
        if (!strncmp(tensor->name, "mtp.", 4)) drafter->weight_bytes += tensor->size;
    }
    if (!engine->checkpoint.dummy) return true;
    if (!bind_stages(drafter, &engine->checkpoint, &engine->weights, NULL, error)) return false;
    drafter->weight_bytes = drafter->weights.backbone.bytes;
    engine->weight_bytes += drafter->weight_bytes;
    weights_free(&drafter->weights.backbone);
    return true;
}

/* Reads what a drafter in a folder of its own is. */
static bool drafter_plan(Drafter *drafter, const char *directory, const Config *target, Error *error) {
    bool ok = draft_config_read(&drafter->config, directory, target, error)
              && checkpoint_open(&drafter->checkpoint, directory, error);
    if (ok) drafter->weight_bytes = checkpoint_bytes(&drafter->checkpoint);
    return ok;
}

/* And what the model's own stages are, if it has any and they are to draft. */
static bool stages_plan(Engine *engine, const EngineOptions *options, Error *error) {
    const bool brings = engine->checkpoint.dummy ? options->stages == STAGES_REQUIRED : has_stages(&engine->checkpoint);
    if (options->stages == STAGES_REQUIRED && (!has_streams(&engine->config) || !brings))
        return fail(error,
                    "%s: found no draft stages that tide knows (mtp.0, ...): --draft DIR names a drafter, none does without",
                    options->model);
    if (options->stages == STAGES_IDLE || !has_streams(&engine->config) || !brings) return true;
    return read_drafter(&engine->drafter.config, options->model, &engine->config, read_stages, error)
        && weigh_stages(engine, error);
}

static bool drafter_bind(Engine *engine, const Backend *backend, Error *error) {
    Drafter *drafter = &engine->drafter;
    const char *directory = draft_checkpoint(engine)->directory;
    if (!drafter->config.architecture) return true;
    if (!(has_streams(&drafter->config.backbone) ? bind_stages(drafter, &engine->checkpoint, &engine->weights, backend, error)
                                                 : bind_drafter(drafter, &engine->config, &engine->weights, backend, error)))
        return false;
    return bind_predictor(drafter, directory, backend, error) && read_temperatures(drafter, directory, error);
}

/* What the memory holds from the start. */
static void drafter_prepare(Drafter *drafter, const Backend *backend, int max_rows) {
    const Config *backbone = &drafter->config.backbone;
    if (!drafter->config.architecture) return;
    if (has_streams(backbone)) {
        const size_t n = (size_t)(max_rows * stream_mixes(backbone));
        float *shares = allocate_zeroed(n, sizeof *shares);
        for (size_t i = 0; i < n; i++) shares[i] = 1.0f / (float)backbone->hc_mult;
        backend->upload(drafter->state.shares, shares, n * sizeof *shares);
        free(shares);
        return;
    }
    drafter->state.drafts.one_hot = !drafter->config.selector_rank && !drafter->config.markov_rank;
    drafter->rope_attention_factor = upload_frequencies(backend, drafter->state.inverse_frequency, &backbone->rope,
                                                        backbone->head_dim);
}

static void drafter_close(Drafter *drafter, const Backend *backend) {
    backend->give_back(drafter->state.block, MEMORY_DEVICE);
    backend->give_back(drafter->state.host_block, MEMORY_HOST);
    weights_free(&drafter->weights.backbone);
    free(drafter->weights.layers), free(drafter->config.window), free(drafter->config.causal);
    checkpoint_close(&drafter->checkpoint);
    checkpoint_close(&drafter->predictor_file);
}

/* ---- context rows: features of committed rows, projected once and kept in the ring (DFlash; eq. 9, 10) */

static DeviceRow ring_row(const Cache *cache, int session, int position) {
    return (DeviceRow){session * cache->draft_rows + position % cache->draft_rows};
}

static uint8_t *layer_ring(const Cache *cache, int layer) {
    return cache->draft_ring + (size_t)layer * (size_t)cache->sessions * (size_t)cache->draft_rows * cache->draft_format.stride;
}

/* Rows of keys | values of x, and queries unless q is NULL; queries and keys normed and rotated. The rotations of their positions
 * are in the state. */
static void project_for_attention(Engine *engine, const LayerWeights *layer, float *q, const float *x, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->drafter.config.backbone;
    DraftState *state = &engine->drafter.state;
    const int dim = config->head_dim, heads = config->num_attention_heads, kv_heads = config->num_key_value_heads;
    const size_t hidden = (size_t)config->hidden_size, q_width = (size_t)(heads * dim), kv_width = (size_t)(kv_heads * dim),
                 width = 2 * kv_width;
    const Projection products[] = {
        {state->kv, width, &layer->k_proj}, {state->kv + kv_width, width, &layer->v_proj}, {q, q_width, &layer->q_proj}};
    backend->linear(products, q ? 3 : 2, x, hidden, n);
    if (q) backend->norm_heads(q, q_width, n, heads, dim, layer->q_norm, config->rms_norm_eps, state->cosine, state->sine);
    backend->norm_heads(state->kv, width, n, kv_heads, dim, layer->k_norm, config->rms_norm_eps, state->cosine, state->sine);
}

/* MTP: what a row's streams begin as, of the gathered streams of the target and the token of each row. */
static void join_streams(Engine *engine, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    const DraftWeights *weights = &engine->drafter.weights;
    const DraftState *drafting = &engine->drafter.state;
    State *state = &engine->state;
    const int mult = config->hc_mult;
    const size_t hidden = (size_t)config->hidden_size, all = hidden * (size_t)mult;
    float *gathered = drafting->gathered;
    backend->embed(state->normed, &weights->backbone.embed_tokens, drafting->rows, n);
    backend->rms_norm(state->normed, hidden, state->normed, hidden, weights->embed_norm, n, config->hidden_size,
                      config->rms_norm_eps);
    project_rounded(engine, state->branch, hidden, state->normed, n, &weights->e_proj);
    backend->rms_norm(gathered, hidden, gathered, hidden, weights->hidden_norm, n * mult, config->hidden_size,
                      config->rms_norm_eps);
    project_rounded(engine, state->hidden, hidden, gathered, n * mult, &weights->fc);
    for (int k = 0; k < mult; k++)
        backend->copy_rows(gathered + (size_t)k * hidden, all, state->branch, hidden, n, config->hidden_size, 1);
    backend->add(state->hidden, gathered, (size_t)n * all);
}

/* The gathered features as rows of every stage's ring. What the stages of a DSpark make keys of is the feature itself; MTP's only
 * layer meets its streams as it would in a block. */
static void store_stage_context(Engine *engine, int n) {
    const Backend *backend = engine->backend;
    const Config *config = &engine->config;
    const Drafter *drafter = &engine->drafter;
    const DraftState *drafting = &drafter->state;
    State *state = &engine->state;
    const size_t hidden = (size_t)config->hidden_size;
    backend->rotations(state->cosine, state->sine, drafting->rows, n, state->inverse_frequency, rope_dim(config), 1);
    if (drafter->config.multi_token) {
        const LayerWeights *layer = drafter->weights.backbone.layers;
        join_streams(engine, n);
        next_sublayer(engine, 0, NULL, &layer->attention_hyper, state->mixes, state->mixes, layer->input_layernorm, n);
    } else {
        project_rounded(engine, state->normed, hidden, drafting->gathered, n, &drafter->weights.fc);
        backend->rms_norm(state->normed, hidden, state->normed, hidden, drafter->weights.hidden_norm, n, config->hidden_size,
                          config->rms_norm_eps);
    }
    for (int l = 0; l < drafter->config.backbone.num_hidden_layers; l++) {
        const LayerWeights *layer = &drafter->weights.backbone.layers[l];
        project_rounded(engine, state->kv, (size_t)config->head_dim, state->normed, n, &layer->wkv);
        store_keys(engine, layer, layer_ring(&engine->cache, l), &engine->cache.draft_format, drafting->ring_rows, false,
                   state->cosine, state->sine, n);
    }
}

/* The rows state->row_list [n] enter the ring. Their features are those of rows `indices` of the pass just made; NULL: they have
 * been gathered already. */
static void store_context(Engine *engine, int n, const int *indices) {
    const Backend *backend = engine->backend;
    Cache *cache = &engine->cache;
    Drafter *drafter = &engine->drafter;
    DraftState *state = &drafter->state;
    const Config *config = &drafter->config.backbone;
    const size_t hidden = (size_t)config->hidden_size, width = 2 * (size_t)(config->num_key_value_heads * config->head_dim),
                 feature = (size_t)drafter->config.feature_width;
    for (int i = 0; i < n; i++) {
        Row *row = &state->row_list[i];
        row->token = cache_history(cache, row->session)[row->position + 1];     /* which MTP reads with the row's streams */
        SessionPages *session = &cache->session[row->session];
        if (session->draft_end != row->position) session->draft_first = row->position;
        session->draft_end = row->position + 1;
        if (session->draft_end - session->draft_first > cache->draft_rows)
            session->draft_first = session->draft_end - cache->draft_rows;
        state->ring_list[i] = ring_row(cache, row->session, row->position);
    }
    backend->upload(state->rows, state->row_list, (size_t)n * sizeof *state->rows);
    backend->upload(state->ring_rows, state->ring_list, (size_t)n * sizeof *state->ring_rows);
    if (indices) backend->upload(state->indices, indices, (size_t)n * sizeof *indices);
    const int gathers = indices != NULL;
    if (begin_kept_work(engine, n > KEPT_ROWS ? 0 : work_key(engine, WORK_CONTEXT, n, &gathers, 1))) return;
    if (indices) backend->move_rows(state->gathered, NULL, state->features, state->indices, n, (int)feature);
    if (has_streams(config)) {
        store_stage_context(engine, n);
        backend->end_work();
        return;
    }
    project(backend, state->hidden, hidden, state->gathered, feature, n, &drafter->weights.fc);
    backend->rms_norm(state->normed, hidden, state->hidden, hidden, drafter->weights.hidden_norm, n, config->hidden_size,
                      config->rms_norm_eps);
    backend->rotations(state->cosine, state->sine, state->rows, n, state->inverse_frequency, config->head_dim,
                       drafter->rope_attention_factor);
    for (int l = 0; l < config->num_hidden_layers; l++) {
        project_for_attention(engine, &drafter->weights.backbone.layers[l], NULL, state->normed, n);
        backend->store_rows(layer_ring(cache, l), &cache->draft_format, state->ring_rows, n, state->kv, width, state->kv, 0);
    }
    backend->end_work();
}

static int kept_row(int session, int position) { return session * KEPT_FEATURES + position % KEPT_FEATURES; }

/* Features of the pass's rows state->index_list [n, behind as many places of where they go] are kept. */
static void keep_features(Engine *engine, int n) {
    DraftState *state = &engine->drafter.state;
    engine->backend->upload(state->indices, state->index_list, (size_t)(2 * n) * sizeof(int));
    engine->backend->move_rows(state->kept, state->indices, state->features, state->indices + n, n,
                               engine->drafter.config.feature_width);
}

/* MTP's block reads the streams of the row before it, so the last of each session is kept beside the ring. */
static void keep_last_features(Engine *engine, const Row *rows, const int *indices, int n) {
    DraftState *state = &engine->drafter.state;
    int last[MAX_PASS_ROWS], n_last = 0;
    for (int i = 0; i < n; i++)
        if (i + 1 == n || rows[indices[i + 1]].session != rows[indices[i]].session) last[n_last++] = indices[i];
    for (int i = 0; i < n_last; i++) {
        state->index_list[i] = kept_row(rows[last[i]].session, rows[last[i]].position);
        state->index_list[n_last + i] = last[i];
    }
    keep_features(engine, n_last);
}

void draft_feed(Engine *engine, const Row *rows, const int *indices, int n) {
    DraftState *state = &engine->drafter.state;
    const Cache *cache = &engine->cache;
    for (int begin = 0, count; begin < n; begin += count) {
        count = n - begin < state->max_rows ? n - begin : state->max_rows;
        if (count > cache->draft_rows) count = cache->draft_rows;       /* no two rows of one part share a place in the ring */
        for (int i = 0; i < count; i++) state->row_list[i] = rows[indices[begin + i]];
        if (engine->drafter.config.multi_token) keep_last_features(engine, rows, indices + begin, count);
        store_context(engine, count, indices + begin);
    }
}

/* What was kept of the session's rows before `position` enters the ring. */
static void catch_up(Engine *engine, int s, int position) {
    DraftState *state = &engine->drafter.state;
    SessionPages *session = &engine->cache.session[s];
    int n = 0;
    if (session->draft_end == position || session->kept_end != position) return;
    for (int t = session->kept_first; t < position; t++, n++) {
        state->row_list[n] = (Row){s, t, 0};
        state->index_list[n] = kept_row(s, t);
    }
    engine->backend->upload(state->indices, state->index_list, (size_t)n * sizeof(int));
    engine->backend->move_rows(state->gathered, NULL, state->kept, state->indices, n, engine->drafter.config.feature_width);
    session->kept_first = session->kept_end;
    store_context(engine, n, NULL);
}

void draft_keep(Engine *engine, const Row *rows, const int *indices, int n) {
    DraftState *state = &engine->drafter.state;
    for (int begin = 0, count; begin < n; begin += count) {
        count = n - begin < state->max_rows ? n - begin : state->max_rows;
        for (int i = 0; i < count; i++) {
            const Row *row = &rows[indices[begin + i]];
            SessionPages *session = &engine->cache.session[row->session];
            if (session->kept_end != row->position) session->kept_first = row->position;
            session->kept_end = row->position + 1;
            if (session->kept_end - session->kept_first > KEPT_FEATURES) session->kept_first++;
            state->index_list[i] = kept_row(row->session, row->position);
            state->index_list[count + i] = indices[begin + i];
        }
        keep_features(engine, count);
    }
}

/* ---- the block pass */

/* A sublayer's input as the convolution leaves it, and what its output is changed by. Both sides' coefficients come from the
 * input as it was (DFlash 2). Without a convolution nothing happens. */
static void convolve_input(Engine *engine, const float *base, const Matrix *kernel, int n) {
    const DraftConfig *config = &engine->drafter.config;
    DraftState *state = &engine->drafter.state;
    if (!config->conv_kernel_size) return;
    project(engine->backend, state->delta, (size_t)kernel->rows, state->normed, (size_t)kernel->cols, n, kernel);
    engine->backend->convolve(state->normed, base, state->delta, (size_t)kernel->rows, n, config->block_size,
                              config->conv_kernel_size, config->conv_group_size, kernel->cols);
}

static void convolve_output(Engine *engine, const float *base, const Matrix *kernel, int n) {
    const DraftConfig *config = &engine->drafter.config;
    DraftState *state = &engine->drafter.state;
    if (!config->conv_kernel_size) return;
    engine->backend->convolve(state->branch, base + config->conv_kernel_size * kernel->cols, state->delta + kernel->rows / 2,
                              (size_t)kernel->rows, n, config->block_size, config->conv_kernel_size, config->conv_group_size,
                              kernel->cols);
}

/* The blocks through every layer: afterwards state->normed holds their states behind the final norm (DFlash 1.4 in the spec). */
static void run_draft_layers(Engine *engine, const DraftBlock *blocks, int n_blocks) {
    const Backend *backend = engine->backend;
    const Cache *cache = &engine->cache;
    const Drafter *drafter = &engine->drafter;
    const DraftConfig *draft = &drafter->config;
    const Config *config = &draft->backbone;
    const Weights *weights = &drafter->weights.backbone;
    const DraftState *state = &drafter->state;
    const int dim = config->head_dim, heads = config->num_attention_heads, kv_heads = config->num_key_value_heads,
              size = draft->block_size, n = n_blocks * size;
    const size_t hidden = (size_t)config->hidden_size, q_width = (size_t)(heads * dim), inner = (size_t)config->intermediate_size;
    backend->rotations(state->cosine, state->sine, state->rows, n, state->inverse_frequency, dim, drafter->rope_attention_factor);
    backend->embed(state->hidden, &weights->embed_tokens, state->rows, n);
    if (draft->input_embedding_scale != 1)
        backend->copy_rows(state->hidden, hidden, state->hidden, hidden, n, config->hidden_size, draft->input_embedding_scale);
    backend->rms_norm(state->normed, hidden, state->hidden, hidden, weights->layers[0].input_layernorm, n, config->hidden_size,
                      config->rms_norm_eps);
    for (int l = 0; l < config->num_hidden_layers; l++) {
        const LayerWeights *layer = &weights->layers[l];
        const DraftLayerWeights *extra = &drafter->weights.layers[l];
        const float *next = l + 1 < config->num_hidden_layers ? layer[1].input_layernorm : weights->norm;
        convolve_input(engine, extra->attention_conv, &extra->attention_kernel, n);
        project_for_attention(engine, layer, state->q, state->normed, n);
        backend->block_attention(state->attended, state->q, state->kv, layer_ring(cache, l), &cache->draft_format,
                                 cache->draft_rows, blocks, n_blocks, size, draft->window[l], draft->causal[l], heads, kv_heads,
                                 dim, 1 / sqrtf((float)dim));
        project(backend, state->branch, hidden, state->attended, q_width, n, &layer->o_proj);
        convolve_output(engine, extra->attention_conv, &extra->attention_kernel, n);
        backend->add_norm(state->normed, state->hidden, state->branch, layer->post_attention_layernorm, n, config->hidden_size,
                          config->rms_norm_eps, NULL, 0);
        convolve_input(engine, extra->mlp_conv, &extra->mlp_kernel, n);
        const Projection products[] = {{state->gate, inner, &layer->gate_proj}, {state->up, inner, &layer->up_proj}};
        backend->linear(products, 2, state->normed, hidden, n);
        backend->swiglu(state->gate, state->gate, state->up, (size_t)n * inner);
        project(backend, state->branch, hidden, state->gate, inner, n, &layer->down_proj);
        convolve_output(engine, extra->mlp_conv, &extra->mlp_kernel, n);
        backend->add_norm(state->normed, state->hidden, state->branch, next, n, config->hidden_size, config->rms_norm_eps,
                          NULL, 0);
    }
}

/* The same through stages: afterwards the target's state->normed holds the blocks' states in front of the final norm. A block's
 * rows all see the ring and each other; MTP's only row is in the ring already. */
static void run_stages(Engine *engine, int n) {
    static const Trail no_window = {0};
    const Backend *backend = engine->backend;
    const Cache *cache = &engine->cache;
    const Drafter *drafter = &engine->drafter;
    const DraftConfig *draft = &drafter->config;
    const Config *config = &draft->backbone;
    const Weights *weights = &drafter->weights.backbone;
    const DraftState *drafting = &drafter->state;
    State *state = &engine->state;
    backend->rotations(state->cosine, state->sine, drafting->rows, n, state->inverse_frequency, rope_dim(config), 1);
    if (draft->multi_token) join_streams(engine, n);
    else begin_streams(engine, drafting->rows, n);
    if (config->family == FAMILY_DEEPSEEK_V41) backend->first_stream(state->late_mixes, n, config);
    enter_next(engine, weights, config->num_hidden_layers, -1, NULL, n);
    for (int l = 0; l < config->num_hidden_layers; l++) {
        const LayerWeights *layer = &weights->layers[l];
        const RowPool pool = {layer_ring(cache, l), drafting->block_rows, cache->sessions * cache->draft_rows};
        project_heads(engine, layer, -1, drafting->block_rows, &cache->draft_format, state->pass_rows, state->cosine,
                      state->sine, n);
        backend->window_attention(state->attended, state->q, &no_window, &cache->draft_format, 0, &pool, &cache->draft_format,
                                  drafting->keys, drafting->key_count, config->sliding_window + draft->block_size, drafting->rows,
                                  0, n, config->num_attention_heads, layer->attention_sink, engine->softmax_scale,
                                  query_eps(config), config->qk_rope_head_dim, state->cosine, state->sine);
        finish_stream_layer(engine, config, layer, l, n);
        enter_next(engine, weights, config->num_hidden_layers, l, NULL, n);
    }
}

/* Candidates of n rows of logits, in the target's ids, and what a predictor of lengths sees of them. The rows belong to slots
 * that are `apart` of each other, from the first block's slot `slot` on. */
static void find_candidates(Engine *engine, Drafts *drafts, int slot, int apart, const float *logits, int n, bool features) {
    const Drafter *drafter = &engine->drafter;
    const size_t stride = (size_t)apart * CANDIDATES;
    float *scores = drafts->scores + slot * CANDIDATES;
    engine->backend->candidates(drafts->ids + slot * CANDIDATES, scores, stride, logits, n, drafter->config.draft_vocab_size,
                                drafter->weights.target_ids);
    if (features)
        engine->backend->length_features(drafts->features + slot * DVL_FEATURES, (size_t)(apart * DVL_FEATURES), scores, stride,
                                         logits, n, drafter->config.draft_vocab_size);
}

/* DSpark: the token before a slot biases its logits, l = U + W2 W1[x], and says how sure the draft is: w . [h; W1[x]] + b.
 * logits, states: of this slot, one row a block. */
static void follow_markov(Engine *engine, Drafts *drafts, int slot, const DraftBlock *blocks, const float *logits,
                          const float *states, int n) {
    const Backend *backend = engine->backend;
    const Drafter *drafter = &engine->drafter;
    const DraftState *state = &drafter->state;
    const size_t vocab = (size_t)drafter->config.draft_vocab_size, hidden = (size_t)drafter->config.backbone.hidden_size,
                 rank = (size_t)drafter->config.markov_rank, joined = (size_t)drafter->weights.confidence.cols;
    backend->take_tokens(state->rows, blocks, slot, n);
    backend->embed(state->ranks, &drafter->weights.markov_w1, state->rows, n);
    project(backend, state->bias, vocab, state->ranks, rank, n, &drafter->weights.markov_w2);
    backend->add(state->bias, logits, (size_t)n * vocab);
    find_candidates(engine, drafts, slot, drafts->slots, state->bias, n, false);
    if (!drafter->config.confidence_head) return;
    backend->copy_rows(state->joined, joined, states, hidden, n, (int)hidden, 1);
    if (joined > hidden) backend->copy_rows(state->joined + hidden, joined, state->ranks, rank, n, (int)rank, 1);
    float *confidence = drafts->confidence + slot;
    project(backend, confidence, (size_t)drafts->slots, state->joined, joined, n, &drafter->weights.confidence);
    backend->add_bias(confidence, (size_t)drafts->slots, drafter->weights.confidence_bias, n);
}

/* From the blocks' states to their tokens. Rows are taken block by block, [blocks, slots], or, where each draft changes the
 * logits of the next, slot by slot. */
static void draft_tokens(Engine *engine, Drafts *drafts, DraftBlock *blocks, int n, AcceptRule rule, bool features) {
    const Backend *backend = engine->backend;
    const Drafter *drafter = &engine->drafter;
    const DraftConfig *config = &drafter->config;
    const DraftState *state = &drafter->state;
    const int slots = config->slots;
    const size_t hidden = (size_t)config->backbone.hidden_size, vocab = (size_t)config->draft_vocab_size,
                 rows = (size_t)(n * slots);
    const bool stages = has_streams(&config->backbone);
    float *logits = engine->state.logits, *normed = stages ? state->normed : state->branch;
    backend->move_rows(state->branch, NULL, stages ? engine->state.normed : state->normed, state->indices, n * slots,
                       config->backbone.hidden_size);
    if (stages)                                     /* their confidence is of the states in front of the norm */
        backend->rms_norm(normed, hidden, state->branch, hidden, drafter->weights.backbone.norm, n * slots,
                          config->backbone.hidden_size, config->backbone.rms_norm_eps);
    project(backend, logits, vocab, normed, hidden, n * slots, &drafter->weights.backbone.lm_head);
    if (config->final_logit_softcapping > 0 || config->output_multiplier != 1)
        backend->cap_logits(logits, rows * vocab, config->output_multiplier, config->final_logit_softcapping);
    for (int slot = 0; slot < slots && config->markov_rank; slot++) {
        const float *own = logits + (size_t)(slot * n) * vocab;
        if (features) find_candidates(engine, drafts, slot, slots, own, n, true);
        follow_markov(engine, drafts, slot, blocks, own, state->branch + (size_t)(slot * n) * hidden, n);
        backend->draw_drafts(drafts, slot, slot + 1, blocks, n, rule);
    }
    if (config->markov_rank) return;
    find_candidates(engine, drafts, 0, 1, logits, n * slots, features);
    if (!config->selector_rank) {
        backend->draw_drafts(drafts, 0, slots, blocks, n, rule);
        return;
    }
    project(backend, state->ranks, (size_t)config->selector_rank, state->branch, hidden, n * slots,
                    &drafter->weights.selector_hidden);
    backend->select_path(drafts, state->ranks, &drafter->weights.predecessor, &drafter->weights.successor, blocks, n, rule);
}

/* The part of the drafts that begins with that block. */
static Drafts drafts_from(const Drafts *drafts, int block) {
    size_t at = (size_t)block * (size_t)drafts->slots;
    Drafts part = *drafts;
    part.ids += at * CANDIDATES;
    part.scores += at * CANDIDATES;
    part.q += at * CANDIDATES;
    part.tokens += at;
    part.features += at * DVL_FEATURES;
    part.confidence += at;
    part.survival += at;
    return part;
}

/* What the rows of stages' blocks attend to: the last rows of the ring and, but for MTP, the block's own. */
static void upload_keys(Engine *engine, const DraftBlock *blocks, int n) {
    const Cache *cache = &engine->cache;
    const DraftConfig *config = &engine->drafter.config;
    DraftState *state = &engine->drafter.state;
    const int size = config->block_size, window = config->backbone.sliding_window, own = config->multi_token ? 0 : size,
              ring_rows = cache->sessions * cache->draft_rows;
    const size_t capacity = (size_t)(window + size);
    for (int r = 0; r < n * size; r++) {
        const DraftBlock *block = &blocks[r / size];
        DeviceRow *keys = state->key_list + (size_t)r * capacity;
        int count = 0;
        for (int t = larger(block->ring_first, block->position - window); t < block->position; t++)
            keys[count++] = ring_row(cache, block->session, t);
        for (int i = 0; i < own; i++) keys[count++] = (DeviceRow){ring_rows + r / size * size + i};
        state->key_count_list[r] = count;
    }
    engine->backend->upload(state->keys, state->key_list, (size_t)(n * size) * capacity * sizeof *state->keys);
    engine->backend->upload(state->key_count, state->key_count_list, (size_t)(n * size) * sizeof *state->key_count);
}

/* The blocks' rows, and which of them predict a token, in the order of draft_tokens(); of MTP also which of the kept features the
 * blocks begin with. */
static void upload_blocks(Engine *engine, const DraftBlock *blocks, int n) {
    const DraftConfig *config = &engine->drafter.config;
    DraftState *state = &engine->drafter.state;
    const int size = config->block_size, slots = config->slots, behind = config->multi_token;
    for (int r = 0; r < n * size; r++) {
        const DraftBlock *block = &blocks[r / size];
        state->row_list[r] = (Row){block->session, block->position - behind + r % size,
                                   r % size ? config->mask_token_id : block->ids[block->position]};
    }
    for (int i = 0; i < n; i++)
        for (int slot = 0; slot < slots; slot++)
            state->index_list[config->markov_rank ? slot * n + i : i * slots + slot] = i * size + config->first_slot + slot;
    engine->backend->upload(state->rows, state->row_list, (size_t)(n * size) * sizeof *state->rows);
    for (int i = 0; i < n && behind; i++) state->index_list[n + i] = kept_row(blocks[i].session, blocks[i].position - 1);
    engine->backend->upload(state->indices, state->index_list, (size_t)(n * (slots + behind)) * sizeof *state->indices);
    if (has_streams(&config->backbone)) upload_keys(engine, blocks, n);
}

void draft_blocks(Engine *engine, DraftBlock *blocks, int n, AcceptRule rule, bool features) {
    DraftState *state = &engine->drafter.state;
    state->drafts.blocks = n;
    for (int begin = 0, count; begin < n; begin += count) {
        count = n - begin < state->max_blocks ? n - begin : state->max_blocks;
        Drafts part = drafts_from(&state->drafts, begin);
        for (int i = begin; i < begin + count; i++) {
            const SessionPages *session = &engine->cache.session[blocks[i].session];
            REQUIRE(session->committed == blocks[i].position && session->draft_end <= session->committed);
            catch_up(engine, blocks[i].session, blocks[i].position);
            blocks[i].ring_first = session->draft_end == blocks[i].position ? session->draft_first : blocks[i].position;
        }
        upload_blocks(engine, blocks + begin, count);
        int more[3] = {begin, rule, features};
        if (begin_kept_work(engine, work_key(engine, WORK_DRAFT, count, more, 3))) continue;
        if (engine->drafter.config.multi_token)
            engine->backend->move_rows(state->gathered, NULL, state->kept, state->indices + count, count,
                                       engine->drafter.config.feature_width);
        if (has_streams(&engine->drafter.config.backbone)) run_stages(engine, count * engine->drafter.config.block_size);
        else run_draft_layers(engine, blocks + begin, count);
        draft_tokens(engine, &part, blocks + begin, count, rule, features);
        if (features)
            engine->backend->predict_lengths(part.survival, part.features, count, &engine->drafter.predictor, state->scratch);
        engine->backend->end_work();
    }
    engine->backend->wait();
}

/* =====================================================================================================================
 * Opening an engine
 *
 * Owns: the order in which a model, its drafter and their memory come to be, and go.
 */

/* A checkpoint of no file; binding it without a backend says how large it would be. */
static bool make_up_checkpoint(Engine *engine, const EngineOptions *options, Error *error) {
    engine->checkpoint = (Checkpoint){.directory = copy_string(options->model), .dummy = true};
    if (!weights_bind(&engine->weights, &engine->checkpoint, &engine->config, NULL, error)) return false;
    engine->weight_bytes = engine->weights.bytes;
    weights_free(&engine->weights);
    return true;
}

/* Engram's token map, where it lies beside the published files. */
static bool add_token_map(Checkpoint *checkpoint, const Config *config, Error *error) {
    char path[PATH_MAX];
    if (!config->engram_order || checkpoint->dummy || checkpoint_find(checkpoint, "engram.token_map")
        || access(join(path, checkpoint->directory, "engram.safetensors"), F_OK))
        return true;
    return map_file(checkpoint, path, error);
}

/* Rounding as in training, and rows of four bits, are DeepSeek-V4's. */
static bool check_formats(const Config *config, const EngineOptions *options, Error *error) {
    if ((options->qat || options->kv_dtype == KV_F4) && !has_streams(config))
        return fail(error, "%s: %s does not apply to %s", options->model, options->qat ? "--qat" : "--kv-dtype fp4",
                    config->model_type);
    if (options->qat && config->family == FAMILY_DEEPSEEK_V4 && config->index_head_dim & (config->index_head_dim - 1))
        return fail(error, "%s: --qat: found an index_head_dim of %d, wanted a power of two", options->model,
                    config->index_head_dim);
    return true;
}

bool engine_plan(Engine *engine, const EngineOptions *options, Error *error) {
    *engine = (Engine){.backend = options->backend ? options->backend : &c_backend};
    bool ok = config_read(&engine->config, options->model, error);
    if (ok && has_streams(&engine->config) && !engine->backend->window_attention)
        ok = fail(error, "%s: %s runs on the CPU only so far: --device cpu", options->model, engine->config.model_type);
    engine->config.qat = options->qat;
    if (ok) ok = check_formats(&engine->config, options, error);
    if (ok && options->index_topk && !has_indexer(&engine->config))
        ok = fail(error, "%s: %s has no indexer: --index-topk does not apply", options->model, engine->config.model_type);
    if (ok && options->index_topk) engine->config.index_topk = options->index_topk;
    Config *config = &engine->config;
    if (ok && options->layers > config->num_hidden_layers)
        ok = fail(error, "%s: found %d layers, wanted the first %d", options->model, config->num_hidden_layers, options->layers);
    if (ok && options->layers) config->num_hidden_layers = options->layers;
    ok = ok && (options->dummy ? make_up_checkpoint(engine, options, error)
                               : checkpoint_open(&engine->checkpoint, options->model, error));
    ok = ok && add_token_map(&engine->checkpoint, &engine->config, error);
    engine->checkpoint.progress = options->progress;
    if (ok && !options->dummy) engine->weight_bytes = checkpoint_bytes(&engine->checkpoint);
    if (ok && options->draft && has_streams(&engine->config))
        ok = fail(error, "%s: no drafter drafts for %s from another folder: --draft own, or none", options->model,
                  engine->config.model_type);
    ok = ok && (options->draft ? drafter_plan(&engine->drafter, options->draft, &engine->config, error)
                               : stages_plan(engine, options, error));
    ok = ok && plan_memory(engine, options, error);
    if (!ok) engine_close(engine);
    return ok;
}

bool engine_bind(Engine *engine, const Backend *backend, Error *error) {
    return weights_bind(&engine->weights, &engine->checkpoint, &engine->config, backend, error)
        && drafter_bind(engine, backend, error);
}

bool engine_load(Engine *engine, Error *error) {
    const double begin = now();
    bool ok = check_memory(engine, error) && engine_bind(engine, engine->backend, error);
    engine->backend->wait();
    if (ok && engine->checkpoint.progress) engine->checkpoint.progress(engine->weight_bytes, engine->weight_bytes);
    engine->load_seconds = now() - begin;
    ok = ok && take_memory(engine, error);
    if (ok) {
        prepare_rope(engine);
        drafter_prepare(&engine->drafter, engine->backend, engine->state.max_rows);
    } else engine_close(engine);
    return ok;
}

bool engine_open(Engine *engine, const EngineOptions *options, Error *error) {
    return engine_plan(engine, options, error) && engine_load(engine, error);
}

void engine_close(Engine *engine) {
    const Backend *backend = engine->backend;
    if (!backend) return;
    drafter_close(&engine->drafter, backend);
    free_cache(&engine->cache);
    backend->give_back(engine->state.block, MEMORY_DEVICE);
    backend->release_weights();
    weights_free(&engine->weights);
    config_free(&engine->config);
    checkpoint_close(&engine->checkpoint);
    *engine = (Engine){0};
}

/* =====================================================================================================================
 * Lengths of verification
 *
 * Owns: which sessions draft in a round and how many rows each verifies. Scores say how probable it is that the first j drafts
 * are all accepted: predicted from the drafts (DVL), from the confidence head (DSpark 3.5), or what the session has shown so
 * far. A budget is a width that was asked for, or the one that promises most tokens a second by measured costs:
 *     tokens(x) / seconds(x) = (N + the x best scores) / (pass(N + x) + draft)
 * Since no token depends on a length (coupled acceptance), any of this may be wrong and only costs time. Acceptance by
 * rejection is exact if whether draft j is verified depends on nothing drawn after draft j - 1: DVL looks at unary logits
 * alone, and the confidence scheduler stops at the first row that does not pay.
 */

enum {
    KNOWN = 2,                  /* measurements that make a cost known: the first one finds caches cold */
    PLAIN_AGE = 48,             /* rounds after which the cost of a plain round is measured again */
    FIRST_ROWS = 4,             /* rows that the first round with drafts verifies of each */
    TRY_ROWS = 3,               /* rows that a session verifies at least when it tries */
    TRY_WAIT = 16,              /* rounds from a session's last draft to its next try */
    CREDIT_ROUNDS = 4,          /* plain rounds whose time may be saved up for tries */
};

static const double least_gain = 1.1;   /* what speculation has to promise over plain decoding */
static const double try_share = 0.005;  /* of all rounds' time: what tries of sessions for whom it promises less may cost */

/* ---- measured costs */

static int cost_bucket(int size) {
    int bucket = size < 32 ? size : 32 + (int)(16 * log2(size / 32.0));
    return bucket < COST_BUCKETS ? bucket : COST_BUCKETS - 1;
}

static double bucket_size(int bucket) { return bucket < 32 ? bucket : 32 * exp2((bucket - 32) / 16.0); }

/* Between measured sizes by a straight line; beyond the largest along the last two, or, where there is one, gently upwards, so
 * that wider rounds are tried. 0: nothing was measured yet. */
static double cost_of(const CostCurve *curve, int size) {
    int at = cost_bucket(size), low = at, high = at, below;
    while (low >= 0 && !(curve->seconds[low] > 0)) low--;
    while (high < COST_BUCKETS && !(curve->seconds[high] > 0)) high++;
    if (low == at) return curve->seconds[at];
    if (low < 0) return high == COST_BUCKETS ? 0 : curve->seconds[high];
    if (high < COST_BUCKETS)
        return curve->seconds[low]
               + (curve->seconds[high] - curve->seconds[low]) * (size - bucket_size(low))
                     / (bucket_size(high) - bucket_size(low));
    for (below = low - 1; below > 0 && !(curve->seconds[below] > 0);) below--;
    double slope = 0.15 * curve->seconds[low] / fmax(bucket_size(low), 1);
    if (below > 0) slope = fmax(0, (curve->seconds[low] - curve->seconds[below]) / (bucket_size(low) - bucket_size(below)));
    return curve->seconds[low] + slope * (size - bucket_size(low));
}

/* Takes in a measurement. What disturbs one only ever makes it longer, so the least of the last few counts. */
static void measure_cost(CostCurve *curve, int size, double seconds, long round) {
    int at = cost_bucket(size);
    curve->recent[at][curve->times[at]++ % COST_MEMORY] = seconds;
    curve->round[at] = round + 1;
    curve->seconds[at] = seconds;
    for (int i = 0; i < COST_MEMORY && i < curve->times[at]; i++)
        curve->seconds[at] = fmin(curve->seconds[at], curve->recent[at][i]);
}

/* Whether passes of about this size have been measured, and lately. */
static bool cost_is_known(const CostCurve *curve, int size, long round) {
    long times = 0;
    for (int at = cost_bucket((4 * size + 4) / 5); at <= cost_bucket(5 * size / 4); at++)
        if (round - curve->round[at] <= PLAIN_AGE) times += curve->times[at];
    return times >= KNOWN;
}

/* ---- what a session has shown */

/* survival[j]: that drafts 0..j are accepted, by the session's own rounds and, as long as these are few, by everybody's. */
static void expect_acceptance(float *survival, const Session *session, const Speculation *all, int slots) {
    double product = 1;
    for (int j = 0; j < slots; j++) {
        double common = (all->acceptance.accepted[j] + 1.5) / (all->acceptance.tried[j] + 2);
        product *= (session->acceptance.accepted[j] + 2 * common) / (session->acceptance.tried[j] + 2);
        survival[j] = (float)product;
    }
}

static void record_acceptance(Acceptance *acceptance, int verified, int accepted, double fade) {
    for (int j = 0; j < verified; j++) {
        if (j > accepted) break;
        acceptance->tried[j] = acceptance->tried[j] * fade + 1;
        acceptance->accepted[j] = acceptance->accepted[j] * fade + (j < accepted);
    }
}

static void forget_acceptance(Acceptance *acceptance, double fade) {
    for (int j = 0; j < MAX_BLOCK; j++) {
        acceptance->tried[j] *= fade;
        acceptance->accepted[j] *= fade;
    }
}

/* ---- lengths */

/* The budget for n sessions with drafts, beside `others` rows: of all scores in descending order the prefix with the most
 * tokens a second. first_only: up to the first that does not raise it (DSpark's scheduler). *rate: those tokens a second. */
static int best_budget(const Runner *runner, const float *scores, const int *limits, int n, int others, double draft_seconds,
                       bool first_only, double *rate) {
    const int slots = runner->engine.drafter.config.slots, room = runner->engine.state.max_rows - n - others;
    const CostCurve *cost = &runner->speculation.pass_cost;
    int taken[MAX_PASS_ROWS] = {0}, best = 0, x = 0;
    double tokens = n + others, plain = cost_of(cost, n + others);
    *rate = plain > 0 ? tokens / (plain + draft_seconds) : 0;
    while (x < room) {
        int next = -1;                              /* scores of a session do not increase: its best open one is its next */
        for (int i = 0; i < n; i++)
            if (taken[i] + 1 < limits[i] && (next < 0 || scores[i * slots + taken[i]] > scores[next * slots + taken[next]]))
                next = i;
        if (next < 0) break;
        tokens += scores[next * slots + taken[next]++];
        double wider = plain > 0 ? tokens / (cost_of(cost, n + others + ++x) + draft_seconds) : ++x; /* nothing is known: all */
        if (wider > *rate) *rate = wider, best = x;
        else if (first_only) break;
    }
    return n + best;
}

/* Until it is known, drafting counts as half a plain round. */
static double draft_cost(const Speculation *speculation, int blocks) {
    const CostCurve *curve = &speculation->draft_cost;
    long times = 0;
    for (int i = 0; i < COST_BUCKETS && times < KNOWN; i++) times += curve->times[i];
    return times < KNOWN ? 0.5 * cost_of(&speculation->pass_cost, blocks) : cost_of(curve, blocks);
}

/* Rows that the session's next block may have, the anchor's among them. DVL's width is a mean: one session may get more,
 * another fewer. */
static int block_limit(const Runner *runner, const Session *session) {
    const Engine *engine = &runner->engine;
    const Speculation *speculation = &runner->speculation;
    int position = (int)arrlen(session->ids) - 1, limit = engine->cache.context - position - 1,
        left = session->max_new - tokens_generated(session),
        width = speculation->width == 1 || speculation->verify != VERIFY_DVL ? speculation->width : 0;
    if (!engine->drafter.config.architecture || session->plain) return 1;
    if (engine->drafter.config.slots + 1 < limit) limit = engine->drafter.config.slots + 1;
    if (session->max_new && left < limit) limit = left;
    if (width && width < limit) limit = width;
    return limit < 1 ? 1 : limit;
}

/* Sessions that would not draft may do so once, as far as there is credit: those that had drafts longest ago, and those whose
 * last try went well. Text changes, and only a try shows it. pays: those that draft anyway. */
static void choose_tries(Runner *runner, Session **sessions, int *limits, const bool *pays, int n) {
    Speculation *speculation = &runner->speculation;
    const double cost = draft_cost(speculation, 1) + (TRY_ROWS - 1) * cost_of(&speculation->pass_cost, n) / n;
    for (;;) {
        Session *next = NULL;
        for (int i = 0; i < n; i++) {
            Session *session = sessions[i];
            if (limits[i] == 1 || pays[i] || session->trying) continue;
            bool due = session->drafted < 0 || runner->rounds - session->drafted >= TRY_WAIT;
            if (session->promising) next = session;
            if (session->promising) break;
            if (speculation->credit > 0 && due && (!next || session->drafted < next->drafted)) next = session;
        }
        if (!next) break;
        forget_acceptance(&next->acceptance, 0.25);
        next->trying = true;
        speculation->credit -= cost;
    }
    for (int i = 0; i < n; i++)
        if (!pays[i] && !sessions[i]->trying) limits[i] = 1;
}

/* Under --width auto: which of the n decoding sessions draft, by what they and all have shown; the limits of the others become
 * 1. alone: no prompt shares the round, so that it can show what plain decoding costs. */
static void choose_drafting(Runner *runner, Session **sessions, int *limits, int n, bool alone) {
    Speculation *speculation = &runner->speculation;
    const CostCurve *pass = &speculation->pass_cost;
    const int slots = runner->engine.drafter.config.slots;
    float *survival = runner->engine.drafter.state.drafts.survival;
    int able = 0, kept, who[MAX_PASS_ROWS], allowed[MAX_PASS_ROWS];
    bool pays[MAX_PASS_ROWS] = {false}, measure = alone ? !cost_is_known(pass, n, runner->rounds) : !(cost_of(pass, n) > 0);
    for (int i = 0; i < n; i++) {
        sessions[i]->trying = false;
        if (measure) limits[i] = 1;
        if (limits[i] == 1) continue;
        expect_acceptance(survival + able * slots, sessions[i], speculation, slots);
        allowed[able] = limits[i];
        who[able++] = i;
    }
    if (!able) return;
    double rate, plain = n / cost_of(pass, n);
    speculation->credit = fmin(speculation->credit, CREDIT_ROUNDS * cost_of(pass, n));
    for (int drafting = able;; drafting = kept) {   /* without those who would verify nothing, drafting costs less */
        int budget = best_budget(runner, survival, allowed, able, n - able, draft_cost(speculation, drafting), false, &rate);
        runner->engine.backend->allocate(runner->lengths, survival, allowed, able, slots, budget);
        kept = 0;
        for (int i = 0; i < able; i++) kept += runner->lengths[i] > 1;
        if (kept == drafting || !kept) break;
        for (int i = 0; i < able; i++)
            if (runner->lengths[i] == 1) allowed[i] = 1;
    }
    if (rate <= least_gain * plain) kept = 0;
    for (int i = 0; i < able; i++) pays[who[i]] = kept && runner->lengths[i] > 1;
    choose_tries(runner, sessions, limits, pays, n);
}

/* Scores of the drafts of the round's first n blocks, as the rule has them. */
static void score_drafts(Runner *runner, int n) {
    const Engine *engine = &runner->engine;
    const Drafter *drafter = &engine->drafter;
    const Drafts *drafts = &drafter->state.drafts;
    const int slots = drafts->slots;
    for (int i = 0; i < n; i++) {
        float *survival = drafts->survival + i * slots;
        if (runner->speculation.verify == VERIFY_FULL)
            expect_acceptance(survival, runner->owners[i], &runner->speculation, slots);
        double product = 1;
        for (int j = 0; j < slots && runner->speculation.verify == VERIFY_CONFIDENCE; j++) {
            product /= 1 + exp(-drafts->confidence[i * slots + j] / drafter->temperatures[j]);
            survival[j] = (float)product;
        }
        for (int j = 0; j < slots; j++)
            if (!(survival[j] >= 0 && survival[j] <= 1)) survival[j] = 0;   /* a damaged head or predictor promises nothing */
    }
}

/* Rows for each of the round's first n blocks, which have drafts; `others` rows go to those that have none. */
static void choose_lengths(Runner *runner, int n, int others) {
    const Engine *engine = &runner->engine;
    const Speculation *speculation = &runner->speculation;
    const Drafts *drafts = &engine->drafter.state.drafts;
    const int width = speculation->width, slots = drafts->slots, room = engine->state.max_rows - others;
    double rate, draft = draft_cost(speculation, n);
    score_drafts(runner, n);
    int64_t budget = (int64_t)n * width;
    if (!width)
        budget = best_budget(runner, drafts->survival, runner->limits, n, others, draft, speculation->verify == VERIFY_CONFIDENCE,
                             &rate);
    else if (speculation->verify == VERIFY_CONFIDENCE)
        budget = best_budget(runner, drafts->survival, runner->limits, n, others, 0, true, &rate);
    if (!width && !speculation->stats.rounds) budget = (int64_t)n * FIRST_ROWS; /* so that something is known of wider passes */
    if (budget > room) budget = room;
    bool seeded = speculation->seeded && speculation->verify == VERIFY_DVL;
    (seeded ? engine->backend->allocate_seeded : engine->backend->allocate)(runner->lengths, drafts->survival, runner->limits, n,
                                                                            slots, (int)budget);
    for (int i = 0; i < n; i++) {
        int least = !runner->owners[i]->trying ? 1 : runner->limits[i] < TRY_ROWS ? runner->limits[i] : TRY_ROWS;
        int more = least - runner->lengths[i];
        if (more > 0 && budget + more <= room) runner->lengths[i] = least, budget += more;
    }
}

/* =====================================================================================================================
 * Sessions and rounds
 *
 * Owns: what a conversation is (its ids and how many of them are cached), how sessions share a pass, and when a generation
 * ends. A round packs each session's uncached ids into rows, decoding sessions first, runs one pass, and samples for each
 * session whose last id was in it. Nothing here knows whether a session is a chat, a prompt or a batch row.
 */

volatile sig_atomic_t interrupted;

void session_begin(Session *session, Engine *engine) {
    arrsetcap(session->ids, (size_t)engine->cache.context + 1);
    memcpy(cache_history(&engine->cache, session->slot), session->ids, arrlenu(session->ids) * sizeof *session->ids);
    session->prompt_length = (int)arrlen(session->ids);
    if (session->cached >= session->prompt_length)
        session->cached = session->prompt_length - 1; /* the last row gives the logits */
    arrsetlen(session->text, 0);
    session->utf8 = (Utf8Stream){0};
    session->emitted = 0;
    session->finish = RUNNING;
    session->drafted = -1;
    session->trying = session->promising = session->plain = false;
    session->cached = cache_return(&engine->cache, session->slot, session->cached);
    if (!cache_truncate(&engine->cache, session->slot, session->cached)) {
        fail(&session->error, "the host memory for cached rows is full: raise --host-budget");
        session->finish = FINISH_ERROR;
    }
}

bool session_admit(Runner *runner, Session *session) {
    Cache *cache = &runner->engine.cache;
    if (cache->session[session->slot].admitted) return true;
    int length = (int)arrlen(session->ids), rows = cache->context;
    if (session->max_new && !session->continues && session->max_new < rows - length) rows = length + session->max_new;
    return cache_admit(cache, session->slot, session->ids, length, rows, &session->cached);
}

void session_free(Session *session) {
    arrfree(session->ids);
    arrfree(session->text);
    *session = (Session){0};
}

int tokens_generated(const Session *session) { return (int)arrlen(session->ids) - session->prompt_length; }

/* Where the first stop string begins in text[from..], or -1. *held: how many bytes at the end might begin one. */
static ptrdiff_t find_stop(const Session *session, size_t from, size_t *held) {
    ptrdiff_t found = -1;
    size_t length = arrlenu(session->text);
    *held = 0;
    for (size_t i = 0; i < arrlenu(session->stops); i++) {
        const char *stop = session->stops[i];
        size_t size = strlen(stop), begin = from;
        char *hit = length - begin >= size ? memmem(session->text + begin, length - begin, stop, size) : NULL;
        if (hit && (found < 0 || hit - session->text < found)) found = hit - session->text;
        for (size_t n = size - 1 < length - from ? size - 1 : length - from; n > *held; n--)
            if (!memcmp(session->text + length - n, stop, n)) *held = n;
    }
    return found;
}

/* Passes on what can no longer become part of a stop string; at the end of a generation, everything. */
static void emit_text(Session *session, bool last) {
    size_t held;
    ptrdiff_t stop = find_stop(session, session->emitted, &held);
    if (stop >= 0) {
        arrsetlen(session->text, (size_t)stop);
        session->finish = FINISH_STOP;
    }
    size_t end = arrlenu(session->text) - (last || stop >= 0 ? 0 : held);
    if (session->emit && end > session->emitted) session->emit(session, session->text + session->emitted, end - session->emitted);
    session->emitted = end;
}

static bool ends_generation(const Runner *runner, int token) {
    for (int i = 0; i < runner->engine.config.n_eos; i++)
        if (runner->engine.config.eos_token_id[i] == token) return true;
    return runner->tokenizer && chat_ends_turn(runner->tokenizer, token);
}

/* Takes in one sampled token: ids, text, and whether this was the last. An end-of-turn token joins the ids but not the text. */
static void accept_token(Runner *runner, Session *session, int token) {
    cache_history(&runner->engine.cache, session->slot)[arrlen(session->ids)] = token;
    arrput(session->ids, token);
    runner->tokens++;
    if (ends_generation(runner, token)) session->finish = FINISH_STOP;
    else if (session->max_new && tokens_generated(session) >= session->max_new) session->finish = FINISH_LENGTH;
    else if (arrlen(session->ids) >= runner->engine.cache.context) session->finish = FINISH_CONTEXT;
    if (!runner->tokenizer) return;
    size_t length;
    const char *bytes = tokenizer_bytes(runner->tokenizer, token, &length);
    bool thought = token == chat_think_open(runner->tokenizer)
                   || token == chat_think_close(runner->tokenizer); /* parts reasoning from answer */
    bool silent = !bytes || ends_generation(runner, token) || (tokenizer_is_control(runner->tokenizer, token) && !thought);
    if (!silent) utf8_push(&session->utf8, bytes, length, &session->text);
    if (session->finish != RUNNING) utf8_flush(&session->utf8, &session->text);
    emit_text(session, session->finish != RUNNING);
}

/* Ends a generation from outside, so that what was held back is still seen. */
static void session_stop(Session *session, Finish why) {
    session->finish = why;
    utf8_flush(&session->utf8, &session->text);
    emit_text(session, true);
    session->finish = why;
}

static bool takes_part(const Runner *runner, const Session *session) {
    return session->finish == RUNNING && runner->engine.cache.session[session->slot].admitted;
}

/* Places for rows of the session in the next pass; 0: it has none and ends. */
static int take_room(Runner *runner, Session *session, int wanted) {
    int room = cache_room(&runner->engine.cache, session->slot, wanted);
    if (room) return room;
    fail(&session->error, "the session has used up the %d rows it was given", session->cached);
    session_stop(session, FINISH_ERROR);
    return 0;
}

static void add_block(Runner *runner, Session *session, int at, int count) {
    runner->owners[at] = session;
    runner->blocks[at] = (DraftBlock){.session = session->slot,
                                      .position = (int)arrlen(session->ids) - 1,
                                      .ids = cache_history(&runner->engine.cache, session->slot),
                                      .count = count,
                                      .sampling = session->sampling,
                                      .stream = session->stream};
}

/* The blocks of sessions that decode, those that will have drafts first, of one row each as yet. Returns how many there are,
 * *drafted of them to be drafted. */
static int collect_blocks(Runner *runner, Session **sessions, int n, int *drafted) {
    Session *decoding[MAX_PASS_ROWS] = {0};
    int limits[MAX_PASS_ROWS] = {0}, n_parts = 0, n_decoding = 0, n_blocks = 0;
    for (int i = 0; i < n; i++) {
        sessions[i]->in_pass = 0;
        sessions[i]->drafts = false;
        if (!takes_part(runner, sessions[i])) continue;
        n_parts++;
        if (arrlen(sessions[i]->ids) - sessions[i]->cached > 1) continue;
        limits[n_decoding] = block_limit(runner, sessions[i]);
        decoding[n_decoding++] = sessions[i];
    }
    if (runner->engine.drafter.config.architecture && !runner->speculation.width)
        choose_drafting(runner, decoding, limits, n_decoding, n_decoding == n_parts);
    for (int plain = 0; plain < 2; plain++) {
        for (int i = 0; i < n_decoding; i++) {
            if ((limits[i] == 1) != plain) continue;
            decoding[i]->drafts = !plain;
            runner->limits[n_blocks] = limits[i];
            runner->lengths[n_blocks] = 1;
            add_block(runner, decoding[i], n_blocks++, 1);
        }
        if (!plain) *drafted = n_blocks;
    }
    return n_blocks;
}

typedef struct RoundTimes { double draft, allocate, verify, accept; } RoundTimes;       /* seconds */

/* Drafts the first of the round's blocks and chooses how many rows each verifies. */
static void draft_round(Runner *runner, int drafted, int n_blocks, RoundTimes *times) {
    const Speculation *speculation = &runner->speculation;
    double start = now();
    draft_blocks(&runner->engine, runner->blocks, drafted, speculation->accept, speculation->verify == VERIFY_DVL);
    double ready = now();
    choose_lengths(runner, drafted, n_blocks - drafted);
    times->draft = ready - start;
    times->allocate = now() - ready;
}

/* Places for the blocks' rows. Where a session finds none it ends, and its neighbours go on without their drafts this once.
 * Returns how many blocks are left. */
static int place_blocks(Runner *runner, int n_blocks, int *drafted) {
    int kept = 0;
    for (int i = 0; i < n_blocks; i++) {
        int room = take_room(runner, runner->owners[i], runner->lengths[i]);
        runner->blocks[i].count = runner->owners[i]->in_pass = room;
        kept += room > 0;
    }
    if (kept == n_blocks) return n_blocks;
    *drafted = kept = 0;
    for (int i = 0; i < n_blocks; i++) {
        if (!runner->blocks[i].count) continue;
        runner->owners[i]->in_pass = 1;
        runner->owners[i]->drafts = runner->owners[i]->trying = false;
        add_block(runner, runner->owners[i], kept++, 1);
    }
    return kept;
}

/* Pieces of prompts, as far as there is room behind the blocks' rows. Returns how many rows the pass has; a prompt that ends in
 * it becomes a block of one row. */
static int add_prompts(Runner *runner, Session **sessions, int n, int n_rows, int *n_blocks) {
    int n_finals = n_rows;
    for (int r = 0; r < n_rows; r++) runner->finals[r] = r;
    for (int i = 0; i < n; i++) {
        Session *session = sessions[i];
        int pending = (int)arrlen(session->ids) - session->cached, room = runner->engine.state.max_rows - n_rows;
        if (!takes_part(runner, session) || pending == 1 || !room) continue;
        int take = session->in_pass = take_room(runner, session, pending < room ? pending : room);
        for (int j = 0; j < take; j++) {
            int position = session->cached + j;
            runner->rows[n_rows++] = (Row){session->slot, position, session->ids[position]};
        }
        if (!take || take < pending) continue;
        add_block(runner, session, *n_blocks, 1);
        runner->blocks[(*n_blocks)++].first = n_finals;
        runner->finals[n_finals++] = n_rows - 1;
    }
    return n_rows;
}

/* One JSON line: what each session that took a token had and got, and what the round did to the hierarchy. */
static void trace_round(Runner *runner, int n_rows, int n_blocks, int drafted, double seconds, const RoundTimes *times,
                        const CacheStats *before) {
    FILE *out = runner->trace;
    const Cache *cache = &runner->engine.cache;
    const CacheStats *after = &cache->stats;
    const Drafts *drafts = &runner->engine.drafter.state.drafts;
    fprintf(out,
            "{\"round\": %ld, \"rows\": %d, \"seconds\": %.6f, \"draft_seconds\": %.6f, \"allocate_seconds\": %.6f, "
            "\"verify_seconds\": %.6f, \"accept_seconds\": %.6f, \"sessions\": [",
            runner->rounds, n_rows, seconds, times->draft, times->allocate,
            times->verify, times->accept);
    for (int i = 0; i < n_blocks; i++) {
        const Session *session = runner->owners[i];
        const DraftBlock *block = &runner->blocks[i];
        fprintf(out, "%s{\"id\": %" PRIu64 ", \"anchor_pos\": %d, \"proposed\": [", i ? ", " : "", session->stream,
                block->position);
        for (int j = 0; j < (i < drafted ? drafts->slots : 0); j++)
            fprintf(out, "%s%d", j ? ", " : "", drafts->tokens[i * drafts->slots + j]);
        fprintf(out, "], \"verified\": %d, \"accepted\": %d, \"successor\": %d, \"frontier\": %d, \"coverage\": %.4f}",
                block->count - 1, runner->accepted[i], arrlast(session->ids), cache->session[session->slot].committed,
                cache_coverage(cache, session->slot));
    }
    PageCensus pages = cache_census(cache);
    fprintf(out, "], \"pages\": {\"free\": %d, \"hot\": %d, \"tail\": %d, \"ready\": %d, \"filling\": %d, \"leaving\": %d}",
            pages.free, pages.hot, pages.tail, pages.ready, pages.filling, pages.leaving);
    static const char *tiers[TIERS] = {"tail", "optional", "hot", "host"};
    for (int tier = 0; tier < TIERS; tier++)
        fprintf(out, "%s\"%s\": %" PRIu64, tier ? ", " : ", \"picks\": {", tiers[tier],
                after->picked[tier] - before->picked[tier]);
    fprintf(out, "}, \"plan\": %" PRIu64 ", \"staged\": %" PRIu64 ", \"waiting\": %s}\n", after->fetched - before->fetched,
            after->staged - before->staged, cache->waiting ? "true" : "false");
}

/* What a block has won joins its session: the accepted drafts and their successor, or as many of them as the generation still
 * takes. Sets accepted to the drafts among those. Committed are the anchor's row and the rows of accepted drafts (eq. 7, 8). */
static void end_block(Runner *runner, int i, bool drafted) {
    Session *session = runner->owners[i];
    const DraftBlock *block = &runner->blocks[i];
    SpeculationStats *stats = &runner->speculation.stats;
    int verified = block->count - 1, won = runner->accepted[i], taken = 0;
    if (drafted) {
        record_acceptance(&session->acceptance, verified, won, 0.9);
        if (session->drafted < 0 || (session->trying && !session->promising))
            record_acceptance(&runner->speculation.acceptance, verified, won, 0.98);
        if (!verified) {                            /* the scores alone said no: that is an outcome too */
            session->acceptance.tried[0] = session->acceptance.tried[0] * 0.9 + 1;
            session->acceptance.accepted[0] =
                session->acceptance.accepted[0] * 0.9
                + (double)runner->engine.drafter.state.drafts.survival[i * runner->engine.drafter.config.slots];
        }
        for (int j = 0; j < verified && j <= won; j++) stats->tried[j]++, stats->passed[j] += j < won;
        session->promising = session->trying && verified && won == verified;
        session->drafted = runner->rounds;
        stats->verified += (uint64_t)verified;
        stats->accepted += (uint64_t)won;
    }
    for (; taken <= won && session->finish == RUNNING; taken++) {
        session->accepted = taken < won;
        accept_token(runner, session, runner->choices[block->first + taken]);
    }
    session->accepted = false;
    runner->accepted[i] = taken - 1;
    if (session->cached == block->position) session->in_pass = taken;   /* of a block; a prompt's rows are all committed */
}

/* The committed rows of the pass that a block to come may see, those of prompts and of sessions that draft, or the others. */
static int committed_rows(Runner *runner, int n_rows, bool drafting) {
    int n = 0, window = runner->engine.drafter.config.widest_window;
    for (int r = 0; r < n_rows; r++) {
        const Row *row = &runner->rows[r];
        const Session *session = runner->in_slot[row->session];
        if (row->position >= session->cached || session->prompt_length - row->position >= window) continue;
        if ((session->drafts || row->position < session->prompt_length) == drafting) runner->indices[n++] = r;
    }
    return n;
}

/* Committed rows enter the draft ring; of sessions that do not draft now, only their features are kept. */
static void feed_drafter(Runner *runner, int n_rows) {
    if (runner->speculation.width == 1) return;
    draft_feed(&runner->engine, runner->rows, runner->indices, committed_rows(runner, n_rows, true));
    draft_keep(&runner->engine, runner->rows, runner->indices, committed_rows(runner, n_rows, false));
}

static void fail_round(Runner *runner, Session **sessions, int n, int drafted, const Error *error) {
    for (int i = 0; i < n; i++) {
        Session *session = sessions[i];
        session->plain = drafted > 0;               /* it may have been a draft's row: once more, without drafts */
        if (drafted || session->finish != RUNNING || session->slot != runner->engine.failed_session) continue;
        session->error = *error;
        session_stop(session, FINISH_ERROR);
    }
}

/* Every block's tokens join its session, and what was run is committed. */
static void commit_round(Runner *runner, Session **sessions, int n, int n_blocks, int drafted) {
    for (int i = 0; i < n_blocks; i++) end_block(runner, i, i < drafted);
    for (int i = 0; i < n; i++) {
        sessions[i]->plain = false;
        if (!sessions[i]->in_pass) continue;
        sessions[i]->cached += sessions[i]->in_pass;
        cache_commit(&runner->engine.cache, sessions[i]->slot, sessions[i]->cached);
        runner->in_slot[sessions[i]->slot] = sessions[i];
    }
}

/* What the round tells of costs, where it was one of decoding alone, and to the statistics. */
static void account_round(Runner *runner, int n_rows, int block_rows, int drafted, const RoundTimes *times,
                          const CacheStats *before) {
    Speculation *speculation = &runner->speculation;
    SpeculationStats *stats = &speculation->stats;
    const CacheStats *after = &runner->engine.cache.stats;
    if (n_rows == block_rows && !runner->engine.work_is_new) {
        measure_cost(&speculation->pass_cost, n_rows, times->verify + times->accept, runner->rounds);
        if (drafted) measure_cost(&speculation->draft_cost, drafted, times->draft, runner->rounds);
    }
    runner->rows_run += n_rows;
    speculation->credit += try_share * (times->draft + times->allocate + times->verify + times->accept);
    stats->plain_rounds += !drafted && block_rows > 0;
    if (!drafted) return;
    stats->rounds++;
    stats->blocks += (uint64_t)drafted;
    stats->selected_on_host += after->picked[TIER_HOST] - before->picked[TIER_HOST];
    stats->fetched += after->fetched - before->fetched;
    stats->draft_seconds += times->draft;
    stats->allocate_seconds += times->allocate;
    stats->verify_seconds += times->verify;
    stats->accept_seconds += times->accept;
}

void run_round(Runner *runner, Session **sessions, int n) {
    Engine *engine = &runner->engine;
    const CacheStats before = engine->cache.stats;
    const double start = now();
    RoundTimes times = {0};
    engine->work_is_new = false;
    cache_step(&engine->cache);
    int drafted = 0, n_blocks = collect_blocks(runner, sessions, n, &drafted);
    if (drafted) draft_round(runner, drafted, n_blocks, &times);
    n_blocks = place_blocks(runner, n_blocks, &drafted);
    int block_rows = engine->backend->pack_blocks(runner->rows, runner->blocks, n_blocks, engine->state.max_rows),
        n_finals = block_rows - n_blocks, n_rows = add_prompts(runner, sessions, n, block_rows, &n_blocks);
    n_finals += n_blocks;                           /* each prompt that ends wants the logits of one row */
    REQUIRE(n_rows <= engine->state.max_rows && n_finals <= engine->state.logit_rows);
    if (!n_rows) return;
    const double packed = now();
    Error error;
    if (!begin_forward(engine, runner->rows, n_rows, &error)) return fail_round(runner, sessions, n, drafted, &error);
    begin_head(engine, runner->finals, n_finals);
    const double passed = now();
    engine->backend->accept(runner->choices, runner->accepted, engine->state.logits, engine->config.vocab_size, runner->blocks,
                            &engine->drafter.state.drafts, n_blocks, runner->speculation.accept, runner->samplers,
                            runner->n_samplers);
    const double asked = now();
    if (!end_pass(engine, runner->rows, runner->finals, &error)) return fail_round(runner, sessions, n, drafted, &error);
    const double waited = now();
    commit_round(runner, sessions, n, n_blocks, drafted);
    const double accepted = now();
    if (engine->drafter.config.architecture) feed_drafter(runner, n_rows);
    const double end = now();
    times.draft += end - accepted;
    times.verify = passed - packed + waited - asked;    /* a GPU has only been asked for the pass until it is waited for */
    times.accept = asked - passed + accepted - waited;
    account_round(runner, n_rows, block_rows, drafted, &times, &before);
    runner->seconds += end - start;
    if (runner->trace) trace_round(runner, n_rows, n_blocks, drafted, end - start, &times, &before);
    runner->rounds++;
}

void run_session(Runner *runner, Session *session) {
    while (session->finish == RUNNING) {
        if (interrupted) {
            session_stop(session, FINISH_INTERRUPTED);
            cache_stop_waiting(&runner->engine.cache);
        } else if (session_admit(runner, session)) run_round(runner, &session, 1);
        else cache_step(&runner->engine.cache);
    }
}

/* Like allocate_zeroed(), memory that operations can reach. */
static void *take_or_exit(const Backend *backend, size_t bytes, Memory memory) {
    Error error;
    void *block = backend->take(bytes ? bytes : 1, memory, &error);
    if (!block) fprintf(stderr, "tide: %s\n", error.text), exit(1);
    return block;
}

Sampler sampler_open(const Backend *backend, int vocab) {
    size_t n = (size_t)vocab;
    return (Sampler){take_or_exit(backend, n * sizeof(int), MEMORY_DEVICE),
                     take_or_exit(backend, n * sizeof(float), MEMORY_DEVICE),
                     take_or_exit(backend, n * sizeof(bool), MEMORY_DEVICE)};
}

void sampler_close(const Backend *backend, Sampler *sampler) {
    backend->give_back(sampler->picks, MEMORY_DEVICE);
    backend->give_back(sampler->weights, MEMORY_DEVICE);
    backend->give_back(sampler->seen, MEMORY_DEVICE);
}

bool runner_open(Runner *runner, const EngineOptions *options, bool need_tokenizer, FILE *plan, Error *error) {
    *runner = (Runner){0};
    if (!engine_plan(&runner->engine, options, error)) return false;
    if (plan) print_plan(plan, &runner->engine);
    if (!engine_load(&runner->engine, error)) return false;
    if (plan && !runner->engine.backend->shares_memory)
        fprintf(plan, "tide: %.1f MB of weights on the device after %.2f s: %.1f GB/s\n",
                (double)runner->engine.weight_bytes / 1e6, runner->engine.load_seconds,
                (double)runner->engine.weight_bytes / 1e9 / runner->engine.load_seconds);
    char path[PATH_MAX];
    bool present = access(join(path, options->model, "tokenizer.json"), F_OK) == 0;
    if (need_tokenizer && !present && options->dummy)
        fail(error,
             "%s: no tokenizer.json there, and --dummy makes up none: it does for bench, and for generate and eval with --ids",
             options->model);
    else if (need_tokenizer || present) runner->tokenizer = tokenizer_open(options->model, error);
    if ((need_tokenizer || present) && !runner->tokenizer) {
        engine_close(&runner->engine);
        return false;
    }
    size_t rows = (size_t)runner->engine.state.max_rows, slots = (size_t)runner->engine.cache.sessions;
    const Backend *backend = runner->engine.backend;
    runner->n_samplers = backend->samplers(runner->engine.state.logit_rows);
    runner->samplers = take_or_exit(backend, (size_t)runner->n_samplers * sizeof(Sampler), MEMORY_HOST);
    for (int i = 0; i < runner->n_samplers; i++) runner->samplers[i] = sampler_open(backend, runner->engine.config.vocab_size);
    runner->rows = allocate_zeroed(rows, sizeof(Row));
    runner->finals = allocate_zeroed(rows, sizeof(int));
    runner->indices = allocate_zeroed(rows, sizeof(int));
    runner->lengths = allocate_zeroed(rows, sizeof(int));
    runner->limits = allocate_zeroed(rows, sizeof(int));
    runner->choices = take_or_exit(backend, rows * sizeof(int), MEMORY_HOST);
    runner->accepted = take_or_exit(backend, rows * sizeof(int), MEMORY_HOST);
    runner->blocks = take_or_exit(backend, rows * sizeof(DraftBlock), MEMORY_HOST);
    runner->owners = allocate_zeroed(rows, sizeof *runner->owners);
    runner->in_slot = allocate_zeroed(slots, sizeof *runner->in_slot);
    const Drafter *drafter = &runner->engine.drafter;
    runner->speculation.verify = drafter->predictor.layers         ? VERIFY_DVL
                                 : drafter->config.confidence_head ? VERIFY_CONFIDENCE
                                                                   : VERIFY_FULL;
    return true;
}

void runner_close(Runner *runner) {
    const Backend *backend = runner->engine.backend;
    if (!backend) return;                           /* it was never opened */
    void *taken[] = {runner->samplers, runner->choices, runner->accepted, runner->blocks};
    for (int i = 0; i < runner->n_samplers; i++) sampler_close(backend, &runner->samplers[i]);
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) backend->give_back(taken[i], MEMORY_HOST);
    free(runner->rows), free(runner->finals), free(runner->indices), free(runner->lengths), free(runner->limits);
    free(runner->owners), free(runner->in_slot);
    tokenizer_close(runner->tokenizer);
    engine_close(&runner->engine);
}

/* =====================================================================================================================
 * Sessions at rest
 *
 * Owns: the file that holds a session: its ids, its settings, and every cached row with its index keys, so that going on costs
 * no prefill and gives the token that never having stopped would have given. The file says which checkpoint and which rows it
 * belongs to, is written under a temporary name and renamed when it is whole, and is checked to its last byte before anything
 * is taken from it. Loaded rows arrive as imported history: on the host first, then wherever the hierarchy puts them.
 *
 *     16 bytes  "tide session 2\n" and a NUL
 *      8 bytes  length of the header, little-endian
 *     header    one JSON object
 *     pages     page_image_bytes() each, as many as `rows` fills or begins
 *     draft     `draft_rows` rows of the ring, the last before `rows`: [draft_rows, draft_layers]. Another drafter, or none,
 *               passes them over
 *      8 bytes  XXH3 of everything before, little-endian
 */

static const char session_magic[16] = "tide session 2\n";

enum { HASH_BLOCK = 1 << 20 };

/* Over config.json, and of every tensor but the experts' its name, dtype, shape and first bytes: tells one checkpoint from
 * another without reading its weights. */
static uint64_t fingerprint(const Checkpoint *checkpoint) {
    XXH3_state_t *hash = XXH3_createState();
    XXH3_64bits_reset(hash);
    for (size_t i = 0; i < arrlenu(checkpoint->tensors); i++) {
        const Tensor *tensor = &checkpoint->tensors[i];
        char line[512], shape[128];
        snprintf(line, sizeof line, "%s %s %s\n", tensor->name, tensor->dtype_name,
                 shape_text(shape, tensor->rank, tensor->shape));
        XXH3_64bits_update(hash, line, strlen(line));
        bool expert = strstr(tensor->name, ".experts.") != NULL;
        if (!expert) XXH3_64bits_update(hash, tensor->data, tensor->size < 64 ? tensor->size : 64);
    }
    char path[PATH_MAX], *config;
    size_t length;
    Error error;
    if (read_file(join(path, checkpoint->directory, "config.json"), MAX_JSON_FILE, &config, &length, &error)) {
        XXH3_64bits_update(hash, config, length);
        free(config);
    }
    uint64_t digest = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return digest;
}

/* What the rows depend on besides the ids, as a file names it. */
static void row_identity(const Engine *engine, char text[128]) {
    snprintf(text, 128, "%016" PRIx64 ", %s rows, index_topk %d%s", fingerprint(&engine->checkpoint),
             kv_dtype_names[engine->cache.kv_dtype], engine->config.index_topk, engine->config.qat ? ", --qat" : "");
}

/* Of one position, in every layer of the drafter. */
static size_t draft_row_bytes(const Cache *cache) { return (size_t)cache->draft_layers * cache->draft_format.stride; }

/* Which drafter the rows of a ring are of. */
static void draft_identity(const Engine *engine, char text[128]) {
    snprintf(text, 128, "%016" PRIx64 ", %s rows", fingerprint(draft_checkpoint(engine)),
             kv_dtype_names[engine->cache.draft_format.dtype]);
}

/* How many rows of the ring go with a session. */
static int saved_draft_rows(const Cache *cache, const Session *session) {
    const SessionPages *pages = &cache->session[session->slot];
    return pages->draft_end == session->cached ? pages->draft_end - pages->draft_first : 0;
}

/* How far a session's rows can be saved; whole or partial pages of them, and bytes of both with what its trails hold. */
static int saved_positions(const Cache *cache, const Session *session) {
    return cache_return(cache, session->slot, session->cached);
}

static int saved_pages(const Cache *cache, int positions) { return (positions / cache->ratio + PAGE_ROWS - 1) / PAGE_ROWS; }

static uint64_t saved_bytes(const Cache *cache, int positions) {
    return (uint64_t)saved_pages(cache, positions) * page_image_bytes(cache) + trail_image_bytes(cache, positions);
}

/* One position's rows, out of the ring or into it. */
static void copy_draft_row(const Cache *cache, int session, int position, uint8_t *image, bool into_ring) {
    const size_t stride = cache->draft_format.stride, at = (size_t)ring_row(cache, session, position).id * stride;
    for (int l = 0; l < cache->draft_layers; l++, image += stride) {
        uint8_t *row = layer_ring(cache, l) + at;
        cache->backend->copy_bytes(into_ring ? row : image, into_ring ? image : row, stride);
    }
}

static cJSON *session_header(const Runner *runner, const Session *session, cJSON *extra) {
    char identity[128];
    row_identity(&runner->engine, identity);
    cJSON *header = cJSON_CreateObject();
    cJSON_AddStringToObject(header, "checkpoint", identity);
    cJSON_AddNumberToObject(header, "rows", saved_positions(&runner->engine.cache, session));
    cJSON_AddNumberToObject(header, "page_bytes", (double)page_image_bytes(&runner->engine.cache));
    int draft_rows = saved_draft_rows(&runner->engine.cache, session);
    if (draft_rows) {
        draft_identity(&runner->engine, identity);
        cJSON_AddStringToObject(header, "drafter", identity);
        cJSON_AddNumberToObject(header, "draft_rows", draft_rows);
        cJSON_AddNumberToObject(header, "draft_row_bytes", (double)draft_row_bytes(&runner->engine.cache));
    }
    cJSON_AddNumberToObject(header, "stream", (double)session->stream);
    cJSON_AddNumberToObject(header, "seed", (double)session->sampling.seed);
    cJSON_AddNumberToObject(header, "temperature", (double)session->sampling.temperature);
    cJSON_AddNumberToObject(header, "top_p", (double)session->sampling.top_p);
    cJSON_AddNumberToObject(header, "min_p", (double)session->sampling.min_p);
    cJSON_AddNumberToObject(header, "repeat_penalty", (double)session->sampling.repeat_penalty);
    cJSON_AddNumberToObject(header, "top_k", session->sampling.top_k);
    cJSON_AddItemToObject(header, "ids", json_ids(session->ids, (int)arrlen(session->ids)));
    if (extra) cJSON_AddItemToObject(header, "chat", extra);
    return header;
}

typedef struct HashedFile {
    FILE *file;
    XXH3_state_t *hash;
    bool ok;
} HashedFile;

static void put_bytes(HashedFile *out, const void *bytes, size_t n) {
    XXH3_64bits_update(out->hash, bytes, n);
    out->ok = out->ok && fwrite(bytes, 1, n, out->file) == n;
}

static void put_session(HashedFile *out, const Runner *runner, const Session *session, const char *header) {
    const Cache *cache = &runner->engine.cache;
    uint8_t number[8], *image = allocate_zeroed(page_image_bytes(cache), 1);
    store_u64(number, strlen(header));
    put_bytes(out, session_magic, sizeof session_magic);
    put_bytes(out, number, sizeof number);
    put_bytes(out, header, strlen(header));
    const int positions = saved_positions(cache, session);
    for (int page = 0; page < saved_pages(cache, positions) && out->ok; page++) {
        cache_read_page(cache, session->slot, page, image);
        put_bytes(out, image, page_image_bytes(cache));
    }
    uint8_t *trails = allocate_zeroed(trail_image_bytes(cache, positions), 1);
    cache_read_trails(cache, session->slot, positions, trails);
    put_bytes(out, trails, trail_image_bytes(cache, positions));
    free(trails);
    uint8_t *row = allocate_zeroed(draft_row_bytes(cache), 1);
    for (int t = session->cached - saved_draft_rows(cache, session); t < session->cached && cache->draft_layers && out->ok; t++) {
        copy_draft_row(cache, session->slot, t, row, false);
        put_bytes(out, row, draft_row_bytes(cache));
    }
    free(row);
    store_u64(number, XXH3_64bits_digest(out->hash));
    put_bytes(out, number, sizeof number);
    free(image);
}

bool session_save(const Runner *runner, const Session *session, const char *path, cJSON *extra, Error *error) {
    char temporary[PATH_MAX];
    struct stat there;
    cJSON *header = session_header(runner, session, extra);
    if (!stat(path, &there) && !S_ISREG(there.st_mode)) {
        cJSON_Delete(header);
        return fail(error, "%s: not a regular file", path);
    }
    snprintf(temporary, sizeof temporary, "%s.partial", path);
    char *text = cJSON_PrintUnformatted(header);
    cJSON_Delete(header);
    unlink(temporary);
    mode_t mask = umask(077);                       /* a conversation is its owner's */
    HashedFile out = {.file = fopen(temporary, "w"), .hash = XXH3_createState(), .ok = true};
    umask(mask);
    XXH3_64bits_reset(out.hash);
    if (out.file) put_session(&out, runner, session, text);
    bool ok = out.file && out.ok && !fflush(out.file) && !fsync(fileno(out.file));
    ok = (!out.file || !fclose(out.file)) && ok && !rename(temporary, path);
    if (!ok) {
        fail(error, "%s: %s", path, strerror(errno));
        if (out.file) remove(temporary);
    }
    XXH3_freeState(out.hash);
    cJSON_free(text);
    return ok;
}

/* Whether the file's last eight bytes are the hash of what stands before them. */
static bool file_is_whole(FILE *file, uint64_t size) {
    uint8_t *block = allocate_zeroed(HASH_BLOCK, 1), number[8];
    XXH3_state_t *hash = XXH3_createState();
    XXH3_64bits_reset(hash);
    rewind(file);
    bool ok = size > sizeof number;
    for (uint64_t left = ok ? size - sizeof number : 0, n; left && ok; left -= n) {
        n = left < HASH_BLOCK ? left : HASH_BLOCK;
        ok = fread(block, 1, (size_t)n, file) == n;
        if (ok) XXH3_64bits_update(hash, block, (size_t)n);
    }
    ok = ok && fread(number, 1, sizeof number, file) == sizeof number && load_u64(number) == XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    free(block);
    return ok;
}

static uint64_t read_whole(Fields *fields, const char *key) {
    const cJSON *item = field(fields, key);
    size_t value = 0;
    if (!item || !json_size(item, &value)) field_failed(fields, key, item, "an integer up to 2^53");
    return value;
}

/* Which noise the session draws, and how. */
static void read_settings(Session *session, Fields *fields) {
    session->stream = read_whole(fields, "stream");
    session->sampling = (Sampling){.seed = read_whole(fields, "seed"),
                                   .temperature = (float)read_number(fields, "temperature", -1e9, 1e9, REQUIRED),
                                   .top_p = (float)read_number(fields, "top_p", 0, 1, REQUIRED),
                                   .min_p = (float)read_number(fields, "min_p", 0, 1, REQUIRED),
                                   .repeat_penalty = (float)read_number(fields, "repeat_penalty", 1e-3, 1e3, REQUIRED),
                                   .top_k = read_int(fields, "top_k", 0, INT_MAX, REQUIRED)};
}

/* The header's fields against this engine. A file that passes can be restored. */
static bool check_header(const Runner *runner, const cJSON *header, const char *path, uint64_t page_bytes, Error *error) {
    const Engine *engine = &runner->engine;
    Fields fields = {.object = header, .path = path, .error = error};
    const cJSON *mark = field(&fields, "checkpoint"), *list = field(&fields, "ids"), *item;
    char identity[128];
    int n = cJSON_IsArray(list) ? cJSON_GetArraySize(list) : -1;
    row_identity(engine, identity);
    if (!cJSON_IsString(mark) || strcmp(mark->valuestring, identity)) field_failed(&fields, "checkpoint", mark, identity);
    if (n < 0) field_failed(&fields, "ids", NULL, "a list of ids");
    else cJSON_ArrayForEach(item, list)
            if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble < engine->config.vocab_size)
                || item->valuedouble != item->valueint)
                field_failed(&fields, "ids", item, "ids of the vocabulary");
    int rows = read_int(&fields, "rows", 0, n < 0 ? 0 : n, REQUIRED);
    double image = read_number(&fields, "page_bytes", 0, 1e18, REQUIRED);
    int draft_rows = read_int(&fields, "draft_rows", 0, rows, 0), row_bytes = read_int(&fields, "draft_row_bytes", 0, INT_MAX, 0);
    Session settings;
    read_settings(&settings, &fields);
    if (fields.failed) return false;
    if (n > engine->cache.context)
        return fail(error, "%s: its %d tokens do not fit the context of %d: raise -c", path, n, engine->cache.context);
    uint64_t wanted = saved_bytes(&engine->cache, rows) + (uint64_t)draft_rows * (uint64_t)row_bytes;
    return (image == (double)page_image_bytes(&engine->cache) && page_bytes == wanted)
        || fail(error, "%s: holds %" PRIu64 " bytes of rows, wanted %" PRIu64 " for its %d rows", path, page_bytes, wanted, rows);
}

/* Reads what stands before the pages and checks every byte of the file. */
static cJSON *read_session_header(const Runner *runner, FILE *file, const char *path, Error *error) {
    struct stat info;
    uint8_t begin[sizeof session_magic + 8];
    if (fstat(fileno(file), &info)) return fail(error, "%s: %s", path, strerror(errno)), NULL;
    uint64_t size = (uint64_t)info.st_size, fixed = sizeof begin + 8;
    if (fread(begin, 1, sizeof begin, file) != sizeof begin || memcmp(begin, session_magic, 13))
        return fail(error, "%s: not a session that tide saved", path), NULL;
    if (memcmp(begin, session_magic, sizeof session_magic))
        return fail(error, "%s: a session of another version of tide; this one reads \"%.14s\"", path, session_magic), NULL;
    uint64_t length = load_u64(begin + sizeof session_magic);
    if (size < fixed || length > size - fixed || length > (16u << 20) + 16 * (uint64_t)runner->engine.cache.context
        || !file_is_whole(file, size))
        return fail(error, "%s: the session is truncated or damaged: its check does not match its %" PRIu64 " bytes", path, size),
               NULL;
    char *text = allocate_zeroed((size_t)length + 1, 1);
    bool ok = !fseeko(file, sizeof begin, SEEK_SET) && fread(text, 1, (size_t)length, file) == length;
    cJSON *header = ok ? json_parse(text, (size_t)length, path, error) : NULL;
    if (!ok) fail(error, "%s: %s", path, strerror(errno));
    free(text);
    if (header && check_header(runner, header, path, size - fixed - length, error)) return header;
    cJSON_Delete(header);
    return NULL;
}

cJSON *session_open(const Runner *runner, const char *path, FILE **file, Error *error) {
    struct stat info;
    if (!stat(path, &info) && !S_ISREG(info.st_mode)) return fail(error, "%s: not a regular file", path), NULL;
    *file = fopen(path, "r");
    if (!*file) return fail(error, "%s: %s", path, strerror(errno)), NULL;
    cJSON *header = read_session_header(runner, *file, path, error);
    if (!header) fclose(*file);
    return header;
}

/* The rows of the draft ring behind the pages, where they are of this drafter. */
static bool restore_ring(Engine *engine, const Session *session, Fields *fields, FILE *file) {
    Cache *cache = &engine->cache;
    char identity[128];
    const cJSON *mark = field(fields, "drafter");
    int n = read_int(fields, "draft_rows", 0, INT_MAX, 0);
    size_t bytes = (size_t)read_int(fields, "draft_row_bytes", 0, INT_MAX, 0);
    if (!engine->drafter.config.architecture || !cJSON_IsString(mark) || bytes != draft_row_bytes(cache) || n > cache->draft_rows)
        return true;
    draft_identity(engine, identity);
    if (strcmp(identity, mark->valuestring)) return true;
    uint8_t *row = allocate_zeroed(bytes, 1);
    bool ok = true;
    for (int t = session->cached - n; t < session->cached && ok; t++) {
        ok = fread(row, 1, bytes, file) == bytes;
        if (ok) copy_draft_row(cache, session->slot, t, row, true);
    }
    free(row);
    if (ok) cache->session[session->slot].draft_first = session->cached - n;
    if (ok) cache->session[session->slot].draft_end = session->cached;
    return ok;
}

/* Everything was checked; only reading can still fail, and then the session is empty. */
bool session_restore(Runner *runner, Session *session, const cJSON *header, FILE *file, const char *path, Error *error) {
    Cache *cache = &runner->engine.cache;
    Fields fields = {.object = header, .path = path, .error = error};
    const cJSON *item;
    int rows = read_int(&fields, "rows", 0, INT_MAX, REQUIRED), nothing;
    size_t bytes = page_image_bytes(cache);
    uint8_t *image = allocate_zeroed(bytes, 1);
    arrsetlen(session->ids, 0);
    cJSON_ArrayForEach(item, field(&fields, "ids")) arrput(session->ids, item->valueint);
    read_settings(session, &fields);
    cache_release(cache, session->slot);
    while (!cache_admit(cache, session->slot, NULL, 0, cache->context, &nothing)) cache_step(cache);
    bool ok = true;
    for (int left = rows / cache->ratio; left > 0 && ok; left -= PAGE_ROWS) {
        ok = fread(image, 1, bytes, file) == bytes;
        if (ok) cache_append_page(cache, session->slot, image, left < PAGE_ROWS ? left : PAGE_ROWS);
    }
    free(image);
    uint8_t *trails = allocate_zeroed(trail_image_bytes(cache, rows), 1);
    ok = ok && fread(trails, 1, trail_image_bytes(cache, rows), file) == trail_image_bytes(cache, rows);
    if (ok && cache->trail_layers) cache_append_trails(cache, session->slot, rows, trails);
    free(trails);
    session->cached = ok ? rows : 0;
    ok = ok && restore_ring(&runner->engine, session, &fields, file);
    if (ok) return true;
    cache_release(cache, session->slot);
    session->cached = 0;
    arrsetlen(session->ids, 0);
    return fail(error, "%s: could not be read a second time", path);
}
