/* What tests may ask of the emulated device; symbols of its shared object, beside the table. */
#ifndef TESTS_SUPPORT_CUDA_CONTROL_H
#define TESTS_SUPPORT_CUDA_CONTROL_H

#ifdef __cplusplus
extern "C" {
#endif

struct emulation_control {
    /* Each thread of a block on a thread of its own, instead of phases as loops. */
    int uses_threads;
    /* This many launches from now one fails, and everything after it; 0: none does. */
    int fails_after;
    /* Products add up rows in orders that depend on their place. */
    int is_skewed;
    /* What the machine has: 1, or 0 as on one without a card; has_driver 0: no driver either. */
    int devices;
    int has_driver;
    /* Device memory in bytes; 0: no end. */
    unsigned long long memory_bytes;
};

/* The one control block of the process; whoever changes it puts it back. */
__attribute__((visibility("default"))) struct emulation_control *emulation_control(void);

#ifdef __cplusplus
}
#endif

typedef struct emulation_control *(*emulation_control_fn)(void);

#endif
