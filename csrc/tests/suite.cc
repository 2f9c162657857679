#include "tests/suite.h"

#include <cstdio>

namespace chunkrt::testing {

void check_same(const float* found, const float* expected, std::size_t count, const std::string& what) {
  for (std::size_t i = 0; i < count; ++i) {
    if (same(found[i], expected[i])) continue;
    char text[128];
    std::snprintf(text, sizeof(text), ": element %zu is %.9g (%a), expected %.9g (%a)", i,
                  static_cast<double>(found[i]), static_cast<double>(found[i]),
                  static_cast<double>(expected[i]), static_cast<double>(expected[i]));
    throw Failure(what + text);
  }
}

bool Suite::is_wanted(const std::string& name) const {
  const bool excludes = filter_.starts_with('-');
  return (name.find(filter_.substr(excludes ? 1 : 0)) == std::string::npos) == excludes;
}

void Suite::run(const std::string& name, const std::function<void()>& test) {
  if (!is_wanted(name)) return;
  try {
    test();
    ++num_passed_;
    std::printf("passed: %s\n", name.c_str());
  } catch (const std::exception& error) {
    ++num_failed_;
    std::printf("FAILED: %s: %s\n", name.c_str(), error.what());
  }
  std::fflush(stdout);
}

void Suite::skip(const std::string& name, const std::string& reason) {
  if (!is_wanted(name)) return;
  ++num_skipped_;
  std::printf("%s: skipped: %s\n", name.c_str(), reason.c_str());
}

int Suite::finish() const {
  std::printf("%zu passed, %zu failed, %zu skipped\n", num_passed_, num_failed_, num_skipped_);
  return num_failed_ > 0 || num_passed_ == 0 ? 1 : 0;
}

}  // namespace chunkrt::testing
