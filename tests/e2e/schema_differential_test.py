#!/usr/bin/env python3
"""Random JSON schemas: each is refused, or every completion that ends validates.

    schema_differential_test.py SCHEMA_ANSWERS MODEL SCHEMAS [SEED]

Completions are random walks over the tokens that the grammar allows (schema_answers.cc), validated by an
independent implementation (jsonschema). They must be JSON without repetitions of declared keys, must
contain no markup and must not get stuck; nearly all must end.
"""
import json
import random
import subprocess
import sys

import jsonschema

ANSWERS = 4
DRAFT = jsonschema.Draft202012Validator
# Formats that both sides check.
FORMATS = ["date", "ipv4", "ipv6", "uuid", "email", "int32", "no-such-format"]
NAMES = ["a", "b", "ab", "é", "x y", "__proto__", ""]
WORDS = ["", "a", "ab", "é", "a\"b", "line\nbreak", "</think>", "1"]
PATTERNS = ["^[a-c]+$", "^a|b$", "x", "^\\d{2,4}$", "^(ab|cd)*$", "[^\"]{1,3}", "^.{0,3}$", "^$", "a{2}"]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]


class Maker:
    """Generates schemas of a few levels; most are valid, some are not."""

    def __init__(self, rng):
        self.rng = rng
        self.definitions = []

    def chance(self, share):
        return self.rng.random() < share

    def value(self):
        return self.rng.choice([None, True, False, 0, 1, -7, 2.5, 1e20, "", "a", "é\"", [], [1, "x"],
                                {}, {"a": 1}, {"a": [None]}])

    def schema(self, depth):
        rng = self.rng
        if self.chance(0.03):
            return rng.choice([True, False, {}])
        kind = rng.random()
        if kind < 0.06 and self.definitions:
            return {"$ref": "#/$defs/" + rng.choice(self.definitions)}
        if kind < 0.12:
            return {"enum": [self.value() for _ in range(rng.randint(1, 4))]}
        if kind < 0.15:
            return {"const": self.value()}
        if kind < 0.25 and depth > 0:
            return {rng.choice(["anyOf", "anyOf", "oneOf", "allOf"]):
                    [self.schema(depth - 1) for _ in range(rng.randint(1, 3))]}
        name = rng.choice(TYPES if depth > 0 else TYPES[:5])
        schema = {"type": name}
        if self.chance(0.06):
            schema["type"] = rng.sample(TYPES, rng.randint(0, 3))
        getattr(self, "add_" + name)(schema, depth)
        if self.chance(0.06):  # keywords of another type, or contradictory ones
            getattr(self, "add_" + rng.choice(TYPES))(schema, max(depth - 1, 0))
        if self.chance(0.03):
            schema.pop("type")
        if self.chance(0.03):
            schema[rng.choice(["enum", "const", "not", "if", "default", "nullable", "contains",
                               "uniqueItems"])] = self.value()
            schema["description"] = "What <think> it is."
        return schema

    def add_null(self, schema, depth):
        pass

    add_boolean = add_null

    def add_string(self, schema, depth):
        rng = self.rng
        if self.chance(0.3):
            schema["minLength"] = rng.choice([0, 1, 3, 8])
        if self.chance(0.3):
            schema["maxLength"] = rng.choice([0, 1, 3, 8, 40])
        if self.chance(0.2):
            schema["pattern"] = rng.choice(PATTERNS)
        if self.chance(0.2):
            schema["format"] = rng.choice(FORMATS)

    def add_number(self, schema, depth):
        rng = self.rng
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if self.chance(0.25):
                schema[key] = rng.choice([0, 1, -1, 5, 10, 99, -100, 1000, 0.5, -2.25, 3.0, 1e6, 1e-3])
        if self.chance(0.08):
            schema["multipleOf"] = rng.choice([1, 2, 3, 0.5, 10, 0])

    def add_integer(self, schema, depth):
        self.add_number(schema, depth)
        for key in list(schema):
            if isinstance(schema[key], float) and self.chance(0.8):
                schema[key] = int(schema[key])

    def add_array(self, schema, depth):
        rng = self.rng
        below = max(depth - 1, 0)
        if self.chance(0.8):
            schema["items"] = self.schema(below)
        if self.chance(0.2):
            schema["prefixItems"] = [self.schema(below) for _ in range(rng.randint(1, 3))]
        if self.chance(0.3):
            schema["minItems"] = rng.choice([0, 1, 2, 3, -1])
        if self.chance(0.3):
            schema["maxItems"] = rng.choice([0, 1, 2, 5])
        if self.chance(0.05):
            schema[rng.choice(["uniqueItems", "unevaluatedItems"])] = rng.choice([True, False])

    def add_object(self, schema, depth):
        rng = self.rng
        below = max(depth - 1, 0)
        names = rng.sample(NAMES, rng.randint(0, 4))
        if names or self.chance(0.5):
            schema["properties"] = {name: self.schema(below) for name in names}
        if self.chance(0.6):
            schema["required"] = [name for name in names if self.chance(0.5)]
            if self.chance(0.08):
                schema["required"].append(rng.choice(NAMES))
        if self.chance(0.3):
            schema["additionalProperties"] = rng.choice([True, False, self.schema(below)])
        if self.chance(0.06):
            schema["patternProperties"] = {rng.choice(PATTERNS): self.schema(below)}
        if self.chance(0.06):
            schema["propertyNames"] = rng.choice([{"pattern": "^[a-z]+$"}, {"maxLength": 2},
                                                  {"minLength": 1}, {"enum": ["a", "q"]}])
        if self.chance(0.12):
            schema["minProperties"] = rng.choice([0, 1, 2])
        if self.chance(0.12):
            schema["maxProperties"] = rng.choice([0, 1, 2, 4])
        if self.chance(0.03):
            schema["unevaluatedProperties"] = rng.choice([True, False])

    def document(self):
        self.definitions = self.rng.sample(["A", "B", "node"], self.rng.randint(0, 2))
        root = self.schema(3)
        if isinstance(root, dict) and self.definitions:
            root = {**root, "$defs": {name: self.schema(2) for name in self.definitions}}
        return root


def no_repeated_keys(schema):
    """Undeclared keys may be repeated, as in any JSON text; declared ones may not."""
    declared = set()

    def collect(node):
        if isinstance(node, dict):
            declared.update(node.get("properties", {}) if isinstance(node.get("properties"), dict)
                            else ())
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(schema)
    has_open = any(word in json.dumps(schema)
                   for word in ('"additionalProperties"', '"unevaluatedProperties"', "{}", "true",
                                '"propertyNames"'))

    def pairs(items):
        names = [name for name, _ in items]
        for name in set(names):
            if names.count(name) > 1 and not (has_open and name not in declared):
                raise ValueError(f"the key {name!r} comes twice")
        return dict(items)

    return pairs


def what_is_wrong(schema, validator, text):
    try:
        value = json.loads(text, object_pairs_hook=no_repeated_keys(schema))
    except ValueError as problem:
        return f"no JSON: {problem}"
    error = next(validator.iter_errors(value), None)
    return error.message if error else None


def main():
    program, model, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    rng = random.Random(seed)
    schemas = [Maker(rng).document() for _ in range(count)]
    lines = "".join(json.dumps(schema) + "\n" for schema in schemas)
    done = subprocess.run([program, model, str(ANSWERS), str(seed)], input=lines, text=True,
                          capture_output=True, check=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == count, f"{len(results)} results for {count} schemas"
    problems, refused, whole, unfinished, circular = [], 0, 0, 0, 0
    for schema, result in zip(schemas, results):
        if "refused" in result:
            refused += 1
            continue
        try:
            DRAFT.check_schema(schema)
        except jsonschema.SchemaError as error:
            problems.append((schema, f"is no schema: {error.message}"))
            continue
        validator = DRAFT(schema, format_checker=DRAFT.FORMAT_CHECKER)
        whole += len(result["answers"])
        unfinished += result["unfinished"]
        if result["markup"]:
            problems.append((schema, f"markup was allowed {result['markup']} times"))
        if result["stuck"]:
            problems.append((schema, f"{result['stuck']} answers got stuck"))
        for text in result["answers"]:
            try:
                wrong = what_is_wrong(schema, validator, text)
            except RecursionError:  # a definition is an alternative of itself: no answer from the validator
                circular += 1
                break
            if wrong:
                problems.append((schema, f"{text!r}: {wrong}"))
                break
    for schema, problem in problems[:20]:
        print(json.dumps(schema), "\n   ", problem)
    print(f"{count} schemas: {refused} refused, {whole} answers whole, {unfinished} not, "
          f"{circular} circular, {len(problems)} problems")
    assert refused < count * 0.6, "most schemas must be taken for the test to mean something"
    assert circular < count * 0.02, "schemas without the validator's answer must be few"
    assert unfinished < 0.02 * max(whole, 1), "answers must end"
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
