#include "runtime/http_head.h"

#include <string.h>
#include <strings.h>

#define METHOD_MAX 16

size_t http_head_find(const char *data, size_t len) {
    for (size_t at = 0; at + 1 < len; at++) {
        if (data[at] != '\n') {
            continue;
        }
        if (data[at + 1] == '\n') {
            return at + 2;
        }
        if (data[at + 1] == '\r' && at + 2 < len && data[at + 2] == '\n') {
            return at + 3;
        }
    }
    return 0;
}

bool http_head_is_plausible(const char *data, size_t len) {
    for (size_t i = 0; i < len && i <= METHOD_MAX; i++) {
        if (data[i] == ' ') {
            return i > 0;
        }
        if (data[i] < 'A' || data[i] > 'Z') {
            return false;
        }
    }
    return len <= METHOD_MAX;
}

/* Cuts the next line off; the line end is CR LF or LF. NULL at the end. */
static char *next_line(char **cursor) {
    char *line = *cursor;
    char *end = strchr(line, '\n');
    if (end == NULL) {
        return NULL;
    }
    *cursor = end + 1;
    if (end > line && end[-1] == '\r') {
        end--;
    }
    *end = '\0';
    return line;
}

static int parse_request_line(char *line, struct http_head *head, const char **why_out) {
    char *target = strchr(line, ' ');
    char *version = target != NULL ? strchr(target + 1, ' ') : NULL;
    if (target == NULL || version == NULL) {
        *why_out = "the request line is not METHOD PATH HTTP/1.1";
        return 400;
    }
    *target++ = '\0';
    *version++ = '\0';
    if (strncmp(version, "HTTP/", 5) != 0) {
        *why_out = "the request line is not METHOD PATH HTTP/1.1";
        return 400;
    }
    if (strncmp(version, "HTTP/1.", 7) != 0 || version[7] < '0' || version[7] > '9' ||
        version[8] != '\0') {
        *why_out = "only HTTP/1.0 and HTTP/1.1 are spoken here";
        return 505;
    }
    if (strncasecmp(target, "http://", 7) == 0) {
        char *slash = strchr(target + 7, '/');
        if (slash == NULL) {
            *why_out = "the request target has no path";
            return 400;
        }
        target = slash;
    }
    if (target[0] != '/') {
        *why_out = "the request target is not a path";
        return 400;
    }
    head->method = line;
    head->path = target;
    head->query = "";
    head->keeps_alive = version[7] != '0';
    char *fragment = strchr(target, '#');
    if (fragment != NULL) {
        *fragment = '\0';
    }
    char *question = strchr(target, '?');
    if (question != NULL) {
        *question = '\0';
        head->query = question + 1;
    }
    return 0;
}

static bool parse_length(const char *text, uint64_t *length_out) {
    uint64_t length = 0;
    if (*text == '\0') {
        return false;
    }
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9' || length > UINT64_MAX / 10 - 1) {
            return false;
        }
        length = length * 10 + (uint64_t)(*text - '0');
    }
    *length_out = length;
    return true;
}

/* True if a comma-separated list holds the word, in any case. */
static bool list_has(const char *list, const char *word) {
    size_t len = strlen(word);
    while (*list != '\0') {
        list += strspn(list, " \t,");
        size_t item = strcspn(list, " \t,");
        if (item == len && strncasecmp(list, word, len) == 0) {
            return true;
        }
        list += item;
    }
    return false;
}

static int parse_header(char *line, struct http_head *head, bool *has_length,
                        const char **why_out) {
    char *colon = strchr(line, ':');
    if (colon == NULL || colon == line || strcspn(line, " \t") < (size_t)(colon - line)) {
        *why_out = "a header line is not Name: value";
        return 400;
    }
    *colon = '\0';
    char *value = colon + 1 + strspn(colon + 1, " \t");
    size_t len = strlen(value);
    while (len > 0 && (value[len - 1] == ' ' || value[len - 1] == '\t')) {
        value[--len] = '\0';
    }
    if (strcasecmp(line, "content-length") == 0) {
        uint64_t length = 0;
        if (!parse_length(value, &length) || (*has_length && length != head->content_length)) {
            *why_out = "Content-Length is not one number";
            return 400;
        }
        *has_length = true;
        head->content_length = length;
    } else if (strcasecmp(line, "transfer-encoding") == 0) {
        *why_out = "send the body with Content-Length, not Transfer-Encoding";
        return 411;
    } else if (strcasecmp(line, "connection") == 0) {
        if (list_has(value, "close")) {
            head->keeps_alive = false;
        } else if (list_has(value, "keep-alive")) {
            head->keeps_alive = true;
        }
    } else if (strcasecmp(line, "expect") == 0) {
        head->expects_continue = strcasecmp(value, "100-continue") == 0;
    }
    return 0;
}

int http_head_parse(char *text, size_t len, struct http_head *head, const char **why_out) {
    *head = (struct http_head){.method = ""};
    text[len] = '\0';
    if (strlen(text) != len) {
        *why_out = "the head contains a NUL byte";
        return 400;
    }
    char *cursor = text;
    char *line = next_line(&cursor);
    if (line == NULL) {
        *why_out = "the head is not complete";
        return 400;
    }
    int status = parse_request_line(line, head, why_out);
    bool has_length = false;
    while (status == 0) {
        line = next_line(&cursor);
        if (line == NULL || line[0] == '\0') {
            break;
        }
        status = parse_header(line, head, &has_length, why_out);
    }
    return status;
}
