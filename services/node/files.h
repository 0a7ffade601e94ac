/* Private to services/node: the rpc service baton.worker.v1.Worker.
 *
 * The model's small text files are read once at start, so that the rpc thread never waits for a
 * disk; a call sends the next chunk when the one before it has left. */
#ifndef NODE_FILES_H
#define NODE_FILES_H

#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"

struct rpc_server;
struct shell;
struct worker_files;

/* Reads the files of the directory that exist. STATUS_NOT_FOUND without tokenizer.json, STATUS_IO,
 * STATUS_RANGE past 64 MiB; logged. */
MUST_USE enum status files_open(const char *directory, struct worker_files **out);
/* Digest of tokenizer.json. */
uint64_t files_tokenizer_digest(const struct worker_files *files);
/* tokenizer.json; lives as long as the files. */
struct bytes files_tokenizer(const struct worker_files *files);
/* Adds the methods to a server that has not started. */
MUST_USE enum status files_serve(struct worker_files *files, struct shell *shell,
                                 struct rpc_server *server);
/* After rpc_shutdown. NULL is fine. */
void files_close(struct worker_files *files);

#endif
