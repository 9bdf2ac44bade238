"""Questions put to a stream that it never hears of: each is asked on a fork, which is thrown away.

The stream stands inside a user turn that stays open; on the fork the question closes that turn.
"""

from streamchat.chat.template import ChatTemplate
from streamchat.chat.thinking import split_thinking
from streamchat.config import SamplingConfig
from streamchat.engine.stream import Stream
from streamchat.events import Answer, TextDelta
from streamchat.model.tokenizer import Marked


class Aside:
    """Asks.

    Args:
        template: Of the stream's turns.
        max_new_tokens: Cap on an answer.
        sampling: How answers are sampled.
        stop: Stop strings of an answer.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        max_new_tokens: int,
        sampling: SamplingConfig,
        stop: tuple[str, ...] = (),
    ) -> None:
        segments = template.segments
        self._tokenizer = template.tokenizer
        self._closing = [Marked(segments.before_answer), Marked(segments.before_thinking)]
        self._opens_thinking = template.opens_thinking
        self._max_new_tokens = max_new_tokens
        self._sampling = sampling
        self._stop = (*stop, *segments.stop)

    def ids(self, question: str) -> list[int]:
        """A question, as it stands at the end of the open turn, which it closes."""
        marked = [Marked(question, is_text=True), *self._closing]
        return self._tokenizer.encode_marked(marked, continues=True)

    def ask(self, stream: Stream, question: list[int]) -> str:
        """The answer to a question, given as ids; the stream stays as it is."""
        return self.answer(stream.fork(), question)

    def answer_about(self, stream: Stream, question: str, line: int) -> Answer:
        """The answer to a user's question, with where the stream stands; `line` is its last."""
        text = self.ask(stream, self.ids(f"\n\n{question}"))
        return Answer(question, text, stream.position, line)

    def answer(self, stream: Stream, question: list[int]) -> str:
        """The answer to a question that becomes part of the stream."""
        stream.feed(question)
        answer = stream.generate(
            max_new_tokens=self._max_new_tokens, sampling=self._sampling, stop=self._stop
        )
        events = split_thinking(answer, thinking=self._opens_thinking)
        return "".join(event.text for event in events if isinstance(event, TextDelta)).strip()
