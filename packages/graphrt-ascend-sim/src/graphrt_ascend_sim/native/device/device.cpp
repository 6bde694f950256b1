#include "device/device.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <sstream>

#include "errors.h"
#include "graphs/graph.h"

namespace sim {

using Clock = std::chrono::steady_clock;

// Never destroyed: torch_npu's own threads and destructors call in until the process is gone.
Device& device() {
    static Device* only = new Device;
    return *only;
}

void Device::start() {
    if (thread_ || stopping_) return;
    thread_ = new std::thread([this] { loop(); });
    thread_->detach();
    // Operators use libraries that the exit of the process takes down.
    std::atexit([] { device().stop(); });
}

void Device::stop() {
    Lock lock(mutex);
    stopping_ = true;
    work_.notify_all();
    progress_.wait_for(lock, std::chrono::seconds(10), [this] { return stopped_; });
}

void Device::loop() {
    Lock lock(mutex);
    while (!stopping_) {
        const bool allowed = !schedule_.lazy || waiting_ > 0 || pokes_ > 0;
        if (allowed && step(lock)) {
            pokes_ = std::max(0, pokes_ - 1);
            moves_++;
            progress_.notify_all();
            continue;
        }
        pokes_ = 0;
        work_.wait(lock);
    }
    stopped_ = true;
    progress_.notify_all();
}

bool Device::step(Lock& lock) {
    std::vector<Lane> candidates = lanes();
    // A stream goes on as far as it can, which brings out what nothing but luck keeps in order.
    std::stable_partition(candidates.begin(), candidates.end(),
                          [this](const Lane& lane) { return lane.stream == last_; });
    if (schedule_.seed >= 0) std::shuffle(candidates.begin(), candidates.end(), random_);
    if (schedule_.slow_stream >= 0) {
        std::stable_partition(candidates.begin(), candidates.end(), [this](const Lane& lane) {
            return lane.stream->id != schedule_.slow_stream;
        });
    }
    for (const Lane& lane : candidates) {
        if (!may_run(*lane.stream) || !try_run(lock, lane)) continue;
        last_ = lane.stream;
        return true;
    }
    return false;
}

std::vector<Device::Lane> Device::lanes() {
    std::vector<Lane> found;
    for (Stream* stream : streams) {
        if (stream->queue.empty() || !may_run(*stream)) continue;
        Graph* graph = stream->queue.front()->replay;
        if (!graph) {
            found.push_back({stream, nullptr, 0});
            continue;
        }
        if (!stream->replaying) {
            begin_replay(*graph);
            stream->replaying = std::make_unique<GraphRun>(*graph);
        }
        add_lanes(stream, *stream->replaying, found);
    }
    return found;
}

void Device::add_lanes(Stream* stream, GraphRun& replay, std::vector<Lane>& found) {
    for (size_t part = 0; part < replay.next.size(); part++) {
        if (replay.branch[part]) {
            add_lanes(stream, *replay.branch[part], found);
        } else {
            found.push_back({stream, &replay, static_cast<int>(part)});
        }
    }
}

bool Device::may_run(const Stream& stream) const {
    if (exclusive_ && exclusive_ != &stream) return false;
    if (!schedule_.single) return true;
    const uint64_t number = stream.queue.front()->number;
    return std::all_of(streams.begin(), streams.end(), [=](const Stream* other) {
        return other->queue.empty() || other->queue.front()->number >= number;
    });
}

bool Device::try_run(Lock& lock, const Lane& lane) {
    Stream& stream = *lane.stream;
    if (!lane.replay) {
        TaskPtr task = stream.queue.front();
        if (task->ready && !task->ready(nullptr)) return false;
        run(lock, task, nullptr);
        stream.queue.pop_front();
        return true;
    }
    // A graph that has begun has such a device to itself, so that a signal which it waits for and
    // does not have yet never comes.
    if (settings().update_first) exclusive_ = &stream;
    GraphRun& graph_run = *lane.replay;
    const std::vector<TaskPtr>& tasks = graph_run.graph.parts[lane.part].tasks;
    size_t& next = graph_run.next[lane.part];
    if (next == tasks.size()) return finish_replay(stream);
    TaskPtr task = tasks[next];
    if (task->ready && !task->ready(&graph_run)) return false;
    if (task->condition && task->condition->chosen()) {
        graph_run.begin_branch(lane.part, *task->condition);
    } else {
        run(lock, task, &graph_run);
        next++;
    }
    finish_replay(stream);
    return true;
}

void Device::run(Lock& lock, const TaskPtr& task, GraphRun* graph_run) {
    // A copy: an update may put another function into the task while this one runs.
    auto work = task->run;
    if (!work) return;
    if (!task->unlocked) return work(graph_run);
    const std::string name = task->name;
    running_ = true;
    lock.unlock();
    std::string error;
    try {
        work(graph_run);
    } catch (const std::exception& failure) {
        error = name + " failed on the device: " + failure.what();
    }
    lock.lock();
    running_ = false;
    if (!error.empty()) log(error);
    if (kernel_error.empty()) kernel_error = error;
}

bool Device::finish_replay(Stream& stream) {
    if (!stream.replaying->finished()) return false;
    stream.replaying->graph.running--;
    exclusive_ = nullptr;
    stream.replaying.reset();
    stream.queue.pop_front();
    return true;
}

bool Device::idle() const {
    return std::all_of(streams.begin(), streams.end(),
                       [](const Stream* stream) { return stream->queue.empty(); });
}

void Device::changed() {
    moves_++;
    start();
    work_.notify_all();
}

void Device::poke() {
    pokes_++;
    work_.notify_all();
}

void Device::set_schedule(const Schedule& schedule) {
    schedule_ = schedule;
    random_.seed(static_cast<unsigned>(schedule.seed));
    work_.notify_all();
}

aclError Device::wait(Lock& lock, const char* what, const std::function<bool()>& done,
                      int limit_ms) {
    start();
    waiting_++;
    work_.notify_all();
    const auto hang = std::chrono::milliseconds(settings().hang_ms);
    const auto begin = Clock::now();
    auto since = begin;
    uint64_t moves = moves_;
    bool late = false;
    while (!done() && !late && !stopping_) {
        progress_.wait_for(lock, std::chrono::milliseconds(5));
        if (moves != moves_ || running_) {
            moves = moves_;
            since = Clock::now();
        }
        late = Clock::now() - since > hang || moves_ == hung_at_;
        late |= limit_ms >= 0 && Clock::now() - begin > std::chrono::milliseconds(limit_ms);
    }
    waiting_--;
    if (!done()) {
        hung_at_ = moves_;
        return fail(kTimeout, std::string(what) + " does not end; blocked:" + blocked());
    }
    if (!kernel_error.empty()) {
        const std::string error = std::move(kernel_error);
        kernel_error.clear();
        return fail(kKernelFailed, error);
    }
    return kOk;
}

std::string Device::blocked() const {
    std::ostringstream text;
    for (const Stream* stream : streams) {
        if (stream->queue.empty()) continue;
        text << " stream " << stream->id << " at ";
        if (!stream->replaying) {
            text << stream->queue.front()->name << ";";
            continue;
        }
        const GraphRun& graph_run = *stream->replaying;
        text << "graph " << graph_run.graph.id << " [";
        for (size_t part = 0; part < graph_run.next.size(); part++) {
            const auto& tasks = graph_run.graph.parts[part].tasks;
            const size_t next = graph_run.next[part];
            if (next == tasks.size()) continue;
            text << " part " << part << " task " << next << "/" << tasks.size() << " "
                 << tasks[next]->name;
        }
        text << " ];";
    }
    return text.str();
}

}  // namespace sim

// For tests, through ctypes.
API unsigned long long graphrt_sim_synchronizations() {
    sim::Lock lock(sim::device().mutex);
    return sim::device().synchronizations;
}

API int graphrt_sim_set_schedule(const char* text) {
    sim::Schedule schedule;
    if (!sim::parse_schedule(text, schedule)) return sim::fail(sim::kParameter, "no such schedule");
    sim::Lock lock(sim::device().mutex);
    sim::device().set_schedule(schedule);
    return sim::kOk;
}

// Tells the simulator from CANN.
API int graphrt_simulated() { return 1; }
