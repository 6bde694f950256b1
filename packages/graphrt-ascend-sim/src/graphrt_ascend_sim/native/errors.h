// The last error of a thread, as CANN reports it, and the errors that a test asks for.
#pragma once

#include <string>

#include "abi.h"

namespace sim {

// Remembers `text` for aclGetRecentErrMsg() and returns `code`.
aclError fail(aclError code, const std::string& text);

// One line on stderr, if GRAPHRT_SIM_LOG is set.
void log(const std::string& line);

// Counts a call of `function`; the code with which a test wants this one to fail, or kOk.
aclError counted(const char* function);

}  // namespace sim

// The first line of every function of the interface. A call that is made to fail does nothing.
#define SIM_CALL() \
    if (aclError wanted_ = sim::counted(__func__)) return wanted_
