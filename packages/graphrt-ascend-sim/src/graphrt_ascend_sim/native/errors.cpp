#include "errors.h"

#include <cstdio>

#include "settings.h"

namespace sim {
namespace {

// Never destroyed: torch_npu asks for the last error while the process exits.
std::string& recent() {
    static thread_local std::string* text = new std::string;
    return *text;
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

}  // namespace sim

API const char* aclGetRecentErrMsg() { return sim::recent().c_str(); }

// Of the operator library.
API aclError graphrt_sim_fail(aclError code, const char* text) { return sim::fail(code, text); }
