/* engine.h: the vocabulary of tide.
 *
 * Everything that goes through a model is a list of rows: (session, position, token). A prefill chunk, one decode step and
 * a block of drafted tokens are all just rows, so one forward() serves them all, and a row's result never depends on
 * which other rows share the pass.
 *
 *     Checkpoint   the published files, mapped          (read-only, as long as the process)
 *     Config       what config.json says                (read-only)
 *     Weights      every tensor, bound once and checked (pointers into the checkpoint)
 *     Cache        the key/value history of every session, on the device and on the host
 *     State        activations of the pass in flight    (overwritten by each pass)
 *     Backend      the operations that work on them, in C (backend.c) or CUDA
 *     Session      one conversation or prompt: its ids and how far the cache has them
 *     Runner       an engine and its tokenizer, and the rounds that sessions share
 *
 * engine.c is the pipeline, backend.c its operations in C, tokenizer.c the text on both of its ends, tide.c the program around
 * them, bench.c what it measures.
 *
 * Conventions. Library functions return false and fill an Error with one line, which a command prints; only running out of
 * memory ends the program where it happens. Shapes in comments are row-major, outermost first. "rows" counts rows of the
 * pass, "dim" a vector's length. Arrays marked "stb_ds" are grown with arrput() and freed with arrfree() from <stb/stb_ds.h>.
 */
#ifndef TIDE_ENGINE_H
#define TIDE_ENGINE_H

#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------------------------------------------------------------
 * Errors and memory
 */

typedef struct Backend Backend;     /* the operations, below */

typedef struct Error {
    char text[1024];            /* one line, no newline: what failed, where, what was found, what was wanted */
} Error;

/* Formats the message and returns false, so that callers can write `return fail(error, ...)`. Control characters in the
 * arguments are replaced, since names inside a checkpoint are untrusted and the message goes to a terminal. */
bool fail(Error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Control characters become '?', in place, so that a name inside a file cannot steer the terminal. Returns the text. */
char *replace_controls(char *text);

/* Allocation that ends the program with one line when memory is exhausted or the decode loop may not allocate. */
void *allocate_zeroed(size_t count, size_t size);
void *checked_realloc(void *block, size_t size);
char *copy_string(const char *text);

/* What stb_ds.h takes its memory by: every file includes this header first, so that all arrays have the same. */
#define STBDS_REALLOC(context, block, size) checked_realloc(block, size)
#define STBDS_FREE(context, block) free(block)

/* An invariant that the debug build insists on. */
#ifdef TIDE_DEBUG
#define REQUIRE(condition)                                                                                                      \
    do {                                                                                                                        \
        if (!(condition)) fprintf(stderr, "%s:%d: a rule is broken: %s\n", __FILE__, __LINE__, #condition), abort();    \
    } while (0)
#else
#define REQUIRE(condition) ((void)0)
#endif

/* "DIRECTORY/NAME" in a buffer of the caller's; "" where that is too long to be a path. */
const char *join(char buffer[PATH_MAX], const char *directory, const char *name);

/* Numbers as files hold them: eight bytes, little-endian. */
uint64_t load_u64(const uint8_t in[8]);
void store_u64(uint8_t out[8], uint64_t value);

/* Reads a whole file; the buffer has a NUL after its last byte. Refuses files larger than `limit` bytes.
 * The caller frees *data. */
bool read_file(const char *path, size_t limit, char **data, size_t *length, Error *error);

/* ---------------------------------------------------------------------------------------------------------------------
 * JSON
 */

enum { MAX_JSON_FILE = 256 << 20 };                 /* bytes of a JSON file that is read whole */

/* Parses a whole text: valid UTF-8, one JSON value, nothing behind it, no \u0000 (cJSON would cut the string there). `name`
 * goes into the message. The caller frees it with cJSON_Delete(). */
struct cJSON *json_parse(const char *text, size_t length, const char *name, Error *error);

/* A non-negative integer that a double holds exactly; false where the item (or NULL) is something else. */
bool json_size(const struct cJSON *item, size_t *value);

/* An array of n ids; cJSON by itself makes none of no numbers. */
struct cJSON *json_ids(const int *ids, int n);

typedef struct Fields {         /* typed access to one object; remembers its first failure, so many reads are checked once */
    const struct cJSON *object;
    const char *path;           /* of the file, for messages */
    bool failed;
    Error *error;
} Fields;

enum { REQUIRED = INT_MIN };    /* as a fallback: the key must be there */

/* The value of that key; NULL where there is none or it is null. */
const struct cJSON *field(const Fields *fields, const char *key);

/* The value within [low, high], or the fallback where the key is not there; anything else fails the fields, and returns a value
 * that can be computed with. */
double read_number(Fields *fields, const char *key, double low, double high, double fallback);
int read_int(Fields *fields, const char *key, int low, int high, int fallback);
bool read_bool(Fields *fields, const char *key, bool fallback);

/* Fails the fields, unless they have failed already: "PATH: KEY: found FOUND (or nothing), wanted WANTED". */
void field_failed(Fields *fields, const char *key, const struct cJSON *found, const char *wanted);

/* ---------------------------------------------------------------------------------------------------------------------
 * Checkpoints: safetensors files as published (header: u64 length, JSON {name: {dtype, shape, data_offsets}}, data)
 */

typedef enum DType {
    DTYPE_UNKNOWN, DTYPE_BOOL, DTYPE_U8, DTYPE_I8, DTYPE_U16, DTYPE_I16, DTYPE_U32, DTYPE_I32, DTYPE_U64, DTYPE_I64,
    DTYPE_F4_E2M1, DTYPE_F8_E4M3, DTYPE_F8_E5M2, DTYPE_F8_E8M0, DTYPE_F16, DTYPE_BF16, DTYPE_F32, DTYPE_F64, DTYPE_COUNT
} DType;

enum { TENSOR_MAX_RANK = 8 };

/* Bytes of one stored value; 0 for a type that tide does not know, or whose values share bytes. */
static inline size_t dtype_size(DType dtype) {
    switch (dtype) {
    case DTYPE_BOOL: case DTYPE_U8: case DTYPE_I8: case DTYPE_F8_E4M3: case DTYPE_F8_E5M2: case DTYPE_F8_E8M0: return 1;
    case DTYPE_U16: case DTYPE_I16: case DTYPE_F16: case DTYPE_BF16: return 2;
    case DTYPE_U32: case DTYPE_I32: case DTYPE_F32: return 4;
    case DTYPE_U64: case DTYPE_I64: case DTYPE_F64: return 8;
    default: return 0;
    }
}

/* Bytes of n stored values: of e2m1 two neighbours share a byte, the first of them its lower half. */
static inline size_t stored_bytes(DType dtype, size_t n) {
    return dtype == DTYPE_F4_E2M1 ? (n + 1) / 2 : n * dtype_size(dtype);
}

typedef struct Tensor {
    char *name;
    char dtype_name[16];        /* as the file spells it, also when tide does not know it */
    DType dtype;
    int rank;
    int64_t shape[TENSOR_MAX_RANK];
    const uint8_t *data;        /* inside the mapping; any alignment */
    size_t size;                /* bytes */
    int file;                   /* index into Checkpoint.files */
} Tensor;

typedef struct MappedFile {
    char *path;
    const uint8_t *data;
    size_t size;
} MappedFile;

typedef struct Checkpoint {
    char *directory;
    MappedFile *files;                              /* stb_ds [files] */
    Tensor *tensors;                                /* stb_ds [tensors], in file order */
    struct { char *key; int value; } *index;        /* stb_ds string map: tensor name -> position in tensors */
    bool dummy;                 /* of no file: has every tensor that is looked for, of random values (--dummy) */
    void (*progress)(size_t bound, size_t all);     /* while its weights are bound: bytes so far, and in the files; or NULL */
} Checkpoint;

/* Maps every shard that model.safetensors.index.json names, or the only *.safetensors file of the directory when there is
 * no index. Checks every header, offset, overlap and index entry; reads no weight. */
bool checkpoint_open(Checkpoint *checkpoint, const char *directory, Error *error);
void checkpoint_close(Checkpoint *checkpoint);

/* Of all its files. */
size_t checkpoint_bytes(const Checkpoint *checkpoint);

/* Whether it brings layers that draft: DeepSeek-V4's mtp.0, ... */
bool has_stages(const Checkpoint *checkpoint);

/* The tensor of that name, or NULL. */
const Tensor *checkpoint_find(const Checkpoint *checkpoint, const char *name);

/* "[3, 4]" in a buffer of the caller's. */
const char *shape_text(char buffer[128], int rank, const int64_t *shape);

/* ---------------------------------------------------------------------------------------------------------------------
 * Config: the Hugging Face keys, one family at a time
 */

enum {
    MAX_CONTEXT = 1 << 24,      /* largest max_position_embeddings */
    MAX_ROW_WIDTH = 1024,       /* floats of one cached vector; bounds the tiles of the attention operations */
    MAX_HEADS = 1024, MAX_EXPERTS = 4096,
    MAX_STREAMS = 8,            /* hc_mult */
    MAX_RATIO = 256,            /* positions of one compressed row */
    MAX_NGRAM = 8, MAX_ENGRAM_HEADS = 64, MAX_ENGRAMS = 16,
    MAX_BLOCKS = 1 << 16,       /* candidate_topk_blocks */
};

typedef enum Family { FAMILY_QWEN3, FAMILY_GLM_MOE_DSA, FAMILY_DEEPSEEK_V32, FAMILY_DEEPSEEK_V4, FAMILY_DEEPSEEK_V41 } Family;

/* What a layer of DeepSeek-V4 attends to beyond its window of the last positions. */
typedef enum Compression {
    COMPRESSION_NONE,
    COMPRESSION_SPARSE,         /* rows of sparse_ratio positions, each made of its group and the one before; an indexer selects */
    COMPRESSION_HEAVY,          /* rows of heavy_ratio positions, all of them */
} Compression;

typedef struct RopeConfig {
    double rope_theta;
    bool yarn;                                      /* rope_type "yarn"; otherwise plain */
    double factor, beta_fast, beta_slow;            /* yarn only, and the next two lines */
    double mscale, mscale_all_dim, attention_factor;/* 0 where the file does not say */
    int original_max_position_embeddings;
} RopeConfig;

typedef struct Config {
    Family family;
    const char *model_type;                         /* the family's name, static */
    int vocab_size, hidden_size, intermediate_size, num_hidden_layers, max_position_embeddings;
    int num_attention_heads, num_key_value_heads, head_dim;     /* the last two: qwen3 only */
    bool tie_word_embeddings;
    bool quantised;                                 /* fp8 by blocks, as quantization_config says */
    float rms_norm_eps;
    RopeConfig rope;
    /* multi-head latent attention: glm_moe_dsa, deepseek_v32 */
    int q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
    float latent_norm_eps;                          /* of q_a_layernorm and kv_a_layernorm */
    /* lightning indexer */
    int index_n_heads, index_head_dim, index_topk;
    bool indexer_rope_interleave;                   /* pairs (2i, 2i+1) if true, (i, i + d/2) if false */
    bool *indexer_full;                             /* [num_hidden_layers] false: reuse the nearest earlier full layer's picks */
    /* mixture of experts */
    int n_routed_experts, num_experts_per_tok, n_shared_experts, moe_intermediate_size, n_group, topk_group;
    float routed_scaling_factor;
    bool norm_topk_prob;
    bool *mlp_sparse;                               /* [num_hidden_layers] true: experts, false: one dense MLP */
    /* deepseek_v4: head_dim, sliding_window and the o_ and hc_ keys; q_lora_rank, qk_rope_head_dim, indexer and experts are
     * above */
    Compression *compression;                       /* [num_hidden_layers] */
    int sparse_ratio, heavy_ratio;                  /* positions of one compressed row */
    RopeConfig compress_rope;                       /* of everything in a layer that compresses; the others have `rope` */
    bool *hash_routed;                              /* [num_hidden_layers] the token's id chooses the experts */
    int sliding_window, o_groups, o_lora_rank, hc_mult, hc_sinkhorn_iters;
    float hc_eps, swiglu_limit;                     /* swiglu_limit 0: no limit */
    bool qat;                                       /* rounds as the reference does: --qat */
    int weight_block;                               /* rows and columns of an e4m3 matrix that share a scale; and values of its
                                                     * input that --qat rounds by one */
    /* deepseek_v41: compressed rows are made by few layers, selected by some, read by most */
    int n_sources;
    int *source_ratio;                              /* [n_sources] positions of a row */
    int *source;                                    /* [num_hidden_layers] whose rows the layer reads, or -1 */
    bool *makes_rows, *selects;                     /* [num_hidden_layers] the source's rows and index keys; the selection that is
                                                     * read until the next */
    int candidate_source_layer_id;                  /* later selections stay in the blocks that this one kept; -1: everywhere */
    int candidate_topk_blocks, candidate_block_size;
    int engram_order, engram_n_heads, engram_head_dim, engram_pad_token_id, engram_compressed_vocab_size;
    int64_t engram_vocab_size;
    int64_t *engram_rows;                           /* [num_hidden_layers] of the layer's table; 0: it has none */
    /* generation_config.json, where there is one */
    int eos_token_id[16], n_eos;
    float temperature, top_p, min_p, repetition_penalty;        /* transformers' defaults where the file does not say */
    int top_k;
} Config;

/* Reads DIR/config.json and DIR/generation_config.json (optional). Refuses what tide does not implement, by name. */
bool config_read(Config *config, const char *directory, Error *error);
void config_free(Config *config);

/* Whether an indexer selects what the family attends to: in every one but qwen3. */
bool has_indexer(const Config *config);

/* Whether it attends over latents in absorbed form (DeepSeek-V2): glm_moe_dsa, deepseek_v32. */
bool has_latent_attention(const Config *config);

/* Residual streams of a row: hc_mult of deepseek_v4 and deepseek_v41, 1 of the others. */
int residual_streams(const Config *config);

/* Whether the layer runs an indexer of its own. */
bool selects_rows(const Config *config, int layer);

/* ---------------------------------------------------------------------------------------------------------------------
 * Weights: typed fields bound once; data stays in its stored format
 */

enum {
    SCALE_BLOCK = 128,          /* rows and columns that share one scale of an e4m3 matrix */
    EXPONENT_BLOCK = 32,        /* columns of a row that share one of an e2m1 matrix */
};

static inline float bits_to_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

/* One stored value as f32; of e2m1 the one in the lower four bits. The fp8 and f16 forms shift the bits into f32's place and
 * repair the exponent by a multiplication, which makes subnormals come out right by itself. */
static inline float widen(const uint8_t *p, DType dtype) {
    uint32_t bits = p[0];
    switch (dtype) {
    case DTYPE_F32: memcpy(&bits, p, 4); return bits_to_float(bits);
    case DTYPE_BF16: return bits_to_float((uint32_t)(p[0] | p[1] << 8) << 16);
    case DTYPE_F16: {
        bits |= (uint32_t)p[1] << 8;
        float magnitude = bits_to_float((bits & 0x7fff) << 13) * 0x1p112f;
        uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
        return bits_to_float(float_to_bits(magnitude) | special | (bits & 0x8000) << 16);
    }
    case DTYPE_F8_E4M3: {
        float magnitude = bits_to_float((bits & 0x7f) << 20) * 0x1p120f;
        uint32_t nan = (bits & 0x7f) == 0x7f ? 0x7fc00000 : 0;
        return bits_to_float(float_to_bits(magnitude) | nan | (bits & 0x80) << 24);
    }
    case DTYPE_F8_E8M0: return bits == 255 ? NAN : bits_to_float(bits ? bits << 23 : 0x400000);
    case DTYPE_F4_E2M1: return bits_to_float(float_to_bits(bits_to_float((bits & 7) << 22) * 0x1p126f) | (bits & 8) << 28);
    default: return NAN;
    }
}

typedef struct Matrix {         /* y = W x; row r, column c of W is data[r * cols + c] times its block's scale */
    const uint8_t *data;        /* [rows, cols] of dtype, any alignment; a row of e2m1 is ceil(cols / 2) bytes */
    const float *scale;         /* [ceil(whole rows / block), scale_cols] f32, or NULL */
    DType dtype;                /* F32, F16, BF16 or F8_E4M3; F4_E2M1, which only linear and experts take */
    int rows, cols;
    int scale_cols;             /* ceil(cols / block); of e2m1, ceil(cols / 32) */
    int first_row;              /* of this view inside the stored tensor: scale blocks count from the tensor's row 0 */
    const uint8_t *exponents;   /* e2m1: [whole rows, scale_cols] E8M0 as stored, 2^(e - 127); otherwise NULL */
    int block;                  /* rows and columns of e4m3 that share a scale; 0: SCALE_BLOCK */
} Matrix;

typedef struct Projection {     /* one of the products of the same x */
    float *y;
    size_t y_stride;
    const Matrix *w;            /* of any stored type, as many columns as the others' */
} Projection;

enum { MAX_PROJECTIONS = 8 };

/* How the parallel residual streams enter a sublayer and take up what it adds: fn of all streams gives the logits of `pre`,
 * then of `post`, then of the matrix that mixes the streams; each of the three has its own scale. */
typedef struct HyperWeights {
    Matrix fn;                                      /* [mixes, hc_mult * hidden]; (2 + hc_mult) * hc_mult, the head's hc_mult */
    const float *base, *scale;                      /* [mixes], [3] or of the head [1] f32 */
} HyperWeights;

/* Engram: a table of vectors that the last tokens name, by hashes of their 2-grams, 3-grams, and so on, several of each. The
 * table is far larger than all other weights of a layer and of it a few rows are read for a token, so it stays in the mapping. */
typedef struct EngramWeights {
    const uint8_t *table;                           /* [rows, engram_head_dim] of dtype */
    const uint8_t *exponents;                       /* of e4m3: [rows, ceil(engram_head_dim / 32)] E8M0; otherwise NULL */
    DType dtype;
    Matrix wkv;                                     /* [(hc_mult + 1) * hidden, columns * engram_head_dim]: a key for each stream,
                                                     * and the value that they gate */
    const float *q_weight, *k_weight;               /* [hc_mult, hidden] f32 */
    uint64_t multipliers[MAX_NGRAM];                /* of a token by how far it lies back */
    int64_t primes[(MAX_NGRAM - 1) * MAX_ENGRAM_HEADS], offsets[(MAX_NGRAM - 1) * MAX_ENGRAM_HEADS];    /* of each column: the
                                                     * hash is below the prime, and counts from the offset */
} EngramWeights;

/* What makes one row of a group of positions: channel by channel a softmax over the group weighs the values. */
typedef struct CompressorWeights {
    Matrix wkv, wgate;                              /* [width, hidden]; width: dim, or 2 * dim where groups overlap */
    const float *ape;                               /* [ratio, width] f32, added to the gates by place in the group; NULL: none */
    const float *norm;                              /* [dim] f32 */
} CompressorWeights;

typedef struct LayerWeights {
    const float *input_layernorm, *post_attention_layernorm;    /* [hidden_size] f32 */
    /* qwen3 */
    Matrix q_proj, k_proj, v_proj;                  /* [heads * head_dim, hidden], [kv_heads * head_dim, hidden] twice */
    const float *q_norm, *k_norm;                   /* [head_dim] f32 */
    /* multi-head latent attention */
    Matrix q_a_proj;                                /* [q_lora_rank, hidden] */
    const float *q_a_layernorm;                     /* [q_lora_rank] f32 */
    Matrix q_b_proj;                                /* [heads * (nope + rope), q_lora_rank] */
    Matrix kv_a_proj;                               /* [kv_lora_rank + rope, hidden], "kv_a_proj_with_mqa" */
    const float *kv_a_layernorm;                    /* [kv_lora_rank] f32 */
    Matrix kv_b_proj;                               /* [heads * (nope + v_head_dim), kv_lora_rank] */
    /* indexer, full layers only */
    Matrix indexer_wq_b;                            /* [index_n_heads * index_head_dim, q_lora_rank] */
    Matrix indexer_wk;                              /* [index_head_dim, hidden] */
    Matrix indexer_weights_proj;                    /* [index_n_heads, hidden] */
    const float *indexer_k_norm, *indexer_k_norm_bias;          /* [index_head_dim] f32 */
    Matrix o_proj;                                  /* [hidden, heads * head_dim or heads * v_head_dim] */
    /* feed-forward: gate/up/down of the dense MLP, or of the shared expert in a sparse layer */
    Matrix gate_proj, up_proj, down_proj;           /* [inter, hidden] twice, [hidden, inter]; rows 0 where absent */
    Matrix router;                                  /* [n_routed_experts, hidden], "mlp.gate" */
    const float *e_score_correction_bias;           /* [n_routed_experts] f32 */
    const Matrix *expert_gate, *expert_up, *expert_down;        /* in the operations' memory: [n_routed_experts] of [moe_inter,
                                                     * hidden] twice, [hidden, moe_inter] */
    DType expert_dtype;                             /* of all of them */
    /* deepseek_v4, beside q_a_proj, q_a_layernorm, q_b_proj (wq_a, q_norm, wq_b), the indexer's wq_b and weights_proj, the
     * experts, and as input_layernorm and post_attention_layernorm the norms of what enters the sublayers */
    HyperWeights attention_hyper, mlp_hyper;
    Matrix wkv;                                     /* [head_dim, hidden]: the one key, and value, that all heads share */
    const float *kv_norm;                           /* [head_dim] f32 */
    const float *attention_sink;                    /* [heads] f32: a logit more in each head's softmax */
    Matrix o_a_proj;                                /* [o_groups * o_lora_rank, heads / o_groups * head_dim]; o_proj is [hidden,
                                                     * o_groups * o_lora_rank] */
    CompressorWeights compressor, index_compressor;
    const int *hash_experts;                        /* [vocab_size, num_experts_per_tok] of a hash-routed layer, else NULL */
    /* deepseek_v41: as deepseek_v4, with indexer_wk and indexer_k_norm where rows are made */
    const EngramWeights *engram;                    /* NULL: the layer has none */
} LayerWeights;

typedef struct Weights {
    Matrix embed_tokens;                            /* [vocab_size, hidden] */
    LayerWeights *layers;                           /* [num_hidden_layers] */
    const float *norm;                              /* [hidden] f32 */
    Matrix lm_head;                                 /* [vocab_size, hidden]; embed_tokens again when tied */
    HyperWeights head_hyper;                        /* deepseek_v4 */
    const int *token_map;                           /* [vocab_size] deepseek_v41: what Engram takes a token for */
    void **owned;                                   /* stb_ds: what was made from the file: vectors and scales in f32, lists */
    size_t parameters, bytes;                       /* of the bound tensors, as stored */
} Weights;

/* Binds every tensor the family needs after checking dtype, rank and each dimension. backend: whose memory they are to be in, or
 * NULL: nothing is moved, they stay where the checkpoint is mapped. */
bool weights_bind(Weights *weights, const Checkpoint *checkpoint, const Config *config, const Backend *backend, Error *error);
void weights_free(Weights *weights);

/* ---------------------------------------------------------------------------------------------------------------------
 * Rows and the KV hierarchy (Adaptive HiSparse: paper 3.1, 3.2, 3.5; the reference design of the spec, A8)
 *
 * A session's history is a list of rows, one a position (or, of compressed rows, one for `ratio` positions, which exists when the
 * last of them does), 64 to a page. Every source (the payload of one layer) has the same
 * pages under the same numbers: a page id names a bundle, the same 64 rows in all sources at once, and bundles are what is
 * lent, copied and counted. On the device a session holds, for as long as it is admitted, a tail (the rows being written), a
 * hot cache (slots that selected rows are fetched into) and its index keys; while memory is spare, pages of its history too.
 * Every complete row is ready on the device or complete in host memory (in hisparse mode soon the latter). A row never changes
 * once it is complete, so any copy of it is as good as another.
 */

enum {
    MAX_PASS_ROWS = 512,        /* of one pass, and so of sessions that decode together */
    PAGE_ROWS = 64,
    TAIL_PAGES = 2,             /* required of every session: a block of rows may cross from one page into the next */
    QUERY_BLOCK = 8,            /* K_max: rows of one session that are resolved together */
    REPOPULATE_PAGES = 8,       /* bundles started a round while memory is spare */
    MAX_BLOCK = 32,             /* rows of a draft block */
    BACKUP_PAGES = 1,           /* bundles backed up a round before anything asks for their memory */
};

/* Ids of different spaces are different types, so that one cannot pass for another. Page 0 of a pool is never handed out: a
 * page id of 0 means nowhere, so cleared tables name nothing. A row id below 0 means nowhere. */
typedef struct SourceId { int id; } SourceId;
typedef struct DevicePage { int32_t id; } DevicePage;
typedef struct HostPage { int32_t id; } HostPage;
typedef struct DeviceRow { int32_t id; } DeviceRow;     /* page * 64 + row; from n_rows of the pool on: a row of staging */
typedef struct HostRow { int64_t id; } HostRow;         /* page * 64 + row */

typedef struct Row {
    int session;                /* slot, 0 .. Cache.sessions - 1 */
    int position;               /* 0-based place in the session */
    int token;
} Row;

typedef enum KvDtype { KV_F32, KV_BF16, KV_F8, KV_F4 } KvDtype;

/* What scales codes of eight or four bits: the largest value of a group over the largest code; or that as a power of two,
 * rounded up, in a byte; or rounded to e4m3. */
typedef enum ScaleKind { SCALES_F32, SCALES_E8M0, SCALES_E4M3 } ScaleKind;

/* How one cached vector lies in memory. `quantised` values come first: f32 or bf16 as they are, or e4m3 or packed e2m1 followed
 * by one scale per `group` values. `plain` values follow: f32 in an f32 cache, bf16 otherwise (they carry the rope part, which
 * e4m3 would blur). With 512 + 64 and groups of 128 the fp8 row is the 656 bytes of FlashMLA: 512 + 4 * 4 + 64 * 2. */
typedef struct RowFormat {
    KvDtype dtype;
    int quantised, plain, group;
    size_t bytes;               /* of the values */
    size_t stride;              /* from one row to the next, on the device and on the host: bytes, rounded up */
    ScaleKind scales;
} RowFormat;

RowFormat row_format(KvDtype dtype, int quantised, int plain, int group);       /* with f32 scales */
RowFormat scaled_row_format(KvDtype dtype, int quantised, int plain, int group, ScaleKind scales);

/* Rows of index keys, in fp8 with one scale for 128 values. They cross the link by whole pages, so whole 16 bytes do for a stride:
 * of whole 64, a third of what the indexer reads would be empty. */
RowFormat index_row_format(KvDtype dtype, int dim);

typedef enum KvMode {
    MODE_RESIDENT,              /* the whole history on the device; a session waits until there is room for all of it */
    MODE_HISPARSE,              /* a fixed hot cache, history on the host, copied there as it is written; nothing lent */
    MODE_ADAPTIVE,              /* spare pages are lent to history and recalled for new sessions */
    MODES,
} KvMode;

extern const char *const kv_mode_names[MODES];      /* as --kv spells them */
extern const char *const kv_dtype_names[];          /* as --kv-dtype does */

typedef enum Reclaim { RECLAIM_WHOLE, RECLAIM_PROPORTIONAL } Reclaim;   /* eq. 4, or a share from every session */
typedef enum Lookup { LOOKUP_DIRECT, LOOKUP_SCAN } Lookup;  /* of hot rows: an array from row to slot, or the paper's scan */
typedef enum Tier { TIER_TAIL, TIER_OPTIONAL, TIER_HOT, TIER_HOST, TIERS } Tier;

typedef struct Selection {      /* which positions each row of the pass attends to */
    int *ids;                   /* [rows, capacity] ascending positions, then -1 */
    int *count;                 /* [rows] */
    int capacity;               /* k = min(index_topk, context) */
} Selection;

/* What a layer has of a session's last positions, where it looks back by distance and not by selection (DeepSeek-V4): its
 * window, and what its compressors will make rows of. Committed positions lie in a ring. A pass writes its own beside it, and
 * those that it keeps enter the ring with the commit: what is rejected was never there. */
typedef struct Trail {
    int length;                 /* positions that the ring holds; 0: the layer has no such trail */
    size_t stride;              /* bytes of a row */
    uint8_t *ring;              /* [sessions, length] rows: position p at p mod length */
    uint8_t *pass;              /* [pass_rows] rows: those of the pass in flight, in its order */
} Trail;

enum { TRAIL_WINDOW, TRAIL_GROUP, TRAIL_INDEX_GROUP, TRAIL_TOKENS, TRAILS };    /* of each layer; the last only of layer 0 */

/* The row of an earlier position, or the row's own, of the same session as row r of the pass. */
static inline uint8_t *trail_row(const Trail *trail, const Row *rows, int r, int position) {
    int at = r - (rows[r].position - position), session = rows[r].session;
    if (at >= 0 && rows[at].session == session) return trail->pass + (size_t)at * trail->stride;
    return trail->ring + ((size_t)session * (size_t)trail->length + (size_t)(position % trail->length)) * trail->stride;
}

/* The rows to copy from host to device before a run of the pass can attend, in ascending order within each session. Made
 * by the resolve of a producing layer, replayed for each layer that follows it: their slots have the same numbers. */
typedef struct MissPlan {
    HostRow *from;              /* [capacity] of what follows, each backend has its own order */
    DeviceRow *to;              /* [capacity] */
    int *count;                 /* [rows] entries of each run; on the GPU, of the block that begins at the row */
    int capacity;
} MissPlan;

/* What a pass finds out as it goes, in the memory of its operations; read when all of it has run. */
typedef struct PassReport {
    int bad_row, bad_place;     /* the first place in the pass, as check_finite() was told, where a row was not finite; or -1 */
    int picked[TIERS];          /* where the selected rows were found, counted per query */
    int fetched, staged;        /* rows that a resolve had to copy; those of them that did not fit the hot cache */
    int copied;                 /* rows copied for all sources */
} PassReport;

/* Where operations find a session's rows. The controller keeps it in host memory, and operations see it as it was when the pass
 * began (Cache.seen). `ready` names only pages whose bytes have arrived; the others name what a session owns. */
typedef struct CacheTables {
    int *tail_base;             /* [sessions] the first row of the tail, a multiple of 64 */
    DevicePage *tail;           /* [sessions, tail_ring] page p of the session at p mod tail_ring */
    DevicePage *ready;          /* [sessions, context_pages] pages of history on the device: the paper's optional map */
    DevicePage *hot;            /* [sessions, hot_pages] slot t is row t mod 64 of hot page t / 64 */
    DevicePage *index;          /* [sessions, context_pages] of the index pool */
    HostPage *host;             /* [sessions, context_pages] */
} CacheTables;

/* What only operations read and write: who sits in the hot caches. */
typedef struct HotTables {
    uint32_t *clock;            /* [sessions, groups] resolves so far: stamps count them */
    int32_t *tag;               /* [sessions, groups, hot_rows] the row a slot holds, or -1 */
    uint32_t *stamp;            /* [sessions, groups, hot_rows] the resolve that last used the slot; 0: none */
    uint16_t *slot_of;          /* [sessions, groups, context_pages * 64] slot + 1 of the row, or 0 */
} HotTables;

/* One page of one session's history, as the controller sees it. The order matters: from FILLING on it is optional history. */
typedef enum PageState {
    PAGE_ABSENT,                /* not on the device: on the host, or not written yet */
    PAGE_TAIL,                  /* being written, or complete and waiting for its host copy */
    PAGE_FILLING,               /* reserved; its bytes are on their way from the host; the device does not see it */
    PAGE_READY,                 /* on the device, seen, lent (resident: owned) */
} PageState;

typedef struct HistoryPage {
    DevicePage device;
    uint8_t state;              /* PageState */
    bool in_flight;             /* a copy from or to it has begun and is not complete */
    bool recalled;              /* leaves as soon as it has a host copy and its readers are done */
} HistoryPage;

typedef struct SessionPages {
    bool admitted;
    int committed;              /* n: positions below it are history, or complete in the tail */
    int placed;                 /* positions below it have a place; those from n on are of a pass that is not committed */
    int first_row;              /* of the pass in flight: its row at position n */
    int reached;                /* the largest n there was: trails hold what led there */
    int reserved_pages;         /* host and index pages held: prompt and all it may generate */
    HistoryPage *pages;         /* [context_pages] */
    DevicePage *spare;          /* [context_pages + tail_ring] pages for rows to come */
    int n_spare;
    int n_tail;                 /* pages in state PAGE_TAIL; with the spare ones at least TAIL_PAGES */
    int n_optional;             /* a_r of eq. 4: pages FILLING or READY and not recalled */
    int backed;                 /* pages below it are on the host, as far as looking ahead has come */
    long populated;             /* the round that last lent it a page */
    int draft_first, draft_end; /* positions whose rows lie in the draft ring; nothing is drafted from any other */
    int kept_first, kept_end;   /* positions whose features are kept, for when it drafts again */
} SessionPages;

/* A page of a prompt is known by its own ids and the page before it, so equal keys are equal prefixes. */
typedef struct PrefixKey {
    uint32_t parent;            /* HostInfo.serial of that page; 0: it is the first */
    int ids[PAGE_ROWS];
} PrefixKey;

typedef struct HostInfo {       /* of one host page */
    int refs;                   /* sessions and copies under way that hold it */
    int rows;                   /* complete in it, from its first */
    PrefixKey *key;             /* what it is known by to later prompts, and then it stays until its place is needed; or NULL */
    uint32_t serial;            /* no other page that had a key had this number; ids of pages come again */
    int depth;                  /* which page of those prompts it is */
    bool wanted;                /* a waiting session would share it: it is backed up at once */
    long used;                  /* round of the last admission that took it */
} HostInfo;

/* A copy of rows [first, first + count) of one page in all sources, and of its index keys, between the tiers. */
typedef struct Transfer {
    bool to_host;
    int session, page;          /* session -1: nobody waits for it any more, and both ends are given back */
    int first, count;
    DevicePage device;
    HostPage host;
    DevicePage index;           /* of the index pool; 0: the index keys stay */
} Transfer;

typedef struct PageList {
    int32_t *free;              /* [n_pages] a stack of page ids */
    int n_free, n_pages;        /* n_pages counts page 0 */
} PageList;

typedef struct Retired {        /* a device page that nothing names any more */
    PageList *list;             /* of the pool it belongs to */
    int32_t page;
    long round;                 /* the last one that may still read it */
} Retired;

typedef struct CacheStats {     /* since the start */
    uint64_t picked[TIERS];     /* selected rows by where they were found */
    uint64_t fetched;           /* rows copied from the host for a resolve, counted once for all sources of its group */
    uint64_t staged;            /* of those: beyond the hot cache */
    uint64_t bytes_fetched, bytes_backed_up, bytes_populated;
    uint64_t pages_lent, pages_recalled;    /* bundles that became optional history, and that were taken back */
    uint64_t admissions, shared_pages;      /* sessions; host pages they found already there */
    uint64_t admission_waits, tail_waits;   /* rounds a session waited to be admitted; times a tail waited for its backup */
    uint64_t history_pages, lent_pages;     /* summed over rounds: whole pages below the tails, and those that were lent */
    double resolve_seconds, fetch_seconds;          /* finding rows; copying missing ones */
    double control_seconds;     /* cache_step() and cache_commit() */
} CacheStats;

typedef struct Cache {
    const Backend *backend;
    /* the shape: fixed by plan_memory() */
    KvMode mode;
    Reclaim reclaim;
    Lookup lookup;
    int sessions, context;      /* slots, and positions each may hold */
    int ratio;                  /* positions of a row: 1, or of compressed rows more; of the finest source where they differ */
    int *stretch;               /* [sources] how many times as many each row of the source holds; its pages, which are of the same
                                 * positions, have that much fewer rows, and a group is a source. NULL: once, everywhere */
    int *rows_before;           /* [sources + 1] rows of a bundle in the sources before; with stretch */
    int sources, groups;        /* KV payloads; plan groups: a producing layer and the layers that follow it */
    int *group_of;              /* [sources] */
    int *member_of;             /* [sources] 0 for the producer, 1 for the layer after it, ... */
    int index_topk;             /* k: rows a query selects at most; 0: no indexer */
    int hot_rows;               /* B, of the finest source; 0 in resident mode */
    int live_sources;           /* chi: payloads that are staged at the same time */
    int staging_blocks, staging_rows;       /* blocks of several queries in a run, and K_max * k rows for each */
    int context_pages, hot_pages, tail_ring, reserve;       /* pages; reserve: M_res of eq. 3 */
    int whole_sessions;         /* sessions of the whole context that fit at once, with nothing lent */
    int pass_rows;              /* rows of one pass at most */
    bool ample;                 /* the pool holds everything at once: nothing will ever be recalled */
    KvDtype kv_dtype;           /* as --kv-dtype names it; not all rows need be of it */
    RowFormat format;           /* of kv: MLA latent | rope key; qwen3's keys | values; deepseek_v4's key and value in one */
    RowFormat window_format;    /* of the windows' trails */
    RowFormat index_format;     /* of index keys */
    int draft_layers, draft_rows;           /* of the drafter, 0 without one; R_d of eq. 9 */
    RowFormat draft_format;     /* of a layer's keys | values; of stages, which have one that is both, of that */
    int trail_layers;           /* layers that have trails, or heavily compressed rows; 0: none */
    int heavy_layers, heavy_rows, heavy_ratio;          /* those with such rows; of a session in each; positions of one */
    /* the tiers */
    uint8_t *device;            /* [sources, pages, 64] rows */
    uint8_t *staging;           /* [live_sources, staging_blocks * staging_rows] rows */
    uint8_t *index_keys;        /* [groups, index pages, 64] index keys; always on the device */
    uint8_t *draft_ring;        /* [draft_layers, sessions, draft_rows] rows: position t at t mod draft_rows (eq. 10) */
    Trail *trails, *seen_trails;            /* [trail_layers, TRAILS]; their rows are on the device, whatever is lent. As the
                                 * pipeline has them, and in the operations' memory */
    uint8_t *heavy;             /* [heavy_layers, sessions, heavy_rows] rows of `format`, likewise */
    int *history;               /* MEMORY_HOST: [sessions, context + 1 + MAX_BLOCK] each session's ids, and drafts behind them */
    uint8_t *host, *host_index; /* [sources, host pages, 64] rows; [groups, host pages, 64] index keys */
    CacheTables tables, seen;   /* as the controller writes them; and as operations see them, in their memory */
    size_t tables_bytes;        /* of either, from tail_base on */
    HotTables slots;
    PageList device_pages, index_pages, host_pages;
    int *staging_owner;         /* [live_sources] the group whose rows an arena holds, or -1; the debug build insists on it */
    uint64_t *bits;             /* [context_pages] scratch of a resolve: a bit per row of the session */
    int32_t *ranks;             /* [context_pages] bits set before the word */
    int32_t *missing;           /* [staging_rows] rows of the union, ascending */
    int32_t *places;            /* [staging_rows] the slot of each; ~place if it comes from the host, staging behind the slots */
    int32_t *victims;           /* [hot_rows] */
    /* the controller */
    SessionPages *session;      /* [sessions] */
    HostInfo *host_info;        /* [host pages] */
    struct { PrefixKey key; int32_t value; } *prefixes;     /* stb_ds map to host page ids */
    Transfer *transfers;        /* [pages of the device] in the order they began */
    int n_transfers;
    Retired *retired;           /* [pages of the device and of the index] */
    int n_retired;
    int n_recalled;             /* pages recalled that are not withdrawn yet */
    uint32_t serials;           /* the last that was given to a page with a key */
    bool prefix_wanted;         /* some host page is wanted */
    long rounds_begun, rounds_done;
    int cursor;                 /* round robin over sessions */
    bool waiting;               /* a session waits for device pages: nothing is lent */
    CacheStats stats;
    uint8_t *block, *host_block, *tables_block;
    size_t bytes, host_bytes;   /* planned: under --kv-budget, and in host memory */
    size_t least_bytes, least_host_bytes;   /* that one session of the whole context needs */
} Cache;

/* One source's rows on the device: ids below n_rows lie in the pool, the others in staging. */
typedef struct RowPool {
    uint8_t *rows;              /* [n_rows] rows */
    uint8_t *staging;
    int32_t n_rows;
} RowPool;

static inline DeviceRow row_of_page(DevicePage page, int position) {
    return (DeviceRow){page.id * PAGE_ROWS + position % PAGE_ROWS};
}

static inline bool no_page(DevicePage page) { return page.id == 0; }

/* Positions whose rows fill a page. */
static inline int page_positions(const Cache *cache) { return PAGE_ROWS * cache->ratio; }

/* Rows of a page of that source, or index keys of that group; and of the whole bundle in those before it. */
static inline int stretch_of(const Cache *cache, int source) { return cache->stretch ? cache->stretch[source] : 1; }

static inline int page_rows(const Cache *cache, int source) { return PAGE_ROWS / stretch_of(cache, source); }

static inline size_t rows_before(const Cache *cache, int source) {
    return cache->stretch ? (size_t)cache->rows_before[source] : (size_t)source * PAGE_ROWS;
}

static inline DeviceRow row_in_page(const Cache *cache, int source, DevicePage page, int row) {
    return (DeviceRow){page.id * page_rows(cache, source) + row % page_rows(cache, source)};
}

/* Where the rows of one source, and the index keys of one group, begin in each tier. */
static inline uint8_t *source_rows(const Cache *cache, SourceId source) {
    return cache->device + rows_before(cache, source.id) * (size_t)cache->device_pages.n_pages * cache->format.stride;
}

static inline uint8_t *host_source_rows(const Cache *cache, SourceId source) {
    return cache->host + rows_before(cache, source.id) * (size_t)cache->host_pages.n_pages * cache->format.stride;
}

static inline uint8_t *group_index_keys(const Cache *cache, int group) {
    return cache->index_keys + rows_before(cache, group) * (size_t)cache->index_pages.n_pages * cache->index_format.stride;
}

static inline uint8_t *host_group_index_keys(const Cache *cache, int group) {
    return cache->host_index + rows_before(cache, group) * (size_t)cache->host_pages.n_pages * cache->index_format.stride;
}

/* A source's rows as attention sees them. Its staging is the arena of its place in the group: those of a group live side by side
 * as far as the backend keeps several payloads in flight, and one after the other where it does not. */
static inline RowPool row_pool(const Cache *cache, SourceId source) {
    size_t arena = cache->live_sources ? (size_t)(cache->member_of[source.id] % cache->live_sources) : 0;
    size_t rows = (size_t)cache->staging_blocks * (size_t)cache->staging_rows;
    return (RowPool){source_rows(cache, source), cache->staging + arena * rows * cache->format.stride,
                     cache->device_pages.n_pages * page_rows(cache, source.id)};
}

/* The ids of a session, for the operations. */
static inline int *cache_history(const Cache *cache, int session) {
    return cache->history + (size_t)session * ((size_t)cache->context + 1 + MAX_BLOCK);
}

/* The heavily compressed rows of the layer that is number `layer` of those that have them: session s has its rows from s *
 * heavy_rows on. */
static inline RowPool heavy_pool(const Cache *cache, int layer) {
    size_t rows = (size_t)cache->sessions * (size_t)cache->heavy_rows;
    return (RowPool){cache->heavy + (size_t)layer * rows * cache->format.stride, NULL, (int32_t)rows};
}

/* Where the tables say that a page of a session lies. */
static inline HostPage *host_page(const Cache *cache, int session, int page) {
    return &cache->tables.host[(size_t)session * (size_t)cache->context_pages + (size_t)page];
}

static inline DevicePage *index_page(const Cache *cache, int session, int page) {
    return &cache->tables.index[(size_t)session * (size_t)cache->context_pages + (size_t)page];
}

static inline DevicePage *ready_page(const Cache *cache, int session, int page) {
    return &cache->tables.ready[(size_t)session * (size_t)cache->context_pages + (size_t)page];
}

static inline DevicePage *tail_page(const Cache *cache, int session, int page) {
    return &cache->tables.tail[session * cache->tail_ring + (page & (cache->tail_ring - 1))];
}

static inline DevicePage *hot_page(const Cache *cache, int session, int page) {
    return &cache->tables.hot[(size_t)session * (size_t)cache->hot_pages + (size_t)page];
}

/* A session's hot cache in one plan group. */
typedef struct HotCache {
    int32_t *tag;               /* [hot_rows] */
    uint32_t *stamp;            /* [hot_rows] */
    uint16_t *slot_of;          /* [context_pages * 64] */
    uint32_t *clock;
} HotCache;

static inline HotCache hot_cache(const Cache *cache, int session, int group) {
    size_t state = (size_t)session * (size_t)cache->groups + (size_t)group;
    return (HotCache){.tag = cache->slots.tag + state * (size_t)cache->hot_rows,
                      .stamp = cache->slots.stamp + state * (size_t)cache->hot_rows,
                      .slot_of = cache->slots.slot_of + state * (size_t)cache->context_pages * PAGE_ROWS,
                      .clock = cache->slots.clock + state};
}

/* Takes a session in: its hot cache, tail, index and host pages for `rows` rows (prompt and all it may generate). `ids` [n_ids]
 * is its prompt; whole pages of it that the host already holds are taken over, and *cached says how many rows that is. False
 * when it has to wait: for memory that this call has begun to recall (eq. 3, 4), for a session to end, or for one that is just
 * computing the same prefix. Call again after the next round. */
bool cache_admit(Cache *cache, int session, const int *ids, int n_ids, int rows, int *cached);

/* The waiting session will not ask again. */
void cache_stop_waiting(Cache *cache);

/* How many rows the session may run in the next pass, at most `wanted` and at least 1 while its reservation lasts. Takes pages
 * for them. */
int cache_room(Cache *cache, int session, int wanted);

/* Gives every row of the pass its place in a tail. False, with an error, for a row that has none: its session is not admitted,
 * or it does not follow the rows that are there. *failed: that session, or -1. */
bool cache_place(Cache *cache, const Row *rows, int n_rows, int *failed, Error *error);

/* Positions below n are committed now and their complete rows are history (eq. 7, 8); those of the pass from n on are dropped.
 * Whole pages leave the tail: lent, or once they are backed up. */
void cache_commit(Cache *cache, int session, int n);

/* Between two passes: completes copies, publishes and frees what they were for, lends what is spare. */
void cache_step(Cache *cache);

/* How far at most, and not beyond n, the session can be taken back: trails do not reach behind their length, and then it has to
 * begin anew. */
int cache_return(const Cache *cache, int session, int n);

/* Forgets the rows from n on, which cache_return() allows, history included. False when a page shared with another session
 * would have to be copied and the host has none free. */
bool cache_truncate(Cache *cache, int session, int n);

/* Ends a session's stay, finished or aborted. Whole pages of its prompt stay on the host for those who share it. */
void cache_release(Cache *cache, int session);

/* One page of a session, all sources and index keys, out of or into the hierarchy: [sources, 64] rows, then [groups, 64] index
 * keys; page_image_bytes() in all. cache_read_page: rows past the committed ones are zero. cache_append_page: `rows` rows (64,
 * or fewer in a last page) that follow the committed ones, as imported history. */
size_t page_image_bytes(const Cache *cache);
void cache_read_page(const Cache *cache, int session, int page, uint8_t *image);
void cache_append_page(Cache *cache, int session, const uint8_t *image, int rows);

/* What a session of n positions, which cache_return() allows, has on the device for good: the positions that its layers still
 * look back to, and heavily compressed rows. Out of the hierarchy; or into it, behind the appended pages of as many positions. */
size_t trail_image_bytes(const Cache *cache, int n);
void cache_read_trails(const Cache *cache, int session, int n, uint8_t *image);
void cache_append_trails(Cache *cache, int session, int n, uint8_t *image);

/* Bytes of one session's draft ring. */
size_t ring_bytes(const Cache *cache);

/* Where the pages of the device are. */
typedef struct PageCensus { int free, hot, tail, ready, filling, leaving; } PageCensus;
PageCensus cache_census(const Cache *cache);

/* Ready optional pages over the complete pages below the tails, of one session or (-1) of all; 1 where there are none. */
double cache_coverage(const Cache *cache, int session);

/* ---------------------------------------------------------------------------------------------------------------------
 * Sampling
 */

typedef struct Sampling {
    float temperature;          /* 0 or below, or too small to divide by: argmax */
    float top_p;                /* 1: off; 0: only the best */
    float min_p;                /* 0: off; keeps tokens at least this likely relative to the best */
    float repeat_penalty;       /* 1: off */
    int top_k;                  /* 0: off */
    uint64_t seed;
} Sampling;

typedef struct Sampler {        /* scratch of one choice, in the operations' memory */
    int *picks;                 /* [vocab_size] tokens that the filters leave */
    float *weights;             /* [vocab_size] e^(logit - best) */
    bool *seen;                 /* [vocab_size], all false between calls */
} Sampler;

/* Takes and gives back the scratch of a vocabulary. */
Sampler sampler_open(const Backend *backend, int vocab);
void sampler_close(const Backend *backend, Sampler *sampler);

/* The index of the largest of `n` values; of equal ones, the first. */
int argmax(const float *values, int n);

/* ---------------------------------------------------------------------------------------------------------------------
 * Drafters: DFlash, DFlash 2 and DSpark (paper 2.3, 3.4; the spec's drafters.md, 1 to 3)
 *
 * A small transformer of Qwen3's kind, run once a round on a block [anchor, MASK, MASK, ...] that stands at the true positions
 * n, n + 1, ... It attends to its own block and, instead of keys of its own past, to keys and values made from the target's
 * hidden states of committed rows. What turns the block's hidden states into tokens differs: nothing (DFlash), a walk through
 * the 16 best of each slot (DFlash 2), a low-rank bias by the token before (DSpark).
 *
 * DeepSeek-V4's checkpoints bring drafters of their own, of layers like the target's (their files' mtp.0, mtp.1, ...): a DSpark,
 * or at first one layer for one token more (MTP), which reads the target's streams and the token that follows them.
 */

enum {
    MAX_BLOCK_QUERIES = 1024,   /* of a block and one key/value head */
    KEPT_FEATURES = 32,         /* last rows of a session that does not draft: they enter the ring when it does */
    DRAFT_ROWS = 64,            /* that a part of what is fed to the ring may have */
    MAX_TAPS = 32,              /* target layers that a feature is made of */
    CANDIDATES = 16,            /* best tokens of a slot, among which it is drawn */
    DVL_FEATURES = 2 + CANDIDATES,          /* numbers of a slot that its predictor of lengths looks at */
    MAX_PREDICTOR_LAYERS = 8, MAX_PREDICTOR_WIDTH = 4096,
};

typedef struct DraftConfig {
    Config backbone;            /* a Qwen3's, without its embedding; or the target's own, of its stages */
    const char *architecture;   /* as the file spells it, static; NULL: no drafter */
    int block_size;             /* B: rows of a block, the anchor's among them */
    int first_slot;             /* 0: row k predicts position n + k + 1 (DeepSpec); 1: row k predicts n + k (z-lab) */
    int slots;                  /* B - first_slot: tokens drafted a round */
    int mask_token_id;
    int target_layer_ids[MAX_TAPS], n_taps;         /* a feature: the residual stream behind each of them; -1: the embedding.
                                                     * Of several streams their mean, in V4.1 in front of the layer */
    int feature_width;          /* values of a feature */
    bool multi_token;           /* MTP: a feature is all streams behind the last layer; row 0 stands at n - 1, with token n */
    int *window;                /* [num_hidden_layers] W: rows at distance below W are seen; INT_MAX: all */
    bool *causal;               /* [num_hidden_layers] inside the block */
    int widest_window;
    int conv_kernel_size, conv_group_size;      /* 0: no convolution */
    int selector_rank;          /* 0: no selector */
    int markov_rank;            /* 0: no Markov head */
    bool confidence_head, confidence_head_with_markov;
    int confidence_promised;    /* enable_confidence_head: 1, 0, or -1 where the file does not say */
    float input_embedding_scale, output_multiplier, final_logit_softcapping;    /* 1, 1, 0 where the file does not say */
    int draft_vocab_size;       /* of the head: the target's, unless the file brings a smaller one */
} DraftConfig;

typedef struct DraftLayerWeights {              /* beside the backbone's; only with a convolution */
    const float *attention_conv, *mlp_conv;     /* [2 sides, taps, hidden] f32, "base_kernel" */
    Matrix attention_kernel, mlp_kernel;        /* [2 * taps * (hidden / group), hidden], "kernel_projection" */
} DraftLayerWeights;

typedef struct DraftWeights {
    Weights backbone;           /* embed_tokens and lm_head are the target's where the file has none */
    Matrix fc;                  /* [hidden, n_taps * target's hidden] */
    const float *hidden_norm;   /* [hidden] f32 */
    Matrix e_proj;              /* [hidden, hidden] MTP: of the token, as fc and hidden_norm are of each stream */
    const float *embed_norm;    /* [hidden] f32 */
    DraftLayerWeights *layers;  /* [num_hidden_layers] */
    Matrix selector_hidden;     /* [selector_rank, hidden] */
    Matrix predecessor, successor;              /* [vocab, selector_rank], "codebook" */
    Matrix markov_w1, markov_w2;                /* [vocab, markov_rank], [draft_vocab_size, markov_rank] */
    Matrix confidence;          /* [1, hidden + markov_rank, or hidden] */
    float confidence_bias;
    const int *target_ids;      /* [draft_vocab_size] the target's id of each of the draft's ("d2t"); NULL: they are the same */
} DraftWeights;

typedef struct LengthPredictor {                /* DVL: a small network over a block's features (DScale III-B) */
    int layers;                 /* 0: none */
    Matrix weight[MAX_PREDICTOR_LAYERS];        /* [out, in]; in of the first: slots * DVL_FEATURES; out of the last: slots */
    const float *bias[MAX_PREDICTOR_LAYERS];    /* [out] f32 */
} LengthPredictor;

typedef struct DraftBlock {     /* one session's block of a round: drafted, then verified */
    int session;                /* slot of the cache, and of the ring */
    int position;               /* n: of the anchor, the newest committed token */
    int *ids;                   /* the session's history, ids[n] the anchor, drafts behind it; what is drafted is written there */
    int ring_first;             /* the ring has the rows [ring_first, n) */
    int first, count;           /* verification: its rows among the logits, K_r of them; 1: the anchor alone */
    Sampling sampling;
    uint64_t stream;            /* which noise the session draws */
} DraftBlock;

typedef struct Drafts {         /* what a draft pass proposes for each of its blocks, the first ones of the round */
    int slots, blocks;
    bool one_hot;               /* DFlash: the law of a draft under acceptance by rejection is its best token */
    int *ids;                   /* MEMORY_DEVICE, as all but the last three: [blocks, slots, CANDIDATES] the best of each slot,
                                 * by unary or Markov logits */
    float *scores;              /* [blocks, slots, CANDIDATES] what the choice is made by */
    float *q;                   /* [blocks, slots, CANDIDATES] the law a token was drawn from; accept by rejection only */
    float *features;            /* [blocks, slots, DVL_FEATURES] */
    int *tokens;                /* [blocks, slots] */
    float *confidence;          /* [blocks, slots] logits of the confidence head */
    float *survival;            /* [blocks, slots] scores for lengths, not increasing */
} Drafts;

typedef enum AcceptRule { ACCEPT_COUPLED, ACCEPT_REJECTION } AcceptRule;

typedef struct DraftState {     /* activations of a draft pass; [rows] stands for max_rows */
    int max_rows;               /* max_blocks * block_size, and at least DRAFT_ROWS */
    Row *rows;                  /* [rows] of the pass, where operations read them */
    int *indices;               /* [2 * rows] likewise */
    Row *row_list;              /* [rows] where the pipeline makes them, and the next two */
    int *index_list;            /* [2 * rows] */
    DeviceRow *ring_list;       /* [rows] */
    float *features;            /* [target's max_rows, feature_width] f32, of the target's pass */
    float *gathered;            /* [rows, feature_width] f32 */
    float *kept;                /* [sessions, KEPT_FEATURES, feature_width] f32, position t at t mod KEPT_FEATURES */
    float *hidden, *normed, *branch;            /* [rows, hidden] f32 */
    float *q, *attended;        /* [rows, heads * head_dim] f32 */
    float *kv;                  /* [rows, 2 * kv_heads * head_dim] f32 */
    float *gate, *up;           /* [rows, intermediate_size] f32 */
    float *delta;               /* [rows, 2 * taps * hidden / group] f32 */
    float *cosine, *sine, *inverse_frequency;   /* [rows, head_dim / 2] twice, [head_dim / 2] f32 */
    float *ranks;               /* [rows, selector_rank or markov_rank] f32 */
    float *bias;                /* [blocks, draft_vocab_size] f32, the Markov head's */
    float *joined;              /* [blocks, hidden + markov_rank] f32, what the confidence head sees */
    int max_blocks;             /* of one draft pass */
    /* stages, whose other activations are the target's, which rests meanwhile */
    float *shares;              /* [target's max_rows, (2 + hc_mult) * hc_mult] f32, each 1 / hc_mult: mixes by which all
                                 * streams enter alike */
    uint8_t *block_rows;        /* [rows] rows of draft_format: the blocks' own keys */
    DeviceRow *keys;            /* [rows, sliding_window + block_size] what each block row attends to: the ring, then these */
    int *key_count;             /* [rows] */
    DeviceRow *key_list;        /* likewise, where the pipeline makes them, and the next */
    int *key_count_list;
    float *scratch;             /* [2, sessions, MAX_PREDICTOR_WIDTH] f32 */
    DeviceRow *ring_rows;       /* [rows] */
    Drafts drafts;              /* [sessions] blocks */
    uint8_t *block, *host_block;
    size_t bytes, host_bytes;   /* host_bytes: of what the pipeline reads or writes itself */
} DraftState;

typedef struct Drafter {
    Checkpoint checkpoint, predictor_file;
    DraftConfig config;
    DraftWeights weights;
    LengthPredictor predictor;
    float temperatures[MAX_BLOCK];              /* of the confidence head's logits, 1 where none were fitted */
    size_t weight_bytes;        /* as stored */
    DraftState state;
    float rope_attention_factor;
} Drafter;

/* ---------------------------------------------------------------------------------------------------------------------
 * Backend: the operations, at the level a paper would name them
 *
 * x and y are f32 activations, [rows, dim], rows at the stride given where one is given. Every operation computes row r from
 * row r's inputs alone and sums in an order fixed by the shapes, never by the number of rows or threads.
 */

/* Where memory lies, as the operations need it. What the pipeline itself reads or writes is MEMORY_HOST, and operations may use
 * it too, for what is small: on a GPU each access crosses the link. In C there is no difference. */
typedef enum Memory { MEMORY_DEVICE, MEMORY_HOST } Memory;

typedef struct DeviceOptions {  /* how operations run; a backend that has no choice runs as if it were false */
    bool no_graph;              /* begin_work() keeps nothing */
} DeviceOptions;

typedef enum WorkAnswer { WORK_TO_DO, WORK_TO_KEEP, WORK_DONE } WorkAnswer;  /* what begin_work() answers */

struct Backend {
    const char *name;
    int live_sources;           /* chi of eq. 11: payloads of one group that it stages at the same time */
    bool shares_memory;         /* with the pipeline: MEMORY_DEVICE is host memory too; an operation has run when it returns */

    /* Makes the device ready, before anything else; called again, it only takes the options. False, with an error, where there is
     * no device that can be used. */
    bool (*start)(const DeviceOptions *options, Error *error);

    /* Free memory of that kind, in bytes. */
    size_t (*available)(Memory memory);

    /* Zeroed memory, or NULL and an error; and back (NULL: nothing). */
    void *(*take)(size_t bytes, Memory memory, Error *error);
    void (*give_back)(void *block, Memory memory);

    /* Where operations find these bytes of a checkpoint, or of what was made from it: a copy on the device, there once wait() has
     * returned, or the bytes themselves. They stay until release_weights(). NULL and an error where there is no room. */
    const void *(*import_weights)(const void *data, size_t bytes, Error *error);
    void (*release_weights)(void);

    /* The same for weights of no file: `count` values of that type (F32, BF16, F8_E4M3 or F8_E8M0), evenly spread from low to
     * high, each by a hash of its index and the seed; of I8, any bytes. `space`: as many bytes of the pipeline's memory, where
     * that is what operations read; or NULL. */
    const void *(*make_weights)(void *space, DType dtype, size_t count, float low, float high, uint64_t seed, Error *error);

    /* How many Samplers accept() wants for so many rows of logits. */
    int (*samplers)(int logit_rows);

    /* Around work that comes again and again. WORK_DONE: it has been put on the stream, as it was the last time under this key.
     * Otherwise call the operations, and then end_work(); WORK_TO_KEEP: and next time it will take less. What they are given is
     * the same each time, numbers and places, and no upload(), copy_bytes() or wait() is among them. key 0: it does not come
     * again. */
    WorkAnswer (*begin_work)(uint64_t key);
    void (*end_work)(void);

    /* Everything that was asked for has run: results in MEMORY_HOST are there. */
    void (*wait)(void);

    /* y[r] = row tokens[r] of the embedding. */
    void (*embed)(float *y, const Matrix *embedding, const Row *rows, int n_rows);

    /* y = weight * x / sqrt(mean(x^2) + eps) over each of `n` vectors of `dim`. y may be x. */
    void (*rms_norm)(float *y, size_t y_stride, const float *x, size_t x_stride, const float *weight, int n, int dim, float eps);

    /* What a sublayer adds to the residual stream, and the norm that the next one begins with: x += branch, then y as from
     * rms_norm. n rows of `dim`. report: NULL, or x is looked at as check_finite() does. */
    void (*add_norm)(float *y, float *x, const float *branch, const float *weight, int n, int dim, float eps, PassReport *report,
                     int place);

    /* y[r, o] = sum_i W[o, i] x[r, i] for each of up to MAX_PROJECTIONS matrices: the reduction runs over i in blocks of fixed
     * size. What stands beside a product, rows or matrices, changes none of its bits. */
    void (*linear)(const Projection *products, int n_products, const float *x, size_t x_stride, int n_rows);

    /* cosine, sine: [rows, dim / 2] of position * inverse_frequency, times factor (YaRN's attention factor, else 1). */
    void (*rotations)(float *cosine, float *sine, const Row *rows, int n_rows, const float *inverse_frequency, int dim,
                      float factor);

    /* Positions into the queries of latent attention, in place. q: [rows, heads, dim], where the last `tail` values of each head
     * are rotated in pairs (2i, 2i + 1); cosine, sine: [rows, tail / 2] for the row's position. index_q: the indexer's [rows,
     * index_heads, index_dim], where the first `tail` are, in such pairs if interleaved, else in pairs (i, i + tail / 2), and
     * which is looked at as check_finite() does; or NULL. In DeepSeek-V4 q is whatever is turned in the last values of its
     * heads. */
    void (*rotate_queries)(float *q, int n_rows, int heads, int dim, int tail, float *index_q, int index_heads, int index_dim,
                           bool interleaved, const float *cosine, const float *sine, PassReport *report, int place);

    /* Queries or keys of grouped-query attention (Qwen3), in place: each of the `heads` vectors of `dim` values that a row of
     * `stride` begins with is normed by itself and then rotated as a whole, in pairs (i, i + dim / 2). */
    void (*norm_heads)(float *x, size_t stride, int n_rows, int heads, int dim, const float *weight, float eps,
                       const float *cosine, const float *sine);

    /* Where rows are stored: their places in the pool of a tail, and among the index keys. */
    void (*locate_rows)(DeviceRow *kv_rows, DeviceRow *index_rows, const Cache *cache, const Row *rows, int n_rows);

    /* Writes row ids[r] of a pool: `quantised` values from a[r], `plain` values from b[r]. In deepseek_v41 an id may be -1:
     * none. */
    void (*store_rows)(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows,
                       const float *a, size_t a_stride, const float *b, size_t b_stride);

    /* The latents of a pass's rows, in place. kv [rows, lora + tail], the cached rows of latent attention, is normed in its first
     * `lora` values, rotated in the others, in pairs (2i, 2i + 1), and written to rows ids[r] of a pool; q [rows, rank], which
     * queries are made from, is normed by q_weight. */
    void (*store_latents)(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *kv, int lora, int tail,
                          const float *weight, float *q, int rank, const float *q_weight, float eps, const float *cosine,
                          const float *sine);

    /* The indexer's keys: k [rows, dim] becomes (k - mean) / sqrt(variance + 1e-6) * weight + bias, its first `turned` values are
     * rotated as an index query's, and it is written to rows ids[r] of a pool. It is looked at as check_finite() does, and
     * head_weights [rows, heads] likewise, at weights_place. */
    void (*store_index_keys)(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *k, int dim,
                             const float *weight, const float *bias, int turned, bool interleaved, const float *cosine,
                             const float *sine, const float *head_weights, int heads, PassReport *report, int place,
                             int weights_place);

    /* Lightning indexer (DeepSeek-V3.2 eq. 1): score[s] = (heads * head_dim)^-0.5 sum_h w[h] relu(q[h] . key[s]), then the top
     * min(capacity, position + 1) positions; equal scores: the lower position. q: [rows, heads, head_dim]; head_weights:
     * [rows, heads]; keys: [index pages, 64] vectors; pages: [sessions, context_pages], where a session's lie; scratch:
     * [scratch_rows, context_pages * 64], so that many rows are scored at a time. The rest of each selection becomes -1. */
    void (*index_select)(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                         const RowFormat *format, const DevicePage *pages, int context_pages, int heads, int head_dim,
                         const Row *rows, int n_rows, float *scratch, int scratch_rows);

    /* Finds every selected row of run `run` of the pass, its rows [begin, end), which belong to one plan group (paper 3.2, eq. 6,
     * 12): tail, ready optional page, hot cache, else host. Each session's rows follow each other, at most QUERY_BLOCK of them
     * where there is a hot cache, and are resolved as a union. rows: as the pipeline has them, [rows]; locations: [rows,
     * capacity], in the order of the selection, -1 for -1. What has to be copied becomes the run's part of the plan. */
    void (*resolve)(Cache *cache, int group, const Selection *selection, const Row *rows, int begin, int end, int run,
                    DeviceRow *locations, MissPlan *plan, PassReport *report);

    /* Copies what that run planned from the host to the hot cache and the staging of one source. The copy of a following layer
     * may go on beside what is asked for next; await_rows() comes before the first operation that reads the source's rows. */
    void (*fetch_rows)(Cache *cache, SourceId source, const MissPlan *plan, const Row *rows, int begin, int end, int run,
                       PassReport *report);
    void (*await_rows)(const Cache *cache, SourceId source);

    /* What the first `dim` values of each row would be after a stay in rows of that format's codes and scales, in place. */
    void (*round_rows)(float *x, size_t stride, int n_rows, int dim, const RowFormat *format);

    /* Each of n vectors of dim = 2^k values times the orthonormal Hadamard matrix, in place. */
    void (*hadamard)(float *x, int n, int dim);

    /* DeepSeek-V4's, the next ones. Queries of the indexer, in place: of each head of q [rows, heads, dim] the last `turned`
     * values are rotated in pairs (2i, 2i + 1). It is looked at as check_finite() does, and head_weights [rows, heads] likewise,
     * at weights_place. */
    void (*turn_index_queries)(float *q, int n_rows, int heads, int dim, int turned, const float *cosine, const float *sine,
                               const float *head_weights, PassReport *report, int place, int weights_place);

    /* The rows of a pass that windows see. kv [rows, dim] is normed, its last `turned` values are rotated in pairs (2i, 2i + 1),
     * its first ones rounded as round_rows() does the `quantised` of that format (NULL: none), and it is written to rows ids[r];
     * q [rows, rank], which queries are made from (NULL: none), is normed by q_weight. All in place. */
    void (*store_shared_keys)(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *kv, int dim,
                              int turned, const float *weight, const RowFormat *rounding, float *q, int rank,
                              const float *q_weight, float eps, const float *cosine, const float *sine);

    /* Hyper-connections (mHC), from one sublayer to the next. A row's mixes are hc_mult weights by which its streams enter a
     * sublayer, then hc_mult by which they take what it adds, then the hc_mult x hc_mult matrix that mixes them. First streams
     * [rows, hc_mult, hidden] take up what the last sublayer has added: streams[r, k] = post[k] branch[r] + sum_j mix[j, k]
     * streams[r, j], by the mixes `leaving`; what comes out is looked at as check_finite() does. branch NULL: nothing. y
     * NULL: that is all. Then, unless weights is NULL, mixes [rows, fn's rows] are made of the streams, the matrix doubly
     * stochastic by hc_sinkhorn_iters rounds of Sinkhorn's iteration; where fn has hc_mult rows they are the first ones alone.
     * And y[r] = sum_j pre[j] streams[r, j] by the mixes `entering`, of as many, which may be those just made, and is normed as
     * by rms_norm(), or left as it is where norm is NULL. */
    void (*mix_streams)(float *y, float *streams, const float *branch, const float *leaving, float *mixes,
                        const HyperWeights *weights, const float *entering, const float *norm, int n_rows, const Config *config,
                        PassReport *report, int place);

    /* Where the compressed row of that group's source lies that each row of the pass completes, and its index key; -1: it
     * completes none. */
    void (*locate_groups)(DeviceRow *kv_rows, DeviceRow *index_rows, const Cache *cache, int group, const Row *rows, int n_rows);

    /* Of compressed rows that each hold `ratio` positions, for every row of the pass: the newest that it sees, in place of its
     * position, or -1; how many it sees; and the first position of the one that it completes, if it does. Any may be NULL. */
    void (*see_groups)(Row *newest, int *count, Row *first, const Row *rows, int n_rows, int ratio);

    /* The same for heavily compressed rows. */
    void (*locate_heavy)(DeviceRow *kv_rows, const Cache *cache, const Row *rows, int n_rows, int ratio);

    /* The compressed row of every group that ends in the pass, to row ids[r] of a pool: softmax over the group's gates, channel
     * by channel, of its values; normed, its last `turned` values rotated by the angle of the group's first position, looked at
     * as check_finite() does. overlapping: of the group before, the first `dim` values and gates of each position join, of its
     * own the last (CSA). trail: rows of [2, width] f32, values | gates. rounding: what of the row round_rows() rounds first,
     * by its `quantised`; of e2m1 behind hadamard(); NULL: nothing. */
    void (*compress)(uint8_t *base, const RowFormat *format, const DeviceRow *ids, const Trail *trail, const Row *rows, int n_rows,
                     const CompressorWeights *weights, int ratio, int dim, bool overlapping, int turned,
                     const float *inverse_frequency, float eps, const RowFormat *rounding, PassReport *report, int place);

    /* y[r] = what compress() makes of the group that ends with row r, before it is rotated; 0 where none ends. */
    void (*pool_groups)(float *y, const Trail *trail, const Row *rows, int n_rows, const CompressorWeights *weights, int ratio,
                        int dim, float eps);

    /* index_select() over compressed rows: rows[r], which the pass itself may make, stands at the newest that it sees, and a page
     * has page_rows of them. blocks: [rows, ceil(context_pages * page_rows / block_size / 64)] bits; NULL: none. keeps: each
     * row's best topk_blocks blocks, by the best score in each, and always the block of the newest, are set there. Otherwise only
     * rows in those blocks, which hold as many as can be selected, are selected. */
    void (*select_groups)(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                          const RowFormat *format, const DevicePage *pages, int context_pages, int page_rows, int heads,
                          int head_dim, const Row *rows, int n_rows, float *scratch, int scratch_rows, uint64_t *blocks,
                          int block_size, int topk_blocks, bool keeps);

    /* Mixes with which the first of the streams enters alone. */
    void (*first_stream)(float *mixes, int n_rows, const Config *config);

    /* The tokens of the pass's rows join the trail; rows of an Engram table that they name begin to come from the disk; and come:
     * y[r] = the table's rows of all columns, widened. */
    void (*note_tokens)(const Trail *trail, const Row *rows, int n_rows);
    void (*prefetch_engram)(const EngramWeights *engram, const int *token_map, const Trail *trail, const Row *rows, int n_rows,
                            const Config *config);
    void (*read_engram)(float *y, const EngramWeights *engram, const int *token_map, const Trail *trail, const Row *rows,
                        int n_rows, const Config *config);

    /* streams[r, k] += value gated by how well the stream meets its key. kv: [rows, streams + 1, hidden], keys | value. */
    void (*add_engram)(float *streams, const float *kv, const EngramWeights *engram, int n_rows, const Config *config);

    /* Attention of all heads over one shared key, which is the value too: rows [begin, end) of the pass each see the last
     * `window` positions up to their own, then count[r] rows of the pool: those at locations[r], or where locations is NULL the
     * first of session s from s * capacity on; count NULL: none. A head's sink is one more logit of its softmax, with no value.
     * q, y: [rows, heads, dim]. q comes as it was projected, and is used up: each head is normed by itself as by rms_norm()
     * without a weight, unless eps is below 0, and its last `turned` values are rotated in pairs (2i, 2i + 1); those of what
     * comes out are rotated back by the row's angle. */
    void (*window_attention)(float *y, float *q, const Trail *trail, const RowFormat *trail_format, int window,
                             const RowPool *pool, const RowFormat *format, const DeviceRow *locations, const int *count,
                             int capacity, const Row *rows, int begin, int end, int heads, const float *sinks, float scale,
                             float eps, int turned, const float *cosine, const float *sine);

    /* y[r, g] = W[g] x[r, g]: W's rows and each of x's rows in `groups` equal parts. */
    void (*grouped_linear)(float *y, const float *x, int n_rows, const Matrix *w, int groups);

    /* As route(), by sqrt(softplus(logit)) and without groups of experts. table: [vocab, per_token] the experts of each token,
     * which the logits then only weigh, or NULL. */
    void (*route_softplus)(int *picks, float *weights, const float *logits, const float *bias, const int *table, const Row *rows,
                           int n_rows, const Config *config);

    /* Positions [from, to) of a session, the pass's rows from `first` on, are committed: they enter the rings of all trails. */
    void (*keep_trails)(const Cache *cache, int session, int first, int from, int to);

    /* The hot caches of a session, one in each group, are empty from now on and their clocks at 0. */
    void (*forget_hot)(Cache *cache, int session);

    /* A copy between the tiers, beside the passes: started, and later asked for until it is complete (the record may have
     * moved; the device page tells it from others). wait: until then. The bytes of a copy to the host are taken, and those of a
     * copy to the device arrive, at any moment between the two. */
    void (*start_copy)(Cache *cache, const Transfer *transfer);
    bool (*finish_copy)(Cache *cache, const Transfer *transfer, bool wait);

    /* In any direction, once everything before it has run; complete when it returns. */
    void (*copy_bytes)(void *to, const void *from, size_t bytes);

    /* From host memory to the operations', before the next of them runs; `from` is free again at once. */
    void (*upload)(void *to, const void *from, size_t bytes);

    /* q_absorbed[r, h] = W_UK[h]^T q_nope[r, h] | q_rope[r, h]: the query in the space of cached rows (DeepSeek-V2, 2.1.2).
     * q: [rows, heads, nope + rope]; q_absorbed: [rows, heads, kv_lora_rank + rope]; kv_b: kv_b_proj. */
    void (*absorb_query)(float *q_absorbed, const float *q, int n_rows, const Matrix *kv_b, const Config *config);

    /* Latent attention over each row's own selection, in its order. q: [rows, heads, lora + rope]; locations: [rows, capacity],
     * of which count[r] name rows; z: [rows, heads, lora] is the softmax-weighted sum of the selected latents. */
    void (*sparse_attention)(float *z, const float *q, const RowPool *pool, const RowFormat *format, const DeviceRow *locations,
                             const int *count, int capacity, int n_rows, int heads, float scale);

    /* y[r, h] = W_UV[h] z[r, h]: out of the latent space again. z: [rows, heads, kv_lora_rank]; y: [rows, heads, v_head_dim]. */
    void (*expand_value)(float *y, const float *z, int n_rows, const Matrix *kv_b, const Config *config);

    /* Grouped-query attention over all positions up to the row's own. q, y: [rows, heads, head_dim]; pages: [sessions,
     * context_pages], where a session's history lies. */
    void (*dense_attention)(float *y, const float *q, const RowPool *pool, const RowFormat *format, const DevicePage *pages,
                            int context_pages, const Row *rows, int n_rows, int heads, int kv_heads, int head_dim, float scale);

    /* y = silu(gate) * up, elementwise. y may be gate. */
    void (*swiglu)(float *y, const float *gate, const float *up, size_t n);

    /* y = 0. */
    void (*zero)(float *y, size_t n);

    /* y[to[i]] = x[from[i]], rows of dim; to or from: [n], or NULL where they are 0, 1, 2, ... */
    void (*move_rows)(float *y, const int *to, const float *x, const int *from, int n, int dim);

    /* y += x, elementwise. */
    void (*add)(float *y, const float *x, size_t n);

    /* Sigmoid router with group limit (DeepSeek-V3, 2.1.2). logits: [rows, experts]; picks, weights: [rows, per_token]. */
    void (*route)(int *picks, float *weights, const float *logits, const float *bias, int n_rows, const Config *config);

    /* y[r] = the layer's shared expert of x[r], or y[r] as it is where the layer has none, plus the sum over r's picks of weight
     * * down(silu(gate x) * up x), experts in ascending order. scratch: as State.expert_scratch. */
    void (*experts)(float *y, const float *x, const int *picks, const float *weights, int n_rows,
                    const LayerWeights *layer, const Config *config, float *scratch);

    /* If nothing was found yet: the first row that holds a NaN or an infinity becomes the report's bad_row, and `place` its
     * bad_place. Places ascend in a pass. */
    void (*check_finite)(PassReport *report, int place, const float *x, int n_rows, int dim);

    /* y[r] = x[r] * factor for rows of `dim` at their strides: features out of the residual stream; embeddings by their scale. */
    void (*copy_rows)(float *y, size_t y_stride, const float *x, size_t x_stride, int n_rows, int dim, float factor);

    /* The local dynamic convolution of DFlash 2 on one side of a sublayer, in place: z[i, c] = sum_t (base[t, c] + delta[i, t,
     * c / group]) * z[i - t, c] over the taps, inside each block. z: [blocks * block_size, dim]; base: [taps, dim]; delta: rows
     * of delta_stride values, this side's [taps, dim / group] first. */
    void (*convolve)(float *z, const float *base, const float *delta, size_t delta_stride, int n_rows, int block_size, int taps,
                     int group, int dim);

    /* Attention of draft blocks (DFlash): row i of a block, at position n + i, sees the ring's rows of the positions from
     * max(first, n + i - window + 1) to n - 1, and the rows of its own block: all, or, causal, those up to itself. q, y:
     * [blocks * block_size, heads, head_dim]; kv: [blocks * block_size, 2 * kv_heads * head_dim], keys | values of the block;
     * ring: [sessions, ring_rows] rows of this layer. */
    void (*block_attention)(float *y, const float *q, const float *kv, const uint8_t *ring, const RowFormat *format,
                            int ring_rows, const DraftBlock *blocks, int n_blocks, int block_size, int window, bool causal,
                            int heads, int kv_heads, int head_dim, float scale);

    /* Logits of a draft: y = softcap * tanh(multiplier * y / softcap); softcap 0: none. */
    void (*cap_logits)(float *y, size_t n, float multiplier, float softcap);

    /* The best CANDIDATES of each of n rows of logits, by value and then by lower id, row r at ids + r * stride and values + r
     * * stride. Where the vocabulary is smaller the last are repeated. target_ids: [vocab] the ids to write for them, or NULL. */
    void (*candidates)(int *ids, float *values, size_t stride, const float *logits, int n, int vocab, const int *target_ids);

    /* The token before slot `slot` of every block becomes rows[i].token: the anchor, or the draft before. */
    void (*take_tokens)(Row *rows, const DraftBlock *blocks, int slot, int n);

    /* y[i * stride] += bias. */
    void (*add_bias)(float *y, size_t stride, float bias, int n);

    /* What DVL's predictor looks at, DVL_FEATURES numbers of each of n slots at features + r * stride: the best logit; how far
     * ranks 2 to 16 lie below it (values + r * values_stride: its candidates'); the logarithm of its probability; the
     * distribution's entropy in nats (DScale III-B). */
    void (*length_features)(float *features, size_t stride, const float *values, size_t values_stride, const float *logits, int n,
                            int vocab);

    /* scores[i, j]: how probable it is that drafts 0..j of block i are all accepted: sigmoids, then their running minimum
     * (DScale III-B, the first lines of Algorithm 1). features: [n, slots * DVL_FEATURES]; scores: [n, slots]; scratch: [2, n,
     * MAX_PREDICTOR_WIDTH]. */
    void (*predict_lengths)(float *scores, const float *features, int n, const LengthPredictor *predictor, float *scratch);

    /* Draws slots [slot, end) of every block from their candidates, in the way of each block's session, into drafts->tokens. */
    void (*draw_drafts)(Drafts *drafts, int slot, int end, const DraftBlock *blocks, int n, AcceptRule rule);

    /* The walk of DFlash 2's selector: slot by slot S(a, b) = U(b) + <Pred[a] * e, Succ[b]> over the candidates b, where a is
     * the token chosen before (first the anchor) and e: [n, slots, rank] the projected hidden state; draws each slot from S,
     * which replaces the candidates' scores. */
    void (*select_path)(Drafts *drafts, const float *e, const Matrix *predecessor, const Matrix *successor,
                        const DraftBlock *blocks, int n, AcceptRule rule);

    /* Divides a budget of `budget` rows among n sessions (DScale, Algorithm 1, without its seed): one row each, then the budget
     * - n largest scores; of equal ones the earlier draft, then the lower session. scores: [n, slots], no row increasing.
     * limits[i]: rows of session i at most, at least 1. lengths: [n]. */
    void (*allocate)(int *lengths, const float *scores, const int *limits, int n, int slots, int budget);

    /* Algorithm 1 as the paper has it: starts from 1 + the rounded sum of each session's scores, then grows or shrinks one row
     * at a time. The same arguments. */
    void (*allocate_seeded)(int *lengths, const float *scores, const int *limits, int n, int slots, int budget);

    /* The blocks' rows, count of each, one block behind the other: sets every block's `first`, and rows[first + j] to its row
     * j. Behind them come inert rows (session -1) up to `capacity`. Returns how many are live. */
    int (*pack_blocks)(Row *rows, DraftBlock *blocks, int n, int capacity);

    /* Verification of n blocks. Coupled: choices[r] is the target's own token of each row, argmax(logit / T + noise) behind the
     * session's filters, and accepted[i] is how many drafts of block i equal it from the first on. By rejection: draft j is
     * accepted with probability min(1, p / q), and the first that is not is replaced by a draw from max(p - q, 0), or all are
     * followed by a draw from p (Leviathan et al. 2023, algorithm 1). choices: [logit rows], up to row accepted[i] of each
     * block; logits are overwritten. samplers: one for each block that is worked on at the same time. */
    void (*accept)(int *choices, int *accepted, float *logits, int vocab, const DraftBlock *blocks, const Drafts *drafts, int n,
                   AcceptRule rule, Sampler *samplers, int n_samplers);
};

extern const Backend c_backend;
extern const Backend cuda_backend;                  /* in a build that has nvcc */

/* The k best of n >= k scores, as ascending positions; equal scores: the lower position. Sampling filters by it too. */
void top_k(int *picks, const float *scores, int n, int k);

/* ---------------------------------------------------------------------------------------------------------------------
 * Engine: a loaded model with its cache and the activations of one pass
 */

typedef struct State {          /* [rows] stands for max_rows; everything lies in one block, planned before a weight is read */
    int max_rows;               /* of one pass */
    int logit_rows;             /* of one head() call */
    Row *rows;                  /* [rows] of the pass, where operations read them */
    int *indices;               /* [rows] which of them something is wanted of */
    PassReport *report;
    float *hidden;              /* [rows, hidden_size] f32, the residual stream */
    float *normed;              /* [rows, hidden_size] f32, a layer's input; after forward(): the final norm's output */
    float *branch;              /* [rows, hidden_size] f32, what a sublayer adds to the residual stream */
    float *q_lora;              /* [rows, q_lora_rank] f32 */
    float *q;                   /* [rows, heads * query width] f32 */
    float *kv;                  /* [rows, kv_lora_rank + rope] f32; qwen3: [rows, kv_heads * head_dim] keys, and as many values */
    float *q_absorbed, *z;      /* [rows, heads, kv_lora_rank + rope], [rows, heads, kv_lora_rank] f32 */
    float *attended;            /* [rows, heads * value width] f32 */
    float *index_q, *index_k;   /* [rows, index_n_heads * index_head_dim], [rows, index_head_dim] f32 */
    float *index_weights;       /* [rows, index_n_heads] f32 */
    float *index_scratch;       /* [scratch_rows, context_pages * 64] f32 */
    int scratch_rows;
    float *gate, *up;           /* [rows, widest inner size] f32 */
    float *router_logits;       /* [rows, n_routed_experts] f32 */
    int *expert_picks;          /* [rows, num_experts_per_tok] */
    float *expert_weights;      /* [rows, num_experts_per_tok] f32 */
    float *expert_scratch;      /* [rows, the larger of 2 * (hidden_size + an expert's width, the shared one's too) and
                                 * (num_experts_per_tok + 1) * moe_intermediate_size, under --qat with a hidden_size more] f32 */
    float *cosine, *sine;       /* [rows, rope dim / 2] f32 */
    float *inverse_frequency;   /* [rope dim / 2] f32 */
    DeviceRow *kv_rows, *index_rows;    /* [rows] where each row of the pass is stored */
    /* deepseek_v4: hidden holds hc_mult streams of each row */
    float *mixes;               /* [rows, (2 + hc_mult) * hc_mult] f32 */
    /* deepseek_v41 */
    float *late_mixes;          /* likewise, of the feed-forward: it enters by the attention's, the next attention by these */
    float *latents;             /* [rows, head_dim] f32, what rows and index keys are made of */
    float *group_cosine, *group_sine;               /* [rows, rope dim / 2] f32, of the first positions of groups */
    Row *first_rows;            /* [rows] those positions */
    uint64_t *blocks;           /* [rows, words] select_groups()'s */
    float *engram, *engram_kv;  /* [rows, columns * engram_head_dim], [rows, (hc_mult + 1) * hidden] f32 */
    float *o_latent;            /* [rows, o_groups * o_lora_rank] f32 */
    float *rounded;             /* [rows, the widest input of a matrix] f32, under --qat */
    float *compress_cosine, *compress_sine, *compress_frequency;    /* as cosine, sine and inverse_frequency, of compress_rope */
    DeviceRow *pass_rows;       /* [rows] 0, 1, 2, ...: where the rows of a pass lie in a trail */
    DeviceRow *heavy_ids;       /* [rows] where each row's heavily compressed row is stored */
    Row *group_rows;            /* [rows] of the pass, each at the newest compressed row it sees; -1: there is none */
    int *heavy_count;           /* [rows] heavily compressed rows that each row sees */
    Selection selection;        /* of the nearest full layer at or before the current one */
    DeviceRow *locations;       /* [rows, capacity] where the selected rows lie */
    MissPlan plan;              /* of the nearest full layer too */
    float *logits;              /* [logit_rows, vocab_size] f32 */
    int run_ends[MAX_PASS_ROWS];            /* the pass in runs: rows that are resolved, and then attend, together */
    int n_runs;
    uint8_t *block;
    size_t bytes;
} State;

/* What eval --dump and the drafters look at while a pass runs. Either may be NULL. */
typedef struct Probe {
    void (*entering)(void *user, int layer, const float *hidden, const Row *rows,
                     int n_rows); /* layer = num_hidden_layers: leaving the last */
    void (*selected)(void *user, int layer, const Selection *selection, const Row *rows, int n_rows);
    void *user;
} Probe;

/* Whether the stages draft that a checkpoint may have. */
typedef enum StageUse { STAGES_IDLE, STAGES_IF_THERE, STAGES_REQUIRED } StageUse;

typedef struct EngineOptions {
    const Backend *backend;          /* NULL: c_backend */
    const char *model;          /* directory */
    const char *draft;          /* directory of a drafter, or NULL */
    StageUse stages;            /* without such a directory */
    DeviceOptions device;
    bool dummy;                 /* random weights of config.json's shapes and types: no other file of the model is read */
    int layers;                 /* only the first of the model's; 0: all */
    void (*progress)(size_t bound, size_t all);     /* as Checkpoint's */
    int sessions;               /* slots */
    int context;                /* rows a slot may hold; 0: min(max_position_embeddings, 8192) */
    int index_topk;             /* 0: as config.json says */
    bool qat;                   /* Config's */
    KvDtype kv_dtype;
    KvMode kv_mode;             /* models without an indexer are resident whatever it says */
    Reclaim reclaim;
    Lookup lookup;
    int hot_rows;               /* B; 0: 2 * index_topk */
    size_t kv_budget;           /* bytes of the device tier; 0: enough for every session's whole context */
    size_t host_budget;         /* bytes of the host tier; 0: likewise */
} EngineOptions;

typedef struct Engine {
    const Backend *backend;
    Checkpoint checkpoint;
    Config config;
    Weights weights;
    Cache cache;
    State state;
    Drafter drafter;            /* config.architecture NULL: none */
    Probe probe;
    size_t weight_bytes;        /* as stored: of the files, or of what is made up */
    double load_seconds;        /* from the first weight bound to the last that operations can read */
    float rope_attention_factor;                    /* on cosine and sine; 1 without yarn */
    float softmax_scale;
    int failed_session;                             /* slot whose numbers made the last forward() or head() fail, or -1 */
    bool pass_counted;                              /* the report of the pass is in the statistics */
    bool work_is_new;                               /* some of the round's work was not yet kept by the backend */
} Engine;

/* Reads config.json and the headers of the weights and plans the memory; the sizes are in engine->cache and engine->state. */
bool engine_plan(Engine *engine, const EngineOptions *options, Error *error);

/* Binds every tensor of the model and of its drafter; reads no weight. */
bool engine_bind(Engine *engine, const Backend *backend, Error *error);

/* Refuses a plan that does not fit, binds the weights and takes the planned memory. */
bool engine_load(Engine *engine, Error *error);

/* Both of them. Each leaves nothing behind when it fails. */
bool engine_open(Engine *engine, const EngineOptions *options, Error *error);
void engine_close(Engine *engine);

/* The steps they are made of, for who reports a plan without loading it, or brings weights of his own. From the config and the
 * options: the sizes of the cache and the activations; takes none of that memory. */
bool plan_memory(Engine *engine, const EngineOptions *options, Error *error);

/* One line of what will be held, and a warning where the weights alone are more than the memory. */
void print_plan(FILE *out, const Engine *engine);

/* Refuses a plan that goes beyond the free memory, and says by how much. */
bool check_memory(const Engine *engine, Error *error);

/* Takes the planned blocks and lays them out for good. */
bool take_memory(Engine *engine, Error *error);

/* Afterwards: the rotations' frequencies, in the state, and the factors that the config gives to them and to the softmax. */
void prepare_rope(Engine *engine);

/* Runs rows through every layer and stores their keys and values. Rows of one session come in ascending positions, and every
 * earlier position is cached or among them. Afterwards state.normed holds the final norm's output. Fails, naming layer,
 * session and position, where a hidden state stops being finite; the cache then holds nothing new that counts. */
bool forward(Engine *engine, const Row *rows, int n_rows, Error *error);

/* forward() and head() in parts, so that a round waits for its pass once: the first two only ask for their work (begin_forward()
 * fails on rows that cannot be run), end_pass() waits for it and fails as they do. indices: head()'s, or NULL without one. */
bool begin_forward(Engine *engine, const Row *rows, int n_rows, Error *error);
void begin_head(Engine *engine, const int *indices, int n);
bool end_pass(Engine *engine, const Row *rows, const int *indices, Error *error);

/* The rows indices [n] of the pass just made are committed: their features become rows of the draft ring. Rows of one session
 * come in ascending positions; one that does not follow what the ring has of it starts the ring anew. */
void draft_feed(Engine *engine, const Row *rows, const int *indices, int n);

/* In place of draft_feed() for rows of sessions that do not draft at present, no two of one session: their features are kept,
 * a session's last KEPT_FEATURES, which enter the ring when it drafts again. */
void draft_keep(Engine *engine, const Row *rows, const int *indices, int n);

/* One draft pass over the blocks of n sessions, which all have drafter.config.slots places behind their anchors: proposals into
 * drafter.state.drafts and the blocks' ids. features: what the predictor of lengths needs is wanted too. Uses state.logits. */
void draft_blocks(Engine *engine, DraftBlock *blocks, int n, AcceptRule rule, bool features);

/* state.logits[i] = lm_head of row indices[i] of the pass just made; n <= state.logit_rows. Fails on a logit that is not
 * finite. */
bool head(Engine *engine, const Row *rows, const int *indices, int n, Error *error);

/* ---------------------------------------------------------------------------------------------------------------------
 * Tokenizer (tokenizer.c)
 */

typedef struct Tokenizer Tokenizer;

/* Loads DIR/tokenizer.json and, where present, DIR/tokenizer_config.json. NULL and an error when the file is malformed or
 * asks for something other than byte-level BPE. */
Tokenizer *tokenizer_open(const char *directory, Error *error);

/* The same from memory; config_text may be NULL, `name` stands for the directory in messages. */
Tokenizer *tokenizer_parse(const char *json_text, size_t length, const char *config_text, size_t config_length, const char *name,
                           Error *error);
void tokenizer_close(Tokenizer *tokenizer);

/* Appends the ids of text[0..length) to *ids (stb_ds). Any bytes are accepted. match_added: whether added tokens (control
 * tokens among them) that occur in the text become their ids; text typed by a user must say false. */
bool tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, bool match_added, int **ids, Error *error);

/* The bytes a token stands for (an added token: its own text); NULL for an id that names no token. Not NUL-terminated. */
const char *tokenizer_bytes(const Tokenizer *tokenizer, int id, size_t *length);

/* The id of an added or vocabulary token by its text, or -1. */
int tokenizer_find(const Tokenizer *tokenizer, const char *text);

/* Whether the id is a control token (added_tokens entry with "special": true). */
bool tokenizer_is_control(const Tokenizer *tokenizer, int id);

/* One past the largest id. */
int tokenizer_size(const Tokenizer *tokenizer);

/* Length of the longest stretch of valid UTF-8 at the start of text[0..length). */
size_t utf8_valid(const char *text, size_t length);

/* Streaming: a token may end inside a character. Appends to *text (stb_ds) what is complete after adding bytes[0..length):
 * incomplete trailing UTF-8 stays in the stream until the next call; bytes that can never become UTF-8 pass through as they
 * are. utf8_flush appends what is left. */
typedef struct Utf8Stream {
    char pending[4];
    int n_pending;
} Utf8Stream;
void utf8_push(Utf8Stream *stream, const char *bytes, size_t length, char **text);
void utf8_flush(Utf8Stream *stream, char **text);

/* Chat formats, chosen from the control tokens the tokenizer has. A prompt is built as ids and as the text they stand for. */
typedef struct Message {
    const char *role;           /* "system", "user" or "assistant" */
    const char *content;
    size_t content_length;      /* content may hold NUL bytes */
} Message;

typedef struct Prompt {
    char *text;                 /* stb_ds, not NUL-terminated */
    int *ids;                   /* stb_ds */
} Prompt;
void prompt_free(Prompt *prompt);

/* The whole conversation, as the checkpoint's own template renders it. An error when the tokenizer has no chat format that
 * tide knows, or a role is unknown. */
bool chat_render(const Tokenizer *tokenizer, const Message *messages, int n_messages, bool add_generation_prompt, bool thinking,
                 Prompt *prompt, Error *error);

/* How much a thinking model is told to reason in prompts made from here on: "low", "high", "max", or NULL, what its template says by
 * itself. False where the format has no such level, or its words for it are not known. */
bool chat_set_effort(Tokenizer *tokenizer, const char *effort, Error *error);
const char *chat_effort(const Tokenizer *tokenizer);

/* The next user turn after an answer, to be appended to the ids that exist: closes the answer where the last id (-1: none)
 * is not already the end-of-turn token, renders the user message and opens the assistant's turn. */
bool chat_render_next(const Tokenizer *tokenizer, int last_id, const char *content, size_t length, bool thinking,
                      Prompt *prompt, Error *error);

/* The ids that go in front of plain text (bos, or [gMASK]<sop>), appended to *ids (stb_ds). */
void tokenizer_prefix(const Tokenizer *tokenizer, int **ids);

/* Whether this id ends an assistant's turn in the chat format (besides generation_config's eos ids). */
bool chat_ends_turn(const Tokenizer *tokenizer, int id);

/* "<think>" and "</think>" ids, -1 where the tokenizer has none. */
int chat_think_open(const Tokenizer *tokenizer);
int chat_think_close(const Tokenizer *tokenizer);

/* ---------------------------------------------------------------------------------------------------------------------
 * Sessions and rounds
 */

/* How wide a round verifies, and by what. */
typedef enum VerifyRule {
    VERIFY_FULL,                /* every session as many rows */
    VERIFY_DVL,                 /* a budget divided by predicted lengths (DScale) */
    VERIFY_CONFIDENCE,          /* prefixes by confidence and cost (DSpark's scheduler) */
} VerifyRule;

enum { COST_BUCKETS = 128, COST_MEMORY = 4 };

typedef struct CostCurve {      /* seconds by size: rows of a target pass, or blocks of a draft pass */
    double seconds[COST_BUCKETS];           /* the least of the recent ones; 0: not measured yet */
    double recent[COST_BUCKETS][COST_MEMORY];
    long times[COST_BUCKETS], round[COST_BUCKETS];      /* how often, and one more than the round when it was last */
} CostCurve;

typedef struct Acceptance {     /* of draft j, given that those before it were accepted; old rounds fade */
    double tried[MAX_BLOCK], accepted[MAX_BLOCK];
} Acceptance;

typedef struct SpeculationStats {           /* since the start */
    uint64_t rounds, plain_rounds;          /* that decoded with drafts, and without any */
    uint64_t blocks, verified, accepted;    /* draft blocks; drafts that were verified; and accepted */
    uint64_t selected_on_host, fetched;             /* rows on the host, for each query that selected them; once in all */
    uint64_t tried[MAX_BLOCK], passed[MAX_BLOCK];       /* draft j was reached by verification; and accepted */
    double draft_seconds, allocate_seconds, verify_seconds, accept_seconds;     /* of rounds with drafts */
} SpeculationStats;

typedef struct Speculation {
    int width;                  /* rows a session verifies a round, the anchor's among them; 0: chosen from what is measured */
    VerifyRule verify;
    AcceptRule accept;
    bool seeded;                /* DVL allocates from the paper's seed */
    CostCurve pass_cost, draft_cost;
    Acceptance acceptance;      /* of all sessions: what is expected of a new one */
    double credit;              /* seconds that tries may cost, of those for whom drafting promises too little */
    SpeculationStats stats;
} Speculation;

typedef enum Finish { RUNNING, FINISH_STOP, FINISH_LENGTH, FINISH_CONTEXT, FINISH_INTERRUPTED, FINISH_ERROR } Finish;

typedef struct Session {
    int slot;                   /* in the cache */
    uint64_t stream;            /* which noise it draws: stays the same wherever and beside whomever it runs */
    int *ids;                   /* stb_ds */
    int cached;                 /* how many of them have their rows in the cache: at most those committed there, and fewer after
                                 * a rollback, until session_begin() truncates */
    int in_pass;                /* how many more the pass in flight runs */
    bool continues;             /* more turns may follow: it is given room for the whole context */
    int prompt_length;          /* ids before this generation */
    int max_new;                /* tokens this generation may add; 0: as many as the context holds */
    Sampling sampling;
    char *const *stops;         /* stb_ds of strings that end the text, not part of it; may be NULL */
    Utf8Stream utf8;
    char *text;                 /* stb_ds, what was generated, cut at a stop string */
    size_t emitted;             /* of text: what the reader has seen; the rest might still become a stop string */
    Acceptance acceptance;
    long drafted;               /* round of its last draft; -1: none in this generation */
    bool trying, promising;     /* it drafts in this round whatever is expected; and did so last time, and lost nothing */
    bool plain;                 /* no drafts in the next round: the last one failed */
    bool drafts;                /* in this round */
    bool accepted;              /* the token that is being emitted was a draft */
    Finish finish;
    Error error;
    void (*emit)(struct Session *session, const char *text, size_t length);    /* may be NULL */
    void *user;
} Session;

typedef struct Runner {         /* an engine with everything a round needs */
    Engine engine;
    Tokenizer *tokenizer;       /* NULL: ids only */
    Sampler *samplers;          /* [threads] */
    Speculation speculation;
    Row *rows;                  /* [max_rows] */
    int n_samplers;
    int *finals;                /* [max_rows] rows whose logits are wanted */
    int *indices;               /* [max_rows] rows that enter the draft ring */
    DraftBlock *blocks;         /* [max_rows] whose they are; those with drafts first */
    Session **owners;           /* [max_rows] of the blocks */
    int *lengths, *limits;      /* [max_rows] rows of each block, and at most */
    int *choices, *accepted;    /* [max_rows] a token for each row of logits; drafts accepted of each block */
    Session **in_slot;          /* [sessions] who ran last in each slot of the cache */
    FILE *trace;
    long rounds, rows_run, tokens;
    double seconds;             /* in rounds */
} Runner;

extern volatile sig_atomic_t interrupted;           /* set by Ctrl-C, cleared by whoever answers it */

/* Seconds on a clock that only goes forward. */
double now(void);

/* Loads the model and, where it is needed or there, the tokenizer. plan: where the memory plan is printed before anything is
 * loaded, or NULL. Leaves nothing behind when it fails. */
bool runner_open(Runner *runner, const EngineOptions *options, bool need_tokenizer, FILE *plan, Error *error);
void runner_close(Runner *runner);

/* Starts a generation after the ids that are there, at least one and fewer than the context holds; room for every id that may
 * follow is taken now. */
void session_begin(Session *session, Engine *engine);

/* Takes the session into the cache where it is not there yet. False: it has to wait; ask again after the next round, or after
 * cache_step() when nothing runs. */
bool session_admit(Runner *runner, Session *session);
void session_free(Session *session);

/* How many ids this generation has added. */
int tokens_generated(const Session *session);

/* One pass over whatever the running sessions have to run. A session whose numbers go bad ends with an error; the others lose
 * nothing: their `cached` has not moved, so the next round runs the same rows again. */
void run_round(Runner *runner, Session **sessions, int n);

/* Runs one session to its end, or until Ctrl-C. */
void run_session(Runner *runner, Session *session);

/* ---------------------------------------------------------------------------------------------------------------------
 * Sessions at rest
 */

/* Writes ids, settings, cached rows and index keys to a file of that name, all or nothing. extra: an object that goes with them
 * under "chat", taken over; or NULL. */
bool session_save(const Runner *runner, const Session *session, const char *path, struct cJSON *extra, Error *error);

/* Opens a session file and checks all of it against this engine: its bytes, checkpoint, kind of rows, ids and size. The header,
 * which the caller frees, and the file, which he closes; or NULL and an error. Changes nothing. */
struct cJSON *session_open(const Runner *runner, const char *path, FILE **file, Error *error);

/* Puts an opened file's session into the slot of this one, with room for the whole context, when no other session runs. */
bool session_restore(Runner *runner, Session *session, const struct cJSON *header, FILE *file, const char *path, Error *error);

/* ---------------------------------------------------------------------------------------------------------------------
 * Measurements (bench.c; those named cuda_ are engine.cu's)
 */

/* The median seconds, as the GPU counts them, of what `work` puts on its stream; work is called twice and must not wait. */
double cuda_seconds(void (*work)(void *), void *user);

/* Puts on the stream: a copy in any direction; a kernel that reads the bytes and forgets them (sum: a word of device memory). */
void cuda_begin_copy(void *to, const void *from, size_t bytes);
void cuda_read(const void *data, size_t bytes, unsigned *sum);

/* The same for cuBLASLt's y = W x of one row: W and x in bf16, y in f32. False: there is no cuBLASLt on this machine. */
bool cuda_begin_library_product(float *y, const void *x, const void *w, int rows, int cols);

/* Puts on the stream, and into what is being captured: a mark, of any number below MAX_MARKS; a kernel that does nothing. And the
 * seconds between two marks: waits for the second. */
enum { MAX_MARKS = 16384 };
void cuda_mark(int number);
double cuda_between(int first, int second);
void cuda_empty(void);

/* Kernels that kept works have launched so far. */
long cuda_graph_kernels(void);

/* The device and the CUDA it is used through, in a line. */
void cuda_describe(char *text, size_t size);

typedef struct BenchOptions {
    const char *name, *section; /* which measurement, and which part of it; section NULL: all */
    const char *directory;      /* where NAME.csv and NAME.svg go */
    bool markdown;              /* a table for README.md, where it has one */
    int slots;                  /* sessions at most; 0: not said */
} BenchOptions;

/* Makes the measurement of that name and prints it. 0: done; 1: it failed; 2: there is none of that name, or no such part. The
 * last two with an error. */
int bench(const BenchOptions *bench, const EngineOptions *options, Error *error);

#endif
