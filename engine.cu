/* engine.cu: the operations of engine.h on an NVIDIA GPU, the twin of backend.c.
 *
 *     the device . instructions . activations . products . mixture of experts . cached rows and index selection . trails and
 *     compressed rows . attention . DeepSeek-V4 . selection by keys . the hierarchy's operations . sampling and acceptance .
 *     drafters' operations
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
#include <omp.h>
#include <pthread.h>
#include <sys/mman.h>
#include <type_traits>
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
    bool no_graph;              /* begin_work() keeps nothing */
} gpu;

static void check_cuda(cudaError_t status, const char *file, int line) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "tide: %s:%d: CUDA: %s\n", file, line, cudaGetErrorString(status));
    _exit(1);
}

#define CUDA(call) check_cuda(call, __FILE__, __LINE__)

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

/* The first statement of a kernel that has nothing to do beforehand. */
static __device__ inline void begin_kernel() {
    wait_for_previous();
    let_next_start();
}

template <typename... Parameters>
static void launch(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared,
                   std::type_identity_t<Parameters>... arguments) {
    launch_early(kernel, grid, threads, shared, 1, arguments...);
}

/* ---- memory and copies */

enum {
    PARTIAL_FLOATS = 48 << 20,  /* of what an operation leaves for its last kernel: rows run in groups that fit */
    UPLOAD_BYTES = 8 << 20,     /* pinned memory that uploads pass through */
    WEIGHT_CHUNK = 512 << 20,   /* bytes taken at a time for weights */
    WEIGHT_ALIGNMENT = 256,
    MOVERS = 16,                /* threads that move weights, at most */
    MOVE_PIECE = 2 << 20,       /* bytes that one copies at a time, a huge page; each has two of them pinned */
    MOVE_SHARE = 16 << 20,      /* bytes that another thread is started for */
    MOVE_QUEUE = 32,            /* tensors that wait for them */
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
} transit;

static float *partials;         /* [PARTIAL_FLOATS] device: of attention by row, head and chunk: maximum, sum, values; of
                                 * mix_streams by row and slice: sums */

struct Move { uint8_t *to; const uint8_t *from; size_t bytes; };

static struct Movers {          /* threads that bring weights to the device while the pipeline binds the next */
    pthread_t threads[MOVERS];
    int n;                      /* of them that run */
    size_t bytes;               /* that they have been given */
    pthread_mutex_t lock;       /* of all that follows */
    pthread_cond_t changed;
    Move queue[MOVE_QUEUE];     /* a ring: what is to be moved, from `first` to `end` */
    size_t first, end, offset;  /* offset: of the first, what has been taken */
    bool leaving;               /* as soon as nothing is left */
} movers = {{}, 0, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, {}, 0, 0, 0, false};

static void forget_gathers(void);
static bool attention_start(Error *error);
static bool hierarchy_start(Error *error);
static bool speculation_start(Error *error);

static bool start(const DeviceOptions *options, Error *error) {
    gpu.no_graph = options->no_graph;
    if (gpu.stream) return true;
    int count = 0;
    /* Without a driver there is no need to wake its library, which takes memory and time. The second is Windows' for Linux. */
    if (access("/dev/nvidiactl", F_OK) && access("/dev/dxg", F_OK)) return fail(error, "no GPU can be used: there is none");
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver)
        return fail(error, "no GPU can be used: its driver is too old for CUDA %d.%d", CUDART_VERSION / 1000,
                    CUDART_VERSION % 1000 / 10);
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
    return attention_start(error) && hierarchy_start(error) && speculation_start(error);
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

/* All weights that were asked for are on their way. */
static void finish_moving(void) {
    pthread_mutex_lock(&movers.lock);
    movers.leaving = true;
    pthread_cond_broadcast(&movers.changed);
    pthread_mutex_unlock(&movers.lock);
    while (movers.n) pthread_join(movers.threads[--movers.n], NULL);
    movers.leaving = false;
    movers.bytes = 0;
}

static void wait_for_all(void) {
    if (movers.n) finish_moving();
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

static WorkAnswer begin_work(uint64_t key) {
    int at = 0;
    if (!key || gpu.no_graph) return WORK_TO_DO;
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
        return WORK_TO_KEEP;
    }
    if (works.kept[at].graph) {
        CUDA(cudaGraphLaunch(works.kept[at].graph, gpu.stream));
        works.kernels += works.kept[at].kernels;
        return WORK_DONE;
    }
    works.open = at;
    CUDA(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal));
    return WORK_TO_KEEP;
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

/* Moves pieces of what is queued until told to leave: into pinned memory of its own, and from there over the link, so that
 * reading files and the link overlap, whatever sizes tensors have. Threads of OpenMP would sleep between two tensors, which costs
 * a third of the rate. */
static void *move_pieces(void *) {
    cudaEvent_t moved[2];
    uint8_t *pinned = (uint8_t *)aligned_alloc(MOVE_PIECE, 2 * MOVE_PIECE);
    if (!pinned) fprintf(stderr, "tide: out of memory, %d bytes wanted to move weights\n", 2 * MOVE_PIECE), _exit(1);
    madvise(pinned, 2 * MOVE_PIECE, MADV_HUGEPAGE); /* pinned in 0.1 ms a megabyte, small pages in 0.6 */
    memset(pinned, 0, 2 * MOVE_PIECE);
    CUDA(cudaHostRegister(pinned, 2 * MOVE_PIECE, cudaHostRegisterDefault));
    for (int i = 0; i < 2; i++) CUDA(cudaEventCreateWithFlags(&moved[i], cudaEventDisableTiming));
    pthread_mutex_lock(&movers.lock);
    for (int turn = 0;; turn ^= 1) {
        while (movers.first == movers.end && !movers.leaving) pthread_cond_wait(&movers.changed, &movers.lock);
        if (movers.first == movers.end) break;
        const Move move = movers.queue[movers.first % MOVE_QUEUE];
        const size_t at = movers.offset, part = move.bytes - at < MOVE_PIECE ? move.bytes - at : (size_t)MOVE_PIECE;
        movers.offset += part;
        if (movers.offset == move.bytes) {
            movers.first++;
            movers.offset = 0;
            pthread_cond_broadcast(&movers.changed);
        }
        pthread_mutex_unlock(&movers.lock);
        CUDA(cudaEventSynchronize(moved[turn]));
        memcpy(pinned + turn * MOVE_PIECE, move.from + at, part);
        CUDA(cudaMemcpyAsync(move.to + at, pinned + turn * MOVE_PIECE, part, cudaMemcpyHostToDevice, gpu.stream));
        CUDA(cudaEventRecord(moved[turn], gpu.stream));
        pthread_mutex_lock(&movers.lock);
    }
    pthread_mutex_unlock(&movers.lock);
    for (int i = 0; i < 2; i++) CUDA(cudaEventSynchronize(moved[i])), CUDA(cudaEventDestroy(moved[i]));
    CUDA(cudaHostUnregister(pinned));
    free(pinned);
    return NULL;
}

/* Queues the bytes; they are there when wait() returns. */
static const void *import_weights(const void *data, size_t bytes, Error *error) {
    uint8_t *to = place_weights(bytes, error);
    if (!to || !bytes) return to;
    movers.bytes += bytes;
    while (movers.n < MOVERS && movers.n < omp_get_max_threads() && (size_t)movers.n * MOVE_SHARE < movers.bytes)
        if (pthread_create(&movers.threads[movers.n++], NULL, move_pieces, NULL)) {
            fprintf(stderr, "tide: cannot start a thread to move weights\n");
            _exit(1);
        }
    pthread_mutex_lock(&movers.lock);
    while (movers.end - movers.first == MOVE_QUEUE) pthread_cond_wait(&movers.changed, &movers.lock);
    movers.queue[movers.end++ % MOVE_QUEUE] = (Move){to, (const uint8_t *)data, bytes};
    pthread_cond_broadcast(&movers.changed);
    pthread_mutex_unlock(&movers.lock);
    return to;
}

/* As backend.c makes them: four values are the four 16-bit pieces of one hash. */
template <DType dtype>
__global__ void make_weights_kernel(void *to, size_t count, float low, float step, uint64_t seed) {
    begin_kernel();
    const size_t four = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint64_t hash = seed + four;
    hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdu;
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53u;
    hash ^= hash >> 33;
    for (size_t i = 4 * four; i < count && i < 4 * four + 4; i++, hash >>= 16) {
        const float value = fmaf((float)(hash & 0xffff), step, low);
        if (dtype == DTYPE_F32) ((float *)to)[i] = value;
        else if (dtype == DTYPE_BF16) ((__nv_bfloat16 *)to)[i] = __float2bfloat16_rn(value);
        else if (dtype == DTYPE_I8) ((uint8_t *)to)[i] = (uint8_t)hash;
        else if (dtype == DTYPE_F8_E8M0) ((uint8_t *)to)[i] = (uint8_t)(__float_as_uint(value) >> 23);
        else ((__nv_fp8_e4m3 *)to)[i] = __nv_fp8_e4m3(value);
    }
}

static const void *make_weights(void *space, DType dtype, size_t count, float low, float high, uint64_t seed, Error *error) {
    (void)space;
    uint8_t *to = place_weights(count * dtype_size(dtype), error);
    if (!to || !count) return to;
    auto kernel = dtype == DTYPE_F32       ? make_weights_kernel<DTYPE_F32>
                  : dtype == DTYPE_BF16    ? make_weights_kernel<DTYPE_BF16>
                  : dtype == DTYPE_I8      ? make_weights_kernel<DTYPE_I8>
                  : dtype == DTYPE_F8_E8M0 ? make_weights_kernel<DTYPE_F8_E8M0>
                                           : make_weights_kernel<DTYPE_F8_E4M3>;
    launch(kernel, (unsigned)((count + 1023) / 1024), 256, 0, to, count, low, (high - low) / 65536, seed);
    return to;
}

static void release_weights(void) {
    wait_for_all();
    forget_works();                                 /* they name what is about to go */
    forget_gathers();
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

/* The rows of one source, or index keys of one group, that a copy is of. Where rows hold more positions only those that are
 * complete: the last group may still be open. */
static void copy_run(uint8_t *device, uint8_t *host, size_t stride, int device_page, int host_page, int stretch,
                     const Transfer *transfer) {
    const size_t rows = (size_t)(PAGE_ROWS / stretch), first = (size_t)(transfer->first / stretch),
                 count = (size_t)((transfer->first + transfer->count) / stretch) - first;
    device += ((size_t)device_page * rows + first) * stride;
    host += ((size_t)host_page * rows + first) * stride;
    if (!count) return;
    CUDA(cudaMemcpyAsync(transfer->to_host ? host : device, transfer->to_host ? device : host, count * stride,
                         transfer->to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, transit.pages));
}

static void start_copy(Cache *cache, const Transfer *transfer) {
    CUDA(cudaEventRecord(transit.passes, gpu.stream));
    CUDA(cudaStreamWaitEvent(transit.pages, transit.passes, 0));
    for (int i = 0; i < cache->sources && !no_page(transfer->device); i++)
        copy_run(source_rows(cache, (SourceId){i}), host_source_rows(cache, (SourceId){i}), cache->format.stride,
                 transfer->device.id, transfer->host.id, stretch_of(cache, i), transfer);
    for (int g = 0; g < cache->groups && !no_page(transfer->index); g++)
        copy_run(group_index_keys(cache, g), host_group_index_keys(cache, g), cache->index_format.stride, transfer->index.id,
                 transfer->host.id, stretch_of(cache, g), transfer);
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
    begin_kernel();
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
    launch(locate_rows_kernel, divide_up(n_rows, 128), 128, 0, kv_rows, index_rows, view, rows, n_rows);
}

/* ---- measurements */

/* A work that is measured only puts operations on the stream. It is captured once, so that what is timed are the replays of a
 * graph; the median of several, in seconds. */
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
    begin_kernel();
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

__global__ void empty_kernel() {
    begin_kernel();}

extern "C" void cuda_empty(void) {
    launch(empty_kernel, 1, 32, 0);
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
    launch(read_kernel, gpu.multiprocessors * 16, 256, 0, (const uint4 *)data, bytes / sizeof(uint4), sum);
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
 * Instructions
 *
 * Owns: what several kernel families are made of and C++ has no words for: copies into shared memory that run beside the thread
 * that starts them, barriers there that one thread waits at and others arrive at, and matrices on the tensor cores.
 */

static __device__ inline uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- copies into shared memory */

/* 16 bytes into shared memory, or zeros, beside what the thread does next. */
static __device__ inline void start_copy_to_shared(uint8_t *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* 4 or 8 bytes likewise. */
template <int BYTES> static __device__ inline void start_small_copy(uint8_t *to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0) : "memory");
}

/* What the thread has started since the last time is a group. */
static __device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Until at most `LEFT` of the thread's groups are on their way. */
template <int LEFT> static __device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

/* The same where it is known late: of 0 to 3. */
static __device__ inline void wait_for_copies(int left) {
    if (left == 2) wait_for_copies<2>();
    else if (left == 3) wait_for_copies<3>();
    else if (left == 1) wait_for_copies<1>();
    else wait_for_copies<0>();
}

/* ---- barriers in shared memory */

static __device__ inline void start_barrier(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

static __device__ inline void arrive_at(uint64_t *barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" :: "r"(shared_address(barrier)) : "memory");
}

/* As soon as the copies that the thread has started are there. */
static __device__ inline void arrive_with_copies(uint64_t *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(shared_address(barrier)) : "memory");
}

/* Until round `round` of it, from 0 on, is complete. */
static __device__ inline void wait_at(uint64_t *barrier, int round) {
    uint32_t done = 0;
    while (!done)
#if __CUDA_ARCH__ >= 900
        asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
#else
        asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
#endif
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(round & 1) : "memory");
}

#if __CUDA_ARCH__ >= 900
/* Arrives at a barrier that is complete when so many bytes have come too. */
static __device__ inline void expect_bytes(uint64_t *barrier, int bytes) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

/* Any multiple of 16 bytes, which the barrier counts. */
static __device__ inline void start_bulk_copy(void *to, const void *from, int bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
#endif

/* What this thread has written to shared memory, or knows to be written, is there for products and bulk copies from now on. */
static __device__ inline void show_to_products() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* ---- clusters of blocks: sm_90 and later; before, a cluster is one block */

#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
static __device__ inline int cluster_rank(void) { int x; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x)); return x; }
static __device__ inline int cluster_size(void) { int x; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(x)); return x; }
static __device__ inline void cluster_arrive(void) { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
static __device__ inline void cluster_wait(void) { asm volatile("barrier.cluster.wait;" ::: "memory"); }

/* The same variable in the shared memory of block `rank`. */
static __device__ inline uint32_t cluster_address(const void *shared, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((uint32_t)__cvta_generic_to_shared(shared)), "r"(rank));
    return address;
}

/* A barrier that is complete when so many values have been sent. */
static __device__ inline void cluster_open(uint64_t *barrier, int values) {
    start_barrier(barrier, 1);
    expect_bytes(barrier, values * (int)sizeof(float));
}

/* Puts x into the shared memory of block `rank` and counts its bytes at a barrier there. */
static __device__ inline void cluster_send(float *shared, uint64_t *barrier, int rank, float x) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 : : "r"(cluster_address(shared, rank)), "r"(__float_as_uint(x)), "r"(cluster_address(barrier, rank)) : "memory");
}
static __device__ inline void cluster_add(int *shared, int rank, int x) {
    asm volatile("red.shared::cluster.add.u32 [%0], %1;" : : "r"(cluster_address(shared, rank)), "r"(x) : "memory");
}
static __device__ inline int4 cluster_read(const int4 *shared, int rank) {
    int4 x;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(cluster_address(shared, rank)) : "memory");
    return x;
}
static __device__ inline int2 cluster_read(const int2 *shared, int rank) {
    int2 x;
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x.x), "=r"(x.y) : "r"(cluster_address(shared, rank)) : "memory");
    return x;
}
#else
static __device__ inline int cluster_rank(void) { return 0; }
static __device__ inline int cluster_size(void) { return 1; }
static __device__ inline void cluster_arrive(void) {}
static __device__ inline void cluster_wait(void) { __syncthreads(); }
static __device__ inline void cluster_open(uint64_t *barrier, int values) { start_barrier(barrier, values); }
static __device__ inline void cluster_send(float *shared, uint64_t *barrier, int, float x) { *shared = x, arrive_at(barrier); }
static __device__ inline void cluster_add(int *shared, int, int x) { atomicAdd(shared, x); }
template <typename T> static __device__ inline T cluster_read(const T *shared, int) { return *shared; }
#endif

/* ---- tensor cores */

/* Four 8 x 8 matrices of bf16; lane l names row l % 8 of matrix l / 8. */
static __device__ void load_matrices(uint32_t (&m)[4], const __nv_bfloat16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)));
}

static __device__ void load_transposed(uint32_t (&m)[4], const __nv_bfloat16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)));
}

static __device__ inline uint32_t pair_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&pair;
}

/* c [16, 8] += a [16, 16] b [16, 8] */
static __device__ void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* Around products of warpgroups, whose operands are in shared memory. */
static __device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Until at most `left` groups of products are under way. */
template <int left> static __device__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(left) : "memory");
}
#endif

/* =====================================================================================================================
 * Activations
 *
 * Owns: what is done to rows of f32 between products: norms, rotary positions (RoFormer, eq. 34), gates, copies. All of it is
 * bound by launches and memory, so a thread simply takes one value, or a fixed group of threads one vector. Of few rows nothing
 * but latency counts: what a thread loads is on its way together, weights before the kernel in front has ended.
 */

enum {
    THREADS = 256,
    MAX_SPLIT = 8,                  /* blocks that share a row, at most */
    NORM_THREADS = 256,             /* of a block, for a row that can have more of them */
};

static dim3 blocks_for(size_t n) { return dim3((unsigned)((n + THREADS - 1) / THREADS)); }

/* The number of this thread in its grid. */
static __device__ inline size_t thread_index() { return (size_t)blockIdx.x * blockDim.x + threadIdx.x; }

/* The first `count` of four neighbouring values, and zeros. Where they are weights it may come before wait_for_previous(). */
static __device__ inline float4 load_four(const float *p, int count) {
    float4 v = {};
    if (count >= 4 && (uintptr_t)p % 16 == 0)
        asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    else {
        if (count > 0) v.x = __ldcg(p);
        if (count > 1) v.y = __ldcg(p + 1);
        if (count > 2) v.z = __ldcg(p + 2);
        if (count > 3) v.w = __ldcg(p + 3);
    }
    return v;
}

/* Four neighbouring values from p on, the first `count` of them. */
static __device__ inline void store_four(float *p, float4 v, int count) {
    if (count >= 4 && (uintptr_t)p % 16 == 0) *(float4 *)p = v;
    else {
        if (count > 0) p[0] = v.x;
        if (count > 1) p[1] = v.y;
        if (count > 2) p[2] = v.z;
        if (count > 3) p[3] = v.w;
    }
}

/* The sum over the lanes up to this one. */
template <typename T> static __device__ inline T warp_prefix_sum(T x) {
    for (unsigned step = 1; step < 32; step *= 2) {
        const T below = __shfl_up_sync(~0u, x, step);
        if (threadIdx.x % 32 >= step) x += below;
    }
    return x;
}

/* The sum over a warp, always the same tree; and over a block, the warps' sums in order, of which each of_warp is for one. */
static __device__ inline float warp_sum(float value) {
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
}

static __device__ inline float block_sum(float *of_warp, float value) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < (int)blockDim.x / 32; i++) sum += of_warp[i];
    return sum;
}

static __device__ inline bool is_finite(float x) { return fabsf(x) <= FLT_MAX; }
static __device__ inline bool is_finite(float4 v) {
    return is_finite(v.x) && is_finite(v.y) && is_finite(v.z) && is_finite(v.w);
}

/* The lowest place of a pass that had a row which is not finite stays in the report, and of that place the lowest row: -1 is the
 * highest number there is. */
static __device__ inline void report_bad(PassReport *report, int place, int row) {
    static_assert(offsetof(PassReport, bad_row) == 0 && offsetof(PassReport, bad_place) == 4);
    atomicMin((unsigned long long *)report, (unsigned long long)place << 32 | (unsigned)row);
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

/* Rows and columns of e4m3 weights that share a scale. */
static __host__ __device__ inline int scale_block(const Matrix *w) { return w->block ? w->block : SCALE_BLOCK; }

/* The scales that row `row` of a matrix meets, one for each block of columns; NULL: it has none. */
static __device__ const float *row_scales(const Matrix *w, int row) {
    return w->scale ? w->scale + (size_t)((w->first_row + row) / scale_block(w)) * (size_t)w->scale_cols : NULL;
}

/* Grid: groups of columns, rows. */
static __global__ void embed_kernel(float *y, const Matrix embedding, const Row *rows) {
    begin_kernel();
    const int token = rows[blockIdx.y].token, i = (int)thread_index();
    const float *scale = row_scales(&embedding, token);
    if (i >= embedding.cols) return;
    const float value = load_stored(embedding.data, (size_t)token * (size_t)embedding.cols + (size_t)i, embedding.dtype);
    y[(size_t)blockIdx.y * (size_t)embedding.cols + (size_t)i] = scale ? value * scale[i / scale_block(&embedding)] : value;
}

static void embed(float *y, const Matrix *embedding, const Row *rows, int n_rows) {
    if (n_rows <= 0) return;
    launch(embed_kernel, dim3((unsigned)divide_up(embedding->cols, THREADS), (unsigned)n_rows), THREADS, 0, y, *embedding, rows);
}

/* ---- norms: y = weight * x / sqrt(mean(x^2) + eps), after x += branch where there is one */

struct Norm {
    float *y, *x;
    size_t y_stride, x_stride;
    const float *branch, *weight;
    int dim;
    float eps;
    PassReport *report;             /* NULL, or where a row that is not finite shows */
    int place;
};

struct RowSum {                     /* the warps' sums of all blocks that share a row, in the shared memory of each */
    float of_warp[MAX_SPLIT * 32];
    uint64_t arrived;               /* complete when all are there */
};

/* Comes before cluster_sum() where several blocks share a row. */
static __device__ inline void open_sum(RowSum &sum) {
    if (threadIdx.x == 0) cluster_open(&sum.arrived, cluster_size() * (int)blockDim.x / 32);
    cluster_arrive();
}

/* The sum over the threads of a cluster, the warps' in order. Each warp sends its sum to every block, so that nobody has to ask;
 * cluster_wait() has come before. */
static __device__ inline void send_sum(RowSum &sum, float value) {
    const int warps = (int)blockDim.x / 32, lane = (int)threadIdx.x % 32;
    value = warp_sum(value);
    if (lane < cluster_size())
        cluster_send(&sum.of_warp[cluster_rank() * warps + (int)threadIdx.x / 32], &sum.arrived, lane, value);
}

static __device__ inline float take_sum(RowSum &sum) {
    float value = 0;
    wait_at(&sum.arrived, 0);
#pragma unroll 4
    for (int i = 0; i < cluster_size() * (int)blockDim.x / 32; i++) value += sum.of_warp[i];
    return value;
}

static __device__ float cluster_sum(RowSum &sum, float value) {
    if (cluster_size() == 1) return block_sum(sum.of_warp, value);
    send_sum(sum, value);
    return take_sum(sum);
}

static __device__ inline float sum_squares(float4 v) { return v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w); }

static __device__ inline float4 weighted(float4 v, float scale, float4 weight) {
    return make_float4(v.x * scale * weight.x, v.y * scale * weight.y, v.z * scale * weight.z, v.w * scale * weight.w);
}

/* Four values of a row, with their branch. */
static __device__ inline float4 take_four(const Norm &norm, int row, int at) {
    float *x = norm.x + (size_t)row * norm.x_stride + at;
    float4 v = load_four(x, norm.dim - at);
    if (norm.branch) {
        const float4 b = load_four(norm.branch + (size_t)row * norm.x_stride + at, norm.dim - at);
        v = make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
        store_four(x, v, norm.dim - at);
    }
    if (norm.report && !is_finite(v)) report_bad(norm.report, norm.place, row);
    return v;
}

/* By all threads of a cluster, each of which keeps four values, weighed by what is there before x is; of a row that is wider than
 * that the others come and go twice. */
static __device__ void norm_row(const Norm &norm, int row) {
    __shared__ RowSum shared;
    const int at = 4 * (cluster_rank() * (int)blockDim.x + (int)threadIdx.x), step = 4 * cluster_size() * (int)blockDim.x;
    float *x = norm.x + (size_t)row * norm.x_stride, *y = norm.y + (size_t)row * norm.y_stride;
    if (cluster_size() > 1) open_sum(shared);
    const float4 weight = load_four(norm.weight + at, norm.dim - at);
    if (cluster_size() > 1) cluster_wait();         /* the other blocks have begun, and their barriers are open */
    wait_for_previous();
    const float4 value = take_four(norm, row, at);
    float sum = sum_squares(value);
    for (int i = at + step; i < norm.dim; i += step) sum += sum_squares(take_four(norm, row, i));
    const float scale = 1 / sqrtf(cluster_sum(shared, sum) / (float)norm.dim + norm.eps);
    store_four(y + at, weighted(value, scale, weight), norm.dim - at);
    for (int i = at + step, left = norm.dim - i; left > 0; i += step, left -= step)
        store_four(y + i, weighted(load_four(x + i, left), scale, load_four(norm.weight + i, left)), left);
}

static __global__ void norm_kernel(const __grid_constant__ Norm norm) {
    let_next_start();
    norm_row(norm, (int)blockIdx.x / cluster_size());
}

/* Threads of each of the blocks that take a row. */
static int norm_threads(int dim, int split) { return min(divide_up(dim, 4 * 32 * split) * 32, 1024); }

/* A wide row takes several blocks: what one processor can fetch at a time is not much. */
static void launch_norm(const Norm &norm, int n) {
    const int most = gpu.major >= 9 ? MAX_SPLIT : 1;
    int split = 1;
    if (n <= 0) return;
    while (split < most && norm_threads(norm.dim, split) > NORM_THREADS) split *= 2;
    launch_early(norm_kernel, dim3((unsigned)(n * split)), (unsigned)norm_threads(norm.dim, split), 0, split, norm);
}

static void rms_norm(float *y, size_t y_stride, const float *x, size_t x_stride, const float *weight, int n, int dim, float eps) {
    launch_norm({.y = y, .x = (float *)x, .y_stride = y_stride, .x_stride = x_stride, .branch = NULL, .weight = weight,
                 .dim = dim, .eps = eps, .report = NULL, .place = 0}, n);
}

static void add_norm(float *y, float *x, const float *branch, const float *weight, int n, int dim, float eps, PassReport *report,
                     int place) {
    launch_norm({.y = y, .x = x, .y_stride = (size_t)dim, .x_stride = (size_t)dim, .branch = branch, .weight = weight, .dim = dim,
                 .eps = eps, .report = report, .place = place}, n);
}

/* The angle is rounded to f32 before the cosine, as in the reference. */
static __global__ void rotations_kernel(float *cosine, float *sine, const Row *rows, size_t n, const float *inverse_frequency,
                                        int half, float factor) {
    begin_kernel();
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
    launch(rotations_kernel, blocks_for(n), THREADS, 0, cosine, sine, rows, n, inverse_frequency, dim / 2, factor);
}

/* Rotates the pair (v[0], v[far]), and returns it. */
static __device__ inline float2 rotate(float *v, int far, float cosine, float sine) {
    const float a = v[0], b = v[far];
    const float2 rotated = {a * cosine - b * sine, b * cosine + a * sine};
    v[0] = rotated.x, v[far] = rotated.y;
    return rotated;
}

struct Queries {
    float *q, *index_q;
    int heads, dim, half, index_heads, index_dim;   /* half: pairs of a head that are rotated; */
    int first;                      /* of a head of index_q these follow so many others */
    bool interleaved;
    const float *cosine, *sine;
    const float *head_weights;      /* [rows, index_heads] that are looked at too, or NULL */
    PassReport *report;
    int place, weights_place;
};

/* A thread takes a pair of a head of q, or two values of index_q, or a weight. Grid: groups of pairs, rows. */
static __global__ void rotate_queries_kernel(const __grid_constant__ Queries p) {
    let_next_start();
    const int row = (int)blockIdx.y, pair = (int)thread_index(), of_q = p.heads * p.half, index_pairs = divide_up(p.index_dim, 2);
    const float *cosine = p.cosine + (size_t)row * (size_t)p.half, *sine = p.sine + (size_t)row * (size_t)p.half;
    wait_for_previous();
    if (pair < of_q) {
        const int i = pair % p.half;
        float *head = p.q + ((size_t)row * (size_t)p.heads + (size_t)(pair / p.half)) * (size_t)p.dim;
        rotate(head + p.dim - 2 * p.half + 2 * i, 1, cosine[i], sine[i]);
        return;
    }
    const int weight = pair - of_q - p.index_heads * index_pairs;
    if (weight >= 0) {
        const bool there = p.head_weights && weight < p.index_heads;
        if (there && !is_finite(p.head_weights[row * p.index_heads + weight])) report_bad(p.report, p.weights_place, row);
        return;
    }
    const int head = (pair - of_q) / index_pairs, i = (pair - of_q) % index_pairs;
    float *v = p.index_q + ((size_t)row * (size_t)p.index_heads + (size_t)head) * (size_t)p.index_dim;
    const int turned = i - p.first / 2;
    const bool rotates = 0 <= turned && turned < p.half;
    const int far = !rotates ? min(1, p.index_dim - 1 - 2 * i) : p.interleaved ? 1 : p.half;
    v += rotates && !p.interleaved ? i : 2 * i;
    const float2 values = rotates ? rotate(v, far, cosine[turned], sine[turned]) : float2{v[0], v[far]};
    if (!is_finite(values.x) || !is_finite(values.y)) report_bad(p.report, p.place, row);
}

static void rotate_queries(float *q, int n_rows, int heads, int dim, int tail, float *index_q, int index_heads, int index_dim,
                           bool interleaved, const float *cosine, const float *sine, PassReport *report, int place) {
    if (n_rows <= 0) return;
    if (!index_q) index_heads = 0;
    const int pairs = heads * (tail / 2) + index_heads * divide_up(index_dim, 2);
    launch(rotate_queries_kernel, dim3((unsigned)divide_up(pairs, THREADS), (unsigned)n_rows), THREADS, 0,
           {.q = q, .index_q = index_q, .heads = heads, .dim = dim, .half = tail / 2, .index_heads = index_heads,
            .index_dim = index_dim, .first = 0, .interleaved = interleaved, .cosine = cosine, .sine = sine,
            .head_weights = NULL, .report = report, .place = place});
}

static void turn_index_queries(float *q, int n_rows, int heads, int dim, int turned, const float *cosine, const float *sine,
                               const float *head_weights, PassReport *report, int place, int weights_place) {
    const int threads = heads * divide_up(dim, 2) + heads;
    if (n_rows <= 0) return;
    launch(rotate_queries_kernel, dim3((unsigned)divide_up(threads, THREADS), (unsigned)n_rows), THREADS, 0,
           {.q = NULL, .index_q = q, .heads = 0, .dim = 0, .half = turned / 2, .index_heads = heads, .index_dim = dim,
            .first = dim - turned, .interleaved = true, .cosine = cosine, .sine = sine, .head_weights = head_weights,
            .report = report, .place = place, .weights_place = weights_place});
}

/* A warp takes one head of one row. What its lanes write they read again in other places. */
static __global__ void norm_heads_kernel(float *x, size_t stride, int n, int heads, int dim, const float *weight, float eps,
                                         const float *cosine, const float *sine) {
    begin_kernel();
    const int vector = (int)(thread_index() / 32), lane = (int)threadIdx.x % 32, row = vector / heads, half = dim / 2;
    if (vector >= n * heads) return;
    float *v = x + (size_t)row * stride + (size_t)(vector % heads * dim), sum = 0;
    cosine += (size_t)row * (size_t)half, sine += (size_t)row * (size_t)half;
#pragma unroll 4
    for (int j = lane; j < dim; j += 32) sum += v[j] * v[j];
    const float scale = 1 / sqrtf(warp_sum(sum) / (float)dim + eps);
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

static void norm_heads(float *x, size_t stride, int n_rows, int heads, int dim, const float *weight, float eps,
                       const float *cosine, const float *sine) {
    if (n_rows <= 0 || heads <= 0) return;
    launch(norm_heads_kernel, blocks_for((size_t)n_rows * (size_t)heads * 32), THREADS, 0, x, stride, n_rows, heads, dim, weight,
           eps, cosine, sine);
}

static __device__ inline float silu(float x) { return x / (1 + expf(-x)); }

/* silu(gate) * up, of what a limit, if it is not 0, leaves of them. A NaN stays. */
static __device__ inline float gate_up(float gate, float up, float limit) {
    if (limit > 0) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
    }
    return silu(gate) * up;
}

static __global__ void swiglu_kernel(float *y, const float *gate, const float *up, size_t n, float limit) {
    begin_kernel();
    const size_t i = thread_index();
    if (i < n) y[i] = gate_up(gate[i], up[i], limit);
}

static void limited_swiglu(float *y, const float *gate, const float *up, size_t n, float limit) {
    if (!n) return;
    launch(swiglu_kernel, blocks_for(n), THREADS, 0, y, gate, up, n, limit);
}

static void swiglu(float *y, const float *gate, const float *up, size_t n) { limited_swiglu(y, gate, up, n, 0); }

static void zero(float *y, size_t n) {
    if (n) CUDA(cudaMemsetAsync(y, 0, n * sizeof(float), gpu.stream));
}

static __global__ void add_kernel(float *y, const float *x, size_t n) {
    begin_kernel();
    const size_t i = thread_index();
    if (i < n) y[i] += x[i];
}

static void add(float *y, const float *x, size_t n) {
    if (!n) return;
    launch(add_kernel, blocks_for(n), THREADS, 0, y, x, n);
}

/* y[r] = x[indices ? indices[r] : r] * factor. */
static __global__ void copy_rows_kernel(float *y, size_t y_stride, const int *to, const float *x, size_t x_stride, const int *from,
                                        size_t n, size_t dim, float factor) {
    begin_kernel();
    const size_t i = thread_index();
    if (i >= n) return;
    const size_t row = i / dim, y_row = to ? (size_t)to[row] : row, x_row = from ? (size_t)from[row] : row;
    y[y_row * y_stride + i % dim] = x[x_row * x_stride + i % dim] * factor;
}

static void copy_rows(float *y, size_t y_stride, const float *x, size_t x_stride, int n_rows, int dim, float factor) {
    const size_t width = (size_t)dim, n = (size_t)n_rows * width;
    if (!n) return;
    launch(copy_rows_kernel, blocks_for(n), THREADS, 0, y, y_stride, NULL, x, x_stride, NULL, n, width, factor);
}

static void move_rows(float *y, const int *to, const float *x, const int *from, int n, int dim) {
    const size_t width = (size_t)dim, values = (size_t)n * width;
    if (!values) return;
    launch(copy_rows_kernel, blocks_for(values), THREADS, 0, y, width, to, x, width, from, values, width, 1);
}

static __global__ void add_bias_kernel(float *y, size_t stride, float bias, int n) {
    begin_kernel();
    const size_t i = thread_index();
    if (i < (size_t)n) y[i * stride] += bias;
}

static void add_bias(float *y, size_t stride, float bias, int n) {
    if (n <= 0) return;
    launch(add_bias_kernel, blocks_for((size_t)n), THREADS, 0, y, stride, bias, n);
}

static __global__ void cap_logits_kernel(float *y, size_t n, float multiplier, float softcap) {
    begin_kernel();
    const size_t i = thread_index();
    if (i < n) y[i] = softcap > 0 ? softcap * tanhf(y[i] * multiplier / softcap) : y[i] * multiplier;
}

static void cap_logits(float *y, size_t n, float multiplier, float softcap) {
    if (!n) return;
    launch(cap_logits_kernel, blocks_for(n), THREADS, 0, y, n, multiplier, softcap);
}

static __global__ void take_tokens_kernel(Row *rows, const DraftBlock *blocks, int slot, int n) {
    begin_kernel();
    const size_t i = thread_index();
    if (i < (size_t)n) rows[i].token = blocks[i].ids[blocks[i].position + slot];
}

static void take_tokens(Row *rows, const DraftBlock *blocks, int slot, int n) {
    if (n <= 0) return;
    launch(take_tokens_kernel, blocks_for((size_t)n), THREADS, 0, rows, blocks, slot, n);
}

/* A thread takes one channel of one block, the last row first: a row needs those before it as they were. */
static __global__ void convolve_kernel(float *z, const float *base, const float *delta, size_t delta_stride, size_t n,
                                       int block_size, int taps, int group, int dim) {
    begin_kernel();
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
    launch(convolve_kernel, blocks_for(n), THREADS, 0, z, base, delta, delta_stride, n, block_size, taps, group, dim);
}

static __global__ void check_finite_kernel(PassReport *report, int place, const float *x, size_t n, size_t dim) {
    begin_kernel();
    for (size_t i = thread_index(); i < n; i += (size_t)gridDim.x * THREADS)
        if (!is_finite(x[i])) report_bad(report, place, (int)(i / dim));
}

static void check_finite(PassReport *report, int place, const float *x, int n_rows, int dim) {
    const size_t n = (size_t)n_rows * (size_t)dim, most = 4 * (size_t)gpu.multiprocessors, blocks = (n + THREADS - 1) / THREADS;
    if (!n) return;
    launch(check_finite_kernel, (unsigned)(blocks < most ? blocks : most), THREADS, 0, report, place, x, n, (size_t)dim);
}

/* =====================================================================================================================
 * Products
 *
 *     linear, expand_value -> multiply -> plan, launch_products or multiply_many
 *     launch_products -> choose_tiles, choose_cluster, product_kernel
 *     product_kernel -> multiply_block -> fetch_first, multiply_segment, sum_segments
 *     multiply_segment -> fetch_input and put_input (x), multiply_batch (weights), put_sums
 *
 * Owns: y = W x with W in its stored format. A warp multiplies a strip of 32 rows of weights by 8 to 32 rows of x on the tensor
 * cores: the weights are the 16 x 16 operand, so that one row of x takes the same instructions as many, with idle columns. bf16,
 * e4m3 and e2m1 weights, which bf16 holds exactly, meet x rounded to bf16; f16 weights meet x rounded to f16 (a value beyond its
 * range becomes infinite, and shows). What the rounding takes from x is a second term that the weights meet likewise, so that a
 * product is right to about 2^-17 of x, wherever that costs little (TWO_TERMS_MOST). Sums are f32. The scales of e4m3 are
 * applied to the sum of each 128 columns; those of e2m1, and of e4m3 in blocks of 32 x 32, powers of two, to the weights.
 *
 * A sum over the columns is cut into segments, each the work of one warp, and their sums are added in order. Their number depends
 * on the matrix alone: as many as it takes to keep the GPU busy with one row of x. Those of a strip lie in the warps of a block
 * and in the blocks of a cluster, which add up through each other's shared memory; how they are spread over warps and blocks, and
 * how many columns of the instruction are in use, is all that the number of rows of x decides. Many rows have a kernel of their
 * own, which takes the same steps in larger tiles.
 *
 * Products of the same few rows share a launch, which small ones are little else than. A block multiplies for one of them,
 * whatever its format; all have clusters of one size.
 *
 * Weights and their scales are on their way into a ring in shared memory, 128 KB a multiprocessor, from before the kernel in
 * front has ended. Four threads fetch 64 neighbouring bytes of a row, and what a thread has fetched it uses as if it were the
 * fragment it should have: the order of k inside a product is free as long as both operands agree, so x is put into shared memory
 * in the same order. f32 weights, and matrices whose rows do not begin at a multiple of 16 bytes, take the exact path: plain
 * multiply-adds in f32, a row of weights for each lane.
 */

enum {
    STRIP = 32,                 /* rows of weights of a warp, as two fragments of 16 */
    WARPS = THREADS / 32,       /* of a block; they divide rows of weights and segments among themselves */
    STRIP_CHUNKS = 2,           /* of 16 bytes a row, that make a thread's batch */
    RING_CHUNKS = 4,            /* on their way from memory at a time */
    CHUNK_BYTES = 4 * 32 * 16,  /* of a warp: four rows of each thread */
    SCALE_BYTES = 8,            /* of a row and batch at most: e2m1's exponents */
    RING_BATCHES = RING_CHUNKS / STRIP_CHUNKS,
    RING_BYTES = RING_CHUNKS * CHUNK_BYTES + RING_BATCHES * STRIP * SCALE_BYTES,
    MAX_CLUSTER = 8,
    STAGED_PAD = 64,            /* bytes behind each row of x there, so that eight lanes' 16 bytes meet different banks */
    ADDED = 8,                  /* segments whose sums are on their way at a time */
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
    DType format;               /* the weights' as the kernel is to see them, or EXACT */
    int terms;                  /* of x */
    Cut cut;
    int first_block;            /* of the launch's */
} Product;

/* What shares a launch: with clusters of one size. */
typedef struct Products {
    Product of[MAX_PROJECTIONS];
    int count;
    int tiles;                  /* of eight rows of x in a block */
} Products;

/* The rows of x that a block multiplies. */
typedef struct Input {
    const float *x;
    size_t stride;
    int count, cols;
    bool aligned;
} Input;

/* Exact stands for DTYPE_F32 as a template argument, whatever the stored type; and BLOCKS_OF_32, which is none of the types of
 * weights, for e4m3 whose scales are of 32 x 32. */
static constexpr DType EXACT = DTYPE_F32, BLOCKS_OF_32 = DTYPE_F8_E5M2;
enum { SMALL_BLOCK = 32 };

static __host__ __device__ constexpr bool is_e4m3(DType dtype) { return dtype == DTYPE_F8_E4M3 || dtype == BLOCKS_OF_32; }

/* Bytes of n stored weights of a row. */
static __host__ __device__ constexpr size_t weight_bytes(DType dtype, size_t n) {
    return dtype == DTYPE_F32 ? 4 * n : is_e4m3(dtype) ? n : dtype == DTYPE_F4_E2M1 ? (n + 1) / 2 : 2 * n;
}

/* Columns of W in a thread's 16 bytes, a chunk; and of a warp's batch. */
static __host__ __device__ constexpr int chunk_values(DType D) { return D == DTYPE_F4_E2M1 ? 32 : is_e4m3(D) ? 16 : 8; }
static __host__ __device__ constexpr int batch_values(DType D) { return STRIP_CHUNKS * 4 * chunk_values(D); }
static_assert(SCALE_BLOCK == batch_values(DTYPE_F8_E4M3), "a batch of e4m3 weights has one scale");
static_assert(EXPONENT_BLOCK == chunk_values(DTYPE_F4_E2M1), "a chunk of e2m1 weights has one scale");

/* A warp's rows of weights as one thread sees them: rows g and g + 8, g = lane / 4, of both fragments, from this thread's next
 * chunk on. The exact path has one row of each, whole. */
typedef struct Strip {
    const uint8_t *next[4];     /* of the batch that is fetched next */
    int limit[2];               /* of the columns, less those before this thread's; 0 for a fragment outside the matrix */
    const float *scale;         /* of the row of the strip that has the lane's number; of BLOCKS_OF_32, of all of its rows */
    const uint8_t *exponents;   /* likewise */
    int block;                  /* columns that share a scale */
    DType dtype;
} Strip;

enum { NO_BATCH = INT_MAX / 2 };                    /* a column past every matrix: fetches zeros, reads nothing */

static __device__ inline int lane_id() { return (int)(threadIdx.x % 32); }
static __device__ inline int warp_id() { return (int)(threadIdx.x / 32); }

/* The n of 2^n: divisions take as long as reads of memory. */
static __device__ inline int power_of(int x) { return 31 - __clz(x); }


/* Fragment m of a strip, rows from `first` on of w, from column k on. Rows past the end repeat the last one, and are not
 * written. */
template <DType D> static __device__ inline void set_fragment(Strip *strip, int m, const Matrix &w, int first, int k) {
    const int lane = lane_id(), skipped = D == EXACT ? 0 : lane % 4 * chunk_values(D);
    const DType dtype = D == EXACT ? w.dtype : D;
    strip->limit[m] = first < w.rows ? w.cols - skipped : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = min(first + (D == EXACT ? lane % 16 : lane / 4 + i * 8), w.rows - 1);
        strip->next[2 * m + i] = w.data + (size_t)row * weight_bytes(dtype, (size_t)w.cols)
                                 + weight_bytes(dtype, (size_t)(skipped + k));
    }
}

template <DType D> static __device__ inline void set_strip(Strip *strip, const Matrix &w, int first, int k) {
    const int row = min(first + lane_id(), w.rows - 1);
    set_fragment<D>(strip, 0, w, first, D == EXACT ? 0 : k);
    set_fragment<D>(strip, 1, w, first + 16, D == EXACT ? 0 : k);
    strip->scale = row_scales(&w, D == BLOCKS_OF_32 ? first : row);
    strip->block = scale_block(&w);
    strip->exponents = w.exponents ? w.exponents + (size_t)(w.first_row + row) * (size_t)w.scale_cols : NULL;
    strip->dtype = w.dtype;
}

/* The chunk of a batch that its scales come with: the first that needs them. */
static __host__ __device__ constexpr int scales_with(DType D) { return D == DTYPE_F8_E4M3 ? STRIP_CHUNKS - 1 : 0; }

/* Scales of a batch in the ring: of row `row` of the strip. */
static __device__ inline uint8_t *scales_at(uint8_t *ring, int batch, int row) {
    return ring + RING_CHUNKS * CHUNK_BYTES + ((batch & RING_BATCHES - 1) * STRIP + row) * SCALE_BYTES;
}

/* Starts to read chunk u of the strip's next batch, that of columns from k on, into its place in the warp's ring, and with one of
 * them the batch's scales, a row for each lane. After the last the next batch is `step` columns on. What a thread has fetched of
 * a chunk it reads back itself, so nobody waits for another. Always a group of copies, so that they can be counted. */
template <DType D> static __device__ inline void fetch_chunk(uint8_t *ring, Strip &strip, int place, int u, int k, int step) {
    const int at = k + u * 4 * chunk_values(D);
    uint8_t *to = ring + (place & RING_CHUNKS - 1) * CHUNK_BYTES + lane_id() * 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
        start_copy_to_shared(to + i * 512, strip.next[i] + u * 64, at < strip.limit[i / 2]);
    if (u == STRIP_CHUNKS - 1)
#pragma unroll
        for (int i = 0; i < 4; i++) strip.next[i] += weight_bytes(D, (size_t)step);
    if (u == scales_with(D)) {                      /* also where only the other threads of a row have columns */
        const bool there = k < strip.limit[0] + lane_id() % 4 * chunk_values(D);
        uint8_t *scales = scales_at(ring, place / STRIP_CHUNKS, lane_id());
        if (D == DTYPE_F8_E4M3) start_small_copy<4>(scales, strip.scale + (there ? k / SCALE_BLOCK : 0), there);
        if (D == BLOCKS_OF_32 && lane_id() < batch_values(D) / SMALL_BLOCK) {
            const bool begun = strip.limit[0] > 0 && there;
            start_small_copy<4>(scales_at(ring, place / STRIP_CHUNKS, 0) + 4 * lane_id(),
                                strip.scale + (begun ? k / SMALL_BLOCK + lane_id() : 0), begun);
        }
        if (D == DTYPE_F4_E2M1) start_small_copy<8>(scales, strip.exponents + (there ? k / EXPONENT_BLOCK : 0), there);
    }
    commit_copies();
}

/* A segment's first chunks, from column k on; batches are `step` columns apart, up to `rounds`. */
template <DType D> static __device__ inline void fetch_first(uint8_t *ring, Strip &strip, int k, int step, int rounds) {
    if constexpr (D != EXACT)
#pragma unroll
        for (int c = 0; c < RING_CHUNKS; c++)
            fetch_chunk<D>(ring, strip, c, c % STRIP_CHUNKS,
                           c / STRIP_CHUNKS < rounds ? k + c / STRIP_CHUNKS * step : NO_BATCH, step);
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
    constexpr int apart = D == DTYPE_F4_E2M1 ? 4 : is_e4m3(D) ? 2 : 1;
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
 * multiplication by 2^120 repairs the exponent; subnormals come out right by itself. Or by another factor: a scale as well. */
static const uint32_t E4M3_REPAIR = 0x7b807b80;
static __device__ inline uint2 widen_four(uint32_t four, uint32_t factor = E4M3_REPAIR) {
    const uint32_t even = (four << 8 & 0x80008000) | (four << 4 & 0x07f007f0);
    const uint32_t odd = (four & 0x80008000) | (four >> 4 & 0x07f007f0);
    return make_uint2(multiply_pair(even, factor), multiply_pair(odd, factor));
}

/* A pair of e2m1 values, which are in the lowest four bits of either half, or with SHIFT 4 in the next four: one multiplication
 * moves the sign and the other bits into place at the same time, which leaves the busier part of the machine to others. */
template <int SHIFT> static __device__ inline uint32_t widen_two(uint32_t two, uint32_t factor) {
    return multiply_pair((two & 0x000f000fu << SHIFT) * (0x1040 >> SHIFT) & 0x81c081c0, factor);
}

/* Eight e2m1 values, likewise, as pairs of values i and i + 4, times e2m1_factor. */
static __device__ inline uint4 widen_eight(uint32_t eight, uint32_t factor) {
    return make_uint4(widen_two<0>(eight, factor), widen_two<4>(eight, factor), widen_two<0>(eight >> 8, factor),
                      widen_two<4>(eight >> 8, factor));
}

/* What this thread's values meet, of the E8M0 exponents of four threads: the scale 2^(e - 127) and the 2^126 that repairs the
 * values' exponent. Together that may be more than bf16 holds, so it is 2^-32 of it, and put_sums makes up for it. A scale beyond
 * 2^33 becomes infinite, and shows. */
enum { E2M1_SHIFT = 32 };
static __device__ inline uint32_t e2m1_factor(uint32_t exponents) {
    const uint32_t own = __byte_perm(exponents, 0, 0x4040 | lane_id() % 4 * 0x0101);
    return (__vminu2(own, 0x00a100a1) << 7) + (126 - E2M1_SHIFT << 7) * 0x10001;
}

/* The same for the scale of a block of e4m3 weights, and the 2^120 that repairs them. */
static __device__ inline uint32_t e4m3_factor(float scale) {
    const int exponent = (int)(__float_as_uint(scale) >> 23) + 120 - E2M1_SHIFT;
    return (uint32_t)min(max(exponent, 0), 255) << 7 | (uint32_t)min(max(exponent, 0), 255) << 23;
}

/* What sums of weights that met such factors are multiplied by. */
static __host__ __device__ constexpr float undo_shift(DType D) {
    return D == DTYPE_F4_E2M1 || D == BLOCKS_OF_32 ? 0x1p32f : 1;
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
    if (!is_e4m3(D)) return chunk;
    const uint32_t repair = D == BLOCKS_OF_32 ? factor : E4M3_REPAIR;
    const uint2 low = widen_four(words[2 * part], repair), high = widen_four(words[2 * part + 1], repair);
    return make_uint4(low.x, low.y, high.x, high.y);
}

/* A chunk of a fragment's rows g and g + 8 times all tiles of eight rows of x: of each value of x first the upper term, then the
 * lower. */
template <DType D, int TILES, int TERMS>
static __device__ inline void multiply_chunk(float sum[TILES][4], const uint4 chunk[2], const uint32_t factor[2],
                                             const uint8_t *x, int x_stride, int last_column) {
    constexpr int parts = chunk_values(D) / 8;
#pragma unroll
    for (int part = 0; part < parts; part++) {                      /* 32 values of k */
        const uint4 a = widen_part<D>(chunk[0], part, factor[0]), c = widen_part<D>(chunk[1], part, factor[1]);
#pragma unroll
        for (int term = 0; term < TERMS; term++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const int column = min(tile * 8 + lane_id() / 4, last_column);  /* idle columns of the instruction repeat one */
                const uint4 b = *(const uint4 *)(x + part * 64 + column * x_stride + term * ((x_stride - STAGED_PAD) / TERMS));
                multiply_fragment<D>(sum[tile], a.x, c.x, a.y, c.y, b.x, b.y);
                multiply_fragment<D>(sum[tile], a.z, c.z, a.w, c.w, b.z, b.w);
            }
    }
}

/* Batch i of a segment. In the ring, the one RING_BATCHES later takes its place, from column `later` on. x: this thread's first
 * value of it in row 0. */
template <DType D, int TILES, int TERMS>
static __device__ inline void multiply_batch(float total[2][TILES][4], uint8_t *ring, Strip &strip, int i, int later, int step,
                                             const uint8_t *x, int x_stride, int last_column) {
    constexpr bool scaled = D == DTYPE_F8_E4M3;
    constexpr int parts = chunk_values(D) / 8;
    float sum[2][TILES][4] = {}, scale[4] = {};
    uint32_t factor[STRIP_CHUNKS][4] = {};
#pragma unroll
    for (int u = 0; u < STRIP_CHUNKS; u++) {
        const int place = i * STRIP_CHUNKS + u;
        wait_for_copies<RING_CHUNKS - 1>();
        if (u == 0 && D == BLOCKS_OF_32) {
            __syncwarp();
#pragma unroll
            for (int r = 0; r < 4 * STRIP_CHUNKS; r++)
                factor[r / 4][r % 4] = e4m3_factor(((const float *)scales_at(ring, i, 0))[r / 4 * 2 + lane_id() % 4 / 2]);
            __syncwarp();
        }
        if (u == scales_with(D) && (scaled || D == DTYPE_F4_E2M1)) {    /* of rows that other lanes have fetched */
            __syncwarp();
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const uint8_t *scales = scales_at(ring, i, lane_id() / 4 + r * 8);
                if (scaled) scale[r] = *(const float *)scales;
                else {
                    factor[0][r] = e2m1_factor(*(const uint32_t *)scales);
                    factor[1][r] = e2m1_factor(*(const uint32_t *)(scales + 4));
                }
            }
            __syncwarp();
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint8_t *from = ring + (place & RING_CHUNKS - 1) * CHUNK_BYTES + m * 1024 + lane_id() * 16;
            const uint4 chunk[2] = {*(const uint4 *)from, *(const uint4 *)(from + 512)};
            multiply_chunk<D, TILES, TERMS>(scaled ? sum[m] : total[m], chunk, factor[u] + 2 * m, x + u * parts * 64, x_stride,
                                            last_column);
        }
        fetch_chunk<D>(ring, strip, place, u, later, step);
    }
#pragma unroll
    for (int j = 0; scaled && j < 2 * TILES * 4; j++) {
        const int m = j / (TILES * 4), tile = j / 4 % TILES, part = j % 4;
        total[m][tile][part] = fmaf(scale[2 * m + part / 2], sum[m][tile][part], total[m][tile][part]);
    }
}

/* Plain f32 for the same values: the lane's row, eight rows of x. k: first column of the batch. */
static __device__ void multiply_exactly(float total[8], const Strip &strip, int k, const float *x, int x_stride,
                                        int last_column) {
    const int m = lane_id() / 16, limit = m ? strip.limit[1] : strip.limit[0];
    const uint8_t *data = m ? strip.next[2] : strip.next[0];
    for (int i = 0; i < batch_values(EXACT) && k + i < limit; i++) {
        float weight = load_stored(data, (size_t)(k + i), strip.dtype);
        if (strip.scale) weight *= strip.scale[(k + i) / strip.block];
        if (strip.exponents) weight *= widen_e8m0(strip.exponents[(k + i) / EXPONENT_BLOCK]);
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
                total[m][tile][part] * undo_shift(D);
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
static __device__ void multiply_segment(uint8_t *ring, Strip &strip, const Input &input, const Cut &cut, int from,
                                        uint8_t *staged) {
    const int stride = staged_stride(D, cut.along, TERMS), last = input.count - 1, step = round_columns(D, cut);
    const int place = (warp_id() & cut.along - 1) * term_bytes(D, 1) + (D == EXACT ? 0 : lane_id() % 4 * 16);
    float total[2][TILES][4] = {}, v[TILES][8];
#pragma unroll 1
    for (int i = -1, k = from; i < cut.rounds; i++, k += step) {    /* k: the block's columns of the next round */
        const bool more = i + 1 < cut.rounds;
        uint8_t *now = staged + (i & 1) * input.count * stride, *then = staged + (~i & 1) * input.count * stride;
        if (more) fetch_input<D, TILES>(v, input, cut, k, 0);
        if (i >= 0) {
            if constexpr (D == EXACT)
                multiply_exactly(&total[0][0][0], strip, first_batch<D>(cut, k - step), (const float *)(now + place), stride / 4,
                                 last);
            else
                multiply_batch<D, TILES, TERMS>(
                    total, ring, strip, i,
                    i + RING_BATCHES < cut.rounds ? first_batch<D>(cut, k) + (RING_BATCHES - 1) * step : NO_BATCH, step,
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

/* The others may still be reading this block's shared memory; what has been written elsewhere need not have arrived. */
static __device__ inline void end_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
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

/* The sum of all segments for four neighbours: from row `row` of the cluster's rows on, column `column`. */
static __device__ inline float4 sum_segments(const float *sums, const Cut &cut, int row, int column) {
    const int power = power_of(cut.along), segments = cut.cluster << power;
    const float *first = sums + (row / STRIP << power) * (RING_BYTES / 4) + column * SUM_STRIDE + row % STRIP;
    float4 sum = {}, value[ADDED];
#pragma unroll 1
    for (int begin = 0; begin < segments; begin += ADDED) {
#pragma unroll
        for (int i = 0; i < ADDED; i++) {
            const int segment = min(begin + i, segments - 1);
            load_from_block(&value[i], first + (segment & cut.along - 1) * (RING_BYTES / 4), segment >> power);
        }
#pragma unroll
        for (int i = 0; i < ADDED; i++)
            if (begin + i < segments)
                sum = make_float4(sum.x + value[i].x, sum.y + value[i].y, sum.z + value[i].z, sum.w + value[i].w);
    }
    return sum;
}

/* Shared memory of a block: the warps' rings, then two rounds' x. */
static int product_shared(DType D, const Cut &cut, int columns, int terms) {
    return WARPS * RING_BYTES + 2 * columns * staged_stride(D, cut.along, terms);
}

/* Block `block` of a product. Neighbours make a cluster; the clusters of all heads for the same rows of weights follow each
 * other. */
template <DType D, int TILES, int TERMS>
static __device__ inline void multiply_block(const Product &p, int block, uint8_t *shared) {
    const int along = power_of(p.cut.along), group_rows = STRIP * WARPS >> along, rank = block & p.cut.cluster - 1;
    const int at = block >> power_of(p.cut.cluster), group = p.heads == 1 ? at : at / p.heads;
    const int head = at - group * p.heads, first_row = group * group_rows;
    const int from = (rank << along) * batch_values(D);
    Matrix w = p.w;
    w.data += (size_t)head * (size_t)p.head_rows * weight_bytes(D == EXACT ? w.dtype : D, (size_t)w.cols);
    w.first_row += head * p.head_rows;
    Strip strip;
    set_strip<D>(&strip, w, first_row + (warp_id() >> along) * STRIP, first_batch<D>(p.cut, from));
    uint8_t *ring = shared + warp_id() * RING_BYTES;
    fetch_first<D>(ring, strip, first_batch<D>(p.cut, from), round_columns(D, p.cut), p.cut.rounds);
    wait_for_previous();

    const int first = (int)blockIdx.y * TILES * 8;
    const Input input = {.x = p.x + (size_t)first * p.x_stride + head * p.x_head, .stride = p.x_stride,
                         .count = min(TILES * 8, p.n_rows - first), .cols = w.cols, .aligned = p.aligned};
    multiply_segment<D, TILES, TERMS>(ring, strip, input, p.cut, from, shared + WARPS * RING_BYTES);

    if (p.cut.cluster > 1) cluster_barrier();
    else __syncthreads();
    const int power = power_of(group_rows / 4);
    for (int i = rank * THREADS + (int)threadIdx.x; i < input.count << power; i += p.cut.cluster * THREADS) {
        const int r = (i & (1 << power) - 1) * 4, column = i >> power, count = w.rows - first_row - r;
        if (count > 0)
            store_four(p.y + (size_t)(first + column) * p.y_stride + (head * p.y_head + first_row + r),
                       sum_segments((const float *)shared, p.cut, r, column), count);
    }
    if (p.cut.cluster > 1) end_cluster();
}

/* Grid: blocks of all products, groups of rows of x. */
template <int TILES>
static __global__ void __launch_bounds__(THREADS, TILES <= 2 ? 2 : 1) product_kernel(const __grid_constant__ Products products) {
    extern __shared__ __align__(128) uint8_t shared[];
    let_next_start();
    int i = products.count - 1;
    while (i && (int)blockIdx.x < products.of[i].first_block) i--;
    const Product &p = products.of[i];
    const int block = (int)blockIdx.x - p.first_block;
    switch (p.format) {
    case DTYPE_BF16: return multiply_block<DTYPE_BF16, TILES, 2>(p, block, shared);
    case DTYPE_F16: return multiply_block<DTYPE_F16, TILES, 2>(p, block, shared);
    case DTYPE_F4_E2M1: return multiply_block<DTYPE_F4_E2M1, TILES, 1>(p, block, shared);
    case DTYPE_F8_E4M3:
        if (p.terms == 2) return multiply_block<DTYPE_F8_E4M3, TILES, 2>(p, block, shared);
        return multiply_block<DTYPE_F8_E4M3, TILES, 1>(p, block, shared);
    case BLOCKS_OF_32:
        if (p.terms == 2) return multiply_block<BLOCKS_OF_32, TILES, 2>(p, block, shared);
        return multiply_block<BLOCKS_OF_32, TILES, 1>(p, block, shared);
    default:
        if constexpr (TILES == 1) multiply_block<EXACT, 1, 1>(p, block, shared);
    }
}

static Cut cut_of(int cluster, int along, int cols, DType dtype) {
    return {.cluster = cluster, .along = along, .rounds = divide_up(cols, cluster * along * batch_values(dtype))};
}

/* Blocks that the GPU holds at a time, in such clusters: two to a multiprocessor, but where a cluster does not fit into what the
 * others have left of its part of the GPU. */
static int cluster_slots(int cluster) {
    static int found[MAX_CLUSTER + 1];
    if (gpu.major < 9 || cluster == 1) return 2 * gpu.multiprocessors;
    if (found[cluster]) return found[cluster];
    const auto kernel = product_kernel<1>;
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
    found[cluster] *= cluster;
    if (cluster > 2) found[cluster] -= found[cluster] / 10;         /* where others still run, some find no place */
    return found[cluster];
}

/* About the microseconds that a product with n rows of x takes with that cut, in tiles of so many, as measured on an H200. A
 * round takes as long as its bytes at the memory's rate, but not less than its instructions do; x that a thread cannot have on
 * its way beforehand makes all wait; blocks that come later begin anew; and the blocks of a cluster wait for each other. */
static double cut_cost(const Product &p, const Cut &cut, int n, int tiles) {
    const double bytes = 1.9, instructions = p.format == DTYPE_F4_E2M1 ? 1.6 : is_e4m3(p.format) ? 1 : 0.55;
    const double wait = 0.45, begin = 1.3, cluster = cut.cluster > 1 ? 0.6 + 0.15 * cut.cluster : 0, segment = 0.02;
    const int columns = min(n, 8 * tiles), shared = product_shared(p.format, cut, columns, p.terms);
    const int share = tiles <= 2 && 2 * shared <= (int)gpu.shared_per_block ? 1 : 2;
    const int blocks = divide_up(p.w.rows, STRIP * (WARPS / cut.along)) * p.heads * cut.cluster * divide_up(n, 8 * tiles);
    const int slots = cluster_slots(cut.cluster) / share, waves = divide_up(blocks, slots);
    const int late = divide_up(columns * cut.along * batch_values(p.format) / 8, THREADS) - tiles;
    const double busy = (double)(blocks < slots ? blocks : slots) / (2 * gpu.multiprocessors);
    const double round = fmax(bytes * busy, instructions + bytes * busy / 2) + (late > 0 ? late * wait : 0);
    return waves * (cut.rounds * round + begin) + cluster + segment * cut.cluster * cut.along;
}

/* The number of segments of a matrix is its shape's: what is best for one row. But those that take a cluster leave room for other
 * products' in the same launch, and for several groups of rows: alone with one row they gain little, and there they cost much. */
static Cut choose_cut(const Product &p) {
    const int most = gpu.major == 9 ? MAX_CLUSTER : 1, strips = divide_up(p.w.rows, STRIP) * p.heads;
    Cut best = {};
    for (int segments = 2; segments <= WARPS * most; segments *= 2) {
        const Cut cut = cut_of(divide_up(segments, WARPS), min(segments, WARPS), p.w.cols, p.format);
        const int warps = WARPS * 2 * gpu.multiprocessors / (cut.cluster + cut.cluster / 4);
        if (cut.cluster > 1 && strips * segments > warps) break;
        if (!best.rounds || cut_cost(p, cut, 1, 1) < cut_cost(p, best, 1, 1)) best = cut;
    }
    return best;
}

static int segments_of(const Product &p) { return p.cut.cluster * p.cut.along; }

/* The clusters that hold the segments of all. */
typedef struct Clusters { int least, most; } Clusters;

static Clusters clusters_of(const Products &products) {
    Clusters clusters = {1, gpu.major == 9 ? MAX_CLUSTER : 1};
    for (int i = 0; i < products.count; i++) {
        clusters.least = max(clusters.least, divide_up(segments_of(products.of[i]), WARPS));
        clusters.most = min(clusters.most, segments_of(products.of[i]));
    }
    return clusters;
}

/* Whether the shared memory for so many tiles is there; the exact path has but one. */
static bool tiles_fit(const Products &products, int cluster, int tiles) {
    for (int i = 0; i < products.count; i++) {
        const Product &p = products.of[i];
        const Cut cut = cut_of(cluster, segments_of(p) / cluster, p.w.cols, p.format);
        if (product_shared(p.format, cut, min(p.n_rows, 8 * tiles), p.terms) > (int)gpu.shared_per_block) return false;
        if (tiles > 1 && p.format == EXACT) return false;
    }
    return true;
}

/* Eight rows of x for each tile of a block: as few tiles as let the blocks of all rows find a place at once with some to spare,
 * and not more than hold all rows. */
static int choose_tiles(const Products &products) {
    const int n = products.of[0].n_rows, most = clusters_of(products).most;
    int warps = 0, tiles = 1;
    for (int i = 0; i < products.count; i++)
        warps += divide_up(products.of[i].w.rows, STRIP) * products.of[i].heads * segments_of(products.of[i]);
    while (tiles < 4 && 8 * tiles < n && divide_up(n, 8 * tiles) * warps > WARPS * 2 * gpu.multiprocessors * 3 / 4
           && tiles_fit(products, most, 2 * tiles))
        tiles *= 2;
    return tiles;
}

/* How segments lie in warps and blocks changes no sum, and may follow the company: those that share a launch have one cluster. */
static void choose_cluster(Products *products) {
    const Clusters clusters = clusters_of(*products);
    int best = 0;
    double best_cost = 0;
    for (int cluster = clusters.least; cluster <= clusters.most; cluster *= 2) {
        double cost = 0;
        if (products->tiles > 1 && !tiles_fit(*products, cluster, products->tiles)) continue;
        for (int i = 0; i < products->count; i++) {
            const Product &p = products->of[i];
            cost += cut_cost(p, cut_of(cluster, segments_of(p) / cluster, p.w.cols, p.format), p.n_rows, products->tiles);
        }
        if (best && cost >= 0.97 * best_cost) continue;
        best = cluster;
        best_cost = cost;
    }
    for (int i = 0; i < products->count; i++) {
        Product &p = products->of[i];
        p.cut = cut_of(best, segments_of(p) / best, p.w.cols, p.format);
    }
}

/* Whether a product fits into that launch: some cluster holds the segments of all, and the exact path, which has but one tile,
 * does not keep others from more. */
static bool may_join(const Products &products, const Product &p) {
    Products all = products;
    all.of[all.count++] = p;
    for (int i = 0; i < products.count; i++)
        if (p.n_rows > 8 && (products.of[i].format == EXACT) != (p.format == EXACT)) return false;
    const Clusters clusters = clusters_of(all);
    return clusters.least <= clusters.most;
}

static void launch_products(Products *products) {
    size_t shared = 0;
    int blocks = 0;
    products->tiles = choose_tiles(*products);
    choose_cluster(products);
    for (int i = 0; i < products->count; i++) {
        Product &p = products->of[i];
        p.first_block = blocks;
        blocks += divide_up(p.w.rows, STRIP * (WARPS / p.cut.along)) * p.heads * p.cut.cluster;
        shared = max(shared, (size_t)product_shared(p.format, p.cut, min(p.n_rows, products->tiles * 8), p.terms));
    }
    const Product &first = products->of[0];
    const auto kernel = products->tiles == 4 ? product_kernel<4> : products->tiles == 2 ? product_kernel<2> : product_kernel<1>;
    allow_shared(kernel, shared);
    launch_early(kernel, dim3((unsigned)blocks, (unsigned)divide_up(first.n_rows, products->tiles * 8)), THREADS, shared,
                 first.cut.cluster, *products);
}

/* ---- many rows: a block multiplies a tile of 64 to 256 rows of weights by 32 to 128 rows of x, one segment after the other,
 * each instruction with the same values as product_kernel's: a row has the same bits there and here, whatever the tile.
 *
 *     multiply_many -> consider_tile, round_kernel, wide_kernel -> multiply_segments -> finish_segment, add_slots
 *
 * x is rounded once for all blocks, in the layout that wgmma reads: 128 bytes of a row and term for each step of 64 columns,
 * whose 16-byte parts are exchanged within eight rows, so that a column's lie in different banks. A tile's step is one copy for
 * each term. Weights come through shared memory as well, but there each thread reads only what it has copied itself. wgmma adds
 * up as mma.sync does, which takes its place before sm_90; the tests compare every bit. */

enum {
    GROUP_ROWS = 64,             /* of weights, of the four warps that share a wgmma */
    WIDE_THREADS = 128,
    WIDE_STEP = 64,             /* columns */
    WIDE_BYTES = 2 * WIDE_STEP, /* of a row and term of x in a step */
    WIDE_STAGES = 4,            /* in shared memory at most, each of a step or two */
    ROUNDED_BYTES = 32 << 20,
};

/* [heads, steps, terms, padded rows, WIDE_BYTES] */
static __device__ __align__(1024) uint8_t rounded_rows[ROUNDED_BYTES];

typedef struct Wide {
    Product p;
    int split, stages;          /* blocks of a cluster that share a tile's segments; stages in shared memory */
    int padded;                 /* rows of x, up to whole tiles */
} Wide;

/* Steps of a stage: two where they have their scales in common, so that a warp has less to do beside multiplying. */
static __host__ __device__ constexpr int stage_steps(DType D) { return D == DTYPE_F8_E4M3 || D == DTYPE_F4_E2M1 ? 2 : 1; }

/* Steps of a matrix, in whole stages. */
template <DType D> static __host__ __device__ inline int wide_steps(int cols) {
    return divide_up(cols, stage_steps(D) * WIDE_STEP) * stage_steps(D);
}

/* A tile of N rows of x. part: bytes of a step of weights. stage, rounded: of a stage of weights and of x. slot: floats of one
 * segment's sums. */
template <DType D, int TERMS, int N, int GROUPS> struct WideTile {
    static constexpr int rows = GROUPS * GROUP_ROWS, threads = GROUPS * WIDE_THREADS;
    static constexpr int chunk = D == DTYPE_F4_E2M1 ? 8 : 16;       /* bytes that a thread copies at a time, */
    static constexpr int chunks = chunk_values(D) == 8 ? 4 : 2;     /* and how often in a step, half of them for either row */
    static constexpr int steps = stage_steps(D), part = threads * chunks * chunk;
    static constexpr int stage = steps * part, rounded = steps * TERMS * N * WIDE_BYTES;
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
    const int at = walk->at + stage_steps(D), step = (walk->segment + at / steps * segments) * steps + at % steps;
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
    constexpr int apart = D == DTYPE_F4_E2M1 ? 4 : is_e4m3(D) ? 2 : 1;
    const int n_steps = wide_steps<D>(p.w.cols), parts = p.heads * n_steps * 8, i = (int)thread_index();
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




/* One warp copies a stage of x. Its first thread does, and the barrier counts the bytes; before sm_90, all do. from: the first
 * term, with so many bytes to the next. */
template <int TERMS, int N>
static __device__ inline void copy_rounded(uint8_t *to, uint64_t *filled, const uint8_t *from, size_t term_bytes) {
#if __CUDA_ARCH__ >= 900
    if (lane_id()) return;
    expect_bytes(filled, TERMS * N * WIDE_BYTES);
#pragma unroll
    for (int term = 0; term < TERMS; term++)
        start_bulk_copy(to + term * N * WIDE_BYTES, from + (size_t)term * term_bytes, N * WIDE_BYTES, filled);
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

/* Starts to copy a stage of weights, from step `step` on; zeros where there are none. */
template <DType D, typename T>
static __device__ inline void copy_weights(uint8_t *stage, const Pair &pair, int step, int cols) {
    const uint32_t to = shared_address(stage) + threadIdx.x * T::chunk;
#pragma unroll
    for (int j = 0; j < T::steps * T::chunks; j++) {
        const int i = j % T::chunks, at = step_column<D>(step + j / T::chunks) + i % (T::chunks / 2) * 32;
        const bool there = at + lane_id() % 4 * chunk_values(D) < cols;
        const uint32_t offset = there ? (uint32_t)weight_bytes(D, (size_t)at) : 0;
        const uint8_t *from = pair.data + (offset + i / (T::chunks / 2) * pair.apart);
        if constexpr (T::chunk == 16)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                         :: "r"(to + j * T::threads * 16), "l"(from), "r"(there ? 16 : 0) : "memory");
        else
            asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;"
                         :: "r"(to + j * T::threads * 8), "l"(from), "r"(there ? 8 : 0) : "memory");
    }
}


/* The scales of a stage: of e4m3 its batch's, in blocks of 32 the thread's; of e2m1 four threads'. */
template <DType D> static __device__ inline void fetch_pair_scales(uint32_t scale[2], const Pair &pair, int step, int cols) {
    const int column = step_column<D>(step);
    if constexpr (is_e4m3(D) || D == DTYPE_F4_E2M1)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int offset = D == DTYPE_F4_E2M1 ? column / EXPONENT_BLOCK
                               : D == BLOCKS_OF_32 ? (column / SMALL_BLOCK + lane_id() % 4 / 2) * (int)sizeof(float)
                                                   : column / SCALE_BLOCK * (int)sizeof(float);
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
        } else if constexpr (is_e4m3(D))
            v = widen_part<D>(*(const uint4 *)(at + r * T::threads * 16), s, e4m3_factor(__uint_as_float(scale[r])));
        else v = *(const uint4 *)(at + i * T::threads * 16);
        a[s][0][r] = v.x, a[s][0][2 + r] = v.y, a[s][1][r] = v.z, a[s][1][2 + r] = v.w;
    }
}

/* ---- the multiplications of a step */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TILE_SUMS(i) "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
#define TILE_SUMS_4(i) TILE_SUMS(i), TILE_SUMS(i + 1), TILE_SUMS(i + 2), TILE_SUMS(i + 3)
#define TILE_SUMS_8(i) TILE_SUMS_4(i), TILE_SUMS_4(i + 4)
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA(N, TYPE, NAMES, A, B, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, " B ", 1, 1, 1, 0;" \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* sum += A B: 64 rows of weights, 16 values of k, N rows of x. */
template <DType D, int N> static __device__ inline void multiply_tile(float sum[N / 8][4], const uint32_t a[4], uint64_t b) {
    static_assert(N == 32 || N == 64 || N == 128);
    if constexpr (D == DTYPE_F16 && N == 32) WGMMA("32", "f16", NAMES_16, "%16, %17, %18, %19", "%20", TILE_SUMS_4(0));
    else if constexpr (D == DTYPE_F16 && N == 64) WGMMA("64", "f16", NAMES_32, "%32, %33, %34, %35", "%36", TILE_SUMS_8(0));
    else if constexpr (D == DTYPE_F16) WGMMA("128", "f16", NAMES_64, "%64, %65, %66, %67", "%68", TILE_SUMS_8(0), TILE_SUMS_8(8));
    else if constexpr (N == 32) WGMMA("32", "bf16", NAMES_16, "%16, %17, %18, %19", "%20", TILE_SUMS_4(0));
    else if constexpr (N == 64) WGMMA("64", "bf16", NAMES_32, "%32, %33, %34, %35", "%36", TILE_SUMS_8(0));
    else WGMMA("128", "bf16", NAMES_64, "%64, %65, %66, %67", "%68", TILE_SUMS_8(0), TILE_SUMS_8(8));
}

template <DType D, int TERMS, int N>
static __device__ inline void multiply_step(float sum[N / 8][4], uint32_t a[2][2][4], const uint8_t *rounded) {
    const uint64_t layout = 1ull << 62 | (uint64_t)(8 * WIDE_BYTES >> 4) << 32 | 1 << 16;   /* rows of 128 bytes, exchanged */
    const uint32_t low = shared_address(rounded) >> 4;
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
    uint8_t *rounded, *ring;                        /* stages of x and of weights */
    Stages *stages;
    float *sums;                                    /* of segments, the last of which takes the place of the ring */
    float *y;
} Job;

template <DType D, int N, typename T>
static __device__ inline void finish_segment(float sum[N / 8][4], const Wide &wide, const Job &job, int segment) {
#pragma unroll
    for (int i = 0; undo_shift(D) != 1 && i < N / 2; i++) sum[i / 4][i % 4] *= undo_shift(D);
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

/* x from step `step` on into that stage. */
template <int TERMS, int N, typename T> static __device__ inline void copy_x(const Job &job, int stage, int step) {
    if (warp_id() == 0)
        copy_rounded<T::steps * TERMS, N>(job.rounded + stage * T::rounded, &job.stages->filled[stage],
                                          job.x + (size_t)(step * TERMS) * job.term_bytes, job.term_bytes);
}

/* Fills all stages but one; weights, while the kernel before this one may be running. Returns the step after them. */
template <DType D, int TERMS, int N, typename T>
static __device__ inline Walk start_copies(const Job &job, const Pair &pair, const Walk &start, int n, int cols) {
    Walk walk = start;
    for (int i = 0; i < n; i++, commit_copies())
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

/* All warps walk through the stages of the block's segments; what they copy is for as many ahead as there are stages, less
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
        wait_for_copies(stages - 2);
        load_fragments<D, T>(a, job.ring + get.stage * T::stage, scale);
        if (more) copy_weights<D, T>(job.ring + put.stage * T::stage, pair, ahead.step, cols);
        commit_copies();
        wait_at(&job.stages->filled[get.stage], get.round);
        multiply_step<D, TERMS, N>(sum, a, job.rounded + get.stage * T::rounded);
        if constexpr (T::steps == 2) {
            load_fragments<D, T>(a, job.ring + get.stage * T::stage + T::part, scale);
            multiply_step<D, TERMS, N>(sum, a, job.rounded + get.stage * T::rounded + T::rounded / 2);
        }
        __syncwarp();
        if (lane_id() == 0) arrive_at(&job.stages->used[get.stage]);
        if (more) {                                 /* in the stage before this one */
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
    job.n_steps = wide_steps<D>(p.w.cols);
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
        start_barrier(&job.stages->filled[threadIdx.x], 1);
        start_barrier(&job.stages->used[threadIdx.x], T::threads / 32);
    }
    show_to_products();                             /* and to copies: the barriers */
    __syncthreads();
    multiply_segments<D, TERMS, N, T>(wide, job);
    if (wide.split == 1) return;
    cluster_barrier();
    add_slots<T>(job.y, p.y_stride, job.sums, wide.split, share, p.w.rows - job.first_row, min(N, p.n_rows - job.first_column));
    end_cluster();
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
    const size_t shared = tile_shared<D, TERMS, N, GROUPS>(wide), eights = (size_t)(p.heads * wide_steps<D>(p.w.cols)) * 8;
    launch_early(round_kernel<D, TERMS>, blocks_for((size_t)p.n_rows * eights), THREADS, 0, 1, p, wide.padded);
    allow_shared(wide_kernel<D, TERMS, N, GROUPS>, shared);
    launch_early(wide_kernel<D, TERMS, N, GROUPS>,
                 dim3((unsigned)wide.split, (unsigned)divide_up(p.n_rows, N), (unsigned)(divide_up(p.w.rows, T::rows) * p.heads)),
                 T::threads, shared, wide.split, wide);
}

/* Takes that tile if it is the best so far, by about the microseconds that it takes on an H200: a step keeps a multiprocessor
 * busy for `work`, and takes `least`; blocks that come later begin anew; and sums are added up, by a cluster in the end or by a
 * block in memory after each segment. */
template <DType D, int TERMS, int N, int GROUPS> static void consider_tile(Choice *best, const Product &p, double work) {
    const int segments = p.cut.cluster * p.cut.along, most = gpu.major == 9 ? MAX_CLUSTER : 1, beside = 4 / GROUPS;
    const double least = 0.45 + 0.2 * GROUPS, begin = 2.7;
    for (int split = 1; split <= most && split <= segments; split *= 2) {
        Wide wide = {.p = p, .split = split, .stages = WIDE_STAGES - stage_steps(D) + 1, .padded = divide_up(p.n_rows, N) * N};
        size_t shared;
        while ((shared = tile_shared<D, TERMS, N, GROUPS>(wide)) > gpu.shared_per_block / (beside > 1 ? 2 : 1) && wide.stages > 2)
            wide.stages--;
        if (shared > gpu.shared_per_block) continue;
        const int fit = (int)(gpu.shared_per_block / shared), slots = gpu.multiprocessors * (fit < beside ? fit : beside);
        const int blocks = divide_up(p.w.rows, GROUPS * GROUP_ROWS) * p.heads * divide_up(p.n_rows, N) * split;
        const double rest = divide_up(blocks % slots, gpu.multiprocessors), all = slots / gpu.multiprocessors;
        const double step = blocks / slots * fmax(all * work, least) + (rest ? fmax(rest * work, least) : 0);
        const double waves = divide_up(blocks, slots), adding = split > 1 ? 0.67 * split : 3.9 * (segments - 1) * waves;
        const double cost = divide_up(divide_up(p.w.cols, WIDE_STEP), split) * step + begin * waves + adding;
        if (!best->launch || cost < best->cost) *best = {wide, cost, launch_wide<D, TERMS, N, GROUPS>};
    }
}

/* Bytes of a row when it is rounded, at most: a stage may have one step more. */
static size_t rounded_row(const Product &product) {
    return (size_t)(product.heads * (divide_up(product.w.cols, WIDE_STEP) + 1) * product.terms) * WIDE_BYTES;
}

/* As many rows at a time as there is room for when they are rounded. */
template <DType D, int TERMS> static void multiply_rounded(Product product) {
    const int all = product.n_rows, most = (int)(ROUNDED_BYTES / rounded_row(product) / 128 * 128);
    for (int first = 0; first < all; first += most) {
        Choice best = {};
        product.n_rows = all - first < most ? all - first : most;
        if (product.n_rows <= 32) consider_tile<D, TERMS, 32, 1>(&best, product, 0.25);
        consider_tile<D, TERMS, 64, 1>(&best, product, 0.34);
        consider_tile<D, TERMS, 64, 2>(&best, product, 0.62);
        if constexpr (chunk_values(D) == 8) consider_tile<D, TERMS, 128, 4>(&best, product, 1.87);
        best.launch(best.wide);
        product.x += (size_t)most * product.x_stride;
        product.y += (size_t)most * product.y_stride;
    }
}

static void multiply_many(const Product &product) {
    if (product.format == DTYPE_BF16) multiply_rounded<DTYPE_BF16, 2>(product);
    else if (product.format == DTYPE_F16) multiply_rounded<DTYPE_F16, 2>(product);
    else if (product.format == DTYPE_F4_E2M1) multiply_rounded<DTYPE_F4_E2M1, 1>(product);
    else if (product.format == BLOCKS_OF_32 && product.terms == 2) multiply_rounded<BLOCKS_OF_32, 2>(product);
    else if (product.format == BLOCKS_OF_32) multiply_rounded<BLOCKS_OF_32, 1>(product);
    else if (product.terms == 2) multiply_rounded<DTYPE_F8_E4M3, 2>(product);
    else multiply_rounded<DTYPE_F8_E4M3, 1>(product);
}

/* Whether rows are worth the rounding and the second launch, and there is room for 128 of them. Few rows of weights make few
 * tiles. */
static bool are_many(const Product &product) {
    const double rows = (double)product.w.rows * product.heads, products = product.n_rows * rows * product.w.cols;
    if (product.format == EXACT || rounded_row(product) * 128 > ROUNDED_BYTES) return false;
    return product.n_rows > (rows <= 2048 ? 32 : 16) && products > 1 << 27;
}

/* ---- launches */

/* Whether rows of that type begin at multiples of 16 bytes, in a tensor that does. */
static bool rows_aligned(DType dtype, int cols) {
    if (dtype == DTYPE_F4_E2M1) return cols % batch_values(DTYPE_F4_E2M1) == 0;    /* and eight scales at multiples of 8 bytes */
    if (dtype == BLOCKS_OF_32) return cols % batch_values(BLOCKS_OF_32) == 0;      /* and all four scales of a batch are there */
    return dtype != DTYPE_F32 && weight_bytes(dtype, (size_t)cols) % 16 == 0;
}

static bool floats_aligned(const float *x, size_t stride) { return (uintptr_t)x % 16 == 0 && stride % 4 == 0; }

/* The terms of x depend on the matrix alone. Two cost 16-bit weights next to nothing while memory is what a product waits for.
 * Widening e4m3 takes so many instructions that they would show: it gets them where the matrix is small, as those are whose
 * results are compared with each other, the indexer's and the latent projections'. e2m1 is the experts' type. */
enum { TWO_TERMS_MOST = 16 << 20 };

static int terms_of(DType format, size_t weights) {
    if (is_e4m3(format)) return weights <= TWO_TERMS_MOST ? 2 : 1;
    return format == DTYPE_BF16 || format == DTYPE_F16 ? 2 : 1;
}

/* The type of weights as kernels are to see it, where they can do better than one weight at a time; strips of `every` rows each
 * have to have the scales of one block. */
static DType streamed_format(const Matrix &w, int every) {
    const bool small = w.dtype == DTYPE_F8_E4M3 && scale_block(&w) == SMALL_BLOCK;
    const DType format = small ? BLOCKS_OF_32 : w.dtype;
    if (small ? (w.first_row | every) % SMALL_BLOCK : w.dtype == DTYPE_F8_E4M3 && scale_block(&w) != SCALE_BLOCK) return EXACT;
    return rows_aligned(format, w.cols) && (uintptr_t)w.data % 16 == 0 && (uintptr_t)w.exponents % 8 == 0 ? format : EXACT;
}

static void plan(Product *p) {
    const Matrix &w = p->w;
    p->aligned = floats_aligned(p->x, p->x_stride) && p->x_head % 4 == 0;
    p->format = streamed_format(w, p->heads > 1 ? p->head_rows : 0);
    p->terms = terms_of(p->format, (size_t)w.rows * (size_t)w.cols * (size_t)p->heads);
    p->cut = choose_cut(*p);
}

/* Products of many rows each have a launch, others as few as they can. */
static void multiply(Product *products, int n) {
    Products few = {};
    for (Product *p = products; p < products + n; p++) {
        if (p->n_rows <= 0 || p->w.rows <= 0) continue;
        plan(p);
        if (are_many(*p)) {
            multiply_many(*p);
            continue;
        }
        if (!may_join(few, *p)) {
            launch_products(&few);
            few.count = 0;
        }
        few.of[few.count++] = *p;
    }
    if (few.count) launch_products(&few);
}

static void linear(const Projection *products, int n_products, const float *x, size_t x_stride, int n_rows) {
    Product of[MAX_PROJECTIONS] = {};
    for (int i = 0; i < n_products; i++) {
        const Projection &p = products[i];
        of[i] = {.w = *p.w, .x = x, .y = p.y, .x_stride = x_stride, .y_stride = p.y_stride, .n_rows = n_rows, .heads = 1};
    }
    multiply(of, n_products);
}

/* y[r, h] = W_UV[h] z[r, h]: a small matrix for each head, all in one launch. */
static void expand_value(float *y, const float *z, int n_rows, const Matrix *kv_b, const Config *config) {
    const int heads = config->num_attention_heads, nope = config->qk_nope_head_dim, v = config->v_head_dim,
              lora = config->kv_lora_rank;
    Matrix w = *kv_b;
    w.data += (size_t)nope * weight_bytes(w.dtype, (size_t)w.cols);
    w.first_row += nope;
    w.rows = v;
    Product product = {.w = w, .x = z, .y = y, .x_stride = (size_t)heads * (size_t)lora, .y_stride = (size_t)heads * (size_t)v,
                       .n_rows = n_rows, .heads = heads, .head_rows = nope + v, .x_head = lora, .y_head = v};
    multiply(&product, 1);
}

/* y[r, g] = W[g] x[r, g] likewise. */
static void grouped_linear(float *y, const float *x, int n_rows, const Matrix *w, int groups) {
    const int rank = w->rows / groups;
    Product product = {.w = *w, .x = x, .y = y, .x_stride = (size_t)groups * (size_t)w->cols, .y_stride = (size_t)w->rows,
                       .n_rows = n_rows, .heads = groups, .head_rows = rank, .x_head = w->cols, .y_head = rank};
    product.w.rows = rank;
    multiply(&product, 1);
}

/* ---- absorb_query: the same matrices from their other side. A thread block takes ABSORB_COLUMNS columns of a head, which have
 * one scale in each row of weights, and up to ABSORB_ROWS rows of q. q is not simply rounded, so that what follows is as exact as
 * in f32: q times the scales is the sum of two bf16, which leaves out 2^-17 of it, and the weights meet one after the other. */

enum {
    ABSORB_COLUMNS = SCALE_BLOCK, ABSORB_ROWS = 64,
    ABSORB_ACROSS = ABSORB_COLUMNS / 32, ABSORB_DOWN = 2,   /* warps: 32 columns each, and half of the tiles of 16 rows */
    ABSORB_TILES = ABSORB_ROWS / 16 / ABSORB_DOWN, ABSORB_THREADS = 32 * ABSORB_ACROSS * ABSORB_DOWN,
    ABSORB_PITCH = ABSORB_COLUMNS + 8,      /* bf16 from one row of weights to the next in shared memory */
};

struct Absorb {
    Matrix kv_b;
    const float *q;
    float *y;
    int n_rows, heads, nope, rope, v;
};

/* Shared memory: [depth, ABSORB_PITCH] weights, [depth] scales, then the two terms of [tiles * 16, depth + 8] values of q. */
static __host__ __device__ int absorb_depth(const Absorb &a) { return divide_up(a.nope, 16) * 16; }
static __host__ __device__ int absorb_bytes(const Absorb &a, int tiles) {
    return absorb_depth(a) * (ABSORB_PITCH * 2 + 4) + 2 * tiles * 16 * (absorb_depth(a) + 8) * 2;
}

/* Four e4m3 values as pairs of neighbours; widen_four pairs the even ones and the odd ones. */
static __device__ inline uint2 neighbours(uint32_t four) {
    const uint2 apart = widen_four(four);
    return make_uint2(__byte_perm(apart.x, apart.y, 0x5410), __byte_perm(apart.x, apart.y, 0x7632));
}

/* The weights of a head and some columns begin their way into shared memory; zeros where there are none. */
template <DType D> static __device__ void load_absorbed(__nv_bfloat16 *weights, const Absorb &a, int head, int first) {
    enum { BATCH = 4 };         /* loads that a thread has on their way */
    const int values = chunk_values(D), pieces = ABSORB_COLUMNS / values, lora = a.kv_b.cols,
              column = first + (int)threadIdx.x % pieces * values, step = ABSORB_THREADS / pieces, depth = absorb_depth(a);
    const uint8_t *from =
        a.kv_b.data + weight_bytes(D, (size_t)(head * (a.nope + a.v)) * (size_t)lora + (size_t)min(column, lora - values));
    __nv_bfloat16 *to = weights + (int)threadIdx.x % pieces * values;
    for (int row = (int)threadIdx.x / pieces; row < depth; row += BATCH * step) {
        uint4 piece[BATCH];
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
            const int r = row + u * step;
            const uint8_t *at = from + weight_bytes(D, (size_t)min(r, a.nope - 1) * (size_t)lora);
            const bool there = r < a.nope && column < lora;
            if (D == DTYPE_BF16 && r < depth) start_copy_to_shared((uint8_t *)(to + r * ABSORB_PITCH), at, there);
            if (D != DTYPE_BF16) piece[u] = there ? __ldcg((const uint4 *)at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int u = 0; u < BATCH && D != DTYPE_BF16; u++) {
            const uint2 x = neighbours(piece[u].x), y = neighbours(piece[u].y), z = neighbours(piece[u].z),
                        w = neighbours(piece[u].w);
            uint4 *at = (uint4 *)(to + (row + u * step) * ABSORB_PITCH);
            if (row + u * step >= depth) continue;
            at[0] = make_uint4(x.x, x.y, y.x, y.y);
            at[1] = make_uint4(z.x, z.y, w.x, w.y);
        }
    }
}

/* And the scale of each row of weights. */
template <DType D> static __device__ void load_absorbed_scales(float *scales, const Absorb &a, int head, int scale_column) {
    for (int i = (int)threadIdx.x; i < absorb_depth(a); i += ABSORB_THREADS) {
        const int row = head * (a.nope + a.v) + min(i, a.nope - 1);
        scales[i] = D == DTYPE_F8_E4M3 ? __ldcg(row_scales(&a.kv_b, row) + scale_column) : 1;
    }
}

/* Four values of q as two terms. */
static __device__ void split_four(__nv_bfloat16 *high, __nv_bfloat16 *low, const float4 &q) {
    const uint2 pairs = make_uint2(narrow_pair<DTYPE_BF16>(q.x, q.y), narrow_pair<DTYPE_BF16>(q.z, q.w));
    *(uint2 *)high = pairs;
    *(uint2 *)low = make_uint2(
        narrow_pair<DTYPE_BF16>(q.x - __uint_as_float(pairs.x << 16), q.y - __uint_as_float(pairs.x & 0xffff0000)),
        narrow_pair<DTYPE_BF16>(q.z - __uint_as_float(pairs.y << 16), q.w - __uint_as_float(pairs.y & 0xffff0000)));
}

/* Rows [first, first + rows) of q for one head as two terms, times the weights' scales; the others of a tile are zeros. And, by a
 * head's first block, what is not absorbed to the end of y. Sixteen threads take a row, and each has eight loads on their way. */
static __device__ void split_query(__nv_bfloat16 *terms, const float *scales, const Absorb &a, int head, int first, int rows) {
    enum { ROWS = 2, ALONG = 4, STEP = ABSORB_THREADS / 16 };
    const int depth = absorb_depth(a), tall = divide_up(rows, 16) * 16, lane = (int)threadIdx.x % 16 * 4,
              width = a.nope + a.rope, y_width = a.kv_b.cols + a.rope;
    for (int r = (int)threadIdx.x / 16; r < tall; r += ROWS * STEP)
        for (int begin = lane; begin < max(depth, width); begin += ALONG * 64) {
            float4 q[ROWS][ALONG];
#pragma unroll
            for (int i = 0; i < ROWS * ALONG; i++) {
                const int row = r + i / ALONG * STEP, j = begin + i % ALONG * 64;
                const size_t vector = (size_t)(first + min(row, rows - 1)) * (size_t)a.heads + (size_t)head;
                q[i / ALONG][i % ALONG] = row < rows && j < width ? *(const float4 *)(a.q + vector * (size_t)width + j)
                                                                  : make_float4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < ROWS * ALONG; i++) {
                const int row = r + i / ALONG * STEP, j = begin + i % ALONG * 64;
                const size_t vector = (size_t)(first + min(row, rows - 1)) * (size_t)a.heads + (size_t)head;
                float4 four = q[i / ALONG][i % ALONG];
                if (j >= a.nope && j < width && row < rows && blockIdx.x == 0)
                    *(float4 *)(a.y + vector * (size_t)y_width + (size_t)(a.kv_b.cols + j - a.nope)) = four;
                if (j >= depth || row >= tall) continue;
                const float4 scale = *(const float4 *)(scales + j);
                four = make_float4(four.x * scale.x, four.y * scale.y, four.z * scale.z, four.w * scale.w);
                if (j >= a.nope) four = make_float4(0, 0, 0, 0);
                split_four(terms + row * (depth + 8) + j, terms + (tall + row) * (depth + 8) + j, four);
            }
        }
}

/* Grid: groups of columns, heads, groups of rows of q. */
template <DType D> static __global__ void __launch_bounds__(ABSORB_THREADS, 2) absorb_kernel(const __grid_constant__ Absorb a) {
    extern __shared__ __align__(128) uint8_t absorb_shared[];
    let_next_start();
    const int head = (int)blockIdx.y, first = (int)blockIdx.z * ABSORB_ROWS, rows = min((int)ABSORB_ROWS, a.n_rows - first);
    const int lane = lane_id(), depth = absorb_depth(a), pitch = depth + 8, tiles = divide_up(rows, 16), lora = a.kv_b.cols;
    const int across = warp_id() % ABSORB_ACROSS * 32, down = warp_id() / ABSORB_ACROSS;    /* its tiles: down, down + 2, ... */
    __nv_bfloat16 *weights = (__nv_bfloat16 *)absorb_shared;
    float *scales = (float *)(weights + depth * ABSORB_PITCH);
    __nv_bfloat16 *terms = (__nv_bfloat16 *)(scales + depth);
    load_absorbed<D>(weights, a, head, (int)blockIdx.x * ABSORB_COLUMNS);
    load_absorbed_scales<D>(scales, a, head, (int)blockIdx.x);
    wait_for_previous();
    __syncthreads();
    split_query(terms, scales, a, head, first, rows);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    float sums[ABSORB_TILES][4][4] = {};
    const __nv_bfloat16 *b_row = weights + lane % 16 * ABSORB_PITCH + across + lane / 16 * 8,
                        *a_row = terms + lane % 16 * pitch + lane / 16 * 8;
#pragma unroll 2
    for (int k = 0; k < depth; k += 16) {
        uint32_t w[2][4], q[4];
        load_transposed(w[0], b_row + k * ABSORB_PITCH);
        load_transposed(w[1], b_row + k * ABSORB_PITCH + 16);
#pragma unroll
        for (int m = 0; m < ABSORB_TILES * 2; m++) {
            const int tile = m / 2 * ABSORB_DOWN + down;
            if (tile >= tiles) break;
            load_matrices(q, a_row + (tile + m % 2 * tiles) * 16 * pitch + k);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const uint32_t *pair = w[t / 2] + t % 2 * 2;
                multiply_fragment<DTYPE_BF16>(sums[m / 2][t], q[0], q[1], q[2], q[3], pair[0], pair[1]);
            }
        }
    }
    const int column = (int)blockIdx.x * ABSORB_COLUMNS + across + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < ABSORB_TILES * 2; m++) {
        const int r = (m / 2 * ABSORB_DOWN + down) * 16 + m % 2 * 8 + lane / 4;
        float *y = a.y + ((size_t)(first + r) * (size_t)a.heads + (size_t)head) * (size_t)(lora + a.rope) + (size_t)column;
#pragma unroll
        for (int t = 0; t < 4; t++)
            if (r < rows && column + t * 8 < lora)
                *(float2 *)(y + t * 8) = make_float2(sums[m / 2][t][m % 2 * 2], sums[m / 2][t][m % 2 * 2 + 1]);
    }
}

/* Any type and shape, in f32: a thread for each value. */
static __global__ void absorb_exact_kernel(const __grid_constant__ Absorb a) {
    begin_kernel();
    const int lora = a.kv_b.cols, width = lora + a.rope, column = (int)(blockIdx.x * blockDim.x + threadIdx.x),
              head = (int)blockIdx.y, top = head * (a.nope + a.v);
    const size_t vector = (size_t)blockIdx.z * (size_t)a.heads + (size_t)head;
    const float *q = a.q + vector * (size_t)(a.nope + a.rope);
    if (column >= width) return;
    float sum = 0;
    for (int i = 0; i < a.nope && column < lora; i++) {
        const float *scales = row_scales(&a.kv_b, top + i);
        const float w = load_stored(a.kv_b.data, (size_t)(top + i) * (size_t)lora + (size_t)column, a.kv_b.dtype);
        sum = fmaf(scales ? w * scales[column / scale_block(&a.kv_b)] : w, q[i], sum);
    }
    a.y[vector * (size_t)width + (size_t)column] = column < lora ? sum : q[a.nope + column - lora];
}

template <DType D> static void launch_absorb(const Absorb &absorb) {
    const int tiles = absorb.n_rows < ABSORB_ROWS ? divide_up(absorb.n_rows, 16) : ABSORB_ROWS / 16;
    const size_t shared = (size_t)absorb_bytes(absorb, tiles);
    allow_shared(absorb_kernel<D>, shared);
    launch(absorb_kernel<D>,
           dim3((unsigned)divide_up(absorb.kv_b.cols, ABSORB_COLUMNS), (unsigned)absorb.heads,
                (unsigned)divide_up(absorb.n_rows, ABSORB_ROWS)),
           ABSORB_THREADS, shared, absorb);
}

static void absorb_query(float *q_absorbed, const float *q, int n_rows, const Matrix *kv_b, const Config *config) {
    if (n_rows <= 0) return;
    const Absorb absorb = {.kv_b = *kv_b, .q = q, .y = q_absorbed, .n_rows = n_rows, .heads = config->num_attention_heads,
                           .nope = config->qk_nope_head_dim, .rope = config->qk_rope_head_dim, .v = config->v_head_dim};
    const bool aligned = rows_aligned(kv_b->dtype, kv_b->cols) && (uintptr_t)kv_b->data % 16 == 0
                         && (absorb.nope | absorb.rope | absorb.v | kv_b->first_row) % 4 == 0 && scale_block(kv_b) == SCALE_BLOCK
                         && floats_aligned(q, 4) && floats_aligned(q_absorbed, 4)
                         && (size_t)absorb_bytes(absorb, ABSORB_ROWS / 16) <= gpu.shared_per_block;
    if (aligned && kv_b->dtype == DTYPE_BF16) return launch_absorb<DTYPE_BF16>(absorb);
    if (aligned && kv_b->dtype == DTYPE_F8_E4M3) return launch_absorb<DTYPE_F8_E4M3>(absorb);
    const dim3 grid((unsigned)divide_up(kv_b->cols + absorb.rope, 128), (unsigned)absorb.heads, (unsigned)n_rows);
    launch(absorb_exact_kernel, grid, 128, 0, absorb);
}

/* =====================================================================================================================
 * Mixture of experts (DeepSeek-V3, 2.1.2)
 *
 *     route -> route_kernel -> limit_groups
 *     experts -> experts_kernel -> list_works -> multiply_gate_up, multiply_down
 *     multiply_gate_up, multiply_down -> stage_rows, multiply_strip (fetch_tile, multiply_tile) -> add_gate_up, add_down
 *     experts -> packed_experts_kernel -> fetch_gate_up, fetch_down; multiply_packed_gate_up, multiply_packed_down
 *     multiply_packed_gate_up, multiply_packed_down -> stage_terms, multiply_terms
 *
 * Owns: the router, and the experts' products. An expert's weights are read once for up to eight rows that chose it (packed:
 * four), and the host never learns who was chosen. All experts of a layer run in one launch of as many blocks as there are
 * multiprocessors, the shared one too: to all rows it is one more, the first, with weight 1. Blocks share out the strips of gate
 * and up of all experts that were chosen, wait for each other, and share out the strips of down. A strip of down (packed: or one
 * of its two pieces) is one block's for all experts, so a row's experts are added in ascending order.
 *
 * Each warp has a ring of tiles in shared memory, which it fills some tiles ahead of what it multiplies: from strip to strip,
 * from expert to expert and from the first phase into the second, so that memory is busy while sums are added and while blocks
 * wait for each other; and the shared expert's tiles are on their way before the router has ended. The warps of a team each sum
 * up some of the columns of a strip, and their sums are added in order. How the columns are cut depends on the shape alone.
 *
 * x and gated stand in shared memory as one or two numbers of 16 bits. Weights of 16 bits meet two, so that a product is right to
 * about 2^-17 of x, or 2^-22; e4m3 where the matrices are small, by the rule of products, and else one of f16, 2^-12; e2m1 one.
 *
 * On sm_90 experts of e2m1 have a kernel of their own (packed_experts_kernel) with the same plan and lists. Four of its warps
 * fetch for the others, which are four warpgroups: in the first phase each has a segment of the columns, in the second one works
 * of its own, so that nothing stops between these. Gated is left as the digits that products meet, and comes with the weights.
 */

/* Integers in the order of the floats, none of them 0. */
static __device__ inline uint32_t in_order(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

enum { ROUTE_THREADS = 256 };

struct Router {
    int *picks;
    float *weights;
    const float *logits, *bias;
    int experts, per_token, groups, kept;
    float factor;
    bool normalise, softplus;
    const int *table;           /* [vocab, per_token]: the experts of each token, of `rows`; or NULL */
    const Row *rows;
};

/* sqrt(log(1 + e^x)); far below zero that is e^(x / 2), where e^x itself would be lost. */
static __device__ inline float root_of_softplus(float x) {
    return x > 20 ? sqrtf(x) : x < -30 ? expf(x / 2) : sqrtf(log1pf(expf(x)));
}

static __device__ inline float router_score(const Router &router, float logit) {
    return router.softplus ? root_of_softplus(logit) : 1 / (1 + expf(-logit));
}

/* Keeps the topk_group groups whose two best choices add up highest; experts of the others become -inf, not 0, since a biased
 * score may be negative. A lane has EACH experts from `first` on. shared: [groups][size + 1], so that lanes that look at groups
 * meet different banks; and twice [groups]. */
template <int EACH> static __device__ void limit_groups(float (&choice)[EACH], int first, const Router &router, float *shared) {
    const int size = router.experts / router.groups, group = first / size;
    float *sums = shared + router.experts + router.groups, *kept = sums + router.groups;
#pragma unroll
    for (int j = 0, g = group, left = (group + 1) * size - first; j < EACH && first + j < router.experts; j++, left--) {
        if (!left) g++, left = size;
        shared[first + j + g] = choice[j];
    }
    __syncwarp();
    for (int g = lane_id(); g < router.groups; g += 32) {
        float best = -INFINITY, second = -INFINITY;
#pragma unroll 8
        for (int e = 0; e < size; e++) {
            const float value = shared[g * (size + 1) + e];
            second = fmaxf(second, fminf(best, value));
            best = fmaxf(best, value);
        }
        sums[g] = best + second;
    }
    __syncwarp();
    for (int g = lane_id(); g < router.groups; g += 32) {
        int better = 0;                             /* of equal groups the earlier */
#pragma unroll 4
        for (int other = 0; other < router.groups; other++)
            better += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
        kept[g] = better < router.kept;
    }
    __syncwarp();
#pragma unroll
    for (int j = 0, g = group, left = (group + 1) * size - first; j < EACH && first + j < router.experts; j++, left--) {
        if (!left) g++, left = size;
        if (!kept[g]) choice[j] = -INFINITY;
    }
}

/* An expert that is still in the race: its choice as in_order() has it, or 0. */
struct Candidate { uint32_t order; float score; int at; };

/* The best of a lane's, of equal ones the first. */
template <int EACH> static __device__ inline Candidate best_of(const Candidate (&all)[EACH]) {
    Candidate best[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) best[j] = all[j];
#pragma unroll
    for (int half = 1; half < EACH; half *= 2)
#pragma unroll
        for (int j = 0; j < EACH; j += 2 * half)
            if (best[j + half].order > best[j].order) best[j] = best[j + half];
    return best[0];
}

/* A thread block takes a row: all its threads make scores, and then the first warp chooses, a lane among EACH neighbours. */
template <int EACH> static __global__ void route_kernel(const __grid_constant__ Router router) {
    extern __shared__ float chosen[];               /* [per_token] scores, what limit_groups() needs, and all scores */
    const int lane = lane_id(), first = lane * EACH;
    const float *logits = router.logits + (size_t)blockIdx.x * (size_t)router.experts;
    float *scores = chosen + router.per_token + router.experts + 3 * router.groups;
    int *picks = router.picks + (size_t)blockIdx.x * (size_t)router.per_token;
    float *weights = router.weights + (size_t)blockIdx.x * (size_t)router.per_token;
    float score[EACH], choice[EACH] = {}, total = 0;
    Candidate candidates[EACH];
    let_next_start();                               /* the experts fetch the shared one's tiles meanwhile */
#pragma unroll
    for (int j = 0; j < EACH && !router.table; j += 4)
        *(float4 *)(choice + j) = load_four(router.bias + first + j, router.experts - first - j);
    wait_for_previous();
    for (int e = (int)threadIdx.x; e < router.experts; e += ROUTE_THREADS) scores[e] = router_score(router, logits[e]);
    __syncthreads();
    if (warp_id()) return;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        score[j] = first + j < router.experts ? scores[first + j] : 0;
        choice[j] += score[j];                      /* the bias balances the load: it chooses, it does not weigh */
        if (isnan(choice[j])) choice[j] = INFINITY, score[j] = NAN;         /* chosen, so that it shows */
        choice[j] = fmaxf(choice[j], -1e30f);       /* -inf marks what is out of the race */
    }
    if (router.groups > 1) limit_groups(choice, first, router, chosen + router.per_token);
    if (router.table)
        for (int i = lane; i < router.per_token; i += 32) {
            picks[i] = router.table[(size_t)router.rows[blockIdx.x].token * (size_t)router.per_token + (size_t)i];
            chosen[i] = scores[picks[i]];
        }
#pragma unroll
    for (int j = 0; j < EACH; j++) candidates[j] = {first + j < router.experts ? in_order(choice[j]) : 0, score[j], j};
    for (int i = 0; i < router.per_token && !router.table; i++) {   /* the best of all lanes', of equal ones the first lane's */
        const Candidate best = best_of(candidates);
        const uint32_t most = __reduce_max_sync(~0u, best.order), lanes = __ballot_sync(~0u, best.order == most);
        if (lane != __ffs((int)lanes) - 1) continue;
        picks[i] = first + best.at;
        chosen[i] = best.score;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (j == best.at) candidates[j].order = 0;
    }
    __syncwarp();
#pragma unroll 8
    for (int i = 0; i < router.per_token; i++) total += chosen[i];
    const float factor = (router.normalise ? 1 / (total + 1e-20f) : 1) * router.factor;
    for (int i = lane; i < router.per_token; i += 32) weights[i] = chosen[i] * factor;
}

static void launch_route(const Router &router, int n_rows) {
    if (n_rows <= 0) return;
    const auto kernel = router.experts <= 256 ? route_kernel<8> : router.experts <= 512 ? route_kernel<16> : route_kernel<128>;
    const size_t shared = ((size_t)router.per_token + 2 * (size_t)router.experts + 3 * (size_t)router.groups) * sizeof(float);
    allow_shared(kernel, shared);
    launch(kernel, (unsigned)n_rows, ROUTE_THREADS, shared, router);
}

static void route(int *picks, float *weights, const float *logits, const float *bias, int n_rows, const Config *config) {
    launch_route({.picks = picks, .weights = weights, .logits = logits, .bias = bias,
                  .experts = config->n_routed_experts, .per_token = config->num_experts_per_tok,
                  .groups = config->n_group, .kept = config->topk_group, .factor = config->routed_scaling_factor,
                  .normalise = config->norm_topk_prob, .softplus = false, .table = NULL, .rows = NULL}, n_rows);
}

static void route_softplus(int *picks, float *weights, const float *logits, const float *bias, const int *table, const Row *rows,
                           int n_rows, const Config *config) {
    launch_route({.picks = picks, .weights = weights, .logits = logits, .bias = bias, .experts = config->n_routed_experts,
                  .per_token = config->num_experts_per_tok, .groups = 1, .kept = 1, .factor = config->routed_scaling_factor,
                  .normalise = config->norm_topk_prob, .softplus = true, .table = table, .rows = rows}, n_rows);
}

/* ---- experts: one launch, whose blocks all stay until its end */

enum {
    EXPERT_WARPS = 16, EXPERT_THREADS = 32 * EXPERT_WARPS,
    X_BLOCK = 256,              /* columns of x that a warp brings to shared memory at a time */
    SEGMENT = 128,              /* columns of a segment at least, of e2m1 eight times that; the segments take tiles in turns */
    MAX_SEGMENT_BITS = 3,
    PACKED_SEGMENT_BITS = 2,    /* of packed weights: a segment is a warpgroup's */
    PACKED_THREADS = EXPERT_THREADS + 128,          /* four warps more, which fetch for a segment each */
    PACKED_COLUMNS = 4,         /* rows of x that meet a tile of packed weights */
    MOST_ENTRIES = 64, FEWEST_ENTRIES = 32,         /* rows of works whose sums with a strip of down wait to be added up */
    SCALED_TOGETHER = 32,       /* neighbours in a row of x or gated that have one scale: a block of e2m1, and a unit's rows */
    TILE_ROWS = 16,             /* of weights in a tile: of one matrix, or eight each of gate and up */
    TILE_BYTES = 128,           /* of each of its rows */
    TILE_COLUMNS = 8,           /* rows of x that meet a tile */
    EXACT_SEGMENT = 32,         /* columns of a segment where weights of any type are multiplied in f32, */
    EXACT_STEP = 8,             /* and of these as many as are on their way together, which share a scale */
    ENOUGH_STAGES = 3, MAX_STAGES = 4,              /* tiles that a warp has on their way; fewer where shared memory is small */
    RUN = 16,                   /* units after which the next rows of the same expert have their turn */
    LONG_RUN = 32,              /* the same where rows are many, and neighbouring blocks take these at the same time */
    STRIPS = 3,                 /* of down, that a team multiplies by the same rows */
    MAX_SUMS = 192, MAX_DOWN_SUMS = 384,            /* columns of one segment's sums that wait in shared memory to be added up */
    DOWN_SUM_BYTES = MAX_DOWN_SUMS * TILE_ROWS * 4,
    COLUMN_BYTES = 11,          /* of strip, pick, next and leads */
    MAX_LISTED = 16 * MAX_PASS_ROWS, MAX_MASKS = 64 << 10,      /* of a launch: picks; bytes of masks */
    SMALL_SHARED = 1024,        /* bytes at most of what is declared in functions */
    NOBODY = 0xffff,
};
/* Of later sections. */
static __device__ void round_group(float *x, int n, const RowFormat &format);
static void round_rows(float *x, size_t stride, int n_rows, int dim, const RowFormat *format);

enum { GATE, UP, DOWN };        /* an expert's matrices; the first and the last also name the phases */

struct Experts {
    const Matrix *table[3];     /* [experts], on the device */
    Matrix shared[3];           /* of the shared expert, where it runs with the others */
    const int *picks;
    const float *x, *weights;
    float *gated;               /* [rows * slots, inter] */
    float *y;
    int n_rows, experts, per_token, hidden, inter;
    float limit;                /* swiglu_limit; 0: none */
    bool rounds;                /* --qat, and weights are codes: gated is rounded as rows of this format are */
    RowFormat rounding;
    int slots;                  /* picks of a row; with the shared expert, which then is the last */
    bool aligned;               /* x allows loads of 16 bytes */
    bool many;                  /* rows: an expert has more than half a tile of them */
    bool packed;                /* packed_experts_kernel runs it */
    int share;                  /* of packed weights: tiles of down that a block has, from strip to strip */
    DType dtype[2];             /* how the experts' weights are multiplied, and the shared one's */
    int terms[2];               /* of x, that these meet */
    int segment_bits[3];        /* 2^bits warps share the columns of a strip, in either phase: a team */
    int columns;                /* rows of x that meet a tile at a time */
    int gated_rows;             /* of gated that are in shared memory at a time */
    int entries;                /* whose sums wait, where weights are packed */
    int most_chosen, stages, slot_bytes, x_bytes;   /* what lay_out_experts() has found room for */
};

/* An expert that was chosen. Scales: of its row 0. */
struct Chosen { const uint8_t *data[3]; const void *scale[3]; };

/* Up to `columns` rows that chose the same expert: order[begin] to order[begin of the next]. */
struct Work { uint16_t chosen, begin; };

/* What a block does. The first phase is a list of units, `units` for each work: a unit is a strip for each team of warps, which
 * all take the same unit at the same time. A block has a stretch of that list, so that all have the same to do; or, where rows
 * are many, long runs of it in turns with the others, so that L2 has the weights that several works need. In the second phase a
 * block has some strips and takes all works for each: its tasks are a work and a group of up to STRIPS strips, which the teams
 * take in turns, a round for all of them. The shared expert's units come first: they are known beforehand. */
struct Plan {
    int units, works, shared_works;
    int shared, gate;           /* units (or long runs) of the first phase, of the shared expert and of all */
    int first_shared, first_routed;                 /* where these begin in the list */
    int strips, groups, down;   /* of the second phase, or pieces of them where weights are packed; rounds */
};

/* Some of it: a team's strips of one work that follow each other. A place is a unit or a long run, or after these a round. */
struct Span { int work, strip, strips; };

struct PackedStages;

/* A block's shared memory. */
struct ExpertMemory {
    uint8_t *ring, *x;          /* ring: this warp's; where weights are packed, the block's */
    PackedStages *stages;       /* where weights are packed */
    Plan *plan;
    float *sums, *down_sums;    /* [column, segment, TILE_ROWS], of either phase: the second's lie where x was, and behind */
    uint8_t *gated;             /* them the rows of gated that are at hand */
    int *strip, *pick;          /* [column] whose sums these are; a pick is row << 16 | number */
    uint16_t *next;             /* [column]: see link_columns() */
    uint8_t *leads;             /* [column] */
    Chosen *chosen;
    Work *works;
    int *order;                 /* [picks] by expert */
};

/* Values of a row in a tile: 2^tile_bits, since a division takes as long as a read of memory. Four threads have 2^part_bits
 * eights each of them. */
static __host__ __device__ constexpr int tile_bits(DType D) { return D == DTYPE_F4_E2M1 ? 8 : is_e4m3(D) ? 7 : 6; }
static __host__ __device__ constexpr int part_bits(DType D) { return tile_bits(D) - 5; }
static __host__ __device__ inline int count_tiles(DType D, int cols) { return (cols + (1 << tile_bits(D)) - 1) >> tile_bits(D); }

/* Room for a tile's scales: of e4m3 one for its upper and one for its lower rows, in blocks of 32 four; of e2m1 eight bytes for
 * each row. */
static __host__ __device__ inline int scale_bytes(DType D) {
    return D == DTYPE_F4_E2M1 ? 128 : D == BLOCKS_OF_32 ? 32 : D == DTYPE_F8_E4M3 ? 16 : 0;
}

/* A thread's number, and its warp's, among those that multiply. Where weights are packed, the warps that fetch come before them,
 * as the scheduler seems to prefer earlier ones: what they have not asked for all others wait for. */
static __device__ inline int worker() { return (int)threadIdx.x - ((int)blockDim.x - EXPERT_THREADS); }
static __device__ inline int worker_warp() { return worker() >> 5; }
static __device__ inline int fetcher_warp() { return (int)threadIdx.x / 32; }

static __device__ inline int row_of(int pick) { return pick >> 16; }
static __device__ inline int number_of(int pick) { return pick & 0xffff; }
static __device__ inline bool is_shared(const Experts &e, int pick) { return number_of(pick) == e.per_token; }
static __device__ inline size_t gated_row(const Experts &e, int pick) {
    return (size_t)(row_of(pick) * e.slots + number_of(pick)) * (size_t)e.inter;
}
static __device__ inline DType type_of(const Experts &e, const ExpertMemory &m, int work) {
    return e.dtype[work < m.plan->shared_works];
}
static __device__ inline int terms_of(const Experts &e, const ExpertMemory &m, int work) {
    return e.terms[work < m.plan->shared_works];
}
static __device__ inline int count_of(const ExpertMemory &m, int work) { return m.works[work + 1].begin - m.works[work].begin; }
static __device__ inline int bits_of(const Experts &e, bool down) { return e.segment_bits[down ? DOWN : GATE]; }
static __device__ inline int segments_of(const Experts &e, bool down) { return 1 << bits_of(e, down); }
static __device__ inline int teams_of(const Experts &e, bool down) { return EXPERT_WARPS >> bits_of(e, down); }
static __device__ inline int team_of(const Experts &e, bool down) { return worker_warp() & (teams_of(e, down) - 1); }
static __device__ inline int segment_of(const Experts &e, bool down) { return worker_warp() / teams_of(e, down); }

/* Of the threads that multiply. */
static __device__ inline void sync_warps() { asm volatile("bar.sync 1, %0;" :: "n"((int)EXPERT_THREADS) : "memory"); }

/* ---- the plan */

/* Where the share of a block begins, of n things that are dealt out in runs. */
static __device__ inline int share_begin(int n, int block) { return (int)((unsigned)n * (unsigned)block / gridDim.x); }

static __device__ inline int shared_works(const Experts &e) { return e.slots > e.per_token ? divide_up(e.n_rows, e.columns) : 0; }

/* Part of a strip of 64 rows of packed down: some tiles of it that follow each other. number: among the strip's pieces. */
struct Piece { int strip, tile, tiles, number; };

/* Tiles of a strip of down. */
static __host__ __device__ inline int strip_tiles(const Experts &e) { return e.inter >> tile_bits(DTYPE_F4_E2M1); }

/* A block has `share` tiles of down, from strip to strip: whole strips, or pieces of neighbouring ones. How many pieces it has;
 * the index-th of them; how many a strip is cut into. None of it depends on the rows. */
static __device__ inline int count_pieces(const Experts &e) {
    const int across = strip_tiles(e), begin = (int)blockIdx.x * e.share,
              end = min(begin + e.share, e.hidden / GROUP_ROWS * across);
    return begin < end ? (end - 1) / across - begin / across + 1 : 0;
}
static __device__ inline Piece find_piece(const Experts &e, int index) {
    const int across = strip_tiles(e), begin = (int)blockIdx.x * e.share, strip = begin / across + index,
              first = max(begin - strip * across, 0), end = min(begin + e.share - strip * across, across);
    return {strip, first, end - first, (int)blockIdx.x - strip * across / e.share};
}
static int pieces_of_strip(const Experts &e, int strip) {
    const int across = strip_tiles(e);
    return (strip * across + across - 1) / e.share - strip * across / e.share + 1;
}

static __device__ void plan_shared(Plan *plan, const Experts &e) {
    const int block = (int)blockIdx.x;
    *plan = {};
    plan->units = divide_up(e.inter, teams_of(e, false) * TILE_ROWS / 2);
    plan->shared_works = shared_works(e);
    plan->works = plan->shared_works;
    plan->first_shared = share_begin(plan->shared_works * plan->units, block);
    if (!e.many) plan->gate = plan->shared = share_begin(plan->shared_works * plan->units, block + 1) - plan->first_shared;
    plan->strips = e.packed ? count_pieces(e) : divide_up(divide_up(e.hidden, TILE_ROWS) - block, (int)gridDim.x);
    plan->groups = divide_up(plan->strips, STRIPS);
}

/* The rows that the columns of a product have room for: digit d of row r is column d * rows + r. */
static __host__ __device__ constexpr int padded_rows(int count) { return count <= 2 ? count : PACKED_COLUMNS; }

/* What a unit of packed weights costs: a little more for each row that has room; and one of e4m3 is as long as two of e2m1. */
static __device__ inline int unit_cost(int rows) { return 13 + padded_rows(rows); }
static __device__ inline int shared_cost(const Experts &e) { return unit_cost(1) * (is_e4m3(e.dtype[1]) ? 2 : 1); }

/* Where a block's share of the routed units begins, in costs, if all blocks are to have as much to do. */
static __device__ inline int routed_begin(int shared, int cost, int block, const Experts &e) {
    const int blocks = (int)gridDim.x, each = shared_cost(e), all = cost + each * shared;
    if (all / blocks < each * divide_up(shared, blocks)) return share_begin(cost, block);
    return share_begin(all, block) - each * share_begin(shared, block);
}

/* The other way round than the shared expert's, so that the blocks with one more of these have one less of those. */
static __device__ void plan_all(Plan *plan, const Experts &e, int works) {
    const int block = (int)blockIdx.x, last = (int)gridDim.x - 1, shared = plan->shared_works * plan->units,
              routed = works * plan->units - shared;
    plan->works = works;
    plan->first_routed = shared + share_begin(routed, last - block);
    plan->gate = e.many ? divide_up(works * divide_up(plan->units, LONG_RUN) - block, (int)gridDim.x)
                        : plan->shared + shared + share_begin(routed, last - block + 1) - plan->first_routed;
    if (e.packed && !e.many) {                      /* as if all works had one row */
        const int cost = unit_cost(1), begin = routed_begin(shared, cost * routed, block, e) / cost,
                  end = routed_begin(shared, cost * routed, block + 1, e) / cost;
        plan->first_routed = shared + begin;
        plan->gate = plan->shared + end - begin;
    }
    plan->down = divide_up(plan->groups * works, teams_of(e, true));
}

/* The works of an expert: how many, from *first on, which is one of them beforehand. */
static __device__ inline int find_works(const ExpertMemory &m, int *first) {
    int n = 1;
    while (*first && m.works[*first - 1].chosen == m.works[*first].chosen) --*first;
    while (m.works[*first + n].chosen == m.works[*first].chosen) n++;
    return n;
}

/* From unit `index` of the list on, at most so many. Those of an expert come in runs, each for all of its works. */
static __device__ Span find_units(const Experts &e, const ExpertMemory &m, int index, int most) {
    const int units = m.plan->units, teams = teams_of(e, false);
    int first = index / units;
    const int n = find_works(m, &first), offset = index - first * units;
    if (n == 1) return {first, offset * teams + team_of(e, false), min(units - offset, most)};
    const int run = offset / (RUN * n) * RUN, rest = offset - run * n, here = min((int)RUN, units - run), work = rest / here,
              unit = rest - work * here;
    return {first + work, (run + unit) * teams + team_of(e, false), min(here - unit, most)};
}

/* A long run of the list. */
static __device__ Span find_run(const Experts &e, const ExpertMemory &m, int index) {
    const int runs = divide_up(m.plan->units, LONG_RUN);
    int first = index / runs;
    const int n = find_works(m, &first);
    const int offset = index - first * runs, run = offset / n, unit = run * LONG_RUN;
    return {first + offset - run * n, unit * teams_of(e, false) + team_of(e, false), min((int)LONG_RUN, m.plan->units - unit)};
}

/* A team's task in a round; no strips: none. */
static __device__ inline Span find_task(const Experts &e, const ExpertMemory &m, int round, int team) {
    const Plan &plan = *m.plan;
    const int task = round * teams_of(e, true) + team, work = plan.groups == 1 ? task : task / plan.groups,
              begin = (task - work * plan.groups) * STRIPS;
    return {work, (int)blockIdx.x + begin * (int)gridDim.x, work < plan.works ? min((int)STRIPS, plan.strips - begin) : 0};
}

/* What is at a place of the plan for this warp's team. Not inlined: what is seldom needed is out of the way of the rest. */
static __device__ __noinline__ Span find_span(const Experts &e, const ExpertMemory &m, int place) {
    const Plan &plan = *m.plan;
    if (place < plan.gate && e.many) return find_run(e, m, (int)blockIdx.x + place * (int)gridDim.x);
    if (place < plan.shared) return find_units(e, m, plan.first_shared + place, plan.shared - place);
    if (place < plan.gate) return find_units(e, m, plan.first_routed + place - plan.shared, plan.gate - place);
    return find_task(e, m, place - plan.gate, team_of(e, true));
}

/* What a work costs: to bring its rows to shared memory, about as much as two thirds of a unit, and each unit. An expert's only
 * one does so once, of several each does again and again. */
struct WorkCost { int begin, unit; };

static __device__ inline WorkCost work_cost(const ExpertMemory &m, int work) {
    const int chosen = m.works[work].chosen, cost = unit_cost(count_of(m, work));
    const bool alone = (!work || m.works[work - 1].chosen != chosen) && m.works[work + 1].chosen != chosen;
    return alone ? WorkCost{10, cost} : WorkCost{0, cost + 1};
}

/* What plan_all() says of routed units, where works have several rows, by one warp: it adds up what they cost and finds the units
 * at which a block's share begins and ends. */
static __device__ void plan_routed(Plan *plan, const Experts &e, const ExpertMemory &m) {
    const int works = plan->works, units = plan->units, lane = lane_id(), each = divide_up(works - plan->shared_works, 32),
              begin = min(plan->shared_works + lane * each, works), end = min(begin + each, works);
    const auto whole = [&](const WorkCost &cost) { return cost.begin + cost.unit * units; };
    int own = 0, unit[2];
    for (int work = begin; work < end; work++) own += whole(work_cost(m, work));
    const int until = warp_prefix_sum(own), all = __shfl_sync(~0u, until, 31);
#pragma unroll
    for (int edge = 0; edge < 2; edge++) {
        int left = routed_begin(plan->shared_works * units, all, (int)blockIdx.x + edge, e) - (until - own), at = begin * units;
        const bool here = left >= 0 && left < own;
        for (int work = begin; here && work < end; work++) {
            const WorkCost cost = work_cost(m, work);
            at = work * units + min(max(left - cost.begin, 0) / cost.unit, units);
            if (left < whole(cost)) break;
            left -= whole(cost);
        }
        const unsigned found = __ballot_sync(~0u, here);
        unit[edge] = found ? __shfl_sync(~0u, at, __ffs((int)found) - 1) : works * units;
    }
    if (lane > 0) return;
    plan->first_routed = unit[0];
    plan->gate = plan->shared + unit[1] - unit[0];
}

/* From strip to strip of a span. */
static __device__ inline int strip_step(const Experts &e, bool down) { return down ? (int)gridDim.x : teams_of(e, false); }

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
    const uint64_t until = warp_prefix_sum(own);
    sync_warps();                                /* the sums before these have been read */
    if (lane_id() == 31) of_warp[worker_warp()] = until;
    sync_warps();
    uint64_t before = until - own;
    *sum = 0;
    for (int w = 0; w < EXPERT_WARPS; w++) {
        if (w == worker_warp()) before += *sum;
        *sum += of_warp[w];
    }
    return before;
}

/* The expert of a pick as the lists number them: the shared one first. */
static __device__ inline int listed_expert(const Experts &e, int pick) {
    return is_shared(e, pick) ? 0 : e.picks[row_of(pick) * e.per_token + number_of(pick)] + (e.slots > e.per_token);
}

/* An expert and its place among those that were chosen, among the works and among the picks. */
static __device__ void put_expert(const Experts &e, const ExpertMemory &m, int expert, int chosen, int work, int begin,
                                  int count) {
    const int shared = e.slots > e.per_token, id = expert - shared;
    if (id < 0) m.chosen[chosen] = chosen_matrices(e.shared[GATE], e.shared[UP], e.shared[DOWN]);
    else m.chosen[chosen] = chosen_matrices(e.table[GATE][id], e.table[UP][id], e.table[DOWN][id]);
#pragma unroll 1
    for (int i = 0; i < count; i += e.columns)
        m.works[work++] = {.chosen = (uint16_t)chosen, .begin = (uint16_t)(begin + i)};
}

static __device__ inline bool lists_row(const Experts &e) { return e.n_rows == 1 && e.slots <= 32; }

/* The works where there is one row, by one warp: its picks in the order of the experts. */
static __device__ void list_row(const Experts &e, const ExpertMemory &m) {
    const int pick = min(lane_id(), e.slots - 1), expert = listed_expert(e, pick);
    int place = 0;
    for (int other = 0; other < e.slots; other++) place += __shfl_sync(~0u, expert, other) < expert;
    if (lane_id() < e.slots) {
        put_expert(e, m, expert, place, place, place, 1);
        m.order[place] = pick;
    }
    if (lane_id() == 0) m.works[e.slots] = {.chosen = NOBODY, .begin = (uint16_t)e.slots};
}

/* Who chose whom, which every block finds out for itself: a mask of rows for each expert, sums over the experts, and the picks
 * dealt out, by row. Returns the number of works. */
static __device__ int list_works(const Experts &e, const ExpertMemory &m) {
    const int experts = e.experts + e.slots - e.per_token, picks = e.n_rows * e.slots, words = divide_up(e.n_rows, 32);
    uint32_t *mask = (uint32_t *)m.x;               /* [experts, words], zeros at first, and then [experts] */
    uint16_t *begin = (uint16_t *)(mask + experts * words);
    int own = 0;                                    /* of this thread's last pick, mostly its only one */
#pragma unroll 1
    for (int i = worker(); i < picks; i += EXPERT_THREADS) {
        const int row = i / e.slots;
        own = listed_expert(e, row << 16 | i % e.slots);
        atomicOr(&mask[own * words + row / 32], 1u << row % 32);
    }
    sync_warps();
    uint64_t all = 0, part;                         /* chosen experts, works << 20, picks << 40 */
#pragma unroll 1
    for (int base = 0; base < experts; base += EXPERT_THREADS, all += part) {
        const int expert = base + worker();
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
    if (worker() == 0) m.works[works] = {.chosen = NOBODY, .begin = (uint16_t)picks};
    sync_warps();
#pragma unroll 1
    for (int i = worker(); i < picks; i += EXPERT_THREADS) {
        const int row = i / e.slots, pick = row << 16 | i % e.slots,
                  expert = picks <= EXPERT_THREADS ? own : listed_expert(e, pick);
        int place = begin[expert] + __popc(mask[expert * words + row / 32] & ((1u << row % 32) - 1));
#pragma unroll 1
        for (int w = 0; w < row / 32; w++) place += __popc(mask[expert * words + w]);
        m.order[place] = pick;
    }
    sync_warps();
    return works;
}

/* ---- weights on their way
 *
 * A tile lies in shared memory row by row. Of row g, the 16 bytes that belong in place i lie in place i ^ swizzled(g), so that
 * eight neighbouring threads always meet different banks: when they have four places each of two rows, and when they have one
 * place of eight rows.
 */

static __device__ inline int swizzled(int row) { return row % 2 * 4 + row / 2 % 4; }

static __device__ inline void copy_scales_to_shared(uint8_t *to, const uint8_t *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(shared_address(to)), "l"(from) : "memory");
}

/* The place of the tile behind the one at `slot`, in a warp's part of the ring. */
static __device__ inline int next_slot(const Experts &e, int slot) {
    return slot == (e.stages - 1) * e.slot_bytes ? 0 : slot + e.slot_bytes;
}

/* What a warp reads, tile by tile, `stages` ahead of what it multiplies. */
struct Stream {
    int place;                  /* of the next span in the plan */
    bool down;
    int strip, strips;          /* the one being read; those of the span that follow it */
    int left, bytes, step;      /* of its rows: from the next tile on; from this warp's first tile on; from tile to tile */
    const uint8_t *row[2];      /* this lane's 16 bytes of the next tile, in rows lane / 8 and lane / 8 + 8 */
    int apart, jump;            /* from there to the rows four further on; from a strip's end to the next one */
    const uint8_t *scale, *first_scale;             /* this lane's four bytes of scales: of the next tile, of strip 0 */
    int scale_step, scale_row, scale_shift;         /* from tile to tile, and for each 2^shift rows of weights */
    int scale_lanes;            /* that have any */
};

/* Rows of gate and up come in eights, as they are down's columns, and so do those of down. */
static __device__ inline void open_span(Stream *stream, const Experts &e, const ExpertMemory &m, int work, bool down) {
    const Chosen &chosen = m.chosen[m.works[work].chosen];
    const DType D = type_of(e, m, work);
    const int lane = lane_id(), high = down ? TILE_ROWS : TILE_ROWS / 2, cols = down ? e.inter : e.hidden;
    const int segments = segments_of(e, down), segment = segment_of(e, down), begin = segment * TILE_BYTES;
    const uint32_t stride = (uint32_t)weight_bytes(D, (size_t)cols);
    stream->bytes = (int)stride - begin;
    stream->step = segments * TILE_BYTES;
    stream->apart = 4 * (int)stride;
    stream->jump = strip_step(e, down) * high * (int)stride
                   - ((count_tiles(D, cols) - segment + segments - 1) >> bits_of(e, down)) * stream->step;
    const size_t at = (size_t)(stream->strip * high + lane / 8) * stride + (size_t)(begin + lane % 8 * 16);
    stream->row[0] = chosen.data[down ? DOWN : GATE] + at;
    stream->row[1] = chosen.data[down ? DOWN : UP] + at + (down ? 8 * stride : 0);
    const bool block = is_e4m3(D), small = D == BLOCKS_OF_32, upper = small ? lane < 4 : block ? lane == 0 : lane < TILE_ROWS;
    const int each = small ? 16 : block ? 4 : 8;
    stream->scale_step = segments * each;
    stream->scale_row = count_tiles(D, cols) * each;
    stream->scale_shift = small ? power_of(SMALL_BLOCK) : block ? power_of(SCALE_BLOCK) : 0;
    stream->scale_lanes = small ? 8 : block ? 2 : D == DTYPE_F4_E2M1 ? 32 : 0;
    stream->first_scale = (const uint8_t *)chosen.scale[down ? DOWN : upper ? GATE : UP] + segment * each
                          + (small ? lane % 4 * 4
                             : block ? 0 : (lane / 2 % 8 + (down && !upper ? 8 : 0)) * stream->scale_row + lane % 2 * 4);
}

/* The next strip that this warp has. False: there is none that is known. */
static __device__ inline bool next_strip(Stream *stream, const Experts &e, const ExpertMemory &m) {
    const Plan &plan = *m.plan;
    if (stream->strips) {
        stream->strips--;
        stream->strip += strip_step(e, stream->down);
        stream->row[0] += stream->jump, stream->row[1] += stream->jump;
    } else {
        Span span = {};
        while (!span.strips) {
            if (stream->place >= plan.gate + plan.down) return false;
            span = find_span(e, m, stream->place);
            stream->down = stream->place >= plan.gate;
            stream->place += stream->down || e.many ? 1 : span.strips;
        }
        stream->strip = span.strip, stream->strips = span.strips - 1;
        open_span(stream, e, m, span.work, stream->down);
    }
    const int first = stream->strip * (stream->down ? TILE_ROWS : TILE_ROWS / 2);
    if (stream->down && first + 8 >= e.hidden) stream->row[1] = stream->row[0];     /* there are no more rows: these again */
    stream->scale = stream->first_scale + (first >> stream->scale_shift) * stream->scale_row;
    stream->left = stream->down || first < e.inter ? stream->bytes : 0;
    return true;
}

/* Starts to read this warp's next tile to that place of the ring. False: there is none that is known. */
static __device__ inline bool fetch_tile(Stream *stream, const Experts &e, const ExpertMemory &m, int place) {
    while (stream->left <= 0)
        if (!next_strip(stream, e, m)) return false;
    const int lane = lane_id(), own = lane / 8 * TILE_BYTES + (lane % 8 ^ swizzled(lane / 8)) * 16;
    uint8_t *slot = m.ring + place;
    const bool there = lane % 8 * 16 < stream->left;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        start_copy_to_shared(slot + own + i * 8 * TILE_BYTES, stream->row[i], there);
        start_copy_to_shared(slot + (own ^ 2 * 16) + (i * 8 + 4) * TILE_BYTES, stream->row[i] + stream->apart, there);
        stream->row[i] += stream->step;
    }
    if (lane < stream->scale_lanes) copy_scales_to_shared(slot + TILE_ROWS * TILE_BYTES + lane * 4, stream->scale);
    stream->scale += stream->scale_step;
    stream->left -= stream->step;
    return true;
}

/* ---- x as the tensor cores want it
 *
 * bf16 weights, and e4m3 with the scales of blocks of 32 in them, meet numbers of bf16, others numbers of f16: each stretch of a
 * row that meets one tile is scaled by a power of two, which makes its largest value about 2^14, and sums are scaled back.
 */

static __host__ __device__ constexpr bool meets_bf16(DType D) { return D == DTYPE_BF16 || D == BLOCKS_OF_32; }

/* The eights of a row in a tile are dealt out to four threads, as many after each other as 16 bytes of weights hold of e4m3, and
 * one at a time of other types. Where is that one, the i-th of thread t: i * 4 + t. */
static __device__ inline int eight_place(DType D, int eight) {
    return is_e4m3(D) ? eight / 8 * 8 + eight % 2 * 4 + eight / 2 % 4 : eight;
}

/* Eight values, which have been rounded to pairs of neighbours, in the order in which halves_of_e2m1 gives the weights. */
static __device__ inline uint4 order_for_e2m1(const uint4 &v) {
    return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                      __byte_perm(v.z, v.w, 0x7632));
}

/* A term of eight values, which become what it leaves. */
template <DType D> static __device__ inline uint4 take_term(float v[8]) {
    const uint4 term = narrow_eight<D>(v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = remainder_of<D>(v[i]);
    return term;
}

/* A row in shared memory: for each tile first the upper terms, then the lower ones; and then the scales that undo the tiles'.
 * Where these begin, and bytes of a row, such that two threads in neighbouring rows meet different banks. */
static __host__ __device__ inline int x_scales(const Experts &e, int cols) {
    return divide_up(cols, X_BLOCK) * X_BLOCK * 2 * max(e.terms[0], e.terms[1]);
}
static __host__ __device__ inline int x_stride(const Experts &e, int cols) {
    return (x_scales(e, cols) + divide_up(cols, X_BLOCK) * X_BLOCK / 64 * (int)sizeof(float) + 127) / 128 * 128 + STAGED_PAD;
}

/* A power of two by which a value of that size must be divided to be from 2^top on and below twice that. */
static __device__ inline float scale_below(float most, int top) {
    return __uint_as_float((254 - min(254 + (uint32_t)top - (__float_as_uint(most) >> 23), 253u)) << 23);
}
static __device__ inline float inverse_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

/* v becomes its scale times v, with the lanes of one tile, whose largest value then is from 2^top on and below twice that.
 * Returns what undoes that. */
static __device__ inline float scale_values(float v[8], int lanes, int top) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
    for (int distance = 1; distance < lanes; distance *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
    const float undo = scale_below(most, top);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= inverse_power(undo);
    return undo;
}

/* Eight columns of a pick's row of x, or of gated. */
static __device__ inline void load_columns(float v[8], const Experts &e, int pick, bool down, int column) {
    if (!down) return load_eight(v, e.x + (size_t)row_of(pick) * (size_t)e.hidden + column, e.hidden - column, e.aligned);
    float4 a = {}, b = {};
    if (column < e.inter) {
        const float4 *from = (const float4 *)(e.gated + gated_row(e, pick) + column);
        a = __ldcg(from), b = __ldcg(from + 1);
    }
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

/* The rows of so many picks, from order[begin] on, for the whole block: of x, or of gated. A warp takes X_BLOCK columns. */
static __device__ void stage_rows(const Experts &e, const ExpertMemory &m, uint8_t *to, bool down, int begin, int count) {
    const int cols = down ? e.inter : e.hidden, blocks = divide_up(cols, X_BLOCK), stride = x_stride(e, cols), lane = lane_id();
    int slot = 0, block = worker_warp();
#pragma unroll 2
    for (; true; block += EXPERT_WARPS) {
        while (block >= blocks) block -= blocks, slot++;
        if (slot >= count) break;
        const int pick = m.order[begin + slot], eight = block * (X_BLOCK / 8) + lane;
        const DType D = e.dtype[is_shared(e, pick)];
        const int terms = e.terms[is_shared(e, pick)], bits = part_bits(D) + 2, tile = eight >> bits;
        float v[8];
        load_columns(v, e, pick, down, eight * 8);
        if (!meets_bf16(D))
            *(float *)(to + slot * stride + x_scales(e, cols) + tile * (int)sizeof(float)) = scale_values(v, 1 << bits, 14);
        const int place = (tile * terms << bits) + eight_place(D, eight & ((1 << bits) - 1));
        for (int term = 0; term < terms; term++) {
            const uint4 eight_values = D == DTYPE_BF16   ? take_term<DTYPE_BF16>(v)
                                       : D == BLOCKS_OF_32 ? take_term<BLOCKS_OF_32>(v) : take_term<DTYPE_F16>(v);
            *(uint4 *)(to + slot * stride + (place + (term << bits)) * 16) =
                D == DTYPE_F4_E2M1 ? order_for_e2m1(eight_values) : eight_values;
        }
    }
}

/* ---- products */

/* A tile as a thread has it, rows g = lane / 4 and g + 8, with their scales. Of e2m1: four bytes of each 16, in turns from either
 * row. Of others: twice 16 bytes, each from either row. */
struct Tile {
    uint32_t word[16];
    uint2 scale[2];             /* e4m3: the first has the floats of both rows. BLOCKS_OF_32: each the factors of its 16 bytes.
                                 * e2m1: each its exponents */
};

/* Four bytes of each 16. */
static __device__ inline void load_words(Tile *tile, const uint8_t *slot) {
    const int lane = lane_id();
    const uint32_t row = shared_address(slot) + lane % 8 * TILE_BYTES + lane / 8 % 2 * 8 * TILE_BYTES,
                   place = (lane / 16 ^ swizzled(lane % 8)) * 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(tile->word[4 * i]), "=r"(tile->word[4 * i + 1]), "=r"(tile->word[4 * i + 2]),
                       "=r"(tile->word[4 * i + 3]) : "r"(row + (place ^ i * 32)) : "memory");
}

static __device__ inline void load_tile(Tile *tile, const uint8_t *slot, DType D) {
    const int lane = lane_id(), g = lane / 4;
    const uint8_t *scales = slot + TILE_ROWS * TILE_BYTES;
    if (D == DTYPE_F4_E2M1) {
        load_words(tile, slot);
        for (int i = 0; i < 2; i++) tile->scale[i] = ((const uint2 *)scales)[g + 8 * i];
    } else {
        if (D == DTYPE_F8_E4M3) tile->scale[0] = *(const uint2 *)scales;
        const float *blocks = (const float *)scales + lane % 4 / 2;
        for (int i = 0; i < 2 && D == BLOCKS_OF_32; i++)
            tile->scale[i] = make_uint2(e4m3_factor(blocks[4 * i]), e4m3_factor(blocks[4 * i + 2]));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int place = (lane % 4 ^ swizzled(g)) * 16 ^ i / 2 * 64;
            const uint4 piece = *(const uint4 *)(slot + (g + i % 2 * 8) * TILE_BYTES + place);
            memcpy(tile->word + 4 * i, &piece, 16);
        }
    }
}

/* Four e4m3 weights as pairs of f16. */
static __device__ inline uint2 halves_of_e4m3(uint32_t four) {
    uint2 pairs;
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}" : "=r"(pairs.x), "=r"(pairs.y) : "r"(four));
#else
    const __half2_raw low = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)four, __NV_E4M3),
                      high = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(four >> 16), __NV_E4M3);
    pairs = make_uint2(low.x | (uint32_t)low.y << 16, high.x | (uint32_t)high.y << 16);
#endif
    return pairs;
}

/* The bits of an e2m1 value, in their places among those of e4m3, are that value by 2^6 too small. */
static constexpr float E2M1_REPAIR = 0x1p6f;

/* Eight e2m1 weights as e4m3: the even ones, the odd ones. */
static __device__ inline uint2 e4m3_of_e2m1(uint32_t eight) {
    return make_uint2((eight << 4 & 0x80808080) | (eight << 2 & 0x1c1c1c1c), (eight & 0x80808080) | (eight >> 2 & 0x1c1c1c1c));
}

/* As f16: 0 and 2, 4 and 6, 1 and 3, 5 and 7. */
static __device__ inline uint4 halves_of_e2m1(uint32_t eight) {
    const uint2 words = e4m3_of_e2m1(eight), even = halves_of_e4m3(words.x), odd = halves_of_e4m3(words.y);
    return make_uint4(even.x, even.y, odd.x, odd.y);
}

/* The part-th eight weights of a thread's upper (0) or lower (1) row as four pairs of the type that x has. */
template <DType D> static __device__ inline uint4 widen_words(const Tile &tile, int half, int part) {
    if constexpr (D == DTYPE_F4_E2M1) return halves_of_e2m1(tile.word[2 * part + half]);
    else if constexpr (D == DTYPE_F8_E4M3) {
        const uint32_t *words = tile.word + (part / 2 * 2 + half) * 4 + part % 2 * 2;
        const uint2 low = halves_of_e4m3(words[0]), high = halves_of_e4m3(words[1]);
        return make_uint4(low.x, low.y, high.x, high.y);
    } else if constexpr (D == BLOCKS_OF_32) {
        const uint32_t *words = tile.word + (part / 2 * 2 + half) * 4 + part % 2 * 2,
                       factor = part < 2 ? tile.scale[half].x : tile.scale[half].y;
        const uint2 low = widen_four(words[0], factor), high = widen_four(words[1], factor);
        return make_uint4(low.x, low.y, high.x, high.y);
    } else {
        const uint32_t *words = tile.word + (part * 2 + half) * 4;
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* The scale of a block of e2m1 weights, of the exponents of four: 2^(e - 127). 2^128 is infinite, and shows; 2^-127 is 0. */
static __device__ inline float e2m1_scale(uint32_t exponents, int i) {
    return __uint_as_float((i == 3 ? exponents >> 1 : exponents << (23 - 8 * i)) & 0x7f800000);
}

/* total += a tile times x, of which the lower terms, if there are any, follow the upper ones. undo: what undoes the scales of x
 * in columns lane % 4 * 2 and the next. */
template <DType D, int TERMS>
static __device__ inline void multiply_tile(float total[4], const Tile &tile, const uint8_t *x, const float undo[2]) {
    constexpr int parts = 1 << part_bits(D);
    constexpr DType with = meets_bf16(D) ? DTYPE_BF16 : DTYPE_F16;
    float sum[4] = {}, block[4] = {};
    float *into = D == DTYPE_BF16 ? total : D == DTYPE_F4_E2M1 ? block : sum;
#pragma unroll
    for (int part = 0; part < parts; part++) {
        const uint4 a = widen_words<D>(tile, 0, part), c = widen_words<D>(tile, 1, part);
#pragma unroll
        for (int term = 0; term < TERMS; term++) {
            const uint4 b = *(const uint4 *)(x + (term * parts + part) * 64);
            multiply_fragment<with>(into, a.x, c.x, a.y, c.y, b.x, b.y);
            multiply_fragment<with>(into, a.z, c.z, a.w, c.w, b.z, b.w);
        }
        if (D == DTYPE_F4_E2M1)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint2 &exponents = tile.scale[i / 2];
                sum[i] = fmaf(e2m1_scale(part < 4 ? exponents.x : exponents.y, part % 4), block[i], sum[i]);
                block[i] = 0;
            }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float scale = D == DTYPE_F8_E4M3 ? __uint_as_float(i < 2 ? tile.scale[0].x : tile.scale[0].y)
                                               : D == DTYPE_F4_E2M1 ? E2M1_REPAIR : 1;
        if (D == BLOCKS_OF_32) total[i] = fmaf(undo_shift(D), sum[i], total[i]);
        else if (D != DTYPE_BF16) total[i] = fmaf(scale * undo[i % 2], sum[i], total[i]);
    }
}

/* This warp's segment of one strip times the rows of one work, which are in shared memory. As soon as a tile is in registers, the
 * stream's next one takes its place. slot: where its first one lies. */
static __device__ inline void multiply_segment(float total[4], const uint8_t *rows, Stream *stream, int *slot, const Experts &e,
                                               const ExpertMemory &m, bool down, int work) {
    const DType D = type_of(e, m, work);
    const int terms = terms_of(e, m, work), cols = down ? e.inter : e.hidden, end = count_tiles(D, cols), stages = e.stages,
              segments = segments_of(e, down), last = count_of(m, work) - 1, lane = lane_id(), stride = x_stride(e, cols);
    const uint8_t *x = rows + min(lane / 4, last) * stride + lane % 4 * 16, *undo_first = rows + x_scales(e, cols),
                  *undo_second = undo_first + min(lane % 4 * 2 + 1, last) * stride;
    undo_first += min(lane % 4 * 2, last) * stride;
#pragma unroll 1
    for (int i = segment_of(e, down); i < end; i += segments) {
        Tile tile;
        wait_for_copies(stages - 1);
        __syncwarp();
        load_tile(&tile, m.ring + *slot, D);
        __syncwarp();
        fetch_tile(stream, e, m, *slot);
        commit_copies();
        const uint8_t *of_tile = x + (i * terms << (part_bits(D) + 6));
        const float undo[2] = {((const float *)undo_first)[i], ((const float *)undo_second)[i]};    /* of bf16: anything */
        if (D == BLOCKS_OF_32 && terms == 1) multiply_tile<BLOCKS_OF_32, 1>(total, tile, of_tile, undo);
        else if (D == BLOCKS_OF_32) multiply_tile<BLOCKS_OF_32, 2>(total, tile, of_tile, undo);
        else
        if (D == DTYPE_F8_E4M3 && terms == 1) multiply_tile<DTYPE_F8_E4M3, 1>(total, tile, of_tile, undo);
        else if (D == DTYPE_F8_E4M3) multiply_tile<DTYPE_F8_E4M3, 2>(total, tile, of_tile, undo);
        else if (D == DTYPE_F4_E2M1) multiply_tile<DTYPE_F4_E2M1, 1>(total, tile, of_tile, undo);
        else if (D == DTYPE_BF16) multiply_tile<DTYPE_BF16, 2>(total, tile, of_tile, undo);
        else multiply_tile<DTYPE_F16, 2>(total, tile, of_tile, undo);
        *slot = next_slot(e, *slot);
    }
}

/* The first `count` of EXACT_STEP neighbouring stored weights, and zeros. */
template <DType D> static __device__ inline void load_weights(float (&w)[EXACT_STEP], const uint8_t *data, int at, int count) {
#pragma unroll
    for (int i = 0; i < EXACT_STEP; i++) w[i] = i < count ? load_stored(data, (size_t)(at + i), D) : 0;
}

static __device__ inline void load_weights(float (&w)[EXACT_STEP], const uint8_t *data, int at, int count, DType stored) {
    if (stored == DTYPE_F4_E2M1) load_weights<DTYPE_F4_E2M1>(w, data, at, count);
    else if (stored == DTYPE_F8_E4M3) load_weights<DTYPE_F8_E4M3>(w, data, at, count);
    else if (stored == DTYPE_BF16) load_weights<DTYPE_BF16>(w, data, at, count);
    else if (stored == DTYPE_F16) load_weights<DTYPE_F16>(w, data, at, count);
    else load_weights<DTYPE_F32>(w, data, at, count);
}

/* The same in plain f32, for weights of any type at any address: a lane has one row and half of the columns of x. */
static __device__ inline void multiply_exactly(float total[4], const Experts &e, const ExpertMemory &m, bool down, int work,
                                               int strip) {
    const int cols = down ? e.inter : e.hidden, rows = down ? e.hidden : e.inter, lane = lane_id(),
              high = down ? TILE_ROWS : TILE_ROWS / 2, order = m.works[work].begin, last = count_of(m, work) - 1,
              which = down ? DOWN : lane % TILE_ROWS < 8 ? GATE : UP;
    const Matrix &any = work < m.plan->shared_works ? e.shared[which] : e.table[which][0];
    const DType stored = any.dtype;
    const int block = stored == DTYPE_F4_E2M1 ? EXPONENT_BLOCK : scale_block(&any);
    const Chosen &chosen = m.chosen[m.works[work].chosen];
    const int row = min(strip * high + lane % high, rows - 1);
    const uint8_t *data = chosen.data[which] + (size_t)row * weight_bytes(stored, (size_t)cols);
    const float *scale = (const float *)chosen.scale[which] + row / block * divide_up(cols, block), *x[4];
    const uint8_t *exponents = (const uint8_t *)chosen.scale[which] + row * divide_up(cols, EXPONENT_BLOCK);
    for (int c = 0; c < 4; c++) {
        const int pick = m.order[order + min(lane / 16 * 4 + c, last)];
        x[c] = down ? e.gated + gated_row(e, pick) : e.x + (size_t)row_of(pick) * (size_t)e.hidden;
    }
    for (int begin = segment_of(e, down) * EXACT_SEGMENT; begin < cols; begin += segments_of(e, down) * EXACT_SEGMENT)
#pragma unroll 1
        for (int k = begin; k < min(begin + EXACT_SEGMENT, cols); k += EXACT_STEP) {
            float w[EXACT_STEP], v[4][EXACT_STEP];
            const float of_block = stored == DTYPE_F8_E4M3   ? scale[k / block]
                                   : stored == DTYPE_F4_E2M1 ? widen_e8m0(exponents[k / block]) : 1;
            load_weights(w, data, k, cols - k, stored);
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int i = 0; i < EXACT_STEP; i++) v[c][i] = k + i < cols ? __ldcg(x[c] + k + i) : 0;
#pragma unroll
            for (int i = 0; i < EXACT_STEP; i++)
#pragma unroll
                for (int c = 0; c < 4; c++) total[c] = fmaf(w[i] * of_block, v[c][i], total[c]);
        }
}

/* ---- packed weights (sm_90a): e2m1, and a shared expert of e4m3 beside it, as e4m3 on the tensor cores of a warpgroup
 *
 * The 16 rows of each of its four warps, which have strips of the same work and columns, are the operand in registers; e2m1 only
 * has to be moved into e4m3's places. The other operand are three digits of x, each a column: x is scaled by a power of two for
 * each tile and row, so that its largest value is below 16, and is the sum of whole numbers of -16 to 16, which e4m3 has, that of
 * the second times 2^-5 and of the third times 2^-10: right to 2^-15 of the largest value. Sums of digits times e2m1 over 32
 * columns, which have one scale, are whole numbers of at most 13 bits, exact however the tensor cores add, and so the same
 * whatever stands in the other columns. They are scaled and added up in f32.
 */

enum { DIGITS = 3, DIGIT_BITS = 5 };

/* Of a work's rows, X_BLOCK columns stand together in shared memory, as many as a tile of e2m1 has: first their digits, then the
 * scales that undo those of each row. Bytes from 16 columns to the next, of which 16 only spread them over the banks; up to the
 * scales; of all. */
static __host__ __device__ constexpr int part_bytes(int rows) { return (DIGITS * rows + 1) * 16; }
static __host__ __device__ constexpr int digit_bytes(int rows) { return X_BLOCK / 16 * part_bytes(rows); }
static __host__ __device__ constexpr int scale_place(int row, int column) {
    return (row * X_BLOCK + column) / SCALED_TOGETHER * (int)sizeof(float);
}
static __host__ __device__ constexpr int block_bytes(int rows) { return digit_bytes(rows) + scale_place(rows, 0); }

/* Barriers of the ring, for each of its stages and segments: the tiles have come, and the rows of gated beside them; the four
 * warps have done with both. */
struct PackedStages { uint64_t filled[MAX_STAGES][1 << PACKED_SEGMENT_BITS], used[MAX_STAGES][1 << PACKED_SEGMENT_BITS]; };

/* Where in a row of gated a digit of a column is: of each X_BLOCK columns the first digits, then the second ones. Behind all of
 * them stand the scales. */
static __device__ inline int digit_place(int column, int digit) {
    return (column / X_BLOCK * DIGITS + digit) * X_BLOCK + column % X_BLOCK;
}

/* Of the four whose warps multiply together. */
static __device__ inline int warpgroup_id() { return worker() / 128; }

/* The next digit of a value, the nearest whole number; it becomes what that leaves. */
static __device__ inline float take_digit(float *v) {
    const float digit = *v + 0x1.8p23f - 0x1.8p23f;
    *v = (*v - digit) * (1 << DIGIT_BITS);
    return digit;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* The same of eight values: four even ones and four odd ones. */
static __device__ inline uint2 take_digits(float v[8]) {
    float digit[8];
#pragma unroll
    for (int i = 0; i < 8; i++) digit[i] = take_digit(v + i);
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        pair[i] = __nv_cvt_float2_to_fp8x2(make_float2(digit[i % 2 * 4 + i / 2], digit[i % 2 * 4 + i / 2 + 2]), __NV_SATFINITE,
                                           __NV_E4M3);
    return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}

/* So many picks' rows of x as digits, by the first `warps` of a block. Each takes X_BLOCK columns of a row, and two of these at a
 * time. */
static __device__ void stage_terms(const Experts &e, uint8_t *to, const int *picks, int count, int warps) {
    const int blocks = e.hidden / X_BLOCK, lane = lane_id(), rows = padded_rows(count);
#pragma unroll 1
    for (int task = worker_warp(); task < count * blocks; task += 2 * warps) {
        float v[2][8];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = min(task + i * warps, count * blocks - 1), row = t / blocks;
            load_eight(v[i], e.x + (size_t)row_of(picks[row]) * (size_t)e.hidden + (t - row * blocks) * X_BLOCK + lane * 8,
                       8, e.aligned);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = task + i * warps, row = t / blocks, block = t - row * blocks;
            if (t >= count * blocks) break;
            uint8_t *of_block = to + block * block_bytes(rows),
                    *at = of_block + lane / 4 * 2 * part_bytes(rows) + row * 16 + lane % 4 * 4;
            *(float *)(of_block + digit_bytes(rows) + scale_place(row, lane * 8)) =
                scale_values(v[i], SCALED_TOGETHER / 8, DIGIT_BITS - 2);
#pragma unroll
            for (int digit = 0; digit < DIGITS; digit++, at += rows * 16) {
                const uint2 eight = take_digits(v[i]);
                *(uint32_t *)at = eight.x;
                *(uint32_t *)(at + part_bytes(rows)) = eight.y;
            }
        }
    }
    show_to_products();
}

/* The scales of a tile of e2m1, as floats to where its weights were, which this warp has read: for each row eight. For a single
 * row of x they take what undoes its scales along. A lane widens four. */
template <int ROWS> static __device__ inline void widen_scales(uint8_t *slot, const uint8_t *undo) {
    const int lane = lane_id();
    const uint32_t exponents = ((const uint32_t *)(slot + TILE_ROWS * TILE_BYTES))[lane];
    const float4 of_x = ROWS == 1 ? ((const float4 *)undo)[lane % 2] : make_float4(1, 1, 1, 1);
    __syncwarp();
    ((float4 *)slot)[lane] = make_float4(e2m1_scale(exponents, 0) * of_x.x, e2m1_scale(exponents, 1) * of_x.y,
                                         e2m1_scale(exponents, 2) * of_x.z, e2m1_scale(exponents, 3) * of_x.w);
    __syncwarp();
}

/* Of each 32 bytes of either row eight. */
static __device__ inline void load_eights(Tile *tile, const uint8_t *slot) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int place = (i / 2 * 2 + t / 2 ^ swizzled(g)) * 16 + t % 2 * 8;
        const uint2 eight = *(const uint2 *)(slot + (g + i % 2 * 8) * TILE_BYTES + place);
        tile->word[2 * i] = eight.x, tile->word[2 * i + 1] = eight.y;
    }
}

/* sum = A B: 64 rows of weights, 32 columns, COLUMNS digits. */
template <int COLUMNS>
static __device__ inline void multiply_digits(float sum[COLUMNS / 8][4], const uint32_t a[4], uint32_t b) {
#define DIGIT_SUMS(i) "=f"(sum[i][0]), "=f"(sum[i][1]), "=f"(sum[i][2]), "=f"(sum[i][3])
#define DIGIT_INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(128 >> 4)
    static_assert(COLUMNS == 8 || COLUMNS == 16);
    if constexpr (COLUMNS == 8)
        asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%8, %9};\n"
                     "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, b, 0, 1, 1;\n}"
                     : DIGIT_SUMS(0) : DIGIT_INPUTS);
    else
        asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%12, %13};\n"
                     "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
                     "{%8, %9, %10, %11}, b, 0, 1, 1;\n}" : DIGIT_SUMS(0), DIGIT_SUMS(1) : DIGIT_INPUTS);
#undef DIGIT_SUMS
#undef DIGIT_INPUTS
}

/* The scales of four stretches of 32 columns, of a thread's upper and of its lower row; `four`: which four of a tile. That of a
 * block of 128 is multiplied by at the end. */
template <DType D> static __device__ inline void load_scales(float of_rows[2][4], const uint8_t *scales, int four) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4 scale = D == DTYPE_F4_E2M1   ? ((const float4 *)scales)[(lane_id() / 4 + 8 * i) * 2 + four]
                             : D == BLOCKS_OF_32 ? ((const float4 *)scales)[i] : make_float4(1, 1, 1, 1);
        of_rows[i][0] = scale.x, of_rows[i][1] = scale.y, of_rows[i][2] = scale.z, of_rows[i][3] = scale.w;
    }
}

/* total += a tile times digits. undo: what undoes the scales of x in the row of a thread's first column, before the next one's.
 * scales: of each row of e2m1 (see widen_scales()), of BLOCKS_OF_32 of the upper rows and of the lower ones. */
template <DType D, int ROWS>
static __device__ inline void multiply_packed_tile(float total[][4], const Tile &tile, const uint8_t *digits, const uint8_t *undo,
                                                   const uint8_t *scales) {
    constexpr int columns = (DIGITS * ROWS + 7) / 8 * 8, sums = columns / 8, stretches = D == DTYPE_F4_E2M1 ? 8 : 4,
                  together = sums == 1 ? 4 : 2;
    /* A matrix descriptor has addresses by 16. One lane's, so that the compiler sees that all have the same. */
    const uint32_t b = __shfl_sync(~0u, shared_address(digits) >> 4, 0) + ((uint32_t)part_bytes(ROWS) >> 4 << 16);
    float sum[sums][4] = {}, of_rows[2][4];
#pragma unroll
    for (int first = 0; first < stretches; first += together) {
        uint32_t a[together][4];
        float part[together][sums][4];
        if (first % 4 == 0) load_scales<D>(of_rows, scales, first / 4);
#pragma unroll
        for (int i = 0; i < together; i++)
            if (D == DTYPE_F4_E2M1) {
                const uint32_t *words = tile.word + 2 * (first + i);
                const uint2 upper = e4m3_of_e2m1(words[0]), lower = e4m3_of_e2m1(words[1]);
                a[i][0] = upper.x, a[i][1] = lower.x, a[i][2] = upper.y, a[i][3] = lower.y;
            } else
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const uint32_t *words = tile.word + 4 * (first + i) + 2 * j;
                    a[i][j] = __byte_perm(words[0], words[1], 0x6420), a[i][j + 2] = __byte_perm(words[0], words[1], 0x7531);
                }
        begin_products();
#pragma unroll
        for (int i = 0; i < together; i++)
            multiply_digits<columns>(part[i], a[i], b + (uint32_t)((first + i) * 2 * part_bytes(ROWS) / 16));
        end_products();
        wait_for_products<0>();
#pragma unroll
        for (int i = 0; i < together * sums * 4; i++)                   /* not used before here */
            asm volatile("" : "+f"(part[i / (sums * 4)][i / 4 % sums][i % 4]) :: "memory");
#pragma unroll
        for (int i = 0; i < together * 4; i++) asm volatile("" : "+r"(a[i / 4][i % 4]) :: "memory");
#pragma unroll
        for (int i = 0; i < together; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float of_x = ((const float *)undo)[first + i + (ROWS == 1 ? 0 : k % 2 * (X_BLOCK / SCALED_TOGETHER))],
                            of_w = of_rows[k / 2][(first + i) % 4],
                            scale = D == DTYPE_F4_E2M1 && ROWS == 1 ? of_w : of_x * of_w;
#pragma unroll
                for (int j = 0; j < sums; j++) sum[j][k] = fmaf(scale, part[i][j][k], sum[j][k]);
            }
    }
#pragma unroll
    for (int i = 0; i < sums * 4; i++) {
        const float scale = D == DTYPE_F4_E2M1 ? E2M1_REPAIR
                            : D == BLOCKS_OF_32 ? 1 : __uint_as_float(i % 4 < 2 ? tile.scale[0].x : tile.scale[0].y);
        total[i / 4][i % 4] = fmaf(scale, sum[i / 4][i % 4], total[i / 4][i % 4]);
    }
}

/* The digits' sums added up: as put_columns() has them, of the first ROWS columns. */
template <int ROWS> static __device__ inline void add_digits(float y[4], const float total[][4]) {
    const float second = 1.0f / (1 << DIGIT_BITS), third = second * second;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float one = ROWS == 1 ? total[0][i | 1] : __shfl_down_sync(~0u, total[0][i], ROWS / 2),
                    two = ROWS == 4 ? total[1][i] : __shfl_down_sync(~0u, total[0][i], ROWS);
        y[i] = fmaf(third, two, fmaf(second, one, total[0][i]));
    }
}

/* One strip times the rows of one work: in the first phase this warpgroup's segment, in the second one all columns of a piece.
 * All warps of a warpgroup come along. */
template <DType D, int ROWS>
static __device__ inline void multiply_rows(float y[4], int *steps, const Experts &e, const ExpertMemory &m, bool down,
                                            int cols) {
    constexpr int columns = 1 << tile_bits(D), segments = 1 << PACKED_SEGMENT_BITS;
    const int lane = lane_id(), group = warpgroup_id(), tiles = cols / columns, every = down ? 1 : segments,
              round_bits = power_of(e.stages), bytes = down ? block_bytes(padded_rows(e.columns)) : block_bytes(ROWS);
    float total[(DIGITS * ROWS + 7) / 8][4] = {};
    const int end = down ? tiles : (tiles + segments - 1) / segments * segments;
#pragma unroll 1
    for (int i = down ? 0 : group; i < end; i += every, ++*steps) {
        const int stage = *steps & e.stages - 1;
        const int column = down ? 0 : i * columns % X_BLOCK;
        const uint8_t *block = m.x + (down ? stage << PACKED_SEGMENT_BITS | group : i * columns / X_BLOCK) * bytes,
                      *digits = block + column / 16 * part_bytes(ROWS),
                      *undo = block + digit_bytes(ROWS) + scale_place(lane % 4 * 2 % ROWS, column);
        wait_at(&m.stages->filled[stage][group], *steps >> round_bits);
        if (down) show_to_products();
        if (i < tiles) {
            uint8_t *at = m.ring + (stage * EXPERT_WARPS + worker_warp()) * e.slot_bytes;
            const uint8_t *scales = D == DTYPE_F4_E2M1 ? at : at + TILE_ROWS * TILE_BYTES;         /* of e2m1 as floats */
            Tile tile;
            if (D == DTYPE_F4_E2M1) {
                load_words(&tile, at);
                widen_scales<ROWS>(at, undo);
            } else {
                load_eights(&tile, at);
                if (D == DTYPE_F8_E4M3) tile.scale[0] = *(const uint2 *)scales;
            }
            multiply_packed_tile<D, ROWS>(total, tile, digits, undo, scales);
        }
        __syncwarp();
        if (lane == 0) arrive_at(&m.stages->used[stage][group]);
    }
    add_digits<ROWS>(y, total);
}

template <DType D>
static __device__ inline void multiply_work(float y[4], int *steps, const Experts &e, const ExpertMemory &m, bool down,
                                            int cols, int count) {
    if (count == 1) multiply_rows<D, 1>(y, steps, e, m, down, cols);
    else if (count == 2) multiply_rows<D, 2>(y, steps, e, m, down, cols);
    else multiply_rows<D, PACKED_COLUMNS>(y, steps, e, m, down, cols);
}

static __device__ inline void multiply_terms(float y[4], int *steps, const Experts &e, const ExpertMemory &m, bool down,
                                             int cols, int work) {
    const DType D = type_of(e, m, work);
    const int count = count_of(m, work);
    if (D == DTYPE_F4_E2M1) multiply_work<DTYPE_F4_E2M1>(y, steps, e, m, down, cols, count);
    else if (D == BLOCKS_OF_32) multiply_work<BLOCKS_OF_32>(y, steps, e, m, down, cols, count);
    else multiply_work<DTYPE_F8_E4M3>(y, steps, e, m, down, cols, count);
}
#else
static __device__ inline void stage_terms(const Experts &, uint8_t *, const int *, int, int) {}
static __device__ inline void multiply_terms(float *, int *, const Experts &, const ExpertMemory &, bool, int, int) {}
#endif

/* ---- sums */

/* A warp's sums to columns [first, first + count) of those that wait. */
static __device__ inline void put_columns(const Experts &e, const ExpertMemory &m, const float total[4], bool down, int work,
                                          int strip, int first, int count) {
    const int lane = lane_id(), segments = segments_of(e, down), segment = segment_of(e, down);
    const bool exact = e.dtype[0] == EXACT;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = exact ? lane / 16 * 4 + i : lane % 4 * 2 + i % 2, row = exact ? lane % 16 : lane / 4 + i / 2 * 8;
        if (column < count) (down ? m.down_sums : m.sums)[((first + column) * segments + segment) * TILE_ROWS + row] = total[i];
    }
    if (segment == 0 && lane < count) {
        m.strip[first + lane] = strip;
        m.pick[first + lane] = m.order[m.works[work].begin + lane];
    }
}

/* A strip times the rows of a work, which are in shared memory but where they are met exactly. */
template <bool EXACTLY>
static __device__ inline void multiply_strip(float total[4], const uint8_t *rows, Stream *stream, int *slot, const Experts &e,
                                             const ExpertMemory &m, bool down, int work, int strip) {
    if (!down && strip * 8 >= e.inter) return;
    if constexpr (EXACTLY) multiply_exactly(total, e, m, down, work, strip);
    else multiply_segment(total, rows, stream, slot, e, m, down, work);
}

static __device__ inline float add_segments(const float *sums, int segments, int column, int row) {
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < segments; i++) sum += sums[(column * segments + i) * TILE_ROWS + row];
    return sum;
}

/* gated = silu(gate x) * up x for the columns that wait, or of what a limit leaves of them. */
static __device__ void add_gate_up(const Experts &e, const ExpertMemory &m, int columns) {
    const int segments = segments_of(e, false);
#pragma unroll 1
    for (int i = worker(); i < columns * 8; i += EXPERT_THREADS) {
        const int column = i / 8, r = i % 8, out = m.strip[column] * 8 + r, pick = m.pick[column];
        if (out >= e.inter) continue;
        e.gated[gated_row(e, pick) + (size_t)out] = gate_up(add_segments(m.sums, segments, column, r),
                                                            add_segments(m.sums, segments, column, 8 + r), e.limit);
    }
}

/* Which columns that wait belong to the same row and strip: next[c] is the next one, leads[c] says that there is none before. */
static __device__ void link_columns(const ExpertMemory &m, int columns) {
    for (int c = worker_warp(); c < columns; c += EXPERT_WARPS) {
        const int row = row_of(m.pick[c]), strip = m.strip[c];
        int next = columns;
        bool leads = true;
        for (int base = 0; base < columns && next == columns; base += 32) {
            const int other = base + lane_id();
            const bool same = other < columns && m.strip[other] == strip && row_of(m.pick[other]) == row;
            const unsigned after = __ballot_sync(~0u, same && other > c);
            if (__ballot_sync(~0u, same && other < c)) leads = false;
            if (after) next = base + __ffs((int)after) - 1;
        }
        m.next[c] = (uint16_t)next;
        m.leads[c] = leads;
    }
}

/* y += weight * down gated for the columns that wait: the first one of a row of y takes its others along, in order. */
static __device__ void add_down(const Experts &e, const ExpertMemory &m, int columns) {
    const int segments = segments_of(e, true);
#pragma unroll 1
    for (int i = worker(); i < columns * TILE_ROWS; i += EXPERT_THREADS) {
        const int c = i / TILE_ROWS, r = i % TILE_ROWS, pick = m.pick[c];
        const float weight = is_shared(e, pick) || e.rounds ? 1 : e.weights[row_of(pick) * e.per_token + number_of(pick)];
        m.down_sums[c * segments * TILE_ROWS + r] = weight * add_segments(m.down_sums, segments, c, r);
    }
    link_columns(m, columns);
    sync_warps();
#pragma unroll 1
    for (int i = worker(); i < columns * TILE_ROWS; i += EXPERT_THREADS) {
        const int first = i / TILE_ROWS, r = i % TILE_ROWS, out = m.strip[first] * TILE_ROWS + r;
        if (!m.leads[first] || out >= e.hidden) continue;
        float *y = e.y + (size_t)row_of(m.pick[first]) * (size_t)e.hidden + (size_t)out;
        float sum = is_shared(e, m.pick[first]) ? 0 : *y;
#pragma unroll 1
        for (int c = first; c < columns; c = m.next[c]) sum += m.down_sums[c * segments * TILE_ROWS + r];
        *y = sum;
    }
}

/* ---- the kernel */

/* Waits until all blocks have come here; what they wrote before is seen behind it. They all fit on the GPU at once. Together they
 * add 2^31, so the highest bit changes when the last one has come, and the others are as before. */
static __device__ unsigned arrived_experts;

static __device__ void wait_for_all_blocks() {
    const unsigned last = 1u << 31;
    sync_warps();
    if (worker() == 0) {
        __threadfence();
        const unsigned before = atomicAdd(&arrived_experts, blockIdx.x ? 1 : last - (gridDim.x - 1));
        while (((*(volatile unsigned *)&arrived_experts ^ before) & last) == 0) {}
        __threadfence();
    }
    sync_warps();
}

/* Of sums that wait in the first phase; of packed weights also in the second one: of an entry one for each row of a strip, in the
 * first phase four times as many. */
static __host__ __device__ inline int sum_bytes(const Experts &e) {
    return (e.packed ? e.entries * GROUP_ROWS : MAX_SUMS * TILE_ROWS) * (int)sizeof(float);
}

static __device__ ExpertMemory expert_memory(const Experts &e, uint8_t *shared) {
    ExpertMemory m;
    m.stages = (PackedStages *)shared;
    shared += e.packed ? sizeof(PackedStages) : 0;
    m.ring = shared + (e.packed ? 0 : worker_warp() * e.stages * e.slot_bytes);
    m.x = shared + EXPERT_WARPS * e.stages * e.slot_bytes;
    m.sums = (float *)(m.x + e.x_bytes);
    m.down_sums = (float *)m.x;
    m.gated = m.x + DOWN_SUM_BYTES;
    m.plan = NULL;
    m.strip = (int *)((uint8_t *)m.sums + sum_bytes(e));
    m.pick = m.strip + MAX_DOWN_SUMS;
    m.next = (uint16_t *)(m.pick + MAX_DOWN_SUMS);
    m.leads = (uint8_t *)(m.next + MAX_DOWN_SUMS);
    m.chosen = (Chosen *)(m.leads + MAX_DOWN_SUMS);
    m.works = (Work *)(m.chosen + e.most_chosen);
    m.order = (int *)(m.works + e.most_chosen + divide_up(e.n_rows * e.slots, e.columns) + 1);
    return m;
}

/* What can be done before it is known who is chosen: the shared expert's weights may be read, and what says where those of the
 * others are comes closer. */
static __device__ void prepare(const Experts &e, const ExpertMemory &m) {
    const int works = shared_works(e), bytes = e.experts * (int)sizeof(Matrix), line = 128;
    if (worker() == 0) m.chosen[0] = chosen_matrices(e.shared[GATE], e.shared[UP], e.shared[DOWN]);
    for (int i = worker(); i <= works; i += EXPERT_THREADS) m.works[i].chosen = i < works ? 0 : NOBODY;
    for (int i = (worker() * (int)gridDim.x + (int)blockIdx.x) * line; i < bytes; i += (int)(EXPERT_THREADS * gridDim.x) * line)
        for (int matrix = GATE; matrix <= DOWN; matrix++)
            asm volatile("prefetch.global.L2 [%0];" :: "l"((const uint8_t *)e.table[matrix] + i));
    const int masks = (e.experts + e.slots - e.per_token) * divide_up(e.n_rows, 32);
    for (int i = worker(); i < masks; i += EXPERT_THREADS) ((uint32_t *)m.x)[i] = 0;
}

/* The first phase, of which all teams take the same unit at the same time. */
template <bool EXACTLY>
static __device__ inline void multiply_gate_up(Stream *stream, int *slot, const Experts &e, const ExpertMemory &m) {
    const int segments = segments_of(e, false), teams = teams_of(e, false), team = team_of(e, false);
    int used = 0, staged = -1;  /* columns that wait; what tells the rows at hand from others: a single one meets all experts */
    for (int place = 0; place < m.plan->gate;) {
        const Span span = find_span(e, m, place);
        const int count = count_of(m, span.work), rows = e.n_rows > 1 ? span.work : (int)type_of(e, m, span.work);
        if (rows != staged && !EXACTLY) {
            sync_warps();
            stage_rows(e, m, m.x, false, m.works[span.work].begin, count);
            sync_warps();
        }
        staged = rows;
#pragma unroll 1
        for (int i = 0; i < span.strips; i++) {
            const int strip = span.strip + i * teams;
            if ((used + teams * count) * segments > MAX_SUMS) {
                sync_warps();
                add_gate_up(e, m, used);
                sync_warps();
                used = 0;
            }
            float total[4] = {};
            multiply_strip<EXACTLY>(total, m.x, stream, slot, e, m, false, span.work, strip);
            put_columns(e, m, total, false, span.work, strip, used + team * count, count);
            used += teams * count;
        }
        place += e.many ? 1 : span.strips;
    }
    sync_warps();
    add_gate_up(e, m, used);
}

/* The rows of gated of as many works, from `first` on, as there is room for. */
static __device__ inline void stage_gated(int *begin, int *end, const Experts &e, const ExpertMemory &m, int first) {
    if (e.dtype[0] == EXACT) return;
    const int from = m.works[first].begin;
    *begin = *end = first;
    while (*end < m.plan->works && m.works[*end + 1].begin - from <= e.gated_rows) ++*end;
    sync_warps();
    stage_rows(e, m, m.gated, true, from, m.works[*end].begin - from);
    sync_warps();
}

/* The second one, of which each team takes its own task. */
template <bool EXACTLY>
static __device__ inline void multiply_down(Stream *stream, int *slot, const Experts &e, const ExpertMemory &m) {
    const int segments = segments_of(e, true), teams = teams_of(e, true), team = team_of(e, true), lane = lane_id();
    int used = 0, begin = 0, end = 0;               /* works whose rows are at hand */
    for (int round = 0; round < m.plan->down; round++) {
        const Span of_lane = find_task(e, m, round, min(lane, teams - 1)), span = find_task(e, m, round, team);
        int until = lane < teams && of_lane.strips ? of_lane.strips * count_of(m, of_lane.work) : 0;
        int first = used - __shfl_sync(~0u, until, team);
        for (int distance = 1; distance < teams; distance *= 2) {
            const int other = __shfl_up_sync(~0u, until, (unsigned)distance);
            if (lane >= distance) until += other;
        }
        const int columns = __shfl_sync(~0u, until, teams - 1);     /* of all teams' tasks */
        first += __shfl_sync(~0u, until, team);
        if ((used + columns) * segments > MAX_DOWN_SUMS) {
            sync_warps();
            add_down(e, m, used);
            sync_warps();
            first -= used, used = 0;
        }
        const int last = min(find_task(e, m, round, teams - 1).work, m.plan->works - 1);
        if (last >= end) stage_gated(&begin, &end, e, m, find_task(e, m, round, 0).work);
        const int place = span.strips ? m.works[span.work].begin - m.works[begin].begin : 0;
        const uint8_t *rows = m.gated + place * x_stride(e, e.inter);
#pragma unroll 1
        for (int i = 0; i < span.strips; i++) {
            const int count = count_of(m, span.work), strip = span.strip + i * (int)gridDim.x;
            float total[4] = {};
            multiply_strip<EXACTLY>(total, rows, stream, slot, e, m, true, span.work, strip);
            put_columns(e, m, total, true, span.work, strip, first + i * count, count);
        }
        used += columns;
    }
    sync_warps();
    add_down(e, m, used);
}

/* Under --qat gated is rounded before down meets it, and an expert's weight is in it by then. */
static __device__ void round_gated(const Experts &e) {
    const int groups = divide_up(e.inter, e.rounding.group), all = e.n_rows * e.slots * groups;
    for (int i = (int)blockIdx.x * EXPERT_WARPS + worker_warp(); i < all; i += (int)gridDim.x * EXPERT_WARPS) {
        const int vector = i / groups, number = vector % e.slots, first = i % groups * e.rounding.group,
                  count = min(e.rounding.group, e.inter - first);
        float *v = e.gated + (size_t)vector * (size_t)e.inter + first;
        const float weight = number < e.per_token ? e.weights[vector / e.slots * e.per_token + number] : 1;
        for (int j = lane_id(); j < count; j += 32) v[j] = __ldcg(v + j) * weight;
        round_group(v, count, e.rounding);
    }
    wait_for_all_blocks();
}

template <bool EXACTLY>
static __global__ void __launch_bounds__(EXPERT_THREADS, 1) experts_kernel(const __grid_constant__ Experts e) {
    extern __shared__ __align__(128) uint8_t expert_shared[];
    ExpertMemory m = expert_memory(e, expert_shared);
    const bool exact = e.dtype[0] == EXACT;
    __shared__ Plan plan;
    m.plan = &plan;
    if (worker() == 0) plan_shared(&plan, e);
    prepare(e, m);
    sync_warps();
    Stream stream = {};
    int ahead = 0, slot = 0;
    for (bool known = false; true; known = true) {              /* as many tiles on their way as there is room for */
        for (; ahead < e.stages && !exact; ahead++) {
            if (!fetch_tile(&stream, e, m, ahead * e.slot_bytes) && !known) break;
            commit_copies();
        }
        if (known) break;
        wait_for_previous();
        const int works = lists_row(e) ? e.slots : list_works(e, m);
        if (lists_row(e) && worker_warp() == 0) list_row(e, m);
        if (worker() == 0) plan_all(&plan, e, works);
        sync_warps();
    }
    multiply_gate_up<EXACTLY>(&stream, &slot, e, m);
    wait_for_all_blocks();      /* they have written all of gated */
    if (e.rounds) round_gated(e);
    let_next_start();
    multiply_down<EXACTLY>(&stream, &slot, e, m);
}

/* ---- the kernel where weights are packed: four warps more fetch tiles for the others, in the order in which these take them */

/* What is at a place of the first phase, in units. */
static __device__ __noinline__ Span find_packed(const Experts &e, const ExpertMemory &m, int place) {
    const Plan &plan = *m.plan;
    Span span = e.many               ? find_run(e, m, (int)blockIdx.x + place * (int)gridDim.x)
                : place < plan.shared ? find_units(e, m, plan.first_shared + place, plan.shared - place)
                                      : find_units(e, m, plan.first_routed + place - plan.shared, plan.gate - place);
    span.strip /= teams_of(e, false);
    return span;
}

/* Where the tiles of a strip are: the first of each team of a warp's segment. Rows as in Stream: lane / 8 and four further on, of
 * gate and up, or the upper and lower eight of down. */
struct Source {
    const uint8_t *row[2], *scale;
    uint32_t stride, team, scale_team[4];           /* from row to row; from team to team; from the first team to each */
    int tiles, steps;           /* that there are of this segment; that all segments have */
    int step, scale_step, scale_lanes;              /* bytes from tile to tile; lanes that bring scales */
};

static __device__ inline Source find_source(const Experts &e, const ExpertMemory &m, int work, const Piece &piece, bool down) {
    const Chosen &chosen = m.chosen[m.works[work].chosen];
    const DType D = type_of(e, m, work);
    const bool small = D == BLOCKS_OF_32, block = is_e4m3(D);
    const int lane = lane_id(), high = down ? TILE_ROWS : TILE_ROWS / 2, first = piece.strip * 4 * high,
              cols = down ? e.inter : e.hidden, segment = fetcher_warp(), bits = down ? 0 : PACKED_SEGMENT_BITS,
              own = piece.tiles << tile_bits(DTYPE_F4_E2M1) >> tile_bits(D),
              tile = down ? piece.tile << tile_bits(DTYPE_F4_E2M1) >> tile_bits(D) : segment;
    Source source;
    source.steps = (own + (1 << bits) - 1) >> bits;
    source.tiles = down ? own : (own - segment + (1 << bits) - 1) >> bits;
    source.stride = (uint32_t)weight_bytes(D, (size_t)cols);
    source.team = (uint32_t)high * source.stride;
    source.step = TILE_BYTES << bits;
    const size_t at = (size_t)(first + lane / 8) * source.stride + (size_t)(tile * TILE_BYTES + lane % 8 * 16);
    source.row[0] = chosen.data[down ? DOWN : GATE] + at;
    source.row[1] = chosen.data[down ? DOWN : UP] + at + (down ? 8 * source.stride : 0);
    const int bytes = small ? 16 : block ? 4 : 8, scale_row = count_tiles(D, cols) * bytes,
              shift = small ? power_of(SMALL_BLOCK) : block ? power_of(SCALE_BLOCK) : 0;
    const bool upper = small ? lane < 4 : block ? lane == 0 : lane < TILE_ROWS;
    const int row = block ? 0 : lane / 2 % 8 + (down && !upper ? 8 : 0), word = small ? lane % 4 : block ? 0 : lane % 2;
    source.scale_step = bytes << bits;
    source.scale_lanes = small ? 8 : block ? 2 : 32;
    for (int team = 0; team < 4; team++) source.scale_team[team] = (uint32_t)((team * high >> shift) * scale_row);
    source.scale = (const uint8_t *)chosen.scale[down ? DOWN : upper ? GATE : UP]
                   + (size_t)((first >> shift) + row) * (size_t)scale_row + tile * bytes + word * 4;
    return source;
}

/* Until the warpgroup has done with what was in a step's place. */
static __device__ inline void wait_for_place(const Experts &e, const ExpertMemory &m, int step) {
    if (step >= e.stages)
        wait_at(&m.stages->used[step & e.stages - 1][fetcher_warp()], (step >> power_of(e.stages)) - 1);
}

/* 16 bytes of weights that are read once a pass: L2 is to forget them first and keep what is read again, code too. */
static __device__ inline void start_copy_of_weights(uint8_t *to, const uint8_t *from) {
    uint64_t forgotten_first;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(forgotten_first));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "l"(forgotten_first) : "memory");
}

/* The tiles of one step to their stage, of each team, if there are any. */
static __device__ inline void fetch_step(const Source &source, const Experts &e, const ExpertMemory &m, int step) {
    const int lane = lane_id(), stage = step & e.stages - 1, segment = fetcher_warp(),
              own = lane / 8 * TILE_BYTES + (lane % 8 ^ swizzled(lane / 8)) * 16;
    uint8_t *slot = m.ring + ((stage << PACKED_SEGMENT_BITS) + segment) * 4 * e.slot_bytes;
    const uint8_t *row[2] = {source.row[0], source.row[1]};
    if (source.tiles > 0)
#pragma unroll
        for (int team = 0; team < 4; team++, slot += e.slot_bytes) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                start_copy_of_weights(slot + own + i * 8 * TILE_BYTES, row[i]);
                start_copy_of_weights(slot + (own ^ 2 * 16) + (i * 8 + 4) * TILE_BYTES, row[i] + 4 * source.stride);
                row[i] += source.team;
            }
            if (lane < source.scale_lanes)
                copy_scales_to_shared(slot + TILE_ROWS * TILE_BYTES + lane * 4, source.scale + source.scale_team[team]);
        }
}

/* When all that this warp has fetched is there, the step is complete. */
static __device__ inline void close_step(const Experts &e, const ExpertMemory &m, int step) {
    arrive_with_copies(&m.stages->filled[step & e.stages - 1][fetcher_warp()]);
}

/* All blocks have written gated: the warps that multiply know it and tell those that fetch. */
static __device__ inline void tell_open() { asm volatile("bar.arrive 2, %0;" :: "n"((int)PACKED_THREADS) : "memory"); }
static __device__ inline void wait_open() { asm volatile("bar.sync 2, %0;" :: "n"((int)PACKED_THREADS) : "memory"); }

/* In the second phase a warpgroup has works of its own, which are dealt out in turns; the first works, of e4m3, count twice. */
static __device__ inline int group_of(const Experts &e, const ExpertMemory &m, int work) {
    const int groups = 1 << PACKED_SEGMENT_BITS, shared = m.plan->shared_works, after = work - shared,
              twice = is_e4m3(e.dtype[1]) && shared < groups ? shared : 0, others = groups - twice;
    if (after < 0 || !twice) return work % groups;
    if (after < 2 * others) return twice + (after < others ? after : after - others);
    return (after - 2 * others) % groups;
}

/* A group's first work from `work` on. */
static __device__ inline int find_work(const Experts &e, const ExpertMemory &m, int work, int group) {
    while (work < m.plan->works && group_of(e, m, work) != group) work++;
    return work;
}

/* The rows of gated for tile after tile of a group's works, piece after piece. A lane has a row, of which it brings some parts of
 * 16 columns. */
struct GatedStream {
    int index, work, tiles;     /* piece; work; its tiles that are to come */
    int column, columns;        /* the first of the next tile; of a tile */
    int rows, row_bits;         /* that meet a tile: 2^row_bits */
    const uint8_t *row;         /* NULL: there are fewer */
};

static __device__ inline void open_gated(GatedStream *stream, const Experts &e, const ExpertMemory &m, int index, int work) {
    *stream = {.index = index, .work = work};
    if (index == m.plan->strips || work == m.plan->works) return;
    const Piece piece = find_piece(e, index);
    const int count = count_of(m, work), bits = tile_bits(type_of(e, m, work));
    stream->tiles = piece.tiles << tile_bits(DTYPE_F4_E2M1) >> bits;
    stream->column = piece.tile << tile_bits(DTYPE_F4_E2M1), stream->columns = 1 << bits;
    stream->rows = padded_rows(count), stream->row_bits = power_of(stream->rows);
    const int own = lane_id() & stream->rows - 1;
    stream->row = own < count ? (const uint8_t *)(e.gated + gated_row(e, m.order[m.works[work].begin + own])) : NULL;
}

/* Starts to bring the columns that meet the next tile, which is that of a step, and goes on to the one behind it. */
static __device__ inline void bring_gated(GatedStream *stream, const Experts &e, const ExpertMemory &m, int step) {
    const int group = fetcher_warp(), rows = stream->rows, bits = stream->row_bits, own = lane_id() & rows - 1,
              first = lane_id() >> bits, columns = stream->columns, column = stream->column, each = 4 * SCALED_TOGETHER;
    uint8_t *to = m.x + ((step & e.stages - 1) << PACKED_SEGMENT_BITS | group) * block_bytes(padded_rows(e.columns));
    if (stream->row) {
        const uint8_t *digits = stream->row + digit_place(column, 0),
                      *scales = stream->row + e.inter * DIGITS + scale_place(0, column);
#pragma unroll 1
        for (int part = first; part < columns / 16; part += 32 >> bits)
#pragma unroll
            for (int digit = 0; digit < DIGITS; digit++)
                start_copy_to_shared(to + part * part_bytes(rows) + (digit * rows + own) * 16,
                                     digits + digit_place(part * 16, digit), true);
        if (first < columns / each)                             /* four scales */
            start_copy_to_shared(to + digit_bytes(rows) + scale_place(own, first * each), scales + scale_place(0, first * each),
                                 true);
    }
    stream->column += columns;
    if (--stream->tiles) return;
    const int next = find_work(e, m, stream->work + 1, group);
    if (next < m.plan->works) open_gated(stream, e, m, stream->index, next);
    else open_gated(stream, e, m, stream->index + 1, find_work(e, m, 0, group));
}

/* Fetches strip after strip. Until the plan is known, which all threads wait for together, there is the shared expert, whose
 * places in the plan and the list are the same before and after, and no more than the ring holds. */
static __device__ inline int fetch_gate_up(const Experts &e, const ExpertMemory &m) {
    const Plan &plan = *m.plan;
    bool known = false;
    int step = 0;
    for (int place = 0; true;) {
        if (place >= plan.shared && !known) __syncthreads(), known = true;
        if (place >= plan.gate) return step;
        const Span span = find_packed(e, m, place);
#pragma unroll 1
        for (int i = 0; i < span.strips; i++) {
            Source source = find_source(e, m, span.work, {span.strip + i, 0, e.hidden >> tile_bits(DTYPE_F4_E2M1), 0}, false);
#pragma unroll 1
            for (; source.steps > 0; step++, source.steps--, source.tiles--) {
                if (step == e.stages && !known) __syncthreads(), known = true;
                wait_for_place(e, m, step);
                fetch_step(source, e, m, step);
                close_step(e, m, step);
                source.row[0] += source.step, source.row[1] += source.step, source.scale += source.scale_step;
            }
        }
        place += e.many ? 1 : span.strips;
    }
}

/* In the second phase gated comes along. As it is not there yet at first, the weights fill the ring meanwhile. */
static __device__ inline void fetch_down(const Experts &e, const ExpertMemory &m, int step) {
    const int group = fetcher_warp(), full = step + e.stages;
    int closed = step;          /* steps to whose weights gated has been brought */
    GatedStream gated;
    open_gated(&gated, e, m, 0, find_work(e, m, 0, group));
    const auto close_until = [&](int end) {
#pragma unroll 1
        for (; closed < end; closed++) bring_gated(&gated, e, m, closed), close_step(e, m, closed);
    };
#pragma unroll 1
    for (int index = 0; index < m.plan->strips; index++)
#pragma unroll 1
        for (int work = find_work(e, m, 0, group); work < m.plan->works; work = find_work(e, m, work + 1, group)) {
            Source source = find_source(e, m, work, find_piece(e, index), true);
#pragma unroll 1
            for (; source.steps > 0; step++, source.steps--, source.tiles--) {
                if (step == full) wait_open(), close_until(step);
                wait_for_place(e, m, step);
                fetch_step(source, e, m, step);
                if (step >= full) close_until(step + 1);
                source.row[0] += source.step, source.row[1] += source.step, source.scale += source.scale_step;
            }
        }
    if (step <= full) wait_open();
    close_until(step);
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* ---- sums where weights are packed: of an entry, a row that meets a strip, all teams' stand together */

/* A warp's sums to entries [first, first + count) of those that wait, of one of 2^bits segments. */
static __device__ inline void put_entries(const ExpertMemory &m, const float total[4], int bits, int segment, int first,
                                          int count) {
    const int lane = lane_id(), teams = EXPERT_WARPS >> PACKED_SEGMENT_BITS;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = lane % 4 * 2 + i % 2, at = ((first + column) * teams + worker_warp() % teams) << bits | segment;
        if (column < count) m.sums[at * TILE_ROWS + lane / 4 + i / 2 * 8] = total[i];
    }
}

/* Values of gated, 32 for each entry that waits, as digits to where the row of its pick is: of each 16 the digits after each
 * other, and behind the row the scales. A warp takes an entry. */
static __device__ void leave_gated(const Experts &e, const ExpertMemory &m, int entries) {
    const int lane = lane_id(), segments = 1 << PACKED_SEGMENT_BITS;
#pragma unroll 1
    for (int entry = worker_warp(); entry < entries; entry += EXPERT_WARPS) {
        const int column = entry * 4 + lane / 8, pick = m.pick[entry], unit = m.strip[entry];
        float v = gate_up(add_segments(m.sums, segments, column, lane % 8), add_segments(m.sums, segments, column, 8 + lane % 8),
                          e.limit);
        float most = fabsf(v);
        for (int distance = 1; distance < 32; distance *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
        const float undo = scale_below(most, DIGIT_BITS - 2);
        v *= inverse_power(undo);
        uint8_t *row = (uint8_t *)(e.gated + gated_row(e, pick));
        const int at = unit * SCALED_TOGETHER + lane % 2 * 16 + lane / 8 * 4 + lane % 8 / 2;
#pragma unroll
        for (int digit = 0; digit < DIGITS; digit++)
            row[digit_place(at, digit)] = __nv_cvt_float_to_fp8(take_digit(&v), __NV_SATFINITE, __NV_E4M3);
        if (lane == 0) ((float *)(row + e.inter * DIGITS))[unit] = undo;
    }
}

/* A strip that is cut has two pieces, and y is 0 before either adds its sums to it, so that it makes no difference which comes
 * first. Until then they wait where there is room: [number][row][hidden]. Those of whole strips stand in y. */
static __device__ inline float *piece_sums(const Experts &e, const Piece &piece) {
    const size_t others = (size_t)piece.number * (size_t)e.n_rows * (size_t)e.hidden;
    return piece.tiles == strip_tiles(e) ? e.y : (float *)rounded_rows + others;
}

static __device__ void clear_sums(const Experts &e) {
    const int n = e.n_rows * e.hidden / 4;
    for (int i = (int)blockIdx.x * EXPERT_THREADS + worker(); i < n; i += (int)(gridDim.x * EXPERT_THREADS))
        ((float4 *)e.y)[i] = {};
}

static __device__ void add_piece(const Experts &e, const Piece &piece) {
    const float *sums = piece_sums(e, piece);
    for (int i = worker(); i < e.n_rows * GROUP_ROWS; i += EXPERT_THREADS) {
        const size_t at = (size_t)(i / GROUP_ROWS) * (size_t)e.hidden + (size_t)(piece.strip * GROUP_ROWS + i % GROUP_ROWS);
        atomicAdd(e.y + at, __ldcg(sums + at));
    }
}

/* y += weight * down gated for so many entries that wait, which follow each other in the order of the picks: the first one of a
 * row takes its others along. all: there are no other entries. */
static __device__ void add_entries(const Experts &e, const ExpertMemory &m, int begin, int entries, const Piece &piece,
                                   bool all) {
    const int lane = lane_id();
    float *sums = piece_sums(e, piece);
    int pick[2];
    float weight[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {                   /* of entries lane and lane + 32 */
        pick[i] = lane + 32 * i < entries ? m.order[begin + lane + 32 * i] : -1;
        weight[i] = pick[i] < 0 || is_shared(e, pick[i]) ? 1 : e.weights[row_of(pick[i]) * e.per_token + number_of(pick[i])];
    }
#pragma unroll 1
    for (int task = worker_warp(); task < 2 * entries; task += EXPERT_WARPS) {      /* 32 rows of the strip */
        const int entry = task / 2, r = task % 2 * 32 + lane, first = m.order[begin + entry];
        uint64_t left = (uint64_t)__ballot_sync(~0u, pick[1] >= 0 && row_of(pick[1]) == row_of(first)) << 32
                        | __ballot_sync(~0u, pick[0] >= 0 && row_of(pick[0]) == row_of(first));
        if (__ffsll((long long)left) - 1 != entry) continue;
        const size_t at = (size_t)row_of(first) * (size_t)e.hidden + (size_t)(piece.strip * GROUP_ROWS + r);
        float sum = is_shared(e, first) ? 0 : __ldcg(sums + at);
        for (; left; left &= left - 1) {
            const int other = __ffsll((long long)left) - 1;
            sum = fmaf(__shfl_sync(~0u, other < 32 ? weight[0] : weight[1], other % 32), m.sums[other * GROUP_ROWS + r], sum);
        }
        if (all && sums != e.y) atomicAdd(e.y + at, sum);
        else sums[at] = sum;
    }
}

/* ---- the phases where weights are packed */

/* The first one: all warps take the same unit at the same time, a segment of its columns each. */
static __device__ inline void multiply_packed_gate_up(int *steps, const Experts &e, const ExpertMemory &m) {
    int used = 0, staged = lists_row(e) ? 0 : -1;   /* entries that wait; the work whose rows are at hand: a single one's are */
    for (int place = 0; place < m.plan->gate;) {
        const Span span = find_packed(e, m, place);
        const int count = count_of(m, span.work), rows = lists_row(e) ? 0 : span.work;
        if (rows != staged) {
            sync_warps();
            stage_terms(e, m.x, m.order + m.works[span.work].begin, count, EXPERT_WARPS);
            sync_warps();
        }
        staged = rows;
#pragma unroll 1
        for (int i = 0; i < span.strips; i++) {
            if (used + count > e.entries >> PACKED_SEGMENT_BITS) {
                sync_warps();
                leave_gated(e, m, used);
                sync_warps();
                used = 0;
            }
            float total[4];
            multiply_terms(total, steps, e, m, false, e.hidden, span.work);
            put_entries(m, total, PACKED_SEGMENT_BITS, warpgroup_id(), used, count);
            if (worker() < count) {
                m.strip[used + worker()] = span.strip + i;
                m.pick[used + worker()] = m.order[m.works[span.work].begin + worker()];
            }
            used += count;
        }
        place += e.many ? 1 : span.strips;
    }
    sync_warps();
    leave_gated(e, m, used);
}

/* The second one: each warpgroup takes its own works, of as many at a time as there is room for sums. */
static __device__ inline void multiply_packed_down(int *steps, const Experts &e, const ExpertMemory &m) {
    const int group = warpgroup_id();
#pragma unroll 1
    for (int index = 0; index < m.plan->strips; index++) {
        const Piece piece = find_piece(e, index);
#pragma unroll 1
        for (int begin = 0, end = 0; begin < m.plan->works; begin = end) {
            const int from = m.works[begin].begin;
            while (end < m.plan->works && m.works[end + 1].begin - from <= e.entries) end++;
#pragma unroll 1
            for (int work = find_work(e, m, begin, group); work < end; work = find_work(e, m, work + 1, group)) {
                float total[4];
                multiply_terms(total, steps, e, m, true, piece.tiles << tile_bits(DTYPE_F4_E2M1), work);
                put_entries(m, total, 0, 0, m.works[work].begin - from, count_of(m, work));
            }
            sync_warps();
            const bool all = begin == 0 && end == m.plan->works;
            add_entries(e, m, from, m.works[end].begin - from, piece, all);
            sync_warps();
            if (end == m.plan->works && !all && piece.tiles < strip_tiles(e)) add_piece(e, piece);
        }
    }
}

static __global__ void __launch_bounds__(PACKED_THREADS, 1) packed_experts_kernel(const __grid_constant__ Experts e) {
    extern __shared__ __align__(128) uint8_t expert_shared[];
    ExpertMemory m = expert_memory(e, expert_shared);
    __shared__ Plan plan;
    m.plan = &plan;
    const bool fetches = worker() < 0, one = lists_row(e);
    if (worker() == 0) plan_shared(&plan, e);
    if (threadIdx.x < MAX_STAGES << PACKED_SEGMENT_BITS) {
        start_barrier(&m.stages->filled[0][0] + threadIdx.x, 32);
        start_barrier(&m.stages->used[0][0] + threadIdx.x, 4);
    }
    if (!fetches) prepare(e, m);
    __syncthreads();
    if (fetches) {
        fetch_down(e, m, fetch_gate_up(e, m));
        return;
    }
    const int first_pick = 0;
    if (one && worker() == 0) plan_all(&plan, e, e.slots);       /* as many works as picks */
    wait_for_previous();
    if (one && worker_warp() == EXPERT_WARPS - 1) list_row(e, m);
    else if (one) stage_terms(e, m.x, &first_pick, 1, EXPERT_WARPS - 1);
    else {
        const int works = list_works(e, m);
        if (worker() == 0) plan_all(&plan, e, works);
        __syncwarp();
        if (worker_warp() == 0 && !e.many) plan_routed(&plan, e, m);
    }
    __syncthreads();                                /* with the warps that fetch */
    if (e.share % strip_tiles(e)) clear_sums(e);
    int steps = 0;              /* of the ring, that this warpgroup has taken */
    multiply_packed_gate_up(&steps, e, m);
    wait_for_all_blocks();
    tell_open();
    let_next_start();
    multiply_packed_down(&steps, e, m);
}

/* How an expert's matrices are multiplied. */
static DType streamed_type(const Matrix *gate, const Matrix *up, const Matrix *down) {
    const DType format = streamed_format(*gate, 0);
    return format == streamed_format(*up, 0) && format == streamed_format(*down, 0) ? format : EXACT;
}

/* How much shared memory that is, with so many bytes for rows of x or gated. */
static size_t lay_out(Experts *e, int staged) {
    const int picks = e->n_rows * e->slots, experts = e->experts + e->slots - e->per_token,
              lists = experts * (divide_up(e->n_rows, 32) * (int)sizeof(uint32_t) + (int)sizeof(uint16_t));
    e->slot_bytes = TILE_ROWS * TILE_BYTES + max(scale_bytes(e->dtype[0]), scale_bytes(e->dtype[1]));
    e->x_bytes = (max(staged, lists) + 15) / 16 * 16;
    const size_t works = (size_t)(e->most_chosen + divide_up(picks, e->columns) + 1);
    return (size_t)(EXPERT_WARPS * e->stages * e->slot_bytes + e->x_bytes + sum_bytes(*e)) + sizeof(PackedStages)
           + MAX_DOWN_SUMS * COLUMN_BYTES
           + (size_t)e->most_chosen * sizeof(Chosen) + works * sizeof(Work) + (size_t)picks * sizeof(int) + SMALL_SHARED;
}

/* Cuts up a block's shared memory: as many rows of x beside a tile as there are, and as many stages as there is room for, where
 * rows are many not quite enough. What is left is for rows of gated. */
static size_t lay_out_experts(Experts *e) {
    const int picks = e->n_rows * e->slots, teams = EXPERT_WARPS >> e->segment_bits[DOWN];
    const int x_row = x_stride(*e, e->hidden), gated_row = x_stride(*e, e->inter);
    for (int least = e->many ? ENOUGH_STAGES - 1 : ENOUGH_STAGES; least; least--)
        for (e->columns = min(e->n_rows, (int)TILE_COLUMNS); e->columns; e->columns--)
            for (e->stages = MAX_STAGES; e->stages >= least; e->stages--) {
                e->gated_rows = min(picks, teams * e->columns);
                const size_t bytes = lay_out(e, max(e->columns * x_row, DOWN_SUM_BYTES + e->gated_rows * gated_row));
                if (bytes > gpu.shared_per_block) continue;
                const int room = (int)(gpu.shared_per_block - bytes) / 16 * 16,
                          more = max(min(DOWN_SUM_BYTES + picks * gated_row - e->x_bytes, room), 0);
                e->x_bytes += more;
                e->gated_rows = (e->x_bytes - DOWN_SUM_BYTES) / gated_row;
                return bytes + (size_t)more - SMALL_SHARED;
            }
    return 0;
}

/* The same where weights are packed. The number of stages is a power of two. */
static size_t lay_out_packed(Experts *e) {
    for (e->stages = e->many ? MAX_STAGES / 2 : MAX_STAGES; e->stages; e->stages /= 2)
        for (e->columns = min(e->n_rows, (int)PACKED_COLUMNS); e->columns; e->columns--)
            for (e->entries = MOST_ENTRIES; e->entries >= FEWEST_ENTRIES; e->entries /= 2) {
                const size_t bytes = lay_out(e, max(e->hidden / X_BLOCK, e->stages << PACKED_SEGMENT_BITS)
                                                    * block_bytes(padded_rows(e->columns)));
                if (bytes <= gpu.shared_per_block) return bytes - SMALL_SHARED;
            }
    return 0;
}

/* As in products: two for 16-bit weights, and for e4m3 where a row meets few. e2m1 is the type of large experts. */
static int count_terms(DType dtype, const Experts &e) {
    if (dtype == DTYPE_BF16 || dtype == DTYPE_F16) return 2;
    return is_e4m3(dtype) && (size_t)e.slots * (size_t)e.inter * (size_t)e.hidden <= TWO_TERMS_MOST ? 2 : 1;
}

/* As many segments as there are columns for, or the next lower power of two. */
static int count_segment_bits(DType D, int cols) {
    const int least = D == EXACT ? EXACT_SEGMENT : D == DTYPE_F4_E2M1 ? 8 * SEGMENT : SEGMENT;
    int bits = 0;
    while (bits < MAX_SEGMENT_BITS && 2 << bits <= divide_up(cols, least)) bits++;
    return bits;
}

/* Warpgroups multiply e2m1 with whole tiles, beside a shared expert that is e4m3 or like the others. All blocks have as many
 * tiles of down; whole strips where y has values already, or where there is no room for the sums of pieces. */
static void choose_packed(Experts *e) {
    const DType shared = e->dtype[1];
    const int strips = e->hidden / GROUP_ROWS, across = strip_tiles(*e);
    e->packed = gpu.major == 9 && !e->rounds && e->dtype[0] == DTYPE_F4_E2M1 && (shared == DTYPE_F4_E2M1 || is_e4m3(shared));
    if (!e->packed) return;
    for (int i = GATE; i <= DOWN; i++) e->segment_bits[i] = PACKED_SEGMENT_BITS;
    e->share = divide_up(strips * across, gpu.multiprocessors);
    int pieces = 1;
    for (int strip = 0; strip < strips; strip++) pieces = max(pieces, pieces_of_strip(*e, strip));
    const size_t sums = 2 * MAX_PASS_ROWS * (size_t)e->hidden * sizeof(float);
    if (e->slots == e->per_token || pieces > 2 || sums > ROUNDED_BYTES)
        e->share = divide_up(strips, gpu.multiprocessors) * across;
}

static void launch_experts(Experts e) {
    e.segment_bits[GATE] = e.segment_bits[UP] = count_segment_bits(e.dtype[0], e.hidden);
    e.segment_bits[DOWN] = count_segment_bits(e.dtype[0], e.inter);
    choose_packed(&e);
    for (int i = 0; i < 2; i++) e.terms[i] = count_terms(e.dtype[i], e);
    const int units = divide_up(e.inter, (EXPERT_WARPS >> e.segment_bits[GATE]) * TILE_ROWS / 2);
    e.many = units >= LONG_RUN && 2 * e.n_rows * e.per_token > TILE_COLUMNS * e.experts;
    const size_t shared = e.packed ? lay_out_packed(&e) : lay_out_experts(&e);
    const int strips = e.packed ? divide_up(e.hidden / GROUP_ROWS * strip_tiles(e), e.share) : divide_up(e.hidden, TILE_ROWS);
    const int blocks = min(gpu.multiprocessors, max(e.n_rows * e.slots * units, strips));
    const auto kernel = e.packed               ? packed_experts_kernel
                        : e.dtype[0] == EXACT ? experts_kernel<true>        /* registers of its own: the other's are few */
                                              : experts_kernel<false>;
    if (!shared) {
        fprintf(stderr, "tide: cuda: experts of %d x %d do not fit into shared memory\n", e.inter, e.hidden);
        _exit(1);
    }
    allow_shared(kernel, shared);
    launch_early(kernel, dim3((unsigned)blocks), e.packed ? PACKED_THREADS : EXPERT_THREADS, shared, 1, e);
}

/* Under --qat the inputs of matrices of eight and four bits are rounded, those of others are not. */
static bool rounds_inputs(const Config *config, DType dtype) {
    return config->qat && (dtype == DTYPE_F8_E4M3 || dtype == DTYPE_F4_E2M1);
}

/* The shared expert runs with the others where its matrices have their shape, and by itself before them where not. As many rows
 * at a time as the lists hold. */
static void experts(float *y, const float *x, const int *picks, const float *weights, int n_rows, const LayerWeights *layer,
                    const Config *config, float *scratch) {
    const int per_token = config->num_experts_per_tok, hidden = config->hidden_size, inter = config->moe_intermediate_size;
    const Matrix gate = {.dtype = layer->expert_dtype, .cols = hidden, .block = config->weight_block},
                 down = {.dtype = layer->expert_dtype, .cols = inter, .block = config->weight_block};
    const RowFormat rounding = {.dtype = KV_F8, .group = config->weight_block, .scales = SCALES_E8M0};
    const bool rounds = rounds_inputs(config, layer->expert_dtype),
               shared_rounds = layer->gate_proj.rows ? rounds_inputs(config, layer->gate_proj.dtype) : rounds;
    float *rounded = scratch + (size_t)n_rows * (size_t)max((per_token + 1) * inter, 2 * layer->gate_proj.rows);
    const DType dtype = streamed_type(&gate, &gate, &down),
                shared_dtype = streamed_type(&layer->gate_proj, &layer->up_proj, &layer->down_proj);
    const bool merged = layer->gate_proj.rows == inter && (dtype == EXACT) == (shared_dtype == EXACT) && rounds == shared_rounds;
    const int slots = per_token + merged, experts = config->n_routed_experts + merged;
    const int most = min(min((int)MAX_PASS_ROWS, MAX_LISTED / slots), MAX_MASKS / experts / (int)sizeof(uint32_t) * 32);
    if (rounds || shared_rounds) {
        copy_rows(rounded, (size_t)hidden, x, (size_t)hidden, n_rows, hidden, 1);
        round_rows(rounded, (size_t)hidden, n_rows, hidden, &rounding);
    }
    if (layer->gate_proj.rows && !merged) {
        const size_t inner = (size_t)layer->gate_proj.rows;
        float *up = scratch + (size_t)n_rows * inner;
        const Projection of_x[] = {{scratch, inner, &layer->gate_proj}, {up, inner, &layer->up_proj}},
                         down_proj = {y, (size_t)hidden, &layer->down_proj};
        linear(of_x, 2, shared_rounds ? rounded : x, (size_t)hidden, n_rows);
        limited_swiglu(scratch, scratch, up, (size_t)n_rows * inner, config->swiglu_limit);
        if (shared_rounds) round_rows(scratch, inner, n_rows, (int)inner, &rounding);
        linear(&down_proj, 1, scratch, inner, n_rows);
    }
    for (int first = 0, n; first < n_rows; first += n) {
        n = min(n_rows - first, most);
        const size_t row = (size_t)first;
        const float *in = (rounds ? rounded : x) + row * (size_t)hidden;
        launch_experts({.table = {layer->expert_gate, layer->expert_up, layer->expert_down},
                        .shared = {layer->gate_proj, layer->up_proj, layer->down_proj}, .picks = picks + row * (size_t)per_token,
                        .x = in, .weights = weights + row * (size_t)per_token, .gated = scratch, .y = y + row * (size_t)hidden,
                        .n_rows = n, .experts = config->n_routed_experts, .per_token = per_token, .hidden = hidden,
                        .inter = inter, .limit = config->swiglu_limit, .rounds = rounds, .rounding = rounding,
                        .slots = slots, .aligned = floats_aligned(in, (size_t)hidden),
                        .many = false, .packed = false, .share = 0,
                        .dtype = {dtype, merged ? shared_dtype : dtype}, .terms = {}, .segment_bits = {}, .columns = 0,
                        .gated_rows = 0, .entries = 0, .most_chosen = min(n * per_token, config->n_routed_experts) + merged,
                        .stages = 0, .slot_bytes = 0, .x_bytes = 0});
    }
}

/* =====================================================================================================================
 * Cached rows and index selection
 *
 * Owns: how a cached row is written and widened, and the lightning indexer (DeepSeek-V3.2, eq. 1) with its top-k. The indexer is
 * two kernels. index_scores reads every key of a session once for up to eight query rows, writes f32 scores and counts their
 * first bits; bf16 and e4m3 keys go through the tensor cores. select_top finds the k-th score from these counts and two radix
 * steps more over what is left, and collects the positions in ascending order. A score is the work of one warp in a fixed order,
 * and the selection is exact integer work, so neither depends on how a launch is split. Relies on: rows of a session follow each
 * other, strides of whole 16 bytes, and each index_scores being followed by its select_top, which leaves the counts zero; and on
 * page tables having been there before the pass's first kernel, since they are read while kernels in front still run; rows too,
 * but where the pass makes them itself.
 */

static __host__ __device__ inline bool has_codes(const RowFormat &format) {
    return format.dtype == KV_F8 || format.dtype == KV_F4;
}

/* Bytes of the quantised values themselves, behind which codes have their scales; and before the plain values of a row. */
static __host__ __device__ inline int value_bytes(const RowFormat &format) {
    const int n = format.quantised;
    return format.dtype == KV_F32 ? 4 * n : format.dtype == KV_BF16 ? 2 * n : format.dtype == KV_F8 ? n : divide_up(n, 2);
}

static __host__ __device__ inline int scale_size(const RowFormat &format) { return format.scales == SCALES_F32 ? 4 : 1; }

static __host__ __device__ inline int quantised_bytes(const RowFormat &format) {
    return value_bytes(format) + (has_codes(format) ? scale_size(format) * divide_up(format.quantised, format.group) : 0);
}

/* Little-endian bits of n bytes anywhere: an odd number of e4m3 values leaves what follows them unaligned. */
static __device__ inline uint32_t load_bytes(const uint8_t *data, int n) {
    uint32_t bits = 0;
    for (int i = 0; i < n; i++) bits |= (uint32_t)data[i] << 8 * i;
    return bits;
}

static __device__ inline float widen_e4m3(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

/* The scale of that group of a row's codes. */
static __device__ inline float cached_scale(const uint8_t *row, const RowFormat &format, int group) {
    const uint8_t *scale = row + value_bytes(format) + scale_size(format) * group;
    if (format.scales == SCALES_F32) return __uint_as_float(load_bytes(scale, 4));
    return format.scales == SCALES_E8M0 ? widen_e8m0(*scale) : widen_e4m3(*scale);
}

/* Value i of a cached row, the quantised ones first. */
static __device__ inline float cached_value(const uint8_t *row, const RowFormat &format, int i) {
    if (format.dtype == KV_F32) return ((const float *)row)[i];
    if (format.dtype == KV_BF16) return __bfloat162float(((const __nv_bfloat16 *)row)[i]);
    if (i >= format.quantised)
        return __uint_as_float(load_bytes(row + quantised_bytes(format) + 2 * (i - format.quantised), 2) << 16);
    const float code = format.dtype == KV_F8 ? widen_e4m3(row[i]) : widen_e2m1((uint32_t)row[i / 2] >> i % 2 * 4);
    return code * cached_scale(row, format, i / format.group);
}

/* Values i and the next seven of a row that has `count` of them; zeros behind. What needs no scale is on its way together. */
static __device__ inline void cached_eight(float (&v)[8], const uint8_t *row, const RowFormat &format, int i, int count) {
    if (format.dtype == KV_F32)
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = i + k < count ? ((const float *)row)[i + k] : 0;
    else if (format.dtype == KV_BF16)
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = i + k < count ? __bfloat162float(((const __nv_bfloat16 *)row)[i + k]) : 0;
    else
        for (int k = 0; k < 8; k++) v[k] = i + k < count ? cached_value(row, format, i + k) : 0;
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

/* To the nearest e2m1, ties to the even code, saturating at 6. */
static __device__ inline uint8_t narrow_e2m1(float x) {
    const float m = fabsf(x);
    const int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5);
    return (uint8_t)(code | (__float_as_uint(x) >> 31 ? 8 : 0));
}

/* The scale of a group of codes with that largest value. A scale of 0 would make 0 / 0, so each kind has a least one. */
static __device__ inline float group_scale(float largest, const RowFormat &format) {
    const bool eight = format.dtype == KV_F8;
    const float top = eight ? 448 : 6;
    if (format.scales == SCALES_F32) return largest > top * FLT_MIN ? largest / top : 1;
    if (format.scales == SCALES_E4M3) return widen_e4m3(narrow_e4m3(fmaxf(largest, top * 0x1p-9f) / top));
    const float least = eight ? 1e-4f : top * 0x1p-126f, wanted = fmaxf(largest, least) * (1 / top);
    if (!is_finite(wanted)) return 1;
    return __uint_as_float((__float_as_uint(wanted) + 0x7fffff) & 0x7f800000);      /* up to a power of two */
}

/* The largest of a group's n values, by one warp. */
static __device__ inline float group_maximum(const float *__restrict__ x, int n) {
    float largest = 0;
#pragma unroll 4
    for (int i = (int)threadIdx.x % 32; i < n; i += 32) largest = fmaxf(largest, fabsf(x[i]));
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));       /* none is negative */
}

/* One group of codes and its scale, by one warp. Two neighbours of e2m1 share a byte, and so a group. */
static __device__ void narrow_group(uint8_t *__restrict__ out, uint8_t *__restrict__ scales, const float *__restrict__ x, int n,
                                    const RowFormat &format) {
    const int lane = (int)threadIdx.x % 32;
    const float scale = group_scale(group_maximum(x, n), format);
#pragma unroll 4
    for (int i = lane; format.dtype == KV_F8 && i < n; i += 32) out[i] = narrow_e4m3(x[i] / scale);
    for (int i = 2 * lane; format.dtype == KV_F4 && i < n; i += 64)
        out[i / 2] = (uint8_t)(narrow_e2m1(x[i] / scale) | (i + 1 < n ? narrow_e2m1(x[i + 1] / scale) << 4 : 0));
    if (format.scales == SCALES_F32 && lane < 4) scales[lane] = (uint8_t)(__float_as_uint(scale) >> 8 * lane);
    if (format.scales != SCALES_F32 && lane == 0)
        *scales = format.scales == SCALES_E4M3 ? narrow_e4m3(scale) : (uint8_t)(__float_as_uint(scale) >> 23);
}

/* What a group would be after a stay in such a row, in place, by one warp. */
static __device__ void round_group(float *x, int n, const RowFormat &format) {
    const float scale = group_scale(group_maximum(x, n), format);
    for (int i = (int)threadIdx.x % 32; i < n; i += 32) {
        const float code = x[i] / scale;
        if (x[i] == x[i])
            x[i] = scale * (format.dtype == KV_F8 ? widen_e4m3(narrow_e4m3(code)) : widen_e2m1(narrow_e2m1(code)));
    }
}

/* By a whole block. */
static __device__ void store_row(uint8_t *row, const RowFormat &format, const float *quantised, const float *plain) {
    narrow_values(row + quantised_bytes(format), plain, format.plain, format.dtype == KV_F32);
    if (!has_codes(format)) return narrow_values(row, quantised, format.quantised, format.dtype == KV_F32);
    for (int group = (int)threadIdx.x / 32; group * format.group < format.quantised; group += (int)blockDim.x / 32) {
        const int first = group * format.group;
        narrow_group(row + (format.dtype == KV_F8 ? first : first / 2), row + value_bytes(format) + scale_size(format) * group,
                     quantised + first, min(format.group, format.quantised - first), format);
    }
}

/* A block writes a row. */
static __global__ void store_rows_kernel(uint8_t *base, RowFormat format, const DeviceRow *ids, const float *a, size_t a_stride,
                                         const float *b, size_t b_stride) {
    begin_kernel();
    const int id = ids[blockIdx.x].id;
    if (id < 0) return;
    store_row(base + (size_t)id * format.stride, format, a + blockIdx.x * a_stride, b + blockIdx.x * b_stride);
}

static void store_rows(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, const float *a, size_t a_stride,
                       const float *b, size_t b_stride) {
    if (!n_rows) return;
    launch(store_rows_kernel, n_rows, THREADS, 0, base, *format, ids, a, a_stride, b, b_stride);
}

/* A block takes a row of kv, or with blockIdx.y = 1 one of q. A thread has four neighbours of what is normed, or one of the pairs
 * that are rotated; the cached row is made from shared memory. */
static __global__ void
store_latents_kernel(uint8_t *base, const __grid_constant__ RowFormat format, const DeviceRow *ids, float *kv, int lora, int tail,
                     const float *weight, const __grid_constant__ Norm q, const float *cosine, const float *sine) {
    extern __shared__ __align__(16) float staged[];                 /* latent | rotated */
    __shared__ float of_warp[32];
    let_next_start();
    if (blockIdx.y) return norm_row(q, (int)blockIdx.x);
    const int fours = divide_up(lora, 4), at = 4 * (int)threadIdx.x, pair = (int)threadIdx.x - fours, half = tail / 2;
    float *row = kv + (size_t)blockIdx.x * (size_t)(lora + tail), *plain = staged + 4 * fours;
    const float4 w = load_four(weight + at, lora - at);
    wait_for_previous();
    const int id = ids[blockIdx.x].id;
    float4 v = load_four(row + at, lora - at);
    if (0 <= pair && pair < half) {
        const size_t angle = (size_t)blockIdx.x * (size_t)half + (size_t)pair;
        *(float2 *)(plain + 2 * pair) = rotate(row + lora + 2 * pair, 1, cosine[angle], sine[angle]);
    }
    const float scale = 1 / sqrtf(block_sum(of_warp, sum_squares(v)) / (float)lora + q.eps);
    if (pair < 0) {
        v = weighted(v, scale, w);
        store_four(row + at, v, lora - at);
        *(float4 *)(staged + at) = v;
    }
    __syncthreads();
    store_row(base + (size_t)id * format.stride, format, staged, plain);
}

static void store_latents(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *kv, int lora, int tail,
                          const float *weight, float *q, int rank, const float *q_weight, float eps, const float *cosine,
                          const float *sine) {
    const size_t width = (size_t)rank, shared = (size_t)(divide_up(lora, 4) * 4 + tail) * sizeof(float);
    const int threads = max(norm_threads(rank, 1), divide_up(divide_up(lora, 4) + tail / 2, 32) * 32);
    if (n_rows <= 0) return;
    launch(store_latents_kernel, dim3((unsigned)n_rows, 2), (unsigned)threads, shared, base, *format, ids, kv, lora, tail, weight,
           {.y = q, .x = q, .y_stride = width, .x_stride = width, .branch = NULL, .weight = q_weight, .dim = rank, .eps = eps,
            .report = NULL, .place = 0}, cosine, sine);
}

struct IndexKeys {
    uint8_t *base;
    RowFormat format;
    const DeviceRow *ids;
    float *k;
    int dim, half, heads;           /* half: pairs that are rotated */
    bool interleaved;
    const float *weight, *bias, *cosine, *sine, *head_weights;
    PassReport *report;
    int place, weights_place;
};

/* A block takes a row, a thread four neighbours of it. */
static __global__ void store_index_keys_kernel(const __grid_constant__ IndexKeys p) {
    extern __shared__ __align__(16) float staged[];
    __shared__ float sums[2][32];
    const int r = (int)blockIdx.x, thread = (int)threadIdx.x, at = 4 * thread, count = p.dim - at;
    const float *cosine = p.cosine + (size_t)r * (size_t)p.half, *sine = p.sine + (size_t)r * (size_t)p.half;
    let_next_start();
    const float4 weight = load_four(p.weight + at, count), bias = load_four(p.bias + at, count);
    wait_for_previous();
    const int id = p.ids[r].id;
    float *row = p.k + (size_t)r * (size_t)p.dim;
    float4 v = load_four(row + at, count);
    for (int i = thread; i < p.heads; i += (int)blockDim.x)
        if (!is_finite(p.head_weights[(size_t)r * (size_t)p.heads + (size_t)i])) report_bad(p.report, p.weights_place, r);
    const float mean = block_sum(sums[0], v.x + v.y + (v.z + v.w)) / (float)p.dim;
    v = make_float4(v.x - mean, count > 1 ? v.y - mean : 0, count > 2 ? v.z - mean : 0, count > 3 ? v.w - mean : 0);
    const float squares = block_sum(sums[1], count > 0 ? sum_squares(v) : 0);
    v = weighted(v, 1 / sqrtf(squares / (float)p.dim + 1e-6f), weight);
    v = make_float4(v.x + bias.x, v.y + bias.y, v.z + bias.z, v.w + bias.w);
    if (count > 0 && !is_finite(v)) report_bad(p.report, p.place, r);
    *(float4 *)(staged + at) = v;
    __syncthreads();
    for (int i = thread; i < p.half; i += (int)blockDim.x)
        rotate(staged + (p.interleaved ? 2 * i : i), p.interleaved ? 1 : p.half, cosine[i], sine[i]);
    __syncthreads();
    store_four(row + at, *(const float4 *)(staged + at), count);
    store_row(p.base + (size_t)id * p.format.stride, p.format, staged, staged);
}

static void store_index_keys(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *k, int dim,
                             const float *weight, const float *bias, int turned, bool interleaved, const float *cosine,
                             const float *sine, const float *head_weights, int heads, PassReport *report, int place,
                             int weights_place) {
    const unsigned threads = (unsigned)norm_threads(dim, 1);
    if (n_rows <= 0) return;
    launch(store_index_keys_kernel, (unsigned)n_rows, threads, threads * sizeof(float4),
           {.base = base, .format = *format, .ids = ids, .k = k, .dim = dim, .half = turned / 2, .heads = heads,
            .interleaved = interleaved, .weight = weight, .bias = bias, .cosine = cosine, .sine = sine,
            .head_weights = head_weights, .report = report, .place = place, .weights_place = weights_place});
}

/* ---- index scores */

enum {
    SCORE_THREADS = 512,            /* one block to a processor */
    SCORE_ROWS = 512,               /* query rows of one launch at most */
    SHARED_QUERIES = 8,             /* of them, that share one read of the keys at most */
    SCORE_WIDTH = 128,              /* of a key on the tensor cores; narrower ones count as filled up with zeros */
    SCORE_STEPS = SCORE_WIDTH / 16, /* instructions take 16 values of a key each */
    SCORE_TILES = 8,                /* by 8 columns at a time: heads of one query row or of several */
    SCORE_COLUMNS = 256,            /* of all query rows that share a read, at most */
    BATCH_QUERIES = SCORE_STEPS * SCORE_TILES * 16,     /* uint4 of 64 columns in shared memory */
    MAX_DEPTH = 4,                  /* of a warpgroup's pages on their way */
    COMING_BYTES = 20 << 10,        /* of them; more do not come faster */
    LONG_PART = 16,                 /* pages of a warpgroup; before so many, the first one comes sooner alone */
    LEAST_PAGES = 2,                /* of a block: with fewer blocks select_top's find room beside them */
    BINS = 2048,                    /* of the first 11 bits of a score's sortable key */
};

/* Blocks of neighbours that are all there is of a row's keys: what counts positions then counts theirs, one behind the other. */
struct Kept {
    const int *blocks;              /* [rows, most] ascending; NULL: all there are */
    int most, size;                 /* blocks of a row; keys of a block */

    __device__ Kept of(int r) const { return {blocks ? blocks + (size_t)r * most : NULL, most, size}; }
    __device__ int position(int i) const { return blocks ? blocks[i / size] * size + i % size : i; }
};

struct IndexShape {
    RowFormat format;
    int context_pages, heads, head_dim, capacity;
    int columns;                    /* of a query row: its heads, and zeros that fill them up */
    int together;                   /* query rows that share one read of the keys */
    float scale;
    int page_rows;                  /* PAGE_ROWS, or half of that: then a page of scores is two of keys */
    int context;                    /* scores of a row, at most */
    bool rows_made;                 /* the pass itself makes the rows */
    Kept kept;
};

/* Which query rows share a read, and how the reads are laid end to end. Each block makes it for itself. */
struct ScorePlan {
    int session[SCORE_ROWS];
    int last[SCORE_ROWS];           /* the row's position; -1: it selects its whole history and needs no scores */
    int members[SCORE_ROWS];        /* rows that share the read that begins with this row; 0: it shares an earlier one */
    int ends[SCORE_ROWS];           /* pages of all reads up to this row's */
    uint32_t starts[SCORE_ROWS / 32];       /* a bit per row: it begins a session's run */
};

/* How many of a row's visible scores have which first bits. index_scores counts them; select_top takes them and leaves zeros. */
static __device__ int score_bins[SCORE_ROWS][BINS];

/* A key whose unsigned order is the scores' order; -0 counts as 0, and NaN is below everything. No score has the key 0. */
static __device__ inline uint32_t sortable(float score) {
    uint32_t bits = __float_as_uint(score + 0.0f);
    return score != score ? 1 : bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

/* Rows [r, r + members) of one session share a read. Pages they need. */
static __device__ int pages_of(const ScorePlan &plan, int r, int members) {
    int last = -1;
    for (int i = r; i < r + members; i++) last = max(last, plan.last[i]);
    return divide_up(last + 1, PAGE_ROWS);
}

/* Row r shares the read of an earlier row of its session, or begins one: of how many rows? */
static __device__ int members_of(const ScorePlan &plan, int r, int n_rows, int together) {
    int word = r / 32, members = 0;
    uint32_t below = plan.starts[word] & ((2u << r % 32) - 1);
    while (!below) below = plan.starts[--word];     /* row 0 is a start, so the walk ends */
    if ((r - (32 * word + 31 - __clz((int)below))) % together) return 0;
    while (members < together && r + members < n_rows && plan.session[r + members] == plan.session[r]) members++;
    return members;
}

static __device__ void make_plan(ScorePlan &plan, const Row *rows, int n_rows, const IndexShape &shape) {
    const int r = (int)threadIdx.x, lane = r % 32;
    if (r < n_rows) {
        plan.session[r] = rows[r].session;
        plan.last[r] = rows[r].position >= shape.capacity ? rows[r].position : -1;
    }
    __syncthreads();
    uint32_t starts = __ballot_sync(~0u, r < n_rows && (r == 0 || plan.session[r] != plan.session[r - 1]));
    if (lane == 0) plan.starts[r / 32] = starts;
    __syncthreads();
    if (r < n_rows) {
        plan.members[r] = members_of(plan, r, n_rows, shape.together);
        plan.ends[r] = pages_of(plan, r, plan.members[r]);
    }
    __syncthreads();
    for (int i = lane, before = 0; i < divide_up(n_rows, 32) * 32 && r < 32; i += 32) {
        before += warp_prefix_sum(i < n_rows ? plan.ends[i] : 0);
        if (i < n_rows) plan.ends[i] = before;
        before = __shfl_sync(~0u, before, 31);
    }
    __syncthreads();
}

/* What is the same in all lanes, such that the compiler knows: the tensor cores' instructions may stand in no branch that lanes
 * could take apart. */
static __device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/* The first row whose read ends behind page `at` of all. */
static __device__ int read_at(const ScorePlan &plan, int n_rows, int at) {
    int low = 0, high = n_rows - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (plan.ends[middle] <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Where block `block`'s part of all pages begins: as many for each, but at the begin of a read that is near. Not inlined: its
 * divisions would take registers that the scores need. */
static __device__ __noinline__ int part_begin(const ScorePlan &plan, int n_rows, int block) {
    const unsigned all = (unsigned)plan.ends[n_rows - 1], each = all / gridDim.x, more = all - each * gridDim.x;
    const int at = (int)(each * (unsigned)block + more * (unsigned)block / gridDim.x),     /* all * block may need 64 bits */
              near = min(SCORE_THREADS / 128, (int)(each / 2));
    if (at >= (int)all) return at;
    const int r = read_at(plan, n_rows, at), begin = r ? plan.ends[r - 1] : 0;
    return at - begin <= near ? begin : plan.ends[r] - at <= near ? plan.ends[r] : at;
}

struct ScoreRead {                  /* a block's part of one read; its pages are PAGE_ROWS keys, in a page of the pool or two */
    const uint8_t *keys;
    const DevicePage *table;        /* of the session */
    int at, stop;                   /* pages of the session */
    int members;
    const float *q, *head_weights;  /* of the first member */
    float *scores;                  /* [members, context] */
    int context;
    const int *last;                /* [members] */
    int *bins;                      /* [members][BINS] in shared memory */
    Kept kept;                      /* of the first member, which then is the only one */

    __device__ const uint8_t *page(int id, const IndexShape &shape) const {
        return keys + (size_t)id * shape.page_rows * shape.format.stride;
    }

    /* The pages of the pool that hold a page of scores; page 0 of the pool where there is none, which may be read too. */
    __device__ int2 ids(int page, const IndexShape &shape) const {
        if (page >= stop || kept.blocks) return {0, 0};
        if (shape.page_rows == PAGE_ROWS) return {table[page].id, 0};
        return {table[2 * page].id, 2 * page + 1 < shape.context_pages ? table[2 * page + 1].id : 0};
    }

    __device__ const uint8_t *key(int s, const IndexShape &shape) const {
        const int position = kept.position(s);
        return page(table[position / shape.page_rows].id, shape) + (size_t)(position % shape.page_rows) * shape.format.stride;
    }

    /* Score of key `s` for member `row`. */
    __device__ void put(int row, int s, float score) const {
        if (row >= members || s > last[row]) return;
        scores[row * context + s] = score;
        atomicAdd(&bins[row * BINS + (int)(sortable(score) >> 21)], 1);
    }
};

/* ---- on the tensor cores: keys, 64 to a warpgroup and 16 to a warp, times the heads of all query rows of the read
 *
 * Which values of a sum an instruction gets from which lane does not matter as long as keys and queries agree. So a lane takes 16
 * neighbouring bytes of a key, 8 values or 16 or 32, and feeds four of them to one instruction and the next four to the next; of
 * e2m1 from eight neighbours 0, 4, 1, 5 and then the others. Codes are widened to bf16, which holds them exactly; the scale of an
 * e4m3 key multiplies the finished score, and those of e2m1, one for each lane's part, the values. Each warpgroup has a ring of
 * pages on their way into shared memory: from Hopper on one thread asks for all of a page, before that each for its part.
 */

/* A lane's part of two keys of the page, lane / 4 and 8 behind it in its warp's 16; the scale of one's score: 8 behind for odd
 * lanes; and of e2m1 what both keys' values are multiplied by. */
template <KvDtype KEYS> struct KeyPart {
    static constexpr int CHUNKS = KEYS == KV_F4 ? 1 : KEYS == KV_F8 ? 2 : 4;
    uint4 part[2][CHUNKS];
    float scale;
    uint32_t factor[2];
};

struct KeyRing {                    /* a warpgroup's */
    uint8_t *places;                /* [depth] pages */
    uint64_t *arrived;              /* [depth] barriers: a page is complete */
    int depth, bytes;               /* of a page */
    bool gathers;                   /* its keys lie in blocks here and there: each thread asks for its part */

    __device__ uint8_t *place(int turn) const { return places + turn * bytes; }
    __device__ void open(int turn) const { start_barrier(arrived + turn, gathers ? 128 : COPIERS); }
    __device__ void gather(int turn, const ScoreRead &read, int page, const IndexShape &shape) const {
        const int pieces = (int)shape.format.stride / 16;
        for (int i = (int)threadIdx.x % 128; i < PAGE_ROWS * pieces; i += 128) {
            const int s = page * PAGE_ROWS + i / pieces;
            const bool there = s <= read.last[0];
            start_copy_to_shared(place(turn) + 16 * i, read.key(there ? s : 0, shape) + i % pieces * 16, there);
        }
        arrive_with_copies(arrived + turn);
    }
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    static constexpr int COPIERS = 1;
    __device__ void begin(int turn, const ScoreRead &read, int page, int2 ids, const IndexShape &shape) const {
        if (gathers) return gather(turn, read, page, shape);
        if (threadIdx.x % 128) return;
        const int part = shape.page_rows * (int)shape.format.stride;
        expect_bytes(arrived + turn, bytes);
        start_bulk_copy(place(turn), read.page(ids.x, shape), part, arrived + turn);
        if (part < bytes) start_bulk_copy(place(turn) + part, read.page(ids.y, shape), part, arrived + turn);
    }
#else
    static constexpr int COPIERS = 128;
    __device__ void begin(int turn, const ScoreRead &read, int page, int2 ids, const IndexShape &shape) const {
        if (gathers) return gather(turn, read, page, shape);
        const int part = shape.page_rows * (int)shape.format.stride;
        for (int at = (int)threadIdx.x % 128 * 16; at < bytes; at += 128 * 16)
            start_copy_to_shared(place(turn) + at,
                                 at < part ? read.page(ids.x, shape) + at : read.page(ids.y, shape) + at - part, true);
        arrive_with_copies(arrived + turn);
    }
#endif

    /* Until the page of this turn is there; the barrier's phase is the parity of the rounds before. */
    __device__ void await(int turn, int round) const { wait_at(arrived + turn, round); }
};


/* Waits for the warpgroup's other threads. */
static __device__ inline void group_barrier(void) {
    asm volatile("bar.sync %0, 128;" : : "r"(1 + (int)threadIdx.x / 128) : "memory");
}

/* Neighbouring rows whose bytes lie in the same banks are read in another order of their parts. */
template <KvDtype KEYS>
static __device__ inline void take_keys(KeyPart<KEYS> &keys, const uint8_t *page, const IndexShape &shape) {
    constexpr int CHUNKS = KeyPart<KEYS>::CHUNKS;
    const int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 % 4 * 16 + lane / 4, stride = (int)shape.format.stride;
    const int bytes = KEYS == KV_F4 ? shape.head_dim / 2 : KEYS == KV_F8 ? shape.head_dim : 2 * shape.head_dim;
    const int swap = stride / 64 % 2 ? 0 : lane / 4 % 2;
#pragma unroll
    for (int i = 0; KEYS == KV_F4 && i < 2; i++) {
        const uint8_t *key = page + (first + 8 * i) * stride;
        const bool there = lane % 4 * 16 < bytes;
        keys.part[i][0] = there ? *(const uint4 *)(key + lane % 4 * 16) : make_uint4(0, 0, 0, 0);
        keys.factor[i] = e2m1_factor(there ? *(const uint32_t *)(key + bytes) : 0);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int chunk = 0; chunk + 1 < CHUNKS; chunk += 2) {
            const uint8_t *key = page + (first + 8 * i) * stride + lane % 4 * 16;
            const int at = 64 * (chunk + swap), other = 64 * (chunk + 1 - swap), width = bytes - lane % 4 * 16;
            const uint4 x = at < width ? *(const uint4 *)(key + at) : make_uint4(0, 0, 0, 0);
            const uint4 y = other < width ? *(const uint4 *)(key + other) : make_uint4(0, 0, 0, 0);
            keys.part[i][chunk] = swap ? y : x;
            keys.part[i][chunk + 1] = swap ? x : y;
        }
    keys.scale = KEYS == KV_F8   ? *(const float *)(page + (first + lane % 2 * 8) * stride + bytes)
                 : KEYS == KV_F4 ? __uint_as_float((127 + E2M1_SHIFT) << 23)
                                 : 1;
}

/* Two e4m3 values as bf16. */
static __device__ inline uint32_t widen_pair(uint32_t pair) {
    const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pair, __NV_E4M3);
    const float2 x = __half22float2(half);
    const __nv_bfloat162 wide = __floats2bfloat162_rn(x.x, x.y);
    return *(const uint32_t *)&wide;
}

/* What each instruction takes of the keys. */
template <KvDtype KEYS> static __device__ inline void widen_keys(uint32_t (&a)[SCORE_STEPS][4], const KeyPart<KEYS> &keys) {
#pragma unroll
    for (int step = 0; KEYS == KV_F4 && step < SCORE_STEPS; step += 2)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 &part = keys.part[i][0];
            const uint4 wide = widen_eight(step < 4 ? step ? part.y : part.x : step == 4 ? part.z : part.w, keys.factor[i]);
            a[step][i] = wide.x, a[step][i + 2] = wide.y, a[step + 1][i] = wide.z, a[step + 1][i + 2] = wide.w;
        }
#pragma unroll
    for (int step = 0; KEYS != KV_F4 && step < SCORE_STEPS; step++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 &part = keys.part[i][KEYS == KV_F8 ? step / 4 : step / 2];
            const uint32_t words[4] = {part.x, part.y, part.z, part.w};
            a[step][i] = KEYS == KV_F8 ? widen_pair(words[step % 4] & 0xffff) : words[step % 2 * 2];
            a[step][i + 2] = KEYS == KV_F8 ? widen_pair(words[step % 4] >> 16) : words[step % 2 * 2 + 1];
        }
}

/* The queries of a read in shared memory, bf16: batches of 64 columns, in them for each step, for each eight columns, 8 x 8
 * values twice. Column `head` of a row is its head, or zeros; what lies behind the last row counts for nobody. The weights
 * follow, scaled. begin_pages is called when the first queries are on their way, so that they do not come behind all pages. */
template <int TILES, KvDtype KEYS, typename Begin>
static __device__ void stage_queries(uint4 *queries, float *weights, const ScoreRead &read, const IndexShape &shape,
                                     Begin begin_pages) {
    constexpr int OF = KEYS == KV_F4 ? 8 : KEYS == KV_F8 ? 4 : 2;           /* steps that a lane's 16 bytes go to */
    constexpr int AHEAD = 2, LANES = 4;
    const int of_row = TILES < SCORE_TILES ? 8 * TILES : shape.columns, columns = read.members * of_row;
    const int thread = (int)threadIdx.x;
    const int weighed = thread < columns ? thread % of_row : shape.heads;
    const float weight = weighed < shape.heads ? read.head_weights[thread / of_row * shape.heads + weighed] : 0;
    for (int first = thread; first == thread || first < columns * SCORE_STEPS; first += AHEAD * SCORE_THREADS) {
        float4 x[AHEAD][LANES];                     /* a thread takes a column's part in a step, of all lanes */
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int i = first + j * SCORE_THREADS, column = i / (8 * SCORE_STEPS) * 8 + i % 8, step = i / 8 % SCORE_STEPS;
            if (column >= columns) break;
            const int row = column / of_row, head = column % of_row;
            const unsigned at = (unsigned)step / OF * LANES * OF + (unsigned)step % OF;    /* of the first lane's four values */
            const float *q = read.q + ((size_t)row * shape.heads + head) * shape.head_dim
                             + (KEYS == KV_F4 ? at / 2 * 8 + at % 2 * 2 : 4 * at);
            const int left = head < shape.heads ? shape.head_dim - 4 * (int)at : 0;
#pragma unroll
            for (int lane = 0; lane < LANES; lane++) {
                x[j][lane] = {0, 0, 0, 0};
                if (lane * 4 * OF >= left) continue;
                if constexpr (KEYS == KV_F4) {
                    const float2 *pairs = (const float2 *)(q + lane * 4 * OF);
                    x[j][lane] = {pairs[0].x, pairs[2].x, pairs[0].y, pairs[2].y};
                } else x[j][lane] = *(const float4 *)(q + lane * 4 * OF);
            }
        }
        if (first == thread) begin_pages();
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int i = first + j * SCORE_THREADS, tile = i / (8 * SCORE_STEPS), step = i / 8 % SCORE_STEPS;
            if (8 * tile >= columns) break;
            const float4 (&v)[LANES] = x[j];
            uint4 *to = queries + tile / SCORE_TILES * BATCH_QUERIES + (step * SCORE_TILES + tile % SCORE_TILES) * 16 + i % 8;
            to[0] = make_uint4(pair_bf16(v[0].x, v[0].y), pair_bf16(v[1].x, v[1].y), pair_bf16(v[2].x, v[2].y),
                               pair_bf16(v[3].x, v[3].y));
            to[8] = make_uint4(pair_bf16(v[0].z, v[0].w), pair_bf16(v[1].z, v[1].w), pair_bf16(v[2].z, v[2].w),
                               pair_bf16(v[3].z, v[3].w));
        }
    }
    if (thread < columns) weights[thread] = weight * shape.scale;
}

/* sums = keys (64 x 128) times COLUMNS columns, 64 or 32: no column's bits depend on which. */
#if defined __CUDA_ARCH_FEAT_SM90_ALL
#define FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define HALF(x) FOUR(x, 0), FOUR(x, 4), FOUR(x, 8), FOUR(x, 12)
#define SUMS(x) HALF(x), FOUR(x, 16), FOUR(x, 20), FOUR(x, 24), FOUR(x, 28)

/* sums (+)= keys (64 x 16) times the columns, begun only. The 8 x 8 blocks of an instruction lie 128 bytes apart along a key, 256
 * from column to column; so says its description of them. */
template <int STEP, int COLUMNS>
static __device__ inline void begin_step(float (&sums)[COLUMNS / 2], const uint32_t (&a)[4], uint32_t queries) {
    if constexpr (COLUMNS == 32)
        asm volatile("{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %21, 0;\nmov.b64 b, {%20, %22};\n"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,"
                     "%15}, {%16,%17,%18,%19}, b, add, 1, 1, 0;\n}"
                     : HALF(sums) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(queries + STEP * SCORE_TILES * 16),
                       "n"(STEP), "n"(256 / 16));
    else
        asm volatile("{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %37, 0;\nmov.b64 b, {%36, %38};\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,"
                     "%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, b, add, "
                     "1, 1, 0;\n}"
                     : SUMS(sums) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(queries + STEP * SCORE_TILES * 16),
                       "n"(STEP), "n"(256 / 16));
}

template <int COLUMNS>
static __device__ inline void multiply_keys(float (&sums)[COLUMNS / 2], const uint32_t (&a)[SCORE_STEPS][4],
                                            const uint4 *queries) {
    const uint32_t b = (uint32_t)__cvta_generic_to_shared(queries) / 16 | 128 / 16 << 16;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    begin_step<0, COLUMNS>(sums, a[0], b), begin_step<1, COLUMNS>(sums, a[1], b), begin_step<2, COLUMNS>(sums, a[2], b);
    begin_step<3, COLUMNS>(sums, a[3], b), begin_step<4, COLUMNS>(sums, a[4], b), begin_step<5, COLUMNS>(sums, a[5], b);
    begin_step<6, COLUMNS>(sums, a[6], b), begin_step<7, COLUMNS>(sums, a[7], b);
    if constexpr (COLUMNS == 32)
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : HALF(sums) : : "memory");
    else asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : SUMS(sums) : : "memory");
}

#else
template <int COLUMNS>
static __device__ inline void multiply_keys(float (&sums)[COLUMNS / 2], const uint32_t (&a)[SCORE_STEPS][4],
                                            const uint4 *queries) {
    const uint32_t *b = (const uint32_t *)queries + threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < COLUMNS / 8; tile++) {
        float *x = sums + 4 * tile;
        x[0] = x[1] = x[2] = x[3] = 0;
#pragma unroll
        for (int step = 0; step < SCORE_STEPS; step++)
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
                : "r"(a[step][0]), "r"(a[step][1]), "r"(a[step][2]), "r"(a[step][3]),
                  "r"(b[(step * SCORE_TILES + tile) * 64]), "r"(b[(step * SCORE_TILES + tile) * 64 + 32]));
    }
}
#endif

/* A NaN stays one. */
static __device__ inline float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

/* total += weight * relu(sum) over the lane's columns of TILES tiles, for either of its keys. */
template <int TILES> static __device__ inline void weigh_heads(float (&total)[2], const float *sums, const float *weights) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const float2 weight = *(const float2 *)(weights + 8 * tile + 2 * ((int)threadIdx.x % 4));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            total[i] = fmaf(weight.x, relu(sums[4 * tile + 2 * i]), total[i]);
            total[i] = fmaf(weight.y, relu(sums[4 * tile + 2 * i + 1]), total[i]);
        }
    }
}

/* The sum over four lanes of a in lane 0 of them, of b in lane 1, of c in lane 2, of d in lane 3. */
static __device__ inline float sum_lanes(float a, float b, float c, float d) {
    const bool high = threadIdx.x & 2, odd = threadIdx.x & 1;
    const float x = (high ? c : a) + __shfl_xor_sync(~0u, high ? a : c, 2);
    const float y = (high ? d : b) + __shfl_xor_sync(~0u, high ? b : d, 2);
    return (odd ? y : x) + __shfl_xor_sync(~0u, odd ? x : y, 1);
}

/* Scores of a page, COLUMNS after the other. A row has TILES tiles of columns, or 8 and then more batches. */
template <int TILES, KvDtype KEYS, int COLUMNS>
static __device__ inline void score_page(const ScoreRead &read, int page, const KeyPart<KEYS> &keys, const uint4 *queries,
                                         const float *weights, const IndexShape &shape) {
    constexpr int ROWS = COLUMNS / (8 * TILES);     /* of a batch */
    const int lane = (int)threadIdx.x % 32, s = page * PAGE_ROWS + (int)threadIdx.x / 32 % 4 * 16 + lane / 4 + lane % 2 * 8;
    const int columns = read.members * shape.columns;
    const int of_row = TILES < SCORE_TILES ? 1 : shape.columns / (8 * SCORE_TILES);     /* batches */
    uint32_t a[SCORE_STEPS][4];
    float total[ROWS < 2 ? 2 : ROWS][2] = {};
    widen_keys(a, keys);
    for (int first = 0, part = 0, row = 0; first < columns; first += COLUMNS) {
        float sums[COLUMNS / 2];
        multiply_keys<COLUMNS>(sums, a, queries + first * (BATCH_QUERIES / (8 * SCORE_TILES)));
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (ROWS == 1 || row + i < read.members)
                weigh_heads<TILES>(total[i], sums + 4 * TILES * i, weights + first + 8 * TILES * i);
        if (++part < of_row) continue;
#pragma unroll
        for (int i = 0; i < ROWS && row + i < read.members; i += 2) {
            const float score = sum_lanes(total[i][0], total[i][1], total[i + 1][0], total[i + 1][1]);
            if (ROWS > 1 || lane % 4 < 2) read.put(row + i + lane / 2 % 2, s, score * keys.scale);
            total[i][0] = total[i][1] = total[i + 1][0] = total[i + 1][1] = 0;
        }
        part = 0;
        row += ROWS;
    }
}

/* The warpgroups take pages in turn.  */
template <int TILES, KvDtype KEYS, int COLUMNS>
static __device__ void score_pages(const ScoreRead &read, uint4 *queries, float *weights, const KeyRing &ring,
                                   const IndexShape &shape) {
    constexpr int GROUPS = SCORE_THREADS / 128;
    const int first = read.at + uniform((int)threadIdx.x / 128);
    if (threadIdx.x % 128 == 0)
        for (int turn = 0; turn < ring.depth; turn++) ring.open(turn);
    show_to_products();
    int2 ids[MAX_DEPTH], coming = read.ids(first + ring.depth * GROUPS, shape);
#pragma unroll
    for (int turn = 0; turn < MAX_DEPTH; turn++) ids[turn] = read.ids(first + turn * GROUPS, shape);
    __syncthreads();
    wait_for_previous();
    stage_queries<TILES, KEYS>(queries, weights, read, shape, [&] {
#pragma unroll
        for (int turn = 0; turn < MAX_DEPTH; turn++)
            if (turn < ring.depth && first + turn * GROUPS < read.stop)
                ring.begin(turn, read, first + turn * GROUPS, ids[turn], shape);
    });
    show_to_products();
    __syncthreads();
    for (int page = first, turn = 0, round = 0; page < read.stop; page += GROUPS) {
        KeyPart<KEYS> keys;
        ring.await(turn, round);
        take_keys(keys, ring.place(turn), shape);
        group_barrier();
        const int next = page + ring.depth * GROUPS;
        if (next < read.stop) ring.begin(turn, read, next, coming, shape);
        coming = read.ids(next + GROUPS, shape);
        score_page<TILES, KEYS, COLUMNS>(read, page, keys, queries, weights, shape);
        if (++turn == ring.depth) turn = 0, round++;
    }
}

/* ---- any format, any width: a lane scores a key in f32, eight heads at a time */

static __device__ void score_plainly(const ScoreRead &read, const IndexShape &shape) {
    for (int tile = 2 * read.at + (int)threadIdx.x / 32; tile < 2 * read.stop; tile += SCORE_THREADS / 32) {
        const int s = 32 * tile + (int)threadIdx.x % 32;
        const uint8_t *key = read.key(min(s, read.last[read.members - 1]), shape);
        const float *q = read.q, *head_weights = read.head_weights;
        for (int row = 0; row < read.members; row++, q += shape.heads * shape.head_dim, head_weights += shape.heads) {
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
                    if (first + h < shape.heads) total = fmaf(head_weights[first + h] * shape.scale, relu(dots[h]), total);
            }
            read.put(row, s, total);
        }
    }
}

/* What the block has counted, to what all have. */
static __device__ void add_bins(const int *bins, int first_row, int members) {
    __syncthreads();
    for (int i = (int)threadIdx.x; i < members * BINS; i += SCORE_THREADS)
        if (bins[i]) atomicAdd(&score_bins[first_row + i / BINS][i % BINS], bins[i]);
    __syncthreads();
}

/* Every block takes a part of all pages, which may span several reads. scores: [n_rows, context]; those behind a row's own
 * position are not written. TILES: of 8 columns to a row's heads; 0: not on the tensor cores. room: bytes of shared memory for
 * what a read needs there: queries, weights, counts, and pages on their way in the rest. */
template <int TILES, KvDtype KEYS> static __global__ void __launch_bounds__(SCORE_THREADS, 1)
index_scores(float *scores, const float *q, const float *head_weights, const uint8_t *keys, const DevicePage *pages,
             const Row *rows, int n_rows, const __grid_constant__ IndexShape shape, int room) {
    extern __shared__ uint4 queries[];
    __shared__ ScorePlan plan;
    __shared__ uint64_t arrived[SCORE_THREADS / 128][MAX_DEPTH];
    let_next_start();                               /* select_top takes its place where this leaves room, and waits */
    if (shape.rows_made) wait_for_previous();
    make_plan(plan, rows, n_rows, shape);
    const int end = uniform(part_begin(plan, n_rows, (int)blockIdx.x + 1));
    for (int at = uniform(part_begin(plan, n_rows, (int)blockIdx.x)), stop; at < end; at = stop) {
        const int r = uniform(read_at(plan, n_rows, at)), begin = uniform(r ? plan.ends[r - 1] : 0);
        const int members = uniform(plan.members[r]);
        stop = min(end, uniform(plan.ends[r]));
        const int batches = TILES ? divide_up(members * shape.columns, 8 * SCORE_TILES) : 0;
        float *weights = (float *)(queries + batches * BATCH_QUERIES);
        int *bins = (int *)(weights + batches * 8 * SCORE_TILES);
        const ScoreRead read = {keys, pages + (size_t)plan.session[r] * shape.context_pages, at - begin, stop - begin, members,
                                q + (size_t)r * shape.heads * shape.head_dim, head_weights + (size_t)r * shape.heads,
                                scores + (size_t)r * shape.context, shape.context, plan.last + r, bins, shape.kept.of(r)};
        for (int i = (int)threadIdx.x; i < members * BINS; i += SCORE_THREADS) bins[i] = 0;
        if constexpr (TILES) {
            const int page_bytes = PAGE_ROWS * (int)shape.format.stride, group = uniform((int)threadIdx.x / 128);
            uint8_t *places = (uint8_t *)(bins + members * BINS);
            const int left = room - (int)(places - (uint8_t *)queries);
            const int depth = max(1, min(min(MAX_DEPTH, COMING_BYTES / page_bytes), left / page_bytes / (SCORE_THREADS / 128)));
            const KeyRing ring = {places + group * depth * page_bytes, arrived[group], depth, page_bytes,
                                  shape.kept.blocks != NULL};
            if constexpr (TILES < SCORE_TILES)
                if (8 * TILES * members <= 32) score_pages<TILES, KEYS, 32>(read, queries, weights, ring, shape);
                else score_pages<TILES, KEYS, 64>(read, queries, weights, ring, shape);
            else score_pages<TILES, KEYS, 64>(read, queries, weights, ring, shape);
        } else {
            __syncthreads();
            wait_for_previous();
            score_plainly(read, shape);
        }
        add_bins(bins, r, members);
    }
    wait_for_previous();                            /* in a block that had nothing to do */
}

/* ---- the k best
 *
 * A cluster of blocks takes a row, and each warp a part of its positions. The k-th key is found 11 bits at a time. The first are
 * what index_scores has counted, so that the scores are read once: what may be among the best goes to a list of the warp, in
 * ascending order, and all that follows looks at the lists. A warp whose list is too short (many equal scores) reads its scores
 * again instead. Blocks of a cluster add what they count in each other's shared memory. Before Hopper one block takes a row.
 */

enum {
    SELECT_THREADS = 512,           /* two blocks to a processor */
    SELECT_WARPS = SELECT_THREADS / 32,
    SELECT_STEP = 128,              /* positions a warp visits at a time, four to a lane */
    SELECT_SPAN = 4096,             /* positions of a block for which another one is worth its while */
    LEAST_SPLIT = 4,                /* blocks: fewer gain no more than they spend on each other */
    WIDE_SPAN = 8192,               /* the same from eight blocks on */
    LIST_LENGTH = 768,              /* of a warp */
    LIST_BYTES = SELECT_WARPS * LIST_LENGTH * (int)(sizeof(uint32_t) + sizeof(uint16_t)),
};

struct SelectShared {
    int mine[BINS];                 /* counts of this block */
    int all[2][BINS];               /* counts of the cluster, of the second bits and the third; a block adds up a part of them */
    int sums[SELECT_WARPS];
    int2 counts[SELECT_WARPS];      /* of each warp: keys above the threshold, and at it */
    int2 total;                     /* of the block */
    int bin, wanted;                /* where the k-th key lies, and its rank within the bin */
    bool whole;                     /* all of the bin is wanted */
};

/* What a warp still has to look at: a list, or all its positions. */
struct Candidates {
    const float *scores;            /* of the row */
    uint32_t *keys;                 /* [LIST_LENGTH] ascending positions */
    uint16_t *places;               /* behind the first */
    int first, last;                /* the warp's positions */
    int n;                          /* of the list, or positions */
    bool listed;
    Kept kept;                      /* of the row */

    __device__ uint32_t key(int i) const { return i >= n ? 0 : listed ? keys[i] : sortable(scores[first + i]); }
    __device__ int position(int i) const { return kept.position(first + (listed ? places[i] : i)); }
};

/* Each thread's four bins: those behind the bins of lower threads, the highest bin first. */
static __device__ inline int my_bins(void) { return BINS - 4 - 4 * (int)threadIdx.x; }

/* Finds the bin of the wanted-th highest key; count: of the thread's bins. */
static __device__ void find_bin(SelectShared &shared, int4 count, int wanted) {
    const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32, mine = count.x + count.y + count.z + count.w;
    const int of_warp = (int)__reduce_add_sync(~0u, (unsigned)mine);
    if (lane == 0) shared.sums[warp] = of_warp;
    __syncthreads();
    const int before = (int)__reduce_add_sync(~0u, lane < warp ? (unsigned)shared.sums[lane % SELECT_WARPS] : 0);
    if (before < wanted && wanted <= before + of_warp) {    /* the same for the whole warp */
        const int counts[4] = {count.w, count.z, count.y, count.x};
        int rank = wanted - before - warp_prefix_sum(mine) + mine;
        if (0 < rank && rank <= mine)
#pragma unroll
            for (int i = 0; i < 4; rank -= counts[i++])
                if (0 < rank && rank <= counts[i]) {
                    shared.bin = my_bins() + 3 - i;
                    shared.wanted = rank;
                    shared.whole = rank == counts[i];
                }
    }
    __syncthreads();
}

/* The thread's bins of what all blocks of the cluster have counted. Each block adds up a part of the bins. */
static __device__ int4 share_bins(SelectShared &shared, int *all) {
    const int split = cluster_size(), owner = (int)threadIdx.x / (SELECT_THREADS / split);
    int4 *mine = (int4 *)(shared.mine + my_bins());
    __syncthreads();
    const int4 count = *mine;
    *mine = {0, 0, 0, 0};
    if (split == 1) return count;
    const int counts[4] = {count.x, count.y, count.z, count.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (counts[i]) cluster_add(all + my_bins() + i, owner, counts[i]);
    cluster_arrive();
    cluster_wait();
    return cluster_read((const int4 *)(all + my_bins()), owner);
}

/* The lowest score of a bin: none below it is in that bin or above. Where bits are no number, nothing can be left out. */
static __device__ inline float lowest_score(int bin) {
    const uint32_t key = (uint32_t)bin << 21;
    return __uint_as_float(key & 0x80000000 ? key & 0x7fffffff : ~key);
}

/* A lane's next scores from position `base` of the warp on. */
static __device__ inline void load_scores(float4 (&x)[4], const Candidates &list, int base) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int s = base + SELECT_STEP * j + 4 * ((int)threadIdx.x % 32);
        if (s < list.last) x[j] = __ldcg((const float4 *)(list.scores + s));
    }
}

/* Lists what is in the bin or above, as scores for the time being. next: the first scores. */
static __device__ void list_candidates(Candidates &list, int bin, float4 (&next)[4]) {
    const int lane = (int)threadIdx.x % 32;
    const float lowest = lowest_score(bin);
    int n = 0;
    for (int base = list.first; base < list.last; base += 4 * SELECT_STEP) {
        const float4 x[4] = {next[0], next[1], next[2], next[3]};
        load_scores(next, list, base + 4 * SELECT_STEP);
        uint32_t taken = 0, counts = 0;             /* a bit for each of the lane's scores, and a byte for each j */
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float score[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
            const int left = list.last - base - SELECT_STEP * j - 4 * lane;
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < left && !(score[i] < lowest)) taken |= 1u << (4 * j + i), counts += 1u << 8 * j;
        }
        const uint32_t until = (uint32_t)warp_prefix_sum((int)counts), all = __shfl_sync(~0u, until, 31), before = until - counts;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float score[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
            const int s = base + SELECT_STEP * j + 4 * lane;
            int at = n + (int)(before >> 8 * j & 255);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (taken >> (4 * j + i) & 1 && at < LIST_LENGTH) {
                    list.keys[at] = __float_as_uint(score[i]);
                    list.places[at++] = (uint16_t)(s + i - list.first);
                }
            n += (int)(all >> 8 * j & 255);
        }
    }
    list.listed = n <= LIST_LENGTH && list.last - list.first <= 1 << 16;
    list.n = list.listed ? n : list.last - list.first;
    __syncwarp();
}

/* Counts the second bits of what is in the bin; the list has keys from now on. */
static __device__ void count_second_bits(int *bins, const Candidates &list, uint32_t bin) {
#pragma unroll 2
    for (int i = (int)threadIdx.x % 32; i < list.n; i += 32) {
        const uint32_t key = sortable(list.listed ? __uint_as_float(list.keys[i]) : list.scores[list.first + i]);
        if (key >> 21 == bin) atomicAdd(&bins[key >> 10 & (BINS - 1)], 1);
        if (list.listed) list.keys[i] = key;
    }
}

/* The k-th highest key of the row, or one below it and above all that are not selected; shared.wanted keys equal to it are
 * selected. bins: of the first bits, which it zeroes. */
static __device__ uint32_t find_threshold(SelectShared &shared, Candidates &list, int *bins, int k) {
    const int lane = (int)threadIdx.x % 32;
    int4 *first_bits = (int4 *)(bins + my_bins());
    const int4 counts = __ldcg(first_bits);
    float4 scores[4];
    load_scores(scores, list, list.first);
    find_bin(shared, counts, k);
    uint32_t threshold = (uint32_t)shared.bin;
    list_candidates(list, (int)threshold, scores);
    count_second_bits(shared.mine, list, threshold);
    find_bin(shared, share_bins(shared, shared.all[0]), shared.wanted);
    if (cluster_rank() == 0) *first_bits = {0, 0, 0, 0};
    threshold = threshold << 11 | (uint32_t)shared.bin;
    if (shared.whole) {                             /* the highest key below the bin, none of which is wanted */
        if (threadIdx.x == 0) shared.wanted = 0;
        return max(threshold << 10, 1u) - 1;
    }
#pragma unroll 4
    for (int i = lane; i < list.n; i += 32) {
        const uint32_t key = list.key(i);
        if (key >> 10 == threshold) atomicAdd(&shared.mine[key & (BINS / 2 - 1)], 1);
    }
    find_bin(shared, share_bins(shared, shared.all[1]), shared.wanted);
    return threshold << 10 | (uint32_t)shared.bin;
}

/* How many of the warp's keys are above the threshold, and at it. */
static __device__ int2 count_candidates(const Candidates &list, uint32_t threshold) {
    int2 count = {0, 0};
#pragma unroll 4
    for (int i = (int)threadIdx.x % 32; i < list.n; i += 32) {
        const uint32_t key = list.key(i);
        count.x += key > threshold;
        count.y += key == threshold;
    }
    return {(int)__reduce_add_sync(~0u, (unsigned)count.x), (int)__reduce_add_sync(~0u, (unsigned)count.y)};
}

/* Writes the warp's selected positions. before: keys above the threshold and at it, ahead of the warp's. */
static __device__ void collect(int *ids, const Candidates &list, uint32_t threshold, int wanted, int2 before) {
    const int lane = (int)threadIdx.x % 32;
    const uint32_t below = (1u << lane) - 1;
    for (int base = 0; base < list.n; base += 32) {
        const int i = base + lane;
        const uint32_t key = list.key(i);
        const uint32_t above = __ballot_sync(~0u, key > threshold), equal = __ballot_sync(~0u, key == threshold);
        const int higher = before.x + __popc(above & below), same = before.y + __popc(equal & below);
        if (key > threshold || (key == threshold && same < wanted)) ids[higher + min(same, wanted)] = list.position(i);
        before.x += __popc(above);
        before.y += __popc(equal);
    }
}

/* How many keys of the row are above the threshold, and at it, ahead of the warp's own `count`. The last of its barriers is left
 * for later. */
static __device__ int2 count_before(SelectShared &shared, int2 count) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    if (lane == 0) shared.counts[warp] = count;
    __syncthreads();
    const int2 of_lane = lane < SELECT_WARPS ? shared.counts[lane] : int2{0, 0};
    const int above_here = (int)__reduce_add_sync(~0u, (unsigned)of_lane.x);
    const int equal_here = (int)__reduce_add_sync(~0u, (unsigned)of_lane.y);
    if (threadIdx.x == 0) shared.total = {above_here, equal_here};
    cluster_arrive();
    cluster_wait();
    const int2 of_rank = lane < cluster_rank() ? cluster_read(&shared.total, lane) : int2{0, 0};
    const int above = of_rank.x + (lane < warp ? of_lane.x : 0), equal = of_rank.y + (lane < warp ? of_lane.y : 0);
    cluster_arrive();                               /* nothing more is read from other blocks */
    return {(int)__reduce_add_sync(~0u, (unsigned)above), (int)__reduce_add_sync(~0u, (unsigned)equal)};
}

/* What there is to select from: of row r the first rows[r].position / each + 1 of its scores. */
struct Scored {
    const float *scores;            /* [rows, stride] */
    size_t stride;
    const Row *rows;
    int each;                       /* positions to a score */
    bool rows_made;                 /* the pass itself makes the rows */
    Kept kept;
};

static __global__ void __launch_bounds__(SELECT_THREADS, 2)
select_top(int *ids, int *counts, int capacity, Scored from) {
    extern __shared__ uint32_t lists[];
    __shared__ SelectShared shared;
    const int split = cluster_size(), rank = cluster_rank(), r = (int)blockIdx.x / split;
    const int thread = (int)threadIdx.x, warp = thread / 32;
    let_next_start();
    for (int i = thread; i < 3 * BINS; i += SELECT_THREADS) shared.mine[i] = 0;     /* and `all` behind it */
    cluster_arrive();
    if (from.rows_made) wait_for_previous();
    const int visible = (from.rows[r].position + from.each) / from.each, k = min(visible, capacity);
    ids += (size_t)r * capacity;
    cluster_wait();
    wait_for_previous();
    if (rank == 0 && thread == 0) counts[r] = k;
    if (visible <= capacity) {                      /* while everything fits, the selection is the whole history */
        const Kept kept = from.kept.of(r);
        for (int i = rank * SELECT_THREADS + thread; i < capacity; i += split * SELECT_THREADS)
            ids[i] = i < k ? kept.position(i) : -1;
        return;
    }
    const int part = divide_up(visible, split * SELECT_WARPS * SELECT_STEP) * SELECT_STEP;
    const int first = min((rank * SELECT_WARPS + warp) * part, visible);
    uint16_t *places = (uint16_t *)(lists + SELECT_WARPS * LIST_LENGTH) + warp * LIST_LENGTH;
    Candidates list = {from.scores + r * from.stride, lists + warp * LIST_LENGTH, places, first, min(first + part, visible), 0,
                       true, from.kept.of(r)};
    const uint32_t threshold = find_threshold(shared, list, score_bins[r], k);
    const int2 before = count_before(shared, count_candidates(list, threshold));
    collect(ids, list, threshold, shared.wanted, before);
    cluster_wait();                                 /* a block's shared memory lives until everyone has read it */
}

/* The largest cluster that the device has room for. */
static int largest_split(void) {
    static int largest;
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    if (largest) return largest;
    config.blockDim = dim3(SELECT_THREADS);
    config.dynamicSmemBytes = LIST_BYTES;
    config.attrs = &cluster;
    config.numAttrs = 1;
    cluster.id = cudaLaunchAttributeClusterDimension;
    for (int size = gpu.major >= 9 ? 16 : 1; !largest; size /= 2) {
        int clusters = 0;
        config.gridDim = dim3((unsigned)size);
        cluster.val.clusterDim.x = (unsigned)size;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        if (size > 1 && cudaOccupancyMaxActiveClusters(&clusters, select_top, &config) != cudaSuccess) clusters = 0;
        if (size == 1 || clusters) largest = size;
    }
    cudaGetLastError();                             /* a size that it cannot have */
    return largest;
}

/* Blocks of a row: as many as keep the processors busy; more than eight where each still has much to do. */
static void launch_select(int *ids, int *counts, int capacity, const Scored &from, int n_rows) {
    const int context = (int)from.stride;
    CUDA(cudaFuncSetAttribute(select_top, cudaFuncAttributeMaxDynamicSharedMemorySize, LIST_BYTES));
    if (gpu.major >= 9) CUDA(cudaFuncSetAttribute(select_top, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    int split = 1;
    while (context > SELECT_SPAN && 2 * split <= largest_split() && 2 * split * n_rows <= gpu.multiprocessors &&
           (split < LEAST_SPLIT || context > split * (split < 8 ? SELECT_SPAN : WIDE_SPAN)))
        split *= 2;
    launch_early(select_top, dim3((unsigned)(split * n_rows)), SELECT_THREADS, LIST_BYTES, split, ids, counts, capacity, from);
}

/* How the keys lie: in a cache of e4m3 plain values are bf16. */
static KvDtype keys_of(const RowFormat &format) { return format.dtype == KV_F8 && !format.quantised ? KV_BF16 : format.dtype; }

/* Whether the tensor cores can take the keys: whole 16 bytes of bf16, of e4m3 with one scale, of e2m1 with a scale for each. */
static bool suits_tensor_cores(const IndexShape &shape) {
    const RowFormat &format = shape.format;
    const KvDtype keys = keys_of(format);
    if (keys == KV_F32 || shape.head_dim > SCORE_WIDTH || shape.columns > SCORE_COLUMNS) return false;
    if (keys == KV_BF16) return shape.head_dim % 8 == 0;
    if (format.quantised != shape.head_dim || shape.head_dim % (keys == KV_F4 ? EXPONENT_BLOCK : 16)) return false;
    return keys == KV_F4 ? format.group == EXPONENT_BLOCK && format.scales == SCALES_E8M0
                         : format.group >= shape.head_dim && format.scales == SCALES_F32;
}

/* Bytes of shared memory for the longest read, with a page to each warpgroup. */
static int room_of_read(const IndexShape &shape) {
    const int batches = divide_up(shape.together * shape.columns, 8 * SCORE_TILES);
    const int batch_bytes = BATCH_QUERIES * (int)sizeof(uint4) + 8 * SCORE_TILES * (int)sizeof(float);
    const int page_bytes = PAGE_ROWS * (int)shape.format.stride;
    return batches * batch_bytes + shape.together * BINS * (int)sizeof(int) + SCORE_THREADS / 128 * page_bytes;
}

/* The kernel for the tiles of a row's heads, and for the keys' format. */
template <KvDtype KEYS> static auto scores_kernel(int columns) {
    return columns == 8    ? index_scores<1, KEYS>
           : columns == 16 ? index_scores<2, KEYS>
           : columns == 32 ? index_scores<4, KEYS>
                           : index_scores<8, KEYS>;
}

/* Columns of a row: 8, 16, 32 or whole 64. */
static int columns_of(int heads) {
    int columns = 8;
    if (heads > 64) return divide_up(heads, 64) * 64;
    while (columns < heads) columns *= 2;
    return columns;
}

static void launch_scores(float *scores, const float *q, const float *head_weights, const uint8_t *keys, const DevicePage *pages,
                          const Row *rows, int n_rows, IndexShape shape) {
    const int groups = SCORE_THREADS / 128, fixed = (int)sizeof(ScorePlan) + groups * MAX_DEPTH * (int)sizeof(uint64_t),
              all_room = (int)gpu.shared_per_block - divide_up(fixed, 1024) * 1024; /* the compiler may align what is fixed */
    const int score_pages = n_rows * divide_up(shape.context, PAGE_ROWS);
    const int blocks = min(gpu.multiprocessors, divide_up(score_pages, LEAST_PAGES));
    const int pages_of_group = divide_up(divide_up(score_pages, blocks), groups);
    shape.columns = columns_of(shape.heads);
    shape.together = shape.kept.blocks ? 1 : min(min(n_rows, SHARED_QUERIES), max(SCORE_COLUMNS / shape.columns, 1));
    while (shape.together > 1 && room_of_read(shape) > all_room) shape.together--;
    const bool tensor = suits_tensor_cores(shape) && room_of_read(shape) <= all_room;
    const int room = pages_of_group < LONG_PART ? min(room_of_read(shape), all_room) : all_room;
    const KvDtype format = keys_of(shape.format);
    auto kernel = !tensor            ? index_scores<0, KV_F32>
                  : format == KV_F8 ? scores_kernel<KV_F8>(shape.columns)
                  : format == KV_F4 ? scores_kernel<KV_F4>(shape.columns)
                                     : scores_kernel<KV_BF16>(shape.columns);
    CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room));
    launch_early(kernel, dim3((unsigned)blocks), SCORE_THREADS, (size_t)room, 1, scores, q, head_weights, keys, pages, rows,
                 n_rows, shape, room);
}

/* ---- blocks of neighbours */

enum { BLOCK_SPAN = 2048 };         /* of them, that a thread block looks at */

struct Blocks {                     /* of each row, a bit for each: those that are kept */
    uint32_t *bits;                 /* [rows, words]; NULL: all are */
    int words, size;                /* size: neighbours of a block */
};

/* The best score of each of a row's blocks, of the newest infinity, and counts of their first bits; where none of them will be
 * left out, or the row's scores were not needed, nothing. */
static __global__ void __launch_bounds__(THREADS)
best_of_blocks(float *best, size_t stride, Scored from, int capacity, int size, int topk) {
    begin_kernel();
    __shared__ int bins[BINS];
    const int r = (int)blockIdx.y, visible = from.rows[r].position + 1, n = divide_up(visible, size),
              begin = (int)blockIdx.x * BLOCK_SPAN, end = min(n, begin + BLOCK_SPAN);
    const float *scores = from.scores + r * from.stride;
    if (visible <= capacity || n <= topk || begin >= end) return;
    for (int i = (int)threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    for (int b = begin + (int)threadIdx.x; b < end; b += THREADS) {
        float top = scores[b * size];
        for (int i = b * size + 1; i < min((b + 1) * size, visible); i++) top = scores[i] > top ? scores[i] : top;
        if (b == n - 1) top = INFINITY;
        best[r * stride + b] = top;
        atomicAdd(&bins[sortable(top) >> 21], 1);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < BINS; i += THREADS)
        if (bins[i]) atomicAdd(&score_bins[r][i], bins[i]);
}

/* A thread block sets the bits of one row's blocks. */
static __global__ void mark_blocks(Blocks blocks, const int *ids, const int *counts, int topk, const Row *rows, int capacity) {
    begin_kernel();
    const int r = (int)blockIdx.x, visible = rows[r].position + 1, words = divide_up(divide_up(visible, blocks.size), 64) * 2;
    uint32_t *bits = blocks.bits + (size_t)r * blocks.words;
    if (visible <= capacity) return;
    for (int i = (int)threadIdx.x; i < words; i += (int)blockDim.x) bits[i] = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < counts[r]; i += (int)blockDim.x) {
        const int block = ids[(size_t)r * topk + i];
        atomicOr(&bits[block / 32], 1u << block % 32);
    }
}

/* Each row's best topk blocks; scratch: of each row the best of all blocks, then topk ids and how many they are. */
static void keep_blocks(const Blocks &blocks, int topk, const Scored &from, int n_rows, int capacity, float *scratch) {
    const int n_blocks = divide_up((int)from.stride, blocks.size), stride = divide_up(n_blocks, 4) * 4;
    int *ids = (int *)(scratch + (size_t)n_rows * stride), *counts = ids + (size_t)n_rows * topk;
    launch(best_of_blocks, dim3((unsigned)divide_up(n_blocks, BLOCK_SPAN), (unsigned)n_rows), THREADS, 0, scratch, (size_t)stride,
           from, capacity, blocks.size, topk);
    launch_select(ids, counts, topk, {scratch, (size_t)stride, from.rows, blocks.size, from.rows_made, {}}, n_rows);
    launch(mark_blocks, (unsigned)n_rows, THREADS, 0, blocks, ids, counts, topk, from.rows, capacity);
}

/* A thread block lists the blocks that one row keeps; where the row sees no more than it selects, all. among: the row, at the
 * place that the newest it sees has among the neighbours in those blocks. */
static __global__ void __launch_bounds__(SELECT_THREADS)
list_blocks(int *kept, Row *among, Blocks blocks, int topk, const Row *rows, int capacity) {
    begin_kernel();
    __shared__ int sums[SELECT_WARPS];
    const int r = (int)blockIdx.x, thread = (int)threadIdx.x, warp = thread / 32, visible = rows[r].position + 1,
              n = divide_up(visible, blocks.size), words = divide_up(n, 32), part = divide_up(words, SELECT_THREADS),
              begin = min(thread * part, words), end = min(begin + part, words);
    const uint32_t *bits = visible > capacity ? blocks.bits + (size_t)r * blocks.words : NULL;
    auto word = [&](int i) { return (bits ? bits[i] : ~0u) & (32 * i + 32 > n ? (1u << n % 32) - 1 : ~0u); };
    int own = 0, total = 0;
    for (int i = begin; i < end; i++) own += __popc(word(i));
    const int until = warp_prefix_sum(own);
    if (thread % 32 == 31) sums[warp] = until;
    __syncthreads();
    int at = until - own;
    for (int i = 0; i < SELECT_WARPS; i++) at += i < warp ? sums[i] : 0, total += sums[i];
    for (int i = begin; i < end; i++)
        for (uint32_t left = word(i); left && at < topk; left &= left - 1)
            kept[(size_t)r * topk + at++] = 32 * i + __ffs((int)left) - 1;
    if (thread == 0) among[r] = {rows[r].session, total ? visible - 1 - (n - total) * blocks.size : -1, rows[r].token};
}

/* blocks: NULL bits: none. keeps: they are found, else they are all there is to select from. */
static void select_rows(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                        const DevicePage *pages, const Row *rows, int n_rows, float *scratch, int scratch_rows, IndexShape shape,
                        Blocks blocks, int topk_blocks, bool keeps) {
    const int capacity = selection->capacity;
    const bool chooses = capacity < shape.context, within = blocks.bits && !keeps && chooses;
    const size_t of_row = !blocks.bits ? 1 : (size_t)(topk_blocks + 4) + (keeps ? (size_t)(shape.context / blocks.size + 4) : 0);
    if (within) shape.rows_made = true, shape.context = min(shape.context, divide_up(topk_blocks * blocks.size, 4) * 4);
    for (int begin = 0, n; begin < n_rows; begin += n, blocks.bits += (size_t)n * blocks.words) {
        n = min(min(n_rows - begin, scratch_rows), min((int)SCORE_ROWS, (int)(PARTIAL_FLOATS / of_row)));
        Scored from = {scratch, (size_t)shape.context, rows + begin, 1, shape.rows_made, {}};
        if (within) {
            Row *among = (Row *)partials;
            int *kept = (int *)(among + n);
            launch(list_blocks, (unsigned)n, SELECT_THREADS, 0, kept, among, blocks, topk_blocks, from.rows, capacity);
            from.rows = among;
            from.kept = shape.kept = {kept, topk_blocks, blocks.size};
        }
        if (chooses)
            launch_scores(scratch, q + (size_t)begin * shape.heads * shape.head_dim, head_weights + (size_t)begin * shape.heads,
                          keys, pages, from.rows, n, shape);
        launch_select(selection->ids + (size_t)begin * capacity, selection->count + begin, capacity, from, n);
        if (blocks.bits && keeps && chooses) keep_blocks(blocks, topk_blocks, from, n, capacity, partials);
    }
}

static void index_select(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                         const RowFormat *format, const DevicePage *pages, int context_pages, int heads, int head_dim,
                         const Row *rows, int n_rows, float *scratch, int scratch_rows) {
    const float scale = 1 / sqrtf((float)head_dim * (float)heads);
    select_rows(selection, q, head_weights, keys, pages, rows, n_rows, scratch, scratch_rows,
                {*format, context_pages, heads, head_dim, selection->capacity, 0, 0, scale, PAGE_ROWS, context_pages * PAGE_ROWS,
                 false, {}}, {}, 0, false);
}

static void select_groups(Selection *selection, const float *q, const float *head_weights, const uint8_t *keys,
                          const RowFormat *format, const DevicePage *pages, int context_pages, int page_rows, int heads,
                          int head_dim, const Row *rows, int n_rows, float *scratch, int scratch_rows, uint64_t *blocks,
                          int block_size, int topk_blocks, bool keeps) {
    const float scale = 1 / sqrtf((float)head_dim * (float)heads);
    const int context = context_pages * page_rows, words = blocks ? divide_up(divide_up(context, block_size), 64) * 2 : 0;
    select_rows(selection, q, head_weights, keys, pages, rows, n_rows, scratch, scratch_rows,
                {*format, context_pages, heads, head_dim, selection->capacity, 0, 0, scale, page_rows, context, true, {}},
                {(uint32_t *)blocks, words, block_size}, topk_blocks, keeps);
}

/* =====================================================================================================================
 * Trails and compressed rows (DeepSeek-V4)
 *
 * Owns: what layers keep of a session's last positions, where the rows of groups lie, and what makes them. A group's row is
 * computed from its positions' values in their order, wherever those lie, so that it has the same bits however the prompt was cut
 * into passes. And Engram's rows: the tables stay in the checkpoint's mapping, which the device does not reach. A kernel names
 * rows, the host gathers them in pinned memory while the layers in front still run, and the layer reads them there.
 */

/* The row of an earlier position, or the row's own, of the same session as row r of the pass. */
static __device__ inline uint8_t *trail_row(const Trail &trail, const Row *rows, int r, int position) {
    const int at = r - (rows[r].position - position), session = rows[r].session;
    if (at >= 0 && rows[at].session == session) return trail.pass + (size_t)at * trail.stride;
    return trail.ring + ((size_t)session * (size_t)trail.length + (size_t)(position % trail.length)) * trail.stride;
}

static __global__ void locate_groups_kernel(DeviceRow *kv_rows, DeviceRow *index_rows, TableView view, int ratio, int page_rows,
                                            const Row *rows, int n_rows) {
    begin_kernel();
    const int r = (int)thread_index();
    if (r >= n_rows) return;
    const int session = rows[r].session, row = rows[r].position / ratio, page = row / page_rows, within = row % page_rows;
    const bool complete = (rows[r].position + 1) % ratio == 0;
    const int tail = view.tail[session * view.tail_ring + (page & (view.tail_ring - 1))].id;
    kv_rows[r].id = complete ? tail * page_rows + within : -1;
    index_rows[r].id = complete ? view.index[(size_t)session * view.context_pages + page].id * page_rows + within : -1;
}

static void locate_groups(DeviceRow *kv_rows, DeviceRow *index_rows, const Cache *cache, int group, const Row *rows, int n_rows) {
    if (n_rows <= 0) return;
    const TableView view = {cache->seen.tail, cache->seen.index, cache->tail_ring, cache->context_pages};
    launch(locate_groups_kernel, blocks_for((size_t)n_rows), THREADS, 0, kv_rows, index_rows, view,
           cache->ratio * stretch_of(cache, group), page_rows(cache, group), rows, n_rows);
}

static __global__ void see_groups_kernel(Row *newest, int *count, Row *first, const Row *rows, int n_rows, int ratio) {
    begin_kernel();
    const int r = (int)thread_index();
    if (r >= n_rows) return;
    const Row row = rows[r];
    const int seen = (row.position + 1) / ratio;
    if (newest) newest[r] = {row.session, seen - 1, row.token};
    if (count) count[r] = seen;
    if (first) first[r] = {row.session, row.position + 1 - ratio, row.token};
}

static void see_groups(Row *newest, int *count, Row *first, const Row *rows, int n_rows, int ratio) {
    if (n_rows <= 0) return;
    launch(see_groups_kernel, blocks_for((size_t)n_rows), THREADS, 0, newest, count, first, rows, n_rows, ratio);
}

static __global__ void locate_heavy_kernel(DeviceRow *kv_rows, int heavy_rows, const Row *rows, int n_rows, int ratio) {
    begin_kernel();
    const int r = (int)thread_index();
    if (r >= n_rows) return;
    const bool complete = (rows[r].position + 1) % ratio == 0;
    kv_rows[r].id = complete ? rows[r].session * heavy_rows + rows[r].position / ratio : -1;
}

static void locate_heavy(DeviceRow *kv_rows, const Cache *cache, const Row *rows, int n_rows, int ratio) {
    if (n_rows <= 0) return;
    launch(locate_heavy_kernel, blocks_for((size_t)n_rows), THREADS, 0, kv_rows, cache->heavy_rows, rows, n_rows, ratio);
}

/* ---- trails */

/* A block takes a part of one trail's rows, in pieces of 16 bytes, or of 4 where rows are no whole 16. */
template <typename Piece> static __device__ void keep_rows(const Trail &trail, int session, int first, int from, int to) {
    const int begin = max(from, to - trail.length), pieces = (int)(trail.stride / sizeof(Piece)), n = (to - begin) * pieces;
    for (int i = (int)(blockIdx.y * blockDim.x + threadIdx.x); i < n; i += (int)(gridDim.y * blockDim.x)) {
        const int p = begin + i / pieces;
        const size_t place = (size_t)session * (size_t)trail.length + (size_t)(p % trail.length);
        ((Piece *)(trail.ring + place * trail.stride))[i % pieces] =
            ((const Piece *)(trail.pass + (size_t)(first + p - from) * trail.stride))[i % pieces];
    }
}

static __global__ void keep_trails_kernel(const Trail *trails, int session, int first, int from, int to) {
    begin_kernel();
    const Trail trail = trails[blockIdx.x];
    if (!trail.length) return;
    if (trail.stride % sizeof(uint4)) keep_rows<uint32_t>(trail, session, first, from, to);
    else keep_rows<uint4>(trail, session, first, from, to);
}

static void keep_trails(const Cache *cache, int session, int first, int from, int to) {
    const int blocks = min(divide_up(to - from, 16), 8);            /* to a trail */
    if (from >= to) return;
    launch(keep_trails_kernel, dim3((unsigned)(cache->trail_layers * TRAILS), (unsigned)blocks), THREADS, 0, cache->seen_trails,
           session, first, from, to);
}

/* ---- rows of groups */

/* What makes a row of the positions of a group. */
struct Grouping {
    Trail trail;                    /* rows of [2, width] f32, values | gates */
    const Row *rows;
    const float *ape, *norm;        /* [ratio, width] or NULL, [dim] */
    int ratio, dim;
    bool overlapping;               /* width is 2 * dim, else dim */
    float eps;
};

static Grouping grouping_of(const Trail *trail, const Row *rows, const CompressorWeights *weights, int ratio, int dim,
                            bool overlapping, float eps) {
    return {.trail = *trail, .rows = rows, .ape = weights->ape, .norm = weights->norm, .ratio = ratio, .dim = dim,
            .overlapping = overlapping, .eps = eps};
}

/* Of one slot of a group: where its values and gates stand, and what is added to the gates. */
struct GroupSlot {
    const float *values, *gates, *ape;
    __device__ float gate(int c) const { return gates[c] + (ape ? ape[c] : 0); }
};

enum { MAX_SLOTS = 2 * MAX_RATIO };

/* The slots of the group that ends at row r, oldest first; of overlapping groups those of the one before come first, if there is
 * one. By a whole block. Returns how many there are. */
static __device__ int list_slots(GroupSlot *slots, const Grouping &p, int r) {
    const int width = p.overlapping ? 2 * p.dim : p.dim, first = p.rows[r].position + 1 - p.ratio,
              before = p.overlapping && first ? p.ratio : 0, n = before + p.ratio;
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
        const float *raw = (const float *)trail_row(p.trail, p.rows, r, first + i - before);
        const int half = i < before ? 0 : width - p.dim, place = i < before ? i : i - before;
        slots[i] = {raw + half, raw + width + half, p.ape ? p.ape + place * width + half : NULL};
    }
    __syncthreads();
    return n;
}

/* The row of the group that ends at row r of the pass, in shared memory: channel by channel a softmax over the slots' gates
 * weighs their values; normed. By a whole block. */
static __device__ void pool_group(float *row, const Grouping &p, int r) {
    __shared__ GroupSlot slots[MAX_SLOTS];
    __shared__ float of_warp[32];
    const int n = list_slots(slots, p, r);
    float squares = 0;
    for (int c = (int)threadIdx.x; c < p.dim; c += (int)blockDim.x) {
        float largest = -INFINITY, total = 0, sum = 0;
#pragma unroll 8
        for (int i = 0; i < n; i++) largest = fmaxf(largest, slots[i].gate(c));
#pragma unroll 8
        for (int i = 0; i < n; i++) {
            const float weight = expf(slots[i].gate(c) - largest);
            total += weight;
            sum = fmaf(weight, slots[i].values[c], sum);
        }
        row[c] = sum / total;
        squares += row[c] * row[c];
    }
    const float scale = 1 / sqrtf(block_sum(of_warp, squares) / (float)p.dim + p.eps);
    for (int c = (int)threadIdx.x; c < p.dim; c += (int)blockDim.x) row[c] = row[c] * scale * p.norm[c];
    __syncthreads();
}

static unsigned channel_threads(int dim) { return (unsigned)min(divide_up(dim, 32) * 32, 1024); }

/* The orthonormal Hadamard transform of dim = 2^k values in shared memory, by a whole block. */
static __device__ void transform_row(float *row, int dim) {
    for (int half = 1; half < dim; half *= 2) {
        for (int i = (int)threadIdx.x; i < dim / 2; i += (int)blockDim.x) {
            const int a = i / half * 2 * half + i % half;
            const float x = row[a], y = row[a + half];
            row[a] = x + y, row[a + half] = x - y;
        }
        __syncthreads();
    }
    for (int i = (int)threadIdx.x; i < dim; i += (int)blockDim.x) row[i] *= 1 / sqrtf((float)dim);
    __syncthreads();
}

struct GroupRows {
    Grouping group;
    uint8_t *base;
    RowFormat format, rounding;
    const DeviceRow *ids;
    int turned;
    const float *inverse_frequency;
    bool rounds;
    PassReport *report;
    int place;
};

/* A block takes a row of the pass, and is done where no group ends. */
static __global__ void compress_kernel(const __grid_constant__ GroupRows p) {
    begin_kernel();
    extern __shared__ __align__(16) float row[];
    const int r = (int)blockIdx.x, dim = p.group.dim, id = p.ids[r].id, thread = (int)threadIdx.x;
    if (id < 0) return;
    pool_group(row, p.group, r);
    const int first = p.group.rows[r].position + 1 - p.group.ratio;
    for (int i = thread; i < p.turned / 2; i += (int)blockDim.x) {
        const float angle = (float)first * p.inverse_frequency[i];
        rotate(row + dim - p.turned + 2 * i, 1, cosf(angle), sinf(angle));
    }
    __syncthreads();
    if (p.rounds && p.rounding.dtype == KV_F4) transform_row(row, dim);
    for (int group = thread / 32; p.rounds && group * p.rounding.group < p.rounding.quantised; group += (int)blockDim.x / 32)
        round_group(row + group * p.rounding.group, min(p.rounding.group, p.rounding.quantised - group * p.rounding.group),
                    p.rounding);
    __syncthreads();
    for (int c = thread; c < dim; c += (int)blockDim.x)
        if (!is_finite(row[c])) report_bad(p.report, p.place, r);
    store_row(p.base + (size_t)id * p.format.stride, p.format, row, row + p.format.quantised);
}

static void compress(uint8_t *base, const RowFormat *format, const DeviceRow *ids, const Trail *trail, const Row *rows,
                     int n_rows, const CompressorWeights *weights, int ratio, int dim, bool overlapping, int turned,
                     const float *inverse_frequency, float eps, const RowFormat *rounding, PassReport *report, int place) {
    if (n_rows <= 0) return;
    launch(compress_kernel, (unsigned)n_rows, channel_threads(dim), (size_t)dim * sizeof(float),
           {.group = grouping_of(trail, rows, weights, ratio, dim, overlapping, eps), .base = base, .format = *format,
            .rounding = rounding ? *rounding : *format, .ids = ids, .turned = turned, .inverse_frequency = inverse_frequency,
            .rounds = rounding != NULL, .report = report, .place = place});
}

static __global__ void pool_groups_kernel(float *y, const __grid_constant__ Grouping p) {
    begin_kernel();
    extern __shared__ __align__(16) float row[];
    const int r = (int)blockIdx.x;
    const bool complete = (p.rows[r].position + 1) % p.ratio == 0;
    if (complete) pool_group(row, p, r);
    for (int c = (int)threadIdx.x; c < p.dim; c += (int)blockDim.x) y[(size_t)r * (size_t)p.dim + c] = complete ? row[c] : 0;
}

static void pool_groups(float *y, const Trail *trail, const Row *rows, int n_rows, const CompressorWeights *weights, int ratio,
                        int dim, float eps) {
    if (n_rows <= 0) return;
    launch(pool_groups_kernel, (unsigned)n_rows, channel_threads(dim), (size_t)dim * sizeof(float), y,
           grouping_of(trail, rows, weights, ratio, dim, false, eps));
}

/* ---- Engram */

static __global__ void note_tokens_kernel(Trail trail, const Row *rows, int n_rows) {
    begin_kernel();
    const int r = (int)thread_index();
    if (r < n_rows) *(int *)(trail.pass + (size_t)r * trail.stride) = rows[r].token;
}

static void note_tokens(const Trail *trail, const Row *rows, int n_rows) {
    if (n_rows <= 0) return;
    launch(note_tokens_kernel, blocks_for((size_t)n_rows), THREADS, 0, *trail, rows, n_rows);
}

/* A table's rows on their way to the device. */
static struct Gather {
    const EngramWeights *engram;    /* NULL: the place is free */
    size_t row_bytes, scale_bytes, stride;
    int64_t *ids;                   /* pinned: how many rows, and [MAX_PASS_ROWS * columns] which */
    uint8_t *rows;                  /* pinned: [MAX_PASS_ROWS * columns] rows of `stride`, codes and then scales */
    cudaEvent_t asked, there;
} gathers[MAX_ENGRAMS];

static cudaStream_t gathering;      /* names rows and waits for the host, beside the passes */

static int engram_columns(const Config *config) { return (config->engram_order - 1) * config->engram_n_heads; }

/* Its memory is taken with the first pass, which no graph records. */
static Gather *gather_of(const EngramWeights *engram, const Config *config) {
    Gather *gather = gathers;
    while (gather->engram && gather->engram != engram) gather++;
    if (gather->engram) return gather;
    const size_t dim = (size_t)config->engram_head_dim, most = (size_t)MAX_PASS_ROWS * (size_t)engram_columns(config);
    gather->engram = engram;
    gather->row_bytes = stored_bytes(engram->dtype, dim);
    gather->scale_bytes = engram->exponents ? (dim + EXPONENT_BLOCK - 1) / EXPONENT_BLOCK : 0;
    gather->stride = (gather->row_bytes + gather->scale_bytes + sizeof(uint4) - 1) / sizeof(uint4) * sizeof(uint4);
    if (!gathering) CUDA(cudaStreamCreateWithFlags(&gathering, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&gather->asked, cudaEventDisableTiming));
    CUDA(cudaEventCreateWithFlags(&gather->there, cudaEventDisableTiming));
    CUDA(cudaHostAlloc(&gather->ids, (1 + most) * sizeof(int64_t), cudaHostAllocDefault));
    CUDA(cudaHostAlloc(&gather->rows, most * gather->stride, cudaHostAllocDefault));
    return gather;
}

/* With the weights, when nothing runs. */
static void forget_gathers(void) {
    for (Gather *gather = gathers; gather < gathers + MAX_ENGRAMS && gather->engram; gather++) {
        CUDA(cudaEventDestroy(gather->asked)), CUDA(cudaEventDestroy(gather->there));
        CUDA(cudaFreeHost(gather->ids)), CUDA(cudaFreeHost(gather->rows));
        *gather = {};
    }
}

/* Which rows of the table the tokens up to each row name: a thread takes a column of a row. */
static __global__ void name_rows_kernel(int64_t *ids, const __grid_constant__ EngramWeights engram, const int *token_map,
                                        Trail trail, const Row *rows, int n, int columns, int heads, int padding) {
    const int i = (int)thread_index(), r = i / columns, column = i % columns;
    if (i == 0) ids[0] = n;
    if (i >= n) return;
    uint64_t hash = 0;
    for (int back = 0; back <= column / heads + 1; back++) {
        const int position = rows[r].position - back;
        const int token = position < 0 ? padding : *(const int *)trail_row(trail, rows, r, position);
        hash ^= (uint64_t)token_map[token] * engram.multipliers[back];
    }
    ids[1 + i] = engram.offsets[column] + (int64_t)(hash % (uint64_t)engram.primes[column]);
}

/* On a thread of the driver's. All pages are asked for before the first is waited for: they may come from a disk. */
static void CUDART_CB gather_rows(void *user) {
    const Gather *gather = (const Gather *)user;
    const EngramWeights *engram = gather->engram;
    const int n = (int)gather->ids[0];
    const size_t page = 4096;
#pragma omp parallel num_threads(min(MOVERS, divide_up(n, 64)))
    {
#pragma omp for
        for (int i = 0; i < n; i++) {
            const uintptr_t at = (uintptr_t)(engram->table + (size_t)gather->ids[1 + i] * gather->row_bytes);
            madvise((void *)(at / page * page), at % page + gather->row_bytes, MADV_WILLNEED);
        }
#pragma omp for
        for (int i = 0; i < n; i++) {
            const size_t id = (size_t)gather->ids[1 + i];
            uint8_t *row = gather->rows + (size_t)i * gather->stride;
            memcpy(row, engram->table + id * gather->row_bytes, gather->row_bytes);
            if (gather->scale_bytes)
                memcpy(row + gather->row_bytes, engram->exponents + id * gather->scale_bytes, gather->scale_bytes);
        }
    }
}

static void prefetch_engram(const EngramWeights *engram, const int *token_map, const Trail *trail, const Row *rows, int n_rows,
                            const Config *config) {
    const int columns = engram_columns(config), n = n_rows * columns;
    if (n <= 0) return;
    Gather *gather = gather_of(engram, config);
    CUDA(cudaEventRecord(gather->asked, gpu.stream));
    CUDA(cudaStreamWaitEvent(gathering, gather->asked, 0));
    name_rows_kernel<<<blocks_for((size_t)n), THREADS, 0, gathering>>>(gather->ids, *engram, token_map, *trail, rows, n, columns,
                                                                       config->engram_n_heads, config->engram_pad_token_id);
    CUDA(cudaGetLastError());
    CUDA(cudaLaunchHostFunc(gathering, gather_rows, gather));
    CUDA(cudaEventRecord(gather->there, gathering));
}

/* A warp takes a row of the table, over the link in pieces of 16 bytes. */
static __global__ void widen_engram_kernel(float *y, const uint8_t *rows, size_t row_bytes, size_t stride, DType dtype,
                                           bool scaled, int dim, int n) {
    extern __shared__ uint4 table_rows[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, i = (int)(blockIdx.x * (blockDim.x / 32)) + warp;
    const int pieces = (int)(stride / sizeof(uint4));
    uint4 *own = table_rows + warp * pieces;
    if (i >= n) return;
    for (int piece = lane; piece < pieces; piece += 32) own[piece] = ((const uint4 *)(rows + (size_t)i * stride))[piece];
    __syncwarp();
    const uint8_t *row = (const uint8_t *)own;
    for (int j = lane; j < dim; j += 32) {
        const float value = load_stored(row, (size_t)j, dtype);
        y[(size_t)i * (size_t)dim + j] = scaled ? value * widen_e8m0(row[row_bytes + (size_t)(j / EXPONENT_BLOCK)]) : value;
    }
}

static void read_engram(float *y, const EngramWeights *engram, const int *token_map, const Trail *trail, const Row *rows,
                        int n_rows, const Config *config) {
    (void)token_map, (void)trail, (void)rows;       /* they have been asked for */
    enum { WARPS = 8 };
    const int n = n_rows * engram_columns(config);
    if (n <= 0) return;
    const Gather *gather = gather_of(engram, config);
    CUDA(cudaStreamWaitEvent(gpu.stream, gather->there, 0));
    widen_engram_kernel<<<divide_up(n, WARPS), 32 * WARPS, WARPS * gather->stride, gpu.stream>>>(
        y, gather->rows, gather->row_bytes, gather->stride, engram->dtype, gather->scale_bytes > 0, config->engram_head_dim, n);
    CUDA(cudaGetLastError());
}

/* =====================================================================================================================
 * Attention
 *
 * Owns: softmax(q . k) v over lists of keys, wherever these lie: a row's selection (DeepSeek-V2, 2.1 in absorbed form), a
 * session's history (GQA), or a draft's ring and block (DFlash). A list is cut into chunks of SPLIT_KEYS. Thread blocks that
 * take some of a list's chunks leave a maximum, a sum and a weighted sum for each, and merge_kernel folds them in their order;
 * one that takes all of them folds them itself, in the same order. The cut depends on a row's own list alone, so the row has the
 * same bits beside any others.
 *
 * attend_kernel takes any shape, in f32. The others are for bf16 and fp8 rows of known shapes, on tensor cores: short_runs and
 * long_runs; latent_kernel for the 512 + 64 values of GLM and DeepSeek before sm_90; and for the same from there on hopper_kernel
 * where there are many rows, weigh_lists_kernel and add_lists_kernel where there are few. These cut a list into tiles, which join
 * in their order too. In hopper_kernel that happens in registers and costs nothing.
 */

enum {
    SPLIT_KEYS = 256,
    TILE_KEYS = 32,             /* keys that are summed by themselves: a tile */
    SYSTEM_SHARED = 1024,       /* bytes of shared memory that the system keeps of each block's */
    ATTEND_WARPS = 8,           /* heads that a thread block of attend_kernel works on */
    LANE_VALUES = MAX_ROW_WIDTH / 32,
    LATENT = 512, TAIL = 64, LATENT_WIDTH = LATENT + TAIL,
    LATENT_TILES = LATENT / 4 / 8,          /* of eight values, in a warp's part */
    LATENT_HEADS = 64,          /* heads that a thread block of latent_kernel works on */
    LATENT_THREADS = 512,
    LATENT_PARTS = 4,           /* of the sum in a score, and of the values: a warp takes one, for 16 heads */
    LATENT_PITCH = LATENT_WIDTH + 8,        /* bf16 from row to row in shared memory: eight rows fall into different banks */
    SCORE_PITCH = TILE_KEYS + 4, WEIGHT_PITCH = TILE_KEYS + 8,
    HOPPER_KEYS = 64,           /* keys of a tile of hopper_kernel and weigh_lists_kernel */
};

static bool attention_start(Error *error) {
    partials = (float *)take((size_t)PARTIAL_FLOATS * sizeof(float), MEMORY_DEVICE, error);
    return partials;
}

static __device__ const uint8_t *row_at(const RowPool &pool, size_t stride, DeviceRow row) {
    return row.id < pool.n_rows ? pool.rows + (size_t)row.id * stride : pool.staging + (size_t)(row.id - pool.n_rows) * stride;
}

/* What a launch attends with: rows [first_row, first_row + n_rows) of q and y; parts: where blocks share lists, or NULL. */
typedef struct Attend {
    float *y, *parts;
    const float *q;
    int first_row, n_rows, heads, kv_heads;
    int chunks;                 /* of the longest list */
    float scale;
} Attend;

/* ---- lists of keys: of(r) is row r's, the keys [first, length) of those that its run of rows has in common, and span(r) then
 * the same of another row of the run; bound(): how many there can be. A key is a cached row of format_of(key); the values of a
 * key/value head begin at start(head), and what the key stands for does at start(kv_heads + head). Rows of a run share tiles,
 * `each` of them at most: tiles() says how many there are in a launch, and tile() which rows one has. */

typedef struct TileRows { int first, end; } TileRows;
typedef struct ListSpan { int first, end; } ListSpan;

/* Shared memory of a launch that finds its runs itself: a bit for each row where a run begins, or a tile. */
typedef struct TilePlan { uint32_t runs[MAX_PASS_ROWS / 32], tiles[MAX_PASS_ROWS / 32]; } TilePlan;

/* Where a head's values lie in a cached row, and the scales of fp8: bytes. */
typedef struct Slices { int key, value, key_scale, value_scale; } Slices;

struct SelectedKeys {
    RowPool pool;
    RowFormat format;
    const DeviceRow *locations; /* [rows, capacity]; of(r): [capacity] */
    const int *count;
    int capacity, length;
    static const bool shared = true;        /* the key is the value too */
    static const int first = 0;
    __device__ SelectedKeys of(int r) const {
        SelectedKeys own = *this;
        own.locations += (size_t)r * capacity;
        own.length = count[r];
        return own;
    }
    __device__ int tiles(TilePlan *, const Attend &a, int, int, int) const { return a.n_rows; }
    __device__ TileRows tile(const TilePlan *, int t, const Attend &a, int) const {
        return {a.first_row + t, a.first_row + t + 1};
    }
    __device__ Slices slices(int) const { return {0, 0, 0, 0}; }
    __device__ ListSpan span(int) const { return {0, length}; }
    __device__ int bound() const { return capacity; }
    __device__ int start(int) const { return 0; }
    static const int WIDTH = LATENT_WIDTH;
    __device__ int tiles() const { return divide_up(length, HOPPER_KEYS); }
    __device__ int keys_in(int tile) const { return length - tile * HOPPER_KEYS; }
    __device__ const uint8_t *row(int s) const { return row_at(pool, format.stride, locations[s]); }
    __device__ RowFormat format_of(int) const { return format; }
};

/* The n-th bit that is set of these words. */
static __device__ int find_bit(const uint32_t *words, int n) {
    int at = 0;
    for (int count; (count = __popc(words[at])) <= n; at++) n -= count;
    uint32_t word = words[at];
    for (; n; n--) word &= word - 1;
    return at * 32 + __ffs(word) - 1;
}

struct HistoryKeys {
    RowPool pool;
    RowFormat format;
    const DevicePage *pages;    /* [sessions, context_pages]; of(r): [context_pages] */
    const Row *rows;
    int context_pages, kv_heads, dim, length;
    static const bool shared = false;
    static const int first = 0;
    __device__ HistoryKeys of(int r) const {
        HistoryKeys own = *this;
        own.pages += (size_t)rows[r].session * context_pages;
        own.length = rows[r].position + 1;
        return own;
    }
    /* A run is a session's rows. Only tiles of runs of [shortest, longest] rows count. Called by all threads. */
    __device__ int tiles(TilePlan *plan, const Attend &a, int each, int shortest, int longest) const {
        const int n = a.n_rows, lane = threadIdx.x % 32, end = divide_up(n, 32) * 32;
        for (int r = threadIdx.x; r < end; r += blockDim.x) {
            const Row *row = rows + a.first_row + r;
            const uint32_t bits = __ballot_sync(~0u, r < n && (r == 0 || row[0].session != row[-1].session));
            if (lane == 0) plan->runs[r / 32] = bits;
        }
        __syncthreads();
        for (int r = threadIdx.x; r < end; r += blockDim.x) {
            const TileRows run = run_of(plan, r, n);
            const int length = run.end - run.first;
            const bool begins = r < n && (r - run.first) % each == 0 && length >= shortest && length <= longest;
            const uint32_t bits = __ballot_sync(~0u, begins);
            if (lane == 0) plan->tiles[r / 32] = bits;
        }
        __syncthreads();
        int count = 0;
        for (int i = 0; i < end / 32; i++) count += __popc(plan->tiles[i]);
        return count;
    }
    static __device__ TileRows run_of(const TilePlan *plan, int r, int n) {
        int from = r / 32, to = from;
        uint32_t before = plan->runs[from] & ~0u >> (31 - r % 32), behind = plan->runs[to] & ~1u << r % 32;
        while (!before) before = plan->runs[--from];
        while (!behind && ++to < divide_up(n, 32)) behind = plan->runs[to];
        return {from * 32 + 31 - __clz(before), behind ? to * 32 + __ffs(behind) - 1 : n};
    }
    __device__ TileRows tile(const TilePlan *plan, int t, const Attend &a, int each) const {
        const int r = find_bit(plan->tiles, t), end = run_of(plan, r, a.n_rows).end;
        return {a.first_row + r, a.first_row + min(r + each, end)};
    }
    __device__ Slices slices(int kv) const {
        const int bytes = format.dtype == KV_F8 ? 1 : 2, key = kv * dim, value = (kv_heads + kv) * dim, scales = format.quantised;
        return {key * bytes, value * bytes, scales + key / format.group * 4, scales + value / format.group * 4};
    }
    __device__ const uint8_t *row(int s) const {
        return row_at(pool, format.stride, DeviceRow{pages[s / PAGE_ROWS].id * PAGE_ROWS + s % PAGE_ROWS});
    }
    __device__ ListSpan span(int r) const { return {0, rows[r].position + 1}; }
    __device__ int bound() const { return context_pages * PAGE_ROWS; }
    __device__ int start(int head) const { return head * dim; }
    __device__ RowFormat format_of(int) const { return format; }
};

/* The ring's rows that the first row of a block sees, then those of the block. */
struct BlockKeys {
    const uint8_t *ring;        /* [sessions, ring_rows]; of(r): [ring_rows] */
    RowFormat format;
    const float *kv;            /* [blocks * block_size, 2 * kv_heads * dim]; of(r): of its block */
    const DraftBlock *blocks;   /* MEMORY_HOST: read once a row */
    int ring_rows, block_size, window, kv_heads, dim;
    bool causal;
    int first, length;          /* of(r), and the next: */
    int oldest, position, ring_first;       /* the list's first position, the anchor's, and the first that the ring has */
    static const bool shared = false;
    __device__ BlockKeys of(int r) const {
        BlockKeys own = *this;
        const DraftBlock *block = &blocks[r / block_size];
        own.ring_first = block->ring_first;
        own.position = block->position;
        own.oldest = own.seen_from(own.position);
        own.ring += (size_t)block->session * ring_rows * format.stride;
        own.kv += (size_t)(r / block_size * block_size) * 2 * kv_heads * dim;
        const ListSpan span = own.span(r);
        own.first = span.first;
        own.length = span.end;
        return own;
    }
    __device__ int bound() const { return length; }
    __device__ int seen_from(int at) const { return min(max(window > at ? 0 : at - window + 1, ring_first), position); }
    __device__ ListSpan span(int r) const {
        const int i = r % block_size;
        return {seen_from(position + i) - oldest, position - oldest + (causal ? i + 1 : block_size)};
    }
    __device__ int tiles(TilePlan *, const Attend &a, int each, int, int) const {
        const int last = a.first_row + a.n_rows - 1;
        return (last / block_size - a.first_row / block_size + 1) * divide_up(block_size, each);
    }
    __device__ TileRows tile(const TilePlan *, int t, const Attend &a, int each) const {
        const int tiles = divide_up(block_size, each), block = (a.first_row / block_size + t / tiles) * block_size,
                  begin = block + t % tiles * each, end = min(begin + each, block + block_size);
        return {max(begin, a.first_row), min(end, a.first_row + a.n_rows)};
    }
    __device__ Slices slices(int head) const { return {head * dim * 2, (kv_heads + head) * dim * 2, 0, 0}; }
    __device__ bool own(int s) const { return oldest + s >= position; }     /* a row of the block: f32 */
    __device__ const uint8_t *row(int s) const {
        const int t = oldest + s;
        return t >= position ? (const uint8_t *)(kv + (size_t)(t - position) * 2 * kv_heads * dim)
                             : ring + (size_t)(t % ring_rows) * format.stride;
    }
    __device__ int start(int head) const { return head * dim; }
    __device__ RowFormat format_of(int s) const {
        RowFormat of_row = format;
        if (own(s)) of_row.dtype = KV_F32;
        return of_row;
    }
};

/* DeepSeek-V4: the last positions of a session up to the row's own, then rows of a pool. A head's sink is one more logit. */
struct WindowKeys {
    Trail trail;                /* of(r): its ring is the session's */
    RowFormat trail_format, format;
    RowPool pool;
    const DeviceRow *locations; /* [rows, capacity], of(r): [capacity]; or NULL: rows of the pool from first_id on */
    const int *count;           /* NULL: none */
    const Row *rows;            /* of the pass; the launch's first is number first_row of these */
    const float *sinks;         /* [heads] */
    int first_row, window, capacity;
    int position, session, length, seen, first_id;  /* of(r): keys, and how many of them are the window's */
    static const bool shared = true;
    static const int first = 0, WIDTH = LATENT;
    __device__ WindowKeys of(int i) const {
        WindowKeys own = *this;
        own.rows += first_row + i;
        own.first_row = first_row + i;
        own.position = own.rows->position, own.session = own.rows->session;
        own.trail.ring += (size_t)own.session * trail.length * trail.stride;
        own.seen = min(own.position + 1, window);
        own.length = own.seen + (count ? count[first_row + i] : 0);
        own.first_id = own.session * capacity;
        if (locations) own.locations += (size_t)(first_row + i) * capacity;
        return own;
    }
    /* Key s of the window, and of the pool. */
    __device__ const uint8_t *window_row(int s) const {
        const int back = seen - 1 - s;
        if (back <= first_row && rows[-back].session == session) return trail.pass + (size_t)(first_row - back) * trail.stride;
        return trail.ring + (size_t)((position - back) % trail.length) * trail.stride;
    }
    __device__ const uint8_t *pool_row(int s) const {
        return row_at(pool, format.stride, locations ? locations[s] : DeviceRow{first_id + s});
    }
    __device__ int start(int) const { return 0; }
    __device__ const uint8_t *row(int s) const { return s < seen ? window_row(s) : pool_row(s - seen); }
    __device__ RowFormat format_of(int s) const { return s < seen ? trail_format : format; }
    /* Tiles of HOPPER_KEYS, the window's first: each is of one format. */
    __device__ int window_tiles() const { return divide_up(seen, HOPPER_KEYS); }
    __device__ int tiles() const { return window_tiles() + divide_up(length - seen, HOPPER_KEYS); }
    __device__ int keys_in(int tile) const {
        return tile < window_tiles() ? seen - tile * HOPPER_KEYS : length - seen - (tile - window_tiles()) * HOPPER_KEYS;
    }
};

/* What merge_kernel needs to know of lists that were gone through. Some are described in host memory, which is far. */
static __device__ int list_lengths[MAX_PASS_ROWS * MAX_BLOCK];

struct KnownLengths {
    int length;
    __device__ KnownLengths of(int r) const { return {list_lengths[r]}; }
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

/* The maximum and sum of the chunks so far take in those of the next; returns how much of their weighted sums, and of its, is
 * left. The first is taken as it is: it meets a maximum of -FLT_MAX. */
static __device__ float2 fold_chunk(float *maximum, float *sum, float next_maximum, float next_sum) {
    const float largest = fmaxf(*maximum, next_maximum), before = __expf(*maximum - largest),
                next = __expf(next_maximum - largest);
    *maximum = largest;
    *sum = __fmaf_rn(next_sum, next, __fmul_rn(*sum, before));
    return make_float2(before, next);
}

static __device__ float fold_value(float total, float next, float2 shares) {
    return __fmaf_rn(next, shares.y, __fmul_rn(total, shares.x));
}

/* ---- any shape: a warp for a head and tile, a lane for each key of it, then for each value. As many tiles of a chunk as there
 * is room for are in shared memory at a time. What is summed up by itself is a tile; tiles join in their order, so that no bit
 * depends on how many heads a thread block has: one for each warp, or, where rows are few, one. */

struct TilePart { float maximum, sum, values[]; };     /* of a tile and head, in shared memory: value_dim values */

/* So many values of keys [first, first + n) of the list, from `start` on, go to shared memory; rows[] says where the keys lie. */
template <typename Keys>
static __device__ inline void stage_keys(float *to, int pitch, const uint8_t *const *rows, const Keys &keys, int first, int n,
                                         int start, int dim) {
    const int pieces = divide_up(dim, 8);
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < n * pieces; i += 32 * ATTEND_WARPS) {
        const int s = i / pieces, j = i % pieces * 8;
        float v[8];
        cached_eight(v, rows[s], keys.format_of(first + s), start + j, start + dim);
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (j + k < dim) to[s * pitch + j + k] = v[k];
    }
}

/* By a warp: what n keys of a tile come to for a query; `seen` says of the lane's key that it is one of them. */
static __device__ inline void attend_tile(TilePart *part, const float *query, const float *keys, int key_pitch, int key_dim,
                                          const float *values, int value_pitch, int value_dim, int n, bool seen, float scale) {
    const int lane = lane_id();
    const float *key = keys + lane * key_pitch;
    float score = 0;
#pragma unroll 8
    for (int j = 0; j < key_dim && seen; j++) score = fmaf(query[j], key[j], score);
    score = seen ? score * scale : -FLT_MAX;
    const float largest = warp_maximum(score), weight = seen ? expf(score - largest) : 0, sum = warp_total(weight);
    if (lane == 0) part->maximum = largest, part->sum = sum;
    for (int first = 0; first < value_dim; first += 64) {
        const int low = min(first + lane, value_dim - 1), high = min(first + 32 + lane, value_dim - 1);
        float total[2] = {};
#pragma unroll 8
        for (int s = 0; s < n; s++) {
            const float share = __shfl_sync(~0u, weight, s);
            total[0] = fmaf(share, values[s * value_pitch + low], total[0]);
            total[1] = fmaf(share, values[s * value_pitch + high], total[1]);
        }
        part->values[low] = total[0];
        if (first + 32 < value_dim) part->values[high] = total[1];
    }
}

/* Tiles join what a head has so far, of which a thread has every step-th value from `first` on. */
static __device__ inline void join_tiles(float (&total)[LANE_VALUES], float *maximum, float *sum, const float *parts, int tiles,
                                         int first, int step, int value_dim) {
    for (int tile = 0; tile < tiles; tile++) {
        const TilePart *part = (const TilePart *)(parts + tile * (value_dim + 2));
        const float2 shares = fold_chunk(maximum, sum, part->maximum, part->sum);
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) {
            if (step * i >= value_dim) break;
            if (first + step * i < value_dim) total[i] = fold_value(total[i], part->values[first + step * i], shares);
        }
    }
}

/* Grid: rows, groups of `each` heads of a key/value head, and thread blocks that share lists. */
template <typename Keys>
static __global__ void __launch_bounds__(32 * ATTEND_WARPS)
attend_kernel(Keys lists, Attend a, int key_dim, int value_dim, int each, int most_tiles) {
    begin_kernel();
    extern __shared__ float attend_shared[];
    __shared__ const uint8_t *rows[SPLIT_KEYS];
    const int r = a.first_row + blockIdx.x, group = a.heads / a.kv_heads, blocks = divide_up(group, each),
              kv = blockIdx.y / blocks, team = ATTEND_WARPS / each, own = warp_id() / team,
              within = (int)threadIdx.x % (32 * team), member = blockIdx.y % blocks * each + own, head = kv * group + member;
    const int key_pitch = key_dim + 1; /* 32 lanes read the same value of 32 keys: odd pitches keep them apart */
    const int value_pitch = Keys::shared ? key_pitch : value_dim, room = most_tiles * TILE_KEYS, part_floats = value_dim + 2;
    float *key_tile = attend_shared, *queries = key_tile + room * key_pitch, *query = queries + own * key_dim,
          *behind = queries + each * key_dim, *value_tile = Keys::shared ? key_tile : behind,
          *parts = behind + (Keys::shared ? 0 : room * value_dim) + own * most_tiles * part_floats;
    const Keys keys = lists.of(r);
    const bool works = member < group, writes = !a.parts || std::is_same_v<Keys, WindowKeys>;
    for (int j = within; j < key_dim && works; j += 32 * team) query[j] = a.q[((size_t)r * a.heads + head) * key_dim + j];
    const int length = writes ? max(keys.length, 1) : keys.length;      /* without parts even an empty list writes its y */
    if (a.parts && !threadIdx.x) list_lengths[r] = length;
    for (int chunk = blockIdx.z; chunk * SPLIT_KEYS < length; chunk += gridDim.z) {
        const int begin = chunk * SPLIT_KEYS, end = min(keys.length, begin + SPLIT_KEYS);
        float maximum = -FLT_MAX, sum = 0, total[LANE_VALUES] = {0};
        if constexpr (std::is_same_v<Keys, WindowKeys>)
            if (chunk == 0 && works) maximum = keys.sinks[head], sum = 1;
        for (int s = (int)threadIdx.x; s < end - begin; s += 32 * ATTEND_WARPS) rows[s] = keys.row(begin + s);
        for (int first = begin; first < end; first += room) {
            const int n = min(end - first, room);
            __syncthreads();
            stage_keys(key_tile, key_pitch, rows + (first - begin), keys, first, n, keys.start(kv), key_dim);
            if (!Keys::shared)
                stage_keys(value_tile, value_pitch, rows + (first - begin), keys, first, n, keys.start(a.kv_heads + kv),
                           value_dim);
            __syncthreads();
            for (int tile = within / 32; tile * TILE_KEYS < n && works; tile += team) {
                const int at = tile * TILE_KEYS, s = at + lane_id();
                attend_tile((TilePart *)(parts + tile * part_floats), query, key_tile + at * key_pitch, key_pitch, key_dim,
                            value_tile + at * value_pitch, value_pitch, value_dim, min(n - at, (int)TILE_KEYS),
                            s < n && first + s >= keys.first, a.scale);
            }
            __syncthreads();
            if (works) join_tiles(total, &maximum, &sum, parts, divide_up(n, TILE_KEYS), within, 32 * team, value_dim);
        }
        if (!works) continue;
        float *part = a.parts ? partial_of(a.parts, blockIdx.x, head, a.heads, chunk, a.chunks, value_dim) : NULL,
              *out = part ? part + 2 : a.y + ((size_t)r * a.heads + head) * value_dim;
        const float inverse = 1 / sum;
        if (!within && part) part[0] = maximum, part[1] = sum;
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++)
            if (within + 32 * team * i < value_dim) out[within + 32 * team * i] = part ? total[i] : total[i] * inverse;
    }
}

/* The chunks of one row and head, in their order. */
template <typename Keys>
static __global__ void merge_kernel(Keys lists, float *y, float *parts, int first_row, int heads, int value_dim, int chunks) {
    begin_kernel();
    const int r = first_row + blockIdx.x, head = blockIdx.y, used = divide_up(lists.of(r).length, SPLIT_KEYS);
    for (int j = threadIdx.x; j < value_dim; j += blockDim.x) {
        float maximum = -FLT_MAX, sum = 0, total = 0;
#pragma unroll 16
        for (int chunk = 0; chunk < used; chunk++) {
            const float *part = partial_of(parts, blockIdx.x, head, heads, chunk, chunks, value_dim);
            total = fold_value(total, part[2 + j], fold_chunk(&maximum, &sum, part[0], part[1]));
        }
        y[((size_t)r * heads + head) * value_dim + j] = total * (1 / sum);
    }
}

/* ---- tensor cores: 512 + 64 values, bf16 or fp8 rows */




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

/* n rows of the selection, from id `first` of the chunk on, begin their way into shared memory; the others of the tile are
 * zeros. */
template <bool FP8>
static __device__ void start_tile(LatentShared<FP8> *shared, const SelectedKeys &keys, int turn, int first, int n) {
    for (int i = threadIdx.x; i < TILE_KEYS * StoredRow<FP8>::PIECES; i += LATENT_THREADS) {
        const int s = i / StoredRow<FP8>::PIECES, p = i % StoredRow<FP8>::PIECES;
        const uint8_t *row = row_at(keys.pool, keys.format.stride, shared->ids[s < n ? first + s : first]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(shared_address(shared->stored[turn] + s * StoredRow<FP8>::PITCH + 16 * p)), "l"(row + 16 * p),
                        "r"(s < n ? 16 : 0) : "memory");
    }
    commit_copies();
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

/* total [16, COLUMNS * 8] += a . values, for a fragment of the weights of 16 keys. b_row: the lane's row of their values, in
 * shared memory, from its first column on. */
template <int COLUMNS>
static __device__ void add_values(float (&total)[COLUMNS][4], const uint32_t (&a)[4], const __nv_bfloat16 *b_row) {
#pragma unroll
    for (int t = 0; t < COLUMNS; t += 2) {
        uint32_t b[4];
        load_transposed(b, b_row + t * 8);
        multiply_bf16(total[t], a, b[0], b[1]);
        multiply_bf16(total[t + 1], a, b[2], b[3]);
    }
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
        uint32_t a[4];
        load_matrices(a, shared->weights + (head_group * 16 + lane % 16) * WEIGHT_PITCH + k + lane / 16 * 8);
        add_values(total, a, rows + (k + lane % 16) * LATENT_PITCH + part * (LATENT / LATENT_PARTS) + lane / 16 * 8);
    }
}

/* One chunk of one row's selection, for up to 64 heads. The next tile is on its way from memory while one is worked on. */
template <bool FP8>
static __global__ void __launch_bounds__(LATENT_THREADS, 1)
latent_kernel(SelectedKeys lists, float *parts, const float *q, int first_row, int heads, float scale, int chunks) {
    begin_kernel();
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
        wait_for_copies<0>();
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

/* ---- tensor cores: keys and values of bf16 or fp8, in shapes that are known beforehand. Rows of a run and heads of a key/value
 * head are the rows of a tile, so they share one read of the keys. A tile's height follows its run: 16 where that is enough
 * (decoding), the warps dividing keys and values; 64 (verification, draft blocks) or, in long runs, 128 (prefill), the warps
 * dividing the rows. A row's sums are made in the same order in all of them: 64 keys at a time, products over 16 values after
 * each other, chunks folded in their order. So which tile a row takes, and where in it, changes no bit. */

enum {
    LIST_TILE = 64,             /* keys in shared memory at a time */
    WEIGHTS_PITCH = LIST_TILE + 8,
    NARROW_ROWS = 16, MIDDLE_ROWS = 64,
    NARROW_WARPS = 4,           /* of narrow and of middle tiles */
    MIDDLE_RUN = 16,            /* rows of q in a tile of them */
    WIDE_ROWS = 128, WIDE_WARPS = WIDE_ROWS / 16,
    WIDE_RUN = 256,             /* rows of a run from which on wide tiles are enough for the GPU */
    NAMED_TILES = 4,            /* whose rows' addresses are known */
    FEW_CHUNKS = 2,             /* that a thread block goes through sooner than they are merged */
};

static const uint32_t ONES = 0x3f803f80;    /* two bf16: a column of ones beside the values makes the sum of the weights */
static const float LOG2_E = 1.4426950408889634f;

/* How a key, and its value behind it where that is something else, lies in shared memory. */
template <typename Keys, int KEY, int VALUE, bool FP8> struct ListRow {
    static const int WIDTH = Keys::shared ? KEY : KEY + VALUE, VALUES = Keys::shared ? 0 : KEY, PITCH = WIDTH + 8;
    /* As stored, in pieces of 16 bytes: bf16 into the tile itself; fp8 with the pieces that hold its scales, or the whole row. */
    static const int PIECES = !FP8 ? WIDTH / 8 : Keys::shared ? (VALUE + VALUE / 128 * 4 + (KEY - VALUE) * 2 + 15) / 16
                                                              : WIDTH / 16 + 2;
    static const int STORED = FP8 ? PIECES * 16 : PITCH * 2;            /* bytes */
    /* Pieces whose place is free again as soon as the scores are known (fp8: as soon as they are widened). */
    static const int EARLY = FP8 ? PIECES : Keys::shared ? 0 : KEY / 8;
};

/* The keys of a list on their way through a thread block. */
template <typename Keys, int KEY, int VALUE, bool FP8, int STAGES, int WIDENED = 1> struct ListTiles {
    uint8_t stored[STAGES][LIST_TILE * ListRow<Keys, KEY, VALUE, FP8>::STORED];
    __nv_bfloat16 widened[WIDENED][FP8 ? LIST_TILE * ListRow<Keys, KEY, VALUE, FP8>::PITCH : 8];
    const uint8_t *source[NAMED_TILES][LIST_TILE];  /* NULL: past the list's end */
};

/* The first key of the i-th tile, of the chunks that every side-th thread block takes. */
static __device__ int tile_begin(int i, int turn, int side) {
    const int each = SPLIT_KEYS / LIST_TILE;
    return (i / each * side + turn) * SPLIT_KEYS + i % each * LIST_TILE;
}

/* A list as a thread block goes through it. */
template <typename Keys> struct ListWalk {
    Keys keys;
    Slices slices;
    int turn, side;
    __device__ int begin(int i) const { return tile_begin(i, turn, side); }
    /* The row of this thread's key in tile i. */
    __device__ const uint8_t *name(int i) const {
        const int s = begin(i) + threadIdx.x;
        /* Asked for without waiting for the length. */
        const uint8_t *row = threadIdx.x < LIST_TILE && s < keys.bound() ? keys.row(s) : NULL;
        return s < keys.length ? row : NULL;
    }
};

/* Where piece p of a row lies, from its start. */
template <typename Keys, int KEY, bool FP8> static __device__ int piece_offset(const Slices &slices, int p) {
    const int each = KEY / (FP8 ? 16 : 8);
    if (Keys::shared) return 16 * p;
    if (p < each) return slices.key + 16 * p;
    if (p < 2 * each) return slices.value + 16 * (p - each);
    return (p == 2 * each ? slices.key_scale : slices.value_scale) & ~15;
}

/* Eight values of a draft block's own row, f32, as bf16; offset: in a row of bf16. */
static __device__ uint4 narrow_own(const uint8_t *row, int offset) {
    const float4 a = *(const float4 *)(row + 2 * offset), b = *(const float4 *)(row + 2 * offset + 16);
    return make_uint4(pair_bf16(a.x, a.y), pair_bf16(a.z, a.w), pair_bf16(b.x, b.y), pair_bf16(b.z, b.w));
}

/* The addresses of the first tiles' rows, all asked for before the first is waited for. */
template <typename Keys> static __device__ void name_first(const uint8_t *(*source)[LIST_TILE], const ListWalk<Keys> &walk) {
    const uint8_t *named[NAMED_TILES];
#pragma unroll
    for (int i = 0; i < NAMED_TILES; i++) named[i] = walk.name(i);
#pragma unroll
    for (int i = 0; i < NAMED_TILES; i++)
        if (threadIdx.x < LIST_TILE) source[i][threadIdx.x] = named[i];
    __syncthreads();
}

/* The pieces [FROM, TO) of tile i begin their way into shared memory; those past the list's end are zeros. A thread takes the
 * same piece of several keys. */
template <typename Keys, int KEY, int VALUE, bool FP8, int FROM, int TO, int BLOCK, int STAGES, int WIDENED>
static __device__ void start_pieces(ListTiles<Keys, KEY, VALUE, FP8, STAGES, WIDENED> *tiles, const ListWalk<Keys> &walk, int i) {
    typedef ListRow<Keys, KEY, VALUE, FP8> Shape;
    const int begin = walk.begin(i);
    if constexpr (TO > FROM)
        if (begin < walk.keys.length) {
            const int pieces = TO - FROM, at_once = BLOCK / pieces, p = FROM + threadIdx.x % pieces, first = threadIdx.x / pieces,
                      offset = piece_offset<Keys, KEY, FP8>(walk.slices, p);
            uint8_t *to = tiles->stored[i % STAGES] + 16 * p;
            const uint8_t *const *source = tiles->source[i % NAMED_TILES];
#pragma unroll
            for (int u = 0; u < (LIST_TILE + at_once - 1) / at_once; u++) {
                const int s = first + u * at_once;
                if (first >= at_once || s >= LIST_TILE) continue;
                const uint8_t *row = source[s];
                if constexpr (std::is_same_v<Keys, BlockKeys>)
                    if (row && walk.keys.own(begin + s)) {
                        *(uint4 *)(to + s * Shape::STORED) = narrow_own(row, offset);
                        continue;
                    }
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                             :: "r"(shared_address(to + s * Shape::STORED)), "l"(row + offset), "r"(row ? 16 : 0) : "memory");
            }
        }
    commit_copies();
}


/* 16 values of e4m3 as bf16, times their scale. */
static __device__ void widen_piece(__nv_bfloat16 *to, const uint8_t *from, float scale) {
    const uint4 piece = *(const uint4 *)from;
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    uint32_t out[8];
#pragma unroll
    for (int w = 0; w < 8; w++) {
        const __nv_fp8x2_storage_t two = (__nv_fp8x2_storage_t)(words[w / 2] >> 16 * (w % 2));
        const float2 value = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
        out[w] = pair_bf16(value.x * scale, value.y * scale);
    }
    *(uint4 *)to = make_uint4(out[0], out[1], out[2], out[3]);
    *(uint4 *)(to + 8) = make_uint4(out[4], out[5], out[6], out[7]);
}

/* Tile i, which has arrived, as bf16. A thread takes the same piece of several keys. */
template <typename Keys, int KEY, int VALUE, int BLOCK, int STAGES, int WIDENED>
static __device__ void widen_list_tile(ListTiles<Keys, KEY, VALUE, true, STAGES, WIDENED> *tiles, const Slices &slices, int i) {
    typedef ListRow<Keys, KEY, VALUE, true> Shape;
    const int quantised = (Keys::shared ? VALUE : Shape::WIDTH) / 16, pieces = quantised + (Keys::shared ? (KEY - VALUE) / 8 : 0),
              at_once = BLOCK / pieces, p = threadIdx.x % pieces, first = threadIdx.x / pieces;
    const int scale = Keys::shared ? VALUE + p / 8 * 4
                                   : quantised * 16 + (p < KEY / 16 ? slices.key_scale % 16 : 16 + slices.value_scale % 16);
#pragma unroll 4
    for (int s = first; s < LIST_TILE && first < at_once; s += at_once) {
        const uint8_t *row = tiles->stored[i % STAGES] + s * Shape::STORED;
        __nv_bfloat16 *to = tiles->widened[i % WIDENED] + s * Shape::PITCH;
        const uint32_t *plain = (const uint32_t *)(row + VALUE + VALUE / 128 * 4) + (p - quantised) * 4;
        if (p < quantised) widen_piece(to + 16 * p, row + 16 * p, *(const float *)(row + scale));
        else *(uint4 *)(to + VALUE + (p - quantised) * 8) = make_uint4(plain[0], plain[1], plain[2], plain[3]);
    }
}

/* A tile's rows of q in shared memory: which keys each of them sees, and its vector in q and y; the last is repeated. */
template <int M, int KEY> struct TileQueries {
    __nv_bfloat16 values[M * (KEY + 8)];
    int first[M], end[M], vector[M];
};

/* A key/value head's heads of each of the tile's rows of q. */
template <typename Keys, int M, int KEY, int BLOCK>
static __device__ void load_queries(TileQueries<M, KEY> *queries, const Keys &keys, const Attend &a, TileRows rows, int kv) {
    const int group = a.heads / a.kv_heads, used = (rows.end - rows.first) * group;
    for (int m = threadIdx.x; m < M; m += BLOCK) {
        const int row = rows.first + min(m, used - 1) / group;
        const ListSpan span = keys.span(row);
        queries->first[m] = span.first;
        queries->end[m] = span.end;
        if (a.parts) list_lengths[row] = span.end;
        queries->vector[m] = row * a.heads + kv * group + min(m, used - 1) % group;
    }
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < divide_up(used, 16) * 16 * (KEY / 4); i += BLOCK) {
        const int m = i / (KEY / 4), j = i % (KEY / 4) * 4;
        const float4 four = m < used ? *(const float4 *)(a.q + (size_t)queries->vector[m] * KEY + j) : make_float4(0, 0, 0, 0);
        *(uint2 *)(queries->values + m * (KEY + 8) + j) = make_uint2(pair_bf16(four.x, four.y), pair_bf16(four.z, four.w));
    }
}

static __device__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The largest dot product of a row so far as exponents count it: 0 where it has seen nothing. */
static __device__ float reference(float largest, float scale) { return largest == -FLT_MAX ? 0 : largest * scale; }

/* What a thread keeps of its two rows g and g + 8, g = lane / 4, of 16: values, as fragments, the sum of the weights in all
 * columns of another, and the largest dot product. */
template <int COLUMNS> struct Sums {
    float total[COLUMNS][4], sum[4], largest[2];
};

template <int COLUMNS> static __device__ void clear(Sums<COLUMNS> &sums) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int t = 0; t < COLUMNS; t++) sums.total[t][i] = 0;
        sums.sum[i] = 0;
    }
    sums.largest[0] = sums.largest[1] = -FLT_MAX;
}

/* What was summed of row i shrinks as its largest product grows. */
template <int COLUMNS> static __device__ void raise_largest(Sums<COLUMNS> &sums, int i, float largest, float scale) {
    const float shrink = power_of_two((sums.largest[i] - largest) * scale);
    sums.largest[i] = largest;
#pragma unroll
    for (int t = 0; t < COLUMNS; t++) sums.total[t][2 * i] *= shrink, sums.total[t][2 * i + 1] *= shrink;
    sums.sum[2 * i] *= shrink, sums.sum[2 * i + 1] *= shrink;
}

/* The chunks before this one, folded. */
template <int COLUMNS> struct Folded {
    float total[COLUMNS][4], sum[2], maximum[2];
};

template <int COLUMNS> static __device__ void fold_sums(Folded<COLUMNS> &all, const Sums<COLUMNS> &sums, float scale) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float2 shares = fold_chunk(&all.maximum[i], &all.sum[i], sums.largest[i] * scale, sums.sum[2 * i]);
#pragma unroll
        for (int t = 0; t < COLUMNS; t++) {
            all.total[t][2 * i] = fold_value(all.total[t][2 * i], sums.total[t][2 * i], shares);
            all.total[t][2 * i + 1] = fold_value(all.total[t][2 * i + 1], sums.total[t][2 * i + 1], shares);
        }
    }
}

/* A chunk leaves its part, of rows from `top` on; this thread's values of each row begin at `first`. */
template <int COLUMNS>
static __device__ void leave_part(const Sums<COLUMNS> &sums, const Attend &a, const int *vectors, int top, int used_rows,
                                  int first, int value_dim, int chunk) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = top + 8 * i + (int)threadIdx.x % 32 / 4;
        if (row >= used_rows) continue;
        float *part = partial_of(a.parts, 0, vectors[row] - a.first_row * a.heads, 0, chunk, a.chunks, value_dim),
              *out = part + 2 + first;
        if (first == 0) part[0] = sums.largest[i] * a.scale, part[1] = sums.sum[2 * i];
#pragma unroll
        for (int t = 0; t < COLUMNS; t++) *(float2 *)(out + t * 8) = make_float2(sums.total[t][2 * i], sums.total[t][2 * i + 1]);
    }
}

/* Results, in y. */
template <int COLUMNS>
static __device__ void write_sums(const float (&total)[COLUMNS][4], const float (&sum)[2], float *y, const int *vectors, int top,
                                  int used_rows, int first, int value_dim) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = top + 8 * i + (int)threadIdx.x % 32 / 4;
        if (row >= used_rows) continue;
        float *out = y + (size_t)vectors[row] * value_dim + first, inverse = 1 / sum[i];
#pragma unroll
        for (int t = 0; t < COLUMNS; t++)
            *(float2 *)(out + t * 8) = make_float2(total[t][2 * i] * inverse, total[t][2 * i + 1] * inverse);
    }
}

/* ---- narrow tiles */

template <typename Keys, int KEY, int VALUE, bool FP8> struct NarrowShared {
    static const int STAGES = 3;
    ListTiles<Keys, KEY, VALUE, FP8, STAGES> tiles;
    TileQueries<NARROW_ROWS, KEY> queries;
    __nv_bfloat16 weights[NARROW_ROWS * WEIGHTS_PITCH];
    float largest[NARROW_WARPS][NARROW_ROWS];
};

/* c [rows, 16 keys of this warp] = q . k, and their maxima; keys that a row does not see have -FLT_MAX. */
template <int KEY, typename Shared>
static __device__ void score_narrow(float (&c)[2][4], Shared *shared, const __nv_bfloat16 *rows, int pitch, int begin) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const __nv_bfloat16 *a_row = shared->queries.values + lane % 16 * (KEY + 8) + lane / 16 * 8,
                        *b_row = rows + (warp * 16 + lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < KEY; k += 16) {
        uint32_t a[4], b[4];
        load_matrices(a, a_row + k);
        load_matrices(b, b_row + k);
        multiply_bf16(c[0], a, b[0], b[1]);
        multiply_bf16(c[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = 8 * i + lane / 4, first = shared->queries.first[row] - begin, end = shared->queries.end[row] - begin;
        float largest = -FLT_MAX;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float &score = c[j / 2][2 * i + j % 2];
            const int s = warp * 16 + j / 2 * 8 + lane % 4 * 2 + j % 2;
            if (s < first || s >= end) score = -FLT_MAX;
            largest = fmaxf(largest, score);
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if (lane % 4 == 0) shared->largest[warp][row] = largest;
    }
}

/* Scores become weights, in shared memory. */
template <int COLUMNS, typename Shared>
static __device__ void weigh_narrow(Sums<COLUMNS> &sums, const float (&c)[2][4], Shared *shared, float scale) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = 8 * i + lane / 4;
        float largest = sums.largest[i];
#pragma unroll
        for (int w = 0; w < NARROW_WARPS; w++) largest = fmaxf(largest, shared->largest[w][row]);
        const float zero = reference(largest, scale);
        raise_largest(sums, i, largest, scale);
#pragma unroll
        for (int j = 0; j < 2; j++)
            *(uint32_t *)(shared->weights + row * WEIGHTS_PITCH + warp * 16 + j * 8 + lane % 4 * 2) =
                pair_bf16(power_of_two(__fmaf_rn(c[j][2 * i], scale, -zero)),
                          power_of_two(__fmaf_rn(c[j][2 * i + 1], scale, -zero)));
    }
}

/* total [rows, this warp's part of the values] += weights . values */
template <int COLUMNS, typename Shared>
static __device__ void add_narrow(Sums<COLUMNS> &sums, const Shared *shared, const __nv_bfloat16 *values, int pitch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const __nv_bfloat16 *a_row = shared->weights + lane % 16 * WEIGHTS_PITCH + lane / 16 * 8,
                        *b_row = values + lane % 16 * pitch + warp * COLUMNS * 8 + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < LIST_TILE; k += 16) {
        uint32_t a[4];
        load_matrices(a, a_row + k);
        add_values(sums.total, a, b_row + k * pitch);
        multiply_bf16(sums.sum, a, ONES, ONES);
    }
}

/* One tile of rows and the chunks `walk` has for it. Keys' pieces are on their way STAGES tiles ahead, values' almost. */
template <typename Keys, int KEY, int VALUE, bool FP8>
static __device__ void attend_narrow(NarrowShared<Keys, KEY, VALUE, FP8> *shared, const Attend &a, TileRows rows, int kv,
                                     const ListWalk<Keys> &walk) {
    typedef ListRow<Keys, KEY, VALUE, FP8> Shape;
    const int block = 32 * NARROW_WARPS, columns = VALUE / 8 / NARROW_WARPS, stages = NarrowShared<Keys, KEY, VALUE, FP8>::STAGES,
              group = a.heads / a.kv_heads, used_rows = (rows.end - rows.first) * group,
              first = (int)threadIdx.x / 32 * columns * 8 + (int)threadIdx.x % 4 * 2;
    auto start_early = [&](int i) { start_pieces<Keys, KEY, VALUE, FP8, 0, Shape::EARLY, block>(&shared->tiles, walk, i); };
    auto start_late = [&](int i) {
        start_pieces<Keys, KEY, VALUE, FP8, Shape::EARLY, Shape::PIECES, block>(&shared->tiles, walk, i);
    };
    name_first(shared->tiles.source, walk);
    start_early(0);
#pragma unroll 1
    for (int i = 1; i < stages; i++) start_late(i - 1), start_early(i);
    load_queries<Keys, NARROW_ROWS, KEY, block>(&shared->queries, walk.keys, a, rows, kv);
    Sums<columns> sums;
    Folded<columns> all = {.total = {}, .sum = {}, .maximum = {-FLT_MAX, -FLT_MAX}};
    clear(sums);
    for (int i = 0, begin = walk.begin(0); begin < walk.keys.length; begin = walk.begin(++i)) {
        wait_for_copies<2 * stages - (Shape::EARLY ? 2 : 3)>();
        __syncthreads();
        const uint8_t *named = walk.name(i + stages + 1);
        start_late(i + stages - 1);
        const __nv_bfloat16 *tile = (const __nv_bfloat16 *)shared->tiles.stored[i % stages];
        if constexpr (FP8) {
            widen_list_tile<Keys, KEY, VALUE, block>(&shared->tiles, walk.slices, i);
            tile = shared->tiles.widened[0];
            __syncthreads();
            start_early(i + stages);
        }
        float c[2][4] = {};
        score_narrow<KEY>(c, shared, tile, Shape::PITCH, begin);
        __syncthreads();
        if (!FP8) start_early(i + stages);
        weigh_narrow(sums, c, shared, a.scale * LOG2_E);
        if (threadIdx.x < LIST_TILE) shared->tiles.source[(i + stages + 1) % NAMED_TILES][threadIdx.x] = named;
        wait_for_copies<2 * stages - 1>();
        __syncthreads();
        add_narrow(sums, shared, tile + Shape::VALUES, Shape::PITCH);
        if (begin % SPLIT_KEYS + LIST_TILE < SPLIT_KEYS && begin + LIST_TILE < walk.keys.length) continue;
        if (a.parts) leave_part(sums, a, shared->queries.vector, 0, used_rows, first, VALUE, begin / SPLIT_KEYS);
        else fold_sums(all, sums, a.scale);
        clear(sums);
    }
    __syncthreads();
    if (!a.parts) write_sums(all.total, all.sum, a.y, shared->queries.vector, 0, used_rows, first, VALUE);
}

/* ---- middle tiles: a warp takes 16 rows */

template <typename Keys, int KEY, int VALUE, bool FP8> struct MiddleShared {
    ListTiles<Keys, KEY, VALUE, FP8, 2> tiles;
    TileQueries<MIDDLE_ROWS, KEY> queries;
};

/* Values [k, k + 16) of the 16 rows of q that a warp has. */
template <int KEY> static __device__ void load_query(uint32_t (&a)[4], const __nv_bfloat16 *queries, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices(a, queries + lane % 16 * (KEY + 8) + lane / 16 * 8 + k);
}

/* scores [16 rows, 64 keys] = q . k; query(a, k) loads q. */
template <int KEY, typename Query>
static __device__ void score_rows(float (&c)[LIST_TILE / 8][4], Query query, const __nv_bfloat16 *keys, int pitch) {
    const int lane = threadIdx.x % 32;
    const __nv_bfloat16 *b_row = keys + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < KEY; k += 16) {
        uint32_t a[4], b[4];
        query(a, k);
#pragma unroll
        for (int t = 0; t < LIST_TILE / 8; t += 2) {
            load_matrices(b, b_row + t * 8 * pitch + k);
            multiply_bf16(c[t], a, b[0], b[1]);
            multiply_bf16(c[t + 1], a, b[2], b[3]);
        }
    }
}

/* Keys that rows do not see have -FLT_MAX from now on; `top` is the warp's first row. Most tiles are seen by all. */
template <int M, int KEY>
static __device__ void mask_rows(float (&c)[LIST_TILE / 8][4], const TileQueries<M, KEY> &queries, int top, int begin) {
    if (begin >= queries.first[M - 1] && begin + LIST_TILE <= queries.end[0]) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int lane = threadIdx.x % 32, row = top + lane / 4 + 8 * i, first = queries.first[row] - begin,
                  end = queries.end[row] - begin;
#pragma unroll
        for (int j = 0; j < LIST_TILE / 4; j++) {
            const int s = j / 2 * 8 + lane % 4 * 2 + j % 2;
            if (s < first || s >= end) c[j / 2][2 * i + j % 2] = -FLT_MAX;
        }
    }
}

/* Scores become weights. */
template <int COLUMNS> static __device__ void weigh_rows(Sums<COLUMNS> &sums, float (&c)[LIST_TILE / 8][4], float scale) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float largest = -FLT_MAX;
#pragma unroll
        for (int j = 0; j < LIST_TILE / 4; j++) largest = fmaxf(largest, c[j / 2][2 * i + j % 2]);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        largest = fmaxf(largest, sums.largest[i]);
        const float zero = reference(largest, scale);
        raise_largest(sums, i, largest, scale);
#pragma unroll
        for (int j = 0; j < LIST_TILE / 4; j++)
            c[j / 2][2 * i + j % 2] = power_of_two(__fmaf_rn(c[j / 2][2 * i + j % 2], scale, -zero));
    }
}

/* total [16 rows, values] += weights . values; two neighbouring accumulators of scores are a fragment of weights. */
template <int COLUMNS>
static __device__ void add_rows(Sums<COLUMNS> &sums, const float (&c)[LIST_TILE / 8][4], const __nv_bfloat16 *values,
                                int pitch) {
    const int lane = threadIdx.x % 32;
    const __nv_bfloat16 *b_row = values + lane % 16 * pitch + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < LIST_TILE / 16; k++) {
        const uint32_t a[4] = {pair_bf16(c[2 * k][0], c[2 * k][1]), pair_bf16(c[2 * k][2], c[2 * k][3]),
                               pair_bf16(c[2 * k + 1][0], c[2 * k + 1][1]), pair_bf16(c[2 * k + 1][2], c[2 * k + 1][3])};
        add_values(sums.total, a, b_row + k * 16 * pitch);
        multiply_bf16(sums.sum, a, ONES, ONES);
    }
}

/* One tile of rows and the chunks `walk` has for it. */
template <typename Keys, int KEY, int VALUE, bool FP8>
static __device__ void attend_middle(MiddleShared<Keys, KEY, VALUE, FP8> *shared, const Attend &a, TileRows rows, int kv,
                                     const ListWalk<Keys> &walk) {
    typedef ListRow<Keys, KEY, VALUE, FP8> Shape;
    const int block = 32 * NARROW_WARPS, columns = VALUE / 8, top = threadIdx.x / 32 * 16, first = threadIdx.x % 4 * 2,
              group = a.heads / a.kv_heads, used_rows = (rows.end - rows.first) * group;
    const bool works = top < used_rows;
    auto start = [&](int i) { start_pieces<Keys, KEY, VALUE, FP8, 0, Shape::PIECES, block>(&shared->tiles, walk, i); };
    auto query = [&](uint32_t (&a)[4], int k) { load_query<KEY>(a, shared->queries.values + top * (KEY + 8), k); };
    name_first(shared->tiles.source, walk);
    start(0);
    load_queries<Keys, MIDDLE_ROWS, KEY, block>(&shared->queries, walk.keys, a, rows, kv);
    Sums<columns> sums;
    Folded<columns> all = {.total = {}, .sum = {}, .maximum = {-FLT_MAX, -FLT_MAX}};
    clear(sums);
    for (int i = 0, begin = walk.begin(0); begin < walk.keys.length; begin = walk.begin(++i)) {
        wait_for_copies<0>();
        __syncthreads();
        const uint8_t *named = walk.name(i + NAMED_TILES);
        start(i + 1);
        const __nv_bfloat16 *tile = (const __nv_bfloat16 *)shared->tiles.stored[i % 2];
        if constexpr (FP8) {
            widen_list_tile<Keys, KEY, VALUE, block>(&shared->tiles, walk.slices, i);
            tile = shared->tiles.widened[0];
            __syncthreads();
        }
        if (works) {
            float c[LIST_TILE / 8][4] = {};
            score_rows<KEY>(c, query, tile, Shape::PITCH);
            mask_rows(c, shared->queries, top, begin);
            weigh_rows(sums, c, a.scale * LOG2_E);
            add_rows(sums, c, tile + Shape::VALUES, Shape::PITCH);
            if (begin % SPLIT_KEYS + LIST_TILE >= SPLIT_KEYS || begin + LIST_TILE >= walk.keys.length) {
                if (a.parts) leave_part(sums, a, shared->queries.vector, top, used_rows, first, VALUE, begin / SPLIT_KEYS);
                else fold_sums(all, sums, a.scale);
                clear(sums);
            }
        }
        if (threadIdx.x < LIST_TILE) shared->tiles.source[i % NAMED_TILES][threadIdx.x] = named;
    }
    if (!a.parts) write_sums(all.total, all.sum, a.y, shared->queries.vector, top, used_rows, first, VALUE);
}

/* Thread blocks take tiles, key/value heads and, of longer lists, every side-th chunk, in turns. */
template <typename Keys, int KEY, int VALUE, bool FP8>
static __global__ void __launch_bounds__(32 * NARROW_WARPS, 2)
short_runs(Keys lists, const __grid_constant__ Attend a, int longest_run, int side) {
    begin_kernel();
    extern __shared__ __align__(128) uint8_t runs_shared[];
    __shared__ TilePlan plan;
    __shared__ Keys found;
    const int group = a.heads / a.kv_heads, each = min((int)MIDDLE_RUN, MIDDLE_ROWS / group),
              items = lists.tiles(&plan, a, each, 1, longest_run) * side * a.kv_heads;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int kv = item % a.kv_heads, turn = item / a.kv_heads % side;
        const TileRows rows = lists.tile(&plan, item / a.kv_heads / side, a, each);
        if (rows.first >= rows.end) continue;
        __syncthreads();                            /* the tile before this one is done with */
        if (threadIdx.x == 0) found = lists.of(rows.end - 1);       /* no row sees more than the last; one thread asks the host */
        __syncthreads();
        const ListWalk<Keys> walk = {found, lists.slices(kv), turn, side};
        if (walk.begin(0) >= max(walk.keys.length, 1)) continue;
        if ((rows.end - rows.first) * group <= NARROW_ROWS)
            attend_narrow((NarrowShared<Keys, KEY, VALUE, FP8> *)runs_shared, a, rows, kv, walk);
        else attend_middle((MiddleShared<Keys, KEY, VALUE, FP8> *)runs_shared, a, rows, kv, walk);
    }
}

/* ---- wide tiles */

template <typename Keys, int KEY, int VALUE, bool FP8> struct WideShared {
    static const int STAGES = FP8 ? 2 : 3;
    ListTiles<Keys, KEY, VALUE, FP8, STAGES, 2> tiles;
    TileQueries<WIDE_ROWS, KEY> queries;
    float4 folded[VALUE / 8][32 * WIDE_WARPS];      /* each thread's values of the chunks before this one: registers are scarce */
    __device__ const __nv_bfloat16 *tile(int i) const {
        return FP8 ? tiles.widened[i % 2] : (const __nv_bfloat16 *)tiles.stored[i % STAGES];
    }
};

/* The end of a chunk: it is folded into those before it. */
template <int COLUMNS>
static __device__ void fold_wide(float4 (*folded)[32 * WIDE_WARPS], float (&maximum)[2], float (&sum)[2],
                                 const Sums<COLUMNS> &sums, float scale) {
    float2 shares[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        shares[i] = fold_chunk(&maximum[i], &sum[i], sums.largest[i] * scale, sums.sum[2 * i]);
#pragma unroll
    for (int t = 0; t < COLUMNS; t++) {
        const float4 before = folded[t][threadIdx.x];
        const float (&next)[4] = sums.total[t];
        folded[t][threadIdx.x] = make_float4(fold_value(before.x, next[0], shares[0]), fold_value(before.y, next[1], shares[0]),
                                             fold_value(before.z, next[2], shares[1]), fold_value(before.w, next[3], shares[1]));
    }
}

/* One tile of rows and their whole lists. The next tile's scores are made beside this one's weights. */
template <typename Keys, int KEY, int VALUE, bool FP8>
static __device__ void attend_wide(WideShared<Keys, KEY, VALUE, FP8> *shared, const Keys &lists, const Attend &a, TileRows rows,
                                   int kv) {
    typedef ListRow<Keys, KEY, VALUE, FP8> Shape;
    const int block = 32 * WIDE_WARPS, columns = VALUE / 8, lane = threadIdx.x % 32, top = threadIdx.x / 32 * 16,
              group = a.heads / a.kv_heads, used_rows = (rows.end - rows.first) * group;
    const ListWalk<Keys> walk = {lists.of(rows.end - 1), lists.slices(kv), 0, 1};
    const bool works = top < used_rows;
    auto start = [&](int i) { start_pieces<Keys, KEY, VALUE, FP8, 0, Shape::PIECES, block>(&shared->tiles, walk, i); };
    auto arrive = [&](int i) {                      /* tile i can be read, and those before i - 1 are done with */
        wait_for_copies<0>();
        __syncthreads();
        if constexpr (FP8) {
            widen_list_tile<Keys, KEY, VALUE, block>(&shared->tiles, walk.slices, i);
            __syncthreads();
        }
    };
    name_first(shared->tiles.source, walk);
    start(0);
    load_queries<Keys, WIDE_ROWS, KEY, block>(&shared->queries, walk.keys, a, rows, kv);
    arrive(0);
    start(1);
    uint32_t q[KEY / 16][4];
#pragma unroll
    for (int k = 0; k < KEY; k += 16) load_query<KEY>(q[k / 16], shared->queries.values + top * (KEY + 8), k);
    auto query = [&](uint32_t (&a)[4], int k) {
        for (int i = 0; i < 4; i++) a[i] = q[k / 16][i];
    };
    Sums<columns> sums;
    float maximum[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {0, 0}, c[LIST_TILE / 8][4] = {};
    clear(sums);
#pragma unroll
    for (int t = 0; t < columns; t++) shared->folded[t][threadIdx.x] = make_float4(0, 0, 0, 0);
    if (works) score_rows<KEY>(c, query, shared->tile(0), Shape::PITCH);
    for (int i = 0, begin = 0; begin < walk.keys.length; begin = walk.begin(++i)) {
        const bool last = begin + LIST_TILE >= walk.keys.length;
        float next[LIST_TILE / 8][4] = {};
        if (!last) arrive(i + 1);
        const uint8_t *named = walk.name(i + NAMED_TILES);
        start(i + 2);
        if (works && !last) score_rows<KEY>(next, query, shared->tile(i + 1), Shape::PITCH);
        if (works) {
            mask_rows(c, shared->queries, top, begin);
            weigh_rows(sums, c, a.scale * LOG2_E);
            add_rows(sums, c, shared->tile(i) + Shape::VALUES, Shape::PITCH);
            if (begin % SPLIT_KEYS + LIST_TILE >= SPLIT_KEYS || last) {
                fold_wide(shared->folded, maximum, sum, sums, a.scale);
                clear(sums);
            }
        }
#pragma unroll
        for (int j = 0; j < LIST_TILE / 2; j++) c[j / 4][j % 4] = next[j / 4][j % 4];
        if (threadIdx.x < LIST_TILE) shared->tiles.source[i % NAMED_TILES][threadIdx.x] = named;
    }
#pragma unroll
    for (int t = 0; t < columns; t++) {
        const float4 four = shared->folded[t][threadIdx.x];
        sums.total[t][0] = four.x, sums.total[t][1] = four.y, sums.total[t][2] = four.z, sums.total[t][3] = four.w;
    }
    write_sums(sums.total, sum, a.y, shared->queries.vector, top, used_rows, lane % 4 * 2, VALUE);
}

/* Thread blocks take tiles of long runs and key/value heads in turns, always whole lists. */
template <typename Keys, int KEY, int VALUE, bool FP8>
static __global__ void __launch_bounds__(32 * WIDE_WARPS, 1) long_runs(Keys lists, const __grid_constant__ Attend a) {
    begin_kernel();
    extern __shared__ __align__(128) uint8_t long_shared[];
    __shared__ TilePlan plan;
    const int each = WIDE_ROWS / (a.heads / a.kv_heads), items = lists.tiles(&plan, a, each, WIDE_RUN, INT_MAX) * a.kv_heads;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        __syncthreads();                            /* the tile before this one is done with */
        attend_wide((WideShared<Keys, KEY, VALUE, FP8> *)long_shared, lists, a, lists.tile(&plan, item / a.kv_heads, a, each),
                    item % a.kv_heads);
    }
}

/* ---- Hopper: the same on warpgroups. What is summed up by itself is a tile of 64 keys, whose weights are relative to its own
 * largest score; tiles join in their order. Many rows: a thread block has a row's whole list, for 64 heads. Of its four
 * warpgroups, two bring rows: they gather a tile, widen it and hand it over, two tiles in turns. Two multiply: the first scores
 * and weighs a tile, then each adds up half of its values. Where there are more heads, two blocks bring half of each tile each,
 * for both. Few rows: blocks that share a list weigh its tiles, and others add up some of the values for some of the heads. */

enum {
    COLUMN_BLOCK = 64 * 128,    /* bytes of 64 columns of a tile or of the queries: 64 rows of 128 bytes, swizzled */
    HOPPER_TILE = LATENT_WIDTH / 64 * COLUMN_BLOCK,
    CONSUMERS = 256, PRODUCERS = 256,       /* threads */
    HALF_KEYS = HOPPER_KEYS / 2,            /* of a tile, that are brought at a time: in a step */
    STEPS_AHEAD = 4,            /* rows are fetched into the L2 cache */
    CONSUMER_REGISTERS = 200, PRODUCER_REGISTERS = 56,      /* of a thread */
    WEIGHTS_READY = 1, WEIGHTS_TAKEN, QUERY_READY, RESULT_READY,    /* barriers among the consumers, */
    HALF_READY,                 /* and among the producers */
    RESULT_PITCH = LATENT * 4 + 16,         /* bytes from head to head of a result in shared memory: in other banks */
};

/* How a row of DeepSeek-V4 lies, of 512 values. */
enum RowKind { ROW_BF16, ROW_E4M3, ROW_E4M3_PLAIN, ROW_E2M1, ROW_OTHER };

/* How a tile joins those before it: what they are multiplied by, and what it is. */
struct Joining { float before, own; };

struct HopperShared {
    uint8_t query[HOPPER_TILE], tiles[2][HOPPER_TILE];
    uint4 weights[HOPPER_KEYS / 16][128];   /* of a tile, as the threads of a warpgroup hold them */
    Joining joining[LATENT_HEADS];          /* of the tile that the weights are of */
    float sum[LATENT_HEADS];                /* of a whole list */
    uint64_t full[2], empty[2];             /* barriers of the tiles */
};

/* The last `turned` values of a head are rotated by a row's angle, in a query (whose heads are normed first, unless eps is below
 * 0), and back in a result: keys that are values too come with their rotation. */
struct Turning {
    const float *cosine, *sine; /* [rows, turned / 2]; of(r): [turned / 2] */
    int turned;
    float eps;
    __device__ Turning of(int r) const {
        return {cosine + (size_t)r * (size_t)(turned / 2), sine + (size_t)r * (size_t)(turned / 2), turned, eps};
    }
    /* A head of a query, of which the lane has four of each 128 values. */
    template <int N> __device__ void query(float4 (&four)[N]) const {
        float squares = 0;
#pragma unroll
        for (int c = 0; c < N; c++) squares += sum_squares(four[c]);
        const float scale = eps < 0 ? 1 : 1 / sqrtf(warp_sum(squares) / (N * 128) + eps);
#pragma unroll
        for (int c = 0; c < N; c++) {
            four[c] = weighted(four[c], scale, make_float4(1, 1, 1, 1));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = (c * 128 + lane_id() * 4 + half * 2 - (N * 128 - turned)) / 2;
                if (c * 128 + lane_id() * 4 + half * 2 >= N * 128 - turned)
                    rotate(half ? &four[c].z : &four[c].x, 1, cosine[i], sine[i]);
            }
        }
    }
    /* Values `column` and its neighbour of `width`. A sum over nothing is 0 however it was come by, and not -0. */
    __device__ float2 back(float2 pair, int column, int width) const {
        const int i = (column - (width - turned)) / 2;
        if (column < width - turned) return pair;
        const float c = cosine[i], s = sine[i];
        return make_float2(__fadd_rn(__fmaf_rn(pair.x, c, __fmul_rn(pair.y, s)), 0),
                           __fadd_rn(__fmaf_rn(pair.y, c, -__fmul_rn(pair.x, s)), 0));
    }
};

/* What a thread block does: tiles of one row's list, from tile `first` on, for up to 64 heads. */
template <typename Lists> struct LatentTask {
    Lists keys;                 /* the row's */
    const float *q;             /* [n_heads, Lists::WIDTH] */
    float *z;                   /* [n_heads, LATENT] the result */
    int n_heads, first_head, first, tiles;
    float scale;
    Turning turn;
};

/* What a head has before its first tile: nothing, or its sink. A thread has one of four sums of it. */
template <typename Lists> static __device__ float2 first_sum(const Lists &keys, int head, bool there, int quarter, float scale) {
    if constexpr (std::is_same_v<Lists, WindowKeys>)
        if (there) return make_float2(keys.sinks[head] / scale, quarter ? 0 : 1);
    return make_float2(-FLT_MAX, 0);
}

static __device__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* How a tile with this maximum joins those before, whose maximum becomes that of all. Exponents are of 2. */
static __device__ Joining join_maximum(float *maximum, float own, float scale) {
    const float larger = fmaxf(*maximum, own);
    const Joining joining = {fast_exp2((*maximum - larger) * scale), fast_exp2((own - larger) * scale)};
    *maximum = larger;
    return joining;
}

static __device__ float join(float before, float own, const Joining &joining) {
    return __fmaf_rn(own, joining.own, __fmul_rn(before, joining.before));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* So far, or in a tile, for a thread's two heads: the largest score before scaling, and the sum of the thread's own weights. */
struct Softmax { float maximum[2], sum[2]; };

/* Two e4m3 times their scale, as bf16. */
static __device__ uint32_t widen_two(uint32_t codes, float scale) {
    const __half2 two = __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)codes, __NV_E4M3));
    return pair_bf16(__low2float(two) * scale, __high2float(two) * scale);
}

static __device__ uint4 widen_eight(uint2 codes, float scale) {
    return make_uint4(widen_two(codes.x, scale), widen_two(codes.x >> 16, scale), widen_two(codes.y, scale),
                      widen_two(codes.y >> 16, scale));
}

static __device__ void consumers_wait(int barrier) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"((int)CONSUMERS) : "memory");
}

static __device__ void consumers_tell(int barrier) {
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "n"((int)CONSUMERS) : "memory");
}

/* A matrix in shared memory as products want to know it: rows of 128 swizzled bytes, eight of them in 1,024. Where the
 * products do not sum over its columns, the next 64 of these lie `apart` bytes behind the first. */
static __device__ uint64_t matrix_at(uint32_t address, uint32_t apart) {
    const uint32_t low = address / 16 | apart / 16 << 16, high = 1024 / 16 | 1u << 30;
    uint64_t matrix;
    asm("mov.b64 %0, {%1, %2};" : "=l"(matrix) : "r"(low), "r"(high));
    return matrix;
}

#define EIGHT_OF(c, i) \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define THIRTY_TWO_OF(c, i) EIGHT_OF(c, i), EIGHT_OF(c, i + 8), EIGHT_OF(c, i + 16), EIGHT_OF(c, i + 24)
#define FIRST_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
    "%26, %27, %28, %29, %30, %31"

/* c [64 heads, 64 keys] = (add ? c : 0) + a [64, 16] b^T, both in shared memory, by a warpgroup. */
static __device__ void multiply_scores(float (&c)[32], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_32 "}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : THIRTY_TWO_OF(c, 0) : "l"(a), "l"(b), "r"(add));
}

/* c [64 heads, 64 values] = (add ? c : 0) + a [64, 16 keys] b, b in shared memory. */
static __device__ void multiply_values(float (&c)[32], const uint32_t *a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_32 "}, "
                 "{%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"
                 : THIRTY_TWO_OF(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* What products have left in c may be read from here on. */
static __device__ void take_products(float (&c)[32]) { asm volatile("" : THIRTY_TWO_OF(c, 0) :: "memory"); }

/* ---- pairs: two thread blocks of a cluster, which work on different heads of a row, bring half of each tile each, for both */

static __device__ uint32_t pair_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* The same place in the other block's shared memory. */
static __device__ uint32_t other_address(const void *p) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(pair_rank() ^ 1));
    return address;
}

static __device__ void pair_wait() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Arrives at the other block's barrier. */
static __device__ void arrive_at_other(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(other_address(barrier)) : "memory");
}

/* The block's half of a tile goes into the other block's tile too, whose barrier counts the bytes. By one thread. */
static __device__ void give_half(uint8_t *tile, uint64_t *full) {
    const uint32_t to = other_address(tile), barrier = other_address(full), half = pair_rank() * (COLUMN_BLOCK / 2);
    for (int block = 0; block < LATENT_WIDTH / 64; block++)
        asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(to + block * COLUMN_BLOCK + half), "r"(shared_address(tile + block * COLUMN_BLOCK + half)),
                        "n"(COLUMN_BLOCK / 2), "r"(barrier) : "memory");
}

/* ---- bringing rows: half a tile at a time, a row by eight lanes. Of a pair's tile, a block brings the half of its rank. */

/* The thread's row of step `step`; behind the end, where weights are 0, the last one again. */
template <bool PAIR> static __device__ DeviceRow row_of_step(const LatentTask<SelectedKeys> &task, int step) {
    const int half = PAIR ? 2 * step + pair_rank() : step, key = threadIdx.x % PRODUCERS / 8;
    return task.keys.locations[min(task.first * HOPPER_KEYS + half * HALF_KEYS + key, task.keys.length - 1)];
}

static __device__ const uint8_t *latent_row(const SelectedKeys &keys, DeviceRow row) {
    return row_at(keys.pool, keys.format.stride, row);
}

/* Where piece `piece` of 16 bytes of a row belongs in a block of 64 columns. */
static __device__ uint8_t *place_of(uint8_t *block, int key, int piece) {
    return block + key * 128 + (piece ^ key % 8) * 16;
}

/* A row will be wanted soon: into the L2 cache, where fetching it takes less long. */
static __device__ void prefetch_row(const uint8_t *row) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(row), "n"(StoredRow<true>::PITCH) : "memory");
}

static __device__ uint4 load_piece(const uint8_t *from) {
    uint4 piece;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(from));
    return piece;
}

/* Brings bf16 rows: copies that tell the barrier themselves. */
static __device__ void bring_bf16(HopperShared *shared, const LatentTask<SelectedKeys> &task) {
    const int piece = threadIdx.x % 8;
    DeviceRow next = row_of_step<false>(task, 0);
    for (int step = 0; step < 2 * task.tiles; step++) {
        const int t = step / 2, key = step % 2 * HALF_KEYS + threadIdx.x % PRODUCERS / 8;
        const uint8_t *row = latent_row(task.keys, next);
        next = row_of_step<false>(task, step + 1);
        if (t > 1 && step % 2 == 0) wait_at(&shared->empty[t % 2], t / 2 - 1);
#pragma unroll
        for (int block = 0; block < LATENT_WIDTH / 64; block++)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                         :: "r"(shared_address(place_of(shared->tiles[t % 2] + block * COLUMN_BLOCK, key, piece))),
                            "l"(row + block * 128 + piece * 16) : "memory");
        if (step % 2) arrive_with_copies(&shared->full[t % 2]);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Brings fp8 rows. A row's lanes take its pieces of 16 values in turns, and eight of its plain columns each; those of the next
 * step are on their way while this one's are widened, and those after them on their way to the L2 cache. */
template <bool PAIR> static __device__ void bring_fp8(HopperShared *shared, const LatentTask<SelectedKeys> &task) {
    enum { PIECES = LATENT / 16 / 8, STEPS = PAIR ? 1 : 2 };
    const int lane = threadIdx.x % 8, second = lane / 4;        /* which half of a piece goes first, for the banks */
    const uint8_t *row = latent_row(task.keys, row_of_step<PAIR>(task, 0));
    DeviceRow after = row_of_step<PAIR>(task, 1), later = row_of_step<PAIR>(task, STEPS_AHEAD);
    uint4 codes[PIECES], plain;
    float scales[PIECES];
    auto load_codes = [&](int i) {
        codes[i] = load_piece(row + (lane + i * 8) * 16);
        asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(scales[i]) : "l"(row + LATENT + i * 4));
    };
    auto load_plain = [&] { plain = load_piece(row + LATENT + LATENT / 128 * 4 + lane * 16); };
#pragma unroll
    for (int i = 0; i < PIECES; i++) load_codes(i);
    load_plain();
    if (lane == 0) prefetch_row(latent_row(task.keys, after));
    for (int step = 0; step < STEPS * task.tiles; step++) {
        const int t = step / STEPS, key = (PAIR ? pair_rank() : step % 2) * HALF_KEYS + threadIdx.x % PRODUCERS / 8;
        uint8_t *tile = shared->tiles[t % 2];
        uint64_t *full = &shared->full[t % 2];
        if (lane == 0) prefetch_row(latent_row(task.keys, later));
        row = latent_row(task.keys, after);
        after = row_of_step<PAIR>(task, step + 2), later = row_of_step<PAIR>(task, step + 1 + STEPS_AHEAD);
        if (t > 1 && step % STEPS == 0) wait_at(&shared->empty[t % 2], t / 2 - 1);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const uint2 low = make_uint2(codes[i].x, codes[i].y), high = make_uint2(codes[i].z, codes[i].w);
            uint8_t *block = tile + (i * 2 + second) * COLUMN_BLOCK;
            *(uint4 *)place_of(block, key, lane % 4 * 2 + second) = widen_eight(second ? high : low, scales[i]);
            *(uint4 *)place_of(block, key, lane % 4 * 2 + 1 - second) = widen_eight(second ? low : high, scales[i]);
            load_codes(i);
        }
        *(uint4 *)place_of(tile + LATENT / 64 * COLUMN_BLOCK, key, lane) = plain;
        load_plain();
        if (step % STEPS < STEPS - 1) continue;
        show_to_products();
        if (PAIR) asm volatile("bar.sync %0, %1;" :: "n"((int)HALF_READY), "n"((int)PRODUCERS) : "memory");
        if (PAIR && threadIdx.x % PRODUCERS == 0) expect_bytes(full, HOPPER_TILE / 2), give_half(tile, full);
        else arrive_at(full);
    }
}

/* ---- rows of DeepSeek-V4, of 512 values: window and pool may differ in how these lie */

/* The codes that a thread has of a row: 8 of each 64, with the scales of all of the row's. The last 64 values of ROW_E4M3_PLAIN
 * are bf16 and begin at an odd byte: 16 bytes of theirs lie in two aligned pieces. */
template <int KIND> struct RowPiece {
    static const int CODES = KIND == ROW_E4M3_PLAIN ? 7 : 8;
    uint2 codes[CODES];
    uint4 scales[KIND == ROW_E2M1 ? 2 : 1], plain[KIND == ROW_E4M3_PLAIN ? 2 : 1];

    __device__ void load_block(const uint8_t *row, int b, int lane) {
        if (b == CODES) return;
        if constexpr (KIND == ROW_E2M1)
            asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(codes[b].x) : "l"(row + b * 32 + lane * 4));
        else
            asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                         : "=r"(codes[b].x), "=r"(codes[b].y) : "l"(row + b * 64 + lane * 8));
    }

    __device__ void load_rest(const uint8_t *row, int lane) {
        scales[0] = load_piece(row + (KIND == ROW_E2M1 ? LATENT / 2 : CODES * 64));
        if constexpr (KIND == ROW_E2M1) scales[1] = load_piece(row + LATENT / 2 + 16);
        if constexpr (KIND == ROW_E4M3_PLAIN) {
            plain[0] = load_piece(row + CODES * 64 + lane * 16);
            plain[1] = load_piece(row + CODES * 64 + lane * 16 + 16);
        }
    }

    /* Byte i of the scales; i % 4 may be known late. */
    __device__ uint32_t scale_byte(int i) const {
        const uint4 &four = scales[KIND == ROW_E2M1 ? i / 16 : 0];
        const uint32_t word = i / 4 % 4 == 0 ? four.x : i / 4 % 4 == 1 ? four.y : i / 4 % 4 == 2 ? four.z : four.w;
        return word >> 8 * (i % 4) & 0xff;
    }

    /* The eight values of block b of 64. */
    __device__ uint4 widened(int b, int lane) const {
        if (b == CODES) {                           /* bytes 7 to 22 of the two pieces */
            const uint4 &p = plain[0], &q = plain[KIND == ROW_E4M3_PLAIN];
            return make_uint4(__byte_perm(p.y, p.z, 0x6543), __byte_perm(p.z, p.w, 0x6543), __byte_perm(p.w, q.x, 0x6543),
                              __byte_perm(q.x, q.y, 0x6543));
        }
        if constexpr (KIND == ROW_E2M1) {           /* 2^126 repairs the exponent; the scale has four bits, so all is exact */
            const uint32_t scale = pair_bf16(widen_e4m3(scale_byte(4 * b + lane / 2)), 0) * 0x10001;
            const uint4 apart = widen_eight(codes[b].x, 0x7e807e80);
            const uint32_t a = multiply_pair(apart.x, scale), c = multiply_pair(apart.y, scale),
                           d = multiply_pair(apart.z, scale), e = multiply_pair(apart.w, scale);
            return make_uint4(__byte_perm(a, c, 0x5410), __byte_perm(d, e, 0x5410), __byte_perm(a, c, 0x7632),
                              __byte_perm(d, e, 0x7632));
        } else {
            const int group = KIND == ROW_E4M3 ? 2 * b + lane / 4 : b;
            return widen_eight(codes[b < CODES ? b : 0], widen_e8m0(scale_byte(group)));
        }
    }
};

/* Brings `tiles` tiles of the window or of the pool, the block's from number `turn` on. */
template <int KIND, typename Source>
static __device__ void bring_rows(HopperShared *shared, Source row_of, int bytes, int turn, int tiles) {
    const int lane = threadIdx.x % 8, slot = threadIdx.x % PRODUCERS / 8, steps = 2 * tiles;
    auto row_of_step = [&](int step) { return row_of(step * HALF_KEYS + slot); };
    auto fetch = [&](int step) {                    /* it will be wanted soon: into the L2 cache */
        if (step < steps && lane == 0)
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                         :: "l"(row_of_step(step)), "r"((bytes + 15) / 16 * 16) : "memory");
    };
    RowPiece<KIND> piece;
    if (tiles <= 0) return;
    const uint8_t *row = row_of_step(0), *next = row_of_step(1);
    if constexpr (KIND != ROW_BF16) {
#pragma unroll
        for (int b = 0; b < LATENT / 64; b++) piece.load_block(row, b, lane);
        piece.load_rest(row, lane);
    }
#pragma unroll 1
    for (int step = 1; step < STEPS_AHEAD; step++) fetch(step);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const int t = turn + step / 2, key = step % 2 * HALF_KEYS + slot;
        uint8_t *tile = shared->tiles[t % 2];
        fetch(step + STEPS_AHEAD);
        const uint8_t *later = step + 2 < steps ? row_of_step(step + 2) : next;
        if (t > 1 && step % 2 == 0) wait_at(&shared->empty[t % 2], t / 2 - 1);
        if constexpr (KIND == ROW_BF16) {
#pragma unroll
            for (int b = 0; b < LATENT / 64; b++)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                             :: "r"(shared_address(place_of(tile + b * COLUMN_BLOCK, key, lane))), "l"(row + b * 128 + lane * 16)
                             : "memory");
            if (step % 2) arrive_with_copies(&shared->full[t % 2]);
        } else {
#pragma unroll
            for (int b = 0; b < LATENT / 64; b++) {
                *(uint4 *)place_of(tile + b * COLUMN_BLOCK, key, lane) = piece.widened(b, lane);
                piece.load_block(next, b, lane);
            }
            piece.load_rest(next, lane);
            if (step % 2) {
                show_to_products();
                arrive_at(&shared->full[t % 2]);
            }
        }
        row = next, next = later;
    }
    if constexpr (KIND == ROW_BF16) asm volatile("cp.async.wait_all;" ::: "memory");
}

template <typename Source>
static __device__ void bring_kind(HopperShared *shared, const RowFormat &format, Source row_of, int turn, int tiles) {
    const int bytes = (int)format.bytes;
    if (format.dtype == KV_BF16) bring_rows<ROW_BF16>(shared, row_of, bytes, turn, tiles);
    else if (format.dtype == KV_F4) bring_rows<ROW_E2M1>(shared, row_of, bytes, turn, tiles);
    else if (format.plain) bring_rows<ROW_E4M3_PLAIN>(shared, row_of, bytes, turn, tiles);
    else bring_rows<ROW_E4M3>(shared, row_of, bytes, turn, tiles);
}

/* The block's tiles, the window's first. Behind the end of a list, where weights are 0, comes its last row again. */
static __device__ void bring_windows(HopperShared *shared, const LatentTask<WindowKeys> &task) {
    const WindowKeys &keys = task.keys;
    const int own = max(min(keys.window_tiles() - task.first, task.tiles), 0),
              from = max(task.first - keys.window_tiles(), 0) * HOPPER_KEYS, at = task.first * HOPPER_KEYS;
    if (own) bring_kind(shared, keys.trail_format, [&](int s) { return keys.window_row(min(at + s, keys.seen - 1)); }, 0, own);
    if (own < task.tiles)
        bring_kind(shared, keys.format, [&](int s) { return keys.pool_row(min(from + s, keys.length - keys.seen - 1)); }, own,
                   task.tiles - own);
}

/* By the consumers: the queries as bf16; heads that there are not are zeros. A warp takes every eighth head, so that of where its
 * values go all but a constant is the same for all of them. */
template <typename Lists> static __device__ void load_query(HopperShared *shared, const LatentTask<Lists> &task) {
    enum { WIDTH = Lists::WIDTH, FOURS = (WIDTH + 127) / 128, WARPS = CONSUMERS / 32, AT_ONCE = WIDTH == LATENT ? 4 : 2 };
    static_assert(WARPS == 8, "heads of a warp are swizzled alike");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float *from = task.q + warp * WIDTH + lane * 4;
    uint8_t *to = shared->query + lane / 16 * COLUMN_BLOCK + warp * 128 + (lane / 2 % 8 ^ warp) * 16 + lane % 2 * 8;
#pragma unroll 1
    for (int first = 0; first < LATENT_HEADS; first += WARPS * AT_ONCE) {
        float4 four[AT_ONCE][FOURS] = {};
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int c = 0; c < FOURS; c++)
                if (first + i * WARPS + warp < task.n_heads && lane * 4 + c * 128 < WIDTH)
                    four[i][c] = *(const float4 *)(from + i * WARPS * WIDTH + c * 128);
#pragma unroll
        for (int i = 0; i < AT_ONCE && std::is_same_v<Lists, WindowKeys>; i++) task.turn.query(four[i]);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int c = 0; c < FOURS; c++)
                if (lane * 4 + c * 128 < WIDTH)
                    *(uint2 *)(to + i * WARPS * 128 + c * 2 * COLUMN_BLOCK) =
                        make_uint2(pair_bf16(four[i][c].x, four[i][c].y), pair_bf16(four[i][c].z, four[i][c].w));
        from += WARPS * AT_ONCE * WIDTH, to += WARPS * AT_ONCE * 128;
    }
    show_to_products();
    consumers_wait(QUERY_READY);
}

/* A warp of the consumers does not need a tile any more. */
template <bool PAIR> static __device__ void release_tile(HopperShared *shared, int tile) {
    if (threadIdx.x % 32) return;
    arrive_at(&shared->empty[tile % 2]);
    if (PAIR) arrive_at_other(&shared->empty[tile % 2]);
}

/* Starts scores [64 heads, 64 keys] of a tile. */
template <int WIDTH> static __device__ void start_scores(float (&scores)[32], HopperShared *shared, int tile) {
    const uint32_t query = shared_address(shared->query), keys = shared_address(shared->tiles[tile % 2]);
    wait_at(&shared->full[tile % 2], tile / 2);
    show_to_products();
    begin_products();
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        const uint32_t at = k / 4 * COLUMN_BLOCK + k % 4 * 32;
        multiply_scores(scores, matrix_at(query + at, 0), matrix_at(keys + at, 0), k > 0);
    }
    end_products();
}

/* Starts sums = weights . 64 of this warpgroup's half of the values. */
static __device__ void start_slice(float (&sums)[32], const uint32_t (&weights)[16], HopperShared *shared, int tile, int slice) {
    const uint32_t values = shared_address(shared->tiles[tile % 2]) + (threadIdx.x / 128 * 4 + slice) * COLUMN_BLOCK;
    begin_products();
#pragma unroll
    for (int k = 0; k < HOPPER_KEYS / 16; k++)
        multiply_values(sums, weights + 4 * k, matrix_at(values + k * 16 * 128, COLUMN_BLOCK), k > 0);
    end_products();
}

static __device__ void shrink_total(float (&total)[128], float above, float below) {
    if (__all_sync(~0u, above == 1 && below == 1)) return;          /* as it mostly is, once the largest has been seen */
#pragma unroll
    for (int i = 0; i < 128; i += 4)
        total[i] = __fmul_rn(total[i], above), total[i + 1] = __fmul_rn(total[i + 1], above),
        total[i + 2] = __fmul_rn(total[i + 2], below), total[i + 3] = __fmul_rn(total[i + 3], below);
}

static __device__ void join_slice(float (&total)[128], const float (&sums)[32], int slice, float above, float below) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
        float *sum = &total[slice * 32 + i];
        *sum = __fmaf_rn(sums[i], i % 4 < 2 ? above : below, *sum);
    }
}

/* Adds a tile, 64 of this warpgroup's values after the other; meanwhile the other warpgroup's are multiplied. */
static __device__ void add_tile(float (&total)[128], float (&sums)[32], const uint32_t (&weights)[16], HopperShared *shared,
                                int tile, const Joining (&joining)[2]) {
    start_slice(sums, weights, shared, tile, 0);
    shrink_total(total, joining[0].before, joining[1].before);
#pragma unroll
    for (int slice = 0; slice < 4; slice++) {
        wait_for_products<0>();
        take_products(sums);
        join_slice(total, sums, slice, joining[0].own, joining[1].own);
        if (slice < 3) start_slice(sums, weights, shared, tile, slice + 1);
    }
}

/* Scores become weights, n of them, relative to their own maximum. Exponents are of 2: scale is times log2(e). */
static __device__ Softmax weigh_scores(uint32_t (&weights)[16], float (&scores)[32], int n, float scale) {
    Softmax own;
#pragma unroll
    for (int i = 0; i < 32 && n < HOPPER_KEYS; i++)
        if (i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= n) scores[i] = -FLT_MAX;
#pragma unroll
    for (int below = 0; below < 2; below++) {
        float largest = -FLT_MAX, other = -FLT_MAX, sum[2] = {0, 0};
#pragma unroll
        for (int i = 2 * below; i < 32; i += 4) largest = fmaxf(largest, scores[i]), other = fmaxf(other, scores[i + 1]);
        largest = fmaxf(largest, other);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float offset = __fmul_rn(-largest, scale);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float *score = &scores[i / 2 * 4 + 2 * below + i % 2];
            sum[i % 2] = __fadd_rn(sum[i % 2], *score = fast_exp2(__fmaf_rn(*score, scale, offset)));
        }
        own.sum[below] = __fadd_rn(sum[0], sum[1]);
        own.maximum[below] = largest;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) weights[i] = pair_bf16(scores[2 * i], scores[2 * i + 1]);
    return own;
}

/* Writes the result, once nobody needs the tiles any more: gathered in their place, so that whole rows go to memory. */
template <typename Lists>
static __device__ void put_result(const float (&total)[128], HopperShared *shared, const LatentTask<Lists> &task) {
    const int lane = threadIdx.x % 32, head = threadIdx.x % 128 / 32 * 16 + lane / 4,
              column = threadIdx.x / 128 * LATENT / 2 + lane % 4 * 2;
    consumers_wait(RESULT_READY);
    const float above = 1 / shared->sum[head], below = 1 / shared->sum[head + 8];
    float *row = (float *)(shared->tiles[0] + head * RESULT_PITCH) + column, *lower = row + 8 * RESULT_PITCH / 4;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        float2 upper_pair = make_float2(total[4 * i] * above, total[4 * i + 1] * above),
               lower_pair = make_float2(total[4 * i + 2] * below, total[4 * i + 3] * below);
        if constexpr (std::is_same_v<Lists, WindowKeys>) {
            upper_pair = task.turn.back(upper_pair, column + i * 8, LATENT);
            lower_pair = task.turn.back(lower_pair, column + i * 8, LATENT);
        }
        *(float2 *)(row + i * 8) = upper_pair;
        *(float2 *)(lower + i * 8) = lower_pair;
    }
    show_to_products();
    consumers_wait(RESULT_READY);
    if (threadIdx.x >= task.n_heads) return;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;\n"
                 "cp.async.bulk.wait_group 0;"
                 :: "l"(task.z + threadIdx.x * LATENT), "r"(shared_address(shared->tiles[0] + threadIdx.x * RESULT_PITCH)),
                    "n"(LATENT * 4) : "memory");
}

/* The warpgroup that scores and weighs tiles, and adds up the first half of the values. The last tile is scored twice, since a
 * branch around products would make each of them wait. */
template <bool PAIR, typename Lists> static __device__ void score_tiles(HopperShared *shared, const LatentTask<Lists> &task) {
    const int thread = threadIdx.x, head = thread / 32 * 16 + thread % 32 / 4;
    float scores[32], total[128];
    uint32_t weights[16];
    Softmax softmax;
    for (int below = 0; below < 2; below++) {
        const int own = head + 8 * below;
        const float2 first = first_sum(task.keys, task.first_head + own, own < task.n_heads, thread % 4, task.scale);
        softmax.maximum[below] = first.x, softmax.sum[below] = first.y;
    }
#pragma unroll
    for (int i = 0; i < 128; i++) total[i] = 0;
    start_scores<Lists::WIDTH>(scores, shared, 0);
    wait_for_products<0>();
    take_products(scores);
    for (int t = 0; t < task.tiles; t++) {
        const float scale = task.scale * LOG2_E;
        const Softmax own = weigh_scores(weights, scores, task.keys.keys_in(task.first + t), scale);
        Joining joining[2];
        for (int below = 0; below < 2; below++) {
            joining[below] = join_maximum(&softmax.maximum[below], own.maximum[below], scale);
            softmax.sum[below] = join(softmax.sum[below], own.sum[below], joining[below]);
        }
        if (t) consumers_wait(WEIGHTS_TAKEN);
#pragma unroll
        for (int k = 0; k < HOPPER_KEYS / 16; k++) shared->weights[k][thread] = *(const uint4 *)(weights + 4 * k);
        if (thread % 4 == 0) shared->joining[head] = joining[0], shared->joining[head + 8] = joining[1];
        consumers_tell(WEIGHTS_READY);
        add_tile(total, scores, weights, shared, t, joining);
        release_tile<PAIR>(shared, t);
        start_scores<Lists::WIDTH>(scores, shared, min(t + 1, task.tiles - 1));
        wait_for_products<0>();
        take_products(scores);
    }
#pragma unroll
    for (int below = 0; below < 2; below++) {
        float sum = softmax.sum[below];
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
        if (thread % 4 == 0) shared->sum[head + 8 * below] = sum;
    }
    put_result(total, shared, task);
}

/* The warpgroup that adds up the other half. */
template <bool PAIR, typename Lists> static __device__ void add_tiles(HopperShared *shared, const LatentTask<Lists> &task) {
    const int thread = threadIdx.x % 128, head = thread / 32 * 16 + thread % 32 / 4;
    float total[128], sums[32];
    uint32_t weights[16];
#pragma unroll
    for (int i = 0; i < 128; i++) total[i] = 0;
    for (int t = 0; t < task.tiles; t++) {
        consumers_wait(WEIGHTS_READY);
#pragma unroll
        for (int k = 0; k < HOPPER_KEYS / 16; k++) *(uint4 *)(weights + 4 * k) = shared->weights[k][thread];
        const Joining joining[2] = {shared->joining[head], shared->joining[head + 8]};
        if (t + 1 < task.tiles) consumers_tell(WEIGHTS_TAKEN);
        show_to_products();
        add_tile(total, sums, weights, shared, t, joining);
        release_tile<PAIR>(shared, t);
    }
    put_result(total, shared, task);
}

#endif


/* Grid: groups of 64 heads, of which two make a pair, and rows. */
template <typename Lists, bool FP8, bool PAIR>
static __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
hopper_kernel(const __grid_constant__ Lists lists, float *z, const float *q, int heads, float scale, Turning turn) {
    begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t hopper_shared[];
    HopperShared *shared = (HopperShared *)hopper_shared;
    const int first_head = blockIdx.x * LATENT_HEADS, group = threadIdx.x / 128;
    const size_t row_head = (size_t)blockIdx.y * heads + first_head;
    LatentTask<Lists> task = {.keys = lists.of(blockIdx.y), .q = q + row_head * Lists::WIDTH, .z = z + row_head * LATENT,
                              .n_heads = min(heads - first_head, (int)LATENT_HEADS), .first_head = first_head, .first = 0,
                              .tiles = 0, .scale = scale, .turn = turn.of(blockIdx.y)};
    task.tiles = task.keys.tiles();
    if (!task.tiles) {          /* a sum over nothing, divided by 0 or by what the sink makes */
        const float nothing = std::is_same_v<Lists, WindowKeys> ? 0 : __int_as_float(0x7fffffff);
        for (int i = threadIdx.x; i < task.n_heads * LATENT; i += blockDim.x) task.z[i] = nothing;
        return;
    }
    if (!threadIdx.x) {
        for (int i = 0; i < 2; i++)
            start_barrier(&shared->full[i], PRODUCERS), start_barrier(&shared->empty[i], (PAIR ? 2 : 1) * CONSUMERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (PAIR) pair_wait();
    else __syncthreads();
    if (group >= CONSUMERS / 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"((int)PRODUCER_REGISTERS));
        if constexpr (std::is_same_v<Lists, WindowKeys>) bring_windows(shared, task);
        else if constexpr (FP8) bring_fp8<PAIR>(shared, task);
        else bring_bf16(shared, task);
    } else if (group == 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"((int)CONSUMER_REGISTERS));
        load_query(shared, task);
        score_tiles<PAIR>(shared, task);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"((int)CONSUMER_REGISTERS));
        load_query(shared, task);
        add_tiles<PAIR>(shared, task);
    }
    if (PAIR) pair_wait();      /* neither goes as long as the other may still write to it */
#endif
}

/* ---- few rows: thread blocks that share a list weigh its tiles, and others add up some of the values for some of the heads.
 * What the former leave in scratch is in the order in which the latter's products want it: 16 bytes for each thread of a warp. */

enum {
    LIST_GROUPS = LATENT_HEADS / 16,
    FEW_LISTS = 36,             /* rows and groups of 64 heads, that leave multiprocessors idle when each has a thread block; */
    FEW_WINDOWS = 32,           /* and the same of windows, whose lists are shorter */
    ADDERS = 512,               /* threads */
    KEY_STEPS = HOPPER_KEYS / 16, VALUE_PAIRS = LATENT / 16,    /* products of a tile: over 16 keys, for twice eight values */
};

/* Of 16 heads. */
struct WeighedTile {
    uint4 weights[KEY_STEPS][32];
    float sums[16][4], maximum[16];         /* of a head: its threads' sums, and the largest score before scaling */
};

struct TileValues { uint4 pairs[VALUE_PAIRS][KEY_STEPS][32]; };

/* Scratch of few rows: values [rows, tiles], tiles [rows, groups of 16 heads, tiles]. */
struct Weighed {
    TileValues *values;
    WeighedTile *tiles;
    int n_tiles, groups;        /* of a row */
    __device__ TileValues *values_of(int row, int tile) const { return values + (size_t)row * n_tiles + tile; }
    __device__ WeighedTile *tile_of(int row, int group, int tile) const {
        return tiles + ((size_t)row * groups + group) * n_tiles + tile;
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* By one warpgroup: the weights of the block's tiles, of which the first is tile `first` of the list, go to scratch. */
template <typename Lists>
static __device__ void leave_weights(HopperShared *shared, const LatentTask<Lists> &task, const Weighed &to) {
    const int lane = threadIdx.x % 32, head = lane / 4;
    float scores[32];
    uint32_t weights[16];
    for (int t = 0; t < task.tiles; t++) {
        WeighedTile *tile = to.tile_of(blockIdx.x, blockIdx.y * LIST_GROUPS + threadIdx.x / 32, task.first + t);
        start_scores<Lists::WIDTH>(scores, shared, t);
        wait_for_products<0>();
        take_products(scores);
        release_tile<false>(shared, t);
        const Softmax own = weigh_scores(weights, scores, task.keys.keys_in(task.first + t), task.scale * LOG2_E);
#pragma unroll
        for (int k = 0; k < KEY_STEPS; k++) tile->weights[k][lane] = *(const uint4 *)(weights + 4 * k);
#pragma unroll
        for (int below = 0; below < 2; below++) {
            tile->sums[head + 8 * below][lane % 4] = own.sum[below];
            if (lane % 4 == 0) tile->maximum[head + 8 * below] = own.maximum[below];
        }
    }
}

/* By another: the values of the tiles. */
template <typename Lists>
static __device__ void leave_values(HopperShared *shared, const LatentTask<Lists> &task, const Weighed &to) {
    const int lane = threadIdx.x % 32;
    for (int t = 0; t < task.tiles; t++) {
        TileValues *values = to.values_of(blockIdx.x, task.first + t);
        wait_at(&shared->full[t % 2], t / 2);
#pragma unroll 8
        for (int i = threadIdx.x % 128 / 32; i < VALUE_PAIRS * KEY_STEPS; i += 4) {
            const int pair = i / KEY_STEPS, k = i % KEY_STEPS;
            uint32_t b[4];
            load_transposed(b, (const __nv_bfloat16 *)place_of(shared->tiles[t % 2] + pair / 4 * COLUMN_BLOCK, k * 16 + lane % 16,
                                                               pair % 4 * 2 + lane / 16));
            values->pairs[pair][k][lane] = make_uint4(b[0], b[1], b[2], b[3]);
        }
        __syncwarp();
        release_tile<false>(shared, t);
    }
}
#endif

/* Grid: rows, groups of 64 heads, groups of `each` tiles. */
template <typename Lists, bool FP8>
static __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
weigh_lists_kernel(const __grid_constant__ Lists lists, Weighed to, const float *q, int heads, float scale, int each,
                   Turning turn) {
    begin_kernel();                                 /* lists are complete when the next may start */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t hopper_shared[];
    HopperShared *shared = (HopperShared *)hopper_shared;
    const int first_head = blockIdx.y * LATENT_HEADS, group = threadIdx.x / 128;
    const bool leaves = blockIdx.y == 0;            /* the values too, which all heads share */
    LatentTask<Lists> task = {.keys = lists.of(blockIdx.x),
                              .q = q + ((size_t)blockIdx.x * heads + first_head) * Lists::WIDTH, .z = NULL,
                              .n_heads = min(heads - first_head, (int)LATENT_HEADS), .first_head = first_head,
                              .first = (int)blockIdx.z * each, .tiles = 0, .scale = scale, .turn = turn.of(blockIdx.x)};
    task.tiles = min(task.keys.tiles() - task.first, each);
    if (task.tiles <= 0) return;
    if (!threadIdx.x) {
        for (int i = 0; i < 2; i++)
            start_barrier(&shared->full[i], PRODUCERS), start_barrier(&shared->empty[i], leaves ? CONSUMERS / 32 : 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (group >= CONSUMERS / 128) {
        if constexpr (std::is_same_v<Lists, WindowKeys>) bring_windows(shared, task);
        else if constexpr (FP8) bring_fp8<false>(shared, task);
        else bring_bf16(shared, task);
        return;
    }
    load_query(shared, task);
    if (group == 0) leave_weights(shared, task, to);
    else if (leaves) leave_values(shared, task, to);
#endif
}

/* What a thread block of add_lists_kernel works on: 16 GROUPS heads and COLUMNS of the values. A warp multiplies for one of the
 * groups; TILES of them are multiplied side by side, and then join in their order. */
template <int GROUPS, int COLUMNS> struct Adding {
    static const int TILES = ADDERS / 32 / GROUPS, HEADS = GROUPS * 16, PAIRS = COLUMNS / 16, ITEMS = GROUPS * COLUMNS / 8 * 32,
                     OWN = (ITEMS + ADDERS - 1) / ADDERS, SUMMERS = ADDERS / 2;       /* from which thread on sums are added */
    struct Shared {
        float4 sums[TILES][ITEMS];          /* as the threads of warps hold them */
        Joining joining[TILES][HEADS];
        float sum[HEADS];
    };
    Weighed from;
    int tiles;                              /* of the list */
    uint4 weights[KEY_STEPS], values[PAIRS][KEY_STEPS];
    float maximum, sums[TILES];             /* by the first threads, one of a tile and head; by the last, of a head's threads */

    __device__ const WeighedTile *weighed(int group, int t) const {
        return from.tile_of(blockIdx.x, blockIdx.y * GROUPS + group, min(t, tiles - 1));
    }

    __device__ void load(int first) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, summer = (int)threadIdx.x - SUMMERS;
        const WeighedTile *tile = weighed(warp % GROUPS, first + warp / GROUPS);
        const TileValues *columns = from.values_of(blockIdx.x, min(first + warp / GROUPS, tiles - 1));
#pragma unroll
        for (int k = 0; k < KEY_STEPS; k++) weights[k] = tile->weights[k][lane];
#pragma unroll
        for (int i = 0; i < PAIRS * KEY_STEPS; i++)
            values[i / KEY_STEPS][i % KEY_STEPS] = columns->pairs[blockIdx.z * PAIRS + i / KEY_STEPS][i % KEY_STEPS][lane];
        if (summer < 0) {
            const int head = threadIdx.x / TILES;
            maximum = weighed(head / 16, first + threadIdx.x % TILES)->maximum[head % 16];
        } else if (summer < HEADS * 4)
#pragma unroll
            for (int t = 0; t < TILES; t++) sums[t] = weighed(summer / 64, first + t)->sums[summer / 4 % 16][summer % 4];
    }

    /* By the first threads, one for each tile and head; those of a head are neighbours. before: its largest score so far. */
    __device__ void find_joining(Shared *shared, float *before, float scale) const {
        const int t = threadIdx.x % TILES;
        float largest = maximum;
        for (int step = 1; step < TILES; step *= 2) {
            const float other = __shfl_up_sync(~0u, largest, step, TILES);
            if (t >= step) largest = fmaxf(largest, other);
        }
        largest = __shfl_up_sync(~0u, largest, 1, TILES);
        largest = t ? fmaxf(largest, *before) : *before;
        shared->joining[t][threadIdx.x / TILES] = join_maximum(&largest, maximum, scale);
        *before = __shfl_sync(~0u, largest, TILES - 1, TILES);
    }

    __device__ void multiply(Shared *shared) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float c[COLUMNS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < KEY_STEPS; k++) {
            const uint32_t a[4] = {weights[k].x, weights[k].y, weights[k].z, weights[k].w};
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                multiply_bf16(c[2 * pair], a, values[pair][k].x, values[pair][k].y);
                multiply_bf16(c[2 * pair + 1], a, values[pair][k].z, values[pair][k].w);
            }
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
            shared->sums[warp / GROUPS][(warp % GROUPS * (COLUMNS / 8) + j) * 32 + lane] = *(const float4 *)c[j];
    }
};

/* Grid: rows, groups of heads, groups of columns. */
template <typename Lists, int GROUPS, int COLUMNS>
static __global__ void __launch_bounds__(ADDERS)
add_lists_kernel(const __grid_constant__ Lists lists, float *z, Weighed from, int heads, float scale, Turning turn) {
    let_next_start();
    typedef Adding<GROUPS, COLUMNS> A;
    extern __shared__ __align__(128) uint8_t add_shared[];
    typename A::Shared *shared = (typename A::Shared *)add_shared;
    A adding;
    __threadfence();                                /* the lists are complete: weigh_lists_kernel lets this start behind them */
    const Lists keys = lists.of(blockIdx.x);
    adding.from = from, adding.tiles = keys.tiles();
    const int lane = threadIdx.x % 32, tiles = adding.tiles, summer = (int)threadIdx.x - A::SUMMERS,
              own_head = blockIdx.y * A::HEADS + (summer < 0 ? threadIdx.x / A::TILES : summer / 4);
    const float2 before = first_sum(keys, own_head, own_head < heads, summer % 4, scale);
    float maximum = before.x, sum = before.y;
    float4 total[A::OWN];
#pragma unroll
    for (int i = 0; i < A::OWN; i++) total[i] = make_float4(0, 0, 0, 0);
    wait_for_previous();
    if (tiles) adding.load(0);
    for (int first = 0; first < tiles; first += A::TILES) {
        const int n = min(tiles - first, (int)A::TILES);
        float sums[A::TILES];
#pragma unroll
        for (int t = 0; t < A::TILES; t++) sums[t] = adding.sums[t];
        if (summer < 0) adding.find_joining(shared, &maximum, scale * LOG2_E);
        adding.multiply(shared);
        __syncthreads();
        if (first + A::TILES < tiles) adding.load(first + A::TILES);
        if (summer >= 0 && summer < A::HEADS * 4)
#pragma unroll
            for (int t = 0; t < A::TILES; t++)
                if (t < n) sum = join(sum, sums[t], shared->joining[t][summer / 4]);
#pragma unroll
        for (int i = 0; i < A::OWN; i++) {
            const int item = i * ADDERS + threadIdx.x, head = item / (COLUMNS / 8 * 32) * 16 + lane / 4;
            if (item >= A::ITEMS) break;
#pragma unroll
            for (int t = 0; t < A::TILES; t++) {
                if (t >= n) break;
                const Joining above = shared->joining[t][head], below = shared->joining[t][head + 8];
                const float4 own = shared->sums[t][item];
                total[i] = make_float4(join(total[i].x, own.x, above), join(total[i].y, own.y, above),
                                       join(total[i].z, own.z, below), join(total[i].w, own.w, below));
            }
        }
        __syncthreads();
    }
    if (summer >= 0 && summer < A::HEADS * 4) {
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
        const bool any = tiles || std::is_same_v<Lists, WindowKeys>;
        if (summer % 4 == 0) shared->sum[summer / 4] = any ? sum : __int_as_float(0x7fffffff);      /* over nothing: none */
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < A::OWN; i++) {
        const int item = i * ADDERS + threadIdx.x, head = item / (COLUMNS / 8 * 32) * 16 + lane / 4,
                  first = blockIdx.y * A::HEADS + head;
        if (item >= A::ITEMS) break;
        const float above = 1 / shared->sum[head], below = 1 / shared->sum[head + 8];
        float *out = z + ((size_t)blockIdx.x * heads + first) * LATENT + blockIdx.z * COLUMNS + item / 32 % (COLUMNS / 8) * 8
                     + lane % 4 * 2;
        float2 upper_pair = make_float2(total[i].x * above, total[i].y * above),
               lower_pair = make_float2(total[i].z * below, total[i].w * below);
        if constexpr (std::is_same_v<Lists, WindowKeys>) {
            const int column = blockIdx.z * COLUMNS + item / 32 % (COLUMNS / 8) * 8 + lane % 4 * 2;
            upper_pair = turn.of(blockIdx.x).back(upper_pair, column, LATENT);
            lower_pair = turn.of(blockIdx.x).back(lower_pair, column, LATENT);
        }
        if (first < heads) *(float2 *)out = upper_pair;
        if (first + 8 < heads) *(float2 *)(out + 8 * LATENT) = lower_pair;
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
        launch(merge_kernel<Keys>, dim3(n, heads), 128, 0, keys, y, partials, first, heads, value_dim, chunks);
    }
}

/* Work on lists of which each goes to `side` thread blocks, for all rows at once where that is one, or for groups of them. */
template <typename Launch>
static void attend_split(const Attend &a, int value_dim, int longest, int side, Launch launch) {
    if (side == 1) return launch(a);
    attend_in_groups(KnownLengths{}, a.y, a.n_rows, a.heads, value_dim, longest, [&](int first, int n, int chunks) {
        Attend part = a;
        part.parts = partials, part.first_row = first, part.n_rows = n, part.chunks = chunks;
        launch(part);
    });
}

/* In f32. */
template <typename Keys> static void attend(const Keys &keys, const Attend &a, int key_dim, int value_dim, int longest) {
    const int chunks = divide_up(longest, SPLIT_KEYS), side = chunks < 64 ? chunks : 64,
              width = key_dim + 1 + (Keys::shared ? 0 : value_dim), fixed = SPLIT_KEYS * (int)sizeof(void *) + SYSTEM_SHARED;
    const auto bytes_of = [&](int heads, int tiles) {
        return (size_t)(heads * key_dim + tiles * (TILE_KEYS * width + heads * (value_dim + 2))) * sizeof(float);
    };
    int each = a.n_rows * a.heads <= 4 * gpu.multiprocessors ? 1 : (int)ATTEND_WARPS;
    while (each > 1 && bytes_of(each, 1) + fixed > gpu.shared_per_block) each /= 2;
    int tiles = SPLIT_KEYS / TILE_KEYS;             /* in shared memory, of which two blocks have half each if they can */
    while (tiles > 1 && bytes_of(each, tiles) + fixed > gpu.shared_per_block / 2) tiles--;
    const int blocks = a.kv_heads * divide_up(a.heads / a.kv_heads, each);
    const size_t bytes = bytes_of(each, tiles);
    attend_split(a, value_dim, longest, side, [&](const Attend &part) {
        allow_shared(attend_kernel<Keys>, bytes);
        launch(attend_kernel<Keys>, dim3(part.n_rows, blocks, side), 32 * ATTEND_WARPS, bytes, keys, part, key_dim, value_dim,
               each, tiles);
    });
}

/* On tensor cores. Where there are tiles enough for all multiprocessors, or lists are short, a thread block takes whole lists. */
template <typename Keys, int KEY, int VALUE, bool FP8>
static void attend_tiles(const Keys &keys, const Attend &a, int most_tiles, int longest) {
    const size_t narrow = sizeof(NarrowShared<Keys, KEY, VALUE, FP8>), middle = sizeof(MiddleShared<Keys, KEY, VALUE, FP8>),
                 shared = narrow > middle ? narrow : middle, wide = sizeof(WideShared<Keys, KEY, VALUE, FP8>);
    const bool wide_tiles = std::is_same_v<Keys, HistoryKeys> && a.n_rows >= WIDE_RUN && wide <= gpu.shared_per_block;
    if (shared > gpu.shared_per_block) return attend(keys, a, KEY, VALUE, longest);
    const int chunks = divide_up(longest, SPLIT_KEYS), pairs = a.n_rows * a.kv_heads, slots = 2 * gpu.multiprocessors,
              wanted = wide_tiles || pairs >= 4 * slots ? 1 : divide_up(8 * slots, pairs),
              side = chunks <= FEW_CHUNKS ? 1 : chunks < wanted ? chunks : wanted;
    attend_split(a, VALUE, longest, side, [&](const Attend &part) {
        const int items = most_tiles * a.kv_heads * side;
        allow_shared(short_runs<Keys, KEY, VALUE, FP8>, shared);
        launch(short_runs<Keys, KEY, VALUE, FP8>, items < slots ? items : slots, 32 * NARROW_WARPS, shared, keys, part,
               wide_tiles ? WIDE_RUN - 1 : INT_MAX, side);
    });
    if (!wide_tiles) return;
    if constexpr (std::is_same_v<Keys, HistoryKeys>) {
        const int items = divide_up(a.n_rows, WIDE_RUN) * divide_up(WIDE_RUN, WIDE_ROWS / (a.heads / a.kv_heads)) * a.kv_heads;
        allow_shared(long_runs<Keys, KEY, VALUE, FP8>, wide);
        launch(long_runs<Keys, KEY, VALUE, FP8>, items < gpu.multiprocessors ? items : gpu.multiprocessors, 32 * WIDE_WARPS, wide,
               keys, a);
    }
}

/* Whether the rows of so many heads fit a tile, and whether pieces of 16 bytes have what they need. */
static bool suits_tiles(const RowFormat *format, int heads, int kv_heads, int dim) {
    return format->dtype != KV_F32 && heads / kv_heads <= MIDDLE_ROWS
           && (format->dtype == KV_BF16 || (format->group % dim == 0 && format->quantised % 16 == 0));
}

template <int GROUPS, int COLUMNS, typename Lists>
static void add_lists(float *z, const Lists &keys, const Weighed &weighed, int n_rows, int heads, float scale,
                      const Turning &turn) {
    const size_t shared = sizeof(typename Adding<GROUPS, COLUMNS>::Shared);
    const auto kernel = add_lists_kernel<Lists, GROUPS, COLUMNS>;
    allow_shared(kernel, shared);
    launch(kernel, dim3(n_rows, divide_up(heads, 16 * GROUPS), LATENT / COLUMNS), ADDERS, shared, keys, z, weighed, heads, scale,
           turn);
}

/* The lists of few rows are weighed by as many blocks as there is room for, and added up by many. */
template <typename Lists>
static void attend_apart(float *z, const float *q, const Lists &keys, const Weighed &weighed, int n_rows, int heads, float scale,
                         const Turning &turn) {
    const int lists = n_rows * weighed.groups / LIST_GROUPS, room = gpu.multiprocessors / lists,
              each = divide_up(weighed.n_tiles, room > 1 ? room : 1);
    auto weigh = weigh_lists_kernel<Lists, false>;
    if constexpr (std::is_same_v<Lists, SelectedKeys>)
        if (keys.format.dtype == KV_F8) weigh = weigh_lists_kernel<Lists, true>;
    allow_shared(weigh, sizeof(HopperShared));
    launch(weigh, dim3(n_rows, lists / n_rows, divide_up(weighed.n_tiles, each)), CONSUMERS + PRODUCERS, sizeof(HopperShared),
           keys, weighed, q, heads, scale, each, turn);
    /* fewer heads and columns make more blocks, which read more */
    if (lists <= 2) add_lists<1, 32>(z, keys, weighed, n_rows, heads, scale, turn);
    else if (lists <= 4) add_lists<2, 32>(z, keys, weighed, n_rows, heads, scale, turn);
    else if (lists <= 8) add_lists<2, 64>(z, keys, weighed, n_rows, heads, scale, turn);
    else add_lists<4, 64>(z, keys, weighed, n_rows, heads, scale, turn);
}

/* A row's bits are the same whichever way is taken. */
template <typename Lists>
static void attend_on_hopper(float *z, const float *q, const Lists &keys, int tiles, int n_rows, int heads, float scale,
                             const Turning &turn) {
    const int lists = n_rows * divide_up(heads, LATENT_HEADS);
    const bool fp8 = keys.format.dtype == KV_F8;
    bool pair = false;
    const size_t values = (size_t)n_rows * tiles * sizeof(TileValues),
                 weights = (size_t)lists * LIST_GROUPS * tiles * sizeof(WeighedTile);
    const int few = std::is_same_v<Lists, WindowKeys> ? FEW_WINDOWS : FEW_LISTS;
    if (lists <= few && values + weights <= PARTIAL_FLOATS * sizeof(float)) {
        TileValues *scratch = (TileValues *)partials;
        return attend_apart(z, q, keys, {scratch, (WeighedTile *)(scratch + n_rows * tiles), tiles, lists / n_rows * LIST_GROUPS},
                            n_rows, heads, scale, turn);
    }
    auto kernel = hopper_kernel<Lists, false, false>;
    if constexpr (std::is_same_v<Lists, SelectedKeys>) {
        pair = fp8 && lists / n_rows % 2 == 0;
        if (fp8) kernel = pair ? hopper_kernel<Lists, true, true> : hopper_kernel<Lists, true, false>;
    }
    allow_shared(kernel, sizeof(HopperShared));
    launch_early(kernel, dim3(lists / n_rows, n_rows), CONSUMERS + PRODUCERS, sizeof(HopperShared), pair ? 2 : 1, keys, z, q,
                 heads, scale, turn);
}

static void sparse_attention(float *z, const float *q, const RowPool *pool, const RowFormat *format, const DeviceRow *locations,
                             const int *count, int capacity, int n_rows, int heads, float scale) {
    const SelectedKeys keys = {*pool, *format, locations, count, capacity, 0};
    const bool latent = format->dtype != KV_F32 && format->quantised == LATENT && format->plain == TAIL
                        && (format->dtype == KV_BF16 || format->group == 128);
    const Attend a = {.y = z, .parts = NULL, .q = q, .first_row = 0, .n_rows = n_rows, .heads = heads, .kv_heads = 1, .chunks = 1,
                      .scale = scale};
    if (!n_rows) return;
    if (format->quantised == 128 && format->plain == 32 && suits_tiles(format, heads, 1, 128))
        return format->dtype == KV_F8 ? attend_tiles<SelectedKeys, 160, 128, true>(keys, a, n_rows, capacity)
                                      : attend_tiles<SelectedKeys, 160, 128, false>(keys, a, n_rows, capacity);
    if (latent && gpu.major == 9)
        return attend_on_hopper(z, q, keys, divide_up(capacity, HOPPER_KEYS), n_rows, heads, scale, {});
    if (!latent || heads % 16) return attend(keys, a, format->quantised + format->plain, format->quantised, capacity);
    attend_in_groups(keys, z, n_rows, heads, LATENT, capacity, [&](int first, int n, int chunks) {
        auto kernel = format->dtype == KV_F8 ? latent_kernel<true> : latent_kernel<false>;
        const size_t bytes = format->dtype == KV_F8 ? sizeof(LatentShared<true>) : sizeof(LatentShared<false>);
        allow_shared(kernel, bytes);
        launch(kernel, dim3(n, divide_up(heads, LATENT_HEADS), chunks), LATENT_THREADS, bytes, keys, partials, q, first, heads,
               scale, chunks);
    });
}

static RowKind row_kind(const RowFormat &format) {
    if (format.quantised + format.plain != LATENT) return ROW_OTHER;
    if (format.dtype == KV_BF16) return ROW_BF16;
    const bool f8 = format.dtype == KV_F8 && format.scales == SCALES_E8M0,
               f4 = format.dtype == KV_F4 && format.scales == SCALES_E4M3;
    if (f8 && format.plain == 0 && format.group == 32) return ROW_E4M3;
    if (f8 && format.plain == TAIL && format.group == 64) return ROW_E4M3_PLAIN;
    return f4 && format.plain == 0 && format.group == 16 ? ROW_E2M1 : ROW_OTHER;
}

/* Queries as attention in f32 wants them. A warp takes a head, whose last values it reads again in other places. */
static __global__ void turn_queries_kernel(float *q, int n_rows, int heads, int dim, float eps, int half, const float *cosine,
                                           const float *sine) {
    begin_kernel();
    const int vector = (int)(thread_index() / 32), lane = lane_id();
    if (vector >= n_rows * heads) return;
    const size_t angle = (size_t)(vector / heads) * (size_t)half;
    float *v = q + (size_t)vector * (size_t)dim, *turned = v + dim - 2 * half, sum = 0;
#pragma unroll 4
    for (int j = 4 * lane; j < dim; j += 128) sum += sum_squares(load_four(v + j, dim - j));
    const float scale = eps < 0 ? 1 : 1 / sqrtf(warp_sum(sum) / (float)dim + eps);
#pragma unroll 4
    for (int j = 4 * lane; j < dim; j += 128)
        store_four(v + j, weighted(load_four(v + j, dim - j), scale, make_float4(1, 1, 1, 1)), dim - j);
    __syncwarp();
    for (int i = lane; i < half; i += 32) rotate(turned + 2 * i, 1, cosine[angle + (size_t)i], sine[angle + (size_t)i]);
}

/* A thread takes a pair of a head. Grid: groups of pairs, rows. */
static __global__ void turn_back_kernel(float *y, int heads, int width, Turning turn) {
    begin_kernel();
    const int half = turn.turned / 2, pair = (int)thread_index(), column = width - turn.turned + pair % half * 2;
    if (pair >= heads * half) return;
    float *at = y + ((size_t)blockIdx.y * heads + pair / half) * width + column;
    const float2 turned = turn.of(blockIdx.y).back(make_float2(at[0], at[1]), column, width);
    at[0] = turned.x, at[1] = turned.y;
}

static void window_attention(float *y, float *q, const Trail *trail, const RowFormat *trail_format, int window,
                             const RowPool *pool, const RowFormat *format, const DeviceRow *locations, const int *count,
                             int capacity, const Row *rows, int begin, int end, int heads, const float *sinks, float scale,
                             float eps, int turned, const float *cosine, const float *sine) {
    const int n_rows = end - begin, width = format->quantised + format->plain;
    const size_t first = (size_t)begin * (size_t)(heads * width), angle = (size_t)begin * (size_t)(turned / 2);
    if (n_rows <= 0) return;
    WindowKeys keys = {.trail = *trail, .trail_format = *trail_format, .format = *format, .pool = {}, .locations = locations,
                       .count = count, .rows = rows, .sinks = sinks, .first_row = begin, .window = window, .capacity = capacity,
                       .position = 0, .session = 0, .length = 0, .seen = 0, .first_id = 0};
    if (pool) keys.pool = *pool;
    y += first, q += first;
    const Turning turn = {cosine + angle, sine + angle, turned, eps};
    if (gpu.major == 9 && row_kind(*trail_format) != ROW_OTHER && (!count || row_kind(*format) != ROW_OTHER)) {
        const int tiles = divide_up(window, HOPPER_KEYS) + (count ? divide_up(capacity, HOPPER_KEYS) : 0);
        return attend_on_hopper(y, q, keys, tiles, n_rows, heads, scale, turn);
    }
    const Attend a = {.y = y, .parts = NULL, .q = q, .first_row = 0, .n_rows = n_rows, .heads = heads, .kv_heads = 1, .chunks = 1,
                      .scale = scale};
    launch(turn_queries_kernel, blocks_for((size_t)(n_rows * heads) * 32), THREADS, 0, q, n_rows, heads, width, eps, turned / 2,
           turn.cosine, turn.sine);
    attend(keys, a, width, width, window + (count ? capacity : 0));
    if (turned < 2) return;
    launch(turn_back_kernel, dim3((unsigned)divide_up(heads * (turned / 2), THREADS), (unsigned)n_rows), THREADS, 0, y, heads,
           width, turn);
}

static void dense_attention(float *y, const float *q, const RowPool *pool, const RowFormat *format, const DevicePage *pages,
                            int context_pages, const Row *rows, int n_rows, int heads, int kv_heads, int head_dim, float scale) {
    const HistoryKeys keys = {*pool, *format, pages, rows, context_pages, kv_heads, head_dim, 0};
    const Attend a = {.y = y, .parts = NULL, .q = q, .first_row = 0, .n_rows = n_rows, .heads = heads, .kv_heads = kv_heads,
                      .chunks = 1, .scale = scale};
    const int longest = context_pages * PAGE_ROWS;
    if (!n_rows) return;
    const bool tiles = suits_tiles(format, heads, kv_heads, head_dim), fp8 = format->dtype == KV_F8;
    if (tiles && head_dim == 128 && fp8) attend_tiles<HistoryKeys, 128, 128, true>(keys, a, n_rows, longest);
    else if (tiles && head_dim == 128) attend_tiles<HistoryKeys, 128, 128, false>(keys, a, n_rows, longest);
    else if (tiles && head_dim == 64 && fp8) attend_tiles<HistoryKeys, 64, 64, true>(keys, a, n_rows, longest);
    else if (tiles && head_dim == 64) attend_tiles<HistoryKeys, 64, 64, false>(keys, a, n_rows, longest);
    else attend(keys, a, head_dim, head_dim, longest);
}

static void block_attention(float *y, const float *q, const float *kv, const uint8_t *ring, const RowFormat *format,
                            int ring_rows, const DraftBlock *blocks, int n_blocks, int block_size, int window, bool causal,
                            int heads, int kv_heads, int head_dim, float scale) {
    const BlockKeys keys = {ring, *format, kv, blocks, ring_rows, block_size, window, kv_heads, head_dim, causal, 0, 0, 0, 0};
    const Attend a = {.y = y, .parts = NULL, .q = q, .first_row = 0, .n_rows = n_blocks * block_size, .heads = heads,
                      .kv_heads = kv_heads, .chunks = 1, .scale = scale};
    const int longest = ring_rows + block_size, most = n_blocks * block_size;
    if (!n_blocks) return;
    const bool tiles = suits_tiles(format, heads, kv_heads, head_dim) && format->dtype == KV_BF16;
    if (tiles && head_dim == 128) attend_tiles<BlockKeys, 128, 128, false>(keys, a, most, longest);
    else if (tiles && head_dim == 64) attend_tiles<BlockKeys, 64, 64, false>(keys, a, most, longest);
    else attend(keys, a, head_dim, head_dim, longest);
}

/* =====================================================================================================================
 * DeepSeek-V4
 *
 *     mix_streams -> streams_kernel -> take_streams (what the last sublayer adds), sum_mixes
 *                 -> enter_kernel -> add_sums, find_entering, collapse; finish_mixes -> sinkhorn
 *
 * Owns: parallel residual streams, Engram's gate, what windows see, and what --qat rounds. From one sublayer to the next are two
 * launches, since a row's mixes are sums over all of its streams. In the first, blocks divide the columns, so that all
 * multiprocessors read the f32 matrix of the mixes, once for many rows, and before the kernel in front has ended. What a block's
 * columns add to each sum stays in `partials`; in the second a block for each row adds them up, in their order.
 */

enum {
    SLICE = 8,                      /* fours of columns that a block of the first kernel takes, of all streams */
    STREAM_ROWS = 32,               /* rows that it takes */
    STREAM_THREADS = STREAM_ROWS * SLICE, STREAM_WARPS = STREAM_THREADS / 32,
    WARP_SUMS = 4, WARP_ROWS = 8,   /* sums over a slice that a warp makes at a time: one for each lane */
    ENTER_WARPS = 16, ENTER_THREADS = 32 * ENTER_WARPS,     /* of a row in the second; one more warp finishes the mixes */
    ENTER_FOURS = 3,                /* of columns that a thread has on their way */
    SLICES_COMING = 10,             /* and slices */
    MAX_MIXES = (2 + MAX_STREAMS) * MAX_STREAMS,
};

struct Streams {
    float *y, *streams;
    const float *branch, *leaving;
    float *mixes, *sums;            /* sums: [rows, slices, pitch] a slice's part of the products, at `squares` of the squares */
    Matrix fn;                      /* no rows: no mixes are made */
    const float *base, *scale, *entering, *norm;
    int n_rows, mult, hidden, n_mixes, iterations;
    int slices, squares, pitch;
    float norm_eps, eps;
    PassReport *report;
    int place;
};

/* A template argument MULT is the number of streams where columns come in whole fours and fn is f32; 0: any number and shape. */
template <int MULT> static __device__ inline int streams_of(const Streams &p) { return MULT ? MULT : p.mult; }

template <int MULT> static __device__ inline float4 load_columns(const float *p, int count) {
    float4 v = {};
    if (!MULT) return load_four(p, count);
    if (count > 0)
        asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}

template <int MULT> static __device__ inline void store_columns(float *p, float4 v, int count) {
    if (!MULT) store_four(p, v, count);
    else if (count > 0) *(float4 *)p = v;
}

static __device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

static __device__ inline float dot(float4 a, float4 b) { return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w))); }

static __device__ inline float4 add_scaled(float scale, float4 v, float4 sum) {
    return make_float4(fmaf(scale, v.x, sum.x), fmaf(scale, v.y, sum.y), fmaf(scale, v.z, sum.z), fmaf(scale, v.w, sum.w));
}

/* Four neighbouring columns from `at` on of all streams of a row. */
template <int MULT, int N> static __device__ inline void load_streams(float4 (&x)[N], const Streams &p, int row, int at) {
    const int mult = streams_of<MULT>(p);
    const float *streams = p.streams + (size_t)row * (size_t)(mult * p.hidden) + at;
#pragma unroll
    for (int j = 0; j < N; j++)
        x[j] = load_columns<MULT>(streams + (size_t)j * (size_t)p.hidden, j < mult ? p.hidden - at : 0);
}

/* Streams x take up what the last sublayer adds. */
template <int MULT, int N>
static __device__ inline void expand(float4 (&x)[N], float4 added, const float *leaving, const Streams &p, int row, int at) {
    const int mult = streams_of<MULT>(p);
    const float *post = leaving + mult, *matrix = post + mult;
    float *streams = p.streams + (size_t)row * (size_t)(mult * p.hidden) + at;
    float4 before[N];
    bool good = true;
#pragma unroll
    for (int j = 0; j < N; j++) before[j] = x[j];
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (k >= mult) break;
        x[k] = add_scaled(post[k], added, make_float4(0, 0, 0, 0));
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < mult) x[k] = add_scaled(matrix[j * mult + k], before[j], x[k]);
        store_columns<MULT>(streams + (size_t)k * (size_t)p.hidden, x[k], p.hidden - at);
        good = good && is_finite(x[k]);
    }
    if (!good && at < p.hidden) report_bad(p.report, p.place, row);
}

/* The block's columns of its rows, with what the last sublayer adds to them, go to shared memory: [rows, streams, SLICE]. A
 * thread takes four columns of a row. */
template <int MULT>
static __device__ inline void take_streams(float4 *staged, float *leaving, const Streams &p, int first, int rows, int begin) {
    const int mult = streams_of<MULT>(p), all = (2 + mult) * mult, r = (int)threadIdx.x / SLICE, c = (int)threadIdx.x % SLICE,
              at = begin + 4 * c;
    float4 x[MULT ? MULT : MAX_STREAMS], added = {};
    if (r < rows) {
        load_streams<MULT>(x, p, first + r, at);
        if (p.branch) added = load_columns<MULT>(p.branch + (size_t)(first + r) * (size_t)p.hidden + at, p.hidden - at);
    }
    for (int i = (int)threadIdx.x; i < rows * all && p.branch; i += STREAM_THREADS)
        leaving[i] = p.leaving[(size_t)first * (size_t)all + (size_t)i];
    __syncthreads();
    if (r < rows) {
        if (p.branch) expand<MULT>(x, added, leaving + r * all, p, first + r, at);
#pragma unroll
        for (int j = 0; j < (MULT ? MULT : MAX_STREAMS); j++)
            if (j < mult) staged[(r * mult + j) * SLICE + c] = x[j];
    }
    __syncthreads();
}

/* What item i of the block's columns, [streams, SLICE], meets in rows `mix` and the next of fn. */
template <int MULT>
static __device__ inline void load_mix_weights(float4 (&w)[WARP_SUMS], const Streams &p, int mix, int i, int begin) {
    const int column = begin + i % SLICE * 4, left = i < streams_of<MULT>(p) * SLICE ? p.hidden - column : 0;
    const size_t at = (size_t)(i / SLICE * p.hidden + column);
#pragma unroll
    for (int o = 0; o < WARP_SUMS; o++) {
        const size_t from = (size_t)min(mix + o, p.fn.rows - 1) * (size_t)p.fn.cols + at;
        float v[4];
        if (MULT || p.fn.dtype == DTYPE_F32) w[o] = load_columns<MULT>((const float *)p.fn.data + from, left);
        else {
            for (int k = 0; k < 4; k++) v[k] = k < left ? load_stored(p.fn.data, from + (size_t)k, p.fn.dtype) : 0;
            w[o] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
}

/* Of 32 sums of each lane, lane l has the l-th over all lanes. */
static __device__ inline float sum_of_lane(float (&sums)[32]) {
#pragma unroll
    for (int half = 16; half; half /= 2) {
        const bool upper = lane_id() & half;
#pragma unroll
        for (int i = 0; i < 16; i++)                /* a loop to `half` would not be unrolled */
            if (i < half) {
                const float given = upper ? sums[i] : sums[i + half], kept = upper ? sums[i + half] : sums[i];
                sums[i] = kept + __shfl_xor_sync(~0u, given, half);
            }
    }
    return sums[0];
}

/* What the block's columns add to the products of its rows with fn, and to the sums of their squares. A warp makes WARP_SUMS of
 * these, of WARP_ROWS rows at a time; w: its first weights. The squares are behind all products, by themselves. */
template <int MULT>
static __device__ inline void sum_mixes(const float4 *staged, float4 (&w)[WARP_SUMS], const Streams &p, int first, int rows,
                                        int begin) {
    const int items = streams_of<MULT>(p) * SLICE, lane = lane_id();
    for (int mix = warp_id() * WARP_SUMS; mix <= p.squares; mix += STREAM_WARPS * WARP_SUMS)
        for (int r0 = 0; r0 < rows; r0 += WARP_ROWS) {
            float sums[32] = {};
            for (int i = lane; i < items; i += 32) {
                if (!MULT) load_mix_weights<MULT>(w, p, mix, i, begin);
#pragma unroll
                for (int r = 0; r < WARP_ROWS; r++)
                    if (r0 + r < rows) {
                        const float4 x = staged[(r0 + r) * items + i];
                        if (mix == p.squares) sums[r * WARP_SUMS] += sum_squares(x);
                        else
#pragma unroll
                            for (int o = 0; o < WARP_SUMS; o++) sums[r * WARP_SUMS + o] += dot(x, w[o]);
                    }
            }
            const float sum = sum_of_lane(sums);
            const int row = r0 + lane / WARP_SUMS, place = mix + lane % WARP_SUMS;
            if (row < rows && place <= p.squares)
                p.sums[((size_t)(first + row) * (size_t)p.slices + blockIdx.x) * (size_t)p.pitch + (size_t)place] = sum;
        }
}

/* Grid: slices, groups of rows. */
template <int MULT> static __global__ void __launch_bounds__(STREAM_THREADS) streams_kernel(const __grid_constant__ Streams p) {
    enum { MOST = MULT ? MULT : MAX_STREAMS };
    __shared__ float4 staged[STREAM_ROWS * MOST * SLICE];
    __shared__ float leaving[STREAM_ROWS * (2 + MOST) * MOST];
    const int begin = (int)blockIdx.x * SLICE * 4, first = (int)blockIdx.y * STREAM_ROWS,
              rows = min((int)STREAM_ROWS, p.n_rows - first);
    float4 w[WARP_SUMS];
    let_next_start();
    if (MULT && p.fn.rows) load_mix_weights<MULT>(w, p, warp_id() * WARP_SUMS, lane_id(), begin);
    wait_for_previous();
    take_streams<MULT>(staged, leaving, p, first, rows, begin);
    if (p.fn.rows) sum_mixes<MULT>(staged, w, p, first, rows, begin);
}

/* ---- what enters the next sublayer */

/* The sums of all slices, a part of them for each warp. */
static __device__ inline void add_sums(float (*of_warp)[MAX_MIXES + WARP_SUMS], const Streams &p, int row) {
    for (int place = lane_id(); place < p.pitch; place += 32) {
        const float *sums = p.sums + (size_t)row * (size_t)(p.slices * p.pitch) + place;
        float sum = 0;
        for (int begin = warp_id(); begin < p.slices; begin += ENTER_WARPS * SLICES_COMING) {
            float part[SLICES_COMING];
#pragma unroll
            for (int i = 0; i < SLICES_COMING; i++) {
                const int slice = begin + i * ENTER_WARPS;
                part[i] = slice < p.slices && place <= p.squares ? __ldcg(sums + slice * p.pitch) : 0;
            }
#pragma unroll
            for (int i = 0; i < SLICES_COMING; i++) sum += part[i];
        }
        if (place <= p.squares) of_warp[warp_id()][place] = sum;
    }
}

/* One of them over all warps. */
static __device__ inline float mix_sum(const float (*of_warp)[MAX_MIXES + WARP_SUMS], int place) {
    float sums[4] = {};
#pragma unroll
    for (int w = 0; w < ENTER_WARPS; w++) sums[w % 4] += of_warp[w][place];
    return sums[0] + sums[1] + (sums[2] + sums[3]);
}

/* What a product becomes a mix by: the i-th's. */
struct MixTerms { float scale, base; };

static __device__ inline MixTerms load_terms(const Streams &p, int i) {
    if (i >= p.fn.rows) return {};
    return {load_four(p.scale + (i < p.mult ? 0 : i < 2 * p.mult ? 1 : 2), 1).x, load_four(p.base + i, 1).x};
}

/* The i-th mix as it is before Sinkhorn's iteration, of its product and of the sum of the squares. */
static __device__ inline float make_mix(const Streams &p, int i, float product, float squares, MixTerms terms) {
    const float norm = rsqrtf(squares / (float)p.fn.cols + p.norm_eps), mix = fmaf(product, norm * terms.scale, terms.base),
                share = sigmoid(mix);
    return i < p.mult ? share + p.eps : i < 2 * p.mult ? 2 * share : mix;
}

/* 1 / x of what is neither large nor small. */
static __device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Divides every row of the n x n matrix, or every column, by its sum. What is beyond n of N does not count. */
template <int N, bool ROWS> static __device__ inline void divide_by_sums(float (&m)[N][N], int n, float eps) {
    float share[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        float even = eps, odd = 0;
#pragma unroll
        for (int k = 0; k < N; k++)
            if (N < MAX_STREAMS || k < n) (k % 2 ? odd : even) += ROWS ? m[j][k] : m[k][j];
        share[j] = reciprocal(even + odd);
    }
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int k = 0; k < N; k++) m[j][k] *= share[ROWS ? j : k];
}

/* Towards the nearest doubly stochastic matrix (Sinkhorn and Knopp 1967): the first step's rows are a softmax, a lane's each.
 * The others are one thread's: more would have to wait for each other 40 times. */
template <int N> static __device__ void sinkhorn(float *matrix, int n, int iterations, float eps) {
    const int lane = lane_id();
    if (lane < n) {
        float *row = matrix + lane * n, m[N], largest = -INFINITY, total = 0;
#pragma unroll
        for (int k = 0; k < N; k++) largest = fmaxf(largest, m[k] = k < n ? row[k] : -INFINITY);
#pragma unroll
        for (int k = 0; k < N; k++) total += m[k] = expf(m[k] - largest);
        const float share = reciprocal(total);
#pragma unroll
        for (int k = 0; k < N; k++)
            if (k < n) row[k] = fmaf(m[k], share, eps);
    }
    __syncwarp();
    if (lane) return;
    float m[N][N];
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int k = 0; k < N; k++) m[j][k] = j < n && k < n ? matrix[j * n + k] : 0;
    divide_by_sums<N, false>(m, n, eps);
#pragma unroll 1
    for (int i = 1; i < iterations; i++) {
        divide_by_sums<N, true>(m, n, eps);
        divide_by_sums<N, false>(m, n, eps);
    }
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int k = 0; k < N; k++)
            if (j < n && k < n) matrix[j * n + k] = m[j][k];
}

/* By a warp of its own: a row's mixes, to where the sublayer's end finds them. first: the terms of the lane's first one. */
template <int MULT>
static __device__ void finish_mixes(const float (*of_warp)[MAX_MIXES + WARP_SUMS], const Streams &p, int row, MixTerms first) {
    __shared__ float own[MAX_MIXES];
    const int mult = streams_of<MULT>(p);
    const float squares = mix_sum(of_warp, p.squares);
    for (int i = lane_id(); i < p.fn.rows; i += 32)
        own[i] = make_mix(p, i, mix_sum(of_warp, i), squares, i < 32 ? first : load_terms(p, i));
    __syncwarp();
    if (p.fn.rows > mult) sinkhorn<MULT ? MULT : MAX_STREAMS>(own + 2 * mult, mult, p.iterations, p.eps);
    __syncwarp();
    for (int i = lane_id(); i < p.fn.rows; i += 32) p.mixes[(size_t)row * (size_t)p.fn.rows + (size_t)i] = own[i];
}

/* The mixes that the streams enter the sublayer by: given, or the first of those that are made of these sums. */
template <int N>
static __device__ inline void find_entering(float (&entering)[N], const float (*of_warp)[MAX_MIXES + WARP_SUMS], const Streams &p,
                                            int row, MixTerms terms) {
    const int lane = lane_id();
    float mix = 0;
    if (p.entering != p.mixes) mix = lane < p.mult ? p.entering[(size_t)row * (size_t)p.n_mixes + (size_t)lane] : 0;
    else {
        const float sum = mix_sum(of_warp, lane < p.mult ? lane : p.squares), squares = __shfl_sync(~0u, sum, p.mult);
        if (lane < p.mult) mix = make_mix(p, lane, sum, squares, terms);
    }
#pragma unroll
    for (int j = 0; j < N; j++) entering[j] = __shfl_sync(~0u, mix, j);
}

template <int MULT, int N>
static __device__ inline float4 collapse(const float4 (&x)[N], const float (&entering)[N], const Streams &p) {
    float4 sum = add_scaled(entering[0], x[0], make_float4(0, 0, 0, 0));
#pragma unroll
    for (int j = 1; j < N; j++)
        if (j < streams_of<MULT>(p)) sum = add_scaled(entering[j], x[j], sum);
    return sum;
}

/* The sum over the warps that share a row's columns; the one that finishes its mixes is not waited for. */
static __device__ inline float sum_of_columns(float value) {
    __shared__ float of_warp[ENTER_WARPS];
    value = warp_sum(value);
    if (lane_id() == 0) of_warp[warp_id()] = value;
    asm volatile("bar.sync 1, %0;" :: "n"((int)ENTER_THREADS) : "memory");
    float sum = 0;
#pragma unroll
    for (int w = 0; w < ENTER_WARPS; w++) sum += of_warp[w];
    return sum;
}

template <int MULT> static __device__ inline float4 norm_weight(const Streams &p, int at) {
    return p.norm ? load_columns<MULT>(p.norm + at, p.hidden - at) : make_float4(1, 1, 1, 1);
}

/* Grid: rows. */
template <int MULT> static __global__ void __launch_bounds__(ENTER_THREADS + 32) enter_kernel(const __grid_constant__ Streams p) {
    enum { N = MULT ? MULT : MAX_STREAMS, FOURS = MULT ? ENTER_FOURS : 1, STEP = ENTER_THREADS * 4 };
    extern __shared__ __align__(16) float collapsed[];
    __shared__ float of_warp[ENTER_WARPS][MAX_MIXES + WARP_SUMS];
    const int row = (int)blockIdx.x, at = warp_id() < ENTER_WARPS ? 4 * (int)threadIdx.x : p.hidden;
    float4 x[FOURS][N], weight[FOURS];
    let_next_start();
    const MixTerms terms = load_terms(p, lane_id());
#pragma unroll
    for (int i = 0; i < FOURS; i++) weight[i] = norm_weight<MULT>(p, at + i * STEP);
    wait_for_previous();
    auto take = [&](int begin) {
#pragma unroll
        for (int i = 0; i < FOURS; i++) load_streams<MULT>(x[i], p, row, begin + i * STEP);
    };
    if (p.fn.rows && warp_id() < ENTER_WARPS) add_sums(of_warp, p, row);
    take(at);                                       /* behind the sums, for which the mixes wait, that take longest */
    __syncthreads();
    if (warp_id() == ENTER_WARPS) {
        if (p.fn.rows) finish_mixes<MULT>(of_warp, p, row, terms);
        return;
    }
    float entering[N], sum = 0;
    find_entering(entering, of_warp, p, row, terms);
    for (int begin = at; true;) {
#pragma unroll
        for (int i = 0; i < FOURS; i++)
            if (begin + i * STEP < p.hidden) {
                const float4 v = collapse<MULT>(x[i], entering, p);
                sum += sum_squares(v);
                *(float4 *)(collapsed + begin + i * STEP) = v;
            }
        if ((begin += FOURS * STEP) >= p.hidden) break;
        take(begin);
    }
    const float scale = p.norm ? 1 / sqrtf(sum_of_columns(sum) / (float)p.hidden + p.norm_eps) : 1;
    float *y = p.y + (size_t)row * (size_t)p.hidden;
#pragma unroll
    for (int i = 0, c = at; i < FOURS; i++, c += STEP)
        if (c < p.hidden) store_columns<MULT>(y + c, weighted(*(const float4 *)(collapsed + c), scale, weight[i]), p.hidden - c);
    for (int c = at + FOURS * STEP; c < p.hidden; c += STEP)
        store_columns<MULT>(y + c, weighted(*(const float4 *)(collapsed + c), scale, norm_weight<MULT>(p, c)), p.hidden - c);
}

template <int MULT> static void launch_streams(const Streams &p) {
    const size_t of_row = (size_t)divide_up(p.hidden, 4) * sizeof(float4);
    if (p.branch || p.fn.rows)
        launch(streams_kernel<MULT>, dim3((unsigned)p.slices, (unsigned)divide_up(p.n_rows, STREAM_ROWS)), STREAM_THREADS, 0, p);
    if (!p.y) return;
    allow_shared(enter_kernel<MULT>, of_row);
    launch(enter_kernel<MULT>, (unsigned)p.n_rows, ENTER_THREADS + 32, of_row, p);
}

static void mix_streams(float *y, float *streams, const float *branch, const float *leaving, float *mixes,
                        const HyperWeights *weights, const float *entering, const float *norm, int n_rows, const Config *config,
                        PassReport *report, int place) {
    const int mult = config->hc_mult;
    if (n_rows <= 0) return;
    Streams p = {.y = y, .streams = streams, .branch = branch, .leaving = leaving, .mixes = mixes, .sums = partials, .fn = {},
                 .base = NULL, .scale = NULL, .entering = entering, .norm = norm, .n_rows = n_rows, .mult = mult,
                 .hidden = config->hidden_size, .n_mixes = (2 + mult) * mult, .iterations = config->hc_sinkhorn_iters,
                 .slices = divide_up(config->hidden_size, 4 * SLICE), .squares = 0, .pitch = 0, .norm_eps = config->rms_norm_eps,
                 .eps = config->hc_eps, .report = report, .place = place};
    if (weights) p.fn = weights->fn, p.base = weights->base, p.scale = weights->scale, p.n_mixes = weights->fn.rows;
    p.squares = divide_up(p.fn.rows, WARP_SUMS) * WARP_SUMS;
    p.pitch = divide_up(p.squares + 1, 32) * 32;
    if ((size_t)n_rows * (size_t)p.slices * (size_t)p.pitch > PARTIAL_FLOATS) {
        fprintf(stderr, "tide: cuda: no room for the sums of %d rows of %d columns in %d streams\n", n_rows, p.hidden, mult);
        _exit(1);
    }
    const bool fours = p.hidden % 4 == 0 && ((uintptr_t)y | (uintptr_t)streams | (uintptr_t)branch | (uintptr_t)norm
                                             | (uintptr_t)p.fn.data) % 16 == 0
                       && (!weights || p.fn.dtype == DTYPE_F32);
    if (fours && mult == 4) launch_streams<4>(p);
    else if (fours && mult == 2) launch_streams<2>(p);
    else launch_streams<0>(p);
}

static __global__ void first_stream_kernel(float *mixes, int n, int n_mixes) {
    begin_kernel();
    const int i = (int)thread_index();
    if (i < n) mixes[i] = i % n_mixes == 0;
}

static void first_stream(float *mixes, int n_rows, const Config *config) {
    const int n_mixes = (2 + config->hc_mult) * config->hc_mult, n = n_rows * n_mixes;
    if (n <= 0) return;
    launch(first_stream_kernel, blocks_for((size_t)n), THREADS, 0, mixes, n, n_mixes);
}

/* ---- Engram */

/* A block takes a stream of a row. */
static __global__ void add_engram_kernel(float *streams, const float *kv, const float *q_weight, const float *k_weight, int mult,
                                         int hidden, float eps) {
    __shared__ float of_warp[3][32];
    const int k = (int)blockIdx.x, row = (int)blockIdx.y;
    const size_t width = (size_t)hidden;
    const float *keys = kv + (size_t)row * (size_t)(mult + 1) * width, *key = keys + (size_t)k * width,
                *value = keys + (size_t)mult * width;
    float *x = streams + (size_t)(row * mult + k) * width, met = 0, x_squares = 0, key_squares = 0;
    q_weight += (size_t)k * width, k_weight += (size_t)k * width;
    begin_kernel();
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < hidden; i += (int)blockDim.x) {
        met = fmaf(x[i] * (q_weight[i] * k_weight[i]), key[i], met);
        x_squares += x[i] * x[i];
        key_squares += key[i] * key[i];
    }
    met = block_sum(of_warp[0], met);
    x_squares = block_sum(of_warp[1], x_squares), key_squares = block_sum(of_warp[2], key_squares);
    met /= sqrtf(x_squares / (float)hidden + eps) * sqrtf(key_squares / (float)hidden + eps) * sqrtf((float)hidden);
    const float gate = isnan(met) ? met : sigmoid(copysignf(sqrtf(fmaxf(fabsf(met), 1e-6f)), met));
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < hidden; i += (int)blockDim.x) x[i] = fmaf(gate, value[i], x[i]);
}

static void add_engram(float *streams, const float *kv, const EngramWeights *engram, int n_rows, const Config *config) {
    if (n_rows <= 0) return;
    launch(add_engram_kernel, dim3((unsigned)config->hc_mult, (unsigned)n_rows), 512, 0, streams, kv, engram->q_weight,
           engram->k_weight, config->hc_mult, config->hidden_size, config->rms_norm_eps);
}

/* ---- what windows see */

struct SharedKeys {
    uint8_t *base;
    RowFormat format, rounding;
    const DeviceRow *ids;
    float *kv;
    int dim, half;                  /* half: pairs that are rotated */
    bool rounds;
    const float *weight, *cosine, *sine;
    Norm q;
};

/* A block takes a row of kv, or with blockIdx.y = 1 one of q. A thread has four neighbours; the rest is done in shared memory. */
static __global__ void store_shared_keys_kernel(const __grid_constant__ SharedKeys p) {
    extern __shared__ __align__(16) float staged[];
    __shared__ float of_warp[32];
    let_next_start();
    if (blockIdx.y) return norm_row(p.q, (int)blockIdx.x);
    const int thread = (int)threadIdx.x, at = 4 * thread, count = p.dim - at, first = p.dim - 2 * p.half;
    float *row = p.kv + (size_t)blockIdx.x * (size_t)p.dim;
    const float *cosine = p.cosine + (size_t)blockIdx.x * (size_t)p.half, *sine = p.sine + (size_t)blockIdx.x * (size_t)p.half;
    const float4 weight = load_four(p.weight + at, count);
    wait_for_previous();
    const int id = p.ids[blockIdx.x].id, own = min(thread, p.half - 1);
    const float4 v = load_four(row + at, count);
    const float2 angle = p.half ? make_float2(cosine[own], sine[own]) : make_float2(1, 0);
    const float scale = 1 / sqrtf(block_sum(of_warp, sum_squares(v)) / (float)p.dim + p.q.eps);
    *(float4 *)(staged + at) = weighted(v, scale, weight);
    __syncthreads();
    if (thread < p.half) rotate(staged + first + 2 * thread, 1, angle.x, angle.y);
    for (int i = thread + (int)blockDim.x; i < p.half; i += (int)blockDim.x)
        rotate(staged + first + 2 * i, 1, cosine[i], sine[i]);
    __syncthreads();
    const int group = p.rounding.group, end = p.rounds ? p.rounding.quantised : 0;
    for (int i = warp_id() * group; i < end; i += (int)blockDim.x / 32 * group)
        round_group(staged + i, min(group, end - i), p.rounding);
    __syncthreads();
    store_four(row + at, *(const float4 *)(staged + at), count);
    store_row(p.base + (size_t)id * p.format.stride, p.format, staged, staged + p.format.quantised);
}

static void store_shared_keys(uint8_t *base, const RowFormat *format, const DeviceRow *ids, int n_rows, float *kv, int dim,
                              int turned, const float *weight, const RowFormat *rounding, float *q, int rank,
                              const float *q_weight, float eps, const float *cosine, const float *sine) {
    const size_t width = (size_t)rank;
    const unsigned threads = (unsigned)norm_threads(max(dim, rank), 1);
    if (n_rows <= 0) return;
    launch(store_shared_keys_kernel, dim3((unsigned)n_rows, q ? 2 : 1), threads, threads * sizeof(float4),
           {.base = base, .format = *format, .rounding = rounding ? *rounding : *format, .ids = ids, .kv = kv, .dim = dim,
            .half = turned / 2, .rounds = rounding != NULL, .weight = weight, .cosine = cosine, .sine = sine,
            .q = {.y = q, .x = q, .y_stride = width, .x_stride = width, .branch = NULL, .weight = q_weight, .dim = rank,
                  .eps = eps, .report = NULL, .place = 0}});
}

/* ---- what --qat rounds */

/* A block takes a vector, in shared memory. */
static __global__ void hadamard_kernel(float *x, int dim) {
    extern __shared__ float vector[];
    begin_kernel();
    float *v = x + (size_t)blockIdx.x * (size_t)dim;
    const float scale = 1 / sqrtf((float)dim);
    for (int i = (int)threadIdx.x; i < dim; i += (int)blockDim.x) vector[i] = v[i];
    for (int half = 1; half < dim; half *= 2) {
        __syncthreads();
        for (int i = (int)threadIdx.x; i < dim / 2; i += (int)blockDim.x) {
            const int at = i / half * 2 * half + i % half;
            const float a = vector[at], b = vector[at + half];
            vector[at] = a + b, vector[at + half] = a - b;
        }
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < dim; i += (int)blockDim.x) v[i] = vector[i] * scale;
}

static void hadamard(float *x, int n, int dim) {
    if (n <= 0) return;
    launch(hadamard_kernel, (unsigned)n, (unsigned)min(max(dim / 2, 32), 512), (size_t)dim * sizeof(float), x, dim);
}

/* A warp takes a group. */
static __global__ void round_rows_kernel(float *x, size_t stride, int n_rows, int dim, RowFormat format) {
    begin_kernel();
    const int groups = divide_up(dim, format.group), at = (int)(thread_index() / 32), first = at % groups * format.group;
    if (at < n_rows * groups)
        round_group(x + (size_t)(at / groups) * stride + first, min(format.group, dim - first), format);
}

static void round_rows(float *x, size_t stride, int n_rows, int dim, const RowFormat *format) {
    const size_t groups = (size_t)n_rows * (size_t)divide_up(dim, format->group);
    if (n_rows <= 0 || dim <= 0) return;
    launch(round_rows_kernel, blocks_for(groups * 32), THREADS, 0, x, stride, n_rows, dim, *format);
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
    const int own = warp_prefix_sum(value);
    if (lane == WARP - 1) sums[warp] = own;
    __syncthreads();
    const int all = warp_prefix_sum(lane < (int)blockDim.x / WARP ? sums[lane] : 0);
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
    int group, groups, context_pages, hot_pages, tail_ring, staging_rows;
    int page_shift;             /* 1 << page_shift rows of the group to a page */
    int hot_rows, all_hot_rows; /* of the group; of the finest one, which tables have room for */
    int32_t first_staged;       /* device rows from here on are staging's */
    bool scan;                  /* LOOKUP_SCAN */
    int range;                  /* rows that the bitmap holds at once, a multiple of QUAD */
} Resolver;

static Resolver resolver_of(const Cache *cache, int group) {
    const int rows = page_rows(cache, group);       /* 64 or 32 */
    return (Resolver){cache->seen, cache->slots, group, cache->groups, cache->context_pages, cache->hot_pages, cache->tail_ring,
                      cache->staging_rows, __builtin_ctz((unsigned)rows), cache->hot_rows / stretch_of(cache, group),
                      cache->hot_rows, cache->device_pages.n_pages * rows, cache->lookup == LOOKUP_SCAN, 0};
}

/* Row `row` of a session, or slot of its hot cache, in the page that holds it. */
static __device__ int row_in_page(const Resolver &cache, int page, int row) {
    return page << cache.page_shift | (row & ((1 << cache.page_shift) - 1));
}

/* The first row of the group that a session's tail holds. */
static __device__ int tail_begin(const Resolver &cache, int session) {
    return cache.seen.tail_base[session] / PAGE_ROWS << cache.page_shift;
}

/* The device page that holds a row without any search, or 0. */
static __device__ int direct_page(const Resolver &cache, int session, int row, int tail_base) {
    const int page = row >> cache.page_shift;
    return row >= tail_base ? cache.seen.tail[session * cache.tail_ring + (page & (cache.tail_ring - 1))].id
                            : cache.seen.ready[(size_t)session * cache.context_pages + page].id;
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

enum {
    MAX_HOT_PAGES = ((int)UINT16_MAX + 1) / (int)PAGE_ROWS,     /* the array of slots counts in 16 bits */
    AGES = KEY_BINS,            /* ages of slots that are counted one by one; the last stands for all that are older */
    QUAD = 128,                 /* rows of four words of the bitmap, which are cleared at once */
    NOWHERE = -1,
    IN_FLIGHT = 4,              /* entries a thread looks at together, to hide the latency */
};

/* Who gives way: the slots older than `age`, and the first `ties` of that age. */
typedef struct Victims { unsigned age, ties; } Victims;

typedef struct ResolveShared {
    int picked[TIERS];
    int low, high;              /* of the rows that are still sought; high < low: none */
    int base;                   /* row of the bitmap's first bit */
    alignas(16) unsigned ages[AGES];        /* slots by how many resolves ago they were used */
    unsigned oldest;            /* of them */
    Victims victims;
    int sums[WARP];
    DevicePage hot[MAX_HOT_PAGES];
    KeyBins bins;
} ResolveShared;

/* What is missing, a bit for each row of a part of the context, in dynamic shared memory. */
typedef struct Missing {
    uint32_t *bits;             /* [range / 32] */
    int *before;                /* [range / 32] entries of the plan in front of the word's */
} Missing;

static __device__ DeviceRow hot_location(const Resolver &cache, const ResolveShared *shared, int slot) {
    return (DeviceRow){row_in_page(cache, shared->hot[slot >> cache.page_shift].id, slot)};
}

/* What stands in place of a location until it is known: the row that is sought, or which entry of the plan brings it. */
static __device__ DeviceRow sought(int row) { return (DeviceRow){-2 - row}; }
static __device__ int sought_row(DeviceRow location) { return -2 - location.id; }       /* negative: something else */
static __device__ DeviceRow planned(int entry) { return (DeviceRow){INT32_MIN + entry}; }
static __device__ int planned_entry(DeviceRow location) { return location.id < -2 - MAX_CONTEXT ? location.id - INT32_MIN : -1; }

/* Adds each thread's counts to the block's. */
static __device__ void count_picked(ResolveShared *shared, Tier tier, int count) {
    count = __reduce_add_sync(~0u, count);
    if (threadIdx.x % WARP == 0 && count) atomicAdd(&shared->picked[tier], count);
}

/* First look: what is found at once gets its location and, in the hot cache, its stamp; the others are sought. Nothing waits
 * for the map before it asks the array of slots: what an answer costs is the time it takes, not its bytes. */
static __device__ void look_up(const Resolver &cache, const Search &search, ResolveShared *shared, DeviceRow held[IN_FLIGHT]) {
    int tail = 0, optional = 0, hot = 0, low = INT_MAX, high = -1;
#pragma unroll 1
    for (int first = threadIdx.x; first < search.entries; first += IN_FLIGHT * blockDim.x) {
        int position[IN_FLIGHT], page[IN_FLIGHT], slot[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            position[u] = first + u * blockDim.x < search.entries ? search.ids[first + u * blockDim.x] : -1;
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            page[u] = position[u] < 0 ? 0 : direct_page(cache, search.session, position[u], search.tail_base);
            slot[u] = position[u] < 0 || cache.scan ? -1 : search.hot.slot_of[position[u]] - 1;
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            DeviceRow location = {NOWHERE};
            if (page[u]) {
                location.id = row_in_page(cache, page[u], position[u]);
                tail += position[u] >= search.tail_base, optional += position[u] < search.tail_base;
            } else if (slot[u] >= 0) {
                location = hot_location(cache, shared, slot[u]);
                search.hot.stamp[slot[u]] = search.now;
                hot++;
            } else if (position[u] >= 0) {
                location = sought(position[u]);
                low = min(low, position[u]), high = max(high, position[u]);
            }
            if (first + u * blockDim.x < search.entries) search.locations[first + u * blockDim.x] = location;
            if (first < (int)blockDim.x) held[u] = location;
        }
    }
    count_picked(shared, TIER_TAIL, tail), count_picked(shared, TIER_OPTIONAL, optional), count_picked(shared, TIER_HOT, hot);
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (threadIdx.x % WARP == 0 && high >= 0) atomicMin(&shared->low, low), atomicMax(&shared->high, high);
}

/* visit(location) for every entry of the selections; it may change it, and what it loads is loaded for several at once. A
 * thread's first entries, mostly all of them, need not be read again: held has them. */
template <typename Visit> static __device__ void each_location(const Search &search, DeviceRow held[IN_FLIGHT], Visit visit) {
#pragma unroll 1
    for (int first = threadIdx.x; first < search.entries; first += IN_FLIGHT * blockDim.x) {
        DeviceRow old[IN_FLIGHT], location[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            const int i = first + u * blockDim.x;
            old[u] = first < (int)blockDim.x ? held[u] : i < search.entries ? search.locations[i] : (DeviceRow){NOWHERE};
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) location[u] = old[u], visit(location[u]);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            if (location[u].id != old[u].id) search.locations[first + u * blockDim.x] = location[u];
            if (first < (int)blockDim.x) held[u] = location[u];
        }
    }
}

/* The paper's lookup: each tag of the hot cache asks whether its row is sought, stamps its slot and takes the bit away. */
static __device__ void scan_tags(const Resolver &cache, const Search &search, const Missing &missing, int base, int rows) {
#pragma unroll 1
    for (int slot = threadIdx.x; slot < cache.hot_rows; slot += blockDim.x) {
        const int row = search.hot.tag[slot] - base;
        if (search.hot.tag[slot] < 0 || row < 0 || row >= rows || !(missing.bits[row / 32] >> row % 32 & 1)) continue;
        search.hot.stamp[slot] = search.now;
        atomicAnd(&missing.bits[row / 32], ~(1u << row % 32));
    }
}

/* Which entry of the plan brings that row of the bitmap, or -1. */
static __device__ int entry_of(const Missing &missing, int row) {
    const uint32_t bits = missing.bits[row / 32], own = 1u << row % 32;
    return bits & own ? missing.before[row / 32] + __popc(bits & (own - 1)) : -1;
}

/* Lists the bitmap's rows behind `listed` entries, a word, which is of one page, a thread; returns how many there are then. Each
 * warp has a part of the words, and knows where its entries begin when all have counted theirs. to holds the rows themselves. */
static __device__ int list_bits(const Resolver &cache, const Search &search, ResolveShared *shared, const Missing &missing,
                                int base, int rows, int listed) {
    const HostPage *pages = cache.seen.host + (size_t)search.session * cache.context_pages;
    const int lane = threadIdx.x % WARP, words = rows / 32, part = divide_up(words, (int)blockDim.x) * WARP,
              begin = threadIdx.x / WARP * part, end = min(begin + part, words);
    int own = 0, total;
    for (int word = begin + lane; word < end; word += WARP) own += __popc(missing.bits[word]);
    own = __reduce_add_sync(~0u, own);
    int at = listed + __shfl_sync(~0u, scan_block(lane ? 0 : own, shared->sums, &total), 0);
#pragma unroll 1
    for (int first = begin; first < end; first += WARP) {
        const int word = first + lane, row = base + 32 * word;
        const uint32_t bits = word < end ? missing.bits[word] : 0;
        const int page = bits ? pages[row >> cache.page_shift].id : 0;
        const int sum = warp_prefix_sum(__popc(bits));
        int entry = at + sum - __popc(bits);
        if (word < end) missing.before[word] = entry;
        for (uint32_t left = bits; left; left &= left - 1, entry++) {
            const int here = row + __ffs(left) - 1;
            search.from[entry].id = ((int64_t)page << cache.page_shift) + (here & ((1 << cache.page_shift) - 1));
            search.to[entry].id = here;
        }
        at += __shfl_sync(~0u, sum, WARP - 1);
    }
    return listed + total;
}

/* The union of what is missing (eq. 6), ascending, into the plan; returns how many rows. A context that is larger than the bitmap
 * is gone through in ranges, of which the last one stays. */
static __device__ int list_missing(const Resolver &cache, const Search &search, ResolveShared *shared, const Missing &missing,
                                   DeviceRow held[IN_FLIGHT]) {
    const int low = shared->low / QUAD * QUAD, high = shared->high;
    int listed = 0;
#pragma unroll 1
    for (int base = low; base <= high; base += cache.range) {
        const int rows = min(cache.range, (high - base) / QUAD * QUAD + QUAD);
        if (base > low) {                           /* the bitmap is about to go: what it says of the range before */
            __syncthreads();
            each_location(search, held, [&](DeviceRow &location) {
                const int row = sought_row(location) - base + cache.range;
                const int entry = row >= 0 && row < cache.range ? entry_of(missing, row) : -1;
                if (entry >= 0) location = planned(entry);
            });
            __syncthreads();
        }
        if (threadIdx.x == 0) shared->base = base;
#pragma unroll 1
        for (int row = QUAD * threadIdx.x; row < rows; row += QUAD * blockDim.x)
            ((uint4 *)missing.bits)[row / QUAD] = make_uint4(0, 0, 0, 0);
        __syncthreads();
        each_location(search, held, [&](DeviceRow &location) {
            const int row = sought_row(location) - base;
            if (row >= 0 && row < rows) atomicOr(&missing.bits[row / 32], 1u << row % 32);
        });
        __syncthreads();
        if (cache.scan) {
            scan_tags(cache, search, missing, base, rows);
            __syncthreads();
        }
        listed = list_bits(cache, search, shared, missing, base, rows, listed);
    }
    return listed;
}

/* Counts the slots by age. All hits of a direct look-up have their stamps by now. */
static __device__ void count_ages(const Resolver &cache, const Search &search, ResolveShared *shared) {
    unsigned oldest = 0;
#pragma unroll 1
    for (int first = threadIdx.x; first < cache.hot_rows; first += IN_FLIGHT * blockDim.x) {
        unsigned age[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            if (first + u * blockDim.x < cache.hot_rows) age[u] = search.now - search.hot.stamp[first + u * blockDim.x];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            if (first + u * blockDim.x < cache.hot_rows) {
                atomicAdd(&shared->ages[min(age[u], AGES - 1u)], 1u);
                oldest = max(oldest, age[u]);
            }
    }
    oldest = __reduce_max_sync(~0u, oldest);
    if (threadIdx.x % WARP == 0) atomicMax(&shared->oldest, oldest);
}

/* By one warp: the `room` slots that give way, as far as the counts of ages tell. */
static __device__ Victims oldest_slots(const ResolveShared *shared, unsigned room) {
    enum { EACH = AGES / WARP };                    /* ages of a lane, lane 0's the oldest */
    static_assert(EACH == 8, "two loads of four");
    const int lane = threadIdx.x % WARP;
    const uint4 *ages = (const uint4 *)(shared->ages + AGES - (lane + 1) * EACH), young = ages[0], old = ages[1];
    const unsigned count[EACH] = {old.w, old.z, old.y, old.x, young.w, young.z, young.y, young.x};
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) own += count[i];
    const unsigned sum = warp_prefix_sum(own);
    Victims victims = {AGES - 1u - lane * EACH, room - (sum - own)};
    bool beyond = true;
#pragma unroll
    for (int i = 0; i < EACH - 1; i++) {
        beyond &= victims.ties > count[i];
        if (beyond) victims.ties -= count[i], victims.age--;
    }
    const int owner = __ffs(__ballot_sync(~0u, sum >= room)) - 1;
    return {__shfl_sync(~0u, victims.age, owner), __shfl_sync(~0u, victims.ties, owner)};
}

/* The same for the whole block, which among slots as old as the last age has to look closer. */
static __device__ Victims choose_victims(const Resolver &cache, const Search &search, ResolveShared *shared, unsigned room) {
    if (threadIdx.x < WARP) shared->victims = oldest_slots(shared, room);
    if (threadIdx.x == 0) shared->bins.wanted = (Wanted){.count = room, .mass = ANY_MASS};
    __syncthreads();
    const Victims victims = shared->victims;
    if (victims.age < AGES - 1) return victims;
    if (victims.ties == shared->ages[AGES - 1]) return {AGES - 2, 0};
    const uint32_t *stamp = search.hot.stamp;
    auto age_of = [&](int slot) { return (uint64_t)(search.now - stamp[slot]); };
    const int shift = (31 - __clz(shared->oldest)) / 8 * 8;
    const unsigned age = (unsigned)find_cut<false>(&shared->bins, cache.hot_rows, shift, age_of, [](int) { return 0ull; });
    return {age, shared->bins.wanted.count};
}

/* Missing rows take the slots used least recently, ties to the lower slot: the i-th row, ascending, the i-th such slot. Returns
 * how many rows found no slot: the first of the plan. */
static __device__ int take_victims(const Resolver &cache, const Search &search, ResolveShared *shared, int missing) {
    const int room = min(missing, cache.hot_rows - (int)shared->ages[0]), beyond = missing - room;
    if (!room) return beyond;
    const Victims victims = choose_victims(cache, search, shared, (unsigned)room);
    const int lane = threadIdx.x % WARP;
    unsigned before = 0;                            /* slots that are older, in the upper half, and those of that age */
#pragma unroll 1
    for (int first = 0; first < cache.hot_rows; first += IN_FLIGHT * blockDim.x) {
        const int begin = first + threadIdx.x / WARP * WARP * IN_FLIGHT + lane;
        unsigned older[IN_FLIGHT], equal[IN_FLIGHT], own = 0;       /* the warp's slots, a bit for each */
        int old[IN_FLIGHT], entry[IN_FLIGHT], row[IN_FLIGHT], total;
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            const int slot = begin + u * WARP;
            const unsigned age = slot < cache.hot_rows ? search.now - search.hot.stamp[slot] : 0;
            old[u] = slot < cache.hot_rows ? search.hot.tag[slot] : -1;
            older[u] = __ballot_sync(~0u, age > victims.age);
            equal[u] = __ballot_sync(~0u, slot < cache.hot_rows && age == victims.age);
            own += __popc(older[u]) << 16 | __popc(equal[u]);
        }
        unsigned at = before + __shfl_sync(~0u, (unsigned)scan_block(lane ? 0 : (int)own, shared->sums, &total), 0);
        before += (unsigned)total;
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            const unsigned below = (1u << lane) - 1, ties = (at & 0xffff) + __popc(equal[u] & below);
            const bool victim = older[u] >> lane & 1 || (equal[u] >> lane & 1 && ties < victims.ties);
            entry[u] = victim ? beyond + (int)((at >> 16) + __popc(older[u] & below) + min(ties, victims.ties)) : -1;
            row[u] = victim ? search.to[entry[u]].id : 0;
            at += __popc(older[u]) << 16 | __popc(equal[u]);
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            const int slot = begin + u * WARP;
            if (entry[u] < 0) continue;
            if (old[u] >= 0) search.hot.slot_of[old[u]] = 0;
            search.hot.tag[slot] = row[u];
            search.hot.stamp[slot] = search.now;
            search.hot.slot_of[row[u]] = (uint16_t)(slot + 1);
            search.to[entry[u]] = hot_location(cache, shared, slot);
        }
    }
    return beyond;
}

/* Where sought rows come to lie: where the plan brings them, and what a scan has found has a slot by now. The first `beyond` of
 * the plan are staged, from device row `staged` on. */
static __device__ void locate_sought(const Resolver &cache, const Search &search, ResolveShared *shared, const Missing &missing,
                                     DeviceRow held[IN_FLIGHT], int beyond, int staged) {
    int hot = 0, host = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < beyond; i += blockDim.x) search.to[i].id = staged + i;
    if (beyond) __syncthreads();
    each_location(search, held, [&](DeviceRow &location) {
        const int row = sought_row(location);
        if (row < 0) return;
        int entry = planned_entry(location);
        if (entry < 0 && row >= shared->base) entry = entry_of(missing, row - shared->base);
        location = entry >= 0 ? search.to[entry] : hot_location(cache, shared, search.hot.slot_of[row] - 1);
        hot += entry < 0, host += entry >= 0;
    });
    count_picked(shared, TIER_HOT, hot), count_picked(shared, TIER_HOST, host);
}

/* How many blocks of several rows begin in front of row `row` of the run: each has its part of the staging. */
static __device__ int staging_before(const Row *rows, int begin, int end, int row) {
    const int r = begin + threadIdx.x;
    return __syncthreads_count(r < row && r + 1 < end && rows[r].session >= 0 && rows[r + 1].session == rows[r].session
                               && (r == begin || rows[r - 1].session != rows[r].session));
}

/* What the first look did not find: its plan, its places; returns how many rows are missing. */
static __device__ int place_missing(const Resolver &cache, const Search &search, ResolveShared *shared, const Missing &missing,
                                    DeviceRow held[IN_FLIGHT], const Row *rows, int begin, int end, int row,
                                    PassReport *report) {
    if (!cache.scan) count_ages(cache, search, shared);
    const int n = list_missing(cache, search, shared, missing, held);
    if (cache.scan) count_ages(cache, search, shared);
    __syncthreads();
    const int beyond = n ? take_victims(cache, search, shared, n) : 0;
    const int staging = beyond ? staging_before(rows, begin, end, row) : 0;
    __syncthreads();
    locate_sought(cache, search, shared, missing, held, beyond, cache.first_staged + staging * cache.staging_rows);
    if (threadIdx.x == 0 && n) atomicAdd(&report->fetched, n);
    if (threadIdx.x == 0 && beyond) atomicAdd(&report->staged, beyond);
    __syncthreads();
    return n;
}

/* A thread block for each row of the run; the one of a session's first row works for all its rows. Inert rows, of no session,
 * are found nowhere. */
static __global__ void __launch_bounds__(1024) resolve_blocks(Resolver cache, Selection selection, const Row *rows, int begin,
                                                              int end, DeviceRow *locations, MissPlan plan, PassReport *report) {
    begin_kernel();
    extern __shared__ uint4 bitmap[];
    __shared__ ResolveShared shared;
    const int row = begin + blockIdx.x, session = rows[row].session;
    const size_t at = (size_t)row * selection.capacity;
    if (session < 0 || (row > begin && rows[row - 1].session == session)) {
        if (threadIdx.x == 0) plan.count[row] = 0;
        for (int i = threadIdx.x; session < 0 && i < selection.capacity; i += blockDim.x) locations[at + i].id = NOWHERE;
        return;
    }
    int n = 1;
#pragma unroll
    for (int i = 1; i < QUERY_BLOCK; i++) n += row + i < end && rows[row + i].session == session;
    const size_t state = (size_t)session * cache.groups + cache.group;
    const HotCache hot = {cache.slots.tag + state * cache.all_hot_rows, cache.slots.stamp + state * cache.all_hot_rows,
                          cache.slots.slot_of + state * cache.context_pages * PAGE_ROWS, cache.slots.clock + state};
    const Search search = {session, tail_begin(cache, session), n * selection.capacity, selection.ids + at, locations + at,
                           plan.from + at, plan.to + at, hot, *hot.clock + 1};
    const Missing missing = {(uint32_t *)bitmap, (int *)((uint32_t *)bitmap + cache.range / 32)};
#pragma unroll 1
    for (int i = threadIdx.x; i < cache.hot_pages; i += blockDim.x)
        shared.hot[i] = cache.seen.hot[(size_t)session * cache.hot_pages + i];
    for (int i = threadIdx.x; i < AGES; i += blockDim.x) shared.ages[i] = 0;
    if (threadIdx.x < TIERS) shared.picked[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.low = INT_MAX, shared.high = -1, shared.oldest = 0;
    __syncthreads();
    DeviceRow held[IN_FLIGHT];
    look_up(cache, search, &shared, held);
    __syncthreads();
    const int planned_rows =
        shared.high < 0 ? 0 : place_missing(cache, search, &shared, missing, held, rows, begin, end, row, report);
    if (threadIdx.x == 0) *hot.clock = search.now, plan.count[row] = planned_rows;
    if (threadIdx.x < TIERS && shared.picked[threadIdx.x]) atomicAdd(&report->picked[threadIdx.x], shared.picked[threadIdx.x]);
}

/* Without hot caches everything is on the device, so each selected row is looked up by itself. */
static __global__ void locate_resident(Resolver cache, Selection selection, const Row *rows, int begin, DeviceRow *locations,
                                       PassReport *report) {
    begin_kernel();
    const int row = begin + blockIdx.y, session = rows[row].session, i = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t at = (size_t)row * selection.capacity;
    const int position = i < selection.capacity && session >= 0 ? selection.ids[at + i] : -1;
    const int tail_base = session >= 0 ? tail_begin(cache, session) : 0;
    const int page = position >= 0 ? direct_page(cache, session, position, tail_base) : 0;
    if (i < selection.capacity) locations[at + i].id = page ? row_in_page(cache, page, position) : NOWHERE;
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
        launch(locate_resident, dim3(divide_up(selection->capacity, 256), n), 256, 0, resolver, *selection, rows, begin,
               locations, report);
        return;
    }
    const size_t quad = QUAD / 32 * (sizeof(uint32_t) + sizeof(int)),
                 quads = (gpu.shared_per_block - 2 * sizeof(ResolveShared)) / quad,
                 context = (size_t)divide_up(cache->context_pages * PAGE_ROWS, QUAD);
    resolver.range = QUAD * (int)(context < quads ? context : quads);
    const size_t bytes = (size_t)resolver.range / QUAD * quad;
    allow_shared(resolve_blocks, bytes);
    const int threads = n > gpu.multiprocessors ? 512 : 1024;           /* two thread blocks fit a multiprocessor, or one */
    launch(resolve_blocks, n, threads, bytes, resolver, *selection, rows, begin, end, locations, *plan, report);
}

/* 16 bytes a piece: 512 KB under way, which fills the link. It brings whole sectors. */
enum { FETCH_BLOCKS = 32, FETCH_THREADS = 512, FETCH_PIECES = 2, SECTOR = 32 };

/* One source's rows and what copies into them need. */
typedef struct Fetch {
    const uint4 *host;
    uint4 *pool, *staging;
    int32_t first_staged;
    int pieces, stride;         /* of a row, 16 bytes each; from one row to the next */
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
    *from = fetch.host + plan.from[at].id * fetch.stride + part;
    *to = (row < fetch.first_staged ? fetch.pool + (size_t)row * fetch.stride
                                    : fetch.staging + (size_t)(row - fetch.first_staged) * fetch.stride) + part;
}

/* Host memory is read a link's round trip away, so every thread asks for several pieces before it waits for any. */
static __global__ void __launch_bounds__(FETCH_THREADS) copy_missing(Fetch fetch, MissPlan plan, int begin, int end,
                                                                     PassReport *report) {
    begin_kernel();
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

enum { LIVE_SOURCES = 4 };      /* of one group: arenas of staging (the paper's chi) */

/* What a producing layer misses, its attention waits for. The layers that follow it need their copies later, so those run beside
 * the compute in between, one after the other and behind the producer's, which has the link to itself. */
static struct Beside {
    cudaStream_t stream;
    cudaEvent_t asked; /* all that was asked for before: the plan is made, and nobody reads an arena's last rows any more */
    cudaEvent_t fetched[LIVE_SOURCES];
} beside;

static bool hierarchy_start(Error *error) {
    (void)error;
    CUDA(cudaStreamCreateWithFlags(&beside.stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&beside.asked, cudaEventDisableTiming));
    for (int i = 0; i < LIVE_SOURCES; i++) CUDA(cudaEventCreateWithFlags(&beside.fetched[i], cudaEventDisableTiming));
    return true;
}

static void fetch_rows(Cache *cache, SourceId source, const MissPlan *plan, const Row *rows, int begin, int end, int run,
                       PassReport *report) {
    (void)rows, (void)run;                          /* the plan says where each block's entries begin */
    if (end <= begin || !cache->hot_rows) return;
    const int member = cache->member_of[source.id];
    const RowPool pool = row_pool(cache, source);
    const Fetch fetch = {(const uint4 *)host_source_rows(cache, source), (uint4 *)pool.rows, (uint4 *)pool.staging, pool.n_rows,
                         (int)((cache->format.bytes + SECTOR - 1) / SECTOR * SECTOR / sizeof(uint4)),
                         (int)(cache->format.stride / sizeof(uint4)), cache->index_topk};
    if (member) {
        CUDA(cudaEventRecord(beside.asked, gpu.stream));
        CUDA(cudaStreamWaitEvent(beside.stream, beside.asked, 0));
    }
    copy_missing<<<FETCH_BLOCKS, FETCH_THREADS, 0, member ? beside.stream : gpu.stream>>>(fetch, *plan, begin, end, report);
    CUDA(cudaGetLastError());
    if (member) CUDA(cudaEventRecord(beside.fetched[member % LIVE_SOURCES], beside.stream));
}

static void await_rows(const Cache *cache, SourceId source) {
    const int member = cache->member_of[source.id];
    if (member) CUDA(cudaStreamWaitEvent(gpu.stream, beside.fetched[member % LIVE_SOURCES], 0));
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
    begin_kernel();
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
    begin_kernel();
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
    begin_kernel();
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
    begin_kernel();
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
    begin_kernel();
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
    begin_kernel();
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
    begin_kernel();
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
    launch(prepare_blocks, n, WARP, 0, scratch, blocks);
    if (penalised) {
        launch(penalise_rows, busy, ROW_THREADS, 0, scratch, logits, vocab, n_rows, n, samplers);
    }
    launch(find_best, parts, SEGMENT_THREADS, 0, scratch.keys, logits, vocab);
    if (drawn) {
        launch(find_laws, busy, ROW_THREADS, 0, scratch, logits, vocab, n_rows, n, rule, samplers);
    }
    if (drawn && rule == ACCEPT_REJECTION) {
        launch(try_drafts, n, WARP, 0, scratch, logits, vocab, *drafts);
    }
    if (drawn) {
        launch(draw_tokens, parts, SEGMENT_THREADS, 0, scratch, logits, vocab, n, *drafts);
    }
    launch(finish_blocks, n, SEGMENT_THREADS, 0, choices, accepted, scratch, *drafts, rule);
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

/* The CANDIDATES-th best of the keys of a warp's lanes. */
static __device__ uint64_t last_of_best(uint64_t key) {
    int better = 0;
    for (int lane = 0; lane < WARP; lane++) {
        const uint64_t other = __shfl_sync(~0u, (unsigned long long)key, lane);
        better += other > key || (other == key && lane < (int)threadIdx.x % WARP);
    }
    return __shfl_sync(~0u, (unsigned long long)key, __ffs(__ballot_sync(~0u, better == CANDIDATES - 1)) - 1);
}

/* The best CANDIDATES of each segment: grid (SEGMENTS, rows). A first look finds the best of each of the columns that lanes make;
 * the CANDIDATES-th of these bests lies below as many logits, so that a second look has to offer hardly more than the best. */
static __global__ void __launch_bounds__(SEGMENT_THREADS) segment_candidates(uint64_t *keys, const float *logits, int vocab) {
    begin_kernel();
    __shared__ uint64_t shared[SEGMENT_THREADS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, end = segment_begin(blockIdx.x + 1, vocab),
              begin = segment_begin(blockIdx.x, vocab) + 4 * threadIdx.x;
    const float *row = logits + (size_t)blockIdx.y * vocab;
    const bool wide = loads_wide(logits, vocab);
    uint64_t best = 0, kept = 0;
    for (int i = begin; i < end; i += 4 * SEGMENT_THREADS) {
        const float4 x = load_logits(row, i, end, wide);
        best = max(best, token_key(x.x, i));
        if (i + 1 < end) best = max(best, token_key(x.y, i + 1));
        if (i + 2 < end) best = max(best, token_key(x.z, i + 2));
        if (i + 3 < end) best = max(best, token_key(x.w, i + 3));
    }
    shared[threadIdx.x] = best;
    __syncthreads();
    for (int w = 0; w < SEGMENT_THREADS / WARP; w++) best = max(best, shared[w * WARP + lane]);
    const uint64_t least = last_of_best(best);
    __syncthreads();
    for (int first = begin - 4 * lane; first < end; first += 4 * SEGMENT_THREADS) {
        const int i = first + 4 * lane;
        const float4 x = i < end ? load_logits(row, i, end, wide) : make_float4(0, 0, 0, 0);
        const uint64_t key[4] = {i < end ? token_key(x.x, i) : 0, i + 1 < end ? token_key(x.y, i + 1) : 0,
                                 i + 2 < end ? token_key(x.z, i + 2) : 0, i + 3 < end ? token_key(x.w, i + 3) : 0};
        if (!__any_sync(~0u, max(max(key[0], key[1]), max(key[2], key[3])) >= least)) continue;
        for (int u = 0; u < 4; u++) kept = offer_keys(kept, key[u] >= least ? key[u] : 0);
    }
    if (lane < CANDIDATES) shared[warp * CANDIDATES + lane] = kept;
    __syncthreads();
    if (warp) return;
    kept = 0;
    for (int i = lane; i < SEGMENT_THREADS / WARP * CANDIDATES; i += WARP) kept = offer_keys(kept, shared[i]);
    if (lane < CANDIDATES) keys[((size_t)blockIdx.y * SEGMENTS + blockIdx.x) * CANDIDATES + lane] = kept;
}

/* The best of a row's segments, by a warp: a lane has a segment's best in front of it. */
static __global__ void merge_candidates(int *ids, float *values, size_t stride, const uint64_t *keys, const float *logits,
                                        int vocab, const int *target_ids) {
    begin_kernel();
    const int row = blockIdx.x, lane = threadIdx.x, count = min(vocab, (int)CANDIDATES);
    const uint64_t *own = keys + (size_t)row * SEGMENTS * CANDIDATES;
    const uint64_t least = last_of_best(own[lane * CANDIDATES]);
    uint64_t kept = 0;
    for (int i = lane; i < SEGMENTS * CANDIDATES; i += WARP) kept = offer_keys(kept, own[i] >= least ? own[i] : 0);
    const int id = key_token(__shfl_sync(~0u, (unsigned long long)kept, min(lane, count - 1)));
    if (lane >= CANDIDATES) return;
    ids[row * stride + lane] = target_ids ? target_ids[id] : id;
    values[row * stride + lane] = logits[(size_t)row * vocab + id];
}

static_assert((int)SEGMENTS == (int)WARP, "a lane for each segment");

static void candidates(int *ids, float *values, size_t stride, const float *logits, int n, int vocab, const int *target_ids) {
    for (int first = 0, rows; first < n; first += rows) {
        rows = n - first < MAX_PASS_ROWS ? n - first : MAX_PASS_ROWS;
        const float *own = logits + (size_t)first * vocab;
        launch(segment_candidates, dim3(SEGMENTS, rows), SEGMENT_THREADS, 0, scratch.keys, own, vocab);
        launch(merge_candidates, rows, WARP, 0, ids + first * stride, values + first * stride, stride, scratch.keys, own, vocab,
               target_ids);
    }
}

/* Of each segment: the sums of e^below and of e^below * below, for logits that lie that much below the best. */
static __global__ void __launch_bounds__(SEGMENT_THREADS)
    segment_moments(double2 *sums, const float *values, size_t values_stride, const float *logits, int vocab) {
    begin_kernel();
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
    begin_kernel();
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
        launch(segment_moments, dim3(SEGMENTS, rows), SEGMENT_THREADS, 0, scratch.sums, best, values_stride,
               logits + (size_t)first * vocab, vocab);
        launch(write_features, rows, WARP, 0, features + first * stride, stride, best, values_stride, scratch.sums);
    }
}

/* The whole network for one block of drafts: a warp for each output, layers in shared memory. */
static __global__ void __launch_bounds__(PATH_THREADS)
    run_predictor(float *scores, const float *features, LengthPredictor predictor) {
    begin_kernel();
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
    launch(run_predictor, n, PATH_THREADS, 0, scores, features, *predictor);
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

/* Slots [slot, end) of every block, a thread block each: a draft counts as a repeat for those behind it. */
static __global__ void __launch_bounds__(PATH_THREADS)
    draw_slots(Drafts drafts, int slot, int end, const DraftBlock *blocks, AcceptRule rule) {
    begin_kernel();
    __shared__ SlotShared shared;
    load_block(&shared.block, &blocks[blockIdx.x]);
    for (; slot < end; slot++) {
        const size_t at = ((size_t)blockIdx.x * drafts.slots + slot) * CANDIDATES;
        if (threadIdx.x < CANDIDATES)
            shared.ids[threadIdx.x] = drafts.ids[at + threadIdx.x], shared.scores[threadIdx.x] = drafts.scores[at + threadIdx.x];
        __syncthreads();
        find_repeats(&shared, shared.block.position + slot + 1);
        if (threadIdx.x < WARP) draw_slot(&shared, drafts, slot, blockIdx.x, rule);
        __syncthreads();
    }
}

static void draw_drafts(Drafts *drafts, int slot, int end, const DraftBlock *blocks, int n, AcceptRule rule) {
    if (n <= 0 || slot >= end) return;
    launch(draw_slots, n, PATH_THREADS, 0, *drafts, slot, end, blocks, rule);
}

/* The selector's walk of one block: a warp scores each candidate, S(a, b) += <Pred[a] * e, Succ[b]>, then one draws. */
static __global__ void __launch_bounds__(PATH_THREADS)
    walk_path(Drafts drafts, const float *e, Matrix predecessor, Matrix successor, const DraftBlock *blocks, AcceptRule rule) {
    begin_kernel();
    __shared__ SlotShared shared;
    const int candidate = threadIdx.x / WARP, lane = threadIdx.x % WARP, rank = predecessor.cols;
    load_block(&shared.block, &blocks[blockIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) shared.token = shared.block.ids[shared.block.position];
    __syncthreads();
    for (int slot = 0; slot < drafts.slots; slot++) {
        const size_t at = ((size_t)blockIdx.x * drafts.slots + slot) * CANDIDATES + candidate;
        const float *hidden = e + ((size_t)blockIdx.x * drafts.slots + slot) * rank;
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
    launch(walk_path, n, PATH_THREADS, 0, *drafts, e, *predecessor, *successor, blocks, rule);
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
    begin_kernel();
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
    launch(divide_budget, 1, ROW_THREADS, 0, lengths, scores, limits, n, slots, budget, seeded, scratch.keys);
}

/* ---- the list of operations; the last ones but one work on lists in host memory, where the pipeline wants their results at
 * once */

extern "C" const Backend cuda_backend = {
    .name = "cuda",
    .live_sources = LIVE_SOURCES,
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
    .rotate_queries = rotate_queries,
    .norm_heads = norm_heads,
    .locate_rows = locate_rows,
    .store_rows = store_rows,
    .store_latents = store_latents,
    .store_index_keys = store_index_keys,
    .index_select = index_select,
    .resolve = resolve,
    .fetch_rows = fetch_rows,
    .await_rows = await_rows,
    .round_rows = round_rows,
    .hadamard = hadamard,
    .turn_index_queries = turn_index_queries,
    .store_shared_keys = store_shared_keys,
    .mix_streams = mix_streams,
    .locate_groups = locate_groups,
    .see_groups = see_groups,
    .locate_heavy = locate_heavy,
    .compress = compress,
    .pool_groups = pool_groups,
    .select_groups = select_groups,
    .first_stream = first_stream,
    .note_tokens = note_tokens,
    .prefetch_engram = prefetch_engram,
    .read_engram = read_engram,
    .add_engram = add_engram,
    .window_attention = window_attention,
    .grouped_linear = grouped_linear,
    .route_softplus = route_softplus,
    .keep_trails = keep_trails,
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
    .move_rows = move_rows,
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
