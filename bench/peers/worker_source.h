// The text of peer_worker.py, so that the command needs no other file.
#pragma once

namespace ladon::bench {

extern const char* const kPeerWorkerSource;

}  // namespace ladon::bench
