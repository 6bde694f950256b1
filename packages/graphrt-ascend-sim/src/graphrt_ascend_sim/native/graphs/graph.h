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

// A condition, as the task of a graph that looks at it: if-nodes and switches.
struct Condition {
    enum Type { kIf = 0, kWhile = 1, kSwitch = 2 };
    Graph* graph = nullptr;
    std::unique_ptr<uint64_t> value = std::make_unique<uint64_t>(0);  // eight bytes of the device's
    uint64_t initial = 0;
    bool initialised = false;  // with `initial`, whenever its graph is replayed
    Type type = kIf;
    std::vector<Graph*> branches;

    Graph* chosen() const;  // null: none is run
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
    Graph* parent = nullptr;  // set: it is a branch of one of that graph's conditions
    bool begun = true;        // of a branch: whether its capture has begun
    std::vector<std::unique_ptr<Condition>> conditions;

    std::vector<Graph*> branches() const;  // of all its conditions, and of theirs
    int queues() const;                    // that a replay takes, with those of its branches
};

struct GraphRun {
    explicit GraphRun(Graph& of) : graph(of), next(of.parts.size()), branch(of.parts.size()) {}
    Graph& graph;
    std::vector<size_t> next;  // task of each part
    std::set<int> recorded;    // events of the graph that this replay has passed
    std::vector<std::unique_ptr<GraphRun>> branch;  // that the task of a part runs

    void begin_branch(size_t part, const Condition& condition);
    bool finished();  // also goes on behind branches that have ended
};

// Gives conditions their initial values.
void begin_replay(Graph& graph);
void destroy_graph(Graph* graph);
void end_capture(Graph& graph);
// With software queues a graph takes none of the device's streams before it runs.
bool take_stream();
aclError begin_capture(Graph* graph, Stream& stream, int mode);

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
