#include "comm/world.h"

#include <numeric>
#include <utility>

#include "base/check.h"
#include "device/cpu/thread_pool.h"

namespace fathom {

World::World(WorldLayout layout, WorldToken token, RankConnections&& connections,
             std::unique_ptr<ControlChannel> control, AbortWord& abort_word)
    : layout_(std::move(layout)),
      token_(token),
      abort_word_(abort_word),
      control_(std::move(control)) {
  const int own = layout_.ranks_of_node[layout_.node_rank];
  for (auto& [ranks, fd] : connections) {
    auto& links = links_[ranks.first];
    if (links == nullptr) links = std::make_shared<PeerLinks>(abort_word_, own <= usable_cores());
    links->add(ranks.second, std::move(fd));
  }
}

void World::send(int node, std::span<const std::byte> message) {
  FATHOM_CHECK(control_ != nullptr, "a message to node {} of a world of one node", node);
  control_->send(node, message);
}

std::optional<std::vector<std::byte>> World::receive(int node) {
  FATHOM_CHECK(control_ != nullptr, "a message of node {} of a world of one node", node);
  return control_->receive(node);
}

void World::wait_until_told(std::chrono::nanoseconds limit) {
  if (control_ != nullptr) control_->wait_until_told(limit);
}

std::vector<std::unique_ptr<Group>> World::make_groups(GroupOptions options) {
  if (options.world_ranks.empty()) {
    options.world_ranks.resize(size());
    std::iota(options.world_ranks.begin(), options.world_ranks.end(), 0);
  }
  int locals = 0, last = -1;
  std::vector<int> local_of;
  for (const int rank : options.world_ranks) {
    FATHOM_CHECK(rank > last && rank < size(), "group {} of rank {} after {} of {}", options.name,
                 rank, last, size());
    last = rank;
    local_of.push_back(layout_.is_local(rank) ? locals++ : -1);
  }
  std::vector<std::unique_ptr<Group>> groups;
  if (locals == 0) return groups;
  const auto board = std::make_shared<MeetingBoard>(locals, abort_word_);
  for (int rank = 0; rank < static_cast<int>(local_of.size()); ++rank) {
    if (local_of[rank] < 0) continue;
    const auto links = links_.find(options.world_ranks[rank]);
    groups.push_back(std::make_unique<Group>(
        rank, board, local_of,
        RemoteRanks{links == links_.end() ? nullptr : links->second, token_.high}, abort_word_,
        options));
  }
  return groups;
}

}  // namespace fathom
