// Streams: made, waited for, and given tasks.

#include <algorithm>
#include <string>

#include "device/device.h"
#include "errors.h"
#include "graphs/graph.h"

namespace sim {

Stream* Device::make_stream() {
    auto* stream = new Stream;
    stream->id = static_cast<int>(streams.size());
    streams.push_back(stream);
    return stream;
}

Stream* Device::default_stream() {
    if (streams.empty()) make_stream();
    return streams.front();
}

Stream* Device::find(aclrtStream handle) {
    default_stream();
    return handle ? static_cast<Stream*>(handle) : streams.front();
}

bool Device::take_streams(int count) {
    if (streams_used + count > settings().streams) return false;
    streams_used += count;
    return true;
}

// CANN's constraints: what was destroyed must not be used. On the device nothing looks.
aclError check_exists(const Stream& stream) {
    if (!stream.destroyed) return kOk;
    return fail(kParameter, "stream " + std::to_string(stream.id) + " was destroyed");
}

aclError check_timeout(int32_t timeout_ms) {
    if (timeout_ms == -1 || timeout_ms > 0) return kOk;
    return fail(kParameter, "a time-out is -1 or more than 0, not " + std::to_string(timeout_ms));
}

aclError Device::submit(Lock& lock, Stream& stream, TaskPtr task) {
    if (aclError error = check_exists(stream)) return error;
    if (stream.updating) {
        TaskPtr update;
        if (aclError error = append_to_update(stream, task, update)) return error;
        task = update;
    } else if (stream.capture) {
        return append_to_capture(stream, task);
    }
    const size_t depth = static_cast<size_t>(settings().queue_depth);
    if (stream.queue.size() >= depth) {
        // As on the device: the host waits for a free entry of the queue.
        const auto space = [&] { return stream.queue.size() < depth; };
        if (wait(lock, "a full stream", space, -1) == kTimeout) {
            return fail(kQueueFull, "the queue of stream " + std::to_string(stream.id) + " is full");
        }
    }
    task->number = ++submitted_;
    stream.queue.push_back(std::move(task));
    changed();
    return kOk;
}

}  // namespace sim

using namespace sim;

API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
    SIM_CALL();
    Lock lock(device().mutex);
    device().default_stream();
    if (!device().take_streams(1)) {
        return fail(kNoStreamResource, "[SqCqManage]Alloc sq cq fail: no stream is left");
    }
    *stream = device().make_stream();
    return kOk;
}

API aclError aclrtCreateStream(aclrtStream* stream) {
    SIM_CALL();
    return aclrtCreateStreamWithConfig(stream, 0, 0);
}

API aclError aclrtDestroyStream(aclrtStream handle) {
    SIM_CALL();
    Lock lock(device().mutex);
    // The struct stays: tasks of captured graphs may name it.
    Stream* stream = device().find(handle);
    // StreamDestroy in api_error.cc of the CANN runtime.
    if (aclError error = check_not_captured(*stream, "a stream was destroyed")) return error;
    if (aclError error = check_exists(*stream)) return error;
    device().streams_used--;
    stream->destroyed = true;
    return kOk;
}

API aclError aclrtDestroyStreamForce(aclrtStream stream) {
    SIM_CALL();
    return aclrtDestroyStream(stream);
}

API aclError aclrtGetStreamAvailableNum(uint32_t* count) {
    SIM_CALL();
    Lock lock(device().mutex);
    *count = static_cast<uint32_t>(settings().streams - device().streams_used);
    return kOk;
}

API aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
    SIM_CALL();
    Lock lock(device().mutex);
    *id = device().find(stream)->id;
    return kOk;
}

// Types 1 to 5 of acl_rt.h. torch_npu 2.13 sets the fourth around every capture on CANN 8.5 and later
// (apply_cache_op_info in NPUGraph.cpp), at the end of it while the stream is captured.
API aclError aclrtSetStreamAttribute(aclrtStream handle, int type, const uint64_t*) {
    SIM_CALL();
    Lock lock(device().mutex);
    if (aclError error = check_exists(*device().find(handle))) return error;
    if (type < 1 || type > 5) return fail(kParameter, "streams have no attribute of this type");
    return kOk;
}

API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
    SIM_CALL();
    Lock lock(device().mutex);
    Stream* stream = device().find(handle);
    // This order is that of StreamSynchronize in api_error.cc of the CANN runtime.
    if (aclError error = check_timeout(timeout_ms)) return error;
    if (aclError error = check_not_captured(*stream, "a stream was waited for")) return error;
    if (aclError error = check_exists(*stream)) return error;
    device().synchronizations++;
    return device().wait(lock, "the stream", [=] { return stream->queue.empty(); }, timeout_ms);
}

API aclError aclrtSynchronizeStream(aclrtStream stream) {
    SIM_CALL();
    return aclrtSynchronizeStreamWithTimeout(stream, -1);
}

API aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
    SIM_CALL();
    Lock lock(device().mutex);
    if (aclError error = check_timeout(timeout_ms)) return error;
    if (aclError error = check_device_idle_of_captures("the device was waited for")) return error;
    device().synchronizations++;
    return device().wait(lock, "the device", [] { return device().idle(); }, timeout_ms);
}

API aclError aclrtSynchronizeDevice() {
    SIM_CALL();
    return aclrtSynchronizeDeviceWithTimeout(-1);
}

API aclError aclrtStreamQuery(aclrtStream handle, int* status) {
    SIM_CALL();
    Lock lock(device().mutex);
    Stream* stream = device().find(handle);
    if (aclError error = check_not_captured(*stream, "a stream was queried")) return error;
    *status = stream->queue.empty() ? 0 : 1;
    device().poke();
    return kOk;
}
