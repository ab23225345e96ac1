#!/bin/sh
# Chat with curl: one answer, then the same streamed as server-sent events.
set -eu
url=${FATHOM_URL:-http://127.0.0.1:8000}
key=${FATHOM_KEY:-none}

ask() {
  curl --silent --show-error --fail-with-body --no-buffer "$url/v1/chat/completions" \
    -H "Authorization: Bearer $key" -H "Content-Type: application/json" -d "$1"
  echo
}

ask '{"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}'
ask '{"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0, "stream": true}'
