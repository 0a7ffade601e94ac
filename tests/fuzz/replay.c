/* Main program of a fuzz target where there is no libFuzzer: runs each kept input once.
 *
 *   fuzz_NAME FILE|FOLDER...
 *
 * Fails if there was nothing to run: an empty corpus must not pass for a tested one. */
#include <dirent.h>
#include <stdio.h>
#include <sys/stat.h>

#include "fuzz/fuzz.h"

static unsigned files_run;

static int replay_file(const char *path) {
    FILE *file = fopen(path, "rbe");
    if (file == NULL) {
        perror(path);
        return 1;
    }
    size_t cap = 1u << 16;
    size_t len = 0;
    uint8_t *data = malloc(cap);
    CHECK(data != NULL);
    size_t got = 0;
    while ((got = fread(data + len, 1, cap - len, file)) > 0) {
        len += got;
        if (len == cap) {
            cap *= 2;
            data = realloc(data, cap);
            CHECK(data != NULL);
        }
    }
    (void)fclose(file); /* read only */
    /* Exactly its size, so that a sanitizer sees a read past the end. */
    uint8_t *exact = input_copy((struct bytes){data, len});
    free(data);
    printf("%s\n", path);
    (void)fflush(stdout); /* the last line printed names the input that aborts */
    CHECK(LLVMFuzzerTestOneInput(exact, len) == 0);
    free(exact);
    files_run++;
    return 0;
}

static int replay_folder(const char *path) {
    struct dirent **entries = NULL;
    int count = scandir(path, &entries, NULL, alphasort);
    if (count < 0) {
        perror(path);
        return 1;
    }
    int failed = 0;
    for (int i = 0; i < count; i++) {
        char name[4096];
        if (entries[i]->d_name[0] != '.') {
            int len = snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name);
            CHECK(len > 0 && (size_t)len < sizeof name);
            failed |= replay_file(name);
        }
        free(entries[i]);
    }
    free(entries);
    return failed;
}

int main(int argc, char **argv) {
    int failed = 0;
    for (int i = 1; i < argc; i++) {
        struct stat about;
        if (stat(argv[i], &about) != 0) {
            perror(argv[i]);
            failed = 1;
        } else {
            failed |= S_ISDIR(about.st_mode) ? replay_folder(argv[i]) : replay_file(argv[i]);
        }
    }
    if (files_run == 0) {
        fprintf(stderr, "%s: no input was run; give files or folders\n", argv[0]);
        return 2;
    }
    printf("%u inputs\n", files_run);
    return failed;
}
