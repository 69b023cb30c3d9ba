// run_layer FOLDER LAYER IN.npy OUT.npy: one attention layer of a model folder over an input. For
// compare_transformers.py. With "torch:N" as LAYER, a torch.nn.MultiheadAttention of N heads.
#include <cstdio>
#include <exception>
#include <string>

#include "ladon/checkpoint.h"
#include "ladon/npy.h"

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: run_layer FOLDER LAYER IN.npy OUT.npy\n");
    return 2;
  }
  try {
    const std::string which = argv[2];
    const ladon::Context context;
    const auto layer = which.starts_with("torch:")
                           ? ladon::load_torch_attention(context, argv[1],
                                                         {.num_heads = std::stoll(which.substr(6))})
                           : ladon::load_attention(context, argv[1], std::stoll(which));
    const ladon::Tensor x = ladon::read_npy(argv[3]);
    ladon::write_npy(argv[4], layer->forward(context, x.view()));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
