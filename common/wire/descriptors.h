/* The public API describing itself, for gRPC server reflection. */
#ifndef WIRE_DESCRIPTORS_H
#define WIRE_DESCRIPTORS_H

#include "base/bytes.h"

/* A serialized google.protobuf.FileDescriptorSet of baton/v1/inference.proto; static storage. */
struct bytes wire_inference_descriptors(void);

#endif
