/* Text for a terminal: its width, colours, paragraphs, and tables that fit.
 *
 * Everything that is printed may come from clients and peers, so control characters, broken UTF-8
 * and direction marks are made visible and never reach the terminal. Without a terminal there is
 * neither colour nor a limit to lines, so that a pipe sees whole rows. Main thread. */
#ifndef BATONCTL_SCREEN_H
#define BATONCTL_SCREEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum style {
    STYLE_PLAIN,
    STYLE_GOOD,
    STYLE_WARN,
    STYLE_BAD,
    STYLE_DIM,
    STYLE_BOLD,
};

struct screen {
    FILE *out;
    uint32_t width; /* columns; 0: no limit */
    bool has_color;
};

/* Width from the terminal, or from COLUMNS in the environment; colour unless NO_COLOR is set. */
void screen_init(struct screen *screen, FILE *out);
/* One paragraph, wrapped at spaces; further lines are indented by `indent`. */
void screen_print(const struct screen *screen, enum style style, uint32_t indent,
                  const char *format, ...) __attribute__((format(printf, 4, 5)));
void screen_line(const struct screen *screen);

/* A malloc'ed copy that a terminal can show. */
char *text_visible(const char *text);
/* Columns that a visible text takes. */
uint32_t text_columns(const char *text);

struct column {
    const char *title;
    bool is_right;
    /* Last column only: where there is no room for it beside the columns that are always shown,
     * each row gets a second line that begins with this text. NULL: not so. */
    const char *below;
    uint8_t rank;  /* 0: always shown; else dropped where there is no room, highest first */
    uint8_t least; /* 0: never cut; else may be cut to so many columns */
};

struct table;
/* columns: borrowed for the table's life. */
struct table *table_create(const struct column *columns, uint32_t count);
void table_destroy(struct table *table);
/* The next cell, row by row. */
void table_cell(struct table *table, enum style style, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Titles, then all rows; the last row must be whole. */
void table_print(const struct table *table, const struct screen *screen, uint32_t indent);

#endif
