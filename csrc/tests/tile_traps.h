// AMX's instructions on processors that lack them: each is an illegal instruction there, which a signal
// handler emulates. So the tests cover the compiled code, including its encodings and addresses.
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
