// Packed experts in the data files of an exported folder, which an engine has no bytes of (quant_moe.def,
// docs/reference/expert-offloading.md). The environment says where the folder is, and what of them goes to the GPU's
// memory.
#pragma once
#include <array>
#include <memory>

#include "experts/device_experts.h"
#include "planned.h"

namespace quantmoe {

class ExpertFolder;

// The experts of a layer. All layers of a folder share the device's memory.
class ExternalExperts {
 public:
  // Null where they are the node's inputs. Throws std::invalid_argument for attributes that contradict each other.
  static std::shared_ptr<ExternalExperts> of(const PluginLayer& layer, const qm_moe& moe);
  ~ExternalExperts();

  // For an engine that runs: maps the files. A missing folder, file or byte, other bytes than at export, and a wrong
  // setting are logged and kept as its failure. Then calls of the layer fail, because TensorRT 10.6 crashes if no
  // plug-in is made.
  void open(const PluginLayer& layer, const qm_moe& moe);
  const std::string& failure() const { return failure_; }  // "": none

  // Sets the shapes of w13 and w2, and the slots of a cache.
  void describe(NodeProblem* problem) const;
  // Of those that are open: where w13 is mapped, what the folder's layers have of the device, the layer's number there.
  const void* w13() const { return rows_[0]; }
  DeviceExperts& experts() const;
  int number() const { return number_; }

 private:
  struct Part {  // a projection's rows
    std::string name, file;
    int64_t offset = 0, bytes = 0;
  };
  friend class ExpertFolder;
  ExternalExperts() = default;
  static Part parse(const std::string& name, const char* text);
  void find(const PluginLayer& layer, const qm_moe& moe);

  Part parts_[2];
  int64_t count_ = 0;  // rows of w13, and of w2
  std::array<int64_t, 2> row_bytes_{};
  std::shared_ptr<ExpertFolder> folder_;
  const void* rows_[2] = {};
  int number_ = 0;
  std::string failure_;
};

}  // namespace quantmoe
