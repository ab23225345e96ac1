"""A tool call with OpenAI's Python client: the call, its result, and the answer that uses it."""
import json
import os

import openai

client = openai.OpenAI(base_url=os.environ.get("FATHOM_URL", "http://127.0.0.1:8000") + "/v1",
                       api_key=os.environ.get("FATHOM_KEY", "none"))
model = client.models.list().data[0].id
tools = [{"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"], "additionalProperties": False}}}]


def get_weather(city):
    return {"city": city, "temperature": 21, "sky": "clear"}


messages = [{"role": "user", "content": "What is the weather in Paris?"}]
reply = client.chat.completions.create(model=model, messages=messages, tools=tools,
                                       tool_choice="required", temperature=0).choices[0].message
call = reply.tool_calls[0]
print(call.function.name, call.function.arguments)

result = get_weather(**json.loads(call.function.arguments))
messages += [reply.model_dump(exclude_none=True),
             {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}]
answer = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0,
                                        max_tokens=128)
print(answer.choices[0].message.content)
