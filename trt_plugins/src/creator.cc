// A creator for each operator of op.def: reads a layer's fields, TensorRT's parser's or an engine's.
#include <cstring>
#include <string_view>

#include "plugin.h"

namespace quantmoe {
namespace {

// The attributes of any operator; the version is the first of each.
union Node {
  int32_t op_version;
#define QM_OP(op, name, version) qm_##name name;
#include "op.def"
};

// Strings that a node of the operator may lack.
std::vector<std::string> strings_of(std::string_view op) {
  std::vector<std::string> names;
#define QM_STRING(of, name) \
  if (op == #of) names.emplace_back(#name);
#include "op.def"
  return names;
}
// As above for its projections, which say more about the bytes of the inputs.
std::vector<std::string> projection_strings_of(std::string_view op) {
  constexpr const char* kNames[] = {
#define QM_PROJECTION_OPTIONAL(kind, name) "_" #name,
#include "op.def"
  };
  std::vector<std::string> names;
#define QM_PROJECTION(of, prefix) \
  for (const char* name : kNames) \
    if (op == #of) names.push_back(std::string(#prefix) + name);
#include "op.def"
  return names;
}

class Creator final : public IPluginCreatorV3One {
 public:
  explicit Creator(const char* op) : op_(op), strings_(strings_of(op)), projection_strings_(projection_strings_of(op)) {
    for (size_t i = 0; i < attributes_; ++i)
      fields_.emplace_back(known_.attributes[i].name, nullptr, field_type(known_.attributes[i].kind), 1);
    if (strings_.empty()) projection_strings_.clear();
    for (const auto* names : {&strings_, &projection_strings_})
      for (const std::string& name : *names) fields_.emplace_back(name.c_str(), nullptr, PluginFieldType::kCHAR, 1);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  const char* getPluginName() const noexcept override { return op_; }
  const char* getPluginVersion() const noexcept override { return "1"; }
  // TensorRT's parser looks for creators in the empty namespace, whatever the node's domain is.
  const char* getPluginNamespace() const noexcept override { return ""; }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  IPluginV3* createPlugin(const char* name, const PluginFieldCollection* given, TensorRTPhase phase) noexcept override {
    return guard<IPluginV3*>(op_, nullptr, [&] { return create(name, given, phase == TensorRTPhase::kRUNTIME); });
  }

 private:
  IPluginV3* create(const char* name, const PluginFieldCollection* given, bool runs) const;
  bool read_fields(const PluginFieldCollection* given, bool runs, Node* node, std::vector<Value>* values,
                   int64_t* workspace_bytes, std::string* why) const;
  static PluginFieldType field_type(char kind) {
    return kind == 'i' ? PluginFieldType::kINT32 : kind == 'f' ? PluginFieldType::kFLOAT32 : PluginFieldType::kCHAR;
  }
  const char* op_;
  const qm_operator& known_ = *qm_find_operator(op_);
  const size_t attributes_ = known_.count;
  std::vector<std::string> strings_, projection_strings_;
  std::vector<PluginField> fields_;  // of attributes, then of strings, then of projections' strings
  PluginFieldCollection collection_{};
};

// Sets the attribute of a field, if it is one, and keeps its value; false with the sentence in error.
bool set(const char* op, Node* node, std::vector<Value>* values, const PluginField& expected, const PluginField& field,
         bool attribute, char* error) {
  const bool text = expected.type == PluginFieldType::kCHAR;
  if (field.type != expected.type || !field.data || (text ? field.length < 1 : field.length != 1)) {
    fail(error, QM_INVALID, "attribute %s is of field type %d and length %d, expected one %s", field.name,
         static_cast<int>(field.type), field.length,
         text                                       ? "string"
         : expected.type == PluginFieldType::kINT32 ? "int32"
                                                    : "float32");
    return false;
  }
  const char* data = static_cast<const char*>(field.data);
  if (text) {  // the length counts the NUL, which a damaged plan may lack
    const std::string value(data, strnlen(data, field.length));
    values->push_back({expected.name, expected.type, std::string(value.c_str(), value.size() + 1)});
    const qm_value set{field.name, 's', 0, 0, value.c_str()};
    return !attribute || !qm_set_attributes(op, node, &set, 1, error);
  }
  values->push_back({expected.name, expected.type, std::string(data, 4)});
  const bool real = expected.type == PluginFieldType::kFLOAT32;
  float number;
  int32_t integer;
  std::memcpy(&number, data, sizeof(number));
  std::memcpy(&integer, data, sizeof(integer));
  const qm_value set{field.name, real ? 'f' : 'i', integer, number, nullptr};
  return !qm_set_attributes(op, node, &set, 1, error);
}

// The attributes of a layer; false with the reason in why.
bool Creator::read_fields(const PluginFieldCollection* given, bool runs, Node* node, std::vector<Value>* values,
                          int64_t* workspace_bytes, std::string* why) const {
  auto refuse = [&](const std::string& what) {
    *why = what;
    return false;
  };
  const PluginField* const end = given ? given->fields + given->nbFields : nullptr;
  auto find = [&](const char* attribute) {
    return given ? std::find_if(
                       given->fields, end,
                       [&](const PluginField& field) { return field.name && !std::strcmp(field.name, attribute); })
                 : end;
  };
  char error[QM_ERROR_SIZE];
  // op_version is the first: a file of an earlier one lacks the attributes that came later.
  const auto later = [&](size_t i) {
    return i > 0 && i < attributes_ && known_.attributes[i].since > node->op_version;
  };
  for (size_t i = 0; i < attributes_; ++i) {
    if (later(i)) continue;
    const PluginField* field = find(fields_[i].name);
    if (field == end) return refuse(std::string("attribute ") + fields_[i].name + " is required");
    if (!set(op_, node, values, fields_[i], *field, true, error)) return refuse(error);
  }
  // Attributes of projections are kept only with the operator's. Without them layers that are alike stay so, and a
  // builder times one of them.
  const size_t required = values->size();
  for (size_t i = attributes_; i < fields_.size(); ++i) {
    const PluginField* field = find(fields_[i].name);
    if (field == end || (i >= attributes_ + strings_.size() && values->size() == required)) continue;
    if (!set(op_, node, values, fields_[i], *field, false, error)) return refuse(error);
  }
  *workspace_bytes = 0;
  for (const PluginField* field = given->fields; field != end; ++field) {
    if (!field->name) return refuse("an attribute has no name");
    if (runs && !std::strcmp(field->name, kWorkspaceBytes) && field->type == PluginFieldType::kINT64 && field->data &&
        field->length == 1) {
      std::memcpy(workspace_bytes, field->data, sizeof(*workspace_bytes));
      continue;
    }
    size_t i = 0;
    while (i < fields_.size() && std::strcmp(fields_[i].name, field->name)) ++i;
    if (i == fields_.size() || later(i)) return refuse(std::string("unknown attribute ") + field->name);
  }
  return true;
}

IPluginV3* Creator::create(const char* name, const PluginFieldCollection* given, bool runs) const {
  const std::string layer = std::string(op_) + " layer \"" + (name ? name : "") + "\":";
  auto refuse = [&](const std::string& what) {
    log_message(Severity::kERROR, layer + " " + what);
    return nullptr;
  };
  Node node{};
  std::vector<Value> values;
  int64_t workspace_bytes;
  if (std::string why; !read_fields(given, runs, &node, &values, &workspace_bytes, &why)) return refuse(why);
  char error[QM_ERROR_SIZE];
  const auto shared = std::make_shared<PluginLayer>(layer, std::move(values), runs, workspace_bytes);
  IPluginV3* plugin = nullptr;
#define QM_OP(op, name, version) \
  if (op_ == std::string_view(#op)) plugin = make_plugin(shared, node.name, error);
#include "op.def"
  return plugin ? plugin : refuse(error);
}

}  // namespace

// Never destroyed: TensorRT may ask for their names while the process exits.
std::vector<IPluginCreatorInterface*>& creators() {
  static auto& creators = *new std::vector<IPluginCreatorInterface*>{
#define QM_OP(op, name, version) new Creator(#op),
#include "op.def"
  };
  return creators;
}

}  // namespace quantmoe
