"""An answer that must match a JSON schema, with OpenAI's Python client."""
import json
import os

import openai

client = openai.OpenAI(base_url=os.environ.get("FATHOM_URL", "http://127.0.0.1:8000") + "/v1",
                       api_key=os.environ.get("FATHOM_KEY", "none"))
model = client.models.list().data[0].id
schema = {"type": "object", "required": ["name", "count"], "additionalProperties": False,
          "properties": {"name": {"enum": ["apple", "pear"]},
                         "count": {"type": "integer", "minimum": 1, "maximum": 99}}}

answer = client.chat.completions.create(
    model=model, temperature=0,
    messages=[{"role": "user", "content": "Name a fruit and how many there are."}],
    response_format={"type": "json_schema",
                     "json_schema": {"name": "fruit", "strict": True, "schema": schema}})
fruit = json.loads(answer.choices[0].message.content)
print(fruit["count"], fruit["name"])
