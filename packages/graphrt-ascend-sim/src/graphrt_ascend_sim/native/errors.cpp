#include "errors.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "settings.h"

namespace sim {
namespace {

// Never destroyed: torch_npu asks for the last error while the process exits.
std::string& recent() {
    static thread_local std::string* text = new std::string;
    return *text;
}

struct Calls {
    unsigned long long made = 0;
    std::map<unsigned long long, aclError> failing;  // by number of the call
};

// Of its own lock: the functions count before they take that of the device.
struct Counter {
    std::mutex mutex;
    std::map<std::string, Calls> calls;
};

// "FUNCTION:N=CODE,..." of the environment, which was checked in Python.
Counter* counter_from(const char* text) {
    auto* counter = new Counter;
    std::stringstream parts(text ? text : "");
    for (std::string part; std::getline(parts, part, ',');) {
        const size_t colon = part.find(':'), equals = part.find('=');
        if (colon == std::string::npos || equals == std::string::npos) continue;
        const auto nth = std::strtoull(part.c_str() + colon + 1, nullptr, 10);
        counter->calls[part.substr(0, colon)].failing[nth] = std::atoi(part.c_str() + equals + 1);
    }
    return counter;
}

Counter& counter() {
    static Counter* only = counter_from(std::getenv("GRAPHRT_SIM_FAIL"));
    return *only;
}

}  // namespace

aclError fail(aclError code, const std::string& text) {
    recent() = "[simulator] " + text + " (code " + std::to_string(code) + ")";
    log(recent());
    return code;
}

void log(const std::string& line) {
    if (settings().log) std::fprintf(stderr, "[simulator] %s\n", line.c_str());
}

aclError counted(const char* function) {
    unsigned long long nth = 0;
    aclError code = kOk;
    {
        std::lock_guard<std::mutex> lock(counter().mutex);
        Calls& calls = counter().calls[function];
        nth = ++calls.made;
        const auto found = calls.failing.find(nth);
        if (found == calls.failing.end()) return kOk;
        code = found->second;
        calls.failing.erase(found);
    }
    return fail(code, std::string(function) + " was made to fail at call " + std::to_string(nth));
}

}  // namespace sim

API const char* aclGetRecentErrMsg() { return sim::recent().c_str(); }

// Of the operator library.
API aclError graphrt_sim_fail(aclError code, const char* text) { return sim::fail(code, text); }
API aclError graphrt_sim_counted(const char* function) { return sim::counted(function); }

// For tests, through ctypes.
API unsigned long long graphrt_sim_calls(const char* function) {
    std::lock_guard<std::mutex> lock(sim::counter().mutex);
    return sim::counter().calls[function].made;
}

API void graphrt_sim_fail_call(const char* function, unsigned long long nth, aclError code) {
    std::lock_guard<std::mutex> lock(sim::counter().mutex);
    sim::Calls& calls = sim::counter().calls[function];
    calls.failing[calls.made + nth] = code;
}

API void graphrt_sim_fail_nothing() {
    std::lock_guard<std::mutex> lock(sim::counter().mutex);
    for (auto& [name, calls] : sim::counter().calls) calls.failing.clear();
}
