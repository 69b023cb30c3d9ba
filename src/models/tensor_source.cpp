#include "models/stored_tensors.h"

namespace ladon::models {

std::vector<std::string> TensorSource::names() const {
  return file_ != nullptr ? file_->names() : folder_->names();
}

bool TensorSource::has(std::string_view name) const {
  return file_ != nullptr ? file_->has(name) : folder_->has(name);
}

const SafetensorsEntry& TensorSource::entry(std::string_view name) const {
  return file_ != nullptr ? file_->entry(name) : folder_->entry(name);
}

Tensor TensorSource::load(std::string_view name) const {
  // By the file's descriptor and not by the mapping: a file that is shortened meanwhile gives an
  // Error and not a signal.
  return file_ != nullptr ? file_->load(name) : folder_->load(name);
}

ConstTensorView TensorSource::tensor(std::string_view name) const {
  return file_ != nullptr ? file_->tensor(name) : folder_->tensor(name);
}

std::string TensorSource::path() const {
  return file_ != nullptr ? file_->path().string() : folder_->folder().string();
}

std::string TensorSource::path_of(std::string_view name) const {
  return file_ != nullptr ? path() : (folder_->folder() / folder_->shard_of(name)).string();
}

}  // namespace ladon::models
