#include "settings.h"

#include <cstdio>
#include <cstdlib>

namespace sim {
namespace {

long number(const char* name, long otherwise) {
    const char* text = std::getenv(name);
    return text && *text ? std::atol(text) : otherwise;
}

Settings* read() {
    auto* read = new Settings;
    if (const char* text = std::getenv("GRAPHRT_SIM_SCHEDULE")) {
        if (!parse_schedule(text, read->schedule)) {
            std::fprintf(stderr, "GRAPHRT_SIM_SCHEDULE=%s: no such schedule\n", text);
            std::_Exit(2);
        }
    }
    read->streams = static_cast<int>(number("GRAPHRT_SIM_STREAMS", read->streams));
    read->queue_depth = static_cast<int>(number("GRAPHRT_SIM_QUEUE_DEPTH", read->queue_depth));
    read->events = static_cast<int>(number("GRAPHRT_SIM_EVENTS", read->events));
    read->hang_ms = static_cast<int>(number("GRAPHRT_SIM_HANG_MS", read->hang_ms));
    const long megabytes = static_cast<long>(read->memory >> 20);
    read->memory = static_cast<size_t>(number("GRAPHRT_SIM_MEMORY_MB", megabytes)) << 20;
    if (const char* soc = std::getenv("GRAPHRT_SIM_SOC")) read->soc = soc;
    if (const char* cann = std::getenv("GRAPHRT_SIM_CANN"); cann && *cann) read->cann = cann;
    read->update_first = number("GRAPHRT_SIM_UPDATE_FIRST", 0) != 0;
    read->software_queues = number("GRAPHRT_SIM_SOFTWARE_QUEUES", 0) != 0;
    read->allocating_updates = number("GRAPHRT_SIM_ALLOCATING_UPDATES", 0) != 0;
    read->log = number("GRAPHRT_SIM_LOG", 0) != 0;
    return read;
}

}  // namespace

bool parse_schedule(const std::string& text, Schedule& schedule) {
    const size_t colon = text.find(':');
    const std::string kind = text.substr(0, colon);
    const bool has_number = colon != std::string::npos;
    const int number = has_number ? std::atoi(text.c_str() + colon + 1) : -1;
    Schedule parsed;
    parsed.lazy = kind == "lazy" || kind == "lazy-random";
    parsed.single = kind == "single";
    const bool plain = kind == "eager" || kind == "lazy" || kind == "single";
    if (kind == "random" || kind == "lazy-random") {
        parsed.seed = number;
    } else if (kind == "slow") {
        parsed.slow_stream = number;
    } else if (has_number || !plain) {
        return false;
    }
    if (!plain && number < 0) return false;
    schedule = parsed;
    return true;
}

// Never destroyed: the device thread may still read it while the process exits.
const Settings& settings() {
    static const Settings* values = read();
    return *values;
}

}  // namespace sim
