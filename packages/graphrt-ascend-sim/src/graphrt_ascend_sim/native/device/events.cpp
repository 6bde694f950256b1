// Events; external ones are torch.npu.ExternalEvent where CANN cannot wait for a value.

#include <algorithm>
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
    bool limited = false;   // of those that the device has a number of
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

// Refuses the host's question for an event that is being captured. The capture goes on (open source
// of the CANN runtime: api_error.cc and api_impl_event_common.cc return before they touch it).
aclError check_not_captured(const Event& event, const char* what) {
    if (!captured(event)) return kOk;
    return fail(kEventCaptured, std::string(what) + " of an event that is being captured");
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
        // Both are broken (TerminateCapture of the CANN runtime's capture_model_utils.cc).
        stream.capture->invalid = graph.invalid = true;
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

void make(aclrtEvent* handle, uint32_t flag, bool limited) {
    auto event = std::make_shared<Event>();
    event->external = flag & kExternalFlag;
    event->limited = limited;
    *handle = event.get();
    events()[*handle] = std::move(event);
}

}  // namespace

// CANN's page of it (aclcppdevg_03_0081 of 9.0.0): no limit of the hardware, and no reset.
API aclError aclrtCreateEventExWithFlag(aclrtEvent* handle, uint32_t flag) {
    SIM_CALL();
    Lock lock(device().mutex);
    make(handle, flag, false);
    return kOk;
}

// CANN's documentation of aclrtCreateEvent: 65,536 events a device on A2 and A3.
API aclError aclrtCreateEventWithFlag(aclrtEvent* handle, uint32_t flag) {
    SIM_CALL();
    Lock lock(device().mutex);
    const auto used = std::count_if(events().begin(), events().end(),
                                    [](const auto& each) { return each.second->limited; });
    if (used >= settings().events) {
        return fail(kNoEvent, "the device has no event left: " + std::to_string(used) + " are in use");
    }
    make(handle, flag, true);
    return kOk;
}

API aclError aclrtDestroyEvent(aclrtEvent handle) {
    SIM_CALL();
    Lock lock(device().mutex);
    events().erase(handle);
    return kOk;
}

API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    SIM_CALL();
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
    SIM_CALL();
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    Stream& stream = *device().find(stream_handle);
    if (!event->external && captured(*event)) return wait_in_capture(lock, stream, *event);
    if (stream.capture && !event->external) {
        // One that was never recorded is not waited for, as outside of a capture. The capture goes
        // on (EventWait in the CANN runtime's api_impl.cc).
        if (!event->recorded) return kOk;
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
    SIM_CALL();
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    // IsNewMode in EventReset of the CANN runtime's api_impl.cc.
    if (!event->limited) return fail(kNotSupported, "an event of aclrtCreateEventExWithFlag has no reset");
    auto task = std::make_shared<Task>();
    task->name = "event reset";
    task->run = [=](GraphRun*) { event->signalled = false; };
    return device().submit(lock, *device().find(stream), task);
}

API aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    SIM_CALL();
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    if (aclError error = check_not_captured(*event, "a wait")) return error;
    device().synchronizations++;
    const uint64_t ticket = event->recorded;
    return device().wait(lock, "the event", [=] { return event->reached >= ticket; }, -1);
}

API aclError aclrtQueryEventStatus(aclrtEvent handle, int* status) {
    SIM_CALL();
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    if (aclError error = check_not_captured(*event, "a query")) return error;
    *status = event->reached >= event->recorded ? 1 : 0;
    device().poke();
    return kOk;
}

API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
    SIM_CALL();
    Lock lock(device().mutex);
    EventPtr first = find(from), second = find(to);
    if (!first || !second) return fail(kParameter, "no such event");
    for (const EventPtr& event : {first, second}) {
        if (aclError error = check_not_captured(*event, "the time")) return error;
    }
    *milliseconds = static_cast<float>(second->milliseconds - first->milliseconds);
    return kOk;
}

API aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
    SIM_CALL();
    Lock lock(device().mutex);
    EventPtr event = find(handle);
    if (!event) return fail(kParameter, "no such event");
    if (aclError error = check_not_captured(*event, "the time")) return error;
    *microseconds = static_cast<uint64_t>(event->milliseconds * 1000);
    return kOk;
}
