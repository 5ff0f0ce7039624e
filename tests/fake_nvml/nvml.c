/* NVML's library for tests: the functions that ftrun calls through the package nvidia-ml-py.
 *
 * The file FAKE_NVML_STATE, written by fake.py, has 64-bit words: the number of devices, whether calls
 * hang, and then DEVICE_WORDS words for each device, as in the enum. Memory belongs to processes. It
 * is used until LATE_MS after the first look at which its process has ended. */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { NUM_DEVICES, HANGS, FIRST_DEVICE };
enum {
    STATUS,          /* of calls with its handle: 0, or an error such as 15, GPU is lost */
    HANDLE_STATUS,   /* of calls for its handle */
    USED, TOTAL, ECC, REASONS, PENDING, FAILED,
    NO_EVENTS,       /* the device knows no events */
    ACTION,          /* the recovery action that the device needs */
    NUM_XIDS, XIDS,  /* written so far; the newest eight */
    LATE_MS = XIDS + 8,
    HOLDERS,         /* of each: its pid, its bytes, when its end was seen */
    MAX_HOLDERS = 8,
    DEVICE_WORDS = HOLDERS + 3 * MAX_HOLDERS
};
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, TIMEOUT = 10, UNKNOWN = 999 };

typedef struct {
    volatile uint64_t *words;
} Device;

typedef struct {
    Device *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} Event;

typedef struct {
    int is_registered[16];
    uint64_t seen[16];
} EventSet;

static volatile uint64_t *state;
static Device devices[16];

static volatile uint64_t *words_of(unsigned int index) {
    return state + FIRST_DEVICE + index * DEVICE_WORDS;
}

static int call(void) {
    while (state != NULL && state[HANGS]) usleep(1000);
    return state == NULL ? UNKNOWN : SUCCESS;
}

static int call_of(Device *device) {
    int status = call();
    return status == SUCCESS ? (int)device->words[STATUS] : status;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    const char *path = getenv("FAKE_NVML_STATE");
    int fd = path == NULL ? -1 : open(path, O_RDWR);
    if (fd < 0) return UNKNOWN;
    void *found = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (found == MAP_FAILED) return UNKNOWN;
    state = found;
    for (unsigned int i = 0; i < 16; i++) devices[i].words = words_of(i);
    return call();
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int status) {
    if (status == 15) return "GPU is lost";
    if (status == 16) return "GPU requires reset";
    return status == TIMEOUT ? "Timeout" : "Error";
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    int status = call();
    if (status == SUCCESS) *count = (unsigned int)state[NUM_DEVICES];
    return status;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) {
    int status = call();
    if (status != SUCCESS) return status;
    if (index >= state[NUM_DEVICES]) return INVALID_ARGUMENT;
    *device = &devices[index];
    return (int)(*device)->words[HANDLE_STATUS];
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    if (strncmp(uuid, "GPU-", 4) != 0) return INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2((unsigned int)atoi(uuid + 4), device);
}

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *memory) {
    int status = call_of(device);
    if (status != SUCCESS) return status;
    uint64_t used = device->words[USED];
    for (int i = 0; i < MAX_HOLDERS; i++) {
        volatile uint64_t *holder = device->words + HOLDERS + 3 * i;
        if (holder[0] == 0) continue;
        int is_alive = kill((pid_t)holder[0], 0) == 0 || errno != ESRCH;
        if (!is_alive && holder[2] == 0) holder[2] = now_ms();
        if (is_alive || now_ms() < holder[2] + device->words[LATE_MS]) used += holder[1];
    }
    memory[0] = device->words[TOTAL];
    memory[2] = used;
    memory[1] = memory[0] - used;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *count) {
    int status = call_of(device);
    if (status != SUCCESS) return status;
    if (device->words[ECC] == UINT64_MAX) return NOT_SUPPORTED;
    *count = type == 1 && counter == 0 ? device->words[ECC] : 0;
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned int *corrected, unsigned int *uncorrected,
                              unsigned int *is_pending, unsigned int *has_failed) {
    int status = call_of(device);
    if (status != SUCCESS) return status;
    *corrected = *uncorrected = 0;
    *is_pending = (unsigned int)device->words[PENDING];
    *has_failed = (unsigned int)device->words[FAILED];
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    int status = call_of(device);
    if (status != SUCCESS) return status;
    if (device->words[REASONS] == UINT64_MAX) return NOT_SUPPORTED;
    *reasons = device->words[REASONS];
    return SUCCESS;
}

#ifndef BEFORE_535
int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksThrottleReasons(device, reasons);
}
#endif

/* Drivers before 570 know no recovery action. */
#ifndef BEFORE_535
enum { RECOVERY_ACTION = 230 };

typedef struct {
    unsigned int field, scope;
    long long timestamp, latency_us;
    int type, status;
    union { double as_double; unsigned int as_int; unsigned long long as_long; } value;
} FieldValue;

int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values) {
    int status = call_of(device);
    if (status != SUCCESS) return status;
    for (int i = 0; i < count; i++) {
        values[i].status = values[i].field == RECOVERY_ACTION ? SUCCESS : NOT_SUPPORTED;
        values[i].value.as_int = (unsigned int)device->words[ACTION];
    }
    return SUCCESS;
}
#endif

int nvmlEventSetCreate(EventSet **set) {
    int status = call();
    if (status == SUCCESS) *set = calloc(1, sizeof(EventSet));
    return status;
}

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    int status = call_of(device);
    if (status != SUCCESS) return status;
    if (device->words[NO_EVENTS] || types != 8) return NOT_SUPPORTED;
    long index = device - devices;
    set->is_registered[index] = 1;
    set->seen[index] = device->words[NUM_XIDS];
    return SUCCESS;
}

int nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned int timeout_ms) {
    int status = call();
    if (status != SUCCESS) return status;
    for (long i = 0; i < (long)state[NUM_DEVICES]; i++) {
        volatile uint64_t *words = devices[i].words;
        if (!set->is_registered[i] || set->seen[i] >= words[NUM_XIDS]) continue;
        memset(event, 0, sizeof *event);
        event->device = &devices[i];
        event->type = 8;
        event->data = words[XIDS + set->seen[i]++ % 8];
        return SUCCESS;
    }
    usleep(timeout_ms * 1000);
    return TIMEOUT;
}
