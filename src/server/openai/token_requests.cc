#include "server/openai/token_requests.h"

#include <limits>

namespace fathom {

const ObjectSchema& TokenizeRequest::schema() {
  using F = TokenizeRequest;
  static const ObjectSchema kSchema =
      SchemaOf<F>("TokenizeRequest")
          .checked("model", name_string(), "Accepted, there is one model")
          .field("prompt", &F::prompt, string(), "A text; or messages")
          .include(&F::conversation)
          .field("add_special_tokens", &F::add_special_tokens, boolean(),
                 "Begin a text with the beginning-of-sequence token, if the model expects one")
          .field("return_token_strs", &F::return_token_strs, boolean(),
                 "Also return the tokens' texts")
          .build();
  return kSchema;
}

const ObjectSchema& DetokenizeRequest::schema() {
  using F = DetokenizeRequest;
  static const ObjectSchema kSchema =
      SchemaOf<F>("DetokenizeRequest")
          .checked("model", name_string(), "Accepted, there is one model")
          .required("tokens", &F::tokens, array_of(integer(0, std::numeric_limits<int32_t>::max())),
                    "Token ids")
          .build();
  return kSchema;
}

}  // namespace fathom
