/* engine.cu: the operations of engine.h on an NVIDIA GPU, the twin of backend.c.
 *
 *     the device . activations and products . cached rows, index selection, attention . mixture of experts . the hierarchy's
 *     operations . sampling and acceptance . drafters' operations
 *
 * Every operation only puts work on one stream, so they run in the order in which they are called and nobody waits until the
 * pipeline asks for a result. Pointers are the device's, or name host memory that the device reads over the link (MEMORY_HOST).
 * Each row is computed by itself, and how a sum is split is decided by shapes alone, never by how many rows share a launch: a
 * token has the same bits alone and beside others.
 */
extern "C" {
#include "engine.h"
}

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <float.h>
#include <unistd.h>

#include <type_traits>

/* =====================================================================================================================
 * The device
 *
 * Owns: the chosen GPU and its stream, and what every section launches kernels with. A CUDA call that fails ends the program with
 * one line: what is on the device then can no longer be trusted.
 */

static struct Device {
    int multiprocessors, major, minor;
    size_t shared_per_block;    /* bytes a block may ask for */
    cudaStream_t stream;        /* every operation's */
    bool exact;                 /* how attention splits a sum may not depend on how many rows share a launch */
    bool no_graph;              /* begin_work() keeps nothing */
} gpu;

static void check_cuda(cudaError_t status, const char *file, int line) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "tide: %s:%d: CUDA: %s\n", file, line, cudaGetErrorString(status));
    _exit(1);
}

#define CUDA(call) check_cuda(call, __FILE__, __LINE__)
#define LAUNCHED() CUDA(cudaGetLastError())         /* behind every launch: whether it could be put on the stream */

static inline __host__ __device__ int divide_up(int a, int b) { return (a + b - 1) / b; }

/* Lets a kernel have more than 48 KB of shared memory. Call it before each launch that needs it; it costs little. */
template <typename Kernel> static void allow_shared(Kernel kernel, size_t bytes) {
    if (bytes > 48 << 10) CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

/* ---- launches that overlap (sm_90 and later): a kernel's blocks may start where those of the one before it leave room, do what
 * does not depend on others, such as reading weights, and wait then. */

/* From here on the kernel behind this one may start. */
static __device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* All that kernels before this one wrote is there, and nothing that this one writes is still being read. Loads that are meant to
 * come before it must not be ld.global.nc: the assembler moves those behind it. */
static __device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* For a kernel in which every thread calls wait_for_previous. */
template <typename... Parameters>
static void launch_early(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared, int cluster,
                         std::type_identity_t<Parameters>... arguments) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t launch = {};
    launch.gridDim = grid;
    launch.blockDim = dim3(threads);
    launch.dynamicSmemBytes = shared;
    launch.stream = gpu.stream;
    launch.attrs = attributes;
    if (gpu.major >= 9) {
        attributes[launch.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[launch.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[launch.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[launch.numAttrs++].val.clusterDim = {.x = (unsigned)cluster, .y = 1, .z = 1};
    }
    CUDA(cudaLaunchKernelEx(&launch, kernel, arguments...));
}

/* ---- memory and copies */

enum {
    UPLOAD_BYTES = 8 << 20,     /* pinned memory that uploads pass through */
    WEIGHT_CHUNK = 512 << 20,   /* bytes taken at a time for weights */
    WEIGHT_ALIGNMENT = 256,
    MOVE_BYTES = 8 << 20,       /* of each pinned buffer that weights pass through: pinning takes 0.6 ms a megabyte */
    MOVE_BUFFERS = 3,
    MOVE_PIECE = 512 << 10,     /* what a thread copies at a time */
    MAX_CHUNKS = 4096,
};

static struct Transit {         /* between the pipeline's memory and the device's */
    uint8_t *pinned;            /* [UPLOAD_BYTES] */
    size_t used;                /* of it since the last wait */
    cudaStream_t pages;         /* copies of pages between the tiers run beside the passes */
    cudaEvent_t passes;         /* what had been asked for when a copy of pages began */
    cudaEvent_t *copied;        /* [n_copied] by device page: its copy is complete; NULL: there never was one */
    int n_copied;
    uint8_t *chunks[MAX_CHUNKS];            /* of weights */
    int n_chunks;
    size_t chunk_bytes, chunk_used;         /* of the last of them */
    uint8_t *moving[MOVE_BUFFERS];          /* [MOVE_BYTES] each */
    cudaEvent_t moved[MOVE_BUFFERS];
} transit;

static bool attention_start(Error *error);
static bool speculation_start(Error *error);

static bool start(const DeviceOptions *options, Error *error) {
    gpu.exact = !options->inexact;
    gpu.no_graph = options->no_graph;
    if (gpu.stream) return true;
    int count = 0;
    /* Without a driver there is no need to wake its library, which takes memory and time. The second is what Windows lends Linux. */
    if (access("/dev/nvidiactl", F_OK) && access("/dev/dxg", F_OK)) return fail(error, "no GPU can be used: there is none");
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver)
        return fail(error, "no GPU can be used: its driver is too old for CUDA %d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (status != cudaSuccess || !count)
        return fail(error, "no GPU can be used: %s", status == cudaSuccess ? "there is none" : cudaGetErrorString(status));
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, 0));
    if (properties.major < 8)
        return fail(error, "no GPU can be used: %s has compute capability %d.%d, and tide needs 8.0", properties.name,
                    properties.major, properties.minor);
    gpu.multiprocessors = properties.multiProcessorCount;
    gpu.major = properties.major;
    gpu.minor = properties.minor;
    gpu.shared_per_block = properties.sharedMemPerBlockOptin;
    status = cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking);
    if (status != cudaSuccess) return fail(error, "no GPU can be used: %s", cudaGetErrorString(status));
    CUDA(cudaStreamCreateWithFlags(&transit.pages, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&transit.passes, cudaEventDisableTiming));
    CUDA(cudaHostAlloc(&transit.pinned, UPLOAD_BYTES, cudaHostAllocDefault));
    return attention_start(error) && speculation_start(error);
}

static size_t available(Memory memory) {
    size_t free_bytes = 0, all = 0;
    if (memory == MEMORY_HOST) return c_backend.available(memory);
    CUDA(cudaMemGetInfo(&free_bytes, &all));
    return free_bytes;
}

static void *take(size_t bytes, Memory memory, Error *error) {
    void *block = NULL;
    cudaError_t status = memory == MEMORY_DEVICE ? cudaMalloc(&block, bytes) : cudaHostAlloc(&block, bytes, cudaHostAllocDefault);
    if (status != cudaSuccess) {
        cudaGetLastError();                         /* it was only this: forget it */
        fail(error, "cannot take %zu MB of %s memory: %s", bytes >> 20, memory == MEMORY_DEVICE ? "GPU" : "pinned",
             cudaGetErrorString(status));
        return NULL;
    }
    if (memory == MEMORY_DEVICE) CUDA(cudaMemsetAsync(block, 0, bytes, gpu.stream));
    else memset(block, 0, bytes);
    return block;
}

static void give_back(void *block, Memory memory) {
    if (!block) return;
    CUDA(cudaStreamSynchronize(gpu.stream));
    CUDA(cudaStreamSynchronize(transit.pages));
    CUDA(memory == MEMORY_DEVICE ? cudaFree(block) : cudaFreeHost(block));
}

static void wait_for_all(void) {
    CUDA(cudaStreamSynchronize(gpu.stream));
    transit.used = 0;
}

static void copy_bytes(void *to, const void *from, size_t bytes) {
    CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, gpu.stream));
    wait_for_all();
}

static void upload(void *to, const void *from, size_t bytes) {
    if (!bytes) return;
    if (bytes > UPLOAD_BYTES) return copy_bytes(to, from, bytes);
    if (transit.used + bytes > UPLOAD_BYTES) wait_for_all();
    uint8_t *pinned = transit.pinned + transit.used;
    transit.used += (bytes + 63) / 64 * 64;
    if (transit.used > UPLOAD_BYTES) transit.used = UPLOAD_BYTES;
    memcpy(pinned, from, bytes);
    CUDA(cudaMemcpyAsync(to, pinned, bytes, cudaMemcpyHostToDevice, gpu.stream));
}

/* ---- works that are kept: graphs of what was put on the stream under a key, once it comes for the second time */

enum { MAX_WORKS = 256 };

static struct Works {
    struct { uint64_t key; cudaGraphExec_t graph; long used, kernels; } kept[MAX_WORKS];
    int n, open;                /* open: which is being recorded, or -1 */
    long clock, kernels;        /* kernels: launched by graphs so far */
} works = {{}, 0, -1, 0, 0};

static bool begin_work(uint64_t key) {
    int at = 0;
    if (!key || gpu.no_graph) return false;
    while (at < works.n && works.kept[at].key != key) at++;
    if (at == works.n && works.n == MAX_WORKS) {    /* the one used longest ago makes room */
        for (int i = at = 0; i < works.n; i++)
            if (works.kept[i].used < works.kept[at].used) at = i;
        if (works.kept[at].graph) CUDA(cudaGraphExecDestroy(works.kept[at].graph));
    }
    if (at == works.n) works.kept[works.n++].key = 0;
    works.kept[at].used = ++works.clock;
    if (works.kept[at].key != key) {
        works.kept[at].key = key;
        works.kept[at].graph = NULL;
        return false;
    }
    if (works.kept[at].graph) {
        CUDA(cudaGraphLaunch(works.kept[at].graph, gpu.stream));
        works.kernels += works.kept[at].kernels;
        return true;
    }
    works.open = at;
    CUDA(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal));
    return false;
}

static void end_work(void) {
    cudaGraph_t graph;
    if (works.open < 0) return;
    CUDA(cudaStreamEndCapture(gpu.stream, &graph));
    size_t nodes;
    CUDA(cudaGraphGetNodes(graph, NULL, &nodes));
    CUDA(cudaGraphInstantiate(&works.kept[works.open].graph, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaGraphLaunch(works.kept[works.open].graph, gpu.stream));
    works.kept[works.open].kernels = (long)nodes;   /* hardly anything else is captured */
    works.open = -1;
}

static void forget_works(void) {
    for (int i = 0; i < works.n; i++)
        if (works.kept[i].graph) CUDA(cudaGraphExecDestroy(works.kept[i].graph));
    works.n = 0;
}

/* ---- weights */

/* Room for a tensor, in a chunk that many share: a checkpoint has tens of thousands. */
static uint8_t *place_weights(size_t bytes, Error *error) {
    size_t start = (transit.chunk_used + WEIGHT_ALIGNMENT - 1) / WEIGHT_ALIGNMENT * WEIGHT_ALIGNMENT;
    if (!transit.n_chunks || start + bytes > transit.chunk_bytes) {
        size_t chunk = bytes > WEIGHT_CHUNK / 8 ? bytes : (size_t)WEIGHT_CHUNK;
        uint8_t *block = NULL;
        cudaError_t status = transit.n_chunks < MAX_CHUNKS ? cudaMalloc(&block, chunk) : cudaErrorMemoryAllocation;
        if (status != cudaSuccess && chunk > bytes) status = cudaMalloc(&block, chunk = bytes);
        if (status != cudaSuccess) {
            cudaGetLastError();
            fail(error, "the weights do not fit into the GPU's memory: %s", cudaGetErrorString(status));
            return NULL;
        }
        if (chunk == bytes && transit.n_chunks && chunk != WEIGHT_CHUNK) {  /* its own; the open chunk stays the last */
            transit.chunks[transit.n_chunks] = transit.chunks[transit.n_chunks - 1];
            transit.chunks[transit.n_chunks++ - 1] = block;
            return block;
        }
        transit.chunks[transit.n_chunks++] = block;
        transit.chunk_bytes = chunk;
        transit.chunk_used = start = 0;
    }
    transit.chunk_used = start + bytes;
    return transit.chunks[transit.n_chunks - 1] + start;
}

/* Through pinned buffers in turns, so that reading the file and the link overlap. */
static const void *import_weights(const void *data, size_t bytes, Error *error) {
    uint8_t *to = place_weights(bytes, error);
    for (int i = 0; i < MOVE_BUFFERS && to && !transit.moving[i]; i++) {
        CUDA(cudaHostAlloc(&transit.moving[i], MOVE_BYTES, cudaHostAllocDefault));
        CUDA(cudaEventCreateWithFlags(&transit.moved[i], cudaEventDisableTiming));
    }
    static int turn;
    for (size_t done = 0, part; to && done < bytes; done += part, turn = (turn + 1) % MOVE_BUFFERS) {
        part = bytes - done < MOVE_BYTES ? bytes - done : (size_t)MOVE_BYTES;
        CUDA(cudaEventSynchronize(transit.moved[turn]));
#pragma omp parallel for if (part > MOVE_PIECE)
        for (size_t at = 0; at < part; at += MOVE_PIECE)
            memcpy(transit.moving[turn] + at, (const uint8_t *)data + done + at,
                   part - at < MOVE_PIECE ? part - at : (size_t)MOVE_PIECE);
        CUDA(cudaMemcpyAsync(to + done, transit.moving[turn], part, cudaMemcpyHostToDevice, gpu.stream));
        CUDA(cudaEventRecord(transit.moved[turn], gpu.stream));
    }
    return to;
}

/* As backend.c makes them: four values are the four 16-bit pieces of one hash. */
template <DType dtype>
__global__ void make_weights_kernel(void *to, size_t count, float low, float step, uint64_t seed) {
    const size_t four = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint64_t hash = seed + four;
    hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdu;
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53u;
    hash ^= hash >> 33;
    for (size_t i = 4 * four; i < count && i < 4 * four + 4; i++, hash >>= 16) {
        const float value = fmaf((float)(hash & 0xffff), step, low);
        if (dtype == DTYPE_F32) ((float *)to)[i] = value;
        else if (dtype == DTYPE_BF16) ((__nv_bfloat16 *)to)[i] = __float2bfloat16_rn(value);
        else ((__nv_fp8_e4m3 *)to)[i] = __nv_fp8_e4m3(value);
    }
}

static const void *make_weights(void *space, DType dtype, size_t count, float low, float high, uint64_t seed, Error *error) {
    (void)space;
    uint8_t *to = place_weights(count * dtype_size(dtype), error);
    if (!to || !count) return to;
    auto kernel = dtype == DTYPE_F32    ? make_weights_kernel<DTYPE_F32>
                  : dtype == DTYPE_BF16 ? make_weights_kernel<DTYPE_BF16>
                                        : make_weights_kernel<DTYPE_F8_E4M3>;
    kernel<<<(unsigned)((count + 1023) / 1024), 256, 0, gpu.stream>>>(to, count, low, (high - low) / 65536, seed);
    LAUNCHED();
    return to;
}

static void release_weights(void) {
    CUDA(cudaStreamSynchronize(gpu.stream));
    forget_works();                                 /* they name what is about to go */
    for (int i = 0; i < transit.n_chunks; i++) CUDA(cudaFree(transit.chunks[i]));
    transit.n_chunks = 0;
    transit.chunk_bytes = transit.chunk_used = 0;
}

/* ---- pages between the tiers */

static cudaEvent_t *copy_event(const Cache *cache, const Transfer *transfer) {
    if (transit.n_copied < cache->device_pages.n_pages) {
        transit.copied = (cudaEvent_t *)checked_realloc(transit.copied,
                                                        (size_t)cache->device_pages.n_pages * sizeof(cudaEvent_t));
        memset(transit.copied + transit.n_copied, 0,
               (size_t)(cache->device_pages.n_pages - transit.n_copied) * sizeof(cudaEvent_t));
        transit.n_copied = cache->device_pages.n_pages;
    }
    cudaEvent_t *event = &transit.copied[transfer->device.id];
    if (!*event) CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    return event;
}

/* The same rows of all sources (or of all groups' index keys) in one strided copy each. */
static void copy_pages(uint8_t *device, size_t device_pitch, uint8_t *host, size_t host_pitch, size_t stride, int device_page,
                       int host_page, int height, const Transfer *transfer) {
    const size_t width = (size_t)transfer->count * stride;
    device += ((size_t)device_page * PAGE_ROWS + (size_t)transfer->first) * stride;
    host += ((size_t)host_page * PAGE_ROWS + (size_t)transfer->first) * stride;
    for (int i = 0; i < height; i++) {
        uint8_t *on_device = device + (size_t)i * device_pitch, *on_host = host + (size_t)i * host_pitch;
        CUDA(cudaMemcpyAsync(transfer->to_host ? on_host : on_device, transfer->to_host ? on_device : on_host, width,
                             transfer->to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, transit.pages));
    }
}

static void start_copy(Cache *cache, const Transfer *transfer) {
    CUDA(cudaEventRecord(transit.passes, gpu.stream));
    CUDA(cudaStreamWaitEvent(transit.pages, transit.passes, 0));
    const size_t stride = cache->format.stride, index_stride = cache->index_format.stride;
    const size_t page_rows = PAGE_ROWS, host_rows = (size_t)cache->host_pages.n_pages * page_rows;
    if (!no_page(transfer->device))
        copy_pages(cache->device, (size_t)cache->device_pages.n_pages * page_rows * stride, cache->host, host_rows * stride,
                   stride, transfer->device.id, transfer->host.id, cache->sources, transfer);
    if (!no_page(transfer->index))
        copy_pages(cache->index_keys, (size_t)cache->index_pages.n_pages * page_rows * index_stride, cache->host_index,
                   host_rows * index_stride, index_stride, transfer->index.id, transfer->host.id, cache->groups, transfer);
    CUDA(cudaEventRecord(*copy_event(cache, transfer), transit.pages));
}

static bool finish_copy(Cache *cache, const Transfer *transfer, bool wait) {
    cudaEvent_t event = *copy_event(cache, transfer);
    if (wait) CUDA(cudaEventSynchronize(event));
    else {
        cudaError_t status = cudaEventQuery(event);
        if (status == cudaErrorNotReady) return false;
        CUDA(status);
    }
    return true;
}

/* ---- the places of a pass's rows */

struct TableView {              /* what locate_rows needs of a Cache, as kernels can have it */
    const DevicePage *tail, *index;
    int tail_ring, context_pages;
};

__global__ void locate_rows_kernel(DeviceRow *kv_rows, DeviceRow *index_rows, TableView view, const Row *rows, int n_rows) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= n_rows) return;
    const Row row = rows[r];
    const int page = row.position / PAGE_ROWS, within = row.position % PAGE_ROWS;
    kv_rows[r].id = view.tail[row.session * view.tail_ring + (page & (view.tail_ring - 1))].id * PAGE_ROWS + within;
    index_rows[r].id = view.index[(size_t)row.session * view.context_pages + page].id * PAGE_ROWS + within;
}

static void locate_rows(DeviceRow *kv_rows, DeviceRow *index_rows, const Cache *cache, const Row *rows, int n_rows) {
    if (!n_rows) return;
    TableView view = {cache->seen.tail, cache->seen.index, cache->tail_ring, cache->context_pages};
    locate_rows_kernel<<<divide_up(n_rows, 128), 128, 0, gpu.stream>>>(kv_rows, index_rows, view, rows, n_rows);
    LAUNCHED();
}

/* ---- measurements */

/* A work that is measured only puts operations on the stream. It is captured once, so that what is timed are the replays of a graph;
 * the median of several, in seconds. */
extern "C" double cuda_seconds(void (*work)(void *), void *user) {
    enum { WARM = 3, REPLAYS = 11 };
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    cudaEvent_t begin, end;
    float seconds[REPLAYS];
    work(user);                                     /* what happens once, happens before the capture */
    wait_for_all();
    CUDA(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal));
    work(user);
    CUDA(cudaStreamEndCapture(gpu.stream, &graph));
    CUDA(cudaGraphInstantiate(&replay, graph, 0));
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    for (int i = -WARM; i < REPLAYS; i++) {
        CUDA(cudaEventRecord(begin, gpu.stream));
        CUDA(cudaGraphLaunch(replay, gpu.stream));
        CUDA(cudaEventRecord(end, gpu.stream));
        CUDA(cudaEventSynchronize(end));
        float milliseconds, at;
        CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
        at = milliseconds / 1000;
        int place = i;
        for (; place > 0 && seconds[place - 1] > at; place--) seconds[place] = seconds[place - 1];
        if (i >= 0) seconds[place] = at;
    }
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
    CUDA(cudaGraphExecDestroy(replay));
    CUDA(cudaGraphDestroy(graph));
    return seconds[REPLAYS / 2];
}

/* A copy of the device's or of the link, as the ceilings are measured with: put on the stream, not waited for. */
extern "C" void cuda_begin_copy(void *to, const void *from, size_t bytes) {
    CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, gpu.stream));
}

__global__ void read_kernel(const uint4 *data, size_t n, unsigned *sum) {
    unsigned total = 0;
    const size_t step = (size_t)gridDim.x * blockDim.x;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = __ldcs(data + i), b = __ldcs(data + i + step), c = __ldcs(data + i + 2 * step), d = __ldcs(data + i + 3 * step);
        total += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < n; i += step) total += data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
    if (total == 0xdeadbeef) *sum = total;          /* hardly ever: so that the reads are made */
}

__global__ void empty_kernel() {}

extern "C" void cuda_empty(void) {
    empty_kernel<<<1, 32, 0, gpu.stream>>>();
    LAUNCHED();
}

extern "C" long cuda_graph_kernels(void) { return works.kernels; }

extern "C" void cuda_describe(char *text, size_t size) {
    cudaDeviceProp properties;
    int driver;
    CUDA(cudaGetDeviceProperties(&properties, 0));
    CUDA(cudaDriverGetVersion(&driver));
    snprintf(text, size, "%s, driver for CUDA %d.%d, built with CUDA %d.%d", properties.name, driver / 1000, driver % 1000 / 10,
             CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

static cudaEvent_t marks[MAX_MARKS];

/* Inside a capture an event must be asked for as a node of its own, or nothing could be read from it. */
extern "C" void cuda_mark(int number) {
    cudaStreamCaptureStatus status;
    CUDA(cudaStreamIsCapturing(gpu.stream, &status));
    if (!marks[number]) CUDA(cudaEventCreate(&marks[number]));
    CUDA(cudaEventRecordWithFlags(marks[number], gpu.stream,
                                  status == cudaStreamCaptureStatusActive ? cudaEventRecordExternal : cudaEventRecordDefault));
}

extern "C" double cuda_between(int first, int second) {
    float milliseconds;
    CUDA(cudaEventSynchronize(marks[second]));
    CUDA(cudaEventElapsedTime(&milliseconds, marks[first], marks[second]));
    return milliseconds / 1000.0;
}

/* Reads the bytes and does nothing with them. */
extern "C" void cuda_read(const void *data, size_t bytes, unsigned *sum) {
    read_kernel<<<gpu.multiprocessors * 16, 256, 0, gpu.stream>>>((const uint4 *)data, bytes / sizeof(uint4), sum);
    LAUNCHED();
}

/* ---- cuBLASLt's product, as a measure of tide's own; looked for when it is first asked for, since tide does without it */

enum { LIBRARY_WORKSPACE = 32 << 20, LIBRARY_COMPUTE_F32 = 68, LIBRARY_TRANSPOSE_A = 3, LIBRARY_MOST_WORKSPACE = 1 };

typedef struct LibraryChoice {  /* cublasLtMatmulHeuristicResult_t */
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} LibraryChoice;

static struct Library {         /* the functions of cublasLt.h that a product takes; its types are pointers to what it keeps */
    int (*create)(void **handle);
    int (*create_product)(void **product, int compute, int scale);
    int (*set_product)(void *product, int attribute, const void *value, size_t bytes);
    int (*create_layout)(void **layout, int type, uint64_t rows, uint64_t cols, int64_t stride);
    int (*create_wishes)(void **wishes);
    int (*set_wishes)(void *wishes, int attribute, const void *value, size_t bytes);
    int (*choose)(void *handle, void *product, void *a, void *b, void *c, void *d, void *wishes, int most, LibraryChoice *choices,
                  int *n);
    int (*multiply)(void *handle, void *product, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                    const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const uint64_t *algorithm,
                    void *workspace, size_t workspace_bytes, cudaStream_t stream);
    void *handle, *workspace;
} library;

static bool find_library(void) {
    static const char *const names[] = {"Create", "MatmulDescCreate", "MatmulDescSetAttribute", "MatrixLayoutCreate",
                                        "MatmulPreferenceCreate", "MatmulPreferenceSetAttribute", "MatmulAlgoGetHeuristic",
                                        "Matmul"};
    if (library.handle) return true;
    void *file = dlopen("libcublasLt.so.13", RTLD_NOW);
    if (!file) file = dlopen("libcublasLt.so.12", RTLD_NOW);
    if (!file) return false;
    for (int i = 0; i < 8; i++) {
        char name[64];
        snprintf(name, sizeof name, "cublasLt%s", names[i]);
        void *found = dlsym(file, name);
        if (!found) return false;
        memcpy((char *)&library + (size_t)i * sizeof found, &found, sizeof found);
    }
    return cudaMalloc(&library.workspace, LIBRARY_WORKSPACE) == cudaSuccess && !library.create(&library.handle);
}

extern "C" bool cuda_begin_library_product(float *y, const void *x, const void *w, int rows, int cols) {
    static struct { int rows, cols; void *product, *w, *x, *y; LibraryChoice choice; } made;
    const int transposed = 1, m = rows, k = cols;
    const size_t workspace = LIBRARY_WORKSPACE;
    const float one = 1, zero = 0;
    if (!find_library()) return false;
    if (made.rows != rows || made.cols != cols) {
        void *wishes;
        int n = 0;
        bool failed = library.create_product(&made.product, LIBRARY_COMPUTE_F32, CUDA_R_32F)
                      || library.set_product(made.product, LIBRARY_TRANSPOSE_A, &transposed, sizeof transposed)
                      || library.create_layout(&made.w, CUDA_R_16BF, (uint64_t)k, (uint64_t)m, k)
                      || library.create_layout(&made.x, CUDA_R_16BF, (uint64_t)k, 1, k)
                      || library.create_layout(&made.y, CUDA_R_32F, (uint64_t)m, 1, m) || library.create_wishes(&wishes)
                      || library.set_wishes(wishes, LIBRARY_MOST_WORKSPACE, &workspace, sizeof workspace)
                      || library.choose(library.handle, made.product, made.w, made.x, made.y, made.y, wishes, 1, &made.choice,
                                        &n);
        if (failed || !n) return false;
        made.rows = rows, made.cols = cols;
    }
    return !library.multiply(library.handle, made.product, &one, w, made.w, x, made.x, &zero, y, made.y, y, made.y,
                             made.choice.algorithm, library.workspace, workspace, gpu.stream);
}

/* =====================================================================================================================
 * Activations
 *
 * Owns: what is done to rows of f32 between products: norms, rotary positions (RoFormer, eq. 34), gates, copies. All of it is
 * bound by launches and memory, so a thread simply takes one value, or a fixed group of threads one vector.
 */

enum { THREADS = 256, SMALL_VECTOR = 128, MIDDLE_VECTOR = 2048 };      /* values of a vector that one warp takes, and a small block */

static dim3 blocks_for(size_t n) { return dim3((unsigned)((n + THREADS - 1) / THREADS)); }

/* The number of this thread in its grid. */
static __device__ inline size_t thread_index() { return (size_t)blockIdx.x * blockDim.x + threadIdx.x; }

/* The sum over the `N` threads of a group that starts at a multiple of N: a warp, or the whole block. Always the same tree. */
template <int N> static __device__ float group_sum(float value) {
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    if (N == 32) return value;
    __shared__ float of_warp[N / 32];
    __syncthreads();                                /* the sum before this one has been read */
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < N / 32; w++) sum += of_warp[w];
    return sum;
}

/* An e2m1 value in the lower four bits: those of f32's exponent and mantissa in their place, and a multiplication to repair the
 * exponent. */
static __device__ inline float widen_e2m1(uint32_t bits) {
    return __uint_as_float((bits & 8) << 28 | (bits & 7) << 22) * 0x1p126f;
}

/* 2^(exponent - 127); the largest is no number. */
static __device__ inline float widen_e8m0(uint32_t exponent) {
    return __uint_as_float(exponent == 255 ? 0x7fc00000 : exponent ? exponent << 23 : 0x400000);
}

/* One stored value of any type as f32. */
static __device__ float load_stored(const uint8_t *data, size_t i, DType dtype) {
    switch (dtype) {
    case DTYPE_F4_E2M1: return widen_e2m1((uint32_t)data[i / 2] >> i % 2 * 4);
    case DTYPE_F32: return ((const float *)data)[i];
    case DTYPE_F16: return __half2float(((const __half *)data)[i]);
    case DTYPE_BF16: return __bfloat162float(((const __nv_bfloat16 *)data)[i]);
    default: break;
    }
    __nv_fp8_e4m3 value;
    value.__x = data[i];
    return (float)value;
}

/* The scales that row `row` of a matrix meets, one for each SCALE_BLOCK columns; NULL: it has none. */
static __device__ const float *row_scales(const Matrix *w, int row) {
    return w->scale ? w->scale + (size_t)((w->first_row + row) / SCALE_BLOCK) * (size_t)w->scale_cols : NULL;
}

/* Grid: groups of columns, rows. */
static __global__ void embed_kernel(float *y, const Matrix embedding, const Row *rows) {
    const int token = rows[blockIdx.y].token, i = (int)thread_index();
    const float *scale = row_scales(&embedding, token);
    if (i >= embedding.cols) return;
    const float value = load_stored(embedding.data, (size_t)token * (size_t)embedding.cols + (size_t)i, embedding.dtype);
    y[(size_t)blockIdx.y * (size_t)embedding.cols + (size_t)i] = scale ? value * scale[i / SCALE_BLOCK] : value;
}

static void embed(float *y, const Matrix *embedding, const Row *rows, int n_rows) {
    if (n_rows <= 0) return;
    embed_kernel<<<dim3((unsigned)divide_up(embedding->cols, THREADS), (unsigned)n_rows), THREADS, 0, gpu.stream>>>(y, *embedding, rows);
    LAUNCHED();
}

template <int N> static __global__ void rms_norm_kernel(float *y, size_t y_stride, const float *x, size_t x_stride,
                                                        const float *weight, int n, int dim, float eps) {
    const size_t i = thread_index() / N;
    const int lane = (int)threadIdx.x % N;
    if (i >= (size_t)n) return;                     /* a whole group, so nobody waits for it */
    const float *in = x + i * x_stride;
    float *out = y + i * y_stride, sum = 0;
#pragma unroll 8                                    /* so that these are on their way together */
    for (int j = lane; j < dim; j += N) sum += in[j] * in[j];
    float scale = 1 / sqrtf(group_sum<N>(sum) / (float)dim + eps);
#pragma unroll 8
    for (int j = lane; j < dim; j += N) out[j] = in[j] * scale * weight[j];
}

static void rms_norm(float *y, size_t y_stride, const float *x, size_t x_stride, const float *weight, int n, int dim, float eps) {
    if (n <= 0) return;
    if (dim <= SMALL_VECTOR)
        rms_norm_kernel<32><<<blocks_for((size_t)n * 32), THREADS, 0, gpu.stream>>>(y, y_stride, x, x_stride, weight, n, dim,
                                                                                    eps);
    else if (dim <= MIDDLE_VECTOR)
        rms_norm_kernel<THREADS><<<(unsigned)n, THREADS, 0, gpu.stream>>>(y, y_stride, x, x_stride, weight, n, dim, eps);
    else rms_norm_kernel<1024><<<(unsigned)n, 1024, 0, gpu.stream>>>(y, y_stride, x, x_stride, weight, n, dim, eps);
    LAUNCHED();
}

/* The angle is rounded to f32 before the cosine, as in the reference. */
static __global__ void rotations_kernel(float *cosine, float *sine, const Row *rows, size_t n, const float *inverse_frequency,
                                        int half, float factor) {
    const size_t i = thread_index();
    if (i >= n) return;
    float angle = (float)rows[i / (size_t)half].position * inverse_frequency[i % (size_t)half];
    cosine[i] = cosf(angle) * factor;
    sine[i] = sinf(angle) * factor;
}

static void rotations(float *cosine, float *sine, const Row *rows, int n_rows, const float *inverse_frequency, int dim,
                      float factor) {
    const size_t n = (size_t)n_rows * (size_t)(dim / 2);
    if (!n) return;
    rotations_kernel<<<blocks_for(n), THREADS, 0, gpu.stream>>>(cosine, sine, rows, n, inverse_frequency, dim / 2, factor);
    LAUNCHED();
}

/* A thread turns one pair. */
static __global__ void rope_kernel(float *x, size_t n, int heads, int head_stride, int offset, int half, bool interleaved,
                                   const float *cosine, const float *sine) {
    const size_t pair = thread_index(), head = pair / (size_t)half;
    if (pair >= n) return;
    const int i = (int)(pair % (size_t)half), near = interleaved ? 2 : 1, far = interleaved ? 1 : half;
    const size_t angle = head / (size_t)heads * (size_t)half + (size_t)i;
    float *v = x + head * (size_t)head_stride + offset + i * near, a = v[0], b = v[far], c = cosine[angle], s = sine[angle];
    v[0] = a * c - b * s;
    v[far] = b * c + a * s;
}

static void rope(float *x, int n_rows, int heads, int head_stride, int offset, int dim, bool interleaved, const float *cosine,
                 const float *sine) {
    const size_t n = (size_t)n_rows * (size_t)heads * (size_t)(dim / 2);
    if (!n) return;
    rope_kernel<<<blocks_for(n), THREADS, 0, gpu.stream>>>(x, n, heads, head_stride, offset, dim / 2, interleaved, cosine, sine);
    LAUNCHED();
}

/* A warp takes one head of one row. What its lanes write they read again in other places. */
static __global__ void norm_heads_kernel(float *x, size_t stride, int n, int heads, int dim, const float *weight, float eps,
                                         const float *cosine, const float *sine) {
    const int vector = (int)(thread_index() / 32), lane = (int)threadIdx.x % 32, row = vector / heads, half = dim / 2;
    if (vector >= n * heads) return;
    float *v = x + (size_t)row * stride + (size_t)(vector % heads * dim), sum = 0;
    cosine += (size_t)row * (size_t)half, sine += (size_t)row * (size_t)half;
#pragma unroll 4
    for (int j = lane; j < dim; j += 32) sum += v[j] * v[j];
    const float scale = 1 / sqrtf(group_sum<32>(sum) / (float)dim + eps);
#pragma unroll 4
    for (int j = lane; j < dim; j += 32) v[j] = v[j] * scale * weight[j];
    __syncwarp();
#pragma unroll 2
    for (int j = lane; j < half; j += 32) {
        const float a = v[j], b = v[j + half];
        v[j] = a * cosine[j] - b * sine[j];
        v[j + half] = b * cosine[j] + a * sine[j];
    }
}

static void norm_heads(float *x, size_t stride, int n_rows, int heads, int dim, const float *weight, float eps, const float *cosine,
                       const float *sine) {
    if (n_rows <= 0 || heads <= 0) return;
    norm_heads_kernel<<<blocks_for((size_t)n_rows * (size_t)heads * 32), THREADS, 0, gpu.stream>>>(x, stride, n_rows, heads, dim,
                                                                                                  weight, eps, cosine, sine);
    LAUNCHED();
}

static __device__ inline float silu(float x) { return x / (1 + expf(-x)); }

static __global__ void swiglu_kernel(float *y, const float *gate, const float *up, size_t n) {
    const size_t i = thread_index();
    if (i < n) y[i] = silu(gate[i]) * up[i];
}

static void swiglu(float *y, const float *gate, const float *up, size_t n) {
    if (!n) return;
    swiglu_kernel<<<blocks_for(n), THREADS, 0, gpu.stream>>>(y, gate, up, n);
    LAUNCHED();
}

static void zero(float *y, size_t n) {
    if (n) CUDA(cudaMemsetAsync(y, 0, n * sizeof(float), gpu.stream));
}

static __global__ void add_kernel(float *y, const float *x, size_t n) {
    const size_t i = thread_index();
    if (i < n) y[i] += x[i];
}

static void add(float *y, const float *x, size_t n) {
    if (!n) return;
    add_kernel<<<blocks_for(n), THREADS, 0, gpu.stream>>>(y, x, n);
    LAUNCHED();
}

/* y[r] = x[indices ? indices[r] : r] * factor. */
static __global__ void copy_rows_kernel(float *y, size_t y_stride, const float *x, size_t x_stride, const int *indices, size_t n,
                                        size_t dim, float factor) {
    const size_t i = thread_index();
    if (i >= n) return;
    const size_t to = i / dim, from = indices ? (size_t)indices[to] : to;
    y[to * y_stride + i % dim] = x[from * x_stride + i % dim] * factor;
}

static void copy_rows(float *y, size_t y_stride, const float *x, size_t x_stride, int n_rows, int dim, float factor) {
    const size_t width = (size_t)dim, n = (size_t)n_rows * width;
    if (!n) return;
    copy_rows_kernel<<<blocks_for(n), THREADS, 0, gpu.stream>>>(y, y_stride, x, x_stride, NULL, n, width, factor);
    LAUNCHED();
}

static void gather_rows(float *y, const float *x, const int *indices, int n, int dim) {
    const size_t width = (size_t)dim, values = (size_t)n * width;
    if (!values) return;
    copy_rows_kernel<<<blocks_for(values), THREADS, 0, gpu.stream>>>(y, width, x, width, indices, values, width, 1);
    LAUNCHED();
}

static __global__ void add_bias_kernel(float *y, size_t stride, float bias, int n) {
    const size_t i = thread_index();
    if (i < (size_t)n) y[i * stride] += bias;
}

static void add_bias(float *y, size_t stride, float bias, int n) {
    if (n <= 0) return;
    add_bias_kernel<<<blocks_for((size_t)n), THREADS, 0, gpu.stream>>>(y, stride, bias, n);
    LAUNCHED();
}

static __global__ void cap_logits_kernel(float *y, size_t n, float multiplier, float softcap) {
    const size_t i = thread_index();
    if (i < n) y[i] = softcap > 0 ? softcap * tanhf(y[i] * multiplier / softcap) : y[i] * multiplier;
}

static void cap_logits(float *y, size_t n, float multiplier, float softcap) {
    if (!n) return;
    cap_logits_kernel<<<blocks_for(n), THREADS, 0, gpu.stream>>>(y, n, multiplier, softcap);
    LAUNCHED();
}

static __global__ void take_tokens_kernel(Row *rows, const DraftBlock *blocks, int slot, int n) {
    const size_t i = thread_index();
    if (i < (size_t)n) rows[i].token = blocks[i].ids[blocks[i].position + slot];
}

static void take_tokens(Row *rows, const DraftBlock *blocks, int slot, int n) {
    if (n <= 0) return;
    take_tokens_kernel<<<blocks_for((size_t)n), THREADS, 0, gpu.stream>>>(rows, blocks, slot, n);
    LAUNCHED();
}

/* A thread takes one channel of one block, the last row first: a row needs those before it as they were. */
static __global__ void convolve_kernel(float *z, const float *base, const float *delta, size_t delta_stride, size_t n,
                                       int block_size, int taps, int group, int dim) {
    const size_t thread = thread_index(), width = (size_t)dim, groups = (size_t)(dim / group);
    if (thread >= n) return;
    const size_t channel = thread % width, first = thread / width * (size_t)block_size;
    for (int i = block_size - 1; i >= 0; i--) {
        const float *change = delta + (first + (size_t)i) * delta_stride + channel / (size_t)group;
        float *at = z + (first + (size_t)i) * width + channel, sum = *at * (base[channel] + change[0]);
        for (int t = 1; t < taps && t <= i; t++)
            sum += (base[(size_t)t * width + channel] + change[(size_t)t * groups]) * at[-(ptrdiff_t)((size_t)t * width)];
        *at = sum;
    }
}

static void convolve(float *z, const float *base, const float *delta, size_t delta_stride, int n_rows, int block_size, int taps,
                     int group, int dim) {
    const size_t n = (size_t)(n_rows / block_size) * (size_t)dim;
    if (!n) return;
    convolve_kernel<<<blocks_for(n), THREADS, 0, gpu.stream>>>(z, base, delta, delta_stride, n, block_size, taps, group, dim);
    LAUNCHED();
}

/* ---- looking for numbers that are not finite */

/* What the blocks of a kernel have found; as it was again when the last of them has ended. */
static __device__ unsigned first_bad_row = UINT_MAX, finished_checks;

static __device__ inline bool is_finite(float x) { return fabsf(x) <= FLT_MAX; }

/* By one thread of every block, at its end: whether the block's own row was bad, or it has been told already. The block that ends
 * last writes the report, so a row that an earlier look found stays. */
static __device__ void finish_check(PassReport *report, int place, bool bad, unsigned row) {
    if (bad) atomicMin(&first_bad_row, row);
    __threadfence();
    if (atomicAdd(&finished_checks, 1) + 1 < gridDim.x) return;
    row = atomicExch(&first_bad_row, UINT_MAX);
    finished_checks = 0;
    if (report->bad_row >= 0) return;
    report->bad_row = row == UINT_MAX ? -1 : (int)row;
    report->bad_place = row == UINT_MAX ? -1 : place;
}

static __global__ void check_finite_kernel(PassReport *report, int place, const float *x, size_t n, size_t dim) {
    for (size_t i = thread_index(); i < n; i += (size_t)gridDim.x * THREADS)
        if (!is_finite(x[i])) atomicMin(&first_bad_row, (unsigned)(i / dim));
    __syncthreads();
    if (threadIdx.x == 0) finish_check(report, place, false, 0);
}

static void check_finite(PassReport *report, int place, const float *x, int n_rows, int dim) {
    const size_t n = (size_t)n_rows * (size_t)dim, most = 4 * (size_t)gpu.multiprocessors, blocks = (n + THREADS - 1) / THREADS;
    if (!n) return;
    check_finite_kernel<<<(unsigned)(blocks < most ? blocks : most), THREADS, 0, gpu.stream>>>(report, place, x, n, (size_t)dim);
    LAUNCHED();
}

/* A block of N threads takes a row. */
template <int N> static __global__ void add_norm_kernel(float *y, float *x, const float *branch, const float *weight, int dim,
                                                        float eps, PassReport *report, int place) {
    const size_t row = (size_t)blockIdx.x * (size_t)dim;
    float sum = 0;
    bool bad = false;
#pragma unroll 8
    for (int j = (int)threadIdx.x; j < dim; j += N) {
        const float value = x[row + j] + branch[row + j];
        x[row + j] = value;
        sum += value * value;
        bad |= !is_finite(value);
    }
    const float scale = 1 / sqrtf(group_sum<N>(sum) / (float)dim + eps);
#pragma unroll 8
    for (int j = (int)threadIdx.x; j < dim; j += N) y[row + j] = x[row + j] * scale * weight[j];
    if (!report) return;
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) finish_check(report, place, bad, blockIdx.x);
}

static void add_norm(float *y, float *x, const float *branch, const float *weight, int n, int dim, float eps, PassReport *report,
                     int place) {
    if (n <= 0) return;
    if (dim <= MIDDLE_VECTOR)
        add_norm_kernel<THREADS><<<(unsigned)n, THREADS, 0, gpu.stream>>>(y, x, branch, weight, dim, eps, report, place);
    else add_norm_kernel<1024><<<(unsigned)n, 1024, 0, gpu.stream>>>(y, x, branch, weight, dim, eps, report, place);
    LAUNCHED();
}

/* =====================================================================================================================
 * Products
 *
 *     linear, expand_value -> multiply -> launch_tiles -> choose_cut, product_kernel or multiply_many
 *     product_kernel -> fetch_first, multiply_segment, sum_segments
 *     multiply_segment -> fetch_input and put_input (x), multiply_batch (weights), put_sums
 *
 * Owns: y = W x with W in its stored format. A warp multiplies a strip of 32 rows of weights by 8 to 32 rows of x on the tensor
 * cores: the weights are the 16 x 16 operand, so that one row of x takes the same instructions as many, with idle columns. bf16,
 * e4m3 and e2m1 weights, which bf16 holds exactly, meet x rounded to bf16; f16 weights meet x rounded to f16 (a value beyond its
 * range becomes infinite, and shows). What the rounding takes from x is a second term that the weights meet likewise, so that a
 * product is right to about 2^-17 of x, wherever that costs little (TWO_TERMS_MOST). Sums are f32. The scales of e4m3 are
 * applied to the sum of each 128 columns; those of e2m1, powers of two, to the weights.
 *
 * A sum over the columns is cut into segments, each the work of one warp, and their sums are added in order. Their number depends
 * on the matrix alone: as many as it takes to keep the GPU busy with one row of x. Those of a strip lie in the warps of a block
 * and in the blocks of a cluster, which add up through each other's shared memory; how they are spread over warps and blocks, and
 * how many columns of the instruction are in use, is all that the number of rows of x decides. Many rows have a kernel of their
 * own, which takes the same steps in larger tiles.
 *
 * Weights are on their way into a ring in shared memory, 128 KB a multiprocessor, from before the kernel in front has ended. Four
 * threads fetch 64 neighbouring bytes of a row, and what a thread has fetched it uses as if it were the fragment it should have:
 * the order of k inside a product is free as long as both operands agree, so x is put into shared memory in the same order. f32
 * weights, and matrices whose rows do not begin at a multiple of 16 bytes, take the exact path: plain multiply-adds in f32, a
 * row of weights for each lane.
 */

enum {
    STRIP = 32,                 /* rows of weights of a warp, as two fragments of 16 */
    WARPS = THREADS / 32,       /* of a block; they divide rows of weights and segments among themselves */
    STRIP_CHUNKS = 2,           /* of 16 bytes a row, that make a thread's batch */
    RING_CHUNKS = 4,            /* on their way from memory at a time */
    CHUNK_BYTES = 4 * 32 * 16,  /* of a warp: four rows of each thread */
    RING_BYTES = RING_CHUNKS * CHUNK_BYTES,
    MAX_CLUSTER = 8,
    STAGED_PAD = 64,            /* bytes behind each row of x there, so that eight lanes' 16 bytes meet different banks */
    SUM_STRIDE = STRIP + 4,     /* floats from column to column of a warp's sums; the 4 spread a fragment over the banks */
};

/* How the sum over a matrix's columns is cut: they are dealt, a batch at a time, to cluster * along segments in turn, each of
 * which is the work of one warp. `along` neighbours lie in the warps of a block, and the blocks of a cluster follow each
 * other. */
typedef struct Cut {
    int cluster, along;         /* powers of two */
    int rounds;                 /* batches of a segment */
} Cut;

typedef struct Product {        /* y[r] = W x[r], for each of `heads` matrices that follow each other `head_rows` rows apart */
    Matrix w;                   /* of the first head */
    const float *x;
    float *y;
    size_t x_stride, y_stride;
    int n_rows;
    int heads, head_rows, x_head, y_head;           /* the last two: values from one head to the next */
    bool aligned;               /* x allows loads of 16 bytes */
    Cut cut;
} Product;

/* The rows of x that a block multiplies. */
typedef struct Input {
    const float *x;
    size_t stride;
    int count, cols;
    bool aligned;
} Input;

/* Exact stands for DTYPE_F32 as a template argument, whatever the stored type. */
static constexpr DType EXACT = DTYPE_F32;

/* Bytes of n stored weights of a row. */
static __host__ __device__ constexpr size_t weight_bytes(DType dtype, size_t n) {
    return dtype == DTYPE_F32 ? 4 * n : dtype == DTYPE_F8_E4M3 ? n : dtype == DTYPE_F4_E2M1 ? (n + 1) / 2 : 2 * n;
}

/* Columns of W in a thread's 16 bytes, a chunk; and of a warp's batch. */
static __host__ __device__ constexpr int chunk_values(DType D) { return D == DTYPE_F4_E2M1 ? 32 : D == DTYPE_F8_E4M3 ? 16 : 8; }
static __host__ __device__ constexpr int batch_values(DType D) { return STRIP_CHUNKS * 4 * chunk_values(D); }
static_assert(SCALE_BLOCK == batch_values(DTYPE_F8_E4M3), "a batch of e4m3 weights has one scale");
static_assert(EXPONENT_BLOCK == chunk_values(DTYPE_F4_E2M1), "a chunk of e2m1 weights has one scale");

/* A warp's rows of weights as one thread sees them: rows g and g + 8, g = lane / 4, of both fragments, from this thread's first
 * chunk on. Offsets are from each fragment's first row. The exact path has one row, the first. */
typedef struct Strip {
    const uint8_t *data[2];
    const float *scale[2];
    const uint8_t *exponents[2];
    uint32_t row[4], scale_row[4];                  /* offsets: in bytes, and in scales */
    int limit[2];               /* of the columns, less those before this thread's; 0 for a fragment outside the matrix */
    DType dtype;
} Strip;

/* The scales of a batch, on their way from memory while the one before is multiplied. */
typedef struct Scales {
    float scale[4];             /* e4m3 */
    uint2 exponents[4];         /* e2m1: of each row, a byte for each of four threads' chunks; x: the first ones, y: the second */
} Scales;

enum { NO_BATCH = INT_MAX / 2 };                    /* a column past every matrix: fetches zeros, reads nothing */

static __device__ inline int lane_id() { return (int)(threadIdx.x % 32); }
static __device__ inline int warp_id() { return (int)(threadIdx.x / 32); }

/* The n of 2^n: divisions take as long as reads of memory. */
static __device__ inline int power_of(int x) { return 31 - __clz(x); }

/* 16 bytes into shared memory, or zeros, beside what the thread does next. */
static __device__ inline void start_copy_to_shared(uint8_t *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* Fragment m of a strip, rows from `first` on of w. Rows past the end repeat the last one, and are not written. */
template <DType D> static __device__ inline void set_fragment(Strip *strip, int m, const Matrix &w, int first) {
    const int lane = lane_id(), skipped = D == EXACT ? 0 : lane % 4 * chunk_values(D), begin = min(first, w.rows - 1);
    const DType dtype = D == EXACT ? w.dtype : D;
    strip->dtype = w.dtype;
    strip->limit[m] = first < w.rows ? w.cols - skipped : 0;
    strip->data[m] = w.data + (size_t)begin * weight_bytes(dtype, (size_t)w.cols);
    strip->scale[m] = row_scales(&w, begin);
    strip->exponents[m] = dtype == DTYPE_F4_E2M1 ? w.exponents + (size_t)(w.first_row + begin) * (size_t)w.scale_cols : NULL;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = min(first + (D == EXACT ? lane % 16 : lane / 4 + i * 8), w.rows - 1) - begin;
        const int scale_row = dtype == DTYPE_F4_E2M1 ? row : (w.first_row + begin + row) / SCALE_BLOCK
                                                                 - (w.first_row + begin) / SCALE_BLOCK;
        strip->row[2 * m + i] = (uint32_t)((size_t)row * weight_bytes(dtype, (size_t)w.cols)
                                           + weight_bytes(dtype, (size_t)skipped));
        strip->scale_row[2 * m + i] = (uint32_t)(scale_row * w.scale_cols);
    }
}

template <DType D> static __device__ inline void set_strip(Strip *strip, const Matrix &w, int first) {
    set_fragment<D>(strip, 0, w, first);
    set_fragment<D>(strip, 1, w, first + 16);
}

/* Starts to read a chunk, of the batch of columns from k on, into its place in the warp's ring. A thread reads back what it has
 * fetched itself, so nobody waits for another. Always a group of copies, so that they can be counted. */
template <DType D> static __device__ inline void fetch_chunk(uint8_t *ring, const Strip &strip, int place, int k) {
    const int at = k + place % STRIP_CHUNKS * 4 * chunk_values(D);
    uint8_t *to = ring + place % RING_CHUNKS * CHUNK_BYTES + lane_id() * 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
        start_copy_to_shared(to + i * 512, strip.data[i / 2] + (strip.row[i] + (uint32_t)weight_bytes(D, (size_t)at)),
                             at < strip.limit[i / 2]);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Of a batch, also where only the other threads of a row have columns: the sums are of all four. */
template <DType D> static __device__ inline void fetch_scales(Scales &scales, const Strip &strip, int k) {
    if constexpr (D == DTYPE_F8_E4M3)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool there = k < strip.limit[i / 2] + lane_id() % 4 * chunk_values(D);
            scales.scale[i] = there ? __ldg(strip.scale[i / 2] + (strip.scale_row[i] + k / SCALE_BLOCK)) : 0;
        }
    if constexpr (D == DTYPE_F4_E2M1)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint8_t *at = strip.exponents[i / 2] + (strip.scale_row[i] + (uint32_t)(k / EXPONENT_BLOCK));
            scales.exponents[i] = k < strip.limit[i / 2] ? __ldg((const uint2 *)at) : make_uint2(0, 0);
        }
}

/* A segment's first chunks, from column k on; batches are `step` columns apart, up to `rounds`. */
template <DType D> static __device__ inline void fetch_first(uint8_t *ring, Scales &scales, const Strip &strip, int k, int step,
                                                             int rounds) {
    if constexpr (D != EXACT) {
#pragma unroll
        for (int c = 0; c < RING_CHUNKS; c++)
            fetch_chunk<D>(ring, strip, c, c / STRIP_CHUNKS < rounds ? k + c / STRIP_CHUNKS * step : NO_BATCH);
        fetch_scales<D>(scales, strip, k);
    }
}

/* Two f32 as the 16-bit type that meets weights of type D. */
template <DType D> static __device__ inline uint32_t narrow_pair(float low, float high) {
    uint32_t pair;
    if (D == DTYPE_F16) {
        __half2 halves = __floats2half2_rn(low, high);
        memcpy(&pair, &halves, 4);
    } else {
        __nv_bfloat162 halves = __floats2bfloat162_rn(low, high);
        memcpy(&pair, &halves, 4);
    }
    return pair;
}

/* What rounding to that type has taken from v. */
template <DType D> static __device__ inline float remainder_of(float v) {
    return v - (D == DTYPE_F16 ? __half2float(__float2half_rn(v)) : __uint_as_float(narrow_pair<D>(0, v)));
}

/* Eight neighbouring values as pairs in the order in which widen_four and widen_eight give the weights they meet. */
template <DType D> static __device__ inline uint4 narrow_eight(const float v[8]) {
    constexpr int apart = D == DTYPE_F4_E2M1 ? 4 : D == DTYPE_F8_E4M3 ? 2 : 1;
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int low = i / apart * 2 * apart + i % apart;
        pair[i] = narrow_pair<D>(v[low], v[low + apart]);
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

/* Eight values of x from p on; the first `count` of them are there. */
static __device__ inline void load_eight(float v[8], const float *p, int count, bool aligned) {
    if (aligned && count >= 8) {
        const float4 a = *(const float4 *)p, b = *(const float4 *)(p + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = i < count ? p[i] : 0;
}

/* Bytes of one row of x in shared memory: the columns of a round of a block, each term for itself. */
static __host__ __device__ constexpr int term_bytes(DType D, int along) { return along * batch_values(D) * (D == EXACT ? 4 : 2); }
static __host__ __device__ constexpr int staged_stride(DType D, int along, int terms) {
    return terms * term_bytes(D, along) + STAGED_PAD;
}

/* The eight values of x that this thread brings to shared memory the i-th time in each round: of row `column` of the block's,
 * from value 8 * eight on in the order in which threads need them. Of e4m3 and e2m1, whose 16 or 32 values of a thread make
 * several fragments, the first eight of four threads come first: `offset` is where the eight stand in x. */
typedef struct StagedEight { int column, eight, offset; } StagedEight;

template <DType D> static __device__ inline StagedEight staged_eight(const Cut &cut, int i) {
    const int power = power_of(cut.along * (batch_values(D) / 8)), at = i * THREADS + (int)threadIdx.x;
    const int eight = at & (1 << power) - 1, n = chunk_values(D) / 8;
    return {at >> power, eight, 8 * (D == EXACT ? eight : eight / (4 * n) * 4 * n + eight % 4 * n + eight % (4 * n) / 4)};
}

/* The columns of a round, from `from` on: as much as fits into the registers is on its way while the weights before are
 * multiplied. */
template <DType D, int AHEAD>
static __device__ inline void fetch_input(float v[AHEAD][8], const Input &input, const Cut &cut, int from, int begin) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const StagedEight at = staged_eight<D>(cut, begin + i);
        if (at.column >= input.count) continue;
        load_eight(v[i], input.x + (size_t)at.column * input.stride + (from + at.offset), input.cols - from - at.offset,
                   input.aligned);
    }
}

template <DType D, int TERMS, int AHEAD>
static __device__ inline void put_input(uint8_t *staged, float v[AHEAD][8], const Input &input, const Cut &cut, int begin) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const StagedEight at = staged_eight<D>(cut, begin + i);
        if (at.column >= input.count) continue;
        uint8_t *to = staged + at.column * staged_stride(D, cut.along, TERMS) + at.eight * (D == EXACT ? 32 : 16);
        if constexpr (D == EXACT) memcpy(to, v[i], sizeof v[i]);
        else
#pragma unroll
            for (int term = 0; term < TERMS; term++, to += term_bytes(D, cut.along)) {
                *(uint4 *)to = narrow_eight<D>(v[i]);
#pragma unroll
                for (int j = 0; j < 8; j++) v[i][j] = remainder_of<D>(v[i][j]);
            }
    }
}

/* Two pairs of bf16 times a pair. */
static __device__ inline uint32_t multiply_pair(uint32_t pair, uint32_t factor) {
    __nv_bfloat162 a, b;
    memcpy(&a, &pair, 4);
    memcpy(&b, &factor, 4);
    a = __hmul2(a, b);
    memcpy(&pair, &a, 4);
    return pair;
}

/* Four e4m3 values as pairs of bf16: the first and the third, the second and the fourth. The bits are shifted into place, and a
 * multiplication by 2^120 repairs the exponent; subnormals come out right by itself. */
static __device__ inline uint2 widen_four(uint32_t four) {
    const uint32_t even = (four << 8 & 0x80008000) | (four << 4 & 0x07f007f0);
    const uint32_t odd = (four & 0x80008000) | (four >> 4 & 0x07f007f0);
    return make_uint2(multiply_pair(even, 0x7b807b80), multiply_pair(odd, 0x7b807b80));
}

/* Eight e2m1 values, likewise, as pairs of values i and i + 4, times e2m1_factor. */
static __device__ inline uint4 widen_eight(uint32_t eight, uint32_t factor) {
    return make_uint4(multiply_pair((eight << 12 & 0x80008000) | (eight << 6 & 0x01c001c0), factor),
                      multiply_pair((eight << 8 & 0x80008000) | (eight << 2 & 0x01c001c0), factor),
                      multiply_pair((eight << 4 & 0x80008000) | (eight >> 2 & 0x01c001c0), factor),
                      multiply_pair((eight & 0x80008000) | (eight >> 6 & 0x01c001c0), factor));
}

/* What this thread's values meet, of the E8M0 exponents of four threads: the scale 2^(e - 127) and the 2^126 that repairs the
 * values' exponent. Together that may be more than bf16 holds, so it is 2^-32 of it, and put_sums makes up for it. A scale beyond
 * 2^33 becomes infinite, and shows. */
enum { E2M1_SHIFT = 32 };
static __device__ inline uint32_t e2m1_factor(uint32_t exponents) {
    const uint32_t own = __byte_perm(exponents, 0, 0x4040 | lane_id() % 4 * 0x0101);
    return (__vminu2(own, 0x00a100a1) << 7) + (126 - E2M1_SHIFT << 7) * 0x10001;
}

/* sum += A B: 16 rows of weights, 16 values of k, 8 rows of x. */
template <DType D> static __device__ inline void multiply_fragment(float sum[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                                   uint32_t a3, uint32_t b0, uint32_t b1) {
    if (D == DTYPE_F16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Eight of a thread's values in each of four rows as two fragments: part `part` of a chunk, 16 bytes of which make 1 (16-bit
 * types), 2 (e4m3) or 4 (e2m1). */
template <DType D> static __device__ inline uint4 widen_part(const uint4 &chunk, int part, uint32_t factor) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    if (D == DTYPE_F4_E2M1) return widen_eight(words[part], factor);
    if (D != DTYPE_F8_E4M3) return chunk;
    const uint2 low = widen_four(words[2 * part]), high = widen_four(words[2 * part + 1]);
    return make_uint4(low.x, low.y, high.x, high.y);
}

/* 32 values of k, for both fragments and all tiles of eight rows of x: of each value of x first the upper term, then the
 * lower. */
template <DType D, int TILES, int TERMS>
static __device__ inline void multiply_stretch(float sum[2][TILES][4], const uint4 chunk[4], int part, const uint32_t factor[4],
                                               const uint8_t *x, int x_stride, int last_column) {
    uint4 a[4];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = widen_part<D>(chunk[i], part, factor[i]);
#pragma unroll
    for (int term = 0; term < TERMS; term++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int column = min(tile * 8 + lane_id() / 4, last_column);     /* idle columns of the instruction repeat one */
            const uint4 b = *(const uint4 *)(x + column * x_stride + term * ((x_stride - STAGED_PAD) / TERMS));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                multiply_fragment<D>(sum[m][tile], a[2 * m].x, a[2 * m + 1].x, a[2 * m].y, a[2 * m + 1].y, b.x, b.y);
                multiply_fragment<D>(sum[m][tile], a[2 * m].z, a[2 * m + 1].z, a[2 * m].w, a[2 * m + 1].w, b.z, b.w);
            }
        }
}

/* Batch i of a segment. In the ring, those that come RING_CHUNKS later take its place, from column `later` on; `next`: column
 * of the one behind it. x: this thread's first value of it in row 0. */
template <DType D, int TILES, int TERMS>
static __device__ inline void multiply_batch(float total[2][TILES][4], uint8_t *ring, Scales &scales, const Strip &strip, int i,
                                             int next, int later, const uint8_t *x, int x_stride, int last_column) {
    constexpr bool scaled = D == DTYPE_F8_E4M3;
    constexpr int parts = chunk_values(D) / 8;
    float sum[2][TILES][4] = {};
    uint32_t factor[STRIP_CHUNKS][4] = {};
    if constexpr (D == DTYPE_F4_E2M1) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            factor[0][r] = e2m1_factor(scales.exponents[r].x);
            factor[1][r] = e2m1_factor(scales.exponents[r].y);
        }
        fetch_scales<D>(scales, strip, next);
    }
#pragma unroll
    for (int u = 0; u < STRIP_CHUNKS; u++) {
        const int place = i * STRIP_CHUNKS + u;
        asm volatile("cp.async.wait_group %0;" :: "n"(RING_CHUNKS - 1) : "memory");
        uint4 chunk[4];
#pragma unroll
        for (int r = 0; r < 4; r++)
            chunk[r] = *(const uint4 *)(ring + place % RING_CHUNKS * CHUNK_BYTES + r * 512 + lane_id() * 16);
#pragma unroll
        for (int part = 0; part < parts; part++)
            multiply_stretch<D, TILES, TERMS>(scaled ? sum : total, chunk, part, factor[u], x + (u * parts + part) * 64, x_stride,
                                              last_column);
        fetch_chunk<D>(ring, strip, place, later);
    }
    if constexpr (scaled) {
#pragma unroll
        for (int j = 0; j < 2 * TILES * 4; j++) {
            const int m = j / (TILES * 4), tile = j / 4 % TILES, part = j % 4;
            total[m][tile][part] = fmaf(scales.scale[2 * m + part / 2], sum[m][tile][part], total[m][tile][part]);
        }
        fetch_scales<D>(scales, strip, next);
    }
}

/* Plain f32 for the same values: the lane's row, eight rows of x. k: first column of the batch. */
static __device__ void multiply_exactly(float total[8], const Strip &strip, int k, const float *x, int x_stride,
                                        int last_column) {
    const int m = lane_id() / 16, limit = m ? strip.limit[1] : strip.limit[0];
    const uint8_t *data = (m ? strip.data[1] : strip.data[0]) + (m ? strip.row[2] : strip.row[0]);
    const float *scale = m ? strip.scale[1] : strip.scale[0];
    const uint8_t *exponents = m ? strip.exponents[1] : strip.exponents[0];
    const uint32_t scale_row = m ? strip.scale_row[2] : strip.scale_row[0];
    for (int i = 0; i < batch_values(EXACT) && k + i < limit; i++) {
        float weight = load_stored(data, (size_t)(k + i), strip.dtype);
        if (scale) weight *= scale[scale_row + (uint32_t)((k + i) / SCALE_BLOCK)];
        if (exponents) weight *= widen_e8m0(exponents[scale_row + (uint32_t)((k + i) / EXPONENT_BLOCK)]);
#pragma unroll
        for (int c = 0; c < 8; c++) total[c] = fmaf(weight, x[min(c, last_column) * x_stride + i], total[c]);
    }
}

/* A warp's sums, [columns, SUM_STRIDE], where the others find them. */
template <DType D, int TILES> static __device__ void put_sums(float *sums, const float total[2][TILES][4]) {
    const int lane = lane_id();
    if constexpr (D == EXACT)
#pragma unroll
        for (int c = 0; c < 8; c++) sums[c * SUM_STRIDE + lane] = total[c / 4][0][c % 4];
    else
#pragma unroll
        for (int i = 0; i < 2 * TILES * 4; i++) {
            const int m = i / (TILES * 4), tile = i / 4 % TILES, part = i % 4;
            sums[(tile * 8 + lane % 4 * 2 + part % 2) * SUM_STRIDE + m * 16 + lane / 4 + part / 2 * 8] =
                D == DTYPE_F4_E2M1 ? total[m][tile][part] * 0x1p32f : total[m][tile][part];
        }
}

/* Columns of a round of all segments. */
static __host__ __device__ inline int round_columns(DType D, const Cut &cut) { return cut.cluster * cut.along * batch_values(D); }

/* The first batch of this warp, in a block whose columns begin at `from`. */
template <DType D> static __device__ inline int first_batch(const Cut &cut, int from) {
    return from + (warp_id() & cut.along - 1) * batch_values(D);
}

/* This warp's segment of its strip times the input; its sums lie where the ring was. from: the block's first column;
 * fetch_first has been called. In each round x of the next one is fetched, rounded and put into the other of two buffers,
 * while weights are on their way. All warps of the block come along. */
template <DType D, int TILES, int TERMS>
static __device__ void multiply_segment(uint8_t *ring, Scales &scales, const Strip &strip, const Input &input, const Cut &cut,
                                        int from, uint8_t *staged) {
    const int stride = staged_stride(D, cut.along, TERMS), last = input.count - 1, step = round_columns(D, cut);
    const int place = (warp_id() & cut.along - 1) * term_bytes(D, 1) + (D == EXACT ? 0 : lane_id() % 4 * 16);
    float total[2][TILES][4] = {}, v[TILES][8];
#pragma unroll 1
    for (int i = -1, k = from; i < cut.rounds; i++, k += step) {    /* k: the block's columns of the next round */
        const bool more = i + 1 < cut.rounds;
        uint8_t *now = staged + (i & 1) * input.count * stride, *then = staged + (~i & 1) * input.count * stride;
        if (more) fetch_input<D, TILES>(v, input, cut, k, 0);
        if (i >= 0) {
            const int next = more ? first_batch<D>(cut, k) : NO_BATCH, ahead = RING_CHUNKS / STRIP_CHUNKS;
            if constexpr (D == EXACT)
                multiply_exactly(&total[0][0][0], strip, first_batch<D>(cut, k - step), (const float *)(now + place), stride / 4,
                                 last);
            else
                multiply_batch<D, TILES, TERMS>(total, ring, scales, strip, i, next,
                                                i + ahead < cut.rounds ? first_batch<D>(cut, k) + (ahead - 1) * step : NO_BATCH,
                                                now + place, stride, last);
        }
        if (!more) break;
        put_input<D, TERMS, TILES>(then, v, input, cut, 0);
        for (int j = TILES; j * THREADS < input.count * cut.along * (batch_values(D) / 8); j += TILES) {
            fetch_input<D, TILES>(v, input, cut, k, j);
            put_input<D, TERMS, TILES>(then, v, input, cut, j);
        }
        __syncthreads();
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    put_sums<D, TILES>((float *)ring, total);
}

/* ---- clusters: sm_90 and later; before, a cluster is one block */

static __device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

/* What lies at p in the shared memory of block `rank` of the cluster. */
static __device__ inline void load_from_block(float4 *value, const float *p, int rank) {
#if __CUDA_ARCH__ >= 900
    uint32_t at = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a];\n}"
                 : "=f"(value->x), "=f"(value->y), "=f"(value->z), "=f"(value->w) : "r"(at), "r"(rank));
#else
    *value = rank ? make_float4(0, 0, 0, 0) : *(const float4 *)p;
#endif
}

/* The sum of all segments for four neighbours: from row `row` of the cluster's rows on, column `column`. Four segments' are on
 * their way at a time. */
static __device__ inline float4 sum_segments(const float *sums, const Cut &cut, int row, int column) {
    const int power = power_of(cut.along), segments = cut.cluster << power;
    const float *first = sums + (row / STRIP << power) * (RING_BYTES / 4) + column * SUM_STRIDE + row % STRIP;
    float4 sum = {}, value[4];
#pragma unroll 1
    for (int begin = 0; begin < segments; begin += 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int segment = min(begin + i, segments - 1);
            load_from_block(&value[i], first + (segment & cut.along - 1) * (RING_BYTES / 4), segment >> power);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (begin + i < segments)
                sum = make_float4(sum.x + value[i].x, sum.y + value[i].y, sum.z + value[i].z, sum.w + value[i].w);
    }
    return sum;
}

/* Shared memory of a block: the warps' rings, then two rounds' x. */
static int product_shared(DType D, const Cut &cut, int columns, int terms) {
    return WARPS * RING_BYTES + 2 * columns * staged_stride(D, cut.along, terms);
}

/* Four neighbouring values of y from p on, the first `count` of them. */
static __device__ inline void store_four(float *p, float4 v, int count) {
    if (count >= 4 && (uintptr_t)p % 16 == 0) *(float4 *)p = v;
    else {
        if (count > 0) p[0] = v.x;
        if (count > 1) p[1] = v.y;
        if (count > 2) p[2] = v.z;
        if (count > 3) p[3] = v.w;
    }
}

/* Grid: blocks of a cluster of each head, groups of rows of x, groups of rows of weights. */
template <DType D, int TILES, int TERMS>
static __global__ void __launch_bounds__(THREADS, TILES <= 2 ? 2 : 1) product_kernel(const __grid_constant__ Product p) {
    extern __shared__ __align__(128) uint8_t shared[];
    let_next_start();
    const int along = power_of(p.cut.along), group_rows = STRIP * WARPS >> along, first_row = (int)blockIdx.z * group_rows;
    const int head = (int)blockIdx.x >> power_of(p.cut.cluster), rank = (int)blockIdx.x & p.cut.cluster - 1;
    const int from = (rank << along) * batch_values(D);
    Matrix w = p.w;
    w.data += (size_t)head * (size_t)p.head_rows * weight_bytes(D == EXACT ? w.dtype : D, (size_t)w.cols);
    w.first_row += head * p.head_rows;
    Strip strip;
    set_strip<D>(&strip, w, first_row + (warp_id() >> along) * STRIP);
    Scales scales;
    uint8_t *ring = shared + warp_id() * RING_BYTES;
    fetch_first<D>(ring, scales, strip, first_batch<D>(p.cut, from), round_columns(D, p.cut), p.cut.rounds);
    wait_for_previous();

    const int first = (int)blockIdx.y * TILES * 8;
    const Input input = {.x = p.x + (size_t)first * p.x_stride + head * p.x_head, .stride = p.x_stride,
                         .count = min(TILES * 8, p.n_rows - first), .cols = w.cols, .aligned = p.aligned};
    multiply_segment<D, TILES, TERMS>(ring, scales, strip, input, p.cut, from, shared + WARPS * RING_BYTES);

    if (p.cut.cluster > 1) cluster_barrier();
    else __syncthreads();
    const int power = power_of(group_rows / 4);
    for (int i = rank * THREADS + (int)threadIdx.x; i < input.count << power; i += p.cut.cluster * THREADS) {
        const int r = (i & (1 << power) - 1) * 4, column = i >> power, count = w.rows - first_row - r;
        if (count > 0)
            store_four(p.y + (size_t)(first + column) * p.y_stride + (head * p.y_head + first_row + r),
                       sum_segments((const float *)shared, p.cut, r, column), count);
    }
    if (p.cut.cluster > 1) cluster_barrier();       /* the others may still be reading this block's sums */
}

static Cut cut_of(int cluster, int along, int cols, DType dtype = DTYPE_BF16) {
    return {.cluster = cluster, .along = along, .rounds = divide_up(cols, cluster * along * batch_values(dtype))};
}

/* Blocks that the GPU holds at a time, in such clusters: two to a multiprocessor, but where a cluster does not fit into what the
 * others have left of its part of the GPU. */
static int cluster_slots(int cluster) {
    static int found[MAX_CLUSTER + 1];
    if (gpu.major < 9 || cluster == 1) return 2 * gpu.multiprocessors;
    if (found[cluster]) return found[cluster];
    const auto kernel = product_kernel<DTYPE_BF16, 1, 2>;
    const size_t shared = (size_t)product_shared(DTYPE_BF16, {cluster, 1, 1}, 8, 2);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {.x = (unsigned)cluster, .y = 1, .z = 1};
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3((unsigned)cluster);
    launch.blockDim = dim3(THREADS);
    launch.dynamicSmemBytes = shared;
    launch.attrs = &attribute;
    launch.numAttrs = 1;
    allow_shared(kernel, shared);
    CUDA(cudaOccupancyMaxActiveClusters(&found[cluster], kernel, &launch));
    return found[cluster] *= cluster;
}

/* About the microseconds that a product with n rows of x takes with that cut, as measured on an H200. A round takes as long as
 * its bytes at the memory's rate, but not less than its instructions do; x that a thread cannot have on its way beforehand makes
 * all wait; blocks that come later begin anew; and the blocks of a cluster wait for each other. */
static double cut_cost(const Cut &cut, DType dtype, int rows, int heads, int n) {
    const double bytes = 1.9, instructions = dtype == DTYPE_F4_E2M1 ? 1.6 : dtype == DTYPE_F8_E4M3 ? 1 : 0.55;
    const double wait = 0.45, begin = 1.3, cluster = cut.cluster > 1 ? 0.6 + 0.15 * cut.cluster : 0, segment = 0.02;
    const int columns = n < 16 ? n : 16, share = 2 * product_shared(dtype, cut, columns, 2) <= (int)gpu.shared_per_block ? 1 : 2;
    const int blocks = divide_up(rows, STRIP * (WARPS / cut.along)) * heads * cut.cluster;
    const int slots = cluster_slots(cut.cluster) / share, waves = divide_up(blocks, slots);
    const int late = divide_up(columns * cut.along * batch_values(dtype) / 8, THREADS) - divide_up(columns, 8);
    const double busy = (double)(blocks < slots ? blocks : slots) / (2 * gpu.multiprocessors);
    const double round = fmax(bytes * busy, instructions + bytes * busy / 2) + (late > 0 ? late * wait : 0);
    return waves * (cut.rounds * round + begin) + cluster + segment * cut.cluster * cut.along;
}

/* The cut of a matrix. The number of segments is its shape's, what is best for one row; how they lie in warps and blocks changes
 * no sum, and may follow the number of rows. */
static Cut choose_cut(int rows, int cols, int heads, DType dtype, int n) {
    const int most = gpu.major == 9 ? MAX_CLUSTER : 1;
    Cut best = {}, cut;
    for (int segments = 2; segments <= WARPS * most; segments *= 2) {
        cut = cut_of(segments > WARPS ? segments / WARPS : 1, segments > WARPS ? WARPS : segments, cols, dtype);
        if (!best.rounds || cut_cost(cut, dtype, rows, heads, 1) < cut_cost(best, dtype, rows, heads, 1)) best = cut;
    }
    const int segments = best.cluster * best.along;
    for (int cluster = 2 * best.cluster; cluster <= most && cluster <= segments; cluster *= 2) {
        cut = cut_of(cluster, segments / cluster, cols, dtype);
        if (cut_cost(cut, dtype, rows, heads, n) < cut_cost(best, dtype, rows, heads, n)) best = cut;
    }
    return best;
}

template <DType D, int TILES, int TERMS> static void launch_product(const Product &product) {
    const Cut &cut = product.cut;
    const size_t shared = (size_t)product_shared(D, cut, product.n_rows < TILES * 8 ? product.n_rows : TILES * 8, TERMS);
    const int groups = divide_up(product.w.rows, STRIP * (WARPS / cut.along));
    allow_shared(product_kernel<D, TILES, TERMS>, shared);
    launch_early(product_kernel<D, TILES, TERMS>,
                 dim3((unsigned)(cut.cluster * product.heads), (unsigned)divide_up(product.n_rows, TILES * 8), (unsigned)groups),
                 THREADS, shared, cut.cluster, product);
}

/* ---- many rows: a block multiplies a tile of 64 to 256 rows of weights by 64 or 128 rows of x, one segment after the other,
 * each instruction with the same values as product_kernel's: a row has the same bits there and here, whatever the tile.
 *
 *     multiply_many -> consider_tile, round_kernel, wide_kernel -> multiply_segments -> finish_segment, add_slots
 *
 * x is rounded once for all blocks, in the layout that wgmma reads: 128 bytes of a row and term for each step of 64 columns,
 * whose 16-byte parts are exchanged within eight rows, so that a column's lie in different banks. A tile's step is one copy for
 * each term. Weights come through shared memory as well, but there each thread reads only what it has copied itself. wgmma adds
 * up as mma.sync does, which takes its place before sm_90; the tests compare every bit. */

enum {
    WIDE_ROWS = 64,             /* of weights, of the four warps that share a wgmma */
    WIDE_THREADS = 128,
    WIDE_STEP = 64,             /* columns */
    WIDE_BYTES = 2 * WIDE_STEP, /* of a row and term of x in a step */
    WIDE_STAGES = 4,            /* steps in shared memory at most */
    ROUNDED_BYTES = 32 << 20,
};

/* [heads, steps, terms, padded rows, WIDE_BYTES] */
static __device__ __align__(1024) uint8_t rounded_rows[ROUNDED_BYTES];

typedef struct Wide {
    Product p;
    int split, stages;          /* blocks of a cluster that share a tile's segments; steps in shared memory */
    int padded;                 /* rows of x, up to whole tiles */
} Wide;

/* A tile of N rows of x. stage, rounded: bytes of a step of weights and of x. slot: floats of one segment's sums. */
template <DType D, int TERMS, int N, int GROUPS> struct WideTile {
    static constexpr int rows = GROUPS * WIDE_ROWS, threads = GROUPS * WIDE_THREADS;
    static constexpr int chunk = D == DTYPE_F4_E2M1 ? 8 : 16;       /* bytes that a thread copies at a time, */
    static constexpr int chunks = chunk_values(D) == 8 ? 4 : 2;     /* and how often in a step, half of them for either row */
    static constexpr int stage = threads * chunks * chunk, rounded = TERMS * N * WIDE_BYTES;
    static constexpr int stride = rows + 4, slot = N * stride;
};

/* Barriers in shared memory, for each stage: its x has come; all warps have done with it. */
typedef struct Stages { uint64_t filled[WIDE_STAGES], used[WIDE_STAGES]; } Stages;

/* The columns of a step: 64 neighbours; of e2m1, 16 neighbours for each of four threads. */
template <DType D> static __device__ inline int step_column(int step) {
    return D == DTYPE_F4_E2M1 ? step / 4 * 256 + step % 4 / 2 * 128 + step % 2 * 16 : step * WIDE_STEP;
}

/* Of them, the first of the eight that become word t of four of the 16-byte parts, those of stretch s. */
template <DType D> static __device__ inline int eight_column(int s, int t) {
    return chunk_values(D) == 8 ? s * 32 + t * 8 : t * chunk_values(D) + s * 8;
}

/* Where a block is: step `at` of a segment, step `step` of the matrix. Those past the last column are left out. */
typedef struct Walk { int segment, at, step; } Walk;

template <DType D> static __device__ inline void next_step(Walk *walk, int segments, int n_steps) {
    constexpr int steps = batch_values(D) / WIDE_STEP;              /* of a batch */
    const int at = walk->at + 1, step = (walk->segment + at / steps * segments) * steps + at % steps;
    const bool there = step < n_steps;
    walk->at = there ? at : 0;
    walk->segment += !there;
    walk->step = there ? step : walk->segment * steps;
}

/* A thread has a 16-byte part: of eight values of each of four threads a pair, in narrow_eight's order. */
template <DType D, int TERMS>
static __global__ void __launch_bounds__(THREADS) round_kernel(const __grid_constant__ Product p, int padded) {
    let_next_start();
    wait_for_previous();
    constexpr int apart = D == DTYPE_F4_E2M1 ? 4 : D == DTYPE_F8_E4M3 ? 2 : 1;
    const int n_steps = divide_up(p.w.cols, WIDE_STEP), parts = p.heads * n_steps * 8, i = (int)thread_index();
    const int row = i / parts, stretch = i % parts / 4, head = stretch / 2 / n_steps, q = i % 4;
    if (row >= p.n_rows) return;
    const int first = step_column<D>(stretch / 2 % n_steps) + q / apart * 2 * apart + q % apart;
    const float *x = p.x + (size_t)row * p.x_stride + (size_t)(head * p.x_head);
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int column = first + eight_column<D>(stretch % 2, j / 2) + j % 2 * apart;
        v[j] = column < p.w.cols ? x[column] : 0;
    }
    uint8_t *to = rounded_rows + ((size_t)(stretch / 2) * TERMS * (size_t)padded + (size_t)row) * WIDE_BYTES
                  + ((i % 8) ^ row % 8) * 16;
#pragma unroll
    for (int term = 0; term < TERMS; term++, to += (size_t)padded * WIDE_BYTES) {
        *(uint4 *)to = make_uint4(narrow_pair<D>(v[0], v[1]), narrow_pair<D>(v[2], v[3]), narrow_pair<D>(v[4], v[5]),
                                  narrow_pair<D>(v[6], v[7]));
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = remainder_of<D>(v[j]);
    }
}

/* ---- barriers in shared memory, for which others arrive than those that wait */

static __device__ inline uint32_t in_shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

static __device__ inline void set_barrier(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(in_shared(barrier)), "r"(count) : "memory");
}

static __device__ inline void arrive_at(uint64_t *barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" :: "r"(in_shared(barrier)) : "memory");
}

/* Until round `round` of it is complete. */
static __device__ inline void wait_at(uint64_t *barrier, int round) {
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                     : "=r"(done) : "r"(in_shared(barrier)), "r"(round % 2) : "memory");
}

/* One warp copies a step of x. Its first thread does, and the barrier counts the bytes; before sm_90, all do. from: the first
 * term, with so many bytes to the next. */
template <int TERMS, int N>
static __device__ inline void copy_rounded(uint8_t *to, uint64_t *filled, const uint8_t *from, size_t term_bytes) {
#if __CUDA_ARCH__ >= 900
    if (lane_id()) return;
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}"
                 :: "r"(in_shared(filled)), "r"(TERMS * N * WIDE_BYTES) : "memory");
#pragma unroll
    for (int term = 0; term < TERMS; term++)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(in_shared(to + term * N * WIDE_BYTES)), "l"(from + (size_t)term * term_bytes),
                        "r"(N * WIDE_BYTES), "r"(in_shared(filled)) : "memory");
#else
    for (int i = lane_id() * 16; i < TERMS * N * WIDE_BYTES; i += 32 * 16)
        *(uint4 *)(to + i) = *(const uint4 *)(from + (size_t)(i / (N * WIDE_BYTES)) * term_bytes + i % (N * WIDE_BYTES));
    __syncwarp();
    if (lane_id() == 0) arrive_at(filled);
#endif
}

/* ---- weights */

/* Rows g and g + 8 of a warp's 16, from a thread's first chunk on. */
typedef struct Pair {
    const uint8_t *data;        /* of the first */
    uint32_t apart;             /* bytes */
    const uint8_t *scale[2];    /* e4m3: f32; e2m1: exponents */
} Pair;

/* first: the first row; top: how many rows of other heads come before. Rows past the end repeat the last one. */
template <DType D> static __device__ inline void set_pair(Pair *pair, const Matrix &w, int first, int top) {
    const size_t bytes = weight_bytes(D, (size_t)w.cols);
    const int row[2] = {min(first, w.rows - 1) + top, min(first + 8, w.rows - 1) + top};
    pair->data = w.data + (size_t)row[0] * bytes + lane_id() % 4 * 16;
    pair->apart = (uint32_t)(row[1] - row[0]) * (uint32_t)bytes;
#pragma unroll
    for (int i = 0; i < 2; i++)
        pair->scale[i] = D == DTYPE_F4_E2M1 ? w.exponents + (size_t)(w.first_row + row[i]) * (size_t)w.scale_cols
                                            : (const uint8_t *)row_scales(&w, row[i]);
}

/* Starts to copy a step of weights; zeros where there are none. */
template <DType D, typename T>
static __device__ inline void copy_weights(uint8_t *stage, const Pair &pair, int step, int cols) {
    const uint32_t to = in_shared(stage) + threadIdx.x * T::chunk;
#pragma unroll
    for (int i = 0; i < T::chunks; i++) {
        const int at = step_column<D>(step) + i % (T::chunks / 2) * 32;
        const bool there = at + lane_id() % 4 * chunk_values(D) < cols;
        const uint32_t offset = there ? (uint32_t)weight_bytes(D, (size_t)at) : 0;
        const uint8_t *from = pair.data + (offset + i / (T::chunks / 2) * pair.apart);
        if constexpr (T::chunk == 16)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                         :: "r"(to + i * T::threads * 16), "l"(from), "r"(there ? 16 : 0) : "memory");
        else
            asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;"
                         :: "r"(to + i * T::threads * 8), "l"(from), "r"(there ? 8 : 0) : "memory");
    }
}

static __device__ inline void close_step(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Until all have come but those of the last `ahead` steps. */
static __device__ inline void wait_for_steps(int ahead) {
    static_assert(WIDE_STAGES - 2 <= 2);
    if (ahead == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
    else if (ahead == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/* The scales of a step: of e4m3 its batch's, of e2m1 four threads'. */
template <DType D> static __device__ inline void fetch_pair_scales(uint32_t scale[2], const Pair &pair, int step, int cols) {
    const int column = step_column<D>(step);
    if constexpr (D == DTYPE_F8_E4M3 || D == DTYPE_F4_E2M1)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int offset = D == DTYPE_F4_E2M1 ? column / EXPONENT_BLOCK : column / SCALE_BLOCK * (int)sizeof(float);
            scale[i] = column < cols ? __ldg((const uint32_t *)(pair.scale[i] + offset)) : 0;
        }
}

/* a[s][i]: the fragment of instruction i of stretch s. */
template <DType D, typename T>
static __device__ inline void load_fragments(uint32_t a[2][2][4], const uint8_t *stage, const uint32_t scale[2]) {
    const uint8_t *at = stage + threadIdx.x * T::chunk;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = i / 2, s = i % 2;
        uint4 v;
        if constexpr (D == DTYPE_F4_E2M1) {
            const uint2 chunk = *(const uint2 *)(at + r * T::threads * 8);
            v = widen_eight(s ? chunk.y : chunk.x, e2m1_factor(scale[r]));
        } else if constexpr (D == DTYPE_F8_E4M3) v = widen_part<D>(*(const uint4 *)(at + r * T::threads * 16), s, 0);
        else v = *(const uint4 *)(at + i * T::threads * 16);
        a[s][0][r] = v.x, a[s][0][2 + r] = v.y, a[s][1][r] = v.z, a[s][1][2 + r] = v.w;
    }
}

/* ---- the multiplications of a step */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SUMS(i) "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
#define SUMS_8(i) SUMS(i), SUMS(i + 1), SUMS(i + 2), SUMS(i + 3), SUMS(i + 4), SUMS(i + 5), SUMS(i + 6), SUMS(i + 7)
#define NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
                 "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA(N, TYPE, NAMES, A, B, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, " B ", 1, 1, 1, 0;" \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* sum += A B: 64 rows of weights, 16 values of k, N rows of x. */
template <DType D, int N> static __device__ inline void multiply_tile(float sum[N / 8][4], const uint32_t a[4], uint64_t b) {
    static_assert(N == 64 || N == 128);
    if constexpr (D == DTYPE_F16 && N == 64) WGMMA("64", "f16", NAMES_32, "%32, %33, %34, %35", "%36", SUMS_8(0));
    else if constexpr (D == DTYPE_F16) WGMMA("128", "f16", NAMES_64, "%64, %65, %66, %67", "%68", SUMS_8(0), SUMS_8(8));
    else if constexpr (N == 64) WGMMA("64", "bf16", NAMES_32, "%32, %33, %34, %35", "%36", SUMS_8(0));
    else WGMMA("128", "bf16", NAMES_64, "%64, %65, %66, %67", "%68", SUMS_8(0), SUMS_8(8));
}

template <DType D, int TERMS, int N>
static __device__ inline void multiply_step(float sum[N / 8][4], uint32_t a[2][2][4], const uint8_t *rounded) {
    const uint64_t layout = 1ull << 62 | (uint64_t)(8 * WIDE_BYTES >> 4) << 32 | 1 << 16;   /* rows of 128 bytes, exchanged */
    const uint32_t low = in_shared(rounded) >> 4;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4 * TERMS; i++) {
        const int s = i / (2 * TERMS), term = i / 2 % TERMS, instruction = i % 2;
        multiply_tile<D, N>(sum, a[s][instruction],
                            layout | (low + (uint32_t)(term * N * WIDE_BYTES + (s * 2 + instruction) * 32 >> 4)));
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(sum[i / 4][i % 4]) :: "memory");     /* not used before here */
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i / 8][i / 4 % 2][i % 4]) :: "memory");
}
#else
template <DType D, int TERMS, int N>
static __device__ inline void multiply_step(float sum[N / 8][4], const uint32_t a[2][2][4], const uint8_t *rounded) {
    const int g = lane_id() / 4;
#pragma unroll
    for (int i = 0; i < 4 * TERMS; i++) {
        const int s = i / (2 * TERMS), term = i / 2 % TERMS, instruction = i % 2, part = s * 4 + instruction * 2;
        const uint8_t *row = rounded + (term * N + g) * WIDE_BYTES + lane_id() % 4 * 4;
        const uint32_t *w = a[s][instruction];
#pragma unroll
        for (int tile = 0; tile < N / 8; tile++, row += 8 * WIDE_BYTES)
            multiply_fragment<D>(sum[tile], w[0], w[1], w[2], w[3], *(const uint32_t *)(row + (part ^ g) * 16),
                                 *(const uint32_t *)(row + (part + 1 ^ g) * 16));
    }
}
#endif

/* ---- sums: sum[tile][part] of a thread is of these rows and columns of the block's tile */

static __device__ inline int sum_row(int part) { return warp_id() * 16 + lane_id() / 4 + part / 2 * 8; }
static __device__ inline int sum_column(int tile, int part) { return tile * 8 + lane_id() % 4 * 2 + part % 2; }

/* A block that has all segments adds each one's sums to y at once: every y is of one thread. y: of the tile, which has so many
 * rows and columns. */
template <int N>
static __device__ void add_segment(float *y, size_t y_stride, const float sum[N / 8][4], int rows, int columns, bool first) {
    asm volatile("" : "+r"(rows), "+r"(columns));                   /* compared here, not in registers before the loop */
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int row = sum_row(i % 4), column = sum_column(i / 4, i % 4);
        if (row >= rows || column >= columns) continue;
        float *at = y + (size_t)column * y_stride + (size_t)row;
        *at = first ? sum[i / 4][i % 4] : *at + sum[i / 4][i % 4];
    }
}

/* Otherwise they wait in shared memory, [N, stride]. */
template <int N> static __device__ void put_segment(float *slot, int stride, const float sum[N / 8][4]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) slot[sum_column(i / 4, i % 4) * stride + sum_row(i % 4)] = sum[i / 4][i % 4];
}

/* and are added up in the end, `share` from each block of the cluster; four rows and four segments at a time. */
template <typename T>
static __device__ void add_slots(float *y, size_t y_stride, const float *sums, int split, int share, int rows, int columns) {
    const int power = power_of(share), segments = split << power;
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < T::rows / 4 * columns; i += split * (int)blockDim.x) {
        const int row = i % (T::rows / 4) * 4, column = i / (T::rows / 4);
        const float *at = sums + column * T::stride + row;
        float4 sum = {}, value[4];
#pragma unroll 1
        for (int begin = 0; begin < segments; begin += 4) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int segment = min(begin + j, segments - 1);
                load_from_block(&value[j], at + (segment & share - 1) * T::slot, segment >> power);
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (begin + j < segments)
                    sum = make_float4(sum.x + value[j].x, sum.y + value[j].y, sum.z + value[j].z, sum.w + value[j].w);
        }
        if (row < rows) store_four(y + (size_t)column * y_stride + (size_t)row, sum, rows - row);
    }
}

/* ---- the kernel */

/* What a block has to do, and its shared memory. */
typedef struct Job {
    int head, first_row, first_column;              /* its tile's */
    int n_steps, segments, first, end;              /* of the matrix; the block's segments */
    const uint8_t *x;                               /* rounded, of the tile; term_bytes to the next term or step */
    size_t term_bytes;
    uint8_t *rounded, *ring;                        /* steps of x and of weights */
    Stages *stages;
    float *sums;                                    /* of segments, the last of which takes the place of the ring */
    float *y;
} Job;

template <DType D, int N, typename T>
static __device__ inline void finish_segment(float sum[N / 8][4], const Wide &wide, const Job &job, int segment) {
#pragma unroll
    for (int i = 0; D == DTYPE_F4_E2M1 && i < N / 2; i++) sum[i / 4][i % 4] *= 0x1p32f;
    if (wide.split == 1)
        add_segment<N>(job.y, wide.p.y_stride, sum, wide.p.w.rows - job.first_row, wide.p.n_rows - job.first_column,
                       segment == 0);
    else {
        if (segment + 1 == job.end) __syncthreads();                /* nobody needs the ring any more */
        put_segment<N>(job.sums + (segment - job.first) * T::slot, T::stride, sum);
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i / 4][i % 4] = 0;
}

/* Step `step` of x into that stage. */
template <int TERMS, int N, typename T> static __device__ inline void copy_x(const Job &job, int stage, int step) {
    if (warp_id() == 0)
        copy_rounded<TERMS, N>(job.rounded + stage * T::rounded, &job.stages->filled[stage],
                               job.x + (size_t)(step * TERMS) * job.term_bytes, job.term_bytes);
}

/* Fills all stages but one; weights, while the kernel before this one may be running. Returns the step after them. */
template <DType D, int TERMS, int N, typename T>
static __device__ inline Walk start_copies(const Job &job, const Pair &pair, const Walk &start, int n, int cols) {
    Walk walk = start;
    for (int i = 0; i < n; i++, close_step())
        if (walk.segment < job.end) {
            copy_weights<D, T>(job.ring + i * T::stage, pair, walk.step, cols);
            next_step<D>(&walk, job.segments, job.n_steps);
        }
    wait_for_previous();
    walk = start;
    for (int i = 0; i < n && walk.segment < job.end; i++, next_step<D>(&walk, job.segments, job.n_steps))
        copy_x<TERMS, N, T>(job, i, walk.step);
    return walk;
}

/* A batch of e4m3 weights has one scale. */
template <int N> static __device__ inline void add_batch(float total[N / 8][4], float sum[N / 8][4], const uint32_t scale[2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        total[i / 4][i % 4] = fmaf(__uint_as_float(scale[i % 4 / 2]), sum[i / 4][i % 4], total[i / 4][i % 4]);
        sum[i / 4][i % 4] = 0;
    }
}

/* A stage, and how often it has been used before. */
typedef struct Turn { int stage, round; } Turn;

static __device__ inline void next_turn(Turn *turn, int stages) {
    if (++turn->stage == stages) turn->stage = 0, turn->round++;
}

/* All warps walk through the steps of the block's segments; what they copy is for as many steps ahead as there are stages, less
 * one. */
template <DType D, int TERMS, int N, typename T> static __device__ void multiply_segments(const Wide &wide, const Job &job) {
    constexpr bool scaled = D == DTYPE_F8_E4M3;
    constexpr int steps = batch_values(D) / WIDE_STEP;
    const int cols = wide.p.w.cols, stages = wide.stages;
    Pair pair;
    set_pair<D>(&pair, wide.p.w, job.first_row + sum_row(0), job.head * wide.p.head_rows);
    Walk now = {job.first, 0, job.first * steps}, ahead = start_copies<D, TERMS, N, T>(job, pair, now, stages - 1, cols);
    Turn get = {0, 0}, put = {stages - 1, 0};
    uint32_t a[2][2][4], scale[2] = {}, next_scale[2] = {};
    float sum[N / 8][4] = {}, total[scaled ? N / 8 : 1][4] = {};
    fetch_pair_scales<D>(scale, pair, now.step, cols);
#pragma unroll 1
    while (now.segment < job.end) {
        Walk next = now;
        next_step<D>(&next, job.segments, job.n_steps);
        const bool more = ahead.segment < job.end, ends = next.segment != now.segment;
        if (next.segment < job.end) fetch_pair_scales<D>(next_scale, pair, next.step, cols);
        wait_for_steps(stages - 2);
        load_fragments<D, T>(a, job.ring + get.stage * T::stage, scale);
        if (more) copy_weights<D, T>(job.ring + put.stage * T::stage, pair, ahead.step, cols);
        close_step();
        wait_at(&job.stages->filled[get.stage], get.round);
        multiply_step<D, TERMS, N>(sum, a, job.rounded + get.stage * T::rounded);
        __syncwarp();
        if (lane_id() == 0) arrive_at(&job.stages->used[get.stage]);
        if (more) {                                 /* in the stage of the step before this one */
            if (warp_id() == 0 && put.round) wait_at(&job.stages->used[put.stage], put.round - 1);
            copy_x<TERMS, N, T>(job, put.stage, ahead.step);
            next_step<D>(&ahead, job.segments, job.n_steps);
        }
        if constexpr (scaled) {
            if (ends || next.at % steps == 0) add_batch<N>(total, sum, scale);
            if (ends) finish_segment<D, N, T>(total, wide, job, now.segment);
        } else if (ends) finish_segment<D, N, T>(sum, wide, job, now.segment);
        next_turn(&get, stages);
        next_turn(&put, stages);
        now = next;
        scale[0] = next_scale[0], scale[1] = next_scale[1];
    }
}

/* Grid: blocks that share a tile's segments, tiles of rows of x, tiles of rows of weights of each head. */
template <DType D, int TERMS, int N, int GROUPS>
static __global__ void __launch_bounds__(GROUPS * WIDE_THREADS, 4 / GROUPS) wide_kernel(const __grid_constant__ Wide wide) {
    extern __shared__ __align__(1024) uint8_t wide_shared[];
    typedef WideTile<D, TERMS, N, GROUPS> T;
    const Product &p = wide.p;
    const int segments = p.cut.cluster * p.cut.along, share = segments / wide.split, tiles = divide_up(p.w.rows, T::rows);
    Job job = {};
    job.head = p.heads == 1 ? 0 : (int)blockIdx.z / tiles;
    job.first_row = ((int)blockIdx.z - job.head * tiles) * T::rows;
    job.first_column = (int)blockIdx.y * N;
    job.n_steps = divide_up(p.w.cols, WIDE_STEP);
    job.segments = segments;
    job.first = (int)blockIdx.x * share;
    job.end = job.first + share;
    job.term_bytes = (size_t)wide.padded * WIDE_BYTES;
    job.x = rounded_rows + (size_t)(job.head * job.n_steps * TERMS) * job.term_bytes + (size_t)job.first_column * WIDE_BYTES;
    job.rounded = wide_shared;
    job.stages = (Stages *)(wide_shared + wide.stages * T::rounded);
    job.sums = (float *)(job.stages + 1);
    job.ring = (uint8_t *)(job.sums + (wide.split > 1 ? share - 1 : 0) * T::slot);
    job.y = p.y + (size_t)job.first_column * p.y_stride + (size_t)(job.head * p.y_head + job.first_row);
    let_next_start();
    if ((int)threadIdx.x < wide.stages) {
        set_barrier(&job.stages->filled[threadIdx.x], 1);
        set_barrier(&job.stages->used[threadIdx.x], T::threads / 32);
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");    /* copies see the barriers */
#endif
    __syncthreads();
    multiply_segments<D, TERMS, N, T>(wide, job);
    if (wide.split == 1) return;
    cluster_barrier();
    add_slots<T>(job.y, p.y_stride, job.sums, wide.split, share, p.w.rows - job.first_row, min(N, p.n_rows - job.first_column));
    cluster_barrier();                              /* the others may still be reading this block's sums */
}

/* ---- the choice of a tile */

typedef struct Choice {
    Wide wide;
    double cost;
    void (*launch)(const Wide &);
} Choice;

template <DType D, int TERMS, int N, int GROUPS> static size_t tile_shared(const Wide &wide) {
    typedef WideTile<D, TERMS, N, GROUPS> T;
    const int share = wide.p.cut.cluster * wide.p.cut.along / wide.split, slot = 4 * T::slot, ring = wide.stages * T::stage;
    const int sums = wide.split == 1 ? ring : (share - 1) * slot + (ring > slot ? ring : slot);
    return (size_t)wide.stages * T::rounded + sizeof(Stages) + (size_t)sums;
}

template <DType D, int TERMS, int N, int GROUPS> static void launch_wide(const Wide &wide) {
    typedef WideTile<D, TERMS, N, GROUPS> T;
    const Product &p = wide.p;
    const size_t shared = tile_shared<D, TERMS, N, GROUPS>(wide), eights = (size_t)(p.heads * divide_up(p.w.cols, WIDE_STEP)) * 8;
    launch_early(round_kernel<D, TERMS>, blocks_for((size_t)p.n_rows * eights), THREADS, 0, 1, p, wide.padded);
    allow_shared(wide_kernel<D, TERMS, N, GROUPS>, shared);
    launch_early(wide_kernel<D, TERMS, N, GROUPS>,
                 dim3((unsigned)wide.split, (unsigned)divide_up(p.n_rows, N), (unsigned)(divide_up(p.w.rows, T::rows) * p.heads)),
                 T::threads, shared, wide.split, wide);
}

/* Takes that tile if it is the best so far, by about the microseconds that it takes on an H200: a step keeps a multiprocessor
 * busy for `work`, and takes `least`. */
template <DType D, int TERMS, int N, int GROUPS> static void consider_tile(Choice *best, const Product &p, double work) {
    const int segments = p.cut.cluster * p.cut.along, most = gpu.major == 9 ? MAX_CLUSTER : 1, beside = 4 / GROUPS;
    const double least = 0.75;
    for (int split = 1; split <= most && split <= segments; split *= 2) {
        Wide wide = {.p = p, .split = split, .stages = WIDE_STAGES, .padded = divide_up(p.n_rows, N) * N};
        size_t shared;
        while ((shared = tile_shared<D, TERMS, N, GROUPS>(wide)) > gpu.shared_per_block / (beside > 1 ? 2 : 1) && wide.stages > 2)
            wide.stages--;
        if (shared > gpu.shared_per_block) continue;
        const int fit = (int)(gpu.shared_per_block / shared), slots = gpu.multiprocessors * (fit < beside ? fit : beside);
        const int blocks = divide_up(p.w.rows, GROUPS * WIDE_ROWS) * p.heads * divide_up(p.n_rows, N) * split;
        const double rest = divide_up(blocks % slots, gpu.multiprocessors), all = slots / gpu.multiprocessors;
        const double step = blocks / slots * fmax(all * work, least) + (rest ? fmax(rest * work, least) : 0);
        const double adding = split > 1 ? 1 + 0.1 * split : 4.0 * (segments - 1) * divide_up(blocks, slots);
        const double cost = divide_up(divide_up(p.w.cols, WIDE_STEP), split) * step + adding;
        if (!best->launch || cost < best->cost) *best = {wide, cost, launch_wide<D, TERMS, N, GROUPS>};
    }
}

static size_t rounded_row(const Product &product, int terms) {
    return (size_t)(product.heads * divide_up(product.w.cols, WIDE_STEP) * terms) * WIDE_BYTES;
}

/* As many rows at a time as there is room for when they are rounded. */
template <DType D, int TERMS> static void multiply_many(Product product) {
    const int all = product.n_rows, most = (int)(ROUNDED_BYTES / rounded_row(product, TERMS) / 128 * 128);
    for (int first = 0; first < all; first += most) {
        Choice best = {};
        product.n_rows = all - first < most ? all - first : most;
        consider_tile<D, TERMS, 64, 1>(&best, product, 0.32);
        consider_tile<D, TERMS, 64, 2>(&best, product, 0.58);
        if constexpr (chunk_values(D) == 8) consider_tile<D, TERMS, 128, 4>(&best, product, 1.87);
        best.launch(best.wide);
        product.x += (size_t)most * product.x_stride;
        product.y += (size_t)most * product.y_stride;
    }
}

/* Whether rows are worth the rounding and the second launch, and there is room for 128 of them. */
static bool are_many(const Product &product, int terms) {
    const double products = (double)product.n_rows * product.w.rows * product.w.cols * product.heads;
    if (rounded_row(product, terms) * 128 > ROUNDED_BYTES) return false;
    return product.n_rows > 16 && products >= 1 << 27;
}

/* ---- launches */

/* Eight rows of x for each tile, as few tiles as hold all rows, if their shared memory is there. */
template <DType D, int TERMS> static void launch_tiles(Product product) {
    product.cut = choose_cut(product.w.rows, product.w.cols, product.heads, D, product.n_rows);
    if constexpr (D != EXACT) {
        if (are_many(product, TERMS)) return multiply_many<D, TERMS>(product);
        if (product.n_rows > 16 && product_shared(D, product.cut, 32, TERMS) <= (int)gpu.shared_per_block)
            return launch_product<D, 4, TERMS>(product);
        if (product.n_rows > 8 && product_shared(D, product.cut, 16, TERMS) <= (int)gpu.shared_per_block)
            return launch_product<D, 2, TERMS>(product);
    }
    launch_product<D, 1, TERMS>(product);
}

/* Whether rows of that type begin at multiples of 16 bytes, in a tensor that does. */
static bool rows_aligned(DType dtype, int cols) {
    if (dtype == DTYPE_F4_E2M1) return cols % batch_values(DTYPE_F4_E2M1) == 0;    /* and eight scales at multiples of 8 bytes */
    return dtype != DTYPE_F32 && weight_bytes(dtype, (size_t)cols) % 16 == 0;
}

static bool floats_aligned(const float *x, size_t stride) { return (uintptr_t)x % 16 == 0 && stride % 4 == 0; }

/* The terms of x depend on the matrix alone. Two cost 16-bit weights next to nothing while memory is what a product waits for.
 * Widening e4m3 takes so many instructions that they would show: it gets them where the matrix is small, as those are whose
 * results are compared with each other, the indexer's and the latent projections'. e2m1 is the experts' type. */
enum { TWO_TERMS_MOST = 16 << 20 };

static void multiply(Product product) {
    const Matrix *w = &product.w;
    if (product.n_rows <= 0 || w->rows <= 0) return;
    product.aligned = floats_aligned(product.x, product.x_stride) && product.x_head % 4 == 0;
    if (!rows_aligned(w->dtype, w->cols) || (uintptr_t)w->data % 16 || (uintptr_t)w->exponents % 8)
        launch_tiles<EXACT, 1>(product);
    else if (w->dtype == DTYPE_BF16) launch_tiles<DTYPE_BF16, 2>(product);
    else if (w->dtype == DTYPE_F16) launch_tiles<DTYPE_F16, 2>(product);
    else if (w->dtype == DTYPE_F4_E2M1) launch_tiles<DTYPE_F4_E2M1, 1>(product);
    else if ((size_t)w->rows * (size_t)w->cols * (size_t)product.heads <= TWO_TERMS_MOST) launch_tiles<DTYPE_F8_E4M3, 2>(product);
    else launch_tiles<DTYPE_F8_E4M3, 1>(product);
}

static void linear(float *y, size_t y_stride, const float *x, size_t x_stride, int n_rows, const Matrix *w) {
    multiply({.w = *w, .x = x, .y = y, .x_stride = x_stride, .y_stride = y_stride, .n_rows = n_rows, .heads = 1, .head_rows = 0,
              .x_head = 0, .y_head = 0, .aligned = false, .cut = {}});
}

/* y[r, h] = W_UV[h] z[r, h]: a small matrix for each head, all in one launch. */
static void expand_value(float *y, const float *z, int n_rows, const Matrix *kv_b, const Config *config) {
    const int heads = config->num_attention_heads, nope = config->qk_nope_head_dim, v = config->v_head_dim,
              lora = config->kv_lora_rank;
    Matrix w = *kv_b;
    w.data += (size_t)nope * weight_bytes(w.dtype, (size_t)w.cols);
    w.first_row += nope;
    w.rows = v;
    multiply({.w = w, .x = z, .y = y, .x_stride = (size_t)heads * (size_t)lora, .y_stride = (size_t)heads * (size_t)v,
              .n_rows = n_rows, .heads = heads, .head_rows = nope + v, .x_head = lora, .y_head = v, .aligned = false, .cut = {}});
}

/* ---- absorb_query: the same matrices from their other side. A thread takes four columns, an eighth of the rows and eight rows
 * of q, in f32: few multiplications for each weight, which is read once for eight rows. What a warp reads of a row is 128
 * values, so that there are blocks enough for all of the GPU, and each thread's rows are soon on their way. */

enum {
    ABSORB_LANES = 32, ABSORB_PARTS = 8, ABSORB_THREADS = ABSORB_LANES * ABSORB_PARTS,
    ABSORB_COLUMNS = 4 * ABSORB_LANES, ABSORB_ROWS = 8,
};
static_assert((int)ABSORB_PARTS == (int)ABSORB_ROWS, "in the end each part adds up one row of q");

/* Four neighbouring weights of a row as f32. EXACT: one by one, zeros past the last of `count`. */
template <DType D> static __device__ inline float4 load_four(const uint8_t *data, size_t i, int count, DType dtype) {
    if constexpr (D == DTYPE_F8_E4M3) {
        const uint2 pairs = widen_four(__ldg((const uint32_t *)(data + i)));
        return make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.y << 16),
                           __uint_as_float(pairs.x & 0xffff0000), __uint_as_float(pairs.y & 0xffff0000));
    } else if constexpr (D == DTYPE_BF16) {
        const uint2 pairs = __ldg((const uint2 *)(data + 2 * i));
        return make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000),
                           __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000));
    } else
        return make_float4(count > 0 ? load_stored(data, i, dtype) : 0, count > 1 ? load_stored(data, i + 1, dtype) : 0,
                           count > 2 ? load_stored(data, i + 2, dtype) : 0, count > 3 ? load_stored(data, i + 3, dtype) : 0);
}

struct Absorb {
    Matrix kv_b;
    const float *q;
    float *y;
    int n_rows, heads, nope, rope, v;
};

/* Rows [first, first + rows) of q for one head: `nope` values, transposed, to shared memory, and, by a head's first block, the
 * others to the end of y. Idle rows repeat the last one. */
static __device__ void stage_query(float *q_shared, const Absorb &a, int head, int first, int rows) {
    const size_t q_width = (size_t)(a.nope + a.rope), y_width = (size_t)(a.kv_b.cols + a.rope);
    for (int r = 0; r < ABSORB_ROWS; r++) {
        const size_t vector = (size_t)(first + min(r, rows - 1)) * (size_t)a.heads + (size_t)head;
        for (int i = (int)threadIdx.x; i < a.nope; i += ABSORB_THREADS)
            q_shared[i * ABSORB_ROWS + r] = a.q[vector * q_width + (size_t)i];
        for (int i = (int)threadIdx.x; i < a.rope && r < rows && blockIdx.x == 0; i += ABSORB_THREADS)
            a.y[vector * y_width + (size_t)(a.kv_b.cols + i)] = a.q[vector * q_width + (size_t)(a.nope + i)];
    }
}

/* Grid: groups of columns, heads, groups of rows of q. Shared: q transposed, [nope, ABSORB_ROWS]. */
template <DType D>
static __global__ void __launch_bounds__(ABSORB_THREADS, 2) absorb_kernel(const __grid_constant__ Absorb a) {
    extern __shared__ float4 q_shared[];
    __shared__ float4 sums[ABSORB_PARTS][ABSORB_ROWS][ABSORB_LANES];
    let_next_start();
    wait_for_previous();
    const int head = (int)blockIdx.y, first = (int)blockIdx.z * ABSORB_ROWS, rows = min(ABSORB_ROWS, a.n_rows - first);
    const int lane = (int)threadIdx.x % ABSORB_LANES, part = (int)threadIdx.x / ABSORB_LANES, lora = a.kv_b.cols;
    stage_query((float *)q_shared, a, head, first, rows);
    __syncthreads();

    const int column = (int)blockIdx.x * ABSORB_COLUMNS + lane * 4, count = lora - column, top = head * (a.nope + a.v);
    const int share = divide_up(a.nope, ABSORB_PARTS), end = min(a.nope, (part + 1) * share);
    float4 total[ABSORB_ROWS] = {};
#pragma unroll 8
    for (int i = part * share; i < end && count > 0; i++) {
        float4 w = load_four<D>(a.kv_b.data, (size_t)(top + i) * (size_t)lora + (size_t)column, count, a.kv_b.dtype);
        const float *scales = row_scales(&a.kv_b, top + i), scale = scales ? scales[column / SCALE_BLOCK] : 1;
        w = make_float4(w.x * scale, w.y * scale, w.z * scale, w.w * scale);
        const float4 low = q_shared[2 * i], high = q_shared[2 * i + 1];
        const float q[ABSORB_ROWS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int r = 0; r < ABSORB_ROWS; r++)
            total[r] = make_float4(fmaf(w.x, q[r], total[r].x), fmaf(w.y, q[r], total[r].y), fmaf(w.z, q[r], total[r].z),
                                   fmaf(w.w, q[r], total[r].w));
    }
#pragma unroll
    for (int r = 0; r < ABSORB_ROWS; r++) sums[part][r][lane] = total[r];
    __syncthreads();
    if (part >= rows) return;                       /* from here on, a part is a row of q */
    float4 sum = sums[0][part][lane];
    for (int p = 1; p < ABSORB_PARTS; p++) {
        const float4 other = sums[p][part][lane];
        sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
    }
    store_four(a.y + ((size_t)(first + part) * (size_t)a.heads + (size_t)head) * (size_t)(lora + a.rope)
                   + (size_t)column, sum, count);
}

template <DType D> static void launch_absorb(const Absorb &absorb) {
    const dim3 grid((unsigned)divide_up(absorb.kv_b.cols, ABSORB_COLUMNS), (unsigned)absorb.heads,
                    (unsigned)divide_up(absorb.n_rows, ABSORB_ROWS));
    const size_t shared = (size_t)absorb.nope * ABSORB_ROWS * sizeof(float);
    CUDA(cudaFuncSetAttribute(absorb_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    launch_early(absorb_kernel<D>, grid, ABSORB_THREADS, shared, 1, absorb);
}

static void absorb_query(float *q_absorbed, const float *q, int n_rows, const Matrix *kv_b, const Config *config) {
    if (n_rows <= 0) return;
    const Absorb absorb = {.kv_b = *kv_b, .q = q, .y = q_absorbed, .n_rows = n_rows, .heads = config->num_attention_heads,
                           .nope = config->qk_nope_head_dim, .rope = config->qk_rope_head_dim, .v = config->v_head_dim};
    const bool aligned = rows_aligned(kv_b->dtype, kv_b->cols) && (uintptr_t)kv_b->data % 16 == 0;
    if (aligned && kv_b->dtype == DTYPE_BF16) launch_absorb<DTYPE_BF16>(absorb);
    else if (aligned && kv_b->dtype == DTYPE_F8_E4M3) launch_absorb<DTYPE_F8_E4M3>(absorb);
    else launch_absorb<EXACT>(absorb);
}

/* =====================================================================================================================
 * Mixture of experts (DeepSeek-V3, 2.1.2)
 *
 *     route -> route_kernel -> limit_groups, take_best
 *     experts -> experts_kernel -> list_works -> multiply_work (load_rows, fetch_tile, multiply_tile) -> add_gate_up, add_down
 *
 * Owns: the router, and the experts' products. An expert's weights are read once for up to eight rows that chose it, and the host never
 * learns who was chosen. All of a layer's experts run in one launch of as many blocks as there are multiprocessors, the shared one
 * too: to all rows it is one more, the first, with weight 1. Blocks share out the strips of gate and up of all experts that were chosen,
 * wait for each other, and share out the strips of down. A strip of down is one block's for all experts, so a row's experts are
 * added in ascending order.
 *
 * Each warp has a ring of tiles in shared memory, which it fills some tiles ahead of what it multiplies: from strip to strip, from expert
 * to expert, and from the first phase into the second, so that memory is busy while sums are added and while blocks wait for each
 * other; and the shared expert's are on their way before the router has ended. The warps of a team each sum up some of the columns of
 * a strip, and their sums are added in order. How many they are depends on the shape alone, so a row's sums do too.
 */

/* A launch whose blocks may come before the kernel before it has ended, where that lets them: it must wait_for_previous(). */
template <typename Arguments>
static void launch_early(void (*kernel)(Arguments), int blocks, int threads, size_t shared, const Arguments &arguments) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3((unsigned)blocks);
    launch.blockDim = dim3((unsigned)threads);
    launch.dynamicSmemBytes = shared;
    launch.stream = gpu.stream;
    launch.attrs = &attribute;
    launch.numAttrs = gpu.major >= 9;
    allow_shared(kernel, shared);
    CUDA(cudaLaunchKernelEx(&launch, kernel, arguments));
}

/* Integers in the order of the floats. */
static __device__ inline uint32_t in_order(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

/* A lane's best of n values in shared memory, of which it looks at every 32nd; equal values: the lower index. */
struct Best { uint32_t value; int at; };

static __device__ inline Best find_best(const float *values, int n) {
    Best best = {.value = 0, .at = INT_MAX};
#pragma unroll 8
    for (int i = lane_id(); i < n; i += 32) {
        const uint32_t value = in_order(values[i]);
        if (value > best.value) best = {.value = value, .at = i};
    }
    return best;
}

/* The best of all lanes' values, which is taken out by setting it to -inf. */
static __device__ inline int take_best(Best *best, float *values, int n) {
    const uint32_t value = __reduce_max_sync(~0u, best->value);
    const int at = __reduce_min_sync(~0u, best->value == value ? best->at : INT_MAX);
    if (best->at == at) {
        values[at] = -INFINITY;
        *best = find_best(values, n);
    }
    return at;
}

/* Keeps the topk_group groups whose two best choices add up highest; experts of the others become -inf, not 0, since a biased
 * score may be negative. group: [groups] scratch, where the groups kept are -inf at the end. */
static __device__ void limit_groups(float *choice, float *group, int experts, int groups, int kept) {
    const int size = experts / groups;
    for (int g = lane_id(); g < groups; g += 32) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; e++) {
            if (choice[e] > first) second = first, first = choice[e];
            else if (choice[e] > second) second = choice[e];
        }
        group[g] = first + second;
    }
    __syncwarp();
    uint32_t *marks = (uint32_t *)(group + groups);
    for (int g = lane_id(); g < groups; g += 32) marks[g] = 0;
    __syncwarp();
    Best best = find_best(group, groups);
    for (int i = 0; i < kept; i++) {
        const int g = take_best(&best, group, groups);
        if (lane_id() == 0) marks[g] = 1;
    }
    __syncwarp();
    for (int e = lane_id(); e < experts; e += 32)
        if (!marks[e / size]) choice[e] = -INFINITY;
    __syncwarp();
}

struct Router {
    int *picks;
    float *weights;
    const float *logits, *bias;
    int experts, per_token, groups, kept;
    float factor;
    bool normalise;
};

/* A warp takes a row. */
static __global__ void route_kernel(const Router router) {
    extern __shared__ float shared_scores[];
    float *score = shared_scores, *choice = score + router.experts, total = 0;
    int *picks = router.picks + (size_t)blockIdx.x * (size_t)router.per_token;
    float *weights = router.weights + (size_t)blockIdx.x * (size_t)router.per_token;
    let_next_start();
    wait_for_previous();
#pragma unroll 8
    for (int e = lane_id(); e < router.experts; e += 32) {
        score[e] = 1 / (1 + expf(-router.logits[(size_t)blockIdx.x * (size_t)router.experts + (size_t)e]));
        choice[e] = score[e] + router.bias[e];      /* the bias balances the load: it chooses, it does not weigh */
        if (isnan(choice[e])) choice[e] = INFINITY, score[e] = NAN;         /* chosen, so that it shows */
        if (choice[e] < -1e30f) choice[e] = -1e30f; /* -inf marks what is out of the race */
    }
    __syncwarp();
    if (router.groups > 1) limit_groups(choice, choice + router.experts, router.experts, router.groups, router.kept);
    Best best = find_best(choice, router.experts);
    for (int i = 0; i < router.per_token; i++) {
        const int pick = take_best(&best, choice, router.experts);
        total += score[pick];
        if (lane_id() == 0) picks[i] = pick, weights[i] = score[pick];
    }
    __syncwarp();
    for (int i = lane_id(); i < router.per_token; i += 32)
        weights[i] *= (router.normalise ? 1 / (total + 1e-20f) : 1) * router.factor;
}

static void route(int *picks, float *weights, const float *logits, const float *bias, int n_rows, const Config *config) {
    if (n_rows <= 0) return;
    const Router router = {.picks = picks, .weights = weights, .logits = logits, .bias = bias,
                           .experts = config->n_routed_experts, .per_token = config->num_experts_per_tok,
                           .groups = config->n_group, .kept = config->topk_group, .factor = config->routed_scaling_factor,
                           .normalise = config->norm_topk_prob};
    const size_t shared = 2 * ((size_t)router.experts + (size_t)router.groups) * sizeof(float);
    launch_early(route_kernel, n_rows, 32, shared, router);
}

/* ---- experts: one launch, whose blocks all stay until its end
 *
 *     experts -> experts_kernel -> list_works -> multiply_work (fetch_tile, load_rows, multiply_tile) -> add_gate_up, add_down
 */

enum {
    EXPERT_WARPS = 16, EXPERT_THREADS = 32 * EXPERT_WARPS,
    CHUNK = 256,                /* columns that a warp multiplies one after the other; the segments take chunks in turns */
    MAX_SEGMENT_BITS = 3,
    TILE_ROWS = 16,             /* of weights in a tile: of one matrix, or eight each of gate and up */
    TILE_BYTES = 128,           /* of each of its rows */
    TILE_COLUMNS = 8,           /* rows of x that meet a tile */
    MIN_STAGES = 3, MAX_STAGES = 6,                 /* tiles that a warp has on their way; two where shared memory is small */
    RUN = 4,                    /* units after which the next columns of the same expert have their turn, while L2 has its weights */
    MAX_SUMS = 192,             /* columns of sums, of one segment, that wait in shared memory to be added up */
    MAX_LISTED = 16 * MAX_PASS_ROWS, MAX_MASKS = 64 << 10,      /* of a launch: picks; bytes of masks */
    NOBODY = 0xffff,
};
enum { GATE, UP, DOWN };        /* an expert's matrices; the first and the last also name the phases */

struct Experts {
    const Matrix *table[3];     /* [experts], on the device */
    Matrix shared[3];           /* of the shared expert, where it runs with the others */
    const int *picks;
    const float *x, *weights;
    void *gated;                /* [rows * slots, inter] */
    float *y;
    int n_rows, experts, per_token, hidden, inter;
    int slots;                  /* picks of a row; with the shared expert, which then is the last */
    bool aligned;               /* x allows loads of 16 bytes */
    DType dtype[2];             /* how the experts' weights are multiplied, and the shared one's */
    int segment_bits[3];        /* 2^bits warps share the columns of a strip, in either phase: a team */
    int columns;                /* rows of x that meet a tile at a time */
    int most_chosen, stages, slot_bytes, x_bytes;   /* what lay_out_experts() has found room for */
};

/* An expert that was chosen. Scales: of its row 0. */
struct Chosen { const uint8_t *data[3]; const void *scale[3]; };

/* Up to `columns` rows that chose the same expert: order[begin] to order[begin of the next]. */
struct Work { uint16_t chosen, begin; };

/* A block's shared memory. */
struct ExpertMemory {
    uint8_t *ring, *x;
    float *sums;                /* [column, segment, TILE_ROWS] */
    int *strip, *pick;          /* [column] whose sums these are; a pick is row << 16 | number */
    uint8_t *next, *leads;      /* [column]: see link_columns() */
    Chosen *chosen;
    Work *works;
    int *order;                 /* [picks] by expert */
};

/* What a block does. The first phase is a list of units, works * units of them, dealt out in runs: a unit is a strip for each of the
 * block's teams of warps. In the second phase a block has every strip that it has for all works, and its teams take pairs of work and
 * strip in turns. A round is a unit, or a pair for each team. The shared expert's units come first: they are known beforehand. */
struct Rounds { int shared, gate, down, units, strips, works, shared_works, first_shared, first_routed; };

/* A team's place in them. work == works: nothing to do. */
struct Cursor { int round, work, unit; };

/* Values of a row in a tile. */
static __host__ __device__ inline int tile_values(DType D) { return D == DTYPE_F4_E2M1 ? 256 : D == DTYPE_F8_E4M3 ? 128 : 64; }

/* Bytes of the scales of a row in a tile. */
static __host__ __device__ inline int scale_bytes(DType D) { return D == DTYPE_F4_E2M1 ? 8 : D == DTYPE_F8_E4M3 ? 4 : 0; }

static __device__ inline int row_of(int pick) { return pick >> 16; }
static __device__ inline int number_of(int pick) { return pick & 0xffff; }
static __device__ inline bool is_shared(const Experts &e, int pick) { return number_of(pick) == e.per_token; }
static __device__ inline size_t gated_row(const Experts &e, int pick) {
    return (size_t)(row_of(pick) * e.slots + number_of(pick)) * (size_t)e.inter;
}
static __device__ inline DType type_of(const Experts &e, const Rounds &rounds, int work) {
    return e.dtype[work < rounds.shared_works];
}
static __device__ inline int count_of(const ExpertMemory &m, int work) { return m.works[work + 1].begin - m.works[work].begin; }
static __device__ inline int bits_of(const Experts &e, bool down) { return e.segment_bits[down ? DOWN : GATE]; }
static __device__ inline int segments_of(const Experts &e, bool down) { return 1 << bits_of(e, down); }
static __device__ inline int teams_of(const Experts &e, bool down) { return EXPERT_WARPS >> bits_of(e, down); }
static __device__ inline int team_of(const Experts &e, bool down) { return warp_id() >> bits_of(e, down); }
static __device__ inline int segment_of(const Experts &e, bool down) { return warp_id() & (segments_of(e, down) - 1); }

/* ---- rounds */

/* Where the share of a block begins, of n things that are dealt out in runs. */
static __device__ inline int share_begin(int n, int block) { return (int)((unsigned)n * (unsigned)block / gridDim.x); }

static __device__ void count_shared_rounds(Rounds *rounds, const Experts &e) {
    const int block = (int)blockIdx.x;
    rounds->units = divide_up(e.inter, teams_of(e, false) * TILE_ROWS / 2);
    rounds->shared_works = e.slots > e.per_token ? divide_up(e.n_rows, e.columns) : 0;
    rounds->works = rounds->shared_works;
    rounds->first_shared = share_begin(rounds->shared_works * rounds->units, block);
    rounds->gate = rounds->shared = share_begin(rounds->shared_works * rounds->units, block + 1) - rounds->first_shared;
}

/* The other way round than the shared expert's, so that the blocks with one more of these have one less of those. */
static __device__ void count_rounds(Rounds *rounds, const Experts &e, int works) {
    const int block = (int)blockIdx.x, last = (int)gridDim.x - 1, shared = rounds->shared_works * rounds->units,
              routed = works * rounds->units - shared;
    rounds->works = works;
    rounds->first_routed = shared + share_begin(routed, last - block);
    rounds->gate = rounds->shared + shared + share_begin(routed, last - block + 1) - rounds->first_routed;
    rounds->strips = divide_up(divide_up(e.hidden, TILE_ROWS) - block, (int)gridDim.x);
    rounds->down = divide_up(rounds->strips * works, teams_of(e, true));
}

static __device__ inline int first_work(const ExpertMemory &m, int work) {
    while (work && m.works[work - 1].chosen == m.works[work].chosen) work--;
    return work;
}

/* Units of an expert come in runs, each for all of its works. */
static __device__ void find_unit(Cursor *cursor, const ExpertMemory &m, int units, int index) {
    const int first = first_work(m, index / units);
    int n = 1;
    while (m.works[first + n].chosen == m.works[first].chosen) n++;
    const int offset = index - first * units, run = offset / (RUN * n), rest = offset % (RUN * n), length = min((int)RUN, units - run * RUN);
    cursor->work = first + rest / length;
    cursor->unit = run * RUN + rest % length;
}

static __device__ void next_unit(Cursor *cursor, const ExpertMemory &m, int units) {
    if (++cursor->unit % RUN && cursor->unit < units) return;
    const int chosen = m.works[cursor->work].chosen;
    if (m.works[cursor->work + 1].chosen == chosen) cursor->work++, cursor->unit = (cursor->unit - 1) / RUN * RUN;
    else if (cursor->unit < units) cursor->work = first_work(m, cursor->work);
    else cursor->work++, cursor->unit = 0;
}

static __device__ void step(Cursor *cursor, const Experts &e, const ExpertMemory &m, const Rounds &rounds, int team) {
    const int round = ++cursor->round;
    if (round < rounds.gate) {
        if (round == rounds.shared) find_unit(cursor, m, rounds.units, rounds.first_routed);
        else if (round == 0) find_unit(cursor, m, rounds.units, rounds.first_shared);
        else next_unit(cursor, m, rounds.units);
        return;
    }
    if (round == rounds.gate) cursor->work = 0, cursor->unit = team;
    else cursor->unit += teams_of(e, true);
    while (cursor->work < rounds.works && cursor->unit >= rounds.strips) cursor->unit -= rounds.strips, cursor->work++;
}

/* The strip of that team, in strips of eight rows of gate and up, or of sixteen of down. */
static __device__ inline int strip_of(const Experts &e, const Cursor &cursor, bool down, int team) {
    return down ? (int)blockIdx.x + cursor.unit * (int)gridDim.x : cursor.unit * teams_of(e, false) + team;
}

/* ---- the lists */

static __device__ inline const void *first_scale(const Matrix &w) {
    return w.exponents ? (const void *)(w.exponents + (size_t)w.first_row * (size_t)w.scale_cols) : row_scales(&w, 0);
}

static __device__ inline Chosen chosen_matrices(const Matrix &gate, const Matrix &up, const Matrix &down) {
    return {.data = {gate.data, up.data, down.data}, .scale = {first_scale(gate), first_scale(up), first_scale(down)}};
}

/* The sum over the threads before this one; *sum: over all. */
static __device__ uint64_t sum_before(uint64_t own, uint64_t *sum) {
    __shared__ uint64_t of_warp[EXPERT_WARPS];
    uint64_t until = own;
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t other = __shfl_up_sync(~0u, until, (unsigned)distance);
        if (lane_id() >= distance) until += other;
    }
    __syncthreads();                                /* the sums before these have been read */
    if (lane_id() == 31) of_warp[warp_id()] = until;
    __syncthreads();
    uint64_t before = until - own;
    *sum = 0;
    for (int w = 0; w < EXPERT_WARPS; w++) {
        if (w == warp_id()) before += *sum;
        *sum += of_warp[w];
    }
    return before;
}

/* The expert of a pick as the lists number them: the shared one first. */
static __device__ inline int listed_expert(const Experts &e, int pick) {
    return is_shared(e, pick) ? 0 : e.picks[row_of(pick) * e.per_token + number_of(pick)] + (e.slots > e.per_token);
}

/* An expert and its place among those that were chosen, among the works and among the picks. */
static __device__ void put_expert(const Experts &e, const ExpertMemory &m, int expert, int chosen, int work, int begin, int count) {
    const int shared = e.slots > e.per_token, id = expert - shared;
    if (id < 0) m.chosen[chosen] = chosen_matrices(e.shared[GATE], e.shared[UP], e.shared[DOWN]);
    else m.chosen[chosen] = chosen_matrices(e.table[GATE][id], e.table[UP][id], e.table[DOWN][id]);
#pragma unroll 1
    for (int i = 0; i < count; i += e.columns)
        m.works[work++] = {.chosen = (uint16_t)chosen, .begin = (uint16_t)(begin + i)};
}

/* Who chose whom, which every block finds out for itself: a mask of rows for each expert, sums over the experts, and the picks
 * dealt out, by row. Returns the number of works. */
static __device__ int list_works(const Experts &e, const ExpertMemory &m) {
    const int experts = e.experts + e.slots - e.per_token, picks = e.n_rows * e.slots, words = divide_up(e.n_rows, 32);
    uint32_t *mask = (uint32_t *)m.x;               /* [experts, words], and then [experts], until x is needed there */
    uint16_t *begin = (uint16_t *)(mask + experts * words);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < experts * words; i += EXPERT_THREADS) mask[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < picks; i += EXPERT_THREADS) {
        const int row = i / e.slots;
        atomicOr(&mask[listed_expert(e, row << 16 | i % e.slots) * words + row / 32], 1u << row % 32);
    }
    __syncthreads();
    uint64_t all = 0, part;                         /* chosen experts, works << 20, picks << 40 */
#pragma unroll 1
    for (int base = 0; base < experts; base += EXPERT_THREADS, all += part) {
        const int expert = base + (int)threadIdx.x;
        int count = 0;
#pragma unroll 1
        for (int i = 0; i < words && expert < experts; i++) count += __popc(mask[expert * words + i]);
        const uint64_t own = (uint64_t)(count > 0) | (uint64_t)divide_up(count, e.columns) << 20 | (uint64_t)count << 40;
        const uint64_t before = all + sum_before(own, &part);
        if (!count) continue;
        begin[expert] = (uint16_t)(before >> 40);
        put_expert(e, m, expert, (int)(before & 0xfffff), (int)(before >> 20 & 0xfffff), (int)(before >> 40), count);
    }
    const int works = (int)(all >> 20 & 0xfffff);
    if (threadIdx.x == 0) m.works[works] = {.chosen = NOBODY, .begin = (uint16_t)picks};
    __syncthreads();
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < picks; i += EXPERT_THREADS) {
        const int row = i / e.slots, pick = row << 16 | i % e.slots, expert = listed_expert(e, pick);
        int place = begin[expert] + __popc(mask[expert * words + row / 32] & ((1u << row % 32) - 1));
#pragma unroll 1
        for (int w = 0; w < row / 32; w++) place += __popc(mask[expert * words + w]);
        m.order[place] = pick;
    }
    __syncthreads();
    return works;
}

/* ---- weights on their way */

static __device__ inline void copy_scales_to_shared(uint8_t *to, const uint8_t *from, int bytes) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    if (bytes == 4) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(at), "l"(from) : "memory");
}
static __device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Waits until fewer than `n` of this thread's groups of copies are on their way. */
static __device__ inline void wait_for_copies(int n) {
    switch (n) {
    case 2: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 3: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    case 4: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
    case 5: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
    }
}

/* What a warp reads, tile by tile, `stages` ahead of what it multiplies. */
struct Stream {
    Cursor cursor;
    int limit;                  /* the rounds that are known */
    int at, end;                /* bytes into a row */
    int chunk_bytes, skipped;   /* of a chunk; from its end to the segment's next */
    const uint8_t *data[2];     /* of the tile's upper and lower eight rows */
    uint32_t row[4];            /* offsets of four of the tile's rows, for this lane's 16 bytes */
    const uint8_t *scale;       /* of row `lane`, scale_bytes for each tile */
    int scale_bytes, stage;
};

static __device__ void open_work(Stream *stream, const Experts &e, const ExpertMemory &m, const Rounds &rounds) {
    const bool down = stream->cursor.round >= rounds.gate;
    if (stream->cursor.work >= rounds.works) return;            /* at is behind the end still */
    const DType D = type_of(e, rounds, stream->cursor.work);
    const Chosen &chosen = m.chosen[m.works[stream->cursor.work].chosen];
    const int cols = down ? e.inter : e.hidden, rows = down ? e.hidden : e.inter, lane = lane_id(),
              first = strip_of(e, stream->cursor, down, team_of(e, down)) * (down ? TILE_ROWS : TILE_ROWS / 2);
    stream->end = (int)weight_bytes(D, (size_t)cols);
    stream->chunk_bytes = (int)weight_bytes(D, CHUNK);
    stream->scale_bytes = scale_bytes(D);
    stream->skipped = (segments_of(e, down) - 1) * stream->chunk_bytes;
    stream->at = segment_of(e, down) * stream->chunk_bytes;
    stream->data[0] = chosen.data[down ? DOWN : GATE], stream->data[1] = chosen.data[down ? DOWN : UP];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = min(first + lane / 8 + i % 2 * 4 + (down ? i / 2 * 8 : 0), rows - 1);
        stream->row[i] = (uint32_t)row * (uint32_t)stream->end + (uint32_t)(lane % 8 * 16);
    }
    const int row = min(first + lane % (down ? TILE_ROWS : TILE_ROWS / 2), rows - 1);
    const int blocks = divide_up(cols, tile_values(D)), scale_row = D == DTYPE_F4_E2M1 ? row : row / SCALE_BLOCK;
    stream->scale = (const uint8_t *)chosen.scale[down ? DOWN : lane % TILE_ROWS < 8 ? GATE : UP]
                    + (size_t)scale_row * (size_t)(blocks * stream->scale_bytes);
}

/* Starts to read this warp's next tile into its place in the ring. False: there is none that is known. */
static __device__ bool fetch_tile(Stream *stream, const Experts &e, const ExpertMemory &m, const Rounds &rounds) {
    while (stream->at >= stream->end) {
        if (stream->cursor.round + 1 >= stream->limit) return false;
        step(&stream->cursor, e, m, rounds, team_of(e, true));
        open_work(stream, e, m, rounds);
    }
    const int lane = lane_id();
    uint8_t *slot = m.ring + (warp_id() * e.stages + stream->stage) * e.slot_bytes;
    uint8_t *to = slot + lane / 8 * TILE_BYTES + (lane % 8 ^ lane / 8 % 2 * 4) * 16;
    const bool there = stream->at + lane % 8 * 16 < stream->end;
#pragma unroll
    for (int i = 0; i < 4; i++)
        start_copy_to_shared(to + i * 4 * TILE_BYTES, stream->data[i / 2] + (stream->row[i] + (uint32_t)(there ? stream->at : 0)),
                             there);
    if (stream->scale_bytes && lane < TILE_ROWS)
        copy_scales_to_shared(slot + TILE_ROWS * TILE_BYTES + lane * stream->scale_bytes,
                              stream->scale + stream->at / TILE_BYTES * stream->scale_bytes, stream->scale_bytes);
    stream->at += TILE_BYTES;
    if (stream->at % stream->chunk_bytes == 0) stream->at += stream->skipped;
    stream->stage = stream->stage + 1 == e.stages ? 0 : stream->stage + 1;
    return true;
}

/* ---- x as the tensor cores want it */

/* A thread multiplies 64 values of a chunk, eight at a time, and four threads each their own. Of the chunk's 32 eights, which is the
 * i-th of thread t: as many as 16 bytes of weights hold follow each other. */
static __device__ inline int eight_of(DType D, int t, int i) {
    const int each = D == DTYPE_F4_E2M1 ? 4 : D == DTYPE_F8_E4M3 ? 2 : 1;
    return i / each * 4 * each + t * each + i % each;
}
/* The same backwards, as i * 4 + t. */
static __device__ inline int eight_place(DType D, int eight) {
    const int each = D == DTYPE_F4_E2M1 ? 4 : D == DTYPE_F8_E4M3 ? 2 : 1;
    return eight / (4 * each) * 4 * each + eight % each * 4 + eight / each % 4;
}

/* Place of value i of an eight among them, in the order of narrow_eight(). */
static __device__ inline int value_place(DType D, int i) {
    return D == DTYPE_F4_E2M1 ? i % 4 * 2 + i / 4 : D == DTYPE_F8_E4M3 ? i / 4 * 4 + i % 2 * 2 + i % 4 / 2 : i;
}

static __device__ inline uint4 narrow_for(DType D, const float v[8]) {
    if (D == DTYPE_F4_E2M1) return narrow_eight<DTYPE_F4_E2M1>(v);
    if (D == DTYPE_F8_E4M3) return narrow_eight<DTYPE_F8_E4M3>(v);
    if (D == DTYPE_BF16) return narrow_eight<DTYPE_BF16>(v);
    return narrow_eight<DTYPE_F16>(v);
}

/* Bytes of a row of x, whole chunks, in shared memory. */
static __host__ __device__ inline int x_stride(int cols) { return divide_up(cols, CHUNK) * CHUNK * 2 + STAGED_PAD; }

/* The rows of a work, for the whole block. */
static __device__ void stage_rows(const Experts &e, const ExpertMemory &m, int work, DType D) {
    const int begin = m.works[work].begin, count = count_of(m, work), stride = x_stride(e.hidden), eights = (stride - STAGED_PAD) / 16;
#pragma unroll 2
    for (int i = (int)threadIdx.x; i < count * eights; i += EXPERT_THREADS) {
        const int column = i / eights, eight = i % eights;
        const float *from = e.x + (size_t)(row_of(m.order[begin + column])) * (size_t)e.hidden + eight * 8;
        float v[8];
        load_eight(v, from, e.hidden - eight * 8, e.aligned);
        *(uint4 *)(m.x + column * stride + (eight / 32 * 32 + eight_place(D, eight % 32)) * 16) = narrow_for(D, v);
    }
}

/* This thread's 64 values of a chunk, of its row of x or of gated; idle columns of the instruction repeat one. */
static __device__ inline void load_rows(uint4 x[8], const Experts &e, const ExpertMemory &m, bool down, int work, int count, int chunk,
                                        DType D) {
    const int column = min(lane_id() / 4, count - 1), t = lane_id() % 4;
    if (!down) {
        const uint8_t *from = m.x + column * x_stride(e.hidden) + chunk * CHUNK * 2 + t * 16;
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = *(const uint4 *)(from + i * 64);
        return;
    }
    const uint16_t *from = (const uint16_t *)e.gated + gated_row(e, m.order[m.works[work].begin + column]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int k = chunk * CHUNK + eight_of(D, t, i) * 8;
        x[i] = k < e.inter ? __ldcg((const uint4 *)(from + k)) : make_uint4(0, 0, 0, 0);
    }
}

/* ---- products */

/* A tile as a thread has it: two pieces of 16 bytes of row g = lane / 4, two of row g + 8. */
struct Tile { uint4 piece[2][2]; uint32_t scale[2][2]; };

static __device__ inline void load_tile(Tile *tile, const uint8_t *slot, int scale_bytes) {
    const int g = lane_id() / 4;
    const uint8_t *from = slot + g * TILE_BYTES + lane_id() % 4 * 16, *scales = slot + TILE_ROWS * TILE_BYTES;
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            tile->piece[u][i] = *(const uint4 *)(from + (u ^ g % 2) * 64 + i * 8 * TILE_BYTES);
            if (scale_bytes) tile->scale[u][i] = *(const uint32_t *)(scales + (g + i * 8) * scale_bytes + u * (scale_bytes - 4));
        }
}

/* total += a tile times x. Of e4m3 the sum is scaled, of e2m1 each value, but for 2^E2M1_SHIFT. */
template <DType D> static __device__ inline void multiply_tile(float total[4], const Tile &tile, const uint4 *x) {
    constexpr int parts = D == DTYPE_F4_E2M1 ? 4 : D == DTYPE_F8_E4M3 ? 2 : 1;
    float sum[4] = {};
    float *into = D == DTYPE_F8_E4M3 ? sum : total;
#pragma unroll
    for (int u = 0; u < 2; u++) {
        const uint32_t upper = D == DTYPE_F4_E2M1 ? e2m1_factor(tile.scale[u][0]) : 0,
                       lower = D == DTYPE_F4_E2M1 ? e2m1_factor(tile.scale[u][1]) : 0;
#pragma unroll
        for (int part = 0; part < parts; part++) {
            const uint4 a = widen_part<D>(tile.piece[u][0], part, upper), c = widen_part<D>(tile.piece[u][1], part, lower),
                        b = x[u * parts + part];
            multiply_fragment<D>(into, a.x, c.x, a.y, c.y, b.x, b.y);
            multiply_fragment<D>(into, a.z, c.z, a.w, c.w, b.z, b.w);
        }
    }
    if (D == DTYPE_F8_E4M3)
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] = fmaf(__uint_as_float(tile.scale[0][i / 2]), sum[i], total[i]);
}

/* The tile of that number in a chunk. */
template <DType D> static __device__ inline void multiply_numbered(float total[4], const Tile &tile, const uint4 x[8], int number) {
    constexpr int tiles = D == DTYPE_F4_E2M1 ? 1 : D == DTYPE_F8_E4M3 ? 2 : 4;
#pragma unroll
    for (int i = 0; i < tiles; i++)
        if (number == i) multiply_tile<D>(total, tile, x + i * (8 / tiles));
}

/* This warp's segment of one strip times the rows of one work, whose first chunk of x may be there already. As soon as a tile is in
 * registers, the stream's next one takes its place. */
static __device__ inline void multiply_work(float total[4], uint4 x[8], bool held, Stream *stream, int *stage, const Experts &e,
                                            const ExpertMemory &m, const Rounds &rounds, bool down, int work) {
    const DType D = type_of(e, rounds, work);
    const int cols = down ? e.inter : e.hidden, count = count_of(m, work), segments = segments_of(e, down);
    for (int chunk = segment_of(e, down); chunk * CHUNK < cols; chunk += segments) {
        if (!held || segments * CHUNK < cols) load_rows(x, e, m, down, work, count, chunk, D);
        const int tiles = divide_up(min((int)CHUNK, cols - chunk * CHUNK), tile_values(D));
#pragma unroll 1
        for (int i = 0; i < tiles; i++) {
            Tile tile = {};
            wait_for_copies(e.stages);
            __syncwarp();
            load_tile(&tile, m.ring + (warp_id() * e.stages + *stage) * e.slot_bytes, scale_bytes(D));
            __syncwarp();
            fetch_tile(stream, e, m, rounds);
            commit_copies();
            if (D == DTYPE_F4_E2M1) multiply_numbered<DTYPE_F4_E2M1>(total, tile, x, i);
            else if (D == DTYPE_F8_E4M3) multiply_numbered<DTYPE_F8_E4M3>(total, tile, x, i);
            else if (D == DTYPE_BF16) multiply_numbered<DTYPE_BF16>(total, tile, x, i);
            else multiply_numbered<DTYPE_F16>(total, tile, x, i);
            *stage = *stage + 1 == e.stages ? 0 : *stage + 1;
        }
    }
    if (D == DTYPE_F4_E2M1)
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] *= 0x1p32f;
}

/* The same in plain f32, for weights of any type at any address: a lane has one row and half of the columns of x. */
static __device__ void multiply_exactly(float total[4], const Experts &e, const ExpertMemory &m, const Rounds &rounds, bool down,
                                        int work, int strip) {
    const int cols = down ? e.inter : e.hidden, rows = down ? e.hidden : e.inter, lane = lane_id(), high = down ? TILE_ROWS : TILE_ROWS / 2,
              begin = m.works[work].begin, last = count_of(m, work) - 1,
              which = down ? DOWN : lane % TILE_ROWS < 8 ? GATE : UP;
    const DType stored = (work < rounds.shared_works ? e.shared[which] : e.table[which][0]).dtype;
    const Chosen &chosen = m.chosen[m.works[work].chosen];
    const int row = min(strip * high + lane % high, rows - 1);
    const uint8_t *data = chosen.data[which] + (size_t)row * weight_bytes(stored, (size_t)cols);
    const float *scale = (const float *)chosen.scale[which] + row / SCALE_BLOCK * divide_up(cols, SCALE_BLOCK), *x[4];
    const uint8_t *exponents = (const uint8_t *)chosen.scale[which] + row * divide_up(cols, EXPONENT_BLOCK);
    for (int c = 0; c < 4; c++) {
        const int pick = m.order[begin + min(lane / 16 * 4 + c, last)];
        x[c] = down ? (const float *)e.gated + gated_row(e, pick) : e.x + (size_t)row_of(pick) * (size_t)e.hidden;
    }
    for (int chunk = segment_of(e, down); chunk * CHUNK < cols; chunk += segments_of(e, down))
#pragma unroll 1
        for (int k = chunk * CHUNK; k < min(chunk * CHUNK + CHUNK, cols); k++) {
            float weight = load_stored(data, (size_t)k, stored);
            if (stored == DTYPE_F8_E4M3) weight *= scale[k / SCALE_BLOCK];
            if (stored == DTYPE_F4_E2M1) weight *= widen_e8m0(exponents[k / EXPONENT_BLOCK]);
            for (int c = 0; c < 4; c++) total[c] = fmaf(weight, __ldcg(x[c] + k), total[c]);
        }
}

/* ---- sums */

/* A warp's sums to columns [first, first + count) of those that wait. */
static __device__ inline void put_columns(const Experts &e, const ExpertMemory &m, const float total[4], bool down, int work, int strip,
                                          int first, int count) {
    const int lane = lane_id(), segments = segments_of(e, down), segment = segment_of(e, down);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool exact = e.dtype[0] == EXACT;
        const int column = exact ? lane / 16 * 4 + i : lane % 4 * 2 + i % 2, row = exact ? lane % 16 : lane / 4 + i / 2 * 8;
        if (column < count) m.sums[((first + column) * segments + segment) * TILE_ROWS + row] = total[i];
    }
    if (segment == 0 && lane < count) {
        m.strip[first + lane] = strip;
        m.pick[first + lane] = m.order[m.works[work].begin + lane];
    }
}

static __device__ inline float add_segments(const ExpertMemory &m, int segments, int column, int row) {
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < segments; i++) sum += m.sums[(column * segments + i) * TILE_ROWS + row];
    return sum;
}

/* gated = silu(gate x) * up x for the columns that wait. */
static __device__ void add_gate_up(const Experts &e, const ExpertMemory &m, int columns) {
    const int segments = segments_of(e, false);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < columns * 8; i += EXPERT_THREADS) {
        const int column = i / 8, r = i % 8, out = m.strip[column] * 8 + r, pick = m.pick[column];
        if (out >= e.inter) continue;
        const DType D = e.dtype[is_shared(e, pick)];
        const float value = silu(add_segments(m, segments, column, r)) * add_segments(m, segments, column, 8 + r);
        const size_t row = gated_row(e, pick);
        if (D == EXACT) ((float *)e.gated)[row + (size_t)out] = value;
        else {
            const uint32_t pair = D == DTYPE_F16 ? narrow_pair<DTYPE_F16>(value, 0) : narrow_pair<DTYPE_BF16>(value, 0);
            ((uint16_t *)e.gated)[row + (size_t)(out - r + value_place(D, r))] = (uint16_t)pair;
        }
    }
}

/* Which columns that wait belong to the same row and strip: next[c] is the next one, leads[c] says that there is none before. */
static __device__ void link_columns(const ExpertMemory &m, int columns) {
    const int c = (int)threadIdx.x;
    if (c < columns) {
        const int row = row_of(m.pick[c]), strip = m.strip[c];
        int before = c - 1, after = c + 1;
        while (before >= 0 && (m.strip[before] != strip || row_of(m.pick[before]) != row)) before--;
        while (after < columns && (m.strip[after] != strip || row_of(m.pick[after]) != row)) after++;
        m.next[c] = after;
        m.leads[c] = before < 0;
    }
    __syncthreads();
}

/* y += weight * down gated for the columns that wait: the first one of a row of y takes its others along, in order. */
static __device__ void add_down(const Experts &e, const ExpertMemory &m, int columns) {
    link_columns(m, columns);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < columns * TILE_ROWS; i += EXPERT_THREADS) {
        const int first = i / TILE_ROWS, r = i % TILE_ROWS, out = m.strip[first] * TILE_ROWS + r, row = row_of(m.pick[first]);
        if (out >= e.hidden || !m.leads[first]) continue;
        float *y = e.y + (size_t)row * (size_t)e.hidden + (size_t)out;
        float sum = is_shared(e, m.pick[first]) ? 0 : *y;
#pragma unroll 1
        for (int c = first; c < columns; c = m.next[c]) {
            const float weight = is_shared(e, m.pick[c]) ? 1 : e.weights[row * e.per_token + number_of(m.pick[c])];
            sum = fmaf(weight, add_segments(m, segments_of(e, true), c, r), sum);
        }
        *y = sum;
    }
}

static __device__ inline void add_waiting(const Experts &e, const ExpertMemory &m, bool down, int columns) {
    __syncthreads();
    if (down) add_down(e, m, columns);
    else add_gate_up(e, m, columns);
    __syncthreads();
}

/* ---- the kernel */

/* Waits until all blocks have come here; what they wrote before is seen behind it. They all fit on the GPU at once. */
static __device__ struct Gate { unsigned arrived, opened; } expert_gate;

static __device__ void wait_for_all_blocks() {
    __syncthreads();
    if (threadIdx.x == 0) {
        volatile unsigned *opened = &expert_gate.opened;
        const unsigned before = *opened;
        __threadfence();
        if (atomicAdd(&expert_gate.arrived, 1) == gridDim.x - 1) {
            expert_gate.arrived = 0;
            __threadfence();
            *opened = before + 1;
        } else
            while (*opened == before) {}
        __threadfence();
    }
    __syncthreads();
}

static __device__ ExpertMemory expert_memory(const Experts &e, uint8_t *shared) {
    ExpertMemory m;
    m.ring = shared;
    m.x = m.ring + EXPERT_WARPS * e.stages * e.slot_bytes;
    m.sums = (float *)(m.x + e.x_bytes);
    m.strip = (int *)(m.sums + MAX_SUMS * TILE_ROWS);
    m.pick = m.strip + MAX_SUMS;
    m.next = (uint8_t *)(m.pick + MAX_SUMS);
    m.leads = m.next + MAX_SUMS;
    m.chosen = (Chosen *)(m.leads + MAX_SUMS);
    m.works = (Work *)(m.chosen + e.most_chosen);
    m.order = (int *)(m.works + e.most_chosen + divide_up(e.n_rows * e.slots, e.columns) + 1);
    return m;
}

/* Weights may be read before it is known who is chosen: those of the shared expert. Returns how many tiles are on their way. */
static __device__ int fetch_shared(Stream *stream, const Experts &e, const ExpertMemory &m, const Rounds &rounds) {
    if (threadIdx.x == 0) m.chosen[0] = chosen_matrices(e.shared[GATE], e.shared[UP], e.shared[DOWN]);
    for (int i = (int)threadIdx.x; i <= rounds.shared_works; i += EXPERT_THREADS)
        m.works[i].chosen = i < rounds.shared_works ? 0 : NOBODY;
    __syncthreads();
    int ahead = 0;
    for (; ahead < e.stages && fetch_tile(stream, e, m, rounds); ahead++) commit_copies();
    return ahead;
}

static __global__ void __launch_bounds__(EXPERT_THREADS, 1) experts_kernel(const __grid_constant__ Experts e) {
    extern __shared__ __align__(128) uint8_t shared[];
    const ExpertMemory m = expert_memory(e, shared);
    const bool exact = e.dtype[0] == EXACT;
    const int lane = lane_id();
    Rounds rounds = {};
    count_shared_rounds(&rounds, e);
    Stream stream = {};
    stream.cursor.round = -1;
    stream.limit = rounds.shared;
    int ahead = 0, stage = 0;
    if (!exact && rounds.shared) ahead = fetch_shared(&stream, e, m, rounds);
    wait_for_previous();
    count_rounds(&rounds, e, list_works(e, m));
    stream.limit = rounds.gate + rounds.down;
    for (; ahead < e.stages && !exact; ahead++) {
        fetch_tile(&stream, e, m, rounds);
        commit_copies();
    }

    Cursor cursor = {.round = -1, .work = 0, .unit = 0};        /* of team `lane` */
    uint4 x[8];
    int staged = -1, used = 0;                      /* the work whose rows are at hand; columns that wait */
    for (int round = 0; round < rounds.gate + rounds.down; round++) {
        const bool down = round >= rounds.gate;
        const int segments = segments_of(e, down), teams = teams_of(e, down), team = team_of(e, down);
        if (round == rounds.gate) {
            add_waiting(e, m, false, used);
            used = 0, staged = -1;
            wait_for_all_blocks();
            let_next_start();
        }
        step(&cursor, e, m, rounds, min(lane, teams - 1));
        const int own_count = lane < teams && cursor.work < rounds.works ? count_of(m, cursor.work) : 0;
        int until = own_count;                      /* columns of the teams up to `lane` */
        for (int distance = 1; distance < EXPERT_WARPS; distance *= 2) {
            const int other = __shfl_up_sync(~0u, until, (unsigned)distance);
            if (lane >= distance) until += other;
        }
        const int columns = __shfl_sync(~0u, until, EXPERT_WARPS - 1), count = __shfl_sync(~0u, own_count, team),
                  first = __shfl_sync(~0u, until, team) - count, work = __shfl_sync(~0u, cursor.work, team),
                  strip = strip_of(e, {.round = round, .work = work, .unit = __shfl_sync(~0u, cursor.unit, team)}, down, team);
        if (!down && !exact && work != staged) {
            __syncthreads();
            stage_rows(e, m, work, type_of(e, rounds, work));
            __syncthreads();
        }
        float total[4] = {};
        if (count && exact) multiply_exactly(total, e, m, rounds, down, work, strip);
        else if (count) multiply_work(total, x, down && work == staged, &stream, &stage, e, m, rounds, down, work);
        staged = work;
        if ((used + columns) * segments > MAX_SUMS) {
            add_waiting(e, m, down, used);
            used = 0;
        }
        if (count) put_columns(e, m, total, down, work, strip, used + first, count);
        used += columns;
    }
    if (rounds.down) add_waiting(e, m, true, used);
    else {                                          /* the others wait for this block's rows of gated */
        add_waiting(e, m, false, used);
        wait_for_all_blocks();
    }
}

/* How an expert's matrices are multiplied. */
static DType streamed_type(const Matrix *gate, const Matrix *up, const Matrix *down) {
    const bool same = gate->dtype == up->dtype && up->dtype == down->dtype;
    return same && rows_aligned(gate->dtype, gate->cols) && rows_aligned(down->dtype, down->cols) ? gate->dtype : EXACT;
}

/* Cuts up a block's shared memory: as many rows of x beside a tile as there are, and as many stages as there is room for. */
static size_t lay_out_experts(Experts *e) {
    const int picks = e->n_rows * e->slots, experts = e->experts + e->slots - e->per_token;
    const int lists = experts * (divide_up(e->n_rows, 32) * (int)sizeof(uint32_t) + (int)sizeof(uint16_t));
    e->slot_bytes = TILE_ROWS * (TILE_BYTES + max(scale_bytes(e->dtype[0]), scale_bytes(e->dtype[1])));
    for (int least = MIN_STAGES; least >= 2; least--)
        for (e->columns = min(e->n_rows, (int)TILE_COLUMNS); e->columns; e->columns--)
            for (e->stages = MAX_STAGES; e->stages >= least; e->stages--) {
                e->x_bytes = (max(e->columns * x_stride(e->hidden), lists) + 15) / 16 * 16;
                const size_t works = (size_t)(e->most_chosen + divide_up(picks, e->columns) + 1),
                             bytes = (size_t)(EXPERT_WARPS * e->stages * e->slot_bytes + e->x_bytes)
                                     + MAX_SUMS * ((TILE_ROWS + 2) * sizeof(float) + 2) + (size_t)e->most_chosen * sizeof(Chosen)
                                     + works * sizeof(Work) + (size_t)picks * sizeof(int);
                if (bytes + 1024 <= gpu.shared_per_block) return bytes;
            }
    return 0;
}

/* As many segments as there are chunks, or the next lower power of two. */
static int count_segment_bits(int cols) {
    int bits = 0;
    while (bits < MAX_SEGMENT_BITS && 2 << bits <= divide_up(cols, CHUNK)) bits++;
    return bits;
}

static void launch_experts(Experts e) {
    e.segment_bits[GATE] = e.segment_bits[UP] = count_segment_bits(e.hidden);
    e.segment_bits[DOWN] = count_segment_bits(e.inter);
    const size_t shared = lay_out_experts(&e);
    const int units = divide_up(e.inter, (EXPERT_WARPS >> e.segment_bits[GATE]) * TILE_ROWS / 2), strips = divide_up(e.hidden, TILE_ROWS);
    launch_early(experts_kernel, min(gpu.multiprocessors, max(e.n_rows * e.slots * units, strips)), EXPERT_THREADS, shared, e);
}

/* The shared expert runs with the others where its matrices are like theirs, and by itself before them where not. As many rows at a
 * time as the lists hold. */
static void experts(float *y, const float *x, const int *picks, const float *weights, int n_rows, const LayerWeights *layer,
                    const Config *config, float *scratch) {
    const int per_token = config->num_experts_per_tok, hidden = config->hidden_size, inter = config->moe_intermediate_size;
    const Matrix gate = {.dtype = layer->expert_dtype, .cols = hidden}, down = {.dtype = layer->expert_dtype, .cols = inter};
    const DType dtype = streamed_type(&gate, &gate, &down),
                shared_dtype = streamed_type(&layer->gate_proj, &layer->up_proj, &layer->down_proj);
    const bool merged = layer->gate_proj.rows == inter && (dtype == EXACT) == (shared_dtype == EXACT);
    const int slots = per_token + merged, experts = config->n_routed_experts + merged;
    const int most = min(MAX_LISTED / slots, MAX_MASKS / experts / (int)sizeof(uint32_t) * 32);
    if (layer->gate_proj.rows && !merged) {
        const size_t inner = (size_t)layer->gate_proj.rows;
        float *up = scratch + (size_t)n_rows * inner;
        linear(scratch, inner, x, (size_t)hidden, n_rows, &layer->gate_proj);
        linear(up, inner, x, (size_t)hidden, n_rows, &layer->up_proj);
        swiglu(scratch, scratch, up, (size_t)n_rows * inner);
        linear(y, (size_t)hidden, scratch, inner, n_rows, &layer->down_proj);
    }
    for (int first = 0, n; first < n_rows; first += n) {
        n = min(n_rows - first, most);
        const size_t row = (size_t)first;
        const float *in = x + row * (size_t)hidden;
        launch_experts({.table = {layer->expert_gate, layer->expert_up, layer->expert_down},
                        .shared = {layer->gate_proj, layer->up_proj, layer->down_proj}, .picks = picks + row * (size_t)per_token,
                        .x = in, .weights = weights + row * (size_t)per_token, .gated = scratch, .y = y + row * (size_t)hidden,
                        .n_rows = n, .experts = config->n_routed_experts, .per_token = per_token, .hidden = hidden, .inter = inter,
                        .slots = slots, .aligned = floats_aligned(in, (size_t)hidden), .dtype = {dtype, merged ? shared_dtype : dtype},
                        .segment_bits = {}, .columns = 0, .most_chosen = min(n * per_token, config->n_routed_experts) + merged, .stages = 0,
                        .slot_bytes = 0, .x_bytes = 0});
    }
}

/* =====================================================================================================================
 * Cached rows and index selection
 *
 * Owns: how a cached row is written and widened, and the lightning indexer (DeepSeek-V3.2, eq. 1) with its top-k. The indexer is
 * two kernels. index_scores reads every key of a session once for up to eight query rows and writes f32 scores; bf16 keys go
 * through the tensor cores straight from memory. select_top finds the k-th score with a radix search in three histograms and
 * collects the positions in ascending order. A score is the work of one warp in a fixed order, and the selection is exact integer
 * work, so neither depends on how a launch is split. Relies on: rows of a session follow each other, strides of whole 64 bytes.
 */

/* Bytes before the plain values of a row. */
static __host__ __device__ inline int quantised_bytes(const RowFormat &format) {
    if (format.dtype == KV_F32) return 4 * format.quantised;
    if (format.dtype == KV_BF16) return 2 * format.quantised;
    return format.quantised + 4 * divide_up(format.quantised, format.group);
}

/* Little-endian bits of n bytes anywhere: an odd number of e4m3 values leaves what follows them unaligned. */
static __device__ inline uint32_t load_bytes(const uint8_t *data, int n) {
    uint32_t bits = 0;
    for (int i = 0; i < n; i++) bits |= (uint32_t)data[i] << 8 * i;
    return bits;
}

/* Value i of a cached row, the quantised ones first. */
static __device__ inline float cached_value(const uint8_t *row, const RowFormat &format, int i) {
    if (format.dtype == KV_F32) return ((const float *)row)[i];
    if (format.dtype == KV_BF16) return __bfloat162float(((const __nv_bfloat16 *)row)[i]);
    if (i >= format.quantised)
        return __uint_as_float(load_bytes(row + quantised_bytes(format) + 2 * (i - format.quantised), 2) << 16);
    float scale = __uint_as_float(load_bytes(row + format.quantised + 4 * (i / format.group), 4));
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(row[i], __NV_E4M3))) * scale;
}

/* ---- writing rows; the bits are the C twin's */

static __device__ inline void narrow_bf16(uint8_t *out, float x) {
    uint32_t bits = __float_as_uint(x);
    uint32_t half = (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    out[0] = (uint8_t)half;
    out[1] = (uint8_t)(half >> 8);
}

/* To the nearest e4m3, ties to even, saturating at 448. */
static __device__ inline uint8_t narrow_e4m3(float x) {
    uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffff, code;
    if (magnitude > 0x7f800000) return 0x7f;
    if (magnitude < 0x3c800000) code = (uint32_t)rintf(__uint_as_float(magnitude) * 512);   /* subnormal: steps of 2^-9 */
    else code = min(((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120u << 3), 0x7eu);
    return (uint8_t)(code | (bits >> 31) << 7);
}

/* n values by the whole block. */
static __device__ void narrow_values(uint8_t *__restrict__ out, const float *__restrict__ x, int n, bool f32) {
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
        if (f32) ((float *)out)[i] = x[i];          /* rows of f32 hold nothing else, so this is aligned */
        else narrow_bf16(out + 2 * i, x[i]);
    }
}

/* One group of e4m3 values and its scale, by one warp. */
static __device__ void narrow_group(uint8_t *__restrict__ out, uint8_t *__restrict__ scales, const float *__restrict__ x, int n) {
    const int lane = (int)threadIdx.x % 32;
    float largest = 0;
#pragma unroll 4
    for (int i = lane; i < n; i += 32) largest = fmaxf(largest, fabsf(x[i]));
    for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float scale = largest > 448 * FLT_MIN ? largest / 448 : 1;        /* a scale of 0 would make 0 / 0 */
#pragma unroll 4
    for (int i = lane; i < n; i += 32) out[i] = narrow_e4m3(x[i] / scale);
    if (lane < 4) scales[lane] = (uint8_t)(__float_as_uint(scale) >> 8 * lane);
}

/* By a whole block of THREADS. */
static __device__ void store_row(uint8_t *row, const RowFormat &format, const float *quantised, const float *plain) {
    narrow_values(row + quantised_bytes(format), plain, format.plain, format.dtype == KV_F32);
    if (format.dtype != KV_F8) return narrow_values(row, quantised, format.quantised, format.dtype == KV_F32);
    for (int group = (int)threadIdx.x / 32; group * format.group < format.quantised; group += THREADS / 32) {
        int first = group * format.group;
        narrow_group(row + first, row + format.quantised + 4 * group, quantised + first,
                     min(format.group, format.quantised - first));
    }
}

/* A block writes a row. */
static __global__ void store_rows_kernel(uint8_t *base, RowFormat format, const DeviceRow *ids, const float *a, size_t a_stride,
                                         const float *b, size_t b_stride) {
    store_row(base + (size_t)ids[blockIdx.x].id * format.stride, format, a + blockIdx.x * a_stride, b + blockIdx.x * b_stride);
}

static void store_rows(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, const float *a, size_t a_stride,
                       const float *b, size_t b_stride) {
    if (!n_rows) return;
    store_rows_kernel<<<n_rows, THREADS, 0, gpu.stream>>>(base, *format, ids, a, a_stride, b, b_stride);
    LAUNCHED();
}

/* By a whole block: rotates pairs of the first `dim` values of v. */
static __device__ void rotate_pairs(float *v, int dim, bool interleaved, const float *cosine, const float *sine) {
    const int half = dim / 2, near = interleaved ? 2 : 1, far = interleaved ? 1 : half;
    cosine += (size_t)blockIdx.x * (size_t)half, sine += (size_t)blockIdx.x * (size_t)half;
    for (int i = (int)threadIdx.x; i < half; i += THREADS) {
        const float a = v[i * near], b = v[i * near + far];
        v[i * near] = a * cosine[i] - b * sine[i];
        v[i * near + far] = b * cosine[i] + a * sine[i];
    }
}

/* A block takes a row. */
static __global__ void store_latents_kernel(uint8_t *base, RowFormat format, const DeviceRow *ids, float *kv, int lora, int tail,
                                            const float *weight, float eps, const float *cosine, const float *sine) {
    float *row = kv + (size_t)blockIdx.x * (size_t)(lora + tail), sum = 0;
#pragma unroll 4
    for (int j = (int)threadIdx.x; j < lora; j += THREADS) sum += row[j] * row[j];
    const float scale = 1 / sqrtf(group_sum<THREADS>(sum) / (float)lora + eps);
#pragma unroll 4
    for (int j = (int)threadIdx.x; j < lora; j += THREADS) row[j] = row[j] * scale * weight[j];
    rotate_pairs(row + lora, tail, true, cosine, sine);
    __syncthreads();
    store_row(base + (size_t)ids[blockIdx.x].id * format.stride, format, row, row + lora);
}

static void store_latents(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *kv, int lora, int tail,
                          const float *weight, float eps, const float *cosine, const float *sine) {
    if (!n_rows) return;
    store_latents_kernel<<<n_rows, THREADS, 0, gpu.stream>>>(base, *format, ids, kv, lora, tail, weight, eps, cosine, sine);
    LAUNCHED();
}

static __global__ void store_index_keys_kernel(uint8_t *base, RowFormat format, const DeviceRow *ids, float *k, int dim,
                                               const float *weight, const float *bias, int turned, bool interleaved,
                                               const float *cosine, const float *sine, PassReport *report, int place) {
    float *row = k + (size_t)blockIdx.x * (size_t)dim, sum = 0, squares = 0;
    bool bad = false;
    for (int j = (int)threadIdx.x; j < dim; j += THREADS) sum += row[j];
    const float mean = group_sum<THREADS>(sum) / (float)dim;
    for (int j = (int)threadIdx.x; j < dim; j += THREADS) squares += (row[j] - mean) * (row[j] - mean);
    const float scale = 1 / sqrtf(group_sum<THREADS>(squares) / (float)dim + 1e-6f);
    for (int j = (int)threadIdx.x; j < dim; j += THREADS) {
        row[j] = (row[j] - mean) * scale * weight[j] + bias[j];
        bad |= !is_finite(row[j]);
    }
    bad = __syncthreads_or(bad);
    rotate_pairs(row, turned, interleaved, cosine, sine);
    __syncthreads();
    store_row(base + (size_t)ids[blockIdx.x].id * format.stride, format, row, row);
    if (threadIdx.x == 0) finish_check(report, place, bad, blockIdx.x);
}

static void store_index_keys(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *k, int dim,
                             const float *weight, const float *bias, int turned, bool interleaved, const float *cosine,
                             const float *sine, PassReport *report, int place) {
    if (!n_rows) return;
    store_index_keys_kernel<<<n_rows, THREADS, 0, gpu.stream>>>(base, *format, ids, k, dim, weight, bias, turned, interleaved, cosine,
                                                                sine, report, place);
    LAUNCHED();
}

/* ---- index scores */

enum {
    SCORE_THREADS = 512,            /* one block to a processor */
    SCORE_ROWS = SCORE_THREADS,     /* query rows of one launch at most: the plan has a thread for each */
    SHARED_QUERIES = 8,             /* query rows that share one read of the keys at most */
    SCORE_KEYS = 32,                /* keys that a warp scores at a time: half a page */
    SCORE_WIDTH = 128,              /* of a key on the tensor cores; narrower ones count as filled up with zeros */
    KEY_CHUNKS = SCORE_WIDTH / 32,  /* of a key: 32 values are what four lanes read of it at a time */
    HEAD_TILE = KEY_CHUNKS * 32,    /* uint4 of eight heads' queries in shared memory */
    QUERY_BYTES = 64 << 10,         /* of shared memory for the queries that share a read */
};

struct IndexShape {
    RowFormat format;
    int context_pages, heads, head_dim, capacity;
    int together;                   /* query rows that share one read of the keys */
    float scale;
};

/* Which query rows share a read, and how the reads are laid end to end. Each block makes it for itself. */
struct ScorePlan {
    int session[SCORE_ROWS], position[SCORE_ROWS];
    int members[SCORE_ROWS];        /* rows that share the read that begins with this row; 0: it shares an earlier one */
    int ends[SCORE_ROWS];           /* tiles of all reads up to this row's */
    uint32_t starts[SCORE_ROWS / 32];       /* a bit per row: it begins a session's run */
    int sums[SCORE_ROWS / 32];
};

/* Rows [r, r + members) of one session share a read. Tiles they need: none where each row selects its whole history. */
static __device__ int tiles_of(const ScorePlan &plan, int r, int members, int capacity) {
    int last = -1;
    for (int i = r; i < r + members; i++)
        if (plan.position[i] >= capacity) last = max(last, plan.position[i]);
    return divide_up(last + 1, SCORE_KEYS);
}

static __device__ int warp_prefix_sum(int x) {
    for (int step = 1; step < 32; step *= 2) {
        int below = __shfl_up_sync(~0u, x, step);
        if ((int)threadIdx.x % 32 >= step) x += below;
    }
    return x;
}

static __device__ void make_plan(ScorePlan &plan, const Row *rows, int n_rows, const IndexShape &shape) {
    const int r = (int)threadIdx.x, lane = r % 32, warp = r / 32;
    plan.session[r] = r < n_rows ? rows[r].session : -1;
    plan.position[r] = r < n_rows ? rows[r].position : -1;
    __syncthreads();
    uint32_t starts = __ballot_sync(~0u, r == 0 || plan.session[r] != plan.session[r - 1]);
    if (lane == 0) plan.starts[warp] = starts;
    __syncthreads();
    int word = warp;
    uint32_t below = starts & ((2u << lane) - 1);   /* row 0 is a start, so the walk ends */
    while (!below) below = plan.starts[--word];
    int start = 32 * word + 31 - __clz((int)below), members = 0;
    if (r < n_rows && (r - start) % shape.together == 0)
        while (members < shape.together && r + members < n_rows && plan.session[r + members] == plan.session[r]) members++;
    plan.members[r] = members;
    int sum = warp_prefix_sum(tiles_of(plan, r, members, shape.capacity));
    if (lane == 31) plan.sums[warp] = sum;
    __syncthreads();
    for (int i = 0; i < warp; i++) sum += plan.sums[i];
    plan.ends[r] = sum;
    __syncthreads();
}

/* The queries of a read in shared memory, bf16, in the order in which lanes feed them to the tensor cores: lane l of head tile t
 * and chunk c of 32 values takes values 8 (l mod 4) .. + 8 of the chunk of head 8 t + l / 4. The weights follow, scaled. */
static __device__ void stage_queries(uint4 *queries, float *weights, const float *q, const float *head_weights, int members,
                                     const IndexShape &shape) {
    const int tiles = divide_up(shape.heads, 8), per_row = tiles * HEAD_TILE;
#pragma unroll 2
    for (int i = (int)threadIdx.x; i < members * per_row; i += SCORE_THREADS) {
        int lane = i % 32, chunk = i / 32 % KEY_CHUNKS, tile = i % per_row / HEAD_TILE, row = i / per_row;
        int head = 8 * tile + lane / 4, first = 32 * chunk + 8 * (lane % 4);
        float4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
        if (head < shape.heads && first < shape.head_dim) {
            const float4 *x = (const float4 *)(q + ((size_t)row * shape.heads + head) * shape.head_dim + first);
            low = x[0];
            high = x[1];
        }
        __nv_bfloat162 pairs[4] = {__floats2bfloat162_rn(low.x, low.y), __floats2bfloat162_rn(low.z, low.w),
                                   __floats2bfloat162_rn(high.x, high.y), __floats2bfloat162_rn(high.z, high.w)};
        queries[i] = *(uint4 *)pairs;
    }
    for (int i = (int)threadIdx.x; i < members * tiles * 8; i += SCORE_THREADS) {
        int head = i % (tiles * 8), row = i / (tiles * 8);
        weights[i] = head < shape.heads ? head_weights[row * shape.heads + head] * shape.scale : 0;
    }
}

/* sums += keys (16 x 16) times queries (16 x 8), bf16 into f32. */
static __device__ inline void multiply_keys(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                            uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* A lane's part of 32 keys, in registers: of key lane / 4 + 8 i, 16 bytes of each chunk. Which values of a sum an instruction
 * gets from which lane does not matter as long as keys and queries agree, so a lane's eight neighbouring values go into two. */
struct KeyTile {
    uint4 part[4][KEY_CHUNKS];
};

/* Keys are read once, so they need no place in the first-level cache; a lane's neighbours want the rest of the row at once. */
static __device__ inline uint4 load_part(const uint8_t *at) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}

static __device__ inline void load_keys(KeyTile &tile, const uint8_t *keys, const IndexShape &shape) {
    const int lane = (int)threadIdx.x % 32;
    keys += lane / 4 * shape.format.stride + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int chunk = 0; chunk < KEY_CHUNKS; chunk++)
            tile.part[i][chunk] = 32 * chunk + 8 * (lane % 4) < shape.head_dim
                                      ? load_part(keys + 8 * i * shape.format.stride + 64 * chunk)
                                      : make_uint4(0, 0, 0, 0);
}

/* scores: [members, context], of the tile's keys. */
static __device__ inline void tensor_scores(float *scores, size_t context, const uint4 *queries, const float *weights,
                                            int members, const KeyTile &keys, const IndexShape &shape) {
    const int lane = (int)threadIdx.x % 32, tiles = divide_up(shape.heads, 8);
    for (int row = 0; row < members; row++) {
        float total[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++, queries += HEAD_TILE, weights += 8) {
            float sums[2][4] = {};
#pragma unroll
            for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) {
                uint4 query = queries[32 * chunk + lane];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint4 &a = keys.part[2 * i][chunk], &b = keys.part[2 * i + 1][chunk];
                    multiply_keys(sums[i], a.x, b.x, a.y, b.y, query.x, query.y);
                    multiply_keys(sums[i], a.z, b.z, a.w, b.w, query.z, query.w);
                }
            }
            float2 weight = *(const float2 *)(weights + 2 * (lane % 4));
#pragma unroll
            for (int i = 0; i < 4; i++) {           /* a NaN stays one */
                float even = sums[i / 2][2 * (i % 2)], odd = sums[i / 2][2 * (i % 2) + 1];
                total[i] = fmaf(weight.x, even < 0 ? 0 : even, total[i]);
                total[i] = fmaf(weight.y, odd < 0 ? 0 : odd, total[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            total[i] += __shfl_xor_sync(~0u, total[i], 1);
            total[i] += __shfl_xor_sync(~0u, total[i], 2);
        }
        const float mine = lane % 4 == 0 ? total[0] : lane % 4 == 1 ? total[1] : lane % 4 == 2 ? total[2] : total[3];
        scores[row * context + (size_t)(lane / 4 + 8 * (lane % 4))] = mine;
    }
}

/* Any format, any width: a lane scores a key in f32, eight heads at a time. */
static __device__ void plain_scores(float *scores, size_t context, const float *q, const float *head_weights, int members,
                                    const uint8_t *keys, const IndexShape &shape) {
    const uint8_t *key = keys + threadIdx.x % 32 * shape.format.stride;
    for (int row = 0; row < members; row++, q += shape.heads * shape.head_dim, head_weights += shape.heads) {
        float total = 0;
        for (int first = 0; first < shape.heads; first += 8) {
            float dots[8] = {};
            for (int i = 0; i < shape.head_dim; i++) {
                const float value = cached_value(key, shape.format, i);
#pragma unroll
                for (int h = 0; h < 8; h++)
                    if (first + h < shape.heads) dots[h] = fmaf(q[(first + h) * shape.head_dim + i], value, dots[h]);
            }
#pragma unroll
            for (int h = 0; h < 8; h++)
                if (first + h < shape.heads)
                    total = fmaf(head_weights[first + h] * shape.scale, dots[h] < 0 ? 0 : dots[h], total);
        }
        scores[row * context + threadIdx.x % 32] = total;
    }
}

/* Every block takes an equal part of all tiles, which may span several reads, and its warps take tiles in turn. scores:
 * [n_rows, context]; those behind a row's own position mean nothing. */
template <bool TENSOR> static __global__ void __launch_bounds__(SCORE_THREADS, 1)
index_scores(float *scores, const float *q, const float *head_weights, const uint8_t *keys, const DevicePage *pages,
             const Row *rows, int n_rows, const __grid_constant__ IndexShape shape) {
    extern __shared__ uint4 queries[];
    __shared__ ScorePlan plan;
    const size_t context = (size_t)shape.context_pages * PAGE_ROWS, dims = (size_t)shape.heads * shape.head_dim;
    float *weights = (float *)(queries + shape.together * divide_up(shape.heads, 8) * HEAD_TILE);
    make_plan(plan, rows, n_rows, shape);
    const int64_t all = plan.ends[SCORE_ROWS - 1];
    const int end = (int)(all * (blockIdx.x + 1) / gridDim.x);
    for (int at = (int)(all * blockIdx.x / gridDim.x), stop; at < end; at = stop) {
        const int r = __syncthreads_count(plan.ends[threadIdx.x] <= at);        /* whose read it is; and the last one is over */
        const int begin = r ? plan.ends[r - 1] : 0, members = plan.members[r];
        stop = min(end, plan.ends[r]);
        const DevicePage *table = pages + (size_t)plan.session[r] * shape.context_pages;
        auto keys_of = [=, &shape](int tile) {
            int first = (tile - begin) * SCORE_KEYS;
            return keys + ((size_t)table[first / PAGE_ROWS].id * PAGE_ROWS + first % PAGE_ROWS) * shape.format.stride;
        };
        const float *row_q = q + r * dims, *row_weights = head_weights + (size_t)r * shape.heads;
        float *out = scores + r * context - (size_t)begin * SCORE_KEYS;
        int tile = at + (int)threadIdx.x / 32;
        if constexpr (TENSOR) {
            KeyTile loaded;
            if (tile < stop) load_keys(loaded, keys_of(tile), shape);           /* on its way while the queries are staged */
            stage_queries(queries, weights, row_q, row_weights, members, shape);
            __syncthreads();
            while (tile < stop) {
                tensor_scores(out + (size_t)tile * SCORE_KEYS, context, queries, weights, members, loaded, shape);
                tile += SCORE_THREADS / 32;
                if (tile < stop) load_keys(loaded, keys_of(tile), shape);
            }
        } else for (; tile < stop; tile += SCORE_THREADS / 32)
            plain_scores(out + (size_t)tile * SCORE_KEYS, context, row_q, row_weights, members, keys_of(tile), shape);
    }
}

/* ---- the k best
 *
 * A cluster of blocks takes a row, and each warp a span of its positions; histograms and counts of the others are read through
 * distributed shared memory. Before Hopper one block takes a row.
 */

enum {
    SELECT_THREADS = 1024,
    SELECT_WARPS = SELECT_THREADS / 32,
    SELECT_STEP = 128,              /* positions a warp visits at a time, four to a lane */
    BINS = 2048,
    MAX_SPLIT = 8,                  /* blocks of a row: the largest cluster every Hopper has */
};

#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
static __device__ inline int cluster_rank(void) { int x; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x)); return x; }
static __device__ inline int cluster_size(void) { int x; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(x)); return x; }
static __device__ inline void cluster_wait(void) {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

/* Two ints of a shared variable of block `rank`. */
static __device__ inline int2 cluster_read(const int2 *shared, int rank) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    int2 x;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %2, %3; ld.shared::cluster.v2.u32 {%0, %1}, [there]; }"
                 : "=r"(x.x), "=r"(x.y) : "r"(address), "r"(rank) : "memory");
    return x;
}
#else
static __device__ inline int cluster_rank(void) { return 0; }
static __device__ inline int cluster_size(void) { return 1; }
static __device__ inline void cluster_wait(void) { __syncthreads(); }
static __device__ inline int2 cluster_read(const int2 *shared, int) { return *shared; }
#endif

/* A key whose unsigned order is the scores' order; -0 counts as 0, and NaN is below everything. No score has the key 0. */
static __device__ inline uint32_t sortable(float score) {
    uint32_t bits = __float_as_uint(score + 0.0f);
    return score != score ? 1 : bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

/* Keys of positions s + SELECT_STEP j + 0 .. 3, all of them asked for before the first is used; 0 from `last` on. */
template <int N> static __device__ inline void load_scores(uint32_t (&key)[4 * N], const float *scores, int s, int last) {
    float4 x[N] = {};
#pragma unroll
    for (int j = 0; j < N; j++)
        if (s + SELECT_STEP * j < last) x[j] = *(const float4 *)(scores + s + SELECT_STEP * j);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const int left = last - s - SELECT_STEP * j;
        key[4 * j] = left > 0 ? sortable(x[j].x) : 0;
        key[4 * j + 1] = left > 1 ? sortable(x[j].y) : 0;
        key[4 * j + 2] = left > 2 ? sortable(x[j].z) : 0;
        key[4 * j + 3] = left > 3 ? sortable(x[j].w) : 0;
    }
}

struct SelectShared {
    int histogram[3 * BINS];        /* of each radix step */
    int sums[SELECT_WARPS];
    int2 counts[SELECT_WARPS];      /* of each warp: positions above the threshold, and at it */
    int2 total;                     /* of the block */
    int bin, wanted;                /* where the k-th key lies, and its rank within the bin */
};

/* Finds the bin of the wanted-th highest key in the sum of the cluster's histograms. Each thread takes two bins, the highest
 * first. */
static __device__ void find_bin(SelectShared &shared, const int *histogram, int wanted) {
    const int thread = (int)threadIdx.x, high = BINS - 1 - 2 * thread;
    int2 count = {0, 0};
    const int size = cluster_size();
#pragma unroll 4
    for (int rank = 0; rank < size; rank++) {
        int2 part = cluster_read((const int2 *)(histogram + high - 1), rank);
        count.x += part.x;
        count.y += part.y;
    }
    int sum = warp_prefix_sum(count.x + count.y);
    if (thread % 32 == 31) shared.sums[thread / 32] = sum;
    __syncthreads();
    int before = warp_prefix_sum(shared.sums[thread % 32]) - shared.sums[thread % 32];
    sum += __shfl_sync(~0u, before, thread / 32);
    before = sum - count.x - count.y;
    if (before < wanted && wanted <= sum) {
        bool first = wanted <= before + count.y;
        shared.bin = first ? high : high - 1;
        shared.wanted = wanted - before - (first ? 0 : count.y);
    }
    __syncthreads();
}

/* How many keys of positions [first, last) are above the threshold, and at it. */
static __device__ int2 count_span(const float *scores, int first, int last, uint32_t threshold) {
    int2 count = {0, 0};
    for (int s = first + 4 * ((int)threadIdx.x % 32); s < last; s += 4 * SELECT_STEP) {
        uint32_t key[16];
        load_scores<4>(key, scores, s, last);
#pragma unroll
        for (int i = 0; i < 16; i++) count.x += key[i] > threshold, count.y += key[i] == threshold;
    }
    count.x = (int)__reduce_add_sync(~0u, (unsigned)count.x);
    count.y = (int)__reduce_add_sync(~0u, (unsigned)count.y);
    return count;
}

/* Writes the selected positions of [first, last). before: keys above the threshold and at it, ahead of the span. */
static __device__ void collect_span(int *ids, const float *scores, int first, int last, uint32_t threshold, int wanted,
                                    int2 before) {
    const int lane = (int)threadIdx.x % 32;
    for (int base = first; base < last; base += SELECT_STEP) {
        const int s = base + 4 * lane;
        uint32_t key[4];
        int above = 0, equal = 0;
        load_scores<1>(key, scores, s, last);
#pragma unroll
        for (int i = 0; i < 4; i++) above += key[i] > threshold, equal += key[i] == threshold;
        if (!__any_sync(~0u, above + equal)) continue;
        int sum = warp_prefix_sum(above | equal << 16), all = __shfl_sync(~0u, sum, 31);
        above = before.x + (sum & 0xffff) - above;
        equal = before.y + (sum >> 16) - equal;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (key[i] > threshold) ids[above++ + min(equal, wanted)] = s + i;
            else if (key[i] == threshold && equal++ < wanted) ids[above + equal - 1] = s + i;
        }
        before.x += all & 0xffff;
        before.y += all >> 16;
    }
}

/* The k-th highest key of the row; shared.wanted keys equal to it are selected. */
static __device__ uint32_t find_threshold(SelectShared &shared, const float *scores, int first, int last, int k) {
    uint32_t threshold = 0, known = 0;
    for (int i = (int)threadIdx.x; i < 3 * BINS; i += SELECT_THREADS) shared.histogram[i] = 0;
    __syncthreads();
    for (int step = 0, wanted = k; step < 3; step++, wanted = shared.wanted) {
        const int shift = step == 0 ? 21 : step == 1 ? 10 : 0;
        int *histogram = shared.histogram + step * BINS;
        const uint32_t mask = step == 2 ? BINS / 2 - 1 : BINS - 1;
        for (int s = first + 4 * ((int)threadIdx.x % 32); s < last; s += 4 * SELECT_STEP) {
            uint32_t key[16];
            load_scores<4>(key, scores, s, last);
#pragma unroll
            for (int i = 0; i < 16; i++)
                if ((key[i] & known) == threshold) atomicAdd(&histogram[key[i] >> shift & mask], 1);
        }
        cluster_wait();
        find_bin(shared, histogram, wanted);
        threshold |= (uint32_t)shared.bin << shift;
        known |= mask << shift;
    }
    return threshold;
}

static __global__ void __launch_bounds__(SELECT_THREADS)
select_top(int *ids, int *counts, int capacity, const float *scores, size_t context, const Row *rows) {
    __shared__ SelectShared shared;
    const int split = cluster_size(), rank = cluster_rank(), r = (int)blockIdx.x / split, visible = rows[r].position + 1;
    const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32, k = min(visible, capacity);
    ids += (size_t)r * capacity;
    scores += r * context;
    if (rank == 0 && thread == 0) counts[r] = k;
    if (visible <= capacity) {                      /* while everything fits, the selection is the whole history */
        for (int i = rank * SELECT_THREADS + thread; i < capacity; i += split * SELECT_THREADS) ids[i] = i < k ? i : -1;
        return;
    }
    const int span = divide_up(visible, split * SELECT_WARPS * SELECT_STEP) * SELECT_STEP;
    const int first = min((rank * SELECT_WARPS + warp) * span, visible), last = min(first + span, visible);
    const uint32_t threshold = find_threshold(shared, scores, first, last, k);
    const int2 count = count_span(scores, first, last, threshold);
    if (lane == 0) shared.counts[warp] = count;
    __syncthreads();
    int2 before = {warp_prefix_sum(shared.counts[lane].x), warp_prefix_sum(shared.counts[lane].y)};
    if (thread == 31) shared.total = before;
    before = {__shfl_sync(~0u, before.x, warp) - count.x, __shfl_sync(~0u, before.y, warp) - count.y};
    cluster_wait();
    for (int i = 0; i < rank; i++) {
        int2 total = cluster_read(&shared.total, i);
        before.x += total.x;
        before.y += total.y;
    }
    collect_span(ids, scores, first, last, threshold, shared.wanted, before);
    cluster_wait();                                 /* a block's shared memory lives until everyone has read it */
}

/* Blocks of a row: as many as keep the processors busy. */
static void launch_select(int *ids, int *counts, int capacity, const float *scores, int context, const Row *rows, int n_rows) {
    int split = gpu.major >= 9 ? MAX_SPLIT : 1;
    while (split > 1 && (split * n_rows > gpu.multiprocessors || context < split * SELECT_THREADS)) split /= 2;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)split;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(split * n_rows));
    config.blockDim = dim3(SELECT_THREADS);
    config.stream = gpu.stream;
    config.attrs = &cluster;
    config.numAttrs = split > 1;
    CUDA(cudaLaunchKernelEx(&config, select_top, ids, counts, capacity, scores, (size_t)context, rows));
}

static void launch_scores(float *scores, const float *q, const float *head_weights, const uint8_t *keys, const DevicePage *pages,
                          const Row *rows, int n_rows, IndexShape shape) {
    const int row_bytes = divide_up(shape.heads, 8) * 8 * (int)(SCORE_WIDTH * sizeof(__nv_bfloat16));
    const bool tensor = shape.format.dtype == KV_BF16 && shape.head_dim % 8 == 0 && shape.head_dim <= SCORE_WIDTH &&
                        row_bytes <= QUERY_BYTES;
    shape.together = min(min(n_rows, SHARED_QUERIES), tensor ? QUERY_BYTES / row_bytes : SHARED_QUERIES);
    size_t shared = tensor ? (size_t)shape.together * (size_t)(row_bytes + divide_up(shape.heads, 8) * 8 * 4) : 0;
    auto kernel = tensor ? index_scores<true> : index_scores<false>;
    allow_shared(kernel, shared);
    kernel<<<gpu.multiprocessors, SCORE_THREADS, shared, gpu.stream>>>(scores, q, head_weights, keys, pages, rows, n_rows, shape);
    LAUNCHED();
}

static void index_select(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                         const RowFormat *format, const DevicePage *pages, int context_pages, int heads, int head_dim,
                         const Row *rows, int n_rows, float *scratch, int scratch_rows) {
    const int context = context_pages * PAGE_ROWS, capacity = selection->capacity;
    const IndexShape shape = {*format, context_pages, heads, head_dim, capacity, 1, 1 / sqrtf((float)head_dim * (float)heads)};
    for (int begin = 0, n; begin < n_rows; begin += n) {
        n = min(min(n_rows - begin, scratch_rows), SCORE_ROWS);
        if (capacity < context)
            launch_scores(scratch, q + (size_t)begin * heads * head_dim, head_weights + (size_t)begin * heads, keys, pages,
                          rows + begin, n, shape);
        launch_select(selection->ids + (size_t)begin * capacity, selection->count + begin, capacity, scratch, context,
                      rows + begin, n);
    }
}

/* =====================================================================================================================
 * Attention
 *
 * Owns: softmax(q . k) v over lists of keys, wherever these lie: a row's selection (DeepSeek-V2, 2.1 in absorbed form), a session's
 * history (GQA), or a draft's ring and block (DFlash). A list is cut into chunks of SPLIT_KEYS, which run side by side and leave a
 * maximum, a sum and a weighted sum each; merge_kernel adds them in their order. The cut depends on a row's own list alone, so the
 * row has the same bits beside any others.
 *
 * attend_kernel takes any shape, in f32. latent_kernel is for the 512 + 64 values of GLM and DeepSeek, on tensor cores.
 */

enum {
    SPLIT_KEYS = 256,
    TILE_KEYS = 32,             /* keys in shared memory at a time */
    ATTEND_WARPS = 8,           /* heads that a thread block of attend_kernel works on */
    LANE_VALUES = MAX_ROW_WIDTH / 32,
    PARTIAL_FLOATS = 48 << 20,  /* of what chunks leave: rows run in groups that fit */
    LATENT = 512, TAIL = 64, LATENT_WIDTH = LATENT + TAIL,
    LATENT_TILES = LATENT / 4 / 8,          /* of eight values, in a warp's part */
    LATENT_HEADS = 64,          /* heads that a thread block of latent_kernel works on */
    LATENT_THREADS = 512,
    LATENT_PARTS = 4,           /* of the sum in a score, and of the values: a warp takes one, for 16 heads */
    LATENT_PITCH = LATENT_WIDTH + 8,        /* bf16 from one row to the next in shared memory: eight rows fall into different banks */
    SCORE_PITCH = TILE_KEYS + 4, WEIGHT_PITCH = TILE_KEYS + 8,
};

static float *partials;         /* [PARTIAL_FLOATS] device: of a row, head and chunk: maximum, sum, values */

static bool attention_start(Error *error) {
    partials = (float *)take((size_t)PARTIAL_FLOATS * sizeof(float), MEMORY_DEVICE, error);
    return partials;
}

static __device__ const uint8_t *row_at(const RowPool &pool, size_t stride, DeviceRow row) {
    return row.id < pool.n_rows ? pool.rows + (size_t)row.id * stride : pool.staging + (size_t)(row.id - pool.n_rows) * stride;
}

/* ---- lists of keys: of(r) is row r's, with `length` keys; value j of a key, and of what it stands for, are of a key/value head */

struct SelectedKeys {
    RowPool pool;
    RowFormat format;
    const DeviceRow *locations; /* [rows, capacity]; of(r): [capacity] */
    const int *count;
    int capacity, length;
    static const bool shared = true;        /* the key is the value too */
    __device__ SelectedKeys of(int r) const {
        SelectedKeys own = *this;
        own.locations += (size_t)r * capacity;
        own.length = count[r];
        return own;
    }
    __device__ const uint8_t *row(int s) const { return row_at(pool, format.stride, locations[s]); }
    __device__ float key(int, int s, int j) const { return cached_value(row(s), format, j); }
    __device__ float value(int, int, int) const { return 0; }
};

struct HistoryKeys {
    RowPool pool;
    RowFormat format;
    const DevicePage *pages;    /* [sessions, context_pages]; of(r): [context_pages] */
    const Row *rows;
    int context_pages, kv_heads, dim, length;
    static const bool shared = false;
    __device__ HistoryKeys of(int r) const {
        HistoryKeys own = *this;
        own.pages += (size_t)rows[r].session * context_pages;
        own.length = rows[r].position + 1;
        return own;
    }
    __device__ float at(int s, int j) const {
        return cached_value(row_at(pool, format.stride, DeviceRow{pages[s / PAGE_ROWS].id * PAGE_ROWS + s % PAGE_ROWS}), format,
                            j);
    }
    __device__ float key(int head, int s, int j) const { return at(s, head * dim + j); }
    __device__ float value(int head, int s, int j) const { return at(s, (kv_heads + head) * dim + j); }
};

/* The ring's rows that row i of a block sees, then those of its block. */
struct BlockKeys {
    const uint8_t *ring;        /* [sessions, ring_rows]; of(r): [ring_rows] */
    RowFormat format;
    const float *kv;            /* [blocks * block_size, 2 * kv_heads * dim]; of(r): of its block */
    const DraftBlock *blocks;   /* MEMORY_HOST: read once a row */
    int ring_rows, block_size, window, kv_heads, dim;
    bool causal;
    int length, oldest, position;           /* of(r): the first position that is seen, and the anchor's */
    static const bool shared = false;
    __device__ BlockKeys of(int r) const {
        BlockKeys own = *this;
        const DraftBlock *block = &blocks[r / block_size];
        const int first = block->ring_first, i = r % block_size;
        own.position = block->position;
        own.oldest = window > own.position + i ? 0 : own.position + i - window + 1;
        own.oldest = min(max(own.oldest, first), own.position);
        own.length = own.position - own.oldest + (causal ? i + 1 : block_size);
        own.ring += (size_t)block->session * ring_rows * format.stride;
        own.kv += (size_t)(r - i) * 2 * kv_heads * dim;
        return own;
    }
    __device__ float at(int s, int j) const {
        const int t = oldest + s;
        if (t >= position) return kv[(size_t)(t - position) * 2 * kv_heads * dim + j];
        return cached_value(ring + (size_t)(t % ring_rows) * format.stride, format, j);
    }
    __device__ float key(int head, int s, int j) const { return at(s, head * dim + j); }
    __device__ float value(int head, int s, int j) const { return at(s, (kv_heads + head) * dim + j); }
};

static __device__ float warp_maximum(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

static __device__ float warp_total(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* Where a chunk of a row and head leaves its part. */
static __device__ float *partial_of(float *parts, int row, int head, int heads, int chunk, int chunks, int value_dim) {
    return parts + (((size_t)row * heads + head) * chunks + chunk) * (value_dim + 2);
}

/* ---- any shape: a warp for each head, a lane for each key of a tile, then for each value */

template <typename Keys>
static __global__ void attend_kernel(Keys lists, float *parts, const float *q, int first_row, int heads, int kv_heads,
                                     int key_dim, int value_dim, float scale, int chunks) {
    extern __shared__ float attend_shared[];
    const int r = first_row + blockIdx.x, group = heads / kv_heads, tiles = divide_up(group, ATTEND_WARPS),
              kv = blockIdx.y / tiles, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
              member = blockIdx.y % tiles * ATTEND_WARPS + warp, head = kv * group + member;
    const int key_pitch = key_dim + 1; /* 32 lanes read the same value of 32 keys: odd pitches keep them apart */
    float *key_tile = attend_shared, *query = key_tile + TILE_KEYS * key_pitch + warp * key_dim,
          *value_tile = Keys::shared ? key_tile : key_tile + TILE_KEYS * key_pitch + ATTEND_WARPS * key_dim;
    const int value_pitch = Keys::shared ? key_pitch : value_dim;
    const Keys keys = lists.of(r);
    const bool works = member < group;
    for (int j = lane; j < key_dim && works; j += 32) query[j] = q[((size_t)r * heads + head) * key_dim + j];
    for (int chunk = blockIdx.z; chunk * SPLIT_KEYS < keys.length; chunk += gridDim.z) {
        const int end = min(keys.length, (chunk + 1) * SPLIT_KEYS);
        float maximum = -FLT_MAX, sum = 0, total[LANE_VALUES] = {0};
        for (int begin = chunk * SPLIT_KEYS; begin < end; begin += TILE_KEYS) {
            const int n = min(end - begin, (int)TILE_KEYS);
            __syncthreads();
            for (int i = threadIdx.x; i < n * key_dim; i += blockDim.x)
                key_tile[i / key_dim * key_pitch + i % key_dim] = keys.key(kv, begin + i / key_dim, i % key_dim);
            for (int i = threadIdx.x; i < n * value_dim && !Keys::shared; i += blockDim.x)
                value_tile[i] = keys.value(kv, begin + i / value_dim, i % value_dim);
            __syncthreads();
            float score = 0;
            for (int j = 0; j < key_dim && lane < n && works; j++) score += query[j] * key_tile[lane * key_pitch + j];
            score = lane < n ? score * scale : -FLT_MAX;
            const float largest = fmaxf(maximum, warp_maximum(score)), shrink = expf(maximum - largest),
                        weight = lane < n ? expf(score - largest) : 0;
            sum = sum * shrink + warp_total(weight);
            maximum = largest;
#pragma unroll
            for (int i = 0; i < LANE_VALUES; i++) total[i] *= shrink;
            for (int s = 0; s < n; s++) {
                const float share = __shfl_sync(~0u, weight, s);
#pragma unroll
                for (int i = 0; i < LANE_VALUES; i++)
                    if (lane + 32 * i < value_dim) total[i] += share * value_tile[s * value_pitch + lane + 32 * i];
            }
        }
        if (!works) continue;
        float *part = partial_of(parts, blockIdx.x, head, heads, chunk, chunks, value_dim);
        if (!lane) part[0] = maximum, part[1] = sum;
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++)
            if (lane + 32 * i < value_dim) part[2 + lane + 32 * i] = total[i];
    }
}

/* The chunks of one row and head, in their order. */
template <typename Keys>
static __global__ void merge_kernel(Keys lists, float *y, float *parts, int first_row, int heads, int value_dim, int chunks) {
    const int r = first_row + blockIdx.x, head = blockIdx.y, used = divide_up(lists.of(r).length, SPLIT_KEYS);
    float maximum = -FLT_MAX, sum = 0;
#pragma unroll 8
    for (int chunk = 0; chunk < used; chunk++)
        maximum = fmaxf(maximum, partial_of(parts, blockIdx.x, head, heads, chunk, chunks, value_dim)[0]);
#pragma unroll 8
    for (int chunk = 0; chunk < used; chunk++) {
        const float *part = partial_of(parts, blockIdx.x, head, heads, chunk, chunks, value_dim);
        sum += part[1] * expf(part[0] - maximum);
    }
    for (int j = threadIdx.x; j < value_dim; j += blockDim.x) {
        float total = 0;
#pragma unroll 8
        for (int chunk = 0; chunk < used; chunk++) {
            const float *part = partial_of(parts, blockIdx.x, head, heads, chunk, chunks, value_dim);
            total += part[2 + j] * expf(part[0] - maximum);
        }
        y[((size_t)r * heads + head) * value_dim + j] = total / sum;
    }
}

/* ---- tensor cores: 512 + 64 values, bf16 or fp8 rows */

static __device__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Four 8 x 8 matrices of bf16; lane l names row l % 8 of matrix l / 8. */
static __device__ void load_matrices(uint32_t (&m)[4], const __nv_bfloat16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)));
}

static __device__ void load_transposed(uint32_t (&m)[4], const __nv_bfloat16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)));
}

/* c [16, 8] += a [16, 16] b [16, 8] */
static __device__ void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ uint32_t pair_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&pair;
}

/* A row as it is stored goes into shared memory in pieces of 16 bytes: bf16 into the tile itself, fp8 into a place of its own. */
template <bool FP8> struct StoredRow {
    static const int PIECES = FP8 ? (LATENT + LATENT / 128 * 4 + TAIL * 2) / 16 : LATENT_WIDTH * 2 / 16;
    static const int PITCH = FP8 ? PIECES * 16 : LATENT_PITCH * 2;      /* bytes */
};

template <bool FP8> struct LatentShared {
    __nv_bfloat16 query[LATENT_HEADS * LATENT_PITCH];
    uint8_t stored[2][TILE_KEYS * StoredRow<FP8>::PITCH];
    __nv_bfloat16 widened[FP8 ? TILE_KEYS * LATENT_PITCH : 8];
    float scores[LATENT_PARTS][LATENT_HEADS * SCORE_PITCH];
    __nv_bfloat16 weights[LATENT_HEADS * WEIGHT_PITCH];
    float maximum[LATENT_HEADS], sum[LATENT_HEADS], shrink[LATENT_HEADS];
    DeviceRow ids[SPLIT_KEYS];
};

/* n rows of the selection, from id `first` of the chunk on, begin their way into shared memory; the others of the tile are zeros. */
template <bool FP8>
static __device__ void start_tile(LatentShared<FP8> *shared, const SelectedKeys &keys, int turn, int first, int n) {
    for (int i = threadIdx.x; i < TILE_KEYS * StoredRow<FP8>::PIECES; i += LATENT_THREADS) {
        const int s = i / StoredRow<FP8>::PIECES, p = i % StoredRow<FP8>::PIECES;
        const uint8_t *row = row_at(keys.pool, keys.format.stride, shared->ids[s < n ? first + s : first]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(shared_address(shared->stored[turn] + s * StoredRow<FP8>::PITCH + 16 * p)), "l"(row + 16 * p),
                        "r"(s < n ? 16 : 0) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* fp8 rows as bf16: 512 values with a scale for each 128, then 64 that are bf16 already. */
static __device__ void widen_tile(LatentShared<true> *shared, int turn) {
    const int pieces = LATENT / 16 + TAIL / 8;
    for (int i = threadIdx.x; i < TILE_KEYS * pieces; i += LATENT_THREADS) {
        const int s = i / pieces, p = i % pieces;
        const uint8_t *row = shared->stored[turn] + s * StoredRow<true>::PITCH;
        __nv_bfloat16 *to = shared->widened + s * LATENT_PITCH;
        if (p >= LATENT / 16) {
            const int at = p - LATENT / 16;
            *(uint4 *)(to + LATENT + at * 8) = *(const uint4 *)(row + LATENT + LATENT / 128 * 4 + at * 16);
            continue;
        }
        const float scale = *(const float *)(row + LATENT + p / 8 * 4);
        const uint4 piece = *(const uint4 *)(row + 16 * p);
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
        uint32_t out[8];
#pragma unroll
        for (int w = 0; w < 8; w++) {
            const __nv_fp8x2_storage_t two = (__nv_fp8x2_storage_t)(words[w / 2] >> 16 * (w % 2));
            const float2 value = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
            out[w] = pair_bf16(value.x * scale, value.y * scale);
        }
        *(uint4 *)(to + p * 16) = make_uint4(out[0], out[1], out[2], out[3]);
        *(uint4 *)(to + p * 16 + 8) = make_uint4(out[4], out[5], out[6], out[7]);
    }
}

/* A part of the scores of 16 heads and all keys of a tile: the sum over a quarter of the values. */
template <bool FP8>
static __device__ void score_tile(LatentShared<FP8> *shared, const __nv_bfloat16 *rows, int head_group, int part) {
    const int lane = threadIdx.x % 32, first = part * (LATENT_WIDTH / LATENT_PARTS);
    float c[TILE_KEYS / 8][4] = {};
    const __nv_bfloat16 *a_row = shared->query + (head_group * 16 + lane % 16) * LATENT_PITCH + lane / 16 * 8 + first,
                        *b_row = rows + (lane % 8 + lane / 16 * 8) * LATENT_PITCH + lane / 8 % 2 * 8 + first;
#pragma unroll
    for (int k = 0; k < LATENT_WIDTH / LATENT_PARTS; k += 16) {
        uint32_t a[4], b[2][4];
        load_matrices(a, a_row + k);
        load_matrices(b[0], b_row + k);
        load_matrices(b[1], b_row + 16 * LATENT_PITCH + k);
#pragma unroll
        for (int t = 0; t < TILE_KEYS / 8; t++) multiply_bf16(c[t], a, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
    }
    float *scores = shared->scores[part] + (head_group * 16 + lane / 4) * SCORE_PITCH + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < TILE_KEYS / 8; t++) {
        *(float2 *)(scores + t * 8) = make_float2(c[t][0], c[t][1]);
        *(float2 *)(scores + 8 * SCORE_PITCH + t * 8) = make_float2(c[t][2], c[t][3]);
    }
}

/* Scores become weights; eight lanes share a head, and each takes four neighbouring keys. */
template <bool FP8> static __device__ void weigh_tile(LatentShared<FP8> *shared, int n, float scale) {
    const int head = threadIdx.x / 8, first = threadIdx.x % 8 * 4, at = head * SCORE_PITCH + first;
    float score[4] = {}, largest = -FLT_MAX, total = 0;
#pragma unroll
    for (int part = 0; part < LATENT_PARTS; part++) {
        const float4 four = *(const float4 *)(shared->scores[part] + at);
        score[0] += four.x, score[1] += four.y, score[2] += four.z, score[3] += four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        score[i] = first + i < n ? score[i] * scale : -FLT_MAX;
        largest = fmaxf(largest, score[i]);
    }
    for (int step = 1; step < 8; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float before = shared->maximum[head];
    largest = fmaxf(largest, before);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        score[i] = first + i < n ? __expf(score[i] - largest) : 0;
        total += score[i];
    }
    *(uint2 *)(shared->weights + head * WEIGHT_PITCH + first) = make_uint2(pair_bf16(score[0], score[1]),
                                                                           pair_bf16(score[2], score[3]));
    for (int step = 1; step < 8; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    if (threadIdx.x % 8) return;
    const float shrink = __expf(before - largest);
    shared->shrink[head] = shrink;
    shared->sum[head] = shared->sum[head] * shrink + total;
    shared->maximum[head] = largest;
}

/* total [16 heads, a quarter of the values] = total * shrink + weights . latents */
template <bool FP8>
static __device__ void add_tile(float (&total)[LATENT_TILES][4], const LatentShared<FP8> *shared, const __nv_bfloat16 *rows,
                                int head_group, int part) {
    const int lane = threadIdx.x % 32;
    const float above = shared->shrink[head_group * 16 + lane / 4], below = shared->shrink[head_group * 16 + lane / 4 + 8];
#pragma unroll
    for (int t = 0; t < LATENT_TILES; t++) total[t][0] *= above, total[t][1] *= above, total[t][2] *= below, total[t][3] *= below;
#pragma unroll
    for (int k = 0; k < TILE_KEYS; k += 16) {
        uint32_t a[4], b[4];
        load_matrices(a, shared->weights + (head_group * 16 + lane % 16) * WEIGHT_PITCH + k + lane / 16 * 8);
        const __nv_bfloat16 *b_row = rows + (k + lane % 16) * LATENT_PITCH + part * (LATENT / LATENT_PARTS) + lane / 16 * 8;
#pragma unroll
        for (int t = 0; t < LATENT_TILES; t += 2) {
            load_transposed(b, b_row + t * 8);
            multiply_bf16(total[t], a, b[0], b[1]);
            multiply_bf16(total[t + 1], a, b[2], b[3]);
        }
    }
}

/* One chunk of one row's selection, for up to 64 heads. The next tile is on its way from memory while one is worked on. */
template <bool FP8>
static __global__ void __launch_bounds__(LATENT_THREADS, 1)
latent_kernel(SelectedKeys lists, float *parts, const float *q, int first_row, int heads, float scale, int chunks) {
    extern __shared__ __align__(16) uint8_t latent_shared[];
    LatentShared<FP8> *shared = (LatentShared<FP8> *)latent_shared;
    const int r = first_row + blockIdx.x;
    const SelectedKeys keys = lists.of(r);
    const int first_head = blockIdx.y * LATENT_HEADS, n_heads = min(heads - first_head, (int)LATENT_HEADS),
              chunk = blockIdx.z, begin = chunk * SPLIT_KEYS, end = min(keys.length, begin + SPLIT_KEYS), warp = threadIdx.x / 32,
              lane = threadIdx.x % 32, head_group = warp % 4, quarter = warp / 4;
    const bool works = head_group * 16 < n_heads;
    if (begin >= end) return;
    for (int i = threadIdx.x; i < end - begin; i += LATENT_THREADS) shared->ids[i] = keys.locations[begin + i];
    __syncthreads();
    start_tile(shared, keys, 0, 0, min(end - begin, (int)TILE_KEYS));
    const float *queries = q + ((size_t)r * heads + first_head) * LATENT_WIDTH;
#pragma unroll 9
    for (int i = threadIdx.x; i < LATENT_HEADS * LATENT_WIDTH / 4; i += LATENT_THREADS) {
        const int head = i / (LATENT_WIDTH / 4), j = i % (LATENT_WIDTH / 4) * 4;
        const float4 four = head < n_heads ? *(const float4 *)(queries + head * LATENT_WIDTH + j) : make_float4(0, 0, 0, 0);
        *(uint2 *)(shared->query + head * LATENT_PITCH + j) = make_uint2(pair_bf16(four.x, four.y), pair_bf16(four.z, four.w));
    }
    if (threadIdx.x < LATENT_HEADS) shared->maximum[threadIdx.x] = -FLT_MAX, shared->sum[threadIdx.x] = 0;
    float total[LATENT_TILES][4] = {};
    for (int at = begin, turn = 0; at < end; at += TILE_KEYS, turn ^= 1) {
        const int left = end - at - TILE_KEYS;
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        if (left > 0) start_tile(shared, keys, turn ^ 1, at + TILE_KEYS - begin, min(left, (int)TILE_KEYS));
        const __nv_bfloat16 *rows = (const __nv_bfloat16 *)shared->stored[turn];
        if constexpr (FP8) {
            widen_tile(shared, turn);
            rows = shared->widened;
            __syncthreads();
        }
        if (works) score_tile(shared, rows, head_group, quarter);
        __syncthreads();
        weigh_tile(shared, min(end - at, (int)TILE_KEYS), scale);
        __syncthreads();
        if (works) add_tile(total, shared, rows, head_group, quarter);
    }
    __syncthreads();
    for (int i = 0; i < 2 && works; i++) {
        const int head = head_group * 16 + lane / 4 + 8 * i;
        float *part = partial_of(parts, blockIdx.x, first_head + head, heads, chunk, chunks, LATENT);
        if (!quarter && lane % 4 == 0) part[0] = shared->maximum[head], part[1] = shared->sum[head];
#pragma unroll
        for (int t = 0; t < LATENT_TILES; t++)
            *(float2 *)(part + 2 + quarter * (LATENT / LATENT_PARTS) + t * 8 + lane % 4 * 2) = make_float2(total[t][2 * i],
                                                                                                           total[t][2 * i + 1]);
    }
}

/* ---- launches */

/* Runs rows in groups whose parts fit: work(first row, rows, chunks) for each, then their merge. */
template <typename Keys, typename Work>
static void attend_in_groups(const Keys &keys, float *y, int n_rows, int heads, int value_dim, int longest, Work work) {
    const int chunks = divide_up(longest, SPLIT_KEYS);
    const size_t one = (size_t)heads * chunks * (value_dim + 2);
    if (one > PARTIAL_FLOATS) {
        fprintf(stderr, "tide: lists of %d rows are too long for the GPU's attention over %d heads: lower -c or --index-topk\n",
                longest, heads);
        _exit(1);
    }
    const int most = (int)(PARTIAL_FLOATS / one);
    for (int first = 0; first < n_rows; first += most) {
        const int n = n_rows - first < most ? n_rows - first : most;
        work(first, n, chunks);
        merge_kernel<<<dim3(n, heads), 128, 0, gpu.stream>>>(keys, y, partials, first, heads, value_dim, chunks);
        LAUNCHED();
    }
}

template <typename Keys>
static void attend(const Keys &keys, float *y, const float *q, int n_rows, int heads, int kv_heads, int key_dim, int value_dim,
                   float scale, int longest) {
    attend_in_groups(keys, y, n_rows, heads, value_dim, longest, [&](int first, int n, int chunks) {
        const size_t values = Keys::shared ? 0 : TILE_KEYS * value_dim,
                     bytes = (TILE_KEYS * (key_dim + 1) + ATTEND_WARPS * key_dim + values) * sizeof(float);
        const int tiles = divide_up(heads / kv_heads, ATTEND_WARPS), side = chunks < 64 ? chunks : 64;
        allow_shared(attend_kernel<Keys>, bytes);
        attend_kernel<Keys><<<dim3(n, kv_heads * tiles, side), 32 * ATTEND_WARPS, bytes, gpu.stream>>>(
            keys, partials, q, first, heads, kv_heads, key_dim, value_dim, scale, chunks);
        LAUNCHED();
    });
}

static void sparse_attention(float *z, const float *q, const RowPool *pool, const RowFormat *format, const DeviceRow *locations,
                             const int *count, int capacity, int n_rows, int heads, float scale) {
    const SelectedKeys keys = {*pool, *format, locations, count, capacity, 0};
    const bool fast = format->dtype != KV_F32 && format->quantised == LATENT && format->plain == TAIL && heads % 16 == 0
                      && (format->dtype == KV_BF16 || format->group == 128);
    if (!n_rows) return;
    if (!fast)
        return attend(keys, z, q, n_rows, heads, 1, format->quantised + format->plain, format->quantised, scale, capacity);
    attend_in_groups(keys, z, n_rows, heads, LATENT, capacity, [&](int first, int n, int chunks) {
        auto kernel = format->dtype == KV_F8 ? latent_kernel<true> : latent_kernel<false>;
        const size_t bytes = format->dtype == KV_F8 ? sizeof(LatentShared<true>) : sizeof(LatentShared<false>);
        allow_shared(kernel, bytes);
        kernel<<<dim3(n, divide_up(heads, LATENT_HEADS), chunks), LATENT_THREADS, bytes, gpu.stream>>>(
            keys, partials, q, first, heads, scale, chunks);
        LAUNCHED();
    });
}

static void dense_attention(float *y, const float *q, const RowPool *pool, const RowFormat *format, const DevicePage *pages,
                            int context_pages, const Row *rows, int n_rows, int heads, int kv_heads, int head_dim, float scale) {
    const HistoryKeys keys = {*pool, *format, pages, rows, context_pages, kv_heads, head_dim, 0};
    if (n_rows) attend(keys, y, q, n_rows, heads, kv_heads, head_dim, head_dim, scale, context_pages * PAGE_ROWS);
}

static void block_attention(float *y, const float *q, const float *kv, const uint8_t *ring, const RowFormat *format,
                            int ring_rows, const DraftBlock *blocks, int n_blocks, int block_size, int window, bool causal,
                            int heads, int kv_heads, int head_dim, float scale) {
    const BlockKeys keys = {ring, *format, kv, blocks, ring_rows, block_size, window, kv_heads, head_dim, causal, 0, 0, 0};
    if (n_blocks) attend(keys, y, q, n_blocks * block_size, heads, kv_heads, head_dim, head_dim, scale, ring_rows + block_size);
}

/* =====================================================================================================================
 * Selection by keys
 *
 * Owns: how a thread block finds the best of many things. Each has a 64-bit key that nothing else has, the order first and the
 * tie-break in its low bits, so that "the best k" is everything from one key on, whatever order threads run in. Victims of the
 * hot cache, the filters of sampling and the division of a budget are all found this way.
 */

enum { WARP = 32, KEY_BINS = 256 };

/* Unsigned order is the scores' order; -0 counts as 0. */
static __device__ uint32_t score_key(float score) {
    uint32_t bits = __float_as_uint(score + 0.0f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

/* A score and the id that has it: higher scores first, and of equal ones the lower id. And back. */
static __device__ uint64_t token_key(float score, int id) { return (uint64_t)score_key(score) << 32 | (uint32_t)~id; }
static __device__ int key_token(uint64_t key) { return (int)~(uint32_t)key; }
static __device__ float key_score(uint64_t key) {
    uint32_t bits = (uint32_t)(key >> 32);
    return __uint_as_float(bits & 0x80000000 ? bits & 0x7fffffff : ~bits);
}

/* The sum of the values of all threads before this one, and of all; sums: shared, one int for each warp. */
static __device__ int scan_block(int value, int *sums, int *total) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int own = value;
    for (int step = 1; step < WARP; step *= 2) {
        int other = __shfl_up_sync(~0u, own, step);
        if (lane >= step) own += other;
    }
    if (lane == WARP - 1) sums[warp] = own;
    __syncthreads();
    int all = lane < (int)blockDim.x / WARP ? sums[lane] : 0;
    for (int step = 1; step < WARP; step *= 2) {
        int other = __shfl_up_sync(~0u, all, step);
        if (lane >= step) all += other;
    }
    *total = __shfl_sync(~0u, all, WARP - 1);
    int before = __shfl_sync(~0u, all, warp ? warp - 1 : 0);
    __syncthreads();                                /* sums may be used again */
    return own - value + (warp ? before : 0);
}

/* What is still wanted of things in descending order: so many, or so much of their mass, whichever is reached first. */
typedef struct Wanted {
    unsigned count;
    unsigned long long mass;    /* fixed point, so that sums do not depend on their order */
    unsigned long long before;  /* mass of what is taken already */
    int bin;                    /* where the last of them lies, */
    unsigned members;           /* beside how many, itself among them */
    unsigned long long weight;  /* and their mass */
} Wanted;

static const unsigned ANY_COUNT = UINT32_MAX;
static const unsigned long long ANY_MASS = UINT64_MAX;

/* By one warp: the bin in which the wanted is reached; bin 0 holds the best. mass: NULL where only the count matters. */
static __device__ void walk_bins(Wanted *wanted, const unsigned *count, const unsigned long long *mass, int n_bins) {
    const int lane = threadIdx.x, each = n_bins / WARP, first = lane * each;
    unsigned own = 0;
    unsigned long long own_mass = 0;
    for (int bin = first; bin < first + each; bin++) own += count[bin], own_mass += mass ? mass[bin] : 0;
    unsigned sum = own;
    unsigned long long sum_mass = own_mass;
    for (int step = 1; step < WARP; step *= 2) {
        unsigned other = __shfl_up_sync(~0u, sum, step);
        unsigned long long other_mass = __shfl_up_sync(~0u, sum_mass, step);
        if (lane >= step) sum += other, sum_mass += other_mass;
    }
    const unsigned reached = __ballot_sync(~0u, sum >= wanted->count || sum_mass >= wanted->mass);
    __syncwarp();                                   /* all lanes have read what one now writes */
    if (lane != (reached ? __ffs(reached) - 1 : WARP - 1)) return;
    sum -= own, sum_mass -= own_mass;
    int bin = first;
    for (; bin < first + each - 1; bin++) {
        unsigned long long weight = mass ? mass[bin] : 0;
        if (sum + count[bin] >= wanted->count || sum_mass + weight >= wanted->mass) break;
        sum += count[bin], sum_mass += weight;
    }
    *wanted = (Wanted){wanted->count == ANY_COUNT ? ANY_COUNT : wanted->count - sum,
                       wanted->mass == ANY_MASS ? ANY_MASS : wanted->mass - sum_mass,
                       wanted->before + sum_mass, bin, count[bin], mass ? mass[bin] : 0};
}

typedef struct KeyBins {        /* shared memory of find_cut() */
    unsigned count[KEY_BINS];
    unsigned long long mass[KEY_BINS];
    Wanted wanted;              /* the caller's, before; what led to the cut, afterwards */
} KeyBins;

/* A number that the wanted keys, and no other of these n, reach: found byte by byte from `shift` down, until what is left is all
 * wanted. key(i) has mass weigh(i). Called by all threads; bins->wanted is set, and a barrier lies behind that. */
template <bool weighed, typename Key, typename Weigh>
static __device__ uint64_t find_cut(KeyBins *bins, int n, int shift, Key key, Weigh weigh) {
    uint64_t cut = 0;
    for (;; shift -= 8) {
        for (int bin = threadIdx.x; bin < KEY_BINS; bin += blockDim.x) bins->count[bin] = 0, bins->mass[bin] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const uint64_t k = key(i);
            if (shift < 56 && (k ^ cut) >> (shift + 8)) continue;
            const int bin = KEY_BINS - 1 - (int)(k >> shift & 255);
            atomicAdd(&bins->count[bin], 1u);
            if (weighed) atomicAdd(&bins->mass[bin], weigh(i));
        }
        __syncthreads();
        if (threadIdx.x < WARP) walk_bins(&bins->wanted, bins->count, weighed ? bins->mass : NULL, KEY_BINS);
        __syncthreads();
        cut |= (uint64_t)(KEY_BINS - 1 - bins->wanted.bin) << shift;
        if (!shift || bins->wanted.members == 1 || bins->wanted.members == bins->wanted.count) break;
    }
    return cut;
}

/* =====================================================================================================================
 * The hierarchy's operations
 *
 * Owns: the resolver (paper 3.2) and the copies that it plans. A thread block resolves one session's rows: first the tail, the
 * ready pages and the array from rows to hot slots, which needs nothing but reads; only where rows are missing it makes their
 * union (eq. 6), a bitmap in shared memory, and looks for victims. It relies on a run having no session twice, so that no two
 * thread blocks share a hot cache.
 */

/* What a resolve needs of a Cache, for kernels. */
typedef struct Resolver {
    CacheTables seen;
    HotTables slots;
    int group, groups, context_pages, hot_pages, tail_ring, hot_rows, staging_rows;
    int32_t first_staged;       /* device rows from here on are staging's */
    bool scan;                  /* LOOKUP_SCAN */
    int range;                  /* rows that the bitmap holds at once, a multiple of 128 */
} Resolver;

static Resolver resolver_of(const Cache *cache, int group) {
    return (Resolver){cache->seen, cache->slots, group, cache->groups, cache->context_pages, cache->hot_pages, cache->tail_ring,
                      cache->hot_rows, cache->staging_rows, cache->device_pages.n_pages * PAGE_ROWS,
                      cache->lookup == LOOKUP_SCAN, 0};
}

/* The device page that holds a position's row without any search, or 0. */
static __device__ int direct_page(const Resolver &cache, int session, int position, int tail_base) {
    const int page = position / PAGE_ROWS;
    return position >= tail_base ? cache.seen.tail[session * cache.tail_ring + (page & (cache.tail_ring - 1))].id
                                 : cache.seen.ready[(size_t)session * cache.context_pages + page].id;
}

static __device__ DeviceRow hot_location(const Resolver &cache, int session, int slot) {
    const DevicePage page = cache.seen.hot[(size_t)session * cache.hot_pages + slot / PAGE_ROWS];
    return (DeviceRow){page.id * PAGE_ROWS + slot % PAGE_ROWS};
}

/* One session's queries while they are resolved together. */
typedef struct Search {
    int session, tail_base;
    int entries;                /* of the selections that follow */
    const int *ids;             /* [entries] selected rows, or -1 */
    DeviceRow *locations;       /* [entries] */
    HostRow *from;              /* [entries] the block's part of the plan, and the next */
    DeviceRow *to;
    HotCache hot;
    uint32_t now;               /* this resolve, as the stamps count */
} Search;

typedef struct ResolveShared {
    int picked[TIERS];
    int low, high;              /* of the rows that are still sought; high < low: none */
    int sums[WARP];
    KeyBins bins;
} ResolveShared;

enum { SOUGHT = -2, NOWHERE = -1, IN_FLIGHT = 4 };      /* IN_FLIGHT: entries a thread looks up at a time, to hide the latency */

/* Adds each thread's counts to the block's. */
static __device__ void count_picked(ResolveShared *shared, Tier tier, int count) {
    count = __reduce_add_sync(~0u, count);
    if (threadIdx.x % WARP == 0 && count) atomicAdd(&shared->picked[tier], count);
}

/* First look: what is found at once gets its location and, in the hot cache, its stamp; the others are sought. */
static __device__ void look_up(const Resolver &cache, const Search &search, ResolveShared *shared) {
    int tail = 0, optional = 0, hot = 0, low = INT_MAX, high = -1;
    for (int first = threadIdx.x; first < search.entries; first += IN_FLIGHT * blockDim.x) {
        int position[IN_FLIGHT], page[IN_FLIGHT], slot[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            position[u] = first + u * blockDim.x < search.entries ? search.ids[first + u * blockDim.x] : -1;
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            page[u] = position[u] < 0 ? 0 : direct_page(cache, search.session, position[u], search.tail_base);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            slot[u] = position[u] < 0 || page[u] || cache.scan ? -1 : search.hot.slot_of[position[u]] - 1;
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            if (first + u * blockDim.x >= search.entries) break;
            DeviceRow location = {NOWHERE};
            if (page[u]) {
                location.id = page[u] * PAGE_ROWS + position[u] % PAGE_ROWS;
                tail += position[u] >= search.tail_base, optional += position[u] < search.tail_base;
            } else if (slot[u] >= 0) {
                location = hot_location(cache, search.session, slot[u]);
                search.hot.stamp[slot[u]] = search.now;
                hot++;
            } else if (position[u] >= 0) {
                location.id = SOUGHT;
                low = min(low, position[u]), high = max(high, position[u]);
            }
            search.locations[first + u * blockDim.x] = location;
        }
    }
    count_picked(shared, TIER_TAIL, tail), count_picked(shared, TIER_OPTIONAL, optional), count_picked(shared, TIER_HOT, hot);
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (threadIdx.x % WARP == 0 && high >= 0) atomicMin(&shared->low, low), atomicMax(&shared->high, high);
}

/* The paper's lookup: each tag of the hot cache asks whether its row is sought, stamps its slot and takes the bit away. */
static __device__ void scan_tags(const Resolver &cache, const Search &search, uint32_t *bits, int base, int rows) {
    for (int slot = threadIdx.x; slot < cache.hot_rows; slot += blockDim.x) {
        const int row = search.hot.tag[slot] - base;
        if (search.hot.tag[slot] < 0 || row < 0 || row >= rows || !(bits[row / 32] >> row % 32 & 1)) continue;
        search.hot.stamp[slot] = search.now;
        atomicAnd(&bits[row / 32], ~(1u << row % 32));
    }
}

/* Four words of the bitmap, from row `first` on, as entries of the plan from number `at` on. to holds the rows themselves. */
static __device__ void list_bits(const Resolver &cache, const Search &search, const uint4 &words, int first, int at) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    const HostPage *host = cache.seen.host + (size_t)search.session * cache.context_pages;
#pragma unroll
    for (int i = 0; i < 4; i++)
        for (uint32_t left = word[i]; left; left &= left - 1, at++) {
            const int row = first + 32 * i + __ffs(left) - 1;
            search.from[at].id = (int64_t)host[row / PAGE_ROWS].id * PAGE_ROWS + row % PAGE_ROWS;
            search.to[at].id = row;
        }
}

/* The union of what is missing (eq. 6), ascending, into the plan; returns how many rows. A context that is larger than the bitmap
 * is gone through in ranges. */
static __device__ int list_missing(const Resolver &cache, const Search &search, ResolveShared *shared, uint32_t *bits) {
    const int low = shared->low / 128 * 128, high = shared->high, step = 128 * (int)blockDim.x;
    int listed = 0;
    for (int base = low; base <= high; base += cache.range) {
        const int rows = min(cache.range, (high - base) / 128 * 128 + 128);
        for (int row = 128 * threadIdx.x; row < rows; row += step) ((uint4 *)bits)[row / 128] = make_uint4(0, 0, 0, 0);
        __syncthreads();
        for (int i = threadIdx.x; i < search.entries; i += blockDim.x) {
            const int row = search.ids[i] - base;
            if (search.locations[i].id == SOUGHT && row >= 0 && row < rows) atomicOr(&bits[row / 32], 1u << row % 32);
        }
        __syncthreads();
        if (cache.scan) scan_tags(cache, search, bits, base, rows);
        __syncthreads();
        for (int first = 0; first < rows; first += step) {
            const int row = first + 128 * threadIdx.x;
            uint4 words = row < rows ? ((uint4 *)bits)[row / 128] : make_uint4(0, 0, 0, 0);
            const int own = __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
            int total, at = scan_block(own, shared->sums, &total);
            list_bits(cache, search, words, base + row, listed + at);
            listed += total;
        }
    }
    __syncthreads();
    return listed;
}

/* After a scan: the rows that some tag has are in the array too, which says where. */
static __device__ void locate_scanned(const Resolver &cache, const Search &search, ResolveShared *shared) {
    int hot = 0;
    for (int i = threadIdx.x; i < search.entries; i += blockDim.x) {
        const int slot = search.locations[i].id == SOUGHT ? search.hot.slot_of[search.ids[i]] - 1 : -1;
        if (slot < 0) continue;
        search.locations[i] = hot_location(cache, search.session, slot);
        hot++;
    }
    count_picked(shared, TIER_HOT, hot);
}

/* Missing rows take the slots used least recently, ties to the lower slot: the i-th row, ascending, the i-th such slot. All hits
 * have their stamps by now, so none of them is a victim. Returns how many rows found no slot: the first of the plan. */
static __device__ int take_victims(const Resolver &cache, const Search &search, ResolveShared *shared, int missing) {
    const uint32_t *stamp = search.hot.stamp;
    int open, own = 0;
    for (int slot = threadIdx.x; slot < cache.hot_rows; slot += blockDim.x) own += stamp[slot] != search.now;
    scan_block(own, shared->sums, &open);
    const int room = min(missing, open), beyond = missing - room;
    if (!room) return beyond;
    if (threadIdx.x == 0) shared->bins.wanted = (Wanted){.count = (unsigned)room, .mass = ANY_MASS};
    __syncthreads();
    auto age = [&](int slot) { return (uint64_t)(search.now - stamp[slot]) << 16 | (uint64_t)(0xffff - slot); };
    const int shift = search.now < 1u << 8 ? 16 : search.now < 1u << 16 ? 24 : search.now < 1u << 24 ? 32 : 40;
    const uint64_t cut = find_cut<false>(&shared->bins, cache.hot_rows, shift, age, [](int) { return 0ull; });
    for (int first = 0, taken = beyond; first < cache.hot_rows; first += blockDim.x) {
        const int slot = first + threadIdx.x;
        const bool victim = slot < cache.hot_rows && age(slot) >= cut;
        int total, at = taken + scan_block(victim, shared->sums, &total);
        taken += total;
        if (!victim) continue;
        const int row = search.to[at].id, old = search.hot.tag[slot];
        if (old >= 0) search.hot.slot_of[old] = 0;
        search.hot.tag[slot] = row;
        search.hot.stamp[slot] = search.now;
        search.hot.slot_of[row] = (uint16_t)(slot + 1);
        search.to[at] = hot_location(cache, search.session, slot);
    }
    return beyond;
}

/* Which of n ascending rows that is. */
static __device__ int find_row(const DeviceRow *rows, int n, int row) {
    int low = 0;
    for (int high = n - 1; low < high;) {
        const int middle = (low + high) / 2;
        if (rows[middle].id < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Where sought rows come to lie. The first `beyond` of the plan are staged, from device row `staged` on. */
static __device__ void locate_missing(const Search &search, const Resolver &cache, ResolveShared *shared, int beyond,
                                      int staged) {
    int host = 0;
    for (int i = threadIdx.x; i < search.entries; i += blockDim.x) {
        if (search.locations[i].id != SOUGHT) continue;
        const int row = search.ids[i], slot = search.hot.slot_of[row] - 1;
        search.locations[i] = slot >= 0 ? hot_location(cache, search.session, slot)
                                        : (DeviceRow){staged + find_row(search.to, beyond, row)};
        host++;
    }
    count_picked(shared, TIER_HOST, host);
    __syncthreads();
    for (int i = threadIdx.x; i < beyond; i += blockDim.x) search.to[i].id = staged + i;
}

/* Misses of one session's rows: its plan, their places, and how many there are. */
static __device__ int place_missing(const Resolver &cache, const Search &search, ResolveShared *shared, uint32_t *bits,
                                    int staging, PassReport *report) {
    const int missing = list_missing(cache, search, shared, bits);
    if (cache.scan) locate_scanned(cache, search, shared);
    __syncthreads();
    if (!missing) return 0;
    const int beyond = take_victims(cache, search, shared, missing);
    __syncthreads();
    locate_missing(search, cache, shared, beyond, cache.first_staged + staging * cache.staging_rows);
    if (threadIdx.x == 0) {
        atomicAdd(&report->fetched, missing);
        if (beyond) atomicAdd(&report->staged, beyond);
    }
    return missing;
}

/* A thread block for each row of the run; the one of a session's first row works for all its rows, at most one for each thread.
 * Inert rows, of no session, are found nowhere. */
static __global__ void __launch_bounds__(1024) resolve_blocks(Resolver cache, Selection selection, const Row *rows, int begin,
                                                              int end, DeviceRow *locations, MissPlan plan, PassReport *report) {
    extern __shared__ uint4 bitmap[];
    __shared__ ResolveShared shared;
    const int row = begin + blockIdx.x, session = rows[row].session, other = begin + threadIdx.x;
    const size_t at = (size_t)row * selection.capacity;
    if (session < 0 || (row > begin && rows[row - 1].session == session)) {
        if (threadIdx.x == 0) plan.count[row] = 0;
        for (int i = threadIdx.x; session < 0 && i < selection.capacity; i += blockDim.x) locations[at + i].id = NOWHERE;
        return;
    }
    const int n = __syncthreads_count(other < end && rows[other].session == session);
    const int staging = __syncthreads_count(other < row && rows[other + 1].session == rows[other].session
                                            && rows[other].session >= 0
                                            && (other == begin || rows[other - 1].session != rows[other].session));
    const size_t state = (size_t)session * cache.groups + cache.group;
    const HotCache hot = {cache.slots.tag + state * cache.hot_rows, cache.slots.stamp + state * cache.hot_rows,
                          cache.slots.slot_of + state * cache.context_pages * PAGE_ROWS, cache.slots.clock + state};
    const Search search = {session, cache.seen.tail_base[session], n * selection.capacity, selection.ids + at, locations + at,
                           plan.from + at, plan.to + at, hot, *hot.clock + 1};
    if (threadIdx.x < TIERS) shared.picked[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.low = INT_MAX, shared.high = -1;
    __syncthreads();
    look_up(cache, search, &shared);
    __syncthreads();
    int missing = 0;
    if (shared.high >= 0) missing = place_missing(cache, search, &shared, (uint32_t *)bitmap, staging, report);
    __syncthreads();
    if (threadIdx.x == 0) *hot.clock = search.now, plan.count[row] = missing;
    if (threadIdx.x < TIERS && shared.picked[threadIdx.x]) atomicAdd(&report->picked[threadIdx.x], shared.picked[threadIdx.x]);
}

/* Without hot caches everything is on the device, so each selected row is looked up by itself. */
static __global__ void locate_resident(Resolver cache, Selection selection, const Row *rows, int begin, DeviceRow *locations,
                                       PassReport *report) {
    const int row = begin + blockIdx.y, session = rows[row].session, i = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t at = (size_t)row * selection.capacity;
    const int position = i < selection.capacity && session >= 0 ? selection.ids[at + i] : -1;
    const int tail_base = session >= 0 ? cache.seen.tail_base[session] : 0;
    const int page = position >= 0 ? direct_page(cache, session, position, tail_base) : 0;
    if (i < selection.capacity) locations[at + i].id = page ? page * PAGE_ROWS + position % PAGE_ROWS : NOWHERE;
    const int tail = __syncthreads_count(page && position >= tail_base), found = __syncthreads_count(page != 0);
    if (threadIdx.x) return;
    if (tail) atomicAdd(&report->picked[TIER_TAIL], tail);
    if (found > tail) atomicAdd(&report->picked[TIER_OPTIONAL], found - tail);
}

static void resolve(Cache *cache, int group, const Selection *selection, const Row *rows, int begin, int end, int run,
                    DeviceRow *locations, MissPlan *plan, PassReport *report) {
    (void)run;                                      /* entries lie where their block begins */
    const int n = end - begin;
    if (n <= 0) return;
    Resolver resolver = resolver_of(cache, group);
    if (!cache->hot_rows) {
        locate_resident<<<dim3(divide_up(selection->capacity, 256), n), 256, 0, gpu.stream>>>(resolver, *selection, rows, begin,
                                                                                              locations, report);
        LAUNCHED();
        return;
    }
    const size_t spare = gpu.shared_per_block - 2 * sizeof(ResolveShared);
    const size_t rows_at_once = spare * 8 < (size_t)1 << 20 ? spare * 8 : (size_t)1 << 20;
    const int context = divide_up(cache->context_pages * PAGE_ROWS, 128) * 128;
    resolver.range = (size_t)context < rows_at_once ? context : (int)(rows_at_once / 128 * 128);
    const size_t bytes = (size_t)resolver.range / 8;
    allow_shared(resolve_blocks, bytes + sizeof(ResolveShared));
    const int threads = n > gpu.multiprocessors ? 512 : 1024;           /* two thread blocks fit a multiprocessor, or one */
    resolve_blocks<<<n, threads, bytes, gpu.stream>>>(resolver, *selection, rows, begin, end, locations, *plan, report);
    LAUNCHED();
}

enum { FETCH_BLOCKS = 16, FETCH_THREADS = 512, FETCH_PIECES = 4 }; /* 16 bytes a piece: 512 KB under way, which fills the link */

/* One source's rows and what copies into them need. */
typedef struct Fetch {
    const uint4 *host;
    uint4 *pool, *staging;
    int32_t first_staged;
    int pieces;                 /* of a row, 16 bytes each */
    int capacity;               /* entries of the plan for each row of the pass */
} Fetch;

/* Piece `piece` of all that is planned: where it is read and where it goes. starts: [n] entries before each row's. */
static __device__ void find_piece(const Fetch &fetch, const MissPlan &plan, const int *starts, int n, int begin, int piece,
                                  const uint4 **from, uint4 **to) {
    const int entry = piece / fetch.pieces, part = piece % fetch.pieces;
    int low = 0;
    for (int high = n - 1; low < high;) {           /* the last block that starts at the entry or before */
        const int middle = (low + high + 1) / 2;
        if (starts[middle] <= entry) low = middle;
        else high = middle - 1;
    }
    const size_t at = (size_t)(begin + low) * fetch.capacity + (entry - starts[low]);
    const int32_t row = plan.to[at].id;
    *from = fetch.host + plan.from[at].id * fetch.pieces + part;
    *to = (row < fetch.first_staged ? fetch.pool + (size_t)row * fetch.pieces
                                    : fetch.staging + (size_t)(row - fetch.first_staged) * fetch.pieces) + part;
}

/* Host memory is read a link's round trip away, so every thread asks for several pieces before it waits for any. */
static __global__ void __launch_bounds__(FETCH_THREADS) copy_missing(Fetch fetch, MissPlan plan, int begin, int end,
                                                                     PassReport *report) {
    __shared__ int starts[MAX_PASS_ROWS], sums[WARP];
    const int n = end - begin;
    int total;
    const int before = scan_block((int)threadIdx.x < n ? plan.count[begin + threadIdx.x] : 0, sums, &total);
    if ((int)threadIdx.x < n) starts[threadIdx.x] = before;
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(&report->copied, total);
    const int pieces = total * fetch.pieces, chunk = FETCH_PIECES * WARP, warps = FETCH_BLOCKS * FETCH_THREADS / WARP;
    const int warp = threadIdx.x / WARP * FETCH_BLOCKS + blockIdx.x;
    for (int first = warp * chunk + threadIdx.x % WARP; first < pieces; first += warps * chunk) {
        uint4 value[FETCH_PIECES], *to[FETCH_PIECES];
#pragma unroll
        for (int u = 0; u < FETCH_PIECES; u++) {
            const uint4 *from;
            to[u] = NULL;
            if (first + u * WARP >= pieces) continue;
            find_piece(fetch, plan, starts, n, begin, first + u * WARP, &from, &to[u]);
            value[u] = __ldcs(from);
        }
#pragma unroll
        for (int u = 0; u < FETCH_PIECES; u++)
            if (to[u]) *to[u] = value[u];
    }
}

static_assert((int)MAX_PASS_ROWS <= (int)FETCH_THREADS, "each thread counts one row of the run");

static void fetch_rows(Cache *cache, SourceId source, const MissPlan *plan, const Row *rows, int begin, int end, int run,
                       PassReport *report) {
    (void)rows, (void)run;                          /* the plan says where each block's entries begin */
    if (end <= begin || !cache->hot_rows) return;
    const RowPool pool = row_pool(cache, source);
    const Fetch fetch = {(const uint4 *)host_source_rows(cache, source), (uint4 *)pool.rows, (uint4 *)pool.staging, pool.n_rows,
                         (int)(cache->format.stride / sizeof(uint4)), cache->index_topk};
    copy_missing<<<FETCH_BLOCKS, FETCH_THREADS, 0, gpu.stream>>>(fetch, *plan, begin, end, report);
    LAUNCHED();
}

/* A session's groups lie behind each other in every table. */
static void forget_hot(Cache *cache, int session) {
    const HotCache hot = hot_cache(cache, session, 0);
    const size_t groups = (size_t)cache->groups, slots = groups * (size_t)cache->hot_rows;
    if (groups) CUDA(cudaMemsetAsync(hot.clock, 0, groups * sizeof *hot.clock, gpu.stream));
    if (!slots) return;
    CUDA(cudaMemsetAsync(hot.tag, 0xff, slots * sizeof *hot.tag, gpu.stream));
    CUDA(cudaMemsetAsync(hot.stamp, 0, slots * sizeof *hot.stamp, gpu.stream));
    CUDA(cudaMemsetAsync(hot.slot_of, 0, groups * (size_t)cache->context_pages * PAGE_ROWS * sizeof *hot.slot_of, gpu.stream));
}

/* =====================================================================================================================
 * Sampling and acceptance
 *
 * Owns: the choice of a token from logits, and what becomes of drafts; the noise and the order of the filters are backend.c's.
 * A row of logits is cut into SEGMENTS parts, a thread block each, whose results are combined in a later kernel, so one
 * row keeps the whole GPU busy. The filters are prefixes of one order, best logit first and of equal ones the lower token, so
 * together they are one key: the tokens from it on may follow. Everything about a row is found in parallel for all rows; only
 * how far drafts are accepted is decided in order, which by then takes a handful of numbers.
 */

enum { SEGMENTS = 32, SEGMENT_THREADS = 256, ROW_THREADS = 1024, MASS_BITS = 42, DISTANCE_BINS = 2048 };

typedef enum Noise { NOISE_TOKEN, NOISE_DRAFT, NOISE_ACCEPT, NOISE_RESIDUAL } Noise;

typedef struct Pick { double value; int token; } Pick;      /* token -1: none */

/* The best so far; `reach` is 2^32 e^-value and a little, since weights are f32. */
typedef struct Race { Pick pick; float reach; } Race;

typedef struct Law {            /* what may follow a row */
    uint64_t cut;               /* tokens whose key, by logit / temperature, is at least this */
    float best;                 /* the largest logit / temperature; a token's weight is e^(its own - best) */
    int first;                  /* the token that has it */
    double total;               /* of the weights; acceptance by rejection only */
    Noise noise;
    bool draw;                  /* a token is drawn, by `noise` */
    bool weigh;                 /* acceptance by rejection: from weights, not logits */
    bool residual;              /* less what the draft's law gave them */
    Race lead;                  /* `first` with its noise, if it may follow: it leaves few others to be looked at */
} Law;

/* Memory of one operation at a time, taken once. */
static struct Scratch {
    DraftBlock *blocks;         /* [MAX_PASS_ROWS] copies, since the pipeline's lie across the link */
    int *owner;                 /* [MAX_PASS_ROWS] whose row of logits it is */
    int *accepted;              /* [MAX_PASS_ROWS] */
    Law *laws;                  /* [MAX_PASS_ROWS] */
    Pick *picks;                /* [MAX_PASS_ROWS, SEGMENTS] */
    double2 *sums;              /* [MAX_PASS_ROWS, SEGMENTS] */
    uint64_t *keys;             /* [MAX_PASS_ROWS, SEGMENTS, CANDIDATES] */
} scratch;

static bool speculation_start(Error *error) {
    const size_t rows = MAX_PASS_ROWS, parts = rows * SEGMENTS;
    void **field[] = {(void **)&scratch.blocks, (void **)&scratch.owner, (void **)&scratch.accepted, (void **)&scratch.laws,
                      (void **)&scratch.picks, (void **)&scratch.sums, (void **)&scratch.keys};
    const size_t bytes[] = {rows * sizeof(DraftBlock), rows * sizeof(int), rows * sizeof(int), rows * sizeof(Law),
                            parts * sizeof(Pick), parts * sizeof(double2), parts * CANDIDATES * sizeof(uint64_t)};
    for (size_t i = 0; i < sizeof field / sizeof *field && !*field[i]; i++) {
        const cudaError_t status = cudaMalloc(field[i], bytes[i]);
        if (status != cudaSuccess) return fail(error, "cannot take the scratch of sampling: %s", cudaGetErrorString(status));
    }
    return true;
}

/* Thread blocks that work on whole rows at the same time, and so samplers. */
static int samplers(int logit_rows) { return logit_rows < gpu.multiprocessors ? logit_rows : gpu.multiprocessors; }

static inline __host__ __device__ bool is_greedy(const Sampling &sampling) { return !(sampling.temperature > 1e-6f); }

/* Philox 4x32 with ten rounds (Salmon et al. 2011): four random words, of tokens 4 * four to 4 * four + 3. */
static __device__ uint4 noise_words(Noise noise, uint64_t seed, uint64_t session, int position, uint32_t four) {
    const uint64_t key = seed + (uint64_t)noise * 0x9E3779B97F4A7C15u;
    uint4 counter = make_uint4(four, (uint32_t)position, (uint32_t)session, (uint32_t)(session >> 32));
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint32_t low_a = counter.x * 0xD2511F53u, low_b = counter.z * 0xCD9E8D57u;
        const uint32_t high_a = __umulhi(counter.x, 0xD2511F53u), high_b = __umulhi(counter.z, 0xCD9E8D57u);
        counter = make_uint4(high_b ^ counter.y ^ k0, low_b, high_a ^ counter.w ^ k1, low_a);
    }
    return counter;
}

static __device__ uint32_t noise_word(const uint4 &words, int token) {
    const int i = token % 4;
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

static __device__ double unit(uint32_t word) { return (word + 0.5) * 0x1p-32; }
static __device__ double gumbel(uint32_t word) { return -log(-log(unit(word))); }

/* The larger value; of equal ones, the lower token. */
static __device__ Pick better(const Pick &a, const Pick &b) {
    if (a.token < 0 || b.token < 0) return a.token < 0 ? b : a;
    return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

static __device__ void enter_race(Race *race, double value, int token) {
    race->pick = better(race->pick, (Pick){value, token});
    race->reach = (float)(exp(-race->pick.value) * (1.001 * 0x1p32));
}

static __device__ Pick best_of_warp(Pick pick) {
    for (int step = WARP / 2; step; step /= 2) {
        const Pick other = {__shfl_xor_sync(~0u, pick.value, step), __shfl_xor_sync(~0u, pick.token, step)};
        pick = better(pick, other);
    }
    return pick;
}

static __device__ uint64_t max_of_warp(uint64_t key) {
    for (int step = WARP / 2; step; step /= 2) key = max(key, (uint64_t)__shfl_xor_sync(~0u, (unsigned long long)key, step));
    return key;
}

template <typename Value> static __device__ Value sum_of_warp(Value value) {
    for (int step = WARP / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

/* The sum over all threads, in an order that only their number decides. The caller sees to a barrier between two uses of sums. */
static __device__ double sum_of_block(double value, double *sums) {
    value = sum_of_warp(value);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    return sum_of_warp(threadIdx.x % WARP < blockDim.x / WARP ? sums[threadIdx.x % WARP] : 0.0);
}

/* Logits of a segment begin at a multiple of four. */
static __device__ int segment_begin(int segment, int vocab) {
    return min(segment * (divide_up(divide_up(vocab, SEGMENTS), 4) * 4), vocab);
}

/* Four logits from `at` on; -infinity from `end` on. */
static __device__ float4 load_logits(const float *row, int at, int end, bool wide) {
    if (wide) return __ldg((const float4 *)(row + at));
    return make_float4(row[at], at + 1 < end ? row[at + 1] : -INFINITY, at + 2 < end ? row[at + 2] : -INFINITY,
                       at + 3 < end ? row[at + 3] : -INFINITY);
}

static __device__ bool loads_wide(const float *logits, int vocab) { return vocab % 4 == 0 && (uintptr_t)logits % 16 == 0; }

/* Copies a block from across the link, all of it at once; a barrier has to follow. */
static __device__ void load_block(DraftBlock *shared, const DraftBlock *block) {
    if (threadIdx.x < sizeof(DraftBlock) / sizeof(int)) ((int *)shared)[threadIdx.x] = ((const int *)block)[threadIdx.x];
}

static_assert(sizeof(DraftBlock) / sizeof(int) <= WARP, "a warp loads a block");

/* Copies the blocks to the device and says whose each row is. */
static __global__ void prepare_blocks(Scratch scratch, const DraftBlock *blocks) {
    __shared__ DraftBlock block;
    load_block(&block, &blocks[blockIdx.x]);
    __syncwarp();
    if (threadIdx.x == 0) scratch.blocks[blockIdx.x] = block;
    for (int j = threadIdx.x; j < block.count; j += WARP) scratch.owner[block.first + j] = blockIdx.x;
}

/* Whether that row of logits is one of a block's, and then which block's. */
static __device__ bool find_owner(const Scratch &scratch, int row, int n, int *owner) {
    *owner = scratch.owner[row];
    if (*owner < 0 || *owner >= n) return false;
    const DraftBlock *block = &scratch.blocks[*owner];
    return row >= block->first && row < block->first + block->count;
}

/* Every id of the history changes its logit once, however often it occurs: whoever sets its bit first does it. */
static __global__ void __launch_bounds__(ROW_THREADS) penalise_rows(Scratch scratch, float *logits, int vocab, int n_rows, int n,
                                                                    const Sampler *samplers) {
    uint32_t *seen = (uint32_t *)samplers[blockIdx.x].seen;
    for (int row = blockIdx.x, owner; row < n_rows; row += gridDim.x) {
        if (!find_owner(scratch, row, n, &owner)) continue;
        const DraftBlock block = scratch.blocks[owner];
        const float penalty = block.sampling.repeat_penalty;
        const int history = block.position + row - block.first + 1;
        if (penalty == 1) continue;
        for (int i = threadIdx.x; i < history; i += blockDim.x) {
            const int id = block.ids[i];
            const uint32_t bit = 1u << id % 4 * 8;
            float *logit = &logits[(size_t)row * vocab + id];
            if (!(atomicOr(&seen[id / 4], bit) & bit)) *logit = *logit > 0 ? *logit / penalty : *logit * penalty;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < vocab / 4; i += blockDim.x) seen[i] = 0;
        if (threadIdx.x < vocab % 4) samplers[blockIdx.x].seen[vocab / 4 * 4 + threadIdx.x] = false;
        __syncthreads();
    }
}

/* The best of each segment: grid (SEGMENTS, rows), one pass over the logits. */
static __global__ void __launch_bounds__(SEGMENT_THREADS) find_best(uint64_t *keys, const float *logits, int vocab) {
    __shared__ uint64_t shared[SEGMENT_THREADS / WARP];
    const float *row = logits + (size_t)blockIdx.y * vocab;
    const bool wide = loads_wide(logits, vocab);
    const int end = segment_begin(blockIdx.x + 1, vocab);
    uint64_t best = 0;
    for (int i = segment_begin(blockIdx.x, vocab) + 4 * threadIdx.x; i < end; i += 4 * SEGMENT_THREADS) {
        const float4 x = load_logits(row, i, end, wide);
        best = max(best, max(max(token_key(x.x, i), token_key(x.y, i + 1)), max(token_key(x.z, i + 2), token_key(x.w, i + 3))));
    }
    best = max_of_warp(best);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = best;
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    best = max_of_warp(threadIdx.x < SEGMENT_THREADS / WARP ? shared[threadIdx.x] : 0);
    if (threadIdx.x == 0) keys[blockIdx.y * SEGMENTS + blockIdx.x] = best;
}

typedef struct FilterShared {
    unsigned count[DISTANCE_BINS];          /* tokens by how far they lie below the best, */
    unsigned long long mass[DISTANCE_BINS]; /* and their weights in fixed point */
    unsigned long long total;
    unsigned long long least;   /* the lowest key that stays */
    int members;
    KeyBins bins;
} FilterShared;

/* One row while its filters are found. */
typedef struct FilterRow {
    const float *logits;
    int vocab;
    float temperature, best;
    const Sampler *sampler;     /* whose picks are scratch; it lies across the link */
} FilterRow;

static __device__ int distance_bin(float below) { return min((int)(below * -64), DISTANCE_BINS - 1); }
static __device__ unsigned long long fixed_mass(float below) {
    return (unsigned long long)(expf(below) * (float)(1ull << MASS_BITS));
}

/* visit(token, its logit / temperature) for the whole row; eight logits of a thread are under way at a time. */
template <typename Visit> static __device__ void visit_logits(const FilterRow &row, Visit visit) {
    const bool wide = loads_wide(row.logits, row.vocab);
    const int step = 4 * blockDim.x;
    for (int first = 4 * threadIdx.x; first < row.vocab; first += 2 * step) {
        float4 four[2];
#pragma unroll
        for (int u = 0; u < 2; u++)
            four[u] = first + u * step < row.vocab ? load_logits(row.logits, first + u * step, row.vocab, wide)
                                                   : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int i = first + u * step;
            const float x[4] = {four[u].x, four[u].y, four[u].z, four[u].w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i + j < row.vocab) visit(i + j, x[j] / row.temperature);
        }
    }
}

/* Counts and weights of all tokens by distance. Most lie far below the best, in the last bin: threads sum that for themselves. */
static __device__ void fill_bins(FilterShared *shared, const FilterRow &row) {
    unsigned tail = 0;
    unsigned long long tail_mass = 0, total = 0;
    for (int bin = threadIdx.x; bin < DISTANCE_BINS; bin += blockDim.x) shared->count[bin] = 0, shared->mass[bin] = 0;
    if (threadIdx.x == 0) shared->total = 0;
    __syncthreads();
    visit_logits(row, [&](int, float x) {
        const int bin = distance_bin(x - row.best);
        const unsigned long long mass = fixed_mass(x - row.best);
        total += mass;
        if (bin == DISTANCE_BINS - 1) tail++, tail_mass += mass;
        else atomicAdd(&shared->count[bin], 1u), atomicAdd(&shared->mass[bin], mass);
    });
    tail = sum_of_warp(tail), tail_mass = sum_of_warp(tail_mass), total = sum_of_warp(total);
    if (threadIdx.x % WARP == 0) {
        atomicAdd(&shared->count[DISTANCE_BINS - 1], tail), atomicAdd(&shared->mass[DISTANCE_BINS - 1], tail_mass);
        atomicAdd(&shared->total, total);
    }
    __syncthreads();
}

/* The key of the last of the best `count` tokens, or of the best with that mass; bins->wanted says what their mass is. */
static __device__ uint64_t find_prefix(FilterShared *shared, const FilterRow &row, unsigned count, unsigned long long mass) {
    if (threadIdx.x == 0)
        shared->bins.wanted = (Wanted){.count = count, .mass = mass}, shared->members = 0, shared->least = UINT64_MAX;
    __syncthreads();
    if (threadIdx.x < WARP) walk_bins(&shared->bins.wanted, shared->count, shared->mass, DISTANCE_BINS);
    __syncthreads();
    const int bin = shared->bins.wanted.bin;
    int *picks = row.sampler->picks;
    visit_logits(row, [&](int token, float x) {
        if (distance_bin(x - row.best) == bin) picks[atomicAdd(&shared->members, 1)] = token;
    });
    __syncthreads();
    auto key = [&](int i) { return token_key(row.logits[picks[i]] / row.temperature, picks[i]); };
    auto weigh = [&](int i) { return fixed_mass(row.logits[picks[i]] / row.temperature - row.best); };
    const uint64_t cut = find_cut<true>(&shared->bins, shared->members, 56, key, weigh);
    for (int i = threadIdx.x; i < shared->members; i += blockDim.x)     /* tokens of other bins might reach the cut too */
        if (key(i) >= cut) atomicMin(&shared->least, (unsigned long long)key(i));
    __syncthreads();
    return shared->least;
}

/* Top-k, then the nucleus of what it leaves, then min-p: the key from which tokens remain. */
static __device__ uint64_t find_filters(FilterShared *shared, const FilterRow &row, const Sampling &sampling, int first) {
    const bool counted = sampling.top_k > 0 && sampling.top_k < row.vocab;
    uint64_t cut = 0;
    if (counted || sampling.top_p < 1) fill_bins(shared, row);
    unsigned long long total = shared->total;
    if (counted) {
        cut = find_prefix(shared, row, (unsigned)sampling.top_k, ANY_MASS);
        total = shared->bins.wanted.before + shared->bins.wanted.weight;
        __syncthreads();
    }
    if (sampling.top_p < 1) {
        const double mass = ceil((double)sampling.top_p * (double)total);
        cut = max(cut, find_prefix(shared, row, ANY_COUNT, mass > 1 ? (unsigned long long)mass : 1));
    }
    if (!(sampling.min_p > 0)) return cut;
    const float floor_logit = __double2float_ru(row.best + log((double)sampling.min_p));
    return max(cut, min((uint64_t)score_key(floor_logit) << 32, token_key(row.best, first)));
}

/* The law of every row: a thread block each, as many at a time as there are samplers. */
static __global__ void __launch_bounds__(ROW_THREADS)
    find_laws(Scratch scratch, const float *logits, int vocab, int n_rows, int n, AcceptRule rule, const Sampler *samplers) {
    __shared__ FilterShared shared;
    __shared__ double sums[WARP];
    for (int row = blockIdx.x, owner; row < n_rows; row += gridDim.x) {
        if (!find_owner(scratch, row, n, &owner)) continue;
        const DraftBlock block = scratch.blocks[owner];
        const Sampling &sampling = block.sampling;
        const uint64_t best = max_of_warp(scratch.keys[row * SEGMENTS + threadIdx.x % SEGMENTS]);
        const bool rejection = rule == ACCEPT_REJECTION && block.count > 1 && !is_greedy(sampling);
        Law law = {.first = key_token(best), .noise = NOISE_TOKEN, .draw = !is_greedy(sampling) && !rejection};
        if (!is_greedy(sampling)) {
            law.best = key_score(best) / sampling.temperature;
            const FilterRow filter = {logits + (size_t)row * vocab, vocab, sampling.temperature, law.best,
                                      &samplers[blockIdx.x]};
            law.cut = find_filters(&shared, filter, sampling, law.first);
            double total = 0;
            if (rejection)
                visit_logits(filter,
                             [&](int token, float x) { total += token_key(x, token) >= law.cut ? expf(x - law.best) : 0; });
            law.total = sum_of_block(total, sums);
        }
        if (threadIdx.x == 0) {
            law.lead = (Race){{-INFINITY, -1}, INFINITY};
            const uint4 words = noise_words(NOISE_TOKEN, sampling.seed, block.stream, block.position + row - block.first,
                                            law.first / 4);
            if (token_key(law.best, law.first) >= law.cut) enter_race(&law.lead, gumbel(noise_word(words, law.first)), law.first);
            scratch.laws[row] = law;
        }
        __syncthreads();
    }
}

static_assert((int)SEGMENTS == (int)WARP, "a warp combines the segments of a row");

/* What the law of a slot's draft gave to a token; small vocabularies have copies of their last candidate, with 0. */
static __device__ float draft_law(const int *ids, const float *q, int token) {
    float sum = 0;
    for (int c = 0; c < CANDIDATES; c++) sum += ids[c] == token ? q[c] : 0;
    return sum;
}

static __device__ float token_weight(const Law &law, float logit, float temperature, int token) {
    const float x = logit / temperature;
    return token_key(x, token) >= law.cut ? expf(x - law.best) : 0;
}

/* How much the residual max(p - q, 0) of a refused draft leaves; rounding may leave nothing. */
static __device__ double residual_mass(const Law &law, const float *row, float temperature, const int *ids, const float *q) {
    double inside = 0, left = 0;
    for (int c = 0; c < CANDIDATES; c++) {
        bool copy = false;
        for (int d = 0; d < c; d++) copy |= ids[d] == ids[c];
        if (copy) continue;
        const float weight = token_weight(law, row[ids[c]], temperature, ids[c]);
        const float rest = (float)(weight / law.total) - draft_law(ids, q, ids[c]);
        inside += weight;
        left += rest > 0 ? rest : 0;
    }
    return left + (law.total - inside) / law.total;
}

/* Acceptance by rejection (Leviathan et al. 2023): a lane tries each draft of the block. The first that is refused decides which
 * row is drawn from, and how. */
static __global__ void try_drafts(Scratch scratch, const float *logits, int vocab, Drafts drafts) {
    const DraftBlock block = scratch.blocks[blockIdx.x];
    const Sampling &sampling = block.sampling;
    const int j = threadIdx.x, row = block.first + j;
    const size_t at = (size_t)blockIdx.x * drafts.slots + j;
    const int *ids = drafts.ids + at * CANDIDATES;
    const float *q = drafts.q + at * CANDIDATES, *own = logits + (size_t)row * vocab;
    if (block.count <= 1 || is_greedy(sampling)) return;
    bool refused = false;
    if (j + 1 < block.count) {
        const Law law = scratch.laws[row];
        const int draft = drafts.tokens[at];
        const float p = (float)(token_weight(law, own[draft], sampling.temperature, draft) / law.total);
        const uint4 words = noise_words(NOISE_ACCEPT, sampling.seed, block.stream, block.position + j, 0);
        refused = !(unit(words.x) * draft_law(ids, q, draft) < p);
    }
    const unsigned all = __ballot_sync(~0u, refused);
    const int accepted = all ? __ffs(all) - 1 : block.count - 1;
    if (j == accepted) {
        Law *law = &scratch.laws[row];
        law->draw = law->weigh = true;
        law->noise = all ? NOISE_RESIDUAL : NOISE_TOKEN;
        law->residual = all && residual_mass(*law, own, sampling.temperature, ids, q) > 1e-8f;
        scratch.accepted[blockIdx.x] = accepted;
    }
}

static_assert((int)MAX_BLOCK <= (int)WARP, "a warp tries the drafts of a block");

/* The token with the largest logit + Gumbel noise in each segment: grid (SEGMENTS, rows). Since -log u >= 1 - u, a token can only
 * be ahead of value v if 1 - u <= weight * e^-v, which spares nearly all of them their logarithms and many their noise. */
static __global__ void __launch_bounds__(SEGMENT_THREADS, 4) draw_tokens(Scratch scratch, const float *logits, int vocab, int n,
                                                                         Drafts drafts) {
    __shared__ Pick shared[SEGMENT_THREADS / WARP];
    const int row = blockIdx.y, end = segment_begin(blockIdx.x + 1, vocab);
    int owner;
    if (!find_owner(scratch, row, n, &owner) || !scratch.laws[row].draw) return;
    const Law law = scratch.laws[row];
    const DraftBlock block = scratch.blocks[owner];
    const uint64_t seed = block.sampling.seed;
    const int position = block.position + row - block.first;
    const float *own = logits + (size_t)row * vocab, temperature = block.sampling.temperature;
    const float share = law.residual ? (float)(1 / law.total) : 1;
    const size_t at = ((size_t)owner * drafts.slots + row - block.first) * CANDIDATES;
    const bool wide = loads_wide(logits, vocab);
    const Race none = {{-INFINITY, -1}, INFINITY};
    Race race = law.noise == NOISE_TOKEN ? law.lead : none;     /* the lead was drawn by that noise */
    for (int i = segment_begin(blockIdx.x, vocab) + 4 * threadIdx.x; i < end; i += 4 * SEGMENT_THREADS) {
        const float4 four = load_logits(own, i, end, wide);
        const float x[4] = {four.x / temperature, four.y / temperature, four.z / temperature, four.w / temperature};
        float weight[4], most = 0;
#pragma unroll
        for (int u = 0; u < 4; u++) {
            weight[u] = i + u < end && token_key(x[u], i + u) >= law.cut ? expf(x[u] - law.best) * share : 0;
            most = fmaxf(most, weight[u]);
        }
        if (!(most > 0) || most * race.reach < 0.5f) continue;
        const uint4 words = noise_words(law.noise, seed, block.stream, position, i / 4);
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const uint32_t word = noise_word(words, u);
            if (!(weight[u] > 0) || (float)~word + 0.5f > weight[u] * race.reach) continue;
            float rest = weight[u];
            if (law.residual) rest -= draft_law(drafts.ids + at, drafts.q + at, i + u);
            if (rest > 0) enter_race(&race, (law.weigh ? log((double)rest) : (double)(x[u] - law.best)) + gumbel(word), i + u);
        }
    }
    const Pick best = best_of_warp(race.pick);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = best;
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    const Pick all = best_of_warp(threadIdx.x < SEGMENT_THREADS / WARP ? shared[threadIdx.x] : (Pick){0, -1});
    if (threadIdx.x == 0) scratch.picks[row * SEGMENTS + blockIdx.x] = all;
}

/* Combines the segments of a block's rows, a warp for each row, and counts the drafts that were right. */
static __global__ void __launch_bounds__(SEGMENT_THREADS)
    finish_blocks(int *choices, int *accepted, Scratch scratch, Drafts drafts, AcceptRule rule) {
    __shared__ int chosen[MAX_BLOCK];
    const DraftBlock block = scratch.blocks[blockIdx.x];
    const bool greedy = is_greedy(block.sampling), rejection = rule == ACCEPT_REJECTION && !greedy && block.count > 1;
    const int lane = threadIdx.x % WARP, *tokens = drafts.tokens + (size_t)blockIdx.x * drafts.slots;
    const int last = rejection ? scratch.accepted[blockIdx.x] : block.count - 1;
    for (int j = threadIdx.x / WARP; j <= last; j += SEGMENT_THREADS / WARP) {
        const int row = block.first + j;
        const bool accepted_draft = rejection && j < last;
        int choice = accepted_draft ? tokens[j] : key_token(max_of_warp(scratch.keys[row * SEGMENTS + lane]));
        if (!greedy && !accepted_draft) {
            const Pick pick = best_of_warp(scratch.picks[row * SEGMENTS + lane]);
            if (pick.token >= 0) choice = pick.token;
        }
        if (lane == 0) choices[row] = choice, chosen[j] = choice;
    }
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    const unsigned wrong = __ballot_sync(~0u, !rejection && lane < last && chosen[lane] != tokens[lane]);
    if (lane == 0) accepted[blockIdx.x] = wrong ? __ffs(wrong) - 1 : last;
}

static void accept(int *choices, int *accepted, float *logits, int vocab, const DraftBlock *blocks, const Drafts *drafts, int n,
                   AcceptRule rule, Sampler *samplers, int n_samplers) {
    int n_rows = 0;
    bool penalised = false, drawn = false;
    for (int i = 0; i < n; i++) {
        const int end = blocks[i].first + blocks[i].count;
        n_rows = end > n_rows ? end : n_rows;
        penalised |= blocks[i].sampling.repeat_penalty != 1;
        drawn |= !is_greedy(blocks[i].sampling);
    }
    if (!n_rows) return;
    REQUIRE(n <= MAX_PASS_ROWS && n_rows <= MAX_PASS_ROWS);
    const int busy = n_rows < n_samplers ? n_rows : n_samplers;
    const dim3 parts(SEGMENTS, n_rows);
    prepare_blocks<<<n, WARP, 0, gpu.stream>>>(scratch, blocks);
    LAUNCHED();
    if (penalised) {
        penalise_rows<<<busy, ROW_THREADS, 0, gpu.stream>>>(scratch, logits, vocab, n_rows, n, samplers);
        LAUNCHED();
    }
    find_best<<<parts, SEGMENT_THREADS, 0, gpu.stream>>>(scratch.keys, logits, vocab);
    LAUNCHED();
    if (drawn) {
        find_laws<<<busy, ROW_THREADS, 0, gpu.stream>>>(scratch, logits, vocab, n_rows, n, rule, samplers);
        LAUNCHED();
    }
    if (drawn && rule == ACCEPT_REJECTION) {
        try_drafts<<<n, WARP, 0, gpu.stream>>>(scratch, logits, vocab, *drafts);
        LAUNCHED();
    }
    if (drawn) {
        draw_tokens<<<parts, SEGMENT_THREADS, 0, gpu.stream>>>(scratch, logits, vocab, n, *drafts);
        LAUNCHED();
    }
    finish_blocks<<<n, SEGMENT_THREADS, 0, gpu.stream>>>(choices, accepted, scratch, *drafts, rule);
    LAUNCHED();
}

/* =====================================================================================================================
 * Drafters' operations
 *
 * Owns: the candidates of a slot and the draw among them (DFlash, DFlash 2, DSpark), what DVL's predictor of lengths sees and
 * says, and the division of a verification budget. It relies on blocks, ids and tokens being host memory that is touched
 * little and written once; a session's history is read only where repeats are penalised.
 */

enum { PATH_THREADS = (int)CANDIDATES * (int)WARP }; /* a warp for each candidate */

/* One stored weight as f32. */
static __device__ float stored_value(const Matrix &m, int row, int column) {
    const size_t at = (size_t)row * m.cols + column;
    if (m.dtype == DTYPE_F32) return ((const float *)m.data)[at];
    if (m.dtype == DTYPE_F16) return __half2float(((const __half *)m.data)[at]);
    if (m.dtype == DTYPE_BF16) return __bfloat162float(((const __nv_bfloat16 *)m.data)[at]);
    const float scale = m.scale ? m.scale[(size_t)((m.first_row + row) / SCALE_BLOCK) * m.scale_cols + column / SCALE_BLOCK] : 1;
    return float(((const __nv_fp8_e4m3 *)m.data)[at]) * scale;
}

/* The best keys that a warp has been offered, lane l the l-th. Few of a vocabulary come near the best: an offer costs a vote. */
static __device__ uint64_t offer_keys(uint64_t kept, uint64_t key) {
    const int lane = threadIdx.x % WARP;
    unsigned offered = __ballot_sync(~0u, key > __shfl_sync(~0u, (unsigned long long)kept, CANDIDATES - 1));
    for (; offered; offered &= offered - 1) {
        const uint64_t entering = __shfl_sync(~0u, (unsigned long long)key, __ffs(offered) - 1);
        const int place = __popc(__ballot_sync(~0u, kept > entering));
        const uint64_t above = __shfl_up_sync(~0u, (unsigned long long)kept, 1);
        kept = lane < place ? kept : lane == place ? entering : above;
    }
    return kept;
}

/* The best CANDIDATES of each segment: grid (SEGMENTS, rows). */
static __global__ void __launch_bounds__(SEGMENT_THREADS) segment_candidates(uint64_t *keys, const float *logits, int vocab) {
    __shared__ uint64_t shared[SEGMENT_THREADS / WARP * CANDIDATES];
    const int lane = threadIdx.x % WARP, end = segment_begin(blockIdx.x + 1, vocab);
    const float *row = logits + (size_t)blockIdx.y * vocab;
    const bool wide = loads_wide(logits, vocab);
    uint64_t kept = 0;
    for (int first = segment_begin(blockIdx.x, vocab) + threadIdx.x / WARP * 4 * WARP; first < end;
         first += 4 * SEGMENT_THREADS) {
        const int i = first + 4 * lane;
        const float4 x = i < end ? load_logits(row, i, end, wide) : make_float4(0, 0, 0, 0);
        kept = offer_keys(kept, i < end ? token_key(x.x, i) : 0);
        kept = offer_keys(kept, i + 1 < end ? token_key(x.y, i + 1) : 0);
        kept = offer_keys(kept, i + 2 < end ? token_key(x.z, i + 2) : 0);
        kept = offer_keys(kept, i + 3 < end ? token_key(x.w, i + 3) : 0);
    }
    if (lane < CANDIDATES) shared[threadIdx.x / WARP * CANDIDATES + lane] = kept;
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    kept = 0;
    for (int i = lane; i < SEGMENT_THREADS / WARP * CANDIDATES; i += WARP) kept = offer_keys(kept, shared[i]);
    if (lane < CANDIDATES) keys[((size_t)blockIdx.y * SEGMENTS + blockIdx.x) * CANDIDATES + lane] = kept;
}

/* The best of a row's segments, by a warp. */
static __global__ void merge_candidates(int *ids, float *values, size_t stride, const uint64_t *keys, const float *logits,
                                        int vocab, const int *target_ids) {
    const int row = blockIdx.x, lane = threadIdx.x, count = min(vocab, (int)CANDIDATES);
    uint64_t kept = 0;
    for (int i = lane; i < SEGMENTS * CANDIDATES; i += WARP)
        kept = offer_keys(kept, keys[(size_t)row * SEGMENTS * CANDIDATES + i]);
    const int id = key_token(__shfl_sync(~0u, (unsigned long long)kept, min(lane, count - 1)));
    if (lane >= CANDIDATES) return;
    ids[row * stride + lane] = target_ids ? target_ids[id] : id;
    values[row * stride + lane] = logits[(size_t)row * vocab + id];
}

static void candidates(int *ids, float *values, size_t stride, const float *logits, int n, int vocab, const int *target_ids) {
    for (int first = 0, rows; first < n; first += rows) {
        rows = n - first < MAX_PASS_ROWS ? n - first : MAX_PASS_ROWS;
        const float *own = logits + (size_t)first * vocab;
        segment_candidates<<<dim3(SEGMENTS, rows), SEGMENT_THREADS, 0, gpu.stream>>>(scratch.keys, own, vocab);
        LAUNCHED();
        merge_candidates<<<rows, WARP, 0, gpu.stream>>>(ids + first * stride, values + first * stride, stride, scratch.keys, own,
                                                        vocab, target_ids);
        LAUNCHED();
    }
}

/* Of each segment: the sums of e^below and of e^below * below, for logits that lie that much below the best. */
static __global__ void __launch_bounds__(SEGMENT_THREADS)
    segment_moments(double2 *sums, const float *values, size_t values_stride, const float *logits, int vocab) {
    __shared__ double shared[2][WARP];
    const float *row = logits + (size_t)blockIdx.y * vocab, best = values[blockIdx.y * values_stride];
    const int end = segment_begin(blockIdx.x + 1, vocab);
    float total = 0, moment = 0;
    for (int i = segment_begin(blockIdx.x, vocab) + threadIdx.x; i < end; i += SEGMENT_THREADS) {
        const float below = fmaxf(row[i] - best, -87.0f), weight = expf(below);
        total += weight;
        moment += weight * below;
    }
    const double sum = sum_of_block(total, shared[0]), mean = sum_of_block(moment, shared[1]);
    if (threadIdx.x == 0) sums[blockIdx.y * SEGMENTS + blockIdx.x] = make_double2(sum, mean);
}

static __global__ void write_features(float *features, size_t stride, const float *values, size_t values_stride,
                                      const double2 *sums) {
    const int row = blockIdx.x, lane = threadIdx.x;
    const double2 part = sums[row * SEGMENTS + lane];
    const double sum = sum_of_warp(part.x), mean = sum_of_warp(part.y);
    const float *best = values + row * values_stride;
    float *out = features + row * stride;
    if (lane < CANDIDATES) out[lane] = lane ? best[0] - best[lane] : best[0];
    if (lane == CANDIDATES) out[lane] = (float)-log(sum);
    if (lane == CANDIDATES + 1) out[lane] = (float)(log(sum) - mean / sum);
}

static void length_features(float *features, size_t stride, const float *values, size_t values_stride, const float *logits, int n,
                            int vocab) {
    for (int first = 0, rows; first < n; first += rows) {
        rows = n - first < MAX_PASS_ROWS ? n - first : MAX_PASS_ROWS;
        const float *best = values + first * values_stride;
        segment_moments<<<dim3(SEGMENTS, rows), SEGMENT_THREADS, 0, gpu.stream>>>(scratch.sums, best, values_stride,
                                                                                  logits + (size_t)first * vocab, vocab);
        LAUNCHED();
        write_features<<<rows, WARP, 0, gpu.stream>>>(features + first * stride, stride, best, values_stride, scratch.sums);
        LAUNCHED();
    }
}

/* The whole network for one block of drafts: a warp for each output, layers in shared memory. */
static __global__ void __launch_bounds__(PATH_THREADS)
    run_predictor(float *scores, const float *features, LengthPredictor predictor) {
    __shared__ float activations[2][MAX_PREDICTOR_WIDTH];
    const int lane = threadIdx.x % WARP, width = predictor.weight[0].cols;
    for (int i = threadIdx.x; i < width; i += PATH_THREADS) activations[0][i] = features[(size_t)blockIdx.x * width + i];
    for (int l = 0; l < predictor.layers; l++) {
        const Matrix &weight = predictor.weight[l];
        const float *in = activations[l % 2];
        float *out = activations[(l + 1) % 2];
        __syncthreads();
        for (int o = threadIdx.x / WARP; o < weight.rows; o += PATH_THREADS / WARP) {
            float sum = 0;
            for (int i = lane; i < weight.cols; i += WARP) sum += stored_value(weight, o, i) * in[i];
            sum = sum_of_warp(sum) + predictor.bias[l][o];
            if (lane == 0) out[o] = l + 1 == predictor.layers ? 1 / (1 + expf(-sum)) : sum > 0 ? sum : 0;
        }
    }
    __syncthreads();
    const float *last = activations[predictor.layers % 2];
    const int slots = predictor.weight[predictor.layers - 1].rows;
    for (int j = threadIdx.x; j < slots; j += PATH_THREADS) {
        float least = last[0];
        for (int i = 1; i <= j; i++) least = least < last[i] ? least : last[i];
        scores[(size_t)blockIdx.x * slots + j] = least;
    }
}

static void predict_lengths(float *scores, const float *features, int n, const LengthPredictor *predictor, float *scratch_rows) {
    (void)scratch_rows;                             /* shared memory is enough */
    if (n <= 0 || !predictor->layers) return;
    run_predictor<<<n, PATH_THREADS, 0, gpu.stream>>>(scores, features, *predictor);
    LAUNCHED();
}

/* A slot's candidates while one is drawn. */
typedef struct SlotShared {
    DraftBlock block;
    int ids[CANDIDATES];
    float scores[CANDIDATES];
    unsigned repeated;          /* a bit for each that occurs in the session's ids */
    int order[CANDIDATES];      /* candidates, the best first */
    float ranked[CANDIDATES];   /* scores by rank */
    int token;                  /* what was drawn */
} SlotShared;

/* By the whole thread block: which candidates are among the session's first n ids. Barriers lie before and behind it. */
static __device__ void find_repeats(SlotShared *shared, int n) {
    unsigned found = 0;
    if (threadIdx.x == 0) shared->repeated = 0;
    __syncthreads();
    if (shared->block.sampling.repeat_penalty != 1)
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const int id = shared->block.ids[i];
            for (int c = 0; c < CANDIDATES; c++) found |= (unsigned)(shared->ids[c] == id) << c;
        }
    if (found) atomicOr(&shared->repeated, found);
    __syncthreads();
}

/* Sorts the candidates by score, penalised and divided by the temperature; equal ones stay in their order. */
static __device__ void rank_candidates(SlotShared *shared) {
    const Sampling &sampling = shared->block.sampling;
    const int lane = threadIdx.x, c = lane % CANDIDATES;
    float score = shared->scores[c];
    if (shared->repeated >> c & 1) score = score > 0 ? score / sampling.repeat_penalty : score * sampling.repeat_penalty;
    if (!is_greedy(sampling)) score /= sampling.temperature;
    if (lane < CANDIDATES) shared->order[lane] = lane, shared->ranked[lane] = score;    /* for scores that are no numbers */
    __syncwarp();
    int rank = 0;
    for (int other = 0; other < CANDIDATES; other++) {
        const float theirs = __shfl_sync(~0u, score, other);
        rank += theirs > score || (theirs == score && other < c);
    }
    if (lane < CANDIDATES) shared->order[rank] = lane, shared->ranked[rank] = score;
    __syncwarp();
}

/* How many ranks the session's filters leave; each lane below CANDIDATES has the weight of its rank. */
static __device__ int filter_ranking(float weight, const Sampling &sampling) {
    const int most = sampling.top_k > 0 && sampling.top_k < CANDIDATES ? sampling.top_k : CANDIDATES;
    float total = 0, mass = __shfl_sync(~0u, weight, 0);
    int kept = 1;
    for (int r = 0; r < most; r++) total += __shfl_sync(~0u, weight, r);
    for (; kept < most && mass < sampling.top_p * total; kept++) mass += __shfl_sync(~0u, weight, kept);
    while (kept > 1 && __shfl_sync(~0u, weight, kept - 1) < sampling.min_p) kept--;
    return kept;
}

/* By one warp: draws one of the candidates of block i's slot, as draw_candidate() does in backend.c, a lane for each rank. The
 * choice joins the session's ids so that the next can follow it. */
static __device__ void draw_slot(SlotShared *shared, const Drafts &drafts, int slot, int i, AcceptRule rule) {
    const DraftBlock &block = shared->block;
    const Sampling &sampling = block.sampling;
    const bool rejection = rule == ACCEPT_REJECTION;
    const int rank = threadIdx.x % CANDIDATES, position = block.position + slot;
    const size_t at = (size_t)i * drafts.slots + slot;
    rank_candidates(shared);
    const int place = shared->order[rank], token = shared->ids[place];
    const bool copy = rank && token == shared->ids[shared->order[rank - 1]];
    const float score = shared->ranked[rank], weight = copy ? 0 : expf(score - shared->ranked[0]);
    float total = 0;
    for (int r = 0; r < CANDIDATES; r++) total += __shfl_sync(~0u, weight, r);
    const bool lawful = total >= 1 && total <= CANDIDATES;      /* scores that are no numbers make no law */
    const bool best_only = is_greedy(sampling) || (rejection && drafts.one_hot) || !lawful;
    const uint64_t stream = block.stream + (rejection ? (uint64_t)block.position * 0x9E3779B97F4A7C15u : 0);
    const int kept = rejection ? CANDIDATES : filter_ranking(weight, sampling);
    Pick pick = {0, -1};
    if (!best_only && threadIdx.x < kept && weight > 0) {
        const uint4 words = noise_words(rejection ? NOISE_DRAFT : NOISE_TOKEN, sampling.seed, stream, position,
                                        (uint32_t)token / 4);
        pick = (Pick){(double)score + gumbel(noise_word(words, token)), rank};
    }
    pick = best_of_warp(pick);
    if (rejection && threadIdx.x < CANDIDATES) drafts.q[at * CANDIDATES + place] = best_only ? (float)!rank : weight / total;
    if (threadIdx.x) return;
    const int choice = shared->ids[shared->order[pick.token < 0 ? 0 : pick.token]];
    drafts.tokens[at] = shared->token = block.ids[position + 1] = choice;
}

/* Slot `slot` of every block, a thread block each. */
static __global__ void __launch_bounds__(PATH_THREADS)
    draw_slots(Drafts drafts, int slot, const DraftBlock *blocks, AcceptRule rule) {
    __shared__ SlotShared shared;
    const size_t at = ((size_t)blockIdx.x * drafts.slots + slot) * CANDIDATES;
    load_block(&shared.block, &blocks[blockIdx.x]);
    if (threadIdx.x < CANDIDATES)
        shared.ids[threadIdx.x] = drafts.ids[at + threadIdx.x], shared.scores[threadIdx.x] = drafts.scores[at + threadIdx.x];
    __syncthreads();
    find_repeats(&shared, shared.block.position + slot + 1);
    if (threadIdx.x < WARP) draw_slot(&shared, drafts, slot, blockIdx.x, rule);
}

static void draw_drafts(Drafts *drafts, int slot, const DraftBlock *blocks, int n, AcceptRule rule) {
    if (n <= 0) return;
    draw_slots<<<n, PATH_THREADS, 0, gpu.stream>>>(*drafts, slot, blocks, rule);
    LAUNCHED();
}

/* The selector's walk of one block: a warp scores each candidate, S(a, b) += <Pred[a] * e, Succ[b]>, then one draws. */
static __global__ void __launch_bounds__(PATH_THREADS)
    walk_path(Drafts drafts, const float *e, Matrix predecessor, Matrix successor, const DraftBlock *blocks, int n,
              AcceptRule rule) {
    __shared__ SlotShared shared;
    const int candidate = threadIdx.x / WARP, lane = threadIdx.x % WARP, rank = predecessor.cols;
    load_block(&shared.block, &blocks[blockIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) shared.token = shared.block.ids[shared.block.position];
    __syncthreads();
    for (int slot = 0; slot < drafts.slots; slot++) {
        const size_t at = ((size_t)blockIdx.x * drafts.slots + slot) * CANDIDATES + candidate;
        const float *hidden = e + ((size_t)slot * n + blockIdx.x) * rank;
        const int id = drafts.ids[at];
        float sum = 0;
        for (int r = lane; r < rank; r += WARP)
            sum += stored_value(predecessor, shared.token, r) * hidden[r] * stored_value(successor, id, r);
        sum = sum_of_warp(sum) + drafts.scores[at];
        if (lane == 0) drafts.scores[at] = shared.scores[candidate] = sum, shared.ids[candidate] = id;
        __syncthreads();
        find_repeats(&shared, shared.block.position + slot + 1);
        if (threadIdx.x < WARP) draw_slot(&shared, drafts, slot, blockIdx.x, rule);
        __syncthreads();
    }
}

static void select_path(Drafts *drafts, const float *e, const Matrix *predecessor, const Matrix *successor,
                        const DraftBlock *blocks, int n, AcceptRule rule) {
    if (n <= 0 || drafts->slots <= 0) return;
    walk_path<<<n, PATH_THREADS, 0, gpu.stream>>>(*drafts, e, *predecessor, *successor, blocks, n, rule);
    LAUNCHED();
}

/* Algorithm 1's seed: 1 + the rounded sum of a session's scores, within its limit. */
static __device__ int seed_length(const float *scores, int slots, int limit) {
    float sum = 0;
    for (int j = 0; j < slots; j++) sum += scores[j];
    const int seed = 1 + (int)rintf(sum);
    return seed < 1 ? 1 : seed < limit ? seed : limit;
}

/* By one thread block. A session's scores do not increase, so growing and shrinking draft by draft is one choice among the drafts
 * that are open, [low, high) of each session: those behind the seed to grow, those before it to shrink. */
static __global__ void __launch_bounds__(ROW_THREADS) divide_budget(int *lengths, const float *scores, const int *limits, int n,
                                                                    int slots, int budget, bool seeded, uint64_t *keys) {
    __shared__ KeyBins bins;
    __shared__ int sums[WARP], low[MAX_PASS_ROWS], high[MAX_PASS_ROWS];
    const int session = threadIdx.x;
    const int limit = session < n ? limits[session] : 1;
    const int seed = session < n && seeded ? seed_length(scores + (size_t)session * slots, slots, limit) : 1;
    int total, open;
    scan_block(session < n ? seed : 0, sums, &total);
    const bool grow = total <= budget;
    if (session < n) low[session] = grow ? seed - 1 : 0, high[session] = min(grow ? limit - 1 : seed - 1, slots);
    scan_block(session < n ? max(high[session] - low[session], 0) : 0, sums, &open);
    const int wanted = min(grow ? budget - total : max(budget - n, 0), open);
    for (int i = threadIdx.x; i < n * slots; i += blockDim.x) {
        const int owner = i / slots, j = i % slots;
        keys[i] = j < low[owner] || j >= high[owner] ? 0 : (uint64_t)score_key(scores[i]) << 16 | (31 - j) << 9 | (511 - owner);
    }
    if (threadIdx.x == 0) bins.wanted = (Wanted){.count = (unsigned)wanted, .mass = ANY_MASS};
    __syncthreads();
    uint64_t cut = UINT64_MAX;
    if (wanted) cut = find_cut<false>(&bins, n * slots, 40, [&](int i) { return keys[i]; }, [](int) { return 0ull; });
    if (session >= n) return;
    int length = 1 + low[session];
    for (int j = low[session]; j < high[session]; j++) length += keys[session * slots + j] >= cut;
    lengths[session] = length;
}

static_assert(MAX_BLOCK <= 32 && MAX_PASS_ROWS <= 512, "a draft's key has 5 bits for its place and 9 for its session");

/* Puts allocate() or allocate_seeded() on the stream. */
extern "C" void cuda_allocate(int *lengths, const float *scores, const int *limits, int n, int slots, int budget, bool seeded) {
    if (n <= 0) return;
    divide_budget<<<1, ROW_THREADS, 0, gpu.stream>>>(lengths, scores, limits, n, slots, budget, seeded, scratch.keys);
    LAUNCHED();
}

/* ---- the list of operations; the last ones but one work on lists in host memory, where the pipeline wants their results at once */

extern "C" const Backend cuda_backend = {
    .name = "cuda",
    .live_sources = 1,
    .shares_memory = false,
    .start = start,
    .available = available,
    .take = take,
    .give_back = give_back,
    .import_weights = import_weights,
    .release_weights = release_weights,
    .make_weights = make_weights,
    .samplers = samplers,
    .begin_work = begin_work,
    .end_work = end_work,
    .wait = wait_for_all,
    .embed = embed,
    .rms_norm = rms_norm,
    .add_norm = add_norm,
    .linear = linear,
    .rotations = rotations,
    .rope = rope,
    .norm_heads = norm_heads,
    .locate_rows = locate_rows,
    .store_rows = store_rows,
    .store_latents = store_latents,
    .store_index_keys = store_index_keys,
    .index_select = index_select,
    .resolve = resolve,
    .fetch_rows = fetch_rows,
    .forget_hot = forget_hot,
    .start_copy = start_copy,
    .finish_copy = finish_copy,
    .copy_bytes = copy_bytes,
    .upload = upload,
    .absorb_query = absorb_query,
    .sparse_attention = sparse_attention,
    .expand_value = expand_value,
    .dense_attention = dense_attention,
    .swiglu = swiglu,
    .zero = zero,
    .gather_rows = gather_rows,
    .add = add,
    .route = route,
    .experts = experts,
    .check_finite = check_finite,
    .copy_rows = copy_rows,
    .convolve = convolve,
    .block_attention = block_attention,
    .cap_logits = cap_logits,
    .candidates = candidates,
    .take_tokens = take_tokens,
    .add_bias = add_bias,
    .length_features = length_features,
    .predict_lengths = predict_lengths,
    .draw_drafts = draw_drafts,
    .select_path = select_path,
    .allocate = c_backend.allocate,
    .allocate_seeded = c_backend.allocate_seeded,
    .pack_blocks = c_backend.pack_blocks,
    .accept = accept,
};
