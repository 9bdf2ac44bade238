"""A chat template taken apart, so that each turn's new ids can be fed without the turns before it.

One short conversation of placeholders is rendered, and cut at the placeholders. That needs no
additive template: what stands between an answer and the next question is the same in a long
conversation as in a short one. The cost of a turn does not depend on the length of the chat.

Templates that refuse a system role get the system text in front of the first question. A model
without a template gets the plain format of `PLAIN`.
"""

from dataclasses import dataclass
from typing import Any

from streamchat.chat.thinking import THINK
from streamchat.errors import ModelError
from streamchat.model.tokenizer import Marked, Tokenizer

SYSTEM, QUESTION, ANSWER, NEXT = "qsystemq", "qfirstq", "qanswerq", "qnextq"
"""Placeholders: plain letters, which no template treats in a special way."""


@dataclass(frozen=True, slots=True)
class Segments:
    """What a template writes around the texts of a conversation.

    Attributes:
        before_system: Up to the system text; empty where there is none.
        before_question: From the system text, or the start, to the first question.
        before_answer: From a question to its answer.
        before_thinking: What the template adds to that when it asks for an answer, if anything.
        before_next: From an answer to the next question.
        folds_system: The system text stands in the first question.
        trims: The template strips white space around texts.
        stop: Stop strings that an answer needs beside the end tokens.
    """

    before_system: str
    before_question: str
    before_answer: str
    before_thinking: str
    before_next: str
    folds_system: bool = False
    trims: bool = False
    stop: tuple[str, ...] = ()


PLAIN = Segments(
    before_system="",
    before_question="\n\nUser: ",
    before_answer="\nAssistant:",
    before_thinking="",
    before_next="\nUser: ",
    trims=True,
    stop=("\nUser:",),
)
"""For base models: questions and answers named, one after the other."""


class ChatTemplate:
    """Ids of a conversation's pieces.

    Args:
        tokenizer: With or without a chat template.
        system: System prompt, or None for the template's own default.

    Raises:
        ModelError: If the template cannot render the simplest conversation, or writes tokens that
            the model does not have.
    """

    def __init__(self, tokenizer: Tokenizer, system: str | None) -> None:
        self.tokenizer = tokenizer
        self.system = system
        self.has_template = tokenizer.has_chat_template
        self.segments = take_apart(tokenizer, with_system=system is not None)
        source = tokenizer.chat_template_text
        self.thinks = THINK in source or tokenizer.knows(THINK)
        written = [*self.first_turn(QUESTION), *self.next_turn(NEXT), *self.thinking_ids()]
        tokenizer.check_ids(written, "its chat template writes")

    def first_turn(self, question: str) -> list[int]:
        """Ids from the start of the stream to where the first answer begins."""
        segments = self.segments
        pieces = [Marked(segments.before_system)]
        if self.system is not None:
            pieces.append(Marked(self._text(self.system), is_text=True))
        pieces += [Marked(segments.before_question), Marked(self._text(question), is_text=True)]
        pieces.append(Marked(segments.before_answer))
        ids = self.tokenizer.encode_marked(pieces, continues=False)
        bos = self.tokenizer.bos_ids()
        return ids if ids[: len(bos)] == bos else [*bos, *ids]

    def next_turn(self, question: str) -> list[int]:
        """Ids that close the answer before, and go to where the next answer begins."""
        pieces = [
            Marked(self.segments.before_next),
            Marked(self._text(question), is_text=True),
            Marked(self.segments.before_answer),
        ]
        return self.tokenizer.encode_marked(pieces, continues=True)

    @property
    def opens_thinking(self) -> bool:
        """Whether the template itself begins a thinking block when it asks for an answer."""
        return THINK in self.segments.before_thinking

    def thinking_ids(self) -> list[int]:
        """Ids that the template puts before the thinking of an answer."""
        pieces = [Marked(self.segments.before_thinking)]
        return self.tokenizer.encode_marked(pieces, continues=True)

    def pinned_ids(self) -> list[int]:
        """The ids before the first question: the same whatever is asked."""
        one, other = self.first_turn("Apple"), self.first_turn("7 zebras")
        length = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        return one[:length]

    def _text(self, text: str) -> str:
        return text.strip() if self.segments.trims else text


def take_apart(tokenizer: Tokenizer, *, with_system: bool) -> Segments:
    """Cut a template at placeholders.

    Raises:
        ModelError: If it cannot render a question, an answer and another question.
    """
    if not tokenizer.has_chat_template:
        return PLAIN if with_system else _without_lead(PLAIN)
    turns = [("user", QUESTION), ("assistant", ANSWER), ("user", NEXT)]
    try:
        if with_system:
            try:
                return _cut(tokenizer, [("system", SYSTEM), *turns])
            except _CannotRender:  # no system role: Gemma 2 and others
                folded = [("user", f"{SYSTEM}\n\n{QUESTION}"), *turns[1:]]
                return _cut(tokenizer, folded, folds_system=True)
        return _cut(tokenizer, turns)
    except _CannotRender as error:
        raise ModelError(f"the model's chat template cannot be used: {error}") from error


class _CannotRender(Exception):  # noqa: N818 - caught in this file
    """A template raised, or lost a placeholder."""


def _cut(
    tokenizer: Tokenizer, turns: list[tuple[str, str]], *, folds_system: bool = False
) -> Segments:
    text = _render(tokenizer, turns)
    has_system = SYSTEM in turns[0][1]
    before_system, rest = _split(text, SYSTEM) if has_system else ("", text)
    before_question, rest = _split(rest, QUESTION)
    before_answer, rest = _split(rest, ANSWER)
    before_next, asking = _split(rest, NEXT)
    # What asks for an answer may go on where history does not: `<think>` after the header.
    thinking = asking[len(before_answer) :] if asking.startswith(before_answer) else ""
    if not asking.startswith(before_answer):
        before_answer = asking
    # Tabs: a template may put spaces or line ends of its own around a text that it strips.
    padded = _render(tokenizer, [(role, f"\t{content}\t") for role, content in turns])
    return Segments(
        before_system=before_system,
        before_question=before_question,
        before_answer=before_answer,
        before_thinking=thinking,
        before_next=before_next,
        folds_system=folds_system,
        trims=f"\t{NEXT}\t" not in padded,
    )


def _split(text: str, placeholder: str) -> tuple[str, str]:
    before, found, after = text.partition(placeholder)
    if not found:
        raise _CannotRender(f"it drops the {placeholder.strip('q')} text")
    return before, after


def _render(tokenizer: Tokenizer, turns: list[tuple[str, str]]) -> str:
    messages: list[Any] = [{"role": role, "content": content} for role, content in turns]
    try:
        return tokenizer.render_chat(messages)
    except Exception as error:  # a template raises whatever its author wrote
        raise _CannotRender(" ".join(str(error).split())) from error


def _without_lead(segments: Segments) -> Segments:
    """The same, beginning with the question."""
    return Segments(
        before_system="",
        before_question=segments.before_question.lstrip(),
        before_answer=segments.before_answer,
        before_thinking="",
        before_next=segments.before_next,
        trims=segments.trims,
        stop=segments.stop,
    )
