#include "cli/environment_report.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <regex>

#include "device/cpu/isa.h"

namespace fathom {
namespace {

TEST(EnvironmentReport, KnowsProgramAndMachine) {
  const json::object report = environment_report();
  EXPECT_EQ(report.at("cpu").at("isa").as_string(), name_of(cpu_isa()));
  EXPECT_GT(report.at("cpu").at("cores_usable").as_int64(), 0);
  EXPECT_NE(report.at("memory").at("total").as_string().find("kB"), std::string::npos);
  EXPECT_TRUE(report.at("system").at("kernel").as_string().starts_with("Linux "));
  EXPECT_FALSE(report.at("fathom").at("compiler").as_string().empty());
  for (const char* library :
       {"boost", "openssl", "fmt", "spdlog", "cli11", "pcre2", "yaml-cpp", "xgrammar"}) {
    const auto& version = report.at("libraries").at(library).as_string();
    EXPECT_TRUE(!version.empty() && version[0] >= '0' && version[0] <= '9') << library;
  }
}

TEST(EnvironmentReport, KnowsWhichBuildItIs) {
  const json::object report = environment_report();
  const auto& program = report.at("fathom").as_object();
  const std::string version(program.at("version").as_string());
  EXPECT_TRUE(std::regex_match(version, std::regex(R"([0-9]+\.[0-9]+\.[0-9]+.*)"))) << version;
  const std::string commit(program.at("commit").as_string());
  EXPECT_TRUE(std::regex_match(commit, std::regex("unknown|[0-9a-f]{40}(, changed)?"))) << commit;
  const std::string cuda(program.at("cuda").as_string());
  const std::string architectures(program.at("gpu_architectures").as_string());
  EXPECT_EQ(cuda == "none", architectures == "none");
  const std::string nccl(program.at("nccl").as_string());
  EXPECT_FALSE(nccl.empty());
  const std::string text = version_text();
  EXPECT_TRUE(text.starts_with("fathom " + version + "\n")) << text;
  for (const std::string& part : {commit, architectures, std::string(name_of(cpu_isa()))}) {
    EXPECT_NE(text.find(part), std::string::npos) << part;
  }
  EXPECT_TRUE(text.ends_with(cuda == "none" ? ", built without CUDA and NCCL"
                                            : ", CUDA " + cuda + ", NCCL " + nccl))
      << text;
}

TEST(EnvironmentReport, MasksKeysAndLeavesOutWhatIsNotOurs) {
  setenv("FATHOM_API_KEY", "sk-secret-1", 1);
  setenv("FATHOM_ADMIN_API_KEY", "sk-secret-2", 1);
  setenv("FATHOM_API_KEY_FILE", "/etc/fathom/keys", 1);
  setenv("OTHER_SECRET", "sk-secret-3", 1);
  const json::object report = environment_report();
  for (const char* name :
       {"FATHOM_API_KEY", "FATHOM_ADMIN_API_KEY", "FATHOM_API_KEY_FILE", "OTHER_SECRET"}) {
    unsetenv(name);
  }
  const auto& variables = report.at("environment").as_object();
  EXPECT_EQ(variables.at("FATHOM_API_KEY").as_string(), "(set)");
  EXPECT_EQ(variables.at("FATHOM_API_KEY_FILE").as_string(), "/etc/fathom/keys");
  EXPECT_FALSE(variables.contains("OTHER_SECRET"));
  for (const std::string& text : {environment_text(report), json::serialize(report)}) {
    EXPECT_EQ(text.find("secret"), std::string::npos);
  }
}

TEST(EnvironmentReport, TextHasALineAValue) {
  const json::object report = {{"cpu", {{"model", "Z80"}, {"cores", 2}, {"limit", nullptr}}},
                               {"environment", json::object()}};
  EXPECT_EQ(environment_text(report),
            "cpu\n"
            "  model                   Z80\n"
            "  cores                   2\n"
            "  limit                   unknown\n"
            "\n"
            "environment\n"
            "  none\n");
}

}  // namespace
}  // namespace fathom
