// Shared by the files that make the fake device known to torch.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "memory.h"
#include "streams.h"

namespace fake {

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;

inline int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}
inline c10::Device torch_device(int index) { return {DEVICE_TYPE, c10::DeviceIndex(index)}; }

c10::Allocator& device_allocator();

// A seed and an offset. An operator takes its place in the sequence when it is called; the operators
// of a graph take theirs from the offset at the replay.
struct RandomState {
  uint64_t seed = 0;
  uint64_t offset = 0;
};
RandomState& default_random_state(int device);
RandomState* random_state_of(const at::Generator& generator);  // null: of another device

// What an operator needs to draw the same numbers whenever it runs.
struct Draw {
  RandomState taken;
  bool is_captured = false;
  uint64_t seed() const;
};
Draw draw_from(RandomState& state, int device);

}  // namespace fake
