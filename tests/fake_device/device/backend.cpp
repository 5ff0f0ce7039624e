// Allocators, guard, hooks, random states and graphs of the fake device, as torch sees them.
#include "backend.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define FAKE_DEVICE_HAS_GRAPH_IMPL 1
#endif

#include <array>
#include <atomic>
#include <cstring>
#include <vector>

namespace fake {
namespace {

// As in CUDA: to make a device the current one creates a context there, except on the way back.
std::array<std::atomic<bool>, NUM_DEVICES> contexts{};

void make_current(int device) {
  contexts.at(device) = true;
  set_current_device(device);
}
void make_current_again(int device) { set_current_device(device); }

// What torch's guard of CUDA does around an operation of another device.
struct Switch {
  int before = current_device();
  explicit Switch(int device) { make_current(device); }
  ~Switch() { make_current(before); }
};

c10::Stream torch_stream(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, torch_device(id.device), id.number);
}
StreamId stream_id(const c10::Stream& stream) { return {index_of(stream.device()), stream.id()}; }

// --- memory -------------------------------------------------------------------------------------

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    auto device = current_device();
    void* found = nullptr;
    try {
      if (num_bytes > 0) found = fake::allocate(num_bytes, device);
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
    return {found, found, &release, torch_device(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    auto *target = backing(to), *source = backing(from);
    enqueue(current_stream(device_of(to)), [=] { std::memcpy(target, source, num_bytes); });
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    auto* found = allocate_pinned(num_bytes);
    return {found, found, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;

// --- streams and events -------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE_TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }

  c10::Device getDevice() const override { return torch_device(current_device()); }
  void setDevice(c10::Device device) const override { make_current(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    make_current_again(index_of(device));
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (device != before) setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return torch_stream(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return torch_stream({index_of(device), 0});
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return torch_stream(new_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*is_high*/) const override {
    return torch_stream(new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return torch_stream(exchange_stream(stream_id(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return query(end_of(stream_id(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_on_host(end_of(stream_id(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Switch there(device < 0 ? current_device() : device);
    synchronize_device(current_device());
  }
  bool isStreamCapturing(const c10::Stream& stream) const {  // overrides from torch 2.12
    return capture_of(stream_id(stream)) != nullptr;
  }

  static Event event_of(void* event) { return event ? *static_cast<Event*>(event) : Event{}; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Switch there(index_of(stream.device()));
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = fake::record(stream_id(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Switch there(index_of(stream.device()));
    wait_in_stream(stream_id(stream), event_of(event));
  }
  bool queryEvent(void* event) const override { return query(event_of(event)); }
  void synchronizeEvent(void* event) const override { wait_on_host(event_of(event)); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto begin = event_of(first), end = event_of(second);
    TORCH_CHECK(begin.reached_ms && end.reached_ms, "fake device: an event was not recorded");
    return *end.reached_ms - *begin.reached_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_in_stream(data.get(), stream_id(stream));
  }
};

// --- random numbers -----------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  RandomState state{c10::default_rng_seed_val, 0};

  explicit Generator(int device)
      : GeneratorImpl(torch_device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { state = {seed, 0}; }
  uint64_t current_seed() const override { return state.seed; }
  void set_offset(uint64_t offset) override { state.offset = offset; }
  uint64_t get_offset() const override { return state.offset; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state.seed;
  }
  void set_state(const c10::TensorImpl& bytes) override {
    TORCH_CHECK(bytes.numel() == sizeof(state), "fake device: a random state has 16 bytes");
    std::memcpy(&state, bytes.data(), sizeof(state));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::detail::empty_cpu({sizeof(state)}, at::kByte, {}, {}, {}, {});
    std::memcpy(bytes.mutable_data_ptr(), &state, sizeof(state));
    return bytes.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device_.index());
    made->state = state;
    return made;
  }
};

const at::Generator& default_generator(int device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < NUM_DEVICES; ++index)
      made->push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return all->at(device);
}

thread_local RandomState replayed;  // where the draws of the replay in progress begin

// --- hooks --------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  static int device_or_current(c10::DeviceIndex device) {
    return device < 0 ? current_device() : device;
  }
  void init() const override { require_device(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialised(); }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { make_current(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device != before) make_current(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device >= 0) make_current_again(device);
    return before;
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  at::Device getDeviceFromPtr(void* data) const override { return torch_device(device_of(data)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device_or_current(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device_or_current(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto* resized = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(resized->device());
    auto made = the_device_allocator.allocate(num_bytes);
    if (auto kept = std::min(resized->nbytes(), num_bytes); kept > 0)
      the_device_allocator.copy_data(made.get(), resized->data(), kept);
    resized->set_data_ptr_noswap(std::move(made));
    resized->set_nbytes(num_bytes);
  }
};

// --- graphs -------------------------------------------------------------------------------------

struct Graph {
  std::shared_ptr<Capture> capture;
  RandomState first;
  uint64_t num_draws = 0;

  void begin(CaptureMode mode) {
    auto device = current_device();
    capture = begin_capture(current_stream(device), mode);
    first = default_random_state(device);
  }
  void end() {
    auto device = current_device();
    auto& state = default_random_state(device);
    num_draws = state.offset - first.offset;
    state.offset = first.offset;  // a capture draws nothing
    end_capture(current_stream(device), capture);
  }
  void replay() const {
    TORCH_CHECK(capture, "fake device: the graph has no complete capture");
    auto device = current_device();
    auto& state = default_random_state(device);
    // The draws of a captured operator count from `first`.
    RandomState base{state.seed, state.offset - first.offset};
    fake::replay(*capture, current_stream(device), [base](SharedWork work) {
      return [base, work] {
        replayed = base;
        (*work)();
      };
    });
    state.offset += num_draws;
  }
};

#ifdef FAKE_DEVICE_HAS_GRAPH_IMPL
struct TorchGraph final : at::GraphImplInterface {
  explicit TorchGraph(const at::GraphImplArgs&) {}
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode mode) override {
    graph_.begin(mode == at::GraphCaptureMode::Relaxed       ? CaptureMode::relaxed
                 : mode == at::GraphCaptureMode::ThreadLocal ? CaptureMode::of_thread
                                                             : CaptureMode::global);
  }
  void capture_end() override { graph_.end(); }
  void instantiate() override {}
  void replay() override { graph_.replay(); }
  void reset() override { graph_ = {}; }
  at::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  Graph graph_;
};
#endif

const bool registered = [] {
  c10::SetAllocator(DEVICE_TYPE, &the_device_allocator);
  static c10::impl::DeviceGuardImplRegistrar guard(DEVICE_TYPE, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
#ifdef FAKE_DEVICE_HAS_GRAPH_IMPL
  at::GraphImplRegistry()->Register(
      c10::DeviceTypeName(DEVICE_TYPE, /*lower_case=*/false),
      [](at::GraphImplArgs args) -> std::unique_ptr<at::GraphImplInterface> {
        return std::make_unique<TorchGraph>(args);
      });
#endif
  on_thread_start([] { at::init_num_threads(); });
  return true;
}();

}  // namespace

c10::Allocator& device_allocator() { return the_device_allocator; }

RandomState* random_state_of(const at::Generator& generator) {
  auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  return ours ? &ours->state : nullptr;
}

RandomState& default_random_state(int device) { return *random_state_of(default_generator(device)); }

Draw draw_from(RandomState& state, int device) {
  Draw made{state, capture_of(current_stream(device)) != nullptr};
  ++state.offset;
  return made;
}

uint64_t Draw::seed() const {
  auto from = is_captured ? RandomState{replayed.seed, replayed.offset + taken.offset} : taken;
  auto mixed = from.seed ^ (from.offset + 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
  return (mixed ^ (mixed >> 31)) * 0x94D049BB133111EBu;
}

namespace {

// The message of an exception, for callers that are not C++; empty: none was thrown.
thread_local std::string last_error;

template <typename Call>
int guarded(Call call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

}  // namespace

}  // namespace fake

extern "C" {
const char* fake_last_error() { return fake::last_error.c_str(); }
int fake_set_mode(int mode, uint64_t seed, unsigned max_pause_us) {
  return fake::guarded([&] { fake::set_mode(fake::Mode(mode), seed, max_pause_us); });
}
uint64_t fake_num_pending() { return fake::num_pending(); }
uint64_t fake_bytes_in_use(int device) { return fake::bytes_in_use(device); }
void fake_set_pinned_limit(uint64_t bytes) { fake::set_pinned_limit(bytes); }
uint64_t fake_memory_limit(int device) { return fake::memory_limit(device); }
void fake_set_memory_limit(int device, uint64_t bytes) { fake::set_memory_limit(device, bytes); }
int fake_has_context(int device) { return fake::contexts.at(device); }
void fake_forget_contexts() {
  for (auto& one : fake::contexts) one = false;
}
int fake_is_initialised() { return fake::is_initialised(); }
int fake_is_forked() { return fake::is_forked(); }
int fake_num_devices() { return fake::NUM_DEVICES; }
void fake_shut_down() { fake::shut_down(); }
uint64_t fake_backing(uint64_t address) {
  return uint64_t(fake::backing(reinterpret_cast<void*>(address)));
}
int fake_is_capturing() {
  return fake::capture_of(fake::current_stream(fake::current_device())) != nullptr;
}
int fake_get_random_state(int device, uint64_t* state) {
  return fake::guarded([&] {
    auto& from = fake::default_random_state(device);
    state[0] = from.seed, state[1] = from.offset;
  });
}
int fake_set_random_state(int device, uint64_t seed, uint64_t offset) {
  return fake::guarded([&] { fake::default_random_state(device) = {seed, offset}; });
}
// Calls the function when the current stream reaches it; a result other than 0 is an error.
int fake_call_in_stream(int device, int (*function)(uint64_t), uint64_t argument) {
  return fake::guarded([&] {
    fake::enqueue(fake::current_stream(device), [=] {
      if (function(argument) != 0) throw std::runtime_error("a function of the host failed");
    });
  });
}
void* fake_graph_new() { return new fake::Graph; }
void fake_graph_delete(void* graph) { delete static_cast<fake::Graph*>(graph); }
int fake_graph_begin(void* graph, int mode) {
  return fake::guarded([&] { static_cast<fake::Graph*>(graph)->begin(fake::CaptureMode(mode)); });
}
int fake_graph_end(void* graph) {
  return fake::guarded([&] { static_cast<fake::Graph*>(graph)->end(); });
}
int fake_graph_replay(void* graph) {
  return fake::guarded([&] { static_cast<fake::Graph*>(graph)->replay(); });
}
}
