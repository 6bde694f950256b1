// Events, and words of device memory that streams wait for and write (torch.npu.ExternalEvent).

#include <chrono>
#include <memory>
#include <string>
#include <unordered_map>

#include "device/device.h"
#include "errors.h"
#include "graphs/graph.h"

using namespace sim;

namespace {

struct Event {
    bool external = false;  // may tie a graph to other streams
    bool signalled = false;  // an external one
    uint64_t recorded = 0, reached = 0;
    double milliseconds = 0;
    Graph* capture = nullptr;  // that it was last recorded in
    int record = -1;           // there
    int part = -1;
};
using EventPtr = std::shared_ptr<Event>;

constexpr uint32_t kExternalFlag = 0x20;

// Not destroyed at exit, when torch_npu still gives its events back.
std::unordered_map<aclrtEvent, EventPtr>& events() {
    static auto* all = new std::unordered_map<aclrtEvent, EventPtr>;
    return *all;
}

EventPtr find(aclrtEvent handle) {
    const auto found = events().find(handle);
    return found == events().end() ? nullptr : found->second;
}

double now_ms() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(now).count();
}

bool captured(const Event& event) {
    return event.capture && graphs().count(event.capture) && event.capture->capturing;
}

// True, and its capture broken, if the host asks for an event that is being captured.
bool refused(Event& event) {
    if (!captured(event)) return false;
    event.capture->invalid = true;
    return true;
}

aclError record_in_capture(Lock& lock, Stream& stream, Event& event) {
    Graph& graph = *stream.capture;
    const int record = graph.records++;
    event.capture = &graph;
    event.record = record;
    event.part = graph.part_of[&stream];
    auto task = std::make_shared<Task>();
    task->name = "event record";
    task->run = [=](GraphRun* run) { run->recorded.insert(record); };
    return device().submit(lock, stream, task);
}

aclError wait_in_capture(Lock& lock, Stream& stream, const Event& event) {
    Graph& graph = *event.capture;
    if (stream.capture && stream.capture != &graph) {
        return fail(kConflict, "the event belongs to another capture");
    }
    if (!stream.capture) {
        if (&stream == device().default_stream()) {
            return fail(kImplicitDefault, "the default stream waits for a captured event");
        }
        if (aclError error = join_capture(graph, stream)) return error;
    }
    auto task = std::make_shared<Task>();
    task->name = "event wait";
    const int record = event.record;
    task->ready = [=](GraphRun* run) { return run->recorded.count(record) > 0; };
    const bool last = !graph.parts[event.part].tasks.empty() && !graph.parts[event.part].joined;
    const size_t position = graph.parts[event.part].tasks.size();
    aclError error = device().submit(lock, stream, task);
    if (graph.part_of[&stream] != event.part && last &&
        graph.parts[event.part].tasks.size() == position &&
        graph.parts[event.part].tasks.back()->name == "event record") {
        graph.parts[event.part].joined = true;
    }
    return error;
}

}  // namespace

API aclError aclrtCreateEventExWithFlag(aclrtEvent* handle, uint32_t flag) {
    Lock lock(device().mutex);
    auto event = std::make_shared<Event>();
    event->external = flag & kExternalFlag;
    *handle = event.get();
    events()[*handle] = std::move(event);
    return kOk;
}

API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
    return aclrtCreateEventExWithFlag(event, flag);
}

API aclError aclrtDestroyEvent(aclrtEvent handle) {
    Lock lock(device().mutex);
    events().erase(handle);
    return kOk;
}

API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    Stream& stream = *device().find(stream_handle);
    if (stream.capture && !event->external) return record_in_capture(lock, stream, *event);
    event->capture = nullptr;
    const uint64_t ticket = ++event->recorded;
    auto task = std::make_shared<Task>();
    task->name = "event record";
    task->run = [=](GraphRun*) {
        event->reached = std::max(event->reached, ticket);
        event->signalled = true;
        event->milliseconds = now_ms();
    };
    return device().submit(lock, stream, task);
}

API aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    Stream& stream = *device().find(stream_handle);
    if (!event->external && captured(*event)) return wait_in_capture(lock, stream, *event);
    if (stream.capture && !event->external) {
        stream.capture->invalid = true;
        return fail(kDependency, "a captured stream waits for an event from outside the capture");
    }
    const uint64_t ticket = event->recorded;
    auto task = std::make_shared<Task>();
    task->name = "event wait";
    task->ready = [=](GraphRun*) {
        return event->external ? event->signalled : event->reached >= ticket;
    };
    return device().submit(lock, stream, task);
}

API aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    auto task = std::make_shared<Task>();
    task->name = "event reset";
    task->run = [=](GraphRun*) { event->signalled = false; };
    return device().submit(lock, *device().find(stream), task);
}

API aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    if (refused(*event)) return fail(kEventCaptured, "the event is captured");
    device().synchronizations++;
    const uint64_t ticket = event->recorded;
    return device().wait(lock, "the event", [=] { return event->reached >= ticket; }, -1);
}

API aclError aclrtQueryEventStatus(aclrtEvent handle, int* status) {
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    if (refused(*event)) return fail(kEventCaptured, "the event is captured");
    *status = event->reached >= event->recorded ? 1 : 0;
    device().poke();
    return kOk;
}

API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
    Lock lock(device().mutex);
    EventPtr first = find(from), second = find(to);
    if (!first || !second) return fail(kParameter, "no such event");
    *milliseconds = static_cast<float>(second->milliseconds - first->milliseconds);
    return kOk;
}

API aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    *microseconds = static_cast<uint64_t>(event->milliseconds * 1000);
    return kOk;
}

API aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
    Lock lock(device().mutex);
    auto* word = static_cast<volatile uint64_t*>(address);
    auto task = std::make_shared<Task>();
    task->name = "value write of " + std::to_string(value);
    task->run = [=](GraphRun*) { *word = value; };
    return device().submit(lock, *device().find(stream), task);
}

API aclError aclrtValueWait(void* address, uint64_t value, uint32_t how, aclrtStream stream) {
    enum { kAtLeast = 0, kEqual = 1, kAnd = 2, kNor = 3 };
    Lock lock(device().mutex);
    auto* word = static_cast<volatile uint64_t*>(address);
    auto task = std::make_shared<Task>();
    task->name = "value wait for " + std::to_string(value);
    task->entries = 4;
    task->ready = [=](GraphRun*) {
        const uint64_t found = *word;
        if (how == kAtLeast) return static_cast<int64_t>(found - value) >= 0;
        if (how == kAnd) return (found & value) != 0;
        if (how == kNor) return ~(found | value) != 0;
        return found == value;
    };
    return device().submit(lock, *device().find(stream), task);
}
