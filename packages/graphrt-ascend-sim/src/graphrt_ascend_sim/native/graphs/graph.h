// A captured graph, its task groups, and one replay of it.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "device/device.h"

namespace sim {

// The tasks that one stream recorded, and the device streams that they take.
struct CapturePart {
    std::vector<TaskPtr> tasks;
    int entries = 0;     // in the queue of the last device stream
    bool joined = true;  // another part waits for the last task
};

struct TaskGroup {
    Graph* graph = nullptr;
    std::vector<TaskPtr> tasks;
    bool updating = false;
    size_t updated = 0;
    bool allocated = false;  // in the update that is open
};

struct Graph {
    int id = 0;
    Stream* origin = nullptr;
    int mode = 0;
    std::thread::id thread;
    bool capturing = true, invalid = false;
    int open_groups = 0;
    aclError group_error = kOk;  // of the task that broke a task group
    int streams = 1;  // device streams that it holds until it is destroyed
    int records = 0;
    int running = 0;
    std::vector<CapturePart> parts;
    std::map<Stream*, int> part_of;
    std::vector<std::unique_ptr<TaskGroup>> groups;
};

struct GraphRun {
    explicit GraphRun(Graph& of) : graph(of), next(of.parts.size()) {}
    Graph& graph;
    std::vector<size_t> next;  // task of each part
    std::set<int> recorded;    // events of the graph that this replay has passed
};

// The graphs that exist, captured or being captured.
std::set<Graph*>& graphs();

// Takes `stream` into the capture, as another part; an error if the device has no stream left.
aclError join_capture(Graph& graph, Stream& stream);
aclError append_to_capture(Stream& stream, const TaskPtr& task);
aclError append_to_update(Stream& stream, const TaskPtr& task, TaskPtr& update);

// What the host may not do during a capture. None of these refusals breaks the capture: the CANN
// runtime (open source: api_error.cc, context.cc, capture_model_utils.cc) returns before it touches
// it, and a test of torch_npu's says the same of a device (test_aclgraph_rng_state.py).
// A wait for or a query of a captured stream.
aclError check_not_captured(const Stream& stream, const char* what);
// A wait for the device: from any thread and whatever the mode (Context::Synchronize).
aclError check_device_idle_of_captures(const char* what);
// A call that reads or writes device memory at once, where the mode of a capture forbids it.
aclError check_blocking(const char* what, aclError code);

}  // namespace sim
