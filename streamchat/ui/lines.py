"""Scored lines as text or JSON."""

import json

from streamchat.events import LineScored


def plain_line(event: LineScored) -> str:
    """Nats per token, a tab, and the line; a dash where nothing predicts it."""
    score = event.nats_per_token
    return f"{'-' if score is None else f'{score:.3f}'}\t{event.text}"


def json_line(event: LineScored) -> str:
    """One JSON object."""
    score = event.nats_per_token
    return to_json(
        {
            "event": "score",
            "line": event.line,
            "part": event.part,
            "ends_line": event.ends_line,
            "text": event.text,
            "position": event.position,
            "num_tokens": event.num_tokens,
            "nats": None if score is None else round(event.nats, 3),
            "nats_per_token": None if score is None else round(score, 4),
        }
    )


def to_json(fields: dict[str, object]) -> str:
    """One line of JSON, text as it is."""
    return json.dumps(fields, ensure_ascii=False)
