// Streams, events and graph captures of the fake device. Independent of torch.
//
// Rule 1: the operations of a stream run in their order. In the mode `lazy` an operation runs only
//         when a host thread waits for it or queries it, and in that thread. In `threads` a thread
//         per stream runs them after seeded pauses. In `eager` they run when they are queued.
// Rule 2: an operation is queued with the mark that it waits for. Waiting for a mark of an event
//         that was never recorded has no effect.
// Rule 3: a wait or a query of the host, in any thread, ends every capture that is in progress in
//         the global mode, and fails.
// Rule 4: an error of an operation is permanent: every later use of the device fails with it.
// Rule 5: a process that was forked after the first use cannot use the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <vector>

namespace fake {

constexpr int NUM_DEVICES = 2;

enum class Mode : int { eager = 0, lazy = 1, threads = 2 };
enum class CaptureMode : int { global = 0, of_thread = 1, relaxed = 2 };

using Work = std::function<void()>;
using SharedWork = std::shared_ptr<const Work>;

struct Stream;
struct Capture;

struct StreamId {
  int device;
  int64_t number;  // 0: the default stream
};

// A position in a stream, or in a capture.
struct Mark {
  Stream* stream = nullptr;  // null: reached
  uint64_t position = 0;
  std::shared_ptr<double> reached_ms;
  std::shared_ptr<Capture> capture;
};

using Event = Mark;

void set_mode(Mode mode, uint64_t seed, unsigned max_pause_us);
void on_thread_start(Work work);
bool is_initialised();
bool is_forked();
void require_device();  // initialises; throws after a fork or an error

int current_device();
void set_current_device(int device);
StreamId current_stream(int device);
StreamId exchange_stream(StreamId stream);
StreamId new_stream(int device);
Stream& find(StreamId id);
StreamId id_of(const Stream& stream);

void enqueue(StreamId stream, Work work);
Mark end_of(StreamId stream);
Mark record(StreamId stream);
void wait_in_stream(StreamId stream, const Mark& mark);
void wait_on_host(const Mark& mark);
bool query(const Mark& mark);
bool is_reached(const Mark& mark);  // for the allocator: runs nothing and ends no capture
void synchronize_device(int device);
uint64_t num_pending();
void shut_down();

// A recorded sequence of operations, and the identity of its memory.
struct Capture {
  std::vector<SharedWork> operations;
  std::set<Stream*> streams;
  CaptureMode mode = CaptureMode::global;
  uint64_t thread = 0;
  bool is_open = true;
  bool is_invalid = false;
};

std::shared_ptr<Capture> capture_of(StreamId stream);  // null: the stream runs
std::shared_ptr<Capture> begin_capture(StreamId stream, CaptureMode mode);
void end_capture(StreamId stream, const std::shared_ptr<Capture>& capture);
void replay(const Capture& capture, StreamId stream, const std::function<Work(SharedWork)>& wrap);

}  // namespace fake
