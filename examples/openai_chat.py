"""Chat with OpenAI's Python client: one answer, then a streamed one."""
import os

import openai

client = openai.OpenAI(base_url=os.environ.get("FATHOM_URL", "http://127.0.0.1:8000") + "/v1",
                       api_key=os.environ.get("FATHOM_KEY", "none"))
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is 12 + 30?"}]

answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
print(answer.choices[0].message.content)

for chunk in client.chat.completions.create(model=model, messages=messages, temperature=0,
                                            stream=True):
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
print()
