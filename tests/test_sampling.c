/* test_sampling.c: the choice of a token from logits. Against the exact distribution (chi-square over 100,000 draws), the filters'
 * corner cases, and that a token depends on (seed, session, position) and nothing else. */
#include "../engine.c"
#include "../backend.c"
#include "check.h"
#include "scratch.h"

enum { VOCAB = 200, DRAWS = 100000 };

static Sampler sampler;
static const Sampling plain = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = 1234};

/* One choice from a copy of the logits. Repeats are looked for in what stands up to the position, which then is that of the last of history. */
static int draw(const float *logits, int vocab, const Sampling *sampling, uint64_t session, int position, const int *history,
                int n) {
    static float copy[1 << 17];
    memcpy(copy, logits, (size_t)vocab * sizeof(float));
    DraftBlock block = {.sampling = *sampling, .stream = session, .ids = (int *)history};
    return sample(&sampler, copy, vocab, &block, sampling->repeat_penalty == 1 ? position : n - 1);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Distributions
 */

/* The exact probabilities, filtered in transformers' order: temperature, top-k, top-p, min-p. Ties go to the lower index. */
static void exact_distribution(double *p, const float *logits, const Sampling *sampling) {
    int order[VOCAB];
    double total = 0, mass = 0, kept_mass = 0;
    for (int i = 0; i < VOCAB; i++) order[i] = i;
    for (int i = 1; i < VOCAB; i++)                 /* insertion sort, best first, stable */
        for (int j = i; j > 0 && logits[order[j]] > logits[order[j - 1]]; j--) {
            int other = order[j];
            order[j] = order[j - 1];
            order[j - 1] = other;
        }
    int kept = sampling->top_k > 0 && sampling->top_k < VOCAB ? sampling->top_k : VOCAB;
    for (int i = 0; i < VOCAB; i++) p[i] = 0;
    for (int i = 0; i < kept; i++) total += p[order[i]] = exp((double)logits[order[i]] / sampling->temperature);
    for (int i = 0; i < kept; i++) {
        bool outside = i > 0 && (mass >= sampling->top_p * total || p[order[i]] < sampling->min_p * p[order[0]]);
        mass += p[order[i]];
        if (outside) p[order[i]] = 0;
        kept_mass += p[order[i]];
    }
    for (int i = 0; i < VOCAB; i++) p[i] /= kept_mass;
}

/* Pearson's statistic of the draws; bins that expect fewer than five share one. *degrees: of freedom. */
static double chi_square(const int *counts, const double *p, int *degrees) {
    double statistic = 0, rare = 0, rare_count = 0;
    int bins = 0;
    for (int i = 0; i < VOCAB; i++) {
        double expected = p[i] * DRAWS;
        if (expected < 5) {
            rare += expected;
            rare_count += counts[i];
            continue;
        }
        statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
        bins++;
    }
    if (rare > 0) {
        statistic += (rare_count - rare) * (rare_count - rare) / rare;
        bins++;
    }
    *degrees = bins - 1;
    return statistic;
}

/* Draws either along the positions of one session or at one position of many sessions: both must follow the distribution. */
static void test_distribution(const char *name, Sampling sampling, bool along_sessions) {
    float logits[VOCAB];
    double p[VOCAB];
    int counts[VOCAB] = {0}, degrees, outside = 0;
    random_state = 42;
    for (int i = 0; i < VOCAB; i++) logits[i] = 4 * random_float() + (float)(i % 7 == 0);
    logits[50] = logits[20];                        /* a tie */
    exact_distribution(p, logits, &sampling);
    for (int i = 0; i < DRAWS; i++) {
        int token = draw(logits, VOCAB, &sampling, along_sessions ? (uint64_t)i << 20 : 7, along_sessions ? 31 : i, NULL, 0);
        CHECK(token >= 0 && token < VOCAB, "%s: token %d", name, token);
        counts[token]++;
        outside += p[token] == 0;
    }
    double statistic = chi_square(counts, p, &degrees),
           limit = degrees + 3.9 * sqrt(2.0 * degrees) + 10; /* well under one in 10,000 */
    printf("%s, along %s: chi-square %.1f with %d degrees of freedom\n", name, along_sessions ? "sessions" : "positions",
           statistic, degrees);
    CHECK(statistic < limit, "%s: chi-square %g over %d degrees of freedom", name, statistic, degrees);
    CHECK(outside == 0, "%s: %d tokens were filtered out and drawn all the same", name, outside);
}

/* The test can fail: draws from another temperature are told apart. */
static void test_the_test(void) {
    float logits[VOCAB];
    double p[VOCAB];
    int counts[VOCAB] = {0}, degrees;
    Sampling other = plain;
    random_state = 42;
    for (int i = 0; i < VOCAB; i++) logits[i] = 4 * random_float();
    exact_distribution(p, logits, &plain);
    other.temperature = 1.03f;
    for (int i = 0; i < DRAWS; i++) counts[draw(logits, VOCAB, &other, 7, i, NULL, 0)]++;
    double statistic = chi_square(counts, p, &degrees);
    CHECK(statistic > degrees + 3.9 * sqrt(2.0 * degrees) + 10, "a temperature of 1.03 is told from 1: chi-square %g over %d",
          statistic, degrees);
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Corner cases
 */

static void test_greedy(void) {
    float logits[VOCAB];
    for (int round = 0; round < 200; round++) {
        random_fill(logits, VOCAB);
        int best = random_below(VOCAB), tie = random_below(VOCAB);
        logits[best] = logits[tie] = 3;
        best = best < tie ? best : tie;
        static const float cold[] = {0, -1, 1e-9f, -INFINITY, NAN};
        for (size_t t = 0; t < sizeof cold / sizeof *cold; t++) {
            Sampling sampling = plain;
            sampling.temperature = cold[t];
            int token = draw(logits, VOCAB, &sampling, (uint64_t)round, round, NULL, 0);
            CHECK(token == best, "temperature %g is argmax: %d, not %d", (double)cold[t], token, best);
        }
        Sampling sampling = plain;
        sampling.top_p = 0;
        CHECK(draw(logits, VOCAB, &sampling, 1, round, NULL, 0) == best, "top_p 0 keeps only the best");
        sampling = plain;
        sampling.top_k = 1;
        CHECK(draw(logits, VOCAB, &sampling, 1, round, NULL, 0) == best, "top_k 1 keeps only the best");
        sampling = plain;
        sampling.min_p = 1;
        int token = draw(logits, VOCAB, &sampling, 1, round, NULL, 0);
        CHECK(logits[token] == 3, "min_p 1 keeps what ties with the best");
    }
    for (int i = 0; i < VOCAB; i++) logits[i] = -5;
    Sampling sampling = plain;
    sampling.temperature = 0;
    CHECK(draw(logits, VOCAB, &sampling, 1, 1, NULL, 0) == 0, "all equal: the lowest index");
}

/* Values that turn a filter off give the very tokens of no filter. */
static void test_filters_that_are_off(void) {
    float logits[VOCAB];
    random_fill(logits, VOCAB);
    Sampling variants[6];
    for (int v = 0; v < 6; v++) variants[v] = plain;
    variants[1].top_k = VOCAB;
    variants[2].top_k = INT_MAX;
    variants[3].min_p = 1e-30f;
    variants[4].top_k = -1;
    variants[5].top_p = 1.5f;
    for (int position = 0; position < 300; position++)
        for (int v = 1; v < 6; v++)
            CHECK(draw(logits, VOCAB, &variants[v], 3, position, NULL, 0) == draw(logits, VOCAB, &plain, 3, position, NULL, 0),
                  "variant %d is off", v);
}

static const float *sorted_logits;

static int by_logit(const void *a, const void *b) {
    float x = sorted_logits[*(const int *)a], y = sorted_logits[*(const int *)b];
    return (x < y) - (x > y);
}

/* A large vocabulary, so that top-p has to look at more than its first 64 candidates, against a full sort. */
static void test_top_p_of_flat_logits(void) {
    enum { LARGE = 1000 };
    static float logits[LARGE];
    bool allowed[LARGE] = {false};
    for (int i = 0; i < LARGE; i++) logits[i] = 0.2f * random_float();
    int picks[LARGE], wanted = 0;
    double total = 0, mass = 0;
    for (int i = 0; i < LARGE; i++) {
        picks[i] = i;
        total += exp((double)logits[i]);
    }
    sorted_logits = logits;
    qsort(picks, LARGE, sizeof *picks, by_logit);
    for (; wanted < LARGE && mass < 0.9 * total; wanted++) {
        mass += exp((double)logits[picks[wanted]]);
        allowed[picks[wanted]] = true;
    }
    Sampling sampling = plain;
    sampling.top_p = 0.9f;
    int seen = 0;
    bool drawn[LARGE] = {false};
    for (int position = 0; position < 8000; position++) {
        int token = draw(logits, LARGE, &sampling, 0, position, NULL, 0);
        CHECK(allowed[token] || token == picks[wanted], "token %d lies outside the nucleus", token);     /* 0.9f is not 0.9 */
        seen += !drawn[token];
        drawn[token] = true;
    }
    CHECK(seen > wanted * 0.99, "nearly all of the %d tokens of the nucleus come up, found %d", wanted, seen);
}

static void test_penalty(void) {
    float logits[4] = {2, 1.5f, -1, -1.2f};
    static const int history[] = {0, 0, 0, 2, 0};
    Sampling sampling = plain;
    sampling.temperature = 0;
    sampling.repeat_penalty = 1.3f;
    CHECK(draw(logits, 4, &sampling, 0, 5, history, 5) == 0, "2 / 1.3 is still the best: a repeated token is penalised once");
    sampling.repeat_penalty = 1.4f;
    CHECK(draw(logits, 4, &sampling, 0, 5, history, 5) == 1, "2 / 1.4 is not");
    float copy[4];
    memcpy(copy, logits, sizeof copy);
    penalise_repeats(&sampler, copy, history, 5, 1.4f);
    CHECK(copy[0] == 2 / 1.4f && copy[1] == 1.5f && copy[2] == -1.4f && copy[3] == -1.2f,
          "positive logits shrink, negative ones grow");
    for (int i = 0; i < 4; i++) CHECK(!sampler.seen[i], "the scratch is clean again");
    sampling.repeat_penalty = 0.5f;
    CHECK(draw(logits, 4, &sampling, 0, 2, (int[]){1}, 1) == 1, "a penalty below 1 rewards");
}

/* Extreme but finite logits, divided by small temperatures, still give a token of the vocabulary, and the best one where it leads. */
static void test_extreme_logits(void) {
    static const float levels[] = {0, 1e-38f, 1e30f, 3e38f};
    float logits[VOCAB];
    for (size_t l = 0; l < sizeof levels / sizeof *levels; l++)
        for (float temperature = 1.1e-6f; temperature < 1e6f; temperature *= 30) {
            for (int i = 0; i < VOCAB; i++) logits[i] = -levels[l];
            logits[77] = levels[l];
            Sampling sampling = {
                .temperature = temperature, .top_p = 0.9f, .min_p = 0.01f, .top_k = 50, .repeat_penalty = 1.1f, .seed = 5};
            int token = draw(logits, VOCAB, &sampling, 0, 9, (int[]){3}, 1);
            CHECK(token >= 0 && token < VOCAB, "level %g at temperature %g: token %d", (double)levels[l], (double)temperature,
                  token);
            if (levels[l] >= 1e30f)
                CHECK(token == 77, "level %g at temperature %g: %d, not the best", (double)levels[l], (double)temperature, token);
        }
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Noise
 */

/* Philox 4x32-10's published test vectors (Random123, kat_vectors). */
static void test_philox(void) {
    static const struct { uint32_t counter[4]; uint64_t key; uint32_t wanted[4]; } vectors[] = {
        {{0, 0, 0, 0}, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, ~(uint64_t)0, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        uint32_t words[4];
        memcpy(words, vectors[i].counter, sizeof words);
        philox(words, vectors[i].key);
        CHECK(!memcmp(words, vectors[i].wanted, sizeof words), "Philox vector %zu: %08x %08x %08x %08x", i, words[0], words[1],
              words[2], words[3]);
    }
}

/* Every part of the key matters, and nothing else does. */
static void test_key(void) {
    float logits[VOCAB];
    random_fill(logits, VOCAB);
    int differ[4] = {0};
    for (int i = 0; i < 1000; i++) {
        Sampling other = plain, high = plain;
        other.seed++;
        high.seed ^= (uint64_t)1 << 63;
        int token = draw(logits, VOCAB, &plain, 5, i, NULL, 0);
        draw(logits, VOCAB, &other, 9, i * 3, NULL, 0);                             /* other draws in between change nothing */
        CHECK(draw(logits, VOCAB, &plain, 5, i, NULL, 0) == token, "the same key, the same token");
        differ[0] += draw(logits, VOCAB, &other, 5, i, NULL, 0) != token;
        differ[1] += draw(logits, VOCAB, &high, 5, i, NULL, 0) != token;
        differ[2] += draw(logits, VOCAB, &plain, 6, i, NULL, 0) != token;
        differ[3] += draw(logits, VOCAB, &plain, 5 + ((uint64_t)1 << 40), i, NULL, 0) != token;
    }
    for (int d = 0; d < 4; d++) CHECK(differ[d] > 900, "part %d of the key changes the draw: %d of 1000", d, differ[d]);
}

/* A session of a fixture: same tokens with other sessions in the pass, in another slot, begun in another round. */
static void test_streams(const char *fixture) {
    enum { SESSIONS = 3, NEW = 20 };
    Runner runner;
    Error error;
    EngineOptions options = {.model = fixture, .sessions = SESSIONS, .context = 64, .kv_dtype = KV_BF16};
    bool ok = runner_open(&runner, &options, false, NULL, &error);
    CHECK(ok, "%s", error.text);
    if (!ok) return;
    runner.engine.config.n_eos = 0;
    int alone[NEW];
    for (int company = 0; company < 2; company++) {
        Session sessions[SESSIONS] = {0}, *running[SESSIONS];
        for (int s = 0; s < SESSIONS; s++) {
            sessions[s] = (Session){.slot = s, .stream = (uint64_t)(100 + s), .max_new = NEW, .sampling = plain};
            for (int i = 0; i < 4 + 3 * s; i++) arrput(sessions[s].ids, 5 + 11 * i + s);
            running[s] = &sessions[s];
        }
        if (company) {                                  /* the first session's twin runs in slot 2, after the others */
            arrsetlen(sessions[2].ids, 0);
            for (int i = 0; i < 4; i++) arrput(sessions[2].ids, 5 + 11 * i);
            sessions[2].stream = 100;
        }
        for (int s = 0; s < SESSIONS; s++) {
            cache_release(&runner.engine.cache, s);
            session_begin(&sessions[s], &runner.engine);
        }
        cache_step(&runner.engine.cache);
        for (int s = 0; s < SESSIONS; s++) CHECK(session_admit(&runner, &sessions[s]), "%s: there is room for session %d", fixture, s);
        if (!company) run_session(&runner, &sessions[0]);
        for (int round = 0; company && round < 5; round++) run_round(&runner, running, 2);
        for (int round = 0; company && round < NEW; round++) run_round(&runner, running, SESSIONS);
        if (!company) memcpy(alone, sessions[0].ids + 4, sizeof alone);
        for (int s = 0; company && s < SESSIONS; s += 2)
            CHECK(arrlen(sessions[s].ids) == 4 + NEW && !memcmp(alone, sessions[s].ids + 4, sizeof alone),
                  "%s: slot %d draws what stream 100 draws alone", fixture, s);
        for (int s = 0; s < SESSIONS; s++) session_free(&sessions[s]);
    }
    runner_close(&runner);
}

int main(void) {
    sampler = sampler_open(&c_backend, 1 << 17);
    Sampling top_k = plain, top_p = plain, min_p = plain, hot = plain, all = plain;
    top_k.top_k = 12;
    top_p.top_p = 0.8f;
    min_p.min_p = 0.05f;
    hot.temperature = 2.5f;
    all = (Sampling){.temperature = 0.8f, .top_p = 0.95f, .min_p = 0.02f, .top_k = 40, .repeat_penalty = 1, .seed = 99};
    test_distribution("plain", plain, false);
    test_distribution("plain", plain, true);
    test_distribution("top-k 12", top_k, false);
    test_distribution("top-p 0.8", top_p, true);
    test_distribution("min-p 0.05", min_p, false);
    test_distribution("temperature 2.5", hot, true);
    test_distribution("all together", all, false);
    test_distribution("all together", all, true);
    test_the_test();
    test_greedy();
    test_filters_that_are_off();
    test_top_p_of_flat_logits();
    test_penalty();
    test_extreme_logits();
    test_philox();
    test_key();
    test_streams("tests/fixtures/qwen3-a");
    test_streams("tests/fixtures/glm_moe_dsa-a");
    sampler_close(&c_backend, &sampler);
    return check_report();
}
