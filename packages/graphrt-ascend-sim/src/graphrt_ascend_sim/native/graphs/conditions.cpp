// If-nodes and switches: tasks of a graph that run one of several others, by a value on the device.
//
// The rules are those of the CANN runtime (open source: api_impl_aclgraph.cc, context_aclgraph.cc,
// api_error_aclgraph.cc).

#include <algorithm>
#include <string>

#include "device/device.h"
#include "errors.h"
#include "graphs/graph.h"
#include "settings.h"

namespace sim {

// Of the queue, for an if-node or a switch (aclgraph_cond_task.h).
constexpr int kConditionEntries = 2;

Graph* Condition::chosen() const {
    // Of an if, the second branch is that of a value of zero.
    const uint64_t index = type == kIf ? (*value ? 0 : 1) : *value;
    return index < branches.size() ? branches[index] : nullptr;
}

std::vector<Graph*> Graph::branches() const {
    std::vector<Graph*> found;
    for (const auto& condition : conditions) {
        for (Graph* branch : condition->branches) {
            found.push_back(branch);
            const std::vector<Graph*> inner = branch->branches();
            found.insert(found.end(), inner.begin(), inner.end());
        }
    }
    return found;
}

int Graph::queues() const {
    int found = streams;
    for (const Graph* branch : branches()) found += branch->streams;
    return found;
}

void begin_replay(Graph& graph) {
    std::vector<Graph*> all = graph.branches();
    all.push_back(&graph);
    for (const Graph* each : all) {
        for (const auto& condition : each->conditions) {
            if (condition->initialised) *condition->value = condition->initial;
        }
    }
}

void GraphRun::begin_branch(size_t part, const Condition& condition) {
    branch[part] = std::make_unique<GraphRun>(*condition.chosen());
}

bool GraphRun::finished() {
    bool all = true;
    for (size_t part = 0; part < next.size(); part++) {
        if (branch[part] && branch[part]->finished()) {
            branch[part].reset();
            next[part]++;
        }
        all &= next[part] == graph.parts[part].tasks.size();
    }
    return all;
}

namespace {

Condition* find(void* handle) {
    for (const Graph* graph : graphs()) {
        for (const auto& condition : graph->conditions) {
            if (condition.get() == handle) return condition.get();
        }
    }
    return nullptr;
}

bool allowed(int type, uint32_t size) {
    if (type == Condition::kIf) return size == 1 || size == 2;
    return type == Condition::kSwitch && size > 0;
}

}  // namespace
}  // namespace sim

using namespace sim;

struct aclmdlRICondTaskParams {
    void* handle;
    int type;
    uint32_t size;
    aclmdlRI* models;
};

API aclError aclmdlRICondHandleCreate(aclmdlRI model, uint32_t initial, int flag, void** handle) {
    SIM_CALL();
    // Asked of every one of these functions (CheckCaptureModelSupportCondOp).
    if (!settings().software_queues) {
        return fail(kNotSupported, "conditions need software queues (GRAPHRT_SIM_SOFTWARE_QUEUES)");
    }
    if (flag < 0 || flag > 1) return fail(kParameter, "no such flag of a condition");
    Lock lock(device().mutex);
    auto* graph = static_cast<Graph*>(model);
    if (!graphs().count(graph) || !graph->capturing) {
        return fail(kParameter, "a condition of a graph that is not being captured");
    }
    auto condition = std::make_unique<Condition>();
    condition->graph = graph;
    condition->initial = initial;
    condition->initialised = flag == 1;
    *handle = condition.get();
    graph->conditions.push_back(std::move(condition));
    return kOk;
}

API aclError aclmdlRICondHandleGetCondPtr(void* handle, uint64_t** value) {
    SIM_CALL();
    Lock lock(device().mutex);
    const Condition* condition = find(handle);
    if (!condition) return fail(kParameter, "no such condition");
    *value = condition->value.get();
    return kOk;
}

API aclError aclmdlRIAddCondTask(aclmdlRICondTaskParams given, aclrtStream handle, uint32_t flags) {
    SIM_CALL();
    Lock lock(device().mutex);
    Condition* condition = find(given.handle);
    if (!condition || !given.models || flags) return fail(kParameter, "no such condition, or flags");
    if (given.type == Condition::kWhile) return fail(kNotSupported, "the simulator lacks while-nodes");
    if (!allowed(given.type, given.size)) return fail(kParameter, "no such number of branches");
    if (!condition->branches.empty()) return fail(kParameter, "the condition has a task already");
    Stream& stream = *device().find(handle);
    if (!stream.capture) return fail(kNotCaptured, "the stream is not being captured");
    if (stream.capture != condition->graph) {
        return fail(kParameter, "the stream is captured in another graph than the condition's");
    }
    auto task = std::make_shared<Task>();
    task->name = "condition";
    task->entries = kConditionEntries;
    task->condition = condition;
    if (const aclError error = device().submit(lock, stream, task)) return error;
    condition->type = static_cast<Condition::Type>(given.type);
    for (uint32_t index = 0; index < given.size; index++) {
        auto* branch = new Graph;
        branch->parent = condition->graph;
        branch->capturing = branch->begun = false;
        graphs().insert(branch);
        condition->branches.push_back(branch);
        given.models[index] = branch;
    }
    return kOk;
}

API aclError aclmdlRICaptureToModelRIBegin(aclrtStream handle, aclmdlRI model, int mode) {
    SIM_CALL();
    Lock lock(device().mutex);
    auto* graph = static_cast<Graph*>(model);
    Stream& stream = *device().find(handle);
    if (!graphs().count(graph) || !graph->parent) return fail(kParameter, "no branch of a graph");
    if (graph->begun) return fail(kModelCaptured, "the branch has been captured already");
    if (&stream == device().default_stream()) {
        return fail(kNotSupported, "the default stream cannot be captured");
    }
    if (stream.capture) return fail(kStreamCaptured, "the stream is being captured already");
    return begin_capture(graph, stream, mode);
}
