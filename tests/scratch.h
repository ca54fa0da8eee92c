/* scratch.h: files that tests make for themselves, in a directory that is gone when the program ends. Include after engine.c. */
#ifndef TIDE_SCRATCH_H
#define TIDE_SCRATCH_H

#include "check.h"

static char scratch_root[64];

static void scratch_remove(void) {
    char command[96];
    snprintf(command, sizeof command, "rm -rf '%s'", scratch_root);
    if (system(command) != 0) fprintf(stderr, "%s: could not be removed\n", scratch_root);
}

/* A fresh empty directory below the program's own; the caller frees the name. */
static char *scratch_directory(void) {
    static int count;
    char path[96];
    if (!*scratch_root) {
        strcpy(scratch_root, "/tmp/tide-test-XXXXXX");
        if (!mkdtemp(scratch_root)) perror("mkdtemp"), exit(1);
        atexit(scratch_remove);
    }
    snprintf(path, sizeof path, "%s/%d", scratch_root, count++);
    if (mkdir(path, 0700)) perror(path), exit(1);
    return copy_string(path);
}

static void write_bytes(const char *directory, const char *name, const void *bytes, size_t size) {
    char path[PATH_MAX];
    FILE *file = fopen(join(path, directory, name), "wb");
    if (!file || fwrite(bytes, 1, size, file) != size || fclose(file)) perror(path), exit(1);
}

static void write_text(const char *directory, const char *name, const char *text) { write_bytes(directory, name, text, strlen(text)); }

/* Copies one file into the directory; false where there is none. */
static bool copy_file(const char *from_directory, const char *directory, const char *name) {
    char path[PATH_MAX], *bytes;
    size_t size;
    Error error;
    if (!read_file(join(path, from_directory, name), (size_t)1 << 30, &bytes, &size, &error)) return false;
    write_bytes(directory, name, bytes, size);
    free(bytes);
    return true;
}

/* A checkpoint of one shard that a test may spoil; the caller frees the name. */
static char *copy_checkpoint(const char *from) {
    char *directory = scratch_directory();
    if (!copy_file(from, directory, "config.json") || !copy_file(from, directory, "model.safetensors")) fprintf(stderr, "%s: not there\n", from), exit(1);
    return directory;
}

/* Overwrites bytes of one tensor in the directory's model.safetensors. */
static void patch_tensor(const char *directory, const char *name, size_t at, const void *bytes, size_t size) {
    Checkpoint checkpoint;
    Error error;
    char path[PATH_MAX];
    if (!checkpoint_open(&checkpoint, directory, &error)) fprintf(stderr, "%s\n", error.text), exit(1);
    const Tensor *tensor = checkpoint_find(&checkpoint, name);
    if (!tensor || at + size > tensor->size) fprintf(stderr, "%s: no tensor %s of %zu bytes\n", directory, name, at + size), exit(1);
    long offset = (long)(tensor->data - checkpoint.files[0].data + at);
    FILE *file = fopen(join(path, directory, "model.safetensors"), "r+b");
    if (!file || fseek(file, offset, SEEK_SET) || fwrite(bytes, 1, size, file) != size || fclose(file)) perror(path), exit(1);
    checkpoint_close(&checkpoint);
}

/* A small generator of its own, so that a test's inputs are the same everywhere. */
static uint64_t random_state = 1;

static uint32_t random_word(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_float(void) { return (float)random_word() * 0x1p-31f - 1; }     /* in [-1, 1) */
static int random_below(int n) { return (int)(random_word() % (uint32_t)n); }

static void random_fill(float *x, size_t n) { for (size_t i = 0; i < n; i++) x[i] = random_float(); }

#endif
