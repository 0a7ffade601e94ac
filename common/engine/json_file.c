#include "engine/json_file.h"

#include "base/check.h"
#include "engine/fail.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

enum status json_file_read(const char *directory, const char *name, size_t bytes_max,
                           struct json_t **object_out, struct writer *error) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof(path), "%s/%s", directory, name) >= (int)sizeof(path)) {
        return fail(error, STATUS_INVALID, "the path of the model directory is too long");
    }
    FILE *file = fopen(path, "rbe");
    if (file == NULL && (errno == ENOENT || errno == ENOTDIR)) {
        return STATUS_NOT_FOUND;
    }
    if (file == NULL) {
        return fail(error, STATUS_IO, "%s: %s", fail_text(path).text, strerror(errno));
    }
    char *text = malloc(bytes_max + 1);
    CHECK(text != NULL);
    size_t len = fread(text, 1, bytes_max + 1, file);
    enum status status = STATUS_OK;
    if (ferror(file) != 0) {
        status =
            fail(error, STATUS_IO, "%s: cannot be read: %s", fail_text(path).text, strerror(errno));
    } else if (len > bytes_max) {
        status = fail(error, STATUS_CORRUPT, "%s: longer than %zu bytes", name, bytes_max);
    }
    (void)fclose(file); /* read only: nothing to lose */
    if (status == STATUS_OK) {
        json_error_t where;
        json_t *object = json_loadb(text, len, JSON_REJECT_DUPLICATES, &where);
        if (json_is_object(object)) {
            *object_out = object;
        } else if (object == NULL) {
            status = fail(error, STATUS_CORRUPT, "%s: line %d: %s", name, where.line,
                          fail_text(where.text).text);
        } else {
            json_decref(object);
            status = fail(error, STATUS_CORRUPT, "%s: not a JSON object", name);
        }
    }
    free(text);
    return status;
}
