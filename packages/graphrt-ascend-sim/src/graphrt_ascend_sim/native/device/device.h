// The device: streams of tasks, and the one thread that runs them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "abi.h"
#include "settings.h"

namespace sim {

struct Condition;
struct Graph;
struct GraphRun;
struct TaskGroup;

using Lock = std::unique_lock<std::mutex>;

// One entry of a stream, or of a captured graph, where it runs once a replay.
struct Task {
    std::string name;
    bool kernel = false;    // may stand in a task group
    bool unlocked = false;  // `run` is called without the device's lock
    int entries = 1;        // of the stream's hardware queue
    std::function<bool(GraphRun*)> ready;  // empty: always
    std::function<void(GraphRun*)> run;
    bool allocated = false;  // its workspace for this call alone
    uint64_t number = 0;     // in the order of submission
    Graph* replay = nullptr;  // set: the task is a replay of this graph
    const Condition* condition = nullptr;  // set: the task runs one of its branches, or none
};
using TaskPtr = std::shared_ptr<Task>;

struct Stream {
    int id = 0;
    std::deque<TaskPtr> queue;
    std::unique_ptr<GraphRun> replaying;  // of the task at the head of the queue
    Graph* capture = nullptr;
    TaskGroup* recording = nullptr;  // task group that the capture has open here
    TaskGroup* updating = nullptr;
    std::thread::id report_thread;  // that runs the callbacks of this stream
    bool destroyed = false;
};

class Device {
public:
    std::mutex mutex;
    std::vector<Stream*> streams;
    int streams_used = 0;  // streams made and those that captured graphs hold
    uint64_t synchronizations = 0;
    std::string kernel_error;  // of the first operator that failed since the last wait

    // Streams
    Stream* find(aclrtStream handle);  // null: the default stream
    Stream* make_stream();
    Stream* default_stream();
    bool take_streams(int count);
    bool idle() const;

    // Puts a task on a stream: into its queue, its capture, or the update it has open.
    aclError submit(Lock& lock, Stream& stream, TaskPtr task);

    // Waits on the host until `done`; fails where the device cannot get there any more.
    aclError wait(Lock& lock, const char* what, const std::function<bool()>& done, int limit_ms);
    // A question about the device: lets a lazy one take a step.
    void poke();
    void changed();  // something that a task may wait for has happened
    void set_schedule(const Schedule& schedule);
    void stop();

private:
    struct Lane {
        Stream* stream;
        GraphRun* replay;  // at the head of the stream, or of a branch of it; null: the stream itself
        int part;
    };

    void start();
    void loop();
    bool step(Lock& lock);
    std::vector<Lane> lanes();
    static void add_lanes(Stream* stream, GraphRun& replay, std::vector<Lane>& found);
    bool may_run(const Stream& stream) const;
    bool try_run(Lock& lock, const Lane& lane);
    void run(Lock& lock, const TaskPtr& task, GraphRun* graph_run);
    bool finish_replay(Stream& stream);
    std::string blocked() const;

    Schedule schedule_ = settings().schedule;
    std::mt19937 random_{static_cast<unsigned>(settings().schedule.seed)};
    std::condition_variable work_, progress_;
    std::thread* thread_ = nullptr;
    Stream* last_ = nullptr;  // that a task was run of
    bool stopping_ = false, stopped_ = false, running_ = false;
    int waiting_ = 0, pokes_ = 0;
    Stream* exclusive_ = nullptr;  // whose replay nothing else runs beside
    uint64_t submitted_ = 0;
    uint64_t moves_ = 0;        // tasks submitted and finished
    uint64_t hung_at_ = ~0ull;  // moves_ when a wait was given up
};

Device& device();

aclError check_exists(const Stream& stream);
aclError check_timeout(int32_t timeout_ms);

}  // namespace sim
