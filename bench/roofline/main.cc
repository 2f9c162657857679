// roofline_probe RING_BYTES SAMPLE_SECONDS: reads requests from stdin, a line each, and answers each with a
// line of JSON. bench/roofline.py decides their number and order.
//
// - about: compiled, supported and selected instruction sets
// - peak INDEX THREADS: a loop of about's list
// - read BYTES THREADS: 64 KiB a call, going round in BYTES of the ring for each thread
// - gemm ROWS DEPTH COLUMNS hot|streamed THREADS
// - attention|attention_bfloat16|attention_int8 ROWS POSITION HEADS KV_HEADS HEAD_DIM THREADS
// - rms_norm|quantize|silu_mul ROWS WIDTH THREADS
//
// All but about are answered {"calls": of each thread, "seconds": for all of them}. Each measurement is
// kept, with its operands.
#include <cstdio>
#include <exception>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "kernels/isa.h"
#include "measure.h"
#include "peaks.h"

namespace chunkrt::roofline {
namespace {

constexpr std::size_t kMostThreads = 4096;
constexpr std::size_t kReadPiece = 65536;

struct Case {
  Body body;
  std::size_t num_threads;
  std::size_t calls;
};

struct PeakRow {
  const PeakTable* table;
  const Peak* peak;
};

std::vector<PeakRow> runnable_peaks() {
  std::vector<PeakRow> rows;
  const PeakTables built = built_peaks();
  for (std::size_t i = 0; i < built.count; ++i) {
    const PeakTable& table = *built.tables[i];
    for (std::size_t j = 0; is_supported(table) && j < table.num_peaks; ++j)
      rows.push_back({&table, &table.peaks[j]});
  }
  return rows;
}

std::string about() {
  std::ostringstream out;
  out << R"({"architecture": ")" << architecture() << R"(", "peaks": [)";
  const char* separator = "";
  for (const PeakRow& row : runnable_peaks()) {
    out << separator << R"({"isa": ")" << row.table->isa << R"(", "kind": ")" << row.peak->kind
        << R"(", "instructions": ")" << row.peak->instructions << R"(", "mix": ")" << row.peak->mix
        << R"(", "work": )" << row.peak->work << "}";
    separator = ", ";
  }
  out << R"(], "selected": {)";
  separator = "";
  for (const char* kernel :
       {"gemm", "attention", "attention_bfloat16", "attention_int8", "rms_norm", "quantize", "silu_mul"}) {
    out << separator << '"' << kernel << R"(": ")" << selected_isa(kernel) << '"';
    separator = ", ";
  }
  out << "}}";
  return out.str();
}

// The words of a line after the first; whole numbers, except the fourth of "gemm".
class Words {
 public:
  explicit Words(const std::string& line) : line_(line), stream_(line) {}

  std::string text() {
    std::string word;
    if (!(stream_ >> word)) throw std::invalid_argument("too few words in '" + line_ + "'");
    return word;
  }

  // From 1 on, or 0 where that is allowed.
  std::size_t number(bool may_be_zero = false) {
    const std::string word = text();
    constexpr std::size_t kMostDigits = 12;
    if (word.size() > kMostDigits || word.find_first_not_of("0123456789") != std::string::npos ||
        (!may_be_zero && word.find_first_not_of('0') == std::string::npos)) {
      throw std::invalid_argument("'" + word + "' is no size, in '" + line_ + "'");
    }
    return std::stoull(word);
  }

  std::size_t threads() {
    const std::size_t count = number();
    std::string rest;
    if (count > kMostThreads || stream_ >> rest) throw std::invalid_argument("cannot do '" + line_ + "'");
    return count;
  }

 private:
  const std::string& line_;
  std::istringstream stream_;
};

Case make_case(const std::string& line, const Ring& ring) {
  Words words(line);
  const std::string what = words.text();
  if (what == "peak") {
    const std::size_t index = words.number(true), threads = words.threads();
    const std::vector<PeakRow> rows = runnable_peaks();
    if (index >= rows.size()) throw std::invalid_argument("there is no peak " + std::to_string(index));
    return {[run = rows[index].peak->run](std::size_t, std::size_t calls) { run(calls); }, threads, 0};
  }
  if (what == "read") {
    const std::size_t bytes = words.number(), threads = words.threads();
    if (bytes % kReadPiece != 0 || bytes > ring.num_bytes / threads) {
      throw std::invalid_argument("'" + line +
                                  "': expected a multiple of 65536, and no more than the ring's share");
    }
    const auto next = std::make_shared<std::vector<std::size_t>>(threads);  // each thread's place
    return {[=, data = ring.bytes, read = widest_read()](std::size_t thread, std::size_t calls) {
              std::size_t offset = (*next)[thread];
              for (; calls > 0; --calls) {
                read(data + thread * bytes + offset, kReadPiece);
                offset += kReadPiece;
                if (offset == bytes) offset = 0;
              }
              (*next)[thread] = offset;
            },
            threads, 0};
  }
  if (what == "gemm") {
    const std::size_t rows = words.number(), depth = words.number(), columns = words.number();
    const std::string weights = words.text();
    if (weights != "hot" && weights != "streamed") {
      throw std::invalid_argument("weights are 'hot' or 'streamed', not '" + weights + "'");
    }
    const std::size_t threads = words.threads();
    return {gemm(ring, threads, rows, depth, columns, weights == "streamed"), threads, 0};
  }
  const std::map<std::string, AttentionMath> attentions = {{"attention", AttentionMath::float32},
                                                           {"attention_bfloat16", AttentionMath::bfloat16},
                                                           {"attention_int8", AttentionMath::int8}};
  if (const auto found = attentions.find(what); found != attentions.end()) {
    const std::size_t rows = words.number(), position = words.number(true), heads = words.number();
    const std::size_t kv_heads = words.number(), head_dim = words.number(), threads = words.threads();
    return {attention(threads, rows, position, heads, kv_heads, head_dim, found->second), threads, 0};
  }
  const std::map<std::string, Body (*)(std::size_t, std::size_t, std::size_t)> row_kernels = {
      {"rms_norm", rms_norm}, {"quantize", quantize}, {"silu_mul", silu_mul}};
  if (const auto kernel = row_kernels.find(what); kernel != row_kernels.end()) {
    const std::size_t rows = words.number(), width = words.number(), threads = words.threads();
    return {kernel->second(threads, rows, width), threads, 0};
  }
  throw std::invalid_argument("'" + line + "' is not a known request");
}

void serve(const Ring& ring, double sample_seconds) {
  std::map<std::string, Case> cases;
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "about") {
      std::printf("%s\n", about().c_str());
    } else {
      auto found = cases.find(line);
      if (found == cases.end()) {
        found = cases.emplace(line, make_case(line, ring)).first;
        Case& fresh = found->second;
        fresh.calls = find_calls(fresh.body, sample_seconds);
      }
      const Case& one = found->second;
      const double seconds = measure(one.body, one.num_threads, one.calls);
      std::printf(R"({"calls": %zu, "seconds": %.9f})"
                  "\n",
                  one.calls, seconds);
    }
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace chunkrt::roofline

int main(int argc, char** argv) {
  try {
    if (argc != 3) throw std::invalid_argument("expected two arguments, RING_BYTES and SAMPLE_SECONDS");
    chunkrt::roofline::serve(chunkrt::roofline::Ring(std::stoull(argv[1])), std::stod(argv[2]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "roofline_probe: %s\n", error.what());
    return 1;
  }
}
