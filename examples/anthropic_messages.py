"""Messages with Anthropic's Python client: one answer, then a streamed one."""
import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ.get("FATHOM_URL", "http://127.0.0.1:8000"),
                             api_key=os.environ.get("FATHOM_KEY", "none"))
request = {"model": "fathom-tiny", "max_tokens": 64, "extra_body": {"temperature": 0},
           "messages": [{"role": "user", "content": "What is 12 + 30?"}]}

print(client.messages.create(**request).content[0].text)

with client.messages.stream(**request) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
