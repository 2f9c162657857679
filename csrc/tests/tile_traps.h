// AMX's instructions on processors that lack them: each is an illegal instruction there, and a signal handler
// does what it would have done. So what is tested is what was compiled, its encodings and addresses with it.
#pragma once

namespace chunkrt::testing {

// While one exists, this thread's tile instructions run, by the processor or by the handler. One at a time.
class TileTraps {
 public:
  TileTraps();
  ~TileTraps();
  TileTraps(const TileTraps&) = delete;
  TileTraps& operator=(const TileTraps&) = delete;
};

}  // namespace chunkrt::testing
