#include "gradient_accuracy.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <memory>

#include "compare_tensors.h"
#include "ladon/attention.h"
#include "ladon/random.h"
#include "ladon/tensor.h"
#include "workload.h"

namespace ladon::bench {
namespace {

std::size_t bytes_of(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.num_elements()) * size_of(tensor.dtype());
}

/// A file in memory, which another process of the same user can open by its path. Nothing is left
/// of it, however this process ends.
class SharedFile {
 public:
  SharedFile() : descriptor_(memfd_create("ladon_gradients", MFD_CLOEXEC)) {}
  ~SharedFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  std::string path() const {
    return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(descriptor_);
  }
  bool append(const Tensor& tensor) {
    const auto* from = static_cast<const char*>(tensor.data());
    for (std::size_t done = 0; done < bytes_of(tensor);) {
      const ssize_t count = write(descriptor_, from + done, bytes_of(tensor) - done);
      if (count <= 0) return false;
      done += static_cast<std::size_t>(count);
    }
    return true;
  }
  /// The next bytes of it; false where there are too few.
  bool read_into(Tensor& tensor) {
    auto* to = static_cast<char*>(tensor.data());
    for (std::size_t done = 0; done < bytes_of(tensor);) {
      const ssize_t count = pread(descriptor_, to + done, bytes_of(tensor) - done, position_);
      if (count <= 0) return false;
      done += static_cast<std::size_t>(count);
      position_ += count;
    }
    return true;
  }

 private:
  int descriptor_;
  off_t position_ = 0;
};

struct Inputs {
  Tensor q, k, v, dout;
};

struct Gradients {
  Tensor dq, dk, dv;
};

Inputs random_inputs(const Context& context, const Shape& shape) {
  const Dims q_shape{shape.batch, shape.query_len, shape.num_heads, shape.head_dim};
  const Dims kv_shape{shape.batch, shape.kv_len, shape.num_kv_heads, shape.head_dim};
  Inputs inputs{Tensor(DType::kBF16, q_shape), Tensor(DType::kBF16, kv_shape),
                Tensor(DType::kBF16, kv_shape), Tensor(DType::kBF16, q_shape)};
  std::uint64_t stream = 0;
  for (Tensor* tensor : {&inputs.q, &inputs.k, &inputs.v, &inputs.dout}) {
    fill_normal(context, *tensor, 0, 1, /*seed=*/11, ++stream);
  }
  return inputs;
}

Gradients empty_gradients(const Context& context, const Inputs& inputs, DType dtype) {
  return {Tensor(context, dtype, inputs.q.shape()), Tensor(context, dtype, inputs.k.shape()),
          Tensor(context, dtype, inputs.v.shape())};
}

/// Forward, and back.
Gradients run_attention(const Context& context, const Inputs& inputs, bool causal);

/// The same of the host's tensors on a GPU.
Gradients run_elsewhere(const Context& context, const Inputs& inputs, bool causal) {
  const auto move = [&](const Tensor& tensor) { return tensor.to(context); };
  const Inputs there{move(inputs.q), move(inputs.k), move(inputs.v), move(inputs.dout)};
  const Gradients result = run_attention(context, there, causal);
  return {result.dq.to_host(), result.dk.to_host(), result.dv.to_host()};
}

Gradients run_attention(const Context& context, const Inputs& inputs, bool causal) {
  if (inputs.q.device() != context.device()) return run_elsewhere(context, inputs, causal);
  AttentionOptions options;
  options.causal = causal;
  const DType dtype = inputs.q.dtype();
  Tensor out(context, dtype, inputs.q.shape());
  Tensor lse(context, dtype == DType::kF64 ? DType::kF64 : DType::kF32,
             {inputs.q.size(0), inputs.q.size(2), inputs.q.size(1)});
  attention(context, inputs.q, inputs.k, inputs.v, options, out, lse);
  Gradients result = empty_gradients(context, inputs, dtype);
  attention_backward(context, inputs.q, inputs.k, inputs.v, options, {out, lse, inputs.dout, {}},
                     {result.dq, result.dk, result.dv, {}, {}});
  return result;
}

Gradients truth_of(const Context& reference, const Inputs& inputs, bool causal) {
  const auto wide = [&](const Tensor& tensor) {
    return Tensor::copy_of(reference, tensor, DType::kF64);
  };
  const Inputs exact{wide(inputs.q), wide(inputs.k), wide(inputs.v), wide(inputs.dout)};
  return run_attention(reference, exact, causal);
}

/// False where the peer did not give them.
bool ask_peer(Peer& peer, const Shape& shape, const Inputs& inputs, Gradients& result) {
  SharedFile given;
  SharedFile taken;
  for (const Tensor* tensor : {&inputs.q, &inputs.k, &inputs.v, &inputs.dout}) {
    if (!given.append(*tensor)) return false;
  }
  if (!peer.gradients(shape, given.path(), taken.path()).empty()) return false;
  return taken.read_into(result.dq) && taken.read_into(result.dk) && taken.read_into(result.dv);
}

}  // namespace

std::vector<Shape> gradient_shapes() {
  std::vector<Shape> shapes;
  for (const bool causal : {false, true}) {
    shapes.push_back({.pass = Pass::kBackward,
                      .dtype = DType::kBF16,
                      .query_len = 512,
                      .kv_len = 512,
                      .causal = causal});
  }
  return shapes;
}

std::string gradient_name(const Shape& shape) { return "gradients " + shape.name(); }

void compare_gradients(Session& session, Isa isa, const Shape& shape) {
  session.listener().begin(gradient_name(shape));
  Peer* const pytorch = session.peer("pytorch");
  if (pytorch == nullptr) return;
  const std::unique_ptr<Context> context = session.make_context(isa);
  const Context reference = reference_for(*context);
  const Inputs inputs = random_inputs(reference, shape);
  Gradients theirs = empty_gradients(reference, inputs, DType::kBF16);
  if (!ask_peer(*pytorch, shape, inputs, theirs)) {
    session.note_peers();
    return;
  }
  const Gradients ours = run_attention(*context, inputs, shape.causal);
  const Gradients truth = truth_of(reference, inputs, shape.causal);
  const auto add = [&](const char* gradient, Tensor Gradients::*one) {
    session.results().gradients.push_back({.name = shape.name(),
                                           .gradient = gradient,
                                           .ladon = largest_error(ours.*one, truth.*one),
                                           .pytorch = largest_error(theirs.*one, truth.*one)});
  };
  add("dq", &Gradients::dq);
  add("dk", &Gradients::dk);
  add("dv", &Gradients::dv);
}

}  // namespace ladon::bench
