"""A check for schemathesis: a request that follows the document is refused only with a reason.

The document is a necessary condition: fields may exclude each other, ids be outside the vocabulary,
a prompt be too long. Such an answer is a 400 that names the field or has a code.
"""
import schemathesis


@schemathesis.check
def refusals_are_named(ctx, response, case):
    if response.status_code != 400:
        return
    error = response.json()["error"]
    # Anthropic's shape has neither; a path that is no path has no field.
    if "param" in error and case.method == "POST":
        assert error["param"] or error["code"], error
    assert len(error["message"]) > 10, error
