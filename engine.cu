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
#include <float.h>
#include <unistd.h>

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

/* One stored value of any type as f32. */
static __device__ float load_stored(const uint8_t *data, size_t i, DType dtype) {
    switch (dtype) {
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
 *     linear, expand_value -> multiply -> launch_tiles -> product_kernel -> multiply_segment -> sum_segments
 *     experts -> list_kernel, gate_up_kernel, down_kernel -> multiply_segment -> sum_segments
 *     multiply_segment -> next_piece (x), fetch_batch and multiply_batch (weights), put_sums
 *
 * Owns: y = W x with W in its stored format. A warp multiplies a strip of 32 rows of weights by 8 to 64 rows of x on the tensor
 * cores: the weights are the 16 x 16 operand, so that one row of x takes the same instructions as many, with idle columns. f16
 * weights meet x rounded to f16 (a value beyond its range becomes infinite, and shows); bf16 and e4m3 weights, which bf16 holds
 * exactly, meet x rounded to bf16. Sums are f32, and the scales of e4m3 are applied to the sum of each 128 columns.
 *
 * A sum over the columns is cut into segments, and the segments' sums are added in order. Their number depends on the matrix
 * alone: as many as it takes to fill the GPU with strips. Those of a strip lie in the warps of a block and in the blocks of a
 * cluster, which add up through each other's shared memory. How many rows of x there are only decides how many columns of
 * the instruction are in use and how often the weights are read, once for 64 rows; from 33 rows on, x is rounded beforehand.
 *
 * Weights go straight from memory to registers, 16 bytes a thread. Four threads read 64 neighbouring bytes of a row, and what
 * a thread has read it uses as if it were the fragment it should have: the order of k inside a product is free as long as
 * both operands agree, so x is put into shared memory in the same order. f32 weights, and matrices whose rows do not begin at a
 * multiple of 16 bytes, take the exact path: plain multiply-adds in f32, a row of weights for each lane.
 */

enum {
    STRIP = 32,                 /* rows of weights of a warp, as two fragments of 16 */
    WARPS = THREADS / 32,       /* of a block; they divide rows of weights and segments among themselves */
    SEGMENT_STEP = SCALE_BLOCK, /* columns; a segment is a multiple of this long */
    STRIP_CHUNKS = 2,                 /* of 16 bytes, that a thread has on their way from memory for each row */
    MAX_CLUSTER = 8,
    STAGED_BYTES = 64 << 10,    /* of x in shared memory at most: two blocks of up to 16 rows share a multiprocessor */
    STAGED_PAD = 64,            /* bytes behind each row of x there, so that eight lanes' 16 bytes meet different banks */
    SUM_STRIDE = STRIP + 4,     /* floats from column to column of a warp's sums; the 4 spread a fragment over the banks */
};

/* How the sum over a matrix's columns is cut: each block of a cluster has along * length of them, which its warps take in turns,
 * a batch each, so that neighbours read from neighbouring places at about the same time. What one warp takes is a segment. */
typedef struct Cut {
    int cluster, along, length;
    int piece;                  /* values of each segment whose x is in shared memory at a time; changes no sum */
} Cut;

typedef struct Product {        /* y[r] = W x[r], for each of `heads` matrices that follow each other `head_rows` rows apart */
    Matrix w;                   /* of the first head */
    const float *x;             /* or, where there are many rows, in `narrowed_rows` */
    float *y;
    size_t x_stride, y_stride;
    int n_rows;
    int heads, head_rows, x_head, y_head;           /* the last two: values from one head to the next */
    bool aligned;               /* x allows loads of 16 bytes */
    Cut cut;
} Product;

/* The rows of x that a block multiplies: row list[i] / divisor, or row i where there is no list. */
typedef struct Input {
    const float *x;             /* or, rounded already: */
    const uint16_t *narrowed;
    const int *list;
    size_t stride;
    int first, count, divisor, cols;
    bool aligned;
} Input;

/* Exact stands for DTYPE_F32 as a template argument, whatever the stored type. */
static constexpr DType EXACT = DTYPE_F32;

/* Bytes of one stored weight. */
static __host__ __device__ constexpr size_t weight_bytes(DType dtype) {
    return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_F8_E4M3 ? 1 : 2;
}

/* Columns of W in a thread's 16 bytes, a chunk; and of a warp's batch. */
static __host__ __device__ constexpr int chunk_values(DType D) { return D == DTYPE_F8_E4M3 ? 16 : 8; }
static __host__ __device__ constexpr int batch_values(DType D) { return STRIP_CHUNKS * 4 * chunk_values(D); }
static_assert(SCALE_BLOCK == batch_values(DTYPE_F8_E4M3), "a batch of e4m3 weights has one scale");

/* A warp's rows of weights as one thread sees them: rows g and g + 8, g = lane / 4, of both fragments, from this thread's first
 * chunk on. Offsets are from each fragment's first row. The exact path has one row, the first. */
typedef struct Strip {
    const uint8_t *data[2];
    const float *scale[2];
    uint32_t row[4], scale_row[4];                  /* offsets, in bytes and in floats */
    int limit[2];               /* of the columns, less those before this thread's; 0 for a fragment outside the matrix */
    DType dtype;
} Strip;

/* Weights on their way from memory. As soon as a chunk has been multiplied, its registers wait for the next batch's. */
typedef struct Batch {
    uint4 chunk[STRIP_CHUNKS][4];
    float scale[4];
} Batch;

enum { NO_BATCH = INT_MAX / 2 };                    /* a column past every matrix: fetches zeros, reads nothing */

static __device__ inline int lane_id() { return (int)threadIdx.x % 32; }
static __device__ inline int warp_id() { return (int)threadIdx.x / 32; }

/* 16 bytes of weights, which this multiprocessor will not read again; zeros where there are none. Without a branch, so that
 * several are on their way at once. */
static __device__ inline uint4 load_weights(const uint8_t *at, bool there) {
    uint4 v;
    asm volatile("{\n.reg .pred there;\nsetp.ne.u32 there, %5, 0;\n"
                 "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@there ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(at), "r"((uint32_t)there));
    return v;
}

/* Fragment m of a strip, rows from `first` on of w. Rows past the end repeat the last one, and are not written. */
template <DType D> static __device__ inline void set_fragment(Strip *strip, int m, const Matrix &w, int first) {
    const int lane = lane_id(), skipped = D == EXACT ? 0 : lane % 4 * chunk_values(D), begin = min(first, w.rows - 1);
    const size_t bytes = weight_bytes(D == EXACT ? w.dtype : D);
    strip->dtype = w.dtype;
    strip->limit[m] = first < w.rows ? w.cols - skipped : 0;
    strip->data[m] = w.data + (size_t)begin * (size_t)w.cols * bytes;
    strip->scale[m] = row_scales(&w, begin);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = min(first + (D == EXACT ? lane % 16 : lane / 4 + i * 8), w.rows - 1) - begin;
        strip->row[2 * m + i] = (uint32_t)row * (uint32_t)w.cols * (uint32_t)bytes + (uint32_t)(skipped * (int)bytes);
        strip->scale_row[2 * m + i] = (uint32_t)(((w.first_row + begin + row) / SCALE_BLOCK - (w.first_row + begin) / SCALE_BLOCK)
                                                 * w.scale_cols);
    }
}

template <DType D> static __device__ inline void set_strip(Strip *strip, const Matrix &w, int first) {
    set_fragment<D>(strip, 0, w, first);
    set_fragment<D>(strip, 1, w, first + 16);
}

/* Starts to read chunk u of the batch of columns from k on. */
template <DType D> static __device__ inline void fetch_chunk(Batch &batch, const Strip &strip, int u, int k) {
    const int at = k + u * 4 * chunk_values(D);
#pragma unroll
    for (int i = 0; i < 4; i++)
        batch.chunk[u][i] = load_weights(strip.data[i / 2] + (strip.row[i] + (uint32_t)at * (uint32_t)weight_bytes(D)),
                                         at < strip.limit[i / 2]);
}

/* Its scales, also where only the other threads of a row have columns: the sums are of all four. */
template <DType D> static __device__ inline void fetch_scales(Batch &batch, const Strip &strip, int k) {
    if constexpr (D == DTYPE_F8_E4M3)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool there = k < strip.limit[i / 2] + lane_id() % 4 * chunk_values(D);
            batch.scale[i] = there ? __ldg(strip.scale[i / 2] + (strip.scale_row[i] + k / SCALE_BLOCK)) : 0;
        }
}

template <DType D> static __device__ inline void fetch_batch(Batch &batch, const Strip &strip, int k) {
    if constexpr (D != EXACT) {
#pragma unroll
        for (int u = 0; u < STRIP_CHUNKS; u++) fetch_chunk<D>(batch, strip, u, k);
        fetch_scales<D>(batch, strip, k);
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

/* x of a pass with many rows, rounded once for all blocks, which then copy it while they multiply. */
enum { MANY_ROWS = 32, MANY_TILES = 8, MANY_ALONG = 4, MAX_NARROWED = 16 << 20 };
static __device__ __align__(16) uint16_t narrowed_rows[MAX_NARROWED];

template <DType D> static __global__ void narrow_kernel(const float *x, size_t stride, size_t width, size_t n, bool aligned) {
    const size_t i = 8 * thread_index();
    if (i >= n) return;
    float v[8];
    load_eight(v, x + i / width * stride + i % width, 8, aligned);
    *(uint4 *)(narrowed_rows + i) = make_uint4(narrow_pair<D>(v[0], v[1]), narrow_pair<D>(v[2], v[3]),
                                               narrow_pair<D>(v[4], v[5]), narrow_pair<D>(v[6], v[7]));
}

/* 16 bytes into shared memory, or zeros, beside what the thread does next. */
static __device__ inline void start_copy_to_shared(uint8_t *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* Bytes of one row of x in shared memory, with a piece of each of `along` segments. */
static __host__ __device__ inline int staged_stride(DType D, int along, int piece) {
    return along * piece * (D == EXACT ? 4 : 2) + STAGED_PAD;
}

/* Puts x for a piece of every segment of this block into shared memory, columns from `from` on. In the order in which threads
 * need them: of e4m3, whose 16 values of a thread make two fragments, first the lower halves of four threads. */
template <DType D> static __device__ void stage_input(uint8_t *staged, const Input &input, const Cut &cut, int from) {
    const int stride = staged_stride(D, cut.along, cut.piece), eights = cut.along * cut.piece / 8;
#pragma unroll 2
    for (int i = (int)threadIdx.x; i < input.count * eights; i += THREADS) {
        const int column = i / eights, position = i % eights * 8;
        int offset = position;
        uint8_t *to = staged + column * stride + position * (D == EXACT ? 4 : 2);
        if (D == DTYPE_F8_E4M3) offset = offset / 64 * 64 + offset % 32 / 8 * 16 + offset % 64 / 32 * 8;
        const int k = from + offset;
        const int row = input.list ? input.list[input.first + column] / input.divisor : input.first + column;
        if (input.narrowed) {
            const bool there = k < input.cols;
            start_copy_to_shared(to, input.narrowed + (size_t)row * input.stride + (there ? k : 0), there);
            continue;
        }
        float v[8];
        load_eight(v, input.x + (size_t)row * input.stride + k, input.cols - k, input.aligned);
        if (D == EXACT) {
#pragma unroll
            for (int j = 0; j < 8; j++) ((float *)to)[j] = v[j];
        } else
            *(uint4 *)to = make_uint4(narrow_pair<D>(v[0], v[1]), narrow_pair<D>(v[2], v[3]), narrow_pair<D>(v[4], v[5]),
                                      narrow_pair<D>(v[6], v[7]));
    }
}

/* Four e4m3 values as two pairs of bf16. The bits are shifted into place, and a multiplication by 2^120 repairs the exponent;
 * subnormals come out right by itself. */
static __device__ inline uint2 widen_four(uint32_t four) {
    const uint32_t low = __byte_perm(four, 0, 0x1404), high = __byte_perm(four, 0, 0x3424);
    uint32_t pair[2] = {(low & 0x80008000) | (low >> 4 & 0x07f007f0), (high & 0x80008000) | (high >> 4 & 0x07f007f0)};
    const uint32_t power = 0x7b807b80;
    __nv_bfloat162 values[2], factor;
    memcpy(values, pair, sizeof pair);
    memcpy(&factor, &power, sizeof power);
    values[0] = __hmul2(values[0], factor);
    values[1] = __hmul2(values[1], factor);
    memcpy(pair, values, sizeof pair);
    return make_uint2(pair[0], pair[1]);
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

/* The 32 values of k of one 64-byte (e4m3: half of one) stretch, for both fragments and all tiles of eight rows of x. */
template <DType D, int TILES>
static __device__ inline void multiply_stretch(float sum[2][TILES][4], const uint4 chunk[4], int half, const uint8_t *x,
                                               int x_stride, int last_column) {
    uint4 a[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (D == DTYPE_F8_E4M3) {
            const uint2 low = widen_four(half ? chunk[i].z : chunk[i].x), high = widen_four(half ? chunk[i].w : chunk[i].y);
            a[i] = make_uint4(low.x, low.y, high.x, high.y);
        } else a[i] = chunk[i];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int column = min(tile * 8 + lane_id() / 4, last_column);     /* idle columns of the instruction repeat one */
        const uint4 b = *(const uint4 *)(x + column * x_stride);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            multiply_fragment<D>(sum[m][tile], a[2 * m].x, a[2 * m + 1].x, a[2 * m].y, a[2 * m + 1].y, b.x, b.y);
            multiply_fragment<D>(sum[m][tile], a[2 * m].z, a[2 * m + 1].z, a[2 * m].w, a[2 * m + 1].w, b.z, b.w);
        }
    }
}

/* One batch, and the next one, from column `next` on, is fetched in its place. x: this thread's first value of it in row 0. */
template <DType D, int TILES>
static __device__ inline void multiply_batch(float total[2][TILES][4], Batch &batch, const Strip &strip, int next,
                                             const uint8_t *x, int x_stride, int last_column) {
    constexpr bool scaled = D == DTYPE_F8_E4M3;
    constexpr int halves = scaled ? 2 : 1;
    float sum[2][TILES][4] = {};
#pragma unroll
    for (int u = 0; u < STRIP_CHUNKS; u++) {
#pragma unroll
        for (int half = 0; half < halves; half++)
            multiply_stretch<D, TILES>(scaled ? sum : total, batch.chunk[u], half, x + (u * halves + half) * 64, x_stride,
                                       last_column);
        fetch_chunk<D>(batch, strip, u, next);
    }
    if constexpr (scaled)
#pragma unroll
        for (int i = 0; i < 2 * TILES * 4; i++) {
            const int m = i / (TILES * 4), tile = i / 4 % TILES, part = i % 4;
            total[m][tile][part] = fmaf(batch.scale[2 * m + part / 2], sum[m][tile][part], total[m][tile][part]);
        }
    fetch_scales<D>(batch, strip, next);
}

/* Plain f32 for the same values: the lane's row, eight rows of x. k: first column of the batch. */
static __device__ void multiply_exactly(float total[8], const Strip &strip, int k, const float *x, int x_stride,
                                        int last_column) {
    const int m = lane_id() / 16, limit = m ? strip.limit[1] : strip.limit[0];
    const uint8_t *data = (m ? strip.data[1] : strip.data[0]) + (m ? strip.row[2] : strip.row[0]);
    const float *scale = m ? strip.scale[1] : strip.scale[0];
    if (scale) scale += m ? strip.scale_row[2] : strip.scale_row[0];
    for (int i = 0; i < batch_values(EXACT) && k + i < limit; i++) {
        float weight = load_stored(data, (size_t)(k + i), strip.dtype);
        if (scale) weight *= scale[(k + i) / SCALE_BLOCK];
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
            sums[(tile * 8 + lane % 4 * 2 + part % 2) * SUM_STRIDE + m * 16 + lane / 4 + part / 2 * 8] = total[m][tile][part];
        }
}

/* Stages the pieces of x one after the other, and returns the one from value `at` of each segment on. Rows that were narrowed
 * before are copied a piece ahead, into the other half of the shared memory. */
template <DType D, int TILES>
static __device__ inline uint8_t *next_piece(uint8_t *staged, int bytes, const Input &input, const Cut &cut, int from, int at) {
    if (TILES < MANY_TILES) {
        if (at) __syncthreads();                    /* everyone has done with the piece before */
        stage_input<D>(staged, input, cut, from + at * cut.along);
        __syncthreads();
        return staged;
    }
    const int piece = at / cut.piece, ahead = at + cut.piece;
    if (at) __syncthreads();
    else {
        stage_input<D>(staged, input, cut, from);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    if (ahead < cut.length) stage_input<D>(staged + (piece + 1) % 2 * bytes, input, cut, from + ahead * cut.along);
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    return staged + piece % 2 * bytes;
}

/* The first batch of this warp, in a block whose columns begin at `from`. */
template <DType D> static __device__ inline int first_batch(const Cut &cut, int from) {
    return from + warp_id() % cut.along * batch_values(D);
}

/* This warp's segment of its strip times the input, into `sums`. from: the block's first column. batch: the segment's first,
 * which has been fetched already, so that memory is busy while x is staged. bytes: of a piece of x in shared memory. All warps
 * of the block come along. */
template <DType D, int TILES>
static __device__ void multiply_segment(float *sums, Batch &batch, const Strip &strip, const Input &input, const Cut &cut,
                                        int from, uint8_t *staged, int bytes) {
    const int size = D == EXACT ? 4 : 2, stride = staged_stride(D, cut.along, cut.piece), last = input.count - 1;
    const int first = first_batch<D>(cut, from), step = batch_values(D);
    const int place = (first - from) * size + (D == EXACT ? 0 : lane_id() % 4 * 16);
    float total[2][TILES][4] = {};
    for (int at = 0; at < cut.length; at += cut.piece) {
        const uint8_t *x = next_piece<D, TILES>(staged, bytes, input, cut, from, at) + place;
#pragma unroll 1
        for (int i = at; i < min(at + cut.piece, cut.length); i += step, x += step * cut.along * size) {
            const int next = i + step < cut.length ? first + (i + step) * cut.along : NO_BATCH;
            if constexpr (D == EXACT)
                multiply_exactly(&total[0][0][0], strip, first + i * cut.along, (const float *)x, stride / 4, last);
            else multiply_batch<D, TILES>(total, batch, strip, next, x, stride, last);
        }
    }
    put_sums<D, TILES>(sums, total);
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
static __device__ inline float load_from_block(const float *p, int rank) {
#if __CUDA_ARCH__ >= 900
    float value;
    uint32_t at = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %1, %2;\nld.shared::cluster.f32 %0, [a];\n}"
                 : "=f"(value) : "r"(at), "r"(rank));
    return value;
#else
    return rank ? 0 : *p;
#endif
}

/* The sum of all segments for one output: row `row` of the cluster's rows, column `column`. Eight are on their way at a time. */
template <int TILES> static __device__ float sum_segments(const float *sums, const Cut &cut, int row, int column) {
    const float *first = sums + row / STRIP * cut.along * TILES * 8 * SUM_STRIDE + column * SUM_STRIDE + row % STRIP;
    const int segments = cut.cluster * cut.along;
    float sum = 0;
    for (int begin = 0; begin < segments; begin += 8) {
        float value[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int segment = min(begin + i, segments - 1), rank = segment / cut.along;
            const float *at = first + segment % cut.along * TILES * 8 * SUM_STRIDE;
            value[i] = cut.cluster == 1 ? *at : load_from_block(at, rank);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (begin + i < segments) sum += value[i];
    }
    return sum;
}

/* Shared memory of a block: x, then the warps' sums. */
static __host__ __device__ inline int staged_bytes(DType D, const Cut &cut, int columns) {
    return columns * staged_stride(D, cut.along, cut.piece);
}
static __host__ __device__ constexpr int staged_pieces(int tiles) { return tiles < MANY_TILES ? 1 : 2; }
static __host__ __device__ inline int sums_bytes(int tiles) { return WARPS * tiles * 8 * SUM_STRIDE * (int)sizeof(float); }

/* Grid: blocks of a cluster, groups of rows of x, groups of rows of weights of each head. */
template <DType D, int TILES>
static __global__ void __launch_bounds__(THREADS, TILES <= 2 ? 2 : 1) product_kernel(const __grid_constant__ Product p) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int group_rows = STRIP * (WARPS / p.cut.along), groups = divide_up(p.w.rows, group_rows);
    const int head = (int)blockIdx.z / groups, first_row = (int)blockIdx.z % groups * group_rows;
    const int row = first_row + warp_id() / p.cut.along * STRIP, rank = (int)blockIdx.x, from = rank * p.cut.along * p.cut.length;
    Matrix w = p.w;
    w.data += (size_t)head * (size_t)p.head_rows * (size_t)w.cols * weight_bytes(D == EXACT ? w.dtype : D);
    w.first_row += head * p.head_rows;
    Strip strip;
    set_strip<D>(&strip, w, row);
    Batch batch;
    fetch_batch<D>(batch, strip, first_batch<D>(p.cut, from));

    const int bytes = staged_bytes(D, p.cut, min(TILES * 8, p.n_rows)), x_first = head * p.x_head;
    Input input = {.x = p.x + x_first, .narrowed = TILES < MANY_TILES ? NULL : narrowed_rows + x_first, .list = NULL,
                   .stride = p.x_stride, .first = (int)blockIdx.y * TILES * 8, .count = 0, .divisor = 1, .cols = w.cols,
                   .aligned = p.aligned};
    input.count = min(TILES * 8, p.n_rows - input.first);
    float *sums = (float *)(shared + staged_pieces(TILES) * bytes);
    multiply_segment<D, TILES>(sums + warp_id() * TILES * 8 * SUM_STRIDE, batch, strip, input, p.cut, from, shared, bytes);

    if (p.cut.cluster > 1) cluster_barrier();
    else __syncthreads();
    for (int i = rank * THREADS + (int)threadIdx.x; i < group_rows * input.count; i += p.cut.cluster * THREADS) {
        const int r = i % group_rows, column = i / group_rows;
        if (first_row + r >= w.rows) continue;
        p.y[(size_t)(input.first + column) * p.y_stride + (size_t)(head * p.y_head + first_row + r)] =
            sum_segments<TILES>(sums, p.cut, r, column);
    }
    if (p.cut.cluster > 1) cluster_barrier();       /* the others may still be reading this block's sums */
}

/* How full the GPU's two blocks a multiprocessor are, as a share of 1, with that cut of `heads` matrices. */
static double cut_efficiency(const Cut &cut, int rows, int cols, int heads) {
    const int group_rows = STRIP * (WARPS / cut.along), groups = divide_up(rows, group_rows), slots = 2 * gpu.multiprocessors;
    const double blocks = (double)groups * heads * cut.cluster, rounds = ceil(blocks / slots);
    return blocks / (rounds * slots) * rows / ((double)groups * group_rows) * cols
           / ((double)cut.cluster * cut.along * cut.length);
}

static Cut cut_of(int cluster, int along, int cols) {
    const int length = divide_up(divide_up(cols, cluster * along), SEGMENT_STEP) * SEGMENT_STEP;
    return {.cluster = cluster, .along = along, .length = length, .piece = SEGMENT_STEP};
}

/* The cut of a matrix by its shape: more segments as long as that fills the GPU better. Two warps of a block at least, so that
 * 256 neighbouring bytes of a row are read together; then blocks of a cluster before more warps, since a block with more rows
 * reads x less often. */
static Cut choose_cut(int rows, int cols, int heads) {
    const int clusters = gpu.major == 9 ? MAX_CLUSTER : 1;
    Cut best = cut_of(1, 2, cols);
    double efficiency = cut_efficiency(best, rows, cols, heads);
    for (int ways = 4; ways <= clusters * WARPS; ways *= 2) {
        const int cluster = ways / 2 < clusters ? ways / 2 : clusters;
        const Cut cut = cut_of(cluster, ways / cluster, cols);
        const double found = cut_efficiency(cut, rows, cols, heads);
        if (found <= efficiency + 0.02) continue;
        best = cut;
        efficiency = found;
    }
    return best;
}

/* As much of each segment as the shared memory holds with so many rows of x; whole batches. */
static void choose_piece(Cut *cut, DType D, int columns) {
    const int most = STAGED_BYTES / (columns * (D == EXACT ? 4 : 2)) / cut->along / SEGMENT_STEP * SEGMENT_STEP;
    cut->piece = most < SEGMENT_STEP ? SEGMENT_STEP : most < cut->length ? most : cut->length;
}

template <DType D, int TILES> static void launch_product(Product *product) {
    const int columns = product->n_rows < TILES * 8 ? product->n_rows : TILES * 8;
    Cut *cut = &product->cut;
    choose_piece(cut, D, columns);
    const size_t shared = (size_t)(staged_pieces(TILES) * staged_bytes(D, *cut, columns) + sums_bytes(TILES));
    const int groups = divide_up(product->w.rows, STRIP * (WARPS / cut->along)) * product->heads;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {.x = (unsigned)cut->cluster, .y = 1, .z = 1};
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3((unsigned)cut->cluster, (unsigned)divide_up(product->n_rows, TILES * 8), (unsigned)groups);
    launch.blockDim = dim3(THREADS);
    launch.dynamicSmemBytes = shared;
    launch.stream = gpu.stream;
    launch.attrs = &attribute;
    launch.numAttrs = cut->cluster > 1;
    allow_shared(product_kernel<D, TILES>, shared);
    CUDA(cudaLaunchKernelEx(&launch, product_kernel<D, TILES>, *product));
}

/* Many rows are narrowed first, if there is room for them and for two pieces of each. */
template <DType D> static bool narrow_input(Product *product) {
    const size_t width = (size_t)product->w.cols * (size_t)product->heads, n = (size_t)product->n_rows * width;
    if (product->n_rows <= MANY_ROWS || n > MAX_NARROWED || product->cut.along > MANY_ALONG) return false;
    narrow_kernel<D><<<blocks_for(n / 8), THREADS, 0, gpu.stream>>>(product->x, product->x_stride, width, n, product->aligned);
    LAUNCHED();
    product->x_stride = width;
    return true;
}

/* Eight rows of x for each tile, as few tiles as hold all rows. */
template <DType D> static void launch_tiles(Product *product) {
    if (D == EXACT || product->n_rows <= 8) launch_product<D, 1>(product);
    else if constexpr (D != EXACT) {
        if (product->n_rows <= 16 || gpu.shared_per_block < (220 << 10)) launch_product<D, 2>(product);
        else if (narrow_input<D>(product)) launch_product<D, MANY_TILES>(product);
        else launch_product<D, 4>(product);
    }
}

/* Whether rows of that type begin at multiples of 16 bytes, in a tensor that does. */
static bool rows_aligned(DType dtype, int cols) { return dtype != DTYPE_F32 && (size_t)cols * weight_bytes(dtype) % 16 == 0; }

static bool floats_aligned(const float *x, size_t stride) { return (uintptr_t)x % 16 == 0 && stride % 4 == 0; }

static void multiply(Product product) {
    const Matrix *w = &product.w;
    if (product.n_rows <= 0 || w->rows <= 0) return;
    product.aligned = floats_aligned(product.x, product.x_stride) && product.x_head % 4 == 0;
    product.cut = choose_cut(w->rows, w->cols, product.heads);
    if (!rows_aligned(w->dtype, w->cols) || (uintptr_t)w->data % 16) launch_tiles<EXACT>(&product);
    else if (w->dtype == DTYPE_BF16) launch_tiles<DTYPE_BF16>(&product);
    else if (w->dtype == DTYPE_F16) launch_tiles<DTYPE_F16>(&product);
    else launch_tiles<DTYPE_F8_E4M3>(&product);
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
    w.data += (size_t)nope * (size_t)w.cols * weight_bytes(w.dtype);
    w.first_row += nope;
    w.rows = v;
    multiply({.w = w, .x = z, .y = y, .x_stride = (size_t)heads * (size_t)lora, .y_stride = (size_t)heads * (size_t)v,
              .n_rows = n_rows, .heads = heads, .head_rows = nope + v, .x_head = lora, .y_head = v, .aligned = false, .cut = {}});
}

/* ---- absorb_query: the same matrices from their other side. A thread takes four columns, a quarter of the rows and eight rows
 * of q, in f32: few multiplications for each weight, which is read once for eight rows. */

enum {
    ABSORB_LANES = 128, ABSORB_PARTS = 4, ABSORB_THREADS = ABSORB_LANES * ABSORB_PARTS,
    ABSORB_COLUMNS = 4 * ABSORB_LANES, ABSORB_ROWS = 8,
};

/* Four neighbouring weights of a row as f32. EXACT: one by one, zeros past the last of `count`. */
template <DType D> static __device__ inline float4 load_four(const uint8_t *data, size_t i, int count, DType dtype) {
    if constexpr (D == DTYPE_F8_E4M3) {
        const uint2 pairs = widen_four(__ldg((const uint32_t *)(data + i)));
        return make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000),
                           __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000));
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
    for (int i = (int)threadIdx.x; i < a.nope * ABSORB_ROWS; i += ABSORB_THREADS) {
        const int r = min(i / a.nope, rows - 1);
        q_shared[i % a.nope * ABSORB_ROWS + i / a.nope] =
            a.q[((size_t)(first + r) * (size_t)a.heads + (size_t)head) * q_width + (size_t)(i % a.nope)];
    }
    for (int i = (int)threadIdx.x; i < rows * a.rope && blockIdx.x == 0; i += ABSORB_THREADS) {
        const size_t vector = (size_t)(first + i / a.rope) * (size_t)a.heads + (size_t)head;
        a.y[vector * y_width + (size_t)(a.kv_b.cols + i % a.rope)] = a.q[vector * q_width + (size_t)(a.nope + i % a.rope)];
    }
}

/* Grid: groups of columns, heads, groups of rows of q. Shared: q transposed, [nope, ABSORB_ROWS]. */
template <DType D>
static __global__ void __launch_bounds__(ABSORB_THREADS, 2) absorb_kernel(const __grid_constant__ Absorb a) {
    extern __shared__ float4 q_shared[];
    __shared__ float4 sums[ABSORB_PARTS - 1][ABSORB_ROWS][ABSORB_LANES];
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
    for (int r = 0; r < ABSORB_ROWS; r++)
        if (part) sums[part - 1][r][lane] = total[r];
    __syncthreads();
    if (part) return;
#pragma unroll
    for (int r = 0; r < ABSORB_ROWS; r++) {
        float *y = a.y + ((size_t)(first + r) * (size_t)a.heads + (size_t)head) * (size_t)(lora + a.rope) + (size_t)column;
        for (int p = 0; p < ABSORB_PARTS - 1; p++) {
            const float4 other = sums[p][r][lane];
            total[r] = make_float4(total[r].x + other.x, total[r].y + other.y, total[r].z + other.z, total[r].w + other.w);
        }
        const float out[4] = {total[r].x, total[r].y, total[r].z, total[r].w};
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (r < rows && c < count) y[c] = out[c];
    }
}

template <DType D> static void launch_absorb(const Absorb &absorb) {
    const dim3 grid((unsigned)divide_up(absorb.kv_b.cols, ABSORB_COLUMNS), (unsigned)absorb.heads,
                    (unsigned)divide_up(absorb.n_rows, ABSORB_ROWS));
    const size_t shared = (size_t)absorb.nope * ABSORB_ROWS * sizeof(float);
    CUDA(cudaFuncSetAttribute(absorb_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    absorb_kernel<D><<<grid, ABSORB_THREADS, shared, gpu.stream>>>(absorb);
    LAUNCHED();
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
 * Owns: the router, and the experts' products. Rows are gathered by expert on the device, so each expert's weights are read once
 * for 8 or 16 rows that chose it, and the host never learns who was chosen. Gate and up share a strip, 16 rows of each, so
 * their product is gated before it is written; down takes all experts of the pass one after the other in each block, so a row's
 * experts are added in ascending order, without a second buffer.
 */

/* The best of n values in shared memory, found by one warp; equal values: the lower index. Takes it out by setting it to -inf. */
static __device__ int take_best(float *values, int n) {
    float best = -INFINITY;
    int at = INT_MAX;
    for (int i = lane_id(); i < n; i += 32)
        if (values[i] > best || at == INT_MAX) best = values[i], at = i;
    for (int distance = 16; distance; distance /= 2) {
        const float other = __shfl_xor_sync(~0u, best, distance);
        const int other_at = __shfl_xor_sync(~0u, at, distance);
        if (other > best || (other == best && other_at < at)) best = other, at = other_at;
    }
    __syncwarp();
    if (lane_id() == 0) values[at] = -INFINITY;
    __syncwarp();
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
    for (int i = 0; i < kept; i++) {
        const int g = take_best(group, groups);
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
    for (int e = lane_id(); e < router.experts; e += 32) {
        score[e] = 1 / (1 + expf(-router.logits[(size_t)blockIdx.x * (size_t)router.experts + (size_t)e]));
        choice[e] = score[e] + router.bias[e];      /* the bias balances the load: it chooses, it does not weigh */
        if (isnan(choice[e])) choice[e] = INFINITY, score[e] = NAN;         /* chosen, so that it shows */
        if (choice[e] < -1e30f) choice[e] = -1e30f; /* -inf marks what is out of the race */
    }
    __syncwarp();
    if (router.groups > 1) limit_groups(choice, choice + router.experts, router.experts, router.groups, router.kept);
    for (int i = 0; i < router.per_token; i++) {
        const int best = take_best(choice, router.experts);
        total += score[best];
        if (lane_id() == 0) picks[i] = best, weights[i] = score[best];
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
    allow_shared(route_kernel, shared);
    route_kernel<<<(unsigned)n_rows, 32, shared, gpu.stream>>>(router);
    LAUNCHED();
}

enum { MAX_LISTED = 16 * MAX_PASS_ROWS, LIST_THREADS = 1024, EXPERTS_EACH = MAX_EXPERTS / LIST_THREADS };

/* Who chose whom: a pick is row * per_token + its number. Written by list_kernel for the two that follow it. */
static __device__ struct ExpertLists {
    int n;                      /* experts that were chosen */
    int expert[MAX_EXPERTS];    /* [n] ascending */
    int begin[MAX_EXPERTS + 1]; /* [n + 1] where the picks of each begin */
    int picks[MAX_LISTED];
} expert_lists;

/* Counts the picks of each expert, adds up the counts, and deals the picks out. One block. In which order the picks of one expert
 * come is left to chance: it only decides which column of an instruction a row has. */
static __global__ void __launch_bounds__(LIST_THREADS) list_kernel(const int *picks, int n) {
    __shared__ int place[MAX_EXPERTS];
    __shared__ unsigned of_warp[LIST_THREADS / 32];
    const int first = (int)threadIdx.x * EXPERTS_EACH;
    for (int i = 0; i < EXPERTS_EACH; i++) place[first + i] = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += LIST_THREADS) atomicAdd(&place[picks[i]], 1);
    __syncthreads();
    unsigned own = 0, before = 0;                   /* picks, and chosen experts << 16 */
    for (int i = 0; i < EXPERTS_EACH; i++) own += (unsigned)place[first + i] + (place[first + i] ? 1u << 16 : 0);
    unsigned sum = own;
    for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(~0u, sum, (unsigned)distance);
        if (lane_id() >= distance) sum += other;
    }
    if (lane_id() == 31) of_warp[warp_id()] = sum;
    __syncthreads();
    for (int w = 0; w < warp_id(); w++) before += of_warp[w];
    before += sum - own;
    for (int i = 0; i < EXPERTS_EACH; i++) {
        const int count = place[first + i];
        place[first + i] = (int)(before & 0xffff);
        if (!count) continue;
        expert_lists.expert[before >> 16] = first + i;
        expert_lists.begin[before >> 16] = (int)(before & 0xffff);
        before += (unsigned)count + (1u << 16);
    }
    if (threadIdx.x == LIST_THREADS - 1) {
        expert_lists.n = (int)(before >> 16);
        expert_lists.begin[before >> 16] = (int)(before & 0xffff);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += LIST_THREADS) expert_lists.picks[atomicAdd(&place[picks[i]], 1)] = i;
}

struct Experts {
    const Matrix *gate, *up, *down;                 /* [experts], on the device */
    const float *x, *weights;
    float *gated;               /* [picks, inter] */
    float *y;
    int n_rows, per_token, hidden, inter;
    bool aligned;               /* x and gated allow loads of 16 bytes */
    Cut gate_cut, down_cut;
};

/* The rows of x that a block multiplies next: some of those that chose one expert. */
static __device__ Input chosen_rows(int expert, int first, int columns) {
    const int begin = expert_lists.begin[expert];
    return {.x = NULL, .narrowed = NULL, .list = expert_lists.picks + begin, .stride = 0, .first = first,
            .count = min(columns, expert_lists.begin[expert + 1] - begin - first), .divisor = 1, .cols = 0, .aligned = false};
}

/* gated = silu(gate x) * up x, 16 values of one expert. Grid: groups of 16, experts that may have been chosen. */
template <DType D, int TILES>
static __global__ void __launch_bounds__(THREADS, 2) gate_up_kernel(const __grid_constant__ Experts e) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int expert = (int)blockIdx.y, row = (int)blockIdx.x * 16, columns = TILES * 8;
    if (expert >= expert_lists.n) return;
    const int id = expert_lists.expert[expert], members = expert_lists.begin[expert + 1] - expert_lists.begin[expert];
    Strip strip;
    set_fragment<D>(&strip, 0, e.gate[id], row);
    set_fragment<D>(&strip, 1, e.up[id], row);
    float *sums = (float *)(shared + staged_bytes(D, e.gate_cut, min(columns, e.n_rows)));
    for (int first = 0; first < members; first += columns) {
        Batch batch;
        fetch_batch<D>(batch, strip, first_batch<D>(e.gate_cut, 0));
        Input input = chosen_rows(expert, first, columns);
        input.x = e.x, input.stride = (size_t)e.hidden, input.cols = e.hidden;
        input.divisor = e.per_token, input.aligned = e.aligned;
        multiply_segment<D, TILES>(sums + warp_id() * columns * SUM_STRIDE, batch, strip, input, e.gate_cut, 0, shared, 0);
        __syncthreads();
        for (int i = (int)threadIdx.x; i < 16 * input.count; i += THREADS) {
            const int r = i % 16, column = i / 16;
            if (row + r >= e.inter) continue;
            const float gate = sum_segments<TILES>(sums, e.gate_cut, r, column);
            e.gated[(size_t)input.list[first + column] * (size_t)e.inter + (size_t)(row + r)] =
                silu(gate) * sum_segments<TILES>(sums, e.gate_cut, 16 + r, column);
        }
    }
}

/* y += weight * down gated for 32 values of every row, over all experts that were chosen, in ascending order. */
template <DType D, int TILES>
static __global__ void __launch_bounds__(THREADS, 2) down_kernel(const __grid_constant__ Experts e) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int row = (int)blockIdx.x * STRIP, columns = TILES * 8, k = first_batch<D>(e.down_cut, 0);
    float *sums = (float *)(shared + staged_bytes(D, e.down_cut, min(columns, e.n_rows)));
    Strip strip;
    Batch batch;
    set_strip<D>(&strip, e.down[expert_lists.expert[0]], row);
    fetch_batch<D>(batch, strip, k);
    for (int expert = 0, first = 0; expert < expert_lists.n;) {
        Input input = chosen_rows(expert, first, columns);
        input.x = e.gated, input.stride = (size_t)e.inter, input.cols = e.inter, input.aligned = e.aligned;
        multiply_segment<D, TILES>(sums + warp_id() * columns * SUM_STRIDE, batch, strip, input, e.down_cut, 0, shared, 0);
        first += columns;
        if (first >= expert_lists.begin[expert + 1] - expert_lists.begin[expert]) first = 0, expert++;
        if (expert < expert_lists.n) {                     /* the next weights are on their way while these sums are added */
            set_strip<D>(&strip, e.down[expert_lists.expert[expert]], row);
            fetch_batch<D>(batch, strip, k);
        }
        __syncthreads();
        for (int i = (int)threadIdx.x; i < STRIP * input.count; i += THREADS) {
            const int r = i % STRIP, column = i / STRIP, pick = input.list[input.first + column];
            if (row + r >= e.hidden) continue;
            float *y = e.y + (size_t)(pick / e.per_token) * (size_t)e.hidden + (size_t)(row + r);
            *y = fmaf(e.weights[pick], sum_segments<TILES>(sums, e.down_cut, r, column), *y);
        }
    }
}

template <DType D, int TILES> static void launch_experts(Experts e, int most) {
    const int columns = e.n_rows < TILES * 8 ? e.n_rows : TILES * 8;
    choose_piece(&e.gate_cut, D, columns);
    choose_piece(&e.down_cut, D, columns);
    const size_t gate_shared = (size_t)(staged_bytes(D, e.gate_cut, columns) + sums_bytes(TILES));
    const size_t down_shared = (size_t)(staged_bytes(D, e.down_cut, columns) + sums_bytes(TILES));
    allow_shared(gate_up_kernel<D, TILES>, gate_shared);
    gate_up_kernel<D, TILES><<<dim3((unsigned)divide_up(e.inter, 16), (unsigned)most), THREADS, gate_shared, gpu.stream>>>(e);
    LAUNCHED();
    allow_shared(down_kernel<D, TILES>, down_shared);
    down_kernel<D, TILES><<<(unsigned)divide_up(e.hidden, STRIP), THREADS, down_shared, gpu.stream>>>(e);
    LAUNCHED();
}

template <DType D> static void launch_expert_tiles(const Experts &e, int most) {
    if (D == EXACT || e.n_rows <= 8) launch_experts<D, 1>(e, most);
    else if constexpr (D != EXACT) launch_experts<D, 2>(e, most);
}

/* As many rows at a time as the lists hold: all, unless a token has more than 16 experts. */
static void experts(float *y, const float *x, const int *picks, const float *weights, int n_rows, const LayerWeights *layer,
                    const Config *config, float *scratch) {
    const int per_token = config->num_experts_per_tok, hidden = config->hidden_size, inter = config->moe_intermediate_size;
    const DType dtype = layer->expert_dtype;
    const bool aligned = rows_aligned(dtype, hidden) && rows_aligned(dtype, inter);
    for (int first = 0, n; first < n_rows; first += n) {
        n = n_rows - first < MAX_LISTED / per_token ? n_rows - first : MAX_LISTED / per_token;
        const size_t row = (size_t)first;
        const float *in = x + row * (size_t)hidden;
        const Experts e = {.gate = layer->expert_gate, .up = layer->expert_up, .down = layer->expert_down, .x = in,
                           .weights = weights + row * (size_t)per_token, .gated = scratch, .y = y + row * (size_t)hidden,
                           .n_rows = n, .per_token = per_token, .hidden = hidden, .inter = inter,
                           .aligned = floats_aligned(in, (size_t)hidden) && floats_aligned(scratch, (size_t)inter),
                           .gate_cut = cut_of(1, WARPS, hidden), .down_cut = cut_of(1, WARPS, inter)};
        const int most = n * per_token < config->n_routed_experts ? n * per_token : config->n_routed_experts;
        list_kernel<<<1, LIST_THREADS, 0, gpu.stream>>>(picks + row * (size_t)per_token, n * per_token);
        LAUNCHED();
        if (!aligned) launch_expert_tiles<EXACT>(e, most);
        else if (dtype == DTYPE_BF16) launch_expert_tiles<DTYPE_BF16>(e, most);
        else if (dtype == DTYPE_F16) launch_expert_tiles<DTYPE_F16>(e, most);
        else launch_expert_tiles<DTYPE_F8_E4M3>(e, most);
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
 * attend_kernel takes any shape, in f32. latent_kernel is for the 512 + 64 values of GLM and DeepSeek, on tensor cores, and on
 * Hopper hopper_kernel: its blocks run through a chunk or through a whole list, as the device has room. Chunks join in their order,
 * by the same steps, in either case: the bits are the same.
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

/* ---- Hopper: the same on warpgroups. Of a thread block's four, two bring rows: they gather a tile of 64, widen it and hand
 * it over, two tiles in turns. Two multiply: the first scores and weighs a tile, then each adds up half of its values. A block
 * runs through one chunk of a list and leaves its part, or through the whole list, and then the sums so far wait in scratch
 * for each chunk to join. */

enum {
    CHUNK_KEYS = 256, HOPPER_KEYS = 64,       /* keys of a chunk, and of a tile */
    CHUNK_TILES = CHUNK_KEYS / HOPPER_KEYS,
    COLUMN_BLOCK = 64 * 128,      /* bytes of 64 columns of a tile or of the queries: 64 rows of 128 bytes, swizzled */
    HOPPER_TILE = LATENT_WIDTH / 64 * COLUMN_BLOCK,
    CONSUMERS = 256, PRODUCERS = 256,       /* threads */
    WARP_KEYS = HOPPER_KEYS / (PRODUCERS / 32),           /* of a tile, that a producing warp brings */
    SCORE_REGISTERS = 208, VALUE_REGISTERS = 176, PRODUCER_REGISTERS = 64,      /* of a thread, by its warpgroup's work */
    WEIGHTS_READY = 1, WEIGHTS_TAKEN, QUERY_READY, RESULT_READY,        /* barriers among the consumers */
    AT_ONCE = 4,                /* times 16 bytes that a thread reads before it writes */
    PART_FLOATS = LATENT_HEADS * (LATENT + 2),          /* of a chunk's part: values as threads hold them, maxima, sums */
    RESULT_PITCH = LATENT * 4 + 16,         /* bytes from head to head of a result in shared memory: in other banks */
};

/* How a chunk joins those before it: what they are multiplied by, and what it is. */
struct Joining { float before, own; };

struct HopperShared {
    uint8_t query[HOPPER_TILE], tiles[2][HOPPER_TILE];
    uint4 weights[HOPPER_KEYS / 16][128];     /* of a tile, as the threads of a warpgroup hold them */
    float shrink[LATENT_HEADS], maximum[LATENT_HEADS], sum[LATENT_HEADS];   /* of the chunks that have ended */
    Joining joining[LATENT_HEADS];
    uint64_t full[2], empty[2];             /* barriers of the tiles */
};

/* What a thread block does: tiles of one row's list, for up to 64 heads. */
struct LatentTask {
    SelectedKeys keys;          /* the row's */
    const float *q;             /* [n_heads, LATENT_WIDTH] */
    float *z, *parts;           /* [n_heads, LATENT] the result; [PART_FLOATS] of the first chunk, or of those so far */
    int n_heads, begin, end, tiles;
    float scale;
    bool whole;                 /* the list: the result is written. Otherwise a part for each chunk is */
};

static __device__ float join(float before, float own, const Joining &joining) {
    return __fmaf_rn(before, joining.before, __fmul_rn(own, joining.own));
}

/* Four values as a thread holds them: two of a head, two of the head eight rows below. */
static __device__ float4 join(float4 before, float4 own, const Joining &above, const Joining &below) {
    return make_float4(join(before.x, own.x, above), join(before.y, own.y, above), join(before.z, own.z, below),
                       join(before.w, own.w, below));
}

/* A chunk with this maximum and sum joins those before, whose maximum and sum become those of all. */
static __device__ Joining join_sums(float *maximum, float *sum, float own_maximum, float own_sum) {
    const float larger = fmaxf(*maximum, own_maximum), before = expf(*maximum - larger), own = expf(own_maximum - larger);
    *sum = __fmaf_rn(*sum, before, __fmul_rn(own_sum, own));
    *maximum = larger;
    return {before, own};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static __device__ void barrier_start(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

static __device__ void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

/* Until the tile of turn `turn` has passed the barrier, counted from 0 by the tiles that used it. */
static __device__ void barrier_wait(uint64_t *barrier, int turn) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
                 :: "r"(shared_address(barrier)), "r"(turn % 2) : "memory");
}

static __device__ void consumers_wait(int barrier) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"((int)CONSUMERS) : "memory");
}

static __device__ void consumers_tell(int barrier) {
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "n"((int)CONSUMERS) : "memory");
}

/* What this thread has written to shared memory, or knows to be written, is there for products from now on. */
static __device__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* A matrix in shared memory as products want to know it: rows of 128 swizzled bytes, eight of them in 1,024. Where the
 * products do not sum over its columns, the next 64 of these lie `apart` bytes behind the first. */
static __device__ uint64_t matrix_at(uint32_t address, uint32_t apart) {
    const uint32_t low = address / 16 | apart / 16 << 16, high = 1024 / 16 | 1u << 30;
    uint64_t matrix;
    asm("mov.b64 %0, {%1, %2};" : "=l"(matrix) : "r"(low), "r"(high));
    return matrix;
}

static __device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Until at most `left` groups of products are under way. */
template <int left> static __device__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(left) : "memory");
}

#define EIGHT_OF(c, i) \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define THIRTY_TWO_OF(c, i) EIGHT_OF(c, i), EIGHT_OF(c, i + 8), EIGHT_OF(c, i + 16), EIGHT_OF(c, i + 24)
#define FIRST_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
    "%26, %27, %28, %29, %30, %31"
#define NEXT_32 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
    "%56, %57, %58, %59, %60, %61, %62, %63"

/* c [64 heads, 64 keys] = (add ? c : 0) + a [64, 16] b^T, both in shared memory, by a warpgroup. */
static __device__ void multiply_scores(float (&c)[32], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_32 "}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : THIRTY_TWO_OF(c, 0) : "l"(a), "l"(b), "r"(add));
}

/* c [64 heads, 128 values], a thread's from its value `first` on, = (add ? c : 0) + a [64, 16 keys] b, b in shared memory. */
template <int first> static __device__ void multiply_values(float (&c)[128], const uint32_t *a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FIRST_32 ", " NEXT_32 "}, "
                 "{%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
                 : THIRTY_TWO_OF(c, first), THIRTY_TWO_OF(c, first + 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

static __device__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The lane's row in a tile, of key `lane` % WARP_KEYS of its warp; behind the end, where weights are 0, the last one again. */
static __device__ DeviceRow lane_row(const LatentTask &task, int tile) {
    const int s = task.begin + tile * HOPPER_KEYS + threadIdx.x % PRODUCERS / 32 * WARP_KEYS + threadIdx.x % WARP_KEYS;
    return task.keys.locations[min(s, task.end - 1)];
}

static __device__ const uint8_t *latent_row(const LatentTask &task, DeviceRow row) {
    return row_at(task.keys.pool, task.keys.format.stride, row);
}

static __device__ const uint8_t *row_of_lane(const uint8_t *row, int lane) {
    return (const uint8_t *)__shfl_sync(~0u, (unsigned long long)row, lane);
}

/* A warp's rows will be wanted soon: into the L2 cache, where fetching them takes less long. */
static __device__ void prefetch_rows(const uint8_t *row, int bytes) {
    if (threadIdx.x % 32 < WARP_KEYS)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(row), "r"(bytes) : "memory");
}

/* Starts copying 64 bf16 columns of a warp's rows, from byte `from` on, to where they belong in `block`. */
static __device__ void copy_columns(uint8_t *block, const uint8_t *row, int from) {
    const int lane = threadIdx.x % 32, first = threadIdx.x % PRODUCERS / 32 * WARP_KEYS;
#pragma unroll
    for (int k = 0; k < WARP_KEYS; k += 4) {
        const int key = k + lane / 8;
        const uint8_t *source = row_of_lane(row, key) + from + lane % 8 * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(shared_address(block + (first + key) * 128 + (lane % 8 ^ key) * 16)), "l"(source) : "memory");
    }
}

/* Two e4m3 as bf16: their bits at the right place, then times 2^120, which is exact. pick: which of `codes`, as prmt spells
 * it, each below a byte of its sign. scale = high + low: the result is value * scale, rounded once, but for a last bit at
 * times. */
template <int pick> static __device__ uint32_t widen_two(uint32_t codes, __nv_bfloat162 high, __nv_bfloat162 low) {
    uint32_t bits;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bits) : "r"(codes), "n"(pick));
    bits = bits << 4 & 0x87f087f0;
    __nv_bfloat162 value = __hmul2(*(__nv_bfloat162 *)&bits, __bfloat162bfloat162(__ushort_as_bfloat16(0x7b80)));
    value = __hfma2(value, high, __hmul2(value, low));
    return *(uint32_t *)&value;
}

/* A scale as the sum of two bf16 in one word, the larger one first. */
static __device__ uint32_t split_scale(float scale) {
    const float high = __bfloat162float(__float2bfloat16_rn(scale));
    return pair_bf16(high, scale - high);
}

/* Eight values; one that is not a number makes all of them none, as it does to their row's score. */
static __device__ uint4 widen_codes(uint2 codes, uint32_t scale) {
    const uint32_t odd = ((codes.x & 0x7f7f7f7f) + 0x01010101) | ((codes.y & 0x7f7f7f7f) + 0x01010101);
    if (odd & 0x80808080) scale = 0x7fff7fff;
    const uint32_t twice[2] = {__byte_perm(scale, 0, 0x1010), __byte_perm(scale, 0, 0x3232)};
    const __nv_bfloat162 high = *(__nv_bfloat162 *)&twice[0], low = *(__nv_bfloat162 *)&twice[1];
    return make_uint4(widen_two<0x9180>(codes.x, high, low), widen_two<0xb3a2>(codes.x, high, low),
                      widen_two<0x9180>(codes.y, high, low), widen_two<0xb3a2>(codes.y, high, low));
}

static __device__ uint2 load_codes(const uint8_t *from) {
    uint2 codes;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(codes.x), "=r"(codes.y) : "l"(from));
    return codes;
}

/* Brings bf16 rows: copies that tell the barrier themselves. */
static __device__ void bring_bf16(HopperShared *shared, const LatentTask &task) {
    DeviceRow next = lane_row(task, 0);
    for (int t = 0; t < task.tiles; t++) {
        const uint8_t *row = latent_row(task, next);
        next = lane_row(task, t + 1);
        if (t > 1) barrier_wait(&shared->empty[t % 2], t / 2 - 1);
#pragma unroll
        for (int block = 0; block < LATENT_WIDTH / 64; block++)
            copy_columns(shared->tiles[t % 2] + block * COLUMN_BLOCK, row, block * 128);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(shared_address(&shared->full[t % 2])) : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Brings fp8 rows. A lane has eight values of either half of each of its warp's rows; those of the next tile are on their way
 * while this one's are widened. Of the scales, lane l has group l / 8 of row l % 8. */
static __device__ void bring_fp8(HopperShared *shared, const LatentTask &task) {
    const int lane = threadIdx.x % 32, first = threadIdx.x % PRODUCERS / 32 * WARP_KEYS;
    const uint8_t *row = latent_row(task, lane_row(task, 0));
    DeviceRow after = lane_row(task, 1);
    float scale = *(const float *)(row + LATENT + lane / WARP_KEYS * 4);
    uint2 codes[WARP_KEYS][2];
#pragma unroll
    for (int i = 0; i < 2 * WARP_KEYS; i++)
        codes[i / 2][i % 2] = load_codes(row_of_lane(row, i / 2) + i % 2 * LATENT / 2 + lane * 8);
    for (int t = 0; t < task.tiles; t++) {
        uint8_t *to = shared->tiles[t % 2] + lane / 8 * COLUMN_BLOCK + first * 128;
        const uint8_t *next = latent_row(task, after);
        const uint32_t split = split_scale(scale);
        after = lane_row(task, t + 2);
        scale = *(const float *)(next + LATENT + lane / WARP_KEYS * 4);
        if (t + 1 < task.tiles) prefetch_rows(next, StoredRow<true>::PITCH);
        if (t > 1) barrier_wait(&shared->empty[t % 2], t / 2 - 1);
        copy_columns(shared->tiles[t % 2] + LATENT / 64 * COLUMN_BLOCK, row, LATENT + LATENT / 128 * 4);
        row = next;
#pragma unroll
        for (int i = 0; i < 2 * WARP_KEYS; i++) {
            const int k = i / 2, half = i % 2;
            const uint32_t own = __shfl_sync(~0u, split, k + (half * 2 + lane / 16) * WARP_KEYS);
            *(uint4 *)(to + half * 4 * COLUMN_BLOCK + k * 128 + (lane % 8 ^ k) * 16) = widen_codes(codes[k][half], own);
            codes[k][half] = load_codes(row_of_lane(row, k) + half * LATENT / 2 + lane * 8);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        show_to_products();
        barrier_arrive(&shared->full[t % 2]);
    }
}

/* By the consumers: the queries as bf16; heads that there are not are zeros. */
static __device__ void load_query(HopperShared *shared, const LatentTask &task) {
#pragma unroll 9
    for (int i = threadIdx.x; i < LATENT_HEADS * LATENT_WIDTH / 4; i += CONSUMERS) {
        const int head = i / (LATENT_WIDTH / 4), j = i % (LATENT_WIDTH / 4) * 4;
        const float4 four = head < task.n_heads ? *(const float4 *)(task.q + head * LATENT_WIDTH + j) : make_float4(0, 0, 0, 0);
        *(uint2 *)(shared->query + j / 64 * COLUMN_BLOCK + head * 128 + (j / 8 % 8 ^ head % 8) * 16 + j % 8 * 2) =
            make_uint2(pair_bf16(four.x, four.y), pair_bf16(four.z, four.w));
    }
    show_to_products();
    consumers_wait(QUERY_READY);
}

/* Starts scores [64 heads, 64 keys] of a tile. */
static __device__ void start_scores(float (&scores)[32], HopperShared *shared, int tile) {
    const uint32_t query = shared_address(shared->query), keys = shared_address(shared->tiles[tile % 2]);
    barrier_wait(&shared->full[tile % 2], tile / 2);
    show_to_products();
    begin_products();
#pragma unroll
    for (int k = 0; k < LATENT_WIDTH / 16; k++) {
        const uint32_t at = k / 4 * COLUMN_BLOCK + k % 4 * 32;
        multiply_scores(scores, matrix_at(query + at, 0), matrix_at(keys + at, 0), k > 0);
    }
    end_products();
}

/* Starts total [64 heads, this warpgroup's half of the values] = (fresh ? 0 : total) + weights . latents */
static __device__ void start_values(float (&total)[128], const uint32_t (&weights)[16], HopperShared *shared, int tile,
                                    bool fresh) {
    const uint32_t values = shared_address(shared->tiles[tile % 2]) + threadIdx.x / 128 * 4 * COLUMN_BLOCK;
    begin_products();
#pragma unroll
    for (int k = 0; k < HOPPER_KEYS / 16; k++) {
        const uint32_t at = values + k * 16 * 128;
        multiply_values<0>(total, weights + 4 * k, matrix_at(at, COLUMN_BLOCK), !fresh || k > 0);
        multiply_values<64>(total, weights + 4 * k, matrix_at(at + 2 * COLUMN_BLOCK, COLUMN_BLOCK), !fresh || k > 0);
    }
    end_products();
}

static __device__ void shrink_total(float (&total)[128], float above, float below) {
    if (__all_sync(~0u, above == 1 && below == 1)) return;          /* as it mostly is, once the largest has been seen */
#pragma unroll
    for (int i = 0; i < 128; i += 4) total[i] *= above, total[i + 1] *= above, total[i + 2] *= below, total[i + 3] *= below;
}

/* Of a chunk so far, for a thread's two heads: the largest score before scaling, and the sum of the thread's own weights. */
struct Softmax { float maximum[2], sum[2]; };

/* Scores become weights, n of them; what was added up before has to shrink. Exponents are of 2: scale is times log2(e). */
static __device__ void weigh_scores(uint32_t (&weights)[16], float (&shrink)[2], Softmax *softmax, float (&scores)[32], int n,
                                    float scale) {
#pragma unroll
    for (int i = 0; i < 32 && n < HOPPER_KEYS; i++)
        if (i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= n) scores[i] = -FLT_MAX;
#pragma unroll
    for (int below = 0; below < 2; below++) {
        float largest = softmax->maximum[below], other = -FLT_MAX, sum[2] = {0, 0};
#pragma unroll
        for (int i = 2 * below; i < 32; i += 4) largest = fmaxf(largest, scores[i]), other = fmaxf(other, scores[i + 1]);
        largest = fmaxf(largest, other);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float offset = -largest * scale;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float *score = &scores[i / 2 * 4 + 2 * below + i % 2];
            sum[i % 2] += *score = fast_exp2(fmaf(*score, scale, offset));
        }
        shrink[below] = fast_exp2((softmax->maximum[below] - largest) * scale);
        softmax->sum[below] = softmax->sum[below] * shrink[below] + (sum[0] + sum[1]);
        softmax->maximum[below] = largest;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) weights[i] = pair_bf16(scores[2 * i], scores[2 * i + 1]);
}

/* The end of the chunk that tile t is the last of, for one head; the four threads that share it come together. */
static __device__ void end_chunk(HopperShared *shared, const LatentTask &task, int t, int head, float maximum, float sum) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    maximum = __fmul_rn(maximum, task.scale);
    if (threadIdx.x % 4) return;
    if (!task.whole) {
        float *sums = task.parts + (size_t)(t / CHUNK_TILES) * PART_FLOATS + LATENT_HEADS * LATENT;
        sums[head] = maximum, sums[LATENT_HEADS + head] = sum;
    } else if (t < CHUNK_TILES) shared->maximum[head] = maximum, shared->sum[head] = sum, shared->joining[head] = {0, 1};
    else shared->joining[head] = join_sums(&shared->maximum[head], &shared->sum[head], maximum, sum);
}

/* The sums of the chunk that tile t is the last of go to scratch, as its part, or joined with those of the chunks before;
 * those of a whole list's last chunk stay where they are. */
static __device__ void put_chunk(float (&total)[128], const LatentTask &task, int t, const Joining &above, const Joining &below) {
    const bool joins = task.whole && t >= CHUNK_TILES, stays = task.whole && t + 1 == task.tiles;
    float4 *at = (float4 *)(task.parts + (task.whole ? 0 : (size_t)(t / CHUNK_TILES) * PART_FLOATS))
                 + threadIdx.x / 128 * 32 * 128 + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 32; i += AT_ONCE) {
        float4 before[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE && joins; j++) before[j] = __ldcg(at + (i + j) * 128);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            float *own = total + (i + j) * 4;
            if (joins)
                own[0] = join(before[j].x, own[0], above), own[1] = join(before[j].y, own[1], above),
                own[2] = join(before[j].z, own[2], below), own[3] = join(before[j].w, own[3], below);
            if (!stays) __stcg(at + (i + j) * 128, make_float4(own[0], own[1], own[2], own[3]));
        }
    }
}

/* Writes the result, once nobody needs the tiles any more: gathered in their place, so that whole rows go to memory. */
static __device__ void put_result(const float (&total)[128], HopperShared *shared, const LatentTask &task) {
    const int lane = threadIdx.x % 32, head = threadIdx.x % 128 / 32 * 16 + lane / 4;
    consumers_wait(RESULT_READY);
    const float above = 1 / shared->sum[head], below = 1 / shared->sum[head + 8];
    float *row = (float *)(shared->tiles[0] + head * RESULT_PITCH) + threadIdx.x / 128 * LATENT / 2 + lane % 4 * 2,
          *lower = row + 8 * RESULT_PITCH / 4;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        *(float2 *)(row + i * 8) = make_float2(total[4 * i] * above, total[4 * i + 1] * above);
        *(float2 *)(lower + i * 8) = make_float2(total[4 * i + 2] * below, total[4 * i + 3] * below);
    }
    show_to_products();
    consumers_wait(RESULT_READY);
    if (threadIdx.x >= task.n_heads) return;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;\n"
                 "cp.async.bulk.wait_group 0;"
                 :: "l"(task.z + threadIdx.x * LATENT), "r"(shared_address(shared->tiles[0] + threadIdx.x * RESULT_PITCH)),
                    "n"(LATENT * 4) : "memory");
}

/* The warpgroup that scores and weighs tiles, and adds up the first half of the values. A chunk's sums are put away while the
 * next tile is scored; the last tile is scored twice, since a branch around products would make each of them wait.
 */
static __device__ void score_tiles(HopperShared *shared, const LatentTask &task) {
    const int thread = threadIdx.x, head = thread / 32 * 16 + thread % 32 / 4;
    float scores[32], total[128], shrink[2];
    uint32_t weights[16];
    Softmax softmax = {{-FLT_MAX, -FLT_MAX}, {0, 0}};
    start_scores(scores, shared, 0);
    wait_for_products<0>();
    int t = 0;
    do {
        const bool last = t + 1 == task.tiles, ends = last || (t + 1) % CHUNK_TILES == 0, fresh = t % CHUNK_TILES == 0;
        weigh_scores(weights, shrink, &softmax, scores, task.end - task.begin - t * HOPPER_KEYS,
                     task.scale * 1.4426950408889634f);
        if (t) consumers_wait(WEIGHTS_TAKEN);
#pragma unroll
        for (int k = 0; k < HOPPER_KEYS / 16; k++) shared->weights[k][thread] = *(const uint4 *)(weights + 4 * k);
        if (thread % 4 == 0) shared->shrink[head] = shrink[0], shared->shrink[head + 8] = shrink[1];
        for (int below = 0; below < 2 && ends; below++) {
            end_chunk(shared, task, t, head + 8 * below, softmax.maximum[below], softmax.sum[below]);
            softmax.maximum[below] = -FLT_MAX, softmax.sum[below] = 0;
        }
        consumers_tell(WEIGHTS_READY);
        if (!fresh) shrink_total(total, shrink[0], shrink[1]);
        start_values(total, weights, shared, t, fresh);
        wait_for_products<0>();
        if (thread % 32 == 0) barrier_arrive(&shared->empty[t % 2]);
        __syncwarp();           /* end_chunk's joining is for the whole warp */
        start_scores(scores, shared, last ? t : t + 1);
        if (ends) put_chunk(total, task, t, shared->joining[head], shared->joining[head + 8]);
        wait_for_products<0>();
    } while (++t < task.tiles);
    if (task.whole) put_result(total, shared, task);
}

/* The warpgroup that adds up the other half. */
static __device__ void add_tiles(HopperShared *shared, const LatentTask &task) {
    const int thread = threadIdx.x % 128, head = thread / 32 * 16 + thread % 32 / 4;
    float total[128];
    uint32_t weights[16];
    for (int t = 0; t < task.tiles; t++) {
        const bool last = t + 1 == task.tiles, ends = last || (t + 1) % CHUNK_TILES == 0, fresh = t % CHUNK_TILES == 0;
        consumers_wait(WEIGHTS_READY);
#pragma unroll
        for (int k = 0; k < HOPPER_KEYS / 16; k++) *(uint4 *)(weights + 4 * k) = shared->weights[k][thread];
        const Joining above = shared->joining[head], below = shared->joining[head + 8];
        const float shrink[2] = {shared->shrink[head], shared->shrink[head + 8]};
        if (!last) consumers_tell(WEIGHTS_TAKEN);
        if (!fresh) shrink_total(total, shrink[0], shrink[1]);
        show_to_products();
        start_values(total, weights, shared, t, fresh);
        wait_for_products<0>();
        if (thread % 32 == 0) barrier_arrive(&shared->empty[t % 2]);
        if (ends) put_chunk(total, task, t, above, below);
    }
    if (task.whole) put_result(total, shared, task);
}

#endif

/* Grid: rows, groups of 64 heads, groups of `each` chunks, or the whole list. kept: parts of a row and 64 heads. */
template <bool FP8>
static __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
hopper_kernel(SelectedKeys lists, float *z, float *parts, const float *q, int first_row, int heads, float scale, int kept,
              int each) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t hopper_shared[];
    HopperShared *shared = (HopperShared *)hopper_shared;
    const int first_head = blockIdx.y * LATENT_HEADS, group = threadIdx.x / 128;
    const size_t row_head = (size_t)(first_row + blockIdx.x) * heads + first_head;
    LatentTask task = {.keys = lists.of(first_row + blockIdx.x), .q = q + row_head * LATENT_WIDTH, .z = z + row_head * LATENT,
                       .parts = parts + ((size_t)(blockIdx.x * gridDim.y + blockIdx.y) * kept + blockIdx.z * each) * PART_FLOATS,
                       .n_heads = min(heads - first_head, (int)LATENT_HEADS), .begin = (int)blockIdx.z * each * CHUNK_KEYS,
                       .end = 0, .tiles = 0, .scale = scale, .whole = gridDim.z == 1};
    task.end = min(task.keys.length, task.begin + each * CHUNK_KEYS), task.tiles = divide_up(task.end - task.begin, HOPPER_KEYS);
    if (task.whole && !task.keys.length)            /* a sum over nothing, divided by 0 */
        for (int i = threadIdx.x; i < task.n_heads * LATENT; i += blockDim.x) task.z[i] = __int_as_float(0x7fffffff);
    if (task.begin >= task.end) return;
    if (!threadIdx.x) {
        for (int i = 0; i < 2; i++) barrier_start(&shared->full[i], PRODUCERS), barrier_start(&shared->empty[i], CONSUMERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (group >= CONSUMERS / 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"((int)PRODUCER_REGISTERS));
        if constexpr (FP8) bring_fp8(shared, task);
        else bring_bf16(shared, task);
    } else if (group == 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"((int)SCORE_REGISTERS));
        load_query(shared, task);
        score_tiles(shared, task);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"((int)VALUE_REGISTERS));
        load_query(shared, task);
        add_tiles(shared, task);
    }
#endif
}

/* Joins the parts of single chunks, as a block does that has the whole list. Grid: rows, groups of 64 heads, and which four of
 * the values that a thread holds. */
static __global__ void join_kernel(const int *count, float *z, const float *parts, int heads, int chunks) {
    const int used = divide_up(count[blockIdx.x], CHUNK_KEYS), thread = threadIdx.x, head = thread / 32 * 16 + thread % 32 / 4;
    const float *part = parts + (size_t)(blockIdx.x * gridDim.y + blockIdx.y) * chunks * PART_FLOATS,
                *sums = part + LATENT_HEADS * LATENT;
    float4 total = *(const float4 *)(part + (blockIdx.z * 128 + thread) * 4);
    float maximum[2] = {sums[head], sums[head + 8]}, sum[2] = {sums[LATENT_HEADS + head], sums[LATENT_HEADS + head + 8]};
#pragma unroll 8
    for (int chunk = 1; chunk < used; chunk++) {
        part += PART_FLOATS, sums += PART_FLOATS;
        const float4 own = *(const float4 *)(part + (blockIdx.z * 128 + thread) * 4);
        const Joining above = join_sums(&maximum[0], &sum[0], sums[head], sums[LATENT_HEADS + head]),
                      below = join_sums(&maximum[1], &sum[1], sums[head + 8], sums[LATENT_HEADS + head + 8]);
        total = join(total, own, above, below);
    }
    const float nothing = used ? 1 : __int_as_float(0x7fffffff), above = nothing / sum[0], below = nothing / sum[1];
    const int first = blockIdx.y * LATENT_HEADS + head, column = blockIdx.z * 8 + thread % 4 * 2;
    float *out = z + ((size_t)blockIdx.x * heads + first) * LATENT + column;
    if (first < heads) *(float2 *)out = make_float2(total.x * above, total.y * above);
    if (first + 8 < heads) *(float2 *)(out + 8 * LATENT) = make_float2(total.z * below, total.w * below);
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

/* As many blocks a row as there is room for on the device: a row's bits do not depend on it. */
static void attend_on_hopper(float *z, const float *q, const SelectedKeys &keys, int n_rows, int heads, float scale) {
    const int chunks = divide_up(keys.capacity, CHUNK_KEYS), groups = divide_up(heads, LATENT_HEADS),
              most = (int)PARTIAL_FLOATS / (int)PART_FLOATS / groups, room = gpu.multiprocessors / (n_rows * groups),
              each = divide_up(chunks, room > 1 ? room : 1);
    const bool apart = each < chunks && n_rows * chunks <= most;
    auto kernel = keys.format.dtype == KV_F8 ? hopper_kernel<true> : hopper_kernel<false>;
    allow_shared(kernel, sizeof(HopperShared));
    for (int first = 0; first < n_rows; first += most) {
        const dim3 grid(min(n_rows - first, most), groups, apart ? divide_up(chunks, each) : 1);
        kernel<<<grid, CONSUMERS + PRODUCERS, sizeof(HopperShared), gpu.stream>>>(keys, z, partials, q, first, heads, scale,
                                                                                apart ? chunks : 1, apart ? each : chunks);
        LAUNCHED();
    }
    if (!apart) return;
    join_kernel<<<dim3(n_rows, groups, LATENT / 8), 128, 0, gpu.stream>>>(keys.count, z, partials, heads, chunks);
    LAUNCHED();
}

static void sparse_attention(float *z, const float *q, const RowPool *pool, const RowFormat *format, const DeviceRow *locations,
                             const int *count, int capacity, int n_rows, int heads, float scale) {
    const SelectedKeys keys = {*pool, *format, locations, count, capacity, 0};
    const bool latent = format->dtype != KV_F32 && format->quantised == LATENT && format->plain == TAIL
                        && (format->dtype == KV_BF16 || format->group == 128);
    if (!n_rows) return;
    if (latent && gpu.major == 9) return attend_on_hopper(z, q, keys, n_rows, heads, scale);
    if (!latent || heads % 16)
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
