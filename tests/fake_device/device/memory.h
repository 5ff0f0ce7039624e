// Memory of the fake device. Independent of torch.
//
// Rule 1: addresses that tensors show have no pages, so any access of the host is a SIGSEGV. The
//         device uses a second mapping (`backing`).
// Rule 2: freed memory is reused at once by the stream that allocated it, and overwritten in that
//         stream's order. Only streams that `use_in_stream` names are awaited.
// Rule 3: memory allocated in a capture belongs to its graph, and is not reused by others.
// Rule 4: freed pinned memory is unmapped when the copies that were queued with it have run.
// Rule 5: the next kernel that a thread launches after a refused allocation of pinned memory fails,
//         as with CUDA, which keeps the last error of each thread.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>

#include "streams.h"

namespace fake {

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void* allocate(size_t num_bytes, int device);
void release(void* address);
void use_in_stream(const void* address, StreamId stream);
int device_of(const void* address);  // -1: memory of the host
void* backing(const void* address);

size_t bytes_in_use(int device);
size_t memory_limit(int device);
void set_memory_limit(int device, size_t num_bytes);

void* allocate_pinned(size_t num_bytes);
bool take_refusal();  // whether this thread has one that no kernel has reported
void set_pinned_limit(size_t num_bytes);  // of all pinned memory together, as RLIMIT_MEMLOCK
void release_pinned(void* address);
bool is_pinned(const void* address);
std::shared_ptr<void> hold_pinned(const void* address);  // released: the memory may be unmapped

}  // namespace fake
