#include "ranks/watch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "ranks/hex.h"

namespace quantmoe {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kTick{500};
// A GPU that is busy for so long after a rank went waits for it. Sums whose parts had all come end long before.
constexpr std::chrono::seconds kStuck{3};
constexpr size_t kTokenSize = 32;

// What a rank says of itself, or rank 0 of another: after it no sum can be had.
struct Message {
  int32_t rank;
  char why[508];  // ends with a NUL
};
constexpr const char* kGone = "is gone: its process has ended, or its host is not reached";

struct Hello {
  char token[kTokenSize];
  int32_t rank;
};

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

[[noreturn]] void fail_to(const std::string& what) {
  throw std::runtime_error("cannot " + what + ": " + std::strerror(errno));
}

bool wait_for(int fd, short events, std::chrono::milliseconds time) {
  pollfd one{fd, events, 0};
  return poll(&one, 1, static_cast<int>(time.count())) == 1;
}

bool send_all(int fd, const void* data, size_t size) {
  return send(fd, data, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size);
}

bool receive_all(int fd, void* data, size_t size, std::chrono::milliseconds time) {
  for (size_t at = 0; at < size;) {
    if (!wait_for(fd, POLLIN, time)) return false;
    const ssize_t got = recv(fd, static_cast<char*>(data) + at, size - at, 0);
    if (got <= 0) return false;
    at += static_cast<size_t>(got);
  }
  return true;
}

// The kernel's own probes: a host that is gone, which sends no end, is noticed after 16 s.
void keep_alive(int fd) {
  const int yes = 1, idle = 4, between = 4, count = 3;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof(between));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

Socket listener(int family) {
  Socket one(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (one.get() < 0) return one;
  sockaddr_storage any{};
  any.ss_family = static_cast<sa_family_t>(family);
  const int no = 0;
  if (family == AF_INET6) setsockopt(one.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
  const socklen_t size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  if (bind(one.get(), reinterpret_cast<sockaddr*>(&any), size) || listen(one.get(), SOMAXCONN)) return Socket();
  return one;
}

int port_of(int fd) {
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size)) fail_to("read a socket's name");
  // sin6_port is at the same place.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&own)->sin_port);
}

// This host's, the loopback's last: on another host it is that one's own.
std::vector<std::string> addresses() {
  std::vector<std::string> found, own;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all)) fail_to("list this host's addresses");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owned(all, freeifaddrs);
  for (const ifaddrs* one = all; one; one = one->ifa_next) {
    if (!one->ifa_addr || !(one->ifa_flags & IFF_UP)) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char text[NI_MAXHOST];
    const socklen_t size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    if (getnameinfo(one->ifa_addr, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST)) continue;
    if (std::strchr(text, '%')) continue;  // an address of one link
    (one->ifa_flags & IFF_LOOPBACK ? own : found).push_back(text);
  }
  found.insert(found.end(), own.begin(), own.end());
  return found;
}

std::string random_token() {
  unsigned char bytes[kTokenSize / 2];
  if (getrandom(bytes, sizeof(bytes), 0) != static_cast<ssize_t>(sizeof(bytes))) fail_to("have random bytes");
  return to_hex(bytes, sizeof(bytes));
}

// A connection; none, when there is no such host or nobody listens.
Socket try_to_connect(const std::string& address, const std::string& port, std::chrono::milliseconds time) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(address.c_str(), port.c_str(), &hints, &list)) return Socket();
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(list, freeaddrinfo);
  Socket one(socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (one.get() < 0) return one;
  int error = 0;
  socklen_t size = sizeof(error);
  if (connect(one.get(), list->ai_addr, list->ai_addrlen) &&
      (errno != EINPROGRESS || !wait_for(one.get(), POLLOUT, time) ||
       getsockopt(one.get(), SOL_SOCKET, SO_ERROR, &error, &size) || error))
    return Socket();
  fcntl(one.get(), F_SETFL, fcntl(one.get(), F_GETFL) & ~O_NONBLOCK);
  return one;
}

}  // namespace

Watch::Watch(int32_t rank, int32_t world, const std::string& release, std::chrono::seconds patience,
             const Exchange& exchange, Watched watched)
    : rank_(rank), world_(world), watched_(std::move(watched)) {
  Socket door;
  std::string token, card = release + "\n";
  if (rank == 0) {
    door = listener(AF_INET6);
    if (door.get() < 0) door = listener(AF_INET);
    if (door.get() < 0) fail_to("listen for the other ranks");
    token = random_token();
    card += token + " " + std::to_string(port_of(door.get()));
    for (const std::string& address : addresses())
      if (card.size() + address.size() + 2 < kCardSize) card += " " + address;
  }
  const std::vector<std::string> cards = exchange(card);
  for (size_t other = 0; other < cards.size(); ++other)
    if (const std::string found = cards[other].substr(0, cards[other].find('\n')); found != release)
      throw std::runtime_error("rank " + std::to_string(other) + " is of " + found + ", rank " + std::to_string(rank) +
                               " of " + release);
  try {
    if (rank == 0)
      accept_all(door.get(), token, patience);
    else
      connect_to(cards[0], patience);
    wake_ = eventfd(0, EFD_CLOEXEC);
    if (wake_ < 0) fail_to("make an eventfd");
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    close_all();
    throw;
  }
}

Watch::~Watch() {
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) == sizeof(one)) thread_.join();
  close_all();
}

void Watch::close_all() {
  for (const Peer& peer : peers_) close(peer.socket);
  peers_.clear();
  if (wake_ >= 0) close(wake_);
}

void Watch::accept_all(int listener, const std::string& token, std::chrono::seconds patience) {
  const auto end = Clock::now() + patience;
  while (peers_.size() + 1 < static_cast<size_t>(world_)) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    if (left.count() <= 0 || !wait_for(listener, POLLIN, left))
      throw std::runtime_error("rank 0 waited " + std::to_string(patience.count()) +
                               " s for connections of the other " + std::to_string(world_ - 1) + " ranks, " +
                               std::to_string(peers_.size()) + " came");
    Socket one(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    Hello hello{};
    // Whoever else found the port says no token.
    if (one.get() < 0 || !receive_all(one.get(), &hello, sizeof(hello), std::chrono::seconds(2))) continue;
    if (std::memcmp(hello.token, token.data(), kTokenSize) != 0) continue;
    if (!send_all(one.get(), &hello, sizeof(hello))) continue;
    keep_alive(one.get());
    peers_.push_back({hello.rank, one.release()});
  }
}

void Watch::connect_to(const std::string& card, std::chrono::seconds patience) {
  std::istringstream words(card.substr(card.find('\n') + 1));
  std::string token, port, address, tried;
  words >> token >> port;
  while (words >> address) {
    Socket one = try_to_connect(address, port, std::chrono::seconds(3));
    Hello hello{};
    std::memcpy(hello.token, token.data(), std::min(token.size(), kTokenSize));
    hello.rank = rank_;
    const Hello sent = hello;
    if (one.get() >= 0 && send_all(one.get(), &hello, sizeof(hello)) &&
        receive_all(one.get(), &hello, sizeof(hello), patience) &&
        std::memcmp(hello.token, sent.token, kTokenSize) == 0) {
      keep_alive(one.get());
      peers_.push_back({0, one.release()});
      return;
    }
    tried += " " + address;
  }
  throw std::runtime_error("rank " + std::to_string(rank_) + " reaches rank 0 at none of its addresses:" + tried +
                           ", port " + port);
}

std::string Watch::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Watch::fail(int32_t rank, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) return;
  failure_ = "rank " + std::to_string(rank) + " " + why;
  if (rank == rank_) untold_ = why;
}

std::string Watch::take_untold() {
  const std::lock_guard lock(mutex_);
  return std::exchange(untold_, "");
}

void Watch::fail_all(const std::string& why) { fail(rank_, "has failed: " + why); }

// Hears that a rank is gone or has failed: of itself, which says so or whose connections the system closes, or of
// another.
void Watch::listen_to(Peer& peer) {
  Message message{};
  if (!receive_all(peer.socket, &message, sizeof(message), kTick)) {
    message.rank = peer.rank;
    std::strcpy(message.why, kGone);
  }
  message.why[sizeof(message.why) - 1] = 0;
  if (message.rank == peer.rank) close(std::exchange(peer.socket, -1));
  std::erase_if(peers_, [](const Peer& one) { return one.socket < 0; });
  if (rank_ == 0) tell(message.rank, message.why);
  fail(message.rank, message.why);
}

void Watch::tell(int32_t rank, const std::string& why) {
  Message message{rank, {}};
  why.copy(message.why, sizeof(message.why) - 1);
  for (const Peer& peer : peers_) (void)send_all(peer.socket, &message, sizeof(message));
}

void Watch::run() {
  Clock::time_point idle = Clock::now();  // when work was last seen to have ended
  bool gave_up = false;
  for (;;) {
    std::vector<pollfd> all{{wake_, POLLIN, 0}};
    for (const Peer& peer : peers_) all.push_back({peer.socket, POLLIN, 0});
    poll(all.data(), all.size(), static_cast<int>(kTick.count()));
    const std::string own = take_untold();
    if (!own.empty()) tell(rank_, own);
    if (all[0].revents) {
      if (own.empty()) tell(rank_, "has ended its session");
      return;
    }
    for (size_t i = all.size() - 1; i > 0; --i)
      if (all[i].revents) listen_to(peers_[i - 1]);
    if (const std::string error = failure().empty() ? watched_.error() : ""; !error.empty()) fail_all(error);
    const std::string why = failure();
    const auto now = Clock::now();
    if (why.empty() || gave_up || !watched_.busy()) {
      idle = now;
    } else if (now - idle >= kStuck) {
      gave_up = true;
      watched_.give_up(why);
    }
  }
}

}  // namespace quantmoe
