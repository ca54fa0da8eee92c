/* tide.c: the program around the engine: options, commands, the terminal.
 *
 *     options . generate . batch . eval . tokenize . inspect . chat . bench . main
 *
 * Owns: the options (one table), and one function per command. stdout carries model text or results and nothing else; every
 * notice goes to stderr. Commands return the exit status: 0 done, 1 a run failed, 2 bad usage, 3 some batch rows failed.
 * What a command does with a model it does through engine.h; nothing here computes a token.
 */
#define _GNU_SOURCE             /* ppoll */
#include "engine.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <langinfo.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <omp.h>
#include <poll.h>
#include <signal.h>
#include <stb/stb_ds.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>
#define Tokenizer EditLineTokenizer   /* histedit.h has a type of that name too */
#include <histedit.h>
#undef Tokenizer

/* ---- options, and what the commands share */

static const size_t MAX_TEXT_FILE = (size_t)4 << 30;

enum { EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_SOME_ROWS };

typedef struct Options {
    EngineOptions engine;
    const char *prompt, *file, *ids, *decode, *jsonl, *output, *dump, *trace, *system, *session, *positional, *section;
    const char *kv_dtype, *kv_mode, *reclaim, *lookup, *think, *effort, *special, *device, *exact;
    const char *draft;          /* NULL: not said */
    const char *verify, *accept, *allocate;
    int width;                  /* 0: auto; -1: not said */
    FILE *trace_file;
    char **stops;               /* stb_ds */
    int n_new;                  /* -1: the command's default */
    int threads, slots;
    double temperature, top_p, min_p, repeat_penalty;   /* NAN: as the checkpoint says */
    int top_k;                  /* -1: as the checkpoint says */
    uint64_t seed;
    bool seeded, ppl, stats, quiet, resume, chat, help, markdown, plan;
} Options;

typedef enum OptionKind { TEXT, WORD, COUNT, NUMBER, BYTES, SEED, STOP, WIDTH, FLAG } OptionKind;

/* low, high: of a number. words: the values a WORD may have here. later: values the contract knows and this build lacks, which is
 * said in these words ("*": any other). commands: the only ones that can use it, where not all can; given to another it is a
 * mistake, better said than passed over. */
#define AT(member) .offset = offsetof(Options, member)
static const struct OptionSpec {
    const char *name;
    OptionKind kind;
    size_t offset;
    double low, high;
    const char *words, *later, *commands;
} option_table[] = {
    {"-m", TEXT, AT(engine.model)},
    {"-p", TEXT, AT(prompt), .commands = "generate|tokenize"},
    {"-f", TEXT, AT(file), .commands = "generate|eval|tokenize"},
    {"--ids", TEXT, AT(ids), .commands = "generate|eval"},
    {"--session", TEXT, AT(session), .commands = "chat|generate"},
    {"--jsonl", TEXT, AT(jsonl), .commands = "tokenize"},
    {"--decode", TEXT, AT(decode), .commands = "eval|tokenize"},
    {"--special", WORD, AT(special), .words = "on|off", .commands = "tokenize"},
    {"--dump", TEXT, AT(dump), .commands = "eval"},
    {"--ppl", FLAG, AT(ppl), .commands = "eval"},
    {"-o", TEXT, AT(output), .commands = "batch|bench"},
    {"--resume", FLAG, AT(resume), .commands = "batch"},
    {"--slots", COUNT, AT(slots), 1, MAX_PASS_ROWS, .commands = "batch|inspect|bench"},
    {"--md", FLAG, AT(markdown), .commands = "bench"},
    {"-n", COUNT, AT(n_new), 0, INT_MAX},
    {"-c", COUNT, AT(engine.context), 1, MAX_CONTEXT},
    {"--temp", NUMBER, AT(temperature), -1e9, 1e9},
    {"--top-k", COUNT, AT(top_k), 0, INT_MAX},
    {"--top-p", NUMBER, AT(top_p), 0, 1},
    {"--min-p", NUMBER, AT(min_p), 0, 1},
    {"--repeat-penalty", NUMBER, AT(repeat_penalty), 1e-3, 1e3},
    {"--seed", SEED, AT(seed)},
    {"--stop", STOP, AT(stops)},
    {"--chat", FLAG, AT(chat)},
    {"--system", TEXT, AT(system)},
    {"--think", WORD, AT(think), .words = "on|off"},
    {"--effort", WORD, AT(effort), .words = "low|high|max"},
#ifdef TIDE_CUDA
    {"--device", WORD, AT(device), .words = "auto|cpu|cuda"},
#else
    {"--device", WORD, AT(device), .words = "auto|cpu", .later = "cuda"},
#endif
    {"--threads", COUNT, AT(threads), 1, 1024},
    {"--kv-dtype", WORD, AT(kv_dtype), .words = "f32|bf16|fp8|fp4"},
    {"--qat", FLAG, AT(engine.qat), .commands = "chat|generate|batch|eval|inspect"},
    {"--kv", WORD, AT(kv_mode), .words = "resident|hisparse|adaptive"},
    {"--kv-budget", BYTES, AT(engine.kv_budget), 1, 1e18},
    {"--index-topk", COUNT, AT(engine.index_topk), 1, MAX_CONTEXT},
    {"--exact", WORD, AT(exact), .words = "on|off"},
    {"--no-graph", FLAG, AT(engine.device.no_graph)},
    {"--plan", FLAG, AT(plan), .commands = "inspect"},
    {"--dummy", FLAG, AT(engine.dummy), .commands = "chat|generate|batch|eval|inspect|bench"},
    {"--layers", COUNT, AT(engine.layers), 1, 1024, .commands = "chat|generate|batch|eval|inspect|bench"},
    {"--draft", TEXT, AT(draft), .commands = "chat|generate|batch|inspect|bench"},
    {"--width", WIDTH, AT(width), .commands = "chat|generate|batch"},
    {"--verify", WORD, AT(verify), .words = "full|dvl|confidence", .commands = "chat|generate|batch"},
    {"--allocate", WORD, AT(allocate), .words = "select|seeded", .commands = "chat|generate|batch"},
    {"--accept", WORD, AT(accept), .words = "coupled|rejection", .commands = "chat|generate|batch"},
    {"--host-budget", BYTES, AT(engine.host_budget), 1, 1e18},
    {"--hot", COUNT, AT(engine.hot_rows), 1, UINT16_MAX},
    {"--reclaim", WORD, AT(reclaim), .words = "whole|proportional"},
    {"--lookup", WORD, AT(lookup), .words = "direct|scan"},
    {"--stats", FLAG, AT(stats), .commands = "chat|generate|batch"},
    {"--trace", TEXT, AT(trace), .commands = "chat|generate|batch"},
    {"--quiet", FLAG, AT(quiet)},
    {"--help", FLAG, AT(help)},
    {"-h", FLAG, AT(help)},
};
#undef AT

static const char usage_text[] =
    "usage: tide chat     [-m DIR] [--draft DIR]                         talk in the terminal\n"
    "       tide generate [-m DIR] (-p TEXT | -f FILE | --ids LIST)      one prompt, continuation to stdout\n"
    "       tide batch    [-m DIR] PROMPTS [-o OUT.jsonl] [--slots N]    every prompt of a .txt (one a line) or .jsonl file\n"
    "       tide eval     [-m DIR] (-f FILE | --ids LIST) [--decode LIST] [--dump OUT.safetensors] [--ppl]\n"
    "       tide tokenize [-m DIR] (-p TEXT | -f FILE | --jsonl FILE | --decode LIST) [--special on|off]\n"
    "       tide inspect  [-m DIR]                                       config, tensors, memory plan; loads no weights\n"
    "       tide bench    NAME [-o DIR]                                  measurements, each beside its ceiling; NAME: cpu load\n"
    "                     cost loadstep hotsweep offered resolve memory acceptance lengths confidence speed draft first decode\n"
    "                     gpu batch; most write DIR/NAME.csv, and some draw NAME.svg from it\n"
    "       tide bench    gpu [PART|all] [--md]                          one kind of kernel, or all; --md: README's table\n"
    "\n"
    "  -m DIR            checkpoint directory as published (default: the one shipped in weights/mini)\n"
    "  -n N              tokens to generate at most (generate, batch: 256; chat: as many as fit)\n"
    "  -c CTX            rows of context a session may hold (default: the model's, at most 8192)\n"
    "  --temp T --top-p P --top-k K --min-p P --repeat-penalty R --seed S\n"
    "                    sampling (default: generation_config.json; T 0 is greedy, K 0 and P 1 are off; no seed: a new one each "
    "run)\n"
    "  --stop TEXT       end the answer before TEXT (may be repeated)\n"
    "  --chat            generate, batch: the prompt is a user's message, not text to continue; implied by the next three\n"
    "  --system TEXT     system message      --think on|off   reasoning before the answer (default off)\n"
    "  --effort low|high|max   how much of it, where the chat format has efforts (default: its own); implies --think on\n"
#ifdef TIDE_CUDA
    "  --device auto|cpu|cuda --threads N --kv-dtype f32|bf16|fp8|fp4 (default bf16) --index-topk N\n"
#else
    "  --device auto|cpu --threads N --kv-dtype f32|bf16|fp8|fp4 (default bf16) --index-topk N\n"
#endif
    "  --kv resident|hisparse|adaptive (default adaptive)   where the history lies: all of it on the device; on the host behind "
    "a\n"
    "                    hot cache; on the host, with spare device memory lent to it\n"
    "  --kv-budget BYTES[K|M|G] --host-budget BYTES[K|M|G]   of the two memories, K 2^10 (default: room for every session)\n"
    "  --hot ROWS        of the hot cache (default 2 x index_topk, at most the context)   --reclaim whole|proportional   "
    "--lookup direct|scan\n"
    "  --draft DIR|own|none   drafter for speculative decoding; own: the stages inside a deepseek_v4 checkpoint (default: these\n"
    "                    where it has them; the shipped model's)   --width N|max|auto   rows a "
    "session verifies\n"
    "                    a round, the newest token's among them (default auto: chosen from what is measured)\n"
    "  --verify full|dvl|confidence   who gets how many: all the same; by predicted lengths; by confidence (default: what the "
    "drafter has)\n"
    "  --allocate select|seeded (of dvl)   --accept coupled|rejection (default coupled: the very text that decoding without "
    "drafts gives)\n"
    "  --session FILE    chat, generate: take up the session in FILE where there is one, and write it there at the end\n"
    "  --resume          batch: keep the finished rows of -o and go on after them\n"
    "  --plan            inspect: the config and what history costs in each --kv-dtype; -m needs config.json alone\n"
    "  --dummy           random weights: -m needs config.json alone (and a tokenizer for text; --ids, bench and inspect do "
    "without)\n"
    "  --layers L        of --dummy: the first L layers only\n"
    "  --exact on|off    a row has the same bits whatever shares its pass: that costs nothing, so off changes nothing\n"
    "  --no-graph        on a GPU: launch each operation anew instead of replaying captured graphs\n"
    "  --qat             deepseek_v4: rounds cached rows, index vectors and what meets e4m3 and e2m1 weights as the reference's\n"
    "                    kernels do; --kv-dtype fp4 keeps them as it does (default: neither, as transformers)\n"
    "  --stats --trace FILE.jsonl --quiet\n";

/* One line to the user, whatever the arguments hold. */
__attribute__((format(printf, 1, 2))) static void notice(const char *format, ...) {
    va_list arguments;
    char text[1024];
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "tide: %s\n", replace_controls(text));
}

static int report(const Error *error) {
    notice("%s", error->text);
    return EXIT_FAILED;
}

__attribute__((format(printf, 1, 2))) static int usage(const char *format, ...) {
    va_list arguments;
    char text[512];
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    notice("%s (tide --help lists what there is)", text);
    return EXIT_USAGE;
}

/* Whether a list such as "on|off" holds the word. */
static bool listed(const char *list, const char *word) {
    size_t n = strlen(word);
    for (const char *at = list; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL)
        if (n && !strncmp(at, word, n) && (!at[n] || at[n] == '|')) return true;
    return false;
}

/* Which word of the list it is, counted from 0; `otherwise` where none was given. */
static int word_index(const char *list, const char *word, int otherwise) {
    if (!word) return otherwise;
    size_t n = strlen(word);
    int index = 0;
    for (const char *at = list; strncmp(at, word, n) || (at[n] && at[n] != '|'); at = strchr(at, '|') + 1) index++;
    return index;
}

static bool set_word(const struct OptionSpec *option, const char **field, const char *value) {
    *field = value;
    if (listed(option->words, value)) return true;
    if (option->later && (!strcmp(option->later, "*") || listed(option->later, value)))
        usage("%s %s: this build does not have it%s%s", option->name, value, *option->words ? ", only " : "", option->words);
    else usage("%s: found %s, wanted %s", option->name, value, option->words);
    return false;
}

static bool set_number(const struct OptionSpec *option, void *field, const char *value) {
    char *end;
    errno = 0;
    double number = strtod(value, &end);
    bool ok = end != value && !errno && isfinite(number);
    if (ok && option->kind == BYTES && *end && strchr("KMGkmg", *end))
        number *= exp2(10 * (1 + (strchr("KkMmGg", *end++) - "KkMmGg") / 2));
    ok = ok && !*end && number >= option->low && number <= option->high && (option->kind != COUNT || number == (int)number);
    if (!ok) usage("%s: found %s, wanted a number from %.10g to %.10g", option->name, value, option->low, option->high);
    else if (option->kind == NUMBER) *(double *)field = number;
    else if (option->kind == BYTES) *(size_t *)field = (size_t)number;
    else *(int *)field = (int)number;
    return ok;
}

static bool set_width(int *width, const char *value) {
    char *end;
    long number = strtol(value, &end, 10);
    *width = !strcmp(value, "auto")                    ? 0
             : !strcmp(value, "max")                   ? INT_MAX
             : number > 0 && number < INT_MAX && !*end ? (int)number
                                                       : -1;
    return *width >= 0 || (usage("--width: found %s, wanted a number of rows, max or auto", value), false);
}

static bool set_seed(Options *options, const char *value) {
    char *end;
    errno = 0;
    options->seed = strtoull(value, &end, 10);
    options->seeded = true;
    if (isdigit((unsigned char)*value) && !*end && !errno && options->seed < (uint64_t)1 << 53) return true;
    return usage("--seed: found %s, wanted an integer below 2^53, so that JSON can hold it", value), false;
}

/* One option's value into its field; what is wrong with it has been said when this fails. */
static bool set_option(Options *options, const struct OptionSpec *option, const char *value) {
    void *field = (char *)options + option->offset;
    switch (option->kind) {
    case FLAG: *(bool *)field = true; return true;
    case TEXT: *(const char **)field = value; return true;
    case WORD: return set_word(option, field, value);
    case SEED: return set_seed(options, value);
    case WIDTH: return set_width(field, value);
    case STOP:
        if (*value) arrput(options->stops, (char *)value);
        return *value || (usage("--stop wants a text that is not empty"), false);
    default: return set_number(option, field, value);
    }
}

static const struct OptionSpec *find_option(const char *name) {
    for (size_t i = 0; i < sizeof option_table / sizeof *option_table; i++)
        if (!strcmp(option_table[i].name, name)) return &option_table[i];
    return NULL;
}

static bool parse_options(Options *options, int argc, char **argv) {
    for (int a = 2; a < argc; a++) {
        const struct OptionSpec *option = find_option(argv[a]);
        if (!option) {
            if (argv[a][0] == '-' && argv[a][1]) return usage("unknown option %s", argv[a]), false;
            const bool part = options->positional && !options->section && !strcmp(argv[1], "bench")
                              && !strcmp(options->positional, "gpu");
            if (options->positional && !part) return usage("one argument too many: %s", argv[a]), false;
            if (!listed("batch|bench", argv[1])) return usage("%s cannot use the argument %s", argv[1], argv[a]), false;
            *(part ? &options->section : &options->positional) = argv[a];
            continue;
        }
        if (option->commands && !listed(option->commands, argv[1])) return usage("%s cannot use %s", argv[1], argv[a]), false;
        if (option->kind != FLAG && a + 1 == argc) return usage("%s wants a value", argv[a]), false;
        if (!set_option(options, option, option->kind == FLAG ? NULL : argv[++a])) return false;
    }
    options->engine.kv_dtype = (KvDtype)word_index("f32|bf16|fp8|fp4", options->kv_dtype, KV_BF16);
    options->engine.kv_mode = (KvMode)word_index("resident|hisparse|adaptive", options->kv_mode, MODE_ADAPTIVE);
    options->engine.reclaim = (Reclaim)word_index("whole|proportional", options->reclaim, RECLAIM_WHOLE);
    options->engine.lookup = (Lookup)word_index("direct|scan", options->lookup, LOOKUP_DIRECT);
    if (options->engine.layers && !options->engine.dummy) return usage("--layers wants --dummy"), false;
    return true;
}

/* What was asked for on the command line takes the place of what the checkpoint, or a saved session, says. */
static void override_sampling(Sampling *sampling, const Options *options) {
    if (!isnan(options->temperature)) sampling->temperature = (float)options->temperature;
    if (!isnan(options->top_p)) sampling->top_p = (float)options->top_p;
    if (!isnan(options->min_p)) sampling->min_p = (float)options->min_p;
    if (!isnan(options->repeat_penalty)) sampling->repeat_penalty = (float)options->repeat_penalty;
    if (options->top_k >= 0) sampling->top_k = options->top_k;
    if (options->seeded) sampling->seed = options->seed;
}

static Sampling sampling_of(const Options *options, const Config *config) {
    Sampling sampling = {.temperature = config->temperature, .top_p = config->top_p, .min_p = config->min_p,
                         .repeat_penalty = config->repetition_penalty, .top_k = config->top_k, .seed = options->seed};
    override_sampling(&sampling, options);
    return sampling;
}

static bool thinking(const Options *options) {
    return options->think ? !strcmp(options->think, "on") : options->effort != NULL;
}

/* "1,2,3" appended to *ids. */
static bool parse_ids(const char *list, int **ids, Error *error) {
    for (const char *p = list; *p || p == list;) {
        char *end;
        long id = strtol(p, &end, 10);
        if (end == p || id < 0 || id > INT_MAX || (*end && *end != ','))
            return fail(error, "a list of ids: found \"%.40s\", wanted numbers parted by commas", p);
        arrput(*ids, (int)id);
        p = *end ? end + 1 : end;
        if (*end && !*p) return fail(error, "a list of ids: it ends with a comma");
    }
    return true;
}

static void print_ids(const int *ids, size_t n) {
    for (size_t i = 0; i < n; i++) printf("%s%d", i ? "," : "", ids[i]);
    putchar('\n');
}

/* How the drafter is used: what was asked for, else what it has. False: it was asked for something that it lacks, which has
 * been said. */
static bool set_speculation(Speculation *speculation, const Drafter *drafter, const Options *options) {
    const bool asked = options->width >= 0 || options->verify || options->accept || options->allocate;
    const char *directory = options->engine.draft ? options->engine.draft : options->engine.model;
    if (!drafter->config.architecture) {
        if (asked) notice("--width, --verify, --allocate and --accept do not apply without a drafter: --draft DIR names one");
        return true;
    }
    speculation->verify = (VerifyRule)word_index("full|dvl|confidence", options->verify, (int)speculation->verify);
    speculation->accept = (AcceptRule)word_index("coupled|rejection", options->accept, ACCEPT_COUPLED);
    speculation->seeded = word_index("select|seeded", options->allocate, 0);
    if (options->width >= 0)
        speculation->width = options->width < drafter->config.slots + 1 ? options->width : drafter->config.slots + 1;
    if (speculation->verify == VERIFY_DVL && !drafter->predictor.layers)
        return usage("--verify dvl wants a predictor of lengths in %s/dvl", directory), false;
    if (speculation->verify == VERIFY_CONFIDENCE && !drafter->config.confidence_head)
        return usage("--verify confidence wants a confidence head, which the drafter in %s has not", directory), false;
    return true;
}

/* Where the model runs: --device, or the GPU where there is one. False: there is none, and it was asked for. */
static bool choose_device(Options *options, Error *error) {
#ifdef TIDE_CUDA
    const bool wanted = options->device && !strcmp(options->device, "cuda");
    if (options->device && !strcmp(options->device, "cpu")) return true;
    if (cuda_backend.start(&options->engine.device, error)) options->engine.backend = &cuda_backend;
    else if (wanted) return false;
    else if (!options->quiet) notice("%s; running on the CPU", error->text);
#endif
    (void)options;
    (void)error;
    return true;
}

/* A bar on the terminal while weights are moved, where that takes long enough to be seen. */
static void show_progress(size_t bound, size_t all) {
    enum { WIDTH = 40 };
    static double begun, shown;
    const double at = now();
    if (!begun) begun = at;
    if (at - begun < 0.5 || (at - shown < 0.1 && bound < all)) return;
    shown = at;
    const int filled = (int)((double)WIDTH * (double)bound / (double)all);
    fprintf(stderr, "\rtide: [%.*s%*s] %.1f of %.1f GB, %.1f GB/s%s", filled,
            "========================================", WIDTH - filled, "", (double)bound / 1e9, (double)all / 1e9,
            (double)bound / 1e9 / (at - begun), bound < all ? "" : "\r\033[K");
}

static bool start(Runner *runner, Options *options, bool need_tokenizer, int *status) {
    Error error;
    if (!choose_device(options, &error)) return *status = report(&error), false;
    if (isatty(STDERR_FILENO) && !options->quiet) options->engine.progress = show_progress;
    if (!runner_open(runner, &options->engine, need_tokenizer, options->quiet ? NULL : stderr, &error))
        return *status = report(&error), false;
    if (options->effort && runner->tokenizer && !chat_set_effort(runner->tokenizer, options->effort, &error)) {
        runner_close(runner);
        return *status = report(&error), false;
    }
    const Config *config = &runner->engine.config;
    if (runner->engine.backend->shares_memory && options->engine.device.no_graph) notice("--no-graph does not apply to the CPU");
    if (word_index("on|off", options->exact, 0))
        notice("--exact off changes nothing: sums that do not depend on the load cost nothing here, so there are no others");
    bool hierarchy = options->engine.hot_rows || options->reclaim || options->lookup || options->engine.host_budget;
    if (!has_indexer(config) && (options->kv_mode || hierarchy))
        notice(
            "--kv, --hot, --host-budget, --reclaim and --lookup do not apply to %s, which attends to every row: it runs resident",
            config->model_type);
    else if (options->engine.kv_mode == MODE_RESIDENT && hierarchy)
        notice("--hot, --host-budget, --reclaim and --lookup do not apply to --kv resident");
    else if (options->engine.kv_mode == MODE_HISPARSE && options->reclaim)
        notice("--reclaim does not apply to --kv hisparse, which lends nothing");
    if (!set_speculation(&runner->speculation, &runner->engine.drafter, options)) {
        runner_close(runner);
        return *status = EXIT_USAGE, false;
    }
    if (options->trace && !(runner->trace = options->trace_file = fopen(options->trace, "w"))) {
        fail(&error, "%s: %s", options->trace, strerror(errno));
        runner_close(runner);
        return *status = report(&error), false;
    }
    return true;
}

/* What the hierarchy did: where selected rows were found, what was lent, moved and waited for, and what it took. */
static void print_cache_stats(const Runner *runner) {
    const Cache *cache = &runner->engine.cache;
    const CacheStats *stats = &cache->stats;
    double picks = 0, seconds = fmax(runner->seconds, 1e-9);
    for (int tier = 0; tier < TIERS; tier++) picks += (double)stats->picked[tier];
    if (cache->groups)
        fprintf(
            stderr, "tide: selected rows: %.2f%% in tails, %.2f%% in lent history, %.2f%% hot, %.2f%% fetched from the host\n",
            100 * (double)stats->picked[TIER_TAIL] / fmax(picks, 1), 100 * (double)stats->picked[TIER_OPTIONAL] / fmax(picks, 1),
            100 * (double)stats->picked[TIER_HOT] / fmax(picks, 1), 100 * (double)stats->picked[TIER_HOST] / fmax(picks, 1));
    if (cache->mode == MODE_RESIDENT) return;
    fprintf(stderr,
            "tide: mean coverage %.1f%%; %" PRIu64 " pages lent, %" PRIu64 " recalled, %" PRIu64
            " shared; %.2f MB fetched (%" PRIu64 " rows, %" PRIu64 " staged), %.2f MB backed up, %.2f MB populated\n",
            stats->history_pages ? 100 * (double)stats->lent_pages / (double)stats->history_pages : 100, stats->pages_lent,
            stats->pages_recalled, stats->shared_pages, (double)stats->bytes_fetched / 1e6, stats->fetched, stats->staged,
            (double)stats->bytes_backed_up / 1e6, (double)stats->bytes_populated / 1e6);
    fprintf(stderr,
            "tide: %" PRIu64 " rounds waited to admit, %" PRIu64
            " times a tail waited for its backup; resolver %.2f%%, fetches %.2f%%, controller %.2f%% "
            "of the time\n",
            stats->admission_waits, stats->tail_waits, 100 * stats->resolve_seconds / seconds,
            100 * stats->fetch_seconds / seconds, 100 * stats->control_seconds / seconds);
}

/* What drafting brought and what it took. */
static void print_speculation_stats(const Runner *runner) {
    const SpeculationStats *stats = &runner->speculation.stats;
    double seconds = fmax(stats->draft_seconds + stats->allocate_seconds + stats->verify_seconds + stats->accept_seconds, 1e-9),
           blocks = fmax((double)stats->blocks, 1), won = (double)(stats->accepted + stats->blocks);
    if (!runner->engine.drafter.config.architecture) return;
    fprintf(stderr,
            "tide: %" PRIu64 " rounds with drafts, %" PRIu64 " without; %" PRIu64 " blocks, %.2f of %.2f drafts accepted of each, %.2f rows "
            "a token; by place",
            stats->rounds, stats->plain_rounds, stats->blocks, (double)stats->accepted / blocks, (double)stats->verified / blocks,
            (double)(stats->verified + stats->blocks) / fmax(won, 1));
    for (int j = 0; j < runner->engine.drafter.config.slots; j++)
        if (stats->tried[j]) fprintf(stderr, " %.0f%%", 100 * (double)stats->passed[j] / (double)stats->tried[j]);
        else fputs(" -", stderr);
    fprintf(stderr, "\ntide: of these rounds' time draft %.1f%%, allocate %.1f%%, verify %.1f%%, accept %.1f%%",
            100 * stats->draft_seconds / seconds, 100 * stats->allocate_seconds / seconds, 100 * stats->verify_seconds / seconds,
            100 * stats->accept_seconds / seconds);
    if (stats->selected_on_host)
        fprintf(stderr, "; rows that several queries share saved %.1f%% of their host fetches",
                100 - 100 * (double)stats->fetched / (double)stats->selected_on_host);
    fputc('\n', stderr);
}

static void print_stats(const Runner *runner) {
    fprintf(stderr, "tide: %ld rounds, %ld rows, %ld tokens generated in %.2f s: %.1f rows/s, %.1f tokens/s\n", runner->rounds,
            runner->rows_run, runner->tokens, runner->seconds, (double)runner->rows_run / fmax(runner->seconds, 1e-9),
            (double)runner->tokens / fmax(runner->seconds, 1e-9));
    print_speculation_stats(runner);
    print_cache_stats(runner);
}

/* Encodes a prompt the way -p, -f and batch rows mean it: as a user's message when the chat format was asked for, else as text
 * to continue, behind the prefix the checkpoint's tokenizer wants. Behind ids that are there, it goes on from them. */
static bool encode_prompt(const Tokenizer *tokenizer, const Options *options, const char *text, size_t length, int **ids,
                          Error *error) {
    int used = (int)arrlen(*ids);
    if (!options->chat) {
        if (!used) tokenizer_prefix(tokenizer, ids);
        return tokenizer_encode(tokenizer, text, length, false, ids, error);
    }
    Message messages[2] = {{"system", options->system, options->system ? strlen(options->system) : 0}, {"user", text, length}};
    int first = options->system ? 0 : 1;
    Prompt prompt = {0};
    bool ok = used ? chat_render_next(tokenizer, (*ids)[used - 1], text, length, thinking(options), &prompt, error)
                   : chat_render(tokenizer, messages + first, 2 - first, true, thinking(options), &prompt, error);
    for (size_t i = 0; ok && i < arrlenu(prompt.ids); i++) arrput(*ids, prompt.ids[i]);
    prompt_free(&prompt);
    return ok;
}

/* The ids that -p, -f or --ids stand for. */
static bool read_prompt(const Runner *runner, const Options *options, int **ids, Error *error) {
    if (options->ids) return parse_ids(options->ids, ids, error);
    if (options->prompt) return encode_prompt(runner->tokenizer, options, options->prompt, strlen(options->prompt), ids, error);
    char *text;
    size_t length;
    if (!read_file(options->file, MAX_TEXT_FILE, &text, &length, error)) return false;
    bool ok = encode_prompt(runner->tokenizer, options, text, length, ids, error);
    free(text);
    return ok;
}

static int count_sources(const Options *options) {
    return (options->prompt != NULL) + (options->file != NULL) + (options->ids != NULL);
}

/* Sends off what was printed. Once that has failed, it stays failed. */
static bool flush_stdout(Error *error) {
    static int reason;
    if (fflush(stdout) && !reason) reason = errno;
    if (ferror(stdout) && !reason) reason = EIO;
    return !reason || fail(error, "stdout: %s", strerror(reason));
}

/* A reader who has left ends the generation. */
static void emit_to_stdout(Session *session, const char *text, size_t length) {
    fwrite(text, 1, length, stdout);
    if (!flush_stdout(&session->error)) session->finish = FINISH_ERROR;
}

static const char *finish_name(Finish finish) {
    return finish == FINISH_STOP          ? "stop"
           : finish == FINISH_ERROR       ? "error"
           : finish == FINISH_INTERRUPTED ? "interrupted"
                                          : "length";
}

/* ---- tide generate */

/* Whether --session names a file that is there, or that cannot be looked at, which is for opening it to say. */
static bool has_session(const Options *options) {
    return options->session && (!access(options->session, F_OK) || errno != ENOENT);
}

/* Takes up the session in FILE where there is one. */
static bool resume_session(Runner *runner, Session *session, const Options *options, Error *error) {
    FILE *file;
    if (!has_session(options)) return true;
    cJSON *header = session_open(runner, options->session, &file, error);
    bool ok = header && session_restore(runner, session, header, file, options->session, error);
    if (header) fclose(file);
    cJSON_Delete(header);
    if (ok) override_sampling(&session->sampling, options);
    return ok;
}

/* One generation behind the ids that are there, and the session to its file, also when it was interrupted. */
static bool generate(Runner *runner, Session *session, const Options *options, Error *error) {
    session_begin(session, &runner->engine);
    run_session(runner, session);
    bool ok = session->finish != FINISH_ERROR || fail(error, "%s", session->error.text);
    size_t generated = (size_t)tokens_generated(session);
    if (runner->tokenizer && (ok || session->emitted)) putchar('\n');
    if (!runner->tokenizer && (ok || generated)) print_ids(session->ids + session->prompt_length, generated);
    if (options->stats) print_stats(runner);
    if (ok && options->session) ok = session_save(runner, session, options->session, NULL, error);
    return ok && (session->finish != FINISH_INTERRUPTED || fail(error, "interrupted"));
}

static int command_generate(Options *options) {
    int sources = count_sources(options);
    if (sources > 1 || (!sources && !options->session)) return usage("generate wants one of -p TEXT, -f FILE and --ids LIST");
    Runner runner;
    int status;
    if (!start(&runner, options, sources && !options->ids, &status)) return status;
    Session session = {.max_new = options->n_new < 0 ? 256 : options->n_new,
                       .continues = options->session != NULL,
                       .sampling = sampling_of(options, &runner.engine.config),
                       .stops = options->stops,
                       .emit = runner.tokenizer ? emit_to_stdout : NULL};
    Error error;
    bool ok = resume_session(&runner, &session, options, &error)
              && (!sources || read_prompt(&runner, options, &session.ids, &error));
    if (ok && !arrlen(session.ids)) ok = fail(&error, "the prompt is empty: there is nothing to continue");
    if (ok && arrlen(session.ids) >= runner.engine.cache.context)
        ok = fail(&error, "the prompt has %d tokens, the context holds %d: raise -c", (int)arrlen(session.ids),
                  runner.engine.cache.context);
    if (ok && options->n_new != 0) ok = generate(&runner, &session, options, &error);
    session_free(&session);
    runner_close(&runner);
    return ok ? EXIT_DONE : report(&error);
}

/* ---- tide batch */

typedef struct BatchRow {
    int *ids;                   /* stb_ds */
    Session *session;           /* NULL before its turn and afterwards: a file may have millions of rows */
    char *output;               /* the JSON line, once finished */
    char **stops;               /* stb_ds, owned */
    bool started;
} BatchRow;

typedef struct Batch {
    Runner *runner;
    const Options *options;
    char **lines;               /* stb_ds; NULL-terminated strings, with their lengths beside them */
    size_t *lengths;            /* stb_ds */
    BatchRow *rows;             /* [lines] */
    bool jsonl, bar;
    size_t written;             /* rows already in the output */
    FILE *out;
    bool some_failed;
} Batch;

/* text as a JSON-safe, NUL-terminated string (stb_ds): what is no UTF-8 (or NUL) becomes U+FFFD; the ids beside it lose
 * nothing. */
static char *json_safe(const char *text, size_t length) {
    char *safe = NULL;
    for (size_t i = 0; i < length; i++) {
        size_t good = utf8_valid(text + i, length - i);
        if (good && memchr(text + i, 0, good)) good = (size_t)((const char *)memchr(text + i, 0, good) - (text + i));
        if (good) memcpy(arraddnptr(safe, good), text + i, good);
        if ((i += good) < length) memcpy(arraddnptr(safe, 3), "\xef\xbf\xbd", 3);
    }
    arrput(safe, 0);
    return safe;
}

/* Everything but the output. */
static void free_row(BatchRow *row) {
    if (row->session) session_free(row->session);
    free(row->session);
    row->session = NULL;
    arrfree(row->ids);
    for (size_t i = 0; i < arrlenu(row->stops); i++) free(row->stops[i]);
    arrfree(row->stops);
}

static void finish_row(Batch *batch, size_t i, const char *error) {
    BatchRow *row = &batch->rows[i];
    const Session *session = row->session;
    cJSON *json = cJSON_CreateObject();
    char *text = json_safe(session->text, arrlenu(session->text)), *message = error ? json_safe(error, strlen(error)) : NULL;
    cJSON_AddNumberToObject(json, "index", (double)i);
    cJSON_AddStringToObject(json, "text", text);
    cJSON_AddNumberToObject(json, "prompt_tokens", row->started ? session->prompt_length : (double)arrlen(row->ids));
    cJSON_AddNumberToObject(json, "completion_tokens", row->started ? tokens_generated(session) : 0);
    cJSON_AddStringToObject(json, "finish_reason", error ? "error" : finish_name(session->finish));
    cJSON_AddItemToObject(json, "ids",
                          json_ids(session->ids + session->prompt_length, row->started ? tokens_generated(session) : 0));
    if (error) cJSON_AddStringToObject(json, "error", message);
    else cJSON_AddNullToObject(json, "error");
    row->output = cJSON_PrintUnformatted(json);
    cJSON_Delete(json);
    arrfree(text);
    arrfree(message);
    batch->some_failed |= error != NULL;
    free_row(row);
}

/* "messages" of a row or of tokenize --jsonl, as ids and text. */
static bool render_messages(const Tokenizer *tokenizer, const cJSON *list, bool add_generation_prompt, bool think, Prompt *prompt,
                            Error *error) {
    Message *messages = NULL;
    const cJSON *entry;
    bool ok = cJSON_IsArray(list) || fail(error, "messages: wanted an array");
    if (ok) cJSON_ArrayForEach(entry, list) {
            const cJSON *role = cJSON_GetObjectItemCaseSensitive(entry, "role"),
                        *content = cJSON_GetObjectItemCaseSensitive(entry, "content");
            if (!cJSON_IsString(role) || !cJSON_IsString(content))
                ok = fail(error, "messages: each wants a role and a content, both strings");
            if (!ok) break;
            arrput(messages, ((Message){role->valuestring, content->valuestring, strlen(content->valuestring)}));
    }
    ok = ok && chat_render(tokenizer, messages, (int)arrlen(messages), add_generation_prompt, think, prompt, error);
    arrfree(messages);
    return ok;
}

/* A .jsonl row: prompt or messages, and overrides for n, temp, seed and stop. A row with a seed of its own draws what generate
 * draws with that seed; the others share one, and each has its own stream. */
static bool read_json_row(Batch *batch, BatchRow *row, const cJSON *json, Error *error) {
    Session *session = row->session;
    Fields fields = {.object = json, .path = "row", .error = error};
    const cJSON *prompt = field(&fields, "prompt"), *messages = field(&fields, "messages"), *stop = field(&fields, "stop"),
                *seed = field(&fields, "seed"), *entry;
    if (!prompt == !messages) return fail(error, "row: wanted one of prompt and messages");
    session->max_new = read_int(&fields, "n", 0, INT_MAX, session->max_new);
    session->sampling.temperature = (float)read_number(&fields, "temp", -1e9, 1e9, (double)session->sampling.temperature);
    size_t value = session->sampling.seed;
    if (seed && !json_size(seed, &value)) field_failed(&fields, "seed", seed, "a non-negative integer");
    session->sampling.seed = value;
    if (seed) session->stream = 0;
    if (stop) {
        for (entry = cJSON_IsArray(stop) ? stop->child : stop; entry; entry = cJSON_IsArray(stop) ? entry->next : NULL) {
            if (!cJSON_IsString(entry) || !*entry->valuestring) {
                field_failed(&fields, "stop", stop, "a string or a list of strings");
                break;
            }
            arrput(row->stops, copy_string(entry->valuestring));
        }
        session->stops = row->stops;
    }
    if (fields.failed) return false;
    if (prompt && !cJSON_IsString(prompt)) return fail(error, "row: prompt wants to be a string");
    if (prompt)
        return encode_prompt(batch->runner->tokenizer, batch->options, prompt->valuestring, strlen(prompt->valuestring),
                             &row->ids, error);
    Prompt rendered = {0};
    bool ok = render_messages(batch->runner->tokenizer, messages, true, thinking(batch->options), &rendered, error);
    for (size_t i = 0; ok && i < arrlenu(rendered.ids); i++) arrput(row->ids, rendered.ids[i]);
    prompt_free(&rendered);
    return ok;
}

/* Turns line i into ids; an error names the line. */
static bool read_row(Batch *batch, size_t i, Error *error) {
    BatchRow *row = &batch->rows[i];
    const char *line = batch->lines[i];
    size_t length = batch->lengths[i];
    Error inner;
    bool ok;
    row->session = allocate_zeroed(1, sizeof(Session));
    *row->session = (Session){.stream = i,
                              .max_new = batch->options->n_new < 0 ? 256 : batch->options->n_new,
                              .stops = batch->options->stops,
                             .sampling = sampling_of(batch->options, &batch->runner->engine.config)};
    if (strspn(line, " \t") == length) ok = fail(&inner, "the line is blank");
    else if (utf8_valid(line, length) < length) ok = fail(&inner, "the line is not valid UTF-8");
    else if (!batch->jsonl) ok = encode_prompt(batch->runner->tokenizer, batch->options, line, length, &row->ids, &inner);
    else {
        cJSON *json = json_parse(line, length, "row", &inner);
        ok = json && (cJSON_IsObject(json) ? read_json_row(batch, row, json, &inner) : fail(&inner, "row: wanted a JSON object"));
        cJSON_Delete(json);
    }
    if (ok && !arrlen(row->ids)) ok = fail(&inner, "the prompt is empty");
    if (ok && arrlen(row->ids) >= batch->runner->engine.cache.context)
        ok = fail(&inner, "the prompt has %d tokens, the context holds %d", (int)arrlen(row->ids),
                  batch->runner->engine.cache.context);
    return ok || fail(error, "line %zu: %s", i + 1, inner.text);
}

/* Splits the file at newlines; a carriage return before one belongs to it; a last line needs none. */
static bool read_lines(Batch *batch, const char *path, char **text, Error *error) {
    size_t length;
    if (!read_file(path, MAX_TEXT_FILE, text, &length, error)) return false;
    for (size_t begin = 0; begin < length;) {
        char *end = memchr(*text + begin, '\n', length - begin);
        size_t stop = end ? (size_t)(end - *text) : length, size = stop - begin;
        if (size && (*text)[stop - 1] == '\r') size--;
        (*text)[begin + size] = 0;
        arrput(batch->lines, *text + begin);
        arrput(batch->lengths, size);
        begin = stop + 1;
    }
    batch->rows = allocate_zeroed(arrlenu(batch->lines), sizeof(BatchRow));
    return true;
}

/* Opens -o; with --resume counts the rows it holds in order and cuts off a last one that was interrupted. */
static bool open_output(Batch *batch, const char *path, bool resume, Error *error) {
    batch->out = stdout;
    if (!path) return true;
    long keep = 0;
    struct stat prompts, output;
    if (!stat(batch->options->positional, &prompts) && !stat(path, &output) && S_ISREG(output.st_mode)
        && prompts.st_dev == output.st_dev && prompts.st_ino == output.st_ino)
        return fail(error, "%s: holds the prompts: not touched", path);
    if (resume && access(path, F_OK) == 0) {
        char *text;
        size_t length;
        if (!read_file(path, MAX_TEXT_FILE, &text, &length, error)) return false;
        for (char *end; (end = memchr(text + keep, '\n', length - (size_t)keep)); keep = end + 1 - text) {
            cJSON *json = cJSON_ParseWithLength(text + keep, (size_t)(end - text - keep));
            size_t index;
            cJSON *reason = cJSON_GetObjectItemCaseSensitive(json, "finish_reason");
            bool mine = cJSON_IsString(reason) && json_size(cJSON_GetObjectItemCaseSensitive(json, "index"), &index)
                        && index == batch->written;
            if (mine && !strcmp(reason->valuestring, "error")) batch->some_failed = true;
            cJSON_Delete(json);
            if (!mine) {
                free(text);
                return fail(error, "%s: line %zu is not row %zu of a tide batch: not touched", path, batch->written + 1,
                            batch->written);
            }
            batch->written++;
        }
        char begins[40];                            /* as much of the next row as a kill may have left */
        size_t rest = length - (size_t)keep, size = (size_t)snprintf(begins, sizeof begins, "{\"index\":%zu,", batch->written),
               lines = arrlenu(batch->lines);
        bool mine = !memcmp(text + keep, begins, rest < size ? rest : size);
        free(text);
        if (!mine)
            return fail(error, "%s: what follows its %zu rows is not the beginning of another: not touched", path,
                        batch->written);
        if (batch->written + (rest > 0) > lines)
            return fail(error, "%s: holds more rows than the %zu prompts: not touched", path, lines);
    }
    batch->out = fopen(path, resume ? "a" : "w");
    if (!batch->out || (resume && ftruncate(fileno(batch->out), keep))) return fail(error, "%s: %s", path, strerror(errno));
    return true;
}

/* Writes the rows that are finished and next in order. */
static bool write_rows(Batch *batch, Error *error) {
    for (; batch->written < arrlenu(batch->lines) && batch->rows[batch->written].output; batch->written++) {
        BatchRow *row = &batch->rows[batch->written];
        if (fprintf(batch->out, "%s\n", row->output) < 0 || fflush(batch->out))
            return fail(error, "the output: %s", strerror(errno));
        cJSON_free(row->output);
        row->output = NULL;
    }
    return true;
}

static void draw_bar(const Batch *batch, bool last) {
    const Runner *runner = batch->runner;
    int n = (int)arrlen(batch->lines), done = (int)batch->written, filled = n ? 30 * done / n : 30;
    fprintf(stderr, "\r[%.*s%*s] %d/%d rows, %.1f tokens/s%s", filled, "##############################", 30 - filled, "", done, n,
            (double)runner->tokens / fmax(runner->seconds, 1e-9), last ? "\n" : "");
}

/* The next line that can be run, its session in a slot of its own; NULL when there is none left. Lines that cannot are
 * answered. */
static BatchRow *next_row(Batch *batch, size_t *next, bool *taken) {
    while (*next < arrlenu(batch->lines)) {
        Error problem;
        size_t i = (*next)++;
        BatchRow *row = &batch->rows[i];
        if (!read_row(batch, i, &problem)) { finish_row(batch, i, problem.text); continue; }
        while (taken[row->session->slot]) row->session->slot++;
        taken[row->session->slot] = true;
        row->session->ids = row->ids;
        row->ids = NULL;
        row->started = true;
        session_begin(row->session, &batch->runner->engine);
        if (!row->session->max_new) row->session->finish = FINISH_LENGTH;
        return row;
    }
    return NULL;
}

/* A finished session's row becomes output, and its slot and memory go to others. */
static void end_row(Batch *batch, BatchRow *row, bool *taken) {
    Error problem;
    size_t i = (size_t)(row - batch->rows);
    bool failed = row->session->finish == FINISH_ERROR && !fail(&problem, "line %zu: %s", i + 1, row->session->error.text);
    cache_release(&batch->runner->engine.cache, row->session->slot);
    taken[row->session->slot] = false;
    finish_row(batch, i, failed ? problem.text : NULL);
}

/* Keeps every slot busy: a finished session's slot goes to the next row, in the order of the file, as soon as memory lets it
 * in. */
static bool run_batch(Batch *batch, Error *error) {
    Runner *runner = batch->runner;
    int slots = runner->engine.cache.sessions, running = 0;
    BatchRow *active[MAX_PASS_ROWS], *waiting = NULL;
    size_t next = batch->written, n = arrlenu(batch->lines);
    bool taken[MAX_PASS_ROWS] = {false};
    while (next < n || waiting || running) {
        while (running < slots && !interrupted && (waiting || (waiting = next_row(batch, &next, taken)))) {
            if (waiting->session->finish == RUNNING && !session_admit(runner, waiting->session)) break;
            active[running++] = waiting;
            waiting = NULL;
        }
        Session *sessions[MAX_PASS_ROWS];
        for (int i = 0; i < running; i++) sessions[i] = active[i]->session;
        run_round(runner, sessions, running);
        if (interrupted)
            return fail(error, "interrupted with %zu of %zu rows written; --resume goes on from there", batch->written, n);
        int ran = running;
        for (int i = 0; i < running; i++) {
            if (active[i]->session->finish == RUNNING) continue;
            end_row(batch, active[i], taken);
            active[i--] = active[--running];
        }
        if (running < ran) cache_step(&runner->engine.cache);       /* what they held is free before the next is let in */
        if (!write_rows(batch, error)) return false;
        if (batch->bar) draw_bar(batch, false);
    }
    return write_rows(batch, error);
}

static void batch_free(Batch *batch) {
    for (size_t i = 0; i < arrlenu(batch->lines); i++) {
        BatchRow *row = &batch->rows[i];
        free_row(row);
        cJSON_free(row->output);
    }
    free(batch->rows);
    arrfree(batch->lines);
    arrfree(batch->lengths);
}

static int command_batch(Options *options) {
    if (!options->positional) return usage("batch wants a file of prompts");
    if (options->resume && !options->output) return usage("--resume wants -o OUT.jsonl");
    options->engine.sessions = options->slots ? options->slots : 8;
    Runner runner;
    int status;
    if (!start(&runner, options, true, &status)) return status;
    size_t length = strlen(options->positional);
    Batch batch = {.runner = &runner, .options = options, .bar = isatty(STDERR_FILENO) && !options->quiet,
                   .jsonl = length > 6 && !strcmp(options->positional + length - 6, ".jsonl")};
    char *text = NULL;
    Error error;
    bool ok = read_lines(&batch, options->positional, &text, &error)
              && open_output(&batch, options->output, options->resume, &error) && run_batch(&batch, &error);
    if (batch.bar) draw_bar(&batch, true);
    if (options->stats) print_stats(&runner);
    if (batch.out && batch.out != stdout && fclose(batch.out) && ok)
        ok = fail(&error, "%s: %s", options->output, strerror(errno));
    batch_free(&batch);
    free(text);
    runner_close(&runner);
    return !ok ? report(&error) : batch.some_failed ? EXIT_SOME_ROWS : EXIT_DONE;
}

/* ---- tide eval */

typedef struct Dump {           /* what a pass leaves for --dump; probes append rows in order */
    const Config *config;
    const Backend *backend;     /* in whose memory a pass leaves it */
    float **hidden;             /* [layers + 1] stb_ds of [T, streams, hidden_size] */
    int **topk;                 /* [layers] stb_ds of [T, k] positions, -1 where fewer are visible; NULL where none is made */
    float *logits;              /* stb_ds [T + D, vocab_size] */
    int context, topk_width;
} Dump;

static void dump_hidden(void *user, int layer, const float *hidden, const Row *rows, int n_rows) {
    Dump *dump = user;
    (void)rows;
    size_t n = (size_t)n_rows * (size_t)(residual_streams(dump->config) * dump->config->hidden_size);
    dump->backend->copy_bytes(arraddnptr(dump->hidden[layer], n), hidden, n * sizeof(float));
}

static void dump_selection(void *user, int layer, const Selection *selection, const Row *rows, int n_rows) {
    Dump *dump = user;
    (void)rows;
    for (int r = 0; r < n_rows; r++) {
        int *row = arraddnptr(dump->topk[layer], dump->topk_width), count;
        dump->backend->copy_bytes(&count, selection->count + r, sizeof count);
        dump->backend->copy_bytes(row, selection->ids + (size_t)r * (size_t)selection->capacity,
                                  (size_t)dump->topk_width * sizeof *row);
        for (int i = count; i < dump->topk_width; i++) row[i] = -1;
    }
}

typedef struct DumpTensor { char name[32]; const char *dtype; int64_t shape[3]; int rank; const void *data; } DumpTensor;

/* A safetensors file of the collected tensors, all four bytes an element. */
static bool write_safetensors(const char *path, const DumpTensor *tensors, size_t n, Error *error) {
    FILE *file = fopen(path, "wb");
    if (!file) return fail(error, "%s: %s", path, strerror(errno));
    cJSON *header = cJSON_CreateObject();
    size_t offset = 0;
    for (size_t i = 0; i < n; i++) {
        cJSON *entry = cJSON_AddObjectToObject(header, tensors[i].name), *shape, *offsets;
        cJSON_AddStringToObject(entry, "dtype", tensors[i].dtype);
        shape = cJSON_AddArrayToObject(entry, "shape");
        offsets = cJSON_AddArrayToObject(entry, "data_offsets");
        size_t bytes = 4;
        for (int d = 0; d < tensors[i].rank; d++) {
            cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)tensors[i].shape[d]));
            bytes *= (size_t)tensors[i].shape[d];
        }
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)offset));
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(offset += bytes)));
    }
    char *text = cJSON_PrintUnformatted(header);
    cJSON_Delete(header);
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8;
    uint8_t size[8];
    store_u64(size, padded);
    bool ok = fwrite(size, 1, 8, file) == 8 && fprintf(file, "%s%*s", text, (int)(padded - length), "") >= 0;
    cJSON_free(text);
    for (size_t i = 0; i < n && ok; i++) {
        size_t count = 1;
        for (int d = 0; d < tensors[i].rank; d++) count *= (size_t)tensors[i].shape[d];
        ok = fwrite(tensors[i].data, 4, count, file) == count;
    }
    if (fclose(file) || !ok) return fail(error, "%s: %s", path, strerror(errno));
    return true;
}

/* Slot 0 anew, with room for `rows` rows; no earlier rows are taken over, since the logits of every row are wanted. */
static void eval_admit(Runner *runner, int rows) {
    Cache *cache = &runner->engine.cache;
    int cached;
    cache_release(cache, 0);
    while (!cache_admit(cache, 0, NULL, 0, rows, &cached)) cache_step(cache);
}

/* One pass after another over ids[0..n) of slot 0, from `cached` on, with the logits of each row handed to visit(). */
static bool eval_rows(Runner *runner, const int *ids, int cached, int n, bool (*visit)(void *, int, const float *), void *user,
                      Error *error) {
    Engine *engine = &runner->engine;
    const size_t vocab = (size_t)engine->config.vocab_size;
    float *logits = allocate_zeroed(vocab, sizeof *logits);
    bool ok = true;
    for (int begin = cached, take; begin < n && ok; begin += take) {
        cache_step(&engine->cache);
        take = n - begin < engine->state.max_rows ? n - begin : engine->state.max_rows;
        take = cache_room(&engine->cache, 0, take);
        for (int r = 0; r < take; r++) runner->rows[r] = (Row){0, begin + r, ids[begin + r]};
        ok = forward(engine, runner->rows, take, error);
        if (ok) cache_commit(&engine->cache, 0, begin + take);
        for (int first = 0, some; first < take && ok; first += some) {
            some = take - first < engine->state.logit_rows ? take - first : engine->state.logit_rows;
            for (int i = 0; i < some; i++) runner->finals[i] = first + i;
            ok = head(engine, runner->rows, runner->finals, some, error);
            for (int i = 0; i < some && ok; i++) {
                engine->backend->copy_bytes(logits, engine->state.logits + (size_t)i * vocab, vocab * sizeof *logits);
                ok = visit(user, begin + first + i, logits);
            }
        }
        if (ok && interrupted) ok = fail(error, "interrupted");
    }
    free(logits);
    return ok;
}

static bool keep_logits(void *user, int position, const float *logits) {
    Dump *dump = user;
    (void)position;
    memcpy(arraddnptr(dump->logits, (size_t)dump->config->vocab_size), logits, (size_t)dump->config->vocab_size * sizeof(float));
    return true;
}

static Dump open_dump(const Engine *engine, int prompt_rows) {
    const Config *config = &engine->config;
    const Cache *cache = &engine->cache;
    const int layers = config->num_hidden_layers, rows = prompt_rows < cache->ratio ? 1 : prompt_rows / cache->ratio;
    Dump dump = {.config = config,
                 .backend = engine->backend,
                 .context = cache->context,
                 .hidden = allocate_zeroed((size_t)layers + 1, sizeof(float *)),
                 .topk = allocate_zeroed((size_t)layers, sizeof(int *)),
                 .topk_width = cache->index_topk < rows ? cache->index_topk : rows};
    for (int i = 0; i <= layers; i++)
        arrsetcap(dump.hidden[i], (size_t)prompt_rows * (size_t)(residual_streams(config) * config->hidden_size));
    for (int i = 0; i < layers; i++)
        if (selects_rows(config, i)) arrsetcap(dump.topk[i], (size_t)prompt_rows * (size_t)dump.topk_width);
    return dump;
}

static void free_dump(Dump *dump) {
    for (int i = 0; i <= dump->config->num_hidden_layers; i++) arrfree(dump->hidden[i]);
    for (int i = 0; i < dump->config->num_hidden_layers; i++) arrfree(dump->topk[i]);
    free(dump->hidden);
    free(dump->topk);
    arrfree(dump->logits);
}

/* Everything the fixtures hold, under their names: of the prompt's T ids, and of the D that were decoded behind them. */
static bool write_dump(const Dump *dump, const char *path, const int *prompt, int T, const int *decode, int D, Error *error) {
    const Config *config = dump->config;
    const int layers = config->num_hidden_layers, streams = residual_streams(config);
    const int64_t vocab = config->vocab_size;
    DumpTensor *tensors = NULL;
    arrput(tensors, ((DumpTensor){"input_ids", "I32", {T}, 1, prompt}));
    arrput(tensors, ((DumpTensor){"logits", "F32", {T, vocab}, 2, dump->logits}));
    if (D) arrput(tensors, ((DumpTensor){"decode_ids", "I32", {D}, 1, decode}));
    if (D) arrput(tensors, ((DumpTensor){"decode_logits", "F32", {D, vocab}, 2, dump->logits + (size_t)T * (size_t)vocab}));
    for (int i = 0; i <= layers; i++) {
        DumpTensor hidden = {"", "F32", {T, config->hidden_size}, 2, dump->hidden[i]},
                   parallel = {"", "F32", {T, streams, config->hidden_size}, 3, dump->hidden[i]},
                   topk = {"", "I32", {T, dump->topk_width}, 2, i < layers ? dump->topk[i] : NULL};
        if (streams > 1) hidden = parallel;
        snprintf(hidden.name, sizeof hidden.name, "hidden.%d", i);
        snprintf(topk.name, sizeof topk.name, "topk.%d", i);
        arrput(tensors, hidden);
        if (topk.data) arrput(tensors, topk);
    }
    const bool ok = write_safetensors(path, tensors, arrlenu(tensors), error);
    arrfree(tensors);
    return ok;
}

/* The prompt in one go, then the --decode ids one at a time. */
static bool eval_dump(Runner *runner, const Options *options, int **prompt, Error *error) {
    int *decode = NULL, T = (int)arrlen(*prompt);
    if (options->decode && !parse_ids(options->decode, &decode, error)) { arrfree(decode); return false; }
    int D = (int)arrlen(decode);
    if (T + D > runner->engine.cache.context) {
        arrfree(decode);
        return fail(error, "%d ids do not fit the context of %d: raise -c", T + D, runner->engine.cache.context);
    }
    Dump dump = open_dump(&runner->engine, T);
    runner->engine.probe = (Probe){dump_hidden, dump_selection, &dump};
    eval_admit(runner, T + D);
    bool ok = eval_rows(runner, *prompt, 0, T, keep_logits, &dump, error);
    runner->engine.probe = (Probe){0};
    for (int i = 0; i < D; i++) arrput(*prompt, decode[i]);
    for (int i = 0; i < D && ok; i++) ok = eval_rows(runner, *prompt, T + i, T + i + 1, keep_logits, &dump, error);
    ok = ok && write_dump(&dump, options->dump, *prompt, T, decode, D, error);
    free_dump(&dump);
    arrfree(decode);
    return ok;
}

typedef struct Perplexity { const int *ids; int n, prefix, vocab; double nll; size_t tokens; } Perplexity;

static bool score_row(void *user, int position, const float *logits) {
    Perplexity *p = user;
    if (position + 1 >= p->n || position + 1 < p->prefix) return true;
    double total = 0, best = logits[argmax(logits, p->vocab)];
    for (int i = 0; i < p->vocab; i++) total += exp(logits[i] - best);
    p->nll += log(total) + best - logits[p->ids[position + 1]];
    p->tokens++;
    return true;
}

/* Windows as long as the context, each behind the tokenizer's own prefix; every id but an unprefixed first one is scored. */
static bool eval_perplexity(Runner *runner, const int *ids, Error *error) {
    int *prefix = NULL, *window = NULL, context = runner->engine.cache.context, total = (int)arrlen(ids), begin = 0;
    if (runner->tokenizer) tokenizer_prefix(runner->tokenizer, &prefix);
    int n_prefix = (int)arrlen(prefix),
        has_prefix = total >= n_prefix && n_prefix && !memcmp(ids, prefix, (size_t)n_prefix * sizeof(int));
    if (has_prefix) begin = n_prefix;
    else n_prefix = 0;
    Perplexity p = {.prefix = n_prefix, .vocab = runner->engine.config.vocab_size};
    bool ok = total - begin > (n_prefix ? 0 : 1) || fail(error, "perplexity wants at least %d tokens", n_prefix ? 1 : 2);
    if (ok && context <= n_prefix + 1) ok = fail(error, "perplexity wants a context of at least %d", n_prefix + 2);
    for (; ok && begin < total; begin += context - n_prefix) {
        arrsetlen(window, 0);
        for (int i = 0; i < n_prefix; i++) arrput(window, prefix[i]);
        for (int i = begin; i < total && i < begin + context - n_prefix; i++) arrput(window, ids[i]);
        p.ids = window;
        p.n = (int)arrlen(window);
        eval_admit(runner, p.n);
        ok = eval_rows(runner, window, 0, p.n, score_row, &p, error);
    }
    if (ok)
        printf("{\"perplexity\": %.6f, \"nll\": %.8f, \"tokens\": %zu, \"context\": %d}\n", exp(p.nll / (double)p.tokens),
               p.nll / (double)p.tokens, p.tokens, context);
    arrfree(prefix);
    arrfree(window);
    return ok;
}

static int command_eval(Options *options) {
    if (count_sources(options) != 1 || options->prompt) return usage("eval wants one of -f FILE and --ids LIST");
    if (!options->dump && !options->ppl) return usage("eval wants --dump OUT.safetensors, --ppl or both");
    if (options->decode && !options->dump) return usage("--decode wants --dump OUT.safetensors");
    Runner runner;
    int status;
    if (!start(&runner, options, !options->ids, &status)) return status;
    int *ids = NULL;
    Error error;
    bool ok = read_prompt(&runner, options, &ids, &error);
    if (ok && !arrlen(ids)) ok = fail(&error, "there are no tokens to evaluate");
    if (ok && options->ppl) ok = eval_perplexity(&runner, ids, &error);
    if (ok && options->dump) ok = eval_dump(&runner, options, &ids, &error);
    arrfree(ids);
    runner_close(&runner);
    return ok ? EXIT_DONE : report(&error);
}

/* ---- tide tokenize */

static bool tokenize_row(const Tokenizer *tokenizer, const char *line, size_t length, bool special, Error *error) {
    cJSON *json = json_parse(line, length, "row", error);
    if (!json) return false;
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(json, "text"),
                *messages = cJSON_GetObjectItemCaseSensitive(json, "messages");
    const cJSON *think = cJSON_GetObjectItemCaseSensitive(json, "enable_thinking");
    cJSON *answer = NULL;
    bool ok;
    if (cJSON_IsString(text)) {
        int *ids = NULL;
        ok = tokenizer_encode(tokenizer, text->valuestring, strlen(text->valuestring), special, &ids, error);
        answer = json_ids(ids, (int)arrlen(ids));
        arrfree(ids);
    } else if (messages) {
        Prompt prompt = {0};
        bool add = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, "add_generation_prompt"));
        ok = render_messages(tokenizer, messages, add, !cJSON_IsFalse(think), &prompt, error);
        answer = cJSON_CreateObject();
        char *safe = json_safe(prompt.text, arrlenu(prompt.text));
        cJSON_AddStringToObject(answer, "prompt", safe);
        cJSON_AddItemToObject(answer, "ids", json_ids(prompt.ids, (int)arrlen(prompt.ids)));
        arrfree(safe);
        prompt_free(&prompt);
    } else ok = fail(error, "row: wanted text or messages");
    char *printed = answer ? cJSON_PrintUnformatted(answer) : NULL;
    if (ok) puts(printed);
    cJSON_free(printed);
    cJSON_Delete(answer);
    cJSON_Delete(json);
    return ok;
}

static bool tokenize_jsonl(const Tokenizer *tokenizer, const char *path, bool special, Error *error) {
    Batch batch = {0};
    char *text = NULL;
    Error inner;
    bool ok = read_lines(&batch, path, &text, error);
    for (size_t i = 0; ok && i < arrlenu(batch.lines); i++)
        ok = tokenize_row(tokenizer, batch.lines[i], batch.lengths[i], special, &inner)
             || fail(error, "%s: line %zu: %s", path, i + 1, inner.text);
    batch_free(&batch);
    free(text);
    return ok;
}

static bool tokenize_text(const Tokenizer *tokenizer, const char *text, size_t length, bool special, Error *error) {
    int *ids = NULL;
    bool ok = tokenizer_encode(tokenizer, text, length, special, &ids, error);
    if (ok) print_ids(ids, arrlenu(ids));
    arrfree(ids);
    return ok;
}

static bool print_decoded(const Tokenizer *tokenizer, const char *list, Error *error) {
    int *ids = NULL;
    bool ok = parse_ids(list, &ids, error);
    for (size_t i = 0; ok && i < arrlenu(ids); i++) {
        size_t length;
        const char *bytes = tokenizer_bytes(tokenizer, ids[i], &length);
        if (!bytes) ok = fail(error, "id %d names no token: the tokenizer has %d", ids[i], tokenizer_size(tokenizer));
        else fwrite(bytes, 1, length, stdout);
    }
    if (ok) putchar('\n');
    arrfree(ids);
    return ok;
}

static int command_tokenize(Options *options) {
    if ((options->prompt != NULL) + (options->file != NULL) + (options->jsonl != NULL) + (options->decode != NULL) != 1)
        return usage("tokenize wants one of -p TEXT, -f FILE, --jsonl FILE and --decode LIST");
    Error error;
    Tokenizer *tokenizer = tokenizer_open(options->engine.model, &error);
    if (!tokenizer) return report(&error);
    if (options->effort && !chat_set_effort(tokenizer, options->effort, &error)) {
        tokenizer_close(tokenizer);
        return report(&error);
    }
    bool special = options->special && !strcmp(options->special, "on"), ok;
    char *text = NULL;
    size_t length;
    if (options->decode) ok = print_decoded(tokenizer, options->decode, &error);
    else if (options->jsonl) ok = tokenize_jsonl(tokenizer, options->jsonl, special, &error);
    else if (options->prompt) ok = tokenize_text(tokenizer, options->prompt, strlen(options->prompt), special, &error);
    else
        ok = read_file(options->file, MAX_TEXT_FILE, &text, &length, &error)
             && tokenize_text(tokenizer, text, length, special, &error);
    free(text);
    tokenizer_close(tokenizer);
    return ok ? EXIT_DONE : report(&error);
}

/* ---- tide inspect */

static void print_layers(const char *name, const bool *flags, int n) {
    printf("%s", name);
    for (int i = 0; i < n; i++) if (flags[i]) printf(" %d", i);
    putchar('\n');
}

/* V4: layer by layer the positions of a compressed row, and where experts are chosen by the token's id. */
static void print_compression(const Config *config) {
    printf("compress_ratios");
    for (int i = 0; i < config->num_hidden_layers; i++) {
        const Compression compression = config->compression[i];
        printf(" %d", compression == COMPRESSION_SPARSE ? config->sparse_ratio : compression ? config->heavy_ratio : 0);
    }
    putchar('\n');
    print_layers("experts by the token's id in layers", config->hash_routed, config->num_hidden_layers);
}

/* V4.1: who makes rows, who selects, and Engram. */
static void print_sources(const Config *config) {
    printf("compress_ratios");
    for (int i = 0; i < config->num_hidden_layers; i++)
        printf(" %d", config->source[i] < 0 ? 0 : config->source_ratio[config->source[i]]);
    putchar('\n');
    print_layers("rows and index keys are made in layers", config->makes_rows, config->num_hidden_layers);
    print_layers("rows are selected in layers", config->selects, config->num_hidden_layers);
    if (config->candidate_source_layer_id >= 0)
        printf("candidates: %d blocks of %d rows, from layer %d on\n", config->candidate_topk_blocks, config->candidate_block_size,
               config->candidate_source_layer_id);
    for (int i = 0; i < config->num_hidden_layers; i++)
        if (config->engram_rows[i])
            printf("Engram in layer %d: %lld rows of %d, %d read for a token\n", i, (long long)config->engram_rows[i],
                   config->engram_head_dim, (config->engram_order - 1) * config->engram_n_heads);
}

static void print_v4_config(const Config *config) {
    printf("head_dim %d\nqk_rope_head_dim %d\nq_lora_rank %d\no_lora_rank %d\no_groups %d\nsliding_window %d\nhc_mult %d\n"
           "hc_sinkhorn_iters %d\nswiglu_limit %g\n",
           config->head_dim, config->qk_rope_head_dim, config->q_lora_rank, config->o_lora_rank, config->o_groups,
           config->sliding_window, config->hc_mult, config->hc_sinkhorn_iters, (double)config->swiglu_limit);
    printf("compress_rope_theta %g%s\n", config->compress_rope.rope_theta, config->compress_rope.yarn ? ", yarn" : "");
    (config->compression ? print_compression : print_sources)(config);
    printf("index_n_heads %d\nindex_head_dim %d\nindex_topk %d\nn_routed_experts %d\nnum_experts_per_tok %d\n"
           "n_shared_experts %d\nmoe_intermediate_size %d\nrouted_scaling_factor %g\n",
           config->index_n_heads, config->index_head_dim, config->index_topk, config->n_routed_experts,
           config->num_experts_per_tok, config->n_shared_experts, config->moe_intermediate_size,
           (double)config->routed_scaling_factor);
}

static void print_config(const Config *config) {
    printf("model_type %s\nvocab_size %d\nhidden_size %d\nnum_hidden_layers %d\nnum_attention_heads %d\nmax_position_embeddings "
           "%d\nrms_norm_eps %g\ntie_word_embeddings %s\n",
           config->model_type, config->vocab_size, config->hidden_size, config->num_hidden_layers, config->num_attention_heads,
           config->max_position_embeddings, (double)config->rms_norm_eps, config->tie_word_embeddings ? "true" : "false");
    printf("rope_theta %g%s\n", config->rope.rope_theta, config->rope.yarn ? ", yarn" : "");
    if (config->rope.yarn)
        printf("yarn factor %g, original_max_position_embeddings %d\n", config->rope.factor,
               config->rope.original_max_position_embeddings);
    if (config->intermediate_size) printf("intermediate_size %d\n", config->intermediate_size);
    if (residual_streams(config) > 1) print_v4_config(config);
    else if (!has_latent_attention(config))
        printf("num_key_value_heads %d\nhead_dim %d\n", config->num_key_value_heads, config->head_dim);
    else {
        printf("q_lora_rank %d\nkv_lora_rank %d\nqk_nope_head_dim %d\nqk_rope_head_dim %d\nv_head_dim %d\n", config->q_lora_rank,
               config->kv_lora_rank, config->qk_nope_head_dim, config->qk_rope_head_dim, config->v_head_dim);
        printf("index_n_heads %d\nindex_head_dim %d\nindex_topk %d\nindexer rope %s\n", config->index_n_heads,
               config->index_head_dim, config->index_topk, config->indexer_rope_interleave ? "interleaved" : "half-split");
        print_layers("full indexers in layers", config->indexer_full, config->num_hidden_layers);
        printf("n_routed_experts %d\nnum_experts_per_tok %d\nn_shared_experts %d\nmoe_intermediate_size %d\nn_group "
               "%d\ntopk_group %d\nrouted_scaling_factor %g\n",
               config->n_routed_experts, config->num_experts_per_tok, config->n_shared_experts, config->moe_intermediate_size,
               config->n_group, config->topk_group, (double)config->routed_scaling_factor);
        print_layers("experts in layers", config->mlp_sparse, config->num_hidden_layers);
    }
    printf("eos_token_id");
    for (int i = 0; i < config->n_eos; i++) printf(" %d", config->eos_token_id[i]);
    printf("\nsampling: temperature %g, top_p %g, top_k %d, min_p %g, repetition_penalty %g\n", (double)config->temperature,
           (double)config->top_p, config->top_k, (double)config->min_p, (double)config->repetition_penalty);
}

static void print_draft_config(const DraftConfig *config) {
    const Config *backbone = &config->backbone;
    printf("drafter %s\nnum_hidden_layers %d\nnum_attention_heads %d\nnum_key_value_heads %d\nhead_dim %d\n",
           config->architecture, backbone->num_hidden_layers, backbone->num_attention_heads, backbone->num_key_value_heads,
           backbone->head_dim);
    if (backbone->n_routed_experts)
        printf("n_routed_experts %d\nnum_experts_per_tok %d\n", backbone->n_routed_experts, backbone->num_experts_per_tok);
    else printf("intermediate_size %d\n", backbone->intermediate_size);
    printf("block_size %d\n", config->block_size);
    printf("row k of a block predicts position n + k%s\ntarget_layer_ids", config->first_slot ? ", row 0 nothing" : " + 1");
    for (int i = 0; i < config->n_taps; i++) printf(" %d", config->target_layer_ids[i]);
    printf("\nwindows");
    for (int i = 0; i < backbone->num_hidden_layers; i++)
        if (config->window[i] == INT_MAX) printf(" all%s", config->causal[i] ? " (causal)" : "");
        else printf(" %d%s", config->window[i], config->causal[i] ? " (causal)" : "");
    printf("\nmask_token_id %d\nconv_kernel_size %d\nselector_rank %d\nmarkov_rank %d\ndraft_vocab_size %d\n",
           config->mask_token_id, config->conv_kernel_size, config->selector_rank, config->markov_rank, config->draft_vocab_size);
}

static void print_tensors(const Checkpoint *checkpoint) {
    for (size_t i = 0; i < arrlenu(checkpoint->tensors); i++) {
        const Tensor *tensor = &checkpoint->tensors[i];
        char shape[128], line[512];
        snprintf(line, sizeof line, "%-60s %-8s %-20s %12zu bytes", tensor->name, tensor->dtype_name,
                 shape_text(shape, tensor->rank, tensor->shape), tensor->size);
        puts(replace_controls(line));
    }
}

/* What history costs: of every token, and of every session whatever its length; and what a step does to look its rows up (the
 * paper's table 3). */
static void print_kv(const Cache *cache, const Config *config) {
    double paged = 0, keys = 0;
    size_t trails = 0;
    int resolves = 0;
    for (int s = 0; s < cache->sources; s++) paged += (double)cache->format.bytes / (cache->ratio * stretch_of(cache, s));
    for (int g = 0; g < cache->groups; g++) keys += (double)cache->index_format.bytes / (cache->ratio * stretch_of(cache, g));
    for (int i = 0; i < config->num_hidden_layers; i++) resolves += selects_rows(config, i);
    const double heavy = cache->heavy_layers ? (double)cache->heavy_layers * (double)cache->format.bytes / cache->heavy_ratio : 0,
                 rows = paged + heavy;
    for (int i = 0; i < cache->trail_layers * TRAILS; i++) trails += (size_t)cache->trails[i].length * cache->trails[i].stride;
    printf("%.0f bytes of history a token: %.0f of rows, %.0f of index keys", rows + keys, rows, keys);
    if (trails) printf("; %.1f MB a session of windows and of groups that are not rows yet", (double)trails / 1e6);
    putchar('\n');
    if (cache->mode == MODE_RESIDENT || !resolves) return;
    printf("%.0f bytes of them in host memory, in rows of %zu from %d sources; a step resolves %d selections of %d rows and "
           "copies for %d followers; a hot cache of %.1f MB a session\n",
           paged, cache->format.bytes, cache->sources, resolves, cache->index_topk,
           cache->trail_layers ? 0 : cache->sources - resolves,
           (double)cache->hot_pages * (double)rows_before(cache, cache->sources) * (double)cache->format.bytes / 1e6);
}

/* What history costs in every kind of rows that the family can have. */
static int print_plans(Options *options) {
    Engine engine;
    Error error;
    int kinds = 0;
    options->engine.dummy = true;
    for (KvDtype dtype = KV_F32; dtype <= KV_F4; dtype++) {
        options->engine.kv_dtype = dtype;
        if (engine_plan(&engine, &options->engine, &error)) {
            if (!kinds++) print_config(&engine.config);
            printf("--kv-dtype %s: ", kv_dtype_names[dtype]);
            print_kv(&engine.cache, &engine.config);
        }
        engine_close(&engine);
    }
    return kinds ? EXIT_DONE : report(&error);
}

static int command_inspect(Options *options) {
    Engine engine;
    Error error;
    if (options->slots) options->engine.sessions = options->slots;
    if (options->plan) return print_plans(options);
    bool ok = engine_plan(&engine, &options->engine, &error);
    if (ok) print_config(&engine.config);
    if (ok) print_tensors(&engine.checkpoint);
    if (ok && engine.drafter.config.architecture) {
        print_draft_config(&engine.drafter.config);
        print_tensors(&engine.drafter.checkpoint);
    }
    ok = ok && engine_bind(&engine, NULL, &error);
    if (ok)
        printf("%.1f M parameters in use, %.1f MB\n", (double)engine.weights.parameters / 1e6,
               (double)engine.weights.bytes / 1e6);
    if (ok && engine.drafter.config.architecture)
        printf("%.1f M parameters of the drafter\n", (double)engine.drafter.weights.backbone.parameters / 1e6);
    if (ok) print_kv(&engine.cache, &engine.config);
    if (ok) print_plan(stdout, &engine);
    ok = ok && check_memory(&engine, &error);
    engine_close(&engine);
    return ok ? EXIT_DONE : report(&error);
}

/* ---- tide chat
 *
 * The conversation is kept as ids, so a turn re-uses every cached row. A turn that fails, or does not fit, leaves the
 * conversation as it was.
 */

static const char plain_style[] = "\033[0m";

typedef struct Chat {
    Runner *runner;
    Options *options;
    Session session;
    int turn_start;             /* ids before the last user message; where a failed turn returns to */
    int answer_start;           /* ids before the last answer; -1: there is none to regenerate */
    char *system;               /* or NULL */
    bool think, colour;
    bool shades;                /* accepted drafts are shown */
    const char *style;          /* what the terminal was last told about colours */
    bool leaving, ended;        /* by command; because the input ended */
    bool dumb;                  /* the terminal knows no escape sequences */
    EditLine *editor;           /* NULL: input is not a terminal */
    History *history;
} Chat;

/* The chat's terminal is neither echoing nor collecting lines: what is typed during an answer waits, unharmed, for the next
 * prompt. However the program ends, the user gets the terminal back as it was. */
static volatile sig_atomic_t terminal_taken, terminal_changed;
static struct termios terminal_modes;               /* as they were */
static const char *terminal_undo = "";              /* what to print */

static void give_terminal_back(void) {
    if (!terminal_taken) return;
    terminal_taken = 0;
    if (write(STDOUT_FILENO, terminal_undo, strlen(terminal_undo)) < 0) return;
    tcsetattr(STDIN_FILENO, TCSANOW, &terminal_modes);
}

static void handle_fatal_signal(int number) {       /* installed to act once */
    give_terminal_back();
    raise(number);
}

static void handle_interrupt(int number) {
    (void)number;
    if (!interrupted++) return;
    give_terminal_back();                           /* the second one ends the program */
    _exit(130);
}

/* A Ctrl-C makes waiting for input return, but never cuts a write short. In the line editor it is held back except while
 * read_key() waits, so that none goes unnoticed and no two of them count as a second one. */
static void catch_interrupts(bool waiting, bool editing) {
    struct sigaction action = {.sa_handler = handle_interrupt, .sa_flags = waiting ? 0 : SA_RESTART};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaction(SIGINT, &action, NULL);
    sigprocmask(waiting && editing ? SIG_BLOCK : SIG_UNBLOCK, &set, NULL);
}

/* Another size, or back from being suspended. */
static void handle_change(int number) {
    (void)number;
    terminal_changed = 1;
}

static void show_line_again(EditLine *editor) {
    terminal_changed = 0;
    el_resize(editor);
    el_set(editor, EL_PREP_TERM, 0);                /* whoever had the terminal in between left modes of his own */
    el_set(editor, EL_PREP_TERM, 1);
    el_set(editor, EL_REFRESH);
}

/* One character for the editor: 1, or 0 at the end of input, or -1. */
static int read_key(EditLine *editor, wchar_t *key) {
    static mbstate_t state;
    sigset_t none;
    sigemptyset(&none);
    for (;;) {
        struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
        char byte;
        if (!interrupted && ppoll(&input, 1, NULL, &none) < 0 && errno != EINTR) return -1;
        if (interrupted) return -1;
        if (terminal_changed) show_line_again(editor);
        if (!input.revents) continue;
        ssize_t n = read(STDIN_FILENO, &byte, 1);
        if (n <= 0) return (int)n;
        size_t used = mbrtowc(key, &byte, 1, &state);
        if (used == (size_t)-2) continue;           /* the character goes on */
        if (used == (size_t)-1) {
            state = (mbstate_t){0};
            *key = 0xfffd;
        }
        return 1;
    }
}

static const char *prompt_text(EditLine *editor) {
    void *data;
    el_get(editor, EL_CLIENTDATA, &data);
    const Chat *chat = data;
    return chat->colour ? "\1\033[1m\1> \1\033[0m\1" : "> ";
}

/* Bound to the sequence a terminal sends before pasted text: takes everything up to the closing one as it is. */
static unsigned char take_paste(EditLine *editor, int key) {
    static const wchar_t closing[] = L"\033[201~";
    wchar_t *text = NULL, c;
    size_t end = wcslen(closing);
    (void)key;
    while (el_wgetc(editor, &c) == 1) {
        arrput(text, c == '\r' ? '\n' : c);
        if (arrlenu(text) >= end && !wmemcmp(text + arrlenu(text) - end, closing, end)) {
            arrsetlen(text, arrlenu(text) - end);
            break;
        }
    }
    arrput(text, 0);
    bool fits = el_winsertstr(editor, text) == 0;
    arrfree(text);
    return fits ? CC_REFRESH : CC_ERROR;
}

static const char *history_path(char buffer[PATH_MAX]) {
    const char *home = getenv("HOME");
    return home ? join(buffer, home, ".tide_history") : NULL;
}

static void open_editor(Chat *chat) {
    if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO)) return;
    char path[PATH_MAX];
    HistEvent event;
    if (tcgetattr(STDIN_FILENO, &terminal_modes)) return;
    chat->editor = el_init("tide", stdin, stdout, stderr);
    chat->history = history_init();
    if (!chat->editor || !chat->history) return;
    static const int fatal[] = {SIGTERM, SIGHUP, SIGQUIT};
    struct sigaction action = {.sa_handler = handle_fatal_signal, .sa_flags = (int)SA_RESETHAND};
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) sigaction(fatal[i], &action, NULL);
    signal(SIGWINCH, handle_change);
    signal(SIGCONT, handle_change);
    atexit(give_terminal_back);
    terminal_taken = 1;
    el_set(chat->editor, EL_SETTY, "-x", "-icanon", "-echo", NULL);     /* outside the editor's own reading */
    history(chat->history, &event, H_SETSIZE, 500);
    if (history_path(path)) history(chat->history, &event, H_LOAD, path);
    el_set(chat->editor, EL_CLIENTDATA, chat);
    el_set(chat->editor, EL_GETCFN, read_key);
    el_set(chat->editor, EL_PROMPT_ESC, prompt_text, '\1');
    el_set(chat->editor, EL_EDITOR, "emacs");
    el_set(chat->editor, EL_HIST, history, chat->history);
    el_wset(chat->editor, EL_ADDFN, L"take-paste", L"takes a bracketed paste as one message",
            take_paste); /* el_set() leaks both texts */
    el_set(chat->editor, EL_BIND, "\033[200~", "take-paste", NULL);
    if (chat->dumb) return;
    terminal_undo = "\033[0m\033[?2004l";
    fputs("\033[?2004h", stdout);                   /* asks the terminal to bracket what is pasted */
}

static void close_editor(Chat *chat) {
    char path[PATH_MAX];
    HistEvent event;
    if (chat->history && history_path(path)) {
        mode_t mask = umask(077);                   /* what one types is nobody else's */
        history(chat->history, &event, H_SAVE, path);
        umask(mask);
    }
    fflush(stdout);
    if (chat->editor) el_end(chat->editor);
    if (chat->history) history_end(chat->history);
    give_terminal_back();
}

/* Whether more input is there already: only a paste is that fast. */
static bool more_pending(void) {
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    return poll(&input, 1, 20) > 0 && (input.revents & POLLIN);
}

/* One message into *line (stb_ds, NUL-terminated); false at the end of input. On a terminal, lines that arrive together are one
 * message; from a pipe every line is one. */
static bool read_message(Chat *chat, char **line) {
    arrsetlen(*line, 0);
    char *buffer = NULL;
    size_t capacity = 0;
    bool got = false;
    catch_interrupts(true, chat->editor);
    for (;;) {
        int n = 0;
        const char *piece;
        if (chat->editor) piece = el_gets(chat->editor, &n);
        else piece = (n = (int)getline(&buffer, &capacity, stdin)) > 0 ? buffer : NULL;
        if (!piece && chat->editor && interrupted) {    /* Ctrl-C at the prompt drops the line, however often */
            interrupted = 0;
            fputs("\n", stdout);
            el_reset(chat->editor);
            arrsetlen(*line, 0);
            got = false;
            continue;
        }
        if (!piece || n <= 0) {                     /* the end of input, perhaps right behind a line */
            chat->ended = true;
            break;
        }
        got = true;
        memcpy(arraddnptr(*line, (size_t)n), piece, (size_t)n);
        if (!chat->editor || (*line)[0] == '/' || !more_pending()) break;
    }
    if (got) interrupted = 0;
    catch_interrupts(false, chat->editor);
    free(buffer);
    while (arrlen(*line) && (arrlast(*line) == '\r' || arrlast(*line) == '\n')) arrsetlen(*line, arrlenu(*line) - 1);
    HistEvent event;
    arrput(*line, 0);
    if (chat->history && (*line)[0]) history(chat->history, &event, H_ENTER, *line);
    return got;
}

/* Reasoning is grey until its closing tag has been sampled; accepted drafts are cyan where that was asked for. */
static const char *text_style(const Chat *chat, const Session *session) {
    int close = chat_think_close(chat->runner->tokenizer);
    bool reasoning = chat->colour && chat->think;
    if (chat->shades && session->accepted) return "\033[36m";
    for (int i = session->prompt_length; i < arrlen(session->ids); i++) reasoning &= session->ids[i] != close;
    return reasoning ? "\033[90m" : plain_style;
}

static void chat_style(Chat *chat, const char *style) {
    if (strcmp(chat->style, style)) fputs(style, stdout);
    chat->style = style;
}

static void chat_emit(Session *session, const char *text, size_t length) {
    Chat *chat = session->user;
    chat_style(chat, text_style(chat, session));
    emit_to_stdout(session, text, length);
}

static void chat_rollback(Chat *chat, int length) {
    Session *session = &chat->session;
    arrsetlen(session->ids, (size_t)length);
    if (session->cached > length) session->cached = length;
}

/* Generates after the ids that are there, printing as it goes. */
static void chat_answer(Chat *chat) {
    Session *session = &chat->session;
    Runner *runner = chat->runner;
    chat->answer_start = (int)arrlen(session->ids);
    session_begin(session, &runner->engine);
    int evaluated = session->prompt_length - session->cached;
    double begin = now();
    run_session(runner, session);
    chat_style(chat, plain_style);
    putchar('\n');
    fflush(stdout);
    if (ferror(stdout)) chat->leaving = true;       /* main() says why */
    else if (session->finish == FINISH_ERROR) {
        fprintf(stderr, "tide: %s; the turn was taken back\n", session->error.text);
        chat_rollback(chat, chat->turn_start);
        chat->answer_start = -1;
    }
    if (session->finish == FINISH_CONTEXT)
        fprintf(stderr, "tide: the context of %d tokens is full: /clear starts anew, -c makes more room\n",
                runner->engine.cache.context);
    if (session->finish == FINISH_INTERRUPTED) fputs("tide: interrupted\n", stderr);
    if (chat->options->stats)
        fprintf(stderr, "tide: %d tokens evaluated, %d re-used, %d generated, %.1f tokens/s\n", evaluated,
                session->prompt_length - evaluated, tokens_generated(session),
                tokens_generated(session) / fmax(now() - begin, 1e-9));
    interrupted = 0;
}

/* A user's message: rendered behind what is there, refused whole if it does not fit. */
static void chat_turn(Chat *chat, const char *text, size_t length) {
    Session *session = &chat->session;
    const Tokenizer *tokenizer = chat->runner->tokenizer;
    Message messages[2] = {{"system", chat->system, chat->system ? strlen(chat->system) : 0}, {"user", text, length}};
    int first = chat->system ? 0 : 1, used = (int)arrlen(session->ids), context = chat->runner->engine.cache.context;
    Prompt prompt = {0};
    Error error;
    bool ok = used ? chat_render_next(tokenizer, session->ids[used - 1], text, length, chat->think, &prompt, &error)
                   : chat_render(tokenizer, messages + first, 2 - first, true, chat->think, &prompt, &error);
    int added = (int)arrlen(prompt.ids);
    if (ok && used + added >= context)
        ok = fail(&error, "the message has %d tokens and %d of %d are in use: it does not fit; /clear starts anew", added, used,
                  context);
    if (!ok) report(&error);
    else {
        chat->turn_start = used;
        for (int i = 0; i < added; i++) arrput(session->ids, prompt.ids[i]);
        chat_answer(chat);
    }
    prompt_free(&prompt);
}

static void chat_clear(Chat *chat) {
    chat_rollback(chat, 0);
    chat->turn_start = 0;
    chat->answer_start = -1;
}

/* What a conversation is besides its session. */
static cJSON *chat_settings(const Chat *chat) {
    cJSON *settings = cJSON_CreateObject();
    cJSON_AddBoolToObject(settings, "think", chat->think);
    if (chat->system) cJSON_AddStringToObject(settings, "system", chat->system);
    const char *effort = chat_effort(chat->runner->tokenizer);
    if (effort) cJSON_AddStringToObject(settings, "effort", effort);
    cJSON_AddNumberToObject(settings, "turn_start", chat->turn_start);
    cJSON_AddNumberToObject(settings, "answer_start", chat->answer_start);
    return settings;
}

static bool chat_save(Chat *chat, const char *path, Error *error) {
    cache_truncate(&chat->runner->engine.cache, chat->session.slot,
                   chat->session.cached); /* rows of a turn taken back stay here */
    return session_save(chat->runner, &chat->session, path, chat_settings(chat), error);
}

/* The session and the conversation of an opened file; a file that generate left has no turns yet. Nothing changes before all of
 * it has been found good. */
static bool chat_restore(Chat *chat, const cJSON *header, FILE *file, const char *path, Error *error) {
    Fields top = {.object = header, .path = path, .error = error};
    Fields fields = {.object = field(&top, "chat"), .path = path, .error = error};
    int n = cJSON_GetArraySize(field(&top, "ids"));
    const cJSON *system = field(&fields, "system"), *effort = field(&fields, "effort");
    bool think = read_bool(&fields, "think", false);
    int turn_start = read_int(&fields, "turn_start", 0, n, n), answer_start = read_int(&fields, "answer_start", -1, n, -1);
    if (answer_start >= 0 && answer_start <= turn_start)
        field_failed(&fields, "answer_start", field(&fields, "answer_start"), "a place behind turn_start");
    if (system && !cJSON_IsString(system)) field_failed(&fields, "system", system, "a string");
    if (effort && !cJSON_IsString(effort)) field_failed(&fields, "effort", effort, "a string");
    if (fields.failed || !chat_set_effort(chat->runner->tokenizer, effort ? effort->valuestring : NULL, error)) return false;
    chat_clear(chat);
    if (!session_restore(chat->runner, &chat->session, header, file, path, error)) return false;
    free(chat->system);
    chat->system = system ? copy_string(system->valuestring) : NULL;
    chat->think = think;
    chat->turn_start = turn_start;
    chat->answer_start = answer_start;
    return true;
}

static bool chat_load(Chat *chat, const char *path, Error *error) {
    FILE *file;
    cJSON *header = session_open(chat->runner, path, &file, error);
    if (!header) return false;
    bool ok = chat_restore(chat, header, file, path, error);
    cJSON_Delete(header);
    fclose(file);
    return ok;
}

/* Where the history lies, a line a session: '=' on the device, '-' on the host alone, '>' in the tail. A mark stands for several
 * pages where they are many, and for the host where any of them lies there alone. */
static void print_history(const Cache *cache) {
    enum { WIDTH = 64 };
    for (int s = 0; s < cache->sessions; s++) {
        const SessionPages *session = &cache->session[s];
        int pages = (session->committed + page_positions(cache) - 1) / page_positions(cache);
        const int marks = pages < WIDTH ? pages : WIDTH;
        char bar[WIDTH + 1] = "";
        for (int mark = 0; mark < marks; mark++) {
            bar[mark] = '>';
            for (int page = pages * mark / marks; page < pages * (mark + 1) / marks; page++) {
                PageState state = (PageState)session->pages[page].state;
                if (state == PAGE_READY && bar[mark] == '>') bar[mark] = '=';
                if (state == PAGE_ABSENT || state == PAGE_FILLING) bar[mark] = '-';
            }
        }
        if (!session->admitted) fprintf(stderr, "tide: session %d: nothing is cached yet\n", s);
        else
            fprintf(stderr,
                    "tide: session %d [%s] %d rows, %d whole pages below the tail, %.0f%% lent; = device, - host, > tail\n", s,
                    bar, session->committed, cache->tables.tail_base[s] / PAGE_ROWS, 100 * cache_coverage(cache, s));
    }
}

static const char chat_help[] =
    "/clear           forget the conversation        /system TEXT   set the system message and start anew\n"
    "/think on|off    reason before answering        /temp T        sampling temperature, 0 is greedy\n"
    "/effort LEVEL    low, high or max: reason so much before answering, and start anew\n"
    "/regen           answer the last message again  /stats         what was computed so far\n"
    "/kv              where the history lies         /draft         show accepted drafts in another shade, or no longer\n"
    "/save FILE  /load FILE   the conversation        /quit          leave (so does Ctrl-D)\n"
    "Ctrl-C stops an answer; a second one ends the program. Text pasted over several lines is one message.\n";

static void chat_regenerate(Chat *chat) {
    if (chat->answer_start < 0) { fputs("tide: there is no answer to regenerate\n", stderr); return; }
    chat_rollback(chat, chat->answer_start);
    chat->session.sampling.seed++;                  /* other noise, or the same answer would come back */
    chat_answer(chat);
}

static void chat_set_temperature(Chat *chat, const char *argument) {
    char *end;
    double value = strtod(argument, &end);
    if (end == argument || *end || !(fabs(value) <= 1e9)) notice("/temp: found \"%s\", wanted a number", argument);
    else chat->session.sampling.temperature = (float)value;
}

static void chat_toggle_shades(Chat *chat) {
    if (!chat->runner->engine.drafter.config.architecture) notice("/draft: there is no drafter");
    else if (!chat->colour) notice("/draft: this terminal has no colours");
    else {
        chat->shades = !chat->shades;
        notice("accepted drafts are shown %s", chat->shades ? "in another shade" : "like the rest");
    }
}

static void chat_command(Chat *chat, char *line) {
    for (size_t n = strlen(line); n && isspace((unsigned char)line[n - 1]);) line[--n] = 0;
    char *argument = line + strcspn(line, " \t");
    if (*argument) *argument++ = 0;
    argument += strspn(argument, " \t");
    Error error;
    bool is_save = !strcmp(line, "/save"), is_load = !strcmp(line, "/load");
    if (!strcmp(line, "/help")) fputs(chat_help, stderr);
    else if (!strcmp(line, "/clear")) chat_clear(chat);
    else if (!strcmp(line, "/quit")) chat->leaving = true;
    else if (!strcmp(line, "/regen")) chat_regenerate(chat);
    else if (!strcmp(line, "/kv")) print_history(&chat->runner->engine.cache);
    else if (!strcmp(line, "/temp")) chat_set_temperature(chat, argument);
    else if (!strcmp(line, "/draft")) chat_toggle_shades(chat);
    else if (!strcmp(line, "/stats")) {
        fprintf(stderr, "tide: %d of %d tokens in use\n", (int)arrlen(chat->session.ids), chat->runner->engine.cache.context);
        print_stats(chat->runner);
    } else if (!strcmp(line, "/think")) {
        if (!strcmp(argument, "on") || !strcmp(argument, "off")) chat->think = !strcmp(argument, "on");
        else notice("/think: found \"%s\", wanted on or off", argument);
    } else if (!strcmp(line, "/effort")) {
        if (!chat_set_effort(chat->runner->tokenizer, argument, &error)) return (void)report(&error);
        chat->think = true;
        chat_clear(chat);
        fputs("tide: a new conversation begins\n", stderr);
    } else if (!strcmp(line, "/system")) {
        free(chat->system);
        chat->system = *argument ? copy_string(argument) : NULL;
        chat_clear(chat);
        fputs("tide: a new conversation begins\n", stderr);
    } else if ((is_save || is_load) && !*argument) fprintf(stderr, "tide: %s wants a file name\n", line);
    else if (is_save || is_load) {
        if (!(is_save ? chat_save(chat, argument, &error) : chat_load(chat, argument, &error))) report(&error);
        else notice("%s %s: %d tokens", is_save ? "saved" : "loaded", argument, (int)arrlen(chat->session.ids));
    } else notice("there is no command %s; /help lists them", line);
}

static bool can_chat(const Tokenizer *tokenizer, Error *error) {
    Prompt nothing = {0};
    const bool can = chat_render(tokenizer, NULL, 0, true, false, &nothing, error);
    prompt_free(&nothing);
    return can;
}

static void begin_chat(Chat *chat, Runner *runner, Options *options) {
    const char *terminal = getenv("TERM"), *no_color = getenv("NO_COLOR");
    const bool dumb = !terminal || !*terminal || !strcmp(terminal, "dumb");
    *chat = (Chat){.runner = runner,
                   .options = options,
                   .answer_start = -1,
                   .think = thinking(options),
                   .style = plain_style,
                   .colour = isatty(STDOUT_FILENO) && !(no_color && *no_color) && !dumb,
                   .dumb = dumb,
                   .system = options->system ? copy_string(options->system) : NULL};
    chat->session = (Session){.continues = true,
                              .max_new = options->n_new < 0 ? 0 : options->n_new,
                              .sampling = sampling_of(options, &runner->engine.config),
                              .stops = options->stops,
                              .emit = chat_emit,
                              .user = chat};
}

/* Message by message, until one leaves or there are no more. */
static void converse(Chat *chat) {
    open_editor(chat);
    if (chat->editor && !chat->leaving && !chat->options->quiet)
        fputs("Talk to the model; /help lists the commands, Ctrl-D leaves.\n", stderr);
    char *line = NULL;
    while (!chat->leaving && !chat->ended && read_message(chat, &line)) {
        size_t length = arrlenu(line) - 1;
        if (line[0] == '/') chat_command(chat, line);
        else if (strspn(line, " \t\n\r") < length) chat_turn(chat, line, length);
    }
    arrfree(line);
    if (chat->editor && !chat->leaving) putchar('\n');
}

static int command_chat(Options *options) {
    if (!options->n_new) return usage("chat wants -n to be at least 1");
    Runner runner;
    int status;
    if (!start(&runner, options, true, &status)) return status;
    Error error;
    if (!can_chat(runner.tokenizer, &error)) {
        runner_close(&runner);
        return report(&error);
    }
    Chat chat;
    begin_chat(&chat, &runner, options);
    bool resumed = !has_session(options) || chat_load(&chat, options->session, &error);
    if (resumed) override_sampling(&chat.session.sampling, options);
    chat.leaving = !resumed;
    converse(&chat);
    bool ok = chat.editor || !interrupted || fail(&error, "interrupted");       /* without an editor Ctrl-C ends the input */
    if (!resumed) ok = false;
    else if (options->session && (arrlen(chat.session.ids) || has_session(options)))
        ok = chat_save(&chat, options->session, &error) && ok;
    close_editor(&chat);
    free(chat.system);
    session_free(&chat.session);
    runner_close(&runner);
    return ok ? EXIT_DONE : report(&error);
}

/* ---- tide bench */

static int command_bench(Options *options) {
    Error error;
    const BenchOptions what = {.name = options->positional, .section = options->section, .markdown = options->markdown,
                               .slots = options->slots, .directory = options->output ? options->output : "."};
    if (what.name && listed("decode|first|speed", what.name) && !choose_device(options, &error)) return report(&error);
    int status = bench(&what, &options->engine, &error);
    if (status == EXIT_USAGE) return usage("%s", error.text);
    return status == EXIT_DONE ? status : report(&error);
}

/* ---- main */

static const struct { const char *name; int (*run)(Options *); } commands[] = {
    {"chat", command_chat}, {"generate", command_generate}, {"batch", command_batch}, {"eval", command_eval},
    {"tokenize", command_tokenize}, {"inspect", command_inspect}, {"bench", command_bench},
};

/* The file this program was started from; empty where that is not known. */
static char *program_path(char buffer[PATH_MAX]) {
    ssize_t n = readlink("/proc/self/exe", buffer, PATH_MAX - 1);
    buffer[n > 0 ? n : 0] = 0;
    return buffer;
}

/* A checkpoint in the folder of the program. */
static const char *shipped(char buffer[PATH_MAX], const char *name) {
    char program[PATH_MAX];
    char *slash = strrchr(program_path(program), '/');
    if (slash) *slash = 0;
    return join(buffer, slash ? program : ".", name);
}

static bool same_folder(const char *a, const char *b) {
    struct stat x, y;
    return !strcmp(a, b) || (!stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino);
}

static void *checked_malloc(size_t size) { return checked_realloc(NULL, size); }    /* for cJSON */

static int run_command(int argc, char **argv) {
    cJSON_InitHooks(&(cJSON_Hooks){checked_malloc, free});
    char model[PATH_MAX], draft[PATH_MAX];
    if (argc < 2) {
        fputs(usage_text, stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        fputs(usage_text, stdout);
        return EXIT_DONE;
    }
    Options options = {.n_new = -1, .top_k = -1, .temperature = NAN, .top_p = NAN, .min_p = NAN, .repeat_penalty = NAN,
                       .width = -1, .engine = {.model = shipped(model, "weights/mini"), .sessions = 1}};
    int (*run)(Options *) = NULL;
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (!strcmp(commands[i].name, argv[1])) run = commands[i].run;
    if (!run) return usage("unknown command %s", argv[1]);
    int status = parse_options(&options, argc, argv) ? EXIT_DONE : EXIT_USAGE;
    if (!status && options.help) fputs(usage_text, stdout);
    else if (!status) {
        options.chat |= options.system || options.think || options.effort;
        options.engine.draft = options.draft;
        if (!options.draft && same_folder(options.engine.model, model) && strcmp(argv[1], "eval") && !options.engine.dummy)
            options.engine.draft = shipped(draft, "weights/draft-dflash2");
        const bool own = options.draft && !strcmp(options.draft, "own");
        if (own || (options.draft && !strcmp(options.draft, "none"))) options.engine.draft = NULL;
        options.engine.stages = own ? STAGES_REQUIRED : options.draft || !strcmp(argv[1], "eval") ? STAGES_IDLE : STAGES_IF_THERE;
        if (!options.seeded && getrandom(&options.seed, sizeof options.seed, 0) != sizeof options.seed)
            options.seed = (uint64_t)time(NULL);
        if (!options.seeded) options.seed >>= 11;   /* 53 bits, so that a drawn seed survives JSON */
        if (options.threads) omp_set_num_threads(options.threads);
        status = run(&options);
        Error error;
        if (options.trace_file && (ferror(options.trace_file) | fclose(options.trace_file)) && status == EXIT_DONE) {
            fail(&error, "%s: %s", options.trace, strerror(errno));
            status = report(&error);
        }
    }
    arrfree(options.stops);
    return status;
}

/* Unless told otherwise, libgomp's threads spin for a millisecond or more at the end of each shared loop, and on a busy machine
 * a spinning thread keeps the one it waits for from its core: measured, 8 tokens a second instead of 120. The setting is
 * read before main(), so the program makes it and starts itself anew. */
static void spin_briefly(char **argv) {
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    char program[PATH_MAX];
    setenv("GOMP_SPINCOUNT", "5000", 1);
    execv(program_path(program), argv);                  /* where that fails, go on as things are */
}

int main(int argc, char **argv) {
    spin_briefly(argv);
    if (!setlocale(LC_CTYPE, "") || strcmp(nl_langinfo(CODESET), "UTF-8")) setlocale(LC_CTYPE, "C.UTF-8");
    int descriptor; /* a stream that is closed is made to fail: no file of ours may take its place */
    while ((descriptor = open("/dev/null", O_RDONLY)) >= 0 && descriptor <= STDERR_FILENO) continue;
    if (descriptor >= 0) close(descriptor);
    catch_interrupts(false, false);
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is a write error, with a message; so is a file at its limit */
    signal(SIGXFSZ, SIG_IGN);
    Error error;
    int status = run_command(argc, argv);
    return flush_stdout(&error) || status == EXIT_FAILED || status == EXIT_USAGE ? status : report(&error);
}
