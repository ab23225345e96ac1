#include "server/api/api_document.h"

#include "server/api/abort_request.h"
#include "server/openai/openapi.h"

namespace fathom {
namespace {

json::object status_schema(std::initializer_list<std::string_view> words) {
  json::array values;
  for (const std::string_view word : words) values.push_back(json::string(word));
  return {{"type", "object"},
          {"required", {"status"}},
          {"properties", {{"status", {{"enum", std::move(values)}}}}}};
}

// Allows a status object as the body of 503, beside the error: health checks answer with one.
void let_fail_with(std::string_view path, std::string_view schema, json::object& document) {
  json::object& replies =
      document["paths"].as_object()[path].as_object()["get"].as_object()["responses"].as_object();
  json::object& reply = replies["503"].as_object();
  json::value& shape = reply["content"].as_object()["application/json"].as_object()["schema"];
  json::array either{shape, {{"$ref", "#/components/schemas/" + std::string(schema)}}};
  shape = {{"anyOf", std::move(either)}};
}

}  // namespace

json::object api_document(std::string_view version, const RequestLimits& limits, bool has_keys) {
  const Operation operations[] = {
      {.method = "get",
       .path = "/health",
       .summary = "Liveness; the model may still be loading",
       .reply = "Status",
       .needs_key = false},
      {.method = "get",
       .path = "/ping",
       .summary = "The same as /health",
       .reply = "Status",
       .needs_key = false},
      {.method = "get",
       .path = "/ready",
       .summary = "Readiness: whether requests are served",
       .reply = "Status",
       .needs_key = false},
      {.method = "get",
       .path = "/metrics",
       .summary = "Figures for Prometheus",
       .content_type = "text/plain"},
      {.method = "get",
       .path = "/",
       .summary = "The web page",
       .content_type = "text/html",
       .needs_key = false},
      {.method = "get",
       .path = "/load",
       .summary = "Number of requests that run or wait (vLLM)",
       .reply = "Load"},
      {.method = "get",
       .path = "/openapi.json",
       .summary = "This document",
       .reply = "Document",
       .needs_key = false},
      {.method = "post",
       .path = "/flush_cache",
       .summary = "Evict all cached prefixes that no request uses",
       .reply = "Status"},
      {.method = "post",
       .path = "/abort_request",
       .summary = "Abort requests by id",
       .body = &AbortRequest::schema(),
       .reply = "Aborted"},
  };
  json::object document = openapi_document(version, limits);
  json::object& schemas = document["components"].as_object()["schemas"].as_object();
  schemas["Status"] = status_schema({"ok"});
  schemas["StatusNotOk"] = status_schema({"loading", "draining", "dead"});
  schemas["Document"] = {{"type", "object"}, {"required", {"openapi", "info", "paths"}}};
  schemas["Aborted"] = {{"type", "object"},
                        {"required", {"aborted"}},
                        {"properties", {{"aborted", {{"type", "integer"}, {"minimum", 0}}}}}};
  for (const Operation& operation : operations) add_operation(operation, limits, document);
  for (const char* path : {"/health", "/ping", "/ready"}) {
    let_fail_with(path, "StatusNotOk", document);
  }
  for (const MissingEndpoint& missing : kMissingEndpoints) {
    for (const char* method : {"get", "post", "put", "delete"}) {
      add_operation({.method = method,
                     .path = missing.path,
                     .summary = std::string("Not served: ") + missing.why,
                     .is_missing = true},
                    limits, document);
    }
  }
  if (has_keys) {
    document["components"].as_object()["securitySchemes"] = {
        {"bearer", {{"type", "http"}, {"scheme", "bearer"}}},
        {"key", {{"type", "apiKey"}, {"in", "header"}, {"name", "X-Api-Key"}}}};
    json::array either{json::object{{"bearer", json::array()}},
                       json::object{{"key", json::array()}}};
    document["security"] = std::move(either);
  }
  return document;
}

}  // namespace fathom
