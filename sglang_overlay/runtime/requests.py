"""Refuse requests whose answer DDTREE could not keep lossless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Validate = Callable[[Any], "str | None"]


def refusal(req: Any) -> str | None:
    """Return why a request is refused, or None. Names parameter, value, reason and remedy."""
    params = req.sampling_params
    stale = "it changes with every token, also inside the tree"
    exact = (
        ("frequency_penalty", params.frequency_penalty, 0.0, stale),
        ("presence_penalty", params.presence_penalty, 0.0, stale),
        ("repetition_penalty", params.repetition_penalty, 1.0, stale),
        ("min_new_tokens", params.min_new_tokens, 0, stale),
    )
    for name, value, neutral, reason in exact:
        if value != neutral:
            return f"DDTREE does not support `{name}`: {value}: {reason}; leave it at {neutral}"
    if req.custom_logit_processor is not None:
        return "DDTREE does not support `custom_logit_processor`: it may depend on the text so far; leave it out"
    return None


def refusing(validate: Validate) -> Validate:
    """Return SGLang's DFLASH request check with ours behind it."""

    def check(req: Any) -> str | None:
        return validate(req) or refusal(req)

    return check
