// Which instruction sets there are, and that the one asked for is the one in use.
#include "ladon/isa.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "core/context_impl.h"
#include "cpu/cpu_features.h"
#include "cpu/dispatch.h"
#include "ladon/context.h"

namespace ladon {
namespace {

class IsaTest : public testing::Test {
 protected:
  void SetUp() override { unsetenv("LADON_ISA"); }
  void TearDown() override { unsetenv("LADON_ISA"); }
};

cpu::CpuFeatures everything() {
  return {.avx2 = true,
          .fma = true,
          .f16c = true,
          .avx512f = true,
          .avx512bw = true,
          .avx512dq = true,
          .avx512vl = true,
          .avx512_vnni = true,
          .avx512_bf16 = true,
          .amx_tile = true,
          .amx_bf16 = true,
          .intel = false,
          .os_saves_ymm = true,
          .os_saves_zmm = true,
          .os_saves_tiles = true,
          .os_permits_tiles = true};
}

TEST_F(IsaTest, NamesGoThereAndBack) {
  for (const Isa isa : kAllIsas) EXPECT_EQ(isa_from_name(name_of(isa)), isa);
  EXPECT_STREQ(name_of(Isa::kAvx512), "avx512");
  EXPECT_STREQ(name_of(static_cast<Isa>(99)), "unknown");
  EXPECT_EQ(isa_from_name("AVX2"), std::nullopt);
  EXPECT_EQ(isa_from_name(""), std::nullopt);
  EXPECT_EQ(isa_from_name("unknown"), std::nullopt);
}

TEST_F(IsaTest, TheListIsWholeAndSlowestFirst) {
  const std::vector<IsaInfo> infos = list_isas();
  ASSERT_EQ(infos.size(), std::size(kAllIsas));
  int chosen = 0;
  const Isa fastest = cpu::choose_isa({}, cpu::detect_cpu_features());
  for (std::size_t i = 0; i < infos.size(); ++i) {
    const IsaInfo& info = infos[i];
    EXPECT_EQ(info.isa, kAllIsas[i]);
    EXPECT_EQ(info.name, name_of(info.isa));
    EXPECT_FALSE(info.reason.empty());
    EXPECT_EQ(info.kernels.empty(), info.isa == Isa::kReference);
    EXPECT_EQ(info.runnable, cpu::refusal_of(info.isa, cpu::detect_cpu_features()).empty());
    if (!info.chosen) continue;
    ++chosen;
    EXPECT_TRUE(info.runnable);
    EXPECT_EQ(info.reason, "fastest that runs here");
    EXPECT_EQ(info.isa, Context().isa());
  }
  EXPECT_EQ(chosen, 1);
  EXPECT_EQ(Context().isa(), fastest);
  EXPECT_TRUE(infos[0].runnable);
  EXPECT_TRUE(infos[1].runnable);
  EXPECT_EQ(infos[0].reason, std::string("slower than ") + name_of(fastest));
}

TEST_F(IsaTest, TheForcedOneIsInUse) {
  for (const IsaInfo& info : list_isas()) {
    if (!info.runnable) continue;
    setenv("LADON_ISA", info.name.c_str(), 1);
    const Context forced_by_environment;
    EXPECT_EQ(forced_by_environment.isa(), info.isa);
    for (const IsaInfo& other : list_isas()) {
      EXPECT_EQ(other.chosen, other.isa == info.isa);
      if (other.chosen) {
        EXPECT_EQ(other.reason, "forced by LADON_ISA");
      } else if (other.runnable) {
        if (other.isa < info.isa) {
          EXPECT_EQ(other.reason, "slower than " + info.name);
        }
        EXPECT_TRUE(other.reason.ends_with(info.name)) << other.reason;
      }
    }
    // What the code asks for comes before the environment.
    ContextOptions options;
    options.isa = Isa::kBaseline;
    const Context forced_by_code(options);
    EXPECT_EQ(forced_by_code.isa(), Isa::kBaseline);
  }
}

TEST_F(IsaTest, EachSetHasKernelsOfItsOwn) {
  EXPECT_EQ(cpu::kernels_for(Isa::kReference), nullptr);
  EXPECT_EQ(cpu::kernels_for(static_cast<Isa>(99)), nullptr);
  EXPECT_NE(cpu::kernels_for(Isa::kBaseline), nullptr);
  EXPECT_NE(cpu::kernels_for(Isa::kBaseline), cpu::kernels_for(Isa::kAvx2));
  EXPECT_NE(cpu::kernels_for(Isa::kAvx2), cpu::kernels_for(Isa::kAvx512));
  EXPECT_NE(cpu::kernels_for(Isa::kAvx512), cpu::kernels_for(Isa::kAvx512Bf16));
  EXPECT_NE(cpu::kernels_for(Isa::kAvx512Bf16), cpu::kernels_for(Isa::kAmx));
}

TEST_F(IsaTest, ASlowInstructionIsLeftToThoseWhoForceIt) {
  cpu::CpuFeatures features = everything();
  EXPECT_EQ(cpu::choose_isa({}, features), Isa::kAmx);
  features.os_permits_tiles = false;
  EXPECT_EQ(cpu::choose_isa({}, features), Isa::kAvx512Bf16);
  features.intel = true;
  EXPECT_EQ(cpu::choose_isa({}, features), Isa::kAvx512);
  EXPECT_EQ(cpu::choose_isa(Isa::kAvx512Bf16, features), Isa::kAvx512Bf16);
}

TEST_F(IsaTest, RefusalsNameWhatIsMissing) {
  for (const Isa isa : kAllIsas) EXPECT_EQ(cpu::refusal_of(isa, everything()), "");
  EXPECT_EQ(cpu::refusal_of(Isa::kReference, {}), "");
  EXPECT_EQ(cpu::refusal_of(Isa::kBaseline, {}), "");
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx2, {}), "the CPU lacks avx2, fma, f16c");
  EXPECT_EQ(cpu::refusal_of(static_cast<Isa>(99), everything()),
            "this library has no kernels for it");

  cpu::CpuFeatures no_bw = everything();
  no_bw.avx512bw = false;
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx512, no_bw), "the CPU lacks avx512bw");
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx2, no_bw), "");

  cpu::CpuFeatures no_bf16 = everything();
  no_bf16.avx512_bf16 = false;
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx512Bf16, no_bf16), "the CPU lacks avx512_bf16");
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx512, no_bf16), "");
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx512Bf16, no_bw), "the CPU lacks avx512bw");

  cpu::CpuFeatures no_vnni = everything();
  no_vnni.avx512_vnni = false;
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx512Bf16, no_vnni), "the CPU lacks avx512_vnni");
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx512, no_vnni), "");

  cpu::CpuFeatures no_leave = everything();
  no_leave.os_permits_tiles = false;
  EXPECT_EQ(cpu::refusal_of(Isa::kAmx, no_leave),
            "the operating system does not let this process use AMX");
  no_leave.os_saves_tiles = false;
  EXPECT_EQ(cpu::refusal_of(Isa::kAmx, no_leave), "the operating system does not save AMX state");
  no_leave.amx_bf16 = false;
  EXPECT_EQ(cpu::refusal_of(Isa::kAmx, no_leave), "the CPU lacks amx_bf16");
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx512Bf16, no_leave), "");

  cpu::CpuFeatures no_zmm = everything();
  no_zmm.os_saves_zmm = false;
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx512, no_zmm),
            "the operating system does not save AVX-512 state");
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx2, no_zmm), "");

  cpu::CpuFeatures no_ymm = no_zmm;
  no_ymm.os_saves_ymm = false;
  EXPECT_EQ(cpu::refusal_of(Isa::kAvx2, no_ymm), "the operating system does not save AVX state");
}

#if defined(__x86_64__)
TEST_F(IsaTest, DetectionAgreesWithTheCompilersOwn) {
  const cpu::CpuFeatures features = cpu::detect_cpu_features();
  // The compiler's flag also asks whether the operating system saves the registers.
  EXPECT_EQ(features.avx2 && features.os_saves_ymm, __builtin_cpu_supports("avx2") != 0);
  EXPECT_EQ(features.fma && features.os_saves_ymm, __builtin_cpu_supports("fma") != 0);
  EXPECT_EQ(features.avx512f && features.os_saves_zmm, __builtin_cpu_supports("avx512f") != 0);
  EXPECT_EQ(features.avx512bw && features.os_saves_zmm, __builtin_cpu_supports("avx512bw") != 0);
  EXPECT_EQ(features.avx512dq && features.os_saves_zmm, __builtin_cpu_supports("avx512dq") != 0);
  EXPECT_EQ(features.avx512vl && features.os_saves_zmm, __builtin_cpu_supports("avx512vl") != 0);
  EXPECT_EQ(features.avx512_vnni && features.os_saves_zmm,
            __builtin_cpu_supports("avx512vnni") != 0);
  EXPECT_EQ(features.avx512_bf16 && features.os_saves_zmm,
            __builtin_cpu_supports("avx512bf16") != 0);
  EXPECT_EQ(features.intel, __builtin_cpu_is("intel") != 0);
}
#endif

}  // namespace
}  // namespace ladon
