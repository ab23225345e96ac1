// GET /openapi.json: the document of every route of the server, those of server/openai/openapi.h
// and the ones that are the server's own. A test holds it to the route table, both ways.
#pragma once

#include <string_view>

#include "base/json.h"
#include "server/openai/schema.h"

namespace fathom {

// `has_keys`: the server was started with API keys, so that what is not public needs one.
json::object api_document(std::string_view version, const RequestLimits& limits, bool has_keys);

// What clients of other servers ask for and a server of a generating model has not: embeddings,
// reranking, scoring. Their routes answer 404 with a sentence of their own.
struct MissingEndpoint {
  const char* path;
  const char* what;
};
inline constexpr MissingEndpoint kMissingEndpoints[] = {
    {"/v1/embeddings", "embeddings"}, {"/v1/rerank", "reranking"},     {"/rerank", "reranking"},
    {"/v2/rerank", "reranking"},      {"/v1/score", "scoring"},        {"/score", "scoring"},
    {"/pooling", "pooling"},          {"/classify", "classification"},
};

}  // namespace fathom
