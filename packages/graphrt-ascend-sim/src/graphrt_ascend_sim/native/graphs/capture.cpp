// Capture: the calls that begin and end it, what they forbid, and replay.

#include <algorithm>
#include <cstdio>
#include <string>

#include "device/device.h"
#include "errors.h"
#include "graphs/graph.h"

namespace sim {
namespace {

enum Mode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

// Free entries that a stream of a capture keeps; with fewer, it goes on in another stream.
constexpr int kReservedEntries = 32;
// Queues that graphs which run at once share where queues are software (CANN's runtime, EE1023).
constexpr int kSharedQueues = 1024;

thread_local int thread_mode = kGlobal;
int next_graph = 0;

// StreamBeginCapture and ThreadExchangeCaptureMode in api_error_aclgraph.cc of the CANN runtime.
aclError check_mode(int mode) {
    if (mode >= kGlobal && mode <= kRelaxed) return kOk;
    return fail(kParameter, "there is no capture mode " + std::to_string(mode));
}

aclError drop(Graph* graph, aclError code, const std::string& text) {
    end_capture(*graph);
    // A branch goes with the graph that it is of, which cannot be ended without it.
    if (!graph->parent) destroy_graph(graph);
    return fail(code, text);
}

bool blocking_allowed() {
    const auto self = std::this_thread::get_id();
    bool global = false, own = false;
    for (const Graph* graph : graphs()) {
        if (!graph->capturing || graph->mode == kRelaxed) continue;
        global |= graph->mode == kGlobal;
        own |= graph->thread == self;
    }
    if (thread_mode == kRelaxed) return true;
    if (thread_mode == kThreadLocal) return !own;
    return !global && !own;
}

}  // namespace

bool take_stream() { return settings().software_queues || device().take_streams(1); }

void end_capture(Graph& graph) {
    for (auto& [stream, part] : graph.part_of) {
        stream->capture = nullptr;
        stream->recording = nullptr;
    }
    graph.part_of.clear();
    graph.capturing = false;
}

void destroy_graph(Graph* graph) {
    for (Graph* branch : graph->branches()) {
        end_capture(*branch);
        graphs().erase(branch);
        delete branch;
    }
    if (!settings().software_queues) device().streams_used -= graph->streams;
    graphs().erase(graph);
    delete graph;
}

aclError begin_capture(Graph* graph, Stream& stream, int mode) {
    graph->id = next_graph++;
    graph->origin = &stream;
    graph->mode = mode;
    graph->thread = std::this_thread::get_id();
    graph->parts.emplace_back();
    graph->part_of[&stream] = 0;
    graph->capturing = graph->begun = true;
    stream.capture = graph;
    graphs().insert(graph);
    log("capture of graph " + std::to_string(graph->id) + " begins");
    return kOk;
}

std::set<Graph*>& graphs() {
    static auto* all = new std::set<Graph*>;
    return *all;
}

aclError check_not_captured(const Stream& stream, const char* what) {
    if (!stream.capture) return kOk;
    return fail(kStreamCaptured, std::string(what) + " while it is captured");
}

aclError check_device_idle_of_captures(const char* what) {
    const bool capturing = std::any_of(graphs().begin(), graphs().end(),
                                       [](const Graph* graph) { return graph->capturing; });
    if (!capturing) return kOk;
    return fail(kStreamCaptured, std::string(what) + " while a stream of it is captured");
}

aclError check_blocking(const char* what, aclError code) {
    if (blocking_allowed()) return kOk;
    return fail(code, std::string(what) + " during a capture");
}

aclError join_capture(Graph& graph, Stream& stream) {
    if (!take_stream()) {
        graph.invalid = true;
        return fail(kNoStreamResource,
                    "[SqCqManage]Alloc sq cq fail: no stream is left for a stream of the capture");
    }
    graph.streams++;
    graph.part_of[&stream] = static_cast<int>(graph.parts.size());
    graph.parts.emplace_back();
    stream.capture = &graph;
    return kOk;
}

aclError append_to_capture(Stream& stream, const TaskPtr& task) {
    Graph& graph = *stream.capture;
    CapturePart& part = graph.parts[graph.part_of[&stream]];
    if (graph.open_groups > 0 && !stream.recording) {
        graph.invalid = true;
        graph.group_error = kGroupInterrupted;
        return fail(kGroupInterrupted, "another captured stream was given a task in a task group");
    }
    if (stream.recording && !task->kernel) {
        graph.invalid = true;
        graph.group_error = kTaskType;
        return fail(kTaskType, "a task group cannot hold: " + task->name);
    }
    if (part.entries + kReservedEntries >= settings().queue_depth) {
        if (!take_stream()) {
            graph.invalid = true;
            return fail(kNoStreamResource,
                        "[SqCqManage]Alloc sq cq fail: no stream is left to go on with the capture");
        }
        graph.streams++;
        part.entries = 0;
    }
    part.entries += task->entries;
    part.tasks.push_back(task);
    part.joined = false;
    if (stream.recording) stream.recording->tasks.push_back(task);
    return kOk;
}

}  // namespace sim

using namespace sim;

API aclError aclmdlRICaptureBegin(aclrtStream handle, int mode) {
    SIM_CALL();
    Lock lock(device().mutex);
    Stream& stream = *device().find(handle);
    if (aclError error = check_mode(mode)) return error;
    if (aclError error = check_exists(stream)) return error;
    if (&stream == device().default_stream()) {
        return fail(kNotSupported, "the default stream cannot be captured");
    }
    if (stream.capture) return fail(kStreamCaptured, "the stream is being captured already");
    if (!take_stream()) {
        return fail(kNoStreamForCapture,
                    "Insufficient_Stream_Resources(EL0009): The stream resources are insufficient.");
    }
    return begin_capture(new Graph, stream, mode);
}

API aclError aclmdlRICaptureGetInfo(aclrtStream handle, int* status, aclmdlRI* model) {
    SIM_CALL();
    enum { kNone = 0, kActive = 1, kBroken = 2 };
    Lock lock(device().mutex);
    Graph* graph = device().find(handle)->capture;
    if (status) *status = !graph ? kNone : graph->invalid ? kBroken : kActive;
    if (model) *model = graph;
    return kOk;
}

API aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
    SIM_CALL();
    Lock lock(device().mutex);
    *model = nullptr;
    Stream& stream = *device().find(handle);
    Graph* graph = stream.capture;
    if (!graph) return fail(kNotCaptured, "the stream is not being captured");
    if (graph->origin != &stream) {
        return fail(kUnmatched, "the capture was not begun on this stream");
    }
    if (graph->mode != kRelaxed && graph->thread != std::this_thread::get_id()) {
        return drop(graph, kWrongThread, "the capture was begun in another thread");
    }
    if (graph->invalid) {
        return drop(graph, kInvalidated, "an earlier error has invalidated the capture");
    }
    if (graph->open_groups) return drop(graph, kGroupStatus, "a task group was left open");
    for (const Graph* branch : graph->branches()) {
        if (branch->begun && !branch->capturing && !branch->invalid) continue;
        return drop(graph, kBranchCapturing, "the capture of a branch has not ended");
    }
    const bool joined = std::all_of(graph->parts.begin() + 1, graph->parts.end(),
                                    [](const CapturePart& part) { return part.joined; });
    if (!joined) {
        return drop(graph, kUnjoined, "a stream was not joined to the one the capture began on");
    }
    end_capture(*graph);
    *model = graph;
    log("graph " + std::to_string(graph->id) + " holds " + std::to_string(graph->streams) +
        " streams");
    return kOk;
}

API aclError aclmdlRICaptureThreadExchangeMode(int* mode) {
    SIM_CALL();
    if (aclError error = check_mode(*mode)) return error;
    std::swap(*mode, thread_mode);
    return kOk;
}

API aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
    SIM_CALL();
    Lock lock(device().mutex);
    auto* graph = static_cast<Graph*>(model);
    if (!graphs().count(graph)) return fail(kParameter, "no such graph");
    Stream& stream = *device().find(handle);
    if (stream.capture) return fail(kStreamCaptured, "a graph replayed on a captured stream");
    if (graph->parent) return fail(kNotSupported, "a branch of a graph cannot be replayed by itself");
    int queues = graph->queues();
    for (const Graph* other : graphs()) queues += other->running && other != graph ? other->queues() : 0;
    if (settings().software_queues && queues > kSharedQueues) {
        return fail(kNoStreamResource, "too many graphs run at once: they need " +
                                           std::to_string(queues) + " queues");
    }
    auto task = std::make_shared<Task>();
    task->name = "graph " + std::to_string(graph->id);
    task->replay = graph;
    graph->running++;
    aclError error = device().submit(lock, stream, task);
    if (error) graph->running--;
    return error;
}

API aclError aclmdlRIDestroy(aclmdlRI model) {
    SIM_CALL();
    Lock lock(device().mutex);
    auto* graph = static_cast<Graph*>(model);
    if (!graphs().count(graph)) return fail(kParameter, "no such graph");
    if (graph->parent) return fail(kNotSupported, "a branch goes with its graph");
    if (graph->running) return fail(kModelRunning, "the graph is still running");
    destroy_graph(graph);
    return kOk;
}

API aclError aclmdlRIGetId(aclmdlRI model, uint32_t* id) {
    SIM_CALL();
    Lock lock(device().mutex);
    auto* graph = static_cast<Graph*>(model);
    if (!graphs().count(graph)) return fail(kParameter, "no such graph");
    *id = static_cast<uint32_t>(graph->id) + 1;
    return kOk;
}

API aclError aclmdlRIDebugJsonPrint(aclmdlRI model, const char* path, uint32_t) {
    SIM_CALL();
    Lock lock(device().mutex);
    auto* graph = static_cast<Graph*>(model);
    if (!graphs().count(graph)) return fail(kParameter, "no such graph");
    std::FILE* file = std::fopen(path, "w");
    if (!file) return fail(kParameter, std::string("cannot write ") + path);
    const char* separator = "[\n";
    int time = 0;
    for (size_t part = 0; part < graph->parts.size(); part++) {
        for (const TaskPtr& task : graph->parts[part].tasks) {
            std::fprintf(file,
                         "%s{\"name\": \"%s\", \"ph\": \"X\", \"pid\": \"0 aclGraph\", "
                         "\"tid\": \"stream%zu\", \"ts\": %d, \"dur\": 1}",
                         separator, task->name.c_str(), part, time++);
            separator = ",\n";
        }
    }
    std::fprintf(file, "%s\n]\n", time ? "" : "[");
    std::fclose(file);
    return kOk;
}
