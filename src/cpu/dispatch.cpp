#include "cpu/dispatch.h"

#include <array>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include "core/fail.h"
#include "cpu/isa_tables.h"

namespace ladon {
namespace cpu {
namespace {

struct Requirement {
  bool CpuFeatures::*feature;
  const char* name;
};

/// "the CPU lacks a, b", or nothing.
template <std::size_t count>
std::string lacking(const CpuFeatures& features,
                    const std::array<Requirement, count>& requirements) {
  std::string missing;
  for (const Requirement& requirement : requirements) {
    if (features.*requirement.feature) continue;
    missing += missing.empty() ? "the CPU lacks " : ", ";
    missing += requirement.name;
  }
  return missing;
}

std::string refuse_reference(const CpuFeatures&) { return {}; }
std::string refuse_baseline(const CpuFeatures&) { return {}; }

// The requirements below must agree with the compiler flags in cmake/isa.cmake.
std::string refuse_avx2(const CpuFeatures& features) {
  static constexpr std::array<Requirement, 3> kRequired{
      {{&CpuFeatures::avx2, "avx2"}, {&CpuFeatures::fma, "fma"}, {&CpuFeatures::f16c, "f16c"}}};
  std::string reason = lacking(features, kRequired);
  if (reason.empty() && !features.os_saves_ymm) {
    reason = "the operating system does not save AVX state";
  }
  return reason;
}

std::string refuse_avx512(const CpuFeatures& features) {
  // -mavx512f allows the compiler to use AVX2 as well.
  static constexpr std::array<Requirement, 7> kRequired{{{&CpuFeatures::avx512f, "avx512f"},
                                                         {&CpuFeatures::avx512bw, "avx512bw"},
                                                         {&CpuFeatures::avx512dq, "avx512dq"},
                                                         {&CpuFeatures::avx512vl, "avx512vl"},
                                                         {&CpuFeatures::avx2, "avx2"},
                                                         {&CpuFeatures::fma, "fma"},
                                                         {&CpuFeatures::f16c, "f16c"}}};
  std::string reason = lacking(features, kRequired);
  if (reason.empty() && !features.os_saves_zmm) {
    reason = "the operating system does not save AVX-512 state";
  }
  return reason;
}

std::string refuse_avx512_bf16(const CpuFeatures& features) {
  static constexpr std::array<Requirement, 2> kRequired{
      {{&CpuFeatures::avx512_vnni, "avx512_vnni"}, {&CpuFeatures::avx512_bf16, "avx512_bf16"}}};
  std::string reason = refuse_avx512(features);
  if (reason.empty()) reason = lacking(features, kRequired);
  return reason;
}

std::string refuse_amx(const CpuFeatures& features) {
  // The AMX kernels round to bf16 with an AVX-512 BF16 instruction.
  static constexpr std::array<Requirement, 2> kRequired{
      {{&CpuFeatures::amx_tile, "amx_tile"}, {&CpuFeatures::amx_bf16, "amx_bf16"}}};
  std::string reason = refuse_avx512_bf16(features);
  if (reason.empty()) reason = lacking(features, kRequired);
  if (reason.empty() && !features.os_saves_tiles) {
    reason = "the operating system does not save AMX state";
  }
  if (reason.empty() && !features.os_permits_tiles) {
    reason = "the operating system does not let this process use AMX";
  }
  return reason;
}

/// Whether an instruction set is faster than those before it.
bool gains_by(Isa isa, const CpuFeatures& features) {
  // Intel's vdpbf16ps has half the throughput of f32 FMA, in products per cycle (measured on
  // Emerald Rapids); AMD's has twice.
  return isa != Isa::kAvx512Bf16 || !features.intel;
}

struct IsaEntry {
  Isa isa;
  const char* name;
  const KernelTable* kernels;
  std::string (*refusal)(const CpuFeatures& features);

  bool gains(const CpuFeatures& features) const { return gains_by(isa, features); }
};

// Every instruction set, slowest first.
#define LADON_ISA_ENTRY(id, name) IsaEntry{Isa::id, #name, &kernels::id, refuse_##name},
constexpr std::array kIsas{IsaEntry{Isa::kReference, "reference", nullptr, refuse_reference},
                           LADON_KERNEL_ISAS(LADON_ISA_ENTRY)};
#undef LADON_ISA_ENTRY

const IsaEntry* find(Isa isa) noexcept {
  for (const IsaEntry& entry : kIsas) {
    if (entry.isa == isa) return &entry;
  }
  return nullptr;
}

const IsaEntry* find(std::string_view name) noexcept {
  for (const IsaEntry& entry : kIsas) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

/// The end of an error message: ", expected one that can run here: reference, baseline; avx2
/// cannot: the CPU lacks avx2; ...".
std::string expected_choices(const CpuFeatures& features) {
  std::string runnable;
  std::string refused;
  for (const IsaEntry& entry : kIsas) {
    const std::string reason = entry.refusal(features);
    if (reason.empty()) {
      if (!runnable.empty()) runnable += ", ";
      runnable += entry.name;
    } else {
      refused += std::string("; ") + entry.name + " cannot: " + reason;
    }
  }
  return ", expected one that can run here: " + runnable + refused;
}

/// LADON_ISA, if it is set and not empty.
std::optional<std::string> forced_name() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): unsafe only where the program calls setenv meanwhile
  const char* const value = std::getenv("LADON_ISA");
  if (value == nullptr || *value == '\0') return {};
  return value;
}

void check_runnable(const IsaEntry& entry, const CpuFeatures& features, std::string_view operation,
                    std::string_view argument) {
  if (entry.refusal(features).empty()) return;
  fail(ErrorCode::kUnsupported, operation, argument,
       std::string("got ") + entry.name + expected_choices(features));
}

/// The choice of LADON_ISA, else the fastest that can run.
const IsaEntry& default_isa(const CpuFeatures& features, std::string_view operation) {
  if (const std::optional<std::string> name = forced_name()) {
    const IsaEntry* const entry = find(*name);
    if (entry == nullptr) {
      fail(operation, "LADON_ISA",
           "got \"" + *name + "\", which is not an instruction set of this library" +
               expected_choices(features));
    }
    check_runnable(*entry, features, operation, "LADON_ISA");
    return *entry;
  }
  const IsaEntry* fastest = &kIsas.front();
  for (const IsaEntry& entry : kIsas) {
    if (entry.refusal(features).empty() && entry.gains(features)) fastest = &entry;
  }
  return *fastest;
}

}  // namespace

Isa choose_isa(std::optional<Isa> requested) {
  return choose_isa(requested, detect_cpu_features());
}

Isa choose_isa(std::optional<Isa> requested, const CpuFeatures& features) {
  if (!requested) return default_isa(features, "Context").isa;
  const IsaEntry* const entry = find(*requested);
  if (entry == nullptr) {
    fail("Context", "isa",
         "got Isa(" + std::to_string(static_cast<int>(*requested)) +
             "), which is not an instruction set of this library" + expected_choices(features));
  }
  check_runnable(*entry, features, "Context", "isa");
  return entry->isa;
}

std::string refusal_of(Isa isa, const CpuFeatures& features) {
  const IsaEntry* const entry = find(isa);
  return entry == nullptr ? "this library has no kernels for it" : entry->refusal(features);
}

const KernelTable* kernels_for(Isa isa) noexcept {
  const IsaEntry* const entry = find(isa);
  return entry == nullptr ? nullptr : entry->kernels;
}

}  // namespace cpu

const char* name_of(Isa isa) noexcept {
  const cpu::IsaEntry* const entry = cpu::find(isa);
  return entry == nullptr ? "unknown" : entry->name;
}

std::string isa_names() {
  std::string names;
  for (const cpu::IsaEntry& entry : cpu::kIsas) {
    if (!names.empty()) names += &entry == &cpu::kIsas.back() ? " or " : ", ";
    names += entry.name;
  }
  return names;
}

std::optional<Isa> isa_from_name(std::string_view name) noexcept {
  const cpu::IsaEntry* const entry = cpu::find(name);
  if (entry == nullptr) return {};
  return entry->isa;
}

std::vector<IsaInfo> list_isas() {
  const cpu::CpuFeatures features = cpu::detect_cpu_features();
  const bool forced = cpu::forced_name().has_value();
  const cpu::IsaEntry& chosen = cpu::default_isa(features, "list_isas");
  std::vector<IsaInfo> infos;
  for (const cpu::IsaEntry& entry : cpu::kIsas) {
    IsaInfo info;
    info.isa = entry.isa;
    info.name = entry.name;
    info.reason = entry.refusal(features);
    info.runnable = info.reason.empty();
    info.chosen = entry.isa == chosen.isa;
    if (info.chosen) {
      info.reason = forced ? "forced by LADON_ISA" : "fastest that runs here";
    } else if (info.runnable) {
      const bool slower = entry.isa < chosen.isa || !entry.gains(features);
      info.reason = std::string(slower ? "slower than " : "LADON_ISA names ") + chosen.name;
    }
    if (entry.kernels != nullptr) {
      info.kernels.assign(std::begin(cpu::kKernelNames), std::end(cpu::kKernelNames));
      // Only the bf16 kernels that differ from those for f32.
#define LADON_KERNEL(name, Params, Task)                     \
  if (entry.kernels->bf16.name != entry.kernels->f32.name) { \
    info.kernels.emplace_back(#name "_bf16");                \
  }
#include "cpu/kernels.def"
#undef LADON_KERNEL
    }
    infos.push_back(std::move(info));
  }
  return infos;
}

}  // namespace ladon
