#include "server/openai/wire_test_support.h"

namespace fathom {

const ServedModel& tiny_model() {
  static const ServedModel kModel = [] {
    auto tokenizer = Tokenizer::load(FATHOM_SOURCE_DIR "/models/fathom-tiny");
    EXPECT_TRUE(tokenizer) << tokenizer.error().message;
    ServedModel served;
    served.names = {"fathom-tiny", "tiny"};
    served.tokenizer = std::move(*tokenizer);
    served.chat_format = ChatFormat::kFathomTiny;
    served.vocab_size = served.tokenizer->vocab_size();
    served.max_model_len = 2048;
    served.created = 1'700'000'000;
    served.path = "/models/fathom-tiny";
    served.version = "0.1.0";
    served.fingerprint = "fathom-0.1.0";
    return served;
  }();
  return kModel;
}

}  // namespace fathom
