// run_layer FOLDER LAYER IN.npy OUT.npy [PROMPT]: one attention layer of a model folder over an
// input [1, seq, embed]; with PROMPT over a cache, that many tokens first and then one by one. For
// compare_transformers.py. With "torch:N" as LAYER, a torch.nn.MultiheadAttention of N heads.
#include <cstdio>
#include <exception>
#include <string>

#include "ladon/checkpoint.h"
#include "ladon/npy.h"

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) {
    std::fprintf(stderr, "usage: run_layer FOLDER LAYER IN.npy OUT.npy [PROMPT]\n");
    return 2;
  }
  try {
    const std::string which = argv[2];
    const ladon::Context context;
    const ladon::Tensor x = ladon::read_npy(argv[3]);
    const auto layer = which.starts_with("torch:")
                           ? ladon::load_torch_attention(context, argv[1],
                                                         {.num_heads = std::stoll(which.substr(6))})
                           : ladon::load_attention(context, argv[1], std::stoll(which),
                                                   {.rope_context = x.size(1)});
    if (argc == 5) {
      ladon::write_npy(argv[4], layer->forward(context, x.view()));
      return 0;
    }
    ladon::KvCache cache = ladon::KvCache::contiguous(context, layer->cache_options(x.size(0)));
    ladon::Tensor out(x.dtype(), x.shape());
    for (std::int64_t begin = 0, end = std::stoll(argv[5]); begin < x.size(1); begin = end++) {
      layer->forward(context, x.view().slice(1, begin, end), cache, {},
                     out.view().slice(1, begin, end));
    }
    ladon::write_npy(argv[4], out);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
