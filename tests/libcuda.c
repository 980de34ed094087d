// A driver of CUDA that starts nothing: it records what it is asked to start. Triton's own launcher is built
// against it, and the extension for plain calls is given its cuLaunchKernel.
#include <pthread.h>
#include <stdint.h>
#include <string.h>

struct Record {
    void *function, *stream;
    unsigned grid[3], block[3], shared, attributes;
    int parameters;
    uint64_t values[64];
};

struct Record record;
struct Parameters {
    int count, sizes[64];
} parameters_of[2048];  // by the kernels' handles
int starts;
int (*run)(void);  // if there is one, it does what the kernel would do, and says whether that went well

static int note(void *function, const unsigned *grid, const unsigned *block, unsigned shared, void *stream,
                unsigned attributes, void **parameters) {
    struct Record next = {function, stream};
    const struct Parameters *own = &parameters_of[(uintptr_t)function];
    memcpy(next.grid, grid, sizeof next.grid);
    memcpy(next.block, block, sizeof next.block);
    next.shared = shared, next.attributes = attributes, next.parameters = own->count;
    for (int i = 0; i < own->count; ++i) memcpy(&next.values[i], parameters[i], own->sizes[i]);
    static pthread_mutex_t alone = PTHREAD_MUTEX_INITIALIZER;  // Python lets other threads run meanwhile
    pthread_mutex_lock(&alone);
    record = next;
    ++starts;
    const int failed = run ? run() : 0;
    pthread_mutex_unlock(&alone);
    return failed;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                   void **extra) {
    const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    return extra ? 1 : note(function, grid, block, shared, stream, 0, parameters);
}

struct Config {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned count;
};

int cuLaunchKernelEx(const struct Config *config, void *function, void **parameters, void **extra) {
    return extra ? 1 : note(function, config->grid, config->block, config->shared, config->stream,
                            config->count, parameters);
}

int cuPointerGetAttribute(void *found, int attribute, uint64_t pointer) {
    memcpy(found, &pointer, sizeof pointer);
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = &record;
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    *text = "an error of the driver";
    return 0;
}

// What Triton's module refers to, and what nothing here calls.
#define NEVER(name) \
    int name(void) { return 999; }
NEVER(cuCtxGetDevice)
NEVER(cuCtxGetLimit)
NEVER(cuCtxSetCurrent)
NEVER(cuCtxSetLimit)
NEVER(cuDeviceGet)
NEVER(cuDeviceGetAttribute)
NEVER(cuDevicePrimaryCtxRetain)
NEVER(cuDriverGetVersion)
NEVER(cuFuncGetAttribute)
NEVER(cuFuncSetAttribute)
NEVER(cuFuncSetCacheConfig)
NEVER(cuModuleGetFunction)
NEVER(cuModuleLoadData)
NEVER(cuModuleUnload)
NEVER(cuOccupancyMaxActiveClusters)
NEVER(cuStreamIsCapturing)
NEVER(cuTensorMapEncodeTiled)
