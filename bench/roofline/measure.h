// Timing: threads that start together, and the number of their repetitions.
#pragma once

#include <cstddef>
#include <functional>

namespace chunkrt::roofline {

// Does `calls` calls as one of several threads, which are numbered from 0.
using Body = std::function<void(std::size_t thread, std::size_t calls)>;

// Seconds from the first thread's start to the last one's end, every thread doing `calls` calls.
double measure(const Body& body, std::size_t num_threads, std::size_t calls);

// Returns the number of calls that take one thread about this long.
std::size_t find_calls(const Body& body, double seconds);

}  // namespace chunkrt::roofline
