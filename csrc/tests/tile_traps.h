// Emulates AMX instructions on processors without AMX: there they are illegal instructions, and a signal
// handler emulates them. So the tests cover the compiled code, including its encodings and addresses.
#pragma once

namespace chunkrt::testing {

// While an object exists, the tile instructions of this thread run, on the processor or in the handler. Only
// one object may exist at a time.
class TileTraps {
 public:
  TileTraps();
  ~TileTraps();
  TileTraps(const TileTraps&) = delete;
  TileTraps& operator=(const TileTraps&) = delete;
};

}  // namespace chunkrt::testing
