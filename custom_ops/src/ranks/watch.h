// Tells a rank of a sliced model, over TCP, when another rank is gone or has failed. What a GPU waits for then never
// comes, and NCCL does not notice a process that is killed on its own host. Rank 0 has a connection with each other
// rank, and tells them. Nothing here knows CUDA, NCCL or ONNX Runtime.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace quantmoe {

// What a watch asks of what it watches, and does to it. Called by the watch's thread.
struct Watched {
  std::function<std::string()> error;                   // of the connections between the GPUs; "": none
  std::function<bool()> busy;                           // whether work of this rank has not ended
  std::function<void(const std::string& why)> give_up;  // ends that work with an error; called once at most
};

class Watch {
 public:
  // What a rank says of itself to all others.
  static constexpr size_t kCardSize = 1024;
  // Gives own cards of all ranks for this one's.
  using Exchange = std::function<std::vector<std::string>(const std::string& card)>;

  // Meets the others. `release`, and the file's export, is one text in all ranks. Throws std::runtime_error, naming the
  // rank, where it is not or one is not reached.
  Watch(int32_t rank, int32_t world, const std::string& release, std::chrono::seconds patience,
        const Exchange& exchange, Watched watched);
  // Tells the others that this rank's session ends.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  // Ends what all ranks wait for: this one has failed. The first reason counts; the watch's thread tells the others.
  void fail_all(const std::string& why);
  // Why no sum can be had any more; "": it can.
  std::string failure() const;

 private:
  struct Peer {
    int32_t rank;
    int socket;
  };

  void accept_all(int listener, const std::string& token, std::chrono::seconds patience);
  void connect_to(const std::string& card, std::chrono::seconds patience);
  void run();
  void listen_to(Peer& peer);
  void tell(int32_t rank, const std::string& why);
  void fail(int32_t rank, const std::string& why);
  std::string take_untold();
  void close_all();

  const int32_t rank_, world_;
  const Watched watched_;
  std::vector<Peer> peers_;  // of rank 0 all others, of these rank 0
  int wake_ = -1;            // the thread ends when this can be read
  mutable std::mutex mutex_;
  std::string failure_;
  std::string untold_;  // of it what the others do not know yet
  std::thread thread_;
};

}  // namespace quantmoe
