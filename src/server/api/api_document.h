// GET /openapi.json: documents every route of the server, those of server/openai/openapi.h and the
// server's own. A test compares it with the route table in both directions.
#pragma once

#include <string_view>

#include "base/json.h"
#include "server/openai/schema.h"

namespace fathom {

// `has_keys`: the server has API keys, so routes that are not public need one.
json::object api_document(std::string_view version, const RequestLimits& limits, bool has_keys);

// Endpoints of other servers that a server of one generating model does not provide. They answer
// every method with 404, a message of their own and the code "not_supported".
struct MissingEndpoint {
  const char* path;
  const char* what;
  const char* why = "this server generates text only";
};
inline constexpr const char* kNoBatches =
    "send its requests one by one, they are computed together";
inline constexpr const char* kNoLora = "the model is served as it was loaded";
inline constexpr MissingEndpoint kMissingEndpoints[] = {
    {"/v1/embeddings", "embeddings"},
    {"/v1/rerank", "reranking"},
    {"/rerank", "reranking"},
    {"/v2/rerank", "reranking"},
    {"/v1/score", "scoring"},
    {"/score", "scoring"},
    {"/pooling", "pooling"},
    {"/classify", "classification"},
    {"/v1/images/generations", "making images"},
    {"/v1/audio/speech", "speech"},
    {"/v1/audio/transcriptions", "transcribing speech"},
    {"/v1/audio/translations", "translating speech"},
    {"/v1/batches", "a batch", kNoBatches},
    {"/v1/batches/{id}", "a batch", kNoBatches},
    {"/v1/messages/batches", "a batch", kNoBatches},
    {"/v1/messages/batches/{id}", "a batch", kNoBatches},
    {"/v1/files", "storing files", "nothing is stored here"},
    {"/v1/load_lora_adapter", "loading a LoRA adapter", kNoLora},
    {"/v1/unload_lora_adapter", "unloading a LoRA adapter", kNoLora},
    {"/load_lora_adapter", "loading a LoRA adapter", kNoLora},
    {"/unload_lora_adapter", "unloading a LoRA adapter", kNoLora},
};

}  // namespace fathom
