// Work that streams make the host do.

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <thread>

#include <pthread.h>

#include "device/device.h"
#include "errors.h"

using namespace sim;

namespace {

using Callback = void (*)(void*);

struct Report {
    Callback callback;
    void* data;
    std::shared_ptr<bool> done;
};

struct Reports {
    std::map<pthread_t, std::deque<Report>> pending;
    std::map<Stream*, pthread_t> subscribed;
    std::condition_variable arrived;
};

Reports& reports() {
    static auto* all = new Reports;
    return *all;
}

}  // namespace

API aclError aclrtLaunchHostFunc(aclrtStream stream, Callback function, void* data) {
    SIM_CALL();
    Lock lock(device().mutex);
    auto task = std::make_shared<Task>();
    task->name = "host function";
    task->unlocked = true;
    task->run = [=](GraphRun*) { function(data); };
    return device().submit(lock, *device().find(stream), task);
}

API aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) {
    SIM_CALL();
    Lock lock(device().mutex);
    reports().subscribed[device().find(stream)] = static_cast<pthread_t>(thread);
    return kOk;
}

API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream stream) {
    SIM_CALL();
    Lock lock(device().mutex);
    reports().subscribed.erase(device().find(stream));
    return kOk;
}

API aclError aclrtLaunchCallback(Callback callback, void* data, int blocks, aclrtStream handle) {
    SIM_CALL();
    Lock lock(device().mutex);
    Stream* stream = device().find(handle);
    const auto found = reports().subscribed.find(stream);
    if (found == reports().subscribed.end()) {
        return fail(kParameter, "no thread has subscribed to the callbacks of the stream");
    }
    const pthread_t thread = found->second;
    auto done = std::make_shared<bool>(false);
    auto call = std::make_shared<Task>();
    call->name = "callback";
    call->run = [=](GraphRun*) {
        *done = false;
        reports().pending[thread].push_back({callback, data, done});
        reports().arrived.notify_all();
    };
    aclError error = device().submit(lock, *stream, call);
    if (error || !blocks) return error;
    auto wait = std::make_shared<Task>();
    wait->name = "end of callback";
    wait->entries = 0;
    wait->ready = [=](GraphRun*) { return *done; };
    return device().submit(lock, *stream, wait);
}

API aclError aclrtProcessReport(int32_t timeout_ms) {
    SIM_CALL();
    Lock lock(device().mutex);
    const pthread_t self = pthread_self();
    const auto pending = [&] { return !reports().pending[self].empty(); };
    if (timeout_ms < 0) {
        reports().arrived.wait(lock, pending);
    } else {
        reports().arrived.wait_for(lock, std::chrono::milliseconds(timeout_ms), pending);
    }
    if (!pending()) return kTimeout;
    Report report = reports().pending[self].front();
    reports().pending[self].pop_front();
    lock.unlock();
    report.callback(report.data);
    lock.lock();
    *report.done = true;
    device().changed();
    return kOk;
}

// Of the operator library; `function` is a std::function<void()>, which is copied.
API int graphrt_sim_launch(aclrtStream stream, const char* name, const void* function,
                           bool allocated) {
    if (aclError wanted = counted(name)) return wanted;
    auto run = *static_cast<const std::function<void()>*>(function);
    auto task = std::make_shared<Task>();
    task->name = name;
    task->kernel = true;
    task->allocated = allocated;
    task->unlocked = true;
    task->run = [run](GraphRun*) { run(); };
    Lock lock(device().mutex);
    return device().submit(lock, *device().find(stream), task);
}
