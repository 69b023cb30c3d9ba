// What `ladon run --weights` draws: pictures, and a page for browsers.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>

#include "cli/run_fixture.h"
#include "cli/run_ladon.h"

namespace ladon::test {
namespace {

TEST_F(CliRun, PicturesOfTheWeights) {
  document_of(arguments({"--weights", file("w.svg"), "--cached"}));
  EXPECT_EQ(files(), (std::vector<std::string>{"w.svg", "x.npy", "y.npy"}));
  const std::vector<std::string> png = arguments({"--weights", file("w.png"), "--sequence", "1"});
  if (kWithCairo) {
    document_of(png);
    EXPECT_EQ(files(), (std::vector<std::string>{"w.png", "w.svg", "x.npy", "y.npy"}));
    EXPECT_TRUE(read_bytes(file("w.png")).starts_with("\x89PNG\r\n\x1a\n"));
  } else {
    EXPECT_NE(complaint_of(png, 2).find(kPictureNames), std::string::npos);
  }
  const std::string svg = read_bytes(file("w.svg"));
  EXPECT_TRUE(svg.starts_with("<svg "));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  for (const char* words : {"Attention weights, layer 1 (llama)", "13 tokens", "head 0", "head 5",
                            "query token", "key token", ">weight<"}) {
    EXPECT_NE(svg.find(words), std::string::npos) << words;
  }
}

TEST_F(CliRun, PicturesAsPdfWithTokensAndSomeHeads) {
  std::string texts = "[";
  for (int i = 0; i < kLength; ++i) texts += (i == 0 ? "\"t" : ",\"t") + std::to_string(i) + "<\"";
  write_bytes(temp_ / "texts.json", texts + "]");
  const std::vector<std::string> more{"--heads", "1,4-5", "--tokens",
                                      (temp_ / "texts.json").string()};
  const auto with = [&](const std::string& picture) {
    std::vector<std::string> all{"--weights", file(picture)};
    all.insert(all.end(), more.begin(), more.end());
    return arguments(all);
  };
  if (kWithCairo) {
    document_of(with("w.pdf"));
    EXPECT_TRUE(read_bytes(file("w.pdf")).starts_with("%PDF-"));
  }
  document_of(with("w.svg"));
  const std::string svg = read_bytes(file("w.svg"));
  for (const char* words : {"head 1", "head 4", "head 5", "t12&lt;", ">masked<"}) {
    EXPECT_NE(svg.find(words), std::string::npos) << words;
  }
  for (const char* words : {"head 0", "head 2", "head 3"}) {
    EXPECT_EQ(svg.find(words), std::string::npos) << words;
  }
  // Nothing is masked in a layer that is not causal.
  write_case("bert");
  save_input({4, family_case("bert").embed_dim}, DType::kF32);
  document_of(arguments({"--weights", file("b.svg")}));
  EXPECT_EQ(read_bytes(file("b.svg")).find("masked"), std::string::npos);
}

/// What a browser makes of a page, or nothing where there is none.
std::string dom_of(const std::string& page, const std::string& fragment) {
  const TempFolder profile;
  const std::string command =
      "chromium --headless --no-sandbox --disable-gpu --virtual-time-budget=4000 --user-data-dir=" +
      profile.path().string() + " --dump-dom 'file://" + page + "#" + fragment + "' 2>/dev/null";
  std::string dom;
  FILE* const pipe = ::popen(command.c_str(), "r");
  std::array<char, 4096> buffer{};
  for (std::size_t size = 1; pipe != nullptr && size > 0;) {
    size = std::fread(buffer.data(), 1, buffer.size(), pipe);
    dom.append(buffer.data(), size);
  }
  if (pipe != nullptr) ::pclose(pipe);
  return dom;
}

TEST_F(CliRun, APageToExploreInABrowser) {
  write_bytes(temp_ / "texts.json",
              R"(["a","b</script>","c","d","e","f","g","h","i","j","k","l","m"])");
  document_of(arguments({"--weights", file("w.html"), "--sequence", "1", "--tokens",
                         (temp_ / "texts.json").string()}));
  const std::string page = read_bytes(file("w.html"));
  EXPECT_EQ(page.find("://"), page.rfind("://")) << "no network";
  // Head 4, where token 9 looks, and what looks at token 1.
  const auto layer = load_attention(host_context(), model(), 1, {.dtype = DType::kF32});
  Tensor weights(DType::kF32, {2, 6, kLength, kLength});
  layer->forward(Context(), LayerInputs{.query = input_}, {.weights = weights});
  const auto* head = weights.data_as<float>() + (1 * 6 + 4) * kLength * kLength;
  std::int64_t looks_at = 0;
  std::int64_t looked_at_by = 0;
  for (std::int64_t i = 0; i < kLength; ++i) {
    if (head[9 * kLength + i] > head[9 * kLength + looks_at]) looks_at = i;
    if (head[i * kLength + 1] > head[looked_at_by * kLength + 1]) looked_at_by = i;
  }
  if (std::system("command -v chromium >/dev/null 2>&1") != 0) GTEST_SKIP() << "no chromium";
  // A busy machine may use up the virtual time before the small maps come into sight.
  std::string dom;
  for (int i = 0; i < 3 && dom.find("data-drawn") == std::string::npos; ++i) {
    dom = dom_of(file("w.html"), "head=4&row=9&column=1");
  }
  const auto expect = [&](const std::string& part) {
    EXPECT_NE(dom.find(part), std::string::npos) << part << "\n" << dom.substr(0, 3000);
  };
  expect("Token 9 “j” looks at");
  expect("Token 1 “b&lt;/script&gt;” is looked at by");
  const auto first_row = [&](std::int64_t index, const std::string& table) {
    expect("<table id=\"" + table + "\"><tr><td class=\"number\">" + std::to_string(index) +
           "</td><td class=\"text\"");
  };
  first_row(looks_at, "row");
  first_row(looked_at_by, "column");
  std::array<char, 16> number{};
  std::snprintf(number.data(), number.size(), "%.2f",
                static_cast<double>(head[9 * kLength + looks_at]));
  expect(std::string(">") + number.data() + "</td>");
  expect("data-drawn=\"yes\"");
  // Pointing at a token shows its row and its column; no later token looks at the last one.
  const std::string pointed =
      "<script>document.querySelector('[data-token=\"12\"]').dispatchEvent(new PointerEvent("
      "'pointerover', {bubbles: true}));</script>\n</body>";
  std::string moved = page;
  moved.replace(moved.rfind("</body>"), 7, pointed);
  write_bytes(file("p.html"), moved);
  dom = dom_of(file("p.html"), "head=4&row=9&column=1");
  expect("Token 12 “m” looks at");
  expect("Token 12 “m” is looked at by");
  const std::size_t token = dom.find("<span title=\"token 12\"");
  ASSERT_NE(token, std::string::npos);
  EXPECT_NE(dom.substr(token, dom.find(">m</span>", token) - token).find("class=\"chosen\""),
            std::string::npos)
      << dom.substr(token, 200);
}

TEST_F(CliRun, APageSaysWhereNothingLooksAtAToken) {
  if (std::system("command -v chromium >/dev/null 2>&1") != 0) GTEST_SKIP() << "no chromium";
  document_of(arguments({"--weights", file("w.html")}));
  // As where every weight of a token's column rounds to 0.
  std::string page = read_bytes(file("w.html"));
  page.replace(page.rfind("makeThumbnails();"), 17, "cells(0).fill(0); makeThumbnails();");
  write_bytes(file("z.html"), page);
  const std::string dom = dom_of(file("z.html"), "head=0&row=3&column=3");
  EXPECT_NE(dom.find("<table id=\"column\"><tbody><tr><td class=\"none\">nothing: every weight"),
            std::string::npos)
      << dom.substr(0, 3000);
}

}  // namespace
}  // namespace ladon::test
