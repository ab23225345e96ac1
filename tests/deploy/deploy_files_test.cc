// What deploy/ and docs/serving.md say is what the program has: flags, metrics, paths, times.
#include <gtest/gtest.h>
#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "base/json.h"
#include "cli/command.h"
#include "cli/config_file.h"
#include "cli/foreign_flags.h"
#include "cli/transfer_flags.h"
#include "server/api/metrics.h"

namespace fathom {
namespace {

const std::string kSource = FATHOM_SOURCE_DIR;

std::string read(const std::string& path) {
  std::ifstream file(kSource + "/" + path);
  EXPECT_TRUE(file.is_open()) << path;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::set<std::string> matches(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  return {std::sregex_token_iterator(text.begin(), text.end(), regex), {}};
}

// The first cells of a document's tables.
std::string first_cells(const std::string& text) {
  std::istringstream lines(text);
  std::string cells;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("| ")) cells += line.substr(0, line.find('|', 1)) + "|\n";
  }
  return cells;
}

// The names that /metrics has, and those under which Prometheus keeps a histogram.
std::set<std::string> metric_names(bool with_series) {
  const EngineStats engine;
  std::istringstream page(Metrics().text("m", &engine, {}, {}));
  std::set<std::string> names;
  for (std::string hash, kind, name, type; page >> hash;) {
    std::string rest;
    if (hash == "#" && page >> kind && kind == "TYPE") {
      page >> name >> type;
      names.insert(name);
      if (with_series && type == "histogram") {
        for (const char* end : {"_bucket", "_sum", "_count"}) names.insert(name + end);
      }
    }
    std::getline(page, rest);
  }
  return names;
}

const std::string kMetric =
    "(vllm:[a-z0-9_]+|fathom_(last|step|steps|kv|expired|requests|client|http|build)_?[a-z0-9_]*|"
    "process_[a-z_"
    "]+)";

YAML::Node find(const std::vector<YAML::Node>& documents, const std::string& kind) {
  for (const YAML::Node& document : documents) {
    if (document["kind"].Scalar() == kind) return document;
  }
  ADD_FAILURE() << "no " << kind;
  return {};
}

std::vector<YAML::Node> manifests() {
  std::vector<YAML::Node> all;
  for (const char* file : {"configmap", "deployment", "service", "servicemonitor"}) {
    for (YAML::Node& document : YAML::LoadAll(read(fmt::format("deploy/k8s/{}.yaml", file)))) {
      EXPECT_TRUE(document["apiVersion"].IsScalar()) << file;
      all.push_back(std::move(document));
    }
  }
  return all;
}

// The serve command as its users meet it.
struct Serve {
  Serve() {
    add_serve_command(app, &chosen);
    command = app.get_subcommand("serve");
  }
  CLI::App app;
  Action chosen;
  CLI::App* command = nullptr;
};

TEST(Deploy, KubernetesConfigurationIsOneThatServeTakes) {
  const YAML::Node map = find(manifests(), "ConfigMap");
  const std::string path = testing::TempDir() + "fathom-k8s-" + std::to_string(getpid());
  std::ofstream(path) << map["data"]["config.yaml"].Scalar();
  const Serve serve;
  const auto arguments = config_arguments(path, *serve.command);
  unlink(path.c_str());
  ASSERT_TRUE(arguments.has_value()) << arguments.error().message;
  EXPECT_FALSE(arguments->arguments.empty());
  EXPECT_TRUE(arguments->notes.empty());
  std::vector<std::string> line(arguments->arguments.rbegin(), arguments->arguments.rend());
  line.push_back("serve");
  Serve fresh;
  EXPECT_NO_THROW(fresh.app.parse(std::move(line)));
}

void expect_probes_and_times(const YAML::Node& deployment) {
  const auto all = manifests();
  const YAML::Node pod = deployment["spec"]["template"];
  const YAML::Node container = pod["spec"]["containers"][0];
  EXPECT_EQ(container["startupProbe"]["httpGet"]["path"].Scalar(), "/ready");
  EXPECT_EQ(container["livenessProbe"]["httpGet"]["path"].Scalar(), "/health");
  EXPECT_EQ(container["readinessProbe"]["httpGet"]["path"].Scalar(), "/ready");
  const YAML::Node settings = YAML::Load(find(all, "ConfigMap")["data"]["config.yaml"].Scalar());
  EXPECT_GT(pod["spec"]["terminationGracePeriodSeconds"].as<int>(),
            settings["shutdown-timeout"].as<int>());
  EXPECT_EQ(container["ports"][0]["containerPort"].as<int>(), settings["port"].as<int>());
  // Probes and the Service name the port as the container does.
  const std::string port = container["ports"][0]["name"].Scalar();
  for (const char* probe : {"startupProbe", "livenessProbe", "readinessProbe"}) {
    EXPECT_EQ(container[probe]["httpGet"]["port"].Scalar(), port) << probe;
  }
  EXPECT_EQ(find(all, "Service")["spec"]["ports"][0]["targetPort"].Scalar(), port);
  // A Service "fathom" would set FATHOM_PORT, which is --port, to "tcp://…".
  EXPECT_EQ(pod["spec"]["enableServiceLinks"].Scalar(), "false");
  // Each of them finds the pods by the labels that they have.
  const YAML::Node service = find(all, "Service");
  const YAML::Node labels = pod["metadata"]["labels"];
  for (const auto& pair : service["spec"]["selector"]) {
    EXPECT_EQ(labels[pair.first.Scalar()].Scalar(), pair.second.Scalar());
  }
  const YAML::Node monitor = find(all, "ServiceMonitor");
  for (const auto& pair : monitor["spec"]["selector"]["matchLabels"]) {
    EXPECT_EQ(service["metadata"]["labels"][pair.first.Scalar()].Scalar(), pair.second.Scalar());
  }
  EXPECT_EQ(monitor["spec"]["endpoints"][0]["path"].Scalar(), "/metrics");
  EXPECT_EQ(monitor["spec"]["endpoints"][0]["port"].Scalar(),
            service["spec"]["ports"][0]["name"].Scalar());
}

YAML::Node gpu_deployment() { return YAML::Load(read("deploy/k8s-gpu/deployment.yaml")); }

TEST(Deploy, KubernetesProbesAndTimesFit) {
  expect_probes_and_times(find(manifests(), "Deployment"));
  expect_probes_and_times(gpu_deployment());
}

TEST(Deploy, KubernetesGpuDeploymentTakesThePlaceOfTheOther) {
  const YAML::Node cpu = find(manifests(), "Deployment"), gpu = gpu_deployment();
  EXPECT_EQ(gpu["metadata"]["name"].Scalar(), cpu["metadata"]["name"].Scalar());
  const YAML::Node pod = gpu["spec"]["template"]["spec"], container = pod["containers"][0];
  EXPECT_EQ(container["resources"]["limits"]["nvidia.com/gpu"].Scalar(), "1");
  EXPECT_EQ(gpu["spec"]["strategy"]["type"].Scalar(), "Recreate");
  // What is mounted is there, and the other way round.
  std::set<std::string> mounted, volumes;
  for (const YAML::Node& mount : container["volumeMounts"]) mounted.insert(mount["name"].Scalar());
  for (const YAML::Node& volume : pod["volumes"]) volumes.insert(volume["name"].Scalar());
  EXPECT_EQ(mounted, volumes);
  EXPECT_TRUE(volumes.contains("model"));
  // The CPU's Deployment wants no GPU.
  EXPECT_FALSE(
      cpu["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]);
}

// Both Deployments' arguments are flags that there are; the GPU's names its device.
TEST(Deploy, KubernetesArgumentsAreOnesThatServeTakes) {
  for (const YAML::Node& deployment : {find(manifests(), "Deployment"), gpu_deployment()}) {
    const YAML::Node arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"];
    std::vector<std::string> line;
    for (size_t i = arguments.size(); i-- > 0;) line.push_back(arguments[i].Scalar());
    Serve serve;
    EXPECT_NO_THROW(serve.app.parse(std::move(line)));
    const CLI::Option* device = serve.command->get_option("--device");
    const bool is_gpu = deployment["spec"]["strategy"].IsDefined();
    EXPECT_EQ(device->count() > 0 ? device->as<std::string>() : "", is_gpu ? "cuda:0" : "");
  }
}

// The words of a container's `args` as one command line takes them.
TransferPlan plan_of(const YAML::Node& arguments) {
  std::vector<std::string> line;
  for (size_t i = arguments.size(); i-- > 0;) line.push_back(arguments[i].Scalar());
  Serve serve;
  EXPECT_NO_THROW(serve.app.parse(std::move(line)));
  TransferFlags flags;
  flags.secret = "one of sixteen bytes";
  const auto text = [&](const char* name) {
    const CLI::Option* option = serve.command->get_option(name);
    return option->count() > 0 ? option->as<std::string>() : std::string();
  };
  flags.role = text("--role");
  flags.address = text("--transfer-addr");
  if (const std::string peers = text("--prefill"); !peers.empty()) flags.prefill.push_back(peers);
  const auto plan = transfer_plan(flags, {});
  EXPECT_TRUE(plan.has_value()) << plan.error().message;
  return plan.value_or(TransferPlan());
}

// Each prefill pod has a name that the decode server asks, at the port at which it listens; both
// have the same secret; the Service of ../k8s finds the decode server alone.
TEST(Deploy, KubernetesSeparatedSidesFindEachOther) {
  const auto all = YAML::LoadAll(read("deploy/k8s-separated/separated.yaml"));
  const YAML::Node prefill = find(all, "StatefulSet"), decode = find(all, "Deployment");
  const YAML::Node service = find(all, "Service");
  expect_probes_and_times(decode);
  const YAML::Node prefill_pod = prefill["spec"]["template"];
  const YAML::Node computes = prefill_pod["spec"]["containers"][0];
  const YAML::Node decodes = decode["spec"]["template"]["spec"]["containers"][0];
  const TransferPlan server = plan_of(computes["args"]), client = plan_of(decodes["args"]);
  EXPECT_EQ(server.role, TransferRole::kPrefill);
  EXPECT_EQ(client.role, TransferRole::kDecode);
  ASSERT_TRUE(server.listen.has_value());
  EXPECT_EQ(server.listen->host, "0.0.0.0");
  EXPECT_EQ(prefill["spec"]["serviceName"].Scalar(), service["metadata"]["name"].Scalar());
  EXPECT_EQ(service["spec"]["clusterIP"].Scalar(), "None");
  EXPECT_EQ(service["spec"]["ports"][0]["port"].as<int>(), server.listen->port);
  EXPECT_EQ(computes["ports"][1]["containerPort"].as<int>(), server.listen->port);
  EXPECT_EQ(service["spec"]["ports"][0]["targetPort"].Scalar(),
            computes["ports"][1]["name"].Scalar());
  ASSERT_EQ(std::ssize(client.peers), prefill["spec"]["replicas"].as<int>());
  for (size_t i = 0; i < client.peers.size(); ++i) {
    EXPECT_EQ(client.peers[i].host, fmt::format("{}-{}.{}", prefill["metadata"]["name"].Scalar(), i,
                                                prefill["spec"]["serviceName"].Scalar()));
    EXPECT_EQ(client.peers[i].port, server.listen->port);
  }
  for (const auto& pair : service["spec"]["selector"]) {
    EXPECT_EQ(prefill_pod["metadata"]["labels"][pair.first.Scalar()].Scalar(),
              pair.second.Scalar());
  }
  const YAML::Node public_service = find(manifests(), "Service");
  EXPECT_NE(prefill_pod["metadata"]["labels"]["app.kubernetes.io/name"].Scalar(),
            public_service["spec"]["selector"]["app.kubernetes.io/name"].Scalar());
  const auto secret_of = [](const YAML::Node& container) {
    for (const YAML::Node& variable : container["env"]) {
      if (variable["name"].Scalar() == "FATHOM_TRANSFER_SECRET_FILE") {
        return variable["value"].Scalar();
      }
    }
    return std::string();
  };
  EXPECT_NE(secret_of(computes), "");
  EXPECT_EQ(secret_of(computes), secret_of(decodes));
  const Serve serve;
  EXPECT_EQ(serve.command->get_option("--transfer-secret-file")->get_envname(),
            "FATHOM_TRANSFER_SECRET_FILE");
}

// Those that begin with "fathom serve", without their comments.
std::vector<std::string> launch_lines(const std::string& document) {
  std::istringstream text(read(document));
  std::vector<std::string> found;
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with("fathom serve")) found.push_back(line.substr(0, line.find(" #")));
  }
  return found;
}

TEST(Deploy, LaunchLinesOfTheDocumentsAreOnesThatServeTakes) {
  for (const auto& [document, at_least] : {std::pair("README.md", 6), {"docs/serving.md", 1}}) {
    const std::vector<std::string> lines = launch_lines(document);
    EXPECT_GE(std::ssize(lines), at_least) << document;
    for (const std::string& line : lines) {
      std::istringstream words(line);
      std::vector<std::string> arguments;
      for (std::string word; words >> word;) arguments.push_back(word);
      arguments.erase(arguments.begin(), arguments.begin() + 2);
      Serve serve;
      const auto taken = translate_launch_line(*serve.command, arguments);
      ASSERT_TRUE(taken.has_value()) << line << ": " << taken.error().message;
      std::vector<std::string> reversed(taken->arguments.rbegin(), taken->arguments.rend());
      reversed.push_back("serve");
      EXPECT_NO_THROW(serve.app.parse(std::move(reversed))) << line;
    }
  }
}

TEST(Deploy, DashboardShowsMetricsThatExist) {
  const std::string text = read("deploy/grafana/fathom.json");
  const auto dashboard = parse_json(text, "fathom.json");
  ASSERT_TRUE(dashboard.has_value()) << dashboard.error().message;
  const std::set<std::string> existing = metric_names(true);
  std::set<std::string> used;
  for (const json::value& panel : dashboard->at("panels").as_array()) {
    if (panel.at("type").as_string() == "row") continue;
    ASSERT_FALSE(panel.at("targets").as_array().empty());
    for (const json::value& target : panel.at("targets").as_array()) {
      const auto names = matches(std::string(target.at("expr").as_string()), kMetric);
      EXPECT_FALSE(names.empty()) << target.at("expr").as_string();
      used.insert(names.begin(), names.end());
    }
  }
  EXPECT_GE(used.size(), 20u);
  for (const std::string& name : used) EXPECT_TRUE(existing.contains(name)) << name;
}

TEST(Deploy, DocumentHasEveryMetricAndNoOther) {
  const std::string text = read("docs/serving.md");
  const std::set<std::string> existing = metric_names(true);
  const std::string rows = first_cells(text);
  for (const std::string& name : metric_names(false)) {
    EXPECT_NE(rows.find("`" + name + "`"), std::string::npos) << name;
  }
  for (const std::string& name : matches(text, kMetric)) {
    EXPECT_TRUE(existing.contains(name)) << name;
  }
}

TEST(Deploy, DocumentHasEveryFlagOfServeAndNoOther) {
  const std::string text = read("docs/serving.md");
  const std::set<std::string> rows = matches(first_cells(text), "--[a-z][a-z0-9-]+");
  const Serve serve;
  std::set<std::string> known = {"--config", "--json"};
  for (const CLI::Option* option : serve.command->get_options()) {
    for (const std::string& name : option->get_lnames()) known.insert("--" + name);
    if (option->get_lnames().empty() || option->get_lnames().front() == "help") continue;
    EXPECT_TRUE(rows.contains("--" + option->get_lnames().front())) << option->get_lnames().front();
  }
  for (const std::string& name : matches(text, "--[a-z][a-z0-9-]+")) {
    EXPECT_TRUE(known.contains(name) || is_foreign_flag(name.substr(2))) << name;
  }
}

TEST(Deploy, UnitWaitsLongerThanTheServer) {
  const std::string unit = read("deploy/systemd/fathom.service");
  for (const char* line : {"Type=notify\n", "WatchdogSec=", "LimitNOFILE=", "NoNewPrivileges=",
                           "ProtectSystem=strict\n"}) {
    EXPECT_NE(unit.find(std::string("\n") + line), std::string::npos) << line;
  }
  std::smatch found;
  ASSERT_TRUE(std::regex_search(unit, found, std::regex("TimeoutStopSec=([0-9]+)")));
  const Serve serve;
  EXPECT_GT(std::stoi(found[1]),
            std::stoi(serve.command->get_option("--shutdown-timeout")->get_default_str()));
}

// PrivateDevices= hides GPUs; the drop-in shows the driver's and no other device.
TEST(Deploy, UnitForAGpuSeesIt) {
  const std::string unit = read("deploy/systemd/fathom.service");
  const std::string gpu = read("deploy/systemd/fathom.service.d/gpu.conf");
  EXPECT_NE(unit.find("\nPrivateDevices=yes\n"), std::string::npos);
  EXPECT_NE(unit.find("fathom.service.d/gpu.conf"), std::string::npos);
  for (const char* line : {"[Service]\n", "PrivateDevices=no\n", "DevicePolicy=closed\n",
                           "DeviceAllow=char-nvidia* rw\n"}) {
    EXPECT_NE(gpu.find(std::string("\n") + line), std::string::npos) << line;
  }
  // Never the CPU by accident, and by a variable that there is.
  std::smatch found;
  ASSERT_TRUE(std::regex_search(gpu, found, std::regex("\nEnvironment=(FATHOM_[A-Z_]+)=cuda:0\n")));
  const Serve serve;
  EXPECT_EQ(serve.command->get_option("--device")->get_envname(), found[1].str());
}

}  // namespace
}  // namespace fathom
