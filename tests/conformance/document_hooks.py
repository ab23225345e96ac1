"""What schemathesis is told of this document beyond what is written in it: a check and a hook."""
import hypothesis
import schemathesis
from schemathesis.core.parameters import ParameterLocation

# Schemathesis has Hypothesis climb towards requests that are accepted, which shrinks every better
# one and takes most of a run's time. With lengths that fit they are accepted anyway.
hypothesis.target = lambda observation, **label: observation

LONGEST = 16
# Path: where in the body the lengths of an answer are limited, the limit, the least lengths.
LENGTHS = {
    "/v1/chat/completions": (None, "max_completion_tokens", ["min_tokens"]),
    "/v1/completions": (None, "max_tokens", ["min_tokens"]),
    "/v1/messages": (None, "max_tokens", ["min_tokens"]),
    "/v1/responses": (None, "max_output_tokens", ["min_tokens"]),
    "/generate": ("sampling_params", "max_new_tokens", ["min_new_tokens", "min_tokens"]),
}


@schemathesis.check
def refusals_are_named(ctx, response, case):
    """A request that follows the document is refused only with a reason.

    The document is a necessary condition: fields may exclude each other, ids be outside the
    vocabulary, a prompt be too long. Such an answer is a 400 that names the field or has a code.
    """
    if response.status_code != 400:
        return
    error = response.json()["error"]
    # Anthropic's shape has neither; a path that is no path has no field.
    if "param" in error and case.method == "POST":
        assert error["param"] or error["code"], error
    assert len(error["message"]) > 10, error


@schemathesis.hook
def before_call(ctx, case, kwargs):
    """Lengths of an answer that fit into the context, where any would follow the document.

    Of all that do nearly none fits: nearly every request would be refused, and what is left would
    run to the context's end. Requests of the other phases, and those that break the document, stay.
    """
    meta = case.meta
    if case.path not in LENGTHS or meta is None or meta.phase.name.value != "fuzzing" or \
            meta.is_negative_at(ParameterLocation.BODY):
        return
    within, longest, least = LENGTHS[case.path]
    holder = case.body
    if within is not None:
        if holder.get(within) is None:
            holder[within] = {}
        holder = holder[within]
    if holder.get(longest) is None or holder[longest] > LONGEST:
        holder[longest] = LONGEST
    for name in least:
        if holder.get(name) is not None:
            holder[name] = min(holder[name], holder[longest])
