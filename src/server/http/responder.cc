#include "server/http/responder.h"

#include <utility>

#include "server/http/exchange.h"

namespace fathom::http {

Responder::Responder(std::shared_ptr<Exchange> exchange) : exchange_(std::move(exchange)) {}

Responder::~Responder() { exchange_->abandon(); }

bool Responder::send(Response response) { return exchange_->send(std::move(response)); }

bool Responder::start_stream(StreamHead head) { return exchange_->start_stream(std::move(head)); }

void Responder::write(std::string_view bytes) { exchange_->write(bytes); }

void Responder::end() { exchange_->end(); }

void Responder::give_up() { exchange_->give_up(); }

void Responder::on_closed(std::function<void()> callback) {
  exchange_->on_closed(std::move(callback));
}

int64_t Responder::unsent() const { return exchange_->unsent(); }

void Responder::when_sent(std::function<void()> callback) {
  exchange_->when_sent(std::move(callback));
}

bool Responder::closed() const { return exchange_->closed(); }

}  // namespace fathom::http
