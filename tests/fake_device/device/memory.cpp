#include "memory.h"

#include <sys/mman.h>

#include <array>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace fake {
namespace {

constexpr size_t SPACE_BYTES = size_t(1) << 36;
constexpr size_t ALIGNMENT = 512;
constexpr int NEW_BYTE = 0xCD;
constexpr int FREED_BYTE = 0xDB;

struct Block {
  size_t num_bytes = 0;
  StreamId owner{};
  std::shared_ptr<Capture> graph;
  std::set<Stream*> users;
};

struct Released {
  void* address;
  Block block;
  std::vector<Mark> uses;
};

using Key = std::pair<const void*, size_t>;  // stream or capture, and size

struct Space {
  char* shown = nullptr;
  char* backed = nullptr;
  size_t top = 0;
  size_t in_use = 0;
  size_t limit = size_t(16) << 30;
  std::map<Key, std::vector<void*>> unused;
};

struct Pinned {
  size_t num_bytes = 0;
  int num_holds = 0;
  bool is_released = false;
};

std::mutex memory_lock;  // taken before the locks of streams.cpp, never after
std::array<Space, NUM_DEVICES> spaces;
std::map<const char*, Block> blocks;
std::list<Released> waiting;  // released, and not reusable yet
std::mutex pinned_lock;
std::map<const char*, Pinned> pinned;
size_t pinned_limit = SIZE_MAX;
thread_local bool was_refused = false;

char* map_space(int protection) {
  auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  auto* found = mmap(nullptr, SPACE_BYTES, protection, flags, -1, 0);
  if (found == MAP_FAILED) throw OutOfMemory("fake device: no address space");
  return static_cast<char*>(found);
}

template <typename Map>
auto containing(Map& map, const void* address) {
  auto at = static_cast<const char*>(address);
  auto found = map.upper_bound(at);
  if (found == map.begin()) return map.end();
  --found;
  return at < found->first + found->second.num_bytes ? found : map.end();
}

void make_reusable(void* address, const Block& block) {
  auto* target = backing(address);
  auto num_bytes = block.num_bytes;
  enqueue(block.owner, [=] { std::memset(target, FREED_BYTE, num_bytes); });
  const void* pool = block.graph ? static_cast<const void*>(block.graph.get()) : &find(block.owner);
  spaces[block.owner.device].unused[{pool, num_bytes}].push_back(address);
}

bool is_free(const Released& one) {
  // An overwrite that is captured would run again in each replay.
  if (capture_of(one.block.owner)) return false;
  for (auto& use : one.uses)
    if (!is_reached(use)) return false;
  return true;
}

void collect_released() {
  for (auto one = waiting.begin(); one != waiting.end();) {
    if (is_free(*one)) {
      make_reusable(one->address, one->block);
      one = waiting.erase(one);
    } else {
      ++one;
    }
  }
}

}  // namespace

void* allocate(size_t num_bytes, int device) {
  require_device();
  auto stream = current_stream(device);
  auto graph = capture_of(stream);
  auto size = (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  std::lock_guard guard(memory_lock);
  collect_released();
  auto& space = spaces.at(device);
  if (space.shown == nullptr) {
    space.shown = map_space(PROT_NONE);
    space.backed = map_space(PROT_READ | PROT_WRITE);
  }
  if (space.in_use + size > space.limit)
    throw OutOfMemory("fake device: out of memory: " + std::to_string(size) + " bytes requested, " +
                      std::to_string(space.limit - space.in_use) + " of " +
                      std::to_string(space.limit) + " bytes free");
  const void* pool = graph ? static_cast<const void*>(graph.get()) : &find(stream);
  auto& unused = space.unused[{pool, size}];
  void* address = nullptr;
  if (!unused.empty()) {
    address = unused.back();
    unused.pop_back();
  } else {
    if (space.top + size > SPACE_BYTES) throw OutOfMemory("fake device: no addresses are left");
    address = space.shown + space.top;
    std::memset(space.backed + space.top, NEW_BYTE, size);
    space.top += size;
  }
  space.in_use += size;
  blocks[static_cast<char*>(address)] = {size, stream, graph, {}};
  return address;
}

void release(void* address) {
  if (address == nullptr || is_forked()) return;
  std::lock_guard guard(memory_lock);
  auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end()) return;
  auto block = std::move(found->second);
  blocks.erase(found);
  spaces[block.owner.device].in_use -= block.num_bytes;
  if (block.graph) {
    if (block.graph->is_open) make_reusable(address, block);
    return;
  }
  std::vector<Mark> uses;
  for (auto* stream : block.users) uses.push_back(end_of(id_of(*stream)));
  waiting.push_back({address, std::move(block), std::move(uses)});
  collect_released();
}

void use_in_stream(const void* address, StreamId stream) {
  std::lock_guard guard(memory_lock);
  auto found = containing(blocks, address);
  bool is_owner = found == blocks.end() || found->second.owner.number == stream.number;
  if (!is_owner) found->second.users.insert(&find(stream));
}

int device_of(const void* address) {
  auto at = static_cast<const char*>(address);
  for (int device = 0; device < NUM_DEVICES; ++device) {
    auto* shown = spaces[device].shown;
    if (shown != nullptr && at >= shown && at < shown + SPACE_BYTES) return device;
  }
  return -1;
}

void* backing(const void* address) {
  auto device = device_of(address);
  auto* at = static_cast<char*>(const_cast<void*>(address));
  return device < 0 ? at : spaces[device].backed + (at - spaces[device].shown);
}

size_t bytes_in_use(int device) {
  std::lock_guard guard(memory_lock);
  return spaces.at(device).in_use;
}

size_t memory_limit(int device) {
  std::lock_guard guard(memory_lock);
  return spaces.at(device).limit;
}

void set_memory_limit(int device, size_t num_bytes) {
  std::lock_guard guard(memory_lock);
  spaces.at(device).limit = num_bytes;
}

void set_pinned_limit(size_t num_bytes) {
  std::lock_guard guard(pinned_lock);
  pinned_limit = num_bytes;
}

void* allocate_pinned(size_t num_bytes) {
  require_device();
  {
    std::lock_guard guard(pinned_lock);
    auto used = num_bytes;
    for (const auto& [start, one] : pinned) used += one.num_bytes;
    if (used > pinned_limit) {
      was_refused = true;
      throw OutOfMemory("fake device: out of memory, no more pinned memory is allowed");
    }
  }
  auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
  auto size = num_bytes > 0 ? num_bytes : 1;
  auto* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (found == MAP_FAILED) throw OutOfMemory("fake device: no pinned memory");
  std::lock_guard guard(pinned_lock);
  pinned[static_cast<char*>(found)] = {size, 0, false};
  return found;
}

bool take_refusal() { return std::exchange(was_refused, false); }

namespace {

void unmap_if_unused(std::map<const char*, Pinned>::iterator found) {  // needs pinned_lock
  if (!found->second.is_released || found->second.num_holds > 0) return;
  munmap(const_cast<char*>(found->first), found->second.num_bytes);
  pinned.erase(found);
}

}  // namespace

void release_pinned(void* address) {
  if (is_forked()) return;
  std::lock_guard guard(pinned_lock);
  auto found = pinned.find(static_cast<char*>(address));
  if (found == pinned.end()) return;
  found->second.is_released = true;
  unmap_if_unused(found);
}

bool is_pinned(const void* address) {
  if (is_forked()) return false;
  std::lock_guard guard(pinned_lock);
  return containing(pinned, address) != pinned.end();
}

std::shared_ptr<void> hold_pinned(const void* address) {
  std::lock_guard guard(pinned_lock);
  auto found = containing(pinned, address);
  if (found == pinned.end()) return nullptr;
  ++found->second.num_holds;
  auto* start = const_cast<char*>(found->first);
  return {start, [](void* held) {
            std::lock_guard guard(pinned_lock);
            auto found = pinned.find(static_cast<char*>(held));
            --found->second.num_holds;
            unmap_if_unused(found);
          }};
}

}  // namespace fake
