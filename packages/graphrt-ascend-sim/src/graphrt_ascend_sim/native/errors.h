// The last error of a thread, as CANN reports it.
#pragma once

#include <string>

#include "abi.h"

namespace sim {

// Remembers `text` for aclGetRecentErrMsg() and returns `code`.
aclError fail(aclError code, const std::string& text);

// One line on stderr, if GRAPHRT_SIM_LOG is set.
void log(const std::string& line);

}  // namespace sim
