// What the environment selects; read once.
#pragma once

#include <cstddef>
#include <string>

namespace sim {

// How the device picks the next task among its streams: by default it stays on
// one as long as that can go on.
struct Schedule {
    bool lazy = false;     // works only while the host waits
    bool single = false;   // has one queue: tasks run in the order they were submitted in
    int seed = -1;         // picks at random, unless negative
    int slow_stream = -1;  // goes on only when no other stream can
};

// "eager", "lazy", "single", "random:SEED", "lazy-random:SEED" or "slow:STREAM"; false for anything else.
bool parse_schedule(const std::string& text, Schedule& schedule);

struct Settings {
    Schedule schedule;               // GRAPHRT_SIM_SCHEDULE
    int streams = 1984;              // GRAPHRT_SIM_STREAMS
    int queue_depth = 2048;          // GRAPHRT_SIM_QUEUE_DEPTH
    int events = 65536;              // GRAPHRT_SIM_EVENTS
    int hang_ms = 3000;              // GRAPHRT_SIM_HANG_MS
    size_t memory = 4ull << 30;      // GRAPHRT_SIM_MEMORY_MB
    std::string soc = "Ascend910B3"; // GRAPHRT_SIM_SOC
    std::string cann = "8.5.0";      // GRAPHRT_SIM_CANN
    bool update_first = false;       // GRAPHRT_SIM_UPDATE_FIRST
    bool software_queues = false;    // GRAPHRT_SIM_SOFTWARE_QUEUES
    bool allocating_updates = false; // GRAPHRT_SIM_ALLOCATING_UPDATES
    bool log = false;                // GRAPHRT_SIM_LOG
};

const Settings& settings();

}  // namespace sim
