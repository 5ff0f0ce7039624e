#include "streams.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace fake {

struct Operation {
  SharedWork work;
  Mark after;
};

struct Stream {
  StreamId id;
  std::deque<Operation> queue;
  uint64_t num_queued = 0;
  uint64_t num_completed = 0;
  std::shared_ptr<Capture> capture;
  std::thread thread;
};

namespace {

constexpr size_t ALL = std::numeric_limits<size_t>::max();

std::mutex state_lock;               // streams, captures, mode, error
std::condition_variable progressed;  // an operation has completed, was queued, or all must end
std::mutex running_lock;             // lazy: held by the thread that runs operations
std::array<std::deque<std::unique_ptr<Stream>>, NUM_DEVICES> streams;
std::vector<std::shared_ptr<Capture>> open_captures;
Mode mode = Mode::lazy;
uint64_t pause_seed = 1;
unsigned pause_limit_us = 0;
Work thread_start;
std::string error_text;
bool is_ending = false;
std::atomic<bool> initialised = false;
std::atomic<bool> forked = false;

thread_local int device_of_thread = 0;
thread_local std::array<int64_t, NUM_DEVICES> streams_of_thread = {};

uint64_t thread_number() {
  return std::hash<std::thread::id>()(std::this_thread::get_id());
}

double now_ms() {
  auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since_start).count();
}

// The functions below that take no lock need state_lock, if their name ends in `_locked`.

void require_locked() {
  if (!error_text.empty()) throw std::runtime_error("fake device: an operation failed: " + error_text);
  if (initialised) return;
  for (int device = 0; device < NUM_DEVICES; ++device) {
    streams[device].push_back(std::make_unique<Stream>());
    streams[device].back()->id = {device, 0};
  }
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  initialised = true;
}

void refuse_after_fork() {
  if (forked) throw std::runtime_error("fake device: cannot be used in a forked process");
}

Stream& stream_locked(StreamId id) {
  require_locked();
  return *streams.at(id.device).at(id.number);
}

bool is_reached_locked(const Mark& mark) {
  return mark.stream == nullptr || mark.stream->num_completed >= mark.position;
}

void refuse_in_capture_locked() {
  bool is_refused = false;
  for (auto& capture : open_captures) {
    bool is_other = capture->mode == CaptureMode::of_thread && capture->thread != thread_number();
    if (is_other || capture->mode == CaptureMode::relaxed) continue;
    capture->is_invalid = is_refused = true;
  }
  if (is_refused)
    throw std::runtime_error("fake device: not permitted while a stream is being captured");
}

void run(const SharedWork& work) {
  if (!work) return;
  try {
    (*work)();
  } catch (const std::exception& error) {
    std::lock_guard guard(state_lock);
    if (error_text.empty()) error_text = error.what();
  }
}

void complete_locked(Stream& stream) {
  ++stream.num_completed;
  progressed.notify_all();
}

// Runs what the goal needs, in the calling thread, which holds running_lock. Iterative, because a
// chain of waits between two streams can be longer than a call stack.
void run_until(const Mark& goal, size_t max_operations) {
  std::vector<Mark> goals{goal};
  while (!goals.empty() && max_operations > 0) {
    Operation next;
    auto& stream = *goals.back().stream;
    {
      std::lock_guard guard(state_lock);
      if (is_reached_locked(goals.back())) {
        goals.pop_back();
        continue;
      }
      if (!is_reached_locked(stream.queue.front().after)) {
        goals.push_back(stream.queue.front().after);
        continue;
      }
      next = std::move(stream.queue.front());
      stream.queue.pop_front();
    }
    run(next.work);
    next = {};  // may free memory, which takes locks
    std::lock_guard guard(state_lock);
    complete_locked(stream);
    --max_operations;
  }
}

void reach(const Mark& mark) {
  if (mode == Mode::lazy) {
    std::lock_guard running(running_lock);
    run_until(mark, ALL);
    return;
  }
  std::unique_lock guard(state_lock);
  progressed.wait(guard, [&] { return is_reached_locked(mark) || is_ending; });
}

unsigned pause_of(const Stream& stream, uint64_t position) {
  if (pause_limit_us == 0) return 0;
  uint64_t mixed = pause_seed * 0x9E3779B97F4A7C15u + stream.id.number * 0xC2B2AE3D27D4EB4Fu + position;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  return unsigned((mixed >> 32) % pause_limit_us);
}

void run_stream(Stream* stream) {
  if (thread_start) thread_start();
  std::unique_lock guard(state_lock);
  while (true) {
    progressed.wait(guard, [&] {
      return is_ending || (mode == Mode::threads && !stream->queue.empty() &&
                           is_reached_locked(stream->queue.front().after));
    });
    if (is_ending) return;
    auto next = std::move(stream->queue.front());
    stream->queue.pop_front();
    auto pause_us = pause_of(*stream, stream->num_completed);
    guard.unlock();
    if (pause_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
    run(next.work);
    next = {};
    guard.lock();
    complete_locked(*stream);
  }
}

void put(StreamId id, SharedWork work, Mark after = {}) {
  refuse_after_fork();
  std::unique_lock guard(state_lock);
  auto& stream = stream_locked(id);
  if (stream.capture) {
    stream.capture->operations.push_back(std::move(work));
    return;
  }
  ++stream.num_queued;
  if (mode == Mode::eager) {  // marks of this mode are reached when they are made
    guard.unlock();
    run(work);
    guard.lock();
    complete_locked(stream);
    return;
  }
  stream.queue.push_back({std::move(work), std::move(after)});
  if (mode == Mode::threads && !stream.thread.joinable())
    stream.thread = std::thread(run_stream, &stream);
  progressed.notify_all();
}

}  // namespace

void set_mode(Mode wanted, uint64_t seed, unsigned max_pause_us) {
  if (initialised && !forked)
    for (int device = 0; device < NUM_DEVICES; ++device) synchronize_device(device);
  std::lock_guard guard(state_lock);
  mode = wanted;
  pause_seed = seed;
  pause_limit_us = max_pause_us;
}

void on_thread_start(Work work) { thread_start = std::move(work); }
bool is_initialised() { return initialised; }
bool is_forked() { return forked; }

void require_device() {
  refuse_after_fork();
  std::lock_guard guard(state_lock);
  require_locked();
}

int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }
StreamId current_stream(int device) { return {device, streams_of_thread.at(device)}; }

StreamId exchange_stream(StreamId stream) {
  return {stream.device, std::exchange(streams_of_thread.at(stream.device), stream.number)};
}

StreamId new_stream(int device) {
  refuse_after_fork();
  std::lock_guard guard(state_lock);
  require_locked();
  auto& found = streams.at(device);
  found.push_back(std::make_unique<Stream>());
  return found.back()->id = {device, int64_t(found.size()) - 1};
}

Stream& find(StreamId id) {
  refuse_after_fork();
  std::lock_guard guard(state_lock);
  return stream_locked(id);
}

StreamId id_of(const Stream& stream) { return stream.id; }

void enqueue(StreamId stream, Work work) {
  put(stream, std::make_shared<const Work>(std::move(work)));
}

Mark end_of(StreamId id) {
  refuse_after_fork();
  std::lock_guard guard(state_lock);
  auto& stream = stream_locked(id);
  return {&stream, stream.num_queued, nullptr, stream.capture};
}

Mark record(StreamId stream) {
  auto reached_ms = std::make_shared<double>(0.0);
  if (!capture_of(stream)) enqueue(stream, [reached_ms] { *reached_ms = now_ms(); });
  auto mark = end_of(stream);
  mark.reached_ms = std::move(reached_ms);
  return mark;
}

void wait_in_stream(StreamId id, const Mark& mark) {
  refuse_after_fork();
  if (mark.stream == nullptr) return;
  {
    std::lock_guard guard(state_lock);
    auto& stream = stream_locked(id);
    if (mark.capture && !mark.capture->is_open)
      throw std::runtime_error("fake device: the event was recorded in a capture that has ended");
    if (stream.capture && stream.capture != mark.capture) {
      stream.capture->is_invalid = true;
      throw std::runtime_error("fake device: a captured stream cannot wait for uncaptured work");
    }
    if (mark.capture) {  // the stream takes part in the capture; its list keeps the order
      stream.capture = mark.capture;
      mark.capture->streams.insert(&stream);
      return;
    }
  }
  put(id, nullptr, mark);
}

void wait_on_host(const Mark& mark) {
  refuse_after_fork();
  {
    std::lock_guard guard(state_lock);
    require_locked();
    refuse_in_capture_locked();
  }
  if (mark.stream != nullptr) reach(mark);
  require_device();
}

bool query(const Mark& mark) {
  refuse_after_fork();
  {
    std::lock_guard guard(state_lock);
    require_locked();
    refuse_in_capture_locked();
  }
  // A thread that queries repeatedly gets an answer: each query runs one operation. It does not wait
  // for another thread, because Python calls it with its lock.
  if (std::unique_lock running(running_lock, std::try_to_lock);
      mode == Mode::lazy && running && mark.stream != nullptr)
    run_until(mark, 1);
  std::lock_guard guard(state_lock);
  return is_reached_locked(mark);
}

bool is_reached(const Mark& mark) {
  std::lock_guard guard(state_lock);
  return is_reached_locked(mark);
}

void synchronize_device(int device) {
  refuse_after_fork();
  std::vector<Mark> ends;
  {
    std::lock_guard guard(state_lock);
    require_locked();
    for (auto& stream : streams.at(device)) ends.push_back({stream.get(), stream->num_queued, {}, {}});
  }
  for (auto& end : ends) wait_on_host(end);
}

uint64_t num_pending() {
  std::lock_guard guard(state_lock);
  uint64_t found = 0;
  for (auto& of_device : streams)
    for (auto& stream : of_device) found += stream->num_queued - stream->num_completed;
  return found;
}

void shut_down() {
  if (!initialised || forked) return;
  {
    std::lock_guard guard(state_lock);
    is_ending = true;
    progressed.notify_all();
  }
  for (auto& of_device : streams)
    for (auto& stream : of_device)
      if (stream->thread.joinable()) stream->thread.join();
}

std::shared_ptr<Capture> capture_of(StreamId id) {
  if (!initialised) return nullptr;
  refuse_after_fork();
  std::lock_guard guard(state_lock);
  return stream_locked(id).capture;
}

std::shared_ptr<Capture> begin_capture(StreamId id, CaptureMode capture_mode) {
  refuse_after_fork();
  std::lock_guard guard(state_lock);
  auto& stream = stream_locked(id);
  if (id.number == 0) throw std::runtime_error("fake device: the default stream cannot be captured");
  if (stream.capture) throw std::runtime_error("fake device: the stream is being captured");
  auto made = std::make_shared<Capture>();
  made->mode = capture_mode;
  made->thread = thread_number();
  made->streams.insert(&stream);
  stream.capture = made;
  open_captures.push_back(made);
  return made;
}

void end_capture(StreamId id, const std::shared_ptr<Capture>& capture) {
  refuse_after_fork();
  std::lock_guard guard(state_lock);
  if (stream_locked(id).capture != capture || !capture)
    throw std::runtime_error("fake device: the current stream is not captured by this graph");
  for (auto* stream : capture->streams) stream->capture = nullptr;
  capture->is_open = false;
  std::erase(open_captures, capture);
  if (!capture->is_invalid) return;
  capture->operations.clear();
  throw std::runtime_error("fake device: the capture was ended by a wait or a query");
}

void replay(const Capture& capture, StreamId stream, const std::function<Work(SharedWork)>& wrap) {
  if (capture_of(stream)) throw std::runtime_error("fake device: a graph cannot replay in a capture");
  if (capture.is_open || capture.is_invalid)
    throw std::runtime_error("fake device: the graph has no complete capture");
  for (auto& operation : capture.operations) enqueue(stream, wrap(operation));
}

}  // namespace fake
