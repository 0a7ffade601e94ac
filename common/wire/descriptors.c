#include "wire/descriptors.h"

/* proto/CMakeLists.txt makes them of baton/v1/inference.proto. */
extern const unsigned char baton_inference_descriptors[];
extern const unsigned long baton_inference_descriptors_len;

struct bytes wire_inference_descriptors(void) {
    return (struct bytes){baton_inference_descriptors, baton_inference_descriptors_len};
}
