// Task groups: recorded in a capture, updated later by tasks of another stream.

#include <algorithm>
#include <string>
#include <utility>

#include "device/device.h"
#include "errors.h"
#include "graphs/graph.h"
#include "settings.h"

namespace sim {

// The device inserts idle entries, so that it does not fetch a task before it was updated.
constexpr int kGroupEntries = 8;

// Attention takes cube and vector cores together, a product cube cores, the rest vector cores.
enum class Cores { kVector, kCube, kBoth };

Cores cores_of(const Task& task) {
    const auto has = [&](const char* part) { return task.name.find(part) != std::string::npos; };
    if (has("Attention")) return Cores::kBoth;
    return has("aclnnMm") || has("Matmul") || has("Addmm") ? Cores::kCube : Cores::kVector;
}

aclError append_to_update(Stream& stream, const TaskPtr& task, TaskPtr& update) {
    TaskGroup& group = *stream.updating;
    if (!task->kernel) return fail(kTaskType, "an update cannot hold: " + task->name);
    if (group.updated == group.tasks.size()) {
        return fail(kTaskMismatch, "the update has more tasks than the group it updates");
    }
    TaskPtr target = group.tasks[group.updated++];
    // InternalUpdateTaskPrepare in aix_stars.cc of the CANN runtime.
    if (cores_of(*task) != cores_of(*target)) {
        return fail(kTaskMismatch, "an update of " + target->name + " with a kernel of another type: " +
                                       task->name);
    }
    group.allocated |= task->allocated;
    update = std::make_shared<Task>();
    update->name = "update of " + target->name;
    update->run = [target, task](GraphRun*) {
        target->run = task->run;
        target->name = task->name;
    };
    return kOk;
}

}  // namespace sim

using namespace sim;

API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
    SIM_CALL();
    Lock lock(device().mutex);
    Stream& stream = *device().find(handle);
    if (!stream.capture) return fail(kNotCaptured, "the stream is not being captured");
    if (stream.recording || stream.updating) {
        return fail(kGroupStatus, "the stream has a task group open already");
    }
    Graph& graph = *stream.capture;
    graph.parts[graph.part_of[&stream]].entries += kGroupEntries;
    graph.groups.push_back(std::make_unique<TaskGroup>());
    graph.groups.back()->graph = &graph;
    graph.open_groups++;
    stream.recording = graph.groups.back().get();
    return kOk;
}

API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
    SIM_CALL();
    Lock lock(device().mutex);
    *group = nullptr;
    Stream& stream = *device().find(handle);
    if (!stream.capture) return fail(kNotCaptured, "the stream is not being captured");
    if (!stream.recording) return fail(kGroupStatus, "the stream has no task group open");
    TaskGroup* recorded = std::exchange(stream.recording, nullptr);
    stream.capture->open_groups--;
    if (const aclError error = std::exchange(stream.capture->group_error, kOk)) {
        return fail(error, "an earlier error has broken the task group");
    }
    if (stream.capture->invalid) {
        return fail(kInvalidated, "an earlier error has invalidated the capture");
    }
    *group = recorded;
    return kOk;
}

API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group_handle) {
    SIM_CALL();
    Lock lock(device().mutex);
    Stream& stream = *device().find(handle);
    auto* group = static_cast<TaskGroup*>(group_handle);
    const bool exists = std::any_of(graphs().begin(), graphs().end(), [&](const Graph* graph) {
        return std::any_of(graph->groups.begin(), graph->groups.end(),
                           [&](const auto& each) { return each.get() == group; });
    });
    if (!exists) return fail(kParameter, "no such task group; was its graph destroyed?");
    if (stream.capture) return fail(kStreamCaptured, "the update stream is being captured");
    if (stream.updating) return fail(kGroupStatus, "the stream has an update open already");
    // The runtime does not look; its documentation updates after aclmdlRICaptureEnd alone
    // (dev_guide, 04-03), and the entries that an update would patch are not in their queue yet.
    if (group->graph->capturing) {
        return fail(kModelCaptured, "the graph of the task group is still being captured");
    }
    if (group->updating) {
        return fail(kGroupStatus, "The handle only can be updated by one stream.");
    }
    group->updating = true;
    group->updated = 0;
    group->allocated = false;
    stream.updating = group;
    return kOk;
}

API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
    SIM_CALL();
    Lock lock(device().mutex);
    Stream& stream = *device().find(handle);
    if (!stream.updating) return fail(kGroupStatus, "the stream has no update open");
    TaskGroup& group = *std::exchange(stream.updating, nullptr);
    group.updating = false;
    if (group.updated != group.tasks.size()) {
        return fail(kTaskMismatch, "the update left tasks out: " + std::to_string(group.updated) +
                                       " of " + std::to_string(group.tasks.size()));
    }
    // Not a rule of the device, which finds it overwritten or given back at some later replay:
    // torch_npu frees its tensor after the call (op_api_common.h of op-plugin).
    if (group.allocated && !settings().allocating_updates) {
        return fail(kTaskMismatch,
                    "the update allocated its workspace, which the graph does not keep: pass "
                    "workspace=, from the operator's get_workspace function");
    }
    return kOk;
}
